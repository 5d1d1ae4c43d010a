"""Shows what constants of a kernel's launch are worth: variants of calls, captured in one process, replayed in turns.

    python microbench/constants.py --tokens 1024,4096 --only combine/nvlink \\
        --variant LONE_ROWS=0 --variant "COPY_WARPS={0:2} LONE_ROWS=128" [--hidden 7168] [--num-sms 16] [--json FILE]

Needs Hopper GPUs and uses all of them, one rank each. Rows, shapes and inputs are those of ``tokenloom bench comm``.
Constants are those of kernels/combine/launch.py and kernels/dispatch/launch.py; what they are comes first. Numbers are
microseconds of a call in a graph of ten: the median over the slowest ranks.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from tokenloom.backends.peers.buffers import sends_before_opening
from tokenloom.bench.comm import CallMaker, make_sampler
from tokenloom.bench.comm_work import CallSeries, plan_series, shapes_for
from tokenloom.bench.harness import Sample, of_the_slowest
from tokenloom.bench.workload import make_inputs
from tokenloom.cli import kernel_cache
from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.combine import launch as combine
from tokenloom.kernels.dispatch import launch as dispatch
from tokenloom.plan import ROUTE_LAYOUTS
from tokenloom.runtime.processes import RankContext, RankPool

LIMIT_S = 300.0
AT_ONCE = 6
"""Variants whose graphs and buffers are on the GPUs at a time, beside the version as it is."""
REPLAYS = 4
"""Of each graph in a round."""
BF16 = torch.bfloat16
Variant = dict[str, Any]
"""Constants by their names; none: the version as it is."""


def parse_variant(text: str) -> Variant:
    """Read ``NAME=VALUE ...``, values as Python writes them, without spaces."""
    found = {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in text.split())}
    for name in found:
        if not any(hasattr(module, name) for module in (combine, dispatch)):
            raise argparse.ArgumentTypeError(f"neither kernels/combine nor kernels/dispatch has a constant {name!r}")
    return found


@contextmanager
def constants(variant: Variant) -> Iterator[None]:
    """Kernels that are made in this block have these constants."""
    with ExitStack() as stack:
        for module in (combine, dispatch):
            for name in variant.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, variant[name]))
        yield


def combines(series: Sequence[CallSeries], variant: Variant, num_ranks: int) -> list[KernelSpec]:
    """The kernels of the combines. Ranks that find them in the cache need not compile them one after the other."""
    found = []
    with constants(variant):
        for each in series:
            plan, layout = each.shape.plan(num_ranks), each.operation.layout
            kernel = combine.CombineVariant(
                plan=plan,
                layout="expert" if layout in ROUTE_LAYOUTS else layout,
                mode="per_rank",
                y_dtype=BF16,
                wire_dtype=BF16,
                out_dtype=BF16,
                eager=sends_before_opening(plan),
            )
            if "combine" in each.operation.name:
                found.append(kernel.spec())
    return found


@torch.no_grad()
def measure(
    context: RankContext, series: Sequence[CallSeries], variants: Sequence[Variant], rounds: int
) -> list[list[Sample]]:
    """Samples of every series of every variant, in this order. Collective."""
    inputs = {shape: make_inputs(context, shape) for shape in dict.fromkeys(each.shape for each in series)}
    with ExitStack() as stack:
        samplers = []
        for variant in variants:
            makers = {shape: CallMaker(context, given, stack) for shape, given in inputs.items()}
            with constants(variant):
                samplers += [make_sampler(context, makers[each.shape], each) for each in series]
        samples: list[list[Sample]] = [[] for _ in samplers]
        for number in range(rounds):
            for index in range(len(samplers))[:: 1 if number % 2 == 0 else -1]:
                samples[index] += [samplers[index]() for _ in range(REPLAYS)]
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variant", action="append", default=[], type=parse_variant, help="NAME=VALUE ..., repeatable"
    )
    parser.add_argument("--only", default="combine/nvlink", help="parts of names of rows, by commas")
    parser.add_argument("--tokens", default="4096", help="of each rank, by commas")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--num-sms", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num_ranks = torch.cuda.device_count()
    sizes = {"hidden": options.hidden, "num_experts": options.num_experts, "top_k": options.top_k}
    shapes = shapes_for(["prefill"], "cuda", [int(each) for each in options.tokens.split(",")], **sizes)
    only = options.only.split(",")
    series, _ = plan_series(shapes, num_ranks, "cuda", ["nvlink"], [options.num_sms], only, ["graph"])
    specs = [spec for variant in [{}, *options.variant] for spec in combines(series, variant, num_ranks)]
    kernel_cache.build(Console(), list(dict.fromkeys(specs)))
    rows = []
    with RankPool(num_ranks, "cuda") as ranks:
        for first in range(0, max(len(options.variant), 1), AT_ONCE):
            some = [{}, *options.variant[first : first + AT_ONCE]]
            samples = ranks.run(measure, series, some, options.rounds, limit_s=LIMIT_S)
            for index, (variant, each) in enumerate((variant, each) for variant in some for each in series):
                times = [[sample["call"] for sample in of_rank[index]] for of_rank in samples]
                p50, p99, _ = of_the_slowest(times)
                text = " ".join(f"{name}={value}" for name, value in variant.items()) or "as it is"
                rows.append({"variant": text, "row": each.name(num_ranks), "p50_us": p50, "p99_us": p99})
                print(f"{text:40} {each.name(num_ranks):50} {p50:8.1f}", flush=True)
    if options.json:
        gpus = [torch.cuda.get_device_name(index) for index in range(num_ranks)]
        setup = {"gpus": gpus, "torch": torch.__version__, "num_sms": options.num_sms, "rounds": options.rounds}
        options.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
