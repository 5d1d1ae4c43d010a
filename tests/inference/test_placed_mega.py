"""MegaMoE under a placement: the outputs of the layer without one, whatever moves, is lost or is restored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.comm.test_on_timeout import require_masked
from tests.conftest import HOPPER, Ranks
from tests.support import emulator
from tests.support.graph_cases import Captured
from tests.support.mega_cases import (
    Case,
    Layer,
    assert_near,
    expected,
    inputs,
    make_layer,
    make_mega,
)
from tests.support.on_ranks import on_ranks
from tests.support.placements import drawn_placement
from tests.support.server import Server
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext, RankPool

EMULATED = True
TINY = Case("", tokens=(9, 0, 5, 7), hidden=128, intermediate=128, experts_per_rank=2)
PLACED = {
    "block": replace(TINY, quantised=True),
    "everything of block": replace(TINY, shared=1, biased=True, activation="swigluoai", unused=0.3, pick="repeats"),
    "row": replace(TINY, recipe="row"),
    "four bits": replace(TINY, recipe="row", keep="four_bits", biased=True),
    "both": replace(TINY, recipe="row", keep="both", shared=1),
    "padded": replace(TINY, hidden=144, intermediate=80),
}


def _groups() -> list[Any]:
    if emulator.ON:
        return [pytest.param(("emulated", 2), id="emulated2")]
    slow = {2: pytest.mark.slow, 4: ()}
    cpu = [pytest.param(("cpu", size), id=f"cpu{size}", marks=slow[size]) for size in (2, 4)]
    return cpu + [pytest.param(("cuda", size), id=f"cuda{size}", marks=pytest.mark.gpu) for size in (2, 4) if HOPPER]


@pytest.fixture(params=_groups())
def group(request: pytest.FixtureRequest, pools: Callable[[str], RankPool]) -> Any:
    """Groups with replicas on other ranks."""
    device, size = request.param
    return emulator.ranks(size) if device == "emulated" else Ranks(pools(device), size)


def backend_of(context: RankContext) -> str:
    return "nvlink" if context.device.type == "cuda" or emulator.ON else "composed"


def plan_of(case: Case, num_ranks: int) -> Plan:
    return Plan(num_ranks, num_ranks * case.experts_per_rank, 1, 1, 1)


def twice(case: Case, num_ranks: int) -> tl.Placement:
    """Every expert on its own rank and on the next one, except expert 1, and a last slot that is empty."""
    table = torch.arange(num_ranks * case.experts_per_rank).view(num_ranks, -1)
    table = torch.cat([table, table.roll(1, 0), torch.full((num_ranks, 1), -1)], 1)
    table[1, case.experts_per_rank + 1] = -1
    return tl.Placement(table, num_experts=table[:, : case.experts_per_rank].numel())


def of_expert(case: Case, layer: Layer, expert: int) -> dict[str, torch.Tensor | None]:
    """What a checkpoint has of one expert."""
    found = {name: getattr(layer, name) for name in ("w1", "w2", "w1_scales", "w2_scales", "w1_bias", "w2_bias")}
    return {name: None if w is None else w[expert].cpu() for name, w in found.items()}


@on_ranks("group")
@pytest.mark.parametrize("name", PLACED)
def test_moves_between_calls(context: RankContext, name: str) -> None:
    """Weights of every recipe, with scales and biases, in pieces that end anywhere; calls between all of them."""
    case = PLACED[name]
    layer = make_layer(case, context.num_ranks, context.device)
    given = inputs(case, layer, context.rank)
    with make_mega(context, case, layer, backend_of(context)) as mega:
        want = mega(*given)
        mega.check()
    first, second = (drawn_placement(plan_of(case, context.num_ranks), 1, seed) for seed in (3, 4))
    with make_mega(context, case, layer, backend_of(context), placement=first) as mega:
        assert "placement:" in mega.describe()
        stats = torch.zeros(first.slots_per_rank, dtype=torch.int32, device=context.device)
        assert_near(mega(*given, expert_stats=stats), expected(case, layer, context.rank))
        assert torch.equal(mega(*given), want)
        assert not stats[torch.tensor(first.experts_of(context.rank)) < 0].any()
        moving = mega.move_experts(second, piece_bytes=100_001)
        assert moving.num_steps > 1
        for number in moving:
            if number % 2 or moving.is_done:
                assert torch.equal(mega(*given), want)
        assert mega.comm.placement == moving.placement != first
        mega.check()


@on_ranks("group")
@pytest.mark.parametrize("name", ["block", "four bits"])
def test_a_lost_rank(context: RankContext, name: str) -> None:
    """Its experts' replicas take over, the one without is restored from the checkpoint, and the output is whole."""
    case = PLACED[name]
    layer = make_layer(case, context.num_ranks, context.device)
    x, ids, weights = inputs(case, layer, context.rank)
    placement = twice(case, context.num_ranks)
    with make_mega(context, case, layer, backend_of(context), placement=placement) as mega:
        mega(x, ids, weights)
        mega.check()
        if context.rank == 0:
            return
        mega.comm.mask_ranks([0])
        assert mega.comm.lost_experts() == [1]
        without = replace(layer, ids=[torch.where(each == 1, -1, each) for each in layer.ids])
        assert_near(mega(x, ids, weights), expected(case, without, context.rank))
        asked: list[int] = []

        def restore(expert: int) -> dict[str, torch.Tensor | None]:
            asked.append(expert)
            return of_expert(case, layer, expert)

        def wrong(expert: int) -> dict[str, torch.Tensor | None]:
            found = of_expert(case, layer, expert)
            return found | {"w2": found["w1"]}

        with pytest.raises((tl.ShapeMismatch, tl.PeerError), match="w2"):
            mega.restore_experts(wrong)
        assert mega.comm.placement == placement
        assert mega.restore_experts(restore) == [1]
        assert (asked == [1]) == (context.rank == 1)
        assert "expert 1 was lost and is restored, on rank 1" in mega.describe()
        assert_near(mega(x, ids, weights), expected(case, layer, context.rank))
        assert mega.comm.lost_experts() == mega.restore_experts(restore) == []
        mega.check()


