"""The grouped FP8 GEMMs against float64, over shapes that tiles do not divide; poison where nothing may be read.

test_gemm_slots.py has rows in slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.ops.grouped_operands import (
    FP8,
    INT32,
    Operands,
    assert_close,
    expected,
    needs_hopper,
    on_devices,
    operands,
    share_off,
)
from tokenloom import Activation
from tokenloom.errors import (
    BackendUnavailable,
    DeviceMismatch,
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
    TokenloomError,
)
from tokenloom.kernels.gemm.launch import GroupedGemmVariant, SwigluFp8Epilogue
from tokenloom.ops import quant
from tokenloom.ops.gemm import grouped_gemm_fp8, grouped_swiglu_fp8, interleave_gate_and_up, separate_gate_and_up
from tokenloom.plan import RECIPES

CASES = {
    "one tile": ([128], 256, 128),
    "one row each": ([1] * 5, 256, 256),
    "tails and empty experts": ([0, 130, 0, 1, 127, 300, 0], 512, 384),
    "N is no multiple of the tile": ([70, 200], 384, 256),
    "N below the tile": ([129], 128, 512),
    "more tiles than SMs": ([700, 900], 2048, 256),
    "long K": ([33, 257], 256, 7168),
    "many tiles of one block of K": ([2000, 1500], 2048, 128),
    "many tiles of four blocks": ([2000, 1500], 2048, 512),
    "no rows": ([0, 0], 256, 128),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("device", "name"), on_devices([*CASES], ["tails and empty experts", "no rows"]))
def test_gemm(device: str, name: str, recipe: str) -> None:
    counts, n, k = CASES[name]
    tensors = operands(counts, n, k, device, recipe=recipe)
    out = grouped_gemm_fp8(*tensors, recipe=recipe)
    assert out.shape == (sum(counts), n)
    assert out.dtype == torch.bfloat16
    a, a_scales, b, b_scales, offsets = tensors
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        want = expected(a[begin:end], a_scales[begin:end], b, b_scales, e)
        assert_close(out[begin:end], want, f"expert {e}", share_off(recipe, k))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("device", "name"),
    on_devices(["tails and empty experts", "N is no multiple of the tile", "long K"], ["tails and empty experts"]),
)
def test_bias(device: str, name: str, weighted: bool, recipe: str) -> None:
    """Of each expert, times the row's weight, before the one rounding."""
    counts, n, k = CASES[name]
    a, a_scales, b, b_scales, offsets = operands(counts, n, k, device, recipe=recipe)
    size = float(a_scales.mean() * b_scales.mean() * k**0.5 * 200)  # as large as sums
    bias = torch.randn(len(counts), n, device=device) * size
    weights = torch.rand(sum(counts), device=device) if weighted else None
    out = grouped_gemm_fp8(a, a_scales, b, b_scales, offsets, bias=bias, row_weights=weights, recipe=recipe)
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        term = bias[e].double() * (1.0 if weights is None else weights[begin:end, None].double())
        want = expected(a[begin:end], a_scales[begin:end], b, b_scales, e)
        assert_close(out[begin:end], want + term, f"expert {e}", share_off(recipe, k))


@pytest.mark.gpu
@needs_hopper
def test_the_same_bits_from_call_to_call() -> None:
    tensors = operands([100, 0, 513], 768, 1024)
    first = grouped_gemm_fp8(*tensors)
    for _ in range(20):
        assert torch.equal(grouped_gemm_fp8(*tensors), first)


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_rows_are_neither_used_nor_written(device: str, recipe: str) -> None:
    """Rows of no expert, before and after, are NaN here: a tile that takes them in must not let them out."""
    counts, first, after = [37, 140], 5, 90
    a, a_scales, b, b_scales, offsets = operands(counts, 256, 256, device, first=first, after=after, recipe=recipe)
    clean = grouped_gemm_fp8(a, a_scales, b, b_scales, offsets, recipe=recipe)[first : first + sum(counts)]
    a_scales[:first] = torch.nan
    a_scales[first + sum(counts) :] = torch.nan
    again = grouped_gemm_fp8(a, a_scales, b, b_scales, offsets, recipe=recipe)[first : first + sum(counts)]
    assert torch.equal(again, clean)


