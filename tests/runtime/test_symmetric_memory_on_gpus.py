"""Symmetric memory on real GPUs: what the driver does with it, and where other memory is short."""

from __future__ import annotations

import gc
import threading
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import Case, make_comm, make_problem
from tests.support.on_ranks import on_ranks
from tokenloom.jit.kernel import checked, load_driver
from tokenloom.runtime import symmetric_memory
from tokenloom.runtime.deferred_release import release_dropped
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import BufferLayout, SymmetricBuffer, close_together

LARGE = BufferLayout.of([("rows", 100 << 20)])
SMALL = BufferLayout.of([("flags", 4)])


def meet(ranks: RankGroup) -> None:
    ranks.all_reduce_sums([torch.zeros(1, device=ranks.device)], "meet")
    torch.cuda.synchronize(ranks.device)


@on_ranks("hoppers")
def test_a_handle_opens_one_buffer(context: RankContext) -> None:
    """However small it is, the allocation that the driver shares begins and ends with it."""
    ranks = RankGroup(context.group)
    buffers = [SymmetricBuffer(SMALL, ranks) for _ in range(2)]
    for buffer in buffers:
        address = buffer.addresses[ranks.rank]
        base, size = checked(load_driver().cuMemGetAddressRange(address))
        assert (int(base), int(size)) == (address, symmetric_memory.GRANULARITY_BYTES)
    close_together(buffers)


@on_ranks("hoppers")
def test_ranks_see_what_others_write(context: RankContext) -> None:
    """Every rank writes its number to every rank, also while another device is current, and from a thread that has no
    CUDA context yet, as backward's have not."""
    ranks = RankGroup(context.group, device=context.device)
    mine, elsewhere = context.device.index, (context.device.index + 1) % torch.cuda.device_count()
    torch.cuda.set_device(elsewhere)
    try:
        buffer = SymmetricBuffer(BufferLayout.of([("numbers", 4 * ranks.num_ranks)]), ranks)
        number = torch.full((1,), ranks.rank, dtype=torch.int32, device=context.device)
        for rank in range(ranks.num_ranks):
            thread = threading.Thread(target=buffer.copy_to, args=(rank, 4 * ranks.rank, number))
            thread.start()
            thread.join()
        meet(ranks)
        view = buffer.view("numbers", torch.int32, (ranks.num_ranks,))
        assert view.tolist() == list(range(ranks.num_ranks))
        close_together([buffer])
        assert torch.cuda.current_device() == elsewhere
    finally:
        torch.cuda.set_device(mine)


@on_ranks("own_gpus")
@pytest.mark.alone  # it counts the free memory of the GPU
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_view_keeps_the_memory(context: RankContext, how: str) -> None:
    """The storage that torch makes over the memory owns it, however little of it a view shows."""
    ranks = RankGroup(context.group)
    close_together([SymmetricBuffer(LARGE, ranks)])
    meet(ranks)
    free_bytes = torch.cuda.mem_get_info()[0]
    buffer: SymmetricBuffer | None = SymmetricBuffer(LARGE, ranks)
    assert buffer is not None
    view = buffer.view("rows", torch.float32, (1000,)).fill_(ranks.rank)[-10:]
    if how == "close":
        buffer.close()
    buffer = None
    gc.collect()
    meet(ranks)
    release_dropped()
    meet(ranks)
    release_dropped()
    assert free_bytes - torch.cuda.mem_get_info()[0] > 90e6
    assert view.tolist() == [float(ranks.rank)] * 10
    del view
    release_dropped()
    assert free_bytes - torch.cuda.mem_get_info()[0] < 10e6
    meet(ranks)


@on_ranks("hoppers")
def test_dropped_during_a_capture(context: RankContext) -> None:
    """The collector finds a buffer while a graph is captured: the capture lives, and the memory is freed after it."""
    ranks = RankGroup(context.group)
    cycle: list[Any] = [SymmetricBuffer(LARGE, ranks)]
    shared = cycle[0]._shared
    cycle.append(cycle)
    values = torch.zeros(4, device=context.device)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    with torch.cuda.graph(graph):
        values += 1
        del cycle
        gc.collect()
        release_dropped()
    assert not shared.is_freed
    graph.replay()
    assert values.tolist() == [1.0] * 4
    release_dropped()
    meet(ranks)
    release_dropped()
    assert shared.is_freed
    meet(ranks)


CASE = Case("no room", "", tokens=(8, 5, 0, 6), spare=2000, hidden=4096, experts_per_rank=2, top_k=4, pick="repeats")
"""Few tokens in buffers for many, so that what is lost would be seen."""


@pytest.mark.alone  # it counts the free memory of the GPU
def test_no_room_on_one_rank(own_gpus: Ranks) -> None:
    """The first call of a kind makes a buffer on every rank, or on none; then it can be tried again."""
    found = own_gpus.run(check_no_room)
    assert found == ["OutOfMemoryError"] + ["PeerError"] * (own_gpus.num_ranks - 1)


def check_no_room(context: RankContext) -> str:
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)

    def refuse(num_bytes: int) -> int:
        raise torch.OutOfMemoryError(f"no room for {num_bytes} bytes")

    real = symmetric_memory._allocate
    with make_comm(context, "nvlink", problem.plan, checked=False) as comm, torch.no_grad():
        torch.cuda.synchronize()
        free_bytes = torch.cuda.mem_get_info()[0]
        for _ in range(2):
            with (
                mock.patch.object(symmetric_memory, "_allocate", refuse if context.rank == 0 else real),
                pytest.raises(torch.OutOfMemoryError if context.rank == 0 else tl.PeerError) as caught,
            ):
                comm.dispatch(x, ids, weights)
        assert free_bytes - torch.cuda.mem_get_info()[0] < 40e6, "what the others have taken is not given back"
        routed = comm.dispatch(x, ids, weights)
        assert free_bytes - torch.cuda.mem_get_info()[0] > 80e6, "too small to be seen"
        comm.combine(routed.tokens, routed)
        comm.check()
    return type(caught.value).__name__
