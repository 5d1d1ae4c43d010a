"""Many calls whose ranks come at random times, two of them open at once, each round's rows checked exactly.

What a round sends holds the round, the sender and the token. So rows of another round, of another call, or of nobody
show. Nothing here shares code with the backends: rows are expected in the order that docs/reference/semantics.md has.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from tokenloom.backends import registry
from tokenloom.backends.seam import STRATEGY_OF_MODE
from tokenloom.bench.network.findings import Finding, Seen, merge
from tokenloom.bench.tables import counted
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.routed import Routed
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup

LONGEST_WAIT_S = 0.003
BATCHES = 2
"""Calls that are open at once."""


@dataclass(frozen=True)
class Batch:
    """Tokens of all ranks for one call, on the CPU.

    Attributes:
        xs: float32 [T, H], small integers, which sums keep exactly.
    """

    xs: list[torch.Tensor]
    ids: list[torch.Tensor]


def make_batch(plan: Plan, number: int, seed: int) -> Batch:
    """Draw the batch of a number, the same on all ranks; of another number it has other values."""
    generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + number)
    whole: dict[str, Any] = {"generator": generator, "dtype": torch.int64, "device": "cpu"}
    xs, ids = [], []
    for rank in range(plan.num_ranks):
        num_tokens = int(torch.randint(0, plan.max_tokens_per_rank + 1, (1,), **whole))
        token = torch.arange(num_tokens, dtype=torch.int64, device="cpu")[:, None]
        column = torch.arange(plan.hidden, dtype=torch.int64, device="cpu")
        value = number * 7919 + rank * 611 + token * 53 + column  # far apart: rows of any two differ
        xs.append((value % 65521 + 1).float())
        ids.append(torch.randint(-1, plan.num_experts, (num_tokens, plan.top_k), **whole))
    return Batch(xs, ids)


def expected_rows(plan: Plan, batch: Batch, rank: int) -> torch.Tensor:
    """Rows that a rank must receive, one for each (token, rank): [rows, H], by source rank, then token."""
    return torch.cat([x[_goes_to(plan, ids, rank)] for x, ids in zip(batch.xs, batch.ids, strict=True)])


def expected_home(plan: Plan, batch: Batch, rank: int) -> torch.Tensor:
    """Sums that come home if every rank sends its rows back: each token once for each rank that it went to."""
    ids = batch.ids[rank]
    hits = torch.stack([_goes_to(plan, ids, each) for each in range(plan.num_ranks)]).sum(0)
    return batch.xs[rank] * hits[:, None].float()


def _goes_to(plan: Plan, ids: torch.Tensor, rank: int) -> torch.Tensor:
    first = rank * plan.experts_per_rank
    return ((ids >= first) & (ids < first + plan.experts_per_rank)).any(1)


def _rows(routed: Routed) -> torch.Tensor:
    """Rows that a rank has received: [rows, H]."""
    if routed.layout == "token":
        return routed.tokens
    return torch.cat([rows[:count] for rows, count in zip(routed.tokens, routed.source_counts.tolist(), strict=True)])


class Stress:
    """The rounds of one communicator on this rank.

    Args:
        seed: of what is sent and of the waits.
    """

    def __init__(self, comm: Communicator, seed: int) -> None:
        self._comm, self._seed = comm, seed
        self._waits = random.Random(seed * 4099 + comm.rank)  # other waits on every rank
        self._turns = random.Random(seed)  # the same order of halves on all ranks
        able = registry.capabilities(comm.backend)
        self._layout: dict[str, Any] = {"layout": "token" if "token" in able.layouts else "rank"}
        self._modes = [mode for mode in ("per_rank", "per_node") if STRATEGY_OF_MODE[mode] in able.combine_strategies]
        self.seen = Seen(0)

    @torch.no_grad()
    def run(self, rounds: int) -> Seen:
        """Make the rounds; what was seen. Collective."""
        for number in range(rounds):
            self._round(number)
        return self.seen

    def _round(self, number: int) -> None:
        comm, plan = self._comm, self._comm.plan
        batches = [make_batch(plan, BATCHES * number + each, self._seed) for each in range(BATCHES)]
        sent = []
        for batch in batches:
            self._wait()
            mine = batch.xs[comm.rank].to(comm.device), batch.ids[comm.rank].to(comm.device)
            sent.append(comm.send_dispatch(*mine, **self._layout, copy=True))
        received: dict[int, Any] = {}
        for each in self._order():
            self._wait()
            received[each] = sent[each].receive()
            wanted = expected_rows(plan, batches[each], comm.rank)
            self._compare(number, each, "dispatch", _rows(received[each]), wanted)
        home = []
        for each in range(BATCHES):
            self._wait()
            options: dict[str, Any] = {"mode": self._modes[each % len(self._modes)]}
            home.append(comm.send_combine(received[each].tokens, received[each], **options))
        for each in self._order():
            self._wait()
            wanted = expected_home(plan, batches[each], comm.rank)
            self._compare(number, each, "combine", home[each].receive(), wanted)

    def _order(self) -> list[int]:
        return self._turns.sample(range(BATCHES), BATCHES)

    def _wait(self) -> None:
        time.sleep(self._waits.uniform(0, LONGEST_WAIT_S))

    def _compare(self, number: int, batch: int, call: str, got: torch.Tensor, want: torch.Tensor) -> None:
        got = got.cpu()
        fault = ""
        if got.shape != want.shape:
            fault = f"{list(got.shape)} came, expected {list(want.shape)}"
        elif not torch.equal(got, want):
            fault = f"row {int((got != want).any(1).nonzero()[0])} is another"
        where = f"round {number}, batch {batch}, {call}"
        self.seen += Seen(want.numel(), fault and f"{where}: {fault}")


def check_order(ranks: RankGroup, comm: Communicator, rounds: int, seed: int) -> list[Finding]:
    """The stress of order over one communicator. Collective."""
    seen = Stress(comm, seed).run(rounds)
    what = f"{counted(rounds, 'round')}, waits up to {LONGEST_WAIT_S * 1e3:g} ms, seed {seed}"
    return merge("order", ranks.all_gather_object({(f"{comm.backend}: two calls open at once", what): seen}, "order"))
