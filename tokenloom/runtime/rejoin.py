"""How a rank that was masked comes back: it and the others meet in the store of their process group.

A rank that comes back calls where :func:`come_back` waits. The others, in :func:`take_back`, settle who is there and
where their notes are from now on, and answer. Then all of them connect and settle whether everybody could: all go on
with the rank, or all go on as before.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch.distributed as dist

from tokenloom.errors import PeerTimeout, PlanMismatch
from tokenloom.runtime.links import Links
from tokenloom.runtime.membership import POLL_S
from tokenloom.runtime.noteboard import Noteboard
from tokenloom.runtime.signal_handlers import raise_if_of_handler
from tokenloom.runtime.topology import Topology

PHASE = "taking ranks back"
SPARE_S = 2.0
"""How much longer than the connecting itself a rank waits to hear whether all others are connected."""


@dataclass(frozen=True)
class Meeting:
    """What the ranks that stayed have settled.

    Attributes:
        place: keys of the meeting in the store begin with it.
        notes: where the notes of the communicator are afterwards.
        step: number of the last collective.
        masked: ranks that are masked afterwards.
        calls: which call of each rank that comes back is answered.
        missing: ranks that are to come back and have not called.
        differs: (rank, name, value there, value here) of something that must be alike and is not.
        topology: the nodes, as the ranks that stayed know them. A rank that comes back keeps its own.
    """

    place: str
    notes: str
    step: int
    masked: list[int]
    calls: dict[str, str]
    missing: list[int]
    differs: tuple[int, str, str, str] | None
    topology: dict[str, Any]

    @property
    def nodes(self) -> Topology:
        """The topology, which has travelled as text."""
        return Topology(**self.topology | {"node_of": tuple(self.topology["node_of"])})

    @property
    def links(self) -> str:
        """Where ranks find each other to connect."""
        return f"{self.place}/links"

    def keys(self, num_ranks: int) -> list[str]:
        """What ranks leave at the place while they connect, of a group of so many."""
        members = [rank for rank in range(num_ranks) if rank not in self.masked]
        said = [f"{self.place}/connected/{rank}" for rank in members]
        return [*Links.keys(self.links, len(members)), *said, f"{self.place}/failed"]


def take_back(
    notes: Noteboard,
    name: str,
    masked: Collection[int],
    back: Collection[int],
    terms: Mapping[str, str],
    topology: Topology,
    limit_s: float,
) -> Meeting:
    """Wait for ranks that come back, and settle with the others that stayed how to go on.

    Args:
        notes: the noteboard.
        name: tells this meeting from others of the communicator, the same on all ranks.
        masked: ranks that are masked afterwards.
        back: ranks that come back.
        terms: what must be alike on all ranks, by name.
        topology: the nodes of the ranks.
        limit_s: longest wait, in seconds.

    Raises:
        PeerTimeout: a rank has not called, or the store is gone. PlanMismatch: it was made with other arguments.
    """
    deadline = time.monotonic() + limit_s
    settled = notes.hear(name)
    while settled is None:
        calls = {rank: _open_call(notes, rank) for rank in sorted(back)}
        missing = [rank for rank, call in calls.items() if call is None]
        if not missing or time.monotonic() >= deadline:
            place = notes.key(name)
            numbers = {str(rank): call["number"] for rank, call in calls.items() if call is not None}
            differs = [
                (rank, term, call["terms"].get(term, "nothing"), value)
                for rank, call in calls.items()
                for term, value in terms.items()
                if call is not None and call["terms"].get(term) != value
            ]
            after = Meeting(
                place,
                f"{place}/notes",
                notes.step,
                sorted(masked),
                numbers,
                missing,
                differs[0] if differs else None,
                asdict(topology),
            )
            settled = notes.decide(name, asdict(after))
            if settled is None:
                raise PeerTimeout(notes.rank, [], PHASE, notes.step, "the store of the process group is gone")
        else:
            time.sleep(POLL_S)
            settled = notes.hear(name)
    meeting = Meeting(**settled)
    if meeting.missing:
        cause = f"no communicator was made there with rejoin=True within {limit_s:g} s"
        raise PeerTimeout(notes.rank, meeting.missing, PHASE, notes.step, cause)
    for number in meeting.calls.values():
        notes.say_at(_answer_to(number), settled)
    _require_alike(meeting)
    return meeting


def come_back(notes: Noteboard, terms: Mapping[str, str], limit_s: float) -> Meeting:
    """Call the others, and wait until they take this rank back.

    Raises:
        PeerTimeout: nobody answers. PlanMismatch: their communicator was made with other arguments.
    """
    number = uuid.uuid4().hex
    notes.say_at(_call_of(notes.rank), {"number": number, "terms": dict(terms)})
    deadline = time.monotonic() + limit_s
    while (settled := notes.hear_at(_answer_to(number))) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    notes.say_at(_call_of(notes.rank), None)  # deleted it would hold up who is about to read it
    if settled is None:
        cause = f"nobody called unmask_ranks([{notes.rank}]) within {limit_s:g} s"
        raise PeerTimeout(notes.rank, [], PHASE, 0, cause)
    meeting = Meeting(**settled)
    _require_alike(meeting)
    return meeting


def connect(notes: Noteboard, meeting: Meeting, limit_s: float) -> Links:
    """Connect with all ranks that are not masked, and settle whether all of them could.

    Raises:
        PeerTimeout: some could not. Those that stayed may go on as before.
    """
    members = [rank for rank in range(notes.num_ranks) if rank not in meeting.masked]
    links: Links | None = None
    said = ""
    try:
        store = dist.PrefixStore(meeting.links, notes.store)  # type: ignore[attr-defined]
        links = Links(store, notes.rank, members, limit_s)
    except RuntimeError as error:
        raise_if_of_handler(error)
        said = str(error)
    notes.say_at(f"{meeting.place}/connected/{notes.rank}", said)
    failed = _who_failed(notes, meeting, members, limit_s)
    failed = notes.decide_at(f"{meeting.place}/failed", failed)
    if failed is None:
        raise PeerTimeout(notes.rank, [], PHASE, meeting.step, "the store of the process group is gone")
    if failed or links is None:
        rank, why = failed
        raise PeerTimeout(notes.rank, [rank], PHASE, meeting.step, f"not all ranks could connect ({why})")
    return links


def _open_call(notes: Noteboard, rank: int) -> dict[str, Any] | None:
    """What a rank that wants to come back says, unless it has been answered."""
    call = notes.hear_at(_call_of(rank))
    answered = call is not None and notes.hear_at(_answer_to(call["number"])) is not None
    return None if answered else call


def _who_failed(notes: Noteboard, meeting: Meeting, members: Collection[int], limit_s: float) -> list[Any]:
    """The first rank that could not connect and why, or nothing."""
    deadline = time.monotonic() + limit_s + SPARE_S
    left = set(members)
    while left:
        for rank in sorted(left):
            said = notes.hear_at(f"{meeting.place}/connected/{rank}")
            if said == "":
                left.discard(rank)
            elif said is not None or time.monotonic() >= deadline:
                return [rank, said or "it did not come"]
        time.sleep(POLL_S if left else 0)
    return []


def _require_alike(meeting: Meeting) -> None:
    if meeting.differs:
        rank, name, theirs, ours = meeting.differs
        base = next(each for each in count() if each not in meeting.masked and str(each) not in meeting.calls)
        raise PlanMismatch(rank, name, theirs, ours, base=base)


def _call_of(rank: int) -> str:
    return f"tokenloom/back/{rank}"


def _answer_to(number: str) -> str:
    return f"tokenloom/welcome/{number}"
