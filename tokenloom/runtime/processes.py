"""Real ranks for the demo, the benchmarks and the tests: one process each, started once and used many times."""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tokenloom import env
from tokenloom.errors import PeerError, PeerTimeout, TokenloomError

CPU_RANKS = 4
GRACE_S = 5.0
"""Time that the other ranks have to report once one has failed, before they are ended."""
EXIT_S = 20.0
"""Time from the end of a process's pipe to that of the process, which frees its memory between them. On a machine with
more processes than cores a second was too short for its exit code."""


class RankFailed(TokenloomError, RuntimeError):
    """A rank raised, died or hung.

    Attributes:
        rank: first rank that failed by itself, not because another rank did.
        details: that rank's traceback, or the stacks of all ranks if they hung.
        said: message of the error alone if it is one of tokenloom's, which are made for people. Else "".
    """

    def __init__(self, rank: int, summary: str, details: str, said: str = "") -> None:
        self.rank = rank
        self.details = details
        self.said = said
        super().__init__(f"{summary}\n{details}")


class RankContext:
    """First argument of a function that runs on the ranks.

    Attributes:
        rank: rank within the group of this run.
        num_ranks: size of the group.
        group: process group of this run.
        device: this rank's device.
    """

    def __init__(self, rank: int, num_ranks: int, group: dist.ProcessGroup, device: torch.device, send: Connection):
        self.rank = rank
        self.num_ranks = num_ranks
        self.group = group
        self.device = device
        self._send = send

    def report(self, event: Any) -> None:
        """Pass something picklable to ``on_event`` in the parent, at once."""
        self._send.send(("event", event))


