"""Checks of a layer's options, and the initial values of its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.ops.router import Router
from tokenloom.plan import Plan, WeightLayout, is_number


def check_options(
    plan: Plan,
    router: Router,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    shared_intermediate: int,
    router_grad: str,
    factors: Mapping[str, object],
) -> None:
    """Raise InvalidArgument unless the options of a layer fit each other and the communicator's plan."""
    if not isinstance(router, Router):
        raise InvalidArgument(f"router is {router!r}, expected a Router or the name of a score")
    for name, wanted, got in (
        ("num_experts", plan.num_experts, num_experts),
        ("hidden", plan.hidden, hidden),
        ("top_k", plan.top_k, top_k),
    ):
        if wanted != got:
            raise InvalidArgument(f"{name} is {got}, the communicator was made for {wanted}; share one that fits")
    if (router.num_experts, router.top_k) != (num_experts, top_k):
        raise InvalidArgument(
            f"the router chooses {router.top_k} of {router.num_experts}, the layer has {top_k} of {num_experts}"
        )
    for name, width, least in (("intermediate", intermediate, 1), ("shared_intermediate", shared_intermediate, 0)):
        if not isinstance(width, int) or width < least:
            raise InvalidArgument(f"{name} is {width!r}, expected an integer of at least {least}")
    if router_grad not in ("local", "sum"):
        raise InvalidArgument(f"router_grad is {router_grad!r}, expected 'local' or 'sum'")
    for name, factor in factors.items():
        if not is_number(factor):
            raise InvalidArgument(f"{name} is {factor!r}, expected a number")


def check_pool_rows(pool_rows: object) -> None:
    """Raise InvalidArgument unless ``pool_rows`` is None or a number of rows."""
    if pool_rows is None:
        return
    if not isinstance(pool_rows, int) or isinstance(pool_rows, bool) or pool_rows < 1:
        raise InvalidArgument(f"pool_rows is {pool_rows!r}, expected None or an integer of at least 1")


def seeded_uniform(like: torch.Tensor, bound: float, seed: int, name: str, row: int) -> torch.Tensor:
    """Draw uniform values in ±bound that depend on (seed, name, row) alone, with the shape and dtype of ``like``.

    They are drawn on the CPU in float32, so they depend neither on the device nor on torch's defaults.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{row}".encode(), digest_size=7).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))
    values = torch.rand(like.shape, generator=generator, dtype=torch.float32, device="cpu")
    return values.mul_(2 * bound).sub_(bound).to(like)


def draw_seeded(
    parameter: torch.Tensor, layout: WeightLayout, bound: float, seed: int, name: str, rows: Iterable[int]
) -> None:
    """Fill a parameter with :func:`seeded_uniform`, row by row; of a DTensor, the part that lies here.

    Args:
        layout: of expert weights.
        rows: their numbers.
    """
    shards: Any = parameter if hasattr(parameter, "placements") else None
    full = parameter if shards is None else torch.empty(shards.shape, dtype=shards.dtype, device=shards.device)
    for place, row in zip(plain_view(name, full, layout), rows, strict=True):
        place.copy_(seeded_uniform(place, bound, seed, name, row))
    if shards is not None:
        from torch.distributed.tensor import distribute_tensor  # by now somebody has

        shards.copy_(distribute_tensor(full, shards.device_mesh, shards.placements, src_data_rank=None))


def plain_view(name: str, parameter: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
    """View an expert weight in the default layout: w1 as [L, 2, I, H], its bias as [L, 2, I], w2 as [L, H, I].

    Where rows are not interleaved, w1 and its bias stay as they are, apart from a transposition.
    """
    if name in ("w1", "w2") and layout.transposed:
        parameter = parameter.transpose(1, 2)
    if name in ("w1", "w1_bias") and layout.interleaved:
        parameter = parameter.unflatten(1, (-1, 2)).transpose(1, 2)
    return parameter
