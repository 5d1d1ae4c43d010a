"""Backend "network" when a rank or a node ends, or fails with rows of others in its hands; and over many calls."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tokenloom as tl
from tests.comm.test_on_timeout import Death
from tests.conftest import Ranks
from tests.support.cases import FP32, Case, make_comm, make_problem
from tests.support.on_ranks import on_ranks
from tests.support.patience import only_late
from tests.support.slow import mostly_slow
from tokenloom.backends.handshake import handshake
from tokenloom.backends.nodes.hierarchical.inside import CollectivesInside
from tokenloom.runtime import collectives, openings
from tokenloom.runtime.collectives import Transfer
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup

EXPERIMENTAL = True

CASE = Case("nodes", "", tokens=(7, 0, 5, 6), experts_per_rank=2, hidden=16, top_k=4, unused=0.2, dtype=FP32)
PHASES = [
    "the handshake of dispatch",
    "dispatch, between nodes",
    "dispatch, inside nodes",
    "the handshake of combine",
    "combine, inside nodes",
    "combine, sums, between nodes",
    "the handshake of gradient of weights",
]


@pytest.fixture(autouse=True)
def collectives_are_forgotten(four: Ranks) -> Iterator[None]:
    """Those that lack a rank never end, and the ranks of later tests would wait for them before they free memory."""
    yield
    four.run(forget_collectives)


def forget_collectives(context: RankContext) -> None:
    collectives._open.clear()


def in_a_group_of_their_own(context: RankContext) -> RankContext:
    """Groups in which somebody fails are out of step, and of no use to other tests."""
    own = copy(context)
    own.group = dist.new_group(list(range(context.num_ranks)))
    return own


@pytest.mark.parametrize("phase", mostly_slow(PHASES, ["dispatch, inside nodes"]))
@pytest.mark.parametrize("dead", mostly_slow(["rank", "node"], ["node"]))
def test_who_is_missing(four: Ranks, dead: str, phase: str) -> None:
    """A rank, or a whole node, in each phase: all others name it, its node, where they waited, and the step. Whoever
    waited for it waited there; those that wait for these are one hop further, or in the next call."""
    ranks = [3] if dead == "rank" else [2, 3]
    said = [each for each in four.run(check_missing, ranks, phase) if each is not None]
    assert phase in {each for each, _ in said}
    first = min(step for _, step in said)
    assert all(step == first + PHASES.index(each) - PHASES.index(phase) for each, step in said)


def check_missing(context: RankContext, dead: list[int], phase: str, streams: bool = False) -> tuple[str, int] | None:
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(in_a_group_of_their_own(context), "network", problem.plan)
    comm._ranks.timeout_s = comm._ranks.open_timeout_s = 0.5  # all have come to make it, however busy the machine
    comm._ranks._deadline_is_ours = not streams
    x, ids, weights = problem.arguments(context)
    assert weights is not None
    weights.requires_grad_()

    def calls() -> None:
        routed = comm.dispatch(x, ids, weights)
        out = comm.combine(routed.tokens, routed, mode="per_node")
        out.sum().backward()

    if context.rank in dead:
        with stopping(phase), suppress(Death):
            calls()
        return None
    with only_late(dead), pytest.raises((tl.PeerTimeout, tl.CommunicatorBroken)) as failed:
        calls()
    error = failed.value
    if not isinstance(error, tl.PeerTimeout):  # the others' time was over before this one, on a busy machine, waited
        assert "has waited in vain" in str(error)
        return None
    assert (error.rank, error.peers, error.nodes) == (context.rank, tuple(dead), (1,))
    who = f"rank(s) {', '.join(map(str, dead))} on node(s) 1"
    assert f"rank {context.rank} waited in {error.phase} (step {error.epoch}) for {who}:" in str(error)
    with pytest.raises(tl.CommunicatorBroken):
        comm.dispatch(*problem.arguments(context))
    return error.phase, error.epoch


@pytest.mark.parametrize("phase", ["the handshake of dispatch", "the handshake of combine"])
def test_who_is_missing_where_streams_wait(four: Ranks, phase: str) -> None:
    """As over NCCL: hosts ask whether what opens a call has ended, keep its deadline, and name the ranks."""
    said = [each for each in four.run(check_missing, [2, 3], phase, True) if each is not None]
    assert {each for each, _ in said} == {phase}


@on_ranks("four")
def test_a_fault_where_streams_wait(context: RankContext) -> None:
    """As over NCCL: a rank that fails in the middle of a call ends the others' wait, long before the deadline."""
    group = dist.new_group(list(range(context.num_ranks)), timeout=timedelta(seconds=8))
    ranks = RankGroup(group, device=context.device, open_timeout_s=60)
    ranks._deadline_is_ours = False
    assert handshake(ranks, {"call": "dispatch"}, None, 0, None)[1] == frozenset()
    if context.rank == 2:
        ranks.abort(MemoryError("no room for rows"))
        return
    with pytest.raises(tl.PeerError, match="MemoryError: no room for rows") as error:
        handshake(ranks, {"call": "combine"}, None, 0, None)
    assert error.value.rank == 2


