"""How a rank waits for others: with a deadline, and with an eye on their notes in the store."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tokenloom.errors import CommunicatorBroken, InvalidArgument, PeerError, PeerTimeout, PlanMismatch
from tokenloom.runtime.collectives import Collective
from tokenloom.runtime.membership import Membership
from tokenloom.runtime.siblings import AnnouncedWait, Siblings
from tokenloom.runtime.store_notes import StoreNotes, poll
from tokenloom.runtime.topology import Topology

LOOK_EVERY_S = 0.5
"""How often a rank that waits looks at the notes: a rank that has given up says so there, and will not answer. At each
look it signs in, so that others can tell who is missing."""
ROLL_CALL_S = 1.0
"""How long a rank that gives up waits for those to sign in that came at the last moment."""
STORE_IS_GONE = "the process that hosts the store of the process group is gone"
MAX_TIMEOUT_S = 1e9
"""31 years. In nanoseconds, and added to the time of day as GPUs count it, it still fits an int64."""


class Awaited(Protocol):
    """Something that other ranks contribute to.

    Attributes:
        pending: ranks that have not yet.
        broken: why what a rank should have contributed will not come.
    """

    @property
    def pending(self) -> set[int]: ...

    @property
    def broken(self) -> Mapping[int, str]: ...

    def wait(self, seconds: float) -> bool:
        """Wait until all of it is there: whether it is, and nothing is broken. May return early when something is."""

    def give_up(self, ranks: Collection[int]) -> None:
        """Wait no longer for these ranks."""


@dataclass
class _Wait:
    """One wait of a rank.

    Attributes:
        awaited: what for. phase: what is going on, for errors. step: number of the collective.
        limit_s: from each start of the wait to its deadline, in seconds.
        left_before: ranks that have left before this step do not come.
        announced: the same wait, for ranks that wait elsewhere; None where it opens no call.
        lost: ranks that this one knew to be lost when the wait began last.
        num_vain: deadlines that have passed while all ranks that are pending waited themselves.
    """

    awaited: Awaited
    phase: str
    step: int
    limit_s: float
    left_before: int
    announced: AnnouncedWait | None = None
    lost: frozenset[int] = frozenset()
    num_vain: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin, or begin again."""
        self.deadline = time.monotonic() + self.limit_s

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()


