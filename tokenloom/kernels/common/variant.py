"""What every form of a kernel can say of itself."""

from __future__ import annotations

from typing import Protocol

from tokenloom.jit.compiler import KernelSpec


class Variant(Protocol):
    """A frozen dataclass that describes one compiled form of a kernel: hashable, and printed as one line."""

    def __hash__(self) -> int: ...

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it."""
        ...
