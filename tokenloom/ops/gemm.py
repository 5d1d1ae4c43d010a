"""FP8 GEMMs over rows grouped by expert, and checks of their operands."""

from __future__ import annotations

import torch

from tokenloom.errors import BackendUnavailable, DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import HOPPER
from tokenloom.kernels.gemm.launch import (
    A_BOX_ROWS,
    B_BOX_ROWS,
    BLOCK,
    CLUSTER,
    GroupedGemmVariant,
    SwigluFp8Epilogue,
    operand_map,
    scale_map,
    wide_scales,
)

ALIGNMENT_BYTES = 16
INTERLEAVED_ROWS = 8
"""Rows of gates, then as many rows of ups, that take turns in the weights of a fused SwiGLU."""


def grouped_gemm_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
) -> torch.Tensor:
    """Multiply each expert's rows by its weights in FP8: ``out[rows of e] = a[rows of e] @ b[e].T``.

    Each partial sum over 128 values of K is scaled and added in float32; the total is rounded once. The host reads
    nothing: only the device knows how many rows each expert has. Rows before the first offset and after the last are
    not written, so their values are unspecified.

    Args:
        a: float8_e4m3fn [R, K], rows grouped by expert (``routed.tokens`` of layout "expert"), contiguous.
        a_scales: float32 [R, K / 128], contiguous (``routed.scales``).
        b: float8_e4m3fn [E, N, K], contiguous, N and K multiples of 128.
        b_scales: float32 [E, N / 128, K / 128], contiguous.
        expert_offsets: int32 [E + 1], first row of each expert and the end, on the same device
            (``routed.expert_offsets``).

    Returns:
        bfloat16 [R, N].

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch: an argument is not as above.
        BackendUnavailable: the tensors are not on a Hopper GPU.
    """
    _check(a, a_scales, b, b_scales, expert_offsets)
    kernel = Kernel(GroupedGemmVariant(*b.shape).spec(), a.device.index)
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    _launch(kernel, a, a_scales, b, b_scales, expert_offsets, out)
    return out


