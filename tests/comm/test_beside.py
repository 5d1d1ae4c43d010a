"""Calls that belong to an earlier dispatch: other rows, weights back and late weights; bias, and packed scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP8,
    FP32,
    Case,
    Problem,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    order_of,
    same_bits,
    same_bytes,
    same_routed,
)
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.runtime.processes import RankContext

CASE = Case("beside", "", tokens=(6, 0, 3, 5), top_k=3, unused=0.2, hidden=16)
LAYOUTS: list[Any] = [
    pytest.param("token", {}, id="token"),
    pytest.param("token", {"sizes": "bounded"}, id="token bounded"),
    pytest.param("rank", {}, id="rank"),
    pytest.param("expert", {"alignment": 4}, id="expert"),
    pytest.param("expert", {"sizes": "bounded", "capacity": 90}, id="expert bounded"),
    pytest.param("slots", {}, id="slots"),
]
each_layout = pytest.mark.parametrize(("layout", "options"), LAYOUTS)


def wanted(problem: Problem, layout: str, options: dict[str, Any]) -> list[reference.Routed]:
    options = dict(options)
    bounded = options.pop("sizes", "exact") == "bounded"
    if bounded and layout == "token":
        options["capacity"] = problem.plan.worst_case_rows("token")
    return problem.dispatched(layout, bounded=bounded, **options)


def row_values(problem: Problem, routed: list[reference.Routed], layout: str) -> list[torch.Tensor]:
    """Values for the rows of all ranks, of many magnitudes, NaN wherever no row lies."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for received in routed:
        shape = list(received.tokens.shape[:-1]) + [problem.plan.top_k] * (layout in ("token", "rank"))
        values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-5, 6, shape, generator=generator)
        flat = values.view(received.tokens.shape[:-1].numel(), -1)
        flat[received.padding] = torch.nan
        found.append(values)
    return found


# -- other rows -------------------------------------------------------------------------------------------------


@each_backend
@each_layout
def test_dispatch_again(ranks: Ranks, backend: str, layout: str, options: dict[str, Any]) -> None:
    """Rows lie where a dispatch of them by the same ids would put them, and outlive later calls."""
    ranks.run(check_dispatch_again, backend, layout, options)


def check_dispatch_again(context: RankContext, backend: str, layout: str, options: dict[str, Any]) -> None:
    problem = make_problem(CASE, context.num_ranks)
    others = replace(problem, xs=[x.nan_to_num(1, 2, 3) * 2 for x in problem.xs])
    want = wanted(others, layout, options)[context.rank]
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), layout=layout, **options)
        x = others.xs[context.rank].to(context.device)
        rows = comm.dispatch_again(x, routed)
        for _ in range(3):
            comm.dispatch_again(torch.zeros_like(x), routed)
        assert rows.shape == want.tokens.shape
        places = sorted(want.rows.values())
        flat, expected = rows.view(-1, problem.plan.hidden).cpu(), want.tokens.view(-1, problem.plan.hidden)
        same_bytes(flat[places], expected[places], "rows again")


# -- weights ----------------------------------------------------------------------------------------------------


@each_backend
@each_layout
def test_combine_weights(ranks: Ranks, backend: str, layout: str, options: dict[str, Any]) -> None:
    """Sums over ranks of every column, or the value of each route; a second call gives the same."""
    ranks.run(check_combine_weights, backend, layout, options)


def check_combine_weights(context: RankContext, backend: str, layout: str, options: dict[str, Any]) -> None:
    problem = make_problem(CASE, context.num_ranks)
    routed = wanted(problem, layout, options)
    values = row_values(problem, routed, layout)
    want = reference.combine_weights(problem.plan, values, routed, problem.topk_ids)[context.rank]
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        got = comm.dispatch(*problem.arguments(context), layout=layout, **options)
        for _ in range(2):
            home = comm.combine_weights(values[context.rank].to(context.device), got)
            same_bits(home, want, "weights at home")


