"""What a rank hands to torch.distributed, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.runtime import rank_group


@dataclass
class Wire:
    """Bytes that this rank hands over, call by call.

    Attributes:
        all_to_all: what all_to_all_single sends, its own part included.
        others: what all other collectives take.
    """

    all_to_all: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)


@contextmanager
def count_wire() -> Iterator[Wire]:
    """Counts every collective of the block."""
    counted = Wire()
    names = [name for name in dir(dist) if name.startswith(("all_", "broadcast", "gather", "reduce", "send", "isend"))]
    patched = [(dist, name, getattr(dist, name)) for name in names if callable(getattr(dist, name))]
    patched.append((rank_group, "gather_all", rank_group.gather_all))

    def counting(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "all_to_all_single":
                counted.all_to_all.append(args[1].numel() * args[1].element_size())
            else:  # input or output, whichever is smaller, is this rank's part
                counted.others.append(min(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor)))
            return real(*args, **kwargs)

        return call

    for module, name, real in patched:
        setattr(module, name, counting(name, real))
    try:
        yield counted
    finally:
        for module, name, real in patched:
            setattr(module, name, real)
