"""What ``tokenloom bench mega`` makes of times, what its command takes, and that it runs where there are GPUs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.bench.test_mega_measure import SHAPE, STAGES, fake_deep_gemm
from tests.conftest import NUM_GPUS, WHY_NO_HOPPER
from tokenloom.bench import clock, mega, mega_trace, mega_work, setup
from tokenloom.bench.harness import Measured
from tokenloom.bench.mega import MegaFound, MegaRow
from tokenloom.bench.mega_work import MegaShape
from tokenloom.bench.setup import Run
from tokenloom.bench.tables import Fitted
from tokenloom.cli import app
from tokenloom.cli.terminal import FAILED
from tokenloom.inference.trace import MegaTimes
from tokenloom.kernels.common import MARKS
from tokenloom.kernels.gemm.launch import TRACE_ROLES
from tokenloom.runtime.processes import RankPool

EXPERT_BYTES = 3 * 256 * 128
NUM_TOKENS = [1, 200]
"""Numbers of tokens of runs on GPUs. Blocks that send keep one token; of 200 another kernel packs them beforehand."""


# -- the work -------------------------------------------------------------------------------------------------------


def test_routing_is_masked_and_skewed() -> None:
    """A token gets different experts; the favourite gets most tokens, and is the same on all ranks."""
    even = SHAPE.topk_ids(0, 1000)
    assert even.dtype == torch.int32
    assert (even[:, 0] != even[:, 1]).all()
    assert not even.equal(SHAPE.topk_ids(1, 1000))
    masked = MegaShape(256, 128, 4, 2, masked_ratio=0.25).topk_ids(0, 1000)
    assert 0.2 < (masked < 0).float().mean() < 0.3
    skewed = [MegaShape(256, 128, 64, 2, max_vio=20.0).topk_ids(rank, 1000).flatten().bincount() for rank in (0, 1)]
    assert skewed[0].argmax() == skewed[1].argmax()
    assert 20 < skewed[0].max() / (1000 * 2 / 64) < 22
    assert SHAPE.topk_ids(0, 0).shape == (0, 2)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Two ranks with two experts each: token 0 of rank 0 goes to both, everything else stays or is unused."""
    ids = [torch.tensor([[0, 2], [1, 1]]), torch.tensor([[3, -1], [-1, -1]])]
    monkeypatch.setattr(MegaShape, "topk_ids", lambda self, rank, num_tokens, draw=0: ids[rank])
    return ids


def test_work_by_hand(two_ranks: list[torch.Tensor]) -> None:
    """Rank 0 has three routes on its two experts, rank 1 two on its two; rank 0 sends a row, rank 1 a result."""
    found = mega_work.work(SHAPE, 2, 2)
    assert found.flops == 5 / 2 * 2 * EXPERT_BYTES
    assert found.busiest_flops == 3 * 2 * EXPERT_BYTES
    assert found.weight_bytes == 2 * EXPERT_BYTES
    row_bytes = 256 + 256 // 128 * 4 + 4 + 4  # values, scales, home and weight
    plan = SHAPE.call_sizes(2).plan(2)
    assert mega_work.bytes_out(plan, 0, two_ranks) == row_bytes
    assert mega_work.bytes_out(plan, 1, two_ranks) == found.sent_bytes == 256 * 2
    both = [torch.tensor([[2, 3], [1, -1]]), torch.tensor([[3, 2], [-1, -1]])]
    assert mega_work.bytes_out(plan, 0, both) == 2 * row_bytes, "a row for each route, also of one token"


def test_work_of_shared_experts(two_ranks: list[torch.Tensor]) -> None:
    """Every rank reads their weights and computes all of its tokens with them; nothing of that crosses a link."""
    found = mega_work.work(MegaShape(256, 128, 4, 2, num_shared_experts=3), 2, 2)
    assert found.flops == (5 / 2 + 3 * 2) * 2 * EXPERT_BYTES
    assert found.busiest_flops == (3 + 3 * 2) * 2 * EXPERT_BYTES
    assert found.weight_bytes == (2 + 3) * EXPERT_BYTES
    assert found.sent_bytes == 256 * 2


