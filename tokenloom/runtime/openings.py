"""What ranks say first in a call, whatever they call: a row of words each, as long on all of them.

::

    status | gather sequence | hash of what is meant | hash of the communicator | number of the latest collective
           | communicators made | words to tell | own error, UTF-8 (MESSAGE_WORDS) | the first of the words to tell

The length depends on the number of ranks alone. Over gloo a message of another length than the receiver awaits ends
its process, so ranks that begin different things of one process group could not find out otherwise: other calls, calls
of other communicators, or one that is being made. Words to tell that have no room in the row follow in a second one,
once all ranks mean the same. The row of a masked rank is all zeros.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from tokenloom.errors import PeerError, PlanMismatch, ShapeMismatch

MESSAGE_WORDS = 32
STATUS, SEQUENCE, MEANING, COMMUNICATOR, LATEST, MADE, SIZE = range(7)
_MESSAGE = SIZE + 1
_HEADER_WORDS = _MESSAGE + MESSAGE_WORDS
_MASKED, _OK, _FAULT = 0, 1, 2
_HASH_BITS = 0x7FFF_FFFF_FFFF_FFFF
NUMBER = "dispatch number"
"""Name of the field that holds it."""
MEETING = "a meeting"
"""The call of ranks that share objects. What for is shown and not compared: some may be a step behind the others."""
UNNAMED = "one that is being made"
"""A communicator whose ranks have not met yet. They number it differently if some have made others that failed."""

Field = int | str | bool | torch.dtype | None
Fields = Mapping[str, Field]
"""What all ranks must mean alike in a call, by name. First comes the call's name, then the number of its dispatch."""


class Verdict(NamedTuple):
    """How something that all ranks do in steps ended on a rank: what it says in a meeting, where others may go on.

    Attributes:
        failed: whether it failed. fatal: nothing else would help.
        of_another: it failed because another rank did.
        text: why.
    """

    failed: bool
    fatal: bool = False
    of_another: bool = False
    text: str = ""


class NeedsRoom(ShapeMismatch):
    """A rank has no room for a call that the others open: all of them make a larger communicator and call again.

    Any other fault of the same call comes first, because the rank that has it does not call again.
    """


def means_growth(reason: str) -> bool:
    """Whether what a rank has told of its fault is :class:`NeedsRoom`."""
    return reason.startswith(NeedsRoom.__name__)


def room(num_ranks: int) -> int:
    """Words to tell that an opening has room for: counts of ranks and nodes, and of as many experts as most models
    have."""
    return 512 + 2 * num_ranks


def encode(
    fields: Fields,
    fault: Exception | None,
    sequence: int,
    latest: int,
    made: int,
    first: torch.Tensor,
    size: int,
    num_ranks: int,
) -> torch.Tensor:
    """What a rank says.

    Args:
        fields: what all ranks must mean alike.
        fault: why this rank cannot take part, if so.
        sequence: of this gather, see :func:`gather_sequence <tokenloom.runtime.collectives.gather_sequence>`.
        latest: number of the latest collective, of the communicator whose number is largest.
        made: communicators that this rank has made of the group.
        first: int64, the first of the words that it tells the others, no more than there is :func:`room` for.
        size: how many words it tells them.
        num_ranks: of the group.
    """
    communicator = _hash_of(("communicator",), (fields["communicator"],)) & _HASH_BITS
    header = [_OK if fault is None else _FAULT, sequence, hash_of(fields), communicator, latest, made, size]
    header += _encode_message("" if fault is None else f"{type(fault).__name__}: {fault}")
    row = torch.zeros(_HEADER_WORDS + room(num_ranks), dtype=torch.int64, device=first.device)
    row[:_HEADER_WORDS] = torch.tensor(header, dtype=torch.int64, device="cpu")
    row[_HEADER_WORDS : _HEADER_WORDS + len(first)] = first
    return row


class Opening:
    """What all ranks have said, the same on all that take part.

    Attributes:
        absent: who takes no part.
        sequences: of all ranks.
        latest, made, size: the largest of these numbers.
        words: int64 [W, n], the words that had room.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table.numpy()
        self._present = self._table[:, STATUS] != _MASKED
        self.absent = frozenset(np.flatnonzero(~self._present).tolist())
        self.sequences = self._table[:, SEQUENCE].tolist()
        self.latest, self.made, self.size = (int(self._table[:, word].max()) for word in (LATEST, MADE, SIZE))
        self.words = table[:, _HEADER_WORDS:]

    @property
    def is_faulty(self) -> bool:
        """Whether any rank has told of a fault."""
        return bool((self._table[:, STATUS] == _FAULT).any())

    def raise_fault(self, fault: Exception | None) -> bool:
        """Raise what other ranks have told of their faults; whether any rank has one.

        Args:
            fault: this rank's own, behind which nothing is raised unless it needs room and another fault comes first.
        """
        faulty = np.flatnonzero(self._table[:, STATUS] == _FAULT)
        reasons = {int(rank): _decode_message(self._table[rank, _MESSAGE:_HEADER_WORDS]) for rank in faulty}
        final = [rank for rank, reason in reasons.items() if not means_growth(reason)]
        if reasons and (fault is None or (final and isinstance(fault, NeedsRoom))):
            rank = (final or list(reasons))[0]
            raise PeerError(rank, reasons[rank])
        return bool(reasons)

    def differs(self, word: int) -> bool:
        """Whether ranks that take part differ in MEANING or COMMUNICATOR."""
        return len(set(self._table[self._present, word].tolist())) > 1


def text_of(fields: Fields) -> dict[str, str]:
    """Fields in words, as they are compared and as errors show them."""
    return {name: _word(value) for name, value in fields.items()}


class CallKind:
    """Calls that differ in the number of their dispatch only: all else repeats from call to call.

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

    def also(self, name: str, value: Field) -> CallKind:
        """The same calls, in which ranks agree on one thing more."""
        return CallKind({**self._fields, name: value})

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
    present = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    base, expected = present[0]
    names = dict.fromkeys(name for _, text in present for name in text)
    for name in names:
        for rank, text in present:
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


def as_words(value: Any) -> torch.Tensor:
    """A picklable value as int64 words on the CPU."""
    data = pickle.dumps(value)
    padded = data + b"\0" * (-len(data) % 8)  # behind its end a pickle is not read
    return torch.frombuffer(bytearray(padded), dtype=torch.int64)


def from_words(table: torch.Tensor, absent: Collection[int]) -> list[Any]:
    """The value of each rank from its row of words; None of those that take no part."""
    return [None if rank in absent else pickle.loads(row.numpy().tobytes()) for rank, row in enumerate(table)]
