"""Counts that all ranks exchange before a balanced dispatch."""

from __future__ import annotations

import torch

from tokenloom.backends.peers.opening import Launcher
from tokenloom.kernels.counts.launch import GatherCountsVariant
from tokenloom.runtime.openings import CallKind

GATHERING = CallKind({"call": "counts of experts"})


def gather_counts(launcher: Launcher, counts: torch.Tensor) -> torch.Tensor:
    """Put the exchange on the current stream.

    Args:
        counts: int [n] of this rank, on the device; n is at most the ranks and slots of the plan.

    Returns:
        int32 [W, n]. Zeros for masked ranks, and everywhere if the call fails, which a later call raises.

    Raises:
        InvalidArgument: a CUDA graph is captured, and this is the first call.
    """
    kernel = launcher.kernel(GatherCountsVariant(launcher.plan, len(counts)))
    own = counts.to(torch.int32)
    table = torch.empty(launcher.plan.num_ranks, len(counts), dtype=torch.int32, device=counts.device)
    kernel.args.counts, kernel.args.all_counts = own.data_ptr(), table.data_ptr()
    launcher.launch(kernel, GATHERING, GATHERING.number, blocks=1)
    return table
