"""Ranks that do not come are masked: the call in which they were awaited is made again without them.

Each call ends with a meeting of all ranks (kernels/barrier), so a rank that has met knows that all others have the
result too. When a rank waits in vain, or hears that another one did, then all that are left

1. settle who is lost, by notes in the store (runtime/membership.py), where a rank that is lost itself learns of it;
2. settle how many calls have ended: as many as the rank with the most has met for. A rank that adopts a loss says its
   number, and counts no meeting any more;
3. make new memory, since a rank that was late, and lives, may still write to the old one; where all lost processes
   have ended, they go on in the memory that they have;
4. make the call again, unless it has ended: then each of them has its result.

So a call takes place on all ranks that are left with the same ranks taking part, wherever one of them dies.
docs/explanation/failures.md goes through the cases.

No host waits for calls that a CUDA graph replays. So ``check()`` is a call of its own: it ends on a rank when the
replays before it have ended well on all ranks, as far as any of them knows. Else all raise, and replay again. In
memory that is kept, replays then go without the lost ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from tokenloom.backends.peers.combine import Combiner
from tokenloom.backends.peers.dispatch import Dispatcher
from tokenloom.backends.peers.opening import Launched, Launcher
from tokenloom.backends.seam import CombineKind, DispatchKind, DispatchOut, Sent, Tokens
from tokenloom.errors import CommunicatorBroken, PeerError, PeerTimeout, TokenloomError, is_known_to_all
from tokenloom.runtime.rank_group import RankGroup

T = TypeVar("T")

PHASE = "going on without ranks"
REPLAY, CAPTURE = "replay again", "since one lives, memory was made anew, so capture again"


class Remakes(Protocol):
    """A backend that makes calls, on memory that can be made anew."""

    @property
    def launcher(self) -> Launcher:
        """Launcher on the current memory."""

    @property
    def dispatcher(self) -> Dispatcher:
        """Dispatcher on the current memory."""

    @property
    def combiner(self) -> Combiner:
        """Combiner on the current memory."""

    def remake(self) -> bool:
        """Make new memory with the ranks that are left, or keep the memory if nobody else writes to it. Collective.

        Returns:
            Whether graphs go on: false if some were captured with memory that was not kept.
        """


class _Made(Generic[T]):
    """The end of a call on this rank: a result, or an error that all ranks raise alike."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.error: Exception | None = None
        try:
            self._result = make()
        except (PeerTimeout, CommunicatorBroken):
            raise
        except Exception as error:
            if not is_known_to_all(error):
                raise
            self.error = error

    def give(self) -> T:
        """The result. Raises the error."""
        if self.error is not None:
            raise self.error
        return self._result


