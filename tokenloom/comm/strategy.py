"""How payloads travel: which primitive carries a dispatch, and which a combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenloom.errors import InvalidArgument
from tokenloom.plan import COMBINE_STRATEGIES, DISPATCH_STRATEGIES

SWAPPED = {"dedup": "dedup", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "dedup"}
"""What carries the gradient: that of a dispatch is a combine, and the other way round. A gradient is the same for all
routes of a token to a rank, so where a payload takes a row a route, its gradient takes one a rank."""


@dataclass(frozen=True)
class Strategy:
    """The primitives of a layer. Results of a dispatch do not depend on it; docs/concepts.md has the sums.

    Attributes:
        dispatch: "dedup": a row for each (token, rank). "all_gather": every rank gets all tokens, and takes those it
            needs. "all_to_all": a row for each route (layout "expert").
        combine: "dedup": the routes' sum for each (token, rank). "reduce_scatter": the same sums in a dense [W, M, H].
            "all_to_all": a row for each route, summed at home in ascending k (layout "expert").

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

    @property
    def mode(self) -> Literal["per_rank", "per_route"]:
        """Of Communicator.combine."""
        return "per_route" if self.combine == "all_to_all" else "per_rank"