@on_ranks("group")
def test_loading(context: RankContext) -> None:
    """By expert, whichever rows are given, and by slots of a placement that changes between two loads."""
    case = PLACED["everything of block"]
    layer = make_layer(case, context.num_ranks, context.device)
    given, experts = inputs(case, layer, context.rank), context.num_ranks * case.experts_per_rank
    placement = drawn_placement(plan_of(case, context.num_ranks), 1, 3)
    options = {name: getattr(layer, name) for name in ("w1", "w2", "w1_scales", "w2_scales", "w1_bias", "w2_bias")}
    with make_mega(context, case, layer, backend_of(context), placement=placement) as mega:
        want = mega(*given)
        mine = sorted({e for e in placement.experts_of(context.rank) if e >= 0}, reverse=True)
        rows = torch.tensor([*mine, experts], device=context.device)
        some = {name: w.view(torch.uint8)[rows].view(w.dtype) if w.itemsize == 1 else w[rows]
                for name, w in options.items()}  # fmt: skip
        mega.load_weights(**some, experts=mine)
        assert torch.equal(mega(*given), want)
        with pytest.raises(tl.InvalidArgument, match=f"experts {mine[0]} have slots on this rank"):
            mega.load_weights(**some, experts=[experts - 1 if e == mine[0] and mine[0] != experts - 1 else
                                               0 if e == mine[0] else e for e in mine])  # fmt: skip
        with pytest.raises(tl.ShapeMismatch, match=r"w1 has \d+ rows"):
            mega.load_weights(**some, experts=[*mine, mine[0]])
        with pytest.raises(tl.InvalidArgument, match="expected a list of experts"):
            mega.load_weights(**some, experts=[experts])
        mega.comm.set_placement(tl.Placement.default(experts, context.num_ranks, placement.slots_per_rank))
        mega.load_weights(**options)
        assert torch.equal(mega(*given), want)
        mega.check()
    with make_mega(context, case, layer, backend_of(context)) as mega:  # without a placement too
        mega.load_weights(**options, experts=range(experts))
        assert torch.equal(mega(*given), want)
        mega.check()


