"""The list of mutations fits the tree: a stale entry shows here, at once, and not after the long part of CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.mutation import Mutation
from tests.mutations.rules import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_there_is_one_place_to_break(mutation: Mutation) -> None:
    broken = mutation.apply(ROOT / "tokenloom")
    assert mutation.new in broken
    assert all((ROOT / test.partition("::")[0]).is_file() for test in mutation.tests)


def test_a_stale_entry_is_refused() -> None:
    stale = Mutation("stale", "nothing", "layer.py", "text that stands nowhere", "", ())
    with pytest.raises(SystemExit, match="stale: expected the following text once in"):
        stale.apply(ROOT / "tokenloom")
