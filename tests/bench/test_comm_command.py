"""``tokenloom bench comm`` as a command: its rows, its files, its chart, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
from rich.table import Table
from typer.testing import CliRunner

from tests.bench.fake_deep_ep import SHAPE
from tests.cli.borrowed import borrowed
from tokenloom.bench import comm, legends, setup
from tokenloom.bench.comm_work import OPERATIONS, CallSeries, Traffic, label
from tokenloom.bench.harness import Measured
from tokenloom.bench.workload import CallSizes
from tokenloom.cli import app
from tokenloom.runtime.processes import RankPool

NAME = "dispatch/nvlink/ep2/t40/h256/k2/bf16/token/events"
LABEL = "dispatch/nvlink/bf16/token/events"
SETUP = {"layout": "token", **asdict(SHAPE)}
MOVED = Traffic(physical_bytes=60_000, value_bytes=34_700, logical_bytes=90_000)


def row_of(times: list[list[float]], on_links: bool = True, **parts: float) -> comm.Row:
    """A row of times [W][iterations], with parts that took as long in all samples of all ranks."""
    samples = [Measured({"call": rank} | {part: [us] * len(rank) for part, us in parts.items()}) for rank in times]
    return comm.make_row(NAME, samples, MOVED, 16, SETUP, on_links=on_links)


def test_times_become_a_row() -> None:
    """By hand: the slowest rank of each sample counts, and percentiles are values that were measured."""
    row = row_of([[10.0, 50.0, 10.0, 10.0], [20.0, 20.0, 40.0, 30.0]])  # slowest: 20, 50, 40, 30
    assert (row.name, row.num_sms) == (NAME, 16)
    assert (row.p50_us, row.p99_us, row.slowest_rank) == (30.0, 50.0, 1)
    assert row.floor_us == pytest.approx(34.7e3 / 347e9 * 1e6)
    assert row.physical_gbytes_per_s == pytest.approx(60e3 / 30e-6 / 1e9)
    assert row.logical_gbytes_per_s == pytest.approx(90e3 / 30e-6 / 1e9)
    assert row.parts_us == {}
    moved = {"physical_bytes": 60_000, "value_bytes": 34_700, "logical_bytes": 90_000}
    assert row.setup == {**SETUP, **moved}
    assert row_of([[10.0]], on_links=False).floor_us is None, "CPUs have no links"


def test_parts_become_numbers() -> None:
    """Parts have medians of the slowest rank by themselves. What of a call is exposed is what its halves add to the
    GEMM between them; bytes per second of both together would mean nothing."""
    samples = [
        Measured({"call": [130.0], "work": [100.0], "one_piece": [150.0]}),
        Measured({"call": [120.0], "work": [104.0], "one_piece": [140.0]}),
    ]
    row = comm.make_row("a name", samples, MOVED, 16, {}, on_links=True)
    assert row.parts_us == {"work": 104.0, "one_piece": 150.0, "exposed": 26.0}
    assert (row.physical_gbytes_per_s, row.logical_gbytes_per_s) == (None, None)
    eager = row_of([[70.0]], host_dispatch=9.0, host_combine=8.0)
    assert eager.parts_us == {"host_dispatch": 9.0, "host_combine": 8.0}
    assert eager.physical_gbytes_per_s is not None


def shown(table: Table) -> list[list[str]]:
    """The cells of a table, headers first."""
    cells = [list(column.cells) for column in table.columns]
    return [[str(column.header) for column in table.columns], *map(list, zip(*cells, strict=True))]


def test_every_row_shows_its_floor_and_its_sms() -> None:
    """A table for each kind of row there is, by hand: name, SMs and floor come first in all of them. The title says
    the sizes, and columns without a value are left out."""
    graph = row_of([[150.0]])
    eager = row_of([[170.0]], host_dispatch=9.0, host_combine=8.0)
    halves = row_of([[130.0]], work=100.0, one_piece=160.0)
    calls, pairs, split = map(shown, comm.tables([halves, graph, eager]))
    assert calls[1] == [LABEL, "16", "0.1", "150.0", "1500.00", "150.0", "0.4", "0.6"]
    assert pairs[1] == [LABEL, "16", "0.1", "170.0", "170.0", "9.0", "8.0"]
    assert split[1] == [LABEL, "16", "0.1", "130.0", "100.0", "30.0", "160.0"]
    assert {tuple(each[0][1:3]) for each in (calls, pairs, split)} == {("SMs", "floor\nµs")}
    on_cpus = replace(row_of([[150.0]], on_links=False), num_sms=None)
    (table,) = comm.tables([on_cpus])
    assert table.title == "40 tokens a rank, hidden 256, top-2 of 8 experts"
    assert shown(table)[0] == ["operation", "p50 µs", "p99 µs", "physical\nGB/s", "logical\nGB/s"]
    both = shown(comm.tables([on_cpus, graph])[0])
    assert both[1][1:3] == ["-", "-"], "another row has a value there"
    other = replace(graph, setup=graph.setup | {"num_tokens": 8})
    assert [each.title for each in comm.tables([graph, other])] == [
        f"{tokens} tokens a rank, hidden 256, top-2 of 8 experts" for tokens in (40, 8)
    ]


def test_bytes_that_nobody_has_counted() -> None:
    """Sums per node are fewer rows than sums per rank: no rate of theirs is made up, and no floor."""
    samples = [Measured({"call": [10.0]})]
    row = comm.make_row(NAME, samples, MOVED, 16, SETUP, on_links=True, counted=False)
    assert (row.floor_us, row.physical_gbytes_per_s) == (None, None)
    assert (row.setup["physical_bytes"], row.setup["value_bytes"], row.setup["logical_bytes"]) == (None, None, 90_000)
    (table,) = map(shown, comm.tables([row]))
    assert table[0] == ["operation", "SMs", "p50 µs", "p99 µs", "logical\nGB/s"]


ARGUMENTS = ["bench", "comm", "--device", "cpu", "--ranks", "2", "--iterations", "4", "--case", "small"]


def assert_rows(file: Path, shown: str, tokens: list[int], command: list[str], kind: str = "calls") -> None:
    """Every operation has its row in the table and in the file, which says where they come from."""
    found = json.loads(file.read_text())
    ends = {"calls": ("wall", "eager"), "halves": ("wall/halves",)}[kind]
    assert [row["name"] for row in found["rows"]] == [
        f"{each.name}/collective/ep2/t{num_tokens}/h256/k2/{each.payload}/{each.layout}/{end}"
        for num_tokens in tokens
        for each in OPERATIONS
        for end in ends
        if end != "eager" or each.name == "dispatch+combine"
    ]
    assert {"commit", "tokenloom", "torch", "nccl", "driver", "device_name"} <= found["setup"].keys()
    assert (found["setup"]["num_ranks"], found["setup"]["device"]) == (2, "cpu")
    assert found["setup"]["command"] == " ".join(["tokenloom", *command])
    assert [note.split()[0] for note in found["notes"]] == ["nvlink", "network", "deep_ep"]
    assert all(note in " ".join(shown.split()) for note in found["notes"])
    assert re.search(r"2 ranks on CPU, \d+ cores? \(.*\), over gloo; 4 samples of each row", shown)
    assert not {"SMs", "floor"} & set(shown.split()), "columns without a value"
    for row in found["rows"]:
        assert label(row["name"]) in shown
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["slowest_rank"] in (0, 1)
        assert (row["num_sms"], row["floor_us"]) == (None, None)
        assert {"routing_seed", "sizes", "calls_per_sample", "rounds", "scale_layout"} <= row["setup"].keys()
        assert (row["setup"]["hidden"], row["setup"]["iterations"]) == (256, 4)
        assert row["setup"]["beside_us"] == (20.0 if kind == "halves" else None)
        if kind == "halves":
            assert row["parts_us"].keys() == {"work", "one_piece", "exposed"}
        else:
            eager = row["setup"]["timing"] == "eager"
            assert row["parts_us"].keys() == ({"host_dispatch", "host_combine"} if eager else set())
            assert row["setup"]["calls_per_sample"] == (2 if eager else 1)
            assert 0 < row["physical_gbytes_per_s"] < row["logical_gbytes_per_s"]


def run_command(pools: Callable[[str], RankPool], monkeypatch: pytest.MonkeyPatch, command: list[str]) -> str:
    """What the command prints. Its ranks are there already."""
    monkeypatch.setattr(sys, "argv", ["tokenloom", *command])
    with borrowed(setup, pools):
        done = CliRunner().invoke(app.app, command)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
def test_command(pools: Callable[[str], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks and other sizes than the case's, with all of its files."""
    json_file, png_file = tmp_path / "rows.json", tmp_path / "chart.png"
    command = [*ARGUMENTS, "--tokens", "16,24", "--json", str(json_file), "--plot", str(png_file)]
    shown = run_command(pools, monkeypatch, command)
    assert png_file.read_bytes().startswith(b"\x89PNG")
    assert_rows(json_file, shown, [16, 24], command)
    assert "in a loop of 2 pairs" in " ".join(shown.split())
    assert "Halves:" not in shown, "no legend of a table that is not there"


