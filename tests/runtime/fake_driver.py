"""A CUDA driver for symmetric memory on CPU ranks: real bytes, made-up handles, and a list of what was called."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from tokenloom.runtime import symmetric_memory

OK = 0
OUT_OF_MEMORY = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")
REFUSED = SimpleNamespace(name="CUDA_ERROR_REFUSED")


class FakeDriver:
    """Memory of this rank and its mappings of other ranks' memory.

    Attributes:
        memory: what is allocated, by address. mapped: addresses of other ranks' memory.
        calls: names of the functions that were called. failing: those that refuse to work.
    """

    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY)
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUipcMemHandle = SimpleNamespace

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.mapped: list[int] = []
        self.calls: list[str] = []
        self.failing: dict[str, Any] = {}

    def _answer(self, name: str, value: Any = None) -> tuple[Any, Any]:
        self.calls.append(name)
        return self.failing.get(name, OK), value

    def cuMemAlloc(self, num_bytes: int) -> tuple[Any, Any]:
        if "cuMemAlloc" in self.failing:
            return self._answer("cuMemAlloc")
        content = ctypes.create_string_buffer(b"\xff" * num_bytes, num_bytes)
        self.memory[ctypes.addressof(content)] = content
        return self._answer("cuMemAlloc", ctypes.addressof(content))

    def cuMemFree(self, address: int) -> tuple[Any]:
        status, _ = self._answer("cuMemFree")
        if status == OK:
            del self.memory[address]
        return (status,)

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, Any]:
        assert address in self.memory
        return self._answer("cuIpcGetMemHandle", SimpleNamespace(reserved=address.to_bytes(64, "little")))

    def cuIpcOpenMemHandle(self, handle: Any, flag: int) -> tuple[Any, Any]:
        status, _ = self._answer("cuIpcOpenMemHandle")
        address = int.from_bytes(handle.reserved, "little") + 1
        if status == OK:
            self.mapped.append(address)
        return status, address

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any]:
        status, _ = self._answer("cuIpcCloseMemHandle")
        if status == OK:
            self.mapped.remove(address)
        return (status,)

    @property
    def is_clean(self) -> bool:
        """Whether all that was taken was given back."""
        return not self.memory and not self.mapped


def tensor_over(memory: Any, device: torch.device) -> torch.Tensor:
    """As torch does it on a GPU: the storage holds the object whose memory it is."""
    memory.__array_interface__ = memory.__cuda_array_interface__
    return torch.from_numpy(np.asarray(memory))


@contextmanager
def no_device(device: torch.device) -> Iterator[None]:
    yield


@contextmanager
def fake_driver() -> Iterator[FakeDriver]:
    """Symmetric memory in this process runs on the fake."""
    driver = FakeDriver()
    with (
        mock.patch.object(symmetric_memory, "load_driver", return_value=driver),
        mock.patch.object(symmetric_memory, "_tensor_over", tensor_over),
        mock.patch.object(symmetric_memory, "_on", no_device),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 0)),
    ):
        yield driver
