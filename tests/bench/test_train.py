"""``tokenloom bench train`` on ranks: its check can fail, its rival computes the same, everybody takes turns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import tokenloom as tl
from tests.bench.test_train_report import OPTIONS, shown
from tests.cli.borrowed import borrowed
from tests.conftest import Ranks
from tests.tune.test_tune import like_a_communicator
from tokenloom.bench import clock, legends, setup, train, train_work
from tokenloom.bench.differences import Difference, total
from tokenloom.bench.rivals.torch_layer import torch_experts, torch_layer
from tokenloom.bench.train import BATCH, LOCAL, ONE, OURS, PASSES, SPARE, TrainFound, TrainLayer, TrainReport
from tokenloom.bench.train_work import (
    LIMITS,
    TENSORS,
    TrainShape,
    Weights,
    compare_with_reference,
    make_problem,
)
from tokenloom.cli import app
from tokenloom.cli.terminal import FAILED
from tokenloom.comm.pulled_experts import PulledExperts
from tokenloom.ops.expert_gemms import _GroupedGemms
from tokenloom.runtime.processes import RankContext, RankPool
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.tune import choices

pytestmark = pytest.mark.slow_on(4)

SHAPE = TrainShape(num_tokens=96, hidden=32, intermediate=24, num_experts=12, top_k=3)
COMMAND = ["bench", "train", "--device", "cpu", "--ranks", "2", "--iterations", "3"]
THIEK = ["--thiek", "96,32,24,12,3"]
SIZES = ["--tokens", "48", "--hidden", "32", "--intermediate", "24", "--num-experts", "12", "--top-k", "3"]
"""The same layer: 96 tokens are 48 on each of two ranks."""
SECTIONS = ["check", "kept for backward", "times", "baselines", "exposed network time"]
"""In the order in which they are printed, below the setup."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process and its ranks find tuned choices: nowhere, unless the test keeps some."""
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quickly(context: RankContext, *arguments: Any) -> TrainFound:
    """What a rank does, without warm-up: no test looks at how long anything takes."""
    with mock.patch.object(train, "WARM_UP_STEPS", 0):
        return train.measure_on_rank(context, *arguments)


