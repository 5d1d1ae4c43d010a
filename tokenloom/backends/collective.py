"""Backend "collective": dispatch and combine over torch.distributed, on any device and any network.

A dispatch is three collectives: the exchange of counts (exchange.py), one all-to-all of metadata (ids, weights,
FP8 scales), one all-to-all of payload, one row per (token, rank). A combine is two: the exchange, and one
all-to-all of partial sums. ``all_to_all_single`` needs its sizes on the host, so the counts are read there in
both size modes, and calls cannot be captured into CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from tokenloom.backends.base import CombineCall, DispatchCall, DispatchInput, Onward, RoutedCounts
from tokenloom.backends.handshake import Field, combine_fields, dispatch_fields, exchange
from tokenloom.errors import CapacityOverflow
from tokenloom.ops import routing
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup


@dataclass(frozen=True)
class CollectiveHandle:
    """A dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes:
        call: the options of the dispatch.
        number: how many dispatches this communicator had made before.
        num_tokens: T.
        send: the rows this rank sent.
        sent, received: (token, rank) rows to and from each rank.
        routes_sent, routes_received: routes to and from each rank.
        local_ids: int32 [R, K].
        weights: [R, K], zero where there is no route, or None.
        received_scales: float32 [R, H / 128] for FP8, else None.
        placement: where the received rows lie in the output.
        row_tokens: int32 [R], which token of its source each received row is.
    """

    call: DispatchCall
    number: int
    num_tokens: int
    send: routing.SendMap
    sent: list[int]
    received: list[int]
    routes_sent: list[int]
    routes_received: list[int]
    local_ids: torch.Tensor
    weights: torch.Tensor | None
    received_scales: torch.Tensor | None
    placement: routing.Placement
    row_tokens: torch.Tensor

    @property
    def host_offsets(self) -> list[int] | None:
        """``counts.expert_offsets`` on the host."""
        return self.placement.offsets

    @property
    def counts(self) -> RoutedCounts:
        """Sizes of the output, on the device."""
        place = self.placement

        def int32(values: int | list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.local_ids.device)

        return RoutedCounts(
            num_rows=place.num_rows if self.call.sizes == "exact" else int32(place.num_rows),
            source_counts=int32(place.source_counts),
            expert_counts=int32(place.expert_counts),
            expert_offsets=None if place.offsets is None else int32(place.offsets),
        )

    @property
    def topk_ids(self) -> torch.Tensor:
        """int32 [places, K]: local experts in the output's order (layouts "token", "rank"); no row, no route: -1."""
        return self.place(self.local_ids + 1) - 1

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """Weights as autograd sees them: [places, K], or [R, K] for layout "expert"; None without weights."""
        if self.weights is None or self.call.layout == "expert":
            return self.weights
        return self.place(self.weights)

    @property
    def scales(self) -> torch.Tensor | None:
        """float32 [places, H / 128] for FP8, else None."""
        return None if self.received_scales is None else self.place(self.received_scales)

    def place(self, rows: torch.Tensor) -> torch.Tensor:
        """Received rows [R, h] -> their places in the output [places, h]; zero where no row lies."""
        if self.call.layout == "token" and len(rows) == self.placement.num_places:
            return rows  # the order of arrival is the order of the layout
        return routing.scatter_rows(rows, self.placement.positions, self.placement.num_places)


