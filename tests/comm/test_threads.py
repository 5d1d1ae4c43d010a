"""Several threads and one communicator: in turn all is well, and at once is an error, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.support.cases import FP32, Case, make_comm, make_problem, same_bits
from tests.support.on_ranks import on_ranks
from tests.support.patience import PATIENCE_S
from tokenloom.comm.communicators_by_shape import CommShape, Communicators
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.turns import Turn

CASE = Case("threads", "", tokens=(5, 0, 3, 4), top_k=2, hidden=16, dtype=FP32, to_quantise=False)
Call = Callable[[], Any]


def made(context: RankContext, **options: Any) -> tuple[tl.Communicator, Call, Call]:
    """A communicator, a call of it, and one there and back: each gives a tensor."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    x, comm = x.nan_to_num(1, 1, 1), make_comm(context, "collective", problem.plan, **options)

    def there_and_back() -> torch.Tensor:
        routed = comm.dispatch(x, ids, weights)
        return comm.combine(routed.tokens, routed)

    return comm, lambda: comm.dispatch(x, ids, weights).tokens, there_and_back


@contextmanager
def meanwhile(inside: Any, name: str, call: Call) -> Iterator[Future[object]]:
    """In this block another thread makes a call in the middle of the first ``inside.name()``: what becomes of it.

    It has found that this thread is in before that goes on.
    """
    waits, done = threading.Event(), []
    real_method, real_enter = getattr(inside, name), Turn.enter
    future: Future[object] = Future()
    with ThreadPoolExecutor(1) as other:

        def enter(turn: Turn, limit_s: float) -> object:
            if not turn.take():
                waits.set()
            else:
                turn.leave()
            return real_enter(turn, limit_s)

        def method(*given: Any, **named: Any) -> object:
            if not done:
                done.append(other.submit(call))
                done[0].add_done_callback(lambda made: (waits.set(), future.set_result(made)))
                assert waits.wait(PATIENCE_S)
            return real_method(*given, **named)

        with mock.patch.object(Turn, "enter", enter), mock.patch.object(inside, name, method):
            yield future


def error_of(future: Future[Any]) -> BaseException | None:
    return future.result(PATIENCE_S).exception()  # type: ignore[no-any-return]


@on_ranks("four")
@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("options", [{}, {"on_timeout": "mask"}], ids=["raise", "mask"])
def test_calls_at_once(context: RankContext, options: dict[str, Any], who: str) -> None:
    """The second thread's call is refused behind that of the first, where the other ranks open it. It was SIGABRT."""
    options = {"timeout_s": PATIENCE_S, **options}
    comm, call, there_and_back = made(context, **options)
    rows, want = call(), there_and_back()
    if who == "all" or context.rank == 0:
        with meanwhile(comm.engine._backend, "send_dispatch", call) as other:
            found = call()
        error = error_of(other)
        assert isinstance(error, tl.InvalidArgument)
        assert "another thread" in str(error)
    else:
        found = call()
        with pytest.raises(tl.PeerError, match=r"rank 0 failed.*another thread"):
            call()
    same_bits(found, rows, "rows")
    same_bits(there_and_back(), want, "behind it")
    comm.close()


@on_ranks("four")
def test_a_receive_meanwhile(context: RankContext) -> None:
    """It can be made again: the rows are still there."""
    comm, call, _ = made(context)
    rows = call()
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    pending = comm.send_dispatch(x, ids, weights)
    with meanwhile(comm.engine._backend, "send_dispatch", pending.receive) as other:
        found = call()
    assert "another thread" in str(error_of(other))
    pending.receive()
    same_bits(found, rows, "rows")
    comm.close()


@on_ranks("four")
def test_calls_in_turn(context: RankContext) -> None:
    """The halves of a call, and backward, which runs on threads of autograd, may be anywhere."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    leaf = x.nan_to_num(1, 1, 1).requires_grad_()
    with make_comm(context, "collective", problem.plan) as comm:

        def elsewhere(call: Callable[[], Any]) -> Any:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(call).result(PATIENCE_S)

        pending = elsewhere(lambda: comm.send_dispatch(leaf, ids, weights))
        routed = elsewhere(pending.receive)
        out = comm.combine(routed.tokens, routed)
        elsewhere(lambda: out.sum().backward())
        assert leaf.grad is not None


@on_ranks("four")
def test_two_communicators_of_a_process_group(context: RankContext) -> None:
    """gloo has one order of collectives for both."""
    comm, call, _ = made(context)
    other_comm, other_call, there_and_back = made(context)
    want = there_and_back()
    with meanwhile(comm.engine._backend, "send_dispatch", other_call) as other:
        call()
    assert "process group" in str(error_of(other))
    same_bits(there_and_back(), want, "behind it")
    for each in (comm, other_comm):
        each.close()


@on_ranks("four")
def test_a_thread_that_makes_a_communicator(context: RankContext) -> None:
    """That is a call of the process group as well."""
    communicators = Communicators(context.group, lambda: {"timeout_s": PATIENCE_S})
    x = torch.ones(3, 16, device=context.device)
    ids = torch.zeros(3, 2, dtype=torch.int64, device=context.device)

    def call(experts: int) -> Call:
        return lambda: communicators.run(
            CommShape(experts, 16, 2), 3, context.device, lambda comm: comm.dispatch(x, ids).tokens
        )

    call(4)()
    (known,) = communicators.all()
    with meanwhile(known.engine._backend, "send_dispatch", call(8)) as other:
        call(4)()
    assert "another thread" in str(error_of(other))
    call(8)()
    communicators.close()


@on_ranks("four")
def test_a_thread_that_makes_the_first_communicator(context: RankContext) -> None:
    """No call of an earlier one says that two threads are in: the ranks hear it when they agree about it."""
    comm, call, _ = made(context)
    communicators = Communicators(context.group, lambda: {"timeout_s": PATIENCE_S})
    x = torch.ones(3, 16, device=context.device)
    ids = torch.zeros(3, 2, dtype=torch.int64, device=context.device)

    def make() -> torch.Tensor:
        return communicators.run(CommShape(4, 16, 2), 3, context.device, lambda comm: comm.dispatch(x, ids).tokens)

    if context.rank == 0:
        with meanwhile(comm.engine._backend, "send_dispatch", make) as other:
            call()
        assert "another thread" in str(error_of(other))
    else:
        call()
        with pytest.raises(tl.PeerError, match=r"rank 0 failed.*another thread"):
            make()
    assert not communicators.all()
    make()
    communicators.close()
    comm.close()
