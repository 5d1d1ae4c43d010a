"""Takes the samples of ``tokenloom bench comm``: whole operations, as a user calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch

from tokenloom.backends import registry
from tokenloom.bench.comm import traffic
from tokenloom.bench.comm.rows import Row, make_row
from tokenloom.bench.comm.series import Contestant, Series
from tokenloom.bench.common import timing
from tokenloom.bench.common.inputs import Inputs, expert_outputs, make_inputs
from tokenloom.bench.common.shape import ROUTING_SEED
from tokenloom.bench.rivals import deep_ep
from tokenloom.comm.communicator import Communicator
from tokenloom.runtime.processes import RankContext, RankPool

DEFAULT_ITERATIONS = {"cpu": 20, "cuda": 100}
LIMIT_S = 500.0
"""Longest time for one operation on one shape."""


def measure(
    pool: RankPool, series: Sequence[Series], iterations: int, starting: Callable[[str], None] = lambda what: None
) -> Iterator[Row]:
    """Measure, row by row.

    Args:
        pool: the ranks.
        series: from :func:`tokenloom.bench.comm.series.plan_series`: those of one shape together, and within them
            those of one operation.
        iterations: samples of each, in timing.ROUNDS turns, after a fifth as many to warm up.
        starting: called with what is about to be measured.

    Raises:
        RankFailed: a rank failed.
    """
    for shape, found in groupby(series, lambda each: each.shape):
        together = list(found)
        plan = shape.plan(pool.num_ranks)
        rows = traffic.rows_between(plan, [shape.topk_ids(rank) for rank in range(pool.num_ranks)])
        limit_s = LIMIT_S * len({each.operation for each in together})
        results = pool.run(measure_on_rank, together, iterations, limit_s=limit_s, on_event=starting)
        for index, each in enumerate(together):
            who = each.contestant
            setup = {
                "operation": each.operation.name,
                "backend": who.backend,
                "payload": each.operation.payload,
                "layout": each.operation.layout,
                "timing": who.timing,
                **asdict(shape),
                "num_ranks": pool.num_ranks,
                "sizes": None if who.backend == deep_ep.NAME else who.sizes,
                "calls_per_sample": timing.GRAPH_CALLS if who.timing == "graph" else 1,
                "routing": "uniform",
                "routing_seed": ROUTING_SEED,
                "iterations": iterations,
                "warm_up_iterations": _warm_up_iterations(iterations),
                "rounds": timing.ROUNDS,
            }
            moved = traffic.moved(plan, rows, each.operation)
            times = [result[index] for result in results]
            yield make_row(each.name(pool.num_ranks), times, moved, who.num_sms, setup)


def _warm_up_iterations(iterations: int) -> int:
    return max(1, iterations // 5)


@torch.no_grad()
def measure_on_rank(context: RankContext, series: Sequence[Series], iterations: int) -> list[list[float]]:
    """Samples of each series on this rank, in microseconds. Collective.

    Args:
        series: series of one shape.
    """
    inputs = make_inputs(context, series[0].shape)
    samples: dict[Series, list[float]] = {each: [] for each in series}
    with ExitStack() as stack:
        maker = CallMaker(context, inputs, stack)
        for operation, found in groupby(series, lambda each: each.operation):
            together = list(found)
            if context.rank == 0:
                context.report(f"{series[0].shape}: {operation}")
            samplers = {each: maker.sampler(each) for each in together}
            for number, count in enumerate(timing.shares(iterations)):
                for each in together:
                    # The first call after somebody else's finds cold caches, and cold code on the host.
                    for _ in range(1 if number else _warm_up_iterations(iterations)):
                        samplers[each]()
                    samples[each] += [samplers[each]() for _ in range(count)]
                    maker.check(each.contestant)
    return [samples[each] for each in series]


class CallMaker:
    """The operations on fixed tensors of this rank. Communicators are made when they are first needed.

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

    def sampler(self, series: Series) -> Callable[[], float]:
        """A function that takes one sample, in microseconds. Making it, and calling it, is collective."""
        call = self.prepared_call(series)
        if series.contestant.timing != "graph":
            return lambda: timing.one_call(self._context, call)
        timing.warm_up(call)
        graph = timing.capture(call)
        self.check(series.contestant)

        def sample(keep: Any = call) -> float:  # the graph reads tensors that only the call keeps alive
            return timing.one_replay(self._context, graph)

        return sample

    def prepared_call(self, series: Series) -> Callable[[], Any]:
        """The operation, ready to be called again and again. Collective."""
        operation, inputs = series.operation, self._inputs
        if series.contestant.backend == deep_ep.NAME:
            return self._rival().prepared_call(operation, inputs)
        comm = self._communicator(series.contestant)
        x = inputs.fp8 if operation.payload == "fp8" else inputs.x
        assert x is not None
        options: dict[str, Any] = {"layout": operation.layout, "sizes": series.contestant.sizes}
        if operation.payload == "to_fp8":
            options["to_fp8"] = True
        if operation.layout == "expert" and series.contestant.sizes == "bounded":
            options["capacity"] = inputs.expert_rows

        def dispatch(copy: bool = False) -> Any:
            return comm.dispatch(x, inputs.ids, inputs.weights, copy=copy, **options)

        if operation.name == "dispatch":
            return dispatch
        routed = dispatch(copy=True)  # later dispatches would overwrite a view of a receive buffer
        y = expert_outputs(routed.tokens)
        if operation.name == "combine":
            return lambda: comm.combine(y, routed)
        return lambda: comm.combine(y, dispatch())

    def check(self, contestant: Contestant) -> None:
        """Raise what calls of our own backends left behind: a graph cannot raise by itself."""
        comm = self._communicators.get((contestant.backend, contestant.num_sms))
        if comm is not None:
            comm.check()

    def _communicator(self, contestant: Contestant) -> Communicator:
        key = (contestant.backend, contestant.num_sms)
        if key not in self._communicators:
            shape = self._inputs.shape
            comm = Communicator(
                self._context.group,
                num_experts=shape.num_experts,
                hidden=shape.hidden,
                top_k=shape.top_k,
                max_tokens_per_rank=shape.num_tokens,
                backend=contestant.backend,
                device=self._context.device,
                num_sms=contestant.num_sms or registry.DEFAULT_SMS,
            )
            self._communicators[key] = self._stack.enter_context(comm)
        return self._communicators[key]

    def _rival(self) -> deep_ep.DeepEp:
        if self._deep_ep is None:
            plan = self._inputs.shape.plan(self._context.num_ranks)
            self._deep_ep = self._stack.enter_context(closing(deep_ep.DeepEp(self._context.group, plan)))
        return self._deep_ep
