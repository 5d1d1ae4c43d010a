"""Groups that go on without ranks that users mask."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.runtime.test_rank_group import (
    ALL,
    NOTICE_S,
    PAIR,
    TIMEOUT_S,
    call,
    on_group,
    open_call,
    send_rows,
)
from tests.support.patience import done, when_done
from tokenloom.errors import InvalidArgument
from tokenloom.runtime import waiting
from tokenloom.runtime.links import Links
from tokenloom.runtime.membership import AwaitedNotes
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.store_notes import poll

LONG_S = 30.0
"""A deadline that must not pass."""


def together(ranks: RankGroup, there: Sequence[int]) -> None:
    """All collectives, with their results: ranks that are not there give zeros, or None."""
    me, num_ranks = ranks.rank, ranks.num_ranks
    gathered = ranks.all_gather(torch.tensor([me + 1, 7]), "test", opens=True)
    assert gathered.tolist() == [[r + 1, 7] if r in there else [0, 0] for r in range(num_ranks)]
    objects = ranks.all_gather_object({"rank": me, "long": "x" * 100 * me}, "test")
    assert [each and each["rank"] for each in objects] == [r if r in there else None for r in range(num_ranks)]
    assert ranks.all_reduce_sums([torch.tensor([[me + 1.0]])], "test")[0].tolist() == [[sum(r + 1.0 for r in there)]]
    # Rank r sends r rows to rank 0, r + 1 to rank 1, ..., as many as if all took part.
    counts = [me + r for r in range(num_ranks)]
    rows = torch.cat([torch.full((count, 3), 10.0 * me + r) for r, count in enumerate(counts)])
    transfer = ranks.start_all_to_all(rows.to(torch.bfloat16), counts, counts, "test")
    want = [torch.full((count, 3), 10.0 * r + me if r in there else 0.0) for r, count in enumerate(counts)]
    assert torch.equal(transfer.wait().float(), torch.cat(want))
    assert transfer.lost == set(range(num_ranks)) - set(there)
    assert transfer.wait().shape == (sum(counts), 3), "waiting again costs nothing"


@on_group(ALL)
@pytest.mark.parametrize("masked", [[3], [0, 2], [0, 1, 3]], ids=["one", "the first too", "all but one"])
def test_masked(ranks: RankGroup, masked: list[int]) -> None:
    """Those that stay need nothing of the masked ones, which do nothing at all; more of them may follow."""
    together(ranks, ALL)
    for number, gone in enumerate(masked, 1):
        if ranks.rank == gone:
            return
        ranks.mask(masked[number - 1 : number])
        assert ranks.masked == set(masked[:number])
        assert ranks.why_masked() == dict.fromkeys(sorted(masked[:number]), "mask_ranks")
        together(ranks, [rank for rank in ALL if rank not in masked[:number]])
    ranks.close()


@on_group(ALL)
@pytest.mark.parametrize("late", [False, True], ids=["masked", "for being late"])
def test_nobody_goes_on_before_all_are_connected(ranks: RankGroup, late: bool) -> None:
    """In gloo a rank that closes its connections at once fails those that still connect to others."""
    connect = Links.__init__

    def connect_slowly(links: Links, *arguments: Any) -> None:
        connect(links, *arguments)
        time.sleep(0.3)
        ranks.notes.post("connected", "yes")

    if ranks.rank == 3 and not late:
        return
    with mock.patch.object(Links, "__init__", connect_slowly) if ranks.rank == 2 else nullcontext():
        if late:
            ranks.mask_late()
        else:
            ranks.mask([3])
    assert ranks.notes.read("connected", 2) == "yes"
    ranks.close()


@on_group(PAIR)
def test_masking_again_changes_nothing(ranks: RankGroup) -> None:
    """Nor does masking nobody."""
    ranks.mask([])
    together(ranks, [0, 1])
    if ranks.rank == 0:
        for _ in range(2):
            ranks.mask({1})
            together(ranks, [0])


@on_group(ALL, timeout_s=LONG_S)
@pytest.mark.parametrize("late", [False, True], ids=["raise", "mask"])
def test_a_call_that_is_open_is_finished_as_it_began(ranks: RankGroup, late: bool) -> None:
    """A mask counts from the next call on, so what a masked rank sends later still arrives."""
    if late:
        ranks.mask_late()
    together(ranks, ALL)
    rows = torch.full((4, 1), ranks.rank)
    for gone, there in ((3, [0, 1, 2, 3]), (2, [0, 1, 2])):
        time.sleep(0.3 if ranks.rank == gone else 0.0)
        transfer = ranks.start_all_to_all(rows, [1] * 4, [1] * 4, "test")
        if ranks.rank != gone:
            ranks.mask([gone])
        assert transfer.wait().flatten().tolist() == [rank if rank in there else 0 for rank in ALL]
        if ranks.rank == gone:
            return
        together(ranks, [rank for rank in there if rank != gone])


@on_group(ALL)
@pytest.mark.parametrize(
    ("lists", "seen"),
    [
        ([[3], [3], [1, 3], None], ["[1, 3]", "[1, 3]", "[3]", None]),
        ([[3], [], [3], []], ["[]", "[3]", "[]", "[3]"]),
        ([[2, 3], [2, 3], [], []], [None, None, "[2, 3]", "[2, 3]"]),
        ([[3], [3], [3], [3]], [None, None, None, "rank 3 cannot mask itself"]),
        ([[3], [3], [3, 9], None], ["[3, 9]", "[3, 9]", "mask_ranks got rank 9, expected ranks 0..3", None]),
        ([None, ["3"], [3], [3]], [None, "mask_ranks got rank '3'", "", "rank 3 cannot mask itself"]),
        ([[True], None, [1], [1]], ["mask_ranks got rank True", None, "[True]", "[True]"]),
    ],
    ids=["another list", "none", "two camps", "itself", "no rank", "no number", "a boolean"],
)
def test_lists_that_differ(ranks: RankGroup, lists: list[Any], seen: list[str | None]) -> None:
    """Who waits for a rank that passes another list is told which rank and which list, and nothing changes. A rank
    that all others mask is not asked."""
    mine, want = lists[ranks.rank], seen[ranks.rank]
    if mine is None or want == "":
        return
    if want is None:
        ranks.mask(mine)
        together(ranks, [rank for rank in ALL if rank not in mine])
        return
    if not want.startswith("["):
        with pytest.raises(InvalidArgument, match=want):
            ranks.mask(mine)
    else:
        with pytest.raises(tl.PlanMismatch) as mismatch:
            ranks.mask(mine)
        rank = mismatch.value.rank
        assert str(lists[rank]) == want
        text = f"rank {rank} has mask_ranks={want}, rank {ranks.rank} has mask_ranks={mine};"
        assert str(mismatch.value).startswith(text)
    assert ranks.masked == set()
    ranks.require_alive()


@on_group(ALL)
def test_after_lists_that_differ(ranks: RankGroup) -> None:
    """All ranks go on as before, and may ask again."""
    with pytest.raises(tl.PlanMismatch):
        ranks.mask([3] if ranks.rank == 0 else [])
    together(ranks, ALL)
    if ranks.rank != 3:
        ranks.mask([3])
        together(ranks, [0, 1, 2])


@on_group(ALL, timeout_s=LONG_S)
def test_a_rank_that_has_closed(ranks: RankGroup) -> None:
    """It is masked, also where ranks that ask for that look for each other long enough to see it has left."""
    together(ranks, ALL)
    if ranks.rank == 3:
        ranks.close()
        done(ranks)
        return
    when_done(ranks, [3])
    if ranks.rank == 1:
        time.sleep(2.5 * waiting.LOOK_EVERY_S)
    ranks.mask([3])
    together(ranks, [0, 1, 2])


@on_group(ALL, open_timeout_s=LONG_S, timeout_s=LONG_S)
@pytest.mark.parametrize("late", [False, True], ids=["raise", "mask"])
def test_a_rank_that_asks_for_no_mask(ranks: RankGroup, late: bool) -> None:
    """It waits in a collective that the others do not start; all are told of the difference within seconds. Afterwards
    that rank is out of step."""
    if late:
        ranks.mask_late()
    together(ranks, ALL)
    began = time.monotonic()
    if ranks.rank == 1:
        with pytest.raises(tl.PlanMismatch, match=r"rank [02] has mask_ranks=\[3\], rank 1 has mask_ranks=nothing"):
            open_call(ranks)
        with pytest.raises(tl.CommunicatorBroken, match="mask_ranks"):
            open_call(ranks)
    elif ranks.rank != 3:
        with pytest.raises(tl.PlanMismatch, match=r"rank 1 has mask_ranks=nothing, rank \d has mask_ranks=\[3\]"):
            ranks.mask([3])
        ranks.require_alive()
    assert time.monotonic() - began < waiting.LOOK_EVERY_S + NOTICE_S


@on_group(ALL, open_timeout_s=LONG_S, timeout_s=LONG_S)
@pytest.mark.parametrize("late", [False, True], ids=["raise", "mask"])
def test_what_a_rank_says_before_it_gives_up(ranks: RankGroup, late: bool) -> None:
    """It is heard, also by a rank that looked for it just before, and then finds out that the other gave up."""
    if late:
        ranks.mask_late()
    together(ranks, ALL)
    look = AwaitedNotes.wait
    looks_before = iter([True])

    def wait(notes: AwaitedNotes, seconds: float) -> bool:
        if next(looks_before, False):
            assert poll(ranks.notes.who_gave_up, LONG_S)
            return False
        return look(notes, seconds)

    if ranks.rank == 1:
        with pytest.raises(tl.PlanMismatch, match="rank 1 has mask_ranks=nothing"):
            open_call(ranks)
    elif ranks.rank == 2:
        with (
            mock.patch.object(AwaitedNotes, "wait", wait),
            pytest.raises(tl.PlanMismatch, match=r"rank 1 has mask_ranks=nothing, rank 2 has mask_ranks=\[3\]"),
        ):
            ranks.mask([3])
    elif ranks.rank == 0:
        with pytest.raises(tl.PlanMismatch, match="rank 1 has mask_ranks=nothing"):
            ranks.mask([3])
    else:
        assert poll(ranks.notes.who_gave_up, LONG_S), "it is there until then: nobody loses it"


@on_group(ALL, timeout_s=LONG_S)
@pytest.mark.slow
def test_a_rank_that_is_slow_is_not_out_of_step(ranks: RankGroup) -> None:
    """It may still wait in an earlier collective, for one that is slow itself, when others ask for a mask."""
    together(ranks, ALL)
    for gone, there in ((3, [0, 1, 2]), (2, [0, 1])):
        # Only rank 1 waits for something: for a row of rank 2.
        if ranks.rank == 2:
            time.sleep(3 * waiting.LOOK_EVERY_S)
        sends, receives = [0] * 4, [0] * 4
        sends[1], receives[2] = int(ranks.rank == 2), int(ranks.rank == 1)
        if ranks.rank != 3 or gone == 3:
            ranks.start_all_to_all(torch.zeros(sum(sends), 1), sends, receives, "test").wait()
        if ranks.rank == gone:
            return
        ranks.mask([gone])
        together(ranks, there)


@on_group(ALL, open_timeout_s=TIMEOUT_S, late=[2])
@pytest.mark.slow
def test_a_rank_that_does_not_ask(ranks: RankGroup) -> None:
    """Where nobody is masked for being late, that is an error as in any collective."""
    if ranks.rank == 2:
        when_done(ranks, [0, 1])
    elif ranks.rank != 3:
        with pytest.raises(tl.PeerTimeout, match="mask_ranks") as timeout:
            ranks.mask([3])
        assert timeout.value.peers == (2,)
        with pytest.raises(tl.CommunicatorBroken):
            open_call(ranks)
        done(ranks)


@on_group(ALL, late=[2])
@pytest.mark.slow
def test_missing_while_others_are_masked(ranks: RankGroup) -> None:
    """A rank that does not come is named, and no masked one, whatever those say on their way out."""
    if ranks.rank == 3:
        when_done(ranks, [0, 1, 2], "masked")
        ranks.notes.give_up("the test")
        ranks.notes.fail("the test")
        done(ranks, "on the way out")
        ranks.close()
        return
    ranks.mask([3])
    done(ranks, "masked")
    when_done(ranks, [3], "on the way out")
    together(ranks, [0, 1, 2])
    if ranks.rank == 2:
        when_done(ranks, [0, 1])
        return
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout, match=rf"no answer within {TIMEOUT_S:g} s|rank \d gave up") as timeout:
        send_rows(ranks)
    assert timeout.value.peers == (2,)
    assert time.monotonic() - began < TIMEOUT_S + NOTICE_S
    done(ranks)


def test_alone() -> None:
    """A rank alone has nobody to mask, and nobody is late."""
    alone = RankGroup(None)
    alone.mask([])
    alone.mask_late()
    assert alone.masked == set()
    for bad in ([0], [1]):
        with pytest.raises(InvalidArgument, match=r"cannot mask itself|expected ranks 0\.\.0"):
            alone.mask(bad)
    together(alone, [0])


@on_group(PAIR)
def test_where_ranks_cannot_be_left_out(ranks: RankGroup) -> None:
    """Over NCCL a dead rank takes the others with it; without a store nobody can agree."""
    with mock.patch.object(RankGroup, "transport", "nccl"):
        for use in (lambda: ranks.mask([1]), ranks.mask_late):
            with pytest.raises(InvalidArgument, match=r"cannot be masked over nccl.*gloo group with device='cpu'"):
                use()
    with mock.patch.object(ranks.notes, "_store", None), pytest.raises(InvalidArgument, match="cannot be masked"):
        ranks.mask([1])
    call(ranks)
