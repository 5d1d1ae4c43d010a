"""``deep_ep.ElasticBuffer``: dispatch and combine of version 2, with rows by token or by expert."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tokenloom.comm.communicators_by_shape import CommShape, wide_rows
from tokenloom.comm.routed import Routed
from tokenloom.compat.deep_ep import checks
from tokenloom.compat.deep_ep.buffer_base import BufferBase
from tokenloom.compat.deep_ep.checks import Payload
from tokenloom.compat.deep_ep.config import most_sms
from tokenloom.compat.deep_ep.ep_handle import EPHandle, most_rows
from tokenloom.compat.deep_ep.events import EventHandle, EventOverlap, recorded_in
from tokenloom.compat.deep_ep.faults import BadCall, naming, require
from tokenloom.compat.deep_ep.handles import Dispatched, kept_ids
from tokenloom.errors import ShapeMismatch, a_type
from tokenloom.plan import align_up

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator

COLUMN_ALIGNMENT = 4
"""4-byte scales of a column are padded to 16 bytes, as TMA takes them."""


class ElasticCalls(BufferBase):
    """Calls that move tokens.

    Attributes:
        num_ranks: R.
        num_max_tokens_per_rank: M of calls that pass none; 0 leaves it unknown.
    """

    num_ranks: int
    num_max_tokens_per_rank: int

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        """Return the SMs that a kernel takes. The arguments are unused."""
        return most_sms()

    @naming("ElasticBuffer.dispatch")
    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks that hold its experts. Collective.

        Args:
            x: [N, H] contiguous, rows of a multiple of 16 bytes; or (1-byte [N, H], float32 or int32 scales [N, n]).
            topk_idx: int64 [N, K], contiguous; -1 is no route. None with a handle.
            topk_weights: float32 [N, K], contiguous, or None.
            cumulative_local_expert_recv_stats: int32 [L], to which the counts of routes are added, or None.
            num_experts: E. With a handle it may be left out.
            num_max_tokens_per_rank: M, at least N, the same on all ranks; None takes the buffer's. 0 allows any N if
                the host reads counts.
            expert_alignment: rows of which each expert's group is a multiple, and to which counts are rounded.
            num_sms: kept in the handle, otherwise unused.
            num_qps: unused.
            previous_event: event to start after; None is the current stream's work so far.
            previous_event_before_epilogue: another event to start after.
            async_with_compute_stream: the current stream does not wait; the event says when it is done.
            allocate_on_comm_stream: unused; results are allocated on the stream that the call runs on.
            handle: handle of an earlier dispatch, to use its layout again.
            do_handle_copy: the handle keeps a copy of ``topk_idx``, so that it may change.
            do_cpu_sync: let the host read counts, so that outputs have their exact size. By default True without a
                handle.
            do_expand: one row for each route, grouped by local expert, instead of one for each token.
            do_zero_padding: padding of groups is zero, as it always is; needs ``do_expand``.
            use_tma_aligned_col_major_sf: received scales have stride 1 along rows, and columns of a multiple of 16
                bytes.

        Returns:
            recv_x (with scales as x has them); recv_topk_idx int64 [rows, K], None with ``do_expand``;
            recv_topk_weights float32 [rows, K], or [rows] with ``do_expand``, None without weights; the handle, which
            is the caller's if there was one; event.
        """
        device = checks.device_of(x)
        routing: tuple[Any, ...] = (topk_idx, topk_weights, num_experts, num_max_tokens_per_rank, expert_alignment)
        comm = handle.dispatched.comm if isinstance(handle, EPHandle) else None
        likely = partial(checks.likely_shape, x, num_experts, topk_idx, num_sms=most_sms())
        with self._calls.report_faults_of(device, comm, shape=likely):
            payload = checks.payload_of(x)
            tokens = payload[0] if isinstance(payload, tuple) else payload
            require(do_expand or not do_zero_padding, "do_zero_padding needs do_expand=True")
            if handle is not None:
                self._check_cached(handle, routing, do_cpu_sync, do_expand, tokens)
                local = handle.num_experts // self.num_ranks
                _check_stats(cumulative_local_expert_recv_stats, local, device)
        stats = cumulative_local_expert_recv_stats
        inputs = (x, topk_idx, topk_weights, stats)
        events = (previous_event, previous_event_before_epilogue)
        copy = checks.copies(async_with_compute_stream)
        if handle is not None:
            cached = handle

            def resend() -> tuple[Any, ...]:
                sent = self._by_row(payload, device, cached.dispatched.comm)
                rows, ids, weights = self._dispatch_again(cached, sent, x, topk_weights, copy)
                _add(stats, cached.dispatched.routed)
                return _laid_out(rows, use_tma_aligned_col_major_sf), ids, weights

            (rows, ids, weights), event = self._run(
                resend, inputs, cached.dispatched.comm, events, async_with_compute_stream
            )
            return rows, ids, weights, handle, event
        with self._calls.report_faults_of(device, shape=likely):
            top_k = checks.ids_of(topk_idx, len(tokens), device)
            assert topk_idx is not None
            most = self._most(num_max_tokens_per_rank, len(tokens))
            num_experts = checks.number("num_experts", num_experts, 1)
            alignment = checks.number("expert_alignment", 1 if expert_alignment is None else expert_alignment, 1)
            reads = True if do_cpu_sync is None else do_cpu_sync
            require(most or reads, "do_cpu_sync=False needs num_max_tokens_per_rank")
            require(
                num_experts % self.num_ranks == 0, f"num_experts is {num_experts}, {self.num_ranks} ranks do not fit"
            )
            if topk_weights is not None:
                checks.like("topk_weights", topk_weights, topk_idx.shape, torch.float32, device)
            local = num_experts // self.num_ranks
            _check_stats(stats, local, device)
        options: dict[str, Any] = {"layout": "expert" if do_expand else "token", "copy": copy}
        options |= {"alignment": alignment} if do_expand else {}
        if not reads:
            capacity = most_rows(self.num_ranks, most, top_k, local, do_expand, alignment)
            options |= {"sizes": "bounded", "capacity": capacity}
        own_weights = None if topk_weights is None else topk_weights.detach()
        shape = CommShape(num_experts, tokens.shape[1], top_k, wide_rows(tokens.dtype), most_sms())

        def first() -> tuple[Any, ...]:
            sent = self._by_row(payload, device, None, shape)

            def send(comm: Communicator) -> tuple[Communicator, Routed]:
                return comm, comm.dispatch(sent, topk_idx, own_weights, **options)

            comm, routed = self._calls.run(shape, max(most, len(tokens)), device, send)
            counts = [align_up(count, alignment) for count in routed.counts_on_host()] if reads else []
            _add(stats, routed)
            ids = kept_ids(topk_idx, routed) if do_handle_copy else topk_idx
            return (
                _laid_out(checks.received(routed, x), use_tma_aligned_col_major_sf),
                _ids(routed),
                _weights(comm, routed, topk_weights),
                counts,
                Dispatched(comm, routed, ids),
            )

        results, event = self._run(first, inputs, topk_idx, events, async_with_compute_stream)
        rows, recv_ids, recv_weights, counts, dispatched = results
        used_sms = num_sms or self.get_theoretical_num_sms(num_experts, top_k)
        made = EPHandle(dispatched, dispatched.ids, do_expand, alignment, most or len(tokens), used_sms, counts)
        return rows, recv_ids, recv_weights, made, event

    @naming("ElasticBuffer.combine")
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows home and sum them in float32, unweighted. Collective.

        Args:
            x: [rows, H] contiguous, a row for each row of the dispatch. If the host read no counts, rows behind the
                last received one may be left out.
            handle: handle of the dispatch.
            topk_weights: float32, [rows, K], or [rows] if the dispatch was expanded; brought home as well.
            bias: [N, H] of x's dtype, or two, to add to the sum before it is rounded.
            num_sms: as in :meth:`dispatch`.
            num_qps: as in :meth:`dispatch`.
            previous_event: as in :meth:`dispatch`.
            previous_event_before_epilogue: as in :meth:`dispatch`.
            async_with_compute_stream: as in :meth:`dispatch`.
            allocate_on_comm_stream: as in :meth:`dispatch`.

        Returns:
            combined_x [N, H] of x's dtype, combined_topk_weights float32 [N, K] or None, event.
        """
        rows, biases, missing = x, None, 0
        if not (
            topk_weights is bias is None
            and self._communicators is not None
            and handle.__class__ is EPHandle
            and checks.fits_rows(x, handle.dispatched.routed)
        ):
            device = checks.device_of(x)

            with self._calls.report_faults_of(
                device, None, "combine", shape=partial(checks.likely_shape, x, num_sms=most_sms())
            ):
                _require_handle(handle)
            comm, routed = handle.dispatched.comm, handle.dispatched.routed
            with self._calls.report_faults_of(device, comm, "combine"):
                rows = checks.rows_of(x, routed)
                biases = checks.biases_of(bias, rows, len(handle.dispatched.ids))
                missing = routed.shape[0] - len(rows)
                if topk_weights is not None:
                    wanted = [len(x)] if handle.do_expand else [len(x), comm.plan.top_k]
                    topk_weights = checks.like("topk_weights", topk_weights, wanted, torch.float32, device)
        dispatched, weighted = handle.dispatched, False if handle.do_expand else None
        rest = (self, rows, topk_weights, biases, missing, weighted)
        inputs = (x, topk_weights, bias, dispatched.routed)
        events = (previous_event, previous_event_before_epilogue)
        (out, weights), event = self._run(
            dispatched.combine, inputs, dispatched.comm, events, async_with_compute_stream, *rest
        )
        return out, weights, event

    def _run(
        self,
        call: Any,
        inputs: tuple[Any, ...],
        owner: Any,
        events: tuple[Any, Any],
        async_finish: bool,
        *arguments: Any,
    ) -> tuple[Any, EventOverlap]:
        before, also = events
        recorded = recorded_in(also)
        if recorded is not None:
            self._stream.of(owner.device).wait_event(recorded)
        return self._stream.run(call, inputs, owner, before, async_finish, False, *arguments)

    def _most(self, of_call: int | None, num_tokens: int) -> int:
        """Return M, or 0 if neither the call nor the buffer has one."""
        most = self.num_max_tokens_per_rank
        if of_call is not None:
            most = checks.number("num_max_tokens_per_rank", of_call, 0)
        if most and num_tokens > most:
            raise ShapeMismatch(f"x has {num_tokens} tokens, num_max_tokens_per_rank is {most}; pass more")
        return most

    def _check_cached(
        self, handle: object, routing: tuple[Any, ...], do_cpu_sync: bool | None, do_expand: bool, tokens: torch.Tensor
    ) -> None:
        topk_idx, topk_weights, num_experts, most, alignment = routing
        _require_handle(handle)
        assert isinstance(handle, EPHandle)
        require(not do_cpu_sync, "do_cpu_sync=True with a handle, whose counts are known")
        require(topk_idx is None, "a handle is given: leave topk_idx out")
        require(do_expand == handle.do_expand, f"do_expand is {do_expand}, the handle has {handle.do_expand}")
        for name, value in (
            ("num_experts", num_experts),
            ("num_max_tokens_per_rank", most),
            ("expert_alignment", alignment),
        ):
            has = getattr(handle, name)
            require(value is None or value == has, f"{name} is {value}, the handle has {has}")
        if topk_weights is not None:
            checks.like("topk_weights", topk_weights, handle.dispatched.ids.shape, torch.float32, tokens.device)

    def _dispatch_again(
        self, handle: EPHandle, payload: Payload, x: object, topk_weights: torch.Tensor | None, copy: Any
    ) -> tuple[Any, ...]:
        comm, routed = handle.dispatched.comm, handle.dispatched.routed
        rows = checks.received_again(comm.dispatch_again(payload, routed, copy), x)
        if topk_weights is not None:
            routed = comm.reweighted(routed, topk_weights.detach())
        return rows, _ids(routed), _weights(comm, routed, topk_weights)


def _require_handle(handle: object) -> None:
    if not isinstance(handle, EPHandle):
        raise BadCall(f"handle is {a_type(handle)}, expected the EPHandle of a dispatch")


def _check_stats(stats: torch.Tensor | None, local: int, device: torch.device) -> None:
    if stats is not None:
        checks.like("cumulative_local_expert_recv_stats", stats, [local], torch.int32, device)


def _add(stats: torch.Tensor | None, routed: Routed) -> None:
    if stats is not None:
        stats.add_(routed.expert_counts)


def _ids(routed: Routed) -> torch.Tensor | None:
    return routed.unused_ids_marked() if routed.layout == "token" else None


def _weights(comm: Communicator, routed: Routed, topk_weights: torch.Tensor | None) -> torch.Tensor | None:
    if topk_weights is None:
        return None
    return routed.topk_weights if routed.layout == "token" else comm.row_weights(routed)


def _laid_out(rows: Payload, by_column: bool) -> Payload:
    """Lay out the scales of rows: by row, or by column as TMA takes them."""
    if not by_column or isinstance(rows, torch.Tensor):
        return rows
    tokens, scales = rows
    num_rows, width = scales.shape
    columns = scales.new_empty(width, align_up(num_rows, COLUMN_ALIGNMENT)).t()[:num_rows]
    return tokens, columns.copy_(scales)
