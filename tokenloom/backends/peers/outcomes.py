"""Outcomes of calls: read by the host at once where it must, or a few calls later, the same number on every rank.

The last block out of a kernel writes a number to pinned memory, behind what was wrong with the call. So the host
learns of the end of a kernel by one comparison, and asks the driver nothing.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from tokenloom.errors import CapacityOverflow, CommunicatorBroken, PeerError, PlanMismatch
from tokenloom.runtime.kernel_reports import CallOutcome, CallRecords, FaultFlag, HostCounts
from tokenloom.runtime.openings import CallKind, means_growth, raise_difference, text_of
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.streams import on_stream
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

CALLS_IN_FLIGHT = 3
"""Calls whose outcome the host has not read. More lets it run further ahead; errors then come later."""
CAPTURED_SLOT = 2 * (CALLS_IN_FLIGHT + 2)
"""Where captured calls write what is wrong. Eager kernels take turns in the slots before it: two of each call in
flight, and those of one that is received late."""
FAULT, FOLLOWS_A_FAULT = 1, 2
"""Status of a rank that cannot make the call, and of one that opens it only because the others do, after its fault in
the one before. They take the second for part of the fault that they know of."""
LOOK_EVERY_S = 0.5
"""How often a host that waits looks whether a rank's process has ended, or the GPU has failed."""
SPIN_S, POLL_S = 0.002, 0.0001
"""How long the host polls without a pause, and its pauses after that."""
NOTE_S = 5.0
"""How long a rank waits for the options that another rank posts once both know that theirs differ."""


class InFlight(NamedTuple):
    """A kernel whose outcome the host has not read.

    Attributes:
        number: of its call. Two kernels, of halves, have the same.
        slot, sequence: where it writes what is wrong, and what it writes there last.
        stream: where it runs.
        kind, dispatch: what the call means to all ranks: what kind it is of, and the number of its dispatch.
        repeats: it sends the rows of an earlier dispatch. If they were too many, that call has said so.
        own_fault: this rank opened the call for a fault of its own, and the outcome is no news to it.
    """

    number: int
    slot: int
    sequence: int
    stream: torch.cuda.Stream
    kind: CallKind
    dispatch: int
    repeats: bool = False
    own_fault: bool = False


A_CAPTURED_CALL = CallKind({"call": "a captured call"})


