"""Groups for tests of backend "nvlink"."""

from __future__ import annotations

import pytest

from tests.conftest import Ranks


@pytest.fixture(scope="module")
def several(hoppers: Ranks) -> Ranks:
    """Groups of two ranks or more."""
    if hoppers.num_ranks == 1:
        pytest.skip("nobody to disagree with")
    return hoppers
