"""Memory that ranks share: it is freed when nobody can write it or look at it any more, and not before.

CPU ranks run on a made-up driver with the real notes between them; how far that driver is like CUDA's is for the tests
marked ``gpu``.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.runtime.fake_driver import OUT_OF_MEMORY, REFUSED, FakeDriver, fake_driver
from tests.support.on_ranks import on_ranks
from tokenloom.errors import is_known_to_all
from tokenloom.runtime import deferred_release, rendezvous, store_notes, symmetric_memory
from tokenloom.runtime.deferred_release import release_dropped
from tokenloom.runtime.process_groups import store_of
from tokenloom.runtime.processes import RankContext, RankFailed, RankPool
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import BufferLayout, SymmetricBuffer, close_together
from tokenloom.runtime.topology import pretended

Pools = Callable[[str], RankPool]

LAYOUT = BufferLayout.of([("flags", 12), ("rows", 1000)])
PATIENCE_S = 20.0


@pytest.fixture
def one(pools: Pools) -> Ranks:
    """A process by itself."""
    return Ranks(pools("cpu"), 1)


@pytest.fixture(params=[1, 2], ids=["alone", "pair"])
def one_or_two(request: pytest.FixtureRequest, pools: Pools) -> Ranks:
    return Ranks(pools("cpu"), request.param)


def on_driver(group: str) -> Any:
    """Decorator that runs a test's body on the ranks of a group: ``body(ranks, driver, ...)``."""
    return on_ranks(group, through=with_driver, gives=2)


def with_driver(context: RankContext, check: Callable[..., Any], *args: Any) -> Any:
    """``check(ranks, driver, *args)`` with a made-up driver, on which nothing may be left in the end."""
    ranks = RankGroup(context.group, timeout_s=PATIENCE_S)
    with fake_driver() as driver:
        result = check(ranks, driver, *args)
        gc.collect()
        release_dropped()
        meet(ranks)
        release_dropped()
        assert driver.is_clean, f"{len(driver.memory)} allocated, {len(driver.mapped)} mapped in the end"
        meet(ranks)
    ranks.close()
    return result


def meet(ranks: RankGroup) -> None:
    ranks.all_reduce_sums([torch.zeros(1)], "meet")


@contextmanager
def captured() -> Iterator[None]:
    """The current stream is captured into a graph: nothing may wait for the GPU."""
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


# -- layouts ----------------------------------------------------------------------------------------------------


def test_layout() -> None:
    """Every part is aligned, and the end too, so that buffers can lie behind each other."""
    assert LAYOUT.places == {"flags": (0, 12), "rows": (256, 1000)}
    assert (LAYOUT.offset("rows"), LAYOUT.total_bytes) == (256, 1280)


# -- a buffer's life --------------------------------------------------------------------------------------------


@on_driver("one_or_two")
def test_what_is_closed_is_free_at_once(ranks: RankGroup, driver: FakeDriver) -> None:
    """Where all ranks close together, memory and mappings are gone when close returns."""
    buffers = [SymmetricBuffer(LAYOUT, ranks) for _ in range(2)]
    assert len(driver.memory) == 2
    assert len(driver.mapped) == 2 * (ranks.num_ranks - 1)
    for buffer in buffers:
        assert buffer.peers.tolist() == buffer.addresses
        assert buffer.addresses[ranks.rank] in driver.memory
        assert not buffer.view("rows", torch.int32, (250,)).any(), "flags are cleared before others can see them"
    del buffer
    meet(ranks)
    with mock.patch.object(symmetric_memory, "CLOSE_TOGETHER_S", PATIENCE_S):
        close_together(buffers)
    assert driver.is_clean
    close_together(buffers)
    assert driver.calls.count("cuMemFree") == 2


@on_driver("one")
def test_handles_open_no_memory_of_others(ranks: RankGroup, driver: FakeDriver) -> None:
    """The driver cuts small allocations from slabs of 2 MiB, and a handle opens the whole slab to the other ranks."""
    for num_bytes, expected in ((12, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20)):
        buffer = SymmetricBuffer(BufferLayout.of([("flags", num_bytes)]), ranks)
        assert [len(memory) for memory in driver.memory.values()] == [expected]
        close_together([buffer])


