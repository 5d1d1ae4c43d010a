"""Rates that were measured: their file, and that the ranks of a communicator go by the same ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends.large_plans import no_plan_is_small
from tests.support.cases import BF16, Case, make_comm, make_problem
from tests.support.nvlink_cases import round_trip
from tests.support.on_ranks import on_ranks
from tests.support.stand_ins import StandIns
from tokenloom.backends.peers import kept_rates
from tokenloom.backends.peers.kept_rates import Machine
from tokenloom.kernels.combine.launch import CombineVariant
from tokenloom.kernels.common import H200, Rates
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup

EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""
NUM_RANKS = 4
MACHINE = Machine("a GPU", NUM_RANKS, "1.2")
TWICE = replace(H200, link_gbytes_per_s=744.0)
SLOWER = Rates(50.0, 0.2, 14.0, 44.0, 70.0, 60.0, 165.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- the file -------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_found(folder: Path) -> None:
    """On this machine alone; the last ones count."""
    assert kept_rates.find(MACHINE) is None
    kept_rates.keep(MACHINE, SLOWER)
    file = kept_rates.keep(MACHINE, TWICE)
    assert list(folder.iterdir()) == [file]
    assert kept_rates.find(MACHINE) == TWICE
    for name, value in (("device_name", "another"), ("ranks_per_node", 8), ("tokenloom", "1.3")):
        assert kept_rates.find(replace(MACHINE, **{name: value})) is None


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut off": lambda text: text[: len(text) // 2],
    "another thing": lambda text: "[1, 2]",
    "another machine": lambda text: text.replace("a GPU", "another"),
    "an unknown rate": lambda text: text.replace("send_us", "send_ms"),
    "no number": lambda text: text.replace("744.0", '"fast"'),
    "implausible": lambda text: text.replace("744.0", "7440.0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file(damage: str, folder: Path) -> None:
    """Is named and ignored."""
    file = kept_rates.keep(MACHINE, TWICE)
    assert file is not None
    whole = file.read_text()
    file.write_text(DAMAGE[damage](whole))
    assert file.read_text() != whole
    with pytest.warns(UserWarning, match=f"{re.escape(str(file))} is damaged and ignored; run `tokenloom tune` again"):
        assert kept_rates.find(MACHINE) is None


def test_a_rate_that_the_file_lacks(folder: Path) -> None:
    """Is that of H200."""
    file = kept_rates.keep(MACHINE, TWICE)
    assert file is not None
    content = json.loads(file.read_text())
    del content["rates"]["send_us"]
    file.write_text(json.dumps(content))
    assert kept_rates.find(MACHINE) == TWICE


def test_nowhere_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert kept_rates.keep(MACHINE, TWICE) is None
    assert kept_rates.find(MACHINE) is None


# -- communicators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [None, TWICE, SLOWER], ids=["default", "twice", "slower"])
def test_calls_go_by_them(rates: Rates | None, folder: Path) -> None:
    """Their SMs, and how many of them send, in the arguments of their kernels and in words."""
    with StandIns(NUM_RANKS) as stand_ins, torch.no_grad():
        ranks = RankGroup(None)
        ranks.num_ranks = NUM_RANKS
        if rates is not None:
            kept_rates.keep(Machine.of(ranks), rates)
        sizes = {"num_experts": 32, "hidden": 7168, "top_k": 8, "max_tokens_per_rank": 1024}
        comm = tl.Communicator(None, backend="nvlink", device="cpu", **sizes)
        x, ids = torch.zeros(4, 7168, dtype=BF16), torch.zeros(4, 8, dtype=torch.int64)
        stand_ins.keeps = True
        routed = comm.dispatch(x, ids, torch.ones(4, 8), layout="expert", sizes="bounded", capacity=10_000)
        comm.combine(routed.tokens, routed)
        launched = stand_ins.launched
        said = comm.describe()
    (dispatch, sent), (combine, back) = (each for each in launched if hasattr(each[1], "send_blocks"))
    assert (type(dispatch), type(combine)) == (DispatchVariant, CombineVariant)
    used = rates or H200
    blocks = [each.best_blocks(64, used) for each in (dispatch, combine)]
    senders = [each.sending_blocks(of, used) for each, of in zip((dispatch, combine), blocks, strict=True)]
    assert [sent.send_blocks, back.send_blocks] == blocks
    assert [sent.peer_blocks, back.push_blocks] == senders
    for begin, (there, home) in (("SMs of a kernel: ", blocks), ("of these send rows: by token all", senders)):
        assert re.search(rf"{begin}.* by expert {there} of a dispatch .* and {home} of a combine", said)
    origin = "of H200, as `tokenloom tune` has kept none here" if rates is None else "measured here"
    assert f"rates, {origin}: {used}" in said


REAL_GATHER = RankGroup.all_gather_object
CASE = Case("rates", "", tokens=(60, 3, 0, 31), spare=2, experts_per_rank=2, hidden=64, top_k=3, unused=0.1)


@contextmanager
def ranks_have(by_rank: Sequence[Rates | None]) -> Iterator[None]:
    """As if the disk of each rank had another file, or none."""

    def gather(ranks: RankGroup, value: Any, phase: str) -> list[Any]:
        own = by_rank[min(ranks.rank, len(by_rank) - 1)]
        return REAL_GATHER(ranks, (value[0], own) if phase == "counting SMs" else value, phase)

    with mock.patch.object(RankGroup, "all_gather_object", gather):
        yield


@on_ranks("hoppers")
@pytest.mark.parametrize("num_sms", [None, 3])
@pytest.mark.parametrize(
    "by_rank", [(None, SLOWER), (SLOWER, None), (SLOWER, TWICE)], ids=["rank 0 none", "others none", "different"]
)
def test_ranks_that_see_different_disks(
    context: RankContext, by_rank: Sequence[Rates | None], num_sms: int | None
) -> None:
    """All go by those of rank 0: each waits for as many blocks of others as it has itself."""
    problem = make_problem(CASE, context.num_ranks)
    with no_plan_is_small(), ranks_have(by_rank), make_comm(context, "nvlink", problem.plan, num_sms=num_sms) as comm:
        assert f": {by_rank[0] or H200}" in comm.describe()
        round_trip(context, comm, problem, "expert")
        round_trip(context, comm, problem, "token")
