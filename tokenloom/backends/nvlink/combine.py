"""Combine: one kernel that sends rows home and adds them there, and short relatives of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenloom.backends.base import CombineOptions, Pending
from tokenloom.backends.handshake import combine_fields, gradient_fields
from tokenloom.backends.nvlink.buffers import (
    Buffers,
    address_of,
    aligned,
    is_eager,
    num_turns,
    require_aligned,
    require_bulk,
    weight_gradient_values,
)
from tokenloom.backends.nvlink.copies import Copies
from tokenloom.backends.nvlink.dispatch import Dispatcher
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import (
    HALVES,
    Half,
    Launched,
    Launcher,
    OpeningKernel,
    require_layout,
    require_no_host_read,
)
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.combine.launch import (
    CALL_FIELDS,
    PRE_REDUCE_BLOCKS,
    CombineVariant,
    PreReduceVariant,
    max_chunks,
)
from tokenloom.plan import Plan
from tokenloom.runtime.openings import CallKind
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
        self._prepared: dict[tuple[object, ...], SumsAtHome] = {}
        buffers.when_grown.append(self._forget)

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
        launcher, wanted = self.launcher, out
        rounds_twice = _rounds_twice(options)
        if rounds_twice:
            out = None
        launcher.require_known(handle.number)  # before memory is made
        if self.checked:
            require_no_host_read(True, "checked=True")
        if options.strategy == "reduce_scatter":
            if split or options.weights_from_home:
                missing = "halves" if split else "weights from home"
                raise InvalidArgument(f"strategy 'reduce_scatter' has no {missing}; use 'dedup'")
            require_layout(options.strategy, handle.options.layout)
            _check(self.plan, rows.dtype, options)
            if options.weighted and weights is None:
                weights = handle.weights
            self.require_kept(handle)
            if out is None:
                out = rows.new_empty(handle.num_tokens, self.plan.hidden, dtype=options.out_dtype)
            require_aligned(out, "out")
            self._reduce_scatter(handle, aligned(rows), weights, options, out)
        else:
            prepared = self._prepare(handle.number, handle.options.layout, rows.dtype, options, alone, split)
            out, half = prepared.launch(handle, rows, weights, out)
            if half is not None:
                pending = CombineHalf(launcher, half, out, self.checked)
                return RoundedAgain(pending, options.out_dtype, wanted) if rounds_twice else pending
        if self.checked:
            launcher.settle(0)
        return RoundedAgain(Launched(out), options.out_dtype, wanted) if rounds_twice else Launched(out)

    def usual(self, layout: str, y_dtype: torch.dtype, options: CombineOptions) -> SumsAtHome | None:
        """See :meth:`tokenloom.backends.base.Backend.usual_combine`."""
        if self.checked or options.strategy == "reduce_scatter" or _rounds_twice(options):
            return None
        return self._prepare(self.launcher.num_calls, layout, y_dtype, options, alone=False, split=False)

    def require_kept(self, handle: NvlinkHandle) -> None:
        """Raise if not all ranks know of the dispatch, or the buffer that it wrote to may have been reused."""
        self.launcher.require_known(handle.number)
        if handle.reused_after is not None and self.buffers.num_dispatches > handle.reused_after:
            raise InvalidArgument("the dispatch is two or more dispatches old, its buffer was reused; pass copy=True")

    def _forget(self) -> None:
        """What was prepared knows where buffers were."""
        for each in self._prepared.values():
            each.is_stale = True
        self._prepared.clear()

    def _prepare(
        self,
        number: int,
        layout: str,
        y_dtype: torch.dtype,
        options: CombineOptions,
        alone: bool,
        split: bool,
    ) -> SumsAtHome:
        """What was prepared for such combines, now for one of the ``number``-th dispatch, or for an earlier one."""
        key = (layout, y_dtype, options, alone, split)
        found = self._prepared.get(key)
        if found is None:
            if not options.per_route:
                require_layout(options.strategy, layout)
            _check(self.plan, y_dtype, options)
            blocks = self._blocks_alone if alone and not is_eager(self.plan) else None
            found = SumsAtHome(self, number, layout, y_dtype, options, blocks, split)
            self._prepared[key] = found
        return found

    def _reduce_scatter(
        self,
        handle: NvlinkHandle,
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
        point_once(self.launcher, pre_reduce)
        point(pre_reduce, handle, rows, dense, handle.capacity, handle.given_ids, address_of(weights))
        pre_reduce.args.own_sums = buffer.addresses[me] + region + me * dense[0].nbytes
        pre_reduce.launch(PRE_REDUCE_BLOCKS, torch.cuda.current_stream(device).cuda_stream)
        self._copies.bring(buffer, region, lambda rank: dense[rank])
        point(kernel, handle, dense, out, handle.capacity, handle.given_ids)
        self._launch(kernel, buffer, region, CallKind(fields))

    def send_weight_gradients(self, handle: NvlinkHandle, grad: torch.Tensor) -> Launched[torch.Tensor]:
        """A combine of short rows, [T, K]: of a token's K gradients each rank has some, and zeros for the others."""
        self.require_kept(handle)
        plan, fp32 = self.plan, torch.float32
        short = ShortRows(plan, handle, grad)
        kernel = self.launcher.kernel(
            CombineVariant(
                plan=plan, layout=short.layout, y_dtype=fp32, wire_dtype=fp32, out_dtype=fp32, hidden=short.width
            )
        )
        out = short.rows.new_empty(handle.num_tokens, short.width)
        point(kernel, handle, short.rows, out, short.capacity, handle.given_ids)
        control = self.launcher.control
        kind = CallKind(gradient_fields(handle.number, "gradient of weights"))
        self._launch(kernel, control, control.layout.offset("combine_recv_weights"), kind)
        return Launched(out[:, : plan.top_k])

    def _launch(self, kernel: OpeningKernel, buffer: SymmetricBuffer, combine_recv: int, kind: CallKind) -> None:
        point_once(self.launcher, kernel)
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

    def __init__(self, plan: Plan, handle: NvlinkHandle, grad: torch.Tensor) -> None:
        grad = grad[: len(handle.local_ids)]
        rows = torch.where(handle.local_ids[: len(grad)] >= 0, grad, 0)
        self.width = weight_gradient_values(plan)
        self.rows = torch.nn.functional.pad(rows, (0, self.width - plan.top_k))
        layout = handle.options.layout
        self.layout = "rank" if layout == "rank" else "token"
        self.capacity = handle.capacity if layout == "token" else plan.worst_case_rows("token")


