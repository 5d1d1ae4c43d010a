"""Routing problems whose results every rank computes by itself, from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenloom import reference
from tokenloom.plan import Plan
from tokenloom.runtime.topology import Topology

ROUTINGS = ("uniform", "skewed", "empty")
"""Every token draws different experts, and ranks have unequal numbers of tokens; all tokens go to the last node, or
to the last rank of a single node; half of the ranks have no tokens."""
PAYLOADS = ("bf16", "fp8")
HIDDEN = 256
EXPERTS_PER_RANK = 4
TOP_K = 4
MOST_TOKENS = 12
TOKENS_OF_ALL_RANKS = 512
"""Large groups have fewer tokens a rank: every rank computes the reference of all of them."""


@dataclass(frozen=True)
class Problem:
    """Tensors of all ranks, on the CPU.

    Attributes:
        routing: one of ROUTINGS.
        payload: one of PAYLOADS.
        plan: sizes.
        xs: bfloat16 or float8_e4m3fn [T, H].
        scales: float32 [T, H / 128] beside FP8, else None.
        ids: int64 [T, K].
        weights: float32 [T, K].
        seed: of what is drawn later.
    """

    routing: str
    payload: str
    plan: Plan
    xs: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    seed: int

    @property
    def slots(self) -> int:
        """Places that each expert needs in layout "slots"."""
        ids = torch.cat([each.flatten() for each in self.ids])
        return max(1, int(torch.bincount(ids[ids >= 0], minlength=1).max()))

    def dispatched(self, layout: str) -> list[reference.Routed]:
        """What every rank must receive."""
        capacity = self.slots if layout == "slots" else None
        return reference.dispatch(
            self.plan, self.xs, self.ids, self.weights, layout, scales=self.scales, capacity=capacity
        )

    def expert_rows(self, routed: Sequence[reference.Routed]) -> list[torch.Tensor]:
        """Rows that stand for the experts' outputs: bfloat16, in the shape of what each rank received.

        They are of many magnitudes, so that the order of a sum shows. Where no row lies there is NaN, so that it shows
        if a combine reads it.
        """
        generator = torch.Generator("cpu").manual_seed(self.seed + 1)
        ys = []
        for each in routed:
            shape = each.tokens.shape
            exponents = torch.randint(-5, 6, shape, generator=generator, dtype=torch.int64, device="cpu")
            y = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 2.0**exponents
            y.view(-1, shape[-1])[each.padding] = torch.nan
            ys.append(y.bfloat16())
        return ys


def sizes(num_ranks: int) -> Plan:
    """Sizes of the problems for a group."""
    tokens = max(2, min(MOST_TOKENS, TOKENS_OF_ALL_RANKS // num_ranks))
    return Plan(num_ranks, num_ranks * EXPERTS_PER_RANK, HIDDEN, TOP_K, tokens)


def make_problem(topology: Topology, routing: str, payload: str, seed: int) -> Problem:
    """Draw a problem, the same on every rank.

    Args:
        routing: one of ROUTINGS.
        payload: one of PAYLOADS.
    """
    plan = sizes(len(topology.node_of))
    generator = torch.Generator("cpu").manual_seed(seed)
    real: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    whole: dict[str, Any] = {"generator": generator, "dtype": torch.int64, "device": "cpu"}
    experts = torch.arange(plan.num_experts, dtype=torch.int64, device="cpu")
    if routing == "skewed":
        last = topology.nodes[-1] if topology.num_nodes > 1 else (plan.num_ranks - 1,)
        on_last = [rank in last for rank in range(plan.num_ranks)]
        experts = experts[torch.tensor(on_last, device="cpu").repeat_interleave(plan.experts_per_rank)]
    xs, scales, ids, weights = [], [], [], []
    for rank in range(plan.num_ranks):
        num_tokens = int(torch.randint(1, plan.max_tokens_per_rank + 1, (1,), **whole))
        if routing == "empty" and rank % 2 == 0 and plan.num_ranks > 1:
            num_tokens = 0
        x = torch.randn(num_tokens, plan.hidden, **real)
        order = torch.rand(num_tokens, len(experts), **real).argsort(1)
        drawn = experts[order[:, : plan.top_k]]
        unused = torch.rand(drawn.shape, **real) < 0.1
        unused[:, :1] = False  # every token goes somewhere
        ids.append(torch.where(unused, -1, drawn))
        weights.append(torch.rand(drawn.shape, **real) + 0.1)
        scales.append(torch.rand(num_tokens, plan.scales_per_token, **real) + 0.5)
        xs.append(x.clamp(-400, 400).to(torch.float8_e4m3fn) if payload == "fp8" else x.bfloat16())
    return Problem(routing, payload, plan, xs, scales if payload == "fp8" else None, ids, weights, seed)
