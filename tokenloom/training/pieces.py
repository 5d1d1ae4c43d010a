"""Pieces of a batch: how it is cut, which calls they make, and what is kept of them for backward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from tokenloom.backends.seam import SWAPPED, CombineOptions, DispatchOptions, Handle, Strategy, Upcoming
from tokenloom.comm.engine import Engine
from tokenloom.ops.expert_gemms import FEW_ROWS, ExpertGemms
from tokenloom.ops.experts import Experts

SHARES = (3, 2)
"""Relative share of tokens per piece. The last is smaller because nothing overlaps its combine."""


@dataclass(frozen=True)
class RunOptions:
    """Choices of a layer that change its time and its memory, but not its results.

    Attributes:
        strategy: strategies of dispatch and combine.
        overlap: run transfers on a stream of their own, beside GEMMs.
        redispatch_in_backward: keep x instead of the received rows, and send it again for the gradient of w1.
        pool_rows: most rows that a rank receives, so that the host does not wait. None gives exact sizes, which the
            host waits for.
    """

    strategy: Strategy
    overlap: bool = True
    redispatch_in_backward: bool = False
    pool_rows: int | None = None

    def combine_options(self, dtype: torch.dtype, needs_grad: bool) -> CombineOptions:
        """Describe the combine of rows of ``dtype``, which are weighted before the second GEMM."""
        return CombineOptions(False, dtype, dtype, needs_grad, self.strategy.combine)

    def gradient_options(self, dtype: torch.dtype) -> CombineOptions:
        """Describe the combine of the gradient of x."""
        return CombineOptions(False, dtype, dtype, False, self.strategy.gradient_of_dispatch)


@dataclass
class Piece:
    """Part of a batch on its way through the experts.

    Attributes:
        tokens: range of the tokens.
        handle: handle of their dispatch.
        gemms: GEMMs over their rows.
        offsets: int32 [L + 1], first row of each expert and the end.
        row_weights: [R], weight of each row.
        hidden: [R, 2I], or [R, I] without gates: pre-activations without their bias.
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
    """Cut the tokens into pieces, the same number on every rank.

    A small batch stays whole. So does one with dense sums, which always travel as M tokens, and one of bounded size.
    """
    plan = engine.plan
    rows_of_expert = plan.max_tokens_per_rank * plan.top_k // plan.experts_per_rank
    many = rows_of_expert * min(SHARES) // sum(SHARES) >= FEW_ROWS
    dense = "reduce_scatter" in (options.strategy.combine, options.strategy.gradient_of_dispatch)
    if not many or dense or not engine.capabilities.overlaps_pieces or options.pool_rows is not None:
        return [slice(0, num_tokens)]
    ends = [num_tokens * end // sum(SHARES) for end in accumulate(SHARES, initial=0)]
    return [slice(*span) for span in pairwise(ends)]


def forward_calls(options: RunOptions, num_pieces: int, dtype: torch.dtype, needs_grad: bool) -> list[Upcoming]:
    """List the calls of a forward in order. Each dispatch opens before the combine of the previous piece."""
    sent = replace(expert_dispatch_options(options.strategy.dispatch), capacity=options.pool_rows)
    dispatch = Upcoming("dispatch", sent, dtype.itemsize, awaited=options.pool_rows is None)
    combine = Upcoming("combine", options.combine_options(dtype, needs_grad), dtype.itemsize)
    return [dispatch, *([dispatch, combine] * (num_pieces - 1)), combine]


def backward_calls(
    options: RunOptions, num_pieces: int, ahead: int, dtype: torch.dtype, wants_x: bool, wants_weights: bool
) -> list[Upcoming]:
    """List the calls of a backward in order.

    Args:
        options: choices of the layer.
        num_pieces: number of pieces.
        ahead: number of journeys to the experts that begin before the first piece is computed.
        dtype: dtype of the tokens and their gradients.
        wants_x: whether the gradient of x goes home.
        wants_weights: whether the gradient of the routes' weights goes home.
    """
    strategies = [SWAPPED[options.strategy.combine]] * num_pieces
    if options.redispatch_in_backward:
        strategies += [options.strategy.dispatch] * num_pieces
    sent = deque(Upcoming("rows again", expert_dispatch_options(each), dtype.itemsize) for each in strategies)
    gradients = [Upcoming("gradient of dispatch", options.gradient_options(dtype), dtype.itemsize)] * wants_x
    gradients += [Upcoming("gradient of weights")] * wants_weights
    calls = [sent.popleft() for _ in range(min(ahead, len(sent)))]
    for _ in range(num_pieces):
        calls += gradients
        calls += [sent.popleft()] if sent else []
    return [*calls, *sent]


def expert_dispatch_options(strategy: str) -> DispatchOptions:
    """Describe a dispatch in layout "expert" as far as its buffers depend on it."""
    return DispatchOptions("expert", 1, "bounded", None, strategy=strategy)


def save(
    ctx: Any, engine: Engine, options: RunOptions, pieces: list[Piece], x: torch.Tensor | None, experts: Experts
) -> None:
    """Keep what backward needs: pieces, experts and maybe x. Tensors go through autograd, which watches them."""
    ctx.engine, ctx.options, ctx.form = engine, options, experts.form
    ctx.pieces = [(piece.tokens, piece.handle, piece.gemms) for piece in pieces]
    tensors, names = [*experts.tensors, x], ["w1", "w2", "w1 bias", "w2 bias", "x"]
    for piece in pieces:
        tensors += [piece.offsets, piece.row_weights, piece.hidden, piece.rows]
        names += ["offsets", "row weights", "pre-activations", "rows"]
    ctx.saved_names, ctx.attribute_names = names, {"pieces": "routing"}
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> tuple[list[Piece], torch.Tensor | None, Experts]:
    """Return what :func:`save` kept: pieces, x or None, experts."""
    w1, w2, w1_bias, w2_bias, x, *rest = ctx.saved_tensors
    parts = (rest[i : i + 4] for i in range(0, len(rest), 4))
    pieces = [Piece(*attributes, *part) for attributes, part in zip(ctx.pieces, parts, strict=True)]
    return pieces, x, Experts((w1, w2, w1_bias, w2_bias), ctx.form)
