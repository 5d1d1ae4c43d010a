"""The reference against literals worked out by hand, and against brute force in plain Python and numpy.

Everything else is compared with the reference, so this is where a common mistake must show.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.cases import (
    BF16,
    EXAMPLE,
    FP16,
    FP32,
    FP64,
    SUMS,
    Case,
    Problem,
    Sum,
    case_params,
    expert_rows,
    make_problem,
    same_bits,
    same_bytes,
)
from tests.support.defaults import caller_default
from tokenloom import reference
from tokenloom.errors import CapacityOverflow
from tokenloom.plan import RECIPES, Activation, Plan, WeightLayout


@pytest.mark.parametrize("default", ["meta", FP64], ids=str)
def test_the_callers_defaults_change_nothing(default: str | torch.dtype) -> None:
    """Neither on what device results are, nor their dtypes and values; FP8 has scales and tables besides."""
    plan, ids = Plan(2, 4, 128, 2, 3), [torch.tensor([[0, 3], [2, -1], [1, 1]]), torch.tensor([[3, 2]])]
    generator = torch.Generator().manual_seed(5)
    xs = [torch.randn(len(each), 128, generator=generator) for each in ids]
    weights = [torch.rand(each.shape, generator=generator) for each in ids]
    w1, w2 = torch.randn(5, 256, 128, generator=generator), torch.randn(5, 128, 128, generator=generator)
    experts = (w1.to(torch.float8_e4m3fn), torch.ones(5, 2, 1), w2.to(torch.float8_e4m3fn), torch.ones(5, 1, 1))

    def results() -> list[torch.Tensor | None]:
        rows = reference.dispatch(plan, xs, ids, weights, "token", to_fp8=True)
        routed = reference.dispatch(plan, xs, ids, weights, "expert", alignment=2, capacity=4, bounded=True)
        outs = reference.combine(plan, [each.tokens for each in routed], routed, ids, weights)
        fp8 = [each for row in rows for each in (row.tokens, row.scales, row.topk_ids, row.topk_weights)]
        layer = reference.fused_layer(xs[0], ids[0], weights[0], *experts, num_shared_experts=1)
        return [*fp8, *(each.tokens for each in routed), *outs, layer]

    want = results()
    with caller_default(default):
        found = results()
    for ours, theirs in zip(found, want, strict=True):
        assert ours is not None
        assert theirs is not None
        same_bytes(ours, theirs, "a result")


# -- by hand ----------------------------------------------------------------------------------------------------


def test_example_layout_token() -> None:
    """One row per (token, rank), in the order (source, token); a repeated expert is one row."""
    for rank, routed in enumerate(EXAMPLE.problem.dispatched("token")):
        assert routed.tokens.tolist() == EXAMPLE.token_rows[rank]
        assert routed.topk_ids is not None
        assert routed.topk_ids.tolist() == EXAMPLE.token_ids[rank]
        assert routed.topk_weights is not None
        assert routed.topk_weights.tolist() == EXAMPLE.token_weights[rank]
        assert routed.expert_counts == EXAMPLE.expert_counts[rank]
        assert routed.source_counts == EXAMPLE.source_counts[rank]
        assert routed.num_rows == 3
        assert routed.expert_offsets is None


@pytest.mark.parametrize("alignment", [1, 4])
def test_example_layout_expert(alignment: int) -> None:
    """One row per route, grouped by expert; groups padded with zeros."""
    rows, offsets = EXAMPLE.expert_rows, EXAMPLE.expert_offsets
    if alignment == 4:
        rows, offsets = EXAMPLE.aligned_rows, EXAMPLE.aligned_offsets
    for rank, routed in enumerate(EXAMPLE.problem.dispatched("expert", alignment=alignment)):
        assert routed.tokens.tolist() == rows[rank]
        assert routed.expert_offsets == offsets[rank]
        assert routed.expert_counts == EXAMPLE.expert_counts[rank]
        assert routed.num_rows == len(rows[rank])
        assert routed.padding == ([] if alignment == 1 else [2, 3, 6, 7])


def test_example_layout_rank() -> None:
    """Place (s, j) is the j-th token that source s sends here."""
    for rank, routed in enumerate(EXAMPLE.problem.dispatched("rank")):
        assert list(routed.tokens.shape) == [2, 3, 2]
        for source, rows in enumerate(EXAMPLE.rank_rows[rank]):
            assert routed.tokens[source, : len(rows)].tolist() == rows
        assert routed.source_counts == EXAMPLE.source_counts[rank]
        assert routed.num_rows == 3


def test_example_layout_slots() -> None:
    """Fixed places for each expert, filled in the order of layout expert; the third stays empty."""
    for rank, routed in enumerate(EXAMPLE.problem.dispatched("slots", capacity=3)):
        first, second = EXAMPLE.expert_rows[rank][:2], EXAMPLE.expert_rows[rank][2:]
        assert routed.tokens.shape == (2, 3, 2)
        assert routed.tokens[:, :2].tolist() == [first, second]
        assert routed.expert_counts == EXAMPLE.expert_counts[rank]
        assert [[list(each) for each in row] for row in routed.slot_ranges or []] == EXAMPLE.slot_ranges[rank]
        assert routed.source_counts == EXAMPLE.source_counts[rank]
        assert (routed.num_rows, routed.padding) == (4, [2, 5])
        assert routed.expert_offsets is routed.topk_ids is routed.topk_weights is None
    by_default = EXAMPLE.problem.dispatched("slots")[0]
    assert by_default.tokens.shape == (2, 6, 2), "all tokens of all ranks"


def test_example_slots_that_do_not_do() -> None:
    """One place for each expert: the second route goes, whatever its source, and NaN comes home for its token."""
    problem = EXAMPLE.problem
    routed = problem.dispatched("slots", capacity=1)
    assert [each.expert_counts for each in routed] == [[1, 1], [1, 1]]
    assert [each.num_rows for each in routed] == [2, 2]
    assert [each.slot_ranges for each in routed] == [[[(0, 1), (1, 0)], [(0, 1), (1, 0)]]] * 2
    assert routed[0].rows == {(0, 0, 1): 0, (0, 1, 0): 1}
    assert [each.source_counts for each in routed] == EXAMPLE.source_counts
    ys = [torch.tensor([[[10.0, 1.0]], [[30.0, 3.0]]]), torch.tensor([[[50.0, 5.0]], [[70.0, 7.0]]])]
    outs = reference.combine(problem.plan, ys, routed, problem.topk_ids, problem.topk_weights)
    assert outs[0][0].tolist() == [37.5, 3.75]
    assert outs[0][1].isnan().all()
    assert outs[0][2].tolist() == [200, 20]
    assert outs[1].isnan().all()


def test_layouts_of_scales() -> None:
    """Columns: a block's scales of all places side by side. Packed: exponents, the first block in the lowest byte."""
    plan, hidden = Plan(1, 2, 640, 1, 2), 640
    xs, ids = [torch.zeros(2, hidden, dtype=torch.uint8).view(torch.float8_e4m3fn)], [torch.tensor([[1], [1]])]
    scales = [torch.tensor([[0.5, 1.0, 2.0, 4.0, 8.0], [2.0**-126, 2.0**127, 1.0, 1.0, 0.25]])]

    def laid_out(scale_layout: str) -> torch.Tensor:
        found = reference.dispatch(plan, xs, ids, None, "slots", scales=scales, scale_layout=scale_layout)[0].scales
        assert found is not None
        return found

    rows, columns, packed = (laid_out(each) for each in ("rows", "columns", "packed"))
    assert rows[1].tolist() == scales[0].tolist()
    assert (rows.stride(), columns.stride(), packed.stride()) == ((10, 5, 1), (10, 1, 2), (4, 1, 2))
    assert torch.equal(rows, columns)
    assert packed.shape == (2, 2, 2)
    assert packed[1, 0].tolist() == [126 | 127 << 8 | 128 << 16 | (129 << 24) - 2**32, 130]
    assert packed[1, 1].tolist() == [1 | 254 << 8 | 127 << 16 | 127 << 24, 125]


