"""Symmetric memory: one buffer on every rank, which all ranks of an NVLink domain can write."""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tokenloom.errors import PeerTimeout
from tokenloom.jit.kernel import checked, load_driver, make_current
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree

PHASES = {1: "the opening of a call", 2: "dispatch, rows", 3: "combine, partial sums"}
"""What device/sync/wait.cuh calls Phase, in words."""
REGION_ALIGNMENT_BYTES = 256
CLOSE_TOGETHER_S = 0.2
"""How long a close waits for the other ranks to close too, so that the memory is free when it returns."""
POLLS_BETWEEN_LOOKS = 64
_FAULT_WORDS = 6  # FaultRecord of device/sync/wait.cuh
_RECORD_WORDS = 8  # CallRecord of device/sync/call.cuh


@dataclass(frozen=True)
class Regions:
    """Where things lie in a symmetric buffer: name -> (offset, size), in bytes."""

    places: dict[str, tuple[int, int]]
    total_bytes: int

    @staticmethod
    def of(sizes: Iterable[tuple[str, int]]) -> Regions:
        """Regions of the given sizes, one after another, each aligned."""
        places, offset = {}, 0
        for name, size in sizes:
            places[name] = (offset, size)
            offset += -(-size // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
        return Regions(places, offset)

    def offset(self, name: str) -> int:
        """First byte of a region."""
        return self.places[name][0]


class SymmetricBuffer:
    """A buffer with the same regions on every rank, and the addresses of all of them. Making one is collective.

    Memory is shared through the driver's IPC handles. (torch's symmetric memory numbers its exchanges per process, so
    ranks that were in different groups before would wait for each other forever.)

    Args:
        regions: what it holds.
        ranks: of one NVLink domain, on one host.

    Raises:
        torch.OutOfMemoryError: there is no room for it here. PeerError: elsewhere.

    Attributes:
        addresses: every rank's address of its buffer, as this rank uses it.
        peers: int64 [W], the same on the device.
    """

    def __init__(self, regions: Regions, ranks: RankGroup) -> None:
        self.regions = regions
        driver = load_driver()
        _free_unmapped()
        with torch.cuda.device(ranks.device):
            torch.cuda.current_stream().synchronize()  # makes torch's context current
            self._address = 0

            def share() -> tuple[dict[str, int], tuple[bytes | None, str]]:
                self._address = _allocate(regions.total_bytes)
                handle = checked(driver.cuIpcGetMemHandle(self._address)) if ranks.num_ranks > 1 else None
                self._memory = torch.as_tensor(_Bytes(self._address, regions.total_bytes), device=ranks.device)
                self._memory.zero_()
                torch.cuda.current_stream().synchronize()
                # No rank gets an address before its owner has cleared the flags behind it.
                return {"bytes of a buffer": regions.total_bytes}, (
                    handle and bytes(handle.reserved),
                    uuid.uuid4().hex,
                )

            try:
                shared = agree(ranks, share, "sharing memory")
            except PeerTimeout:  # others may have come further, and map it
                raise
            except Exception:
                if self._address:
                    driver.cuMemFree(self._address)
                raise
            opened = []
            self.addresses: list[int] = []
            for rank, (reserved, _) in enumerate(shared):
                if rank == ranks.rank:
                    self.addresses.append(self._address)
                    continue
                theirs = driver.CUipcMemHandle()
                theirs.reserved = reserved
                flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
                opened.append(int(checked(driver.cuIpcOpenMemHandle(theirs, flag))))
                self.addresses.append(opened[-1])
            self.peers = torch.tensor(self.addresses, dtype=torch.int64, device=ranks.device)
        self._shared = _Shared(self._address, opened, ranks, f"unmapped {shared[0][1]}")
        self._release = weakref.finalize(self, self._shared.release)

    def close(self) -> None:
        """Release the memory, which no rank may use any more: every call that this rank took part in is over.

        A rank leaves a call only when all that others write here for it has arrived, so a rank may close as soon as
        its own work is done. Memory is freed when all ranks have let go of it: at once where they close together,
        else at a later close or at the next buffer. Tensors that view the buffer are invalid afterwards.
        """
        self._release()
        deadline = time.monotonic() + CLOSE_TOGETHER_S
        while self._shared in _unmapped and time.monotonic() < deadline:
            time.sleep(0.002)
            _free_unmapped()

    def abandon(self) -> None:
        """Keep the memory for good: a rank that is late may still write to it."""
        self._release.detach()

    def copy_to(self, rank: int, offset: int, values: torch.Tensor) -> None:
        """Copy a contiguous tensor to another rank's buffer, on the current stream, which takes no SMs.

        Args:
            offset: first byte there.
        """
        if values.numel():
            make_current(values.device.index)
            stream = torch.cuda.current_stream(values.device).cuda_stream
            to, num_bytes = self.addresses[rank] + offset, values.numel() * values.element_size()
            checked(load_driver().cuMemcpyDtoDAsync(to, values.data_ptr(), num_bytes, stream))

    def view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The first values of a region, as a tensor."""
        offset, size = self.regions.places[name]
        num_bytes = dtype.itemsize * int(torch.Size(shape).numel())
        assert num_bytes <= size, f"region {name} has {size} bytes, {num_bytes} were asked for"
        return self._memory[offset : offset + num_bytes].view(dtype).view(shape)


@dataclass(eq=False)
class _Shared:
    """Memory that other ranks map, and theirs that this one maps. What is freed while others map it may come back at
    its old address, and they could not map it again."""

    address: int
    opened: list[int]
    ranks: RankGroup
    name: str

    def release(self) -> None:
        driver = load_driver()
        with torch.cuda.device(self.ranks.device):
            torch.cuda.synchronize()
            for peer in self.opened:
                driver.cuIpcCloseMemHandle(peer)
        if self.opened:
            self.ranks.post_note(self.name, "yes")
        _unmapped.append(self)
        _free_unmapped()


_unmapped: list[_Shared] = []
"""What this rank has let go of, and some other rank may still map."""


def _free_unmapped() -> None:
    for shared in list(_unmapped):
        others = [rank for rank in range(shared.ranks.num_ranks) if rank != shared.ranks.rank]
        if all(shared.ranks.read_note(shared.name, rank) for rank in others):
            _unmapped.remove(shared)
            with torch.cuda.device(shared.ranks.device):
                load_driver().cuMemFree(shared.address)


def _allocate(num_bytes: int) -> int:
    driver = load_driver()
    for _ in range(2):
        status, address = driver.cuMemAlloc(num_bytes)
        if status != driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return int(checked((status, address)))
        torch.cuda.empty_cache()  # torch keeps what it has freed
    free, _ = torch.cuda.mem_get_info()
    raise torch.OutOfMemoryError(
        f"a buffer of {num_bytes / 1e9:.2f} GB for other GPUs to write does not fit into {free / 1e9:.2f} GB of free "
        "memory; pass a smaller max_tokens_per_rank, or make the first call before other memory is taken"
    )


class _Bytes:
    """Memory that torch did not allocate, for ``torch.as_tensor``."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class FaultFlag:
    """Where kernels record a wait that expired: pinned host memory, and a word on the device that says so.

    Attributes:
        record_address: of the record in pinned memory, for kernels.
        claimed: int32 [1] on the device.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank = rank
        self._record = torch.zeros(_FAULT_WORDS, dtype=torch.int32, pin_memory=True)
        self._words = self._record.numpy()
        self.record_address = self._record.data_ptr()
        self.claimed = torch.zeros(1, dtype=torch.int32, device=device)

    def error(self) -> PeerTimeout | None:
        """The fault that a kernel recorded, if one did."""
        if not self._words[0]:
            return None
        _, peer, phase, epoch, wanted, seen = self._words.tolist()
        cause = f"its flag shows {seen}, {wanted} was wanted"
        return PeerTimeout(self._rank, [peer], PHASES.get(phase, f"phase {phase}"), epoch, cause)


class HostCounts:
    """Pinned host memory where a call leaves counts while it still runs: a sequence number, then the counts.

    Attributes:
        address: for kernels. sequence: of the call that writes next, or has written last.
    """

    def __init__(self, num_counts: int) -> None:
        self._memory = torch.zeros(1 + num_counts, dtype=torch.int32, pin_memory=True)
        self._words = self._memory.numpy()
        self.address = self._memory.data_ptr()
        self.sequence = 0

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
        return self._words[1:].tolist()


@dataclass(frozen=True)
class CallOutcome:
    """What the ranks found wrong with a call, as all of them see it alike.

    Attributes:
        needed_rows: rows that the fullest rank needs, if over the capacity, else 0.
        capacity: the capacity then.
        faulty_rank: lowest rank that had a fault of its own, or None. status: which it announced.
        differing_rank: lowest rank with another value than rank 0 in a field, or None.
        field, theirs, rank0s: which field, by number, and both values.
    """

    needed_rows: int
    capacity: int
    faulty_rank: int | None
    status: int
    differing_rank: int | None
    field: int
    theirs: int
    rank0s: int


class CallRecords:
    """Slots in pinned host memory where kernels write what is wrong with a call, and nothing otherwise."""

    def __init__(self, num_slots: int) -> None:
        self._memory = torch.zeros(num_slots, _RECORD_WORDS, dtype=torch.int32, pin_memory=True)
        self._words = self._memory.numpy()

    def address(self, slot: int) -> int:
        """Of a slot, for kernels."""
        return self._memory[slot].data_ptr()

    def is_clear(self, slot: int) -> bool:
        """Whether the call of this slot, as far as it has got, has found nothing wrong."""
        return not self._words[slot].any()

    def take(self, slot: int) -> CallOutcome | None:
        """What a finished call left in its slot, which is cleared; None if all was well."""
        words = self._words[slot]
        if not words.any():
            return None
        needed, capacity, faulty, status, differing, field, theirs, rank0s = words.tolist()
        words[:] = 0
        faulty_rank = faulty - 1 if faulty else None
        differing_rank = differing - 1 if differing else None
        return CallOutcome(needed, capacity, faulty_rank, status, differing_rank, field, theirs, rank0s)
