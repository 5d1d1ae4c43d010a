"""Backend "nvlink": our own kernels over the peers' memory, for one NVLink domain of Hopper GPUs.

A dispatch is one kernel, a combine is one kernel; neither asks the host anything. How a call opens, and how the host
learns what went wrong, is in calls.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokenloom.backends.base import NUM_REGIONS, CombineCall, DispatchCall, DispatchInput, Onward, RoutedCounts
from tokenloom.backends.handshake import Field, combine_fields, dispatch_fields
from tokenloom.backends.nvlink.buffers import (
    data_regions,
    gather_regions,
    home_weight_values,
    mega_regions,
    mega_rows,
    region_rows,
    route_regions,
)
from tokenloom.backends.nvlink.handle import NvlinkHandle, Region
from tokenloom.backends.nvlink.launcher import FOLLOWS_A_FAULT, Calls
from tokenloom.errors import CapacityOverflow, DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.combine.launch import PRESUM_BLOCKS, CombineVariant, PreReduceVariant, max_chunks
from tokenloom.kernels.common import DTYPES
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS, DispatchVariant, block_count_words
from tokenloom.kernels.row_weights.launch import BLOCKS, RowWeightsVariant
from tokenloom.ops import routing
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import HostCounts, Regions, SymmetricBuffer

DataRegions = Callable[[Plan, int], Regions]
DEFAULT_SMS = 16
ALONE = 2
"""Times as many SMs for a combine beside which nothing is computed, of at most half: NCCL, too, waits for SMs."""
BULK_BYTES = 16
"""Rows, and their addresses, are multiples of this."""


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
        self.calls = Calls(plan, ranks, num_sms)
        self._buffers: dict[tuple[Any, int], SymmetricBuffer] = {}
        self._regions: dict[tuple[int, torch.dtype], Region] = {}
        self._overflow: CapacityOverflow | None = None
        self._num_dispatches = 0
        self._room = region_rows(plan)
        self._num_regions = NUM_REGIONS
        self._data_regions: DataRegions = data_regions
        self._host_counts = HostCounts(2 + plan.num_ranks + 2 * plan.experts_per_rank)
        sms = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        self._blocks_alone = max(num_sms, min(ALONE * num_sms, sms // 2))
        self._block_counts = torch.zeros(block_count_words(plan), dtype=torch.int32, device=ranks.device)

    def serve_mega(self, num_shared_experts: int) -> None:
        """From the first dispatch on: rows of layout "token" in FP8 only, in one region that each dispatch reuses.

        Its ranks all meet after the last use of a dispatch's rows, before the next dispatch.
        """
        self._data_regions = partial(mega_regions, num_shared_experts=num_shared_experts)
        self._num_regions = 1
        self._room = mega_rows(self.plan, num_shared_experts)

    def mega_buffer(self, fields: dict[str, Field]) -> SymmetricBuffer:
        """What :func:`mega_regions` says, made at the first call on all ranks."""
        return self.buffer(self._data_regions, 1, fields)

    # -- what opens a call ----------------------------------------------------------------------------------

    def check_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> None:
        """What these kernels cannot do, beyond what checks.py refuses."""
        x = tensors.x
        self._require_layout(call.strategy, call.layout)
        if call.strategy == "all_gather" and (call.to_fp8 or x.element_size() == 1):
            raise InvalidArgument("strategy 'all_gather' moves no FP8 on backend nvlink; use 'dedup'")
        self._require_no_host_read(call.sizes == "exact", "sizes='exact'")
        if x.element_size() > 1 and x.dtype not in DTYPES:
            raise DtypeMismatch(
                f"x is {x.dtype}, backend nvlink moves bfloat16, float16, float32 and FP8; use backend='collective'"
            )
        _require_bulk(x)
        if self._num_regions == 1 and (call.layout != "token" or (x.element_size() > 1 and not call.to_fp8)):
            raise InvalidArgument("this communicator is a MegaMoE's, which receives FP8 in layout 'token' only")
        if call.alignment > 1 and self.plan.worst_case_rows("expert", call.alignment) + call.alignment > 2**31:
            raise InvalidArgument(f"alignment is {call.alignment}: places of rows would not fit 32 bits")
        too_many = call.sizes == "bounded" and (call.capacity or 0) > self._room
        if too_many and self.plan.worst_case_rows(call.layout, call.alignment) > self._room:
            raise InvalidArgument(
                f"capacity is {call.capacity}, the receive region has room for {self._room} rows; pass at most that, "
                "or a larger max_tokens_per_rank to Communicator"
            )

    def check_combine(self, handle: NvlinkHandle, y: torch.Tensor, call: CombineCall) -> None:
        """What these kernels cannot do, beyond what checks.py refuses."""
        self._require_no_host_read(False, "")
        if call.mode == "per_rank":
            self._require_layout(call.strategy, handle.call.layout)
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

    def _require_layout(self, strategy: str, layout: str) -> None:
        if strategy == "dedup":
            return
        if layout != "expert":
            raise InvalidArgument(f"backend nvlink has strategy {strategy!r} in layout 'expert', not {layout!r}")
        if strategy != "all_to_all":
            self._require_no_capture()

    def _require_no_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                "strategies 'all_gather' and 'reduce_scatter' cannot be captured into a CUDA graph; use 'dedup'"
            )

    def _require_no_host_read(self, reads: bool, what: str) -> None:
        if (reads or self.checked) and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                f"{what if reads else 'checked=True'} reads on the host, which a CUDA graph cannot do; capture with "
                "sizes='bounded' and a Communicator without checked"
            )

    def report_fault(self, call: str, fault: Exception, then: Onward | None = None) -> None:
        """Open the call with a status, which all ranks see; and the next, unless the others stop before it: there they
        wait for outcomes, or for a buffer that is not there yet."""
        self.calls.report_fault(call, fault)
        if then is None or self.checked or torch.cuda.is_current_stream_capturing():
            return
        value_bytes = then.combine.wire_dtype.itemsize
        needed = {(self._data_regions, value_bytes), self._home(then.combine)}
        if then.dispatch == "all_gather":
            needed.add((gather_regions, value_bytes))
        if needed <= self._buffers.keys():
            self.calls.agree({"call": "combine"}, status=FOLLOWS_A_FAULT)

    def settle(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self.calls.settle(0)

    def check(self, wait: bool) -> None:
        """Raise what earlier calls left behind; with ``wait`` of all calls and graph replays, finished first."""
        if torch.cuda.is_current_stream_capturing():
            return
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            raise overflow
        self.calls.check(wait)

    def memory(self) -> list[str]:
        """Sizes of the symmetric buffers, those that the first call of a kind will make included."""
        lines = [f"flags and counts: {self.calls.control.regions.total_bytes / 1e6:.1f} MB"]
        kinds: tuple[tuple[DataRegions, int, str], ...] = (
            (data_regions, 2, "FP8, bfloat16 and float16"),
            (data_regions, 4, "float32"),
            (route_regions, 2, "combine per route, 2-byte values"),
            (route_regions, 4, "combine per route, float32"),
            (gather_regions, 2, "all_gather and reduce_scatter, 2-byte values"),
            (gather_regions, 4, "all_gather and reduce_scatter, float32"),
        )
        if self._num_regions == 1:
            kinds = ((self._data_regions, 1, "received rows in FP8, and results that come home"),)
        for regions, value_bytes, what in kinds:
            size = f"{regions(self.plan, value_bytes).total_bytes / 1e6:.1f} MB"
            when = "" if (regions, value_bytes) in self._buffers else ", made at the first call that needs it"
            lines.append(f"buffers for {what}: {size}{when}")
        return lines

    def buffer(self, regions: DataRegions, value_bytes: int, fields: dict[str, Field]) -> SymmetricBuffer:
        """A buffer for payloads of this width, made at the first call that needs it, on all ranks alike."""
        key = (regions, value_bytes)
        found = self._buffers.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise InvalidArgument("the first call of a kind allocates buffers; make it once before the capture")
            self.calls.settle(0)  # or a rank that knows of an earlier fault would go on without those that do not
            self.calls.agree(fields)  # or some ranks would wait here for others that do something else
            found = self._buffers[key] = SymmetricBuffer(regions(self.plan, key[1]), self.ranks)
        return found

    # -- dispatch -------------------------------------------------------------------------------------------

    def open_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> Callable[[], NvlinkHandle]:
        if call.sizes == "exact" and not tensors.ahead:  # who waits hears first of what earlier calls left
            self.calls.settle(0)
        room = self._room if call.layout == "expert" else self.plan.worst_case_rows("token")
        limit = room if call.capacity is None else min(call.capacity, room)
        return partial(self._opened, self._start_dispatch(call, tensors, limit), call, tensors, limit)

    def _opened(self, handle: NvlinkHandle, call: DispatchCall, tensors: DispatchInput, limit: int) -> NvlinkHandle:
        if call.sizes != "exact":
            if self.checked:
                try:
                    self.calls.settle(0)
                except CapacityOverflow as too_many:
                    self._overflow = too_many  # the dispatch itself is done; the next call raises
            assert handle.rows is not None
            too_short = call.capacity is not None and len(handle.rows) < call.capacity
            if too_short or tensors.own_outputs is True:
                handle.own(call.capacity)
            elif tensors.own_outputs:
                handle.own_but_rows()
            return handle
        counts = self.calls.await_counts(self._host_counts)
        overflow = self._settled() if counts is None or self.checked else None
        if overflow is not None:
            if call.layout != "expert" or (call.capacity is not None and overflow.needed > call.capacity):
                raise CapacityOverflow(overflow.needed, call.capacity or limit, sent=False)
            return self._dispatch_by_way_of_token(call, tensors)
        assert counts is not None, "settle has raised what the call found"
        handle.cut_to_size(counts)
        if tensors.own_outputs == "but rows":
            handle.own_but_rows()
        elif tensors.own_outputs:
            handle.own()
        return handle

    def _settled(self) -> CapacityOverflow | None:
        """Settle every call; return what the last one lacks room for, and raise all else."""
        try:
            self.calls.settle(1)  # what earlier calls left is not to be taken for this one's
        except Exception:
            self.calls.settle(0, own_fault=True)  # whose own outcome nobody shall hear of later
            raise
        try:
            self.calls.settle(0)
        except CapacityOverflow as overflow:
            return overflow
        return None

    def _start_dispatch(
        self, call: DispatchCall, tensors: DispatchInput, capacity: int, repeats: bool = False
    ) -> NvlinkHandle:
        plan, x, topk_ids = self.plan, _aligned(tensors.x), _aligned(tensors.topk_ids)
        num_tokens, local = x.shape[0], plan.experts_per_rank
        row_dtype = torch.float8_e4m3fn if call.to_fp8 else x.dtype
        number = self.calls.num_calls
        fields = dispatch_fields(number, call, tensors)
        region = self._region(row_dtype, fields)
        results = (1, plan.num_ranks, local, local + 1, plan.num_ranks * (plan.num_ranks + plan.num_experts))
        own = torch.empty(
            sum(results) + num_tokens * (plan.num_ranks + plan.top_k), dtype=torch.int32, device=x.device
        )
        num_rows, source_counts, expert_counts, expert_offsets, all_counts, slots = torch.split_with_sizes(
            own, [*results, own.shape[0] - sum(results)]
        )
        with_scales = tensors.scales is not None or call.to_fp8
        places = plan.worst_case_rows("rank") if call.layout == "rank" else capacity
        quantize = ""
        if call.to_fp8:
            quantize = "power of two" if call.power_of_two_scales else "any scale"
        variant = DispatchVariant(
            plan=plan, layout=call.layout, x_dtype=x.dtype, quantize=quantize, strategy=call.strategy
        )
        kernel = self.calls.kernel(variant)
        args = kernel.args
        args.x = x.data_ptr()
        args.scales = _address(tensors.scales)
        args.topk_ids = topk_ids.data_ptr()
        args.topk_weights = _address(tensors.topk_weights)
        args.done_flags = self.calls.control.regions.offset("done_flags")
        args.row_flags = self.calls.control.regions.offset("row_flags")
        args.block_counts = self._block_counts.data_ptr()
        args.slots_found = args.block_counts + 4 * (len(self._block_counts) - MAX_BLOCKS)
        args.peers = region.peers_address
        for name, offset in region.offsets:
            setattr(args, name, offset)
        args.slots, args.all_counts = slots.data_ptr(), all_counts.data_ptr()
        args.num_rows, args.source_counts = num_rows.data_ptr(), source_counts.data_ptr()
        args.expert_counts, args.expert_offsets = expert_counts.data_ptr(), expert_offsets.data_ptr()
        args.num_tokens, args.max_tokens = num_tokens, plan.max_tokens_per_rank
        args.capacity, args.alignment = places, call.alignment
        args.ids_are_int64 = topk_ids.dtype == torch.int64
        exact = call.sizes == "exact"
        args.stop_on_overflow = exact
        args.host_counts = self._host_counts.address if exact else 0
        args.host_sequence = self._host_counts.expect() if exact else 0
        args.gathered = 0
        if call.strategy == "all_gather":
            buffer = self.buffer(gather_regions, x.element_size(), fields)
            half = self._half(buffer)
            self._bring(buffer, half, lambda rank: x)
            args.gathered = buffer.addresses[self.ranks.rank] + half
        self.calls.launch(kernel, fields, region=region.number, repeats=repeats)
        self._num_dispatches += 1

        by_expert = call.layout == "expert"
        weights = None if tensors.topk_weights is None else region.weights
        return NvlinkHandle(
            call=call,
            number=number,
            num_tokens=num_tokens,
            counts=RoutedCounts(num_rows[0], source_counts, expert_counts, expert_offsets if by_expert else None),
            rows=region.rows[:places],
            scales=region.scales[:places] if with_scales else None,
            topk_ids=region.local_ids if by_expert else region.local_ids[:places],
            topk_weights=weights if by_expert or weights is None else weights[:places],
            capacity=places,
            given_ids=topk_ids,
            slots=slots,
            all_counts=all_counts.view(plan.num_ranks, -1),
            local_ids=region.local_ids,
            row_places=region.row_places,
            row_tokens=region.row_tokens,
            counts_row=own[: sum(results[:4])],
            reused_after=self._num_dispatches + self._num_regions - 1,
        )

    def _half(self, buffer: SymmetricBuffer) -> int:
        """Offset of the half of a gather buffer that the next call uses: copies into it may begin at once.

        For this rank has seen the call before the next one open on all ranks, which had then done with what they had
        received two calls before it, in this half. (A graph would use one half in all of its replays.)
        """
        self._require_no_capture()
        self.calls.follow(torch.cuda.current_stream(self.ranks.device))
        return buffer.regions.offset(f"gathered{self.calls.num_calls % 2}")

    def _bring(self, buffer: SymmetricBuffer, half: int, rows_for: Callable[[int], torch.Tensor]) -> None:
        """At most M rows to every other rank, by copy engines. They are there when the next call has opened."""
        plan, me = self.plan, self.ranks.rank
        for distance in range(1, plan.num_ranks):
            rank = (me + distance) % plan.num_ranks
            rows = rows_for(rank)
            buffer.copy_to(rank, half + me * plan.max_tokens_per_rank * plan.hidden * rows.element_size(), rows)

    def _region(self, row_dtype: torch.dtype, fields: dict[str, Field]) -> Region:
        """Where the next dispatch puts its rows."""
        number = self._num_dispatches % self._num_regions
        found = self._regions.get((number, row_dtype))
        if found is None:
            value_bytes = row_dtype.itemsize if self._num_regions == 1 else max(row_dtype.itemsize, 2)
            buffer = self.buffer(self._data_regions, value_bytes, fields)
            found = Region(self.plan, buffer, number, self._num_regions, self._room, row_dtype)
            self._regions[number, row_dtype] = found
        return found

    def _dispatch_by_way_of_token(self, call: DispatchCall, tensors: DispatchInput) -> NvlinkHandle:
        """Layout "expert" of any size: rows arrive one per (token, rank), which always fits, and are spread here."""
        self._num_dispatches -= 1  # the refused one wrote nothing: so its region, and not that of the one before
        plain = replace(call, layout="token", alignment=1, capacity=None, strategy="dedup")
        handle = self._start_dispatch(plain, tensors, self.plan.worst_case_rows("token"))
        self.calls.settle(0)
        handle.cut_to_size(handle.counts_row.tolist())
        from_each, of_each = handle.counts.source_counts.tolist(), handle.counts.expert_counts.tolist()
        placement = routing.place_by_expert(from_each, of_each, call.alignment, handle.local_ids)

        def spread(rows: torch.Tensor | None) -> torch.Tensor:
            assert rows is not None
            return routing.scatter_rows(rows, placement.positions, placement.num_places)

        offsets = torch.tensor(placement.offsets, dtype=torch.int32, device=handle.given_ids.device)
        handle.own()
        handle = replace(
            handle,
            call=call,
            counts=replace(handle.counts, num_rows=placement.num_rows, expert_offsets=offsets),
            rows=spread(handle.rows),
            scales=None if handle.scales is None else spread(handle.scales),
            capacity=placement.num_places,
            host_offsets=placement.offsets,
            by_token=True,
        )
        return replace(handle, row_places=placement.positions.to(torch.int32))

    def dispatch(self, handle: NvlinkHandle, x: torch.Tensor) -> torch.Tensor:
        rows, handle.rows = handle.rows, None  # the kernel has put them there
        assert rows is not None
        handle.num_places = len(rows)
        return rows

    # -- combine --------------------------------------------------------------------------------------------

    def open_combine(self, handle: NvlinkHandle, call: CombineCall) -> None:
        """Nothing: the kernel opens the call itself."""

    def combine(
        self,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        call: CombineCall,
        out: torch.Tensor | None = None,
        alone: bool = False,
    ) -> torch.Tensor:
        fields = combine_fields(handle.number, call)
        rows = _aligned(rows)
        if out is None:
            out = torch.empty(handle.num_tokens, self.plan.hidden, dtype=call.out_dtype, device=rows.device)
        if call.strategy == "reduce_scatter":
            self._reduce_scatter(handle, rows, weights, call, fields, out)
        else:
            buffer = self.buffer(*self._home(call), fields)
            variant = CombineVariant(
                plan=self.plan,
                layout=handle.call.layout,
                y_dtype=rows.dtype,
                wire_dtype=call.wire_dtype,
                out_dtype=call.out_dtype,
                mode=call.mode,
                weighted=weights is not None,
            )
            kernel = self.calls.kernel(variant)
            self._describe(kernel, handle, rows, out, handle.capacity)
            kernel.args.row_weights = _address(weights)
            blocks = self._blocks_alone if alone else None
            self._start_combine(kernel, buffer, buffer.regions.offset("home"), fields, blocks)
        if self.checked:
            self.calls.settle(0)
        return out

    @staticmethod
    def _home(call: CombineCall) -> tuple[DataRegions, int]:
        """Which buffer its rows go home to."""
        by_strategy = {"reduce_scatter": gather_regions, "all_to_all": route_regions}
        return by_strategy.get(call.strategy, data_regions), call.wire_dtype.itemsize

    def _reduce_scatter(
        self,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        call: CombineCall,
        fields: dict[str, Field],
        out: torch.Tensor,
    ) -> None:
        """Partial sums for all tokens of all ranks; copy engines take them home; there a kernel adds them."""
        plan, device = self.plan, rows.device
        buffer = self.buffer(*self._home(call), fields)
        half = self._half(buffer)
        try:
            dense = torch.empty(
                plan.num_ranks, plan.max_tokens_per_rank, plan.hidden, dtype=call.wire_dtype, device=device
            )
        except Exception as fault:  # no memory: the others are told, or they would wait
            self.report_fault("combine", fault)
            raise
        presum = self.calls.kernel(
            PreReduceVariant(plan=plan, y_dtype=rows.dtype, wire_dtype=call.wire_dtype, weighted=weights is not None)
        )
        self._describe(presum, handle, rows, dense, handle.capacity)
        presum.args.row_weights = _address(weights)
        presum.args.home = buffer.addresses[self.ranks.rank] + half + self.ranks.rank * dense[0].nbytes
        presum.launch(PRESUM_BLOCKS, torch.cuda.current_stream(device).cuda_stream)
        self._bring(buffer, half, lambda rank: dense[rank])
        kernel = self.calls.kernel(
            CombineVariant(
                plan=plan,
                layout="token",
                y_dtype=call.wire_dtype,
                wire_dtype=call.wire_dtype,
                out_dtype=call.out_dtype,
                dense=True,
            )
        )
        self._describe(kernel, handle, dense, out, handle.capacity)
        self._start_combine(kernel, buffer, half, fields)

    def _describe(
        self, kernel: Kernel, handle: NvlinkHandle, rows: torch.Tensor, out: torch.Tensor, capacity: int
    ) -> None:
        """Arguments that all kernels of a combine are given."""
        args = kernel.args
        args.y, args.out = rows.data_ptr(), out.data_ptr()
        args.row_places, args.row_tokens = handle.row_places.data_ptr(), handle.row_tokens.data_ptr()
        args.slots, args.all_counts = handle.slots.data_ptr(), handle.all_counts.data_ptr()
        args.topk_ids, args.ids_are_int64 = handle.given_ids.data_ptr(), handle.given_ids.dtype == torch.int64
        args.num_tokens, args.max_tokens = handle.num_tokens, self.plan.max_tokens_per_rank
        args.capacity = capacity

    def _start_combine(
        self, kernel: Kernel, buffer: SymmetricBuffer, home: int, fields: dict[str, Field], blocks: int | None = None
    ) -> None:
        args = kernel.args
        args.chunk_flags = self.calls.control.regions.offset("chunk_flags")
        args.peers, args.home = buffer.peers.data_ptr(), home
        args.max_chunks = max_chunks(self.plan)
        self.calls.launch(kernel, fields, blocks=blocks)

    # -- gradients ------------------------------------------------------------------------------------------

    def combine_backward(
        self,
        handle: NvlinkHandle,
        grad: torch.Tensor,
        rows: torch.Tensor | None,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
        strategy: str = "dedup",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        unweighted = weights is None and rows is None
        if unweighted and handle.call.sizes == "exact" and self._has_places_again(handle):
            return self.dispatch_again(handle, grad, strategy).to(dtype, copy=True), None
        call = DispatchCall("token", 1, "bounded", self.plan.worst_case_rows("token"))
        tensors = DispatchInput(grad, None, handle.given_ids, None, False, False, False)
        arrived = self._start_dispatch(call, tensors, self.plan.worst_case_rows("token"))
        positions = self._positions(handle)
        if weights is not None:  # exact sizes have as many received weights as rows
            positions = positions[: len(weights)]
        assert arrived.rows is not None
        return routing.spread_gradient(arrived.rows, positions, handle.num_places, weights, rows, dtype)

    def dispatch_again(self, handle: NvlinkHandle, x: torch.Tensor, strategy: str = "dedup") -> torch.Tensor:
        call = handle.call
        if not self._has_places_again(handle):
            return self.combine_backward(handle, x, None, None, x.dtype)[0]
        call = DispatchCall("expert", call.alignment, "bounded", handle.capacity, strategy=strategy)
        again = DispatchInput(x, None, handle.given_ids, None, False, False, False)
        arrived = self._start_dispatch(call, again, handle.capacity, repeats=True)
        assert arrived.rows is not None
        return arrived.rows[: handle.num_places]

    def _has_places_again(self, handle: NvlinkHandle) -> bool:
        """Whether a dispatch by expert finds room for the rows."""
        return handle.call.layout == "expert" and not handle.by_token and handle.num_places <= self._room

    def row_weights(self, handle: NvlinkHandle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        rows = weights.new_zeros(num_places)
        self._move_weights(handle, weights, rows, num_places, weights.numel(), to_rows=True)
        return rows

    def route_gradients(self, handle: NvlinkHandle, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        routes = torch.empty_like(like)
        self._move_weights(handle, grad, routes, len(grad), routes.numel(), to_rows=False)
        return routes

    def _move_weights(
        self, handle: NvlinkHandle, source: torch.Tensor, target: torch.Tensor, places: int, routes: int, to_rows: bool
    ) -> None:
        # One of its own for each call: forward and backward may run in several threads.
        kernel = Kernel(RowWeightsVariant(plan=self.plan, to_rows=to_rows).spec(), self.ranks.device.index)
        args = kernel.args
        args.row_places, args.source_counts = handle.row_places.data_ptr(), handle.counts.source_counts.data_ptr()
        setattr(args, "from", source.data_ptr())
        args.to, args.routes, args.places = target.data_ptr(), routes, min(places, handle.capacity)
        kernel.launch(BLOCKS, torch.cuda.current_stream(self.ranks.device).cuda_stream)

    def _positions(self, handle: NvlinkHandle) -> torch.Tensor:
        """Position matrix of the received rows, one row for each that there may be; -1 beyond those there are."""
        received = torch.arange(self.plan.worst_case_rows("token"), device=handle.given_ids.device)
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
        grad = grad[: len(handle.local_ids)]
        rows = torch.where(handle.local_ids[: len(grad)] >= 0, grad, 0)
        width = home_weight_values(self.plan)
        rows = torch.nn.functional.pad(rows, (0, width - self.plan.top_k))
        fp32 = torch.float32
        kernel = self.calls.kernel(
            CombineVariant(plan=self.plan, layout=layout, y_dtype=fp32, wire_dtype=fp32, out_dtype=fp32, hidden=width)
        )
        out = rows.new_empty(handle.num_tokens, width)
        fields: dict[str, Field] = {"call": "combine", "dispatch number": handle.number, "mode": "gradient of weights"}
        capacity = handle.capacity if handle.call.layout == "token" else self.plan.worst_case_rows("token")
        self._describe(kernel, handle, rows, out, capacity)
        self._start_combine(kernel, self.calls.control, self.calls.control.regions.offset("home_weights"), fields)
        return out[:, : self.plan.top_k]

    def close(self) -> None:
        self.calls.close(list(self._buffers.values()))
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
