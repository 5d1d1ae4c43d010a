"""Experts with other activations, with biases, in other layouts: against single rows in float64, and differences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

import pytest
import torch

from tests.ops.test_activation import FORMS as ACTIVATION_FORMS
from tests.ops.test_activation import exactly
from tokenloom import Activation, InvalidArgument, ShapeMismatch, WeightLayout
from tokenloom.errors import DeviceMismatch, DtypeMismatch, TokenloomError
from tokenloom.ops import expert_gemms
from tokenloom.ops.activation import Between
from tokenloom.ops.experts import run_experts

ACTIVATIONS = {name: Activation.of(form[0]) for name, form in ACTIVATION_FORMS.items() if "," not in name}
LAYOUTS = {
    "plain": WeightLayout(),
    "transposed": WeightLayout(transposed=True),
    "interleaved": WeightLayout(interleaved=True),
    "both": WeightLayout(transposed=True, interleaved=True),
}
IN_ALL_LAYOUTS = ("swiglu", "swigluoai", "relu2")
"""An activation never sees whether weights are transposed."""
FORMS = {
    f"{activation}, {'biases' if biased else 'no bias'}, {layout}": (ACTIVATIONS[activation], biased, LAYOUTS[layout])
    for activation, biased, layout in product(ACTIVATIONS, (False, True), LAYOUTS)
    if ACTIVATIONS[activation].gated or not LAYOUTS[layout].interleaved
    if activation in IN_ALL_LAYOUTS or not LAYOUTS[layout].transposed
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of results near 1: a few roundings of the dtype (bfloat16: 2^-9 each), in the gates, the product and the sum."""


