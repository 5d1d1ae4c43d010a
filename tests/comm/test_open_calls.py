"""Which calls in halves may be open at once, pendings that are dropped, and faults between the halves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.comm.test_pending import CASE, batches
from tests.conftest import Ranks
from tests.support.cases import (
    Problem,
    each_backend,
    make_comm,
    make_problem,
    same_bits,
    same_routed,
)
from tests.support.on_ranks import on_ranks
from tokenloom.comm.engine import OpenCalls, Pending
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.turns import Turn

# -- which may be open ------------------------------------------------------------------------------------------


pytestmark = pytest.mark.slow_on(4)


def is_odd(context: RankContext, alike: bool) -> bool:
    """Whether this rank does what the test is about: all do, or the last one."""
    return alike or context.rank == context.num_ranks - 1


def expect(context: RankContext, call: Callable[[], object], alike: bool, text: str) -> None:
    """InvalidArgument on ranks that are at fault, PeerError with its text on the others."""
    if is_odd(context, alike):
        with pytest.raises(tl.InvalidArgument, match=text):
            call()
    else:
        with pytest.raises(tl.PeerError, match=text) as raised:
            call()
        assert raised.value.rank == context.num_ranks - 1


def works(context: RankContext, comm: tl.Communicator, problem: Problem) -> None:
    routed = comm.dispatch(*problem.arguments(context))
    same_routed(routed, problem.dispatched("expert")[context.rank], problem.plan)


@on_ranks
@each_backend
def test_weights_of_a_combine_are_a_part_of_it(context: RankContext, backend: str) -> None:
    """Where they travel before it, that is no call of its own, which would leave no room beside an open one."""
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        earlier = comm.dispatch(*problems[0].arguments(context), copy=True)
        pending = comm.send_dispatch(*problems[1].arguments(context), copy=True)
        comm.combine(earlier.tokens, earlier, topk_weights=problems[0].arguments(context)[2])
        pending.receive()


THIRD = "a third pending call: a dispatch sent 2 calls ago is still open; receive it before"
each_fault = pytest.mark.parametrize("alike", [True, False], ids=["all ranks", "one rank"])


@on_ranks
@each_backend
@each_fault
@pytest.mark.parametrize("third", ["send_dispatch", "dispatch", "send_combine", "combine"])
def test_a_third(context: RankContext, backend: str, third: str, alike: bool) -> None:
    """Of any kind: it is refused, nothing is sent, and those that are open can still be received."""
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        earlier = comm.dispatch(*problems[4].arguments(context), copy=True)
        open_ones = [comm.send_dispatch(*each.arguments(context), copy=True) for each in problems[:2]]
        found = [] if is_odd(context, alike) else [open_ones.pop(0).receive()]
        calls: dict[str, Callable[[], object]] = {
            "dispatch": lambda: comm.dispatch(*problems[2].arguments(context)),
            "send_dispatch": lambda: comm.send_dispatch(*problems[2].arguments(context)).receive(),
            "combine": lambda: comm.combine(earlier.tokens, earlier),
            "send_combine": lambda: comm.send_combine(earlier.tokens, earlier).receive(),
        }
        expect(context, calls[third], alike, THIRD)
        found += [pending.receive() for pending in open_ones]
        for routed, problem in zip(found, problems, strict=False):
            same_routed(routed, problem.dispatched("expert")[context.rank], problem.plan)
        works(context, comm, problems[3])


@on_ranks
@each_backend
def test_calls_in_one_piece_count(context: RankContext, backend: str) -> None:
    """Beside an open call there may be one of them, not two; backward's are calls as well."""
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm:
        x, ids, weights = problems[0].arguments(context)
        assert isinstance(x, torch.Tensor)
        pending = comm.send_dispatch(*problems[1].arguments(context), copy=True)
        routed = comm.dispatch(x.requires_grad_(), ids, weights)
        with pytest.raises(tl.InvalidArgument, match=THIRD):
            comm.combine(routed.tokens.detach(), routed)
        want = problems[1].dispatched("expert")[context.rank]
        same_routed(pending.receive(), want, problems[1].plan)
        out = comm.combine(routed.tokens, routed)
        pending = comm.send_dispatch(*problems[2].arguments(context), copy=True)
        with pytest.raises(tl.InvalidArgument, match=THIRD):
            out.sum().backward()  # of two calls
        want = problems[2].dispatched("expert")[context.rank]
        same_routed(pending.receive(), want, problems[2].plan)
        works(context, comm, problems[3])


