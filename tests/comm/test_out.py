"""Tensors of the caller's own that results are written to, and what they must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.cases import (
    BF16,
    FP8,
    FP32,
    Case,
    Problem,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    on_another_stream,
    same_bits,
    same_routed,
)
from tests.support.on_ranks import on_ranks
from tests.support.wire import count_wire
from tokenloom.runtime.processes import RankContext

CASE = Case("out", "", tokens=(6, 0, 3, 5), top_k=3, unused=0.2, hidden=256)
Make = Callable[[torch.Tensor], torch.Tensor]
FIELDS = tuple(tl.DispatchOut.__dataclass_fields__)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised, of the same shape, dtype and strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def all_like(routed: tl.Routed) -> tl.DispatchOut:
    """A tensor for every result that the dispatch had."""
    found = {name: getattr(routed, name) for name in FIELDS}
    return tl.DispatchOut(**{name: None if each is None else like(each) for name, each in found.items()})


DISPATCHES: list[Any] = [
    pytest.param("token", {}, id="token"),
    pytest.param("rank", {}, id="rank"),
    pytest.param("expert", {"alignment": 4, "capacity": 60}, id="expert"),
    pytest.param("slots", {}, id="slots"),
    pytest.param("slots", {"to_fp8": True, "scale_layout": "columns", "capacity": 11}, id="slots columns"),
    pytest.param("slots", {"to_fp8": True, "power_of_two_scales": True, "scale_layout": "packed"}, id="slots packed"),
    pytest.param("token", {"to_fp8": True}, id="token fp8"),
    pytest.param("rank", {"to_fp8": True, "recipe": "row"}, id="rank fp8 row"),
    pytest.param("slots", {"to_fp8": True, "recipe": "row", "capacity": 11}, id="slots fp8 row"),
]


def options_of(layout: str, others: dict[str, Any]) -> dict[str, Any]:
    return {"layout": layout, "sizes": "bounded", **others}


# -- results ----------------------------------------------------------------------------------------------------


@on_ranks
@pytest.mark.sampled(3)
@each_backend
@pytest.mark.parametrize(("layout", "others"), DISPATCHES)
def test_dispatch(context: RankContext, backend: str, layout: str, others: dict[str, Any]) -> None:
    """Every result, each alone, and none: routed holds the very tensors, with what the reference says."""
    problem = make_problem(replace(CASE, to_quantise="to_fp8" in others), context.num_ranks)
    options = options_of(layout, others)
    wanted = {name: value for name, value in options.items() if name != "sizes"}
    if layout == "token":
        wanted["capacity"] = problem.plan.worst_case_rows("token")
    want = problem.dispatched(**wanted, bounded=True)[context.rank]
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        whole = all_like(comm.dispatch(*problem.arguments(context), **options, copy=True))
        single = [tl.DispatchOut(**{name: each}) for name, each in vars(whole).items() if each is not None]
        for out in (whole, *single, tl.DispatchOut()):
            routed = comm.dispatch(*problem.arguments(context), **options, out=out)
            for name, tensor in vars(out).items():
                assert tensor is None or getattr(routed, name) is tensor, name
            same_routed(routed, want, problem.plan, bounded=True)


@on_ranks
@each_backend
def test_results_stay(context: RankContext, backend: str) -> None:
    """What was written to is the caller's: later calls change nothing of it, and it can be combined all the same."""
    problem, other = (make_problem(replace(CASE, seed=seed), context.num_ranks) for seed in (0, 1))
    want = problem.dispatched("slots")
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        out = all_like(comm.dispatch(*problem.arguments(context), layout="slots"))
        routed = comm.dispatch(*problem.arguments(context), layout="slots", out=out, copy=True)
        for _ in range(4):
            comm.dispatch(*other.arguments(context), layout="slots")
        same_routed(routed, want[context.rank], problem.plan)
        y = expert_rows(problem, want, FP32)[context.rank].to(context.device)
        expected = comm.combine(y, routed)
        mine = torch.full_like(expected, torch.nan)
        assert comm.combine(y, routed, out=mine) is mine
        same_bits(mine, expected.cpu(), "out")


@on_ranks
@each_backend
def test_halves_and_streams(context: RankContext, backend: str) -> None:
    """With a pending, and on the communicator's own stream."""
    problem = make_problem(CASE, context.num_ranks)
    want = problem.dispatched("slots")[context.rank]
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        out = all_like(comm.dispatch(*problem.arguments(context), layout="slots"))
        routed = comm.send_dispatch(*problem.arguments(context), layout="slots", out=out, copy=True).receive()
        assert routed.tokens is out.tokens
        same_routed(routed, want, problem.plan)
        expected = comm.combine(routed.tokens, routed)
        home = torch.full_like(expected, torch.nan)
        assert comm.send_combine(routed.tokens, routed, out=home).receive() is home
        same_bits(home, expected.cpu(), "out")
        options: dict[str, Any] = {"layout": "slots", "out": all_like(routed), "copy": True}
        with on_another_stream(context.device):
            routed = comm.dispatch(*problem.arguments(context), **options)
        same_routed(routed, want, problem.plan)
        with on_another_stream(context.device):
            found = comm.combine(routed.tokens, routed, out=home.fill_(torch.nan))
        assert found is home
        same_bits(home, expected.cpu(), "out")


