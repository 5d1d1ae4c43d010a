"""What a dispatch gives its caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from tokenloom.backends.base import DispatchOut, Handle
from tokenloom.plan import ROUTE_LAYOUTS, Plan

Layout = Literal["token", "expert", "rank", "slots"]

T = TypeVar("T")


@dataclass(frozen=True)
class Routed:
    """What a dispatch brought to this rank.

    L is experts per rank, M ``max_tokens_per_rank``, S ``capacity`` of layout "slots", W the number of ranks.

    Attributes:
        tokens: [rows, H] (layout "rank": [W, M, H], layout "slots": [L, S, H]); dtype of x, or float8_e4m3fn with
            ``to_fp8``.
        scales: float32 [rows, H / 128] of FP8 tokens ([W, M, H / 128], [L, S, H / 128]), else None. Layout "slots":
            as ``scale_layout`` says.
        topk_weights: [rows, K] ([W, M, K]) weight of each route, 0 where the id is -1; None for layouts "expert" and
            "slots", or without weights.
        expert_offsets: int32 [L + 1] padded starts of the experts' groups (layout "expert", else None), as
            ``grouped_mm(offs=routed.expert_offsets[1:])`` takes them.
        expert_counts: int32 [L], routes of each local expert, padding not counted.
        slot_ranges: int32 [L, W, 2], first place and number of places of each source rank among those of each local
            expert (layout "slots", else None).
        source_counts: int32 [W], (token, rank) rows from each source rank.
        num_rows: rows in use: int for exact sizes, int32 scalar on the device for bounded sizes.
        layout: "token", "expert", "rank" or "slots".
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_offsets: torch.Tensor | None
    expert_counts: torch.Tensor
    slot_ranges: torch.Tensor | None
    source_counts: torch.Tensor
    num_rows: int | torch.Tensor
    layout: Layout
    _ids_dtype: torch.dtype = field(repr=False)
    _handle: Handle = field(repr=False)
    _weights: torch.Tensor | None = field(repr=False)
    _owner: object = field(repr=False)

    @property
    def topk_ids(self) -> torch.Tensor | None:
        """[rows, K] ([W, M, K]) local expert of each route or -1, dtype of the ids given.

        None for layouts "expert" and "slots". int64 ids are converted when they are first read, since most callers
        never do.
        """
        if self.layout in ROUTE_LAYOUTS:
            return None
        found = self.__dict__.get("_topk_ids")
        if found is None:
            found = self._handle.topk_ids.to(self._ids_dtype)
            found = found.view(*self.tokens.shape[:-1], found.shape[-1])
            self.__dict__["_topk_ids"] = found
        return found


def make_routed(
    owner: object,
    plan: Plan,
    handle: Handle,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    ids_dtype: torch.dtype,
    out: DispatchOut | None = None,
) -> Routed:
    """The handle and rows of a dispatch as users see them.

    Args:
        owner: the communicator.
        rows: [places, H]. weights: received weights. Both may have a graph.
        ids_dtype: of the ids that the caller gave.
        out: tensors of the caller's own, which hold the results.
    """
    layout, counts = handle.options.layout, handle.counts
    places = [rows.shape[0]]
    if layout == "rank":
        places = [plan.num_ranks, plan.max_tokens_per_rank]
    elif layout == "slots":
        places = [plan.experts_per_rank, rows.shape[0] // plan.experts_per_rank]
    given = out or DispatchOut()

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(*places, tensor.shape[-1])

    by_route = layout in ROUTE_LAYOUTS
    scales, topk_weights = given.scales, given.topk_weights
    if scales is None:
        scales = handle.scales
        scales = scales if scales is None or layout == "slots" else shaped(scales)
    if topk_weights is None and weights is not None and not by_route:
        topk_weights = shaped(weights)

    def one_of(own: torch.Tensor | None, found: T) -> T | torch.Tensor:
        return found if own is None else own

    routed = Routed(
        tokens=shaped(rows) if given.tokens is None else given.tokens,
        scales=scales,
        topk_weights=topk_weights,
        expert_offsets=one_of(given.expert_offsets, counts.expert_offsets),
        expert_counts=one_of(given.expert_counts, counts.expert_counts),
        slot_ranges=one_of(given.slot_ranges, counts.slot_ranges),
        source_counts=one_of(given.source_counts, counts.source_counts),
        num_rows=one_of(given.num_rows, counts.num_rows),
        layout=layout,  # type: ignore[arg-type]
        _ids_dtype=ids_dtype,
        _handle=handle,
        _weights=weights if by_route else None,
        _owner=owner,
    )
    if given.topk_ids is not None:
        routed.__dict__["_topk_ids"] = given.topk_ids
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        _ = routed.topk_ids  # read later, it would be outside of the graph and never change
    return routed
