"""One rank of several nodes, on a GPU. ``test_network_on_gpus.py`` starts a process of this for each.

The network is the card of host memory (tests/support/gin_loopback), which wants some care while any kernel waits: no
memory is freed, nobody waits for a whole device, and all modules are loaded at the start.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.kernels.gpu_communicator import communicator
from tests.kernels.gpu_lost_rank import loses_a_rank
from tests.kernels.network_calls import (
    CALL_WORDS,
    NOWHERE,
    CombineOfAll,
    DispatchOfAll,
    Form,
    Nodes,
    Own,
    Partials,
    Staging,
    region_for,
)
from tests.support.cases import FP8, Case, Problem, make_problem
from tokenloom.backends.nodes.gin_memory import GinMemory
from tokenloom.errors import PeerTimeout
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import PARTS
from tokenloom.kernels.common.rail import STATE_BYTES, TRAFFICS, Regions, chunk_rows
from tokenloom.kernels.signals.launch import SignalsVariant
from tokenloom.runtime.kernel_reports import CallRecords, FaultFlag
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import BufferLayout, SymmetricBuffer

LIMIT_S = 180
"""A process that is not done by then ends itself, with the stacks of its threads in its log."""
CALL_S = 20.0
TIMEOUT_S, SHORT_S, NOTICED_S = 5.0, 3.0, 5.0
"""Deadlines of waits, those where a rank makes no call, and by when the others have reported it."""
CALLS, REPLAYS, PROBLEMS, MEASURED = 20, 50, 5, 200
BLOCKS = 16

FORMS = {
    "slots": Form(Case("slots", "unequal tokens", hidden=128, tokens=(7, 0, 5, 6), top_k=4, unused=0.2), 2),
    "fp8": Form(Case("fp8", "rows with scales", hidden=256, tokens=(9, 3, 0, 5), top_k=5, dtype=FP8), 3),
    "to fp8": Form(Case("to fp8", "no weights", hidden=128, weights="absent", to_quantise=True), 1, "any scale"),
    "rank": Form(Case("rank", "fixed places", hidden=256, tokens=(3, 4, 0), top_k=3, dtype=FP8), 2, layout="rank"),
    "none": Form(Case("none", "no tokens at all", hidden=128, tokens=(0,))),
    "wide": Form(Case("wide", "real rows", hidden=7168, tokens=(64, 17, 0, 40), top_k=8, experts_per_rank=16), 4),
}


@dataclass(frozen=True)
class Options:
    """What a process is told.

    Attributes:
        scenario: "bits", "communicator" (by GIN), "padded" (by collectives), the call that the last rank does not
            make, "dispatch" or "combine", or what becomes of that rank, "late" or "gone" (backend "network").
        rank, num_ranks, ranks_per_node: which rank it is.
        folder: where ranks meet and leave results.
    """

    scenario: str
    rank: int
    num_ranks: int
    ranks_per_node: int
    folder: str


def specs_for(num_ranks: int, ranks_per_node: int, scenario: str) -> list[KernelSpec]:
    """All kernels that ranks launch, without NCCL's headers. Backend "network" makes its own."""
    if scenario in ("late", "gone"):
        return []
    problems = [(form, make_problem(form.case, num_ranks)) for form in FORMS.values()]
    variants = [each for form, problem in problems for each in form.variants(problem, ranks_per_node)]
    empty = Form(Case("empty", "what ranks with a fault open", weights="absent"))  # of communicators
    empties = [
        each for _, problem in problems for each in empty.variants(replace(problem, topk_weights=None), ranks_per_node)
    ]
    if scenario == "padded":
        halves = [part for part in PARTS if part != "whole"]
        return [
            replace(each, part=part, carrier="collective").spec() for each in variants + empties for part in halves
        ]
    specs = [replace(each, part=part).spec() for each in variants for part in PARTS]
    return [*specs, *(each.spec() for each in empties), SignalsVariant().spec()]


class Member:
    """A rank in the groups of all."""

    def __init__(self, options: Options) -> None:
        self.options, self.device = options, torch.device("cuda", options.rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{options.folder}/store",
            rank=options.rank,
            world_size=options.num_ranks,
            timeout=limit,
            device_id=self.device,
        )
        dist.all_reduce(torch.zeros(1, device=self.device))  # torch makes its communicator at the first
        self.host = dist.new_group(backend="gloo", timeout=limit)
        self.report: dict[str, Any] = {}

    def meet(self) -> None:
        """All ranks have come here, and what they launched before :meth:`wait` is over."""
        dist.barrier(group=self.host)

    def wait(self) -> None:
        """Wait for the end of this rank's work on its stream."""
        event, until = torch.cuda.Event(), time.monotonic() + CALL_S
        event.record()
        while not event.query():
            if time.monotonic() > until:
                raise TimeoutError(f"kernels of rank {self.options.rank} go on after {CALL_S} s")
            time.sleep(5e-5)


