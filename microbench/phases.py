"""Shows where the time of a call of backend nvlink goes: when its blocks pass each phase, and what the host pays.

    python microbench/phases.py [--tokens 4096] [--num-sms 16] [--json FILE]

Needs Hopper GPUs and uses all of them, one rank each. Times are those of rank 0 in a call alone: microseconds since
its first block began, as (earliest, median, latest) block. The host's figures are what a call takes until it returns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tokenloom as tl
from tokenloom.bench.workload import CallSizes, expert_outputs, make_inputs
from tokenloom.kernels.common import MARK_WORDS, MARKS, MAX_BLOCKS
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext, RankPool

CALLS = 5


def phases(context: RankContext, call: Callable[[], Any], launcher: Any) -> dict[str, list[float]]:
    """When blocks pass each phase, in the last of CALLS calls. Ranks begin them together. Collective."""
    trace = torch.zeros(MAX_BLOCKS, MARK_WORDS, dtype=torch.int64, device=context.device)
    for _ in range(CALLS):
        trace.zero_()
        torch.cuda.synchronize()
        dist.barrier(context.group)
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=context.device), group=context.group)
        launcher.trace(trace)
        call()
        launcher.trace(None)
        torch.cuda.synchronize()
    times = trace.cpu()
    begin = times[times > 0].min()
    found = {}
    for index, name in enumerate(MARKS):
        seen = times[:, index][times[:, index] > 0]
        if len(seen):
            us = sorted(((seen - begin).double() / 1e3).tolist())
            found[name] = [us[0], statistics.median(us), us[-1]]
    return found


def new_communicator(context: RankContext, plan: Plan, num_sms: int) -> tl.Communicator:
    """Of these sizes, on backend nvlink. Collective."""
    return tl.Communicator(
        context.group,
        num_experts=plan.num_experts,
        hidden=plan.hidden,
        top_k=plan.top_k,
        max_tokens_per_rank=plan.max_tokens_per_rank,
        backend="nvlink",
        num_sms=num_sms,
        device=context.device,
    )


def host_us(call: Callable[[], Any]) -> float:
    """Median time until a call returns, in microseconds, with an idle GPU."""
    costs = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        costs.append((time.perf_counter() - began) * 1e6)
    return statistics.median(costs)


@torch.no_grad()
def measure(context: RankContext, shape: CallSizes, num_sms: int) -> dict[str, Any]:
    """Phases and host times of all operations on this rank. Collective."""
    given = make_inputs(context, shape)
    plan = shape.plan(context.num_ranks)
    capacities = {"expert": given.expert_rows, "slots": given.slot_rows}
    found: dict[str, Any] = {}
    with new_communicator(context, plan, num_sms) as comm:
        launcher = comm.engine._backend._launcher  # type: ignore[attr-defined]
        for payload in ("bf16", "fp8", "to_fp8"):
            for layout in ("token", "expert", "rank", "slots"):
                options: dict[str, Any] = {
                    "layout": layout,
                    "sizes": None if layout == "slots" else "bounded",
                    "to_fp8": payload == "to_fp8",
                }
                if layout in capacities:
                    options["capacity"] = capacities[layout]
                x = given.fp8 if payload == "fp8" else given.x

                def dispatch(x: Any = x, options: dict[str, Any] = options, copy: bool = False) -> Any:
                    return comm.dispatch(x, given.ids, given.weights, copy=copy, **options)

                dispatch()
                name = f"dispatch/{payload}/{layout}"
                found[name] = {"phases": phases(context, dispatch, launcher), "host_us": host_us(dispatch)}
                if payload != "bf16":
                    continue
                routed = dispatch(copy=True)
                y = expert_outputs(routed.tokens)
                for mode in ("per_rank", "per_route") if layout == "expert" else ("per_rank",):

                    def combine(y: Any = y, routed: Any = routed, mode: Any = mode) -> Any:
                        return comm.combine(y, routed, mode=mode)

                    combine()
                    name = f"combine/{payload}/{layout}/{mode}"
                    found[name] = {"phases": phases(context, combine, launcher), "host_us": host_us(combine)}
                    comm.check()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--num-sms", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("phases.py needs Hopper GPUs; there is none")
    shape = CallSizes(num_tokens=arguments.tokens, hidden=7168, num_experts=256, top_k=8)
    with RankPool(torch.cuda.device_count(), "cuda") as pool:
        found = pool.run(measure, shape, arguments.num_sms, limit_s=300)[0]
    for name, values in found.items():
        print(f"{name}: host {values['host_us']:.0f} µs")
        for mark, (first, middle, last) in values["phases"].items():
            print(f"    {mark:8} {first:7.1f} {middle:7.1f} {last:7.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
