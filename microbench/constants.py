"""Shows what constants of a kernel's launch are worth: variants of calls, captured in one process, replayed in turns.

    python microbench/constants.py combine/token/4096 combine/expert/1024 \\
        --variant "LONE_ROWS=0" --variant "COPY_WARPS={0:2} LONE_ROWS=128" [--hidden 7168] [--num-sms 16] [--json FILE]

Needs Hopper GPUs and uses all of them, one rank each. A call is an operation, a layout and a number of tokens on each
rank. Constants are those of kernels/combine/launch.py and kernels/dispatch/launch.py; what they are comes first.
Numbers are microseconds of a call in a graph of ten: the median over the slowest ranks. Rows are bfloat16.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tokenloom as tl
from tokenloom.backends.nvlink.buffers import is_eager
from tokenloom.bench.common.inputs import Inputs, expert_outputs, make_inputs
from tokenloom.bench.common.rows import of_the_slowest
from tokenloom.bench.common.shape import Shape
from tokenloom.bench.common.timing import capture, one_replay, warm_up
from tokenloom.jit import cache
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


@dataclass(frozen=True)
class Task:
    """What is measured.

    Attributes:
        calls: operation, layout, tokens of each rank.
        largest: the sizes of a plan for all of them. Its number of tokens decides whether calls are eager.
        num_sms: of the communicators.
        rounds: turns of all graphs.
    """

    calls: tuple[tuple[str, str, int], ...]
    largest: Shape
    num_sms: int
    rounds: int


def parse_call(text: str) -> tuple[str, str, int]:
    operation, layout, tokens = text.split("/")
    if operation not in ("dispatch", "combine"):
        raise argparse.ArgumentTypeError(f"{operation!r} is neither dispatch nor combine")
    return operation, layout, int(tokens)


def parse_variant(text: str) -> dict[str, Any]:
    """Read ``NAME=VALUE ...``, values as Python writes them, without spaces."""
    found = {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in text.split())}
    for name in found:
        if not any(hasattr(module, name) for module in (combine, dispatch)):
            raise argparse.ArgumentTypeError(f"neither kernels/combine nor kernels/dispatch has a constant {name!r}")
    return found


@contextmanager
def constants(variant: dict[str, Any]) -> Iterator[None]:
    """Kernels that are made in this block have these constants."""
    with ExitStack() as stack:
        for module in (combine, dispatch):
            for name in variant.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, variant[name]))
        yield


def compile_combines(task: Task, num_ranks: int, variant: dict[str, Any]) -> None:
    """Put the kernels of combines into the cache, so that ranks need not compile them one after the other."""
    plan = task.largest.plan(num_ranks)
    with constants(variant):
        for layout in {layout for operation, layout, _ in task.calls if operation == "combine"}:
            kernel = combine.CombineVariant(
                plan=plan,
                layout="expert" if layout in ROUTE_LAYOUTS else layout,
                mode="per_rank",
                y_dtype=BF16,
                wire_dtype=BF16,
                out_dtype=BF16,
                eager=is_eager(plan),
            )
            cache.get(kernel.spec())


def prepared(comm: tl.Communicator, inputs: Inputs, operation: str, layout: str) -> Callable[[], Any]:
    """Make a call, which holds all that it reads. Collective."""
    capacities = {"expert": inputs.expert_rows, "slots": inputs.slot_rows}
    sizes = None if layout == "slots" else "bounded"
    options: dict[str, Any] = {"layout": layout, "sizes": sizes, "capacity": capacities.get(layout)}
    dispatch_rows = partial(comm.dispatch, inputs.x, inputs.ids, inputs.weights, **options)
    if operation == "dispatch":
        return partial(dispatch_rows, copy=False)
    routed = dispatch_rows(copy=True)
    return partial(comm.combine, expert_outputs(routed.tokens), routed, mode="per_rank")


@torch.no_grad()
def measure(context: RankContext, task: Task, variants: list[dict[str, Any]]) -> list[list[float]]:
    """Times of every call of every variant, in this order. Collective."""
    plan = task.largest.plan(context.num_ranks)
    numbers = sorted({tokens for _, _, tokens in task.calls})
    given = {tokens: make_inputs(context, replace(task.largest, num_tokens=tokens)) for tokens in numbers}
    with ExitStack() as stack:
        calls, graphs = [], []
        for variant in variants:
            with constants(variant):
                comm = tl.Communicator(
                    context.group,
                    num_experts=plan.num_experts,
                    hidden=plan.hidden,
                    top_k=plan.top_k,
                    max_tokens_per_rank=plan.max_tokens_per_rank,
                    backend="nvlink",
                    num_sms=task.num_sms,
                    device=context.device,
                )
                stack.enter_context(comm)
                for operation, layout, tokens in task.calls:
                    calls.append(prepared(comm, given[tokens], operation, layout))
                    warm_up(calls[-1])
                    graphs.append(capture(calls[-1]))
        times: list[list[float]] = [[] for _ in graphs]
        for number in range(task.rounds):
            for index in range(len(graphs))[:: 1 if number % 2 == 0 else -1]:
                times[index] += [one_replay(context, graphs[index]) for _ in range(REPLAYS)]
        graphs.clear()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="+", type=parse_call, help="say, combine/token/4096")
    parser.add_argument("--variant", action="append", default=[], help="constants, NAME=VALUE by spaces; many times")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, help="of the plan (default: the most tokens of a call)")
    parser.add_argument("--num-sms", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    max_tokens = options.max_tokens or max(tokens for _, _, tokens in options.calls)
    largest = Shape(max_tokens, hidden=options.hidden, top_k=options.top_k, num_experts=options.num_experts)
    task = Task(tuple(options.calls), largest, options.num_sms, options.rounds)
    texts, variants = options.variant, [parse_variant(text) for text in options.variant]
    num_ranks = torch.cuda.device_count()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(compile_combines, task, num_ranks), [{}, *variants]))
    rows = []
    with RankPool(num_ranks, "cuda") as ranks:
        for first in range(0, max(len(variants), 1), AT_ONCE):
            some = [{}, *variants[first : first + AT_ONCE]]
            times = ranks.run(measure, task, some, limit_s=LIMIT_S)
            names = ["as it is", *texts[first : first + AT_ONCE]]
            each = [(name, call) for name in names for call in task.calls]
            for index, (name, call) in enumerate(each):
                p50, p99, _ = of_the_slowest([of_rank[index] for of_rank in times])
                rows.append({"variant": name, "call": "/".join(map(str, call)), "p50_us": p50, "p99_us": p99})
                print(f"{name:40} {rows[-1]['call']:24} {p50:8.1f}", flush=True)
    if options.json:
        gpus = [torch.cuda.get_device_name(index) for index in range(num_ranks)]
        content = {"setup": {"gpus": gpus, "torch": torch.__version__, **asdict(task)}, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
