"""Batches that several ranks hold alike, under tensor parallelism: each rank takes a part of the tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tokenloom.runtime.collectives import gather_all


class Share:
    """This rank's part of tokens that all ranks of a group hold.

    Args:
        group: ranks that hold the same tokens.
        num_tokens: T, tokens of each rank.

    Attributes:
        rows: this rank's part, ``ceil(T / ranks)`` tokens or fewer.
    """

    def __init__(self, group: dist.ProcessGroup, num_tokens: int) -> None:
        self.group, self.num_tokens = group, num_tokens
        self.num_rows = -(-num_tokens // group.size())
        begin = min(num_tokens, group.rank() * self.num_rows)
        self.rows = slice(begin, min(num_tokens, begin + self.num_rows))

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of [T, n]. Its gradient is gathered, so all ranks get the whole."""
        return _Take.apply(values, self) if values.requires_grad else values[self.rows]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Put the parts of all ranks together, to [T, n]. Collective."""
        return _Gather.apply(values, self)

    def put_together(self, part: torch.Tensor) -> torch.Tensor:
        """Do what :meth:`gather` does, without a graph."""
        padded = part.new_zeros(self.num_rows, *part.shape[1:])
        padded[: len(part)] = part
        whole = part.new_empty(self.num_rows * self.group.size(), *part.shape[1:])
        gather_all(whole, padded, group=self.group)
        return whole[: self.num_tokens]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        return values[share.rows].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.share.put_together(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        return share.put_together(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad[ctx.share.rows], None
