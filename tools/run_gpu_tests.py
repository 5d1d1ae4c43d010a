#!/usr/bin/env python3
"""Run the tests that need GPUs, in parts side by side, in one command.

    python tools/run_gpu_tests.py [--gpus N] [--jobs N] [--out FOLDER] [--resume] [-k EXPRESSION] [tests ...]

A part is tests on groups of one size, in a pytest of its own that sees as many GPUs as it needs. Parts share GPUs.
Those with the marker ``alone``, which measure, kill or fill a GPU, come last and share with nobody.
A test without a group sees one GPU, or as many as ``gpu(2)`` says, or all of them if it runs alone.
Prints a line for each part with its failures, then totals. The exit status is 1 if a test failed or did not run to
its end. SIGTERM, as of timeout(1), ends the run with the totals so far; --resume goes on with the tests that are left.

Run it from the root of the repository. Standard library only; this file is also the plugin by which each pytest tells
what it does. So if a part dies or hangs, the test that did it is known, and those behind it run in a new part.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

MOST_TESTS, LEAST_TESTS, MOST_ALONE = 80, 15, 10
"""Of a part. Its ranks start in 20 to 55 seconds where 13 parts share each GPU, and the longest part decides when all
is done. Tests that run alone take long themselves."""
LIMIT_S = 1200.0
COLLECT_LIMIT_S = 120.0
POLL_S = 0.05
TELL_TO = "RUN_GPU_TESTS_TELL_TO"
"""Environment variable: the file that a pytest tells what it does, in lines of JSON."""
COLLECTED, KEPT = "collected.jsonl", "before.jsonl"
"""Files beside those of parts: the tests there are, and which of them have passed or been skipped in runs before."""
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


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(began=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = report.longreprtext if report.outcome == "failed" else ""
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        _tell(test=report.nodeid, outcome=report.outcome, wall_s=report.duration, text=text)


# -- parts ------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Tests that run in one pytest.

    Attributes:
        name: Short name, which its files in the output folder bear.
        tests: Node ids.
        num_gpus: GPUs that it sees.
        alone: Whether no other part may use them meanwhile.
        result: What came of it, None before it has ended.
        stopped: Whether it was running when the run was told to end.
        rest: Tests that had not begun when it ended.
    """

    name: str
    tests: list[str]
    num_gpus: int
    alone: bool
    process: subprocess.Popen[bytes] | None = None
    gpus: tuple[int, ...] = ()
    began: float = 0.0
    result: Result | None = None
    stopped: bool = False
    rest: list[str] = field(default_factory=list)


