"""What ``tokenloom bench mega`` makes of times, and that it runs where there are GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.conftest import NUM_GPUS, WHY_NO_HOPPER
from tokenloom import cli
from tokenloom.bench import mega

SHAPE = mega.MegaShape(hidden=256, intermediate=128, num_experts=4, top_k=2)


def test_routing_is_masked_and_skewed() -> None:
    """Different experts for a token; the favourite of Zipf's law gets most, on all ranks the same one."""
    even = SHAPE.topk_ids(0, 1000)
    assert even.dtype == torch.int32
    assert (even[:, 0] != even[:, 1]).all()
    assert not even.equal(SHAPE.topk_ids(1, 1000))
    masked = mega.MegaShape(256, 128, 4, 2, masked_ratio=0.25).topk_ids(0, 1000)
    assert 0.2 < (masked < 0).float().mean() < 0.3
    skewed = [mega.MegaShape(256, 128, 64, 2, skew=2.0).topk_ids(rank, 1000).flatten().bincount() for rank in (0, 1)]
    assert skewed[0].argmax() == skewed[1].argmax()
    assert skewed[0].max() > 700
    assert SHAPE.topk_ids(0, 0).shape == (0, 2)


def test_numbers_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with two experts each: token 0 of rank 0 goes to both, everything else stays or is unused."""
    ids = [torch.tensor([[0, 2], [1, 1]]), torch.tensor([[3, -1], [-1, -1]])]
    monkeypatch.setattr(mega.MegaShape, "topk_ids", lambda self, rank, num_tokens: ids[rank])
    by_rank = [
        {"graph": [10.0, 14.0, 11.0], "events": [20.0, 20.0, 20.0], "dispatch": [1.0, 2.0, 3.0]},
        {"graph": [12.0, 13.0, 15.0], "events": [30.0, 10.0, 40.0], "dispatch": [2.0, 2.0, 2.0]},
    ]
    row = mega.make_row(SHAPE, 2, 2, 3, by_rank)
    assert row.name == "mega/ep2/t2/h256/i128/e4/k2/graph"
    assert (row.p50_us, row.p99_us, row.slowest_rank) == (14.0, 15.0, 1)
    assert (row.events_us, row.stages_us) == (30.0, {"dispatch": 2.0})
    expert_bytes = 3 * 256 * 128
    assert row.weights_gbytes_per_s == pytest.approx(2 * expert_bytes / 14.0 / 1e3)
    assert row.tflops == pytest.approx(5 / 2 * 2 * expert_bytes / 14.0 / 1e6)
    # Rank 0 sends one row; rank 1 sends one result back.
    assert mega._bytes_out(SHAPE, 2, 0, ids) == 256 + 256 // 128 * 4
    assert mega._bytes_out(SHAPE, 2, 1, ids) == 256 * 2
    assert row.floor_us == pytest.approx(2 * expert_bytes / mega.HBM_GBYTES_PER_S / 1e3)
    assert mega.table([row]).row_count == 1


@pytest.mark.skipif(NUM_GPUS > 0, reason="there are GPUs here")
def test_it_says_that_there_is_no_gpu() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "mega"])
    assert done.exit_code != 0
    assert "GPU" in done.output


@pytest.mark.gpu
@pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER))
def test_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    shape = mega.MegaShape(512, 256, 4 * NUM_GPUS, 2, masked_ratio=0.1, skew=0.5)
    mega.run_mega(Console(), NUM_GPUS, shape, [1, 40], command=["bench", "mega"], iterations=3, json_file=file)
    rows = json.loads(file.read_text())["rows"]
    assert [row["setup"]["num_tokens"] for row in rows] == [1, 40]
    for row in rows:
        assert row["p50_us"] > 0
        assert list(row["stages_us"]) == ["dispatch", "lists", "gemm1", "gemm2", "sum"]
        assert all(us > 0 for us in row["stages_us"].values())
