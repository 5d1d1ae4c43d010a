"""tools/run_gpu_tests.py on a small suite without GPUs: what runs where and when, and what is said of failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "run_gpu_tests.py"
LIMIT_S = 120.0

CONFTEST = """
import json, os, time
import pytest

@pytest.fixture(autouse=True)
def note(request):
    began = time.monotonic()
    yield
    test, gpus = request.node.name, os.environ["CUDA_VISIBLE_DEVICES"]
    with open(os.environ["NOTES"], "a") as file:
        noted = {"test": test, "began": began, "ended": time.monotonic(), "gpus": gpus, "worker": os.getpid()}
        print(json.dumps(noted), file=file)
"""

BASE = {"conftest.py": CONFTEST, "pytest.ini": "[pytest]\nmarkers =\n    alone\n    gpu\n"}
GOOD = BASE | {
    "test_groups.py": """
import time
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [("cuda", 1), ("cuda", 2), ("cuda", 4)], ids=["cuda1", "cuda2", "cuda4"])
@pytest.mark.parametrize("number", range(2))
def test_group(ranks, number):
    time.sleep(0.2)

@pytest.mark.gpu
def test_of_one_process(): pass

@pytest.mark.gpu(2)
def test_of_two_gpus(): pass

def test_without_a_gpu(): raise AssertionError("not asked for")
""",
    "folder/test_alone.py": """
import time
import pytest
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

@pytest.mark.parametrize("hoppers", [1, 2])
def test_measures(hoppers): time.sleep(0.2)

def test_measures_all_there_are(): pass
""",
}
BAD = BASE | {
    "test_bad.py": """
import pytest
pytestmark = pytest.mark.gpu

def test_passes(): pass
def test_fails(): assert 1 + 1 == 3, "arithmetic"
def test_is_skipped(): pytest.skip("no reason")

@pytest.fixture
def broken():
    yield
    raise OSError("teardown")

def test_breaks_at_the_end(broken): pass
""",
    "test_dies.py": """
import os
import pytest
pytestmark = pytest.mark.gpu

def test_before(): pass
def test_dies(): os._exit(3)
def test_after(): pass
""",
    "test_hangs.py": """
import pathlib, time
import pytest
pytestmark = pytest.mark.gpu

def test_hangs():
    pathlib.Path("hangs").touch()
    time.sleep(100)
""",
}
UNEVEN = BASE | {
    "test_uneven.py": """
import time
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(60))
def test_of_one_process(number):
    time.sleep(6.0 if number == 0 else 0.1)
""",
}
ENDS_BADLY = """
import os
import pytest

@pytest.fixture(scope="session")
def dies():
    yield
    os._exit(4)

