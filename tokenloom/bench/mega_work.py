"""Work of ``tokenloom bench mega``, and the least time that a machine needs to do it its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from tokenloom.bench.workload import EARLIER_TOKENS, LINK_GBYTES_PER_S, CallSizes, placed
from tokenloom.comm.placement import Placement
from tokenloom.plan import FP8_BLOCK, Plan, align_up
from tokenloom.runtime.processes import RankContext
from tokenloom.tune.samples import draw_topk_ids

HBM_GBYTES_PER_S, FP8_TFLOPS = 4370.0, 1388.0
"""Rates of an H200, for the floor: HBM reads, and cuBLAS without block scales."""

WEIGHT_SEED = 1_000_000
"""Seed of expert 0. No rank has it: weights must not resemble tokens."""

DRAWS = 3
"""Routings of few tokens. How many experts they hit differs, and with it the bytes of weights: by 10% at 8 tokens."""
SEED_OF_DRAW = 1000
"""From the seed of a draw to that of the next; each rank has one of its own."""

SCALE_BYTES = HOME_BYTES = WEIGHT_BYTES = 4
"""Bytes beside a row's values: a scale, the place of its result, and its weight."""


@dataclass(frozen=True)
class MegaShape:
    """A layer and its routing.

    Attributes:
        hidden, intermediate, num_experts, top_k: H, I, E and K.
        masked_ratio: share of routes that are -1.
        max_vio: largest expected load of an expert over the mean, less 1. 0 makes all alike.
        num_shared_experts: S; every token goes to them on its own rank.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    masked_ratio: float = 0.0
    max_vio: float = 0.0
    num_shared_experts: int = 0

    @property
    def expert_weights(self) -> int:
        """Values of one expert's weights, which are as many bytes in FP8."""
        return 3 * self.hidden * self.intermediate

    def num_draws(self, num_ranks: int, num_tokens: int) -> int:
        """Count the routings to measure: several where some experts get no token."""
        return DRAWS if num_tokens and num_ranks * num_tokens * self.top_k < 5 * self.num_experts else 1

    def topk_ids(self, rank: int, num_tokens: int, draw: int = 0) -> torch.Tensor:
        """Routing of one rank: int32 [T, K] on the CPU, different experts for each token."""
        sizes = (num_tokens, self.num_experts, self.top_k)
        return draw_topk_ids(rank + SEED_OF_DRAW * draw, *sizes, self.max_vio, self.masked_ratio)

    def call_sizes(self, num_tokens: int) -> CallSizes:
        """Sizes of a call's dispatch."""
        return CallSizes(num_tokens, self.hidden, self.top_k, self.num_experts, self.max_vio)

    def placement(self, num_ranks: int, spare_slots: int) -> Placement:
        """The placement of calls of any number of tokens, see :meth:`CallSizes.placement`."""
        return self.call_sizes(EARLIER_TOKENS).placement(num_ranks, spare_slots)


@dataclass(frozen=True)
class Work:
    """The least that one call has to do.

    Attributes:
        flops: operations per rank, for all ranks' routes and shared experts.
        busiest_flops: operations of the rank that has most.
        weight_bytes: weights of the experts that have a token, on the rank that has most such experts.
        sent_bytes: bytes that leave the busiest rank over its links: a row for each route, there and back.
        fullest_rank: routes of the rank that has most, over the mean of all ranks; 1 where there are none.
    """

    flops: float
    busiest_flops: float
    weight_bytes: float
    sent_bytes: float
    fullest_rank: float = 1.0

    @property
    def floor_us(self) -> float:
        """The longest of HBM, arithmetic and links, at the rates measured on an H200."""
        return max(
            self.weight_bytes / HBM_GBYTES_PER_S / 1e3,
            self.busiest_flops / FP8_TFLOPS / 1e6,
            self.sent_bytes / LINK_GBYTES_PER_S / 1e3,
        )


