"""How ``tokenloom bench mega`` takes its samples, and how it calls a rival; on stand-ins of GPUs and of the rival."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Ranks
from tests.support.on_ranks import on_ranks
from tests.support.stand_ins import StandIns
from tokenloom.bench import PackageMissing, clock, mega
from tokenloom.bench.clock import Clock
from tokenloom.bench.harness import Measured
from tokenloom.bench.mega import MegaFound, MegaLayer
from tokenloom.bench.mega_work import MegaShape, make_weights
from tokenloom.bench.rivals import deep_gemm
from tokenloom.compat.deep_gemm.testing import calc_diff
from tokenloom.errors import InvalidArgument
from tokenloom.ops import quant
from tokenloom.ops.quant.weights import padded_weights_for
from tokenloom.runtime.processes import RankContext

SHAPE = MegaShape(hidden=256, intermediate=128, num_experts=4, top_k=2)
STAGES = ["dispatch", "gemm1", "gemm2", "sum"]
FP8 = torch.float8_e4m3fn


@pytest.fixture
def cpu_ranks(ranks: Ranks) -> Ranks:
    """Those of the fixture that have no GPU."""
    if ranks.device != "cpu":
        pytest.skip("stand-ins of GPUs run without one")
    return ranks


NO_MEMORY = mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 0))


class FakeClock:
    """Keeps who was called, in order; a sample is its number."""

    def __init__(self, context: Any = None) -> None:
        self.context = context
        self.called: list[str] = []

    def replay_us(self, graph: Any) -> float:
        graph()
        self.called.append(graph.__name__)
        return float(len(self.called))

    call_us = replay_us

    def capture(self, call: Any) -> Any:
        return call


def test_layers_are_timed_by_graph_and_by_events() -> None:
    """All by graph first, then all by events; who has no graph is measured by events alone."""
    fake: Any = FakeClock()

    def ours() -> None: ...

    def theirs() -> None: ...

    graph: Any = ours
    layers = {"ours": MegaLayer(ours, torch.zeros(1), graph), "theirs": MegaLayer(theirs, torch.zeros(1), None)}
    contestants = mega.contestants(fake, layers, {name: Measured() for name in layers})
    assert [each.sample() for each in contestants.values()] == [{"graph": 1.0}, {"events": 2.0}, {"events": 3.0}]
    assert fake.called == ["ours", "ours", "theirs"]
    first, second, _ = contestants.values()
    assert first.measured is second.measured, "both are of one layer"


@pytest.mark.parametrize("cold", [True, False])
def test_a_cold_sample_is_one_call_behind_an_overwritten_cache(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than twice L2 is written before the clock starts; a graph's time is divided by the number of its calls."""
    l2 = SimpleNamespace(L2_cache_size=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: l2)
    context: Any = SimpleNamespace(device=torch.device("cpu"))
    timed = Clock(context, cold)
    seen: list[int] = []

    def sample(context: Any, what: Any, calls: int = 1) -> float:
        if timed._overwritten is not None:
            assert timed._overwritten.nbytes >= 2 * 1000
            seen.append(int(timed._overwritten.sum()))
            timed._overwritten.fill_(1)
        return 6.0 * calls

    monkeypatch.setattr(clock, "one_replay", sample)
    monkeypatch.setattr(clock, "one_call", sample)
    monkeypatch.setattr(clock, "capture", lambda call, calls: calls)
    if timed._overwritten is not None:
        timed._overwritten.fill_(1)
    graph_calls = timed.capture(lambda: None)
    assert timed.replay_us(None) == 6.0 * timed.calls  # type: ignore[arg-type]
    assert timed.call_us(lambda: None) == 6.0
    assert graph_calls == timed.calls == (1 if cold else clock.GRAPH_CALLS)  # type: ignore[comparison-overlap]
    assert seen == ([0, 0] if cold else [])


