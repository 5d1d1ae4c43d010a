"""Shows where the time of an eager call of MegaMoE's backend "composed" goes: its kernels, and the wait for the host.

    python microbench/composed.py [--tokens 512,2048,8192] [--calls 20] [--json FILE]

Needs Hopper GPUs and uses all of them, one rank each. ``a call`` is the wall clock of calls in a row, divided by their
number. Kernels are medians over calls, of the slowest rank; waits for other ranks count where they happen. With
another checkout first in PYTHONPATH it measures that version.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import tokenloom as tl
from tokenloom.bench.mega import Composed
from tokenloom.bench.mega_work import MegaShape, make_weights
from tokenloom.runtime.processes import RankContext, RankPool

SHAPE = MegaShape(hidden=7168, intermediate=2048, num_experts=256, top_k=8)
WARM_CALLS = 5


def measure_on_rank(context: RankContext, tokens: list[int], num_calls: int) -> list[dict[str, Any]]:
    """Wall clock and kernels of this rank, for each number of tokens. Collective."""
    w1, w1_scales, w2, w2_scales = make_weights(SHAPE, context)
    layer = Composed(context.group, SHAPE, max(tokens), (w1, w1_scales), (w2, w2_scales))
    found = [measure(context, layer, num_tokens, num_calls) for num_tokens in tokens]
    layer.close()
    return found


def measure(context: RankContext, layer: Composed, num_tokens: int, num_calls: int) -> dict[str, Any]:
    """Calls in a row on fixed inputs, first by the clock, then under the profiler."""
    generator = torch.Generator(context.device).manual_seed(context.rank)
    x = torch.randn(num_tokens, SHAPE.hidden, generator=generator, device=context.device).bfloat16()
    weights = torch.rand(num_tokens, SHAPE.top_k, generator=generator, device=context.device)
    ids = SHAPE.topk_ids(context.rank, num_tokens).to(context.device)
    call = layer.prepared_call(x, ids, weights, torch.empty_like(x))

    def calls(number: int) -> None:
        for _ in range(number):
            call()
        torch.cuda.synchronize()

    calls(WARM_CALLS)
    dist.barrier(context.group)
    torch.cuda.synchronize()
    began = time.perf_counter()
    calls(num_calls)
    call_us = (time.perf_counter() - began) * 1e6 / num_calls
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        calls(WARM_CALLS + num_calls)  # the first ones wait for ranks whose profiler starts late
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    in_a_call, odd = divmod(len(events), WARM_CALLS + num_calls)
    assert not odd, "every call launches the same kernels"
    medians = {}
    for place in range(in_a_call):
        of_place = events[WARM_CALLS * in_a_call + place :: in_a_call]
        medians[f"{place}: {of_place[0].name}"] = statistics.median(each.time_range.elapsed_us() for each in of_place)
    return {"call_us": call_us, "kernel_us": medians, "kernels_us": sum(medians.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="512,2048,8192", help="of every rank")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = [int(number) for number in options.tokens.split(",")]
    with RankPool(torch.cuda.device_count(), "cuda") as pool:
        ranks = pool.run(measure_on_rank, tokens, options.calls, limit_s=300)
    rows = []
    for number, *found in zip(tokens, *ranks, strict=True):
        names = dict.fromkeys(name for each in found for name in each["kernel_us"])
        slowest = {name: max(each["kernel_us"].get(name, 0.0) for each in found) for name in names}
        row = {"tokens": number, "kernel_us": slowest}
        row |= {name: max(each[name] for each in found) for name in ("call_us", "kernels_us")}
        rows.append(row)
        print(f"{number} tokens: {row['call_us']:.0f} us a call, of which kernels {row['kernels_us']:.0f}")
        for name, us in slowest.items():
            print(f"    {us:9.1f}  {name[:80]}")
    if options.json:
        setup = {"gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
        options.json.write_text(json.dumps({"setup": setup, "version": tl.__file__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
