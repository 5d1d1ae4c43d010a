"""Registry of backends: which exist, which work here, and which one ``auto`` picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenloom.backends import collective, nodes, peers
from tokenloom.backends.peers import MAX_SMS
from tokenloom.backends.registration import LAYER_SMS, Availability, Registration, Request
from tokenloom.backends.seam import TRANSPORTS, Backend, Capabilities
from tokenloom.errors import (
    BackendUnavailable,
    CommunicatorBroken,
    InvalidArgument,
    PeerError,
    PeerTimeout,
    PlanMismatch,
)
from tokenloom.plan import Plan
from tokenloom.runtime.openings import Verdict
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology, pretended

__all__ = [
    "LAYER_SMS",
    "MAX_SMS",
    "Availability",
    "Choice",
    "Registration",
    "Request",
    "availability",
    "capabilities",
    "choose",
    "make",
    "make_alone",
    "names",
    "probe",
]

_network, *_by_kernels = nodes.REGISTRATIONS
_registered: list[Registration] = [peers.REGISTRATION, _network, collective.REGISTRATION, *_by_kernels]
"""Best first: ``auto`` picks the first that works."""


@dataclass(frozen=True)
class Choice:
    """Backend in use.

    Attributes:
        backend: made for one communicator.
        why: hardware and software that it runs on.
        not_picked: reasons why better backends were not picked.
    """

    backend: Backend
    why: str
    not_picked: list[str]


def names() -> tuple[str, ...]:
    """List the names of all backends, best first."""
    return tuple(each.name for each in _registered)


def capabilities(name: str) -> Capabilities:
    """Look up what a backend can do where it works.

    Raises:
        InvalidArgument: no backend has that name.
    """
    if name not in names():
        raise InvalidArgument(f"backend is {name!r}, expected one of {', '.join(names())}")
    return _registered[names().index(name)].capabilities


def availability(
    transport: str,
    device: torch.device,
    plan: Plan | None = None,
    dtype: torch.dtype | None = None,
    ranks_per_node: int | None = None,
    name: str = "auto",
) -> list[Availability]:
    """List every backend, best first, with whether it works on this machine; for arguments see :class:`Request`.

    Without ``ranks_per_node`` all ranks are on this one node. Some backends work only if ``name`` asks for them.
    """
    num_ranks = 1 if plan is None else plan.num_ranks
    nodes = pretended(num_ranks, ranks_per_node or num_ranks)

    def on_nodes(on_rank: Availability, why_not: str | None) -> Availability:
        return on_rank if why_not is None else Availability(on_rank.name, False, why_not)

    probed = probe(Request(transport, device, name, plan, dtype, ranks_per_node=ranks_per_node))
    return [on_nodes(each, entry.why_not_on(nodes)) for each, entry in zip(probed, _registered, strict=True)]


def probe(request: Request) -> list[Availability]:
    """Ask every backend, best first, whether it works on this rank for this request.

    Raises:
        InvalidArgument: the request names an unknown backend, or an unknown transport.
    """
    if request.name not in ("auto", *names()):
        raise InvalidArgument(f"backend is {request.name!r}, expected one of auto, {', '.join(names())}")
    if request.between_nodes not in ("auto", *TRANSPORTS):
        raise InvalidArgument(f"transport is {request.between_nodes!r}, expected one of auto, {', '.join(TRANSPORTS)}")
    return [each.probe(request) for each in _registered]


def choose(
    name: str,
    by_rank: Sequence[Sequence[Availability]],
    topology: Topology | None = None,
    between_nodes: str = "auto",
) -> tuple[str, list[str]]:
    """Choose the best backend that works on all ranks.

    On one node, backends for several nodes are passed over without a reason.

    Args:
        name: name of a backend, or "auto".
        by_rank: result of :func:`probe` on every rank.
        topology: the nodes, or None if they are not known yet. "auto" then assumes one node. A backend that is asked
            for by name is assumed to run on the nodes.
        between_nodes: transport of rows between nodes.

    Returns:
        (its name, reasons why better ones were not picked).

    Raises:
        BackendUnavailable: the backend asked for does not work on some rank; the message says where and why.
        PlanMismatch: the ranks have not registered the same backends.
    """
    backends = [", ".join(each.name for each in of_rank) for of_rank in by_rank]
    for rank, theirs in enumerate(backends):
        if theirs != backends[0]:
            raise PlanMismatch(rank, "backends", theirs, backends[0])
    reasons: dict[str, str] = {}
    nodes = topology or Topology.together(len(by_rank))
    if between_nodes == "nvlink" and nodes.num_nodes > 1:
        raise BackendUnavailable(
            f"transport is 'nvlink', which reaches the ranks of one node, but there are {nodes.num_nodes} nodes: "
            f"{nodes.who_is_where}; use transport='auto'"
        )
    for index, candidate in enumerate(_registered):
        why_not = None if topology is None and name == candidate.name else candidate.why_not_on(nodes)
        other_nodes = candidate.capabilities.other_nodes
        if why_not is None and nodes.num_nodes > 1 and between_nodes not in ("auto", other_nodes):
            why_not = f"it reaches other nodes by {other_nodes}, transport is {between_nodes!r}"
        if why_not is None and between_nodes == "nvlink" != candidate.capabilities.own_node:
            why_not = "it does not send by NVLink alone, transport is 'nvlink'"
        if why_not is not None:
            reason = f"{candidate.name} does not work here: {why_not}"
            if name == candidate.name:
                raise BackendUnavailable(_with_cure(reason, "use backend='auto'"))
            if nodes.num_nodes > 1:
                reasons[candidate.name] = reason
            continue
        on_ranks = [of_rank[index] for of_rank in by_rank]
        failing = [(rank, each.why) for rank, each in enumerate(on_ranks) if not each.works]
        failing = failing or candidate.objections(on_ranks)
        if name in ("auto", candidate.name) and not failing:
            return candidate.name, list(reasons.values())
        if failing:
            ranks = "every rank" if len(failing) == len(by_rank) else f"rank {failing[0][0]}"
            reason = f"{candidate.name} does not work on {ranks}: {failing[0][1]}"
            if name == candidate.name:
                raise BackendUnavailable(_with_cure(reason, "use backend='auto'"))
            reasons[candidate.name] = reason
    if between_nodes == "auto":
        raise BackendUnavailable("; ".join(reasons.values()))
    if nodes.num_nodes == 1:
        raise BackendUnavailable("; ".join([*reasons.values(), "use transport='auto'"]))
    blamed = [reasons[each.name] for each in _registered if each.capabilities.other_nodes == between_nodes]
    raise BackendUnavailable("; ".join(blamed) + "; use transport='auto'")


def _with_cure(reason: str, cure: str) -> str:
    """Add a cure to a reason that has none."""
    return reason if "; pass " in reason or ", pass " in reason else f"{reason}; {cure}"


def make(request: Request, ranks: RankGroup, by_rank: Sequence[Sequence[Availability]]) -> Choice:
    """Make the best backend that works. Collective: every rank makes the same one.

    A backend may fail when it is made although all ranks expected it to work: one process may not map another's
    memory, for example. "auto" then goes on to the next.

    Args:
        by_rank: result of :func:`probe` on every rank.

    Raises:
        BackendUnavailable, PlanMismatch: see :func:`choose`.
        InvalidArgument, torch.OutOfMemoryError: this rank's error, which no other backend would cure.
        PeerError: such an error of another rank.
    """
    left = [list(of_rank) for of_rank in by_rank]
    reasons: list[str] = []
    while True:
        name, more = choose(request.name, left, ranks.topology, request.between_nodes)
        reasons += [reason for reason in more if reason not in reasons]
        index = names().index(name)
        made = _try(_registered[index], request, ranks)
        if not isinstance(made, _Failure):
            why = by_rank[ranks.rank][index].why
            return Choice(made, why, reasons)
        left[made.rank][index] = Availability(name, False, f"it failed when it was made: {made.text}")


def make_alone(name: str, request: Request, ranks: RankGroup, probed: Sequence[Availability]) -> Choice:
    """Make the backend that the other ranks have already.

    Args:
        name: result of :func:`choose`.
        probed: result of :func:`probe` on this rank.
    """
    index = names().index(name)
    return Choice(_registered[index].make(request, ranks), probed[index].why, [])


@dataclass(frozen=True)
class _Failure:
    """Failure of a rank to make a backend, in its own words."""

    rank: int
    text: str


def _try(registration: Registration, request: Request, ranks: RankGroup) -> Backend | _Failure:
    """Make a backend, or say why it failed. All ranks get the same answer."""
    backend: Backend | None = None
    error: Exception | None = None
    try:
        backend = registration.make(request, ranks)
    except (PeerTimeout, CommunicatorBroken):
        raise
    except Exception as failure:
        error = failure
    except BaseException as interruption:
        ranks.abort(interruption)
        raise
    own = Verdict(False)
    if error is not None:
        own = Verdict(True, _is_fatal(error), isinstance(error, PeerError), str(error))
    while True:  # other ranks may still gather for an earlier step, which has failed for them
        verdicts = ranks.all_gather_object(own, "making a backend")
        if all(each is None or isinstance(each, Verdict) for each in verdicts):
            break
    failed = [(rank, each) for rank, each in enumerate(verdicts) if each is not None and each.failed]
    if backend is not None and not failed:
        return backend
    if backend is not None:
        backend.close()
    for rank, each in failed:
        if each.fatal:
            raise error if error is not None and _is_fatal(error) else PeerError(rank, each.text)
    rank, each = next((pair for pair in failed if not pair[1].of_another), failed[0])
    return _Failure(rank, each.text)


def _is_fatal(error: Exception) -> bool:
    """Tell whether every other backend would fail in the same way."""
    return isinstance(error, InvalidArgument | torch.OutOfMemoryError)
