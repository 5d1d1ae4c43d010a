"""Combine on every backend: bit for bit what the reference says, in every order, rounding and dtype."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    RANKS_PER_NODE,
    Case,
    Problem,
    case_params,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    same_bits,
    sums_for,
)
from tests.support.on_ranks import on_ranks
from tests.support.wire import count_wire
from tokenloom import reference
from tokenloom.plan import ROUTE_LAYOUTS
from tokenloom.runtime.processes import RankContext

Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]
"""Of y, on the wire, of the result."""

# -- against the reference --------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.slow_on(1, 4)
@each_backend
@pytest.mark.parametrize("case", case_params())
def test_combine(ranks: Ranks, backend: str, case: Case) -> None:
    """Every case in every layout and mode, with the dtypes that layers use."""
    layouts = [("token", 1), ("rank", 1), ("expert", 1), ("expert", 4), ("slots", 1)]
    ranks.run(check_case, backend, case, layouts, [(BF16, None, None), (FP32, BF16, FP32)])


ALL_DTYPES: list[Dtypes] = [
    *product([BF16, FP16, FP32], [None, BF16, FP16, FP32], [None, BF16, FP16, FP32]),
    *product([FP64], [None, BF16, FP32], [None, FP16, FP32]),
]


@pytest.mark.slow
@each_backend
@pytest.mark.parametrize("case", case_params(["descending-ranks"]))
def test_dtypes(ranks: Ranks, backend: str, case: Case) -> None:
    """Every combination of the dtypes of y, wire and result, on sums of many terms."""
    ranks.run(check_case, backend, case, [("expert", 1)], ALL_DTYPES)


def check_case(
    context: RankContext, backend: str, case: Case, layouts: list[tuple[str, int]], dtypes: list[Dtypes]
) -> None:
    problem = make_problem(case, context.num_ranks)
    comm = make_comm(context, backend, problem.plan, **nodes_for(context, backend))
    for layout, alignment in layouts:
        options: dict[str, Any] = {"layout": layout, "alignment": alignment}
        if layout == "slots":
            options["capacity"] = problem.rows_needed("slots") + 1
        routed = comm.dispatch(*problem.arguments(context), **options)
        want = problem.dispatched(**options)
        for each in dtypes:
            if backend == "nvlink" and each[0] == FP64:
                continue  # its kernels have no float64
            check_combine(context, comm, problem, routed, want, each)
    if problem.xs[0].dtype in (BF16, FP32):
        check_bounded(context, comm, problem)


def nodes_for(context: RankContext, backend: str) -> dict[str, Any]:
    """Options that make several nodes, where there are ranks enough and the backend serves them."""
    return {} if backend == "nvlink" or context.num_ranks < 4 else {"ranks_per_node": RANKS_PER_NODE}


def check_combine(
    context: RankContext,
    comm: tl.Communicator,
    problem: Problem,
    routed: tl.Routed,
    want: list[reference.Routed],
    dtypes: Dtypes,
) -> None:
    """All modes that the layout has. Whatever holds no row is NaN in y, so reading it shows."""
    y_dtype, wire_dtype, out_dtype = dtypes
    ys = expert_rows(problem, want, y_dtype)
    y = ys[context.rank].to(context.device)
    # The reference of this rank's tokens alone: the others' are compared on their own ranks.
    own_ids = [ids if rank == context.rank else ids[:0] for rank, ids in enumerate(problem.topk_ids)]
    expert = routed.layout in ROUTE_LAYOUTS
    nodes = comm.engine.ranks.topology.nodes
    for mode in ("per_rank", "per_node", "per_route") if expert else ("per_rank", "per_node"):
        for weighted in (None, True, False) if expert else (None,):
            if weighted is not False and expert and problem.topk_weights is None:
                continue
            weights = problem.topk_weights if expert and weighted is not False else None
            options: dict[str, Any] = {"mode": mode, "wire_dtype": wire_dtype, "out_dtype": out_dtype}
            outs = reference.combine(problem.plan, ys, want, own_ids, weights, **options, nodes=nodes)
            out = comm.combine(y, routed, weighted=weighted, **options)
            same_bits(out, outs[context.rank], f"{routed.layout}, {options}, weighted={weighted}")


def check_bounded(context: RankContext, comm: tl.Communicator, problem: Problem) -> None:
    """Rows beyond num_rows are never read: they are NaN in y."""
    for layout, alignment in (("token", 1), ("rank", 1), ("expert", 4)):
        options: dict[str, Any] = {"layout": layout, "alignment": alignment}
        if layout != "rank":
            options["capacity"] = problem.rows_needed(layout, alignment) + 3
        routed = comm.dispatch(*problem.arguments(context), **options, sizes="bounded")
        check_combine(context, comm, problem, routed, problem.dispatched(**options, bounded=True), (BF16, None, None))


@pytest.mark.sampled(3)
@each_backend
@pytest.mark.parametrize("mode", ["per_rank", "per_route", "per_node"])
def test_sums_by_hand(ranks: Ranks, backend: str, mode: str) -> None:
    """Literals that show the order of a sum, a fused multiply-add, or a rounding too many or too few."""
    if not sums_for(ranks.num_ranks):
        pytest.skip("no sums are written out for this many ranks")
    ranks.run(check_sums, backend, mode)


def check_sums(context: RankContext, backend: str, mode: str) -> None:
    for example in sums_for(context.num_ranks):
        if backend == "nvlink" and example.y_dtype == FP64:
            continue  # its kernels have no float64
        problem = example.problem()
        comm = make_comm(context, backend, problem.plan, **nodes_for(context, backend))
        if mode == "per_node" and context.num_ranks == 4 and comm.engine.ranks.topology.num_nodes == 1:
            continue  # worked out for two nodes
        routed = comm.dispatch(*problem.arguments(context))
        y = example.rows(problem.dispatched("expert"))[context.rank].to(context.device)
        out = comm.combine(y, routed, mode=mode, wire_dtype=example.wire_dtype, out_dtype=example.out_dtype)
        result = getattr(example, mode)
        want = torch.full((1, problem.plan.hidden), example.per_rank if result is None else result, dtype=FP64)
        want = want.to(example.out_dtype or example.y_dtype)
        same_bits(out, want if context.rank == 0 else want[:0], example.name)


# -- one communicator, several dispatches -----------------------------------------------------------------------


@on_ranks
@each_backend
def test_several_dispatches_at_once(context: RankContext, backend: str) -> None:
    """Layers that share a communicator: combined in another order than dispatched, and one of them twice."""
    problems = [make_problem(Case("several", "", seed=seed, unused=0.2), context.num_ranks) for seed in range(3)]
    comm = make_comm(context, backend, problems[0].plan)
    layouts = ["expert", "token", "rank"]
    routed = [
        comm.dispatch(*each.arguments(context), layout=layout, copy=True)
        for each, layout in zip(problems, layouts, strict=True)
    ]
    for index in (2, 0, 0, 1):
        want = problems[index].dispatched(layouts[index])
        check_combine(context, comm, problems[index], routed[index], want, (FP32, None, None))


@on_ranks
@each_backend
def test_result_belongs_to_the_caller(context: RankContext, backend: str) -> None:
    """A result is not changed by later combines, nor they by what is done to it."""
    problem = make_problem(Case("result", "", tokens=(4, 2), dtype=FP32), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    routed = comm.dispatch(*problem.arguments(context))
    y = expert_rows(problem, problem.dispatched("expert"), FP32)[context.rank].to(context.device)
    first = comm.combine(y, routed)
    kept = first.clone()
    comm.combine(y * 2, routed)
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(comm.combine(y, routed), kept)


# -- what is on the wire ----------------------------------------------------------------------------------------


@on_ranks
def test_wire(context: RankContext) -> None:
    """Per rank: one row for each (token, rank), in any layout; per route: one for each route; in wire_dtype."""
    case = Case("wire", "", tokens=(9, 0, 5, 7), top_k=6, pick="repeats", unused=0.2, hidden=64, dtype=FP32)
    problem = make_problem(case, context.num_ranks)
    comm = make_comm(context, "collective", problem.plan)
    # What goes home from here: one row for each (source, token), one for each (source, token, k).
    num_rows = len(problem.dispatched("token")[context.rank].rows)
    num_routes = len(problem.dispatched("expert")[context.rank].rows)
    assert context.num_ranks == 1 or num_routes > num_rows > 0
    for layout in ("token", "rank", "expert"):
        want = problem.dispatched(layout)
        routed = comm.dispatch(*problem.arguments(context), layout=layout)
        y = expert_rows(problem, want, FP32)[context.rank].to(context.device)
        for wire_dtype in (FP32, BF16):
            with count_wire() as wire:
                comm.combine(y, routed, wire_dtype=wire_dtype)
            assert wire.all_to_all == [num_rows * 64 * wire_dtype.itemsize]
            if layout == "expert":
                with count_wire() as wire:
                    comm.combine(y, routed, mode="per_route", wire_dtype=wire_dtype)
                assert wire.all_to_all == [num_routes * 64 * wire_dtype.itemsize]
