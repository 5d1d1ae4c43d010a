"""MegaMoE of widths that are no multiples of 128: padded inside, and nothing of that shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import tokenloom as tl
from tests.support.on_ranks import on_ranks
from tokenloom.plan import RECIPES
from tokenloom.runtime.processes import RankContext

EXPERTS, TOP_K, TOKENS, SHARED = 3, 2, 10, 1
HIDDEN, INTERMEDIATE, WIDE_HIDDEN, WIDE_INTERMEDIATE = 208, 80, 256, 128
FP8 = torch.float8_e4m3fn


def make_mega(**options: Any) -> tl.MegaMoE:
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K}
    more = {"max_tokens_per_rank": TOKENS, "num_shared_experts": SHARED, "activation": "swigluoai"}
    return tl.MegaMoE(None, backend="composed", **(sizes | more | options))


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(seed: int = 0, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> dict[str, torch.Tensor]:
    experts = EXPERTS + SHARED
    return {
        "w1": randn(experts, 2 * intermediate, hidden, seed=seed) / 8,
        "w2": randn(experts, hidden, intermediate, seed=seed + 1) / 8,
        "w1_bias": randn(experts, 2 * intermediate, seed=seed + 2),
        "w2_bias": randn(experts, hidden, seed=seed + 3),
    }


def widened(values: torch.Tensor, *widths: int) -> torch.Tensor:
    """With zeros behind the last dimensions, up to these widths."""
    by_dim = [(0, width - size) for width, size in zip(widths, values.shape[-len(widths) :], strict=True)]
    return torch.nn.functional.pad(values, [each for pair in reversed(by_dim) for each in pair])


def widened_weights() -> dict[str, torch.Tensor]:
    """Those of :func:`weights` for a layer that nothing has to be padded in."""
    given = weights()
    w1, w1_bias = (given[name].unflatten(1, (2, -1)) for name in ("w1", "w1_bias"))
    return {
        "w1": widened(w1, WIDE_INTERMEDIATE, WIDE_HIDDEN).flatten(1, 2),
        "w2": widened(given["w2"], WIDE_HIDDEN, WIDE_INTERMEDIATE),
        "w1_bias": widened(w1_bias, WIDE_INTERMEDIATE).flatten(1),
        "w2_bias": widened(given["w2_bias"], WIDE_HIDDEN),
    }


def inputs(hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    topk_weights, ids = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(8)).topk(TOP_K)
    return randn(TOKENS, hidden, seed=9).to(torch.bfloat16), ids, topk_weights


def quantised(recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = tl.quantize_fp8(widened(inputs()[0], WIDE_HIDDEN), recipe=recipe)
    return codes.view(torch.uint8)[:, :HIDDEN].contiguous().view(FP8), scales


# -- results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("x_is_fp8", [False, True])
def test_results_are_those_of_a_layer_with_zeros(recipe: str, x_is_fp8: bool) -> None:
    """Bit for bit: with what a caller would pad by hand, and cut. An up of 0 is 1 with the offset of swigluoai, and
    a gate of 0 makes 0 of it."""
    x, *routes = inputs()
    with (
        make_mega(recipe=recipe) as mega,
        make_mega(recipe=recipe, hidden=WIDE_HIDDEN, intermediate=WIDE_INTERMEDIATE) as wide,
    ):
        mega.load_weights(**weights())
        wide.load_weights(**widened_weights())
        given: Any = quantised(recipe) if x_is_fp8 else x
        want = wide(tl.quantize_fp8(widened(x, WIDE_HIDDEN), recipe=recipe) if x_is_fp8 else widened(x, WIDE_HIDDEN),
                    *routes)  # fmt: skip
        assert not want[:, HIDDEN:].any()
        got = mega(given, *routes)
        assert (got.dtype, got.shape, got.is_contiguous()) == (torch.bfloat16, (TOKENS, HIDDEN), True)
        assert got.equal(want[:, :HIDDEN])
        out = torch.full_like(got, torch.nan)
        assert mega(given, *routes, out=out) is out
        assert out.equal(got)


@pytest.mark.parametrize("made_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("called_in", [torch.no_grad, torch.inference_mode])
def test_results_of_any_mode(made_in: Any, called_in: Any) -> None:
    with make_mega() as mega:
        mega.load_weights(**weights())
        want = mega(*inputs())
        with made_in():
            given, out = inputs(), torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        with called_in():
            assert mega(*given, out=out).equal(want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tokens_of_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    """A part of wider rows is copied anyway, so it need not be contiguous."""
    x, *routes = inputs()
    with make_mega() as mega:
        mega.load_weights(**weights())
        want = mega(x, *routes)
        assert mega(x.to(dtype), *routes).equal(want)
        assert mega(widened(x, 300).to(dtype)[:, :HIDDEN], *routes).equal(want)


def test_no_tokens() -> None:
    with make_mega() as mega:
        mega.load_weights(**weights())
        x, ids, topk_weights = (each[:0] for each in inputs())
        assert mega(x, ids, topk_weights).shape == (0, HIDDEN)


# -- weights ------------------------------------------------------------------------------------------------------


def fp8_weights(kind: str) -> dict[str, torch.Tensor]:
    """Of checkpoints, with scales of blocks, channels or experts."""
    found: dict[str, torch.Tensor] = {}
    for name in ("w1", "w2"):
        w = weights()[name]
        parts = w.unflatten(1, (2 if name == "w1" else 1, -1))
        shape = {"channels": parts.shape[:3], "experts": parts.shape[:1]}.get(
            kind, (*parts.shape[:2], *(-(-size // 128) for size in parts.shape[2:]))
        )
        scales = 2.0 ** torch.randint(-11, -8, shape, generator=torch.Generator().manual_seed(3))
        found[name] = (w / 2.0**-10).clamp(-448, 448).to(FP8)
        found[f"{name}_scales"] = scales if kind == "experts" else scales.flatten(1, 2)
    return found


def dequantised(given: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in ("w1", "w2"):
        w, scales = given[name].float(), given[f"{name}_scales"]
        if kind == "blocks":
            parts = 2 if name == "w1" else 1
            rows, columns = w.shape[1] // parts, w.shape[2]
            spread = scales.unflatten(1, (parts, -1)).repeat_interleave(128, 2).repeat_interleave(128, 3)
            found[name] = w * spread[:, :, :rows, :columns].flatten(1, 2)
        else:
            found[name] = w * scales.view(len(w), -1, 1)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["blocks", "channels", "experts"])
@pytest.mark.parametrize("x_is_fp8", [False, True])
def test_weights_of_checkpoints(kind: str, recipe: str, x_is_fp8: bool) -> None:
    """Near what their values are, computed by hand in float32: no scale is another's."""
    given, (x, ids, topk_weights) = fp8_weights(kind), inputs()
    with make_mega(recipe=recipe, activation="swiglu", num_shared_experts=SHARED) as mega:
        mega.load_weights(**given, round_again=True)
        channels = len(given["w1"]) * 2 * INTERMEDIATE
        assert "rounded again" not in (said := mega.describe()) or f"of {channels} channels" in said
        got = mega(quantised(recipe) if x_is_fp8 else x, ids, topk_weights).float()
    plain, want = dequantised(given, kind), torch.zeros(TOKENS, HIDDEN)
    routes = [(t, int(e), float(w)) for t in range(TOKENS) for e, w in zip(ids[t], topk_weights[t], strict=True)]
    for token, expert, weight in [*routes, *((t, EXPERTS, 1.0) for t in range(TOKENS))]:
        gate, up = (plain["w1"][expert] @ x[token].float()).chunk(2)
        want[token] += plain["w2"][expert] @ (torch.nn.functional.silu(gate) * up * weight)
    assert 1 - 2 * (got * want).sum() / (got.square() + want.square()).sum() < 2e-3  # of FP8 against float32


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_of_weights(interleaved: bool, transposed: bool) -> None:
    with make_mega() as mega:
        mega.load_weights(**weights())
        want, given = mega(*inputs()), weights()
        if interleaved:
            for name in ("w1", "w1_bias"):
                given[name] = given[name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if transposed:
            given |= {name: given[name].transpose(1, 2).contiguous() for name in ("w1", "w2")}
        before = [each.data_ptr() for each in mega.weights]
        mega.load_weights(**given, weight_layout=tl.WeightLayout(transposed, interleaved))
        assert before == [each.data_ptr() for each in mega.weights]  # captured graphs read them there
        assert mega(*inputs()).equal(want)


def test_interleaved_fp8_with_scales_of_blocks() -> None:
    given = fp8_weights("blocks")
    with make_mega() as mega, pytest.raises(tl.InvalidArgument, match="w1 is FP8 and interleaved: its scales are of"):
        mega.load_weights(**given, weight_layout=tl.WeightLayout(interleaved=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_four_bits(recipe: str) -> None:
    """As gpt-oss has them. They are those that the same values give as FP8."""
    hidden, intermediate, generator = 160, 96, torch.Generator().manual_seed(0)
    given: dict[str, torch.Tensor] = {}
    for name, (rows, depth) in {"w1": (2 * intermediate, hidden), "w2": (hidden, intermediate)}.items():
        shape = (EXPERTS + SHARED, rows, depth // 32)
        given[name] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        given[f"{name}_scales"] = torch.full(shape, 119, dtype=torch.uint8)
    biases = {name: each for name, each in weights(0, hidden, intermediate).items() if "bias" in name}
    with make_mega(hidden=hidden, intermediate=intermediate, recipe=recipe) as mega:
        for interleaved in (False, True):
            if interleaved:
                given |= {name: given[name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for name in
                          ("w1", "w1_scales")}  # fmt: skip
                biases["w1_bias"] = biases["w1_bias"].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            layout = tl.WeightLayout(interleaved=interleaved)
            mega.load_weights(**given, **biases, four_bits=tl.MXFP4, weight_layout=layout)
            assert "scales of w1 encoded exactly; of w2 encoded exactly" in mega.describe()
            found = mega(*inputs(hidden))
            values = {name: four_bit_values(given[name]) * 2.0**-8 for name in ("w1", "w2")}
            codes = {name: (each * 2.0**8).to(FP8) for name, each in values.items()}
            scales = {f"{name}_scales": torch.full(each.shape[:2], 2.0**-8) for name, each in codes.items()}
            with make_mega(hidden=hidden, intermediate=intermediate, recipe=recipe) as other:
                other.load_weights(**codes, **scales, **biases, weight_layout=layout)
                assert other(*inputs(hidden)).equal(found)
        assert found.any()
        given |= {"w2": widened(given["w2"], 4, 16), "w2_scales": widened(given["w2_scales"], 4)}
        with pytest.raises(tl.ShapeMismatch, match=r"^w2 is \[4, 160, 128\] of four bits, expected \[4, 160, 96\]"):
            mega.load_weights(**given, **biases, four_bits=tl.MXFP4)


def four_bit_values(packed: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(2).int()
    return magnitudes[codes & 7] * (1 - 2 * (codes >> 3))


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_in_use(recipe: str) -> None:
    """Those of the caller's widths are padded, those that are padded already are used where they are: so layers that
    take turns in one MegaMoE keep one copy each."""
    with make_mega(recipe=recipe) as mega:
        mega.load_weights(**weights())
        want, whole, biases = mega(*inputs()), mega.weights, mega.biases
        mega.use_weights(*whole, w1_bias=biases[0], w2_bias=biases[1])
        assert all(ours is theirs for ours, theirs in zip(mega.weights, whole, strict=True))
        assert mega(*inputs()).equal(want)

        def cut(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
            values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            return values[tuple(map(slice, (len(tensor), *shape)))].contiguous().view(tensor.dtype)

        w1, w1_scales, w2, w2_scales = whole
        given = [cut(w1, 2 * INTERMEDIATE, HIDDEN), w1_scales, cut(w2, HIDDEN, INTERMEDIATE), w2_scales]
        if recipe == "row":
            given[1], given[3] = cut(w1_scales, 2 * INTERMEDIATE), cut(w2_scales, HIDDEN)
        w1_bias, w2_bias = (cut(bias, width) for bias, width in
                            zip(biases, (2 * INTERMEDIATE, HIDDEN), strict=True) if bias is not None)  # fmt: skip
        mega.use_weights(*given, w1_bias=torch.nn.Parameter(w1_bias), w2_bias=w2_bias)
        assert mega.biases[0] is not None and not mega.biases[0].requires_grad  # noqa: PT018
        assert mega(*inputs()).equal(want)
        with pytest.raises(tl.ShapeMismatch, match=r"^w2_bias is \[4, 209\], expected \[4, 208\]"):
            mega.use_weights(*given, w1_bias=w1_bias, w2_bias=torch.zeros(EXPERTS + SHARED, HIDDEN + 1))
        with pytest.raises(tl.InvalidArgument, match=r"^w1 is a list, expected a torch\.Tensor"):
            mega.use_weights([], *given[1:])  # type: ignore[arg-type]
        assert mega(*inputs()).equal(want)


# -- what it says -------------------------------------------------------------------------------------------------


def test_what_it_says() -> None:
    with make_mega() as mega:
        assert (mega.hidden, mega.intermediate, mega.comm.plan.hidden) == (HIDDEN, INTERMEDIATE, WIDE_HIDDEN)
        assert "hidden=208, " in repr(mega)
        assert "intermediate=80, " in repr(mega)
        assert (
            "padded with zeros to multiples of 128: hidden 208 to 256, intermediate 80 to 128; weights take 96.9% more"
            in mega.describe()
        )
    with make_mega(hidden=WIDE_HIDDEN, intermediate=WIDE_INTERMEDIATE) as mega:
        assert "padded" not in mega.describe()


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
@pytest.mark.parametrize("width", [100, 8, -128, 128.0])
def test_other_widths_are_refused(name: str, width: Any) -> None:
    with pytest.raises(tl.InvalidArgument, match=f"{name} is {width}, expected a (multiple of 16|positive integer)"):
        make_mega(**{name: width})


WRONG: dict[str, tuple[Any, type[tl.TokenloomError], str]] = {
    "padded already": (torch.ones(TOKENS, WIDE_HIDDEN), tl.ShapeMismatch, r"x is \[10, 256\], the layer was made for"),
    "a row": (torch.ones(HIDDEN), tl.ShapeMismatch, r"x is \[208\], the layer was made for \[tokens, 208\]"),
    "a list": ([1.0], tl.InvalidArgument, "x is a float, expected a torch.Tensor"),
    "nothing": ((), tl.InvalidArgument, "x is a tuple of 0, expected a tensor or"),
    "three": ((torch.ones(TOKENS, HIDDEN), 1, 2), tl.InvalidArgument, "x is a tuple of 3, expected a tensor or"),
    "integers": (torch.ones(TOKENS, HIDDEN, dtype=torch.int32), tl.DtypeMismatch, "x is torch.int32, expected"),
    "no memory": (torch.ones(TOKENS, HIDDEN), tl.InvalidArgument, "x has no memory"),
    "scales of rows": ((torch.zeros(TOKENS, HIDDEN).to(FP8), torch.ones(TOKENS)), tl.ShapeMismatch, "recipe='row'"),
    "too few scales": (
        (torch.zeros(TOKENS, HIDDEN).to(FP8), torch.ones(TOKENS, 1)),
        tl.ShapeMismatch,
        r"scales is \[10, 1\], expected \[10, 2\]: one per 128 values",
    ),
    "without scales": (torch.zeros(TOKENS, HIDDEN).to(FP8), tl.InvalidArgument, "x is torch.float8_e4m3fn without"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tokens_are_named(name: str) -> None:
    x, error, said = WRONG[name]
    with make_mega() as mega:
        mega.load_weights(**weights())
        want, (_, *routes) = mega(*inputs()), inputs()
        if name == "no memory":
            x = x.clone()
            x.untyped_storage().resize_(0)
        with pytest.raises(error, match=said):
            mega(x, *routes)
        for wide in (torch.empty(TOKENS, WIDE_HIDDEN), torch.empty(TOKENS, HIDDEN)):
            with pytest.raises((tl.ShapeMismatch, tl.DtypeMismatch), match=r"^out is "):
                mega(*inputs(), out=wide)
        assert mega(*inputs()).equal(want)


def test_tangents_are_refused() -> None:
    x, *routes = inputs()
    with make_mega() as mega, forward_ad.dual_level():
        mega.load_weights(**weights())
        with pytest.raises(tl.NotDifferentiable, match="x has a tangent"):
            mega(forward_ad.make_dual(x, torch.ones_like(x)), *routes)


@on_ranks("several_ranks")
def test_a_fault_of_padding_is_known_everywhere(context: RankContext) -> None:
    """At once, and the next call is all ranks' again."""
    last, device = context.rank == context.num_ranks - 1, context.device
    with tl.MegaMoE(
        context.group, num_experts=4, hidden=144, intermediate=80, top_k=1, max_tokens_per_rank=4,
        backend="composed", device=device,
    ) as mega:  # fmt: skip
        local = 4 // context.num_ranks
        mega.load_weights(torch.ones(local, 160, 144, device=device), torch.ones(local, 144, 80, device=device))
        x = torch.ones(2, 144, device=device, dtype=torch.bfloat16)
        routes = (torch.zeros(2, 1, dtype=torch.int64, device=device), torch.ones(2, 1, device=device))
        want = mega(x, *routes)
        with pytest.raises(tl.ShapeMismatch if last else tl.PeerError, match=r"x is \[2, 128\]"):
            mega(x[:, :128].contiguous() if last else x, *routes)
        assert mega(x, *routes).equal(want)
