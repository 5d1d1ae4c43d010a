"""What ``tokenloom bench comm`` measures, and the bytes that it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.bench.fake_deep_ep import SHAPE, FakeBuffer, fake_deep_ep, no_deep_ep
from tests.conftest import Ranks
from tokenloom.backends import registry
from tokenloom.backends.seam import Capabilities
from tokenloom.bench import comm_work
from tokenloom.bench.comm import CallMaker
from tokenloom.bench.comm_work import OPERATIONS, CallSeries, Who
from tokenloom.bench.rivals import deep_ep
from tokenloom.bench.workload import CallSizes, Operation, make_inputs
from tokenloom.plan import LAYOUTS, Plan
from tokenloom.runtime.processes import RankContext, RankPool

OURS = ("collective", "wall")


# -- bytes ----------------------------------------------------------------------------------------------------------


def draw_ids(plan: Plan, seed: int) -> list[torch.Tensor]:
    """[T, K] of each rank, with unused places and repeated experts. Numbers of tokens differ; rank 1 has none."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = torch.randint(1, plan.max_tokens_per_rank, (plan.num_ranks,), generator=generator)
    num_tokens[1:2] = 0
    return [torch.randint(-1, plan.num_experts, (t, plan.top_k), generator=generator) for t in num_tokens.tolist()]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("payload", comm_work.PAYLOADS)
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
    out_values = {"bf16": 512, "fp8": 256, "to_fp8": 256}[payload] if name != "combine" else 0
    sent, values, received = [0] * num_ranks, [0] * num_ranks, [0] * num_ranks
    for source, _, rank in crossed:
        if rank != source:
            sent[source] += out_bytes
            values[source] += out_values
            sent[rank] += home_bytes
            values[rank] += home_bytes
        received[rank] += out_bytes
        received[source] += home_bytes
    moved = comm_work.moved(plan, comm_work.count_rows(plan, ids), Operation(name, payload, "token"))
    assert moved == comm_work.Traffic(max(sent), max(values), max(received))


def bytes_sent_on_rank(context: RankContext, who: Who) -> dict[Operation, int]:
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
        maker = CallMaker(context, make_inputs(context, SHAPE), stack)
        for operation in OPERATIONS:
            call = maker.call(CallSeries(SHAPE, operation, *who))
            sent = 0
            with mock.patch.object(dist, "all_to_all_single", counting):
                call()
            found[operation] = sent
    return found


@pytest.mark.parametrize("timing_", ["wall", "graph"])
def test_traffic_is_what_the_backend_sends(ranks: Ranks, timing_: Any) -> None:
    """Physical bytes are those that cross, counted at the collective itself, not those of a formula.

    The bounded sizes of a graph hold all rows of this routing, and no more of them cross."""
    by_rank = ranks.run(bytes_sent_on_rank, ("collective", timing_, None, None))
    plan = SHAPE.plan(ranks.num_ranks)
    counted = comm_work.count_rows(plan, [SHAPE.topk_ids(rank) for rank in range(ranks.num_ranks)])
    for operation in OPERATIONS:
        measured = max(sent[operation] for sent in by_rank)
        assert measured == comm_work.moved(plan, counted, operation).physical_bytes, operation


def test_traffic_over_nodes_is_what_the_backend_sends(pools: Callable[[str], RankPool]) -> None:
    """On two nodes ranks hand rows on: in a dispatch, a row for each (token, node) crosses, with flags."""
    by_rank = Ranks(pools("cpu"), 4).run(bytes_sent_on_rank, ("network", "wall", None, 2))
    plan, ids = SHAPE.plan(4), [SHAPE.topk_ids(rank) for rank in range(4)]
    straight, over = comm_work.count_rows(plan, ids), comm_work.count_rows(plan, ids, 2)
    for operation in OPERATIONS:
        measured = max(sent[operation] for sent in by_rank)
        moved = comm_work.moved(plan, over, operation)
        assert measured == moved.physical_bytes, operation
        assert moved.logical_bytes == comm_work.moved(plan, straight, operation).logical_bytes


# -- what is measured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", comm_work.CASES, ids=lambda case: case.name)
def test_cases_are_sound(case: comm_work.Case) -> None:
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
    assert [shape.num_tokens for shape in comm_work.shapes_for([], "cpu")] == [256]
    assert comm_work.shapes_for([], "cuda") == [CallSizes(128, 7168, 8, 256), CallSizes(4096, 7168, 8, 256)]
    assert comm_work.shapes_for(["decode"], "cpu") == [CallSizes(128, 7168, 8, 256)]
    # Cases that differ in their tokens alone become one.
    swept = comm_work.shapes_for([], "cuda", [8, 16], hidden=512, top_k=None)
    assert swept == [CallSizes(8, 512, 8, 256), CallSizes(16, 512, 8, 256)]
    assert comm_work.shapes_for(["small"], "cpu", hidden=128, top_k=1, num_experts=4) == [CallSizes(64, 128, 1, 4)]


