"""on_timeout="mask" on backend "network": who is lost in the middle of a call takes no rows of others with it.

The call is made again without it, so all that stay get what they get with it, or all what they get without it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Literal
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.comm.test_masks import LAYOUTS, options_of, pair, without
from tests.comm.test_on_timeout import CASE, LONG_S, TIMEOUT_S, Death, dying
from tests.conftest import Ranks
from tests.support.cases import Problem, expert_rows, make_comm, make_problem, same_bits, same_routed
from tests.support.layer_cases import LayerCase, make_layer
from tests.support.on_ranks import on_ranks
from tests.support.patience import done, when_done, with_late
from tests.support.slow import mostly_slow
from tokenloom import reference
from tokenloom.backends.nodes.hierarchical.exchange import NodeExchange
from tokenloom.backends.nodes.hierarchical.inside import CollectivesInside
from tokenloom.comm.communicator import Communicator
from tokenloom.runtime.links import Links
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

EXPERIMENTAL = True

WAYS: tuple[Literal["raise", "mask"], ...] = ("raise", "mask")
TRANSFERS = 8
"""Of a dispatch and of a combine each: handshake, two hops, and the meeting at the end."""


def make(context: RankContext, timeout_s: float = LONG_S, **options: Any) -> tuple[tl.Communicator, Problem]:
    problem = make_problem(CASE, context.num_ranks)
    options = {"timeout_s": timeout_s, "on_timeout": "mask"} | options
    return make_comm(context, "network", problem.plan, **options), problem


# -- ranks that end ---------------------------------------------------------------------------------------------


DEATHS: list[tuple[int, str, str]] = [
    *((transfer, "partly", "per_node") for transfer in range(1, TRANSFERS + 1)),
    *((transfer, how, "per_node") for transfer in (3, 6) for how in ("before", "after")),
    *((transfer, "partly", "per_rank") for transfer in (6, 7, 8)),
]
OFTEN = [(2, "partly", "per_node"), (7, "partly", "per_node")]


@pytest.mark.parametrize(
    ("transfer", "how", "mode"),
    [pytest.param(*death, marks=() if death in OFTEN else pytest.mark.slow) for death in DEATHS],
)
def test_death_in_every_transfer(four: Ranks, transfer: int, how: str, mode: str) -> None:
    """Before a transfer, when it has reached one rank, or all. What the others get is the same with it or without."""
    for dead in ([2], [2, 3]) if how == "partly" else ([2],):
        found = four.run(check_death, dead, transfer, how, mode)
        assert len({each for rank, each in enumerate(found) if rank not in dead}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [2, 3])
@pytest.mark.parametrize("transfer", [2, 3, 6, 7])
def test_death_among_six(six: Ranks, transfer: int, ranks_per_node: int) -> None:
    """Of one rank, and of a whole node, in each hop."""
    for dead in ([1], list(range(ranks_per_node))):
        found = six.run(check_death, dead, transfer, "partly", "per_node", ranks_per_node)
        assert len({each for rank, each in enumerate(found) if rank not in dead}) == 1


def check_death(
    context: RankContext, dead: list[int], transfer: int, how: str, mode: Any, ranks_per_node: int = 2
) -> tuple[bool, bool] | None:
    """Returns: whether the dispatch, and the combine, had the dead ranks."""
    comm, problem = make(context, ranks_per_node=ranks_per_node)
    rest, me, nodes = without(problem, dead), context.rank, comm.engine.ranks.topology.nodes
    pair(context, comm, problem, [], "token")
    if me in dead:
        with mock.patch.object(Links, "start", dying(transfer, how)), suppress(Death):
            routed = comm.dispatch(*problem.arguments(context), layout="token")
            comm.combine(routed.tokens, routed, mode=mode)
        comm.engine.ranks._disconnect()
        return None
    began = time.monotonic()
    routed = comm.dispatch(*problem.arguments(context), layout="token")
    wants = [each.dispatched("token") for each in (problem, rest)]
    had = routed.num_rows == wants[0][me].num_rows
    same_routed(routed, wants[not had][me], problem.plan)
    ys = [each.tokens for each in wants[not had]]
    out = comm.combine(routed.tokens, routed, mode=mode)
    outs = [
        reference.combine(problem.plan, ys, wants[not had], each.topk_ids, None, mode=mode, nodes=nodes)[me]
        for each in (problem, rest)
    ]
    equal = [torch.equal(out.nan_to_num(99.0), each.nan_to_num(99.0)) for each in outs]
    assert any(equal)
    pair(context, comm, problem, dead, "expert")
    assert time.monotonic() - began < 0.5 * LONG_S
    return had, had and equal[0]


@on_ranks("four")
@pytest.mark.parametrize("combine", mostly_slow(["dedup", "reduce_scatter", "all_to_all", "per_node"], ["per_node"]))
@pytest.mark.parametrize("dispatch", mostly_slow(["dedup", "all_gather", "all_to_all"], ["all_gather"]))
def test_death_in_a_backward(context: RankContext, dispatch: str, combine: str) -> None:
    """With gradients of others in its hands, however payloads travel: as if it had been masked before."""
    strategy = tl.Strategy(dispatch, combine)
    found, hop = [], 2 if strategy.combine == "reduce_scatter" else 3  # whose gradient goes straight, by one transfer
    for on_timeout in WAYS:
        sizes: dict[str, Any] = {"num_experts": 8, "hidden": 16, "top_k": 3, "max_tokens_per_rank": 8}
        comm = Communicator(context.group, ranks_per_node=2, on_timeout=on_timeout, timeout_s=LONG_S, **sizes)
        layer = make_layer(LayerCase(), None, comm=comm, strategy=strategy, max_tokens_per_rank=None)
        x = torch.ones(3 + context.rank, 16, dtype=layer.experts.w1.dtype).cumsum(0).requires_grad_()
        out, _ = layer(x)
        if context.rank == 1:
            if on_timeout == "mask":
                with mock.patch.object(Links, "start", dying(hop, "before")), suppress(Death):
                    out.sum().backward()
                comm.engine.ranks._disconnect()
            continue
        if on_timeout == "raise":
            comm.mask_ranks([1])
        out.sum().backward()
        assert comm.masked_ranks() == [1]
        found.append([x.grad, *(local_part(parameter.grad) for parameter in layer.parameters())])
    for ours, wanted in zip(*found, strict=True) if found else ():
        assert (ours is None) == (wanted is None)
        assert ours is None or torch.equal(ours, wanted)


# -- ranks that come late ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("place", ["call", "hop"])
def test_late(four: Ranks, place: str) -> None:
    """For a call, or with rows of others in its hands: they go another way, and nobody else is masked."""
    four.run(with_late, 2, check_late, place)


def check_late(context: RankContext, place: str) -> None:
    comm, problem = make(context, TIMEOUT_S)
    others = [0, 1, 3]
    if context.rank == 2:

        def late(*_: Any) -> None:
            when_done(comm.engine.ranks, others)
            raise KeyboardInterrupt

        where = (NodeExchange, "counts") if place == "call" else (CollectivesInside, "hand_out")
        with mock.patch.object(*where, late), pytest.raises(KeyboardInterrupt):
            comm.dispatch(*problem.arguments(context), **options_of(problem, "token"))
        return
    for layout in ("token", "expert"):
        pair(context, comm, problem, [2], layout)
    done(comm.engine.ranks)


@on_ranks("four")
def test_halves(context: RankContext) -> None:
    """The first half does all of a call: x may change behind it, and two calls may be open when a rank dies."""
    comm, problem = make(context)
    first, x = comm.dispatch(*problem.arguments(context)), problem.xs[context.rank].clone()
    want = problem.dispatched("expert")
    ys = expert_rows(problem, want, CASE.dtype)
    if context.rank == 0:
        with mock.patch.object(Links, "start", dying(6, "partly")), suppress(Death):
            home = comm.send_combine(ys[0], first)
            comm.send_dispatch(*problem.arguments(context))
        comm.engine.ranks._disconnect()
        return
    home = comm.send_combine(ys[context.rank], first)
    pending = comm.send_dispatch(x, *problem.arguments(context)[1:])
    x.zero_()
    same_routed(pending.receive(), without(problem, [0]).dispatched("expert")[context.rank], problem.plan)
    outs = reference.combine(problem.plan, ys, want, problem.topk_ids, problem.topk_weights)
    same_bits(home.receive(), outs[context.rank], "out")
    for layout in LAYOUTS:
        pair(context, comm, problem, [0], layout)


@on_ranks("four")
def test_overflow_of_a_dispatch_that_is_made_again(context: RankContext) -> None:
    """Rows that were lost with a rank overflow nothing."""
    comm, problem = make(context)
    rest = without(problem, [2])
    capacity = rest.rows_needed("token")
    assert capacity < problem.rows_needed("token")
    options: dict[str, Any] = {"layout": "token", "sizes": "bounded", "capacity": capacity}
    if context.rank == 2:
        with mock.patch.object(Links, "start", dying(2, "before")), suppress(Death):
            comm.dispatch(*problem.arguments(context), **options)
        comm.engine.ranks._disconnect()
        return
    routed = comm.dispatch(*problem.arguments(context), **options)
    same_routed(
        routed, rest.dispatched("token", capacity=capacity, bounded=True)[context.rank], problem.plan, bounded=True
    )
    comm.check()


@on_ranks("four")
def test_back_again(context: RankContext) -> None:
    """A rank that was lost comes back, and rows take their rails again."""
    comm, problem = make(context)
    if context.rank == 3:
        with mock.patch.object(Links, "start", dying(2, "before")), suppress(Death):
            comm.dispatch(*problem.arguments(context), layout="token")
        comm.close()
        comm, _ = make(context, rejoin=True)
    else:
        pair(context, comm, problem, [3], "token")
        comm.unmask_ranks([3])
    for layout in LAYOUTS:
        pair(context, comm, problem, [], layout)
