"""Calls in CUDA graphs: every replay reads its routing anew, in any order, beside eager calls, without the host."""

from __future__ import annotations

import gc
import itertools
import random

import pytest
import torch

import tokenloom as tl
from tests.support.cases import (
    BF16,
    FP32,
    Case,
    make_comm,
    make_problem,
    on_another_stream,
    same_bits,
    same_routed,
)
from tests.support.graph_cases import (
    EXPERT,
    KINDS,
    RANK,
    ROUNDS,
    SLOTS,
    TOKEN,
    Captured,
    Kind,
    Round,
    Step,
    plan_of,
    problem_of,
)
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.jit import kernel
from tokenloom.runtime.processes import RankContext

BACKEND = "nvlink"
REPLAYS_IN_A_ROW = 200


def new_comm(context: RankContext) -> tl.Communicator:
    """``checked`` reads on the host, which a capture does not allow."""
    return make_comm(context, BACKEND, plan_of(context.num_ranks), checked=False)


@on_ranks("hoppers")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_replay(context: RankContext, kind: Kind) -> None:
    """A graph has frozen addresses and options, not counts: each replay dispatches what its tensors hold by then.
    Every field of the dispatch and the result, bit for bit, for every routing; twice, as epochs must go on."""
    with new_comm(context) as comm:
        step = Step(context, comm, kind)
        captured = Captured(step)
        for round_ in (*ROUNDS, ROUNDS[0]):
            step.load(round_)
            for turn in ("once", "again"):
                captured.replay()
                routed, out = captured.results
                want_routed, want_out = step.expected(round_)
                same_routed(routed, want_routed, comm.plan, bounded=True)
                same_bits(out, want_out, f"{kind.name}, {round_.why}, {turn}")
        comm.check()


HALVES = [kind for kind in KINDS if kind.halves]


@on_ranks("hoppers")
@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_micro_batches_in_turns(context: RankContext, kind: Kind) -> None:
    """Two calls are open all along, in one graph, with work between their halves; replays find what is theirs."""
    with new_comm(context) as comm:
        steps = [Step(context, comm, kind), Step(context, comm, kind)]

        def turns() -> list[torch.Tensor]:
            sent = [step.send_dispatch() for step in steps]
            home = [steps[0].send_combine(sent[0].receive())]
            home.append(steps[1].send_combine(sent[1].receive()))
            return [each.receive() for each in home]

        captured = Captured(turns)
        for rounds in itertools.pairwise((*ROUNDS, ROUNDS[0])):
            for step, round_ in zip(steps, rounds, strict=True):
                step.load(round_)
            for _ in range(3):
                captured.replay()
            for out, step, round_ in zip(captured.results, steps, rounds, strict=True):
                same_bits(out, step.expected(round_)[1], f"{kind.name}, {round_.why}")
        comm.check()


@on_ranks("hoppers")
@pytest.mark.alone  # contexts that share a GPU take turns: every wait for a peer is a turn of all others
def test_many_replays_in_a_row(context: RankContext) -> None:
    """The host is far ahead of the GPUs and ranks of each other: buffers and flags are reused in time, not before."""
    for kind in (TOKEN, EXPERT, RANK, SLOTS, *HALVES):
        with new_comm(context) as comm:
            step = Step(context, comm, kind)
            captured = Captured(step)
            step.prepare(ROUNDS)
            out = captured.results[1]
            outs = torch.empty(REPLAYS_IN_A_ROW, *out.shape, dtype=out.dtype, device=out.device)
            for turn in range(REPLAYS_IN_A_ROW):
                step.load(ROUNDS[turn % len(ROUNDS)])
                captured.replay()
                outs[turn].copy_(out)
            comm.check()
            for turn, got in enumerate(outs.cpu()):
                round_ = ROUNDS[turn % len(ROUNDS)]
                same_bits(got, step.expected(round_)[1], f"{kind.name}, replay {turn}, {round_.why}")


