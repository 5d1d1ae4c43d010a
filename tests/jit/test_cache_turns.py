"""Who compiles a kernel that several processes of a host want at the same time."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_kernels import needs_nvrtc, scale_spec
from tokenloom.jit import cache, compiler
from tokenloom.jit.compiler import KernelSpec

pytestmark = [needs_nvrtc, pytest.mark.usefixtures("package")]
CONTEXT = multiprocessing.get_context("spawn")
LIMIT_S, ENOUGH_TO_LOOK_S = 60.0, 0.2
CODE, LOG = b"code", "log"


def get_one(package: Path, folder: Path, which: int, meeting: Any, said: Any, forks: bool) -> None:
    """One process. Its compiler says that it has begun, and ends when as many as are to have come to the meeting."""

    def compile_kernel(spec: KernelSpec) -> tuple[bytes, str]:
        if forks and os.fork() == 0:  # a child that has the lock's file too, and lives as long as this process
            parent = os.getppid()
            while os.getppid() == parent:
                time.sleep(ENOUGH_TO_LOOK_S)
            os._exit(0)
        said.send("compiles")
        meeting.wait()
        return CODE + bytes([which]), LOG

    compiler.PACKAGE, cache.compile_kernel = package, compile_kernel
    said.send("wants")
    said.send(cache.get(scale_spec(which=which), folder).cubin)
    said.recv()


class Racer:
    """A process that wants a kernel, and what it says of that."""

    def __init__(self, package: Path, folder: Path, which: int, meeting: Any, forks: bool = False) -> None:
        self._pipe, its_end = CONTEXT.Pipe()  # of its own: a killed process could leave a queue locked
        arguments = (package, folder, which, meeting, its_end, forks)
        self.process = CONTEXT.Process(target=get_one, args=arguments, daemon=True)
        self.process.start()
        its_end.close()

    def has_said_more(self) -> bool:
        """Whether there is something to hear at once."""
        return self._pipe.poll(0)

    def says(self) -> Any:
        """What it says next."""
        assert self._pipe.poll(LIMIT_S)
        return self._pipe.recv()

    def end(self) -> None:
        """Let it end, once it has its kernel."""
        self._pipe.send("end")
        self.process.join(LIMIT_S)


def test_each_kernel_is_compiled_once(package: Path, tmp_path: Path) -> None:
    """Eight ranks on 16 cores would all compile the same. Two kernels are compiled at the same time, though: neither
    compiler here ends before the other has begun, and all processes want one."""
    folder, wanted = tmp_path / "cache", [0, 1, 0, 1, 0]
    meeting = CONTEXT.Barrier(3, timeout=LIMIT_S)
    racers = [Racer(package, folder, which, meeting) for which in wanted]
    assert [racer.says() for racer in racers] == ["wants"] * len(wanted)
    while sum(racer.has_said_more() for racer in racers) < 2:
        time.sleep(ENOUGH_TO_LOOK_S)
    time.sleep(ENOUGH_TO_LOOK_S)
    assert sum(racer.has_said_more() for racer in racers) == 2
    meeting.wait()
    compiling = []
    for racer, which in zip(racers, wanted, strict=True):
        said = racer.says()
        if said == "compiles":
            compiling.append(which)
            said = racer.says()
        assert said == CODE + bytes([which])
        racer.end()
    assert sorted(compiling) == [0, 1]
    assert [path.suffix for path in folder.iterdir()] == [".kernel"] * 2


def test_who_has_waited_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what the other one has made. Whoever wants another kernel does not wait."""
    begun, waits, goes_on = (threading.Event() for _ in range(3))
    compiled: list[int] = []
    real = fcntl.flock

    def compile_kernel(spec: KernelSpec) -> tuple[bytes, str]:
        compiled.append(dict(spec.shape)["which"])
        if compiled == [0]:
            begun.set()
            assert goes_on.wait(LIMIT_S)
        return CODE, LOG

    def flock(*arguments: Any) -> None:
        try:
            real(*arguments)
        except BlockingIOError:
            waits.set()
            raise

    monkeypatch.setattr(cache, "_MOST_WAIT_S", 10.0)
    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        stack.callback(goes_on.set)
        gets = [threads.submit(cache.get, scale_spec(which=0), tmp_path)]
        assert begun.wait(LIMIT_S)
        began = time.monotonic()
        cache.get(scale_spec(which=1), tmp_path)
        assert time.monotonic() - began < cache._MOST_WAIT_S / 2
        monkeypatch.setattr(fcntl, "flock", flock)
        gets.append(threads.submit(cache.get, scale_spec(which=0), tmp_path))
        assert waits.wait(LIMIT_S)
        goes_on.set()
        assert [each.result(LIMIT_S).cubin for each in gets] == [CODE] * 2
    assert compiled == [0, 1]