@dataclass
class Result:
    """What came of a part.

    Attributes:
        outcomes: "passed", "failed" or "skipped" by test; teardowns that failed count as failed tests.
        texts: Traceback of each failure, reason of each skip.
        seconds: Duration of each test.
        begun: Tests that have begun, in order.
        wall_s: Duration of the part.
        ended: How its process ended, if not by itself with all tests run; else "".
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    ended: str = ""


def make_parts(collected: Sequence[dict[str, Any]], num_gpus: int, jobs: int) -> list[Part]:
    """Parts of the tests: largest groups first, those that run alone last."""
    groups: dict[tuple[bool, int], dict[str, list[str]]] = {}
    for each in collected:
        size = min(each["ranks"] or num_gpus, num_gpus)  # a group that is too large says so and is skipped
        files = groups.setdefault((each["alone"], -size), {})
        files.setdefault(each["test"].partition("::")[0], []).append(each["test"])
    parts = []
    for (alone, size), files in sorted(groups.items()):
        at_once = num_gpus // -size * (1 if alone else jobs)
        even = -(-sum(map(len, files.values())) // at_once)
        most = min(even, MOST_ALONE) if alone else min(max(even, LEAST_TESTS), MOST_TESTS)
        suffix = f"{size}" + ("-alone" if alone else "")
        parts += [Part(name + suffix, tests, -size, alone) for name, tests in pack(files, most)]
    return parts


def pack(files: dict[str, list[str]], most: int) -> list[tuple[str, list[str]]]:
    """Names and tests of parts that have at most so many tests: pieces of a large file, or several small files."""
    parts: list[tuple[str, list[str]]] = []
    joined: list[tuple[list[str], list[str]]] = []
    for file, tests in sorted(files.items(), key=lambda each: -len(each[1])):
        name = file.removeprefix("tests/").removesuffix(".py").replace("/", "-")
        count = -(-len(tests) // most)
        if count > 1:
            bounds = [i * len(tests) // count for i in range(count + 1)]
            parts += [(f"{name}.{i + 1}", tests[bounds[i] : bounds[i + 1]]) for i in range(count)]
            continue
        names, room = next((each for each in joined if len(each[1]) + len(tests) <= most), ([], []))
        if not names:
            joined.append((names, room))
        names.append(name)
        room += tests
    return parts + [(names[0] + (f"+{len(names) - 1}" if len(names) > 1 else ""), tests) for names, tests in joined]


class Runner:
    """Runs parts on GPUs, as many at a time as may share them."""

    def __init__(self, out: Path, visible: Sequence[str], jobs: int, limit_s: float) -> None:
        self._out, self._visible, self._jobs, self._limit_s = out, visible, jobs, limit_s

    def run(self, parts: list[Part]) -> Iterator[Part]:
        """Parts as they end. Tests that one has left by dying become a part behind the others."""
        waiting, running = list(parts), list[Part]()
        try:
            while waiting or running:
                for part in list(waiting):
                    if part.alone and not all(each.alone for each in (*waiting, *running)):
                        continue  # those that share come first
                    gpus = self._room_for(part, running)
                    if gpus:
                        waiting.remove(part)
                        running.append(part)
                        self._start(part, gpus)
                ended = [part for part in running if self._ended(part)]
                running = [part for part in running if part not in ended]
                left = [Part(f"{part.name}.rest", part.rest, part.num_gpus, part.alone) for part in ended if part.rest]
                waiting += left
                parts += left
                yield from ended
                if not ended:
                    time.sleep(POLL_S)
        finally:
            for part in running:
                end(part)
                part.result = read_result(self._out / f"{part.name}.jsonl")
                part.stopped = True

    def _room_for(self, part: Part, running: Sequence[Part]) -> tuple[int, ...]:
        """The least busy GPUs that take the part; empty if too few do."""
        load = Counter(dict.fromkeys(range(len(self._visible)), 0))
        for each in running:
            load.update(dict.fromkeys(each.gpus, self._jobs if each.alone else 1))
        most = 0 if part.alone else self._jobs - 1
        free = sorted((gpu for gpu in load if load[gpu] <= most), key=lambda gpu: (load[gpu], gpu))
        return tuple(sorted(free[: part.num_gpus])) if len(free) >= part.num_gpus else ()

    def _start(self, part: Part, gpus: tuple[int, ...]) -> None:
        part.gpus, part.began = gpus, time.monotonic()
        command = [*test_command(), "-rN", "-m", "", *part.tests]
        visible = ",".join(self._visible[gpu] for gpu in gpus)
        environment = plugin_environment(self._out / f"{part.name}.jsonl")
        environment |= {"CUDA_VISIBLE_DEVICES": visible, "TOKENLOOM_CACHE_DIR": str(self._out / "kernels")}
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (self._jobs * len(self._visible))))
        with open(self._out / f"{part.name}.log", "wb") as log:
            part.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def _ended(self, part: Part) -> bool:
        assert part.process is not None
        wall_s = time.monotonic() - part.began
        late = part.process.poll() is None and wall_s > self._limit_s
        if part.process.poll() is None and not late:
            return False
        end(part)  # ranks too, whatever they do
        code, file = part.process.returncode, self._out / f"{part.name}.jsonl"
        part.result = result = read_result(file)
        result.wall_s = wall_s
        if result.begun:
            part.rest = [test for test in part.tests if test not in result.begun]
            part.tests = [test for test in part.tests if test in result.begun]
        missing = [test for test in part.tests if test not in result.outcomes]
        if late or code not in (0, 1) or missing:
            result.ended = f"ended after {self._limit_s:g} s" if late else f"ended with exit code {code}"
        if missing:
            result.ended += f", {len(missing)} tests have no result"
            result.ended += f"; the last to begin was {result.begun[-1]}" if result.begun else ""
        elif result.ended:
            file.rename(file.with_suffix(".cut"))  # it failed behind its last test, so all of it is to run again
        return True


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
    """What tests told."""
    result = Result()
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):  # the line that the end of the process cut
            told = json.loads(line)
            if "began" in told:
                result.begun.append(told["began"])
                continue
            test = told["test"]
            if result.outcomes.get(test) != "failed":
                result.outcomes[test] = told["outcome"]
            result.seconds[test] = result.seconds.get(test, 0.0) + told["wall_s"]
            if told["text"]:
                result.texts[test] = told["text"]
    return result


def stop(*_: Any) -> NoReturn:
    """End the run at the first SIGTERM. timeout(1) sends two, and the second must not cut short what follows."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def end(part: Part) -> None:
    """End a part's pytest and all ranks it has started."""
    assert part.process is not None
    with suppress(ProcessLookupError):
        os.killpg(part.process.pid, signal.SIGKILL)
    part.process.wait()


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


