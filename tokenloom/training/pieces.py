"""How a batch is cut into pieces, which calls the pieces make, and what is kept of them for backward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from tokenloom.backends.base import CombineOptions, DispatchOptions, Handle, Upcoming
from tokenloom.comm.engine import Engine
from tokenloom.comm.strategy import SWAPPED, Strategy
from tokenloom.ops.experts import FEW_ROWS, ExpertGemms

SHARES = (3, 2)
"""Relative share of tokens per piece. The last is smaller because nothing overlaps its combine."""


@dataclass(frozen=True)
class RunOptions:
    """Choices of a layer that change its time and its memory.

    Attributes:
        strategy: what carries the payloads.
        overlap: transfers run on a stream of their own, beside GEMMs.
        redispatch_in_backward: keep x instead of the received rows, which are sent again for the gradient of w1.
        pool_rows: None: received rows have their exact size, which the host waits for. Else the most rows, and the
            host does not wait.
    """

    strategy: Strategy
    overlap: bool = True
    redispatch_in_backward: bool = False
    pool_rows: int | None = None

    def combine_options(self, dtype: torch.dtype, needs_grad: bool) -> CombineOptions:
        """How rows of ``dtype`` come home. They are weighted before the second GEMM."""
        return CombineOptions(False, dtype, dtype, needs_grad, self.strategy.combine)

    def gradient_options(self, dtype: torch.dtype) -> CombineOptions:
        """How the gradient of x comes home."""
        return CombineOptions(False, dtype, dtype, False, SWAPPED[self.strategy.dispatch])


@dataclass
class Piece:
    """Some of the tokens on their way through the experts.

    Attributes:
        tokens: which.
        handle: of their dispatch.
        gemms: multiplies their rows by expert.
        offsets: int32 [L + 1].
        row_weights: [R].
        hidden: [R, 2I], pre-activations.
        rows: [R, H] as received, kept for the gradient of w1, or None.
    """

    tokens: slice
    handle: Handle
    gemms: ExpertGemms
    offsets: torch.Tensor
    row_weights: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor | None


def cut(engine: Engine, options: RunOptions, num_tokens: int) -> list[slice]:
    """The tokens of each piece, as many pieces on every rank.

    Few tokens stay whole. So do dense sums, which always travel as M tokens, and batches of bounded size.
    """
    plan = engine.plan
    rows_of_expert = plan.max_tokens_per_rank * plan.top_k // plan.experts_per_rank
    many = rows_of_expert * min(SHARES) // sum(SHARES) >= FEW_ROWS
    dense = "reduce_scatter" in (options.strategy.combine, SWAPPED[options.strategy.dispatch])
    if not many or dense or not engine.capabilities.overlaps_pieces or options.pool_rows is not None:
        return [slice(0, num_tokens)]
    ends = [num_tokens * end // sum(SHARES) for end in accumulate(SHARES, initial=0)]
    return [slice(*span) for span in pairwise(ends)]


def forward_calls(options: RunOptions, num_pieces: int, dtype: torch.dtype, needs_grad: bool) -> list[Upcoming]:
    """The calls of a forward in their order: each dispatch is open before the combine of the piece before it."""
    dispatch = Upcoming(
        "dispatch", resend_options(options.strategy.dispatch), dtype.itemsize, awaited=options.pool_rows is None
    )
    combine = Upcoming("combine", options.combine_options(dtype, needs_grad), dtype.itemsize)
    return [dispatch, *([dispatch, combine] * (num_pieces - 1)), combine]


def backward_calls(
    journeys: deque[tuple[Piece, torch.Tensor, str]], ahead: int, gradients: list[Upcoming], num_pieces: int
) -> list[Upcoming]:
    """The calls of a backward in their order.

    Args:
        journeys: what is sent to the places of rows: of the output's gradient, then of x again.
        ahead: how many of them are sent before the first piece is computed.
        gradients: what comes home of each piece.
    """
    sent = deque(
        Upcoming("rows again", resend_options(strategy), values.element_size()) for _, values, strategy in journeys
    )
    calls = [sent.popleft() for _ in range(min(ahead, len(sent)))]
    for _ in range(num_pieces):
        calls += gradients
        calls += [sent.popleft()] if sent else []
    return [*calls, *sent]


def resend_options(strategy: str) -> DispatchOptions:
    """A dispatch in layout "expert" as far as its buffers depend on it."""
    return DispatchOptions("expert", 1, "bounded", None, strategy=strategy)


def save(
    ctx: Any,
    engine: Engine,
    options: RunOptions,
    pieces: list[Piece],
    x: torch.Tensor | None,
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> None:
    """Keep for backward: w1, w2, and x or the rows. Tensors go where autograd counts and watches them."""
    ctx.engine, ctx.options = engine, options
    ctx.pieces = [(piece.tokens, piece.handle, piece.gemms) for piece in pieces]
    tensors, names = [w1, w2, x], ["w1", "w2", "x"]
    for piece in pieces:
        tensors += [piece.offsets, piece.row_weights, piece.hidden, piece.rows]
        names += ["offsets", "weights of rows", "pre-activations", "rows"]
    ctx.saved_names = names
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> tuple[list[Piece], torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """What :func:`save` kept: pieces, x or None, w1, w2."""
    w1, w2, x, *rest = ctx.saved_tensors
    parts = (rest[i : i + 4] for i in range(0, len(rest), 4))
    return [Piece(*known, *part) for known, part in zip(ctx.pieces, parts, strict=True)], x, w1, w2
