"""``deep_gemm.testing``: how tests of the layer compare and measure."""

from __future__ import annotations

import torch

from tokenloom.compat.deep_ep.utils.testing import bench_kineto

__all__ = ["bench_kineto", "calc_diff", "get_arch_major"]


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """``1 - 2 * sum(x * y) / sum(x^2 + y^2)`` in float64: 0 for equal tensors, NaN if one of them has NaN."""
    x, y = x.double(), y.double()
    size = (x * x + y * y).sum()
    return 1.0 - float(2 * (x * y).sum() / size) if size != 0 else 0.0


def get_arch_major() -> int:
    """Major number of the current GPU's compute capability, 9 for Hopper; 0 without a GPU."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
