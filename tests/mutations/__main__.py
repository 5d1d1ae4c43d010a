"""Proof that the suite bites: breaks one rule at a time in a copy of the tree, and demands that tests fail there.

    python -m tests.mutations [names ...] [--jobs 2] [--list]

Each mutation replaces one piece of text, which must stand in its file exactly once, and runs the tests that should
notice. Those tests must pass on the unchanged tree first. A mutant that survives, or one that only breaks the
collection of tests, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.mutation import Mutation
from tests.mutations.rules import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("tokenloom", "tests", "pyproject.toml")
LIMIT_S = 240.0
"""For the tests of one mutation; the baseline has ten times as long."""
SELECTION = "not cpu1 and not cuda"
"""One rank sees few of the rules; groups of 2 and 4 see all of them."""

_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Outcome:
    """What pytest said of one copy.

    Attributes:
        code: its exit status; None if it ran out of time.
        failed: the first test that failed, "" if none did.
        tail: its last lines.
        wall_s: how long it took.
    """

    code: int | None
    failed: str
    tail: str
    wall_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutations to try; all of them by default")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in options.names if name not in by_name]
    if unknown or len(by_name) != len(MUTATIONS):
        parser.error(f"unknown mutations: {', '.join(unknown)}" if unknown else "two mutations have the same name")
    chosen = [by_name[name] for name in options.names] or list(MUTATIONS)
    if options.list:
        print("\n".join(f"{mutation.name:32} {mutation.rule}" for mutation in chosen))
        return 0
    for mutation in chosen:
        mutation.apply(ROOT / "tokenloom")  # before the long part: is every text still there?

    began = time.monotonic()
    for num_ranks in sorted({mutation.num_ranks for mutation in chosen}):
        tests = sorted({test for each in chosen if each.num_ranks == num_ranks for test in each.tests})
        baseline = try_copy(None, tests, num_ranks, 10 * LIMIT_S)
        print(f"unchanged, {num_ranks} ranks: {baseline.tail.splitlines()[-1] if baseline.tail else ''}", flush=True)
        if baseline.code != 0:
            print(f"{baseline.tail}\nthe tests must pass on the unchanged tree (pytest ended with {baseline.code})")
            return 1
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            survived = sum(not killed for killed in pool.map(report, chosen))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                end(process)
            raise
    print(f"mutations: {len(chosen)} rules broken, {len(chosen) - survived} noticed, {survived} survived; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    return 1 if survived else 0


def report(mutation: Mutation) -> bool:
    """Try one mutation and print a line; whether a test failed because of it."""
    outcome = try_copy(mutation, mutation.tests, mutation.num_ranks, LIMIT_S)
    killed = outcome.code == 1 and bool(outcome.failed)
    verdict = f"noticed by {outcome.failed}" if killed else f"SURVIVED (pytest ended with {outcome.code})"
    line = f"{mutation.name:32} {outcome.wall_s:5.1f} s  {verdict}"
    print(line if killed else f"{line}\n    {mutation.rule}\n{outcome.tail}", flush=True)
    return killed


def try_copy(mutation: Mutation | None, tests: Sequence[str], num_ranks: int, limit_s: float) -> Outcome:
    """Run the tests in a copy of the tree, with the mutation if there is one, on so many ranks at most."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokenloom-mutant-") as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            ignore = {"ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / name).is_dir() else {}
            copy(ROOT / name, Path(folder, name), **ignore)  # type: ignore[operator]
        if mutation is not None:
            path = Path(folder, "tokenloom", mutation.file)
            path.write_text(mutation.apply(Path(folder, "tokenloom")))
        fixtures = Path(folder, "tests", "conftest.py")
        text, found = re.subn(
            r"^CPU_RANKS = \d+$", f"CPU_RANKS = {num_ranks}", fixtures.read_text(), flags=re.MULTILINE
        )
        if found != 1:
            raise SystemExit("tests/conftest.py should set CPU_RANKS once; bring tests/mutations.py up to date")
        fixtures.write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": folder}
        process = subprocess.Popen(
            [*command, "-k", SELECTION, *tests],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its rank processes can be ended with it
        )
        _running.add(process)
        try:
            output, _ = process.communicate(timeout=limit_s)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            end(process)
            output, _ = process.communicate()
            code = None
        _running.discard(process)
    failed = re.search(r"^FAILED (.+?)(?: - |$)", output, re.MULTILINE)
    tail = "\n".join(output.rstrip().splitlines()[-12:])
    return Outcome(code, failed.group(1) if failed else "", tail, time.monotonic() - began)


def end(process: subprocess.Popen[str]) -> None:
    """End a pytest and the rank processes it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
