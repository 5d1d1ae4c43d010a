"""Which of many parameters of a test run by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Names as parameters of a test, all but the quick ones with the marker ``slow``."""
    names = list(names)
    unknown = set(quick) - set(names)
    assert not unknown, f"renamed: {unknown}"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
