"""on_timeout="mask" on backend nvlink: a rank that dies or is late costs the others the routes to it, and no others.

On the emulator a rank is killed anywhere, in the middle of a kernel too.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends.test_nvlink_masks import BACKEND, PROBLEM, pair
from tests.comm.test_masks import LAYOUTS, each_layout, options_of, without
from tests.conftest import Ranks
from tests.support import emulator
from tests.support.cases import Problem, make_comm, make_problem, same_bits, same_bytes, same_routed
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.backends.peers.buffers import Buffers
from tokenloom.backends.peers.handle import PeerHandle
from tokenloom.backends.peers.opening import Launcher
from tokenloom.plan import ROUTE_LAYOUTS, Plan
from tokenloom.runtime import membership
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup

EMULATED = True
ONLY_EMULATED = pytest.mark.skipif(not emulator.ON, reason="ranks of a pool of processes are not killed")
LONG_S = 30.0


def make(context: RankContext, timeout_s: float = LONG_S, **options: Any) -> tuple[tl.Communicator, Problem]:
    problem = make_problem(PROBLEM, context.num_ranks)
    return make_comm(context, BACKEND, problem.plan, timeout_s=timeout_s, on_timeout="mask", **options), problem


def end(context: RankContext) -> None:
    """End this rank as a signal would."""
    from tests.support.emulator.group import Ended

    raise Ended


# -- everybody is there -----------------------------------------------------------------------------------------


@on_ranks("several")
@each_layout
def test_nobody_is_late(context: RankContext, layout: str) -> None:
    """Calls return what they do elsewhere, in one piece and in halves, and errors are the same."""
    comm, problem = make(context)
    options, last = options_of(problem, layout), context.rank == context.num_ranks - 1
    x, ids, weights = problem.arguments(context)
    for _ in range(2):
        pair(context, comm, problem, [], layout)
        with pytest.raises(tl.InvalidExpertId if last else tl.PeerError):
            comm.dispatch(x, ids + 100 if last else ids, weights, **options)
        other = {"layout": "token" if layout == "rank" else "rank"}
        with pytest.raises(tl.PlanMismatch, match=r"rank \d has layout="):
            comm.dispatch(x, ids, weights, **(other if last else options))
    first = comm.send_dispatch(x, ids, weights, **options)
    second = comm.send_dispatch(x, ids, weights, **options)
    want = problem.dispatched(**options)[context.rank]
    for pending in (second, first):
        same_routed(pending.receive(), want, problem.plan, bounded=layout == "slots")
    comm.check()


@ONLY_EMULATED
def test_a_fault_behind_a_call(several: Ranks) -> None:
    """A rank that fails when its rows are there, for lack of memory say, tells the others before they return."""
    from tests.support.emulator import group as emulated

    real, failures = PeerHandle.own, [0]

    def own(self: PeerHandle, *args: Any, **options: Any) -> None:
        if emulated.here.rank == 0 and failures:
            failures.pop()
            raise MemoryError("the test")
        real(self, *args, **options)

    with mock.patch.object(PeerHandle, "own", own):
        several.run(check_fault_behind)


def check_fault_behind(context: RankContext) -> None:
    comm, problem = make(context)
    with pytest.raises(MemoryError if context.rank == 0 else tl.PeerError, match="the test"):
        comm.dispatch(*problem.arguments(context), copy=True)
    pair(context, comm, problem, [], "expert")


@on_ranks("several")
def test_overflow(context: RankContext) -> None:
    """Told once, at the call behind it, as with ``checked``."""
    comm, problem = make(context)
    needed = problem.rows_needed("expert")
    for _ in range(2):
        comm.dispatch(*problem.arguments(context), sizes="bounded", capacity=needed - 1)
        with pytest.raises(tl.CapacityOverflow):
            comm.check()
        with pytest.raises(tl.CapacityOverflow):
            comm.dispatch(*problem.arguments(context), capacity=needed - 1)
        pair(context, comm, problem, [], "expert")


# -- ranks that end ---------------------------------------------------------------------------------------------


@on_ranks("several")
@ONLY_EMULATED
@each_layout
def test_death_between_calls(context: RankContext, layout: str) -> None:
    """The next call goes on as if the rank had been masked before, and so do those after it; until one is left."""
    comm, problem = make(context)
    for gone in range(context.num_ranks):
        pair(context, comm, problem, list(range(gone)), layout)
        if gone == context.rank:
            end(context)


@ONLY_EMULATED
@pytest.mark.parametrize("launch", range(6))
@pytest.mark.parametrize("when", ["before", "after"])
def test_death_at_every_launch(several: Ranks, launch: int, when: str) -> None:
    """Of a dispatch, a combine, and what ends each of them: the call that is hit takes place with the rank on all
    others, or without it on all of them."""
    counted = several.run(check_at_launch, launch, when)
    assert len({found for found in counted if found is not None}) == 1


def check_at_launch(context: RankContext, launch: int, when: str) -> bool | None:
    comm, problem = make(context)
    pair(context, comm, problem, [], "token")
    launcher = comm.engine._backend._launcher  # type: ignore[attr-defined]
    real, launches = type(launcher).launch, 0

    def dying(self: Any, *args: Any, **options: Any) -> None:
        nonlocal launches
        launches += self is launcher
        if self is launcher and launches == launch + 1 and when == "before":
            end(context)
        real(self, *args, **options)
        if self is launcher and launches == launch + 1:
            end(context)

    if context.rank == 0:
        launcher.launch = lambda *args, **options: dying(launcher, *args, **options)
    routed = comm.dispatch(*problem.arguments(context), layout="token")
    fulls, rests = (each.dispatched("token")[context.rank] for each in (problem, without(problem, [0])))
    full = routed.num_rows == fulls.num_rows
    same_routed(routed, fulls if full else rests, problem.plan)
    comm.combine(routed.tokens, routed)
    if context.rank == 0:  # both calls may have taken fewer launches; it must not die in the next one
        end(context)
    for layout in LAYOUTS:
        pair(context, comm, problem, [0], layout)
    return full if fulls.num_rows != rests.num_rows else None


@ONLY_EMULATED
def test_death_in_a_meeting(several: Ranks) -> None:
    """Some have met with the rank and have gone on, another one waits for it: it has the same result."""
    if several.num_ranks == 2:
        pytest.skip("nobody else could have met")
    real = RankGroup.settle

    def settle(self: RankGroup, name: str, *args: Any) -> Any:
        if self.rank != several.num_ranks - 1:
            time.sleep(0.5)  # the one that waits is the first to say what it thinks
        return real(self, name, *args)

    with mock.patch.object(RankGroup, "settle", settle):
        several.run(check_in_meeting)


def check_in_meeting(context: RankContext) -> None:
    comm, problem = make(context)
    last = context.num_ranks - 1
    pair(context, comm, problem, [], "token")
    if context.rank == 0:
        launcher = comm.engine._backend._launcher  # type: ignore[attr-defined]

        def meet_some(fields: Any) -> None:
            launcher.leave_out([last])
            launcher._open(fields)
            torch.cuda.synchronize()
            end(context)

        launcher.agree = meet_some
    routed = comm.dispatch(*problem.arguments(context), layout="token")
    if context.rank == last:
        time.sleep(1.0)  # others are in the next call
    same_routed(routed, problem.dispatched("token")[context.rank], problem.plan)
    assert comm.masked_ranks() == ([0] if context.rank == last else [])
    pair(context, comm, problem, [0], "expert")


@on_ranks("several")
@ONLY_EMULATED
@torch.no_grad()
def test_views_of_the_dispatch_before(context: RankContext) -> None:
    """A call that is made again takes one turn of receive buffers: rows of the one before stay, and come home."""
    comm, problem = make(context)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    pair(context, comm, problem, [], "token")
    first = comm.dispatch(x, ids, weights, layout="token", sizes="bounded")
    number = int(first.num_rows)
    before = first.tokens[:number].clone()
    if context.rank == 0:
        end(context)
    comm.dispatch(x * 2, ids, weights, layout="token", sizes="bounded")
    assert comm.masked_ranks() == [0]
    same_bytes(first.tokens[:number], before, "rows")
    comm.combine(first.tokens, first)


@on_ranks("several")
@ONLY_EMULATED
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_death_before_a_backward(context: RankContext, layout: str) -> None:
    """Gradients of the routes to it are lost, in a transfer of its own and in one to the places of the forward."""
    comm, problem = make(context)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    routed = comm.dispatch(x.requires_grad_(), ids, weights, layout=layout)
    want = problem.dispatched(layout)
    y = routed.tokens.detach().clone().requires_grad_()
    out = comm.combine(y, routed)
    if context.rank == 0:
        end(context)
    out.backward(torch.ones_like(out))
    assert comm.masked_ranks() == [0]
    assert y.grad is not None
    from_it = [place for key, place in want[context.rank].rows.items() if key[0] == 0]
    others = [place for key, place in want[context.rank].rows.items() if key[0] != 0]
    assert not y.grad[from_it].any()
    assert y.grad[others].all()
    routed.tokens.backward(torch.ones_like(routed.tokens))
    grads = [torch.ones_like(each.tokens) for each in want]
    kept = without(problem, [0]).topk_ids
    assert x.grad is not None
    same_bits(x.grad, reference.combine(problem.plan, grads, want, kept, None)[context.rank], "gradient of x")


SERVER = Plan(4, 8, 8, 3, 6)


def serve(
    context: RankContext, num_calls: int, report: Callable[[int, int], None], timeout_s: float = LONG_S
) -> list[list[int]]:
    """Pairs of calls whose results tell which routes counted; who was masked behind each call."""
    plan = replace(SERVER, num_ranks=context.num_ranks, num_experts=2 * context.num_ranks)
    comm = make_comm(context, BACKEND, plan, on_timeout="mask", timeout_s=timeout_s, checked=False)
    history: list[list[int]] = []
    for number in range(num_calls):
        report(context.rank, number)
        generator = torch.Generator().manual_seed(number * context.num_ranks + context.rank)
        ids = torch.randint(-1, plan.num_experts, (number % 7, 3), generator=generator)
        x = torch.randint(1, 9, (number % 7, 8), generator=generator).to(torch.bfloat16)
        device = context.device
        given = (x.to(device), ids.to(device), torch.ones(ids.shape, device=device))
        before = comm.masked_ranks()
        room: dict[str, Any] = {"layout": ("expert", "slots", "expert")[number % 3]}
        if number % 3 == 1:
            room["capacity"] = 18 * context.num_ranks  # several routes of a token may go to one expert
        elif number % 2:
            room |= {"sizes": "bounded", "capacity": 18 * context.num_ranks}
        if number % 4 < 2:
            routed = comm.dispatch(*given, **room)
            between = comm.masked_ranks()
            out = comm.combine(routed.tokens, routed)
        else:
            routed = comm.send_dispatch(*given, **room).receive()
            between = comm.masked_ranks()
            out = comm.send_combine(routed.tokens, routed, mode="per_route").receive()
        history += [between, comm.masked_ranks()]
        expected = []
        for gone in (before, between, comm.masked_ranks()):
            counts = ((ids >= 0) & ~torch.isin(ids // 2, torch.tensor(gone, dtype=torch.int64))).sum(1)
            expected.append(x * counts[:, None])
        got = out.cpu()
        assert any(torch.equal(got, each) for each in expected), f"rank {context.rank}, {number}: {got} of {expected}"
    return history


@ONLY_EMULATED
@pytest.mark.parametrize("seed", range(6))
def test_death_anywhere(several: Ranks, seed: int) -> None:
    """A rank is killed in the middle of whatever its kernels and its host do; all others make all calls. Then another
    one is, as long as two are left."""
    from tests.support.emulator import group as emulated

    draw = random.Random(seed + 100 * emulator.SEED)
    num_ranks, num_calls = several.num_ranks, 24
    at = [
        (draw.randrange(1, num_calls // 2), draw.randrange(num_ranks)),
        (draw.randrange(num_calls // 2, num_calls), 0),
    ]
    if num_ranks == 2:
        at.pop()
    else:
        at[1] = (at[1][0], draw.choice([rank for rank in range(num_ranks) if rank != at[0][1]]))
    lock, killed = threading.Lock(), []

    def report(rank: int, number: int) -> None:
        with lock:
            if at and (number, rank) == at[0]:
                _, victim = at.pop(0)
                killed.append(victim)
                emulated.here.group.kill_within(draw.randrange(30_000), victim)

    results = several.run(serve, num_calls, report)
    left = [history for history in results if history is not None]
    assert len(left) == num_ranks - len(killed)
    assert all(history == left[0] for history in left), "ranks differ in the call that was hit"
    assert left[0][-1] == sorted(killed)


# -- replays of graphs, which no host waits for -----------------------------------------------------------------


@on_ranks("several")
@ONLY_EMULATED
@each_layout
@torch.no_grad()
def test_death_before_a_replay(context: RankContext, layout: str) -> None:
    """What waits for the rank gives NaN, and the check says so. The graph goes on without it, beside eager calls."""
    from tests.support.emulator.graphs import capture

    comm, problem = make(context)
    options = options_of(problem, layout)
    if layout == "expert":
        options["capacity"] = 64
    given, weighted = problem.arguments(context), False if layout in ROUTE_LAYOUTS else None

    def step() -> tuple[tl.Routed, torch.Tensor]:
        routed = comm.dispatch(*given, **options, sizes="bounded")
        return routed, comm.combine(routed.tokens, routed, weighted=weighted)

    for _ in range(2):
        step()
    with capture() as graph:
        routed, out = step()
    for gone in range(context.num_ranks - 1):
        masked = list(range(gone))
        rest = without(problem, masked)
        want = rest.dispatched(**options)
        for _ in range(3):
            graph.replay()
            comm.check()
            assert routed.num_rows.tolist() == want[context.rank].num_rows  # type: ignore[union-attr]
            rows = [each.tokens for each in want]
            sums = reference.combine(problem.plan, rows, want, rest.topk_ids, None)[context.rank]
            same_bits(out, sums, f"{layout} without {masked}")
        if context.rank == gone:
            end(context)
        graph.replay()
        with pytest.raises(tl.PeerError, match=rf"\[{gone}\] are masked .* void: replay again"):
            comm.check()
        assert out.isnan().all()
        assert comm.masked_ranks() == [*masked, gone]
        if gone == 0:
            graph.replay()
            pair(context, comm, problem, [0], layout)


# -- ranks that are late ----------------------------------------------------------------------------------------


@ONLY_EMULATED
@pytest.mark.parametrize("comes", ["between calls", "never"])
def test_late(several: Ranks, comes: str) -> None:
    """A rank that lives and is late is masked; it hears of that when it comes."""
    over = threading.Event()
    from tests.support.emulator import group as emulated

    with mock.patch.object(membership, "ROLL_CALL_S", 1.0), mock.patch.object(emulated, "TURNS_PER_NS", 1e-3):
        several.run(check_late, comes, over)


def check_late(context: RankContext, comes: str, over: threading.Event) -> None:
    comm, problem = make(context, timeout_s=3.0)
    pair(context, comm, problem, [], "expert")
    if context.rank == 0:
        assert over.wait(60.0)
        with pytest.raises(tl.CommunicatorBroken, match=r"have masked rank 0: rank \d waited in"):
            comm.dispatch(*problem.arguments(context))
        return
    try:
        pair(context, comm, problem, [0], "expert")
        assert "rank 0 is masked: rank" in "".join(comm._ranks.why_masked().values()) or comm.masked_ranks() == [0]
        pair(context, comm, problem, [0], "token")
    finally:
        over.set()


# -- ranks of which some make memory -----------------------------------------------------------------------------


@ONLY_EMULATED
@each_layout
def test_memory_that_not_all_make(several: Ranks, layout: str) -> None:
    """All agree to make memory, but for one rank that came in vain: nobody is lost, and the others do not take what it
    tells them then for its part in making that memory."""
    from tests.support.emulator import group as emulated

    real, turns = Launcher.agree_before_memory, [0]

    def agree(self: Launcher, fields: Any) -> None:
        real(self, fields)
        if emulated.here.rank == several.num_ranks - 1:
            turns[0] += 1
            if turns[0] % 2:  # else it would be so whenever the call is made again
                self.outcomes.fault.give_up([0], "the test")
                self.outcomes.raise_timeout()

    with mock.patch.object(Launcher, "agree_before_memory", agree):
        several.run(check_not_all_make, layout)
    assert turns[0] >= 2


def check_not_all_make(context: RankContext, layout: str) -> None:
    comm, problem = make(context)
    for _ in range(2):
        pair(context, comm, problem, [], layout)


@ONLY_EMULATED
def test_memory_that_not_all_have_made(several: Ranks) -> None:
    """One rank hears of a loss in the last word of making memory, which it gives back. So all make it anew."""
    from tests.support.emulator import group as emulated

    real, times = Buffers._make, [0]

    def make_some(self: Buffers, *args: Any) -> Any:
        found = real(self, *args)
        if emulated.here.rank == several.num_ranks - 1:
            times[0] += 1
            if times[0] == 1:
                self._buffers.clear()
                ranks = self._launcher.ranks
                ranks._watch.lose(set(), "the test", 0, "the test")
                raise tl.PeerTimeout(ranks.rank, [], "mapping shared memory", 0, "the others go on without a rank")
        return found

    with mock.patch.object(Buffers, "_make", make_some):
        several.run(check_not_all_make, "token")
    assert times[0] >= 2


@ONLY_EMULATED
def test_death_when_some_make_memory(several: Ranks) -> None:
    """A rank ends when it has agreed with some to make memory, and not with another one."""
    if several.num_ranks == 2:
        pytest.skip("nobody else could have agreed")
    several.run(check_some_make)


def check_some_make(context: RankContext) -> None:
    comm, problem = make(context)
    if context.rank == 0:
        launcher = comm.engine._backend._launcher  # type: ignore[attr-defined]

        def agree_with_some(fields: Any) -> None:
            launcher.leave_out([context.num_ranks - 1])
            launcher._open(fields)
            torch.cuda.synchronize()
            end(context)

        launcher.agree = agree_with_some
    for layout in LAYOUTS:
        pair(context, comm, problem, [0], layout)


# -- what goes with it ------------------------------------------------------------------------------------------


@on_ranks("several")
def test_back_again(context: RankContext) -> None:
    """A rank that was masked makes its communicator again, and may be lost once more."""
    comm, problem = make(context)
    for _ in range(2):
        pair(context, comm, problem, [], "expert")
        if context.rank == 0:
            comm.close()
            comm, _ = make(context, rejoin=True)
        else:
            comm.mask_ranks([0])
            pair(context, comm, problem, [0], "token")
            comm.unmask_ranks([0])
        pair(context, comm, problem, [], "slots")
    if emulator.ON:
        if context.rank == 0:
            end(context)
        pair(context, comm, problem, [0], "expert")
