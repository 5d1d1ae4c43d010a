"""Communicators that go on without ranks that users mask, bit for bit as the reference without their routes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import GPU_RANKS, HOPPER, NETWORK_RANKS, Ranks
from tests.support import emulator
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
from tests.support.on_ranks import on_ranks
from tests.support.wire import count_wire
from tokenloom import reference
from tokenloom.errors import InvalidArgument
from tokenloom.plan import DISPATCH_STRATEGIES, ROUTE_LAYOUTS
from tokenloom.runtime.processes import RankContext, RankPool

CASES = ["plain", "top8", "nan-weights", "no-weights", "to-one-rank", "fp8-unused"]
LAYOUTS = ("token", "rank", "expert", "slots")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_mask = pytest.mark.parametrize("which", ["first", "last", "all but one"])
CASE = Case("masks", "", tokens=(7, 5, 0, 6), experts_per_rank=2, hidden=16, top_k=4, unused=0.2, dtype=FP32)
REPEATS = replace(CASE, pick="repeats")


EMULATED = True
SIZES = [size for size in (2, 4, 8) if size <= GPU_RANKS and HOPPER]


def _groups() -> list[Any]:
    if emulator.ON:
        return [pytest.param(("emulated", size), id=f"emulated{size}") for size in (2, 4)]
    slow = {2: pytest.mark.slow, 4: ()}
    cpu = [pytest.param(("cpu", size), id=f"cpu{size}", marks=slow[size]) for size in (2, 4)]
    cpu.append(pytest.param(("nodes", NETWORK_RANKS), id="nodes4", marks=pytest.mark.slow))
    return cpu + [pytest.param(("cuda", size), id=f"cuda{size}", marks=pytest.mark.gpu) for size in SIZES]


class OnNodes(Ranks):
    """The same ranks on 2 nodes of 2."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return super().run(on_nodes, function, *args, **kwargs)


def on_nodes(context: RankContext, function: Callable[..., Any], *args: Any) -> Any:
    with mock.patch(f"{__name__}.backend_of", return_value="network"):
        return function(context, *args)


@pytest.fixture(params=_groups())
def group(request: pytest.FixtureRequest, pools: Callable[[str], RankPool]) -> Any:
    """Groups in which ranks can be left out: over gloo, and GPUs with our kernels."""
    device, size = request.param
    if device == "nodes":
        return OnNodes(pools("cpu"), size)
    return emulator.ranks(size) if device == "emulated" else Ranks(pools(device), size)


def backend_of(context: RankContext) -> str:
    """The backend that leaves ranks out on this rank's device."""
    return "nvlink" if context.device.type == "cuda" or emulator.ON else "collective"


def masked_of(which: str, num_ranks: int) -> list[int]:
    """Ranks to mask."""
    return {"first": [0], "last": [num_ranks - 1], "all but one": [rank for rank in range(num_ranks) if rank != 1]}[
        which
    ]