@pytest.mark.parametrize("mode", ["per_rank", "per_route"])
def test_example_combine(mode: str) -> None:
    """Weighted and plain sums; the token with a NaN weight on its -1 is not touched by it."""
    problem = EXAMPLE.problem
    routed = problem.dispatched("expert")
    ys = [torch.tensor(y, dtype=FP32) for y in EXAMPLE.y]
    weighted = reference.combine(problem.plan, ys, routed, problem.topk_ids, problem.topk_weights, mode=mode)
    assert [out.tolist() for out in weighted] == EXAMPLE.weighted
    plain = reference.combine(problem.plan, ys, routed, problem.topk_ids, None, mode=mode)
    assert [out.tolist() for out in plain] == EXAMPLE.unweighted


def test_example_capacity() -> None:
    """Capacity 3 of the 4 rows of layout expert: the last row of the last group goes, NaN for its token alone."""
    problem = EXAMPLE.problem
    with pytest.raises(CapacityOverflow) as overflow:
        problem.dispatched("expert", capacity=3)
    assert (overflow.value.needed, overflow.value.capacity) == (4, 3)
    routed = problem.dispatched("expert", capacity=3, bounded=True)
    assert [each.expert_offsets for each in routed] == [[0, 2, 3], [0, 2, 3]]
    assert [each.expert_counts for each in routed] == [[2, 1], [2, 1]]
    assert [each.source_counts for each in routed] == EXAMPLE.source_counts
    ys = [torch.tensor(y, dtype=FP32)[:3] for y in EXAMPLE.y]
    out = reference.combine(problem.plan, ys, routed, problem.topk_ids, problem.topk_weights)
    assert [rows.isnan().all(1).tolist() for rows in out] == [[False, True, False], [False, True]]
    assert out[0][[0, 2]].tolist() == [EXAMPLE.weighted[0][0], EXAMPLE.weighted[0][2]]


