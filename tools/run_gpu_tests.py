#!/usr/bin/env python3
"""Run the tests that need GPUs, many pytests side by side, in one command.

    python tools/run_gpu_tests.py [--gpus N] [--jobs N] [--out FOLDER] [--resume] [-k EXPRESSION] [tests ...]

Tests on groups of one size wait in a queue. A worker is a pytest of its own that sees as many GPUs as such a group
needs, and takes a few tests at a time. So all workers end at nearly the same time, however long a test takes.
Workers share GPUs. Tests with the marker ``alone``, which measure, kill or fill a GPU, come last and share with none.
A test without a group sees one GPU, or as many as ``gpu(2)`` says, or all of them if it runs alone.
Prints failures when they happen, a line for each worker, then totals. The exit status is 1 if a test failed or did not
run to its end. SIGTERM, as of timeout(1), ends the run with the totals so far; --resume goes on with what is left.

Run it from the root of the repository. Standard library only; this file is also the plugin by which each pytest takes
tests and tells what it does. So if one dies or hangs, the test that did it is known, and others run on.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

MOST_TAKEN, TAKEN_OF = 10, 40
"""A worker takes up to so many tests at a time, and at most one of so many that are left. Neighbours use the same
kernels, so they stay together until the end is near."""
MOST_TESTS = 120
"""Of a worker. The next one has fresh ranks; what a hundred tests have left behind is not its burden."""
LEAST_TESTS, LEAST_ALONE = 15, 4
"""Tests left for each worker; with fewer, no further one starts. To start its ranks takes 20 to 55 seconds where 13
workers share each GPU."""
LIMIT_S = 600.0
COLLECT_LIMIT_S = 120.0
POLL_S = 0.1
TELL_TO, TAKE_FROM = "RUN_GPU_TESTS_TELL_TO", "RUN_GPU_TESTS_TAKE_FROM"
"""Environment variables: the file that a pytest tells what it does, in lines of JSON, and that of its queue."""
COLLECTED, KEPT = "collected.jsonl", "before.jsonl"
"""Files beside those of workers: the tests there are, and which of them have passed or been skipped in runs before."""
LAST_LINES = 12


# -- the plugin, inside each pytest -----------------------------------------------------------------------------


def _tell(**what: Any) -> None:
    with open(os.environ[TELL_TO], "a") as file:
        file.write(json.dumps(what) + "\n")


def pytest_collection_finish(session: Any) -> None:
    if session.config.option.collectonly:
        torch = sys.modules.get("torch")
        _tell(gpus=torch.cuda.device_count() if torch is not None else 0)
        for item in session.items:
            alone = item.get_closest_marker("alone") is not None
            _tell(test=item.nodeid, ranks=ranks_of(item) or (None if alone else 1), alone=alone)  # None: all there are


def ranks_of(item: Any) -> int | None:
    """GPUs that a test says it needs: the size of its group, or the number of its marker; None if it says nothing."""
    given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    marker = item.get_closest_marker("gpu")
    number = marker.args[0] if marker is not None and marker.args else None
    for group in ("ranks", "group", "pool"):
        if group in given:
            return int(given[group][1])
    return given.get("hoppers", number)


def pytest_runtestloop(session: Any) -> bool | None:
    """Run what the queue has, where pytest would run all that it has collected."""
    if TAKE_FROM not in os.environ or session.testsfailed:  # errors of collection, which pytest reports
        return None
    items = taken(Path(os.environ[TAKE_FROM]), {item.nodeid: item for item in session.items})
    following = next(items, None)
    while following is not None:
        item, following = following, next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return True


def taken(queue: Path, items: dict[str, Any]) -> Iterator[Any]:
    """Tests of this worker, told as soon as no other gets them."""
    number = 0
    while number < MOST_TESTS:
        with queued(queue) as left:
            few = min(MOST_TAKEN, -(-len(left) // TAKEN_OF))
            tests = [left.pop(0) for _ in range(few)]
            _tell(taken=tests)
        if not tests:
            return
        number += len(tests)
        for test in tests:
            if test in items:
                yield items[test]
            else:
                _tell(test=test, outcome="failed", wall_s=0.0, text="a worker with so many GPUs does not collect it")


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(began=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = report.longreprtext if report.outcome == "failed" else ""
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        _tell(test=report.nodeid, outcome=report.outcome, wall_s=report.duration, text=text)


# -- queues and workers -----------------------------------------------------------------------------------------


@contextmanager
def queued(file: Path) -> Iterator[list[str]]:
    """The tests that no worker has taken yet, to look at and to change. Other processes wait meanwhile."""
    with open(file, "r+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        tests = json.load(opened)
        before = len(tests)
        yield tests
        if len(tests) != before:
            opened.seek(0)
            opened.truncate()
            json.dump(tests, opened)


@dataclass
class Queue:
    """Tests of one kind, which workers take.

    Attributes:
        file: JSON, the tests that no worker has taken yet.
        tests: All that were in it.
        num_gpus: GPUs that a worker sees.
        alone: Whether no other worker may use them meanwhile.
        workers: How many have started.
        closed: Whether no more may start, because one did not come to its first test.
    """

    file: Path
    tests: list[str]
    num_gpus: int
    alone: bool
    workers: int = 0
    closed: bool = False

    def wanted(self) -> int:
        """How many workers the tests that are left are worth."""
        with queued(self.file) as left:
            return 0 if self.closed else -(-len(left) // (LEAST_ALONE if self.alone else LEAST_TESTS))


@dataclass
class Result:
    """What tests told.

    Attributes:
        taken: Tests that the worker had for itself.
        begun: Those that have begun, in order.
        outcomes: "passed", "failed" or "skipped" by test; teardowns that failed count as failed tests.
        texts: Traceback of each failure, reason of each skip.
        seconds: Duration of each test.
    """

    taken: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def hear(self, line: str) -> str | None:
        """Note one line; the test that it says has failed."""
        told = json.loads(line)
        self.taken += told.get("taken", ())
        if "began" in told:
            self.begun.append(told["began"])
        if "outcome" not in told:
            return None
        test, outcome = told["test"], told["outcome"]
        if self.outcomes.get(test) != "failed":
            self.outcomes[test] = outcome
        self.seconds[test] = self.seconds.get(test, 0.0) + told["wall_s"]
        if told["text"]:
            self.texts[test] = told["text"]
        return test if outcome == "failed" else None


@dataclass
class Worker:
    """A pytest that takes tests of a queue.

    Attributes:
        name: Short name, which its files in the output folder bear.
        file: What it tells.
        read: Bytes of that which have been read.
        heard: When it told something last, or when it began.
        result: What it has told so far.
        wall_s: Its duration.
        ended: How it ended, if not by itself with all its tests run; else "".
    """

    name: str
    queue: Queue
    file: Path
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    began: float
    heard: float
    read: int = 0
    result: Result = field(default_factory=Result)
    wall_s: float = 0.0
    ended: str = ""

    def listen(self) -> list[str]:
        """Read what it has told since; the tests that have failed."""
        new = b""
        with suppress(FileNotFoundError), open(self.file, "rb") as file:
            file.seek(self.read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # its end may cut a line
        self.read += len(whole)
        self.heard = time.monotonic() if whole else self.heard
        return [test for line in whole.splitlines() if (test := self.result.hear(line.decode()))]

    def end(self) -> None:
        """End its pytest and all ranks it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.wall_s = time.monotonic() - self.began


