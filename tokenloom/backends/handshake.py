"""The handshake that opens every call of a backend over torch.distributed: status, what must agree, and all counts.

It is the opening of a call (:mod:`tokenloom.runtime.openings`), whose words are the counts. A fault that only one rank
can see is thereby an error on all of them, before any payload moves.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenloom.backends.seam import CombineOptions, DispatchKind, DispatchOptions
from tokenloom.runtime.openings import NUMBER, Field, Fields
from tokenloom.runtime.rank_group import RankGroup


def handshake(
    ranks: RankGroup, fields: Fields, counts: torch.Tensor | None, num_counts: int, fault: Exception | None
) -> tuple[np.ndarray, frozenset[int]]:
    """Exchange status, fields and counts; raise on every rank if anything is wrong on any other.

    Waits for the other ranks as long as opening a call may take.

    Args:
        ranks: the group.
        fields: what must be the same on all ranks.
        counts: int64 [num_counts] on the group's device, or None for zeros.
        fault: this rank's own error, which the caller raises once the others know of it.

    Returns:
        int64 [W, num_counts], the counts of every rank, zeros for those that take no part; and who does not. All
        ranks that take part get the same.

    Raises:
        PeerError, PlanMismatch, PeerTimeout: as of :meth:`RankGroup.open`.
    """
    if counts is None:
        counts = torch.zeros(num_counts, dtype=torch.int64, device="cpu")
    table, absent = ranks.open(fields, counts, f"the handshake of {next(iter(fields.values()))}", fault)
    return table.numpy(), absent


def dispatch_fields(number: int, kind: DispatchKind, meant: DispatchOptions | None = None) -> dict[str, Field]:
    """What ranks must agree on in a dispatch, the ``number``-th of its communicator.

    Args:
        meant: options that the user asked for, where this dispatch is a part of that call.
    """
    return {
        "call": "dispatch",
        NUMBER: number,
        **vars(meant or kind.options),
        "x.dtype": kind.x_dtype,
        "packed scales": kind.scale_words,
        "topk_weights.dtype": kind.weights_dtype,
        "x.requires_grad": kind.x_needs_grad,
        "topk_weights.requires_grad": kind.weights_need_grad,
    }


def combine_fields(number: int, options: CombineOptions) -> dict[str, Field]:
    """What ranks must agree on in a combine of the ``number``-th dispatch."""
    rest = {name: value for name, value in vars(options).items() if name not in ("needs_grad", "strategy")}
    return {
        "call": "combine",
        NUMBER: number,
        "mode": options.mode,
        **rest,
        "strategy": options.strategy,
        "y.requires_grad": options.needs_grad,
    }


def gradient_fields(number: int, what: str) -> dict[str, Field]:
    """What ranks must agree on in a transfer of backward that belongs to the ``number``-th dispatch."""
    return {"call": what, NUMBER: number}
