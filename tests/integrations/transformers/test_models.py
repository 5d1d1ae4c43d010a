"""Models of transformers on tokenloom give what the unmodified models give: logits, all gradients, generated tokens.

They need the extra ``clients``. Each rank also runs the unmodified model, on the batches of all ranks one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.transformers import models
from tokenloom.runtime.processes import RankContext, RankPool

Batch = tuple[int, int]
"""Sequences, and tokens of each."""
BATCHES: dict[str, tuple[Batch, ...]] = {
    "equal": ((2, 6),) * 4,
    "ragged": ((2, 5), (3, 9), (3, 2), (1, 1)),
    "an_empty_rank": ((2, 5), (1, 4), (1, 3), (2, 2)),
    "one_expert": ((4, 1),) * 4,
    "one_token": ((1, 1),) * 4,
}
"""Of each rank. Tokens of "one_expert" are all the same: they go to the same K experts, and none to others.
In "ragged" one rank alone has more tokens than any before."""
EMPTY = ("an_empty_rank", 1)
"""This rank's tokens go around the experts of this batch. The models themselves take no batch without tokens."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Of the largest value of a tensor: sums in other orders."""
QUERIES_AND_KEYS = ("q_proj", "k_proj", "q_norm", "k_norm")
FolderOf = Callable[[str, RankPool], Path]