def line_of(part: Part) -> str:
    assert part.result is not None
    counts = Counter(part.result.outcomes.values())
    gpus = ",".join(map(str, part.gpus))
    numbers = f"{counts['passed']:7}{counts['failed']:7}{counts['skipped']:8}{part.result.wall_s:9.1f}"
    return f"{part.name:44.44} {gpus:>8}{numbers}  {part.result.ended}".rstrip()


def failures_of(part: Part) -> list[str]:
    """What failed in a part, with the last lines of each."""
    assert part.result is not None
    told = []
    for test, outcome in part.result.outcomes.items():
        if outcome == "failed":
            lines = part.result.texts.get(test, "").splitlines()[-LAST_LINES:]
            told.append("\n".join([f"  FAILED {test}", *(f"      {line}" for line in lines)]))
    if part.result.ended:
        told.append(f"  PART {part.name} {part.result.ended}")
    return told


def report(before: Result, parts: Sequence[Part], wall_s: float) -> int:
    """Print totals, with those of runs before; how many parts and tests failed, or have not run to their end."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    for result in [before, *(part.result for part in parts if part.result is not None)]:
        counts.update(result.outcomes.values())
        slowest += [(result.seconds[test], test) for test in result.outcomes]
        reasons.update(result.texts[test] for test, how in result.outcomes.items() if how == "skipped")
    for reason, number in reasons.most_common():
        print(f"\nskipped {number}: {reason}")
    print("\nslowest tests, seconds:")
    for seconds, test in sorted(slowest, reverse=True)[:10]:
        print(f"{seconds:8.1f}  {test}")
    cut_short = sum(bool(part.result and part.result.ended) for part in parts)
    print(f"\n{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    print(f"{len(parts)} parts in {wall_s:.0f} s, {cut_short} of them cut short")
    without = [part for part in parts if part.result is None or part.stopped]
    if without:
        tests = sum(len(part.tests) - len(part.result.outcomes if part.result else ()) for part in without)
        print(
            f"stopped: {tests} tests in {len(without)} parts have no result: {' '.join(part.name for part in without)}"
        )
    return len(without) + sum(len(failures_of(part)) for part in parts if part.result is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or tests (default: all)")
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: all)")
    parser.add_argument("--jobs", type=int, help="parts that share a GPU (default: one for each 2 cores of a GPU)")
    parser.add_argument("--out", type=Path, help="folder for logs and compiled kernels (default: a new one in /tmp)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the tests that have passed in runs before: same commit, number of GPUs and --out",
    )
    parser.add_argument("-k", dest="expression", help="as of pytest")
    parser.add_argument("--marker", default="gpu", help="as -m of pytest (default: gpu)")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help=f"longest time of a part (default: {LIMIT_S:g})"
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
    parts = make_parts(left, num_gpus, jobs)
    print(f"{len(left)} tests in {len(parts)} parts on {num_gpus} GPUs, {jobs} parts to a GPU; logs in {out}")
    print(f"{len(collected) - len(left)} tests were done before\n" if options.resume else "")
    print(f"{'part':44} {'GPUs':>8}{'passed':>7}{'failed':>7}{'skipped':>8}{'seconds':>9}", flush=True)
    signal.signal(signal.SIGTERM, stop)
    with suppress(SystemExit):
        for part in Runner(out, visible, jobs, options.limit_s).run(parts):
            print("\n".join([line_of(part), *failures_of(part)]), flush=True)
    for part in parts:
        if part.stopped:
            print("\n".join([line_of(part), *failures_of(part)]))
    return 1 if report(before, parts, time.monotonic() - began) else 0


if __name__ == "__main__":
    sys.exit(main())
