"""Reports of kernels to the host: waits that expired, counts of a call that still runs, its end, what went wrong.

All of it lies in pinned host memory. Kernels write the contents first and then, with release order, a word that says
that they are there. The host reads that word first and, where it is set, the rest after :func:`order_reads`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenloom.errors import PeerTimeout
from tokenloom.runtime.deferred_release import keep_until_idle
from tokenloom.runtime.topology import Topology

OWN_BLOCKS, ARRIVALS = 4, 7
SOME_CALL = "a call"
"""The phase of a wait that the host ended: it does not know how far the kernel had come."""
PHASES = {
    1: "the opening of a call",
    2: "dispatch, rows",
    3: "combine, partial sums",
    OWN_BLOCKS: "blocks of its own kernel",
    5: "dispatch, forwarding between nodes",
    6: "combine, sums of nodes",
    ARRIVALS: "MegaMoE, rows of an expert",
}
"""Phase of device/sync/wait.cuh, in words."""
FAULT_WORDS = 6
"""FaultRecord of device/sync/wait.cuh."""
RECORD_WORDS, SEQUENCE_WORD = 8, 5
"""A slot for CallRecord of device/transport/call.cuh, and its last word, which says that a call is over."""
POLLS_BETWEEN_LOOKS = 64

_LOADS_KEEP_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def order_reads() -> None:
    """Let reads after this call see what was written before the word that the caller has just found set.

    x86 performs loads in order. Arm, as beside a GH200, does not. But it orders a load behind an earlier one that a
    branch depends on if a context synchronization event lies between: entering the kernel and coming back is one.
    """
    if not _LOADS_KEEP_ORDER:
        os.sched_yield()


def _pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=True)


class FaultFlag:
    """Where kernels record a wait that expired: pinned host memory, and a word on the device that says so.

    Args:
        device: of the kernels. rank: of this process, for error messages.
        topology: of the ranks, for error messages; None: they are on one node.

    Attributes:
        record_address: of the record in pinned memory, for kernels.
        claimed: int32 [1] on the device; not 0 once a wait has expired.
    """

    def __init__(self, device: torch.device, rank: int, topology: Topology | None = None) -> None:
        self._rank, self._device, self._topology = rank, device, topology
        self._host_fault: PeerTimeout | None = None
        memory = _pinned(FAULT_WORDS)
        self._words = memoryview(memory.numpy())  # type: ignore[arg-type]  # items of it cost little
        self.record_address = memory.data_ptr()
        with torch.inference_mode(False):  # the host gives up in any mode
            self.claimed = torch.zeros(1, dtype=torch.int32, device=device)
        keep_until_idle(self, device, memory, self.claimed)
        if device.type == "cuda":  # for give_up, when it may be too late to make them
            self._one, self._stream = _pinned(1).fill_(1), torch.cuda.Stream(device)
            keep_until_idle(self, device, self._one)

    def give_up(self, peers: list[int], cause: str) -> None:
        """End the waits of this rank's kernels from the host, which knows that the peers will never come."""
        if self._host_fault is None:
            self._host_fault = PeerTimeout(self._rank, peers, SOME_CALL, 0, cause, self._nodes(peers))
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self.claimed.copy_(self._one, non_blocking=True)  # by a copy engine, beside the kernels that wait
                self._stream.synchronize()

    def clear(self) -> None:
        """Let waits of later kernels take their time again. No kernel runs."""
        self._host_fault = None
        for word in range(FAULT_WORDS):
            self._words[word] = 0
        self.claimed.zero_()

    def is_set(self) -> bool:
        """Whether a kernel has recorded a fault, or the host."""
        return self._words[0] != 0 or self._host_fault is not None

    def error(self) -> PeerTimeout | None:
        """The fault that a kernel recorded, or the host, if one did."""
        if not self._words[0]:
            return self._host_fault
        order_reads()
        _, peer, phase, epoch, wanted, seen = self._words.tolist()
        cause = f"its flag shows {seen}, {wanted} was wanted"
        if phase == ARRIVALS:
            cause = f"{(wanted - seen) % (1 << 32)} of its rows are missing"  # counts wrap
        elif phase == OWN_BLOCKS:
            cause = "they do not all run at once, since other kernels or limits leave them too few SMs"
        return PeerTimeout(self._rank, [peer], PHASES.get(phase, f"phase {phase}"), epoch, cause, self._nodes([peer]))

    def _nodes(self, peers: list[int]) -> list[int]:
        return [] if self._topology is None else self._topology.which(peers)


