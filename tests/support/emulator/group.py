"""Ranks of backend "nvlink" on the emulator: a thread each, with the backend's own host code, on CPU tensors."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tokenloom as tl
from tests.support import cases
from tests.support.emulator import Emulator, gemm
from tests.support.emulator.graphs import FakeReferences, is_capturing, launch_or_keep
from tests.support.emulator.network import AllToAll, device_comm, signals_of
from tests.support.emulator.patches import in_any_order
from tokenloom import reference
from tokenloom.backends import registry
from tokenloom.backends.nodes import gin as nodes_gin
from tokenloom.backends.nodes import memory as nodes_memory
from tokenloom.backends.nodes.backend import NodesBackend
from tokenloom.backends.nodes.gin import GIN
from tokenloom.backends.nodes.hierarchical.backend import NetworkBackend
from tokenloom.backends.nodes.hierarchical.nvlink_inside import NvlinkInside
from tokenloom.backends.nodes.padded import PADDED
from tokenloom.backends.peers import backend as backend_module
from tokenloom.backends.peers import buffers, opening, outcomes
from tokenloom.backends.peers.backend import NvlinkBackend
from tokenloom.comm import communicator, communicators_by_shape
from tokenloom.comm.balance import Balance
from tokenloom.comm.calls import Kinds
from tokenloom.comm.engine import Engine
from tokenloom.comm.placement import placement_of, plan_of_slots
from tokenloom.errors import PeerTimeout
from tokenloom.inference import peer_weights
from tokenloom.jit import kernel
from tokenloom.jit.compiler import NO_PRELUDE
from tokenloom.plan import Plan
from tokenloom.runtime import byte_carriers, kernel_reports
from tokenloom.runtime.collectives import Transfer
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.siblings import Siblings
from tokenloom.runtime.store_notes import StoreNotes
from tokenloom.runtime.symmetric_memory import BufferLayout
from tokenloom.runtime.topology import pretended
from tokenloom.runtime.turns import Turn

CPU = torch.device("cpu")
NUM_SMS, MAX_SMS = 2, 4
STUCK_S = 60.0
"""A host that waits longer finds the group stuck."""
LATE_S = 1.0
"""When a host that waits for its GPU looks for ranks that are late, where they are masked."""
NOWHERE = 1
"""The address of memory that no kernel may touch: the process stops with a fault."""
TURNS_PER_NS = 10**12 / 30e9
"""Deadlines of kernels are in turns of fibers, which are the emulator's time: hosts that compile are slow."""


class Ended(BaseException):
    """Ends the thread of a rank that was killed."""

    known_to_all = True  # a process that ends tells nobody


