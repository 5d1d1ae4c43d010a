"""Takes the samples of ``tokenloom bench comm``: whole operations, as a user calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby

import torch

from tokenloom.bench.comm import traffic
from tokenloom.bench.comm.calls import CallMaker
from tokenloom.bench.comm.rows import Row, make_row
from tokenloom.bench.comm.samplers import EAGER_PAIRS, Sample, make_sampler
from tokenloom.bench.comm.series import Series, sums_per_rank
from tokenloom.bench.common import timing
from tokenloom.bench.common.inputs import make_inputs
from tokenloom.bench.common.shape import ROUTING_SEED
from tokenloom.bench.rivals import deep_ep
from tokenloom.runtime.processes import RankContext, RankPool

DEFAULT_ITERATIONS = {"cpu": 10, "cuda": 100}


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
        ids = [shape.topk_ids(rank) for rank in range(pool.num_ranks)]
        rows = traffic.rows_between(plan, ids)
        limit_s = timing.limit_s(iterations) * len({each.operation for each in together})
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
                "ranks_per_node": who.ranks_per_node,
                "sizes": None if who.backend == deep_ep.NAME else each.sizes,
                "scale_layout": each.scale_layout,
                "beside_us": each.beside_us,
                "calls_per_sample": {"graph": timing.GRAPH_CALLS, "eager": EAGER_PAIRS[pool.device]}.get(
                    who.timing, 1
                ),
                "routing": "uniform",
                "routing_seed": ROUTING_SEED,
                "iterations": iterations,
                "warm_up_iterations": warm_up_iterations(iterations),
                "rounds": timing.ROUNDS,
            }
            over = None
            if who.backend == "network" and who.ranks_per_node is not None:
                over = traffic.relayed(plan, ids, who.ranks_per_node)
            moved = traffic.moved(plan, rows, each.operation, over)
            samples = [result[index] for result in results]
            counted = who.backend == deep_ep.NAME or sums_per_rank(who.backend)
            on_links = pool.device == "cuda"
            yield make_row(
                each.name(pool.num_ranks), samples, moved, who.num_sms, setup, on_links=on_links, counted=counted
            )


def warm_up_iterations(iterations: int) -> int:
    """Samples of each row that do not count, before all others."""
    return max(1, iterations // 5)


@torch.no_grad()
def measure_on_rank(context: RankContext, series: Sequence[Series], iterations: int) -> list[list[Sample]]:
    """Samples of each series on this rank. Collective.

    Args:
        series: series of one shape.
    """
    inputs = make_inputs(context, series[0].shape)
    samples: dict[Series, list[Sample]] = {each: [] for each in series}
    with ExitStack() as stack:
        maker = CallMaker(context, inputs, stack)
        for operation, found in groupby(series, lambda each: each.operation):
            together = list(found)
            if context.rank == 0:
                context.report(f"{series[0].shape}: {operation}")
            samplers = {each: make_sampler(context, maker, each) for each in together}
            for number, count in enumerate(timing.shares(iterations)):
                for each in together:
                    # The first call after somebody else's finds cold caches, and cold code on the host.
                    for _ in range(1 if number else warm_up_iterations(iterations)):
                        samplers[each]()
                    samples[each] += [samplers[each]() for _ in range(count)]
                    maker.check(each.contestant)
    return [samples[each] for each in series]
