"""The list of mutations fits the tree: a stale entry shows here, at once, and not after the long part of CI."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tests.conftest import COLLECTED
from tests.mutations import device_code, python_code
from tests.mutations.__main__ import main, part, passed_tests
from tests.mutations.mutation import Mutation
from tests.mutations.rules import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("file", dict.fromkeys(mutation.target.partition(":")[0] for mutation in MUTATIONS))
def test_there_is_one_place_to_break(file: str) -> None:
    """For each mutation of a file: each by itself would be a tenth of what pytest collects."""
    stale = []
    for mutation in MUTATIONS:
        if mutation.target.partition(":")[0] != file:
            continue
        try:
            broken = mutation.broken(ROOT)
        except SystemExit as error:
            stale.append(str(error))
            continue
        assert broken != mutation.file(ROOT).read_text(), mutation.name
        if mutation.file(ROOT).suffix == ".py":
            compile(broken, mutation.name, "exec")
    assert not stale, "\n".join(stale)


def test_names_are_unique() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names))


def test_parts_are_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Each mutation is in one of three parts, of nearly the same length."""

    def listed(*arguments: str) -> list[str]:
        assert main(["--list", *arguments]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("left out, since")]

    parts = [listed("--part", f"{number}/3") for number in (1, 2, 3)]
    assert sorted(line for each in parts for line in each) == sorted(listed())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not K/N"):
        part(text)


@lru_cache
def names_in(file: str) -> set[str]:
    return {each.name for each in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(each, "name")}


def test_every_test_that_should_notice_exists(request: pytest.FixtureRequest) -> None:
    """Their functions; and cases as pytest collects them, except those that exist on GPUs only."""
    tests = {(mutation.gpu, test) for mutation in MUTATIONS for test in mutation.tests}
    for _, test in tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in names_in(file), test
    known = request.config.stash[COLLECTED]
    files = {test.partition("::")[0] for test in known}
    cases = {test for gpu, test in tests if "[" in test and not gpu}
    assert {test for test in cases if test.partition("::")[0] in files} <= known
    rest = sorted(test for test in cases if test.partition("::")[0] not in files)
    if not rest:
        return
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *rest]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert sorted(line for line in collected.stdout.splitlines() if "::" in line) == rest


SOURCE = """
from typing import overload

LIMIT: int = 4


class Sum:
    # The order matters.
    def add(self, terms):
        total = terms[0]
        for term in terms[1:]:
            total = (total
                     + term)  # rounded
        return total

    def count(self, terms): return len(terms)


def first(terms):
    if terms:
        return terms[0]
    return None
"""


@pytest.mark.parametrize(
    ("symbol", "old", "new", "then"),
    [
        ("Sum.add", "total + term", "term", "total = term"),  # line breaks and parentheses of the source
        ("Sum.add", "total   =   total+term", "pass", "pass"),  # a statement, spaces of its own
        ("Sum.add", "\n    total = terms[0]\n", "", "pass"),  # indentation of its own
        ("first", "return terms[0]", "return terms[-1]", "terms[-1]"),  # the same words stand in Sum.add too
        ("LIMIT", "4", "5", "LIMIT: int = 5"),
    ],
)
def test_python_is_broken_whatever_its_layout(symbol: str, old: str, new: str, then: str) -> None:
    broken = python_code.replace_in_symbol(SOURCE, symbol, old, new)
    assert then in broken
    assert "def count(self, terms):" in broken


@pytest.mark.parametrize(
    ("symbol", "old", "said"),
    [
        ("Sum.add", "len(terms)", "holds it 0 times"),  # it stands in the method below
        ("Sum", "terms", "holds it 3 times"),
        ("Sum.remove", "total", "there is no Sum.remove"),
        ("add", "total + term", "there is no add"),
    ],
)
def test_what_is_not_there_once_is_refused(symbol: str, old: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        python_code.replace_in_symbol(SOURCE, symbol, old, "None")


HEADER = """
struct Progress {
    int done;
    template <int kStep>
    __device__ void watch(int limit) const {
        while (done < limit) { poll(done /* so far */, kStep); }  // until all
    }
};

__device__ void watch(const Progress& progress) { progress.watch(1); }

template <class Shape>
__global__ void sum_rows(float* out,
                         const float* rows) {
    for (int i = 0; i < Shape::n; ++i) out[0] += rows[i];
    watch(Progress{0});
}
"""


@pytest.mark.parametrize(
    ("symbol", "old", "new", "then"),
    [
        ("sum_rows", "out[0]+=rows[ i ]", "out[0] = rows[i]", "++i) out[0] = rows[i];\n"),
        ("Progress::watch", "poll(done, kStep)", "poll(done, 0)", "{ poll(done, 0); }  // until all"),
        ("Progress", "int done;", "long done;", "    long done;\n"),
        ("watch", "progress.watch(1)", "progress.watch(2)", "progress) { progress.watch(2); }"),
    ],
)
def test_device_code_is_broken_whatever_its_layout(symbol: str, old: str, new: str, then: str) -> None:
    assert then in device_code.replace_in_symbol(HEADER, symbol, old, new)


@pytest.mark.parametrize(
    ("symbol", "old", "said"),
    [
        ("sum_rows", "poll(done, kStep)", "holds it 0 times"),
        ("sum_rows", "i", "holds it 4 times"),
        ("sum_columns", "i", "there is no sum_columns"),
        ("poll", "done", "there is no poll"),  # a call is no definition
    ],
)
def test_device_code_that_is_not_there_once_is_refused(symbol: str, old: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        device_code.replace_in_symbol(HEADER, symbol, old, "")


def test_a_stale_entry_is_refused() -> None:
    stale = Mutation(name="stale", rule="nothing", target="plan:Plan", old="moved_away", new="None", tests=())
    with pytest.raises(SystemExit, match=r"mutation stale, plan:Plan: Plan should hold"):
        stale.broken(ROOT)
    with pytest.raises(SystemExit, match="No such file"):
        Mutation(name="moved", rule="", target="gone:x", old="", new="", tests=()).broken(ROOT)


SOME_TESTS = """
import pytest

@pytest.mark.parametrize("given", ["", "1/2.5 [a]"])
def test_right(given): print("said")
def test_wrong(): assert False
def test_left_out(): pytest.skip("not here")
@pytest.fixture
def broken(): raise OSError
def test_unprepared(broken): pass
"""


def test_reports_tell_which_tests_have_passed(tmp_path: Path) -> None:
    """By the names that pytest takes."""
    folder = tmp_path / "tests" / "more"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(SOME_TESTS)
    (tmp_path / "pyproject.toml").touch()  # pytest begins names there
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", f"--junitxml={report}"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    names = [f"tests/more/test_some.py::test_right[{given}]" for given in ("", "1/2.5 [a]")]
    assert list(passed_tests(report)) == names