class Group:
    """What the ranks of one run share."""

    def __init__(self, folder: Path, num_ranks: int, seed: int) -> None:
        self.emulator = Emulator(folder, num_ranks, seed)
        self.num_ranks = num_ranks
        self.lock = threading.Lock()
        self.meeting = threading.Barrier(num_ranks)
        self.said: dict[int, Any] = {}
        self.memory: dict[str, list[torch.Tensor]] = {}
        self.store = torch.distributed.HashStore()
        self.kept: list[tuple[int, int, list[torch.Tensor]]] = []
        self.pools: dict[int, list[str]] = {}
        self.failed = False
        self.ended: set[int] = set()

    def kill(self, rank: int) -> None:
        """End a rank as a signal ends its process: its kernels at once, its host where it next looks at them."""
        self.ended.add(rank)
        self.emulator.kill(rank)

    def kill_within(self, turns: int, rank: int) -> None:
        """End a rank when the emulator has gone on by so many turns, or has stood still for two seconds."""

        def kill() -> None:
            until = self.emulator.now() + turns
            limit = time.monotonic() + 2.0
            while self.emulator.now() < until and time.monotonic() < limit:
                time.sleep(0)
            self.kill(rank)

        threading.Thread(target=kill).start()

    def keep(self, rank: int, launch: int, tensors: list[torch.Tensor]) -> None:
        """Keep memory until a kernel has finished: streams do so on GPUs, where memory is freed in their order."""
        with self.lock:
            self.kept = [each for each in self.kept if self.emulator.finished(each[0]) < each[1]]
            self.kept.append((rank, launch, tensors))

    def pump(self, _: float = 0.0) -> None:
        """Let kernels run for a while, as time does on GPUs."""
        if here.rank in self.ended:
            raise Ended
        if self.failed:
            raise RuntimeError("another rank failed")
        self.emulator.run(20_000)
        time.sleep(0)

    def share(self, ranks: Any, what: str, num_bytes: int, fill: int = 0) -> list[torch.Tensor]:
        """Memory of every rank, filled, at a multiple of 128, the same for all ranks that ask for it."""
        return self.share_named(ranks.notes.key(ranks.notes.new_name(what)), num_bytes, fill)

    def share_named(self, name: str, num_bytes: int, fill: int = 0) -> list[torch.Tensor]:
        """The same, under a name."""
        self.drain(here.rank)  # not inside, where other ranks could not launch what its kernels wait for
        with self.lock:
            if name not in self.memory:
                parts = [torch.full((num_bytes + 128,), fill, dtype=torch.uint8) for _ in range(self.num_ranks)]
                self.memory[name] = [each[-each.data_ptr() % 128 :][:num_bytes] for each in parts]
        return self.memory[name]

    def drain(self, rank: int) -> None:
        """Wait until all kernels of a rank have finished."""
        began = time.monotonic()
        here.draining = True
        try:
            while self.emulator.finished(rank) < here.launched:
                self.pump()
                waited_s = time.monotonic() - began
                assert waited_s < STUCK_S, f"rank {rank} is stuck: kernels wait for what never comes"
                if waited_s > LATE_S and here.late is not None:
                    here.late.launcher.outcomes._look_around(
                        FakeStream(rank)
                    )  # the end of a deadline, for who waits on the GPU
        finally:
            here.draining = False


class _Here(threading.local):
    """The rank whose thread this is."""

    group: Group
    rank: int
    launched = 0
    collectives = 0
    draining = False
    late: NvlinkBackend | None = None


here = _Here()


def _tensors_around() -> Iterator[torch.Tensor]:
    """All tensors that the callers know, in their variables or a few steps from there."""
    seen: set[int] = set()

    def tensors_of(value: object, depth: int) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
            return
        if depth == 0 or id(value) in seen or isinstance(value, type | ModuleType | str | int | Group):
            return
        seen.add(id(value))
        if isinstance(value, list | tuple | deque):
            inside: Iterable[object] = value
        elif isinstance(value, dict):
            inside = value.values()
        else:
            inside = getattr(value, "__dict__", {}).values()
        for each in list(inside):
            yield from tensors_of(each, depth - 1)

    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not threading.Thread.run.__code__:
        for value in list(frame.f_locals.values()):
            yield from tensors_of(value, 4)
        frame = frame.f_back  # type: ignore[assignment]


class FakeKernel:
    """Stands for tokenloom.jit.kernel.Kernel."""

    def __init__(self, spec: Any, device_index: int | None) -> None:
        self.spec, self.args = spec, spec.args()

    def launch(self, blocks: int, stream: int) -> None:
        if here.rank in here.group.ended:
            raise Ended
        args, tensors = type(self.args).from_buffer_copy(self.args), list(_tensors_around())
        if hasattr(args, "call"):
            args.call.timeout_ns = int(args.call.timeout_ns * TURNS_PER_NS)
            args.call.open_timeout_ns = int(args.call.open_timeout_ns * TURNS_PER_NS)

        def run() -> None:
            here.launched += 1
            here.group.keep(here.rank, here.launched, tensors)
            here.group.emulator.launch(here.rank, self.spec, args, blocks)

        launch_or_keep(run)


