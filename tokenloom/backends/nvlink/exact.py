"""Dispatches with exact sizes by kernels of bounded ones: the host reads how many rows came, and cuts to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from tokenloom.backends.nvlink import places
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import Launcher
from tokenloom.backends.seam import DispatchKind, DispatchOptions, DispatchOut, Pending, PreparedDispatch, Tokens
from tokenloom.errors import CapacityOverflow
from tokenloom.ops import routing
from tokenloom.plan import Plan, align_up


class Prepares(Protocol):
    """Prepares the dispatches of a communicator."""

    @property
    def plan(self) -> Plan: ...

    @property
    def launcher(self) -> Launcher: ...

    def prepared(self, kind: DispatchKind, *, meant: DispatchOptions) -> PreparedDispatch:
        """Dispatches of one kind, as parts of calls with the options that are ``meant``."""


class ExactHalves:
    """Dispatches with exact sizes in two halves: rows arrive where there is room for all, one per (token, rank), and
    the host reads their counts when it receives them.

    Args:
        dispatcher: prepares the bounded dispatches that these consist of.
        kind: of all calls.
    """

    waits = True

    def __init__(self, dispatcher: Prepares, kind: DispatchKind) -> None:
        self.dispatcher, self._kind, self.options = dispatcher, kind, kind.options
        plan, options = dispatcher.plan, kind.options
        layout = "token" if options.layout == "expert" else options.layout
        capacity = plan.worst_case_rows("token") if layout == "token" else None
        plain = replace(options, layout=layout, alignment=1, sizes="bounded", capacity=capacity, strategy="dedup")
        self._prepared = dispatcher.prepared(replace(kind, options=plain), meant=options)

    @property
    def is_stale(self) -> bool:
        return self._prepared.is_stale

    def send(self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None) -> SentExactHalf:
        assert out is None, "results of an exact size have no room of the caller's"
        if not (self._kind.split or self._kind.early):  # whoever waits hears first of what earlier calls left
            self.dispatcher.launcher.settle(0)
        return SentExactHalf(self, self._prepared.send(tokens))


class SentExactHalf:
    """A dispatch of :class:`ExactHalves` whose rows are on their way."""

    def __init__(self, prepared: ExactHalves, sent: Pending[tuple[NvlinkHandle, torch.Tensor]]) -> None:
        self._prepared, self._sent = prepared, sent

    def receive(self) -> tuple[NvlinkHandle, torch.Tensor]:
        """Wait for the counts, and cut outputs to them.

        Raises:
            CapacityOverflow: more rows came than the caller has allowed, on this rank or another.
        """
        handle, rows = self._sent.receive()
        dispatcher, options, room = self._prepared.dispatcher, self._prepared.options, len(rows)
        dispatcher.launcher.outcomes.settle_before(handle.number + 1)
        needed = _most_rows(dispatcher.plan, options, handle.all_counts.tolist())
        if options.capacity is not None and needed > options.capacity:
            raise CapacityOverflow(needed, options.capacity, sent=False)
        rows = handle.cut_to_size(handle.all_sizes(), rows)
        if handle.reused_after is not None:
            handle.own()
            rows = rows.clone()
        elif 2 * len(rows) < room and options.layout != "expert":  # which makes rows of its own
            rows = rows.clone()
        if options.layout == "expert":
            return spread_by_expert(options, handle, rows)
        handle.options = options
        return handle, rows


def spread_by_expert(
    options: DispatchOptions, handle: NvlinkHandle, rows: torch.Tensor
) -> tuple[NvlinkHandle, torch.Tensor]:
    """Layout "expert" from rows of layout "token", of their exact size: (handle, rows)."""
    counts = handle.counts
    placement = places.by_expert(counts.source_counts, counts.expert_counts, options.alignment, handle.local_ids)

    def spread(rows: torch.Tensor) -> torch.Tensor:
        return routing.scatter_rows(rows, placement.positions, placement.num_places)

    handle.spread(options, placement)
    if handle.scales is not None:
        handle.scales = spread(handle.scales)
    return handle, spread(rows)


def _most_rows(plan: Plan, options: DispatchOptions, all_counts: list[list[int]]) -> int:
    """Rows that the fullest rank has in its output."""
    if options.layout != "expert":
        return max(map(sum, zip(*(each[: plan.num_ranks] for each in all_counts), strict=True)))
    routes = [sum(each) for each in zip(*(each[plan.num_ranks :] for each in all_counts), strict=True)]
    padded = [align_up(each, options.alignment) for each in routes]
    local = plan.experts_per_rank
    return max(sum(padded[rank * local : (rank + 1) * local]) for rank in range(plan.num_ranks))
