"""Choices of one registered implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenloom.backends.registry import LAYER_SMS
from tokenloom.comm.placement import Placement
from tokenloom.errors import InvalidArgument, a_type

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
    num_sms: int = LAYER_SMS
    transport: str = "auto"
    ranks_per_node: int | None = None
    placement: Placement | None = None
    spare_slots: int = 0

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
        if isinstance(self.spare_slots, bool) or not isinstance(self.spare_slots, int) or self.spare_slots < 0:
            raise InvalidArgument(f"spare_slots is {self.spare_slots!r}, expected an integer of at least 0")
        if self.placement is not None and not isinstance(self.placement, Placement):
            raise InvalidArgument(f"placement is {a_type(self.placement)}, expected a tokenloom.Placement, or None")
        if self.placed and self.experts == "model":
            raise InvalidArgument(
                "experts is 'model' with a placement, which tokenloom's experts alone go by; pass another value, or "
                "leave the placement out"
            )

    @property
    def fused(self) -> bool:
        """Whether experts run in ``MegaMoE``."""
        return self.experts in ("fp8", "four_bits")

    @property
    def placed(self) -> bool:
        """Whether experts lie by a placement."""
        return self.placement is not None or self.spare_slots > 0

    def of_communicators(self) -> dict[str, Any]:
        """Give the arguments of every Communicator. ``MegaMoE`` takes them too, but for its backend and SMs."""
        return {
            "backend": self.backend,
            "timeout_s": self.timeout_s,
            "open_timeout_s": self.open_timeout_s,
            "num_sms": self.num_sms,
            "transport": self.transport,
            "ranks_per_node": self.ranks_per_node,
            "placement": self.placement,
            "spare_slots": self.spare_slots,
        }
