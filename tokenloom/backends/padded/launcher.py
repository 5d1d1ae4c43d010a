"""Launching calls of two kernels, with a collective between them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from tokenloom.backends.gin.launcher import NodesLauncher
from tokenloom.backends.padded.memory import PaddedMemory
from tokenloom.backends.peers.opening import Half, OpeningKernel
from tokenloom.plan import Plan
from tokenloom.runtime.collectives import Transfer
from tokenloom.runtime.openings import CallKind, Fields
from tokenloom.runtime.rank_group import RankGroup


class PaddedLauncher(NodesLauncher):
    """Launches the two kernels of calls. The collective begins behind the first, and the second waits for it.

    Args:
        plan, ranks, memory, num_sms: see :class:`NodesLauncher`.
    """

    def __init__(self, plan: Plan, ranks: RankGroup, memory: PaddedMemory, num_sms: int) -> None:
        super().__init__(plan, ranks, memory, num_sms)
        self._padded = memory
        # Weak: a half that was captured and given up is never received.
        self._under_way: WeakKeyDictionary[Half, tuple[torch.Tensor, Transfer]] = WeakKeyDictionary()

    def launch(
        self,
        kernel: OpeningKernel,
        kind: CallKind,
        dispatch: int,
        *,
        begins: Half | None = None,
        finishes: Half | None = None,
        **others: Any,
    ) -> None:
        """See :meth:`Launcher.launch`. Every kernel begins a call or finishes one."""
        regions = None
        if begins is not None:
            regions = self._padded.new_regions(kernel.args.rail)
        elif finishes is not None:
            regions, transfer = self._under_way.pop(finishes)
            transfer.wait()
        super().launch(kernel, kind, dispatch, begins=begins, finishes=finishes, **others)
        if finishes is not None and regions is not None and regions.is_cuda:  # made on the stream that sent
            regions.record_stream(torch.cuda.current_stream(regions.device))
        if begins is not None and regions is not None:
            self._under_way[begins] = regions, self._padded.exchange(regions)

    def _open(self, fields: Fields, status: int = 0) -> None:
        """The others' kernels and collectives, of no tokens."""
        empty, kind = self.empty_of(fields), CallKind(fields)
        assert empty.receiving_kernel is not None
        epoch = torch.empty(2, dtype=torch.int32, device=self.ranks.device)
        half = Half(epoch, epoch.data_ptr(), empty.receiving_kernel)
        self.launch(empty.kernel, kind, kind.number, status=status, begins=half)
        self.finish(half)
