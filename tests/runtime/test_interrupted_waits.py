"""A wait that something else ends than the other ranks: a caught Ctrl-C, or a watchdog whose signal handler raises.

The others hear who and why, and nobody takes what belongs to another collective. The interrupted rank waits alone, and
the others come when it has said that it waits no longer, so nothing depends on times.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tokenloom as tl
from tests.comm.test_first_messages import dispatch, make_comm, make_layer, step, works
from tests.support.server import Server
from tests.support.slow import mostly_slow
from tokenloom.ops import routing
from tokenloom.runtime.processes import RankContext

NUM_RANKS, ODD = 4, 1
LIMIT_S = 120.0
AT_ONCE_S = 20.0
OPTIONS: dict[str, Any] = {"timeout_s": 30.0, "open_timeout_s": 30.0}
"""What ranks would wait that nobody tells."""


class Watchdog(Exception):
    """What a signal handler of a program raises."""


@contextmanager
def interrupted(error: type[BaseException], after_s: float) -> Iterator[None]:
    """In this block a signal comes, whose handler raises."""

    def handler(*_: object) -> None:
        raise error("too slow")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        with pytest.raises(error, match="too slow"):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def with_one_interrupted(body: Callable[..., Any], *args: Any) -> list[Any]:
    """``body(context, pipe, *args)``. Ranks that wait for a word go on when the odd one has said "interrupted"."""
    with Server(NUM_RANKS, body, *args, device="cpu") as server:
        server.hear(ODD, "interrupted", LIMIT_S)
        for pipe in server.pipes:
            pipe.send("go on")
        return server.hear_all("returned", LIMIT_S)


def at_once(call: Callable[[], Any], error: type[Exception] = tl.PeerError) -> Exception:
    began = time.monotonic()
    with pytest.raises(error) as raised:
        call()
    assert time.monotonic() - began < AT_ONCE_S
    return raised.value


# -- where a late rank is an error --------------------------------------------------------------------------------


WAITS: dict[str, Callable[[RankContext, tl.Communicator, tl.ExpertParallelMoE], Any]] = {
    "dispatch": lambda context, comm, layer: dispatch(comm),
    "layer": lambda context, comm, layer: step(layer),
    "making a communicator": lambda context, comm, layer: make_comm(context, 3, **OPTIONS),
    "gather_state_dict": lambda context, comm, layer: tl.gather_state_dict(layer),
    "mask_ranks": lambda context, comm, layer: comm.mask_ranks([3]),
}


@pytest.mark.parametrize("error", mostly_slow([KeyboardInterrupt, Watchdog], [Watchdog]))
@pytest.mark.parametrize("wait", mostly_slow(list(WAITS), ["dispatch", "layer", "mask_ranks"]))
def test_others_hear_who_and_why(wait: str, error: type[BaseException]) -> None:
    with_one_interrupted(check_told, wait, error)


def check_told(context: RankContext, pipe: Connection, wait: str, error: type[BaseException]) -> None:
    comm, layer = make_comm(context, **OPTIONS), make_layer(context, balance_coef=0.1, **OPTIONS)
    works(comm)
    if context.rank == ODD:
        with interrupted(error, 0.3):
            WAITS[wait](context, comm, layer)
        pipe.send(("interrupted", None))
        pipe.recv()
    else:
        pipe.recv()
        if wait != "mask_ranks" or context.rank != 3:
            new = wait == "making a communicator"  # who comes to that later finds the group unusable before it waits
            told = at_once(lambda: WAITS[wait](context, comm, layer), tl.CommunicatorBroken if new else tl.PeerError)
            assert f"rank {ODD} failed in the middle of " in str(told)
            assert f"{error.__name__}: too slow" in str(told)
            assert new or (told.rank, told.reason) == (ODD, f"{error.__name__}: too slow")  # type: ignore[attr-defined]
    if wait == "mask_ranks":
        return
    # Their collectives match no more: no communicator of the group makes a call.
    for call in (lambda: dispatch(comm), lambda: step(layer), lambda: make_comm(context)):
        assert f"{error.__name__}: too slow" in str(at_once(call, tl.CommunicatorBroken))
    context.group = dist.new_group(list(range(NUM_RANKS)))
    works(make_comm(context))


def test_an_interrupt_between_two_waits() -> None:
    """Ctrl-C comes at any time. A rank that computes for a call is awaited too."""
    with_one_interrupted(check_between)


def check_between(context: RankContext, pipe: Connection) -> None:
    comm = make_comm(context, **OPTIONS)
    works(comm)
    if context.rank == ODD:
        error = KeyboardInterrupt("between two waits")
        with mock.patch.object(routing, "send_map", side_effect=error), pytest.raises(KeyboardInterrupt):
            dispatch(comm)
        pipe.send(("interrupted", None))
    else:
        told = at_once(lambda: dispatch(comm))
        assert isinstance(told, tl.PeerError)
        assert (told.rank, told.reason) == (ODD, "KeyboardInterrupt: between two waits")
    assert "between two waits" in str(at_once(lambda: dispatch(comm), tl.CommunicatorBroken))
    pipe.recv()


# -- where late ranks are masked ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", mostly_slow([KeyboardInterrupt, Watchdog], [KeyboardInterrupt]))
def test_masks(error: type[BaseException]) -> None:
    """The others go on without the rank that is out of step, and mask nobody else."""
    told = [masked for masked in with_one_interrupted(check_masks, error) if masked is not None]
    assert told == [[ODD]] * (NUM_RANKS - 1)


def check_masks(context: RankContext, pipe: Connection, error: type[BaseException]) -> list[int] | None:
    comm = make_comm(context, on_timeout="mask", timeout_s=30.0)
    works(comm)
    if context.rank == ODD:
        with interrupted(error, 0.3):
            dispatch(comm)
        pipe.send(("interrupted", None))
        pipe.recv()
        at_once(lambda: dispatch(comm), tl.CommunicatorBroken)
        return None
    pipe.recv()
    began = time.monotonic()
    for _ in range(3):
        routed = dispatch(comm)
        assert torch.isfinite(comm.combine(routed.tokens, routed)).all()
    assert time.monotonic() - began < AT_ONCE_S
    return comm.masked_ranks()
