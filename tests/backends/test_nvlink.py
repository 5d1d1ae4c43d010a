"""Backend "nvlink": what a review of it found wrong, so that it stays right.

What every backend must do is tested elsewhere, on this one too. Here are the ways in which this one could fail that
come of what is its own: errors that the host learns of later, regions used in turn, epochs, memory shared with peers.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP8,
    FP32,
    Case,
    Problem,
    expert_rows,
    make_comm,
    make_problem,
    same_bits,
    same_routed,
)
from tests.support.graph_cases import EXPERT, ROUNDS, Captured, Step, plan_of
from tokenloom import reference
from tokenloom.backends.nvlink import buffers
from tokenloom.backends.nvlink.launcher import CALLS_IN_FLIGHT
from tokenloom.errors import TokenloomError
from tokenloom.plan import LAYOUTS, Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.streams import tensors_in

BACKEND = "nvlink"


@pytest.fixture(scope="module")
def several(hoppers: Ranks) -> Ranks:
    """Groups of two ranks or more."""
    if hoppers.num_ranks == 1:
        pytest.skip("nobody to disagree with")
    return hoppers


def new_comm(context: RankContext, plan: Plan, *, checked: bool) -> tl.Communicator:
    return make_comm(context, BACKEND, plan, checked=checked)


def meet(context: RankContext) -> None:
    """All ranks, and all that is on their GPUs, are done with what they were given so far."""
    torch.cuda.synchronize()
    dist.barrier(group=context.group, device_ids=[context.device.index])
    torch.cuda.synchronize()


def same_combine(
    context: RankContext, comm: tl.Communicator, problem: Problem, routed: tl.Routed, want: list[reference.Routed]
) -> None:
    """All modes that the layout has; whatever holds no row is NaN in y."""
    by_expert = routed.layout == "expert"
    ys = expert_rows(problem, want, BF16)
    own_ids = [ids if rank == context.rank else ids[:0] for rank, ids in enumerate(problem.topk_ids)]
    weights = problem.topk_weights if by_expert else None
    for mode in ("per_rank", "per_route") if by_expert else ("per_rank",):
        out = comm.combine(ys[context.rank].to(context.device), routed, mode=mode)
        outs = reference.combine(problem.plan, ys, want, own_ids, weights, mode=mode)
        same_bits(out, outs[context.rank], f"{routed.layout}, {mode}")


def round_trip(
    context: RankContext,
    comm: tl.Communicator,
    problem: Problem,
    layout: str,
    *,
    sizes: str = "exact",
    alignment: int = 1,
    capacity: int | None = None,
) -> tuple[tl.Routed, list[reference.Routed]]:
    """One dispatch and its combines, as the reference has them."""
    bounded = sizes == "bounded"
    if bounded and layout != "rank":
        capacity = problem.rows_needed(layout, alignment) + 3
    options: dict[str, Any] = {"layout": layout, "alignment": alignment, "capacity": capacity}
    routed = comm.dispatch(*problem.arguments(context), **options, sizes=sizes)
    want = problem.dispatched(**options, bounded=bounded)
    same_routed(routed, want[context.rank], problem.plan, bounded=bounded)
    same_combine(context, comm, problem, routed, want)
    return routed, want


# -- ranks that disagree, and go on before they know ----------------------------------------------------------------


@pytest.mark.parametrize("noticed_by", ["check", "later calls"])
@pytest.mark.parametrize("layout", ["token", "expert"])
@pytest.mark.parametrize("odd", ["first", "last"])
def test_a_refused_dispatch_is_combined(several: Ranks, odd: str, layout: str, noticed_by: str) -> None:
    """A dispatch that ranks disagree on was refused, but its counts were whatever lay in their memory, and the combine
    that the host launched on it, knowing nothing yet, ran with them: past its buffers, or without end. It has no rows
    now, on all ranks, and all of them hear of it at the same later call."""
    odd_rank = 0 if odd == "first" else several.num_ranks - 1
    after = several.run(check_refused_dispatch, odd_rank, layout, noticed_by == "check")
    assert len(set(after)) == 1, f"calls until ranks heard of it: {after}"
    assert 1 <= after[0] <= CALLS_IN_FLIGHT + 1


def check_refused_dispatch(context: RankContext, odd: int, layout: str, by_check: bool) -> int:
    """Returns: calls after the refused one until its error came, the one that raised among them."""
    problem = make_problem(Case("refused", "", tokens=(9, 0, 5, 7), hidden=64, top_k=3), context.num_ranks)
    with new_comm(context, problem.plan, checked=False) as comm, torch.no_grad():
        round_trip(context, comm, problem, layout, sizes="bounded")  # makes the buffers, which takes all ranks
        comm.check()
        capacities = [problem.rows_needed(layout) + (3 if rank == odd else 4) for rank in range(context.num_ranks)]
        fill_free_memory(context)
        routed = comm.dispatch(
            *problem.arguments(context), layout=layout, sizes="bounded", capacity=capacities[context.rank]
        )
        y = torch.full_like(routed.tokens, torch.nan)
        out = comm.combine(y, routed)
        assert torch.equal(out.cpu(), torch.zeros(problem.xs[context.rank].shape, dtype=BF16))
        for name in ("num_rows", "source_counts", "expert_counts", "expert_offsets"):
            counts = getattr(routed, name)
            assert counts is None or not counts.any(), f"{name} of a refused dispatch: {counts}"
        calls = 1

        def go_on() -> None:
            nonlocal calls
            while calls < 3 * CALLS_IN_FLIGHT:
                calls += 1
                comm.check() if by_check else comm.combine(y, routed)

        with pytest.raises(tl.PlanMismatch) as raised:
            go_on()
        error, differing = raised.value, max(odd, 1)  # all are compared with rank 0
        assert (error.field, error.rank) == ("capacity", differing)
        assert f"capacity={capacities[differing]}, rank 0 has capacity={capacities[0]}" in str(error)
        comm.check()  # it was said
        for again in LAYOUTS:
            for sizes in ("bounded", "exact"):
                round_trip(context, comm, problem, again, sizes=sizes)
        comm.check()
    return calls


def fill_free_memory(context: RankContext) -> None:
    """Small numbers in what the next small tensors are made of: counts that nobody writes are not zero by chance."""
    for num_words in (128, 256, 512, 1024, 2048, 4096):
        _ = [torch.full((num_words,), 2, dtype=torch.int32, device=context.device) for _ in range(8)]


FAULTS = ["an id of no expert", "x of another width", "one rank dispatches", "one rank combines"]


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_rounds_after_faults(hoppers: Ranks, checked: bool) -> None:
    """A rank that had failed had not dispatched, or had dispatched while others combined: from then on ranks differed
    in whose turn the receive regions were, and in the number of the dispatch. Rows went to the region that their
    sender was at. Now every rank says where it wants them."""
    hoppers.run(check_rounds_after_faults, checked)


def check_rounds_after_faults(context: RankContext, checked: bool) -> None:
    case = {"tokens": (8, 5, 6, 7), "spare": 8, "hidden": 64, "top_k": 3, "experts_per_rank": 2}
    problems = [make_problem(Case("rounds", "", **case, seed=seed), context.num_ranks) for seed in range(3)]
    # Without ``checked`` nobody reads ids, and bounded sizes leave the others' errors for later.
    faults = [fault for fault in FAULTS[0 if checked else 1 :] if context.num_ranks > 1 or fault not in FAULTS[2:]]
    sizes = "exact" if checked else "bounded"
    with new_comm(context, problems[0].plan, checked=checked) as comm, torch.no_grad():
        latest, places = three_rounds(context, comm, problems, sizes)
        for fault in faults:
            with pytest.raises(TokenloomError) as raised:
                run_fault(context, comm, problems[0], latest, fault, sizes)
            right_error(context, fault, raised.value)
            comm.check()
            latest, places_after = three_rounds(context, comm, problems, sizes)
            assert places_after == places, f"after {fault!r} views are no longer of the two regions"


def three_rounds(
    context: RankContext, comm: tl.Communicator, problems: list[Problem], sizes: str
) -> tuple[tl.Routed, set[int]]:
    """The last of three dispatches, each of which leaves the one before it alone; and where their rows lay."""
    places: list[int] = []
    before: tuple[tl.Routed, list[reference.Routed], Problem] | None = None
    for problem, layout in zip(problems, LAYOUTS, strict=True):
        routed, want = round_trip(context, comm, problem, layout, sizes=sizes)
        assert min(each.num_rows for each in want) > 0, "an empty tensor has no address"
        if before is not None:
            same_routed(before[0], before[1][context.rank], before[2].plan, bounded=sizes == "bounded")
        before = routed, want, problem
        places.append(routed.tokens.data_ptr())
    comm.check()
    if comm.backend != "nvlink":
        return routed, set()
    assert places[0] == places[2] != places[1], "the two regions do not take turns"
    return routed, set(places[:2])


def run_fault(
    context: RankContext, comm: tl.Communicator, problem: Problem, latest: tl.Routed, fault: str, sizes: str
) -> None:
    """The call with the fault, which raises where it is, and what brings the error to the other ranks."""
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    odd = context.rank == context.num_ranks - 1
    if (fault == "one rank dispatches" and not odd) or (fault == "one rank combines" and odd):
        comm.combine(torch.zeros_like(latest.tokens), latest)
    else:
        if odd and fault == "an id of no expert":
            ids = ids + problem.plan.num_experts
        if odd and fault == "x of another width":
            x = x[:, :16].contiguous()
        comm.dispatch(x, ids, weights, layout="token", sizes=sizes)
    comm.check()


def right_error(context: RankContext, fault: str, error: BaseException) -> None:
    odd = context.num_ranks - 1
    if fault in FAULTS[2:]:
        assert isinstance(error, tl.PlanMismatch), repr(error)
        assert (error.field, error.rank) == ("call", odd)
        return
    own = {FAULTS[0]: tl.InvalidExpertId, FAULTS[1]: tl.ShapeMismatch}[fault]
    if context.rank == odd:
        assert type(error) is own, repr(error)
    else:
        assert isinstance(error, tl.PeerError), repr(error)
        assert error.rank == odd
        assert error.reason.startswith(f"{own.__name__}: ")


# -- capacities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_more_rows_than_a_region_holds(hoppers: Ranks, alignment: int, dtype: torch.dtype) -> None:
    """Exact sizes have no limit: what does not fit a region comes as layout "token" and is spread on arrival. The
    combine of such a dispatch, per route, went by tokens of received rows that nobody had written."""
    hoppers.run(check_more_rows, alignment, dtype)


def check_more_rows(context: RankContext, alignment: int, dtype: torch.dtype) -> None:
    case = Case("too many", "", tokens=(100, 60, 0, 77), spare=3, experts_per_rank=2, hidden=128, top_k=4,
                pick="one rank", unused=0.05, dtype=dtype)  # fmt: skip
    problem = make_problem(case, context.num_ranks)
    needed = problem.rows_needed("expert", alignment)
    with mock.patch.object(buffers, "EXPERT_ROOM", 0.0):
        assert buffers.region_rows(problem.plan) < needed, "the region is large enough"
        with new_comm(context, problem.plan, checked=False) as comm:
            for capacity in (None, needed):
                round_trip(context, comm, problem, "expert", alignment=alignment, capacity=capacity)
            with pytest.raises(tl.CapacityOverflow, match="nothing was sent") as overflow:
                round_trip(context, comm, problem, "expert", alignment=alignment, capacity=needed - 1)
            assert (overflow.value.needed, overflow.value.capacity) == (needed, needed - 1)
            with torch.no_grad():  # views before and after it
                for layout in ("token", "expert", "rank", "token"):
                    round_trip(context, comm, problem, layout, alignment=alignment if layout == "expert" else 1)
            comm.check()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_an_overflow_before_an_exact_dispatch(hoppers: Ranks, checked: bool) -> None:
    """The exact dispatch reads the outcomes of all calls, and took the first overflow for its own: it sent everything
    again by the way of what does not fit, or named a capacity that nobody had given it."""
    hoppers.run(check_overflow_before_exact, checked)


def check_overflow_before_exact(context: RankContext, checked: bool) -> None:
    sizes = {"tokens": (7, 4, 6, 5), "hidden": 64, "top_k": 3, "experts_per_rank": 2}
    much = make_problem(Case("much", "", **sizes, pick="one rank"), context.num_ranks)
    little = make_problem(Case("little", "", **sizes, pick="own rank", unused=0.8, seed=1), context.num_ranks)
    assert much.plan == little.plan
    with new_comm(context, much.plan, checked=checked) as comm:
        for layout, alignment in (("token", 1), ("expert", 1), ("expert", 4)):
            needed = much.rows_needed(layout, alignment)
            for exact_layout in LAYOUTS:
                enough = max(1, little.rows_needed(exact_layout))
                assert enough < needed - 1
                for own_capacity in (None, enough) if exact_layout != "rank" else (None,):
                    comm.dispatch(*much.arguments(context), layout=layout, alignment=alignment, sizes="bounded",
                                  capacity=needed - 1)  # fmt: skip
                    with pytest.raises(tl.CapacityOverflow, match="an earlier dispatch dropped rows") as overflow:
                        comm.dispatch(*little.arguments(context), layout=exact_layout, capacity=own_capacity)
                    assert (overflow.value.needed, overflow.value.capacity) == (needed, needed - 1)
                    round_trip(context, comm, little, exact_layout, capacity=own_capacity)
        comm.check()


# -- epochs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [2**31 - 3, 2**31 + 5, 2**32 - 2, 2**32 - 3], ids=lambda start: f"{start:#x}")
def test_epochs_wrap(hoppers: Ranks, start: int, layout: str) -> None:
    """Flags were compared by the sign of a difference of 32 bits: those that had not been raised for 2^31 calls, as on
    a new communicator that starts here, counted as raised. At 2^32 epochs begin anew, and 0 is what a flag shows that
    never was: of the two starts just before, one has a dispatch there and the other a combine (a new communicator
    opens a call before its first dispatch)."""
    hoppers.run(check_epochs, start, layout)


def check_epochs(context: RankContext, start: int, layout: str) -> None:
    # More tokens than the sending warps of a default grid: they claim the rest once all blocks have found their slots.
    case = Case("epochs", "", tokens=(150, 0, 90, 140), hidden=64, top_k=4, pick="repeats", unused=0.2)
    problem = make_problem(case, context.num_ranks)
    with new_comm(context, problem.plan, checked=False) as comm, torch.no_grad():
        set_epoch(context, comm, start)
        for sizes in ("exact", "bounded", "exact"):
            round_trip(context, comm, problem, layout, sizes=sizes)
        comm.check()
        calls = comm._backend.calls  # type: ignore[attr-defined]
        assert calls.num_calls > 5
        # One epoch for each call, 0 perhaps left out.
        assert (int(calls._state[0]) - start) % 2**32 - calls.num_calls in range(3)


def set_epoch(context: RankContext, comm: tl.Communicator, epoch: int) -> None:
    """As after so many calls, none of which raised other flags than those of every call."""
    calls = comm._backend.calls  # type: ignore[attr-defined]
    bits = epoch - 2**32 if epoch >= 2**31 else epoch
    meet(context)
    calls._state[0] = bits
    calls.control.view("flags", torch.int32, (context.num_ranks,)).fill_(bits)
    meet(context)


# -- a stream of its own --------------------------------------------------------------------------------------------

LONG_CYCLES = 600_000_000  # 0.3 s at 2 GHz


@pytest.mark.parametrize(
    ("layout", "mode"), [("token", "per_rank"), ("rank", "per_rank"), ("expert", "per_rank"), ("expert", "per_route")]
)
def test_async_combine_of_what_is_dropped(hoppers: Ranks, layout: str, mode: str) -> None:
    """The combine runs on another stream than the one that made what it reads. torch was told so of y and the weights
    alone: once the caller let go of routed, its row maps were given to the next tensors of the main stream."""
    hoppers.run(check_dropped, layout, mode)


def check_dropped(context: RankContext, layout: str, mode: str) -> None:
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
) -> tuple[torch.Tensor, tl.Event, list[int]]:
    """The result, its event, and the sizes in bytes of all tensors that nobody holds any more when this returns."""
    routed = comm.dispatch(*problem.arguments(context), layout=layout, copy=True)
    y = y.to(context.device, copy=True)
    dropped = tensors_in((y, routed._weights, routed._handle))
    sizes = [each.untyped_storage().nbytes() for each in dropped]
    side = comm._side_stream._stream
    if side is not None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG_CYCLES)
    out, event = comm.combine(y, routed, mode=mode, async_op=True)
    return out, event, sizes


# -- backward calls in a row ----------------------------------------------------------------------------------------

NUM_GRAPHS = CALLS_IN_FLIGHT + 3
SMALL: dict[str, Any] = {"tokens": (6, 0, 5, 7), "hidden": 16, "top_k": 2, "pick": "repeats", "unused": 0.2}
SMALL["dtype"] = FP32


@dataclass(frozen=True)
class Graph:
    """A result, the leaves that it came from, and the gradient that it is given."""

    result: torch.Tensor
    leaves: tuple[torch.Tensor, ...]
    given: torch.Tensor
    routed: tl.Routed

    def gradients(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.result, self.leaves, self.given, retain_graph=True)


def make_graph(context: RankContext, comm: tl.Communicator, index: int, *, combined: bool) -> Graph:
    """The ``index``-th: of a dispatch and its combine, or (``combined`` False) of x alone in a dispatch alone."""
    problem = make_problem(Case("backward", "", **SMALL, seed=index), context.num_ranks)
    generator = torch.Generator().manual_seed(100 * index + context.rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(context.device)

    x = random(*problem.xs[context.rank].shape).requires_grad_()
    _, ids, weights = problem.arguments(context)
    assert weights is not None
    if not combined:
        routed = comm.dispatch(x, ids, layout="token")
        return Graph(routed.tokens, (x,), random(*routed.tokens.shape), routed)
    weights.requires_grad_()
    routed = comm.dispatch(x, ids, weights, layout="expert" if index % 2 else "token")
    y = routed.tokens * 1.5
    if routed.layout == "token":
        assert routed.topk_weights is not None
        y = y * (routed.topk_weights[:, :1] + routed.topk_weights[:, 1:])
    return Graph(comm.combine(y, routed), (x, weights), random(*x.shape), routed)


def same_gradients(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], what: str) -> None:
    same_bits(got[0], want[0].cpu(), f"gradient of x, {what}")
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        # Dot products of 16 float32 numbers near 1, which torch may add in another order.
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("overflow", [False, True], ids=["", "after an overflow"])
def test_many_backward_calls_in_a_row(hoppers: Ranks, overflow: bool) -> None:
    """Only forward calls read outcomes: with more backward calls in a row than there are slots for outcomes, one call
    wrote into the slot of another that the host had not read, and an overflow was lost, or was another call's."""
    turns = hoppers.run(check_many_backward_calls, overflow)
    assert len(set(turns)) == 1, f"turns at which ranks heard of the overflow: {turns}"


