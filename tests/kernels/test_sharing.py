"""How many blocks a call has, and how many of them send rows, while the others place, fill or add some."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import BF16
from tokenloom.kernels.combine.launch import CombineVariant
from tokenloom.kernels.common import MAX_BLOCKS, Work
from tokenloom.kernels.common.sharing import MOST_BLOCKS_BY_BYTES
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import ROUTE_LAYOUTS, Plan

FP8 = torch.float8_e4m3fn
HOME = {"y_dtype": BF16, "wire_dtype": BF16, "out_dtype": BF16}
times = st.floats(1e-3, 1e6)


@given(st.integers(1, 64), times, st.just(0.0) | times, times)
def test_nobody_is_late(blocks: int, sending: float, other: float, links: float) -> None:
    """Senders are not later than the links, or than all work shared evenly; with one less they would be. All send where
    they do not fill the links.
    """
    most = max(links, (sending + other) / blocks) * (1 + 1e-9)
    found = Work(sending, other, links).sending_blocks(blocks)
    assert 1 <= found <= blocks
    assert sending / found <= most
    if sending >= links * blocks:
        assert found == blocks
    else:
        assert found == 1 or sending / (found - 1) * (1 + 1e-6) > most


@given(st.integers(8, 64), times, st.just(0.0) | times, times)
def test_links_are_the_limit(most: int, sending: float, other: float, links: float) -> None:
    """With the best number of blocks neither senders nor the others are later than the links, if that many may run."""
    work = Work(sending, other, links)
    found = work.best_blocks(most)
    assert 8 <= found <= most
    if found < most:
        senders = work.sending_blocks(found)
        assert sending / senders <= links * (1 + 1e-9)
        assert other == 0 or other / (found - senders) <= links * (1 + 1e-9)


def test_nothing_to_send() -> None:
    assert Work(0.0, 5.0, 0.0).sending_blocks(16) == 0
    assert Work(0.0, 5.0, 0.0).best_blocks(24) == 24


def plan_of(num_ranks: int, top_k: int = 8) -> Plan:
    return Plan(num_ranks=num_ranks, num_experts=256, hidden=7168, top_k=top_k, max_tokens_per_rank=4096)


@pytest.mark.parametrize(
    ("num_ranks", "dispatches", "tokens_home", "sums_home"),
    [(1, (0, 0), (0, 0), (16, 24)), (2, (3, 4), (7, 10), (16, 24)), (4, (7, 10), (9, 10), (16, 18))],
)
def test_usual_plans(
    num_ranks: int, dispatches: tuple[int, int], tokens_home: tuple[int, int], sums_home: tuple[int, int]
) -> None:
    """Of 16 and 24 SMs. Ten senders fill the links of a GPU; with few ranks most rows stay or are copied there."""
    plan = plan_of(num_ranks)
    for layout in ROUTE_LAYOUTS:
        dispatch = DispatchVariant(plan, layout=layout, x_dtype=BF16)
        assert (dispatch.sending_blocks(16), dispatch.sending_blocks(24)) == dispatches
    for layout, want in (("token", tokens_home), ("expert", sums_home)):
        combine = CombineVariant(plan, layout=layout, **HOME)
        assert (combine.sending_blocks(16), combine.sending_blocks(24)) == want


@pytest.mark.parametrize("top_k", [2, 4, 8, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_best_blocks(num_ranks: int, top_k: int) -> None:
    """By expert, rows need as many SMs as by token or more; all there are, where links are not the limit."""
    plan = plan_of(num_ranks, top_k)
    for dtype in (BF16, FP8):
        variants = [DispatchVariant(plan, layout=layout, x_dtype=dtype) for layout in ("token", "expert")]
        by_token, by_expert = (each.best_blocks(MAX_BLOCKS) for each in variants)
        assert 8 <= by_token <= by_expert <= MAX_BLOCKS
    home = {layout: CombineVariant(plan, layout=layout, **HOME) for layout in ("token", "expert")}
    assert home["token"].best_blocks(MAX_BLOCKS) <= home["expert"].best_blocks(MAX_BLOCKS)
    for variant in (*variants, *home.values()):
        assert variant.best_blocks(MAX_BLOCKS) <= MOST_BLOCKS_BY_BYTES
        few = MAX_BLOCKS if variant.layout == "expert" else MOST_BLOCKS_BY_BYTES
        assert variant.best_blocks(MAX_BLOCKS, few_tokens=True) == few
        assert variant.best_blocks(20, few_tokens=True) == 20
    if num_ranks == 1:
        assert home["token"].best_blocks(MAX_BLOCKS) == MOST_BLOCKS_BY_BYTES


def test_best_blocks_of_four_ranks() -> None:
    """As rates of an SM and of links say: a dispatch and a combine by expert, and both by token."""
    plan = plan_of(4)
    dispatches = [DispatchVariant(plan, layout=layout, x_dtype=BF16) for layout in ("expert", "token")]
    combines = [CombineVariant(plan, layout=layout, **HOME) for layout in ("expert", "token")]
    assert [each.best_blocks(MAX_BLOCKS) for each in (*dispatches, *combines)] == [24, 13, 28, 18]


@pytest.mark.parametrize("strategy", ["dedup", "all_to_all", "all_gather"])
@pytest.mark.parametrize("quantize", ["", "any scale"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_somebody_sends(num_ranks: int, quantize: str, strategy: str) -> None:
    """However few blocks there are, and however little travels beside rows that copy engines bring."""
    plan = Plan(num_ranks=num_ranks, num_experts=24, hidden=256, top_k=3, max_tokens_per_rank=5)
    variant = DispatchVariant(plan, layout="expert", x_dtype=BF16, quantize=quantize, strategy=strategy)
    for blocks in (1, 2, 32):
        assert 1 <= variant.sending_blocks(blocks) <= blocks


def test_few_rows_take_all_blocks() -> None:
    assert CombineVariant(plan_of(4), layout="expert", **HOME, eager=True).best_blocks(32) == 32
    assert DispatchVariant(plan_of(4), layout="expert", x_dtype=BF16, staged=True).best_blocks(32) == 32