def make_queues(collected: Sequence[dict[str, Any]], num_gpus: int, out: Path) -> list[Queue]:
    """Queues of the tests: largest groups first, those that run alone last."""
    groups: dict[tuple[bool, int], list[str]] = {}
    for each in collected:
        size = min(each["ranks"] or num_gpus, num_gpus)  # a group that is too large says so and is skipped
        groups.setdefault((each["alone"], -size), []).append(each["test"])
    queues = []
    for (alone, size), tests in sorted(groups.items()):
        queues.append(Queue(out / f"{-size}{'-alone' * alone}.queue", tests, -size, alone))
        queues[-1].file.write_text(json.dumps(tests))
    return queues


class Runner:
    """Runs tests of queues on GPUs, with as many workers at a time as may share them."""

    def __init__(self, out: Path, visible: Sequence[str], jobs: int, limit_s: float) -> None:
        self._out, self._visible, self._jobs, self._limit_s = out, visible, jobs, limit_s
        self.workers: list[Worker] = []
        """All that have started."""

    def run(self, queues: Sequence[Queue]) -> Iterator[str]:
        """Run all tests; what happens, in lines to print."""
        running: list[Worker] = []
        try:
            while self._start_some(queues, running) or running:
                time.sleep(POLL_S)
                for worker in list(running):
                    gone = worker.process.poll() is not None  # so there is no more to hear afterwards
                    yield from (failure_of(worker.result, test) for test in worker.listen())
                    if gone or time.monotonic() - worker.heard > self._limit_s:
                        running.remove(worker)
                        self._close(worker, late=not gone)
                        yield line_of(worker)
        finally:
            for worker in running:
                worker.end()
                worker.listen()

    def _start_some(self, queues: Sequence[Queue], running: list[Worker]) -> bool:
        """Start the workers that there is work and room for; whether more are to start later."""
        found = False
        for queue in queues:
            if queue.alone and (found or not all(each.queue.alone for each in running)):
                return True  # those that share come first
            gpus = self._room_for(queue, running)
            while gpus and sum(each.queue is queue for each in running) < queue.wanted():
                running.append(self._start(queue, gpus))
                gpus = self._room_for(queue, running)
            found = found or queue.wanted() > 0
        return found

    def _room_for(self, queue: Queue, running: Sequence[Worker]) -> tuple[int, ...]:
        """The least busy GPUs that take a worker; empty if too few do."""
        load = Counter(dict.fromkeys(range(len(self._visible)), 0))
        for each in running:
            load.update(dict.fromkeys(each.gpus, self._jobs if each.queue.alone else 1))
        most = 0 if queue.alone else self._jobs - 1
        free = sorted((gpu for gpu in load if load[gpu] <= most), key=lambda gpu: (load[gpu], gpu))
        return tuple(sorted(free[: queue.num_gpus])) if len(free) >= queue.num_gpus else ()

    def _start(self, queue: Queue, gpus: tuple[int, ...]) -> Worker:
        queue.workers += 1
        name = f"{queue.file.stem}.{queue.workers}"
        file = self._out / f"{name}.jsonl"
        files = dict.fromkeys(test.partition("::")[0] for test in queue.tests)
        environment = plugin_environment(file)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible[gpu] for gpu in gpus)
        environment |= {TAKE_FROM: str(queue.file), "TOKENLOOM_CACHE_DIR": str(self._out / "kernels")}
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (self._jobs * len(self._visible))))
        with open(self._out / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [*test_command(), "-rN", "-m", "", *files],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        now = time.monotonic()
        self.workers.append(Worker(name, queue, file, gpus, process, began=now, heard=now))
        return self.workers[-1]

    def _close(self, worker: Worker, late: bool) -> None:
        """Note how a worker ended. Tests that it has taken and not begun are for others."""
        worker.end()  # ranks too, whatever they do
        worker.listen()
        result, code = worker.result, worker.process.returncode
        missing = [test for test in result.begun if test not in result.outcomes]
        if not late and code in (0, 1) and not missing:
            return
        worker.ended = f"silent for {self._limit_s:g} s" if late else f"ended with exit code {code}"
        with queued(worker.queue.file) as left:
            left[:0] = [test for test in result.taken if test not in {*result.begun, *result.outcomes}]
        if missing:
            worker.ended += f" in {missing[-1]}"
        elif not result.begun:
            worker.ended += f" before its first test; see {worker.name}.log"
            worker.queue.closed = True  # the next one would end as it did
        else:  # it failed behind its last test, so all of it is to run again
            worker.file.rename(worker.file.with_suffix(".cut"))


def keep_results(out: Path) -> None:
    """Keep in one file which tests have passed or been skipped in the runs before."""
    for file in set(out.glob("*.jsonl")) - {out / COLLECTED, out / KEPT}:
        result = read_result(file)
        with open(out / KEPT, "a") as kept:
            for test, outcome in result.outcomes.items():
                if outcome != "failed":
                    told = {"outcome": outcome, "wall_s": result.seconds[test], "text": result.texts.get(test, "")}
                    print(json.dumps({"test": test, **told}), file=kept)
        file.unlink()


def read_result(file: Path) -> Result:
    """What a file says, but for the line that the end of its writer cut."""
    result = Result()
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            result.hear(line)
    return result


def stop(*_: Any) -> NoReturn:
    """End the run at the first SIGTERM. timeout(1) sends two, and the second must not cut short what follows."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def test_command() -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-q"]


def plugin_environment(tell_to: Path) -> dict[str, str]:
    """Variables of a pytest that finds this plugin, the package, and a home."""
    folders = [str(Path(__file__).resolve().parent), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    home = os.environ.get("HOME") or str(tell_to.parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "HOME": home, TELL_TO: str(tell_to)}


def collect(out: Path, options: argparse.Namespace) -> tuple[list[str], list[dict[str, Any]]]:
    """GPUs to use, as CUDA_VISIBLE_DEVICES names them, and the tests.

    Raises:
        SystemExit: pytest could not collect them.
    """
    file = out / COLLECTED
    environment = plugin_environment(file)
    if options.gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.gpus))))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: options.gpus])
    command = [*test_command(), "--collect-only", "-m", options.marker, *options.tests]
    command += ["-k", options.expression] if options.expression else []
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=COLLECT_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"pytest collects no tests:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    first, *tests = map(json.loads, file.read_text().splitlines())
    there = options.gpus or max(1, first["gpus"])
    return environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(","), tests


# -- the report -------------------------------------------------------------------------------------------------


def line_of(worker: Worker) -> str:
    counts = Counter(worker.result.outcomes.values())
    gpus = ",".join(map(str, worker.gpus))
    numbers = f"{counts['passed']:7}{counts['failed']:7}{counts['skipped']:8}{worker.wall_s:9.1f}"
    line = f"{worker.name:16} {gpus:>8}{numbers}"
    return f"{line}\n  WORKER {worker.name} {worker.ended}" if worker.ended else line


def failure_of(result: Result, test: str) -> str:
    """A test that failed, with the last lines of its traceback."""
    lines = result.texts.get(test, "").splitlines()[-LAST_LINES:]
    return "\n".join([f"  FAILED {test}", *(f"      {line}" for line in lines)])


def report(before: Result, tests: Sequence[str], workers: Sequence[Worker], wall_s: float) -> bool:
    """Print totals, with those of runs before; whether all tests have passed or been skipped."""
    total = Result()
    for result in [before, *(worker.result for worker in workers)]:
        total.outcomes |= result.outcomes
        total.texts |= result.texts
        total.seconds |= result.seconds
    counts = Counter(total.outcomes.values())
    reasons = Counter(total.texts[test] for test, how in total.outcomes.items() if how == "skipped")
    for reason, number in reasons.most_common():
        print(f"\nskipped {number}: {reason}")
    print("\nslowest tests, seconds:")
    for test, seconds in sorted(total.seconds.items(), key=lambda each: -each[1])[:10]:
        print(f"{seconds:8.1f}  {test}")
    ended = sum(bool(worker.ended) for worker in workers)
    print(f"\n{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    print(f"{len(workers)} workers in {wall_s:.0f} s, {ended} of them cut short")
    without = Counter(test.partition("::")[0] for test in tests if test not in total.outcomes)
    if without:
        files = ", ".join(f"{number} of {file}" for file, number in without.items())
        print(f"{without.total()} tests have no result: {files}")
    return not (counts["failed"] or ended or without)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or tests (default: all)")
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: all)")
    parser.add_argument("--jobs", type=int, help="workers that share a GPU (default: one for each 2 cores of a GPU)")
    parser.add_argument("--out", type=Path, help="folder for logs and compiled kernels (default: a new one in /tmp)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the tests that have passed in runs before: same commit, number of GPUs and --out",
    )
    parser.add_argument("-k", dest="expression", help="as of pytest")
    parser.add_argument("--marker", default="gpu", help="as -m of pytest (default: gpu)")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help=f"longest time of a test (default: {LIMIT_S:g})"
    )
    options = parser.parse_args(arguments)
    if options.resume and options.out is None:
        parser.error("--resume needs the --out of the run that it goes on with")
    out = options.out or Path(tempfile.mkdtemp(prefix="tokenloom-gpu-tests-"))
    out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        keep_results(out)
    for old in {*out.glob("*.jsonl")} - ({out / KEPT} if options.resume else set()):
        old.unlink()

    began = time.monotonic()
    visible, collected = collect(out, options)
    num_gpus = len(visible)
    jobs = options.jobs or max(1, (os.cpu_count() or 1) // num_gpus // 2)
    before, tests = read_result(out / KEPT), {each["test"] for each in collected}
    before.outcomes = {test: outcome for test, outcome in before.outcomes.items() if test in tests}
    left = [each for each in collected if each["test"] not in before.outcomes]
    queues, runner = make_queues(left, num_gpus, out), Runner(out, visible, jobs, options.limit_s)
    print(f"{len(left)} tests on {num_gpus} GPUs, {jobs} workers to a GPU; logs in {out}")
    print(f"{len(collected) - len(left)} tests were done before\n" if options.resume else "")
    print(f"{'worker':16} {'GPUs':>8}{'passed':>7}{'failed':>7}{'skipped':>8}{'seconds':>9}", flush=True)
    signal.signal(signal.SIGTERM, stop)
    with suppress(SystemExit):
        for line in runner.run(queues):
            print(line, flush=True)
    all_well = report(before, [each["test"] for each in left], runner.workers, time.monotonic() - began)
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
