"""Backend "network" with kernels inside nodes, on the emulator: bits, rows that are sent, and when it has no kernels.

All cases of ``each_backend`` run there too: ``pytest -p tests.support.emulator.plugin -m "" -k "emulated4 and
network" tests/comm``. On four GPUs they run as two nodes of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends import test_network
from tests.backends.test_network import CASE, all_layouts, check_rows
from tests.conftest import NETWORK_RANKS, WHY_NO_HOPPER, Ranks
from tests.support import emulator
from tests.support.cases import BF16, FP8, FP16, FP32, FP64, Case, expert_rows, make_problem, same_bits, same_routed
from tests.support.on_ranks import on_ranks
from tests.support.slow import mostly_slow
from tokenloom import reference
from tokenloom.backends.nodes.hierarchical import nvlink_inside
from tokenloom.backends.nodes.hierarchical.inside import CollectivesInside
from tokenloom.backends.nodes.hierarchical.node_ranks import NodeRanks
from tokenloom.backends.nodes.hierarchical.nvlink_inside import NvlinkInside, inner_plans, objection
from tokenloom.backends.registration import Availability, Request
from tokenloom.plan import MAX_TOP_K, Plan
from tokenloom.runtime.processes import RankContext, RankPool
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology, pretended

EXPERIMENTAL = True

emulated = pytest.mark.skipif(emulator.CXX is None, reason="no g++")

UNEQUAL = replace(CASE, dtype=BF16)
CASES = {
    "unequal": UNEQUAL,
    "fp16": replace(UNEQUAL, dtype=FP16, weights="nan where unused"),
    "fp32": CASE,
    "fp64": replace(UNEQUAL, dtype=FP64, hidden=3),
    "fp8": replace(UNEQUAL, dtype=FP8, hidden=256, ids_dtype=torch.int32),
    "fp8, row": replace(UNEQUAL, dtype=FP8, hidden=256, recipe="row"),
    "odd width, no weights": replace(UNEQUAL, hidden=7, weights="absent", pick="repeats"),
    "to one rank, full": replace(UNEQUAL, tokens=(5,), spare=0, pick="one rank"),
    "to all, full": replace(UNEQUAL, tokens=(3, 5), spare=0, top_k=8, unused=0.0),
    "one has all": replace(UNEQUAL, tokens=(0, 0, 0, 6, 0, 0)),
    "none": replace(UNEQUAL, tokens=(0,)),
}


def comm_of(context: RankContext, plan: Plan, **options: Any) -> tl.Communicator:
    sizes = {name: value for name, value in vars(plan).items() if name != "num_ranks"}
    options = {"backend": "network", "ranks_per_node": 2, "checked": True} | options
    return tl.Communicator(context.group, **sizes, **options)


def inside_of(comm: tl.Communicator) -> Any:
    return comm.engine._backend._inside  # type: ignore[attr-defined]


# -- bits -----------------------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("name", mostly_slow(CASES, ["unequal"]))
def test_bits(name: str) -> None:
    """All layouts, both kinds of sizes and all orders of sums, on two nodes."""
    emulator.ranks(4).run(check_bits, CASES[name], 2)


@pytest.mark.gpu(NETWORK_RANKS, may_share=True)
@pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER))
@pytest.mark.parametrize("name", CASES)
def test_bits_on_gpus(pools: Callable[[str], RankPool], name: str) -> None:
    """The same on four GPUs, which are two nodes."""
    Ranks(pools("cuda"), NETWORK_RANKS).run(check_bits, CASES[name], 2)


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [2, 3])
@pytest.mark.parametrize("name", ["unequal", "fp32", "fp8", "to one rank, full", "one has all"])
def test_bits_of_six_ranks(name: str, ranks_per_node: int) -> None:
    emulator.ranks(6).run(check_bits, CASES[name], ranks_per_node)


def check_bits(context: RankContext, case: Case, ranks_per_node: int) -> None:
    problem = make_problem(case, context.num_ranks)
    dtype = None if case.dtype == FP8 else case.dtype
    with comm_of(context, problem.plan, ranks_per_node=ranks_per_node, dtype=dtype) as comm:
        assert isinstance(inside_of(comm), NvlinkInside)
        all_layouts(context, comm, problem)
        comm.check()


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(("holders", "ranks_per_node"), [([3, 4, 5], 3), ([0, 2, 4], 2)], ids=["within", "over"])
def test_order(holders: list[int], ranks_per_node: int) -> None:
    """Sums ascend over the ranks of a node, and over nodes."""
    emulator.ranks(6).run(test_network.check_order, holders, ranks_per_node)


@on_ranks("emulated_four")
@emulated
@pytest.mark.parametrize(("dtype", "small", "wanted"), [(BF16, 2.0**-8, 1 + 2.0**-8), (FP64, 2.0**-40, 1 + 2.0**-39)])
def test_sums_are_rounded_where_they_leave(
    context: RankContext, dtype: torch.dtype, small: float, wanted: float
) -> None:
    """In bfloat16, 1 + 2^-8 is 1. So it is on its way between nodes; what the other node adds at home is not lost.
    Rows of float64 are added in float64, by no kernel."""
    plan = Plan(4, 4, hidden=8, top_k=3, max_tokens_per_rank=1)
    ids = torch.tensor([[2, 3, 0]] if context.rank == 0 else [], dtype=torch.int64).view(-1, 3)
    with comm_of(context, plan) as comm:
        x = torch.ones(len(ids), 8, dtype=dtype, device=context.device)
        routed = comm.dispatch(x, ids.to(context.device), None, layout="token")
        value = {0: small, 2: 1.0, 3: small}.get(context.rank, torch.nan)
        y = torch.full(routed.tokens.shape, value, dtype=dtype, device=context.device)
        out = comm.combine(y, routed, mode="per_node", out_dtype=FP32 if dtype == BF16 else dtype).cpu()
        assert torch.equal(out, torch.full((len(ids), 8), wanted, dtype=out.dtype))


@on_ranks("emulated_four")
@pytest.mark.slow
@emulated
def test_combine_long_after_its_dispatch(context: RankContext) -> None:
    """What the kernels remember of a dispatch outlasts the receive buffers of later ones."""
    problems = [make_problem(replace(UNEQUAL, seed=seed), context.num_ranks) for seed in range(4)]
    with comm_of(context, problems[0].plan) as comm:
        routed = [comm.dispatch(*each.arguments(context), layout="token") for each in problems]
        for problem, each in zip(problems, routed, strict=True):
            want = problem.dispatched("token")
            same_routed(each, want[context.rank], problem.plan)
            ys, nodes = expert_rows(problem, want, BF16), comm.engine.ranks.topology.nodes
            for mode in ("per_node", "per_rank"):
                outs = reference.combine(problem.plan, ys, want, problem.topk_ids, None, mode=mode, nodes=nodes)
                y = ys[context.rank].to(context.device)
                same_bits(comm.combine(y, each, mode=mode), outs[context.rank], mode)


@on_ranks("emulated_four")
@emulated
def test_halves(context: RankContext) -> None:
    """Two calls are open at once, and received in either order."""
    problems = [make_problem(replace(UNEQUAL, seed=seed), context.num_ranks) for seed in range(2)]
    with comm_of(context, problems[0].plan) as comm:
        pending = [comm.send_dispatch(*each.arguments(context), layout="token") for each in problems]
        second, first = pending[1].receive(), pending[0].receive()
        for problem, routed in zip(problems, (first, second), strict=True):
            same_routed(routed, problem.dispatched("token")[context.rank], problem.plan)
        ys = [expert_rows(each, each.dispatched("token"), BF16) for each in problems]
        sums = [
            comm.send_combine(y[context.rank].to(context.device), routed, mode="per_node")
            for y, routed in zip(ys, (first, second), strict=True)
        ]
        found = [sums[1].receive(), sums[0].receive()][::-1]
        nodes = comm.engine.ranks.topology.nodes
        for problem, y, out in zip(problems, ys, found, strict=True):
            want = problem.dispatched("token")
            wanted = reference.combine(problem.plan, y, want, problem.topk_ids, None, mode="per_node", nodes=nodes)
            same_bits(out, wanted[context.rank], "sums")


@emulated
@pytest.mark.parametrize(
    "strategy",
    [
        tl.Strategy(combine="per_node"),
        pytest.param(tl.Strategy(), marks=pytest.mark.slow),
        pytest.param(tl.Strategy("all_gather", "reduce_scatter"), marks=pytest.mark.slow),
        pytest.param(tl.Strategy("all_to_all", "all_to_all"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers(four: Ranks, strategy: tl.Strategy) -> None:
    """Outputs and all gradients of a layer: the bits of collectives inside nodes."""
    kernels = emulator.ranks(4).run(train, strategy)
    for ours, theirs in zip(kernels, four.run(train, strategy), strict=True):
        assert len(ours) == len(theirs)
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def train(context: RankContext, strategy: tl.Strategy) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    return test_network.train(context, strategy, FP32, backend="network", ranks_per_node=2)


# -- rows that are sent ---------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("pick", ["distinct", "one rank"])
def test_rows_on_the_wire(pick: str) -> None:
    """As many as with collectives inside nodes."""
    emulator.ranks(4).run(check_rows, replace(CASE, pick=pick))


@emulated
@pytest.mark.slow
def test_rows_on_the_wire_of_three_nodes() -> None:
    emulator.ranks(6).run(check_rows, CASE)


@emulated
def test_each_node_is_a_transfer_of_its_own() -> None:
    """In a ring, so that what one brings is handed out while the next ones run; none within the own node."""
    emulator.ranks(6).run(check_ring)


def check_ring(context: RankContext) -> None:
    problem = make_problem(UNEQUAL, context.num_ranks)
    node, rail = divmod(context.rank, 2)
    to = [(node + step) % 3 * 2 + rail for step in (1, 2)]
    came_from = [(node - step) % 3 * 2 + rail for step in (1, 2)]
    seen: list[tuple[list[int], list[int]]] = []
    with comm_of(context, problem.plan) as comm:
        ranks: Any = comm.engine.ranks
        real = ranks.start_all_to_all

        def start(rows: Any, send: list[int], recv: list[int], phase: str, out: Any = None) -> Any:
            seen.append(([r for r in range(6) if send[r]], [r for r in range(6) if recv[r]]))
            return real(rows, send, recv, phase, out)

        ranks.start_all_to_all = start
        routed = comm.dispatch(*problem.arguments(context), layout="token")
        for mode in ("per_node", "per_rank"):
            assert len(seen) == 2
            for step, (sent, came) in enumerate(seen):
                assert set(sent) <= {to[step]}
                assert set(came) <= {came_from[step]}
            seen.clear()
            comm.combine(routed.tokens, routed, mode=mode)


# -- a rank that is missing -----------------------------------------------------------------------------------------


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("dead", [1, 3])
def test_who_is_missing_is_named(dead: int) -> None:
    """A rank ends before the last piece. Its neighbour names it as the whole group does, and places no rows before:
    what lies where they should be is of an earlier call."""
    said = emulator.ranks(4).run(check_missing, dead)
    assert [each for each in said if each is not None] == [said[dead - 1]] == [(dead - 1, (dead,), (dead // 2,))]


class Stop(BaseException):
    """Ends a rank in the middle of a call."""


def check_missing(context: RankContext, dead: int) -> Any:
    first, second = (make_problem(replace(UNEQUAL, unused=unused), context.num_ranks) for unused in (0.0, 0.8))
    comm = comm_of(context, first.plan, checked=False, timeout_s=0.0015)  # some seconds of the emulator
    comm.dispatch(*first.arguments(context))
    if context.rank == dead:
        inside = inside_of(comm)
        real, pieces = inside._dispatch, iter(range(2))

        def dispatch(*given: Any) -> Any:
            if next(pieces):
                raise Stop
            return real(*given)

        inside._dispatch = dispatch
        with pytest.raises(Stop):
            comm.dispatch(*second.arguments(context))
        return None
    comm.dispatch(*second.arguments(context))
    try:
        comm.check()
    except tl.PeerTimeout as timeout:
        with pytest.raises(tl.CommunicatorBroken):
            comm.dispatch(*first.arguments(context))
        return timeout.rank, timeout.peers, timeout.nodes
    return None


# -- memory, and what is said of it ---------------------------------------------------------------------------------


@on_ranks("emulated_four")
@emulated
def test_what_it_says(context: RankContext) -> None:
    problem = make_problem(replace(UNEQUAL, hidden=128), context.num_ranks)
    with comm_of(context, problem.plan) as comm:
        assert comm.transports == {"own node": "nvlink", "other nodes": "collective"}
        assert comm.engine.capabilities.takes_sms
        assert "own node by nvlink, other nodes by collective" in comm.describe()
        made = [line for line in comm.describe().splitlines() if "inside the node, rows of" in line]
        assert [" made at the first call" in line for line in made] == [True, True, False, True, True]
        routed = comm.dispatch(*problem.arguments(context), layout="token")
        comm.combine(routed.tokens, routed, mode="per_node")
        assert set(inside_of(comm)._backends) == {2}, "both go by the same memory"


def test_widths() -> None:
    """Rows of every payload fit with all that travels beside it, at multiples of 16 bytes."""
    plan = Plan(16, 256, hidden=7168, top_k=8, max_tokens_per_rank=4096)
    widths = {key: each.hidden * (4 if key > 2 else 2) for key, each in inner_plans(plan, 8).items()}
    ids, weights, flags, scales = 4 * 9, 4 * 8, 8, 4 * 56
    least = [ids + weights + flags]
    least += [7168 + scales + least[0], 2 * 7168 + least[0], 4 * 7168 + least[0], 8 * 7168 + ids + 2 * weights + flags]
    for width, needed in zip(widths.values(), least, strict=True):
        assert needed <= width < needed + 16
        assert width % 16 == 0
    for each in inner_plans(plan, 8).values():
        assert (each.num_ranks, each.num_experts, each.top_k, each.max_tokens_per_rank) == (8, 8, 8, 4096)


# -- when there are no kernels --------------------------------------------------------------------------------------


def found(works: bool = True, host: str = "a", gpu: str = "x") -> Availability:
    return Availability("nvlink", works, "no Hopper", {"host": host, "gpu": gpu})


def test_one_node_without_kernels_is_enough() -> None:
    """GPUs may be the same ones on other nodes, where nodes are pretended."""
    good = [found(gpu="x"), found(gpu="y")]
    assert objection(good + good, pretended(4, 2)) == ""
    assert objection([*good, found(), found(False)], pretended(4, 2)) == (
        "nvlink does not work on rank 1 of the 2 of node 1: no Hopper"
    )
    shared = "nvlink does not work on rank 1 of the 2 of node 1: it shares its GPU with rank 0"
    assert objection([*good, found(), found()], pretended(4, 2)) == shared


@pytest.mark.parametrize("ranks_per_node", [MAX_TOP_K + 1, 64])
def test_nodes_of_more_ranks_than_kernels_serve(ranks_per_node: int) -> None:
    """Their plan, in which ranks stand for experts of a token, was refused, and with it the whole communicator."""
    num_ranks = 2 * ranks_per_node
    request = Request("nccl", torch.device("cuda"), plan=Plan(num_ranks, num_ranks, 16, 2, 8), num_sms=16)
    ranks = mock.Mock(device=torch.device("cuda"), rank=0, topology=pretended(num_ranks, ranks_per_node))
    made = nvlink_inside.make_inside(request, ranks)
    assert isinstance(made, CollectivesInside)
    why = f"nvlink serves at most {MAX_TOP_K} ranks, nodes have {ranks_per_node}"
    assert made.memory() == [f"no kernels inside nodes: {why}"]


@on_ranks("four")
@pytest.mark.parametrize("failing", ["probe", "memory", ""])
def test_all_ranks_choose_alike(context: RankContext, failing: str) -> None:
    """A rank without kernels, or whose memory cannot be made, leaves all of them with collectives, and the reason."""
    ranks = RankGroup(context.group)
    ranks.topology = pretended(4, 2)
    request = Request("nccl", torch.device("cuda"), plan=Plan(4, 8, 16, 2, 8), num_sms=16)
    last = context.rank == 3
    probe = mock.Mock(return_value=found(not (last and failing == "probe"), gpu=str(context.rank)))
    kernels = mock.Mock(side_effect=RuntimeError("no room") if last and failing == "memory" else None)
    ranks.device = torch.device("cuda")
    with (
        mock.patch.object(nvlink_inside.peers, "REGISTRATION", mock.Mock(probe=probe, objections=lambda found: [])),
        mock.patch.object(nvlink_inside, "NvlinkInside", kernels),
        mock.patch.object(RankGroup, "all_gather_object", gathered_on_cpu),
    ):
        made = nvlink_inside.make_inside(request, ranks)
    assert probe.call_args.args[0].plan.num_ranks == 2
    if not failing:
        assert made is kernels.return_value
        return
    assert isinstance(made, CollectivesInside)
    why = {
        "probe": "no kernels inside nodes: nvlink does not work on rank 1 of the 2 of node 1: no Hopper",
        "memory": "no kernels inside nodes: nvlink failed on rank 3: no room",
    }
    assert made.memory() == [why[failing]]
    if failing == "memory" and not last:
        kernels.return_value.close.assert_called_once_with()


def gathered_on_cpu(self: RankGroup, value: Any, phase: str) -> list[Any]:
    said: list[Any] = [None] * self.num_ranks
    torch.distributed.all_gather_object(said, value, group=self.process_group)
    return said


@on_ranks("four")
def test_other_backends_look_for_none(context: RankContext) -> None:
    """On CPUs nobody asks the others, so that a rank can come back alone."""
    with (
        mock.patch.object(nvlink_inside, "why_not", side_effect=AssertionError),
        tl.Communicator(context.group, backend="network", ranks_per_node=2, **test_network.SIZES) as comm,
    ):
        assert comm.transports == {"own node": "collective", "other nodes": "collective"}
        assert "no kernels" not in comm.describe()


# -- ranks of a node ------------------------------------------------------------------------------------------------


@on_ranks("four")
def test_ranks_of_a_node(context: RankContext) -> None:
    """They hear their neighbours' values, and of the faults of all."""
    whole = RankGroup(context.group)
    whole.topology = Topology((0, 0, 1, 1))
    ranks = NodeRanks(whole)
    first = context.rank // 2 * 2
    assert (ranks.rank, ranks.num_ranks, ranks.members) == (context.rank % 2, 2, (first, first + 1))
    assert ranks.topology.num_nodes == 1
    assert ranks.all_gather_object(context.rank, "test") == [first, first + 1]

    def prepare(fails: int) -> tuple[dict[str, Any], int]:
        if context.rank == fails:
            raise tl.InvalidArgument("no room")
        return {}, context.rank

    assert nvlink_inside.agree(ranks, lambda: prepare(-1), "test") == [first, first + 1]
    with pytest.raises(tl.InvalidArgument if context.rank == 3 else tl.PeerError, match="no room"):
        nvlink_inside.agree(ranks, lambda: prepare(3), "test")
    ranks.notes.post("fault", str(context.rank))
    whole.all_gather_object(None, "test")
    assert ranks.notes.read("fault", 1) == str(first + 1)
    with pytest.raises(NotImplementedError):
        ranks.all_gather(torch.zeros(1), "test")
    timeout = ranks.in_whole(tl.PeerTimeout(ranks.rank, [1], "rows", 7, "late"))
    assert (timeout.rank, timeout.peers, timeout.nodes) == (context.rank, (first + 1,), (first // 2,))
