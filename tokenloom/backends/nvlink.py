"""Backend "nvlink": our own kernels over the peers' memory, for one NVLink domain of Hopper GPUs.

A dispatch is one kernel, a combine is one kernel; neither asks the host anything. Gradients reuse them: rows of a
gradient are dispatched, and partial sums combined, by the same two kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenloom.backends.base import CombineCall, DispatchCall, DispatchInput, RoutedCounts
from tokenloom.group import RankGroup
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.combine.launch import combine_spec, max_chunks
from tokenloom.kernels.dispatch.launch import MAX_BLOCKS, dispatch_spec
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.symmetric import FaultFlag, Regions, SymmetricBuffer

DEFAULT_SMS = 16
EXPERT_ROOM = 1.25
"""Rows of layout "expert" that a region has room for, over the mean of an even routing."""


def regions_of(plan: Plan, value_bytes: int) -> Regions:
    """The symmetric buffer of a communicator whose payload has ``value_bytes`` bytes a value."""
    received = plan.worst_case_rows("token")
    rows = region_rows(plan)
    counts = plan.num_ranks + plan.num_experts
    sizes = [
        ("counts_flags", 4 * plan.num_ranks),
        ("done_flags", 4 * plan.num_ranks * MAX_BLOCKS),
        ("ready_flags", 4 * plan.num_ranks),
        ("chunk_flags", 4 * plan.num_ranks * max_chunks(plan)),
        ("counts", 4 * 2 * plan.num_ranks * counts),
    ]
    for i in (0, 1):
        sizes += [
            (f"rows{i}", rows * plan.hidden * value_bytes),
            (f"row_scales{i}", rows * (plan.hidden // FP8_BLOCK) * 4),
            (f"row_ids{i}", received * plan.top_k * 4),
            (f"row_weights{i}", received * plan.top_k * 4),
            (f"row_places{i}", received * plan.top_k * 4),
        ]
    home_rows = plan.max_tokens_per_rank * min(plan.num_ranks, plan.top_k)
    return Regions.of([*sizes, ("home", home_rows * plan.hidden * value_bytes)])


def region_rows(plan: Plan) -> int:
    """Rows of one receive region: the worst case of layouts "token" and "rank", and room for layout "expert"."""
    even = int(plan.max_tokens_per_rank * plan.top_k * EXPERT_ROOM) + plan.experts_per_rank * 128
    return max(plan.worst_case_rows("token"), min(even, plan.worst_case_rows("expert", 128)))


@dataclass(frozen=True)
class NvlinkHandle:
    """A dispatch as this rank remembers it.

    Attributes:
        call, number, num_tokens: as in every backend.
        counts: sizes of the output.
        rows: [places, H], the output.
        scales, topk_ids, topk_weights: beside the rows, as Handle says.
        ids: topk_ids as given, for the dispatch of a gradient.
        slots: int32 [T * W (+ T * K)]: which of the rows to rank r a token is.
        all_counts: int32 [W, W + E].
        row_ids, row_places: int32 [W * M, K]: local experts, and places, of each received row's routes.
    """

    call: DispatchCall
    number: int
    num_tokens: int
    counts: RoutedCounts
    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    ids: torch.Tensor
    slots: torch.Tensor
    all_counts: torch.Tensor
    row_ids: torch.Tensor
    row_places: torch.Tensor
    capacity: int


class _Domain:
    """A symmetric buffer for payloads of one width, with its epochs and kernels."""

    def __init__(self, plan: Plan, ranks: RankGroup, value_bytes: int) -> None:
        self.buffer = SymmetricBuffer(regions_of(plan, value_bytes), ranks)
        self.state = torch.zeros(3, dtype=torch.int32, device=ranks.device)
        self.dispatch_epoch = self.state[0:].data_ptr()
        self.combine_epoch = self.state[1:].data_ptr()
        self.blocks_out = self.state[2:].data_ptr()
        self.num_dispatches = 0


class NvlinkBackend:
    """Dispatch and combine by kernels that write the peers' memory."""

    name = "nvlink"

    def __init__(self, plan: Plan, ranks: RankGroup, num_sms: int = DEFAULT_SMS) -> None:
        self.plan = plan
        self.ranks = ranks
        self.num_sms = num_sms
        self.push_sms = max(1, num_sms // 2)
        self._domains: dict[int, _Domain] = {}
        self._kernels: dict[Any, Kernel] = {}
        self._fault = FaultFlag(ranks.device, ranks.rank)
        self._needed = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._num_dispatches = 0

    def _domain(self, value_bytes: int) -> _Domain:
        value_bytes = max(value_bytes, 2)
        if value_bytes not in self._domains:
            self._domains[value_bytes] = _Domain(self.plan, self.ranks, value_bytes)
        return self._domains[value_bytes]

    def _kernel(self, make: Any, *variant: Any) -> Kernel:
        key = (make, *variant)
        if key not in self._kernels:
            self._kernels[key] = Kernel(*make(self.plan, *variant))
        return self._kernels[key]

    # -- dispatch -------------------------------------------------------------------------------------------

    def report_fault(self, call: str, fault: Exception) -> None:
        """The other ranks find out at their deadline."""

    def open_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> NvlinkHandle:
        exact = call.sizes == "exact"
        room = region_rows(self.plan)
        capacity = min(call.capacity or room, room)
        return self._launch_dispatch(call, tensors, capacity, stop_on_overflow=exact)

    def _launch_dispatch(
        self, call: DispatchCall, tensors: DispatchInput, capacity: int, *, stop_on_overflow: bool
    ) -> NvlinkHandle:
        plan, x = self.plan, tensors.x
        domain = self._domain(x.element_size())
        region = domain.num_dispatches % 2
        domain.num_dispatches += 1
        num_tokens, num_ranks, top_k = x.shape[0], plan.num_ranks, plan.top_k
        local = plan.experts_per_rank
        int32: dict[str, Any] = {"dtype": torch.int32, "device": x.device}
        slots = torch.empty(max(1, num_tokens * (num_ranks + top_k)), **int32)
        all_counts = torch.empty(num_ranks, num_ranks + plan.num_experts, **int32)
        sizes = torch.empty(1 + num_ranks + 2 * local + 1, **int32)
        scales_per_row = 0 if tensors.scales is None else plan.scales_per_token
        row_bytes = plan.hidden * x.element_size()
        kernel = self._kernel(dispatch_spec, call.layout, row_bytes, scales_per_row)
        offset = domain.buffer.regions.offset
        args = kernel.args
        args.x = x.data_ptr()
        args.scales = 0 if tensors.scales is None else tensors.scales.data_ptr()
        args.topk_ids = tensors.topk_ids.data_ptr()
        args.topk_weights = 0 if tensors.topk_weights is None else tensors.topk_weights.data_ptr()
        args.peers = domain.buffer.peers.data_ptr()
        for name in ("counts_flags", "done_flags", "counts"):
            setattr(args, name, offset(name))
        for name in ("rows", "row_scales", "row_ids", "row_weights", "row_places"):
            setattr(args, name, offset(f"{name}{region}"))
        args.slots, args.all_counts = slots.data_ptr(), all_counts.data_ptr()
        args.num_rows = sizes.data_ptr()
        args.source_counts = args.num_rows + 4
        args.expert_counts = args.source_counts + 4 * num_ranks
        args.expert_offsets = args.expert_counts + 4 * local
        args.needed_rows = self._needed.data_ptr() + 4 * region
        args.epoch = domain.dispatch_epoch
        self._set_deadline(args)
        args.rank, args.num_tokens, args.max_tokens = self.ranks.rank, num_tokens, plan.max_tokens_per_rank
        args.capacity, args.alignment = capacity, call.alignment
        args.ids_are_int64 = tensors.topk_ids.dtype == torch.int64
        args.stop_on_overflow = stop_on_overflow
        kernel.launch(self.num_sms, torch.cuda.current_stream(x.device).cuda_stream)

        by_expert = call.layout == "expert"
        places = plan.worst_case_rows("rank") if call.layout == "rank" else capacity
        received = plan.worst_case_rows("token")
        num_rows: int | torch.Tensor = sizes[0]
        if call.sizes == "exact":
            num_rows = int(sizes[0])
            self._raise_if_broken()
            if call.layout != "rank":
                places = num_rows
        offsets = sizes[1 + num_ranks + local :]
        view = domain.buffer.view
        row_weights = None
        if tensors.topk_weights is not None:
            row_weights = view(f"row_weights{region}", torch.float32, (received, top_k))
        row_ids = view(f"row_ids{region}", torch.int32, (received, top_k))
        return NvlinkHandle(
            call=call,
            number=self._num_dispatches,
            num_tokens=num_tokens,
            counts=RoutedCounts(
                num_rows=num_rows,
                source_counts=sizes[1 : 1 + num_ranks],
                expert_counts=sizes[1 + num_ranks : 1 + num_ranks + local],
                expert_offsets=offsets if by_expert else None,
            ),
            rows=view(f"rows{region}", x.dtype, (places, plan.hidden)),
            scales=None
            if scales_per_row == 0
            else view(f"row_scales{region}", torch.float32, (places, scales_per_row)),
            topk_ids=row_ids[: received if by_expert else places],
            topk_weights=row_weights if by_expert or row_weights is None else row_weights[:places],
            ids=tensors.topk_ids,
            slots=slots,
            all_counts=all_counts,
            row_ids=row_ids,
            row_places=view(f"row_places{region}", torch.int32, (received, top_k)),
            capacity=places if call.layout == "rank" else capacity,
        )

    def _set_deadline(self, args: Any) -> None:
        args.fault = self._fault.record_address
        args.fault_claimed = self._fault.claimed.data_ptr()
        args.timeout_ns = int(self.ranks.timeout_s * 1e9)

    def _raise_if_broken(self) -> None:
        fault = self._fault.error()
        if fault is not None:
            raise fault

    def dispatch(self, handle: NvlinkHandle, x: torch.Tensor) -> torch.Tensor:
        return handle.rows

    # -- combine --------------------------------------------------------------------------------------------

    def open_combine(self, handle: NvlinkHandle, call: CombineCall) -> None:
        self._raise_if_broken()

    def combine(
        self, handle: NvlinkHandle, rows: torch.Tensor, weights: torch.Tensor | None, call: CombineCall
    ) -> torch.Tensor:
        plan = self.plan
        domain = self._domain(call.wire_dtype.itemsize)
        kernel = self._kernel(combine_spec, handle.call.layout, rows.dtype, call.wire_dtype, call.out_dtype)
        out = torch.empty(handle.num_tokens, plan.hidden, dtype=call.out_dtype, device=rows.device)
        offset = domain.buffer.regions.offset
        args = kernel.args
        args.y = rows.data_ptr()
        args.row_places = handle.row_places.data_ptr()
        args.row_weights = 0 if weights is None else weights.data_ptr()
        args.slots, args.all_counts = handle.slots.data_ptr(), handle.all_counts.data_ptr()
        args.out = out.data_ptr()
        args.peers = domain.buffer.peers.data_ptr()
        for name in ("ready_flags", "chunk_flags", "home"):
            setattr(args, name, offset(name))
        args.epoch, args.blocks_out = domain.combine_epoch, domain.blocks_out
        self._set_deadline(args)
        args.rank, args.num_tokens, args.max_tokens = self.ranks.rank, handle.num_tokens, plan.max_tokens_per_rank
        args.capacity, args.push_blocks = handle.capacity, self.push_sms
        kernel.launch(self.num_sms, torch.cuda.current_stream(rows.device).cuda_stream)
        return out