@on_ranks
@each_backend
def test_received_twice(context: RankContext, backend: str) -> None:
    """The second time is an error of this rank alone, which concerns no call."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        pending = comm.send_dispatch(*problem.arguments(context), copy=True)
        routed = pending.receive()
        home = comm.send_combine(routed.tokens, routed)
        home.receive()
        if context.rank == 0:
            for each in (pending, home):
                with pytest.raises(tl.InvalidArgument, match=r"received before; receive\(\) gives the result"):
                    each.receive()
        works(context, comm, problem)


@on_ranks
@pytest.mark.sampled(3)
@each_backend
@each_fault
@pytest.mark.parametrize("lost", ["dispatch", "combine", "both"])
def test_dropped(context: RankContext, backend: str, lost: str, alike: bool) -> None:
    """The next call says so, on ranks that did it; the lost call is finished first, so the one after that works."""
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        earlier = comm.dispatch(*problems[4].arguments(context), copy=True)
        text = "dispatch and a combine was dropped" if lost == "both" else f"an earlier {lost} was dropped unreceived"

        pendings: list[Pending[Any]] = []
        if lost in ("dispatch", "both"):
            pendings.append(comm.send_dispatch(*problems[0].arguments(context), copy=True))
        if lost in ("combine", "both"):
            pendings.append(comm.send_combine(earlier.tokens, earlier))
        if not is_odd(context, alike):
            for pending in pendings:
                pending.receive()
        pendings.clear()
        gc.collect()
        expect(context, lambda: comm.dispatch(*problems[2].arguments(context)), alike, text)
        works(context, comm, problems[3])
        same_bits(comm.combine(earlier.tokens, earlier), comm.combine(earlier.tokens, earlier).cpu(), "out")


@on_ranks
@each_backend
def test_dropped_after_a_fault(context: RankContext, backend: str) -> None:
    """A rank that raises between the halves, and lets go of all it had, is one of those."""
    problems = batches(context.num_ranks)

    def step(comm: tl.Communicator) -> None:
        pending = comm.send_dispatch(*problems[0].arguments(context))
        if is_odd(context, alike=False):
            raise ArithmeticError("the loss is NaN")
        pending.receive()

    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        try:
            step(comm)
        except ArithmeticError:
            gc.collect()
        expect(context, lambda: works(context, comm, problems[1]), False, "dispatch was dropped unreceived")
        works(context, comm, problems[1])


# -- faults between the halves ----------------------------------------------------------------------------------


@on_ranks
@each_backend
@pytest.mark.parametrize("first", ["dispatch", "combine"])
def test_a_fault_between_the_halves(context: RankContext, backend: str, first: str) -> None:
    """A call that one rank cannot make: all hear of it, and the call that is open is received as if nothing were."""
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problems[0].arguments(context), copy=True)
        want = comm.combine(routed.tokens, routed)
        for call in (comm.dispatch, lambda *arguments: comm.send_dispatch(*arguments).receive()):
            pending: Pending[Any] = comm.send_combine(routed.tokens, routed)
            if first == "dispatch":
                pending.receive()
                pending = comm.send_dispatch(*problems[1].arguments(context))
            x, ids, weights = problems[2].arguments(context)
            if is_odd(context, alike=False):
                with pytest.raises(tl.DtypeMismatch):
                    call(x, ids.to(torch.int16), weights)
            else:
                with pytest.raises(tl.PeerError, match=r"topk_ids is torch\.int16"):
                    call(x, ids, weights)
            if first == "dispatch":
                same_routed(pending.receive(), problems[1].dispatched("expert")[context.rank], problems[1].plan)
            else:
                same_bits(pending.receive(), want.cpu(), "out")
            works(context, comm, problems[3])


@on_ranks
@each_backend
def test_a_call_that_failed_counts(context: RankContext, backend: str) -> None:
    """Ranks that see a fault and ranks that hear of it later must count alike: so it is a call for all of them."""
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        pending = comm.send_dispatch(*problems[0].arguments(context), copy=True)
        x, ids, weights = problems[1].arguments(context)
        with pytest.raises(tl.TokenloomError):
            comm.dispatch(x, ids.to(torch.int16) if is_odd(context, alike=False) else ids, weights)
        with pytest.raises(tl.InvalidArgument, match=THIRD):
            comm.dispatch(x, ids, weights)
        same_routed(pending.receive(), problems[0].dispatched("expert")[context.rank], problems[0].plan)
        works(context, comm, problems[1])


@each_backend
def test_options_that_differ_between_the_halves(ranks: Ranks, backend: str) -> None:
    """PlanMismatch for the second call; the first is received."""
    if ranks.num_ranks == 1:
        pytest.skip("nobody to disagree with")
    ranks.run(check_mismatch_between, backend)


def check_mismatch_between(context: RankContext, backend: str) -> None:
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        pending = comm.send_dispatch(*problems[0].arguments(context), copy=True)
        with pytest.raises(tl.PlanMismatch, match="alignment"):
            comm.send_dispatch(*problems[1].arguments(context), alignment=1 + is_odd(context, alike=False)).receive()
        same_routed(pending.receive(), problems[0].dispatched("expert")[context.rank], problems[0].plan)
        works(context, comm, problems[1])


@on_ranks
@each_backend
def test_an_overflow_between_the_halves(context: RankContext, backend: str) -> None:
    """The next call raises it, and so is not made; the call that is open is received with what fitted."""
    problems = batches(context.num_ranks)
    needed = problems[0].rows_needed("expert")
    options: dict[str, Any] = {"sizes": "bounded", "capacity": needed - 1}
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        pending = comm.send_dispatch(*problems[0].arguments(context), **options, copy=True)
        if backend == "nvlink":
            routed = pending.receive()  # where the host knows at the second half
        with pytest.raises(tl.CapacityOverflow) as overflow:
            comm.send_dispatch(*problems[1].arguments(context))
        assert overflow.value.needed == needed
        later = comm.send_dispatch(*problems[1].arguments(context), copy=True)
        if backend != "nvlink":
            routed = pending.receive()
        want = problems[0].dispatched("expert", bounded=True, capacity=needed - 1)
        same_routed(routed, want[context.rank], problems[0].plan, bounded=True)
        same_routed(later.receive(), problems[1].dispatched("expert")[context.rank], problems[1].plan)


@on_ranks
@each_backend
def test_closed_between_the_halves(context: RankContext, backend: str) -> None:
    """The second half says that the communicator was closed."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        pending = comm.send_dispatch(*problem.arguments(context))
    with pytest.raises(tl.CommunicatorBroken, match="closed"):
        pending.receive()


