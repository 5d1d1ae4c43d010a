"""What a dispatch of backend "nvlink" leaves: where its rows lie, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenloom.backends.base import DispatchCall, RoutedCounts
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

BY_PLACE = ("rows", "scales")
BY_ROW = ("topk_ids", "topk_weights", "local_ids", "row_places", "row_tokens")
"""Tensors of a handle that lie in a receive region: a value for each place of the output, or for each received row."""


@dataclass
class NvlinkHandle:
    """A dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes:
        call, number, num_tokens, counts, topk_ids, topk_weights, scales: as in every backend.
        rows: [places, H], the output, until :meth:`NvlinkBackend.dispatch` has given it out: from then on only who
            wants it keeps it.
        num_places: of the output.
        capacity: places that a row may have; routes beyond it were dropped.
        given_ids: topk_ids as given, which routes gradients the same way.
        slots: int32 [T * W (+ T * K)]: which of the rows to rank r each token is, or -1.
        all_counts: int32 [W, W + E]: rows per rank and routes per expert of every source.
        local_ids, row_places: int32 [>= R, K]: local expert, and place, of each route of a received row.
        row_tokens: int32 [>= R]: the token at home that a received row is (layout "expert").
        counts_row: int32, num_rows, source_counts, expert_counts and expert_offsets as they lie side by side.
        by_token: whether rows came one per (token, rank) and were spread here, as on all ranks.
        host_offsets: expert_offsets on the host, with exact sizes in layout "expert".
        reused_after: calls of this backend's dispatch after which the region is overwritten; None for own tensors.
    """

    call: DispatchCall
    number: int
    num_tokens: int
    counts: RoutedCounts
    rows: torch.Tensor | None
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
    counts_row: torch.Tensor
    reused_after: int | None
    num_places: int = 0
    host_offsets: list[int] | None = None
    by_token: bool = False

    def cut_to_size(self, counts: list[int]) -> None:
        """Outputs get their exact size; ``counts``: counts_row, on the host."""
        num_ranks = len(self.counts.source_counts)
        num_rows, received = counts[0], sum(counts[1 : 1 + num_ranks])
        self.counts = replace(self.counts, num_rows=num_rows)
        if self.call.layout == "rank":
            return
        if self.call.layout == "expert":
            self.host_offsets = counts[1 + num_ranks + len(self.counts.expert_counts) :]
        for names, length in ((BY_PLACE, num_rows), (BY_ROW, received)):
            for name in names:
                tensor = getattr(self, name)
                if tensor is not None:
                    setattr(self, name, tensor[:length])

    def own_but_rows(self) -> None:
        """Tensors of its own instead of views of the region, but rows."""
        rows, self.rows = self.rows, None
        self.own()
        self.rows = rows

    def own(self, num_places: int | None = None) -> None:
        """Tensors of its own instead of views of the region; outputs have ``num_places`` places if given."""
        by_expert = self.call.layout == "expert"
        by_place = BY_PLACE if by_expert else (*BY_PLACE, "topk_ids", "topk_weights")
        for name in (*BY_PLACE, *BY_ROW):
            tensor = getattr(self, name)
            if tensor is None or (by_expert and name == "topk_ids"):
                continue
            own = tensor.clone()
            if num_places is not None and name in by_place and num_places > len(own):
                own = torch.cat([own, own.new_zeros(num_places - len(own), own.shape[1])])
            setattr(self, name, own)
        if by_expert:  # where nobody else is given them
            self.topk_ids = self.local_ids
        self.reused_after = None


class Region:
    """Views of a receive region of a buffer, at its full size. R is the most rows that may be received.

    Attributes:
        rows: [places, H]; scales: float32 [places, H / 128], of no use without FP8.
        local_ids, row_places: int32 [R, K]; weights: float32 [R, K]; row_tokens: int32 [R].
        number: 0 or 1.
        offsets: what kernels call each, and where it is in the first region; and from there to the second, if any.
        peers_address: of the buffer's addresses on all ranks.
    """

    def __init__(
        self, plan: Plan, buffer: SymmetricBuffer, number: int, num_regions: int, places: int, row_dtype: torch.dtype
    ) -> None:
        received = plan.worst_case_rows("token")

        def view(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return buffer.view(f"{name}{number}", dtype, shape)

        self.rows = view("rows", row_dtype, places, plan.hidden)
        self.scales = view("row_scales", torch.float32, places, plan.hidden // FP8_BLOCK)
        self.local_ids = view("row_ids", torch.int32, received, plan.top_k)
        self.weights = view("row_weights", torch.float32, received, plan.top_k)
        self.row_places = view("row_places", torch.int32, received, plan.top_k)
        self.row_tokens = view("row_tokens", torch.int32, received)
        names = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")
        offset = buffer.regions.offset
        self.offsets = [(name, offset(f"{name}0")) for name in names]
        self.offsets.append(("region_bytes", offset("rows1") - offset("rows0") if num_regions > 1 else 0))
        self.number = number
        self.peers_address = buffer.peers.data_ptr()
