"""Work of ``tokenloom cache``: shows the compiled kernels on disk, and compiles kernels ahead of time."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tokenloom import env
from tokenloom.backends.peers.buffers import EAGER_ROWS, sends_before_opening, weight_gradient_values
from tokenloom.bench.tables import counted
from tokenloom.errors import InvalidArgument
from tokenloom.jit import cache
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import blocks_per_sm
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.combine.launch import WEIGHTS, CombineVariant, PreReduceVariant
from tokenloom.kernels.common import DTYPES, LAYOUTS, Variant
from tokenloom.kernels.dispatch.launch import DISPATCH_LAYOUTS, SCALE_LAYOUTS, DispatchVariant
from tokenloom.plan import DISPATCH_STRATEGIES, FP8_BLOCK, Plan

KIB = 1024
COPIED_BYTES = 16
"""Unit in which rows are copied."""
_SHORT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DTYPE_NAMES = {number: _SHORT_DTYPES[dtype] for dtype, number in DTYPES.items()}
_LAYOUT_NAMES = {number: name for name, number in DISPATCH_LAYOUTS.items()}
_SHAPE_PARTS = {
    "num_ranks": "ep{}",
    "num_experts": "e{}",
    "top_k": "k{}",
    "hidden": "h{}",
    "row_bytes": "{}B",
    "scales_per_row": "{}scales",
    "per_route": "per_route",
    "dense": "dense",
    "eager": "eager",
}
"""Parts of a variant's name, by field of its shape, in their order."""
_SCALE_ORDERS = {number: name for name, number in SCALE_LAYOUTS.items()}
_WEIGHTS = {WEIGHTS["received"]: "weighted", WEIGHTS["home"]: "weighted_at_home"}
_QUANTIZED = {1: "fp8", 2: "fp8_power_of_two"}


@dataclass(frozen=True)
class Built:
    """Result of a build."""

    compiled: int
    found: int
    not_kept: int
    wall_s: float


def sorted_entries() -> list[cache.Entry]:
    """All kernels on disk, by name."""
    return sorted(cache.entries(), key=lambda entry: (variant_name(entry), entry.key))


def list_table(entries: Sequence[cache.Entry]) -> Table:
    """A line for each kernel: its variant and size."""
    table = _table("registers", "KiB", "key")
    for entry in entries:
        size = f"{len(entry.cubin) / KIB:.1f}"
        table.add_row(variant_name(entry), str(entry.resources.registers), size, entry.key[:8])
    return table


def inspect_table(entries: Sequence[cache.Entry]) -> Table:
    """A line for each kernel: what it needs of a GPU. Blocks per SM are known only where there is a GPU."""
    headers = (
        "threads",
        "registers",
        "stack\nB",
        "spills\nB",
        "shared B\nstatic",
        "\ndynamic",
        "blocks\nper SM",
        "key",
    )
    table = _table(*headers)
    has_gpu = _has_gpu()
    for entry in entries:
        needs = entry.resources
        numbers = (entry.threads, needs.registers, needs.stack_bytes, needs.spill_bytes, needs.static_shared_bytes)
        blocks = _occupancy(entry) if has_gpu else "-"
        table.add_row(variant_name(entry), *map(str, numbers), str(entry.shared_bytes), blocks, entry.key[:8])
    return table


def variant_name(entry: cache.Entry) -> str:
    """The name of a variant, such as "combine/expert/ep8/e256/k8/h7168/bf16"."""
    shape = entry.shape
    parts = [entry.name]
    if "layout" in shape:
        parts.append(_LAYOUT_NAMES.get(shape["layout"], "?"))
    parts += [text.format(shape[key]) for key, text in _SHAPE_PARTS.items() if shape.get(key)]
    if shape.get("strategy"):
        parts.append(DISPATCH_STRATEGIES[shape["strategy"]])
    if shape.get("weights"):
        parts.append(_WEIGHTS[shape["weights"]])
    if shape.get("scale_layout"):
        parts.append(f"scales_in_{_SCALE_ORDERS[shape['scale_layout']]}")
    dtypes = [_DTYPE_NAMES.get(shape[key], "?") for key in ("y_dtype", "wire_dtype", "out_dtype") if key in shape]
    if shape.get("quantize"):
        dtypes = [_DTYPE_NAMES.get(shape.get("x_dtype", -1), "?"), _QUANTIZED.get(shape["quantize"], "?")]
    if dtypes:
        parts.append(dtypes[0] if len(set(dtypes)) == 1 else ">".join(dtypes))
    return "/".join(parts)


def named(entries: Sequence[cache.Entry], name: str) -> list[cache.Entry]:
    """The entries of a kernel, or those whose key begins with ``name``."""
    found = [entry for entry in entries if entry.name == name or entry.key.startswith(name)]
    if not found:
        known = ", ".join(sorted({entry.name for entry in entries})) or "none"
        raise InvalidArgument(
            f"name is {name!r}, expected a kernel in the cache, or the beginning of its key: {known}"
        )
    return found


