"""Whether a process has ended, told for certain or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tokenloom.runtime import process_identity
from tokenloom.runtime.process_identity import ProcessIdentity

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc (Linux)")

PROGRAM = """
import sys
from tokenloom.runtime.process_identity import ProcessIdentity
me = ProcessIdentity.own()
print(me.place, me.pid, me.started, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    """A process that does nothing until it is killed, and what it says of itself."""
    started = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True)
    assert started.stdout is not None
    place, pid, when = started.stdout.readline().split()
    yield started, ProcessIdentity(place, int(pid), when)
    started.kill()
    started.communicate()


def test_a_process_that_runs(other: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    """Also while it is stopped: it may go on."""
    process, identity = other
    assert not identity.has_ended()
    assert not ProcessIdentity.own().has_ended()
    process.send_signal(signal.SIGSTOP)
    assert not identity.has_ended()


def test_a_process_that_was_killed(other: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    """Before and after its parent has asked for its exit code."""
    process, identity = other
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identity.has_ended(), "a zombie holds nothing any more"
    process.wait()
    assert identity.has_ended()


def test_a_pid_that_was_given_again(other: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    """Another process has it now, as its start shows."""
    _, identity = other
    assert replace(identity, started="1").has_ended()


@pytest.mark.parametrize("place", ["", "another host/pid:[1]"])
def test_elsewhere_nothing_is_known(place: str, other: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    """In another container or on another host the same PID means nothing."""
    process, identity = other
    process.kill()
    process.wait()
    assert not replace(identity, place=place).has_ended()


def test_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A system that tells nothing: every process may be alive."""
    identity = ProcessIdentity.own()
    monkeypatch.setattr(process_identity, "PROC", tmp_path)
    assert ProcessIdentity.own().place == ""
    assert not replace(identity, pid=2**22 - 1).has_ended()
