"""What carries bytes from rank to rank, outside of calls: messages of the group, or the memory of peers.

Both carry parcels, of which all ranks know the same list: who sends to whom, and how many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenloom.runtime.deferred_release import wait_for
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.symmetric_memory import BufferLayout, SymmetricBuffer


@dataclass(frozen=True)
class Parcel:
    """Bytes for another rank.

    Attributes:
        source: rank that sends them. to: rank that receives them.
        num_bytes: how many.
        parts: uint8 tensors that they are, one after the other, on the source, or where they go, on the receiver; none
            on other ranks.
    """

    source: int
    to: int
    num_bytes: int
    parts: Sequence[torch.Tensor] = ()


class ByteCarrier(Protocol):
    """One way to carry parcels. All ranks of the group make one together, and use it alike."""

    def carry(self, parcels: Sequence[Parcel]) -> None:
        """Carry them, in the order of the current stream.

        Args:
            parcels: the same on all ranks, but for their parts, and of at most the bytes for each sender and each
                receiver that the carrier was made for.

        Raises:
            PeerTimeout, PeerError, CommunicatorBroken: another rank is missing, or failed.
        """

    def close(self) -> None:
        """Give its memory back. All ranks do."""


class MessageCarrier:
    """Carries parcels as messages of the group's transport, all of one step in one exchange.

    Args:
        most_bytes: that a rank sends or receives in one step.
    """

    def __init__(self, ranks: RankGroup, most_bytes: int) -> None:
        self._ranks = ranks
        self._leaving, self._arriving = torch.empty(2, max(most_bytes, 1), dtype=torch.uint8, device=ranks.device)

    def carry(self, parcels: Sequence[Parcel]) -> None:
        ranks, me = self._ranks, self._ranks.rank
        sent = sorted((each for each in parcels if each.source == me), key=lambda each: each.to)
        received = sorted((each for each in parcels if each.to == me), key=lambda each: each.source)
        send_counts, recv_counts = [0] * ranks.num_ranks, [0] * ranks.num_ranks
        for parcel in sent:
            send_counts[parcel.to] += parcel.num_bytes
        for parcel in received:
            recv_counts[parcel.source] += parcel.num_bytes
        leaving, arriving = self._leaving[: sum(send_counts)], self._arriving[: sum(recv_counts)]
        _copy(_parts(sent), leaving)
        ranks.start_all_to_all(leaving, send_counts, recv_counts, "move_experts", arriving).wait()
        _copy(arriving, _parts(received))

    def close(self) -> None:
        self._leaving = self._arriving = torch.empty(0, dtype=torch.uint8)


class PeerMemoryCarrier:
    """Carries parcels by copy engines to memory of their receivers, which then take them from there.

    There are two such places on each rank, in turns. So a rank that has heard that all have come to a step knows that
    they have emptied the place of the step before.

    Args:
        most_bytes: that a rank sends or receives in one step.
    """

    def __init__(self, ranks: RankGroup, most_bytes: int) -> None:
        self._ranks, self._size, self._steps = ranks, max(most_bytes, 1), 0
        self._buffer = SymmetricBuffer(BufferLayout.of([("0", self._size), ("1", self._size)]), ranks)

    def carry(self, parcels: Sequence[Parcel]) -> None:
        ranks, me, place = self._ranks, self._ranks.rank, str(self._steps % 2)
        self._steps += 1
        received, offsets = [], [0] * ranks.num_ranks
        for parcel in parcels:
            if parcel.source == me:
                at = self._buffer.layout.offset(place) + offsets[parcel.to]
                for part in parcel.parts:
                    self._buffer.copy_to(parcel.to, at, part)
                    at += part.numel()
            elif parcel.to == me:
                received.append(parcel)
            offsets[parcel.to] += parcel.num_bytes
        agree(ranks, self._have_left, "move_experts")
        arrived = self._buffer.view(place, torch.uint8, (self._size,))
        _copy(arrived[: offsets[me]], _parts(received))

    def _have_left(self) -> tuple[dict[str, int], None]:
        """Wait until what this rank sends is there, and what it has received before is out of its place."""
        wait_for(self._ranks.device)
        return {"step of move_experts": self._steps}, None

    def close(self) -> None:
        self._buffer.close()


def make_carrier(ranks: RankGroup, by_peer_memory: bool, most_bytes: int) -> ByteCarrier:
    """Make the carrier for a group. All ranks do.

    Args:
        by_peer_memory: all ranks reach each other's memory.
        most_bytes: that a rank sends or receives in one step.

    Raises:
        torch.OutOfMemoryError: there is no room for ``most_bytes`` twice. PeerError: on another rank.
    """
    if by_peer_memory:
        return PeerMemoryCarrier(ranks, most_bytes)
    made: list[MessageCarrier] = []

    def make() -> tuple[dict[str, int], None]:
        made.append(MessageCarrier(ranks, most_bytes))
        return {"bytes of a step": most_bytes}, None

    agree(ranks, make, "move_experts")
    return made[0]


def _parts(parcels: Sequence[Parcel]) -> list[torch.Tensor]:
    return [part for parcel in parcels for part in parcel.parts]


def _copy(source: torch.Tensor | Sequence[torch.Tensor], to: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Copy bytes between one tensor and many that lie in it one after the other."""
    whole, parts = (source, to) if isinstance(source, torch.Tensor) else (to, source)
    assert isinstance(whole, torch.Tensor)
    begin = 0
    for part in parts:
        piece = whole[begin : begin + part.numel()]
        if whole is source:
            part.copy_(piece)
        else:
            piece.copy_(part)
        begin += part.numel()
