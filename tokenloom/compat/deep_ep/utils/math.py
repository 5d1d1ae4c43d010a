"""``deep_ep.utils.math``: small arithmetic of upstream's tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from tokenloom.ops.quant import dequantize_fp8, quantize_fp8
from tokenloom.plan import FP8_BLOCK, align_up

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def ceil_div(x: int, y: int) -> int:
    """Divide x by y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Round x up to a multiple of y."""
    return align_up(x, y)


def safe_div(x: float, y: float) -> float:
    """Divide x by y; 0 if y is 0."""
    return x / y if y else 0.0


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Compute 1 - 2 Σab / Σ(a² + b²) in float64, with a = x + 1 and b = y + 1: 0 for equal tensors."""
    a, b = x.double() + 1, y.double() + 1
    total = float((a * a + b * b).sum())
    return 1 - 2 * float((a * b).sum()) / total if total else 0.0


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [N, H] to float8_e4m3fn with float32 scales [N, H / 128]; H a multiple of 128."""
    return quantize_fp8(x.contiguous())


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """Convert FP8 [.., H] with scales [.., H / 128], or packed int32 exponents [.., H / 512], to bfloat16."""
    scales = x_scales
    if x_scales.dtype == torch.int32:
        words = x_scales.contiguous().unsqueeze(-1)
        shifts = torch.arange(4, device=words.device, dtype=torch.int32) * 8
        exponents = (words >> shifts & 0xFF).flatten(-2)[..., : x_fp8.shape[-1] // FP8_BLOCK]
        scales = (exponents << 23).view(torch.float32)  # the exponent's bits
    return dequantize_fp8(x_fp8.contiguous(), scales.contiguous()).to(torch.bfloat16)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Replace each row of int ids [N, K], in [-1, num_slots), by its distinct ids, most frequent first, then -1."""
    counts = torch.zeros(len(x), num_slots + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(1, torch.where(x >= 0, x, num_slots).long(), torch.ones_like(x, dtype=torch.int64))
    frequent = counts[:, :num_slots].sort(dim=1, descending=True, stable=True)
    width = min(x.shape[1], num_slots)
    x.fill_(-1)
    x[:, :width] = torch.where(frequent.values > 0, frequent.indices, -1)[:, :width].to(x.dtype)


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Set scores [N, E] to 0 outside of the groups of experts that ``group_idx`` [N, G] names."""
    chosen = torch.zeros(len(scores), num_groups, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx.long(), True)
    return (scores.unflatten(1, (num_groups, -1)) * chosen[:, :, None]).flatten(1)


def hash_tensor(t: torch.Tensor) -> int:
    """Hash the bytes of a tensor."""
    data = t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def hash_tensors(*tensors: torch.Tensor) -> int:
    """Hash the bytes of all tensors."""
    hashed = 0
    for tensor in tensors:
        hashed ^= hash_tensor(tensor)
    return hashed


def count_bytes(*tensors: object) -> int:
    """Count the bytes of tensors, also of those in tuples and lists; None counts as nothing."""
    total = 0
    for each in tensors:
        if isinstance(each, torch.Tensor):
            total += each.nbytes
        elif isinstance(each, Iterable) and not isinstance(each, str):
            total += count_bytes(*each)
    return total
