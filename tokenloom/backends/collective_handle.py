"""Handle of a dispatch by backend "collective"."""

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
    """Sizes of all transfers of one dispatch, and of its combine back.

    Attributes:
        send: rows that this rank sends.
        sent, received: (token, rank) rows to and from each rank.
        routes_sent, routes_received: routes to and from each rank.
        route_counts: routes from each rank to each local expert.
        legs: further sizes, which only the exchange reads.
    """

    send: routing.SendMap
    sent: list[int]
    received: list[int]
    routes_sent: list[int]
    routes_received: list[int]
    route_counts: list[list[int]]
    legs: Any = None

    def without(self, sources: frozenset[int]) -> Sizes:
        """Copy the sizes, with nothing received from these ranks."""
        if not sources:
            return self

        def kept(counts: list[int]) -> list[int]:
            return [0 if source in sources else count for source, count in enumerate(counts)]

        counts = [[0] * len(each) if source in sources else each for source, each in enumerate(self.route_counts)]
        received, routes = kept(self.received), kept(self.routes_received)
        return replace(self, received=received, routes_received=routes, route_counts=counts)


def rows_without(ranks: frozenset[int], counts: list[int], rows: torch.Tensor) -> torch.Tensor:
    """Leave out the rows of some ranks. The first ``counts[0]`` rows came from rank 0, and so on."""
    if not ranks:
        return rows
    parts = rows.view(torch.uint8).split(counts)  # bytes, since FP8 cannot be concatenated
    return torch.cat([part for rank, part in enumerate(parts) if rank not in ranks]).view(rows.dtype)


def terms_without(ranks: frozenset[int], counts: list[int], positions: torch.Tensor) -> torch.Tensor:
    """Put -1 for the rows of some ranks in a position matrix; rows lie as in :func:`rows_without`."""
    if not ranks:
        return positions
    gone = [rank in ranks for rank, count in enumerate(counts) for _ in range(count)]
    gone.append(False)  # a position of -1 reads this one
    return torch.where(torch.tensor(gone, device=positions.device)[positions], -1, positions)


@dataclass(frozen=True)
class CollectiveHandle:
    """Dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes not listed are those of :class:`tokenloom.backends.seam.Handle`.

    Attributes:
        local_ids: int32 [R, K].
        weights: [R, K], zero where there is no route, or None.
        received_scales: float32 [R, n] for FP8, n H / 128 or by recipe "row" 1; else None.
        placement: places of the received rows in the output.
        row_tokens: int32 [R], token of each received row on its source rank.
    """

    options: DispatchOptions
    number: int
    num_tokens: int
    sizes: Sizes
    local_ids: torch.Tensor
    weights: torch.Tensor | None
    received_scales: torch.Tensor | None
    placement: routing.RowPlaces
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
        placement = self.placement

        def int32(values: int | list[int] | list[list[tuple[int, int]]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.local_ids.device)

        return RoutedCounts(
            num_rows=placement.num_rows if self.options.sizes == "exact" else int32(placement.num_rows),
            source_counts=int32(placement.source_counts),
            expert_counts=int32(placement.expert_counts),
            expert_offsets=None if placement.offsets is None else int32(placement.offsets),
            slot_ranges=None if placement.slot_ranges is None else int32(placement.slot_ranges),
        )

    @property
    def topk_ids(self) -> torch.Tensor:
        return self.place(self.local_ids + 1) - 1  # places without a row get -1

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
        pass  # scales lie beside what combine needs

    def use_ids(self, ids: torch.Tensor) -> None:
        pass  # the handle has the ids of the dispatch, and never reads the caller's

    def ids(self) -> torch.Tensor:
        return routing.ids_of(self.sizes.send, self.num_tokens, len(self.sizes.route_counts[0]))

    def positions(self) -> torch.Tensor:
        return self.placement.positions

    def row_weights(self, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        return routing.row_values(weights, self.placement.positions, num_places)

    def route_gradients(self, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return routing.route_values(grad, self.placement.positions).to(like.dtype)

    def place(self, rows: torch.Tensor) -> torch.Tensor:
        """Put received rows [R, h] at their places in the output [places, h], which is zero elsewhere."""
        if self.options.layout == "token" and len(rows) == self.placement.num_places:
            return rows  # the order of arrival is the order of the layout
        return routing.scatter_rows(rows, self.placement.positions, self.placement.num_places)

    def write_to(self, out: DispatchOut, rows: torch.Tensor) -> None:
        """Fill the caller's tensors with the results of the dispatch. ``rows`` are [places, H]."""
        counts = vars(self.counts)
        for name, tensor in vars(out).items():
            if tensor is not None:
                value = rows if name == "tokens" else counts[name] if name in counts else getattr(self, name)
                tensor.copy_(value.view(tensor.shape))
