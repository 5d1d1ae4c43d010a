"""100,000 calls in a row, every value of every result checked, for what goes wrong once in ten thousand times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import BF16, FP32, make_comm
from tests.support.graph_cases import Captured, experts
from tokenloom.plan import LAYOUTS, ROUTE_LAYOUTS, Plan
from tokenloom.runtime.processes import RankContext

BACKEND = "nvlink"
HIDDEN = 256
TOP_K = 4
EXPERTS_PER_RANK = 4
MAX_TOKENS = 64
PAIRS = 20
"""Dispatches, and combines, in one graph; their layouts take turns, and each comes in one piece and in halves."""
REPLAYS = 2500
CAPACITY = 600
"""Of layout "expert": twice what an even routing of all tokens needs, and more than any that is drawn here does."""


@pytest.mark.alone
def test_soak(hoppers: Ranks) -> None:
    """Routing, tokens and weights are drawn anew before every replay, on the device, by each rank for itself, and what
    must come home can be told from them alone. The host does not wait before the end, so that every rank runs as far
    ahead as the others let it: a flag, a count or a buffer that is reused too early shows as a wrong value."""
    assert 2 * PAIRS * REPLAYS == 100_000
    hoppers.run(check_soak, REPLAYS, limit_s=90.0)


def check_soak(context: RankContext, replays: int) -> None:
    num_ranks = context.num_ranks
    plan = Plan(num_ranks, EXPERTS_PER_RANK * num_ranks, HIDDEN, TOP_K, MAX_TOKENS)
    device = context.device
    generator = torch.Generator(device).manual_seed(context.rank)
    num_tokens = MAX_TOKENS - 5 * context.rank
    x = torch.zeros(PAIRS, num_tokens, HIDDEN, dtype=BF16, device=device)
    ids = torch.zeros(PAIRS, num_tokens, TOP_K, dtype=torch.int64, device=device)
    weights = torch.zeros(PAIRS, num_tokens, TOP_K, device=device)

    def draw() -> None:
        x.normal_(generator=generator)
        weights.uniform_(0.1, 1.0, generator=generator)
        score = torch.rand(PAIRS, num_tokens, plan.num_experts, generator=generator, device=device)
        ids.copy_(score.topk(TOP_K).indices)
        ids.masked_fill_(torch.rand(ids.shape, generator=generator, device=device) < 0.2, -1)
        # And a share of the tokens, another one in each pair, has no routes at all.
        share = torch.rand(PAIRS, 1, 1, generator=generator, device=device)
        ids.masked_fill_(torch.rand(PAIRS, num_tokens, 1, generator=generator, device=device) < share, -1)

    def given(pair: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        layout = LAYOUTS[pair % len(LAYOUTS)]
        options = {"alignment": 16, "capacity": CAPACITY} if layout == "expert" else {}
        return (x[pair], ids[pair], weights[pair]), {"layout": layout, "sizes": "bounded", **options}

    def work(routed: tl.Routed) -> torch.Tensor:
        return experts(routed.layout, routed.tokens, None, routed.expert_offsets, context.rank, EXPERTS_PER_RANK)

    with make_comm(context, BACKEND, plan, checked=False) as comm:

        def in_one_piece(pair: int) -> torch.Tensor:
            tensors, options = given(pair)
            routed = comm.dispatch(*tensors, **options)
            return comm.combine(work(routed), routed)

        def in_turns(*pairs: int) -> list[torch.Tensor]:
            """One batch is computed while the other travels: two calls are open all along."""
            sent = []
            for pair in pairs:
                tensors, options = given(pair)
                sent.append(comm.send_dispatch(*tensors, **options))
            home = []
            for pending in sent:
                routed = pending.receive()
                home.append(comm.send_combine(work(routed), routed))
            return [pending.receive() for pending in home]

        @torch.no_grad()
        def call_all() -> list[torch.Tensor]:
            outs = []
            for pair in range(0, PAIRS, 2):
                if pair // len(LAYOUTS) % 2:
                    outs += in_turns(pair, pair + 1)
                else:
                    outs += [in_one_piece(each) for each in (pair, pair + 1)]
            return outs

        draw()
        captured = Captured(call_all)
        by_layout = [slice(first, None, len(LAYOUTS)) for first in range(len(LAYOUTS))]
        wrong = torch.zeros(len(LAYOUTS), dtype=torch.int64, device=device)
        first_wrong = torch.full_like(wrong, -1)
        not_zero = torch.zeros_like(wrong)
        for replay in range(replays):
            draw()
            captured.replay()
            for i, (layout, pairs) in enumerate(zip(LAYOUTS, by_layout, strict=True)):
                out = torch.stack(captured.results[pairs])
                want = expected(layout, x[pairs], ids[pairs], weights[pairs], num_ranks)
                differing = (out.view(torch.int16) != want.view(torch.int16)).sum()
                wrong[i] += differing
                first_wrong[i] = torch.where((first_wrong[i] < 0) & (differing > 0), replay, first_wrong[i])
                not_zero[i] += (out != 0).sum()
        comm.check()
    for i, layout in enumerate(LAYOUTS):
        values = replays * num_tokens * HIDDEN * len(range(PAIRS)[by_layout[i]])
        assert wrong[i] == 0, (
            f"layout {layout}: {wrong[i]} of {values} values differ, first in replay {first_wrong[i]}"
        )
        assert not_zero[i] > 0.2 * values, f"layout {layout}: hardly anything was sent"


def expected(layout: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """What comes home, bit for bit, for inputs [pairs, T, ...], by the formula of docs/reference/semantics.md."""
    owner = torch.where(ids >= 0, ids // EXPERTS_PER_RANK, -1)
    total = Sum(x.shape, x.device)
    for rank in range(num_ranks):
        if layout not in ROUTE_LAYOUTS:
            total.add((x.float() * (rank + 1)).to(BF16), (owner == rank).any(-1, keepdim=True))
            continue
        partial = Sum(x.shape, x.device)
        for k in range(TOP_K):
            y = (x.float() * (ids[..., k, None] + 1)).to(BF16)
            partial.add(y.float() * weights[..., k, None], owner[..., k, None] == rank)
        total.add(partial.value.to(BF16), partial.begun)
    return total.value.to(BF16)


class Sum:
    """Sums in float32 that start from their first term; 0 where there is none."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=FP32, device=device)
        self.begun = torch.zeros(*shape[:-1], 1, dtype=torch.bool, device=device)

    def add(self, term: torch.Tensor, where: torch.Tensor) -> None:
        value = torch.where(self.begun, self.value + term.float(), term.float())
        self.value = torch.where(where, value, self.value)
        self.begun = self.begun | where


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_soak_expects(layout: str) -> None:
    """By hand, on one token of two ranks: the soak is worth what its expectation is."""
    x = torch.full((1, 1, 1), 1 + 2.0**-7, dtype=BF16)
    ids, weights = torch.tensor([[[5, -1, 2, 7]]]), torch.tensor([[[0.5, torch.nan, 2.0, 1.0]]])
    got = expected(layout, x, ids, weights, 2)
    # Rank 0: expert 2 makes 3 + 3/128, which is 3 + 2/64 in bfloat16 after a tie, and weight 2 doubles it.
    # Rank 1: experts 5 and 7 make 6 + 6/128 -> 6 + 2/32 and 8 + 8/128, of which half and all are 11 + 3/32.
    # Layouts by token: rank 0 gives x, rank 1 gives 2 x.
    by_hand = dict.fromkeys(ROUTE_LAYOUTS, 6 + 2 / 32 + 11 + 2 / 16) | dict.fromkeys(("token", "rank"), 3 + 2 / 64)
    assert got.item() == torch.tensor(by_hand[layout]).to(BF16).item()
    assert expected(layout, -x, torch.full_like(ids, -1), weights, 2).view(torch.int16).item() == 0, "not +0"
