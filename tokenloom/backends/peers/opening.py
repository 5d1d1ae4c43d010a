"""The opening of every call: what all ranks are told.

A kernel opens by telling all ranks what it was asked for (device/transport/call.cuh). So a fault on one rank is
known to all of them. What the host learns of a call is in outcomes.py.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from typing import TypeVar

import torch

from tokenloom.backends.peers.outcomes import (
    CALLS_IN_FLIGHT,
    CAPTURED_SLOT,
    FAULT,
    FOLLOWS_A_FAULT,
    Outcomes,
)
from tokenloom.backends.seam import Wait
from tokenloom.errors import InvalidArgument
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.common import (
    CLAIMS,
    H200,
    MAX_BLOCKS,
    MOST_ARRIVALS,
    OPENING_FIELDS,
    TURN_WORDS,
    Call,
    Rates,
    SharesWork,
    Variant,
)
from tokenloom.plan import Plan
from tokenloom.runtime.deferred_release import keep_until_idle, release_dropped, synchronize, undo_later
from tokenloom.runtime.graph_references import GraphReferences
from tokenloom.runtime.openings import CallKind, Fields, NeedsRoom
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.streams import current_handle, is_capturing, on_stream
from tokenloom.runtime.symmetric_memory import SymmetricBuffer, close_together

T = TypeVar("T")

write_opening, OPENING_AT = OPENING_FIELDS.write, OPENING_FIELDS.offset
HALVES: Fields = {"halves": True}
"""Fields that all ranks must mean alike in calls that are two kernels, beside those of other calls."""


class Launched(tuple[T]):
    """A sent call whose ``receive`` only returns its result. A tuple, because that is cheap to make."""

    __slots__ = ()

    def receive(self) -> T:
        return self[0]


class OpeningKernel(Kernel):
    """A kernel that opens a call, with arguments of its own.

    Attributes:
        variant: the form of it. opening: the part of its arguments that is about the opening.
        blocks: that it takes, unless a launch says otherwise.
    """

    def __init__(self, variant: Variant, device_index: int, blocks: int) -> None:
        super().__init__(variant.spec(), device_index)
        self.variant, self.blocks = variant, blocks
        self.opening: Call = self.args.call


class Half:
    """State that the sending half of a call leaves to the receiving one.

    Args:
        memory: to keep until then: what the receiving kernel reads and writes, and where the sending kernel leaves the
            call's epoch.
        epoch: address of the latter.
        kernel: of the receiving half. blocks: that it takes; None: as :meth:`Launcher.launch` has them.

    Attributes:
        number: of the call. args: of the sending kernel. kind, dispatch: what the call means to all ranks. status: not
            0 where this rank opens it for a fault of its own. repeats: see :meth:`Launcher.launch`.
        captured: it was sent into a CUDA graph. is_finished: the receiving kernel was launched.
    """

    def __init__(self, memory: object, epoch: int, kernel: OpeningKernel, blocks: int | None = None) -> None:
        self._memory, self.epoch, self.kernel, self.blocks = memory, epoch, kernel, blocks
        self.number = -1
        self.args: ctypes.Structure | None = None
        self.kind: CallKind | None = None
        self.dispatch, self.status = -1, 0
        self.captured = self.is_finished = self.repeats = False


class Launcher:
    """Launches kernels that open a call.

    Args:
        plan, ranks: sizes and group.
        control: the buffer with flags and headers.
        num_sms: SMs, one block each, that a kernel takes. None: as many as its rows need, up to ``most_sms``.
        most_sms: of any kernel.
        first_call: number of the first call, the same on all ranks.
        few_tokens: no call has many.
        rates: by which calls choose their SMs and share work between them, the same on all ranks.

    Attributes:
        num_calls: number of the next call. Captured ones do not count. Each pairs with the same number
            on every other rank, even if the ranks mean different calls.
        known_from: number of the first call that all ranks know of.
        masked: ranks that take no part, in eager calls from the next one on, and in replays likewise.
        outcomes: what the calls have found.
        keep_with_graphs: what the calls of a captured graph use besides this.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: RankGroup,
        control: SymmetricBuffer,
        num_sms: int | None,
        first_call: int = 0,
        most_sms: int = MAX_BLOCKS,
        few_tokens: bool = False,
        rates: Rates = H200,
    ) -> None:
        self.plan, self.ranks, self.control, self.num_sms, self.most_sms = plan, ranks, control, num_sms, most_sms
        self._few_tokens, self.rates = few_tokens, rates
        self.num_calls = self.known_from = first_call
        self.masked: frozenset[int] = frozenset()
        self._num_launches = 0
        self._open_halves: list[Half] = []
        self._kernels: dict[Variant, OpeningKernel] = {}
        self._all_kernels: weakref.WeakSet[OpeningKernel] = weakref.WeakSet()
        # Epoch, masked ranks, blocks out, claims.
        with torch.inference_mode(False):  # ranks are masked in any mode
            self._state = torch.zeros(TURN_WORDS + 1 + CLAIMS, dtype=torch.int32, device=ranks.device)
            self._arrivals = torch.zeros(MOST_ARRIVALS, 3, dtype=torch.int64, device=ranks.device)
        self._num_arrivals = 0
        self._opened = torch.zeros(1, dtype=torch.int32, device=ranks.device)
        keep_until_idle(self, ranks.device, self._state, self._arrivals, self._opened)
        self.outcomes = Outcomes(ranks, control)
        self._last: torch.cuda.Stream | None = None  # where the last eager call is
        self._last_handle = -1  # of it
        self._last_captured: torch.cuda.Stream | None = None
        self._graphs = GraphReferences()
        self._retired: list[SymmetricBuffer] = []
        self.keep_with_graphs: list[object] = []

    def kernel(self, variant: Variant) -> OpeningKernel:
        """The kernel of a variant that all who ask share: they write all of its arguments before each launch.

        Raises:
            InvalidArgument: a CUDA graph is captured, and this is the first use of the variant.
        """
        found = self._kernels.get(variant)
        if found is None:
            found = self._kernels[variant] = self.new_kernel(variant)
        return found

    def blocks_of(self, variant: Variant) -> int:
        """How many blocks its kernels take, the same on all ranks."""
        if self.num_sms is not None:
            return self.num_sms
        if not isinstance(variant, SharesWork):
            return self.most_sms
        return variant.best_blocks(self.most_sms, self.rates, self._few_tokens)

    def new_kernel(self, variant: Variant) -> OpeningKernel:
        """A kernel with arguments of its own, in which everything about the opening is filled in that never changes.

        It begins while the one before it on the stream ends, for which it waits itself before all else.

        Raises:
            InvalidArgument: a CUDA graph is captured, and this is the first use of the variant.
        """
        made = OpeningKernel(variant, self.ranks.device.index, self.blocks_of(variant))
        made.overlaps_previous = True
        opening = made.opening
        opening.peers = self.control.peers.data_ptr()
        opening.headers = self.control.layout.offset("headers")
        opening.epoch = self._state.data_ptr()
        opening.blocks_out = opening.epoch + 4 * TURN_WORDS
        opening.claimed = opening.blocks_out + 4
        opening.some_flags = self.control.layout.offset("done_flags")
        opening.left_flags = self.control.layout.offset("left_flags")
        opening.arrivals = self._arrivals.data_ptr()
        opening.num_some_flags = (self.control.layout.offset("combine_recv_weights") - opening.some_flags) // 4
        opening.fault = self.outcomes.fault.record_address
        opening.fault_claimed = self.fault_claimed
        late = self.outcomes.known_losses is not None  # who is late is masked, wherever it is awaited
        opening.open_timeout_ns = int((self.ranks.timeout_s if late else self.ranks.open_timeout_s) * 1e9)
        opening.timeout_ns = int(self.ranks.timeout_s * 1e9)
        opening.rank = self.ranks.rank
        self._all_kernels.add(made)
        return made

    def add_arrivals(self, first: torch.Tensor, turn_bytes: int) -> None:
        """Tell kernels of memory of this rank where rows say by themselves that they are here, by turns.

        Args:
            first: uint8 [bytes], the first turn's. turn_bytes: from one to the next.
        """
        row = torch.tensor([first.data_ptr(), turn_bytes, first.numel()], dtype=torch.int64, device="cpu")
        self._arrivals[self._num_arrivals].copy_(row)
        self._num_arrivals += 1

    def launch(
        self,
        kernel: OpeningKernel,
        kind: CallKind,
        dispatch: int,
        *,
        status: int = 0,
        region: int = 0,
        blocks: int | None = None,
        repeats: bool = False,
        begins: Half | None = None,
        finishes: Half | None = None,
        follows: bool = True,
    ) -> None:
        """Put the kernel on the current stream; remember where its outcome will be.

        Args:
            kind, dispatch: what all ranks must mean alike: the kind of the call, and the number of its dispatch.
            region: which receive buffer this rank wants rows in.
            repeats: a dispatch whose rows went the same way before: if they were too many, that call has said so.
            blocks: None: those of the kernel. They wait for each other, so all of them have to fit on the GPU at once.
            begins: the kernel is the sending half of a call, of which this remembers what the other half needs.
            finishes: the kernel is the receiving half.
            follows: the stream waits for that of the call before. If not, :meth:`follow` made it wait already.
        """
        stream, captured = self.current()
        if not captured and finishes is None:
            if self._open_halves:
                self._finish_older_halves()
            self.outcomes.settle_before(self.num_calls - CALLS_IN_FLIGHT)
        if follows:
            self._follow(stream, captured)
        if begins is not None:
            kernel.opening.half_epoch = begins.epoch
            begins.number, begins.kind, begins.dispatch, begins.captured = self.num_calls, kind, dispatch, captured
            begins.status, begins.repeats = status, repeats
            begins.args = type(kernel.args).from_buffer_copy(kernel.args)
        if not captured:
            number = self.num_calls if finishes is None else finishes.number
            self.launch_ready(kernel, kind, dispatch, stream, region, blocks, number, status, repeats)
            if begins is not None:
                self._open_halves.append(begins)
            return
        record = self.outcomes.addresses[CAPTURED_SLOT]
        write_opening(kernel.args, OPENING_AT, kind.hash_of(dispatch), record, status, region, 0)
        kernel.launch(blocks or kernel.blocks, stream)
        self._last_captured = self._stream_of(stream, self._last_captured)
        self._graphs.hold(stream, self, *self.keep_with_graphs)

    def ready_stream(self, in_flight: int = CALLS_IN_FLIGHT) -> int | None:
        """Raise what earlier calls left, as far as it is known, and say whether :meth:`launch_ready` can come next.

        Args:
            in_flight: number of last calls whose outcome is not asked for.

        Returns:
            The handle of the current stream, if it is the one of the call before, nothing captures it, and no halves
            are open; else None, and nothing was raised.
        """
        stream = current_handle(self.ranks.device)
        if stream != self._last_handle or self._open_halves:
            return None
        if stream and torch.cuda.is_current_stream_capturing():  # the default stream, 0, is never captured
            return None
        self.outcomes.settle_before(self.num_calls - in_flight)
        return stream

    def launch_ready(
        self,
        kernel: OpeningKernel,
        kind: CallKind,
        dispatch: int,
        stream: int,
        region: int = 0,
        blocks: int | None = None,
        number: int | None = None,
        status: int = 0,
        repeats: bool = False,
    ) -> None:
        """Launch on a stream that :meth:`ready_stream` returned, without asking for stream or capture.

        Args:
            stream: what :meth:`ready_stream` has given. It holds until ``CALLS_IN_FLIGHT`` calls are in flight.
            number: of the call; None: it is the next one.
        """
        launches, next_call, outcomes = self._num_launches, self.num_calls, self.outcomes
        slot = launches % CAPTURED_SLOT
        sequence = launches % (2**31 - 1) + 1  # not 0, and no other number of calls nearby
        record = outcomes.addresses[slot]
        write_opening(kernel.args, OPENING_AT, kind.hash_of(dispatch), record, status, region, sequence)
        kernel.launch(blocks or kernel.blocks, stream)
        if stream != self._last_handle:
            self._last, self._last_handle = torch.cuda.current_stream(self.ranks.device), stream
        self._num_launches = launches + 1
        if number is None or number == next_call:
            outcomes.in_flight.append((next_call, slot, sequence, self._last, kind, dispatch, repeats, status != 0))
            self.num_calls = next_call + 1
        else:
            outcomes.expect_half((number, slot, sequence, self._last, kind, dispatch, repeats, status != 0))

    def finish(self, half: Half) -> None:
        """Launch the receiving half of a call, if it was not yet: the kernel takes the arguments of the one that sent.

        Raises:
            InvalidArgument: a CUDA graph is captured, and the call was sent outside of it, or the reverse.
        """
        if half.is_finished:
            self.follow()
            return
        if half.captured != torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("a call was sent into a CUDA graph and received outside, or the reverse")
        half.is_finished = True
        self._open_halves = [each for each in self._open_halves if each is not half]
        args, kind, kernel = half.args, half.kind, half.kernel
        assert args is not None, "the sending half was launched"
        assert kind is not None
        ctypes.memmove(ctypes.addressof(kernel.args), ctypes.addressof(args), ctypes.sizeof(args))
        self.launch(
            kernel,
            kind,
            half.dispatch,
            status=half.status,
            blocks=half.blocks,
            repeats=half.repeats,
            finishes=half,
        )

    def _finish_older_halves(self) -> None:
        """Keep the rule that call n opens when call n - 2 is received, which memory that takes turns relies on. Users
        keep it, but calls that only agree, or tell a fault, open between theirs."""
        for half in [each for each in self._open_halves if each.number < self.num_calls - 1]:
            self.finish(half)

    def finish_all(self) -> None:
        """Launch all receiving halves that were not yet, since the memory that they read is about to go."""
        for half in list(self._open_halves):
            self.finish(half)

    def follow(self) -> None:
        """Let the current stream wait for that of the call before.

        Calls share flags and counts, and what has been put behind a call may read what the next but one overwrites.
        """
        self._follow(*self.current())

    def _follow(self, stream: int, captured: bool) -> None:
        """Do what :meth:`follow` says. The current stream has this handle."""
        last = self._last_captured if captured else self._last
        if last is None or last.cuda_stream == stream:
            return
        if captured:
            with on_stream(last):
                if not torch.cuda.is_current_stream_capturing():  # that call is in another graph
                    return
        torch.cuda.current_stream(self.ranks.device).wait_stream(last)

    def _stream_of(self, handle: int, last: torch.cuda.Stream | None) -> torch.cuda.Stream:
        """The current stream, which mostly is the one of the call before."""
        if last is not None and last.cuda_stream == handle:
            return last
        return torch.cuda.current_stream(self.ranks.device)

    def leave_out(self, ranks: Collection[int]) -> None:
        """Mask these ranks and no others, from the next call or replay on the current stream on. Calls of two halves
        end as they began.

        Not to be called while a graph is captured.
        """
        self.follow()
        for word in range(1, TURN_WORDS):
            bits = sum(1 << rank % 32 for rank in set(ranks) if rank // 32 == word - 1)
            self._state[word].fill_(bits - (bits >> 31 << 32))
        self._last_handle = current_handle(self.ranks.device)
        self._last = self._stream_of(self._last_handle, self._last)
        self.masked = self.outcomes.masked = frozenset(ranks)

    @property
    def epoch(self) -> int:
        """Number of the last call that has opened on this rank, in 32 bits. The host waits for it."""
        return int(self._state[0].item()) % (1 << 32)

    def resume(self, first_call: int, epochs: Sequence[int], known_losses: int, masked: Collection[int]) -> None:
        """Go on in the same memory after calls that were in vain, once nothing runs on any rank.

        Args:
            first_call: as in the constructor.
            epochs: of all ranks that are left. The last one counts: words that calls in vain have left are older then.
            known_losses: how many losses calls know of.
            masked: as in :meth:`leave_out`.
        """
        first = epochs[0]
        last = max(epochs, key=lambda epoch: (epoch - first + (1 << 31)) % (1 << 32))
        self._state[0].fill_(last - (last >> 31 << 32))
        self._state[TURN_WORDS:].zero_()
        self.outcomes.begin_anew()
        self.outcomes.known_losses, self.num_calls = known_losses, first_call
        self.leave_out(masked)
        synchronize(self.ranks.device)  # replays on other streams come next

    def require_known(self, dispatch: int) -> None:
        """Raise InvalidArgument for the number of a dispatch that ranks which came back know nothing of."""
        if dispatch < self.known_from:
            raise InvalidArgument("the dispatch was made before unmask_ranks took ranks back; dispatch again")

    def current(self) -> tuple[int, bool]:
        """The handle of the current stream, and whether a CUDA graph captures it."""
        stream = current_handle(self.ranks.device)
        return stream, is_capturing(stream)

    @property
    def has_graphs(self) -> bool:
        """Whether a CUDA graph may replay calls."""
        return not self._graphs.are_gone()

    @property
    def masked_address(self) -> int:
        """Address of the words in device memory that say who is masked: bit r of the first is rank r."""
        return self._state.data_ptr() + 4

    @property
    def fault_claimed(self) -> int:
        """Address of a word in device memory: not 0 once a wait of this rank has expired."""
        return self.outcomes.fault.claimed.data_ptr()

    def trace(self, times: torch.Tensor | None) -> None:
        """From now on kernels write when their blocks pass each phase (Mark in call.cuh): int64 [blocks, 16], ns."""
        for kernel in self._all_kernels:
            kernel.opening.trace = 0 if times is None else times.data_ptr()

    def variants(self) -> set[Variant]:
        """The forms of kernels that calls have used, and may use again."""
        return {kernel.variant for kernel in self._all_kernels}

    # -- agreement, faults, and what calls have found -------------------------------------------------------

    def agree(self, fields: Fields) -> None:
        """Open a call and do nothing else: raises on every rank if the ranks mean different calls."""
        self._open(fields)
        self.settle(0)

    def _open(self, fields: Fields, status: int = 0) -> None:
        """Put a call on the stream that does nothing else; with a status, where this rank has a fault of its own."""
        kernel, blocks = self.empty_call(fields)
        kind = CallKind(fields)
        self.launch(kernel, kind, kind.number, status=status, blocks=blocks)

    def empty_call(self, fields: Fields) -> tuple[OpeningKernel, int | None]:
        """The kernel that opens such a call and does nothing else, and the blocks that it takes."""
        kernel = self.kernel(BarrierVariant(plan=self.plan))
        kernel.args.opened, kernel.args.num_cleared = self._opened.data_ptr(), 0
        return kernel, 1

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
            PeerError: this rank needs room, and another one has a fault that comes first.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        if others_wait:
            self.settle(0)
        number = self.num_calls
        self.ranks.notes.post(f"fault/{number}", f"{type(fault).__name__}: {fault}")
        status = FAULT
        for name in names[: 1 + CALLS_IN_FLIGHT]:  # before they open another, the others read what the first found
            self._open({"call": name}, status)  # and nothing older is read in between, which would end this too early
            status = FOLLOWS_A_FAULT
        self.settle(0)
        if isinstance(fault, NeedsRoom):
            self.outcomes.raise_final_fault(number)

    def settle(self, in_flight: int, own_fault: bool = False) -> None:
        """Wait for all calls but the last ``in_flight``, and raise what they found, on all ranks alike.

        With ``own_fault`` nobody hears what the last of them found.
        """
        self.outcomes.settle_before(self.num_calls - in_flight, own_fault)

    def check(self, wait: Wait) -> None:
        """Raise what calls left behind, with "everything" after all of them and graph replays; see
        :meth:`tokenloom.backends.seam.Backend.check`."""
        if wait != "everything":
            self.settle(0 if wait == "calls" else CALLS_IN_FLIGHT)
            return
        release_dropped()
        self.settle(0)
        if not self._graphs.are_gone():
            # A replay may wait for a rank whose process has ended. Other work does not, so it gets time to finish.
            stream = torch.cuda.current_stream(self.ranks.device)
            self.outcomes.wait_for(stream.record_event().query, stream, patience_s=self.ranks.timeout_s)
        synchronize(self.ranks.device)
        self.outcomes.raise_timeout()
        self.outcomes.raise_captured()

    # -- the end --------------------------------------------------------------------------------------------

    def retire(self, buffer: SymmetricBuffer) -> None:
        """A buffer that no later call uses. Graphs that were captured with it may."""
        if self._graphs.are_gone():
            buffer.close()
        else:
            self._retired.append(buffer)

    def await_work(self) -> None:
        """Wait for all work of the device, which must be none that a graph captures now."""
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("close() waits for the GPU; call it outside of the capture")
        stream = torch.cuda.current_stream(self.ranks.device)
        self.outcomes.wait_for(stream.record_event().query, stream)
        synchronize(self.ranks.device)

    def close(self, others: Sequence[SymmetricBuffer]) -> None:
        """Release the control buffer and the others, once no graph that was captured with them is left."""
        self.await_work()
        buffers, graphs = [self.control, *others, *self._retired], self._graphs
        self._retired = []
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


# -- what kernels ask of their operands, and of the moment ------------------------------------------------------


def require_layout(strategy: str, layout: str) -> None:
    if strategy in ("dedup", "per_node"):
        return
    if layout != "expert":
        raise InvalidArgument(f"backend nvlink has strategy {strategy!r} in layout 'expert', not {layout!r}")
    if strategy != "all_to_all":
        require_no_capture()


def require_no_capture() -> None:
    """Raise for strategies in which a graph would use one region of a buffer in all of its replays."""
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
