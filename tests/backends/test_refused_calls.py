"""Backend "nvlink": calls that some rank refuses, between calls that others make meanwhile."""

from __future__ import annotations

import pytest
import torch

import tokenloom as tl
from tests.comm.test_open_calls import is_odd, works
from tests.comm.test_pending import batches
from tests.support.cases import make_comm, same_bits
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""


@on_ranks("hoppers")
def test_a_fault_of_halves_that_are_received_late(context: RankContext) -> None:
    """The rank at fault opens the call and hears of it. It does not wait for those that make another call before they
    receive.
    """
    problems = batches(context.num_ranks)
    with make_comm(context, "nvlink", problems[0].plan, checked=False) as comm, torch.no_grad():
        routed = comm.dispatch(*problems[0].arguments(context), copy=True)
        want = comm.combine(routed.tokens, routed)
        x, ids, weights = problems[1].arguments(context)
        if is_odd(context, alike=False):
            with pytest.raises(tl.DtypeMismatch):
                comm.send_dispatch(x, ids.to(torch.int16), weights)
            same_bits(comm.combine(routed.tokens, routed), want.cpu(), "out")
        else:
            pending = comm.send_dispatch(x, ids, weights)
            same_bits(comm.combine(routed.tokens, routed), want.cpu(), "out")
            with pytest.raises(tl.PeerError, match=r"topk_ids is torch\.int16"):
                pending.receive()
        works(context, comm, problems[2])
