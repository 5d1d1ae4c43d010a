"""Dispatch, experts, combine and all their gradients as one node of autograd, which orders them so that the links and
the products work at the same time.

Forward: the experts' second product and the combine take columns of the output in turns: while some come home, the
next are computed. Backward: rows' gradients come home while the gradients of the weights are computed. What travels is
on a stream of the communicator's. Results are the same bits without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenloom.activation import activate, activate_backward
from tokenloom.autograd import COMBINE_RANGE, DISPATCH_RANGE, profiler_range
from tokenloom.backends.base import CombineCall
from tokenloom.communicator import Communicator, Routed
from tokenloom.experts import Products, products_for
from tokenloom.strategy import SWAPPED, Strategy
from tokenloom.streams import Event, tensors_in

SLABS = 4
"""Turns of the columns of an output."""
SLAB_UNIT = 64
"""Columns of a turn are multiples of this."""
SLAB_BYTES = 64 << 20
"""Of received rows at an even routing, for each turn; with less, opening the calls costs more than is hidden."""


@dataclass(frozen=True)
class HowToRun:
    """Choices of a layer that change its time and its memory, not its results.

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


class _Beside:
    """The communicator's stream, for what travels beside products; without ``overlaps`` everything stays in order."""

    def __init__(self, comm: Communicator, overlaps: bool) -> None:
        self.comm, self.overlaps = comm, overlaps
        self._pending: list[Event] = []

    @contextmanager
    def transfer(self, inputs: tuple[object, ...], after: torch.cuda.Event | None = None) -> Iterator[list[object]]:
        """Run the block there, behind what is on the current stream, or behind ``after``.

        Yields a list: what is put in it is used on the current stream once :meth:`wait` was called.
        """
        results: list[object] = []
        if not self.overlaps:
            yield results
            return
        with self.comm._side_stream.run(inputs, after):
            yield results
            self._pending.append(self.comm._side_stream.event(tuple(tensors_in(tuple(results)))))

    def wait(self) -> None:
        """Let the current stream wait for all blocks."""
        for event in self._pending:
            event.wait()
        self._pending.clear()


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
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, w1, w2 = (tensor.to(dtype) for tensor in (x, w1, w2))
        if meanwhile is not None:
            meanwhile = torch.autocast(device, dtype)(meanwhile)
    with torch.autocast(device, enabled=False):
        return _RoutedExperts.apply(x, topk_weights, w1, w2, topk_ids, comm, how, meanwhile, torch.is_grad_enabled())


