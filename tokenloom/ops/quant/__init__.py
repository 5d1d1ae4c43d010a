"""Quantisation: values in a narrow format, with scales."""

from tokenloom.ops.quant.four_bits import MXFP4, FourBits, dequantize_four_bits
from tokenloom.ops.quant.fp8 import dequantize_fp8, quantize_fp8, quantize_fp8_blocks, require_recipe
from tokenloom.ops.quant.weights import WeightReport, weights_for

__all__ = [
    "MXFP4",
    "FourBits",
    "WeightReport",
    "dequantize_four_bits",
    "dequantize_fp8",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "require_recipe",
    "weights_for",
]
