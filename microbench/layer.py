"""Measures a call of MegaMoE on one Hopper GPU, which has all experts, for each number of tokens and form of weights.

    python microbench/layer.py [--tokens 8,64,512] [--forms block,row,four_bits] [--trace] [--gemms] [--json FILE]

Forms are FP8 with scales of blocks, FP8 with scales of rows, and four bits. Times are microseconds of a call in a
replayed graph of ten: burst in the first replay behind a pause, steady in those of RUN_S behind WARM_S of others.
Forms take turns, in both orders; numbers are medians of both. Clock and power are what NVML says in the middle of a
steady sample; torch needs nvidia-ml-py for that. The power is a mean of about a second, part of which was before.

--gemms measures both GEMMs of each form too, in the same way, where the rows of a call have arrived: each by itself on
all SMs, and one behind the other. GEMM2 by itself finds rows that are quantised. "both" has a kernel more, which sets
the counts between them to zero.

--trace shows one call of each form by itself: when kernels begin and end, and the mean time of a GEMM's tile in its
roles. Kernels that write times are a little slower, so this comes last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tokenloom.bench.clock import Clock, warm_up
from tokenloom.bench.harness import limit_s
from tokenloom.bench.mega import ByRow, FourBits, OtherMega, traced_call
from tokenloom.bench.mega_trace import spans_of
from tokenloom.bench.mega_work import MegaShape, make_weights
from tokenloom.bench.setup import run_setup
from tokenloom.bench.tables import Fitted, make_table
from tokenloom.inference.expert_memory import LINE
from tokenloom.inference.mega_moe import MegaMoE
from tokenloom.inference.trace import MegaTimes
from tokenloom.kernels.gemm.launch import TRACE_ROLES
from tokenloom.runtime.processes import RankContext, RankPool

FORMS: dict[str, type[OtherMega]] = {"block": OtherMega, "row": ByRow, "four_bits": FourBits}
IDLE_S, WARM_S, RUN_S = 0.1, 0.3, 0.3
"""The pause before a burst, the replays before a steady sample, and those of it."""
COLUMNS = ("tokens", "form", "part", "steady_us", "burst_us", "mhz", "watts")
ROLES = ("multiply", "epilogue", "store")
"""As the names in TRACE_ROLES begin."""
TRACE_COLUMNS = ("tokens", "form", "kernel", "begin_us", "end_us", "tiles_per_block", *(f"{r}_us" for r in ROLES))

Calls = dict[tuple[str, str], Callable[[], Any]]
"""Calls by form and part of the layer."""
Row = dict[str, Any]


@torch.no_grad()
def measure(
    context: RankContext, shape: MegaShape, tokens: Sequence[int], forms: Sequence[str], gemms: bool, trace: bool
) -> tuple[list[Row], list[Row]]:
    """Return rows of times, and of traces."""
    clock, rows, traces = Clock(context, cold=False), list[Row](), list[Row]()
    gpu_state(context.device)  # loads NVML, or says that it is missing
    w1, w1_scales, w2, w2_scales = make_weights(shape, context)
    weights = ((w1, w1_scales), (w2, w2_scales))
    layers = {form: FORMS[form](context.group, shape, max(tokens), *weights) for form in forms}
    calls = {(count, form): make_call(context, shape, layers[form], count) for count in tokens for form in forms}
    for count in tokens:
        context.report(f"{count} tokens")
        rows += take_turns(clock, count, {(form, "layer"): calls[count, form] for form in forms})
        for form in forms if gemms else ():
            with gemms_alone(form, layers[form].mega, calls[count, form], count) as of_gemms:
                rows += take_turns(clock, count, of_gemms)
    for (count, form), call in calls.items() if trace else ():
        times = traced_call(clock, layers[form].mega, call)
        traces += [{"tokens": count, "form": form} | row for row in kernel_times(times)]
    for layer in layers.values():
        layer.close()
    return rows, traces


def make_call(context: RankContext, shape: MegaShape, layer: OtherMega, num_tokens: int) -> Callable[[], Any]:
    """A call of so many random tokens, the same ones for each form."""
    generator = torch.Generator(context.device).manual_seed(num_tokens)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": context.device}
    x = torch.randn(num_tokens, shape.hidden, **drawn).bfloat16()
    topk_weights = torch.rand(num_tokens, shape.top_k, **drawn)
    topk_ids = shape.topk_ids(context.rank, num_tokens).to(context.device)
    return layer.prepared_call(x, topk_ids, topk_weights, torch.empty_like(x))


def take_turns(clock: Clock, num_tokens: int, calls: Calls) -> list[Row]:
    """Measure calls in turns, in both orders: a row for each, with medians and all turns."""
    graphs = {}
    for name, call in calls.items():
        warm_up(call)
        graphs[name] = clock.capture(call)
    turns: dict[tuple[str, str], list[Row]] = {name: [] for name in calls}
    for name in [*graphs, *reversed(graphs)]:
        turns[name].append(one_turn(clock, graphs[name]))
    return [
        {"tokens": num_tokens, "form": form, "part": part, "turns": found}
        | {what: statistics.median(each[what] for each in found) for what in found[0]}
        for (form, part), found in turns.items()
    ]


def one_turn(clock: Clock, graph: torch.cuda.CUDAGraph) -> Row:
    """Burst and steady time of a call, and the GPU's clock and power meanwhile."""
    graph.replay()  # the first one also brings the graph to the GPU
    torch.cuda.synchronize()
    time.sleep(IDLE_S)
    burst_us, meanwhile = clock.replay_us(graph), dict[str, float]()
    steady_us = clock.steady_us(graph, WARM_S, RUN_S, midway=lambda: meanwhile.update(gpu_state(clock.context.device)))
    return {"steady_us": steady_us, "burst_us": burst_us, **meanwhile}


