"""Backend "nvlink": what a review of it found wrong, so that it stays right.

What every backend must do is tested elsewhere, on this one too. Here are the ways in which this one could fail that
come of what is its own: errors that the host learns of later, receive buffers used in turn, epochs.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends.large_plans import in_large_plan
from tests.conftest import Ranks
from tests.support.cases import BF16, FP8, Case, Problem, make_problem, same_routed
from tests.support.nvlink_cases import LAYOUTS, launcher_of, meet, new_comm, round_trip
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.backends.peers import buffers
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT
from tokenloom.errors import TokenloomError
from tokenloom.runtime.processes import RankContext

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


@on_ranks("hoppers")
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_rounds_after_faults(context: RankContext, checked: bool) -> None:
    """A rank that had failed had not dispatched, or had dispatched while others combined: from then on ranks differed
    in which receive buffer's turn it was, and in the number of the dispatch. Rows went to the buffer that their
    sender was at. Now every rank says where it wants them."""
    case: dict[str, Any] = {"tokens": (8, 5, 6, 7), "spare": 8, "hidden": 64, "top_k": 3, "experts_per_rank": 2}
    problems = [make_problem(Case("rounds", "", **case, seed=seed), context.num_ranks) for seed in range(3)]
    problems = [in_large_plan(each) for each in problems]  # whose bounded dispatches use receive buffers too
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
            assert places_after == places, f"after {fault!r} views are no longer of the two receive buffers"


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
    assert places[0] == places[2] != places[1], "the two receive buffers do not take turns"
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


@on_ranks("hoppers")
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_more_rows_than_a_receive_buffer_holds(context: RankContext, alignment: int, dtype: torch.dtype) -> None:
    """Exact sizes have no limit: what does not fit a receive buffer comes as layout "token" and is spread on arrival.
    The combine of such a dispatch, per route, went by tokens of received rows that nobody had written."""
    case = Case("too many", "", tokens=(100, 60, 0, 77), spare=3, experts_per_rank=2, hidden=128, top_k=4,
                pick="one rank", unused=0.05, dtype=dtype)  # fmt: skip
    problem = make_problem(case, context.num_ranks)
    needed = problem.rows_needed("expert", alignment)
    with mock.patch.object(buffers, "EXPERT_ROOM", 0.0):
        assert buffers.receive_rows(problem.plan) < needed, "the buffer is large enough"
        with new_comm(context, problem.plan, checked=False) as comm:
            for capacity in (None, needed):
                round_trip(context, comm, problem, "expert", alignment=alignment, capacity=capacity)
            with pytest.raises(tl.CapacityOverflow, match="nothing is handed out") as overflow:
                round_trip(context, comm, problem, "expert", alignment=alignment, capacity=needed - 1)
            assert (overflow.value.needed, overflow.value.capacity) == (needed, needed - 1)
            with torch.no_grad():  # views before and after it
                for layout in ("token", "expert", "rank", "token"):
                    round_trip(context, comm, problem, layout, alignment=alignment if layout == "expert" else 1)
            comm.check()


@on_ranks("hoppers")
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_an_overflow_before_an_exact_dispatch(context: RankContext, checked: bool) -> None:
    """The exact dispatch reads the outcomes of all calls, and took the first overflow for its own: it sent everything
    again by the way of what does not fit, or named a capacity that nobody had given it."""
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


@on_ranks("hoppers")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [2**31 - 3, 2**31 + 5, 2**32 - 2, 2**32 - 3], ids=lambda start: f"{start:#x}")
def test_epochs_wrap(context: RankContext, start: int, layout: str) -> None:
    """Flags were compared by the sign of a difference of 32 bits: those that had not been raised for 2^31 calls, as on
    a new communicator that starts here, counted as raised. At 2^32 epochs begin anew, and 0 is what a flag shows that
    never was: of the two starts just before, one has a dispatch there and the other a combine (a new communicator
    opens a call before its first dispatch)."""
    # More tokens than the sending warps of a default grid: they claim the rest once all blocks have found their slots.
    case = Case("epochs", "", tokens=(150, 0, 90, 140), hidden=64, top_k=4, pick="repeats", unused=0.2)
    problem = make_problem(case, context.num_ranks)
    with new_comm(context, problem.plan, checked=False) as comm, torch.no_grad():
        set_epoch(context, comm, start)
        for sizes in ("exact", "bounded", "exact"):
            round_trip(context, comm, problem, layout, sizes=sizes)
        comm.check()
        launcher = launcher_of(comm)
        assert launcher.num_calls > 5
        # One epoch for each call, 0 to 3 perhaps left out.
        assert (int(launcher._state[0]) - start) % 2**32 - launcher.num_calls in range(6)


def set_epoch(context: RankContext, comm: tl.Communicator, epoch: int) -> None:
    """As after so many calls, none of which raised flags."""
    launcher = launcher_of(comm)
    bits = epoch - 2**32 if epoch >= 2**31 else epoch
    meet(context)
    launcher._state[0] = bits
    meet(context)
