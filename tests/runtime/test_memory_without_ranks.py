"""Symmetric memory of groups that have masked ranks: those that are left share it, and free it without the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from unittest import mock

import pytest

import tokenloom as tl
from tests.runtime.fake_driver import fake_driver
from tests.runtime.test_symmetric_memory import LAYOUT, PATIENCE_S
from tests.support.on_ranks import on_ranks
from tests.support.patience import done, when_done
from tokenloom.runtime import symmetric_memory
from tokenloom.runtime.deferred_release import release_dropped
from tokenloom.runtime.processes import RankContext, RankFailed, RankPool
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import SymmetricBuffer, close_together


@on_ranks("four")
@pytest.mark.parametrize("gone", [[3], [0, 2], [0, 1, 2]], ids=["one", "the first too", "all but one"])
def test_memory_without_ranks(context: RankContext, gone: list[int]) -> None:
    """Memory from before the mask stays until the masked ranks let go of it: they may be alive, and write. Memory made
    after it is nobody's but theirs that are left, and goes when these let go."""
    ranks = RankGroup(context.group, timeout_s=PATIENCE_S)
    left = {*range(4)} - {*gone}
    with fake_driver() as driver:
        before = SymmetricBuffer(LAYOUT, ranks)
        if ranks.rank in gone:
            when_done(ranks, sorted(left))
            close_together([before])
        else:
            ranks.mask(gone)
            after = SymmetricBuffer(LAYOUT, ranks)
            assert after.others == left - {ranks.rank}
            assert all(after.addresses[rank] == after.addresses[ranks.rank] for rank in gone), (
                "kernels find no others'"
            )
            assert len(driver.mapped) == 3 + len(left) - 1
            with mock.patch.object(symmetric_memory, "CLOSE_TOGETHER_S", PATIENCE_S):
                close_together([after])
            assert len(driver.mapped) == 3
            assert len(driver.memory) == 1
            close_together([before])
            assert not driver.mapped
            assert len(driver.memory) == 1, "a masked rank may still write there"
            done(ranks)
        deadline = time.monotonic() + PATIENCE_S
        while not driver.is_clean and time.monotonic() < deadline:
            release_dropped()
            time.sleep(0.01)
        assert driver.is_clean
    ranks.close()


@on_ranks("four")
@pytest.mark.slow
@pytest.mark.parametrize("begin", [[0], [0, 2]], ids=["one", "two"])
def test_memory_that_not_all_begin(context: RankContext, begin: list[int]) -> None:
    """Some ranks begin to make memory; the others have lost somebody before, and will not. What was begun is given
    back, and behind it all mean the same collectives and the same memory."""
    ranks = RankGroup(context.group, timeout_s=5.0)
    ranks.mask_late()
    with fake_driver() as driver:
        for losses in range(2):
            if ranks.rank in begin:
                with ranks.in_vain_after(losses), pytest.raises(tl.PeerTimeout, match="the others go on without"):
                    SymmetricBuffer(LAYOUT, ranks)
            else:
                ranks.lose_absent("test", [])  # nobody is, and all hear of that where they wait
            assert (ranks.num_losses, ranks.masked) == (losses + 1, frozenset())
            ranks.say_progress(ranks.rank)
            ranks.settle_losses("test", f"ended/{losses}")
            assert ranks.all_gather_object(f"rank {ranks.rank}", "test") == [f"rank {rank}" for rank in range(4)]
            buffer = SymmetricBuffer(LAYOUT, ranks)
            assert buffer.others == {*range(4)} - {ranks.rank}
            with mock.patch.object(symmetric_memory, "CLOSE_TOGETHER_S", PATIENCE_S):
                close_together([buffer])
            assert driver.is_clean, "of what was begun too"
    ranks.close()


@pytest.mark.slow
def test_memory_that_a_process_ends_before() -> None:
    """The others have begun to make it, and give it back: nobody writes to it whose process has ended."""
    clean: list[bool] = []
    with RankPool(3) as pool, pytest.raises(RankFailed, match="exit code 7"):
        pool.run(check_ends_before, "process", on_event=clean.append)
    assert clean == [True, True]


def test_memory_that_a_rank_leaves_before(pools: Callable[[str], RankPool]) -> None:
    """Nor does a rank that has closed its communicator before."""
    clean: list[bool] = []
    pools("cpu").run(check_ends_before, "communicator", ranks=3, on_event=clean.append)
    assert clean == [True, True]


def check_ends_before(context: RankContext, what: str) -> None:
    ranks = RankGroup(context.group, timeout_s=5.0)
    ranks.mask_late()
    with fake_driver() as driver:
        first = SymmetricBuffer(LAYOUT, ranks)
        if ranks.rank == 2:
            if what == "process":
                os._exit(7)
            first.close()
            ranks.close()
            return
        with ranks.in_vain_after(0), pytest.raises(tl.PeerTimeout, match="the others go on without"):
            SymmetricBuffer(LAYOUT, ranks)
        ranks.settle_losses("test", "ended/0")
        first.close()
        deadline = time.monotonic() + PATIENCE_S
        while not driver.is_clean and time.monotonic() < deadline:
            release_dropped()
            time.sleep(0.01)
        context.report(driver.is_clean)
    ranks.close()