class RankPool:
    """Processes that form a torch.distributed world and run functions together.

    Use it as a context manager. A function given to :meth:`run` must be importable by name in a new process.

    Args:
        num_ranks: number of processes.
        device: "cpu" (gloo, one thread each) or "cuda" (NCCL, one GPU each). More ranks than GPUs share them in turns:
            results are the same, and a call takes milliseconds.
        timeout_s: timeout of their process groups, in seconds.
        ranks_per_node: NCCL takes this many ranks for those of one host, and carries rows to others as between hosts.
            None: all are on one.
    """

    def __init__(
        self, num_ranks: int, device: str = "cpu", timeout_s: float = 120.0, ranks_per_node: int | None = None
    ) -> None:
        self.num_ranks = num_ranks
        self.device = device
        self._timeout_s = timeout_s
        self._ranks_per_node = ranks_per_node
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes. :meth:`run` does this when needed."""
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="tokenloom-ranks-")
        context = mp.get_context("spawn")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            host = None if self._ranks_per_node is None else rank // self._ranks_per_node
            arguments = (rank, self.num_ranks, self.device, host, self._folder.name, self._timeout_s, theirs)
            process = context.Process(target=_rank_main, args=arguments, daemon=True, name=f"tokenloom rank {rank}")
            with _ignored_interrupts():  # until _rank_main is imported, Ctrl-C would end the rank with a traceback
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        limit_s: float = 300.0,
        on_event: Callable[[Any], None] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(context, *args, **kwargs)`` on the first ``ranks`` ranks and return their results, by rank.

        Args:
            function: importable function that gets a :class:`RankContext` first.
            ranks: number of ranks that take part, or None for all.
            limit_s: time limit for all of it, in seconds.
            on_event: function to call with what ranks pass to ``context.report``, or None.

        Raises:
            RankFailed: a rank raised, died, or was not done in time. The processes are ended, and the next run starts
                new ones.
        """
        self.start()
        ranks = ranks or self.num_ranks
        task = pickle.dumps((function, args, kwargs, ranks))
        try:
            for pipe in self._pipes:
                with suppress(ConnectionError):  # a rank that died since the last run; collecting says so
                    pipe.send_bytes(task)
            return self._collect(limit_s, on_event)[:ranks]
        except BaseException:
            self.close()
            raise

    def _collect(self, limit_s: float, on_event: Callable[[Any], None] | None) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, tuple[bool, str, str]] = {}
        deadline = time.monotonic() + limit_s
        while len(results) + len(failures) < self.num_ranks:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results and rank not in failures]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            on_time = ready and time.monotonic() < deadline  # events may keep coming forever
            if not on_time and failures:
                break
            if not on_time:
                late = [rank for rank in range(self.num_ranks) if rank not in results]
                stacks = self._stacks()
                raise RankFailed(late[0], f"ranks {late} were not done within {limit_s:g} s; their stacks:", stacks)
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                kind, value = self._receive(rank)
                if kind == "event":
                    if on_event is not None:
                        on_event(value)
                elif kind == "result":
                    results[rank] = value
                else:
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    failures[rank] = value
        if failures:
            # A rank that failed by itself comes before those that failed because of it.
            rank = min(failures, key=lambda rank: (failures[rank][0], rank))
            _, details, said = failures[rank]
            raise RankFailed(rank, f"rank {rank} of {self.num_ranks} failed:", details, said)
        return [results[rank] for rank in range(self.num_ranks)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join(EXIT_S)
            return "failure", (False, f"the process ended with exit code {self._processes[rank].exitcode}", "")

    def _stacks(self) -> str:
        """Collect the Python stacks of all ranks, which write them on SIGUSR1."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        assert self._folder is not None
        files = [Path(self._folder.name, f"stack{rank}") for rank in range(self.num_ranks)]
        return "\n".join(f"--- rank {rank}\n{file.read_text()}" for rank, file in enumerate(files) if file.exists())

    def close(self) -> None:
        """End the processes. Calling it twice is fine."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank takes this as the end
        for end, patience_s in ((None, 0.5), ("terminate", 2.0), ("kill", 10.0)):
            deadline = time.monotonic() + patience_s
            for process in self._processes:
                if end is not None and process.is_alive():
                    getattr(process, end)()
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def default_ranks(device: str | None = None) -> tuple[int, str]:
    """Choose (ranks, device) for trying things out: all GPUs if there are two or more, else CPU_RANKS processes.

    Args:
        device: "cpu" or "cuda"; None picks one. With "cuda" there is a rank for each GPU, so there may be none.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus >= 2 else "cpu")
    return (gpus if device == "cuda" else CPU_RANKS), device


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Make processes that start in this block ignore Ctrl-C from the first moment: exec keeps ignored signals."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signal.signal works in the main thread alone
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _rank_main(
    rank: int, num_ranks: int, device: str, host: int | None, folder: str, timeout_s: float, pipe: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends them
    threading.Thread(target=_end_with_parent, args=(folder,), name="end with parent", daemon=True).start()
    with open(Path(folder, f"stack{rank}"), "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
        try:
            if device == "cuda":
                own_device = torch.device(device, rank % torch.cuda.device_count())
                torch.cuda.set_device(own_device)
                if num_ranks > torch.cuda.device_count():
                    host = rank  # NCCL refuses two ranks of one host on one GPU
                if host is not None:
                    env.appear_as_a_host(f"host {host}")
            else:
                own_device = torch.device(device)
                torch.set_num_threads(1)
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout_s),
                device_id=own_device if device == "cuda" else None,
            )
        except BaseException as error:
            _send_failure(pipe, error)
            return
        groups: dict[int, Any] = {}
        while True:
            try:
                task = pipe.recv_bytes()
            except (EOFError, ConnectionError):
                break
            try:
                function, args, kwargs, ranks = pickle.loads(task)
                if ranks not in groups:
                    groups[ranks] = dist.new_group(list(range(ranks)))
                result = None
                if rank < ranks:
                    context = RankContext(rank, ranks, groups[ranks], own_device, pipe)
                    result = function(context, *args, **kwargs)
                pipe.send(("result", result))
            except BaseException as error:
                _send_failure(pipe, error)
    sys.stdout.flush()
    os._exit(0)  # a world that may be gone in part cannot tear down its process groups in order


def _end_with_parent(folder: str) -> None:
    """End this rank, whatever it does, when the process that started it was killed and left the folder behind."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _send_failure(pipe: Connection, error: BaseException) -> None:
    because_of_another = isinstance(error, PeerError | PeerTimeout)
    said = f"{type(error).__name__}: {error}" if isinstance(error, TokenloomError) else ""
    with suppress(BrokenPipeError):  # the parent was interrupted and no longer listens
        pipe.send(("failure", (because_of_another, "".join(traceback.format_exception(error)), said)))
