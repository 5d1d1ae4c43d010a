"""What kernels are told of the network between nodes; Rail of device/transport/rail.cuh."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tokenloom.errors import InvalidArgument
from tokenloom.kernels.common.call import TURNS, int32_fields, uint64_fields
from tokenloom.kernels.common.numbers import MAX_BLOCKS
from tokenloom.plan import Plan, align_up

CARRIERS = ("gin", "collective")
"""What carries regions, by the number of Carrier there: NCCL's GIN, or a collective between two kernels."""
QUEUE_DEPTH = 32
"""Puts that one context takes for one peer before it blocks; kQueueDepth of gin.cuh."""
MOST_CHUNKS = QUEUE_DEPTH // TURNS - 1
"""Puts of a call to each node. As many calls as take turns may have some on their way."""
DESCRIPTOR_BYTES = 128
"""Shared memory of a thread that puts; kDescriptorBytes there. NCCL 2.28 takes half of it."""
TRAFFICS = 2
"""Kinds of calls, each with a context; kTraffics there: 0 for dispatches, 1 for combines."""
COUNT_BYTES = 8 * (1 + TURNS)
"""Of SignalCount there: signals in all calls that were sent, and in those before the last call of each turn."""
STATE_BYTES = TRAFFICS * COUNT_BYTES + 4 * MAX_BLOCKS
"""Device memory of one rank that its kernels keep between calls, zeros at first: counts of signals, and flags of
blocks."""


class Rail(ctypes.Structure):
    """Mirror of Rail in device/transport/rail.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields(
            "comm", "window", "base", "put_from", "put_to", "region_bytes", "turn_bytes", "counts", "blocks"
        ),
        *int32_fields("chunks", "chunk_rows"),
    ]


@dataclass(frozen=True)
class Regions:
    """What lies in the window of each rank, and how rows are put there.

    For each kind of call there are [TURNS][nodes] regions to put from, then as many that rows arrive in.

    Attributes:
        num_nodes: N.
        region_bytes: of one region, a multiple of 16. See :func:`region_bytes`.
        chunks: puts for each node in a call.
        chunk_rows: rows of a chunk. See :func:`chunk_rows`.
    """

    num_nodes: int
    region_bytes: int
    chunks: int
    chunk_rows: int

    @property
    def window_bytes(self) -> int:
        """Of all regions."""
        return TRAFFICS * 2 * self._half_bytes

    def fill(self, rail: Rail, traffic: int, *, comm: int, window: int, base: int, state: int) -> None:
        """Tell a kernel of the network.

        Args:
            rail: to fill, all of it.
            traffic: which kind of call it is.
            comm: address of the device communicator, in device memory.
            window: of :attr:`window_bytes`.
            base: address of this rank's part of it.
            state: address of STATE_BYTES.
        """
        rail.comm, rail.window, rail.base = comm, window, base
        rail.put_from = traffic * 2 * self._half_bytes
        rail.put_to = rail.put_from + self._half_bytes
        rail.region_bytes, rail.turn_bytes = self.region_bytes, self.num_nodes * self.region_bytes
        rail.counts, rail.blocks = state, state + TRAFFICS * COUNT_BYTES
        rail.chunks, rail.chunk_rows = self.chunks, self.chunk_rows

    @property
    def _half_bytes(self) -> int:
        return TURNS * self.num_nodes * self.region_bytes


def chunk_rows(plan: Plan, chunks: int) -> int:
    """Count the rows of a chunk, of which a call puts so many to each node.

    Raises:
        InvalidArgument: those of four calls, which may be on their way at once, would fill the network's queue.
    """
    if not 1 <= chunks <= MOST_CHUNKS:
        raise InvalidArgument(f"chunks is {chunks}, expected 1 to {MOST_CHUNKS}: more may block a kernel")
    return -(-plan.max_tokens_per_rank // chunks)


def region_bytes(plan: Plan, header_bytes: int, record_bytes: int) -> int:
    """Count the bytes that one rank can put to another in a call."""
    return align_up(header_bytes + plan.max_tokens_per_rank * record_bytes, 128)
