"""The opening of every call of backend "nvlink": what all ranks are told, and what the host learns of it later.

A kernel opens by telling all ranks what it was asked for (device/sync/call.cuh), so that a fault on one rank is known
to all of them. The host reads that at once where it must, or a few calls later, the same number on every rank.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from tokenloom.backends.handshake import Field, decode_field, encode_fields
from tokenloom.backends.nvlink.buffers import control_regions
from tokenloom.errors import CapacityOverflow, PeerError, PlanMismatch
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.combine.launch import CombineVariant
from tokenloom.kernels.common import Variant
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.streams import on_stream
from tokenloom.runtime.symmetric_memory import CallRecords, FaultFlag, HostCounts, SymmetricBuffer

CALLS_IN_FLIGHT = 3
"""Calls whose outcome the host has not read. More lets it run further ahead; errors then come later."""
FOLLOWS_A_FAULT = 2
"""Status of a rank in a call that it opens only because the others do, after its fault in the one before; they take it
for part of the fault that they know of."""


@dataclass(frozen=True)
class _Launched:
    """A call whose outcome the host has not read: its number, its slot, and what error messages want to say."""

    number: int
    slot: int
    fields: dict[str, Field]
    repeats: bool = False


class Calls:
    """Launches kernels that open a call, and raises what they found.

    Args:
        plan, ranks: sizes and group. Making one is collective.
        num_sms: SMs, one block each, that a kernel takes.

    Attributes:
        control: the buffer with flags and counts.
        num_calls: launched so far, not counting captured ones; each pairs with one of every other rank, whatever the
            ranks meant by it.
    """

    def __init__(self, plan: Plan, ranks: RankGroup, num_sms: int) -> None:
        self.plan, self.ranks, self.num_sms = plan, ranks, num_sms
        self.control = SymmetricBuffer(control_regions(plan), ranks)
        self._kernels: dict[Variant, Kernel] = {}
        self._state = torch.zeros(4, dtype=torch.int32, device=ranks.device)  # epoch, blocks out, claims
        self._fault = FaultFlag(ranks.device, ranks.rank)
        self._records = CallRecords(CALLS_IN_FLIGHT + 2)
        self._captured_slot = CALLS_IN_FLIGHT + 1
        self._done = [torch.cuda.Event() for _ in range(CALLS_IN_FLIGHT + 1)]
        self._launched: deque[_Launched] = deque()
        self._last: torch.cuda.Stream | None = None  # where the last call is
        self.num_calls = 0

    def kernel(self, variant: Variant) -> Kernel:
        """The kernel of a variant, with arguments of its own in which everything about the opening is filled in."""
        found = self._kernels.get(variant)
        if found is None:
            found = self._kernels[variant] = Kernel(variant.spec(), self.ranks.device.index)
            opening = found.args.call
            opening.peers = self.control.peers.data_ptr()
            opening.flags = self.control.regions.offset("flags")
            opening.rows = self.control.regions.offset("rows")
            opening.epoch = self._state.data_ptr()
            opening.blocks_out = self._state.data_ptr() + 4
            opening.claimed = self._state.data_ptr() + 8
            opening.fault = self._fault.record_address
            opening.fault_claimed = self._fault.claimed.data_ptr()
            opening.timeout_ns = int(self.ranks.timeout_s * 1e9)
            opening.rank = self.ranks.rank
        return found

    def launch(
        self,
        kernel: Kernel,
        fields: dict[str, Field],
        status: int = 0,
        region: int = 0,
        blocks: int | None = None,
        repeats: bool = False,
    ) -> None:
        """Put the kernel on the current stream; remember where its outcome will be.

        Args:
            repeats: a dispatch whose rows went the same way before: if they were too many, that call has said so.
            blocks: None: ``num_sms``. They wait for each other, so all of them have to fit on the GPU at once.
        """
        stream = torch.cuda.current_stream(self.ranks.device)
        captured = torch.cuda.is_current_stream_capturing()
        if not captured:
            self.settle(CALLS_IN_FLIGHT)
        self.follow(stream)
        slot = self._captured_slot if captured else self.num_calls % len(self._done)
        opening = kernel.args.call
        opening.record = self._records.address(slot)
        opening.status, opening.region = status, region
        opening.fields[:] = encode_fields(fields)
        kernel.launch(blocks or self.num_sms, stream.cuda_stream)
        self._last = stream
        if not captured:
            self._done[slot].record(stream)
            self._launched.append(_Launched(self.num_calls, slot, fields, repeats))
            self.num_calls += 1

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Let the stream wait for that of the call before: calls share flags and counts, and what has been put behind
        a call may read what the next but one overwrites."""
        if self._last is None or self._last == stream:
            return
        if torch.cuda.is_current_stream_capturing():
            with on_stream(self._last):
                if not torch.cuda.is_current_stream_capturing():  # that call is not in this graph
                    return
        stream.wait_stream(self._last)

    @property
    def fault_claimed(self) -> int:
        """Address of a word in device memory: not 0 once a wait of this rank has expired."""
        return self._fault.claimed.data_ptr()

    def trace(self, times: torch.Tensor | None) -> None:
        """From now on kernels write when their blocks pass each phase (Mark in call.cuh): int64 [blocks, 16], ns."""
        for kernel in self._kernels.values():
            kernel.args.call.trace = 0 if times is None else times.data_ptr()

    def agree(self, fields: dict[str, Field], status: int = 0) -> None:
        """Open a call and do nothing else: raises on every rank if the ranks mean different calls.

        Args:
            status: this rank's own fault, which it raises itself, or 0.
        """
        bf16 = torch.bfloat16
        variant = CombineVariant(plan=self.plan, layout="token", y_dtype=bf16, wire_dtype=bf16, out_dtype=bf16)
        kernel = self.kernel(variant)
        sizes = (self.plan.num_ranks, self.plan.num_ranks + self.plan.num_experts)
        counts = torch.zeros(sizes, dtype=torch.int32, device=self.ranks.device)
        kernel.args.all_counts = counts.data_ptr()
        kernel.args.peers = self.control.peers.data_ptr()
        kernel.args.num_tokens = 0
        self.launch(kernel, fields, status=status)
        self.settle(0, own_fault=status != 0)

    def report_fault(self, call: str, fault: Exception) -> None:
        """Open the call with a status, which all ranks see; its text goes through the group's store.

        Not while a graph is captured: nothing runs then, on no rank.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        self.ranks.post_note(f"fault/{self.num_calls}", f"{type(fault).__name__}: {fault}")
        self.agree({"call": call}, status=1)

    def settle(self, in_flight: int, own_fault: bool = False) -> None:
        """Wait until at most ``in_flight`` calls are, and raise what the finished ones found, on all ranks alike."""
        self._raise_timeout()
        while len(self._launched) > in_flight:
            call = self._launched.popleft()
            self._done[call.slot].synchronize()
            self._raise_timeout()
            if own_fault and not self._launched:  # the last one is that with the fault
                self._records.take(call.slot)
            else:
                self._raise_outcome(call)

    def await_counts(self, counts: HostCounts) -> list[int] | None:
        """What the last call leaves while it still runs; None if it has found something wrong, which settle raises."""
        slot = self._launched[-1].slot

        def look() -> None:
            self._raise_timeout()
            if self._done[slot].query():  # raises where the GPU has failed
                torch.cuda.synchronize(self.ranks.device)
                self._raise_timeout()
                if not counts.are_there():
                    raise RuntimeError("a dispatch has ended without leaving its counts; this is a bug of tokenloom")

        found = counts.wait(look)
        return found if self._records.is_clear(slot) else None

    def check(self, wait: bool) -> None:
        """Raise what earlier calls left behind; with ``wait`` of all calls and graph replays, finished first."""
        self.settle(0 if wait else CALLS_IN_FLIGHT)
        if wait:
            torch.cuda.synchronize(self.ranks.device)
            self._raise_timeout()
            self._raise_outcome(_Launched(-1, self._captured_slot, {"call": "a captured call"}))

    def _raise_timeout(self) -> None:
        timeout = self._fault.error()
        if timeout is not None:
            self.ranks.mark_broken(timeout)
            raise timeout

    def _raise_outcome(self, call: _Launched) -> None:
        outcome = self._records.take(call.slot)
        if outcome is None:
            return
        if outcome.status == FOLLOWS_A_FAULT:
            return
        if outcome.faulty_rank is not None:
            note = self.ranks.read_note(f"fault/{call.number}", outcome.faulty_rank)
            raise PeerError(outcome.faulty_rank, note or "see its own error")
        if outcome.differing_rank is not None:
            names = list(call.fields)
            name = names[outcome.field] if outcome.field < len(names) else "the options of the call"
            raise PlanMismatch(
                outcome.differing_rank, name, decode_field(outcome.theirs), decode_field(outcome.rank0s)
            )
        if not call.repeats:
            raise CapacityOverflow(outcome.needed_rows, outcome.capacity, sent=call.fields.get("sizes") != "exact")

    def close(self, others: list[SymmetricBuffer]) -> None:
        """Release the control buffer and the others; after a fault they stay, since a late rank may still write."""
        torch.cuda.synchronize(self.ranks.device)
        for buffer in (self.control, *others):
            if self._fault.error() is None:
                buffer.close()
            else:
                buffer.abandon()