class FakeBuffer:
    """Stands for SymmetricBuffer: buffers of one name are parts of the same one."""

    def __init__(self, layout: BufferLayout, ranks: Any, fill: int = 0) -> None:
        group = here.group
        self.layout = layout
        self._members = ranks.members
        if ranks.whole is not ranks:  # as a SymmetricBuffer, whose ranks agree with those of all nodes
            assert set(ranks.whole.all_gather_object("a buffer", "")) == {"a buffer"}
        parts = group.share(ranks, f"buffer of {self._members}", layout.total_bytes, fill)
        parts = [parts[member] for member in self._members]
        self.addresses = [each.data_ptr() for each in parts]
        there = ranks.topology.nodes[ranks.topology.node_of[ranks.rank]]
        if ranks.masks_late:  # as ranks tell each other in truth
            there = [rank for rank, came in enumerate(ranks.all_gather_object(True, "sharing memory")) if came]
        self.others = frozenset(there) - ranks.masked - {ranks.rank}
        for rank in set(range(ranks.num_ranks)) - self.others - {ranks.rank}:
            self.addresses[rank] = NOWHERE
        self.peers = torch.tensor(self.addresses, dtype=torch.int64)
        self._memory = parts[ranks.rank]

    def view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        offset, _ = self.layout.places[name]
        size = dtype.itemsize * int(torch.Size(shape).numel())
        return self.bytes(offset, size).view(dtype).view(shape)

    def bytes(self, begin: int, num_bytes: int) -> torch.Tensor:
        return self._memory[begin : begin + num_bytes]

    def copy_to(self, rank: int, offset: int, values: torch.Tensor) -> None:
        here.group.drain(here.rank)  # copies happen on the stream
        ctypes.memmove(self.addresses[rank] + offset, values.data_ptr(), values.numel() * values.element_size())

    def ended_ranks(self) -> list[int]:
        return sorted(rank for rank in self.others if self._members[rank] in here.group.ended)

    def close(self) -> None:
        pass


class FakeGin:
    """Stands for GinMemory. What one gives back is the next one's, with all that lies in it, as NCCL has it."""

    prelude, type_name = NO_PRELUDE, "none: emulated"

    def __init__(self, ranks: Any, num_bytes: int, *, contexts: int, signals: int, state_bytes: int) -> None:
        group = here.group
        own = group.pools.setdefault(here.rank, [])
        self._number = min({*range(len(own) + 1)} - {int(each) for each in own})
        own.append(str(self._number))
        windows = group.share_named(f"window {num_bytes} {self._number}", num_bytes)
        pool = group.share_named(f"signals {signals} {self._number}", 8 * len(signals_of(signals)))
        raised = [each.view(torch.int64) for each in pool]
        comm = device_comm(here.rank, raised, signals)
        window = torch.tensor([each.data_ptr() for each in windows])
        state = torch.zeros(state_bytes, dtype=torch.uint8)
        self.comm, self.window, self.state = ctypes.addressof(comm), window.data_ptr(), state.data_ptr()
        self.address, self.num_bytes = windows[here.rank].data_ptr(), num_bytes
        self._kept, self.is_kept, self.is_closed = (comm, window, state), False, False

    def keep(self) -> None:
        self.is_kept = True

    def close(self) -> bool:
        if not self.is_kept and not self.is_closed:
            self.is_closed = True
            here.group.pools[here.rank].remove(str(self._number))
        return self.is_closed


