"""The grouped FP8 GEMMs of rows in slots: against float64, and bit for bit against the same rows behind offsets."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped_operands import (
    E4M3_NAN,
    FP8,
    INT32,
    assert_close,
    expected,
    in_slots,
    needs_hopper,
    on_devices,
    operands,
)
from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, TokenloomError
from tokenloom.ops.gemm import grouped_gemm_fp8, grouped_swiglu_fp8, interleave_gate_and_up

UNWRITTEN = 0x5A
"""Byte of results that nothing has written."""
Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

CASES = {
    # Tiles of 128 rows end where an expert's places end, before, and behind: there they take in the next expert's.
    "full, S a multiple of the tile": ([256, 256], 256, 512, 256),
    "full, S no multiple of the tile": ([100, 100, 100], 100, 384, 512),
    "counts around tiles and halves": ([63, 64, 65, 127, 128, 129], 130, 256, 256),
    "fewer places than half a tile": ([16, 3, 0, 9], 16, 256, 1024),
    "empty experts first, between and last": ([0, 130, 0, 0, 1, 0], 200, 512, 384),
    "one row": ([1], 1, 256, 128),
    "one row among many places": ([0, 1, 0], 1000, 256, 256),
    "all experts empty": ([0, 0, 0], 64, 256, 128),
    "no places": ([0, 0], 0, 256, 128),
    "more tiles than SMs": ([700, 0, 900], 1000, 2048, 256),
    "long K": ([33, 257], 300, 256, 7168),
}
CPU_CASES = [
    "counts around tiles and halves",
    "empty experts first, between and last",
    "all experts empty",
    "no places",
]


@pytest.fixture(autouse=True)
def results_begin_with_a_known_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the operations allocate for their results."""
    allocate = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *size: int, **options: torch.dtype) -> torch.Tensor:
        found = allocate(self, *size, **options)  # type: ignore[call-overload]
        found.view(torch.uint8).fill_(UNWRITTEN)
        return found

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def slots_of(a: torch.Tensor, a_scales: torch.Tensor, counts: list[int], capacity: int) -> Slots:
    """Values, scales and counts. Values and scales of places beyond the counts are NaN."""
    on_device = torch.tensor(counts, dtype=INT32, device=a.device)
    return in_slots(a, counts, capacity), in_slots(a_scales, counts, capacity), on_device


def poison_empty(counts: list[int], b: torch.Tensor, b_scales: torch.Tensor) -> None:
    """Weights of experts without rows become NaN."""
    for expert, count in enumerate(counts):
        if count == 0:
            b[expert].view(torch.uint8).fill_(E4M3_NAN)
            b_scales[expert] = torch.nan


