"""What a fused layer needs of this backend beside dispatch: memory for results, and a meeting of all ranks."""

from __future__ import annotations

import torch

from tokenloom.backends.handshake import NUMBER, CallKind, Fields
from tokenloom.backends.nvlink.buffers import Buffers
from tokenloom.backends.nvlink.launcher import Launcher
from tokenloom.backends.nvlink.outcomes import CALLS_IN_FLIGHT
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.runtime.symmetric_memory import SymmetricBuffer


class FusedLayerCalls:
    """Calls of one MegaMoE. Its ranks all meet after the last use of a dispatch's rows, before the next dispatch."""

    def __init__(self, launcher: Launcher, buffers: Buffers) -> None:
        self._launcher, self._buffers = launcher, buffers
        self._barrier = launcher.new_kernel(BarrierVariant(plan=launcher.plan))
        self._kind = CallKind({"call": "MegaMoE", NUMBER: 0})

    def make_room(self) -> int | None:
        """Settle so many calls that until the meeting nothing old is raised.

        Returns:
            What :meth:`Launcher.ready` gives, for the dispatch and the meeting.
        """
        stream = self._launcher.ready(CALLS_IN_FLIGHT - 1)
        if stream is None and not torch.cuda.is_current_stream_capturing():
            self._launcher.settle(CALLS_IN_FLIGHT - 1)
        return stream

    def buffer(self, fields: Fields) -> SymmetricBuffer:
        """Received rows, and where results come home. Made at the first call, which all ranks make."""
        return self._buffers.data(1, fields)

    def prepare_meetings(self, opened: torch.Tensor, cleared: torch.Tensor) -> None:
        """Say what meetings write from now on.

        Args:
            opened: int32 [1], becomes 1 if all ranks came and none has a fault, else 0.
            cleared: int32, becomes zeros.
        """
        args = self._barrier.args
        args.opened, args.cleared, args.num_cleared = opened.data_ptr(), cleared.data_ptr(), cleared.numel()

    def keep(self, *used: object) -> None:
        """Let graphs that capture calls keep these alive, which the calls use."""
        self._launcher.keep_with_graphs.extend(used)

    def meet(self, dispatch: int, stream: int | None, early: bool) -> None:
        """Put a meeting of all ranks on the stream. Who has met sees all that the others have sent before.

        Args:
            dispatch: number of the dispatch that it belongs to.
            stream: what :meth:`make_room` has given before that, if nothing else was called since.
            early: as of a Kernel.
        """
        self._barrier.early = early
        if stream is None:
            self._launcher.launch(self._barrier, self._kind, dispatch, blocks=1)
        else:
            self._launcher.launch_ready(self._barrier, self._kind, dispatch, stream, blocks=1)

    @property
    def masked(self) -> int:
        """Address of a word in device memory: bit r is set if rank r takes no part."""
        return self._launcher.masked_address

    @property
    def fault_claimed(self) -> int:
        """Address of a word in device memory: not 0 once a wait of this rank has expired."""
        return self._launcher.fault_claimed
