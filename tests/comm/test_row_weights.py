"""The weight of each row of layout "expert": weighting rows by hand is what a weighted combine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

HIDDEN, TOP_K, TOKENS = 16, 3, (7, 0, 5, 4, 1, 6, 3, 2)


def make(context: RankContext, unused: float) -> tuple[tl.Communicator, torch.Tensor, torch.Tensor, torch.Tensor]:
    experts, tokens = 2 * context.num_ranks, TOKENS[context.rank]
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.randint(0, experts, (tokens, TOP_K), generator=generator)  # an expert may appear twice
    ids[torch.rand(ids.shape, generator=generator) < unused] = -1
    weights = torch.rand(tokens, TOP_K, generator=generator)
    sizes = {"num_experts": experts, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens_per_rank": max(TOKENS)}
    comm = tl.Communicator(context.group, device=context.device, **sizes)
    return comm, x.to(context.device), ids.to(context.device), weights.to(context.device)


@on_ranks
@pytest.mark.sampled(4)
@pytest.mark.parametrize("unused", [0.0, 0.5])
@pytest.mark.parametrize("sizes", ["exact", "bounded", "slots"])
@pytest.mark.parametrize("alignment", [1, 8])
def test_it_is_a_weighted_combine(context: RankContext, alignment: int, sizes: str, unused: float) -> None:
    """Padding and places beyond the rows have no weight, and give weights no gradient.

    With fixed places where ``sizes`` says "slots".
    """
    comm, x, ids, weights = make(context, unused)
    room: dict[str, Any] = {"exact": {}, "bounded": {"sizes": "bounded", "capacity": 512}, "slots": {"capacity": 99}}
    room = room[sizes]
    results = []
    for by_hand in (False, True):
        leaf, x_leaf = weights.clone().requires_grad_(), x.clone().requires_grad_()
        layout = {"layout": "slots"} if sizes == "slots" else {"layout": "expert", "alignment": alignment}
        routed = comm.dispatch(x_leaf, ids, leaf, **layout, **room)
        y = torch.sin(routed.tokens) if sizes == "exact" else torch.sin(routed.tokens.nan_to_num())
        if by_hand:
            rows = comm.row_weights(routed)
            assert (rows.shape, rows.dtype) == (y.shape[:-1], torch.float32)
            out = comm.combine(y * rows[..., None], routed, weighted=False)
        else:
            out = comm.combine(y, routed)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (leaf, x_leaf))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    comm.close()


@on_ranks
def test_what_has_no_row_weights(context: RankContext) -> None:
    comm, x, ids, weights = make(context, 0.0)
    with pytest.raises(tl.InvalidArgument, match="layouts 'expert' and 'slots'"):
        comm.row_weights(comm.dispatch(x, ids, weights, layout="token"))
    with pytest.raises(tl.InvalidArgument, match="topk_weights"):
        comm.row_weights(comm.dispatch(x, ids, layout="expert"))
    with pytest.raises(tl.InvalidArgument, match="expected what dispatch returned"):
        comm.row_weights(x)  # type: ignore[arg-type]
    comm.close()