def test_the_command(folder: Path, tmp_path: Path, pools: Callable[[str], RankPool]) -> None:
    """Every section is there, in order, and every number of it as a row of the file. The strategy is the one that was
    kept for this shape, and said to be."""
    setting = choices.setting_of(like_a_communicator(SHAPE.plan(2), "cpu"), SHAPE.intermediate, torch.bfloat16)
    choices.keep(setting, tl.Strategy("all_gather", "dedup"))
    file = tmp_path / "rows.json"
    with borrowed(setup, pools, quickly):
        done = CliRunner().invoke(app.app, [*COMMAND, *THIEK, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert re.findall(r"^-- ([a-z ]+)", done.output, re.M) == SECTIONS
    shown = " ".join(done.output.split())
    assert "96 tokens, 48 a rank; hidden 32, intermediate 24, top-3 of 12 experts, 6 a rank; bf16" in shown
    assert re.search(r"2 ranks on CPU, \d+ cores? \(.*\), backend collective: 96 tokens", shown)
    assert "strategy: dispatch all_gather, combine dedup: tuned here" in done.output
    assert len(re.findall(r"^(?:o|dx|d router_weight|dw1|dw2) .* PASS", done.output, re.M)) == 5
    assert "FAIL" not in done.output
    found = json.loads(file.read_text())
    name, rows = "ep2/t96/h32/i24/e12/k3/bf16", {row["name"]: row for row in found["rows"]}
    whose = ["collective", "gloo", "local", "one"]
    assert [each for each in rows if "/saved/" not in each] == [
        *(f"train/{who}/{name}/{what}" for who in whose for what in PASSES),
        *(f"train/collective/{name}/check/{tensor}" for tensor in TENSORS),
    ]
    assert rows[f"train/collective/{name}/saved/RoutedExperts: rows"]["shape"][1] == 32
    assert all(row["setup"]["chosen_by"] == "tune" and row["setup"]["top_k"] == 3 for row in rows.values())
    for who in whose:
        assert all(0 < rows[f"train/{who}/{name}/{what}"]["p50_ms"] < 1e4 for what in PASSES)
    forward = rows[f"train/collective/{name}/forward"]
    assert f"{forward['p50_ms']:,.4g}" in done.output
    assert set(forward["exposed_ms"]) == {"local", "one"}
    assert found["setup"]["command"].startswith("tokenloom")
    assert any("so they agree" in note for note in found["notes"])
    why_slower = legends.TRAIN_EQUALITY.format(backend="collective")
    assert why_slower in found["notes"]
    assert why_slower in shown, "whoever sees a ratio below 1 on a CPU reads why"
    assert not any(re.search(r"[\[_]", row["tensor"]) for row in found["rows"] if "/saved/" in row["name"])


@pytest.mark.parametrize("sizes", [THIEK, SIZES], ids=["short", "by name"])
def test_both_ways_to_say_the_sizes(sizes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """T of the short form is the tokens of all ranks, --tokens those of every rank, as in all other commands."""
    given: list[Any] = []
    monkeypatch.setattr(train, "run_train", lambda *arguments: given.append(arguments) or True)
    done = CliRunner().invoke(app.app, [*COMMAND, *sizes, "--dtype", "fp32"])
    assert done.exit_code == 0, done.output
    ((run, shape, options, max_vios),) = given
    assert max_vios == [0.0]
    assert (run.num_ranks, run.device, shape, options.dtype) == (2, "cpu", SHAPE, "fp32")


def measure_with(context: RankContext, changes: dict[str, Any], shape: TrainShape = SHAPE) -> TrainFound:
    return quickly(context, shape, replace(OPTIONS, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "fp32", "max_vio": 1.0, "redispatch_in_backward": True, "spare_slots": 1},
        {"strategy": tl.Strategy("dedup", "all_to_all"), "pool_rows": 300, "overlap": False},
    ],
    ids=["fp32, skewed, sent again, with spare slots", "all-to-all, pool"],
)
def test_all_agree(ranks: Ranks, changes: dict[str, Any]) -> None:
    """The layer agrees with reference and rival, on every number of ranks, whatever the options. Its differences are
    far below the limits, so the limits do not hide faults. Everybody has a sample of every pass and iteration. With
    replicas, which sum their gradients at owners, and with splits of batches, the layer agrees with itself without,
    and no rank is fuller."""
    found = ranks.run(measure_with, changes)
    report = TrainReport(SHAPE, replace(OPTIONS, **changes), found)
    limit = LIMITS[changes.get("dtype", "bf16")]
    assert report.passed
    assert all(row.relative < limit / 2 for row in report.checks)
    spare = "spare_slots" in changes
    assert [note.count("so they agree") for note in report.notes if "differ from ours" in note] == [1] * (
        1 + 2 * spare
    )
    assert sum(each.routes for each in found) == 96 * 3
    if spare:
        for who in (SPARE, BATCH):
            its = [each.with_slots[who] for each in found]
            assert sum(each.routes for each in its) == 96 * 3
            assert max(each.routes for each in its) <= max(each.routes for each in found)
            assert all(its[0].differences[name].max_diff < 1e-4 for name in TENSORS)
    assert (found[0].chosen_by, found[0].strategy) == (
        ("hand", changes["strategy"]) if "strategy" in changes else ("default", tl.Strategy())
    )
    whose = [OURS, *([SPARE, BATCH] if spare else []), report.rival, LOCAL, ONE]
    assert list(found[0].layers) == whose
    assert all(len(each.layers[who].samples[what]) == 3 for each in found for who in whose for what in PASSES)
    kept = {each.name for each in found[0].saved}
    assert ("RoutedExperts: rows" in kept) != bool(changes.get("redispatch_in_backward"))


def break_each(context: RankContext) -> dict[str, dict[str, Difference]]:
    """Differences from the reference after a fault in one tensor of one rank, by what is wrong."""
    group, local = context.group, SHAPE.num_experts // context.num_ranks
    generator = torch.Generator().manual_seed(7)

    def draw(*sizes: int) -> torch.Tensor:
        drawn = torch.randn(sizes, generator=generator).bfloat16() / sizes[-1] ** 0.5
        return drawn.to(context.device)

    router, w1, w2 = draw(12, 32), draw(12, 48, 32), draw(12, 32, 24)
    own = slice(context.rank * local, (context.rank + 1) * local)
    weights = Weights(router.requires_grad_(), (w1[own].clone().requires_grad_(), w2[own].clone().requires_grad_()))
    problem = make_problem(96, weights, 3, seed=context.rank)
    ranks = RankGroup(group, device=context.device)
    right = TrainLayer(lambda: torch_layer(problem.x, weights, 3, torch_experts, ranks), problem.gradients).results()
    found = {}
    for fault in ("none", *TENSORS, "a lost token", "not a number"):
        got = [each.clone() for each in right]
        if fault in TENSORS and context.rank == 0:
            got[TENSORS.index(fault)] *= 1.05
        if fault == "a lost token" and context.rank == context.num_ranks - 1:
            got[0][5] = 0
        if fault == "not a number" and context.rank == 0:
            got[1][0, 0] = torch.nan
        found[fault] = compare_with_reference(context, problem, 3, tuple(got))
    return found


def test_every_fault_is_found(ranks: Ranks) -> None:
    """Faults on one rank alone: 5% too much in each tensor, a token whose output is lost, NaN. No other tensor is
    blamed, and what is right passes."""
    by_rank = ranks.run(break_each)
    blamed = {"a lost token": ["o"], "not a number": ["dx"], "none": []} | {name: [name] for name in TENSORS}
    for fault, names in blamed.items():
        totals = {name: total(found[fault][name] for found in by_rank) for name in TENSORS}
        assert [name for name in TENSORS if not totals[name].within(2**-6)] == names, fault


def measure_with_wrong_dw1(context: RankContext, *arguments: Any) -> TrainFound:
    """The layer's gradients of gates and ups are 5% too large; the width of their GEMM tells them from others."""
    real = _GroupedGemms.weight_gradient

    def wrong(self: Any, left: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return real(self, left, *rest) * (1.05 if left.shape[1] == 2 * SHAPE.intermediate else 1.0)

    with mock.patch.object(_GroupedGemms, "weight_gradient", wrong):
        return quickly(context, *arguments)


@pytest.mark.slow  # ranks are started anew
def test_a_pool_too_small_says_what_would_do() -> None:
    """One line says it, not the traceback of a rank. The command starts its own ranks here, which the error ends."""
    command = ["bench", "train", "--thiek", "64,32,16,4,2", "--ranks", "2", "--device", "cpu", "--pool-rows", "3"]
    done = CliRunner().invoke(app.app, command)
    assert done.exit_code == 1
    said = [line for line in done.output.splitlines() if line]
    assert len(said) == 1
    assert said[0].startswith("tokenloom: CapacityOverflow: dispatch needs ")
    assert "pool_rows=" in said[0]


def test_a_wrong_gradient_fails_the_command(folder: Path, pools: Callable[[str], RankPool]) -> None:
    """The exit status is 1, the tensor named. Without the check the run ends well, and says that it has none."""
    command = [*COMMAND, *THIEK]
    with borrowed(setup, pools, measure_with_wrong_dw1):
        wrong = CliRunner().invoke(app.app, command)
        unchecked = CliRunner().invoke(app.app, [*command, "--no-check", "--no-overlap"])
    assert wrong.exit_code == FAILED
    assert re.findall(r"^(.*?)  .*FAIL", wrong.output, re.M) == ["dw1"]
    assert "\nFAIL\n" in wrong.output
    assert re.findall(r"^-- ([a-z ]+)", wrong.output, re.M) == SECTIONS
    assert unchecked.exit_code == 0
    assert "not asked for (--no-check)" in unchecked.output
    assert "overlap off" in unchecked.output
    assert "PASS" not in unchecked.output


def measure_with_a_replica_left_out(context: RankContext, *arguments: Any) -> TrainFound:
    """Nobody sums the gradients of replicas at their owner."""
    with mock.patch.object(train_work, "reduce_replica_gradients", return_value=None):
        return quickly(context, *arguments)


def measure_with_gradients_that_stay(context: RankContext, *arguments: Any) -> TrainFound:
    """Nobody brings the gradients of pulled experts home."""
    with mock.patch.object(PulledExperts, "sum_gradients", return_value=None):
        return quickly(context, *arguments)


def test_the_command_with_spare_slots(folder: Path, tmp_path: Path, pools: Callable[[str], RankPool]) -> None:
    """Rows with replicas and with splits of batches stand beside ours, named as in the other benches, and say how full
    the fullest rank is then. A layer with replicas that computes something else fails the command, and so does one
    whose pulled gradients stay with helpers."""
    file = tmp_path / "rows.json"
    command = [*COMMAND, *THIEK, "--dtype", "fp32", "--max-vio", "2", "--spare-slots", "2", "--json", str(file)]
    with borrowed(setup, pools, quickly):
        done = CliRunner().invoke(app.app, command)
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    name = "train/collective/ep2/t96/h32/i24/e12/k3/fp32/v2"
    for what in PASSES:
        ours, replicated = rows[f"{name}/{what}"], rows[f"{name}/spare2/{what}"]
        assert (ours["setup"]["spare_slots"], replicated["setup"]["spare_slots"]) == (None, 2)
        batch = rows[f"{name}/spare2/batch/{what}"]
        assert [each["setup"]["balance"] for each in (ours, replicated, batch)] == [None, None, "batch"]
        fullest = [each["setup"]["fullest_rank"] for each in (ours, replicated, batch)]
        assert fullest[0] > fullest[1] >= fullest[2] == 1
        assert replicated["p50_ms"] > 0 < batch["p50_ms"]
    shown = " ".join(done.output.split())
    assert "forward/spare2 " in shown
    assert "forward/spare2/batch" in shown
    assert "this layer, 2 spare slots a rank inference" in shown
    assert "this layer, 2 spare slots a rank, per batch inference" in shown
    assert legends.TRAIN_SPARE in shown
    assert legends.TRAIN_BATCH in shown
    for faulty, whose in (
        (measure_with_a_replica_left_out, "the layer with replicas"),
        (measure_with_gradients_that_stay, "the layer with splits of batches"),
    ):
        with borrowed(setup, pools, faulty):
            wrong = CliRunner().invoke(app.app, command)
        assert wrong.exit_code == FAILED
        said = " ".join(wrong.output.split())
        others = {"the layer with replicas", "the layer with splits of batches"} - {whose}
        assert re.search(rf"of {whose} differ[^:]*SO THEY DO NOT AGREE", said)
        assert all(re.search(rf"of {each} differ[^:]*so they agree", said) for each in others)


def measure_without_memory(context: RankContext, shape: TrainShape) -> TrainFound:
    with mock.patch.object(train, "free_bytes", return_value=100_000):
        return measure_with(context, {"check": False}, shape)


def test_baselines_that_cannot_be(ranks: Ranks) -> None:
    """They are left out with their reason, on all ranks alike, and everything else is there."""
    shape = replace(SHAPE, top_k=7)
    report = TrainReport(shape, OPTIONS, ranks.run(measure_without_memory, shape))
    local = SHAPE.num_experts // ranks.num_ranks
    few = local < 7
    notes = [note for note in report.notes if "is not measured" in note]
    assert [note.split()[0] for note in notes] == (["local"] if few else []) + ["one"]
    assert "it takes about 0.0 GB, 0.0 GB are free" in notes[-1]
    assert not few or f"a rank has {local} experts, fewer than the 7 that a token chooses" in notes[0]
    assert {row.who for row in report.times} == {OURS, report.rival, *([] if few else [LOCAL])}
    ours = report.times[1]
    assert (ours.scaling, set(ours.exposed_ms)) == (None, set() if few else {LOCAL})
    assert shown(report.exposed_table()).count(" - ") >= 2
    assert report.checks == []


def test_a_step_is_three_passes() -> None:
    """A forward without gradients, one with them, and the backward of its output; behind other work of the GPU."""
    order: list[Any] = []

    def one_call(context: Any, call: Any, queued: bool) -> float:
        assert queued
        call()
        return float(len(order))

    layer = TrainLayer(lambda: order.append(torch.is_grad_enabled()) or "out", order.append)
    with mock.patch.object(clock, "one_call", one_call):
        sample = layer.step(None)  # type: ignore[arg-type]
    assert order == [False, True, "out"]
    assert sample == {"inference": 1.0, "forward": 2.0, "backward": 3.0}
