"""``tokenloom bench train``: that its check can fail, that its rival computes the same, what it makes of times."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tokenloom as tl
from tests.conftest import Ranks
from tokenloom.bench import timing, train, train_check, train_measure, train_work
from tokenloom.bench.train_check import TENSORS, Difference, compare, total
from tokenloom.bench.train_measure import WARM_UP_STEPS, Contestant
from tokenloom.bench.train_rival import own_experts, torch_experts, torch_layer
from tokenloom.bench.train_rows import LOCAL, ONE, OURS, PASSES, Measured, Report
from tokenloom.bench.train_work import TrainOptions, TrainShape, Weights, make_problem
from tokenloom.cli import app
from tokenloom.ops.experts import _GroupedProducts
from tokenloom.runtime.processes import RankContext, RankPool
from tokenloom.training.saved_activations import SavedTensor
from tokenloom.tune import choices

SHAPE = TrainShape(num_tokens=96, hidden=32, intermediate=24, num_experts=24, top_k=3)
OPTIONS = TrainOptions("bf16", 0.0, None, True, False, None, True, 3)
SECTIONS = ["check", "kept for backward", "times", "baselines", "exposed network time"]
"""In the order in which they are printed, below the setup."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks that are started from here find tuned choices: nowhere, unless the test keeps some."""
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- on ranks -------------------------------------------------------------------------------------------------------


