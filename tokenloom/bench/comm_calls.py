"""What a rank does for ``tokenloom bench comm``: makes the calls of all series, and lets them take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.backends import registry
from tokenloom.bench import clock
from tokenloom.bench.comm_work import Series
from tokenloom.bench.harness import Contestant, Measured, Sample, take_turns
from tokenloom.bench.rivals import deep_ep
from tokenloom.bench.workload import Inputs, expert_outputs, make_inputs
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.engine import Pending
from tokenloom.comm.routed import Routed
from tokenloom.runtime.processes import RankContext

TRIALS = 3
TRIAL_ROWS = {"cpu": 256, "cuda": 8192}
WIDTHS = {"cpu": 256, "cuda": 4096}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROW_STEP = {"cpu": 1, "cuda": 128}
"""Rows of a tile of cuBLAS: fewer take as long."""
EAGER_PAIRS = {"cpu": 2, "cuda": 50}
"""Pairs of an eager sample. The wait for the GPU at its end is shared among them."""


class OurCall:
    """An operation of one of our backends, ready to be called again and again. Making one is collective.

    Args:
        comm: what makes the calls.
        series: which operation.
        inputs: what is sent.
    """

    def __init__(self, comm: Communicator, series: Series, inputs: Inputs) -> None:
        operation = series.operation
        self._comm = comm
        self._name = operation.name
        x = inputs.fp8 if operation.payload == "fp8" else inputs.x
        assert x is not None
        self._given = (x, inputs.ids, inputs.weights)
        self._options: dict[str, Any] = {"layout": operation.layout, "sizes": series.sizes}
        if operation.payload == "to_fp8":
            self._options["to_fp8"] = True
        if operation.layout == "slots":
            self._options["capacity"] = inputs.slot_rows
            if series.scale_layout is not None:
                self._options["scale_layout"] = series.scale_layout
        elif operation.layout == "expert" and series.sizes == "bounded":
            self._options["capacity"] = inputs.expert_rows
        self._before: Routed | None = None
        if "combine" in operation.name:
            self._before = self.dispatch(copy=True)  # later dispatches would overwrite a view of a receive buffer
            self._y = expert_outputs(self._before.tokens)

    def __call__(self) -> Any:
        """Make the operation in calls of one piece. A combine after a dispatch is of that dispatch."""
        if self._name == "dispatch":
            return self.dispatch()
        return self.combine(self._before if self._name == "combine" else self.dispatch())

    def dispatch(self, copy: bool = False) -> Routed:
        """Dispatch the tokens."""
        return self._comm.dispatch(*self._given, copy=copy, **self._options)

    def combine(self, routed: Routed | None) -> torch.Tensor:
        """Combine the same expert outputs, whatever was dispatched."""
        assert routed is not None
        return self._comm.combine(self._y, routed)

    def send(self) -> list[Pending[Any]]:
        """Send the first halves. A dispatch and a combine are of two micro-batches, open at the same time."""
        pendings: list[Pending[Any]] = []
        if self._name != "combine":
            pendings.append(self._comm.send_dispatch(*self._given, **self._options))
        if self._before is not None:
            pendings.append(self._comm.send_combine(self._y, self._before))
        return pendings


class CallMaker:
    """Makes the calls of every series. Communicators are made when they are first needed.

    Args:
        context: the rank.
        inputs: what is sent.
        stack: closes the communicators.
    """

    def __init__(self, context: RankContext, inputs: Inputs, stack: ExitStack) -> None:
        self._context = context
        self._inputs = inputs
        self._stack = stack
        self._communicators: dict[tuple[str, int | None], Communicator] = {}
        self._deep_ep: deep_ep.DeepEp | None = None

    def ours(self, series: Series) -> OurCall:
        """The operation of a series of one of our backends. Collective."""
        return OurCall(self._communicator(series), series, self._inputs)

    def call(self, series: Series) -> Callable[[], Any]:
        """The operation of any series, as a call of one piece. Collective."""
        if series.backend == deep_ep.NAME:
            return self._rival().prepared_call(series.operation, self._inputs)
        return self.ours(series)

    def check(self, series: Series) -> None:
        """Raise what calls of our own backends left behind: a graph cannot raise by itself."""
        comm = self._communicators.get((series.backend, series.num_sms))
        if comm is not None:
            comm.check()

    def _communicator(self, series: Series) -> Communicator:
        key = (series.backend, series.num_sms)
        if key not in self._communicators:
            shape = self._inputs.shape
            comm = Communicator(
                self._context.group,
                num_experts=shape.num_experts,
                hidden=shape.hidden,
                top_k=shape.top_k,
                max_tokens_per_rank=shape.num_tokens,
                backend=series.backend,
                device=self._context.device,
                num_sms=series.num_sms or registry.DEFAULT_SMS,
                ranks_per_node=series.ranks_per_node,
            )
            self._communicators[key] = self._stack.enter_context(comm)
        return self._communicators[key]

    def _rival(self) -> deep_ep.DeepEp:
        if self._deep_ep is None:
            plan = self._inputs.shape.plan(self._context.num_ranks)
            self._deep_ep = self._stack.enter_context(closing(deep_ep.DeepEp(self._context.group, plan)))
        return self._deep_ep


class Gemm:
    """[rows, width] x [width, width], of as many rows as take about ``wanted_us``. Equal on all ranks; collective.

    On GPUs in bfloat16 over 4096 columns, on CPUs in float32 over 256.

    Args:
        context: the rank.
        wanted_us: microseconds that it is to take, at most as many as memory allows.

    Attributes:
        rows: what was chosen.
    """

    def __init__(self, context: RankContext, wanted_us: float) -> None:
        device, kind = context.device, context.device.type
        width, dtype, step = WIDTHS[kind], DTYPES[kind], ROW_STEP[kind]
        self._b = torch.empty(width, width, dtype=dtype, device=device).normal_()
        self._make_rows(TRIAL_ROWS[kind])
        self()
        trial_us = min(clock.one_call(context, self, queued=True) for _ in range(TRIALS))
        steps = round(wanted_us / trial_us * TRIAL_ROWS[kind] / step)
        chosen = torch.tensor(max(1, steps) * step, dtype=torch.int64, device=device)
        dist.all_reduce(chosen, dist.ReduceOp.MAX, context.group)
        self._make_rows(int(chosen))

    def _make_rows(self, rows: int) -> None:
        self.rows = rows
        self._a = torch.empty(rows, len(self._b), dtype=self._b.dtype, device=self._b.device).normal_()
        self._out = torch.empty_like(self._a)

    def __call__(self) -> None:
        torch.mm(self._a, self._b, out=self._out)


def make_sampler(context: RankContext, maker: CallMaker, series: Series) -> Callable[[], Sample]:
    """A function that takes one sample: "call", and its parts, see ``Row``. Making and calling it is collective."""
    if series.beside_us is not None:
        return _halves_sampler(context, maker, series)
    if series.timing == "eager":
        call = maker.ours(series)
        return lambda: eager_sample(context, call)
    take = _clock(context, maker, series, maker.call(series))
    return lambda: {"call": take()}


def eager_sample(context: RankContext, call: OurCall) -> Sample:
    """Wall clock of a dispatch and its combine, and of the host alone in each of them.

    The pairs follow each other without a wait; the clock stops when the device is done with the last. Host time lasts
    until a call returns, on a device that is idle when it begins.
    """
    count = EAGER_PAIRS[context.device.type]
    _wait_for_all(context)
    began = time.perf_counter()
    for _ in range(count):
        call()
    _wait(context)
    pair_us = (time.perf_counter() - began) * 1e6 / count
    dispatch_us, routed = _host_us(context, call.dispatch)
    combine_us, _ = _host_us(context, lambda: call.combine(routed))
    return {"call": pair_us, "host_dispatch": dispatch_us, "host_combine": combine_us}


def _halves_sampler(context: RankContext, maker: CallMaker, series: Series) -> Callable[[], Sample]:
    assert series.beside_us is not None
    call, work = maker.ours(series), Gemm(context, series.beside_us)

    def around_work() -> list[Any]:
        pendings = call.send()
        work()
        return [each.receive() for each in pendings]

    def one_piece_then_work() -> Any:
        result = call()
        work()
        return result

    around = _clock(context, maker, series, around_work)
    alone = _clock(context, maker, series, work)
    one_piece = _clock(context, maker, series, one_piece_then_work)
    return lambda: {"call": around(), "work": alone(), "one_piece": one_piece()}


def _clock(context: RankContext, maker: CallMaker, series: Series, call: Callable[[], Any]) -> Callable[[], float]:
    """Microseconds of one ``call`` by the timing of the series."""
    if series.timing != "graph":
        return lambda: clock.one_call(context, call)
    clock.warm_up(call)
    graph = clock.capture(call)
    maker.check(series)

    def sample(keep: Any = call) -> float:  # the graph reads tensors that only the call keeps alive
        return clock.one_replay(context, graph)

    return sample


def _host_us(context: RankContext, call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds until the call returns, and its result."""
    _wait_for_all(context)
    began = time.perf_counter()
    result = call()
    return (time.perf_counter() - began) * 1e6, result


def _wait_for_all(context: RankContext) -> None:
    dist.barrier(context.group)
    _wait(context)


def _wait(context: RankContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def warm_up_iterations(iterations: int) -> int:
    """Samples of each row that do not count, before all others."""
    return max(1, iterations // 5)


@torch.no_grad()
def measure_on_rank(context: RankContext, series: Sequence[Series], iterations: int) -> list[Measured]:
    """Samples of each series on this rank. Collective.

    Args:
        series: series of one shape.
    """
    inputs = make_inputs(context, series[0].shape)
    measured: dict[Series, Measured] = {}
    with ExitStack() as stack:
        maker = CallMaker(context, inputs, stack)
        for operation, found in groupby(series, lambda each: each.operation):
            if context.rank == 0:
                context.report(f"{series[0].shape}: {operation}")
            contestants = {
                each: Contestant(make_sampler(context, maker, each), check=partial(maker.check, each))
                for each in found
            }
            take_turns(contestants, iterations, first_warm_ups=warm_up_iterations(iterations))
            measured |= {each: contestant.measured for each, contestant in contestants.items()}
    return [measured[each] for each in series]
