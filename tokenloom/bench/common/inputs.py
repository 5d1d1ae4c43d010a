"""The tensors that measured calls are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.bench.common.shape import Shape
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import FP8_BLOCK
from tokenloom.runtime.processes import RankContext

SLOT_STEP = 128
"""Rows of a tile of a grouped GEMM."""


@dataclass(frozen=True)
class Inputs:
    """Tensors of one rank, the same for all backends.

    Attributes:
        shape: the sizes.
        x: bfloat16 [T, H], normally distributed.
        fp8: x as float8_e4m3fn [T, H] and float32 scales [T, H / 128]; None if H is not a multiple of 128.
        ids: int32 [T, K], uniform routing. int32, because dispatch hands it out without a conversion.
        weights: float32 [T, K].
        expert_rows: most rows that any rank receives in layout "expert", without padding.
        slot_rows: places for each expert in layout "slots": the most routes of any expert, up to a multiple of 128,
            but never more than there are tokens.
    """

    shape: Shape
    x: torch.Tensor
    fp8: tuple[torch.Tensor, torch.Tensor] | None
    ids: torch.Tensor
    weights: torch.Tensor
    expert_rows: int
    slot_rows: int


def make_inputs(context: RankContext, shape: Shape) -> Inputs:
    """Draw the same tensors on every run, with other values and another routing on every rank. Collective."""
    generator = torch.Generator(device="cpu").manual_seed(context.rank)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    x = torch.randn(shape.num_tokens, shape.hidden, **drawn).bfloat16().to(context.device)
    weights = torch.rand(shape.num_tokens, shape.top_k, **drawn).to(context.device)
    ids = shape.topk_ids(context.rank).to(context.device)
    routes = torch.bincount(ids.flatten(), minlength=shape.num_experts)
    dist.all_reduce(routes, group=context.group)
    most_routes = int(routes.max())
    return Inputs(
        shape=shape,
        x=x,
        fp8=None if shape.hidden % FP8_BLOCK else quantize_fp8(x),
        ids=ids.to(torch.int32),
        weights=weights,
        expert_rows=int(routes.view(context.num_ranks, -1).sum(1).max()),
        slot_rows=min(-(-most_routes // SLOT_STEP) * SLOT_STEP, context.num_ranks * shape.num_tokens),
    )


def expert_outputs(like: torch.Tensor) -> torch.Tensor:
    """Normally distributed bfloat16 values in the shape of dispatched rows, for a combine."""
    return torch.empty(like.shape, dtype=torch.bfloat16, device=like.device).normal_()