def work(shape: MegaShape, num_ranks: int, num_tokens: int, spare_slots: int | None = None) -> Work:
    """The work of one call with ``num_tokens`` tokens on each of ``num_ranks`` ranks: the mean of all draws.

    Args:
        spare_slots: with replicas of experts in so many more slots of each rank; None: without a placement.
    """
    draws = shape.num_draws(num_ranks, num_tokens)
    placement = None if spare_slots is None else shape.placement(num_ranks, spare_slots)
    works = [_work_of(shape, num_ranks, num_tokens, draw, placement) for draw in range(draws)]
    return Work(*(sum(values) / draws for values in zip(*map(astuple, works), strict=True)))


def _work_of(shape: MegaShape, num_ranks: int, num_tokens: int, draw: int, placement: Placement | None) -> Work:
    ids = [shape.topk_ids(rank, num_tokens, draw).long() for rank in range(num_ranks)]
    routing = placed(shape.call_sizes(max(1, num_tokens)).plan(num_ranks), ids, placement)
    routes = routing.routes
    touched, most_routes = int((routes > 0).sum(1).max()), int(routes.sum(1).max())
    shared, shared_routes = shape.num_shared_experts if num_tokens else 0, num_tokens * shape.num_shared_experts
    return Work(
        flops=(int(routes.sum()) / num_ranks + shared_routes) * 2 * shape.expert_weights,
        busiest_flops=(most_routes + shared_routes) * 2 * shape.expert_weights,
        weight_bytes=(touched + shared) * shape.expert_weights,
        sent_bytes=max(bytes_out(routing.plan, rank, routing.topk_ids) for rank in range(num_ranks)),
        fullest_rank=routing.fullest_rank,
    )


def bytes_out(plan: Plan, rank: int, ids: Sequence[torch.Tensor]) -> int:
    """Bytes that leave a rank: for each route to another rank an FP8 row of x with its scales, home and weight, and
    for each route of others' tokens a bfloat16 result.

    Args:
        ids: [T, K] of each rank: experts of the plan, which may be slots.
    """
    local, hidden = plan.experts_per_rank, plan.hidden
    to_others = int(((ids[rank] >= 0) & (ids[rank] // local != rank)).sum())
    back = sum(int((ids[other] // local == rank).sum()) for other in range(plan.num_ranks) if other != rank)
    row_bytes = hidden + align_up(hidden, FP8_BLOCK) // FP8_BLOCK * SCALE_BYTES + HOME_BYTES + WEIGHT_BYTES
    return to_others * row_bytes + back * hidden * 2


def make_weights(
    shape: MegaShape, context: RankContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random weights of this rank's E / W experts and the S shared ones; outputs are about as large as inputs.

    Returns:
        w1: float8_e4m3fn [E / W + S, 2I, H], gates first.
        w1_scales: float32 [E / W + S, 2I / 128, H / 128], rounded up for gates, for ups, and for H.
        w2: float8_e4m3fn [E / W + S, H, I].
        w2_scales: float32 [E / W + S, H / 128, I / 128], both rounded up.
    """
    device, local = context.device, shape.num_experts // context.num_ranks
    experts = [*range(context.rank * local, (context.rank + 1) * local)]
    # Numbers that no rank has: shared experts are the same everywhere.
    experts += range(shape.num_experts, shape.num_experts + shape.num_shared_experts)
    found: list[torch.Tensor] = []
    for parts, rows, columns in ((2, shape.intermediate, shape.hidden), (1, shape.hidden, shape.intermediate)):
        blocks = parts * align_up(rows, FP8_BLOCK) // FP8_BLOCK, align_up(columns, FP8_BLOCK) // FP8_BLOCK
        found.append(torch.empty(len(experts), parts * rows, columns, dtype=torch.float8_e4m3fn, device=device))
        found.append(torch.empty(len(experts), *blocks, dtype=torch.float32, device=device))
    w1, w1_scales, w2, w2_scales = found
    for i, expert in enumerate(experts):
        generator = torch.Generator(device).manual_seed(WEIGHT_SEED + expert)
        for values, scales in ((w1[i], w1_scales[i]), (w2[i], w2_scales[i])):
            values.copy_(torch.randn(values.shape, generator=generator, dtype=torch.float32, device=device))
            # Scales differ, so that outputs differ if somebody takes the scale of another block.
            scales.uniform_(0.5, 1.5, generator=generator).mul_(values.shape[1] ** -0.5)
    return w1, w1_scales, w2, w2_scales
