"""Experts that are lost with their rank, and loaded again into slots of those that live."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenloom as tl
from tests.comm.test_masks import backend_of, group
from tests.comm.test_move_experts import held, require_held, serve, weights_of
from tests.comm.test_on_timeout import require_masked
from tests.comm.test_placed_masks import replicated
from tests.comm.test_plan_moves import pairs
from tests.support import emulator
from tests.support.cases import make_comm
from tests.support.on_ranks import on_ranks
from tests.support.placements import drawn_placement
from tests.support.server import Server
from tokenloom.comm.restore_experts import plan_restore
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext

__all__ = ["group"]
EMULATED = True


@settings(max_examples=150, derandomize=True, deadline=None)
@given(pairs(), st.data())
def test_plan(pair: tuple[tl.Placement, tl.Placement], data: st.DataObject) -> None:
    """Every lost expert that fits gets a slot on a living rank; nobody else loses the last one."""
    old, _ = pair
    masked = data.draw(st.sets(st.integers(0, old.num_ranks - 1), max_size=old.num_ranks - 1))
    new, found = plan_restore(old, masked)
    lost = old.lost_without(masked)
    assert new.lost_without(masked) == [e for e in lost if e not in found]
    living = [rank for rank in range(old.num_ranks) if rank not in masked]
    changed = [(r, s) for r in range(old.num_ranks) for s in range(old.slots_per_rank)
               if old.experts_of(r)[s] != new.experts_of(r)[s]]  # fmt: skip
    assert sorted(changed) == sorted(found.values())
    assert all(rank in living for rank, _ in changed)
    left = len(living) * old.slots_per_rank - (old.num_experts - len(lost))
    assert len(found) == min(len(lost), left), "some fit and were not placed"
    empty = sum(old.experts_of(r).count(-1) for r in living)
    over = sum(old.experts_of(r)[s] != -1 for r, s in changed)
    assert over == max(0, len(found) - empty), "replicas go before empty slots"


def placed_comm(context: RankContext, hot: bool = False) -> tl.Communicator:
    """Of three experts a rank, the first has a replica on the next rank; a slot of each rank is empty, or of the
    first alone where the others hold the hottest."""
    plan = Plan(context.num_ranks, 3 * context.num_ranks, 8, 3, 6)
    table = torch.arange(plan.num_experts).view(context.num_ranks, 3)
    table = torch.cat([table, table[:, :1].roll(1, 0), torch.full((context.num_ranks, 1), -1)], 1)
    if hot:
        table[1:, 4] = 0
    placement = tl.Placement(table, num_experts=plan.num_experts)
    return make_comm(context, backend_of(context), plan, placement=placement)


def of_expert(expert: int) -> list[torch.Tensor]:
    return [each[0] for each in weights_of(torch.tensor([expert]))]


@on_ranks("group")
def test_restored(context: RankContext) -> None:
    """Into an empty slot, then in a replica's place; faults of one rank change nothing anywhere."""
    comm = placed_comm(context, hot=True)
    tensors, last = held(comm), context.num_ranks - 1
    assert tl.restore_experts(comm, tensors, of_expert) == []
    with pytest.raises((tl.InvalidArgument, tl.PeerError), match="restore is a dict, expected a function"):
        tl.restore_experts(comm, tensors, {} if context.rank == last else of_expert)  # type: ignore[arg-type]
    if context.rank == last:
        return
    comm.mask_ranks([last])
    lost = [3 * last + 1, 3 * last + 2]
    assert comm.lost_experts() == lost
    serve(context, comm, tensors)
    before, contents = comm.placement, [tensor.clone() for tensor in tensors]

    def fail(expert: int) -> list[torch.Tensor]:
        raise FileNotFoundError(f"no file of expert {expert}")

    for restore, error, match in (
        (lambda e: of_expert(e)[:3], tl.InvalidArgument, r"restore\(\d+\) is a list of 3, expected a list of 4"),
        (lambda e: [*of_expert(e)[:3], torch.zeros(4)], tl.ShapeMismatch, r"\[3\] is \[4\], expected \[5\]"),
        (lambda e: [*of_expert(e)[:3], torch.zeros(5)], tl.DtypeMismatch, r"\[3\] is torch.float32, expected"),
        (lambda e: [*of_expert(e)[:3], None], tl.InvalidArgument, r"\[3\] is a NoneType, expected"),
        (fail, FileNotFoundError, "no file of expert"),
    ):
        with pytest.raises((error, tl.PeerError), match=match):
            tl.restore_experts(comm, tensors, restore)
    assert comm.placement == before
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(contents, tensors, strict=True))
    fit = lost[: 1 if last == 1 else 2]  # one rank alone has no replicas to take the place of
    assert tl.restore_experts(comm, tensors, of_expert) == fit
    assert comm.lost_experts() == lost[len(fit) :]
    assert f"expert {fit[-1]} was lost and is restored" in comm.describe()
    require_held(comm, tensors)
    serve(context, comm, tensors)
    assert comm.placement is not None
    assert before is not None
    assert comm.placement.experts_of(last) == before.experts_of(last)


