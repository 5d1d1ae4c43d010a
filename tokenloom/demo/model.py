"""A small language model with experts spread over the ranks: how a model uses ExpertParallelMoE.

``tokenloom demo`` and examples/train_moe_lm.py train it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import tokenloom as tl


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model.

    Attributes:
        vocabulary: different tokens; a token is a byte.
        context: tokens in a sequence.
        hidden, heads, blocks: H, heads of the attention, and blocks of attention and experts.
        num_experts, top_k, intermediate: E, K and I of each block.
        balance_coef: weight of the balance loss.
    """

    vocabulary: int = 256
    context: int = 64
    hidden: int = 64
    heads: int = 4
    blocks: int = 2
    num_experts: int = 8
    top_k: int = 2
    intermediate: int = 64
    balance_coef: float = 0.01


class Attention(nn.Module):
    """Causal self-attention: [B, S, H] -> [B, S, H]."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        # No biases: that of the keys has no effect, so its gradient is rounding noise, which Adam would scale up.
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then experts, each beside a residual: [B, S, H] -> ([B, S, H], balance loss)."""

    def __init__(self, size: ModelSize, comm: tl.Communicator) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.attention = Attention(size)
        self.moe = tl.ExpertParallelMoE(
            comm=comm,
            hidden=size.hidden,
            intermediate=size.intermediate,
            num_experts=size.num_experts,
            top_k=size.top_k,
            balance_coef=size.balance_coef,
            # The layer sums the gradients of expert weights over ranks; DDP averages all others. This makes a mean of
            # the sum.
            expert_grad_scale=1 / comm.num_ranks,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance_loss = self.moe(self.norm2(x))
        return x + y, balance_loss


class LanguageModel(nn.Module):
    """int64 [B, S] -> logits of the next byte [B, S, vocabulary], balance loss of all blocks.

    Args:
        size: sizes of the model.
        comm: what the experts of all blocks share: they take turns.
    """

    def __init__(self, size: ModelSize, comm: tl.Communicator) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.context, size.hidden)
        self.blocks = nn.ModuleList(Block(size, comm) for _ in range(size.blocks))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens) + self.positions.weight
        balance_loss = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            balance_loss = balance_loss + more
        return self.head(self.norm(x)), balance_loss

    def reset_parameters(self, seed: int) -> None:
        """Draw the same full model for any number of ranks. Every MoE layer has a seed of its own."""
        torch.manual_seed(seed)
        for number, module in enumerate(self.modules()):
            if isinstance(module, tl.ExpertParallelMoE):
                module.reset_parameters(seed=1000 * seed + number)
            elif isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm):
                module.reset_parameters()