# -- the rule alone ---------------------------------------------------------------------------------------------


def test_what_may_be_open() -> None:
    """Call n opens if all calls are received but n - 1, whatever came between."""
    calls = OpenCalls(Turn())

    def send() -> Pending[int]:
        calls.require_room()
        calls.count += 1
        return Pending(lambda: 1, calls, "dispatch", lambda: None)

    def one_piece() -> None:
        calls.require_room()
        calls.count += 1

    first, second = send(), send()
    with pytest.raises(tl.InvalidArgument, match="sent 2 calls ago"):
        calls.require_room()
    assert first.receive() == 1
    one_piece()
    with pytest.raises(tl.InvalidArgument, match="sent 2 calls ago"):
        one_piece()
    second.receive()
    third = send()
    one_piece()
    third.receive()
    one_piece()


def test_a_dropped_call_is_finished_once() -> None:
    """Before the error is raised, whatever finishing it raises; then nothing is left of it."""
    calls, finished = OpenCalls(Turn()), []

    def discard() -> None:
        finished.append(1)
        raise tl.PeerError(1, "no memory")

    calls.count += 1
    Pending(lambda: 1, calls, "combine", discard)
    with pytest.raises(tl.InvalidArgument, match="an earlier combine was dropped"):
        calls.require_room()
    assert finished == [1]
    calls.require_room()
