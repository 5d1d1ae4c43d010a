"""Measures what a placement costs on Hopper GPUs, and how fast experts move.

    python microbench/placements.py [--gpus 1] [--tokens 128,1024,4096] [--only dispatch,moves,mega] [--json FILE]

Calls with a placement that leaves experts where they are, beside one empty slot on each rank, take turns with calls
without one, in both orders: dispatches in BF16 and FP8, and the fused FP8 layer. They differ in the kernel
that finds slots. Times are microseconds of a call in a replayed graph of ten: burst in the first replay behind a
pause, steady in replays without one; medians of both turns. Two equal communicators show the spread.

Then experts of 44 MB (E4M3 of 7168 and 2048) move between the slots of a rank, and on several GPUs between ranks. The
rate is that of the stream, beside that of copies of as many bytes. Within a rank the stream is kept busy until the
host has made all steps; the host's time for a step is beside it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tokenloom as tl
from tokenloom.bench.clock import Clock, warm_up
from tokenloom.bench.harness import limit_s
from tokenloom.bench.mega import OtherMega, Replicated
from tokenloom.bench.mega_work import MegaShape, make_weights
from tokenloom.bench.setup import run_setup
from tokenloom.runtime.processes import RankContext, RankPool

HIDDEN, INTERMEDIATE, TOP_K, EXPERTS_PER_RANK = 7168, 2048, 8, 32
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE
MOVED_EXPERTS = 32
"""Experts that change places in one move."""
AHEAD_CYCLES = 40_000_000
"""GPU clocks, about 20 ms, that the stream is kept busy while the host makes steps."""
IDLE_S, WARM_S, RUN_S = 0.1, 0.3, 0.3
Row = dict[str, Any]


def with_a_spare_slot(num_ranks: int) -> tl.Placement:
    """Experts where they are without a placement, and one empty slot on each rank."""
    return tl.Placement.default(EXPERTS_PER_RANK * num_ranks, num_ranks, EXPERTS_PER_RANK + 1)


def take_turns(clock: Clock, calls: dict[str, Callable[[], Any]]) -> dict[str, Row]:
    """Measure calls in turns, in both orders."""
    graphs = {}
    for name, call in calls.items():
        warm_up(call)
        graphs[name] = clock.capture(call)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for name in [*graphs, *reversed(graphs)]:
        graphs[name].replay()  # the first one also brings the graph to the GPU
        torch.cuda.synchronize()
        time.sleep(IDLE_S)
        burst_us = clock.replay_us(graphs[name])
        turns[name].append((burst_us, clock.steady_us(graphs[name], WARM_S, RUN_S)))
    medians = {name: [statistics.median(each) for each in zip(*found, strict=True)] for name, found in turns.items()}
    return {
        name: {"burst_us": burst, "steady_us": steady, "turns": turns[name]}
        for name, (burst, steady) in medians.items()
    }


def drawn(context: RankContext, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens, the experts of each, and weights."""
    generator = torch.Generator(context.device).manual_seed(1000 * tokens + context.rank)
    options: dict[str, Any] = {"generator": generator, "device": context.device}
    scores = torch.rand(tokens, EXPERTS_PER_RANK * context.num_ranks, **options)
    weights, ids = scores.topk(TOP_K, dim=1)
    return torch.randn(tokens, HIDDEN, **options).bfloat16(), ids, weights


@torch.no_grad()
def measure_dispatches(context: RankContext, tokens: list[int]) -> list[Row]:
    clock, rows = Clock(context, cold=False), list[Row]()
    sizes: dict[str, Any] = {
        "num_experts": EXPERTS_PER_RANK * context.num_ranks,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "max_tokens_per_rank": max(tokens),
        "backend": "nvlink",
        "device": context.device,
    }
    comms = {
        "without": tl.Communicator(context.group, **sizes),
        "without, again": tl.Communicator(context.group, **sizes),
        "placed": tl.Communicator(context.group, placement=with_a_spare_slot(context.num_ranks), **sizes),
    }
    for count in tokens:
        x, ids, weights = drawn(context, count)
        for layout in ("rank", "expert"):
            for to_fp8 in (False, True):
                options: dict[str, Any] = {"layout": layout, "to_fp8": to_fp8, "sizes": "bounded"}
                options |= {"capacity": count * TOP_K * context.num_ranks} if layout == "expert" else {}
                calls: dict[str, Callable[[], Any]] = {
                    name: partial(comm.dispatch, x, ids, weights, **options) for name, comm in comms.items()
                }
                found = take_turns(clock, calls)
                what = f"dispatch by {layout}, {'FP8' if to_fp8 else 'BF16'}"
                rows += [{"what": what, "tokens": count, "placement": name} | row for name, row in found.items()]
                context.report(f"{what}, {count} tokens")
    for comm in comms.values():
        comm.close()
    return rows


