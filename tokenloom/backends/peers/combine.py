"""Combine: one kernel that sends rows home and adds them there, and short relatives of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenloom.backends.handshake import combine_fields, gradient_fields
from tokenloom.backends.peers.buffers import (
    BULK_BYTES,
    address_of,
    aligned,
    num_turns,
    require_aligned,
    require_bulk,
    sends_before_opening,
    weight_gradient_values,
)
from tokenloom.backends.peers.handle import PeerHandle
from tokenloom.backends.peers.opening import (
    HALVES,
    Half,
    Launched,
    Launcher,
    OpeningKernel,
    require_layout,
    require_no_host_read,
)
from tokenloom.backends.peers.prepared import SharedByDirect
from tokenloom.backends.seam import CombineKind, CombineOptions, PreparedCombine, Sent
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.combine.launch import (
    CALL_FIELDS,
    PRE_REDUCE_BLOCKS,
    CombineVariant,
    PreReduceVariant,
    max_chunks,
)
from tokenloom.kernels.common import TURN_WORDS
from tokenloom.plan import Plan
from tokenloom.runtime.openings import CallKind
from tokenloom.runtime.symmetric_memory import SymmetricBuffer


class Combiner:
    """The combines of one communicator.

    Args:
        shared: with the dispatches.
        blocks_alone: SMs of a combine beside which nothing is computed.
    """

    def __init__(self, shared: SharedByDirect, blocks_alone: int) -> None:
        self.plan, self.launcher, self.buffers = shared.plan, shared.launcher, shared.buffers
        self.checked = shared.checked
        self._copies, self.blocks_alone = shared.copies, blocks_alone
        self._prepared: dict[CombineKind, SumsAtHome | ReduceScatter | RoundedTwice] = {}
        self.buffers.when_grown.append(self._forget)

    def prepare(self, kind: CombineKind, number: int) -> PreparedCombine:
        """Prepare combines; see :meth:`tokenloom.backends.seam.Backend.prepare_combine`."""
        self.launcher.require_known(number)  # before memory is made
        found = self._prepared.get(kind)
        if found is None:
            found = self._prepared[kind] = self._make(kind, number)
        return found

    def _make(self, kind: CombineKind, number: int) -> SumsAtHome | ReduceScatter | RoundedTwice:
        if self.checked:
            require_no_host_read(True, "checked=True")
        options = kind.options
        if options.per_node and options.wire_dtype != options.out_dtype:
            # All ranks are on one node, so its sum is rounded to the wire's dtype, and that is rounded once more.
            once = replace(kind, options=replace(options, out_dtype=options.wire_dtype))
            return RoundedTwice(SumsAtHome(self, once, number, options), options.out_dtype)
        if options.strategy == "reduce_scatter":
            if kind.split or options.weights_from_home:
                missing = "halves" if kind.split else "weights from home"
                raise InvalidArgument(f"strategy 'reduce_scatter' has no {missing}; use 'dedup'")
            require_layout(options.strategy, kind.layout)
            _check(self.plan, kind)
            return ReduceScatter(self, kind)
        return SumsAtHome(self, kind, number)

    def _forget(self) -> None:
        """Prepare all anew: a prepared combine knows where buffers were."""
        for each in self._prepared.values():
            each.is_stale = True
        self._prepared.clear()

    def reduce_scatter(
        self,
        handle: PeerHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
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
        fields = combine_fields(handle.number, options)
        buffer, region = self._copies.region(wire.itemsize, fields)
        me = self.launcher.ranks.rank
        set_constant_arguments(self.launcher, pre_reduce)
        set_arguments(
            pre_reduce, handle, rows.data_ptr(), dense, handle.capacity, handle.given_ids, address_of(weights)
        )
        pre_reduce.args.own_sums = buffer.addresses[me] + region + me * dense[0].nbytes
        pre_reduce.launch(PRE_REDUCE_BLOCKS, torch.cuda.current_stream(device).cuda_stream)
        self._copies.bring(buffer, region, lambda rank: dense[rank])
        set_arguments(kernel, handle, dense.data_ptr(), out, handle.capacity, handle.given_ids)
        self._launch(kernel, buffer, region, CallKind(fields))

    def send_weight_gradients(self, handle: PeerHandle, grad: torch.Tensor) -> Launched[torch.Tensor]:
        """A combine of short rows, [T, K]: of a token's K gradients each rank has some, and zeros for the others."""
        handle.require_kept()
        plan, fp32 = self.plan, torch.float32
        short = ShortRows(plan, handle, grad)
        variant = CombineVariant(
            plan=plan, layout=short.layout, y_dtype=fp32, wire_dtype=fp32, out_dtype=fp32, hidden=short.width
        )
        kernel = self.launcher.kernel(variant)
        kernel.args.push_blocks = variant.sending_blocks(kernel.blocks, self.launcher.rates)
        out = short.rows.new_empty(handle.num_tokens, short.width)
        set_arguments(kernel, handle, short.rows.data_ptr(), out, short.capacity, handle.given_ids)
        control = self.launcher.control
        kind = CallKind(gradient_fields(handle.number, "gradient of weights"))
        self._launch(kernel, control, control.layout.offset("combine_recv_weights"), kind)
        return Launched((out[:, : plan.top_k],))

    def _launch(self, kernel: OpeningKernel, buffer: SymmetricBuffer, combine_recv: int, kind: CallKind) -> None:
        set_constant_arguments(self.launcher, kernel)
        kernel.args.peers, kernel.args.combine_recv = buffer.peers.data_ptr(), combine_recv
        self.launcher.launch(kernel, kind, kind.number)


