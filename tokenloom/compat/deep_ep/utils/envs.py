"""``deep_ep.utils.envs``: how upstream's tests start their ranks."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from tokenloom.compat.ranks import dist_print, join_ranks

__all__ = ["dist_print", "get_global_seed", "get_local_seed", "init_dist", "init_seed"]

_seeds = {"global": 0, "local": 0}


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Make the default process group as ``join_ranks`` does, make bfloat16 the default dtype, and seed.

    Args:
        local_rank: of this process on its node.
        num_local_ranks: processes on each node.
        seed: see :func:`init_seed`.

    Returns:
        rank, number of ranks, and a group of all of them. MASTER_ADDR, MASTER_PORT, and WORLD_SIZE and RANK of the
        nodes, say where they meet.
    """
    found = join_ranks(local_rank, num_local_ranks)
    torch.set_default_dtype(torch.bfloat16)
    init_seed(seed)
    return found


def init_seed(seed: int) -> None:
    """Seed all generators of this process with ``seed`` plus its rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    _seeds["global"], _seeds["local"] = seed, seed + rank
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)


def get_global_seed() -> int:
    """Return the seed that all ranks share."""
    return _seeds["global"]


def get_local_seed() -> int:
    """Return the seed of this rank."""
    return _seeds["local"]
