"""Layers whose plans are small, which backend nvlink serves in ways of their own: what fails, and what is dropped.

Without GPUs the emulator runs them.
"""

from __future__ import annotations

from tests.comm.test_strategies import drop
from tests.conftest import Ranks
from tests.support import emulator
from tests.training.test_faults import changed_in_place
from tests.training.test_routed_experts import forced, no_room_for_rows, overflow_pool

EMULATED = True


def test_a_weight_changed_before_backward(hoppers: Ranks) -> None:
    """The others open as many calls as the rank that fails expects: none that agrees on memory comes in between."""
    hoppers.run(changed_in_place, {})


def test_a_pool_too_small(hoppers: Ranks) -> None:
    """The combine behind a dispatch that has dropped rows is made all the same."""
    found = hoppers.run(overflow_pool)
    assert found == [(found[0][0], True)] * hoppers.num_ranks


def test_kernels_drop_alike(hoppers: Ranks) -> None:
    """The same without a layer, by every strategy."""
    assert any(hoppers.run(drop))


def test_no_room_for_a_piece(hoppers: Ranks) -> None:
    """The others hear of it while transfers of other pieces are on their way. On the emulator ranks are threads, for
    which pieces are forced here and once."""
    with forced(pieces=True):
        found = hoppers.run(no_room_for_rows, 1, not emulator.ON)
    assert found == ["RuntimeError"] + ["PeerError"] * (hoppers.num_ranks - 1)
