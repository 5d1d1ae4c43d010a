"""Backend "nvlink": dispatch and combine by kernels that write the peers' memory.

A dispatch is one kernel, a combine is one kernel; neither asks the host anything. How a call opens is in launcher.py,
how the host learns what went wrong in outcomes.py, and what lies where in buffers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch

from tokenloom.backends.nvlink.buffers import RECEIVE_BUFFERS, Buffers, control_layout
from tokenloom.backends.nvlink.combine import Combiner
from tokenloom.backends.nvlink.copies import Copies
from tokenloom.backends.nvlink.dispatch import Dispatcher
from tokenloom.backends.nvlink.fused import FusedLayerCalls
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.late_ranks import PHASE, CombineUntilDone, DispatchUntilDone, LateRanks
from tokenloom.backends.nvlink.launcher import Launcher
from tokenloom.backends.nvlink.outcomes import CALLS_IN_FLIGHT
from tokenloom.backends.nvlink.row_weights import RowWeights
from tokenloom.backends.seam import (
    Capabilities,
    CombineKind,
    CombineOptions,
    DispatchKind,
    DispatchOptions,
    OutputOwner,
    Pending,
    PreparedCombine,
    PreparedDispatch,
    Rows,
    Upcoming,
    Wait,
)
from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan
from tokenloom.runtime.devices import usable_sms
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

T = TypeVar("T")

ALONE = 2
"""Times as many SMs for a combine beside which nothing is computed, of at most half: NCCL, too, waits for SMs."""
NUMBER_BITS = 40
"""More calls than there are before ranks come back."""
CAPABILITIES = Capabilities(
    layouts=("token", "expert", "rank", "slots"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    returns_views=True,
    receive_buffers=RECEIVE_BUFFERS,
    overlaps_pieces=True,
    captures=True,
    takes_sms=True,
    own_node="nvlink",
    other_nodes=None,
    reads_on_host=False,
    weights_from_home=True,
    fused_layer=True,
    own_transport=True,
)


class NvlinkBackend:
    """Dispatch and combine on one NVLink domain. Making one is collective.

    Kernels send and receive in one launch. In a call of two halves each half is a kernel, and the second half of a
    dispatch with exact sizes waits until the counts are on the host.

    Kernels leave masked ranks out (device/transport/call.cuh). Memory and graphs stay as they are.

    Args:
        plan, ranks: sizes and group.
        num_sms: SMs, one block each, that a kernel takes.
        checked: read the outcome of every call before it returns.
    """

    name = "nvlink"

    def __init__(self, plan: Plan, ranks: RankGroup, num_sms: int, checked: bool = False) -> None:
        self.capabilities = replace(CAPABILITIES, reads_on_host=checked)
        self._plan, self._ranks, self._num_sms, self._checked = plan, ranks, num_sms, checked
        self._late: LateRanks | None = None
        if ranks.masks_late:
            self._mask_late_ranks()
        self._begin()

    def _begin(self, first_call: int = 0, known_losses: int | None = None) -> None:
        """Make memory that all ranks which take part share, and all that knows where it is. Collective.

        Args:
            first_call: least number of the next call, the same on all ranks.
            known_losses: where late ranks are masked, how many losses the memory before knew of; None: there was none.
        """
        plan, ranks, num_sms, checked = self._plan, self._ranks, self._num_sms, self._checked
        control = SymmetricBuffer(control_layout(plan), ranks)
        # Numbers go on in great steps: who comes back has not counted.
        known_from = ranks.met_at << NUMBER_BITS
        self._launcher = Launcher(plan, ranks, control, num_sms, max(first_call, known_from))
        self._launcher.known_from = known_from
        masked = ranks.masked
        if self._late is not None:
            gone = sorted({*range(ranks.num_ranks)} - {ranks.rank, *control.others})
            losses, gone = ranks.settle(f"made/{known_losses}", [ranks.num_losses, gone], PHASE)
            self._launcher.outcomes.known_losses, masked = losses, frozenset(gone)
        if masked:
            self._launcher.leave_out(masked)
        self._buffers = Buffers(plan, self._launcher)
        self._launcher.keep_with_graphs.append(self._buffers)
        copies = Copies(plan, self._launcher, self._buffers)
        self._dispatcher = Dispatcher(plan, self._launcher, self._buffers, copies, checked)
        self._launcher.keep_with_graphs.append(self._dispatcher)
        blocks_alone = max(num_sms, min(ALONE * num_sms, usable_sms(ranks.device.index) // 2))
        self._combiner = Combiner(plan, self._launcher, self._buffers, copies, blocks_alone, checked)
        self._row_weights = RowWeights(plan, ranks.device)

    # -- calls ----------------------------------------------------------------------------------------------

    def prepare_dispatch(self, kind: DispatchKind) -> PreparedDispatch:
        if self._late is not None:
            return DispatchUntilDone(self._late, self, kind)
        return self._dispatcher.prepare(kind)

    def prepare_combine(self, kind: CombineKind, number: int) -> PreparedCombine:
        if self._late is not None:
            return CombineUntilDone(self._late, self, kind)
        return self._combiner.prepare(kind, number)

    def ready(self, waits: bool = False) -> int | None:
        if self._late is None and self._dispatcher.shared.overflow is None:
            stream = self._launcher.ready(0 if waits else CALLS_IN_FLIGHT)
            if stream is not None:
                return stream
        self.check("nothing")
        return None

    def send_again(
        self,
        handle: NvlinkHandle,
        values: Rows,
        strategy: str = "dedup",
        owner: OutputOwner = False,
        stream: int | None = None,
    ) -> Pending[Rows]:
        return self._sent(lambda: self._dispatcher.send_again(handle, values, strategy, owner, stream))

    def send_rows(self, handle: NvlinkHandle, values: torch.Tensor, strategy: str = "dedup") -> Pending[torch.Tensor]:
        return self._sent(lambda: self._dispatcher.send_rows(handle, values, strategy))

    def send_weight_gradients(self, handle: NvlinkHandle, grad: torch.Tensor) -> Pending[torch.Tensor]:
        return self._sent(lambda: self._combiner.send_weight_gradients(handle, grad))

    def _sent(self, send: Callable[[], Pending[T]]) -> Pending[T]:
        return send() if self._late is None else self._late.until_done(send)

    def row_weights(self, handle: NvlinkHandle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        self._combiner.require_kept(handle)
        return self._row_weights.of_rows(handle, weights, num_places)

    def route_gradients(self, handle: NvlinkHandle, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self._combiner.require_kept(handle)
        return self._row_weights.of_routes(handle, grad, like)

    @property
    def launcher(self) -> Launcher:
        return self._launcher

    @property
    def dispatcher(self) -> Dispatcher:
        return self._dispatcher

    @property
    def combiner(self) -> Combiner:
        return self._combiner

    def remake(self) -> None:
        """See :class:`tokenloom.backends.nvlink.late_ranks.Remakes`."""
        before, overflow = self._launcher, self._dispatcher.shared.overflow
        before.close(self._buffers.take_all())
        numbers = self._ranks.all_gather_object(before.num_calls, PHASE)
        first_call = max(number for number in numbers if number is not None)
        self._begin(first_call, before.outcomes.known_losses)
        self._dispatcher.shared.overflow = overflow

    def fused_layer(self, num_shared_experts: int) -> FusedLayerCalls:
        """Serve one MegaMoE from now on, and nobody else."""
        if self._late is not None:
            raise InvalidArgument("a MegaMoE cannot mask late ranks; use on_timeout='raise' and mask_ranks")
        self._buffers.serve_fused_layer(num_shared_experts)
        return FusedLayerCalls(self._launcher, self._buffers, num_shared_experts)

    # -- state ----------------------------------------------------------------------------------------------

    def report_fault(self, fault: Exception, upcoming: Sequence[Upcoming]) -> None:
        """Open the calls that the others open before they wait: for an outcome, or for a buffer that is not there."""
        names = [upcoming[0].name]
        for call, following in pairwise(upcoming):
            if call.awaited or self._checked or not all(map(self._has_buffers, (call, following))):
                break
            names.append(following.name)
        first = upcoming[0]
        others_wait = first.awaited or not self._has_buffers(first)
        if self._late is None:
            self._launcher.report_fault(fault, names, others_wait)
        else:
            self._late.call(lambda: self._launcher.report_fault(fault, names[:1], others_wait))

    def _has_buffers(self, call: Upcoming) -> bool:
        options = call.options
        if self._buffers.fused:
            return self._buffers.has_for_fused_layer()
        if isinstance(options, CombineOptions):
            return self._buffers.has_for_combine(options, call.split)
        if isinstance(options, DispatchOptions):
            return self._buffers.has_for_dispatch(options, call.value_bytes)
        return True

    @property
    def masked(self) -> frozenset[int]:
        return self._launcher.masked | (self._ranks.masked if self._late is not None else frozenset())

    def mask(self, ranks: Collection[int]) -> None:
        """Calls that have been made end first, so this raises what they have found."""
        self._require_no_capture()
        self._launcher.settle(0)
        self._ranks.mask(ranks)
        self._launcher.leave_out(self._ranks.masked)

    def unmask(self, ranks: Collection[int]) -> None:
        """All memory is made anew, with those that come back. Graphs captured before go on in the old one, without
        them.
        """
        self._require_no_capture()
        if self._buffers.fused:
            error = InvalidArgument("a MegaMoE cannot take ranks back; make the layer again, on all ranks")
            error.known_to_all = True
            raise error
        self._launcher.finish_all()  # all ranks have the same halves open
        self._launcher.settle(0)
        before = self._ranks.met_at
        self._ranks.unmask(ranks)
        if self._ranks.met_at == before:  # nobody comes back
            return
        self._launcher.close(self._buffers.take_all())
        try:
            self._begin()
        except Exception as fault:
            self._ranks.abort(fault)
            raise
        if self._late is not None:
            self._late.begin_anew()

    def mask_late(self) -> None:
        """The host waits for every call then, so that it can be made again."""
        self._ranks.mask_late()
        if self._late is not None:  # it was made so
            return
        self._mask_late_ranks()
        self._launcher.close(self._buffers.take_all())
        self._begin()

    def _mask_late_ranks(self) -> None:
        if self._ranks.num_ranks == 1:
            return
        if self._ranks.served:
            raise InvalidArgument("with on_timeout='mask', backend nvlink has dispatch and combine, and no more calls")
        self._ranks.served, self._checked = True, True
        self._late = LateRanks(self._ranks, self)
        self.capabilities = replace(self.capabilities, reads_on_host=True, captures=False, overlaps_pieces=False)

    def _require_no_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("ranks are masked between calls and replays; mask them outside of the capture")

    def check(self, wait: Wait) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        shared = self._dispatcher.shared
        if shared.overflow is not None:
            overflow, shared.overflow = shared.overflow, None
            raise overflow
        self._launcher.check(wait)

    def memory(self) -> list[str]:
        control = self._launcher.control.layout.total_bytes
        return [f"flags and counts: {control / 1e6:.1f} MB", *self._buffers.memory()]

    def close(self) -> None:
        self._launcher.close(self._buffers.take_all())