@pytest.mark.parametrize("example", SUMS, ids=lambda example: example.name)
@pytest.mark.parametrize("mode", ["per_rank", "per_route"])
def test_sum_by_hand(example: Sum, mode: str) -> None:
    """Values chosen so that another order, a fused multiply-add or another rounding gives another result."""
    problem = example.problem()
    routed = problem.dispatched("expert")
    out = reference.combine(
        problem.plan,
        example.rows(routed),
        routed,
        problem.topk_ids,
        problem.topk_weights,
        mode=mode,
        wire_dtype=example.wire_dtype,
        out_dtype=example.out_dtype,
    )
    dtype = example.out_dtype or example.y_dtype
    want = torch.full((1, problem.plan.hidden), getattr(example, mode), dtype=FP64).to(dtype)
    same_bits(out[0], want, example.name)


# -- by brute force ---------------------------------------------------------------------------------------------

SMALL = [case for case in case_params() if case.values[0].hidden < 1000]  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", SMALL)
def test_dispatch_equals_brute_force(case: Case, num_ranks: int) -> None:
    """Nested loops in the order of the definition, appending row after row; no sorting, no maps."""
    problem = make_problem(case, num_ranks)
    plan, ids = problem.plan, [rank_ids.tolist() for rank_ids in problem.topk_ids]
    token, by_rank = problem.dispatched("token"), problem.dispatched("rank")
    for alignment in (1, 4):
        expert = problem.dispatched("expert", alignment=alignment)
        for rank in range(num_ranks):
            rows, offsets, counts = [], [0], []
            for e in range(rank * plan.experts_per_rank, (rank + 1) * plan.experts_per_rank):
                here = [(s, t) for s in range(num_ranks) for t, row in enumerate(ids[s]) for each in row if each == e]
                rows += here
                while len(rows) % alignment:
                    rows.append(None)
                offsets.append(len(rows))
                counts.append(len(here))
            assert expert[rank].expert_offsets == offsets
            assert expert[rank].expert_counts == counts
            assert expert[rank].num_rows == len(rows) == len(expert[rank].tokens)
            assert expert[rank].source_counts == token[rank].source_counts
            assert token[rank].expert_counts == by_rank[rank].expert_counts == counts
            check_rows(problem, expert[rank], rows)
    for rank in range(num_ranks):
        rows = []
        for source in range(num_ranks):
            here = [(source, t) for t, row in enumerate(ids[source]) if any(lives_on(plan, e, rank) for e in row)]
            rows += here
            assert token[rank].source_counts[source] == by_rank[rank].source_counts[source] == len(here)
            for place, key in enumerate(here):
                assert by_rank[rank].rows[key] == source * plan.max_tokens_per_rank + place
        check_rows(problem, token[rank], rows)
        check_routes(problem, token[rank], rows, rank)


