"""Calls like those before, as a serving loop makes them: bounded sizes, no gradients, ever other tokens.

From the second of a kind on, a backend may take a short way, so each is compared, and read late.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import BF16, Case, each_backend, expert_rows, make_comm, make_problem, same_bits, same_routed
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.runtime.processes import RankContext

CASE = Case("usual", "", top_k=3, unused=0.2, hidden=256)
MOST_TOKENS = 6
LARGE = 1100
"""Tokens that a rank may have, so that rows go straight to their places."""
KINDS: list[Any] = [
    pytest.param("token", {}, id="token"),
    pytest.param("rank", {}, id="rank", marks=pytest.mark.slow),
    pytest.param("expert", {"alignment": 4, "capacity": 80}, id="expert", marks=pytest.mark.slow),
    pytest.param("slots", {}, id="slots"),
    pytest.param("token", {"to_fp8": True}, id="token fp8", marks=pytest.mark.slow),
    pytest.param("slots", {"to_fp8": True, "scale_layout": "columns"}, id="slots columns", marks=pytest.mark.slow),
    pytest.param("slots", {"to_fp8": True, "recipe": "row"}, id="slots fp8 row", marks=pytest.mark.slow),
]


@pytest.mark.sampled(3)
@each_backend
@pytest.mark.parametrize(("layout", "others"), KINDS)
def test_calls_like_those_before(ranks: Ranks, backend: str, layout: str, others: dict[str, Any]) -> None:
    """Each result is read when another dispatch has been made, which must have left it as it was."""
    ranks.run(check_calls, backend, layout, others)


@pytest.mark.parametrize(("layout", "others"), KINDS)
def test_calls_of_large_plans(hoppers: Ranks, layout: str, others: dict[str, Any]) -> None:
    """The same where kernels take other ways."""
    hoppers.run(check_calls, "nvlink", layout, others, LARGE)


def check_calls(context: RankContext, backend: str, layout: str, others: dict[str, Any], spare: int = 0) -> None:
    fp8 = "to_fp8" in others
    tokens = [(6, 0, 3, 5), (0, 4, 6, 1), (6, 6, 6, 6)]
    problems = []
    for seed, numbers in enumerate(tokens):
        room = MOST_TOKENS + spare - max(numbers[: context.num_ranks])
        case = replace(CASE, seed=seed, tokens=numbers, spare=room, to_quantise=fp8)
        problems.append(make_problem(case, context.num_ranks))
    options = {"layout": layout, "sizes": "bounded", **others}
    wanted = {name: value for name, value in options.items() if name != "sizes"}
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        before: Any = None
        for problem in problems * 2:
            if layout == "token":
                wanted["capacity"] = problem.plan.worst_case_rows("token")
            want = problem.dispatched(**wanted, bounded=True)
            routed = comm.dispatch(*problem.arguments(context), **options)
            if before is not None:
                finish(context, comm, *before)
            before = routed, want, problem
        finish(context, comm, *before)


def finish(context: RankContext, comm: Any, routed: Any, want: Any, problem: Any) -> None:
    """Compare a dispatch, and its combine, with the reference."""
    same_routed(routed, want[context.rank], problem.plan, bounded=True)
    ys = expert_rows(problem, want, BF16)
    weights = problem.topk_weights if routed.layout in ("expert", "slots") else None
    outs = reference.combine(problem.plan, ys, want, problem.topk_ids, weights)
    y = ys[context.rank].to(context.device)
    same_bits(comm.combine(y, routed), outs[context.rank], f"combine, {routed.layout}")
    out = torch.full_like(outs[context.rank], torch.nan, device=context.device)
    assert comm.combine(y, routed, out=out) is out
    same_bits(out, outs[context.rank], f"combine to a tensor, {routed.layout}")


@on_ranks
@pytest.mark.sampled(3)
@each_backend
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_fault_among_usual_calls(context: RankContext, backend: str, call: str) -> None:
    """The others, whose call is a usual one, hear of it; then all go on, as before."""
    problem = make_problem(replace(CASE, tokens=(6, 0, 3, 5)), context.num_ranks)
    want = problem.dispatched("slots")
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        x, ids, weights = problem.arguments(context)
        assert isinstance(x, torch.Tensor)
        for _ in range(3):
            for _ in range(2):
                routed = comm.dispatch(x, ids, weights, layout="slots")
                finish(context, comm, routed, want, problem)
            given = torch.cat([x, x], dim=1) if call == "dispatch" and context.rank == 0 else x
            y = torch.zeros_like(routed.tokens)

            def calls(given: torch.Tensor = given, y: torch.Tensor = y) -> None:
                routed = comm.dispatch(given, ids, weights, layout="slots")
                if call == "combine":
                    comm.combine(y[:-1] if context.rank == 0 else y, routed)
                comm.check()

            with pytest.raises(tl.ShapeMismatch if context.rank == 0 else tl.PeerError, match=r"\[|rank 0"):
                calls()
