"""Shows what a call of backend nvlink costs the host: microseconds until it returns, with an idle GPU.

    python microbench/host_cost.py [--tokens 128] [--calls 2000] [--profile NAME] [--json FILE]

With Hopper GPUs it uses all of them, one rank each, and times the real thing on rank 0. Without a GPU it times what
Python does: the driver, torch.cuda and shared memory are stand-ins that do nothing, tensors lie on the CPU, and calls
are over at once. Then it also prints which of the stand-ins one call asks how often, since those cost more on a GPU.
Sizes are bounded, ids are int64, gradients are off, and nothing is checked by the host.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tokenloom as tl
from tokenloom.runtime.processes import RankContext, RankPool

NUM_EXPERTS, HIDDEN, TOP_K, INTERMEDIATE = 256, 7168, 8, 256
STAND_IN_RANKS = 4
FP8_BLOCK = 128
Calls = dict[str, Callable[[], Any]]


def make_comm(group: dist.ProcessGroup | None, device: torch.device, tokens: int) -> tl.Communicator:
    return tl.Communicator(
        group,
        num_experts=NUM_EXPERTS,
        hidden=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        backend="nvlink",
        device=device,
    )


def moving_calls(comm: tl.Communicator, tokens: int) -> Calls:
    """Dispatches and combines of all layouts. Each dispatch keeps what it returned for its combine."""
    device = comm.device
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(tokens, NUM_EXPERTS, device=device).topk(TOP_K, dim=1).indices
    weights = torch.rand(tokens, TOP_K, device=device)
    calls: Calls = {}
    for layout in ("token", "rank", "expert"):
        capacity = 2 * tokens * TOP_K if layout == "expert" else None
        for to_fp8 in (False, True):
            kept: dict[str, Any] = {}

            def dispatch(
                layout: Any = layout, capacity: Any = capacity, to_fp8: bool = to_fp8, kept: dict[str, Any] = kept
            ) -> None:
                kept["routed"] = comm.dispatch(
                    x, ids, weights, layout=layout, sizes="bounded", capacity=capacity, to_fp8=to_fp8
                )

            name = f"{layout}, {'bf16 to fp8' if to_fp8 else 'bf16'}"
            calls[f"dispatch, {name}"] = dispatch
            dispatch()
            y = torch.zeros(kept["routed"].tokens.shape, device=device, dtype=torch.bfloat16)

            def combine(y: torch.Tensor = y, kept: dict[str, Any] = kept) -> None:
                comm.combine(y, kept["routed"])

            calls[f"combine, {name}"] = combine
    return calls


def mega_calls(layer: tl.MegaMoE, tokens: int) -> Calls:
    """Forward calls of a MegaMoE."""
    device, local = layer.comm.device, layer.comm.plan.experts_per_rank
    blocks = (HIDDEN // FP8_BLOCK, INTERMEDIATE // FP8_BLOCK)
    layer.use_weights(
        torch.zeros(local, 2 * INTERMEDIATE, HIDDEN, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.ones(local, 2 * blocks[1], blocks[0], device=device),
        torch.zeros(local, HIDDEN, INTERMEDIATE, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.ones(local, *blocks, device=device),
    )
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(tokens, NUM_EXPERTS, device=device).topk(TOP_K, dim=1).indices
    weights, out = torch.rand(tokens, TOP_K, device=device), torch.empty_like(x)
    return {
        "MegaMoE, bf16": lambda: layer(x, ids, weights),
        "MegaMoE, bf16, out=": lambda: layer(x, ids, weights, out=out),
    }


def costs_us(calls: Calls, num_calls: int, settle: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Median and 10th percentile of each call, which take turns. ``settle``, not timed, ends what is under way."""
    costs: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_calls):
        for name, call in calls.items():
            settle()
            began = time.perf_counter_ns()
            call()
            costs[name].append((time.perf_counter_ns() - began) / 1e3)
    return {
        name: {"median": statistics.median(found), "p10": statistics.quantiles(found, n=10)[0]}
        for name, found in costs.items()
    }


# -- on GPUs -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_on_gpus(context: RankContext, tokens: int, num_calls: int) -> dict[str, dict[str, float]]:
    """Costs of all calls on this rank. Collective."""

    def settle() -> None:
        torch.cuda.synchronize()
        dist.barrier(context.group)

    with make_comm(context.group, context.device, tokens) as comm:
        found = costs_us(moving_calls(comm, tokens), num_calls, settle)
    with make_layer(context.group, context.device, tokens) as layer:
        return {**found, **costs_us(mega_calls(layer, tokens), num_calls, settle)}


def make_layer(group: dist.ProcessGroup | None, device: torch.device, tokens: int) -> tl.MegaMoE:
    return tl.MegaMoE(
        group,
        num_experts=NUM_EXPERTS,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        device=device,
    )


# -- without a GPU -----------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_python(tokens: int, num_calls: int, profile: str) -> dict[str, dict[str, Any]]:
    """Costs of all calls with stand-ins, and what each asks of them."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.support.stand_ins import StandIns

    device = torch.device("cpu")
    with StandIns(STAND_IN_RANKS) as stand_ins:
        calls = moving_calls(make_comm(None, device, tokens), tokens)
        calls.update(mega_calls(make_layer(None, device, tokens), tokens))
        if profile:
            show_profile(calls[profile], stand_ins.settle, num_calls)
            return {}
        found: dict[str, dict[str, Any]] = dict(costs_us(calls, num_calls, stand_ins.settle))
        for name, call in calls.items():
            stand_ins.settle()
            stand_ins.asked.clear()
            stand_ins.keeps = True
            call()
            stand_ins.keeps = False
            found[name]["asked"] = dict(stand_ins.asked)
    return found


def show_profile(call: Callable[[], Any], settle: Callable[[], None], num_calls: int) -> None:
    """Where the time of one call goes, by function."""
    profiler = cProfile.Profile()
    for _ in range(num_calls):
        settle()
        profiler.enable()
        call()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--profile", default="", metavar="NAME", help="profile one call, without GPUs only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        with RankPool(torch.cuda.device_count(), "cuda") as pool:
            found = pool.run(measure_on_gpus, arguments.tokens, arguments.calls, limit_s=300)[0]
    else:
        found = measure_python(arguments.tokens, arguments.calls, arguments.profile)
    for name, values in found.items():
        asked = ", ".join(f"{number} {what}" for what, number in values.get("asked", {}).items())
        print(f"{name:32} {values['median']:7.1f} us, p10 {values['p10']:7.1f}  {asked}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
