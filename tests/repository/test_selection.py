"""What CI leaves out of a test's many parameters shows nothing that the rest does not."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from tests.support.slow import left_out, mostly_slow

GRID = list(product("abc", range(4), (True, False)))


def values(thing: tuple[object, ...]) -> list[tuple[int, object]]:
    return list(enumerate(thing))


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("quick", [[], GRID[:1], GRID[::5]], ids=len)
def test_each_value_is_shown_so_often(times: int, quick: list[tuple[object, ...]]) -> None:
    """In few of all combinations, and always in the same ones."""
    out = left_out(GRID, values, quick, times)
    kept = [thing for thing in GRID if thing not in out]
    assert set(quick) <= set(kept)
    shown = Counter(value for thing in kept for value in values(thing))
    assert shown.keys() == {value for thing in GRID for value in values(thing)}
    assert min(shown.values()) >= times
    assert len(kept) <= 4 * times + len(quick), "no more than values of the longest parameter need"
    assert out == left_out(GRID, values, quick, times)


def test_what_alone_shows_something_stays() -> None:
    """However often it is wanted; what shows nothing goes."""
    shows = {"one": "a", "other": "b", "both": "ab", "none": ""}
    assert left_out(shows, shows.__getitem__, []) == ["one", "other", "none"]
    assert left_out(shows, shows.__getitem__, [], times=2) == ["none"]
    assert left_out(shows, shows.__getitem__, ["one"]) == ["both", "none"]
    assert left_out("xyz", lambda name: name, [], times=9) == []


def test_marks_of_what_is_left_out() -> None:
    quick, slow, full = mostly_slow(["quick", "slow", "full"], ["quick"], ["full"])
    assert quick == "quick"
    assert [mark.name for mark in slow.marks] == ["slow"]
    assert [mark.name for mark in full.marks] == ["slow", "full"]
    with pytest.raises(AssertionError, match="renamed"):
        mostly_slow(["quick"], ["quick"], ["gone"])
