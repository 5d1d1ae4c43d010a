"""Measure the grouped FP8 GEMMs, cuBLAS, and DeepGEMM where it can be imported, in turns on one Hopper GPU.

    python microbench/gemm.py [--json FILE]

Rows lie behind offsets, or the same rows in slots, which have twice the places that they need. cuBLAS is
torch._scaled_mm with the same block scales, as one dense GEMM of the same total size. Times are events around replays
of a graph of ten calls, as medians over rounds in which all take turns. A turn begins with replays that do not count,
until the GPU has the clock that this kernel's power allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenloom.ops.gemm import grouped_gemm_fp8, grouped_swiglu_fp8

ROUNDS, SAMPLES, CALLS = 3, 5, 10
"""SAMPLES: of each round. CALLS: in a graph."""
WARM_S = 0.4
"""Of replays that do not count, in each turn. Behind a kernel that draws less power, one at the power limit is up to
16% faster for tens of milliseconds (microbench/notebook/gemm.md)."""
SHAPES = ((32, 65536, 4096, 7168), (32, 65536, 7168, 2048), (32, 512, 4096, 7168), (32, 512, 7168, 2048))
"""Experts, rows, N, K."""
ROOM = 2
"""Places in slots for each row of the fullest expert."""


def uneven(experts: int, rows: int) -> list[int]:
    """Zipf's law: the i-th expert gets a share of 1 / i."""
    shares = torch.arange(1, experts + 1).double().reciprocal()
    counts = (shares / shares.sum() * rows).long()
    counts[0] += rows - counts.sum()
    return counts[torch.randperm(experts, generator=torch.Generator().manual_seed(0))].tolist()


def random_fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def in_slots(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Each expert's rows at its places, [E, S, ...]; other rows behind them, as in a buffer that calls have used."""
    starts = torch.tensor([0, *counts[:-1]], device="cuda").cumsum(0)
    index = (starts[:, None] + torch.arange(ROOM * max(counts), device="cuda")) % len(rows)
    return rows.view(torch.uint8)[index].view(rows.dtype)


def our_calls(
    rows: str,
    counts: list[int],
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
) -> dict[str, Callable[[], Any]]:
    """Both GEMMs, of rows behind offsets and in slots."""
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    of_rows: dict[str, Any] = {"a": a, "a_scales": a_scales, "expert_offsets": offsets}
    slots, slot_scales = in_slots(a, counts), in_slots(a_scales, counts)
    expert_counts = torch.tensor(counts, dtype=torch.int32, device="cuda")
    of_slots: dict[str, Any] = {"a": slots, "a_scales": slot_scales, "expert_counts": expert_counts}
    found: dict[str, Callable[[], Any]] = {}
    for where, given in ((rows, of_rows), (f"{rows}, slots", of_slots)):
        found[f"grouped, {where}"] = partial(grouped_gemm_fp8, b=b, b_scales=b_scales, **given)
        found[f"grouped swiglu, {where}"] = partial(grouped_swiglu_fp8, w1=b, w1_scales=b_scales, **given)
    return found


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def us_of(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def warm_up(graph: torch.cuda.CUDAGraph) -> None:
    began = time.monotonic()
    while time.monotonic() - began < WARM_S:
        us_of(graph)


def deep_gemm(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> dict[str, Any]:
    """Its grouped GEMM with equally many rows for each expert, a multiple of 128. Empty where it is missing."""
    try:
        import deep_gemm as rival
    except ImportError:
        return {}
    experts, (rows, k) = len(b), a.shape
    scales = rival.transform_sf_into_required_layout(a_scales, rows, k, (1, 128, 128), is_sfa=True)
    expert_of_row = torch.arange(experts, dtype=torch.int32, device="cuda").repeat_interleave(rows // experts)
    out = torch.empty(rows, b.shape[1], dtype=torch.bfloat16, device="cuda")
    call = rival.m_grouped_fp8_gemm_nt_contiguous
    return {"DeepGEMM, even": partial(call, (a, scales), (b, b_scales), out, expert_of_row)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for experts, rows, n, k in SHAPES:
        a, b = random_fp8(rows, k), torch.cat([random_fp8(1, n, k) for _ in range(experts)])
        a_scales = torch.rand(rows, k // 128, device="cuda")
        b_scales = torch.rand(experts, n // 128, k // 128, device="cuda")

        calls: dict[str, Callable[[], Any]] = {}
        for name, counts in (("even", [rows // experts] * experts), ("uneven", uneven(experts, rows))):
            calls |= our_calls(name, counts, a, a_scales, b, b_scales)
        calls["cuBLAS, dense"] = partial(
            torch._scaled_mm,
            a,
            b[0].t(),
            a_scales.t().contiguous().t(),
            b_scales[0].t(),
            out_dtype=torch.bfloat16,
        )
        if rows // experts % 128 == 0:
            calls |= deep_gemm(a, a_scales, b, b_scales)
        graphs = {name: captured(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                warm_up(graph)
                times[name] += [us_of(graph) for _ in range(SAMPLES)]
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        for name, us in medians.items():
            of_offsets = medians[name.removesuffix(", slots")] / us if name.endswith(", slots") else None
            row = {
                "name": f"gemm/{name}/e{experts}/r{rows}/n{n}/k{k}",
                "p50_us": us,
                "tflops": 2 * rows * n * k / us / 1e6,
                "weights_gbytes_per_s": experts * n * k / us / 1e3 if "grouped" in name else None,
                "speed_of_offsets": of_offsets,
            }
            found.append(row)
            gbytes = f"{row['weights_gbytes_per_s']:8.0f} GB/s of weights" if "grouped" in name else ""
            speed = f", {of_offsets:.3f} of the speed behind offsets" if of_offsets else ""
            print(f"{row['name']:60} {us:9.1f} us {row['tflops']:8.0f} TFLOP/s {gbytes}{speed}")
    if arguments.json:
        turns = {"rounds": ROUNDS, "samples": SAMPLES, "calls": CALLS, "warm_s": WARM_S}
        setup = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **turns}
        arguments.json.write_text(json.dumps({"setup": setup, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
