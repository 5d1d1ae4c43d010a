"""Choices of one registered implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenloom.backends.registry import MAX_SMS
from tokenloom.errors import InvalidArgument

EXPERTS = ("auto", "model")


@dataclass(frozen=True)
class Options:
    """Choices that time and memory depend on. ``register`` explains them."""

    experts: str = "auto"
    max_tokens_per_rank: int = 1
    backend: str = "auto"
    timeout_s: float = 30.0
    open_timeout_s: float | None = None
    num_sms: int = MAX_SMS
    overlap: bool = True
    redispatch_in_backward: bool = False

    def __post_init__(self) -> None:
        if self.experts not in EXPERTS:
            raise InvalidArgument(f"experts is {self.experts!r}, expected {' or '.join(map(repr, EXPERTS))}")
        if isinstance(self.max_tokens_per_rank, bool) or not isinstance(self.max_tokens_per_rank, int):
            raise InvalidArgument(f"max_tokens_per_rank is {self.max_tokens_per_rank!r}, expected a positive integer")
        if self.max_tokens_per_rank < 1:
            raise InvalidArgument(f"max_tokens_per_rank is {self.max_tokens_per_rank}, expected a positive integer")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Check names and values.

        Raises:
            InvalidArgument: an option is unknown, or has a value that is never right.
        """
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise InvalidArgument(f"{name} is no option, expected {', '.join(known)}")
        return cls(**given)

    def of_communicators(self) -> dict[str, Any]:
        """Give the arguments of every Communicator."""
        return {
            "backend": self.backend,
            "timeout_s": self.timeout_s,
            "open_timeout_s": self.open_timeout_s,
            "num_sms": self.num_sms,
        }
