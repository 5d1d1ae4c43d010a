"""How payloads travel: which primitive carries a dispatch, and which a combine."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.backends.base import Capabilities
from tokenloom.errors import InvalidArgument
from tokenloom.plan import COMBINE_STRATEGIES, DISPATCH_STRATEGIES

SWAPPED = {
    "dedup": "dedup",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "dedup",
    "per_node": "dedup",
}
"""What carries the gradient. The gradient of a dispatch is a combine, and the other way round.

All routes of a token to one rank have the same gradient, so where a payload takes a row per route, its gradient takes
one per rank."""
STRATEGY_OF_MODE = {"per_rank": "dedup", "per_route": "all_to_all", "per_node": "per_node"}
"""What carries a combine of each ``mode``. A layer may also carry the sums of "per_rank" by "reduce_scatter"."""


def default_mode(able: Capabilities) -> str:
    """The order of a combine's sums where the caller names none: that of one node, else per node."""
    return "per_rank" if "dedup" in able.combine_strategies else "per_node"


def gradient_of_dispatch(able: Capabilities, strategy: str) -> str:
    """What carries the gradient of a dispatch by this strategy, where nobody has said how rows come home."""
    swapped = SWAPPED[strategy]
    return swapped if swapped in able.combine_strategies else STRATEGY_OF_MODE[default_mode(able)]


@dataclass(frozen=True)
class Strategy:
    """The primitives that carry a layer's payloads. Only the order of combine's sum depends on them.

    Attributes:
        dispatch: "dedup" sends one row for each (token, rank). "all_gather" sends every rank all tokens, of which it
            takes those it needs. "all_to_all" sends one row for each route (layout "expert").
        combine: "dedup" sends the sum over a token's routes on a rank. "reduce_scatter" sends the same sums in a dense
            [W, M, H]. "all_to_all" sends one row for each route, summed at home in ascending k (layout "expert").
            "per_node" sums the ranks' sums of a node there, and sends one row for each (token, node). Gradients of
            a dispatch come home so too.

    Raises:
        InvalidArgument: another name.
    """

    dispatch: str = "dedup"
    combine: str = "dedup"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dispatch", self.dispatch, DISPATCH_STRATEGIES),
            ("combine", self.combine, COMBINE_STRATEGIES),
        ):
            if value not in known:
                raise InvalidArgument(f"strategy of {name} is {value!r}, expected one of {', '.join(known)}")

    @classmethod
    def usual(cls, able: Capabilities) -> Strategy:
        """Give the strategy of a layer that is told none: "dedup" both ways, else sums per node."""
        return cls(combine=STRATEGY_OF_MODE[default_mode(able)])

    @property
    def gradient_of_dispatch(self) -> str:
        """What carries the gradient of a dispatch, a combine: it sums per node where combines do."""
        return "per_node" if self.combine == "per_node" else SWAPPED[self.dispatch]
