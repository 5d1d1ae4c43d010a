"""Calls that users make in two halves: the results of one call, and which of them may be open at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP32,
    Case,
    Problem,
    case_params,
    each_backend,
    make_comm,
    make_problem,
    same_bits,
    same_bytes,
    same_routed,
)
from tokenloom.comm.pending import OpenCalls, Pending
from tokenloom.runtime.processes import RankContext

CASE = Case("pending", "", tokens=(9, 0, 5, 7), top_k=3, unused=0.2, hidden=16, dtype=FP32)
BATCHES = 5


def batches(num_ranks: int, count: int = BATCHES) -> list[Problem]:
    """Micro-batches of one communicator."""
    return [make_problem(replace(CASE, seed=seed), num_ranks) for seed in range(count)]


def work_on(rows: torch.Tensor) -> torch.Tensor:
    """What experts might do."""
    return torch.sin(rows) + rows


def combined(comm: tl.Communicator, problem: Problem, context: RankContext, **options: Any) -> torch.Tensor:
    """Dispatch, work and combine, each in one piece."""
    routed = comm.dispatch(*problem.arguments(context), **options)
    return comm.combine(work_on(routed.tokens), routed)


# -- the same as in one piece -----------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("case", case_params(["plain", "top8", "unused", "no-tokens", "fp8"]))
def test_dispatch(ranks: Ranks, backend: str, case: Case) -> None:
    """Every layout and size; between the halves what was sent gets other values."""
    ranks.run(check_dispatch, backend, case)


def check_dispatch(context: RankContext, backend: str, case: Case) -> None:
    problem = make_problem(case, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        for layout in ("token", "rank", "expert", "slots"):
            for sizes in ("exact", "bounded")[layout == "slots" :]:
                bounded = sizes == "bounded"
                needed = max(1, problem.rows_needed(layout)) if bounded and layout != "rank" else None
                x, ids, weights = problem.arguments(context)
                pending = comm.send_dispatch(x, ids, weights, layout=layout, sizes=sizes, capacity=needed)
                assert isinstance(pending, tl.Pending)
                for given in (*(x if isinstance(x, tuple) else (x,)), weights):
                    assert isinstance(given, torch.Tensor)
                    given.view(torch.uint8).fill_(1)
                want = problem.dispatched(layout, capacity=needed, bounded=bounded)
                same_routed(pending.receive(), want[context.rank], problem.plan, bounded=bounded)


@each_backend
@pytest.mark.parametrize("mode", ["per_rank", "per_route"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_combine(ranks: Ranks, backend: str, mode: str, weighted: bool) -> None:
    """Between the halves y gets other values."""
    ranks.run(check_combine, backend, mode, weighted)


def check_combine(context: RankContext, backend: str, mode: Any, weighted: bool) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), copy=True)
        options: dict[str, Any] = {"mode": mode, "weighted": weighted, "wire_dtype": BF16, "out_dtype": FP32}
        want = comm.combine(work_on(routed.tokens), routed, **options)
        y = work_on(routed.tokens)
        pending = comm.send_combine(y, routed, **options)
        y.fill_(torch.nan)
        same_bits(pending.receive(), want.cpu(), "out")


@each_backend
def test_async(ranks: Ranks, backend: str) -> None:
    """Both halves run on the communicator's own stream, and the second gives the event."""
    ranks.run(check_async, backend)


