"""MegaMoE with ``balance="batch"``: the outputs of the layer without, whatever the router does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tokenloom as tl
from tests.inference.test_placed_mega import PLACED, backend_of, group, plan_of
from tests.support.graph_cases import Captured
from tests.support.mega_cases import assert_near, expected, inputs, make_layer, make_mega
from tests.support.on_ranks import on_ranks
from tests.support.placements import drawn_placement
from tokenloom.runtime.processes import RankContext

__all__ = ["group"]
EMULATED = True
HOT = {name: replace(PLACED[name], pick="one expert") for name in ("everything of block", "row", "both")}


@on_ranks("group")
@pytest.mark.parametrize("name", [*HOT, "block"])
@pytest.mark.parametrize("replicated", [False, True], ids=["spare", "replicas"])
def test_outputs(context: RankContext, name: str, replicated: bool) -> None:
    """Weights, scales and biases come with the experts; shared experts, behind the slots, stay."""
    case = HOT.get(name, PLACED[name])
    layer = make_layer(case, context.num_ranks, context.device)
    given = inputs(case, layer, context.rank)
    with make_mega(context, case, layer, backend_of(context)) as mega:
        want = mega(*given)
    placement = drawn_placement(plan_of(case, context.num_ranks), 2, 3)
    options = {"placement": placement} if replicated else {"spare_slots": 1}
    with make_mega(context, case, layer, backend_of(context), balance="batch", rows_per_pull=0, **options) as mega:
        for _ in range(2):
            assert torch.equal(mega(*given), want)
        assert_near(mega(*given), expected(case, layer, context.rank))
        assert "each batch is split over ranks" in mega.describe()
        stats = mega.comm.balance_stats()
        assert stats.batches == 3
        if name in HOT and not replicated:
            assert (stats.split, stats.pulls) == (3, 3 * (context.num_ranks - 1))  # all from one rank
            assert stats.rows < stats.rows_by_placement
        mega.check()


@on_ranks("hoppers")
def test_replays_split_anew(context: RankContext) -> None:
    """A captured call splits each batch by its own routes, and pulls what that asks for, without the host."""
    even, hot = PLACED["row"], HOT["row"]
    layers = [make_layer(case, context.num_ranks, context.device) for case in (even, hot)]
    batches = [inputs(case, layers[0], context.rank) for case in (even, even)]
    batches[1] = (*batches[1][:1], inputs(hot, layers[1], context.rank)[1], *batches[1][2:])
    with make_mega(context, even, layers[0], "nvlink") as mega:
        wants = [mega(*given).clone() for given in batches]
    with (
        make_mega(context, even, layers[0], "nvlink", balance="batch", rows_per_pull=0, spare_slots=1) as mega,
        torch.no_grad(),
    ):
        given = tuple(each.clone() for each in batches[0])
        captured, before = Captured(lambda: mega(*given)), mega.comm.balance_stats()
        for number in (0, 1, 0, 1):
            for mine, now in zip(given, batches[number], strict=True):
                mine.copy_(now)
            captured.replay()
            assert torch.equal(captured.results, wants[number])
        stats = mega.comm.balance_stats()
        assert stats.batches == before.batches + 4
        if context.num_ranks > 1:
            assert stats.split >= before.split + 2
        mega.check()


@on_ranks("two")
def test_refusals(context: RankContext) -> None:
    """Told to all ranks as the layer is made."""
    options = {"num_experts": 4, "hidden": 128, "intermediate": 128, "top_k": 2, "max_tokens_per_rank": 4}
    with pytest.raises(tl.InvalidArgument, match="without a spare slot"):
        tl.MegaMoE(context.group, **options, backend="composed", balance="batch", rows_per_pull=0)  # type: ignore[arg-type]
