"""Ranks that come late, hang or die: the others say who is missing, in time, and nothing hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tokenloom as tl
from tests.conftest import CPU_RANKS
from tests.support.cases import FP8, FP32, FP64, Case, make_problem, same_routed
from tokenloom.errors import InvalidArgument
from tokenloom.runtime import rank_group
from tokenloom.runtime.processes import RankContext, RankFailed, RankPool
from tokenloom.runtime.rank_group import RankGroup

Pools = Callable[[str], RankPool]

TIMEOUT_S = 1.0
NOTICE_S = rank_group.ROLL_CALL_S + rank_group.LOOK_EVERY_S + 1.5
"""After the deadline everybody raises within the roll call, one look at the store, and what a busy machine needs."""


LATE_S = TIMEOUT_S + rank_group.ROLL_CALL_S + 1.0
"""When all others are gone."""
ALL = list(range(CPU_RANKS))
PAIR = [1, 2]
"""A group of two ranks in the middle: ranks of a group are not those of the world."""


def new_communicator(context: RankContext, members: list[int], timeout_s: float) -> tl.Communicator | None:
    """On a group of its own, since what a late rank leaves behind would disturb later tests; None outside of it."""
    own = dist.new_group(members)
    if context.rank not in members:
        return None
    return tl.Communicator(
        own, num_experts=2 * len(members), hidden=4, top_k=2, max_tokens_per_rank=3, timeout_s=timeout_s
    )


def dispatch(comm: tl.Communicator) -> tl.Routed:
    """Something for every rank."""
    ids = torch.arange(6).view(3, 2) % comm.plan.num_experts
    return comm.dispatch(torch.ones(3, 4), ids, torch.ones(3, 2))


def run(
    pools: Pools, members: list[int], function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """``function(comm, *args)`` on the ranks of the group; results in the order of the group."""
    results = pools("cpu").run(with_communicator, members, timeout_s, function, *args, limit_s=60.0)
    return [results[member] for member in members]


def with_communicator(
    context: RankContext, members: list[int], timeout_s: float, function: Callable[..., Any], *args: Any
) -> Any:
    comm = new_communicator(context, members, timeout_s)
    return None if comm is None else function(comm, *args)


# -- late ranks -------------------------------------------------------------------------------------------------


def test_slow_rank(pools: Pools) -> None:
    """Within the timeout nothing happens, also when the wait is long enough for the roll and a look at the store."""
    run(pools, ALL, check_slow, timeout_s=20.0)


def check_slow(comm: tl.Communicator) -> None:
    routed = dispatch(comm)
    if comm.rank == 1:
        time.sleep(rank_group.SIGN_IN_AFTER_S + 2.5 * rank_group.LOOK_EVERY_S)
    assert torch.equal(comm.combine(routed.tokens, routed), torch.full((3, 4), 2.0))


@pytest.mark.parametrize(("members", "late"), [pytest.param(ALL, 0, id="all"), pytest.param(PAIR, 1, id="pair")])
def test_late_rank(pools: Pools, members: list[int], late: int) -> None:
    """The others name it and nobody else; each communicator is broken from then on, and closing it works."""
    seen = run(pools, members, check_late, {late: LATE_S})
    for rank, (peers, phase, _) in enumerate(seen):
        if rank != late:
            assert peers == (late,)
            assert phase == "the counts exchange of combine"
    # The late one comes when all others have gone: they are missing to it, one step later.
    others = tuple(rank for rank in range(len(members)) if rank != late)
    assert seen[late][:2] == (others, "combine, partial sums")
    assert {step for rank, (_, _, step) in enumerate(seen) if rank != late} == {seen[late][2] - 1}


def check_late(comm: tl.Communicator, delays: dict[int, float]) -> tuple[tuple[int, ...], str, int]:
    routed = dispatch(comm)
    time.sleep(delays.get(comm.rank, 0.0))
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout) as timeout:
        comm.combine(routed.tokens, routed)
    assert time.monotonic() - began < TIMEOUT_S + NOTICE_S
    assert timeout.value.rank == comm.rank
    assert "look there first" in str(timeout.value)
    assert f"rank(s) {', '.join(map(str, timeout.value.peers))}:" in str(timeout.value)
    calls: list[Callable[[], object]] = [
        lambda: dispatch(comm),
        lambda: comm.combine(routed.tokens, routed),
        comm.check,
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(tl.CommunicatorBroken, match=r"an earlier call failed.*make a new communicator"):
            call()
        assert time.monotonic() - began < 0.5, "nobody waits on a broken communicator"
    comm.close()
    comm.close()
    with pytest.raises(tl.CommunicatorBroken):
        comm.check()
    return timeout.value.peers, timeout.value.phase, timeout.value.epoch


def test_different_skews(pools: Pools) -> None:
    """Two ranks are late and both are named; one that comes just before the deadline of rank 1 is not."""
    seen = run(pools, ALL, check_late, {0: LATE_S, 3: LATE_S, 2: 0.9 * TIMEOUT_S})
    assert [seen[rank][0] for rank in (1, 2)] == [(0, 3), (0, 3)]


def test_late_at_construction(pools: Pools) -> None:
    """Making a communicator has the same deadline; once all ranks are back, a new group works."""
    pools("cpu").run(check_late_at_construction, limit_s=60.0)


def check_late_at_construction(context: RankContext) -> None:
    own, again = dist.new_group(ALL), dist.new_group(ALL)
    if context.rank == 2:
        time.sleep(LATE_S)
    sizes = {"num_experts": 8, "hidden": 4, "top_k": 2, "max_tokens_per_rank": 3}
    with pytest.raises(tl.PeerTimeout) as timeout:
        tl.Communicator(own, **sizes, timeout_s=TIMEOUT_S)
    if context.rank != 2:
        assert timeout.value.peers == (2,)
        assert timeout.value.phase == "making a Communicator"
    comm = tl.Communicator(again, **sizes)
    routed = dispatch(comm)
    assert torch.equal(comm.combine(routed.tokens, routed), torch.full((3, 4), 2.0))


def test_tiny_timeout(pools: Pools) -> None:
    """A limit below one millisecond is a limit too."""
    pools("cpu").run(check_tiny_timeout, limit_s=60.0)


def check_tiny_timeout(context: RankContext) -> None:
    ranks = RankGroup(dist.new_group(list(range(context.num_ranks))), timeout_s=1e-4)
    if context.rank == 0:
        time.sleep(rank_group.ROLL_CALL_S + 0.5)
        return
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout):
        ranks.all_gather(torch.ones(1), "the test")
    assert time.monotonic() - began < NOTICE_S


# -- dead ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.0, 0.8], ids=["at once", "while others wait"])
def test_dead_process(delay_s: float) -> None:
    """All others name it within seconds, also those that a collective does not connect with it."""
    heard: list[tuple[int, tuple[int, ...], float]] = []
    with RankPool(CPU_RANKS) as pool:
        with pytest.raises(RankFailed, match="exit code 7") as failed:
            pool.run(check_death, 2, delay_s, on_event=heard.append)
        assert failed.value.rank == 2
    assert sorted(rank for rank, _, _ in heard) == [0, 1, 3]
    for _, peers, waited_s in heard:
        assert peers == (2,)
        assert waited_s < delay_s + NOTICE_S + 1.0


def check_death(context: RankContext, dying: int, delay_s: float) -> None:
    comm = new_communicator(context, list(range(context.num_ranks)), timeout_s=60.0)
    assert comm is not None
    dispatch(comm)
    if context.rank == dying:
        time.sleep(delay_s)
        os._exit(7)
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout) as timeout:
        dispatch(comm)
    context.report((context.rank, timeout.value.peers, time.monotonic() - began))
    with pytest.raises(tl.CommunicatorBroken):
        dispatch(comm)
    comm.close()


class GoneStore:
    """A store whose host is dead."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: object) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

        return call