@pytest.mark.parametrize(
    ("sizes", "floor_us"),
    [
        ((1, 1, 4_370_000, 1), 1),  # HBM
        ((1, 2_776_000_000, 1, 1), 2),  # arithmetic
        ((1, 1, 1, 1_041_000), 3),  # links
    ],
)
def test_the_floor_is_what_takes_longest(sizes: tuple[int, int, int, int], floor_us: float) -> None:
    """A microsecond of HBM, two of arithmetic or three of links, each beside next to nothing of the others."""
    assert mega_work.Work(*sizes).floor_us == pytest.approx(floor_us)


# -- rows -----------------------------------------------------------------------------------------------------------


def made_up(rank: int, num_tokens: int = 1, rival: bool = True, graph: bool = True) -> MegaFound:
    """Samples of three replays that no two ranks, layers or numbers of tokens share."""
    base = 100.0 * num_tokens + 10 * rank
    stages = {stage: [base + 3 * i, base + 1 + 3 * i, base + 2 + 3 * i] for i, stage in enumerate(STAGES)}
    by_graph, events = [base, base + 4, base + 1], [base + 20, base + 24, base + 21]
    ours = Measured({"graph": by_graph, "events": events} | stages)
    if not rival:
        return MegaFound({mega.OURS: ours})
    samples = {"graph": [2 * us for us in by_graph]} if graph else {}
    samples["events"] = [3 * us for us in events]
    theirs = Measured(samples, "" if graph else "a call waits for the host", 0.0005 + rank * 1e-4)
    return MegaFound({mega.OURS: ours, "deep_gemm": theirs})


def with_replicas(found: MegaFound) -> MegaFound:
    """The same, and ours with replicas, which takes half as long."""
    samples = {what: [us / 2 for us in its] for what, its in found.layers[mega.OURS].samples.items()}
    return MegaFound({**found.layers, mega.SPARE: Measured(samples, difference=1e-6)})


def test_numbers_of_a_row(two_ranks: list[torch.Tensor]) -> None:
    """By hand: the slowest rank of each sample counts, by graph, by events and in each stage."""
    by_rank = [
        {"graph": [10.0, 14.0, 11.0], "events": [20.0, 20.0, 20.0], "dispatch": [1.0, 2.0, 3.0]},
        {"graph": [12.0, 13.0, 15.0], "events": [30.0, 10.0, 40.0], "dispatch": [2.0, 2.0, 2.0]},
    ]
    found = [MegaFound({mega.OURS: Measured(samples)}) for samples in by_rank]
    (row,) = mega.make_rows(SHAPE, 2, 2, 3, False, found)
    assert (row.name, row.who) == ("mega/ep2/t2/h256/i128/e4/k2/graph", "tokenloom")
    assert (row.p50_us, row.p99_us, row.slowest_rank) == (14.0, 15.0, 1)
    assert (row.events_us, row.stages_us) == (30.0, {"dispatch": 2.0})
    assert row.hbm_gbytes_per_s == pytest.approx(2 * EXPERT_BYTES / 14.0 / 1e3)
    assert row.nvlink_gbytes_per_s == pytest.approx(256 * 2 / 14.0 / 1e3)
    assert row.tflops == pytest.approx(5 / 2 * 2 * EXPERT_BYTES / 14.0 / 1e6)
    assert row.floor_us == pytest.approx(2 * EXPERT_BYTES / mega_work.HBM_GBYTES_PER_S / 1e3)
    assert row.times_floor == pytest.approx(14.0 / row.floor_us)
    assert (row.cold, row.times_ours, row.difference) == (False, None, None)
    assert (row.setup["calls_per_sample"], row.setup["num_tokens"]) == (clock.GRAPH_CALLS, 2)


