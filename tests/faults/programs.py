"""Programs of several processes that start at once and end as programs do.

A program costs seconds to start, since it imports torch. These are forks of one process that has imported all, and
each leaves that process's main module. So Python ends in it as in any program: exit handlers run, and modules are
taken down. Processes that multiprocessing forks skip that.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = ("tests.faults.endings", "tests.faults.random_faults", "tests.faults.workloads")
GROUP_S = 60.0
"""Timeout of process groups: far above what a rank of a test may take."""
STACKS_S = 1.0
"""Time to write the stacks of a process that hangs."""


@dataclass(frozen=True)
class Signal:
    """What happens to a process from outside.

    Attributes:
        rank: whose process.
        number: of the signal.
        after_s: seconds after all ranks were ready.
    """

    rank: int
    number: int
    after_s: float


@dataclass
class Ended:
    """What became of a program.

    Attributes:
        codes: exit codes by rank, negative for signals. None: the process did not end in time, and was killed.
        said: what each rank said with :meth:`Rank.say`.
        output: what each rank printed, and its stacks if it hung.
    """

    codes: list[int | None]
    said: list[list[Any]]
    output: list[str]


class Programs:
    """Starts programs one after the other. It is a context manager."""

    def __enter__(self) -> Programs:
        self._pipe, theirs = Pipe()
        start = f"from {__name__} import main; main({theirs.fileno()})"
        arguments = [sys.executable, "-W", "ignore", "-c", start]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self._process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.wait()

    def run(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        limit_s: float = 60.0,
        signals: Sequence[Signal] = (),
    ) -> Ended:
        """Run ``function(rank, *args)`` as the program of each rank, where ``rank`` is a :class:`Rank`.

        Args:
            function: importable by name.
            num_ranks: how many processes.
            *args: picklable.
            limit_s: a program that takes longer hangs. A process that a signal has stopped is killed when the others
                have ended.
            signals: what happens to processes after all of them have said that they are ready.
        """
        self._pipe.send((function, num_ranks, args, limit_s, list(signals)))
        return self._pipe.recv()


@dataclass
class Rank:
    """One process of a program.

    Attributes:
        rank, num_ranks: which, of how many.
        folder: of this program.
    """

    rank: int
    num_ranks: int
    folder: Path
    _ready: int = field(repr=False, default=-1)
    _process: int = field(repr=False, default_factory=os.getpid)
    _port: int = field(repr=False, default=0)

    def begin(self) -> None:
        """Make the default process group, over gloo. Its store is in another process, as with ``torchrun``."""
        torch.set_num_threads(1)
        limit = timedelta(seconds=GROUP_S)
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=limit)
        own = dist.PrefixStore(str(self.folder), store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=self.rank, world_size=self.num_ranks, timeout=limit)

    def ready(self) -> None:
        """Let signals begin, once all ranks have come here. Processes that these start have no part in that."""
        if self._process == os.getpid():
            os.write(self._ready, b".")

    def keep(self, *things: Any) -> None:
        """Keep them until Python takes down modules. It leaves those that were there before the fork."""
        module = types.ModuleType(f"kept by {self}, with {len(sys.modules)} modules")
        module.things = things  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module

    def say(self, *what: Any) -> None:
        """Leave something to be judged, as JSON. It is there also if the process is killed next."""
        with open(self.folder / f"said{self.rank}", "a") as file:
            file.write(json.dumps(what) + "\n")


Program = tuple[Callable[..., Any], Rank, tuple[Any, ...]]


def serve(pipe: Connection, port: int) -> Program | None:
    """Start programs until nobody asks for one. In a process of a program it returns what that is to run."""
    while True:
        try:
            function, num_ranks, args, limit_s, signals = pipe.recv()
        except (EOFError, ConnectionError):
            return None
        folder = Path(tempfile.mkdtemp(prefix="tokenloom-program-"))
        ready, ranks_ready = os.pipe()
        processes: list[int] = []
        for rank in range(num_ranks):
            process = os.fork()
            if process == 0:
                pipe.close()
                os.close(ready)
                output = os.open(folder / f"output{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                return function, Rank(rank, num_ranks, folder, ranks_ready, os.getpid(), port), args
            processes.append(process)
        os.close(ranks_ready)
        running = _Running(processes, ready, signals)
        try:
            codes = running.until_ended(pipe, limit_s)
            said = [_lines(folder / f"said{rank}") for rank in range(num_ranks)]
            output_of = [(folder / f"output{rank}").read_text(errors="replace") for rank in range(num_ranks)]
            pipe.send(Ended(codes, said, output_of))
        except (EOFError, ConnectionError):
            return None
        finally:
            running.close()
            shutil.rmtree(folder)


class _Running:
    """The processes of a program.

    Args:
        processes: their ids, by rank.
        ready: where each rank writes a byte once it is ready.
        signals: what happens to them then.
    """

    def __init__(self, processes: list[int], ready: int, signals: list[Signal]) -> None:
        self._processes, self._ready = processes, ready
        self._left = {os.pidfd_open(process): rank for rank, process in enumerate(processes)}
        self._signals = sorted(signals, key=lambda each: each.after_s)
        self._num_ready = 0
        self._began = float("inf")
        self._stopped: set[int] = set()

    def until_ended(self, pipe: Connection, limit_s: float) -> list[int | None]:
        """Wait for all processes, and end those that are stopped or take too long.

        Raises:
            EOFError: who has asked for the program is gone.
        """
        deadline = time.monotonic() + limit_s
        codes: list[int | None] = [None] * len(self._processes)
        while not self._is_over() and (now := time.monotonic()) < deadline:
            until = min([deadline, *(self._began + each.after_s for each in self._signals[:1])])
            events = [*self._left, pipe, *([self._ready] if self._num_ready < len(codes) else [])]
            for event in wait(events, max(0.0, until - now)):
                if event is pipe:
                    raise EOFError
                if event == self._ready:
                    self._count_ready()
                else:
                    rank = self._left.pop(event)  # type: ignore[arg-type]
                    os.close(event)  # type: ignore[arg-type]
                    codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self._processes[rank], 0)[1])
            self._send_signals()
        if not self._is_over():
            for rank in self._left.values():
                os.kill(self._processes[rank], signal.SIGUSR1)
            time.sleep(STACKS_S)
        else:
            for rank in self._stopped.intersection(self._left.values()):
                codes[rank] = -signal.SIGKILL
        return codes

    def _is_over(self) -> bool:
        """Whether all processes have ended, but for those that are stopped for ever."""
        woken = {each.rank for each in self._signals if each.number == signal.SIGCONT}
        return self._stopped.difference(woken).issuperset(self._left.values())

    def _count_ready(self) -> None:
        came = len(os.read(self._ready, 64))
        self._num_ready += came or len(self._processes)
        if came and self._num_ready == len(self._processes):
            self._began = time.monotonic()

    def _send_signals(self) -> None:
        while self._signals and time.monotonic() >= self._began + self._signals[0].after_s:
            each = self._signals.pop(0)
            if each.rank not in self._left.values():
                continue
            os.kill(self._processes[each.rank], each.number)
            if each.number == signal.SIGSTOP:
                self._stopped.add(each.rank)
            elif each.number == signal.SIGCONT:
                self._stopped.discard(each.rank)

    def close(self) -> None:
        """End what is left."""
        for handle, rank in self._left.items():
            os.kill(self._processes[rank], signal.SIGKILL)
            os.waitpid(self._processes[rank], 0)
            os.close(handle)
        os.close(self._ready)


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def host_store() -> int:
    """Start a process that hosts a store for all programs, until this one ends; its port."""
    hears, says = os.pipe()
    stays, ends = os.pipe()
    if os.fork() == 0:
        os.close(ends)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(says, str(store.port).encode())
        os.read(stays, 1)
        os._exit(0)
    os.close(says)
    os.close(stays)
    os.set_inheritable(ends, False)
    port = int(os.read(hears, 16))
    os.close(hears)
    _ends.append(ends)
    return port


_ends: list[int] = []
"""Of the process that hosts the store, which ends when all that have this are gone."""


def main(pipe: int) -> None:
    """Serve programs, or be one."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else Python takes twice as long to end
    program = serve(Connection(pipe), host_store())
    if program is not None:
        function, rank, args = program
        function(rank, *args)
