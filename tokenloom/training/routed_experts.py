"""Dispatch, experts, combine and all their gradients as one node of autograd, which orders them so that the links and
the products work at the same time.

Many tokens go in pieces: one travels while the experts compute another. In backward, the gradients of
weights come after those of rows, which go home meanwhile. What travels is on a stream of the communicator's; a
communicator has two receive regions, so a dispatch waits until the rows of the second last one have been used. Without
overlap the same happens in the same pieces on one stream: the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenloom.backends.base import NUM_REGIONS, CombineCall, Onward
from tokenloom.comm.autograd import COMBINE_RANGE, DISPATCH_RANGE, profiler_range
from tokenloom.comm.communicator import Communicator, Routed
from tokenloom.comm.strategy import SWAPPED, Strategy
from tokenloom.errors import TokenloomError
from tokenloom.ops.activation import activate, activate_backward
from tokenloom.ops.autocast import autocast_dtype
from tokenloom.ops.experts import FEW_ROWS, Products, products_for
from tokenloom.runtime.streams import Event, tensors_in


@dataclass(frozen=True)
class HowToRun:
    """Choices of a layer that change its time and its memory.

    Attributes:
        strategy: what carries the payloads.
        overlap: see this module.
        redispatch_in_backward: keep x instead of the received rows, which are sent again for the gradient of w1.
        pool_rows: None: received rows have their exact size, which the host waits for. Else the most rows, and the
            host does not wait.
    """

    strategy: Strategy
    overlap: bool = True
    redispatch_in_backward: bool = False
    pool_rows: int | None = None

    def combine_call(self, dtype: torch.dtype, grads: bool) -> CombineCall:
        """How rows of ``dtype`` come home."""
        return CombineCall(self.strategy.mode, False, dtype, dtype, grads, self.strategy.combine)

    def onward(self, dtype: torch.dtype) -> Onward:
        return Onward(self.strategy.dispatch, self.combine_call(dtype, grads=False))

    def after_dispatch(self, dtype: torch.dtype) -> Onward | None:
        """What ranks open though the dispatch failed on one of them, where none of them waits for it."""
        return None if self.pool_rows is None else self.onward(dtype)


def routed_experts(
    comm: Communicator,
    how: HowToRun,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    meanwhile: Callable[[], None] | None = None,
) -> torch.Tensor:
    """``out = sum over k of weight_k * w2 @ (silu(gate) * up)`` of a token's experts. Collective, differentiable once.

    Args:
        x: [T, H]. topk_ids: [T, K]. topk_weights: [T, K], float32 (float64 beside float64).
        w1: [L, 2I, H]; w2: [L, H, I] of this rank's experts.
        meanwhile: work of this rank beside the dispatch, or None.

    Returns:
        [T, H], dtype of x (of autocast, where that is on).
    """
    device, dtype = x.device.type, autocast_dtype(x.device)
    if dtype is not None:
        x, w1, w2 = (tensor.to(dtype) for tensor in (x, w1, w2))
        if meanwhile is not None:
            meanwhile = torch.autocast(device, dtype)(meanwhile)
    with torch.autocast(device, enabled=False):
        return _RoutedExperts.apply(x, topk_weights, w1, w2, topk_ids, comm, how, meanwhile, torch.is_grad_enabled())


class _Links:
    """What travels: on the communicator's stream beside the products, or in order with them."""

    def __init__(self, comm: Communicator, overlap: bool) -> None:
        self.comm, self.overlaps = comm, overlap and comm.device.type == "cuda"

    def mark(self) -> torch.cuda.Event | None:
        """What the current stream holds so far."""
        return torch.cuda.current_stream(self.comm.device).record_event() if self.overlaps else None

    @contextmanager
    def transfer(self, inputs: tuple[object, ...], after: torch.cuda.Event | None) -> Iterator[_Transfer]:
        """Run the block behind a mark."""
        transfer = _Transfer()
        if not self.overlaps:
            yield transfer
            return
        with self.comm._side_stream.run(inputs, after):
            yield transfer
            transfer.event = self.comm._side_stream.event(tuple(tensors_in(tuple(transfer.results))))


class _Transfer:
    """A block of work on the links, and the results that somebody on another stream uses."""

    def __init__(self) -> None:
        self.results: list[object] = []
        self.event: Event | None = None

    def wait(self) -> None:
        """Let the current stream wait for the block."""
        if self.event is not None:
            self.event.wait()


@dataclass
class _Piece:
    """Some of the tokens, ``tokens`` of them, on their way through the experts.

    Attributes:
        rows: [R, H] as received, kept for the gradient of w1; or None.
        hidden: [R, 2I], pre-activations; row_weights: [R]; offsets: int32 [L + 1].
    """

    tokens: slice
    handle: Any
    products: Products
    offsets: torch.Tensor
    row_weights: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor | None


