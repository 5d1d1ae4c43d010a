"""Every schedule of MegaMoE at every number of tokens, in turns on one Hopper GPU: what tokenloom/tune/mega.py has its
table from.

    python bench/schedules.py [--json FILE]

One rank with 32 experts does as much arithmetic as each of 8 ranks with 256. Times are events around replays of a
graph of ten calls, medians over rounds in which every schedule takes its turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

import tokenloom as tl
from tokenloom.bench.mega_work import MegaShape
from tokenloom.tune.mega import MegaSchedule

ROUNDS, CALLS = 7, 10
TOKENS = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SCHEDULES = {"gathers": MegaSchedule(copies_rows=False), "copies": MegaSchedule(copies_rows=True)}
SHAPE = MegaShape(hidden=7168, intermediate=2048, num_experts=32, top_k=8)


def us_of(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def weights() -> tuple[torch.Tensor, ...]:
    experts, hidden, width = SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate
    w1 = [torch.randn(2 * width, hidden, device="cuda").to(torch.float8_e4m3fn) for _ in range(experts)]
    w2 = [torch.randn(hidden, width, device="cuda").to(torch.float8_e4m3fn) for _ in range(experts)]
    scales = (torch.full((experts, 2 * width // 128, hidden // 128), hidden**-0.5, device="cuda"),
              torch.full((experts, hidden // 128, width // 128), width**-0.5, device="cuda"))  # fmt: skip
    return torch.stack(w1), scales[0], torch.stack(w2), scales[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = (SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate, SHAPE.top_k, max(TOKENS))
    rows: list[dict[str, float]] = []
    with tl.MegaMoE(None, *sizes, device="cuda:0") as mega:
        mega.use_weights(*weights())
        for tokens in TOKENS:
            x = torch.randn(tokens, SHAPE.hidden, device="cuda").bfloat16()
            given = (x, SHAPE.topk_ids(0, tokens).cuda(), torch.rand(tokens, SHAPE.top_k, device="cuda"))
            graphs = {}
            for name, mega.schedule in SCHEDULES.items():
                mega(*given)
                torch.cuda.synchronize()
                graphs[name] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[name]):
                    for _ in range(CALLS):
                        mega(*given)
            times: dict[str, list[float]] = {name: [] for name in graphs}
            for _ in range(ROUNDS):
                for name, graph in graphs.items():
                    times[name].append(us_of(graph))
            rows.append({"tokens": tokens} | {name: statistics.median(each) for name, each in times.items()})
            print("  ".join(f"{name} {value:,.0f}" for name, value in rows[-1].items()), flush=True)
        mega.check()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
