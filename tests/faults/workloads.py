"""What ranks do in programs that fail: calls of each kind, which know what they must bring.

All values are small integers, so that results are exact in every dtype and order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tokenloom as tl
from tests.faults.programs import Rank
from tokenloom.compat import deep_ep
from tokenloom.runtime import forks

EXPERTS_PER_RANK, TOP_K, HIDDEN, MOST = 2, 2, 128, 8
PATIENCE_S = 60.0
"""Longest wait for a call to be opened, where no rank is late on purpose."""
BF16, FP32 = torch.bfloat16, torch.float32


class WrongValue(AssertionError):
    """A call has brought what it must not."""


class Workload(Protocol):
    """Calls of one kind, on one communicator.

    Args:
        rank: this process of the program.
        on_timeout: as of a Communicator.
    """

    def __init__(self, rank: Rank, on_timeout: str) -> None: ...

    def masked(self) -> frozenset[int]:
        """Ranks that are left out."""

    def step(self, number: int) -> None:
        """Make the calls of a step, whose inputs the number gives.

        Raises:
            WrongValue: they have brought what they must not.
        """

    def mask(self, gone: int) -> None:
        """Go on without a rank."""

    def close(self) -> None:
        """Release everything."""


def await_others(timeout_s: float, open_timeout_s: float) -> None:
    """Wait no longer than that for other ranks from now on, within a call and for its opening."""
    for ranks in list(forks._all):
        ranks.timeout_s = ranks._watch._timeout_s = timeout_s
        ranks.open_timeout_s = open_timeout_s


def inputs(rank: Rank, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids and weights of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank.rank)
    num_tokens = int(torch.randint(1, MOST + 1, (), generator=generator))
    x = torch.randint(1, 3, (num_tokens, HIDDEN), generator=generator).to(dtype)
    scores = torch.rand(num_tokens, EXPERTS_PER_RANK * rank.num_ranks, generator=generator)
    weights = torch.randint(1, 3, (num_tokens, TOP_K), generator=generator).to(FP32)
    return x, scores.topk(TOP_K).indices, weights


def require(
    out: torch.Tensor, given: tuple[torch.Tensor, ...], before: Collection[int], after: Collection[int], what: str
) -> None:
    """Raise WrongValue unless each token has all its routes but those to ranks that were masked.

    Args:
        out: what came home, where expert e multiplies by e + 1.
        given: tokens, ids and weights.
        before: ranks that were masked before the calls.
        after: those that are now. One that was lost meanwhile may have added to a token, or not.
        what: the calls, for the error.
    """
    x, ids, weights = given

    def home(masked: Collection[int]) -> torch.Tensor:
        there = ~torch.isin(ids // EXPERTS_PER_RANK, torch.tensor(sorted(masked), dtype=ids.dtype))
        return (x.float() * (weights * (ids + 1) * there).sum(1, keepdim=True)).to(x.dtype)

    right = (out == home(before)).all(1) | (out == home(after)).all(1)
    if out.shape != x.shape or not right.all():
        raise WrongValue(f"{what}: tokens {(~right).nonzero().flatten().tolist()}, masked {before} then {after}")


class Pairs:
    """A dispatch and a combine."""

    def __init__(self, rank: Rank, on_timeout: str) -> None:
        self.rank = rank
        self.comm = tl.Communicator(
            None,
            num_experts=EXPERTS_PER_RANK * rank.num_ranks,
            hidden=HIDDEN,
            top_k=TOP_K,
            max_tokens_per_rank=MOST,
            device="cpu",
            timeout_s=PATIENCE_S,
            open_timeout_s=PATIENCE_S,
            on_timeout=on_timeout,  # type: ignore[arg-type]
        )

    def masked(self) -> frozenset[int]:
        return frozenset(self.comm.masked_ranks())

    def step(self, number: int) -> None:
        given, before = inputs(self.rank, number, FP32), self.masked()
        out = self._call(*given)
        require(out, given, before, self.masked(), f"step {number}")

    def _call(self, *given: torch.Tensor) -> torch.Tensor:
        routed = self.comm.dispatch(*given, layout="expert")
        return self.comm.combine(self._experts(routed), routed)

    def _experts(self, routed: tl.Routed) -> torch.Tensor:
        rows = torch.arange(len(routed.tokens))
        assert routed.expert_offsets is not None
        local = torch.bucketize(rows, routed.expert_offsets[1:].cpu(), right=True)
        return routed.tokens * (self.rank.rank * EXPERTS_PER_RANK + local + 1)[:, None]

    def mask(self, gone: int) -> None:
        self.comm.mask_ranks([gone])

    def close(self) -> None:
        self.comm.close()


class Halves(Pairs):
    """The same in halves, two batches in turns."""

    def step(self, number: int) -> None:
        batches, before = [inputs(self.rank, 2 * number + i, FP32) for i in range(2)], self.masked()
        sent = [self.comm.send_dispatch(*given, layout="expert") for given in batches]
        home = []
        for pending in sent:
            routed = pending.receive()
            home.append(self.comm.send_combine(self._experts(routed), routed))
        outs = [pending.receive() for pending in home]
        for given, out in zip(batches, outs, strict=True):
            require(out, given, before, self.masked(), f"step {number}")


class Training(Pairs):
    """Steps of a training layer, whose results have the same bits whenever the same ranks take part."""

    def __init__(self, rank: Rank, on_timeout: str) -> None:
        super().__init__(rank, on_timeout)
        torch.manual_seed(5)
        self.layer = tl.ExpertParallelMoE(
            comm=self.comm,
            intermediate=8,
            hidden=HIDDEN,
            num_experts=EXPERTS_PER_RANK * rank.num_ranks,
            top_k=TOP_K,
            balance_coef=0.01,
        )
        self._before: dict[frozenset[int], list[torch.Tensor]] = {}

    def step(self, number: int) -> None:
        x, before = inputs(self.rank, 0, FP32)[0].requires_grad_(), self.masked()
        out, loss = self.layer(x)
        self.layer.zero_grad()
        (out.sum() + loss).backward()
        if self.masked() != before:
            return  # some calls were with the lost rank
        parts = [x.grad, *(each.grad for each in self.layer.parameters())]
        found = [out.detach(), *(local(part) for part in parts if part is not None)]
        for ours, earlier in zip(found, self._before.setdefault(before, found), strict=True):
            if not torch.equal(ours, earlier) or not ours.isfinite().all():
                raise WrongValue(f"step {number}: not the bits of an earlier one, masked {before}")


def local(values: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be spread over ranks."""
    return values.to_local() if isinstance(values, DTensor) else values


