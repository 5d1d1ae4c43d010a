"""Grouped products of bfloat16 by our kernels: against float64, for groups of all sizes, with poison around them."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tests.small_kernels import needs_nvrtc
from tokenloom.activation import activate
from tokenloom.errors import InvalidArgument
from tokenloom.jit import compiler
from tokenloom.jit.compiler import KernelSpec, Resources
from tokenloom.kernels.gemm16.launch import MOST_ITEMS, clusters, rows_spec, weights_spec
from tokenloom.kernels.shape import HOPPER
from tokenloom.products import OwnProducts

BF16 = torch.bfloat16
GROUPS = {
    "tails": [1, 127, 128, 129, 255, 256, 257, 64, 63, 65],
    "empty": [0, 0, 300, 0, 5, 0],
    "none": [0, 0],
    "one": [700],
    "many": [5] * 200,
    "uneven": [2500, 3, 0, 40, 900],
}
SHAPES = [(256, 64), (264, 72), (128, 256), (8, 8), (1000, 520), (512, 1536)]
"""(n, k): whole tiles and stages, tails of both, less than one."""
VARIANTS = {
    "rows": rows_spec(16, 3072, 4096, across=False),
    "rows, SwiGLU": rows_spec(16, 3072, 4096, across=False, swiglu=True),
    "rows, across": rows_spec(16, 1536, 4096, across=True),
    "weights": weights_spec(16, 3072, 4096, adds=False),
    "weights, on top": weights_spec(16, 3072, 4096, adds=True),
    "rows, tails": rows_spec(3, 72, 40, across=False),
    "rows, SwiGLU, tails": rows_spec(3, 48, 8, across=False, swiglu=True),
    "256 experts": rows_spec(256, 4096, 7168, across=True),
    "1024 experts": weights_spec(1024, 512, 256, adds=True),
}


@needs_nvrtc
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_it_compiles_without_spills(variant: tuple[KernelSpec, int]) -> None:
    spec, shared_bytes = variant
    _, log = compiler.compile_kernel(spec)
    assert "warning" not in log.lower(), log
    assert "C75" not in log, log
    needs = Resources.from_log(log)
    assert (needs.stack_bytes, needs.spill_bytes) == (0, 0), log
    assert dict(spec.shape)["shared_bytes"] == shared_bytes


def test_clusters_take_all_items() -> None:
    """However the rows are split among experts."""
    spec, swiglu, weights = (VARIANTS[name][0] for name in ("rows, across", "rows, SwiGLU", "weights"))
    assert clusters(2, 512, spec) * MOST_ITEMS >= 3 * 6  # 1 and 511 rows: 1 + 2 pairs of tiles, 6 strips
    assert clusters(2, 512, swiglu) * MOST_ITEMS >= 3 * 12
    assert clusters(16, 99999, weights) * MOST_ITEMS >= 16 * 12 * 16


def test_too_many_experts() -> None:
    with pytest.raises(InvalidArgument, match="experts on a rank leave"):
        rows_spec(40000, 256, 256, across=False)


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="no Hopper GPU"
)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values, of different size in each column, so that a wrong column shows."""
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda").to(BF16)


class Case:
    """Rows of groups, NaN behind them."""

    def __init__(self, groups: list[int], width: int, seed: int = 0) -> None:
        self.groups, self.total = groups, sum(groups)
        self.ends = list(accumulate(groups, initial=0))
        self.offsets = torch.tensor(self.ends, dtype=torch.int32, device="cuda")
        self.rows = values(self.total + 9, width, seed=seed)
        self.rows[self.total :] = torch.nan
        self.products = OwnProducts(self.offsets)

    def spans(self) -> list[slice]:
        return [slice(a, b) for a, b in zip(self.ends, self.ends[1:], strict=False)]