@on_ranks
@each_backend
def test_every_column_counts(context: RankContext, backend: str) -> None:
    """In layouts of tokens a column without a route on that rank is added as well: W times ones are not all ones."""
    problem = make_problem(replace(CASE, unused=0.0), context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        x, ids, weights = problem.arguments(context)
        routed = comm.dispatch(x, ids, weights, layout="token")
        home = comm.combine_weights(torch.ones_like(routed.topk_weights), routed).cpu()
        ranks_of = ids.cpu() // problem.plan.experts_per_rank
        there = torch.tensor([len(set(row.tolist()) - {-1}) for row in ranks_of], dtype=FP32)
        assert torch.equal(home, there[:, None].expand(home.shape))


@each_backend
@pytest.mark.parametrize("layout", ["expert", "slots"])
@pytest.mark.parametrize("first", ["given", "absent"])
def test_reweighted(ranks: Ranks, backend: str, layout: str, first: str) -> None:
    """Weights that are known after the dispatch count as if they had been given to it."""
    ranks.run(check_reweighted, backend, layout, first)


def check_reweighted(context: RankContext, backend: str, layout: str, first: str) -> None:
    problem = make_problem(replace(CASE, weights=first), context.num_ranks)
    late = [torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) + 0.5 for ids in problem.topk_ids]
    want = problem.dispatched(layout)
    ys = expert_rows(problem, want, BF16)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), layout=layout)
        y = ys[context.rank].to(context.device)
        again = comm.reweighted(routed, late[context.rank].to(context.device))
        order = order_of(comm)
        outs = reference.combine(problem.plan, ys, want, problem.topk_ids, late, **order)
        same_bits(comm.combine(y, again), outs[context.rank], "late weights")
        pending = comm.send_combine(y, again)
        same_bits(pending.receive(), outs[context.rank], "late weights, in halves")
        plain = reference.combine(problem.plan, ys, want, problem.topk_ids, problem.topk_weights, **order)
        weighted = None if first == "given" else False
        same_bits(comm.combine(y, routed, weighted=weighted), plain[context.rank], "the first weights")


@on_ranks
@pytest.mark.sampled(3)
@each_backend
@pytest.mark.parametrize("layout", ["expert", "slots"])
@pytest.mark.parametrize("first", ["given", "absent"])
def test_weights_of_a_combine(context: RankContext, backend: str, layout: str, first: str) -> None:
    """Weights that only home knows, other ones in each call. Those of unused routes are NaN and never count."""
    problem = make_problem(replace(CASE, weights=first), context.num_ranks)
    generator = torch.Generator().manual_seed(3)
    want = problem.dispatched(layout)
    ys = expert_rows(problem, want, BF16)
    me, device = context.rank, context.device
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed, y = comm.dispatch(*problem.arguments(context), layout=layout), ys[me].to(device)
        for mode in ("per_rank", "per_route", "per_rank"):
            for _ in range(2):
                late = [torch.rand(ids.shape, generator=generator) + 0.5 for ids in problem.topk_ids]
                late = [each.masked_fill(ids < 0, torch.nan) for each, ids in zip(late, problem.topk_ids, strict=True)]
                outs = reference.combine(problem.plan, ys, want, problem.topk_ids, late, mode=mode)
                weights, out = late[me].to(device), torch.empty_like(outs[me], device=device)
                same_bits(comm.combine(y, routed, mode=mode, topk_weights=weights), outs[me], "weights of home")
                assert comm.combine(y, routed, mode=mode, topk_weights=weights, out=out) is out
                same_bits(out, outs[me], "weights of home, out")
                pending = comm.send_combine(y, routed, mode=mode, topk_weights=weights)
                if backend == "nvlink":
                    weights.fill_(0)
                same_bits(pending.receive(), outs[me], "weights of home, in halves")
        plain = reference.combine(problem.plan, ys, want, problem.topk_ids, problem.topk_weights)
        same_bits(
            comm.combine(y, routed, weighted=None if first == "given" else False), plain[me], "the first weights"
        )