class _RoutedExperts(torch.autograd.Function):
    saved_names = ("rows", "offsets", "w1", "w2", "weights of rows", "pre-activations")

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
        beside = _Beside(comm, how.overlap and comm.device.type == "cuda")
        strategy, capacity = how.strategy.dispatch, how.pool_rows
        if meanwhile is None:
            routed = comm._dispatch_rows(x, topk_ids, topk_weights, capacity, strategy, (needs[0], needs[1]))
        else:
            # Launched first, for a dispatch of exact size keeps the host; its few blocks come before waiting ones.
            after = torch.cuda.current_stream(comm.device).record_event() if beside.overlaps else None
            with torch.set_grad_enabled(grad_enabled):
                comm._report_fault("dispatch", meanwhile)
            with beside.transfer((x, topk_ids, topk_weights), after) as results:
                routed = comm._dispatch_rows(x, topk_ids, topk_weights, capacity, strategy, (needs[0], needs[1]))
                results.append(routed)
            beside.wait()
        rows, offsets = routed.tokens, routed.expert_offsets
        assert offsets is not None

        def compute() -> tuple[Products, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            products = products_for(rows, w1, w2, offsets, routed._handle.host_offsets)
            row_weights = comm.row_weights(routed)
            kept = x if how.redispatch_in_backward else rows
            if any(needs) and comm.backend == "nvlink" and kept is rows:
                with beside.transfer((rows,)) as results:  # which the second next dispatch overwrites
                    kept = rows.clone()
                    results.append(kept)
            hidden = products.by_weights(rows, w1.transpose(1, 2))
            return products, hidden, activate(hidden, row_weights, offsets[-1:]), row_weights, kept

        products, hidden, activations, row_weights, kept = comm._report_fault("combine", compute)
        out = _second_product_and_combine(beside, how, routed, products, activations, w2, any(needs))
        if any(needs):
            ctx.comm, ctx.how, ctx.handle, ctx.products, ctx.overlaps = (
                comm,
                how,
                routed._handle,
                products,
                beside.overlaps,
            )
            ctx.save_for_backward(kept, offsets, w1, w2, row_weights, hidden)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        comm, how, handle = ctx.comm, ctx.how, ctx.handle
        rows, offsets, w1, w2, row_weights, hidden = ctx.saved_tensors
        wants_x, wants_weights, wants_w1, wants_w2 = ctx.needs_input_grad[:4]
        backend, products, beside, again = comm._backend, ctx.products, _Beside(comm, ctx.overlaps), None
        grad_x = grad_weights = grad_w1 = grad_w2 = None
        with profiler_range(DISPATCH_RANGE):
            grad_out = backend.dispatch_again(handle, grad.contiguous(), SWAPPED[how.strategy.combine])
        if how.redispatch_in_backward and wants_w1:
            again = _Beside(comm, ctx.overlaps)
            with again.transfer((rows, handle)), profiler_range(DISPATCH_RANGE):
                rows = backend.dispatch_again(handle, rows, how.strategy.dispatch)
        grad_activations = products.by_weights(grad_out, w2)
        activations, grad_hidden, grad_row_weights = activate_backward(
            hidden, row_weights, offsets[-1:], grad_activations
        )
        del grad_activations
        grad_rows = products.by_weights(grad_hidden, w1) if wants_x else None
        with beside.transfer((grad_rows, grad_row_weights, handle)) as results, profiler_range(COMBINE_RANGE):
            if grad_rows is not None:
                call = CombineCall("per_rank", False, rows.dtype, rows.dtype, False, SWAPPED[how.strategy.dispatch])
                grad_x = backend.combine(handle, grad_rows, None, call)
            if wants_weights:
                of_routes = backend.route_gradients(handle, grad_row_weights, handle.topk_weights)
                grad_weights = backend.return_weights(handle, of_routes)
            results += [grad_x, grad_weights]
        if wants_w2:
            grad_w2 = products.of_weights(grad_out, activations)
        if again is not None:
            again.wait()
        if wants_w1:
            grad_w1 = products.of_weights(grad_hidden, rows)
        beside.wait()
        return grad_x, grad_weights, grad_w1, grad_w2, None, None, None, None, None


def _second_product_and_combine(
    beside: _Beside,
    how: HowToRun,
    routed: Routed,
    products: Products,
    activations: torch.Tensor,
    w2: torch.Tensor,
    needs_grad: bool,
) -> torch.Tensor:
    """[rows, I] -> [T, H] at home, by columns in turns."""
    comm, handle, hidden, dtype = beside.comm, routed._handle, w2.shape[1], activations.dtype
    slabs = _slabs(comm, dtype) if beside.overlaps else 1
    call = CombineCall(how.strategy.mode, False, dtype, dtype, needs_grad, how.strategy.combine)

    def product(columns: slice) -> torch.Tensor:
        y = products.by_weights(activations, w2[:, columns].transpose(1, 2))
        comm._backend.check_combine(handle, y, call)
        return y

    def combine(y: torch.Tensor) -> torch.Tensor:
        with profiler_range(COMBINE_RANGE):
            comm._backend.open_combine(handle, call)
            return comm._backend.combine(handle, y, None, call)

    out = activations.new_empty(handle.num_tokens, hidden)
    for slab in range(slabs):
        columns = slice(slab * hidden // slabs, (slab + 1) * hidden // slabs)
        y = comm._report_fault("combine", partial(product, columns))
        if slab == slabs - 1:
            beside.wait()
            home = combine(y)
            return home if slabs == 1 else _put(home, out, columns)
        with beside.transfer((y, handle, out)):
            _put(combine(y), out, columns)
    raise AssertionError("there is a last slab")


def _put(home: torch.Tensor, out: torch.Tensor, columns: slice) -> torch.Tensor:
    out[:, columns].copy_(home)
    return out


def _slabs(comm: Communicator, dtype: torch.dtype) -> int:
    """The same on all ranks."""
    plan = comm.plan
    if comm.backend != "nvlink":
        return 1
    wanted = min(SLABS, plan.max_tokens_per_rank * plan.top_k * plan.hidden * dtype.itemsize // SLAB_BYTES)
    return next((slabs for slabs in range(wanted, 1, -1) if plan.hidden % (slabs * SLAB_UNIT) == 0), 1)