def test_a_killed_compiler_is_replaced(package: Path, tmp_path: Path) -> None:
    """The next one compiles at once, and deletes what the killed one has left."""
    folder, nobody_comes, alone = tmp_path / "cache", CONTEXT.Barrier(2), CONTEXT.Barrier(1)
    victim = Racer(package, folder, 0, nobody_comes)
    assert [victim.says(), victim.says()] == ["wants", "compiles"]
    heir = Racer(package, folder, 0, alone)
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    assert [heir.says() for _ in range(3)] == ["wants", "compiles", CODE + b"\0"]
    heir.end()
    assert [path.suffix for path in folder.iterdir()] == [".kernel"]


def test_children_of_a_compiler_hold_nobody_up(package: Path, tmp_path: Path) -> None:
    """A process that is forked meanwhile, for loading data say, has the file of the lock too, and keeps it."""
    folder, meeting = tmp_path / "cache", CONTEXT.Barrier(2, timeout=LIMIT_S)
    parent = Racer(package, folder, 0, meeting, forks=True)
    assert [parent.says(), parent.says()] == ["wants", "compiles"]
    waiter = Racer(package, folder, 0, meeting)
    assert waiter.says() == "wants"
    time.sleep(ENOUGH_TO_LOOK_S)
    meeting.wait()
    began = time.monotonic()
    assert waiter.says() == CODE + b"\0"
    assert time.monotonic() - began < cache._MOST_WAIT_S / 2
    assert parent.says() == CODE + b"\0"
    waiter.end()
    parent.end()


def test_without_room_all_compile_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk nobody finds what another one has made, and one after the other would take as long as all."""
    first, others = threading.Event(), threading.Barrier(2, timeout=LIMIT_S)
    compiles: list[int] = []

    def compile_kernel(spec: KernelSpec) -> tuple[bytes, str]:
        compiles.append(len(compiles))
        if len(compiles) == 1:
            assert first.wait(LIMIT_S)
        else:
            others.wait()  # neither ends before the other has begun
        return CODE, LOG

    def refuse(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    monkeypatch.setattr(os, "replace", refuse)
    with ThreadPoolExecutor(3) as threads:
        gets = [threads.submit(cache.get, scale_spec(), tmp_path) for _ in range(3)]
        while not compiles:
            time.sleep(ENOUGH_TO_LOOK_S)
        time.sleep(ENOUGH_TO_LOOK_S)
        first.set()
        assert [each.result(LIMIT_S).cubin for each in gets] == [CODE] * 3
    assert len(compiles) == 3


def test_a_stopped_compiler_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank in a debugger, say: the others compile the kernel themselves after a while."""
    wait_s = 0.3
    monkeypatch.setattr(cache, "_MOST_WAIT_S", wait_s)
    monkeypatch.setattr(cache, "compile_kernel", lambda spec: (CODE, LOG))
    with open(tmp_path / f"{cache.key_of(scale_spec())}.partial", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        assert cache.get(scale_spec(), tmp_path).cubin == CODE
        assert time.monotonic() - began >= wait_s


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems of networks have none: everybody compiles at once."""

    def refuse(*arguments: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(cache, "compile_kernel", lambda spec: (CODE, LOG))
    assert cache.get(scale_spec(), tmp_path).cubin == CODE
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".kernel"]
