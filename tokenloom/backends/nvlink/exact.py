"""Dispatches with exact sizes by kernels of bounded ones: the host reads how many rows came, and cuts to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from tokenloom.backends.base import DispatchInputs, DispatchOptions, Pending
from tokenloom.backends.nvlink import places
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import Launcher
from tokenloom.errors import CapacityOverflow
from tokenloom.ops import routing
from tokenloom.plan import Plan, align_up


class SendsDispatches(Protocol):
    """What makes the dispatches of a communicator."""

    @property
    def plan(self) -> Plan: ...

    @property
    def launcher(self) -> Launcher: ...

    def send(
        self, options: DispatchOptions, inputs: DispatchInputs, meant: DispatchOptions | None = None
    ) -> Pending[tuple[NvlinkHandle, torch.Tensor]]:
        """Send a dispatch, as a part of one that is ``meant``."""


class ExactHalves:
    """A dispatch with exact sizes in two halves: rows arrive where there is room for all, one per (token, rank), and
    the host reads their counts when it receives them."""

    def __init__(self, dispatcher: SendsDispatches, options: DispatchOptions, inputs: DispatchInputs) -> None:
        self._dispatcher, self._options = dispatcher, options
        plan = dispatcher.plan
        layout = "token" if options.layout == "expert" else options.layout
        capacity = plan.worst_case_rows("token") if layout == "token" else None
        plain = replace(options, layout=layout, alignment=1, sizes="bounded", capacity=capacity, strategy="dedup")
        self._pending = dispatcher.send(plain, inputs, meant=options)

    def receive(self) -> tuple[NvlinkHandle, torch.Tensor]:
        """Wait for the counts, and cut outputs to them.

        Raises:
            CapacityOverflow: more rows came than the caller has allowed, on this rank or another.
        """
        handle, rows = self._pending.receive()
        dispatcher, options, room = self._dispatcher, self._options, len(rows)
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
