"""Layers whose plans are small, which backend nvlink serves in ways of their own: what fails, and what is dropped.

Without GPUs the emulator runs them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.comm.test_strategies import drop
from tests.conftest import Ranks
from tests.support import emulator
from tests.training.test_faults import changed_in_place
from tests.training.test_routed_experts import HIDDEN, NoRoom, forced, forward_and_check, layers_of, overflow_pool
from tokenloom.runtime.processes import RankContext

EMULATED = True


def test_a_weight_changed_before_backward(hoppers: Ranks) -> None:
    """The others open as many calls as the rank that fails expects: none that agrees on memory comes in between."""
    hoppers.run(changed_in_place)


def test_a_pool_too_small(hoppers: Ranks) -> None:
    """The combine behind a dispatch that has dropped rows is made all the same."""
    found = hoppers.run(overflow_pool)
    assert found == [(found[0][0], True)] * hoppers.num_ranks


def test_kernels_drop_alike(hoppers: Ranks) -> None:
    """The same without a layer, by every strategy."""
    assert any(hoppers.run(drop))


def no_room_for_a_piece(context: RankContext) -> str:
    """Rank 0 has no memory for the rows of the second piece. On the emulator ranks are threads: what they share is
    patched by the test."""
    with nullcontext() if emulator.ON else forced(pieces=True):
        return second_piece_fails(context)


def second_piece_fails(context: RankContext) -> str:
    (layer,) = layers_of(context, 1)
    engine: Any = layer.comm.engine
    x = torch.randn(16, HIDDEN, device=context.device).to(torch.bfloat16)
    calls = 0

    def send_dispatch(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        pending = type(engine).send_dispatch(engine, *args)
        return NoRoom(pending) if context.rank == 0 and calls == 2 else pending

    wanted, _ = layer(x)
    engine.send_dispatch = send_dispatch
    with pytest.raises(RuntimeError if context.rank == 0 else tl.PeerError) as caught:
        forward_and_check(layer, x)
    del engine.send_dispatch
    layer.comm.check()
    assert torch.equal(layer(x)[0], wanted)
    layer.comm.check()
    layer.comm.close()
    return type(caught.value).__name__


def test_no_room_for_a_piece(hoppers: Ranks) -> None:
    """The others hear of it while transfers of other pieces are on their way."""
    with forced(pieces=True):
        found = hoppers.run(no_room_for_a_piece)
    assert found == ["RuntimeError"] + ["PeerError"] * (hoppers.num_ranks - 1)
