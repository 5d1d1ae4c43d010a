"""Backend "nvlink": our own kernels over the peers' memory, for one NVLink domain of Hopper GPUs.

A dispatch is one kernel, a combine is one kernel; neither asks the host anything. How a call opens, and how the host
learns what went wrong, is in calls.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenloom import routing
from tokenloom.backends.base import CombineCall, DispatchCall, DispatchInput, RoutedCounts
from tokenloom.backends.calls import Calls
from tokenloom.backends.exchange import Field, combine_fields, dispatch_fields
from tokenloom.backends.regions import (
    data_regions,
    home_weight_values,
    region_rows,
    route_regions,
)
from tokenloom.errors import CapacityOverflow, DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.group import RankGroup
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.combine.launch import combine_spec
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS, block_count_words, dispatch_spec
from tokenloom.kernels.shape import DTYPES
from tokenloom.plan import Plan
from tokenloom.symmetric import Regions, SymmetricBuffer

DEFAULT_SMS = 16
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
        row_tokens: int32 [>= R]: the token at home that a received row is (layout "expert").
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
    row_tokens: torch.Tensor
    reused_after: int | None


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
        self.checked = checked
        self._calls = Calls(plan, ranks, num_sms)
        self._buffers: dict[tuple[Any, int], SymmetricBuffer] = {}
        self._overflow: CapacityOverflow | None = None
        self._num_dispatches = 0
        self._block_counts = torch.zeros(block_count_words(plan), dtype=torch.int32, device=ranks.device)

    # -- what opens a call ----------------------------------------------------------------------------------

    def check_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> None:
        """What these kernels cannot do, beyond what checks.py refuses."""
        x = tensors.x
        self._require_no_host_read(call.sizes == "exact", "sizes='exact'")
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
        self._require_no_host_read(False, "")
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

    def _require_no_host_read(self, reads: bool, what: str) -> None:
        if (reads or self.checked) and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                f"{what if reads else 'checked=True'} reads on the host, which a CUDA graph cannot do; capture with "
                "sizes='bounded' and a Communicator without checked"
            )

    def report_fault(self, call: str, fault: Exception) -> None:
        """Open the call with a status, which all ranks see."""
        self._calls.report_fault(call, fault)

    def check(self, wait: bool) -> None:
        """Raise what earlier calls left behind; with ``wait`` of all calls and graph replays, finished first."""
        if torch.cuda.is_current_stream_capturing():
            return
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            raise overflow
        self._calls.check(wait)

    def _buffer(
        self, regions: Callable[[Plan, int], Regions], value_bytes: int, fields: dict[str, Field]
    ) -> SymmetricBuffer:
        """A buffer for payloads of this width, made at the first call that needs it, on all ranks alike."""
        key = (regions, max(value_bytes, 2))
        found = self._buffers.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise InvalidArgument("the first call of a kind allocates buffers; make it once before the capture")
            self._calls.agree(fields)  # or some ranks would wait here for others that do something else
            found = self._buffers[key] = SymmetricBuffer(regions(self.plan, key[1]), self.ranks)
        return found

    # -- dispatch -------------------------------------------------------------------------------------------

    def open_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> NvlinkHandle:
        room = region_rows(self.plan) if call.layout == "expert" else self.plan.worst_case_rows("token")
        limit = room if call.capacity is None else min(call.capacity, room)
        exact = call.sizes == "exact"
        handle = self._start_dispatch(call, tensors, limit)
        if not exact:
            if self.checked:
                try:
                    self._calls.settle(0)
                except CapacityOverflow as overflow:
                    self._overflow = overflow  # the dispatch itself is done; the next call raises
            too_short = call.capacity is not None and len(handle.rows) < call.capacity
            return self._own(handle, call.capacity) if tensors.own_outputs or too_short else handle
        try:
            self._calls.settle(0)
        except CapacityOverflow as overflow:
            if call.layout != "expert" or (call.capacity is not None and overflow.needed > call.capacity):
                raise CapacityOverflow(overflow.needed, call.capacity or limit, sent=False) from None
            return self._dispatch_by_way_of_token(call, tensors)
        handle = self._exact(handle)
        return self._own(handle) if tensors.own_outputs else handle

    def _start_dispatch(self, call: DispatchCall, tensors: DispatchInput, capacity: int) -> NvlinkHandle:
        plan, x, topk_ids = self.plan, _aligned(tensors.x), _aligned(tensors.topk_ids)
        num_tokens, local = x.shape[0], plan.experts_per_rank
        row_dtype = torch.float8_e4m3fn if call.to_fp8 else x.dtype
        fields = dispatch_fields(self._num_dispatches, call, tensors)
        buffer = self._buffer(data_regions, row_dtype.itemsize, fields)
        region = self._num_dispatches % 2
        int32: dict[str, Any] = {"dtype": torch.int32, "device": x.device}
        slots = torch.empty(max(1, num_tokens * (plan.num_ranks + plan.top_k)), **int32)
        all_counts = torch.empty(plan.num_ranks, plan.num_ranks + plan.num_experts, **int32)
        sizes = torch.empty(1 + plan.num_ranks + local + local + 1, **int32)
        num_rows, source_counts, expert_counts, expert_offsets = sizes.split([1, plan.num_ranks, local, local + 1])
        scales_per_row = 0 if tensors.scales is None and not call.to_fp8 else plan.scales_per_token
        places = plan.worst_case_rows("rank") if call.layout == "rank" else capacity
        quantize: tuple[Any, ...] = ()
        if call.to_fp8:
            quantize = ("power of two" if call.power_of_two_scales else "any scale", x.dtype)
        row_bytes = plan.hidden * row_dtype.itemsize
        kernel = self._calls.kernel(dispatch_spec, call.layout, row_bytes, scales_per_row, *quantize)
        args = kernel.args
        args.x = x.data_ptr()
        args.scales = _address(tensors.scales)
        args.topk_ids = topk_ids.data_ptr()
        args.topk_weights = _address(tensors.topk_weights)
        args.done_flags = self._calls.control.regions.offset("done_flags")
        args.row_flags = self._calls.control.regions.offset("row_flags")
        args.block_counts = self._block_counts.data_ptr()
        args.slots_found = self._block_counts[-MAX_BLOCKS:].data_ptr()
        args.peers = buffer.peers.data_ptr()
        for name in ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens"):
            setattr(args, name, buffer.regions.offset(f"{name}{region}"))
        args.slots, args.all_counts = slots.data_ptr(), all_counts.data_ptr()
        args.num_rows, args.source_counts = num_rows.data_ptr(), source_counts.data_ptr()
        args.expert_counts, args.expert_offsets = expert_counts.data_ptr(), expert_offsets.data_ptr()
        args.num_tokens, args.max_tokens = num_tokens, plan.max_tokens_per_rank
        args.capacity, args.alignment = places, call.alignment
        args.ids_are_int64 = tensors.topk_ids.dtype == torch.int64
        args.stop_on_overflow = call.sizes == "exact"
        self._calls.launch(kernel, fields)
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
            rows=buffer.view(f"rows{region}", row_dtype, (places, plan.hidden)),
            scales=scales,
            topk_ids=local_ids if by_expert else local_ids[:places],
            topk_weights=weights if by_expert or weights is None else weights[:places],
            capacity=places,
            given_ids=topk_ids,
            slots=slots,
            all_counts=all_counts,
            local_ids=local_ids,
            row_places=row_places,
            row_tokens=buffer.view(f"row_tokens{region}", torch.int32, (received,)),
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
            row_tokens=handle.row_tokens[:received],
        )

    def _own(self, handle: NvlinkHandle, num_places: int | None = None) -> NvlinkHandle:
        """The handle with tensors of its own instead of views of the region, of ``num_places`` rows if given."""

        def own(tensor: torch.Tensor | None, num_rows: int | None) -> torch.Tensor | None:
            if tensor is None or num_rows is None or num_rows <= len(tensor):
                return None if tensor is None else tensor.clone()
            return torch.cat([tensor, tensor.new_zeros(num_rows - len(tensor), tensor.shape[1])])

        names = ("rows", "scales", "topk_ids", "topk_weights", "local_ids", "row_places", "row_tokens")
        by_place = names[:2] if handle.call.layout == "expert" else names[:4]
        copies: dict[str, Any] = {
            name: own(getattr(handle, name), num_places if name in by_place else None) for name in names
        }
        return replace(handle, reused_after=None, **copies)

    def _dispatch_by_way_of_token(self, call: DispatchCall, tensors: DispatchInput) -> NvlinkHandle:
        """Layout "expert" of any size: rows arrive one per (token, rank), which always fits, and are spread here."""
        plain = replace(call, layout="token", alignment=1, capacity=None)
        handle = self._start_dispatch(plain, tensors, self.plan.worst_case_rows("token"))
        self._calls.settle(0)
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
        return handle.rows  # the kernel has put them there

    # -- combine --------------------------------------------------------------------------------------------

    def open_combine(self, handle: NvlinkHandle, call: CombineCall) -> None:
        """Nothing: the kernel opens the call itself."""

    def combine(
        self, handle: NvlinkHandle, rows: torch.Tensor, weights: torch.Tensor | None, call: CombineCall
    ) -> torch.Tensor:
        fields = combine_fields(handle.number, call)
        by_route = call.mode == "per_route"
        buffer = self._buffer(route_regions if by_route else data_regions, call.wire_dtype.itemsize, fields)
        variant = (handle.call.layout, rows.dtype, call.wire_dtype, call.out_dtype, call.mode)
        kernel = self._calls.kernel(combine_spec, *variant)
        out = torch.empty(handle.num_tokens, self.plan.hidden, dtype=call.out_dtype, device=rows.device)
        rows = _aligned(rows)
        kernel.args.row_weights = _address(weights)
        self._start_combine(kernel, handle, rows, out, buffer, "home", fields, handle.capacity)
        if self.checked:
            self._calls.settle(0)
        return out

    def _start_combine(
        self,
        kernel: Kernel,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        out: torch.Tensor,
        buffer: SymmetricBuffer,
        home: str,
        fields: dict[str, Field],
        capacity: int,
    ) -> None:
        args = kernel.args
        args.y, args.out = rows.data_ptr(), out.data_ptr()
        args.row_places, args.row_tokens = handle.row_places.data_ptr(), handle.row_tokens.data_ptr()
        args.slots, args.all_counts = handle.slots.data_ptr(), handle.all_counts.data_ptr()
        args.topk_ids, args.ids_are_int64 = handle.given_ids.data_ptr(), handle.given_ids.dtype == torch.int64
        args.chunk_flags = self._calls.control.regions.offset("chunk_flags")
        args.peers, args.home = buffer.peers.data_ptr(), buffer.regions.offset(home)
        args.num_tokens, args.max_tokens = handle.num_tokens, self.plan.max_tokens_per_rank
        args.capacity = capacity
        self._calls.launch(kernel, fields)

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
        """A combine of short rows: of a token's K gradients each rank has some, and zeros for the others."""
        layout = "rank" if handle.call.layout == "rank" else "token"
        rows = torch.where(handle.local_ids[: len(grad)] >= 0, grad, 0)
        width = home_weight_values(self.plan)
        rows = torch.nn.functional.pad(rows, (0, width - self.plan.top_k))
        kernel = self._calls.kernel(combine_spec, layout, *[torch.float32] * 3, "per_rank", width)
        out = rows.new_empty(handle.num_tokens, width)
        fields: dict[str, Field] = {"call": "combine", "dispatch number": handle.number, "mode": "gradient of weights"}
        capacity = handle.capacity if handle.call.layout == "token" else self.plan.worst_case_rows("token")
        self._start_combine(kernel, handle, rows, out, self._calls.control, "home_weights", fields, capacity)
        return out[:, : self.plan.top_k]

    def close(self) -> None:
        self._calls.close(list(self._buffers.values()))
        self.ranks.close()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _require_bulk(rows: torch.Tensor) -> None:
    if rows.shape[-1] * rows.element_size() % BULK_BYTES:
        raise ShapeMismatch(
            f"a row of {rows.shape[-1]} {rows.dtype} is not a multiple of {BULK_BYTES} bytes, which backend nvlink "
            "needs; use backend='collective'"
        )


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at an address that bulk copies and 16-byte loads take."""
    return tensor.clone() if tensor.data_ptr() % BULK_BYTES else tensor
