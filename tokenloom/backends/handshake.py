"""The exchange that opens every call: status, what must agree, and all counts, in one all-gather.

Each rank contributes one row of int64 words::

    status | agreed fields (NUM_FIELDS) | own error, UTF-8 (MESSAGE_WORDS) | counts

Dispatch and combine use rows of the same width, so ranks that call different things still find out. A fault
that only one rank can see is thereby an error on all of them, before any payload moves.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from tokenloom.backends.base import CombineCall, DispatchCall, DispatchInput
from tokenloom.errors import PeerError, PlanMismatch
from tokenloom.kernels.common import NUM_FIELDS
from tokenloom.plan import COMBINE_STRATEGIES, DISPATCH_STRATEGIES, LAYOUTS
from tokenloom.runtime.rank_group import RankGroup

MESSAGE_WORDS = 32
_HEADER_WORDS = 1 + NUM_FIELDS + MESSAGE_WORDS
_OK, _FAULT = 0, 1

Field = int | str | bool | torch.dtype | None

_DTYPES = tuple(
    str(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)
)
_WORDS = (
    None,
    "dispatch",
    "combine",
    "MegaMoE",
    *LAYOUTS,
    "exact",
    "bounded",
    "per_rank",
    "per_route",
    "gradient of weights",
    "yes",
    "no",
    *_DTYPES,
    *sorted({*DISPATCH_STRATEGIES, *COMBINE_STRATEGIES}),
)


def exchange(
    ranks: RankGroup,
    fields: dict[str, Field],
    counts: torch.Tensor | None,
    num_counts: int,
    fault: Exception | None,
) -> np.ndarray:
    """Exchange status, fields and counts; raise on every rank if anything is wrong on any other.

    Args:
        ranks: the group.
        fields: what must be the same on all ranks, by name, at most NUM_FIELDS; the first is the call's name.
        counts: int64 [num_counts] on the group's device, or None for zeros.
        fault: this rank's own error, which the caller raises once the others know of it.

    Returns:
        int64 [W, num_counts], the counts of every rank.

    Raises:
        PeerError: another rank has a fault; PlanMismatch: fields differ. Nothing where this rank has a fault.
    """
    header = [_OK if fault is None else _FAULT]
    header += encode_fields(fields)
    header += _encode_message("" if fault is None else f"{type(fault).__name__}: {fault}")
    row = torch.zeros(_HEADER_WORDS + num_counts, dtype=torch.int64, device=ranks.device)
    row[:_HEADER_WORDS] = torch.tensor(header)
    if counts is not None:
        row[_HEADER_WORDS:] = counts
    table = ranks.all_gather(row, f"the counts exchange of {next(iter(fields.values()))}").cpu().numpy()
    if fault is None:
        _raise_for_peers(table, list(fields))
    return table[:, _HEADER_WORDS:]


def dispatch_fields(number: int, call: DispatchCall, tensors: DispatchInput) -> dict[str, Field]:
    """What ranks must agree on in a dispatch, the ``number``-th of its communicator."""
    return {
        "call": "dispatch",
        "dispatch number": number,
        "layout": call.layout,
        "alignment": call.alignment,
        "sizes": call.sizes,
        "capacity": call.capacity,
        "x.dtype": tensors.x.dtype,
        "topk_weights.dtype": None if tensors.topk_weights is None else tensors.topk_weights.dtype,
        "x.requires_grad": tensors.x_needs_grad,
        "topk_weights.requires_grad": tensors.weights_need_grad,
        "to_fp8": call.to_fp8,
        "power_of_two_scales": call.power_of_two_scales,
        "strategy": call.strategy,
    }


def combine_fields(number: int, call: CombineCall) -> dict[str, Field]:
    """What ranks must agree on in a combine of the ``number``-th dispatch."""
    return {
        "call": "combine",
        "dispatch number": number,
        "mode": call.mode,
        "weighted": call.weighted,
        "wire_dtype": call.wire_dtype,
        "out_dtype": call.out_dtype,
        "y.requires_grad": call.needs_grad,
        "strategy": call.strategy,
    }


def encode_fields(fields: dict[str, Field]) -> tuple[int, ...]:
    """Fields as integers of 32 bits: non-negative ones stand for themselves, words for -1 - their index."""
    number = fields.get("dispatch number")  # all else repeats from call to call
    codes = _encoded(tuple(value for name, value in fields.items() if name != "dispatch number"))
    codes = codes if number is None else (codes[0], _encode(number), *codes[1:])
    return codes + (0,) * (NUM_FIELDS - len(codes))


@lru_cache(maxsize=1024)
def _encoded(values: tuple[Field, ...]) -> tuple[int, ...]:
    return tuple(_encode(value) for value in values)


def decode_field(code: int) -> int | str | None:
    """The value of an encoded field, dtypes and booleans as words."""
    return code if code >= 0 else _WORDS[-1 - code]


def _raise_for_peers(table: np.ndarray, names: list[str]) -> None:
    faulty = np.flatnonzero(table[:, 0] != _OK)
    if len(faulty):
        rank = int(faulty[0])
        raise PeerError(rank, _decode_message(table[rank, 1 + NUM_FIELDS : _HEADER_WORDS]))
    for index, name in enumerate(names):
        column = table[:, 1 + index]
        different = np.flatnonzero(column != column[0])
        if len(different):
            rank = int(different[0])
            raise PlanMismatch(rank, name, decode_field(int(column[rank])), decode_field(int(column[0])))


def _encode(value: Field) -> int:
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(value, int):
        return value
    return -1 - _WORDS.index(str(value) if isinstance(value, torch.dtype) else value)


def _encode_message(message: str) -> list[int]:
    data = message.encode()[: MESSAGE_WORDS * 8].ljust(MESSAGE_WORDS * 8, b"\0")
    return np.frombuffer(data, dtype=np.int64).tolist()


def _decode_message(words: np.ndarray) -> str:
    return np.ascontiguousarray(words).tobytes().rstrip(b"\0").decode(errors="ignore")
