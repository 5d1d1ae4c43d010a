"""Experts of a balanced batch that others compute: their weights on the way to helpers, and gradients home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tokenloom.comm.communicator import Communicator
from tokenloom.comm.engine import Engine
from tokenloom.comm.move_experts import SlotBytes
from tokenloom.comm.placed_slots import PlacedBatch
from tokenloom.comm.placement import Placement
from tokenloom.comm.routed import Routed
from tokenloom.comm.slot_rows import Move, Slot, copy_from_owners, living_slots, sum_at_owners
from tokenloom.errors import InvalidArgument, raised_by_all, require_type
from tokenloom.ops.split_batch import EMPTY
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import on_device
from tokenloom.runtime.torch_modes import require_eager


class Pull(NamedTuple):
    """A slot of a helper, empty by the placement, the expert that it computes in this batch, and who gives it."""

    rank: int
    slot: int
    expert: int
    giver: Slot


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
        number = int(batch.split.summary[3])
        shares = [(slot, target) for slot, _, target, _ in batch.split.shares[:number].tolist()]
        self._engine, self._placement = engine, batch.placement
        self.pulls = pulls(batch.placement, shares)

    @torch.no_grad()
    def pull(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the rows of pulled experts to the slots of helpers, in place, out of sight of autograd. Collective.

        Those of experts that are lost with ranks masked since then become zero.

        Args:
            tensors: [slots_per_rank, ...], the same on all ranks but for their values; None for what experts lack.

        Raises:
            TokenloomError: what calls before have found, on all ranks alike.
        """
        if not self.pulls:
            return
        moves, _, lost = self._begin("pulling experts")
        ranks = self._engine.ranks
        with ranks.telling():
            for each in tensors:
                if each is not None:
                    # What backward saved of earlier batches is filled again before it is read.
                    rows = each.data.view(torch.uint8) if each.itemsize == 1 else each.data  # torch indexes no FP8
                    copy_from_owners(ranks, moves, rows, "pulling experts")
                    for slot in lost:
                        rows[slot] = 0

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of pulled experts to their owners', in ascending rank, and leave zeros. In place. Collective.

        Args:
            gradients: [slots_per_rank, ...], as ``tensors`` above.

        Raises:
            TokenloomError: as :meth:`pull`.
        """
        if not self.pulls:
            return
        _, home, lost = self._begin("gradients of pulled experts")
        ranks = self._engine.ranks
        with ranks.telling():
            for each in gradients:
                if each is not None:
                    sum_at_owners(ranks, home, each, "gradients of pulled experts")
                    for slot in lost:
                        each[slot] = 0

    def _begin(self, phase: str) -> tuple[list[Move], list[Move], list[int]]:
        """Hear what calls before have found: a rank that had a fault in one of them does not come here.

        Returns:
            The moves to helpers that take part, from who gives, or from the first slot that is left of the expert; the
            moves from them to owners, these first slots, both the same on all ranks; and the slots of this rank whose
            experts have none.
        """
        engine = self._engine
        engine.check("calls")
        assert engine.slots is not None
        if not all(engine.slots.is_free(each.rank, each.slot) for each in self.pulls):
            raise raised_by_all(
                InvalidArgument(
                    "a slot that this batch fills holds an expert by now, or one is on its way there; place and move "
                    "experts between steps, and dispatch again"
                )
            )
        # Of a rank that was late, some learn before others, who would wait for other rows.
        masked = engine.agree_on_masked(phase) if engine.ranks.masks_late else engine.masked
        moves, home, lost = list[Move](), list[Move](), list[int]()
        for rank, slot, expert, giver in self.pulls:
            sources = living_slots(self._placement, expert, masked)
            if sources and rank not in masked:
                moves.append(Move(*(giver if giver in sources else sources[0]), rank, slot))
                home.append(Move(rank, slot, *sources[0]))
            elif rank == engine.ranks.rank:
                lost.append(slot)
        return moves, home, lost


def pulls(placement: Placement, shares: Sequence[tuple[int, int]]) -> list[Pull]:
    """List the slots that are empty by the placement and have an expert in the batch.

    Args:
        shares: the slot and the target of each share of the batch.
    """
    per_rank, found = placement.slots_per_rank, dict[int, Pull]()
    for giver, target in shares:
        source, (rank, slot) = divmod(giver, per_rank), divmod(target, per_rank)
        if placement.experts_of(rank)[slot] == EMPTY:
            found.setdefault(target, Pull(rank, slot, placement.experts_of(source[0])[source[1]], source))
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
            Or a slot has got an expert since, by another placement or by ``move_experts``.
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
