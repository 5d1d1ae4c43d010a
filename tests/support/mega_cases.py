"""Layers and tokens for tests of MegaMoE, and what the reference says that comes out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import tokenloom as tl
from tokenloom import reference
from tokenloom.ops import quant
from tokenloom.ops.quant.weights import padded_weights_for
from tokenloom.runtime.processes import RankContext

BF16 = torch.bfloat16
WHOLE_LIMIT, ROW_LIMIT = 1e-3, 5e-3
"""Of 1 - 2 sum(xy) / sum(x^2 + y^2), over all values and for the worst row: sums of float32 and of float64 quantise
some activations to neighbouring codes."""


@dataclass(frozen=True)
class Case:
    """One layer and its tokens, for a group of any size.

    Attributes:
        why: what goes wrong without this case.
        tokens: of rank r: ``tokens[r % len(tokens)]``.
        pick: how experts are drawn: "distinct", "repeats", "one expert" (the last), "none".
        unused: share of -1.
        quantised: x is FP8 already.
        shared: number of shared experts.
        activation: of all experts. biased: both products have biases.
    """

    why: str
    tokens: tuple[int, ...] = (70, 33, 0, 64)
    experts_per_rank: int = 4
    hidden: int = 512
    intermediate: int = 256
    top_k: int = 2
    pick: str = "distinct"
    unused: float = 0.0
    clamp: float | None = None
    powers: bool = False
    fast_math: bool = True
    quantised: bool = False
    shared: int = 0
    activation: tl.Activation | str = "swiglu"
    biased: bool = False
    recipe: str = "block"
    keep: str = "fp8"


ROW_CASES = {
    "by row": Case("one scale for a row", recipe="row"),
    "by row, fp8": Case("x and its scales come as they are sent", recipe="row", quantised=True),
    "by row, odd widths": Case("no power of two", recipe="row", hidden=384, intermediate=640, powers=True),
    "by row, one block": Case("one tile of activations", recipe="row", hidden=128, intermediate=128),
    "by row, wide": Case(
        "several parts of a token", recipe="row", hidden=2304, intermediate=128, experts_per_rank=1, tokens=(6, 3)
    ),
    "by row, many tokens": Case("several tiles of an expert", recipe="row", tokens=(700, 500), intermediate=768),
    "by row, shared": Case(
        "all that experts have", recipe="row", shared=1, biased=True, clamp=1.0, tokens=(150, 0, 33)
    ),
    "by row, four bits": Case(
        "weights are decoded, two strips and one",
        recipe="row",
        keep="four_bits",
        hidden=384,
        shared=1,
        tokens=(140, 3),
    ),
    "by row, both": Case("only few tokens read four bits", recipe="row", keep="both", tokens=(600, 20), biased=True),
    "by row, as real models": Case(
        "wide rows", recipe="row", hidden=7168, intermediate=2048, experts_per_rank=2, tokens=(40, 130)
    ),
}

PADDED_CASES = {
    "padded": Case("widths that are no multiples of 128", hidden=144, intermediate=80),
    "padded, two blocks": Case("the last of two blocks is short", hidden=208, intermediate=176, top_k=3, unused=0.3),
    "padded hidden": Case("experts are as wide as kernels", hidden=144, intermediate=128, shared=1),
    "padded intermediate": Case("tokens are as wide as kernels", hidden=256, intermediate=80, shared=1),
    "padded, fp8": Case("scales are of a short block", hidden=144, intermediate=176, quantised=True, shared=1),
    "padded gpt_oss": Case(
        "an up of 0 is 1 with the offset", hidden=208, intermediate=80, activation="swigluoai", biased=True, shared=1
    ),
    "padded, powers": Case("other scales", hidden=144, intermediate=176, powers=True, fast_math=False),
    "padded, by row": Case("one scale for a row", hidden=208, intermediate=176, recipe="row", unused=0.3),
    "padded, by row, fp8": Case("x as it is sent", hidden=144, intermediate=80, recipe="row", quantised=True),
    "padded, four bits": Case(
        "zeros are packed too", hidden=160, intermediate=96, recipe="row", keep="four_bits", biased=True, shared=1
    ),
    "padded gpt_oss, by row": Case(
        "all of it", hidden=144, intermediate=176, recipe="row", activation="swigluoai", biased=True, shared=1
    ),
}

CASES = {
    "plain": Case("the usual case: unequal tokens"),
    "fp8": Case("x and its scales come as they are sent", quantised=True),
    "no wide scales": Case("rows of scales that are no multiples of 16 bytes", hidden=384, intermediate=640),
    "one block": Case("K of a GEMM is one block", hidden=128, intermediate=128),
    "top8": Case("eight terms in a sum, several experts of a token on one rank", top_k=8, experts_per_rank=8),
    "top32": Case("the largest K", top_k=32, pick="repeats", tokens=(9, 5)),
    "repeats": Case("the same expert twice is two routes of one row", pick="repeats", top_k=4, experts_per_rank=1),
    "masked": Case("-1 in any place, whole rows of -1", unused=0.6, top_k=3),
    "all masked": Case("tokens without routes are 0", pick="none"),
    "one expert": Case(
        "all routes of all tokens on one expert: the largest list", pick="one expert", tokens=(150, 90)
    ),
    "many experts": Case("most experts are empty", experts_per_rank=40, tokens=(5, 3)),
    "no tokens": Case("nobody has any", tokens=(0,)),
    "one token": Case("M = 1", tokens=(1,)),
    "many tokens": Case("several tiles of an expert", tokens=(700, 500)),
    "clamp": Case("gates and ups are limited", clamp=0.7),
    "powers of two": Case("scales of x and of activations", powers=True),
    "exact functions": Case("the other exponential", fast_math=False, clamp=20.0),
    "shared expert": Case("every token goes to it, those without routes too", unused=0.5, shared=1),
    "two shared experts": Case("x as it is sent, of odd sizes", quantised=True, shared=2, hidden=384, top_k=30),
    "shared and tiles": Case(
        "several tiles of a shared expert", shared=1, powers=True, clamp=1.0, tokens=(300, 0, 129)
    ),
    "gpt_oss": Case("everything that its experts have", activation="swigluoai", biased=True, top_k=3, unused=0.3),
    "biases": Case("rows of 128 columns, shared experts", biased=True, shared=1, hidden=384, tokens=(150, 0, 33)),
    "geglu": Case("another function, biased", activation="geglu", biased=True, powers=True),
    "clamped geglu_tanh": Case("a limit of its own", activation="geglu_tanh", clamp=0.7, fast_math=False),
    "gated relu2": Case("most activations are 0", activation=tl.Activation("relu2", up_offset=-0.5)),
    "as real models": Case("wide rows", hidden=7168, intermediate=2048, experts_per_rank=2, top_k=2, tokens=(40, 130)),
    **ROW_CASES,
    **PADDED_CASES,
}


@dataclass(frozen=True)
class Layer:
    """Weights of all experts, shared ones last, and inputs of all ranks."""

    w1: torch.Tensor
    w1_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    w1_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


def make_layer(case: Case, num_ranks: int, device: torch.device, seed: int = 0) -> Layer:
    generator = torch.Generator(device).manual_seed(seed)
    experts, width, hidden = num_ranks * case.experts_per_rank, case.intermediate, case.hidden

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    # Blocks of many magnitudes, so that a scale of the wrong block shows; gates in silu's curved part.
    def of_blocks(parts: int, rows: int, columns: int) -> torch.Tensor:
        blocks = randn(experts + case.shared, parts, -(-rows // 128), -(-columns // 128)).exp()
        return blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :rows, :columns].flatten(1, 2)

    w1 = randn(experts + case.shared, 2 * width, hidden) / hidden**0.5
    w1 *= of_blocks(2, width, hidden)
    w2 = randn(experts + case.shared, hidden, width) / width**0.5
    w2 *= of_blocks(1, hidden, width)
    xs, all_ids, weights = [], [], []
    for rank in range(num_ranks):
        tokens = case.tokens[rank % len(case.tokens)]
        xs.append((randn(tokens, hidden) * randn(tokens, 1).exp()).to(BF16))
        draws = torch.rand(tokens, max(experts, case.top_k), generator=generator, device=device)
        ids = draws.argsort(1)[:, : case.top_k] % experts
        if case.pick == "repeats":
            ids = (draws[:, : case.top_k] * experts).long()
        if case.pick in ("one expert", "none"):
            ids = torch.full_like(ids, experts - 1 if case.pick == "one expert" else -1)
        ids[torch.rand(ids.shape, generator=generator, device=device) < case.unused] = -1
        all_ids.append(ids)
        weights.append(torch.rand(ids.shape, generator=generator, device=device) + 0.1)
    biases = (randn(len(w1), 2 * width), randn(len(w2), hidden)) if case.biased else (None, None)
    if case.keep == "fp8":
        quantised = (*quantised_weights(w1, case.recipe, parts=2), *quantised_weights(w2, case.recipe))
    else:
        quantised = (*four_bit_weights(w1), *four_bit_weights(w2))
    return Layer(*quantised, xs, all_ids, weights, *biases)


def quantised_weights(w: torch.Tensor, recipe: str, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Of any width, with scales of blocks that begin with each part of the rows. The last ones may be small."""
    if recipe == "row":
        codes, scales = quant.quantize_fp8(widened(w), recipe="row")
        return narrowed(codes, w.shape[-1]), scales
    apart = w.unflatten(1, (parts, -1))
    rows = widened(apart.transpose(2, 3)).transpose(2, 3)
    codes, scales = quant.quantize_fp8_blocks(widened(rows))
    codes = codes.view(torch.uint8)[:, :, : apart.shape[2], : apart.shape[3]].flatten(1, 2).view(codes.dtype)
    return codes, scales.flatten(1, 2)


