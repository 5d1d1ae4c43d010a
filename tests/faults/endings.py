"""Programs that end in every way there is: none may abort, or end otherwise than it says.

Threads that could abort a program as Python ends are held back in half of them: they run only when it takes down its
modules. Otherwise they would nearly always be quicker.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

import tokenloom as tl
from tests.faults.programs import Ended, Programs, Rank, Signal
from tests.faults.workloads import PATIENCE_S, WORKLOADS, Workload, await_others
from tests.support.patience import only_late

TIMEOUT_S = 1.5
"""Longest wait for a rank that is late on purpose."""
TAKEN_DOWN = "taken down"
"""A file that says that a rank takes down its modules."""
TEARDOWN_S = 0.5
LIMIT_S = 90.0
LOST, STATUS = 7, 3
"""Exit codes of a rank that is lost, and of ``sys.exit``."""
CLOSINGS = ("closed and destroyed", "closed", "destroyed", "open")
WAYS = ("return", "raise", "sys.exit", "Ctrl-C", "pytest")
LOSSES = ("", "os._exit", "late", "stopped", "mask_ranks")
LATE = ("late", "stopped")
CHILDREN = ("spawn", "forkserver")
"""How a program starts its ranks itself. That takes seconds."""
HELD_BACK = ("pt_gloo_runloop", "tokenloom waiter")
"""Names of threads that are held back, of torch and of Python."""


@dataclass(frozen=True)
class Ending:
    """How a program ends.

    Attributes:
        workload: what it does before. on_timeout: as of a Communicator.
        loss: what happens to its last rank before.
        closing: what it closes. keeps: it holds references to all else until Python ends.
        way: how its main thread ends.
        held_back: its other threads run only when Python takes down modules.
        num_ranks: how many processes it has.
        start: how they start, if not at once.
    """

    workload: str = "pairs"
    on_timeout: str = "raise"
    loss: str = ""
    closing: str = "open"
    keeps: bool = True
    way: str = "return"
    held_back: bool = True
    num_ranks: int = 2
    start: str = ""

    @classmethod
    def drawn(cls, seed: int) -> Ending:
        """The one of this number."""
        draw = random.Random(seed)
        workload = draw.choice(list(WORKLOADS))
        on_timeout = draw.choice(("raise", "mask")) if workload != "normal" else "raise"
        losses = LOSSES if workload != "normal" and (workload, on_timeout) != ("low latency", "raise") else LOSSES[:-1]
        drawn = cls(
            workload,
            on_timeout,
            draw.choice(losses),
            draw.choice(CLOSINGS),
            draw.random() < 0.7,
            draw.choice(WAYS),
            draw.random() < 0.5,
            draw.choice((2, 3, 4)),
            draw.choice(CHILDREN) if draw.random() < 0.03 else "",
        )
        return replace(drawn, start="") if drawn.loss == "stopped" else drawn  # who starts a rank cannot be stopped

    def code(self, rank: int) -> int:
        """The exit code that a rank must have."""
        if self.loss == "os._exit" and rank == self.num_ranks - 1:
            return LOST
        if self.loss == "stopped" and rank == self.num_ranks - 1:
            return -signal.SIGKILL
        interrupted = 1 if self.start else -signal.SIGINT  # multiprocessing takes it for any other exception
        return {"raise": 1, "sys.exit": STATUS, "Ctrl-C": interrupted}.get(self.way, 0)


def program(rank: Rank, ending: Ending) -> None:
    """Be a rank of the program, or start one."""
    if not ending.start:
        rank_main(rank, ending)
        return
    child = multiprocessing.get_context(ending.start).Process(target=rank_main, args=(rank, ending))
    child.start()
    child.join()
    rank.say("child", child.exitcode)


def rank_main(rank: Rank, ending: Ending) -> None:
    rank.begin()
    victim = {rank.num_ranks - 1} if ending.loss else set[int]()
    with only_late(victim):
        work = WORKLOADS[ending.workload](rank, ending.on_timeout)
        for step in range(2):
            work.step(step)
        kept = (work, dist.group.WORLD) if ending.keeps else ()
        rank.keep(*kept, *([Threads(rank)] if ending.held_back else []))  # the last one goes first
        del kept
        if ending.loss in LATE:
            await_others(TIMEOUT_S, TIMEOUT_S)
        rank.ready()
        if not victim:
            work.step(2)
        elif rank.rank not in victim:
            lose_one(rank, work, ending)
    if rank.rank in victim:
        be_lost(rank, work, ending)
    if "closed" in ending.closing:
        work.close()
    if "destroyed" in ending.closing:
        dist.destroy_process_group()
    rank.say("ends")
    del work
    end(rank, ending.way)


def be_lost(rank: Rank, work: Workload, ending: Ending) -> None:
    """As the last rank."""
    if ending.loss == "os._exit":
        os._exit(LOST)
    if ending.loss == "stopped":
        time.sleep(LIMIT_S)  # as if it were
    if ending.loss == "late":
        deadline = time.monotonic() + (PATIENCE_S if ending.held_back else 4 * TIMEOUT_S)
        while not (rank.folder / TAKEN_DOWN).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        with suppress(tl.TokenloomError):
            work.step(2)


def lose_one(rank: Rank, work: Workload, ending: Ending) -> None:
    """As any other rank: it goes on, or hears what has happened."""
    if ending.loss == "mask_ranks":
        work.mask(rank.num_ranks - 1)
    if ending.on_timeout == "mask" or ending.loss == "mask_ranks":
        work.step(2)
        work.step(3)
    else:
        # The others' wait may be over before this one began its own, and then it hears that of them.
        with suppress(tl.PeerTimeout, tl.CommunicatorBroken):
            work.step(2)


class Threads:
    """Threads that run from now on when nothing else wants to, and freely once Python takes down modules."""

    def __init__(self, rank: Rank) -> None:
        self._processors = os.sched_getaffinity(0)
        self._threads = []
        # Python's own modules may be gone when these are called.
        self._schedule, self._place, self._sleep = os.sched_setscheduler, os.sched_setaffinity, time.sleep
        self._open, self._taken_down = os.open, (str(rank.folder / TAKEN_DOWN), os.O_CREAT)
        self._usual, self._param = os.SCHED_OTHER, os.sched_param(0)
        os.sched_setaffinity(0, {rank.rank % len(self._processors)} & self._processors or self._processors)
        ours = {thread.native_id: thread.name for thread in threading.enumerate()}
        for folder in Path("/proc/self/task").iterdir():
            thread = int(folder.name)
            if ours.get(thread, (folder / "comm").read_text().strip()) in HELD_BACK:
                os.sched_setaffinity(thread, os.sched_getaffinity(0))
                os.sched_setscheduler(thread, os.SCHED_IDLE, self._param)
                self._threads.append(thread)

    def __del__(self) -> None:
        for thread in self._threads:
            try:
                self._schedule(thread, self._usual, self._param)
                self._place(thread, self._processors)
            except OSError:  # it has ended
                pass
        self._open(*self._taken_down)
        self._sleep(TEARDOWN_S)


def end(rank: Rank, way: str) -> None:
    """End the main thread."""
    if way == "raise":
        raise RuntimeError("the program fails")
    if way == "sys.exit":
        sys.exit(STATUS)
    if way == "Ctrl-C":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it
        signal.raise_signal(signal.SIGINT)
    if way == "pytest":
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds to load
        file = rank.folder / f"test_{rank.rank}.py"
        file.write_text("def test_it(): pass")
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, str(file)]))


def faults(ending: Ending, programs: Programs) -> tuple[list[str], Ended]:
    """What is wrong with how the program ends, and how it has."""
    stop = [Signal(ending.num_ranks - 1, signal.SIGSTOP, 0.0)] if ending.loss == "stopped" else []
    ended = programs.run(program, ending.num_ranks, ending, limit_s=LIMIT_S, signals=stop)
    found = []
    for rank, (code, said) in enumerate(zip(ended.codes, ended.said, strict=True)):
        if ending.start:
            code = said[-1][1] if said and code == 0 else code
        if code != ending.code(rank):
            found.append(f"rank {rank} ended with {code}, expected {ending.code(rank)}")
        elif code not in (LOST, -signal.SIGKILL) and ["ends"] not in said:
            found.append(f"rank {rank} did not come to its end")
    return found, ended