class ShortRows:
    """Gradients of received weights as rows that a combine brings home: of a token's K gradients each rank has some,
    and zeros for the others.

    Args:
        grad: float32 [>= R, K].

    Attributes:
        rows: float32 [R, width]. width: top_k, rounded up to what travels.
        layout, capacity: of a dispatch with such rows.
    """

    def __init__(self, plan: Plan, handle: PeerHandle, grad: torch.Tensor) -> None:
        grad = grad[: len(handle.local_ids)]
        rows = torch.where(handle.local_ids[: len(grad)] >= 0, grad, 0)
        self.width = weight_gradient_values(plan)
        self.rows = torch.nn.functional.pad(rows, (0, self.width - plan.top_k))
        layout = handle.options.layout
        self.layout = "rank" if layout == "rank" else "token"
        self.capacity = handle.capacity if layout == "token" else plan.worst_case_rows("token")


def set_constant_arguments(launcher: Launcher, kernel: OpeningKernel) -> None:
    """Arguments that are the same in all calls."""
    args = kernel.args
    args.max_tokens = launcher.plan.max_tokens_per_rank
    args.chunk_flags = launcher.control.layout.offset("chunk_flags")
    args.max_chunks, args.combine_turns = max_chunks(launcher.plan), 1
    args.send_blocks = kernel.blocks


def set_arguments(
    kernel: OpeningKernel,
    handle: PeerHandle,
    rows_at: int,
    out: torch.Tensor,
    capacity: int,
    ids: torch.Tensor,
    weights: int = 0,
) -> None:
    """Arguments that all kernels of a combine are given.

    Args:
        rows_at: address of the rows. weights: of the weights that multiply them.
    """
    CALL_FIELDS.write(
        kernel.args,
        CALL_FIELDS.offset,
        rows_at,
        *handle.pointers,
        weights,
        ids.data_ptr(),
        out.data_ptr(),
        handle.num_tokens,
        capacity,
        ids.dtype == torch.int64,
    )


class SumsAtHome:
    """Prepared combines whose kernel sends rows home and adds them there; two kernels for halves.

    Args:
        number: of the dispatch that the first of them belongs to.
        user_options: options that the user asked for, where these sums are a part of that call.

    Attributes:
        is_stale: buffers have grown since.
    """

    def __init__(
        self, combiner: Combiner, kind: CombineKind, number: int, user_options: CombineOptions | None = None
    ) -> None:
        launcher, plan, buffers, options = combiner.launcher, combiner.plan, combiner.buffers, kind.options
        if not options.per_route:
            require_layout(options.strategy, kind.layout)
        _check(plan, kind)
        self.is_stale, self._combiner, self._launcher = False, combiner, launcher
        self._blocks = combiner.blocks_alone if kind.alone else None
        self._like = torch.empty(0, dtype=options.out_dtype, device=launcher.ranks.device)
        self._per_route, self._weighted, self._checked = options.per_route, options.weighted, combiner.checked
        fields = combine_fields(number, user_options or options, kind.width)
        self._call_kind = CallKind({**fields, **HALVES} if kind.split else fields)
        variant = CombineVariant(
            plan=plan,
            layout="expert" if kind.layout == "slots" else kind.layout,
            y_dtype=kind.y_dtype,
            wire_dtype=options.wire_dtype,
            out_dtype=options.out_dtype,
            mode="per_route" if options.per_route else "per_rank",
            weights="home" if options.weights_from_home else "received" if options.weighted else "none",
            eager=sends_before_opening(plan) and kind.width is None,
            part="send" if kind.split else "whole",
            hidden=kind.width,
        )
        self._width = plan.hidden if kind.width is None else kind.width
        self._kernel = launcher.new_kernel(variant)
        self._receiving_kernel = launcher.new_kernel(replace(variant, part="receive")) if kind.split else None
        set_constant_arguments(launcher, self._kernel)
        args = self._kernel.args
        args.push_blocks = variant.sending_blocks(self._blocks or self._kernel.blocks, launcher.rates)
        if kind.width is not None:
            args.peers = launcher.control.peers.data_ptr()
            args.combine_recv = launcher.control.layout.offset("combine_recv_weights")
            return
        buffer = buffers.combine_recv(options, kind.split, self._call_kind.fields_of(number))
        if buffers.combines_in_turns(options, kind.split):
            args.combine_recv, args.combine_turns = buffer.layout.offset("combine_recv0"), num_turns(plan)
            args.turn_bytes = buffer.layout.offset("combine_recv1") - args.combine_recv
            args.home_weights = buffer.layout.offset("home_weights0") - args.combine_recv
        else:
            args.combine_recv = buffer.layout.offset("combine_recv")
        args.peers = buffer.peers.data_ptr()

    def send(
        self,
        handle: PeerHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        stream: int | None = None,
    ) -> Sent[torch.Tensor]:
        """Put the kernel on the current stream; see :class:`tokenloom.backends.seam.PreparedCombine`."""
        launcher = self._launcher
        if stream is None and self._checked:
            require_no_host_read(True, "checked=True")
        handle.require_kept()
        if out is None:
            out = self._like.new_empty(handle.num_tokens, self._width)
        else:
            require_aligned(out, "out")
        rows_at, factors = rows.data_ptr(), 0
        if rows_at % BULK_BYTES:
            rows = rows.clone()
            rows_at = rows.data_ptr()
        if self._weighted:
            factors = handle.weights_address if weights is None else weights.data_ptr()
        ids = handle.ids() if self._per_route else handle.given_ids
        set_arguments(self._kernel, handle, rows_at, out, handle.capacity, ids, factors)
        if stream is not None:
            launcher.launch_ready(self._kernel, self._call_kind, handle.number, stream, blocks=self._blocks)
        elif self._receiving_kernel is not None:
            epoch = torch.empty(TURN_WORDS, dtype=torch.int32, device=out.device)
            # The counts and slots of the dispatch are read at home too, when its user may have let go of it.
            half = Half((epoch, handle, ids, out), epoch.data_ptr(), self._receiving_kernel, self._blocks)
            launcher.launch(self._kernel, self._call_kind, handle.number, blocks=self._blocks, begins=half)
            return CombineHalf(launcher, half, out, self._checked)
        else:
            launcher.launch(self._kernel, self._call_kind, handle.number, blocks=self._blocks)
        if self._checked:
            launcher.settle(0)
        return Launched((out,))


