"""The GPU that tests of single kernels run on: a real one, or an emulated one (tests/support/emulator/plugin.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch

from tests.conftest import WHY_NO_HOPPER
from tests.support import emulator
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel
from tokenloom.runtime import kernel_reports

EMULATED = emulator.ON
DEVICE = "cpu" if EMULATED else "cuda:0"
SHORT_S, LONG_S = (0.02, 20.0) if EMULATED else (0.3, 30.0)
"""A deadline that shall expire, and one that shall not. To the emulator a turn of a fiber is a nanosecond."""
STUCK_S = 40.0

needs_one_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(WHY_NO_HOPPER is not None and not EMULATED, reason=str(WHY_NO_HOPPER)),
]
"""Marks of the tests."""
_launches: Iterator[int] = count()


class EmulatedKernel:
    """Stands for Kernel. A launch returns when the kernel is over."""

    def __init__(self, spec: KernelSpec, device_index: int) -> None:
        self.spec, self.args, self.turns = spec, spec.args(), 0

    def launch(self, blocks: int, stream: int) -> None:
        group, began = emulator.ranks(1), time.monotonic()
        gpu = emulator.Emulator(group.folder, 1, 1000 * group.seed + next(_launches))
        gpu.launch(0, self.spec, self.args, blocks)
        first = gpu.now()
        while gpu.run():
            assert time.monotonic() - began < STUCK_S, "the kernel is stuck"
        self.turns = gpu.now() - first


def make_kernel(spec: KernelSpec) -> Any:
    """A Kernel, compiled and loaded."""
    return EmulatedKernel(spec, 0) if EMULATED else Kernel(spec, 0)


def make_reports(num_records: int) -> tuple[kernel_reports.FaultFlag, kernel_reports.CallRecords]:
    """Where rank 0's kernels report to."""
    device = torch.device(DEVICE)
    if not EMULATED:
        return kernel_reports.FaultFlag(device, 0), kernel_reports.CallRecords(device, num_records)
    with mock.patch.object(kernel_reports, "_pinned", lambda *shape: torch.zeros(shape, dtype=torch.int32)):
        return kernel_reports.FaultFlag(device, 0), kernel_reports.CallRecords(device, num_records)


def run(kernel: Any, blocks: int) -> float:
    """Launch the kernel and wait for its end. Returns: how long it took, in seconds of the deadlines."""
    if EMULATED:
        kernel.launch(blocks, 0)
        return kernel.turns * 1e-9
    began = time.perf_counter()
    kernel.launch(blocks, torch.cuda.current_stream(torch.device(DEVICE)).cuda_stream)
    torch.cuda.synchronize()
    return time.perf_counter() - began
