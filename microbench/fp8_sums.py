"""Measure how far FP8 sums of the tensor cores are off, with and without promotion, on one Hopper GPU.

    python microbench/fp8_sums.py [--json FILE]

Both operands are E4M3 codes with scales of 1, so the exact sum is known: float64 of the same codes. cuBLAS adds
them with use_fast_accum, which is one sum of the tensor core over all of K as in our recipe "row", and without,
which promotes. Its float32 results are compared, and ours rounded to bfloat16. Errors are in shares of the
standard deviation of exact sums: root mean square, and the largest. Kinds of rows:

    normal      random
    one sign    magnitudes of random values: sums grow, terms do not
    outlier 2^n one value of each row of x is 2^n times a usual one
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tokenloom.ops.gemm import grouped_gemm_fp8

DEPTHS = (128, 512, 2048, 7168, 14_336, 28_672)
OUTLIERS = (6, 8, 10, 12, 14)
ROWS, COLUMNS = 512, 1024
LARGEST = 448.0
FP8 = torch.float8_e4m3fn


def operands(kind: str, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [ROWS, depth] and w [COLUMNS, depth] in E4M3."""
    generator = torch.Generator("cuda").manual_seed(depth)
    x, w = (torch.randn(rows, depth, generator=generator, device="cuda") for rows in (ROWS, COLUMNS))
    if kind == "one sign":
        x, w = x.abs(), w.abs()
    if kind.startswith("outlier"):
        places = torch.randint(0, depth, (ROWS, 1), generator=generator, device="cuda")
        x.scatter_(1, places, 2.0 ** int(kind.partition("^")[2]))
    # As a scale of the row does it: the largest value becomes E4M3's largest.
    return tuple((each / each.abs().amax(1, keepdim=True) * LARGEST).to(FP8) for each in (x, w))  # type: ignore[return-value]


def sums(x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    one = torch.ones((), device="cuda")
    found = {
        f"cuBLAS, {name}": torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
        for name, fast in (("one sum", True), ("promotes", False))
    }
    offsets = torch.tensor([0, len(x)], dtype=torch.int32, device="cuda")
    by_row = [torch.ones(len(x), device="cuda"), torch.ones(1, len(w), device="cuda")]
    blocks = x.shape[1] // 128
    by_block = [torch.ones(len(x), blocks, device="cuda"), torch.ones(1, len(w) // 128, blocks, device="cuda")]
    for recipe, (of_x, of_w) in (("row", by_row), ("block", by_block)):
        found[f"ours, {recipe}, bfloat16"] = grouped_gemm_fp8(x, of_x, w[None], of_w, offsets, recipe=recipe).float()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for kind in ("normal", "one sign", *(f"outlier 2^{exponent}" for exponent in OUTLIERS)):
        for depth in DEPTHS:
            x, w = operands(kind, depth)
            exact = x.double() @ w.double().T
            deviation = (exact - exact.mean()).square().mean().sqrt()
            for name, got in sums(x, w).items():
                error = (got.double() - exact) / deviation
                row = {"rows": kind, "k": depth, "sums": name, "rms": float(error.square().mean().sqrt())}
                row |= {"largest": float(error.abs().max()), "mean": float(error.mean())}
                found.append(row)
                print(
                    f"{kind:14} K {depth:6} {name:22} rms {row['rms']:.2e}  largest {row['largest']:.2e}", flush=True
                )
    if arguments.json:
        setup = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "shape": [ROWS, COLUMNS]}
        arguments.json.write_text(json.dumps({"setup": setup, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
