"""From expert ids to row maps: pure functions on one rank's tensors, no communication.

A *position matrix* [n, j] int64 says, for output row n, which input row is its j-th term; -1 is no term.
Ascending j is the order of the sum (semantics: combine), so every fixed-order sum of the library is one
position matrix and one call of :func:`ordered_sum`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from tokenloom.plan import Plan, align_up


@dataclass(frozen=True)
class SendMap:
    """What a rank sends: one row per (token, rank), sorted by rank, then token.

    Attributes:
        tokens: int64 [n], the token of each row.
        local_ids: int32 [n, K], expert ids as the receiver counts them (0..L-1), -1 elsewhere.
        mask: bool [n, K], which of the token's routes go to this row's rank.
        rows_per_rank: int64 [W], rows for each rank.
        routes_per_expert: int64 [E].
    """

    tokens: torch.Tensor
    local_ids: torch.Tensor
    mask: torch.Tensor
    rows_per_rank: torch.Tensor
    routes_per_expert: torch.Tensor


def send_map(topk_ids: torch.Tensor, plan: Plan) -> SendMap:
    """The rows that this rank sends for ``topk_ids`` [T, K] (valid ids only)."""
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


def home_positions_per_rank(send: SendMap, num_tokens: int, num_ranks: int) -> torch.Tensor:
    """[T, W]: where the partial sum of (token, rank) lies when rows come home in the order they were sent."""
    ranks = torch.repeat_interleave(torch.arange(num_ranks, device=send.tokens.device), send.rows_per_rank)
    positions = send.tokens.new_full((num_tokens, num_ranks), -1)
    positions[send.tokens, ranks] = torch.arange(len(ranks), device=ranks.device)
    return positions


def home_positions_per_route(send: SendMap, num_tokens: int, top_k: int) -> torch.Tensor:
    """[T, K]: where the row of (token, k) lies when one row per route comes home, in sent order, then k."""
    rows, ks = send.mask.nonzero(as_tuple=True)
    positions = send.tokens.new_full((num_tokens, top_k), -1)
    positions[send.tokens[rows], ks] = torch.arange(len(rows), device=rows.device)
    return positions


@dataclass(frozen=True)
class Placement:
    """Where received rows (one per (token, rank), in the order (source rank, token)) lie in the output.

    Attributes:
        positions: int64 [R, 1], or [R, K] for layout "expert": the place of each row, or of each of its routes,
            -1 where there is none.
        num_places: rows of the output.
        num_rows: rows in use, padding of layout "expert" included.
        source_counts: list [W], received rows from each source.
        expert_counts: list [L], routes of each local expert, without padding.
        offsets: list [L + 1], padded starts of the groups (layout "expert"), else None.
        dropped: bool [R], rows of which a place did not fit the capacity; None if all fit.
    """

    positions: torch.Tensor
    num_places: int
    num_rows: int
    source_counts: list[int]
    expert_counts: list[int]
    offsets: list[int] | None = None
    dropped: torch.Tensor | None = None


def place_by_token(source_counts: list[int], expert_counts: list[int], device: torch.device) -> Placement:
    """Layout "token": the order of arrival."""
    num_rows = sum(source_counts)
    return Placement(torch.arange(num_rows, device=device)[:, None], num_rows, num_rows, source_counts, expert_counts)


def place_by_rank(source_counts: list[int], expert_counts: list[int], places: int, device: torch.device) -> Placement:
    """Layout "rank": row j of source s at place ``s * places + j``."""
    rows = [torch.arange(count, device=device) + source * places for source, count in enumerate(source_counts)]
    num_places = len(source_counts) * places
    return Placement(torch.cat(rows)[:, None], num_places, sum(source_counts), source_counts, expert_counts)


def place_by_expert(
    source_counts: list[int], expert_counts: list[int], alignment: int, local_ids: torch.Tensor
) -> Placement:
    """Layout "expert": routes grouped by local expert, in the order (source rank, token, k) in each group.

    Args:
        alignment: rows that each group is padded to.
        local_ids: int32 [R, K], experts of the received rows, -1 is no route.
    """
    offsets = [0]
    for count in expert_counts:
        offsets.append(offsets[-1] + align_up(count, alignment))
    flat = local_ids.flatten().to(torch.int64)
    routes = (flat >= 0).nonzero().squeeze(1)
    experts, order = torch.sort(flat[routes], stable=True)
    counts = torch.tensor(expert_counts, device=flat.device)
    starts = torch.tensor(offsets[:-1], device=flat.device)
    index_in_group = torch.arange(len(order), device=flat.device) - (torch.cumsum(counts, 0) - counts)[experts]
    positions = torch.full_like(flat, -1)
    positions[routes[order]] = starts[experts] + index_in_group
    return Placement(positions.view(local_ids.shape), offsets[-1], offsets[-1], source_counts, expert_counts, offsets)


def fit_capacity(placement: Placement, capacity: int) -> Placement:
    """The same placement in an output of ``capacity`` rows: what does not fit is dropped, and counts say so.

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
    """The i-th term of every output row, for i = 0, 1, ...: (output rows, columns, input rows)."""
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
    """Sum rows in the order of a position matrix, each product and each addition rounded to ``dtype`` by itself.

    Starts from the first term; +0 where there is none.

    Args:
        rows: [m, H].
        positions: int64 [n, j].
        weights: [n, j] multiplies each term, or None.
        dtype: float32 or float64, what is computed in.

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
    """One row per received route, in the order (source rank, token, k), times its weight; NaN if it was dropped.

    Args:
        rows: [m, H], in layout "expert".
        local_ids: int32 [R, K], -1 is no route; positions, weights: [R, K] of the routes.
        dtype: float32 or float64, what is computed in.
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
    """Values of routes that came home in the order they were sent, [n, K], at their tokens: [T, K], else zero."""
    out = home.new_zeros((num_tokens, home.shape[1]))
    rows, ks = send.mask.nonzero(as_tuple=True)
    out[send.tokens[rows], ks] = home[rows, ks]
    return out


