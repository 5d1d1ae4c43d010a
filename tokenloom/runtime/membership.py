"""Which ranks of a group take part, and how those that are there agree about it by notes in the store.

Ranks are masked in two ways. Users mask them (:meth:`Membership.ask`): all living ranks ask for the same, and compare
what they asked for. Or ranks that wait for one that does not come lose it (:meth:`Membership.lose`): losses
are numbered, the first to write a number decides it, and everybody adopts all of them in order.

A rank that is lost in the middle of a gather may have reached some ranks and not others. So a rank that adopts
a loss begins by saying which rows of lost ranks it holds from the last gather that it completed. It has none of a
later gather. Nobody is more than one gather ahead. Ranks that still wait in that gather read there what the others
hold, and all see the same rows.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from tokenloom.errors import InvalidArgument, PlanMismatch
from tokenloom.runtime.store_notes import StoreNotes, poll

ROLL_CALL_S = 2.0
"""How long ranks have to answer a roll call: a few of the looks that each rank takes while it waits."""


class AwaitedNotes:
    """A note that each of several ranks leaves; it can be waited for like transfers.

    Attributes:
        pending: ranks that have not left theirs.
        broken: always empty.
        by_rank: what the others left.

    Args:
        notes: of the group.
        name: name of the note.
        ranks: who leaves one.
        check: looks at each note as soon as it is there, with its rank, and may raise.
    """

    def __init__(
        self, notes: StoreNotes, name: str, ranks: Iterable[int], check: Callable[[int, Any], None] | None = None
    ) -> None:
        self.pending = set(ranks)
        self.by_rank: dict[int, Any] = {}
        self.broken: dict[int, str] = {}
        self._notes, self._name, self._check = notes, name, check

    def wait(self, seconds: float) -> bool:
        """Wait until all have left theirs: whether they have."""
        return poll(self._are_there, seconds)

    def _are_there(self) -> bool:
        for rank in sorted(self.pending):
            value = self._notes.hear(self._name, rank)
            if value is not None:
                if self._check is not None:
                    self._check(rank, value)
                self.by_rank[rank] = value
                self.pending.discard(rank)
        return not self.pending

    def give_up(self, ranks: Collection[int]) -> None:
        """Wait no longer for these ranks."""
        self.pending.difference_update(ranks)


class Membership:
    """The ranks of one group that take part.

    Args:
        notes: of the group.

    Attributes:
        masked: ranks that are left out.
        lost: those of them that did not come, or were awaited in vain after users had masked them.
        why: why each of those was lost.
        progress: a number that a rank says whenever it adopts a loss, such as how many of its calls have ended.
    """

    def __init__(self, notes: StoreNotes) -> None:
        self.masked: frozenset[int] = frozenset()
        self.lost: frozenset[int] = frozenset()
        self.why: dict[int, str] = {}
        self.progress = 0
        self._notes = notes
        self._changes = self._losses = self._answered = 0
        self._unsettled: list[AwaitedNotes] = []
        # The last gather that this rank has completed: its step, and the bytes of each rank's row.
        self._gathered_step, self._gathered_rows = -1, dict[int, torch.Tensor]()

    @property
    def others(self) -> list[int]:
        """The other ranks that take part."""
        return [rank for rank in range(self._notes.num_ranks) if rank not in {*self.masked, self._notes.rank}]

    # -- masks that users ask for ---------------------------------------------------------------------------

    def ask(self, request: str, ranks: Collection[object]) -> AwaitedNotes:
        """Ask for a change of who is masked. It takes effect by :meth:`apply`.

        Args:
            request: "mask_ranks" or "unmask_ranks".
            ranks: whom to mask, or to take back.

        Returns:
            What the other ranks ask for that will be there. Waiting for it raises PlanMismatch if that is something
            else.

        Raises:
            InvalidArgument: a rank that is none, or this rank. The others, who have been told, raise PlanMismatch.
        """
        self._say_change(request, ranks)
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self._notes.num_ranks:
                expected = f"expected ranks 0..{self._notes.num_ranks - 1}"
                raise InvalidArgument(f"{request} got rank {rank!r}, {expected}")
        if request == "mask_ranks" and self._notes.rank in ranks:
            raise InvalidArgument(f"rank {self._notes.rank} cannot mask itself; close its communicator instead")

        def compare(rank: int, change: Any) -> None:
            if change[1:] != [request, _listed(ranks)]:
                raise _differs(request, rank, change, self._notes.rank, _listed(ranks))

        leaving = ranks if request == "mask_ranks" else ()
        staying = [rank for rank in self.others if rank not in leaving]
        if not staying:  # a rank that goes on alone waits for nobody, but may hear that others are not gone
            AwaitedNotes(self._notes, self.name_of_change, self.others, compare).wait(0)
        return AwaitedNotes(self._notes, self.name_of_change, staying, compare)

    def _say_change(self, request: str, ranks: Collection[object]) -> None:
        self._changes += 1
        self._notes.say(self.name_of_change, [self._notes.step, request, _listed(ranks)])

    @property
    def name_of_change(self) -> str:
        """Name of the latest change, the same on all ranks."""
        return f"change/{self._changes}"

    def apply(self, masked: frozenset[int]) -> None:
        """Leave out these ranks, and no others, from now on."""
        self.lost &= masked
        self.masked = masked
        self.why = {rank: self.why.get(rank, "mask_ranks") for rank in sorted(masked)}
        self._notes.gone = masked

    def begin_anew(self, masked: frozenset[int]) -> None:
        """The same among new notes, where nothing has been decided."""
        self.apply(masked)
        self._changes = self._losses = self._answered = self.progress = 0
        self._unsettled = []

    def require_same_mask(self, step: int) -> None:
        """Raise if another rank asks for a mask where this one has started a collective.

        Raises:
            PlanMismatch: it does, so the ranks are out of step.
        """
        for rank in self.others:
            change = self._notes.hear(f"change/{self._changes + 1}", rank)
            if change is not None and change[0] <= step:
                self._say_change("", [])  # so that the others hear of it where they wait
                raise _differs(change[1] or "mask_ranks", rank, change, self._notes.rank, "nothing")

    # -- ranks that do not come -----------------------------------------------------------------------------

    def look(self) -> None:
        """Adopt what others decided, and answer a roll call."""
        while (loss := self._notes.hear(f"loss/{self._losses + 1}")) is not None:
            self._adopt(frozenset(loss[0]), loss[1])
        called = self._notes.hear("roll call") or 0
        if called > self._answered:
            self._answered = called
            self._notes.say("here", called)

    def lose(self, ranks: Collection[int], why: str) -> bool:
        """Mask ranks that do not come, unless another rank was quicker to mask some. False if the store is gone."""
        loss = self._notes.decide(f"loss/{self._losses + 1}", [sorted(ranks), why])
        self.look()
        return loss is not None

    def roll_call(self, ranks: Collection[int]) -> set[int]:
        """Those of some ranks that wait for others themselves."""
        # A number of its own: one that others could overwrite with a lower one would never be answered.
        number = self._notes.count("roll call")
        present: set[int] = set()

        def all_answered() -> bool:
            self.look()  # others may call as well
            present.update(rank for rank in ranks if number and (self._notes.hear("here", rank) or 0) >= number)
            return present == set(ranks) or number is None

        poll(all_answered, ROLL_CALL_S)
        return present

    def _adopt(self, ranks: frozenset[int], why: str) -> None:
        self._losses += 1
        self.lost |= ranks
        rows = {rank: row for rank, row in self._gathered_rows.items() if rank in self.lost}
        texts = {rank: base64.b64encode(row.numpy().tobytes()).decode() for rank, row in rows.items()}
        self._notes.say(f"holds/{self._losses}", [self._gathered_step, texts, self.progress])
        self.why |= dict.fromkeys(ranks, why)
        self.masked |= ranks
        self._notes.gone = self.masked
        self._unsettled.append(AwaitedNotes(self._notes, f"holds/{self._losses}", self.others))

    @property
    def num_losses(self) -> int:
        """Losses that this rank has adopted. Ranks adopt the same ones, in the same order."""
        return self._losses

    def best_progress(self) -> int:
        """The largest number that a rank has said of its progress, once nothing is unsettled."""
        others = [progress for holdings in self._unsettled for _, _, progress in holdings.by_rank.values()]
        return max([self.progress, *others])

    # -- gathers --------------------------------------------------------------------------------------------

    def unsettled(self) -> AwaitedNotes | None:
        """Notes to await before a gather may be completed without the rows of lost ranks; None if there are none."""
        for holdings in self._unsettled:
            holdings.give_up(self.masked)
            if not holdings.wait(0):
                return holdings
        return None

    def complete(self, step: int, rows: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Complete a gather, once nothing is unsettled.

        Args:
            step: number of the collective.
            rows: bytes of each row that came.

        Returns:
            Bytes of each rank's row, those of lost ranks included that others hold.
        """
        rows = {rank: row for rank, row in rows.items() if rank not in self.lost}
        for holdings in self._unsettled:
            for holder, (held_step, texts, _) in holdings.by_rank.items():
                if held_step == step and holder not in self.lost:  # not all may have heard what a lost one said
                    held_rows = {int(rank): bytearray(base64.b64decode(text)) for rank, text in texts.items()}
                    rows |= {rank: torch.frombuffer(row, dtype=torch.uint8) for rank, row in held_rows.items()}
        self._unsettled.clear()
        self._gathered_step, self._gathered_rows = step, rows
        return rows


def _differs(request: str, rank: int, change: list[Any], me: int, mine: str) -> PlanMismatch:
    theirs = change[2] if change[1] == request else "nothing"
    return PlanMismatch(rank, request, theirs, mine, base=me)


def _listed(ranks: Iterable[object]) -> str:
    return f"[{', '.join(sorted(set(map(str, ranks))))}]"
