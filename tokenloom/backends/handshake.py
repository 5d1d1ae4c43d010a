"""Handshake that opens every call over torch.distributed: status, fields that must agree, and all counts.

It is the opening of a call (:mod:`tokenloom.runtime.openings`), with counts as its words. So a fault that only one
rank can see is an error on all ranks, before any payload moves.
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

    It waits for the other ranks as long as opening a call may take.

    Args:
        fields: values that must be the same on all ranks, by name.
        counts: int64 [num_counts] on the group's device, or None for zeros.
        fault: this rank's own error, which the caller raises once the others know of it.

    Returns:
        (int64 [W, num_counts], ranks that take no part). The counts of such ranks are zero. All ranks that take part
        get the same.

    Raises:
        PeerError, PlanMismatch, PeerTimeout: see :meth:`RankGroup.open`.
    """
    if counts is None:
        counts = torch.zeros(num_counts, dtype=torch.int64, device="cpu")
    table, absent = ranks.open(fields, counts, f"the handshake of {next(iter(fields.values()))}", fault)
    return table.numpy(), absent


def dispatch_fields(number: int, kind: DispatchKind, user_options: DispatchOptions | None = None) -> dict[str, Field]:
    """List the fields of a dispatch, the ``number``-th of its communicator, that all ranks must agree on.

    Args:
        user_options: options that the user passed, if they differ from those of ``kind``.
    """
    return {
        "call": "dispatch",
        NUMBER: number,
        **vars(user_options or kind.options),
        "x.dtype": kind.x_dtype,
        "packed scales": kind.scale_words,
        "topk_weights.dtype": kind.weights_dtype,
        **dict(kind.alike),  # before what follows from it
        "x.requires_grad": kind.x_needs_grad,
        "topk_weights.requires_grad": kind.weights_need_grad,
        **({} if kind.width is None else {"width": kind.width}),
    }


def combine_fields(number: int, options: CombineOptions, width: int | None = None) -> dict[str, Field]:
    """List the fields of a combine of the ``number``-th dispatch that all ranks must agree on.

    Args:
        width: values in a row, where they are not H.
    """
    rest = {name: value for name, value in vars(options).items() if name not in ("needs_grad", "strategy")}
    return {
        "call": "combine",
        NUMBER: number,
        "mode": options.mode,
        **rest,
        "strategy": options.strategy,
        "y.requires_grad": options.needs_grad,
        **({} if width is None else {"width": width}),  # or narrow rows would be taken for those of tokens
    }


def gradient_fields(number: int, call: str) -> dict[str, Field]:
    """List the fields of a transfer in backward, by the ``number``-th dispatch, that all ranks must agree on."""
    return {"call": call, NUMBER: number}
