"""What the roles of a GEMM and the host say of the same things."""

from __future__ import annotations

from tests.kernels.test_kernels import check
from tests.support.small_kernels import needs_nvrtc
from tokenloom.kernels.gemm import launch


@needs_nvrtc
def test_numbers_are_the_same_on_both_sides() -> None:
    """Tensor maps, shared memory and traces are made with Python's copies of these constants."""
    epilogues = {
        ("block", launch.Bf16Epilogue): "Bf16Epilogue<256>",
        ("block", launch.SwigluFp8Epilogue): "SwigluFp8Epilogue<256, 1, PlainSwiglu<1>>",
        ("row", launch.Bf16Epilogue): "TransposedBf16Epilogue<256, 256, 0, 1>",
        ("row", launch.SwigluFp8Epilogue): "TransposedActivationEpilogue<256, 256, PlainSwiglu<1>, 1>",
    }
    numbers = {
        "kClusterBlocks": launch.CLUSTER,
        "kGroups": launch.GROUPS,
        "kBlock": launch.BLOCK,
        "kLeastStep": launch.LEAST_STEP,
        "kScaleBlocks": launch.SCALE_BLOCKS,
        "kRowBox": launch.ROW_BOX,
        "kWeightBox": launch.WEIGHT_BOX,
        "kFourBitBlock": launch.FOUR_BIT_BLOCK,
        "FourBitOperand::kStageBytes": launch.FOUR_BIT_STAGE,
        "kTraceRoles": len(launch.TRACE_ROLES),
        "kTracedTiles": launch.TRACED_TILES,
        "kGroupThreads * (kGroups + 1)": launch.THREADS,
    }
    for cut, recipe in (("FixedCut<256>", "block"), ("EvenCut<256>", "row")):
        numbers |= {f"{cut}::kRows": launch.TILE_HEIGHTS[recipe][-1], f"{cut}::kColumns": launch.TILE_COLUMNS[recipe]}
    for (recipe, epilogue), name in epilogues.items():
        numbers[f"{name}::kTileRowBytes"] = int(launch.TILE_COLUMNS[recipe] * epilogue.bytes_of_columns[recipe])
    roles = [launch.TRACE_ROLES.index(name) for name in ("load", "multiply 0", "epilogue 0", "store", "start")]
    numbers |= dict(zip(("kLoads", "kMultiplies", "kStages", "kStores", "kStarts"), roles, strict=True))
    check(
        "kernels/gemm/grouped_gemm.cuh",
        *(f'static_assert(({name}) == {number}, "{name}");' for name, number in numbers.items()),
    )
