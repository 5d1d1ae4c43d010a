"""How the blocks of one call share its work: some of them send rows, the others place, fill or add rows.

An SM stores at one rate, near and far together, and its own memory waits behind a full link. So blocks do one or the
other, each on an SM of its own. How many do which follows from bytes, and from the rates of the machine (rates.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenloom.kernels.common.rates import Rates
from tokenloom.plan import ROUTE_LAYOUTS

MOST_BLOCKS_BY_BYTES = 32
"""Of a call with many tokens, where nobody asks for more: the rest of the GPU has work of its own."""
LEAST_BLOCKS = 8
"""Of a call that links limit. With fewer, what every call begins with takes longer: counts and places."""


@dataclass(frozen=True)
class Work:
    """What a token costs, on average, if all experts are as popular. Microseconds.

    Attributes:
        sending: of one SM by itself, for all that goes to other ranks.
        other: of one SM, for all else.
        links: of the links of a GPU.
    """

    sending: float
    other: float
    links: float

    def sending_blocks(self, blocks: int) -> int:
        """Count the blocks that send, so that neither they nor the others are late, nor more than fill the links.

        Args:
            blocks: of the kernel.

        Returns:
            1 to ``blocks``; 0 if there is nothing to send. All, where they do not fill the links together: then they
            lose nothing by sending first, and are all busy until the end.
        """
        if self.sending == 0:
            return 0
        if self.sending >= self.links * blocks:
            return blocks
        return min(blocks, math.ceil(self.sending / max(self.links, (self.sending + self.other) / blocks)))

    def best_blocks(self, most: int) -> int:
        """Count the blocks with which the links are the limit; ``most`` where others are, or no row crosses one."""
        if self.links == 0:
            return most
        return min(most, max(math.ceil(self.sending / self.links) + math.ceil(self.other / self.links), LEAST_BLOCKS))


class SharesWork:
    """A variant whose blocks share the work by its bytes."""

    layout: str

    def work(self, rates: Rates) -> Work | None:
        """What a token costs where SMs and links have these rates. None: blocks share nothing by roles."""
        raise NotImplementedError

    def sending_blocks(self, blocks: int, rates: Rates) -> int:
        """Count the blocks, of so many, that send to other ranks before they do other work."""
        work = self.work(rates)
        return 0 if work is None else work.sending_blocks(blocks)

    def best_blocks(self, most: int, rates: Rates, few_tokens: bool = False) -> int:
        """Count the blocks that a call should have, up to so many. It has to be the same number on all ranks.

        Args:
            rates: of SMs and links.
            few_tokens: of a plan in which no call has many. Rows by expert are then spread by all SMs, and one block's
                rows are what a call waits for; other rows gain nothing by more SMs.
        """
        work = self.work(rates)
        if few_tokens and self.layout in ROUTE_LAYOUTS:
            return most
        most = min(most, MOST_BLOCKS_BY_BYTES)
        return most if few_tokens or work is None else work.best_blocks(most)


def ranks_of_token(num_ranks: int, top_k: int) -> float:
    """Expected number of ranks that a token goes to, its own among them, if all experts are as popular."""
    return num_ranks * (1 - (1 - 1 / num_ranks) ** top_k)
