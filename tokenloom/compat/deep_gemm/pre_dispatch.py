"""What SGLang calls before the layer: one step from bfloat16 tokens and their routing to a filled buffer."""

from __future__ import annotations

import torch

from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.ops.gemm import check_tensor
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import FP8_BLOCK


def mega_moe_pre_dispatch_sm90(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    num_tokens: int,
    group_size: int = FP8_BLOCK,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Quantise tokens into the buffer, write their routing beside them, and mark the other rows as unused.

    The first T rows of the four ``buf_`` tensors are written. Behind them ``buf_topk_idx`` becomes -1 and
    ``buf_topk_weights`` 0, so a call on more rows than T computes nothing for those. Graphs can capture it.

    Args:
        x: bfloat16 [N, H], H a multiple of 128. float16 and float32 are taken too.
        topk_idx: int32 or int64 [N, K], expert ids; -1 is an unused place.
        topk_weights: float32 [N, K].
        buf_x: ``x`` of a :class:`SM90SymmBuffer`, or a tensor like it.
        buf_x_sf: its ``x_sf``, or the like.
        buf_topk_idx: its ``topk_idx``, or the like.
        buf_topk_weights: its ``topk_weights``, or the like.
        num_tokens: T, rows of x to take; at most N and Mmax.
        group_size: 128, values of a token that share a scale.
        routed_scaling_factor: factor of all weights.

    Raises:
        InvalidArgument: ``num_tokens`` or ``group_size`` is not as above.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
    """
    if group_size != FP8_BLOCK:
        raise InvalidArgument(f"group_size is {group_size!r}; this layer takes a scale per {FP8_BLOCK} values")
    if x.dim() != 2 or topk_idx.dim() != 2 or buf_x.dim() != 2:
        raise ShapeMismatch(
            f"x is {list(x.shape)}, topk_idx is {list(topk_idx.shape)}, buf_x is {list(buf_x.shape)}; expected "
            "[N, H], [N, K] and [Mmax, H]"
        )
    rows, hidden = x.shape
    room, device = len(buf_x), x.device
    if not 0 <= num_tokens <= min(rows, room):
        raise InvalidArgument(f"num_tokens is {num_tokens}, expected 0 to {rows} rows of x and {room} of the buffer")
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise DtypeMismatch(f"topk_idx is {topk_idx.dtype}, expected int32 or int64")
    top_k = topk_idx.shape[1]
    check_tensor("topk_idx", topk_idx, topk_idx.dtype, [rows, top_k], device)
    check_tensor("topk_weights", topk_weights, torch.float32, [rows, top_k], device)
    check_tensor("buf_x", buf_x, torch.float8_e4m3fn, [room, hidden], device)
    check_tensor("buf_x_sf", buf_x_sf, torch.float32, [room, hidden // FP8_BLOCK], device)
    check_tensor("buf_topk_idx", buf_topk_idx, torch.int64, [room, top_k], device)
    check_tensor("buf_topk_weights", buf_topk_weights, torch.float32, [room, top_k], device)
    values, scales = quantize_fp8(x[:num_tokens])
    buf_x[:num_tokens].copy_(values)
    buf_x_sf[:num_tokens].copy_(scales)
    buf_topk_idx[:num_tokens].copy_(topk_idx[:num_tokens])
    torch.mul(topk_weights[:num_tokens].detach(), routed_scaling_factor, out=buf_topk_weights[:num_tokens])
    buf_topk_idx[num_tokens:].fill_(-1)
    buf_topk_weights[num_tokens:].zero_()
