"""Choices made by measurement.

All names load on first use, because the layers that ``profile`` measures import other modules of this room.
"""

from importlib import import_module
from typing import Any

_MODULES = {"MeasuredRates": "rates", "Profile": "profiler", "measure_rates": "rates", "profile": "profiler"}

__all__ = ["MeasuredRates", "Profile", "measure_rates", "profile"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tokenloom.tune' has no attribute {name!r}")
    return getattr(import_module(f"tokenloom.tune.{_MODULES[name]}"), name)
