"""Random operands of grouped FP8 GEMMs, and what comes of them in float64."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import NUM_GPUS
from tokenloom.ops import quant

FP8, FP32, INT32 = torch.float8_e4m3fn, torch.float32, torch.int32
E4M3_NAN = 0x7F
needs_hopper = pytest.mark.skipif(NUM_GPUS == 0, reason="no NVIDIA GPU on this machine")
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def quantise_weights(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one scale per 128 x 128 block."""
    experts, n, k = b.shape
    blocks = b.reshape(experts, n // 128, 128, k // 128, 128)
    scales = blocks.abs().amax((2, 4)) / 448
    q = (blocks / scales[:, :, None, :, None]).to(FP8)
    return q.reshape(experts, n, k).contiguous(), scales.contiguous()


def operands(
    counts: list[int], n: int, k: int, device: str = "cuda", first: int = 0, after: int = 0, recipe: str = "block"
) -> Operands:
    """a, its scales, b, its scales and offsets, with ``first`` rows before those of the first expert and ``after``
    behind the last."""
    torch.manual_seed(sum(counts) + n + k)
    rows = first + sum(counts) + after
    offsets = torch.tensor([first, *counts]).cumsum(0).to(INT32)
    # Scales that differ from row to row and block to block show where each is applied.
    if recipe == "row":
        a = torch.randn(rows, k) * torch.rand(rows, 1).mul(8).exp()
        b = torch.randn(len(counts), n, k) * torch.rand(len(counts), n, 1).mul(8).exp()
        by_row = (*quant.quantize_fp8(a, recipe="row"), *quant.quantize_fp8(b, recipe="row"), offsets)
        return tuple(tensor.to(device) for tensor in by_row)  # type: ignore[return-value]
    a = torch.randn(rows, k) * torch.rand(rows, k // 128).mul(4).exp().repeat_interleave(128, 1)
    b = torch.randn(len(counts), n, k)
    b *= torch.rand(len(counts), n // 128, k // 128).mul(4).exp().repeat_interleave(128, 1).repeat_interleave(128, 2)
    tensors = (*quant.quantize_fp8(a), *quantise_weights(b), offsets)
    return tuple(tensor.to(device) for tensor in tensors)  # type: ignore[return-value]


def share_off(recipe: str, k: int) -> float:
    """How far a sum of ``k`` products may be off, as a share of its row's largest.

    Tensor cores that add up all of K cut each term 13 bits below the largest. For random rows that is off by 2e-5 of a
    sum's standard deviation for each root of K, and by twelve times that at most (microbench/fp8_sums.py).
    """
    return 1.2e-4 * k**0.5 if recipe == "row" and k > 128 else 1e-3


def in_slots(rows: torch.Tensor, counts: list[int], capacity: int) -> torch.Tensor:
    """Rows that follow each other, [R, ...], at their places [E, capacity, ...]. The other places are NaN."""
    slots = rows.new_empty(len(counts), capacity, *rows.shape[1:])
    slots.view(torch.uint8).fill_(E4M3_NAN) if rows.dtype == FP8 else slots.fill_(torch.nan)
    for expert, own in enumerate(rows.split(counts)):
        slots[expert, : len(own)] = own
    return slots


def expected(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, e: int) -> torch.Tensor:
    """Rows of one expert in float64."""
    if a_scales.dim() == 1:
        return (a.double() * a_scales.double()[:, None]) @ (b[e].double() * b_scales[e].double()[:, None]).T
    x = a.double() * a_scales.double().repeat_interleave(128, 1)
    weights = b[e].double() * b_scales[e].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return x @ weights.T


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str, share: float = 1e-3) -> None:
    """Compare each row by itself: an error of one row must not drown in the others.

    BF16 rounds to 2^-9; FP8 products and float32 sums are far more exact.

    Args:
        share: of a row's largest value, how far each value may be off besides.
    """
    limit = 2**-8 * want.abs() + share * want.abs().amax(1, keepdim=True) if len(want) else want
    assert ((got.double() - want).abs() <= limit).all(), what


def on_devices(names: list[str], on_cpu: list[str]) -> list[object]:
    """Parameters (device, name): all names on a GPU, and a few on a CPU, which has no tiles."""
    gpu = [pytest.param("cuda", name, marks=[pytest.mark.gpu, needs_hopper], id=f"cuda-{name}") for name in names]
    return [*gpu, *(pytest.param("cpu", name, id=f"cpu-{name}") for name in on_cpu)]
