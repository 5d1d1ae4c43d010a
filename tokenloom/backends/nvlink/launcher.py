"""The opening of every call: what all ranks are told, and what the host learns of it later.

A kernel opens by telling all ranks what it was asked for (device/transport/call.cuh), so that a fault on one rank is
known to all of them. The host reads that at once where it must, or a few calls later, the same number on every rank.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from tokenloom.backends.handshake import Fields, hash_of, raise_difference, text_of
from tokenloom.errors import CapacityOverflow, InvalidArgument, PeerError, PlanMismatch
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.common import Variant
from tokenloom.plan import Plan
from tokenloom.runtime.graph_references import GraphReferences
from tokenloom.runtime.kernel_reports import CallOutcome, CallRecords, FaultFlag, HostCounts
from tokenloom.runtime.leftovers import keep_until_idle, release_dropped, undo_later
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.streams import on_stream
from tokenloom.runtime.symmetric_memory import SymmetricBuffer, close_together

T = TypeVar("T")

CALLS_IN_FLIGHT = 3
"""Calls whose outcome the host has not read. More lets it run further ahead; errors then come later."""
FAULT, FOLLOWS_A_FAULT = 1, 2
"""Status of a rank that cannot make the call, and of one that opens it only because the others do, after its fault in
the one before. They take the second for part of the fault that they know of."""
HALVES: Fields = {"halves": True}
"""What all ranks must mean alike of calls that are two kernels, beside what they mean of others."""
LOOK_EVERY_S = 0.5
"""How often a host that waits looks whether a rank's process has ended."""
SPIN_S, POLL_S = 0.002, 0.0001
"""How long the host polls without a pause, and its pauses after that."""
NOTE_S = 5.0
"""How long a rank waits for the options that another rank posts once both know that theirs differ."""


@dataclass(frozen=True)
class Launched(Generic[T]):
    """A call whose kernel is on the stream, where it also receives."""

    result: T

    def receive(self) -> T:
        return self.result


class Half:
    """What the receiving half of a call needs of the sending one.

    Args:
        epoch: int32 [1] on the device, where the sending kernel leaves the call's epoch.
        fields: what all ranks must mean alike.

    Attributes:
        number: of the call. args: of the sending kernel.
    """

    def __init__(self, epoch: torch.Tensor, fields: Fields) -> None:
        self.epoch, self.fields = epoch, fields
        self.number = -1
        self.args: ctypes.Structure | None = None


@dataclass(frozen=True)
class _InFlight:
    """A kernel whose outcome the host has not read: number of its call, where it runs, and what errors want to say.

    With ``own_fault`` this rank opened the call for a fault of its own, and the outcome is no news to it.
    """

    number: int
    slot: int
    sequence: int
    stream: torch.cuda.Stream
    fields: Fields
    repeats: bool = False
    own_fault: bool = False


