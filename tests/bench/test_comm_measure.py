"""How ``tokenloom bench comm`` takes its samples: turns, clocks, eager pairs, halves, and rivals."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.bench.fake_deep_ep import SHAPE, fake_deep_ep
from tests.conftest import Ranks
from tests.support.on_ranks import on_ranks
from tokenloom.bench import clock, comm, comm_work
from tokenloom.bench.comm import CallMaker, Gemm
from tokenloom.bench.comm_work import OPERATIONS, CallSeries
from tokenloom.bench.harness import Measured, Sample
from tokenloom.bench.rivals import deep_ep
from tokenloom.bench.workload import Operation, make_inputs
from tokenloom.runtime.processes import RankContext


@pytest.mark.parametrize("backend", ["network", "collective"])
def test_rows_of_nodes_count_what_is_handed_on(backend: str) -> None:
    """On backend network; others send straight to ranks. The row says how many ranks a node has."""
    operation = OPERATIONS[0]
    pool: Any = SimpleNamespace(
        num_ranks=4, device="cpu", run=lambda *arguments, **options: [[Measured({"call": [10.0]})]] * 4
    )
    planned = [CallSeries(SHAPE, operation, backend, "wall", ranks_per_node=2)]
    (row,) = comm.measure(pool, planned, 3)
    assert row.setup["ranks_per_node"] == 2
    plan, ids = SHAPE.plan(4), [SHAPE.topk_ids(rank) for rank in range(4)]
    rows = comm_work.count_rows(plan, ids, 2 if backend == "network" else None)
    moved = comm_work.moved(plan, rows, operation)
    assert row.setup["physical_bytes"] == moved.physical_bytes


class Slow:
    """A call whose parts take a known time, and that remembers what was asked of it."""

    DISPATCH_S, COMBINE_S = 0.004, 0.001

    def __init__(self) -> None:
        self.done: list[Any] = []

    def __call__(self) -> None:
        self.combine(self.dispatch())

    def dispatch(self) -> int:
        time.sleep(self.DISPATCH_S)
        self.done.append("dispatch")
        return len(self.done)

    def combine(self, routed: int) -> None:
        time.sleep(self.COMBINE_S)
        self.done.append(("combine", routed))


def eager_on_rank(context: RankContext) -> tuple[Sample, list[Any]]:
    call: Any = Slow()
    return comm.eager_sample(context, call), call.done


def test_an_eager_sample_has_three_clocks(ranks: Ranks) -> None:
    """A pair is one of a loop, in which every combine is of the dispatch before it; the host's times are of one call
    each. A call that only waits has known times: at least those, and a host that is busy makes them longer."""
    if ranks.device != "cpu":
        pytest.skip("times on the host are the same there")
    for sample, done in ranks.run(eager_on_rank):
        assert sample.keys() == {"call", "host_dispatch", "host_combine"}
        pairs = comm.EAGER_PAIRS["cpu"] + 1
        assert done == [each for n in range(pairs) for each in ("dispatch", ("combine", 2 * n + 1))]
        assert 5e3 <= sample["call"] < 5e5
        assert 4e3 <= sample["host_dispatch"] < 5e5
        assert 1e3 <= sample["host_combine"] < 5e5


def test_halves_are_around_the_work() -> None:
    """Samples of halves are of three: sent, work and received, in this order; the work alone; one piece, then work."""
    done: list[str] = []

    class Call:
        def __call__(self) -> None:
            done.append("one piece")

        def send(self) -> list[Any]:
            done.append("send")
            return [SimpleNamespace(receive=lambda: done.append("receive"))] * 2

    context: Any = SimpleNamespace(device=torch.device("cpu"), group=None)
    maker: Any = SimpleNamespace(ours=lambda each: Call())
    planned = CallSeries(SHAPE, OPERATIONS[0], "collective", "wall", beside_us=7.0)
    with mock.patch.object(comm, "Gemm", lambda context, us: lambda: done.append(f"work of {us:g}")):
        sample = comm.make_sampler(context, maker, planned)()
    assert done == ["send", "work of 7", "receive", "receive", "work of 7", "one piece", "work of 7"]
    assert sample.keys() == {"call", "work", "one_piece"}
    assert all(us > 0 for us in sample.values())


def gemm_rows_on_rank(context: RankContext) -> list[int]:
    made = [Gemm(context, us) for us in (1.0, 1e4)]
    for each in made:
        each()
    return [each.rows for each in made]


def test_a_gemm_is_as_long_as_asked_for(ranks: Ranks) -> None:
    """More microseconds are more rows, as many on all ranks: else the slowest rank's GEMM would look exposed."""
    by_rank = ranks.run(gemm_rows_on_rank)
    short, long = by_rank[0]
    assert 1 <= short < long
    assert by_rank == [[short, long]] * ranks.num_ranks


def measured_on_rank(context: RankContext, planned: list[CallSeries]) -> list[Measured]:
    return comm.measure_on_rank(context, planned, 3)


