"""Who compiles a kernel that several processes of a host want at the same time."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_kernels import needs_nvrtc, scale_spec, write_package
from tokenloom.jit import cache, compiler
from tokenloom.jit.compiler import KernelSpec

pytestmark = needs_nvrtc
CONTEXT = multiprocessing.get_context("spawn")
LIMIT_S, ENOUGH_TO_LOOK_S = 20.0, 0.2
CODE, LOG = b"code", "log"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels are looked for here, not in the installed package."""
    folder = write_package(tmp_path / "package")
    monkeypatch.setattr(compiler, "PACKAGE", folder)
    return folder


def get_one(package: Path, folder: Path, which: int, meeting: Any, said: Any) -> None:
    """One process. Its compiler says that it has begun, and ends when as many as are to have come to the meeting."""

    def compile_kernel(spec: KernelSpec) -> tuple[bytes, str]:
        said.send("compiles")
        meeting.wait()
        return CODE + bytes([which]), LOG

    compiler.PACKAGE, cache.compile_kernel = package, compile_kernel
    said.send("wants")
    said.send(cache.get(scale_spec(which=which), folder).cubin)


class Racer:
    """A process that wants a kernel, and what it says of that."""

    def __init__(self, package: Path, folder: Path, which: int, meeting: Any) -> None:
        self._reader, writer = CONTEXT.Pipe(duplex=False)  # of its own: a killed process could leave a queue locked
        self.process = CONTEXT.Process(target=get_one, args=(package, folder, which, meeting, writer), daemon=True)
        self.process.start()
        writer.close()

    def says(self) -> Any:
        """What it says next."""
        assert self._reader.poll(LIMIT_S)
        return self._reader.recv()


def test_each_kernel_is_compiled_once(package: Path, tmp_path: Path) -> None:
    """Eight ranks on 16 cores would all compile the same. Two kernels are compiled at the same time, though: neither
    compiler here ends before the other has begun, and all processes want one."""
    folder, wanted = tmp_path / "cache", [0, 1, 0, 1, 0]
    meeting = CONTEXT.Barrier(3, timeout=LIMIT_S)
    racers = [Racer(package, folder, which, meeting) for which in wanted]
    assert [racer.says() for racer in racers] == ["wants"] * len(wanted)
    time.sleep(ENOUGH_TO_LOOK_S)
    meeting.wait()
    compiling = []
    for racer, which in zip(racers, wanted, strict=True):
        said = racer.says()
        if said == "compiles":
            compiling.append(which)
            said = racer.says()
        assert said == CODE + bytes([which])
        racer.process.join(LIMIT_S)
    assert sorted(compiling) == [0, 1]
    assert [path.suffix for path in folder.iterdir()] == [".kernel"] * 2


def test_a_killed_compiler_is_replaced(package: Path, tmp_path: Path) -> None:
    """The next one compiles at once, and deletes what the killed one has left."""
    folder, nobody_comes, alone = tmp_path / "cache", CONTEXT.Barrier(2), CONTEXT.Barrier(1)
    victim = Racer(package, folder, 0, nobody_comes)
    assert [victim.says(), victim.says()] == ["wants", "compiles"]
    heir = Racer(package, folder, 0, alone)
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    assert [heir.says() for _ in range(3)] == ["wants", "compiles", CODE + b"\0"]
    heir.process.join(LIMIT_S)
    assert [path.suffix for path in folder.iterdir()] == [".kernel"]


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
