"""Copies of the tree with one rule broken, and pytest in a forked process on each of them.

A fork has torch and pytest imported already, and so have the ranks that its tests start: they are forked as well.
Importing takes three times as long as most of these tests.
"""

from __future__ import annotations

import compileall
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutations.mutation import PACKAGE, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = (PACKAGE, "tests", "examples", "docs", "pyproject.toml")
PRELOADED = ("pytest", "hypothesis", "numpy", "rich", "torch.distributed", "torch.multiprocessing", "torch._dynamo")
"""Imported once, before the forks. Nothing of the tree itself, and nothing that starts a thread."""
COPIED_MODULES = (PACKAGE, "tests")
"""Modules of the tree, which a fork imports anew from its copy."""
POLL_S = 0.02


@dataclass(frozen=True)
class Trial:
    """Tests to run on a copy of the tree.

    Attributes:
        mutation: The rule to break in the copy; None leaves it as it is.
        tests: Node ids.
        num_ranks: Size of the groups to run on.
        gpu: Whether to run the tests that need GPUs, or those that do not.
        limit_s: Longest time for the tests, in seconds.
    """

    mutation: Mutation | None
    tests: tuple[str, ...]
    num_ranks: int
    gpu: bool
    limit_s: float

    def arguments(self) -> list[str]:
        """Arguments of pytest."""
        kind, others = ("cuda", "cpu") if self.gpu else ("cpu", "cuda")
        sizes = [f"not {kind}{n}" for n in (1, 2, 4, 8) if n != self.num_ranks]
        expression = " and ".join([f"not {others}", *sizes])
        markers = ["-m", "gpu" if self.gpu else "not gpu"]
        quick = ["-W", "ignore:This process:DeprecationWarning", "--assert=plain", "--tb=native"]
        return ["-x", "-q", "-p", "no:cacheprovider", *quick, *markers, "-k", expression, *self.tests]


@dataclass(frozen=True)
class Outcome:
    """What pytest said of one copy.

    Attributes:
        code: Its exit status; None if it ran out of time or died.
        failed: Node id of the first test that failed, "" if none did.
        tail: Its last lines.
        wall_s: Its duration, in seconds.
    """

    code: int | None
    failed: str
    tail: str
    wall_s: float


def preload() -> None:
    """Import what every fork needs."""
    for name in PRELOADED:
        importlib.import_module(name)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for :func:`run`, with a copy of the tree, compiled: that takes longer than most tests of a mutation."""
    with tempfile.TemporaryDirectory(prefix="tokenloom-mutants-") as name:
        copy = Path(name, "tree")
        copy.mkdir()
        for each in COPIED:
            if (ROOT / each).is_dir():
                shutil.copytree(ROOT / each, copy / each)
            else:
                shutil.copy2(ROOT / each, copy / each)
        compileall.compile_dir(copy, quiet=2)
        yield Path(name)


def run(trials: Iterable[Trial], jobs: int, shared: Path) -> Iterator[tuple[Trial, Outcome]]:
    """Outcomes as they come, ``jobs`` trials at a time."""
    waiting, running = list(reversed(list(trials))), list[_Fork]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Fork(waiting.pop(), shared))
            done = [fork for fork in running if fork.ended()]
            running = [fork for fork in running if fork not in done]
            yield from ((fork.trial, fork.outcome()) for fork in done)
            if not done:
                time.sleep(POLL_S)
    finally:
        for fork in running:
            fork.end()


class _Fork:
    """A process that runs pytest on a copy of its own. Compiled kernels are shared, and not in the user's cache."""

    def __init__(self, trial: Trial, shared: Path) -> None:
        self.trial = trial
        self._folder = tempfile.TemporaryDirectory(prefix="tokenloom-mutant-")
        self._output, self._failed = (Path(self._folder.name, name) for name in ("output.txt", "failed.txt"))
        self._began = time.monotonic()
        self._code: int | None = None
        copy = Path(self._folder.name, "tree")
        _link_tree(shared / "tree", copy, trial.mutation)
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # no thread runs here
            self._pid = os.fork()
        if self._pid == 0:
            _run_pytest(copy, self._output, self._failed, trial, shared / "kernels")

    def ended(self) -> bool:
        """Whether pytest is done, or out of time."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._code = os.waitstatus_to_exitcode(status)
            return True
        return time.monotonic() - self._began > self.trial.limit_s

    def outcome(self) -> Outcome:
        wall_s = time.monotonic() - self._began
        self.end()
        output, failed = (file.read_text() if file.exists() else "" for file in (self._output, self._failed))
        self._folder.cleanup()
        tail = "\n".join(output.rstrip().splitlines()[-12:])
        return Outcome(self._code, failed, tail, wall_s)

    def end(self) -> None:
        """End the process and its ranks."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _link_tree(whole: Path, copy: Path, mutation: Mutation | None) -> None:
    """Make a copy of the tree out of the same files, but for the one that is broken."""
    shutil.copytree(whole, copy, copy_function=os.link)
    if mutation is not None:
        file = mutation.file(copy)
        text = mutation.broken(copy)
        for stale in (file, *file.parent.glob(f"__pycache__/{file.stem}.*.pyc")):
            stale.unlink()
        file.write_text(text)


def _run_pytest(copy: Path, output: Path, failed: Path, trial: Trial, kernels: Path) -> None:
    """Turn this fork into a pytest process of the copy, and end it with pytest's status."""
    code = 70
    try:
        os.setsid()  # so that its ranks can be ended with it
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        for standard in (1, 2):
            os.dup2(file, standard)
        os.chdir(copy)
        os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", TOKENLOOM_CACHE_DIR=str(kernels))
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(each for each in sys.path if Path(each).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in COPIED_MODULES]:
            del sys.modules[name]
        importlib.invalidate_caches()
        if not trial.gpu:  # CUDA does not survive a fork
            _fork_ranks()
        code = int(sys.modules["pytest"].main(trial.arguments(), plugins=[_Plugin(failed)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Plugin:
    """Notes the test that failed. Once a rank has, nobody reads what the others say of it, nor waits for their end."""

    def __init__(self, failed: Path) -> None:
        self._failed = failed

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when == "call":
            self._failed.write_text(report.nodeid)

    def pytest_collection_finish(self) -> None:
        processes: Any = importlib.import_module(f"{PACKAGE}.runtime.processes")
        processes.GRACE_S = 0.2
        close = processes.RankPool.close

        def kill(pool: Any) -> None:
            for each in pool._processes:
                each.kill()
            close(pool)

        processes.RankPool.close = kill


def _fork_ranks() -> None:
    """Make pools of ranks fork their processes, where they ask for new ones."""
    mp = importlib.import_module("torch.multiprocessing")
    get_context = mp.get_context
    mp.get_context = lambda method=None: get_context("fork" if method in ("spawn", "forkserver") else method)  # type: ignore[attr-defined]
