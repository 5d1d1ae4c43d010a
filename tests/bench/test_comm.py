"""What ``tokenloom bench comm`` measures, the bytes that it counts, and how it takes its samples."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Ranks
from tokenloom.backends import registry
from tokenloom.bench.comm import cases, measure, series, traffic
from tokenloom.bench.comm.cases import OPERATIONS, Operation
from tokenloom.bench.comm.series import Contestant, Series
from tokenloom.bench.common import inputs, timing
from tokenloom.bench.common.shape import Shape
from tokenloom.bench.rivals import deep_ep
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext

SHAPE = Shape(num_tokens=40, hidden=256, top_k=2, num_experts=8)
OURS = Contestant("collective", "wall")


# -- bytes ----------------------------------------------------------------------------------------------------------


def draw_ids(plan: Plan, seed: int) -> list[torch.Tensor]:
    """[T, K] of each rank, with unused places and repeated experts. Numbers of tokens differ; rank 1 has none."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = torch.randint(1, plan.max_tokens_per_rank, (plan.num_ranks,), generator=generator)
    num_tokens[1:2] = 0
    return [torch.randint(-1, plan.num_experts, (t, plan.top_k), generator=generator) for t in num_tokens.tolist()]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("payload", cases.PAYLOADS)
@pytest.mark.parametrize("name", ["dispatch", "combine", "dispatch+combine"])
def test_traffic_is_that_of_a_brute_force_count(num_ranks: int, payload: Any, name: Any) -> None:
    """Route by route, with a set of what has crossed: a token goes to a rank once, and its sum comes back once."""
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
        maker = measure.CallMaker(context, inputs.make_inputs(context, SHAPE), stack)
        for operation in OPERATIONS:
            call = maker.prepared_call(Series(SHAPE, operation, who))
            sent = 0
            with mock.patch.object(dist, "all_to_all_single", counting):
                call()
            found[operation] = sent
    return found


@pytest.mark.parametrize("timing_", ["wall", "graph"])
def test_traffic_is_what_the_backend_sends(ranks: Ranks, timing_: Any) -> None:
    """Physical bytes are those that cross, counted at the collective itself, not those of a formula.

    The bounded sizes of a graph hold all rows of this routing, and no more of them cross."""
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
    """A laptop does not get the shapes of a cluster, nor the other way round; what is asked for comes first."""
    assert [shape.num_tokens for shape in cases.shapes_for([], "cpu")] == [64, 256]
    assert cases.shapes_for([], "cuda") == [Shape(128, 7168, 8, 256), Shape(4096, 7168, 8, 256)]
    assert cases.shapes_for(["decode"], "cpu") == [Shape(128, 7168, 8, 256)]
    # Cases that differ in their tokens alone become one.
    swept = cases.shapes_for([], "cuda", [8, 16], hidden=512, top_k=None)
    assert swept == [Shape(8, 512, 8, 256), Shape(16, 512, 8, 256)]
    assert cases.shapes_for(["small"], "cpu", hidden=128, top_k=1, num_experts=4) == [Shape(64, 128, 1, 4)]


def machine(nvlink: bool) -> Any:
    """A patch that makes this a machine with, or without, Hopper GPUs."""
    found = [
        registry.Availability("nvlink", nvlink, "own kernels" if nvlink else "it needs Hopper", "host"),
        registry.Availability("collective", True, "torch.distributed over nccl", "host"),
    ]
    return mock.patch.object(registry, "availability", return_value=found)


def fake_deep_ep() -> Any:
    """A patch that puts a module of that name in place."""
    module = ModuleType("deep_ep")
    module.Buffer = FakeBuffer  # type: ignore[attr-defined]
    return mock.patch.dict(sys.modules, deep_ep=module)


def no_deep_ep() -> Any:
    """A patch that makes its import fail, even where it is installed."""
    return mock.patch.dict(sys.modules, deep_ep=None)


def test_rows_on_hopper_gpus() -> None:
    """nvlink has both timings for every number of SMs, and its rivals are beside it at every operation."""
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
    # measure.py takes neighbours of one shape and operation together, and measures them in turns.
    assert planned == [Series(shape, each, one) for shape in shapes for each in OPERATIONS for one in who]
    assert [(each.timing, each.sizes) for each in who[:2]] == [("events", "exact"), ("graph", "bounded")]
    assert any("collective has no rows of CUDA graphs" in note for note in notes)
    assert any(note.startswith("deep_ep is not measured: ") for note in notes)
    assert len(notes) == 2, "each said once, however many shapes"


