"""Backend "network": what crosses the network, groups of six ranks, nodes that do not fit, and ranks that fail.

Two nodes of two run all cases of ``each_backend`` as well, and those of comm/test_masks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP32,
    Case,
    Problem,
    case_params,
    expert_rows,
    make_comm,
    make_problem,
    same_bits,
    same_routed,
)
from tests.support.layer_cases import LayerCase, make_inputs, make_layer
from tests.support.on_ranks import on_ranks
from tests.support.slow import mostly_slow
from tokenloom import reference
from tokenloom.backends.nodes import gin, memory
from tokenloom.backends.nodes.hierarchical import backend as network_backend
from tokenloom.backends.nodes.hierarchical.exchange import NodeExchange
from tokenloom.backends.nodes.hierarchical.inside import SentRows
from tokenloom.backends.nodes.hierarchical.paths import arrange, find_paths
from tokenloom.backends.nodes.sizes import NodeSizes
from tokenloom.backends.registration import Availability
from tokenloom.comm.communicator import Communicator
from tokenloom.ops import routing
from tokenloom.plan import ROUTE_LAYOUTS, Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.topology import Place, pretended
from tokenloom.training.pieces import RunOptions
from tokenloom.training.routed_experts import routed_experts
from tokenloom.training.shards import local_part

EXPERIMENTAL = True

LAYOUTS = ("token", "rank", "expert", "slots")
CASE = Case("nodes", "", tokens=(7, 0, 5, 6, 3, 8), experts_per_rank=2, hidden=16, top_k=4, unused=0.2, dtype=FP32)


def sent_rows(comm: Communicator) -> SentRows:
    return comm.engine._backend.sent  # type: ignore[attr-defined]


# -- what crosses the network ---------------------------------------------------------------------------------------


def rows_per_token(num_nodes: int, generator: torch.Generator) -> float:
    """Rows to other nodes per token: top-8 of 256, on nodes of 8 ranks, of which all are simulated."""
    num_tokens, num_ranks = 500, 8 * num_nodes
    plan = Plan(num_ranks, 256, hidden=8, top_k=8, max_tokens_per_rank=num_tokens)
    total = 0
    for rank in range(num_ranks):
        ids = torch.rand(num_tokens, 256, generator=generator).topk(8).indices
        total += int(crossing(ids, plan, 8, rank // 8).sum())
    return total / (num_tokens * num_ranks)


def crossing(ids: torch.Tensor, plan: Plan, ranks_per_node: int, home: int) -> torch.Tensor:
    """int64 [T]: rows that each token sends to other nodes, as the exchange counts them."""
    positions = routing.home_positions_per_rank(routing.send_map(ids, plan), len(ids), plan.num_ranks)
    on_nodes = routing.on_nodes(positions >= 0, ranks_per_node)
    on_nodes[:, home] = False
    return on_nodes.sum(1)


@pytest.mark.parametrize(("num_nodes", "rows"), [(2, 1.00), (4, 2.71), (8, 4.63)])
def test_rows_of_large_groups(num_nodes: int, rows: float) -> None:
    """What `tokenloom plan` expects of a router that chooses evenly; within the noise of so many draws."""
    assert rows_per_token(num_nodes, torch.Generator().manual_seed(num_nodes)) == pytest.approx(rows, abs=0.02)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data())
def test_never_more_than_nodes_or_routes(data: st.DataObject) -> None:
    """For any routing: repeats, unused places, all to one node."""
    num_nodes, ranks_per_node = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    plan = Plan(num_nodes * ranks_per_node, num_nodes * ranks_per_node * 2, 8, data.draw(st.integers(1, 8)), 8)
    row = st.lists(st.integers(-1, plan.num_experts - 1), min_size=plan.top_k, max_size=plan.top_k)
    ids = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=8)))
    found = crossing(ids, plan, ranks_per_node, home=data.draw(st.integers(0, num_nodes - 1)))
    assert bool((found <= (ids >= 0).sum(1).clamp_max(num_nodes - 1)).all())


@pytest.mark.parametrize("pick", mostly_slow(["distinct", "repeats", "one rank"], ["one rank"]))
def test_rows_on_the_wire(four: Ranks, pick: str) -> None:
    """Per (token, node) to other nodes in a dispatch and in a combine per node; per (token, rank) in the default."""
    four.run(check_rows, replace(CASE, pick=pick))


@pytest.mark.slow
def test_rows_on_the_wire_of_three_nodes(six: Ranks) -> None:
    six.run(check_rows, CASE)


def check_rows(context: RankContext, case: Case) -> None:
    problem = make_problem(case, context.num_ranks)
    comm = make_comm(context, "network", problem.plan)
    me, sent = context.rank, sent_rows(comm)
    node, rail = divmod(me, 2)
    holders = [
        [{e // case.experts_per_rank for e in row if e >= 0} for row in ids.tolist()] for ids in problem.topk_ids
    ]
    x, ids, weights = problem.arguments(context)
    routed = comm.dispatch(x, ids, weights)
    to_nodes = sum(len({rank // 2 for rank in ranks} - {node}) for ranks in holders[me])
    on_rail = [source for source in range(context.num_ranks) if source % 2 == rail]
    neighbour = me ^ 1
    passed_on = sum(neighbour in ranks for source in on_rail for ranks in holders[source])
    assert sent == SentRows(to_nodes, passed_on)

    sent.between_nodes = sent.inside_node = 0
    comm.combine(routed.tokens, routed, mode="per_node")
    away = [source for source in on_rail if source // 2 != node]
    home_from_here = [{rank for rank in ranks if rank // 2 == node} for source in away for ranks in holders[source]]
    collected = sum(
        me in ranks for source in range(context.num_ranks) if source % 2 != rail for ranks in holders[source]
    )
    assert sent == SentRows(sum(bool(ranks) for ranks in home_from_here), collected)

    sent.between_nodes = sent.inside_node = 0
    comm.combine(routed.tokens, routed)
    assert sent == SentRows(sum(len(ranks) for ranks in home_from_here), collected)
    comm.close()


# -- against the reference ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [2, 3])
@pytest.mark.parametrize(
    "case",
    case_params(["plain", "top8", "unused", "no-weights", "first-empty", "one-has-all", "no-tokens", "to-one-rank",
                 "own-rank", "full", "hidden1", "fp64", "fp8-unused"]),
)  # fmt: skip
def test_six_ranks(six: Ranks, case: Case, ranks_per_node: int) -> None:
    """Every layout, exact and bounded, and every order of sums; unequal, zero and skewed tokens."""
    six.run(check_layouts, case, ranks_per_node)


def check_layouts(context: RankContext, case: Case, ranks_per_node: int) -> None:
    problem = make_problem(case, context.num_ranks)
    with make_comm(context, "network", problem.plan, ranks_per_node=ranks_per_node) as comm:
        all_layouts(context, comm, problem)


def all_layouts(context: RankContext, comm: Communicator, problem: Problem) -> None:
    for layout in LAYOUTS:
        options: dict[str, Any] = {"layout": layout, "alignment": 4 if layout == "expert" else 1}
        options["recipe"] = problem.recipe
        if layout == "slots":
            options["capacity"] = problem.rows_needed("slots") + 1
        there_and_back(context, comm, problem, options, bounded=False)
        if layout in ("token", "expert"):
            options["capacity"] = problem.rows_needed(layout, options["alignment"]) + 3
            there_and_back(context, comm, problem, options, bounded=True)


def there_and_back(
    context: RankContext, comm: Communicator, problem: Problem, options: dict[str, Any], bounded: bool
) -> None:
    sizes = {"sizes": "bounded"} if bounded else {}
    routed = comm.dispatch(*problem.arguments(context), **options, **sizes)
    want = problem.dispatched(**options, bounded=bounded)
    same_routed(routed, want[context.rank], problem.plan, bounded=bounded)
    by_route = options["layout"] in ROUTE_LAYOUTS
    weights = problem.topk_weights if by_route else None
    ys, nodes = expert_rows(problem, want, BF16), comm.engine.ranks.topology.nodes
    own_ids = [ids if rank == context.rank else ids[:0] for rank, ids in enumerate(problem.topk_ids)]
    for mode in ("per_rank", "per_node", "per_route") if by_route else ("per_rank", "per_node"):
        wanted = reference.combine(problem.plan, ys, want, own_ids, weights, mode=mode, out_dtype=FP32, nodes=nodes)[
            context.rank
        ]
        weighted = weights is not None if by_route else None
        out = comm.combine(ys[context.rank].to(context.device), routed, mode=mode, out_dtype=FP32, weighted=weighted)
        same_bits(out, wanted, f"{options}, {mode}")


@pytest.mark.slow
@pytest.mark.parametrize(("holders", "ranks_per_node"), [([3, 4, 5], 3), ([0, 2, 4], 2)], ids=["within", "over"])
def test_order(six: Ranks, holders: list[int], ranks_per_node: int) -> None:
    """A sum of three ranks of a node, and one over three nodes, ascend: 1 is lost before the large terms cancel."""
    six.run(check_order, holders, ranks_per_node)


def check_order(context: RankContext, holders: list[int], ranks_per_node: int) -> None:
    plan = Plan(6, 6, hidden=8, top_k=3, max_tokens_per_rank=1)
    ids = torch.tensor([holders] if context.rank == 0 else [], dtype=torch.int64).view(-1, 3)
    with make_comm(context, "network", plan, ranks_per_node=ranks_per_node) as comm:
        routed = comm.dispatch(torch.ones(len(ids), 8), ids, None, layout="token")
        values = dict(zip(holders, [1.0, 2.0**30, -(2.0**30)], strict=True))
        y = torch.full(routed.tokens.shape, values.get(context.rank, torch.nan))
        out = comm.combine(y, routed, mode="per_node")
        assert torch.equal(out, torch.zeros(len(ids), 8))


# -- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["dedup", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("dispatch", ["dedup", "all_gather", "all_to_all"])
@pytest.mark.slow
def test_layers(four: Ranks, dispatch: str, combine: str) -> None:
    """Outputs and all gradients of a layer, by every strategy: the bits of one node."""
    four.run(check_layer, tl.Strategy(dispatch, combine))


@pytest.mark.slow
def test_layer_per_node(four: Ranks) -> None:
    """A layer that takes it sums in another order, and nothing else differs."""
    four.run(check_layer, tl.Strategy(combine="per_node"))


def check_layer(context: RankContext, strategy: tl.Strategy) -> None:
    flat = train(context, strategy, backend="collective", ranks_per_node=2)
    nodes = train(context, strategy, backend="network", ranks_per_node=2)
    one_node = train(context, strategy, backend="collective")
    for ours, theirs, plain in zip(nodes, flat, one_node, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
        assert strategy.combine == "per_node" or torch.equal(ours, plain)


@on_ranks("four")
@pytest.mark.parametrize("way", ["collective", "network"])
def test_gradients_per_node(context: RankContext, way: str) -> None:
    """Of tokens: added within nodes first, in the order that the reference has, and a row per node comes home."""
    plan, weights = Plan(4, 4, hidden=8, top_k=3, max_tokens_per_rank=1), torch.ones(1, 3)
    ids = [torch.tensor([[0, 2, 3]])] + [torch.empty(0, 3, dtype=torch.int64)] * 3
    one = torch.zeros(1, 8)
    one[0, 0] = 1.0  # w1 and w2 have this value alone, so relu2 of it gives w2 and, as gradient of its input, 2 * w2
    large = [1.0, 0.0, 2.0**30, -(2.0**30)][context.rank]
    xs = [one[: len(each)] for each in ids]
    dispatched = reference.dispatch(plan, xs, ids, None, "expert")
    factors = [2.0, 0.0, 2.0**31, -(2.0**31)]
    grads = [factor * each.tokens for factor, each in zip(factors, dispatched, strict=True)]
    with make_comm(context, way, plan, ranks_per_node=2) as comm:
        for combine, mode in (("dedup", "per_rank"), ("per_node", "per_node")):
            x = xs[context.rank].clone().requires_grad_()
            options = RunOptions(tl.Strategy(combine=combine))
            w1, w2 = one[None], large * one.t()[None]
            there = weights[: len(x)]
            out = routed_experts(comm, options, x, ids[context.rank], there, w1, w2, activation="relu2")
            sent = sent_rows(comm) if way == "network" else SentRows()
            sent.between_nodes = 0
            out.backward(one[: len(x)])
            nodes = comm.engine.ranks.topology.nodes
            wanted = reference.combine(plan, grads, dispatched, ids, None, mode=mode, nodes=nodes)[context.rank]
            same_bits(x.grad, wanted, mode)
            assert wanted.sum() == (2.0 if mode == "per_node" and context.rank == 0 else 0.0)
            if way == "network":
                assert sent.between_nodes == [1, 0, 1 if mode == "per_node" else 2, 0][context.rank]


def train(
    context: RankContext,
    strategy: tl.Strategy | None,
    dtype: torch.dtype = torch.float64,
    *,
    layer_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    case = LayerCase(dtype=dtype)
    group = {"hidden": 16, "num_experts": 8, "top_k": 3, "max_tokens_per_rank": sum(case.tokens)}
    comm = Communicator(context.group, dtype=dtype, **group, **options)
    layer = make_layer(case, None, comm=comm, strategy=strategy, max_tokens_per_rank=None, **(layer_options or {}))
    xs, factors = make_inputs(case, context.num_ranks)
    x = xs[context.rank].to(context.device).requires_grad_()
    out, aux_loss = layer(x)
    ((out * factors[context.rank].to(context.device)).sum() + aux_loss / context.num_ranks).backward()
    found = [out.detach(), x.grad, *(local_part(parameter.grad) for parameter in layer.parameters())]
    comm.close()
    return [tensor for tensor in found if tensor is not None]


# -- nodes as they are, and as they must be -------------------------------------------------------------------------

SIZES: dict[str, Any] = {"num_experts": 8, "hidden": 16, "top_k": 2, "max_tokens_per_rank": 4}


def on_hosts(hosts: str, rank: int) -> Any:
    return mock.patch("tokenloom.runtime.topology.Place.own", return_value=Place(hosts[rank]))


def test_auto_picks_it_on_several_nodes(four: Ranks) -> None:
    """Hosts are found out, and describe() says nodes and rails."""
    four.run(check_hosts, "aabb", "network", ["2 nodes of 2; 2 rails of 2"])


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ("aaab", "network does not work here: nodes have unequal numbers of ranks: node 0 has ranks 0, 1, 2, node 1"),
        ("abab", "network does not work here: ranks are not in the order of nodes: rank 1 is on node 1"),
        ("abcd", "network does not work here: each node has one rank"),
    ],
)
def test_other_nodes_stay_flat(four: Ranks, hosts: str, reason: str) -> None:
    """With the reason in describe(), and sums per node all the same."""
    four.run(check_hosts, hosts, "collective", [f"{len(set(hosts))} nodes", f"not picked: {reason}"])


def check_hosts(context: RankContext, hosts: str, backend: str, texts: Sequence[str]) -> None:
    with on_hosts(hosts, context.rank):
        comm = Communicator(context.group, **SIZES)
    assert comm.backend == backend
    assert all(text in comm.describe() for text in texts), comm.describe()
    problem = make_problem(replace(CASE, top_k=2), context.num_ranks)
    problem = replace(problem, plan=replace(problem.plan, max_tokens_per_rank=8))
    with on_hosts(hosts, context.rank):
        there_and_back(context, make_comm(context, "auto", problem.plan), problem, {"layout": "token"}, bounded=False)
        if backend != "network":
            with pytest.raises(tl.BackendUnavailable, match="network does not work here"):
                Communicator(context.group, backend="network", **SIZES)


@on_ranks("four")
def test_ranks_that_see_different_nodes(context: RankContext) -> None:
    """Which ranks, and what each sees. Rows go straight then, and hosts are the nodes of sums."""
    places = [Place("a", "w", ("x",)), Place("a", "x"), Place("b", "y"), Place("b", "z")]  # 0 cannot reach 1
    doubt = "ranks see different nodes: rank 0 sees rank 0 on its node, rank 1 sees ranks 0, 1; pass ranks_per_node"
    with mock.patch("tokenloom.runtime.topology.Place.own", return_value=places[context.rank]):
        with Communicator(context.group, **SIZES) as comm:
            assert comm.backend == "collective"
            assert f"2 nodes, no rails: {doubt}" in comm.describe()
            assert f"not picked: network does not work here: {doubt}" in comm.describe()
        with pytest.raises(tl.BackendUnavailable) as error:
            Communicator(context.group, backend="network", **SIZES)
        assert str(error.value) == f"network does not work here: {doubt}"
        with Communicator(context.group, ranks_per_node=2, **SIZES) as comm:
            assert comm.backend == "network"


@on_ranks("four")
def test_one_node_says_nothing_of_nodes(context: RankContext) -> None:
    with Communicator(context.group, **SIZES) as comm:
        assert comm.backend == "collective"
        assert "network" not in comm.describe()
        assert "node" not in comm.describe()


@on_ranks("four")
def test_wrong_arguments(context: RankContext) -> None:
    """Each on all ranks alike, or with the rank that differs."""
    with pytest.raises(tl.InvalidArgument, match="ranks_per_node is 3, expected a divisor of 4, the ranks"):
        Communicator(context.group, ranks_per_node=3, **SIZES)
    with pytest.raises(tl.PlanMismatch, match=r"rank 3.*ranks_per_node"):
        Communicator(context.group, ranks_per_node=1 if context.rank == 3 else 2, **SIZES)


# -- what crosses nodes ---------------------------------------------------------------------------------------------


@on_ranks("four")
def test_transports(context: RankContext) -> None:
    """By kind of peer, in describe() and as a property; one that is forced and cannot be is an error of all ranks."""
    both = {"own node": "collective", "other nodes": "collective"}
    for transport in ("auto", "collective"):
        for backend in ("auto", "collective"):
            options = {"transport": transport, "backend": backend, "ranks_per_node": 2}
            with Communicator(context.group, **options, **SIZES) as comm:
                assert comm.backend == ("network" if backend == "auto" else backend)
                assert comm.transports == both
                assert "own node by collective, other nodes by collective" in comm.describe()
    with Communicator(context.group, transport="collective", **SIZES) as comm:
        assert comm.transports == {"own node": "collective"}
    layer = tl.ExpertParallelMoE(context.group, intermediate=8, transport="collective", ranks_per_node=2, **SIZES)
    assert layer.comm.transports == both
    with pytest.raises(tl.PlanMismatch, match=r"rank 3 has transport=auto, rank 0 has transport=collective"):
        Communicator(context.group, transport="auto" if context.rank == 3 else "collective", **SIZES)
    with pytest.raises(tl.InvalidArgument, match="transport is 'tcp', expected one of auto, collective, gin, nvlink"):
        Communicator(context.group, transport="tcp", **SIZES)


@on_ranks("four")
def test_nvlink_between_nodes_is_refused(context: RankContext) -> None:
    """On all ranks, with who lies where; and where nothing crosses, but not by NVLink."""
    where = r"there are 2 nodes: ranks? 0, 1 on node 0, ranks? 2, 3 on node 1; use transport='auto'"
    for backend in ("auto", "network", "nvlink"):
        with pytest.raises(tl.BackendUnavailable, match=where):
            Communicator(context.group, backend=backend, transport="nvlink", ranks_per_node=2, **SIZES)
    with pytest.raises(tl.BackendUnavailable, match=r"nvlink does not work on every rank: it needs .* on cpu"):
        Communicator(context.group, transport="nvlink", **SIZES)
    with pytest.raises(tl.BackendUnavailable, match="it does not send by NVLink alone, transport is 'nvlink'"):
        Communicator(context.group, backend="collective", transport="nvlink", **SIZES)


@on_ranks("four")
def test_gin_is_refused(context: RankContext) -> None:
    """With the first rank that could not use it, and what it lacks. Other transports are not blamed."""

    def examine(device: torch.device) -> Availability:
        return Availability("gin", context.rank < 2, "no RDMA card")

    text = "gin does not work on {}; use transport='auto'"
    with pytest.raises(tl.BackendUnavailable) as error:
        Communicator(context.group, transport="gin", ranks_per_node=2, **SIZES)
    assert str(error.value) == text.format("every rank: it needs a GPU, the tensors are on cpu")
    sizes = SIZES | {"hidden": 128}
    with (
        mock.patch.object(gin, "examine", examine),
        mock.patch.object(gin, "why_no_kernels", return_value=None),
        mock.patch.object(gin, "require_sms"),
        pytest.raises(tl.BackendUnavailable) as error,
    ):
        tl.ExpertParallelMoE(context.group, intermediate=8, transport="gin", ranks_per_node=2, **sizes)
    assert str(error.value) == text.format("rank 2: no RDMA card")
    three = NodeSizes(Plan(4, 8, 128, 2, 3), 2, "gin").total_bytes
    free = three if context.rank == 2 else 10**9
    with (
        mock.patch.object(gin, "examine", return_value=Availability("gin", True, "")),
        mock.patch.object(gin, "why_no_kernels", return_value=None),
        mock.patch.object(gin, "require_sms"),
        mock.patch.object(memory, "free_bytes", return_value=free),
        pytest.raises(tl.InvalidArgument, match=r"rank 2 has 0.0 GB free; pass max_tokens_per_rank=3, or take"),
    ):
        Communicator(context.group, transport="gin", ranks_per_node=2, **sizes)


@on_ranks("four")
def test_a_rank_that_fails_takes_all_to_the_next(context: RankContext) -> None:
    """Nobody keeps a half of a backend; whoever asked for it hears which rank failed, and why."""
    fails = {"side_effect": RuntimeError("no room")} if context.rank == 2 else {"wraps": NodeExchange}
    with mock.patch.object(network_backend, "NodeExchange", **fails):
        with pytest.raises(tl.BackendUnavailable, match=r"network does not work on rank 2: it failed .* no room"):
            Communicator(context.group, backend="network", ranks_per_node=2, **SIZES)
        with Communicator(context.group, ranks_per_node=2, **SIZES) as comm:
            assert comm.backend == "collective"
            assert "not picked: network does not work on rank 2: it failed when it was made" in comm.describe()


# -- ranks that are missing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_node_is_masked(four: Ranks, when: str) -> None:
    """Both ranks of it, before a dispatch or before its combine; and one rank, for which its neighbour stands in."""
    four.run(check_masked, when, [2, 3])
    four.run(check_masked, when, [2])


def check_masked(context: RankContext, when: str, masked: list[int]) -> None:
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(context, "network", problem.plan)
    gone = torch.tensor(masked)
    ids = [torch.where(torch.isin(each // 2, gone), -1, each) for each in problem.topk_ids]
    ids = [each[:0] if rank in masked else each for rank, each in enumerate(ids)]
    rest = replace(problem, topk_ids=ids, xs=[x[: len(each)] for x, each in zip(problem.xs, ids, strict=True)])
    dispatched = rest if when == "before" else problem
    if when == "before":
        if context.rank in masked:
            return
        comm.mask_ranks(masked)
    routed, want = comm.dispatch(*problem.arguments(context)), dispatched.dispatched("expert")
    same_routed(routed, want[context.rank], problem.plan)
    if when == "between":
        if context.rank in masked:
            return
        comm.mask_ranks(masked)
    ys, nodes = expert_rows(problem, want, BF16), comm.engine.ranks.topology.nodes
    for mode in ("per_rank", "per_node"):
        outs = reference.combine(problem.plan, ys, want, ids, problem.topk_weights, mode=mode, nodes=nodes)
        same_bits(comm.combine(ys[context.rank], routed, mode=mode), outs[context.rank], mode)


@on_ranks("four")
def test_a_rank_comes_back_to_its_node(context: RankContext) -> None:
    """It has found out no nodes by itself, and gets those of the others."""
    options = {"backend": "network", "checked": True}
    with on_hosts("aabb", context.rank):
        comm = Communicator(context.group, **SIZES, **options)
    if context.rank == 3:
        comm.close()
        comm = Communicator(context.group, rejoin=True, **SIZES, **options)
    else:
        comm.mask_ranks([3])
        comm.unmask_ranks([3])
    assert comm.engine.ranks.topology.nodes == ((0, 1), (2, 3))
    case = replace(CASE, top_k=2, tokens=(4, 0, 3, 2), spare=0)
    there_and_back(context, comm, make_problem(case, context.num_ranks), {"layout": "expert"}, bounded=False)


# -- paths ----------------------------------------------------------------------------------------------------------


def test_paths_follow_rails() -> None:
    """Rank 3 is on node 1 and rail 1 of 3 nodes of 2."""
    paths = find_paths(pretended(6, 2), 3, frozenset())
    assert paths.forwarders == [1, 3, 5]
    assert paths.served == {2: [0, 2, 4], 3: [1, 3, 5]}


def test_neighbours_stand_in() -> None:
    """Rank 5 is masked, so rank 4 forwards for its rail; ranks 0 and 1 are, so nobody does for their node."""
    paths = find_paths(pretended(6, 2), 4, frozenset({0, 1, 5}))
    assert paths.forwarders == [None, 2, 4]
    assert paths.served == {4: [2, 3, 4]}
    assert paths.living == [[], [2, 3], [4]]


def test_blocks_are_arranged() -> None:
    """Blocks that have not come are zeros; empty ones take no place."""
    rows = torch.arange(1, 6, dtype=torch.uint8)[:, None].repeat(1, 8)
    came = [("a", 2), ("b", 0), ("c", 3)]
    assert arrange(rows, came, came) is rows
    assert arrange(rows, came, [("c", 3), ("d", 2), ("a", 2), ("b", 0)])[:, 0].tolist() == [3, 4, 5, 0, 0, 1, 2]
    assert arrange(rows[:0], [], [("a", 2)]).tolist() == [[0] * 8] * 2