def test_the_command(folder: Path, tmp_path: Path) -> None:
    """As a user runs it, with ranks of its own: every section, in order, and every number of it as a row of the file.
    The strategy is the one that was kept for this shape, and said to be."""
    setting = choices.setting_of(SHAPE.plan(2), SHAPE.intermediate, torch.bfloat16, "collective", "cpu")
    choices.keep(setting, tl.Strategy("all_gather", "dedup"))
    file = tmp_path / "rows.json"
    arguments = ["--thiek", "96,32,24,24,3", "--device", "cpu", "--ranks", "2", "--iterations", "3"]
    done = CliRunner().invoke(app.app, ["bench", "train", *arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert re.findall(r"^-- ([a-z ]+)", done.output, re.M) == SECTIONS
    assert "96 tokens, 48 a rank; hidden 32, intermediate 24, top-3 of 24 experts, 12 a rank; bf16" in done.output
    assert "strategy: dispatch all_gather, combine dedup: tuned here" in done.output
    assert len(re.findall(r"^(?:o|dx|d router_weight|dw1|dw2) .* PASS", done.output, re.M)) == 5
    assert "FAIL" not in done.output
    found = json.loads(file.read_text())
    name, rows = "ep2/t96/h32/i24/e24/k3/bf16", {row["name"]: row for row in found["rows"]}
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


def measure(context: RankContext, changes: dict[str, Any], shape: TrainShape = SHAPE) -> Measured:
    return train_measure.measure_on_rank(context, shape, replace(OPTIONS, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "fp32", "skew": 1.0, "redispatch_in_backward": True},
        {"strategy": tl.Strategy("dedup", "all_to_all"), "pool_rows": 300, "overlap": False},
    ],
    ids=["fp32, skewed, sent again", "all-to-all, pool"],
)
def test_all_agree(ranks: Ranks, changes: dict[str, Any]) -> None:
    """Layer and reference, layer and rival, on every number of ranks, whatever the options; the limits hold with room,
    so that they do not hide faults. Everybody has a sample of every pass for every iteration."""
    found = ranks.run(measure, changes)
    report = Report(SHAPE, replace(OPTIONS, **changes), found)
    limit = train_check.LIMITS[changes.get("dtype", "bf16")]
    assert report.passed
    assert all(row.relative < limit / 2 for row in report.checks)
    assert any("so they agree" in note for note in report.notes)
    assert sum(each.routes for each in found) == 96 * 3
    assert (found[0].chosen_by, found[0].strategy) == (
        ("hand", changes["strategy"]) if "strategy" in changes else ("default", tl.Strategy())
    )
    whose = [OURS, report.rival, LOCAL, ONE]
    assert list(found[0].samples) == whose
    assert all(len(each.samples[who][what]) == 3 for each in found for who in whose for what in PASSES)
    kept = {each.name for each in found[0].saved}
    assert ("RoutedExperts: rows" in kept) != bool(changes.get("redispatch_in_backward"))


def break_each(context: RankContext) -> dict[str, dict[str, bool]]:
    """Which comparisons still pass after a fault in one tensor of one rank, by what is wrong."""
    group, local = context.group, SHAPE.num_experts // context.num_ranks
    generator = torch.Generator().manual_seed(7)

    def draw(*sizes: int) -> torch.Tensor:
        drawn = torch.randn(sizes, generator=generator).bfloat16() / sizes[-1] ** 0.5
        return drawn.to(context.device)

    router, w1, w2 = draw(24, 32), draw(24, 48, 32), draw(24, 32, 24)
    own = slice(context.rank * local, (context.rank + 1) * local)
    weights = Weights(*(each.requires_grad_() for each in (router, w1[own].clone(), w2[own].clone())))
    problem = make_problem(96, weights, 3, seed=context.rank)
    ranks = train_measure.RankGroup(group, device=context.device)
    right = Contestant(lambda: torch_layer(problem.x, weights, 3, torch_experts, ranks), problem.gradients).results()
    found = {}
    for fault in ("none", *TENSORS, "a lost token", "not a number"):
        got = [each.clone() for each in right]
        if fault in TENSORS and context.rank == 0:
            got[TENSORS.index(fault)] *= 1.05
        if fault == "a lost token" and context.rank == context.num_ranks - 1:
            got[0][5] = 0
        if fault == "not a number" and context.rank == 0:
            got[1][0, 0] = torch.nan
        found[fault] = train_check.compare_with_reference(context, problem, 3, tuple(got))
    return found


def test_every_fault_is_found(ranks: Ranks) -> None:
    """In each tensor, on one rank alone: 5% too much, a token whose output is lost, NaN. No other tensor is blamed;
    what is right passes."""
    by_rank = ranks.run(break_each)
    blamed = {"a lost token": ["o"], "not a number": ["dx"], "none": []} | {name: [name] for name in TENSORS}
    for fault, names in blamed.items():
        totals = {name: total(found[fault][name] for found in by_rank) for name in TENSORS}
        assert [name for name in TENSORS if not totals[name].within(2**-6)] == names, fault


def measure_with_wrong_dw1(context: RankContext, *arguments: Any) -> Measured:
    """Gradients of gates and ups are 5% too large in the layer; by the width of their products."""
    real = _GroupedProducts.of_weights

    def wrong(self: Any, left: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return real(self, left, *rest) * (1.05 if left.shape[1] == 2 * SHAPE.intermediate else 1.0)

    with mock.patch.object(_GroupedProducts, "of_weights", wrong):
        return train_measure.measure_on_rank(context, *arguments)


@contextmanager
def borrowed(pools: Callable[[str], RankPool], function: Any = train_measure.measure_on_rank) -> Iterator[None]:
    """Let the command use ranks that are there already, and run ``function`` on them."""

    class Borrowed:
        def __init__(self, num_ranks: int, device: str) -> None:
            self.num_ranks, self.device = num_ranks, device

        def __enter__(self) -> Borrowed:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def run(self, _: Any, *arguments: Any, **options: Any) -> list[Any]:
            return pools(self.device).run(function, *arguments, ranks=self.num_ranks, **options)

    with mock.patch.object(train, "RankPool", Borrowed):
        yield


def test_a_pool_too_small_says_what_would_do() -> None:
    """In a line, not in a traceback of a rank."""
    command = ["bench", "train", "--thiek", "64,32,16,4,2", "--ranks", "2", "--device", "cpu", "--pool-rows", "3"]
    done = CliRunner().invoke(app.app, command)
    assert done.exit_code == 1
    said = [line for line in done.output.splitlines() if line]
    assert len(said) == 1
    assert said[0].startswith("tokenloom: CapacityOverflow: dispatch needs ")
    assert "pool_rows=" in said[0]


def test_a_wrong_gradient_fails_the_command(folder: Path, pools: Callable[[str], RankPool]) -> None:
    """Exit status 1, the tensor named. Without the check the same run ends well, and says that nothing was checked."""
    command = ["bench", "train", "--thiek", "96,32,24,24,3", "--device", "cpu", "--ranks", "2", "--iterations", "3"]
    with borrowed(pools, measure_with_wrong_dw1):
        wrong = CliRunner().invoke(app.app, command)
        unchecked = CliRunner().invoke(app.app, [*command, "--no-check", "--no-overlap"])
    assert wrong.exit_code == app.FAILED
    assert re.findall(r"^(.*?)  .*FAIL", wrong.output, re.M) == ["dw1"]
    assert "\nFAIL\n" in wrong.output
    assert re.findall(r"^-- ([a-z ]+)", wrong.output, re.M) == SECTIONS
    assert unchecked.exit_code == 0
    assert "not asked for (--no-check)" in unchecked.output
    assert "overlap off" in unchecked.output
    assert "PASS" not in unchecked.output


def measure_without_memory(context: RankContext, shape: TrainShape) -> Measured:
    with mock.patch.object(train_measure, "free_bytes", return_value=1_500_000):
        return measure(context, {"check": False}, shape)


def test_baselines_that_cannot_be(ranks: Ranks) -> None:
    """Are left out with their reason, on all ranks alike, and everything else is there."""
    shape = replace(SHAPE, num_tokens=1024, top_k=7)
    report = Report(shape, OPTIONS, ranks.run(measure_without_memory, shape))
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


def turns(context: RankContext) -> list[str]:
    order: list[str] = []

    def contestant(who: str) -> Contestant:
        return Contestant(lambda: who, lambda out: order.append(out))

    def one_call(context: RankContext, call: Any, queued: bool) -> float:
        assert queued
        grad = torch.is_grad_enabled()
        call()
        order.append(f"grad {grad}")
        return 1.0

    contestants = {who: contestant(who) for who in "ab"}
    with mock.patch.object(timing, "one_call", one_call):
        train_measure.take_turns(context, contestants, 4, lambda what: None)
    assert all(len(times) == 4 for each in contestants.values() for times in each.samples.values())
    return order


def test_everybody_takes_turns(ranks: Ranks) -> None:
    """Three rounds, everybody after a warm-up of its own; a step is a forward without gradients, one with, and the
    backward of that one's output."""
    steps = [WARM_UP_STEPS + count for count in timing.shares(4)]
    expected = [who for count in steps for who in "ab" for _ in range(count)]
    order = ranks.run(turns)[0]
    assert order[2::4] == expected
    assert (order[0::4], order[1::4]) == (["grad False"] * len(expected), ["grad True"] * len(expected))


# -- in this process ------------------------------------------------------------------------------------------------


def test_skewed_tokens_go_where_they_are_drawn_to() -> None:
    """The router chooses what Zipf's law drew, in spite of rounding; without skew it chooses by itself."""
    weights = Weights(*(torch.randn(sizes).bfloat16() for sizes in ((16, 64), (16, 8, 64), (16, 64, 4))))
    weights.router.mul_(0.1)
    problem = make_problem(500, weights, 3, skew=1.2, seed=5)
    _, ids = train_check.choose(problem, 3)
    drawn = train_work.draw_topk_ids(5, 500, 16, 3, 1.2)
    assert ids.sort().values.tolist() == drawn.sort().values.tolist()
    even = train_check.choose(make_problem(500, weights, 3, seed=5), 3)[1].flatten().bincount(minlength=16)
    assert even.max() < 2.5 * 500 * 3 / 16


def test_both_kinds_of_experts_are_the_same() -> None:
    """The rival's and the layer's, without a network: outputs and gradients."""
    weights = Weights(
        *(torch.randn(sizes, requires_grad=True) for sizes in ((8, 16), (8, 12, 16), (8, 16, 6))),
    )
    problem = make_problem(40, weights, 3)
    results = [
        Contestant(lambda kind=kind: torch_layer(problem.x, weights, 3, kind), problem.gradients).results()
        for kind in (torch_experts, own_experts)
    ]
    for name, ours, theirs in zip(TENSORS, *results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)


def test_differences_by_hand() -> None:
    """Of parts together: as of the whole; what is nothing but should be something, and the other way round."""
    got, ref = torch.tensor([[3.0, 4.0], [0.0, -2.0]]), torch.tensor([[0.0, 4.0], [0.0, -6.0]])
    found = compare(got.bfloat16(), ref)
    assert found == total([compare(got[:1], ref[:1]), compare(got[1:], ref[1:]), compare(got[:0], ref[:0])])
    assert found == Difference(6.0, 10.0, 4, 4.0, 25.0, 52.0)
    assert (found.mean_ref, found.relative) == (2.5, pytest.approx((25 / 52) ** 0.5))
    zeros = torch.zeros(3)
    assert compare(zeros, zeros).within(0.0)
    assert not compare(zeros, torch.ones(3)).within(0.5)
    assert not compare(torch.ones(3), zeros).within(0.5)
    for place in (0, 1):  # whichever part comes first
        parts = [compare(torch.ones(3), torch.ones(3))] * 2
        parts[place] = compare(torch.full((3,), torch.nan), torch.ones(3))
        assert not total(parts).within(1e9)


def made_up(rank: int, rival_off: float = 0.0) -> Measured:
    """Ours: 10, 20 and 30 ms on rank 0, twice that on rank 1; others are faster or slower by a factor."""
    factors = {OURS: 1.0, "nccl": 1.5, LOCAL: 0.9, ONE: 1.6 if rank == 0 else 0.0}
    samples = {
        who: {what: [(1 + rank) * factor * 1e4 * (1 + i)] * 3 for i, what in enumerate(PASSES)}
        for who, factor in factors.items()
    }
    right = dict.fromkeys(TENSORS, Difference(1.0, 1.0, 2, 0.0, 0.0, 1.0))
    rival = right | {"dx": Difference(1.0, 1.0, 2, 0.0, rival_off, 1.0)}
    saved = [SavedTensor("big", (4, 4), torch.bfloat16, 1000 + rank), SavedTensor("small", (1,), torch.int32, 4)]
    return Measured("nvlink", tl.Strategy(), "default", 100 + rank, right, rival, saved, samples, {})


def shown(*tables: Any) -> str:
    console = Console(width=120, highlight=False)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get()


def test_numbers_by_hand() -> None:
    """The slowest rank counts; one rank with all tokens is divided by the ranks; backward is twice the arithmetic."""
    shape = TrainShape(65536, 4096, 1536, 64, 8)
    report = Report(shape, OPTIONS, [made_up(0), made_up(1)])
    rows = {(row.who, row.what): row for row in report.times}
    forward, backward = rows[OURS, "forward"], rows[OURS, "backward"]
    assert forward.name == "train/nvlink/ep2/t65536/h4096/i1536/e64/k8/bf16/forward"
    assert rows["nccl", "backward"].name == "train/nccl/ep2/t65536/h4096/i1536/e64/k8/bf16/backward"
    assert (forward.p50_ms, forward.slowest_rank, backward.p50_ms) == (40.0, 1, 60.0)
    flops = 6 * 32768 * 8 * 4096 * 1536
    assert forward.tflops == pytest.approx(flops / 0.040 / 1e12)
    assert backward.tflops == pytest.approx(2 * flops / 0.060 / 1e12)
    assert rows[ONE, "forward"].p50_ms == 32.0
    assert rows[ONE, "forward"].tflops == pytest.approx(2 * flops / 0.032 / 1e12)
    assert forward.exposed_ms == {LOCAL: pytest.approx(4.0), ONE: pytest.approx(40 - 32 / 2)}
    assert (forward.scaling, forward.rival_ratio) == (pytest.approx(16 / 40), pytest.approx(1.5))
    line = next(line.split() for line in shown(report.exposed_table()).splitlines() if line.startswith("forward"))
    assert line[1:] == ["40", "16", "24", "60.0", "40.0", "36", "4", "10.0", "1.50"]
    assert (rows["nccl", "forward"].scaling, rows["nccl", "forward"].exposed_ms) == (None, {})
    kept = "\n".join(report.saved_lines())
    assert re.search(r"total of the rank with most +1,005\n.*H \+ 2I\) values +3,758,096,384", kept)
    assert "1 smaller ones" in kept
    assert [row.num_bytes for row in report.saved] == [1001, 4]
    assert report.passed


@pytest.mark.parametrize(("off", "said"), [(9e-4, "agree"), (2e-3, "DO NOT"), (float("nan"), "DO NOT")])
def test_a_rival_that_computes_something_else_is_told(off: float, said: str) -> None:
    """The limit is twice that of one layer, 2^-5; squares here, of two ranks."""
    (note,) = Report(SHAPE, OPTIONS, [made_up(0, off), made_up(1, off)]).notes
    assert said in note
    assert "(dx, relative)" in note


def test_tables_fit() -> None:
    """120 columns, at the largest numbers that one would wait for."""
    times = {what: [123_456_789.0] * 3 for what in PASSES}
    measured = [replace(made_up(0), samples=dict.fromkeys((OURS, "nccl", LOCAL, ONE), times))] * 8
    report = Report(TrainShape(131072, 7168, 2048, 256, 8), OPTIONS, measured)
    text = shown(report.times_table([OURS, "nccl", LOCAL, ONE]), report.exposed_table(), report.check_table())
    assert "…" not in text
    assert text.count("1.235e+05") == 24 + 2 + 2
    assert all(word in text for word in ("this layer", "nccl rival", "local", "one rank, all tokens", "scaling"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--thiek", "96,32,24,16"], 2, "expected five positive integers, T,H,I,E,K"),
        (["--thiek", "96,32,24,16,3,1"], 2, "--thiek"),
        (["--thiek", "96,32,24,16,many"], 2, "--thiek"),
        (["--thiek", "96,32,0,16,3"], 2, "--thiek"),
        (["--thiek", "97,32,24,16,3"], 1, "97 tokens in --thiek are those of all ranks, and not divisible by the 2"),
        (["--thiek", "96,32,24,15,3"], 1, "num_experts is 15, not divisible by the 2 ranks"),
        (["--thiek", "96,32,24,2,3"], 1, "top_k is 3"),
        (["--thiek", "96,8,24,24,3", "--skew", "1"], 1, "--skew with 24 experts needs a hidden size of at least"),
        (["--thiek", "96,32,24,24,3", "--dtype", "fp16"], 2, "--dtype"),
        (["--thiek", "96,32,24,24,3", "--strategy", "dedup"], 2, "expected dispatch,combine"),
        (["--thiek", "96,32,24,24,3", "--strategy", "dedup,pigeon"], 1, "strategy of combine is 'pigeon'"),
        (["--thiek", "96,32,24,24,3", "--pool-rows", "0"], 2, "--pool-rows"),
        (["--thiek", "96,32,24,24,3", "--json", "/no/such/folder/rows.json"], 2, "--json"),
        ([], 2, "--thiek"),
    ],
)
def test_bad_options_start_nothing(arguments: list[str], code: int, said: str) -> None:
    """A message that names what is wrong, no traceback, and no process started."""
    with mock.patch.object(RankPool, "start", side_effect=AssertionError("ranks were started")):
        done = CliRunner().invoke(app.app, ["bench", "train", "--device", "cpu", "--ranks", "2", *arguments])
    assert done.exit_code == code
    assert isinstance(done.exception, SystemExit)
    assert said in " ".join(done.output.replace("│", " ").split())


def test_what_all_of_it_takes_on_one_rank() -> None:
    """More than what is kept for backward and weights with their gradients, and within a small factor of it: 131072
    tokens of the usual layer fit one GPU of 141 GB."""
    shape = TrainShape(131072, 4096, 1536, 128, 8)
    weights = 2 * 128 * 3 * 4096 * 1536 * 2
    least = shape.kept_bytes(131072, torch.bfloat16) + weights
    assert 2 * least < train_measure.bytes_on_one(shape, torch.bfloat16) < 5 * least
    assert train_measure.bytes_on_one(shape, torch.bfloat16) < 110e9
    assert train_measure.free_bytes(torch.device("cpu")) > 1e6
