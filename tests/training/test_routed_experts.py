"""The switches of a layer change its time and its memory, and not one bit of its results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.on_ranks import on_ranks
from tokenloom.backends.peers import buffers
from tokenloom.ops import expert_gemms, experts
from tokenloom.runtime.processes import RankContext
from tokenloom.training import pieces as piecewise
from tokenloom.training import routed_experts
from tokenloom.training.shards import local_part

pytestmark = pytest.mark.slow_on(4)

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 96, 8, 3
TOKENS = (37, 0, 64, 5, 1, 50, 0, 64)
POOL = 360
SWITCHES = {
    "overlap": {"overlap": True},
    "redispatch": {"redispatch_in_backward": True, "overlap": False},
    "redispatch beside GEMMs": {"redispatch_in_backward": True},
    "pool": {"pool_rows": POOL, "overlap": False},
    "pool, redispatch, overlap": {"pool_rows": POOL, "redispatch_in_backward": True},
}


def layers_of(
    context: RankContext, count: int, comm: tl.Communicator | None = None, **options: Any
) -> list[tl.ExpertParallelMoE]:
    """Layers that share a communicator, with weights of their own."""
    layers: list[tl.ExpertParallelMoE] = []
    options = {"shared_intermediate": 32, "dtype": torch.bfloat16, **options}
    for seed in range(count):
        where: dict[str, Any] = {"comm": comm} if comm else {"group": context.group}
        layers.append(
            tl.ExpertParallelMoE(
                **where,
                hidden=HIDDEN,
                intermediate=INTERMEDIATE,
                num_experts=EXPERTS,
                top_k=TOP_K,
                max_tokens_per_rank=None if comm else max(TOKENS),
                device=context.device,
                **options,
            )
        )
        layers[-1].reset_parameters(seed=seed)
        comm = layers[-1].comm
    return layers


def one_step(context: RankContext, all_to_first: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients of three layers in a row. ``all_to_first``: many tokens, all for the first experts."""
    layers = layers_of(context, 3, **options)
    if all_to_first:
        for layer in layers:
            torch.nn.init.zeros_(layer.router_weight)
    generator = torch.Generator().manual_seed(context.rank)
    num_tokens = max(TOKENS) if all_to_first else TOKENS[context.rank]
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(context.device, torch.bfloat16)
    factor = torch.randn(x.shape, generator=generator).to(context.device)
    x.requires_grad_()
    out = x
    for layer in layers:
        out = out + layer(out)[0]
    (out.float() * factor).sum().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad}
    for i, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            found[f"{i}.{name}"] = local_part(parameter.grad)
    layers[0].comm.check()
    layers[0].comm.close()
    return found


