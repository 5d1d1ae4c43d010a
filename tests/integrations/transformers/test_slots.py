"""Quantised experts in the slots of a placement: the bits of layers without one, wherever experts lie."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import HOPPER
from tests.integrations.transformers import models, test_four_bits
from tests.integrations.transformers.test_experts import hot_first, make, spread
from tests.integrations.transformers.test_four_bits import WIDTH, folder_of, stored_experts
from tests.integrations.transformers.test_models import batch_of
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext, RankPool

__all__ = ["folder_of"]

FORMS: dict[str, tuple[str, Callable[[slice], Any], int]] = {
    "bfloat16": ("fp8", lambda experts: make("gpt_oss", experts), models.HIDDEN),
    "fp8": ("fp8", lambda experts: stored_experts("fp8", experts), WIDTH),
    "fp4": ("fp8", lambda experts: stored_experts("fp4", experts), WIDTH),
    "four_bits": ("four_bits", lambda experts: stored_experts("fp4", experts), WIDTH),
}
"""How experts are registered, how they are made, and H."""


EMULATED = True
SLOTS = models.EXPERTS + 1
"""Of a rank: all experts fit, and one of them twice."""


@pytest.fixture(autouse=True)
def _skip_other_gpus(request: pytest.FixtureRequest) -> None:
    group = request.getfixturevalue("ranks" if "ranks" in request.fixturenames else "pool")
    if group.device == "cuda" and not HOPPER:
        pytest.skip("the kernels need Hopper GPUs")


def placements(context: RankContext) -> list[tl.Placement]:
    """All ranks have others' experts, and one of them several times; then the last rank alone has any."""
    hot = hot_first(context).to_tensor()
    crowded = torch.arange(models.EXPERTS).flip(0)[None]
    tables = [torch.full((context.num_ranks, SLOTS), -1) for _ in range(2)]
    for table, own in zip(tables, (hot, crowded), strict=True):
        table[-len(own) :, -own.shape[1] :] = own
    return [tl.Placement(table, num_experts=models.EXPERTS) for table in tables]


def layers(context: RankContext, form: str, **options: Any) -> list[Any]:
    """Two layers, which differ, and share a fused one: that of a mesh."""
    kept, of_form, _ = FORMS[form]
    count = models.EXPERTS // context.num_ranks
    local = slice(context.rank * count, (context.rank + 1) * count)
    made = [of_form(local).to(context.device) for _ in range(2)]
    with torch.no_grad():
        for each in made[1].parameters():
            values = each.view(torch.uint8) if each.itemsize == 1 else each
            values.copy_(values.flip(1))  # rows of experts, not experts
    parallel = "transformers.distributed.expert_parallel"
    with mock.patch(f"{parallel}.get_process_group_ranks", return_value=[0]):  # the meshes are none of torch
        first = spread(context, made[0], {"experts": kept, "max_tokens_per_rank": 16, **options})
        return [first, type(first)(made[1], first.ep_mesh, first.tp_mesh)]


@on_ranks
@pytest.mark.slow_on(1, 4)
@pytest.mark.parametrize("form", FORMS)
def test_bits(context: RankContext, form: str) -> None:
    """Slots are filled at the first call of each placement, and at no other."""
    place_experts = import_module("tokenloom.integrations.transformers").place_experts
    hidden, ids, weights = models.rows_for_experts(context, 1 + context.rank, FORMS[form][2])
    given = (hidden.bfloat16(), ids, weights)
    with torch.no_grad():
        want = [each(*given) for each in layers(context, form)]
        assert not torch.equal(*want)
        assert all(each.isfinite().all() and each.any() for each in want)
        placed = layers(context, form, spare_slots=SLOTS - models.EXPERTS // context.num_ranks)
        for placement in (None, *placements(context)):
            if placement is not None:
                place_experts(torch.nn.ModuleList([each.experts for each in placed]), placement)
            for _ in range(2):
                assert all(map(torch.equal, [each(*given) for each in placed], want))
            kept = [each.fused._weights for each in placed]
            assert all(map(torch.equal, [each(*given) for each in placed], want))
            assert all(each.fused._weights is weights for each, weights in zip(placed, kept, strict=True))
        (layer,) = placed[0].shared.fused.made.values()
        assert layer.comm.placement == placements(context)[-1]
        later = layers(context, form, spare_slots=SLOTS - models.EXPERTS // context.num_ranks)
        place_experts(later[0].experts, placements(context)[0])
        assert all(map(torch.equal, [each(*given) for each in later], want))
        (layer,) = later[0].shared.fused.made.values()
        assert layer.comm.placement == placements(context)[0]


@on_ranks("pool")
@pytest.mark.parametrize("where", ["before they travel", "as they are loaded"])
def test_a_fault_of_one_rank(context: RankContext, where: str) -> None:
    """The others, which send weights, hear of it. Then all fill their slots anew."""
    first, second = layers(context, "fp8", placement=placements(context)[0])
    hidden, ids, weights = models.rows_for_experts(context, 1 + context.rank, WIDTH)
    given = (hidden.bfloat16(), ids, weights)
    fails, loads = context.rank == 1, first.fused._load
    early = where == "before they travel"
    if fails and not early:
        first.fused._load = lambda *_: 1 / 0
    kind, said = (tl.errors.NotDifferentiable, "no gradients") if early else (ZeroDivisionError, "division by zero")
    with (
        torch.set_grad_enabled(fails and early),
        pytest.raises(kind if fails else tl.PeerError, match=said),
    ):
        first(given[0].clone().requires_grad_(), *given[1:])
    first.fused._load = loads
    with torch.no_grad():
        for ours, plain in zip((second, first), layers(context, "fp8")[::-1], strict=True):
            assert torch.equal(ours(*given), plain(*given))


def logits(context: RankContext, folder: Path) -> None:
    ours = import_module("tokenloom.integrations.transformers")
    options = {"experts": "fp8", "max_tokens_per_rank": models.MOST_TOKENS}
    config = test_four_bits.packed_config(context, folder)
    ours.register("tokenloom_placed", spare_slots=1, **options)
    plain, placed = (
        test_four_bits.load(context, folder, models.distributed("gpt_oss", context.num_ranks, "fsdp", name), config)
        for name in (models.FP8, "tokenloom_placed")
    )
    tokens, _ = batch_of("ragged", context.rank, context.device)
    with torch.no_grad():
        want = plain(tokens, use_cache=False).logits
        assert torch.equal(placed(tokens, use_cache=False).logits, want)
        ours.place_experts(placed, hot_first(context))
        assert torch.equal(placed(tokens, use_cache=False).logits, want)
    assert "placement: 8 experts in" in ours.describe(placed)


def test_logits(pool: RankPool, folder_of: Callable[[str, RankPool], Path]) -> None:
    """Of a whole model with packed experts and biases, in two layers."""
    pool.run(logits, folder_of("gpt_oss", pool))


@on_ranks("pool")
def test_quantised_experts_of_the_model(context: RankContext) -> None:
    """The code of transformers for them knows no slots; the refusal says what does."""
    said = r"FP8Experts runs the model's own experts \(.*\), which know no placement; register with experts='fp8'"
    with pytest.raises(tl.InvalidArgument, match=said):
        spread(context, stored_experts("fp8", slice(0, 1)), {"spare_slots": 1})