class Launcher:
    """Launches kernels that open a call, and raises what they found.

    Args:
        plan, ranks: sizes and group.
        control: the buffer with flags and headers.
        num_sms: SMs, one block each, that a kernel takes.

    Attributes:
        num_calls: launched so far, not counting captured ones. Each pairs with one of every other rank, whatever the
            ranks meant by it.
        keep_with_graphs: what the calls of a captured graph use besides this.
    """

    def __init__(self, plan: Plan, ranks: RankGroup, control: SymmetricBuffer, num_sms: int) -> None:
        self.plan, self.ranks, self.control, self.num_sms = plan, ranks, control, num_sms
        self.num_calls = 0
        self._num_launches = 0
        self._kernels: dict[Variant, Kernel] = {}
        # Epoch, blocks out, two kinds of claims.
        self._state = torch.zeros(4, dtype=torch.int32, device=ranks.device)
        self._opened = torch.zeros(1, dtype=torch.int32, device=ranks.device)
        keep_until_idle(self, ranks.device, self._state, self._opened)
        self._fault = FaultFlag(ranks.device, ranks.rank)
        self._captured_slot = 2 * (CALLS_IN_FLIGHT + 2)  # two kernels each, and those of one that is finished late
        self._records = CallRecords(ranks.device, self._captured_slot + 1)
        self._launched: deque[_InFlight] = deque()
        self._last: torch.cuda.Stream | None = None  # where the last eager call is
        self._last_captured: torch.cuda.Stream | None = None
        self._heard: tuple[int, str] | None = None
        self._graphs = GraphReferences()
        self._retired: list[SymmetricBuffer] = []
        self.keep_with_graphs: list[object] = []

    def kernel(self, variant: Variant) -> Kernel:
        """The kernel of a variant, with arguments of its own in which everything about the opening is filled in.

        Raises:
            InvalidArgument: a CUDA graph is captured, and this is the first use of the variant.
        """
        found = self._kernels.get(variant)
        if found is None:
            found = self._kernels[variant] = Kernel(variant.spec(), self.ranks.device.index)
            opening = found.args.call
            opening.peers = self.control.peers.data_ptr()
            opening.flags = self.control.layout.offset("flags")
            opening.headers = self.control.layout.offset("headers")
            opening.epoch = self._state.data_ptr()
            opening.blocks_out = self._state.data_ptr() + 4
            opening.claimed = self._state.data_ptr() + 8
            opening.fault = self._fault.record_address
            opening.fault_claimed = self._fault.claimed.data_ptr()
            opening.open_timeout_ns = int(self.ranks.open_timeout_s * 1e9)
            opening.timeout_ns = int(self.ranks.timeout_s * 1e9)
            opening.rank = self.ranks.rank
        return found

    def launch(
        self,
        kernel: Kernel,
        fields: Fields,
        status: int = 0,
        region: int = 0,
        blocks: int | None = None,
        repeats: bool = False,
        finishes: Half | None = None,
        begins: Half | None = None,
    ) -> None:
        """Put the kernel on the current stream; remember where its outcome will be.

        Args:
            fields: what all ranks must mean alike.
            region: which receive buffer this rank wants rows in.
            repeats: a dispatch whose rows went the same way before: if they were too many, that call has said so.
            blocks: None: ``num_sms``. They wait for each other, so all of them have to fit on the GPU at once.
            begins: the kernel is the sending half of a call, of which this remembers what the other half needs.
            finishes: the kernel is the receiving half.
        """
        stream = torch.cuda.current_stream(self.ranks.device)
        captured = torch.cuda.is_current_stream_capturing()
        if not captured and finishes is None:
            self.settle(CALLS_IN_FLIGHT)
        self.follow(stream)
        slot = self._captured_slot if captured else self._num_launches % self._captured_slot
        half = begins or finishes
        opening = kernel.args.call
        opening.half_epoch = 0 if half is None else half.epoch.data_ptr()
        if begins is not None:
            begins.number, begins.args = self.num_calls, type(kernel.args).from_buffer_copy(kernel.args)
        opening.record = self._records.address(slot)
        opening.status, opening.region = status, region
        sequence = 0 if captured else _sequence_of(self._num_launches)
        opening.sequence = sequence
        opening.options_hash = hash_of(fields)
        kernel.launch(blocks or self.num_sms, stream.cuda_stream)
        if captured:
            self._last_captured = stream
            self._graphs.hold(stream.cuda_stream, self, *self.keep_with_graphs)
            return
        self._last = stream
        number = self.num_calls if finishes is None else finishes.number
        self._launched.append(_InFlight(number, slot, sequence, stream, fields, repeats, own_fault=status != 0))
        self._num_launches += 1
        if finishes is None:
            self.num_calls += 1

    def finish(self, variant: Variant, half: Half, blocks: int | None = None) -> None:
        """Launch the receiving half of a call: the kernel takes the arguments of the one that sent."""
        kernel = self.kernel(variant)
        assert half.args is not None, "the sending half was launched"
        ctypes.memmove(ctypes.addressof(kernel.args), ctypes.addressof(half.args), ctypes.sizeof(half.args))
        self.launch(kernel, half.fields, blocks=blocks, finishes=half)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Let the stream wait for that of the call before.

        Calls share flags and counts, and what has been put behind a call may read what the next but one overwrites.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        last = self._last_captured if capturing else self._last
        if last is None or last == stream:
            return
        if capturing:
            with on_stream(last):
                if not torch.cuda.is_current_stream_capturing():  # that call is in another graph
                    return
        stream.wait_stream(last)

    @property
    def fault_claimed(self) -> int:
        """Address of a word in device memory: not 0 once a wait of this rank has expired."""
        return self._fault.claimed.data_ptr()

    def trace(self, times: torch.Tensor | None) -> None:
        """From now on kernels write when their blocks pass each phase (Mark in call.cuh): int64 [blocks, 16], ns."""
        for kernel in self._kernels.values():
            kernel.args.call.trace = 0 if times is None else times.data_ptr()

    # -- agreement and faults -------------------------------------------------------------------------------

    def agree(self, fields: Fields) -> None:
        """Open a call and do nothing else: raises on every rank if the ranks mean different calls."""
        self._open(fields)
        self.settle(0)

    def _open(self, fields: Fields, status: int = 0) -> None:
        """Put a call on the stream that does nothing else; with a status, where this rank has a fault of its own."""
        kernel = self.kernel(BarrierVariant(plan=self.plan))
        kernel.args.opened, kernel.args.num_cleared = self._opened.data_ptr(), 0
        self.launch(kernel, fields, status=status, blocks=1)

    def agree_before_memory(self, fields: Fields) -> None:
        """Agree that this call comes next: or some ranks would wait in making memory for others that do not.

        Raises:
            InvalidArgument: a CUDA graph is captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("the first call of a kind allocates buffers; make it once before the capture")
        release_dropped()
        self.settle(0)  # or a rank that knows of an earlier fault would go on without those that do not
        self.agree(fields)

    def report_fault(self, fault: Exception, names: Sequence[str], others_wait: bool = False) -> None:
        """Open the first of these calls with a status, which all ranks see; then those that the others open meanwhile.

        The text of the fault goes through the group's store. Nothing is told while a graph is captured: nothing runs
        then, on no rank.

        Args:
            others_wait: they read the outcome of every earlier call before they open the first.

        Raises:
            TokenloomError: what an earlier call left. The others raise it at the same point, and open no more either.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        if others_wait:
            self.settle(0)
        self.ranks.post_note(f"fault/{self.num_calls}", f"{type(fault).__name__}: {fault}")
        status = FAULT
        for name in names[: 1 + CALLS_IN_FLIGHT]:  # before they open another, the others read what the first found
            self._open({"call": name}, status)  # and nothing older is read in between, which would end this too early
            status = FOLLOWS_A_FAULT
        self.settle(0)

    def settle(self, in_flight: int, own_fault: bool = False) -> None:
        """Wait for all calls but the last ``in_flight``, and raise what they found, on all ranks alike.

        With ``own_fault`` nobody hears what the last of them found.
        """
        self.settle_before(self.num_calls - in_flight, own_fault)

    def settle_before(self, end: int, own_fault: bool = False) -> None:
        """The same for all calls below a number."""
        self._raise_timeout()
        while self._launched:
            # By number: ranks may finish the halves of two calls in different orders, and shall read alike.
            call = min(self._launched, key=lambda call: call.number)
            if call.number >= end:
                return
            self._launched.remove(call)
            self._await(partial(self._is_over, call), call.stream)
            self._raise_timeout()
            if call.own_fault or (own_fault and call.number == self.num_calls - 1):
                self._records.take(call.slot)
            else:
                self._raise_outcome(call)

    def await_counts(self, counts: HostCounts) -> list[int] | None:
        """What the last call leaves while it still runs; None if it has found something wrong, which settle raises."""
        call = self._launched[-1]
        looked = time.monotonic()

        def look() -> None:
            nonlocal looked
            if time.monotonic() - looked > LOOK_EVERY_S:
                self._look_around(call.stream)
                looked = time.monotonic()
            self._raise_timeout()
            if self._is_over(call):
                self._raise_timeout()
                if not counts.are_there():
                    raise RuntimeError("a dispatch has ended without leaving its counts; this is a bug of tokenloom")

        found = counts.wait(look)
        return found if self._records.is_clear(call.slot) else None

    def check(self, wait: bool) -> None:
        """Raise what earlier calls left behind; with ``wait`` of all calls and graph replays, finished first."""
        if wait:
            release_dropped()
        self.settle(0 if wait else CALLS_IN_FLIGHT)
        if wait:
            if not self._graphs.are_gone():
                # A replay may wait for a rank whose process has ended. Other work does not, so it gets time to finish.
                stream = torch.cuda.current_stream(self.ranks.device)
                self._await(stream.record_event().query, stream, patience_s=self.ranks.timeout_s)
            torch.cuda.synchronize(self.ranks.device)
            self._raise_timeout()
            stream = torch.cuda.current_stream(self.ranks.device)
            self._raise_outcome(_InFlight(-1, self._captured_slot, 0, stream, {"call": "a captured call"}))

    def _is_over(self, call: _InFlight) -> bool:
        return self._records.is_over(call.slot, call.sequence)

    def _await(self, is_over: Callable[[], bool], stream: torch.cuda.Stream, patience_s: float = 0.0) -> None:
        """Wait on the host for the work of a stream. Ranks that will never come are noticed; kernels would wait until
        their deadline.

        Args:
            patience_s: from when on the host looks for them.
        """
        if is_over():
            return
        began = time.monotonic()
        looked = began + patience_s
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
        ended = self.control.ended_ranks()
        if ended:
            self._fault.give_up(ended, "its process has ended")
            return
        said = self.ranks.notes.who_gave_up()
        if said is not None and said == self._heard:
            self._fault.give_up([said[0]], said[1])
        self._heard = said  # acted upon at the next look: kernels that wait for the same rank can name it by then

    def _raise_timeout(self) -> None:
        timeout = self._fault.error()
        if timeout is not None:
            self.ranks.mark_broken(timeout)
            raise timeout

    def _raise_outcome(self, call: _InFlight) -> None:
        outcome = self._records.take(call.slot)
        if outcome is None or outcome.status == FOLLOWS_A_FAULT:
            return
        if outcome.faulty_rank is not None:
            note = self.ranks.read_note(f"fault/{call.number}", outcome.faulty_rank)
            raise PeerError(outcome.faulty_rank, note or "see its own error")
        if outcome.differing_rank is not None:
            self._raise_difference(call, outcome)
        if not call.repeats:
            raise CapacityOverflow(outcome.needed_rows, outcome.capacity, sent=call.fields.get("sizes") != "exact")

    def _raise_difference(self, call: _InFlight, outcome: CallOutcome) -> None:
        """All ranks know that their options differ: each posts its own, and reads those of rank 0 and the other."""
        name = f"options/{call.number}"
        self.ranks.post_note(name, json.dumps(text_of(call.fields)))
        texts: list[dict[str, str]] = []
        deadline = time.monotonic() + NOTE_S
        for rank in (0, outcome.differing_rank):
            assert rank is not None
            note = self.ranks.read_note(name, rank)
            while note is None and time.monotonic() < deadline:
                time.sleep(0.01)
                note = self.ranks.read_note(name, rank)
            texts.append({"call": "unknown"} if note is None else json.loads(note))
        assert outcome.differing_rank is not None
        if texts[0] == texts[1]:  # nobody has posted, or the calls were captured and their options are not kept
            raise PlanMismatch(outcome.differing_rank, "options of this call", "others", "its own")
        raise_difference([*[texts[0]] * outcome.differing_rank, texts[1]])

    # -- the end --------------------------------------------------------------------------------------------

    def retire(self, buffer: SymmetricBuffer) -> None:
        """A buffer that no later call uses. Graphs that were captured with it may."""
        if self._graphs.are_gone():
            buffer.close()
        else:
            self._retired.append(buffer)

    def close(self, others: Sequence[SymmetricBuffer]) -> None:
        """Release the control buffer and the others, once no graph that was captured with them is left."""
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("close() waits for the GPU; call it outside of the capture")
        buffers, graphs = [self.control, *others, *self._retired], self._graphs
        self._retired = []
        stream = torch.cuda.current_stream(self.ranks.device)
        self._await(stream.record_event().query, stream)
        torch.cuda.synchronize(self.ranks.device)
        if graphs.are_gone():
            close_together(buffers)
            return

        def close_behind_graphs() -> bool:
            if not graphs.are_gone():
                return False
            for buffer in buffers:
                buffer.close()
            return True

        undo_later(close_behind_graphs)


def _sequence_of(number: int) -> int:
    """What an eager kernel writes to its record at the end: not 0, and not what others nearby write."""
    return number % (2**31 - 1) + 1


# -- what kernels ask of their operands, and of the moment ------------------------------------------------------


def require_layout(strategy: str, layout: str) -> None:
    if strategy == "dedup":
        return
    if layout != "expert":
        raise InvalidArgument(f"backend nvlink has strategy {strategy!r} in layout 'expert', not {layout!r}")
    if strategy != "all_to_all":
        require_no_capture()


def require_no_capture() -> None:
    """Raise for strategies in which a graph would use one half of a buffer in all of its replays."""
    if torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            "strategies 'all_gather' and 'reduce_scatter' cannot be captured into a CUDA graph; use 'dedup'"
        )


def require_no_host_read(reads: bool, what: str) -> None:
    if reads and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            f"{what} reads on the host, which a CUDA graph cannot do; capture with sizes='bounded' and a Communicator "
            "without checked"
        )
