"""Ranks that are masked on backend nvlink: what only kernels have, memory of others, graphs, and layers of kernels.

What calls return without masked ranks is in comm/test_masks.py, which runs here too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.comm.test_masks import CASE, LAYOUTS, combine_all_modes, each_layout, options_of, pair, without
from tests.conftest import Ranks
from tests.support import emulator, mega_cases
from tests.support.cases import BF16, make_comm, make_problem, same_bits, same_routed
from tests.support.graph_cases import EXPERTS_PER_RANK, KINDS, ROUNDS, Captured, Kind, Round, Step, experts, problem_of
from tests.support.graph_cases import plan_of as plan_of_graphs
from tests.support.nvlink_cases import buffers_of
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.common import HEADER_WORDS, TURNS
from tokenloom.plan import ROUTE_LAYOUTS, align_up
from tokenloom.runtime.processes import RankContext

EMULATED = True
BACKEND = "nvlink"
PROBLEM = replace(CASE, dtype=BF16)


@on_ranks("several")
@each_layout
def test_memory_of_masked_ranks(context: RankContext, layout: str) -> None:
    """Nothing is stored there, not by an earlier dispatch's combine either; nothing they left here is read."""
    problem = make_problem(PROBLEM, context.num_ranks)
    comm = make_comm(context, BACKEND, problem.plan)
    pair(context, comm, problem, [], layout)
    options = options_of(problem, layout)
    routed, want = comm.dispatch(*problem.arguments(context), **options, copy=True), problem.dispatched(**options)
    meet(context)
    if context.rank == 0:
        before = own_memory(comm)
        meet(context)
        meet(context)
        assert all(torch.equal(a, b) for a, b in zip(before, own_memory(comm), strict=True))
        return
    comm.mask_ranks([0])
    headers = buffers_of(comm)[0].view("headers", torch.int32, (TURNS, context.num_ranks, header_words(comm), 2))
    headers[:, 0] = 0x7F7F7F  # what it may have announced since
    meet(context)
    combine_all_modes(context, comm, routed, problem, want, without(problem, [0]).topk_ids)
    for _ in range(3):
        pair(context, comm, problem, [0], layout)
    meet(context)


def meet(context: RankContext) -> None:
    torch.cuda.synchronize()
    torch.distributed.barrier(group=context.group, device_ids=[context.device.index])


def header_words(comm: tl.Communicator) -> int:
    return align_up(HEADER_WORDS + comm.plan.num_ranks + comm.plan.num_experts, 4)


def own_memory(comm: tl.Communicator) -> list[torch.Tensor]:
    return [
        buffer.view(name, torch.uint8, (size,)).clone()
        for buffer in buffers_of(comm)
        for name, (_, size) in buffer.layout.places.items()
    ]


# -- calls as servers make them ---------------------------------------------------------------------------------


@on_ranks("several")
def test_rows_that_a_masked_rank_has_sent_ahead(context: RankContext) -> None:
    """Nobody reads them, and they are none of those that come later."""
    problem = make_problem(PROBLEM, context.num_ranks)
    comm = make_comm(context, BACKEND, problem.plan)
    options = options_of(problem, "expert")
    routed, want = comm.dispatch(*problem.arguments(context), **options, copy=True), problem.dispatched(**options)
    combine_all_modes(context, comm, routed, problem, want, problem.topk_ids)
    meet(context)
    if context.rank == 0:
        meet(context)
        meet(context)
        return
    places = [
        buffer.view(name, torch.uint8, (size,))
        for buffer in buffers_of(comm)
        for name, (_, size) in buffer.layout.places.items()
        if name.startswith("combine_recv") and name != "combine_recv" and name != "combine_recv_weights"
    ]
    assert len(places) >= TURNS
    for place in places:
        place.zero_()
    torch.cuda.synchronize()
    comm.mask_ranks([0])
    assert all((place == 0xFF).all() for place in places)
    meet(context)
    for _ in range(TURNS):
        combine_all_modes(context, comm, routed, problem, want, without(problem, [0]).topk_ids)
    meet(context)


def expected(context: RankContext, step: Step, round_: Round, masked: list[int]) -> tuple[reference.Routed, Any]:
    """What the reference says without these ranks."""
    kind, num_ranks, rank = step.kind, context.num_ranks, context.rank
    problem = without(problem_of(round_, kind, num_ranks), masked)
    want = problem.dispatched(**kind.dispatch_options, capacity=step.capacity, bounded=True)
    offsets = [torch.tensor(each.expert_offsets or [0], dtype=torch.int32) for each in want]
    by_expert = kind.layout == "expert"
    ys = [
        experts(kind.layout, each.tokens, each.scales, start if by_expert else None, of, EXPERTS_PER_RANK)
        for of, (each, start) in enumerate(zip(want, offsets, strict=True))
    ]
    weights = problem.topk_weights if kind.layout in ROUTE_LAYOUTS else None
    return want[rank], reference.combine(problem.plan, ys, want, problem.topk_ids, weights, mode=kind.mode)[rank]


