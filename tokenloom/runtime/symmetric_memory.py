"""Symmetric memory: one buffer on every rank, which all ranks of its node can write.

Memory that others may write is freed when nobody can write it any more. Each rank lets go of a buffer by itself: it
waits for its own kernels, unmaps the others' memory, and leaves a note. A rank frees its memory once

- every other rank has left its note, or its process has ended (which only ranks of one host can tell, by its PID);
- and no tensor views the memory.

There is no other rule: not after a timeout, where a late rank may still write, nor after a failed construction, where
others may have come further. A rank that hangs for good therefore keeps its peers' memory until its process ends. So
does one that cannot leave its note because the host of the store is gone.

What cannot be freed yet is tried again at each construction, check and close
(:mod:`tokenloom.runtime.deferred_release`).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tokenloom.jit.kernel import checked, load_driver, make_current
from tokenloom.runtime.collectives import all_have_ended
from tokenloom.runtime.deferred_release import release_dropped, undo_later, undo_when_dropped, wait_for
from tokenloom.runtime.process_identity import ProcessIdentity
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.store_notes import poll

ALIGNMENT_BYTES = 256
"""Of every part of a buffer."""
GRANULARITY_BYTES = 2 << 20
"""The driver cuts smaller allocations out of a slab of this size, and a handle would open the whole slab to others."""
CLOSE_TOGETHER_S = 0.2
"""How long a close waits for the other ranks to close too, so that the memory is free when it returns."""
CLOSE_POLL_S = 0.002
"""How often it looks."""


@dataclass(frozen=True)
class BufferLayout:
    """Where the parts of a symmetric buffer lie: name -> (offset, size), in bytes."""

    places: dict[str, tuple[int, int]]
    total_bytes: int

    @staticmethod
    def of(sizes: Iterable[tuple[str, int]]) -> BufferLayout:
        """Parts of the given (name, bytes), one after another, each aligned."""
        places, offset = {}, 0
        for name, size in sizes:
            places[name] = (offset, size)
            offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return BufferLayout(places, offset)

    def offset(self, name: str) -> int:
        """First byte of a part."""
        return self.places[name][0]


class SymmetricBuffer:
    """A buffer of the same layout on every rank, and the addresses of all of them. Making one is collective.

    Memory is shared through the driver's IPC handles. (torch's symmetric memory numbers its exchanges per process, so
    ranks that were in different groups before would wait for each other forever.)

    Args:
        layout: what it holds, the same on all ranks.
        ranks: the group, whose topology says which ranks share a node. Those of other nodes have buffers among
            themselves.
        fill: every byte of it at first.

    Raises:
        torch.OutOfMemoryError: there is no room for it here. RuntimeError: the driver refuses. PeerError: either of
            them, on another rank. All ranks raise alike, and the memory is given back.

    Attributes:
        addresses: every rank's address of its buffer, as this rank uses it; for ranks of other nodes, and for masked
            ranks, which have none, that of this rank's own.
        peers: int64 [W], the same on the device.
    """

    def __init__(self, layout: BufferLayout, ranks: RankGroup, fill: int = 0) -> None:
        release_dropped()
        self.layout = layout
        self._shared = _Shared(ranks)
        self._memory: torch.Tensor | None = None
        try:
            offers = agree(ranks, lambda: self._shared.allocate(layout.total_bytes, fill), "sharing memory")
            agree(ranks, lambda: self._shared.map_all(offers), "mapping shared memory")
            self.addresses, self.peers = self._shared.addresses, self._shared.peers
            self._memory = self._shared.tensor()
        except BaseException as error:
            # Of the others some may have come further than this rank, and write a note only when they close.
            undo_later(self._shared.release)
            if isinstance(error, Exception):
                _wait_for_others([self._shared])
            raise
        self._finalizer = undo_when_dropped(self, self._shared.release)

    def close(self) -> None:
        """Let go of the buffer, after all work of this rank's device.

        A rank may close as soon as its own calls are over: it leaves a call only when all that others write here for
        it has arrived. After a timeout that is not so, and it may close too: the memory stays until the others let
        go. Tensors that view the buffer stay as they are, and keep its memory.
        """
        self._memory = None
        if self._finalizer.detach() is not None:
            undo_later(self._shared.release)
            release_dropped()

    @property
    def others(self) -> frozenset[int]:
        """The other ranks of this node that have this buffer."""
        return self._shared.others

    def ended_ranks(self) -> list[int]:
        """Ranks that have this buffer and whose process has ended for certain."""
        return [rank for rank, process in self._shared.processes.items() if process.has_ended()]

    def copy_to(self, rank: int, offset: int, values: torch.Tensor) -> None:
        """Copy a contiguous tensor to another rank's buffer, on the current stream, which takes no SMs.

        Args:
            offset: first byte there.
        """
        if values.numel():
            with torch.cuda.device(values.device):
                make_current(values.device.index)
                stream = torch.cuda.current_stream(values.device).cuda_stream
                to, num_bytes = self.addresses[rank] + offset, values.numel() * values.element_size()
                checked(load_driver().cuMemcpyDtoDAsync(to, values.data_ptr(), num_bytes, stream))

    def view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The first values of a part, as a tensor. It keeps the memory, also after the buffer was closed."""
        offset, size = self.layout.places[name]
        num_bytes = dtype.itemsize * int(torch.Size(shape).numel())
        assert num_bytes <= size, f"{name} has {size} bytes, {num_bytes} were asked for"
        return self.bytes(offset, num_bytes).view(dtype).view(shape)

    def bytes(self, begin: int, num_bytes: int) -> torch.Tensor:
        """So many bytes of it, uint8, which may belong to several parts. They keep the memory, as a view does."""
        assert self._memory is not None, "the buffer was closed"
        return self._memory[begin : begin + num_bytes]


