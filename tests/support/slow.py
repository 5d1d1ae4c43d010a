"""Which of many parameters of a test run by default, and which in CI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, TypeVar

import pytest

Thing = TypeVar("Thing")


def mostly_slow(names: Iterable[Any], quick: Collection[Any], left_out: Collection[Any] = ()) -> list[Any]:
    """Names as parameters of a test, all but the quick ones with the marker ``slow``; ``full`` too if left out."""
    names = list(names)
    unknown = {*quick, *left_out} - set(names)
    assert not unknown, f"renamed: {unknown}"
    marks = {name: [pytest.mark.slow] + [pytest.mark.full] * (name in left_out) for name in names}
    return [name if name in quick else pytest.param(name, marks=marks[name]) for name in names]


def left_out(
    things: Iterable[Thing],
    shows: Callable[[Thing], Iterable[Hashable]],
    quick: Collection[Thing],
    times: int = 1,
) -> list[Thing]:
    """Things that show nothing which the others do not.

    Always the same ones: those that show most of what is missing come first, in the order given, until all is shown.

    Args:
        things: say, parameters of a test.
        shows: what one of them shows, say a value of each parameter.
        quick: those that are there in any case, in the order given too.
        times: how many things show something, where there are so many.
    """
    shown = {thing: frozenset(shows(thing)) for thing in things}
    missing: Counter[Hashable] = Counter()
    for each in shown.values():
        missing.update(each)
    missing = Counter({key: min(number, times) for key, number in missing.items()})
    for thing in quick:
        missing.subtract(shown[thing])
    taken = set(quick)
    rest = [thing for thing in shown if thing not in taken]
    while unseen := {key for key, number in missing.items() if number > 0}:
        best = max(rest, key=lambda thing: len(unseen & shown[thing]))
        missing.subtract(shown[best])
        rest.remove(best)
    return rest
