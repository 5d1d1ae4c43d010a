"""SwiGLU and its gradients, in torch and by the kernels, against float64; rows that are not there stay unread."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import WHY_NO_HOPPER
from tokenloom.ops.activation import activate, activate_backward

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2**-8, FP16: 2**-10, FP32: 4e-6, torch.float64: 1e-13}
"""Of the result and of its largest value: one rounding, and float32 inside."""
WIDTHS = (8, 24, 96, 264, 1536, 2048)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NO_HOPPER), reason=str(WHY_NO_HOPPER))]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_values_and_gradients(device: str, dtype: torch.dtype, width: int) -> None:
    rows, used = 100, 83
    generator = torch.Generator().manual_seed(width)
    hidden = (torch.randn(rows, 2 * width, generator=generator) * 4).to(dtype)
    hidden[0, 0], hidden[1, 0] = 88.0, -88.0  # where exponentials leave float32
    weights, grad = torch.rand(rows, generator=generator), torch.randn(rows, width, generator=generator).to(dtype)
    hidden[used:], grad[used:], weights[used:] = torch.nan, torch.nan, torch.nan
    num_rows = torch.tensor([used], dtype=torch.int32, device=device)
    given = [tensor.to(device) for tensor in (hidden, weights)]
    activations = activate(*given, num_rows)
    again, grad_hidden, grad_weights = activate_backward(*given, num_rows, grad.to(device))
    assert torch.equal(again[:used], activations[:used])

    exact_hidden = hidden[:used].double().requires_grad_()
    exact_weights = weights[:used].double().requires_grad_()
    gate, up = exact_hidden.chunk(2, -1)
    exact = exact_weights[:, None] * torch.nn.functional.silu(gate) * up
    exact.backward(grad[:used].double())
    for found, wanted, floor in (
        (activations, exact.detach(), 1e-3),
        (grad_hidden, exact_hidden.grad, 1e-3),
        (grad_weights, exact_weights.grad, 10.0),  # sums, whose terms cancel
    ):
        assert wanted is not None
        limit = TOLERANCE[found.dtype] * (wanted.abs() + floor * wanted.abs().max())
        assert bool(((found[:used].cpu().double() - wanted).abs() <= limit).all())


@pytest.mark.gpu
@pytest.mark.skipif(bool(WHY_NO_HOPPER), reason=str(WHY_NO_HOPPER))
def test_rows_that_are_not_there_are_not_written() -> None:
    hidden, weights = torch.randn(64, 64, device="cuda").to(BF16), torch.rand(64, device="cuda")
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    _, _, grad_weights = activate_backward(hidden, weights, none, torch.randn(64, 32, device="cuda").to(BF16))
    assert not grad_weights.any()
    assert activate(hidden[:0], weights[:0], none).shape == (0, 32)
