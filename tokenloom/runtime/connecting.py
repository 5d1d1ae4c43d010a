"""How ranks connect by pairs: those of a group that take part, and later those that were masked and come back.

In :func:`connect` all ranks settle who takes part, connect, and settle whether all of them could.

A rank that comes back calls where :func:`come_back` waits. The others, in :func:`take_back`, settle who is there and
where their notes are from now on, and answer. Then all of them connect anew in :func:`reconnect`, and settle whether
everybody could: all go on with the rank, or all go on as before.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch.distributed as dist

from tokenloom.errors import PeerTimeout, PlanMismatch
from tokenloom.runtime.links import Links
from tokenloom.runtime.membership import AwaitedNotes
from tokenloom.runtime.process_groups import raise_if_of_handler
from tokenloom.runtime.siblings import STEPS_APART
from tokenloom.runtime.store_notes import StoreNotes, poll
from tokenloom.runtime.topology import Topology
from tokenloom.runtime.waiting import Watch

PHASE = "taking ranks back"
LATE_TO_CONNECT_S = 5.0
"""How much later than this rank another one may say whether it could connect."""


def connect(watch: Watch, phase: str, timeout_s: float, open_timeout_s: float) -> Links:
    """Connect all ranks that take part. They start no collective of the process group any more.

    Who takes part is settled first, and whether all of them could connect afterwards: then all are connected, or
    none is, and they try again without those that were lost meanwhile.

    Args:
        watch: of this rank.
        phase: what is going on, for errors.
        timeout_s: longest wait for the connections. open_timeout_s: for ranks that come to this.

    Raises:
        PeerTimeout: a rank did not come, where none is masked for that. Or the store is gone.
    """
    for _ in range(watch.notes.num_ranks if watch.masks_late else 1):
        links, failed = _try_to_connect(watch, phase, timeout_s, open_timeout_s)
        if links is not None:
            return links
    watch.require_none_failed()
    raise watch.fail(phase, watch.notes.step, [], f"not all ranks could connect ({failed})")


def _try_to_connect(watch: Watch, phase: str, timeout_s: float, open_timeout_s: float) -> tuple[Links | None, str]:
    """Connect all ranks that take part, or none; then also why it failed, the same on all."""
    notes, membership = watch.notes, watch.membership
    name, me = notes.new_name("links"), notes.rank
    notes.say(f"{name}/here", True)
    here = AwaitedNotes(notes, f"{name}/here", membership.others)
    watch.wait(here, phase, notes.step, open_timeout_s)
    members = set(watch.decide(f"{name}/members", [me, *membership.others], phase))
    watch.look()  # the rank that settled it may have known more
    if me not in members:
        watch.broken = f"the other ranks have masked rank {me}"
        watch.require_alive()
    membership.apply(membership.lost | (frozenset(range(notes.num_ranks)) - members))
    place = notes.key(name)
    links, failed = _make_links(notes, place, members, timeout_s)
    notes.delete_with_notes(Links.keys(place, len(members)))
    notes.say(f"{name}/connected", failed)
    connected = AwaitedNotes(notes, f"{name}/connected", membership.others)
    watch.wait(connected, phase, notes.step, timeout_s + LATE_TO_CONNECT_S)
    failed = failed or next(filter(None, connected.by_rank.values()), "")
    if membership.masked & members:
        failed = failed or "a rank was lost"
    failed, step = watch.decide(f"{name}/outcome", [failed, notes.step + STEPS_APART], phase)
    notes.skip_to(step)  # ranks may have come to different collectives before
    return (None if failed else links), str(failed)


def _make_links(notes: StoreNotes, place: str, members: Collection[int], limit_s: float) -> tuple[Links | None, str]:
    """Connect this rank with the other members, or say why it cannot."""
    try:
        store = dist.PrefixStore(place, notes.store)  # type: ignore[attr-defined]
        return Links(store, notes.rank, members, limit_s), ""
    except RuntimeError as error:
        raise_if_of_handler(error)
        return None, str(error)


@dataclass(frozen=True)
class Meeting:
    """The terms that the ranks which stayed have settled.

    Attributes:
        place: keys of the meeting in the store begin with it.
        step: number of the last collective.
        masked: ranks that are masked afterwards.
        calls: which call of each rank that comes back is answered.
        missing: ranks that are to come back and have not called.
        differs: (rank, name, value there, value here) of something that must be alike and is not.
        topology: the nodes, as the ranks that stayed know them. A rank that comes back keeps its own.
    """

    place: str
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
    def notes(self) -> str:
        """Where the notes of the communicator are afterwards."""
        return f"{self.place}/notes"

    @property
    def links(self) -> str:
        """Where ranks find each other to connect."""
        return f"{self.place}/links"

    def keys(self, num_ranks: int) -> list[str]:
        """Keys that the ranks of a group of this size leave at the place while they connect."""
        members = [rank for rank in range(num_ranks) if rank not in self.masked]
        reports = [f"{self.place}/connected/{rank}" for rank in members]
        return [*Links.keys(self.links, len(members)), *reports, f"{self.place}/failed"]


def take_back(
    notes: StoreNotes,
    name: str,
    masked: Collection[int],
    back: Collection[int],
    terms: Mapping[str, str],
    topology: Topology,
    limit_s: float,
) -> Meeting:
    """Wait for ranks that come back, and settle with the others that stayed how to go on.

    Args:
        notes: of the group.
        name: tells this meeting from others of the communicator, the same on all ranks.
        masked: ranks that are masked afterwards.
        back: ranks that come back.
        terms: what must be alike on all ranks, by name.
        topology: the nodes of the ranks.
        limit_s: longest wait, in seconds.

    Raises:
        PeerTimeout: a rank has not called, or the store is gone. PlanMismatch: it was made with other arguments.
    """

    awaited = sorted(set(back))

    def open_calls() -> dict[int, dict[str, Any]]:
        return {rank: call for rank in awaited if (call := _open_call(notes, rank)) is not None}

    poll(lambda: notes.hear(name) is not None or len(open_calls()) == len(awaited), limit_s)
    calls = open_calls()
    differs = [
        (rank, term, call["terms"].get(term, "nothing"), value)
        for rank, call in calls.items()
        for term, value in terms.items()
        if call["terms"].get(term) != value
    ]
    meeting = Meeting(
        place=notes.key(name),
        step=notes.step,
        masked=sorted(masked),
        calls={str(rank): call["number"] for rank, call in calls.items()},
        missing=[rank for rank in awaited if rank not in calls],
        differs=differs[0] if differs else None,
        topology=asdict(topology),
    )
    settled = notes.decide(name, asdict(meeting))
    if settled is None:
        raise PeerTimeout(notes.rank, [], PHASE, notes.step, "the store of the process group is gone")
    meeting = Meeting(**settled)
    if meeting.missing:
        cause = f"no communicator was made there with rejoin=True within {limit_s:g} s"
        raise PeerTimeout(notes.rank, meeting.missing, PHASE, notes.step, cause)
    for number in meeting.calls.values():
        notes.say_at(_answer_to(number), settled)
    _require_alike(meeting)
    return meeting


def come_back(notes: StoreNotes, terms: Mapping[str, str], limit_s: float) -> Meeting:
    """Call the others, and wait until they take this rank back.

    Raises:
        PeerTimeout: nobody answers. PlanMismatch: their communicator was made with other arguments.
    """
    number = uuid.uuid4().hex
    notes.say_at(_call_of(notes.rank), {"number": number, "terms": dict(terms)})
    settled = poll(lambda: notes.hear_at(_answer_to(number)), limit_s)
    notes.say_at(_call_of(notes.rank), None)  # deleted it would hold up who is about to read it
    if settled is None:
        cause = f"nobody called unmask_ranks([{notes.rank}]) within {limit_s:g} s"
        raise PeerTimeout(notes.rank, [], PHASE, 0, cause)
    meeting = Meeting(**settled)
    _require_alike(meeting)
    return meeting


def reconnect(notes: StoreNotes, meeting: Meeting, limit_s: float) -> Links:
    """Connect with all ranks that are not masked, and settle whether all of them could.

    Raises:
        PeerTimeout: some could not. Those that stayed may go on as before.
    """
    members = [rank for rank in range(notes.num_ranks) if rank not in meeting.masked]
    links, failure = _make_links(notes, meeting.links, members, limit_s)
    notes.say_at(f"{meeting.place}/connected/{notes.rank}", failure)
    failed = _who_failed(notes, meeting, members, limit_s)
    failed = notes.decide_at(f"{meeting.place}/failed", failed)
    if failed is None:
        raise PeerTimeout(notes.rank, [], PHASE, meeting.step, "the store of the process group is gone")
    if failed or links is None:
        rank, why = failed
        raise PeerTimeout(notes.rank, [rank], PHASE, meeting.step, f"not all ranks could connect ({why})")
    return links


def _open_call(notes: StoreNotes, rank: int) -> dict[str, Any] | None:
    """The request of a rank that wants to come back, unless it has been answered."""
    call = notes.hear_at(_call_of(rank))
    answered = call is not None and notes.hear_at(_answer_to(call["number"])) is not None
    return None if answered else call


def _who_failed(notes: StoreNotes, meeting: Meeting, members: Collection[int], limit_s: float) -> list[Any]:
    """The first rank that could not connect and why, or nothing."""
    failures: dict[int, str | None] = dict.fromkeys(members)

    def are_known() -> bool:
        for rank, failure in failures.items():
            if failure is None:
                failures[rank] = notes.hear_at(f"{meeting.place}/connected/{rank}")
        return any(failures.values()) or None not in failures.values()

    poll(are_known, limit_s + LATE_TO_CONNECT_S)
    failed = [[rank, why] for rank, why in failures.items() if why]
    absent = [[rank, "it did not come"] for rank, why in failures.items() if why is None]
    return next(iter([*failed, *absent]), [])


def _require_alike(meeting: Meeting) -> None:
    if meeting.differs:
        rank, name, theirs, ours = meeting.differs
        base = next(each for each in count() if each not in meeting.masked and str(each) not in meeting.calls)
        raise PlanMismatch(rank, name, theirs, ours, base=base)


def _call_of(rank: int) -> str:
    return f"tokenloom/back/{rank}"


def _answer_to(number: str) -> str:
    return f"tokenloom/welcome/{number}"
