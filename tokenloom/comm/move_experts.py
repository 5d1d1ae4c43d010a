"""Moves experts' weights between the slots of all ranks, in pieces between calls, and then lets their places rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from tokenloom.comm.communicator import Communicator
from tokenloom.comm.placement import Placement
from tokenloom.comm.plan_moves import Copy, Piece, cut_into_pieces, plan_moves
from tokenloom.errors import (
    DeviceMismatch,
    InvalidArgument,
    PeerError,
    ShapeMismatch,
    a_type,
    raised_by_all,
    require_type,
)
from tokenloom.runtime.byte_carriers import Parcel, make_carrier
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import on_device

PIECE_BYTES = 64 << 20
"""Of a rank in one step, by default: about 0.2 ms of an NVLink, and a few ms of a network."""


class MovingExperts:
    """Experts on their way to another placement: what :func:`move_experts` returns.

    All ranks take the same steps, between calls and on the stream of calls. The placement of now rules until all bytes
    of a stage are there. Iterating takes a step each time::

        for _ in tl.move_experts(comm, weights, placement):
            serve_a_batch()

    Attributes:
        placement: that rules in the end: the wanted one, with slots of each rank in an order that moves least.
        step_number: steps that were taken.
    """

    def __init__(
        self,
        comm: Communicator,
        tensors: Sequence[torch.Tensor],
        placement: Placement,
        piece_bytes: int,
        stale: Collection[int],
    ) -> None:
        require_type("comm", comm, Communicator, "a tokenloom.Communicator")
        self._comm, self._ranks = comm, comm.engine.ranks
        self._slots = SlotBytes(tensors)
        self.step_number = 0
        self._ended: str | None = None
        self._scratch: torch.Tensor | None = None
        with self._ranks.turn, on_device(comm.device):
            self._masked = comm.engine.agree_on_masked("move_experts")
            agree(self._ranks, lambda: self._prepare(placement, piece_bytes, stale), "move_experts")
            remote = [[p for p in pieces if p.copy.source[0] != p.copy.to[0]] for pieces, _ in self._steps]
            most = max((_most_bytes_of_a_rank(pieces) for pieces in remote), default=0)
            by_memory = comm.engine.capabilities.peer_memory and self._ranks.topology.num_nodes == 1
            self._carrier = make_carrier(self._ranks, by_memory, most) if most else None
            self._take_slots(0)

    def _prepare(self, placement: Placement, piece_bytes: int, stale: Collection[int]) -> tuple[dict[str, Any], None]:
        """Check all arguments, plan, and name what all ranks must have alike."""
        comm = self._comm
        comm.engine.raise_known_errors()
        terms = comm.engine.terms_of_next(placement)
        assert comm.placement is not None
        if isinstance(piece_bytes, bool) or not isinstance(piece_bytes, int) or piece_bytes < 1:
            raise InvalidArgument(f"piece_bytes is {piece_bytes!r}, expected a positive number of bytes")
        if not isinstance(stale, Collection) or any(
            isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < comm.num_ranks for r in stale
        ):
            raise InvalidArgument(f"stale is {stale!r}, expected a list of ranks 0..{comm.num_ranks - 1}")
        self._slots.require_fits(comm)
        self._before = comm.placement
        self._stages = plan_moves(self._before, placement, self._masked, stale)
        self.placement = self._stages[-1].placement if self._stages else self._before
        self._steps: list[tuple[tuple[Piece, ...], int | None]] = []
        """Pieces of each step, and the stage that it ends."""
        for number, stage in enumerate(self._stages):
            steps = cut_into_pieces(stage.copies, self._slots.expert_bytes, piece_bytes)
            self._steps += [(pieces, None) for pieces in steps[:-1]] + [(steps[-1], number)]
        mine = [c for stage in self._stages for c in stage.copies if c.by_scratch and c.to[0] == comm.rank]
        if mine:
            self._scratch = torch.empty(self._slots.expert_bytes, dtype=torch.uint8, device=comm.device)
        alike = {"bytes of each tensor's slot": str(self._slots.sizes), "piece_bytes": piece_bytes}
        return terms | alike | {"stale": str(sorted(stale))}, None

    @property
    def num_steps(self) -> int:
        """How many steps the whole move takes; none if nothing changes."""
        return len(self._steps)

    @property
    def is_done(self) -> bool:
        """Whether the wanted placement rules."""
        return self.step_number == self.num_steps

    def step(self) -> bool:
        """Bring the next piece, and where it is the last one of a stage, let the stage's placement rule. Collective.

        Returns:
            Whether steps are left.

        Raises:
            InvalidArgument: the placement was changed by something else, a pending call is open or a graph is
                captured, all of which is told to the others; or the move has failed before.
            PeerError: such an error of another rank. Or a rank was masked meanwhile: then the move has ended, the
                placement that ``comm.placement`` tells rules on, and another move may begin.
            PlanMismatch: another rank is at another step, or calls something else.
            PeerTimeout, CommunicatorBroken: another rank is missing.
        """
        if self._ended is not None:
            raise raised_by_all(InvalidArgument(f"this move has ended: {self._ended}; begin another one"))
        if self.is_done:
            return False
        pieces, ends = self._steps[self.step_number]
        with self._ranks.turn, on_device(self._comm.device), torch.no_grad():
            self._agree(lambda: {}, "begins")
            with self._ranks.telling():
                self._carry(pieces)
            if ends is not None:
                self._end_stage(ends)
        self.step_number += 1
        if self.is_done:
            self.close()
        return not self.is_done

    def run(self) -> None:
        """Take all steps that are left."""
        while self.step():
            pass

    def __iter__(self) -> Iterator[int]:
        """Take steps, one each time; gives their numbers."""
        while not self.is_done:
            self.step()
            yield self.step_number

    def close(self) -> None:
        """Give staging and scratch memory back. The last step does; all ranks call it if they give a move up."""
        if not self.is_done and self._ended is None:
            self._ended = "it was closed"
        if self._carrier is not None:
            self._carrier.close()
        self._carrier = self._scratch = None

    def __repr__(self) -> str:
        experts = sum(len(stage.copies) for stage in self._stages)
        state = f", ended: {self._ended}" if self._ended else ""
        return (
            f"MovingExperts(step {self.step_number} of {self.num_steps}, {experts} experts of "
            f"{self._slots.expert_bytes / 1e6:.3g} MB in {len(self._stages)} stages{state})"
        )

    # -- steps ----------------------------------------------------------------------------------------------

    def _agree(self, more: Callable[[], dict[str, Any]], what: str) -> None:
        """Hear whether all ranks are at the same step, and nobody was masked since the move began."""

        def prepare() -> tuple[dict[str, Any], frozenset[int]]:
            self._comm.engine.raise_known_errors()
            self._comm.engine.require_between_calls()
            if self._comm.placement != self._before:
                raise InvalidArgument("the placement was changed while experts move; begin another move")
            return {"step of move_experts": f"{self.step_number} {what}", **more()}, self._comm.engine.masked

        # What they say, not what this rank knows: of a rank that was late, some learn before others.
        heard = agree(self._ranks, prepare, "a step of move_experts")
        gone = sorted({rank for said in heard for rank in said ^ self._masked})
        if gone:
            back = gone[0] in self._masked
            self._ended = f"rank {gone[0]} was {'taken back' if back else 'masked'} while experts moved"
            self.close()
            raise PeerError(gone[0], f"{self._ended}; the placement of now rules, begin another move")

    def _carry(self, pieces: Sequence[Piece]) -> None:
        """Bring pieces to their slots or to scratch memory."""
        me = self._comm.rank
        parcels = []
        for piece in pieces:
            source, to = piece.copy.source, piece.copy.to
            read = self._slots.between(source[1], piece.begin, piece.end) if source[0] == me else []
            written = self._targets(piece) if to[0] == me else []
            if source[0] != to[0]:
                parcels.append(Parcel(source[0], to[0], piece.end - piece.begin, read or written))
            elif to[0] == me:
                _copy_parts(read, written)
        if parcels:
            assert self._carrier is not None
            self._carrier.carry(parcels)

    def _targets(self, piece: Piece) -> list[torch.Tensor]:
        if piece.copy.by_scratch:
            assert self._scratch is not None
            return [self._scratch[piece.begin : piece.end]]
        return self._slots.between(piece.copy.to[1], piece.begin, piece.end)

    def _end_stage(self, number: int) -> None:
        """Let the placement of a stage rule on all ranks: all bytes are there."""
        stage, engine = self._stages[number], self._comm.engine
        self._agree(lambda: engine.terms_of_next(stage.placement), "ends")
        for copy in stage.copies:
            if copy.by_scratch and copy.to[0] == self._comm.rank:
                self._take_from_scratch(copy)
        engine.place(stage.placement)
        self._before = stage.placement
        self._take_slots(number + 1)

    def _take_slots(self, stage: int) -> None:
        """Keep balanced batches out of the slots that a stage fills. Who gives a move up leaves them to the next one,
        or to the next placement, since all ranks have to let go of them between the same batches."""
        copies = self._stages[stage].copies if stage < len(self._stages) else ()
        slots = self._comm.engine.slots
        assert slots is not None
        slots.take([copy.to for copy in copies if not copy.by_scratch])

    def _take_from_scratch(self, copy: Copy) -> None:
        assert self._scratch is not None
        _copy_parts([self._scratch], self._slots.between(copy.to[1], 0, self._slots.expert_bytes))


def move_experts(
    comm: Communicator,
    tensors: Sequence[torch.Tensor],
    placement: Placement,
    *,
    piece_bytes: int = PIECE_BYTES,
    stale: Collection[int] = (),
) -> MovingExperts:
    """Begin to move experts' weights to another placement, in pieces between calls. Collective, as is each step.

    Args:
        comm: made with a placement, whose calls go on meanwhile.
        tensors: what each slot of this rank has, such as weights, their scales and biases: [slots_per_rank, ...],
            contiguous, any dtypes, on the communicator's device. The same number of bytes on all ranks. More rows than
            slots are left alone. They are written in place, so captured graphs find the new values.
        placement: the wanted one. Within a rank, experts may lie in other slots in the end, since those that stay do
            not move; ``comm.placement`` tells.
        piece_bytes: most bytes that a rank sends, and that it receives, in one step.
        stale: ranks that came back and have no weights. All their slots are filled, as far as others have the experts.

    Balanced batches pull no experts into slots that are being filled. Where a move is given up, they leave these alone
    until another one, or another placement, is set.

    Returns:
        The move. Nothing has been copied yet. Beside the tensors each rank takes up to four times ``piece_bytes``, and
        room for one expert if slots change that are not empty.

    Raises:
        ShapeMismatch, DeviceMismatch: a tensor is not as above.
        InvalidArgument: as ``set_placement``; or the placement has an expert on masked ranks alone, or one that no
            living rank has (see ``restore_experts``).
        PlanMismatch: the ranks passed different arguments. PeerError: an error of another rank.
    """
    return MovingExperts(comm, tensors, placement, piece_bytes, stale)


class SlotBytes:
    """The tensors of all slots of a rank, as the bytes of each slot in a row.

    Attributes:
        sizes: bytes of a slot in each tensor.
        expert_bytes: in all of them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.sizes: list[int] = []
        self.expert_bytes = 0

    def require_fits(self, comm: Communicator) -> None:
        """Raise unless each tensor has a row for each slot of a communicator, as :func:`move_experts` says."""
        slots = comm.engine.plan.experts_per_rank
        if not isinstance(self._tensors, Sequence):  # the rows of a tensor could pass for tensors of slots
            raise InvalidArgument(
                f"tensors is {a_type(self._tensors)}, expected a list of tensors [{slots}, ...], for one too: [tensor]"
            )
        for index, tensor in enumerate(self._tensors):
            name = f"tensors[{index}]"
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgument(f"{name} is {a_type(tensor)}, expected a torch.Tensor")
            if tensor.dim() < 1 or len(tensor) < slots:
                raise ShapeMismatch(f"{name} is {list(tensor.shape)}, expected [{slots}, ...]: a row for each slot")
            if not tensor.is_contiguous():
                raise ShapeMismatch(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")
            if tensor.device != comm.device:
                raise DeviceMismatch(f"{name} is on {tensor.device}, the communicator on {comm.device}")
        self._rows = [tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach()[:, None]
                      for tensor in self._tensors]  # fmt: skip
        self.sizes = [row.shape[1] * row.itemsize for row in self._rows]
        self._begins = [0, *accumulate(self.sizes)]
        self.expert_bytes = self._begins[-1]

    def between(self, slot: int, begin: int, end: int) -> list[torch.Tensor]:
        """View some bytes of a slot, as uint8 tensors in a row."""
        found = []
        for rows, first, size in zip(self._rows, self._begins, self.sizes, strict=False):
            low, high = max(begin - first, 0), min(end - first, size)
            if low < high:
                found.append(rows[slot].view(torch.uint8)[low:high])
        return found


def _copy_parts(source: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> None:
    """Copy bytes that lie in several tensors to others, which may be cut elsewhere."""
    read, at = list(source), 0
    for part in to:
        begin = 0
        while begin < part.numel():
            size = min(part.numel() - begin, read[0].numel() - at)
            part[begin : begin + size].copy_(read[0][at : at + size])
            begin, at = begin + size, at + size
            if at == read[0].numel():
                del read[0]
                at = 0


def _most_bytes_of_a_rank(pieces: Sequence[Piece]) -> int:
    """Most bytes that a rank sends, or receives, in one step."""
    counts: dict[tuple[str, int], int] = {}
    for piece in pieces:
        for key in (("sent", piece.copy.source[0]), ("received", piece.copy.to[0])):
            counts[key] = counts.get(key, 0) + piece.end - piece.begin
    return max(counts.values(), default=0)
