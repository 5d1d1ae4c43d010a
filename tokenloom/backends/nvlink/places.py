"""Places of rows that arrive one per (token, rank), where they have to be spread on this rank."""

from __future__ import annotations

from collections.abc import Collection

import torch

from tokenloom.ops import routing


def of_received_rows(
    layout: str, row_places: torch.Tensor, received: torch.Tensor, max_tokens: int, capacity: int, top_k: int
) -> torch.Tensor:
    """Position matrix with one row for each received row that there may be, -1 beyond those there are. No host read.

    Args:
        layout: of the dispatch.
        row_places: int32 [>= R, K], place of each route of a received row (layout "expert").
        received: int64 [W], rows from each source.
        max_tokens: M.
        capacity: places that a row may have.
        top_k: K.

    Returns:
        int64 [W * M, K] in layout "expert", else [W * M, 1].
    """
    num_ranks, device = len(received), received.device
    rows = torch.arange(num_ranks * max_tokens, dtype=torch.int64, device=device)
    if layout == "expert":
        positions = torch.full((len(rows), top_k), -1, dtype=torch.int64, device=device)
        positions[: len(row_places)] = row_places.to(torch.int64)
    elif layout == "token":
        positions = rows[:, None]
    else:
        source = torch.bucketize(rows, received.cumsum(0), right=True).clamp_max(num_ranks - 1)
        in_source = rows - (received.cumsum(0) - received)[source]
        positions = (source * max_tokens + in_source)[:, None]
    valid = (rows < received.sum())[:, None] & (positions < capacity)
    return torch.where(valid, positions, -1)


def without_sources(
    rows: torch.Tensor, received: torch.Tensor, max_tokens: int, gone: Collection[int]
) -> torch.Tensor:
    """Rows of layout "rank" in the order in which an earlier dispatch received them, zeros from ranks that are gone.

    Args:
        rows: [W * M, H].
        received: int64 [W], rows from each source then.
        max_tokens: M.
        gone: ranks whose rows did not come now.

    Returns:
        [W * M, H], zeros behind the rows that were received.
    """
    where = of_received_rows("rank", received, received, max_tokens, len(rows), 1)[:, 0]
    came = where >= 0
    for rank in gone:
        came &= where // max_tokens != rank
    return torch.where(came[:, None], rows[where.clamp_min(0)], 0)


def by_expert(
    source_counts: torch.Tensor, expert_counts: torch.Tensor, alignment: int, local_ids: torch.Tensor
) -> routing.Placement:
    """Where rows of layout "token" lie in layout "expert". Reads the counts on the host.

    Args:
        source_counts: int32 [W]. expert_counts: int32 [L]. local_ids: int32 [R, K].
    """
    return routing.place_by_expert(source_counts.tolist(), expert_counts.tolist(), alignment, local_ids)


def copied(tensor: torch.Tensor, least: int) -> torch.Tensor:
    """A copy with at least so many rows, zeros behind those there are."""
    if len(tensor) >= least:
        return tensor.clone()
    out = tensor.new_zeros(least, *tensor.shape[1:])
    out.view(torch.uint8)[: len(tensor)] = tensor.view(torch.uint8)
    return out