def gpu_state(device: torch.device) -> dict[str, float]:
    """Clock of the SMs in MHz, and power of the GPU in W."""
    return {"mhz": torch.cuda.clock_rate(device), "watts": torch.cuda.power_draw(device) / 1e3}


@contextmanager
def gemms_alone(form: str, mega: MegaMoE, call: Callable[[], Any], num_tokens: int) -> Iterator[Calls]:
    """Both GEMMs of a call without its other kernels, until the block ends. The layer is as before then."""
    # A layer has no public way to its GEMMs, because calls never run them alone. All that is private is in these three
    # lines: the counts by which the kernels of a call meet, and the GEMMs of calls of so many tokens.
    experts: Any = mega._experts
    gemms, counted = experts._gemms, experts._memory.counted
    pair = gemms._pairs[bisect_left(gemms._most_tokens, num_tokens)]
    behind_gemms: list[torch.Tensor] = []

    def keep_counts(stage: str) -> None:
        if stage == "gemm2":  # the next kernel, in which ranks meet, sets them to 0
            behind_gemms.append(counted.clone())

    def launch(gemm: Any) -> None:
        gemm.launch(gemms.num_sms * gemm.spec.blocks_per_sm, torch.cuda.current_stream().cuda_stream)

    def both() -> None:
        counted[LINE:].zero_()  # GEMM2 waits for what GEMM1 counts there; the words before say that rows have come
        for gemm in pair:
            launch(gemm)

    mega.after_stage = keep_counts
    call()
    mega.after_stage = None
    counted.copy_(behind_gemms[0])
    for gemm in pair:
        gemm.overlaps_previous = False
    # With scales of rows, GEMM1 by itself leaves activations that are not quantised. So GEMM2 comes behind both.
    yield {(form, "GEMM1"): partial(launch, pair[0]), (form, "both"): both, (form, "GEMM2"): partial(launch, pair[1])}
    for gemm in pair:
        gemm.overlaps_previous = True
    counted.zero_()


def kernel_times(times: MegaTimes) -> Iterator[Row]:
    """When each kernel of a traced call begins and ends; of GEMMs also what their tiles take."""
    tiles = {"GEMM1": times.gemm1, "GEMM2": times.gemm2}
    spans = [span for span in spans_of(times) if span.thread == f"kernel {span.name}"]
    first = min(span.begin for span in spans)
    for span in spans:
        about = {"kernel": span.name, "begin_us": (span.begin - first) / 1e3, "end_us": (span.end - first) / 1e3}
        yield about | (tile_times(tiles[span.name]) if span.name in tiles else {})


def tile_times(times: torch.Tensor) -> dict[str, float]:
    """Tiles of a block, and mean microseconds of a tile in each role, from int64 [blocks, role, tile, 2]."""
    done, took_us = times[..., 1] > 0, (times[..., 1] - times[..., 0]) / 1e3
    has_run = done[:, TRACE_ROLES.index("start"), 0]
    found = {"tiles_per_block": done[has_run, TRACE_ROLES.index("multiply 0")].sum(-1).double().mean().item()}
    for role in ROLES:
        places = [place for place, name in enumerate(TRACE_ROLES) if name.startswith(role)]
        found[f"{role}_us"] = took_us[:, places][done[:, places]].mean().item()
    return found


def show(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print these columns of rows."""

    def text(value: Any) -> str:
        return f"{value:,.{2 if value < 100 else 1}f}" if isinstance(value, float) else str(value)

    cells = [[text(row.get(name, "")) for name in columns] for row in rows]
    table = make_table([name.replace("_", " ") for name in columns], cells, left=(1, 2))
    Console(highlight=False).print(Fitted(table, keys=3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8,64,512")
    parser.add_argument("--forms", default=",".join(FORMS))
    for name, size in (("num-experts", 32), ("hidden", 7168), ("intermediate", 2048), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--gemms", action="store_true", help="measure both GEMMs too")
    parser.add_argument("--trace", action="store_true", help="show when the kernels of a call work")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens, forms = [int(each) for each in options.tokens.split(",")], options.forms.split(",")
    if unknown := set(forms) - set(FORMS):
        parser.error(f"--forms has {', '.join(sorted(unknown))}, expected some of {', '.join(FORMS)}")
    shape = MegaShape(options.hidden, options.intermediate, options.num_experts, options.top_k)
    with RankPool(1, "cuda") as pool:
        arguments = (shape, tokens, forms, options.gemms, options.trace)
        limit = limit_s(8 * len(tokens) * len(forms))
        ((rows, traces),) = pool.run(measure, *arguments, limit_s=limit, on_event=print)
    show(COLUMNS, rows)
    if traces:
        show(TRACE_COLUMNS, traces)
    if options.json is not None:
        setup = run_setup("cuda", 1, []) | asdict(shape) | {"command": shlex.join(["python", *sys.argv])}
        options.json.write_text(json.dumps({"setup": setup, "rows": rows, "traces": traces}, indent=1) + "\n")


if __name__ == "__main__":
    main()
