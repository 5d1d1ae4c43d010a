"""Arguments of measured calls: sizes, dtypes by the names that commands take, and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from tokenloom.comm.routed import Layout
from tokenloom.errors import InvalidArgument
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.tune.network.constants import FITTED

ROUTING_SEED = 0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class CallSizes:
    """Sizes of one call.

    Attributes:
        num_tokens: T, the tokens of every rank.
        hidden: H.
        top_k: K.
        num_experts: E.
    """

    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int

    def plan(self, num_ranks: int) -> Plan:
        """The plan for these sizes on ``num_ranks`` ranks."""
        if self.top_k > self.num_experts:
            raise InvalidArgument(
                f"top_k is {self.top_k}, expected at most {self.num_experts}, as there are no more experts to choose"
            )
        return Plan(num_ranks, self.num_experts, self.hidden, self.top_k, self.num_tokens)

    def topk_ids(self, rank: int) -> torch.Tensor:
        """Routing of one rank: int64 [T, K] on the CPU, K different experts for each token, all equally likely."""
        generator = torch.Generator(device="cpu").manual_seed(ROUTING_SEED + rank)
        sizes = (self.num_tokens, self.num_experts)
        scores = torch.rand(sizes, generator=generator, dtype=torch.float32, device="cpu")
        return scores.topk(self.top_k).indices

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.hidden} top-{self.top_k} of {self.num_experts}"


SLOT_STEP = 128
"""Rows of a tile of a grouped GEMM."""


Payload = Literal["bf16", "fp8", "to_fp8"]


@dataclass(frozen=True)
class Operation:
    """A measured operation.

    Attributes:
        name: "dispatch"; "combine", of a dispatch made before; or "dispatch+combine", one after the other.
        payload: what is dispatched: "bf16"; "fp8", quantised before; or "to_fp8", BF16 that dispatch quantises. What
            comes home is always BF16.
    """

    name: Literal["dispatch", "combine", "dispatch+combine"]
    payload: Payload
    layout: Layout

    def __str__(self) -> str:
        return f"{self.name} {self.payload} {self.layout}"


@dataclass(frozen=True)
class Inputs:
    """Tensors of one rank, the same for all backends.

    Attributes:
        x: bfloat16 [T, H], normally distributed.
        fp8: x as float8_e4m3fn [T, H] and float32 scales [T, H / 128]; None if H is not a multiple of 128.
        ids: int32 [T, K], uniform routing. int32, because dispatch hands it out without a conversion.
        expert_rows: most rows that any rank receives in layout "expert", without padding.
        slot_rows: places for each expert in layout "slots": the most routes of any expert, up to a multiple of 128,
            but never more than there are tokens.
    """

    shape: CallSizes
    x: torch.Tensor
    fp8: tuple[torch.Tensor, torch.Tensor] | None
    ids: torch.Tensor
    weights: torch.Tensor
    expert_rows: int
    slot_rows: int


def make_inputs(context: RankContext, shape: CallSizes) -> Inputs:
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


LINK_GBYTES_PER_S = FITTED.nvlink_gbytes_per_s
"""Bytes that the NVLinks of an H200 carry out of it, measured; 1 GB is 1e9 bytes."""
