"""How tests of other libraries start their ranks, and what those print."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tokenloom.env import rendezvous


def join_ranks(local_rank: int, num_local_ranks: int) -> tuple[int, int, dist.ProcessGroup]:
    """Make the default process group: over NCCL with CUDA, where it also becomes the default device, else over gloo.

    Args:
        local_rank: of this process on its node.
        num_local_ranks: processes on each node.

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
    return rank, num_ranks, dist.new_group(list(range(num_ranks)))


def dist_print(text: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on rank 0 alone."""
    if not once_in_node or not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)
    if dist.is_initialized():
        dist.barrier()