class Rank(Member):
    """What a process has for all of its calls of kernels."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        size, limit = options.ranks_per_node, timedelta(seconds=LIMIT_S)
        firsts = range(0, options.num_ranks, size)
        groups = [dist.new_group(list(range(first, first + size)), backend="gloo", timeout=limit) for first in firsts]
        self.neighbours = RankGroup(groups[options.rank // size], device=self.device)
        self.first = options.rank // size * size
        num_nodes, window_bytes = options.num_ranks // size, 0
        for form in FORMS.values():
            problem = make_problem(form.case, options.num_ranks)
            region = region_for(*form.variants(problem, size))
            rows = chunk_rows(problem.plan, form.chunks)
            window_bytes = max(window_bytes, Regions(num_nodes, region, form.chunks, rows).window_bytes)
        ranks = RankGroup(dist.group.WORLD, device=self.device)
        self.gin = GinMemory(ranks, window_bytes, contexts=TRAFFICS, signals=num_nodes, state_bytes=STATE_BYTES)
        self.fault, self.records = FaultFlag(self.device, options.rank), CallRecords(self.device, 1)
        self.state = torch.zeros(CALL_WORDS, dtype=torch.int32, device=self.device)
        self._kernels: dict[KernelSpec, Kernel] = {}

    def kernel(self, spec: KernelSpec) -> Kernel:
        """The kernel behind NCCL's headers, loaded when it is first asked for."""
        if spec not in self._kernels:
            self._kernels[spec] = Kernel(spec.behind(self.gin.prelude), self.device.index)
        return self._kernels[spec]

    def finish(self) -> None:
        """Wait for the end of this rank's calls."""
        self.wait()
        error = self.fault.error()
        if error is not None:
            raise error
        outcome = self.records.take(0)
        assert outcome is None, outcome


class GpuNodes(Nodes):
    """This rank among all, for one form of calls."""

    def __init__(self, rank: Rank, form: Form, timeout_s: float = TIMEOUT_S) -> None:
        problem, size = make_problem(form.case, rank.options.num_ranks), rank.options.ranks_per_node
        self.form, self.me = form, rank
        self.dispatches, self.combines = form.variants(problem, size)
        number = rank.options.rank
        super().__init__(
            problem,
            size,
            form.chunks,
            region_for(self.dispatches, self.combines),
            ranks=range(number, number + 1),
            device=str(rank.device),
            blocks=BLOCKS,
            timeout_ns=int(timeout_s * 1e9),
        )
        self._kept: list[Any] = []
        self._control = self.shared(self.layout.total_bytes)
        for variant in (self.dispatches, self.combines):
            rank.kernel(variant.spec())
        self.own = {
            number: Own(
                control=self._control[number].data_ptr(),
                state=rank.state.data_ptr(),
                record=rank.records.address(0),
                fault=rank.fault.record_address,
                fault_claimed=rank.fault.claimed.data_ptr(),
                comm=rank.gin.comm,
                window=rank.gin.window,
                base=rank.gin.address,
                rail=rank.gin.state,
            )
        }
        self.staging, self.partials = Staging(self, 4), Partials(self, self.combines)

    def shared(self, num_bytes: int) -> dict[int, torch.Tensor]:
        buffer = SymmetricBuffer(BufferLayout.of([("all", num_bytes)]), self.me.neighbours)
        self._kept.append(buffer)
        table = [NOWHERE] * self.plan.num_ranks
        table[self.me.first : self.me.first + self.ranks_per_node] = buffer.addresses
        return {self.me.options.rank: torch.tensor(table, dtype=torch.int64, device=self.device)}

    def launch(self, rank: int, spec: KernelSpec, args: Any) -> None:
        kernel = self.me.kernel(spec)
        ctypes.memmove(ctypes.addressof(kernel.args), ctypes.addressof(args), ctypes.sizeof(args))
        kernel.launch(self.blocks, torch.cuda.current_stream().cuda_stream)

    def another(self, seed: int) -> Problem:
        """Other values and another routing, of the same sizes."""
        return make_problem(replace(self.form.case, seed=seed), self.plan.num_ranks)

    def calls(self, seed: int, capacity: int | None = None) -> tuple[DispatchOfAll, CombineOfAll]:
        """A dispatch and the combine behind it, not launched."""
        dispatch = DispatchOfAll(self, self.dispatches, capacity, self.another(seed))
        return dispatch, CombineOfAll(dispatch, self.combines)


def back_to_back(nodes: GpuNodes, calls: int) -> None:
    """Dispatches and combines with new routing in each, and no host between them."""
    pairs = [nodes.calls(seed) for seed in range(calls)]
    nodes.me.meet()
    for dispatch, combine in pairs:
        dispatch.launch(nodes.staging)
        combine.launch(nodes.partials)
    nodes.me.finish()
    for pair in pairs:
        for call in pair:
            call.check()
    nodes.me.meet()


