"""MegaMoE's kernels on the emulator, in random orders: dispatch, both GEMMs, what goes home, sums."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

import tokenloom as tl
from tests.inference import test_late_mega as late
from tests.inference.test_mega_moe import FAULTS, check_case, check_faults, check_fewer_tokens, check_many_calls
from tests.support import emulator
from tests.support.mega_cases import CASES, Case, assert_near, expected, inputs, make_layer, make_mega
from tests.support.on_ranks import on_ranks
from tests.support.slow import mostly_slow
from tokenloom.bench.mega_trace import UNTIL, spans_of
from tokenloom.inference.schedules import MegaSchedule
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")

FAST = "one block"
SLOW = ("plain", "fp8", "repeats", "top8", "masked", "gpt_oss", "biases", "two shared experts")
BY_ROW = (
    "by row",
    "by row, fp8",
    "by row, wide",
    "by row, odd widths",
    "by row, many tokens",
    "by row, shared",
    "by row, four bits",
    "by row, both",
)
FAST_BY_ROW = "by row, one block"
PADDED = ("padded, two blocks", "padded, fp8", "padded gpt_oss", "padded gpt_oss, by row")
FULL = ("plain", "fp8", "masked", "biases", "repeats", "padded, two blocks", "padded, fp8")
"""Others have their sizes, FP8 as they are sent, -1, biases, several routes to a rank, and padding."""
TWO_TILES = {"two shared experts": (30, 11), "by row, many tokens": (150, 20), "by row, both": (300, 9)}
FEWER = dict.fromkeys(("top8", "gpt_oss", "by row, odd widths"), (24, 11)) | TWO_TILES
"""Tokens of the ranks where those of the case take long. With TWO_TILES, most experts still have over 128 rows."""


@pytest.mark.parametrize("name", mostly_slow([FAST, FAST_BY_ROW, *SLOW, *BY_ROW, *PADDED], [FAST], FULL))
def test_mega(name: str) -> None:
    emulator.ranks(2).run(check_case, name, tokens=FEWER.get(name))


@pytest.mark.slow
def test_the_same_bits_among_fewer_tokens() -> None:
    """Where tiles have at most 256, 160 and 128 rows."""
    case = replace(CASES["by row, one block"], tokens=(75,), experts_per_rank=1)
    emulator.ranks(2).run(check_fewer_tokens, case, (60, 30))


@on_ranks("emulated_two")
@pytest.mark.slow
@pytest.mark.parametrize("slow", ["threads", "copies"])
def test_rows_that_arrive_late(context: RankContext, slow: str) -> None:
    """The GPU of a rank that has many is slow, so the other's GEMM1 begins before. Both calls use the same places."""
    from tests.support.emulator import group as emulated

    if context.rank == 1 and slow == "threads":
        emulated.here.group.emulator.slow_down(1, 30)
    elif context.rank == 1:
        emulated.here.group.emulator.slow_copies(1000)
    case = Case("", tokens=(1, 70), hidden=128, intermediate=128, experts_per_rank=2)
    layers = [make_layer(case, context.num_ranks, context.device, seed) for seed in range(2)]
    with make_mega(context, case, layers[0]) as mega:
        for layer in layers:
            given = replace(layers[0], xs=layer.xs, ids=layer.ids, weights=layer.weights)
            assert_near(mega(*inputs(case, given, context.rank)), expected(case, given, context.rank))
        mega.check()


