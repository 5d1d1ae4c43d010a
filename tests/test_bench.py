"""tokenloom bench: the bytes it counts, the numbers it makes of times, what rows say of their setup."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Ranks
from tokenloom.bench import cases, rows, setup, traffic
from tokenloom.bench.comm import measure_on_rank
from tokenloom.launch import RankContext
from tokenloom.plan import Plan

SMALL = next(case for case in cases.CASES if case.name == "small")


def draw_ids(plan: Plan, seed: int) -> list[torch.Tensor]:
    """[T, K] of each rank: unused places, repeated experts, another number of tokens everywhere, none on rank 1."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = torch.randint(1, plan.max_tokens_per_rank, (plan.num_ranks,), generator=generator)
    num_tokens[1:2] = 0
    return [torch.randint(-1, plan.num_experts, (t, plan.top_k), generator=generator) for t in num_tokens.tolist()]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_traffic_is_that_of_a_brute_force_count(num_ranks: int, dtype: str) -> None:
    """Route by route, with a set of what has crossed already: a token goes to a rank once, and its sum comes back."""
    plan = Plan(num_ranks, 8, 256, 3, 50)
    ids = draw_ids(plan, seed=num_ranks)
    crossed = set()
    for source, tokens in enumerate(ids):
        for token, experts in enumerate(tokens.tolist()):
            crossed |= {(source, token, expert // plan.experts_per_rank) for expert in experts if expert >= 0}
    # By hand for hidden 256 and top-3: 256 values of 2 bytes, or of 1 and two scales of 4; 3 ids and 3 weights of 4.
    row_bytes = {"bf16": 512 + 24, "fp8": 256 + 8 + 24}[dtype]
    sent, received = [0] * num_ranks, [0] * num_ranks
    for source, _, rank in crossed:
        sent[source] += row_bytes if rank != source else 0
        received[rank] += row_bytes
    counted = traffic.rows_between(plan, ids)
    assert traffic.dispatch_traffic(plan, counted, dtype) == traffic.Traffic(max(sent), max(received))

    home_bytes = {"bf16": 512, "fp8": 256}[dtype]
    sent, received = [0] * num_ranks, [0] * num_ranks
    for source, _, rank in crossed:
        sent[rank] += home_bytes if rank != source else 0
        received[source] += home_bytes
    assert traffic.combine_traffic(plan, counted, dtype) == traffic.Traffic(max(sent), max(received))


def bytes_sent_on_rank(context: RankContext, layout: Any, dtype: str) -> list[int]:
    """Bytes that this rank really gives to all_to_all_single for other ranks in one iteration, call by call."""
    sent: list[int] = []
    real = dist.all_to_all_single

    def counting(
        output: torch.Tensor, given: torch.Tensor, out_splits: Any, in_splits: list[int], **kwargs: Any
    ) -> Any:
        row_bytes = given[:1].nbytes
        sent.append(sum(n for rank, n in enumerate(in_splits) if rank != context.rank) * row_bytes)
        return real(output, given, out_splits, in_splits, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counting):
        measure_on_rank(context, SMALL, "collective", layout, dtype, 0, 1)
    return sent


@pytest.mark.parametrize("layout", SMALL.layouts)
@pytest.mark.parametrize("dtype", SMALL.dtypes)
def test_traffic_is_what_the_backend_sends(ranks: Ranks, layout: str, dtype: str) -> None:
    """Physical bytes are those that cross, not those of a formula: counted at the collective itself."""
    if SMALL.num_experts % ranks.num_ranks:
        pytest.skip(f"{SMALL.num_experts} experts do not spread over {ranks.num_ranks} ranks")
    by_rank = ranks.run(bytes_sent_on_rank, layout, dtype)
    plan = SMALL.plan(ranks.num_ranks)
    counted = traffic.rows_between(plan, [SMALL.topk_ids(rank) for rank in range(ranks.num_ranks)])
    dispatched = [sum(calls[:2]) for calls in by_rank]  # metadata and payload
    assert max(dispatched) == traffic.dispatch_traffic(plan, counted, dtype).physical_bytes
    came_home = [calls[2:] for calls in by_rank]
    if dtype == "fp8":
        assert came_home == [[]] * ranks.num_ranks
    else:
        assert max(map(sum, came_home)) == traffic.combine_traffic(plan, counted, dtype).physical_bytes


def test_times_become_a_row() -> None:
    """By hand: the slowest rank of each iteration counts, and percentiles are values that were measured."""
    times = [[10.0, 50.0, 10.0, 10.0], [20.0, 20.0, 40.0, 30.0]]  # slowest: 20, 50, 40, 30
    where = {
        "backend": "collective",
        "layout": "token",
        "num_ranks": 2,
        "num_tokens": 64,
        "hidden": 256,
        "top_k": 2,
        "dtype": "bf16",
    }
    row = rows.make_row("dispatch", times, traffic.Traffic(physical_bytes=60_000, logical_bytes=90_000), where)
    assert row.name == "dispatch/collective/token/ep2/t64/h256/k2/bf16"
    assert (row.p50_us, row.p99_us, row.slowest_rank) == (30.0, 50.0, 1)
    assert row.physical_gbytes_per_s == pytest.approx(60e3 / 30e-6 / 1e9)
    assert row.logical_gbytes_per_s == pytest.approx(90e3 / 30e-6 / 1e9)
    assert row.setup == where | {"physical_bytes": 60_000, "logical_bytes": 90_000}


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_cases_are_sound(case: cases.Case) -> None:
    """Each spreads over the usual numbers of ranks, takes FP8, and routes each token to different experts."""
    for num_ranks in (1, 2, 4, 8):
        case.plan(num_ranks)
    assert case.hidden % 128 == 0
    ids = case.topk_ids(0)
    assert ids.shape == (case.num_tokens, case.top_k)
    assert all(len(set(experts)) == case.top_k for experts in ids.tolist())
    assert torch.equal(ids, case.topk_ids(0)), "rows can be repeated"
    assert not torch.equal(ids, case.topk_ids(1)), "ranks route by themselves"


def test_default_cases_fit_the_device() -> None:
    """A laptop is not given the shapes of a cluster, nor the other way round; names come first."""
    assert {case.name for case in cases.cases_for([], "cpu")} == {"small", "medium"}
    assert {case.name for case in cases.cases_for([], "cuda")} == {"prefill", "decode"}
    assert [case.name for case in cases.cases_for(["decode"], "cpu")] == ["decode"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_that_of_our_own_checkout(tmp_path: Path) -> None:
    """Not that of a project which installed tokenloom below its own checkout; and changes since are told."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "__init__.py").write_text("")
    assert setup.commit(tmp_path) is None, "no checkout at all"
    git("init", "-q")
    (tmp_path / "other.py").write_text("")
    git("add", "other.py")
    git("commit", "-q", "-m", "other")
    assert setup.commit(tmp_path) is None, "a checkout of something else"
    git("add", "__init__.py")
    git("commit", "-q", "-m", "ours")
    assert setup.commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "__init__.py").write_text("changed = True\n")
    assert setup.commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