def same_step(context: RankContext, step: Step, result: Any, round_: Round, masked: list[int]) -> None:
    want_routed, want_out = expected(context, step, round_, masked)
    same_routed(result[0], want_routed, step.comm.plan, bounded=True)
    same_bits(result[1], want_out, "out")


@on_ranks("several")
@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.name) for kind in KINDS])
def test_bounded_calls(context: RankContext, kind: Kind) -> None:
    """Of every kind: in halves, per route, quantised, to tensors of the caller's. Then as CUDA graphs, which were
    captured before the mask and are replayed after it."""
    with make_comm(context, BACKEND, plan_of_graphs(context.num_ranks), checked=False) as comm:
        step = Step(context, comm, kind)
        step.prepare(ROUNDS)
        graph = None if emulator.ON else Captured(step)
        for gone in range(context.num_ranks):
            masked = list(range(gone))
            for round_ in ROUNDS[:3]:
                step.load(round_)
                same_step(context, step, step(), round_, masked)
                if graph is not None:
                    graph.replay()
                    same_step(context, step, graph.results, round_, masked)
            comm.check()
            if context.rank == gone:
                return
            if gone + 1 < context.num_ranks:
                comm.mask_ranks([gone])


@pytest.mark.gpu
def test_no_mask_in_a_capture(several: Ranks) -> None:
    """It would be a part of the graph."""
    if emulator.ON:
        pytest.skip("no graphs there")
    several.run(check_capture)


def check_capture(context: RankContext) -> None:
    with make_comm(context, BACKEND, plan_of_graphs(context.num_ranks), checked=False) as comm:
        step = Step(context, comm, KINDS[0])

        def masks() -> None:
            if torch.cuda.is_current_stream_capturing():
                for call in (comm.mask_ranks, comm.unmask_ranks):
                    with pytest.raises(InvalidArgument, match="outside of the capture"):
                        call([0])
            step()

        Captured(masks).replay()
        comm.check()
        assert comm.masked_ranks() == []


# -- ranks that come back ---------------------------------------------------------------------------------------


@on_ranks("several")
def test_back_again(context: RankContext) -> None:
    """A rank makes its communicator again while the others take it back: all calls are as before the mask, on new
    memory. What was dispatched before is of no use, since the rank knows nothing of it."""
    problem = make_problem(PROBLEM, context.num_ranks)
    comm = make_comm(context, BACKEND, problem.plan)
    for turn in range(2):
        for layout in LAYOUTS:
            pair(context, comm, problem, [], layout)
        if context.rank == 0:
            comm.close()
            comm = make_comm(context, BACKEND, problem.plan, rejoin=True)
        else:
            comm.mask_ranks([0])
            pair(context, comm, problem, [0], "token")
            before = comm.dispatch(*problem.arguments(context))
            comm.unmask_ranks([0])
            if turn == 0:
                with pytest.raises(InvalidArgument, match="before unmask_ranks"):
                    comm.combine(before.tokens, before)
        if turn == 0 and context.rank == 0:
            with pytest.raises(tl.PeerError):
                comm.dispatch(*problem.arguments(context))
    for layout in LAYOUTS:
        pair(context, comm, problem, [], layout)


@on_ranks("several")
def test_rows_again(context: RankContext) -> None:
    """Other rows of a dispatch from before the mask come to the places of that dispatch, zeros from masked ranks."""
    problem = make_problem(PROBLEM, context.num_ranks)
    comm = make_comm(context, BACKEND, problem.plan)
    for layout in ("token", "expert"):
        masked = list(range(len(comm.masked_ranks()) + 1))
        routed = comm.dispatch(*problem.arguments(context), layout=layout, copy=True)
        want = without(problem, comm.masked_ranks()).dispatched(layout)[context.rank]
        if context.rank == masked[-1] or len(masked) == context.num_ranks:
            return
        comm.mask_ranks(masked)
        x = problem.arguments(context)[0]
        assert isinstance(x, torch.Tensor)
        rows = want.tokens.clone()
        for key, place in want.rows.items():
            if key[0] in masked:
                rows[place] = 0
        same_bits(comm.dispatch_again(2 * x, routed), 2 * rows, layout)


# -- a layer ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "shared expert"])
def test_mega(several: Ranks, name: str) -> None:
    """A MegaMoE goes on as if routes to masked ranks were -1."""
    if emulator.ON:
        pytest.skip("GEMMs need a GPU")
    several.run(check_mega, mega_cases.CASES[name])


def check_mega(context: RankContext, case: mega_cases.Case) -> None:
    layer = mega_cases.make_layer(case, context.num_ranks, context.device)
    with mega_cases.make_mega(context, case, layer) as mega:
        given = mega_cases.inputs(case, layer, context.rank)
        mega_cases.assert_near(mega(*given), mega_cases.expected(case, layer, context.rank))
        mega.check()
        last = context.num_ranks - 1
        if context.rank == last:
            return
        mega.comm.mask_ranks([last])
        ids = [torch.where(each // case.experts_per_rank == last, -1, each) for each in layer.ids]
        want = mega_cases.expected(case, replace(layer, ids=ids), context.rank)
        for _ in range(3):
            mega_cases.assert_near(mega(*given), want)
        mega.check()
