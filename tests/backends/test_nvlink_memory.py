"""Backend "nvlink": memory that a stream, a capture or another rank uses, and memory that nobody uses any more."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.cases import BF16, Case, Problem, expert_rows, make_problem, same_bits
from tests.support.graph_cases import EXPERT, ROUNDS, Captured, Step, plan_of
from tests.support.nvlink_cases import buffers_of, meet, new_comm, round_trip
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.streams import Event, tensors_in

# -- a stream of its own --------------------------------------------------------------------------------------------

LONG_CYCLES = 600_000_000  # 0.3 s at 2 GHz


@on_ranks("hoppers")
@pytest.mark.parametrize(
    ("layout", "mode"), [("token", "per_rank"), ("rank", "per_rank"), ("expert", "per_rank"), ("expert", "per_route")]
)
def test_combine_on_a_side_stream_of_what_is_dropped(context: RankContext, layout: str, mode: str) -> None:
    """The combine runs on another stream than the one that made what it reads. torch was told so of y and the weights
    alone: once the caller let go of routed, its row maps were given to the next tensors of the main stream."""
    case = Case("dropped", "", tokens=(40, 0, 25, 33), hidden=64, top_k=3, pick="repeats", unused=0.2)
    problem = make_problem(case, context.num_ranks)
    want = problem.dispatched(layout)
    ys = expert_rows(problem, want, BF16)
    weights = problem.topk_weights if layout == "expert" else None
    want_out = reference.combine(problem.plan, ys, want, problem.topk_ids, weights, mode=mode)[context.rank]
    with new_comm(context, problem.plan, checked=False) as comm, torch.no_grad():
        for turn in range(4):  # the first makes buffers, loads kernels and has no stream to keep busy yet
            out, event, sizes = combine_and_drop(context, comm, problem, ys[context.rank], layout, mode)
            kept = [torch.full((size // 4,), 1, dtype=torch.int32, device=context.device) for size in 3 * sizes]
            if turn and context.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
                assert not event.query(), "the memory was filled after the combine, which shows nothing"
            event.wait()
            same_bits(out, want_out, f"turn {turn}")
            del kept
        comm.check()


def combine_and_drop(
    context: RankContext, comm: tl.Communicator, problem: Problem, y: torch.Tensor, layout: str, mode: str
) -> tuple[torch.Tensor, Event, list[int]]:
    """The result, its event, and the sizes in bytes of all tensors that nobody holds any more when this returns."""
    routed = comm.dispatch(*problem.arguments(context), layout=layout, copy=True)
    y = y.to(context.device, copy=True)
    dropped = tensors_in((y, routed._weights, routed._handle))
    sizes = [each.untyped_storage().nbytes() for each in dropped]
    side = comm.engine.side_stream
    if side._stream is not None:
        with torch.cuda.stream(side._stream):
            torch.cuda._sleep(LONG_CYCLES)
    with side.run((y, routed)):
        out = comm.combine(y, routed, mode=mode)
        event = side.event((out,))
    return out, event, sizes


# -- captures -------------------------------------------------------------------------------------------------------


@on_ranks("hoppers")
@pytest.mark.parametrize("what", ["exact sizes", "dispatch, checked", "combine, checked"])
def test_host_reads_are_not_captured(context: RankContext, what: str) -> None:
    """The host cannot read in a capture, and CUDA's own error broke it, and the communicator with it. What is asked
    for can be told before anything touches the GPU."""
    checked = what != "exact sizes"
    with new_comm(context, plan_of(context.num_ranks), checked=checked) as comm:
        step = Step(context, comm, EXPERT)
        routed, _ = step()
        calls = {
            "exact sizes": lambda: step.dispatch(sizes="exact"),
            "dispatch, checked": step.dispatch,
            "combine, checked": lambda: step.finish(routed),
        }
        for _ in range(2):
            gc.collect()  # as Captured does
            graph = torch.cuda.CUDAGraph()
            reads = "checked=True" if checked else "sizes='exact'"
            with (
                pytest.raises(tl.InvalidArgument, match=f"{reads} reads on the host.*sizes='bounded'"),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                calls[what]()
        comm.check()
        for round_ in ROUNDS[:2]:
            step.load(round_)
            for sizes in ("exact", "bounded"):
                same_bits(step.finish(step.dispatch(sizes=sizes)), step.expected(round_)[1], f"{sizes}, {round_.why}")
        if not checked:
            captured = Captured(step)
            for round_ in ROUNDS[:2]:
                step.load(round_)
                captured.replay()
                same_bits(captured.results[1], step.expected(round_)[1], f"replayed, {round_.why}")
        comm.check()


# -- memory that ranks share ----------------------------------------------------------------------------------------

TURNS = 5
LARGE = Case("large", "", tokens=(8, 5, 0, 6), spare=1016, hidden=4096, experts_per_rank=2, top_k=4, pick="repeats")
"""Few tokens in buffers for many, so that they are worth counting."""


@on_ranks("hoppers")
@pytest.mark.alone  # it counts the free memory of the GPU
@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_communicators_come_and_go(context: RankContext, how: str) -> None:
    """A communicator that is dropped lets go of its memory whenever Python collects it, on every rank at another time.
    The driver gave the address of what was freed to the next buffer of that size, which ranks that had not let go
    of the old one could not map (CUDA_ERROR_ALREADY_MAPPED). Memory is freed when the last has let go of it."""
    closed = how == "closed"
    problem = make_problem(LARGE, context.num_ranks)
    gc.collect()
    gc.disable()  # or Python would collect when it likes
    try:
        held_bytes = use_and_close(context, problem)  # loads kernels, and whatever NCCL and torch make once
        meet(context)
        assert held_bytes > 48e6, "too small to be seen"
        free_bytes = free_memory()
        for turn in range(TURNS):
            if closed:
                use_and_close(context, problem)
                continue
            comm = new_comm(context, problem.plan, checked=True)
            round_trip(context, comm, problem, "expert")
            gc.collect()  # where it was not done at the end of the last turn
            ring: list[Any] = [comm]
            ring.append(ring)  # for the garbage collector alone to find
            del comm, ring
            if (context.rank + turn) % 2 == 0:
                gc.collect()
        gc.collect()
        meet(context)
        use_and_close(context, problem)  # frees what all have let go of by now
        meet(context)
        lost_bytes = free_bytes - free_memory()
        # Of what the last close freed a late rank may hold some; torch and the driver take a few MB here and there.
        assert lost_bytes < 2 * held_bytes, f"{lost_bytes / 1e6:.0f} MB are gone, a communicator is {held_bytes / 1e6}"
    finally:
        gc.enable()


def use_and_close(context: RankContext, problem: Problem) -> int:
    """A communicator's life. Returns: bytes of its buffers."""
    with new_comm(context, problem.plan, checked=True) as comm:
        round_trip(context, comm, problem, "expert")
        return sum(buffer.layout.total_bytes for buffer in buffers_of(comm))


def free_memory() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
