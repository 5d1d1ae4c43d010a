"""What the host sides of kernels share."""

from tokenloom.kernels.common.call import (
    HEADER_WORDS,
    MARK_WORDS,
    MARKS,
    OPENING_FIELDS,
    PARTS,
    TURNS,
    Call,
    Deadline,
    FieldsAtOnce,
    int32_fields,
    uint64_fields,
)
from tokenloom.kernels.common.numbers import (
    DTYPES,
    HOPPER,
    LAYOUTS,
    MAX_BLOCKS,
    MAX_RANKS,
    UNIT_BYTES,
    describe,
    is_dense,
    short_name,
)
from tokenloom.kernels.common.ring import CONTROL_BYTES, MAX_SHARED_BYTES, MOST_STAGES, require_shared, ring
from tokenloom.kernels.common.variant import Variant, spec_of

__all__ = [
    "CONTROL_BYTES",
    "DTYPES",
    "HEADER_WORDS",
    "HOPPER",
    "LAYOUTS",
    "MARKS",
    "MARK_WORDS",
    "MAX_BLOCKS",
    "MAX_RANKS",
    "MAX_SHARED_BYTES",
    "MOST_STAGES",
    "OPENING_FIELDS",
    "PARTS",
    "TURNS",
    "UNIT_BYTES",
    "Call",
    "Deadline",
    "FieldsAtOnce",
    "Variant",
    "describe",
    "int32_fields",
    "is_dense",
    "require_shared",
    "ring",
    "short_name",
    "spec_of",
    "uint64_fields",
]