@contextmanager
def machine(nvlink: bool, layouts: tuple[str, ...] = LAYOUTS) -> Iterator[None]:
    """Make this a machine with, or without, Hopper GPUs, whose backend nvlink has these layouts."""
    able = {"nvlink": Capabilities(layouts, captures=True, takes_sms=True), "collective": Capabilities()}
    found = [
        registry.Availability("nvlink", nvlink, "own kernels" if nvlink else "it needs Hopper", "host"),
        registry.Availability("collective", True, "torch.distributed over nccl", "host"),
    ]
    with (
        mock.patch.object(registry, "availability", return_value=found),
        mock.patch.object(registry, "capabilities", able.get),
        mock.patch.object(registry, "names", return_value=tuple(able)),
    ):
        yield


def test_rows_on_hopper_gpus() -> None:
    """nvlink has all timings for every number of SMs, and its rivals are beside it at every operation. Eager rows are
    of pairs."""
    with machine(nvlink=True), no_deep_ep():
        planned, notes = comm_work.plan_series([SHAPE, CallSizes(8, 256, 2, 8)], 2, "cuda", num_sms=[8, 16])
    who = [
        ("nvlink", "events", 8),
        ("nvlink", "graph", 8),
        ("nvlink", "eager", 8),
        ("nvlink", "events", 16),
        ("nvlink", "graph", 16),
        ("nvlink", "eager", 16),
        ("collective", "events"),
        ("collective", "eager"),
    ]
    shapes = [SHAPE, CallSizes(8, 256, 2, 8)]
    # measure.py takes neighbours of one shape and operation together, and measures them in turns.
    assert planned == [
        CallSeries(shape, each, *one)
        for shape in shapes
        for each in OPERATIONS
        for one in who
        if one[1] != "eager" or each.name == "dispatch+combine"
    ]
    assert any("collective has no rows of CUDA graphs" in note for note in notes)
    assert any(note.startswith("deep_ep is not measured: ") for note in notes)
    assert len(notes) == 2, "each said once, however many shapes"


def test_rows_without_hopper_gpus() -> None:
    """There is no row of nvlink, but the reason that its backend gives."""
    with machine(nvlink=False), no_deep_ep():
        planned, notes = comm_work.plan_series([SHAPE], 2, "cuda")
    who = {("collective", timing) for timing in ("events", "eager")}
    assert {(each.backend, each.timing) for each in planned} == who
    assert "nvlink is not measured: it needs Hopper" in notes


def test_rows_on_cpus() -> None:
    """Rows are by the host's clock, and everybody who needs GPUs says so. Nothing is faked: this is the machine."""
    planned, notes = comm_work.plan_series([SHAPE], 2, "cpu")
    assert {(each.backend, each.timing) for each in planned} == {OURS, ("collective", "eager")}
    assert [note.split(":")[0] for note in notes] == [
        f"{name} is not measured" for name in ("nvlink", "network", "deep_ep")
    ]


def test_rows_with_spare_slots() -> None:
    """Of a backend that splits batches three stand beside each other; of one that does not two, and a line says so."""
    only_collective = mock.patch.object(comm_work, "splits_batches", lambda name: name == "collective")
    with machine(nvlink=True), fake_deep_ep(), only_collective:
        planned, notes = comm_work.plan_series([SHAPE], 2, "cuda", spare_slots=1)
    ends = {name: set[str]() for name in ("nvlink", "collective", "deep_ep")}
    for each in planned:
        ends[each.backend].add(each.name(2).partition(f"/{each.timing}")[2])
    replicas = {"", "/spare1"}
    assert ends == {"nvlink": replicas, "collective": {*replicas, "/spare1/batch"}, "deep_ep": {""}}
    assert [note for note in notes if "batch" in note] == ["nvlink splits no batches, so it has no rows per batch"]


