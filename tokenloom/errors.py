"""Exceptions that tokenloom raises on purpose.

Each message says what was expected, what came, and what to do. Each class derives from ``TokenloomError`` and from the
built-in exception that a caller would otherwise expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = [
    "BackendUnavailable",
    "CapacityOverflow",
    "CommunicatorBroken",
    "DeviceMismatch",
    "DtypeMismatch",
    "ImplausibleRates",
    "InvalidArgument",
    "InvalidExpertId",
    "KernelCompileError",
    "NotDifferentiable",
    "PeerError",
    "PeerTimeout",
    "PlanMismatch",
    "ShapeMismatch",
    "TokenloomError",
]


_BROKE = "the connection broke"
"""Begins a cause that ends with the text of gloo or NCCL, in parentheses."""
_GONE = ("its process has ended", "the communicator was closed there", "the store of the process group is gone")
"""How a cause ends that no longer wait removes."""


class TokenloomError(Exception):
    """Base class of tokenloom's exceptions.

    Attributes:
        known_to_all: true if every rank raises this error, or its counterpart, in the same call. Reporting it to the
            other ranks would then open a call that they do not open.
    """

    known_to_all = False

    def __reduce__(self) -> tuple[object, ...]:  # by default unpickling passes the message for all arguments
        return _again, (type(self), self.args, vars(self))


_Error = TypeVar("_Error", bound=TokenloomError)


def _again(kind: type[TokenloomError], args: tuple[object, ...], known: dict[str, object]) -> TokenloomError:
    """Make an error anew without its constructor."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(known)
    return error