def replayed(nodes: GpuNodes) -> None:
    """A graph of both, replayed with the routing changed in place."""
    problems = [nodes.another(seed) for seed in range(100, 100 + PROBLEMS)]
    capacity = max(problem.rows_needed("slots") for problem in problems)
    dispatch, combine = nodes.calls(99, max(capacity, nodes.another(99).rows_needed("slots")))
    graph = captured(nodes, lambda: (dispatch.launch(nodes.staging), combine.launch(nodes.partials)))
    for number in range(REPLAYS):
        dispatch.replace(problems[number % PROBLEMS])
        combine.follow()
        graph.replay()
        nodes.me.finish()
        dispatch.check()
        combine.check()
    nodes.me.meet()


def captured(nodes: GpuNodes, launch: Any) -> torch.cuda.CUDAGraph:
    """A graph of some launches, which were made once before it."""
    launch()
    nodes.me.finish()
    nodes.me.meet()  # a capture begins with a wait for the device, and frees memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads go on meanwhile
        launch()
    nodes.me.meet()
    return graph


def measured(nodes: GpuNodes) -> None:
    """Medians of times, of replayed graphs of one call each."""
    dispatch, combine = nodes.calls(7)
    graphs = [
        captured(nodes, lambda: dispatch.launch(nodes.staging)),
        captured(nodes, lambda: combine.launch(nodes.partials)),
    ]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(MEASURED)]
    nodes.me.meet()
    for begun, between, ended in events:
        begun.record()
        graphs[0].replay()
        between.record()
        graphs[1].replay()
        ended.record()
    nodes.me.finish()
    dispatch.check()
    combine.check()
    for number, kind in enumerate(("dispatch", "combine")):
        times = [each[number].elapsed_time(each[number + 1]) * 1000 for each in events]
        nodes.me.report[f"{kind}, {nodes.form.case.name}: median us"] = statistics.median(times)
    nodes.me.meet()


def bits(rank: Rank) -> None:
    """All forms alone, then many calls, graphs and times."""
    nodes = {name: GpuNodes(rank, form) for name, form in FORMS.items()}
    for name, each in nodes.items():
        back_to_back(each, CALLS if name in ("slots", "fp8", "rank") else 2)
    for name in ("slots", "fp8"):
        replayed(nodes[name])
    measured(nodes["wide"])
    rank.meet()
    assert rank.gin.close(), "memory of the network was not given back"


def one_is_missing(rank: Rank) -> None:
    """The last rank does not make a call. All others leave theirs at the deadline, and reports lead to it."""
    nodes, missing = GpuNodes(rank, FORMS["slots"], SHORT_S), rank.options.num_ranks - 1
    first, combine = nodes.calls(0)
    second = DispatchOfAll(nodes, nodes.dispatches)
    first.launch(nodes.staging)
    rank.finish()
    first.check()
    rank.meet()
    mine: dict[str, Any] = {}
    if rank.options.rank != missing:
        began = time.monotonic()
        try:
            if rank.options.scenario == "dispatch":
                second.launch(nodes.staging)
            else:
                combine.launch(nodes.partials)
            rank.finish()
        except PeerTimeout as error:
            mine = {"peers": list(error.peers), "phase": error.phase, "after_s": time.monotonic() - began}
    reports: list[Any] = [None] * rank.options.num_ranks
    dist.all_gather_object(reports, mine, group=rank.host)
    rank.report["reports"] = reports
    heard = {number: each for number, each in enumerate(reports) if number != missing}
    assert all(heard.values()), f"ranks have noticed nothing: {reports}"
    assert all(each["after_s"] < NOTICED_S for each in heard.values()), reports
    named = {peer for each in heard.values() for peer in each["peers"]}
    assert missing in named, reports
    if rank.options.rank != missing:
        if rank.options.scenario == "dispatch":
            assert all(int(out.counts[0]) == 0 for out in second.out.values()), "rows of a dispatch that is not whole"
        else:
            assert all(bool(out.isnan().all()) for out in combine.outs.values()), "sums that are not whole"
    rank.gin.keep()
    assert not rank.gin.close()
    rank.meet()  # over gloo: NCCL's part is not asked any more
    dist.distributed_c10d._abort_process_group(dist.group.WORLD)
    rank.gin.free_after_abort()


def main() -> None:
    """A rank, from its first call to its end."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    options = Options(**json.loads(sys.argv[1]))
    torch.set_num_threads(2)  # ranks compute references side by side
    gc.disable()  # a finalizer may free memory while a kernel waits
    rank: Member
    if options.scenario in ("communicator", "padded"):
        rank = Member(options)
        communicator(rank, {name: (FORMS[name].case, FORMS[name].layout) for name in ("slots", "fp8", "rank")})
    elif options.scenario in ("late", "gone"):
        rank = Member(options)
        loses_a_rank(rank)
    else:
        rank = own = Rank(options)
        (bits if options.scenario == "bits" else one_is_missing)(own)
    result = Path(options.folder, f"result{options.rank}")
    result.with_suffix(".part").write_text(json.dumps(rank.report))
    result.with_suffix(".part").rename(result)
    sys.stdout.flush()
    os._exit(0)  # communicators of ranks that end one after the other wait for each other


if __name__ == "__main__":
    main()
