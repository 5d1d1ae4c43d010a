"""Counts of all ranks, by the kernel that balanced dispatches begin with, on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support import emulator
from tests.support.cases import make_comm
from tests.support.emulator.group import here
from tests.support.on_ranks import on_ranks
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")
PLAN = Plan(4, 8, 8, 2, 4)


def counts_of(rank: int, call: int) -> torch.Tensor:
    return torch.arange(PLAN.num_experts) * 1000 + 100 * call + rank


@on_ranks("emulated_four")
@pytest.mark.parametrize("gone", [None, 0, 3])
def test_counts(context: RankContext, gone: int | None) -> None:
    """Many calls without a host between them, more than headers have turns; zeros of a masked rank."""
    comm = make_comm(context, "nvlink", PLAN, spare_slots=2, balance="batch", checked=False)
    backend: Any = comm.engine._backend
    for call in range(4):  # whose headers stay where they are
        backend.gather_counts(None, counts_of(context.rank, call))
    comm.check()
    if gone is not None:
        if context.rank == gone:
            return
        comm.mask_ranks([gone])
    here.group.emulator.slow_down(1, 20)  # its counts come long after its headers
    found = [backend.gather_counts(None, counts_of(context.rank, call)) for call in range(9)]
    for call, (table, absent) in enumerate(found):
        want = torch.stack([counts_of(rank, call) * (rank != gone) for rank in range(4)])
        assert torch.equal(table.long(), want)
        assert absent == ({gone} - {None})
    comm.check()


@on_ranks("emulated_four")
def test_a_fault(context: RankContext) -> None:
    """A rank with a fault of its own tells it here: the others get zeros, and hear of it as ever."""
    comm = make_comm(context, "nvlink", PLAN, spare_slots=2, balance="batch", checked=False)
    x, ids = torch.zeros(3, PLAN.hidden), torch.zeros(3, PLAN.top_k, dtype=torch.int64)
    comm.dispatch(x, ids, layout="slots")  # the first one makes memory, for which all ranks wait
    for _ in range(3):
        if context.rank == 2:
            with pytest.raises(tl.ShapeMismatch):
                comm.dispatch(x[:, 1:], ids, layout="slots")
        else:
            routed = comm.dispatch(x, ids, layout="slots")  # nobody waits for what came of it
            assert not routed.expert_counts.any()
            with pytest.raises(tl.PeerError, match="rank 2"):
                comm.check()
        routed = comm.dispatch(x, ids, layout="slots")
        assert int(routed.expert_counts.sum()) <= 4 * ids.numel()
        comm.check()
