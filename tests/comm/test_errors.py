"""Bad input: a named error on the rank that gave it, PeerError on the others, nothing sent, and work goes on.

Each is given to a communicator that knows no kind of call yet, and again where a right call of the kind was made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP8,
    FP32,
    FP64,
    Case,
    Problem,
    each_backend,
    make_comm,
    make_problem,
    same_routed,
)
from tests.support.on_ranks import on_ranks
from tests.support.wire import count_wire
from tokenloom import errors
from tokenloom.backends import registry
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup

pytestmark = pytest.mark.slow_on(4)

E, H, K, M = 8, 16, 3, 6
"""Sizes that all messages below show: 8 experts, hidden 16, top-3, at most 6 tokens a rank."""
T = 4

Arguments = dict[str, Any]
Fault = tuple[str, Callable[[Arguments], Arguments], type[Exception], list[str]]
"""What is wrong, the arguments with it, the error, and what its message must contain: expected, got, advice."""


def base_problem(num_ranks: int, **options: Any) -> Problem:
    sizes: dict[str, Any] = {"tokens": (T,), "spare": M - T, "hidden": H, "top_k": K}
    return make_problem(
        Case("errors", "", experts_per_rank=E // num_ranks, pick="repeats", **(sizes | options)), num_ranks
    )


def with_entry(tensor: torch.Tensor, value: float, places: list[tuple[int, int]]) -> torch.Tensor:
    out = tensor.clone()
    for place in places:
        out[place] = value
    return out


def fp8(x: torch.Tensor, hidden: int = H) -> torch.Tensor:
    return torch.zeros(len(x), hidden, dtype=torch.uint8, device=x.device).view(FP8)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return torch.stack([tensor, tensor], 2)[..., 0]


DISPATCH_FAULTS: list[Fault] = [
    ("x of another hidden size", lambda a: a | {"x": a["x"][:, :5].contiguous()}, tl.ShapeMismatch,
     ["x is [4, 5]", "[tokens, 16]", "pass hidden=5"]),
    ("x with three dimensions", lambda a: a | {"x": a["x"][None]}, tl.ShapeMismatch,
     ["x is [1, 4, 16]", "[tokens, 16]", "pass x.reshape(-1, 16): dispatch takes one row per token"]),
    ("x without dimensions", lambda a: a | {"x": a["x"].sum()}, tl.ShapeMismatch, ["x is []", "[tokens, 16]"]),
    ("too many tokens", lambda a: a | {"x": a["x"].repeat(2, 1)}, tl.ShapeMismatch,
     ["8 tokens", "at most 6", "max_tokens_per_rank=8"]),
    ("x not contiguous", lambda a: a | {"x": strided(a["x"])}, tl.ShapeMismatch,
     ["x has strides (32, 2)", "contiguous", "x.contiguous()"]),
    ("x is a list", lambda a: a | {"x": a["x"].tolist()}, tl.InvalidArgument, ["x is a list of 4", "(fp8, scales)"]),
    ("x is None", lambda a: a | {"x": None}, tl.InvalidArgument, ["x is a NoneType", "torch.Tensor"]),
    ("x of a dtype that nobody sends", lambda a: a | {"x": a["x"].int()}, tl.DtypeMismatch,
     ["x is torch.int32", "bfloat16, float16, float32"]),
    ("x on another device", lambda a: a | {"x": torch.empty(T, H, device="meta")}, tl.DeviceMismatch,
     ["x is on meta", "the communicator is on", "move"]),
    ("FP8 without scales", lambda a: a | {"x": fp8(a["x"])}, tl.DtypeMismatch,
     ["float8_e4m3fn without scales", "quantize_fp8"]),
    ("scales beside bfloat16", lambda a: a | {"x": (a["x"].to(BF16), a["x"])}, tl.DtypeMismatch,
     ["x comes with scales but is torch.bfloat16", "float8_e4m3fn"]),
    ("FP8 of a hidden size that is no multiple of 128", lambda a: a | {"x": (fp8(a["x"]), torch.ones(T, 1))},
     tl.ShapeMismatch, ["multiple of 128", "16"]),
    ("ids of another shape", lambda a: a | {"topk_ids": a["topk_ids"][:, :2].contiguous()}, tl.ShapeMismatch,
     ["topk_ids is [4, 2]", "[4, 3]", "top_k ids for each token"]),
    ("ids of fewer tokens", lambda a: a | {"topk_ids": a["topk_ids"][:3]}, tl.ShapeMismatch, ["[3, 3]", "[4, 3]"]),
    ("ids of a dtype that is no id", lambda a: a | {"topk_ids": a["topk_ids"].to(torch.int16)}, tl.DtypeMismatch,
     ["topk_ids is torch.int16", "int32 or int64"]),
    ("ids not contiguous", lambda a: a | {"topk_ids": strided(a["topk_ids"])}, tl.ShapeMismatch,
     ["topk_ids has strides", "topk_ids.contiguous()"]),
    ("ids are missing", lambda a: a | {"topk_ids": None}, tl.InvalidArgument, ["topk_ids is a NoneType"]),
    ("an id of E", lambda a: a | {"topk_ids": with_entry(a["topk_ids"], E, [(1, 2)])}, tl.InvalidExpertId,
     ["topk_ids[1, 2] is 8", "-1 (unused) or 0..7", "1 such entry", "mask unused places with -1"]),
    ("ids below -1", lambda a: a | {"topk_ids": with_entry(a["topk_ids"], -2, [(3, 0), (2, 1)])}, tl.InvalidExpertId,
     ["topk_ids[2, 1] is -2", "2 such entries"]),
    ("a huge id", lambda a: a | {"topk_ids": with_entry(a["topk_ids"], 2**40, [(0, 0)])}, tl.InvalidExpertId,
     ["topk_ids[0, 0] is 1099511627776"]),
    ("weights of another shape", lambda a: a | {"topk_weights": a["topk_weights"][:2]}, tl.ShapeMismatch,
     ["topk_weights is [2, 3]", "[4, 3]"]),
    ("weights in bfloat16", lambda a: a | {"topk_weights": a["topk_weights"].to(BF16)}, tl.DtypeMismatch,
     ["topk_weights is torch.bfloat16", "float32"]),
    ("weights in float64 beside float32", lambda a: a | {"topk_weights": a["topk_weights"].double()}, tl.DtypeMismatch,
     ["topk_weights is torch.float64", "float32"]),
    ("weights not contiguous", lambda a: a | {"topk_weights": strided(a["topk_weights"])}, tl.ShapeMismatch,
     ["topk_weights has strides", "topk_weights.contiguous()"]),
    ("weights are no tensor", lambda a: a | {"topk_weights": 0.5}, tl.InvalidArgument, ["topk_weights is a float"]),
    ("an unknown layout", lambda a: a | {"layout": "experts"}, tl.InvalidArgument,
     ["layout is 'experts'", "token, expert, rank"]),
    ("unknown sizes", lambda a: a | {"sizes": "max"}, tl.InvalidArgument, ["sizes is 'max'", "exact, bounded"]),
    ("alignment 0", lambda a: a | {"alignment": 0}, tl.InvalidArgument, ["alignment is 0", "1 to 2147483647"]),
    ("alignment of no group", lambda a: a | {"layout": "token", "alignment": 4}, tl.InvalidArgument,
     ["alignment is 4", "layout 'expert'", "leave it at 1"]),
    ("capacity 0", lambda a: a | {"capacity": 0}, tl.InvalidArgument, ["capacity is 0", "1 to 2147483647"]),
    ("capacity beyond int32", lambda a: a | {"capacity": 2**64}, tl.InvalidArgument,
     ["capacity is 18446744073709551616"]),
    ("capacity that is no number", lambda a: a | {"capacity": 1.5}, tl.InvalidArgument, ["capacity is 1.5"]),
    ("capacity of fixed places", lambda a: a | {"layout": "rank", "capacity": 4}, tl.InvalidArgument,
     ["fixed places", "leave capacity out"]),
    ("bounded groups without capacity", lambda a: a | {"sizes": "bounded"}, tl.InvalidArgument,
     ["needs capacity=", "worst case"]),
    ("to_fp8 of a hidden size that is no multiple of 128", lambda a: a | {"to_fp8": True}, tl.ShapeMismatch,
     ["multiple of 128", "this one is 16"]),
    ("to_fp8 that is no boolean", lambda a: a | {"to_fp8": 1}, tl.InvalidArgument,
     ["to_fp8 is 1", "True or False"]),
    ("power_of_two_scales that is no boolean", lambda a: a | {"power_of_two_scales": None}, tl.InvalidArgument,
     ["power_of_two_scales is None", "True or False"]),
    ("power_of_two_scales of nothing", lambda a: a | {"power_of_two_scales": True}, tl.InvalidArgument,
     ["power_of_two_scales=True without to_fp8=True", "pass to_fp8=True too"]),
    ("slots of exact sizes", lambda a: a | {"layout": "slots", "sizes": "exact"}, tl.InvalidArgument,
     ["layout 'slots' has fixed places", "leave sizes out"]),
    ("aligned slots", lambda a: a | {"layout": "slots", "alignment": 2}, tl.InvalidArgument,
     ["alignment is 2", "leave it at 1"]),
    ("more slots than int32 counts", lambda a: a | {"layout": "slots", "capacity": 2**31 - 1}, tl.InvalidArgument,
     ["capacity is 2147483647", "2147483647 places in all"]),
    ("an unknown scale_layout", lambda a: a | {"layout": "slots", "scale_layout": "cols"}, tl.InvalidArgument,
     ["scale_layout is 'cols'", "rows, columns, packed"]),
    ("a scale_layout of rows in groups", lambda a: a | {"scale_layout": "columns"}, tl.InvalidArgument,
     ["scale_layout is 'columns'", "'expert' has scales by row alone", "leave it out"]),
    ("a scale_layout of nothing", lambda a: a | {"layout": "slots", "scale_layout": "columns"}, tl.InvalidArgument,
     ["scale_layout is 'columns'", "x is torch.float32 without scales", "pass to_fp8=True"]),
    ("an unknown recipe", lambda a: a | {"recipe": "tile"}, tl.InvalidArgument,
     ["recipe is 'tile'", "block, row"]),
    ("a recipe that cannot be looked up", lambda a: a | {"recipe": ["row"]}, tl.InvalidArgument,
     ["recipe is ['row']", "block, row"]),
    ("a recipe of nothing", lambda a: a | {"recipe": "row"}, tl.InvalidArgument,
     ["recipe is 'row', but x is torch.float32 without scales", "pass to_fp8=True"]),
]  # fmt: skip

FP8_FAULTS: list[Fault] = [
    ("scales of another shape", lambda a: a | {"x": (a["x"][0], a["x"][1][:, :1].contiguous())}, tl.ShapeMismatch,
     ["scales is [4, 1]", "[4, 2]", "one per 128 values"]),
    ("scales of rows", lambda a: a | {"x": (a["x"][0], a["x"][1][:, 0].contiguous())}, tl.ShapeMismatch,
     ["scales is [4], a scale for each row", "recipe='row' takes those"]),
    ("scales of blocks to rows", lambda a: a | {"recipe": "row"}, tl.ShapeMismatch,
     ["scales is [4, 2], a scale for each of 128 values", "recipe='block' takes those"]),
    ("scales of rows in a column", lambda a: a | {"x": (a["x"][0], a["x"][1][:, :1].contiguous()), "recipe": "row"},
     tl.ShapeMismatch, ["scales is [4, 1]", "[4]: one for each row"]),
    ("packed scales of rows", lambda a: a | {"x": (a["x"][0], a["x"][1][:, 0].int()), "recipe": "row"},
     tl.DtypeMismatch, ["scales is torch.int32", "float32"]),
    ("scales of rows by column", lambda a: a | {"recipe": "row", "layout": "slots", "scale_layout": "columns"},
     tl.InvalidArgument, ["scale_layout is 'columns', which recipe 'block' has", "leave it out"]),
    ("scales in float64", lambda a: a | {"x": (a["x"][0], a["x"][1].double())}, tl.DtypeMismatch,
     ["scales is torch.float64", "float32"]),
    ("scales not contiguous", lambda a: a | {"x": (a["x"][0], strided(a["x"][1]))}, tl.ShapeMismatch,
     ["scales has strides", "scales.contiguous()"]),
    ("scales are missing", lambda a: a | {"x": (a["x"][0],)}, tl.InvalidArgument,
     ["x is a tuple of 1", "(fp8, scales)"]),
    ("scales are no tensor", lambda a: a | {"x": (a["x"][0], 1.0)}, tl.InvalidArgument, ["scales is a float"]),
    ("FP8 that requires grad", lambda a: a | {"x": (a["x"][0].requires_grad_(), a["x"][1])}, tl.NotDifferentiable,
     ["FP8", "requires grad", "detach it"]),
    ("scales that require grad", lambda a: a | {"x": (a["x"][0], a["x"][1].requires_grad_())}, tl.NotDifferentiable,
     ["requires grad", "detach"]),
    ("scales to be packed that are no powers of two", lambda a: a | {"layout": "slots", "scale_layout": "packed"},
     tl.InvalidArgument, ["scales[0, 0] is", "powers of two", "power_of_two_scales=True"]),
    ("one scale to be packed that is no power of two",
     lambda a: a | {"layout": "slots", "scale_layout": "packed",
                    "x": (a["x"][0], with_entry(torch.ones_like(a["x"][1]), 1.5, [(2, 1)]))},
     tl.InvalidArgument, ["scales[2, 1] is 1.5"]),
    ("scales to be packed that are below 0",
     lambda a: a | {"layout": "slots", "scale_layout": "packed", "x": (a["x"][0], -torch.ones_like(a["x"][1]))},
     tl.InvalidArgument, ["scales[0, 0] is -1.0"]),
]  # fmt: skip

TO_FP8_FAULTS: list[Fault] = [
    ("FP8 with scales, to be quantised", lambda a: a | {"x": tl.quantize_fp8(a["x"])}, tl.InvalidArgument,
     ["x is torch.float8_e4m3fn already", "leave to_fp8 out", "(x, scales)"]),
    ("FP8 without scales, to be quantised", lambda a: a | {"x": fp8(a["x"], 256)}, tl.InvalidArgument,
     ["x is torch.float8_e4m3fn already", "leave to_fp8 out", "(x, scales)"]),
    ("scales beside what is to be quantised", lambda a: a | {"x": (a["x"], tl.quantize_fp8(a["x"])[1])},
     tl.InvalidArgument, ["x comes with scales, to_fp8=True makes them", "pass x alone"]),
    ("a dtype that is not quantised", lambda a: a | {"x": a["x"].int()}, tl.DtypeMismatch,
     ["x is torch.int32", "bfloat16, float16, float32"]),
    ("x that requires grad", lambda a: a | {"x": a["x"].requires_grad_()}, tl.NotDifferentiable,
     ["x requires grad, but to_fp8=True sends FP8", "leave to_fp8 out"]),
    ("float64 weights beside FP8 rows",
     lambda a: a | {"x": a["x"].double(), "topk_weights": a["topk_weights"].double()}, tl.DtypeMismatch,
     ["is torch.float64", "float32"]),  # nvlink has no float64 at all, and says so of x
    ("scales of any size to be packed", lambda a: a | {"layout": "slots", "scale_layout": "packed"},
     tl.InvalidArgument, ["scale_layout 'packed' holds powers of two", "pass power_of_two_scales=True"]),
]  # fmt: skip

COMBINE_FAULTS: list[Fault] = [
    ("y of another shape", lambda a: a | {"y": a["y"][:-1]}, tl.ShapeMismatch,
     ["y is [", "expected [", "one row per row"]),
    ("y not contiguous", lambda a: a | {"y": strided(a["y"])}, tl.ShapeMismatch, ["y has strides", "y.contiguous()"]),
    ("y of a dtype that nobody sums", lambda a: a | {"y": a["y"].int()}, tl.DtypeMismatch,
     ["y is torch.int32", "bfloat16"]),
    ("y on another device", lambda a: a | {"y": a["y"].to("meta")}, tl.DeviceMismatch, ["y is on meta", "move"]),
    ("y is None", lambda a: a | {"y": None}, tl.InvalidArgument, ["y is a NoneType"]),
    ("routed is something else", lambda a: a | {"routed": a["y"]}, tl.InvalidArgument,
     ["routed is a Tensor", "dispatch returned"]),
    ("an unknown mode", lambda a: a | {"mode": "sum"}, tl.InvalidArgument, ["mode is 'sum'", "per_rank, per_route"]),
    ("a wire that cannot carry sums", lambda a: a | {"wire_dtype": FP8}, tl.DtypeMismatch,
     ["wire_dtype is torch.float8", "bfloat16"]),
    ("float64 from float32", lambda a: a | {"out_dtype": FP64}, tl.DtypeMismatch,
     ["out_dtype is float64", "y is torch.float32", "pass y in float64"]),
]  # fmt: skip

TOKEN_COMBINE_FAULTS: list[Fault] = [
    ("weighted rows of tokens", lambda a: a | {"weighted": True}, tl.InvalidArgument,
     ["weighted=True with layout 'token'", "leave weighted out"]),
    ("unweighted rows of tokens", lambda a: a | {"weighted": False}, tl.InvalidArgument, ["weighted=False"]),
    ("per_route of tokens", lambda a: a | {"mode": "per_route"}, tl.InvalidArgument, ["one row per route", "'token'"]),
]  # fmt: skip


def params(faults: list[Fault]) -> list[Any]:
    return [pytest.param(index, id=fault[0]) for index, fault in enumerate(faults)]


def bad_rank(context: RankContext) -> int:
    return context.num_ranks - 1


def expect(context: RankContext, call: Callable[[], object], fault: Fault, phase: str) -> None:
    """The error of its own on the bad rank; on the others, one that names that rank and its reason."""
    _, _, error, texts = fault
    if context.rank == bad_rank(context):
        with count_wire() as wire, pytest.raises(errors.TokenloomError) as raised:
            call()
        assert type(raised.value) is error, f"{phase}: {raised.value!r}"
        for text in texts:
            assert text in str(raised.value), f"{phase}: {text!r} is not in {str(raised.value)!r}"
    else:
        with count_wire() as wire, pytest.raises(tl.PeerError) as peer:
            call()
        assert peer.value.rank == bad_rank(context)
        assert peer.value.reason.startswith(f"{error.__name__}: ")
        assert texts[0][:20] in peer.value.reason
        assert f"rank {bad_rank(context)} failed" in str(peer.value)
    assert wire.all_to_all == [], f"{phase}: payload was sent"


def still_works(context: RankContext, comm: tl.Communicator, problem: Problem) -> None:
    x, ids, weights = problem.arguments(context)
    same_routed(comm.dispatch(x, ids, weights), problem.dispatched("expert")[context.rank], problem.plan)


@on_ranks
@each_backend
@pytest.mark.parametrize("index", params(DISPATCH_FAULTS))
def test_dispatch_fault(context: RankContext, backend: str, index: int) -> None:
    """Every check of dispatch, on one rank only."""
    run_dispatch_fault(context, backend, base_problem(context.num_ranks, dtype=FP32), DISPATCH_FAULTS[index])


@on_ranks
@each_backend
@pytest.mark.parametrize("index", params(FP8_FAULTS))
def test_fp8_fault(context: RankContext, backend: str, index: int) -> None:
    """Every check of a payload with scales, on one rank only."""
    run_dispatch_fault(context, backend, base_problem(context.num_ranks, dtype=FP8, hidden=256), FP8_FAULTS[index])


@on_ranks
@each_backend
@pytest.mark.parametrize("index", params(TO_FP8_FAULTS))
def test_to_fp8_fault(context: RankContext, backend: str, index: int) -> None:
    """Every check of a payload that is to be quantised, on one rank only."""
    problem = base_problem(context.num_ranks, dtype=FP32, hidden=256)
    run_dispatch_fault(context, backend, problem, TO_FP8_FAULTS[index], to_fp8=True)


@on_ranks
@each_backend
def test_scales_of_a_known_kind(context: RankContext, backend: str) -> None:
    """Whether they can be packed is up to their values, so those of every call are read."""
    problem = base_problem(context.num_ranks, dtype=FP8, hidden=256)
    (x, scales), ids, weights = problem.arguments(context)  # type: ignore[misc]
    comm, one = make_comm(context, backend, problem.plan), torch.ones_like(scales)
    bad = with_entry(one, 1.5, [(2, 1)]) if context.rank == bad_rank(context) else one
    fault: Fault = ("", dict, tl.InvalidArgument, ["scales[2, 1] is 1.5"])
    for _ in range(2):
        comm.dispatch((x, one), ids, weights, layout="slots", scale_layout="packed")
        call = partial(comm.dispatch, (x, bad), ids, weights, layout="slots", scale_layout="packed")
        expect(context, call, fault, "dispatch of known kind")


def run_dispatch_fault(context: RankContext, backend: str, problem: Problem, fault: Fault, **options: object) -> None:
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    good = {"x": x, "topk_ids": ids, "topk_weights": weights, **options}
    copy = good | {"x": tuple(each.clone() for each in x) if isinstance(x, tuple) else x.clone()}
    arguments = fault[1](copy) if context.rank == bad_rank(context) else good
    for kind in ("unknown", "known"):
        expect(context, lambda: comm.dispatch(**arguments), fault, f"dispatch of {kind} kind")
        expect(context, lambda: comm.send_dispatch(**arguments).receive(), fault, f"halves of {kind} kind")
        comm.dispatch(**good)
        comm.send_dispatch(**good).receive()
    still_works(context, comm, problem)


@each_backend
@pytest.mark.parametrize("index", params(COMBINE_FAULTS))
def test_combine_fault(ranks: Ranks, backend: str, index: int) -> None:
    """Every check of combine, on one rank only; the same dispatch can be combined afterwards."""
    ranks.run(check_combine_fault, backend, "expert", index)


@each_backend
@pytest.mark.parametrize("index", params(TOKEN_COMBINE_FAULTS))
def test_combine_fault_of_tokens(ranks: Ranks, backend: str, index: int) -> None:
    """Options that only layout expert has."""
    ranks.run(check_combine_fault, backend, "token", index)


def check_combine_fault(context: RankContext, backend: str, layout: str, index: int) -> None:
    fault = (COMBINE_FAULTS if layout == "expert" else TOKEN_COMBINE_FAULTS)[index]
    problem = base_problem(context.num_ranks, dtype=FP32)
    comm = make_comm(context, backend, problem.plan)
    routed = comm.dispatch(*problem.arguments(context), layout=layout, alignment=2 if layout == "expert" else 1)
    good = {"y": torch.ones_like(routed.tokens), "routed": routed}
    arguments = fault[1](good) if context.rank == bad_rank(context) else good
    for kind in ("unknown", "known"):
        expect(context, lambda: comm.combine(**arguments), fault, f"combine of {kind} kind")
        expect(context, lambda: comm.send_combine(**arguments).receive(), fault, f"halves of {kind} kind")
        assert torch.equal(comm.combine(**good), comm.send_combine(**good).receive())
    still_works(context, comm, problem)


@on_ranks
@each_backend
def test_combine_on_the_wrong_communicator(context: RankContext, backend: str) -> None:
    """Row maps of one communicator mean nothing on another; and weights that were never given cannot weigh."""
    problem = base_problem(context.num_ranks, dtype=FP32)
    comm, other = (make_comm(context, backend, problem.plan) for _ in range(2))
    x, ids, weights = problem.arguments(context)
    routed, elsewhere = comm.dispatch(x, ids, weights), other.dispatch(x, ids, weights)
    mixed = elsewhere if context.rank == bad_rank(context) else routed
    fault: Fault = ("", dict, tl.InvalidArgument, ["routed comes from another Communicator", "combine where it was"])
    expect(context, lambda: comm.combine(routed.tokens, mixed), fault, "combine")
    unweighted = comm.dispatch(x, ids)
    with pytest.raises(tl.InvalidArgument, match="without topk_weights; pass them to dispatch"):
        comm.combine(unweighted.tokens, unweighted)
    comm.combine(unweighted.tokens, unweighted, weighted=False)


@on_ranks
@each_backend
def test_two_ranks_fail_at_once(context: RankContext, backend: str) -> None:
    """Each raises its own; the others name the lowest of them; a long message is cut, not lost."""
    problem = base_problem(context.num_ranks, dtype=FP32)
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    if context.rank == 0:
        with pytest.raises(tl.InvalidArgument):
            comm.dispatch(x, ids, weights, layout="ä" * 400)  # type: ignore[call-overload]
    elif context.rank == context.num_ranks - 1:
        with pytest.raises(tl.InvalidExpertId):
            comm.dispatch(x, ids + E, weights)
    else:
        with pytest.raises(tl.PeerError) as peer:
            comm.dispatch(x, ids, weights)
        assert peer.value.rank == 0
        assert peer.value.reason.startswith("InvalidArgument: layout is 'ää")
    still_works(context, comm, problem)


@on_ranks
def test_fp8_under_no_grad(context: RankContext) -> None:
    """What requires grad may be dispatched where no gradient is recorded."""
    problem = base_problem(context.num_ranks, dtype=FP8, hidden=128)
    comm = make_comm(context, "collective", problem.plan)
    (q, scales), ids, weights = problem.arguments(context)  # type: ignore[misc]
    with torch.no_grad():
        routed = comm.dispatch((q.requires_grad_(), scales), ids, weights)
    same_routed(routed, problem.dispatched("expert")[context.rank], problem.plan)


# -- ranks that disagree ----------------------------------------------------------------------------------------

# (field that is named, the call with what only the odd rank passes)
Disagreement = tuple[str, str, Callable[[Arguments], Arguments]]
DISAGREEMENTS: list[Disagreement] = [
    ("layout", "dispatch", lambda a: a | {"layout": "token"}),
    ("alignment", "dispatch", lambda a: a | {"alignment": 8}),
    ("sizes", "dispatch", lambda a: a | {"sizes": "bounded", "capacity": 100}),
    ("capacity", "dispatch", lambda a: a | {"capacity": 100}),
    ("x.dtype", "dispatch", lambda a: a | {"x": a["x"].to(BF16)}),
    ("topk_weights.dtype", "dispatch", lambda a: a | {"topk_weights": None}),
    ("x.requires_grad", "dispatch", lambda a: a | {"x": a["x"].requires_grad_()}),
    ("topk_weights.requires_grad", "dispatch", lambda a: a | {"topk_weights": a["topk_weights"].requires_grad_()}),
    ("mode", "combine", lambda a: a | {"mode": "per_route"}),
    ("weighted", "combine", lambda a: a | {"weighted": False}),
    ("wire_dtype", "combine", lambda a: a | {"wire_dtype": BF16}),
    ("out_dtype", "combine", lambda a: a | {"out_dtype": BF16}),
    ("y.requires_grad", "combine", lambda a: a | {"y": a["y"].requires_grad_()}),
    ("dispatch number", "combine", lambda a: a | {"routed": a["earlier"]}),
]


@each_backend
@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("index", [pytest.param(i, id=f"{d[1]} {d[0]}") for i, d in enumerate(DISAGREEMENTS)])
def test_disagreement(ranks: Ranks, backend: str, index: int, odd: str) -> None:
    """Options that differ: PlanMismatch on every rank, with the rank and the field."""
    if ranks.num_ranks == 1:
        pytest.skip("nobody to disagree with")
    ranks.run(check_disagreement, backend, index, 0 if odd == "first" else ranks.num_ranks - 1)


def check_disagreement(context: RankContext, backend: str, index: int, odd: int) -> None:
    name, call, change = DISAGREEMENTS[index]
    problem = base_problem(context.num_ranks, dtype=FP32)
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    dispatched = {"x": x, "topk_ids": ids, "topk_weights": weights}
    earlier = comm.dispatch(x.clone(), ids, weights.clone())
    routed = comm.dispatch(x.clone(), ids, weights.clone())
    combined = {"y": torch.ones_like(routed.tokens), "routed": routed, "earlier": earlier}
    arguments = dispatched if call == "dispatch" else combined
    if context.rank == odd:
        arguments = change(arguments)
    arguments.pop("earlier", None)
    expect_mismatch(context, lambda: getattr(comm, call)(**arguments), name, odd)
    still_works(context, comm, problem)
    assert comm.combine(torch.ones_like(routed.tokens), routed).shape == x.shape


@each_backend
@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("name", ["to_fp8", "power_of_two_scales", "scale_layout", "recipe"])
def test_disagreement_on_fp8(ranks: Ranks, backend: str, name: str, odd: str) -> None:
    """Rows of another width, or scales of another kind: PlanMismatch on every rank, nothing sent."""
    if ranks.num_ranks == 1:
        pytest.skip("nobody to disagree with")
    ranks.run(check_disagreement_on_fp8, backend, name, 0 if odd == "first" else ranks.num_ranks - 1)


def check_disagreement_on_fp8(context: RankContext, backend: str, name: str, odd: int) -> None:
    problem = base_problem(context.num_ranks, hidden=256)
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    options: Arguments = {"to_fp8": name != "to_fp8"}
    if name == "scale_layout":
        options["layout"] = "slots"
    if context.rank == odd:
        options[name] = {"scale_layout": "columns", "recipe": "row"}.get(name, True)
    expect_mismatch(context, lambda: comm.dispatch(x, ids, weights, **options), name, odd)
    still_works(context, comm, problem)


def expect_mismatch(context: RankContext, call: Callable[[], object], name: str, odd: int) -> None:
    with count_wire() as wire, pytest.raises(tl.PlanMismatch) as raised:
        call()
    # All are compared with rank 0, so if that is the odd one, the next differs from it.
    assert raised.value.rank == max(odd, 1)
    assert raised.value.field == name
    assert f"rank {max(odd, 1)} has {name}=" in str(raised.value)
    assert f"rank 0 has {name}=" in str(raised.value)
    same = "result of the same dispatch" if name == "dispatch number" else f"give all ranks the same {name}"
    assert same in str(raised.value)
    assert wire.all_to_all == []


@each_backend
@pytest.mark.parametrize("odd_call", ["dispatch", "combine"])
def test_different_calls(ranks: Ranks, backend: str, odd_call: str) -> None:
    """One rank combines while the others dispatch, and the other way round."""
    if ranks.num_ranks == 1:
        pytest.skip("nobody to disagree with")
    ranks.run(check_different_calls, backend, odd_call)


def check_different_calls(context: RankContext, backend: str, odd_call: str) -> None:
    problem = base_problem(context.num_ranks, dtype=FP32)
    comm = make_comm(context, backend, problem.plan)
    arguments = problem.arguments(context)
    routed = comm.dispatch(*arguments)
    calls = {"dispatch": lambda: comm.dispatch(*arguments), "combine": lambda: comm.combine(routed.tokens, routed)}
    odd = bad_rank(context)
    mine = odd_call if context.rank == odd else ({"dispatch", "combine"} - {odd_call}).pop()
    expect_mismatch(context, calls[mine], "call", odd)
    still_works(context, comm, problem)


# -- making a communicator --------------------------------------------------------------------------------------

SIZES = {"num_experts": E, "hidden": H, "top_k": K, "max_tokens_per_rank": M}


@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("name", [*SIZES, "backend"])
def test_plans_differ(ranks: Ranks, name: str, odd: str) -> None:
    """PlanMismatch on all ranks, with rank and field; ranks can then agree on the same group."""
    if ranks.num_ranks == 1:
        pytest.skip("nobody to disagree with")
    ranks.run(check_plans_differ, name, 0 if odd == "first" else ranks.num_ranks - 1)


def check_plans_differ(context: RankContext, name: str, odd: int) -> None:
    arguments: Arguments = SIZES | {"backend": "collective"}
    if context.rank == odd:
        arguments[name] = "auto" if name == "backend" else arguments[name] * 2
    expect_mismatch(context, lambda: tl.Communicator(context.group, device=context.device, **arguments), name, odd)
    still_works(
        context,
        make_comm(context, "collective", base_problem(context.num_ranks).plan),
        base_problem(context.num_ranks),
    )


CONSTRUCTION_FAULTS: list[tuple[str, Arguments, list[str]]] = [
    ("E not divisible", {"num_experts": 4 * E + 1}, ["num_experts is 33", "a multiple of the", "pad the experts"]),
    ("hidden 0", {"hidden": 0}, ["hidden is 0", "positive integer"]),
    ("top_k over the limit", {"top_k": 33}, ["top_k is 33", "at most 32"]),
    ("max_tokens_per_rank that is no number", {"max_tokens_per_rank": None}, ["max_tokens_per_rank is None"]),
    ("an unknown backend", {"backend": "nccl"}, ["backend is 'nccl'", "one of auto, nvlink, network, collective"]),
    ("timeout 0", {"timeout_s": 0}, ["timeout_s is 0", "above 0"]),
    ("a timeout without end", {"timeout_s": float("inf")}, ["timeout_s is inf"]),
    ("a timeout that is no number", {"timeout_s": "10"}, ["timeout_s is '10'"]),
    ("an unknown device", {"device": "gpu"}, ["device is 'gpu'"]),
]


@pytest.mark.parametrize("index", [pytest.param(i, id=fault[0]) for i, fault in enumerate(CONSTRUCTION_FAULTS)])
def test_construction_fault(ranks: Ranks, index: int) -> None:
    """On one rank only, and on all of them."""
    if ranks.num_ranks == 1 and "not divisible" in CONSTRUCTION_FAULTS[index][0]:
        pytest.skip("1 divides everything")
    ranks.run(check_construction_fault, index)


def check_construction_fault(context: RankContext, index: int) -> None:
    name, wrong, texts = CONSTRUCTION_FAULTS[index]
    if "timeout_s" not in wrong:
        wrong = wrong | {"timeout_s": 10.0}  # a rank that waits in vain fails here, not in the test's limit
    fault: Fault = (name, dict, tl.InvalidArgument, texts)
    good: Arguments = {"device": context.device, "timeout_s": 10.0} | SIZES
    arguments = good | wrong if context.rank == bad_rank(context) else good
    expect(context, lambda: tl.Communicator(context.group, **arguments), fault, "construction")
    with pytest.raises(tl.InvalidArgument, match=texts[0].split()[0]):
        tl.Communicator(context.group, **(good | wrong))
    still_works(
        context,
        make_comm(context, "collective", base_problem(context.num_ranks).plan),
        base_problem(context.num_ranks),
    )


@on_ranks
def test_unavailable_backend(context: RankContext) -> None:
    """Asked for by name: on every rank the reason, and what to use instead; auto takes another and says why."""
    found = {each.name: each for each in registry.availability("gloo", torch.device("cpu"))}
    assert not found["nvlink"].works
    if context.device.type == "cpu":
        with pytest.raises(tl.BackendUnavailable) as raised:
            tl.Communicator(context.group, backend="nvlink", **SIZES)
        assert found["nvlink"].why in str(raised.value)
        assert "use backend='auto'" in str(raised.value)
        comm = tl.Communicator(context.group, **SIZES)
        assert comm.backend == "collective"
        assert f"not picked: nvlink does not work on every rank: {found['nvlink'].why}" in comm.describe()
        assert f"rank {context.rank} of {context.num_ranks}" in comm.describe()


@on_ranks
def test_closed(context: RankContext) -> None:
    """Every call after close raises, and closing again is fine."""
    problem = base_problem(context.num_ranks)
    arguments = problem.arguments(context)
    with make_comm(context, "collective", problem.plan) as comm:
        routed = comm.dispatch(*arguments)
    comm.close()
    for call in (lambda: comm.dispatch(*arguments), lambda: comm.combine(routed.tokens, routed), comm.check):
        with pytest.raises(tl.CommunicatorBroken, match="closed; make a new communicator"):
            call()


def test_errors_are_what_callers_expect() -> None:
    """All derive from TokenloomError, and from the built-in exception that fits."""
    public = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(each, errors.TokenloomError) for each in public)
    for built_in, ours in {
        ValueError: (tl.InvalidArgument, tl.ShapeMismatch, tl.DeviceMismatch, tl.InvalidExpertId, tl.PlanMismatch),
        TypeError: (tl.DtypeMismatch,),
        TimeoutError: (tl.PeerTimeout,),
        RuntimeError: (
            tl.PeerError,
            tl.CommunicatorBroken,
            tl.CapacityOverflow,
            tl.BackendUnavailable,
            tl.NotDifferentiable,
        ),
    }.items():
        assert all(issubclass(each, built_in) for each in ours)


@on_ranks
def test_a_constructor_without_memory(context: RankContext) -> None:
    """The other ranks make their communicators, and hear of it, whatever the fault is."""
    bad, prepare = context.num_ranks - 1, RankGroup.prepare
    no_memory = torch.OutOfMemoryError("no memory left")
    steps = [no_memory, None] if context.rank == bad else [None]

    def fail_first(self: RankGroup, *args: Any) -> None:
        error = steps.pop(0)
        if error is not None:
            raise error
        prepare(self, *args)

    problem = base_problem(context.num_ranks)
    with mock.patch.object(RankGroup, "prepare", fail_first):
        if context.rank == bad:
            with pytest.raises(torch.OutOfMemoryError):
                make_comm(context, "collective", problem.plan)
        else:
            with pytest.raises(tl.PeerError, match="OutOfMemoryError: no memory left") as peer:
                make_comm(context, "collective", problem.plan)
            assert peer.value.rank == bad
    still_works(context, make_comm(context, "collective", problem.plan), problem)
