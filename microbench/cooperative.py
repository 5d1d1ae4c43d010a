"""What cooperative launches cost: the time of a dispatch and a combine, with and without, in turns.

    python microbench/cooperative.py [--tokens 128] [--num-sms 16]

A cooperative launch is refused where not all blocks fit on the GPU at once. Needs Hopper GPUs; uses all of them, one
rank each. Times are microseconds of the GPU for a call behind others, the median of rank 0.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import tokenloom as tl
from tokenloom.bench.common.inputs import expert_outputs, make_inputs
from tokenloom.bench.common.shape import Shape
from tokenloom.kernels.combine.launch import CombineVariant
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.runtime.processes import RankContext, RankPool

ROUNDS, CALLS = 5, 50


@contextmanager
def launches(cooperative: bool) -> Iterator[None]:
    """Kernels of dispatch and combine that are made within are launched so."""
    plain = {kind: kind.spec for kind in (DispatchVariant, CombineVariant)}
    for kind, spec in plain.items():
        changed = lambda variant, spec=spec: replace(spec(variant), cooperative=cooperative)  # noqa: E731
        setattr(kind, "spec", changed)  # noqa: B010
    try:
        yield
    finally:
        for kind, spec in plain.items():
            setattr(kind, "spec", spec)  # noqa: B010


@torch.no_grad()
def measure(context: RankContext, shape: Shape, num_sms: int) -> dict[str, list[float]]:
    """Microseconds of a call, of each round, by operation and kind of launch. Collective."""
    given = make_inputs(context, shape)
    plan = shape.plan(context.num_ranks)
    options: dict[str, Any] = {name: getattr(plan, name) for name in ("num_experts", "hidden", "top_k")}
    options |= {"max_tokens_per_rank": plan.max_tokens_per_rank, "backend": "nvlink", "num_sms": num_sms}
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for cooperative in (False, True):
            with launches(cooperative), tl.Communicator(context.group, device=context.device, **options) as comm:
                dispatch_options: dict[str, Any] = {"sizes": "bounded", "capacity": given.expert_rows, "copy": True}
                routed = comm.dispatch(given.x, given.ids, given.weights, layout="expert", **dispatch_options)
                y = expert_outputs(routed.tokens)

                def dispatch(comm: Any = comm) -> None:
                    comm.dispatch(given.x, given.ids, given.weights, sizes="bounded", layout="token")

                def combine(comm: Any = comm, y: Any = y, routed: Any = routed) -> None:
                    comm.combine(y, routed)

                for call in (dispatch, combine):
                    name = f"{call.__name__}, {'cooperative' if cooperative else 'plain'}"
                    found.setdefault(name, []).append(gpu_us(call))
                comm.check()
    return found


def gpu_us(call: Any) -> float:
    """Mean microseconds of the GPU for a call, behind others of its kind."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num-sms", type=int, default=16)
    arguments = parser.parse_args()
    shape = Shape(num_tokens=arguments.tokens, hidden=7168, num_experts=256, top_k=8)
    with RankPool(torch.cuda.device_count(), "cuda") as pool:
        found = pool.run(measure, shape, arguments.num_sms, limit_s=300)[0]
    for name, times in found.items():
        print(f"{name}: {statistics.median(times):.1f} µs (of {len(times)} rounds, {min(times):.1f}-{max(times):.1f})")


if __name__ == "__main__":
    main()