@dataclass(frozen=True)
class Given:
    """Rows of some experts in a form; leaves that want gradients, by name."""

    counts: Sequence[int]
    offsets: torch.Tensor
    leaves: dict[str, torch.Tensor]
    options: dict[str, Any]

    def run(self, leaves: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
        rows, w1, w2, weights = (leaves[name] for name in ("rows", "w1", "w2", "weights"))
        biases = {name: leaves[name] for name in ("w1_bias", "w2_bias") if name in leaves}
        return run_experts(rows, self.offsets, w1, w2, weights, **biases, **self.options, **more)


def make(
    form: str,
    dtype: torch.dtype,
    hidden: int,
    width: int,
    device: str = "cpu",
    beyond: int = 0,
    counts: Sequence[int] = (3, 0, 4),
) -> Given:
    activation, biased, layout = FORMS[form]
    generator, num_experts = torch.Generator().manual_seed(hidden), len(counts)
    used, columns = sum(counts), activation.rows * width

    def leaf(*shape: int, transposed: bool = False) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        values = values / (shape[-1] ** 0.5 if len(shape) == 3 else 1.0)
        values = values.transpose(1, 2).contiguous() if transposed else values
        return values.to(device, dtype).requires_grad_()

    leaves = {
        "rows": leaf(used + beyond, hidden),
        "w1": leaf(num_experts, columns, hidden, transposed=layout.transposed),
        "w2": leaf(num_experts, hidden, width, transposed=layout.transposed),
        "weights": torch.randn(used + beyond, generator=generator).double(),
    }
    if biased:
        leaves |= {"w1_bias": leaf(num_experts, columns), "w2_bias": leaf(num_experts, hidden)}
    wide = torch.promote_types(dtype, torch.float32)
    leaves["weights"] = leaves["weights"].to(device, wide).requires_grad_()
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    return Given(counts, offsets, leaves, {"activation": activation, "weight_layout": layout})


def naive(given: Given, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    """Row by row in float64; the weight comes last."""
    activation, layout = given.options["activation"], given.options["weight_layout"]
    between, one = Between(activation, layout.interleaved), torch.ones(1, dtype=torch.float64)
    out = []
    for expert, count in enumerate(given.counts):
        w1, w2 = leaves["w1"][expert], leaves["w2"][expert]
        w1, w2 = (w1.T, w2.T) if layout.transposed else (w1, w2)
        for _ in range(count):
            hidden = w1 @ leaves["rows"][len(out)]
            hidden = hidden + leaves["w1_bias"][expert] if "w1_bias" in leaves else hidden
            a = exactly(between, hidden[None], one, [])[0]
            y = w2 @ a + leaves["w2_bias"][expert] if "w2_bias" in leaves else w2 @ a
            out.append(leaves["weights"][len(out)] * y)
    return torch.stack(out) if out else leaves["rows"] * sum(leaf.sum() for leaf in leaves.values())


def check(given: Given, grad: torch.Tensor | None = None) -> None:
    """Outputs and all gradients against the naive loop on the same values.

    Args:
        grad: of outputs, or None for a random one.
    """
    used, dtype = sum(given.counts), given.leaves["rows"].dtype
    exact = {name: leaf.detach().double().cpu().requires_grad_() for name, leaf in given.leaves.items()}
    wanted = naive(given, exact)
    y = given.run(given.leaves)
    assert y.dtype == dtype
    assert y.shape == given.leaves["rows"].shape
    if grad is None:
        grad = torch.zeros_like(y)
        grad[:used] = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(y)
    factors = grad[:used].double().cpu()
    wanted_grads = dict(zip(exact, torch.autograd.grad((wanted * factors).sum(), list(exact.values())), strict=True))
    grads = dict(zip(given.leaves, torch.autograd.grad(y, list(given.leaves.values()), grad), strict=True))
    found = {"y": y[:used], **grads}
    for name, want in {"y": wanted.detach(), **wanted_grads}.items():
        got = found[name].double().cpu()
        if name in ("rows", "weights"):  # beyond the last offset they are unspecified
            got, want = got[:used], want[:used]
        limit = TOLERANCE[dtype] * max(1.0, want.abs().max().item() if want.numel() else 0.0)
        torch.testing.assert_close(got, want, rtol=0, atol=limit, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_by_finite_differences(form: str) -> None:
    """Of everything that has one. Values are far from the corners of relu and of limits."""
    given = make(form, torch.float64, 3, 2)
    names = list(given.leaves)
    function = lambda *values: given.run(dict(zip(names, values, strict=True)))  # noqa: E731
    assert torch.autograd.gradcheck(function, tuple(given.leaves.values()), atol=1e-6)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", ["_GroupedGemms", "_ExpertByExpert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_single_rows(form: str, dtype: torch.dtype, path: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped and expert by expert, with NaN in rows beyond the last offset, which must touch nothing."""
    if path == "_ExpertByExpert":
        monkeypatch.setattr(expert_gemms, "_grouped_mm_takes", lambda *tensors: False)
    elif device == "cpu" or dtype == torch.bfloat16:
        monkeypatch.setattr(expert_gemms, "_ExpertByExpert", None)
    given = make(form, dtype, 16, 24, device, beyond=3)
    with torch.no_grad():
        given.leaves["rows"][sum(given.counts) :] = torch.nan
    check(given)


@pytest.mark.parametrize("form", [name for name in FORMS if name.startswith("swigluoai, biases")])
def test_float64(form: str) -> None:
    check(make(form, torch.float64, 5, 3))


@pytest.mark.parametrize("form", [name for name in FORMS if name.startswith("swiglu, biases")])
def test_gradients_lie_as_their_weights(form: str) -> None:
    """A trainer accumulates them, and torch copies a gradient of other strides."""
    given = make(form, torch.float32, 16, 24)
    names = ("w1", "w2", "w1_bias", "w2_bias")
    grads = torch.autograd.grad(given.run(given.leaves).sum(), [given.leaves[name] for name in names])
    for name, grad in zip(names, grads, strict=True):
        assert grad.stride() == given.leaves[name].stride(), name


def strided(kind: str, values: torch.Tensor) -> torch.Tensor:
    """The same weights elsewhere in memory."""
    experts, rows, columns = values.shape
    if kind == "columns first":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "experts last":
        return values.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if kind == "wider rows":
        return values.new_zeros(experts, rows, columns + 8).copy_(torch.nn.functional.pad(values, (0, 8)))[
            ..., :columns
        ]
    if kind == "odd rows":
        return values.new_zeros(experts, rows, columns + 1).copy_(torch.nn.functional.pad(values, (0, 1)))[
            ..., :columns
        ]
    return values.new_zeros(values.numel() + 1)[1:].view_as(values).copy_(values)


@pytest.mark.parametrize(
    ("kind", "grouped"),
    [
        ("columns first", True),
        ("wider rows", True),
        ("experts last", False),
        ("odd rows", False),
        ("odd start", False),
    ],
)
def test_any_strides(kind: str, grouped: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of parameters of other programs. grouped_mm takes some of them where they are; none may be wrong."""
    if grouped:
        monkeypatch.setattr(expert_gemms, "_ExpertByExpert", None)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    given = make("swiglu, biases, plain", dtype, 16, 24, device)
    odd = {
        name: strided(kind, leaf.detach()).requires_grad_() if name in ("w1", "w2") else leaf
        for name, leaf in given.leaves.items()
    }
    check(Given(given.counts, given.offsets, odd, given.options))


@pytest.mark.parametrize("frozen", ["w1", "w2", "w1_bias", "w2_bias", "rows", "weights"])
def test_gradients_that_nobody_wants(frozen: str, device: str) -> None:
    """They are not computed; the others are what they would have been."""
    given = make("swigluoai, biases, both", torch.float32, 16, 24, device)

    def grads(leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wanted = [name for name, leaf in leaves.items() if leaf.requires_grad]
        out = given.run(leaves).square().sum()
        return dict(zip(wanted, torch.autograd.grad(out, [leaves[name] for name in wanted]), strict=True))

    full = grads(given.leaves)
    for name, grad in grads({**given.leaves, frozen: given.leaves[frozen].detach()}).items():
        torch.testing.assert_close(grad, full[name])


def test_autocast_casts_biases() -> None:
    given = make("swiglu, biases, both", torch.float32, 16, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y = given.run(given.leaves)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in given.leaves.values())


WRONG: dict[str, tuple[dict[str, Any], type[TokenloomError], str]] = {
    "w1 of no gates": ({"w1": (3, 24, 16)}, ShapeMismatch, "w1 is [3, 24, 16], expected [3, 48, 16]"),
    "w1 of other experts": ({"w1": (2, 48, 16)}, ShapeMismatch, "w1 is [2, 48, 16], expected [3, 48, 16]"),
    "w2 not as said": ({"w2": (3, 24, 16)}, ShapeMismatch, "w1 is [3, 48, 16], expected [3, 32, 16]"),
    "w2 of two dimensions": ({"w2": (16, 24)}, ShapeMismatch, "w2 is [16, 24], expected three dimensions"),
    "bias of w1": ({"w1_bias": (3, 24)}, ShapeMismatch, "w1_bias is [3, 24], expected [3, 48]"),
    "bias of w2": ({"w2_bias": (3, 24)}, ShapeMismatch, "w2_bias is [3, 24], expected [3, 16]"),
    "dtype of w2": ({"w2": torch.float64}, DtypeMismatch, "w2 is torch.float64, w1 is torch.float32"),
    "device of w2": ({"w2": torch.device("meta")}, DeviceMismatch, "w2 is on meta, w1 is on cpu"),
    "dtype of a bias": ({"w2_bias": torch.bfloat16}, DtypeMismatch, "w2_bias is torch.bfloat16, w1 is"),
    "interleaved without gates": (
        {"activation": "relu2", "weight_layout": WeightLayout(interleaved=True)},
        InvalidArgument,
        "interleaved weights have gates and ups, but the activation is not gated",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit(what: str) -> None:
    changes, error, said = WRONG[what]
    given = make("swiglu, biases, plain", torch.float32, 16, 24)
    leaves, options = dict(given.leaves), dict(given.options)
    for name, change in changes.items():
        if isinstance(change, torch.dtype | torch.device):
            leaves[name] = leaves[name].to(change)
        elif isinstance(change, tuple):
            leaves[name] = torch.zeros(change)
        else:
            options[name] = change
    with pytest.raises(error, match=re.escape(said)):
        Given(given.counts, given.offsets, leaves, options).run(leaves)


def test_offsets_of_64_bits_are_refused() -> None:
    """Kernels would read their halves as offsets."""
    given = make("swiglu, biases, plain", torch.float32, 16, 24)
    with pytest.raises(DtypeMismatch, match=re.escape("expert_offsets is torch.int64, expected torch.int32")):
        replace(given, offsets=given.offsets.long()).run(given.leaves)
