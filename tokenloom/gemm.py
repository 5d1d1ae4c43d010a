"""Matrix products of rows that are grouped by expert."""

from __future__ import annotations

import torch

from tokenloom.errors import BackendUnavailable, DeviceMismatch, DtypeMismatch, ShapeMismatch
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.gemm.launch import (
    A_BOX_ROWS,
    B_BOX_ROWS,
    BLOCK,
    CLUSTER,
    grouped_gemm_spec,
    operand_map,
    scale_map,
)

HOPPER = (9, 0)


def grouped_gemm_fp8(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
) -> torch.Tensor:
    """Each expert's rows times its weights: ``out[rows of e] = a[rows of e] @ b[e].T``, in FP8 with block scales.

    Partial products of 128 values of K are scaled and added in float32; the sum is rounded once. No host read: the
    rows of each expert are known on the device only. Rows before the first and after the last offset are left alone.

    Args:
        a: float8_e4m3fn [R, K], rows grouped by expert (``routed.tokens`` of layout "expert"), contiguous.
        a_scales: float32 [R, K / 128], contiguous (``routed.scales``).
        b: float8_e4m3fn [E, N, K], contiguous; N and K multiples of 128.
        b_scales: float32 [E, N / 128, K / 128], contiguous.
        expert_offsets: int32 [E + 1], first row of each expert, on the same device (``routed.expert_offsets``).

    Returns:
        bfloat16 [R, N].

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch: an argument is not as above.
        BackendUnavailable: the tensors are not on a Hopper GPU.
    """
    _check(a, a_scales, b, b_scales, expert_offsets)
    rows, (num_experts, n, k) = a.shape[0], b.shape
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=a.device)
    if rows == 0:
        return out
    kernel = Kernel(*grouped_gemm_spec(num_experts, n, k), a.device.index)
    args = kernel.args
    args.a, args.b = operand_map(a, A_BOX_ROWS), operand_map(b, B_BOX_ROWS)
    if k % (4 * BLOCK) == 0:  # rows of scales that TMA can find
        args.a_scale_map = scale_map(a_scales)
    args.a_scales, args.b_scales = a_scales.data_ptr(), b_scales.data_ptr()
    args.offsets, args.out = expert_offsets.data_ptr(), out.data_ptr()
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    kernel.launch(sms // CLUSTER * CLUSTER, torch.cuda.current_stream(a.device).cuda_stream)
    return out


def _check(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, expert_offsets: torch.Tensor
) -> None:
    fp8, fp32, int32 = torch.float8_e4m3fn, torch.float32, torch.int32
    if b.dim() != 3 or b.shape[1] % BLOCK or b.shape[2] % BLOCK:
        raise ShapeMismatch(f"b is {list(b.shape)}, expected [E, N, K] with N and K multiples of {BLOCK}")
    num_experts, n, k = b.shape
    rows = a.shape[0] if a.dim() else 0
    wanted = {
        "a": (a, fp8, [rows, k]),
        "a_scales": (a_scales, fp32, [rows, k // BLOCK]),
        "b": (b, fp8, [num_experts, n, k]),
        "b_scales": (b_scales, fp32, [num_experts, n // BLOCK, k // BLOCK]),
        "expert_offsets": (expert_offsets, int32, [num_experts + 1]),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype != dtype:
            raise DtypeMismatch(f"{name} is {tensor.dtype}, expected {dtype}")
        if list(tensor.shape) != shape or not tensor.is_contiguous():
            layout = "" if tensor.is_contiguous() else ", not contiguous"
            raise ShapeMismatch(f"{name} is {list(tensor.shape)}{layout}, expected {shape}, contiguous")
        if tensor.device != a.device:
            raise DeviceMismatch(f"{name} is on {tensor.device}, a is on {a.device}")
    if a.device.type != "cuda" or torch.cuda.get_device_capability(a.device) != HOPPER:
        raise BackendUnavailable(f"grouped_gemm_fp8 needs a Hopper GPU, the tensors are on {a.device}")
