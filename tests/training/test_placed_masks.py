"""Training under a placement without a rank: the next replica of its experts is their owner."""

from __future__ import annotations

import pytest
import torch

import tokenloom as tl
from tests.comm.test_masks import backend_of, group
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, LayerCase, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

__all__ = ["group"]
CASE = LayerCase(dtype=torch.float32, balance_coef=0.0, z_coef=0.0, shared=0)


@on_ranks("group")
def test_the_next_replica_is_the_owner(context: RankContext) -> None:
    """Experts of rank 0 are on the last rank too, except one, which is lost."""
    local = NUM_EXPERTS // context.num_ranks
    table = torch.arange(NUM_EXPERTS).view(context.num_ranks, local)
    table = torch.cat([table, table.roll(-1, 0)], 1)
    table[-1, local] = -1  # expert 0
    placement = tl.Placement(table, num_experts=NUM_EXPERTS)
    layer = make_layer(CASE, context.group, placement=placement, backend=backend_of(context), device=context.device)
    optimizer = torch.optim.SGD(layer.expert_parameters(), lr=0.1, momentum=0.9)
    tl.follow_placement(optimizer, layer)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(context.rank)).to(context.device)
    if context.rank == 0:
        return
    layer.comm.mask_ranks([0])
    before = local_part(layer.experts.w1.detach()).clone()
    layer(x)[0].square().sum().backward()
    optimizer.step()
    after = local_part(layer.experts.w1.detach())
    for slot, expert in enumerate(layer.slot_experts):
        owner = next((each for each in placement.slots_of(expert) if each[0]), None) if expert >= 0 else None
        gradient = local_part(layer.experts.w1.grad)[slot]  # type: ignore[arg-type]
        assert bool(gradient.any()) == (owner == (context.rank, slot))
        if expert < 0:
            assert not after[slot].any()
        else:
            assert not torch.equal(after[slot], before[slot])
    with pytest.raises(tl.InvalidArgument, match=r"expert\(s\) 0 are lost with masked ranks"):
        tl.place_experts(layer, placement, optimizer)
