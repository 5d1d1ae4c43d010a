"""The measurement of rates: what it makes of times, and that a plausible result is kept and used."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import tokenloom as tl
from tests.backends.large_plans import no_plan_is_small
from tests.support.cases import BF16
from tests.support.on_ranks import on_ranks
from tests.support.stand_ins import StandIns
from tokenloom.backends.peers import kept_rates
from tokenloom.bench import tune
from tokenloom.bench.setup import Run
from tokenloom.bench.workload import CallSizes
from tokenloom.kernels.combine.launch import CombineVariant
from tokenloom.kernels.common import H200, Rates
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.tune import rates as rates_module
from tokenloom.tune.choices import Setting
from tokenloom.tune.profiler import CANDIDATES, WARM_UP_ROUNDS, Profile, make_rows
from tokenloom.tune.rates import MeasuredRates, rates_of

EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""
FP8 = torch.float8_e4m3fn
NUM_RANKS = 4
SLOWER = Rates(50.0, 0.2, 14.0, 44.0, 70.0, 60.0, 165.0)
"""Of another machine."""
Variants = DispatchVariant | CombineVariant
near_default = st.builds(Rates, **{name: st.floats(0.7 * rate, 1.4 * rate) for name, rate in asdict(H200).items()})


def us_of(variant: Variants, of: Rates, blocks: int) -> float:
    """What a token takes by the formulas that choose SMs. A token that is quantised goes to one rank."""
    if isinstance(variant, DispatchVariant) and variant.quantize:
        variant = replace(variant, plan=replace(variant.plan, top_k=1))
    work = variant.work(of)
    assert work is not None
    return max(work.links, (work.sending + work.other) / blocks)


def timed(plan: Plan) -> dict[str, tuple[Variants, int]]:
    """What is to be timed, and on how many SMs."""
    home: dict[str, Any] = {"y_dtype": BF16, "wire_dtype": BF16, "out_dtype": BF16}
    return {
        "links": (DispatchVariant(plan, layout="token", x_dtype=BF16), 32),
        "send": (DispatchVariant(plan, layout="token", x_dtype=BF16), 1),
        "send fp8": (DispatchVariant(plan, layout="token", x_dtype=FP8), 1),
        "quantize": (DispatchVariant(plan, layout="token", x_dtype=BF16, quantize="any scale"), 1),
        "store": (DispatchVariant(plan, layout="expert", x_dtype=BF16), 1),
        "push": (CombineVariant(plan, layout="expert", **home), 1),
        "add": (CombineVariant(plan, layout="token", **home), 1),
    }


def equal(found: Rates, want: Rates) -> None:
    assert asdict(found) == pytest.approx(asdict(want), rel=2e-3, abs=1e-3)


@settings(deadline=None)
@given(near_default, st.sampled_from([2, 4]))
def test_rates_are_those_that_take_these_times(of: Rates, num_ranks: int) -> None:
    """The reverse of what chooses SMs."""
    plan = Plan(num_ranks=num_ranks, num_experts=128, hidden=7168, top_k=8, max_tokens_per_rank=4096)
    us = {name: us_of(variant, of, blocks) for name, (variant, blocks) in timed(plan).items()}
    equal(rates_of(plan, us), of)


def test_a_rank_alone_has_no_links() -> None:
    """What it cannot measure stays as it is."""
    plan = Plan(num_ranks=1, num_experts=32, hidden=7168, top_k=8, max_tokens_per_rank=4096)
    us = {name: us_of(variant, SLOWER, blocks) for name, (variant, blocks) in timed(plan).items()}
    kept = {name: getattr(H200, name) for name in ("send_gbytes_per_s", "send_us", "link_gbytes_per_s")}
    equal(rates_of(plan, us), replace(SLOWER, **kept))


@pytest.mark.parametrize("name", ["links", "send", "send fp8", "quantize", "store", "push", "add"])
@pytest.mark.parametrize("factor", [0.0, -1.0, 10.0])
def test_times_that_cannot_be(name: str, factor: float) -> None:
    """Are refused by name, and never divided by."""
    plan = Plan(num_ranks=4, num_experts=128, hidden=7168, top_k=8, max_tokens_per_rank=4096)
    us = {each: us_of(variant, H200, blocks) for each, (variant, blocks) in timed(plan).items()}
    with pytest.raises(tl.ImplausibleRates, match="measure again while nothing else uses these GPUs"):
        rates_of(plan, us | {name: factor * us[name]})


# -- the calls ------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins() -> Iterator[StandIns]:
    with StandIns(NUM_RANKS) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rates are kept. Calls are smaller than usual."""
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path))
    for name, value in (("NUM_TOKENS", 1024), ("TOP_K", 2), ("ITERATIONS", 5)):
        monkeypatch.setattr(rates_module, name, value)
    return tmp_path