def close(got: torch.Tensor, want: torch.Tensor, terms: int) -> None:
    """To half a unit of bfloat16, and what float32 sums of so many terms of size 1 lose."""
    error = (got.double() - want).abs()
    limit = want.abs() * 2.0**-8 + 1e-5 * max(terms, 1) ** 0.5
    worst = (error - limit).max().item() if error.numel() else 0.0
    assert worst <= 0, f"{worst} beyond the limit, {int((error > limit).sum())} of {error.numel()} values"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN before a kernel writes them."""
    real = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *shape: int) -> torch.Tensor:
        return real(self, *shape).fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("across", [False, True], ids=["along", "across"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_rows_by_weights(groups: list[int], n: int, k: int, across: bool) -> None:
    case = Case(groups, k)
    weights = values(len(groups), k, n, seed=1) if across else values(len(groups), n, k, seed=1).transpose(1, 2)
    out = case.products.by_weights(case.rows, weights)
    assert out.shape == (case.total + 9, n)
    for e, span in enumerate(case.spans()):
        close(out[span], case.rows[span].double() @ weights[e].double(), k)
    assert out[case.total :].isnan().all(), "rows behind the last group are left alone"
    assert torch.equal(out[: case.total], case.products.by_weights(case.rows, weights)[: case.total])


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "on top"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_of_weights(groups: list[int], n: int, k: int, adds: bool) -> None:
    left, right = Case(groups, n), Case(groups, k, seed=1)
    before = values(len(groups), n, k, seed=2) if adds else None
    total = None if before is None else before.clone()
    out = left.products.of_weights(left.rows, right.rows, total)
    assert total is None or out is total
    for e, span in enumerate(left.spans()):
        want = left.rows[span].double().t() @ right.rows[span].double()
        close(out[e], want if before is None else want + before[e].double(), len(range(*span.indices(10**9))))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("intermediate", "k"), [(128, 64), (136, 72), (8, 8), (1536, 4096)])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_swiglu(groups: list[int], intermediate: int, k: int) -> None:
    """Products, and activations that are those of the kernel for SwiGLU, bit for bit."""
    case = Case(groups, k)
    w1 = values(len(groups), 2 * intermediate, k, seed=1) / k**0.5
    row_weights = torch.rand(case.total + 9, device="cuda")
    hidden, activations = case.products.swiglu(case.rows, w1, row_weights)
    for e, span in enumerate(case.spans()):
        close(hidden[span], case.rows[span].double() @ w1[e].double().t(), 25)
    want = activate(hidden, row_weights, case.offsets[-1:])
    assert torch.equal(activations[: case.total], want[: case.total])
    assert activations[case.total :].isnan().all()


@pytest.mark.gpu
@on_hopper
def test_no_rows_at_all() -> None:
    """Not even memory for one."""
    products = OwnProducts(torch.zeros(3, dtype=torch.int32, device="cuda"))
    nothing = values(0, 64)
    assert products.by_weights(nothing, values(2, 64, 128)).shape == (0, 128)
    assert [each.shape for each in products.swiglu(nothing, values(2, 64, 64), torch.zeros(0))] == [(0, 64), (0, 32)]
    assert products.of_weights(nothing, nothing).eq(0).all()
    total = values(2, 64, 64)
    assert torch.equal(products.of_weights(nothing, nothing, total.clone()), total)


@pytest.mark.gpu
@on_hopper
def test_products_side_by_side() -> None:
    """Two kernels at once, each of which finds some SMs taken: the same bits."""
    first, second = Case([4000, 100, 3000], 1024), Case([2000] * 4, 512, seed=3)
    weights = [values(3, 1024, 1024), values(4, 512, 768)]
    want = [first.products.by_weights(first.rows, weights[0]), second.products.by_weights(second.rows, weights[1])]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, case, each in zip(streams, (first, second), weights, strict=True):
            with torch.cuda.stream(stream):
                found.append(case.products.by_weights(case.rows, each))
        torch.cuda.synchronize()
        for case, got, expected in zip((first, second), found, want, strict=True):
            assert torch.equal(got[: case.total], expected[: case.total])
