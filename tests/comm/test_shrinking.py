"""Communicators that grow where ranks are lost: those that are left make the next one, whenever a rank dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.patience import only_late
from tests.support.server import Server
from tests.support.slow import mostly_slow
from tokenloom.comm.communicators_by_shape import CommShape, Communicators
from tokenloom.compat import deep_ep
from tokenloom.runtime.links import Links
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.store_notes import StoreNotes

RANKS, LOST, HIDDEN, TOP_K = 4, 2, 16, 2
TIMEOUT_S, LONG_S = 2.0, 600.0
LIMIT_S = 120.0
GROWTH = ((1, 4, 3), (1, 4, 3), (2, 4, 3), (1, 30, 3), (2, 9, 9))
"""Experts of a rank, tokens of rank 0, and of the others: a shape twice, another one, growth by one rank, by all."""


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_at(owner: Any, name: str, number: int) -> None:
    """End this process before the call of that number from now on."""
    real: Callable[..., Any] = getattr(owner, name)
    left = number

    def count(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left <= 0:
            end()
        return real(*given, **named)

    setattr(owner, name, count)


def grow(context: RankContext, dies: Callable[[int], object]) -> Collection[int]:
    """Make the calls of GROWTH: who is masked at the end. Rank LOST asks before each, and may die then or later."""
    communicators = Communicators(context.group, lambda: {"timeout_s": TIMEOUT_S, "on_timeout": "mask"})
    masked: Collection[int] = []
    for number, (experts, *tokens) in enumerate(GROWTH):
        if context.rank == LOST:
            dies(number)
        num_tokens = tokens[context.rank != 0]
        x = torch.full((num_tokens, HIDDEN), context.rank + 1.0)
        ids = torch.arange(num_tokens * TOP_K).view(num_tokens, TOP_K) % (experts * RANKS)

        def call(comm: tl.Communicator, x: torch.Tensor = x, ids: torch.Tensor = ids) -> tuple[torch.Tensor, Any]:
            routed = comm.dispatch(x, ids)
            return comm.combine(routed.tokens, routed, weighted=False), comm.masked_ranks()

        out, masked = communicators.run(CommShape(experts * RANKS, HIDDEN, TOP_K), num_tokens, context.device, call)
        counts = [((ids // experts) != gone).sum(1) for gone in (LOST, -1)]
        if LOST not in masked:  # it may have died behind the dispatch
            assert torch.equal(out, x * counts[1][:, None]), number
        else:
            assert any(torch.equal(out, x * each[:, None]) for each in counts), (number, list(masked))
    assert len({comm.plan.num_experts for comm in communicators.all()}) == 2
    communicators.close()
    return masked


def before_call(number: int) -> Callable[[int], object]:
    return lambda at: end() if at == number else None


def at_note(number: int) -> Callable[[int], object]:
    return lambda at: end_at(StoreNotes, "say_at", number) if at == 0 else None


def at_exchange(number: int) -> Callable[[int], object]:
    return lambda at: end_at(Links, "start", number) if at == 0 else None


def rank(context: RankContext, pipe: Connection, when: str, number: int) -> None:
    moments = {"call": before_call, "note": at_note, "exchange": at_exchange}
    with only_late([LOST]):
        masked = list(grow(context, moments[when](number)))
    assert masked == [LOST] or (when != "call" and not masked), "it has died behind the last call at the earliest"


def serve(context: RankContext, pipe: Connection, masks: bool) -> None:
    """Low-latency calls of a buffer. Rank LOST is away after the first, and wants to come back when it hears of it."""
    with only_late([LOST]):
        shrink(context, pipe, masks)


def shrink(context: RankContext, pipe: Connection, masks: bool) -> None:
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    buffer._options["timeout_s"] = LONG_S if masks else TIMEOUT_S

    def call(tokens: int, most: int, hidden: int) -> torch.Tensor:
        x = torch.full((tokens, hidden), context.rank + 1.0, dtype=torch.bfloat16)
        ids = torch.arange(RANKS).expand(tokens, RANKS).contiguous()
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, most, RANKS, use_fp8=False)
        assert isinstance(rows, torch.Tensor)
        return buffer.low_latency_combine(rows, ids, torch.ones(tokens, RANKS), handle)[0] / x

    assert (call(2, 4, 128) == RANKS).all()
    if context.rank == LOST:
        assert pipe.recv() == "come back"
        with pytest.raises(tl.CommunicatorBroken, match="have masked rank 2"):
            call(2, 4, 128)
        return
    if masks:
        buffer.low_latency_update_mask_buffer(LOST, True)
    for given in ((2, 4, 128), (7, 8, 128), (2, 4, 256)):  # the same, more tokens, and another hidden size
        assert (call(*given) == RANKS - 1).all()
    mask = torch.zeros(RANKS, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    assert mask.tolist() == [each == LOST for each in range(RANKS)]
    pipe.send(("grown", None))
    assert pipe.recv() == "end"
    buffer.destroy()


@pytest.mark.parametrize("masks", [False, True], ids=["late", "masked"])
def test_a_rank_that_lives(masks: bool) -> None:
    """It is not asked again by those that make other communicators, and finds out when it comes."""
    with Server(RANKS, serve, masks, device="cpu") as ranks:
        others = set(range(RANKS)) - {LOST}
        for each in others:
            ranks.hear(each, "grown", LIMIT_S)
        if not masks:
            ranks.pipes[LOST].send("come back")
            ranks.hear(LOST, "returned", LIMIT_S)
        for each in others:
            ranks.pipes[each].send("end")
            ranks.hear(each, "returned", LIMIT_S)


MOMENTS = [
    *(("call", number) for number in range(len(GROWTH))),
    *(("note", number) for number in range(1, 22)),
    *(("exchange", number) for number in range(1, 40)),
]
QUICK = [("call", 0), ("call", 2), ("note", 9), ("exchange", 25)]
SELDOM = [moment for moment in MOMENTS if moment[1] % 3 and moment not in QUICK]


@pytest.mark.parametrize("moment", mostly_slow(MOMENTS, QUICK, SELDOM), ids=lambda moment: f"{moment[0]} {moment[1]}")
def test_a_death(moment: tuple[str, int]) -> None:
    """Of rank LOST, before a call, or at something that it tells while communicators are made."""
    with Server(RANKS, rank, *moment, device="cpu") as ranks:
        for each in set(range(RANKS)) - {LOST}:
            ranks.hear(each, "returned", LIMIT_S)