def clock(stand_ins: StandIns, of: Rates) -> Callable[..., float]:
    """A clock that shows what a call takes on a machine with such rates: some time for nothing, and that of its rows.

    Two samples of each call, and all of the first rounds, take a thousand times as long.
    """
    numbers: dict[Callable[[], Any], int] = {}

    def call_us(group: Any, device: torch.device, call: Callable[[], Any], queued: bool) -> float:
        assert queued
        stand_ins.launched.clear()
        stand_ins.keeps = True
        call()
        stand_ins.keeps = False
        stand_ins.settle()
        variant, args = stand_ins.launched[-1]  # the first call of a kind may ask others before
        numbers[call] = numbers.get(call, 0) + 1
        slow = 1000 if numbers[call] <= WARM_UP_ROUNDS + 2 else 1
        return slow * (25.0 + args.num_tokens * us_of(variant, of, args.send_blocks))

    return call_us


def test_measured_calls(stand_ins: StandIns, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that shows what calls would take elsewhere, these rates are found, kept, and used from then on."""

    def make(num_sms: int | None = None) -> tl.Communicator:
        sizes = {"num_experts": 32, "hidden": 7168, "top_k": 8, "max_tokens_per_rank": 1024}
        return tl.Communicator(None, backend="nvlink", device="cpu", num_sms=num_sms, **sizes)

    monkeypatch.setattr(rates_module, "call_us", clock(stand_ins, SLOWER))
    before = make().describe()
    assert f"rates, of H200, as `tokenloom tune` has kept none here: {H200}" in before
    found = tl.tune.measure_rates(device="cpu")
    equal(found.rates, SLOWER)
    assert found.file is not None
    assert [str(file) for file in folder.iterdir()] == [found.file]
    assert kept_rates.find(found.machine) == found.rates
    assert found.machine.ranks_per_node == NUM_RANKS
    assert str(found) == f"rates of 4 ranks on {found.machine.device_name}: {found.rates}"
    after = make().describe()
    assert f"rates, measured here: {found.rates}" in after
    variant = DispatchVariant(make().plan, layout="expert", x_dtype=BF16)
    for rate, said in ((H200, before), (found.rates, after)):
        assert f"by expert {variant.best_blocks(64, rate)} of a dispatch" in said
    assert variant.best_blocks(64, H200) != variant.best_blocks(64, found.rates)


def test_what_a_busy_machine_shows(stand_ins: StandIns, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not kept."""
    monkeypatch.setattr(rates_module, "call_us", lambda *args, **options: 25.0)
    with pytest.raises(tl.ImplausibleRates, match="is 0"):
        tl.tune.measure_rates(device="cpu")
    assert list(folder.iterdir()) == []


def test_nothing_to_measure() -> None:
    with pytest.raises(tl.InvalidArgument, match="backend 'collective' chooses no SMs by rates"):
        tl.tune.measure_rates(device="cpu")


SAMPLES: Counter[int] = Counter()
"""By thread, which is a rank on the emulator."""


def still_clock(group: Any, device: torch.device, call: Callable[[], Any], queued: bool) -> float:
    SAMPLES[threading.get_ident()] += 1
    call()
    return 25.0


@on_ranks("hoppers")
def test_every_call_is_made(context: RankContext) -> None:
    """By kernels, with few blocks: what a clock that stands still shows is refused only when all calls are over."""
    group = None if context.device.type == "cpu" else context.group
    smaller = {"NUM_TOKENS": 96, "HIDDEN": 256, "TOP_K": 2, "EXPERTS_PER_RANK": 32, "ITERATIONS": 1, "LAYER_SMS": 3}
    SAMPLES.pop(threading.get_ident(), None)
    with (
        no_plan_is_small(),
        mock.patch.multiple(rates_module, call_us=still_clock, **smaller),
        pytest.raises(tl.ImplausibleRates, match="is 0"),
    ):
        tl.tune.measure_rates(group, device=context.device)
    assert SAMPLES[threading.get_ident()] == 7 * 2 * (WARM_UP_ROUNDS + 1)


@on_ranks("hoppers")
def test_on_gpus(context: RankContext) -> None:
    """The rates of these GPUs are plausible, and what communicators go by. The emulator takes no time for bytes."""
    if context.device.type == "cpu":
        return
    found = tl.tune.measure_rates(context.group, device=context.device)
    assert all(us > 0 for us in found.us.values())
    again = tl.Communicator(
        context.group, num_experts=8 * context.num_ranks, hidden=256, top_k=2, max_tokens_per_rank=64, backend="nvlink"
    )
    with again as comm:
        assert f"rates, measured here: {found.rates}" in comm.describe()


# -- the command ----------------------------------------------------------------------------------------------------

MEASURED = MeasuredRates(kept_rates.Machine("a GPU", 2, "1.2"), SLOWER, {"links": 0.1}, "/kept/here.rates")
WHY_NOT = "no rates are kept: send_us is 0.0"


@pytest.mark.parametrize(
    ("rates", "said", "succeeds"),
    [
        (MEASURED, "rates: kept in /kept/here.rates, where communicators find them", True),
        (replace(MEASURED, file=None), "rates: could not be kept", False),
        (WHY_NOT, WHY_NOT, False),
    ],
    ids=["kept", "nowhere to write", "implausible"],
)
def test_the_command(
    rates: MeasuredRates | str, said: str, succeeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the backend goes by rates, they are measured before strategies are; it fails where they are not kept."""
    plan = Plan(num_ranks=2, num_experts=8, hidden=128, top_k=2, max_tokens_per_rank=64)
    sample = {"with_gemm": [1.0], "alone": [1.0], "gradient": [1.0]}
    rows = make_rows([dict.fromkeys(CANDIDATES, sample)], dict.fromkeys(CANDIDATES, 1))
    setting = Setting("a GPU", 2, 1, "1.2", "2.0", "nvlink", 64, 128, 64, 2, 8, "bfloat16")
    profile = Profile(setting, plan.max_tokens_per_rank, 0.0, 1, rows, "/kept/there.choice")
    asked = []

    def run(function: Callable[..., Any], **options: Any) -> list[Any]:
        asked.append(function)
        return [rates if function is tune.rates_on_rank else profile]

    monkeypatch.setattr(tune.registry, "availability", lambda *args, **options: None)
    monkeypatch.setattr(tune.registry, "choose", lambda *args: ("nvlink", []))
    monkeypatch.setattr(Run, "ranks", lambda run_: nullcontext((SimpleNamespace(run=run), None)))
    console = Console(width=200, file=StringIO())
    here, shape = Run(console, 2, "cpu", [], tmp_path / "rows.json"), CallSizes(64, 128, 2, 8)
    options = {"intermediate": 64, "dtype": "bf16", "backend": "auto", "iterations": 1}
    assert tune.run_tune(here, shape, **options) == succeeds  # type: ignore[arg-type]
    assert asked == [tune.rates_on_rank, tune.profile_on_rank]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert said in text
    assert (str(SLOWER) in " ".join(text.split())) == isinstance(rates, MeasuredRates)
    found = json.loads((tmp_path / "rows.json").read_text())["setup"].get("rates")
    assert found == (None if isinstance(rates, str) else asdict(rates))


def test_a_rank_that_measures_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so in words, for the command goes on to strategies."""

    def measure(*args: Any, **options: Any) -> None:
        raise tl.ImplausibleRates("send_us", 0.0, 0.035, 0.56)

    monkeypatch.setattr(tune, "measure_rates", measure)
    context: Any = SimpleNamespace(group=None, device=None)
    assert tune.rates_on_rank(context).startswith(WHY_NOT)  # type: ignore[union-attr]
