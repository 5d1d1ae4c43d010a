"""What backend "collective" remembers of a dispatch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenloom.backends.seam import DispatchOptions, DispatchOut, RoutedCounts
from tokenloom.ops import routing
from tokenloom.ops.quant.scale_layouts import lay_out_scales
from tokenloom.plan import ROUTE_LAYOUTS


@dataclass(frozen=True)
class Sizes:
    """Who sends how much to whom in one dispatch, and back in its combine.

    Attributes:
        send: the rows that this rank sends.
        sent, received: (token, rank) rows to and from each rank.
        routes_sent, routes_received: routes to and from each rank.
        route_counts: routes from each rank to each local expert.
        legs: what the exchange has to know besides.
    """

    send: routing.SendMap
    sent: list[int]
    received: list[int]
    routes_sent: list[int]
    routes_received: list[int]
    route_counts: list[list[int]]
    legs: Any = None

    def without(self, sources: frozenset[int]) -> Sizes:
        """The same, but nothing came from these ranks."""
        if not sources:
            return self

        def kept(counts: list[int]) -> list[int]:
            return [0 if source in sources else count for source, count in enumerate(counts)]

        counts = [[0] * len(each) if source in sources else each for source, each in enumerate(self.route_counts)]
        received, routes = kept(self.received), kept(self.routes_received)
        return replace(self, received=received, routes_received=routes, route_counts=counts)


def rows_without(ranks: frozenset[int], counts: list[int], rows: torch.Tensor) -> torch.Tensor:
    """Contiguous rows, of which the first ``counts[0]`` came from rank 0, and so on: without those of some ranks."""
    if not ranks:
        return rows
    parts = rows.view(torch.uint8).split(counts)  # bytes, since FP8 cannot be concatenated
    return torch.cat([part for rank, part in enumerate(parts) if rank not in ranks]).view(rows.dtype)


def terms_without(ranks: frozenset[int], counts: list[int], positions: torch.Tensor) -> torch.Tensor:
    """A position matrix of such rows: with -1 for those of some ranks."""
    if not ranks:
        return positions
    gone = [rank in ranks for rank, count in enumerate(counts) for _ in range(count)]
    gone.append(False)  # which a position of -1 finds
    return torch.where(torch.tensor(gone, device=positions.device)[positions], -1, positions)


@dataclass(frozen=True)
class CollectiveHandle:
    """A dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes:
        options, number, num_tokens: as of every handle.
        sizes: who sends how much to whom.
        local_ids: int32 [R, K].
        weights: [R, K], zero where there is no route, or None.
        received_scales: float32 [R, H / 128] for FP8, else None.
        placement: where the received rows lie in the output.
        row_tokens: int32 [R], which token of its source each received row is.
        masked: as of every handle.
    """

    options: DispatchOptions
    number: int
    num_tokens: int
    sizes: Sizes
    local_ids: torch.Tensor
    weights: torch.Tensor | None
    received_scales: torch.Tensor | None
    placement: routing.Placement
    row_tokens: torch.Tensor
    masked: frozenset[int] = frozenset()

    @property
    def num_places(self) -> int:
        return self.placement.num_places

    @property
    def host_counts(self) -> list[int] | None:
        return self.placement.expert_counts

    @property
    def host_offsets(self) -> list[int] | None:
        return self.placement.offsets

    @property
    def counts(self) -> RoutedCounts:
        place = self.placement

        def int32(values: int | list[int] | list[list[tuple[int, int]]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.local_ids.device)

        return RoutedCounts(
            num_rows=place.num_rows if self.options.sizes == "exact" else int32(place.num_rows),
            source_counts=int32(place.source_counts),
            expert_counts=int32(place.expert_counts),
            expert_offsets=None if place.offsets is None else int32(place.offsets),
            slot_ranges=None if place.slot_ranges is None else int32(place.slot_ranges),
        )

    @property
    def topk_ids(self) -> torch.Tensor:
        return self.place(self.local_ids + 1) - 1  # no row, no route: -1

    @property
    def topk_weights(self) -> torch.Tensor | None:
        if self.weights is None or self.options.layout in ROUTE_LAYOUTS:
            return self.weights
        return self.place(self.weights)

    @property
    def scales(self) -> torch.Tensor | None:
        if self.received_scales is None:
            return None
        scales = self.place(self.received_scales)
        if self.options.layout != "slots":
            return scales
        return lay_out_scales(scales.unflatten(0, (-1, self.options.capacity)), self.options.scale_layout)

    def let_go(self) -> None:
        pass  # they lie beside what combine needs

    def use_ids(self, ids: torch.Tensor) -> None:
        pass  # those that were given are not read again

    def ids(self) -> torch.Tensor:
        return routing.ids_of(self.sizes.send, self.num_tokens, len(self.sizes.route_counts[0]))

    def positions(self) -> torch.Tensor:
        return self.placement.positions

    def place(self, rows: torch.Tensor) -> torch.Tensor:
        """Received rows [R, h] -> their places in the output [places, h], zero where no row lies."""
        if self.options.layout == "token" and len(rows) == self.placement.num_places:
            return rows  # the order of arrival is the order of the layout
        return routing.scatter_rows(rows, self.placement.positions, self.placement.num_places)

    def write_to(self, out: DispatchOut, rows: torch.Tensor) -> None:
        """Fill the caller's tensors with the results of the dispatch, of which rows are [places, H]."""
        counts = vars(self.counts)
        for name, tensor in vars(out).items():
            if tensor is not None:
                value = rows if name == "tokens" else counts[name] if name in counts else getattr(self, name)
                tensor.copy_(value.view(tensor.shape))
