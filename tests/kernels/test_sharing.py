"""How many blocks of a call send rows, while the others place, fill or add some."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import BF16
from tokenloom.kernels.combine.launch import CombineVariant
from tokenloom.kernels.common import sending_blocks
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import Plan

times = st.floats(1e-3, 1e6)


@given(st.integers(1, 64), times, st.floats(0, 1e6), times)
def test_nobody_is_late(blocks: int, sending: float, other: float, links: float) -> None:
    """Senders are not later than the links, or than all work shared evenly; with one less they would be."""
    most = max(links, (sending + other) / blocks) * (1 + 1e-9)
    found = sending_blocks(blocks, sending, other, links)
    assert 1 <= found <= blocks
    assert sending / found <= most
    assert found == 1 or sending / (found - 1) * (1 + 1e-6) > most


def test_nothing_to_send() -> None:
    assert sending_blocks(16, 0.0, 5.0, 0.0) == 0


@pytest.mark.parametrize(
    ("num_ranks", "dispatches", "tokens_home", "sums_home"),
    [(1, (0, 0), (0, 0), (14, 21)), (2, (2, 3), (8, 10), (13, 20)), (4, (6, 8), (10, 10), (12, 18))],
)
def test_usual_plans(
    num_ranks: int, dispatches: tuple[int, int], tokens_home: tuple[int, int], sums_home: tuple[int, int]
) -> None:
    """Of 16 and 24 SMs. Eight senders fill the links of a GPU; with few ranks most rows stay or are copied there."""
    plan = Plan(num_ranks=num_ranks, num_experts=256, hidden=7168, top_k=8, max_tokens_per_rank=4096)
    home = {"y_dtype": BF16, "wire_dtype": BF16, "out_dtype": BF16}
    for dtype in (BF16, torch.float8_e4m3fn):
        variant = DispatchVariant(plan, layout="expert", x_dtype=dtype)
        assert variant.peer_blocks(24) <= 8
        if dtype == BF16:
            assert (variant.peer_blocks(16), variant.peer_blocks(24)) == dispatches
    for layout, want in (("token", tokens_home), ("expert", sums_home)):
        combine = CombineVariant(plan, layout=layout, **home)
        assert (combine.push_blocks(16), combine.push_blocks(24)) == want


@pytest.mark.parametrize("strategy", ["dedup", "all_to_all", "all_gather"])
@pytest.mark.parametrize("quantize", ["", "any scale"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_somebody_sends(num_ranks: int, quantize: str, strategy: str) -> None:
    """However few blocks there are, and however little travels beside rows that copy engines bring."""
    plan = Plan(num_ranks=num_ranks, num_experts=24, hidden=256, top_k=3, max_tokens_per_rank=5)
    variant = DispatchVariant(plan, layout="expert", x_dtype=BF16, quantize=quantize, strategy=strategy)
    for blocks in (1, 2, 32):
        assert 1 <= variant.peer_blocks(blocks) <= blocks