class FakeRanks(RankGroup):
    """A RankGroup on threads: it has a store and connections between pairs, and collectives that are meetings."""

    transport = "emulated"

    def __init__(self, timeout_s: float, rejoins: bool, ranks_per_node: int | None) -> None:
        self.rank, self.num_ranks, self.device = here.rank, here.group.num_ranks, CPU
        self.process_group, self._deadline_is_ours = None, False
        self.timeout_s = self.open_timeout_s = timeout_s
        self.prepare(StoreNotes(here.group.store, self.rank, self.num_ranks, rejoins), Siblings())
        self.own_transport = True
        if ranks_per_node is not None:
            self.topology = pretended(self.num_ranks, ranks_per_node)

    def require_maskable(self) -> None:
        """Threads can always be left out."""

    def _sum(self, values: torch.Tensor, phase: str, opens: bool) -> torch.Tensor:
        return Meeting().all_gather(values, phase).sum(0)

    def start_all_gather(
        self, row: torch.Tensor, phase: str, *, opens: bool = False, host_waits: bool = False
    ) -> Transfer:
        if self._links is not None:
            return super().start_all_gather(row, phase, opens=opens)
        self.notes.step += 1
        return Transfer(Meeting().all_gather(row.clone(), phase), None)

    def start_all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        phase: str,
        out: torch.Tensor | None = None,
    ) -> Transfer:
        self.notes.step += 1
        found = Meeting().start_all_to_all(rows, send_counts, recv_counts, phase).wait()
        return Transfer(found if out is None else out.copy_(found), None)


class RanksOnStreams(FakeRanks):
    """The same with all-to-alls of rows of one size on streams, which no host waits for, and which graphs keep."""

    def start_all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        phase: str,
        out: torch.Tensor | None = None,
    ) -> Transfer:
        assert out is not None
        assert send_counts == recv_counts
        received, bits = out, sum(1 << rank for rank, count in enumerate(send_counts) if count)

        def run() -> None:
            group, here.collectives = here.group, here.collectives + 1
            here.launched += 1
            group.keep(self.rank, here.launched, [rows, received])
            args = AllToAll(rows.data_ptr(), received.data_ptr(), rows[0].nbytes, here.collectives, self.rank, bits)
            group.emulator.launch_all_to_all(self.rank, args)

        launch_or_keep(run)
        return Transfer(received, None)


class FakeProcessGroup(torch.distributed.ProcessGroup):
    """What a program holds of its ranks."""


class Meeting:
    """Stands for the ranks of one group in small collectives beside their communicators."""

    device = CPU
    timeout_s = open_timeout_s = 30.0
    masks_late = False

    def __init__(self) -> None:
        self.turn, self.members = Turn(), range(here.group.num_ranks)
        self.rank, self.num_ranks = here.rank, here.group.num_ranks

    def require_alive(self) -> None:
        """Nothing closes it."""

    @property
    def whole(self) -> Meeting:
        return self

    def all_gather_object(self, value: Any, phase: str) -> list[Any]:
        group = here.group
        group.said[here.rank] = value
        group.meeting.wait()
        found = [group.said[rank] for rank in range(group.num_ranks)]
        group.meeting.wait()
        return found

    def all_gather(self, row: torch.Tensor, phase: str, *, opens: bool = False) -> torch.Tensor:
        return torch.stack(self.all_gather_object(row, phase))

    def start_all_to_all(
        self, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], phase: str
    ) -> Transfer:
        sent = self.all_gather_object(rows.clone().view(torch.uint8).split(send_counts), phase)
        came = [parts[self.rank] for parts in sent]
        assert [len(part) for part in came] == recv_counts, f"{phase} brings other numbers of rows than expected"
        return Transfer(torch.cat(came).view(rows.dtype), None)

    def abort(self, fault: BaseException) -> None:
        here.group.meeting.abort()  # wakes those that wait


class FakeStream:
    """The stream of a rank."""

    def __init__(self, rank: int) -> None:
        self.cuda_stream, self.device_index = rank + 1, 0

    def record_event(self) -> Any:
        launched, group, rank = here.launched, here.group, here.rank

        def query() -> bool:
            group.pump()
            return group.emulator.finished(rank) >= launched

        return SimpleNamespace(query=query)

    def query(self) -> bool:
        return True

    def wait_stream(self, other: object) -> None:
        pass


