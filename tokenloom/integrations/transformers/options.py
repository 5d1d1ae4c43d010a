"""Choices of one registered implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenloom.backends.registry import MAX_SMS
from tokenloom.errors import InvalidArgument

EXPERTS = ("auto", "model", "fp8", "four_bits")


@dataclass(frozen=True)
class ExpertsOptions:
    """Choices that time and memory depend on. ``register`` explains them."""

    experts: str = "auto"
    max_tokens_per_rank: int | None = None
    pool_rows: int | None = None
    overlap: bool = True
    redispatch_in_backward: bool = False
    backend: str = "auto"
    timeout_s: float = 30.0
    open_timeout_s: float | None = None
    num_sms: int = MAX_SMS
    transport: str = "auto"
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.experts not in EXPERTS:
            raise InvalidArgument(f"experts is {self.experts!r}, expected one of {', '.join(EXPERTS)}")
        for name in ("max_tokens_per_rank", "pool_rows", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"{name} is {value!r}, expected a positive integer, or None")
        if self.pool_rows is not None and self.max_tokens_per_rank is None:
            raise InvalidArgument("pool_rows is given without max_tokens_per_rank; ranks then wait for no counts")
        if self.fused and self.max_tokens_per_rank is None:
            raise InvalidArgument(f"experts is {self.experts!r} without max_tokens_per_rank; fused layers do not grow")

    @property
    def fused(self) -> bool:
        """Whether experts run in ``MegaMoE``."""
        return self.experts in ("fp8", "four_bits")

    def of_communicators(self) -> dict[str, Any]:
        """Give the arguments of every Communicator."""
        return {
            "backend": self.backend,
            "timeout_s": self.timeout_s,
            "open_timeout_s": self.open_timeout_s,
            "num_sms": self.num_sms,
            "transport": self.transport,
            "ranks_per_node": self.ranks_per_node,
        }