def four_pieces(engine: Any, options: Any, num_tokens: int) -> list[slice]:
    """Unequal ones; of few tokens some are empty."""
    ends = [0, num_tokens // 3, num_tokens // 2, num_tokens * 7 // 8, num_tokens]
    return [slice(*span) for span in pairwise(ends)]


@contextmanager
def forced(pieces: bool, few_rows: int = expert_gemms.FEW_ROWS) -> Iterator[None]:
    """Many tokens: they go in pieces, and experts are multiplied one by one."""
    with ExitStack() as stack:
        if pieces:
            stack.enter_context(mock.patch.object(routed_experts, "cut", four_pieces))
        stack.enter_context(mock.patch.object(expert_gemms, "FEW_ROWS", few_rows))
        yield


GPT_OSS: dict[str, Any] = {
    "activation": "swigluoai",
    "biases": True,
    "weight_layout": tl.WeightLayout(transposed=True, interleaved=True),
}
"""Everything that experts can have beside what they have by default."""


def compare_switch(
    context: RankContext, name: str, pieces: bool, few_rows: int, form: dict[str, Any] | None = None
) -> None:
    with forced(pieces, few_rows):
        plain = one_step(context, overlap=False, **(form or {}))
        switched = one_step(context, **SWITCHES[name], **(form or {}))
    for key, value in plain.items():
        assert torch.equal(switched[key], value), key


@pytest.mark.sampled(3)
@pytest.mark.slow_on(1, 4)
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", SWITCHES)
def test_same_bits(ranks: Ranks, name: str, pieces: bool) -> None:
    ranks.run(compare_switch, name, pieces, expert_gemms.FEW_ROWS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", ["redispatch beside GEMMs", "pool, redispatch, overlap"])
def test_same_bits_of_other_forms(ranks: Ranks, name: str, pieces: bool) -> None:
    """Biases have gradients of their own in each piece, and kept tensors more."""
    ranks.run(compare_switch, name, pieces, expert_gemms.FEW_ROWS, GPT_OSS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["overlap", "redispatch beside GEMMs"])
def test_same_bits_of_many_rows(hoppers: Ranks, name: str) -> None:
    """GEMMs expert by expert, on two streams."""
    hoppers.run(compare_switch, name, True, 0)


@on_ranks
@pytest.mark.sampled(3)
@pytest.mark.parametrize("redispatch", [False, True], ids=["keeps rows", "keeps x"])
@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["plain", "gpt_oss"])
def test_pieces_are_the_whole(context: RankContext, form: dict[str, Any], redispatch: bool) -> None:
    options = {"redispatch_in_backward": redispatch, **form}
    whole = one_step(context, **options)
    with forced(pieces=True):
        pieces = one_step(context, **options)
    for key, value in whole.items():
        # Rows are multiplied alike; gradients of weights are four sums, each rounded.
        limit = 0.0 if key == "out" or not value.numel() else 2**-6 * float(value.abs().max())
        torch.testing.assert_close(pieces[key], value, rtol=0, atol=limit, msg=lambda text, k=key: f"{k}: {text}")


@on_ranks
@pytest.mark.parametrize("name", ["layout", "activation", "bias"])
def test_wrong_weights_on_one_rank(context: RankContext, name: str) -> None:
    """That rank says what is wrong, the others that it failed, and the next call works."""
    (layer,) = layers_of(context, 1, shared_intermediate=0, **GPT_OSS)
    x = torch.randn(5, HIDDEN, device=context.device).to(torch.bfloat16)
    ids = torch.zeros(5, TOP_K, dtype=torch.int64, device=context.device)
    weights = torch.ones(5, TOP_K, device=context.device)

    def run(**changes: Any) -> torch.Tensor:
        given = {name: local_part(getattr(layer.experts, name)) for name in ("w1", "w2", "w1_bias", "w2_bias")}
        forms = {"activation": "swigluoai", "weight_layout": GPT_OSS["weight_layout"]}
        options = piecewise.RunOptions(layer.experts.strategy)
        out = routed_experts.routed_experts(layer.comm, options, x, ids, weights, **{**given, **forms, **changes})
        layer.comm.check()
        return out

    wanted = run()
    changes = {
        "layout": {"weight_layout": tl.WeightLayout()},
        "activation": {"activation": "swish"},
        "bias": {"w2_bias": torch.zeros(3, device=context.device)},
    }[name]
    error = {"layout": tl.ShapeMismatch, "activation": tl.InvalidArgument, "bias": tl.ShapeMismatch}[name]
    with pytest.raises(error if context.rank == 0 else tl.PeerError):
        run(**(changes if context.rank == 0 else {}))
    assert torch.equal(run(), wanted)
    layer.comm.close()


def count_pieces(context: RankContext) -> list[int]:
    (layer,) = layers_of(context, 1)
    options = piecewise.RunOptions(layer.experts.strategy)
    rows = layer.comm.plan.max_tokens_per_rank * TOP_K // layer.comm.plan.experts_per_rank
    counts = []
    for few, tokens, pool_rows in ((rows // 2, 5, None), (rows // 3, 5, None), (1, 0, None), (1, 5, 9)):
        with mock.patch.object(piecewise, "FEW_ROWS", few):
            slices = piecewise.cut(layer.comm.engine, replace(options, pool_rows=pool_rows), tokens)
        assert [index for span in slices for index in range(tokens)[span]] == list(range(tokens))
        counts.append(len(slices))
    layer.comm.close()
    return counts


@pytest.mark.gpu
def test_many_tokens_go_in_pieces(hoppers: Ranks) -> None:
    """On a rank that has none, too. What the comparisons above force does happen."""
    assert hoppers.run(count_pieces) == [[1, 2, 2, 1]] * hoppers.num_ranks


@on_ranks
def test_redispatch_keeps_pre_activations_only(context: RankContext) -> None:
    (layer,) = layers_of(context, 1, redispatch_in_backward=True)
    x = torch.randn(64, HIDDEN, device=context.device).to(torch.bfloat16).requires_grad_()
    found = layer.saved_activations(x)
    assert [each.shape[1] for each in found if each.num_bytes >= x.numel() * x.element_size()] == [2 * INTERMEDIATE]
    layer.comm.close()


def overflow_pool(context: RankContext) -> tuple[int, bool]:
    (layer,) = layers_of(context, 1, pool_rows=16)
    with torch.no_grad():
        layer.router_weight.zero_()  # all tokens to the first experts
    out, _ = layer(torch.ones(64, HIDDEN, device=context.device, dtype=torch.bfloat16))
    with pytest.raises(tl.CapacityOverflow, match=r"pool_rows|capacity") as caught:
        layer.comm.check()
    layer.comm.close()
    return caught.value.needed, bool(out.isnan().any())


def test_a_pool_too_small_says_what_would_do(ranks: Ranks) -> None:
    found = ranks.run(overflow_pool)
    assert found == [(found[0][0], True)] * ranks.num_ranks
    assert found[0][0] >= 64 * TOP_K


@on_ranks("hoppers")
@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", ["overlap", "redispatch beside GEMMs"])
def test_more_rows_than_a_region_holds(context: RankContext, name: str, pieces: bool) -> None:
    """They come by a slower way, on all ranks; gradients went by it only on the ranks that have too many."""
    options = SWITCHES[name]
    with forced(pieces):
        wanted = one_step(context, all_to_first=True, overlap=False)
        with mock.patch.object(buffers, "EXPERT_ROOM", -1e9):  # room for layout "token" alone
            found = one_step(context, all_to_first=True, **options)
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def forward_and_check(layer: tl.ExpertParallelMoE, x: torch.Tensor) -> None:
    layer(x)
    layer.comm.check()


def fail_in_piece(context: RankContext, number: int, combine: str) -> str:
    calls = 0

    def gemms(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if context.rank == 0 and calls == number + 1:
            raise RuntimeError("no memory left")
        return expert_gemms.gemms_for(*args)

    (layer,) = layers_of(context, 1, strategy=tl.Strategy(combine=combine))
    x = torch.randn(16, HIDDEN, device=context.device).to(torch.bfloat16).requires_grad_()
    with forced(pieces=True), mock.patch.object(experts, "gemms_for", gemms):
        with pytest.raises(RuntimeError if context.rank == 0 else tl.PeerError) as caught:
            forward_and_check(layer, x)
        if context.rank:
            assert isinstance(caught.value, tl.PeerError)
            assert caught.value.rank == 0
        layer.comm.check()
        layer(x)[0].sum().backward()  # goes on
        layer.comm.check()
    layer.comm.close()
    return type(caught.value).__name__


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combine", ["dedup", "all_to_all"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_fault_in_a_piece(ranks: Ranks, number: int, combine: str) -> None:
    """The other ranks hear of it, though transfers of other pieces are on their way, or make buffers of their own."""
    found = ranks.run(fail_in_piece, number, combine)
    assert found == ["RuntimeError"] + ["PeerError"] * (ranks.num_ranks - 1)


def fail_in_layer(context: RankContext, options: dict[str, Any]) -> str:
    """Rank 0 fails in the first of two layers, and nobody asks for outcomes before the next step."""
    layers = layers_of(context, 2, **options)
    x = torch.randn(16, HIDDEN, device=context.device).to(torch.bfloat16)

    def step(gemms: Any = expert_gemms.gemms_for) -> torch.Tensor:
        out = x.clone().requires_grad_()
        with mock.patch.object(experts, "gemms_for", gemms):
            for layer in layers:
                out = out + layer(out)[0]
        out.float().sum().backward()
        return out.detach()

    def no_memory(*args: Any) -> Any:
        raise RuntimeError("no memory left")

    wanted = step()
    with pytest.raises((RuntimeError, tl.PeerError)) as caught:
        step(no_memory if context.rank == 0 else expert_gemms.gemms_for)
    for _ in range(2):
        assert torch.equal(step(), wanted)
    layers[0].comm.check()
    layers[0].comm.close()
    return type(caught.value).__name__


LOSSES = {"balance_coef": 0.1}
"""Their sums over ranks are collectives too, which a rank that fails must not leave out, nor the others run alone."""


@pytest.mark.parametrize("options", [{}, LOSSES], ids=["plain", "losses"])
def test_a_fault_in_the_first_of_two_layers(ranks: Ranks, options: dict[str, Any]) -> None:
    found = ranks.run(fail_in_layer, options)
    assert found == ["RuntimeError"] + ["PeerError"] * (ranks.num_ranks - 1)


def fail_before_a_pool(context: RankContext, options: dict[str, Any], runs_before: bool) -> str:
    """``options`` of the second layer, whose call it is that fails; has it run before, so that it has its buffers?"""
    layers = layers_of(context, 1, pool_rows=POOL, dtype=options.get("dtype", torch.bfloat16))
    layers += layers_of(context, 1, layers[0].comm, pool_rows=POOL, **options)
    x = torch.randn(16, HIDDEN, device=context.device).to(torch.bfloat16)
    autocast = torch.autocast(context.device.type, torch.bfloat16, enabled="dtype" in options)
    with autocast:
        wanted = [layer(x)[0] for layer in layers[: 1 + runs_before]]
        layers[0].comm.check()
        with pytest.raises(tl.TokenloomError) as caught:
            forward_and_check(layers[1], x[:, 1:] if context.rank == 0 else x)
        for _ in range(3):
            for layer, result in zip(layers, wanted, strict=False):
                assert torch.equal(layer(x)[0], result)
        layers[1](x)
    layers[0].comm.check()
    layers[0].comm.close()
    return type(caught.value).__name__


@pytest.mark.sampled(4)
@pytest.mark.parametrize("runs_before", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, LOSSES, {"strategy": tl.Strategy("all_gather", "dedup")}, {"dtype": torch.float32}],
    ids=["plain", "losses", "all_gather", "autocast"],
)
def test_bad_input_before_a_pool(ranks: Ranks, options: dict[str, Any], runs_before: bool) -> None:
    """Where nobody waits for counts, the other ranks go on to their combine, and so does the one that failed: unless
    they lack a buffer, which all would make together."""
    found = ranks.run(fail_before_a_pool, options, runs_before)
    assert found == ["ShapeMismatch"] + ["PeerError"] * (ranks.num_ranks - 1)


def overflow_in_training(context: RankContext, redispatch: bool) -> int:
    (layer,) = layers_of(context, 1, pool_rows=70, redispatch_in_backward=redispatch)
    x = torch.randn(10, HIDDEN, device=context.device).to(torch.bfloat16)
    too_many = torch.ones(64, HIDDEN, device=context.device, dtype=torch.bfloat16)
    raised = 0
    for given in (x, too_many, x, x):
        given = given.clone().requires_grad_()
        try:
            layer(given)[0].sum().backward()
        except tl.CapacityOverflow:
            raised += 1
        try:
            layer.comm.check()
        except tl.CapacityOverflow:
            raised += 1
    layer.comm.close()
    return raised


@pytest.mark.parametrize("redispatch", [False, True])
def test_an_overflow_is_raised_once(ranks: Ranks, redispatch: bool) -> None:
    """Though backward sends rows and gradients by the same places again."""
    assert ranks.run(overflow_in_training, redispatch) == [1] * ranks.num_ranks


def overflow_without_a_layer(context: RankContext) -> int:
    (layer,) = layers_of(context, 1)
    options = piecewise.RunOptions(layer.experts.strategy, pool_rows=16)
    x = torch.ones(64, HIDDEN, device=context.device, dtype=torch.bfloat16)
    ids = torch.zeros(64, TOP_K, dtype=torch.int64, device=context.device)
    weights = torch.ones(64, TOP_K, device=context.device)
    experts = (local_part(layer.experts.w1), local_part(layer.experts.w2))
    raised = 0
    with torch.no_grad():
        for _ in range(4):
            try:
                routed_experts.routed_experts(layer.comm, options, x, ids, weights, *experts)
            except tl.CapacityOverflow:
                raised += 1
    layer.comm.close()
    return raised


def test_an_overflow_is_raised_without_a_layer(ranks: Ranks) -> None:
    """By a later call, on all ranks alike, though nobody checks."""
    found = ranks.run(overflow_without_a_layer)
    assert found[0] > 0
    assert found == found[:1] * ranks.num_ranks


class NoRoom:
    """A dispatch that arrives and then finds no memory."""

    def __init__(self, pending: Any) -> None:
        self.pending = pending

    def receive(self) -> None:
        self.pending.receive()
        raise RuntimeError("no memory left")


def no_room_for_rows(context: RankContext, number: int, pieces: bool) -> str:
    """Rank 0 has no memory for the rows of a piece, which all have agreed to send."""
    (layer,) = layers_of(context, 1)
    engine: Any = layer.comm.engine
    x = torch.randn(16, HIDDEN, device=context.device).to(torch.bfloat16)
    calls = 0

    def send_dispatch(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        pending = type(engine).send_dispatch(engine, *args)
        return NoRoom(pending) if context.rank == 0 and calls == number + 1 else pending

    with forced(pieces):
        wanted, _ = layer(x)
        engine.send_dispatch = send_dispatch  # of this rank: on the emulator ranks share the class
        with pytest.raises(RuntimeError if context.rank == 0 else tl.PeerError) as caught:
            forward_and_check(layer, x)
        del engine.send_dispatch
        layer.comm.check()
        assert torch.equal(layer(x)[0], wanted)
        layer.comm.check()
    layer.comm.close()
    return type(caught.value).__name__


@pytest.mark.parametrize(("number", "pieces"), [(0, False), (0, True), (1, True), (3, True)])
def test_no_room_for_rows(ranks: Ranks, number: int, pieces: bool) -> None:
    found = ranks.run(no_room_for_rows, number, pieces)
    assert found == ["RuntimeError"] + ["PeerError"] * (ranks.num_ranks - 1)


@on_ranks
def test_too_many_tokens_are_too_many_in_pieces_too(context: RankContext) -> None:
    (layer,) = layers_of(context, 1)
    x = torch.randn(max(TOKENS) + 1, HIDDEN, device=context.device).to(torch.bfloat16)
    with forced(pieces=True), pytest.raises(tl.ShapeMismatch, match=f"max_tokens_per_rank={max(TOKENS) + 1}"):
        layer(x)
    layer.comm.close()


@on_ranks
def test_rows_are_kept_for_the_gradient_of_w1_alone(context: RankContext) -> None:
    (layer,) = layers_of(context, 1)
    x = torch.randn(64, HIDDEN, device=context.device).to(torch.bfloat16).requires_grad_()
    kept = {each.name for each in layer.saved_activations(x)}
    layer.experts.w1.requires_grad_(False)
    assert kept - {each.name for each in layer.saved_activations(x)} == {"RoutedExperts: rows"}
    layer(x)[0].sum().backward()
    assert layer.experts.w1.grad is None
    assert layer.experts.w2.grad is not None
    layer.comm.close()
