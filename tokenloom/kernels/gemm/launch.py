"""The host side of the grouped FP8 GEMM: its arguments and its variants."""

from __future__ import annotations

import ctypes
import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import TensorMap, tensor_map
from tokenloom.kernels.common import MAX_SHARED_BYTES, RESERVED_SHARED_BYTES, Deadline, int32_fields, uint64_fields
from tokenloom.plan import FUNCTIONS, align_up

THREADS = 384
CLUSTER = 2
GROUPS, BLOCK, LEAST_STEP = 2, 128, 32
"""kGroups, kBlock and kLeastStep of device/roles/gemm_tile.cuh."""
TILE_HEIGHTS = {"block": (128,), "row": (128, 160, 256)}
"""By recipe, choices of the most rows of a tile. Any multiple of 32 from 64 to 256 works with "row". These are the
fastest for some number of rows (microbench/notebook/gemm.md)."""
FEW_ROWS = 64
"""The most rows of the lowest tiles of weights in four bits. An SM computes two of them at a time, in two blocks: one
decodes weights while the other waits."""
MOST_BLOCKS_PER_SM = 2
"""Of any variant."""
TILE_COLUMNS = {"block": 256, "row": 128}
"""FixedCut::kColumns and EvenCut::kColumns of device/roles/expert_tiles.cuh."""
ROW_BOX, WEIGHT_BOX = 32, 128
"""kRowBox and kWeightBox of device/roles/operand_ring.cuh."""
SCALE_BLOCKS = 8
"""kScaleBlocks of device/roles/gemm_tile.cuh."""
MOST_STAGES = {"block": 4, "row": 8}
FOUR_BIT_BLOCK, FOUR_BIT_STAGE = 8704, 9216
"""kFourBitBlock and FourBitOperand::kStageBytes of device/roles/four_bits.cuh."""
MOST_BYTES_ONCE = 512 << 20
"""Bytes of all weights up to which a MegaMoE gains when the second-level cache drops them first (docs/performance)."""
QUANTIZE_THREADS = 256
STORE_WARPS = 2
"""kStoreWarps of device/roles/store.cuh."""
BOARD_BYTES = 4 * (2 * 4 + 2 * 8)
"""TileBoard of device/roles/claimed_tiles.cuh: kSlots times two numbers and two barriers."""
TRACE_ROLES = ("load", "multiply 0", "multiply 1", "epilogue 0", "epilogue 1", "store", "start")
TRACED_TILES = 128
"""TraceRole and kTracedTiles of device/roles/trace.cuh."""


@dataclass(frozen=True)
class Bf16Epilogue:
    """Each sum is rounded once to bfloat16. The output is [rows, n].

    Attributes:
        biased: ``GroupedGemmArgs.bias``, times the row's weight, is added before.
    """

    biased: bool = False
    bytes_of_columns: ClassVar[dict[str, float]] = {"block": 2, "row": 2}
    shared_bytes: ClassVar[int] = 1

    def __str__(self) -> str:
        return "bf16 biased" if self.biased else "bf16"

    def shape(self) -> dict[str, int]:
        """Compile-time integers that choose it."""
        plain = dict.fromkeys(("swiglu", "clamped", "power_of_two", "fast_math", "plain", "function"), 0)
        return {**plain, "biased": int(self.biased)}


