"""How rows are cut into stages of shared memory; the host side of device/pipe/row_stream.cuh."""

from __future__ import annotations

from tokenloom.errors import InvalidArgument
from tokenloom.plan import align_up

MAX_SHARED_BYTES = 232448
"""Shared memory that one block of an sm_90 GPU may have."""
RESERVED_SHARED_BYTES = 1024
"""What the system takes for each block, beside that."""
LARGEST_STAGE_BYTES = 7168
"""Largest stage. Four rows of 7 KB in flight per warp fill the links, and larger stages only make the ring shorter."""
MOST_STAGES = 8
CONTROL_BYTES = 32
"""Bytes beside each stage: an mbarrier, and its part of the tags of RowStream."""
STAGE_UNIT = 128
"""Alignment of stages, in bytes."""


def require_shared(num_bytes: int) -> None:
    """Raise InvalidArgument for more shared memory than a block can have."""
    if num_bytes > MAX_SHARED_BYTES:
        raise InvalidArgument(
            f"a block's counts per expert take {num_bytes} of its {MAX_SHARED_BYTES} bytes of shared memory; use "
            "fewer experts, another layout, or backend='collective'"
        )


def ring(row_bytes: int, warps: int, other_bytes: int, least_bytes: int) -> tuple[int, int, int]:
    """Cut a row into stages for the rings of a block.

    Args:
        row_bytes: bytes of a row.
        warps: warps that stream rows, each through a ring of its own.
        other_bytes: shared memory beside the rings.
        least_bytes: what the memory of the rings is used for before or after rows stream. The block has at least that
            and ``other_bytes``.

    Returns:
        Bytes of a stage, stages of a ring, and bytes of shared memory of the block.

    Raises:
        InvalidArgument: the block needs so much other shared memory that no ring fits beside it.
    """
    room = MAX_SHARED_BYTES - other_bytes - 1024
    largest = min(LARGEST_STAGE_BYTES, (room // (2 * warps) - CONTROL_BYTES) // STAGE_UNIT * STAGE_UNIT)
    if largest < STAGE_UNIT or room < least_bytes + 2 * warps * CONTROL_BYTES:
        raise InvalidArgument(
            f"a block's counts per expert take {other_bytes + least_bytes} of its {MAX_SHARED_BYTES} bytes of shared "
            "memory, which leaves no room for rows; use fewer experts, another layout, or backend='collective'"
        )
    segments = -(-row_bytes // largest)
    stage_bytes = align_up(-(-row_bytes // segments), STAGE_UNIT)
    stages = min(MOST_STAGES, room // (warps * (stage_bytes + CONTROL_BYTES)))
    stages = min(stages, (room - least_bytes) // (warps * CONTROL_BYTES))
    rings = max(warps * stages * stage_bytes, least_bytes)
    return stage_bytes, stages, rings + warps * stages * CONTROL_BYTES + other_bytes + 512
