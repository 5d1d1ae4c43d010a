"""What carries a payload changes what travels, and nothing of what comes out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.comm.test_row_weights import TOKENS, TOP_K
from tests.conftest import Ranks
from tests.support.cases import on_another_stream
from tests.support.layer_cases import HIDDEN, LayerCase, make_inputs, make_layer
from tests.support.nvlink_cases import launcher_of
from tests.support.on_ranks import on_ranks
from tests.support.strategies import combine_by
from tests.support.wire import count_wire
from tests.training.test_routed_experts import POOL, layers_of, one_step
from tokenloom.backends.seam import STRATEGY_OF_MODE, Strategy
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import COMBINE_STRATEGIES, DISPATCH_STRATEGIES
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.symmetric_memory import SymmetricBuffer
from tokenloom.training.shards import local_part

BF16 = torch.bfloat16


def make(
    context: RankContext, backend: str = "collective"
) -> tuple[tl.Communicator, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unequal tokens, none on the second rank, unused places, repeated experts, and one expert without routes."""
    experts, tokens, width = 2 * context.num_ranks, TOKENS[context.rank], 128
    generator = torch.Generator().manual_seed(context.rank)
    ids = torch.randint(0, experts - 1, (tokens, TOP_K), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    x, weights = torch.randn(tokens, width, generator=generator), torch.rand(tokens, TOP_K, generator=generator)
    sizes = {"num_experts": experts, "hidden": width, "top_k": TOP_K, "max_tokens_per_rank": max(TOKENS)}
    comm = tl.Communicator(context.group, device=context.device, backend=backend, **sizes)
    return comm, x.to(BF16).to(context.device), ids.to(context.device), weights.to(context.device)


def run_both(
    context: RankContext, options: dict[str, Any], dispatch: str, combine: str, backend: str = "collective"
) -> list[Any]:
    """Outputs and gradients of one strategy of each. ``combine`` may also be a mode, as users choose it."""
    comm, x, ids, weights = make(context, backend)
    leaves = (x.clone().requires_grad_(not options.get("to_fp8")), weights.clone().requires_grad_())
    routed = comm.dispatch(leaves[0], ids, leaves[1], strategy=dispatch, **options)
    rows = routed.tokens if routed.scales is None else tl.dequantize_fp8(routed.tokens, routed.scales, BF16)
    y = torch.sin(rows)
    if routed.topk_weights is not None:  # layouts whose rows the caller weights
        y = y * routed.topk_weights.sum(-1, keepdim=True).to(y.dtype)
    if combine in STRATEGY_OF_MODE:
        out = comm.combine(y, routed, mode=combine)
    else:
        out = combine_by(comm, combine, y, routed)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(out.float().square().sum(), wanted, allow_unused=True)
    comm.close()
    return [routed.tokens.detach(), routed.scales, out.detach(), *grads]


def same(
    context: RankContext, options: dict[str, Any], dispatch: str, combine: str, backend: str = "collective"
) -> None:
    mode = "per_route" if combine == "all_to_all" else "per_rank"
    want = run_both(context, options, "dedup", mode)
    got = run_both(context, options, dispatch, combine, backend)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("to_fp8", [False, True])
@pytest.mark.parametrize(
    ("layout", "dispatch", "combine"),
    [
        ("expert", "all_gather", "dedup"),
        ("expert", "all_to_all", "reduce_scatter"),
        ("expert", "all_gather", "all_to_all"),
        ("token", "all_gather", "reduce_scatter"),
        ("rank", "all_gather", "reduce_scatter"),
    ],
)
def test_same_bits(ranks: Ranks, layout: str, dispatch: str, combine: str, to_fp8: bool) -> None:
    """Rows, sums and both gradients, for every layout that a strategy has."""
    ranks.run(same, {"layout": layout, "to_fp8": to_fp8}, dispatch, combine)


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_groups_are_padded_and_rows_dropped_alike(ranks: Ranks, dispatch: str) -> None:
    ranks.run(same, {"layout": "expert", "alignment": 8}, dispatch, "reduce_scatter")


@on_ranks
def test_what_travels(context: RankContext) -> None:
    """A strategy that was another one underneath would pass all tests of results."""
    comm, x, ids, weights = make(context)
    room, row_bytes, num_ranks = max(TOKENS), x.shape[1] * 2, context.num_ranks
    routes = int((ids >= 0).sum())
    holders = [{e // 2 for e in row if e >= 0} for row in ids.tolist()]
    rows = sum(len(each) for each in holders)
    payload = {"dedup": rows, "all_to_all": routes}
    for strategy in ("dedup", "all_gather", "all_to_all"):
        with count_wire() as wire:
            routed = comm.dispatch(x, ids, weights, strategy=strategy)
        metadata, *rest = wire.all_to_all
        assert metadata == rows * 4 * (1 + 2 * TOP_K)
        assert rest == ([] if strategy == "all_gather" else [payload[strategy] * row_bytes])
        assert (room * row_bytes in wire.others) == (strategy == "all_gather")
    received = int(routed.source_counts.sum())
    for strategy, sent in (("dedup", received), ("reduce_scatter", num_ranks * room)):
        with count_wire() as wire:
            combine_by(comm, strategy, routed.tokens, routed)
        assert wire.all_to_all == [sent * row_bytes]
    comm.close()


@on_ranks
def test_wrong_strategies(context: RankContext) -> None:
    """Each on all ranks alike; where ranks disagree, the error names the field."""
    comm, x, ids, weights = make(context)
    with pytest.raises(tl.InvalidArgument, match="strategy of dispatch is 'broadcast'"):
        comm.dispatch(x, ids, weights, strategy="broadcast")
    with pytest.raises(tl.InvalidArgument, match="'all_to_all' moves a row for each route"):
        comm.dispatch(x, ids, weights, layout="token", strategy="all_to_all")
    with pytest.raises(tl.InvalidArgument, match="strategy of combine is 'all_gather'"):
        tl.Strategy(combine="all_gather")
    routed = comm.dispatch(x, ids, weights)
    if context.num_ranks > 1:
        mine = "all_gather" if context.rank == 0 else "dedup"
        with pytest.raises(tl.PlanMismatch, match="strategy"):
            comm.dispatch(x, ids, weights, strategy=mine)
        mine = "reduce_scatter" if context.rank == 0 else "dedup"
        with pytest.raises(tl.PlanMismatch, match="strategy"):
            combine_by(comm, mine, routed.tokens, routed)
        mine = "all_to_all" if context.rank == 0 else "dedup"  # which differ in their sums, too
        with pytest.raises(tl.PlanMismatch, match="mode"):
            combine_by(comm, mine, routed.tokens, routed)
    comm.close()


def train(context: RankContext, strategy: tl.Strategy | None) -> list[torch.Tensor]:
    case = LayerCase()
    layer = make_layer(case, context.group, strategy=strategy, backend="collective")
    xs, factors = make_inputs(case, context.num_ranks)
    x = xs[context.rank].to(context.device).requires_grad_()
    out, aux_loss = layer(x)
    ((out * factors[context.rank].to(context.device)).sum() + aux_loss / context.num_ranks).backward()
    assert layer.experts.strategy == (strategy or tl.Strategy())
    assert x.shape[1] == HIDDEN
    found = [out.detach(), x.grad, *(local_part(parameter.grad) for parameter in layer.parameters())]
    return [tensor.cpu() for tensor in found if tensor is not None]


@on_ranks
@pytest.mark.sampled(4)
@pytest.mark.parametrize("combine", ["dedup", "reduce_scatter", "all_to_all", "per_node"])
@pytest.mark.parametrize("dispatch", ["dedup", "all_gather", "all_to_all"])
def test_layers(context: RankContext, dispatch: str, combine: str) -> None:
    """Outputs and all gradients of a layer."""
    strategy = tl.Strategy(dispatch, combine)
    for ours, theirs in zip(train(context, strategy), train(context, None), strict=True):
        if strategy.combine == "all_to_all":  # sums in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(ours, theirs)


# -- backend "nvlink" -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dispatch", "combine", "options"),
    [
        ("dedup", "reduce_scatter", {}),
        ("all_gather", "dedup", {}),
        ("all_gather", "reduce_scatter", {"alignment": 8}),
        ("all_gather", "all_to_all", {}),
        ("all_to_all", "dedup", {}),
        ("all_to_all", "reduce_scatter", {"to_fp8": True, "alignment": 8}),
        ("all_to_all", "all_to_all", {"to_fp8": True}),
        ("all_to_all", "dedup", {"to_fp8": True, "recipe": "row"}),
    ],
)
def test_kernels_give_the_same_bits(hoppers: Ranks, dispatch: str, combine: str, options: dict[str, Any]) -> None:
    """As the other backend by its default."""
    hoppers.run(same, options, dispatch, combine, "nvlink")


@on_ranks("hoppers")
@pytest.mark.gpu
def test_kernels_take_turns(context: RankContext) -> None:
    """What copy engines bring lies in two halves, which calls use by turns.

    Calls of all kinds, of two dtypes and on two streams, one behind the other without a word from the host; results
    are compared when all are done.

    Most routes go to rank 0, which is long at copying rows when the others are done and begin the next call.
    """

    def dispatch_and_combine(
        strategies: tuple[str, str], beside: bool, given: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dispatch, combine = strategies
        if not beside:
            routed = ours.dispatch(*given, strategy=dispatch, **options)
            return routed.tokens, combine_by(ours, combine, routed.tokens, routed)
        with on_another_stream(context.device):
            routed = ours.dispatch(*given, strategy=dispatch, **options)
            out = combine_by(ours, combine, routed.tokens, routed)
        return routed.tokens, out

    width, experts, room = 2048, 4 * context.num_ranks, 300
    sizes = {"num_experts": experts, "hidden": width, "top_k": TOP_K, "max_tokens_per_rank": room}
    where: dict[str, Any] = {"device": context.device, **sizes}
    ours = tl.Communicator(context.group, backend="nvlink", num_sms=2, **where)
    plain = tl.Communicator(context.group, backend="collective", **where)
    generator = torch.Generator().manual_seed(context.rank)
    order = torch.Generator().manual_seed(99)  # as on all ranks
    options: dict[str, Any] = {"sizes": "bounded", "capacity": 1400, "copy": True}
    steps = []
    for _ in range(40):
        dispatch = DISPATCH_STRATEGIES[int(torch.randint(3, (), generator=order))]
        combine = COMBINE_STRATEGIES[int(torch.randint(2, (), generator=order))]
        beside = bool(torch.randint(2, (), generator=order))
        dtype = (BF16, torch.float32)[int(torch.randint(2, (), generator=order))]
        tokens = int(torch.randint(room // context.num_ranks + 1, (), generator=generator))
        x = torch.randn(tokens, width, generator=generator).to(context.device, dtype)
        ids = torch.randint(-1, 5, (tokens, TOP_K), generator=generator).clamp_max(experts - 1).to(context.device)
        weights = torch.rand(tokens, TOP_K, generator=generator).to(context.device)
        steps.append(((dispatch, combine), beside, (x, ids, weights)))
    x, *routes = steps[0][2]
    for strategy, dtype in product(DISPATCH_STRATEGIES, (BF16, torch.float32)):  # all buffers and kernels are there
        dispatch_and_combine((strategy, "reduce_scatter"), False, (x.to(dtype), *routes))
    ours.check()
    found = [dispatch_and_combine(*step) for step in steps]
    ours.check()
    for number, ((rows, out), (strategies, beside, given)) in enumerate(zip(found, steps, strict=True)):
        expected = plain.dispatch(*given)
        assert torch.equal(rows[: len(expected.tokens)], expected.tokens), (number, strategies, beside)
        assert torch.equal(out, plain.combine(expected.tokens, expected)), (number, strategies, beside)
    ours.close()
    plain.close()


def drop(context: RankContext) -> bool:
    comm, x, ids, weights = make(context, "nvlink")
    results = []
    for dispatch, combine in (("dedup", "dedup"), ("all_gather", "reduce_scatter"), ("all_to_all", "reduce_scatter")):
        routed = comm.dispatch(x, ids, weights, sizes="bounded", capacity=8, strategy=dispatch)
        out = combine_by(comm, combine, routed.tokens, routed)
        results.append((routed.tokens[: int(routed.num_rows)].clone(), out))
        with pytest.raises(tl.CapacityOverflow):
            comm.check()
    for rows, out in results[1:]:
        assert torch.equal(rows, results[0][0])
        assert torch.equal(out.isnan(), results[0][1].isnan())
        assert torch.equal(out.nan_to_num(), results[0][1].nan_to_num())
    comm.close()
    return bool(results[0][1].isnan().any())


@pytest.mark.gpu
def test_kernels_drop_alike(hoppers: Ranks) -> None:
    """Rows beyond the capacity are dropped, and their sums are NaN, whatever carried them."""
    assert any(hoppers.run(drop))


@on_ranks("hoppers")
@pytest.mark.gpu
def test_what_copy_engines_bring(context: RankContext) -> None:
    """A strategy that was another one underneath would pass all tests of results.

    Bytes that copy engines bring, in dispatch, in combine and in both gradients.
    """
    comm, x, ids, weights = make(context, "nvlink")
    comm.dispatch(x, ids, weights, strategy="all_gather")
    others, row_bytes, sent = context.num_ranks - 1, x.shape[1] * x.element_size(), []

    def copy_to(self: Any, rank: int, offset: int, values: torch.Tensor) -> None:
        sent.append(values.numel() * values.element_size())
        real(self, rank, offset, values)

    def counted(call: Callable[[], Any]) -> tuple[int, Any]:
        sent.clear()
        result = call()
        return sum(sent), result

    real, x = SymmetricBuffer.copy_to, x.requires_grad_()
    all_tokens, dense = others * len(x) * row_bytes, others * max(TOKENS) * row_bytes
    with mock.patch.object(SymmetricBuffer, "copy_to", copy_to):
        for strategy, of_dispatch, of_gradient in (
            ("dedup", 0, 0),
            ("all_to_all", 0, 0),
            ("all_gather", all_tokens, dense),
        ):
            copied, routed = counted(lambda s=strategy: comm.dispatch(x, ids, weights, strategy=s))
            assert copied == of_dispatch, strategy
            copied, _ = counted(lambda r=routed: r.tokens.sum().backward())
            assert copied == of_gradient, f"gradient of {strategy}"
        y = routed.tokens.detach().requires_grad_()
        for strategy, of_combine, of_gradient in (("dedup", 0, 0), ("reduce_scatter", dense, all_tokens)):
            copied, out = counted(lambda s=strategy: combine_by(comm, s, y, routed, weighted=False))
            assert copied == of_combine, strategy
            copied, _ = counted(lambda o=out: o.sum().backward())
            assert copied == of_gradient, f"gradient of {strategy}"
    names = {variant.strategy for variant in launcher_of(comm).variants() if isinstance(variant, DispatchVariant)}
    assert {"all_to_all", "all_gather"} <= names
    comm.check()
    comm.close()


@on_ranks("hoppers")
@pytest.mark.gpu
def test_what_kernels_refuse(context: RankContext) -> None:
    comm, x, ids, weights = make(context, "nvlink")
    with pytest.raises(tl.InvalidArgument, match="has strategy 'all_gather' in layout 'expert', not 'token'"):
        comm.dispatch(x, ids, weights, layout="token", strategy="all_gather")
    with pytest.raises(tl.InvalidArgument, match="moves no FP8"):
        comm.dispatch(x, ids, weights, to_fp8=True, strategy="all_gather")
    routed = comm.dispatch(x, ids, weights, layout="token")
    with pytest.raises(tl.InvalidArgument, match="has strategy 'reduce_scatter' in layout 'expert', not 'token'"):
        combine_by(comm, "reduce_scatter", routed.tokens, routed)
    bounded: dict[str, Any] = {"sizes": "bounded", "capacity": 64}
    for strategy in DISPATCH_STRATEGIES:
        comm.dispatch(x, ids, weights, strategy=strategy, **bounded)
    gc.collect()  # an old communicator that is closed in the capture would end it
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        with pytest.raises(tl.InvalidArgument, match="cannot be captured"):
            comm.dispatch(x, ids, weights, strategy="all_gather", **bounded)
        comm.dispatch(x, ids, weights, strategy="all_to_all", **bounded)
    if context.num_ranks > 1:
        mine = "all_gather" if context.rank == 0 else "dedup"
        with pytest.raises(tl.PlanMismatch, match="strategy"):
            comm.dispatch(x, ids, weights, strategy=mine)
    comm.close()


@on_ranks("hoppers")
@pytest.mark.gpu
def test_backward_begins_with_copies(context: RankContext) -> None:
    """The gradient of the layer's output is given, and so the copies are the first that the thread asks of the GPU."""
    (layer,) = layers_of(context, 1, strategy=Strategy("dedup", "reduce_scatter"), overlap=False)
    x = torch.randn(16, layer.experts.hidden, device=context.device).to(BF16).requires_grad_()
    for _ in range(2):
        out = layer(x)[0]
        out.backward(torch.ones_like(out))
    assert x.grad is not None
    layer.comm.check()
    layer.comm.close()


@on_ranks("hoppers")
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"redispatch_in_backward": True}, {"pool_rows": POOL}], ids=str)
@pytest.mark.parametrize(
    "strategy",
    [
        tl.Strategy("all_gather", "reduce_scatter"),
        tl.Strategy("all_gather", "dedup"),
        tl.Strategy("all_to_all", "dedup"),
        tl.Strategy("all_to_all", "reduce_scatter"),
    ],
    ids=lambda strategy: f"{strategy.dispatch} {strategy.combine}",
)
def test_layers_on_kernels(context: RankContext, strategy: tl.Strategy, options: dict[str, Any]) -> None:
    """Three layers in a row, beside the products; outputs and all gradients."""
    wanted, found = one_step(context, overlap=False), one_step(context, strategy=strategy, **options)
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