def test_another_layer_has_a_row_of_its_own() -> None:
    """Named after it, with the ratio of the two and the largest difference of the outputs."""
    ours, theirs = mega.make_rows(SHAPE, 2, 1, 3, True, [made_up(0), made_up(1)])
    assert ours.name == "mega/ep2/t1/h256/i128/e4/k2/graph/cold"
    assert theirs.name == "mega/deep_gemm/ep2/t1/h256/i128/e4/k2/graph/cold"
    assert theirs.times_ours == theirs.p50_us / ours.p50_us == 2.0
    assert theirs.difference == pytest.approx(0.0006)
    assert (ours.times_ours, ours.difference, theirs.stages_us) == (None, None, {})
    assert theirs.floor_us == ours.floor_us
    assert theirs.events_us == 3 * ours.events_us
    assert ours.cold
    assert theirs.cold
    assert ours.setup["calls_per_sample"] == 1
    assert (ours.setup["x"], theirs.setup["x"][:13]) == ("bfloat16", "float8_e4m3fn")


def test_without_a_graph_events_are_compared() -> None:
    """A rival that cannot be captured: its row says so, and its ratio is one of like and like."""
    ours, theirs = mega.make_rows(SHAPE, 2, 1, 3, False, [made_up(0, graph=False), made_up(1, graph=False)])
    assert ours.name.endswith("/graph")
    assert theirs.name == "mega/deep_gemm/ep2/t1/h256/i128/e4/k2/events"
    assert theirs.p50_us == theirs.events_us == 3 * ours.events_us
    assert theirs.times_ours == 3.0
    assert theirs.setup["calls_per_sample"] == 1
    note, outputs = mega.notes([ours, theirs, ours, theirs])
    assert "deep_gemm: its calls could not be captured (a call waits for the host)" in note
    assert "0.0006" in outputs
    assert "deep_gemm, events" in shown([ours, theirs])


@pytest.mark.parametrize(("differences", "said"), [((0.001, 0.009), "agree"), ((0.001, 0.02), "DO NOT")])
def test_outputs_that_differ_are_told(differences: tuple[float, float], said: str) -> None:
    rows = [mega.make_rows(SHAPE, 1, 1, 3, False, [differing(difference)])[1] for difference in differences]
    (note,) = mega.notes(rows)
    assert said in note


def differing(difference: float, who: str = "deep_gemm") -> MegaFound:
    """Outputs that are so far apart."""
    made = made_up(0).layers
    return MegaFound({mega.OURS: made[mega.OURS], who: replace(made["deep_gemm"], difference=difference)})


def test_every_layer_has_a_limit_of_its_own() -> None:
    """The same layer in three calls is nearer than somebody else's."""
    for who, said in (("deep_gemm", "so they agree"), ("composed", "DO NOT AGREE")):
        (note,) = mega.notes(mega.make_rows(SHAPE, 1, 1, 3, False, [differing(0.005, who)]))
        assert said in note
        assert f"ours and {who}'s" in note


def test_not_a_number_is_the_largest_difference() -> None:
    """On any rank, first or last: a maximum that loses NaN would call broken outputs equal."""
    for differences in ((float("nan"), 0.0), (0.0, float("nan"))):
        by_rank = [differing(each) for each in differences]
        (note,) = mega.notes(mega.make_rows(SHAPE, 2, 1, 3, False, by_rank))
        assert "DO NOT AGREE" in note


def test_nothing_to_do_has_no_floor() -> None:
    """All routes unused: no ratio, no point of a floor, and a table all the same."""
    (row,) = mega.make_rows(MegaShape(256, 128, 4, 2, masked_ratio=1.0), 2, 8, 3, False, [made_up(0, rival=False)] * 2)
    assert (row.floor_us, row.times_floor, mega.floors([row])) == (0.0, None, [])
    assert mega.table([row]).row_count == 1


def shown(rows: list[MegaRow], width: int = 120) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(Fitted(mega.table(rows), keys=2 if len({row.who for row in rows}) > 1 else 1))
    return captured.get()


