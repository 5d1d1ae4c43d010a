"""Choices made by measurement.

``profile`` and ``Profile`` load on first use, because the layers that they measure import other modules of this room.
"""

from importlib import import_module
from typing import Any

__all__ = ["Profile", "profile"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tokenloom.tune' has no attribute {name!r}")
    return getattr(import_module("tokenloom.tune.profiler"), name)
