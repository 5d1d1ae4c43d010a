"""The kernel that pulls experts, on a GPU or without one: peers' rows of all tensors, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.one_gpu import DEVICE, EMULATED, EmulatedKernel, make_kernel, needs_one_gpu, run
from tests.support import emulator
from tokenloom.kernels.pull.launch import PullExpertsVariant

RANKS, RANK, SLOTS = 3, 1, 3
BY_PLACEMENT = [[0, 1, -1], [1, -1, -1], [3, 2, -1]]
"""Expert 1 has two slots, of which the first would give."""
SIZES = (16 * 700, 4, 36, 16)
"""Bytes of a slot: more than all threads copy at once, and some that no units of 16 bytes are."""


def pulled(batch: list[int], emulated: bool, blocks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the kernel on rank 1: the memory of all ranks before, and behind it."""
    device: Any = "cpu" if emulated else DEVICE
    begins, total = [], 0
    for size in SIZES:
        begins.append(total)
        total += -(-size * SLOTS // 256) * 256
    generator = torch.Generator().manual_seed(len(batch))
    memory = [
        torch.randint(256, (total + 16,), dtype=torch.uint8, generator=generator).to(device) for _ in range(RANKS)
    ]
    memory = [each[-each.data_ptr() % 16 :][:total] for each in memory]
    before = [each.cpu().clone() for each in memory]

    def numbers(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    experts = [expert for row in BY_PLACEMENT for expert in row]
    of_expert = [[slot for slot, each in enumerate(experts) if each == expert] for expert in range(4)]
    starts = [0]
    for each in of_expert:
        starts.append(starts[-1] + len(each))
    now = [expert for rank, row in enumerate(BY_PLACEMENT) for expert in (batch if rank == RANK else row)]
    spec = PullExpertsVariant(SLOTS).spec()
    kernel: Any = EmulatedKernel(spec, 0) if emulated else make_kernel(spec)
    tensors = {
        "peers": numbers([each.data_ptr() for each in memory], torch.int64),
        "parts": numbers([[begin, size] for begin, size in zip(begins, SIZES, strict=True)], torch.int64),
        "slot_experts": numbers(now),
        "experts": numbers(experts),
        "starts": numbers(starts),
        "slots": numbers([slot for each in of_expert for slot in each]),
    }
    for name, tensor in tensors.items():
        setattr(kernel.args, name, tensor.data_ptr())
    kernel.args.num_parts, kernel.args.rank = len(SIZES), RANK
    if emulated:
        kernel.launch(blocks, 0)
    else:
        run(kernel, blocks)
    wanted = [each.clone() for each in before]
    for slot, expert in enumerate(batch):
        if expert >= 0 and BY_PLACEMENT[RANK][slot] < 0:
            source = of_expert[expert][0]
            for begin, size in zip(begins, SIZES, strict=True):
                row = before[source // SLOTS][begin + source % SLOTS * size :][:size]
                wanted[RANK][begin + slot * size :][:size] = row
    return wanted, [each.cpu() for each in memory]


def check(emulated: bool, blocks: int) -> None:
    for batch in ([1, -1, -1], [1, 2, 3], [1, -1, 0], [1, 0, -1]):
        for want, found in zip(*pulled(batch, emulated, blocks), strict=True):
            assert torch.equal(found, want), batch


class TestKernel:
    pytestmark = needs_one_gpu

    @pytest.mark.parametrize("blocks", [1, 5])
    def test_rows(self, blocks: int) -> None:
        """No slot, one or both; experts of ranks before and behind this one. Nothing else changes."""
        check(EMULATED, blocks)


@pytest.mark.skipif(emulator.CXX is None, reason="no g++")
def test_on_the_emulator() -> None:
    """The same wherever tests run."""
    check(True, 2)
