"""What the kernels' compile-time shapes share: dtypes by number, and how rows are cut into stages."""

from __future__ import annotations

import torch

from tokenloom.plan import align_up

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""As in device/tile/values.cuh."""
LAYOUTS = {"token": 0, "expert": 1, "rank": 2}
"""As in device/sync/symmetric.cuh."""
MAX_SHARED_BYTES = 232448
"""Shared memory that one block of an sm_90 GPU may have."""
THREADS = 256
WARPS = THREADS // 32
LARGEST_STAGE_BYTES = 7168
"""Four rows of 7 KB in flight per warp fill the links; larger stages only make the ring shorter."""
MOST_STAGES = 8


def ring(row_bytes: int, other_shared_bytes: int) -> tuple[int, int, int]:
    """How a row streams through a warp's ring: (bytes of a stage, stages, shared memory of the block)."""
    segments = -(-row_bytes // LARGEST_STAGE_BYTES)
    stage_bytes = align_up(-(-row_bytes // segments), 128)
    room = MAX_SHARED_BYTES - other_shared_bytes - 1024
    stages = max(2, min(MOST_STAGES, room // (WARPS * (stage_bytes + 8))))
    return stage_bytes, stages, WARPS * stages * (stage_bytes + 8) + other_shared_bytes + 512
