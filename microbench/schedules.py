"""Measure every schedule of MegaMoE at several numbers of tokens, for the table in tokenloom/inference/schedules.py.

    python microbench/schedules.py [--tokens 8,64,512] [--links-of 4] [--json FILE]

Uses all Hopper GPUs, with one rank of 32 experts each: as much arithmetic as each of 8 ranks with 256 experts. Times
are microseconds of a call in a replayed graph on the slowest rank, as medians over rounds in which all take turns.

With --links-of N, as large a share of the routes leaves each GPU as on N ranks, where (N - 1) / N of them do. So two
GPUs carry over their links what each of four or eight would. Only what N ranks cost by their number is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tokenloom as tl
from tokenloom.bench.clock import Clock
from tokenloom.bench.mega_work import MegaShape, make_weights
from tokenloom.inference.schedules import MegaSchedule
from tokenloom.ops.gemm import interleave_gate_and_up
from tokenloom.runtime.processes import RankContext, RankPool

ROUNDS = 7
TOKENS = "8,32,64,128,256,512,1024,2048,4096,8192"
LOCAL_EXPERTS = 32
SCHEDULES = {
    "8 SMs send": MegaSchedule(send_sms=8),
    "16": MegaSchedule(send_sms=16),
    "24": MegaSchedule(send_sms=24),
    "32": MegaSchedule(send_sms=32),
    "16, 8 for GEMM2": MegaSchedule(send_sms=16, gemm2_sms=8),
    "16, 16 for GEMM2": MegaSchedule(send_sms=16, gemm2_sms=16),
    "16, 24 for GEMM2": MegaSchedule(send_sms=16, gemm2_sms=24),
    "16, 32 for GEMM2": MegaSchedule(send_sms=16, gemm2_sms=32),
}


def topk_ids(shape: MegaShape, context: RankContext, num_tokens: int, links_of: int) -> torch.Tensor:
    """Routing of a rank: int32 [T, K] on the CPU, drawn among ``links_of`` ranks: others do for missing ones.

    A token may then have an expert twice.
    """
    ranks, rank = context.num_ranks, context.rank
    among = replace(shape, num_experts=LOCAL_EXPERTS * links_of)
    ids = among.topk_ids(rank, num_tokens)
    step = (ids // LOCAL_EXPERTS - rank) % links_of  # 0 stays here
    owner = torch.where(step == 0, rank, (rank + 1 + (step - 1) % max(ranks - 1, 1)) % ranks)
    return (owner * LOCAL_EXPERTS + ids % LOCAL_EXPERTS).int()


@torch.no_grad()
def measure(context: RankContext, tokens: list[int], links_of: int) -> list[dict[str, float]]:
    """Return the median of each schedule on this rank, for each number of tokens. Collective."""
    shape = MegaShape(hidden=7168, intermediate=2048, num_experts=LOCAL_EXPERTS * context.num_ranks, top_k=8)
    sizes: dict[str, Any] = {
        "num_experts": shape.num_experts,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "top_k": shape.top_k,
        "max_tokens_per_rank": max(tokens),
    }
    clock = Clock(context, cold=False)
    rows: list[dict[str, float]] = []
    with tl.MegaMoE(context.group, **sizes, device=context.device) as mega:
        w1, w1_scales, w2, w2_scales = make_weights(shape, context)
        mega.use_weights(interleave_gate_and_up(w1), w1_scales, w2, w2_scales)
        for num_tokens in tokens:
            x = torch.randn(num_tokens, shape.hidden, device=context.device).bfloat16()
            ids = topk_ids(shape, context, num_tokens, links_of or context.num_ranks).to(context.device)
            weights = torch.rand(num_tokens, shape.top_k, device=context.device)

            def call(given: Any = (x, ids, weights)) -> None:
                mega(*given)

            graphs = {}
            for name, mega.schedule in SCHEDULES.items():
                call()
                torch.cuda.synchronize()
                graphs[name] = clock.capture(call)
            times: dict[str, list[float]] = {name: [] for name in graphs}
            for _ in range(ROUNDS):
                for name, graph in graphs.items():
                    times[name].append(clock.replay_us(graph))
            rows.append({name: statistics.median(each) for name, each in times.items()})
            mega.check()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--links-of", type=int, default=0, help="ranks whose links are imitated; 0: those there are")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokens = [int(each) for each in arguments.tokens.split(",")]
    with RankPool(torch.cuda.device_count(), "cuda") as pool:
        ranks = pool.run(measure, tokens, arguments.links_of, limit_s=300)
    rows = [
        {"tokens": count} | {name: max(rank[i][name] for rank in ranks) for name in SCHEDULES}
        for i, count in enumerate(tokens)
    ]
    for row in rows:
        print("  ".join(f"{name} {value:,.0f}" for name, value in row.items()))
    if arguments.json is not None:
        about = {"num_ranks": len(ranks), "links_of": arguments.links_of or len(ranks)}
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
