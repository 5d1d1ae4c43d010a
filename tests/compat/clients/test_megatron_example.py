"""examples/clients/megatron_moe.py as its users start it. It needs the extra ``clients``."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from tests.conftest import NUM_GPUS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "clients" / "megatron_moe.py"
LIMIT_S = 300.0

pytestmark = pytest.mark.skipif(
    util.find_spec("megatron") is None, reason="megatron-core is not installed; the extra 'clients' has it"
)


@pytest.mark.skipif(NUM_GPUS == 1, reason="ranks would be on one GPU")
def test_by_torchrun() -> None:
    """On two ranks, as each takes seconds to import Megatron; test_megatron.py has four."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *torchrun, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1].startswith("PASS")
    assert lines[0].split() == ["step", "alltoall", "deepep", "hybridep"]
    first, last = ([float(each) for each in lines[step].split()[1:]] for step in (1, 10))
    assert max(last) < min(first) / 2, "it learns"
    assert any(line.startswith("tokenloom Communicator") for line in lines), "its communicators moved the tokens"