@torch.no_grad()
def measure_layers(context: RankContext, tokens: list[int]) -> list[Row]:
    clock, rows = Clock(context, cold=False), list[Row]()
    shape = MegaShape(HIDDEN, INTERMEDIATE, EXPERTS_PER_RANK * context.num_ranks, TOP_K)
    w1, w1_scales, w2, w2_scales = make_weights(shape, context)
    given = (context.group, shape, max(tokens), (w1, w1_scales), (w2, w2_scales))
    layers: dict[str, OtherMega] = {"without": OtherMega(*given), "placed": Replicated(*given, spare_slots=1)}
    for count in tokens:
        x, ids, weights = drawn(context, count)
        out = torch.empty_like(x)
        calls = {name: layer.prepared_call(x, ids, weights, out) for name, layer in layers.items()}
        found = take_turns(clock, calls)
        rows += [{"what": "MegaMoE", "tokens": count, "placement": name} | row for name, row in found.items()]
        context.report(f"MegaMoE, {count} tokens")
    for layer in layers.values():
        layer.close()
    return rows


@torch.no_grad()
def measure_moves(context: RankContext, tokens: list[int]) -> list[Row]:
    """Move experts to empty slots: of their rank, and where there are several ranks, of the next one."""
    num_ranks, rank = context.num_ranks, context.rank
    slots = 2 * MOVED_EXPERTS
    here = [[e + MOVED_EXPERTS * r for e in range(MOVED_EXPERTS)] for r in range(num_ranks)]
    empty = [-1] * MOVED_EXPERTS
    before = tl.Placement([own + empty for own in here], num_experts=MOVED_EXPERTS * num_ranks)
    rows = list[Row]()
    for where in ("slots of a rank", "another rank")[: min(num_ranks, 2)]:
        turn = 0 if where == "slots of a rank" else 1
        # Within a rank a second copy is made: an expert that stays on its rank keeps its slot.
        table = [here[r] + here[(r - turn) % num_ranks] for r in range(num_ranks)]
        comm = tl.Communicator(
            context.group,
            num_experts=MOVED_EXPERTS * num_ranks,
            hidden=HIDDEN,
            top_k=TOP_K,
            max_tokens_per_rank=128,
            backend="nvlink",
            device=context.device,
            placement=before,
        )
        weights = torch.randint(0, 255, (slots, EXPERT_BYTES), dtype=torch.uint8, device=context.device)
        weights[:MOVED_EXPERTS] += rank
        want = torch.cat([weights[:MOVED_EXPERTS]] * 2)
        after = tl.Placement(table, num_experts=MOVED_EXPERTS * num_ranks)
        for experts in (1, 1, 8, MOVED_EXPERTS):  # the first move warms up
            comm.set_placement(before)
            weights[MOVED_EXPERTS:] = 0
            moving = tl.move_experts(comm, [weights], after, piece_bytes=experts * EXPERT_BYTES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin = time.perf_counter()
            if turn == 0:
                torch.cuda._sleep(AHEAD_CYCLES)
            start.record()
            steps = moving.num_steps
            moving.run()
            end.record()
            hosts_s = time.perf_counter() - begin
            end.synchronize()
            assert turn or torch.equal(weights, want)
            num_bytes = MOVED_EXPERTS * EXPERT_BYTES
            rows.append(
                {
                    "what": f"{MOVED_EXPERTS} experts to {where}",
                    "piece_mb": experts * EXPERT_BYTES / 1e6,
                    "steps": steps,
                    "host_us_of_a_step": hosts_s / steps * 1e6,
                    "stream_gbytes_per_s": num_bytes / start.elapsed_time(end) / 1e6,
                    "copy_gbytes_per_s": copy_rate(weights),
                }
            )
        del rows[-4]
        comm.close()
    return rows


def copy_rate(weights: torch.Tensor) -> float:
    """GB/s of copies of one expert, in this GPU's memory, behind each other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for timed in (False, True):
        if timed:
            start.record()
        for slot in range(MOVED_EXPERTS):
            weights[MOVED_EXPERTS + slot].copy_(weights[slot])
    end.record()
    end.synchronize()
    return MOVED_EXPERTS * EXPERT_BYTES / start.elapsed_time(end) / 1e6


PARTS: dict[str, Callable[[RankContext, list[int]], list[Row]]] = {
    "dispatch": measure_dispatches,
    "moves": measure_moves,
    "mega": measure_layers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tokens", default="128,1024,4096")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, apart by commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = [int(each) for each in options.tokens.split(",")]
    with RankPool(options.gpus, "cuda") as pool:
        limits: dict[str, Any] = {"limit_s": limit_s(100), "on_event": print}
        rows = [row for name in options.only.split(",") for row in pool.run(PARTS[name], tokens, **limits)[0]]
    for row in rows:
        print("  ".join(f"{key} {value:,.1f}" if isinstance(value, float) else str(value)
                        for key, value in row.items() if key != "turns"))  # fmt: skip
    if options.json is not None:
        setup = run_setup("cuda", options.gpus, []) | {"command": shlex.join(["python", *sys.argv])}
        options.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
