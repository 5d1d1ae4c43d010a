"""Programs end as they say, however they end; ``python -m tests.faults endings`` runs as many as one likes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.endings import Ending, faults
from tests.faults.programs import Programs
from tests.support.slow import mostly_slow

ENDINGS = [
    Ending("pairs"),
    Ending("training", closing="closed and destroyed"),
    Ending("normal", closing="destroyed", way="sys.exit"),
    Ending("pairs", "mask", "late", num_ranks=3),
    Ending("low latency", "mask", "late", "closed and destroyed", num_ranks=3),
    Ending("training", "mask", "os._exit", "closed", num_ranks=3, way="raise"),
    Ending("halves", "raise", "late", "closed and destroyed"),
    Ending("pairs", "raise", "os._exit", "closed and destroyed", way="Ctrl-C"),
    Ending("training", "raise", "stopped", "closed and destroyed"),
    Ending("halves", "mask", "stopped", "destroyed", num_ranks=3),
    Ending("pairs", "raise", "mask_ranks", keeps=False, num_ranks=3, way="pytest"),
]
QUICK = [Ending("pairs", "raise", "os._exit", "closed and destroyed", way="Ctrl-C")]
SELDOM = [
    Ending("halves", "raise", "late", "closed and destroyed", num_ranks=2),
    Ending("low latency", "mask", "late", "closed and destroyed", num_ranks=3),
    Ending("training", "raise", "stopped", "closed and destroyed", num_ranks=2),
    Ending("training", closing="closed and destroyed"),
    Ending("pairs", "mask", "late", num_ranks=3),
    Ending("training", "mask", "os._exit", "closed", num_ranks=3, way="raise"),
]


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with Programs() as running:
        yield running


@pytest.mark.parametrize("ending", mostly_slow(ENDINGS, QUICK, SELDOM), ids=str)
def test_a_program_ends_as_it_says(programs: Programs, ending: Ending) -> None:
    """With the exit code that it wants on every rank; threads that could abort it are held back until it is too late
    for them."""
    found, ended = faults(ending, programs)
    assert not found, (found, ended)