@on_ranks("cpu_ranks")
def test_a_capture_that_fails_anywhere_fails_everywhere(context: RankContext) -> None:
    """Or some would replay and wait for ever. One whose replays do nothing fails too. The first cause is told."""
    fake: Any = FakeClock(context)
    out = torch.zeros(3, 2)

    def writes() -> None:
        out.fill_(1.0)

    def does_not() -> None: ...

    graph, why_not = clock.try_capture(fake, writes, out)
    assert (graph, why_not) == (writes, "")
    assert clock.try_capture(fake, does_not, out) == (None, "a replay did not write its output")

    def fails(call: Any) -> Any:
        if context.rank == context.num_ranks - 1:
            try:
                raise RuntimeError("it waits for the host\nand more")
            finally:
                raise RuntimeError("the capture failed")
        return call

    fake.capture, fake.called = fails, []
    graph, why_not = clock.try_capture(fake, writes, out)
    assert (graph, why_not) == (None, f"rank {context.num_ranks - 1}: it waits for the host")
    assert fake.called == [], "no rank replays what another cannot"


def test_the_fused_layer_is_the_one_that_is_timed() -> None:
    with StandIns(2):
        layer = mega.make_mega(None, SHAPE, 8, torch.device("cpu"))
        assert layer.comm.backend == "nvlink"


def test_weights_of_a_rank() -> None:
    """A rank has its routed and the shared experts; shared ones are the same on all ranks, others are not."""
    shape = MegaShape(256, 128, 4, 2, num_shared_experts=2)
    found = []
    for rank in (0, 1):
        context: Any = SimpleNamespace(rank=rank, num_ranks=2, device=torch.device("cpu"))
        found.append(make_weights(shape, context))
    for mine, other in zip(*found, strict=True):
        assert len(mine) == len(other) == 2 + 2
        assert mine[2:].float().equal(other[2:].float())
        assert len({tuple(each.flatten()[:64].tolist()) for each in (*mine.float(), *other.float()[:2])}) == 6
    w1, w1_scales, w2, w2_scales = found[0]
    assert (w1.shape, w1_scales.shape) == ((4, 256, 256), (4, 2, 2))
    assert (w2.shape, w2_scales.shape) == ((4, 256, 128), (4, 2, 1))
    assert (w1.dtype, w1_scales.dtype) == (w2.dtype, w2_scales.dtype) == (FP8, torch.float32)
    assert 0.9 < w1.float().std() < 1.1
    assert (w1_scales >= 0.5 / 16).all()
    assert (w1_scales <= 1.5 / 16).all()