class LowLatency:
    """Low-latency mode of ``deep_ep.Buffer``, with hooks in every other step; ``enable_shrink`` to mask late ranks."""

    def __init__(self, rank: Rank, on_timeout: str) -> None:
        self.rank, self.num_experts = rank, EXPERTS_PER_RANK * rank.num_ranks
        assert dist.group.WORLD is not None
        self._shrinks = on_timeout == "mask"
        self.buffer = deep_ep.Buffer(
            dist.group.WORLD, low_latency_mode=True, enable_shrink=self._shrinks, explicitly_destroy=True
        )
        self.buffer._options.update(timeout_s=PATIENCE_S, open_timeout_s=PATIENCE_S)

    def masked(self) -> frozenset[int]:
        if not self._shrinks:
            return frozenset()
        status = torch.zeros(self.rank.num_ranks, dtype=torch.int32)
        self.buffer.low_latency_query_mask_buffer(status)
        return frozenset(status.nonzero().flatten().tolist())

    def step(self, number: int) -> None:
        given, before, hooks = inputs(self.rank, number, BF16), self.masked(), bool(number % 2)
        x, ids, weights = given
        rows, _, handle, _, hook = self.buffer.low_latency_dispatch(
            x, ids, MOST, self.num_experts, use_fp8=False, return_recv_hook=hooks
        )
        if hook is not None:
            hook()
        assert isinstance(rows, torch.Tensor)
        factors = self.rank.rank * EXPERTS_PER_RANK + torch.arange(EXPERTS_PER_RANK) + 1
        ys = rows * factors[:, None, None].to(BF16)
        out, _, hook = self.buffer.low_latency_combine(ys, ids, weights, handle, return_recv_hook=hooks)
        if hook is not None:
            hook()
        require(out, given, before, self.masked(), f"step {number}")

    def mask(self, gone: int) -> None:
        self.buffer.low_latency_update_mask_buffer(gone, True)

    def close(self) -> None:
        self.buffer.destroy()


class Normal:
    """Normal mode of ``deep_ep.Buffer`` and of ``ElasticBuffer`` in turns, which mask nobody."""

    def __init__(self, rank: Rank, on_timeout: str) -> None:
        self.rank, self.num_experts = rank, EXPERTS_PER_RANK * rank.num_ranks
        group = dist.group.WORLD
        assert group is not None
        self.buffer = deep_ep.Buffer(group, explicitly_destroy=True)
        self.elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST, explicitly_destroy=True)
        for each in (self.buffer, self.elastic):
            each._options.update(timeout_s=PATIENCE_S, open_timeout_s=PATIENCE_S)

    def masked(self) -> frozenset[int]:
        return frozenset()

    def step(self, number: int) -> None:
        x, ids, weights = inputs(self.rank, number, BF16)
        rows: Any
        if number % 2:
            rows, _, _, handle, _ = self.elastic.dispatch(x, ids, weights, num_experts=self.num_experts)
            out: Any = self.elastic.combine(rows * (self.rank.rank + 1), handle=handle)[0]
        else:
            layout = self.buffer.get_dispatch_layout(ids, self.num_experts)
            names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
            sizes: dict[str, Any] = dict(zip(names, layout, strict=False))
            rows, _, _, _, kept, _ = self.buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **sizes)
            out = self.buffer.combine(rows * (self.rank.rank + 1), kept)[0]
        owners = torch.zeros(len(x), self.rank.num_ranks).scatter_(1, ids // EXPERTS_PER_RANK, 1.0)
        want = x * (owners * (torch.arange(self.rank.num_ranks) + 1)).sum(1, keepdim=True).to(BF16)
        if not torch.equal(out, want):
            raise WrongValue(f"step {number}")

    def mask(self, gone: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.elastic.destroy()
        self.buffer.destroy()


WORKLOADS: dict[str, type[Workload]] = {
    "pairs": Pairs,
    "halves": Halves,
    "training": Training,
    "low latency": LowLatency,
    "normal": Normal,
}