def a_type(value: object) -> str:
    """The type of a value in a sentence: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' or name == 'ndarray' else 'a'} {name}"


def require_type(name: str, value: object, kind: type, expected: str) -> None:
    """Raise InvalidArgument unless an argument is of this type.

    Args:
        name: of the argument.
        expected: the type, as the user names it.
    """
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} is {a_type(value)}, expected {expected}")


def raised_by_all(error: _Error) -> _Error:
    """Mark an error that every rank raises alike, and give it back."""
    error.known_to_all = True
    return error


def is_known_to_all(error: BaseException) -> bool:
    """Return whether the other ranks know of this error or meet it themselves. Any exception may be marked so."""
    return bool(getattr(error, "known_to_all", False))


class InvalidArgument(TokenloomError, ValueError):
    """An option has a value that no call accepts, such as an unknown layout or an alignment of 0."""


class ShapeMismatch(TokenloomError, ValueError):
    """A tensor does not have the shape or the strides that the communicator or the call needs."""


class DtypeMismatch(TokenloomError, TypeError):
    """A tensor has a dtype that the call or the backend does not take."""


class DeviceMismatch(TokenloomError, ValueError):
    """A tensor is on another device than the communicator."""


class InvalidExpertId(TokenloomError, ValueError):
    """An entry of ``topk_ids`` is below -1 or not below ``num_experts``.

    Attributes:
        token: row of the first such entry.
        k: column of the first such entry.
        expert_id: value of the first such entry.
    """

    def __init__(self, token: int, k: int, expert_id: int, num_experts: int, num_bad: int) -> None:
        self.token = token
        self.k = k
        self.expert_id = expert_id
        super().__init__(
            f"topk_ids[{token}, {k}] is {expert_id}, expected -1 (unused) or 0..{num_experts - 1}"
            f" ({num_bad} such {'entry' if num_bad == 1 else 'entries'}); mask unused places with -1"
        )


class ImplausibleRates(TokenloomError, ValueError):
    """A rate that was measured is far from that of any GPU of this kind.

    Attributes:
        rate: name of it, as in :class:`tokenloom.kernels.common.Rates`.
        value: what was measured.
    """

    def __init__(self, rate: str, value: object, least: float, most: float) -> None:
        self.rate = rate
        self.value = value
        super().__init__(
            f"{rate} is {value!r}, expected {least:g} to {most:g}; measure again while nothing else uses these GPUs"
        )


class PlanMismatch(TokenloomError, ValueError):
    """Ranks disagree about something that must be the same on all of them.

    Attributes:
        rank: lowest rank that differs from rank 0, or from the lowest that is not masked.
        field: name of the value that differs.
    """

    known_to_all = True

    def __init__(self, rank: int, field: str, theirs: object, expected: object, base: int = 0) -> None:
        self.rank = rank
        self.field = field
        cure = f"give all ranks the same {field}"
        if field in ("wire_dtype", "out_dtype"):
            cure += f" (the dtype of y unless you pass {field})"
        elif field == "dispatch number":
            cure = "combine the result of the same dispatch on all ranks"
        elif field == "communicator":
            cure = "make all communicators, and their calls, in the same order on all ranks"
        elif field in ("topk_ids", "topk_weights"):  # of a layer
            cure = f"pass {field} on all ranks, or on none"
        elif field in ("trained parameters", "trained experts"):
            cure = "freeze the same parameters on all ranks"
        elif field == "correction_bias":  # of which these are checksums
            cure = "call update_correction_bias on all ranks, with the same rate, or load the same bias on all"
        super().__init__(f"rank {rank} has {field}={theirs}, rank {base} has {field}={expected}; {cure}")


class PeerError(TokenloomError, RuntimeError):
    """Another rank failed, so this call failed here too.

    No rank received anything, and the communicator keeps working. There is one exception: over gloo, a rank that
    fails in the middle of a call ends the communicator, and leaves its process group out of step.

    Attributes:
        rank: rank that failed.
        reason: that rank's error, in short.
    """

    known_to_all = True

    def __init__(self, rank: int, reason: str, *, sent: bool = False) -> None:
        self.rank = rank
        self.reason = reason
        what = "in this call, nothing was received"
        if sent:
            what = "in the middle of this call; make a new process group, and a communicator on it"
        super().__init__(f"rank {rank} failed {what}: {reason}")


class PeerTimeout(TokenloomError, TimeoutError):
    """Peers did not arrive in time, or died. The communicator is broken afterwards.

    Attributes:
        rank: rank that noticed.
        peers: missing ranks, empty if they are unknown.
        nodes: nodes of those, ascending; empty if all ranks are on one node.
        phase: phase in which this rank was waiting.
        epoch: number of the collective step, the same on all ranks.
        cause: why it gave up.
    """

    known_to_all = True

    def __init__(
        self, rank: int, peers: Sequence[int], phase: str, epoch: int, cause: str, nodes: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self.nodes = tuple(nodes)
        self.phase = phase
        self.epoch = epoch
        self.cause = cause
        missing = ", ".join(map(str, self.peers)) if self.peers else "unknown"
        if self.nodes:
            missing += f" on node(s) {', '.join(map(str, self.nodes))}"
        why, cure, text = f"{cause}; look there first", "", ""
        if cause.startswith(_BROKE):
            why = "the process ended or its connection broke; see that rank's log"
            text = cause.removeprefix(_BROKE)
        elif not cause.endswith(_GONE):
            cure = "; a larger timeout_s, or open_timeout_s where a call opens, waits longer"
        super().__init__(
            f"rank {rank} waited in {phase} (step {epoch}) for rank(s) {missing}: {why}. "
            "Close this communicator. Once all ranks are back, make a new process group, and a communicator on it"
            f"{cure}{text}"
        )


class CommunicatorBroken(TokenloomError, RuntimeError):
    """The communicator cannot be used: it was closed, or an earlier call timed out."""

    known_to_all = True


class CapacityOverflow(TokenloomError, RuntimeError):
    """A dispatch needed more rows than its capacity.

    Attributes:
        needed: capacity that would have been enough on every rank: rows, or in layout "slots" places for each expert.
        capacity: capacity that was given.
    """

    known_to_all = True

    def __init__(self, needed: int, capacity: int, *, sent: bool) -> None:
        self.needed = needed
        self.capacity = capacity
        rows, what, cure = "rows", "nothing is handed out", f"pass capacity={needed}"
        if sent:
            rows = "rows (in layout 'slots', places for each expert)"
            what = "an earlier dispatch dropped rows: combine gives NaN for their tokens"
            cure += f", or pool_rows={needed} to a layer that has pool_rows"
        super().__init__(f"dispatch needs {needed} {rows}, the capacity is {capacity}; {what}; {cure}")


class BackendUnavailable(TokenloomError, RuntimeError):
    """The requested backend does not work here. The message says why."""


class NotDifferentiable(TokenloomError, RuntimeError):
    """A gradient was requested through something that has none, such as an FP8 payload."""


class KernelCompileError(TokenloomError, RuntimeError):
    """A kernel did not compile. The message holds the compiler's log."""
