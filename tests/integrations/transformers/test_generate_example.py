"""examples/generate_moe.py as its users start it, and its parts on ranks that are there already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NUM_GPUS
from tests.integrations.transformers import models
from tests.integrations.transformers.test_models import FolderOf
from tests.support.scripts import load_script
from tokenloom.runtime.processes import RankContext, RankPool

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "generate_moe.py"
LIMIT_S = 300.0


def start(num_ranks: int, *options: object) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), str(SCRIPT), *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def check(result: dict[str, Any], num_ranks: int, new_tokens: int) -> None:
    assert result["ranks"] == num_ranks
    assert list(result["implementations"]) == ["tokenloom", "all_to_all"]
    for each in result["implementations"].values():
        assert each["tokens_per_s"] > 0
        sums = each["milliseconds"]
        assert [sums[phase]["forwards"] for phase in ("prefill", "decode")] == [1, new_tokens - 1]
        assert all(0 < sums[phase]["experts"] < sums[phase]["model"] for phase in ("prefill", "decode"))


@pytest.mark.skipif(NUM_GPUS == 1, reason="ranks would be on one GPU")
def test_by_torchrun(tmp_path: Path) -> None:
    ended = start(2, "--new-tokens", 4, "--json", tmp_path / "result.json")
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    check(result, 2, 4)
    lines = ended.stdout.splitlines()
    assert [line.split()[0] for line in lines if "tokens/s" in line] == ["tokenloom", "all_to_all"]
    assert "2 modules of experts run on tokenloom" in lines
    if not NUM_GPUS:
        assert result["same_tokens"]
        assert "all gave the same tokens" in lines
        assert "On CPUs this comparison is about equal tokens, not about speed" in " ".join(lines)


def test_one_rank_is_too_few() -> None:
    ended = start(1)
    assert ended.returncode == 1
    assert "experts need two ranks to be spread over" in ended.stderr


def generate_here(context: RankContext, arguments: list[str]) -> dict[str, Any]:
    models.prepare(context)
    example = load_script(SCRIPT)
    return example.generate(example.parser().parse_args([*arguments, "--new-tokens", "3"]), context.device)


@pytest.mark.parametrize(
    "arguments", ["--family deepseek_v3", "--family gpt_oss", "--family nemotron_h", "--spread tp"]
)
def test_random_models(pool: RankPool, arguments: str) -> None:
    result = pool.run(generate_here, arguments.split())[0]
    check(result, pool.num_ranks, 3)
    assert result["same_tokens"] or pool.device == "cuda"


def test_a_model_on_disk(pool: RankPool, folder_of: FolderOf) -> None:
    """Without a wait for counts, too."""
    arguments = ["--model", str(folder_of("mixtral", pool)), "--prompt-tokens", "5"]
    rows = pool.num_ranks * 4 * 5 * models.TOP_K
    result = pool.run(generate_here, [*arguments, "--pool-rows", str(rows)])[0]
    check(result, pool.num_ranks, 3)
    assert result["same_tokens"] or pool.device == "cuda"