class FakeBuffer:
    """deep_gemm's buffer as far as a benchmark uses it, on the CPU."""

    def __init__(self, group: dist.ProcessGroup, experts: int, rows: int, top_k: int, hidden: int, width: int) -> None:
        assert isinstance(group, dist.ProcessGroup)
        assert (experts, rows, top_k, hidden, width) == (4, 40, 2, 256, 128)
        self.x = torch.zeros(rows + 24, hidden, dtype=FP8)
        self.x_sf = torch.zeros(rows + 24, hidden // 128)
        self.topk_idx = torch.full((rows + 24, top_k), -1, dtype=torch.int64)
        self.topk_weights = torch.zeros(rows + 24, top_k)
        self.destroyed = False

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True


def fake_mega_moe(y: torch.Tensor, l1_weights: Any, l2_weights: Any, sym_buffer: FakeBuffer) -> None:
    """Rows of x, times the sums of their weights: enough to see that everything arrived where it should."""
    assert not sym_buffer.destroyed
    assert y.dtype == torch.bfloat16
    assert l1_weights[0] == l2_weights[0] == "transformed"
    rows = len(y)
    x = quant.dequantize_fp8(sym_buffer.x[:rows], sym_buffer.x_sf[:rows])
    y.copy_(x * sym_buffer.topk_weights[:rows].masked_fill(sym_buffer.topk_idx[:rows] < 0, 0).sum(1, keepdim=True))


def fake_deep_gemm(**changes: Any) -> Any:
    """Patches in a module of that name."""
    module = ModuleType("deep_gemm")
    module.__version__ = "9.9"  # type: ignore[attr-defined]
    names = {
        "get_symm_buffer_for_sm90_mega_moe": FakeBuffer,
        "get_symm_buffer_for_mega_moe": None,  # of other GPUs, where there are both
        "transform_weights_for_mega_moe_sm90": lambda l1, l2: (("transformed", l1), ("transformed", l2)),
        "fp8_mega_moe": fake_mega_moe,
    }
    for name, value in (names | changes).items():
        if value != "missing":
            setattr(module, name, value)
    return mock.patch.dict(sys.modules, deep_gemm=module)


@on_ranks("cpu_ranks")
def test_deep_gemm_is_called_as_it_wants(context: RankContext) -> None:
    """The sizes in its order, x in FP8 with scales in its buffer, its own transformation of weights, destroyed in the
    end: a stand-in for it checks them. What the true one does needs it, and GPUs."""
    generator = torch.Generator().manual_seed(context.rank)
    with fake_deep_gemm(), NO_MEMORY, mock.patch.object(torch.cuda, "synchronize"):
        weights = make_weights(SHAPE, context)
        rival = deep_gemm.DeepGemm(context.group, SHAPE, 40, weights[:2], weights[2:])
        for num_tokens in (40, 3):
            x = torch.randn(num_tokens, 256, generator=generator).bfloat16()
            ids = SHAPE.topk_ids(context.rank, num_tokens)
            ids[0, 1] = -1
            scores = torch.rand(num_tokens, 2, generator=generator)
            out = torch.full_like(x, torch.nan)
            rival.prepared_call(x, ids, scores, out)()
            want = x * scores.masked_fill(ids < 0, 0).sum(1, keepdim=True)
            assert calc_diff(out, want) < 1e-3  # FP8 rounds by a sixteenth at most
        rival.close()
        assert rival._buffer.destroyed


class FakeMega:
    """The layer as far as a benchmark uses it, on the CPU; what it computes is what the rival's stand-in does."""

    def __init__(
        self,
        group: Any,
        *,
        num_shared_experts: int,
        device: torch.device,
        backend: str = "auto",
        spare_slots: int | None = None,
        **sizes: int,
    ) -> None:
        expected = {"num_experts": 4, "hidden": 256, "intermediate": 128, "top_k": 2, "max_tokens_per_rank": 40}
        assert sizes == expected
        plan = SimpleNamespace(experts_per_rank=4 // group.size())
        self.comm = SimpleNamespace(plan=plan, rank=group.rank(), num_ranks=group.size())
        self.spare_slots, self.placements = spare_slots, list[Any]()
        self.local = 4 // group.size() + num_shared_experts
        self.after_stage: Any = None
        self.checked = 0

    def __enter__(self) -> FakeMega:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.checked == 3 + 1 or exception[0], "what replays left behind is raised after each routing"

    def move_experts(self, placement: Any) -> Any:
        assert placement.slots_per_rank == self.comm.plan.experts_per_rank + (self.spare_slots or 0)
        return SimpleNamespace(run=lambda: self.placements.append(placement))

    def load_weights(self, *weights: torch.Tensor, experts: range | None = None) -> None:
        assert (self.spare_slots is None) == (experts is None)
        assert [each.shape[0] for each in weights] == [self.local] * 4
        assert [list(each.shape[1:]) for each in weights] == [[256, 256], [256, 128], [2, 2], [2, 1]]

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, out: torch.Tensor) -> None:
        assert (x.dtype, ids.dtype, weights.dtype) == (torch.bfloat16, torch.int32, torch.float32)
        assert (weights[ids < 0] == 0).all()
        assert bool(self.placements) == (self.spare_slots is not None), "experts are placed before they are called"
        out.copy_(x * weights.sum(1, keepdim=True))
        for stage in STAGES:
            if self.after_stage is not None:
                self.after_stage(stage)

    def check(self) -> None:
        self.checked += 1

    def close(self) -> None:
        self.checked += 1  # no call may follow


class FakeEvent:
    """Events a microsecond apart."""

    recorded = 0

    def __init__(self, *, enable_timing: bool, external: bool) -> None:
        assert enable_timing
        assert external, "only then it is recorded by each replay"

    def record(self) -> None:
        FakeEvent.recorded += 1
        self.number = FakeEvent.recorded

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.number - self.number) / 1e3


def fake_capture(call: Any, calls: int) -> Any:
    """Runs what it captures, as an event's record needs; replays repeat the calls, but for the one with events."""
    call()
    return (lambda: None) if calls == 1 else call


