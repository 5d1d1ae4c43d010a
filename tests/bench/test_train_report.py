"""What ``tokenloom bench train`` makes of what ranks found, and what its command refuses; without any ranks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import tokenloom as tl
from tokenloom.bench import setup, train
from tokenloom.bench.differences import Difference, compare, total
from tokenloom.bench.harness import Measured
from tokenloom.bench.rivals.torch_layer import own_experts, torch_experts, torch_layer
from tokenloom.bench.tables import Fitted
from tokenloom.bench.train import LOCAL, ONE, OURS, PASSES, TrainFound, TrainLayer, TrainReport
from tokenloom.bench.train_work import TENSORS, TrainOptions, TrainShape, Weights, choose, make_problem
from tokenloom.training.saved_activations import SavedTensor
from tokenloom.tune.samples import draw_topk_ids

SHAPE = TrainShape(num_tokens=96, hidden=32, intermediate=24, num_experts=24, top_k=3)
OPTIONS = TrainOptions("bf16", 0.0, None, True, False, None, True, 3)


def test_skewed_tokens_go_where_they_are_drawn_to() -> None:
    """The router chooses what was drawn, in spite of rounding; without a MaxVio it chooses by itself."""
    router, w1, w2 = (torch.randn(sizes).bfloat16() for sizes in ((16, 64), (16, 8, 64), (16, 64, 4)))
    weights = Weights(router, (w1, w2))
    weights.router.mul_(0.1)
    problem = make_problem(500, weights, 3, max_vio=1.2, seed=5)
    _, ids = choose(problem, 3)
    drawn = draw_topk_ids(5, 500, 16, 3, 1.2)
    assert ids.sort().values.tolist() == drawn.sort().values.tolist()
    even = choose(make_problem(500, weights, 3, seed=5), 3)[1].flatten().bincount(minlength=16)
    assert even.max() < 2.5 * 500 * 3 / 16


def test_both_kinds_of_experts_are_the_same() -> None:
    """The rival's and the layer's give the same outputs and gradients, without a network."""
    router, w1, w2 = (torch.randn(sizes, requires_grad=True) for sizes in ((8, 16), (8, 12, 16), (8, 16, 6)))
    weights = Weights(router, (w1, w2))
    problem = make_problem(40, weights, 3)
    results = [
        TrainLayer(lambda kind=kind: torch_layer(problem.x, weights, 3, kind), problem.gradients).results()
        for kind in (torch_experts, own_experts)
    ]
    for name, ours, theirs in zip(TENSORS, *results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)


def test_differences_by_hand() -> None:
    """Parts together are as the whole. Nothing in place of something is a difference, and the other way round."""
    got, ref = torch.tensor([[3.0, 4.0], [0.0, -2.0]]), torch.tensor([[0.0, 4.0], [0.0, -6.0]])
    found = compare(got.bfloat16(), ref)
    assert found == total([compare(got[:1], ref[:1]), compare(got[1:], ref[1:]), compare(got[:0], ref[:0])])
    assert found == Difference(6.0, 10.0, 4, 4.0, 7.0, 25.0, 52.0)
    assert (found.mean_ref, found.relative) == (2.5, pytest.approx((25 / 52) ** 0.5))
    zeros = torch.zeros(3)
    assert compare(zeros, zeros).within(0.0)
    assert not compare(zeros, torch.ones(3)).within(0.5)
    assert not compare(torch.ones(3), zeros).within(0.5)
    for place in (0, 1):  # whichever part comes first
        parts = [compare(torch.ones(3), torch.ones(3))] * 2
        parts[place] = compare(torch.full((3,), torch.nan), torch.ones(3))
        assert not total(parts).within(1e9)


def made_up(rank: int, rival_off: float = 0.0) -> TrainFound:
    """Ours takes 10, 20 and 30 ms on rank 0, twice that on rank 1; others are faster or slower by a factor."""
    factors = {OURS: 1.0, "nccl": 1.5, LOCAL: 0.9, ONE: 1.6 if rank == 0 else 0.0}
    layers = {
        who: Measured({what: [(1 + rank) * factor * 1e4 * (1 + i)] * 3 for i, what in enumerate(PASSES)})
        for who, factor in factors.items()
    }
    right = dict.fromkeys(TENSORS, Difference(1.0, 1.0, 2, squares_ref=1.0))
    rival = right | {"dx": Difference(1.0, 1.0, 2, squares_diff=rival_off, squares_ref=1.0)}
    saved = [SavedTensor("big", (4, 4), torch.bfloat16, 1000 + rank)]
    saved += [SavedTensor("routing", (each,), torch.int32, 4 * each) for each in (3, 2)]
    saved.append(SavedTensor("small", (1,), torch.int32, 4))
    return TrainFound("nvlink", tl.Strategy(), "default", 100 + rank, right, rival, saved, layers)


def shown(*tables: Any, width: int = 120) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        for table in tables:
            console.print(Fitted(table))
    return captured.get()


class Pool:
    """Two ranks that have found what is made up."""

    def __init__(self, num_ranks: int, device: str) -> None:
        assert num_ranks == 2

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, function: Any, shape: TrainShape, options: TrainOptions, **limits: Any) -> list[TrainFound]:
        return [replace(made_up(rank), routes=100 + 50 * rank * int(options.max_vio)) for rank in range(2)]


def test_skewed_routings_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each MaxVio has a report, and rows of its own name, with how full the fullest rank was. The chart has each pass
    over MaxVio. What no routing can be is refused before anything starts."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *args, **kw: drawn.append(figure))
    monkeypatch.setattr(setup, "RankPool", Pool)
    file, console = tmp_path / "rows.json", Console(width=120, highlight=False)
    shape, options = replace(SHAPE, hidden=32), OPTIONS
    run = setup.Run(console, 2, "cpu", ["bench"], file, tmp_path / "chart.png")
    with console.capture() as captured:
        assert train.run_train(run, shape, options, [0.0, 2.0])
    charts = drawn[0].axes[: len(PASSES)]
    assert [each.get_title().partition("\n")[0] for each in charts] == list(PASSES)
    for each in charts:
        assert [line.get_label() for line in each.lines][:2] == ["this layer", "nccl rival"]
        assert all(list(line.get_xdata()) == [0.0, 2.0] for line in each.lines)
    rows = [row for row in json.loads(file.read_text())["rows"] if row["name"].endswith("/forward")]
    of_ours = {row["name"]: row["setup"] for row in rows if row["who"] == OURS}
    sizes = "train/nvlink/ep2/t96/h32/i24/e24/k3/bf16"
    assert list(of_ours) == [f"{sizes}/forward", f"{sizes}/v2/forward"]
    assert [each["max_vio"] for each in of_ours.values()] == [0, 2]
    assert [each["fullest_rank"] for each in of_ours.values()] == [1.0, pytest.approx(200 / 150)]
    assert captured.get().count("MaxVio ") == 2
    with pytest.raises(tl.InvalidArgument, match="max_vio is 7, expected less than 7"):
        train.run_train(setup.Run(console, 2, "cpu", ["bench"]), shape, options, [0.0, 7.0])


def test_numbers_by_hand() -> None:
    """The slowest rank counts; one rank with all tokens is divided by the ranks; backward is twice the arithmetic."""
    shape = TrainShape(65536, 4096, 1536, 64, 8)
    report = TrainReport(shape, OPTIONS, [made_up(0), made_up(1)])
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
    kept = shown(report.saved_table())
    assert re.search(r"total of the rank with most +1,025 *\n.*H \+ 2I\) +bf16 +3,758,096,384", kept)
    assert re.search(r"big +4 x 4 +bfloat16 +1,001", kept)
    assert re.search(r"routing +2 tensors +20", kept), "tensors of one name are shown together"
    assert re.search(r"smaller ones +1 tensor +4", kept)
    assert [row.num_bytes for row in report.saved] == [1001, 12, 8, 4]
    assert [row.name.rpartition("/")[2] for row in report.saved] == ["big", "routing", "routing 2", "small"]
    assert report.passed


@pytest.mark.parametrize(("off", "said"), [(9e-4, "agree"), (2e-3, "DO NOT"), (float("nan"), "DO NOT")])
def test_a_rival_that_computes_something_else_is_told(off: float, said: str) -> None:
    """The limit is twice that of one layer, 2^-5; squares here, of two ranks."""
    (note,) = TrainReport(SHAPE, OPTIONS, [made_up(0, off), made_up(1, off)]).notes
    assert said in note
    assert "(dx, relative)" in note


def test_tables_fit() -> None:
    """120 columns are enough for the largest numbers that one would wait for."""
    times = Measured({what: [123_456_789.0] * 3 for what in PASSES})
    measured = [replace(made_up(0), layers=dict.fromkeys((OURS, "nccl", LOCAL, ONE), times))] * 8
    report = TrainReport(TrainShape(131072, 7168, 2048, 256, 8), OPTIONS, measured)
    tables = (report.times_table([OURS, "nccl", LOCAL, ONE]), report.exposed_table(), report.check_table())
    text = shown(*tables)
    assert "…" not in text
    assert text.count("1.235e+05") == 24 + 2 + 2
    narrow = shown(*tables, width=70)
    assert "…" not in narrow
    assert narrow.count("1.235e+05") == 24 + 2 + 2, "numbers stay whole in a narrow terminal"
    assert max(map(len, narrow.splitlines())) <= 70
    assert all(word in text for word in ("this layer", "nccl rival", "local", "one rank, all tokens", "scaling"))


def test_what_all_of_it_takes_on_one_rank() -> None:
    """More than what is kept for backward, and weights with their gradients, but within a small factor of it: 131072
    tokens of the usual layer fit one GPU of 141 GB."""
    shape = TrainShape(131072, 4096, 1536, 128, 8)
    weights = 2 * 128 * 3 * 4096 * 1536 * 2
    least = shape.kept_bytes(131072, torch.bfloat16) + weights
    assert 2 * least < train.bytes_on_one(shape, torch.bfloat16) < 5 * least
    assert train.bytes_on_one(shape, torch.bfloat16) < 110e9
    assert train.free_bytes(torch.device("cpu")) > 1e6
