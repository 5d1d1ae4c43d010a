"""What a later call of a known kind is looked at for. What passes a glance is sent: a glance must miss nothing.

Each glance is asked alone, without a call, so that nothing behind it can refuse what it has missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import tokenloom as tl
from tokenloom.backends.seam import Capabilities, CombineOptions, DispatchKind, DispatchOptions
from tokenloom.comm import checks
from tokenloom.plan import Plan

PLAN = Plan(1, 8, 256, 2, 6)
READS, SENDS = Capabilities(reads_on_host=True), Capabilities(reads_on_host=False)
"""What backends can do: some read ids, and so cannot take tensors without memory."""
CPU, BF16, FP8, FP32 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn, torch.float32
T, CAPACITY = 4, 12
Given = dict[str, Any]
Change = Callable[[Given], Given]


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory is gone."""
    tensor.untyped_storage().resize_(0)
    return tensor


def view_of_freed(tensor: torch.Tensor) -> torch.Tensor:
    """A view behind the begin of memory that is gone: it has an address."""
    view = torch.cat([tensor, tensor])[len(tensor) :]
    return freed(view)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return tensor.t().contiguous().t()


def traced(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that torch traces: of the plain class, without memory of its own."""
    made: torch.Tensor = torch._to_functional_tensor(tensor)
    return made


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def change(name: str, make: Callable[[torch.Tensor], Any]) -> Change:
    return lambda given: given | {name: make(given[name])}


def without_tokens(given: Given) -> Given:
    cut = {name: each[:0] for name, each in given.items() if isinstance(each, torch.Tensor) and name != "out"}
    return given | cut


def of_none(name: str, make: Callable[[torch.Tensor], Any]) -> Change:
    """No tokens, and one of their tensors changed."""
    return lambda given: change(name, make)(without_tokens(given))


def wrong(name: str) -> dict[str, Change]:
    """Changes that any tensor of a call is looked at for."""
    return {
        f"{name} with fewer rows": change(name, lambda each: each[:-1]),
        f"{name} with fewer columns": change(name, lambda each: each[:, :1].contiguous()),
        f"{name} not contiguous": change(name, transposed),
        f"{name} freed": change(name, freed),
        f"view of freed {name}": change(name, view_of_freed),
        f"traced {name}": change(name, traced),
        f"no {name} elsewhere": of_none(name, elsewhere),
    }


@contextmanager
def dual_level() -> Iterator[None]:
    """Where forward-mode derivatives may be wanted."""
    with forward_ad.dual_level():
        yield


# -- dispatch ---------------------------------------------------------------------------------------------------


def dispatch_tensors() -> Given:
    out = tl.DispatchOut(tokens=torch.zeros(CAPACITY, 256, dtype=BF16), num_rows=torch.zeros((), dtype=torch.int32))
    ids, weights = torch.zeros(T, 2, dtype=torch.int64), torch.ones(T, 2)
    return {"x": torch.zeros(T, 256, dtype=BF16), "scales": None, "ids": ids, "weights": weights, "out": out}


def fp8_tensors() -> Given:
    x, scales = torch.zeros(T, 256, dtype=torch.uint8).view(FP8), torch.ones(T, 2)
    return dispatch_tensors() | {"x": x, "scales": scales, "out": None}


def dispatch_fits(given: Given, sizes: str = "bounded", able: Capabilities = SENDS, recipe: str = "block") -> bool:
    """What the glance of the kind of these tensors says. It may raise for what is wrong."""
    has_scales = given["scales"] is not None
    options = DispatchOptions("token", 1, sizes, CAPACITY, recipe=recipe)
    kind = DispatchKind(options, FP8 if has_scales else BF16, torch.int64, FP32, has_scales)
    fits = checks.dispatch_glance(PLAN, able, CPU, kind, PLAN.num_experts)
    with torch.no_grad():
        try:
            return fits(*(given[name] for name in ("x", "scales", "ids", "weights", "out")))
        except (ValueError, RuntimeError):
            return False


def out_with(**fields: Any) -> Change:
    return lambda given: given | {"out": replace(given["out"], **fields)}


def many(given: Given) -> Given:
    more = {name: given[name].new_zeros(PLAN.max_tokens_per_rank + 1, given[name].shape[1]) for name in ("x", "ids")}
    return given | more | {"weights": torch.zeros(PLAN.max_tokens_per_rank + 1, 2)}


DISPATCHES: dict[str, Change] = {
    **wrong("x"),
    **wrong("ids"),
    **wrong("weights"),
    "x of one dimension": change("x", lambda x: x[0]),
    "too many tokens": many,
    "no traced x": of_none("x", traced),
    "no traced ids": of_none("ids", traced),
    "no traced weights": of_none("weights", traced),
    "room that is no DispatchOut": change("out", lambda out: out.tokens),
    "room that is no tensor": out_with(num_rows=3),
    "room for fewer rows": out_with(tokens=torch.zeros(CAPACITY - 1, 256, dtype=BF16)),
    "room of another dtype": out_with(tokens=torch.zeros(CAPACITY, 256)),
    "room by column": out_with(tokens=torch.zeros(256, CAPACITY, dtype=BF16).t()),
    "room elsewhere": out_with(tokens=torch.zeros(CAPACITY, 256, dtype=BF16, device="meta")),
    "room with a gradient": out_with(tokens=torch.zeros(CAPACITY, 256, dtype=BF16, requires_grad=True)),
    "room for what the layout has not": out_with(slot_ranges=torch.zeros(8, 1, 2, dtype=torch.int32)),
}


@pytest.mark.parametrize("what", DISPATCHES)
def test_dispatch(what: str) -> None:
    assert not dispatch_fits(DISPATCHES[what](dispatch_tensors()))


@pytest.mark.parametrize("expert", [-2, PLAN.num_experts])
def test_ids_of_no_expert(expert: int) -> None:
    """They are looked at where the host reads anyway. Elsewhere kernels take them for -1."""
    ids = torch.zeros(T, 2, dtype=torch.int64)
    ids[1, 1] = expert
    assert not dispatch_fits(dispatch_tensors() | {"ids": ids}, able=READS)
    assert dispatch_fits(dispatch_tensors() | {"ids": ids}, able=SENDS)


FP8_DISPATCHES: dict[str, Change] = {
    **wrong("scales"),
    "scales in bfloat16": change("scales", lambda scales: scales.to(BF16)),
    "scales that require grad": change("scales", lambda scales: scales.requires_grad_()),
}


@pytest.mark.parametrize("what", FP8_DISPATCHES)
def test_dispatch_of_fp8(what: str) -> None:
    assert not dispatch_fits(FP8_DISPATCHES[what](fp8_tensors()))


def test_right_dispatches() -> None:
    """Of all tensors, of none that may be missing, of ids at both ends, and without tokens."""
    for given in (dispatch_tensors(), fp8_tensors()):
        assert dispatch_fits(given)
        assert dispatch_fits(given | {"weights": None, "out": None})
        assert dispatch_fits(without_tokens(given))
        for place in (-1, PLAN.num_experts - 1):
            assert dispatch_fits(given | {"ids": torch.full((T, 2), place)}, able=READS)


def test_scales_of_rows() -> None:
    """One for each row where the recipe says so, and only there."""
    of_rows = fp8_tensors() | {"scales": torch.ones(T)}
    assert dispatch_fits(of_rows, recipe="row")
    assert not dispatch_fits(of_rows)
    assert not dispatch_fits(fp8_tensors(), recipe="row")
    assert not dispatch_fits(of_rows | {"scales": torch.ones(T - 1)}, recipe="row")


def test_what_is_around_a_dispatch() -> None:
    """Room for results is for bounded sizes, where gradients are disabled. Tangents are looked at thing by thing."""
    given = dispatch_tensors()
    assert not dispatch_fits(given, "exact")
    assert dispatch_fits(given | {"out": None}, "exact")
    with dual_level():
        assert not dispatch_fits(given)
    kind = DispatchKind(DispatchOptions("token", 1, "bounded", CAPACITY), BF16, torch.int64, FP32)
    fits = checks.dispatch_glance(PLAN, SENDS, CPU, kind, PLAN.num_experts)
    tensors = [given[name] for name in ("x", "scales", "ids", "weights")]
    with torch.enable_grad():
        assert fits(*tensors, None)
        assert not fits(*tensors, given["out"])


def test_another_device() -> None:
    """By its number, where only that differs."""
    given, other = dispatch_tensors(), torch.device("cpu", 1)
    kind = DispatchKind(DispatchOptions("token", 1, "bounded", CAPACITY), BF16, torch.int64)
    assert not checks.dispatch_glance(PLAN, SENDS, other, kind, PLAN.num_experts)(
        given["x"], None, given["ids"], None, None
    )
    combine = checks.combine_glance(PLAN, other, CombineOptions(False, BF16, BF16, False))
    assert not combine(given["x"], None, given["x"].shape, T, None)
    assert not checks.fits_like(given["x"], (T, 256), BF16, other)


# -- combine ----------------------------------------------------------------------------------------------------


def combine_tensors() -> Given:
    return {"y": torch.zeros(5, 256, dtype=BF16), "weights": torch.ones(T, 2), "out": torch.zeros(T, 256)}


def combine_fits(given: Given, needs_grad: bool = False) -> bool:
    fits = checks.combine_glance(PLAN, CPU, CombineOptions(True, BF16, FP32, needs_grad))
    num_rows, num_tokens = given.get("sizes", (5, T))
    try:
        return fits(given["y"], given["weights"], (num_rows, 256), num_tokens, given["out"])
    except RuntimeError:
        return False


def none_at_all(name: str, make: Callable[[torch.Tensor], Any]) -> Change:
    """No rows here, and no tokens at home."""

    def made(given: Given) -> Given:
        return change(name, make)({key: each[:0] for key, each in given.items()}) | {"sizes": (0, 0)}

    return made


def wrong_rows(name: str) -> dict[str, Change]:
    changes = {what: each for what, each in wrong(name).items() if not what.startswith("no ")}
    return changes | {
        f"no {name} elsewhere": none_at_all(name, elsewhere),
        f"no traced {name}": none_at_all(name, traced),
    }


COMBINES: dict[str, Change] = {
    **wrong_rows("y"),
    **wrong_rows("weights"),
    **wrong_rows("out"),
    "y is a list": change("y", lambda y: y.tolist()),
    "weights in float64": change("weights", lambda weights: weights.double()),
    "weights that require grad": change("weights", lambda weights: weights.requires_grad_()),
    "out in bfloat16": change("out", lambda out: out.to(BF16)),
    "out that requires grad": change("out", lambda out: out.requires_grad_()),
}


@pytest.mark.parametrize("what", COMBINES)
def test_combine(what: str) -> None:
    assert not combine_fits(COMBINES[what](combine_tensors()))


def test_right_combines() -> None:
    """Of all tensors, of y alone, and without rows; with gradients of y alone."""
    given = combine_tensors()
    alone = given | {"weights": None, "out": None}
    assert combine_fits(given)
    assert combine_fits(alone)
    assert combine_fits(none_at_all("y", lambda y: y)(given))
    assert combine_fits(alone, needs_grad=True)


def test_what_is_around_a_combine() -> None:
    """Weights of home and room for results have no gradient. Tangents are looked at thing by thing."""
    given = combine_tensors()
    assert not combine_fits(given | {"weights": None}, needs_grad=True)
    assert not combine_fits(given | {"out": None}, needs_grad=True)
    with dual_level():
        assert not combine_fits(given | {"weights": None, "out": None})


# -- one tensor, and other rows of a dispatch ---------------------------------------------------------------------

LIKE: dict[str, Change] = {
    **{what: each for what, each in wrong("x").items() if not what.startswith("no ")},
    "a list": change("x", lambda x: x.tolist()),
    "another dtype": change("x", lambda x: x.float()),
    "elsewhere": change("x", elsewhere),
    "with a graph": change("x", lambda x: x.requires_grad_()),
}


@pytest.mark.parametrize("what", LIKE)
def test_like(what: str) -> None:
    x = LIKE[what](dispatch_tensors())["x"]
    try:
        assert not checks.fits_like(x, (T, 256), BF16, CPU)
    except RuntimeError:
        pytest.fail("callers expect this of nested and sparse tensors alone")


def test_right_tensors() -> None:
    """Those of no rows need no memory, but torch must not trace them."""
    x = dispatch_tensors()["x"]
    assert checks.fits_like(x, (T, 256), BF16, CPU)
    assert checks.fits_like(x[:0], (0, 256), BF16, CPU)
    assert not checks.fits_like(traced(x[:0]), (0, 256), BF16, CPU)
    assert not checks.fits_like(elsewhere(x[:0]), (0, 256), BF16, CPU)
    with dual_level():
        assert not checks.fits_like(x, (T, 256), BF16, CPU)


def again_fits(x: Any, layout: str = "token", plan: Plan = PLAN, recipe: str = "block") -> bool:
    return checks.fits_rows_again(plan, SENDS, CPU, x, T, DispatchOptions(layout, 1, "bounded", None, recipe=recipe))


ROWS_AGAIN: dict[str, Callable[[], Any]] = {
    "fewer rows": lambda: torch.zeros(T - 1, 256, dtype=BF16),
    "rows of integers": lambda: torch.zeros(T, 256, dtype=torch.int32),
    "FP8 without scales": lambda: fp8_tensors()["x"],
    "scales of bfloat16 rows": lambda: (dispatch_tensors()["x"], torch.ones(T, 2)),
    "fewer FP8 rows": lambda: (fp8_tensors()["x"][:-1], torch.ones(T, 2)),
    "fewer scales": lambda: (fp8_tensors()["x"], torch.ones(T, 1)),
    "scales in float64": lambda: (fp8_tensors()["x"], torch.ones(T, 2).double()),
    "three tensors": lambda: (fp8_tensors()["x"], torch.ones(T, 2), torch.ones(T, 2)),
}


@pytest.mark.parametrize("what", ROWS_AGAIN)
def test_rows_again(what: str) -> None:
    assert not again_fits(ROWS_AGAIN[what]())


def test_right_rows_again() -> None:
    """FP8 rows go to no slots, whose scales have another layout, and need whole blocks of scales."""
    quantised = (fp8_tensors()["x"], torch.ones(T, 2))
    assert again_fits(dispatch_tensors()["x"])
    assert again_fits(dispatch_tensors()["x"], "slots")
    assert again_fits(quantised)
    assert not again_fits(quantised, "slots")
    assert again_fits((quantised[0], torch.ones(T)), recipe="row")
    assert not again_fits(quantised, recipe="row")
    assert not again_fits((quantised[0], torch.ones(T)))
    narrow = replace(PLAN, hidden=200)
    odd = (torch.zeros(T, 200, dtype=torch.uint8).view(FP8), torch.ones(T, narrow.scales_per_token))
    assert not again_fits(odd, plan=narrow)
