"""Ranks that were masked come back."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.runtime.test_masked_ranks import together
from tests.runtime.test_rank_group import ALL, PAIR, TIMEOUT_S, on_group, open_call
from tests.support.patience import done, when_done
from tokenloom.errors import InvalidArgument
from tokenloom.runtime.links import Links
from tokenloom.runtime.rank_group import RankGroup


def comes_back(ranks: RankGroup, masks_late: bool = False, **terms: str) -> RankGroup:
    """As the rank of a group that the others have masked."""
    again = RankGroup(ranks.process_group, timeout_s=5.0, open_timeout_s=10.0, rejoins=True)
    again.terms = terms
    again.rejoin(masks_late)
    return again


@on_group(ALL, timeout_s=5.0)
@pytest.mark.parametrize("late", [False, True], ids=["raise", "mask"])
def test_back_again(ranks: RankGroup, late: bool) -> None:
    """After a mask is taken back all go on as if there had been none; a mask may follow, and be taken back again."""
    if late:
        ranks.mask_late()
    together(ranks, ALL)
    first = ranks
    for there in ([0, 1, 2], [3], [0, 1, 2]):
        others = [rank for rank in ALL if rank not in there]
        if ranks.rank in there:
            ranks.mask(others)
            together(ranks, there)
            ranks.unmask(others)
        else:
            ranks = comes_back(ranks, late)
        if ranks is not first:  # whoever holds the old one disturbs nobody
            first.notes.give_up("the test")
        assert ranks.masked == set()
        together(ranks, ALL)
    if ranks is not first:
        first.close()
    together(ranks, ALL)
    assert len(set(ranks.all_gather(torch.tensor([ranks.step]), "test").flatten().tolist())) == 1


@on_group(ALL, timeout_s=2.0, late=[3])
@pytest.mark.slow
def test_back_one_by_one(ranks: RankGroup) -> None:
    """Some come back while others stay away; a late rank comes back as well."""
    ranks.mask_late()
    together(ranks, ALL)
    if ranks.rank == 1:
        ranks = comes_back(ranks, True)
        together(ranks, [0, 1, 2])
        ranks.unmask([3])
    elif ranks.rank == 3:
        when_done(ranks, [0, 2])
        with pytest.raises(tl.CommunicatorBroken, match="have masked rank 3"):
            open_call(ranks)
        ranks = comes_back(ranks, True)
    else:
        ranks.mask([1])
        open_call(ranks)
        assert ranks.masked == {1, 3}
        done(ranks)
        ranks.unmask([1])
        together(ranks, [0, 1, 2])
        ranks.unmask([3])
    together(ranks, ALL)


@on_group(ALL, open_timeout_s=TIMEOUT_S)
def test_who_does_not_come_back(ranks: RankGroup) -> None:
    """The others say so, all alike, and go on without it."""
    if ranks.rank > 1:
        return
    ranks.mask([2, 3])
    with pytest.raises(tl.PeerTimeout, match="no communicator was made there with rejoin=True within 1 s") as timeout:
        ranks.unmask([2])
    assert timeout.value.peers == (2,)
    assert ranks.masked == {2, 3}
    together(ranks, [0, 1])


@on_group(PAIR)
def test_who_comes_back_different(ranks: RankGroup) -> None:
    """What all ranks agreed on binds it too."""
    if ranks.rank == 0:
        ranks.terms = {"hidden": "8"}
        ranks.mask([1])
        with pytest.raises(tl.PlanMismatch, match="rank 1 has hidden=16, rank 0 has hidden=8"):
            ranks.unmask([1])
        together(ranks, [0])
        ranks.unmask([1])
        together(ranks, [0, 1])
        return
    with pytest.raises(tl.PlanMismatch, match="rank 1 has hidden=16, rank 0 has hidden=8"):
        comes_back(ranks, hidden="16")
    together(comes_back(ranks, hidden="8"), [0, 1])


@on_group(ALL)
@pytest.mark.slow
def test_who_cannot_connect(ranks: RankGroup) -> None:
    """All hear of it, and the others go on without that rank."""
    if ranks.rank == 3:
        with (
            mock.patch.object(Links, "__init__", side_effect=RuntimeError("no route to host")),
            pytest.raises(tl.PeerTimeout, match="no route to host"),
        ):
            comes_back(ranks)
        return
    ranks.mask([3])
    with pytest.raises(tl.PeerTimeout, match="not all ranks could connect"):
        ranks.unmask([3])
    assert ranks.masked == {3}
    together(ranks, [0, 1, 2])


@on_group(PAIR)
@pytest.mark.slow
def test_nobody_takes_a_rank_back(ranks: RankGroup) -> None:
    """It does not wait for ever, and does not stand in the way of the next that tries."""
    if ranks.rank == 0:
        ranks.mask([1])
        time.sleep(2.0)
        ranks.unmask([1])
    else:
        again = RankGroup(ranks.process_group, open_timeout_s=0.5, rejoins=True)
        with pytest.raises(tl.PeerTimeout, match=r"nobody called unmask_ranks\(\[1\]\) within 0.5 s"):
            again.rejoin(False)
        ranks = comes_back(ranks)
    together(ranks, [0, 1])


@on_group(ALL)
def test_wrong_lists(ranks: RankGroup) -> None:
    """Ranks that are not masked cannot be taken back, which all ranks say alike; lists that differ are told."""
    if ranks.rank == 3:
        return
    ranks.mask([3])
    with pytest.raises(InvalidArgument, match=r"unmask_ranks got rank 1, which is not masked: \[3\] are") as error:
        ranks.unmask([1, 3])
    assert error.value.known_to_all
    with pytest.raises(tl.PlanMismatch, match=r"rank \d has (un)?mask_ranks=(nothing|\[3\])"):
        ranks.unmask([3]) if ranks.rank else ranks.mask([3])
    with pytest.raises(tl.PlanMismatch, match=r"rank \d has unmask_ranks=\[.*\], rank \d has unmask_ranks=\[.*\]"):
        ranks.unmask([3] if ranks.rank else [])
    together(ranks, [0, 1, 2])
