"""Forms of the kernels: one of each kind that has code of its own.

Tests compile them, and ``tools/compare_machine_code.py`` compares their machine code with that of another checkout.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from tests.kernels.compute_variants import COMPUTE_VARIANTS
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.combine.launch import WEIGHTS, CombineVariant, PreReduceVariant
from tokenloom.kernels.common import LAYOUTS, Variant, short_name
from tokenloom.kernels.counts.launch import GatherCountsVariant
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.kernels.pull.launch import MOST_SLOTS, PullExpertsVariant
from tokenloom.kernels.row_weights.launch import RowWeightsVariant
from tokenloom.kernels.slots_of_routes.launch import MAX_EXPERTS, SlotsOfRoutesVariant
from tokenloom.kernels.split_batch.launch import SplitBatchVariant
from tokenloom.plan import ROUTE_LAYOUTS, Plan, align_up

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
SIZES = {"num_ranks": 8, "experts_per_rank": 32, "top_k": 8, "hidden": 7168, "max_tokens": 4096}
MOST = {"num_ranks": 64, "experts_per_rank": 8, "top_k": 32}

Named = tuple[str, Variant]


def sized(options: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan of the sizes among the options, :data:`SIZES` where they are missing; and the other options."""
    sizes = SIZES | {name: value for name, value in options.items() if name in SIZES}
    num_experts = sizes["num_ranks"] * sizes["experts_per_rank"]
    plan = Plan(sizes["num_ranks"], num_experts, sizes["hidden"], sizes["top_k"], sizes["max_tokens"])
    return plan, {name: value for name, value in options.items() if name not in SIZES}


def dispatch(what: str, layout: str, x_dtype: torch.dtype, **options: Any) -> Named:
    plan, others = sized(options)
    return f"dispatch, {what}", DispatchVariant(plan=plan, layout=layout, x_dtype=x_dtype, **others)


def combine(what: str, layout: str, y: torch.dtype, wire: torch.dtype, out: torch.dtype, **options: Any) -> Named:
    plan, others = sized(options)
    variant = CombineVariant(plan=plan, layout=layout, y_dtype=y, wire_dtype=wire, out_dtype=out, **others)
    return f"combine, {what}", variant


def pre_reduce(what: str, y: torch.dtype, wire: torch.dtype, **options: Any) -> Named:
    plan, others = sized(options)
    return f"pre_reduce, {what}", PreReduceVariant(plan=plan, y_dtype=y, wire_dtype=wire, **others)


def both(what: str, layout: str, dtype: torch.dtype = BF16, **sizes: int) -> list[Named]:
    found = [dispatch(what, layout, dtype, **sizes), combine(what, layout, dtype, dtype, dtype, **sizes)]
    if layout == "expert":
        found.append(combine(f"{what}, weighted", layout, dtype, dtype, dtype, weights="received", **sizes))
    return found


def quantizing(what: str, layout: str, quantize: str, dtype: torch.dtype = BF16, **sizes: int) -> Named:
    return dispatch(what, layout, dtype, quantize=quantize, **sizes)


def received_if(weighted: bool) -> str:
    """The weights of a combine."""
    return "received" if weighted else "none"


def per_route(what: str, *dtypes: torch.dtype, **sizes: int) -> Named:
    weights = received_if("weighted" in what)
    return combine(f"per route, {what}", "expert", *dtypes, mode="per_route", weights=weights, **sizes)


def in_parts(what: str, layout: str, **options: Any) -> list[Named]:
    """A combine of bfloat16 rows as one kernel, and as two."""
    dtypes = (BF16, BF16, BF16)
    options = {"weights": received_if(layout == "expert"), **options}
    return [combine(f"{what}, {part}", layout, *dtypes, part=part, **options) for part in ("whole", "send", "receive")]


def carried(strategy: str, what: str, dtype: torch.dtype, **options: Any) -> Named:
    return dispatch(f"{strategy}, {what}", "expert", dtype, strategy=strategy, **options)


def reduce_scatter(what: str, y: torch.dtype, wire: torch.dtype, out: torch.dtype, **sizes: int) -> list[Named]:
    """What is sent, and what adds it at home."""
    what = f"reduce_scatter, {what}"
    return [pre_reduce(what, y, wire, **sizes), combine(what, "token", wire, wire, out, dense=True, **sizes)]


def of_weights(what: str, layout: str, **sizes: int) -> Named:
    """A combine of the weights' gradients, whose rows have a value per route, in whole units of 16 bytes."""
    plan, _ = sized(sizes)
    width = align_up(plan.top_k, 4)
    variant = CombineVariant(plan=plan, layout=layout, y_dtype=FP32, wire_dtype=FP32, out_dtype=FP32, hidden=width)
    return f"combine, weights' gradients, {what}", variant


