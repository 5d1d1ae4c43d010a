"""Memory for kernels that send over the network by NCCL's GIN: a window, a device communicator, words of their own.

A network card writes to the window on behalf of other ranks. So it is given back only when nobody writes any more:
by all ranks together, or behind an abort of the communicator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from tokenloom.backends.nodes.nccl import WINDOW_ALIGNMENT, library_with_headers
from tokenloom.errors import BackendUnavailable, TokenloomError
from tokenloom.jit.nccl_layout import DEVICE_COMM, REQUIREMENTS, Layout, read_layout
from tokenloom.plan import align_up
from tokenloom.runtime.deferred_release import keep_until_idle, wait_for
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.store_notes import poll
from tokenloom.runtime.streams import on_device

CLOSE_S = 10.0
"""Longest wait of a close for the other ranks, and then for NCCL."""
CLOSE_POLL_S = 0.002
"""How often a close looks for the other ranks."""
SETTLE_S = 10.0
"""Longest wait for collective calls that the program has begun."""
TYPES = {2: "PROXY", 3: "GDAKI", 4: "GPI", 5: "EFA_GDA"}
"""Names of GIN's types, by NCCL's ncclNetDeviceType."""
PROXY = 2
"""The one that kernels are compiled for."""
_FULL = 1
"""ncclGinConnectionType_t: every rank reaches every rank. Before NCCL 2.29 there was no other kind."""


class GinMemory:
    """Memory and communicators by which kernels of one rank put to others over the network. Making one is collective.

    Where it is dropped without a close, its memory stays until the process ends.

    Args:
        ranks: a group over NCCL that has made a collective call, so that it has a communicator.
        num_bytes: of the window, the same on all ranks. It is rounded up.
        contexts: streams of puts that keep an order. At most 4 before NCCL 2.29.
        signals: of each context, the same on all ranks.
        state_bytes: device memory for kernels of this rank alone, zeros at first.

    Attributes:
        prelude: what these kernels are compiled behind.
        comm: address of the ncclDevComm, in device memory.
        window: the ncclWindow_t.
        address: of this rank's part of it.
        num_bytes: of that part.
        state: address of ``state_bytes``.
        type_name: GIN's type, as NCCL has made it.

    Raises:
        BackendUnavailable: NCCL, its headers or its communicator lack something, which is named.
        NcclError: NCCL refuses. PeerError: one of these on another rank. PlanMismatch: ranks want different things.
            All ranks raise alike, and what was made is given back.
    """

    def __init__(self, ranks: RankGroup, num_bytes: int, *, contexts: int, signals: int, state_bytes: int) -> None:
        self.num_bytes = align_up(num_bytes, WINDOW_ALIGNMENT)
        self.address = self.window = 0
        self._ranks, self._device_comm = ranks, b""
        self._name = ranks.notes.key(ranks.notes.new_name("network memory"))
        self._is_kept = self._is_closed = False
        try:
            agree(ranks, lambda: self._prepare(contexts, signals), "memory for the network")
            # Each is collective in NCCL, where ranks without one that has failed would wait for ever.
            agree(ranks, self._register, "a window of NCCL")
            agree(ranks, lambda: self._make(contexts, signals, state_bytes), "a device communicator of NCCL")
        except BaseException:
            self._is_closed = True
            for undo in self._undoings():  # kernels have not seen it; what fails too stays
                with suppress(TokenloomError):
                    undo()
            raise

    def _prepare(self, contexts: int, signals: int) -> tuple[dict[str, object], None]:
        """All that a rank can find missing by itself, so that none is alone in a collective call of NCCL."""
        self._nccl, headers = library_with_headers()
        self._layout, self.prelude = read_layout(headers), headers.prelude()
        self._comm = communicator_of(self._ranks)
        with on_device(self._ranks.device):
            self.address = self._nccl.allocate(self.num_bytes)
        values = {
            "NCCL": headers.version,
            "bytes of a window": self.num_bytes,
            "contexts": contexts,
            "signals": signals,
        }
        return values, None

    def _register(self) -> tuple[dict[str, object], None]:
        with on_device(self._ranks.device):
            self.window = self._nccl.register_window(self._comm, self.address, self.num_bytes)
        return {}, None

    def _make(self, contexts: int, signals: int, state_bytes: int) -> tuple[dict[str, object], None]:
        device = self._ranks.device
        settle(self._ranks)
        with on_device(device):
            requirements = requirements_of(self._layout, contexts, signals)
            self._device_comm = self._nccl.create_device_comm(
                self._comm, requirements, self._layout.types[DEVICE_COMM][0]
            )
            self._check_device_comm(contexts)
            copied = torch.frombuffer(bytearray(self._device_comm), dtype=torch.uint8).to(device, copy=True)
            state = torch.zeros(state_bytes, dtype=torch.uint8, device=device)
        keep_until_idle(self, device, copied, state)
        self.comm, self.state = copied.data_ptr(), state.data_ptr()
        wait_for(device)
        return {}, None

    def _check_device_comm(self, contexts: int) -> None:
        """NCCL takes some requirements for hints."""

        def value(name: str) -> int:
            return self._layout.device_comm_value(self._device_comm, name)

        place = (value("rank"), value("nRanks"))
        if place != (self._ranks.rank, self._ranks.num_ranks):
            raise BackendUnavailable(
                f"NCCL's communicator has this process as rank {place[0]} of {place[1]}, the group as "
                f"{self._ranks.rank} of {self._ranks.num_ranks}; make a process group of its own for the communicator"
            )
        if value("ginContextCount") < contexts:
            raise BackendUnavailable(
                f"NCCL made {value('ginContextCount')} contexts of GIN, expected {contexts}; NCCL_DEBUG=INFO says why"
            )
        types = "ginTypes" if f"{DEVICE_COMM}.ginTypes" in self._layout.fields else "ginNetDeviceTypes"
        kind = value(types) & 0xFF  # of the first; the others are like it
        self.type_name = TYPES.get(kind, "unknown to tokenloom")
        if kind != PROXY:
            raise BackendUnavailable(
                f"GIN is of type {kind}, {self.type_name}, expected {PROXY}, PROXY; set NCCL_GIN_TYPE={PROXY}"
            )

    # -- giving it back -------------------------------------------------------------------------------------

    def keep(self) -> None:
        """A wait has expired. Late ranks may still write, so nothing goes back before :meth:`free_after_abort`."""
        self._is_kept = True

    def close(self) -> bool:
        """Give everything back, when the work of this rank's device is done. All ranks close, and none sends any more.

        Returns:
            Whether it is given back. Not after :meth:`keep`, and not if other ranks, or NCCL, take longer than
            CLOSE_S: then it stays until the process ends.

        Raises:
            NcclError: NCCL refuses; what comes later in the order stays.
        """
        if self._is_closed or self._is_kept:
            return self._is_closed
        until = time.monotonic() + CLOSE_S
        # NCCL's own calls have no limit, and memory must not go while another rank's kernel puts into it.
        if not wait_for(self._ranks.device) or not self._all_close(until):
            self._is_kept = True
            return False
        self._is_kept = True  # what NCCL does not take back stays
        self._is_closed = _ends_in(CLOSE_S, self._give_back)
        return self._is_closed

    def free_after_abort(self) -> None:
        """Free the memory of the window. The communicator was aborted, which has ended the window and puts into it.

        Raises:
            NcclError: NCCL refuses.
        """
        wait_for(self._ranks.device)
        if self.address:
            with on_device(self._ranks.device):
                self._nccl.free(self.address)
        self.address, self._is_closed = 0, True

    def _give_back(self) -> None:
        with on_device(self._ranks.device):
            for undo in self._undoings():
                undo()

    def _undoings(self) -> list[Callable[[], None]]:
        """List the functions that release what exists, the newest first."""
        steps: list[Callable[[], None]] = []
        if self._device_comm:
            steps.append(lambda: self._nccl.destroy_device_comm(self._comm, self._device_comm))
        if self.window:
            steps.append(lambda: self._nccl.deregister_window(self._comm, self.window))
        if self.address:
            steps.append(lambda: self._nccl.free(self.address))
        return steps

    def _all_close(self, until: float) -> bool:
        """Whether all ranks have come to this close, the same on all. By the store, which has no part in what NCCL
        does. NCCL's calls are collective, so if one rank has waited in vain, nobody makes them."""
        notes, num_ranks = self._ranks.notes, self._ranks.num_ranks
        if num_ranks == 1:
            return True
        keys = [f"{self._name}/{rank}" for rank in range(num_ranks)]
        verdict, passed = f"{self._name}/verdict", f"{self._name}/passed"
        notes.call("set", keys[self._ranks.rank], b"closes")
        poll(lambda: notes.call("check", keys), until - time.monotonic(), CLOSE_POLL_S)
        if not notes.decide_at(verdict, bool(notes.call("check", keys))):
            return False
        if notes.call("add", passed, 1) == num_ranks:
            notes.delete([*keys, verdict, passed])
        return True