def assert_plausible(planned: list[CallSeries], by_rank: list[list[Measured]]) -> None:
    """Three samples each, with the parts of their kind, of more than nothing and less than a second."""
    for found in by_rank:
        for each, measured in zip(planned, found, strict=True):
            parts = {"work", "one_piece"} if each.beside_us is not None else set()
            if each.timing == "eager":
                parts = {"host_dispatch", "host_combine"}
            assert measured.samples.keys() == {"call", *parts}
            for times in measured.samples.values():
                assert len(times) == 3
                assert all(0 < us < 1e6 for us in times), each


@pytest.mark.slow
@pytest.mark.slow_on(4)
def test_halves_of_every_operation(ranks: Ranks) -> None:
    """Dispatches, combines, and both at once as of two micro-batches, in every layout, with real calls."""
    if ranks.device != "cpu":
        pytest.skip("test_calls_and_graphs_on_gpus has more of it")
    planned, _ = comm_work.plan_series([SHAPE], ranks.num_ranks, "cpu", beside_us=50.0)
    assert {each.operation for each in planned} == set(OPERATIONS)
    assert_plausible(planned, ranks.run(measured_on_rank, planned))


@pytest.mark.alone
@pytest.mark.parametrize("beside_us", [None, 30.0])
@pytest.mark.parametrize("backend", ["nvlink"])
def test_calls_and_graphs_on_gpus(ranks: Ranks, backend: str, beside_us: float | None) -> None:
    """Every operation over nvlink in all timings, beside collective, in one run: each captures, replays, and leaves
    nothing behind that check would raise."""
    wanted = [backend, "collective"]
    planned, _ = comm_work.plan_series([SHAPE], ranks.num_ranks, "cuda", wanted, [4, 16], beside_us=beside_us)
    timings = {each.timing for each in planned if each.backend == backend}
    assert timings == {"events", "graph", "eager"} - ({"eager"} if beside_us else set())
    assert_plausible(planned, ranks.run(measured_on_rank, planned))


@pytest.mark.parametrize("backend", ["nvlink"])
@on_ranks
def test_a_replay_does_the_work(context: RankContext, backend: str) -> None:
    """What is timed really dispatches: rows that were wiped before the replay are there after it."""
    with ExitStack() as stack, torch.no_grad():
        given = make_inputs(context, SHAPE)
        maker = CallMaker(context, given, stack)
        for layout in comm_work.LAYOUTS:
            nvlink = CallSeries(SHAPE, Operation("dispatch", "bf16", layout), "nvlink", "graph", 8)
            call = maker.call(nvlink)
            results: list[Any] = []

            def kept(call: Any = call, results: list[Any] = results) -> None:
                results[:] = [call()]

            clock.warm_up(kept)
            want_rows, want_counts = results[0].tokens.clone(), results[0].source_counts.tolist()
            graph = clock.capture(kept)
            results[0].tokens.zero_()
            clock.one_replay(context, graph)
            maker.check(nvlink)
            (last,) = results
            assert last.source_counts.tolist() == want_counts
            rows_here = int(last.num_rows)
            if layout == "rank":
                for source, count in enumerate(want_counts):
                    assert torch.equal(last.tokens[source, :count], want_rows[source, :count])
            elif layout == "slots":
                for expert, count in enumerate(last.expert_counts.tolist()):
                    assert torch.equal(last.tokens[expert, :count], want_rows[expert, :count])
            else:
                assert torch.equal(last.tokens[:rows_here], want_rows[:rows_here])
            if layout == "expert":
                assert rows_here <= given.expert_rows == len(last.tokens)


def deep_ep_on_rank(context: RankContext) -> tuple[list[Any], list[int]]:
    """What its operations return, described, and how many samples each of them has when it is measured."""
    with fake_deep_ep(), torch.no_grad():
        given = make_inputs(context, SHAPE)
        planned = [CallSeries(SHAPE, each, "deep_ep", "wall") for each in deep_ep.OPERATIONS]
        with ExitStack() as stack:
            maker = CallMaker(context, given, stack)
            bf16, fp8, home = (maker.call(each)()[0] for each in planned)
        described = [bf16.dtype, [part.dtype for part in fp8], home.dtype]
        return described, [len(each.samples["call"]) for each in comm.measure_on_rank(context, planned, 4)]


def test_deep_ep_is_called_as_it_wants(ranks: Ranks) -> None:
    """Its arguments by name, int64 ids, FP8 as values and scales, BF16 home, a buffer of the size it hints at that is
    destroyed in the end: a stand-in for it checks them. What the true one does needs it, and GPUs."""
    if ranks.num_ranks == 1:
        pytest.skip("it has no group of one rank")
    for described, counts in ranks.run(deep_ep_on_rank):
        assert described == [torch.bfloat16, [torch.float8_e4m3fn, torch.float32], torch.bfloat16]
        assert counts == [4, 4, 4]