def grouped_swiglu_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    w1: torch.Tensor,
    w1_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    *,
    clamp: float | None = None,
    power_of_two_scales: bool = False,
    fast_math: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``silu(gate) * up * weight``, the first half of SwiGLU experts, where ``gate, up = w1[e] @ row``.

    Sums are those of ``grouped_gemm_fp8``. They stay in float32 until the result is quantised as in
    ``quantize_fp8``.

    Args:
        a: float8_e4m3fn [R, K], rows grouped by expert, contiguous.
        a_scales: float32 [R, K / 128], contiguous.
        w1: float8_e4m3fn [E, 2I, K] from ``interleave_gate_and_up``, I a multiple of 128.
        w1_scales: float32 [E, 2I / 128, K / 128], gates, then ups, not interleaved.
        expert_offsets: int32 [E + 1], first row of each expert and the end, on the same device.
        row_weights: float32 [R], or None for ones.
        clamp: largest gate, and largest absolute up, before the activation. None sets no limit.
        power_of_two_scales: as in ``quantize_fp8``.
        fast_math: use the hardware's exponential and division, accurate to a few units in the last place of float32.

    Returns:
        Values float8_e4m3fn [R, I] and scales float32 [R, I / 128], as ``grouped_gemm_fp8`` takes them. Rows outside
        the offsets are unspecified.

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch: an argument is not as above.
        InvalidArgument: clamp is not above 0.
        BackendUnavailable: the tensors are not on a Hopper GPU.
    """
    if w1.dim() == 3 and w1.shape[1] % (2 * BLOCK):
        raise ShapeMismatch(f"w1 is {list(w1.shape)}, expected [E, 2I, K] with I a multiple of {BLOCK}")
    _check(a, a_scales, w1, w1_scales, expert_offsets, b_name="w1")
    if row_weights is not None:
        check_tensor("row_weights", row_weights, torch.float32, [a.shape[0]], a.device)
    check_clamp("clamp", clamp)
    epilogue = SwigluFp8Epilogue(
        clamped=clamp is not None, power_of_two_scales=power_of_two_scales, fast_math=fast_math
    )
    kernel = Kernel(GroupedGemmVariant(*w1.shape, epilogue=epilogue).spec(), a.device.index)
    rows, width = a.shape[0], w1.shape[1] // 2
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=a.device)
    out_scales = torch.empty(rows, width // BLOCK, dtype=torch.float32, device=a.device)
    kernel.args.out_scales = out_scales.data_ptr()
    kernel.args.row_weights = 0 if row_weights is None else row_weights.data_ptr()
    kernel.args.clamp = 0.0 if clamp is None else clamp
    _launch(kernel, a, a_scales, w1, w1_scales, expert_offsets, out)
    return out, out_scales


def interleave_gate_and_up(w1: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of w1, gates then ups, so that 8 gates and 8 ups take turns.

    ``grouped_swiglu_fp8`` and ``MegaMoE.use_weights`` take weights in this order.

    Args:
        w1: [E, 2I, K], gates first, then ups; I a multiple of 8. Any dtype.

    Returns:
        A new tensor with the same rows, shape and dtype.
    """
    experts, rows, k = w1.shape
    halves = w1.view(torch.uint8) if w1.itemsize == 1 else w1
    halves = halves.reshape(experts, 2, rows // (2 * INTERLEAVED_ROWS), INTERLEAVED_ROWS, k)
    return halves.transpose(1, 2).reshape(experts, rows, k).view(w1.dtype)


def separate_gate_and_up(w1: torch.Tensor) -> torch.Tensor:
    """Undo ``interleave_gate_and_up``: return [E, 2I, K], gates first, then ups."""
    experts, rows, k = w1.shape
    turns = w1.view(torch.uint8) if w1.itemsize == 1 else w1
    turns = turns.reshape(experts, rows // (2 * INTERLEAVED_ROWS), 2, INTERLEAVED_ROWS, k)
    return turns.transpose(1, 2).reshape(experts, rows, k).view(w1.dtype)


def _launch(
    kernel: Kernel,
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if a.shape[0] == 0:
        return
    args = kernel.args
    args.a, args.b = operand_map(a, A_BOX_ROWS), operand_map(b, B_BOX_ROWS)
    if wide_scales(a.shape[1]):
        args.a_scale_map = scale_map(a_scales)
    args.a_scales, args.b_scales = a_scales.data_ptr(), b_scales.data_ptr()
    args.first_expert, args.end_expert = 0, b.shape[0]
    args.offsets, args.out = expert_offsets.data_ptr(), out.data_ptr()
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    kernel.launch(sms // CLUSTER * CLUSTER, torch.cuda.current_stream(a.device).cuda_stream)


def _check(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    b_name: str = "b",
) -> None:
    fp8, fp32, int32 = torch.float8_e4m3fn, torch.float32, torch.int32
    if b.dim() != 3 or not len(b) or b.shape[1] % BLOCK or b.shape[2] % BLOCK:
        raise ShapeMismatch(f"{b_name} is {list(b.shape)}, expected [E, N, K], N and K multiples of {BLOCK}")
    num_experts, n, k = b.shape
    rows = a.shape[0] if a.dim() else 0
    check_tensor("a", a, fp8, [rows, k], a.device)
    check_tensor("a_scales", a_scales, fp32, [rows, k // BLOCK], a.device)
    check_weights(b_name, b, b_scales, [num_experts, n, k], a.device)
    check_tensor("expert_offsets", expert_offsets, int32, [num_experts + 1], a.device)
    check_aligned("a", a)
    check_aligned("a_scales", a_scales)
    if a.device.type != "cuda" or torch.cuda.get_device_capability(a.device) != HOPPER:
        raise BackendUnavailable(f"grouped GEMMs in FP8 need a Hopper GPU, the tensors are on {a.device}")


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: list[int], device: torch.device) -> None:
    """Raise an error unless the tensor has this dtype, shape and device, and is contiguous."""
    if tensor.dtype != dtype:
        raise DtypeMismatch(f"{name} is {tensor.dtype}, expected {dtype}")
    if list(tensor.shape) != shape or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        raise ShapeMismatch(f"{name} is {list(tensor.shape)}{layout}, expected {shape}, contiguous")
    if tensor.device != device:
        raise DeviceMismatch(f"{name} is on {tensor.device}, expected {device}")


def check_weights(
    name: str, weights: torch.Tensor, scales: torch.Tensor, shape: list[int], device: torch.device
) -> None:
    """Raise an error unless the weights are FP8 of this shape [E, N, K], with a scale per 128 x 128 values."""
    num_experts, n, k = shape
    check_tensor(name, weights, torch.float8_e4m3fn, shape, device)
    check_tensor(f"{name}_scales", scales, torch.float32, [num_experts, n // BLOCK, k // BLOCK], device)
    check_aligned(name, weights)
    check_aligned(f"{name}_scales", scales)


def check_clamp(name: str, clamp: float | None) -> None:
    """Raise an error unless the clamp of activations is above 0, or None."""
    if clamp is not None and not clamp > 0:
        raise InvalidArgument(f"{name} is {clamp}, expected a number above 0, or None")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raise an error unless the tensor begins at an address that 16-byte copies can read."""
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise InvalidArgument(f"{name} does not begin at a multiple of {ALIGNMENT_BYTES} bytes; pass a copy of it")