def without(problem: Problem, ranks: Collection[int], sources: bool = True) -> Problem:
    """The problem with ids of -1 for these ranks' experts, and with ``sources`` without their tokens."""

    def kept(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [each[:0] if sources and rank in ranks else each for rank, each in enumerate(tensors)]

    local, ids = problem.plan.experts_per_rank, []
    for each in problem.topk_ids:
        gone = torch.isin(each.div(local, rounding_mode="floor"), torch.tensor(sorted(ranks)))
        ids.append(torch.where(gone, -1, each))
    return replace(
        problem,
        xs=kept(problem.xs),
        scales=problem.scales and kept(problem.scales),
        topk_ids=kept(ids),
        topk_weights=problem.topk_weights and kept(problem.topk_weights),
    )


def options_of(problem: Problem, layout: str, **others: Any) -> dict[str, Any]:
    room = {"capacity": problem.rows_needed("slots") + 1} if layout == "slots" else {}
    return {"layout": layout, "alignment": 4 if layout == "expert" else 1} | room | others


def combine_all_modes(
    context: RankContext,
    comm: tl.Communicator,
    routed: tl.Routed,
    problem: Problem,
    want: list[reference.Routed],
    ids: list[torch.Tensor],
    y_dtype: torch.dtype = BF16,
) -> None:
    """Every mode of a combine, where ``want`` is what all ranks received and ``ids`` are the routes that count."""
    ys = expert_rows(problem, want, y_dtype)
    y, by_route = ys[context.rank].to(context.device), routed.layout in ROUTE_LAYOUTS
    nodes = comm.engine.ranks.topology.nodes
    for mode in ("per_rank", "per_node", "per_route") if by_route else ("per_rank", "per_node"):
        weights = problem.topk_weights if by_route else None
        outs = reference.combine(problem.plan, ys, want, ids, weights, mode=mode, nodes=nodes)
        same_bits(comm.combine(y, routed, mode=mode), outs[context.rank], f"{routed.layout}, {mode}")


def pair(context: RankContext, comm: tl.Communicator, problem: Problem, masked: list[int], layout: str) -> None:
    """A dispatch and its combines in all modes, without these ranks."""
    rest, options = without(problem, masked), options_of(problem, layout)
    routed, want = comm.dispatch(*problem.arguments(context), **options), rest.dispatched(**options)
    same_routed(routed, want[context.rank], problem.plan, bounded=layout == "slots")
    combine_all_modes(context, comm, routed, rest, want, rest.topk_ids)
    assert comm.masked_ranks() == masked


# -- before a call ----------------------------------------------------------------------------------------------


@on_ranks("group")
@pytest.mark.sampled(3)
@each_mask
@pytest.mark.parametrize(
    "case", case_params(["plain", "top8", "nan-weights", "no-weights", "to-one-rank", "fp8-unused"])
)
def test_before(context: RankContext, case: Case, which: str) -> None:
    """A dispatch and its combine, in every layout, as if ids of masked ranks were -1 and these had no tokens."""
    masked = masked_of(which, context.num_ranks)
    problem = make_problem(case, context.num_ranks)
    comm = make_comm(context, backend_of(context), problem.plan)
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    assert comm.masked_ranks() == masked
    assert all(f"rank {rank} is masked: mask_ranks" in comm.describe() for rank in masked)
    rest = without(problem, masked)
    for layout in LAYOUTS:
        options = options_of(problem, layout)
        routed, want = comm.dispatch(*problem.arguments(context), **options), rest.dispatched(**options)
        same_routed(routed, want[context.rank], problem.plan, bounded=layout == "slots")
        if problem.topk_weights is not None:
            combine_all_modes(context, comm, routed, rest, want, rest.topk_ids)


@on_ranks("group")
def test_in_any_mode(context: RankContext) -> None:
    """A server makes its communicator in inference mode; a thread of its own, which is in none, masks ranks."""
    problem, masked = make_problem(CASE, context.num_ranks), masked_of("last", context.num_ranks)
    with torch.inference_mode():
        comm = make_comm(context, backend_of(context), problem.plan)
        pair(context, comm, problem, [], "token")
    if context.rank not in masked:
        comm.mask_ranks(masked)
        pair(context, comm, problem, masked, "token")


@on_ranks("group")
@pytest.mark.parametrize("strategy", DISPATCH_STRATEGIES)
def test_strategies(context: RankContext, strategy: str) -> None:
    """What carries a payload leaves masked ranks out too, and so does what carries its gradient."""
    problem, masked = make_problem(REPEATS, context.num_ranks), [0]
    comm = make_comm(context, backend_of(context), problem.plan)
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    rest = without(problem, masked)
    ours = backend_of(context) == "nvlink" and strategy != "dedup"
    for layout in ("expert",) if ours else ROUTE_LAYOUTS if strategy == "all_to_all" else LAYOUTS:
        options = options_of(problem, layout)
        want = rest.dispatched(**options)
        x, ids, weights = problem.arguments(context)
        assert isinstance(x, torch.Tensor)
        routed = comm.dispatch(x.requires_grad_(), ids, weights, strategy=strategy, **options)
        same_routed(routed, want[context.rank], problem.plan, bounded=layout == "slots")
        grads = expert_rows(rest, want, FP32)
        routed.tokens.backward(grads[context.rank].to(context.device))
        assert x.grad is not None
        same_bits(x.grad, reference.combine(problem.plan, grads, want, rest.topk_ids, None)[context.rank], layout)


@on_ranks("group")
def test_bounded_overflow(context: RankContext) -> None:
    """What a dispatch needs is counted without masked ranks: a capacity that is too small with them may do."""
    problem, masked = make_problem(CASE, context.num_ranks), [context.num_ranks - 1]
    comm = make_comm(context, backend_of(context), problem.plan)
    rest = without(problem, masked)
    capacity = rest.rows_needed("expert")
    assert capacity < problem.rows_needed("expert")
    with pytest.raises(tl.CapacityOverflow):
        comm.dispatch(*problem.arguments(context), capacity=capacity)
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    for sizes in ("exact", "bounded"):
        routed = comm.dispatch(*problem.arguments(context), sizes=sizes, capacity=capacity)
        want = rest.dispatched("expert", capacity=capacity, bounded=sizes == "bounded")
        same_routed(routed, want[context.rank], problem.plan, bounded=sizes == "bounded")
    comm.check()


def test_nothing_is_sent_to_them(group: Ranks) -> None:
    """No collective of the process group is used, which could not end without them."""
    if group.device != "cpu" or emulator.ON:
        pytest.skip("kernels use none; backends/test_nvlink_masks.py looks at memory")
    group.run(check_nothing_is_sent)


def check_nothing_is_sent(context: RankContext) -> None:
    problem, masked = make_problem(CASE, context.num_ranks), [0]
    comm = make_comm(context, backend_of(context), problem.plan)
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    with count_wire() as wire:
        routed = comm.dispatch(*problem.arguments(context))
        comm.combine(routed.tokens, routed)
    assert (wire.all_to_all, wire.others) == ([], [])


# -- between and during calls -----------------------------------------------------------------------------------


@on_ranks("group")
@pytest.mark.sampled(3)
@each_mask
@each_layout
def test_between(context: RankContext, layout: str, which: str) -> None:
    """A dispatch was received from all; its combines leave out what masked ranks would have sent home."""
    masked = masked_of(which, context.num_ranks)
    problem = make_problem(REPEATS, context.num_ranks)
    comm = make_comm(context, backend_of(context), problem.plan)
    options = options_of(problem, layout)
    routed, want = comm.dispatch(*problem.arguments(context), **options), problem.dispatched(**options)
    combine_all_modes(context, comm, routed, problem, want, problem.topk_ids)
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    combine_all_modes(context, comm, routed, problem, want, without(problem, masked).topk_ids)


@on_ranks("group")
@each_layout
def test_negative_zeros(context: RankContext, layout: str) -> None:
    """A masked rank adds no term to a sum, not even +0, which would turn -0 into +0."""
    problem, masked = make_problem(REPEATS, context.num_ranks), [0]
    comm = make_comm(context, backend_of(context), problem.plan)
    routed = comm.dispatch(*problem.arguments(context), **options_of(problem, layout))
    y = torch.full_like(routed.tokens, -0.0)
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    stays = (without(problem, masked).topk_ids[context.rank] >= 0).any(1).to(context.device)
    for mode in ("per_rank", "per_route") if layout in ROUTE_LAYOUTS else ("per_rank",):
        out = comm.combine(y, routed, mode=mode)
        assert not out.any()
        assert torch.equal(out.signbit().all(1), stays)
        assert torch.equal(out.signbit().any(1), stays)


@on_ranks("group")
@each_layout
def test_between_halves(context: RankContext, layout: str) -> None:
    """Calls that are open end as they began: a masked rank has sent its part, and takes what it was sent."""
    problem, masked = make_problem(CASE, context.num_ranks), [context.num_ranks - 1]
    comm = make_comm(context, backend_of(context), problem.plan)
    options = options_of(problem, layout)
    want = problem.dispatched(**options)
    ys = expert_rows(problem, want, FP32)
    first = comm.dispatch(*problem.arguments(context), **options)
    home = comm.send_combine(ys[context.rank].to(context.device), first)
    pending = comm.send_dispatch(*problem.arguments(context), **options)
    if context.rank not in masked:
        comm.mask_ranks(masked)
    weights = problem.topk_weights if layout in ROUTE_LAYOUTS else None
    outs = reference.combine(problem.plan, ys, want, problem.topk_ids, weights)
    same_bits(home.receive(), outs[context.rank], "out")
    routed = pending.receive()
    same_routed(routed, want[context.rank], problem.plan, bounded=layout == "slots")
    if context.rank not in masked:
        combine_all_modes(context, comm, routed, problem, want, without(problem, masked).topk_ids)


@on_ranks("group")
def test_weights_of_an_earlier_dispatch(context: RankContext) -> None:
    """Where its rows would lie is no more known, which all ranks say; those of a combine, or a later one, travel."""
    problem, masked = make_problem(CASE, context.num_ranks), [0]
    comm = make_comm(context, backend_of(context), problem.plan)
    x, ids, weights = problem.arguments(context)
    assert weights is not None
    before, by_token = comm.dispatch(x, ids, weights, copy=True), comm.dispatch(x, ids, weights, layout="token")
    values = torch.ones_like(by_token.topk_weights)
    comm.combine_weights(values, by_token)
    out = comm.combine(before.tokens, before)
    same_bits(comm.combine(before.tokens, comm.reweighted(before, weights)), out.cpu(), "out")
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    with pytest.raises(InvalidArgument, match="masked since the dispatch"):
        comm.reweighted(before, weights)
    with pytest.raises(InvalidArgument, match="masked since the dispatch"):
        comm.combine_weights(values, by_token)
    rest = comm.combine(before.tokens, before)
    same_bits(comm.combine(before.tokens, before, topk_weights=weights), rest.cpu(), "weights of the combine")
    after = comm.dispatch(x, ids, weights)
    double, want = comm.reweighted(after, 2 * weights), comm.combine(after.tokens, after)
    same_bits(comm.combine(after.tokens, double), (2 * want).cpu(), "out")


@on_ranks("group")
def test_again_and_again(context: RankContext) -> None:
    """Until one rank is left; each mask adds to those before."""
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(context, backend_of(context), problem.plan)
    for gone in range(context.num_ranks - 1):
        if context.rank == gone:
            comm.close()
            return
        comm.mask_ranks([gone])
        masked = list(range(gone + 1))
        assert comm.masked_ranks() == masked
        rest = without(problem, masked)
        want = rest.dispatched("expert")
        routed = comm.dispatch(*problem.arguments(context))
        same_routed(routed, want[context.rank], problem.plan)
        combine_all_modes(context, comm, routed, rest, want, rest.topk_ids)


# -- gradients --------------------------------------------------------------------------------------------------


@on_ranks("group")
@each_layout
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("which", ["first", "all but one"])
def test_gradients(context: RankContext, layout: str, when: str, which: str) -> None:
    """Of tokens, rows and weights, bit for bit: masked before the forward, or between it and the backward. Routes that
    are lost have none."""
    masked = masked_of(which, context.num_ranks)
    problem, rank = make_problem(REPEATS, context.num_ranks), context.rank
    comm = make_comm(context, backend_of(context), problem.plan)
    rest, options = without(problem, masked), options_of(problem, layout)
    if when == "before":
        if rank in masked:
            return
        comm.mask_ranks(masked)
    before = rest if when == "before" else problem
    want = before.dispatched(**options)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    assert weights is not None
    routed = comm.dispatch(x.requires_grad_(), ids, weights.requires_grad_(), **options)
    ys = expert_rows(problem, want, FP32)
    y = ys[rank].to(context.device, copy=True).requires_grad_()
    out = comm.combine(y, routed)
    if when == "between":
        if rank in masked:
            return
        comm.mask_ranks(masked)
    generator = torch.Generator().manual_seed(5)
    gs = [torch.randn(each.shape, generator=generator) for each in problem.xs]
    grads = expert_rows(before, want, FP32)
    torch.autograd.backward([routed.tokens, out], [grads[rank].to(context.device), gs[rank].to(context.device)])
    assert x.grad is not None
    assert y.grad is not None
    want_x = reference.combine(problem.plan, grads, want, rest.topk_ids, None)[rank]
    same_bits(x.grad, want_x, "gradient of x")
    want_y = torch.zeros(y.shape)
    want_weights = torch.zeros(weights.shape)
    for key, place in want[rank].rows.items():
        source, token = key[:2]
        if source not in masked:  # who is masked sends no gradient
            factor = problem.topk_weights[source][token, key[-1]] if layout in ROUTE_LAYOUTS else 1.0  # type: ignore[index]
            want_y.view(-1, 16)[place] = gs[source][token] * factor
    same_bits(y.grad, want_y, "gradient of y")
    if layout not in ROUTE_LAYOUTS:  # these hand the weights to the caller, who used none
        assert weights.grad is None or not weights.grad.any()
        return
    for token, k in (rest.topk_ids[rank] >= 0).nonzero().tolist():
        there = int(rest.topk_ids[rank][token, k]) // problem.plan.experts_per_rank
        place = want[there].rows[(rank, token, k)]
        want_weights[token, k] = (gs[rank][token] * ys[there].view(-1, 16)[place]).sum()
    assert weights.grad is not None
    assert torch.equal(weights.grad.cpu() == 0, want_weights == 0)
    torch.testing.assert_close(
        weights.grad.cpu(), want_weights, rtol=1e-4, atol=1e-3
    )  # sums over hidden in another order


@on_ranks("group")
@each_layout
def test_received_weights(context: RankContext, layout: str) -> None:
    """A gradient that a masked rank would have sent home is zero."""
    problem, masked = make_problem(REPEATS, context.num_ranks), [0]
    comm = make_comm(context, backend_of(context), problem.plan)
    x, ids, weights = problem.arguments(context)
    assert weights is not None
    routed = comm.dispatch(x, ids, weights.requires_grad_(), **options_of(problem, layout))
    received = comm.row_weights(routed) if layout in ROUTE_LAYOUTS else routed.topk_weights
    assert received is not None
    if context.rank in masked:
        return
    comm.mask_ranks(masked)
    received.backward(torch.full_like(received, 3.0))
    assert weights.grad is not None
    assert torch.equal(weights.grad.cpu(), 3.0 * (without(problem, masked).topk_ids[context.rank] >= 0))


def test_layer(group: Ranks) -> None:
    """A layer trains on with the ranks that are left: its sums over ranks leave masked ones out too."""
    if emulator.ON:
        pytest.skip("its GEMMs need a GPU there")
    group.run(check_layer)


def check_layer(context: RankContext) -> None:
    experts = 2 * context.num_ranks
    layer = tl.ExpertParallelMoE(
        context.group, hidden=64, intermediate=32, num_experts=experts, top_k=2, max_tokens_per_rank=6,
        balance_coef=0.01, dtype=BF16 if backend_of(context) == "nvlink" else FP32, device=context.device,
    )  # fmt: skip
    if context.rank == 0:
        return
    layer.comm.mask_ranks([0])
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randn(5, 64, generator=generator).to(layer.router_weight).requires_grad_()
    out, aux_loss = layer(x)
    (out.sum() + aux_loss).backward()
    losses = layer.comm.engine.ranks.all_gather_object(aux_loss.item(), "test")
    assert losses == [None] + [aux_loss.item()] * (context.num_ranks - 1)
    for grad in (x.grad, layer.router_weight.grad, layer.experts.w1.grad.to_local()):
        assert grad is not None
        assert bool(grad.isfinite().all())


# -- errors -----------------------------------------------------------------------------------------------------


@on_ranks("group")
def test_ranks_that_disagree(context: RankContext) -> None:
    """All are told which rank passed which list, and nothing has changed."""
    problem, last = make_problem(CASE, context.num_ranks), context.num_ranks - 1
    comm = make_comm(context, backend_of(context), problem.plan)
    if context.rank == last:  # of two ranks it masks the only other one, and so waits for nobody
        time.sleep(0.5)
    with pytest.raises(tl.PlanMismatch) as mismatch:
        comm.mask_ranks([0] if context.rank == last else [])
    if context.rank != last:
        assert mismatch.value.rank == last
        assert f"rank {last} has mask_ranks=[0], rank {context.rank} has mask_ranks=[]" in str(mismatch.value)
    else:
        assert f"has mask_ranks=[], rank {last} has mask_ranks=[0]" in str(mismatch.value)
    assert comm.masked_ranks() == []
    routed = comm.dispatch(*problem.arguments(context))
    same_routed(routed, problem.dispatched("expert")[context.rank], problem.plan)


@on_ranks("two")
@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1 cannot mask itself"),
        ([-1], "mask_ranks got rank -1, expected ranks 0..1"),
        ([2], "got rank 2"),
        ([0.0], "got rank 0.0"),
        (["0"], "got rank '0'"),
        ([[0]], r"got rank \[0\]"),
    ],
)
def test_wrong_ranks(context: RankContext, ranks: list[Any], text: str) -> None:
    """A list that is never right: who passes it is told what is wrong, who waits for that rank what it passed."""
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(context, backend_of(context), problem.plan)
    if context.rank == 1:
        with pytest.raises(InvalidArgument, match=text):
            comm.mask_ranks(ranks)
    else:
        with pytest.raises(tl.PlanMismatch, match="rank 1 has mask_ranks="):
            comm.mask_ranks([])
    with pytest.raises(InvalidArgument, match="unmask_ranks got rank 0, which is not masked"):
        comm.unmask_ranks([0])
    comm.dispatch(*problem.arguments(context))


