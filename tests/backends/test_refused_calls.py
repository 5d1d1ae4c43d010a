"""Backend "nvlink": calls that some rank refuses, between calls that others make meanwhile."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.comm.test_open_calls import is_odd, works
from tests.comm.test_pending import batches
from tests.support.cases import make_comm, same_bits
from tests.support.on_ranks import on_ranks
from tokenloom.backends.peers import buffers
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


def dispatched_and_checked(comm: tl.Communicator, *tensors: torch.Tensor, **options: Any) -> None:
    comm.dispatch(*tensors, **options)
    comm.check()


@on_ranks("hoppers")
def test_memory_that_is_made_between_refused_halves(context: RankContext) -> None:
    """A half is on its way that one rank means otherwise. Then a call makes the first memory in which rows say that
    they are here, of which that half knew nothing. What is wrong with the half is still heard, and calls go on.
    """
    problem = batches(context.num_ranks)[0]
    with mock.patch.object(buffers, "EAGER_ROWS", 0):  # nothing is eager, so that memory comes late
        comm = make_comm(context, "nvlink", problem.plan)
    with comm, torch.no_grad(), mock.patch.object(buffers, "EAGER_ROWS", 0):
        x, ids, weights = problem.arguments(context)
        routed = comm.dispatch(x, ids, weights, layout="token", copy=True)
        comm.send_combine(routed.tokens, routed).receive()  # makes its own memory
        is_other = context.num_ranks > 1 and context.rank == 0
        sent = comm.send_combine(routed.tokens, routed, out_dtype=torch.bfloat16 if is_other else None)
        sparse = {"layout": "slots", "capacity": 4 * context.num_ranks * problem.plan.max_tokens_per_rank}
        if context.num_ranks > 1:
            with pytest.raises(tl.PlanMismatch, match="out_dtype"):
                dispatched_and_checked(comm, x, ids, weights, **sparse)
        with suppress(tl.PlanMismatch):  # the same again, if nobody has been told
            sent.receive()
        comm.combine(routed.tokens, routed)
        first = comm.dispatch(x, ids, weights, **sparse, copy=True)
        again = comm.dispatch(x, ids, weights, **sparse, copy=True)
        same_bits(again.slot_ranges, first.slot_ranges.cpu(), "slot_ranges")
        comm.check()