def test_rows_without_hopper_gpus() -> None:
    """There is no row of nvlink, but the reason that its backend gives."""
    with machine(nvlink=False), no_deep_ep():
        planned, notes = series.plan_series([SHAPE], 2, "cuda")
    assert {each.contestant for each in planned} == {Contestant("collective", "events")}
    assert "nvlink is not measured: it needs Hopper" in notes


def test_rows_on_cpus() -> None:
    """Rows are by the host's clock, and everybody who needs GPUs says so. Nothing is faked: this is the machine."""
    planned, notes = series.plan_series([SHAPE], 2, "cpu")
    assert {each.contestant for each in planned} == {OURS}
    assert [note.split(":")[0] for note in notes] == ["nvlink is not measured", "deep_ep is not measured"]


def test_rows_of_deep_ep() -> None:
    """Rows are what its normal mode has, with the SMs that it says it takes; where it cannot run, its own reason."""
    with machine(nvlink=False), fake_deep_ep():
        planned, _ = series.plan_series([SHAPE], 2, "cuda", only=["deep_ep"])
        for_three = deep_ep.why_not("cuda", 3)
    assert [each.name(2) for each in planned] == [
        "dispatch/deep_ep/ep2/t40/h256/k2/bf16/token/events",
        "dispatch/deep_ep/ep2/t40/h256/k2/fp8/token/events",
        "combine/deep_ep/ep2/t40/h256/k2/bf16/token/events",
    ]
    assert {each.contestant.num_sms for each in planned} == {FakeBuffer.num_sms}
    assert for_three == "Unsupported number of EP ranks: 3"


def test_only_keeps_rows_by_their_names() -> None:
    """A row is kept if any of the parts is anywhere in its name."""
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
    """The reason comes before any rank is started."""
    with pytest.raises(error) as raised:
        series.plan_series(**{"shapes": [SHAPE], "num_ranks": 2, "device": "cpu"} | arguments)
    assert said in str(raised.value)


# -- measuring ------------------------------------------------------------------------------------------------------


def test_everybody_takes_turns() -> None:
    """Everybody is measured once in each of three rounds, so that drift hits all alike, after one warm-up."""
    first, second = (Contestant("collective", "wall", sms) for sms in (1, 2))
    operation = OPERATIONS[0]
    order: list[int | None] = []

    def sampler(maker: measure.CallMaker, each: Series) -> Any:
        return lambda: order.append(each.contestant.num_sms) or float(len(order))

    context: Any = SimpleNamespace(rank=0, report=lambda event: None)
    with (
        mock.patch.object(measure, "make_inputs", return_value=None),
        mock.patch.object(measure.CallMaker, "sampler", sampler),
    ):
        found = measure.measure_on_rank(context, [Series(SHAPE, operation, each) for each in (first, second)], 10)
    # Warm-up 2, rounds of 3, 3 and 4, each but the first after one call that does not count.
    turns = [1] * 5 + [2] * 5 + ([1] * 4 + [2] * 4) + ([1] * 5 + [2] * 5)
    assert order == turns
    assert found[0] == [3, 4, 5, 12, 13, 14, 20, 21, 22, 23]
    assert [len(times) for times in found] == [10, 10]


def measured_on_rank(context: RankContext, planned: list[Series]) -> list[list[float]]:
    return measure.measure_on_rank(context, planned, 3)


@pytest.mark.alone
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
        maker = measure.CallMaker(context, given, stack)
        nvlink = Contestant("nvlink", "graph", 8)
        for layout in cases.LAYOUTS:
            call = maker.prepared_call(Series(SHAPE, Operation("dispatch", "bf16", layout), nvlink))
            results: list[Any] = []

            def kept(call: Any = call, results: list[Any] = results) -> None:
                results[:] = [call()]

            timing.warm_up(kept)
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
        planned = [Series(SHAPE, each, who) for each in deep_ep.OPERATIONS]
        with ExitStack() as stack:
            maker = measure.CallMaker(context, given, stack)
            bf16, fp8, home = (maker.prepared_call(each)()[0] for each in planned)
        described = [bf16.dtype, [part.dtype for part in fp8], home.dtype]
        return described, [len(times) for times in measure.measure_on_rank(context, planned, 4)]


def test_deep_ep_is_called_as_it_wants(ranks: Ranks) -> None:
    """Its arguments by name, int64 ids, FP8 as values and scales, BF16 home, a buffer of the size it hints at that is
    destroyed in the end: a stand-in for it checks them. What the true one does needs it, and GPUs."""
    if ranks.num_ranks == 1:
        pytest.skip("it has no group of one rank")
    for described, counts in ranks.run(deep_ep_on_rank):
        assert described == [torch.bfloat16, [torch.float8_e4m3fn, torch.float32], torch.bfloat16]
        assert counts == [4, 4, 4]
