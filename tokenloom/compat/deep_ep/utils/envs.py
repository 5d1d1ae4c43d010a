"""``deep_ep.utils.envs``: how upstream's tests start their ranks."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from tokenloom.env import rendezvous

__all__ = ["dist_print", "get_global_seed", "get_local_seed", "init_dist", "init_seed"]

_seeds = {"global": 0, "local": 0}


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Make the default process group: over NCCL with CUDA, where it also becomes the default device, else over gloo.

    Args:
        local_rank: of this process on its node.
        num_local_ranks: processes on each node.
        seed: see :func:`init_seed`.

    Returns:
        rank, number of ranks, and a group of all of them. MASTER_ADDR, MASTER_PORT, and WORLD_SIZE and RANK of the
        nodes, say where they meet.
    """
    where, num_nodes, node = rendezvous()
    cuda = torch.cuda.is_available()
    rank, num_ranks = node * num_local_ranks + local_rank, num_nodes * num_local_ranks
    device = torch.device("cuda", local_rank) if cuda else None
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=where, rank=rank, world_size=num_ranks, device_id=device
    )
    if cuda:
        torch.cuda.set_device(local_rank)
        torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    init_seed(seed)
    return rank, num_ranks, dist.new_group(list(range(num_ranks)))


def init_seed(seed: int) -> None:
    """Seed all generators of this process with ``seed`` plus its rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    _seeds["global"], _seeds["local"] = seed, seed + rank
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)


def get_global_seed() -> int:
    """The seed that all ranks share."""
    return _seeds["global"]


def get_local_seed() -> int:
    """The seed of this rank."""
    return _seeds["local"]


def dist_print(text: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on rank 0 alone."""
    if not once_in_node or not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)
    if dist.is_initialized():
        dist.barrier()
