"""Proof that the suite bites: breaks one rule at a time in a copy of the tree, and demands that tests fail there.

    python -m tests.mutations [names ...] [--part K/N] [--gpu] [--jobs 2] [--list] [--passed FILE ...]

Each mutation replaces one piece of one symbol and runs the tests that should notice, until one fails. Each test that
failed must pass on the unchanged tree: it runs there afterwards, unless a report of pytest says that it has passed. A
mutant that survives, or one that only breaks the collection of tests, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from tests.mutations import copies
from tests.mutations.copies import Outcome, Trial
from tests.mutations.mutation import Mutation
from tests.mutations.rules import MUTATIONS

LIMIT_S = 240.0
"""For the tests of one mutation; tests of the unchanged tree, file by file, have twice as long."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutations to try; all of them by default")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N",
                        help="every N-th mutation from the K-th on, so that N runs try all of them")  # fmt: skip
    parser.add_argument("--gpu", action="store_true", help="try the mutations whose tests need GPUs, not the others")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time (default: 2)")
    parser.add_argument("--passed", nargs="+", type=Path, default=[], metavar="FILE",
                        help="what pytest --junitxml has written of tests on the unchanged tree")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"unknown mutations: {', '.join(unknown)}; --list prints those there are")
    chosen = [by_name[name] for name in options.names] or [each for each in MUTATIONS if each.gpu == options.gpu]
    absent = {each.needs for each in chosen if each.needs and find_spec(each.needs) is None}
    if absent:
        print(f"left out, since {', '.join(sorted(absent))} is not installed: the mutations that need it")
        chosen = [each for each in chosen if each.needs not in absent]
    first, step = options.part
    chosen = chosen[first - 1 :: step]
    if options.list:
        print("\n".join(f"{mutation.name:32} {mutation.rule}" for mutation in chosen))
        return 0
    for mutation in chosen:
        mutation.broken(copies.ROOT)  # before the long part: is every piece still there?

    began = time.monotonic()
    copies.preload()
    trials = [Trial(each, each.tests, each.num_ranks, each.gpu, LIMIT_S) for each in chosen]
    outcomes: list[tuple[Trial, Outcome]] = []
    with copies.shared_folder() as folder:
        for trial, outcome in copies.run(trials, options.jobs, folder):
            report(trial.mutation, outcome)
            outcomes.append((trial, outcome))
        noticed = [(trial, outcome) for trial, outcome in outcomes if was_noticed(outcome)]
        have_passed = {test for file in options.passed for test in passed_tests(file)}
        on_unchanged, passing = unchanged(noticed, have_passed), 0
        print(f"unchanged tree: tests that noticed {len(noticed)} mutations, and are in no report", flush=True)
        for trial, outcome in copies.run(on_unchanged, options.jobs, folder):
            if outcome.code == 0:
                passing += len(trial.tests)
            else:
                print(f"{outcome.tail}\nthese tests must pass on the unchanged tree: {' '.join(trial.tests)}\n")
    survived, tests = len(chosen) - len(noticed), sum(len(trial.tests) for trial in on_unchanged)
    print(f"mutations: {len(chosen)} rules broken, {len(noticed)} noticed, {survived} survived; "
          f"{passing} of {tests} tests pass on the unchanged tree; {time.monotonic() - began:.0f} s")  # fmt: skip
    return 1 if survived or passing < tests else 0


def part(text: str) -> tuple[int, int]:
    """K and N of a text "K/N", as ``--part`` takes it."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N, as 2/3")
    return int(first), int(step)


def passed_tests(file: Path) -> Iterator[str]:
    """Yield the node ids of the tests that have passed, from a report in the format of JUnit."""
    for case in ElementTree.parse(file).iter("testcase"):
        if not {child.tag for child in case} & {"failure", "error", "skipped"}:
            yield f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"


def unchanged(noticed: Sequence[tuple[Trial, Outcome]], passed: Collection[str]) -> list[Trial]:
    """Trials of the unchanged tree: each test that failed on a changed one, those of a file together.

    Args:
        passed: tests that are known to pass there.
    """
    tests: dict[tuple[int, bool, str], set[str]] = {}
    for trial, outcome in noticed:
        if outcome.failed not in passed:
            key = (trial.num_ranks, trial.gpu, outcome.failed.partition("::")[0])
            tests.setdefault(key, set()).add(outcome.failed)
    return [
        Trial(None, tuple(sorted(names)), num_ranks, gpu, 2 * LIMIT_S)
        for (num_ranks, gpu, _), names in sorted(tests.items())
    ]


def was_noticed(outcome: Outcome) -> bool:
    return outcome.code == 1 and bool(outcome.failed)


def report(mutation: Mutation | None, outcome: Outcome) -> None:
    """Print a line of one mutation."""
    assert mutation is not None
    killed = was_noticed(outcome)
    verdict = f"noticed by {outcome.failed}" if killed else f"SURVIVED (pytest ended with {outcome.code})"
    line = f"{mutation.name:32} {outcome.wall_s:5.1f} s  {verdict}"
    print(line if killed else f"{line}\n    {mutation.rule}\n{outcome.tail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
