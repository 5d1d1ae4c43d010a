"""Experts: the grouped path and the loop path against a loop over single rows in float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tokenloom.ops import expert_gemms
from tokenloom.ops.activation import apply_activation
from tokenloom.ops.experts import run_experts

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

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Of results near 1: a few roundings of the dtype (bfloat16: 2^-9 each), in the gates, the product and the sum."""


def make_case(
    dtype: torch.dtype, hidden: int, intermediate: int, counts: list[int], device: str, beyond: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows (``beyond`` of them after the last offset), offsets, w1, w2, all requiring grad; outputs are near 1."""
    generator = torch.Generator().manual_seed(sum(counts) + hidden)

    def leaf(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) / max(1, shape[-1] if len(shape) == 3 else 1) ** 0.5
        return values.to(dtype).to(device).requires_grad_()

    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    w1, w2 = leaf(len(counts), 2 * intermediate, hidden), leaf(len(counts), hidden, intermediate)
    return leaf(sum(counts) + beyond, hidden), offsets, w1, w2


def naive(rows: torch.Tensor, counts: list[int], w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Row by row in float64, on the CPU, with silu written out."""
    rows, w1, w2 = (tensor.double().cpu() for tensor in (rows, w1, w2))
    width = w2.shape[2]
    out = []
    for expert, count in enumerate(counts):
        for _ in range(count):
            row = rows[len(out)]
            gate, up = w1[expert, :width] @ row, w1[expert, width:] @ row
            out.append(w2[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    return torch.stack(out) if out else rows[:0] * (w1.sum() + w2.sum())


def check(rows: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, counts: list[int]) -> None:
    """Outputs and all three gradients against the naive loop on the same values."""
    used = sum(counts)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (rows, w1, w2)]
    wanted = naive(exact[0], counts, exact[1], exact[2])
    factors = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factors = factors.to(rows.dtype).double()
    wanted_grads = torch.autograd.grad((wanted * factors).sum(), exact)

    y = run_experts(rows, offsets, w1, w2)
    assert y.dtype == rows.dtype
    assert y.shape == rows.shape
    grad = torch.zeros_like(y)
    grad[:used] = factors.to(y)
    grads = torch.autograd.grad(y, (rows, w1, w2), grad)
    tolerance = TOLERANCE[rows.dtype]
    torch.testing.assert_close(y[:used].double().cpu(), wanted, rtol=tolerance, atol=tolerance)
    for got, want, name in zip(grads, wanted_grads, ("rows", "w1", "w2"), strict=True):
        got = got.double().cpu()
        if name == "rows":  # beyond the last offset they are as unspecified as the outputs
            got, want = got[:used], want[:used]
        scale = max(1.0, want.abs().max().item() if want.numel() else 0.0)
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def forbid(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"{path} was not to be used here")

    monkeypatch.setattr(expert_gemms, path, refuse)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", GROUPED, ids=str)
def test_grouped_path(dtype: torch.dtype, counts: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu" or dtype == torch.bfloat16:  # on GPUs grouped_mm is for bfloat16
        forbid(monkeypatch, "_ExpertByExpert")
    check(*make_case(dtype, *GROUPED[dtype], counts, device), counts)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, *GROUPED], ids=str)
def test_loop_path(dtype: torch.dtype, counts: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 takes it by itself; the others are made to, so that both paths are compared on the same cases."""
    forbid(monkeypatch, "_GroupedGemms")
    if dtype != torch.float64:
        monkeypatch.setattr(expert_gemms, "_grouped_mm_takes", lambda *tensors: False)
    check(*make_case(dtype, *GROUPED.get(dtype, (8, 12)), counts, device), counts)


@pytest.mark.parametrize(("dtype", "hidden", "intermediate"), ODD_WIDTHS, ids=str)
def test_widths_that_are_no_multiple_of_16_bytes(
    dtype: torch.dtype, hidden: int, intermediate: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grouped_mm refuses their strides, forward or backward."""
    forbid(monkeypatch, "_GroupedGemms")
    check(*make_case(dtype, hidden, intermediate, [2, 0, 3], device), [2, 0, 3])


@pytest.mark.parametrize("path", ["_GroupedGemms", "_ExpertByExpert"])
def test_rows_beyond_the_last_offset_touch_nothing(path: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of bounded size end in unspecified rows: NaN there must reach no output, nor any weight's gradient."""
    if path == "_ExpertByExpert":
        monkeypatch.setattr(expert_gemms, "_grouped_mm_takes", lambda *tensors: False)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    counts = [2, 0, 3]
    rows, offsets, w1, w2 = make_case(dtype, *GROUPED[dtype], counts, device, beyond=4)
    with torch.no_grad():
        rows[5:] = torch.nan
    check(rows, offsets, w1, w2, counts)


@pytest.mark.parametrize("dtype", GROUPED, ids=str)
def test_expanded_gradients(dtype: torch.dtype, device: str) -> None:
    """``sum()`` gives a gradient of stride 0, which grouped_mm's own backward refuses."""
    counts = [2, 1, 0]
    tensors = make_case(dtype, *GROUPED[dtype], counts, device)
    rows, offsets, w1, w2 = tensors
    run_experts(rows, offsets, w1, w2).sum().backward()
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (rows, w1, w2)]
    naive(exact[0], counts, exact[1], exact[2]).sum().backward()
    for got, want in zip((rows, w1, w2), exact, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        tolerance = TOLERANCE[dtype] * max(1.0, want.grad.abs().max().item())
        torch.testing.assert_close(got.grad.double().cpu(), want.grad, rtol=TOLERANCE[dtype], atol=tolerance)


def test_gradients_by_finite_differences() -> None:
    """The naive loop shares autograd with the code; differences of outputs do not."""
    rows, offsets, w1, w2 = make_case(torch.float64, 3, 2, [2, 0, 1], "cpu")
    assert torch.autograd.gradcheck(lambda *values: run_experts(values[0], offsets, *values[1:]), (rows, w1, w2))


def test_gradients_of_weights_by_finite_differences() -> None:
    """Of rows that are weighted before the second GEMM, the weights' too; an empty expert, a row of weight 0."""
    rows, offsets, w1, w2 = make_case(torch.float64, 3, 2, [2, 0, 2], "cpu")
    weights = torch.tensor([0.5, -1.25, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, a, b, w: run_experts(r, offsets, a, b, w), (rows, w1, w2, weights))
    scaled = run_experts(rows, offsets, w1, w2) * weights[:, None]
    torch.testing.assert_close(run_experts(rows, offsets, w1, w2, weights), scaled)


@pytest.mark.parametrize("frozen", ["rows", "w1", "w2", "weights"])
def test_gradients_that_nobody_wants(frozen: str, device: str) -> None:
    """They are not computed; the others are what they would have been."""
    rows, offsets, w1, w2 = make_case(torch.float32, 8, 12, [3, 0, 2], device)
    weights = torch.rand(5, device=device, requires_grad=True)
    tensors = {"rows": rows, "w1": w1, "w2": w2, "weights": weights}

    def grads(wanted: list[str]) -> dict[str, torch.Tensor]:
        out = run_experts(tensors["rows"], offsets, tensors["w1"], tensors["w2"], tensors["weights"])
        return dict(
            zip(wanted, torch.autograd.grad(out.square().sum(), [tensors[name] for name in wanted]), strict=True)
        )

    full = grads(list(tensors))
    tensors[frozen] = tensors[frozen].detach()
    for name, grad in grads([name for name in tensors if name != frozen]).items():
        torch.testing.assert_close(grad, full[name])


def test_gate_comes_first() -> None:
    """The layout of checkpoints: silu belongs to rows [0, I). silu(0) * 5 is 0, silu(5) * 0 would be 0 as well."""
    torch.testing.assert_close(apply_activation(torch.tensor([[0.0, 5.0]])), torch.tensor([[0.0]]))
    big = torch.tensor([[30.0, -2.0]])  # silu(30) is 30 in float32; silu(-2) * 30 would be near -7
    torch.testing.assert_close(apply_activation(big), torch.tensor([[-60.0]]))