def settle(ranks: RankGroup) -> None:
    """Wait until torch has seen the end of all collective calls of a group over NCCL.

    Until then its watchdog asks the communicator for errors, and NCCL 2.28 crashes if it is asked while it makes GIN's
    connections.

    Raises:
        BackendUnavailable: they take longer than SETTLE_S.
    """
    if ranks.process_group is not None and not _ends_in(SETTLE_S, ranks.process_group._wait_for_pending_works):
        raise BackendUnavailable(
            f"collective calls of the process group have not ended within {SETTLE_S:g} s; make the communicator when "
            "all ranks have made them"
        )


def communicator_of(ranks: RankGroup) -> int:
    """The ncclComm_t of a group's process group, as torch made it.

    Raises:
        BackendUnavailable: there is none.
    """
    group, device = ranks.process_group, ranks.device
    if group is None or "nccl" not in dist.get_backend_config(group):
        raise BackendUnavailable(f"GIN needs a process group over NCCL, this one is over {ranks.transport}")
    backend = group._get_backend(torch.device("cuda"))
    if not hasattr(backend, "_comm_ptr"):
        raise BackendUnavailable(
            f"torch {torch.__version__} does not tell a process group's communicator (_comm_ptr); use 2.11 or newer"
        )
    with on_device(device):
        comm = int(backend._comm_ptr())
    if not comm:
        raise BackendUnavailable(
            "the process group has no communicator of NCCL yet; torch makes it at the first collective: call "
            "torch.distributed.all_reduce once"
        )
    return comm


def requirements_of(layout: Layout, contexts: int, signals: int) -> bytes:
    """A ``ncclDevCommRequirements`` for GIN between all ranks, also those that NCCL would reach in another way."""
    values = {"ginForceEnable": 1, "ginContextCount": contexts, "ginSignalCount": signals}
    if f"{REQUIREMENTS}.ginConnectionType" in layout.fields:
        values["ginConnectionType"] = _FULL
    return layout.requirements(**values)


def _ends_in(limit_s: float, work: Callable[[], None]) -> bool:
    """Whether some work of NCCL has ended within a limit; it goes on in a thread if not. Raises what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="tokenloom: a call of NCCL with a limit")
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    return not thread.is_alive()
