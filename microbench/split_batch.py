"""Times the kernel that splits a batch over ranks on one Hopper GPU, and that which finds slots by it.

    python microbench/split_batch.py [--ranks 8] [--experts 256] [--slots 34] [--tokens 4096] [--json FILE]

Each rank has so many tokens of 8 routes. MaxVio is how many routes the fullest rank has above the mean, in shares of
the mean: 0 is as even as a draw can be, W - 1 is all on one rank. Within a rank some experts are more popular than
others. Times are microseconds of a launch in a replayed graph of 100, medians of 9 replays; launches of an empty batch
beside them show what is none of the planner's. Slots are found of one rank's routes, with the split and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenloom.ops.slots_of_routes import SlotTable

TOP_K = 8
MAX_VIO = (0.0, 0.2, 1.0, 4.0)
LAUNCHES, ROUNDS = 100, 9


def drawn_counts(num_ranks: int, num_experts: int, tokens: int, max_vio: float) -> torch.Tensor:
    """Routes of each source to each expert, int32 [W, E], of which rank 0 has most."""
    generator = torch.Generator().manual_seed(int(10 * max_vio))
    load = min(1.0, (1.0 + max_vio) / num_ranks)
    loads = torch.full((num_ranks,), (1.0 - load) / max(1, num_ranks - 1))
    loads[0] = load
    popularity = torch.exp(0.5 * torch.randn(num_ranks, num_experts // num_ranks, generator=generator))
    shares = (popularity / popularity.sum(1, keepdim=True) * loads[:, None]).flatten()
    routes = torch.multinomial(shares.expand(num_ranks, -1), tokens * TOP_K, replacement=True, generator=generator)
    return torch.stack([torch.bincount(row, minlength=num_experts) for row in routes]).int()


def graph_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call in a graph of many."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(LAUNCHES)]
    samples = []
    for _ in range(ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    del kept
    return statistics.median(samples[1:])  # the first brings the graph to the GPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--slots", type=int, default=34, help="of a rank")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device, local = torch.device("cuda", 0), given.experts // given.ranks
    table = SlotTable(given.experts, given.ranks, given.slots, 0, device)
    table.write([[expert // local * given.slots + expert % local] for expert in range(given.experts)])
    contestants: dict[str, torch.Tensor] = {
        "no routes": torch.zeros(given.ranks, given.experts, dtype=torch.int32),
        **{f"{each:g}": drawn_counts(given.ranks, given.experts, given.tokens, each) for each in MAX_VIO},
    }
    rows: list[dict[str, Any]] = []
    for name, counts in contestants.items():
        there, ids = counts.to(device), torch.repeat_interleave(torch.arange(given.experts), counts[0])
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))].view(-1, TOP_K).to(device)
        split = table.split(there, 0, False)
        before, after, pulls, shares = split.summary.tolist()
        row = {"max_vio": name, "rows_before": before, "rows": after, "pulls": pulls, "shares": shares}
        row["split_us"] = graph_us(partial(table.split, there, 0, False))
        if len(ids):
            row["slots_us"] = graph_us(partial(table.slots_of_routes, ids))
            row["slots_by_split_us"] = graph_us(partial(table.slots_of_routes, ids, split=split))
        rows.append(row)
        times = "  ".join(f"{key} {value:6.2f}" for key, value in row.items() if key.endswith("_us"))
        print(f"MaxVio {name:9}  {before:7} -> {after:7} rows, {pulls} pulls, {shares} shares  {times}", flush=True)
    if given.json:
        setup = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "launches": LAUNCHES}
        setup |= {key: value for key, value in vars(given).items() if key != "json"}
        given.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
