"""Communicators that are made at first use, one for each shape of call, and grow with the batch.

Other programs name neither the number of experts nor the most tokens before their first call. So all ranks make a
communicator together when a shape first comes, and a larger one when a rank has more tokens. That rank says so in
the opening of the call, where the others wait for its counts.

Where late ranks are masked, communicators differ in whom they have lost, as each finds out at its own calls. The truth
for new ones is the meeting (:meth:`Communicators.meeting`): who is lost in any communicator is lost there, and whoever
answers there is in the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from tokenloom.backends.seam import Upcoming
from tokenloom.errors import BackendUnavailable, CommunicatorBroken, PeerError, PeerTimeout, is_known_to_all
from tokenloom.runtime.openings import NeedsRoom, means_growth
from tokenloom.runtime.telling import Telling

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator
    from tokenloom.runtime.rank_group import RankGroup

T = TypeVar("T")
MAKING = "making a communicator"
"""The phase, for errors."""
MANY_SMS = 1 << 16
"""More than any GPU has."""


class CommShape(NamedTuple):
    """What a communicator is made for: equal on all ranks.

    Attributes:
        num_experts, hidden: E and H.
        top_k: K; None where the client does not say it, so that it grows as the tokens do.
        wide: dtype of rows that not every backend moves, or has memory for; None: any others.
        num_sms: of its kernels, or as many as every rank may use, if those are fewer; None: as the options of all
            communicators say.
    """

    num_experts: int
    hidden: int
    top_k: int | None
    wide: torch.dtype | None = None
    num_sms: int | None = None


UNKNOWN = CommShape(0, 0, None)
"""Of a call whose arguments say nothing. 0 stands for a size that is not known."""


def wide_rows(dtype: torch.dtype) -> torch.dtype | None:
    """Give float64, which not every backend moves, as :attr:`CommShape.wide` has it."""
    return dtype if dtype == torch.float64 else None


class Communicators:
    """The communicators of a group of ranks, for one program.

    Args:
        group: the ranks.
        options: of every Communicator: ``timeout_s``, ``num_sms``, ...

    Attributes:
        group: as given.
    """

    def __init__(self, group: dist.ProcessGroup, options: Callable[[], dict[str, Any]]) -> None:
        self.group, self._options = group, options
        self._made: dict[CommShape, Communicator] = {}
        self._last: Communicator | None = None
        self._last_of: dict[tuple[int | None, int | None], Communicator] = {}  # by num_sms, and by hidden or None
        self._meeting: RankGroup | None = None

    def run(
        self,
        shape: CommShape,
        tokens: int,
        device: torch.device,
        call: Callable[[Communicator], T],
        top_k: int = 1,
    ) -> T:
        """Make a call by a communicator that has room for the tokens of all ranks.

        Args:
            shape: equal on all ranks.
            tokens: of this rank, or the most of any rank where the client says it.
            device: of the tensors.
            call: makes it. It runs again where another rank found that it needs more room.
            top_k: most routes of a token of this rank, where the shape does not say it.

        Raises:
            TokenloomError: what the call raises, and what making a Communicator raises.
        """
        while True:
            found = self._made.get(shape)
            try:
                if found is not None and tokens <= found.plan.max_tokens_per_rank and top_k <= found.plan.top_k:
                    self._use(shape, found)
                    return call(found)
                if self._last is not None:  # else no rank has any
                    with self._opening(None, Upcoming("dispatch", awaited=True), shape, device):
                        raise NeedsRoom(f"it needs another communicator, for {tokens} tokens")
            except (NeedsRoom, PeerError) as error:
                if isinstance(error, PeerError) and not means_growth(error.reason):
                    raise
            self._make(shape, tokens, top_k, device)

    def _use(self, shape: CommShape, comm: Communicator) -> None:
        """Note what the call is made with, before it can fail: all ranks tell later faults by the same one."""
        if comm is not self._last:
            self._last = self._last_of[shape.num_sms, shape.hidden] = self._last_of[shape.num_sms, None] = comm

    def _make(self, shape: CommShape, tokens: int, top_k: int, device: torch.device) -> None:
        from tokenloom.comm.communicator import Communicator  # as late as this, so that importing is quick
        from tokenloom.runtime.rendezvous import agree

        meeting = self.meeting(device)
        with meeting.turn.behind(meeting.open_timeout_s) as in_turn:
            patience_s = meeting.open_timeout_s
            if self._last is not None:  # the others have just failed in the same call, so they come at once or never
                meeting.open_timeout_s = meeting.timeout_s
            try:
                if meeting.masks_late:
                    meeting.leave_out(self._why_lost())

                def prepare() -> tuple[dict[str, Any], tuple[int, int, int]]:
                    if in_turn is not None:
                        raise in_turn
                    num_sms = MANY_SMS if shape.num_sms is None else _usable_sms(device)
                    return shape._asdict(), (tokens, top_k, num_sms)

                wanted = agree(meeting, prepare, MAKING)
            finally:
                meeting.open_timeout_s = patience_s
            before = self._made.get(shape)
            if before is not None:
                wanted.append((before.plan.max_tokens_per_rank, before.plan.top_k, MANY_SMS))
            most, routes = (max(1, *(each[i] for each in wanted)) for i in (0, 1))
            options = dict(self._options())
            if shape.num_sms is not None:
                options["num_sms"] = min(shape.num_sms, *(each[2] for each in wanted))
            self._made[shape] = made = Communicator(
                meeting if meeting.masks_late else self.group,
                num_experts=shape.num_experts,
                hidden=shape.hidden,
                top_k=shape.top_k or routes,
                max_tokens_per_rank=1 << (most - 1).bit_length(),
                device=device,
                dtype=shape.wide,
                **options,
            )  # the one before lives as long as handles of its dispatches
            if meeting.masks_late and not made.engine.ranks.masked:
                meeting.topology = made.engine.ranks.topology  # for communicators of those that are left
        self._use(shape, made)

    def _why_lost(self) -> dict[int, str]:
        """The ranks that communicators go on without, and why. Each learns of a loss by itself, at its next call."""
        return {rank: why for comm in self.all() for rank, why in comm.engine.ranks.why_masked().items()}

    def meeting(self, device: torch.device) -> RankGroup:
        """The ranks, for small collectives beside communicators. Made at first use, by all ranks alike.

        Where late ranks are masked, those that are left agree here who they are, before they make another
        communicator. It goes by pairs: no collective of the process group ends once a rank is lost.
        """
        if self._meeting is None:
            from tokenloom.runtime.rank_group import RankGroup

            if "gloo" in dist.get_backend_config(self.group):
                device = torch.device("cpu")
            elif device.type == "cpu":  # of what was given instead of a tensor
                device = torch.device("cuda", torch.cuda.current_device())
            options = self._options()
            patience = {name: value for name, value in options.items() if name.endswith("timeout_s")}
            meeting = RankGroup(self.group, device=device, **patience)
            if options.get("on_timeout") == "mask" and meeting.could_go_by_pairs:
                with suppress(PeerTimeout, CommunicatorBroken):  # who is lost meanwhile is found out by pairs
                    meeting.all_gather_object(None, MAKING)
                meeting = meeting.left_by_pairs()
            self._meeting = meeting
        return self._meeting

    def report_faults_of(
        self,
        device: torch.device,
        comm: Communicator | None = None,
        name: str = "dispatch",
        awaited: bool = True,
        opens: Callable[[Communicator], str] | None = None,
        shape: CommShape | Callable[[], CommShape] = UNKNOWN,
    ) -> Telling:
        """Give a block in which a call is checked. The other ranks, which make it, hear of a fault.

        Args:
            device: of the tensors.
            comm: what they make it with, where it is known.
            name: "dispatch" or "combine".
            awaited: a dispatch whose outcome the other ranks read. Elsewhere kernels tell it: at a later call.
            opens: gives the name of the call that the others open, where it depends on the communicator.
            shape: of the call, as far as it is known, or a function that guesses it. The others make the call with the
                communicator of that shape, or else with the last one that has its ``num_sms`` and ``hidden``. Told by
                another, ranks would count different calls of both.
        """

        def tell(fault: BaseException) -> None:
            upcoming = Upcoming(name, awaited=awaited and name == "dispatch")
            try:
                with self._opening(comm, upcoming, shape, device, opens):
                    raise fault
            except BaseException as other:
                if other is not fault and not is_known_to_all(other):
                    raise

        return Telling(tell, tell)  # the block before the call ends the group, where this one is interrupted

    def _opening(
        self,
        comm: Communicator | None,
        upcoming: Upcoming,
        shape: CommShape | Callable[[], CommShape],
        device: torch.device,
        opens: Callable[[Communicator], str] | None = None,
    ) -> Telling:
        """Give the block before a call of all ranks, by what they make it with; see :meth:`report_faults_of`.

        A rank whose shape is new and one with a fault, which guesses the shape, find the same communicator.
        """
        from tokenloom.runtime.rendezvous import agreeing

        if not isinstance(shape, CommShape):
            shape = shape()
        of_width = self._last_of.get((shape.num_sms, shape.hidden)) or self._last_of.get((shape.num_sms, None))
        comm = comm or self._made.get(shape) or of_width or self._last
        if comm is None:
            return agreeing(self.meeting(device), MAKING)
        if opens is not None:
            upcoming = replace(upcoming, name=opens(comm))
        return comm.engine.sequence(upcoming)

    def all(self) -> list[Communicator]:
        """Those that calls use now."""
        return list(self._made.values())

    def close(self) -> None:
        """Close all of them."""
        for comm in self.all():
            comm.close()
        self._made.clear()
        self._last_of.clear()
        self._last = None
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


def _usable_sms(device: torch.device) -> int:
    """SMs that kernels may run on, where there are kernels."""
    from tokenloom.runtime.devices import usable_sms

    if device.type != "cuda":
        return MANY_SMS
    try:
        return usable_sms(torch.cuda.current_device() if device.index is None else device.index)
    except BackendUnavailable:  # without the driver's bindings
        return MANY_SMS
