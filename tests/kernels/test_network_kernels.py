"""Kernels between nodes: with NCCL's headers they compile for Hopper, on the emulator they give the reference's bits.

The emulator's network delays payloads and signals, and orders them as little as NCCL promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.kernels.emulated_nodes import FOREVER_NS, EmulatedNodes
from tests.kernels.network_calls import CombineOfAll, DispatchOfAll, Form, Partials, Staging, region_for
from tests.support.cases import BF16, FP8, FP32, Case, make_problem
from tests.support.emulator import CXX
from tests.support.nccl_wheels import headers_of
from tests.support.small_kernels import needs_nvrtc
from tokenloom.errors import InvalidArgument
from tokenloom.jit.compiler import KernelSpec, Resources, compile_kernel
from tokenloom.kernels.combine.launch_network import CombineNetworkVariant
from tokenloom.kernels.common import MAX_BLOCKS, MAX_SHARED_BYTES, TURNS, Variant
from tokenloom.kernels.common.rail import COUNT_BYTES, MOST_CHUNKS, STATE_BYTES, TRAFFICS, Rail, Regions, chunk_rows
from tokenloom.kernels.dispatch.launch_network import DispatchNetworkVariant
from tokenloom.kernels.signals.launch import SignalsVariant
from tokenloom.plan import Plan

EXPERIMENTAL = True

needs_cxx = pytest.mark.skipif(CXX is None, reason="no g++")
LARGE = Plan(32, 256, 7168, 8, 64)
MANY = Plan(16, 256, 7168, 8, 4096)
PATIENCE_NS = 400_000
"""Of waits for ranks that make all calls."""


@dataclass(frozen=True)
class Nodes:
    """Nodes, and how calls go between them."""

    form: Form
    num_ranks: int
    ranks_per_node: int
    capacity: int | None = None


def case(name: str, why: str, hidden: int = 16, **options: Any) -> Case:
    return Case(name, why, hidden=hidden, **options)


CASES = {
    "2x2": Nodes(Form(case("2x2", "unequal tokens", 128, tokens=(7, 0, 5, 6), top_k=4, unused=0.2), 2), 4, 2),
    "3x2": Nodes(Form(case("3x2", "two other nodes", 256, tokens=(9, 3, 5, 6, 0, 4), top_k=5, dtype=FP8), 3), 6, 2),
    "2x1": Nodes(Form(case("2x1", "no neighbours", 128, weights="absent", to_quantise=True), 1, "any scale"), 2, 1),
    "4x1": Nodes(Form(case("4x1", "one token in a chunk", tokens=(4, 1, 3, 0), spare=0, dtype=FP32), 4), 4, 1),
    "rank": Nodes(Form(case("rank", "fixed places", 256, tokens=(3, 4, 0), dtype=FP8), 2, layout="rank"), 6, 2),
    "full": Nodes(Form(case("full", "places run out", tokens=(40, 33), pick="repeats"), 2), 4, 2, capacity=9),
}


class Group:
    """Ranks with the buffers and kernels of a case."""

    def __init__(self, name: str, seed: int, **options: int) -> None:
        given = self.given = CASES[name]
        form, size = given.form, given.ranks_per_node
        problem = make_problem(form.case, given.num_ranks)
        self.dispatches, self.combines = form.variants(problem, size, FP32 if name == "2x2" else None)
        region = region_for(self.dispatches, self.combines)
        self.nodes = EmulatedNodes(problem, size, form.chunks, seed, region, **options)
        self.staging, self.partials = Staging(self.nodes, 4), Partials(self.nodes, self.combines)

    def dispatch(self, skip: int = -1, seed: int = 0) -> DispatchOfAll:
        """One call, on its way; other seeds than 0 are of other rows and routes."""
        problem = make_problem(replace(self.given.form.case, seed=seed), self.given.num_ranks) if seed else None
        call = DispatchOfAll(self.nodes, self.dispatches, self.given.capacity, problem)
        call.launch(self.staging, [rank for rank in self.nodes.ranks if rank != skip])
        return call

    def combine(self, dispatch: DispatchOfAll, skip: int = -1, **options: Any) -> CombineOfAll:
        """One call, on its way."""
        call = CombineOfAll(dispatch, self.combines, **options)
        call.launch(self.partials, [rank for rank in self.nodes.ranks if rank != skip])
        return call

    def second_node_late(self, *calls: DispatchOfAll | CombineOfAll) -> None:
        """Of two nodes: all calls of the first are on their way long before those of the other begin."""
        size = self.nodes.ranks_per_node
        for ranks in (range(size), range(size, 2 * size)):
            for call in calls:
                if isinstance(call, DispatchOfAll):
                    call.launch(self.staging, ranks)
                else:
                    call.launch(self.partials, ranks)
            self.nodes.emulator.run(3 * PATIENCE_NS)
        self.nodes.finish()


@pytest.mark.slow
@needs_cxx
@pytest.mark.parametrize("name", CASES)
def test_calls_back_to_back(name: str) -> None:
    """More than there are regions, of both kinds in turns, without a host between them. Each has its own outputs, with
    the reference's bits.
    """
    for seed in range(2):
        group = Group(name, seed)
        first, second = group.dispatch(), group.dispatch()
        calls = [first, second, group.combine(first), group.combine(second), group.combine(first)]
        last = group.dispatch()
        calls += [last, group.combine(last), group.combine(second)]
        group.nodes.finish()
        for call in calls:
            call.check()
        peers, chunks = group.nodes.nodes - 1, group.nodes.chunks
        for words in group.nodes.signals:
            signals = words.view(torch.int64).view(-1, group.nodes.nodes).sum(1)
            assert signals.tolist() == [3 * chunks * peers, 5 * chunks * peers, 0, 0]


@needs_cxx
@pytest.mark.parametrize("slow", ["network", "rank"])
def test_calls_at_other_speeds(slow: str) -> None:
    """Chunks arrive long after each other, and a rank still reads what earlier calls have brought when later ones are
    put.
    """
    group = Group("2x2", 0, timeout_ns=20 * PATIENCE_NS)
    if slow == "network":
        group.nodes.emulator.slow_network(8192)
    else:
        group.nodes.emulator.slow_down(2, 30)
    dispatches = [group.dispatch(seed=seed) for seed in range(2 * TURNS)]
    calls = [*dispatches, *(group.combine(each) for each in dispatches)]
    group.nodes.finish()
    for call in calls:
        call.check()


@pytest.mark.slow
@needs_cxx
@pytest.mark.parametrize("missing", range(4))
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_rank_that_makes_no_call(kind: str, missing: int) -> None:
    """Every other rank leaves at its deadline, with a report; reports lead to the one that is missing."""
    group = Group("2x2", missing, timeout_ns=PATIENCE_NS)
    first = group.dispatch()
    group.nodes.finish()
    second = group.dispatch(skip=missing) if kind == "dispatch" else group.combine(first, skip=missing)
    group.nodes.finish(but=missing)
    first.check()
    faults = {rank: group.nodes.fault(rank) for rank in group.nodes.ranks if rank != missing}
    for rank, fault in faults.items():
        assert fault is not None, f"rank {rank} has noticed nothing"
        peer, _, epoch = fault
        assert epoch == 2
        assert peer == missing or faults[peer] is not None
    assert missing in {fault[0] for fault in faults.values() if fault}
    for rank in faults:
        if isinstance(second, DispatchOfAll):
            assert second.out[rank].counts[0] == 0, "results of a dispatch without rows"
        else:
            assert second.outs[rank].isnan().all()


@pytest.mark.slow
@needs_cxx
@pytest.mark.parametrize("name", ["2x2", "3x2"])
def test_a_combine_that_one_rank_cannot_make(name: str) -> None:
    """Ranks of other nodes hear of it by their rail: all results are NaN, all records name it, and nobody waits."""
    group = Group(name, 3)
    dispatch = group.dispatch()
    group.nodes.finish()
    refused = group.combine(dispatch, status={1: 5})
    after = group.combine(dispatch)
    group.nodes.finish()
    after.check()
    for rank, out in refused.outs.items():
        assert out.isnan().all()
        assert group.nodes.records[rank].tolist()[2:4] == [2, 5]


@pytest.mark.slow
@needs_cxx
def test_a_node_that_comes_late() -> None:
    """It has the time that a call has to open. Whoever refuses calls meanwhile, as many as there are regions, gets no
    further than others can bear.
    """
    group = Group("2x2", 5, timeout_ns=PATIENCE_NS)
    group.nodes.open_timeout_ns = FOREVER_NS
    dispatch = DispatchOfAll(group.nodes, group.dispatches)
    group.second_node_late(dispatch)
    dispatch.check()
    refused = [CombineOfAll(dispatch, group.combines, status={1: 5}) for _ in range(TURNS)]
    after = CombineOfAll(dispatch, group.combines)
    group.second_node_late(*refused, after)
    assert [group.nodes.fault(rank) for rank in group.nodes.ranks] == [None] * 4
    for call in refused:
        assert all(out.isnan().all() for out in call.outs.values())
    after.check()


@pytest.mark.slow
@needs_cxx
def test_nodes_that_mean_different_calls() -> None:
    """Nobody looks at rows of another dtype. All ranks refuse, and a combine of what is left adds nothing."""
    group = Group("2x2", 1)
    first = DispatchOfAll(group.nodes, group.dispatches)
    second = DispatchOfAll(group.nodes, replace(group.dispatches, quantize="any scale"))
    first.launch(group.staging, (0, 1))
    second.launch(group.staging, (2, 3))
    group.nodes.finish()
    first.out |= {rank: second.out[rank] for rank in (2, 3)}
    assert [int(out.counts[0]) for out in first.out.values()] == [0] * 4
    assert [int(record[4]) for record in group.nodes.records] == [3] * 4, "rank 2 is the first that differs"
    combined = group.combine(first)
    group.nodes.finish()
    assert not any(out.any() for out in combined.outs.values())


def test_chunks_leave_room_in_the_queue() -> None:
    """A put into a full queue blocks without a limit."""
    assert chunk_rows(LARGE, 7) == 10
    for chunks in (0, MOST_CHUNKS + 1):
        with pytest.raises(InvalidArgument, match=f"chunks is {chunks}, expected 1 to 7"):
            chunk_rows(LARGE, chunks)


def test_regions_fill_the_window() -> None:
    """One behind the other: a region that overlaps another is overwritten early, and a put past the end is lost."""
    regions, begins = Regions(num_nodes=3, region_bytes=256, chunks=2, chunk_rows=4), []
    for traffic in range(TRAFFICS):
        rail = Rail()
        regions.fill(rail, traffic, comm=1, window=2, base=3, state=1 << 40)
        for first in (rail.put_from, rail.put_to):
            begins += [first + (turn * 3 + node) * rail.region_bytes for turn in range(TURNS) for node in range(3)]
        assert (rail.comm, rail.window, rail.base, rail.chunks, rail.chunk_rows) == (1, 2, 3, 2, 4)
        assert rail.turn_bytes == 3 * 256
        assert (rail.counts, rail.blocks) == (1 << 40, (1 << 40) + TRAFFICS * COUNT_BYTES)
        assert rail.blocks + 4 * MAX_BLOCKS == (1 << 40) + STATE_BYTES
    assert begins == list(range(0, regions.window_bytes, 256))


VARIANTS: dict[str, Variant] = {
    str(variant): variant
    for variant in (
        DispatchNetworkVariant(LARGE, 8, x_dtype=BF16),
        DispatchNetworkVariant(LARGE, 4, layout="rank", x_dtype=BF16, quantize="any scale"),
        DispatchNetworkVariant(LARGE, 8, x_dtype=BF16, quantize="power of two", recipe="row"),
        CombineNetworkVariant(LARGE, 8, y_dtype=BF16, wire_dtype=BF16, out_dtype=BF16, weights="received"),
        CombineNetworkVariant(LARGE, 4, layout="rank", y_dtype=BF16, wire_dtype=FP32, out_dtype=BF16),
        *(DispatchNetworkVariant(LARGE, 8, x_dtype=BF16, part=part) for part in ("send", "receive")),
        *(DispatchNetworkVariant(MANY, 8, layout=layout, x_dtype=BF16) for layout in ("token", "expert")),
        CombineNetworkVariant(MANY, 8, layout="token", y_dtype=BF16, wire_dtype=BF16, out_dtype=BF16),
        CombineNetworkVariant(MANY, 8, layout="token", y_dtype=FP32, wire_dtype=FP32, out_dtype=FP32, hidden=8),
        *(
            CombineNetworkVariant(
                LARGE, 8, y_dtype=BF16, wire_dtype=BF16, out_dtype=BF16, weights="received", part=part
            )
            for part in ("send", "receive")
        ),
        SignalsVariant(),
    )
}


WITHOUT_NCCL: dict[str, Variant] = {
    str(variant): variant
    for part in ("send", "receive")
    for variant in (
        DispatchNetworkVariant(LARGE, 8, x_dtype=BF16, part=part, carrier="collective"),
        DispatchNetworkVariant(
            LARGE, 4, layout="rank", x_dtype=BF16, quantize="any scale", part=part, carrier="collective"
        ),
        DispatchNetworkVariant(MANY, 8, layout="token", x_dtype=BF16, part=part, carrier="collective"),
        CombineNetworkVariant(
            LARGE,
            8,
            y_dtype=BF16,
            wire_dtype=BF16,
            out_dtype=BF16,
            weights="received",
            part=part,
            carrier="collective",
        ),
    )
}


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("name", VARIANTS)
def test_it_compiles_with_the_headers_of_nccl(name: str) -> None:
    """Those of the oldest version. Later ones gave the same."""
    compiles(VARIANTS[name].spec().behind(headers_of("2.28.9").prelude()))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("name", WITHOUT_NCCL)
def test_it_compiles_without_them(name: str) -> None:
    """Where a collective carries regions."""
    compiles(WITHOUT_NCCL[name].spec())


def compiles(spec: KernelSpec) -> None:
    """No spill, no stack, no warning, and it fits on an SM."""
    _, log = compile_kernel(spec)
    needs = Resources.from_log(log)
    assert "warning" not in log.lower(), log
    assert (needs.stack_bytes, needs.spill_bytes) == (0, 0), log
    assert needs.registers * spec.threads <= 65536
    assert needs.static_shared_bytes + spec.shared_bytes <= MAX_SHARED_BYTES