def test_the_table_has_everybody_and_fits() -> None:
    """All layers, the ratios, and every number in full on 120 columns, at the size of the slowest rows there are."""
    times = {what: [12345.0] * 3 for what in mega.CLOCKS}
    layers = {
        mega.OURS: Measured(times | {stage: [6789.0] * 3 for stage in STAGES}),
        "deep_gemm": Measured(times, difference=0.001),
        "composed": Measured({"events": times["events"]}, "why", 0.0),
    }
    by_rank = [MegaFound(layers)]
    rows = mega.make_rows(MegaShape(7168, 2048, 256, 8), 1, 8192, 3, False, by_rank)
    text = shown(rows)
    assert text.count("12,345") == 8, "composed has no steady time without a graph"
    assert text.count("6,789") == 4
    assert "…" not in text
    words = ("tokenloom", "deep_gemm", "composed, events", "ours", "NVLink", "floor", "1.00", *STAGES)
    assert all(word in text for word in words)
    narrow = shown(rows, 70)
    assert (narrow.count("12,345"), narrow.count("6,789"), "…" in narrow) == (8, 4, False)
    assert max(map(len, narrow.splitlines())) <= 70
    alone = shown(rows[:1])
    assert "ours" not in alone
    assert "tokenloom" not in alone


# -- files ----------------------------------------------------------------------------------------------------------


def made_up_times(start: int) -> MegaTimes:
    """Two SMs: a block packs, one sends, both GEMMs have tiles, of which one has not ended, and one block adds."""
    times = MegaTimes.allocate(2, torch.device("cpu"))
    times.pack[1] = torch.tensor([start, start + 1_000])
    for mark, at in (("begun", 500), ("counted", 700), ("heard", 1_700), ("placed", 1_900), ("sent", 6_000)):
        times.send[3, MARKS.index(mark)] = start + at
    times.gemm1[0, TRACE_ROLES.index("load"), 0] = torch.tensor([start + 2_000, start + 4_500])
    times.gemm1[1, TRACE_ROLES.index("multiply 0"), 1] = torch.tensor([start + 3_000, start + 3_250])
    times.gemm1[1, TRACE_ROLES.index("multiply 1"), 1, 0] = start + 9_000
    times.gemm2[1, TRACE_ROLES.index("store"), 2] = torch.tensor([start + 5_000, start + 5_500])
    times.gemm2[0, TRACE_ROLES.index("start"), 0] = torch.tensor([start + 4_000, start + 4_400])
    for mark, at in (("begun", 5_600), ("sent", 5_800), ("heard", 6_400)):
        times.barrier[0, MARKS.index(mark)] = start + at
    times.sum[0] = torch.tensor([start + 7_000, start + 7_100])
    return times


def test_a_trace_is_what_was_measured(tmp_path: Path) -> None:
    """A process for each rank, whose first block begins at 0; kernels as wholes, and all that their blocks did."""
    nothing = MegaTimes.allocate(2, torch.device("cpu"))
    file = tmp_path / "trace.json"
    mega_trace.write_trace(
        file, {"commit": "abc"}, "mega/a/row", 40, [made_up_times(7_000_000), made_up_times(10), nothing]
    )
    found = json.loads(file.read_text())
    threads = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    complete = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert 0 not in threads
    assert len(threads) == 2 * (6 + 8), "every thread has a number of its own"
    for rank in (0, 1):
        told = [(threads[e["tid"]], e["name"], e["ts"], e["dur"]) for e in complete if e["pid"] == rank]
        assert told == [
            ("kernel pack", "pack", 0.0, 1.0),
            ("kernel send", "send", 0.5, 5.5),
            ("kernel GEMM1", "GEMM1", 2.0, 2.5),
            ("kernel GEMM2", "GEMM2", 4.0, 1.5),
            ("kernel barrier", "barrier", 5.6, 0.8),
            ("kernel sum", "sum", 7.0, 0.1),
            ("pack, block   1", "pack", 0.0, 1.0),
            ("send, block   3", "count routes", 0.5, 0.2),
            ("send, block   3", "wait for all ranks' counts", 0.7, 1.0),
            ("send, block   3", "order routes", 1.7, 0.2),
            ("send, block   3", "send rows", 1.9, 4.1),
            ("GEMM1, block   0, load", "tile 0", 2.0, 2.5),
            ("GEMM1, block   1, multiply 0", "tile 1", 3.0, 0.25),
            ("GEMM2, block   0, start", "start", 4.0, 0.4),
            ("GEMM2, block   1, store", "tile 2", 5.0, 0.5),
            ("barrier, block   0", "tell all ranks", 5.6, 0.2),
            ("barrier, block   0", "wait for all ranks", 5.8, 0.6),
            ("sum, block   0", "sum", 7.0, 0.1),
        ]
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    about = found["otherData"]
    assert (about["row"], about["num_tokens"], about["commit"]) == ("mega/a/row", 40, "abc")
    assert "its own first block" in about["starts"]


