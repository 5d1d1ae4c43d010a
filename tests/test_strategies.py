"""What carries a payload changes what travels, and nothing of what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.layer_cases import HIDDEN, LayerCase, make_inputs, make_layer
from tests.test_row_weights import TOKENS, TOP_K
from tests.wire import count_wire
from tokenloom.launch import RankContext

BF16 = torch.bfloat16


def make(context: RankContext) -> tuple[tl.Communicator, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unequal tokens, none on the second rank, unused places, repeated experts, and one expert without routes."""
    experts, tokens, width = 2 * context.num_ranks, TOKENS[context.rank], 128
    generator = torch.Generator().manual_seed(context.rank)
    ids = torch.randint(0, experts - 1, (tokens, TOP_K), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    x, weights = torch.randn(tokens, width, generator=generator), torch.rand(tokens, TOP_K, generator=generator)
    sizes = {"num_experts": experts, "hidden": width, "top_k": TOP_K, "max_tokens_per_rank": max(TOKENS)}
    comm = tl.Communicator(context.group, device=context.device, backend="collective", **sizes)
    return comm, x.to(BF16).to(context.device), ids.to(context.device), weights.to(context.device)


def run_both(context: RankContext, options: dict[str, Any], dispatch: str, mode: str, combine: str) -> list[Any]:
    """Outputs and gradients of one strategy."""
    comm, x, ids, weights = make(context)
    leaves = (x.clone().requires_grad_(not options.get("to_fp8")), weights.clone().requires_grad_())
    routed = comm.dispatch(leaves[0], ids, leaves[1], strategy=dispatch, **options)
    rows = routed.tokens if routed.scales is None else tl.dequantize_fp8(routed.tokens, routed.scales, BF16)
    y = torch.sin(rows)
    if routed.topk_weights is not None:  # layouts whose rows the caller weights
        y = y * routed.topk_weights.sum(-1, keepdim=True).to(y.dtype)
    out = comm.combine(y, routed, mode=mode, strategy=combine)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(out.float().square().sum(), wanted, allow_unused=True)
    comm.close()
    return [routed.tokens.detach(), routed.scales, out.detach(), *grads]


def same(context: RankContext, options: dict[str, Any], dispatch: str, mode: str, combine: str) -> None:
    default = "dedup" if mode == "per_rank" else "all_to_all"
    want = run_both(context, options, "dedup", mode, default)
    got = run_both(context, options, dispatch, mode, combine)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


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
    mode = "per_route" if combine == "all_to_all" else "per_rank"
    ranks.run(same, {"layout": layout, "to_fp8": to_fp8}, dispatch, mode, combine)


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_groups_are_padded_and_rows_dropped_alike(ranks: Ranks, dispatch: str) -> None:
    ranks.run(same, {"layout": "expert", "alignment": 8}, dispatch, "per_rank", "reduce_scatter")


def count(context: RankContext) -> None:
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
            comm.combine(routed.tokens, routed, strategy=strategy)
        assert wire.all_to_all == [sent * row_bytes]
    comm.close()


def test_what_travels(ranks: Ranks) -> None:
    """A strategy that was another one underneath would pass all tests of results."""
    ranks.run(count)


def refuse(context: RankContext) -> None:
    comm, x, ids, weights = make(context)
    with pytest.raises(tl.InvalidArgument, match="strategy of dispatch is 'broadcast'"):
        comm.dispatch(x, ids, weights, strategy="broadcast")
    with pytest.raises(tl.InvalidArgument, match="'all_to_all' moves a row for each route"):
        comm.dispatch(x, ids, weights, layout="token", strategy="all_to_all")
    routed = comm.dispatch(x, ids, weights)
    with pytest.raises(tl.InvalidArgument, match="for mode 'per_route', mode is 'per_rank'"):
        comm.combine(routed.tokens, routed, strategy="all_to_all")
    with pytest.raises(tl.InvalidArgument, match="strategy of combine is 'all_gather'"):
        comm.combine(routed.tokens, routed, strategy="all_gather")
    if context.num_ranks > 1:
        mine = "all_gather" if context.rank == 0 else "dedup"
        with pytest.raises(tl.PlanMismatch, match="strategy"):
            comm.dispatch(x, ids, weights, strategy=mine)
    comm.close()


def test_wrong_strategies(ranks: Ranks) -> None:
    """Each on all ranks alike; where ranks disagree, the error names the field."""
    ranks.run(refuse)


def train(context: RankContext, strategy: tl.Strategy | None) -> list[torch.Tensor]:
    case = LayerCase()
    layer = make_layer(case, context.group, strategy=strategy, backend="collective")
    xs, factors = make_inputs(case, context.num_ranks)
    x = xs[context.rank].to(context.device).requires_grad_()
    out, aux_loss = layer(x)
    ((out * factors[context.rank].to(context.device)).sum() + aux_loss / context.num_ranks).backward()
    assert layer.strategy == (strategy or tl.Strategy())
    assert x.shape[1] == HIDDEN
    found = [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [tensor.cpu() for tensor in found if tensor is not None]


def of_a_layer(context: RankContext, strategy: tl.Strategy) -> None:
    for ours, theirs in zip(train(context, strategy), train(context, None), strict=True):
        if strategy.combine == "all_to_all":  # sums in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("combine", ["dedup", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("dispatch", ["dedup", "all_gather", "all_to_all"])
def test_layers(ranks: Ranks, dispatch: str, combine: str) -> None:
    """Outputs and all gradients of a layer."""
    ranks.run(of_a_layer, tl.Strategy(dispatch, combine))
