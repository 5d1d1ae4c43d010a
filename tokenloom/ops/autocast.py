"""The dtype that torch's autocast wants of operations that torch does not know."""

from __future__ import annotations

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast wants of operations on the device, or None where autocast is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
