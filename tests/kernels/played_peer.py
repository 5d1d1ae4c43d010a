"""What each of two ranks sends the other in staged dispatches and in combines, by the protocols' words and in plain
Python: for tests that play a rank, or look at what a rank has sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from tests.support.cases import FP8, Case, Problem, make_problem
from tokenloom import reference
from tokenloom.kernels.combine.launch import CHUNK_SHIFT
from tokenloom.plan import ROUTE_LAYOUTS

DROPPED = 0x7FFFFFFF
"""The place of a route that layout "slots" has no room for."""


def problem_of_two(case: Case, *, mirrored: bool = False) -> Problem:
    """The tensors of a case for two ranks.

    Args:
        mirrored: experts in the opposite order, so that what the case gives to the last rank goes to the first.
    """
    problem = make_problem(case, 2)
    if not mirrored:
        return problem
    last = problem.plan.num_experts - 1
    return replace(problem, topk_ids=[torch.where(ids < 0, ids, last - ids) for ids in problem.topk_ids])


def counts_of(problem: Problem, source: int) -> list[int]:
    """What a source announces: its rows for each rank, then its routes of each expert."""
    plan = problem.plan
    rows, routes = [0] * plan.num_ranks, [0] * plan.num_experts
    for experts in problem.topk_ids[source].tolist():
        for rank in {expert // plan.experts_per_rank for expert in experts if expert >= 0}:
            rows[rank] += 1
        for expert in experts:
            if expert >= 0:
                routes[expert] += 1
    return rows + routes


def tokens_for(problem: Problem, source: int, rank: int) -> list[int]:
    """The tokens of a source that go to a rank, ascending."""
    local = problem.plan.experts_per_rank
    return [
        token
        for token, experts in enumerate(problem.topk_ids[source].tolist())
        if any(expert >= 0 and expert // local == rank for expert in experts)
    ]


# -- dispatch ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SentRows:
    """What a source puts into its part of a rank's region, with a row for each of its tokens that goes there.

    Attributes:
        rows: [n, H] as it travels. scales: float32 [n, H / 128], or None.
        row_ids: int32 [n, K] local experts of the rank, -1 elsewhere.
        row_weights: float32 [n, K], 0 elsewhere, or None.
        row_places: int32 [n, K]: how many routes to the expert come before in this source, -1 elsewhere.
        row_tokens: int32 [n].
    """

    rows: torch.Tensor
    row_scales: torch.Tensor | None
    row_ids: torch.Tensor
    row_weights: torch.Tensor | None
    row_places: torch.Tensor
    row_tokens: torch.Tensor


def sent_rows(problem: Problem, source: int, rank: int, quantize: str = "") -> SentRows:
    """What the source sends the rank.

    Args:
        quantize: as DispatchVariant has it.
    """
    plan, local = problem.plan, problem.plan.experts_per_rank
    x, scales = problem.xs[source], None if problem.scales is None else problem.scales[source]
    if quantize:
        x, scales = reference.quantize_fp8(x, power_of_two_scales=quantize == "power of two")
    tokens, seen = tokens_for(problem, source, rank), Counter[int]()
    ids, places = (torch.full((len(tokens), plan.top_k), -1, dtype=torch.int32) for _ in range(2))
    weights = torch.zeros(len(tokens), plan.top_k)
    for token, experts in enumerate(problem.topk_ids[source].tolist()):
        for k, expert in enumerate(experts):
            if expert >= 0 and expert // local == rank:
                row = tokens.index(token)
                ids[row, k], places[row, k] = expert % local, seen[expert]
                if problem.topk_weights is not None:
                    weights[row, k] = problem.topk_weights[source][token, k]
                seen[expert] += 1
    return SentRows(
        x.view(torch.uint8)[tokens].view(x.dtype),
        None if scales is None else scales[tokens],
        ids,
        None if problem.topk_weights is None else weights,
        places,
        torch.tensor(tokens, dtype=torch.int32),
    )


def power_of_two_scales(problem: Problem) -> Problem:
    """The same with scales that layout "packed" can hold: of many magnitudes, the smallest and the largest too."""
    assert problem.xs[0].dtype == FP8
    assert problem.scales is not None
    generator = torch.Generator().manual_seed(problem.seed)
    scales = []
    for each in problem.scales:
        exponents = torch.randint(-126, 128, each.shape, generator=generator)
        exponents.view(-1)[:2] = torch.tensor([-126, 127])[: exponents.numel()]
        scales.append(torch.ldexp(torch.ones(each.shape), exponents))
    return replace(problem, scales=scales)


# -- what a rank remembers of a dispatch ------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """What a combine of rank 0 is given beside its rows. R: received rows, by source and token.

    Attributes:
        row_places: int32 [R, K] place of each route, -1 elsewhere (layouts of routes).
        row_weights: float32 [R, K], 0 elsewhere. row_tokens: int32 [R].
        slots: int32 [T, W]: which of the rows that go to a rank the token is, or -1.
        all_counts: int32 [W, W + E].
    """

    row_places: torch.Tensor
    row_weights: torch.Tensor
    row_tokens: torch.Tensor
    slots: torch.Tensor
    all_counts: torch.Tensor


def received_by_rank_0(problem: Problem, layout: str, alignment: int = 1, capacity: int | None = None) -> Received:
    """What rank 0 has to know of a dispatch, from what the reference says of the places.

    Args:
        capacity: of layout "slots", whose further routes have the place DROPPED. Those of layout "expert" have the
            place that they would have in a larger output.
    """
    plan = problem.plan
    sent = [sent_rows(problem, source, 0) for source in range(2)]
    rows = [(source, token) for source in range(2) for token in tokens_for(problem, source, 0)]
    places = torch.full((len(rows), plan.top_k), -1, dtype=torch.int32)
    if layout in ROUTE_LAYOUTS:
        given = {"alignment": alignment} if layout == "expert" else {"capacity": capacity}
        found = problem.dispatched(layout, **given)[0].rows
        ids = torch.cat([each.row_ids for each in sent])
        for row, k in (ids >= 0).nonzero().tolist():
            places[row, k] = found.get((*rows[row], k), DROPPED)
    slots = torch.full((len(problem.xs[0]), plan.num_ranks), -1, dtype=torch.int32)
    for rank in range(plan.num_ranks):
        for slot, token in enumerate(tokens_for(problem, 0, rank)):
            slots[token, rank] = slot
    weights = [torch.zeros(each.row_ids.shape) if each.row_weights is None else each.row_weights for each in sent]
    return Received(
        places,
        torch.cat(weights),
        torch.cat([each.row_tokens for each in sent]),
        slots,
        torch.tensor([counts_of(problem, source) for source in range(2)], dtype=torch.int32),
    )


# -- combine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Homeward:
    """What comes home for tokens: [n, H] rows of the wire's dtype, and where they go in the home rank's buffer."""

    rows: torch.Tensor
    places: list[int]


def sent_home(
    problem: Problem,
    ys: list[torch.Tensor],
    routed: list[reference.Routed],
    weights: list[torch.Tensor] | None,
    rank: int,
    home: int,
    *,
    mode: str,
    wire_dtype: torch.dtype,
) -> Homeward:
    """What a rank sends home. The sum of one term is that term, so the reference's result for the tokens of one rank,
    or of one k, is what travels.
    """
    plan, ids = problem.plan, problem.topk_ids[home]
    here = torch.where(torch.div(ids, plan.experts_per_rank, rounding_mode="floor") == rank, ids, -1)
    here = torch.where(ids < 0, -1, here)

    def combined(some: torch.Tensor) -> torch.Tensor:
        all_ids = [some if source == home else each[:0] for source, each in enumerate(problem.topk_ids)]
        dtypes = {"wire_dtype": wire_dtype, "out_dtype": wire_dtype}
        return reference.combine(plan, ys, routed, all_ids, weights, mode=mode, **dtypes)[home]

    if mode == "per_rank":
        tokens = tokens_for(problem, home, rank)
        first = sum(counts_of(problem, home)[:rank])
        return Homeward(combined(here)[tokens], [first + i for i in range(len(tokens))])
    rows, places = [torch.zeros(0, plan.hidden, dtype=wire_dtype)], []
    for k in range(plan.top_k):
        only = torch.full_like(here, -1)
        only[:, k] = here[:, k]
        tokens = (only[:, k] >= 0).nonzero().flatten().tolist()
        rows.append(combined(only)[tokens])
        places += [token * plan.top_k + k for token in tokens]
    return Homeward(torch.cat(rows), places)


def num_chunks(num_rows: int, lone_rows: int) -> int:
    """Chunks that so many rows for one home rank are sent in: the last ones are one row each."""
    return num_rows - (max(num_rows - lone_rows, 0) >> CHUNK_SHIFT) * ((1 << CHUNK_SHIFT) - 1)
