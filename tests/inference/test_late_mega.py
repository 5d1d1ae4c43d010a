"""MegaMoE with on_timeout="mask", and ranks that come back: a call without a rank is whole wherever replicas are.

On the emulator a rank is killed anywhere, in the middle of a kernel too. Processes that are killed on GPUs are in
test_late_mega_on_gpus.py.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends.test_nvlink_masks import meet
from tests.comm.test_placed_masks import replicated
from tests.conftest import Ranks
from tests.inference.test_placed_mega import PLACED, TINY, plan_of
from tests.support import emulator
from tests.support.mega_cases import Case, Layer, assert_near, expected, inputs, make_layer, make_mega
from tests.support.on_ranks import on_ranks
from tests.support.patience import done, when_done
from tokenloom import reference
from tokenloom.runtime import membership
from tokenloom.runtime.processes import RankContext

EMULATED = True
ONLY_EMULATED = pytest.mark.skipif(not emulator.ON, reason="ranks of a pool of processes are not killed")
LONG_S = 30.0
TOKENS = (9, 6, 5, 7)
CASES = {
    "block": replace(TINY, tokens=TOKENS, quantised=True),
    "row": replace(TINY, tokens=TOKENS, recipe="row"),
    "everything of block": replace(PLACED["everything of block"], tokens=TOKENS),
    "padded": replace(PLACED["padded"], tokens=TOKENS),
}
STAGES = ("", "dispatch", "gemm1", "gemm2", "sum")
"""Where a rank ends: before a call, or behind the launch of a kernel."""


def placement_of(case: Case, num_ranks: int, which: str) -> tl.Placement | None:
    """With replicas of all, some or none of the experts; or no placement."""
    return None if which == "no placement" else replicated(which, plan_of(case, num_ranks))


def routes_without(
    case: Case, layer: Layer, placement: tl.Placement | None, masked: list[int]
) -> tuple[Layer, list[torch.Tensor]]:
    """The layer whose lost routes are -1, and the routes to each slot, by rank, of ranks that are left."""
    num_ranks = len(layer.ids)
    plan = plan_of(case, num_ranks)
    table = (placement or tl.Placement.default(plan.num_experts, num_ranks)).to_tensor().tolist()
    _, slots = reference.place(plan, [ids.cpu() for ids in layer.ids], table, masked)
    ids = [torch.where(of.to(ids.device) < 0, -1, ids) for of, ids in zip(slots, layer.ids, strict=True)]
    living = torch.cat([of.flatten() for rank, of in enumerate(slots) if rank not in masked])
    counts = torch.bincount(living[living >= 0], minlength=num_ranks * len(table[0])).view(num_ranks, -1)
    return replace(layer, ids=ids), list(counts.to(torch.int32))


class Wanted:
    """What calls of a layer give that masks ranks by hand: bits, and how often each slot is counted.

    Attributes:
        by_masked: outputs of this rank, by who is masked.
    """

    def __init__(self, context: RankContext, case: Case, layer: Layer, which: str, masked: list[list[int]]) -> None:
        self._context, self._case, self._layer = context, case, layer
        self._placement = placement_of(case, context.num_ranks, which)
        self.given = inputs(case, layer, context.rank)
        self.by_masked: dict[tuple[int, ...], torch.Tensor] = {}
        mega = self.make()
        for gone in masked:
            if context.rank in gone:
                break
            mega.comm.mask_ranks(gone)
            out = mega(*self.given)
            assert_near(out, expected(case, routes_without(case, layer, self._placement, gone)[0], context.rank))
            self.by_masked[tuple(gone)] = out
        mega.check()
        mega.close()
        meet(context)  # who is left may have compiled kernels meanwhile

    def make(self, **options: Any) -> tl.MegaMoE:
        options = {"timeout_s": LONG_S} | options
        return make_mega(self._context, self._case, self._layer, placement=self._placement, **options)

    def stats(self) -> torch.Tensor:
        """Zeros to count in."""
        slots = self._case.experts_per_rank if self._placement is None else self._placement.slots_per_rank
        return torch.zeros(slots, dtype=torch.int32, device=self._context.device)

    def require(self, mega: tl.MegaMoE, masked: list[int], ways: tuple[str, ...] = ("", "out", "x")) -> None:
        """Make calls, with a result of their own, with one of the caller's, or in the place of x: all bits and counts
        are those of a call without these ranks."""
        _, counts = routes_without(self._case, self._layer, self._placement, masked)
        for way in ways:
            x, *rest = self.given
            stats = self.stats() + 5
            if way == "x" and (isinstance(x, tuple) or x.dtype != torch.bfloat16):
                continue
            x = x.clone() if way == "x" else x
            out = torch.full_like(self.by_masked[()], 7.0) if way == "out" else x if way == "x" else None
            found = mega(x, *rest, stats, out=out)
            assert torch.equal(found, self.by_masked[tuple(masked)]), (way, masked)
            assert out is None or found is out
            assert torch.equal(stats.cpu(), counts[self._context.rank] + 5), (way, masked)
            assert mega.comm.masked_ranks() == masked


def end(context: RankContext) -> None:
    """End this rank as a signal would: nothing of it goes on, not what it does on an error either."""
    from tests.support.emulator import group as emulated

    emulated.here.group.kill(context.rank)
    raise emulated.Ended


def make_all(context: RankContext, name: str, which: str, gone: list[list[int]]) -> Wanted:
    case = CASES[name]
    return Wanted(context, case, make_layer(case, context.num_ranks, context.device), which, gone)


# -- everybody is there -----------------------------------------------------------------------------------------


@on_ranks("several")
@pytest.mark.parametrize("name", CASES)
def test_nobody_is_late(context: RankContext, name: str) -> None:
    """Results, counts, and errors are those of any layer, and come at once: on all ranks in the same call."""
    check_nobody_is_late(context, name)


def check_nobody_is_late(context: RankContext, name: str) -> None:
    wanted = make_all(context, name, "some", [[]])
    x, ids, weights = wanted.given
    with wanted.make(on_timeout="mask") as mega:
        for first in (True, False):
            for _ in range(2):  # before there is memory, too
                wrong = torch.zeros(1, device=context.device) if context.rank == 0 else None
                with pytest.raises(tl.TokenloomError if context.rank == 0 else tl.PeerError, match="expert_stats is"):
                    mega(x, ids, weights, wrong)
            wanted.require(mega, [], ("", "out", "x") if first else ("",))
        mega.check()


class Mishap(Exception):
    """What goes wrong on one rank."""


@on_ranks("several")
@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_fault_in_a_call(context: RankContext, stage: str) -> None:
    """Of one rank, behind any of its kernels: the others hear of it in this call, and nobody is lost."""
    check_fault_in_a_call(context, stage)


def check_fault_in_a_call(context: RankContext, stage: str) -> None:
    wanted = make_all(context, "block", "all", [[]])

    def fail(name: str) -> None:
        if name == stage:
            raise Mishap(stage)

    with wanted.make(on_timeout="mask") as mega:
        for _ in range(2):
            wanted.require(mega, [], ("",))
            mega.after_stage, stats = (fail if context.rank == 0 else None), wanted.stats()
            out = torch.full((len(wanted.given[1]), 128), 7.0, dtype=torch.bfloat16, device=context.device)
            with pytest.raises(Mishap if context.rank == 0 else tl.PeerError, match=stage):
                mega(*wanted.given, stats, out=out)
            assert not stats.any()
            assert (out == 7.0).all()
            mega.after_stage = None
        wanted.require(mega, [], ("",))
        mega.check()


# -- ranks that end ---------------------------------------------------------------------------------------------


def both(context: RankContext, gone: int) -> list[list[int]]:
    return [[], [gone]] if context.rank != gone else [[]]


@on_ranks("several")
@ONLY_EMULATED
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("name", "which"), [("row", "all"), ("block", "some"), ("everything of block", "none"), ("padded", "no placement")]
)
def test_death_at_every_stage(context: RankContext, name: str, which: str, stage: str) -> None:
    """Nobody has ended a call that the rank has not, so the others make it without, and so they do the next ones."""
    check_death(context, name, which, stage)


def check_death(context: RankContext, name: str, which: str, stage: str) -> None:
    gone = 0
    wanted = make_all(context, name, which, both(context, gone))
    with wanted.make(on_timeout="mask") as mega:
        wanted.require(mega, [], ("",))
        if context.rank == gone:
            mega.after_stage = lambda name: end(context) if name == stage else None
            if not stage:
                end(context)
        wanted.require(mega, [gone], ("x", "out", ""))  # the call that is hit overwrites what it is given
        mega.check()


@on_ranks("several")
@ONLY_EMULATED
@pytest.mark.parametrize("how", ["at a replay", "in it"])
def test_death_and_graphs(context: RankContext, how: str) -> None:
    """No host waits for a replay. What waits for the rank gives NaN, and the check says so on all ranks that are left.
    The graph goes on without the rank, beside calls, which may lose another one."""
    from tests.support.emulator.graphs import capture

    ranks = range(context.num_ranks - 1)
    wanted = make_all(context, "row", "no placement", [[*range(gone)] for gone in range(min(context.rank, 2) + 1)])
    with wanted.make(on_timeout="mask") as mega:
        wanted.require(mega, [], ("",))
        with capture() as graph:
            captured = mega(*wanted.given)
        for gone in ranks[:2]:
            masked = [*range(gone)]
            for _ in range(2):
                captured.zero_()
                graph.replay()
                mega.check()
                assert torch.equal(captured, wanted.by_masked[tuple(masked)])
            wanted.require(mega, masked, ("",))
            if context.rank == gone:
                if how == "in it":
                    graph.replay()
                end(context)
            if gone == 1:  # it is lost in a call
                wanted.require(mega, [0, 1], ("",))
            else:
                graph.replay()
                with (
                    contextlib.suppress(tl.PeerError) if how == "in it" else pytest.raises(tl.PeerError, match="void")
                ):
                    mega.check()
                    assert torch.equal(captured, wanted.by_masked[()]), "all ranks had its rows"
                    wanted.require(mega, [0], ("",))
            graph.replay()
            mega.check()
            assert torch.equal(captured, wanted.by_masked[(*masked, gone)])


def check_death_in_any_mode(context: RankContext, modes: tuple[bool, bool]) -> None:
    """Calls before the death, and those behind it, are in inference mode or not."""
    gone = 0
    wanted = make_all(context, "block", "some", both(context, gone))
    with wanted.make(on_timeout="mask") as mega:
        with torch.inference_mode(modes[0]):
            wanted.require(mega, [], ("", "out"))
        if context.rank == gone:
            end(context)
        with torch.inference_mode(modes[1]):
            wanted.require(mega, [gone], ("", "out"))
            mega.check()


@on_ranks("several")
@ONLY_EMULATED
@pytest.mark.parametrize("stage", ["", "dispatch"])
def test_death_in_the_first_call(context: RankContext, stage: str) -> None:
    """Before there is memory, or with all of it: what is made once is made again."""
    gone = context.num_ranks - 1
    wanted = make_all(context, "block", "some", both(context, gone))
    with wanted.make(on_timeout="mask") as mega:
        if context.rank == gone:
            mega.after_stage = lambda name: end(context)
            if not stage:
                end(context)
        wanted.require(mega, [gone])


@on_ranks("several")
@ONLY_EMULATED
def test_deaths_one_after_the_other(context: RankContext) -> None:
    """Until one is left, which goes on alone."""
    ranks = range(context.num_ranks)
    wanted = make_all(context, "block", "all", [[*range(gone)] for gone in ranks if gone <= context.rank])
    with wanted.make(on_timeout="mask") as mega:
        for gone in ranks:
            wanted.require(mega, [*range(gone)], ("",))
            if gone == context.rank:
                end(context)


@on_ranks("several")
@ONLY_EMULATED
@pytest.mark.parametrize("again", ["loaded", "late"])
def test_a_fault_in_the_repeated_call(context: RankContext, again: str) -> None:
    """A rank that fails as a call is made again tells the others by what they open then; the next call is whole."""
    if context.num_ranks == 2:
        pytest.skip("nobody else would hear of it")
    check_fault_in_the_repeated_call(context, again)


def check_fault_in_the_repeated_call(context: RankContext, again: str) -> None:
    gone, faulty = 0, context.num_ranks - 1
    wanted = make_all(context, "row", "all", both(context, gone))
    with wanted.make(on_timeout="mask") as mega:
        wanted.require(mega, [], ("",))
        if context.rank == gone:
            mega.after_stage = lambda name: end(context) if name == "gemm1" else None
        if context.rank == faulty:
            stages: list[str] = []

            def fail(name: str) -> None:
                stages.append(name)
                if stages.count("dispatch") == 2 and name == ("dispatch" if again == "loaded" else "sum"):
                    raise Mishap("the second time")

            mega.after_stage = fail
        with pytest.raises(Mishap if context.rank == faulty else tl.PeerError, match="the second time"):
            mega(*wanted.given)
        mega.after_stage = None
        wanted.require(mega, [gone])


@on_ranks("several")
@ONLY_EMULATED
def test_a_fault_beside_a_death(context: RankContext) -> None:
    """A rank tells of a fault while another one ends: it tells those that are left, by what they open then."""
    gone, faulty = 0, context.num_ranks - 1
    if faulty == 1:
        pytest.skip("nobody else would hear of it")
    wanted = make_all(context, "row", "all", both(context, gone))
    with wanted.make(on_timeout="mask") as mega:
        wanted.require(mega, [], ("",))
        if context.rank == gone:
            end(context)
        x, ids, weights = wanted.given
        wrong = torch.zeros(1, device=context.device) if context.rank == faulty else None
        with pytest.raises(tl.TokenloomError if context.rank == faulty else tl.PeerError, match="expert_stats is"):
            mega(x, ids, weights, wrong)
        wanted.require(mega, [gone])


def serve(context: RankContext, num_calls: int, report: Callable[[int, int], None], name: str) -> list[list[int]]:
    """Calls of which each is whole or lacks what ranks had that are lost; who was masked behind each."""
    case = CASES[name]
    layer = make_layer(case, context.num_ranks, context.device)
    given = inputs(case, layer, context.rank)
    placement = placement_of(case, context.num_ranks, "some")
    history: list[list[int]] = []
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    with make_mega(context, case, layer, placement=placement, on_timeout="mask", timeout_s=LONG_S) as mega:
        for number in range(num_calls):
            report(context.rank, number)
            before, stats = mega.comm.masked_ranks(), torch.zeros(4, dtype=torch.int32, device=context.device)
            out = mega(*given, stats)
            # A rank that ended in the meeting took part, so the call may be that of the ranks before.
            masked = mega.comm.masked_ranks()
            found = []
            for gone in {tuple(before), tuple(masked)}:
                rest, counts = routes_without(case, layer, placement, list(gone))
                if torch.equal(stats.cpu(), counts[context.rank]):
                    assert_near(out, expected(case, rest, context.rank))
                    found.append(gone)
                    assert torch.equal(seen.setdefault(gone, out.clone()), out), f"other bits without {gone}"
            assert found, f"call {number}: {stats} counts for neither {before} nor {masked}"
            history.append(masked)
    return history


@ONLY_EMULATED
@pytest.mark.parametrize("seed", range(4))
def test_death_anywhere(several: Ranks, seed: int) -> None:
    """A rank is killed in the middle of whatever its kernels and its host do; all others make all calls. Then another
    one is, as long as two are left."""
    from tests.support.emulator import group as emulated

    draw = random.Random(seed + 100 * emulator.SEED)
    num_calls, victims = 9, draw.sample(range(several.num_ranks), several.num_ranks // 2)
    at = [(2 + 3 * turn, victim) for turn, victim in enumerate(victims)]
    lock, killed = threading.Lock(), []

    def report(rank: int, number: int) -> None:
        with lock:
            if at and (number, rank) == at[0]:
                _, victim = at.pop(0)
                killed.append(victim)
                emulated.here.group.kill_within(draw.randrange(60_000), victim)

    results = several.run(serve, num_calls, report, ("block", "row")[seed % 2])
    left = [history for history in results if history is not None]
    assert len(left) == several.num_ranks - len(killed)
    assert left[0][-1] == sorted(killed)


# -- ranks that are late ----------------------------------------------------------------------------------------


def test_late(several: Ranks) -> None:
    """A rank that lives and is late is masked; it hears of that when it comes."""
    with ExitStack() as stack:
        if emulator.ON:
            from tests.support.emulator import group as emulated

            stack.enter_context(mock.patch.object(membership, "ROLL_CALL_S", 1.0))
            stack.enter_context(mock.patch.object(emulated, "TURNS_PER_NS", 1e-3))
        several.run(check_late)


def check_late(context: RankContext) -> None:
    wanted = make_all(context, "block", "some", both(context, 0))
    with wanted.make(on_timeout="mask") as mega:  # kernels are compiled
        mega(*wanted.given)
    # Not closed: the last one that leaves takes along what tells rank 0 that it is masked.
    mega = wanted.make(on_timeout="mask", timeout_s=3.0 if emulator.ON else 8.0)
    wanted.require(mega, [], ("",))
    ranks = mega.comm.engine.ranks
    if context.rank == 0:
        when_done(ranks, range(1, context.num_ranks))
        with pytest.raises(tl.CommunicatorBroken, match=r"have masked rank 0: rank \d waited in"):
            mega(*wanted.given)
        return
    try:
        wanted.require(mega, [0])
    finally:
        done(ranks)


# -- ranks that come back ---------------------------------------------------------------------------------------


@on_ranks("several")
@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
@pytest.mark.parametrize(("name", "which"), [("row", "some"), ("padded", "no placement")])
def test_back_again(context: RankContext, on_timeout: str, name: str, which: str) -> None:
    """A rank makes its layer again while the others take it back: all calls are as before the mask, on new memory."""
    check_back_again(context, on_timeout, name, which)


def check_back_again(context: RankContext, on_timeout: str, name: str, which: str) -> None:
    gone = context.num_ranks - 1
    wanted = make_all(context, name, which, both(context, gone))
    mega = wanted.make(on_timeout=on_timeout)
    for turn in range(2):
        wanted.require(mega, [], ("",))
        if context.rank == gone:
            mega.close()
            mega = wanted.make(on_timeout=on_timeout, rejoin=True)
        else:
            mega.comm.mask_ranks([gone])
            if turn == 0:
                wanted.require(mega, [gone], ("",))
            mega.comm.unmask_ranks([gone])
        assert mega.comm.masked_ranks() == mega.comm.lost_experts() == []
    wanted.require(mega, [])
    mega.check()
    if context.device.type == "cpu" and on_timeout == "mask":  # it may be lost once more
        if context.rank == gone:
            end(context)
        wanted.require(mega, [gone])
    mega.close()


@on_ranks("several")
def test_back_before_a_first_call(context: RankContext) -> None:
    """There is no memory yet of which the layer could let go."""
    wanted = make_all(context, "block", "all", [[]])
    mega = wanted.make()
    if context.rank == 0:
        mega.close()
        mega = wanted.make(rejoin=True)
    else:
        mega.comm.mask_ranks([0])
        mega.comm.unmask_ranks([0])
    wanted.require(mega, [])
    mega.close()


@on_ranks("several")
def test_times_when_a_rank_is_back(context: RankContext) -> None:
    """A layer that is traced is so on its new memory."""
    wanted = make_all(context, "block", "all", [[]])
    mega = wanted.make()
    times = mega.trace()
    wanted.require(mega, [], ("",))
    if context.rank == 0:
        mega.close()
        mega = wanted.make(rejoin=True)
    else:
        mega.comm.mask_ranks([0])
        mega.comm.unmask_ranks([0])
        times.zero_()
    wanted.require(mega, [], ("",))
    mega.check()
    assert all(each.any() for each in (times.send, times.gemm1, times.gemm2, times.barrier, times.sum))
    mega.close()


@on_ranks("several")
def test_back_without_weights(context: RankContext) -> None:
    """It takes the experts of its slots from replicas."""
    wanted = make_all(context, "row", "all", [[]])
    mega = wanted.make()
    wanted.require(mega, [], ("",))
    if context.rank == 0:
        mega.close()
        mega = wanted.make(rejoin=True)
        for each in mega.weights:
            each.view(torch.uint8).zero_()
    else:
        mega.comm.mask_ranks([0])
        mega.comm.unmask_ranks([0])
    assert mega.comm.placement is not None
    for _ in mega.move_experts(mega.comm.placement, stale=[0]):
        pass
    wanted.require(mega, [])
    mega.check()
    mega.close()


@on_ranks("several")
def test_back_with_another_recipe(context: RankContext) -> None:
    """Rows would lie elsewhere: all ranks are told, before any of them arrives."""
    check_another_recipe(context)


def check_another_recipe(context: RankContext) -> None:
    wanted = make_all(context, "row", "all", [[]])
    mega = wanted.make()
    if context.rank == 0:
        mega.close()
        case = replace(CASES["block"], quantised=False)
        other = make_layer(case, context.num_ranks, context.device)
        mega = make_mega(context, case, other, placement=placement_of(case, context.num_ranks, "all"), rejoin=True)
        given = inputs(case, other, context.rank)
    else:
        mega.comm.mask_ranks([0])
        mega.comm.unmask_ranks([0])
        given = wanted.given
    with pytest.raises(tl.PlanMismatch, match="recipe="):
        mega(*given)
    mega.close()


@on_ranks("several")
@pytest.mark.skipif(not emulator.ON, reason="test_late_mega_on_gpus.py has graphs of GPUs")
def test_graphs_from_before(context: RankContext) -> None:
    """They leave the rank out still, in memory of their own, between calls that have it again."""
    from tests.support.emulator.graphs import capture

    gone = 0
    wanted = make_all(context, "row", "no placement", both(context, gone))
    mega = wanted.make()
    wanted.require(mega, [], ("",))
    if context.rank == gone:
        mega.close()
        mega = wanted.make(rejoin=True)
        wanted.require(mega, [], ("", ""))
    else:
        with capture() as graph:
            captured = mega(*wanted.given)
        mega.comm.mask_ranks([gone])
        graph.replay()
        assert torch.equal(captured, wanted.by_masked[gone,])
        mega.comm.unmask_ranks([gone])
        for _ in range(2):
            wanted.require(mega, [], ("",))
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, wanted.by_masked[gone,])
    mega.check()
    mega.close()