# -- SwiGLU -------------------------------------------------------------------------------------------------------


def test_gates_and_ups_in_turn() -> None:
    """Row r of a half is row 16 * (r // 8) + r % 8, and 8 further down for ups; bytes survive."""
    w1 = torch.arange(2 * 32 * 4).view(2, 32, 4).to(torch.uint8).view(FP8)
    rows = interleave_gate_and_up(w1).view(torch.uint8)
    for r in range(16):
        assert torch.equal(rows[:, 16 * (r // 8) + r % 8], w1.view(torch.uint8)[:, r])
        assert torch.equal(rows[:, 16 * (r // 8) + 8 + r % 8], w1.view(torch.uint8)[:, 16 + r])


def test_what_belongs_to_rows_takes_turns_with_them() -> None:
    """A value for each row of w1, such as a scale of recipe "row", goes where its row goes."""
    values = torch.arange(2 * 32).view(2, 32)
    rows = interleave_gate_and_up(values[..., None].expand(2, 32, 3))
    assert torch.equal(interleave_gate_and_up(values), rows[..., 0])


OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "weighted": {"weighted": True},
    "clamped": {"clamp": 2.0, "weighted": True},
    "powers of two": {"power_of_two_scales": True},
    "exact functions": {"fast_math": False, "clamp": 50.0},
    "swigluoai": {"activation": "swigluoai", "bias": True, "weighted": True},
    "geglu": {"activation": "geglu", "fast_math": False},
    "gated relu2": {"activation": Activation("relu2", up_offset=0.5), "clamp": 3.0, "bias": True},
}
SWIGLU_CASES = {
    "one tile": ([128], 128, 512),
    "tails and empty experts": ([0, 130, 0, 1, 127, 300, 0], 256, 384),
    "an odd number of strips": ([70, 200], 384, 1024),
    "more tiles than SMs": ([700, 900], 1024, 256),
    "as in real models": ([33, 257], 512, 7168),
}


def test_activations_by_row_are_rounded_to_bfloat16(device: str) -> None:
    """Before they are quantised: GEMM1 leaves them so, as none of its tiles has a whole row."""
    counts, width, k = [37, 140], 256, 256
    a, a_scales, w1, w1_scales, offsets = operands(counts, 2 * width, k, device, recipe="row")
    a_scales /= a_scales.mean() * k**0.5 * w1_scales.mean() * 448 * 200
    q, scales = grouped_swiglu_fp8(a, a_scales, w1, w1_scales, offsets, recipe="row", fast_math=False)
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        hidden = expected(a[begin:end], a_scales[begin:end], w1, w1_scales, e)
        gate, up = separate_gate_and_up(hidden.T[None])[0].T.chunk(2, -1)
        want = quant.quantize_fp8((gate * torch.sigmoid(gate) * up).bfloat16(), power_of_two_scales=True, recipe="row")
        same = q[begin:end].view(torch.uint8) == want[0].view(torch.uint8)
        # Sums of float32 and float64 lie on two sides of a step of bfloat16 now and then, of E4M3 more rarely by 16.
        # Tensor cores add up with 13 bits. Without the rounding, 0.99 are the same.
        assert same.float().mean() > (0.995 if device == "cuda" else 0.998)
        assert torch.equal(scales[begin:end], want[1])


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("slots", [False, True], ids=["offsets", "slots"])
def test_packed_weights(device: str, slots: bool, biased: bool) -> None:
    """The same bits as of the FP8 weights that were packed, in both products."""
    counts, places, width, k = [37, 0, 140], 150, 256, 384
    generator = torch.Generator().manual_seed(0)
    a, a_scales, _, _, offsets = operands([places] * 3 if slots else counts, 2 * width, k, device, recipe="row")
    packed = torch.randint(0, 256, (len(counts), 2 * width, k // 2), generator=generator).to(torch.uint8)
    exponents = torch.randint(115, 126, (len(counts), 2 * width, k // 32), generator=generator).to(torch.uint8)
    w, scales, _ = quant.weights_for("row", packed.to(device), exponents.to(device), four_bits=quant.MXFP4)
    given = {"expert_offsets": offsets}
    if slots:
        a, a_scales = a.view(3, places, k), a_scales.view(3, places)
        given = {"expert_counts": torch.tensor(counts, dtype=torch.int32, device=device)}
    if biased:
        given["row_weights"] = torch.rand(a_scales.shape, generator=generator).to(device)
        given["bias"] = torch.randn(len(counts), 2 * width, generator=generator).to(device)
    for multiply in (grouped_gemm_fp8, grouped_swiglu_fp8):
        found = [multiply(a, a_scales, each, scales, recipe="row", **given) for each in (w, quant.pack_weights(w))]
        for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in found), strict=True):
            for e, count in enumerate(counts if slots else [len(a)]):
                rows = slice(0, count) if slots else slice(None)
                bits = [(each[e] if slots else each)[rows].float() for each in (one, other)]
                assert torch.equal(*bits), (multiply.__name__, e)
                assert bits[0].isfinite().all()


def test_packed_weights_are_of_recipe_row() -> None:
    a, w = torch.zeros(3, 256).to(FP8), quant.pack_weights(torch.zeros(2, 128, 256).to(FP8))
    offsets, scales = torch.tensor([0, 1, 3], dtype=torch.int32), torch.ones(2, 128)
    assert grouped_gemm_fp8(a, torch.ones(3), w, scales, offsets, recipe="row").shape == (3, 128)
    with pytest.raises(InvalidArgument, match="b is packed in four bits, which recipe='row' takes; this is 'block'"):
        grouped_gemm_fp8(a, torch.ones(3, 2), w, torch.ones(2, 1, 2), offsets)
    with pytest.raises(ShapeMismatch, match=r"b is \[2, 1, 2, 8000\], expected \[E, N, K\]"):
        grouped_gemm_fp8(a, torch.ones(3), w[..., :8000].contiguous(), scales, offsets, recipe="row")
    with pytest.raises(DtypeMismatch, match=r"b is torch.uint8, expected torch.float8_e4m3fn"):
        grouped_gemm_fp8(a, torch.ones(3), torch.zeros(2, 128, 256, dtype=torch.uint8), scales, offsets, recipe="row")
    with pytest.raises(ShapeMismatch, match=r"a is \[3, 256\], expected \[3, 128\]"):
        grouped_gemm_fp8(a, torch.ones(3), w[:, :, :1].contiguous(), scales, offsets, recipe="row")


FUNCTIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, _: functional.relu(x),
    "relu2": lambda x, _: functional.relu(x).square(),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("device", "name"), on_devices([*SWIGLU_CASES], ["tails and empty experts"]))
def test_swiglu(device: str, name: str, options: str, recipe: str) -> None:
    """A code is off by at most half a step of E4M3; where sums of float32 and of float64 lie on two sides of a step,
    by a whole one. The scale is the largest value's, so it has the error of that value's sum."""
    counts, width, k = SWIGLU_CASES[name]
    given = dict(OPTIONS[options])
    a, a_scales, w1, w1_scales, offsets = operands(counts, 2 * width, k, device, recipe=recipe)
    a_scales /= a_scales.mean() * k**0.5 * w1_scales.mean() * 448 * 200  # so that silu is neither 0 nor the identity
    rows = sum(counts)
    weights = torch.rand(rows, device=a.device) + 0.1 if given.pop("weighted", False) else None
    interleaved = interleave_gate_and_up(w1)
    bias = torch.randn(len(counts), 2 * width, device=a.device) if given.pop("bias", False) else None
    if bias is not None:
        given["bias"] = interleave_gate_and_up(bias[..., None])[..., 0].contiguous()
    of_rows = w1_scales if recipe == "block" else interleave_gate_and_up(w1_scales[..., None])[..., 0].contiguous()
    given["recipe"] = recipe
    q, scales = grouped_swiglu_fp8(a, a_scales, interleaved, of_rows, offsets, weights, **given)  # type: ignore[arg-type]
    form = Activation.of(given.get("activation", "swiglu"))  # type: ignore[arg-type]
    function = FUNCTIONS[form.function]
    by_row = recipe == "row"
    assert (q.dtype, tuple(q.shape), tuple(scales.shape)) == (FP8, (rows, width), (rows, width // 128)[: 2 - by_row])
    clamp, off = given.get("clamp", form.limit), share_off(recipe, k)
    for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        hidden = expected(a[begin:end], a_scales[begin:end], w1, w1_scales, e)
        gate, up = (hidden if bias is None else hidden + bias[e]).chunk(2, -1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)  # type: ignore[type-var]
        want = function(gate, form.alpha) * (up + form.up_offset)
        want = want if weights is None else want * weights[begin:end, None]
        blocks = want.view(end - begin, *((width,) if by_row else (width // 128, 128)))
        amax = blocks.abs().amax(-1).clamp_min(1e-4)
        want_scales = amax / 448
        if by_row or given.get("power_of_two_scales"):
            got = scales[begin:end].double()
            assert (got.frexp().mantissa == 0.5).all()
            assert ((got >= (1 - 2 * off) * want_scales) & (got <= (2 + 4 * off) * want_scales)).all()
        else:
            assert torch.allclose(scales[begin:end].double(), want_scales, rtol=2 * off)
        got = quant.dequantize_fp8(q[begin:end], scales[begin:end]).double().view_as(blocks)
        limit = 2**-3 * blocks.abs() + 2 * off * amax[..., None]
        assert ((got - blocks).abs() <= limit).all(), f"expert {e}"
        difference = 1 - 2 * (got * blocks).sum() / (got.square() + blocks.square()).sum().clamp_min(1e-30)
        assert end == begin or difference < 1e-3


def test_swiglu_is_repeatable_and_uses_no_other_rows(device: str) -> None:
    counts, first, after = [37, 140], 5, 90
    a, a_scales, w1, w1_scales, offsets = operands(counts, 512, 512, device, first=first, after=after)
    used = slice(first, first + sum(counts))
    weights = torch.full((len(a),), torch.nan, device=a.device)
    weights[used] = 0.5
    clean = grouped_swiglu_fp8(a, a_scales, w1, w1_scales, offsets, weights)
    a_scales[:first] = torch.nan
    a_scales[first + sum(counts) :] = torch.nan
    for _ in range(10):
        again = grouped_swiglu_fp8(a, a_scales, w1, w1_scales, offsets, weights)
        assert torch.equal(again[0][used].view(torch.uint8), clean[0][used].view(torch.uint8))
        assert torch.equal(again[1][used], clean[1][used])


# -- bad input ----------------------------------------------------------------------------------------------------


def replaced(index: int, tensor: torch.Tensor) -> Operands:
    tensors = list(operands([3, 4], 128, 256, device="cpu"))
    tensors[index] = tensor
    return tuple(tensors)  # type: ignore[return-value]


FAULTS: dict[str, tuple[int, torch.Tensor, type[TokenloomError]]] = {
    "a in slots": (0, torch.zeros(2, 7, 256, dtype=FP8), ShapeMismatch),
    "a of another K": (0, torch.zeros(7, 128, dtype=FP8), ShapeMismatch),
    "a in bfloat16": (0, torch.zeros(7, 256, dtype=torch.bfloat16), DtypeMismatch),
    "scales of fewer rows": (1, torch.zeros(6, 2), ShapeMismatch),
    "scales that are transposed": (1, torch.zeros(2, 7).T, ShapeMismatch),
    "N no multiple of 128": (2, torch.zeros(2, 100, 256, dtype=FP8), ShapeMismatch),
    "weight scales of one expert": (3, torch.zeros(1, 1, 2), ShapeMismatch),
    "offsets of too few experts": (4, torch.zeros(2, dtype=INT32), ShapeMismatch),
    "offsets in int64": (4, torch.zeros(3, dtype=torch.int64), DtypeMismatch),
    "scales elsewhere": (1, torch.zeros(7, 2, device="meta"), DeviceMismatch),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_input_is_named(name: str) -> None:
    index, tensor, error = FAULTS[name]
    argument = ("a", "a_scales", "b", "b_scales", "expert_offsets")[index]
    with pytest.raises(error, match=f"^{argument} is"):
        grouped_gemm_fp8(*replaced(index, tensor))


def test_bad_input_to_swiglu_is_named() -> None:
    a, a_scales, w1, w1_scales, offsets = operands([3, 4], 256, 256, device="cpu")
    with pytest.raises(ShapeMismatch, match=r"^w1 is \[2, 128, 256\], expected \[E, 2I, K\]"):
        grouped_swiglu_fp8(a, a_scales, w1[:, :128].contiguous(), w1_scales[:, :1].contiguous(), offsets)
    with pytest.raises(ShapeMismatch, match=r"^w1_scales is"):
        grouped_swiglu_fp8(a, a_scales, w1, w1_scales[:, :1].contiguous(), offsets)


def test_bad_options_of_swiglu_are_named() -> None:
    tensors = operands([3, 4], 256, 256, device="cpu")
    with pytest.raises(ShapeMismatch, match=r"^row_weights is \[6\], expected \[7\]"):
        grouped_swiglu_fp8(*tensors, torch.ones(6))
    with pytest.raises(InvalidArgument, match=r"^clamp is 0"):
        grouped_swiglu_fp8(*tensors, clamp=0.0)
    with pytest.raises(InvalidArgument, match=r"^clamp is 2.0, but the activation has limit=7.0 already"):
        grouped_swiglu_fp8(*tensors, activation="swigluoai", clamp=2.0)
    with pytest.raises(InvalidArgument, match=r"^activation is 'gelu', which has no gates"):
        grouped_swiglu_fp8(*tensors, activation="gelu")
    with pytest.raises(ShapeMismatch, match=r"^bias is \[2, 128\], expected \[2, 256\]"):
        grouped_swiglu_fp8(*tensors, bias=torch.ones(2, 128))


def test_scales_of_the_other_recipe_are_named() -> None:
    a, a_scales, b, b_scales, offsets = operands([3, 4], 256, 256, device="cpu")
    _, by_row, _, by_channel, _ = operands([3, 4], 256, 256, device="cpu", recipe="row")
    with pytest.raises(ShapeMismatch, match=r"^a_scales is \[7\], a scale for each row; recipe='row' takes those"):
        grouped_gemm_fp8(a, by_row, b, b_scales, offsets)
    with pytest.raises(
        ShapeMismatch, match=r"^b_scales is \[2, 256\], a scale for each output channel; recipe='row' takes those"
    ):
        grouped_gemm_fp8(a, a_scales, b, by_channel, offsets)
    with pytest.raises(ShapeMismatch, match=r"^a_scales is \[7, 2\], a scale for each 128 values; recipe='block'"):
        grouped_gemm_fp8(a, a_scales, b, by_channel, offsets, recipe="row")
    with pytest.raises(
        ShapeMismatch, match=r"^w1_scales is \[2, 2, 2\], a scale for each 128 x 128 values; recipe='block'"
    ):
        grouped_swiglu_fp8(a, by_row, b, b_scales, offsets, recipe="row")
    with pytest.raises(ShapeMismatch, match=r"^a_scales is \[7, 1\], expected \[7\]"):
        grouped_gemm_fp8(a, by_row[:, None], b, by_channel, offsets, recipe="row")
    with pytest.raises(ShapeMismatch, match=r"^b is \[2, 0, 256\], expected \[E, N, K\]"):
        grouped_gemm_fp8(a, by_row, b[:, :0], by_channel[:, :0], offsets, recipe="row")
    with pytest.raises(InvalidArgument, match=r"^w1 is an int, expected a torch.Tensor"):
        grouped_swiglu_fp8(a, by_row, 3, by_channel, offsets, recipe="row")  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch, match=r"^a_scales is \[6\], expected \[7\]"):
        grouped_gemm_fp8(a, by_row[:6].contiguous(), b, by_channel, offsets, recipe="row")
    with pytest.raises(InvalidArgument, match=r"^recipe is 'rows', expected one of block, row"):
        grouped_gemm_fp8(a, by_row, b, by_channel, offsets, recipe="rows")


def test_bad_biases_are_named() -> None:
    tensors = operands([3, 4], 256, 256, device="cpu")
    with pytest.raises(DtypeMismatch, match=r"^bias is torch.bfloat16, expected torch.float32"):
        grouped_gemm_fp8(*tensors, bias=torch.ones(2, 256, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgument, match=r"^row_weights are factors of the bias, which is None"):
        grouped_gemm_fp8(*tensors, row_weights=torch.ones(7))
    with pytest.raises(ShapeMismatch, match=r"^row_weights is \[6\], expected \[7\]"):
        grouped_gemm_fp8(*tensors, bias=torch.ones(2, 256), row_weights=torch.ones(6))


def test_no_gradients_and_no_autocast_on_cpus() -> None:
    """As on GPUs, where kernels know neither."""
    a, a_scales, b, b_scales, offsets = operands([3, 4], 256, 256, device="cpu")
    tensors = (a, a_scales.requires_grad_(), b, b_scales.requires_grad_(), offsets)
    options = {"bias": torch.ones(2, 256, requires_grad=True), "row_weights": torch.rand(7, requires_grad=True)}
    wanted = grouped_gemm_fp8(*tensors, **options), *grouped_swiglu_fp8(*tensors, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = grouped_gemm_fp8(*tensors, **options), *grouped_swiglu_fp8(*tensors, **options)
    for one, other in zip(wanted, found, strict=True):
        assert not one.requires_grad
        assert torch.equal(one.float(), other.float())


def test_an_address_that_copies_cannot_take_is_named() -> None:
    a, a_scales, b, b_scales, offsets = operands([3, 4], 128, 512, device="cpu")
    odd = torch.empty(b_scales.numel() + 1)[1:].view_as(b_scales).copy_(b_scales)
    with pytest.raises(InvalidArgument, match=r"^b_scales does not begin at a multiple of 16 bytes"):
        grouped_gemm_fp8(a, a_scales, b, odd, offsets)


def test_devices_without_kernels_are_refused() -> None:
    with pytest.raises(BackendUnavailable, match="need a Hopper GPU, or a CPU; the device is meta"):
        grouped_gemm_fp8(*operands([3], 128, 128, device="meta"))


def test_too_many_experts_for_the_stages() -> None:
    """One stage leaves nothing to load while it is read."""
    with pytest.raises(InvalidArgument, match=r"^25000 experts on a rank leave 1 stages"):
        GroupedGemmVariant(25000, 256, 512).spec()


def test_weights_that_leave_the_cache_first() -> None:
    """Those of a MegaMoE that has few of them. Other GEMMs may be of many rows, whose tiles read them again."""
    fast = SwigluFp8Epilogue()
    once = {
        GroupedGemmVariant(16, 1536, 2048, epilogue=fast, awaits=8): 1,
        GroupedGemmVariant(16, 2048, 768, scatters=8): 1,
        GroupedGemmVariant(16, 1536, 2048, epilogue=fast): 0,
        GroupedGemmVariant(32, 4096, 7168, epilogue=fast, awaits=8): 0,
    }
    assert {variant: dict(variant.spec().shape)["weights_once"] for variant in once} == once
