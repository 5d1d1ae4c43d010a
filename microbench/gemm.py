"""Measure the grouped FP8 GEMMs, cuBLAS, and DeepGEMM where it can be imported, in turns on one Hopper GPU.

    python microbench/gemm.py [--json FILE]

Both recipes; rows behind offsets, or the same rows in slots, which have twice the places that they need. cuBLAS is
torch._scaled_mm: with block scales, and with row scales and fast accumulation. It takes one expert's rows at a time,
as many as it takes to make the same sums. Times are of a graph of ten calls: burst is its first replay behind IDLE_S
without load; steady are the replays of RUN_S, which are queued behind those of WARM_S. Clock and power are medians of
what nvidia-smi says during steady ones. All take turns, in both orders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenloom.ops.gemm import grouped_gemm_fp8, grouped_swiglu_fp8

CALLS = 10
"""In a graph."""
IDLE_S, WARM_S, RUN_S = 0.1, 0.6, 0.8
"""Behind a kernel that draws less power, one at the power limit is up to 16% faster for tens of milliseconds
(microbench/notebook/gemm.md)."""
SHAPES = ((32, 65536, 4096, 7168), (32, 65536, 7168, 2048), (32, 512, 4096, 7168), (32, 512, 7168, 2048))
"""Experts, rows, N, K."""
DENSE_ROWS = 16_384
"""Of a GEMM of cuBLAS."""
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


@dataclass
class Turn:
    """Times of a call, with what the GPU did in the steady one."""

    burst_us: float
    steady_us: float
    mhz: float
    watts: float


def watch_gpu(until: threading.Event, seen: list[tuple[float, float]]) -> None:
    """Note clock and power of the SMs."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    while not until.is_set():
        mhz, watts = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
        seen.append((float(mhz), float(watts)))


def replay_us(graph: torch.cuda.CUDAGraph, number: int) -> float:
    """Microseconds of a call, over so many replays that are queued behind each other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(number):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / number / CALLS


def one_turn(graph: torch.cuda.CUDAGraph) -> Turn:
    torch.cuda.synchronize()
    time.sleep(IDLE_S)
    burst_us = replay_us(graph, 1)
    one_s = burst_us * CALLS / 1e6
    until, seen = threading.Event(), list[tuple[float, float]]()
    for _ in range(int(WARM_S / one_s) + 1):
        graph.replay()
    watching = threading.Thread(target=watch_gpu, args=(until, seen))
    watching.start()
    us = replay_us(graph, int(RUN_S / one_s) + 1)
    until.set()
    watching.join()
    return Turn(burst_us, us, *(statistics.median(each) for each in zip(*seen, strict=True)))


def cublas(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> dict[str, Any]:
    """One dense GEMM for each DENSE_ROWS rows, each with the weights of another expert."""
    pieces = [slice(begin, begin + DENSE_ROWS) for begin in range(0, len(a), DENSE_ROWS)]
    of_blocks = [a_scales[rows].t().contiguous().t() for rows in pieces]
    of_rows = [torch.ones(len(a[rows]), 1, device="cuda") for rows in pieces]
    of_channels = torch.ones(1, b.shape[1], device="cuda")

    def by_blocks() -> None:
        for expert, rows in enumerate(pieces):
            scales = of_blocks[expert], b_scales[expert].t()
            torch._scaled_mm(a[rows], b[expert].t(), *scales, out_dtype=torch.bfloat16)

    def by_rows() -> None:
        for expert, rows in enumerate(pieces):
            scales = of_rows[expert], of_channels
            torch._scaled_mm(a[rows], b[expert].t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    return {"cuBLAS, dense": by_blocks, "cuBLAS, dense, row scales": by_rows}


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
        row_scales, channel_scales = torch.rand(rows, device="cuda"), torch.rand(experts, n, device="cuda")
        offsets = torch.arange(experts + 1, dtype=torch.int32, device="cuda") * (rows // experts)
        of_rows: dict[str, Any] = {"a_scales": row_scales, "expert_offsets": offsets, "recipe": "row"}
        calls["grouped, even, row scales"] = partial(grouped_gemm_fp8, a, b=b, b_scales=channel_scales, **of_rows)
        calls["grouped swiglu, even, row scales"] = partial(
            grouped_swiglu_fp8, a, w1=b, w1_scales=channel_scales, **of_rows
        )
        calls |= cublas(a, a_scales, b, b_scales)
        if rows // experts % 128 == 0:
            calls |= deep_gemm(a, a_scales, b, b_scales)
        graphs = {name: captured(call) for name, call in calls.items()}
        runs: dict[str, list[Turn]] = {name: [] for name in calls}
        for turn in ([*graphs], [*graphs][::-1]):
            for name in turn:
                runs[name].append(one_turn(graphs[name]))
        medians = {name: statistics.median(each.steady_us for each in turns) for name, turns in runs.items()}
        for name, us in medians.items():
            burst_us = statistics.median(each.burst_us for each in runs[name])
            of_offsets = medians[name.removesuffix(", slots")] / us if name.endswith(", slots") else None
            row = {
                "name": f"gemm/{name}/e{experts}/r{rows}/n{n}/k{k}",
                "steady_us": us,
                "burst_us": burst_us,
                "turns": [asdict(each) for each in runs[name]],
                "tflops": 2 * rows * n * k / us / 1e6,
                "burst_tflops": 2 * rows * n * k / burst_us / 1e6,
                "weights_gbytes_per_s": experts * n * k / us / 1e3 if "grouped" in name else None,
                "speed_of_offsets": of_offsets,
            }
            found.append(row)
            gbytes = f"{row['weights_gbytes_per_s']:8.0f} GB/s of weights" if "grouped" in name else ""
            speed = f", {of_offsets:.3f} of the speed behind offsets" if of_offsets else ""
            burst = f"burst {burst_us:9.1f} us {row['burst_tflops']:8.0f} TFLOP/s"
            steady = f"steady {us:9.1f} us {row['tflops']:8.0f} TFLOP/s {runs[name][-1].mhz:6.0f} MHz"
            print(f"{row['name']:60} {burst}, {steady} {gbytes}{speed}")
    if arguments.json:
        seconds = {"idle_s": IDLE_S, "warm_s": WARM_S, "run_s": RUN_S}
        setup = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "calls": CALLS, **seconds}
        arguments.json.write_text(json.dumps({"setup": setup, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
