"""Torch's defaults, as programs set them for tensors of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def caller_default(default: str | torch.dtype | None) -> Iterator[None]:
    """Inside, new tensors have this device or dtype where the code that makes them does not say. None changes nothing.

    "meta" stands for a GPU on machines without one: what lands there by mistake cannot be computed with.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_device(default if isinstance(default, str) else None)
    torch.set_default_dtype(default if isinstance(default, torch.dtype) else dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
