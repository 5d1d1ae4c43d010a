"""Ranks of several nodes on the emulator: memory of each, and kernels on all of them."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from tests.kernels.network_calls import CALL_WORDS, NOWHERE, Nodes, Own, stale
from tests.support import emulator
from tests.support.cases import Problem
from tests.support.emulator.network import device_comm, signals_of
from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common.rail import STATE_BYTES

LIMIT_S = 120.0
FOREVER_NS = 10**15
"""Deadlines are in turns of fibers, which the emulator takes for nanoseconds."""


class EmulatedNodes(Nodes):
    """All ranks of some nodes, their kernels on the emulator.

    Args:
        problem, ranks_per_node, chunks, region, timeout_ns: see :class:`Nodes`.
        seed: of what happens when.

    Attributes:
        signals: of each rank, for all contexts.
        records: of each rank, CallRecord.
    """

    def __init__(
        self, problem: Problem, ranks_per_node: int, chunks: int, seed: int, region: int, timeout_ns: int = FOREVER_NS
    ) -> None:
        num_ranks = problem.plan.num_ranks
        super().__init__(
            problem,
            ranks_per_node,
            chunks,
            region,
            ranks=range(num_ranks),
            device="cpu",
            blocks=2,
            timeout_ns=timeout_ns,
        )
        self.emulator = emulator.Emulator(emulator._shared_folder(), num_ranks, seed)
        self.launched, self._kept = [0] * num_ranks, []  # type: ignore[var-annotated]
        self.signals = [signals_of(self.nodes) for _ in range(num_ranks)]
        self.records, self._faults = self._of_each(8), self._of_each(8)
        states, rails = self._of_each(CALL_WORDS), self._of_each(STATE_BYTES // 4)
        windows = [stale(self.regions.window_bytes, torch.uint8) for _ in self.ranks]
        window = torch.tensor([each.data_ptr() for each in windows])
        control = self.shared(self.layout.total_bytes, zeros=True)
        self._kept += [states, rails, windows, window, control]
        self.own = {
            rank: Own(
                control=control[rank].data_ptr(),
                state=states[rank].data_ptr(),
                record=self.records[rank].data_ptr(),
                fault=self._faults[rank].data_ptr(),
                fault_claimed=self._faults[rank].data_ptr() + 28,
                comm=self._comm(rank),
                window=window.data_ptr(),
                base=windows[rank].data_ptr(),
                rail=rails[rank].data_ptr(),
            )
            for rank in self.ranks
        }

    def _of_each(self, words: int) -> list[torch.Tensor]:
        return [torch.zeros(words, dtype=torch.int32) for _ in self.ranks]

    def _comm(self, rank: int) -> int:
        comm = device_comm(rank, self.signals, self.nodes)
        self._kept.append(comm)
        return ctypes.addressof(comm)

    def shared(self, num_bytes: int, zeros: bool = False) -> dict[int, torch.Tensor]:
        parts = [stale(num_bytes, torch.uint8) for _ in self.ranks]
        self._kept += parts
        if zeros:
            for part in parts:
                part.zero_()
        return {rank: self._table(parts, rank // self.ranks_per_node) for rank in self.ranks}

    def _table(self, parts: list[torch.Tensor], node: int) -> torch.Tensor:
        """Where each rank's part of a buffer is for ranks of a node."""
        near = [other // self.ranks_per_node == node for other in self.ranks]
        places = zip(parts, near, strict=True)
        return torch.tensor([part.data_ptr() if is_near else NOWHERE for part, is_near in places])

    def launch(self, rank: int, spec: KernelSpec, args: Any) -> None:
        self._kept.append(args)
        self.emulator.launch(rank, spec, args, self.blocks)
        self.launched[rank] += 1

    def finish(self, but: int = -1) -> None:
        """Let all kernels end, but for those of one rank."""
        began = time.monotonic()
        while any(self.emulator.finished(rank) < self.launched[rank] for rank in self.ranks if rank != but):
            self.emulator.run(50_000)
            assert time.monotonic() - began < LIMIT_S, "kernels wait for what never comes"

    def fault(self, rank: int) -> tuple[int, int, int] | None:
        """(peer, phase, epoch) of the wait of a rank that expired, if one did."""
        is_set, peer, phase, epoch, *_ = self._faults[rank].tolist()
        return (peer, phase, epoch) if is_set else None