class LateRanks:
    """Makes calls until they have ended on all ranks that are left.

    Args:
        ranks: the group.
        maker: what makes them.
    """

    def __init__(self, ranks: RankGroup, maker: Remakes) -> None:
        self._ranks, self._maker = ranks, maker
        self._ended = self._settled = 0
        self._again = ""
        """What the next check tells users to do again; nothing."""

    def call(self, make: Callable[[], T]) -> T:
        """Make a call; all ranks make the same one.

        Args:
            make: makes it, and waits for its outcome. It is called again when ranks were lost.

        Raises:
            TokenloomError: what it raised on all ranks alike, or on this one before the others knew of it.
            CommunicatorBroken: the others have masked this rank.
            PeerTimeout: the store of the process group is gone, or everybody is there and calls expire all the same.
        """
        self._ranks.look(if_due=True)
        number, made, in_vain = self._ended + 1, None, 0
        overflow = self._maker.dispatcher.shared.overflow
        turns = self._maker.dispatcher.shared.buffers.turns_of_dispatches
        if self._maker.launcher.outcomes.fault.is_set():  # a replay has expired, which nobody has asked for
            self._again = self._again or REPLAY
        while self._ended < number:
            if not self._is_stale():
                shared = self._maker.dispatcher.shared
                made, shared.overflow, shared.buffers.turns_of_dispatches = None, overflow, turns
                try:
                    with self._ranks.in_vain_after(self._known_losses):
                        made = _Made(make)
                        self._meet(made)
                except PeerTimeout as timeout:
                    if self._ranks.is_broken:
                        raise
                    in_vain = self._find_late(timeout, in_vain)
                if not self._is_stale():
                    self._has_ended(number)
                    continue
            self._go_on()
        assert made is not None, "a call that has ended anywhere was made everywhere"
        return made.give()

    def until_done(self, send: Callable[[], Sent[T]]) -> Sent[T]:
        """Send and receive a call until it has ended on all ranks that are left. In a capture it is only sent."""
        if torch.cuda.is_current_stream_capturing():
            return send()
        return Launched((self.launch(lambda: send().receive()),))

    def launch(self, launch: Callable[[], T]) -> T:
        """Launch the kernels of a call, and wait for them, until it has ended on all ranks that are left.

        In a capture they are only launched: no host waits for replays, which :meth:`check` looks after.

        Args:
            launch: launches them on the memory of now.
        """
        if torch.cuda.is_current_stream_capturing():
            return launch()

        def make() -> T:
            result = launch()
            self._maker.dispatcher.shared.settle_checked(self._maker.launcher.num_calls - 1)
            return result

        return self.call(make)

    def check(self) -> None:
        """Wait for replays of graphs, and raise what they left. All ranks call it alike.

        Replays and other calls do not mix between two checks: a rank does not know of each replay in vain elsewhere.

        Raises:
            PeerError: ranks were lost in them, so all ranks make again what they have replayed since the last time.
                Or memory was made anew since then, here or in another call, so all capture their graphs again.
        """
        self._ranks.look()
        number, made = self._ended + 1, None
        if not self._is_stale() and not self._again:
            try:
                with self._ranks.in_vain_after(self._known_losses):
                    made = _Made(lambda: self._maker.launcher.check("everything"))
                    self._meet(made)
            except PeerTimeout as timeout:
                if self._ranks.is_broken:
                    raise
                self._find_late(timeout, 0)
            if not self._is_stale():
                self._has_ended(number)
        lost: list[int] = []
        if self._is_stale():
            known = self._maker.launcher.masked
            self._go_on()
            lost = sorted(self._ranks.masked - known)
        if self._ended >= number:
            if made is not None:
                made.give()
            return
        who = f"rank(s) {lost} are masked by now" if lost else "ranks were lost"
        again, self._again = self._again or REPLAY, ""
        raise PeerError(lost[0] if lost else self._ranks.rank, f"{who}, and replays are void: {again}")

    def begin_anew(self) -> None:
        """Ranks came back, which have counted nothing."""
        self._settled = 0
        self._has_ended(0)

    @property
    def _known_losses(self) -> int:
        return self._maker.launcher.outcomes.known_losses or 0

    def _is_stale(self) -> bool:
        return self._ranks.num_losses > self._known_losses

    def _has_ended(self, number: int) -> None:
        self._ended = number
        self._ranks.say_progress(number)

    def _meet(self, made: _Made[T]) -> None:
        """Hear that all ranks have made the call. One that has failed behind it says so here instead."""
        try:
            self._maker.launcher.agree({"call": "the end of a call"})
        except PeerTimeout:
            raise
        except TokenloomError as error:
            made.error = made.error or error
            self._maker.launcher.agree({"call": "the end of a call"})

    def _find_late(self, timeout: PeerTimeout, in_vain: int) -> int:
        """Settle who is lost, if nobody has; how often it was nobody."""
        ranks, launcher = self._ranks, self._maker.launcher
        ranks.look()
        if self._is_stale():
            return in_vain
        before = ranks.masked
        ended = [rank for rank in launcher.control.ended_ranks() if rank not in launcher.masked]
        ranks.lose_absent(timeout.phase, ended)
        if ranks.masked != before:
            return 0
        if in_vain == ranks.num_ranks:
            raise ranks.fail(timeout.phase, f"all ranks are there, but calls have expired {in_vain + 1} times")
        return in_vain + 1

    def _go_on(self) -> None:
        """Settle with the others what has ended, and make new memory where that is needed."""
        outcomes = self._maker.launcher.outcomes
        outcomes.fault.give_up([], "the others go on without a rank")  # this rank's kernels may still wait
        name = f"ended/{self._settled}"  # not of the losses: it is settled again if there was no room for new memory
        self._settled += 1
        self._has_ended(self._ranks.settle_losses(PHASE, name))
        if not self._maker.remake():
            self._again = CAPTURE


class DispatchUntilDone:
    """Dispatches of one kind whose first half does all of the call.

    Args:
        late: makes the calls.
        maker: makes them on this rank.
        kind: of all calls.
    """

    is_stale, waits = False, True

    def __init__(self, late: LateRanks, maker: Remakes, kind: DispatchKind) -> None:
        self._late, self._maker, self._kind = late, maker, replace(kind, split=False, sent_ahead=False)

    def send(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> Sent[tuple[Any, torch.Tensor]]:
        return self._late.until_done(lambda: self._maker.dispatcher.prepare(self._kind).send(tokens, out))


class CombineUntilDone:
    """Combines of one kind whose first half does all of the call; arguments as in :class:`DispatchUntilDone`."""

    is_stale = False

    def __init__(self, late: LateRanks, maker: Remakes, kind: CombineKind) -> None:
        self._late, self._maker, self._kind = late, maker, replace(kind, split=False)

    def send(
        self,
        handle: Any,
        rows: torch.Tensor,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        stream: int | None = None,
    ) -> Sent[torch.Tensor]:
        return self._late.until_done(
            lambda: self._maker.combiner.prepare(self._kind, handle.number).send(handle, rows, weights, out)
        )