@pytest.mark.gpu
def test_before(dies): pass
"""


@dataclass(frozen=True)
class Done:
    """What a run printed, and what its tests noted."""

    code: int
    text: str
    notes: list[dict[str, object]]


def run(folder: Path, suite: dict[str, str], *options: str, stop_at_file: str = "") -> Done:
    """Run the tool on a suite; SIGTERM ends it when a test has made this file, or if it takes too long."""
    for name, text in suite.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    notes = folder / "notes"
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "HOME")}
    environment |= {"NOTES": str(notes), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(SCRIPT), "--gpus", "4", "--out", str(folder / "out"), *options]
    with open(folder / "said", "w+") as said:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None:
            late_s = time.monotonic() - deadline
            if late_s > LIMIT_S:
                process.kill()
            elif late_s > 0 or (stop_at_file and (folder / stop_at_file).exists()):
                process.terminate()  # again and again: timeout(1) does it twice
            time.sleep(0.002)
        said.seek(0)
        text = said.read()
    lines = notes.read_text().splitlines() if notes.exists() else []
    return Done(process.returncode, text, [json.loads(line) for line in lines])


@pytest.mark.slow
def test_groups(tmp_path: Path) -> None:
    """Groups see as many GPUs as they need, small ones run side by side, and nothing beside what runs alone."""
    done = run(tmp_path, GOOD, "--jobs", "1")
    assert done.code == 0, done.text
    assert "11 passed, 0 failed, 0 skipped" in done.text
    seen = {str(note["test"]): len(str(note["gpus"]).split(",")) for note in done.notes}
    assert seen == {f"test_group[{number}-cuda{size}]": size for number in range(2) for size in (1, 2, 4)} | {
        "test_of_one_process": 1,
        "test_of_two_gpus": 2,
        "test_measures[1]": 1,
        "test_measures[2]": 2,
        "test_measures_all_there_are": 4,
    }
    last_to_share = max(float(str(note["ended"])) for note in done.notes if "measures" not in str(note["test"]))
    alone = [note for note in done.notes if "measures" in str(note["test"])]
    assert all(float(str(note["began"])) > last_to_share for note in alone)
    gpus = [
        gpu for note in alone for gpu in str(note["gpus"]).split(",") if note["test"] != "test_measures_all_there_are"
    ]
    assert len(set(gpus)) == 3, "each on GPUs of its own"
    for worker in ("4.1", "2.1", "1.1", "4-alone.1", "2-alone.1", "1-alone.1"):
        assert f"\n{worker} " in done.text
        assert (tmp_path / "out" / f"{worker}.log").is_file()


@pytest.mark.slow
@pytest.mark.full
def test_failures(tmp_path: Path) -> None:
    """Each is named, with its last lines; so is the test that ended or held up its worker. The others run on."""
    done = run(tmp_path, BAD, "--limit-s", "25")
    assert done.code == 1
    assert "FAILED test_bad.py::test_fails\n" in done.text
    assert "AssertionError: arithmetic" in done.text
    assert "FAILED test_bad.py::test_breaks_at_the_end\n" in done.text
    assert "OSError: teardown" in done.text
    assert "WORKER 1.1 ended with exit code 3 in test_dies.py::test_dies\n" in done.text
    assert "WORKER 1.2 silent for 25 s in test_hangs.py::test_hangs\n" in done.text
    assert "3 passed, 2 failed, 1 skipped" in done.text
    assert "skipped 1: no reason\n" in done.text
    assert "2 workers in" in done.text
    assert "2 of them cut short" in done.text
    assert "2 tests have no result: 1 of test_dies.py, 1 of test_hangs.py\n" in done.text


@pytest.mark.parametrize(
    ("suite", "said"),
    [({}, "pytest collects no tests"), ({"test_x.py": "import does_not_exist"}, "No module named 'does_not_exist'")],
)
def test_nothing_to_run_is_no_success(tmp_path: Path, suite: dict[str, str], said: str) -> None:
    done = run(tmp_path, suite)
    assert done.code == 1
    assert said in done.text


@pytest.mark.slow
def test_resumed(tmp_path: Path) -> None:
    """What has passed is not run again and counts; what has failed or died is."""
    assert run(tmp_path, BAD, "-k", "not hangs").code == 1
    mended = dict(BAD)
    for wrong, right in (("== 3", "== 2"), ('raise OSError("teardown")', "")):
        mended["test_bad.py"] = mended["test_bad.py"].replace(wrong, right)
    first = run(tmp_path, mended, "-k", "not hangs and not dies", "--resume")
    assert first.code == 0, first.text
    assert "2 tests were done before" in first.text
    ran = [note["test"] for note in first.notes]
    assert ran[-2:] == ["test_fails", "test_breaks_at_the_end"]
    again = run(tmp_path, mended, "-k", "not hangs and not dies", "--resume")
    assert again.code == 0
    assert [note["test"] for note in again.notes] == ran, "nothing is run again"
    assert "4 tests were done before" in again.text
    assert "3 passed, 0 failed, 1 skipped" in again.text
    of_all = run(tmp_path, mended, "-k", "not hangs", "--resume")
    assert "6 tests were done before" in of_all.text
    assert "WORKER 1.1 ended with exit code 3 in test_dies.py::test_dies\n" in of_all.text


@pytest.mark.slow
def test_resumed_with_more_tests(tmp_path: Path) -> None:
    """Those that were not there before run, and those that fail run each time."""
    assert run(tmp_path, BAD, "-k", "passes").code == 0
    for done_before in (1, 2):
        done = run(tmp_path, BAD, "-k", "not hangs and not dies", "--resume")
        assert done.code == 1
        assert f"{done_before} tests were done before" in done.text
        assert "FAILED test_bad.py::test_fails\n" in done.text


@pytest.mark.slow
def test_a_worker_that_fails_at_its_end(tmp_path: Path) -> None:
    """Its tests have passed, and yet all of them run again."""
    suite = BASE | {"test_end.py": ENDS_BADLY}
    for number in (1, 2):
        done = run(tmp_path, suite, "--resume")
        assert done.code == 1
        assert "WORKER 1.1 ended with exit code 4\n" in done.text
        assert "0 tests were done before" in done.text
        assert len(done.notes) == number


@pytest.mark.slow
def test_a_worker_that_begins_nothing(tmp_path: Path) -> None:
    """It fails where others would too, so no other starts, and all its tests are named."""
    broken = 'import os\nif "RUN_GPU_TESTS_TAKE_FROM" in os.environ: raise OSError("not here")\n'
    done = run(tmp_path, BASE | {"test_good.py": broken + "import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n"})
    assert done.code == 1
    assert "WORKER 1.1 ended with exit code 2 before its first test; see 1.1.log\n" in done.text
    assert "1 workers in" in done.text
    assert "1 tests have no result: 1 of test_good.py\n" in done.text


@pytest.mark.slow
@pytest.mark.full
def test_all_end_at_nearly_the_same_time(tmp_path: Path) -> None:
    """While one worker is in a long test, others run what is left. Each test runs once."""
    done = run(tmp_path, UNEVEN)
    assert done.code == 0, done.text
    assert "60 passed, 0 failed, 0 skipped" in done.text
    assert len({note["test"] for note in done.notes}) == len(done.notes) == 60
    tests = Counter(note["worker"] for note in done.notes)
    assert len(tests) > 1, "on a busy machine some workers come when all is done"
    slow = next(note["worker"] for note in done.notes if note["test"] == "test_of_one_process[0]")
    assert tests[slow] < 12, "60 tests on 4 workers are 15 each"


def test_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tests at a time, fewer near the end, and no more than a worker may have. What others took is not there."""
    tool = load_script(SCRIPT)
    queue, told = tmp_path / "queue", tmp_path / "told"
    monkeypatch.setenv("RUN_GPU_TESTS_TELL_TO", str(told))
    names = [f"test_{i}" for i in range(1000)]
    queue.write_text(json.dumps(names))
    items = {name: name.upper() for name in names if name != "test_3"}
    first = list(tool.taken(queue, items))
    assert first == [name.upper() for name in names[:120] if name != "test_3"]
    heard = tool.read_result(told)
    assert heard.taken == names[:120]
    assert heard.outcomes == {"test_3": "failed"}
    queue.write_text(json.dumps(names[920:]))
    told.unlink()
    assert list(tool.taken(queue, items)) == [name.upper() for name in names[920:]]
    at_a_time = [len(json.loads(line)["taken"]) for line in told.read_text().splitlines()]
    assert at_a_time == [2] * 20 + [1] * 40 + [0]


@pytest.mark.slow
def test_stopped(tmp_path: Path) -> None:
    """SIGTERM, sent often, ends a run in which a test hangs: what has ended counts, and what has not is named."""
    done = run(tmp_path, BAD, "--jobs", "3", stop_at_file="hangs")
    assert done.code == 1
    assert "3 passed, 2 failed, 1 skipped" in done.text
    assert "2 tests have no result: 1 of test_dies.py, 1 of test_hangs.py\n" in done.text
    again = run(tmp_path, BAD, "-k", "test_after", "--resume")
    assert "1 tests were done before" in again.text, "of a worker that was stopped"
    assert again.code == 0