def four_bit_weights(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As FP8 with scales of channels: each 32 values are rounded to E2M1 times a power of two."""
    groups = w.unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    exponents = torch.frexp(largest).exponent - 3
    exponents = exponents.maximum(exponents.amax(-2, keepdim=True) - 11)
    values = torch.tensor(quant.four_bits.MAGNITUDES, device=w.device)
    middles = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(torch.ldexp(groups.abs(), -exponents), middles)
    codes = torch.where(groups < 0, codes + 8, codes).flatten(-2).unflatten(-1, (-1, 2))
    packed = (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8)
    scales = (exponents[..., 0] + 127).to(torch.uint8)
    codes, scales, report = padded_weights_for("row", packed, scales, four_bits=tl.MXFP4)
    assert str(report) == "encoded exactly"
    return narrowed(codes[:, : w.shape[1]], w.shape[2]), scales[:, : w.shape[1]].contiguous()


def widened(x: torch.Tensor) -> torch.Tensor:
    """With zeros up to a multiple of 128 in the last dimension."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 128))


def narrowed(codes: torch.Tensor, width: int) -> torch.Tensor:
    return codes.view(torch.uint8)[..., :width].contiguous().view(codes.dtype)


def expected(case: Case, layer: Layer, rank: int) -> torch.Tensor:
    """Of one rank's tokens."""
    form = tl.Activation.of(case.activation)
    return reference.fused_layer(
        layer.xs[rank],
        layer.ids[rank],
        layer.weights[rank],
        layer.w1,
        layer.w1_scales,
        layer.w2,
        layer.w2_scales,
        w1_bias=layer.w1_bias,
        w2_bias=layer.w2_bias,
        num_shared_experts=case.shared,
        activation=form if case.clamp is None else replace(form, limit=case.clamp),
        recipe=case.recipe,
        power_of_two_scales=case.powers,
    ).to(layer.xs[rank].device)


def difference(got: torch.Tensor, want: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    got, want = got.double(), want.double()
    norm = (got.square() + want.square()).sum(dim)
    return torch.where(norm > 0, 1 - 2 * (got * want).sum(dim) / norm, 0)


def make_mega(context: RankContext, case: Case, layer: Layer, backend: str = "nvlink", **options: Any) -> tl.MegaMoE:
    """The layer of a case with its weights loaded: those of this rank, under a placement those of all experts."""
    mega = tl.MegaMoE(
        context.group,
        num_experts=len(layer.w1) - case.shared,
        hidden=case.hidden,
        intermediate=case.intermediate,
        top_k=case.top_k,
        max_tokens_per_rank=max(1, *(len(x) for x in layer.xs)),
        activation=case.activation,
        activation_clamp=case.clamp,
        fast_math=case.fast_math,
        recipe=case.recipe,
        power_of_two_scales=case.powers,
        num_shared_experts=case.shared,
        backend=backend,
        device=context.device,
        **options,
    )
    first, last = context.rank * case.experts_per_rank, (context.rank + 1) * case.experts_per_rank
    if mega.comm.placement is not None:
        first, last = 0, mega.comm.plan.num_experts
    mine = torch.arange(first, last)
    mine = torch.cat([mine, torch.arange(len(layer.w1) - case.shared, len(layer.w1))]).to(context.device)

    def of_this_rank(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8)[mine].view(tensor.dtype)

    biases = (None if bias is None else bias[mine] for bias in (layer.w1_bias, layer.w2_bias))
    mega.load_weights(
        *(of_this_rank(w) for w in (layer.w1, layer.w2, layer.w1_scales, layer.w2_scales)),
        **dict(zip(("w1_bias", "w2_bias"), biases, strict=True)),
        keep=case.keep,
    )
    return mega


def inputs(case: Case, layer: Layer, rank: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    x = layer.xs[rank]
    if not case.quantised:
        return x, layer.ids[rank], layer.weights[rank]
    codes, scales = quant.quantize_fp8(widened(x), power_of_two_scales=case.powers, recipe=case.recipe)
    return (narrowed(codes, case.hidden), scales), layer.ids[rank], layer.weights[rank]


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (BF16, want.shape)
    assert not got.isnan().any()
    if got.numel():
        assert difference(got, want) < WHOLE_LIMIT
        assert (difference(got, want, -1) < ROW_LIMIT).all()