@on_ranks("four")
@pytest.mark.parametrize("call", ["dispatch", "object", "bytes of an object"])
def test_answers_that_are_stale(context: RankContext, call: str) -> None:
    """As over NCCL, where the abort of one rank ends the collective of all: what they get is of earlier collectives.
    They name who is missing, whatever the words say.
    """
    ranks, other = groups_over_streams(context)
    if context.rank == 3:
        return
    ended = nullcontext() if context.rank == 0 else stale(ranks, call)
    with ended, pytest.raises(tl.PeerTimeout) as error:
        open_call(ranks, call)
    assert error.value.peers == (3,)
    assert ("without the answers of all ranks" in str(error.value)) == (context.rank != 0)
    with pytest.raises(tl.CommunicatorBroken):
        ranks.all_gather_object(context.rank, "testing")
    assert not other.is_broken


@on_ranks("four")
def test_stale_answers_behind_a_fault(context: RankContext) -> None:
    """The rank that failed has said why."""
    ranks, _ = groups_over_streams(context)
    if context.rank == 0:
        ranks.abort(MemoryError("no room for rows"))
        return
    with stale(ranks, "dispatch"), pytest.raises(tl.PeerError, match="MemoryError: no room for rows") as error:
        open_call(ranks, "dispatch")
    assert error.value.rank == 0


def groups_over_streams(context: RankContext) -> list[RankGroup]:
    """Two communicators' on one process group, behind calls of each kind."""
    group = dist.new_group(list(range(context.num_ranks)), timeout=timedelta(seconds=8))
    found = [RankGroup(group, device=context.device) for _ in range(2)]
    for ranks in found:
        ranks._deadline_is_ours = False
        for _ in range(2):
            assert handshake(ranks, {"call": "dispatch"}, None, 0, None)[1] == frozenset()
            assert ranks.all_gather_object(context.rank, "testing") == list(range(context.num_ranks))
        ranks.open_timeout_s = 1.0
    return found


def open_call(ranks: RankGroup, call: str) -> None:
    if call == "dispatch":
        handshake(ranks, {"call": "dispatch"}, None, 0, None)
    else:
        ranks.all_gather_object(ranks.rank if call == "object" else "long" * 10_000, "testing")


@contextmanager
def stale(ranks: RankGroup, call: str) -> Iterator[None]:
    """Gathers end, soon after ranks that wait have given up, with the words of the gather before."""

    def start(row: torch.Tensor, phase: str, *, opens: bool = False, **_: Any) -> Transfer:
        ranks.notes.step += 1
        former, behind = row.expand(ranks.num_ranks, -1).clone(), opens and call.startswith("bytes")
        if not behind:
            former[:, openings.SEQUENCE] -= 1
        return Transfer(former, None if behind else wait)

    def wait() -> frozenset[int]:
        ranks.notes.sign_in(ranks.step)
        time.sleep(1.5)
        return frozenset()

    with mock.patch.object(ranks, "start_all_gather", start):
        yield