_NAMED: list[Named] = [
    # What the speed targets are measured with, and every layout with every payload.
    *(v for layout in LAYOUTS for v in both(f"{layout} bf16", layout)),
    *(dispatch(f"{layout} fp8 with scales", layout, FP8) for layout in LAYOUTS),
    *(v for layout in LAYOUTS for v in both(f"{layout} fp32", layout, FP32)),
    # Every pair of a y dtype and a wire dtype has its own code; so has every output dtype. FP16 is like BF16 but for
    # its conversions. Layout token converts rows that would be copied if the dtypes were the same.
    *(
        combine(f"expert {y} over {wire}", "expert", y, wire, out)
        for (y, wire), out in zip(product((BF16, FP16, FP32), repeat=2), (FP32, BF16, FP16) * 3, strict=True)
    ),
    combine("token fp16 to bf16", "token", FP16, FP16, BF16),
    combine("token fp32 over bf16", "token", FP32, BF16, FP32),
    combine("rank bf16 over fp32", "rank", BF16, FP32, BF16),
    # One rank (gradients of a process alone), powers of two, and a number that is none.
    *(
        v
        for num_ranks, layout in ((1, "expert"), (2, "token"), (3, "expert"), (4, "rank"))
        for v in both(f"{num_ranks} ranks", layout, num_ranks=num_ranks)
    ),
    # As many ranks as a warp has lanes, and as many as there may be, of which a lane has two.
    *both("32 ranks", "expert", num_ranks=32, experts_per_rank=8),
    *both("64 ranks", "expert", num_ranks=64, experts_per_rank=8),
    dispatch("top-32 of 64 ranks", "token", BF16, **MOST),
    dispatch("slots, top-32 of 64 ranks, staged", "slots", FP8, staged=True, **MOST),
    combine("top-32 of 64 ranks, eager", "token", *(BF16,) * 3, eager=True, **MOST),
    # One expert a token, and the most: a full warp of routes. More routes than there are experts.
    *both("top-1", "expert", top_k=1),
    *both("top-32", "expert", top_k=32),
    *both("top-32, token", "token", top_k=32),
    *both("top-32 of one expert", "expert", top_k=32, num_ranks=1, experts_per_rank=1),
    # Where a rank holds many of a token's experts, most terms are in flight at once.
    combine("top-16 of 2 ranks", "expert", BF16, FP16, BF16, top_k=16, num_ranks=2),
    combine("top-32 of 4 ranks, hidden 1000", "expert", FP32, FP16, FP16, top_k=32, num_ranks=4, hidden=1000),
    # Many experts: their counters share memory with the ring of rows.
    *both("2048 experts", "expert", experts_per_rank=256),
    *both("4096 experts", "expert", experts_per_rank=512),
    # Rows shorter than a warp's 16-byte loads, one load, a part of one segment, odd numbers of segments, many.
    *both("hidden 8", "expert", hidden=8),
    *both("hidden 64", "token", hidden=64),
    *both("hidden 64, fp32", "expert", FP32, hidden=64),
    *both("hidden 1000", "expert", hidden=1000),
    *both("hidden 5120", "expert", hidden=5120),
    *both("hidden 7176, fp32", "expert", FP32, hidden=7176),
    *both("hidden 65536", "token", hidden=65536),
    dispatch("fp8, one scale", "expert", FP8, hidden=128),
    # Only FP32 has rows of 16-byte units that are no multiple of 8 values.
    *both("hidden 4, fp32", "expert", FP32, hidden=4),
    *both("hidden 1004, fp32", "token", FP32, hidden=1004),
    # One chunk only, and a number of tokens that no chunk divides.
    *both("1 token", "expert", max_tokens=1),
    *both("8191 tokens", "token", max_tokens=8191),
    *both("one rank", "token", num_ranks=1),
    # Rows that become FP8 on their way: every dtype is read in its own way, each kind of scale is rounded in its own
    # way. One block of 128 values, which is a part of a warp's step; several steps.
    *(
        quantizing(f"{layout} {dtype} to fp8, {quantize}", layout, quantize, dtype)
        for layout, quantize, dtype in (
            *product(("expert",), ("any scale", "power of two"), (BF16, FP16, FP32)),
            *product(("token", "rank"), ("any scale", "power of two"), (BF16,)),
        )
    ),
    quantizing("to fp8, hidden 128", "token", "power of two", hidden=128),
    quantizing("to fp8, hidden 5120", "rank", "any scale", FP32, hidden=5120),
    # One scale for a whole row: its quantising reads the row twice.
    dispatch("fp8, row scales", "expert", FP8, recipe="row"),
    *(
        dispatch(f"{layout} {dtype} to fp8, {quantize}, row scales", layout, dtype, quantize=quantize, recipe="row")
        for layout, quantize, dtype in (
            *product(("expert",), ("any scale", "power of two"), (BF16, FP16, FP32)),
            ("token", "any scale", BF16),
        )
    ),
    dispatch("to fp8, row scales, hidden 128", "token", BF16, quantize="any scale", recipe="row", hidden=128),
    *(
        dispatch(f"slots, {how}, row scales, staged", "slots", dtype, quantize=how, staged=True, recipe="row")
        for how, dtype in (("", FP8), ("any scale", BF16))
    ),
    quantizing("to fp8, top-32 of 32 ranks", "expert", "any scale", FP32, top_k=32, num_ranks=32, experts_per_rank=8),
    # Every route comes home by itself: rows are scaled and not added where they leave, and there are top_k at home.
    per_route("bf16", BF16, BF16, BF16),
    per_route("bf16, weighted", BF16, BF16, BF16),
    per_route("fp32", FP32, FP32, FP32),
    per_route("fp32, weighted", FP32, FP32, FP32),
    per_route("fp32 over bf16", FP32, BF16, FP32),
    per_route("top-1, weighted", BF16, BF16, BF16, top_k=1),
    per_route("top-32 of 32 ranks", BF16, BF16, BF16, top_k=32, num_ranks=32, experts_per_rank=8),
    per_route("hidden 1000, one rank", FP32, FP32, FP32, hidden=1000, num_ranks=1),
    # Weights come from home: behind the opening of the call, whether rows would leave before it or not.
    *(
        named
        for eager in (False, True)
        for named in in_parts(
            f"weights from home, {'eager' if eager else 'not eager'}",
            "expert",
            weights="home",
            eager=eager,
            max_tokens=128,
        )
    ),
    combine("per route, weights from home", "expert", BF16, BF16, BF16, mode="per_route", weights="home"),
    # Calls of two kernels; and small plans, whose rows leave before the call has opened.
    *(named for layout in ("token", "expert") for named in in_parts(f"{layout} in parts", layout)),
    *(
        named
        for layout in ("token", "expert")
        for named in in_parts(f"{layout}, eager", layout, eager=True, max_tokens=128)
    ),
    *(
        dispatch(f"{layout} in parts, {part}", layout, BF16, part=part)
        for layout in LAYOUTS
        for part in ("send", "receive")
    ),
    *(
        dispatch(f"slots packed in parts, {part}", "slots", FP8, scale_layout="packed", part=part)
        for part in ("send", "receive")
    ),
    dispatch("slots fp8, row scales", "slots", FP8, recipe="row"),
    dispatch("expert to fp8 in parts, send", "expert", BF16, quantize="any scale", part="send"),
    dispatch("expert to fp8 in parts, receive", "expert", BF16, quantize="any scale", part="receive"),
    *(
        dispatch(f"{layout} staged, {part}", layout, FP8, staged=True, max_tokens=128, part=part)
        for layout in ROUTE_LAYOUTS
        for part in ("send", "receive")
    ),
    dispatch("slots, 4096 experts", "slots", FP8, staged=True, experts_per_rank=512),
    *(
        dispatch(
            f"slots, top-32 of 32 ranks{', staged' * staged}",
            "slots",
            FP32,
            staged=staged,
            top_k=32,
            num_ranks=32,
            experts_per_rank=8,
        )
        for staged in (True, False)
    ),
    dispatch("slots, hidden 8, one rank", "slots", FP32, staged=True, hidden=8, num_ranks=1),
    *in_parts("eager, 4 ranks", "expert", eager=True, max_tokens=128, num_ranks=4),
    # What plans with few rows, and others, have of their own, as `tokenloom cache build` makes them.
    *(
        dispatch(
            f"{layout} {short_name(dtype)}{how and ' to fp8, '}{how}, {scales}, {'staged' if staged else 'direct'}",
            layout,
            dtype,
            quantize=how,
            staged=staged,
            scale_layout=scales,
        )
        for layout, staged in (("slots", True), ("slots", False), ("expert", True))
        for dtype, how, orders in (
            (BF16, "", ()),
            (FP32, "", ()),
            (FP8, "", ("columns", "packed")),
            (BF16, "any scale", ("columns",)),
            (BF16, "power of two", ("columns", "packed")),
        )
        for scales in ("rows", *(orders if layout == "slots" else ()))
    ),
    combine("rank bf16, eager", "rank", BF16, BF16, BF16, eager=True),
    *(combine(f"{layout} fp32, eager", layout, FP32, FP32, FP32, eager=True) for layout in ("token", "rank")),
    *(
        combine(
            f"{mode}, {short_name(dtype)}, eager, weights {how}",
            "expert",
            *(dtype,) * 3,
            mode=mode,
            weights=how,
            eager=True,
        )
        for mode, dtype, how in product(("per_rank", "per_route"), (BF16, FP32), WEIGHTS)
        if (mode, dtype) != ("per_rank", BF16) or how == "none"  # in parts above
    ),
    *(
        combine(f"{mode}, fp32, weights from home", "expert", FP32, FP32, FP32, mode=mode, weights="home")
        for mode in ("per_rank", "per_route")
    ),
    # What carries rows otherwise.
    *(
        carried(strategy, what, dtype, **sizes)
        for strategy in ("all_gather", "all_to_all")
        for what, dtype, sizes in (
            ("bf16", BF16, {}),
            ("fp32", FP32, {}),
            ("top-32 of 32 ranks", BF16, {"top_k": 32, "num_ranks": 32, "experts_per_rank": 8}),
            ("hidden 8, one rank", BF16, {"hidden": 8, "num_ranks": 1}),
        )
    ),
    carried("all_to_all", "fp8 with scales", FP8),
    carried("all_to_all", "to fp8", BF16, quantize="any scale"),
    carried("all_to_all", "to fp8, powers of two", BF16, quantize="power of two"),
    *(
        named
        for what, y, wire, out, sizes in (
            ("bf16", BF16, BF16, BF16, {}),
            ("fp32", FP32, FP32, FP32, {}),
            ("fp32 over fp16 to bf16", FP32, FP16, BF16, {}),
            ("top-32 of 32 ranks", BF16, BF16, BF16, {"top_k": 32, "num_ranks": 32, "experts_per_rank": 8}),
            ("hidden 8, one rank", BF16, BF16, BF16, {"hidden": 8, "num_ranks": 1}),
        )
        for named in reduce_scatter(what, y, wire, out, **sizes)
    ),
    pre_reduce("reduce_scatter, bf16, weighted", BF16, BF16, weighted=True),
    pre_reduce("reduce_scatter, fp32, weighted", FP32, FP32, weighted=True),
    # Gradients of weights: rows of top_k values, rounded up to whole 16-byte units.
    *(of_weights(layout, layout) for layout in ("token", "rank")),
    of_weights("top-1", "token", top_k=1),
    of_weights("top-32 of one rank", "rank", top_k=32, num_ranks=1),
    # What moves values of routes, either way, and what only opens a call: one rank, some, and the most.
    *(
        (
            f"row_weights, {what}, {num_ranks} ranks",
            RowWeightsVariant(plan=sized({"num_ranks": num_ranks})[0], to_rows=to),
        )
        for num_ranks in (1, 8, 32)
        for what, to in (("to rows", True), ("to routes", False))
    ),
    *(
        (f"barrier, {num_ranks} ranks", BarrierVariant(plan=sized({"num_ranks": num_ranks})[0]))
        for num_ranks in (1, 8, 32, 64)
    ),
    *(
        (
            f"gather_counts, {told} counts, {num_ranks} ranks",
            GatherCountsVariant(sized({"num_ranks": num_ranks, "experts_per_rank": slots})[0], told),
        )
        for num_ranks, slots, told in ((1, 2, 1), (8, 34, 256), (64, 9, 512), (8, 1000, MAX_EXPERTS))
    ),
    *((f"pull_experts, {slots} slots", PullExpertsVariant(slots)) for slots in (1, 34, MOST_SLOTS)),
    # Shared memory grows with the experts.
    *((f"slots_of_routes, {e} experts", SlotsOfRoutesVariant(e)) for e in (1, 256, MAX_EXPERTS)),
    *((f"slots_of_routes, {e} experts, split", SlotsOfRoutesVariant(e, split=True)) for e in (1, 256, MAX_EXPERTS)),
    # Alone; as a rule; a rank to each lane, and two; more slots than a warp looks at in one go; the most of them.
    *(
        (f"split_batch, {slots} slots of {num_ranks} ranks", SplitBatchVariant(num_ranks, num_experts, slots))
        for num_ranks, num_experts, slots in (
            (1, 1, 1),
            (8, 256, 34),
            (32, 256, 10),
            (64, 512, 9),
            (8, 1000, 200),
            (2, MAX_EXPERTS, MAX_EXPERTS),
        )
    ),
    *COMPUTE_VARIANTS,
]

VARIANTS: dict[str, Variant] = dict(_NAMED)
"""Forms by name."""
assert len(VARIANTS) == len(_NAMED), "two forms have one name"
