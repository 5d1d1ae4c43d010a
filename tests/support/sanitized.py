"""Small cases on one GPU for compute-sanitizer: ``python -m tests.support.sanitized mega_moe``, see test_sanitizer.py.

One rank alone, so that one process shows everything: every layout, BF16, FP8 with scales and quantised on the way,
exact and bounded sizes, more rows than fit, sums per rank and per route. Results are compared with the reference.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support import mega_cases
from tests.support.cases import BF16, FP8, Case, Problem, expert_rows, make_comm, make_problem, same_bits, same_routed
from tests.support.small_kernels import scale_spec, write_package
from tokenloom import reference
from tokenloom.jit import compiler
from tokenloom.jit.kernel import Kernel, checked, load_driver
from tokenloom.runtime.processes import RankContext

DONE = "all results are as in the reference"


def communicator(backend: str = "nvlink", device: str = "cuda:0") -> None:
    """Calls of a communicator; raises where a result differs."""
    context = RankContext(0, 1, None, torch.device(device), None)  # type: ignore[arg-type]
    for dtype, to_fp8 in ((BF16, False), (FP8, False), (BF16, True)):
        case = Case(
            "sanitized",
            "",
            tokens=(37,),
            experts_per_rank=6,
            hidden=256,
            top_k=4,
            pick="repeats",
            unused=0.3,
            weights="nan where unused",
            dtype=dtype,
            to_quantise=to_fp8,
        )
        problem = make_problem(case, 1)
        # A tool slows kernels down a hundredfold, also while they wait for their own other blocks.
        with make_comm(context, backend, problem.plan, timeout_s=60.0, num_sms=4, checked=False) as comm:
            for layout, alignment in (("token", 1), ("expert", 8), ("rank", 1)):
                options = {"layout": layout, "alignment": alignment, "to_fp8": to_fp8}
                check_layout(context, comm, problem, options)
    print(DONE)


def mega_moe() -> None:
    """Calls of MegaMoE; raises where a result is not near the reference."""
    context = RankContext(0, 1, None, torch.device("cuda:0"), None)  # type: ignore[arg-type]
    for name in ("no wide scales", "repeats", "shared and tiles", "gpt_oss"):
        case = mega_cases.CASES[name]
        layer = mega_cases.make_layer(case, 1, context.device)
        with mega_cases.make_mega(context, case, layer, timeout_s=60.0) as layer_of_kernels:
            for _ in range(2):
                out = layer_of_kernels(*mega_cases.inputs(case, layer, 0))
                mega_cases.assert_near(out, mega_cases.expected(case, layer, 0))
            layer_of_kernels.check()
    print(DONE)


def check_layout(context: RankContext, comm: tl.Communicator, problem: Problem, options: dict[str, Any]) -> None:
    with torch.no_grad():
        arguments = problem.arguments(context)
        routed = comm.dispatch(*arguments, **options)  # type: ignore[call-overload]
        want = problem.dispatched(**options)
        same_routed(routed, want[0], problem.plan)
        combine(context, comm, problem, routed, want)
        if options["layout"] == "rank":
            return
        needed = want[0].num_rows
        for capacity in (needed + 3, needed - 5):
            bounded = options | {"capacity": capacity}
            routed = comm.dispatch(*arguments, **bounded, sizes="bounded")  # type: ignore[call-overload]
            want = problem.dispatched(**bounded, bounded=True)
            same_routed(routed, want[0], problem.plan, bounded=True)
            combine(context, comm, problem, routed, want)
            if capacity >= needed:
                comm.check()
                continue
            with pytest.raises(tl.CapacityOverflow, match=f"needs {needed} rows"):
                comm.check()


def combine(
    context: RankContext, comm: tl.Communicator, problem: Problem, routed: tl.Routed, want: list[reference.Routed]
) -> None:
    ys = expert_rows(problem, want, BF16)
    y = ys[0].to(context.device)
    weights = problem.topk_weights if routed.layout == "expert" else None
    for mode in ("per_rank", "per_route") if routed.layout == "expert" else ("per_rank",):
        out = comm.combine(y, routed, mode=mode)  # type: ignore[call-overload]
        outs = reference.combine(problem.plan, ys, want, problem.topk_ids, weights, mode=mode)
        same_bits(out, outs[0], f"{routed.layout}, {mode}")


def overrun() -> None:
    """A kernel that comes to the GPU as ours do, and writes one value too many: what the tool is there to find."""
    torch.zeros(1, device="cuda")  # makes torch's context current
    length = 60  # the allocator may hand out a little more, which is no reason to use it
    with tempfile.TemporaryDirectory() as folder:
        compiler.PACKAGE = write_package(Path(folder))
        kernel = Kernel(scale_spec(), 0)
    kernel.args.out, kernel.args.length = int(checked(load_driver().cuMemAlloc(4 * length))), length + 1
    kernel.launch(2, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


if __name__ == "__main__":
    {"communicator": communicator, "mega_moe": mega_moe, "overrun": overrun}[sys.argv[1]]()