@contextmanager
def stopping(at: str) -> Iterator[None]:
    """Die before the transfer of this phase."""

    def before(real: Any) -> Any:
        def start(ranks: RankGroup, *arguments: Any, **options: Any) -> Any:
            if at in arguments:
                raise Death
            return real(ranks, *arguments, **options)

        return start

    names = ("start_all_gather", "start_all_to_all")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(RankGroup, name, before(getattr(RankGroup, name))))
        yield


# -- faults ---------------------------------------------------------------------------------------------------------


@on_ranks("four")
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_fault_between_the_hops(context: RankContext, call: str) -> None:
    """A rank that fails with rows of others in its hands ends the call for all, at once and with its reason."""
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(in_a_group_of_their_own(context), "network", problem.plan)
    if call == "combine":
        routed = comm.dispatch(*problem.arguments(context))
    if context.rank == 2:
        name = {"dispatch": "hand_out", "combine": "collect"}[call]
        with (
            mock.patch.object(CollectivesInside, name, side_effect=MemoryError("no room for rows")),
            pytest.raises(MemoryError),
        ):
            comm.dispatch(*problem.arguments(context)) if call == "dispatch" else comm.combine(routed.tokens, routed)
    else:
        with pytest.raises(tl.PeerError, match="MemoryError: no room for rows") as error:
            comm.dispatch(*problem.arguments(context)) if call == "dispatch" else comm.combine(routed.tokens, routed)
        assert error.value.rank == 2
    with pytest.raises(tl.CommunicatorBroken):
        comm.dispatch(*problem.arguments(context))


# -- many calls -----------------------------------------------------------------------------------------------------


@on_ranks("four")
@pytest.mark.parametrize("on_timeout", mostly_slow(["raise", "mask"], [], ["mask"]))
def test_memory_does_not_grow(context: RankContext, on_timeout: Any) -> None:
    """What a call leaves behind would be there once for each step: an object, or rows of 16 KiB."""
    problem = make_problem(replace(CASE, hidden=4096), context.num_ranks)
    comm = make_comm(context, "network", problem.plan, on_timeout=on_timeout)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    x.requires_grad_()

    def take(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            routed = comm.dispatch(x, ids, weights)
            comm.combine(routed.tokens, routed, mode="per_node").sum().backward()
            x.grad = None
        gc.collect()
        return len(gc.get_objects()), allocated_bytes()

    took = [take(20) for _ in range(4)]
    objects, num_bytes = ([after[i] - before[i] for before, after in pairwise(took)] for i in (0, 1))
    assert min(objects) < 20, objects
    assert min(num_bytes) < 20 * 2 * 4 * 4096, f"{num_bytes}: two rows a step; a rank receives more than ten"


@on_ranks("four")
@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_a_closed_communicator_lets_go_of_its_group(context: RankContext, on_timeout: str) -> None:
    """Threads of gloo end with the last reference to their process group. One that is still at work while Python ends
    aborts the process, though it has called destroy_process_group."""
    problem = make_problem(CASE, context.num_ranks)
    own = in_a_group_of_their_own(context)
    comm = make_comm(own, "network", problem.plan, on_timeout=on_timeout)
    routed = comm.dispatch(*problem.arguments(context))
    comm.combine(routed.tokens, routed)
    comm.close()
    dist.destroy_process_group(own.group)
    group, own.group = weakref.ref(own.group), None
    assert group() is None
    with pytest.raises(tl.CommunicatorBroken):
        comm.combine(routed.tokens, routed)


class AllocatorState(ctypes.Structure):
    """struct mallinfo2 of glibc, 2.33 or newer."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "in_use", "free", "top")
    ]


def allocated_bytes() -> int:
    """What this process has allocated and not freed: without what its allocator keeps for later, unlike its size."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = AllocatorState
    state = mallinfo2()
    return int(state.in_use + state.hblkhd)
