"""Flags that only some calls raise count in 32 bits. What is old is forgotten before the count comes round to it.

One GPU is rank 0 of two; the test plays the other one.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.one_gpu import DEVICE, needs_one_gpu
from tests.kernels.silent_peer import Rank0, error_of, int32, signed
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.common import MAX_BLOCKS
from tokenloom.plan import Plan

pytestmark = needs_one_gpu
EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""

PLAN = Plan(num_ranks=2, num_experts=4, hidden=256, top_k=2, max_tokens_per_rank=64)
FORGETS = 2**30
"""Calls after which kernels forget old flags; kForgets of device/transport/call.cuh."""
KEPT, FORGOTTEN = (-3, -1, 0, 1, 8), (9, 10, 1000, FORGETS, FORGETS + 8, 2**31 - 1)
"""Ages of flags in calls. Ranks that are ahead have raised the first ones. What is kept is FORGETS older next time."""


def after_a_call(epoch: int, name: str) -> list[int]:
    """The flags of a part of the control buffer, of these ages before a call, behind it."""
    rank0 = Rank0(PLAN, epoch=epoch)
    blocks = torch.full((3 * MAX_BLOCKS,), 7, dtype=torch.int32, device=DEVICE)
    kernel = rank0.kernel(BarrierVariant(PLAN))
    opened = int32([0])
    kernel.args.opened, kernel.args.call.block_flags = opened.data_ptr(), blocks.data_ptr()
    flags = rank0.words(name)
    for place, age in enumerate((*KEPT, *FORGOTTEN)):
        flags[place] = signed((epoch - age) % 2**32)
    rank0.open_by_rank_1([])
    assert rank0.run(kernel, 1) is None
    assert error_of(rank0) is None
    assert opened.tolist() == [1]
    assert blocks.tolist() == [0] * 2 * MAX_BLOCKS + [7] * MAX_BLOCKS, "those of blocks are for one call"
    assert not flags[len(KEPT) + len(FORGOTTEN) :].any()
    return [value % 2**32 for value in flags[: len(KEPT) + len(FORGOTTEN)].tolist()]


@pytest.mark.parametrize("name", ["done_flags", "row_flags", "chunk_flags"])
@pytest.mark.parametrize("epoch", range(FORGETS // 2, 2**32, FORGETS))
def test_old_flags_are_forgotten(epoch: int, name: str) -> None:
    assert after_a_call(epoch, name) == [(epoch - age) % 2**32 for age in KEPT] + [0] * len(FORGOTTEN)


@pytest.mark.parametrize("epoch", [FORGETS // 2 - 1, FORGETS // 2 + 1, FORGETS, 5])
def test_other_calls_leave_them(epoch: int) -> None:
    assert after_a_call(epoch, "row_flags") == [(epoch - age) % 2**32 for age in (*KEPT, *FORGOTTEN)]
