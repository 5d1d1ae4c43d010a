"""A small mixture-of-experts model over bytes. examples/train_moe_lm.py has one with attention, as a program would."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import tokenloom as tl

VOCABULARY = 256
"""A token is a byte."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model.

    Attributes:
        context: bytes in a sequence.
        hidden: H.
        layers: layers of experts.
        num_experts, top_k, intermediate: E, K and I of each layer.
        balance_coef: weight of the balance loss.
    """

    context: int = 64
    hidden: int = 64
    layers: int = 2
    num_experts: int = 8
    top_k: int = 2
    intermediate: int = 64
    balance_coef: float = 0.01


class NextByte(nn.Module):
    """Predicts a byte from the two before it: int64 [B, S] -> (logits [B, S, 256], balance loss of all layers).

    Args:
        size: sizes of the model.
        comm: what all layers share: they take turns.
    """

    def __init__(self, size: ModelSize, comm: tl.Communicator) -> None:
        super().__init__()
        self.last, self.before = (nn.Embedding(VOCABULARY, size.hidden) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(size.hidden) for _ in range(size.layers + 1))
        self.layers = nn.ModuleList(
            tl.ExpertParallelMoE(
                comm=comm,
                hidden=size.hidden,
                intermediate=size.intermediate,
                num_experts=size.num_experts,
                top_k=size.top_k,
                balance_coef=size.balance_coef,
                # The layer sums the gradients of expert weights over ranks; DDP averages all others. This makes a mean
                # of the sum.
                expert_grad_scale=1 / comm.num_ranks,
            )
            for _ in range(size.layers)
        )
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.last(tokens) + self.before(functional.pad(tokens, (1, -1)))
        balance_loss = x.new_zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=False):
            y, more = layer(norm(x))
            x, balance_loss = x + y, balance_loss + more
        return self.head(self.norms[-1](x)), balance_loss

    def reset_parameters(self, seed: int) -> None:
        """Draw the same full model for any number of ranks."""
        torch.manual_seed(seed)
        for plain in (self.last, self.before, self.head):
            plain.reset_parameters()
        for number, module in enumerate(self.modules()):
            if isinstance(module, tl.ExpertParallelMoE):
                module.reset_parameters(seed=seed + number)
