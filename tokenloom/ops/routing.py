"""Maps from expert ids to rows: pure functions on one rank's tensors, without communication.

A *position matrix*, int64 [n, j], names the input row that is the j-th term of output row n; -1 means no term. Sums
run in ascending j, so every fixed-order sum of the library is one position matrix and one call of
:func:`ordered_sum`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from tokenloom.plan import Plan, align_up


@dataclass(frozen=True)
class SendMap:
    """Rows that a rank sends: one per (token, rank), sorted by rank, then token.

    Attributes:
        tokens: int64 [n], token of each row.
        local_ids: int32 [n, K], expert ids as the receiver counts them (0..L-1), -1 elsewhere.
        mask: bool [n, K], true for the token's routes to this row's rank.
        rows_per_rank: int64 [W], rows for each rank.
        routes_per_expert: int64 [E], routes to each expert.
    """

    tokens: torch.Tensor
    local_ids: torch.Tensor
    mask: torch.Tensor
    rows_per_rank: torch.Tensor
    routes_per_expert: torch.Tensor


def send_map(topk_ids: torch.Tensor, plan: Plan) -> SendMap:
    """Find the rows that this rank sends for ``topk_ids`` [T, K], all valid or -1."""
    ids = topk_ids.to(torch.int64)
    num_tokens = ids.shape[0]
    routes = ids >= 0
    rank_of = torch.where(routes, ids // plan.experts_per_rank, -1)
    goes_to = torch.zeros(num_tokens, plan.num_ranks + 1, dtype=torch.bool, device=ids.device)
    goes_to.scatter_(1, torch.where(routes, rank_of, plan.num_ranks), True)  # the last column takes the -1s
    goes_to = goes_to[:, : plan.num_ranks]
    ranks, tokens = goes_to.t().nonzero(as_tuple=True)
    mask = rank_of[tokens] == ranks[:, None]
    local_ids = torch.where(mask, ids[tokens] - (ranks * plan.experts_per_rank)[:, None], -1)
    return SendMap(
        tokens=tokens,
        local_ids=local_ids.to(torch.int32),
        mask=mask,
        rows_per_rank=goes_to.sum(0),
        routes_per_expert=torch.bincount(ids[routes], minlength=plan.num_experts),
    )


def count_experts(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the routes to each expert, int64 [E], without reading anything on the host.

    Args:
        topk_ids: int32 or int64, of any shape. Ids that name no expert are not counted.
    """
    ids = topk_ids.flatten().long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, counts.new_ones(1).expand_as(ids))[:num_experts]


def ids_of(send: SendMap, num_tokens: int, experts_per_rank: int) -> torch.Tensor:
    """Reverse :func:`send_map`: int64 ids [T, K], -1 where there is no route."""
    ids = send.tokens.new_full((num_tokens, send.mask.shape[1]), -1)
    ranks = torch.arange(len(send.rows_per_rank), device=send.tokens.device)
    first = torch.repeat_interleave(ranks, send.rows_per_rank) * experts_per_rank
    rows, ks = send.mask.nonzero(as_tuple=True)
    ids[send.tokens[rows], ks] = first[rows] + send.local_ids[rows, ks]
    return ids


def ids_of_ranks(goes_to: torch.Tensor, experts_per_rank: int) -> torch.Tensor:
    """Name ranks by expert ids, for tokens whose ranks are known and whose experts are not.

    Args:
        goes_to: bool [T, W], whether a token goes to a rank.
        experts_per_rank: L.

    Returns:
        int64 [T, W]: the first expert of each rank that the token goes to, -1 for the others.
    """
    first = torch.arange(goes_to.shape[1], device=goes_to.device) * experts_per_rank
    return torch.where(goes_to, first, -1)


