"""``deep_gemm.utils.math``: casts to FP8 with float32 scales."""

from __future__ import annotations

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.ops.quant import quantize_fp8, quantize_fp8_blocks
from tokenloom.plan import FP8_BLOCK

__all__ = ["per_block_cast_to_fp8", "per_token_cast_to_fp8"]


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = FP8_BLOCK, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise tokens as the layer takes them.

    Args:
        x: floating point [T, H], H a multiple of 128.
        use_ue8m0: round scales up to powers of two.
        gran_k: 128, values of a token that share a scale.
        use_packed_ue8m0: False.

    Returns:
        float8_e4m3fn [T, H], and float32 scales [T, H / 128].

    Raises:
        InvalidArgument: another ``gran_k``, or packed scales, which GPUs of SM100 take.
        ShapeMismatch: H is not a multiple of 128.
    """
    if gran_k != FP8_BLOCK or use_packed_ue8m0:
        raise InvalidArgument(
            f"gran_k is {gran_k}, use_packed_ue8m0 is {use_packed_ue8m0}; tokenloom has float32 scales of "
            f"{FP8_BLOCK} values"
        )
    return quantize_fp8(x.contiguous(), power_of_two_scales=use_ue8m0)


def per_block_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = FP8_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights as the layer takes them.

    Args:
        x: floating point [N, K], multiples of 128.
        use_ue8m0: False.
        gran_k: 128, side of the blocks that share a scale.

    Returns:
        float8_e4m3fn [N, K], and float32 scales [N / 128, K / 128].

    Raises:
        InvalidArgument: another ``gran_k``, or scales that are powers of two.
        ShapeMismatch: N or K is not a multiple of 128.
    """
    if gran_k != FP8_BLOCK or use_ue8m0:
        raise InvalidArgument(
            f"gran_k is {gran_k}, use_ue8m0 is {use_ue8m0}; tokenloom has float32 scales of {FP8_BLOCK} x "
            f"{FP8_BLOCK} weights"
        )
    return quantize_fp8_blocks(x.contiguous())