def used(slots: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The rows within the counts, one after the other."""
    return torch.cat([slots[expert, :count] for expert, count in enumerate(counts)])


def assert_rest_unwritten(slots: torch.Tensor, counts: list[int]) -> None:
    for expert, count in enumerate(counts):
        assert (slots[expert, count:].view(torch.uint8) == UNWRITTEN).all(), f"expert {expert}"


@pytest.mark.parametrize(("device", "name"), on_devices([*CASES], CPU_CASES))
def test_gemm(device: str, name: str) -> None:
    counts, capacity, n, k = CASES[name]
    a, a_scales, b, b_scales, offsets = operands(counts, n, k, device)
    poison_empty(counts, b, b_scales)
    slots, scales, on_device = slots_of(a, a_scales, counts, capacity)
    out = grouped_gemm_fp8(slots, scales, b, b_scales, expert_counts=on_device)
    assert (out.shape, out.dtype) == ((len(counts), capacity, n), torch.bfloat16)
    for e, count in enumerate(counts):
        if count:
            want = expected(slots[e, :count], scales[e, :count], b, b_scales, e)
            assert_close(out[e, :count], want, f"expert {e}")
    assert torch.equal(used(out, counts), grouped_gemm_fp8(a, a_scales, b, b_scales, offsets))
    assert_rest_unwritten(out, counts)


SWIGLU_OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "weighted, clamped": {"weighted": True, "clamp": 2.0},
    "powers of two, exact functions": {"power_of_two_scales": True, "fast_math": False},
}


@pytest.mark.parametrize("options", SWIGLU_OPTIONS)
@pytest.mark.parametrize(("device", "name"), on_devices([*CASES], CPU_CASES))
def test_swiglu(device: str, name: str, options: str) -> None:
    """test_gemm.py compares rows behind offsets with float64, so equal bits are enough here."""
    counts, capacity, n, k = CASES[name]
    n = -(-n // 256) * 256
    given = dict(SWIGLU_OPTIONS[options])
    a, a_scales, w1, w1_scales, offsets = operands(counts, n, k, device)
    a_scales /= k**0.5 * 448 * 200  # so that silu is neither 0 nor the identity
    w1 = interleave_gate_and_up(w1)
    poison_empty(counts, w1, w1_scales)
    row_weights = slot_weights = None
    if given.pop("weighted", False):
        row_weights = torch.rand(len(a), device=device) + 0.1
        slot_weights = in_slots(row_weights, counts, capacity)
    slots, scales, on_device = slots_of(a, a_scales, counts, capacity)
    of_slots = grouped_swiglu_fp8(
        slots,
        scales,
        w1,
        w1_scales,
        None,
        slot_weights,
        expert_counts=on_device,
        **given,  # type: ignore[arg-type]
    )
    of_rows = grouped_swiglu_fp8(a, a_scales, w1, w1_scales, offsets, row_weights, **given)  # type: ignore[arg-type]
    for got, want, width, dtype in zip(of_slots, of_rows, (n // 2, n // 256), (FP8, torch.float32), strict=True):
        assert (got.shape, got.dtype) == ((len(counts), capacity, width), dtype)
        assert torch.equal(used(got, counts).view(torch.uint8), want.view(torch.uint8))
        assert_rest_unwritten(got, counts)


def test_a_count_above_the_places_stands_for_all_of_them(device: str) -> None:
    """Rows behind an expert's places are the next one's, and behind the last one's is other memory."""
    a, a_scales, b, b_scales, _ = operands([70, 70], 256, 256, device)
    slots, scales = a.view(2, 70, 256), a_scales.view(2, 70, 2)
    outs = [
        grouped_gemm_fp8(slots, scales, b, b_scales, expert_counts=torch.tensor(counts, dtype=INT32, device=device))
        for counts in ([70, 70], [71, 1000])
    ]
    assert torch.equal(*outs)


@pytest.mark.gpu
@needs_hopper
def test_counts_are_read_when_the_gpu_comes_to_it() -> None:
    """One graph serves all routings: the host puts nothing of the counts into a launch."""
    most = [300, 300, 300]
    a, a_scales, b, b_scales, _ = operands(most, 512, 512)
    slots, scales, counts = slots_of(a, a_scales, most, 300)
    grouped_gemm_fp8(slots, scales, b, b_scales, expert_counts=counts)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_gemm_fp8(slots, scales, b, b_scales, expert_counts=counts)
    for own in ([0, 0, 0], [300, 1, 0], [5, 0, 300], [128, 64, 65]):
        counts.copy_(torch.tensor(own, dtype=INT32))
        graph.replay()
        want = grouped_gemm_fp8(slots, scales, b, b_scales, expert_counts=counts)
        assert torch.equal(used(out, own), used(want, own))
        assert_rest_unwritten(out, own)


# -- bad input ----------------------------------------------------------------------------------------------------


def good(k: int = 256) -> dict[str, torch.Tensor]:
    a, a_scales, b, b_scales, _ = operands([3, 4], 256, k, device="cpu")
    values, scales, counts = slots_of(a, a_scales, [3, 4], 8)
    return {"a": values, "a_scales": scales, "b": b, "b_scales": b_scales, "expert_counts": counts}


FAULTS: dict[str, tuple[str, torch.Tensor, type[TokenloomError]]] = {
    "rows that are not in slots": ("a", torch.zeros(16, 256, dtype=FP8), ShapeMismatch),
    "slots of other experts": ("a", torch.zeros(3, 8, 256, dtype=FP8), ShapeMismatch),
    "slots of another K": ("a", torch.zeros(2, 8, 128, dtype=FP8), ShapeMismatch),
    "slots in bfloat16": ("a", torch.zeros(2, 8, 256, dtype=torch.bfloat16), DtypeMismatch),
    "scales of other places": ("a_scales", torch.zeros(2, 7, 2), ShapeMismatch),
    "scales by columns": ("a_scales", torch.zeros(2, 2, 8).transpose(1, 2), ShapeMismatch),
    "scales as packed exponents": ("a_scales", torch.zeros(2, 8, 1, dtype=INT32), DtypeMismatch),
    "offsets instead of counts": ("expert_counts", torch.zeros(3, dtype=INT32), ShapeMismatch),
    "counts in int64": ("expert_counts", torch.zeros(2, dtype=torch.int64), DtypeMismatch),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_input_is_named(name: str) -> None:
    argument, tensor, error = FAULTS[name]
    given = good() | {argument: tensor}
    with pytest.raises(error, match=f"^{argument} is"):
        grouped_gemm_fp8(**given)
    swiglu = {{"b": "w1", "b_scales": "w1_scales"}.get(each, each): value for each, value in given.items()}
    with pytest.raises(error, match=f"^{argument} is"):
        grouped_swiglu_fp8(**swiglu)


def test_one_of_offsets_and_counts_must_be_given() -> None:
    given = good()
    offsets = torch.zeros(3, dtype=INT32)
    with pytest.raises(InvalidArgument, match=r"^both of expert_offsets and expert_counts given, expected one"):
        grouped_gemm_fp8(**given, expert_offsets=offsets)
    del given["expert_counts"]
    with pytest.raises(InvalidArgument, match=r"^neither of expert_offsets and expert_counts given, expected one"):
        grouped_gemm_fp8(**given)


def test_row_weights_have_a_value_for_each_place() -> None:
    given = good()
    w1, w1_scales = given.pop("b"), given.pop("b_scales")
    with pytest.raises(ShapeMismatch, match=r"^row_weights is \[16\], expected \[2, 8\]"):
        grouped_swiglu_fp8(**given, w1=w1, w1_scales=w1_scales, row_weights=torch.ones(16))
