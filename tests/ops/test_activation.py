"""Activations and gradients, in torch and by the kernels, against float64; rows that are not there stay unread."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from tests.conftest import WHY_NO_HOPPER
from tokenloom import Activation, InvalidArgument
from tokenloom.ops.activation import Between, activate, activate_backward, apply_activation
from tokenloom.plan import ACTIVATIONS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2**-8, FP16: 2**-10, FP32: 4e-6, torch.float64: 1e-13}
"""Of the result and of its largest value: one rounding, and float32 inside."""
WIDTHS = (8, 24, 96, 264, 1536, 2048)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NO_HOPPER), reason=str(WHY_NO_HOPPER))]),
]


NAMES = ("swiglu", "geglu", "geglu_tanh", "reglu", "swigluoai", "silu", "gelu", "gelu_tanh", "relu", "relu2")
FORMS: dict[str, tuple[str | Activation, bool, bool]] = {
    **{name: (name, False, False) for name in NAMES},
    **{f"{name}, biased": (name, False, True) for name in NAMES},
    **{f"{name}, interleaved": (name, True, False) for name in NAMES[:5]},
    "swigluoai, interleaved, biased": ("swigluoai", True, True),  # gpt_oss
    "clamped swiglu": (Activation(limit=3.0), False, False),
    "clamped geglu, interleaved, biased": (Activation("gelu", limit=2.5, up_offset=-0.5), True, True),
    "quick gelu": (Activation(alpha=1.702, gated=False), False, False),
    "gated relu2": (Activation("relu2"), False, True),
}
"""Activation, interleaved, biased."""


def make_case(
    form: str, dtype: torch.dtype, width: int, counts: list[int], beyond: int
) -> tuple[Between, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What to compute; rows, weights and gradients, of them ``beyond`` that are not there; offsets."""
    name, interleaved, biased = FORMS[form]
    activation = Activation.of(name)
    generator = torch.Generator().manual_seed(width)
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    rows, used, columns = sum(counts) + beyond, sum(counts), activation.rows * width
    hidden = (torch.randn(rows, columns, generator=generator) * 4).to(dtype)
    hidden[0, 0], hidden[1, 0] = 88.0, -88.0  # where exponentials leave float32
    weights, grad = torch.rand(rows, generator=generator), torch.randn(rows, width, generator=generator).to(dtype)
    hidden[used:], grad[used:], weights[used:] = torch.nan, torch.nan, torch.nan
    bias = torch.randn(len(counts), columns, generator=generator).to(dtype) if biased else None
    return Between(activation, interleaved, bias), hidden, weights, grad, offsets


def exactly(between: Between, hidden: torch.Tensor, weights: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The activations in float64, by torch's own functions and in the plain order, differentiable."""
    activation, interleaved, bias = between
    if bias is not None:
        hidden = hidden + bias.double().cpu().repeat_interleave(torch.tensor(counts), 0)
    function: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": lambda x: x / (1 + torch.exp(-activation.alpha * x)),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.nn.functional.relu,
        "relu2": lambda x: torch.nn.functional.relu(x) ** 2,
    }
    f = function[activation.function]
    if not activation.gated:
        return weights[:, None] * f(hidden)
    gate, up = (hidden[:, part::2] for part in (0, 1)) if interleaved else hidden.chunk(2, -1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return weights[:, None] * f(gate) * (up + activation.up_offset)


def near_exact(
    between: Between, counts: list[int], given: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...]
) -> None:
    """Compare activations and the gradients of hidden and weights, ``found``, with float64.

    ``given`` is hidden, weights and the gradient of the activations, all on the CPU.
    """
    hidden, weights, grad = (tensor[: sum(counts)].double() for tensor in given)
    hidden.requires_grad_()
    weights.requires_grad_()
    exact = exactly(between, hidden, weights, counts)
    exact.backward(grad)
    dtypes = (given[0].dtype, given[0].dtype, torch.float32)
    floors = (1e-2 if between.activation.up_offset else 1e-3, 1e-1, 10.0)
    """Of the largest value: up + 1 cancels; so do slopes where a function has its minimum, and terms of sums."""
    wanted_all = (exact.detach(), hidden.grad, weights.grad)
    for got, wanted, dtype, floor in zip(found, wanted_all, dtypes, floors, strict=True):
        assert wanted is not None
        assert got.dtype == dtype
        limit = TOLERANCE[dtype] * (wanted.abs() + floor * wanted.abs().max())
        assert bool(((got[: sum(counts)].cpu().double() - wanted).abs() <= limit).all())


