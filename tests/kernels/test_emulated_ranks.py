"""The emulator's ranks, which are threads of one process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.support import emulator
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

needs_compiler = pytest.mark.skipif(emulator.CXX is None, reason="no g++")


class Place:
    """Something that tests patch."""

    value = "as it was"


@on_ranks("emulated_two")
@needs_compiler
def test_operations_are_made_before_ranks_start(context: RankContext) -> None:
    """Or threads that make torch's object of one at a time crash, once in some hundred runs."""
    packet = vars(torch.ops.aten)["_foobar"]  # an operation that nothing uses
    assert "default" in vars(packet)


@on_ranks("emulated_two")
@needs_compiler
def test_patches_end_in_any_order(context: RankContext) -> None:
    """What all ranks patch stays so until the last of them is done with it, and no longer."""
    patch, meet = mock.patch.object(Place, "value", "patched"), torch.distributed.barrier
    for rank in range(2):
        if context.rank == rank:
            patch.start()
        meet()
    for rank, left in enumerate(("patched", "as it was")):
        if context.rank == rank:
            patch.stop()
        meet()
        assert Place.value == left
        meet()
