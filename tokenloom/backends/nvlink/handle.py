"""A dispatch as its rank remembers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tokenloom.backends.base import DispatchOptions, DispatchOut, RoutedCounts
from tokenloom.backends.nvlink import places
from tokenloom.backends.nvlink.buffers import version_of
from tokenloom.errors import InvalidArgument

BY_ROW = ("weights", "local_ids", "row_places", "row_tokens")
"""Tensors of a handle that lie in a receive buffer, with a value for each received row."""


@dataclass
class NvlinkHandle:
    """A dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes:
        options, number, num_tokens, num_places, counts, scales: as of every handle.
        capacity: places that a row may have; routes beyond it were dropped.
        given_ids: topk_ids as given, which routes gradients the same way.
        ids_version: how often they had been changed in place by then; None where torch does not count.
        slots: int32 [T * W (+ T * K)]: which of the rows to rank r each token is, or -1.
        all_counts: int32 [W, W + E]: rows per rank and routes per expert of every source.
        local_ids, row_places: int32 [>= R, K]: local expert, and place, of each route of a received row.
        weights: float32 [>= R, K] received weights, or None.
        row_tokens: int32 [>= R]: the token at home that a received row is (layouts "expert" and "slots").
        counts_row: int32, num_rows, source_counts, expert_counts and expert_offsets as they lie side by side.
        by_token: rows came one per (token, rank) and were spread here, on all ranks alike.
        host_offsets: expert_offsets on the host, with exact sizes in layout "expert".
        finish: launches the receiving half, where it has not been launched yet.
        reused_after: number of the dispatch after which the receive buffer is overwritten; None for own tensors.
    """

    options: DispatchOptions
    number: int
    num_tokens: int
    num_places: int
    counts: RoutedCounts
    scales: torch.Tensor | None
    capacity: int
    given_ids: torch.Tensor
    slots: torch.Tensor
    all_counts: torch.Tensor
    local_ids: torch.Tensor
    row_places: torch.Tensor
    weights: torch.Tensor | None
    row_tokens: torch.Tensor
    counts_row: torch.Tensor
    reused_after: int | None
    rank: int
    max_tokens: int
    ids_version: int | None = None
    host_offsets: list[int] | None = None
    by_token: bool = False
    finish: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.ids_version = version_of(self.given_ids)

    @property
    def by_route(self) -> bool:
        """Whether each route has a place of its own."""
        return self.options.layout in ("expert", "slots")

    @property
    def topk_ids(self) -> torch.Tensor:
        return self.local_ids if self.by_route else self.local_ids[: self.num_places]

    @property
    def topk_weights(self) -> torch.Tensor | None:
        if self.weights is None or self.by_route:
            return self.weights
        return self.weights[: self.num_places]

    def ids(self) -> torch.Tensor:
        """The ids that were given.

        Raises:
            InvalidArgument: they were changed in place since, so routes would go elsewhere than their rows did.
        """
        if version_of(self.given_ids) != self.ids_version:
            raise InvalidArgument(
                "topk_ids was changed in place after its dispatch, whose routes are still needed; dispatch a clone"
            )
        return self.given_ids

    def positions(self) -> torch.Tensor:
        received = self.all_counts[:, self.rank].to(torch.int64)
        layout = "expert" if self.by_route else self.options.layout
        where = (received, self.max_tokens, self.capacity, self.given_ids.shape[1])
        return places.of_received_rows(layout, self.row_places, *where)

    def cut_to_size(self, counts: list[int], rows: torch.Tensor) -> torch.Tensor:
        """Give outputs their exact size; the rows that there are.

        Args:
            counts: ``counts_row``, on the host.
            rows: [places, H].
        """
        num_ranks = len(self.counts.source_counts)
        num_rows, received = counts[0], sum(counts[1 : 1 + num_ranks])
        self.counts = replace(self.counts, num_rows=num_rows)
        if self.options.layout == "rank":
            return rows
        if self.options.layout == "expert":
            self.host_offsets = counts[1 + num_ranks + len(self.counts.expert_counts) :]
        self.num_places = num_rows
        if self.scales is not None:
            self.scales = self.scales[:num_rows]
        for name in BY_ROW:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[:received])
        return rows[:num_rows]

    def own(self, num_places: int | None = None) -> None:
        """Copy what views the receive buffer; outputs get ``num_places`` places if given."""
        if num_places is not None:
            self.num_places = max(num_places, self.num_places)
        if self.scales is not None:
            self.scales = places.copied(self.scales, self.num_places)
        by_place = () if self.options.layout == "expert" else ("local_ids", "weights")
        for name in BY_ROW:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, places.copied(tensor, self.num_places if name in by_place else 0))
        self.reused_after = None

    def write_to(self, out: DispatchOut, rows: torch.Tensor) -> torch.Tensor:
        """Copy results to the caller's tensors, where it gives some. Returns the rows where they are then."""
        counts = self.counts
        results = {
            "scales": self.scales,
            "topk_ids": self.topk_ids,
            "topk_weights": self.topk_weights,
            "num_rows": counts.num_rows,
            "source_counts": counts.source_counts,
            "expert_counts": counts.expert_counts,
            "expert_offsets": counts.expert_offsets,
        }
        for name, value in results.items():
            target = getattr(out, name)
            if target is not None:
                assert isinstance(value, torch.Tensor), f"layout {self.options.layout} has no {name}"
                target.copy_(value.view(target.shape))
        if out.tokens is None:
            return rows
        target = out.tokens.view(rows.shape)
        target.view(torch.uint8).copy_(rows.view(torch.uint8))
        return target
