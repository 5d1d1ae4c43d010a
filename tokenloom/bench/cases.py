"""The shapes that are measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenloom.communicator import Layout
from tokenloom.plan import Plan

ROUTING_SEED = 0


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        name: for ``--case``.
        num_tokens: T on every rank. hidden: H. top_k: K. num_experts: E.
        layouts: of the dispatch.
        dtypes: of the tokens: "bf16" (dispatch and combine), "fp8" with scales (dispatch; what comes home is BF16).
        device: on which it is measured if no case is named.
        what: where such a shape comes from.
    """

    name: str
    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    device: str
    what: str
    layouts: tuple[Layout, ...] = ("token", "expert", "rank")
    dtypes: tuple[str, ...] = ("bf16", "fp8")

    def plan(self, num_ranks: int) -> Plan:
        """Its sizes on that many ranks.

        Raises:
            InvalidArgument: the experts cannot be spread over them.
        """
        return Plan(num_ranks, self.num_experts, self.hidden, self.top_k, self.num_tokens)

    def topk_ids(self, rank: int) -> torch.Tensor:
        """int64 [T, K] of one rank: K different experts for each token, all equally likely."""
        generator = torch.Generator().manual_seed(ROUTING_SEED + rank)
        return torch.rand(self.num_tokens, self.num_experts, generator=generator).topk(self.top_k).indices


CASES = (
    Case("prefill", 4096, 7168, 8, 256, "cuda", "DeepSeek-V3: training, or prompts in inference"),
    Case("decode", 128, 7168, 8, 256, "cuda", "DeepSeek-V3: one token of 128 requests"),
    Case("small", 64, 256, 2, 8, "cpu", "latency: hardly any bytes"),
    Case("medium", 256, 512, 4, 16, "cpu", "some bytes"),
)


def cases_for(names: list[str], device: str) -> list[Case]:
    """The cases of these names, or those meant for the device if there are none.

    Raises:
        KeyError: no case has that name.
    """
    by_name = {case.name: case for case in CASES}
    return [by_name[name] for name in names] or [case for case in CASES if case.device == device]
