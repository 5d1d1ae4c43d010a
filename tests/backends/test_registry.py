"""Which backend is picked, given what works on every rank; and what the ranks are asked to agree on."""

from __future__ import annotations

import pytest
import torch

from tokenloom.backends import registry
from tokenloom.backends.base import CombineCall, DispatchCall, DispatchInput
from tokenloom.backends.handshake import (
    NUM_FIELDS,
    Field,
    combine_fields,
    decode_field,
    dispatch_fields,
    encode_fields,
)
from tokenloom.backends.nvlink.buffers import data_regions
from tokenloom.backends.registry import Availability
from tokenloom.errors import BackendUnavailable
from tokenloom.plan import Plan

BF16, FP32 = torch.bfloat16, torch.float32


def found(nvlink: bool = True, why: str = "own kernels", host: str = "a", gpu: str = "") -> list[Availability]:
    """What one rank finds."""
    return [Availability("nvlink", nvlink, why, host, gpu), Availability("collective", True, "over nccl", host)]


def test_auto_picks_the_best_that_works_everywhere() -> None:
    """One rank alone, and many, each with a GPU of its own."""
    assert registry.choose("auto", [found()]) == ("nvlink", [])
    assert registry.choose("auto", [found(gpu=name) for name in "wxyz"]) == ("nvlink", [])


@pytest.mark.parametrize(
    ("by_rank", "reason"),
    [
        ([found(False, "no driver")] * 2, "nvlink does not work on every rank: no driver"),
        ([found(), found(False, "no driver")], "nvlink does not work on rank 1: no driver"),
        ([found(), found(), found(host="b")], "nvlink does not work on rank 2: it is on another host than rank 0"),
        (
            [found(gpu="x"), found(gpu="y"), found(gpu="y")],
            "nvlink does not work on rank 2: it shares its GPU with rank 1",
        ),
    ],
)
def test_what_fails_on_one_rank_is_no_choice(by_rank: list[list[Availability]], reason: str) -> None:
    """All ranks take the same backend: auto goes on to the next one and says why, a name that was asked for raises."""
    assert registry.choose("auto", by_rank) == ("collective", [reason])
    assert registry.choose("collective", by_rank)[0] == "collective"
    with pytest.raises(BackendUnavailable) as raised:
        registry.choose("nvlink", by_rank)
    assert str(raised.value) == f"{reason}; use backend='auto'"


@pytest.mark.parametrize(
    ("plan", "dtype", "why"),
    [
        (Plan(2, 2, 8, 1, 1), torch.float64, "its kernels have no float64"),
        (Plan(2, 2, 4, 1, 1), None, "rows of 4 bfloat16 values are no multiple of 16 bytes"),
        (Plan(33, 33, 8, 1, 1), None, "it serves at most 32 ranks"),
        (Plan(32, 32, 8, 1, 1), None, "it needs a GPU, the tensors are on cpu"),
        (None, None, "it needs a GPU, the tensors are on cpu"),
    ],
)
def test_what_the_kernels_do_not_do(plan: Plan | None, dtype: torch.dtype | None, why: str) -> None:
    """Said before anything is made; the other backend takes all of it."""
    nvlink, collective = registry.availability("gloo", torch.device("cpu"), plan, dtype)
    assert (nvlink.works, nvlink.why) == (False, why)
    assert collective.works


def test_more_experts_than_a_block_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that could run the kernels: auto takes the other backend instead of failing at the first dispatch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(registry, "load_nvrtc", lambda: None)
    monkeypatch.setattr(registry, "load_driver", lambda: None)
    device = torch.device("cuda", 0)
    assert registry._why_not_nvlink(device, Plan(8, 256, 7168, 8, 4096), BF16) is None
    why = registry._why_not_nvlink(device, Plan(8, 65536, 7168, 8, 4096), BF16)
    assert why is not None
    assert "use fewer experts" in why


@pytest.mark.parametrize("value_bytes", [2, 4])
@pytest.mark.parametrize("plan", [Plan(8, 256, 7168, 8, 4096), Plan(3, 21, 8, 5, 7)], ids=["large", "odd"])
def test_the_two_receive_regions_are_alike(plan: Plan, value_bytes: int) -> None:
    """Kernels are told where things lie in the first, and how far it is to the second: the same for all of them."""
    offset = data_regions(plan, value_bytes).offset
    names = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")
    assert {offset(f"{name}1") - offset(f"{name}0") for name in names} == {offset("rows1") - offset("rows0")}


DISPATCH = DispatchCall("expert", 16, "bounded", 640, True, True)
COMBINE = CombineCall("per_route", True, BF16, FP32, False)


def dispatched(x_dtype: torch.dtype, weights_dtype: torch.dtype | None, x_needs_grad: bool) -> DispatchInput:
    x, ids = torch.zeros(1, 128, dtype=x_dtype), torch.zeros(1, 1, dtype=torch.int64)
    weights = None if weights_dtype is None else torch.zeros(1, 1, dtype=weights_dtype)
    return DispatchInput(x, None, ids, weights, x_needs_grad, False, False)


@pytest.mark.parametrize(
    "fields",
    [
        dispatch_fields(7, DISPATCH, dispatched(BF16, FP32, True)),
        dispatch_fields(8, DispatchCall("token", 1, "exact", None), dispatched(FP32, None, False)),
        dispatch_fields(1, DispatchCall("rank", 1, "exact", None), dispatched(FP32, None, True)),
        combine_fields(7, COMBINE),
        combine_fields(0, CombineCall("per_rank", False, FP32, BF16, True)),
        {"call": "combine", "dispatch number": 3, "mode": "gradient of weights"},
    ],
    ids=["dispatch to fp8", "dispatch", "dispatch 1", "combine per route", "combine 0", "gradient of weights"],
)
def test_fields_can_be_read_back(fields: dict[str, Field]) -> None:
    """In their order, the number of the dispatch among them: a rank that differs is told in which of them."""
    words = {True: "yes", False: "no"}
    for _ in range(2):  # the second time most of it is remembered
        codes = encode_fields(fields)
        assert len(codes) == NUM_FIELDS
        for value, code in zip(fields.values(), codes, strict=False):
            wanted = words[value] if isinstance(value, bool) else value
            wanted = str(wanted) if isinstance(wanted, torch.dtype) else wanted
            assert decode_field(code) == wanted
            assert -(2**31) <= code < 2**31
    other = encode_fields(fields | {"dispatch number": 123456})
    assert [a == b for a, b in zip(codes, other, strict=True)] == [index != 1 for index in range(len(codes))]
