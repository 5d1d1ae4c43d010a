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
NO_SHARES = [[0, 0, 5, -1]] * 2
"""What lies behind the shares of a batch means nothing."""
SIZES = (16 * 700, 4, 36, 16)
"""Bytes of a slot: more than all threads copy at once, and some that no units of 16 bytes are."""

Memory = list[torch.Tensor]


def pulled(
    shares: list[tuple[int, int]], emulated: bool, blocks: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the kernel on rank 1: the memory of all ranks as it should be behind it, and as it is.

    Args:
        shares: the slot and the target of each.
    """
    device: Any = "cpu" if emulated else DEVICE
    begins, total = [], 0
    for size in SIZES:
        begins.append(total)
        total += -(-size * SLOTS // 256) * 256
    generator = torch.Generator().manual_seed(len(shares))
    memory = [
        torch.randint(256, (total + 16,), dtype=torch.uint8, generator=generator).to(device) for _ in range(RANKS)
    ]
    memory = [each[-each.data_ptr() % 16 :][:total] for each in memory]
    before = [each.cpu().clone() for each in memory]

    def numbers(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    experts = [expert for row in BY_PLACEMENT for expert in row]
    spec = PullExpertsVariant(SLOTS).spec()
    kernel: Any = EmulatedKernel(spec, 0) if emulated else make_kernel(spec)
    tensors = {
        "peers": numbers([each.data_ptr() for each in memory], torch.int64),
        "parts": numbers([[begin, size] for begin, size in zip(begins, SIZES, strict=True)], torch.int64),
        "experts": numbers(experts),
        "shares": numbers([*([slot, 0, target, -1] for slot, target in shares), *NO_SHARES]),
        "num_shares": numbers([len(shares)]),
    }
    for name, tensor in tensors.items():
        setattr(kernel.args, name, tensor.data_ptr())
    kernel.args.num_parts, kernel.args.rank = len(SIZES), RANK
    if emulated:
        kernel.launch(blocks, 0)
    else:
        run(kernel, blocks)
    wanted = [each.clone() for each in before]
    for source, target in shares:
        if target // SLOTS == RANK and experts[target] < 0:
            for begin, size in zip(begins, SIZES, strict=True):
                row = before[source // SLOTS][begin + source % SLOTS * size :][:size]
                wanted[RANK][begin + target % SLOTS * size :][:size] = row
    return wanted, [each.cpu() for each in memory]


def check(emulated: bool, blocks: int) -> None:
    for shares in ([], [(6, 5)], [(0, 4), (7, 5)], [(7, 5), (1, 3), (6, 2)]):
        for want, found in zip(*pulled(shares, emulated, blocks), strict=True):
            assert torch.equal(found, want), shares


class TestKernel:
    pytestmark = needs_one_gpu

    @pytest.mark.parametrize("blocks", [1, 5])
    def test_rows(self, blocks: int) -> None:
        """No slot, one or both; from ranks before and behind this one; and shares that bring nothing here."""
        check(EMULATED, blocks)


@pytest.mark.skipif(emulator.CXX is None, reason="no g++")
def test_on_the_emulator() -> None:
    """The same wherever tests run."""
    check(True, 2)
