"""``deep_gemm.utils.dist``: how tests of the layer start their ranks and gather what those have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tokenloom.compat.ranks import dist_print
from tokenloom.compat.ranks import join_ranks as init_dist

__all__ = ["dist_print", "init_dist", "uneven_all_gather"]


def uneven_all_gather(tensor: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Join the tensors of all ranks along ``dim``, in which they may differ. Collective."""
    rows = tensor.movedim(dim, 0).contiguous()
    rows = rows.view(torch.uint8) if rows.itemsize == 1 else rows  # gloo does not know FP8
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    lengths = [int(each) for each in counts]
    sent = rows.new_zeros(max(1, *lengths), *rows.shape[1:])
    sent[: len(rows)] = rows
    found = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(found, sent, group=group)
    joined = torch.cat([each[:length] for each, length in zip(found, lengths, strict=True)])
    return joined.view(tensor.dtype).movedim(0, dim)
