"""Kernels of rank 0 of two on one GPU. The test plays rank 1: it writes what that rank would have sent, or not."""

from __future__ import annotations

from typing import Any

import torch

from tests.kernels import one_gpu
from tests.kernels.one_gpu import DEVICE, LONG_S, SHORT_S
from tokenloom.backends.peers.buffers import control_layout
from tokenloom.kernels.common import CLAIMS, HEADER_WORDS, MOST_ARRIVALS, TURN_WORDS, TURNS, Variant
from tokenloom.plan import Plan, align_up
from tokenloom.runtime.kernel_reports import CallOutcome
from tokenloom.runtime.symmetric_memory import BufferLayout

EPOCH = 1
"""The first call on fresh buffers."""
OPTIONS_HASH = 0x1234_5678_9ABC_DEF0
BLOCKS = 4
SLOTS = 3
"""Slots of records, in turns; a call of two kernels has two."""
STALE = 1
"""Every word of memory that a test does not set: a number like any other, that addresses nothing out of bounds."""
ABSENT, NAN_THAT_TRAVELS = -1, 0x7FFFFFFF
"""A word that has not come: every bit is set. NaNs like that are sent as others."""


def int32(values: Any) -> torch.Tensor:
    """A tensor on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def signed(word: int) -> int:
    """The int32 with the bits of a word."""
    return word - (1 << 32) if word >= 1 << 31 else word


def next_epoch(epoch: int) -> int:
    """The epoch of the next call: 0 is what a flag shows that was never raised."""
    return TURNS if epoch == 2**32 - 1 else epoch + 1


class Rank0:
    """Rank 0 of two: the control buffers of both, and what its kernels are told of a call.

    Args:
        plan: sizes, for two ranks.
        short: "open" or "phases", the deadline that is SHORT_S. The other one is LONG_S. "" makes both long.
        epoch: of the first call.

    Attributes:
        epoch: of the next call that opens.
        arrivals: int64 [MOST_ARRIVALS, 3], as Call has them: none.
        last_run_s: how long the last kernel took.
    """

    def __init__(self, plan: Plan, short: str = "", epoch: int = EPOCH) -> None:
        assert plan.num_ranks == 2
        self.plan, self.device, self.epoch, self.last_run_s = plan, torch.device(DEVICE), epoch, 0.0
        self.layout = control_layout(plan)
        self._control = [self.bytes(self.layout.total_bytes) for _ in range(2)]
        self.fault, self.records = one_gpu.make_reports(SLOTS)
        # Epoch, masked ranks, blocks out, claims.
        self.state = torch.zeros(TURN_WORDS + 1 + CLAIMS, dtype=torch.int32, device=self.device)
        self.state[0] = signed(epoch - 1)
        self._timeouts_s = [SHORT_S if short == each else LONG_S for each in ("open", "phases")]
        self._kept: list[torch.Tensor] = []
        self._opened, self._sequence = epoch - 1, 77
        self.arrivals = torch.zeros(MOST_ARRIVALS, 3, dtype=torch.int64, device=self.device)

    def bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)

    def stale(self, layout: BufferLayout, word: int = STALE) -> list[torch.Tensor]:
        """A buffer of each rank, as int32 words."""
        words = align_up(layout.total_bytes, 4) // 4
        return [torch.full((words,), word, dtype=torch.int32, device=self.device) for _ in range(2)]

    def addresses(self, buffers: list[torch.Tensor]) -> int:
        """Device memory with where each rank's part of a window begins."""
        table = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=self.device)
        self._kept += [*buffers, table]
        return table.data_ptr()

    def words(self, name: str, rank: int = 0) -> torch.Tensor:
        """A part of a rank's control buffer, as int32."""
        offset, size = self.layout.places[name]
        return self._control[rank][offset : offset + size].view(torch.int32)

    def header(self, source: int, rank: int, epoch: int) -> torch.Tensor:
        """What a source tells a rank of a call, int32 [words, 2]: HEADER_WORDS, then counts, each with its call."""
        words = align_up(HEADER_WORDS + self.plan.num_ranks + self.plan.num_experts, 4)
        return self.words("headers", rank).view(TURNS, self.plan.num_ranks, words, 2)[epoch % TURNS, source]

    def open_by_rank_1(
        self,
        counts: list[int],
        status: int = 0,
        options_hash: int = OPTIONS_HASH,
        epoch: int | None = None,
        leaves: bool = True,
    ) -> None:
        """Write the header of rank 1, with its counts: by default for the next call. If it refuses the call, it says
        that nothing more comes, unless it does not leave.
        """
        epoch = self.epoch if epoch is None else epoch
        words = [status, 0, *_halves(options_hash), *counts]
        self.header(1, 0, epoch)[: len(words)] = int32([[word, signed(epoch)] for word in words])
        if leaves and (status != 0 or options_hash != OPTIONS_HASH):
            self.words("left_flags")[1] = signed(epoch)

    def kernel(self, variant: Variant, half_epoch: torch.Tensor | None = None) -> Any:
        """The kernel, told of a call.

        Args:
            half_epoch: int32 [TURN_WORDS] of the call, where the kernel is one half of it.
        """
        kernel = one_gpu.make_kernel(variant.spec())
        call = kernel.args.call
        call.peers = self.addresses(self._control)
        call.headers = self.layout.offset("headers")
        call.epoch = self.state.data_ptr()
        call.half_epoch = 0 if half_epoch is None else half_epoch.data_ptr()
        call.blocks_out = call.epoch + 4 * TURN_WORDS
        call.claimed = call.blocks_out + 4
        call.some_flags, end = (self.layout.offset(name) for name in ("done_flags", "combine_recv_weights"))
        call.num_some_flags = (end - call.some_flags) // 4
        call.fault, call.fault_claimed = self.fault.record_address, self.fault.claimed.data_ptr()
        call.open_timeout_ns, call.timeout_ns = (int(seconds * 1e9) for seconds in self._timeouts_s)
        call.options_hash = OPTIONS_HASH
        call.left_flags, call.arrivals = self.layout.offset("left_flags"), self.arrivals.data_ptr()
        return kernel

    def run(self, kernel: Any, blocks: int = BLOCKS, opens: bool = True) -> CallOutcome | None:
        """Launch it and wait for its end. Whatever becomes of a call, the host hears of its end, and the next one
        finds its blocks counted.

        Args:
            opens: False for the receiving half of a call, which leaves the epoch alone.

        Returns:
            What the call found wrong; a wait that expired is for :func:`error_of`.
        """
        self._sequence += 1
        slot, call = self._sequence % SLOTS, kernel.args.call
        call.record, call.sequence = self.records.address(slot), self._sequence
        self.last_run_s = one_gpu.run(kernel, blocks)
        if opens:
            self._opened, self.epoch = self.epoch, next_epoch(self.epoch)
        assert self.state.tolist() == [signed(self._opened), *[0] * (TURN_WORDS + CLAIMS)]
        assert self.records.is_over(slot, self._sequence)
        return self.records.take(slot)


def error_of(rank0: Rank0) -> tuple[tuple[int, ...], str] | None:
    """Whom a wait was for that expired, and in which phase."""
    error = rank0.fault.error()
    return None if error is None else (error.peers, error.phase)


def _halves(word: int) -> tuple[int, int]:
    """A 64-bit word as two int32, low first."""
    return signed(word & 0xFFFFFFFF), signed(word >> 32)
