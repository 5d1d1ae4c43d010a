"""What the calls that are measured are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tokenloom.bench.cases import Shape
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import FP8_BLOCK
from tokenloom.runtime.processes import RankContext


@dataclass(frozen=True)
class Inputs:
    """Tensors of one rank, the same for all backends.

    Attributes:
        shape: their sizes.
        x: bfloat16 [T, H], normally distributed.
        fp8: x as float8_e4m3fn [T, H] and float32 scales [T, H / 128]; None if H is no multiple of 128.
        ids: int32 [T, K], uniform routing, which dispatch returns without a conversion.
        weights: float32 [T, K].
        expert_rows: most rows that any rank receives in layout "expert", without padding.
    """

    shape: Shape
    x: torch.Tensor
    fp8: tuple[torch.Tensor, torch.Tensor] | None
    ids: torch.Tensor
    weights: torch.Tensor
    expert_rows: int


def make_inputs(context: RankContext, shape: Shape) -> Inputs:
    """The same on every run; another routing and other values on every rank. Collective."""
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randn(shape.num_tokens, shape.hidden, generator=generator).bfloat16().to(context.device)
    weights = torch.rand(shape.num_tokens, shape.top_k, generator=generator).to(context.device)
    ids = shape.topk_ids(context.rank).to(context.device)
    experts_per_rank = shape.plan(context.num_ranks).experts_per_rank
    rows = torch.bincount(ids.flatten() // experts_per_rank, minlength=context.num_ranks)
    dist.all_reduce(rows, group=context.group)
    return Inputs(
        shape=shape,
        x=x,
        fp8=None if shape.hidden % FP8_BLOCK else quantize_fp8(x),
        ids=ids.to(torch.int32),
        weights=weights,
        expert_rows=int(rows.max()),
    )


def expert_outputs(like: torch.Tensor) -> torch.Tensor:
    """bfloat16, normally distributed, in the shape of dispatched rows: what a combine takes."""
    return torch.empty(like.shape, dtype=torch.bfloat16, device=like.device).normal_()
