"""Shows what a call of backend nvlink costs the host: microseconds until it returns, with an idle GPU.

    python microbench/host_cost.py [--tokens 128] [--calls 2000] [--profile NAME] [--json FILE]

With Hopper GPUs it uses all of them, one rank each, and times the real thing on rank 0. Without a GPU it times what
Python does: the driver, torch.cuda and shared memory are stand-ins that do nothing, tensors lie on the CPU, and calls
are over at once. Then it also prints which of the stand-ins one call asks how often, since those cost more on a GPU.
Sizes are bounded, ids are int64, gradients are off, and nothing is checked by the host. GEMMs are timed on
GPUs only.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tokenloom as tl
from tokenloom.ops.gemm import grouped_gemm_fp8, grouped_swiglu_fp8
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


def moving_calls(comm: tl.Communicator, tokens: int) -> Iterator[Calls]:
    """A dispatch and the combine of what it has returned, for each layout."""
    device = comm.device
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(tokens, NUM_EXPERTS, device=device).topk(TOP_K, dim=1).indices
    weights = torch.rand(tokens, TOP_K, device=device)
    capacities = {"expert": 2 * tokens * TOP_K, "slots": 2 * tokens}
    for layout in ("token", "rank", "expert", "slots"):
        for to_fp8 in (False, True):
            options: dict[str, Any] = {"layout": layout, "to_fp8": to_fp8, "capacity": capacities.get(layout)}
            options["sizes"] = None if layout == "slots" else "bounded"
            kept = [comm.dispatch(x, ids, weights, **options)]
            y = torch.zeros(kept[0].tokens.shape, device=device, dtype=torch.bfloat16)

            def dispatch(options: dict[str, Any] = options, kept: list[Any] = kept) -> None:
                kept.append(comm.dispatch(x, ids, weights, **options))

            def combine(y: torch.Tensor = y, kept: list[Any] = kept) -> None:
                kept.append(comm.combine(y, kept[-1]))

            name = f"{layout}, {'bf16 to fp8' if to_fp8 else 'bf16'}"
            yield {f"dispatch, {name}": dispatch, f"combine, {name}": combine, "": kept.clear}
            if layout != "slots":
                continue
            first = comm.dispatch(x, ids, weights, **options)
            out = tl.DispatchOut(tokens=first.tokens, scales=first.scales, expert_counts=first.expert_counts)
            home = torch.empty_like(x)

            def dispatch_into(options: dict[str, Any] = options, out: tl.DispatchOut = out) -> None:
                comm.dispatch(x, ids, weights, **options, out=out)

            def combine_into(y: torch.Tensor = y, first: tl.Routed = first, home: torch.Tensor = home) -> None:
                comm.combine(y, first, out=home)

            yield {f"dispatch, {name}, out=": dispatch_into, f"combine, {name}, out=": combine_into}


def mega_calls(layer: tl.MegaMoE, tokens: int) -> Iterator[Calls]:
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
    yield {"MegaMoE, bf16": lambda: layer(x, ids, weights)}
    yield {"MegaMoE, bf16, out=": lambda: layer(x, ids, weights, out=out)}


def gemm_calls(device: torch.device, tokens: int) -> Iterator[Calls]:
    """Both FP8 GEMMs of some experts, as who writes experts calls them."""
    blocks = (HIDDEN // FP8_BLOCK, INTERMEDIATE // FP8_BLOCK)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    x = torch.zeros(tokens, HIDDEN, device=device).to(torch.float8_e4m3fn)
    w1 = torch.zeros(1, 2 * INTERMEDIATE, HIDDEN, device=device).to(torch.float8_e4m3fn)
    w2 = torch.zeros(1, HIDDEN, INTERMEDIATE, device=device).to(torch.float8_e4m3fn)
    x_scales = torch.ones(tokens, blocks[0], device=device)
    w1_scales = torch.ones(1, 2 * blocks[1], blocks[0], device=device)
    w2_scales = torch.ones(1, *blocks, device=device)
    activations = grouped_swiglu_fp8(x, x_scales, w1, w1_scales, offsets)
    yield {
        "grouped_swiglu_fp8": lambda: grouped_swiglu_fp8(x, x_scales, w1, w1_scales, offsets),
        "grouped_gemm_fp8": lambda: grouped_gemm_fp8(*activations, w2, w2_scales, offsets),
    }


def costs_us(groups: Iterable[Calls], num_calls: int, settle: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """Median and least cost of each call. Those of a group take turns, what has no name is not timed, and
    ``settle`` ends what is under way."""
    found: dict[str, dict[str, Any]] = {}
    for calls in groups:
        costs: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(num_calls):
            for name, call in calls.items():
                settle()
                began = time.perf_counter_ns()
                call()
                costs[name].append((time.perf_counter_ns() - began) / 1e3)
        for name, us in costs.items():
            if name:
                found[name] = {"median": statistics.median(us), "least": min(us)}
    return found


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
        found |= costs_us(mega_calls(layer, tokens), num_calls, settle)
    return found | costs_us(gemm_calls(context.device, tokens), num_calls, settle)


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
        comm, layer = make_comm(None, device, tokens), make_layer(None, device, tokens)
        groups = [*moving_calls(comm, tokens), *mega_calls(layer, tokens)]
        if profile:
            show_profile(next(calls for calls in groups if profile in calls), profile, stand_ins.settle, num_calls)
            return {}
        found = costs_us(groups, num_calls, stand_ins.settle)
        for calls in groups:
            for name, call in calls.items():
                stand_ins.settle()
                stand_ins.asked.clear()
                stand_ins.keeps = bool(name)
                call()
                if name:
                    found[name]["asked"] = dict(stand_ins.asked)
    return found


def show_profile(calls: Calls, profiled: str, settle: Callable[[], None], num_calls: int) -> None:
    """Where the time of one call goes, by function."""
    profiler = cProfile.Profile()
    for _ in range(num_calls):
        for name, call in calls.items():
            settle()
            if name == profiled:
                profiler.enable()
            call()
            profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


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
        print(f"{name:34} {values['median']:7.1f} us, least {values['least']:6.1f}  {asked}")
    if arguments.json:
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        setup = {"gpus": gpus, "tokens": arguments.tokens, "calls": arguments.calls, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"setup": setup, "host_us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