@pytest.mark.skipif(emulator.ON, reason="processes over gloo")
@on_ranks("four")
def test_back_with_weights_of_others(context: RankContext) -> None:
    """A rank that comes back has the slots of the table, and gets their weights from the others."""
    comm = placed_comm(context)
    tensors, placement = held(comm), comm.placement
    if context.rank == 0:
        comm.close()
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(99)
    else:
        comm.mask_ranks([0])
        assert tl.restore_experts(comm, tensors, of_expert) == [1, 2]
        placement = comm.placement
    table = torch.tensor(placement.to_tensor() if placement else 0)
    if context.rank == 0:  # as the others tell it
        table[1, 4], table[2, 4] = 1, 2
        placement = tl.Placement(table, num_experts=comm.plan.num_experts)
        comm = make_comm(context, "collective", comm.plan, placement=placement, rejoin=True)
    else:
        comm.unmask_ranks([0])
    assert placement is not None
    moving = tl.move_experts(comm, tensors, placement, stale=[0], piece_bytes=69)
    assert moving.num_steps == 4
    moving.run()
    assert comm.placement == moving.placement
    require_held(comm, tensors)
    serve(context, comm, tensors)


# -- processes that die -----------------------------------------------------------------------------------------


def serve_and_restore(context: RankContext, pipe: Connection, num_calls: int, which: str) -> None:
    """Calls as in test_placed_masks.py, with lost experts restored behind each."""
    plan = Plan(context.num_ranks, 2 * context.num_ranks, 8, 3, 6)
    placement = replicated(which, plan)
    spare = torch.full((context.num_ranks, 1), -1)
    placement = tl.Placement(torch.cat([placement.to_tensor(), spare], 1), num_experts=plan.num_experts)
    options: dict[str, Any] = {"on_timeout": "mask", "timeout_s": 3.0, "placement": placement}
    comm = make_comm(context, "collective", plan, **options)
    tensors, restored = held(comm), list[int]()
    for number in range(num_calls):
        if number % 20 == 0:
            pipe.send(("pair", (number, comm.masked_ranks(), comm.engine.ranks.why_masked())))
        masked = comm.masked_ranks()
        try:
            serve(context, comm, tensors, number)
        except AssertionError:  # of the call itself some routes are lost, of the next one none
            assert comm.masked_ranks() != masked or number == 0
        restored += tl.restore_experts(comm, tensors, of_expert)
        assert comm.lost_experts() == []
    assert restored == {"all": [], "some": [4], "none": [4, 5]}[which] or not comm.masked_ranks()
    require_held(comm, tensors)
    pipe.send(("pair", (num_calls, comm.masked_ranks(), comm.engine.ranks.why_masked())))
    comm.close()


@pytest.mark.skipif(emulator.ON, reason="processes over gloo")
@pytest.mark.slow
@pytest.mark.parametrize("which", ["none", *(pytest.param(each, marks=pytest.mark.full) for each in ("some", "all"))])
def test_death_in_the_middle(which: str) -> None:
    """A process ends: behind the next restoring no route is lost, whether its expert had a replica or not."""
    num_calls = 160
    with Server(4, serve_and_restore, num_calls, which, device="cpu") as ranks:
        require_masked(ranks, 2, num_calls // 4, [])
        os.kill(ranks.processes[2].pid, signal.SIGKILL)
        for rank in (0, 1, 3):
            require_masked(ranks, rank, num_calls, [2])


def serve_and_move(context: RankContext, pipe: Connection, num_calls: int) -> None:
    """Moves back and forth with a call behind each step, until one ends for a rank that is gone."""
    plan = Plan(context.num_ranks, 3 * context.num_ranks, 8, 3, 6)
    options: dict[str, Any] = {"on_timeout": "mask", "timeout_s": 3.0, "placement": drawn_placement(plan, 2, 0)}
    comm = make_comm(context, "collective", plan, **options)
    tensors, moving, turn, ended = held(comm), None, 0, False
    for number in range(num_calls):
        if number % 20 == 0:
            pipe.send(("pair", (number, comm.masked_ranks(), comm.engine.ranks.why_masked())))
        masked = comm.masked_ranks()
        try:
            if not ended and (moving is None or moving.is_done):
                turn += 1
                moving = tl.move_experts(comm, tensors, drawn_placement(plan, 2, turn % 3), piece_bytes=50)
            if not ended and moving is not None:
                moving.step()
        except (tl.PeerError, tl.InvalidArgument) as error:  # or no slot is left where an expert is to be read
            if not any(text in str(error) for text in ("rank 2 was masked while", "have no slot", "alone")):
                raise
            ended = True
        if ended:
            tl.restore_experts(comm, tensors, of_expert)
            assert comm.lost_experts() == []
            require_held(comm, tensors)
        try:
            serve(context, comm, tensors, number)
        except AssertionError:
            assert comm.masked_ranks() != masked
    require_held(comm, tensors)
    pipe.send(("pair", (num_calls, comm.masked_ranks(), comm.engine.ranks.why_masked())))
    comm.close()


@pytest.mark.skipif(emulator.ON, reason="processes over gloo")
@pytest.mark.slow
@pytest.mark.parametrize("num_calls", [120, pytest.param(2000, marks=pytest.mark.soak)])
def test_death_in_a_move(num_calls: int) -> None:
    """The move ends on all ranks alike, the placement of now has its weights, and what is lost is restored."""
    with Server(4, serve_and_move, num_calls, device="cpu") as ranks:
        require_masked(ranks, 2, num_calls // 4, [])
        time.sleep(random.random() * 0.1)
        os.kill(ranks.processes[2].pid, signal.SIGKILL)
        for rank in (0, 1, 3):
            require_masked(ranks, rank, num_calls, [2])