@dataclass(frozen=True, kw_only=True)
class SwigluFp8Epilogue:
    """Sums are gates and ups, which become weighted activations. The output is [rows, n / 2].

    With recipe "block" it is FP8, beside scales; with "row" it is bfloat16, which is quantised once rows are whole.

    Attributes:
        clamped: gates are at most ``GroupedGemmArgs.clamp``; ups are within plus and minus that.
        power_of_two_scales: scales are rounded up to powers of two, as in ``quantize_fp8``.
        fast_math: exponential and division are the hardware's approximations.
        function: f of ``Activation``.
        adjusted: alpha and the offset of ups are arguments. Otherwise there are none.
        biased: ``GroupedGemmArgs.bias`` is added to gates and ups first.
    """

    clamped: bool = False
    power_of_two_scales: bool = False
    fast_math: bool = True
    function: str = "silu"
    adjusted: bool = False
    biased: bool = False
    bytes_of_columns: ClassVar[dict[str, float]] = {"block": 0.5, "row": 1}
    shared_bytes: ClassVar[int] = 4 * TILE_HEIGHTS["block"][0]

    def __str__(self) -> str:
        options = {
            "clamped": self.clamped,
            "powers of two": self.power_of_two_scales,
            "exact functions": not self.fast_math,
            self.function: self.function != "silu",
            "adjusted": self.adjusted,
            "biased": self.biased,
        }
        return " ".join(["swiglu fp8", *(name for name, chosen in options.items() if chosen)])

    def shape(self) -> dict[str, int]:
        """Compile-time integers that choose it."""
        return {
            "swiglu": 1,
            "clamped": int(self.clamped),
            "power_of_two": int(self.power_of_two_scales),
            "fast_math": int(self.fast_math),
            "plain": int(self.function == "silu" and not self.adjusted and not self.biased),
            "function": FUNCTIONS.index(self.function),
            "biased": int(self.biased),
        }