def test_command_on_nodes(pools: Callable[[str], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks as two nodes: both backends that run there, and why the one for one node is not measured."""
    json_file = tmp_path / "rows.json"
    command = ["bench", "comm", "--device", "cpu", "--ranks", "4", "--ranks-per-node", "2", "--iterations", "1"]
    command += ["--case", "small", "--tokens", "4", "--timing", "wall", "--only", "bf16/expert"]
    shown = run_command(pools, monkeypatch, [*command, "--json", str(json_file)])
    names = {row["name"].split("/")[1] for row in json.loads(json_file.read_text())["rows"]}
    assert names == {"network", "collective"}
    assert "nvlink is not measured: it runs on one node, the ranks are on 2" in " ".join(shown.split())


@pytest.mark.slow
def test_command_of_halves(pools: Callable[[str], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves instead of calls, around a GEMM of the length given, with what of them is exposed."""
    json_file = tmp_path / "rows.json"
    command = [*ARGUMENTS, "--tokens", "16", "--halves", "--beside-us", "20", "--json", str(json_file)]
    shown = run_command(pools, monkeypatch, command)
    assert_rows(json_file, shown, [16], command, "halves")
    assert "Halves:" in shown


@pytest.mark.slow
def test_a_chart_shows_every_row(tmp_path: Path) -> None:
    """A chart for each shape, a bar of the right length for each row, and a title that says where it was measured."""
    figures = pytest.importorskip("matplotlib.figure")
    shapes = [SHAPE, CallSizes(8, 256, 2, 8)]
    who = [("nvlink", "events", 8), ("nvlink", "graph", 8), ("collective", "events", None)]
    made = []
    for shape in shapes:
        for operation in OPERATIONS[:3]:
            for backend, timing, sms in who[len(made) % 2 :]:  # not everybody has every operation
                where = asdict(shape) | {"payload": operation.payload, "layout": operation.layout}
                where |= {"operation": operation.name, "backend": backend, "timing": timing}
                row = CallSeries(shape, operation, backend, timing).name(2)
                samples = [Measured({"call": [10.0 + len(made)]})]
                made.append(comm.make_row(row, samples, MOVED, sms, where, on_links=True))
    samples = [Measured({"call": [99.0], "work": [50.0], "one_piece": [120.0]})]
    made.append(comm.make_row(f"{row}/halves", samples, MOVED, sms, where, on_links=True))
    about = setup.run_setup("cpu", 2, ["bench", "comm"]) | {"device_name": "a machine", "commit": "abc"}
    drawn = []
    with mock.patch.object(figures.Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure)):
        comm.write_chart(tmp_path / "chart.png", about, made)
    (figure,) = drawn
    assert len(figure.axes) == len(shapes)
    for axes, shape in zip(figure.axes, shapes, strict=True):
        expected = [row.p50_us for row in made if row.setup["num_tokens"] == shape.num_tokens]
        assert sorted(bar.get_width() for bar in axes.patches) == expected
        assert [tick.get_text() for tick in axes.get_yticklabels()] == list(map(str, OPERATIONS[:3]))
        assert f"{shape.num_tokens} tokens a rank" in axes.get_title()
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert sorted(labels) == [
        "collective, events",
        "collective, events, halves around a GEMM",
        "nvlink, 8 SMs, events",
        "nvlink, 8 SMs, graph",
    ]
    assert all(word in figure.get_suptitle() for word in ("2 ranks on a machine", "torch", "abc"))


def test_command_of_skewed_routings(
    pools: Callable[[str], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two routings, each without spare slots, with replicas and with splits, side by side. Rows say how uneven they
    are, and how full the fullest rank is, which replicas make emptier, and splits even. The chart has a curve for
    each, over MaxVio."""
    figures = pytest.importorskip("matplotlib.figure")
    json_file, png_file = tmp_path / "rows.json", tmp_path / "chart.png"
    command = ["bench", "comm", "--device", "cpu", "--ranks", "2", "--iterations", "1", "--case", "small"]
    command += ["--max-vio", "0,2", "--spare-slots", "2", "--timing", "wall", "--only", "bf16/slots"]
    drawn = []
    with mock.patch.object(figures.Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure)):
        shown = run_command(pools, monkeypatch, [*command, "--json", str(json_file), "--plot", str(png_file)])
    rows = {row["name"]: row["setup"] for row in json.loads(json_file.read_text())["rows"]}
    sizes = "collective/ep2/t64/h256/k2/bf16"
    for what in ("dispatch", "combine"):
        name = f"{what}/{sizes}/slots/wall"
        even, skewed, replicated = rows[name], rows[f"{name}/v2"], rows[f"{name}/v2/spare2"]
        assert (even["max_vio"], skewed["max_vio"], replicated["max_vio"]) == (0, 2, 2)
        batch = rows[f"{name}/v2/spare2/batch"]
        assert (skewed["spare_slots"], replicated["spare_slots"], batch["spare_slots"]) == (None, 2, 2)
        assert (skewed["balance"], replicated["balance"], batch["balance"]) == (None, None, "batch")
        assert skewed["fullest_rank"] > 1.1 > replicated["fullest_rank"] >= batch["fullest_rank"] == 1
        assert f"{name}/spare2" in rows
        assert f"{label(name)}/v2/spare2 " in shown
        assert f"{label(name)}/v2/spare2/batch" in shown
    assert len(rows) == 12
    said = " ".join(shown.split())
    assert "Fullest rank: routes of the rank with most" in said
    assert legends.COMM_BATCH in said
    (figure,) = drawn
    titles = [axes.get_title().partition("\n")[0] for axes in figure.axes]
    assert titles == ["dispatch bf16 slots", "combine bf16 slots"]
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == [
            "collective, wall",
            "collective, wall, 2 spare slots a rank",
            "collective, wall, 2 spare slots a rank, per batch",
        ]
        assert all(list(line.get_xdata()) == [0.0, 2.0] for line in axes.lines)