def ranks_of_ids(ids: torch.Tensor, experts_per_rank: int, num_ranks: int) -> torch.Tensor:
    """Find where tokens go: bool [T, W], from ids [T, K], of which those not in 0 .. W * L - 1 are no routes."""
    goes_to = torch.zeros(len(ids), num_ranks + 1, dtype=torch.bool, device=ids.device)
    ranks = (ids // experts_per_rank).clamp(-1, num_ranks).remainder(num_ranks + 1)  # the last: no route
    goes_to.scatter_(1, ranks.long(), True)
    return goes_to[:, :num_ranks].contiguous()


def without_ranks(topk_ids: torch.Tensor, ranks: frozenset[int], plan: Plan) -> torch.Tensor:
    """Give routes to experts of some ranks the id -1."""
    if not ranks:
        return topk_ids
    gone = torch.zeros(plan.num_ranks + 1, dtype=torch.bool, device=topk_ids.device)
    gone[sorted(ranks)] = True  # the last entry stands for ids of -1
    rank_of = torch.where(topk_ids >= 0, topk_ids // plan.experts_per_rank, plan.num_ranks)
    return torch.where(gone[rank_of], -1, topk_ids)


def home_positions_per_rank(send: SendMap, num_tokens: int, num_ranks: int) -> torch.Tensor:
    """Find where each (token, rank) lies when one partial sum per sent row comes home, in sent order: [T, W]."""
    ranks = torch.repeat_interleave(torch.arange(num_ranks, device=send.tokens.device), send.rows_per_rank)
    positions = send.tokens.new_full((num_tokens, num_ranks), -1)
    positions[send.tokens, ranks] = torch.arange(len(ranks), device=ranks.device)
    return positions


def on_nodes(goes_to: torch.Tensor, ranks_per_node: int) -> torch.Tensor:
    """Find which nodes tokens go to: bool [T, W] of ranks -> bool [T, N], ranks being numbered node by node."""
    return goes_to.unflatten(1, (-1, ranks_per_node)).any(2)


def home_positions_per_route(send: SendMap, num_tokens: int, top_k: int) -> torch.Tensor:
    """Find where each (token, k) lies when one row per route comes home, in sent order, then k: [T, K]."""
    rows, ks = send.mask.nonzero(as_tuple=True)
    positions = send.tokens.new_full((num_tokens, top_k), -1)
    positions[send.tokens[rows], ks] = torch.arange(len(rows), device=rows.device)
    return positions


@dataclass(frozen=True)
class RowPlaces:
    """Places in the output of the R received rows: one per (token, rank), ordered by source rank, then token.

    Attributes:
        positions: int64 [R, 1], place of each row; in layouts "expert" and "slots" [R, K], place of each of its
            routes. -1 where there is none.
        num_places: rows of the output.
        num_rows: rows in use, including the padding of layout "expert".
        source_counts: list [W], received rows from each source.
        expert_counts: list [L], routes of each local expert, without padding.
        offsets: list [L + 1], padded starts of the groups in layout "expert", else None.
        dropped: bool [R], true for rows with a place beyond the capacity. None if all fit.
        slot_ranges: list [L] of lists [W] in layout "slots": first place and number of places of each source among
            those of each local expert. Else None.
    """

    positions: torch.Tensor
    num_places: int
    num_rows: int
    source_counts: list[int]
    expert_counts: list[int]
    offsets: list[int] | None = None
    dropped: torch.Tensor | None = None
    slot_ranges: list[list[tuple[int, int]]] | None = None


def place_by_token(source_counts: list[int], expert_counts: list[int], device: torch.device) -> RowPlaces:
    """Place rows in layout "token": in the order of arrival."""
    num_rows = sum(source_counts)
    return RowPlaces(torch.arange(num_rows, device=device)[:, None], num_rows, num_rows, source_counts, expert_counts)


def place_by_rank(source_counts: list[int], expert_counts: list[int], places: int, device: torch.device) -> RowPlaces:
    """Place rows in layout "rank": row j of source s at ``s * places + j``."""
    rows = [torch.arange(count, device=device) + source * places for source, count in enumerate(source_counts)]
    num_places = len(source_counts) * places
    return RowPlaces(torch.cat(rows)[:, None], num_places, sum(source_counts), source_counts, expert_counts)


def place_by_expert(
    source_counts: list[int], expert_counts: list[int], alignment: int, local_ids: torch.Tensor
) -> RowPlaces:
    """Place rows in layout "expert": routes grouped by local expert, then ordered by source rank, token and k.

    Args:
        source_counts: list [W], received rows from each source.
        expert_counts: list [L], routes of each local expert.
        alignment: alignment of each expert's group, in rows.
        local_ids: int32 [R, K], experts of the received rows, -1 for no route.
    """
    offsets = [0]
    for count in expert_counts:
        offsets.append(offsets[-1] + align_up(count, alignment))
    routes, experts, index_in_group = _grouped_by_expert(expert_counts, local_ids)
    starts = torch.tensor(offsets[:-1], dtype=torch.int64, device=local_ids.device)
    positions = torch.full(local_ids.shape, -1, dtype=torch.int64, device=local_ids.device)
    positions.view(-1)[routes] = starts[experts] + index_in_group
    return RowPlaces(positions, offsets[-1], offsets[-1], source_counts, expert_counts, offsets)


def place_in_slots(
    source_counts: list[int], route_counts: list[list[int]], slots: int, local_ids: torch.Tensor
) -> RowPlaces:
    """Place rows in layout "slots": expert e has places ``e * slots`` on, filled in the order of layout "expert".

    Routes beyond the slots of their expert are dropped.

    Args:
        source_counts: list [W], received rows from each source.
        route_counts: list [W] of lists [L], routes from each source to each local expert.
        slots: places of each expert.
        local_ids: int32 [R, K], experts of the received rows, -1 for no route.
    """
    expert_counts = [sum(counts) for counts in zip(*route_counts, strict=True)]
    routes, experts, index_in_group = _grouped_by_expert(expert_counts, local_ids)
    fits = index_in_group < slots
    positions = torch.full(local_ids.shape, -1, dtype=torch.int64, device=local_ids.device)
    positions.view(-1)[routes] = torch.where(fits, experts * slots + index_in_group, -1)
    ranges = []
    for counts in zip(*route_counts, strict=True):
        ends = [min(end, slots) for end in accumulate(counts, initial=0)]
        ranges.append([(start, end - start) for start, end in pairwise(ends)])
    fitting = [min(count, slots) for count in expert_counts]
    dropped = None if fitting == expert_counts else ((local_ids >= 0) & (positions < 0)).any(1)
    num_places = slots * len(expert_counts)
    return RowPlaces(positions, num_places, sum(fitting), source_counts, fitting, dropped=dropped, slot_ranges=ranges)


def _grouped_by_expert(
    expert_counts: list[int], local_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort received routes by expert, then by source rank, token and k.

    Returns:
        Index of each route in [R * K], its expert, and its index among the routes of that expert; int64 [routes].
    """
    flat = local_ids.flatten().to(torch.int64)
    routes = (flat >= 0).nonzero().squeeze(1)
    experts, order = torch.sort(flat[routes], stable=True)
    counts = torch.tensor(expert_counts, dtype=torch.int64, device=flat.device)
    index_in_group = torch.arange(len(order), device=flat.device) - (torch.cumsum(counts, 0) - counts)[experts]
    return routes[order], experts, index_in_group


def fit_capacity(placement: RowPlaces, capacity: int) -> RowPlaces:
    """Limit a placement to an output of ``capacity`` rows, dropping what does not fit.

    Every count and offset is clamped, so that all of them are safe to address the output with.
    """
    placement = replace(placement, num_places=capacity)
    if placement.num_rows <= capacity:
        return placement
    too_far = placement.positions >= capacity
    placement = replace(
        placement,
        positions=torch.where(too_far, -1, placement.positions),
        num_rows=capacity,
        dropped=too_far.any(1),
    )
    if placement.offsets is None:
        ends = [min(end, capacity) for end in accumulate(placement.source_counts, initial=0)]
        return replace(placement, source_counts=[end - start for start, end in pairwise(ends)])
    offsets = [min(offset, capacity) for offset in placement.offsets]
    room = [end - start for start, end in pairwise(offsets)]
    counts = [min(count, rows) for count, rows in zip(placement.expert_counts, room, strict=True)]
    return replace(placement, offsets=offsets, expert_counts=counts)


def terms(positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """List the i-th terms of all output rows, for i = 0, 1, ..., each as (output rows, columns, input rows)."""
    valid = positions >= 0
    nth = torch.where(valid, valid.cumsum(1) - 1, -1)
    out = []
    for i in range(positions.shape[1]):
        rows, columns = (nth == i).nonzero(as_tuple=True)
        if not len(rows):
            break
        out.append((rows, columns, positions[rows, columns]))
    return out


def ordered_sum(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None = None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Sum rows in the order of a position matrix, rounding each product and each addition to ``dtype``.

    A sum starts from its first term. Without terms it is +0.

    Args:
        rows: [m, H].
        positions: int64 [n, j], position matrix.
        weights: [n, j], factor of each term, or None for ones.
        dtype: float32 or float64, dtype of the computation.

    Returns:
        [n, H] of ``dtype``.
    """
    out = torch.zeros(positions.shape[0], rows.shape[1], dtype=dtype, device=rows.device)
    for i, (out_rows, columns, in_rows) in enumerate(terms(positions)):
        term = rows[in_rows].to(dtype)
        if weights is not None:
            term = term * weights[out_rows, columns].to(dtype)[:, None]
        out[out_rows] = term if i == 0 else out[out_rows] + term
    return out


def weighted_routes(
    rows: torch.Tensor,
    local_ids: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gather one row per received route, times its weight, in the order (source rank, token, k).

    Args:
        rows: [m, H], in layout "expert" or "slots".
        local_ids: int32 [R, K], -1 for no route.
        positions: int64 [R, K], row of each route, -1 if it was dropped.
        weights: [R, K], weight of each route, or None for ones.
        dtype: float32 or float64, dtype of the computation.

    Returns:
        [routes, H] of ``dtype``, NaN for dropped routes.
    """
    received, ks = (local_ids >= 0).nonzero(as_tuple=True)
    places = positions[received, ks]
    terms = rows.new_full((len(places), rows.shape[1]), torch.nan, dtype=dtype)
    here = places >= 0
    terms[here] = rows[places[here]].to(dtype)
    if weights is not None:
        terms *= weights[received, ks].to(dtype)[:, None]
    return terms


def weights_at_home(home: torch.Tensor, send: SendMap, num_tokens: int) -> torch.Tensor:
    """Put values of routes that came home in sent order, [n, K], to their tokens: [T, K], zero without a route."""
    out = home.new_zeros((num_tokens, home.shape[1]))
    rows, ks = send.mask.nonzero(as_tuple=True)
    out[send.tokens[rows], ks] = home[rows, ks]
    return out


def scatter_rows(rows: torch.Tensor, positions: torch.Tensor, num_out: int) -> torch.Tensor:
    """Reverse a sum: copy row n to every place in ``positions[n]``.

    Args:
        rows: [n, h] of any dtype, contiguous.
        positions: int64 [n, j], position matrix.
        num_out: rows of the result.

    Returns:
        [num_out, h], dtype of ``rows``, zero at places that no row names.
    """
    words = as_words(rows)
    out = rows.new_zeros((num_out, rows.shape[1]))
    sources, columns = (positions >= 0).nonzero(as_tuple=True)
    out.view(words.dtype)[positions[sources, columns]] = words[sources]
    return out


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """View contiguous [n, h] rows as the widest integers that fit, since indexing does not take every dtype."""
    rows = packed(rows)
    row_bytes = rows.shape[1] * rows.element_size()
    start_bytes = rows.storage_offset() * rows.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0 and start_bytes % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows.view(torch.uint8)


def packed(rows: torch.Tensor) -> torch.Tensor:
    """Give ``rows`` the strides of a new tensor, so that it can be viewed as another dtype.

    ``contiguous()`` is not enough: in a dimension of size 0 or 1 any stride counts as contiguous, even 0.
    """
    if rows.stride() == torch.empty(rows.shape, dtype=rows.dtype, device="meta").stride():
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Index contiguous [n, h] rows of any dtype, including FP8."""
    return as_words(rows)[index].view(rows.dtype)


def row_values(values: torch.Tensor, positions: torch.Tensor, num_places: int) -> torch.Tensor:
    """Move values of received routes, [R, K], to the rows of those routes, [num_places]; 0 where no row lies.

    Args:
        values: [R, K].
        positions: int64 [R, K], row of each route, -1 for none.
        num_places: rows of the output.
    """
    # Without a host read routes that have no row cannot be left out: they go to a place behind the last.
    rows, inside = values.new_zeros(num_places + 1), (positions >= 0) & (positions < num_places)
    return rows.scatter_(0, torch.where(inside, positions, num_places).flatten(), values.flatten())[:num_places]


def route_values(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Move values of rows, [num_places], to the routes of those rows, [R, K]; 0 for routes without a row."""
    inside = (positions >= 0) & (positions < len(rows))
    return torch.where(inside, torch.cat([rows, rows.new_zeros(1)])[torch.where(inside, positions, len(rows))], 0)


def spread_gradient(
    received: torch.Tensor,
    positions: torch.Tensor,
    num_places: int,
    weights: torch.Tensor | None,
    rows: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of a weighted sum of rows: each received gradient goes to the places of its terms.

    Args:
        received: [R, H], gradient of each sum.
        positions: int64 [R, j], place of each term, -1 for none.
        num_places: number of rows.
        weights: [R, j], factors of the terms, or None for ones.
        rows: [num_places, H], the terms, if gradients of the weights are wanted. Else None.
        dtype: dtype of the rows' gradient.

    Returns:
        The gradient of the rows, [num_places, H] of ``dtype``, zero where no term lies; and the dot product of each
        term with its gradient, float32 (float64 for float64 rows) [R, j], or None without ``rows``.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    grad_rows = received.new_zeros((num_places, received.shape[1]), dtype=dtype)
    dots = None if rows is None else torch.zeros(positions.shape, dtype=compute, device=received.device)
    for row, column, place in terms(positions):
        term = received[row].to(compute)
        if dots is not None and rows is not None:
            dots[row, column] = (term * rows[place].to(compute)).sum(1)
        if weights is not None:
            term = term * weights[row, column].to(compute)[:, None]
        grad_rows[place] = term.to(dtype)
    return grad_rows, dots