def close_together(buffers: Iterable[SymmetricBuffer]) -> None:
    """Close buffers, as all ranks do now; where they all come soon, the memory is free when this returns."""
    buffers = list(buffers)
    for buffer in buffers:
        buffer.close()
    _wait_for_others([buffer._shared for buffer in buffers])


@dataclass(frozen=True)
class _Offer:
    """The offer of a rank's memory to the others: the driver's handle, and who would have to end to give it up."""

    rank: int
    handle: bytes
    process: ProcessIdentity


class _Shared:
    """Memory that other ranks map, and theirs that this rank maps: all that has to be undone in the end.

    What is freed while others map it may come back at its old address, and they could not map it again.

    Attributes:
        is_freed: nothing is left to be undone.
        others: ranks that have this memory too.
        processes: of them.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self.addresses: list[int] = []
        self.peers = torch.empty(0, dtype=torch.int64, device=ranks.device)
        self.is_freed = False
        self._device, self._rank = ranks.device, ranks.rank
        self._notes = ranks.notes
        self._name = self._notes.key(self._notes.new_name("buffer"))  # the notes may move
        node = ranks.topology.node_of[ranks.rank]
        self._freed = f"{self._name}/freed/{node}"
        self._neighbours = frozenset(ranks.topology.nodes[node]) - {ranks.rank}
        self.others = self._neighbours - ranks.masked
        self._process = os.getpid()
        self._address = self._num_bytes = 0
        self._opened: list[int] = []
        self.processes: dict[int, ProcessIdentity] = {}
        self._known_processes = ranks.processes
        self._memory: weakref.ref[_Memory] | None = None
        self._has_let_go = False

    # -- making it ------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, fill: int) -> tuple[dict[str, int], _Offer]:
        """Filled memory, and what the others need to map it."""
        self._num_bytes = max(1, -(-num_bytes // GRANULARITY_BYTES)) * GRANULARITY_BYTES
        handle = b""
        with _on(self._device):
            self._address = _allocate(self._num_bytes)
            if self._neighbours:
                handle = bytes(checked(load_driver().cuIpcGetMemHandle(self._address)).reserved)
            self.tensor().fill_(fill)
            wait_for(self._device)  # no rank gets an address before its owner has filled what lies behind it
        return {"bytes of a buffer": num_bytes}, _Offer(self._rank, handle, ProcessIdentity.own())

    def map_all(self, offers: list[_Offer]) -> tuple[dict[str, int], None]:
        """Map the memory of all ranks."""
        driver = load_driver()
        self.others = frozenset(rank for rank in self._neighbours if offers[rank].rank == rank)
        self.processes = {rank: offer.process for rank, offer in enumerate(offers) if rank in self.others}
        self._known_processes |= self.processes
        with _on(self._device):
            for rank, offer in enumerate(offers):
                if rank not in self.others:
                    self.addresses.append(self._address)
                    continue
                handle = driver.CUipcMemHandle()
                handle.reserved = offer.handle
                flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
                self._opened.append(int(checked(driver.cuIpcOpenMemHandle(handle, flag))))
                self.addresses.append(self._opened[-1])
            self.peers = torch.tensor(self.addresses, dtype=torch.int64, device=self._device)
        return {}, None

    def tensor(self) -> torch.Tensor:
        """The memory as uint8 [bytes]. Its storage, and so every view of it, owns the same :class:`_Memory`."""
        memory = self._memory() if self._memory else None
        if memory is None:
            memory = _Memory(self._address, self._num_bytes)
            self._memory = weakref.ref(memory)
        return _tensor_over(memory, self._device)

    # -- undoing it -----------------------------------------------------------------------------------------

    def release(self) -> bool:
        """Let go, and free the memory if all others have let go of it and nobody looks at it; see :data:`Undo`."""
        if self.is_freed or os.getpid() != self._process:
            return True
        if not all_have_ended():
            return False
        if not self._has_let_go:
            if not wait_for(self._device):
                return False
            self._let_go()
        # Waited for again: tensors that are gone by now may have been read since.
        if self.is_viewed() or self._waits_for_others() or not wait_for(self._device):
            return False
        self._free()
        return True

    def _waits_for_others(self) -> bool:
        """Whether another rank may still write to the memory."""
        if not self.processes:  # it was given up while it was made, maybe before others began with it
            self.others -= {rank for rank in self.others if self._notes.has_skipped(self._name, rank)}
        keys = {rank: self._note(rank) for rank in self.others}
        if not keys or self._notes.call("check", list(keys.values())):
            return False
        processes = self.processes or self._known_processes
        for rank, key in keys.items():
            ended = rank in processes and processes[rank].has_ended()
            if not ended and not self._notes.call("check", [key]):
                return True
        return False

    def _let_go(self) -> None:
        """Unmap the others' memory and say so; the device has done all its work."""
        with _on(self._device):
            while self._opened:
                checked(load_driver().cuIpcCloseMemHandle(self._opened[-1]))
                self._opened.pop()
        if self.others:
            self._notes.call("set", self._note(self._rank), b"let go")
        self._has_let_go = True

    def is_viewed(self) -> bool:
        """Whether a tensor over the memory is left."""
        return self._memory is not None and self._memory() is not None

    def _free(self) -> None:
        with _on(self._device):
            if self._address:
                checked(load_driver().cuMemFree(self._address))
        self._address = 0
        self.is_freed = True
        if self.others and self._notes.call("add", self._freed, 1) == len(self.others) + 1:
            self._notes.delete([*map(self._note, [self._rank, *self.others]), self._freed])

    def _note(self, rank: int) -> str:
        return f"{self._name}/{rank}"


