"""What every form of a kernel can say of itself."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from tokenloom.jit.compiler import KernelSpec


class Variant(Protocol):
    """A frozen dataclass that describes one compiled form of a kernel: hashable, and printed as one line."""

    def __hash__(self) -> int: ...

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it."""
        ...


@cache
def spec_of(variant: Variant) -> KernelSpec:
    """What to compile, found again: calls that make a ``Kernel`` of their own each time do not write it down anew."""
    return variant.spec()
