"""Exchange of rows between ranks, after the handshake and before the layouts.

The collective backend counts, opens calls, places rows and sums them. An :class:`Exchange` carries the rows:
:class:`FlatExchange` sends each row straight to its rank; that of backend "network" goes over nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from tokenloom.backends.collective_handle import Sizes, terms_without
from tokenloom.ops import routing
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup


class Arriving(Protocol):
    """Rows on their way."""

    def wait(self) -> torch.Tensor:
        """Wait for the rows. A second wait gives the same rows."""

    @property
    def lost(self) -> frozenset[int]:
        """Ranks whose rows did not come. Their rows are zero. Known after :meth:`wait`."""


class ArrivingSum(Protocol):
    """Terms of sums on their way home."""

    def wait(self) -> object:
        """Wait for the terms."""

    def receive(self) -> torch.Tensor:
        """Add the terms: [T, H], in the dtype of the computation. Called once."""


class Exchange(Protocol):
    """Carrier of rows. All ranks call it alike, and every transfer starts before a method returns.

    A method may wait for a transfer before it starts the next. So transfers keep the order of the calls, even if their
    results are received late or in another order.

    Attributes:
        num_counts: int64 words that a rank tells the others beside the counts of a dispatch.
    """

    num_counts: int

    def open(self, absent: frozenset[int]) -> None:
        """Note the ranks that take no part in the call that has opened. All others pass the same."""

    def counts(self, send: routing.SendMap, num_tokens: int) -> torch.Tensor:
        """Count this rank's words for the others: int64 [num_counts]."""

    def legs(self, rows: np.ndarray, words: np.ndarray) -> Any:
        """Make :attr:`Sizes.legs` from the counts.

        Args:
            rows: int64 [W, W], (token, rank) rows of each rank to each.
            words: int64 [W, num_counts], from :meth:`counts` of all ranks.
        """

    def spread(self, sizes: Sizes, parts: Mapping[str, torch.Tensor]) -> dict[str, Arriving]:
        """Send values of this rank's tokens to the ranks of their experts.

        Args:
            sizes: of the dispatch.
            parts: [T, w] of any dtype, by name.

        Returns:
            A transfer of [R, w] for each part, in the order (source rank, token).
        """

    def bring_home(self, sizes: Sizes, rows: torch.Tensor, phase: str) -> Arriving:
        """Send rows [R, w] back. The transfer gives [n, w] in the order of ``sizes.send``."""

    def send_sums(
        self, sizes: Sizes, rows: torch.Tensor, tokens: torch.Tensor, order: torch.Tensor, dtype: torch.dtype
    ) -> ArrivingSum:
        """Send partial sums home, added per node and rounded to their dtype, then over nodes.

        Args:
            rows: [R, H] of the wire's dtype.
            tokens: int32 [R], token of each row on its source rank.
            order: int64 [T, W], position of each (token, rank) in the order of ``sizes.send``, -1 for none.
            dtype: of the sums.
        """

    def start_all_to_all(
        self, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], phase: str
    ) -> Arriving:
        """Send rows straight to their ranks, as :meth:`RankGroup.start_all_to_all` does."""


class Here:
    """Rows that are there already."""

    lost: frozenset[int] = frozenset()

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def wait(self) -> torch.Tensor:
        return self._rows


class Then:
    """Rows on their way to a function, which runs once they have come."""

    def __init__(self, arriving: Arriving, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._arriving, self._make = arriving, make
        self._made: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._made is None:
            self._made = self._make(self._arriving.wait())
        return self._made

    @property
    def lost(self) -> frozenset[int]:
        return self._arriving.lost


class SumOnArrival:
    """Sum whose terms are on their way."""

    def __init__(self, arriving: Arriving, add: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._arriving, self._add = arriving, add

    def wait(self) -> object:
        return self._arriving.wait()

    def receive(self) -> torch.Tensor:
        return self._add(self._arriving.wait())


class FlatExchange:
    """Exchange that sends every row straight to its rank, by one all-to-all for each part."""

    num_counts = 0

    def __init__(self, plan: Plan, ranks: RankGroup) -> None:
        self._ranks = ranks

    def open(self, absent: frozenset[int]) -> None:
        pass

    def counts(self, send: routing.SendMap, num_tokens: int) -> torch.Tensor:
        return send.rows_per_rank.new_empty(0)

    def legs(self, rows: np.ndarray, words: np.ndarray) -> None:
        return None

    def spread(self, sizes: Sizes, parts: Mapping[str, torch.Tensor]) -> dict[str, Arriving]:
        def send(name: str, values: torch.Tensor) -> Arriving:
            rows = routing.gather_rows(values, sizes.send.tokens)
            return self.start_all_to_all(rows, sizes.sent, sizes.received, f"dispatch, {name}")

        return {name: send(name, values) for name, values in parts.items()}

    def bring_home(self, sizes: Sizes, rows: torch.Tensor, phase: str) -> Arriving:
        return self.start_all_to_all(rows, sizes.received, sizes.sent, phase)

    def send_sums(
        self, sizes: Sizes, rows: torch.Tensor, tokens: torch.Tensor, order: torch.Tensor, dtype: torch.dtype
    ) -> ArrivingSum:
        home = self.bring_home(sizes, rows, "combine, partial sums")

        def add(terms: torch.Tensor) -> torch.Tensor:
            kept = terms_without(home.lost, sizes.sent, order)
            return _sum_of_nodes(terms, kept, self._ranks.topology.nodes, dtype)

        return SumOnArrival(home, add)

    def start_all_to_all(
        self, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], phase: str
    ) -> Arriving:
        return self._ranks.start_all_to_all(rows, send_counts, recv_counts, phase)


def _sum_of_nodes(
    terms: torch.Tensor, order: torch.Tensor, nodes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> torch.Tensor:
    """Add partial sums of ranks per node, round to their dtype, and add over nodes: [T, H]."""
    total = torch.zeros(len(order), terms.shape[1], dtype=dtype, device=terms.device)
    begun = torch.zeros(len(order), 1, dtype=torch.bool, device=terms.device)
    for ranks in nodes:
        of_node = order[:, list(ranks)]
        has = (of_node >= 0).any(1, keepdim=True)
        part = routing.ordered_sum(terms, of_node, dtype=dtype).to(terms.dtype).to(dtype)
        total = torch.where(has, torch.where(begun, total + part, part), total)
        begun |= has
    return total