def test_faults_of_those_that_stay(group: Ranks) -> None:
    """Options that differ are told against the lowest rank that is there; bad input is a PeerError on others."""
    if group.num_ranks == 2:
        pytest.skip("one rank has nobody to differ from")
    group.run(check_faults)


def check_faults(context: RankContext) -> None:
    problem = make_problem(CASE, context.num_ranks)
    comm = make_comm(context, backend_of(context), problem.plan)
    if context.rank == 0:
        return
    comm.mask_ranks([0])
    x, ids, weights = problem.arguments(context)
    last = context.num_ranks - 1
    with pytest.raises(tl.PlanMismatch, match=f"rank {last} has layout=token, rank 1 has layout=expert"):
        comm.dispatch(x, ids, weights, layout="token" if context.rank == last else "expert")
    with pytest.raises(tl.InvalidExpertId if context.rank == last else tl.PeerError):
        comm.dispatch(x, ids + 100 if context.rank == last else ids, weights)
    want = without(problem, [0]).dispatched("expert")
    same_routed(comm.dispatch(x, ids, weights), want[context.rank], problem.plan)


@on_ranks("group")
def test_closed(context: RankContext) -> None:
    """As every call."""
    comm = make_comm(context, backend_of(context), make_problem(CASE, context.num_ranks).plan)
    comm.close()
    for call in (comm.mask_ranks, comm.unmask_ranks):
        with pytest.raises(tl.CommunicatorBroken):
            call([0])


def test_nccl_leaves_nobody_out(hoppers: Ranks) -> None:
    """Its collectives cannot end without a rank, which is said before anything changes."""
    if emulator.ON:
        pytest.skip("no NCCL there")
    hoppers.run(check_nccl)


def check_nccl(context: RankContext) -> None:
    if context.num_ranks == 1:
        return  # nobody could be left out
    problem = make_problem(replace(CASE, dtype=BF16), context.num_ranks)
    comm = make_comm(context, "collective", problem.plan)
    for call in (comm.mask_ranks, comm.unmask_ranks):
        with pytest.raises(InvalidArgument, match="cannot be masked over nccl"):
            call([0])
    assert comm.masked_ranks() == []
    with pytest.raises(InvalidArgument, match="cannot be masked over nccl"):
        make_comm(context, "collective", problem.plan, on_timeout="mask")
    routed = comm.dispatch(*problem.arguments(context))
    same_routed(routed, problem.dispatched("expert")[context.rank], problem.plan)