@on_driver("four")
def test_nodes_have_memory_of_their_own(ranks: RankGroup, driver: FakeDriver) -> None:
    """Ranks map that of their node alone, and free it without those of others."""
    ranks.topology = pretended(4, 2)
    buffer = SymmetricBuffer(LAYOUT, ranks)
    neighbour = ranks.rank ^ 1
    assert buffer.others == {neighbour}
    assert len(driver.mapped) == 1
    assert buffer.addresses[neighbour] in driver.mapped
    away = [rank for rank in range(4) if rank // 2 != ranks.rank // 2]
    assert {buffer.addresses[rank] for rank in away} == {buffer.addresses[ranks.rank]}
    meet(ranks)
    if ranks.rank < 2:
        with mock.patch.object(symmetric_memory, "CLOSE_TOGETHER_S", PATIENCE_S):
            close_together([buffer])
        assert driver.is_clean, "the other node has not let go"
    meet(ranks)


@on_driver("two")
@pytest.mark.parametrize("how", ["close", "drop"])
def test_memory_stays_until_the_last_rank_lets_go(ranks: RankGroup, driver: FakeDriver, how: str) -> None:
    """A late rank may still write: after a timeout, or because Python collects its communicator later. Its own wait is
    nobody else's: each rank lets go when it likes, and frees when it next looks after the last one has."""
    buffer: SymmetricBuffer | None = SymmetricBuffer(LAYOUT, ranks)
    if ranks.rank == 0:
        buffer = let_go(buffer, how)
        release_dropped()
        assert not driver.mapped, "what others may free is unmapped"
    meet(ranks)
    release_dropped()
    assert len(driver.memory) == 1
    meet(ranks)
    if ranks.rank == 1:
        buffer = let_go(buffer, how)
        release_dropped()
        assert driver.is_clean
    meet(ranks)
    release_dropped()
    assert driver.is_clean
    assert buffer is None


def let_go(buffer: SymmetricBuffer | None, how: str) -> None:
    assert buffer is not None
    if how == "close":
        buffer.close()


@on_driver("one_or_two")
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_view_keeps_the_memory(ranks: RankGroup, driver: FakeDriver, how: str) -> None:
    """Rows that a dispatch handed out stay as they are when the communicator is closed, or gone; they need nothing of
    the other ranks, which free theirs."""
    buffer: SymmetricBuffer | None = SymmetricBuffer(LAYOUT, ranks)
    assert buffer is not None
    view = buffer.view("rows", torch.float32, (5, 2)).fill_(ranks.rank + 0.5)[1:]
    buffer = let_go(buffer, how)
    if ranks.rank == 1:
        del view
    meet(ranks)
    release_dropped()
    meet(ranks)
    release_dropped()
    assert not driver.mapped
    if ranks.rank == 0:
        assert len(driver.memory) == 1
        assert torch.equal(view, torch.full((4, 2), 0.5))
        part = view[0]
        del view
        release_dropped()
        assert len(driver.memory) == 1, "a view of the view is enough"
        del part
        release_dropped()
    assert driver.is_clean


@on_driver("two")
@pytest.mark.slow
def test_a_long_lived_server_does_not_grow(ranks: RankGroup, driver: FakeDriver) -> None:
    """A hundred communicators' buffers, closed, dropped and in cycles, one rank late each time: no memory, no mapping,
    no key in the store and no queued object more than after the first few."""
    store = store_of(ranks.process_group)
    held: list[tuple[int, int, int, int]] = []
    gc.disable()  # or Python would collect when it likes
    gc.freeze()  # so that it has to look at what is made here alone
    try:
        for turn in range(100):
            own = RankGroup(ranks.process_group, timeout_s=PATIENCE_S)
            buffer: Any = SymmetricBuffer(LAYOUT, own)
            own.notes.post("fault/1", "something")
            cycle: list[Any] = [buffer, own]
            cycle.append(cycle)
            if turn % 3 == 0:
                buffer.close()
                own.close()
            del buffer, cycle, own
            if (turn + ranks.rank) % 2 == 0:
                gc.collect()
            meet(ranks)
            if turn % 20 == 19:
                gc.collect()
                release_dropped()
                meet(ranks)
                release_dropped()
                meet(ranks)
                keys = [key for key in store.list_keys() if "tokenloom/" in key]
                held.append((len(driver.memory), len(driver.mapped), len(deferred_release._waiting), len(keys)))
                meet(ranks)
    finally:
        gc.unfreeze()
        gc.enable()
    assert held[0][:3] == (0, 0, 0)
    assert set(held) == {held[0]}


# -- finalizers -------------------------------------------------------------------------------------------------


@on_driver("one_or_two")
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_finalizer_only_queues(ranks: RankGroup, driver: FakeDriver, in_a_cycle: bool) -> None:
    """It runs wherever Python happens to collect: in the middle of a capture, of a call of the store, of this. What
    it leaves is undone by the next construction, check or close outside of a capture."""
    buffer = SymmetricBuffer(LAYOUT, ranks)
    cycle: list[Any] = [buffer]
    if in_a_cycle:
        cycle.append(cycle)
    before = list(driver.calls)
    with mock.patch.object(store_notes.StoreNotes, "call", side_effect=AssertionError("a finalizer uses the store")):
        del buffer, cycle
        gc.collect()
    assert driver.calls == before
    with captured():
        release_dropped()
    assert driver.calls == before
    release_dropped()
    assert not driver.mapped
    meet(ranks)
    close_together([SymmetricBuffer(LAYOUT, ranks)])  # making one releases what was dropped before
    meet(ranks)


@on_driver("one")
def test_collected_while_memory_is_released(ranks: RankGroup, driver: FakeDriver) -> None:
    """The collector may run inside of a release, and find another buffer there."""
    first, second = SymmetricBuffer(LAYOUT, ranks), [SymmetricBuffer(LAYOUT, ranks)]
    real_free, depth = driver.cuMemFree, []

    def free(address: int) -> Any:
        assert not depth, "a release within a release"
        depth.append(address)
        second.clear()
        gc.collect()
        release_dropped()
        depth.pop()
        return real_free(address)

    driver.cuMemFree = free  # type: ignore[method-assign]
    first.close()
    assert len(driver.memory) == 1
    release_dropped()
    assert driver.is_clean


@on_driver("one_or_two")
@pytest.mark.parametrize("function", ["cuMemFree", "cuIpcCloseMemHandle"])
def test_a_driver_that_fails_is_asked_again(ranks: RankGroup, driver: FakeDriver, function: str) -> None:
    """As long as another thread captures, say, the driver frees and unmaps nothing. Whoever happens to be there when
    it fails is not told, and nothing is lost."""
    buffer = SymmetricBuffer(LAYOUT, ranks)
    driver.failing[function] = REFUSED
    buffer.close()
    meet(ranks)
    release_dropped()
    assert driver.memory or ranks.num_ranks == 1
    driver.failing.clear()


@on_driver("one_or_two")
def test_a_forked_child_frees_nothing(ranks: RankGroup, driver: FakeDriver) -> None:
    """Data loaders fork: the child has copies of all objects, but neither the GPU nor the store are its own."""
    buffers = [SymmetricBuffer(LAYOUT, ranks) for _ in range(3)]
    del buffers[2]  # queued before the fork
    before = list(driver.calls)
    child = os.fork()
    if child == 0:
        try:
            buffers[0].close()
            del buffers
            gc.collect()
            release_dropped()
            ranks.close()
            os._exit(0 if driver.calls == before and not deferred_release._waiting else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(driver.memory) == 3
    meet(ranks)
    close_together(buffers)


@pytest.mark.slow
def test_at_exit_nothing_is_done() -> None:
    """The driver takes everything back when the process ends, and may be gone before the last finalizer runs."""
    program = """
from tests.conftest import LIMIT_S
from tests.runtime.fake_driver import fake_driver
from tests.runtime.test_symmetric_memory import LAYOUT
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

faked = fake_driver()
driver = faked.__enter__()
kept = SymmetricBuffer(LAYOUT, RankGroup(None))
dropped = SymmetricBuffer(LAYOUT, RankGroup(None))
del dropped
cycle = [SymmetricBuffer(LAYOUT, RankGroup(None))]
cycle.append(cycle)
driver.cuMemFree = driver.cuIpcCloseMemHandle = lambda *_: print("called at exit")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- what fails while a buffer is made --------------------------------------------------------------------------


@on_driver("two")
@pytest.mark.parametrize("function", ["cuMemAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle"])
def test_what_one_rank_cannot_do_fails_on_all(ranks: RankGroup, driver: FakeDriver, function: str) -> None:
    """No memory, no shared IPC namespace, no peer access: that rank's own error there, PeerError elsewhere, nothing
    kept, and it can be tried again."""
    own = "OutOfMemoryError" if function == "cuMemAlloc" else "RuntimeError"
    for _ in range(2):
        if ranks.rank == 0:
            driver.failing[function] = OUT_OF_MEMORY if function == "cuMemAlloc" else REFUSED
        with pytest.raises((RuntimeError, torch.OutOfMemoryError)) as raised:
            SymmetricBuffer(LAYOUT, ranks)
        assert is_known_to_all(raised.value)
        assert driver.is_clean, "given back before it is tried again"
        assert type(raised.value).__name__ == (own if ranks.rank == 0 else "PeerError")
    driver.failing.clear()
    close_together([SymmetricBuffer(LAYOUT, ranks)])
    meet(ranks)


def test_memory_that_torch_keeps_is_asked_for() -> None:
    """torch does not give back to the driver what its tensors no longer use, unless it is told to."""
    answers: list[tuple[Any, Any]] = [(OUT_OF_MEMORY, None), (0, 4096)]
    results = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY)
    driver = SimpleNamespace(cuMemAlloc=lambda num_bytes: answers.pop(0), CUresult=results)
    with (
        mock.patch.object(symmetric_memory, "load_driver", return_value=driver),
        mock.patch.object(torch.cuda, "empty_cache") as emptied,
    ):
        assert symmetric_memory._allocate(10**9) == 4096
    emptied.assert_called_once()


@on_driver("two")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, tl.PeerTimeout])
def test_a_rank_that_comes_less_far_keeps_its_memory(
    ranks: RankGroup, driver: FakeDriver, error: type[BaseException]
) -> None:
    """An exchange can end on one rank and fail on another, in whatever way: the first has mapped the memory of the
    second, which may not free it before the first has let go."""

    def fail_afterwards(*args: Any) -> list[Any]:
        rendezvous.agree(*args)
        raise tl.PeerTimeout(1, [0], "the test", 1, "no answer") if error is tl.PeerTimeout else error("the test")

    patch = mock.patch.object(symmetric_memory, "agree", fail_afterwards if ranks.rank == 1 else rendezvous.agree)
    if ranks.rank == 1:
        with patch, pytest.raises(error):
            SymmetricBuffer(LAYOUT, ranks)
        rendezvous.agree(ranks, lambda: ({}, None), "mapping shared memory")  # for rank 0
        release_dropped()
        assert len(driver.memory) == 1
    else:
        buffer = SymmetricBuffer(LAYOUT, ranks)
        meet(ranks)
        buffer.close()
    if ranks.rank == 1:
        meet(ranks)
    meet(ranks)


# -- ranks that end ---------------------------------------------------------------------------------------------


@pytest.mark.slow  # ranks are started anew
def test_a_dead_rank_writes_no_more() -> None:
    """Its process took its mappings along, so its peers free what it had mapped. One that only stands still, in a
    debugger say, may go on writing one day."""
    heard: list[str] = []
    with RankPool(2) as pool, pytest.raises(RankFailed, match="exit code -9"):
        pool.run(check_dead, on_event=heard.append, limit_s=60.0)
    assert heard == ["kept while it stands still", "freed after its end"]


def check_dead(context: RankContext) -> None:
    ranks = RankGroup(context.group, timeout_s=PATIENCE_S)
    with fake_driver() as driver:
        buffer = SymmetricBuffer(LAYOUT, ranks)
        others = ranks.all_gather_object(os.getpid(), "pids")
        if context.rank == 1:
            time.sleep(100)
        os.kill(others[1], signal.SIGSTOP)
        buffer.close()
        time.sleep(0.1)
        release_dropped()
        if len(driver.memory) == 1:
            context.report("kept while it stands still")
        os.kill(others[1], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while driver.memory and time.monotonic() < deadline:
            time.sleep(0.01)
            release_dropped()
        if driver.is_clean:
            context.report("freed after its end")


# -- the caller's defaults --------------------------------------------------------------------------------------


@on_driver("two")
@pytest.mark.parametrize("default", ["meta", torch.bfloat16], ids=str)
def test_the_callers_defaults_do_no_harm(ranks: RankGroup, driver: FakeDriver, default: str | torch.dtype) -> None:
    """Programs set a default device or dtype for their own tensors; ours say what they are."""
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_device(default) if isinstance(default, str) else torch.set_default_dtype(default)
        buffer = SymmetricBuffer(LAYOUT, ranks)
        rows = buffer.view("rows", torch.float32, (2, 2))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    assert buffer.peers.tolist() == buffer.addresses
    assert rows.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    del rows
    close_together([buffer])
    meet(ranks)