class GroupedGemmArgs(ctypes.Structure):
    """Mirror of GroupedGemmArgs in grouped_gemm.cuh, which says what each value is."""

    _fields_ = [
        ("a", TensorMap),
        ("b", TensorMap),
        ("a_scale_map", TensorMap),
        *uint64_fields("a_scales", "b_scales", "offsets", "out", "out_scales", "row_weights"),
        ("clamp", ctypes.c_float),
        *int32_fields("capacity"),
        *uint64_fields("trace"),
        *uint64_fields("counts", "bias"),
        ("alpha", ctypes.c_float),
        ("up_offset", ctypes.c_float),
        *uint64_fields("a_windows", "begun", "stored"),
        ("stored_by", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        *uint64_fields("arrived", "expected"),
        ("deadline", Deadline),
        *uint64_fields("row_homes", "peers", "results", "claimed"),
        *uint64_fields("activations", "activation_scales", "quantized", "four_bits"),
        ("padding", ctypes.c_uint64 * 4),
    ]


@dataclass(frozen=True)
class GroupedGemmVariant:
    """One compiled form of the grouped GEMM.

    Attributes:
        num_experts: weights are [num_experts, n, k].
        n, k: multiples of 128; n of 256 beside SwigluFp8Epilogue.
        epilogue: what becomes of the sums.
        awaits: the number of ranks whose rows arrive while it runs, or 0. This is the first of two GEMMs in turn: it
            counts the tiles of rows that it has stored. Both may be launched early.
        scatters: the number of ranks to which rows of the output go, each to the one where its token is, or 0. This is
            the second GEMM, which takes rows as they are stored. With recipe "row" it first quantises them.
        slots: each expert has places of its own for rows, and a count. Otherwise offsets say which rows are whose.
        claims: clusters claim tiles one by one, instead of taking every so many; see ``GroupedGemmArgs.claimed``.
        traced: roles write when they work on which tile, see :func:`trace_times`.
        recipe: one of ``RECIPES``. With "row", rows of a and rows of b (output channels) have one scale each, and
            products are added by the tensor cores over all of K.
        tile_rows: the most rows of a tile, by default the most of ``TILE_HEIGHTS``. With fewer rows, more weights are
            on their way. Two GEMMs in turn have the same.
        four_bits: weights are ``GroupedGemmArgs.four_bits`` instead of b; with recipe "row". Tiles may then have
            ``FEW_ROWS``.
    """

    num_experts: int
    n: int
    k: int
    _: KW_ONLY
    epilogue: Bf16Epilogue | SwigluFp8Epilogue = Bf16Epilogue()
    awaits: int = 0
    scatters: int = 0
    slots: bool = False
    claims: bool = False
    traced: bool = False
    recipe: str = "block"
    tile_rows: int | None = None
    four_bits: bool = False

    def __str__(self) -> str:
        choices = ("slots", "claims", "traced")
        parts = [f"e{self.num_experts} n{self.n} k{self.k}", str(self.epilogue)]
        parts += [f"tiles of {self.tile_rows} rows"] if self.tile_rows else []
        parts += ["row scales"] if self.recipe == "row" else []
        parts += ["four bits"] if self.four_bits else []
        parts += [f"awaits rows of {self.awaits} ranks"] if self.awaits else []
        parts += [f"scatters to {self.scatters} ranks"] if self.scatters else []
        return ", ".join(["grouped_gemm", *parts, *(name for name in choices if getattr(self, name))])

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any even number of blocks that run at the same time.

        Raises:
            InvalidArgument: offsets of so many experts leave no shared memory for operands.
        """
        per_sm = self.blocks_per_sm
        room = (MAX_SHARED_BYTES + RESERVED_SHARED_BYTES) // per_sm - RESERVED_SHARED_BYTES
        stages = max((s for s in range(1, MOST_STAGES[self.recipe] + 1) if self._shared_bytes(s) <= room), default=0)
        if stages < 2:
            raise InvalidArgument(
                f"{self.num_experts} experts on a rank leave {stages} stages of shared memory for operands, "
                "expected 2; use more ranks or fewer experts"
            )
        in_turn = self.awaits > 0 or self.scatters > 0
        shape = {
            "num_experts": self.num_experts,
            "n": self.n,
            "k": self.k,
            "awaits": int(self.awaits > 0),
            "num_ranks": self.awaits or self.scatters,
            "scatters": int(self.scatters > 0),
            "slots": int(self.slots),
            "traced": int(self.traced),
            **self.epilogue.shape(),
            "stages": stages,
            "claims": int(self.claims),
            "row_scales": int(self.recipe == "row"),
            "tile_rows": self._most_rows,
            "four_bits": int(self.four_bits),
            "blocks_per_sm": per_sm,
            "weights_once": int(
                in_turn and not self.four_bits and self.num_experts * self.n * self.k <= MOST_BYTES_ONCE
            ),
        }
        return KernelSpec(
            "grouped_gemm",
            "kernels/gemm/grouped_gemm.cuh",
            tuple(shape.items()),
            GroupedGemmArgs,
            THREADS,
            cluster=CLUSTER,
            shared_bytes=self._shared_bytes(stages),
            blocks_per_sm=per_sm,
        )

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM runs at the same time."""
        return MOST_BLOCKS_PER_SM if self.four_bits and self._most_rows == FEW_ROWS else 1

    @property
    def _most_rows(self) -> int:
        return self.tile_rows or TILE_HEIGHTS[self.recipe][-1]

    def _shared_bytes(self, stages: int) -> int:
        """Size of GemmShared in grouped_gemm.cuh, member by member."""
        barriers, rows, columns = 2 * 8, self._most_rows, TILE_COLUMNS[self.recipe]
        of_weights = FOUR_BIT_STAGE if self.four_bits else columns * BLOCK
        ring = stages * (rows * BLOCK + of_weights + barriers)
        row_bytes = int(columns * self.epilogue.bytes_of_columns[self.recipe])
        if self.recipe == "row":
            ring += 8  # no scales
            staging = rows * row_bytes
            copies = 1 if self.k // BLOCK > stages else GROUPS
            epilogue = 2 * 4 * copies * rows
        else:
            ring += 2 * 4 * SCALE_BLOCKS * (rows + columns // BLOCK)
            staging = rows * (row_bytes + 16)
            epilogue = align_up(self.epilogue.shared_bytes, 4)
        staging += 2 * barriers
        experts = 4 * (self.num_experts + 1)
        epoch_and_peers = 8 + 4 + 8 * max(self.awaits, self.scatters, 1)  # 8 for gaps
        return align_up(align_up(ring, 128) + staging + epilogue + experts + BOARD_BYTES + epoch_and_peers, 1024)


class QuantizeRowsArgs(ctypes.Structure):
    """Mirror of QuantizeRowsArgs in quantize_rows.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("rows", "values", "scales", "offsets", "counts"),
        ("num_rows", ctypes.c_int64),
        *int32_fields("num_experts", "capacity"),
    ]


@dataclass(frozen=True)
class QuantizeRowsVariant:
    """One compiled form of the kernel that quantises rows of activations.

    Attributes:
        width: values of a row, a multiple of 128.
        slots: as in :class:`GroupedGemmVariant`.
    """

    width: int
    slots: bool = False

    def __str__(self) -> str:
        return f"quantize_rows, {self.width} values" + ", slots" * self.slots

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        shape = {"width": self.width, "slots": int(self.slots), "threads": QUANTIZE_THREADS}
        path = "kernels/gemm/quantize_rows.cuh"
        return KernelSpec("quantize_rows", path, tuple(shape.items()), QuantizeRowsArgs, QUANTIZE_THREADS)


def tile_places(rows: int, num_experts: int) -> int:
    """Places of tiles in ``GroupedGemmArgs.stored``, as device/roles/gate.cuh gives them."""
    return rows // LEAST_STEP + num_experts


def average_rows(tile_rows: int) -> float:
    """Rows of an expert on average, at most of which most experts have one tile of ``tile_rows``.

    Routing that is nearly even gives 14 of 15 experts at most 1.5 standard deviations more than the average.
    """
    deviations = 1.5
    return (math.sqrt(tile_rows + (deviations / 2) ** 2) - deviations / 2) ** 2


def tile_heights(recipe: str, four_bits: bool) -> tuple[int, ...]:
    """Return choices of the most rows of a tile, the lowest first."""
    return (FEW_ROWS, *TILE_HEIGHTS[recipe]) if four_bits else TILE_HEIGHTS[recipe]


def tile_rows_for(rows: float, recipe: str, four_bits: bool) -> int:
    """Choose the most rows of a tile, for experts of so many rows on average."""
    *lower, most = tile_heights(recipe, four_bits)
    return next((height for height in lower if rows <= average_rows(height)), most)


def warps_that_store(columns: int, recipe: str) -> int:
    """Warps that store a tile of rows, of so many columns before the epilogue."""
    return STORE_WARPS * CLUSTER * -(-columns // (CLUSTER * TILE_COLUMNS[recipe]))


def trace_times(num_sms: int, device: torch.device) -> torch.Tensor:
    """Make the int64 tensor [blocks, role, tile, 2] of zeros that any traced variant fills on so many SMs.

    It holds nanoseconds of each beginning and each end, roles as in :data:`TRACE_ROLES`.
    """
    blocks = MOST_BLOCKS_PER_SM * num_sms
    return torch.zeros(blocks, len(TRACE_ROLES), TRACED_TILES, 2, dtype=torch.int64, device=device)


def operand_map(tensor: torch.Tensor, box_rows: int) -> TensorMap:
    """Describe a contiguous E4M3 matrix, or a stack of them, as boxes of 128 values x ``box_rows`` rows."""
    return tensor_map(tensor, (BLOCK, box_rows, *[1] * (tensor.dim() - 2)), swizzle=True)


def wide_scales(k: int) -> bool:
    """Whether TMA can load the scales of rows of ``k`` values, which it takes 16 bytes at a time."""
    return k % (4 * BLOCK) == 0


def row_windows(rows: torch.Tensor, recipe: str) -> torch.Tensor:
    """Describe windows of 1 row to those of a tile, of an E4M3 matrix, as boxes of 128 values x ROW_BOX rows.

    Args:
        rows: [R, K], whose rows may lie apart.

    Returns:
        uint8 [rows of a tile, 128], tensor maps on the device of ``rows``.
    """
    (num_rows, width), apart, most = rows.shape, rows.stride(0), TILE_HEIGHTS[recipe][-1]
    maps = bytearray()
    for window in range(1, most + 1):
        fits = min(window, num_rows)
        windows = rows.as_strided((num_rows - fits + 1, fits, width), (apart, apart, 1))
        maps += bytes(tensor_map(windows, (BLOCK, ROW_BOX, 1), swizzle=True))
    return torch.frombuffer(maps, dtype=torch.uint8).view(most, -1).to(rows.device)


def scale_map(scales: torch.Tensor) -> TensorMap:
    """Describe a contiguous float32 matrix as boxes of 8 values x 128 rows; its rows are multiples of 16 bytes."""
    return tensor_map(scales, (SCALE_BLOCKS, TILE_HEIGHTS["block"][0]))
