"""Kernels of rank 0 of two on one GPU. The test plays rank 1: it writes what that rank would have sent, or not."""

from __future__ import annotations

from typing import Any

import torch

from tokenloom.backends.nvlink.buffers import control_layout
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import HEADER_WORDS, TURNS, Variant
from tokenloom.plan import Plan, align_up
from tokenloom.runtime.kernel_reports import CallRecords, FaultFlag

EPOCH = 1
"""The first call on fresh buffers."""
SEQUENCE = 77
OPTIONS_HASH = 0x1234_5678_9ABC_DEF0
SHORT_S, LONG_S = 0.3, 30.0
"""The deadline that shall expire, and the other one."""
BLOCKS = 4


class Rank0:
    """Rank 0 of two: its control buffer, and what its kernels are told of a call.

    Args:
        plan: sizes, for two ranks.
        short: "open" or "phases", the deadline that is SHORT_S. The other one is LONG_S.
    """

    def __init__(self, plan: Plan, short: str) -> None:
        assert plan.num_ranks == 2
        self.plan, self.device = plan, torch.device("cuda:0")
        self.layout = control_layout(plan)
        self._control = [self.bytes(self.layout.total_bytes) for _ in range(2)]
        self.fault = FaultFlag(self.device, 0)
        self.records = CallRecords(self.device, 1)
        self.state = torch.zeros(4, dtype=torch.int32, device=self.device)  # epoch, blocks out, two kinds of claims
        self._timeouts_s = (SHORT_S, LONG_S) if short == "open" else (LONG_S, SHORT_S)
        self._kept: list[torch.Tensor] = []

    def bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)

    def addresses(self, buffers: list[torch.Tensor]) -> int:
        """Device memory with where each rank's part of a window begins."""
        table = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=self.device)
        self._kept += [*buffers, table]
        return table.data_ptr()

    def words(self, name: str) -> torch.Tensor:
        """A part of this rank's control buffer, as int32."""
        offset, size = self.layout.places[name]
        return self._control[0][offset : offset + size].view(torch.int32)

    def open_by_rank_1(self, counts: list[int], status: int = 0, options_hash: int = OPTIONS_HASH) -> None:
        """Write the header of rank 1, with its counts, and raise its flag."""
        stride = align_up(HEADER_WORDS + self.plan.num_ranks + self.plan.num_experts, 4)
        header = [status, 0, *_halves(options_hash), *counts]
        first = (EPOCH % TURNS * self.plan.num_ranks + 1) * stride
        self.words("headers")[first : first + len(header)] = torch.tensor(header, dtype=torch.int32)
        self.words("flags")[1] = EPOCH

    def kernel(self, variant: Variant) -> Any:
        """The kernel, told of the call."""
        kernel = Kernel(variant.spec(), 0)
        call = kernel.args.call
        call.peers = self.addresses(self._control)
        call.flags, call.headers = self.layout.offset("flags"), self.layout.offset("headers")
        call.epoch = self.state.data_ptr()
        call.blocks_out, call.claimed = call.epoch + 4, call.epoch + 8
        call.record = self.records.address(0)
        call.fault, call.fault_claimed = self.fault.record_address, self.fault.claimed.data_ptr()
        call.open_timeout_ns, call.timeout_ns = (int(seconds * 1e9) for seconds in self._timeouts_s)
        call.options_hash, call.sequence = OPTIONS_HASH, SEQUENCE
        return kernel

    def run(self, kernel: Any, blocks: int = BLOCKS) -> None:
        """Launch it and wait for its end. Whatever becomes of a call, the host hears of its end, and the next one
        finds its blocks counted."""
        kernel.launch(blocks, torch.cuda.current_stream(self.device).cuda_stream)
        torch.cuda.synchronize(self.device)
        assert self.state.tolist()[1:] == [0, 0, 0]
        assert self.records.is_over(0, SEQUENCE)


def _halves(word: int) -> tuple[int, int]:
    """A 64-bit word as two int32, low first."""
    signed = [half - (1 << 32) if half >= 1 << 31 else half for half in (word & 0xFFFFFFFF, word >> 32)]
    return signed[0], signed[1]