def fake_replay(context: RankContext, graph: Any, calls: int) -> float:
    graph()
    return 7.0


@pytest.mark.parametrize("watches", [False, True])
def test_a_steady_sample_is_watched_in_its_middle(monkeypatch: pytest.MonkeyPatch, watches: bool) -> None:
    """Behind the replays that warm up and half of those that count, while the GPU has the rest to do."""
    done: list[str] = []

    class Event:
        made = 0

        def __init__(self, *, enable_timing: bool) -> None:
            self.name = ("start", "middle", "end")[Event.made]
            Event.made += 1

        def record(self) -> None:
            done.append(self.name)

        def synchronize(self) -> None:
            done.append(f"wait for {self.name}")

        def elapsed_time(self, end: Any) -> float:
            return 0.008

    monkeypatch.setattr(torch.cuda, "Event", Event)
    graph: Any = mock.Mock(replay=lambda: done.append("replay"))
    assert clock.replays_us(graph, 1, 4, (lambda: done.append("watch")) if watches else None) == 2.0
    twice = ["replay", "replay"]
    between, watched = (["middle"], ["wait for middle", "watch"]) if watches else ([], [])
    assert done == ["replay", "start", *twice, *between, *twice, "end", *watched, "wait for end"]


def measure_with_stand_ins(context: RankContext, against: Sequence[str], spare_slots: int | None) -> list[MegaFound]:
    patches = [
        mock.patch.object(mega, "MegaMoE", FakeMega),
        mock.patch.object(clock, "capture", fake_capture),
        mock.patch.object(clock, "one_replay", fake_replay),
        mock.patch.object(clock, "replays_us", return_value=60.0),
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        NO_MEMORY,
        mock.patch.object(torch.cuda, "Event", FakeEvent),
        fake_deep_gemm(),
    ]
    shape = MegaShape(256, 128, 4, 2, masked_ratio=0.3, num_shared_experts=0 if "deep_gemm" in against else 1)
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        return mega.measure_on_rank(context, [shape], [1, 40], 4, False, against, spare_slots=spare_slots)


@pytest.mark.parametrize(
    ("against", "spare_slots"), [(["deep_gemm", "composed"], None), (["composed"], 1), ([], None)]
)
def test_a_whole_run_on_stand_ins(cpu_ranks: Ranks, against: list[str], spare_slots: int | None) -> None:
    """For each number of tokens as many samples of everything as asked for, and the difference of outputs that were
    wiped and written again; GPUs, graphs and layers are stand-ins. Of ours with replicas there are stages too."""
    for found in cpu_ranks.run(measure_with_stand_ins, against, spare_slots):
        assert len(found) == 2
        for draws, each in zip((3, 1), found, strict=True):  # one token leaves some experts out
            ours = each.layers[mega.OURS].samples
            assert ours["graph"] == [7.0] * 4 * draws
            assert len(ours["events"]) == 4 * draws
            assert ours["steady"] == [60.0 / clock.GRAPH_CALLS] * 2 * draws
            assert set(ours) == {*mega.CLOCKS, *STAGES}
            assert all(ours[stage] == pytest.approx([1.0] * 4 * draws) for stage in STAGES)
            others = [*([] if spare_slots is None else [mega.SPARE]), *against]
            assert list(each.layers) == [mega.OURS, *others]
            for name in others:
                other = each.layers[name]
                assert (other.samples["graph"], other.why_not, list(other.samples)) == (
                    [7.0] * 4 * draws,
                    "",
                    ["graph", "events", *(STAGES if name == mega.SPARE else []), "steady"],
                )
                assert len(other.samples["steady"]) == 2 * draws
                assert len(other.samples["events"]) == 4 * draws
                assert other.difference is not None
                if name == "deep_gemm":
                    assert 0 < other.difference < 1e-3  # the rounding to FP8 of its x
                else:
                    assert abs(other.difference) < 1e-9