def _make_backend(
    ranks: FakeRanks,
    sizes_of_calls: tuple[int, bool],
    dtype: torch.dtype | None,
    name: str | None,
    transport: str | None,
    plan: Plan,
) -> Any:
    num_sms, checked = sizes_of_calls
    if transport == "gin" or name in ("gin", "padded"):
        made = NodesBackend(PADDED if name == "padded" else GIN, plan, ranks, num_sms, dtype, checked)
        here.group.meeting.wait()  # as a SymmetricBuffer does
        return made
    if name == "network":
        return NetworkBackend(plan, ranks, NvlinkInside(plan, ranks, num_sms, checked, dtype))
    return NvlinkBackend(plan, ranks, num_sms, checked)


def _make_communicator(self: tl.Communicator, group: object = None, **options: Any) -> None:
    sizes = {name: options.pop(name) for name in ("num_experts", "hidden", "top_k", "max_tokens_per_rank")}
    plan = Plan(here.group.num_ranks, **sizes)
    spare = options.get("spare_slots", 0)
    placement = placement_of(options.get("placement"), spare, plan.num_experts, plan.num_ranks)
    of_slots = plan_of_slots(plan, placement)
    rejoins = options.get("rejoin", False)
    make_ranks = RanksOnStreams if options.get("backend") == "padded" else FakeRanks
    ranks = make_ranks(options.get("timeout_s", 30.0), rejoins, options.get("ranks_per_node"))
    self.plan, self._ranks = plan, ranks
    if rejoins:
        ranks.rejoin(options.get("on_timeout") == "mask")
    sizes_of_calls = options.get("num_sms", NUM_SMS), options.get("checked", False)
    self._new_backend = partial(  # type: ignore[attr-defined]
        _make_backend, ranks, sizes_of_calls, options.get("dtype"), options.get("backend"), options.get("transport")
    )
    backend: Any = self._new_backend(of_slots)  # type: ignore[attr-defined]
    if options.get("on_timeout") == "mask" and not rejoins:
        backend.mask_late()
    if ranks.masks_late:
        here.late = backend
    self._choice = SimpleNamespace(backend=backend, why="emulated", not_picked=[])  # type: ignore[assignment]
    balance = None if options.get("balance") is None else Balance(options.get("rows_per_pull") or 0, ranks.device)
    self.engine = Engine(plan, ranks, backend, placement, balance)
    self.kinds = Kinds(self.engine)


