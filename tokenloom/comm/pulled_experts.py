"""Experts of a balanced batch that others compute: their weights on the way to helpers, and gradients home."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenloom.comm.communicator import Communicator
from tokenloom.comm.engine import Engine
from tokenloom.comm.move_experts import SlotBytes
from tokenloom.comm.placed_slots import PlacedBatch
from tokenloom.comm.placement import EMPTY, Placement
from tokenloom.comm.routed import Routed
from tokenloom.comm.slot_rows import Move, copy_from_owners, living_slots, sum_at_owners
from tokenloom.errors import InvalidArgument, require_type
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import on_device
from tokenloom.runtime.torch_modes import require_eager


class PulledExperts:
    """What helpers of one batch pull, the same list on all ranks.

    Args:
        engine: of the communicator that dispatched the batch.
        batch: as it was placed, with a split.
    """

    def __init__(self, engine: Engine, batch: PlacedBatch) -> None:
        assert batch.split is not None
        if batch.slot_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("the host lists the experts to pull, which it cannot do in a CUDA graph")
        self._engine = engine
        number = int(batch.split.summary[3])
        shares = [(slot, target) for slot, _, target, _ in batch.split.shares[:number].tolist()]
        self.placement, self.moves = batch.placement, pulls(batch.placement, shares)

    @torch.no_grad()
    def pull(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the rows of pulled experts to the slots of helpers, in place, out of sight of autograd. Collective.

        Args:
            tensors: [slots_per_rank, ...], the same on all ranks but for their values; None for what experts lack.
        """
        ranks = self._engine.ranks
        with ranks.telling():
            for each in tensors:
                if each is not None:
                    # What backward saved of earlier batches is filled again before it is read.
                    rows = each.data.view(torch.uint8) if each.itemsize == 1 else each.data  # torch indexes no FP8
                    copy_from_owners(ranks, self._living(self.moves), rows, "pulling experts")

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of pulled experts to their owners', in ascending rank, and leave zeros. In place. Collective.

        Args:
            gradients: [slots_per_rank, ...], as ``tensors`` above.
        """
        ranks = self._engine.ranks
        masked, home = self._engine.masked, list[Move]()
        for move in self.moves:
            expert = self.placement.experts_of(move.source_rank)[move.source]
            if owners := living_slots(self.placement, expert, masked):
                home.append(Move(move.rank, move.slot, *owners[0]))
        with ranks.telling():
            for each in gradients:
                if each is not None:
                    sum_at_owners(ranks, self._living(home), each, "gradients of pulled experts")

    def _living(self, moves: list[Move]) -> list[Move]:
        """Leave out ranks that were masked since the batch was dispatched."""
        masked = self._engine.masked
        return [each for each in moves if each.source_rank not in masked and each.rank not in masked]


def pulls(placement: Placement, shares: Sequence[tuple[int, int]]) -> list[Move]:
    """List the moves of experts' rows from who gives routes to slots that are empty by the placement.

    Args:
        shares: the slot and the target of each share of a batch.
    """
    per_rank, found = placement.slots_per_rank, dict[int, Move]()
    for slot, target in shares:
        rank, place = divmod(target, per_rank)
        if placement.experts_of(rank)[place] == EMPTY:
            found.setdefault(target, Move(*divmod(slot, per_rank), rank, place))
    return [found[target] for target in sorted(found)]


def pull_experts(comm: Communicator, routed: Routed, tensors: Sequence[torch.Tensor]) -> None:
    """Bring the weights of experts that this rank computes for others, to their slots of a balanced batch.

    Collective, between the dispatch and the experts. Nothing travels where the batch was not split. Pull again for
    backward, if other batches came in between.

    Args:
        comm: that dispatched, made with ``balance="batch"``.
        routed: what it returned, in any layout.
        tensors: what each slot of this rank has, such as weights and biases: [slots_per_rank, ...], contiguous, any
            dtypes, on the communicator's device. Rows of slots that ``routed.slot_experts`` names, and that are empty
            by the placement, are overwritten. The same number of bytes on all ranks.

    Raises:
        InvalidArgument: the dispatch was another communicator's, batches are not balanced, or a graph is captured.
        ShapeMismatch, DeviceMismatch: a tensor is not as above.
        PlanMismatch, PeerError: another rank passed something else, or failed.
    """
    _prepared(comm, routed, tensors, "pull_experts").pull(tensors)


def sum_pulled_gradients(comm: Communicator, routed: Routed, gradients: Sequence[torch.Tensor]) -> None:
    """Bring the gradients of pulled experts home, where they are added to their owners' in ascending rank.

    Collective. Sums are of float32 at least, and rounded once to the dtype of the gradients. Rows of slots that were
    pulled are zero afterwards.

    Args:
        comm: that dispatched, and routed: what it returned.
        gradients: of the tensors that ``pull_experts`` took, in their order and shapes. Changed in place.

    Raises:
        TokenloomError: as :func:`pull_experts`.
    """
    _prepared(comm, routed, gradients, "sum_pulled_gradients").sum_gradients(gradients)


def _prepared(comm: Communicator, routed: Routed, tensors: Sequence[torch.Tensor], name: str) -> PulledExperts:
    """Check what all ranks passed, alike."""
    require_type("comm", comm, Communicator, "a tokenloom.Communicator")
    ranks = comm.engine.ranks

    def prepare() -> tuple[dict[str, str], None]:
        comm.engine.raise_known_errors()
        require_eager()
        if not isinstance(routed, Routed) or routed._owner is not comm:
            raise InvalidArgument("routed is of another communicator; pass what comm.dispatch returned")
        if routed.batch is None or routed.batch.split is None:
            raise InvalidArgument("batches are not balanced here; make the communicator with balance='batch'")
        slots = SlotBytes(tensors)
        slots.require_fits(comm)
        return {"bytes of each tensor's slot": str(slots.sizes), "dispatch number": str(routed._handle.number)}, None

    with ranks.turn, on_device(comm.device):
        agree(ranks, prepare, name)
    assert routed.batch is not None
    return PulledExperts(comm.engine, routed.batch)
