"""The ranks of one group: collectives with deadlines, which name the ranks that are missing or go on without them.

They travel in one of two ways. As long as all ranks take part and a missing one is an error, they are collectives of
the caller's process group. Once ranks are masked, or may be, they are transfers between pairs of ranks on connections
of their own (:mod:`tokenloom.runtime.links`): a collective of a group with a dead member cannot end, while a transfer
that fails leaves the others alone. Such connections are over gloo, so what is on a GPU goes through the host.

Who takes part is agreed by notes in the group's store (:mod:`tokenloom.runtime.membership`), so the process that
hosts the store must live.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.errors import InvalidArgument, PeerError, PeerTimeout, raised_by_all
from tokenloom.runtime import connecting, forks, openings
from tokenloom.runtime.collectives import (
    UNNUMBERED,
    Collective,
    CollectiveOnStream,
    Transfer,
    count_gathers,
    gather_all,
    gather_sequence,
)
from tokenloom.runtime.deferred_release import release_dropped, undo_when_dropped
from tokenloom.runtime.devices import pick_device
from tokenloom.runtime.links import Links, Waiter
from tokenloom.runtime.membership import Membership
from tokenloom.runtime.openings import Fields, Opening, Verdict
from tokenloom.runtime.process_groups import process_group_of, store_of
from tokenloom.runtime.process_identity import ProcessIdentity
from tokenloom.runtime.siblings import STEPS_APART, Siblings, joining, siblings_of
from tokenloom.runtime.store_notes import StoreNotes
from tokenloom.runtime.telling import Telling
from tokenloom.runtime.topology import Topology
from tokenloom.runtime.turns import Turn
from tokenloom.runtime.waiting import Awaited, Watch, checked_seconds, timeout_of

MAKING = "making a Communicator"
"""The phase, for errors."""
OPEN_TIMEOUT_S = 600.0
"""Least default for the opening of a call: another rank's host may write a checkpoint, evaluate or compile."""
STEPS_OF_AN_OPENING = 8
"""More collectives than an opening takes."""
NO_WORDS = torch.zeros(0, dtype=torch.int64, device="cpu")
"""What a call tells that has no counts."""


