"""Dispatch, experts, combine and all their gradients as one autograd node.

The node orders them so that links and GEMMs work at the same time. A large batch goes in pieces: one travels while the
experts compute another. Backward computes the gradients of weights after those of rows, which go home meanwhile.

Transfers run on a stream of the communicator's own. Received rows may be views of a few buffers, so a dispatch waits
until the rows that it overwrites have been used. Without overlap the same pieces run on one stream, with the same
bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenloom.backends.seam import SWAPPED, Handle, Sent, Upcoming
from tokenloom.comm.checks import DispatchArguments
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.placed_slots import PlacedBatch
from tokenloom.comm.pulled_experts import PulledExperts
from tokenloom.ops.autocast import autocast_dtype
from tokenloom.ops.experts import ExpertForm, Experts, Tensors, cast
from tokenloom.plan import PLAIN_WEIGHTS, SWIGLU, Activation, WeightLayout
from tokenloom.runtime.torch_modes import require_eager, require_no_tangent, settled
from tokenloom.training.parameters import EXPERT_WEIGHTS
from tokenloom.training.pieces import Piece, RunOptions, backward_calls, cut, forward_calls, save, saved
from tokenloom.training.shards import require_unchanged, versions
from tokenloom.training.transfers import RunningTransfer, TransferStream

DIFFERENTIABLE = 6
"""Inputs of the node that may want a gradient: x, the routes' weights, w1, w2 and their biases."""


def routed_experts(
    comm: Communicator,
    options: RunOptions,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    meanwhile: Callable[[], None] | None = None,
    *,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: Activation | str = SWIGLU,
    weight_layout: WeightLayout = PLAIN_WEIGHTS,
    sources: Sequence[torch.Tensor | None] = (),
    alike: tuple[tuple[str, str], ...] = (),
) -> torch.Tensor:
    """Compute ``sum over k of weight_k * (w2 @ activation(w1 @ x + w1_bias) + w2_bias)`` with each token's experts.

    Collective. Differentiable once, in x, ``topk_weights``, weights and biases. A rank that passes wrong weights
    raises its own error, and the others ``PeerError``.

    Args:
        comm: communicator that carries the tokens.
        options: choices that change time and memory.
        x: [T, H].
        topk_ids: int32 or int64 [T, K], -1 for an unused place.
        topk_weights: float32 [T, K], or float64 for float64 x.
        w1: [L, 2I, H], this rank's experts, gate rows first; [L, I, H] where the activation is not gated. With a
            placement, those in its slots.
        w2: [L, H, I], likewise.
        meanwhile: work of this rank beside the dispatch, or None.
        w1_bias: [L, 2I] in the order of w1's rows ([L, I] where the activation is not gated), or None.
        w2_bias: [L, H], or None.
        activation: an ``Activation`` or the name of one, such as "swiglu", "geglu", "relu2", "swigluoai".
        weight_layout: ``WeightLayout(transposed=True)`` for w1 [L, H, 2I] and w2 [L, I, H],
            ``WeightLayout(interleaved=True)`` for gates and ups in turns. Gradients lie alike. Nothing is copied.
        sources: DTensors of which weights and biases are the local parts. Backward raises if they change before it.
        alike: what else all ranks must mean alike, by name.

    Returns:
        [T, H], dtype of x, or of autocast where that is on.

    Raises:
        InvalidArgument: the activation is unknown, or has no gates though the layout interleaves them.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a weight or a bias is not as above.
        PlanMismatch: another rank has other weights that require grad, or something else in ``alike``.
        TokenloomError: as in ``Communicator.dispatch``.
    """
    comm.engine.raise_known_errors()
    device, dtype = x.device.type, autocast_dtype(x.device)
    tensors: Tensors = (w1, w2, w1_bias, w2_bias)
    try:
        require_eager()
        form = ExpertForm(Activation.of(activation), weight_layout)
        form.check(tensors, comm.engine.plan.experts_per_rank, comm.plan.hidden)
        require_no_tangent(x=x, topk_weights=topk_weights, w1=w1, w2=w2, w1_bias=w1_bias, w2_bias=w2_bias)
        x = settled(x)
        if dtype is not None:
            x, tensors = x.to(dtype), cast(tensors, dtype)  # may raise OutOfMemoryError
            sources = sources if tensors[0] is w1 else ()  # copies may outlive what they were made of
    except Exception:
        calls = forward_calls(options, 1, dtype or x.dtype, needs_grad=False)
        with comm.engine.sequence(*comm.engine.with_counts(calls)):
            raise
    if dtype is not None and meanwhile is not None:
        meanwhile = torch.autocast(device, dtype)(meanwhile)
    grad_enabled = torch.is_grad_enabled()
    with torch.autocast(device, enabled=False):
        if not grad_enabled:  # inference needs no node
            needs, experts = [False] * DIFFERENTIABLE, Experts(tensors, form)
            return _Forward(comm, options, needs, x, topk_ids, topk_weights, experts, alike).run(meanwhile, False)
        rest = (comm, options, form, meanwhile, grad_enabled, sources, alike)
        return _RoutedExperts.apply(x, topk_weights, *tensors, topk_ids, *rest)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w1_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        topk_ids: torch.Tensor,
        comm: Communicator,
        options: RunOptions,
        form: ExpertForm,
        meanwhile: Callable[[], None] | None,
        grad_enabled: bool,
        sources: Sequence[torch.Tensor | None],
        alike: tuple[tuple[str, str], ...],
    ) -> torch.Tensor:
        needs = [grad_enabled and wanted for wanted in ctx.needs_input_grad[:DIFFERENTIABLE]]
        experts = Experts((w1, w2, w1_bias, w2_bias), form)
        forward = _Forward(comm, options, needs, x, topk_ids, topk_weights, experts, alike)
        out = forward.run(meanwhile, grad_enabled)
        if any(needs):
            ctx.versions = versions(sources)
            x_again = x if options.redispatch_in_backward else None
            save(ctx, comm.engine, options, forward.pieces, x_again, experts)
            ctx.pulled = forward.pulled
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        backward = _Backward(ctx, grad)
        with ctx.engine.sequence(*backward.calls()) as sequence:
            sequence.ends_in_transfers = ctx.pulled is not None and bool(ctx.pulled.pulls)
            grads = backward.run()
        return *grads, *[None] * (len(ctx.needs_input_grad) - DIFFERENTIABLE)


