"""Weights that helpers of balanced batches read: a copy of this rank's slots in memory that all peers reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenloom.comm.engine import Engine
from tokenloom.errors import InvalidArgument
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.pull.launch import MOST_SLOTS, UNIT_BYTES, PullExpertsVariant
from tokenloom.ops.slots_of_routes import BatchSplit
from tokenloom.runtime.symmetric_memory import BufferLayout, SymmetricBuffer

BLOCKS = 64
"""SMs that pull: nothing else runs meanwhile, and some more bytes on their way than links need do no harm."""


class PeerWeights:
    """The tensors of a rank's slots, which peers read. Making it is collective.

    Args:
        engine: of the communicator.
        tensors: what each slot has, and behind the slots what shared experts have: [at least slots_per_rank, ...],
            the same on all ranks but for values.

    Attributes:
        tensors: copies of them, in that memory.

    Raises:
        InvalidArgument: a slot has no multiple of 4 bytes of a tensor, or there are too many slots.
        torch.OutOfMemoryError: there is no room here. PeerError: on another rank.
    """

    def __init__(self, engine: Engine, tensors: Sequence[torch.Tensor]) -> None:
        slots = engine.plan.experts_per_rank
        if slots > MOST_SLOTS:
            raise InvalidArgument(
                f"a rank has {slots} slots, expected at most {MOST_SLOTS} where batches are balanced"
            )
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        for tensor, size in zip(tensors, sizes, strict=True):
            if size % UNIT_BYTES:
                raise InvalidArgument(
                    f"a slot has {size} bytes of a weight {list(tensor.shape)}, which is no multiple of 4"
                )
        layout = BufferLayout.of(
            [(str(i), size * len(each)) for i, (each, size) in enumerate(zip(tensors, sizes, strict=True))]
        )
        self._engine, self._buffer = engine, SymmetricBuffer(layout, engine.ranks)
        self.tensors = [
            self._buffer.view(str(i), each.dtype, tuple(each.shape)).copy_(each) for i, each in enumerate(tensors)
        ]
        places = [[layout.offset(str(i)), size] for i, size in enumerate(sizes)]
        self._parts = torch.tensor(places, dtype=torch.int64, device="cpu").to(engine.ranks.device)
        self._kernel = Kernel(PullExpertsVariant(slots).spec(), engine.ranks.device.index)
        args = self._kernel.args
        args.peers, args.parts = self._buffer.peers.data_ptr(), self._parts.data_ptr()
        args.num_parts, args.rank = len(sizes), engine.ranks.rank

    def pull(self, split: BatchSplit, stream: int) -> None:
        """Fill the slots of this rank that a batch uses and the placement leaves empty, behind what is on the stream.

        Args:
            split: of the batch. stream: handle of the current stream.
        """
        assert self._engine.slots is not None
        args = self._kernel.args
        args.experts, args.shares = self._engine.slots.table.experts.data_ptr(), split.shares.data_ptr()
        args.num_shares = split.summary[3].data_ptr()
        self._kernel.launch(BLOCKS, stream)