class Outcomes:
    """Outcomes of one communicator's calls.

    Args:
        ranks: the group.
        control: a buffer that all ranks have.

    Attributes:
        fault: where kernels record a wait that expired.
        masked: ranks that take no part.
        known_losses: where late ranks are masked, the losses that calls know of; with more, calls end in vain. None:
            late ranks break the communicator.
        addresses: of the slots, for kernels.
        in_flight: kernels that were put on a stream, by the values of their :class:`InFlight`, in the order of calls.
    """

    def __init__(self, ranks: RankGroup, control: SymmetricBuffer) -> None:
        self.fault = FaultFlag(ranks.device, ranks.rank, ranks.topology)
        self.masked: frozenset[int] = frozenset()
        self.known_losses: int | None = None
        self._ranks, self._control = ranks, control
        self._records = CallRecords(ranks.device, CAPTURED_SLOT + 1)
        self.addresses = [self._records.address(slot) for slot in range(CAPTURED_SLOT + 1)]
        self.in_flight: deque[tuple[Any, ...]] = deque()
        self._heard: tuple[int, str] | None = None

    def expect_half(self, call: tuple[Any, ...]) -> None:
        """Remember the second half of a call, which others may have opened since."""
        self.in_flight.append(call)
        self.in_flight = deque(sorted(self.in_flight, key=itemgetter(0)))

    def begin_anew(self) -> None:
        """Forget calls in flight, and the wait that has expired. All kernels have ended."""
        self.in_flight.clear()
        self._heard = None
        self.fault.clear()
        for slot in range(CAPTURED_SLOT + 1):
            self._records.take(slot)

    def settle_before(self, end: int, own_fault: bool = False) -> None:
        """Wait for all calls below a number, and raise what they found, on all ranks alike.

        With ``own_fault`` nobody hears what the last of them found.
        """
        calls, is_well = self.in_flight, self._records.is_well
        while calls and calls[0][0] < end:
            call = calls.popleft()
            if not is_well(call[1], call[2]):
                self._conclude(InFlight(*call), own_fault and call[0] == end - 1)
        if self.fault.is_set():  # last: a call whose wait has expired is over, and may seem well
            self.raise_timeout()

    def _conclude(self, call: InFlight, own_fault: bool) -> None:
        """Wait for a call, and raise what it has found, if that is any news."""
        self.raise_timeout()
        is_over = partial(self._records.is_over, call.slot, call.sequence)
        if not is_over():
            self.wait_for(is_over, call.stream)
        self.raise_timeout()
        if call.own_fault or own_fault:
            self._records.take(call.slot)
        else:
            self._raise_outcome(call)

    def await_counts(self, counts: HostCounts) -> list[int] | None:
        """Results of the last call while it still runs; None if it has found something wrong, which settle raises."""
        call = InFlight(*self.in_flight[-1])
        looked = time.monotonic()

        def look() -> None:
            nonlocal looked
            if time.monotonic() - looked > LOOK_EVERY_S:
                self._look_around(call.stream)
                looked = time.monotonic()
            self.raise_timeout()
            if self._records.is_over(call.slot, call.sequence):
                self.raise_timeout()
                if not counts.are_there():
                    raise RuntimeError("a dispatch has ended without leaving its counts; this is a bug of tokenloom")

        with self._ranks.telling():
            found = counts.wait(look)
        return found if self._records.is_clear(call.slot) else None

    def raise_captured(self) -> None:
        """Raise what captured calls have found since the last time."""
        stream = torch.cuda.current_stream(self._ranks.device)
        self._raise_outcome(InFlight(-1, CAPTURED_SLOT, 0, stream, A_CAPTURED_CALL, -1))

    def wait_for(self, is_over: Callable[[], bool], stream: torch.cuda.Stream, patience_s: float = 0.0) -> None:
        """Wait on the host for the work of a stream. Ranks that will never come are noticed; kernels would wait until
        their deadline.

        Args:
            patience_s: from when on the host looks for them.
        """
        began = time.monotonic()
        looked = began + patience_s
        with self._ranks.telling():
            while not is_over():
                now = time.monotonic()
                if now - looked > LOOK_EVERY_S:
                    self._look_around(stream)
                    looked = now
                time.sleep(0 if now - began < SPIN_S else POLL_S)

    def _look_around(self, stream: torch.cuda.Stream) -> None:
        """Raise if the GPU has failed, whose kernels say nothing more. Let this rank's kernels give up where another
        rank's process has ended, or has given up itself.
        """
        with on_stream(stream):
            if not torch.cuda.is_current_stream_capturing():  # by now; a query would end the capture
                stream.query()
        ended = [rank for rank in self._control.ended_ranks() if rank not in self.masked]
        if ended:
            self.fault.give_up(ended, "its process has ended")
            return
        failed = self._ranks.notes.who_failed()
        if failed is not None:
            self.fault.give_up([failed[0]], failed[1])
            return
        if self.known_losses is not None:
            self._look_for_losses(self.known_losses)
            return
        said = self._ranks.notes.who_gave_up()
        if said is not None and said == self._heard:
            self.fault.give_up([said[0]], said[1])
        self._heard = said  # acted upon at the next look: kernels that wait for the same rank can name it by then

    def _look_for_losses(self, known: int) -> None:
        """Let this rank's kernels give up where ranks are lost, be it this one."""
        try:
            self._ranks.look()
        except CommunicatorBroken:
            self.fault.give_up([], "the others have masked this rank")
            raise
        if self._ranks.num_losses > known:
            self.fault.give_up([], "the others go on without a rank")

    def raise_timeout(self) -> None:
        """Raise if a wait of this rank has expired."""
        if self.fault.is_set():
            timeout = self.fault.error()
            assert timeout is not None
            if self.known_losses is None:
                self._ranks.require_none_failed()
                self._ranks.mark_broken(timeout)
            try:
                raise timeout
            finally:
                del timeout  # else it holds this frame, and so what its callers have lent

    def _raise_outcome(self, call: InFlight) -> None:
        outcome = self._records.take(call.slot)
        if outcome is None or outcome.status == FOLLOWS_A_FAULT:
            return
        if outcome.faulty_rank is not None:
            note = self._ranks.notes.read(f"fault/{call.number}", outcome.faulty_rank) or "see its own error"
            if means_growth(note):
                self.raise_final_fault(call.number)
            raise PeerError(outcome.faulty_rank, note)
        if outcome.differing_rank is not None:
            self._raise_difference(call, outcome)
        if not call.repeats:
            sent = call.kind.fields_of(call.dispatch).get("sizes") != "exact"
            raise CapacityOverflow(outcome.needed_rows, outcome.capacity, sent=sent)

    def raise_final_fault(self, number: int) -> None:
        """Raise PeerError for the lowest rank whose fault ends a call for good, if there is one.

        Args:
            number: of the call, which must be over: ranks post their faults before they open it.
        """
        for rank in range(self._ranks.num_ranks):
            note = None if rank in self.masked else self._ranks.notes.read(f"fault/{number}", rank)
            if note is not None and not means_growth(note):
                raise PeerError(rank, note)

    def _raise_difference(self, call: InFlight, outcome: CallOutcome) -> None:
        """All ranks know that their options differ: each posts its own, and reads those of the lowest rank that takes
        part, and of the other. Between nodes the two may mean the same; then it reads those of all ranks.
        """
        name = f"options/{call.number}"
        self._ranks.notes.post(name, json.dumps(text_of(call.kind.fields_of(call.dispatch))))
        deadline = time.monotonic() + NOTE_S
        assert outcome.differing_rank is not None
        base = next(rank for rank in count() if rank not in self.masked)

        def said_by(rank: int) -> dict[str, str]:
            note = self._ranks.notes.read(name, rank)
            while note is None and time.monotonic() < deadline:
                time.sleep(0.01)
                note = self._ranks.notes.read(name, rank)
            return {"call": "unknown"} if note is None else json.loads(note)

        texts = [said_by(base), said_by(outcome.differing_rank)]
        if texts[0] == texts[1] and self._ranks.topology.num_nodes > 1:
            texts_of_all = [said_by(rank) for rank in range(self._ranks.num_ranks)]
            if any(text != texts[0] for text in texts_of_all):
                raise_difference(texts_of_all)
        if texts[0] == texts[1]:  # nobody has posted, or the calls were captured and their options are not kept
            raise PlanMismatch(outcome.differing_rank, "options of this call", "others", "its own", base)
        raise_difference([*[None] * base, *[texts[0]] * (outcome.differing_rank - base), texts[1]])