class Watch:
    """The waits of one rank, which end with what it waits for, or with an error.

    Args:
        notes: of the group.
        membership: who takes part.
        timeout_s: longest wait for a rank before it is masked, in seconds.
        siblings: the communicators of the group.

    Attributes:
        broken: why nothing more can be done with the group, if so.
        masks_late: mask ranks that do not come, and go on.
        topology: which ranks share a node, for errors.
        known_losses: waits end in vain once ranks have been lost more often than that. None: they go on.
    """

    def __init__(self, notes: StoreNotes, membership: Membership, timeout_s: float, siblings: Siblings) -> None:
        self.broken: str | None = None
        self.masks_late = False
        self.known_losses: int | None = None
        self.topology = Topology.together(notes.num_ranks)
        self._looked = time.monotonic()
        self.notes, self.membership, self._timeout_s, self._siblings = notes, membership, timeout_s, siblings

    def require_alive(self) -> None:
        """Raise CommunicatorBroken if the group is broken."""
        if self.broken:
            raise CommunicatorBroken(f"{self.broken}; make a new communicator")

    def begin(self) -> None:
        """Begin a collective. A rank that was away may have been masked, though what was sent to it before is there.

        Raises:
            CommunicatorBroken: this rank was masked, or the group is broken.
        """
        self.require_alive()
        if self.masks_late and time.monotonic() - self._looked > LOOK_EVERY_S:
            self.look()

    def wait(self, awaited: Awaited, phase: str, step: int, limit_s: float, opens: bool = False) -> None:
        """Wait for something.

        Args:
            awaited: what.
            phase: what is going on, for errors.
            step: number of the collective.
            limit_s: longest wait, where no rank is masked for being late.
            opens: it opens a call. Behind that all ranks are known to be in this one.

        Raises:
            PeerTimeout: ranks are missing, or were lost (see ``known_losses``). PeerError: a rank failed in the middle
                of the call. PlanMismatch: the ranks disagree about who is masked, or wait for each other in calls of
                different communicators. CommunicatorBroken: this rank was masked by the others.
        """
        self.require_alive()
        limit_s = self._timeout_s if self.masks_late else limit_s
        with self._siblings.waiting(self.notes, phase, step) if opens else nullcontext() as announced:
            self._await(_Wait(awaited, phase, step, limit_s, step, announced))
            if self.masks_late:
                self._looked = time.monotonic()

    def _await(self, wait: _Wait) -> None:
        """Wait. Now and then look at what others say: a rank that does not come breaks the group, or is masked."""
        if self.masks_late:
            self._leave_lost(wait)
        while not wait.awaited.wait(min(LOOK_EVERY_S, wait.left_s)):
            if self.masks_late:
                self._mask_late(wait)
            else:
                self._break_if_in_vain(wait)

    def decide(self, name: str, value: Any, phase: str) -> Any:
        """The value of the rank that comes first, for all of them.

        Raises:
            PeerTimeout: the store is gone.
        """
        decided = self.notes.decide(name, value)
        if decided is None:
            raise self.fail(phase, self.notes.step, [], STORE_IS_GONE)
        return decided

    def fail(self, phase: str, step: int, missing: Collection[int], cause: str) -> PeerTimeout:
        """Break the group, and tell the others; the error to raise."""
        self._give_up(step, sorted(missing))
        timeout = PeerTimeout(self.notes.rank, sorted(missing), phase, step, cause, self.topology.which(missing))
        self.broken = f"an earlier call failed: {timeout}"
        return timeout

    def fail_unanswered(self, phase: str) -> PeerTimeout:
        """Break the group after a collective that has ended without the answers of all ranks; the error to raise.

        Raises:
            PeerError: a rank failed in the middle of a call.
        """
        self.require_none_failed()
        step = self.notes.step
        self.notes.sign_in(step)
        self._give_up(step)
        missing = self._missing_ranks(self.membership.others, step)
        return self.fail(phase, step, missing, "NCCL ended the collective without the answers of all ranks")

    def _give_up(self, step: int, missing: Sequence[int] = ()) -> None:
        self.notes.give_up(f"rank {self.notes.rank} gave up in step {step}", missing)

    def _look_elsewhere(self, wait: _Wait) -> None:
        """Raise PlanMismatch if a rank that is awaited waits for this one in another communicator."""
        if wait.announced is None:
            return
        awaited = wait.awaited
        try:
            wait.announced.look(awaited.pending or self.membership.others)
        except PlanMismatch:
            if self.notes.by_pairs:
                awaited.give_up(awaited.pending)  # or the thread that waits in gloo for it would not go on to the next
            raise

    def _is_there_after_all(self, awaited: Awaited) -> bool:
        """Look once more, behind what tells that a rank has ended. What it left before came after the look before."""
        return not awaited.broken and awaited.wait(0)

    # -- a rank that does not come breaks the group ---------------------------------------------------------

    def _break_if_in_vain(self, wait: _Wait) -> None:
        """Break the group if what is awaited will not come, or is late.

        A collective fails on the ranks that talk to a dead one only, and a deadline passes where the wait began
        first. The others learn of it from the notes, so that none of them waits for an answer that cannot come.

        Raises:
            PeerTimeout: it will not. And what :meth:`wait` raises.
        """
        awaited, step = wait.awaited, wait.step
        self.notes.sign_in(step)
        if not awaited.broken:
            self._look_elsewhere(wait)
        cause = self._trouble(awaited, step)
        if cause is None and wait.left_s <= 0:
            cause = f"no answer within {wait.limit_s:g} s"
        if cause is not None and not self._is_there_after_all(awaited):
            self._give_up(step)  # before it asks who is there, since those that wait further on ask now too
            missing = [rank for rank in awaited.broken if rank >= 0]
            missing = missing or self._missing_ranks(awaited.pending or self.membership.others, step)
            raise self.fail(wait.phase, step, missing, cause)

    def _trouble(self, awaited: Awaited, step: int) -> str | None:
        """Why what is awaited will not come, if it is known.

        Raises:
            PeerError: a rank failed in the middle of a call. CommunicatorBroken: the process group has come apart.
        """
        self.require_none_failed()  # first: a process that is interrupted says so, and may end then
        if awaited.broken:
            return f"the connection broke ({next(iter(awaited.broken.values()))})"
        end = self.notes.who_gave_up()  # first: a rank that gave up because another left says so behind that
        # Not all that have left: a rank that these mask now may have closed its communicator before.
        missed = set(awaited.pending or self.membership.others) - self.membership.masked
        if missed.intersection(self.notes.who_left_before(step)):
            return "the communicator was closed there"
        self._require_same_mask(step)
        if end is None and isinstance(awaited, Collective) and self._siblings.why_apart(self.notes):
            self.require_none_failed()  # once more: a rank that failed says so before it says that the ranks are apart
            self._siblings.require_together()
        return end[1] if end else None

    def require_none_failed(self) -> None:
        """Raise PeerError if another rank has told that it failed in the middle of a call. That breaks the group."""
        failed = self.notes.who_failed()
        if failed:
            peer_error = PeerError(*failed, sent=True)
            self.broken = f"an earlier call failed: {peer_error}"
            raise peer_error

    def _missing_ranks(self, ranks: Collection[int], step: int) -> list[int]:
        """Which of some ranks have not come to wait in this step or a later one, nor in vain; nobody, if the store is
        gone.
        """
        present = self._signed_in(ranks, step)
        return [] if present is None else sorted(set(ranks) - present)

    def _signed_in(self, ranks: Collection[int], step: int) -> set[int] | None:
        """Those of some ranks that wait in this step or a later one, or soon will; None if the store is gone.

        A rank that gives up in an earlier step is there too, unless it is this one that it has missed: a lost rank
        may have reached this rank and not that one.
        """
        me, present, undecided = self.notes.rank, set[int](), set[int]()

        def reason_to_stop() -> str:
            for rank in set(ranks) - present:
                waits = self.notes.waits_in(step, rank)
                if waits is None:
                    return STORE_IS_GONE
                missing = self.notes.missed_by(rank)
                if waits or (missing and me not in missing):
                    present.add(rank)
                elif missing == []:  # it asks who is there
                    undecided.add(rank)
                else:
                    undecided.discard(rank)
            return "all are there" if present == set(ranks) else ""

        return None if poll(reason_to_stop, ROLL_CALL_S) == STORE_IS_GONE else present | undecided

    # -- a rank that does not come is masked ----------------------------------------------------------------

    def _mask_late(self, wait: _Wait) -> None:
        """Mask the ranks that are late: those that do not come within the deadline and do not wait themselves.

        So a rank that a late one holds up is not masked with it. The wait begins again whenever one is masked, or a
        deadline passes in vain.
        """
        awaited, members = wait.awaited, self.membership
        self.look(wait.step)
        self._look_elsewhere(wait)
        late, why = set(awaited.broken), "the connection to it broke"
        ended = self._who_ended(wait.left_before)
        if ended & awaited.pending and self._is_there_after_all(awaited):
            return
        late |= awaited.pending & ended
        if not late and wait.left_s <= 0:
            late, why = awaited.pending - members.roll_call(awaited.pending), f"no answer within {wait.limit_s:g} s"
            self.look(wait.step)
            wait.num_vain += 1
            wait.start()
        if members.lost == wait.lost:
            if late:
                self.lose(late, wait.phase, wait.step, why)
            elif wait.num_vain > self.notes.num_ranks:
                cause = f"no answer within {wait.num_vain} times {wait.limit_s:g} s"
                raise self.fail(wait.phase, wait.step, awaited.pending, cause)
        self._leave_lost(wait)

    def _leave_lost(self, wait: _Wait) -> None:
        """Wait no longer for ranks that were lost, and anew for the others.

        Raises:
            PeerTimeout: the wait is in vain after a loss, see ``known_losses``.
        """
        members, awaited = self.membership, wait.awaited
        if self.known_losses is not None and members.num_losses > self.known_losses:
            missing = sorted(awaited.pending)
            awaited.give_up({*awaited.pending, *awaited.broken})
            raise PeerTimeout(self.notes.rank, missing, wait.phase, wait.step, "the others go on without a rank")
        if members.lost != wait.lost:
            wait.lost = members.lost
            wait.start()
        awaited.give_up(wait.lost)

    def lose_absent(self, phase: str, ended: Collection[int]) -> None:
        """Settle who is late, after a wait that somebody else has ended. Maybe nobody: then all ranks learn of that.

        Args:
            phase: what this rank waited in.
            ended: ranks whose process has ended.
        """
        before = self.membership.num_losses
        self.look()
        late, why = set(ended) | self._who_ended(sys.maxsize), "its process has ended"
        late.intersection_update(self.membership.others)
        if not late and self.membership.num_losses == before:
            others = self.membership.others
            late = set(others) - self.membership.roll_call(others)
            why = f"no answer within {self._timeout_s:g} s"
            self.look()
        if self.membership.num_losses == before:
            self.lose(late, phase, self.notes.step, why)

    def lose(self, late: Collection[int], phase: str, step: int, why: str) -> None:
        """Mask ranks, unless another rank was quicker to mask some."""
        if not self.membership.lose(late, f"rank {self.notes.rank} waited in {phase}, step {step}: {why}"):
            raise self.fail(phase, step, late, f"{why}, and {STORE_IS_GONE}")
        self.look(step)

    def look(self, step: int | None = None) -> None:
        """Adopt which ranks others have masked.

        Args:
            step: collective that this rank waits in, if it does.

        Raises:
            CommunicatorBroken: this rank is one of them. PlanMismatch: others ask for a mask instead.
        """
        self._looked = time.monotonic()
        self.membership.look()
        me = self.notes.rank
        if me in self.membership.lost:
            self.broken = f"the other ranks have masked rank {me}: {self.membership.why[me]}"
            self.require_alive()
        if step is not None:
            self._require_same_mask(step)

    def _who_ended(self, step: int) -> set[int]:
        """Ranks that have failed, given up or closed their communicator, as they say themselves."""
        ends = self.notes.who_failed(), self.notes.who_gave_up()
        return {end[0] for end in ends if end is not None}.union(self.notes.who_left_before(step))

    def settle_rows(self, phase: str) -> None:
        """Wait until it is known which rows of ranks that were lost meanwhile count in this gather."""
        while (holdings := self.membership.unsettled()) is not None:
            # A rank that has left says nothing more, whatever it has started.
            self._await(_Wait(holdings, phase, self.notes.step, self._timeout_s, left_before=sys.maxsize))

    def _require_same_mask(self, step: int) -> None:
        try:
            self.membership.require_same_mask(step)
        except PlanMismatch as mismatch:
            self._give_up(step)
            self.broken = f"an earlier call failed: {mismatch}"
            raise


def checked_seconds(name: str, value: float) -> float:
    """The value of an option; NaN, infinity and what is not a number are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"{name} is {value!r}, expected seconds above 0, at most {MAX_TIMEOUT_S:g}")
    return value


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The process group's own timeout in seconds, or 0 where torch does not tell."""
    try:
        timeout = group._get_backend(device).options._timeout  # type: ignore[union-attr]
        return min(timeout.total_seconds(), MAX_TIMEOUT_S)
    except (AttributeError, RuntimeError):
        return 0.0