class FakePool:
    """Ranks that measured what is made up."""

    def __init__(self, num_ranks: int, device: str) -> None:
        assert device == "cuda"
        self.num_ranks = num_ranks

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, function: Any, shape: Any, tokens: list[int], *rest: Any, **options: Any) -> list[list[MegaFound]]:
        assert function is mega.measure_on_rank
        against, traced, spare_slots = rest[-3:]
        assert against in ([], ["deep_gemm"])
        found = [
            [made_up(rank, each, rival=bool(against)) for _ in shape for each in tokens]
            for rank in range(self.num_ranks)
        ]
        if spare_slots is not None:
            found = [[with_replicas(each) for each in its] for its in found]
        if traced:
            for each in found:
                each[-1] = replace(each[-1], traced=made_up_times(1))
        return found


def fake_setup(device: str, num_ranks: int, command: Any) -> dict[str, Any]:
    known = {"commit": "abc", "tokenloom": "1", "torch": "2", "nccl": None, "driver": None, "device_name": "a machine"}
    return known | {"device": device, "num_ranks": num_ranks, "command": " ".join(command)}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Charts of runs on fake ranks, instead of files."""
    figures, found = pytest.importorskip("matplotlib.figure"), list[Any]()
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *args, **kw: found.append(figure))
    monkeypatch.setattr(setup, "RankPool", FakePool)
    monkeypatch.setattr(setup, "run_setup", fake_setup)
    return found


def test_skewed_routings_side_by_side(tmp_path: Path, drawn: list[Any]) -> None:
    """Each number of tokens with each MaxVio, in names, table and setup, with the load of the fullest rank. The chart
    has a curve over MaxVio for each number of tokens."""
    shapes = [MegaShape(256, 128, 8, 2, max_vio=each) for each in (0.0, 2.5)]
    json_file, console = tmp_path / "rows.json", Console(width=120, highlight=False)
    with console.capture() as captured:
        run = Run(console, 2, "cuda", ["bench", "mega"], json_file, tmp_path / "chart.png")
        mega.run_mega(run, shapes, [8, 16], 3)
    rows = json.loads(json_file.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        f"mega/ep2/t{tokens}/h256/i128/e8/k2{skew}/graph" for skew in ("", "/v2.5") for tokens in (8, 16)
    ]
    assert [row["setup"]["max_vio"] for row in rows] == [0, 0, 2.5, 2.5]
    full = [row["setup"]["fullest_rank"] for row in rows]
    assert full == [mega_work.work(shape, 2, each).fullest_rank for shape in shapes for each in (8, 16)]
    assert min(full) > 1
    text = captured.get()
    assert f"2.5 {full[3]:.2f}" in " ".join(text.split())
    assert "MaxVio of the routing" in " ".join(text.split())
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == ["8 tokens a rank", "16 tokens a rank"]
    for axes in figure.axes:
        (line,) = axes.lines
        assert list(line.get_xdata()) == [0.0, 2.5]


def test_replicas_side_by_side(tmp_path: Path, drawn: list[Any]) -> None:
    """Beside each row of ours one with replicas, named as in the other benches, with stages, its ratio to ours, and
    how full the fullest rank is then. Charts have a curve of both, and one floor."""
    shapes = [MegaShape(256, 128, 8, 2, max_vio=each) for each in (0.0, 2.5)]
    file, console = tmp_path / "rows.json", Console(width=120, highlight=False)
    run = Run(console, 2, "cuda", ["bench", "mega"], file, tmp_path / "chart.png")
    with console.capture() as captured:
        mega.run_mega(run, shapes, [400], 3, spare_slots=2)
    rows = json.loads(file.read_text())["rows"]
    skews = ("", "/spare2", "/v2.5", "/v2.5/spare2")
    assert [row["name"] for row in rows] == [f"mega/ep2/t400/h256/i128/e8/k2{each}/graph" for each in skews]
    _, _, skewed, replicated = rows
    assert [row["setup"]["spare_slots"] for row in rows] == [None, 2, None, 2]
    assert skewed["setup"]["fullest_rank"] > 1.1 > replicated["setup"]["fullest_rank"] >= 1
    assert replicated["floor_us"] != skewed["floor_us"]
    assert (skewed["times_ours"], replicated["times_ours"]) == (None, 0.5)
    assert list(replicated["stages_us"]) == STAGES
    text = " ".join(captured.get().split())
    assert f"2.5 {replicated['setup']['fullest_rank']:.2f} spare2" in text
    assert "spare: with replicas of hot experts" in text
    assert "of ours and spare's is 1e-06 at most" in text
    (axes,) = drawn[0].axes
    curves = ["tokenloom, graph", "tokenloom, graph, 2 spare slots a rank"]
    assert [line.get_label() for line in axes.lines] == curves
    assert list(mega.curves([MegaRow(**each) for each in rows])) == curves
    assert mega.floors([MegaRow(**each) for each in rows[:2]]) == [(400, rows[0]["floor_us"])]


def test_fullest_rank_by_hand(two_ranks: list[torch.Tensor]) -> None:
    """Three routes of five are on rank 0, which is 1.2 times the mean; without routes all ranks are as full."""
    assert mega_work.work(SHAPE, 2, 2).fullest_rank == pytest.approx(1.2)
    two_ranks[:] = [torch.full((2, 2), -1)] * 2
    assert mega_work.work(SHAPE, 2, 2).fullest_rank == 1


@pytest.mark.parametrize("against", [["deep_gemm"], []])
def test_every_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, against: list[str]) -> None:
    """Rows with everything, curves of everybody and the floor, the stages of the last number of tokens; from made-up
    samples of two ranks."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda figure, *args, **kw: (drawn.append(figure), save(figure, *args, **kw))
    )
    monkeypatch.setattr(setup, "RankPool", FakePool)
    monkeypatch.setattr(setup, "run_setup", fake_setup)
    json_file, plot_file, trace_file = (tmp_path / name for name in ("rows.json", "chart.png", "trace.json"))
    console = Console(width=120, highlight=False)
    with fake_deep_gemm(), console.capture() as captured:
        run = Run(console, 2, "cuda", ["bench", "mega"], json_file, plot_file)
        mega.run_mega(run, [SHAPE], [16, 8], 3, cold=True, against=against, trace_file=trace_file)
    text = " ".join(captured.get().split())
    found = json.loads(json_file.read_text())
    rows = found["rows"]
    assert [row["who"] for row in rows] == (["tokenloom", "deep_gemm"] if against else ["tokenloom"]) * 2
    assert set(rows[0]) == set(MegaRow.__dataclass_fields__)
    assert found["setup"].get("deep_gemm") == ("9.9" if against else None)
    assert all(note in text for note in found["notes"])
    assert len(found["notes"]) == len(against)
    assert ("a layer's time over ours" in text) == ("takes x in FP8" in text) == bool(against)
    assert "L2 was overwritten before each sample" in text
    assert "graph of one call;" in text

    assert plot_file.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["tokenloom, graph", *(["deep_gemm, graph"] if against else []), "floor"]
    own = sorted((row["setup"]["num_tokens"], row["p50_us"]) for row in rows if row["who"] == "tokenloom")
    assert list(zip(*lines["tokenloom, graph"].get_data(), strict=True)) == own
    floors = sorted({(row["setup"]["num_tokens"], row["floor_us"]) for row in rows})
    assert list(zip(*lines["floor"].get_data(), strict=True)) == floors
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["8", "16"]

    written = json.loads(trace_file.read_text())
    complete = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1}
    assert written["otherData"]["num_tokens"] == 8
    assert written["otherData"]["row"] == "mega/ep2/t8/h256/i128/e4/k2/graph/cold"


