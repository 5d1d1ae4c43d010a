"""What the layer keeps for backward: rows and pre-activations, and next to nothing else."""

from __future__ import annotations

import torch

import tokenloom as tl
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.saved_activations import saved_tensors


def test_storages_are_counted_once_and_whole() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    y = x.exp()  # keeps its result
    z = (y[:2] * y[1:3]).sum()  # keeps two parts of it
    (found,) = saved_tensors([z], [])
    assert (found.num_bytes, found.dtype) == (6 * 4 * 4, torch.float32)
    assert saved_tensors([z], [y]) == []
    assert saved_tensors([x.detach()], []) == []
    assert "96" in str(found)


@on_ranks
def test_rows_and_pre_activations_are_all_that_is_wide(context: RankContext) -> None:
    """Not outputs, not activations, and no copy of x in float32 for the router."""
    hidden, intermediate, top_k, tokens = 64, 96, 2, 200
    layer = tl.ExpertParallelMoE(
        context.group,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=8,
        top_k=top_k,
        max_tokens_per_rank=tokens,
        device=context.device,
        dtype=torch.bfloat16,
    )
    x = torch.randn(tokens, hidden, device=context.device).to(torch.bfloat16).requires_grad_()
    found = layer.saved_activations(x)
    named = {each.name: each for each in found}
    rows, pre = named["RoutedExperts: rows"], named["RoutedExperts: pre-activations"]
    assert pre.shape == (rows.shape[0], 2 * intermediate)
    assert rows.shape[1] == hidden
    assert rows.dtype == pre.dtype == torch.bfloat16
    wide = rows.num_bytes + pre.num_bytes
    # What else there is has at most K or E values a token.
    rest = sum(each.num_bytes for each in found) - wide
    assert rest <= (tokens + rows.shape[0]) * 8 * (8 + 4 * top_k) + 4096
    assert all(each.num_bytes <= rows.num_bytes for each in found[2:])
    layer.comm.close()
