"""Staged dispatches: rows arrive by source, and go from there to their places on this rank.

Bounded dispatches of small plans are staged, and all in layout "slots". Outputs are ordinary tensors, the caller's own
where it gives some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tokenloom.backends.base import DispatchInputs, DispatchOptions, RoutedCounts
from tokenloom.backends.handshake import dispatch_fields
from tokenloom.backends.nvlink.buffers import Buffers, address_of, aligned, is_eager, num_turns
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import HALVES, Half, Launcher
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS, DispatchVariant
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

PARTS_OF_A_ROW = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")
"""What arrives, as a region and the kernel's arguments name it."""


class StagedDispatch:
    """One staged dispatch, which is its own second half.

    Args:
        block_counts: device memory of the communicator, int32, for counts that blocks share.
        settle: called with the number of the call before ``receive`` returns.
    """

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        buffers: Buffers,
        block_counts: torch.Tensor,
        options: DispatchOptions,
        inputs: DispatchInputs,
        settle: Callable[[int], None],
    ) -> None:
        self._plan, self._launcher, self._block_counts = plan, launcher, block_counts
        self._options, self._inputs, self._settle = options, inputs, settle
        self._x, self._ids = aligned(inputs.x), aligned(inputs.topk_ids)
        self._row_dtype = torch.float8_e4m3fn if options.to_fp8 else inputs.x.dtype
        self._number = launcher.num_calls
        self._fields = {**dispatch_fields(self._number, options, inputs), **(HALVES if inputs.split else {})}
        self._buffer: SymmetricBuffer = buffers.staged(self._row_dtype, self._fields)
        capacity = plan.worst_case_rows("token") if options.capacity is None else options.capacity
        self._places = {"slots": plan.experts_per_rank * capacity, "rank": plan.worst_case_rows("rank")}.get(
            options.layout, capacity
        )
        self._capacity = capacity if options.layout == "slots" else self._places
        self._allocate()
        self._half = Half(self._epoch, self._fields) if inputs.split else None
        quantize = ""
        if options.to_fp8:
            quantize = "power of two" if options.power_of_two_scales else "any scale"
        self._variant = DispatchVariant(
            plan=plan,
            layout=options.layout,
            x_dtype=inputs.x.dtype,
            quantize=quantize,
            staged=True,
            eager=is_eager(plan),
            scale_layout=options.scale_layout,
            part="send" if inputs.split else "whole",
        )
        self._send()

    def receive(self) -> tuple[NvlinkHandle, torch.Tensor]:
        """(handle, rows [places, H])."""
        if self._half is not None:
            self._launcher.finish(replace(self._variant, part="receive"), self._half)
        self._settle(self._number)
        out = self._inputs.out
        if out is not None and out.topk_ids is not None and out.topk_ids.dtype != torch.int32:
            out.topk_ids.view(-1, self._plan.top_k).copy_(self._received_ids[: self._places])
        return self._handle(), self._rows

    # -- memory ---------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Results: the caller's tensors, and for the rest one piece of int32 and one of each other kind."""
        plan, options, out, device = self._plan, self._options, self._inputs.out, self._x.device
        by_place = options.layout in ("token", "rank")  # received rows lie where their rows do
        received = max(plan.worst_case_rows("rank"), self._places if by_place else 0)
        local = plan.experts_per_rank
        slots = len(self._x) * (plan.num_ranks + plan.top_k)
        counts = plan.num_ranks * (plan.num_ranks + plan.num_experts)
        of_routes = received * plan.top_k
        sizes = [1, 1, plan.num_ranks, local, local + 1, 2 * plan.num_experts]
        sizes += [counts, received, of_routes, of_routes, slots]
        own = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        parts = torch.split_with_sizes(own, sizes)
        self._epoch, num_rows, source_counts, expert_counts, expert_offsets, ranges, *others = parts
        self._all_counts, self._tokens, ids, route_places, self._slots = others
        self._route_places = route_places.view(-1, plan.top_k)

        def given(name: str, made: torch.Tensor) -> torch.Tensor:
            tensor = None if out is None else getattr(out, name)
            return made if tensor is None else tensor

        self._num_rows = given("num_rows", num_rows)
        self._source_counts = given("source_counts", source_counts)
        self._expert_counts = given("expert_counts", expert_counts)
        self._expert_offsets = given("expert_offsets", expert_offsets)
        self._slot_ranges = given("slot_ranges", ranges)
        if out is not None and out.topk_ids is not None and out.topk_ids.dtype == torch.int32:
            ids = out.topk_ids
        self._received_ids = ids.view(-1, plan.top_k)
        self._weights = None
        if self._inputs.topk_weights is not None:
            weights = None if out is None else out.topk_weights
            if weights is None:
                weights = torch.empty(received, plan.top_k, dtype=torch.float32, device=device)
            self._weights = weights.view(-1, plan.top_k)
        rows = None if out is None else out.tokens
        if rows is None:
            rows = torch.empty(self._places, plan.hidden, dtype=self._row_dtype, device=device)
        self._rows = rows.view(self._places, plan.hidden)
        self._scales = None
        if self._inputs.scales is not None or options.to_fp8:
            self._scales = out.scales if out is not None and out.scales is not None else self._new_scales()

    def _new_scales(self) -> torch.Tensor:
        plan, device = self._plan, self._x.device
        blocks = plan.hidden // FP8_BLOCK
        if self._options.scale_layout == "rows":
            return torch.empty(self._places, blocks, dtype=torch.float32, device=device)
        words, dtype = blocks, torch.float32
        if self._options.scale_layout == "packed":
            words, dtype = -(-blocks // 4), torch.int32
        return torch.empty(plan.experts_per_rank, words, self._capacity, dtype=dtype, device=device).transpose(1, 2)

    def _handle(self) -> NvlinkHandle:
        plan, options, layout = self._plan, self._options, self._options.layout
        scales = self._scales
        if scales is not None and layout == "slots" and options.scale_layout == "rows":
            scales = scales.view(plan.experts_per_rank, -1, scales.shape[-1])
        counts = RoutedCounts(
            self._num_rows.view(()),
            self._source_counts,
            self._expert_counts,
            self._expert_offsets if layout == "expert" else None,
            self._slot_ranges.view(plan.experts_per_rank, plan.num_ranks, 2) if layout == "slots" else None,
        )
        return NvlinkHandle(
            options=options,
            number=self._number,
            num_tokens=len(self._x),
            num_places=self._places,
            counts=counts,
            scales=scales,
            capacity=self._places,
            given_ids=self._ids,
            slots=self._slots,
            all_counts=self._all_counts.view(plan.num_ranks, -1),
            local_ids=self._received_ids,
            row_places=self._route_places,
            weights=self._weights,
            row_tokens=self._tokens,
            counts_row=self._num_rows,
            reused_after=None,
            rank=self._launcher.ranks.rank,
            max_tokens=plan.max_tokens_per_rank,
        )

    # -- kernels --------------------------------------------------------------------------------------------

    def _send(self) -> None:
        plan, options, inputs, launcher = self._plan, self._options, self._inputs, self._launcher
        kernel = launcher.kernel(self._variant)
        args, layout, control = kernel.args, self._buffer.layout, launcher.control.layout
        args.x, args.scales = self._x.data_ptr(), address_of(inputs.scales)
        args.topk_ids, args.topk_weights = self._ids.data_ptr(), address_of(inputs.topk_weights)
        args.done_flags, args.row_flags = control.offset("done_flags"), control.offset("row_flags")
        args.peers = self._buffer.peers.data_ptr()
        for name in PARTS_OF_A_ROW:
            setattr(args, name, layout.offset(f"{name}0"))
        args.turns, args.turn_bytes = num_turns(plan), layout.offset("rows1") - layout.offset("rows0")
        args.block_counts = self._block_counts.data_ptr()
        args.slots_found = args.block_counts + 4 * (len(self._block_counts) - MAX_BLOCKS)
        args.slots, args.all_counts = self._slots.data_ptr(), self._all_counts.data_ptr()
        args.num_rows, args.source_counts = self._num_rows.data_ptr(), self._source_counts.data_ptr()
        args.expert_counts, args.expert_offsets = self._expert_counts.data_ptr(), self._expert_offsets.data_ptr()
        args.slot_ranges = self._slot_ranges.data_ptr()
        args.out_rows, args.out_scales = self._rows.data_ptr(), address_of(self._scales)
        args.out_ids, args.out_weights = self._received_ids.data_ptr(), address_of(self._weights)
        args.out_places, args.out_tokens = self._route_places.data_ptr(), self._tokens.data_ptr()
        args.num_tokens, args.max_tokens = len(self._x), plan.max_tokens_per_rank
        args.capacity = self._capacity
        args.alignment, args.ids_are_int64 = options.alignment, self._ids.dtype == torch.int64
        args.stop_on_overflow, args.host_counts = False, 0
        args.send_blocks = launcher.num_sms
        launcher.launch(kernel, self._fields, begins=self._half)
