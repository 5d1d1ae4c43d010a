"""The handshake that opens every call: status, what must agree, and all counts.

Over torch.distributed it is one all-gather. Each rank contributes one row of int64 words::

    status | stamp | hash of the agreed fields | own error, UTF-8 (MESSAGE_WORDS) | counts

All calls use rows of the same width (:func:`opening_words`), so ranks that call different things still find out. A
fault that only one rank can see is thereby an error on all of them, before any payload moves. Where hashes differ, a
second all-gather brings the fields themselves, so that the error can name what differs. The row of a masked rank is
all zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from tokenloom.backends.base import CombineOptions, DispatchInputs, DispatchOptions
from tokenloom.errors import PeerError, PlanMismatch, ShapeMismatch
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup

MESSAGE_WORDS = 32
_HEADER_WORDS = 3 + MESSAGE_WORDS
_MASKED, _OK, _FAULT = 0, 1, 2
_HASH_BITS = 0x7FFF_FFFF_FFFF_FFFF
NUMBER = "dispatch number"
"""Name of the field that holds it."""

Field = int | str | bool | torch.dtype | None
Fields = Mapping[str, Field]
"""What all ranks must mean alike in a call, by name. First comes the call's name, then the number of its dispatch."""


class NeedsRoom(ShapeMismatch):
    """A rank has no room for a call that the others open: all of them make a larger communicator and call again.

    Any other fault of the same call comes first, because the rank that has it does not call again.
    """


def means_growth(reason: str) -> bool:
    """Whether what a rank has told of its fault is :class:`NeedsRoom`."""
    return reason.startswith(NeedsRoom.__name__)


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
        PeerError: another rank has a fault; PlanMismatch: fields differ, or another rank does something else than a
            call of a backend. Nothing of these where this rank has a fault, unless it needs room and another fault
            comes first. PeerTimeout: ranks are missing.
    """
    call = next(iter(fields.values()))
    fields = {"call": call, "communicator": ranks.notes.key(""), **fields}
    stamp = ranks.stamp()
    header = [_OK if fault is None else _FAULT, stamp, hash_of(fields)]
    header += _encode_message("" if fault is None else f"{type(fault).__name__}: {fault}")
    ends = _HEADER_WORDS + num_counts
    row = torch.zeros(max(ranks.opening_words, ends), dtype=torch.int64, device=ranks.device)
    row[:_HEADER_WORDS] = torch.tensor(header, dtype=torch.int64, device="cpu")
    if counts is not None:
        row[_HEADER_WORDS:ends] = counts
    phase = f"the handshake of {call}"
    table = ranks.all_gather(row, phase, opens=True).cpu().numpy()
    ranks.require_answers(table[:, 1].tolist(), stamp, phase)
    there = table[:, 0] != _MASKED
    faulty = np.flatnonzero(table[:, 0] == _FAULT)
    if len(faulty):
        reasons = {int(rank): _decode_message(table[rank, 3:_HEADER_WORDS]) for rank in faulty}
        final = [rank for rank, reason in reasons.items() if not means_growth(reason)]
        if fault is None or (final and isinstance(fault, NeedsRoom)):
            rank = (final or list(reasons))[0]
            raise PeerError(rank, reasons[rank])
    elif (table[:, 0] < 0).any():  # see RankGroup.all_gather_object
        raise PlanMismatch(int(np.argmax(table[:, 0] < 0)), "call", "another one", call, ranks.rank)
    elif len(set(table[there, 2].tolist())) > 1:
        told = ranks.all_gather_object((ranks.step, text_of(fields)), phase)
        there_told = [each for each in told if each is not None]
        ranks.notes.skip_to(1 + max(step for step, _ in there_told))  # later calls have the same numbers again
        raise_difference([None if each is None else each[1] for each in told])
    return table[:, _HEADER_WORDS:ends], frozenset(np.flatnonzero(~there).tolist())


def opening_words(plan: Plan) -> int:
    """Words of a row for any backend's counts: of ranks, of experts, and of nodes, which are no more than ranks."""
    return _HEADER_WORDS + 2 * plan.num_ranks + plan.num_experts


def dispatch_fields(number: int, options: DispatchOptions, inputs: DispatchInputs) -> dict[str, Field]:
    """What ranks must agree on in a dispatch, the ``number``-th of its communicator."""
    return {
        "call": "dispatch",
        NUMBER: number,
        **vars(options),
        "x.dtype": inputs.x.dtype,
        "packed scales": inputs.scale_words,
        "topk_weights.dtype": None if inputs.topk_weights is None else inputs.topk_weights.dtype,
        "x.requires_grad": inputs.x_needs_grad,
        "topk_weights.requires_grad": inputs.weights_need_grad,
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


def text_of(fields: Fields) -> dict[str, str]:
    """Fields in words, as they are compared and as errors show them."""
    return {name: _word(value) for name, value in fields.items()}


class CallKind:
    """Calls that mean the same but for the number of their dispatch: all else repeats from call to call.

    Args:
        fields: those of one of these calls.

    Attributes:
        number: of its dispatch; -1 if the call belongs to none.
    """

    def __init__(self, fields: Fields) -> None:
        self._fields = dict(fields)
        self.number = int(self._fields.get(NUMBER, -1))  # type: ignore[arg-type]
        names, values = tuple(fields), (None if name == NUMBER else value for name, value in fields.items())
        self._hash = _hash_of(names, tuple(values)) & _HASH_BITS

    def hash_of(self, number: int) -> int:
        """63 bits, equal for equal fields on all ranks.

        Args:
            number: of the dispatch.
        """
        return self._hash ^ (number + 1) * 0x9E3779B97F4A7C15 & _HASH_BITS

    def fields_of(self, number: int) -> Fields:
        """The fields of the call that belongs to the ``number``-th dispatch."""
        return {**self._fields, NUMBER: number} if NUMBER in self._fields else self._fields


def hash_of(fields: Fields) -> int:
    """63 bits, equal for equal fields on all ranks."""
    kind = CallKind(fields)
    return kind.hash_of(kind.number)


def raise_difference(texts: Sequence[Mapping[str, str] | None]) -> None:
    """Raise PlanMismatch for the first field that differs, from the fields of all ranks, None of masked ones.

    Raises:
        PlanMismatch: names the lowest rank that differs from rank 0 (or the lowest that is there), the field, and both
            values. PeerError: a rank that differed ended before it could say in what.
    """
    there = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    base, expected = there[0]
    names = dict.fromkeys(name for _, text in there for name in text)
    for name in names:
        for rank, text in there:
            if text.get(name) != expected.get(name):
                raise PlanMismatch(rank, name, text.get(name), expected.get(name), base)
    if None in texts:
        raise PeerError(texts.index(None), "it opened another call and ended")
    raise AssertionError("hashes of fields differ, the fields do not; this is a bug of tokenloom")


@lru_cache(maxsize=1024)
def _hash_of(names: tuple[str, ...], values: tuple[Field, ...]) -> int:
    words = "|".join(f"{name}={_word(value)}" for name, value in zip(names, values, strict=True))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


def _word(value: Field) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _encode_message(message: str) -> list[int]:
    data = message.encode()[: MESSAGE_WORDS * 8].ljust(MESSAGE_WORDS * 8, b"\0")
    return np.frombuffer(data, dtype=np.int64).tolist()


def _decode_message(words: np.ndarray) -> str:
    return np.ascontiguousarray(words).tobytes().rstrip(b"\0").decode(errors="ignore")
