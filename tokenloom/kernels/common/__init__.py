"""What the host sides of kernels share."""

from tokenloom.kernels.common.call import NUM_FIELDS, Call, int32_fields, uint64_fields
from tokenloom.kernels.common.numbers import DTYPES, HOPPER, LAYOUTS, describe, short_name
from tokenloom.kernels.common.ring import CONTROL_BYTES, MAX_SHARED_BYTES, MOST_STAGES, ring
from tokenloom.kernels.common.variant import Variant

__all__ = [
    "CONTROL_BYTES",
    "DTYPES",
    "HOPPER",
    "LAYOUTS",
    "MAX_SHARED_BYTES",
    "MOST_STAGES",
    "NUM_FIELDS",
    "Call",
    "Variant",
    "describe",
    "int32_fields",
    "ring",
    "short_name",
    "uint64_fields",
]
