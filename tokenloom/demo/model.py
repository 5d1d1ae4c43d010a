"""A small mixture-of-experts language model over bytes, which uses ExpertParallelMoE as any program would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tokenloom.comm.communicator import Communicator
from tokenloom.runtime.processes import RankContext
from tokenloom.training.layer import ExpertParallelMoE

VOCABULARY = 256
"""A token is a byte."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model and of one step.

    Attributes:
        num_experts: E of each block.
        sequences: sequences in the batch of one step, over all ranks.
        top_k: K.
        hidden: H.
        intermediate: I, the width of one expert.
        heads: heads of the attention.
        num_blocks: blocks, each with attention and experts.
        context: tokens in a sequence.
        balance_coef: weight of the balance loss.
    """

    num_experts: int
    sequences: int
    top_k: int = 2
    hidden: int = 64
    intermediate: int = 64
    heads: int = 4
    num_blocks: int = 2
    context: int = 64
    balance_coef: float = 0.01

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.sequences * self.context


def _made_on(device: torch.device) -> dict[str, Any]:
    """Where modules make their parameters, and of which dtype, whatever the process's defaults are."""
    return {"device": device, "dtype": torch.float32}


class Attention(nn.Module):
    """Causal self-attention, [B, S, H] -> [B, S, H]."""

    def __init__(self, hidden: int, heads: int, device: torch.device) -> None:
        super().__init__()
        self.heads = heads
        made = _made_on(device)
        # No biases: that of the keys has no effect, so its gradient is rounding noise, which Adam would scale up.
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, **made)
        self.out = nn.Linear(hidden, hidden, bias=False, **made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then experts, each with a residual connection: [B, S, H] -> ([B, S, H], balance loss)."""

    def __init__(self, size: ModelSize, comm: Communicator) -> None:
        super().__init__()
        made = _made_on(comm.device)
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden, **made), nn.RMSNorm(size.hidden, **made)
        self.attention = Attention(size.hidden, size.heads, comm.device)
        self.moe = ExpertParallelMoE(
            comm=comm,
            hidden=size.hidden,
            intermediate=size.intermediate,
            num_experts=size.num_experts,
            top_k=size.top_k,
            balance_coef=size.balance_coef,
            dtype=torch.float32,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.norm1(x))
        y, aux_loss = self.moe(self.norm2(x))
        return x + y, aux_loss


class LanguageModel(nn.Module):
    """Bytes -> logits of the next byte: int64 [B, S] -> ([B, S, 256], balance loss).

    Args:
        size: sizes of the model.
        comm: the communicator that the experts of all blocks share.
    """

    def __init__(self, size: ModelSize, comm: Communicator) -> None:
        super().__init__()
        made = _made_on(comm.device)
        self.embedding = nn.Embedding(VOCABULARY, size.hidden, **made)
        self.positions = nn.Parameter(torch.empty(size.context, size.hidden, **made))
        self.blocks = nn.ModuleList(Block(size, comm) for _ in range(size.num_blocks))
        self.norm = nn.RMSNorm(size.hidden, **made)
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False, **made)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens) + self.positions
        aux_loss = x.new_zeros(())
        for block in self.blocks:
            x, block_loss = block(x)
            aux_loss = aux_loss + block_loss
        return self.head(self.norm(x)), aux_loss

    def reset_parameters(self, seed: int) -> None:
        """Draw the weights on the CPU: the same full model for any number of ranks."""
        layers = [module for module in self.modules() if isinstance(module, ExpertParallelMoE)]
        own = {parameter for layer in layers for parameter in layer.parameters()}
        generator = torch.Generator(device="cpu").manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter not in own and parameter.ndim > 1:  # the norms' scales start at 1
                    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
                    parameter.copy_(drawn * parameter.shape[-1] ** -0.5)
        for number, layer in enumerate(layers):
            layer.reset_parameters(seed=seed + number)


def make_model(context: RankContext, size: ModelSize, seed: int, ranks_per_node: int | None = None) -> LanguageModel:
    """This rank's part of the model, on its device. Collective."""
    comm = Communicator(
        context.group,
        num_experts=size.num_experts,
        hidden=size.hidden,
        top_k=size.top_k,
        max_tokens_per_rank=-(-size.sequences // context.num_ranks) * size.context,
        device=context.device,
        ranks_per_node=ranks_per_node,
    )
    model = LanguageModel(size, comm)
    model.reset_parameters(seed)
    return model