class HostCounts:
    """Pinned host memory where a call leaves counts while it still runs: a sequence number, then the counts.

    Args:
        device: of the kernels. num_counts: that a call leaves.

    Attributes:
        address: for kernels. sequence: of the call that writes next, or has written last.
    """

    def __init__(self, device: torch.device, num_counts: int) -> None:
        memory = _pinned(1 + num_counts)
        self._words = memory.numpy()
        self.address = memory.data_ptr()
        self.sequence = 0
        keep_until_idle(self, device, memory)

    def expect(self) -> int:
        """The sequence number of the next call."""
        self.sequence = self.sequence % (2**31 - 1) + 1
        return self.sequence

    def are_there(self) -> bool:
        """Whether the expected call has left its counts."""
        return bool(self._words[0] == self.sequence)

    def wait(self, look: Callable[[], None]) -> list[int]:
        """The counts, when they are there.

        Args:
            look: raises if they will never be; asked now and then.
        """
        polls = 0
        while not self.are_there():
            polls += 1
            if polls % POLLS_BETWEEN_LOOKS == 0:
                look()
            time.sleep(0)  # other threads of Python may run
        order_reads()
        return self._words[1:].tolist()


@dataclass(frozen=True)
class CallOutcome:
    """The fault that ranks found in a call, as all of them see it alike.

    Attributes:
        needed_rows: rows that the fullest rank needs, if over the capacity, else 0.
        capacity: the capacity then.
        faulty_rank: lowest rank that had a fault of its own, or None.
        status: what that rank announced, or 0.
        differing_rank: lowest rank that means another call than the lowest that takes part, or None.
    """

    needed_rows: int
    capacity: int
    faulty_rank: int | None
    status: int
    differing_rank: int | None


class CallRecords:
    """Slots in pinned host memory where kernels write that a call is over, and before that what is wrong with it.

    Args:
        device: of the kernels. num_slots: calls whose outcome may be unread.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        memory = _pinned(num_slots * RECORD_WORDS)
        self._words = memoryview(memory.numpy())  # type: ignore[arg-type]  # items of it cost little
        self._address = memory.data_ptr()
        keep_until_idle(self, device, memory)

    def address(self, slot: int) -> int:
        """Address of a slot, for kernels."""
        return self._address + 4 * RECORD_WORDS * slot

    def is_over(self, slot: int, sequence: int) -> bool:
        """Whether the call of this number has ended. Then :meth:`take` gives all of its outcome."""
        if self._words[RECORD_WORDS * slot + SEQUENCE_WORD] != sequence:
            return False
        order_reads()
        return True

    def is_well(self, slot: int, sequence: int) -> bool:
        """Whether the call of this number has ended, and has found nothing wrong."""
        words, first = self._words, RECORD_WORDS * slot
        if words[first + SEQUENCE_WORD] != sequence:
            return False
        if not _LOADS_KEEP_ORDER:
            order_reads()
        return not (words[first] or words[first + 2] or words[first + 4])  # rows, a fault, a difference

    def is_clear(self, slot: int) -> bool:
        """Whether the call of this slot, as far as it has got, has found nothing wrong."""
        first = RECORD_WORDS * slot
        return not any(self._words[first : first + SEQUENCE_WORD])

    def take(self, slot: int) -> CallOutcome | None:
        """Take the outcome of a finished call from its slot, and clear it; None if all was well."""
        first = RECORD_WORDS * slot
        outcome = self._words[first : first + SEQUENCE_WORD].tolist()
        if not any(outcome):
            return None
        for word in range(first, first + SEQUENCE_WORD):
            self._words[word] = 0
        needed, capacity, faulty, status, differing = outcome
        return CallOutcome(
            needed, capacity, faulty - 1 if faulty else None, status, differing - 1 if differing else None
        )
