"""Handle of ``ElasticBuffer.dispatch``, for its combine and for programs that read it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from tokenloom.comm.routed import Routed
from tokenloom.compat.deep_ep.faults import NotServed
from tokenloom.compat.deep_ep.handles import Dispatched
from tokenloom.plan import align_up


class EPHandle:
    """Handle of a dispatch. Programs may assign to its attributes. Counts are made when they are first read.

    R is the number of ranks, L experts per rank, K the ids of a token.

    Attributes:
        do_expand: rows are routes, grouped by local expert.
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: arguments of the call.
        topk_idx: int64 [N, K]; a copy, unless the call said ``do_handle_copy=False``.
        num_recv_tokens, num_expanded_tokens: rows of the outputs, without and with ``do_expand``; else 0.
        num_recv_tokens_per_expert_list: L counts rounded up to the alignment, empty without a host read.
        dst_buffer_slot_idx, token_metadata_at_forward, channel_linked_list: None; tokenloom has no such buffers.
    """

    def __init__(
        self,
        dispatched: Dispatched,
        topk_idx: torch.Tensor,
        do_expand: bool,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        counts: list[int],
    ) -> None:
        """Make a handle, for ``ElasticBuffer.dispatch``. Arguments not listed are the attributes of their names.

        Args:
            dispatched: the dispatch, for its combine.
            counts: ``num_recv_tokens_per_expert_list``.
        """
        self.dispatched = dispatched
        self.topk_idx = topk_idx
        self.do_expand = do_expand
        self.num_experts = dispatched.comm.plan.num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.num_recv_tokens_per_expert_list = counts
        rows = dispatched.routed.shape[0]
        self.num_recv_tokens, self.num_expanded_tokens = (0, rows) if do_expand else (rows, 0)
        self.dst_buffer_slot_idx: Any = None
        self.token_metadata_at_forward: Any = None
        self.channel_linked_list: Any = None

    @property
    def _routed(self) -> Routed:
        return self.dispatched.routed

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """int32 [R], tokens received from ranks up to each one; the last is the number of received tokens."""
        return self._routed.source_counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 [L], routes of each local expert."""
        return self._routed.expert_counts

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 [L]. Not expanded: sums of the rounded counts up to each expert. Expanded: end of the routes of each
        expert, before the padding."""
        counts, alignment = self.num_unaligned_recv_tokens_per_expert, self.expert_alignment
        rounded = (counts + (alignment - 1)) // alignment * alignment
        sums = rounded.cumsum(0, dtype=torch.int32)
        return sums - rounded + counts if self.do_expand else sums

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """Not served; it may be assigned to.

        Raises:
            NotServed: rows carry no index of their token.
        """
        raise NotServed("recv_src_metadata of a handle is not served: rows carry no index of their token")


def most_rows(num_ranks: int, most: int, top_k: int, local: int, expanded: bool, alignment: int) -> int:
    """Count the rows of outputs whose counts the host does not read."""
    if not expanded:
        return num_ranks * most
    return align_up(num_ranks * most * min(top_k, local) + (alignment - 1) * local, alignment)
