"""FP8 GEMMs over rows grouped by expert, and checks of their operands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from typing import Any

import torch

from tokenloom.errors import (
    BackendUnavailable,
    DeviceMismatch,
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
    a_type,
    require_type,
)
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import HOPPER, spec_of
from tokenloom.kernels.gemm.launch import (
    BLOCK,
    CLUSTER,
    FOUR_BIT_BLOCK,
    QUANTIZE_THREADS,
    ROW_BOX,
    WEIGHT_BOX,
    Bf16Epilogue,
    GroupedGemmArgs,
    GroupedGemmVariant,
    QuantizeRowsVariant,
    SwigluFp8Epilogue,
    operand_map,
    scale_map,
    tile_rows_for,
    wide_scales,
)
from tokenloom.ops.activation import apply_activation
from tokenloom.ops.quant import (
    dequantize_fp8,
    is_packed,
    quantize_fp8,
    require_recipe,
    shape_of_weights,
    unpack_weights,
)
from tokenloom.plan import SWIGLU, Activation

ALIGNMENT_BYTES = 16
QUANTIZE_BLOCKS = 8
"""Blocks of an SM that give rows one scale: all of its warps, whose loads hide each other."""
INTERLEAVED_ROWS = 8
"""Rows of gates, then as many rows of ups, that take turns in the weights of a fused SwiGLU."""
Biases = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of w1 and of w2, float32, or None where there is none."""


def grouped_gemm_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    expert_offsets: torch.Tensor | None = None,
    *,
    expert_counts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    recipe: str = "block",
) -> torch.Tensor:
    """Multiply each expert's rows by its weights in FP8: ``out[rows of e] = a[rows of e] @ b[e].T``.

    With ``bias``, ``row_weights * bias[e]`` is added in float32 before the result is rounded.

    ``expert_offsets`` or ``expert_counts`` says which rows those are. With offsets, a is [R, K] as in layout "expert":
    each expert's rows follow those of the one before. With counts, a is [E, S, K] as in layout "slots": each expert
    has S places, and its rows fill the first of them.

    Recipe "block": each partial sum over 128 values of K is scaled and added in float32. Recipe "row": sums over all
    of K are scaled; on a GPU the tensor cores add them, with 13 bits below their largest term. Either total is rounded
    once. On a GPU the host reads nothing, because only the device knows how many rows each expert has. The GPU does
    not read weights of experts without rows. On a CPU plain torch does the work, slowly.

    Rows outside the offsets and places beyond the counts may hold anything. They are not written in the result, so
    their values there are unspecified.

    Args:
        a: float8_e4m3fn [R, K] or [E, S, K], contiguous (``routed.tokens``).
        a_scales: float32 [R, K / 128] or [E, S, K / 128], contiguous (``routed.scales``, of ``scale_layout="rows"``).
            Recipe "row": [R] or [E, S].
        b: float8_e4m3fn [E, N, K], contiguous, N and K multiples of 128. Recipe "row": also what
            ``pack_weights`` makes of that.
        b_scales: float32 [E, N / 128, K / 128], contiguous. Recipe "row": [E, N], one for each output channel.
        expert_offsets: int32 [E + 1], first row of each expert and the end, on the same device
            (``routed.expert_offsets``).
        expert_counts: int32 [E], rows of each expert, on the same device (``routed.expert_counts``). A count above S
            stands for S.
        bias: float32 [E, N], contiguous, or None.
        row_weights: float32 [R] or [E, S], factors of the bias, or None for ones.
        recipe: which values share a scale, "block" or "row", see ``quantize_fp8``.

    Returns:
        bfloat16 [R, N] or [E, S, N].

    Raises:
        InvalidArgument: both of ``expert_offsets`` and ``expert_counts`` are given, or neither; ``row_weights``
            without ``bias``.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: an argument is not as above.
        BackendUnavailable: the tensors are neither on a Hopper GPU nor on a CPU.
    """
    _check(a, a_scales, b, b_scales, expert_offsets, expert_counts, recipe)
    num_experts, n, _ = shape_of_weights(b)
    _check_bias(bias, [num_experts, n], a)
    if row_weights is not None:
        if bias is None:
            raise InvalidArgument("row_weights are factors of the bias, which is None; leave them out")
        check_tensor("row_weights", row_weights, torch.float32, list(a.shape[:-1]), a.device)
    out = a.new_empty(*a.shape[:-1], n, dtype=torch.bfloat16)
    if a.is_cpu:
        b = unpack_weights(b) if is_packed(b) else b
        with _as_kernels_compute():
            for e, rows, sums in _sums_on_cpu(a, a_scales, b, b_scales, expert_offsets, expert_counts):
                if bias is not None:
                    factors = 1.0 if row_weights is None else row_weights.flatten()[rows, None]
                    sums = sums + factors * bias[e]
                out.flatten(0, -2)[rows] = sums.to(out.dtype)
        return out
    epilogue = Bf16Epilogue(biased=bias is not None)
    kernel = _kernel(a, b, epilogue, expert_counts, recipe)
    kernel.args.bias = 0 if bias is None else bias.data_ptr()
    kernel.args.row_weights = 0 if row_weights is None else row_weights.data_ptr()
    _launch(kernel, a, a_scales, b, b_scales, expert_offsets, expert_counts, out)
    return out


