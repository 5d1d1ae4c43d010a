"""Predicts what splits of batches are worth, from routings that are drawn and rates that were measured.

    python microbench/balance_model.py [--batches 8] [--threshold 0]

Needs no GPU. The layer has hidden 7168, intermediate 2048 and top-8 of 256 experts on 8 ranks, each with its own 32
and some empty slots. ``split_batch`` splits each batch, as ``balance="batch"`` does. Numbers are means over batches:
rows of the fullest rank over the mean, and milliseconds. Of batches that are split, the first time is that of ranks
that wait for what they pull. The second is that of pulls which travel while ranks compute their own experts, at best.
Behind it stands how many experts the rank sends that sends most.

Times are those of the experts' products alone: in inference in FP8, in training in BF16, of a forward and a backward.
Training pulls twice, and brings gradients home, as many bytes again. Pulls take as long as the busiest link needs in
either direction: an owner sends an expert to each helper by itself. The exchange of counts and the planner are left
out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import product

import numpy as np

from tokenloom.bench.workload import LINK_GBYTES_PER_S, CallSizes
from tokenloom.ops.split_batch import EMPTY, Split, routes_of_slots, split_batch

NUM_RANKS, NUM_EXPERTS, TOP_K, HIDDEN = 8, 256, 8, 7168
EXPERT_WEIGHTS = 3 * HIDDEN * 2048
MAX_VIOS, TOKENS, SPARE_SLOTS = (0.2, 1.0, 4.0), (1024, 4096, 16384), (1, 2, 4, NUM_EXPERTS // NUM_RANKS)
TFLOPS = {"inference": 1000.0, "training": 700.0}
"""Of experts. FP8: a call of MegaMoE with 8,192 tokens makes 980, by microbench/results/mega-deep_gemm-4xh200.json,
and grouped GEMMs alone make 1,025 to 1,142, by docs/performance/gemm.md. BF16: torch's ``grouped_mm`` reaches 590 to
700, by microbench/notebook/training.md."""
ITEMSIZE = {"inference": 1, "training": 2}
PASSES = {"inference": 1, "training": 3}
"""Times that of a forward which ranks compute, and times that a pulled expert's bytes travel."""


def rows_per_pull(itemsize: int, tflops: float, link_gbytes_per_s: float = LINK_GBYTES_PER_S) -> int:
    """Rows that a rank computes while it pulls an expert, whatever the sizes of the layer.

    A row is multiplied by each weight of its expert once, in two operations; a weight has ``itemsize`` bytes.
    """
    return round(itemsize / 2 * tflops * 1e3 / link_gbytes_per_s)


def rows_us(kind: str, rows: float) -> float:
    """Time of the products of so many rows: those of a forward and, in training, twice as many in backward."""
    return PASSES[kind] * 2 * EXPERT_WEIGHTS * rows / TFLOPS[kind] / 1e6


def pulls_us(kind: str, experts: int) -> float:
    """Time in which so many experts cross a link, and in training cross it again, and their gradients do."""
    return PASSES[kind] * EXPERT_WEIGHTS * ITEMSIZE[kind] * experts / LINK_GBYTES_PER_S / 1e3


@dataclass(frozen=True)
class Found:
    """Numbers of one batch, or means over several.

    Attributes:
        before, after: routes of the fullest rank over the mean.
        pulls, sends: most experts that a rank pulls, and that it sends, counted for each helper.
        off_us, on_us, hidden_us: time without splits, with them, and with pulls beside the ranks' own experts.
    """

    before: float
    after: float
    pulls: float
    sends: float
    off_us: float
    on_us: float
    hidden_us: float


def drawn_counts(num_tokens: int, max_vio: float, batch: int) -> np.ndarray:
    """Routes of each rank to each expert, int64 [W, E]."""
    shape = CallSizes(num_tokens, HIDDEN, TOP_K, NUM_EXPERTS, max_vio)
    ids = [shape.topk_ids(batch * NUM_RANKS + rank) for rank in range(NUM_RANKS)]
    return np.stack([np.bincount(each.flatten(), minlength=NUM_EXPERTS) for each in ids])