class CollectiveBackend:
    """Dispatch and combine over ``all_to_all_single``."""

    name = "collective"
    checked = True

    def __init__(self, plan: Plan, ranks: RankGroup) -> None:
        self.plan = plan
        self.ranks = ranks
        self._num_dispatches = 0
        self._overflow: tuple[int, int] | None = None
        self._quantised: torch.Tensor | None = None

    # -- opening a call: counts, agreement, metadata --------------------------------------------------------

    def check_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> None:
        """Nothing beyond checks.py."""

    def check_combine(self, handle: CollectiveHandle, y: torch.Tensor, call: CombineCall) -> None:
        """Nothing beyond checks.py."""

    def report_fault(self, call: str, fault: Exception, then: Onward | None = None) -> None:
        self._exchange({"call": call}, None, fault)

    def settle(self) -> None:
        """Nothing: a call that has returned has raised what it found."""

    def open_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> Callable[[], CollectiveHandle]:
        plan = self.plan
        send = routing.send_map(tensors.topk_ids, plan)
        fields = dispatch_fields(self._num_dispatches, call, tensors)
        own_counts = torch.cat([send.rows_per_rank, send.routes_per_expert])
        table = self._exchange(fields, own_counts)
        rows, routes = table[:, : plan.num_ranks], table[:, plan.num_ranks :]
        self._check_capacity(call, rows, routes)
        self._num_dispatches += 1
        if call.to_fp8:
            q, scales = quantize_fp8(tensors.x, power_of_two_scales=call.power_of_two_scales)
            tensors = replace(tensors, x=q, scales=scales)
            # For dispatch(), which follows at once. The handle would keep it as long as the autograd graph lives.
            self._quantised = q
        return partial(self._make_handle, call, tensors, send, rows, routes)

    def open_combine(self, handle: CollectiveHandle, call: CombineCall) -> None:
        self._exchange(combine_fields(handle.number, call))

    def _exchange(
        self, fields: dict[str, Field], counts: torch.Tensor | None = None, fault: Exception | None = None
    ) -> np.ndarray:
        return exchange(self.ranks, fields, counts, self.plan.num_ranks + self.plan.num_experts, fault)

    def _check_capacity(self, call: DispatchCall, rows: np.ndarray, routes: np.ndarray) -> None:
        """All ranks know all counts, so all of them raise, or remember the overflow, alike."""
        if call.capacity is None:
            return
        if call.layout == "expert":
            groups = -(-routes.sum(0) // call.alignment) * call.alignment
            needed = int(groups.reshape(self.plan.num_ranks, -1).sum(1).max())
        else:
            needed = int(rows.sum(0).max())
        if needed > call.capacity and call.sizes == "exact":
            raise CapacityOverflow(needed, call.capacity, sent=False)
        if needed > call.capacity:
            self._overflow = (needed, call.capacity)

    def _make_handle(
        self, call: DispatchCall, tensors: DispatchInput, send: routing.SendMap, rows: np.ndarray, routes: np.ndarray
    ) -> CollectiveHandle:
        plan, me = self.plan, self.ranks.rank
        by_rank = routes.reshape(plan.num_ranks, plan.num_ranks, plan.experts_per_rank)  # [source, rank, expert]
        sent, received = rows[me].tolist(), rows[:, me].tolist()
        expert_counts = by_rank[:, me].sum(0).tolist()
        tokens, local_ids, weights, scales = self._exchange_metadata(tensors, send, sent, received)
        if call.layout == "token":
            placement = routing.place_by_token(received, expert_counts, self.ranks.device)
        elif call.layout == "rank":
            placement = routing.place_by_rank(received, expert_counts, plan.max_tokens_per_rank, self.ranks.device)
        else:
            placement = routing.place_by_expert(received, expert_counts, call.alignment, local_ids)
        if call.sizes == "bounded" and call.capacity is not None:
            placement = routing.fit_capacity(placement, call.capacity)
        return CollectiveHandle(
            call=call,
            number=self._num_dispatches,
            num_tokens=tensors.x.shape[0],
            send=send,
            sent=sent,
            received=received,
            routes_sent=by_rank[me].sum(1).tolist(),
            routes_received=by_rank[:, me].sum(1).tolist(),
            local_ids=local_ids,
            weights=weights,
            received_scales=scales,
            placement=placement,
            row_tokens=tokens,
        )

    def _exchange_metadata(
        self, tensors: DispatchInput, send: routing.SendMap, sent: list[int], received: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Tokens [R], ids, weights and scales of the rows, in one all-to-all of int32 words, as they are received."""
        parts = [send.tokens[:, None].to(torch.int32), send.local_ids]
        if tensors.topk_weights is not None:
            weights = torch.where(send.mask, tensors.topk_weights.detach()[send.tokens], 0)
            parts.append(routing.packed(weights).view(torch.int32))
        if tensors.scales is not None:
            parts.append(tensors.scales[send.tokens].view(torch.int32))
        words = self.ranks.all_to_all(torch.cat(parts, 1), sent, received, "dispatch, metadata")
        # Always a copy: a slice of a single row counts as contiguous, but starts wherever its neighbour ends.
        widths = [part.shape[1] for part in parts]
        split = [part.clone(memory_format=torch.contiguous_format) for part in words.split(widths, 1)]
        tokens, local_ids, rest = split[0][:, 0], split[1], split[2:]
        received_weights = None if tensors.topk_weights is None else rest.pop(0).view(tensors.topk_weights.dtype)
        scales = rest.pop(0).view(torch.float32) if rest else None
        return tokens, local_ids, received_weights, scales

    # -- moving rows ----------------------------------------------------------------------------------------

    def dispatch(self, handle: CollectiveHandle, x: torch.Tensor) -> torch.Tensor:
        if handle.call.to_fp8:
            assert self._quantised is not None
            x, self._quantised = self._quantised, None
        return self.dispatch_again(handle, x, handle.call.strategy)

    def _send(self, handle: CollectiveHandle, x: torch.Tensor, strategy: str) -> torch.Tensor:
        """[T, H] at home -> received rows [R, H]."""
        if strategy == "all_gather":
            room = x.new_zeros(self.plan.max_tokens_per_rank, x.shape[1])
            room[: len(x)] = x
            gathered = self.ranks.all_gather(room.view(torch.uint8).flatten(), "dispatch, all tokens")
            return routing.gather_rows(gathered.view(x.dtype).view(-1, x.shape[1]), self._row_homes(handle))
        rows = routing.gather_rows(x, handle.send.tokens)
        return self.ranks.all_to_all(rows, handle.sent, handle.received, "dispatch, payload")

    def _row_homes(self, handle: CollectiveHandle) -> torch.Tensor:
        """int64 [R]: which of [W * M] tokens of all ranks each received row is."""
        sources = torch.repeat_interleave(torch.arange(self.plan.num_ranks), torch.tensor(handle.received))
        return sources.to(handle.row_tokens.device) * self.plan.max_tokens_per_rank + handle.row_tokens

    def _send_routes(self, handle: CollectiveHandle, x: torch.Tensor) -> torch.Tensor:
        """[T, H] at home -> a row for each route, at its place in the output."""
        row, _ = handle.send.mask.nonzero(as_tuple=True)
        rows = routing.gather_rows(x, handle.send.tokens[row])
        received = self.ranks.all_to_all(rows, handle.routes_sent, handle.routes_received, "dispatch, routes")
        positions = handle.placement.positions[handle.local_ids >= 0]  # in the order of arrival; -1: dropped
        return routing.scatter_rows(received, positions[:, None], handle.placement.num_places)

    def combine(
        self,
        handle: CollectiveHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        call: CombineCall,
        out: torch.Tensor | None = None,
        alone: bool = False,
    ) -> torch.Tensor:
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        if call.mode == "per_rank":
            positions = handle.placement.positions
            partial = routing.ordered_sum(rows, positions, weights, dtype=dtype).to(call.wire_dtype)
            if handle.placement.dropped is not None:
                partial[handle.placement.dropped] = torch.nan
            order = routing.home_positions_per_rank(handle.send, handle.num_tokens, self.plan.num_ranks)
            if call.strategy == "reduce_scatter":
                home, order = self._scatter_dense(handle, partial, order)
            else:
                home = self.ranks.all_to_all(partial, handle.received, handle.sent, "combine, partial sums")
        else:
            terms = routing.weighted_routes(rows, handle.local_ids, handle.placement.positions, weights, dtype=dtype)
            terms = terms.to(call.wire_dtype)
            home = self.ranks.all_to_all(terms, handle.routes_received, handle.routes_sent, "combine, routes")
            order = routing.home_positions_per_route(handle.send, handle.num_tokens, self.plan.top_k)
        total = routing.ordered_sum(home, order, dtype=dtype).to(call.out_dtype)
        return total if out is None else out.copy_(total)

    def _scatter_dense(
        self, handle: CollectiveHandle, partial: torch.Tensor, order: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial sums [R, H] of all ranks' tokens, dense -> (home [W * M, H], and where in it each of [T, W] is)."""
        num_ranks, room = self.plan.num_ranks, self.plan.max_tokens_per_rank
        dense = partial.new_zeros(num_ranks * room, partial.shape[1])
        dense[self._row_homes(handle)] = partial
        home = self.ranks.all_to_all(dense, [room] * num_ranks, [room] * num_ranks, "combine, dense partial sums")
        tokens = torch.arange(len(order), device=order.device)[:, None]
        places = torch.arange(num_ranks, device=order.device) * room + tokens
        return home, torch.where(order >= 0, places, -1)

    # -- gradients ------------------------------------------------------------------------------------------

    def combine_backward(
        self,
        handle: CollectiveHandle,
        grad: torch.Tensor,
        rows: torch.Tensor | None,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
        strategy: str = "dedup",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        received = self._send(handle, grad, strategy)
        place = handle.placement
        return routing.spread_gradient(received, place.positions, place.num_places, weights, rows, dtype)

    def dispatch_again(self, handle: CollectiveHandle, x: torch.Tensor, strategy: str = "dedup") -> torch.Tensor:
        if strategy == "all_to_all":
            return self._send_routes(handle, x)
        return handle.place(self._send(handle, x, strategy))

    def row_weights(self, handle: CollectiveHandle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        return routing.row_values(weights, handle.placement.positions, num_places)

    def route_gradients(self, handle: CollectiveHandle, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return routing.route_values(grad, handle.placement.positions).to(like.dtype)

    def return_weights(self, handle: CollectiveHandle, grad: torch.Tensor) -> torch.Tensor:
        if handle.call.layout != "expert":
            place = handle.placement.positions[:, 0]
            grad = torch.where((place >= 0)[:, None], grad[place.clamp_min(0)], 0)
        grad = routing.packed(grad)
        home = self.ranks.all_to_all(grad, handle.received, handle.sent, "dispatch, gradient of weights")
        return routing.weights_at_home(home, handle.send, handle.num_tokens)

    # -- state ----------------------------------------------------------------------------------------------

    def memory(self) -> list[str]:
        """It has no buffers that outlive a call."""
        return []

    def check(self, wait: bool) -> None:
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            raise CapacityOverflow(*overflow, sent=True)

    def close(self) -> None:
        self.ranks.close()
