"""nodes/gin_memory.py on a stand-in for NCCL: order of calls, what is left when one fails, and when memory stays."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tokenloom.backends.nodes import gin_memory
from tokenloom.backends.nodes import nccl as nccl_module
from tokenloom.backends.nodes.gin_memory import GinMemory, communicator_of
from tokenloom.errors import BackendUnavailable, TokenloomError
from tokenloom.jit.nccl_layout import DEVICE_COMM, REQUIREMENTS, Layout
from tokenloom.runtime.rank_group import RankGroup

COMM, ADDRESS, WINDOW = 0xC0, 0x7000, 0x33
OLD = Layout(
    22809,
    {DEVICE_COMM: (16, 8)},
    {
        f"{REQUIREMENTS}.ginForceEnable": (0, 1),
        f"{REQUIREMENTS}.ginContextCount": (4, 4),
        f"{REQUIREMENTS}.ginSignalCount": (8, 4),
        f"{DEVICE_COMM}.rank": (0, 4),
        f"{DEVICE_COMM}.nRanks": (4, 4),
        f"{DEVICE_COMM}.ginContextCount": (8, 1),
        f"{DEVICE_COMM}.ginTypes": (9, 4),
    },
    bytes(12),
)
NEW = Layout(
    23007,
    OLD.types,
    {
        **{("ginNetDeviceTypes".join(each.split("ginTypes"))): at for each, at in OLD.fields.items()},
        f"{REQUIREMENTS}.ginConnectionType": (12, 4),
    },
    bytes(16),
)


class StandIn:
    """For Nccl. It lists its calls; those named in ``failing`` fail, and in ``hanging`` never return."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.device_comm = self.made(0, 1, 2, 2)

    @staticmethod
    def made(rank: int, num_ranks: int, contexts: int, kind: int) -> bytes:
        """A ncclDevComm."""
        numbers = rank.to_bytes(4, "little") + num_ranks.to_bytes(4, "little")
        return numbers + bytes([contexts, kind, kind, 0, 0, 0, 0, 0])

    def _call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.hanging:
            threading.Event().wait(30)
        if name in self.failing:
            raise TokenloomError(f"{name} failed")

    def version(self) -> tuple[int, int, int]:
        return (2, 28, 9)

    def allocate(self, num_bytes: int) -> int:
        self._call("allocate", num_bytes)
        return ADDRESS

    def register_window(self, comm: int, address: int, num_bytes: int) -> int:
        self._call("register", comm, address, num_bytes)
        return WINDOW

    def create_device_comm(self, comm: int, requirements: bytes, num_bytes: int) -> bytes:
        self._call("create", comm, requirements, num_bytes)
        return self.device_comm

    def destroy_device_comm(self, comm: int, device_comm: bytes) -> None:
        assert device_comm == self.device_comm
        self._call("destroy", comm)

    def deregister_window(self, comm: int, window: int) -> None:
        self._call("deregister", comm, window)

    def free(self, address: int) -> None:
        self._call("free", address)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    headers = SimpleNamespace(version=(2, 28, 9), nccl=Path("/some"), prelude=lambda: "prelude")
    monkeypatch.setattr(nccl_module, "loaded_library", lambda: Path("/some/libnccl.so.2"))
    monkeypatch.setattr(nccl_module, "find_headers", lambda library: headers)
    monkeypatch.setattr(gin_memory, "read_layout", lambda headers: OLD)
    monkeypatch.setattr(nccl_module, "Nccl", lambda path: stand_in)
    monkeypatch.setattr(gin_memory, "communicator_of", lambda ranks: COMM)
    monkeypatch.setattr(gin_memory, "CLOSE_S", 0.05)
    return stand_in


def make() -> GinMemory:
    return GinMemory(RankGroup(None, device="cpu"), 5000, contexts=2, signals=3, state_bytes=24)


def read(address: int, num_bytes: int) -> bytes:
    return bytes((ctypes.c_char * num_bytes).from_address(address))


BEGUN = ["allocate", "register", "create"]
ENDED = ["destroy", "deregister", "free"]


def test_it_is_made_and_given_back(nccl: StandIn) -> None:
    """The window has whole pages; the device communicator lies where kernels read it. Back goes the last one first."""
    memory = make()
    asked = bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    assert nccl.calls == [
        ("allocate", 8192),
        ("register", COMM, ADDRESS, 8192),
        ("create", COMM, asked, 16),
    ]
    assert (memory.address, memory.window, memory.num_bytes, memory.prelude) == (ADDRESS, WINDOW, 8192, "prelude")
    assert memory.type_name == "PROXY"
    assert read(memory.comm, 16) == nccl.device_comm
    assert read(memory.state, 24) == bytes(24)
    del nccl.calls[:]
    assert memory.close()
    assert memory.close(), "again"
    assert nccl.calls == [("destroy", COMM), ("deregister", COMM, WINDOW), ("free", ADDRESS)]


