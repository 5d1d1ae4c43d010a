"""A stand-in for deep_ep, as far as a benchmark calls it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tokenloom.bench.workload import CallSizes

SHAPE = CallSizes(num_tokens=40, hidden=256, top_k=2, num_experts=8)
"""The only shape that it takes."""


def fake_deep_ep() -> Any:
    """A patch that puts a module of that name in place."""
    module = ModuleType("deep_ep")
    module.Buffer = FakeBuffer  # type: ignore[attr-defined]
    return mock.patch.dict(sys.modules, deep_ep=module)


def no_deep_ep() -> Any:
    """A patch that makes its import fail, even where it is installed."""
    return mock.patch.dict(sys.modules, deep_ep=None)


class FakeBuffer:
    """deep_ep's Buffer as far as a benchmark calls it, on any device; each rank sends to itself alone."""

    num_sms = 20

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, *, explicitly_destroy: bool) -> None:
        assert num_nvl_bytes == 2 * SHAPE.hidden * group.size()
        assert explicitly_destroy, "only then it has destroy"
        self.group = group
        self.alive = True

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, num_ranks: row_bytes * num_ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        ranks = topk_idx // (num_experts // self.group.size())
        in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.group.size())], 1)
        return in_rank.sum(0).int(), None, topk_idx.flatten().bincount(minlength=num_experts).int(), in_rank, None

    def dispatch(
        self,
        x: Any,
        *,
        num_tokens_per_rank: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> tuple[Any, ...]:
        assert self.alive
        assert num_tokens_per_expert.sum() == topk_idx.numel() == topk_weights.numel()
        mine = is_token_in_rank[:, self.group.rank()]
        received = tuple(part[mine] for part in x) if isinstance(x, tuple) else x[mine]
        return received, topk_idx[mine], topk_weights[mine], [], num_tokens_per_rank, None

    def combine(self, x: torch.Tensor, handle: torch.Tensor) -> tuple[Any, ...]:
        assert self.alive
        assert x.dtype == torch.bfloat16
        assert x.shape == (int(handle[self.group.rank()]), SHAPE.hidden)
        return x, None, None

    def destroy(self) -> None:
        assert self.alive
        self.alive = False
