"""Backend "nvlink" with more ranks than a warp has lanes, and a word bits. No GPUs have run so many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.comm.test_masks import LAYOUTS, without
from tests.kernels.test_emulated_ranks import needs_compiler
from tests.support.cases import FP32, Case, Problem, expert_rows, make_comm, make_problem, same_bits, same_routed
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.plan import ROUTE_LAYOUTS
from tokenloom.runtime.processes import RankContext

pytestmark = [needs_compiler, pytest.mark.slow]
NUM_RANKS, MASKED, ODD = 64, 45, 50
CASE = Case("many ranks", "", tokens=(3, 1, 0, 2), spare=0, unused=0.2, dtype=FP32, experts_per_rank=2, top_k=6)
CASES = {"eager": replace(CASE, tokens=(2, 1, 0), top_k=32), "not eager": replace(CASE, spare=30)}
"""Whether rows leave before others have opened a call is a matter of the most rows that a rank may receive."""


class Trip:
    """What ranks receive in every layout, what they send home, and what comes of it. Known before they start."""

    def __init__(self, problem: Problem, masked: list[int]) -> None:
        self.problem, self.masked, rest = problem, masked, without(problem, masked)
        self.options: dict[str, dict[str, Any]] = {layout: {"layout": layout} for layout in LAYOUTS}
        self.options["slots"]["capacity"] = problem.rows_needed("slots")
        self.want = {layout: rest.dispatched(**options) for layout, options in self.options.items()}
        self.ys = {layout: expert_rows(rest, want, FP32) for layout, want in self.want.items()}
        self.outs = {
            (layout, mode): reference.combine(
                problem.plan, self.ys[layout], want, rest.topk_ids, weights_of(rest, layout), mode=mode
            )
            for layout, want in self.want.items()
            for mode in ("per_rank", "per_route")
        }

    def make(self, context: RankContext, comm: tl.Communicator, layouts: Sequence[str], halves: bool = False) -> None:
        """Dispatch and combine."""
        for layout in layouts:
            options, by_route = self.options[layout], layout in ROUTE_LAYOUTS
            x, ids, weights = self.problem.arguments(context)
            send = comm.send_dispatch(x, ids, weights, **options) if halves else None
            routed = send.receive() if send is not None else comm.dispatch(x, ids, weights, **options)
            same_routed(routed, self.want[layout][context.rank], self.problem.plan, bounded=layout == "slots")
            y = self.ys[layout][context.rank].clone()

            def check(out: torch.Tensor, mode: str = "per_rank", layout: str = layout) -> None:
                same_bits(out, self.outs[layout, mode][context.rank], f"{layout}, {mode}")

            check(comm.send_combine(y, routed).receive() if halves else comm.combine(y, routed))
            if by_route and not halves:
                check(comm.combine(y, routed, mode="per_route"), "per_route")
                check(comm.combine(y, routed, topk_weights=weights))


def weights_of(problem: Problem, layout: str) -> list[torch.Tensor] | None:
    return problem.topk_weights if layout in ROUTE_LAYOUTS else None


@pytest.mark.parametrize("name", CASES)
def test_calls(emulated_64: Any, name: str) -> None:
    """Of all ranks, and in all layouts without one of the upper ranks: as one kernel, or as two."""
    problem = make_problem(CASES[name], NUM_RANKS)
    emulated_64.run(make_calls, Trip(problem, []), Trip(problem, [MASKED]), name != "eager")


def make_calls(context: RankContext, whole: Trip, rest: Trip, halves: bool) -> None:
    comm = make_comm(context, "nvlink", whole.problem.plan, num_sms=1)
    whole.make(context, comm, ["token"])
    if context.rank != MASKED:
        comm.mask_ranks([MASKED])
        rest.make(context, comm, LAYOUTS, halves)


@on_ranks("emulated_64")
def test_a_call_that_differs(context: RankContext) -> None:
    """All ranks hear who of the upper ranks means another one, or is at fault; and calls go on."""
    problem = make_problem(CASE, NUM_RANKS)
    comm = make_comm(context, "nvlink", problem.plan, num_sms=1)
    is_odd = context.rank == ODD
    with pytest.raises(tl.PlanMismatch, match=f"rank {ODD} has layout=token"):
        comm.dispatch(*problem.arguments(context), layout="token" if is_odd else "rank")
    x, ids, weights = problem.arguments(context)
    with pytest.raises(tl.DtypeMismatch if is_odd else tl.PeerError, match=r"topk_ids is torch\.int16"):
        comm.dispatch(x, ids.to(torch.int16) if is_odd else ids, weights)
    routed = comm.dispatch(x, ids, weights, layout="token")
    comm.combine(routed.tokens, routed)