def default_table(num_experts: int, num_ranks: int, spare_slots: int) -> list[list[int]]:
    """The expert in each slot of each rank, -1 for an empty one."""
    local = num_experts // num_ranks
    return [[*range(rank * local, (rank + 1) * local), *[EMPTY] * spare_slots] for rank in range(num_ranks)]


def judge(kind: str, counts: np.ndarray, table: list[list[int]], split: Split) -> Found:
    """Find the time of a batch, "inference" or "training", without its split and with it."""
    into, out_of = pulls_by_rank(table, split)
    pull_us = pulls_us(kind, max(*into, *out_of))
    hidden = [
        max(rows_us(kind, own), pull_us) + rows_us(kind, pulled)
        for own, pulled in zip(*rows_by_origin(counts, table, split), strict=True)
    ]
    mean = counts.sum() / len(table)
    return Found(
        split.rows_before / mean,
        split.rows / mean,
        max(into),
        max(out_of),
        rows_us(kind, split.rows_before),
        rows_us(kind, split.rows) + pull_us,
        max(hidden),
    )


def rows_by_origin(counts: np.ndarray, table: list[list[int]], split: Split) -> tuple[list[int], list[int]]:
    """Rows of each rank for experts that it has, and for those that it pulls."""
    placed = [expert for experts in table for expert in experts]
    rows = routes_of_slots(counts, placed).sum(0).tolist()
    ends = list(rows)
    for slot, first, target in split.shares:  # of each slot the last routes come first
        rows[slot] -= ends[slot] - first
        rows[target] += ends[slot] - first
        ends[slot] = first
    own, pulled = [0] * len(table), [0] * len(table)
    for slot, each in enumerate(rows):
        (pulled if placed[slot] == EMPTY else own)[slot // len(table[0])] += each
    return own, pulled


def pulls_by_rank(table: list[list[int]], split: Split) -> tuple[list[int], list[int]]:
    """Experts that each rank pulls, and that it sends."""
    placed = [expert for experts in table for expert in experts]
    into, out_of = [0] * len(table), [0] * len(table)
    for slot, expert in enumerate(split.slot_experts):
        if placed[slot] == EMPTY != expert:
            into[slot // len(table[0])] += 1
            out_of[placed.index(expert) // len(table[0])] += 1
    return into, out_of


def means(kind: str, batches: Sequence[np.ndarray], spare_slots: int, least: int) -> Found:
    """What batches have on average, split where the fullest rank loses ``least`` rows for each pull."""
    table = default_table(NUM_EXPERTS, NUM_RANKS, spare_slots)
    found = [judge(kind, each, table, split_batch(each, table, rows_per_pull=least)) for each in batches]
    return Found(*np.mean([astuple(each) for each in found], axis=0).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="batches that a number is the mean of")
    parser.add_argument("--threshold", type=float, default=0.0, help="rows_per_pull, in multiples of what rates say")
    given = parser.parse_args()
    least = {kind: rows_per_pull(ITEMSIZE[kind], TFLOPS[kind]) for kind in TFLOPS}
    print("rows_per_pull by the rates:", *(f"{kind} {rows:,}" for kind, rows in least.items()), end="\n\n")
    print("| | MaxVio | tokens a rank | not split |", *(f"{each} spare |" for each in SPARE_SLOTS))
    print("|---|---|---|---|" + "---|" * len(SPARE_SLOTS))
    cases = [*product(MAX_VIOS, TOKENS)]
    drawn = {case: [drawn_counts(case[1], case[0], batch) for batch in range(given.batches)] for case in cases}
    for kind, case in product(TFLOPS, cases):
        its = [means(kind, drawn[case], spare, round(given.threshold * least[kind])) for spare in SPARE_SLOTS]
        print(f"| {kind} | {case[0]:g} | {case[1]:,} | {its[0].before:.2f}, {_ms(its[0].off_us)} |", end="")
        for each in its:
            print(f" {each.after:.2f}, {_ms(each.on_us)}, {_ms(each.hidden_us)}, {each.sends:.1f} |", end="")
        print(flush=True)


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"


if __name__ == "__main__":
    main()
