"""What goes wrong is said by name, on all ranks."""

from __future__ import annotations

import gc
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.transformers import models
from tests.integrations.transformers.test_models import FolderOf
from tests.support.on_ranks import on_ranks
from tokenloom.errors import InvalidArgument, PeerError, ShapeMismatch
from tokenloom.runtime.processes import RankContext, RankPool


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"experts": "mine"}, "experts is 'mine', expected one of auto, model, fp8"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0, expected a positive integer"),
        ({"max_tokens_per_rank": True}, "max_tokens_per_rank is True"),
        ({"experts": "fp8"}, "experts is 'fp8' without max_tokens_per_rank"),
        ({"experts": "four_bits"}, "experts is 'four_bits' without max_tokens_per_rank"),
        ({"pool_rows": 8}, "pool_rows is given without max_tokens_per_rank"),
        ({"spare_slots": -1}, "spare_slots is -1, expected an integer"),
        ({"placement": [[0]]}, "placement is a list, expected a tokenloom.Placement"),
        ({"spare_slots": 1, "experts": "model"}, "experts is 'model' with a placement"),
    ],
)
def test_options(options: dict[str, Any], said: str) -> None:
    register = import_module("tokenloom.integrations.transformers").register
    with pytest.raises(InvalidArgument, match=said):
        register("other", **options)


@pytest.mark.parametrize("which", [0, 1])
def test_a_mesh_of_two_dimensions(which: int) -> None:
    implementation = import_module("tokenloom.integrations.transformers.implementation").TokenloomExperts
    meshes = [SimpleNamespace(ndim=1), SimpleNamespace(ndim=1)]
    meshes[which] = SimpleNamespace(ndim=2, mesh_dim_names=("efsdp", "ep"))
    with pytest.raises(InvalidArgument, match=rf"{('ep', 'tp')[which]}_mesh has dimensions \('efsdp', 'ep'\)"):
        implementation(torch.nn.Identity(), *meshes)


def test_a_model_that_does_not_run_on_it() -> None:
    describe = import_module("tokenloom.integrations.transformers").describe
    assert "no experts of this Identity run on tokenloom; load it with Dist" in describe(torch.nn.Identity())


@on_ranks("pool")
def test_a_family_without_a_plan(context: RankContext) -> None:
    """transformers says so itself."""
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=9)
    model = transformers.LlamaForCausalLM(config)
    distributed = models.distributed("llama", context.num_ranks, "fsdp")
    with pytest.raises(ValueError, match="has no `ep_plan`"):
        model._resolve_parallel_plans(distributed)


def fail(context: RankContext, folder: Any) -> None:
    """The experts are called alone: if a rank failed within the model, FSDP2 would leave out a collective there."""
    model = models.load(context, folder, models.distributed("mixtral", context.num_ranks, "fsdp", models.OWN_EXPERTS))
    experts = next(iter(models.experts_of(model).values()))
    hidden, ids, weights = models.rows_for_experts(context, 1 + context.rank)
    hidden = hidden.to(model.dtype)
    with torch.no_grad():
        before = experts(hidden, ids, weights)
        works = experts.tokenloom._own_experts
        if context.rank == 1:
            experts.tokenloom._own_experts = lambda *_: 1 / 0

        def call() -> None:
            experts(hidden, ids, weights)
            experts.tokenloom.shared.communicators.all()[0].check()  # kernels say it later

        with pytest.raises(ZeroDivisionError if context.rank == 1 else PeerError, match=r"division by zero"):
            call()
        experts.tokenloom._own_experts = works
        assert torch.equal(experts(hidden, ids, weights), before)


def test_experts_that_fail_on_one_rank(pool: RankPool, folder_of: FolderOf) -> None:
    """The others hear of it at once, and the communicator works on."""
    pool.run(fail, folder_of("mixtral", pool))


def pass_too_many(context: RankContext, folder: Any) -> None:
    model = models.load(context, folder, models.distributed("mixtral", context.num_ranks, "fsdp", models.BOUNDED))
    tokens = torch.ones(1, models.MOST_TOKENS + (context.rank == 1), dtype=torch.int64, device=context.device)

    def call() -> None:
        model(tokens)
        model.model.layers[0].mlp.experts.tokenloom.shared.communicators.all()[0].check()  # kernels say it later

    with torch.no_grad(), pytest.raises(ShapeMismatch if context.rank == 1 else PeerError) as found:
        call()
    assert f"{models.MOST_TOKENS + 1} tokens" in str(found.value)


def test_more_tokens_than_were_declared(pool: RankPool, folder_of: FolderOf) -> None:
    pool.run(pass_too_many, folder_of("mixtral", pool))


def load_again(context: RankContext, folder: Any) -> None:
    tokens = torch.ones(1, 3, dtype=torch.int64, device=context.device)
    first = models.load(context, folder, models.distributed("mixtral", context.num_ranks, "fsdp"))
    with torch.no_grad():
        want = first(tokens).logits
        if context.rank == 0:
            del first
            gc.collect()
        second = models.load(context, folder, models.distributed("mixtral", context.num_ranks, "fsdp"))
        assert torch.equal(second(tokens).logits, want)


def test_ranks_collect_a_model_at_different_times(pool: RankPool, folder_of: FolderOf) -> None:
    """Communicators that layers share are not those of a model before, which may be gone on some ranks alone."""
    pool.run(load_again, folder_of("mixtral", pool))