@on_ranks
@each_backend
def test_weights_that_a_combine_cannot_use(context: RankContext, backend: str) -> None:
    """They are refused before anything is sent, on all ranks alike, whatever the backend does with weights."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm:
        x, ids, weights = problem.arguments(context)
        by_layout = {layout: comm.dispatch(x, ids, weights, layout=layout) for layout in ("token", "expert")}
        cases: list[tuple[str, dict[str, Any], bool, type[Exception], str]] = [
            ("token", {}, False, tl.InvalidArgument, "topk_weights with layout 'token'"),
            ("expert", {"weighted": False}, False, tl.InvalidArgument, "topk_weights with weighted=False"),
            ("expert", {}, True, tl.NotDifferentiable, "topk_weights"),
        ]
        for layout, options, needs_grad, error, text in cases:
            late = torch.ones_like(ids, dtype=FP32).requires_grad_(needs_grad)
            routed = by_layout[layout]
            with pytest.raises(error, match=text):
                comm.combine(routed.tokens, routed, topk_weights=late, **options)
        out = comm.combine(by_layout["expert"].tokens, by_layout["expert"])
        assert out.shape == x.shape


@each_backend
@pytest.mark.parametrize("sizes", ["exact", "bounded"])
@pytest.mark.parametrize("layout", ["token", "rank"])
def test_other_weights_of_tokens(ranks: Ranks, backend: str, layout: str, sizes: str) -> None:
    """Where rows are tokens the received weights change, in all layouts where there are some."""
    ranks.run(check_other_weights, backend, layout, sizes)


def check_other_weights(context: RankContext, backend: str, layout: str, sizes: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    late = [torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) + 0.5 for ids in problem.topk_ids]
    want = replace(problem, topk_weights=late).dispatched(layout)[context.rank]
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), layout=layout, sizes=sizes)
        again = comm.reweighted(routed, late[context.rank].to(context.device))
        assert again.topk_weights is not None
        assert want.topk_weights is not None
        places = sorted(want.rows.values())
        got, expected = (
            each.reshape(-1, problem.plan.top_k).cpu() for each in (again.topk_weights, want.topk_weights)
        )
        same_bytes(got[places], expected[places], "weights")


# -- bias -------------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_bias(ranks: Ranks, backend: str, layout: str, number: int) -> None:
    """Added in float32 before the one rounding, with a gradient of its own, also for tokens without a route."""
    ranks.run(check_bias, backend, layout, number)


def check_bias(context: RankContext, backend: str, layout: str, number: int) -> None:
    problem = make_problem(replace(CASE, unused=0.7), context.num_ranks)
    want = problem.dispatched(layout)
    ys = expert_rows(problem, want, BF16)
    generator = torch.Generator().manual_seed(11)
    biases = [[torch.randn(x.shape, generator=generator).to(BF16) for _ in range(number)] for x in problem.xs]
    weights = problem.topk_weights if layout == "expert" else None
    mine = [bias.to(context.device).requires_grad_() for bias in biases[context.rank]]
    with make_comm(context, backend, problem.plan) as comm:
        order = order_of(comm)
        outs = reference.combine(problem.plan, ys, want, problem.topk_ids, weights, biases=biases, **order)
        routed = comm.dispatch(*problem.arguments(context), layout=layout)
        y = ys[context.rank].to(context.device)
        comm.combine(y, routed)  # it says nothing of a bias, though all else is alike
        out = comm.combine(y, routed, bias=mine if number > 1 else mine[0])
        same_bits(out, outs[context.rank], "biased")
        out.backward(torch.full_like(out, 2))
        assert all((bias.grad == 2).all() for bias in mine)
        with torch.no_grad():
            home = torch.full_like(out, torch.nan)
            assert comm.combine(y, routed, bias=mine, out=home) is home
            same_bits(home, outs[context.rank], "biased, to a tensor of the caller's")
            same_bits(comm.send_combine(y, routed, bias=mine).receive(), outs[context.rank], "biased, in halves")
        with pytest.raises(tl.InvalidArgument, match="out= has no gradient"):
            comm.combine(y, routed, bias=mine, out=home)


# -- packed scales ----------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("layout", ["token", "expert", "slots"])
def test_packed_scales(ranks: Ranks, backend: str, layout: str, width: int) -> None:
    """Words that are no floats, NaN patterns among them, arrive bit for bit beside their rows."""
    ranks.run(check_packed, backend, layout, width)


def check_packed(context: RankContext, backend: str, layout: str, width: int) -> None:
    problem = make_problem(replace(CASE, dtype=FP8, hidden=256), context.num_ranks)
    generator = torch.Generator().manual_seed(5)
    words = [torch.randint(-(2**31), 2**31, (len(x), width), generator=generator).int() for x in problem.xs]
    words = [torch.where(torch.rand(each.shape, generator=generator) < 0.3, 0x7FA00001, each) for each in words]
    problem = replace(problem, scales=words)
    want = problem.dispatched(layout)[context.rank]
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), layout=layout)
        same_routed(routed, want, problem.plan)
        if comm.engine.capabilities.weights_apart:
            again = comm.reweighted(routed, problem.arguments(context)[2])
            assert again.scales is not None
            assert routed.scales is not None
            same_bytes(again.scales, routed.scales.cpu(), "scales beside other weights")


@each_backend
def test_packed_scales_of_one_rank(ranks: Ranks, backend: str) -> None:
    """Others took their bits for floats."""
    if ranks.num_ranks == 1:
        pytest.skip("one rank has packed scales or not")
    ranks.run(check_packed_on_one_rank, backend)


def check_packed_on_one_rank(context: RankContext, backend: str) -> None:
    problem = make_problem(replace(CASE, dtype=FP8, hidden=256), context.num_ranks)
    (x, scales), *rest = problem.arguments(context)
    packed = torch.ones(len(x), 2, dtype=torch.int32, device=context.device)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        for narrow in (scales, packed[:, :1]):
            comm.dispatch((x, narrow), *rest)
            with pytest.raises(tl.PlanMismatch, match="packed scales="):
                comm.dispatch((x, packed if context.rank == 1 else narrow), *rest)
            comm.dispatch((x, narrow), *rest)


# -- what rows are, and what lies behind the last ---------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("layout", ["expert", "slots"])
def test_source_tokens(ranks: Ranks, backend: str, layout: str) -> None:
    """Which token of its home rank each row is; -1 for padding and unused places."""
    ranks.run(check_source_tokens, backend, layout)


def check_source_tokens(context: RankContext, backend: str, layout: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    options = {"alignment": 4} if layout == "expert" else {}
    want = problem.dispatched(layout, **options)[context.rank]
    expected = torch.full((want.tokens.shape[:-1].numel(),), -1, dtype=torch.int32)
    for (_, token, *_), place in want.rows.items():
        expected[place] = token
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), layout=layout, **options)
        same_bytes(routed.source_tokens, expected.view(want.tokens.shape[:-1]), "source tokens")


@each_backend
def test_unused_ids_marked(ranks: Ranks, backend: str) -> None:
    """-1 in all rows behind the last, whatever lay there before."""
    ranks.run(check_unused_ids, backend)


def check_unused_ids(context: RankContext, backend: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    want = wanted(problem, "token", {"sizes": "bounded"})[context.rank]
    assert want.topk_ids is not None
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        ids = torch.full(want.topk_ids.shape, 5, device=context.device)
        out = tl.DispatchOut(topk_ids=ids)
        routed = comm.dispatch(*problem.arguments(context), layout="token", sizes="bounded", out=out)
        ids[want.num_rows :] = 5
        same_bytes(routed.unused_ids_marked(), want.topk_ids, "ids")


# -- faults -----------------------------------------------------------------------------------------------------

Call = Callable[[tl.Communicator, tl.Routed, dict[str, Any]], object]
FAULTS: list[Any] = [
    pytest.param("again", "x", lambda x: x[:, :-1], tl.ShapeMismatch, "x is", id="rows of another width"),
    pytest.param("again", "x", lambda x: x.to(FP8), tl.DtypeMismatch, "float8", id="rows of fp8"),
    pytest.param("again", "x", lambda x: x.requires_grad_(), tl.NotDifferentiable, "x requires", id="rows with grad"),
    pytest.param("again", "x", lambda x: x.t(), tl.ShapeMismatch, "x", id="rows not contiguous"),
    pytest.param("weights", "values", lambda v: v[:, :1], tl.ShapeMismatch, "values is", id="narrow values"),
    pytest.param("weights", "values", lambda v: v.double(), tl.DtypeMismatch, "values is", id="values of float64"),
    pytest.param("late", "w", lambda w: w[:, 1:], tl.ShapeMismatch, "topk_weights is", id="few late weights"),
    pytest.param("late", "w", lambda w: w.bfloat16(), tl.DtypeMismatch, "topk_weights is", id="bf16 late weights"),
    pytest.param("home", "w", lambda w: w[1:], tl.ShapeMismatch, "topk_weights is", id="few weights of a combine"),
    pytest.param(
        "home", "w", lambda w: w.double(), tl.DtypeMismatch, "topk_weights is", id="fp64 weights of a combine"
    ),
    pytest.param("bias", "b", lambda b: b[:, 1:], tl.ShapeMismatch, "bias is", id="narrow bias"),
    pytest.param("bias", "b", lambda b: b.int(), tl.DtypeMismatch, "bias is", id="bias of integers"),
    pytest.param("bias", "b", lambda b: [b, 3], tl.InvalidArgument, r"bias\[1\] is an int", id="bias of a number"),
]


def call(name: str, comm: tl.Communicator, routed: dict[str, tl.Routed], given: dict[str, Any]) -> object:
    if name == "again":
        return comm.dispatch_again(given["x"], routed["token"])
    if name == "weights":
        return comm.combine_weights(given["values"], routed["token"])
    if name == "late":
        return comm.reweighted(routed["slots"], given["w"])
    if name == "home":
        return comm.combine(routed["slots"].tokens, routed["slots"], topk_weights=given["w"])
    return comm.combine(routed["token"].tokens, routed["token"], bias=given["b"])


@pytest.mark.sampled(3)
@each_backend
@pytest.mark.parametrize(("name", "field", "change", "error", "text"), FAULTS)
def test_fault(
    ranks: Ranks, backend: str, name: str, field: str, change: Any, error: type[Exception], text: str
) -> None:
    """One rank raises its own error, the others PeerError, and the communicator works on."""
    index = next(i for i, each in enumerate(FAULTS) if each.values[:3] == (name, field, change))
    ranks.run(check_fault, backend, index)


def check_fault(context: RankContext, backend: str, index: int) -> None:
    name, field, change, error, text = FAULTS[index].values
    problem = make_problem(CASE, context.num_ranks)
    culprit = 0
    with make_comm(context, backend, problem.plan) as comm:
        x, ids, weights = problem.arguments(context)
        routed = {each: comm.dispatch(x, ids, weights, layout=each) for each in ("token", "slots")}
        values = torch.zeros_like(routed["token"].topk_weights)
        good = {"x": x.clone(), "values": values, "w": weights, "b": x.clone()}
        bad = good | {field: change(good[field].clone())}
        for _ in range(2):  # the second time the kind is known
            if context.rank == culprit:
                with pytest.raises(error, match=text):
                    call(name, comm, routed, bad)
            else:
                with pytest.raises(tl.PeerError) as raised:
                    call(name, comm, routed, good)
                assert raised.value.rank == culprit
            call(name, comm, routed, good)


def test_what_belongs_to_others() -> None:
    plan = {"num_experts": 4, "hidden": 8, "top_k": 2, "max_tokens_per_rank": 4}
    with tl.Communicator(backend="collective", device="cpu", **plan) as comm:
        routed = comm.dispatch(torch.ones(1, 8), torch.tensor([[0, 1]]), layout="token")
        with pytest.raises(tl.InvalidArgument, match="source_tokens"):
            _ = routed.source_tokens
        with pytest.raises(tl.InvalidArgument, match="another Communicator"):
            comm.combine_weights(torch.ones(1, 2), other_routed())


def other_routed() -> tl.Routed:
    plan = {"num_experts": 4, "hidden": 8, "top_k": 2, "max_tokens_per_rank": 4}
    comm = tl.Communicator(backend="collective", device="cpu", **plan)
    return comm.dispatch(torch.ones(1, 8), torch.tensor([[0, 1]]), layout="token")
