"""Tests in which ranks are late on purpose, on machines where the others may be slow for a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tokenloom.runtime import membership, waiting
from tokenloom.runtime.membership import Membership
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.waiting import Watch

PATIENCE_S = 20.0
"""How long a rank of a test may take to come, where nobody is meant to be late."""


def done(ranks: RankGroup, what: str = "done") -> None:
    """Tell ranks that wait to come late that the others need them no more."""
    ranks.notes.say(what, True)


def when_done(ranks: RankGroup, others: Sequence[int], what: str = "done") -> None:
    """Wait until others say so."""
    assert membership.AwaitedNotes(ranks.notes, what, others).wait(2 * PATIENCE_S)


@contextmanager
def only_late(late: Collection[int]) -> Iterator[None]:
    """In this block a rank whose deadline passes waits for all but the late ranks, until they say that they wait too.

    The product gives ranks a second or two for that. A busy machine may keep a process from running for longer, and a
    rank that is meant to be in time would be missed. Late ranks are not asked, since they would not answer.
    """

    def asked(owner: Any, name: str) -> Any:
        real: Callable[..., Any] = getattr(owner, name)

        def ask(self: Any, ranks: Collection[int], *rest: Any) -> Any:
            return real(self, set(ranks).difference(late), *rest)

        return mock.patch.object(owner, name, ask)

    with ExitStack() as stack:
        for module in (membership, waiting):
            stack.enter_context(mock.patch.object(module, "ROLL_CALL_S", PATIENCE_S))
        stack.enter_context(asked(Membership, "roll_call"))
        stack.enter_context(asked(Watch, "_signed_in"))
        yield


def with_late(context: RankContext, late: int, check: Callable[..., None], *args: Any) -> None:
    """``check(context, *args)``, where nobody but this rank is late. Negative numbers count from the last rank on."""
    with only_late([late % context.num_ranks]):
        check(context, *args)