SHARES = (3, 2)
"""Of the tokens, of each piece. Nothing hides the combine of the last, which is slower than the first's dispatch."""


def _slices(comm: Communicator, how: HowToRun, num_tokens: int) -> list[slice]:
    """Of the tokens: as many on every rank. Dense sums always travel as M tokens: there it is one piece."""
    plan = comm.plan
    rows_of_expert = plan.max_tokens_per_rank * plan.top_k // plan.experts_per_rank
    many = rows_of_expert * min(SHARES) // sum(SHARES) >= FEW_ROWS
    dense = "reduce_scatter" in (how.strategy.combine, SWAPPED[how.strategy.dispatch])
    if not many or dense or comm.backend != "nvlink" or how.pool_rows is not None:
        return [slice(0, num_tokens)]
    ends = [num_tokens * end // sum(SHARES) for end in accumulate(SHARES, initial=0)]
    return [slice(*span) for span in pairwise(ends)]


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        comm: Communicator,
        how: HowToRun,
        meanwhile: Callable[[], None] | None,
        grad_enabled: bool,
    ) -> torch.Tensor:
        needs = [grad_enabled and wanted for wanted in ctx.needs_input_grad[:4]]
        links = _Links(comm, how.overlap)
        keeps_rows = needs[2] and not how.redispatch_in_backward
        computed = [links.mark()] * 2  # before the first piece, twice; then behind each

        def begin_dispatch(number: int) -> Callable[[], tuple[Routed, _Transfer]]:
            """What it returns is called before anything else travels."""
            given = (x[slices[number]], topk_ids[slices[number]], topk_weights[slices[number]])
            with links.transfer(given, computed[number]):
                options = (how.pool_rows, how.strategy.dispatch, (needs[0], needs[1]))
                begun = comm._begin_dispatch(*given, *options, number > 0, how.after_dispatch(dtype))

            def finish() -> tuple[Routed, _Transfer]:
                try:
                    with links.transfer((), computed[number]) as transfer:
                        routed = begun()
                        transfer.results.append(routed)
                except TokenloomError:  # on all ranks alike
                    raise
                except Exception as fault:  # no memory here for what all have agreed to send
                    if number == 0 and len(slices) > 1:
                        comm._tell_fault("dispatch", fault)
                    else:
                        comm._tell_fault("combine", fault, onward if number else None)
                    raise
                return routed, transfer

            return finish

        def compute(tokens: slice, routed: Routed) -> torch.Tensor:
            rows, offsets = routed.tokens, routed.expert_offsets
            assert offsets is not None
            products = products_for(rows, w1, w2, offsets, routed._handle.host_offsets)
            row_weights = comm.row_weights(routed)
            kept = rows if keeps_rows else None
            if kept is not None and comm.backend == "nvlink":  # a view, which the second next dispatch overwrites
                kept = rows.clone()
            hidden = products.by_weights(rows, w1.transpose(1, 2))
            y = products.by_weights(activate(hidden, row_weights, offsets[-1:]), w2.transpose(1, 2))
            comm._backend.check_combine(routed._handle, y, call)
            if any(needs):
                pieces.append(_Piece(tokens, routed._handle, products, offsets, row_weights, hidden, kept))
            return y

        dtype = x.dtype
        call, onward = how.combine_call(dtype, any(needs)), how.onward(dtype)
        slices = _slices(comm, how, len(x))

        def prepare() -> torch.Tensor:
            if meanwhile is not None:  # before the dispatch, whose few blocks come before those of products that wait
                with torch.set_grad_enabled(grad_enabled):
                    meanwhile()
            return torch.empty_like(x)

        out = comm._report_fault("dispatch", prepare, how.after_dispatch(dtype))
        routed, arrival = begin_dispatch(0)()
        pieces: list[_Piece] = []
        homecomings: list[_Transfer] = []
        for i, tokens in enumerate(slices):
            # The host is ahead of the experts by the next dispatch, so that they need not wait for it.
            more = i + 1 < len(slices)
            finish = begin_dispatch(i + 1) if more else None
            arrival.wait()
            try:
                handle, y = routed._handle, compute(tokens, routed)
            except Exception as fault:
                if finish is not None:  # as the others do, who do not know yet
                    finish()
                comm._tell_fault("combine", fault, onward if more else None)
                raise
            computed.append(links.mark())
            if finish is not None:
                routed, arrival = finish()
            with links.transfer((y, handle, out), computed[-1]) as transfer, profiler_range(COMBINE_RANGE):
                comm._backend.open_combine(handle, call)
                alone = not (more and links.overlaps)
                comm._backend.combine(handle, y, None, call, out[tokens], alone)
            homecomings.append(transfer)
        for transfer in homecomings:
            transfer.wait()
        if any(needs):
            _save(ctx, comm, how, pieces, x if how.redispatch_in_backward else None, w1, w2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        comm, how = ctx.comm, ctx.how
        pieces, x, w1, w2 = _saved(ctx)
        wants_x, wants_weights, wants_w1, wants_w2 = ctx.needs_input_grad[:4]
        backend, links, grad = comm._backend, _Links(comm, how.overlap), grad.contiguous()
        grad_x = torch.empty_like(grad) if wants_x else None
        of_tokens: list[torch.Tensor] = []
        grad_w1: torch.Tensor | None = None
        grad_w2: torch.Tensor | None = None
        swapped = SWAPPED[how.strategy.combine]
        journeys = deque((piece, grad, swapped) for piece in pieces)
        if x is not None:  # on all ranks, whoever wants the gradient of w1
            journeys.extend((piece, x, how.strategy.dispatch) for piece in pieces)
        under_way: deque[tuple[torch.Tensor, _Transfer]] = deque()

        def dispatch_next(after: torch.cuda.Event | None) -> None:
            if not journeys:
                return
            piece, values, strategy = journeys.popleft()
            with links.transfer((values, piece.handle), after) as transfer, profiler_range(DISPATCH_RANGE):
                rows = backend.dispatch_again(piece.handle, values[piece.tokens], strategy)
                transfer.results.append(rows)
            under_way.append((rows, transfer))

        def next_rows() -> torch.Tensor:
            rows, transfer = under_way.popleft()
            transfer.wait()
            return rows

        def bring_home(piece: _Piece, grad_rows: torch.Tensor | None, grad_row_weights: torch.Tensor) -> _Transfer:
            inputs = (grad_rows, grad_row_weights, piece.handle, grad_x)
            with links.transfer(inputs, links.mark()) as transfer, profiler_range(COMBINE_RANGE):
                if grad_rows is not None and grad_x is not None:
                    dtype = grad_rows.dtype
                    call = CombineCall("per_rank", False, dtype, dtype, False, SWAPPED[how.strategy.dispatch])
                    home = grad_x[piece.tokens]
                    backend.combine(piece.handle, grad_rows, None, call, home, alone=not links.overlaps)
                if wants_weights:
                    received = backend.route_gradients(piece.handle, grad_row_weights, piece.handle.topk_weights)
                    of_tokens.append(backend.return_weights(piece.handle, received))
                    transfer.results.append(of_tokens[-1])
            return transfer

        begin = links.mark()
        for _ in range(NUM_REGIONS if links.overlaps else 1):  # else it would only take memory longer
            dispatch_next(begin)
        waited: list[_Transfer] = []
        for_w1: list[tuple[_Piece, torch.Tensor]] = []
        for piece in pieces:
            grad_out, products = next_rows(), piece.products
            activations, grad_hidden, grad_row_weights = activate_backward(
                piece.hidden, piece.row_weights, piece.offsets[-1:], products.by_weights(grad_out, w2)
            )
            grad_rows = products.by_weights(grad_hidden, w1) if wants_x else None
            waited.append(bring_home(piece, grad_rows, grad_row_weights))
            if wants_w2:
                grad_w2 = products.of_weights(grad_out, activations, grad_w2)
            del grad_out, activations, grad_rows
            dispatch_next(links.mark())
            if x is not None:
                for_w1.append((piece, grad_hidden))
            elif piece.rows is not None and wants_w1:
                grad_w1 = products.of_weights(grad_hidden, piece.rows, grad_w1)
        for piece, grad_hidden in for_w1:
            rows = next_rows()
            if wants_w1:
                grad_w1 = piece.products.of_weights(grad_hidden, rows, grad_w1)
            dispatch_next(links.mark())
        for transfer in waited:
            transfer.wait()
        grad_weights = torch.cat(of_tokens) if wants_weights else None
        return grad_x, grad_weights, grad_w1, grad_w2, None, None, None, None, None


def _save(
    ctx: Any,
    comm: Communicator,
    how: HowToRun,
    pieces: list[_Piece],
    x: torch.Tensor | None,
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> None:
    """For backward: w1, w2, and x or the rows. Tensors go where autograd counts and watches them."""
    ctx.comm, ctx.how = comm, how
    ctx.pieces = [(piece.tokens, piece.handle, piece.products) for piece in pieces]
    tensors, names = [w1, w2, x], ["w1", "w2", "x"]
    for piece in pieces:
        tensors += [piece.offsets, piece.row_weights, piece.hidden, piece.rows]
        names += ["offsets", "weights of rows", "pre-activations", "rows"]
    ctx.saved_names = names
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> tuple[list[_Piece], torch.Tensor | None, torch.Tensor, torch.Tensor]:
    w1, w2, x, *rest = ctx.saved_tensors
    parts = (rest[i : i + 4] for i in range(0, len(rest), 4))
    return [_Piece(*known, *part) for known, part in zip(ctx.pieces, parts, strict=True)], x, w1, w2