@on_ranks("hoppers")
def test_replays_among_eager_calls(context: RankContext) -> None:
    """Several graphs of two communicators, in an order that none was captured in, with eager calls in between: calls
    are counted on the device, so that a replay that the host knows nothing of takes its place among them. And an eager
    dispatch with tensors of its own is combined after replays that used both receive buffers."""
    order = random.Random(1)  # the same on all ranks
    comms = [new_comm(context) for _ in range(2)]
    # Two of each kind: one for graphs, one for eager calls. Both communicators have several kinds.
    kinds = [TOKEN, EXPERT, RANK, KINDS[5], KINDS[7], EXPERT, HALVES[0], HALVES[1]]
    steps = [Step(context, comms[i % 2], kind) for i, kind in enumerate(kinds)]
    eager = [Step(context, comms[i % 2], kind) for i, kind in enumerate(kinds)]
    graphs = []
    for i, step in enumerate(steps):
        if i in (2, 3):
            eager[i]()  # shifts the turns of the two receive buffers: graphs of both are there then
        graphs.append(Captured(step))
    held: list[tuple[Step, Round, tl.Routed]] = []
    results: list[tuple[torch.Tensor, Step, Round, str]] = []

    for turn in range(80):
        round_, which = order.choice(ROUNDS), order.randrange(len(kinds))
        steps[which].load(round_)
        graphs[which].replay()
        results.append((graphs[which].results[1].clone(), steps[which], round_, f"turn {turn}, replay"))

        round_, step = order.choice(ROUNDS), order.choice(eager)
        action = order.choice(("nothing", "bounded", "exact", "hold", "release", "release"))
        if action in ("bounded", "exact"):
            step.load(round_)
            out = step.finish(step.dispatch(sizes=action))
            results.append((out, step, round_, f"turn {turn}, eager, {action}"))
        elif action == "hold":
            # The ids of a step change with its next round, and a combine per route reads them.
            step = Step(context, step.comm, step.kind)
            step.load(round_)
            held.append((step, round_, step.dispatch(copy=True)))
        elif action == "release" and held:
            step, round_, routed = held.pop(order.randrange(len(held)))
            results.append((step.finish(routed), step, round_, f"turn {turn}, held"))

    for comm in comms:
        comm.check()
    said = " ".join(what for *_, what in results)
    assert all(action in said for action in ("replay", "bounded", "exact", "held")), "the order leaves something out"
    for got, step, round_, what in results:
        same_bits(got, step.expected(round_)[1], f"{what}, {step.kind.name}, {round_.why}")
    for comm in comms:
        comm.close()


@on_ranks("hoppers")
def test_two_streams(context: RankContext) -> None:
    """Two communicators at once, each on a stream of its own: their graphs share nothing and need not wait in turn."""
    turns = 50
    comms = [new_comm(context) for _ in range(2)]
    steps = [Step(context, comm, kind) for comm, kind in zip(comms, (TOKEN, EXPERT), strict=True)]
    graphs = [Captured(step) for step in steps]
    outs = [[torch.empty_like(graph.results[1]) for _ in range(turns)] for graph in graphs]
    for step in steps:
        step.prepare(ROUNDS)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for turn in range(turns):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                steps[i].load(ROUNDS[(turn + i) % len(ROUNDS)])
                graphs[i].replay()
                outs[i][turn].copy_(graphs[i].results[1])
    for comm in comms:
        comm.check()
    for i, step in enumerate(steps):
        for turn, got in enumerate(outs[i]):
            round_ = ROUNDS[(turn + i) % len(ROUNDS)]
            same_bits(got, step.expected(round_)[1], f"{step.kind.name}, replay {turn}, {round_.why}")
    for comm in comms:
        comm.close()


# -- what a graph may run into ------------------------------------------------------------------------------------

GOOD = Round("few tokens", "distinct", used=0.2, seed=8)
BAD = Round("all tokens to one rank", "one rank", seed=9)


@on_ranks("hoppers")
@pytest.mark.parametrize("kind", [TOKEN, EXPERT, KINDS[7], SLOTS, *HALVES[:2]], ids=lambda kind: kind.name)
def test_overflow(context: RankContext, kind: Kind) -> None:
    """More rows than the capacity in a replay: the tokens concerned are NaN, and check says once, on all ranks, how
    many it takes, even if a replay that fits came after it. Nothing else is disturbed, and that capacity is enough."""
    num_ranks = context.num_ranks
    needed = {each: problem_of(each, kind, num_ranks).rows_needed(kind.layout, kind.alignment) for each in (GOOD, BAD)}
    assert needed[GOOD] < needed[BAD]
    with new_comm(context) as comm:
        step = Step(context, comm, kind, capacity=needed[GOOD])
        step.load(GOOD)
        captured = Captured(step)

        def replay(round_: Round) -> None:
            step.load(round_)
            captured.replay()
            want_routed, want_out = step.expected(round_)
            same_routed(captured.results[0], want_routed, comm.plan, bounded=True)
            same_bits(captured.results[1], want_out, f"{kind.name}, {round_.why}")

        for rounds in ([BAD], [GOOD, BAD, GOOD]):
            for round_ in rounds:
                replay(round_)
            with pytest.raises(tl.CapacityOverflow) as overflow:
                comm.check()
            assert overflow.value.needed == needed[BAD]
            comm.check()  # it was said
            replay(GOOD)
            comm.check()

        x_is_finite = problem_of(BAD, kind, num_ranks).xs[0].isfinite().all(1)
        dropped = step.expected(BAD)[1].isnan().all(1)
        if context.rank == 0:
            assert (dropped & x_is_finite).any(), "no token of rank 0 is NaN for what was dropped"

        step = Step(context, comm, kind, capacity=overflow.value.needed)
        step.load(BAD)
        captured = Captured(step)
        for round_ in (BAD, GOOD):
            replay(round_)
        comm.check()