def _wait_for_others(shared: list[_Shared]) -> None:
    """Release what is queued; give other ranks, which do the same now, a moment to let go."""

    def are_done() -> bool:
        release_dropped()
        return all(each.is_freed or each.is_viewed() for each in shared)

    poll(are_done, CLOSE_TOGETHER_S, CLOSE_POLL_S)


class _Memory:
    """Memory that torch did not allocate; it lives as long as a tensor over it, or a view of that."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_over(memory: _Memory, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(memory, dtype=torch.uint8, device=device)


class _Lent(_Memory):
    """Memory of a tensor that somebody holds as a tensor of their own."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory.data_ptr(), memory.numel())
        self._kept = memory


def lent(memory: torch.Tensor) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """The same memory with a storage of its own, and what tells whether that one is held.

    Args:
        memory: uint8, one dimension, contiguous.

    Returns:
        A tensor over the memory, which it keeps; and a reference that gives None once neither that tensor is left, nor
        a view of it, nor anything else with its storage.
    """
    if memory.is_cuda:
        owner = _Lent(memory)
        return _tensor_over(owner, memory.device), weakref.ref(owner)
    array: Any = (ctypes.c_uint8 * memory.numel()).from_address(memory.data_ptr())
    array.kept = memory
    return torch.frombuffer(array, dtype=torch.uint8), weakref.ref(array)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make the device's primary context, which torch uses, current: threads may have none, or another's."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()
        yield


def _allocate(num_bytes: int) -> int:
    """Memory of the current device."""
    driver = load_driver()
    for _ in range(2):
        status, address = driver.cuMemAlloc(num_bytes)
        if status != driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return int(checked((status, address)))
        torch.cuda.empty_cache()  # torch keeps what it has freed
    free, _ = torch.cuda.mem_get_info()
    raise torch.OutOfMemoryError(
        f"a buffer of {num_bytes / 1e9:.2f} GB for other GPUs to write does not fit into {free / 1e9:.2f} GB of free "
        "memory; pass a smaller max_tokens_per_rank"
    )
