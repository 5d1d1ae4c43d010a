"""Rank processes: results by rank, the culprit's own traceback, no hang and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tokenloom as tl
from tokenloom.runtime import processes
from tokenloom.runtime.processes import RankContext, RankFailed, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks, started as users start them; a test that makes one fail costs a start of both."""
    with mock.patch.object(processes.mp, "get_context", multiprocessing.get_context), RankPool(2) as made:
        yield made


def pids(pool: RankPool) -> list[int]:
    return pool.run(process_id)


def process_id(context: RankContext) -> int:
    return os.getpid()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- what works -------------------------------------------------------------------------------------------------


def test_results_by_rank(pool: RankPool) -> None:
    """Arguments arrive, results come back in the order of ranks, in processes of their own that are kept."""
    assert pool.run(describe, 1, word="b") == [(0, 2, "cpu", 1, "b", 1.0), (1, 2, "cpu", 1, "b", 1.0)]
    assert pool.run(describe, 1, word="b", ranks=1) == [(0, 1, "cpu", 1, "b", 0.0)]
    first = pids(pool)
    assert len({*first, os.getpid()}) == 3
    assert pids(pool) == first


def describe(context: RankContext, number: int, word: str) -> tuple[Any, ...]:
    total = torch.tensor(float(context.rank))
    dist.all_reduce(total, group=context.group)
    assert torch.get_num_threads() == 1
    return context.rank, context.num_ranks, context.device.type, number, word, total.item()


def test_slow_first_rank(pool: RankPool) -> None:
    """Results are by rank, not by who is done first."""
    assert pool.run(sleep_and_tell, {0: 0.3}) == [0, 1]


def sleep_and_tell(context: RankContext, delays: dict[int, float]) -> int:
    time.sleep(delays.get(context.rank, 0.0))
    return context.rank


def test_events(pool: RankPool) -> None:
    """Events arrive while the function runs, in the order in which each rank reports them."""
    events: list[tuple[int, int]] = []
    pool.run(report_some, on_event=events.append)
    for rank in range(2):
        assert [number for who, number in events if who == rank] == [0, 1, 2]
    pool.run(report_some)  # nobody has to listen


def report_some(context: RankContext) -> None:
    for number in range(3):
        context.report((context.rank, number))


def test_what_cannot_be_sent_is_refused_here(pool: RankPool) -> None:
    """A function that has no name for another process: an error at once, and the ranks stay."""
    before = pids(pool)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pool.run(lambda context: None)
    assert pids(pool) == before


def test_ctrl_c_is_the_parents(pool: RankPool) -> None:
    """The terminal sends SIGINT to all processes; ranks ignore it, the parent ends them."""
    before = pids(pool)
    for pid in before:
        os.kill(pid, signal.SIGINT)
    assert pids(pool) == before


def test_default_ranks() -> None:
    """On a machine without GPUs: CPU processes."""
    assert processes.default_ranks("cpu") == (processes.CPU_RANKS, "cpu")
    if not torch.cuda.is_available():
        assert processes.default_ranks() == (processes.CPU_RANKS, "cpu")


# -- what fails -------------------------------------------------------------------------------------------------


def test_own_traceback(pool: RankPool) -> None:
    """The rank at fault is reported, with its own traceback, not those that failed because of it."""
    before = pids(pool)
    with pytest.raises(RankFailed, match="rank 1 of 2 failed") as failed:
        pool.run(bad_ids_on_rank_1)
    assert failed.value.rank == 1
    assert "in bad_ids_on_rank_1" in failed.value.details
    assert "InvalidExpertId: topk_ids[0, 0] is 9" in failed.value.details
    assert "PeerError" not in str(failed.value)
    assert not any(is_alive(pid) for pid in before), "the processes of a failed run are ended"
    assert len(set(pids(pool)) | set(before)) == 4, "the next run starts new ones"