def test_rows_of_halves() -> None:
    """Halves have the rows of graphs and of single calls. A loop of pairs has no place for a GEMM, a rival has no
    halves."""
    with machine(nvlink=True), fake_deep_ep():
        planned, notes = comm_work.plan_series([SHAPE], 2, "cuda", beside_us=50.0)
    assert {each.operation for each in planned} == set(OPERATIONS)
    assert {(each.backend, each.timing) for each in planned} == {
        ("nvlink", "events"),
        ("nvlink", "graph"),
        ("collective", "events"),
    }
    assert {each.beside_us for each in planned} == {50.0}
    assert planned[0].name(2) == "dispatch/nvlink/ep2/t40/h256/k2/bf16/token/events/halves"
    assert "deep_ep is not measured: its calls are measured by events alone, in one piece" in notes


def test_rows_of_one_clock() -> None:
    """Only what is asked for is measured: a run for one table need not take as long as one for all."""
    with machine(nvlink=True), fake_deep_ep():
        planned, notes = comm_work.plan_series([SHAPE], 2, "cuda", timings=["eager"])
    assert {each.timing for each in planned} == {"eager"}
    assert {each.operation.name for each in planned} == {"dispatch+combine"}
    assert not any("graphs" in note for note in notes), "nobody asked for graphs"


def test_a_layout_that_a_backend_lacks() -> None:
    """It has no rows, and a line says why; the other backend has them."""
    with machine(nvlink=True, layouts=("token", "rank")), no_deep_ep():
        planned, notes = comm_work.plan_series([SHAPE], 2, "cuda")
    with_slots = {each.backend for each in planned if each.operation.layout == "slots"}
    assert with_slots == {"collective"}
    assert "nvlink does not have layout expert, slots" in notes


def test_how_rows_call() -> None:
    """Sizes are exact by default, and bounded in graphs, which cannot read on the host, where the host's time counts,
    and in slots, which have no exact sizes. FP8 slots have scales as masked grouped GEMMs take them."""

    def of(payload: Any, layout: Any, timing: Any) -> CallSeries:
        return CallSeries(SHAPE, Operation("dispatch", payload, layout), "nvlink", timing)

    sizes = {timing: of("bf16", "expert", timing).sizes for timing in ("events", "wall", "graph", "eager")}
    assert sizes == {"events": "exact", "wall": "exact", "graph": "bounded", "eager": "bounded"}
    assert of("bf16", "slots", "events").sizes == "bounded"
    scales = [of(payload, "slots", "events").scale_layout for payload in comm_work.PAYLOADS]
    assert scales == [None, "columns", "columns"]
    assert of("fp8", "rank", "events").scale_layout is None


def test_rows_of_deep_ep() -> None:
    """Rows are what its normal mode has, with the SMs that it says it takes; where it cannot run, its own reason."""
    with machine(nvlink=False), fake_deep_ep():
        planned, _ = comm_work.plan_series([SHAPE], 2, "cuda", only=["deep_ep"])
        for_three = deep_ep.why_not("cuda", 3)
    assert [each.name(2) for each in planned] == [
        "dispatch/deep_ep/ep2/t40/h256/k2/bf16/token/events",
        "dispatch/deep_ep/ep2/t40/h256/k2/fp8/token/events",
        "combine/deep_ep/ep2/t40/h256/k2/bf16/token/events",
    ]
    assert {each.num_sms for each in planned} == {FakeBuffer.num_sms}
    assert for_three == "Unsupported number of EP ranks: 3"


def test_only_keeps_rows_by_their_names() -> None:
    """A row is kept if any of the parts is anywhere in its name."""
    planned, _ = comm_work.plan_series([SHAPE], 2, "cpu", only=["fp8/rank/wall", "slots/eager"])
    assert [each.name(2) for each in planned] == [
        "dispatch/collective/ep2/t40/h256/k2/fp8/rank/wall",
        "dispatch/collective/ep2/t40/h256/k2/to_fp8/rank/wall",
        "dispatch+combine/collective/ep2/t40/h256/k2/fp8/rank/wall",
        "dispatch+combine/collective/ep2/t40/h256/k2/fp8/slots/eager",
        "dispatch+combine/collective/ep2/t40/h256/k2/to_fp8/slots/eager",
    ]
    labelled, _ = comm_work.plan_series([SHAPE], 2, "cpu", only=["dispatch/collective/fp8/rank"])
    assert [each.name(2) for each in labelled] == ["dispatch/collective/ep2/t40/h256/k2/fp8/rank/wall"], (
        "as tables say"
    )
    odd, _ = comm_work.plan_series([CallSizes(8, 200, 2, 8)], 2, "cpu", only=["bf16"])
    assert odd, "a hidden size that FP8 does not take is fine where no row is FP8"
