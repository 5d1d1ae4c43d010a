"""tokenloom bench: what it measures, the bytes it counts, the numbers it makes of times, and how it tells them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.conftest import Ranks
from tokenloom.backends import registry
from tokenloom.bench import cases, comm, inputs, peers, plot, rows, series, setup, timing, traffic
from tokenloom.bench.cases import OPERATIONS, Operation, Shape
from tokenloom.bench.series import Contestant, Series
from tokenloom.cli import app
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext, RankPool

ROOT = Path(__file__).parents[2]
SHAPE = Shape(num_tokens=40, hidden=256, top_k=2, num_experts=8)
OURS = Contestant("collective", "wall")
LIMIT_S = 60.0


# -- bytes ----------------------------------------------------------------------------------------------------------


def draw_ids(plan: Plan, seed: int) -> list[torch.Tensor]:
    """[T, K] of each rank: unused places, repeated experts, another number of tokens everywhere, none on rank 1."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = torch.randint(1, plan.max_tokens_per_rank, (plan.num_ranks,), generator=generator)
    num_tokens[1:2] = 0
    return [torch.randint(-1, plan.num_experts, (t, plan.top_k), generator=generator) for t in num_tokens.tolist()]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("payload", cases.PAYLOADS)
@pytest.mark.parametrize("name", ["dispatch", "combine", "dispatch+combine"])
def test_traffic_is_that_of_a_brute_force_count(num_ranks: int, payload: Any, name: Any) -> None:
    """Route by route, with a set of what has crossed already: a token goes to a rank once, and its sum comes back."""
    plan = Plan(num_ranks, 8, 256, 3, 50)
    ids = draw_ids(plan, seed=num_ranks)
    crossed = set()
    for source, tokens in enumerate(ids):
        for token, experts in enumerate(tokens.tolist()):
            crossed |= {(source, token, expert // plan.experts_per_rank) for expert in experts if expert >= 0}
    # By hand for hidden 256 and top-3: 256 values of 2 bytes, or of 1 and two scales of 4; token, 3 ids, 3 weights.
    out_bytes = {"bf16": 512 + 28, "fp8": 256 + 8 + 28, "to_fp8": 256 + 8 + 28}[payload] if name != "combine" else 0
    home_bytes = 512 if name != "dispatch" else 0
    sent, received = [0] * num_ranks, [0] * num_ranks
    for source, _, rank in crossed:
        sent[source] += out_bytes if rank != source else 0
        received[rank] += out_bytes
        sent[rank] += home_bytes if rank != source else 0
        received[source] += home_bytes
    counted = traffic.rows_between(plan, ids)
    moved = traffic.moved(plan, counted, Operation(name, payload, "token"))
    assert moved == traffic.Traffic(max(sent), max(received))


def bytes_sent_on_rank(context: RankContext, who: Contestant) -> dict[Operation, int]:
    """Bytes that one call of each operation really gives to all_to_all_single for other ranks."""
    sent = 0
    real = dist.all_to_all_single

    def counting(
        output: torch.Tensor, given: torch.Tensor, out_splits: Any, in_splits: list[int], **kwargs: Any
    ) -> Any:
        nonlocal sent
        sent += sum(n for rank, n in enumerate(in_splits) if rank != context.rank) * given[:1].nbytes
        return real(output, given, out_splits, in_splits, **kwargs)

    found = {}
    with ExitStack() as stack, torch.no_grad():
        maker = comm.CallMaker(context, inputs.make_inputs(context, SHAPE), stack)
        for operation in OPERATIONS:
            call = maker.prepared_call(Series(SHAPE, operation, who))
            sent = 0
            with mock.patch.object(dist, "all_to_all_single", counting):
                call()
            found[operation] = sent
    return found


@pytest.mark.parametrize("timing_", ["wall", "graph"])
def test_traffic_is_what_the_backend_sends(ranks: Ranks, timing_: Any) -> None:
    """Physical bytes are those that cross, not those of a formula: counted at the collective itself. With the bounded
    sizes of a graph too: they hold all rows of this routing, and no more of them cross."""
    by_rank = ranks.run(bytes_sent_on_rank, Contestant("collective", timing_))
    plan = SHAPE.plan(ranks.num_ranks)
    counted = traffic.rows_between(plan, [SHAPE.topk_ids(rank) for rank in range(ranks.num_ranks)])
    for operation in OPERATIONS:
        measured = max(sent[operation] for sent in by_rank)
        assert measured == traffic.moved(plan, counted, operation).physical_bytes, operation


# -- what is measured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_cases_are_sound(case: cases.Case) -> None:
    """Each spreads over the usual numbers of ranks, takes FP8, and routes each token to different experts."""
    shape = case.shape
    for num_ranks in (1, 2, 4, 8):
        shape.plan(num_ranks)
    assert shape.hidden % 128 == 0
    ids = shape.topk_ids(0)
    assert ids.shape == (shape.num_tokens, shape.top_k)
    assert all(len(set(experts)) == shape.top_k for experts in ids.tolist())
    assert torch.equal(ids, shape.topk_ids(0)), "rows can be repeated"
    assert not torch.equal(ids, shape.topk_ids(1)), "ranks route by themselves"


def test_shapes_are_those_asked_for() -> None:
    """A laptop is not given the shapes of a cluster, nor the other way round; what is asked for comes first."""
    assert [shape.num_tokens for shape in cases.shapes_for([], "cpu")] == [64, 256]
    assert cases.shapes_for([], "cuda") == [Shape(128, 7168, 8, 256), Shape(4096, 7168, 8, 256)]
    assert cases.shapes_for(["decode"], "cpu") == [Shape(128, 7168, 8, 256)]
    # Cases that differ in their tokens alone become one.
    swept = cases.shapes_for([], "cuda", [8, 16], hidden=512, top_k=None)
    assert swept == [Shape(8, 512, 8, 256), Shape(16, 512, 8, 256)]
    assert cases.shapes_for(["small"], "cpu", hidden=128, top_k=1, num_experts=4) == [Shape(64, 128, 1, 4)]


def machine(nvlink: bool) -> Any:
    """Patches availability to that of a machine with, or without, Hopper GPUs."""
    found = [
        registry.Availability("nvlink", nvlink, "own kernels" if nvlink else "it needs Hopper", "host"),
        registry.Availability("collective", True, "torch.distributed over nccl", "host"),
    ]
    return mock.patch.object(registry, "availability", return_value=found)


def fake_deep_ep() -> Any:
    """Patches in a module of that name."""
    module = ModuleType("deep_ep")
    module.Buffer = FakeBuffer  # type: ignore[attr-defined]
    return mock.patch.dict(sys.modules, deep_ep=module)


def no_deep_ep() -> Any:
    """Patches importing it to fail, wherever it may be installed."""
    return mock.patch.dict(sys.modules, deep_ep=None)


def test_rows_on_hopper_gpus() -> None:
    """nvlink in both timings for every number of SMs, its rival beside it at every operation, and both in one run."""
    with machine(nvlink=True), no_deep_ep():
        planned, notes = series.plan_series([SHAPE, Shape(8, 256, 2, 8)], 2, "cuda", num_sms=[8, 16])
    who = [
        Contestant("nvlink", "events", 8),
        Contestant("nvlink", "graph", 8),
        Contestant("nvlink", "events", 16),
        Contestant("nvlink", "graph", 16),
        Contestant("collective", "events"),
    ]
    shapes = [SHAPE, Shape(8, 256, 2, 8)]
    # comm.py takes neighbours of one shape and operation together, and measures them in turns.
    assert planned == [Series(shape, each, one) for shape in shapes for each in OPERATIONS for one in who]
    assert [(each.timing, each.sizes) for each in who[:2]] == [("events", "exact"), ("graph", "bounded")]
    assert any("collective has no rows of CUDA graphs" in note for note in notes)
    assert any(note.startswith("deep_ep is not measured: ") for note in notes)
    assert len(notes) == 2, "each said once, however many shapes"


def test_rows_without_hopper_gpus() -> None:
    """No row of nvlink, and the reason that its backend has for it."""
    with machine(nvlink=False), no_deep_ep():
        planned, notes = series.plan_series([SHAPE], 2, "cuda")
    assert {each.contestant for each in planned} == {Contestant("collective", "events")}
    assert "nvlink is not measured: it needs Hopper" in notes


def test_rows_on_cpus() -> None:
    """By the host's clock, and everybody who needs GPUs says so: this is the machine itself, nothing is faked."""
    planned, notes = series.plan_series([SHAPE], 2, "cpu")
    assert {each.contestant for each in planned} == {OURS}
    assert [note.split(":")[0] for note in notes] == ["nvlink is not measured", "deep_ep is not measured"]


def test_rows_of_deep_ep() -> None:
    """What its normal mode has, with the SMs it says it takes; where it cannot run, the reason that it gives."""
    with machine(nvlink=False), fake_deep_ep():
        planned, _ = series.plan_series([SHAPE], 2, "cuda", only=["deep_ep"])
        for_three = peers.why_not_deep_ep("cuda", 3)
    assert [each.name(2) for each in planned] == [
        "dispatch/deep_ep/ep2/t40/h256/k2/bf16/token/events",
        "dispatch/deep_ep/ep2/t40/h256/k2/fp8/token/events",
        "combine/deep_ep/ep2/t40/h256/k2/bf16/token/events",
    ]
    assert {each.contestant.num_sms for each in planned} == {FakeBuffer.num_sms}
    assert for_three == "Unsupported number of EP ranks: 3"


def test_only_keeps_rows_by_their_names() -> None:
    """Any of the parts, anywhere in the name."""
    planned, _ = series.plan_series([SHAPE], 2, "cpu", only=["combine/collective", "to_fp8/rank"])
    assert [each.name(2) for each in planned] == [
        "dispatch/collective/ep2/t40/h256/k2/to_fp8/rank/wall",
        "combine/collective/ep2/t40/h256/k2/bf16/token/wall",
        "combine/collective/ep2/t40/h256/k2/bf16/expert/wall",
        "combine/collective/ep2/t40/h256/k2/bf16/rank/wall",
        "dispatch+combine/collective/ep2/t40/h256/k2/fp8/rank/wall",
        "dispatch+combine/collective/ep2/t40/h256/k2/bf16/token/wall",
    ]
    odd, _ = series.plan_series([Shape(8, 200, 2, 8)], 2, "cpu", only=["bf16"])
    assert odd, "a hidden size that FP8 does not take is fine where no row is FP8"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"only": ["nvlink"]}, InvalidArgument, "no row has nvlink in its name"),
        ({"wanted": ["nvlink"]}, BackendUnavailable, "nothing to measure: nvlink is not measured: it needs a GPU"),
        ({"num_sms": [8, 33]}, InvalidArgument, "num_sms is 33, expected 1 to 32"),
        ({"shapes": [Shape(8, 200, 2, 8)]}, InvalidArgument, "hidden is 200, FP8 rows need a multiple of 128"),
        ({"shapes": [Shape(8, 256, 9, 8)]}, InvalidArgument, "top_k is 9, but a token cannot choose more than the 8"),
        ({"shapes": [Shape(8, 256, 2, 7)]}, InvalidArgument, "num_experts is 7, not divisible by the 2 ranks"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    """Before any rank is started, with the reason."""
    with pytest.raises(error) as raised:
        series.plan_series(**{"shapes": [SHAPE], "num_ranks": 2, "device": "cpu"} | arguments)
    assert said in str(raised.value)


# -- measuring ------------------------------------------------------------------------------------------------------


def test_everybody_takes_turns() -> None:
    """Three rounds in which each is measured once, after a warm-up before the first, so that drift meets all alike."""
    first, second = (Contestant("collective", "wall", sms) for sms in (1, 2))
    operation = OPERATIONS[0]
    order: list[int | None] = []

    def sampler(maker: comm.CallMaker, each: Series) -> Any:
        return lambda: order.append(each.contestant.num_sms) or float(len(order))

    context: Any = SimpleNamespace(rank=0, report=lambda event: None)
    with (
        mock.patch.object(comm, "make_inputs", return_value=None),
        mock.patch.object(comm.CallMaker, "sampler", sampler),
    ):
        found = comm.measure_on_rank(context, [Series(SHAPE, operation, each) for each in (first, second)], 10)
    # Warm-up 2, rounds of 3, 3 and 4, each but the first after one call that does not count.
    turns = [1] * 5 + [2] * 5 + ([1] * 4 + [2] * 4) + ([1] * 5 + [2] * 5)
    assert order == turns
    assert found[0] == [3, 4, 5, 12, 13, 14, 20, 21, 22, 23]
    assert [len(times) for times in found] == [10, 10]


def measured_on_rank(context: RankContext, planned: list[Series]) -> list[list[float]]:
    return comm.measure_on_rank(context, planned, 3)


@pytest.mark.parametrize("backend", ["nvlink"])
def test_calls_and_graphs_on_gpus(ranks: Ranks, backend: str) -> None:
    """Every operation over nvlink in both timings, beside collective, in one run: each captures, replays, and leaves
    nothing behind that check would raise. Plausible times: more than nothing, less than a second."""
    planned, _ = series.plan_series([SHAPE], ranks.num_ranks, "cuda", [backend, "collective"], num_sms=[4, 16])
    assert {each.contestant.timing for each in planned if each.contestant.backend == backend} == {"events", "graph"}
    for found in ranks.run(measured_on_rank, planned):
        for each, times in zip(planned, found, strict=True):
            assert len(times) == 3
            assert all(0 < us < 1e6 for us in times), each


def replays_on_rank(context: RankContext) -> None:
    with ExitStack() as stack, torch.no_grad():
        given = inputs.make_inputs(context, SHAPE)
        maker = comm.CallMaker(context, given, stack)
        nvlink = Contestant("nvlink", "graph", 8)
        for layout in cases.LAYOUTS:
            call = maker.prepared_call(Series(SHAPE, Operation("dispatch", "bf16", layout), nvlink))
            results: list[Any] = []

            def kept(call: Any = call, results: list[Any] = results) -> None:
                results[:] = [call()]

            kept()
            want_rows, want_counts = results[0].tokens.clone(), results[0].source_counts.tolist()
            graph = timing.capture(kept)
            results[0].tokens.zero_()
            timing.one_replay(context, graph)
            maker.check(nvlink)
            (last,) = results
            assert last.source_counts.tolist() == want_counts
            rows_here = int(last.num_rows)
            if layout == "rank":
                for source, count in enumerate(want_counts):
                    assert torch.equal(last.tokens[source, :count], want_rows[source, :count])
            else:
                assert torch.equal(last.tokens[:rows_here], want_rows[:rows_here])
            if layout == "expert":
                assert rows_here <= given.expert_rows == len(last.tokens)


@pytest.mark.parametrize("backend", ["nvlink"])
def test_a_replay_does_the_work(ranks: Ranks, backend: str) -> None:
    """What is timed really dispatches: rows that were wiped before the replay are there after it."""
    ranks.run(replays_on_rank)


class FakeBuffer:
    """deep_ep's Buffer as far as a benchmark calls it, on any device; each rank sends to itself alone."""

    num_sms = 20

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, *, explicitly_destroy: bool) -> None:
        assert num_nvl_bytes == 2 * SHAPE.hidden * group.size()
        assert explicitly_destroy, "only then it has destroy"
        self.group = group
        self.alive = True

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, num_ranks: row_bytes * num_ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        ranks = topk_idx // (num_experts // self.group.size())
        in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.group.size())], 1)
        return in_rank.sum(0).int(), None, topk_idx.flatten().bincount(minlength=num_experts).int(), in_rank, None

    def dispatch(
        self,
        x: Any,
        *,
        num_tokens_per_rank: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> tuple[Any, ...]:
        assert self.alive
        assert num_tokens_per_expert.sum() == topk_idx.numel() == topk_weights.numel()
        mine = is_token_in_rank[:, self.group.rank()]
        received = tuple(part[mine] for part in x) if isinstance(x, tuple) else x[mine]
        return received, topk_idx[mine], topk_weights[mine], [], num_tokens_per_rank, None

    def combine(self, x: torch.Tensor, handle: torch.Tensor) -> tuple[Any, ...]:
        assert self.alive
        assert x.dtype == torch.bfloat16
        assert x.shape == (int(handle[self.group.rank()]), SHAPE.hidden)
        return x, None, None

    def destroy(self) -> None:
        assert self.alive
        self.alive = False


def deep_ep_on_rank(context: RankContext) -> tuple[list[Any], list[int]]:
    """What its operations return, described, and how many samples each of them has when it is measured."""
    with fake_deep_ep(), torch.no_grad():
        given = inputs.make_inputs(context, SHAPE)
        who = Contestant("deep_ep", "wall")
        planned = [Series(SHAPE, each, who) for each in peers.DEEP_EP_OPERATIONS]
        with ExitStack() as stack:
            maker = comm.CallMaker(context, given, stack)
            bf16, fp8, home = (maker.prepared_call(each)()[0] for each in planned)
        described = [bf16.dtype, [part.dtype for part in fp8], home.dtype]
        return described, [len(times) for times in comm.measure_on_rank(context, planned, 4)]


def test_deep_ep_is_called_as_it_wants(ranks: Ranks) -> None:
    """Its arguments by name, int64 ids, FP8 as values and scales, BF16 home, a buffer of the size it hints at that is
    destroyed in the end: a stand-in for it checks them. What the true one does needs it, and GPUs."""
    if ranks.num_ranks == 1:
        pytest.skip("it has no group of one rank")
    for described, counts in ranks.run(deep_ep_on_rank):
        assert described == [torch.bfloat16, [torch.float8_e4m3fn, torch.float32], torch.bfloat16]
        assert counts == [4, 4, 4]


# -- telling --------------------------------------------------------------------------------------------------------


def test_times_become_a_row() -> None:
    """By hand: the slowest rank of each sample counts, and percentiles are values that were measured."""
    times = [[10.0, 50.0, 10.0, 10.0], [20.0, 20.0, 40.0, 30.0]]  # slowest: 20, 50, 40, 30
    row = rows.make_row("a name", times, traffic.Traffic(60_000, 90_000), 16, {"layout": "token"})
    assert (row.name, row.num_sms) == ("a name", 16)
    assert (row.p50_us, row.p99_us, row.slowest_rank) == (30.0, 50.0, 1)
    assert row.physical_gbytes_per_s == pytest.approx(60e3 / 30e-6 / 1e9)
    assert row.logical_gbytes_per_s == pytest.approx(90e3 / 30e-6 / 1e9)
    assert row.setup == {"layout": "token", "physical_bytes": 60_000, "logical_bytes": 90_000}


def test_command(tmp_path: Path) -> None:
    """As a user runs it, on two ranks and another shape: every operation has its row, in the table and in the files,
    and the file says where they come from."""
    json_file, png_file = tmp_path / "rows.json", tmp_path / "chart.png"
    arguments = ["bench", "comm", "--device", "cpu", "--ranks", "2", "--iterations", "4", "--case", "small"]
    arguments += ["--tokens", "16,24", "--json", str(json_file), "--plot", str(png_file)]
    command = [sys.executable, "-m", "tokenloom", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert png_file.read_bytes().startswith(b"\x89PNG")
    found = json.loads(json_file.read_text())
    assert [row["name"] for row in found["rows"]] == [
        f"{each.name}/collective/ep2/t{num_tokens}/h256/k2/{each.payload}/{each.layout}/wall"
        for num_tokens in (16, 24)
        for each in OPERATIONS
    ]
    assert {"commit", "tokenloom", "torch", "nccl", "driver", "device_name"} <= found["setup"].keys()
    assert (found["setup"]["num_ranks"], found["setup"]["device"]) == (2, "cpu")
    assert found["setup"]["command"] == " ".join(["tokenloom", *arguments])
    assert [note.split()[0] for note in found["notes"]] == ["nvlink", "deep_ep"]
    assert all(note in done.stdout for note in found["notes"])
    for row in found["rows"]:
        assert row["name"] in done.stdout
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["slowest_rank"] in (0, 1)
        assert 0 < row["physical_gbytes_per_s"] < row["logical_gbytes_per_s"]
        assert row["num_sms"] is None
        assert {"routing_seed", "sizes", "calls_per_sample", "rounds"} <= row["setup"].keys()
        assert (row["setup"]["hidden"], row["setup"]["iterations"]) == (256, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backends", "nvlink,mpi"], "--backends"),
        (["--backends", ""], "--backends"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "8,many"], "--tokens"),
        (["--num-sms", "-4"], "--num-sms"),
        (["--hidden", "0"], "--hidden"),
        (["--plot", "/no/such/folder/chart.png"], "--plot"),
        (["--plot", "chart.svg"], "ends in .png"),
        (["--json", "/no/such/folder/rows.json"], "--json"),
        (["--num-sms", "64"], "num_sms is 64, expected 1 to 32"),
        (["--only", "no/such"], "no row has no/such in its name"),
        (["--top-k", "9", "--num-experts", "8"], "top_k is 9"),
        (["--backends", "nvlink"], "nothing to measure: nvlink"),
    ],
)
def test_bad_options_start_nothing(arguments: list[str], said: str) -> None:
    """A message that names what is wrong, no traceback, and no process started."""
    with mock.patch.object(RankPool, "start", side_effect=AssertionError("ranks were started")):
        done = CliRunner().invoke(app.app, ["bench", "comm", "--device", "cpu", *arguments])
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert said in " ".join(done.output.replace("│", " ").split())


