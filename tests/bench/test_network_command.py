"""The command line of ``tokenloom check-network``: its options, its exit codes, and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.bench.test_network import speed_alone
from tokenloom.bench.network import check
from tokenloom.bench.network.check import CheckOptions
from tokenloom.bench.setup import Run
from tokenloom.cli import app
from tokenloom.errors import InvalidArgument
from tokenloom.tune.network.constants import read_constants

EXPERIMENTAL = True

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    """For scripts that start a job only on a good network."""
    given: list[Any] = []

    def run_on_own_ranks(run: Run, *arguments: Any) -> bool:
        given.extend((run.num_ranks, run.device, *arguments))
        return passed

    monkeypatch.setattr(check, "run_on_own_ranks", run_on_own_ranks)
    arguments = ["--device", "cpu", "--ranks", "4", "--ranks-per-node", "2", "--timeout-s", "7", "--seed", "5"]
    done = CliRunner().invoke(app.app, ["check-network", *arguments])
    assert done.exit_code == (0 if passed else 1)
    assert given == [4, "cpu", CheckOptions(2, 7.0, 30, 5), None]


def test_torchrun_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where a process is: one without a GPU of its own among those that have one cannot go on."""
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    done = CliRunner().invoke(app.app, ["check-network", "--ranks", "4"])
    assert done.exit_code == 2
    assert "torchrun has started the ranks" in done.output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for place, device in ((0, torch.device("cuda", 0)), (1, torch.device("cuda", 1))):
        monkeypatch.setenv("LOCAL_RANK", str(place))
        assert check.local_device(None) == device
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert check.local_device("cpu") == CPU
    with pytest.raises(InvalidArgument, match="there are 3 processes or more on this host, expected at most 2"):
        check.local_device(None)


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """As on a cluster: torchrun starts the ranks, rank 0 speaks, and plan takes the constants."""
    found, constants = tmp_path / "found.json", tmp_path / "constants.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        "tokenloom",
    ]
    options = [
        "--ranks-per-node",
        "2",
        "--rounds",
        "3",
        "--device",
        "cpu",
        "--json",
        str(found),
        "--constants",
        str(constants),
    ]
    done = subprocess.run([*command, "check-network", *options], cwd=ROOT, capture_output=True, text=True, timeout=240)
    content = json.loads(found.read_text())
    assert all(row["passed"] or speed_alone(row) for row in content["rows"]), done.stdout
    assert (done.returncode == 0) == content["setup"]["passed"] == constants.exists()
    assert done.stdout.count("backend network:") == 1
    if constants.exists():
        assert read_constants(constants).where.startswith("tokenloom check-network: 2 nodes of 2")