@on_ranks
@each_backend
def test_overflow(context: RankContext, backend: str) -> None:
    """Nothing is written beyond the caller's tensors, and the counts fit them."""
    problem = make_problem(replace(CASE, pick="one expert"), context.num_ranks)
    options: dict[str, Any] = {"layout": "slots", "capacity": problem.rows_needed("slots") - 1}
    want = problem.dispatched(**options)[context.rank]
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        storage = torch.full((want.tokens.numel() + 64,), 7, dtype=BF16, device=context.device)
        out = tl.DispatchOut(tokens=storage[32:-32].view(want.tokens.shape))
        routed = comm.dispatch(*problem.arguments(context), **options, out=out)
        with pytest.raises(tl.CapacityOverflow):
            comm.check()
        same_routed(routed, want, problem.plan)
        assert (storage[:32] == 7).all()
        assert (storage[-32:] == 7).all()


# -- faults -----------------------------------------------------------------------------------------------------

Fault = tuple[str, Callable[[dict[str, Any]], dict[str, Any]], type[Exception], list[str]]


def change(name: str, make: Make) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Another tensor in one field of ``out``."""

    def changed(given: dict[str, Any]) -> dict[str, Any]:
        out = given["out"]
        return given | {"out": replace(out, **{name: make(getattr(out, name))})}

    return changed


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, with the steps of the last two dimensions in the other order."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


DISPATCH_FAULTS: list[Fault] = [
    ("tokens of fewer places", change("tokens", lambda t: t[:, :-1]), tl.ShapeMismatch,
     ["out.tokens is [", "expected [", "as the call returns it"]),
    ("tokens without dimensions of places", change("tokens", lambda t: t.flatten(0, 1)), tl.ShapeMismatch,
     ["out.tokens is ["]),
    ("tokens of another dtype", change("tokens", lambda t: t.view(torch.int8)), tl.DtypeMismatch,
     ["out.tokens is torch.int8", "float8_e4m3fn"]),
    ("tokens with other strides", change("tokens", lambda t: transposed(t.view(torch.int8)).view(FP8)),
     tl.ShapeMismatch, ["out.tokens has strides (", "expected ("]),
    ("tokens elsewhere", change("tokens", lambda t: t.to("meta")), tl.DeviceMismatch,
     ["out.tokens is on meta", "move one of them"]),
    ("scales by row where columns are asked for", change("scales", lambda t: t.contiguous()), tl.ShapeMismatch,
     ["out.scales has strides ("]),
    ("counts in int64", change("expert_counts", lambda t: t.long()), tl.DtypeMismatch,
     ["out.expert_counts is torch.int64", "int32"]),
    ("a scalar with a dimension", change("num_rows", lambda t: t[None]), tl.ShapeMismatch, ["out.num_rows is [1]"]),
    ("ranges with other strides", change("slot_ranges", lambda t: torch.stack([t, t], 3)[..., 0]), tl.ShapeMismatch,
     ["out.slot_ranges has strides"]),
    ("a result that the layout lacks", change("expert_offsets", lambda t: torch.zeros(4, dtype=torch.int32)),
     tl.InvalidArgument, ["out.expert_offsets is given", "'slots' has only tokens, scales"]),
    ("weights, which come by route", change("topk_weights", lambda t: torch.zeros(4)), tl.InvalidArgument,
     ["out.topk_weights is given"]),
    ("no tensor", lambda given: given | {"out": tl.DispatchOut(tokens=3)}, tl.InvalidArgument,  # type: ignore[arg-type]
     ["out.tokens is an int", "torch.Tensor"]),
    ("something else", lambda given: given | {"out": given["out"].tokens}, tl.InvalidArgument,
     ["out is a Tensor", "DispatchOut"]),
]  # fmt: skip

EXACT_FAULTS: list[Fault] = [
    ("exact sizes", lambda given: given | {"out": tl.DispatchOut()}, tl.InvalidArgument,
     ["known size", "sizes='bounded'"]),
]  # fmt: skip

COMBINE_FAULTS: list[Fault] = [
    ("of more tokens", lambda given: given | {"out": given["out"].new_zeros(99, CASE.hidden)}, tl.ShapeMismatch,
     ["out is [99, 256]", "expected ["]),
    ("of another dtype", lambda given: given | {"out": given["out"].to(BF16)}, tl.DtypeMismatch,
     ["out is torch.bfloat16", "float32"]),
    ("elsewhere", lambda given: given | {"out": given["out"].to("meta")}, tl.DeviceMismatch, ["out is on meta"]),
    ("a list", lambda given: given | {"out": []}, tl.InvalidArgument, ["out is a list"]),
]  # fmt: skip


def params(faults: list[Fault]) -> list[Any]:
    return [pytest.param(index, id=fault[0]) for index, fault in enumerate(faults)]


def expect(
    context: RankContext, call: Callable[[dict[str, Any]], object], given: dict[str, Any], fault: Fault
) -> None:
    """The error on the last rank, PeerError on the others, and nothing on the wire."""
    _, wrong, error, texts = fault
    with count_wire() as wire:
        if context.rank != context.num_ranks - 1:
            with pytest.raises(tl.PeerError) as peer:
                call(given)
            assert peer.value.reason.startswith(error.__name__)
        else:
            with pytest.raises(tl.TokenloomError) as raised:
                call(wrong(given))
            assert type(raised.value) is error, repr(raised.value)
            assert [text for text in texts if text not in str(raised.value)] == [], str(raised.value)
    assert wire.all_to_all == []


@on_ranks
@pytest.mark.slow_on(4)
@each_backend
@pytest.mark.parametrize("index", params(DISPATCH_FAULTS))
def test_dispatch_fault(context: RankContext, backend: str, index: int) -> None:
    """Every check, before anything is sent; the communicator works on."""
    problem = make_problem(replace(CASE, to_quantise=True), context.num_ranks)
    options: dict[str, Any] = {"layout": "slots", "to_fp8": True, "scale_layout": "columns"}
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        out = all_like(comm.dispatch(*problem.arguments(context), **options, copy=True))
        want, given = problem.dispatched(**options)[context.rank], options | {"out": out}
        calls = (comm.dispatch, lambda *given, **named: comm.send_dispatch(*given, **named).receive())
        for call in calls * 2:  # the second time the kind is known
            expect(
                context, lambda given, call=call: call(*problem.arguments(context), **given), given,
                DISPATCH_FAULTS[index],
            )  # fmt: skip
            same_routed(call(*problem.arguments(context), **given), want, problem.plan)


@on_ranks
@each_backend
@pytest.mark.parametrize("index", params(EXACT_FAULTS))
def test_fault_of_options(context: RankContext, backend: str, index: int) -> None:
    """What no tensor can mend."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        for _ in range(2):  # the second time the kind is known
            expect(context, lambda given: comm.dispatch(*problem.arguments(context), **given), {}, EXACT_FAULTS[index])
            comm.dispatch(*problem.arguments(context))


