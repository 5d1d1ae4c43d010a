"""When the kernels of a MegaMoE work, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from tokenloom.kernels.common import MARK_WORDS, MAX_BLOCKS
from tokenloom.kernels.gemm.launch import trace_times


@dataclass(frozen=True)
class MegaTimes:
    """Times of the last call, in nanoseconds of the GPU's clock, which all kernels of a rank share. 0 means never;
    what a call does not do keeps its times of a call before.

    Attributes:
        pack: int64 [blocks, 2], when each block packs own tokens: beginning and end.
        send: int64 [blocks, marks], when each block of the kernel that sends rows has passed each of
            ``tokenloom.kernels.common.MARKS``.
        gemm1, gemm2: int64 [blocks, role, tile, 2], when each role of each block works on each of its tiles. Roles are
            ``tokenloom.kernels.gemm.launch.TRACE_ROLES``. There is room for two blocks on an SM; most calls have one.
        barrier: int64 [1, marks], when the block that meets all ranks has begun, told ("sent") and heard them.
        sum: int64 [blocks, 2], when each block adds rows.
    """

    pack: torch.Tensor
    send: torch.Tensor
    gemm1: torch.Tensor
    gemm2: torch.Tensor
    barrier: torch.Tensor
    sum: torch.Tensor

    @classmethod
    def allocate(cls, num_sms: int, device: torch.device) -> MegaTimes:
        """Make zeros for kernels on so many SMs."""

        def zeros(blocks: int, width: int) -> torch.Tensor:
            return torch.zeros(blocks, width, dtype=torch.int64, device=device)

        return cls(
            pack=zeros(2 * num_sms, 2),
            send=zeros(MAX_BLOCKS, MARK_WORDS),
            gemm1=trace_times(num_sms, device),
            gemm2=trace_times(num_sms, device),
            barrier=zeros(1, MARK_WORDS),
            sum=zeros(num_sms, 2),
        )

    def cpu(self) -> MegaTimes:
        """Copy them to the host."""
        return MegaTimes(**{each.name: getattr(self, each.name).cpu() for each in fields(self)})

    def zero_(self) -> None:
        """Forget the times of the calls so far."""
        for each in fields(self):
            getattr(self, each.name).zero_()
