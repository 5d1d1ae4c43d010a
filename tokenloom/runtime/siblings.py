"""The communicators of one process group on this rank.

Those whose collectives are the group's share the order of these, whichever of them starts one. So what opens a call
tells ranks that have begun different things (openings.py). Others have connections of their own (links.py), on which
nothing comes from a rank that calls another communicator. So a rank that waits long says where, in the key-value store
of the group. Two ranks that wait for each other in different places will never meet. A rank that sees it writes it
down, numbered, and the first to write a number decides it. All ranks raise it once, wherever they wait or call next,
and count their collectives alike again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from tokenloom.errors import CommunicatorBroken, PeerError, PeerTimeout, PlanMismatch
from tokenloom.runtime import openings
from tokenloom.runtime.collectives import UNNUMBERED, Collective, count_gathers, gather_all, gather_sequence
from tokenloom.runtime.store_notes import StoreNotes
from tokenloom.runtime.turns import Turn

STEPS_APART = 1 << 10
"""More collectives than a rank can begin in a call that others have not."""
THE_GROUP = "the process group"
"""Where ranks meet in collectives of the group; on links they meet where their notes are."""


class Siblings:
    """The communicators of one group, by their notes.

    Attributes:
        groups: the :class:`RankGroup <tokenloom.runtime.rank_group.RankGroup>` of each.
        turn: lets one thread at a time make calls, since collectives of a group have one order.
        collectives: how many of the group these have started: as many on all ranks that have not parted.
        join: starts one that says why this rank will not start the one that another waits in.
    """

    def __init__(self) -> None:
        self.groups: WeakSet[Any] = WeakSet()
        self.turn = Turn()
        self.collectives = 0
        self.join: Callable[[PlanMismatch], None] | None = None
        self._notes: WeakSet[StoreNotes] = WeakSet()
        self._apart: str | None = None
        self._first: StoreNotes | None = None
        self._partings: int | None = None

    def part(self, notes: StoreNotes, ended: PeerError | PeerTimeout) -> None:
        """Say that the ranks have come to different collectives of the group, which will never match again.

        Args:
            notes: of the communicator that was called. One that goes by pairs uses none of these.
            ended: how a rank has left a call in which others may have gone on.
        """
        if notes.by_pairs:
            return
        if isinstance(ended, PeerTimeout):
            why = f"rank {ended.rank} has waited in vain in {ended.phase}"
        else:
            why = f"rank {ended.rank} failed in the middle of a call: {ended.reason}"
        self._apart = self._apart or why
        notes.decide_at(self._key_of_apart(notes), why)

    def why_apart(self, notes: StoreNotes) -> str | None:
        """Why they have, if any of them has said so."""
        self._apart = self._apart or notes.hear_at(self._key_of_apart(notes))
        return self._apart

    def _key_of_apart(self, notes: StoreNotes) -> str:
        """Key of what the first rank says that has come to another collective than the rest.

        torch may make a process group with the name, and so with the keys, of one that has ended. Numbers of
        communicators go on, so that of the group's first one tells which it is.
        """
        return f"tokenloom/apart/{(self._first or notes).number}"

    def require_together(self) -> None:
        """Raise CommunicatorBroken if they have: gloo would end a process that gets what another collective sends."""
        if self._apart:
            raise CommunicatorBroken(f"{self._apart}; make a new process group, and a communicator on it")

    def add(self, notes: StoreNotes) -> None:
        """Add a communicator. One that has left its notes counts no longer."""
        self._notes.add(notes)
        self._first = self._first or notes
        self.why_apart(notes)  # the other ranks may know already: they would not come to its first collective

    @property
    def all(self) -> list[StoreNotes]:
        """Those that calls use."""
        return [notes for notes in self._notes if not notes.has_left]

    @property
    def latest(self) -> int:
        """The largest number of a collective that any has started."""
        return max((notes.step for notes in self.all), default=0)

    def skip_to(self, step: int) -> None:
        """Let all of them count on from a step that no rank has come to in any; see :meth:`StoreNotes.skip_to`."""
        for notes in self.all:
            notes.skip_to(step)

    # -- ranks that wait for each other in different places -------------------------------------------------

    def places(self) -> dict[str, int]:
        """The step that this rank has begun in each place where ranks meet."""
        return {THE_GROUP: self.collectives} | {each.name: each.step for each in self.all if each.by_pairs}

    @contextmanager
    def waiting(self, notes: StoreNotes, call: str, step: int) -> Iterator[AnnouncedWait]:
        """In this block this rank waits for others to open a call of a communicator."""
        wait = AnnouncedWait(self, notes, call, step)
        try:
            yield wait
        finally:
            wait.end()

    def begin_partings(self, notes: StoreNotes, anew: bool = False) -> None:
        """Leave out what was written down before this rank had a communicator that may meet others elsewhere.

        Args:
            anew: the rank comes back.
        """
        if self._partings is None or anew:
            self._partings = 0
            while notes.hear_at(_parting(self._partings + 1)) is not None:
                self._partings += 1

    def raise_parting(self, notes: StoreNotes) -> None:
        """Raise PlanMismatch if ranks have waited for each other in different places, once on each rank."""
        if self._partings is None:
            return
        parting = notes.hear_at(_parting(self._partings + 1))
        if parting is None:
            return
        self._partings += 1
        mismatch = PlanMismatch(*parting["mismatch"])
        while self.join is not None and not notes.gone and self.collectives < parting["collectives"]:
            self.join(mismatch)
        self.skip_to(parting["step"])
        raise mismatch

    def write_parting(self, notes: StoreNotes, mismatch: Iterable[Any], places: Iterable[dict[str, int]]) -> None:
        """Write down that two ranks have parted, unless another rank has written something."""
        assert self._partings is not None
        known = list(places)
        step = max(max(each.values()) for each in known) + STEPS_APART
        collectives = max(each[THE_GROUP] for each in known)
        parting = {"mismatch": list(mismatch), "step": step, "collectives": collectives}
        notes.decide_at(_parting(self._partings + 1), parting)

    def watches(self, notes: StoreNotes) -> bool:
        """Whether ranks may wait for each other in different places, one of them in this communicator."""
        return self._partings is not None and notes in self._notes


class AnnouncedWait:
    """A wait of this rank, which it tells to those that look for it elsewhere; see :meth:`Siblings.waiting`."""

    def __init__(self, siblings: Siblings, notes: StoreNotes, call: str, step: int) -> None:
        self._siblings, self._notes, self._call = siblings, notes, call
        self._place = notes.name if notes.by_pairs else THE_GROUP
        self._number = step if notes.by_pairs else siblings.collectives
        self._said: list[int] | None = None

    def look(self, pending: Collection[int]) -> None:
        """Say where this rank waits, and look where those are that it waits for.

        Raises:
            PlanMismatch: one of them waits for this rank, elsewhere.
        """
        siblings, notes = self._siblings, self._notes
        if not siblings.watches(notes):
            return
        siblings.raise_parting(notes)
        ranks = sorted(pending)
        if self._said != ranks:
            self._said = ranks
            here = {"place": self._place, "number": self._number, "for": ranks, "call": self._call}
            notes.say_at(_waits(notes.rank), here | {"name": notes.name, "places": siblings.places()})
        mine = siblings.places()
        for rank in ranks:
            theirs = notes.hear_at(_waits(rank))
            if theirs is not None and self._have_parted(mine, theirs):
                names = f"{theirs['name']} ({theirs['call']})", f"{notes.name} ({self._call})"
                siblings.write_parting(notes, (rank, "communicator", *names, notes.rank), (mine, theirs["places"]))
                siblings.raise_parting(notes)

    def _have_parted(self, mine: dict[str, int], theirs: dict[str, Any]) -> bool:
        """Whether neither will ever begin what the other waits in: each does so behind what it waits in itself."""
        there = theirs["place"]
        return (
            there != self._place
            and mine.get(there, theirs["number"]) < theirs["number"]
            and self._notes.rank in theirs["for"]
            and theirs["places"].get(self._place, self._number) < self._number
        )

    def end(self) -> None:
        """This rank waits no longer."""
        if self._said is not None:
            self._notes.say_at(_waits(self._notes.rank), None)


_of_groups: WeakKeyDictionary[dist.ProcessGroup, Siblings] = WeakKeyDictionary()


def siblings_of(group: dist.ProcessGroup | None) -> Siblings:
    """The communicators of a process group on this rank; none yet for a rank alone."""
    return Siblings() if group is None else _of_groups.setdefault(group, Siblings())


def joining(
    group: dist.ProcessGroup, device: torch.device, num_ranks: int, number: int, numbered: bool
) -> Callable[[PlanMismatch], None]:
    """Give what starts an opening on a process group, for ranks that wait there, with a fault of this rank.

    Args:
        group: the process group, which this does not keep.
        device: of openings.
        num_ranks: ranks of the group.
        number: communicators of the group that this rank has made.
        numbered: openings have sequence numbers, see :func:`gather_sequence`.
    """
    alive = weakref.ref(group)

    def join(mismatch: PlanMismatch) -> None:
        process_group = alive()
        siblings = siblings_of(process_group)
        siblings.collectives += 1
        if process_group is None:
            return
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        fields = {"call": "none", "communicator": openings.UNNAMED}
        sequence = gather_sequence(process_group) if numbered else UNNUMBERED
        row = openings.encode(fields, mismatch, sequence, siblings.latest, number, nothing, 0, num_ranks)
        answers = row.new_empty(num_ranks * row.numel())

        def start() -> dist.Work:
            return gather_all(answers, row, group=process_group, async_op=True)

        if numbered:
            start()
            count_gathers(process_group)
        else:
            Collective(start, process_group)  # which is kept until it has ended

    return join


def _waits(rank: int) -> str:
    return f"tokenloom/waits/{rank}"


def _parting(number: int) -> str:
    return f"tokenloom/parting/{number}"
