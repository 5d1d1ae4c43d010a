"""Backend "nvlink": who keeps what alive: graphs and tensors their memory, and nobody that of a communicator that is
gone."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.cases import Case, Problem, make_comm, make_problem, same_bits, same_bytes
from tests.support.graph_cases import EXPERT, ROUNDS, TOKEN, Captured, Kind, Step, plan_of
from tests.support.nvlink_cases import BACKEND, meet, new_comm, round_trip
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.deferred_release import release_dropped
from tokenloom.runtime.processes import RankContext

CASE = Case("lifetimes", "", tokens=(40, 23, 0, 31), spare=3, hidden=256, top_k=4, experts_per_rank=6, seed=3)


def use_memory(context: RankContext, problem: Problem) -> None:
    """What was freed is somebody else's by now, and holds other values."""
    for _ in range(2):
        with new_comm(context, problem.plan, checked=False) as other:
            round_trip(context, other, problem, "expert")
            round_trip(context, other, problem, "token")
    for size in (1 << 12, 1 << 20, 1 << 26):
        torch.full((size,), 0x7F, dtype=torch.uint8, device=context.device)
    meet(context)


@on_ranks("hoppers")
@pytest.mark.parametrize("how", ["closed", "dropped", "closed and dropped"])
@pytest.mark.parametrize("kind", [TOKEN, EXPERT], ids=lambda kind: kind.name)
def test_a_graph_outlives_its_communicator(context: RankContext, kind: Kind, how: str) -> None:
    """A server captures its steps and forgets how they were made. Replays wrote to memory that was freed."""
    comm = new_comm(context, plan_of(context.num_ranks), checked=False)
    step = Step(context, comm, kind)
    captured = Captured(step)
    out = captured.results[1]
    captured.results = None  # Routed knows its communicator
    if "closed" in how:
        comm.close()
        with pytest.raises(tl.CommunicatorBroken, match="closed"):
            comm.check()
    if "dropped" in how:
        step.comm = None  # type: ignore[assignment]  # the step only brings inputs from now on
        del comm
        gc.collect()
        release_dropped()
    for turn in range(2):
        use_memory(context, make_problem(CASE, context.num_ranks))
        for round_ in ROUNDS:
            step.load(round_)
            captured.replay()
            same_bits(out, step.expected(round_)[1], f"turn {turn}, {round_.why}")


@on_ranks("hoppers")
def test_dropped_during_a_capture(context: RankContext) -> None:
    """Python collects garbage whenever it likes. Freeing touched CUDA and the store, which ended the capture."""
    problem = make_problem(CASE, context.num_ranks)
    with new_comm(context, plan_of(context.num_ranks), checked=False) as comm:
        step = Step(context, comm, EXPERT)
        step()
        for turn in range(3):
            garbage: list[Any] = [new_comm(context, problem.plan, checked=False)]
            round_trip(context, garbage[0], problem, "expert")
            garbage.append(garbage)  # for the garbage collector alone to find
            held = [garbage]
            del garbage

            def capture(held: list[Any] = held) -> list[torch.Tensor]:
                first = step()[1]
                if torch.cuda.is_current_stream_capturing():
                    held.clear()
                    assert gc.collect() > 0
                return [first, step()[1]]

            captured = Captured(capture)
            assert not held
            for round_ in ROUNDS[turn : turn + 2]:
                step.load(round_)
                captured.replay()
                for out in captured.results:
                    same_bits(out, step.expected(round_)[1], f"turn {turn}, {round_.why}")
            comm.check()
            del captured


@on_ranks("hoppers")
@pytest.mark.parametrize("how", ["closed", "dropped", "closed and dropped"])
@pytest.mark.parametrize("layout", ["token", "expert", "rank"])
def test_received_rows_outlive_their_communicator(context: RankContext, layout: str, how: str) -> None:
    """Without gradients rows are views of a receive buffer: whoever still looks at them keeps it."""
    problem = make_problem(CASE, context.num_ranks)
    want = problem.dispatched(layout)[context.rank]
    comm = new_comm(context, problem.plan, checked=False)
    with torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), layout=layout)
    tokens = routed.tokens
    places = sorted(want.rows.values())
    del routed  # which knows its communicator
    if "closed" in how:
        comm.close()
    if "dropped" in how:
        del comm
        gc.collect()
        release_dropped()
    for _ in range(2):
        use_memory(context, problem)
        same_bytes(tokens.flatten(0, -2)[places], want.tokens.flatten(0, -2)[places], "rows")


COMMUNICATORS, TIMEOUT_S = 100, 1.0
LARGE = Case("large", "", tokens=(8, 5, 0, 6), spare=1016, hidden=4096, experts_per_rank=2, top_k=4, pick="repeats")
"""Few tokens in buffers for many, so that they are worth counting."""


@on_ranks("hoppers", limit_s=240.0)
@pytest.mark.alone  # it counts the free memory of the GPU
def test_a_hundred_communicators(context: RankContext) -> None:
    """A server that makes a new one whenever something went wrong: most are closed or dropped, and in every tenth a
    rank comes too late. What a late rank might still write to was never freed."""
    problem = make_problem(LARGE, context.num_ranks)
    free_bytes: list[int] = []
    held_bytes = 0
    for turn in range(COMMUNICATORS):
        if turn % 10 == 0:
            free_bytes.append(settled_memory(context))
        late = turn % 10 == 5 and context.num_ranks > 1
        deadlines = {"timeout_s": TIMEOUT_S, "open_timeout_s": TIMEOUT_S} if late else {}
        comm = make_comm(context, BACKEND, problem.plan, **deadlines)
        with torch.no_grad():
            comm.dispatch(*problem.arguments(context), layout="token")
            held_bytes = max(held_bytes, free_bytes[-1] - torch.cuda.mem_get_info()[0])
            if late:
                meet(context)
                if context.rank == turn // 10 % context.num_ranks:
                    time.sleep(2.5 * TIMEOUT_S)
                with pytest.raises(tl.PeerTimeout):
                    comm.dispatch(*problem.arguments(context), layout="token")
        if turn % 2 or late:
            comm.close()
        del comm
    free_bytes.append(settled_memory(context))
    assert held_bytes > 48e6, "too small to be seen"
    # The first ten load kernels, and torch and NCCL make what they make once.
    lost_bytes = [free_bytes[1] - each for each in free_bytes]
    assert lost_bytes[-1] < held_bytes, [f"{each / 1e6:.0f} MB" for each in lost_bytes]


def settled_memory(context: RankContext) -> int:
    """Free bytes, once everything that all ranks have let go of is freed."""
    gc.collect()
    for _ in range(3):
        release_dropped()
        meet(context)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
