"""What stands for the driver's tensor maps on the emulator, and for GPUs of a few SMs, for GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tokenloom.inference import nvlink_experts
from tokenloom.jit.kernel import TensorMap
from tokenloom.kernels.gemm import launch

SMS = 4
"""Two clusters, so that tiles go to several."""


def tensor_map(tensor: torch.Tensor, box: tuple[int, ...], swizzle: bool = False) -> TensorMap:
    """Write down what tensor.cuh of the emulator asks of a map; see :func:`tokenloom.jit.kernel.tensor_map`."""
    depth, height, width = (1, *tensor.shape)[-3:]
    strides = (0, *tensor.stride())[-3:-1]
    found = TensorMap()
    words = (tensor.data_ptr(), tensor.element_size(), width, height, depth, box[0], box[1], int(swizzle))
    words += tuple(stride * tensor.element_size() for stride in strides)
    found.word[: len(words)] = words
    return found


class SideStream:
    """A stream beside that of a rank. What goes to either runs in the order in which it comes."""

    cuda_stream = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None:
        """Nothing: see above."""


def stand_ins() -> list[tuple[Any, str, Any]]:
    """What launches of GEMMs ask for: (owner, name, value)."""
    gpu = SimpleNamespace(multi_processor_count=SMS)
    return [
        (launch, "tensor_map", tensor_map),
        (torch.cuda, "get_device_properties", lambda device: gpu),
        (torch.cuda, "Stream", SideStream),
        (nvlink_experts, "current_handle", lambda device: 0),
    ]


@contextmanager
def one_gpu() -> Iterator[None]:
    """Inside, GEMMs can be launched by themselves."""
    with ExitStack() as stack:
        for owner, name, value in stand_ins():
            stack.enter_context(mock.patch.object(owner, name, value))
        stream = mock.Mock(return_value=SimpleNamespace(cuda_stream=0))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", stream))
        yield
