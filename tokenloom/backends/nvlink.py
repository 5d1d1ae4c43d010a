"""Backend "nvlink": our own kernels over the peers' memory, for one NVLink domain of Hopper GPUs.

A dispatch is one kernel, a combine is one kernel; neither asks the host anything. Both open by telling all ranks what
they were asked for (device/sync/call.cuh), so that a fault on one rank is known to all of them. The host reads that
at once for exact sizes, or with ``checked``; else a few calls later, the same number on every rank, or in ``check``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenloom import routing
from tokenloom.backends.base import CombineCall, DispatchCall, DispatchInput, RoutedCounts
from tokenloom.backends.exchange import Field, combine_fields, decode_field, dispatch_fields, encode_fields
from tokenloom.backends.regions import control_regions, data_regions, region_rows
from tokenloom.errors import CapacityOverflow, DtypeMismatch, InvalidArgument, PeerError, PlanMismatch, ShapeMismatch
from tokenloom.group import RankGroup
from tokenloom.jit.kernel import Kernel, load_kernel
from tokenloom.kernels.combine.launch import combine_spec
from tokenloom.kernels.dispatch.launch import dispatch_spec
from tokenloom.kernels.shape import DTYPES, NUM_FIELDS
from tokenloom.plan import Plan
from tokenloom.symmetric import CallRecords, FaultFlag, SymmetricBuffer

DEFAULT_SMS = 16
CALLS_IN_FLIGHT = 3
"""Calls whose outcome the host has not read. More lets it run further ahead; errors then come later."""
BULK_BYTES = 16
"""Rows, and their addresses, are multiples of this."""


@dataclass(frozen=True)
class NvlinkHandle:
    """A dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes:
        call, number, num_tokens, counts, topk_ids, topk_weights, scales: as in every backend.
        rows: [places, H], the output.
        capacity: places that a row may have; routes beyond it were dropped.
        given_ids: topk_ids as given, which routes gradients the same way.
        slots: int32 [T * W (+ T * K)]: which of the rows to rank r each token is, or -1.
        all_counts: int32 [W, W + E]: rows per rank and routes per expert of every source.
        local_ids, row_places: int32 [>= R, K]: local expert, and place, of each route of a received row.
        reused_after: calls of this backend's dispatch after which the region is overwritten; None for own tensors.
    """

    call: DispatchCall
    number: int
    num_tokens: int
    counts: RoutedCounts
    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    capacity: int
    given_ids: torch.Tensor
    slots: torch.Tensor
    all_counts: torch.Tensor
    local_ids: torch.Tensor
    row_places: torch.Tensor
    reused_after: int | None


@dataclass(frozen=True)
class _Launched:
    """A call whose outcome the host has not read: its end, its slot, and what error messages want to say."""

    done: torch.cuda.Event
    slot: int
    fields: dict[str, Field]
    capacity: int


class NvlinkBackend:
    """Dispatch and combine by kernels that write the peers' memory.

    Args:
        plan, ranks: sizes and group.
        num_sms: SMs, one block each, that a kernel takes.
        checked: read the outcome of every call before it returns.
    """

    name = "nvlink"

    def __init__(self, plan: Plan, ranks: RankGroup, num_sms: int = DEFAULT_SMS, checked: bool = False) -> None:
        self.plan = plan
        self.ranks = ranks
        self.num_sms = num_sms
        self.push_sms = max(1, num_sms // 2)
        self.checked = checked
        self._control = SymmetricBuffer(control_regions(plan), ranks)
        self._data: dict[int, SymmetricBuffer] = {}
        self._kernels: dict[Any, Kernel] = {}
        self._state = torch.zeros(2, dtype=torch.int32, device=ranks.device)  # epoch, blocks that are out
        self._fault = FaultFlag(ranks.device, ranks.rank)
        self._captured_slot = CALLS_IN_FLIGHT + 1
        self._records = CallRecords(CALLS_IN_FLIGHT + 2)
        self._launched: deque[_Launched] = deque()
        self._overflow: CapacityOverflow | None = None
        self._num_calls = 0
        self._num_dispatches = 0

    # -- opening and settling calls -------------------------------------------------------------------------

    def check_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> None:
        """What these kernels cannot do, beyond what checks.py refuses."""
        x = tensors.x
        if x.element_size() > 1 and x.dtype not in DTYPES:
            raise DtypeMismatch(
                f"x is {x.dtype}, backend nvlink moves bfloat16, float16, float32 and FP8; use backend='collective'"
            )
        _require_bulk(x)
        room = region_rows(self.plan)
        worst = self.plan.worst_case_rows(call.layout, call.alignment)
        if call.sizes == "bounded" and min(call.capacity or 0, worst) > room:
            raise InvalidArgument(
                f"capacity is {call.capacity}, the receive region has room for {room} rows; pass at most that, or a "
                "larger max_tokens_per_rank to Communicator"
            )

    def check_combine(self, handle: NvlinkHandle, y: torch.Tensor, call: CombineCall) -> None:
        """What these kernels cannot do, beyond what checks.py refuses."""
        if y.dtype not in DTYPES:
            raise DtypeMismatch(
                f"y is {y.dtype}, backend nvlink sums bfloat16, float16 and float32; use backend='collective'"
            )
        _require_bulk(y)
        for dtype in (call.wire_dtype, call.out_dtype):
            if self.plan.hidden * dtype.itemsize % BULK_BYTES:
                raise ShapeMismatch(f"a row of {self.plan.hidden} {dtype} is no multiple of {BULK_BYTES} bytes")
        if handle.reused_after is not None and self._num_dispatches > handle.reused_after:
            raise InvalidArgument("the dispatch is two or more dispatches old, its region was reused; pass copy=True")

    def report_fault(self, call: str, fault: Exception) -> None:
        """Open the call with a status, which all ranks see; its text goes through the group's store."""
        self.ranks.post_note(f"fault/{self._num_calls}", f"{type(fault).__name__}: {fault}")
        kernel = self._kernel(dispatch_spec, "token", BULK_BYTES, 0)  # sends no row, whatever its width
        self._launch(kernel, {"call": call}, capacity=0, status=1, num_tokens=0)
        self._settle(0, own_fault=True)

    def _launch(
        self, kernel: Kernel, fields: dict[str, Field], capacity: int, status: int = 0, num_tokens: int | None = None
    ) -> None:
        """Fill in what every call has, put the kernel on the current stream, remember its outcome's place."""
        stream = torch.cuda.current_stream(self.ranks.device)
        captured = torch.cuda.is_current_stream_capturing()
        slot = self._captured_slot if captured else self._num_calls % (CALLS_IN_FLIGHT + 1)
        opening = kernel.args.call
        opening.peers = self._control.peers.data_ptr()
        opening.flags = self._control.regions.offset("flags")
        opening.rows = self._control.regions.offset("rows")
        opening.epoch = self._state.data_ptr()
        opening.blocks_out = self._state.data_ptr() + 4
        opening.record = self._records.address(slot)
        opening.fault = self._fault.record_address
        opening.fault_claimed = self._fault.claimed.data_ptr()
        opening.timeout_ns = int(self.ranks.timeout_s * 1e9)
        opening.rank, opening.status = self.ranks.rank, status
        opening.fields[:] = encode_fields(fields, NUM_FIELDS)
        if num_tokens is not None:
            kernel.args.num_tokens = num_tokens
        kernel.launch(self.num_sms, stream.cuda_stream)
        if not captured:
            self._num_calls += 1
            done = torch.cuda.Event()
            done.record(stream)
            self._launched.append(_Launched(done, slot, fields, capacity))

    def _settle(self, in_flight: int, own_fault: bool = False) -> None:
        """Wait until at most ``in_flight`` calls are, and raise what the finished ones found, on all ranks alike."""
        self._raise_timeout()
        while len(self._launched) > in_flight:
            call = self._launched.popleft()
            call.done.synchronize()
            self._raise_timeout()
            if not own_fault:
                self._raise_outcome(call.slot, call.fields, call.capacity, self._num_calls - len(self._launched) - 1)
            else:
                self._records.take(call.slot)

    def _raise_timeout(self) -> None:
        timeout = self._fault.error()
        if timeout is not None:
            self.ranks.mark_broken(timeout)
            raise timeout

    def _raise_outcome(self, slot: int, fields: dict[str, Field], capacity: int, number: int) -> None:
        outcome = self._records.take(slot)
        if outcome is None:
            return
        if outcome.faulty_rank is not None:
            note = self.ranks.read_note(f"fault/{number}", outcome.faulty_rank)
            raise PeerError(outcome.faulty_rank, note or "see its own error")
        if outcome.differing_rank is not None:
            name = list(fields)[outcome.field] if outcome.field < len(fields) else "the options of the call"
            raise PlanMismatch(
                outcome.differing_rank, name, decode_field(outcome.theirs), decode_field(outcome.rank0s)
            )
        raise CapacityOverflow(outcome.needed_rows, capacity, sent=fields.get("sizes") != "exact")

    def check(self, wait: bool) -> None:
        """Raise what earlier calls left behind; with ``wait`` of all calls and graph replays, finished first."""
        if torch.cuda.is_current_stream_capturing():
            return
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            raise overflow
        self._settle(0 if wait else CALLS_IN_FLIGHT)
        if wait:
            torch.cuda.synchronize(self.ranks.device)
            self._raise_timeout()
            self._raise_outcome(self._captured_slot, {"call": "a captured call"}, 0, -1)

    def _kernel(self, make: Any, *variant: Any) -> Kernel:
        key = (make, *variant)
        if key not in self._kernels:
            spec, shared_bytes = make(self.plan, *variant)
            self._kernels[key] = load_kernel(spec, shared_bytes, self.ranks.device.index)
        return self._kernels[key]

    def _buffer(self, value_bytes: int) -> SymmetricBuffer:
        """The data buffer for payloads of this width, made at the first call that needs it, on all ranks alike."""
        value_bytes = max(value_bytes, 2)
        if value_bytes not in self._data:
            if torch.cuda.is_current_stream_capturing():
                raise InvalidArgument("the first call of a dtype allocates buffers; make it once before the capture")
            self._data[value_bytes] = SymmetricBuffer(data_regions(self.plan, value_bytes), self.ranks)
        return self._data[value_bytes]

    # -- dispatch -------------------------------------------------------------------------------------------

    def open_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> NvlinkHandle:
        room = region_rows(self.plan)
        limit = room if call.capacity is None else min(call.capacity, room)
        exact = call.sizes == "exact"
        handle = self._start_dispatch(call, tensors, limit)
        if not exact:
            if self.checked:
                try:
                    self._settle(0)
                except CapacityOverflow as overflow:
                    self._overflow = overflow  # the dispatch itself is done; the next call raises
            too_short = call.capacity is not None and len(handle.rows) < call.capacity
            return self._own(handle, call.capacity) if tensors.own_outputs or too_short else handle
        try:
            self._settle(0)
        except CapacityOverflow as overflow:
            if call.layout != "expert" or (call.capacity is not None and overflow.needed > call.capacity):
                raise CapacityOverflow(overflow.needed, call.capacity or limit, sent=False) from None
            return self._dispatch_by_way_of_token(call, tensors)
        handle = self._exact(handle)
        return self._own(handle) if tensors.own_outputs else handle

    def _start_dispatch(self, call: DispatchCall, tensors: DispatchInput, capacity: int) -> NvlinkHandle:
        plan, x = self.plan, _aligned(tensors.x)
        num_tokens, local = x.shape[0], plan.experts_per_rank
        buffer = self._buffer(x.element_size())
        region = self._num_dispatches % 2
        int32: dict[str, Any] = {"dtype": torch.int32, "device": x.device}
        slots = torch.empty(max(1, num_tokens * (plan.num_ranks + plan.top_k)), **int32)
        all_counts = torch.empty(plan.num_ranks, plan.num_ranks + plan.num_experts, **int32)
        sizes = torch.empty(1 + plan.num_ranks + local + local + 1, **int32)
        num_rows, source_counts, expert_counts, expert_offsets = sizes.split([1, plan.num_ranks, local, local + 1])
        scales_per_row = 0 if tensors.scales is None else plan.scales_per_token
        places = plan.worst_case_rows("rank") if call.layout == "rank" else capacity
        kernel = self._kernel(dispatch_spec, call.layout, plan.hidden * x.element_size(), scales_per_row)
        args = kernel.args
        args.x = x.data_ptr()
        args.scales = _address(tensors.scales)
        args.topk_ids = tensors.topk_ids.data_ptr()
        args.topk_weights = _address(tensors.topk_weights)
        args.done_flags = self._control.regions.offset("done_flags")
        args.peers = buffer.peers.data_ptr()
        for name in ("rows", "row_scales", "row_ids", "row_weights", "row_places"):
            setattr(args, name, buffer.regions.offset(f"{name}{region}"))
        args.slots, args.all_counts = slots.data_ptr(), all_counts.data_ptr()
        args.num_rows, args.source_counts = num_rows.data_ptr(), source_counts.data_ptr()
        args.expert_counts, args.expert_offsets = expert_counts.data_ptr(), expert_offsets.data_ptr()
        args.num_tokens, args.max_tokens = num_tokens, plan.max_tokens_per_rank
        args.capacity, args.alignment = places, call.alignment
        args.ids_are_int64 = tensors.topk_ids.dtype == torch.int64
        args.stop_on_overflow = call.sizes == "exact"
        self._launch(kernel, dispatch_fields(self._num_dispatches, call, tensors), places)
        self._num_dispatches += 1

        received = plan.worst_case_rows("token")
        local_ids = buffer.view(f"row_ids{region}", torch.int32, (received, plan.top_k))
        row_places = buffer.view(f"row_places{region}", torch.int32, (received, plan.top_k))
        weights = scales = None
        if tensors.topk_weights is not None:
            weights = buffer.view(f"row_weights{region}", torch.float32, (received, plan.top_k))
        if scales_per_row:
            scales = buffer.view(f"row_scales{region}", torch.float32, (places, scales_per_row))
        by_expert = call.layout == "expert"
        return NvlinkHandle(
            call=call,
            number=self._num_dispatches - 1,
            num_tokens=num_tokens,
            counts=RoutedCounts(num_rows[0], source_counts, expert_counts, expert_offsets if by_expert else None),
            rows=buffer.view(f"rows{region}", x.dtype, (places, plan.hidden)),
            scales=scales,
            topk_ids=local_ids if by_expert else local_ids[:places],
            topk_weights=weights if by_expert or weights is None else weights[:places],
            capacity=places,
            given_ids=tensors.topk_ids,
            slots=slots,
            all_counts=all_counts,
            local_ids=local_ids,
            row_places=row_places,
            reused_after=self._num_dispatches + 1,
        )

    def _exact(self, handle: NvlinkHandle) -> NvlinkHandle:
        """The handle with outputs of their exact size."""
        num_rows = int(handle.counts.num_rows)
        handle = replace(handle, counts=replace(handle.counts, num_rows=num_rows))
        if handle.call.layout == "rank":
            return handle
        received = int(handle.counts.source_counts.sum())
        return replace(
            handle,
            rows=handle.rows[:num_rows],
            scales=None if handle.scales is None else handle.scales[:num_rows],
            topk_ids=handle.topk_ids[:received],
            topk_weights=None if handle.topk_weights is None else handle.topk_weights[:received],
            local_ids=handle.local_ids[:received],
            row_places=handle.row_places[:received],
        )

    def _own(self, handle: NvlinkHandle, num_places: int | None = None) -> NvlinkHandle:
        """The handle with tensors of its own instead of views of the region, of ``num_places`` rows if given."""

        def own(tensor: torch.Tensor | None, num_rows: int | None) -> torch.Tensor | None:
            if tensor is None or num_rows is None or num_rows <= len(tensor):
                return None if tensor is None else tensor.clone()
            return torch.cat([tensor, tensor.new_zeros(num_rows - len(tensor), tensor.shape[1])])

        names = ("rows", "scales", "topk_ids", "topk_weights", "local_ids", "row_places")
        by_place = names[:2] if handle.call.layout == "expert" else names[:4]
        copies: dict[str, Any] = {
            name: own(getattr(handle, name), num_places if name in by_place else None) for name in names
        }
        return replace(handle, reused_after=None, **copies)

    def _dispatch_by_way_of_token(self, call: DispatchCall, tensors: DispatchInput) -> NvlinkHandle:
        """Layout "expert" of any size: rows arrive one per (token, rank), which always fits, and are spread here."""
        plain = DispatchCall("token", 1, "exact", None)
        handle = self._start_dispatch(plain, tensors, self.plan.worst_case_rows("token"))
        self._settle(0)
        handle = self._exact(handle)
        from_each, of_each = handle.counts.source_counts.tolist(), handle.counts.expert_counts.tolist()
        placement = routing.place_by_expert(from_each, of_each, call.alignment, handle.local_ids)

        def spread(rows: torch.Tensor) -> torch.Tensor:
            return routing.scatter_rows(rows, placement.positions, placement.num_places)

        offsets = torch.tensor(placement.offsets, dtype=torch.int32, device=handle.rows.device)
        handle = replace(
            self._own(handle),
            call=call,
            counts=replace(handle.counts, num_rows=placement.num_rows, expert_offsets=offsets),
            rows=spread(handle.rows),
            scales=None if handle.scales is None else spread(handle.scales),
            capacity=placement.num_places,
        )
        return replace(handle, row_places=placement.positions.to(torch.int32))

    def dispatch(self, handle: NvlinkHandle, x: torch.Tensor) -> torch.Tensor:
        return handle.rows

    # -- combine --------------------------------------------------------------------------------------------

    def open_combine(self, handle: NvlinkHandle, call: CombineCall) -> None:
        """Nothing: the kernel opens the call itself."""

    def combine(
        self, handle: NvlinkHandle, rows: torch.Tensor, weights: torch.Tensor | None, call: CombineCall
    ) -> torch.Tensor:
        if call.mode == "per_route":
            return self._combine_per_route(handle, rows, weights, call)
        plan = self.plan
        buffer = self._buffer(call.wire_dtype.itemsize)
        kernel = self._kernel(combine_spec, handle.call.layout, rows.dtype, call.wire_dtype, call.out_dtype)
        out = torch.empty(handle.num_tokens, plan.hidden, dtype=call.out_dtype, device=rows.device)
        args = kernel.args
        rows = _aligned(rows)
        args.y = rows.data_ptr()
        args.row_places = handle.row_places.data_ptr()
        args.row_weights = _address(weights)
        args.slots, args.all_counts = handle.slots.data_ptr(), handle.all_counts.data_ptr()
        args.out = out.data_ptr()
        args.chunk_flags = self._control.regions.offset("chunk_flags")
        args.peers = buffer.peers.data_ptr()
        args.home = buffer.regions.offset("home")
        args.num_tokens, args.max_tokens = handle.num_tokens, plan.max_tokens_per_rank
        args.capacity, args.push_blocks = handle.capacity, self.push_sms
        self._launch(kernel, combine_fields(handle.number, call), 0)
        if self.checked:
            self._settle(0)
        return out

    def _combine_per_route(
        self, handle: NvlinkHandle, rows: torch.Tensor, weights: torch.Tensor | None, call: CombineCall
    ) -> torch.Tensor:
        """One row per route, over the process group: no kernel of ours does this yet. Reads counts on the host."""
        plan, rank = self.plan, self.ranks.rank
        counts = handle.all_counts.cpu()
        routes = counts[:, plan.num_ranks :].view(plan.num_ranks, plan.num_ranks, -1).sum(2)  # [source, rank]
        received = int(counts[:, rank].sum())
        positions = self._positions(handle)[:received]
        given = None if weights is None else weights[:received]
        terms = routing.weighted_routes(rows, handle.local_ids[:received], positions, given, dtype=torch.float32)
        home = self.ranks.all_to_all(
            terms.to(call.wire_dtype), routes[:, rank].tolist(), routes[rank].tolist(), "combine, routes"
        )
        send = routing.send_map(handle.given_ids, plan)
        order = routing.home_positions_per_route(send, handle.num_tokens, plan.top_k)
        return routing.ordered_sum(home, order, dtype=torch.float32).to(call.out_dtype)

    # -- gradients ------------------------------------------------------------------------------------------

    def combine_backward(
        self,
        handle: NvlinkHandle,
        grad: torch.Tensor,
        rows: torch.Tensor | None,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        call = DispatchCall("token", 1, "bounded", self.plan.worst_case_rows("token"))
        tensors = DispatchInput(grad, None, handle.given_ids, None, False, False, False)
        arrived = self._start_dispatch(call, tensors, self.plan.worst_case_rows("token"))
        positions = self._positions(handle)
        if weights is not None:  # exact sizes have as many received weights as rows
            positions = positions[: len(weights)]
        return routing.spread_gradient(arrived.rows, positions, len(handle.rows), weights, rows, dtype)

    def _positions(self, handle: NvlinkHandle) -> torch.Tensor:
        """Position matrix of the received rows, one row for each that there may be; -1 beyond those there are."""
        received = torch.arange(self.plan.worst_case_rows("token"), device=handle.rows.device)
        counts = handle.all_counts[:, self.ranks.rank].to(torch.int64)
        if handle.call.layout == "expert":
            positions = torch.full((len(received), self.plan.top_k), -1, device=received.device)
            positions[: len(handle.row_places)] = handle.row_places.to(torch.int64)
        elif handle.call.layout == "token":
            positions = received[:, None]
        else:
            source = torch.bucketize(received, counts.cumsum(0), right=True).clamp_max(self.plan.num_ranks - 1)
            in_source = received - (counts.cumsum(0) - counts)[source]
            positions = (source * self.plan.max_tokens_per_rank + in_source)[:, None]
        valid = (received < counts.sum())[:, None] & (positions < handle.capacity)
        return torch.where(valid, positions, -1)

    def return_weights(self, handle: NvlinkHandle, grad: torch.Tensor) -> torch.Tensor:
        plan, rank = self.plan, self.ranks.rank
        counts = handle.all_counts.cpu()
        sent, received = counts[rank, : plan.num_ranks].tolist(), counts[:, rank].tolist()
        if handle.call.layout != "expert":
            place = self._positions(handle)[: sum(received), 0]
            grad = torch.where((place >= 0)[:, None], grad[place.clamp_min(0)], 0)
        grad = grad[: sum(received)].contiguous()
        home = self.ranks.all_to_all(grad, received, sent, "dispatch, gradient of weights")
        return routing.weights_at_home(home, routing.send_map(handle.given_ids, plan), handle.num_tokens)

    def close(self) -> None:
        healthy = self._fault.error() is None
        for buffer in (self._control, *self._data.values()):
            if healthy:
                buffer.close()
            else:
                buffer.abandon()
        self.ranks.close()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _require_bulk(rows: torch.Tensor) -> None:
    if rows.shape[-1] * rows.element_size() % BULK_BYTES:
        raise ShapeMismatch(
            f"a row of {rows.shape[-1]} {rows.dtype} is not a multiple of {BULK_BYTES} bytes, which backend nvlink "
            "needs; use backend='collective'"
        )


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows at an address that bulk copies take."""
    return rows.clone() if rows.data_ptr() % BULK_BYTES else rows
