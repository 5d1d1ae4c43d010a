"""Calls of a fused layer: a dispatch of its own, memory for rows and results, and a meeting of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenloom.backends.peers.buffers import Buffers
from tokenloom.backends.peers.counts import gather_counts
from tokenloom.backends.peers.late_ranks import LateRanks
from tokenloom.backends.peers.opening import Launcher, OpeningKernel
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.common import Deadline
from tokenloom.kernels.moe.launch import HOME_ROW_BITS, Packing, SendRoutesVariant
from tokenloom.runtime.openings import NUMBER, CallKind, Fields

FP8 = torch.float8_e4m3fn


class FusedLayerCalls:
    """Calls of one MegaMoE. Its ranks all meet after the last use of a dispatch's rows, before the next dispatch.

    Attributes:
        rows, row_scales, row_homes, row_weights, arrived: where rows arrive, once there is memory.
        peers: address of every rank's address of that memory. results_offset: where results come home in it.
        deadline: for kernels that wait for rows.
        num_shared_experts, recipe: of the layer.
        late: makes its calls where late ranks are masked, else None.
        is_stale: the backend has other memory by now; ask it for other calls.
    """

    rows: torch.Tensor
    row_scales: torch.Tensor
    row_homes: torch.Tensor
    row_weights: torch.Tensor
    arrived: torch.Tensor
    results: torch.Tensor

    def __init__(
        self, launcher: Launcher, buffers: Buffers, num_shared_experts: int, recipe: str, late: LateRanks | None
    ) -> None:
        plan = launcher.plan
        self.num_shared_experts, self.recipe, self.late, self.is_stale = num_shared_experts, recipe, late, False
        results = plan.max_tokens_per_rank * (plan.top_k + num_shared_experts)
        if results > 1 << HOME_ROW_BITS:
            raise InvalidArgument(
                f"max_tokens_per_rank is {plan.max_tokens_per_rank}: that is {results} results of a rank, expected at "
                f"most {1 << HOME_ROW_BITS}"
            )
        self._launcher, self._buffers = launcher, buffers
        self._row_scales = plan.scales_by(recipe)
        self._loading = SendRoutesVariant(plan, num_shared_experts=num_shared_experts, recipe=recipe)
        self._loading.spec()  # refuses too many experts, before any call
        self._senders: dict[Packing | None, OpeningKernel] = {}
        self._told: dict[str, int] = {}
        self._send_trace = 0
        self._barrier = launcher.new_kernel(BarrierVariant(plan=plan))
        self._counts: list[torch.Tensor] = []
        self._dispatch = CallKind({"call": "dispatch", NUMBER: 0})
        self._meeting = CallKind({"call": "MegaMoE", NUMBER: 0})
        opening = self._barrier.opening
        self.deadline = Deadline(opening.fault, opening.fault_claimed, opening.timeout_ns)

    def gather_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, frozenset[int]]:
        """Put an exchange of counts on the current stream, ahead of the dispatch; see
        :class:`tokenloom.backends.seam.GathersCounts`."""
        return gather_counts(self._launcher, counts), self._launcher.masked

    def make_room(self, calls: int = 2) -> int | None:
        """Raise what earlier calls left, so that none of the next ``calls`` raises it: the dispatch and the meeting.

        Returns:
            What :meth:`Launcher.ready_stream` gives, for the dispatch and the meeting.
        """
        stream = self._launcher.ready_stream(CALLS_IN_FLIGHT + 1 - calls)
        if stream is None and not torch.cuda.is_current_stream_capturing():
            self._launcher.settle(CALLS_IN_FLIGHT + 1 - calls)
        return stream

    def make_memory(self, fields: Fields) -> None:
        """Make where rows and results arrive. All ranks make the call, which is the layer's first."""
        plan, shared = self._launcher.plan, self._buffers.data(1, fields)
        own = self.num_shared_experts * plan.max_tokens_per_rank
        places = plan.worst_case_rows("expert") + own
        self.rows = shared.view("rows", FP8, (places, plan.hidden))
        self.row_scales = shared.view("row_scales", torch.float32, (places, self._row_scales))
        self.row_homes = shared.view("row_homes", torch.int32, (places,))
        self.row_weights = shared.view("row_weights", torch.float32, (places,))
        self.arrived = shared.view(
            "arrived", torch.int32, (plan.experts_per_rank + self.num_shared_experts, plan.num_ranks)
        )
        self.results = shared.view("combine_recv", torch.uint8, (1,))
        self.peers, self.results_offset = shared.peers.data_ptr(), shared.layout.offset("combine_recv")
        parts = ("rows", "row_scales", "row_homes", "row_weights", "arrived")
        self.tell_senders(peers=self.peers, **{name: shared.layout.offset(name) for name in parts})

    def sender(self, packing: Packing | None) -> OpeningKernel:
        """The kernel that sends rows (routes_to_send.cuh has its arguments). With ``packing`` it packs tokens itself.

        Raises:
            InvalidArgument: it was not used before, and a CUDA graph is captured.
        """
        found = self._senders.get(packing)
        if found is None:
            found = self._senders[packing] = self._launcher.new_kernel(replace(self._loading, packing=packing))
            # It waits for the kernel that packs only when it sends. One that packs itself reads tokens at once.
            found.overlaps_previous = packing is None
            found.opening.trace = self._send_trace
            self._tell(found, self._told)
        return found

    def tell_senders(self, **values: int) -> None:
        """Set arguments of all kernels that send rows, also of those that come later."""
        self._told |= values
        for sender in self._senders.values():
            self._tell(sender, values)

    def _tell(self, sender: OpeningKernel, values: dict[str, int]) -> None:
        for name, value in values.items():
            setattr(sender.args, name, value)
        sender.opening.block_flags = sender.args.block_counts

    def prepare_meetings(self, opened: torch.Tensor, cleared: torch.Tensor) -> None:
        """Say what meetings write from now on.

        Args:
            opened: int32 [1], becomes 1 if all ranks came and none has a fault, else 0.
            cleared: int32, becomes zeros.
        """
        args = self._barrier.args
        args.opened, args.cleared, args.num_cleared = opened.data_ptr(), cleared.data_ptr(), cleared.numel()

    def count_in(self, *counts: torch.Tensor) -> None:
        """Say what counts from zero when calls were in vain, beside ``arrived``."""
        self._counts = [self.arrived, *counts]

    def begin_anew(self) -> None:
        """Let all counts begin at zero, behind calls that were in vain. Nothing runs on any rank."""
        with torch.inference_mode():  # some were made in it, if the first call was
            for each in self._counts:
                each.zero_()

    def keep(self, *used: object) -> None:
        """Let graphs that capture calls keep these alive, which the calls use."""
        self._launcher.keep_with_graphs.extend(used)

    def trace(self, send: torch.Tensor, barrier: torch.Tensor) -> None:
        """From now on both kernels write when they pass each phase, as ``MegaTimes`` says."""
        self._send_trace, self._barrier.opening.trace = send.data_ptr(), barrier.data_ptr()
        for sender in self._senders.values():
            sender.opening.trace = self._send_trace

    def follow(self) -> None:
        """Let the current stream wait for that of the call before: then kernels may come before the dispatch."""
        self._launcher.follow()

    def send(self, sender: OpeningKernel, stream: int | None, blocks: int) -> int:
        """Put a kernel that sends rows on the stream. If another packs tokens, it begins while that one runs.

        :meth:`follow` comes first if ``stream`` is None.

        Args:
            sender: of :meth:`sender`.
            stream: what :meth:`make_room` has given, if nothing else was called since.
            blocks: SMs that it takes.

        Returns:
            Number of the dispatch, for the meeting.
        """
        number = self._launcher.num_calls
        if stream is None:
            self._launcher.launch(sender, self._dispatch, number, blocks=blocks, follows=False)
        else:
            self._launcher.launch_ready(sender, self._dispatch, number, stream, blocks=blocks)
        return number

    def meet(self, dispatch: int, stream: int | None) -> None:
        """Put a meeting of all ranks on the stream. Who has met sees all that the others have sent before.

        Args:
            dispatch: number of the dispatch that it belongs to.
            stream: what :meth:`make_room` has given before that, if nothing else was called since.
        """
        if stream is None:
            self._launcher.launch(self._barrier, self._meeting, dispatch, blocks=1)
        else:
            self._launcher.launch_ready(self._barrier, self._meeting, dispatch, stream, blocks=1)

    @property
    def masked(self) -> int:
        """Address of a word in device memory: bit r is set if rank r takes no part."""
        return self._launcher.masked_address