class _Forward:
    """Forward. The host begins each dispatch before it puts the experts of the previous piece on the stream."""

    def __init__(
        self,
        comm: Communicator,
        options: RunOptions,
        needs: list[bool],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Experts,
        alike: tuple[tuple[str, str], ...],
    ) -> None:
        self.engine, self.kinds, self.options, self.needs = comm.engine, comm.kinds, options, needs
        self.x, self.topk_ids, self.topk_weights, self.experts = x, topk_ids, topk_weights, experts
        self.transfers = TransferStream(comm.engine, options.overlap)
        self.slices = cut(comm.engine, options, len(x))
        trained = ", ".join([name for name, wanted in zip(EXPERT_WEIGHTS, needs[2:], strict=True) if wanted])
        self.alike = (*alike, ("trained experts", trained or "none"))
        self.keeps_rows = needs[2] and not options.redispatch_in_backward
        self.pieces: list[Piece] = []
        self.batch: PlacedBatch | None = None
        self.pulled: PulledExperts | None = None

    def run(self, meanwhile: Callable[[], None] | None, grad_enabled: bool) -> torch.Tensor:
        """Return the output, [T, H]."""
        calls = forward_calls(self.options, len(self.slices), self.x.dtype, any(self.needs))
        with self.engine.sequence(*self.engine.with_counts(calls)):
            if meanwhile is not None:  # first: then its few blocks get SMs before those of GEMMs, which wait
                with torch.set_grad_enabled(grad_enabled):
                    meanwhile()
            return self._run()

    def _run(self) -> torch.Tensor:
        out = torch.empty_like(self.x)
        combine = self.options.combine_options(self.x.dtype, any(self.needs))
        # The first two dispatches overwrite no rows. A later one waits for the GEMMs that read what it overwrites.
        computed = [self.transfers.mark()] * 2
        handle, rows, arrival = self._begin_dispatch(0, computed[0])()
        if self.batch is not None and self.batch.split is not None:
            arrival.wait()  # the split was made on the stream of transfers, for whose end no host may have waited
            with self.engine.ranks.telling():  # whoever lists them waits for the others next, in no call
                self.pulled = PulledExperts(self.engine, self.batch)
            self.pulled.pull(self.experts.tensors)
        homecomings: list[RunningTransfer] = []
        for number, tokens in enumerate(self.slices):
            more = number + 1 < len(self.slices)
            finish = self._begin_dispatch(number + 1, computed[number + 1]) if more else None
            arrival.wait()
            y, dispatched = self._compute(tokens, handle, rows), handle
            computed.append(self.transfers.mark())
            if finish is not None:
                handle, rows, arrival = finish()
            with self.transfers.transfer((y, dispatched, out), computed[-1]) as transfer:
                alone = not (more and self.transfers.overlaps)
                self.engine.send_combine(dispatched, y, None, combine, out[tokens], alone).receive()
            homecomings.append(transfer)
        for transfer in homecomings:
            transfer.wait()
        return out

    def _begin_dispatch(
        self, number: int, after: torch.cuda.Event | None
    ) -> Callable[[], tuple[Handle, torch.Tensor, RunningTransfer]]:
        """Send a piece. Call the returned function to finish the dispatch before anything else travels."""
        tokens = self.slices[number]
        inputs = (self.x[tokens], self.topk_ids[tokens], self.topk_weights[tokens])
        with self.transfers.transfer(inputs, after):
            pending = self._send(number, inputs)

        def finish() -> tuple[Handle, torch.Tensor, RunningTransfer]:
            with self.transfers.transfer((), after) as transfer:
                handle, rows = pending.receive()
                transfer.results += [handle, rows]
            return handle, rows, transfer

        return finish

    def _send(
        self, number: int, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> Sent[tuple[Handle, torch.Tensor]]:
        """Open the dispatch of a piece."""
        capacity = self.options.pool_rows
        sizes, strategy = "exact" if capacity is None else "bounded", self.options.strategy.dispatch
        arguments = DispatchArguments("expert", 1, sizes, capacity, strategy=strategy)
        # Views last as long as one piece without a backward.
        owner = "but rows" if any(self.needs) or len(self.slices) > 1 else False
        known, tokens = self.kinds.find_or_check_dispatch(
            arguments, (*self.needs[:2], owner, False, number > 0, None, self.alike), *inputs
        )
        if self.engine.slots is not None:
            if self.batch is None:  # as a whole, however it is cut
                self.batch = self.engine.place_batch(known.kind, self.topk_ids)
            tokens = tokens._replace(topk_ids=self.batch.slot_ids[self.slices[number]])
        return self.engine.send_dispatch(known.prepared, tokens)

    def _compute(self, tokens: slice, handle: Handle, rows: torch.Tensor) -> torch.Tensor:
        """Run the experts on the rows of a piece, giving weighted rows [R, H]."""
        offsets, weights = handle.counts.expert_offsets, handle.topk_weights
        assert offsets is not None
        assert weights is not None
        gemms = self.experts.gemms(rows, offsets, handle.host_offsets)
        row_weights = handle.row_weights(weights, len(rows))
        kept = rows if self.keeps_rows else None
        if kept is not None and self.engine.capabilities.returns_views:  # a later dispatch overwrites the view
            kept = rows.clone()
        hidden, y = self.experts.forward(gemms, rows, row_weights, offsets)
        if any(self.needs):
            self.pieces.append(Piece(tokens, handle, gemms, offsets, row_weights, hidden, kept))
        return y


class _Backward:
    """Backward: gradients of rows first, then gradients of weights while those of rows go home.

    The constructor allocates nothing and reads no saved tensor. These may fail, so they wait for the sequence.
    """

    def __init__(self, ctx: Any, grad: torch.Tensor) -> None:
        self.ctx, self.grad_out = ctx, grad
        self.engine, self.options = ctx.engine, ctx.options
        wanted = ctx.needs_input_grad[:DIFFERENTIABLE]
        self.wants_x, self.wants_weights, self.wants_w1, self.wants_w2, *self.wants_biases = wanted
        self.transfers = TransferStream(ctx.engine, ctx.options.overlap)
        self.sends_x = ctx.options.redispatch_in_backward  # the same on all ranks, even if w1 wants no gradient here
        # Without overlap, sending further ahead only holds memory longer.
        self.ahead = ctx.engine.capabilities.receive_buffers if self.transfers.overlaps else 1
        self.sends: deque[tuple[Piece, torch.Tensor, str]] = deque()
        self.under_way: deque[tuple[torch.Tensor, RunningTransfer]] = deque()
        self.grad_x: torch.Tensor | None = None
        self.grad_weights: list[torch.Tensor] = []
        self.grad_w1: torch.Tensor | None = None
        self.grad_w2: torch.Tensor | None = None
        self.grad_w1_bias: torch.Tensor | None = None
        self.grad_w2_bias: torch.Tensor | None = None

    def calls(self) -> list[Upcoming]:
        """List the calls of this backward, in order."""
        num_pieces, dtype = len(self.ctx.pieces), self.grad_out.dtype
        return backward_calls(self.options, num_pieces, self.ahead, dtype, self.wants_x, self.wants_weights)

    def _load(self) -> None:
        """Take what forward saved, and make room for the gradient of x."""
        require_unchanged(self.ctx.versions)
        self.pieces, x, self.experts = saved(self.ctx)
        grad, strategy = settled(self.grad_out).contiguous(), self.options.strategy
        self.sends.extend((piece, grad, SWAPPED[strategy.combine]) for piece in self.pieces)
        if x is not None:
            self.sends.extend((piece, x, strategy.dispatch) for piece in self.pieces)
        if self.wants_x:
            self.grad_x = torch.empty_like(grad)

    def run(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, of the routes' weights, of w1 and w2, and of their biases."""
        self._load()
        experts = self.experts
        pulled: PulledExperts | None = self.ctx.pulled
        begin = self.transfers.mark()
        for _ in range(self.ahead):
            self._dispatch_next(begin)
        if pulled is not None:  # again: other batches may have filled their slots since
            pulled.pull(experts.tensors)  # behind the first call, by which others hear of what has failed before
        homecomings: list[RunningTransfer] = []
        for_w1: list[tuple[Piece, torch.Tensor]] = []
        for piece in self.pieces:
            grad_out, gemms = self._next_rows(), piece.gemms
            activations, grad_hidden, grad_row_weights = experts.backward(
                gemms, piece.hidden, piece.row_weights, piece.offsets, grad_out
            )
            grad_rows = experts.grad_rows(gemms, grad_hidden) if self.wants_x else None
            homecomings.append(self._bring_home(piece, grad_rows, grad_row_weights))
            if self.wants_w2:
                self.grad_w2 = experts.grad_w2(gemms, grad_out, activations, self.grad_w2)
            self._add_biases(piece, grad_hidden, grad_out)
            del grad_out, activations, grad_rows
            self._dispatch_next(self.transfers.mark())
            if self.sends_x:
                for_w1.append((piece, grad_hidden))
            elif piece.rows is not None and self.wants_w1:
                self.grad_w1 = experts.grad_w1(gemms, grad_hidden, piece.rows, self.grad_w1)
        for piece, grad_hidden in for_w1:
            rows = self._next_rows()
            if self.wants_w1:
                self.grad_w1 = experts.grad_w1(piece.gemms, grad_hidden, rows, self.grad_w1)
            self._dispatch_next(self.transfers.mark())
        for transfer in homecomings:
            transfer.wait()
        grad_weights = torch.cat(self.grad_weights) if self.wants_weights else None
        if pulled is not None:
            pulled.sum_gradients((self.grad_w1, self.grad_w2, self.grad_w1_bias, self.grad_w2_bias))
        return self.grad_x, grad_weights, self.grad_w1, self.grad_w2, self.grad_w1_bias, self.grad_w2_bias

    def _add_biases(self, piece: Piece, grad_hidden: torch.Tensor, grad_out: torch.Tensor) -> None:
        wants_w1_bias, wants_w2_bias = self.wants_biases
        if wants_w1_bias:
            self.grad_w1_bias = self.experts.grad_w1_bias(piece.gemms, grad_hidden, self.grad_w1_bias)
        if wants_w2_bias:
            self.grad_w2_bias = self.experts.grad_w2_bias(piece.gemms, grad_out, piece.row_weights, self.grad_w2_bias)

    def _dispatch_next(self, after: torch.cuda.Event | None) -> None:
        if not self.sends:
            return
        piece, values, strategy = self.sends.popleft()
        with self.transfers.transfer((values, piece.handle), after) as transfer:
            rows = self.engine.resend(piece.handle, values[piece.tokens], "places", strategy).receive()
            transfer.results.append(rows)
        self.under_way.append((rows, transfer))

    def _next_rows(self) -> torch.Tensor:
        rows, transfer = self.under_way.popleft()
        transfer.wait()
        return rows

    def _bring_home(
        self, piece: Piece, grad_rows: torch.Tensor | None, grad_row_weights: torch.Tensor
    ) -> RunningTransfer:
        inputs = (grad_rows, grad_row_weights, piece.handle, self.grad_x)
        with self.transfers.transfer(inputs, self.transfers.mark()) as transfer:
            if grad_rows is not None and self.grad_x is not None:
                options = self.options.gradient_options(grad_rows.dtype)
                home, alone = self.grad_x[piece.tokens], not self.transfers.overlaps
                self.engine.send_combine(piece.handle, grad_rows, None, options, home, alone).receive()
            if self.wants_weights:
                weights = piece.handle.topk_weights
                assert weights is not None
                received = piece.handle.route_gradients(grad_row_weights, weights)
                self.grad_weights.append(self.engine.send_weight_gradients(piece.handle, received).receive())
                transfer.results.append(self.grad_weights[-1])
        return transfer