def test_a_plot_without_matplotlib_starts_nothing(tmp_path: Path) -> None:
    """It is no dependency: who asks for a chart without it is told before minutes of measuring, not after."""
    hidden = mock.patch.dict(sys.modules, {"matplotlib.figure": None})
    with hidden, mock.patch.object(RankPool, "start", side_effect=AssertionError("ranks were started")):
        chart = ["--plot", str(tmp_path / "chart.png")]
        done = CliRunner().invoke(app.app, ["bench", "comm", "--device", "cpu", *chart])
    assert done.exit_code == app.FAILED
    assert "--plot needs matplotlib" in done.output
    assert "pip install" in done.output


def test_a_chart_shows_every_row(tmp_path: Path) -> None:
    """A chart for each shape, a bar of the right length for each row, and a title that says where it was measured."""
    figures = pytest.importorskip("matplotlib.figure")
    shapes = [SHAPE, Shape(8, 256, 2, 8)]
    who = [Contestant("nvlink", "events", 8), Contestant("nvlink", "graph", 8), Contestant("collective", "events")]
    made = []
    for shape in shapes:
        for operation in OPERATIONS[:3]:
            for each in who[len(made) % 2 :]:  # not everybody has every operation
                where = asdict(shape) | {"payload": operation.payload, "layout": operation.layout}
                where |= {"operation": operation.name, "backend": each.backend, "timing": each.timing}
                row = Series(shape, operation, each).name(2)
                times = [[10.0 + len(made)]]
                made.append(rows.make_row(row, times, traffic.Traffic(1, 2), each.num_sms, where))
    about = setup.run_setup("cpu", 2, ["bench", "comm"]) | {"device_name": "a machine", "commit": "abc"}
    drawn = []
    with mock.patch.object(figures.Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure)):
        plot.write_png(tmp_path / "chart.png", about, made)
    (figure,) = drawn
    assert len(figure.axes) == len(shapes)
    for axes, shape in zip(figure.axes, shapes, strict=True):
        expected = [row.p50_us for row in made if row.setup["num_tokens"] == shape.num_tokens]
        assert sorted(bar.get_width() for bar in axes.patches) == expected
        assert [tick.get_text() for tick in axes.get_yticklabels()] == list(map(str, OPERATIONS[:3]))
        assert f"{shape.num_tokens} tokens a rank" in axes.get_title()
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert sorted(labels) == ["collective, events", "nvlink, 8 SMs, events", "nvlink, 8 SMs, graph"]
    assert all(word in figure.get_suptitle() for word in ("2 ranks on a machine", "torch", "abc"))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_that_of_our_own_checkout(tmp_path: Path) -> None:
    """Not that of a project which installed tokenloom below its own checkout; and changes since are told."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "__init__.py").write_text("")
    assert setup.commit(tmp_path) is None, "no checkout at all"
    git("init", "-q")
    (tmp_path / "other.py").write_text("")
    git("add", "other.py")
    git("commit", "-q", "-m", "other")
    assert setup.commit(tmp_path) is None, "a checkout of something else"
    git("add", "__init__.py")
    git("commit", "-q", "-m", "ours")
    assert setup.commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "__init__.py").write_text("changed = True\n")
    assert setup.commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
