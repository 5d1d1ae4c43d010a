"""Combine: one kernel that sends rows home and adds them there, and short relatives of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenloom.backends.base import CombineOptions, Pending
from tokenloom.backends.handshake import Fields, combine_fields, gradient_fields
from tokenloom.backends.nvlink.buffers import (
    BULK_BYTES,
    Buffers,
    address_of,
    aligned,
    is_eager,
    num_turns,
    require_bulk,
    weight_gradient_values,
)
from tokenloom.backends.nvlink.copies import Copies
from tokenloom.backends.nvlink.dispatch import Dispatcher
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import HALVES, Half, Launched, Launcher, require_layout, require_no_host_read
from tokenloom.errors import InvalidArgument, ShapeMismatch
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.combine.launch import PRE_REDUCE_BLOCKS, CombineVariant, PreReduceVariant, max_chunks
from tokenloom.kernels.row_weights.launch import BLOCKS, RowWeightsVariant
from tokenloom.plan import Plan
from tokenloom.runtime.symmetric_memory import SymmetricBuffer


class Combiner:
    """The combines of one communicator.

    Args:
        dispatcher: whose rows come home.
        blocks_alone: SMs of a combine beside which nothing is computed.
        checked: the host reads the outcome of every call before it returns.
    """

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        buffers: Buffers,
        copies: Copies,
        dispatcher: Dispatcher,
        blocks_alone: int,
        checked: bool,
    ) -> None:
        self.plan, self.launcher, self.buffers, self.checked = plan, launcher, buffers, checked
        self._copies, self._dispatcher, self._blocks_alone = copies, dispatcher, blocks_alone

    def send(
        self,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        out: torch.Tensor | None = None,
        alone: bool = False,
        split: bool = False,
    ) -> Pending[torch.Tensor]:
        """Launch the kernel, which sends and sums, or one that sends; see
        :meth:`tokenloom.backends.base.Backend.send_combine`.
        """
        _check(self.plan, handle, rows, options, self.checked, self._dispatcher.num_dispatches)
        fields = {**combine_fields(handle.number, options), **(HALVES if split else {})}
        rows = aligned(rows)
        if out is None:
            out = torch.empty(handle.num_tokens, self.plan.hidden, dtype=options.out_dtype, device=rows.device)
        if options.strategy == "reduce_scatter":
            if split:
                raise InvalidArgument("strategy 'reduce_scatter' has no halves; use 'dedup'")
            self._reduce_scatter(handle, rows, weights, options, fields, out)
        else:
            blocks = self._blocks_alone if alone else None
            sums = _SumsAtHome(self, handle, rows, weights, options, fields, out, blocks, split)
            sums.send()
            if split:
                return sums
        if self.checked:
            self.launcher.settle(0)
        return Launched(out)

    def _reduce_scatter(
        self,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        fields: Fields,
        out: torch.Tensor,
    ) -> None:
        """Make partial sums for all tokens of all ranks; copy engines take them home; there a kernel adds them."""
        plan, device, wire = self.plan, rows.device, options.wire_dtype
        dense = torch.empty(plan.num_ranks, plan.max_tokens_per_rank, plan.hidden, dtype=wire, device=device)
        pre_reduce = self.launcher.kernel(
            PreReduceVariant(plan=plan, y_dtype=rows.dtype, wire_dtype=wire, weighted=weights is not None)
        )
        kernel = self.launcher.kernel(
            CombineVariant(
                plan=plan, layout="token", y_dtype=wire, wire_dtype=wire, out_dtype=options.out_dtype, dense=True
            )
        )
        buffer, half = self._copies.half(wire.itemsize, fields)
        me = self.launcher.ranks.rank
        self.point(pre_reduce, handle, rows, dense, handle.capacity, handle.given_ids)
        pre_reduce.args.row_weights = address_of(weights)
        pre_reduce.args.own_sums = buffer.addresses[me] + half + me * dense[0].nbytes
        pre_reduce.launch(PRE_REDUCE_BLOCKS, torch.cuda.current_stream(device).cuda_stream)
        self._copies.bring(buffer, half, lambda rank: dense[rank])
        self.point(kernel, handle, dense, out, handle.capacity, handle.given_ids)
        self._launch(kernel, buffer, half, fields)

    def send_weight_gradients(self, handle: NvlinkHandle, grad: torch.Tensor) -> Launched[torch.Tensor]:
        """A combine of short rows, [T, K]: of a token's K gradients each rank has some, and zeros for the others."""
        plan, fp32 = self.plan, torch.float32
        layout = "rank" if handle.options.layout == "rank" else "token"
        grad = grad[: len(handle.local_ids)]
        rows = torch.where(handle.local_ids[: len(grad)] >= 0, grad, 0)
        width = weight_gradient_values(plan)
        rows = torch.nn.functional.pad(rows, (0, width - plan.top_k))
        kernel = self.launcher.kernel(
            CombineVariant(plan=plan, layout=layout, y_dtype=fp32, wire_dtype=fp32, out_dtype=fp32, hidden=width)
        )
        out = rows.new_empty(handle.num_tokens, width)
        capacity = handle.capacity if handle.options.layout == "token" else plan.worst_case_rows("token")
        self.point(kernel, handle, rows, out, capacity, handle.given_ids)
        control = self.launcher.control
        fields = gradient_fields(handle.number, "gradient of weights")
        self._launch(kernel, control, control.layout.offset("combine_recv_weights"), fields)
        return Launched(out[:, : plan.top_k])

    def point(
        self,
        kernel: Kernel,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        out: torch.Tensor,
        capacity: int,
        ids: torch.Tensor,
    ) -> None:
        """Arguments that all kernels of a combine are given."""
        args = kernel.args
        args.y, args.out = rows.data_ptr(), out.data_ptr()
        args.row_places, args.row_tokens = handle.row_places.data_ptr(), handle.row_tokens.data_ptr()
        args.slots, args.all_counts = handle.slots.data_ptr(), handle.all_counts.data_ptr()
        args.topk_ids, args.ids_are_int64 = ids.data_ptr(), ids.dtype == torch.int64
        args.num_tokens, args.max_tokens = handle.num_tokens, self.plan.max_tokens_per_rank
        args.capacity = capacity
        args.chunk_flags = self.launcher.control.layout.offset("chunk_flags")
        args.max_chunks, args.combine_turns = max_chunks(self.plan), 1

    def _launch(
        self, kernel: Kernel, buffer: SymmetricBuffer, combine_recv: int, fields: Fields, blocks: int | None = None
    ) -> None:
        kernel.args.peers, kernel.args.combine_recv = buffer.peers.data_ptr(), combine_recv
        self.launcher.launch(kernel, fields, blocks=blocks)

    # -- weights of rows, on this rank ----------------------------------------------------------------------

    def row_weights(self, handle: NvlinkHandle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        """Received weights [R, K] -> [num_places] of their rows."""
        rows = weights.new_zeros(num_places)
        self._move_weights(handle, weights, rows, num_places, weights.numel(), to_rows=True)
        return rows

    def route_gradients(self, handle: NvlinkHandle, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The gradient of that: [num_places] -> [R, K]."""
        routes = torch.empty_like(like)
        self._move_weights(handle, grad, routes, len(grad), routes.numel(), to_rows=False)
        return routes

    def _move_weights(
        self, handle: NvlinkHandle, source: torch.Tensor, target: torch.Tensor, places: int, routes: int, to_rows: bool
    ) -> None:
        # One of its own for each call: forward and backward may run in several threads.
        device = self.launcher.ranks.device
        kernel = Kernel(RowWeightsVariant(plan=self.plan, to_rows=to_rows).spec(), device.index)
        args = kernel.args
        args.row_places, args.source_counts = handle.row_places.data_ptr(), handle.counts.source_counts.data_ptr()
        args.source, args.target = source.data_ptr(), target.data_ptr()
        args.routes, args.places = routes, min(places, handle.capacity)
        kernel.launch(BLOCKS, torch.cuda.current_stream(device).cuda_stream)


class _SumsAtHome:
    """A combine whose rows come home and are added there: one kernel, or two if the call is split."""

    def __init__(
        self,
        combiner: Combiner,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        fields: Fields,
        out: torch.Tensor,
        blocks: int | None,
        split: bool,
    ) -> None:
        self._combiner, self._handle, self._rows, self._weights = combiner, handle, rows, weights
        self._options, self._fields, self._out, self._blocks = options, fields, out, blocks
        self._half = Half(torch.empty(1, dtype=torch.int32, device=out.device), fields) if split else None
        self._variant = CombineVariant(
            plan=combiner.plan,
            layout="expert" if handle.options.layout == "slots" else handle.options.layout,
            y_dtype=rows.dtype,
            wire_dtype=options.wire_dtype,
            out_dtype=options.out_dtype,
            mode="per_route" if options.per_route else "per_rank",
            weighted=weights is not None,
            eager=is_eager(combiner.plan),
            part="send" if split else "whole",
        )

    def receive(self) -> torch.Tensor:
        launcher = self._combiner.launcher
        assert self._half is not None, "a call of one kernel is over when it was sent"
        launcher.finish(replace(self._variant, part="receive"), self._half, self._blocks)
        if self._combiner.checked:
            launcher.settle_before(self._half.number + 1)
        return self._out

    def send(self) -> None:
        combiner, options, launcher = self._combiner, self._options, self._combiner.launcher
        if self._variant.eager or self._half is not None:
            buffer = combiner.buffers.combine_in_turns(options, self._fields)
            first, turns = buffer.layout.offset("combine_recv0"), num_turns(combiner.plan)
            turn_bytes = buffer.layout.offset("combine_recv1") - first
        else:
            buffer = combiner.buffers.combine_recv(options, self._fields)
            first, turns, turn_bytes = buffer.layout.offset("combine_recv"), 1, 0
        kernel = launcher.kernel(self._variant)
        handle = self._handle
        ids = handle.ids() if options.per_route else handle.given_ids
        combiner.point(kernel, handle, self._rows, self._out, handle.capacity, ids)
        args = kernel.args
        args.row_weights = address_of(self._weights)
        args.peers, args.combine_recv = buffer.peers.data_ptr(), first
        args.combine_turns, args.turn_bytes = turns, turn_bytes
        launcher.launch(kernel, self._fields, blocks=self._blocks, begins=self._half)


def _check(
    plan: Plan,
    handle: NvlinkHandle,
    y: torch.Tensor,
    options: CombineOptions,
    checked: bool,
    num_dispatches: int,
) -> None:
    """Raise for a combine that the kernels have no form for, or whose receive buffer was reused.

    Args:
        checked: the host reads the outcome of every call.
        num_dispatches: of the communicator so far.
    """
    require_no_host_read(checked, "checked=True")
    if not options.per_route:
        require_layout(options.strategy, handle.options.layout)
    require_bulk(y)
    for dtype in (options.wire_dtype, options.out_dtype):
        if plan.hidden * dtype.itemsize % BULK_BYTES:
            raise ShapeMismatch(f"a row of {plan.hidden} {dtype} is no multiple of {BULK_BYTES} bytes")
    if handle.reused_after is not None and num_dispatches > handle.reused_after:
        raise InvalidArgument("the dispatch is two or more dispatches old, its buffer was reused; pass copy=True")