def check_many_backward_calls(context: RankContext, overflow: bool) -> int | None:
    """Returns: the turn at which the overflow was raised."""
    much = make_problem(Case("much", "", **(SMALL | {"pick": "one rank"})), context.num_ranks)
    needed = much.rows_needed("expert")
    x, ids, weights = much.arguments(context)
    raised: list[tuple[int, tl.CapacityOverflow]] = []
    with new_comm(context, much.plan, checked=False) as comm, make_comm(context, "collective", much.plan) as other:
        graphs = [make_graph(context, comm, index, combined=True) for index in range(NUM_GRAPHS)]
        if overflow:
            comm.dispatch(x, ids, weights, sizes="bounded", capacity=needed - 1)
        got = {}
        for turn, index in enumerate(reversed(range(NUM_GRAPHS))):
            try:
                got[index] = graphs[index].gradients()
            except tl.CapacityOverflow as error:
                raised.append((turn, error))
                got[index] = graphs[index].gradients()
        comm.check()
        assert [(error.needed, error.capacity) for _, error in raised] == [(needed, needed - 1)] * overflow
        for index in range(NUM_GRAPHS):
            want = make_graph(context, other, index, combined=True)
            same_bits(graphs[index].result, want.result.detach().cpu(), f"graph {index}")
            same_gradients(got[index], want.gradients(), f"graph {index}")
    return raised[0][0] if raised else None


