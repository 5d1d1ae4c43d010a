"""on_timeout="mask": a rank that does not come, or dies, costs the others the routes to it, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.comm.test_masks import LAYOUTS, combine_all_modes, options_of, pair, without
from tests.conftest import Ranks
from tests.support.cases import FP32, Case, Problem, make_comm, make_problem, same_bits, same_routed
from tests.support.on_ranks import on_ranks
from tests.support.patience import done, when_done, with_late
from tests.support.server import Server
from tests.support.slow import mostly_slow
from tokenloom import reference
from tokenloom.backends.collective import CollectiveBackend
from tokenloom.backends.exchange import FlatExchange
from tokenloom.errors import InvalidArgument
from tokenloom.plan import ROUTE_LAYOUTS
from tokenloom.runtime.links import Links
from tokenloom.runtime.processes import RankContext, RankPool

CASE = Case("late", "", tokens=(7, 5, 4, 6), experts_per_rank=2, hidden=16, top_k=4, pick="repeats", dtype=FP32)
TIMEOUT_S = 1.5
LONG_S = 30.0
"""A deadline that must not pass."""
SERVER_S = 600.0
"""Some machines take 0.1 s for a pair of calls of four processes."""

each_layout = pytest.mark.parametrize("layout", mostly_slow(["token", "expert", "rank", "slots"], ["expert"]))


@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.slow), 4], ids=["cpu2", "cpu4"])
def group(request: pytest.FixtureRequest, pools: Callable[[str], RankPool]) -> Ranks:
    """Groups over gloo; deadlines take their time, so one size does for a quick run."""
    return Ranks(pools("cpu"), request.param)


def make(context: RankContext, timeout_s: float = LONG_S, **options: Any) -> tuple[tl.Communicator, Problem]:
    problem = make_problem(CASE, context.num_ranks)
    options = {"timeout_s": timeout_s, "on_timeout": "mask"} | options
    return make_comm(context, "collective", problem.plan, **options), problem


class Death(BaseException):
    """Ends a rank in the middle of a transfer as if its process had ended: nobody tells the others."""

    known_to_all = True


# -- ranks that come late ---------------------------------------------------------------------------------------


@each_layout
def test_late_for_a_dispatch(group: Ranks, layout: str) -> None:
    """The call goes on as if the rank had been masked before, and so do the next ones."""
    group.run(with_late, 0, check_late_for_dispatch, layout)


def check_late_for_dispatch(context: RankContext, layout: str) -> None:
    comm, problem = make(context, TIMEOUT_S)
    pair(context, comm, problem, [], layout)
    others = list(range(1, context.num_ranks))
    if context.rank == 0:
        when_done(comm.engine.ranks, others)
        with pytest.raises(tl.CommunicatorBroken, match=r"have masked rank 0: rank \d waited in the handshake"):
            comm.dispatch(*problem.arguments(context))
        return
    pair(context, comm, problem, [0], layout)
    assert f"rank 0 is masked: rank {1 if len(others) == 1 else ''}" in comm.describe()
    pair(context, comm, problem, [0], layout)
    assert comm.engine.ranks.num_losses == 1, "nobody waits for it again"
    done(comm.engine.ranks)


@pytest.mark.slow
@each_layout
@pytest.mark.parametrize("part", ["metadata", "payload"])
def test_late_within_a_dispatch(group: Ranks, layout: str, part: str) -> None:
    """The others know its counts already: they drop its rows, whether its metadata had come or not. Their own routes
    to it are lost in the combine."""
    group.run(with_late, -1, check_late_within_dispatch, layout, part)


def check_late_within_dispatch(context: RankContext, layout: str, part: str) -> None:
    comm, problem = make(context, TIMEOUT_S)
    last = context.num_ranks - 1
    others, options = list(range(last)), options_of(problem, layout)
    if context.rank == last:
        real = FlatExchange.start_all_to_all

        def late(exchange: FlatExchange, *rest: Any) -> Any:
            if rest[-1] == f"dispatch, {part}":
                when_done(comm.engine.ranks, others)
                raise Death  # and so it never sends
            return real(exchange, *rest)

        with mock.patch.object(FlatExchange, "start_all_to_all", late), pytest.raises(Death):
            comm.dispatch(*problem.arguments(context), **options)
        return
    rest = without(problem, [last])
    full = without(problem, [last], sources=False)  # of the others' tokens all routes were sent
    full.topk_ids[:] = [ids if rank != last else ids[:0] for rank, ids in enumerate(problem.topk_ids)]
    for each in (full.xs, full.topk_weights):
        assert each is not None
        each[last] = each[last][:0]
    routed, want = comm.dispatch(*problem.arguments(context), **options), full.dispatched(**options)
    same_routed(routed, want[context.rank], problem.plan, bounded=layout == "slots")
    combine_all_modes(context, comm, routed, full, want, rest.topk_ids)
    pair(context, comm, problem, [last], layout)
    done(comm.engine.ranks)


@pytest.mark.slow
@each_layout
@pytest.mark.parametrize("mode", ["per_rank", "per_route"])
def test_late_within_a_combine(group: Ranks, layout: str, mode: str) -> None:
    """The sums leave out what it did not send home."""
    if mode == "per_route" and layout not in ROUTE_LAYOUTS:
        pytest.skip("no row for each route")
    group.run(with_late, 0, check_late_within_combine, layout, mode)


def check_late_within_combine(context: RankContext, layout: str, mode: Any) -> None:
    comm, problem = make(context, TIMEOUT_S)
    others, options = list(range(1, context.num_ranks)), options_of(problem, layout)
    want = problem.dispatched(**options)
    routed = comm.dispatch(*problem.arguments(context), **options)
    ys = [each.tokens.clone() for each in want]
    if context.rank == 0:

        def late(*_: Any) -> None:
            when_done(comm.engine.ranks, others)
            raise Death

        with mock.patch.object(CollectiveBackend, "_send_home", late), pytest.raises(Death):
            comm.combine(routed.tokens, routed, mode=mode)
        return
    out = comm.combine(routed.tokens, routed, mode=mode)
    weights = problem.topk_weights if layout in ROUTE_LAYOUTS else None
    outs = reference.combine(problem.plan, ys, want, without(problem, [0]).topk_ids, weights, mode=mode)
    same_bits(out, outs[context.rank], layout)
    pair(context, comm, problem, [0], layout)
    done(comm.engine.ranks)


@pytest.mark.slow
def test_late_for_a_backward(group: Ranks) -> None:
    """Gradients of the routes to it are lost."""
    group.run(with_late, 0, check_late_for_backward)


def check_late_for_backward(context: RankContext) -> None:
    warm, problem = make(context)
    comm, _ = make(context, TIMEOUT_S)
    routed_tokens, _ = forward(context, warm, problem)
    routed_tokens.backward(torch.ones_like(routed_tokens))  # torch imports much the first time
    routed_tokens, x = forward(context, comm, problem)
    others = list(range(1, context.num_ranks))
    if context.rank == 0:
        when_done(comm.engine.ranks, others)
        return
    routed_tokens.backward(torch.ones_like(routed_tokens))
    assert comm.masked_ranks() == [0], comm.describe()
    want = problem.dispatched("expert")
    grads = [torch.ones_like(each.tokens) for each in want]
    kept = without(problem, [0]).topk_ids
    assert x.grad is not None
    same_bits(x.grad, reference.combine(problem.plan, grads, want, kept, None)[context.rank], "gradient of x")
    done(comm.engine.ranks)


def forward(context: RankContext, comm: tl.Communicator, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    return comm.dispatch(x.requires_grad_(), ids, weights.requires_grad_()).tokens, x


# -- ranks that end ---------------------------------------------------------------------------------------------


@on_ranks("four")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", mostly_slow(["before", "partly", "after"], ["partly"]))
@pytest.mark.parametrize("exchange", [1, 2, 3, 4, 5])
def test_death_in_every_transfer(context: RankContext, exchange: int, how: str) -> None:
    """Of a dispatch (handshake, metadata, payload) and of a combine (handshake, sums): before it, when it has reached
    one rank, or all. The call that is hit loses all that the rank sends, or nothing; later ones all, at once."""
    comm, problem = make(context)
    rest = without(problem, [2])
    fulls, rests = problem.dispatched("token"), rest.dispatched("token")
    pair(context, comm, problem, [], "token")
    if context.rank == 2:
        with mock.patch.object(Links, "start", dying(exchange, how)), suppress(Death):
            routed = comm.dispatch(*problem.arguments(context), layout="token")
            comm.combine(routed.tokens, routed)
        comm.engine.ranks._disconnect()
        return
    began = time.monotonic()
    routed = comm.dispatch(*problem.arguments(context), layout="token")
    me = context.rank
    full = routed.num_rows == fulls[me].num_rows
    same_routed(routed, (fulls if full else rests)[me], problem.plan)
    assert full or exchange <= 3
    out = comm.combine(routed.tokens, routed)
    ys = [each.tokens for each in fulls]
    outs = [reference.combine(problem.plan, ys, fulls, each.topk_ids, None)[me] for each in (problem, rest)]
    equal = [torch.equal(out.nan_to_num(99.0), each.nan_to_num(99.0)) for each in outs]
    assert equal[1] or (equal[0] and exchange == 5)
    pair(context, comm, problem, [2], "expert")
    assert time.monotonic() - began < 0.5 * LONG_S


def dying(exchange: int, how: str) -> Callable[..., Any]:
    real, count = Links.start, 0

    def start(self: Links, waiter: Any, others: Any, parts: Any, places: Any, number: int) -> Any:
        nonlocal count
        count += 1
        if count == exchange and how == "before":
            raise Death
        if count == exchange and how == "partly":
            reached = (self._rank, int(self._rank == 0))
            parts = [part if rank in reached else part[:0] for rank, part in enumerate(parts)]
        started = real(self, waiter, others, parts, places, number)
        if count == exchange:
            time.sleep(0.2)  # what is on its way arrives
            raise Death
        return started

    return start


@on_ranks("four")
def test_death_with_two_calls_open(context: RankContext) -> None:
    """Both lose it, in whichever order they are received, and the next two go on."""
    comm, problem = make(context)
    first = comm.dispatch(*problem.arguments(context), layout="token")
    if context.rank == 3:
        with mock.patch.object(Links, "start", dying(3, "before")), suppress(Death):
            comm.send_combine(first.tokens, first)
            comm.send_dispatch(*problem.arguments(context))
        comm.engine.ranks._disconnect()
        return
    home = comm.send_combine(first.tokens, first)
    pending = comm.send_dispatch(*problem.arguments(context))
    same_routed(pending.receive(), without(problem, [3]).dispatched("expert")[context.rank], problem.plan)
    home.receive()
    for layout in LAYOUTS:
        pair(context, comm, problem, [3], layout)


@on_ranks("group")
def test_a_fault_of_its_own(context: RankContext) -> None:
    """Bad input is told as ever and masks nobody; a rank that fails in the middle of a call is gone."""
    comm, problem = make(context)
    x, ids, weights = problem.arguments(context)
    with pytest.raises(tl.InvalidExpertId if context.rank == 0 else tl.PeerError):
        comm.dispatch(x, ids + 100 if context.rank == 0 else ids, weights)
    pair(context, comm, problem, [], "expert")
    if context.rank == 0:
        with (
            mock.patch.object(FlatExchange, "spread", side_effect=MemoryError("the test")),
            pytest.raises(MemoryError),
        ):
            comm.dispatch(x, ids, weights)
        with pytest.raises(tl.CommunicatorBroken, match="the test"):
            comm.dispatch(x, ids, weights)
        return
    comm.dispatch(x, ids, weights)
    pair(context, comm, problem, [0], "expert")


@on_ranks("group")
@pytest.mark.parametrize("value", ["ignore", None, True])
def test_wrong_option(context: RankContext, value: Any) -> None:
    """Named, with what is expected; ranks that differ in it are told as of any argument."""
    problem = make_problem(CASE, context.num_ranks)
    last = context.rank == context.num_ranks - 1
    with pytest.raises(
        InvalidArgument if last else tl.PeerError, match=f"on_timeout is {value!r}, expected 'raise' or 'mask'"
    ):
        make_comm(context, "collective", problem.plan, on_timeout=value if last else "mask")
    with pytest.raises(tl.PlanMismatch, match="on_timeout=raise, rank 0 has on_timeout=mask"):
        make_comm(context, "collective", problem.plan, on_timeout="raise" if last else "mask")


# -- ranks that come back ---------------------------------------------------------------------------------------


@on_ranks("group")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_back_again(context: RankContext, on_timeout: str) -> None:
    """A rank makes its communicator again while the others take it back: all calls are as before the mask."""
    comm, problem = make(context, on_timeout=on_timeout)
    pair(context, comm, problem, [], "expert")
    for turn in range(2):
        if context.rank == 0:
            comm.close()
            comm, _ = make(context, on_timeout=on_timeout, rejoin=True)
        else:
            comm.mask_ranks([0])
            pair(context, comm, problem, [0], "token")
            before = comm.dispatch(*problem.arguments(context))
            comm.unmask_ranks([0])
            if turn == 0:  # rank 0 knows nothing of a dispatch from before
                with pytest.raises(tl.PeerError):
                    comm.combine(before.tokens, before)
        if turn == 0 and context.rank == 0:
            with pytest.raises(InvalidArgument):
                comm.combine(torch.zeros(1, 16), None)  # type: ignore[call-overload]
        assert comm.masked_ranks() == []
        for layout in LAYOUTS:
            pair(context, comm, problem, [], layout)


@on_ranks("two")
@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({"max_tokens_per_rank": 99}, "rank 1 has max_tokens_per_rank=99, rank 0 has max_tokens_per_rank=9"),
        ({"on_timeout": "raise"}, "rank 1 has on_timeout=raise, rank 0 has on_timeout=mask"),
    ],
)
def test_back_with_other_arguments(context: RankContext, others: dict[str, Any], text: str) -> None:
    """Both sides are told, and may try again."""
    comm, problem = make(context)
    if context.rank == 1:
        sizes = {name: value for name, value in vars(problem.plan).items() if name != "num_ranks"}
        options = {"backend": "collective", "checked": True, "on_timeout": "mask", "rejoin": True}
        with pytest.raises(tl.PlanMismatch, match=text):
            tl.Communicator(context.group, **(sizes | options | others))
        comm, _ = make(context, rejoin=True)
    else:
        comm.mask_ranks([1])
        with pytest.raises(tl.PlanMismatch, match=text):
            comm.unmask_ranks([1])
        pair(context, comm, problem, [1], "expert")
        comm.unmask_ranks([1])
    pair(context, comm, problem, [], "expert")


# -- processes that die -----------------------------------------------------------------------------------------


def serve(context: RankContext, pipe: Connection, num_calls: int) -> None:
    """Pairs of calls whose results tell which routes counted. Says "pair" at times: its number, who is masked, why."""
    rank, num_ranks = context.rank, context.num_ranks
    comm = tl.Communicator(
        num_experts=2 * num_ranks, hidden=8, top_k=3, max_tokens_per_rank=6, on_timeout="mask", timeout_s=3.0
    )
    masked: list[int] = []
    for number in range(num_calls):
        if number % 20 == 0:
            pipe.send(("pair", (number, masked, comm.engine.ranks.why_masked())))
        generator = torch.Generator().manual_seed(number * num_ranks + rank)
        ids = torch.randint(-1, 2 * num_ranks, (number % 7, 3), generator=generator)
        x = torch.randint(1, 9, (number % 7, 8), generator=generator).float()
        if number % 2:
            routed = comm.dispatch(x, ids, torch.ones(ids.shape), layout=("expert", "slots")[number // 2 % 2])
            out = comm.combine(routed.tokens, routed)
        else:
            routed = comm.send_dispatch(x, ids, torch.ones(ids.shape)).receive()
            out = comm.send_combine(routed.tokens, routed, mode="per_route").receive()
        expected = []
        for gone in (masked, comm.masked_ranks()):
            counts = ((ids >= 0) & ~torch.isin(ids // 2, torch.tensor(gone, dtype=torch.int64))).sum(1)
            expected.append(x * counts[:, None])
        assert any(torch.equal(out, each) for each in expected), f"pair {number}: {out} is neither of {expected}"
        masked = comm.masked_ranks()
    pipe.send(("pair", (num_calls, masked, comm.engine.ranks.why_masked())))
    comm.close()


def server(num_calls: int) -> Server:
    """Four processes of it."""
    return Server(4, serve, num_calls, device="cpu")


def require_masked(server: Server, rank: int, number: int, expected: list[int]) -> None:
    """Who is masked at the first pair that this rank tells of, from this one on."""
    at, masked, why = -1, [], {}
    while at < number:
        at, masked, why = server.hear(rank, "pair", SERVER_S)
    assert masked == expected, f"pair {at} of rank {rank}: {why}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "num_calls"),
    [
        (signal.SIGKILL, 500),
        pytest.param(signal.SIGSTOP, 400, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 5000, marks=pytest.mark.soak),
    ],
    ids=["killed", "stopped", "killed in 10,000 calls"],
)
def test_death_in_the_middle(how: signal.Signals, num_calls: int) -> None:
    """A process ends, or stops, at some moment; the others lose the routes to it and no other, and make all calls."""
    with server(num_calls) as ranks:
        require_masked(ranks, 2, num_calls // 4, [])
        time.sleep(random.random() * 0.05)
        os.kill(ranks.processes[2].pid, how)
        for rank in (0, 1, 3):
            require_masked(ranks, rank, num_calls, [2])


@pytest.mark.slow
def test_deaths_one_after_the_other() -> None:
    """Until one process is left."""
    with server(1000) as ranks:
        gone: list[int] = []
        for number, rank in ((200, 0), (400, 3), (600, 1)):
            require_masked(ranks, 2, number, gone)
            os.kill(ranks.processes[rank].pid, signal.SIGKILL)
            gone = sorted([*gone, rank])
        require_masked(ranks, 2, 1000, gone)
