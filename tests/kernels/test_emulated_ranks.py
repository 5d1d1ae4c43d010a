"""The emulator's ranks, which are threads of one process."""

from __future__ import annotations

import pytest
import torch

from tests.support import emulator
from tokenloom.runtime.processes import RankContext


@pytest.mark.skipif(emulator.CXX is None, reason="no g++")
def test_operations_are_made_before_ranks_start() -> None:
    """Or threads that make torch's object of one at a time crash, once in some hundred runs."""
    emulator.ranks(2).run(finds_an_operation)


def finds_an_operation(context: RankContext) -> None:
    packet = vars(torch.ops.aten)["_foobar"]  # an operation that nothing uses
    assert "default" in vars(packet)