def bad_ids_on_rank_1(context: RankContext) -> None:
    comm = tl.Communicator(context.group, num_experts=4, hidden=2, top_k=1, max_tokens_per_rank=1)
    if context.rank == 1:
        time.sleep(0.2)  # the other one is first to wait, and then first to fail
    comm.dispatch(torch.ones(1, 2), torch.full((1, 1), 9 * context.rank))


def test_failure_while_another_hangs(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is reported soon, not when the other's time is up."""
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    pids(pool)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="SystemExit: not today") as failed:
        pool.run(exit_or_hang, limit_s=60.0)
    assert failed.value.rank == 1
    assert time.monotonic() - began < 10.0


def exit_or_hang(context: RankContext) -> None:
    if context.rank == 1:
        raise SystemExit("not today")
    time.sleep(100)


@pytest.mark.slow  # ranks are started anew
def test_hang(pool: RankPool) -> None:
    """Every rank's stack is reported, also of one that has something to say all the time."""
    before = pids(pool)
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] were not done within 1 s") as failed:
        pool.run(hang, limit_s=1.0, on_event=lambda _: time.sleep(0.01))
    for rank, name in enumerate(("hang_silently", "hang_busily")):
        assert f"--- rank {rank}" in failed.value.details
        assert f"in {name}" in failed.value.details
    assert not any(is_alive(pid) for pid in before)


def hang(context: RankContext) -> None:
    hang_silently() if context.rank == 0 else hang_busily(context)


def hang_silently() -> None:
    time.sleep(100)


def hang_busily(context: RankContext) -> None:
    while True:
        context.report("still here")


@pytest.mark.slow  # ranks are started anew
def test_result_that_cannot_be_sent(pool: RankPool) -> None:
    """The rank's failure, not a hang."""
    with pytest.raises(RankFailed, match="pickle") as failed:
        pool.run(return_lambda)
    assert failed.value.rank == 0


def return_lambda(context: RankContext) -> object:
    return (lambda: None) if context.rank == 0 else None


@pytest.mark.slow  # ranks are started anew
def test_death_between_runs(pool: RankPool) -> None:
    """A rank that was killed while idle is a failed rank of the next run, and the one after works."""
    before = pids(pool)
    os.kill(before[1], signal.SIGKILL)
    pool._processes[1].join()
    with pytest.raises(RankFailed, match="exit code -9") as failed:
        pids(pool)
    assert failed.value.rank == 1
    assert not is_alive(before[0])


@pytest.mark.slow  # ranks are started anew
def test_the_parent_gives_up(pool: RankPool) -> None:
    """What the parent raises while ranks work, Ctrl-C say, ends them and is raised."""
    before = pids(pool)
    folder = pool._folder
    assert folder is not None

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(report_and_hang, on_event=interrupt)
    assert not any(is_alive(pid) for pid in before)
    assert not Path(folder.name).exists()


def report_and_hang(context: RankContext) -> None:
    context.report("here")
    time.sleep(100)


@pytest.mark.slow  # ranks are started anew
def test_the_parent_is_killed() -> None:
    """A signal ends the process that started the ranks, and no more. They end with it, in the middle of a call."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    parent = context.Process(target=start_ranks_that_hang, args=(theirs,))
    parent.start()
    pids, folder = ours.recv()
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 30.0
    while not all(map(has_ended, pids)) or Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_ranks_that_hang(pipe: Connection) -> None:
    with RankPool(2) as pool:
        before = pids(pool)
        assert pool._folder is not None
        folder = pool._folder.name
        pool.run(report_and_hang, on_event=lambda _: pipe.send((before, folder)))


def has_ended(pid: int) -> bool:
    """Whether a process that nobody waits for has ended; it may stay as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow  # ranks are started anew
def test_close(pool: RankPool) -> None:
    """No process and no file is left; closing twice is fine; a closed pool can be used again."""
    before = pids(pool)
    folder = pool._folder
    assert folder is not None
    pool.close()
    pool.close()
    assert not any(is_alive(pid) for pid in before)
    assert not Path(folder.name).exists()