def _behind_kernels(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads a tensor on the host, behind all kernels of the rank, as on GPUs."""

    def read(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if hasattr(here, "group") and not here.draining:
            here.group.drain(here.rank)
        return method(self, *args, **options)

    return read


def _as_a_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that launches nothing, behind all kernels of the rank: its operations need not be looked at each."""

    def run(*args: Any, **options: Any) -> Any:
        if not hasattr(here, "group") or here.draining:
            return function(*args, **options)
        here.group.drain(here.rank)
        here.draining = True
        try:
            with _disable_current_modes():
                return function(*args, **options)
        finally:
            here.draining = False

    return run


def _give_up(self: kernel_reports.FaultFlag, peers: list[int], cause: str) -> None:
    """What FaultFlag does with a copy beside the kernels."""
    if self._host_fault is None:
        self._host_fault = PeerTimeout(self._rank, peers, kernel_reports.SOME_CALL, 0, cause, self._nodes(peers))
        ctypes.c_int32.from_address(self.claimed.data_ptr()).value = 1


READS = ("cpu", "tolist", "numpy")
"""Methods that ask for no operation where a tensor lies on the CPU."""
NOT_BEHIND_KERNELS = (
    "empty",
    "new_empty",
    "view",
    "slice",
    "select",
    "split",
    "alias",
    "detach",
    "expand",
    "as_strided",
    "unsqueeze",
)
"""Operations that touch no values."""


WHOLE = ((reference, "dispatch"), (reference, "combine"), (cases, "_make_x"), (cases, "_make_ids"))
"""What tests expect, and what they give."""


class StreamOrder(TorchDispatchMode):
    """Operations of torch happen behind the kernels that were launched before, as they do on a stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not here.draining and not func.__name__.startswith(NOT_BEHIND_KERNELS):
            here.group.drain(here.rank)
        return func(*args, **(kwargs or {}))


def _load_operations() -> None:
    """Make torch's object of every operation, before ranks look for one.

    torch makes it where a mode first sees the operation, and keeps it by address alone. Of two threads that make one
    at a time, the first is left with an object that is freed (torch 2.13: a segmentation fault, seen of
    aten::promote_types).
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, operation = name.split("::")
        packet, _, overload = operation.partition(".")
        with suppress(AttributeError):  # a few have names for the dispatcher alone
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


@contextmanager
def _stand_ins(group: Group) -> Iterator[None]:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=group.pump)
    with in_any_order(), ExitStack() as stack:
        for owner, name, value in (
            (kernel.Kernel, "__init__", FakeKernel.__init__),
            (kernel.Kernel, "launch", FakeKernel.launch),
            (kernel.Kernel, "overlaps_previous", False),
            (backend_module, "SymmetricBuffer", FakeBuffer),
            (buffers, "SymmetricBuffer", FakeBuffer),
            (nodes_memory, "SymmetricBuffer", FakeBuffer),
            (byte_carriers, "SymmetricBuffer", FakeBuffer),
            (peer_weights, "SymmetricBuffer", FakeBuffer),
            (nodes_gin, "GinMemory", FakeGin),
            (nodes_memory, "free_bytes", lambda device: 2**40),
            (backend_module, "usable_sms", lambda index: 132),
            (registry, "MAX_SMS", MAX_SMS),  # which deep_ep's buffers take; more blocks find nothing else
            (opening, "close_together", lambda buffers: None),
            (opening, "current_handle", lambda device: here.rank + 1),
            (outcomes, "on_stream", lambda stream: nullcontext()),
            (outcomes, "time", clock),
            (kernel_reports, "time", clock),
            (kernel_reports.FaultFlag, "give_up", _give_up),
            (kernel_reports, "_pinned", lambda *shape: torch.zeros(shape, dtype=torch.int32)),
            (communicator.Communicator, "__init__", _make_communicator),
            (communicators_by_shape.Communicators, "meeting", lambda self, device: Meeting()),
            (opening, "GraphReferences", FakeReferences),
            (torch.cuda, "is_current_stream_capturing", is_capturing),
            (torch.cuda, "current_stream", lambda device=None: FakeStream(here.rank)),
            (torch.distributed, "barrier", lambda **options: group.meeting.wait()),
            (torch.cuda, "synchronize", lambda device=None: here.group.drain(here.rank)),
            *gemm.stand_ins(),
            *((owner, name, _as_a_whole(getattr(owner, name))) for owner, name in WHOLE),
            *((torch.Tensor, name, _behind_kernels(getattr(torch.Tensor, name))) for name in READS),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class EmulatedRanks:
    """Runs functions on ranks, as Ranks of conftest.py do.

    Args:
        folder: for what is compiled.
        num_ranks: of the group.
        seed: of what happens in which order.
    """

    device = "cpu"

    def __init__(self, folder: Path, num_ranks: int, seed: int = 1) -> None:
        self.folder, self.num_ranks, self.seed = folder, num_ranks, seed

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 0.0, **kwargs: Any) -> list[Any]:
        """``function(context, *args, **kwargs)`` on every rank; results by rank. The first failure is raised."""
        group = Group(self.folder, self.num_ranks, self.seed)
        results: list[Any] = [None] * self.num_ranks
        failures: list[BaseException] = []

        def work(rank: int) -> None:
            here.group, here.rank = group, rank
            try:
                made = FakeProcessGroup(rank, self.num_ranks)
                context = RankContext(rank, self.num_ranks, made, CPU, None)  # type: ignore[arg-type]
                with StreamOrder():
                    results[rank] = function(context, *args, **kwargs)
                group.drain(rank)
            except Ended:
                group.kill(rank)
            except BaseException as failure:
                failures.append(failure)
                group.failed = True
                group.meeting.abort()

        _load_operations()
        with _stand_ins(group):
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.num_ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
        return results
