"""Checks of a layer's options, and the initial values of its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.ops.router import Router
from tokenloom.plan import Plan, WeightLayout, is_number

EXPERT_WEIGHTS = ("w1", "w2", "w1_bias", "w2_bias")
"""Names of the parameters that are sharded by expert, along dimension 0."""


def check_experts(
    plan: Plan,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    expert_grad_scale: object,
    pool_rows: object,
) -> None:
    """Raise InvalidArgument unless the options of experts fit each other and the communicator's plan."""
    for name, wanted, got in (
        ("num_experts", plan.num_experts, num_experts),
        ("hidden", plan.hidden, hidden),
        ("top_k", plan.top_k, top_k),
    ):
        if wanted != got:
            raise InvalidArgument(f"{name} is {got}, the communicator was made for {wanted}; share one that fits")
    _check_width("intermediate", intermediate, 1)
    _check_number("expert_grad_scale", expert_grad_scale)
    if pool_rows is None:
        return
    if not isinstance(pool_rows, int) or isinstance(pool_rows, bool) or pool_rows < 1:
        raise InvalidArgument(f"pool_rows is {pool_rows!r}, expected None or an integer of at least 1")


def check_options(
    plan: Plan, router: object, shared_intermediate: int, shared_gate: object, router_grad: str, **coefficients: object
) -> None:
    """Raise InvalidArgument unless the options of a layer beside its experts fit the plan and each other."""
    if not isinstance(router, Router):
        raise InvalidArgument(f"router is {router!r}, expected a Router or the name of a score")
    if (router.num_experts, router.top_k) != (plan.num_experts, plan.top_k):
        raise InvalidArgument(
            f"router chooses {router.top_k} of {router.num_experts} experts, expected {plan.top_k} of "
            f"{plan.num_experts}; pass Router({plan.num_experts}, {plan.top_k})"
        )
    _check_width("shared_intermediate", shared_intermediate, 0)
    if shared_gate and not shared_intermediate:
        raise InvalidArgument("shared_gate is True, but there is no shared expert; pass shared_intermediate")
    if router_grad not in ("local", "sum"):
        raise InvalidArgument(f"router_grad is {router_grad!r}, expected 'local' or 'sum'")
    for name, coefficient in coefficients.items():
        _check_number(name, coefficient)


def _check_width(name: str, width: object, least: int) -> None:
    if not isinstance(width, int) or width < least:
        raise InvalidArgument(f"{name} is {width!r}, expected an integer of at least {least}")


def _check_number(name: str, factor: object) -> None:
    if not is_number(factor):
        raise InvalidArgument(f"{name} is {factor!r}, expected a number")


def own_name(name: str) -> str:
    """Strip what ``torch.nn.utils`` adds to the name of a parameter.

    "parametrizations.w1.original" (parametrizations) and "w1_orig" (pruning) become "w1".
    """
    return name.removeprefix("parametrizations.").split(".")[0].removesuffix("_orig")


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
    """Fill a parameter with :func:`seeded_uniform`, row by row. Of a DTensor, fill this rank's part.

    Args:
        rows: numbers of the rows, which the values depend on.
    """
    shards: Any = parameter if hasattr(parameter, "placements") else None
    full = parameter if shards is None else torch.empty(shards.shape, dtype=shards.dtype, device=shards.device)
    for values, row in zip(plain_view(name, full, layout), rows, strict=True):
        values.copy_(seeded_uniform(values, bound, seed, name, row))
    if shards is not None:
        from torch.distributed.tensor import distribute_tensor  # the DTensor's maker has imported it

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