def check_async(context: RankContext, backend: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        want = combined(comm, problem, context)
        pending = comm.send_dispatch(*problem.arguments(context), async_op=True)
        routed, event = pending.receive()
        assert isinstance(event, tl.Event)
        event.wait()
        out, event = comm.send_combine(work_on(routed.tokens), routed, async_op=True).receive()
        event.wait()
        same_bits(out, want.cpu(), "out")


@each_backend
@pytest.mark.parametrize("order", ["oldest first", "newest first"])
def test_two_micro_batches_in_turns(ranks: Ranks, backend: str, order: str) -> None:
    """One is computed while the other travels: all along two calls are open, and no result is another's."""
    ranks.run(check_turns, backend, order == "newest first")


def check_turns(context: RankContext, backend: str, newest_first: bool) -> None:
    problems = batches(context.num_ranks, 6)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        want = [combined(comm, problem, context).clone() for problem in problems]
        outs: list[torch.Tensor] = []
        for first, second in zip(problems[::2], problems[1::2], strict=True):
            pendings = [comm.send_dispatch(*each.arguments(context)) for each in (first, second)]
            if newest_first:
                later = pendings[1].receive()
            routed = pendings[0].receive()
            home = [comm.send_combine(work_on(routed.tokens), routed)]
            if not newest_first:
                later = pendings[1].receive()
            home.append(comm.send_combine(work_on(later.tokens), later))
            outs += [each.receive() for each in (home[::-1] if newest_first else home)][:: -1 if newest_first else 1]
        for out, expected in zip(outs, want, strict=True):
            same_bits(out, expected.cpu(), "out")


@each_backend
def test_ranks_receive_in_orders_of_their_own(ranks: Ranks, backend: str) -> None:
    """Only calls have an order: what one rank receives first, another may receive last."""
    ranks.run(check_orders, backend)


def check_orders(context: RankContext, backend: str) -> None:
    problems = batches(context.num_ranks, 2)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        pendings = [comm.send_dispatch(*each.arguments(context)) for each in problems]
        for index in (0, 1) if context.rank % 2 else (1, 0):
            want = problems[index].dispatched("expert")[context.rank]
            same_routed(pendings[index].receive(), want, problems[index].plan)


# -- gradients --------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("layout", ["expert", "token", "slots"])
def test_gradients(ranks: Ranks, backend: str, layout: str) -> None:
    """Those of one piece, bit for bit, for x as it was sent, and wherever the second half runs."""
    ranks.run(check_gradients, backend, layout)


def check_gradients(context: RankContext, backend: str, layout: Any) -> None:
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    x = x.nan_to_num(1, 1, 1)
    with make_comm(context, backend, problem.plan) as comm:

        def gradients(halves: bool) -> list[torch.Tensor]:
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            sent, factors = leaves[0] * 2, leaves[1] * 3
            if not halves:
                routed = comm.dispatch(sent, ids, factors, layout=layout)
                out = comm.combine(work_on(routed.tokens), routed)
            else:
                pending = comm.send_dispatch(sent, ids, factors, layout=layout)
                sent.mul_(5), factors.mul_(7)
                with torch.no_grad():
                    routed = pending.receive()
                home = comm.send_combine(work_on(routed.tokens), routed)
                with torch.no_grad():
                    out = home.receive()
            loss = (out * torch.cos(out.detach())).sum()
            if routed.topk_weights is not None:
                loss = loss + (routed.topk_weights**2).sum()
            return [out.detach(), *torch.autograd.grad(loss, leaves)]

        for name, got, want in zip(("out", "x", "weights"), gradients(True), gradients(False), strict=True):
            same_bits(got, want.cpu(), name)


@each_backend
def test_gradients_of_one_of_two(ranks: Ranks, backend: str) -> None:
    """Weights alone, or rows alone, may want one; without there is no graph."""
    ranks.run(check_gradients_of_one, backend)


def check_gradients_of_one(context: RankContext, backend: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm:
        for wants_x, wants_weights in ((True, False), (False, True), (False, False)):
            x, ids, weights = problem.arguments(context)
            assert isinstance(x, torch.Tensor)
            assert weights is not None
            x.requires_grad_(wants_x), weights.requires_grad_(wants_weights)
            routed = comm.send_dispatch(x, ids, weights).receive()
            assert routed.tokens.requires_grad == (wants_x or wants_weights)
            out = comm.send_combine(routed.tokens, routed).receive()
            assert out.requires_grad == (wants_x or wants_weights)
            if out.requires_grad:
                out.sum().backward()
            assert (x.grad is not None, weights.grad is not None) == (wants_x, wants_weights)


@each_backend
def test_rows_that_backward_needs(ranks: Ranks, backend: str) -> None:
    """If y gets other values, gradients of its weights would be wrong: backward says so, as ever."""
    ranks.run(check_rows_that_backward_needs, backend)


def check_rows_that_backward_needs(context: RankContext, backend: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm:
        x, ids, weights = problem.arguments(context)
        assert weights is not None
        routed = comm.dispatch(x, ids, weights.requires_grad_(), copy=True)
        y = work_on(routed.tokens)
        pending = comm.send_combine(y, routed)
        y.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pending.receive().sum().backward()


# -- which may be open ------------------------------------------------------------------------------------------


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


THIRD = "a third pending call: a dispatch sent 2 calls ago is still open; receive it before"
each_fault = pytest.mark.parametrize("alike", [True, False], ids=["all ranks", "one rank"])


@each_backend
@each_fault
@pytest.mark.parametrize("third", ["send_dispatch", "dispatch", "send_combine", "combine"])
def test_a_third(ranks: Ranks, backend: str, third: str, alike: bool) -> None:
    """Of any kind: it is refused, nothing is sent, and those that are open can still be received."""
    ranks.run(check_third, backend, third, alike)


def check_third(context: RankContext, backend: str, third: str, alike: bool) -> None:
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        earlier = comm.dispatch(*problems[4].arguments(context), copy=True)
        open_ones = [comm.send_dispatch(*each.arguments(context), copy=True) for each in problems[:2]]
        found = [] if is_odd(context, alike) else [open_ones.pop(0).receive()]
        calls: dict[str, Callable[[], object]] = {
            "dispatch": lambda: comm.dispatch(*problems[2].arguments(context)),
            "send_dispatch": lambda: comm.send_dispatch(*problems[2].arguments(context)),
            "combine": lambda: comm.combine(earlier.tokens, earlier),
            "send_combine": lambda: comm.send_combine(earlier.tokens, earlier),
        }
        expect(context, calls[third], alike, THIRD)
        found += [pending.receive() for pending in open_ones]
        for routed, problem in zip(found, problems, strict=False):
            same_routed(routed, problem.dispatched("expert")[context.rank], problem.plan)
        works(context, comm, problems[3])


@each_backend
def test_calls_in_one_piece_count(ranks: Ranks, backend: str) -> None:
    """Beside an open call there may be one of them, not two; backward's are calls as well."""
    ranks.run(check_one_piece, backend)


def check_one_piece(context: RankContext, backend: str) -> None:
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


@each_backend
def test_received_twice(ranks: Ranks, backend: str) -> None:
    """The second time is an error of this rank alone, which concerns no call."""
    ranks.run(check_received_twice, backend)


def check_received_twice(context: RankContext, backend: str) -> None:
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


@each_backend
@each_fault
@pytest.mark.parametrize("lost", ["dispatch", "combine", "both", "async"])
def test_dropped(ranks: Ranks, backend: str, lost: str, alike: bool) -> None:
    """The next call says so, on ranks that did it; the lost call is finished first, so the one after that works."""
    ranks.run(check_dropped, backend, lost, alike)


def check_dropped(context: RankContext, backend: str, lost: str, alike: bool) -> None:
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        earlier = comm.dispatch(*problems[4].arguments(context), copy=True)
        text = {"both": "dispatch and a combine was dropped", "async": "an earlier dispatch was dropped"}.get(
            lost, f"an earlier {lost} was dropped unreceived; keep what"
        )

        pendings: list[Pending[Any]] = []
        if lost == "async":
            pendings.append(comm.send_dispatch(*problems[0].arguments(context), copy=True, async_op=True))
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


@each_backend
def test_dropped_after_a_fault(ranks: Ranks, backend: str) -> None:
    """A rank that raises between the halves, and lets go of all it had, is one of those."""
    ranks.run(check_dropped_after_a_fault, backend)


def check_dropped_after_a_fault(context: RankContext, backend: str) -> None:
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


@each_backend
@pytest.mark.parametrize("first", ["dispatch", "combine"])
def test_a_fault_between_the_halves(ranks: Ranks, backend: str, first: str) -> None:
    """A call that one rank cannot make: all hear of it, and the call that is open is received as if nothing were."""
    ranks.run(check_fault_between, backend, first)


def check_fault_between(context: RankContext, backend: str, first: str) -> None:
    problems = batches(context.num_ranks)
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problems[0].arguments(context), copy=True)
        want = comm.combine(routed.tokens, routed)
        for call in (comm.dispatch, comm.send_dispatch):
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


@each_backend
def test_a_call_that_failed_counts(ranks: Ranks, backend: str) -> None:
    """Ranks that see a fault and ranks that hear of it later must count alike: so it is a call for all of them."""
    ranks.run(check_failed_counts, backend)


def check_failed_counts(context: RankContext, backend: str) -> None:
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
            comm.send_dispatch(*problems[1].arguments(context), alignment=1 + is_odd(context, alike=False))
        same_routed(pending.receive(), problems[0].dispatched("expert")[context.rank], problems[0].plan)
        works(context, comm, problems[1])


@each_backend
def test_an_overflow_between_the_halves(ranks: Ranks, backend: str) -> None:
    """The next call raises it, and so is not made; the call that is open is received with what fitted."""
    ranks.run(check_overflow_between, backend)


def check_overflow_between(context: RankContext, backend: str) -> None:
    problems = batches(context.num_ranks)
    needed = problems[0].rows_needed("expert")
    options: dict[str, Any] = {"sizes": "bounded", "capacity": needed - 1}
    with make_comm(context, backend, problems[0].plan) as comm, torch.no_grad():
        pending = comm.send_dispatch(*problems[0].arguments(context), **options, copy=True)
        if backend != "collective":
            routed = pending.receive()  # where the host knows at the second half
        with pytest.raises(tl.CapacityOverflow) as overflow:
            comm.send_dispatch(*problems[1].arguments(context))
        assert overflow.value.needed == needed
        later = comm.send_dispatch(*problems[1].arguments(context), copy=True)
        if backend == "collective":
            routed = pending.receive()
        want = problems[0].dispatched("expert", bounded=True, capacity=needed - 1)
        same_routed(routed, want[context.rank], problems[0].plan, bounded=True)
        same_routed(later.receive(), problems[1].dispatched("expert")[context.rank], problems[1].plan)


@each_backend
def test_closed_between_the_halves(ranks: Ranks, backend: str) -> None:
    """The second half says that the communicator was closed."""
    ranks.run(check_closed_between, backend)


def check_closed_between(context: RankContext, backend: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        pending = comm.send_dispatch(*problem.arguments(context))
    with pytest.raises(tl.CommunicatorBroken, match="closed"):
        pending.receive()


# -- the rule alone ---------------------------------------------------------------------------------------------


def test_what_may_be_open() -> None:
    """Call n opens if all calls are received but n - 1, whatever came between."""
    calls = OpenCalls()

    def send() -> Pending[int]:
        calls.require_room()
        calls.opened()
        return Pending(lambda: 1, calls, "dispatch", lambda: None)

    def one_piece() -> None:
        calls.require_room()
        calls.opened()

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
    calls, finished = OpenCalls(), []

    def discard() -> None:
        finished.append(1)
        raise tl.PeerError(1, "no memory")

    calls.opened()
    Pending(lambda: 1, calls, "combine", discard)
    with pytest.raises(tl.InvalidArgument, match="an earlier combine was dropped"):
        calls.require_room()
    assert finished == [1]
    calls.require_room()


def test_bytes_of_two_calls_are_kept_apart(ranks: Ranks) -> None:
    """On "collective" with a payload by every strategy, since their transfers differ in number."""
    ranks.run(check_strategies)


def check_strategies(context: RankContext) -> None:
    problems = batches(context.num_ranks, 3)
    with make_comm(context, "collective", problems[0].plan) as comm, torch.no_grad():
        want = [comm.dispatch(*each.arguments(context)) for each in problems]
        strategies = ("all_gather", "all_to_all", "dedup")
        for index, (problem, strategy) in enumerate(zip(problems, strategies, strict=True)):
            other = (index + 1) % 3
            pendings = [
                comm.send_dispatch(*problem.arguments(context), strategy=strategy),
                comm.send_dispatch(*problems[other].arguments(context), strategy=strategies[other]),
            ]
            for pending, expected in zip(pendings[::-1], (want[other], want[index]), strict=True):
                same_bytes(pending.receive().tokens, expected.tokens.cpu(), strategy)