def variants(plan: Plan) -> list[KernelSpec]:
    """The kernels that communicators ask for, forward and backward, as far as the hidden size allows them.

    Plans with few rows have forms of their own. Both are here, so the number of tokens of ``plan`` does not matter.

    - Dispatches in every layout: BF16, FP16, FP32 and FP8 rows, and BF16 rows that become FP8 on their way, with
      either kind of scale; in layout expert by every strategy, in layout slots with scales of every order.
    - Combines of one dtype all the way: per rank in every layout, per route, and dense; in layouts expert and slots
      without weights, and with those that came with the tokens or are at home.
    - Combines that bring the weights' gradients home, and the meeting of all ranks.

    Halves of calls are not among them, nor is what only MegaMoE, GEMMs and calls between nodes ask for.
    """
    dtypes = [dtype for dtype in DTYPES if plan.hidden * dtype.itemsize % COPIED_BYTES == 0]
    if not dtypes:
        raise InvalidArgument(
            f"hidden is {plan.hidden}, expected rows of a multiple of {COPIED_BYTES} bytes, which kernels copy; "
            "pass a multiple of 8"
        )
    found: list[Variant] = [*_dispatches(plan, dtypes), BarrierVariant(plan)]
    for dtype in dtypes:
        for weighted in (False, True):
            found.append(PreReduceVariant(plan=plan, y_dtype=dtype, wire_dtype=dtype, weighted=weighted))
        found.append(_combine(plan, "token", dtype, dense=True))
    width = weight_gradient_values(plan)
    found += [_combine(plan, layout, torch.float32, hidden=width) for layout in ("token", "rank")]
    for tokens in (1, EAGER_ROWS // plan.num_ranks + 1):
        found += _combines(replace(plan, max_tokens_per_rank=tokens), dtypes)
    specs = [variant.spec() for variant in found]
    return list(dict.fromkeys(specs))  # the same kernel moves BF16 and FP16 rows


def _payloads(plan: Plan, dtypes: Sequence[torch.dtype]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of dispatches: those without scales, and those with."""
    fp8: list[dict[str, Any]] = []
    if plan.hidden % FP8_BLOCK == 0:
        fp8 = [{"x_dtype": torch.float8_e4m3fn}]
        fp8 += [{"x_dtype": torch.bfloat16, "quantize": how} for how in ("any scale", "power of two")]
    return [{"x_dtype": dtype} for dtype in dtypes], fp8


def _dispatches(plan: Plan, dtypes: Sequence[torch.dtype]) -> list[Variant]:
    """Those that send rows straight to their places, and those that are staged."""
    plain, fp8 = _payloads(plan, dtypes)
    payloads, packed = [*plain, *fp8], [payload for payload in fp8 if payload.get("quantize") != "any scale"]
    kinds: list[dict[str, Any]] = [{"layout": layout, **payload} for layout in LAYOUTS for payload in payloads]
    for scale_layout, found in {"rows": payloads, "columns": fp8, "packed": packed}.items():
        to_slots = [{"layout": "slots", "scale_layout": scale_layout, **payload} for payload in found]
        kinds += [{"staged": staged, **kind} for staged in (False, True) for kind in to_slots]
    kinds += [{"layout": "expert", "staged": True, **payload} for payload in payloads]
    for strategy, found in {"all_to_all": payloads, "all_gather": plain}.items():
        kinds += [{"layout": "expert", "strategy": strategy, **payload} for payload in found]
    return [DispatchVariant(plan=plan, **kind) for kind in kinds]


def _combines(plan: Plan, dtypes: Sequence[torch.dtype]) -> list[Variant]:
    """Those of tokens' rows, which a plan with few rows has in another form."""
    eager, found = sends_before_opening(plan), list[Variant]()
    for dtype in dtypes:
        found += [_combine(plan, layout, dtype, eager=eager) for layout in LAYOUTS]
        of_routes = product(("per_rank", "per_route"), ("none", "received", "home"))
        found += [_combine(plan, "expert", dtype, eager=eager, mode=mode, weights=how) for mode, how in of_routes]
    return found


def _combine(plan: Plan, layout: str, dtype: torch.dtype, **options: Any) -> CombineVariant:
    """A combine of one dtype all the way."""
    return CombineVariant(plan=plan, layout=layout, y_dtype=dtype, wire_dtype=dtype, out_dtype=dtype, **options)


def build(console: Console, specs: Sequence[KernelSpec]) -> Built:
    """Compile what is not on disk yet, on as many cores as there are."""
    began = time.monotonic()
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn())
    missing = [spec for spec in specs if cache.stored(spec) is None]
    pool = ThreadPoolExecutor(os.cpu_count())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(specs), completed=len(specs) - len(missing))
        try:
            for compiled in [pool.submit(cache.get, spec) for spec in missing]:
                progress.update(task, description=compiled.result().name)
                progress.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)
    not_kept = sum(cache.stored(spec) is None for spec in missing)
    return Built(len(missing), len(specs) - len(missing), not_kept, time.monotonic() - began)


def size_line(entries: Sequence[cache.Entry]) -> str:
    """Number of kernels, their total size, and where they are."""
    total = sum(len(entry.cubin) for entry in entries) / KIB
    return f"{counted(len(entries), 'kernel')}, {total:.0f} KiB, in {env.cache_folder()}"


def _table(*columns: str) -> Table:
    table = Table("kernel", *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns[1:-1]:
        column.justify = "right"
    return table


def _has_gpu() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a driver that torch cannot use
        if not torch.cuda.is_available():
            return False
    torch.cuda.synchronize()  # makes the context that kernels are loaded into
    return True


def _occupancy(entry: cache.Entry) -> str:
    try:
        return str(blocks_per_sm(entry))
    except RuntimeError:  # a GPU that these kernels are not for, or no driver bindings
        return "-"