class RankGroup:
    """A process group (or a single rank without one) as the collective backend uses it.

    Every rank calls the same methods in the same order. Tensors on the wire are int32, int64, uint8 or
    floating point, on ``device``.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None: the default group if torch.distributed
            is initialised, else a group of this rank alone. Or another RankGroup: those that are left of its ranks,
            connected by pairs, which mask late ranks from the first message on, as :meth:`mask_late` says. What has
            become of the other one, and of its process group, does not matter. Making this is collective.
        device: where tensors lie; None picks the current GPU for NCCL groups and the CPU otherwise.
        timeout_s: longest wait for other ranks within a call, in seconds. Over gloo this class keeps it and raises
            PeerTimeout; over NCCL the process group's own timeout applies within a call.
        open_timeout_s: longest wait for other ranks to open the same call, in seconds. None: the process group's own
            timeout, at least OPEN_TIMEOUT_S and at least ``timeout_s``. Over gloo no wait outlasts the process
            group's own timeout.
        rejoins: the other ranks have this group already, and have masked this rank. :meth:`rejoin` comes next.

    Attributes:
        terms: what all ranks have agreed on, by name; a rank that comes back must have the same.
        own_transport: calls go without collectives of the process group, so ranks can be left out of any group.
        served: there is a backend that makes calls again without ranks that are lost meanwhile. It needs the notes.
        missed: ranks whose part of a transfer did not come. The maker of calls empties it.
        processes: of other ranks, as far as this one has shared memory with them since ranks last came back.
        turn: lets one thread at a time make calls.
        met_at: number of the collective before ranks last came back, the same on all ranks; 0 if none has.

    Raises:
        InvalidArgument: an argument has a value that is never right, or this process is not in the group, or is a fork
            of one that is.
    """

    process_group: dist.ProcessGroup | None

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | RankGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 30.0,
        open_timeout_s: float | None = None,
        rejoins: bool = False,
    ) -> None:
        before = None
        if isinstance(group, RankGroup):
            before, group = group, group.process_group
        else:
            group = process_group_of(group)
        if forks.is_of_parent(group):
            raise InvalidArgument(
                f"the process group was made by the process from which process {os.getpid()} was forked, whose "
                "connections it cannot use; start processes by spawn"
            )
        self.timeout_s = checked_seconds("timeout_s", timeout_s)
        self.process_group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.device = pick_device(device, group)
        if open_timeout_s is None:
            open_timeout_s = max(OPEN_TIMEOUT_S, self.timeout_s, timeout_of(group, self.device))
        self.open_timeout_s = checked_seconds("open_timeout_s", open_timeout_s)
        self._deadline_is_ours = group is not None and self.device.type == "cpu"
        siblings = siblings_of(group)
        notes = StoreNotes(store_of(group), self.rank, self.num_ranks, rejoins, left=before is not None)
        self.prepare(notes, siblings)
        siblings.add(notes)
        if group is not None and before is None:
            siblings.groups.add(self)
            device, numbered = self._device_of_openings, not self._deadline_is_ours
            siblings.join = joining(group, device, self.num_ranks, notes.number, numbered)
        if before is not None:
            self.turn = Turn()
            self.topology = before.topology
            self._membership.apply(before.masked)
            self._membership.why |= before.why_masked()
            self._go_by_pairs(MAKING)

    def prepare(self, notes: StoreNotes, siblings: Siblings) -> None:
        """Make what every group has, whatever carries its collectives."""
        self._siblings, self._has_met = siblings, False
        self.terms: dict[str, str] = {}
        self.own_transport = self.served = False
        self.processes: dict[int, ProcessIdentity] = {}
        self.met_at = 0
        self.missed: frozenset[int] = frozenset()
        release_dropped()
        self.notes = notes
        self._membership = Membership(notes)
        self._watch = Watch(notes, self._membership, self.timeout_s, siblings)
        self._links: Links | None = None
        self._waiter = waiter = Waiter()
        self.turn = siblings.turn
        forks.leave_to_parent_when_forked(self)

        def leave() -> bool:
            notes.leave()
            waiter.close()
            return True

        undo_when_dropped(self, leave)

    @property
    def whole(self) -> RankGroup:
        """The group that gathers what this one does: another one where this one is a part of it."""
        return self

    @property
    def members(self) -> Sequence[int]:
        """The ranks of this group, as the whole group numbers them."""
        return range(self.num_ranks)

    @property
    def topology(self) -> Topology:
        """Which ranks share a node, as all have agreed; by default all of them do."""
        return self._watch.topology

    @topology.setter
    def topology(self, found: Topology) -> None:
        self._watch.topology = found

    @property
    def transport(self) -> str:
        """Name of what carries the bytes: "gloo", "nccl" or "local"."""
        if self.process_group is None:
            return "local"
        config = dist.get_backend_config(self.process_group)
        by_device = dict(part.split(":") for part in config.split(",") if ":" in part)
        return by_device.get(self.device.type, config)

    @property
    def step(self) -> int:
        """Number of the last collective, the same on all ranks."""
        return self.notes.step

    # -- ranks that end -------------------------------------------------------------------------------------

    def require_alive(self) -> None:
        """Raise CommunicatorBroken if a wait has timed out or the group was closed."""
        if self._watch.broken:
            self._watch.require_alive()

    @property
    def is_of_parent(self) -> bool:
        """Whether the group is another process's, from which this one was forked: to be left alone."""
        return forks.is_of_parent(self)

    def close(self) -> None:
        """Make every later call raise CommunicatorBroken. The process group itself stays the caller's."""
        if self.is_of_parent:
            return
        self._watch.broken = self._watch.broken or "this communicator was closed"
        self.notes.leave()
        self._disconnect()
        self.process_group = None
        release_dropped()

    def mark_broken(self, timeout: PeerTimeout) -> None:
        """Make every later call raise CommunicatorBroken, and tell ranks that wait: one on the GPU has expired."""
        if self._watch.broken is None:
            self.notes.give_up(f"rank {self.rank} gave up in {timeout.phase}, step {timeout.epoch}", timeout.peers)
        self._watch.broken = f"an earlier call failed: {timeout}"

    def abort(self, fault: BaseException) -> None:
        """End the group for all ranks: this one failed in the middle of a call, and sends no more of it.

        Ranks that wait for it raise PeerError within a second, or mask it where they mask late ranks. Over NCCL
        they do so in the handshake of their next call.
        """
        why = f"{type(fault).__name__}: {fault}"
        self._watch.broken = f"an earlier call failed: {why}"
        self.notes.fail(why)  # first: who finds the ranks apart asks why
        self._siblings.part(self.notes, PeerError(self.rank, why))
        self._disconnect()

    def require_none_failed(self) -> None:
        """Raise PeerError if another rank has told that it failed in the middle of a call, which breaks the group."""
        self._watch.require_none_failed()

    def telling(self) -> Telling:
        """Give a block in the middle of a call. What fails there ends the group: a signal's handler may raise too.

        No call can be opened to tell the others of it: they may be in this one.
        """
        return Telling(self.abort, self.abort)

    def _disconnect(self) -> None:
        self._links = None
        self._waiter.close()

    # -- ranks that are masked ------------------------------------------------------------------------------

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that take no part: collectives neither send to them nor wait for them, and their parts are zero."""
        return self._membership.masked

    def why_masked(self) -> dict[int, str]:
        """Why each masked rank is, for people."""
        return dict(self._membership.why)

    def require_maskable(self) -> None:
        """Raise InvalidArgument where ranks cannot be left out."""
        by_pairs = self.own_transport or (self.transport == "gloo" and self._deadline_is_ours)
        if self.num_ranks > 1 and (not by_pairs or self.notes.store is None):
            raise InvalidArgument(
                f"ranks cannot be masked over {self.transport} with tensors on {self.device.type}; make the "
                "communicator with backend='nvlink', or on a gloo group with device='cpu'"
            )

    def mask_late(self) -> None:
        """From now on, mask ranks that do not come within ``timeout_s``, and go on. All ranks call it alike.

        Raises:
            InvalidArgument: ranks cannot be left out here. PeerTimeout: the store is gone.
        """
        self.require_maskable()
        if not self._watch.masks_late:
            self._go_by_pairs(MAKING)

    def _go_by_pairs(self, phase: str) -> None:
        """Connect, and mask late ranks from now on: those that do not come to this too, or end meanwhile."""
        if self.num_ranks > 1:
            self._watch.masks_late = True
            self._connect(phase)

    def left_by_pairs(self) -> RankGroup:
        """Give the ranks that are left of this group, whether it is broken or not, as a new one; this one ends.

        It was where all ranks have waited for each other, with the patience that a first call takes.
        """
        left = RankGroup(self, device=self.device, timeout_s=self.timeout_s, open_timeout_s=self.open_timeout_s)
        self.close()
        return left

    @property
    def could_go_by_pairs(self) -> bool:
        """Whether it does not yet, and can: there are several ranks, and a store where they find each other."""
        return self.num_ranks > 1 and not self._watch.masks_late and self.notes.store is not None

    def leave_out(self, why: Mapping[int, str]) -> None:
        """Lose these ranks, which have been lost elsewhere, if they are not masked here. For this rank alone to call:
        the others learn of it.

        Args:
            why: for each, why it was lost.

        Raises:
            CommunicatorBroken: this rank was lost. PeerTimeout: the store is gone.
        """
        while late := set(why) - self.masked:
            self._watch.lose(late, "another communicator", self.step, why[min(late)])

    @property
    def is_broken(self) -> bool:
        """Whether nothing more can be done with the group."""
        return self._watch.broken is not None

    @property
    def masks_late(self) -> bool:
        """Whether ranks that do not come are masked."""
        return self._watch.masks_late

    @property
    def lost(self) -> frozenset[int]:
        """Those of the masked ranks that did not come when they were awaited."""
        return self._membership.lost

    @property
    def num_losses(self) -> int:
        """How often ranks have been lost, as far as this one has looked. All see the same, in the same order."""
        return self._membership.num_losses

    def look(self, if_due: bool = False) -> None:
        """Learn who was lost, while this rank waits by itself.

        Args:
            if_due: only if it has not looked for a while.

        Raises:
            CommunicatorBroken: this rank was.
        """
        if if_due:
            self._watch.begin()
        else:
            self._watch.look()

    def lose_absent(self, phase: str, ended: Collection[int]) -> None:
        """Lose the ranks that do not answer, or whose process has ended; maybe nobody. See :meth:`Watch.lose_absent`.

        Raises:
            PeerTimeout: the store is gone. CommunicatorBroken: this rank was lost.
        """
        with self.telling():
            self._watch.lose_absent(phase, ended)

    def settle_losses(self, phase: str, name: str) -> int:
        """Wait until all others have learned of all losses that this rank knows of.

        Args:
            phase: what is going on, for errors.
            name: of what is settled, the same on all ranks.

        Ranks may have come to different collectives. Behind this they mean the same one again.

        Returns:
            The largest number that a rank had said with :meth:`say_progress`, the same on all ranks.
        """
        with self.telling():
            self._watch.settle_rows(phase)
        progress, step = self.settle(name, [self._membership.best_progress(), self.step + STEPS_APART], phase)
        self.notes.skip_to(step)
        return int(progress)

    @contextmanager
    def in_vain_after(self, known_losses: int) -> Iterator[None]:
        """Collectives in here raise PeerTimeout once ranks have been lost more often than that: the others may not
        have begun them, and will not. Nothing is broken then.
        """
        self._watch.known_losses = known_losses
        try:
            yield
        finally:
            self._watch.known_losses = None

    def say_progress(self, number: int) -> None:
        """Let others hear this number, if ranks are lost from now on."""
        self._membership.progress = number

    def settle(self, name: str, value: Any, phase: str) -> Any:
        """The value of the rank that comes first, for all of them.

        Raises:
            PeerTimeout: the store is gone.
        """
        return self._watch.decide(name, value, phase)

    def fail(self, phase: str, cause: str) -> PeerTimeout:
        """Break the group, and tell the others; the error to raise."""
        return self._watch.fail(phase, self.step, [], cause)

    def mask(self, ranks: Collection[int]) -> None:
        """Leave out these ranks too from the next collective on. All ranks that stay call it alike.

        Raises:
            InvalidArgument: a rank that is none, this rank itself, or ranks cannot be left out here.
            PlanMismatch: another rank asks for something else; nothing has changed.
            PeerTimeout: a rank that stays does not ask.
        """
        self._ask("mask_ranks", ranks)
        self._membership.apply(self._membership.masked.union(ranks))
        if ranks and self._links is None:
            self._connect("mask_ranks")

    def unmask(self, ranks: Collection[int]) -> None:
        """Take back ranks that :meth:`rejoin`, or do so before a wait here ends. All ranks that stay call it alike.

        Raises:
            InvalidArgument: a rank that is not masked.
            PlanMismatch: another rank asks for something else, or one that comes back has other ``terms``.
            PeerTimeout: a rank that stays does not ask. Or one does not come back, or not all can connect: then all
                ranks raise this, and nothing has changed.
        """
        self._ask("unmask_ranks", ranks)
        stray = sorted(set(ranks) - self._membership.masked)
        if stray:
            raise raised_by_all(
                InvalidArgument(f"unmask_ranks got rank {stray[0]}, which is not masked: {sorted(self.masked)} are")
            )
        if ranks:
            limit_s = self.timeout_s if self._watch.masks_late else self.open_timeout_s
            place, masked = f"back/{self._membership.name_of_change}", self._membership.masked.difference(ranks)
            with self.telling():
                self._meet(connecting.take_back(self.notes, place, masked, ranks, self.terms, self.topology, limit_s))

    def _ask(self, request: str, ranks: Collection[int]) -> None:
        self.require_alive()
        self.require_maskable()
        self._watch.look()
        self.notes.step += 1
        requests = self._membership.ask(request, ranks)
        with self.telling():
            self._watch.wait(requests, request, self.step, self.open_timeout_s, opens=True)
        self._watch.look()  # what the others knew when they asked, this rank knows now
        if not self._watch.masks_late:
            self._watch.require_none_failed()  # a rank that asked, and was interrupted, will not connect

    def rejoin(self, masks_late: bool) -> None:
        """Come back to ranks that have masked this one, once they :meth:`unmask` it.

        Args:
            masks_late: the others have called :meth:`mask_late`.

        Raises:
            PeerTimeout: nobody calls it. PlanMismatch: the others have agreed on other ``terms``.
        """
        self.require_maskable()
        self._siblings.begin_partings(self.notes, anew=True)
        self._meet(connecting.come_back(self.notes, self.terms, self.open_timeout_s))
        self._watch.masks_late = masks_late

    def _meet(self, meeting: connecting.Meeting) -> None:
        self._use(connecting.reconnect(self.notes, meeting, self.timeout_s))
        self.notes.move(meeting.notes, meeting.step)
        self.notes.delete_with_notes(meeting.keys(self.num_ranks))
        self.met_at, self.processes = meeting.step, {}
        self.topology = meeting.nodes
        self._membership.begin_anew(frozenset(meeting.masked))

    def _connect(self, phase: str) -> None:
        """Connect all ranks that take part; see :func:`connect <tokenloom.runtime.connecting.connect>`."""
        with self.telling():
            self._use(connecting.connect(self._watch, phase, self.timeout_s, self.open_timeout_s))

    def _use(self, links: Links) -> None:
        """Go by pairs from now on."""
        self._links, self._has_met, self.notes.by_pairs = links, True, True
        self._siblings.begin_partings(self.notes)

    # -- collectives ----------------------------------------------------------------------------------------

    def all_gather_object(self, value: Any, phase: str) -> list[Any]:
        """The picklable value of every rank, None of masked ones.

        This is a call by itself: ranks have ``open_timeout_s`` to come.

        Raises:
            PeerError: another rank has a :class:`Verdict` where this one has none: it came to the end of what this one
                is still doing. PlanMismatch: another rank opened a call of another kind.
        """
        if self.num_ranks == 1:
            return [value]
        table, absent = self.open({"call": openings.MEETING}, openings.as_words(value), phase, shown=phase)
        found = openings.from_words(table, absent)
        if not isinstance(value, Verdict):
            for rank, each in enumerate(found):
                if isinstance(each, Verdict):
                    raise PeerError(rank, each.text)
        return found

    def open(
        self,
        fields: Fields,
        words: torch.Tensor,
        phase: str,
        fault: Exception | None = None,
        shown: str | None = None,
    ) -> tuple[torch.Tensor, frozenset[int]]:
        """Open a call: hear whether all ranks mean the same one, and what each has to tell.

        All ranks see what all have said, so all of them do the same next, whatever each wanted. Behind an error they
        count their collectives alike again, in all communicators of the process group.

        Args:
            fields: what must be the same on all ranks; first the name of the call.
            words: int64, what this rank tells.
            phase: what is going on, for errors.
            fault: this rank's own error, which the caller raises once the others know of it.
            shown: what errors call the call, if not by its name.

        Returns:
            int64 [W, n] on the CPU, the words of every rank, zeros behind and for those that take no part; and who
            does not. All ranks that take part get the same.

        Raises:
            PeerError: another rank has a fault; PlanMismatch: fields differ. Nothing of these where this rank has a
                fault, unless it needs room and another fault comes first. PeerTimeout: ranks are missing.
        """
        call = next(iter(fields.values()))
        meets = call == openings.MEETING and not self._has_met
        communicator = openings.UNNAMED if meets else self.notes.name
        fields = {"call": call, "communicator": communicator, **fields}
        sequence, latest = self._gather_sequence(), self._siblings.latest
        words = words.to(self._device_of_openings)
        # What ranks share in a meeting comes second, so that a late one hears in time that the others gave up.
        room = 0 if call == openings.MEETING else openings.room(self.num_ranks)
        first, size = words[:room], len(words)
        row = openings.encode(fields, fault, sequence, latest, self.notes.number, first, size, self.num_ranks)
        with self.telling():
            opening = Opening(self.all_gather(row, phase, opens=True).cpu())
        self.require_answers(opening.sequences, sequence, phase)
        if opening.is_faulty:
            self._siblings.raise_parting(self.notes)  # which the others do too, and say so here
        # A call of no communicator may open in one here that another rank has dropped, and count there alone.
        apart = opening.differs(openings.COMMUNICATOR) or (fields["communicator"] == openings.UNNAMED and not meets)
        try:
            if opening.raise_fault(fault):
                return opening.words, frozenset()
            if opening.differs(openings.MEANING):
                apart = True
                texts = self._tell(openings.as_words({**openings.text_of(fields), "call": str(shown or call)}), phase)
                openings.raise_difference(openings.from_words(*texts))
        finally:
            if apart:
                self._siblings.skip_to(opening.latest + STEPS_OF_AN_OPENING)
        if meets:
            self.notes.renumber(opening.made)
        self._has_met = True
        words_of_all, absent = opening.words[:, : min(room, opening.size)], opening.absent
        if opening.size > room:
            rest, lost = self._gather_words(words[room:], opening.size - room, phase)
            words_of_all, absent = torch.cat([words_of_all, rest], 1), absent | lost
        return words_of_all, absent

    def _tell(self, words: torch.Tensor, phase: str) -> tuple[torch.Tensor, frozenset[int]]:
        """Gather words within an opening, in which all ranks do so, of different numbers."""
        words = words.to(self._device_of_openings)
        number = torch.tensor([len(words)], dtype=torch.int64, device=words.device)
        numbers, _ = self._gather_words(number, 1, phase)
        return self._gather_words(words, int(numbers.max()), phase)

    def _gather_words(self, words: torch.Tensor, size: int, phase: str) -> tuple[torch.Tensor, frozenset[int]]:
        """Up to ``size`` words of each rank, in the middle of an opening; and who takes no part."""
        sequence = self._gather_sequence()
        with self.telling():
            row = torch.zeros(2 + size, dtype=torch.int64, device=words.device)
            row[:2] = torch.tensor([1, sequence], dtype=torch.int64, device="cpu")
            row[2 : 2 + len(words)] = words
            table = self.all_gather(row, phase).cpu()
        self.require_answers(table[:, 1].tolist(), sequence, phase)
        return table[:, 2:], frozenset((table[:, 0] == 0).nonzero().flatten().tolist())

    @property
    def _device_of_openings(self) -> torch.device:
        return torch.device("cpu") if "gloo" in self.transport else self.device  # gloo needs no GPU for this

    def _gather_sequence(self) -> int:
        """The second word of what this rank says next to open a call."""
        if self.process_group is None or self._deadline_is_ours or self._links is not None:
            return UNNUMBERED
        return gather_sequence(self.process_group)

    def require_answers(self, sequences: Sequence[int], sequence: int, phase: str) -> None:
        """Raise PeerTimeout unless all ranks sent this number: else the gather has ended without their answers."""
        if any(each != sequence for each in sequences):
            raise self._watch.fail_unanswered(phase)

    def all_gather(self, row: torch.Tensor, phase: str, *, opens: bool = False) -> torch.Tensor:
        """[n] on every rank -> [W, n] on every rank: the same on all, zeros for masked ranks. The host waits for it.

        Args:
            opens: this is the first collective of a call, for which ranks have ``open_timeout_s``.
        """
        transfer = self.start_all_gather(row, phase, opens=opens, host_waits=True)
        out = transfer.wait()
        if self._watch.masks_late:
            with self.telling():
                self._watch.settle_rows(phase)
            bytes_of_all = out.view(torch.uint8).cpu()  # notes are made of it
            arrived = {rank: bytes_of_all[rank] for rank in range(self.num_ranks) if rank not in transfer.lost}
            rows = self._membership.complete(self.step, arrived)
            for rank in range(self.num_ranks):
                if rank not in rows:
                    out[rank] = 0
                elif rank in transfer.lost:
                    out[rank] = rows[rank].view(out.dtype)
        return out

    def start_all_gather(
        self, row: torch.Tensor, phase: str, *, opens: bool = False, host_waits: bool = False
    ) -> Transfer:
        """Start to gather [n] of every rank. Ranks that are masked meanwhile may be there on some ranks only."""
        out = torch.empty(self.num_ranks, row.numel(), dtype=row.dtype, device=row.device)
        if self._links is not None:
            places = list(out.view(torch.uint8))
            out[self.rank] = row
            return self._start_transfers([places[self.rank]] * self.num_ranks, places, out, phase, opens)
        if self.process_group is None:
            out.copy_(row)

        def start() -> dist.Work:
            return gather_all(out.flatten(), row, group=self.process_group, async_op=True)

        return self._start(start, out, phase, opens, host_waits=host_waits)

    def start_all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        phase: str,
        out: torch.Tensor | None = None,
    ) -> Transfer:
        """Send the first ``send_counts[0]`` rows to rank 0, the next to rank 1, ...; same order on arrival.

        Any dtype: rows travel as bytes, since gloo lacks FP8. They may not change before the transfer was waited for.

        Args:
            out: contiguous, where the rows arrive; None: a new tensor.
        """
        self.require_alive()
        if out is None:
            out = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
        sent, received = rows.view(torch.uint8), out.view(torch.uint8)
        if self._links is not None:
            return self._start_transfers(sent.split(send_counts), received.split(recv_counts), out, phase)
        if self.process_group is None:
            out.copy_(rows)

        def start() -> dist.Work:
            return dist.all_to_all_single(
                received, sent, recv_counts, send_counts, group=self.process_group, async_op=True
            )

        return self._start(start, out, phase)

    def all_reduce_sums(
        self,
        values: Sequence[torch.Tensor],
        phase: str,
        host_waits: bool = True,
        alike: Fields | None = None,
        fault: Exception | None = None,
    ) -> list[torch.Tensor]:
        """The sums over ranks, as new tensors. This is a call by itself: ranks have ``open_timeout_s`` to come.

        Args:
            host_waits: over NCCL too, so that ranks hear of others that do something else. If not, they cannot.
            alike: what else must be the same on all ranks, by name.
            fault: this rank's own error. The others hear of it, and it is raised, where they can hear.

        Raises:
            PeerError, PlanMismatch: see :meth:`open`.
        """
        opens = self.num_ranks > 1 and (host_waits or self._deadline_is_ours)
        if opens:
            shapes = ", ".join(f"{list(each.shape)} {each.dtype}" for each in values)
            fields = {"call": phase, "values": shapes, **(alike or {})}
            if fault is not None:
                with Telling(lambda fault: self.open(fields, NO_WORDS, phase, fault), self.abort):
                    raise fault
            self.open(fields, NO_WORDS, phase)
        return [self._sum(each.detach(), phase, not opens) for each in values]

    def _sum(self, values: torch.Tensor, phase: str, opens: bool) -> torch.Tensor:
        if self._links is not None:
            return reduce(torch.add, self.all_gather(values.flatten(), phase, opens=opens)).view(values.shape)
        out = values.clone()
        return self._start(
            lambda: dist.all_reduce(out, group=self.process_group, async_op=True), out, phase, opens
        ).wait()

    def _start(
        self,
        start: Callable[[], dist.Work],
        result: torch.Tensor,
        phase: str,
        opens: bool = False,
        *,
        host_waits: bool = False,
    ) -> Transfer:
        """Start a collective of the process group.

        Args:
            host_waits: over NCCL too, with our deadline.
        """
        self.require_alive()
        self.notes.step += 1
        if self.process_group is None:
            return Transfer(result, None)
        self._siblings.require_together()
        self._siblings.collectives += 1
        if not (self._deadline_is_ours or host_waits):
            work = start()

            def wait() -> frozenset[int]:
                self.require_alive()
                work.wait()
                return frozenset()

            return Transfer(result, wait)
        if self._deadline_is_ours:
            return self._awaited(Collective(start, self.process_group), result, phase, opens, frozenset)
        count_gathers(self.process_group)  # first: whatever comes between leaves a collective without its count
        collective = CollectiveOnStream(start, self.process_group)
        if not collective.has_started:
            count_gathers(self.process_group, -1)
        return self._awaited(collective, result, phase, opens, frozenset)

    def _start_transfers(
        self,
        parts: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        result: torch.Tensor,
        phase: str,
        opens: bool = False,
    ) -> Transfer:
        """Start to send a part to each rank, and to fill the place of each."""
        self._watch.begin()
        assert self._links is not None
        self.notes.step += 1
        transfers = self._links.start(self._waiter, self._membership.others, parts, places, self.step)
        return self._awaited(transfers, result, phase, opens, transfers.finish)

    def _awaited(
        self, awaited: Awaited, result: torch.Tensor, phase: str, opens: bool, finish: Callable[[], frozenset[int]]
    ) -> Transfer:
        """A transfer that the host waits for; ``finish`` gives the ranks whose part did not come."""
        step, limit_s = self.step, self.open_timeout_s if opens else self.timeout_s

        def wait() -> frozenset[int]:
            with self.telling():
                try:
                    self._watch.wait(awaited, phase, step, limit_s, opens)
                except (PeerError, PeerTimeout) as ended:
                    self._siblings.part(self.notes, ended)
                    raise
            lost = finish()
            self.missed |= lost
            return lost

        return Transfer(result, wait)
