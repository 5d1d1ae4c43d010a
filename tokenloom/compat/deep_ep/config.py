"""Settings that clients pass. tokenloom needs none of them, but checks them and computes sizes as upstream does."""

from __future__ import annotations

from functools import cache

import torch

from tokenloom.compat.deep_ep.faults import require
from tokenloom.plan import align_up

topk_idx_t = torch.int64
"""dtype of expert ids."""
RANKS_OF_A_NODE = 8
METADATA_BYTES = 128
"""Room beside a row in a hint: ids and weights."""


@cache
def most_sms() -> int:
    """Return the most SMs that a kernel takes."""
    from tokenloom.backends.registry import MAX_SMS  # not at the top, so that importing is quick

    return MAX_SMS


class Config:
    """Settings of a call in normal mode. They are checked and otherwise unused: tokenloom has no chunks to size.

    Args:
        num_sms: SMs of a kernel; see ``Buffer.set_num_sms``.
        num_max_nvl_chunked_send_tokens: rows of a chunk to send within a node.
        num_max_nvl_chunked_recv_tokens: room for rows to receive within a node.
        num_max_rdma_chunked_send_tokens: rows of a chunk to send between nodes.
        num_max_rdma_chunked_recv_tokens: room for rows to receive between nodes.

    Raises:
        BadCall: a number is not positive, or a chunk to send is not smaller than the room to receive it.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        for name, value in arguments.items():
            require(isinstance(value, int) and value > 0, f"Config: {name} is {value!r}, expected a positive int")
        nvl = num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens
        require(
            nvl[0] < nvl[1], f"Config: num_max_nvl_chunked_send_tokens {nvl[0]} is not below the {nvl[1]} received"
        )
        send = num_max_rdma_chunked_send_tokens
        receive = align_up(num_max_rdma_chunked_recv_tokens, send)
        require(
            send <= receive // 2,
            f"Config: num_max_rdma_chunked_send_tokens {send} is over half of the {receive} received",
        )
        self._num_sms, self._nvl_room, self._rdma_room = num_sms, nvl[1], receive

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes to pass as ``num_nvl_bytes``. Programs compare them before they make a buffer anew."""
        local = min(num_ranks, RANKS_OF_A_NODE)
        return align_up(self._num_sms // 2 * local * self._nvl_room * (hidden_bytes + METADATA_BYTES), 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes to pass as ``num_rdma_bytes``: 0 for up to 8 ranks."""
        if num_ranks <= RANKS_OF_A_NODE:
            return 0
        nodes = -(-num_ranks // RANKS_OF_A_NODE)
        return align_up(self._num_sms // 2 * nodes * self._rdma_room * (hidden_bytes + METADATA_BYTES), 128)


def nodes_of(num_ranks: int, ranks_per_node: int | None) -> int:
    """Count nodes by ``ranks_per_node``. Without it, more than 8 ranks are nodes of 8, as upstream takes them."""
    if ranks_per_node is None:
        ranks_per_node = RANKS_OF_A_NODE if num_ranks > RANKS_OF_A_NODE else num_ranks
    return num_ranks // ranks_per_node if num_ranks % ranks_per_node == 0 else 1


def config_for(num_ranks: int) -> Config:
    """Return the settings for a group of any size. Upstream has a list of sizes.

    Raises:
        BadCall: no group has that size.
    """
    require(isinstance(num_ranks, int) and num_ranks > 0, f"Unsupported number of EP ranks: {num_ranks}")
    return Config()
