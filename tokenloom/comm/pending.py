"""Calls in two halves as users hold them, and which of them may be open at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tokenloom.comm.graph_breaks import breaks_graph
from tokenloom.comm.torch_modes import require_eager
from tokenloom.errors import InvalidArgument
from tokenloom.runtime.turns import Turn

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """A call whose first half has run: what ``send_dispatch`` or ``send_combine`` returned.

    The tensors that were sent may be overwritten by later work on the same stream; a combine whose weights want a
    gradient needs y unchanged until backward, as ever. On backends "nvlink", "gin" and "padded" nothing of tokenloom
    runs on the GPU until ``receive``; on "padded" NCCL may carry rows meanwhile.

    Halves are calls: all ranks make the same calls in the same order. A call may open in one piece or in halves, in
    backward or in a layer. When it does, every call but the one before it must have been received. So two
    micro-batches can take turns, and the two that are open may be received in either order, the same on all ranks. A
    call that raised an error counts as well, and so does each call of a CUDA graph that is replayed: between the
    halves of a call outside of graphs, replay none that calls this communicator. A pending must not be dropped
    unreceived.
    """

    def __init__(self, finish: Callable[[], T], calls: OpenCalls, name: str, discard: Callable[[], object]) -> None:
        """Made by the communicator.

        Args:
            finish: runs the second half.
            calls: of the communicator.
            name: "dispatch" or "combine", for errors.
            discard: runs what other ranks need of the second half, if nobody wants its result any more.
        """
        self._finish: Callable[[], T] | None = finish
        self._calls = calls
        self._number = calls.keep(self, name, discard)

    @breaks_graph
    def receive(self) -> T:
        """Run the second half: wait for what the host has to know, and give what the call in one piece returns.

        It runs on the current stream, which should be that of the first half. With gradients enabled when the call
        was sent, the result has a graph, whatever is enabled now.

        Raises:
            InvalidArgument: it was received before. Or another thread is in a call of the communicator, or torch
                transforms what is called: then it is still to be received.
            TokenloomError: what the call in one piece raises.
        """
        finish = self._finish
        if finish is None:
            raise InvalidArgument("this call was received before; receive() gives the result of a pending call once")
        require_eager()
        with self._calls.turn:
            self._finish = None
            self._calls.received(self._number)
            return finish()


@dataclass(frozen=True)
class _Half:
    """A call that was sent and not yet received.

    Attributes:
        number: of the call.
        name: for errors.
        owner: what its user holds.
        discard: runs its second half without a result.
    """

    number: int
    name: str
    owner: weakref.ref[Pending[Any]]
    discard: Callable[[], object]


class OpenCalls:
    """The calls of one communicator that users have sent and not yet received.

    Attributes:
        turn: which thread may make calls.
        count: how many were opened so far.
    """

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.count = 0
        self._halves: list[_Half] = []

    def opened(self) -> None:
        """Count a call that was opened, or that failed while all ranks made it."""
        self.count += 1

    def any_open(self) -> bool:
        """Whether there is one, or one was dropped."""
        return bool(self._halves)

    def keep(self, pending: Pending[Any], name: str, discard: Callable[[], object]) -> int:
        """Remember a pending of the call that was opened last; its number."""
        self._halves.append(_Half(self.count, name, weakref.ref(pending), discard))
        return self.count

    def received(self, number: int) -> None:
        """Forget a call, which its user receives now."""
        self._halves = [half for half in self._halves if half.number != number]

    def require_room(self) -> None:
        """Raise unless another call may be opened. Calls that were dropped are received first.

        Raises:
            InvalidArgument: a pending was dropped unreceived, or one older than the last call is still open.
        """
        if not self._halves:
            return
        dropped = [half for half in self._halves if half.owner() is None]
        for half in dropped:
            self.received(half.number)
            with suppress(Exception):  # what is raised next matters more, and a broken communicator says so itself
                half.discard()
        if dropped:
            names = " and a ".join(half.name for half in dropped)
            raise InvalidArgument(
                f"the pending of an earlier {names} was dropped unreceived; keep what send_dispatch and send_combine "
                "return, and call receive() on it"
            )
        late = [half for half in self._halves if half.number != self.count]
        if late:
            raise InvalidArgument(
                f"a third pending call: a {late[0].name} sent {self.count - late[0].number + 1} calls ago is still "
                "open; receive it before this call, since only the call just before may be open"
            )

    def clear(self) -> None:
        """Forget all calls: the communicator closes."""
        self._halves = []