@on_ranks("hoppers")
def test_branches_of_a_graph(context: RankContext) -> None:
    """Branches of a graph run at the same time, and calls that did would share flags, claims and an epoch: so calls
    follow each other in a graph as they do outside of it, whatever their streams wait for."""
    with new_comm(context) as comm:
        steps = [Step(context, comm, EXPERT), Step(context, comm, EXPERT)]
        fork = torch.cuda.Stream()

        def both() -> list[torch.Tensor]:
            main = torch.cuda.current_stream()
            fork.wait_stream(main)
            with torch.cuda.stream(fork):
                first = steps[0].dispatch(copy=True)
            second = steps[1].dispatch(copy=True)
            main.wait_stream(fork)
            return [step.finish(routed) for step, routed in zip(steps, (first, second), strict=True)]

        captured = Captured(both)
        for rounds in itertools.pairwise(ROUNDS):
            for step, round_ in zip(steps, rounds, strict=True):
                step.load(round_)
            for _ in range(3):
                captured.replay()
            for result, step, round_ in zip(captured.results, steps, rounds, strict=True):
                same_bits(result, step.expected(round_)[1], round_.why)
        comm.check()


@on_ranks("hoppers")
def test_the_first_call_is_not_captured(context: RankContext) -> None:
    """Buffers cannot be allocated in a capture: the error says what to do, on all ranks, and doing so helps."""
    with new_comm(context) as other:
        Step(context, other, TOKEN)()  # loads the kernels, so that only buffers are missing below
    with new_comm(context) as comm:
        step = Step(context, comm, TOKEN)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(tl.InvalidArgument, match="make it once before the capture"),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            step()
        captured = Captured(step)
        for round_ in ROUNDS[:2]:
            step.load(round_)
            captured.replay()
            same_bits(captured.results[1], step.expected(round_)[1], round_.why)
        comm.check()


SMALL = Case("graphs", "", tokens=(9, 0, 5, 7), hidden=136, top_k=3, experts_per_rank=5, unused=0.2, dtype=BF16)
FIRST_USES = {
    "dispatch": lambda comm, given, routed: comm.dispatch(*given, layout="rank", sizes="bounded"),
    "combine": lambda comm, given, routed: comm.combine(routed.tokens, routed, out_dtype=FP32),
    "weights of rows": lambda comm, given, routed: comm.row_weights(
        comm.dispatch(*given, layout="expert", sizes="bounded", capacity=200)
    ),
}


@on_ranks("hoppers")
@pytest.mark.parametrize("what", FIRST_USES)
def test_a_kernel_that_is_not_loaded(context: RankContext, what: str) -> None:
    """Loading a kernel ends a capture. The error comes before that, so what is captured before and after it replays;
    also where the communicator has worked on a stream of its own, which the graph knows nothing of."""
    kernel._function.cache_clear()  # tests before this one may have loaded what it uses first
    problem = make_problem(SMALL, context.num_ranks)
    want = problem.dispatched("token", bounded=True, capacity=problem.plan.worst_case_rows("token"))
    ys = [each.tokens for each in want]
    expected = reference.combine(problem.plan, ys, want, problem.topk_ids, None)[context.rank]
    given = problem.arguments(context)
    with make_comm(context, BACKEND, problem.plan, checked=False) as comm, torch.no_grad():

        def step() -> tuple[tl.Routed, torch.Tensor]:
            routed = comm.dispatch(*given, layout="token", sizes="bounded")
            return routed, comm.combine(routed.tokens, routed)

        step()
        with on_another_stream(context.device):
            comm.dispatch(*given, layout="token", sizes="bounded")
        if what == "weights of rows":
            comm.dispatch(*given, layout="expert", sizes="bounded", capacity=200)
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            routed, first = step()
            with pytest.raises(tl.InvalidArgument, match="before the capture"):
                FIRST_USES[what](comm, given, routed)
            second = step()[1]
        for _ in range(3):
            graph.replay()
            same_bits(first, expected, "before the error")
            same_bits(second, expected, "after the error")
        comm.check()
        routed, _ = step()
        FIRST_USES[what](comm, given, routed)  # outside of the capture it loads
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            routed, _ = step()
            FIRST_USES[what](comm, given, routed)
        comm.check()