def scatter_rows(rows: torch.Tensor, positions: torch.Tensor, num_out: int) -> torch.Tensor:
    """The reverse of a sum: row n goes to every place in ``positions[n]``; places nobody names are zero.

    Args:
        rows: [n, h] of any dtype, contiguous.
        positions: int64 [n, j].

    Returns:
        [num_out, h], dtype of ``rows``.
    """
    words = as_words(rows)
    out = rows.new_zeros((num_out, rows.shape[1]))
    sources, columns = (positions >= 0).nonzero(as_tuple=True)
    out.view(words.dtype)[positions[sources, columns]] = words[sources]
    return out


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous [n, h] rows, seen as the widest integers that fit a row: indexing without dtype limits."""
    rows = packed(rows)
    row_bytes = rows.shape[1] * rows.element_size()
    start_bytes = rows.storage_offset() * rows.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0 and start_bytes % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows.view(torch.uint8)


def packed(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` with the strides of a new tensor, so that it can be viewed as another dtype.

    ``contiguous()`` is not enough: none or one of anything counts as contiguous with any strides, 0 even.
    """
    if rows.stride() == torch.empty(rows.shape, device="meta").stride():
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows[index]`` for contiguous [n, h] rows of any dtype, FP8 too."""
    return as_words(rows)[index].view(rows.dtype)


def row_values(values: torch.Tensor, positions: torch.Tensor, num_places: int) -> torch.Tensor:
    """Values [R, K] of received routes -> of the rows [num_places] that they have; 0 where no row lies.

    No host read, so routes without a row go to a place behind the last. ``positions``: int64 [R, K].
    """
    rows, inside = values.new_zeros(num_places + 1), (positions >= 0) & (positions < num_places)
    return rows.scatter_(0, torch.where(inside, positions, num_places).flatten(), values.flatten())[:num_places]


def route_values(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Values [places] of rows -> [R, K] of the routes that have them; 0 for the others."""
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
    """The gradient of a weighted sum of rows: each received gradient goes to the places of its terms.

    Args:
        received: [R, H], the gradient of each sum.
        positions: int64 [R, j], place of each term, -1 is none.
        num_places: of the rows.
        weights: [R, j], or None where terms were not multiplied.
        rows: [num_places, H], the terms, if gradients of the weights are wanted.
        dtype: of the gradient of the rows.

    Returns:
        [num_places, H] of ``dtype``, zero where no term lies; and float32 (float64 for float64 rows) [R, j], the dot
        product of each term with its gradient, if ``rows`` is given.
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