def grouped_swiglu_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    w1: torch.Tensor,
    w1_scales: torch.Tensor,
    expert_offsets: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    *,
    expert_counts: torch.Tensor | None = None,
    activation: Activation | str = SWIGLU,
    bias: torch.Tensor | None = None,
    clamp: float | None = None,
    power_of_two_scales: bool = False,
    fast_math: bool = True,
    recipe: str = "block",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``silu(gate) * up * weight``, the first half of SwiGLU experts, where ``gate, up = w1[e] @ row``.

    ``activation`` may be another one that has gates, and ``bias`` is added to gates and ups.

    Rows, sums and devices are those of ``grouped_gemm_fp8``. Sums stay in float32 until the result is quantised as in
    ``quantize_fp8``.

    Recipe "row": activations are rounded to bfloat16, and then quantised with one scale for each row, a power of two.

    Args:
        a: float8_e4m3fn [R, K] or [E, S, K], contiguous.
        a_scales: float32 [R, K / 128] or [E, S, K / 128], contiguous. Recipe "row": [R] or [E, S].
        w1: float8_e4m3fn [E, 2I, K] from ``interleave_gate_and_up``, I a multiple of 128. Recipe "row": also packed.
        w1_scales: float32 [E, 2I / 128, K / 128], gates, then ups, not interleaved. Recipe "row": [E, 2I], in the
            order of w1's rows (``interleave_gate_and_up(w1_scales)``).
        expert_offsets: int32 [E + 1], as in ``grouped_gemm_fp8``, beside a of [R, K].
        row_weights: float32 [R] or [E, S], or None for ones.
        expert_counts: int32 [E], as in ``grouped_gemm_fp8``, beside a of [E, S, K].
        activation: an ``Activation`` with gates, or the name of one.
        bias: float32 [E, 2I], contiguous, in the order of w1's rows likewise, or None.
        clamp: largest gate, and largest absolute up, before the activation: its ``limit`` by another name. None sets
            none beside that.
        power_of_two_scales: as in ``quantize_fp8``. Recipe "row" always has them.
        fast_math: use the hardware's exponential and division, accurate to a few units in the last place of float32.
            On a CPU it changes nothing.
        recipe: which values share a scale, "block" or "row", see ``quantize_fp8``.

    Returns:
        Values float8_e4m3fn [R, I] or [E, S, I], and scales float32 [R, I / 128] or [E, S, I / 128], with recipe "row"
        [R] or [E, S], as ``grouped_gemm_fp8`` takes them. Rows outside the offsets and places beyond the counts are
        unspecified.

    Raises:
        InvalidArgument: clamp is not above 0, or given beside another limit; the activation has no gates; both of
            ``expert_offsets`` and ``expert_counts`` are given, or neither.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: an argument is not as above.
        BackendUnavailable: the tensors are neither on a Hopper GPU nor on a CPU.
    """
    if isinstance(w1, torch.Tensor) and w1.dim() >= 3 and shape_of_weights(w1)[1] % (2 * BLOCK):
        raise ShapeMismatch(f"w1 is {list(w1.shape)}, expected [E, 2I, K] with I a multiple of {BLOCK}")
    _check(a, a_scales, w1, w1_scales, expert_offsets, expert_counts, recipe, b_name="w1")
    if row_weights is not None:
        check_tensor("row_weights", row_weights, torch.float32, list(a.shape[:-1]), a.device)
    form = gated_activation(activation, clamp, "clamp")
    num_experts, n, _ = shape_of_weights(w1)
    _check_bias(bias, [num_experts, n], a)
    width = n // 2
    by_row, rows = recipe == "row", a.shape[:-1]
    out = a.new_empty(*rows, width)
    out_scales = a.new_empty(rows if by_row else (*rows, width // BLOCK), dtype=torch.float32)
    power_of_two_scales |= by_row
    if a.is_cpu:
        w1 = separate_gate_and_up(unpack_weights(w1) if is_packed(w1) else w1)
        if by_row:
            w1_scales = separate_gate_and_up(w1_scales)
        plain_bias = None if bias is None else separate_gate_and_up(bias)
        with _as_kernels_compute():
            for e, own, sums in _sums_on_cpu(a, a_scales, w1, w1_scales, expert_offsets, expert_counts):
                activations = apply_activation(sums if plain_bias is None else sums + plain_bias[e], form)
                if row_weights is not None:
                    activations = activations * row_weights.flatten()[own, None]
                if by_row:
                    activations = activations.bfloat16()
                q, scales = quantize_fp8(activations, power_of_two_scales=power_of_two_scales, recipe=recipe)
                out.flatten(0, -2)[own] = q
                out_scales.flatten(0, len(rows) - 1)[own] = scales
        return out, out_scales
    epilogue = swiglu_epilogue(form, power_of_two_scales, fast_math, biased=bias is not None)
    kernel = _kernel(a, w1, epilogue, expert_counts, recipe)
    kernel.args.out_scales = out_scales.data_ptr()
    kernel.args.row_weights = 0 if row_weights is None else row_weights.data_ptr()
    kernel.args.bias = 0 if bias is None else bias.data_ptr()
    tell_activation(kernel.args, form)
    activations = out.new_empty(out.shape, dtype=torch.bfloat16) if by_row else out
    _launch(kernel, a, a_scales, w1, w1_scales, expert_offsets, expert_counts, activations)
    if by_row:
        quantize = Kernel(spec_of(QuantizeRowsVariant(width, slots=expert_counts is not None)), a.device.index)
        _launch_quantize(quantize, activations, out, out_scales, expert_offsets, expert_counts)
    return out, out_scales


def interleave_gate_and_up(w1: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of w1, gates then ups, so that 8 gates and 8 ups take turns.

    ``grouped_swiglu_fp8`` and ``MegaMoE.use_weights`` take weights in this order, and what belongs to rows of w1: its
    bias, and its scales of recipe "row".

    Args:
        w1: [E, 2I, K], or [E, 2I] of a value for each row; gates first, then ups; I a multiple of 8. Any dtype.

    Returns:
        A new tensor with the same rows, shape and dtype.

    Raises:
        InvalidArgument, ShapeMismatch: w1 is not as above.
    """
    require_type("w1", w1, torch.Tensor, "a torch.Tensor")
    if w1.dim() not in (2, 3) or w1.shape[1] % (2 * INTERLEAVED_ROWS):
        raise ShapeMismatch(
            f"w1 is {list(w1.shape)}, expected [E, 2I, K] or [E, 2I] with I a multiple of {INTERLEAVED_ROWS}"
        )
    halves = w1.view(torch.uint8) if w1.itemsize == 1 else w1
    halves = halves.unflatten(1, (2, -1, INTERLEAVED_ROWS))
    return halves.transpose(1, 2).reshape(w1.shape).view(w1.dtype)