def test_nobody_asks_for_errors_meanwhile(nccl: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collective calls end before connections are made. Those that do not end are told."""
    monkeypatch.setattr(gin_memory, "settle", lambda ranks: nccl.calls.append(("settle",)))
    make()
    assert [name for name, *_ in nccl.calls] == ["allocate", "register", "settle", "create"]


def test_collective_calls_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the limit they are waited for. Beyond it GIN is not to be had."""
    ended, has_ended = threading.Event(), []
    group = SimpleNamespace(_wait_for_pending_works=lambda: has_ended.append(ended.wait(30)))
    ranks: Any = SimpleNamespace(process_group=group)
    monkeypatch.setattr(gin_memory, "SETTLE_S", 0.05)
    with pytest.raises(BackendUnavailable, match=r"have not ended within 0\.05 s"):
        gin_memory.settle(ranks)
    ended.set()
    gin_memory.settle(ranks)
    assert has_ended[-1]
    gin_memory.settle(RankGroup(None, device="cpu"))


def test_names_of_later_versions(nccl: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2.29 on connections are asked for by kind, and types have another name."""
    monkeypatch.setattr(gin_memory, "read_layout", lambda headers: NEW)
    make()
    assert nccl.calls[2][2][12:] == bytes([1, 0, 0, 0])


@pytest.mark.parametrize(
    ("failing", "left"),
    [("allocate", []), ("register", ["free"]), ("create", ["deregister", "free"])],
)
def test_a_call_that_fails(nccl: StandIn, failing: str, left: list[str]) -> None:
    """What came before is given back, last things first, even if that fails too; the first error is told."""
    nccl.failing = {failing, "deregister"}
    with pytest.raises(TokenloomError, match=f"{failing} failed"):
        make()
    assert [name for name, *_ in nccl.calls] == [*BEGUN[: BEGUN.index(failing) + 1], *left]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ((0, 1, 1, 2), "made 1 contexts of GIN, expected 2"),
        ((0, 1, 2, 3), "type 3, GDAKI, expected 2, PROXY"),
        ((0, 1, 2, 9), "type 9, unknown to tokenloom, expected 2, PROXY"),
        ((1, 2, 2, 2), "rank 1 of 2, the group as 0 of 1"),
    ],
)
def test_a_device_communicator_of_another_kind(nccl: StandIn, made: tuple[int, ...], words: str) -> None:
    """NCCL takes contexts for a hint: with one, dispatches and combines would count the same signals."""
    nccl.device_comm = StandIn.made(*made)
    with pytest.raises(BackendUnavailable, match=words):
        make()
    assert [name for name, *_ in nccl.calls] == [*BEGUN, *ENDED]


def test_headers_of_another_version(nccl: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of NCCL is called that would have to be undone."""
    other = SimpleNamespace(version=(2, 30, 7), nccl=Path("/some"))
    monkeypatch.setattr(nccl_module, "find_headers", lambda library: other)
    with pytest.raises(BackendUnavailable, match=r"library is 2\.28\.9, but its headers in /some are 2\.30\.7"):
        make()
    assert nccl.calls == []


def test_after_a_fault_it_stays(nccl: StandIn) -> None:
    """A late rank may still put: the window lives until the communicator is aborted, and then only memory is left."""
    memory = make()
    memory.keep()
    assert not memory.close()
    assert [name for name, *_ in nccl.calls] == BEGUN
    memory.free_after_abort()
    memory.free_after_abort()
    assert nccl.calls[3:] == [("free", ADDRESS)]
    assert memory.close()


def test_a_close_is_bounded(nccl: StandIn) -> None:
    """Where NCCL does not return, the close does; nothing is given back behind that call, nor again."""
    nccl.hanging = {"deregister"}
    memory = make()
    assert not memory.close()
    assert not memory.close()
    assert [name for name, *_ in nccl.calls] == [*BEGUN, "destroy", "deregister"]


def test_a_rank_that_does_not_close(nccl: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel may still put, so nothing is given back, also when it comes later: NCCL's calls are collective. When
    all come, everything is, and their notes go."""
    store, ranks, other = dist.HashStore(), RankGroup(None, device="cpu"), RankGroup(None, device="cpu")
    for each in (ranks, other):
        each.num_ranks, each.notes._store = 2, store
    other.rank = 1
    monkeypatch.setattr(gin_memory, "agree", lambda ranks, prepare, phase: prepare())
    nccl.device_comm = StandIn.made(0, 2, 2, 2)
    alone, both, late = (GinMemory(ranks, 1, contexts=2, signals=2, state_bytes=8) for _ in range(3))
    late._name, late._ranks = alone._name, other
    del nccl.calls[:]
    assert not alone.close()
    assert not late.close()
    assert nccl.calls == []
    name = ranks.notes.key("network memory/0/2")
    assert both._name == name
    store.set(f"{name}/1", b"closes")
    store.add(f"{name}/passed", 1)
    assert both.close()
    assert [each for each, *_ in nccl.calls] == ENDED
    assert not store.check([f"{name}/0"])


class Group:
    """For a process group over NCCL, of a torch with or without _comm_ptr."""

    def __init__(self, **names: Any) -> None:
        self._get_backend = lambda device: SimpleNamespace(**names)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (None, "needs a process group over NCCL, this one is over local"),
        (Group(), "does not tell a process group's communicator"),
        (Group(_comm_ptr=lambda: 0), "no communicator of NCCL yet; .*all_reduce once"),
    ],
)
def test_groups_without_a_communicator(group: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing, and what to do."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl,cpu:gloo")
    ranks: Any = SimpleNamespace(process_group=group, device=torch.device("cpu"), transport="local")
    with pytest.raises(BackendUnavailable, match=words):
        communicator_of(ranks)


def test_a_group_with_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "nccl")
    ranks: Any = SimpleNamespace(process_group=Group(_comm_ptr=lambda: COMM), device=torch.device("cpu"))
    assert communicator_of(ranks) == COMM
