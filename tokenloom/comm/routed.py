"""What a dispatch gives its caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from tokenloom.backends.base import Handle
from tokenloom.plan import Plan

Layout = Literal["token", "expert", "rank"]


@dataclass(frozen=True)
class Routed:
    """What a dispatch brought to this rank. L is experts per rank, M ``max_tokens_per_rank``, W the number of ranks.

    Attributes:
        tokens: [rows, H] (layout "rank": [W, M, H]); dtype of x, or float8_e4m3fn with ``to_fp8``.
        scales: float32 [rows, H / 128] of FP8 tokens ([W, M, H / 128]), else None.
        topk_weights: [rows, K] ([W, M, K]) weight of each route, 0 where the id is -1; None for layout "expert" or
            without weights.
        expert_offsets: int32 [L + 1] padded starts of the experts' groups (layout "expert", else None), as
            ``grouped_mm(offs=routed.expert_offsets[1:])`` takes them.
        expert_counts: int32 [L], routes of each local expert, padding not counted.
        source_counts: int32 [W], (token, rank) rows from each source rank.
        num_rows: rows in use: int for exact sizes, int32 scalar on the device for bounded sizes.
        layout: "token", "expert" or "rank".
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_offsets: torch.Tensor | None
    expert_counts: torch.Tensor
    source_counts: torch.Tensor
    num_rows: int | torch.Tensor
    layout: Layout
    _ids_dtype: torch.dtype = field(repr=False)
    _handle: Handle = field(repr=False)
    _weights: torch.Tensor | None = field(repr=False)
    _owner: object = field(repr=False)

    @property
    def topk_ids(self) -> torch.Tensor | None:
        """[rows, K] ([W, M, K]) local expert of each route or -1, dtype of the ids given; None for layout "expert".

        int64 ids are converted when they are first read, since most callers never do.
        """
        if self.layout == "expert":
            return None
        found = self.__dict__.get("_topk_ids")
        if found is None:
            found = self._handle.topk_ids.to(self._ids_dtype)
            found = found.view(*self.tokens.shape[:-1], found.shape[-1])
            self.__dict__["_topk_ids"] = found
        return found


def make_routed(
    owner: object, plan: Plan, handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None, ids_dtype: torch.dtype
) -> Routed:
    """The handle and rows of a dispatch as users see them.

    Args:
        owner: the communicator.
        rows: [places, H]. weights: received weights. Both may have a graph.
        ids_dtype: of the ids that the caller gave.
    """
    layout, counts = handle.options.layout, handle.counts
    places = [plan.num_ranks, plan.max_tokens_per_rank] if layout == "rank" else [rows.shape[0]]

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(*places, tensor.shape[-1])

    by_expert, scales = layout == "expert", handle.scales
    routed = Routed(
        tokens=shaped(rows),
        scales=None if scales is None else shaped(scales),
        topk_weights=None if weights is None or by_expert else shaped(weights),
        expert_offsets=counts.expert_offsets,
        expert_counts=counts.expert_counts,
        source_counts=counts.source_counts,
        num_rows=counts.num_rows,
        layout=layout,  # type: ignore[arg-type]
        _ids_dtype=ids_dtype,
        _handle=handle,
        _weights=weights if by_expert else None,
        _owner=owner,
    )
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        _ = routed.topk_ids  # read later, it would be outside of the graph and never change
    return routed