def test_store_is_gone(pools: Pools) -> None:
    """Where the dead rank was the host of the store, the error is still PeerTimeout; peers unknown."""
    run(pools, PAIR, check_store_is_gone)


def check_store_is_gone(comm: tl.Communicator) -> None:
    if comm.rank == 1:
        time.sleep(TIMEOUT_S + 0.5)
        return
    rank_group._store_of = lambda _: GoneStore()  # type: ignore[assignment]
    try:
        with pytest.raises(tl.PeerTimeout, match=r"rank\(s\) unknown") as timeout:
            dispatch(comm)
    finally:
        rank_group._store_of = real_store_of
    assert timeout.value.peers == ()


real_store_of = rank_group._store_of

# -- what a group is --------------------------------------------------------------------------------------------


def test_alone() -> None:
    """No torch.distributed: every collective is a copy."""
    alone = RankGroup(None)
    assert (alone.rank, alone.num_ranks, alone.transport, alone.device.type) == (0, 1, "local", "cpu")
    rows = torch.randn(3, 2)
    for got in (alone.all_to_all(rows, [3], [3], "test"), alone.all_reduce_sum(rows, "test")):
        assert torch.equal(got, rows)
        assert got.data_ptr() != rows.data_ptr()
    assert torch.equal(alone.all_gather(torch.arange(3), "test"), torch.tensor([[0, 1, 2]]))
    assert alone.all_gather_object({"any": "thing"}, "test") == [{"any": "thing"}]
    alone.require_alive()
    alone.close()
    with pytest.raises(tl.CommunicatorBroken, match="closed"):
        alone.require_alive()