def lives_on(plan: Plan, expert: int, rank: int) -> bool:
    return rank * plan.experts_per_rank <= expert < (rank + 1) * plan.experts_per_rank


def check_rows(problem: Problem, routed: reference.Routed, rows: list[tuple[int, int] | None]) -> None:
    """Row by row, in bytes: the token of each, zeros where there is none."""
    assert len(routed.tokens) == len(rows)
    for place, key in enumerate(rows):
        want = bytes(problem.xs[0].element_size() * problem.plan.hidden)
        if key is not None:
            want = raw(problem.xs[key[0]][key[1]])
        assert raw(routed.tokens[place]) == want
        if routed.scales is not None and problem.scales is not None:
            want_scales = problem.scales[key[0]][key[1]].tolist() if key else [0.0] * problem.plan.scales_per_token
            assert routed.scales[place].tolist() == want_scales


def raw(row: torch.Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def check_routes(problem: Problem, routed: reference.Routed, rows: list[tuple[int, int]], rank: int) -> None:
    """Local ids and weights of layout token; weights of places without a route are 0, never the caller's NaN."""
    assert routed.topk_ids is not None
    for place, (source, token) in enumerate(rows):
        for k, expert in enumerate(problem.topk_ids[source][token].tolist()):
            local = expert - rank * problem.plan.experts_per_rank if lives_on(problem.plan, expert, rank) else -1
            assert routed.topk_ids[place, k] == local
            if routed.topk_weights is not None and problem.topk_weights is not None:
                weight = problem.topk_weights[source][token, k].item() if local >= 0 else 0.0
                assert routed.topk_weights[place, k].item() == weight


@pytest.mark.parametrize("y_dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("mode", ["per_rank", "per_route", "per_node"])
@pytest.mark.parametrize("case", case_params(["plain", "top8", "descending-ranks", "repeats", "nan-weights"]))
def test_combine_equals_brute_force(case: Case, mode: str, y_dtype: torch.dtype) -> None:
    """Scalar by scalar in numpy, whose products and sums are rounded one by one."""
    num_ranks = 4
    problem = make_problem(case, num_ranks)
    plan, routed = problem.plan, problem.dispatched("expert", alignment=3)
    ys = expert_rows(problem, routed, y_dtype)
    assert problem.topk_weights is not None
    nodes = [[0, 1, 2], [3]]  # unequal, and a sum of three tells its order
    got = reference.combine(plan, ys, routed, problem.topk_ids, problem.topk_weights, mode=mode, nodes=nodes)
    number = np.float64 if y_dtype == FP64 else np.float32
    for source, rank_ids in enumerate(problem.topk_ids):
        for token, experts in enumerate(rank_ids.tolist()):
            for column in range(plan.hidden):
                groups: list[list[np.floating]] = []
                for rank in range(num_ranks):
                    ks = [k for k, e in enumerate(experts) if lives_on(plan, e, rank)]
                    groups.append([])
                    for k in ks:
                        y = ys[rank][routed[rank].rows[source, token, k], column].item()
                        groups[-1].append(number(y) * number(problem.topk_weights[source][token, k].item()))
                if mode == "per_route":
                    order = [k for k, e in enumerate(experts) if e >= 0]
                    taken = {e: iter(group) for e, group in enumerate(groups)}
                    terms = [next(taken[experts[k] // plan.experts_per_rank]) for k in order]
                elif mode == "per_rank":
                    terms = [chain(group) for group in groups if group]
                else:
                    sums = [
                        [number(rounded(chain(groups[r]), y_dtype)) for r in ranks if groups[r]] for ranks in nodes
                    ]
                    terms = [chain(each) for each in sums if each]
                want = chain([number(rounded(term, y_dtype)) for term in terms]) if terms else number(0)
                assert got[source][token, column].item() == rounded(want, y_dtype)


def chain(terms: list[np.floating]) -> np.floating:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def rounded(value: np.floating, dtype: torch.dtype) -> float:
    """``value`` rounded to nearest, ties to even; bfloat16 by hand on the bits."""
    if dtype == FP64:
        return float(value)
    if dtype == FP32:
        return float(np.float32(value))
    if dtype == FP16:
        return float(np.float16(value))
    bits = int(np.float32(value).view(np.uint32))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


@pytest.mark.parametrize("layout", ["token", "rank"])
def test_combine_of_one_row_per_token(layout: str) -> None:
    """Layouts token and rank: the rows themselves are the partial sums."""
    problem = EXAMPLE.problem
    routed = problem.dispatched(layout)
    ys = [torch.full(each.tokens.shape, torch.nan) for each in routed]
    for rank, (each, y) in enumerate(zip(routed, ys, strict=True)):
        for (source, token), place in each.rows.items():
            y.view(-1, 2)[place] = 100 * rank + 10 * source + token
    out = reference.combine(problem.plan, ys, routed, problem.topk_ids, None)
    # rank 0: token 0 goes to both ranks, 1 to rank 0, 2 to rank 1; rank 1: token 0 to rank 0, token 1 to rank 1
    assert [rows[:, 0].tolist() for rows in out] == [[0 + 100, 1, 102], [10, 111]]


@pytest.mark.parametrize("shared", [False, True])
def test_moe_equals_dense(shared: bool) -> None:
    """The whole layer, token by token and expert by expert, in float64."""
    problem = make_problem(Case("moe", "", dtype=FP64, hidden=6, unused=0.2, top_k=3, pick="repeats"), 2)
    xs = [torch.randn(x.shape, dtype=FP64) for x in problem.xs]
    plan = problem.plan
    w1 = torch.randn(plan.num_experts, 2 * 5, plan.hidden, dtype=FP64)
    w2 = torch.randn(plan.num_experts, plan.hidden, 5, dtype=FP64)
    extra = (torch.randn(2 * 4, plan.hidden, dtype=FP64), torch.randn(plan.hidden, 4, dtype=FP64)) if shared else ()
    assert problem.topk_weights is not None
    outs = reference.moe(plan, xs, problem.topk_ids, problem.topk_weights, w1, w2, *extra)

    def expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, value = (up @ x).chunk(2)
        return down @ (torch.nn.functional.silu(gate) * value)

    for source, x in enumerate(xs):
        for token in range(len(x)):
            want = torch.zeros(plan.hidden, dtype=FP64)
            for k, e in enumerate(problem.topk_ids[source][token].tolist()):
                if e >= 0:
                    want += problem.topk_weights[source][token, k] * expert(x[token], w1[e], w2[e])
            if shared:
                want += expert(x[token], *extra)
            # float64 with another order of sums: a few units in the last place of values near 100
            torch.testing.assert_close(outs[source][token], want, rtol=1e-12, atol=1e-11)


def gelu_by_hand(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def tanh_gelu_by_hand(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


BY_HAND: dict[str, tuple[Activation | str, Callable[..., float]]] = {
    "swigluoai": (
        "swigluoai",
        lambda g, u: (min(max(u, -7), 7) + 1) * min(g, 7) / (1 + math.exp(-1.702 * min(g, 7))),
    ),
    "clamped swiglu": (
        Activation(limit=0.5),
        lambda g, u: min(max(u, -0.5), 0.5) * min(g, 0.5) / (1 + math.exp(-min(g, 0.5))),
    ),
    "geglu": ("geglu", lambda g, u: gelu_by_hand(g) * u),
    "geglu_tanh": ("geglu_tanh", lambda g, u: tanh_gelu_by_hand(g) * u),
    "reglu": ("reglu", lambda g, u: max(g, 0) * u),
    "silu": ("silu", lambda x: x / (1 + math.exp(-x))),
    "gelu": ("gelu", gelu_by_hand),
    "gelu_tanh": ("gelu_tanh", tanh_gelu_by_hand),
    "relu": ("relu", lambda x: max(x, 0)),
    "relu2": ("relu2", lambda x: max(x, 0) ** 2),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("name", "interleaved"),
    [(name, each) for name, (given, _) in BY_HAND.items() for each in (False, True)[: Activation.of(given).rows]],
)
def test_other_experts_by_hand(name: str, interleaved: bool, transposed: bool) -> None:
    """One token, one value at a time: w2 activation(w1 x + b1) + b2, then the weight; and a gated shared expert."""
    layout = WeightLayout(transposed, interleaved)
    given, function = BY_HAND[name]
    activation = Activation.of(given)
    generator = torch.Generator().manual_seed(1)
    width, hidden, parts = 3, 4, activation.rows

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=FP64) * 2

    x, weight = draw(1, hidden), 0.75
    w1, w2, b1, b2 = draw(2, parts, width, hidden), draw(2, hidden, width), draw(2, parts, width), draw(2, hidden)
    s1, s2, gate_weight = draw(parts, width, hidden), draw(hidden, width), draw(1, hidden)

    def by_hand(first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor) -> list[float]:
        products = [
            [sum((row * x[0]).tolist()) + term for row, term in zip(rows, terms, strict=True)]
            for rows, terms in zip(first.transpose(0, 1), bias.T.tolist(), strict=True)
        ]
        values = [function(*each) for each in products]
        return [sum(second[h, i].item() * values[i] for i in range(width)) for h in range(hidden)]

    routed = [y + b2[1, h].item() for h, y in enumerate(by_hand(w1[1], w2[1], b1[1]))]
    gate = 1 / (1 + math.exp(-sum((gate_weight * x)[0].tolist())))
    want = [weight * y + gate * s for y, s in zip(routed, by_hand(s1, s2, torch.zeros_like(b1[1])), strict=True)]
    order = (0, 2, 1, 3) if layout.interleaved else (0, 1, 2, 3)
    rows, bias = w1.permute(order).flatten(1, 2), b1.permute(order[:3]).flatten(1, 2)
    (out,) = reference.moe(
        Plan(1, 2, hidden, 1, 1),
        [x],
        [torch.tensor([[1]])],
        [torch.tensor([[weight]], dtype=FP64)],
        rows.transpose(1, 2) if layout.transposed else rows,
        w2.transpose(1, 2) if layout.transposed else w2,
        s1.flatten(0, 1),
        s2,
        w1_bias=bias,
        w2_bias=b2,
        shared_gate_weight=gate_weight,
        activation=given,
        weight_layout=layout,
    )
    torch.testing.assert_close(out[0], torch.tensor(want, dtype=FP64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("power_of_two_scales", "first"), [(False, 78), (True, 72)])
@pytest.mark.parametrize("quantised", [False, True])
def test_fused_layer_by_hand(power_of_two_scales: bool, first: int, quantised: bool) -> None:
    """The activations of a route are 448 and 101, times its weight, then quantised. In steps of 8 that is 104 where
    448 is the largest value of FP8: always, unless scales are powers of two. Then 0.75 * 101 becomes 72."""
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    x[0, 0] = 1
    w1, w2, w1_bias, w2_bias = (torch.zeros(3, *shape) for shape in ((256, 128), (128, 128), (256,), (128,)))
    w1[:, 0, 0], w1[:, 1, 0], w1_bias[:, 1], w1_bias[:, 128:], w2_bias[:, 6] = 448, 96, 5, 1, 10
    w2[:, 5, 1] = torch.tensor([1, 2, 4])
    got = reference.fused_layer(
        reference.quantize_fp8(x, power_of_two_scales=power_of_two_scales) if quantised else x,
        torch.tensor([[0, -1, 1], [-1, -1, -1]]),
        torch.tensor([[0.75, 9, 0.5], [1, 1, 1]]),
        w1.to(torch.float8_e4m3fn),
        torch.ones(3, 2, 1),
        w2.to(torch.float8_e4m3fn),
        torch.ones(3, 1, 1),
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        num_shared_experts=1,
        activation=Activation("relu"),
        power_of_two_scales=power_of_two_scales,
    )
    want = torch.zeros(2, 128)
    want[0, 5], want[0, 6] = first + 2 * 52 + 4 * 104, 10 * 0.75 + 10 * 0.5 + 10
    want[1, 5], want[1, 6] = 4 * 5, 10  # of the shared expert alone, whose largest activation this is
    assert torch.equal(got, want.to(torch.bfloat16))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("quantised", [False, True])
def test_a_narrow_fused_layer_is_a_wide_one_with_zeros(recipe: str, quantised: bool) -> None:
    """The last block of 128 is short in x, in activations, and in gates and in ups, each of which begin with one."""
    experts, hidden, width, generator = 2, 144, 176, torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    halves, w2 = randn(experts, 2, width, hidden).to(torch.float8_e4m3fn), randn(experts, hidden, width)
    w2 = w2.to(torch.float8_e4m3fn)
    x, ids, weights = randn(3, hidden).to(torch.bfloat16), torch.tensor([[0], [1], [0]]), torch.rand(3, 1)
    shapes = [(experts, 4, 2), (experts, 2, 2)] if recipe == "block" else [(experts, 2, 256), (experts, 256)]
    of_w1, of_w2 = (randn(*shape).exp() for shape in shapes)

    def layer(high: int, wide: int) -> torch.Tensor:
        """Of these widths: what is beyond those above is zeros, or scales that nothing has."""
        by_row = recipe == "row"
        tokens, rows = torch.zeros(2, 3, wide)
        first, second = torch.zeros(experts, 2, high, wide), torch.zeros(experts, wide, high)
        first[:, :, :width, :hidden], second[:, :hidden, :width], tokens[:, :hidden] = halves.float(), w2.float(), x
        codes, scales = reference.quantize_fp8(tokens[:, :hidden], recipe=recipe)
        rows[:, :hidden] = codes.float()
        return reference.fused_layer(
            (rows.to(torch.float8_e4m3fn), scales) if quantised else tokens.to(torch.bfloat16),
            ids,
            weights,
            first.flatten(1, 2).to(torch.float8_e4m3fn),
            of_w1[:, :, :high].flatten(1) if by_row else of_w1,
            second.to(torch.float8_e4m3fn),
            of_w2[:, :wide] if by_row else of_w2,
            recipe=recipe,
        )

    wanted = layer(256, 256)
    assert wanted[:, :hidden].any()
    assert not wanted[:, hidden:].any()
    assert torch.equal(layer(width, hidden), wanted[:, :hidden])