def test_backward_calls_that_disagree(several: Ranks) -> None:
    """Two errors in a row of backward calls: both are raised, each with the numbers of its own dispatches, at the same
    calls of all ranks, and what was not refused is right."""
    several.run(check_disagreeing_backward)


def check_disagreeing_backward(context: RankContext) -> None:
    plan = make_problem(Case("backward", "", **SMALL), context.num_ranks).plan
    odd = context.num_ranks - 1
    order = list(range(NUM_GRAPHS))
    if context.rank == odd:
        order[:2] = [1, 0]
    raised: list[tuple[int, str]] = []
    got = {}
    with new_comm(context, plan, checked=False) as comm, make_comm(context, "collective", plan) as other:
        graphs = [make_graph(context, comm, index, combined=False) for index in range(NUM_GRAPHS)]
        for turn, index in enumerate(order):
            try:
                got[index] = graphs[index].gradients()
            except tl.PlanMismatch as error:
                raised.append((turn, str(error)))
                got[index] = graphs[index].gradients()
        comm.check()
        first, second = (graph.routed._handle.number for graph in graphs[:2])
        assert [turn for turn, _ in raised] == [CALLS_IN_FLIGHT + 1, CALLS_IN_FLIGHT + 2]
        for (_, text), theirs, rank0s in zip(raised, (second, first), (first, second), strict=True):
            assert f"rank {odd} has dispatch number={theirs}, rank 0 has dispatch number={rank0s}" in text
        for index in range(NUM_GRAPHS):  # the first two once more, now that ranks agree
            want = make_graph(context, other, index, combined=False).gradients()
            same_gradients(graphs[index].gradients() if index < 2 else got[index], want, f"graph {index}")
        comm.check()


# -- captures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["exact sizes", "dispatch, checked", "combine, checked"])
def test_host_reads_are_not_captured(hoppers: Ranks, what: str) -> None:
    """The host cannot read in a capture, and CUDA's own error broke it, and the communicator with it. What is asked
    for can be told before anything touches the GPU."""
    hoppers.run(check_host_reads, what)


def check_host_reads(context: RankContext, what: str) -> None:
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


@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_communicators_come_and_go(hoppers: Ranks, how: str) -> None:
    """A communicator that is dropped lets go of its memory whenever Python collects it, on every rank at another time.
    The driver gave the address of what was freed to the next buffer of that size, which ranks that had not let go
    of the old one could not map (CUDA_ERROR_ALREADY_MAPPED). Memory is freed when the last has let go of it."""
    hoppers.run(check_come_and_go, how == "closed")


def check_come_and_go(context: RankContext, closed: bool) -> None:
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
        backend: Any = comm._backend
        buffers = [backend.calls.control, *backend._buffers.values()]
        return sum(buffer.regions.total_bytes for buffer in buffers)


def free_memory() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