@pytest.mark.parametrize("members", [ALL, PAIR], ids=["all", "pair"])
def test_collectives(pools: Pools, members: list[int]) -> None:
    """Any dtype, unequal and empty parts, objects of any size; ranks counted within the group."""
    pools("cpu").run(check_collectives, members)


def check_collectives(context: RankContext, members: list[int]) -> None:
    own = dist.new_group(members)
    if context.rank not in members:
        with pytest.raises(InvalidArgument, match="not a rank of the group"):
            RankGroup(own)
        return
    ranks = RankGroup(own)
    me, num_ranks = members.index(context.rank), len(members)
    assert (ranks.rank, ranks.num_ranks, ranks.transport) == (me, num_ranks, "gloo")
    for dtype in (torch.bfloat16, torch.float16, FP32, FP64, FP8, torch.int32, torch.int64):
        # Rank r sends r rows to rank 0, r + 1 to rank 1, ...: row values say from where to where.
        send, receive = [me + r for r in range(num_ranks)], [r + me for r in range(num_ranks)]
        rows = torch.cat([torch.full((count, 3), 10.0 * me + r) for r, count in enumerate(send)]).to(dtype)
        want = torch.cat([torch.full((count, 3), 10.0 * r + me) for r, count in enumerate(receive)]).to(dtype)
        got = ranks.all_to_all(rows, send, receive, "test")
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert ranks.all_gather(torch.tensor([me, 7]), "test").tolist() == [[r, 7] for r in range(num_ranks)]
    assert ranks.all_gather_object("x" * 1000 * me, "test") == ["x" * 1000 * r for r in range(num_ranks)]
    values = torch.tensor([float(me), 1.0])
    assert ranks.all_reduce_sum(values, "test").tolist() == [sum(range(num_ranks)), num_ranks]
    assert values.tolist() == [me, 1.0]


def test_device_mesh(pools: Pools) -> None:
    """A one-dimensional mesh is its group; of more dimensions one has to be picked."""
    pools("cpu").run(check_device_mesh)


def check_device_mesh(context: RankContext) -> None:
    mesh = DeviceMesh("cpu", torch.arange(context.num_ranks).view(2, -1), mesh_dim_names=("data", "expert"))
    with pytest.raises(InvalidArgument, match=r"2 dimensions; pass one of them: mesh\['name'\]"):
        RankGroup(mesh)
    problem = make_problem(Case("mesh", ""), context.num_ranks // 2)
    part = mesh["expert"]
    rank = part.get_local_rank()
    sizes = {name: value for name, value in vars(problem.plan).items() if name != "num_ranks"}
    comm = tl.Communicator(part, **sizes)
    assert (comm.rank, comm.num_ranks) == (rank, context.num_ranks // 2)
    own = RankContext(rank, comm.num_ranks, part.get_group(), context.device, None)  # type: ignore[arg-type]
    same_routed(comm.dispatch(*problem.arguments(own)), problem.dispatched("expert")[rank], problem.plan)


def test_default_group(pools: Pools) -> None:
    """group=None is the default group where torch.distributed is initialised."""
    pools("cpu").run(check_default_group)


def check_default_group(context: RankContext) -> None:
    assert (RankGroup(None).rank, RankGroup(None).num_ranks) == (dist.get_rank(), dist.get_world_size())