@on_ranks("group")
def test_refusals(context: RankContext) -> None:
    """Told to all ranks, before anything moves."""
    case = PLACED["block"]
    options: dict[str, Any] = {
        "num_experts": 2 * context.num_ranks, "hidden": 128, "intermediate": 128, "top_k": 2, "max_tokens_per_rank": 4,
        "backend": backend_of(context), "device": context.device,
    }  # fmt: skip
    placement = twice(case, context.num_ranks)
    if not emulator.ON:
        with pytest.raises((tl.InvalidArgument, tl.PeerError), match="spare_slots"):
            tl.MegaMoE(context.group, **options, spare_slots=-1 if context.rank == 0 else 1)
        with pytest.raises(tl.InvalidArgument, match="both placement and spare_slots"):
            tl.MegaMoE(context.group, **options, spare_slots=1, placement=placement)
    with tl.MegaMoE(context.group, **options, spare_slots=3) as mega:
        assert mega.comm.placement == tl.Placement.default(2 * context.num_ranks, context.num_ranks, 5)
        with pytest.raises(tl.InvalidArgument, match="have no weights"):
            mega.move_experts(placement)
        with pytest.raises(tl.InvalidArgument, match="have no weights"):
            mega.restore_experts(lambda expert: {})


@pytest.mark.skipif(emulator.ON, reason="processes over gloo")
@on_ranks("four")
def test_back_again(context: RankContext) -> None:
    """A rank that comes back has the slots of the table, and loads their experts."""
    case = PLACED["block"]
    layer = make_layer(case, context.num_ranks, context.device)
    given = inputs(case, layer, context.rank)
    placement = twice(case, context.num_ranks)
    mega = make_mega(context, case, layer, "composed", placement=placement)
    want = mega(*given)
    if context.rank == 0:
        mega.close()
        mega = make_mega(context, case, layer, "composed", placement=placement, rejoin=True)
    else:
        mega.comm.mask_ranks([0])
        mega(*given)
        mega.comm.unmask_ranks([0])
    assert torch.equal(mega(*given), want)
    mega.close()


def serve(context: RankContext, pipe: Connection, num_calls: int) -> None:
    """Calls whose lost experts are restored behind each. Only the call in which a rank is lost may lack something."""
    case = PLACED["block"]
    layer = make_layer(case, context.num_ranks, context.device)
    given, want = inputs(case, layer, context.rank), expected(case, layer, context.rank)
    placement = twice(case, context.num_ranks)
    options: dict[str, Any] = {"on_timeout": "mask", "timeout_s": 5.0, "placement": placement}
    with make_mega(context, case, layer, "composed", **options) as mega:
        for number in range(num_calls):
            comm, masked = mega.comm, mega.comm.masked_ranks()
            if number % 10 == 0:
                pipe.send(("pair", (number, masked, comm.engine.ranks.why_masked())))
            out = mega(*given)
            if comm.masked_ranks() == masked:
                assert_near(out, want)
            mega.restore_experts(lambda expert: of_expert(case, layer, expert))
            assert comm.lost_experts() == []
        assert list(comm.engine.restored) == [1] * bool(masked)
        pipe.send(("pair", (num_calls, masked, comm.engine.ranks.why_masked())))


@pytest.mark.skipif(emulator.ON, reason="processes over gloo")
@pytest.mark.slow
def test_death_in_the_middle() -> None:
    """Of a rank whose experts have replicas, but for one that is restored: from the next call on nothing is lost."""
    num_calls = 120
    with Server(4, serve, num_calls, device="cpu") as ranks:
        require_masked(ranks, 0, num_calls // 4, [])
        os.kill(ranks.processes[0].pid, signal.SIGKILL)
        for rank in (1, 2, 3):
            require_masked(ranks, rank, num_calls, [0])


@pytest.mark.skipif(emulator.ON, reason="graphs of GPUs")
@on_ranks("hoppers")
def test_graphs_follow(context: RankContext) -> None:
    """A graph captured before a move goes by the new placement, and reads the moved weights, at its next replay."""
    case = PLACED["block"]
    layer = make_layer(case, context.num_ranks, context.device)
    given = inputs(case, layer, context.rank)
    first, second = (drawn_placement(plan_of(case, context.num_ranks), 1, seed) for seed in (3, 4))
    with make_mega(context, case, layer, placement=first) as mega:
        want = mega(*given).clone()
        graph = Captured(lambda: mega(*given))
        for number in mega.move_experts(second, piece_bytes=100_000):
            graph.results.zero_()
            graph.replay()
            assert torch.equal(graph.results, want), number
        mega.check()
