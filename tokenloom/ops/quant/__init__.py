"""Quantisation: values in a narrow format, with scales."""

from tokenloom.ops.quant.fp8 import dequantize_fp8, quantize_fp8, quantize_fp8_blocks, require_recipe, share_row_scales

__all__ = ["dequantize_fp8", "quantize_fp8", "quantize_fp8_blocks", "require_recipe", "share_row_scales"]