# -- the command ----------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    with mock.patch.object(RankPool, "start", side_effect=AssertionError("ranks were started")):
        return CliRunner().invoke(app.app, ["bench", "mega", *arguments])


def test_a_rival_that_is_missing_starts_nothing() -> None:
    """With and without GPUs: exit code 1, one line, no traceback."""
    with mock.patch.dict(sys.modules, deep_gemm=None):
        done = invoke("--against", "deep_gemm")
    assert done.exit_code == FAILED
    assert isinstance(done.exception, SystemExit)
    assert "--against deep_gemm cannot import it" in done.output
    assert done.output.endswith("; install a build with the fused layer for SM90, such as sgl-deep-gemm\n")


@pytest.mark.skipif(NUM_GPUS > 0, reason="there are GPUs here")
def test_it_says_that_there_is_no_gpu() -> None:
    """And it does not blame options that nobody gave."""
    for arguments in ([], ["--ranks", "2"]):
        done = CliRunner().invoke(app.app, ["bench", "mega", *arguments])
        said = "bench mega needs a Hopper GPU, and there is none; bench train runs on CPUs too"
        assert (done.exit_code, done.stderr) == (FAILED, f"tokenloom: {said}\n")


# -- on GPUs --------------------------------------------------------------------------------------------------------


def run_tiny(tmp_path: Path, shape: MegaShape, **options: Any) -> tuple[dict[str, Any], str]:
    """The file of rows, and what was printed."""
    file = tmp_path / "rows.json"
    console = Console(width=120, highlight=False)
    with console.capture() as captured:
        mega.run_mega(Run(console, NUM_GPUS, "cuda", ["bench", "mega"], file), [shape], NUM_TOKENS, 3, **options)
    return json.loads(file.read_text()), captured.get()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER))
