"""MegaMoE on GPUs over a long time, and with a rank that is late or dies in the middle of a call."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.graph_cases import Captured
from tests.support.mega_cases import CASES, Case, assert_near, expected, inputs, make_layer, make_mega
from tests.support.on_ranks import on_ranks
from tests.support.server import Server
from tokenloom.runtime.processes import RankContext

pytestmark = [pytest.mark.alone, pytest.mark.gpu]

CALLS = 20
"""Of one graph. Each half is given the same tokens, in another order."""
REPLAYS = 5_000
SHARED = 50
"""Where ranks share GPUs, one in so many replays."""
SIZES = Case("", tokens=(24, 64, 0, 41), experts_per_rank=6, hidden=256, intermediate=128, top_k=4, shared=1)
START_S, END_S = 180.0, 60.0
TIMEOUT_S = 3.0
LATE_CYCLES = 180_000_000
"""About 100 ms."""


def test_100000_calls_in_graphs(hoppers: Ranks) -> None:
    """Routing, tokens and weights are drawn anew before every replay, by each rank for itself. Whatever is reused too
    early, or awaited too little, makes the second of two calls with the same input differ from the first."""
    assert CALLS * REPLAYS == 100_000
    hoppers.run(check_calls_in_graphs, REPLAYS // SHARED if hoppers.shares_gpus else REPLAYS, limit_s=90.0)


def check_calls_in_graphs(context: RankContext, replays: int) -> None:
    layer, device = make_layer(SIZES, context.num_ranks, context.device), context.device
    generator = torch.Generator(device).manual_seed(context.rank)
    pairs, num_tokens = CALLS // 2, len(layer.xs[context.rank])
    num_experts = SIZES.experts_per_rank * context.num_ranks
    x = torch.zeros(pairs, num_tokens, SIZES.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(pairs, num_tokens, SIZES.top_k, dtype=torch.int64, device=device)
    weights = torch.zeros(pairs, num_tokens, SIZES.top_k, device=device)

    def draw() -> None:
        x.normal_(generator=generator)
        weights.uniform_(0.1, 1.0, generator=generator)
        ids.random_(num_experts, generator=generator)
        share = torch.rand(pairs, 1, 1, generator=generator, device=device)  # of unused routes: none to all
        ids.masked_fill_(torch.rand(ids.shape, generator=generator, device=device) < share, -1)

    with make_mega(context, SIZES, layer) as mega:

        def call_all() -> torch.Tensor:
            order = [*range(pairs), *reversed(range(pairs))]
            return torch.stack([mega(x[pair], ids[pair], weights[pair]) for pair in order])

        draw()
        captured = Captured(call_all)
        wrong, not_zero = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        for _ in range(replays):
            draw()
            captured.replay()
            first, second = captured.results[:pairs], captured.results[pairs:].flip(0)
            wrong += (first.view(torch.int16) != second.view(torch.int16)).sum()
            not_zero += (first != 0).sum()
        mega.check()
        assert wrong == 0, f"{wrong} values differ between two calls with the same input"
        values = replays * first.numel()
        assert not_zero >= 0.9 * values, "the shared expert alone makes all values"
        given = inputs(SIZES, layer, context.rank)
        assert_near(mega(*given), expected(SIZES, layer, context.rank))


@on_ranks("several")
@pytest.mark.parametrize("stage", ["", "dispatch", "gemm1", "gemm2"])
def test_a_late_rank(context: RankContext, stage: str) -> None:
    """By 100 ms, before the call or before its next kernel: the others wait, and nothing differs."""
    case = CASES["top8"]
    layer = make_layer(case, context.num_ranks, context.device)
    with make_mega(context, case, layer, timeout_s=TIMEOUT_S) as mega:
        given = inputs(case, layer, context.rank)
        want = mega(*given)
        assert_near(want, expected(case, layer, context.rank))
        for late in range(context.num_ranks):
            if context.rank == late and stage == "":
                torch.cuda._sleep(LATE_CYCLES)
            elif context.rank == late:
                mega.after_stage = lambda name: torch.cuda._sleep(LATE_CYCLES) if name == stage else None
            assert torch.equal(mega(*given), want)
            mega.after_stage = None
        mega.check()


@pytest.mark.usefixtures("own_gpus")
@pytest.mark.parametrize("stage", ["", "dispatch", "gemm1", "gemm2"])
def test_a_killed_rank(several: Ranks, stage: str) -> None:
    """Between two calls, or as soon as one of its kernels is launched: all others name it within the deadline.

    Their GPUs work on."""
    victim = several.num_ranks - 1
    with Server(several.num_ranks, call_until_lost, victim, stage) as server:
        server.hear(victim, "dies", START_S)
        for rank in range(victim):
            assert server.hear(rank, "returned", END_S) == [victim]


def call_until_lost(context: RankContext, pipe: Connection, victim: int, stage: str) -> Any:
    case = CASES["top8"]
    layer = make_layer(case, context.num_ranks, context.device)
    given = inputs(case, layer, context.rank)
    alone = [torch.distributed.new_group([rank]) for rank in range(context.num_ranks)][context.rank]

    def die(name: str) -> None:
        if name == stage:
            pipe.send(("dies", None))
            os.kill(os.getpid(), signal.SIGKILL)

    mega = make_mega(context, case, layer, timeout_s=TIMEOUT_S)
    want = mega(*given)
    for _ in range(100):
        out = mega(*given)
    assert torch.equal(out, want)
    mega.check()
    torch.distributed.barrier()
    began = time.monotonic()
    if context.rank == victim:
        die("")
        mega.after_stage = die
        mega(*given)
        raise AssertionError(f"there is no stage {stage!r}")

    def call_until(deadline: float) -> None:
        while time.monotonic() < deadline:
            mega(*given)

    with pytest.raises(tl.PeerTimeout) as timeout:
        call_until(began + END_S)
    assert time.monotonic() - began < 3 * TIMEOUT_S
    with pytest.raises(tl.CommunicatorBroken):
        mega(*given)
    layer = make_layer(case, 1, context.device)
    with make_mega(RankContext(0, 1, alone, context.device, None), case, layer) as other:  # type: ignore[arg-type]
        assert_near(other(*inputs(case, layer, 0)), expected(case, layer, 0))
        other.check()
    return list(timeout.value.peers)
