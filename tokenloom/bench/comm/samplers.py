"""Clocks of ``tokenloom bench comm``: how one sample of a series is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.bench.comm.beside import Gemm
from tokenloom.bench.comm.calls import CallMaker, OurCall
from tokenloom.bench.comm.series import Series
from tokenloom.bench.common import timing
from tokenloom.runtime.processes import RankContext

Sample = dict[str, float]
"""Microseconds: "call" is what the series measures, other keys are its parts, see :class:`Row`."""

EAGER_PAIRS = {"cpu": 2, "cuda": 50}
"""Pairs of an eager sample. The wait for the GPU at its end is shared among them."""


def make_sampler(context: RankContext, maker: CallMaker, series: Series) -> Callable[[], Sample]:
    """A function that takes one sample. Making it, and calling it, is collective."""
    if series.beside_us is not None:
        return _halves_sampler(context, maker, series)
    if series.contestant.timing == "eager":
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
    if series.contestant.timing != "graph":
        return lambda: timing.one_call(context, call)
    timing.warm_up(call)
    graph = timing.capture(call)
    maker.check(series.contestant)

    def sample(keep: Any = call) -> float:  # the graph reads tensors that only the call keeps alive
        return timing.one_replay(context, graph)

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
