"""Modules of experts alone, without a model and its meshes: on groups of the pools, and on the emulator.

There and on Hopper GPUs rows travel by backend "nvlink".
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.integrations.transformers import models
from tests.support import emulator
from tokenloom.runtime.processes import RankContext

EMULATED = True

TOKENS = ((3, 5), (20, 1), (0, 4), (1, 0))
"""Of rank r in each step: item r modulo two."""
TOLERANCE = 0.03
"""Of the largest value: bfloat16, rounded at other places."""


def make(family: str, experts: slice) -> torch.nn.Module:
    """Experts of a family with the weights of some of its experts."""
    stem = models.FAMILIES[family][0]
    config = models.config_of(family, 1)
    config._experts_implementation = "grouped_mm"
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(module, f"{stem}Experts")(config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in list(made.named_parameters()):
        full = (0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16()
        setattr(made, name, torch.nn.Parameter(full[experts].clone()))
    made.num_experts = len(range(models.EXPERTS)[experts])
    return made


def spread(context: RankContext, experts: torch.nn.Module, options: dict[str, Any]) -> Any:
    """What transformers makes of the module, on a mesh of all ranks."""
    package = "tokenloom.integrations.transformers"
    kind = import_module(f"{package}.implementation").TokenloomExperts
    own = type("TokenloomExperts", (kind,), {"options": import_module(f"{package}.options").ExpertsOptions(**options)})
    one = SimpleNamespace(ndim=1, size=lambda: 1, get_group=lambda: context.group)
    ranks = SimpleNamespace(ndim=1, size=lambda: context.num_ranks, get_group=lambda: context.group)
    experts._is_expert_parallel = True  # type: ignore[assignment]
    return own(experts, ranks, one)


def compare(context: RankContext, family: str, options: dict[str, Any]) -> None:
    count = models.EXPERTS // context.num_ranks
    local = slice(context.rank * count, (context.rank + 1) * count)
    plain, own = make(family, slice(None)).to(context.device), make(family, local).to(context.device)
    implementation = spread(context, own, options)
    for step, tokens in enumerate(TOKENS):
        given = []
        for rank in range(context.num_ranks):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, grad = torch.randn(2, tokens[rank % 2], models.HIDDEN, generator=generator).bfloat16()
            weights, ids = torch.rand(len(x), models.EXPERTS, generator=generator).topk(models.TOP_K)
            given.append([each.to(context.device) for each in (x, ids, weights, grad)])
        x, ids, weights, grad = (torch.cat(each) for each in zip(*given, strict=True))
        begin = sum(len(each[0]) for each in given[: context.rank])
        share = slice(begin, begin + len(given[context.rank][0]))
        found, wanted = [], []
        for module, rows, results in ((plain, slice(None), wanted), (implementation, share, found)):
            parameters = list((plain if module is plain else own).parameters())
            inputs = [x[rows].clone().requires_grad_(), ids[rows], weights[rows].clone().requires_grad_()]
            out = module(*inputs)
            for each in parameters:
                each.grad = None
            out.backward(grad[rows])
            results += [out.detach(), inputs[0].grad, inputs[2].grad, *(each.grad for each in parameters)]
        with torch.no_grad():
            again = implementation(x[share], ids[share], weights[share])
        near(again, found[0])
        for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
            near(got, want[share] if place < 3 else want[local])


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    limit = TOLERANCE * (1e-2 + want.abs().max().item()) if want.numel() else 0.0
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=limit)


OPTIONS: dict[str, dict[str, Any]] = {
    "tokenloom": {},
    "model": {"experts": "model"},
    "bounded": {"max_tokens_per_rank": 32, "pool_rows": 256},
    "placed": {"spare_slots": 1},
}


BETWEEN_NODES: dict[str, dict[str, Any]] = {
    "gin": {"transport": "gin", "max_tokens_per_rank": 32},
    "padded": {"backend": "padded", "max_tokens_per_rank": 32},
}


@pytest.mark.skipif(not emulator.ON, reason="it needs Hopper GPUs and a network; the emulator plays both")
@pytest.mark.parametrize("sizes", [(2, 1), (4, 2)], ids=["emulated2", "emulated4"])
@pytest.mark.parametrize("how", BETWEEN_NODES)
def test_experts_between_nodes(how: str, sizes: tuple[int, int]) -> None:
    """Rows cross nodes by kernels that send, or between two kernels, there and back and for gradients."""
    num_ranks, ranks_per_node = sizes
    emulator.ranks(num_ranks).run(in_place, "mixtral", {**BETWEEN_NODES[how], "ranks_per_node": ranks_per_node})


@pytest.mark.slow_on(1, 4)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("how", OPTIONS)
def test_experts(ranks: Ranks, family: str, how: str) -> None:
    """Batches that grow on some ranks, ranks without tokens: outputs and gradients of all experts on all tokens."""
    ranks.run(in_place, family, OPTIONS[how])


def in_place(context: RankContext, family: str, options: dict[str, Any]) -> None:
    """transformers asks whether the meshes are of the same ranks, which here are none of a torch mesh."""
    parallel = import_module("transformers.distributed.expert_parallel")
    parallel.get_process_group_ranks = lambda group: [0]
    placed = "spare_slots" in options
    compare(context, family, options | ({"spare_slots": 0, "placement": hot_first(context)} if placed else {}))


def hot_first(context: RankContext) -> tl.Placement:
    """Backwards, so that no rank has its own experts, and expert 0 once more on each rank."""
    table = torch.arange(models.EXPERTS).flip(0).view(context.num_ranks, -1)
    table = torch.cat([table.new_zeros(context.num_ranks, 1), table], 1)
    return tl.Placement(table, num_experts=models.EXPERTS)


def new_places(context: RankContext) -> None:
    parallel = import_module("transformers.distributed.expert_parallel")
    parallel.get_process_group_ranks = lambda group: [0]
    place_experts = import_module("tokenloom.integrations.transformers").place_experts
    count = models.EXPERTS // context.num_ranks
    local = slice(context.rank * count, (context.rank + 1) * count)
    own = make("mixtral", local).to(context.device)
    implementation = spread(context, own, {"spare_slots": 1})
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randn(5, models.HIDDEN, generator=generator).bfloat16().to(context.device)
    weights, ids = torch.rand(5, models.EXPERTS, generator=generator).topk(models.TOP_K)
    given = (x, ids.to(context.device), weights.to(context.device))
    with torch.no_grad():
        want = implementation(*given)
        for placement in (hot_first(context), tl.Placement.default(models.EXPERTS, context.num_ranks, count + 1)):
            place_experts(own, placement)
            near(implementation(*given), want)
            kept = implementation.slots._kept
            near(implementation(*given), want)
            assert implementation.slots._kept is kept
        own.down_proj.mul_(2)
        near(implementation(*given), 2 * want)
        assert implementation.slots._kept is not kept
        near(implementation(x[:0], *(each[:0] for each in given[1:])), want[:0])
        place_experts(own, hot_first(context))
        grown = [torch.cat([each] * 4) for each in given]  # by another communicator, which goes by it too
        near(implementation(*grown), torch.cat([2 * want] * 4))
    with pytest.raises(tl.InvalidArgument, match="slots_per_rank"):
        place_experts(own, tl.Placement.default(models.EXPERTS, context.num_ranks))
    with pytest.raises(tl.InvalidArgument, match="no experts of this model go by a placement"):
        place_experts(torch.nn.Identity(), hot_first(context))


@pytest.mark.slow_on(1, 4)
def test_new_places(ranks: Ranks) -> None:
    """Slots are filled anew when the placement or the weights change, and at no other call."""
    ranks.run(new_places)
