"""Kernels of activations and of biases by themselves, on a GPU or without one, against float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tests.kernels.one_gpu import DEVICE, make_kernel, needs_one_gpu, run
from tests.ops.test_activation import FORMS, TOLERANCE, make_case, near_exact
from tokenloom.kernels.activation.launch import point, variant_for
from tokenloom.kernels.bias import launch as bias_launch

pytestmark = needs_one_gpu
EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COUNTS = [9, 0, 0, 20, 1, 0]
"""Rows of each expert: none between, none at the end, and more warps than rows."""
MARK = 7.0


def check(form: str, dtype: torch.dtype, width: int) -> None:
    between, hidden, weights, grad, offsets = make_case(form, dtype, width, COUNTS, beyond=5)
    activation, interleaved, bias = between
    used = sum(COUNTS)
    moved = [tensor.to(DEVICE) for tensor in (hidden, weights, offsets, grad)]
    hidden_there, weights_there, offsets_there, grad_there = moved
    bias = None if bias is None else bias.to(DEVICE)
    results = {}
    for direction in ("forward", "backward"):
        kernel = make_kernel(variant_for(direction, hidden, activation, interleaved, bias is not None).spec())
        activations = torch.full_like(grad_there, MARK)
        point(kernel.args, hidden_there, weights_there, offsets_there, activation, bias, activations)
        results[direction] = activations
        if direction == "backward":
            grad_hidden, grad_weights = torch.full_like(hidden_there, MARK), torch.full_like(weights_there, MARK)
            kernel.args.grad = grad_there.data_ptr()
            kernel.args.grad_hidden, kernel.args.grad_weights = grad_hidden.data_ptr(), grad_weights.data_ptr()
        run(kernel, 1)
    assert torch.equal(results["forward"][:used], results["backward"][:used])
    near_exact(between, COUNTS, (hidden, weights, grad), (results["forward"], grad_hidden, grad_weights))
    for written in (*results.values(), grad_hidden, grad_weights):
        assert bool((written[used:] == MARK).all()), "rows that are not there were written"


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    check(form, BF16, 264)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("form", ["swiglu", "swigluoai, interleaved, biased", "relu2, biased"])
@pytest.mark.parametrize("width", [8, 24, 1536])
def test_dtypes_and_widths(dtype: torch.dtype, form: str, width: int) -> None:
    """Units of four and of eight values, rows shorter than a warp's loads, several tiles."""
    check(form, dtype, width)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("width", [8, 24, 264, 2880])
def test_bias_of_the_second_product(dtype: torch.dtype, width: int) -> None:
    """Added to rows, times their weights; its dot products added to sums. Rows that are not there stay as they are."""
    generator, used = torch.Generator().manual_seed(width), sum(COUNTS)
    rows = torch.randn(used + 5, width, generator=generator).to(dtype)
    bias = torch.randn(len(COUNTS), width, generator=generator).to(dtype)
    weights = torch.rand(used + 5, generator=generator)
    offsets = torch.tensor([0, *accumulate(COUNTS)], dtype=torch.int32)
    bias_of_row = bias.double().repeat_interleave(torch.tensor(COUNTS), 0)
    added, totals = rows.clone().to(DEVICE), weights.clone().to(DEVICE)
    given, there = rows.to(DEVICE), (weights.to(DEVICE), offsets.to(DEVICE), bias.to(DEVICE))
    for name, of_rows, numbers in (("add_bias", added, there[0]), ("dot_bias", given, totals)):
        kernel = make_kernel(bias_launch.BiasVariant(name, dtype, width).spec())
        bias_launch.point(kernel.args, of_rows, numbers, *there[1:])
        run(kernel, 1)
    wanted = rows[:used].double() + weights[:used, None].double() * bias_of_row
    torch.testing.assert_close(added[:used].cpu().double(), wanted, rtol=TOLERANCE[dtype], atol=1e-5)
    wanted_totals = weights[:used] + (rows[:used].double() * bias_of_row).sum(1)
    torch.testing.assert_close(totals[:used].cpu().double(), wanted_totals, rtol=1e-5, atol=1e-4)
    assert torch.equal(added[used:].cpu(), rows[used:])
    assert torch.equal(totals[used:].cpu(), weights[used:])