def check(form: str, device: str, dtype: torch.dtype, width: int) -> None:
    counts = [40, 0, 43]
    between, hidden, weights, grad, offsets = make_case(form, dtype, width, counts, beyond=17)
    used = sum(counts)
    given = [tensor.to(device) for tensor in (hidden, weights, offsets)]
    there = between._replace(bias=None if between.bias is None else between.bias.to(device))
    activations = activate(*given, there)
    again, grad_hidden, grad_weights = activate_backward(*given, grad.to(device), there)
    assert torch.equal(again[:used], activations[:used])
    near_exact(between, counts, (hidden, weights, grad), (activations, grad_hidden, grad_weights))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_values_and_gradients(device: str, dtype: torch.dtype, width: int) -> None:
    check("swiglu", device, dtype, width)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("form", list(FORMS)[1:])
def test_forms(device: str, dtype: torch.dtype, form: str) -> None:
    check(form, device, dtype, 264)


@pytest.mark.parametrize("form", FORMS)
def test_the_module_form(form: str) -> None:
    """What the shared expert computes: the same function, by torch's autograd."""
    between, hidden, *_ = make_case(form, torch.float64, 24, [5, 3], beyond=0)
    found = apply_activation(hidden, between.activation, between.interleaved)
    wanted = exactly(between._replace(bias=None), hidden, torch.ones(8, dtype=torch.float64), [])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_at_the_limit_gradients_pass() -> None:
    """As torch's clamp has it: a value of exactly the limit is not limited."""
    hidden = torch.tensor([[2.0, 3.0, 2.5, -2.5, 2.0, -2.0]])  # gates, then ups
    one, offsets = torch.ones(1), torch.tensor([0, 1], dtype=torch.int32)
    between = Between(Activation("relu", limit=2.0))
    _, grad, _ = activate_backward(hidden, one, offsets, torch.ones(1, 3), between)
    assert grad.tolist() == [[-2.0, 0.0, 0.0, 0.0, 2.0, 2.0]]


def test_nan_comes_through() -> None:
    """Neither a limit nor relu may hide the NaN of a token that was lost."""
    one, offsets = torch.ones(1), torch.tensor([0, 1], dtype=torch.int32)
    for name in NAMES:
        activation = Activation.of(name)
        hidden = torch.full((1, activation.rows), torch.nan)
        assert activate(hidden, one, offsets, Between(activation)).isnan().all(), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"function": "tanh"}, "function is 'tanh', expected one of silu"),
        ({"function": "gelu", "alpha": 1.702}, "alpha is 1.702, which only 'silu' has"),
        ({"gated": False, "limit": 7.0}, "limit and up_offset are for gates and ups"),
        ({"gated": False, "up_offset": 1.0}, "limit and up_offset are for gates and ups"),
        ({"gated": 1}, "gated is 1, expected True or False"),
        ({"limit": 0.0}, "limit is 0.0, expected a number above 0"),
        ({"limit": float("inf")}, "limit is inf"),
        ({"alpha": float("nan")}, "alpha is nan, expected a number"),
        ({"up_offset": None}, "up_offset is None, expected a number"),
    ],
    ids=str,
)
def test_no_such_activation(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        Activation(**options)


def test_names() -> None:
    plain = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
    for name, function in plain.items():
        assert Activation.of(name) == Activation(function, gated=True)
    for function in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        assert Activation.of(function) == Activation(function, gated=False)
    assert sorted(ACTIVATIONS) == sorted([*plain, "silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai"])
    assert Activation.of("swigluoai") == Activation(limit=7.0, alpha=1.702, up_offset=1.0)
    assert Activation.of(Activation("relu")) == Activation.of("reglu")
    with pytest.raises(InvalidArgument, match=r"activation is 'swish', expected an Activation or one of swiglu"):
        Activation.of("swish")


@pytest.mark.gpu
@pytest.mark.skipif(bool(WHY_NO_HOPPER), reason=str(WHY_NO_HOPPER))
def test_rows_that_are_not_there_are_not_written() -> None:
    hidden, weights = torch.randn(64, 64, device="cuda").to(BF16), torch.rand(64, device="cuda")
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    _, _, grad_weights = activate_backward(hidden, weights, none, torch.randn(64, 32, device="cuda").to(BF16))
    assert not grad_weights.any()
    assert activate(hidden[:0], weights[:0], none).shape == (0, 32)