def point_once(launcher: Launcher, kernel: OpeningKernel) -> None:
    """Arguments that are the same in all calls."""
    args = kernel.args
    args.max_tokens = launcher.plan.max_tokens_per_rank
    args.chunk_flags = launcher.control.layout.offset("chunk_flags")
    args.max_chunks, args.combine_turns = max_chunks(launcher.plan), 1
    args.send_blocks = launcher.num_sms


def point(
    kernel: OpeningKernel,
    handle: NvlinkHandle,
    rows: torch.Tensor,
    out: torch.Tensor,
    capacity: int,
    ids: torch.Tensor,
    weights: int = 0,
) -> None:
    """Arguments that all kernels of a combine are given.

    Args:
        weights: address of the weights that multiply rows.
    """
    CALL_FIELDS.write(
        kernel.args,
        CALL_FIELDS.offset,
        rows.data_ptr(),
        *handle.pointers,
        weights,
        ids.data_ptr(),
        out.data_ptr(),
        handle.num_tokens,
        capacity,
        ids.dtype == torch.int64,
    )


class SumsAtHome:
    """Combines of one kind whose rows come home and are added there: one kernel, or two if calls are split. All that
    repeats is written down once.

    Args:
        number: of the dispatch that the first of them belongs to.
        layout: of the dispatch.
        blocks: of a kernel; None: as the launcher has them.

    Attributes:
        is_stale: buffers have grown since.
    """

    def __init__(
        self,
        combiner: Combiner,
        number: int,
        layout: str,
        y_dtype: torch.dtype,
        options: CombineOptions,
        blocks: int | None,
        split: bool,
    ) -> None:
        launcher, plan, buffers = combiner.launcher, combiner.plan, combiner.buffers
        # All ranks are on one node, so its sum is rounded to the wire's dtype, and that is rounded once more.
        self.is_stale, self.out_dtype = False, options.wire_dtype if options.per_node else options.out_dtype
        self._combiner, self._launcher, self._blocks = combiner, launcher, blocks
        self._like = torch.empty(0, dtype=self.out_dtype, device=launcher.ranks.device)
        self._per_route, self._weighted = options.per_route, options.weighted
        fields = combine_fields(number, options)
        self._kind = CallKind({**fields, **HALVES} if split else fields)
        variant = CombineVariant(
            plan=plan,
            layout="expert" if layout == "slots" else layout,
            y_dtype=y_dtype,
            wire_dtype=options.wire_dtype,
            out_dtype=self.out_dtype,
            mode="per_route" if options.per_route else "per_rank",
            weights="home" if options.weights_from_home else "received" if options.weighted else "none",
            eager=is_eager(plan),
            part="send" if split else "whole",
        )
        self._kernel = launcher.new_kernel(variant)
        self._receiving_kernel = launcher.new_kernel(replace(variant, part="receive")) if split else None
        point_once(launcher, self._kernel)
        args, meant = self._kernel.args, self._kind.fields_of(number)
        buffer = buffers.combine_recv(options, split, meant)
        if buffers.combines_in_turns(options, split):
            args.combine_recv, args.combine_turns = buffer.layout.offset("combine_recv0"), num_turns(plan)
            args.turn_bytes = buffer.layout.offset("combine_recv1") - args.combine_recv
            args.home_weights = buffer.layout.offset("home_weights0") - args.combine_recv
        else:
            args.combine_recv = buffer.layout.offset("combine_recv")
        args.peers = buffer.peers.data_ptr()

    def launch(
        self,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        out: torch.Tensor | None,
        stream: int | None = None,
    ) -> tuple[torch.Tensor, Half | None]:
        """Put the kernel on the current stream: (result, what the second half will need).

        Args:
            out: tensor for the result, or None for a new one.
            stream: what :meth:`Launcher.ready` has just given, or None.
        """
        combiner, launcher = self._combiner, self._launcher
        combiner.require_kept(handle)
        if out is None:
            out = self._like.new_empty(handle.num_tokens, combiner.plan.hidden)
        else:
            require_aligned(out, "out")
        rows, factors = aligned(rows), 0
        if self._weighted:
            factors = handle.weights_address if weights is None else weights.data_ptr()
        ids = handle.ids() if self._per_route else handle.given_ids
        point(self._kernel, handle, rows, out, handle.capacity, ids, factors)
        if stream is not None:
            launcher.launch_ready(self._kernel, self._kind, handle.number, stream, blocks=self._blocks)
            return out, None
        half = None
        if self._receiving_kernel is not None:
            epoch = torch.empty(2, dtype=torch.int32, device=out.device)
            # The counts and slots of the dispatch are read at home too, when its user may have let go of it.
            half = Half((epoch, handle, ids, out), epoch.data_ptr(), self._receiving_kernel, self._blocks)
        launcher.launch(self._kernel, self._kind, handle.number, blocks=self._blocks, begins=half)
        return out, half


