"""What opens a call: fields that all ranks must mean alike, compared by their hash and shown by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tokenloom.backends.handshake import combine_fields, dispatch_fields, gradient_fields
from tokenloom.backends.seam import CombineOptions, DispatchKind, DispatchOptions
from tokenloom.runtime.openings import CallKind, Fields, hash_of, raise_difference, text_of

BF16, FP32 = torch.bfloat16, torch.float32
DISPATCH = DispatchOptions("expert", 16, "bounded", 640, True, True)
COMBINE = CombineOptions(True, BF16, FP32, False)


def dispatch_kind(
    options: DispatchOptions = DISPATCH,
    x_dtype: torch.dtype = BF16,
    weights_dtype: torch.dtype | None = FP32,
    **needs: bool,
) -> DispatchKind:
    return DispatchKind(options, x_dtype, torch.int64, weights_dtype, **needs)


OTHER_VALUES: dict[str, Any] = {
    "layout": "token",
    "alignment": 8,
    "sizes": "exact",
    "capacity": None,
    "to_fp8": False,
    "power_of_two_scales": False,
    "strategy": "all_gather",
    "scale_layout": "columns",
    "recipe": "row",
    "weighted": False,
    "weights_from_home": True,
    "wire_dtype": torch.float16,
    "out_dtype": BF16,
    "needs_grad": True,
}
"""For each option, another value than DISPATCH or COMBINE has."""


def variants() -> list[Any]:
    """(id, fields of a call, fields of the same call with one thing changed, the name of what was changed)."""
    dispatch, combine = dispatch_fields(7, dispatch_kind()), combine_fields(7, COMBINE)
    found: list[tuple[str, Fields, Fields, str]] = []
    for each in fields(DispatchOptions):
        changed = replace(DISPATCH, **{each.name: OTHER_VALUES[each.name]})
        found.append((f"dispatch {each.name}", dispatch, dispatch_fields(7, dispatch_kind(changed)), each.name))
    for each in fields(CombineOptions):
        other = "reduce_scatter" if each.name == "strategy" else OTHER_VALUES[each.name]
        changed = replace(COMBINE, **{each.name: other})
        name = "y.requires_grad" if each.name == "needs_grad" else each.name
        found.append((f"combine {each.name}", combine, combine_fields(7, changed), name))
    per_route = replace(COMBINE, strategy="all_to_all")
    found.append(("combine mode", combine, combine_fields(7, per_route), "mode"))
    for what, changed_kind in {
        "x.dtype": dispatch_kind(x_dtype=FP32),
        "topk_weights.dtype": dispatch_kind(weights_dtype=None),
        "x.requires_grad": dispatch_kind(x_needs_grad=True),
        "topk_weights.requires_grad": dispatch_kind(weights_need_grad=True),
    }.items():
        found.append((f"dispatch {what}", dispatch, dispatch_fields(7, changed_kind), what))
    found.append(("dispatch number", dispatch, dispatch_fields(8, dispatch_kind()), "dispatch number"))
    found.append(("combine number", combine, combine_fields(1 << 40, COMBINE), "dispatch number"))
    found.append(("call", dispatch, combine, "call"))
    found.append(("gradient", combine, gradient_fields(7, "gradient of weights"), "call"))
    return [pytest.param(*each, id=name) for name, *each in found]


@pytest.mark.parametrize(("ours", "theirs", "name"), variants())
def test_every_field_counts(ours: Fields, theirs: Fields, name: str) -> None:
    """Another value of any option changes the hash, and the error names that option and both values."""
    assert 0 <= hash_of(ours) < 2**63, "an int64 holds it, on the wire and in a kernel's header"
    assert hash_of(ours) == hash_of(dict(ours))
    assert hash_of(ours) != hash_of(theirs)
    with pytest.raises(tl.PlanMismatch) as raised:
        raise_difference([text_of(ours), text_of(ours), text_of(theirs)])
    assert (raised.value.rank, raised.value.field) == (2, name)
    assert f"{name}={text_of(theirs).get(name)}, rank 0 has {name}={text_of(ours).get(name)}" in str(raised.value)


@pytest.mark.parametrize(
    "fields_of", [lambda number: dispatch_fields(number, dispatch_kind()), lambda number: {"call": "MegaMoE"}]
)
def test_calls_of_one_kind(fields_of: Callable[[int], Fields]) -> None:
    """A kind that was made once gives the fields and the hash of every call, whatever number it was made with."""
    kind = CallKind(fields_of(3))
    for number in (0, 3, 4, 1 << 40):
        assert kind.fields_of(number) == fields_of(number)
    numbers = (0, 3, 4, 1 << 40) if kind.number >= 0 else (-1,)
    assert [kind.hash_of(number) for number in numbers] == [hash_of(fields_of(number)) for number in numbers]


def test_what_ranks_may_differ_in() -> None:
    """Who owns the outputs, and what began early, is each rank's own business."""
    ours = hash_of(dispatch_fields(7, dispatch_kind()))
    for options in ({"output_owner": True}, {"sent_ahead": True}):
        assert hash_of(dispatch_fields(7, dispatch_kind(**options))) == ours


def test_words_of_values() -> None:
    """As errors show them: booleans in words, dtypes as torch writes them."""
    text = text_of({"call": "dispatch", "to_fp8": True, "weighted": False, "x.dtype": BF16, "capacity": None})
    assert text == {
        "call": "dispatch",
        "to_fp8": "yes",
        "weighted": "no",
        "x.dtype": "torch.bfloat16",
        "capacity": "None",
    }