class ReduceScatter:
    """Combines whose dense partial sums copy engines take home."""

    is_stale = False

    def __init__(self, combiner: Combiner, kind: CombineKind) -> None:
        self._combiner, self._layout, self._options = combiner, kind.layout, kind.options

    def send(
        self,
        handle: PeerHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        stream: int | None = None,
    ) -> Sent[torch.Tensor]:
        """Make the sums, and launch what adds them; see :class:`tokenloom.backends.seam.PreparedCombine`."""
        combiner, options = self._combiner, self._options
        if combiner.checked:
            require_no_host_read(True, "checked=True")
        require_layout(options.strategy, self._layout)
        if options.weighted and weights is None:
            weights = handle.weights
        handle.require_kept()
        if out is None:
            out = rows.new_empty(handle.num_tokens, combiner.plan.hidden, dtype=options.out_dtype)
        require_aligned(out, "out")
        combiner.reduce_scatter(handle, aligned(rows), weights, options, out)
        if combiner.checked:
            combiner.launcher.settle(0)
        return Launched((out,))


class CombineHalf:
    """A combine whose sending kernel is on the stream."""

    def __init__(self, launcher: Launcher, half: Half, out: torch.Tensor, checked: bool) -> None:
        self._launcher, self._half, self._out, self._checked = launcher, half, out, checked

    def receive(self) -> torch.Tensor:
        self._launcher.finish(self._half)
        if self._checked:
            self._launcher.outcomes.settle_before(self._half.number + 1)
        return self._out


class RoundedTwice:
    """Combines in mode "per_node", whose sum of the one node is rounded to the dtype of the result as well."""

    def __init__(self, sums: SumsAtHome, out_dtype: torch.dtype) -> None:
        self._sums, self._out_dtype = sums, out_dtype

    @property
    def is_stale(self) -> bool:
        return self._sums.is_stale

    @is_stale.setter
    def is_stale(self, stale: bool) -> None:
        self._sums.is_stale = stale

    def send(
        self,
        handle: PeerHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        stream: int | None = None,
    ) -> Sent[torch.Tensor]:
        """Send rows; see :class:`tokenloom.backends.seam.PreparedCombine`."""
        return RoundedResult(self._sums.send(handle, rows, weights, None, stream), self._out_dtype, out)


class RoundedResult:
    """A sum on its way that becomes the result by one more rounding.

    Args:
        pending: gives the sum.
        out: where the result goes, or None.
    """

    def __init__(self, pending: Sent[torch.Tensor], out_dtype: torch.dtype, out: torch.Tensor | None) -> None:
        self._pending, self._out_dtype, self._out = pending, out_dtype, out

    def receive(self) -> torch.Tensor:
        total = self._pending.receive()
        return total.to(self._out_dtype) if self._out is None else self._out.copy_(total)


def _check(plan: Plan, kind: CombineKind) -> None:
    """Raise for a combine that the kernels have no form for."""
    for dtype in (kind.y_dtype, kind.options.wire_dtype, kind.options.out_dtype):
        require_bulk(plan.hidden if kind.width is None else kind.width, dtype)
