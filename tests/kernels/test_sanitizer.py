"""The kernels under compute-sanitizer: no access outside of what was allocated, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WHY_NO_HOPPER
from tests.support.sanitized import DONE

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = shutil.which("compute-sanitizer")
FOUND_SOMETHING = 9
LIMIT_S = 240.0

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.alone,
    pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER)),
    pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer on PATH"),
]


def sanitize(tool: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run support/sanitized.py under a tool.

    What torch allocates is cut from larger pieces, which would hide an overrun: so it does not cache."""
    assert SANITIZER is not None
    options = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND_SOMETHING)]
    command = [SANITIZER, *options, sys.executable, "-m", "tests.support.sanitized", *arguments]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=LIMIT_S
    )
    assert "COMPUTE-SANITIZER" in done.stdout + done.stderr, "the tool did not run"
    return done


# Racecheck knows nothing of barriers in shared memory that hand scales over within the grouped GEMM, and faults where
# that kernel is left out. So it has no MegaMoE.
@pytest.mark.parametrize(
    ("tool", "what"), [("memcheck", "communicator"), ("racecheck", "communicator"), ("memcheck", "mega_moe")]
)
def test_nothing_is_found(tool: str, what: str) -> None:
    """Results are right although a value is read that should not be, or was there by luck: the tool sees it."""
    done = sanitize(tool, what)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert DONE in done.stdout


def test_an_overrun_would_be_found(tmp_path: Path) -> None:
    """The tool watches kernels that come to the GPU the way ours do, so the test above can fail."""
    done = sanitize("memcheck", "overrun", TOKENLOOM_CACHE_DIR=str(tmp_path))
    assert done.returncode != 0, done.stdout + done.stderr
    assert "Invalid __global__ write of size 4 bytes" in done.stdout
