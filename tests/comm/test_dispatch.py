"""Dispatch on every backend: bit for bit what the reference says, and no more on the wire than it must be."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    EXAMPLE,
    FP8,
    FP16,
    FP32,
    FP64,
    ROW_CASES,
    Case,
    Problem,
    case_params,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    on_another_stream,
    same_bits,
    same_bytes,
    same_routed,
    two_ranks_only,
)
from tests.support.on_ranks import on_ranks
from tests.support.wire import count_wire
from tokenloom import reference
from tokenloom.comm import autograd
from tokenloom.plan import RECIPES, ROUTE_LAYOUTS
from tokenloom.runtime.processes import RankContext

LAYOUTS = ("token", "rank", "expert", "slots")
ALIGNMENTS = (1, 4, 128)

# -- against the reference --------------------------------------------------------------------------------------


@on_ranks
@pytest.mark.sampled(4)
@pytest.mark.slow_on(1, 4)
@each_backend
@pytest.mark.parametrize("case", [*case_params(), *case_params(of=ROW_CASES)])
def test_dispatch(context: RankContext, backend: str, case: Case) -> None:
    """Every case in every layout, with exact and with bounded sizes."""
    problem = make_problem(case, context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    for layout in LAYOUTS:
        for alignment in ALIGNMENTS if layout == "expert" else (1,):
            check_layout(context, comm, problem, layout, alignment)
    comm.check()  # nothing overflowed


def check_layout(context: RankContext, comm: tl.Communicator, problem: Problem, layout: str, alignment: int) -> None:
    if layout == "slots":
        check_slots(context, comm, problem)
        return
    x, ids, weights = problem.arguments(context)
    options: dict[str, Any] = {"layout": layout, "alignment": alignment, "recipe": problem.recipe}
    exact = comm.dispatch(x, ids, weights, **options)
    want = problem.dispatched(layout, alignment=alignment)
    same_routed(exact, want[context.rank], problem.plan)
    assert exact.layout == layout
    assert exact.topk_ids is None or exact.topk_ids.dtype == ids.dtype
    if layout == "rank":
        bounded = comm.dispatch(x, ids, weights, **options, sizes="bounded")
        same_routed(bounded, want[context.rank], problem.plan, bounded=True)
        return
    needed = max(1, max(each.num_rows for each in want))
    same_routed(comm.dispatch(x, ids, weights, **options, capacity=needed), want[context.rank], problem.plan)
    for capacity in (needed, needed + 5):
        bounded = comm.dispatch(x, ids, weights, **options, sizes="bounded", capacity=capacity)
        want = problem.dispatched(layout, alignment=alignment, capacity=capacity, bounded=True)
        same_routed(bounded, want[context.rank], problem.plan, bounded=True)
    if layout == "token":
        bounded = comm.dispatch(x, ids, weights, **options, sizes="bounded")
        assert len(bounded.tokens) == problem.plan.worst_case_rows("token"), "the default is the worst case"


def check_slots(context: RankContext, comm: tl.Communicator, problem: Problem) -> None:
    """As many places as needed, some more, and the default number, which repeated experts may exceed."""
    needed = problem.rows_needed("slots")
    for capacity in (needed, needed + 5, None):
        if capacity is None and needed > problem.plan.default_slots:
            continue
        by_block = problem.scales is not None and problem.recipe == "block"
        for scale_layout in ("rows", "columns") if by_block else ("rows",):
            options: dict[str, Any] = {"layout": "slots", "capacity": capacity, "scale_layout": scale_layout}
            options["recipe"] = problem.recipe
            routed = comm.dispatch(*problem.arguments(context), **options)
            same_routed(routed, problem.dispatched(**options)[context.rank], problem.plan)
            assert routed.topk_ids is None


@pytest.mark.parametrize("backend", ["collective"])  # rows of two values are too short for others
def test_example(ranks: Ranks, backend: str) -> None:
    """The example worked by hand: the backend against literals, not only against the reference."""
    two_ranks_only(ranks)
    ranks.run(check_example, backend)


def check_example(context: RankContext, backend: str) -> None:
    rank, device = context.rank, context.device
    comm = make_comm(context, backend, EXAMPLE.problem.plan)
    x, ids, weights = EXAMPLE.problem.arguments(context)

    def same(got: torch.Tensor | None, want: list[Any], dtype: torch.dtype, what: str) -> None:
        assert got is not None
        same_bytes(got, torch.tensor(want, dtype=dtype), what)

    token = comm.dispatch(x, ids, weights, layout="token")
    same(token.tokens, EXAMPLE.token_rows[rank], FP32, "tokens")
    same(token.topk_ids, EXAMPLE.token_ids[rank], torch.int64, "topk_ids")
    same(token.topk_weights, EXAMPLE.token_weights[rank], FP32, "topk_weights")
    same(token.expert_counts, EXAMPLE.expert_counts[rank], torch.int32, "expert_counts")
    same(token.source_counts, EXAMPLE.source_counts[rank], torch.int32, "source_counts")
    expert = comm.dispatch(x, ids, weights)
    same(expert.tokens, EXAMPLE.expert_rows[rank], FP32, "rows by expert")
    same(expert.expert_offsets, EXAMPLE.expert_offsets[rank], torch.int32, "expert_offsets")
    aligned = comm.dispatch(x, ids, weights, alignment=4)
    same(aligned.tokens, EXAMPLE.aligned_rows[rank], FP32, "aligned rows")
    same(aligned.expert_offsets, EXAMPLE.aligned_offsets[rank], torch.int32, "aligned expert_offsets")
    by_rank = comm.dispatch(x, ids, weights, layout="rank")
    for source, rows in enumerate(EXAMPLE.rank_rows[rank]):
        same(by_rank.tokens[source, : len(rows)], rows, FP32, "rows by rank")
    slots = comm.dispatch(x, ids, weights, layout="slots", capacity=2)  # as the rows by expert, which have no gap
    same(slots.tokens, [EXAMPLE.expert_rows[rank][:2], EXAMPLE.expert_rows[rank][2:]], FP32, "slots")
    same(slots.slot_ranges, EXAMPLE.slot_ranges[rank], torch.int32, "slot_ranges")
    same(slots.expert_counts, EXAMPLE.expert_counts[rank], torch.int32, "expert_counts of slots")
    y = torch.tensor(EXAMPLE.y[rank], dtype=FP32, device=device)
    for mode in ("per_rank", "per_route"):
        same(comm.combine(y, expert, mode=mode), EXAMPLE.weighted[rank], FP32, mode)
        same(comm.combine(y, expert, mode=mode, weighted=False), EXAMPLE.unweighted[rank], FP32, f"{mode}, plain")
        same(comm.combine(y.view(2, 2, 2), slots, mode=mode), EXAMPLE.weighted[rank], FP32, f"{mode}, slots")


# -- quantised on the way ---------------------------------------------------------------------------------------

TO_FP8_CASES = [
    Case("bf16", "unequal tokens, one rank without any; both scales of a token", hidden=256, tokens=(7, 3, 0, 4)),
    Case("fp16", "the narrowest range, and one block a token", dtype=FP16, hidden=128, tokens=(9, 5)),
    Case("fp32", "three scales a token: no multiple of 16 bytes", dtype=FP32, hidden=384, tokens=(6, 4)),
    Case("fp64", "quantised from float32, with float32 weights", dtype=FP64, hidden=128, tokens=(8, 5)),
    Case("unused", "padding rows are zero in tokens and scales; a token goes nowhere", hidden=256, unused=0.5, top_k=4,
         pick="repeats"),
    Case("top8", "a token several times on a rank, quantised once", hidden=128, top_k=8, experts_per_rank=8,
         tokens=(6, 9)),
    Case("misaligned", "x starts in the middle of a word of its storage", hidden=128, offset=1, tokens=(5, 4)),
    Case("wide", "as wide as real models", hidden=7168, tokens=(2, 1)),
    Case("no-tokens", "zero tokens on all ranks", hidden=128, tokens=(0,)),
    Case("one-row", "a single row, without weights", hidden=256, tokens=(1, 0), top_k=1, weights="absent",
         pick="one rank"),
]  # fmt: skip
scales_of = pytest.mark.parametrize("power_of_two", [False, True], ids=["any scale", "power of two"])


def problem_to_fp8(case: Case, num_ranks: int) -> Problem:
    """The case with values that show how they are quantised, and with weights as they travel beside FP8."""
    problem = make_problem(replace(case, to_quantise=True), num_ranks)
    if problem.topk_weights is None:
        return problem
    return replace(problem, topk_weights=[weights.float() for weights in problem.topk_weights])


@on_ranks
@pytest.mark.sampled(4)
@pytest.mark.slow_on(1, 4)
@each_backend
@scales_of
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TO_FP8_CASES])
def test_to_fp8(context: RankContext, backend: str, case: Case, recipe: str, power_of_two: bool) -> None:
    """Every layout and size: what the reference says, and what a dispatch of quantize_fp8's pair brings."""
    problem = problem_to_fp8(replace(case, recipe=recipe), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    pair = tl.quantize_fp8(x, power_of_two_scales=power_of_two, recipe=recipe)
    quantising: dict[str, Any] = {"to_fp8": True, "power_of_two_scales": power_of_two, "recipe": recipe}
    for layout, alignment in (("token", 1), ("rank", 1), ("expert", 1), ("expert", 4)):
        options: dict[str, Any] = {"layout": layout, "alignment": alignment}
        want = problem.dispatched(**options, **quantising)
        got = comm.dispatch(x, ids, weights, **options, **quantising)
        same_routed(got, want[context.rank], problem.plan)
        assert got.tokens.dtype == FP8
        assert not got.tokens.requires_grad
        same_routed(comm.dispatch(pair, ids, weights, **options, recipe=recipe), want[context.rank], problem.plan)
        capacity = None if layout == "rank" else max(1, max(each.num_rows for each in want))
        bounded = comm.dispatch(x, ids, weights, **options, **quantising, sizes="bounded", capacity=capacity)
        if capacity is not None:
            want = problem.dispatched(**options, **quantising, capacity=capacity, bounded=True)
        same_routed(bounded, want[context.rank], problem.plan, bounded=True)
    slots = {"layout": "slots", "capacity": problem.rows_needed("slots") + 1}
    orders = ("columns", "packed") if power_of_two else ("columns",)
    for scale_layout in ("rows", *(orders if recipe == "block" else ())):
        options = slots | {"scale_layout": scale_layout}
        want = problem.dispatched(**options, **quantising)
        same_routed(comm.dispatch(x, ids, weights, **options, **quantising), want[context.rank], problem.plan)
        same_routed(comm.dispatch(pair, ids, weights, **options, recipe=recipe), want[context.rank], problem.plan)
    same_bytes(x, problem.xs[context.rank], "x, which is not to be changed")
    routed = comm.dispatch(x, ids, weights, layout="token")  # quantising is of one call
    same_routed(routed, problem.dispatched("token")[context.rank], problem.plan)
    comm.check()


@on_ranks
@each_backend
@scales_of
def test_to_fp8_and_gradients(context: RankContext, backend: str, power_of_two: bool) -> None:
    """The weights have the gradient that they have beside a quantised pair; x may require one under no_grad."""
    problem = make_problem(Case("grad", "", dtype=BF16, hidden=256, unused=0.2), context.num_ranks)
    problem = replace(problem, xs=[torch.nan_to_num(x, 1.0, 1.0, 1.0) for x in problem.xs])  # finite, near 1
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    weights.requires_grad_()

    def gradient(payload: Any, **options: Any) -> torch.Tensor:
        routed = comm.dispatch(payload, ids, weights, **options)
        assert not routed.tokens.requires_grad
        assert routed.scales is not None
        assert not routed.scales.requires_grad
        out = comm.combine(tl.dequantize_fp8(routed.tokens, routed.scales), routed)
        return torch.autograd.grad(out.sum(), weights)[0]

    got = gradient(x, to_fp8=True, power_of_two_scales=power_of_two)
    same_bytes(got, gradient(tl.quantize_fp8(x, power_of_two_scales=power_of_two)).cpu(), "gradient of the weights")
    assert got.any() or not len(x)
    with torch.no_grad():
        routed = comm.dispatch(x.requires_grad_(), ids, weights, to_fp8=True, power_of_two_scales=power_of_two)
    want = problem.dispatched("expert", to_fp8=True, power_of_two_scales=power_of_two)
    same_routed(routed, want[context.rank], problem.plan)


@on_ranks
@each_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_fp8_on_another_stream(context: RankContext, backend: str, layout: str) -> None:
    """x is quantised on the stream of the call."""
    problem = problem_to_fp8(Case("async", "", tokens=(6, 4), hidden=128), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    for power_of_two in (False, True):
        options: dict[str, Any] = {"layout": layout, "to_fp8": True, "power_of_two_scales": power_of_two}
        with on_another_stream(context.device):
            routed = comm.dispatch(x, ids, weights, **options)
        same_routed(routed, problem.dispatched(**options)[context.rank], problem.plan)


# -- who owns what ----------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("copy", [False, True])
def test_outputs_are_independent(ranks: Ranks, backend: str, copy: bool) -> None:
    """With copy=True, and always where rows are no views, outputs survive later calls and changes of the input."""
    if backend == "nvlink" and not copy:
        pytest.skip("views of the receive buffers, by contract")
    ranks.run(check_outputs_are_independent, backend, copy)


def check_outputs_are_independent(context: RankContext, backend: str, copy: bool) -> None:
    problem = make_problem(Case("own", "", tokens=(4, 3), unused=0.2), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    want = problem.dispatched("token")[context.rank]
    first = comm.dispatch(x, ids, weights, layout="token", copy=copy)
    ids_before = ids.clone()
    x.zero_(), weights.zero_(), ids.fill_(-1)
    for _ in range(3):
        comm.dispatch(x, ids_before, weights, layout="token")
    same_routed(first, want, problem.plan)
    first.tokens.zero_()  # ordinary tensors: writing to them changes nothing of the communicator's
    routed = comm.dispatch(problem.arguments(context)[0], ids_before, layout="token")
    same_bytes(routed.tokens, want.tokens, "tokens")


def test_what_a_handle_keeps_has_no_graph() -> None:
    """A backend may return rows that its handle keeps: their graph, which holds the handle, must still go at once."""

    weights = torch.ones(3, 2, requires_grad=True)
    x = torch.ones(3, 4, requires_grad=True)
    handle: Any = SimpleNamespace(topk_weights=weights.detach().clone(), rows=x.detach().clone())
    engine: Any = None  # which backward asks
    outputs = autograd.dispatched(engine, handle, handle.rows, autograd.GradientOrder(), x, weights)
    assert all(output is not None and output.requires_grad for output in outputs)
    assert handle.rows.grad_fn is None
    assert handle.topk_weights.grad_fn is None


@on_ranks
@each_backend
def test_inputs_are_left_alone(context: RankContext, backend: str) -> None:
    """Dispatch and combine write to none of their arguments."""
    problem = make_problem(Case("inputs", "", unused=0.3, weights="nan where unused"), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    routed = comm.dispatch(x, ids, weights, alignment=4)
    y = expert_rows(problem, problem.dispatched("expert", alignment=4), FP32)[context.rank].to(context.device)
    before = y.clone()
    comm.combine(y, routed)
    same_bytes(x, problem.xs[context.rank], "x")
    same_bytes(ids, problem.topk_ids[context.rank], "topk_ids")
    assert problem.topk_weights is not None
    same_bytes(weights, problem.topk_weights[context.rank], "topk_weights")
    same_bytes(y, before.cpu(), "y")


@on_ranks
@each_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_another_stream(context: RankContext, backend: str, layout: str) -> None:
    """Calls run on the stream that is current, whichever it is."""
    problem = make_problem(Case("async", "", tokens=(6, 4), top_k=3, hidden=64, unused=0.2), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    want = problem.dispatched(layout)
    y = expert_rows(problem, want, FP32)[context.rank].to(context.device)
    weights = problem.topk_weights if layout in ROUTE_LAYOUTS else None
    outs = reference.combine(
        problem.plan, expert_rows(problem, want, FP32), want, problem.topk_ids, weights, out_dtype=torch.bfloat16
    )
    for _ in range(3):  # also while earlier work may still run
        with on_another_stream(context.device):
            routed = comm.dispatch(*problem.arguments(context), layout=layout)
        with on_another_stream(context.device):
            out = comm.combine(y, routed, out_dtype=torch.bfloat16)
        same_routed(routed, want[context.rank], problem.plan)
        same_bits(out, outs[context.rank], "out")


def test_alone() -> None:
    """group=None without torch.distributed: a group of this process alone, in every layout."""
    problem = make_problem(Case("alone", "", tokens=(5,), unused=0.2, top_k=3), 1)
    context = RankContext(0, 1, None, torch.device("cpu"), None)  # type: ignore[arg-type]
    with make_comm(context, "auto", problem.plan) as comm:
        assert comm.process_group is None
        for layout in LAYOUTS:
            check_layout(context, comm, problem, layout, 1)


# -- what is on the wire ----------------------------------------------------------------------------------------


@on_ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_row_per_token_and_rank(context: RankContext, layout: str) -> None:
    """However many experts a token has on a rank, in any layout; ids and weights cost 8 bytes a place."""
    others = []
    for hidden in (64, 640):
        case = Case("wire", "", tokens=(9, 0, 5, 7), top_k=6, pick="repeats", unused=0.2, hidden=hidden, dtype=FP32)
        problem = make_problem(case, context.num_ranks)
        comm = make_comm(context, "collective", problem.plan)
        with count_wire() as wire:
            options = {"expert": {"alignment": 8}, "slots": {"capacity": problem.rows_needed("slots")}}.get(layout, {})
            comm.dispatch(*problem.arguments(context), layout=layout, **options)
        num_rows = rows_sent(problem, context.rank)
        assert wire.all_to_all == [num_rows * (4 + 6 * 8), num_rows * hidden * 4]  # token, ids and weights; row
        others.append(wire.others)
    assert others[0] == others[1], "what the handshake carries must not grow with the hidden size"


@on_ranks
def test_to_fp8_sends_fp8(context: RankContext) -> None:
    """A byte a value and a scale per 128: x is quantised before it travels."""
    case = Case("wire", "", tokens=(5, 0, 3), top_k=6, pick="repeats", hidden=256)
    problem = problem_to_fp8(case, context.num_ranks)
    comm = make_comm(context, "collective", problem.plan)
    with count_wire() as wire:
        comm.dispatch(*problem.arguments(context), to_fp8=True)
    num_rows = rows_sent(problem, context.rank)
    assert wire.all_to_all == [num_rows * (4 + 6 * 8 + 2 * 4), num_rows * 256]


def rows_sent(problem: Problem, rank: int) -> int:
    plan = problem.plan
    return sum(len({e // plan.experts_per_rank for e in row if e >= 0}) for row in problem.topk_ids[rank].tolist())


# -- more rows than the capacity --------------------------------------------------------------------------------

OVERFLOWS = [
    pytest.param("token", 1, id="token"),
    pytest.param("expert", 1, id="expert"),
    pytest.param("expert", 4, id="expert4"),
]
BOUNDED_OVERFLOWS = [*OVERFLOWS, pytest.param("slots", 1, id="slots")]
overflowing = Case("overflow", "", tokens=(7, 4, 0, 5), top_k=3, pick="repeats", unused=0.1, experts_per_rank=2)


@on_ranks
@each_backend
@pytest.mark.parametrize(("layout", "alignment"), OVERFLOWS)
def test_exact_overflow(context: RankContext, backend: str, layout: str, alignment: int) -> None:
    """All ranks raise, with the capacity that would do on every rank, before anything is sent."""
    problem = make_problem(overflowing, context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    needed = problem.rows_needed(layout, alignment)
    arguments = problem.arguments(context)
    for capacity in (1, needed - 1):
        with count_wire() as wire, pytest.raises(tl.CapacityOverflow, match="nothing is handed out") as overflow:
            comm.dispatch(*arguments, layout=layout, alignment=alignment, capacity=capacity)
        assert (overflow.value.needed, overflow.value.capacity) == (needed, capacity)
        assert f"pass capacity={needed}" in str(overflow.value)
        assert wire.all_to_all == []
    routed = comm.dispatch(*arguments, layout=layout, alignment=alignment, capacity=needed)
    same_routed(routed, problem.dispatched(layout, alignment=alignment)[context.rank], problem.plan)


@on_ranks
@pytest.mark.sampled(3)
@each_backend
@pytest.mark.parametrize(("layout", "alignment"), BOUNDED_OVERFLOWS)
def test_bounded_overflow(context: RankContext, backend: str, layout: str, alignment: int) -> None:
    """What fits is right, what does not is NaN, and every rank raises once, at whatever it calls next."""
    problem = make_problem(overflowing, context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    arguments = problem.arguments(context)
    needed = problem.rows_needed(layout, alignment)
    for capacity in sorted({1, 2, needed // 2, needed - 1}):
        options: dict[str, Any] = {"layout": layout, "alignment": alignment, "capacity": capacity}
        routed = comm.dispatch(*arguments, **options, sizes="bounded")
        want = problem.dispatched(**options, bounded=True)
        with pytest.raises(tl.CapacityOverflow, match="combine gives NaN for their tokens") as overflow:
            comm.check()
        assert (overflow.value.needed, overflow.value.capacity) == (needed, capacity)
        comm.check()  # once is enough
        same_routed(routed, want[context.rank], problem.plan, bounded=True)
        assert routed.tokens.shape[-2] == capacity
        check_bounded_combine(context, comm, problem, routed, want)
    if layout == "token":
        check_overflow_backward(context, comm, problem)


def check_overflow_backward(context: RankContext, comm: tl.Communicator, problem: Problem) -> None:
    """Gradients of what was lost are NaN, whatever came of the rest; those of other tokens are right."""
    x, ids, weights = problem.arguments(context)
    weights = weights.clone().requires_grad_()
    needed = problem.rows_needed("token", 1)
    for capacity in (1, needed - 1):
        weights.grad = None
        routed = comm.dispatch(x, ids, weights, layout="token", sizes="bounded", capacity=capacity)
        with pytest.raises(tl.CapacityOverflow):
            comm.check()
        assert routed.topk_weights is not None
        routed.topk_weights.backward((routed.topk_ids >= 0).float())
        want = problem.dispatched(layout="token", bounded=True, capacity=capacity)
        assert weights.grad is not None
        for token, row in enumerate(ids.tolist()):
            ranks = [expert // problem.plan.experts_per_rank for expert in row]
            lost = [
                e >= 0 and (context.rank, token) not in want[rank].rows for e, rank in zip(row, ranks, strict=True)
            ]
            grad = weights.grad[token].tolist()
            assert any(lost) or grad == [float(e >= 0) for e in row]
            assert all(math.isnan(value) for value, gone in zip(grad, lost, strict=True) if gone)


def check_bounded_combine(
    context: RankContext, comm: tl.Communicator, problem: Problem, routed: tl.Routed, want: list[reference.Routed]
) -> None:
    ys = expert_rows(problem, want, FP32)
    expert = routed.layout in ROUTE_LAYOUTS
    for mode in ("per_rank", "per_route") if expert else ("per_rank",):
        weights = problem.topk_weights if expert else None
        outs = reference.combine(problem.plan, ys, want, problem.topk_ids, weights, mode=mode)
        out = comm.combine(ys[context.rank].to(context.device), routed, mode=mode)
        same_bits(out, outs[context.rank], f"{mode} after an overflow")
        lost = [dropped(problem, want, context.rank, token, expert) for token in range(len(out))]
        assert out.isnan().all(1).tolist() == out.isnan().any(1).tolist() == lost


def dropped(problem: Problem, want: list[reference.Routed], source: int, token: int, expert: bool) -> bool:
    """Whether the token lost a row anywhere."""
    plan = problem.plan
    routes = [
        (k, e // plan.experts_per_rank) for k, e in enumerate(problem.topk_ids[source][token].tolist()) if e >= 0
    ]
    return any(((source, token, k) if expert else (source, token)) not in want[rank].rows for k, rank in routes)


@on_ranks
@each_backend
@pytest.mark.parametrize("next_call", ["dispatch", "combine"])
def test_overflow_raises_at_the_next_call(context: RankContext, backend: str, next_call: str) -> None:
    """Also on ranks that lost nothing themselves; the call after that works."""
    case = Case("one-sided", "", tokens=(3,), pick="one rank", dtype=FP32)  # only the last rank receives anything
    problem = make_problem(case, context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    arguments = problem.arguments(context)
    routed = comm.dispatch(*arguments, sizes="bounded", capacity=2)
    calls = {"dispatch": lambda: comm.dispatch(*arguments), "combine": lambda: comm.combine(routed.tokens, routed)}
    with count_wire() as wire, pytest.raises(tl.CapacityOverflow) as overflow:
        calls[next_call]()
    assert overflow.value.needed == 6 * context.num_ranks
    assert (wire.all_to_all, wire.others) == ([], [])
    calls[next_call]()
    again = comm.dispatch(*arguments, sizes="bounded", capacity=overflow.value.needed)
    same_routed(
        again,
        problem.dispatched("expert", bounded=True, capacity=overflow.value.needed)[context.rank],
        problem.plan,
        bounded=True,
    )
    comm.check()