@on_ranks
@each_backend
def test_no_gradients(context: RankContext, backend: str) -> None:
    """Where one is enabled, a dispatch refuses ``out``; a combine does where one is wanted."""
    problem = make_problem(CASE, context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm:
        with pytest.raises(tl.InvalidArgument, match=r"out= has no gradient; dispatch inside of torch\.no_grad"):
            comm.dispatch(*problem.arguments(context), layout="slots", out=tl.DispatchOut())
        routed = comm.dispatch(*problem.arguments(context), copy=True)
        y = routed.tokens.float().nan_to_num(1, 1, 1)
        out = comm.combine(y, routed)
        for leaf, given in ((y.clone().requires_grad_(), out), (y, out.clone().requires_grad_())):
            with pytest.raises(tl.InvalidArgument, match=r"out= has no gradient; combine inside of torch\.no_grad"):
                comm.combine(leaf, routed, out=given)
        assert comm.combine(y, routed, out=out) is out


@on_ranks
@pytest.mark.slow_on(4)
@each_backend
@pytest.mark.parametrize("index", params(COMBINE_FAULTS))
def test_combine_fault(context: RankContext, backend: str, index: int) -> None:
    """Every check, before anything is sent."""
    problem = make_problem(replace(CASE, tokens=(4, 2)), context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), copy=True)
        y = torch.ones_like(routed.tokens, dtype=FP32)
        given = {"out": comm.combine(y, routed)}
        calls = (comm.combine, lambda *given, **named: comm.send_combine(*given, **named).receive())
        for call in calls * 2:  # the second time the kind is known
            expect(context, lambda given, call=call: call(y, routed, **given), given, COMBINE_FAULTS[index])
            assert call(y, routed, **given) is given["out"]
        strided = torch.empty(CASE.hidden, len(given["out"]), device=context.device).t()
        with pytest.raises(tl.ShapeMismatch, match="out has strides"):
            comm.combine(y, routed, out=strided)
        assert comm.combine(y, routed, out=given["out"]) is given["out"]


def test_what_may_have_any_stride() -> None:
    """A dimension of one place, and a tensor without values: no address depends on its strides."""
    problem: Problem = make_problem(Case("alone", "", tokens=(1,), spare=0, experts_per_rank=1, top_k=1), 1)
    context = RankContext(0, 1, None, torch.device("cpu"), None)  # type: ignore[arg-type]
    with make_comm(context, "collective", problem.plan) as comm, torch.no_grad():
        tokens = torch.empty_strided((1, 1, 8), (100, 50, 1), dtype=BF16)
        routed = comm.dispatch(*problem.arguments(context), layout="slots", out=tl.DispatchOut(tokens=tokens))
        same_routed(routed, problem.dispatched("slots")[0], problem.plan)
