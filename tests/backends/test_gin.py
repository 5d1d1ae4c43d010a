"""Backend "gin" with its own host code on the emulator: bits, errors that all ranks hear of, and what it refuses.

What "padded" does alike is here too, and the rest in test_padded.py. Calls in halves are in test_nodes_halves.py.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.support import emulator
from tests.support.cases import (
    BETWEEN_NODES,
    BF16,
    FP8,
    FP32,
    Case,
    expert_rows,
    make_problem,
    order_of,
    same_bits,
    same_routed,
)
from tests.support.on_ranks import on_ranks
from tests.support.slow import mostly_slow
from tokenloom import reference
from tokenloom.backends.handshake import dispatch_fields
from tokenloom.backends.nodes import gin, memory
from tokenloom.backends.nodes.backend import NodesBackend
from tokenloom.backends.nodes.gin import GIN, NodeMemory
from tokenloom.backends.nodes.sizes import NodeSizes
from tokenloom.backends.registration import Request
from tokenloom.backends.seam import Upcoming
from tokenloom.kernels.common import MAX_SHARED_BYTES
from tokenloom.kernels.common.rail import MOST_CHUNKS
from tokenloom.kernels.dispatch.launch_network import DispatchNetworkVariant
from tokenloom.plan import LAYOUTS, ROUTE_LAYOUTS, Plan, align_up
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.topology import pretended

EXPERIMENTAL = True

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")

SOON_S = 0.0008
"""Of the emulator, where it is a second or two."""
CASE = Case("nodes", "", tokens=(7, 0, 5, 6), hidden=128, top_k=4, unused=0.2)
CASES = {
    "unequal": CASE,
    "fp8": replace(CASE, hidden=256, dtype=FP8, ids_dtype=torch.int32),
    "fp32": replace(CASE, hidden=16, dtype=FP32, weights="nan where unused"),
    "no weights": replace(CASE, hidden=16, weights="absent", pick="repeats"),
    "two chunks": replace(CASE, hidden=16, tokens=(70, 3, 66, 0), top_k=2),
    "none": replace(CASE, hidden=16, tokens=(0,)),
}


each_way = pytest.mark.parametrize("way", BETWEEN_NODES)


def comm_of(context: RankContext, plan: Plan, way: str = "gin", **options: Any) -> tl.Communicator:
    sizes = {name: value for name, value in vars(plan).items() if name != "num_ranks"}
    return tl.Communicator(
        context.group, **{"transport" if way == "gin" else "backend": way, "ranks_per_node": 2, **sizes, **options}
    )


def ranks_on(num_ranks: int, ranks_per_node: int) -> Any:
    """Ranks that agree with each other."""
    agreed = mock.Mock(side_effect=lambda value, phase: [value] * num_ranks)
    topology = pretended(num_ranks, ranks_per_node)
    return mock.Mock(
        topology=topology, device=torch.device("cpu"), rank=1, num_ranks=num_ranks, all_gather_object=agreed
    )


@on_ranks("emulated_four")
@each_way
@pytest.mark.parametrize("name", mostly_slow(CASES, ["unequal"]))
def test_bits(context: RankContext, name: str, way: str) -> None:
    """All layouts there and back, twice each, so that regions take turns."""
    case = CASES[name]
    problem = make_problem(case, context.num_ranks)
    with comm_of(context, problem.plan, way, dtype=None if case.dtype == FP8 else case.dtype) as comm:
        for sizes in ({}, {"sizes": "bounded"}):
            for layout in LAYOUTS:
                there_and_back(context, comm, problem, layout, **(sizes if layout != "slots" else {}))
        comm.check()


def there_and_back(context: RankContext, comm: tl.Communicator, problem: Any, layout: str, **sizes: Any) -> None:
    bounds: dict[str, Any] = {"alignment": 4} if layout == "expert" else {}
    room = {"capacity": problem.rows_needed(layout, **bounds) + 1} if layout == "slots" or sizes else {}
    given = {**bounds, **sizes, **({} if layout == "rank" else room)}
    routed = comm.dispatch(*problem.arguments(context), layout=layout, **given)
    want = problem.dispatched(layout, **bounds, **({} if layout == "rank" else room), bounded=bool(sizes))
    comm.check()
    same_routed(routed, want[context.rank], problem.plan, bounded=bool(sizes) or layout == "slots")
    wire = FP32 if problem.xs[0].dtype == FP32 else BF16
    ys = expert_rows(problem, want, wire)
    by_route = layout in ROUTE_LAYOUTS
    weights = problem.topk_weights if by_route else None
    out = comm.combine(ys[context.rank], routed, weighted=weights is not None if by_route else None)
    wanted = reference.combine(
        problem.plan, ys, want, problem.topk_ids, weights, mode="per_node", nodes=comm.engine.ranks.topology.nodes
    )
    comm.check()
    same_bits(out, wanted[context.rank], "sums")


def test_nobody_else_looks_for_nccl() -> None:
    """Its headers are loaded for those who ask."""
    ready = {"why_no_kernels": mock.Mock(return_value=None), "require_sms": mock.Mock()}
    request = Request("nccl", torch.device("cuda"), plan=Plan(4, 8, 16, 2, 8))
    with mock.patch.multiple(gin, **ready), mock.patch.object(gin, "examine") as examine:
        found = gin.probe(request)
        assert (found.works, found.why) == (False, "only transport='gin' takes it")
        examine.assert_not_called()
        assert gin.probe(replace(request, between_nodes="gin")) is examine.return_value
        assert gin.probe(replace(request, name="gin")) is examine.return_value


def test_window_of_a_plan() -> None:
    """A region for each node and turn, to put from and to: the counts of a source, and most rows, once."""
    plan = Plan(4, 256, 7168, 8, 128)
    with (
        mock.patch.object(gin, "GinMemory") as window,
        mock.patch.object(NodeMemory, "_reset_signals"),
        mock.patch.object(memory, "SymmetricBuffer"),
        mock.patch.object(memory, "free_bytes", return_value=2**40),
    ):
        made = NodeMemory(plan, ranks_on(4, 2), torch.bfloat16)
    header, row = 4 * (4 + 4 + 256) + 16, 2 * 7168 + 4 * (3 * 8 + 2 + 1)
    assert made.regions.region_bytes == align_up(header + 128 * align_up(row, 16), 128)
    assert window.call_args.args[1] == 2 * 2 * 4 * 2 * made.regions.region_bytes
    assert (made.regions.chunks, made.regions.chunk_rows) == (2, 64)
    for dtype in (torch.float16, torch.float8_e4m3fn):
        made.require_room(dtype)
    with pytest.raises(tl.InvalidArgument, match=r"made for torch.bfloat16; make it with dtype=torch.float32"):
        made.require_room(torch.float32)


@pytest.mark.parametrize("carrier", ["gin", "collective"])
def test_most_tokens_of_some_memory(carrier: str) -> None:
    """The largest number whose memory fits; more tokens take more."""
    sizes = NodeSizes(Plan(4, 256, 7168, 8, 512), 2, carrier)
    of_300 = replace(sizes, plan=replace(sizes.plan, max_tokens_per_rank=300)).total_bytes
    assert (sizes.most_tokens(of_300), sizes.most_tokens(of_300 - 1)) == (300, 299)
    assert (sizes.most_tokens(sizes.total_bytes), sizes.most_tokens(1000)) == (512, 0)
    assert sizes.total_bytes == sizes.node_bytes + sizes.carried_bytes


# -- what callers may give ------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks("emulated_four")
@each_way
def test_quantised_rows_to_tensors_of_the_caller(context: RankContext, way: str) -> None:
    """FP8 made on the way, with scales as grouped GEMMs take them; a serving loop that allocates nothing."""
    problem = make_problem(replace(CASE, hidden=256, to_quantise=True), context.num_ranks)
    plan, capacity = problem.plan, problem.rows_needed("slots")
    local = plan.experts_per_rank
    out = tl.DispatchOut(
        tokens=torch.zeros(local, capacity, plan.hidden, dtype=FP8),
        scales=torch.zeros(local, 2, capacity).transpose(1, 2),
        expert_counts=torch.zeros(local, dtype=torch.int32),
        slot_ranges=torch.zeros(local, plan.num_ranks, 2, dtype=torch.int32),
    )
    home = torch.zeros(len(problem.xs[context.rank]), plan.hidden, dtype=BF16)
    x, ids, weights = problem.arguments(context)
    with comm_of(context, plan, way) as comm, torch.no_grad():
        routed = comm.dispatch(
            x, ids, weights, layout="slots", capacity=capacity, to_fp8=True, scale_layout="columns", out=out
        )
        comm.check()
        want = problem.dispatched("slots", capacity=capacity, to_fp8=True, scale_layout="columns")
        same_routed(routed, want[context.rank], plan)
        assert routed.tokens is out.tokens
        assert routed.expert_counts is out.expert_counts
        ys = expert_rows(problem, want, BF16)
        comm.combine(ys[context.rank], routed, mode="per_node", out=home)
        comm.check()
    wanted = reference.combine(
        plan, ys, want, problem.topk_ids, problem.topk_weights, mode="per_node", nodes=[(0, 1), (2, 3)]
    )
    same_bits(home, wanted[context.rank], "sums")


@on_ranks("emulated_four")
@each_way
@pytest.mark.parametrize("layout", mostly_slow(["token", "rank", "expert", "slots"], ["expert"]))
def test_one_scale_for_each_row(context: RankContext, way: str, layout: str) -> None:
    """Made on the way or given, it crosses nodes beside its row."""
    case = replace(CASE, dtype=FP32, hidden=1280, tokens=(7, 4), to_quantise=True, recipe="row")
    problem = make_problem(case, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    want = problem.dispatched(layout, to_fp8=True, recipe="row")[context.rank]
    with comm_of(context, problem.plan, way) as comm, torch.no_grad():
        same_routed(comm.dispatch(x, ids, weights, layout=layout, to_fp8=True, recipe="row"), want, problem.plan)
        pair = tl.quantize_fp8(x, recipe="row")
        routed = comm.dispatch(pair, ids, weights, layout=layout, recipe="row")
        same_routed(routed, want, problem.plan)
        if layout != "slots":
            _, scales = comm.dispatch_again(pair, routed)
            assert routed.scales is not None
            assert scales.shape == routed.scales.shape


@on_ranks("emulated_four")
@pytest.mark.slow
def test_calls_of_a_serving_loop(context: RankContext) -> None:
    """From the second on they are launched with nothing around them, and results stay those of the reference."""
    problem = make_problem(CASE, context.num_ranks)
    with comm_of(context, problem.plan) as comm, torch.no_grad():
        made: Any = comm.engine._backend
        for step in range(4):
            there_and_back(context, comm, problem, "slots")
            there_and_back(context, comm, problem, "rank", sizes="bounded")
            if step == 0:
                made.send_dispatch = made.send_combine = None


@on_ranks("emulated_four")
def test_exact_sizes_read_on_the_host(context: RankContext) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with comm_of(context, problem.plan, checked=True) as comm:
        routed = comm.dispatch(*problem.arguments(context), layout="rank")
        assert type(routed.num_rows) is int
        assert comm.transports == {"own node": "nvlink", "other nodes": "gin"}
        assert "GIN of type none: emulated, window for 2 nodes" in comm.describe()


# -- errors ---------------------------------------------------------------------------------------------------------


@on_ranks("emulated_four")
@each_way
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_all_ranks_hear_of_a_fault(context: RankContext, call: str, way: str) -> None:
    """Rank 3 fails before its call, and takes part in what carries regions. Ranks of both nodes are told why, and go
    on."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    capacity = problem.rows_needed("slots")
    with comm_of(context, problem.plan, way) as comm:
        routed = comm.dispatch(x, ids, weights, layout="slots", capacity=capacity)

        def wrong() -> None:
            if call == "dispatch":
                comm.dispatch(x[:, :8], ids, weights, layout="slots", capacity=capacity)
            comm.combine(routed.tokens[:, :, :8], routed, mode="per_node")

        def right() -> None:
            if call == "dispatch":
                comm.dispatch(x, ids, weights, layout="slots", capacity=capacity)
            else:
                comm.combine(routed.tokens, routed, mode="per_node")

        if context.rank == 3:
            with pytest.raises(tl.ShapeMismatch):
                wrong()
        else:
            right()
            with pytest.raises(tl.PeerError, match=r"rank 3.*ShapeMismatch"):
                comm.check()
        there_and_back(context, comm, problem, "slots")


