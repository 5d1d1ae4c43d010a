"""Experts: the grouped path and the loop path against a loop over single rows in float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_expert_forms import check, make
from tokenloom.ops import expert_gemms
from tokenloom.ops.activation import apply_activation
from tokenloom.ops.experts import run_experts

FORM = "swiglu, no bias, plain"
COUNTS = {
    "even": [3, 3, 3],
    "an_empty_expert_first_between_and_last": [0, 2, 0, 5, 0],
    "one_expert": [6],
    "all_rows_on_the_last": [0, 0, 7],
    "no_rows": [0, 0],
}
GROUPED = {torch.float32: (8, 12), torch.bfloat16: (16, 24), torch.float16: (8, 16)}
"""(H, I) that grouped_mm takes: rows of H, 2I and I values are multiples of 16 bytes."""
ODD_WIDTHS = [(torch.float32, 7, 5), (torch.float32, 8, 3), (torch.float32, 5, 8), (torch.bfloat16, 8, 12)]
"""At least one row that is not a multiple of 16 bytes: hidden, intermediate or both."""


def forbid(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"{path} was not to be used here")

    monkeypatch.setattr(expert_gemms, path, refuse)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", GROUPED, ids=str)
def test_grouped_path(dtype: torch.dtype, counts: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu" or dtype == torch.bfloat16:  # on GPUs grouped_mm is for bfloat16
        forbid(monkeypatch, "_ExpertByExpert")
    check(make(FORM, dtype, *GROUPED[dtype], device, counts=counts))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, *GROUPED], ids=str)
def test_loop_path(dtype: torch.dtype, counts: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 takes it by itself; the others are made to, so that both paths are compared on the same cases."""
    forbid(monkeypatch, "_GroupedGemms")
    if dtype != torch.float64:
        monkeypatch.setattr(expert_gemms, "_grouped_mm_takes", lambda *tensors: False)
    check(make(FORM, dtype, *GROUPED.get(dtype, (8, 12)), device, counts=counts))


@pytest.mark.parametrize(("dtype", "hidden", "intermediate"), ODD_WIDTHS, ids=str)
def test_widths_that_are_no_multiple_of_16_bytes(
    dtype: torch.dtype, hidden: int, intermediate: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grouped_mm refuses their strides, forward or backward."""
    forbid(monkeypatch, "_GroupedGemms")
    check(make(FORM, dtype, hidden, intermediate, device))


@pytest.mark.parametrize("dtype", GROUPED, ids=str)
def test_expanded_gradients(dtype: torch.dtype, device: str) -> None:
    """``sum()`` gives a gradient of stride 0, which grouped_mm's own backward refuses."""
    given = make(FORM, dtype, *GROUPED[dtype], device, counts=[2, 1, 0])
    check(given, torch.ones((), dtype=dtype, device=device).expand_as(given.leaves["rows"]))


def test_a_weight_of_zero() -> None:
    """Its gradient is what the row would be without it: no quotient by the weight. Without weights they are ones."""
    given = make(FORM, torch.float64, 3, 2)
    with torch.no_grad():
        given.leaves["weights"][2] = 0.0
    names = list(given.leaves)
    assert torch.autograd.gradcheck(
        lambda *values: given.run(dict(zip(names, values, strict=True))), tuple(given.leaves.values())
    )
    rows, w1, w2, weights = given.leaves.values()
    scaled = run_experts(rows, given.offsets, w1, w2) * weights[:, None]
    torch.testing.assert_close(given.run(given.leaves), scaled)


def test_gate_comes_first() -> None:
    """The layout of checkpoints: silu belongs to rows [0, I). silu(0) * 5 is 0, silu(5) * 0 would be 0 as well."""
    torch.testing.assert_close(apply_activation(torch.tensor([[0.0, 5.0]])), torch.tensor([[0.0]]))
    big = torch.tensor([[30.0, -2.0]])  # silu(30) is 30 in float32; silu(-2) * 30 would be near -7
    torch.testing.assert_close(apply_activation(big), torch.tensor([[-60.0]]))