def batch_of(name: str, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a rank, and factors of its logits in the loss."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = BATCHES[name][rank]
    tokens = torch.randint(3, models.VOCABULARY, shape, generator=generator)
    if name == "one_expert":
        tokens = torch.full(shape, 7)
    return tokens.to(device), torch.randn(*shape, models.VOCABULARY, generator=generator).to(device)


@contextmanager
def no_tokens_for_experts(model: torch.nn.Module, wanted: bool) -> Iterator[None]:
    """Inside, experts get no tokens and give zeros."""
    hooks: list[Any] = []

    def leave_out(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        module.left_out = len(given[0])
        return tuple(each[:0] for each in given)

    def put_back(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out, out.new_zeros(module.left_out, out.shape[1])])

    if wanted:
        for module in models.experts_of(model).values():
            hooks += [module.register_forward_pre_hook(leave_out), module.register_forward_hook(put_back)]
    yield
    for hook in hooks:
        hook.remove()


def near(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    # A query that sees one key alone has no gradient, but for rounding, which depends on the processor.
    least = 1.0 if what.startswith("one_") and any(part in what for part in QUERIES_AND_KEYS) else 1e-3
    limit = TOLERANCE[want.dtype] * max(least, want.abs().max().item() if want.numel() else 0)
    if want.dtype == torch.bfloat16 and what.startswith("one_expert: gradient"):
        limit *= 4  # tokens that are alike are rounded alike, so that errors add up: measured, 2.3
    torch.testing.assert_close(got, want, rtol=0, atol=limit, msg=lambda text: f"{what}: {text}")


def whole(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A gradient of all ranks. Collective."""
    if tensor is None:
        return torch.zeros_like(like)
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(
    context: RankContext, family: str, folder: Path, how: str, names: list[str], implementation: str = "tokenloom"
) -> None:
    """Logits of each rank, and gradients of the mean of the losses."""
    model = models.load(context, folder, models.distributed(family, context.num_ranks, how, implementation))
    plain = models.load(context, folder)
    holders = {"tp": context.num_ranks, "both": 2}.get(how, 1)  # ranks that hold the same batch
    own, sources = context.rank // holders, range(context.num_ranks // holders)
    for name in names:
        model.zero_grad()
        plain.zero_grad()
        for source in sources:
            tokens, factors = batch_of(name, source, context.device)
            with no_tokens_for_experts(plain, (name, source) == EMPTY):
                want = plain(tokens, use_cache=False).logits
            ((want * factors).sum() / len(sources)).backward()
            if source == own:
                expected = want.detach()
        tokens, factors = batch_of(name, own, context.device)
        with no_tokens_for_experts(model, (name, own) == EMPTY):
            got = model(tokens, use_cache=False).logits
        (got * factors).sum().backward()
        # Some families compute logits in bfloat16 and give them in float32.
        near(got.detach().to(plain.dtype), expected.to(plain.dtype), f"{name}: logits")
        gradients = {key: whole(each.grad, plain.get_parameter(key)) for key, each in model.named_parameters()}
        for key, each in plain.named_parameters():
            near(gradients[key], whole(each.grad, each), f"{name}: gradient of {key}")
        experts = [key for key in gradients if ".experts." in key]
        assert experts
        assert all(gradients[key].abs().max() > 0 for key in experts)
    models.check_use(context, model)


FEW_FAMILIES = ("qwen3_moe", "gpt_oss")
FSDP_BATCHES = [name for name in BATCHES if name != "one_token"]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_logits_and_gradients(pool: RankPool, folder_of: FolderOf, family: str) -> None:
    pool.run(compare, family, folder_of(family, pool), "fsdp", FSDP_BATCHES)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_with_the_experts_of_the_model(pool: RankPool, folder_of: FolderOf, family: str) -> None:
    if pool.num_ranks > 2:
        pytest.skip("two ranks show it")
    pool.run(compare, family, folder_of(family, pool), "fsdp", FSDP_BATCHES, models.OWN_EXPERTS)


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_without_waiting_for_counts(pool: RankPool, folder_of: FolderOf, family: str) -> None:
    pool.run(compare, family, folder_of(family, pool), "fsdp", FSDP_BATCHES, models.BOUNDED)


def test_on_two_nodes(pool: RankPool, folder_of: FolderOf) -> None:
    """Four ranks as 2 x 2, by one option."""
    if (pool.num_ranks, pool.device) != (4, "cpu"):
        pytest.skip("no nodes of two, or none that were tried")
    pool.run(compare, "qwen3_moe", folder_of("qwen3_moe", pool), "fsdp", ["ragged"], models.NODES)


@pytest.mark.parametrize("family", FEW_FAMILIES)
@pytest.mark.parametrize("how", ["tp", "copies", "both"])
def test_other_meshes(pool: RankPool, folder_of: FolderOf, family: str, how: str) -> None:
    """Ranks that hold the same tokens, fewer than there are ranks too; experts that several ranks hold."""
    names = ["equal", "ragged", "one_token"] if how == "tp" else ["equal", "ragged"]
    if how != "tp" and pool.num_ranks == 2:
        pytest.skip("two ranks have no such mesh")
    pool.run(compare, family, folder_of(family, pool), how, names)


def train(context: RankContext, family: str, folder: Path, to: Path, steps: int = 3) -> None:
    """A few steps with layers that are computed again in backward, and batches that change. Then it is saved."""
    model = models.load(context, folder, models.distributed(family, context.num_ranks, "fsdp")).train()
    plain = models.load(context, folder).train()
    model.activation_checkpointing_enable()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, plain)]
    for name in FSDP_BATCHES[:steps]:
        for rank in range(context.num_ranks):
            tokens, factors = batch_of(name, rank, context.device)
            ((plain(tokens, use_cache=False).logits * factors).sum() / context.num_ranks).backward()
        tokens, factors = batch_of(name, context.rank, context.device)
        (model(tokens, use_cache=False).logits * factors).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained = {key: whole(each.detach(), each) for key, each in model.named_parameters()}
    before = models.load(context, folder)
    for key, each in plain.named_parameters():
        near(trained[key], each.detach(), f"trained {key}")
        assert ".experts." not in key or not torch.equal(trained[key], before.get_parameter(key))
    model.save_pretrained(to)
    dist.barrier()
    for key, each in models.load(context, to).named_parameters():
        assert torch.equal(trained[key], each.detach())


def test_training(pool: RankPool, folder_of: FolderOf, tmp_path: Path) -> None:
    pool.run(train, "qwen3_moe", folder_of("qwen3_moe", pool), tmp_path / "trained")


def autocast(context: RankContext, folder: Path) -> None:
    """Experts alone, since a router behind rounded layers may choose others."""
    model = models.load(context, folder, models.distributed("mixtral", context.num_ranks, "tp")).float()
    plain = models.load(context, folder).float()
    hidden, ids, weights = models.rows_for_experts(context, 1)
    want, got = (next(iter(models.experts_of(each).values())) for each in (plain, model))
    expected = want(hidden, ids, weights)
    with torch.autocast(context.device.type, torch.bfloat16):
        found = got(hidden, ids, weights)
    assert found.dtype == torch.float32
    assert not torch.equal(found, got(hidden, ids, weights))
    near(found.bfloat16(), expected.bfloat16(), "experts in autocast")


def test_autocast(pool: RankPool, folder_of: FolderOf) -> None:
    pool.run(autocast, folder_of("mixtral", pool))


def generate(context: RankContext, family: str, folder: Path, how: str) -> None:
    """Each rank has prompts of its own, or with "tp" all have the same, with "both" every two."""
    model = models.load(context, folder, models.distributed(family, context.num_ranks, how))
    plain = models.load(context, folder)
    source = {"tp": 0, "both": context.rank // 2}.get(how, context.rank)
    tokens, _ = batch_of("ragged", source, context.device)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6, "do_sample": False}
    found = model.generate(tokens, **options)
    assert found.shape[1] > tokens.shape[1]
    if context.device.type == "cpu":
        assert torch.equal(found, plain.generate(tokens, **options))
        return
    with torch.no_grad():  # rounded logits may be equal: any of the largest is right
        logits = plain(found, use_cache=False).logits[:, tokens.shape[1] - 1 : -1].float()
    chosen = logits.gather(2, found[:, tokens.shape[1] :, None])
    ended = (found[:, tokens.shape[1] : -1] == models.COMMON["eos_token_id"]).cumsum(1) > 0
    chosen[:, 1:][ended] = logits.amax(2, keepdim=True)[:, 1:][ended]  # padding is not chosen
    near(chosen.bfloat16(), logits.amax(2, keepdim=True).bfloat16(), "logits of generated tokens")


@pytest.mark.parametrize("family", models.FAMILIES)
def test_generation(pool: RankPool, folder_of: FolderOf, family: str) -> None:
    if pool.num_ranks > 2 and family not in FEW_FAMILIES:
        pytest.skip("two ranks show it")
    pool.run(generate, family, folder_of(family, pool), "fsdp")


@pytest.mark.parametrize("how", ["tp", "both"])
def test_generation_from_a_shared_batch(pool: RankPool, folder_of: FolderOf, how: str) -> None:
    """Ranks may share their batch with some ranks only, and know nothing of those of others."""
    pool.run(generate, "mixtral", folder_of("mixtral", pool), how)


def choose(context: RankContext, folder: Path) -> None:
    model = models.load(context, folder, models.distributed("mixtral", context.num_ranks, "tp"))
    experts = next(iter(models.experts_of(model).values())).tokenloom
    with torch.no_grad():
        model(torch.ones(1, 7, dtype=torch.int64, device=context.device))
        comm, share = experts.shared.communicators.all()[0], -(-7 // context.num_ranks)
        rows = experts.run_options(comm, share, 2).pool_rows
        assert rows == 2 * 8  # the power of two above top_k * 7 tokens, some of them padding
        assert experts.run_options(comm, 2**22, 2).pool_rows is None, "more than there is room for"
        assert experts.run_options(comm, None, 2).pool_rows is None, "ranks do not know what others have"
    assert experts.run_options(comm, share, 2).pool_rows is None, "backward keeps what it received"
    assert comm.plan.max_tokens_per_rank == 1 << (share - 1).bit_length()


def test_a_shared_batch_waits_for_no_counts(pool: RankPool, folder_of: FolderOf) -> None:
    """All ranks know how many tokens each of them has."""
    pool.run(choose, folder_of("mixtral", pool))
