"""How programs find the module ``deep_ep``: by PYTHONPATH, by a distribution, by a call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from os import environ
from pathlib import Path

import pytest

from tokenloom.compat import installation

ROOT = Path(__file__).resolve().parents[3]
DETECTIONS = """
import importlib.util, sys
assert importlib.util.find_spec("deep_ep") is not None
import deep_ep
from deep_ep import Buffer, Config, ElasticBuffer, EventOverlap, HybridEPBuffer
from deep_ep.utils import EventHandle, EventOverlap as Other
from deep_ep.utils.event import EventOverlap as Third
from deep_ep.hybrid_ep_buffer import indices_to_map
import deep_ep.utils.envs, deep_ep.utils.math, deep_ep.utils.testing
assert EventOverlap is Other is Third
assert importlib.util.find_spec("deep_ep.utils") is not None
assert hasattr(deep_ep, "ElasticBuffer")
assert "+tokenloom" in deep_ep.__version__
import tokenloom.compat.deep_ep
assert Buffer is tokenloom.compat.deep_ep.Buffer
"""


Program = subprocess.CompletedProcess[str]


def python(code: str, *path: Path | str, warnings: str = "error") -> Program:
    # Without bytecode each import compiles, and a test measures imports. The empty string lets Python write it.
    variables = {**environ, "PYTHONPATH": ":".join(map(str, [*path, ROOT])), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-W", warnings, "-W", "ignore::DeprecationWarning", "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture(scope="module")
def programs() -> Iterator[tuple[Future[Program], Future[Program]]]:
    """One that finds the module by a path, and one by a call; both import torch meanwhile."""
    with ThreadPoolExecutor(2) as pool:
        by_a_call = f"import tokenloom.compat as c\nc.install()\nc.install()\n{DETECTIONS}"
        yield pool.submit(python, DETECTIONS, installation.PATH), pool.submit(python, by_a_call)


@pytest.mark.slow
def test_by_a_path(programs: tuple[Future[Program], Future[Program]]) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tokenloom", "deep-ep-path"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == str(installation.PATH)
    done = programs[0].result()
    assert done.returncode == 0, done.stderr
    assert [each.name for each in installation.PATH.iterdir()] == ["deep_ep"]


@pytest.mark.slow
def test_children_find_it_too() -> None:
    """Workers that are spawned import it again."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import deep_ep'], check=True)"
    assert python(code, installation.PATH).returncode == 0


@pytest.mark.slow
def test_by_a_call(programs: tuple[Future[Program], Future[Program]]) -> None:
    done = programs[1].result()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_call_respects_another(tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("Buffer = 1")
    start = "import deep_ep\nimport tokenloom.compat as c\n"
    refused = python(f"{start}c.install()", tmp_path)
    assert "deep_ep was imported from" in refused.stderr
    assert "force=True" in refused.stderr
    forced = python(f"{start}c.install(force=True)\n{DETECTIONS}", tmp_path)
    assert forced.returncode == 0, forced.stderr


@pytest.mark.slow
def test_importing_starts_nothing() -> None:
    """No CUDA, no NCCL, no process group, and under 100 ms of work beyond torch."""
    code = (
        "import time, torch\nbegan = time.process_time()\nimport deep_ep\nprint(time.process_time() - began)\n"
        "assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()"
    )
    for _ in range(3):  # other programs may take the processor's caches meanwhile
        done = python(code, installation.PATH)
        assert done.returncode == 0, done.stderr
        if float(done.stdout) < 0.1:
            return
    pytest.fail(f"importing deep_ep takes {float(done.stdout):.2f} s beyond torch")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the second distribution is installed."""
    found = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("source") / "tokenloom-deep-ep"
    source = ROOT / "packages" / "tokenloom-deep-ep"
    for file in ("pyproject.toml", "README.md", "deep_ep/__init__.py"):
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_text((source / file).read_text())
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run([*command, "--target", str(found), str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.slow
def test_by_a_distribution(site: Path) -> None:
    done = python(DETECTIONS, site)
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in (site / "deep_ep").glob("*.py"))
    assert files == ["__init__.py"], "it only re-exports"


def test_versions_agree() -> None:
    import tokenloom

    text = (ROOT / "packages" / "tokenloom-deep-ep" / "pyproject.toml").read_text()
    assert f'version = "{tokenloom.__version__}"' in text
    assert f'"tokenloom=={tokenloom.__version__}"' in text


@pytest.mark.slow
@pytest.mark.parametrize("files", [{"top_level.txt": "deep_ep\n"}, {}], ids=["listed", "by its name"])
def test_another_distribution_is_told(site: Path, tmp_path: Path, files: dict[str, str]) -> None:
    """Both own the same files, so the last one that was installed has overwritten the other."""
    folder = tmp_path / "sgl_deep_ep-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-deep-ep\nVersion: 1.0\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    done = python("import deep_ep", site, tmp_path, warnings="always")
    assert "deep_ep is claimed by sgl-deep-ep" in done.stderr
    alone = python("import deep_ep", site, warnings="always")
    assert "is claimed" not in alone.stderr
