"""Numbers that stand for words in kernels, and words for people."""

from __future__ import annotations

import torch

from tokenloom.plan import Plan

HOPPER = (9, 0)
"""Compute capability of the GPUs that kernels are compiled for."""
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Numbers of dtypes; Dtype of device/tile/values.cuh."""
LAYOUTS = {"token": 0, "expert": 1, "rank": 2}
"""Numbers of layouts; Layout of device/tile/layout.cuh."""
MAX_BLOCKS = 64
"""Most blocks of one dispatch or combine, each on an SM of its own. Flags are laid out for as many. kMostBlocks
of device/transport/call.cuh."""
MAX_RANKS = 64
"""Most ranks of a group: masks of ranks have a bit for each. kMostRanks of device/transport/peer.cuh."""
MAX_RANKS_OF_NODES = 32
"""Most ranks of a group on several nodes, of all of them together; kMostRanksOfNodes of device/transport/rail.cuh."""
MAX_FUSED_RANKS = 32
"""Most ranks of a MegaMoE's own kernels; kMostFusedRanks of device/roles/arrivals.cuh."""
UNIT_BYTES = 16
"""Bytes that a lane loads or stores at once."""
_SHORT_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
}


def short_name(dtype: torch.dtype) -> str:
    """Name a dtype in four letters, say "bf16"."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def block_count_words(plan: Plan) -> int:
    """Count the int32 words of flags and counts that blocks share, as device/roles/count_routes.cuh has them."""
    return MAX_BLOCKS * (2 + plan.num_ranks + plan.num_experts)


def describe(plan: Plan) -> str:
    """Name the sizes that kernels depend on, say "ep8 e256 k8 h7168"."""
    return f"ep{plan.num_ranks} e{plan.num_experts} k{plan.top_k} h{plan.hidden}"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether lanes can load the tensor in its order: it is contiguous, and begins where they can."""
    return tensor.is_contiguous() and tensor.data_ptr() % UNIT_BYTES == 0
