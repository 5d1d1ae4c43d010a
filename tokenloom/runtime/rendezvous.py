"""Rendezvous at construction: all ranks pass the same values, or all of them raise, naming rank and field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tokenloom.errors import PeerError, PlanMismatch
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.telling import Telling

Extra = TypeVar("Extra")


def agree(ranks: RankGroup, prepare: Callable[[], tuple[dict[str, Any], Extra]], phase: str) -> list[Extra]:
    """Run ``prepare`` on every rank, compare what must be equal, and share the rest.

    Args:
        ranks: the group. The ranks of one node agree with those of all others.
        prepare: returns (values by name that must be equal on all ranks, anything else to share); it may raise.
        phase: what is going on, for error messages.

    Returns:
        the second value of every rank of the group, by rank; for masked ranks, that of the lowest one that is not.

    Raises:
        what ``prepare`` raised here, marked ``known_to_all``; PeerError: it raised elsewhere; PlanMismatch: the
        values differ.
    """
    with agreeing(ranks, phase):
        values, extra = prepare()
    values = {"call": phase, **values}  # ranks that agree on different things could find nothing to compare
    by_rank = ranks.whole.all_gather_object((None, values, extra), phase)
    present = {rank: report for rank, report in enumerate(by_rank) if report is not None}
    for rank, (reason, _, _) in present.items():
        if reason is not None:
            raise PeerError(rank, reason)
    base = min(present)
    for rank, (_, values, _) in present.items():
        for name, value in present[base][1].items():
            if values.get(name) != value:
                raise PlanMismatch(rank, name, values.get(name), value, base)
    return [present.get(rank, present[base])[2] for rank in ranks.members]


def agreeing(ranks: RankGroup, phase: str) -> Telling:
    """Give a block before an agreement of all ranks. What fails there is told where the others agree.

    Args:
        ranks: the group. phase: as in :func:`agree`.
    """
    whole = ranks.whole

    def tell(fault: Exception) -> None:
        whole.all_gather_object((f"{type(fault).__name__}: {fault}", {}, None), phase)

    return Telling(tell, whole.abort)
