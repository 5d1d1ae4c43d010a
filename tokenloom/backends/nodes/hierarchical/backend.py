"""The calls of backend "network": those of "collective" with another exchange.

With ``mask_late``, a call is made again without the ranks that are lost in the middle of it. A rank that forwards
takes rows of others with it, and nobody knows alone which ones. So each call ends with a meeting, in which all say
whether they have everything. Until then inputs must last, so the first half of a call does all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tokenloom.backends.collective import CollectiveBackend, RowsUnderWay
from tokenloom.backends.collective_handle import CollectiveHandle
from tokenloom.backends.nodes.hierarchical.exchange import NodeExchange
from tokenloom.backends.nodes.hierarchical.inside import InsideNode, SentRows
from tokenloom.backends.seam import CombineOptions, DispatchKind, DispatchOut, Tokens, Wait
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup

T = TypeVar("T")


class NetworkBackend(CollectiveBackend):
    """Dispatch and combine as "collective" has them, with another exchange.

    Args:
        plan, ranks: sizes and group, whose topology has rails.
        inside: carries rows within this node.
    """

    name = "network"

    def __init__(self, plan: Plan, ranks: RankGroup, inside: InsideNode) -> None:
        super().__init__(plan, ranks, NodeExchange(plan, ranks, inside))
        self._inside = inside
        self.capabilities = replace(
            self.capabilities, own_node=inside.transport, takes_sms=inside.transport == "nvlink"
        )

    @property
    def sent(self) -> SentRows:
        """Rows that this rank has sent."""
        return self._inside.sent

    def send_dispatch(
        self, kind: DispatchKind, tokens: Tokens, out: DispatchOut | None
    ) -> RowsUnderWay[tuple[CollectiveHandle, torch.Tensor]]:
        overflow = self._overflow

        def send() -> RowsUnderWay[tuple[CollectiveHandle, torch.Tensor]]:
            self._overflow = overflow  # without that of a dispatch that is made again
            return super(NetworkBackend, self).send_dispatch(kind, tokens, out)

        return self._whole("dispatch", send)

    def send_combine(
        self,
        handle: CollectiveHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        out: torch.Tensor | None,
    ) -> RowsUnderWay[torch.Tensor]:
        call = super().send_combine
        return self._whole("combine", lambda: call(handle, rows, weights, options, out))

    def _gradient(self, handle: CollectiveHandle, what: str, send: Callable[[], Any]) -> RowsUnderWay[torch.Tensor]:
        call = super()._gradient
        return self._whole(what, lambda: call(handle, what, send))

    def _whole(self, what: str, send: Callable[[], RowsUnderWay[T]]) -> RowsUnderWay[T]:
        """Send, and where late ranks are masked do so again until all that take part have everything."""
        if not self._ranks.masks_late:
            return send()
        while True:
            self._ranks.missed = frozenset()
            sent = send()
            with self._ranks.telling():
                sent.wait()
                if self._all_have_all(what):
                    return sent

    def _all_have_all(self, what: str) -> bool:
        """Whether no rank misses rows of this call, by the word of all. The same on all ranks."""
        misses = bool(self._ranks.missed - self._absent)
        told = self._ranks.all_gather(torch.tensor([misses], device=self._ranks.device), f"the end of {what}")
        return not bool(told.any())

    def check(self, wait: Wait) -> None:
        super().check(wait)
        self._inside.check(wait)

    def memory(self) -> list[str]:
        return self._inside.memory()

    def close(self) -> None:
        super().close()
        self._inside.close()
