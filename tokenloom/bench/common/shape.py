"""The sizes of one call, and dtypes by the names that commands take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan

ROUTING_SEED = 0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
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
        """The plan for these sizes on ``num_ranks`` ranks.

        Raises:
            InvalidArgument: the experts cannot be spread over the ranks, or are fewer than a token chooses.
        """
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