@on_ranks("emulated_four")
@each_way
def test_all_ranks_hear_of_options_that_differ(context: RankContext, way: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    capacity = problem.rows_needed("slots")
    with comm_of(context, problem.plan, way) as comm:
        for rank in (1, 2):
            own = capacity + (context.rank == rank)
            comm.dispatch(*problem.arguments(context), layout="slots", capacity=own)
            with pytest.raises(tl.PlanMismatch, match=rf"rank {rank} has capacity={capacity + 1}"):
                comm.check()
        there_and_back(context, comm, problem, "slots")


@on_ranks("emulated_four")
@each_way
@pytest.mark.parametrize("odd", range(4))
def test_all_ranks_hear_of_combines_that_differ(context: RankContext, odd: int, way: str) -> None:
    """Ranks of one node differ; those of the other, of which only one hears of each, name the same rank."""
    problem = make_problem(CASE, context.num_ranks)
    with comm_of(context, problem.plan, way) as comm:
        routed = comm.dispatch(*problem.arguments(context), layout="rank", sizes="bounded")
        comm.combine(routed.tokens, routed, mode="per_node", out_dtype=FP32 if context.rank == odd else BF16)
        odd_one, wanted = (odd, FP32) if odd else (1, BF16)
        with pytest.raises(tl.PlanMismatch, match=rf"rank {odd_one} has out_dtype={wanted}"):
            comm.check()
        there_and_back(context, comm, problem, "slots")


@on_ranks("emulated_four")
def test_weights_that_come_later_are_refused(context: RankContext) -> None:
    """Before the ranks that make another call wait for it."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    with comm_of(context, problem.plan) as comm:
        routed = comm.dispatch(x, ids, layout="slots", capacity=problem.rows_needed("slots"))
        if context.rank == 3:
            with pytest.raises(tl.InvalidArgument, match="weights travel with rows only"):
                comm.combine(routed.tokens, routed, mode="per_node", topk_weights=weights)
        else:
            comm.combine(routed.tokens, routed, mode="per_node", weighted=False)
            with pytest.raises(tl.PeerError, match=r"rank 3.*travel with rows only"):
                comm.check()
        by_token = comm.dispatch(x, ids, layout="token")
        for call in (lambda: comm.reweighted(routed, weights), lambda: comm.combine_weights(weights, by_token)):
            with pytest.raises(tl.InvalidArgument, match="weights travel with rows only"):
                call()
        there_and_back(context, comm, problem, "slots")


@on_ranks("emulated_four")
@each_way
def test_faults_behind_an_overflow_that_nobody_has_read(context: RankContext, way: str) -> None:
    """A dispatch in halves waits for no earlier call, with exact sizes either, or ranks would be a call apart."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    with comm_of(context, problem.plan, way) as comm:
        comm.dispatch(x, ids, weights, layout="slots", capacity=problem.rows_needed("slots") - 1)
        with pytest.raises(tl.TokenloomError):
            comm.send_dispatch(x[:, :8] if context.rank == 3 else x, ids, weights, layout="rank").receive()
        for _ in range(3):
            with suppress(tl.PeerError, tl.CapacityOverflow):
                comm.check()
        there_and_back(context, comm, problem, "slots")


@on_ranks("emulated_four")
@each_way
def test_too_many_rows_are_told_on_all_ranks(context: RankContext, way: str) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with comm_of(context, problem.plan, way) as comm:
        for layout in ("slots", "token", "expert"):
            needed = problem.rows_needed(layout)
            options: dict[str, Any] = {"layout": layout, "capacity": needed - 1}
            bounded = options | ({} if layout == "slots" else {"sizes": "bounded"})
            routed = comm.dispatch(*problem.arguments(context), **bounded)
            with pytest.raises(tl.CapacityOverflow) as overflow:
                comm.check()
            assert overflow.value.needed == needed
            want = problem.dispatched(**options, bounded=True)
            same_routed(routed, want[context.rank], problem.plan, bounded=True)
            ys = expert_rows(problem, want, BF16)
            weights = None if layout == "token" else problem.topk_weights
            lost = reference.combine(problem.plan, ys, want, problem.topk_ids, weights, **order_of(comm))
            same_bits(comm.combine(ys[context.rank], routed), lost[context.rank], "sums of tokens that lost a row")
            if layout != "slots":
                with pytest.raises(tl.CapacityOverflow):
                    comm.dispatch(*problem.arguments(context), **options)
        there_and_back(context, comm, problem, "slots")


@pytest.mark.slow
def test_who_is_missing_is_named() -> None:
    """Rank 3 makes no second call. Its neighbour and the rank on its rail name it, and nobody waits for ever."""
    said = emulator.ranks(4).run(check_missing)
    assert said[3] is None
    assert ((3,), (1,)) in said[:3]


def check_missing(context: RankContext) -> Any:
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    comm = comm_of(context, problem.plan, timeout_s=SOON_S)
    made: Any = comm.engine._backend
    torch.distributed.barrier()
    comm.dispatch(x, ids, weights, layout="rank", sizes="bounded")
    comm.check()
    if context.rank == 3:
        return None
    comm.dispatch(x, ids, weights, layout="rank", sizes="bounded")
    with pytest.raises(tl.PeerTimeout) as timeout:
        comm.check()
    comm.close()
    assert made._memory.gin.is_kept, "a late rank may still put to the window"
    return timeout.value.peers, timeout.value.nodes


@on_ranks("emulated_four")
def test_layers_say_at_once_that_they_need_more(context: RankContext) -> None:
    sizes = {"num_experts": 8, "hidden": 128, "intermediate": 128, "top_k": 2, "max_tokens_per_rank": 8}
    with pytest.raises(tl.InvalidArgument, match="needs combine by 'all_to_all', this backend has per_node"):
        tl.ExpertParallelMoE(
            context.group, transport="gin", ranks_per_node=2, strategy=tl.Strategy(combine="all_to_all"), **sizes
        )


@on_ranks("emulated_four")
def test_what_it_has_not(context: RankContext) -> None:
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    capacity = problem.rows_needed("slots")
    with comm_of(context, problem.plan) as comm:
        routed = comm.dispatch(x, ids, weights, layout="slots", capacity=capacity)
        for text, call in {
            "strategy is 'all_gather', this backend has dedup": lambda: comm.dispatch(
                x, ids, weights, strategy="all_gather"
            ),
            "mode is 'per_rank', this backend has per_node": lambda: comm.combine(
                routed.tokens, routed, mode="per_rank"
            ),
            "made for torch.bfloat16; make it with dtype=torch.float32": lambda: comm.dispatch(
                x.float(), ids, weights, layout="slots", capacity=capacity
            ),
            "cannot leave ranks out": lambda: comm.mask_ranks([1] if context.rank != 1 else [0]),
        }.items():
            with pytest.raises(tl.TokenloomError, match=text):
                call()
        there_and_back(context, comm, problem, "slots")


# -- lifetimes ------------------------------------------------------------------------------------------------------


@on_ranks("emulated_four")
def test_one_communicator_after_the_other(context: RankContext) -> None:
    """Signals of a process group stay as the last communicator on it has left them, and its window may come again."""
    for seed in range(3):
        problem = make_problem(replace(CASE, seed=seed), context.num_ranks)
        with comm_of(context, problem.plan) as comm:
            made: Any = comm.engine._backend
            assert made._memory.gin._number == 0, "the window was given back"
            there_and_back(context, comm, problem, "slots")
        torch.distributed.barrier()


@on_ranks("emulated_four")
@pytest.mark.slow
def test_a_close_hears_of_a_wait_that_has_expired(context: RankContext) -> None:
    """Also if nobody has asked for it: the rank that is late may still put to the window."""
    problem = make_problem(CASE, context.num_ranks)
    comm = comm_of(context, problem.plan, timeout_s=SOON_S)
    made: Any = comm.engine._backend
    if context.rank != 3:
        comm.dispatch(*problem.arguments(context), layout="rank", sizes="bounded")
        comm.close()
        assert made._memory.gin.is_kept


def test_what_cannot_be_made_gives_the_window_back() -> None:
    ranks, plan = ranks_on(4, 2), Plan(4, 8, 16, 2, 8)
    with (
        mock.patch.object(gin, "GinMemory") as window,
        mock.patch.object(NodeMemory, "_reset_signals"),
        mock.patch.object(memory, "SymmetricBuffer", side_effect=RuntimeError("no room")),
        mock.patch.object(memory, "free_bytes", return_value=2**40),
        pytest.raises(RuntimeError, match="no room"),
    ):
        NodeMemory(plan, ranks, None)
    window.return_value.close.assert_called_once_with()
    made = mock.Mock()
    unmade = replace(GIN, memory=made, launcher=mock.Mock(side_effect=RuntimeError("no SMs")))
    with pytest.raises(RuntimeError, match="no SMs"):
        NodesBackend(unmade, plan, ranks, 2, None)
    made.return_value.close.assert_called_once_with()


def test_sizes_that_the_probe_takes() -> None:
    """Most tokens of two ranks fit the queue, rows of one byte are narrower than those the memory is for, and records
    of many nodes leave room for rings."""
    ranks = ranks_on(2, 1)
    with (
        mock.patch.object(NodeMemory, "_reset_signals"),
        mock.patch.object(gin, "GinMemory"),
        mock.patch.multiple(memory, SymmetricBuffer=mock.DEFAULT, free_bytes=lambda _: 2**40),
    ):
        made = NodeMemory(Plan(2, 8, 16, 2, 1024), ranks, FP8)
    assert made.regions.chunks == MOST_CHUNKS == 7
    made.require_room(BF16)
    for num_ranks, ranks_per_node, num_experts, hidden in ((32, 1, 256, 8192), (32, 2, 1024, 2560)):
        plan = Plan(num_ranks, num_experts, hidden, 8, 64)
        assert DispatchNetworkVariant(plan, ranks_per_node, x_dtype=BF16).spec().shared_bytes <= MAX_SHARED_BYTES


@on_ranks("emulated_four")
def test_graphs_keep_what_their_kernels_use(context: RankContext) -> None:
    with comm_of(context, make_problem(CASE, context.num_ranks).plan) as comm:
        made: Any = comm.engine._backend
        kept = made._launcher.keep_with_graphs
        assert made._memory in kept
        assert made._shared in kept


@pytest.mark.parametrize(
    ("awaited", "checked", "opened"),
    [(False, False, ["dispatch", "combine"]), (True, False, ["dispatch"]), (False, True, ["dispatch"])],
)
def test_calls_that_follow_a_fault(awaited: bool, checked: bool, opened: list[str]) -> None:
    """As many as the others open before they wait for an outcome; then what this rank has open is received."""
    made: Any = object.__new__(NodesBackend)
    made._launcher = launcher = mock.Mock(current=lambda: (0, False))
    made._checked, fault = checked, ValueError("bad")
    made.report_fault(fault, [Upcoming("dispatch", awaited=awaited), Upcoming("combine")])
    assert launcher.method_calls == [mock.call.report_fault(fault, opened, awaited), mock.call.finish_all()]


def test_narrow_rows_say_their_width() -> None:
    """They travel as bits in rows of the usual width. A rank that sends others by that call is told."""
    plan = Plan(2, 4, 256, 2, 8)
    made: Any = mock.Mock(plan=plan, _checked=False, spec=NodesBackend)
    for name in ("resend", "_resend_to_rows", "_send_rows", "_repeat"):
        setattr(made, name, getattr(NodesBackend, name).__get__(made))
    handle = mock.Mock(ids=lambda: torch.zeros(3, 2, dtype=torch.int32))
    for rows in (torch.ones(3, 256, dtype=BF16), torch.ones(3, 4), torch.ones(3, 8)):
        made.resend(handle, rows, "rows")
    kinds = [call.args[0] for call in made.find_or_prepare.call_args_list]
    assert [kind.x_dtype for kind in kinds] == [BF16] * 3
    assert [dispatch_fields(0, kind).get("width") for kind in kinds] == [None, "4", "8"]
