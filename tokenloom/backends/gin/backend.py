"""Backend "gin": dispatch and combine of few tokens between nodes, one kernel each, without the host.

The kernels write the memory of ranks of their node, and put rows to other nodes by NCCL's GIN: one for each (token,
node). docs/explanation/between-nodes.md is the protocol. The host's side is that of backend "nvlink": how calls open
and what they have found, prepared calls, and handles. All of it but GIN is backend "padded"'s too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

import torch

from tokenloom.backends.base import (
    Capabilities,
    CombineOptions,
    DispatchInputs,
    DispatchOptions,
    DispatchOut,
    OwnOutputs,
    Pending,
    Rows,
    Upcoming,
    UsualCombine,
    UsualDispatch,
    Wait,
)
from tokenloom.backends.gin.capabilities import CAPABILITIES
from tokenloom.backends.gin.combine import NodesCombine, empty_combine
from tokenloom.backends.gin.dispatch import NodesDispatch
from tokenloom.backends.gin.launcher import NodesLauncher
from tokenloom.backends.gin.memory import NodeBuffers, NodeMemory
from tokenloom.backends.nvlink.combine import CombineHalf
from tokenloom.backends.nvlink.dispatch import given
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import Half, Launched, require_no_host_read
from tokenloom.backends.nvlink.outcomes import CALLS_IN_FLIGHT
from tokenloom.backends.nvlink.prepared import Shared
from tokenloom.backends.nvlink.results import ResultsMemory
from tokenloom.errors import CapacityOverflow, InvalidArgument
from tokenloom.kernels.dispatch.launch import block_count_words
from tokenloom.plan import Plan
from tokenloom.runtime.leftovers import keep_until_idle
from tokenloom.runtime.rank_group import RankGroup

MOST_KINDS = 64
"""Kinds of calls that are kept prepared."""


class NodesBackend:
    """Dispatch and combine between nodes by kernels, whatever carries regions there. Making one is collective.

    Calls of one piece are one kernel, halves are one each; or all calls are two. Rows from other nodes are forwarded
    by the kernels that receive, so ranks need each other's receiving halves.

    Args:
        plan, ranks: sizes and group, whose topology has rails.
        num_sms: SMs, one block each, that a kernel takes.
        dtype: of the tokens; None: of 2 bytes.
        checked: read the outcome of every call before it returns.

    Attributes:
        can: what it can do, but for what a communicator asks for.
        always_two: every call is two kernels.
    """

    name: str
    can: Capabilities
    always_two = False

    def __init__(
        self, plan: Plan, ranks: RankGroup, num_sms: int, dtype: torch.dtype | None, checked: bool = False
    ) -> None:
        self.capabilities = replace(self.can, reads_on_host=checked, usual_calls=self.can.usual_calls and not checked)
        self._checked, self._ranks = checked, ranks
        self._overflow: CapacityOverflow | None = None
        self._dispatches: dict[tuple[object, ...], NodesDispatch] = {}
        self._combines: dict[tuple[object, ...], NodesCombine] = {}
        self._memory = self.make_memory(plan, ranks, dtype)
        try:
            self._launcher = self.make_launcher(plan, ranks, num_sms)
            block_counts = torch.zeros(block_count_words(plan), dtype=torch.int32, device=ranks.device)
            results = ResultsMemory(ranks.device)
            self._shared = Shared(plan, self._launcher, self._memory, block_counts, results, checked)
            keep_until_idle(self._shared, ranks.device, block_counts)
            self._launcher.keep_with_graphs.append(self._shared)
            self._launcher.empty["dispatch"] = self._empty_dispatch()
            self._launcher.empty["combine"] = empty_combine(self._launcher, self.always_two)
        except Exception:
            self._memory.close()
            raise

    def make_memory(self, plan: Plan, ranks: RankGroup, dtype: torch.dtype | None) -> NodeBuffers:
        """Make all memory that calls need."""
        raise NotImplementedError

    def make_launcher(self, plan: Plan, ranks: RankGroup, num_sms: int) -> NodesLauncher:
        """Make what launches kernels."""
        return NodesLauncher(plan, ranks, self._memory, num_sms)

    def _empty_dispatch(self) -> NodesDispatch:
        """A dispatch without tokens, whose arguments never change."""
        plan, device = self._shared.plan, self._ranks.device
        x = torch.empty(0, plan.hidden, dtype=torch.bfloat16, device=device)
        ids = torch.empty(0, plan.top_k, dtype=torch.int32, device=device)
        inputs = DispatchInputs(x, None, ids, None, False, False, False, split=self.always_two)
        dispatch = NodesDispatch(self._shared, DispatchOptions("slots", 1, "bounded", 1), inputs)
        words = torch.zeros(dispatch.results.words(0), dtype=torch.int32, device=device)
        rows = x.new_empty(plan.experts_per_rank, plan.hidden)
        keep_until_idle(self._launcher, device, words, rows)
        dispatch.aim(x, None, ids, None, 0, dispatch.results, words.data_ptr(), rows.data_ptr())
        return dispatch

    # -- calls ----------------------------------------------------------------------------------------------

    def send_dispatch(
        self, options: DispatchOptions, inputs: DispatchInputs
    ) -> Pending[tuple[NvlinkHandle, torch.Tensor]]:
        if inputs.x_needs_grad or inputs.weights_need_grad:
            self._refuse_gradients()
        exact = options.sizes == "exact"
        require_no_host_read(exact or self._checked, "sizes='exact'" if exact else "checked=True")
        prepared = self._prepared_dispatch(options, replace(inputs, split=True) if self.always_two else inputs)
        if exact and not (inputs.split or inputs.ahead):  # whoever waits hears first of what earlier calls left
            self._launcher.settle(0)
        return _Dispatched(self, *prepared.launch(*given(inputs), inputs.out), inputs.out)

    def receive_dispatch(
        self, handle: NvlinkHandle, rows: torch.Tensor, half: Half | None, out: DispatchOut | None
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        """Launch the second kernel if there is one, and wait for what the host has to know."""
        if half is not None:
            self._launcher.finish(half)
        if handle.options.sizes == "exact":
            self._launcher.outcomes.settle_before(handle.number + 1)
            return handle, handle.cut_to_size(handle.all_sizes(), rows)
        if self._checked:
            self._settle_checked(handle.number)
        handle.write_ids(out)
        return handle, rows

    def _prepared_dispatch(self, options: DispatchOptions, inputs: DispatchInputs) -> NodesDispatch:
        weights = inputs.topk_weights
        without_scales, weights_dtype = inputs.scales is None, None if weights is None else weights.dtype
        key = (options, inputs.x.dtype, without_scales, inputs.topk_ids.dtype, weights_dtype, inputs.split)
        found = self._dispatches.get(key)
        if found is None:
            if len(self._dispatches) >= MOST_KINDS:
                self._dispatches.clear()
            found = self._dispatches[key] = NodesDispatch(self._shared, options, inputs)
        return found

    def send_combine(
        self,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        out: torch.Tensor | None = None,
        alone: bool = False,
        split: bool = False,
    ) -> Pending[torch.Tensor]:
        if options.needs_grad:
            self._refuse_gradients()
        require_no_host_read(self._checked, "checked=True")
        split = split or self.always_two
        prepared = self._prepared_combine(handle.number, handle.options.layout, rows.dtype, options, split)
        out, half = prepared.launch(handle, rows, weights, out)
        if half is not None:
            return CombineHalf(self._launcher, half, out, self._checked)
        if self._checked:
            self._launcher.settle(0)
        return Launched(out)

    def _prepared_combine(
        self, number: int, layout: str, y_dtype: torch.dtype, options: CombineOptions, split: bool = False
    ) -> NodesCombine:
        key = (layout, y_dtype, options, split)
        found = self._combines.get(key)
        if found is None:
            found = self._combines[key] = NodesCombine(self._launcher, number, *key)
        return found

    def usual_dispatch(self, options: DispatchOptions, inputs: DispatchInputs) -> UsualDispatch | None:
        return None if options.sizes == "exact" else self._prepared_dispatch(options, inputs)

    def usual_combine(self, layout: str, y_dtype: torch.dtype, options: CombineOptions) -> UsualCombine:
        return self._prepared_combine(self._launcher.num_calls, layout, y_dtype, options)

    def ready(self, awaited: bool = False) -> int | None:
        return self._launcher.ready(0 if awaited else CALLS_IN_FLIGHT)

    def _settle_checked(self, number: int) -> None:
        """Read the outcome of this call. A dropped row is for the next call to raise."""
        try:
            self._launcher.outcomes.settle_before(number + 1)
        except CapacityOverflow as too_many:
            self._overflow = too_many

    # -- what there are no kernels for ------------------------------------------------------------------------

    def send_again(
        self, handle: NvlinkHandle, values: Rows, strategy: str = "dedup", own: OwnOutputs = False
    ) -> NoReturn:
        raise InvalidArgument(f"backend {self.name!r} repeats no dispatch with other rows; use backend='network'")

    def send_rows(self, handle: NvlinkHandle, values: torch.Tensor, strategy: str = "dedup") -> NoReturn:
        self._refuse_gradients()

    def send_weight_gradients(self, handle: NvlinkHandle, grad: torch.Tensor) -> NoReturn:
        self._refuse_gradients()

    def row_weights(self, handle: NvlinkHandle, weights: torch.Tensor, num_places: int) -> NoReturn:
        self._refuse_gradients()

    def route_gradients(self, handle: NvlinkHandle, grad: torch.Tensor, like: torch.Tensor) -> NoReturn:
        self._refuse_gradients()

    def _refuse_gradients(self) -> NoReturn:
        raise InvalidArgument(
            f"backend {self.name!r} brings no gradients home; call under torch.no_grad(), or use backend='network'"
        )

    def mask(self, ranks: Collection[int]) -> None:
        raise InvalidArgument(f"backend {self.name!r} cannot leave ranks out; use backend='network' over gloo")

    def unmask(self, ranks: Collection[int]) -> None:
        self.mask(ranks)

    def mask_late(self) -> None:
        self.mask(())

    # -- state ----------------------------------------------------------------------------------------------

    @property
    def masked(self) -> frozenset[int]:
        return frozenset()

    def report_fault(self, fault: Exception, upcoming: Sequence[Upcoming]) -> None:
        """Open the calls that the others open before they wait for an outcome, and receive those that are open: others
        may wait for rows that this rank forwards, and its own user may not receive them any more."""
        first = upcoming[0]
        names = [first.name]
        for call, following in pairwise(upcoming):
            if call.awaited or self._checked:
                break
            names.append(following.name)
        try:
            self._launcher.report_fault(fault, names, first.awaited)
        finally:
            if not self._launcher.current()[1]:
                self._launcher.finish_all()

    def check(self, wait: Wait) -> None:
        if self._launcher.current()[1]:
            return
        if self._overflow is not None:
            overflow, self._overflow = self._overflow, None
            raise overflow
        self._launcher.check(wait)

    def memory(self) -> list[str]:
        return self._memory.describe()

    def close(self) -> None:
        """Give memory back, unless a graph may still write to it, or other ranks after a wait that has expired."""
        launcher = self._launcher
        launcher.await_work()
        if self._ranks.is_broken or launcher.outcomes.fault.is_set() or launcher.has_graphs:
            self._memory.keep()
        self._memory.close()
        launcher.close(self._memory.shared())


class GinBackend(NodesBackend):
    """Dispatch and combine between nodes by GIN."""

    name, can = "gin", CAPABILITIES

    def make_memory(self, plan: Plan, ranks: RankGroup, dtype: torch.dtype | None) -> NodeBuffers:
        """Make the window, and buffers."""
        return NodeMemory(plan, ranks, dtype)


class _Dispatched:
    """A dispatch whose first kernel, or only one, is on the stream."""

    def __init__(self, backend: NodesBackend, *sent: Any) -> None:
        self._backend, self._sent = backend, sent

    def receive(self) -> tuple[NvlinkHandle, torch.Tensor]:
        return self._backend.receive_dispatch(*self._sent)