class CombineHalf:
    """A combine whose sending kernel is on the stream."""

    def __init__(self, launcher: Launcher, half: Half, out: torch.Tensor, checked: bool) -> None:
        self._launcher, self._half, self._out, self._checked = launcher, half, out, checked

    def receive(self) -> torch.Tensor:
        self._launcher.finish(self._half)
        if self._checked:
            self._launcher.outcomes.settle_before(self._half.number + 1)
        return self._out


class RoundedAgain:
    """A combine in mode "per_node", whose sum of the one node is rounded to the dtype of the result.

    Args:
        pending: gives the sum.
        out: where the result goes, or None.
    """

    def __init__(self, pending: Pending[torch.Tensor], out_dtype: torch.dtype, out: torch.Tensor | None) -> None:
        self._pending, self._out_dtype, self._out = pending, out_dtype, out

    def receive(self) -> torch.Tensor:
        total = self._pending.receive()
        return total.to(self._out_dtype) if self._out is None else self._out.copy_(total)


def _rounds_twice(options: CombineOptions) -> bool:
    """Whether a sum over ranks is rounded to another dtype before the result's."""
    return options.per_node and options.wire_dtype != options.out_dtype


def _check(plan: Plan, y_dtype: torch.dtype, options: CombineOptions) -> None:
    """Raise for a combine that the kernels have no form for."""
    for dtype in (y_dtype, options.wire_dtype, options.out_dtype):
        require_bulk(plan.hidden, dtype)
