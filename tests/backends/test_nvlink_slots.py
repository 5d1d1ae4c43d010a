"""Backend "nvlink": rows of large plans go straight to slots, to the place that their sender counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.backends.large_plans import no_plan_is_small
from tests.comm.test_masks import combine_all_modes, pair
from tests.support.cases import BF16, FP8, Case, Problem, make_comm, make_problem, same_bits, same_routed
from tests.support.nvlink_cases import new_comm
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""
BASE = Case("slots", "", tokens=(50, 3, 0, 31), spare=2, experts_per_rank=3, hidden=256, top_k=4, unused=0.2)
ROUTINGS = [
    replace(BASE, name="distinct experts"),
    replace(BASE, name="repeated experts", pick="repeats", ids_dtype=torch.int32, weights="nan where unused"),
    replace(BASE, name="one expert has all", pick="one expert"),
    replace(BASE, name="one rank has all", pick="one rank"),
    replace(BASE, name="nothing leaves its rank", pick="own rank"),
    replace(BASE, name="no routes", pick="none"),
    replace(BASE, name="most experts are empty", experts_per_rank=40, tokens=(3, 2)),
    replace(BASE, name="more tokens than two for each thread", tokens=(1100, 1031), hidden=8),
]
each_half = pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])


def check(context: RankContext, comm: tl.Communicator, problem: Problem, halves: bool = False, **options: Any) -> None:
    """A dispatch with room for all and its combines, then some with too few slots; whatever has no place is NaN at
    home, and the next call hears how many places would do."""
    send = (lambda *given, **kind: comm.send_dispatch(*given, **kind).receive()) if halves else comm.dispatch
    needed = problem.rows_needed("slots")
    for capacity in sorted({needed + 3, needed, needed - 1, needed // 2, 1} - {0}, reverse=True):
        options |= {"layout": "slots", "capacity": capacity}
        with torch.no_grad():
            routed, want = send(*problem.arguments(context), **options), problem.dispatched(**options)
            if capacity < needed:
                with pytest.raises(tl.CapacityOverflow) as overflow:
                    comm.check()
                assert (overflow.value.needed, overflow.value.capacity) == (needed, capacity)
            same_routed(routed, want[context.rank], problem.plan)
            combine_all_modes(context, comm, routed, problem, want, problem.topk_ids)
    comm.check()


@on_ranks("hoppers")
@each_half
@pytest.mark.parametrize("case", ROUTINGS, ids=lambda case: case.name)
def test_routes(context: RankContext, case: Case, halves: bool) -> None:
    problem = make_problem(case, context.num_ranks)
    with no_plan_is_small(), new_comm(context, problem.plan, checked=False) as comm:
        check(context, comm, problem, halves)


@on_ranks("hoppers")
@each_half
@pytest.mark.parametrize("to_fp8", [False, True], ids=["with scales", "quantised"])
@pytest.mark.parametrize("scale_layout", ["rows", "columns", "packed"])
def test_fp8(context: RankContext, scale_layout: str, to_fp8: bool, halves: bool) -> None:
    """Scales lie as they are asked for: those that came with rows of others, those of rows that stay, and those made
    here; five for a row, which fill no two words."""
    case = replace(BASE, hidden=640, pick="repeats", dtype=BF16 if to_fp8 else FP8, to_quantise=to_fp8)
    problem = make_problem(case, context.num_ranks)
    packed = scale_layout == "packed"
    options: dict[str, Any] = {"to_fp8": True, "power_of_two_scales": packed} if to_fp8 else {}
    if packed and problem.scales is not None:
        powers = [torch.exp2(scales.log2().ceil()) for scales in problem.scales]
        problem = replace(problem, scales=powers)
    with no_plan_is_small(), new_comm(context, problem.plan, checked=False) as comm:
        check(context, comm, problem, halves, scale_layout=scale_layout, **options)


@on_ranks("several")
@pytest.mark.parametrize("masked", [0, 1])
def test_masked_ranks(context: RankContext, masked: int) -> None:
    problem = make_problem(replace(BASE, tokens=(20, 13, 0, 31)), context.num_ranks)
    with no_plan_is_small(), make_comm(context, "nvlink", problem.plan) as comm:
        pair(context, comm, problem, [], "slots")
        if context.rank == masked:
            return
        comm.mask_ranks([masked])
        for _ in range(3):
            pair(context, comm, problem, [masked], "slots")


@on_ranks("hoppers")
@pytest.mark.parametrize("scale_layout", ["rows", "columns"])
def test_who_owns_outputs(context: RankContext, scale_layout: str) -> None:
    """Views of two receive buffers last until the second next dispatch; copies, what the caller gave, and what has a
    gradient, stay."""
    case = replace(BASE, dtype=FP8)
    problems = [make_problem(replace(case, seed=seed), context.num_ranks) for seed in range(3)]
    capacity = max(each.rows_needed("slots") for each in problems) + 1
    options: dict[str, Any] = {"layout": "slots", "capacity": capacity, "scale_layout": scale_layout}
    want = [each.dispatched(**options)[context.rank] for each in problems]

    def same(routed: tl.Routed, number: int) -> None:
        same_routed(routed, want[number], problems[number].plan)

    with no_plan_is_small(), new_comm(context, problems[0].plan, checked=False) as comm:
        given = [each.arguments(context) for each in problems]
        with torch.no_grad():
            own = [comm.dispatch(*given[0], **options, copy=copy) for copy in (True, "if_needed")]
            like = own[0]
            assert like.scales is not None
            scales = torch.empty_strided(like.scales.shape, like.scales.stride(), device=context.device)
            out = tl.DispatchOut(tokens=torch.empty_like(like.tokens), scales=scales)
            own.append(comm.dispatch(*given[0], **options, out=out))
            assert own[-1].tokens is out.tokens
            assert own[-1].scales is scales
        own.append(comm.dispatch(*given[0], **options))
        with torch.no_grad():
            views = [comm.dispatch(*arguments, **options) for arguments in given[1:]]
        for number, view in enumerate(views, start=1):
            same(view, number)
        for routed in own:
            same(routed, 0)
            y = torch.ones(routed.tokens.shape, dtype=BF16, device=context.device)
            comm.combine(y, routed)


@on_ranks("hoppers")
def test_gradients(context: RankContext) -> None:
    """Backward goes the ways of the forward calls: what is sent at home comes back to its token, once for each route
    that has a place."""
    problem = make_problem(replace(BASE, pick="repeats"), context.num_ranks)
    needed = problem.rows_needed("slots")
    with no_plan_is_small(), new_comm(context, problem.plan, checked=False) as comm:
        x, ids, weights = problem.arguments(context)
        assert isinstance(x, torch.Tensor)
        assert weights is not None
        x.requires_grad_()
        routed = comm.dispatch(x, ids, weights, layout="slots", capacity=needed)
        counts = routed.expert_counts.tolist()
        routed.tokens.backward(torch.ones_like(routed.tokens))
        of_token = (ids >= 0).sum(1).to(BF16)[:, None].expand_as(x)
        same_bits(x.grad, of_token.cpu(), "gradient")
        assert sum(counts) == int(routed.num_rows)