@on_ranks("emulated_two")
@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
def test_times_of_kernels(context: RankContext, packs: bool) -> None:
    """Each kernel of a call writes its times, in the order in which kernels wait for each other. With few tokens on
    each SM that sends, none packs them beforehand."""
    case = CASES["one block"]
    layer = make_layer(case, context.num_ranks, context.device)
    with make_mega(context, case, layer) as mega:
        mega.schedule = MegaSchedule(send_sms=2) if packs else None
        mega(*inputs(case, layer, context.rank))
        times = mega.trace()
        assert_near(mega(*inputs(case, layer, context.rank)), expected(case, layer, context.rank))
        mega.check()
        spans = list(spans_of(times.cpu()))
        times.zero_()
    began = {span.name: span.begin for span in spans if span.thread.startswith("kernel")}
    ended = {span.name: span.end for span in spans if span.thread.startswith("kernel")}
    assert list(began) == [*(["pack"] if packs else []), "send", "GEMM1", "GEMM2", "barrier", "sum"]
    assert not packs or began["pack"] < began["send"]
    assert began["send"] < began["GEMM1"] < began["GEMM2"] < ended["GEMM2"] < began["barrier"] < began["sum"]
    doing = {span.name for span in spans if span.thread.startswith("send")}
    assert doing == set(UNTIL["send"].values()) - ({"pack own tokens"} if packs else set())
    assert all(span.begin <= span.end for span in spans)
    assert not times.send.any()


@pytest.mark.slow
def test_four_ranks() -> None:
    emulator.ranks(4).run(check_case, "gated relu2", tokens=(20, 9, 0, 14))


@pytest.mark.slow
@pytest.mark.full  # minutes
def test_many_calls_on_one_buffer() -> None:
    emulator.ranks(2).run(check_many_calls, 20)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank(fault: str) -> None:
    emulator.ranks(2).run(check_faults, fault)


@on_ranks("emulated_two")
@pytest.mark.parametrize("turns", mostly_slow([0, 10_000, 60_000], (), [0, 60_000]))
def test_a_killed_rank(context: RankContext, turns: int) -> None:
    """Whatever its kernels do then, the other rank names it, and waits no longer than the deadline."""
    from tests.support.emulator import group as emulated

    case, shared = CASES["one block"], emulated.here.group
    layer = make_layer(case, context.num_ranks, context.device)

    def kill() -> None:
        until = shared.emulator.now() + turns
        while shared.emulator.now() < until:
            time.sleep(0)
        shared.kill(1)

    with make_mega(context, case, layer, timeout_s=0.0015) as mega:  # some seconds of the emulator
        given = inputs(case, layer, context.rank)

        def call(times: int) -> None:
            for _ in range(times):
                mega(*given)

        call(10)
        mega.check()  # until here nobody is late
        torch.distributed.barrier()
        if context.rank == 1:
            threading.Thread(target=kill).start()
        with pytest.raises(tl.PeerTimeout) as timeout:
            call(100)
        assert timeout.value.peers == (1,)
        with pytest.raises(tl.CommunicatorBroken):
            mega(*given)


# -- ranks that are masked when they are late, and come back: more of it is in test_late_mega.py ------------------


@pytest.mark.parametrize("stage", mostly_slow(late.STAGES, ["gemm1"]))
def test_a_killed_rank_is_masked(stage: str) -> None:
    emulator.ranks(2).run(late.check_death, "row", "some", stage)


@pytest.mark.slow
@pytest.mark.parametrize("modes", [(True, False), (False, True)])
def test_a_killed_rank_is_masked_in_any_mode(modes: tuple[bool, bool]) -> None:
    emulator.ranks(2).run(late.check_death_in_any_mode, modes)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["dispatch", "sum"])
def test_a_fault_where_late_ranks_are_masked(stage: str) -> None:
    emulator.ranks(2).run(late.check_fault_in_a_call, stage)


@pytest.mark.slow
def test_nobody_is_late() -> None:
    emulator.ranks(2).run(late.check_nobody_is_late, "padded")


@pytest.mark.slow
@pytest.mark.parametrize("again", ["loaded", "late"])
def test_a_fault_in_the_repeated_call(again: str) -> None:
    emulator.ranks(4).run(late.check_fault_in_the_repeated_call, again)


@pytest.mark.parametrize("on_timeout", mostly_slow(["raise", "mask"], ["raise"]))
def test_a_rank_comes_back(on_timeout: str) -> None:
    emulator.ranks(2).run(late.check_back_again, on_timeout, "row", "some")


@pytest.mark.slow
def test_a_rank_comes_back_with_another_recipe() -> None:
    emulator.ranks(2).run(late.check_another_recipe)
