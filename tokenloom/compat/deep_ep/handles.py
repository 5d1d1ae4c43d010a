"""What a dispatch leaves for its combine, with the parts that upstream's tests and tools look at.

The parts of a handle are made when they are read, since most programs only pass it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokenloom.comm.routed import Routed
from tokenloom.compat.deep_ep.faults import NotServed

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator


@dataclass(frozen=True)
class Dispatched:
    """A dispatch, as its combine needs it.

    Attributes:
        comm: what made it.
        routed: its result.
        ids: int64 [N, K], the ids that routed it: a copy.
        with_ids: the caller gave ids, and not only the ranks of each token.
    """

    comm: Communicator
    routed: Routed
    ids: torch.Tensor
    with_ids: bool = True


class Parts(Sequence[Any]):
    """A handle, whose parts are read as those of a tuple.

    It is no tuple, so that whoever looks for tensors in tuples does not make its parts by looking.

    Args:
        dispatched: what they are made from.
        makers: of the parts, in order.
    """

    def __init__(self, dispatched: Dispatched, *makers: Callable[[], Any]) -> None:
        self.dispatched, self._makers = dispatched, makers

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(make() for make in self._makers[index])
        return self._makers[index]()

    def __reduce__(self) -> Any:
        raise NotServed("a handle belongs to its process and its call; it cannot be pickled or saved")


def normal_handle(dispatched: Dispatched, is_token_in_rank: torch.Tensor, num_channels: int) -> Parts:
    """The handle of ``Buffer.dispatch`` within a node: rank_prefix_matrix int32 [R, R], of which column ``me`` is
    right, channel_prefix_matrix and recv_channel_prefix_matrix int32 [R, C], recv_src_idx int32 [M],
    is_token_in_rank bool [N, R], and send_head int32 [N, R].

    Columns of other ranks are 0, and so are the matrices of channels: tokenloom has no channels.
    """
    comm, routed = dispatched.comm, dispatched.routed
    me, num_ranks = comm.rank, comm.num_ranks

    def prefixes() -> torch.Tensor:
        matrix = torch.zeros(num_ranks, num_ranks, dtype=torch.int32, device=comm.device)
        matrix[:, me] = routed.source_counts.cumsum(0)
        return matrix

    def channels() -> torch.Tensor:
        return torch.zeros(num_ranks, num_channels, dtype=torch.int32, device=comm.device)

    def sources() -> torch.Tensor:
        raise NotServed("recv_src_idx of a handle is not served: rows carry no index of their token")

    def heads() -> torch.Tensor:
        order = is_token_in_rank.cumsum(0, dtype=torch.int32) - 1
        return torch.where(is_token_in_rank, order, -1)

    return Parts(dispatched, prefixes, channels, channels, sources, lambda: is_token_in_rank, heads)


def low_latency_handle(
    dispatched: Dispatched, max_tokens: int, hidden: int, num_experts: int, ready: Callable[[], Routed]
) -> Parts:
    """The handle of ``Buffer.low_latency_dispatch``: src_info int32 [L, R * M], layout_range int64 [L, R] that holds
    ``first << 32 | count``, M, the hidden size and E.

    Args:
        ready: the result of the dispatch, which must have been received.
    """

    def sources() -> torch.Tensor:
        return ready().source_tokens

    def ranges() -> torch.Tensor:
        found = ready().slot_ranges
        assert found is not None
        first, count = found.to(torch.int64).unbind(2)
        return first << 32 | count

    return Parts(dispatched, sources, ranges, lambda: max_tokens, lambda: hidden, lambda: num_experts)
