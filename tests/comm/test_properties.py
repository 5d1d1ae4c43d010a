"""Routings nobody thought of: drawn by hypothesis, always the same ones, small so that a failure can be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP8,
    FP16,
    FP32,
    FP64,
    Case,
    Problem,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    same_bits,
    same_routed,
)
from tokenloom import reference
from tokenloom.plan import ROUTE_LAYOUTS
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)

# Failures are not made smaller: each one that is tried costs a start of all ranks.
routings = settings(max_examples=40, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])


@dataclass(frozen=True)
class Trip:
    """One way there and back."""

    case: Case
    dispatch: dict[str, Any]
    bounded_room: int | None
    """Rows of a bounded capacity beyond what is needed, below 0 where some are lost; None is exact."""
    y_dtype: torch.dtype
    combine: dict[str, Any]


@st.composite
def trips(draw: st.DrawFn) -> Trip:
    layout = draw(st.sampled_from(["expert", "expert", "slots", "token", "rank"]))
    dtype = draw(st.sampled_from([BF16, FP16, FP32, FP64, FP8]))
    weights = draw(st.sampled_from(["given", "nan where unused", "absent"]))
    case = Case(
        name="drawn",
        why="",
        tokens=tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))),
        spare=draw(st.integers(0, 3)),
        experts_per_rank=draw(st.integers(1, 6)),
        hidden=draw(st.sampled_from([128, 256] if dtype == FP8 else [1, 2, 3, 5, 20, 8, 8, 16, 24])),
        top_k=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 32])),
        pick=draw(st.sampled_from(["distinct", "repeats", "descending", "one rank", "one expert", "own rank"])),
        unused=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9])),
        dtype=dtype,
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        weights=weights,
        offset=0 if dtype == FP8 else draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**16)),
    )
    expert, by_route = layout == "expert", layout in ROUTE_LAYOUTS
    y_dtype = draw(st.sampled_from([BF16, FP16, FP32, FP64]))
    narrower = [None, BF16, FP16, FP32] + ([FP64] if y_dtype == FP64 else [])
    combine = {
        "mode": draw(st.sampled_from(["per_rank", "per_node"] + ["per_route"] * by_route)),
        "wire_dtype": draw(st.sampled_from(narrower)),
        "out_dtype": draw(st.sampled_from(narrower)),
    }
    if by_route:
        combine["weighted"] = weights != "absent" and draw(st.booleans())
    return Trip(
        case=case,
        dispatch={"layout": layout, "alignment": draw(st.sampled_from([1, 2, 3, 4, 16, 128])) if expert else 1},
        bounded_room=draw(st.sampled_from([None, None, -3, -1, 0, 5])),
        y_dtype=y_dtype,
        combine=combine,
    )


def moves(backend: str, trip: Trip) -> bool:
    """The kernels of nvlink move rows of 16-byte words, and have no float64."""
    return backend != "nvlink" or (trip.case.hidden % 8 == 0 and FP64 not in (trip.case.dtype, trip.y_dtype))


@each_backend
@routings
@given(trip=trips())
def test_there_and_back(ranks: Ranks, backend: str, trip: Trip) -> None:
    """Any sizes, routes, layout, dtypes, modes and capacities: bit for bit as the reference."""
    if moves(backend, trip):
        ranks.run(check_trip, backend, trip)


def check_trip(context: RankContext, backend: str, trip: Trip) -> None:
    problem = make_problem(trip.case, context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    options, bounded = dict(trip.dispatch), trip.bounded_room is not None
    needed = problem.rows_needed(**trip.dispatch)
    if trip.bounded_room is not None and options["layout"] != "rank":
        options["capacity"] = max(1, needed + trip.bounded_room)
    if bounded or options["layout"] == "slots":
        options["sizes"] = "bounded"
    routed = comm.dispatch(*problem.arguments(context), **options)
    options.pop("sizes", None)
    want = problem.dispatched(**options, bounded=bounded)
    try:
        comm.check()
        overflow = None
    except tl.CapacityOverflow as error:
        overflow = (error.needed, error.capacity)
    capacity = options.get("capacity", problem.plan.default_slots if options["layout"] == "slots" else needed)
    assert overflow == ((needed, capacity) if needed > capacity else None)
    same_routed(routed, want[context.rank], problem.plan, bounded=bounded)
    check_way_back(context, comm, problem, trip, routed, want)


def check_way_back(
    context: RankContext,
    comm: tl.Communicator,
    problem: Problem,
    trip: Trip,
    routed: tl.Routed,
    want: list[reference.Routed],
) -> None:
    ys = expert_rows(problem, want, trip.y_dtype)
    out = comm.combine(ys[context.rank].to(context.device), routed, **trip.combine)
    options = {name: value for name, value in trip.combine.items() if name != "weighted"}
    weights = problem.topk_weights if trip.combine.get("weighted") else None
    nodes = comm.engine.ranks.topology.nodes
    outs = reference.combine(problem.plan, ys, want, problem.topk_ids, weights, **options, nodes=nodes)
    same_bits(out, outs[context.rank], f"{trip}")


@each_backend
@routings
@given(trip=trips())
def test_gradients_are_the_transposed(ranks: Ranks, backend: str, trip: Trip) -> None:
    """<dispatch(x), g> = <x, dispatch's gradient of g>, and so for combine: exact on small integers."""
    ranks.run(check_transposed, backend, trip)


def check_transposed(context: RankContext, backend: str, trip: Trip) -> None:
    plain = {"dtype": FP32 if backend == "nvlink" else FP64, "weights": "given", "hidden": 8, "offset": 0}
    problem = make_problem(Case(**(vars(trip.case) | plain)), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    _, ids, weights = problem.arguments(context)
    assert weights is not None
    generator = torch.Generator().manual_seed(trip.case.seed + context.rank)

    def integers(like: torch.Tensor) -> torch.Tensor:
        return torch.randint(-9, 10, like.shape, generator=generator).to(context.device, like.dtype)

    x = integers(problem.xs[context.rank]).requires_grad_()
    weights = integers(weights).requires_grad_()
    options = dict(trip.dispatch)
    if options["layout"] == "slots":
        options["capacity"] = problem.rows_needed("slots")
    routed = comm.dispatch(x, ids, weights, **options)
    g = integers(routed.tokens)
    g.flatten(0, -2)[problem.dispatched(**options)[context.rank].padding] = 0
    (routed.tokens * g).sum().backward(retain_graph=True)
    assert x.grad is not None
    assert_sums_equal(comm, inner(routed.tokens, g), inner(x, x.grad), "dispatch")

    y = integers(routed.tokens).requires_grad_()
    mode = trip.combine["mode"]
    out = comm.combine(y, routed, mode=mode)
    g = integers(out)
    out.backward(g)
    assert y.grad is not None
    assert_sums_equal(comm, inner(out, g), inner(y, y.grad), "combine, rows")
    if routed.layout in ROUTE_LAYOUTS:
        assert weights.grad is not None
        assert_sums_equal(comm, inner(out, g), inner(weights, weights.grad), "combine, weights")


def inner(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where ``right`` is zero, ``left`` may be anything: places without rows are unspecified in some layouts."""
    products = left.detach().double() * right.double()
    return torch.where(right == 0, 0, products).sum()


def assert_sums_equal(comm: tl.Communicator, here: torch.Tensor, there: torch.Tensor, what: str) -> None:
    """Both summed over ranks."""
    left, right = comm.engine.ranks.all_reduce_sums([torch.stack([here, there])], "the test")[0].tolist()
    assert left == right, f"{what}: {left} and {right}"
