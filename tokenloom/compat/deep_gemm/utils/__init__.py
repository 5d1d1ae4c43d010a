"""``deep_gemm.utils``: what tests of the layer import."""

from tokenloom.compat.deep_gemm.utils import dist, math
from tokenloom.compat.deep_gemm.utils.dist import init_dist, uneven_all_gather
from tokenloom.compat.deep_gemm.utils.math import per_block_cast_to_fp8, per_token_cast_to_fp8

__all__ = ["dist", "init_dist", "math", "per_block_cast_to_fp8", "per_token_cast_to_fp8", "uneven_all_gather"]