def test_it_runs(tmp_path: Path) -> None:
    found, _ = run_tiny(tmp_path, MegaShape(512, 256, 4 * NUM_GPUS, 2, masked_ratio=0.1, max_vio=0.5))
    assert [row["setup"]["num_tokens"] for row in found["rows"]] == NUM_TOKENS
    for row in found["rows"]:
        assert row["p50_us"] > 0
        assert list(row["stages_us"]) == STAGES
        assert all(us > 0 for us in row["stages_us"].values())


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER))
def test_it_runs_cold_and_writes_a_trace(tmp_path: Path) -> None:
    """With a shared expert, whose weights are behind those of the routed ones."""
    file = tmp_path / "trace.json"
    shape = MegaShape(512, 256, 4 * NUM_GPUS, 2, num_shared_experts=1)
    found, _ = run_tiny(tmp_path, shape, cold=True, trace_file=file)
    assert all(row["cold"] and row["name"].endswith("/k2/s1/graph/cold") for row in found["rows"])
    assert all(row["p50_us"] > 0 for row in found["rows"])
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    for name in ("pack", "send", "GEMM1", "GEMM2", "sum", "send rows", "tile 0"):
        assert {event["pid"] for event in events if event["name"] == name} == set(range(NUM_GPUS)), name
    assert all(0 <= event["ts"] < 1e6 and 0 <= event["dur"] < 1e6 for event in events)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER))
def test_it_runs_against_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own module with deep_gemm's names takes its place, in the ranks too, which inherit the path: everything but
    deep_gemm itself runs, and its outputs are the same bits. The host reads counts of the composed layer."""
    (tmp_path / "deep_gemm.py").write_text("from tokenloom.compat.deep_gemm import *\n__version__ = 'ours'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    shape = MegaShape(512, 256, 4 * NUM_GPUS, 2, masked_ratio=0.1)
    found, text = run_tiny(tmp_path, shape, against=["deep_gemm", "composed"])
    assert found["setup"]["deep_gemm"] == "ours"
    assert [row["who"] for row in found["rows"]] == ["tokenloom", "deep_gemm", "composed"] * 2
    for row in found["rows"][1::3]:
        assert row["setup"]["clock"] == "graph", row["setup"]["why_no_graph"]
        assert abs(row["difference"]) < 1e-9
    assert all(row["setup"]["clock"] == "events" for row in found["rows"][2::3])
    assert all(row["times_ours"] > 0 for row in (*found["rows"][1::3], *found["rows"][2::3]))
    assert " ".join(text.split()).count("so they agree") == 2
