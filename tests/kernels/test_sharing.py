"""How many blocks a call has, and how many of them send rows, while the others place, fill or add some."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.cases import BF16
from tokenloom.errors import ImplausibleRates
from tokenloom.kernels.combine.launch import CombineVariant
from tokenloom.kernels.common import H200, MAX_BLOCKS, Rates, Work
from tokenloom.kernels.common.sharing import MOST_BLOCKS_BY_BYTES
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import ROUTE_LAYOUTS, Plan

FP8 = torch.float8_e4m3fn
HOME = {"y_dtype": BF16, "wire_dtype": BF16, "out_dtype": BF16}
times = st.floats(1e-3, 1e6)
machines = st.builds(Rates, **{name: st.floats(rate / 4, rate * 4) for name, rate in asdict(H200).items()})


@example(8, 5.0, 1000.0, 1.0)  # the others would be late
@given(st.integers(1, 64), times, st.just(0.0) | times, times)
def test_nobody_is_late(blocks: int, sending: float, other: float, links: float) -> None:
    """Senders are not later than the links, or than all work shared evenly; with one less they would be. All send
    where they do not fill the links.
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
        assert (dispatch.sending_blocks(16, H200), dispatch.sending_blocks(24, H200)) == dispatches
    for layout, want in (("token", tokens_home), ("expert", sums_home)):
        combine = CombineVariant(plan, layout=layout, **HOME)
        assert (combine.sending_blocks(16, H200), combine.sending_blocks(24, H200)) == want


@pytest.mark.parametrize("top_k", [2, 4, 8, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_best_blocks(num_ranks: int, top_k: int) -> None:
    """By expert, rows need as many SMs as by token or more; all there are, where links are not the limit."""
    plan = plan_of(num_ranks, top_k)
    for dtype in (BF16, FP8):
        variants = [DispatchVariant(plan, layout=layout, x_dtype=dtype) for layout in ("token", "expert")]
        by_token, by_expert = (each.best_blocks(MAX_BLOCKS, H200) for each in variants)
        assert 8 <= by_token <= by_expert <= MAX_BLOCKS
    home = {layout: CombineVariant(plan, layout=layout, **HOME) for layout in ("token", "expert")}
    assert home["token"].best_blocks(MAX_BLOCKS, H200) <= home["expert"].best_blocks(MAX_BLOCKS, H200)
    for variant in (*variants, *home.values()):
        assert variant.best_blocks(MAX_BLOCKS, H200) <= MOST_BLOCKS_BY_BYTES
        few = MAX_BLOCKS if variant.layout == "expert" else MOST_BLOCKS_BY_BYTES
        assert variant.best_blocks(MAX_BLOCKS, H200, few_tokens=True) == few
        assert variant.best_blocks(20, H200, few_tokens=True) == 20
    if num_ranks == 1:
        assert home["token"].best_blocks(MAX_BLOCKS, H200) == MOST_BLOCKS_BY_BYTES


def test_best_blocks_of_four_ranks() -> None:
    """As rates of an SM and of links say: a dispatch and a combine by expert, and both by token."""
    plan = plan_of(4)
    dispatches = [DispatchVariant(plan, layout=layout, x_dtype=BF16) for layout in ("expert", "token")]
    combines = [CombineVariant(plan, layout=layout, **HOME) for layout in ("expert", "token")]
    assert [each.best_blocks(MAX_BLOCKS, H200) for each in (*dispatches, *combines)] == [24, 13, 28, 18]


@pytest.mark.parametrize("strategy", ["dedup", "all_to_all", "all_gather"])
@pytest.mark.parametrize("quantize", ["", "any scale"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_somebody_sends(num_ranks: int, quantize: str, strategy: str) -> None:
    """However few blocks there are, and however little travels beside rows that copy engines bring."""
    plan = Plan(num_ranks=num_ranks, num_experts=24, hidden=256, top_k=3, max_tokens_per_rank=5)
    variant = DispatchVariant(plan, layout="expert", x_dtype=BF16, quantize=quantize, strategy=strategy)
    for blocks in (1, 2, 32):
        assert 1 <= variant.sending_blocks(blocks, H200) <= blocks


def test_few_rows_take_all_blocks() -> None:
    assert CombineVariant(plan_of(4), layout="expert", **HOME, eager=True).best_blocks(32, H200) == 32
    assert DispatchVariant(plan_of(4), layout="expert", x_dtype=BF16, staged=True).best_blocks(32, H200) == 32


def variants_of(plan: Plan) -> list[DispatchVariant | CombineVariant]:
    """Calls of many tokens, of all that rates are for."""
    dispatches = [
        DispatchVariant(plan, layout=layout, x_dtype=dtype, quantize=quantize)
        for layout in ("token", "expert", "slots")
        for dtype, quantize in ((BF16, ""), (FP8, ""), (BF16, "any scale"))
    ]
    return [*dispatches, *(CombineVariant(plan, layout=layout, **HOME) for layout in ("token", "expert"))]


@settings(deadline=None)
@given(machines, st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 8]), st.integers(1, MAX_BLOCKS))
def test_any_machine(rates: Rates, num_ranks: int, top_k: int, blocks: int) -> None:
    """Some block sends. Faster links want at least as many blocks, and of these at least as many that send."""
    plan = plan_of(num_ranks, top_k)
    faster = replace(rates, link_gbytes_per_s=min(1.5 * rates.link_gbytes_per_s, 4 * H200.link_gbytes_per_s))
    for variant in variants_of(plan):
        assert 1 <= variant.sending_blocks(blocks, rates) <= variant.sending_blocks(blocks, faster) <= blocks
        assert 8 <= variant.best_blocks(MAX_BLOCKS, rates) <= variant.best_blocks(MAX_BLOCKS, faster)


def test_links_twice_as_fast() -> None:
    """More blocks send, up to as many again; and more blocks are worth their SMs."""
    twice = replace(H200, link_gbytes_per_s=2 * H200.link_gbytes_per_s)
    for variant in variants_of(plan_of(4)):
        senders = variant.sending_blocks(MAX_BLOCKS, H200)
        assert senders < variant.sending_blocks(MAX_BLOCKS, twice) <= 2 * senders
        assert variant.best_blocks(MAX_BLOCKS, twice) > variant.best_blocks(MAX_BLOCKS, H200)


@pytest.mark.parametrize("name", [each.name for each in fields(Rates)])
def test_every_rate_counts(name: str) -> None:
    """It changes what some call does, if it is twice or half of what it is on H200."""

    def numbers(rates: Rates) -> list[tuple[int, int]]:
        return [
            (each.sending_blocks(24, rates), each.best_blocks(MAX_BLOCKS, rates)) for each in variants_of(plan_of(4))
        ]

    value = asdict(H200)[name]
    assert numbers(H200) not in [numbers(replace(H200, **{name: changed})) for changed in (2 * value, value / 2)]


@pytest.mark.parametrize("factor", [0.0, -1.0, 0.24, 4.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", [each.name for each in fields(Rates)])
def test_implausible_rates(name: str, factor: float) -> None:
    value = factor * asdict(H200)[name]
    with pytest.raises(ImplausibleRates, match=rf"{name} is {value}, expected .* measure again") as raised:
        Rates(**{name: value})
    assert raised.value.rate == name


def test_rates_are_numbers() -> None:
    with pytest.raises(ImplausibleRates, match=r"send_us is '0\.14', expected 0\.035 to 0\.56"):
        Rates(send_us="0.14")  # type: ignore[arg-type]