def separate_gate_and_up(w1: torch.Tensor) -> torch.Tensor:
    """Undo ``interleave_gate_and_up``: gates first, then ups."""
    turns = w1.view(torch.uint8) if w1.itemsize == 1 else w1
    turns = turns.unflatten(1, (-1, 2, INTERLEAVED_ROWS))
    return turns.transpose(1, 2).reshape(w1.shape).view(w1.dtype)


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Bf16Epilogue | SwigluFp8Epilogue,
    expert_counts: torch.Tensor | None,
    recipe: str,
) -> Kernel:
    num_experts, n, k = shape_of_weights(b)
    four_bits = is_packed(b)
    variant = GroupedGemmVariant(
        num_experts,
        n,
        k,
        epilogue=epilogue,
        slots=expert_counts is not None,
        recipe=recipe,
        tile_rows=tile_rows_for(a.numel() / (num_experts * k), recipe, four_bits),
        four_bits=four_bits,
    )
    return Kernel(spec_of(variant), a.device.index)


def _launch(
    kernel: Kernel,
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    expert_offsets: torch.Tensor | None,
    expert_counts: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    if a.numel() == 0:
        return
    args = kernel.args
    args.a = operand_map(a.flatten(0, -2), ROW_BOX)
    setattr(args, *weights_argument(b))
    if a_scales.dim() == a.dim() and wide_scales(a.shape[-1]):
        args.a_scale_map = scale_map(a_scales.flatten(0, -2))
    args.a_scales, args.b_scales = a_scales.data_ptr(), b_scales.data_ptr()
    if expert_offsets is not None:
        args.offsets = expert_offsets.data_ptr()
    if expert_counts is not None:
        args.counts, args.capacity = expert_counts.data_ptr(), a.shape[1]
    args.out = out.data_ptr()
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    blocks = sms // CLUSTER * CLUSTER * kernel.spec.blocks_per_sm
    kernel.launch(blocks, torch.cuda.current_stream(a.device).cuda_stream)


def _launch_quantize(
    kernel: Kernel,
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    expert_offsets: torch.Tensor | None,
    expert_counts: torch.Tensor | None,
) -> None:
    num_rows, args = scales.numel(), kernel.args
    if num_rows == 0:
        return
    args.rows, args.values, args.scales = (each.data_ptr() for each in (rows, values, scales))
    args.num_rows = num_rows
    if expert_offsets is not None:
        args.offsets, args.num_experts = expert_offsets.data_ptr(), len(expert_offsets) - 1
    if expert_counts is not None:
        args.counts, args.num_experts, args.capacity = expert_counts.data_ptr(), len(expert_counts), values.shape[1]
    sms = torch.cuda.get_device_properties(values.device).multi_processor_count
    blocks = min(-(-num_rows * 32 // QUANTIZE_THREADS), sms * QUANTIZE_BLOCKS)
    kernel.launch(blocks, torch.cuda.current_stream(values.device).cuda_stream)


@contextmanager
def _as_kernels_compute() -> Iterator[None]:
    """Torch in here knows no gradients and no autocast, as kernels do not."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _sums_on_cpu(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    expert_offsets: torch.Tensor | None,
    expert_counts: torch.Tensor | None,
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """For each expert with rows, yield it, where they are among all rows or places, and their float32 [rows, N]."""
    if expert_offsets is not None:
        own_rows = [slice(begin, end) for begin, end in pairwise(expert_offsets.tolist())]
    else:
        assert expert_counts is not None
        places = a.shape[1]
        own_rows = [slice(e * places, e * places + min(n, places)) for e, n in enumerate(expert_counts.tolist())]
    rows, by_row = a.flatten(0, -2), a_scales.dim() < a.dim()
    scales = a_scales.flatten() if by_row else a_scales.flatten(0, -2)
    for e, (own, weights, weight_scales) in enumerate(zip(own_rows, b, b_scales, strict=True)):
        if own.start >= own.stop:
            continue
        if by_row:
            yield e, own, (rows[own].float() @ weights.float().T) * (scales[own, None] * weight_scales)
        else:
            spread = weight_scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            yield e, own, dequantize_fp8(rows[own], scales[own]) @ (weights.float() * spread).T


def _check(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    expert_offsets: torch.Tensor | None,
    expert_counts: torch.Tensor | None,
    recipe: str,
    b_name: str = "b",
) -> None:
    fp8, fp32, int32 = torch.float8_e4m3fn, torch.float32, torch.int32
    require_recipe(recipe)
    for name, tensor in (("a", a), (b_name, b)):
        require_type(name, tensor, torch.Tensor, "a torch.Tensor")
    in_blocks = is_packed(b) or (b.dim() == 3 and not b.shape[1] % BLOCK and not b.shape[2] % BLOCK)
    if not b.numel() or not in_blocks:
        raise ShapeMismatch(f"{b_name} is {list(b.shape)}, expected [E, N, K], N and K multiples of {BLOCK}")
    num_experts, n, k = shape_of_weights(b)
    if (expert_offsets is None) == (expert_counts is None):
        given = "neither" if expert_offsets is None else "both"
        raise InvalidArgument(
            f"{given} of expert_offsets and expert_counts given, expected one of them: offsets beside a of [R, K], "
            "counts beside a of [E, S, K]"
        )
    slots = expert_counts is not None
    if a.dim() != (3 if slots else 2):
        form = "[E, S, K] beside expert_counts" if slots else "[R, K] beside expert_offsets"
        raise ShapeMismatch(f"a is {list(a.shape)}, expected {form}")
    rows = [num_experts, a.shape[1]] if slots else [a.shape[0]]
    check_tensor("a", a, fp8, [*rows, k], a.device)
    _check_granularity("a_scales", a_scales, rows, k // BLOCK, "row", recipe)
    check_tensor("a_scales", a_scales, fp32, rows if recipe == "row" else [*rows, k // BLOCK], a.device)
    check_weights(b_name, b, b_scales, [num_experts, n, k], a.device, recipe)
    if expert_offsets is not None:
        check_tensor("expert_offsets", expert_offsets, int32, [num_experts + 1], a.device)
    if expert_counts is not None:
        check_tensor("expert_counts", expert_counts, int32, [num_experts], a.device)
    check_aligned("a", a)
    if recipe == "block":  # threads read those of rows
        check_aligned("a_scales", a_scales)
    check_device(a.device)


def _check_granularity(name: str, scales: object, rows: list[int], blocks: int, of: str, recipe: str) -> None:
    """Raise for scales of the other recipe, by its name.

    Args:
        rows: shape of the scales by recipe "row". blocks: of 128 values in a row.
        of: what a scale is of by recipe "row".
    """
    if not isinstance(scales, torch.Tensor) or scales.is_nested:
        return
    of_blocks = [*rows, blocks] if of == "row" else [rows[0], rows[1] // BLOCK, blocks]
    shape = list(scales.shape)
    if recipe == "block" and shape == rows:
        raise ShapeMismatch(f"{name} is {shape}, a scale for each {of}; recipe='row' takes those, this is 'block'")
    if recipe == "row" and shape == of_blocks:
        values = "128" if of == "row" else "128 x 128"
        raise ShapeMismatch(
            f"{name} is {shape}, a scale for each {values} values; recipe='block' takes those, this is 'row'"
        )


def check_device(device: torch.device) -> None:
    """Raise BackendUnavailable unless grouped GEMMs in FP8 run on this device."""
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER):
        return
    raise BackendUnavailable(f"grouped GEMMs in FP8 need a Hopper GPU, or a CPU; the device is {device}")


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: list[int], device: torch.device) -> None:
    """Raise an error unless it is a tensor of this dtype, shape and device, and contiguous."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
        kind = "a nested tensor" if isinstance(tensor, torch.Tensor) else a_type(tensor)
        raise InvalidArgument(f"{name} is {kind}, expected a torch.Tensor")
    if tensor.dtype != dtype:
        raise DtypeMismatch(f"{name} is {tensor.dtype}, expected {dtype}")
    if list(tensor.shape) != shape or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        raise ShapeMismatch(f"{name} is {list(tensor.shape)}{layout}, expected {shape}, contiguous")
    if tensor.device != device:
        raise DeviceMismatch(f"{name} is on {tensor.device}, expected {device}")


def check_weights(
    name: str,
    weights: torch.Tensor,
    scales: torch.Tensor,
    shape: list[int],
    device: torch.device,
    recipe: str = "block",
) -> None:
    """Raise an error unless the weights are FP8 of this shape [E, N, K], or packed, with the scales of the recipe."""
    num_experts, n, k = shape
    if isinstance(weights, torch.Tensor) and is_packed(weights):
        if recipe != "row":
            raise InvalidArgument(f"{name} is packed in four bits, which recipe='row' takes; this is {recipe!r}")
        check_tensor(name, weights, torch.uint8, [num_experts, n // BLOCK, k // BLOCK, FOUR_BIT_BLOCK], device)
    else:
        check_tensor(name, weights, torch.float8_e4m3fn, shape, device)
    _check_granularity(f"{name}_scales", scales, [num_experts, n], k // BLOCK, "output channel", recipe)
    of_scales = [num_experts, n] if recipe == "row" else [num_experts, n // BLOCK, k // BLOCK]
    check_tensor(f"{name}_scales", scales, torch.float32, of_scales, device)
    check_aligned(name, weights)
    check_aligned(f"{name}_scales", scales)


def _check_bias(bias: torch.Tensor | None, shape: list[int], a: torch.Tensor) -> None:
    if bias is not None:
        check_tensor("bias", bias, torch.float32, shape, a.device)


def gated_activation(activation: Activation | str, clamp: float | None, name: str) -> Activation:
    """Return the activation of an argument, with the limit that another argument, ``name``, gives.

    Raises:
        InvalidArgument: the activation is unknown or has no gates, or its limits are two, or not above 0.
    """
    form = Activation.of(activation)
    if not form.gated:
        raise InvalidArgument(
            f"activation is {activation!r}, which has no gates, as FP8 kernels need them; pass one such as 'swiglu'"
        )
    if clamp is None:
        return form
    if not isinstance(clamp, Real) or not clamp > 0:
        raise InvalidArgument(f"{name} is {clamp!r}, expected a number above 0, or None")
    if form.limit is not None:
        raise InvalidArgument(
            f"{name} is {clamp}, but the activation has limit={form.limit} already; give one of them"
        )
    return form if clamp == math.inf else replace(form, limit=float(clamp))


def swiglu_epilogue(form: Activation, power_of_two_scales: bool, fast_math: bool, biased: bool) -> SwigluFp8Epilogue:
    """Choose the epilogue that computes a gated activation."""
    return SwigluFp8Epilogue(
        clamped=form.limit is not None,
        power_of_two_scales=power_of_two_scales,
        fast_math=fast_math,
        function=form.function,
        adjusted=form.alpha != 1.0 or form.up_offset != 0.0,
        biased=biased,
    )


def weights_argument(w: torch.Tensor) -> tuple[str, Any]:
    """Return the name and the value of the argument that says where weights are."""
    return ("four_bits", w.data_ptr()) if is_packed(w) else ("b", operand_map(w, WEIGHT_BOX))


def tell_activation(args: GroupedGemmArgs, form: Activation) -> None:
    """Fill in the numbers of an activation."""
    args.clamp, args.alpha, args.up_offset = form.limit or 0.0, form.alpha, form.up_offset


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raise an error unless the tensor begins at an address that 16-byte copies can read."""
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise InvalidArgument(f"{name} does not begin at a multiple of {ALIGNMENT_BYTES} bytes; pass a copy of it")
