"""Backend "collective": dispatch and combine over torch.distributed, on any device and any network.

A dispatch is three collectives: the handshake with all counts (handshake.py), one all-to-all of metadata (ids,
weights, FP8 scales), and one all-to-all of payload with one row per (token, rank). Every other call is the handshake
and one all-to-all. ``all_to_all_single`` needs its sizes on the host, so both kinds of sizes read the counts there,
and calls cannot be captured into CUDA graphs. Another exchange (exchange.py) makes another backend of it.

Masked ranks take no part (:mod:`tokenloom.runtime.rank_group`). Ids of their experts become -1 before anything is
counted. A rank may be lost in the middle of a call. What it did not send is left out when the call is received: a
dispatch drops its rows, a sum drops its terms, and gradients are zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from tokenloom.backends.collective_handle import CollectiveHandle, Sizes, rows_without, terms_without
from tokenloom.backends.exchange import Arriving, ArrivingSum, Exchange, FlatExchange, SumOnArrival
from tokenloom.backends.handshake import combine_fields, dispatch_fields, gradient_fields, handshake
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.backends.seam import (
    Capabilities,
    CombineKind,
    CombineOptions,
    DispatchKind,
    DispatchOptions,
    DispatchOut,
    OutputOwner,
    ResendTo,
    Rows,
    Tokens,
    Upcoming,
    Wait,
)
from tokenloom.errors import CapacityOverflow
from tokenloom.ops import routing
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import ROUTE_LAYOUTS, Plan
from tokenloom.runtime.openings import Field
from tokenloom.runtime.rank_group import RankGroup

T = TypeVar("T")


class RowsUnderWay(Generic[T]):
    """Call whose payload is on its way.

    Args:
        wait: waits until the payload is here.
        finish: makes the result.
    """

    def __init__(self, wait: Callable[[], object], finish: Callable[[], T]) -> None:
        self.wait, self._finish = wait, finish

    def receive(self) -> T:
        return self._finish()


@dataclass(frozen=True)
class _Arrival:
    """Payload on its way.

    Attributes:
        arriving: transfer that brings it.
        counts: rows of each source rank in it, or None where ``place`` picks them by the handle.
        place: makes the result of the call from the handle and the payload. The metadata of the handle may arrive
            after the payload was sent.
    """

    arriving: Arriving
    counts: list[int] | None
    place: Callable[[CollectiveHandle, torch.Tensor], torch.Tensor]

    def without(self, ranks: frozenset[int]) -> torch.Tensor:
        """Wait for the payload, and leave out what these ranks sent."""
        rows = self.arriving.wait()
        return rows if self.counts is None else rows_without(ranks, self.counts, rows)


class PreparedByCollective:
    """Dispatches of one kind. Nothing is prepared: each call does everything anew."""

    is_stale, waits = False, True

    def __init__(self, backend: CollectiveBackend, kind: DispatchKind) -> None:
        self._backend, self._kind = backend, kind

    def send(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> RowsUnderWay[tuple[CollectiveHandle, torch.Tensor]]:
        return self._backend.send_dispatch(self._kind, tokens, out)


class PreparedCombineByCollective:
    """Combines of one kind; see :class:`PreparedByCollective`."""

    is_stale = False

    def __init__(self, backend: CollectiveBackend, kind: CombineKind) -> None:
        self._backend, self._options = backend, kind.options

    def send(
        self,
        handle: CollectiveHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        stream: int | None = None,
    ) -> RowsUnderWay[torch.Tensor]:
        return self._backend.send_combine(handle, rows, weights, self._options, out)


class CollectiveBackend:
    """Dispatch and combine over ``all_to_all_single``. The payload travels between the halves of a call.

    Args:
        exchange: carries the rows. None sends them straight to their ranks.
    """

    name = "collective"
    capabilities = Capabilities(gathers_counts=True)

    def __init__(self, plan: Plan, ranks: RankGroup, exchange: Exchange | None = None) -> None:
        self._plan = plan
        self._ranks = self.members = ranks
        self._exchange: Exchange = exchange or FlatExchange(plan, ranks)
        self._overflow: tuple[int, int] | None = None
        self._absent: frozenset[int] = frozenset()
        """Ranks that take no part in the call that was opened last: the same on all ranks that do."""

    # -- dispatch -------------------------------------------------------------------------------------------

    def prepare_dispatch(self, kind: DispatchKind) -> PreparedByCollective:
        return PreparedByCollective(self, kind)

    def prepare_combine(self, kind: CombineKind, number: int) -> PreparedCombineByCollective:
        return PreparedCombineByCollective(self, kind)

    def ready_stream(self, waits: bool = False) -> int | None:
        self.check("nothing")
        return None

    def gather_counts(self, kind: DispatchKind, counts: torch.Tensor) -> tuple[torch.Tensor, frozenset[int]]:
        fields = {**dispatch_fields(self._ranks.step, kind), "counts of experts": len(counts)}
        table, absent = handshake(self._ranks, fields, counts, len(counts), None)
        return torch.from_numpy(table).to(counts.device, torch.int32), absent

    def send_dispatch(
        self, kind: DispatchKind, tokens: Tokens, out: DispatchOut | None
    ) -> RowsUnderWay[tuple[CollectiveHandle, torch.Tensor]]:
        """Open a dispatch, and send its metadata and rows."""
        options = kind.options
        x, scales, topk_ids, topk_weights = tokens
        ids = routing.without_ranks(topk_ids, self._ranks.masked, self._plan)
        send = routing.send_map(ids, self._plan)
        fields = dispatch_fields(self._ranks.step, kind)
        exchange_words = self._exchange.counts(send, len(x))
        table = self._open(fields, torch.cat([send.rows_per_rank, send.routes_per_expert, exchange_words]))
        ends = np.cumsum([self._plan.num_ranks, self._plan.num_experts])
        rows, routes, words_by_rank = np.split(table, ends, axis=1)
        self._check_capacity(options, rows, routes)
        absent, num_tokens = self._absent, len(x)
        number = self._ranks.step  # a rank that comes back counts on from the same step
        with self._ranks.telling():
            sizes = self._sizes(send, rows, routes, self._exchange.legs(rows, words_by_rank))
            if options.to_fp8:
                x, scales = quantize_fp8(x, power_of_two_scales=options.power_of_two_scales, recipe=options.recipe)
            words, split = self._metadata(ids, topk_weights, scales)
            metadata, payload = self._send_dispatch(sizes, x, options.strategy, words)

        def wait() -> tuple[torch.Tensor, torch.Tensor]:
            return metadata.wait(), payload.arriving.wait()

        def finish() -> tuple[CollectiveHandle, torch.Tensor]:
            with self._ranks.telling():
                words, _ = wait()
                lost = metadata.lost | payload.arriving.lost
                row_tokens, local_ids, weights, received_scales = split(rows_without(lost, sizes.received, words))
                received = sizes.without(lost)
                placement = self._place(options, received, local_ids)
                arrivals = (received, local_ids, weights, received_scales, placement, row_tokens)
                handle = CollectiveHandle(options, number, num_tokens, *arrivals, absent | lost)
                arrived = payload.place(handle, payload.without(lost))
                if out is not None:
                    handle.write_to(out, arrived)
                return handle, arrived

        return RowsUnderWay(wait, finish)

    def _check_capacity(self, options: DispatchOptions, rows: np.ndarray, routes: np.ndarray) -> None:
        """Raise an overflow, or remember it for the next call. All ranks do alike, since all know all counts."""
        if options.capacity is None:
            return
        if options.layout == "slots":
            needed = int(routes.sum(0).max())
        elif options.layout == "expert":
            groups = -(-routes.sum(0) // options.alignment) * options.alignment
            needed = int(groups.reshape(self._plan.num_ranks, -1).sum(1).max())
        else:
            needed = int(rows.sum(0).max())
        if needed > options.capacity and options.sizes == "exact":
            raise CapacityOverflow(needed, options.capacity, sent=False)
        if needed > options.capacity:
            self._overflow = (needed, options.capacity)

    def _sizes(self, send: routing.SendMap, rows: np.ndarray, routes: np.ndarray, legs: Any) -> Sizes:
        plan, me = self._plan, self._ranks.rank
        by_rank = routes.reshape(plan.num_ranks, plan.num_ranks, plan.experts_per_rank)  # [source, rank, expert]
        return Sizes(
            send=send,
            sent=rows[me].tolist(),
            received=rows[:, me].tolist(),
            routes_sent=by_rank[me].sum(1).tolist(),
            routes_received=by_rank[:, me].sum(1).tolist(),
            route_counts=by_rank[:, me].tolist(),
            legs=legs,
        )

    def _place(self, options: DispatchOptions, sizes: Sizes, local_ids: torch.Tensor) -> routing.RowPlaces:
        received, counts = sizes.received, [sum(each) for each in zip(*sizes.route_counts, strict=True)]
        if options.layout == "slots":
            assert options.capacity is not None, "its places are fixed"
            return routing.place_in_slots(received, sizes.route_counts, options.capacity, local_ids)
        if options.layout == "token":
            placement = routing.place_by_token(received, counts, self._ranks.device)
        elif options.layout == "rank":
            placement = routing.place_by_rank(received, counts, self._plan.max_tokens_per_rank, self._ranks.device)
        else:
            placement = routing.place_by_expert(received, counts, options.alignment, local_ids)
        if options.sizes == "bounded" and options.capacity is not None:
            placement = routing.fit_capacity(placement, options.capacity)
        return placement

    def _metadata(
        self, ids: torch.Tensor, topk_weights: torch.Tensor | None, scales: torch.Tensor | None
    ) -> tuple[
        torch.Tensor,
        Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]],
    ]:
        """Pack numbers, ids, weights and scales of this rank's tokens into int32 words, the same for all ranks.

        Args:
            ids: [T, K]. Those of masked ranks are -1.

        Returns:
            The words [T, n], and a function that splits received words into tokens [R], local ids [R, K], weights
            [R, K] and scales [R, n], n 1 by recipe "row".
        """
        parts = [torch.arange(len(ids), dtype=torch.int32, device=ids.device)[:, None], ids.to(torch.int32)]
        if topk_weights is not None:
            parts.append(routing.packed(topk_weights.detach()).view(torch.int32))
        if scales is not None:
            parts.append(_by_row(scales).view(torch.int32))
        widths = [part.shape[1] for part in parts]
        first = self._ranks.rank * self._plan.experts_per_rank

        def split(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            # Always a copy: a slice of a single row counts as contiguous, but starts wherever its neighbour ends.
            parts = [part.clone(memory_format=torch.contiguous_format) for part in words.split(widths, 1)]
            tokens, rest = parts[0][:, 0], parts[2:]
            here = (parts[1] >= first) & (parts[1] < first + self._plan.experts_per_rank)
            local_ids = torch.where(here, parts[1] - first, -1)
            received_weights = None
            if topk_weights is not None:
                received_weights = torch.where(here, rest.pop(0).view(topk_weights.dtype), 0)
            return tokens, local_ids, received_weights, rest.pop(0).view(torch.float32) if rest else None

        return torch.cat(parts, 1), split

    # -- moving rows ----------------------------------------------------------------------------------------

    def _send_dispatch(
        self, sizes: Sizes, x: torch.Tensor, strategy: str, words: torch.Tensor
    ) -> tuple[Arriving, _Arrival]:
        """Send metadata and payload of a dispatch, together if both go to the same ranks."""
        if strategy == "dedup":
            sent = self._exchange.spread(sizes, {"metadata": words, "payload": x})
            payload = _Arrival(sent["payload"], sizes.received, lambda handle, rows: handle.place(rows))
            return sent["metadata"], payload
        metadata = self._exchange.spread(sizes, {"metadata": words})["metadata"]
        return metadata, self._send_places(sizes, x, strategy)

    def _send_places(self, sizes: Sizes, x: torch.Tensor, strategy: str) -> _Arrival:
        """Send [T, H] to the places of its routes, [places, H]."""
        if strategy == "all_to_all":
            return self._send_routes(sizes, x)
        sent = self._send_rows(sizes, x, strategy)
        return _Arrival(sent.arriving, sent.counts, lambda handle, rows: handle.place(sent.place(handle, rows)))

    def _send_rows(self, sizes: Sizes, x: torch.Tensor, strategy: str) -> _Arrival:
        """Send [T, H] once for each (token, rank), [R, H]."""
        if strategy == "all_gather":
            room = x.new_zeros(self._plan.max_tokens_per_rank, x.shape[1])
            room[: len(x)] = x
            transfer = self._ranks.start_all_gather(room.view(torch.uint8).flatten(), "dispatch, all tokens")

            def pick(handle: CollectiveHandle, gathered: torch.Tensor) -> torch.Tensor:
                return routing.gather_rows(gathered.view(x.dtype).view(-1, x.shape[1]), self._row_homes(handle))

            return _Arrival(transfer, None, pick)
        payload = self._exchange.spread(sizes, {"payload": x})["payload"]
        return _Arrival(payload, sizes.received, lambda handle, rows: rows)

    def _send_routes(self, sizes: Sizes, x: torch.Tensor) -> _Arrival:
        """Send [T, H] once for each route, to its place."""
        row, _ = sizes.send.mask.nonzero(as_tuple=True)
        rows = routing.gather_rows(x, sizes.send.tokens[row])
        counts = sizes.routes_sent, sizes.routes_received
        transfer = self._exchange.start_all_to_all(rows, *counts, "dispatch, routes")

        def place(handle: CollectiveHandle, rows: torch.Tensor) -> torch.Tensor:
            positions = handle.placement.positions[handle.local_ids >= 0]  # in the order of arrival; -1: dropped
            return routing.scatter_rows(rows, positions[:, None], handle.num_places)

        return _Arrival(transfer, sizes.routes_received, place)

    def _row_homes(self, handle: CollectiveHandle) -> torch.Tensor:
        """Number each received row among the [W * M] tokens of all ranks: int64 [R]."""
        device = handle.row_tokens.device
        ranks = torch.arange(self._plan.num_ranks, device=device)
        sources = torch.repeat_interleave(ranks, torch.tensor(handle.sizes.received, device=device))
        return sources * self._plan.max_tokens_per_rank + handle.row_tokens

    # -- combine --------------------------------------------------------------------------------------------

    def send_combine(
        self,
        handle: CollectiveHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        out: torch.Tensor | None,
    ) -> RowsUnderWay[torch.Tensor]:
        """Open a combine, and send the terms of its sums home."""
        if options.weighted and weights is None:
            weights = handle.topk_weights
        rows = rows.view(-1, rows.shape[-1])
        width = None if rows.shape[1] == self._plan.hidden else rows.shape[1]
        self._open(combine_fields(handle.number, options, width))
        with self._ranks.telling():
            home = self._send_home(handle, rows, weights, options)

        def finish() -> torch.Tensor:
            with self._ranks.telling():
                total = home.receive().to(options.out_dtype)
                return total if out is None else out.copy_(total)

        return RowsUnderWay(home.wait, finish)

    def _send_home(
        self, handle: CollectiveHandle, rows: torch.Tensor, weights: torch.Tensor | None, options: CombineOptions
    ) -> ArrivingSum:
        """Send the terms of the sums at home."""
        sizes, positions, dtype = handle.sizes, handle.placement.positions, _sum_dtype(rows)
        if options.per_route:
            terms = routing.weighted_routes(rows, handle.local_ids, positions, weights, dtype=dtype)
            terms = terms.to(options.wire_dtype)
            counts = sizes.routes_received, sizes.routes_sent
            order = routing.home_positions_per_route(sizes.send, handle.num_tokens, self._plan.top_k)
            arriving = self._exchange.start_all_to_all(terms, *counts, "combine, routes")
            return _sum_at_home(arriving, counts[1], order, dtype)
        partial = routing.ordered_sum(rows, positions, weights, dtype=dtype).to(options.wire_dtype)
        if handle.placement.dropped is not None:
            partial[handle.placement.dropped] = torch.nan
        order = routing.home_positions_per_rank(sizes.send, handle.num_tokens, self._plan.num_ranks)
        if options.per_node:
            return self._exchange.send_sums(sizes, partial, handle.row_tokens, order, dtype)
        if options.strategy == "reduce_scatter":
            return _sum_at_home(*self._send_dense(handle, partial, order), dtype)
        arriving = self._exchange.bring_home(sizes, partial, "combine, partial sums")
        return _sum_at_home(arriving, sizes.sent, order, dtype)

    def _send_dense(
        self, handle: CollectiveHandle, partial: torch.Tensor, order: torch.Tensor
    ) -> tuple[Arriving, list[int], torch.Tensor]:
        """Send partial sums [R, H] home as a dense [W, M, H] of all ranks' tokens.

        Args:
            order: position matrix of the rows that the dispatch sent.

        Returns:
            The transfer, rows of each rank in it, and the position matrix of dense rows.
        """
        num_ranks, room = self._plan.num_ranks, self._plan.max_tokens_per_rank
        dense = partial.new_zeros(num_ranks * room, partial.shape[1])
        dense[self._row_homes(handle)] = partial
        counts = [room] * num_ranks
        transfer = self._exchange.start_all_to_all(dense, counts, counts, "combine, dense partial sums")
        tokens = torch.arange(len(order), device=order.device)[:, None]
        places = torch.arange(num_ranks, device=order.device) * room + tokens
        return transfer, counts, torch.where(order >= 0, places, -1)

    # -- gradients ------------------------------------------------------------------------------------------

    def resend(
        self,
        handle: CollectiveHandle,
        values: Rows,
        to: ResendTo = "places",
        strategy: str = "dedup",
        owner: OutputOwner = False,
        stream: int | None = None,
    ) -> RowsUnderWay[Any]:
        x, scales = values if isinstance(values, tuple) else (values, None)
        if scales is not None:
            x = torch.cat([_by_row(each).view(torch.uint8) for each in values], 1)
        call = "rows again" if scales is not None or x.shape[1] == self._plan.hidden else "weights again"
        send = self._send_rows if to == "rows" else self._send_places
        sent = self._gradient(handle, call, lambda: send(handle.sizes, x, strategy))
        if scales is None:
            return sent

        def split() -> Rows:
            received, hidden = sent.receive(), self._plan.hidden
            received_scales = received[:, hidden:].contiguous().view(scales.dtype)
            return received[:, :hidden].contiguous().view(values[0].dtype), received_scales

        return RowsUnderWay(sent.wait, split)

    def _gradient(
        self, handle: CollectiveHandle, call: str, send: Callable[[], _Arrival]
    ) -> RowsUnderWay[torch.Tensor]:
        self._open(gradient_fields(handle.number, call))
        with self._ranks.telling():
            arrival = send()

        def finish() -> torch.Tensor:
            with self._ranks.telling():
                return arrival.place(handle, arrival.arriving.wait())

        return RowsUnderWay(arrival.arriving.wait, finish)

    def send_weight_gradients(self, handle: CollectiveHandle, grad: torch.Tensor) -> RowsUnderWay[torch.Tensor]:
        sizes = handle.sizes

        def send() -> _Arrival:
            if handle.options.layout in ROUTE_LAYOUTS:
                values = grad.clone()  # the caller may change it before the transfer ends
            else:
                place = handle.placement.positions[:, 0]
                values = torch.where((place >= 0)[:, None], grad[place.clamp_min(0)], torch.nan)  # as kernels
            arriving = self._exchange.bring_home(sizes, routing.packed(values), "dispatch, gradient of weights")

            def to_tokens(handle: CollectiveHandle, home: torch.Tensor) -> torch.Tensor:
                return routing.weights_at_home(home, sizes.send, handle.num_tokens)

            return _Arrival(arriving, None, to_tokens)

        return self._gradient(handle, "gradient of weights", send)

    # -- state ----------------------------------------------------------------------------------------------

    def _open(
        self, fields: dict[str, Field], counts: torch.Tensor | None = None, fault: Exception | None = None
    ) -> np.ndarray:
        """Open a call, and return the counts of all ranks."""
        num_counts = self._plan.num_ranks + self._plan.num_experts + self._exchange.num_counts
        table, absent = handshake(self._ranks, fields, counts, num_counts, fault)
        self._exchange.open(absent)
        self._absent = absent
        return table

    def report_fault(self, fault: Exception, upcoming: Sequence[Upcoming]) -> None:
        self._open({"call": upcoming[0].name}, None, fault)  # ends the others' call; nobody opens the next

    def check(self, wait: Wait) -> None:
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            raise CapacityOverflow(*overflow, sent=True)

    def memory(self) -> list[str]:
        return []  # no buffer outlives a call

    def close(self) -> None:
        self._overflow = None


def _by_row(values: torch.Tensor) -> torch.Tensor:
    """[n, width] to be viewed as another dtype, of [n, width]; or of scales of whole rows, [n], as [n, 1]."""
    return routing.packed(values if values.ndim > 1 else values.unsqueeze(1))


def _sum_at_home(arriving: Arriving, counts: list[int], order: torch.Tensor, dtype: torch.dtype) -> ArrivingSum:
    """Add terms that come home, ``counts[r]`` from rank r, in the order of a position matrix."""

    def add(terms: torch.Tensor) -> torch.Tensor:
        return routing.ordered_sum(terms, terms_without(arriving.lost, counts, order), dtype=dtype)

    return SumOnArrival(arriving, add)


def _sum_dtype(rows: torch.Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _probe(request: Request) -> Availability:
    over = "this rank alone" if request.transport == "local" else f"torch.distributed over {request.transport}"
    return Availability("collective", True, f"{over}, tensors on {request.device.type}")


def _make(request: Request, ranks: RankGroup) -> CollectiveBackend:
    assert request.plan is not None
    return CollectiveBackend(request.plan, ranks)


REGISTRATION = Registration("collective", CollectiveBackend.capabilities, _probe, _make)