@on_ranks("cpu_ranks")
def test_replicas_compute_the_same(context: RankContext) -> None:
    """Under the placement of each routing, in turn, outputs are those without one. The shared expert stays last."""
    uneven = [MegaShape(256, 128, 4, 2, max_vio=each, num_shared_experts=1) for each in (0.9, 0.5)]
    w1, w1_scales, w2, w2_scales = make_weights(uneven[0], context)
    given = (context.group, uneven[0], 8, (w1, w1_scales), (w2, w2_scales))
    slow = {"options": mega.Composed.options}  # there are no GPUs
    ours, replicated = mega.Composed(*given), type("OnCpus", (mega.Replicated,), slow)(*given, spare_slots=2)
    generator = torch.Generator().manual_seed(context.rank)
    x, scores = torch.randn(8, 256, generator=generator).bfloat16(), torch.rand(8, 2, generator=generator)
    for shape in uneven:
        replicated.place(shape, 2)
        placed, wanted = replicated.mega.comm.placement, shape.placement(context.num_ranks, 2)
        assert placed is not None
        for rank in range(context.num_ranks):  # slots of a rank may lie in another order
            assert sorted(placed.experts_of(rank)) == sorted(wanted.experts_of(rank))
        out, without = torch.empty_like(x), torch.empty_like(x)
        for each, its in ((ours, without), (replicated, out)):
            each.prepared_call(x, shape.topk_ids(context.rank, 8), scores, its)()
        assert calc_diff(without, out) < 1e-6
    ours.close()
    replicated.close()


@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        (SHAPE, {"fp8_mega_moe": "missing"}, "finds no fp8_mega_moe in the one that is installed; install"),
        (
            SHAPE,
            {"get_symm_buffer_for_sm90_mega_moe": "missing", "get_symm_buffer_for_mega_moe": "missing"},
            "finds no get_symm_buffer_for_sm90_mega_moe",
        ),
        (
            MegaShape(256, 128, 4, 2, num_shared_experts=1),
            {},
            "--shared-experts is 1, but the layer of deep_gemm",
        ),
        (MegaShape(2880, 2880, 4, 2), {}, "hidden 2880 and intermediate 2880: the layer of deep_gemm takes multiples"),
    ],
)
def test_a_build_that_cannot_is_refused(shape: MegaShape, changes: dict[str, Any], said: str) -> None:
    error = PackageMissing if changes else InvalidArgument
    with fake_deep_gemm(**changes), pytest.raises(error, match=said):
        mega.load(["composed", "deep_gemm"], shape)


def test_either_name_of_its_buffer_will_do() -> None:
    with fake_deep_gemm(get_symm_buffer_for_sm90_mega_moe="missing", get_symm_buffer_for_mega_moe=FakeBuffer):
        assert mega.load(["composed", "deep_gemm"], SHAPE) == {"composed": None, "deep_gemm": "9.9"}


def test_an_unknown_layer_is_refused() -> None:
    known = "deep_gemm, row, four_bits, composed"
    with pytest.raises(InvalidArgument, match=f"against is 'somebody', expected one of {known}"):
        mega.load(["somebody"], SHAPE)


def test_weights_in_four_bits() -> None:
    """They are encoded exactly, and lie as near as 3 bits and a sign can. Parts of N have blocks of their own."""
    w = torch.randn(2, 2 * 96, 160, generator=torch.Generator().manual_seed(0)).to(FP8)
    scales = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]).expand(2, -1, -1)
    packed, exponents = mega.in_four_bits(w, scales, parts=2)
    assert (packed.shape, exponents.shape) == ((2, 192, 80), (2, 192, 5))
    _, _, report = padded_weights_for("row", packed, exponents, four_bits=quant.MXFP4, parts=2)
    assert str(report) == "encoded exactly"
    found = quant.dequantize_four_bits(packed, exponents, quant.MXFP4).float().unflatten(1, (2, 96))
    want = w.float().unflatten(1, (2, 96)) * torch.tensor([[1.0], [3.0]])[None, :, :, None]
    want = torch.cat([want[..., :128], want[..., 128:] * torch.tensor([[2.0], [4 / 3]])[None, :, :, None]], -1)
    assert 0.08 < (found - want).norm() / want.norm() < 0.14
    assert ((found - want).abs() <= want.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1) / 4).all()
