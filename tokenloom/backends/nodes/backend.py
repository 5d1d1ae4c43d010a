"""Backends "gin" and "padded": dispatch and combine between nodes by kernels, without the host.

The kernels write the memory of ranks of their node, and pack a row for each (token, node) into regions. A carrier
brings regions to other nodes. docs/explanation/between-nodes.md is the protocol. The host's side is that of backend
"nvlink": how calls open and what they have found, prepared calls, and handles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from tokenloom.backends.nodes.carrier import Carrier
from tokenloom.backends.nodes.combine import NodesCombine, empty_combine, gradient_of_weights
from tokenloom.backends.nodes.dispatch import NodesDispatch
from tokenloom.backends.nodes.launcher import NodesLauncher
from tokenloom.backends.peers.combine import ShortRows
from tokenloom.backends.peers.dispatch import ExactHalves
from tokenloom.backends.peers.handle import PeerHandle, ResultsMemory
from tokenloom.backends.peers.opening import require_no_host_read
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT
from tokenloom.backends.peers.prepared import Shared, check
from tokenloom.backends.seam import (
    CombineKind,
    DispatchKind,
    DispatchOptions,
    OutputOwner,
    PreparedCombine,
    PreparedDispatch,
    ResendTo,
    Rows,
    Sent,
    Tokens,
    Upcoming,
    Wait,
)
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.common import block_count_words
from tokenloom.ops import routing
from tokenloom.plan import Plan
from tokenloom.runtime.deferred_release import keep_until_idle
from tokenloom.runtime.rank_group import RankGroup

MAX_KINDS = 64
"""Kinds of calls that are kept prepared."""


class NodesBackend:
    """Dispatch and combine between nodes by kernels, whatever carries regions there. Making one is collective.

    Calls of one piece are one kernel, halves are one each; or all calls are two. Rows from other nodes are forwarded
    by the kernels that receive, so ranks need each other's receiving halves.

    Args:
        carrier: what carries regions to other nodes.
        plan, ranks: sizes and group, whose topology has rails.
        num_sms: SMs, one block each, that a kernel takes.
        dtype: of the tokens; None: of 2 bytes.
        checked: read the outcome of every call before it returns.
    """

    def __init__(
        self,
        carrier: Carrier[Any],
        plan: Plan,
        ranks: RankGroup,
        num_sms: int,
        dtype: torch.dtype | None,
        checked: bool = False,
    ) -> None:
        self.name, self.capabilities = carrier.name, replace(carrier.capabilities, reads_on_host=checked)
        self.members = AllTakePart(carrier.name)
        self._checked, self._ranks, self._always_two = checked, ranks, carrier.always_two
        self._dispatches: dict[tuple[object, ...], NodesDispatch] = {}
        self._combines: dict[object, NodesCombine] = {}
        self._memory = carrier.memory(plan, ranks, dtype)
        try:
            self._launcher = carrier.launcher(plan, ranks, self._memory, num_sms)
            block_counts = torch.zeros(block_count_words(plan), dtype=torch.int32, device=ranks.device)
            results = ResultsMemory(ranks.device)
            self._shared = Shared(
                plan=plan,
                launcher=self._launcher,
                buffers=self._memory,
                block_counts=block_counts,
                memory=results,
                checked=checked,
            )
            keep_until_idle(self._shared, ranks.device, block_counts)
            self._launcher.keep_with_graphs.append(self._shared)
            self._launcher.empty["dispatch"] = self._empty_dispatch()
            self._launcher.empty["combine"] = empty_combine(self._launcher, self._always_two)
        except Exception:
            self._memory.close()
            raise

    def _empty_dispatch(self) -> NodesDispatch:
        """A dispatch without tokens, whose arguments never change."""
        plan, device = self._shared.plan, self._ranks.device
        x = torch.empty(0, plan.hidden, dtype=torch.bfloat16, device=device)
        ids = torch.empty(0, plan.top_k, dtype=torch.int32, device=device)
        kind = DispatchKind(DispatchOptions("slots", 1, "bounded", 1), x.dtype, ids.dtype, split=self._always_two)
        dispatch = NodesDispatch(self._shared, kind)
        words = torch.zeros(dispatch.results.words(0), dtype=torch.int32, device=device)
        rows = x.new_empty(plan.experts_per_rank, plan.hidden)
        keep_until_idle(self._launcher, device, words, rows)
        tokens = Tokens(x, None, ids, None)
        dispatch.set_all_arguments(tokens, 0, dispatch.results, words.data_ptr(), rows.data_ptr())
        return dispatch

    # -- calls ----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self._shared.plan

    @property
    def launcher(self) -> NodesLauncher:
        return self._launcher

    def prepare_dispatch(self, kind: DispatchKind) -> PreparedDispatch:
        if kind.options.sizes == "bounded":
            return self.find_or_prepare(kind)
        require_no_host_read(True, "sizes='exact'")
        check(self._shared, kind)
        return ExactHalves(self, kind)

    def find_or_prepare(
        self, kind: DispatchKind, repeats: bool = False, user_options: DispatchOptions | None = None
    ) -> NodesDispatch:
        """Dispatches of one kind with bounded sizes.

        Args:
            repeats: rows go the way of an earlier dispatch.
            user_options: options that the user asked for, where this dispatch is a part of that call.
        """
        if self._always_two:
            kind = replace(kind, split=True)
        key = (kind, user_options, repeats)
        found = self._dispatches.get(key)
        if found is None:
            if len(self._dispatches) >= MAX_KINDS:
                self._dispatches.clear()
            found = self._dispatches[key] = NodesDispatch(self._shared, kind, repeats, user_options)
        return found

    def prepare_combine(self, kind: CombineKind, number: int) -> PreparedCombine:
        require_no_host_read(self._checked, "checked=True")
        if kind.options.needs_grad:  # which has the dtype of the result
            self._memory.require_room(kind.options.out_dtype)
        if self._always_two:
            kind = replace(kind, split=True)
        found = self._combines.get(kind)
        if found is None:
            found = self._combines[kind] = NodesCombine(self._launcher, kind, number, self._checked)
        return found

    def ready_stream(self, waits: bool = False) -> int | None:
        if self._shared.overflow is None:
            stream = self._launcher.ready_stream(0 if waits else CALLS_IN_FLIGHT)
            if stream is not None:
                return stream
        self.check("nothing")
        return None

    # -- gradients, and other rows of the same tokens ---------------------------------------------------------

    def resend(
        self,
        handle: PeerHandle,
        values: Rows,
        to: ResendTo = "places",
        strategy: str = "dedup",
        owner: OutputOwner = False,
        stream: int | None = None,
    ) -> Sent[Any]:
        if to == "rows":
            return self._resend_to_rows(handle, values)
        options = handle.options
        if handle.by_token:
            where = handle.positions(), handle.num_places
            return _Each(self._send_rows(handle, values), lambda rows: routing.scatter_rows(rows, *where))
        capacity = {"rank": None, "slots": options.capacity}.get(options.layout, handle.capacity)
        again = DispatchOptions(options.layout, options.alignment, "bounded", capacity, recipe=options.recipe)
        num_places = handle.num_places
        return _Each(self._repeat(again, handle, values), lambda rows: rows[:num_places])

    def _resend_to_rows(self, handle: PeerHandle, values: Rows) -> Sent[Any]:
        assert isinstance(values, torch.Tensor), "rows with scales go to places"
        width, hidden = values.shape[1], self.plan.hidden
        if width == hidden:
            return _Each(self._send_rows(handle, values), lambda rows: rows)
        # Narrow rows of float32 travel as bits in rows of the usual width, which memory has room for.
        unit = torch.bfloat16 if 2 * hidden >= values[:0].new_empty(width).nbytes else torch.float32
        words = hidden * unit.itemsize // 4
        wide = torch.nn.functional.pad(values, (0, words - width)).view(unit)
        return _Each(self._send_rows(handle, wide, width), lambda rows: rows.view(torch.float32)[:, :width])

    def _send_rows(
        self, handle: PeerHandle, values: Rows, width: int | None = None
    ) -> Sent[tuple[PeerHandle, torch.Tensor]]:
        """Values once for each (token, rank), with room for the most that there may be.

        Args:
            width: float32 values in a row that mean something; None: all.
        """
        most = self.plan.worst_case_rows("token")
        again = DispatchOptions("token", 1, "bounded", most, recipe=handle.options.recipe)
        return self._repeat(again, handle, values, width)

    def _repeat(
        self, options: DispatchOptions, handle: PeerHandle, values: Rows, width: int | None = None
    ) -> Sent[tuple[PeerHandle, torch.Tensor]]:
        require_no_host_read(self._checked, "checked=True")
        x, scales = values if isinstance(values, tuple) else (values, None)
        tokens = Tokens(x, scales, handle.ids(), None)
        alike = () if width is None else (("width", str(width)),)  # the kernel's rows do not tell
        kind = DispatchKind(options, x.dtype, tokens.topk_ids.dtype, with_scales=scales is not None, alike=alike)
        return self.find_or_prepare(kind, repeats=True).send(tokens)

    def send_weight_gradients(self, handle: PeerHandle, grad: torch.Tensor) -> Sent[torch.Tensor]:
        """A combine of short rows: each gradient comes from one rank, and the others have zeros, so sums are exact."""
        plan, short = self.plan, ShortRows(self.plan, handle, grad)
        key = ("gradient of weights", short.layout)
        combine = self._combines.get(key)
        if combine is None:
            given = (self._launcher, short.layout, short.width, self._always_two, self._checked)
            combine = self._combines[key] = gradient_of_weights(*given)
        return _Columns(combine.send(handle, short.rows, capacity=short.capacity), plan.top_k)

    # -- state ----------------------------------------------------------------------------------------------

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
        shared = self._shared
        if shared.overflow is not None:
            overflow, shared.overflow = shared.overflow, None
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


class AllTakePart:
    """Members of a communicator whose backend leaves no rank out.

    Args:
        backend: its name, for errors.
    """

    masked: frozenset[int] = frozenset()

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def mask(self, ranks: Collection[int]) -> None:
        raise InvalidArgument(f"backend {self._backend!r} cannot leave ranks out; use backend='network' over gloo")

    def unmask(self, ranks: Collection[int]) -> None:
        self.mask(ranks)

    def mask_late(self) -> None:
        self.mask(())


class _Columns:
    """The first columns of what a combine brings home."""

    def __init__(self, pending: Sent[torch.Tensor], number: int) -> None:
        self._pending, self._number = pending, number

    def receive(self) -> torch.Tensor:
        return self._pending.receive()[:, : self._number]


class _Each:
    """Rows of a dispatch, and their scales if they have some, each handed on by a function."""

    def __init__(
        self,
        pending: Sent[tuple[PeerHandle, torch.Tensor]],
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._pending, self._function = pending, function

    def receive(self) -> Any:
        handle, rows = self._pending.receive()
        found = self._function(rows)
        if handle.scales is None:
            return found
        return found, self._function(handle.scales.reshape(len(rows), -1))
