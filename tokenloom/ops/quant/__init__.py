"""Quantisation: values in a narrow format, with scales."""

from tokenloom.ops.quant.four_bits import MXFP4, FourBits, dequantize_four_bits
from tokenloom.ops.quant.fp8 import dequantize_fp8, quantize_fp8, quantize_fp8_blocks, require_recipe
from tokenloom.ops.quant.packed_weights import is_packed, pack_weights, shape_of_weights, unpack_weights
from tokenloom.ops.quant.weights import WeightReport, weights_for

__all__ = [
    "MXFP4",
    "FourBits",
    "WeightReport",
    "dequantize_four_bits",
    "dequantize_fp8",
    "is_packed",
    "pack_weights",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "require_recipe",
    "shape_of_weights",
    "unpack_weights",
    "weights_for",
]
