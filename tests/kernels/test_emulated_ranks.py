"""The emulator's ranks, which are threads of one process."""

from __future__ import annotations

import pytest
import torch

from tests.support import emulator
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext


@on_ranks("emulated_two")
@pytest.mark.skipif(emulator.CXX is None, reason="no g++")
def test_operations_are_made_before_ranks_start(context: RankContext) -> None:
    """Or threads that make torch's object of one at a time crash, once in some hundred runs."""
    packet = vars(torch.ops.aten)["_foobar"]  # an operation that nothing uses
    assert "default" in vars(packet)
