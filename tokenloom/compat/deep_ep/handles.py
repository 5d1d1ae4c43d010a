"""Handles of dispatches, for combines, with the parts that upstream's tests and tools read.

The parts of a handle are made when they are read, since most programs only pass it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokenloom.comm.routed import Routed
from tokenloom.compat.deep_ep import checks
from tokenloom.compat.deep_ep.faults import NotServed

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator
    from tokenloom.compat.deep_ep.buffer_base import BufferBase


LOW_LATENCY_PARTS = 5
"""Parts of a handle in low-latency mode."""


@dataclass(eq=False)  # frozen, it would take three times as long to make
class Dispatched:
    """Dispatch that a combine will follow.

    Attributes:
        comm: communicator that made it.
        routed: its result.
        ids: int64 [N, K], a copy of the ids that routed it.
        with_ids: the caller passed ids, and not only the ranks of each token.
    """

    comm: Communicator
    routed: Routed
    ids: torch.Tensor
    with_ids: bool = True

    def combine(
        self,
        buffer: BufferBase,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...] | None,
        missing: int,
        weighted: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows home, and weights if there are some.

        Args:
            missing: rows behind the last received one that the client has left out.
            weighted: as of ``Communicator.combine``.
        """
        comm, routed = self.comm, self.routed
        if missing:
            with buffer._calls.report_faults_of(comm.device, comm, "combine"):
                rows = checks.padded(rows, missing)
                weights = None if weights is None else checks.padded(weights, missing)
        out = comm.combine(rows, routed, bias=biases, weighted=weighted)
        return out, None if weights is None else comm.combine_weights(weights, routed)


def kept_ids(topk_idx: torch.Tensor, routed: Routed) -> torch.Tensor:
    """Copy the caller's ids, which may change. The copy runs behind the kernel, which the host waits for anyway."""
    ids = topk_idx.clone()
    routed.replace_ids(ids)
    return ids


class Parts(Sequence[Any]):
    """Handle that programs read like a tuple of parts.

    It is no tuple: a search for tensors in tuples would make all parts.

    Args:
        dispatched: source of the parts.
        number: number of parts.
        find_makers: returns the functions that make the parts, in order, from ``dispatched`` and ``arguments``.
        arguments: further arguments of ``find_makers``.
    """

    def __init__(
        self,
        dispatched: Dispatched,
        number: int,
        find_makers: Callable[..., Sequence[Callable[[], Any]]],
        *arguments: Any,
    ) -> None:
        self.dispatched, self.number = dispatched, number
        self._find_makers, self._arguments = find_makers, arguments

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        makers = self._find_makers(self.dispatched, *self._arguments)[index]
        return tuple(make() for make in makers) if isinstance(makers, Sequence) else makers()

    def __reduce__(self) -> Any:
        raise NotServed("a handle belongs to its process and its call; it cannot be pickled or saved")


def normal_handle(dispatched: Dispatched, is_token_in_rank: torch.Tensor, num_channels: int, num_nodes: int) -> Parts:
    """Make the handle of ``Buffer.dispatch``.

    Within a node it has 6 parts: rank_prefix_matrix int32 [R, R], of which column ``me`` is right,
    channel_prefix_matrix and recv_channel_prefix_matrix int32 [R, C], recv_src_idx int32 [M], is_token_in_rank bool
    [N, R], and send_head int32 [N, R].

    Between n nodes it has 10: is_token_in_rank, rdma_channel_prefix_matrix [n, C], gbl_channel_prefix_matrix [R, C],
    recv_rdma_channel_prefix_matrix [n, C], recv_rdma_rank_prefix_sum [n], recv_gbl_channel_prefix_matrix [R, C],
    recv_gbl_rank_prefix_sum int32 [R], recv_src_meta, send_rdma_head int32 [N, n], send_nvl_head.

    Columns of other ranks are 0, and so are the matrices of channels: tokenloom has no channels.
    """
    number = 6 if num_nodes == 1 else 10
    return Parts(dispatched, number, _normal_parts, is_token_in_rank, num_channels, num_nodes)


def _normal_parts(
    dispatched: Dispatched, is_token_in_rank: torch.Tensor, num_channels: int, num_nodes: int
) -> tuple[Callable[[], Any], ...]:
    comm, routed = dispatched.comm, dispatched.routed
    me, num_ranks = comm.rank, comm.num_ranks

    def prefixes() -> torch.Tensor:
        matrix = torch.zeros(num_ranks, num_ranks, dtype=torch.int32, device=comm.device)
        matrix[:, me] = routed.source_counts.cumsum(0)
        return matrix

    def channels(rows: int = num_ranks) -> torch.Tensor:
        return torch.zeros(rows, num_channels, dtype=torch.int32, device=comm.device)

    def heads(goes_to: torch.Tensor) -> torch.Tensor:
        return torch.where(goes_to, goes_to.cumsum(0, dtype=torch.int32) - 1, -1)

    def missing(name: str, why: str) -> Callable[[], torch.Tensor]:
        def refuse() -> torch.Tensor:
            raise NotServed(f"{name} of a handle is not served: {why}")

        return refuse

    no_index = "rows carry no index of their token"
    if num_nodes == 1:
        sources = missing("recv_src_idx", no_index)
        send_head = lambda: heads(is_token_in_rank)  # noqa: E731
        return prefixes, channels, channels, sources, lambda: is_token_in_rank, send_head
    forwarded = "the backend keeps what it forwards to itself"
    return (
        lambda: is_token_in_rank,
        lambda: channels(num_nodes),
        channels,
        lambda: channels(num_nodes),
        missing("recv_rdma_rank_prefix_sum", forwarded),
        channels,
        lambda: routed.source_counts.cumsum(0, dtype=torch.int32),
        missing("recv_src_meta", no_index),
        lambda: heads(is_token_in_rank.unflatten(1, (num_nodes, -1)).any(2)),
        missing("send_nvl_head", forwarded),
    )


def low_latency_handle(dispatched: Dispatched, max_tokens: int, hidden: int, num_experts: int) -> Parts:
    """Make the handle of ``Buffer.low_latency_dispatch``.

    Its parts are src_info int32 [L, R * M], layout_range int64 [L, R] of ``first << 32 | count``, M, the hidden size
    and E.
    """
    return Parts(dispatched, LOW_LATENCY_PARTS, _low_latency_parts, max_tokens, hidden, num_experts)


def _low_latency_parts(
    dispatched: Dispatched, max_tokens: int, hidden: int, num_experts: int
) -> tuple[Callable[[], Any], ...]:
    def sources() -> torch.Tensor:
        return dispatched.routed.source_tokens

    def ranges() -> torch.Tensor:
        slot_ranges = dispatched.routed.slot_ranges
        assert slot_ranges is not None
        first, count = slot_ranges.to(torch.int64).unbind(2)
        return first << 32 | count

    return sources, ranges, lambda: max_tokens, lambda: hidden, lambda: num_experts
