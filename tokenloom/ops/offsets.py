"""Rows grouped by expert, by their offsets."""

from __future__ import annotations

import torch


def experts_of_rows(offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Find the expert of each row, on the device of the offsets.

    Args:
        offsets: int32 [L + 1], ascending.
        num_rows: R.

    Returns:
        int64 [R]. Rows beyond the last offset have the last expert.
    """
    rows = torch.arange(num_rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], rows, right=True).clamp_max(len(offsets) - 2)
