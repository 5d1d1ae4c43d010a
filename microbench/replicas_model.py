"""Predicts what replicas of hot experts are worth, from routings that are drawn and rates that were measured.

    python microbench/replicas_model.py [--batches 8]

Needs no GPU. The layer is MegaMoE with hidden 7168, intermediate 2048, top-8 of 256 experts. A placement is planned by
``plan_replicas`` from one batch of 32,768 tokens, and then meets other batches of the same popularity. Numbers are the
load of the fullest rank over the mean and, on 8 ranks, the time of a call, which is that of its slowest rank. A rank
takes as long as in the measured call in which each rank has as many routes. For each slot in use beyond the 32 of that
call it takes as long again as the weights of an expert need, and for each below them as much less.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from tokenloom.bench.mega_work import HBM_GBYTES_PER_S, MegaShape
from tokenloom.bench.workload import CallSizes, placed, planned
from tokenloom.comm.placement import Placement

PLANNED_TOKENS = 32768
"""Tokens of all ranks together that a placement is planned from."""
LAYER = MegaShape(7168, 2048, 256, 8)
MAX_VIOS, TOKENS, SPARE_SLOTS = (0.2, 1.0, 4.0), (128, 1024, 4096), (0, 1, 2, 4)
TIMED_RANKS, OTHER_RANKS = 8, (32, 64)
MEASURED_TOKENS = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MEASURED_US = (346, 360, 366, 378, 411, 534, 879, 1554, 2988, 5892)
"""A call on 4 H200 with 32 experts a rank and even routing, by tokens a rank: microbench/results/
mega-deep_gemm-4xh200.json."""
EXPERT_US = LAYER.expert_weights / HBM_GBYTES_PER_S / 1e3
PLANNED_BATCH = 100_000
"""Seed of the batch that is planned from, which no later batch has."""


@dataclass(frozen=True)
class Found:
    """Means over batches: load of the fullest rank over the mean, and microseconds of a call."""

    fullest_rank: float
    us: float


def call_us(tokens: float) -> float:
    """Time of a measured call with so many tokens a rank, linear between and beyond those that were measured."""
    if tokens > MEASURED_TOKENS[-1]:
        slope = (MEASURED_US[-1] - MEASURED_US[-2]) / (MEASURED_TOKENS[-1] - MEASURED_TOKENS[-2])
        return MEASURED_US[-1] + (tokens - MEASURED_TOKENS[-1]) * slope
    return float(np.interp(tokens, MEASURED_TOKENS, MEASURED_US))


def plan(num_ranks: int, max_vio: float, spare_slots: int | None) -> Placement | None:
    """The placement for a popularity; None without one."""
    if spare_slots is None:
        return None
    ids = _shape(PLANNED_TOKENS, max_vio).topk_ids(PLANNED_BATCH)
    return planned([ids], LAYER.num_experts, num_ranks, spare_slots)


def simulate(
    num_ranks: int, max_vio: float, num_tokens: int, placements: Sequence[Placement | None], batches: int
) -> list[Found]:
    """Draw batches, and find their fullest and their slowest rank under each placement."""
    shape, usual = _shape(num_tokens, max_vio), LAYER.num_experts // num_ranks
    fullest, us = np.zeros((2, len(placements)))
    for batch in range(batches):
        ids = [shape.topk_ids(batch * num_ranks + rank) for rank in range(num_ranks)]
        for i, placement in enumerate(placements):
            routing = placed(shape.plan(num_ranks), ids, placement)
            fullest[i] += routing.fullest_rank
            ranks = [(int(each.sum()), int((each > 0).sum())) for each in routing.routes]
            us[i] += max(call_us(routes / LAYER.top_k) + (used - usual) * EXPERT_US for routes, used in ranks)
    return [Found(*each) for each in zip(fullest / batches, us / batches, strict=True)]


def _shape(num_tokens: int, max_vio: float) -> CallSizes:
    return CallSizes(num_tokens, LAYER.hidden, LAYER.top_k, LAYER.num_experts, max_vio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="batches that a number is the mean of")
    batches = parser.parse_args().batches
    print("| ranks | MaxVio | tokens a rank | default |", *(f"planned, {each} spare |" for each in SPARE_SLOTS))
    print("|---|---|---|---|" + "---|" * len(SPARE_SLOTS))
    cases = [(TIMED_RANKS, *each) for each in product(MAX_VIOS, TOKENS)]
    cases += [(*each, TOKENS[0]) for each in product(OTHER_RANKS, MAX_VIOS)]
    for num_ranks, vio, tokens in cases:
        placements = [plan(num_ranks, vio, spare) for spare in (None, *SPARE_SLOTS)]
        print(f"| {num_ranks} | {vio:g} | {tokens:,} |", end="")
        for found in simulate(num_ranks, vio, tokens, placements, batches):
            timed = f", {found.us:,.0f} µs" if num_ranks == TIMED_RANKS else ""
            print(f" {found.fullest_rank:.2f}{timed} |", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
