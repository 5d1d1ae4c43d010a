"""How the blocks of one call share its work: some of them send rows, the others place, fill or add rows.

An SM stores at one rate, near and far together, and its own memory waits behind a full link. So blocks do one or the
other (microbench/notebook/calls.md), each on an SM of its own.
"""

from __future__ import annotations

import math

STORE_GB_PER_S = 50.0
"""What an SM of Hopper stores, here or at a peer, if it loads from the second-level cache or from memory."""
PUSH_GB_PER_S, ADD_GB_PER_S = 80.0, 95.0
"""What an SM loads and stores together where it sends rows or sums home, and where it adds rows at home."""
QUANTIZE_GB_PER_S = 14.0
"""Of bfloat16, what an SM reads, makes FP8 of, and stores."""
TOKEN_US = 0.25
"""Of an SM, for what goes beside the rows of a token: ids, weights and places."""
LINK_GB_PER_S = 400.0
"""More than all links of one GPU of an NVLink 4 host carry in one direction: 347 to 372 were measured."""


def sending_blocks(blocks: int, sending: float, other: float, links: float) -> int:
    """Count the blocks that send, so that neither they nor the others are late, nor more than fill the links.

    Args:
        blocks: of the kernel.
        sending, other: the time that one SM by itself would take to send, and for all else, in any unit.
        links: the time of the links.

    Returns:
        1 to ``blocks``; 0 if there is nothing to send.
    """
    if sending == 0:
        return 0
    return min(blocks, math.ceil(sending / max(links, (sending + other) / blocks)))


def ranks_of_token(num_ranks: int, top_k: int) -> float:
    """Expected number of ranks that a token goes to, its own among them, if all experts are as popular."""
    return num_ranks * (1 - (1 - 1 / num_ranks) ** top_k)
