"""Staged dispatches, and combines whose buffers take turns, when the peer is silent or refuses: they leave no rows, or
NaN, on time, and one of the halves says why.

One GPU is rank 0 of two. The test plays rank 1 as far as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels.combine_calls import CombineBuffers, CombineCall, Summed
from tests.kernels.one_gpu import LONG_S, SHORT_S, needs_one_gpu
from tests.kernels.played_peer import problem_of_two
from tests.kernels.silent_peer import OPTIONS_HASH, Rank0, error_of
from tests.kernels.staged_calls import Staged, StagedBuffers, StagedCall
from tests.kernels.test_staged_dispatch import BASE
from tests.support.cases import BF16
from tokenloom.plan import ROUTE_LAYOUTS
from tokenloom.runtime.kernel_reports import PHASES, CallOutcome

pytestmark = needs_one_gpu
EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""

PROBLEM = problem_of_two(BASE)
OPENING, ROWS, PARTIALS = PHASES[1], PHASES[2], PHASES[3]
STATUS = 5

Call = StagedCall | CombineCall
Make = Callable[[], Call]
"""Makes the next call on the same buffers."""

DISPATCHES = {
    f"dispatch {layout}, {kind}": Staged(layout, halves=kind == "halves")
    for layout in ROUTE_LAYOUTS
    for kind in ("whole", "halves")
}
COMBINES = {
    f"combine {layout}, {kind}": Summed(
        layout, eager=kind != "waiting halves", halves=kind != "whole", weighted=layout in ROUTE_LAYOUTS
    )
    for layout in ("token", "slots")
    for kind in ("whole", "halves", "waiting halves")
}
OPTIONS: dict[str, Any] = DISPATCHES | COMBINES
each_call = pytest.mark.parametrize("what", OPTIONS)


def calls_of(what: str, short: str) -> tuple[Rank0, Make]:
    """Fresh buffers, and what makes calls on them."""
    rank0, options = Rank0(PROBLEM.plan, short), OPTIONS[what]
    if isinstance(options, Staged):
        staged = StagedBuffers(rank0, BF16)
        return rank0, lambda: StagedCall(staged, PROBLEM, options)
    combine = CombineBuffers(rank0, options)
    return rank0, lambda: CombineCall(combine, PROBLEM, options)


def all_is_well(call: Call) -> None:
    """A call in which rank 1 does its part."""
    call.open_by_rank_1()
    call.send_by_rank_1()
    assert call.send() is None
    if call.options.halves:
        assert call.receive() is None
    call.check_received()


def check_nothing(call: Call) -> None:
    """No counts, no places, no ranges, whatever lay there: who goes on addresses nothing by them. Sums are NaN."""
    if isinstance(call, CombineCall):
        assert call.out.isnan().all()
        return
    routed = call.routed()
    assert (call.slots == -1).all()
    for what in (call.all_counts, routed.num_rows, routed.source_counts, routed.expert_counts):
        assert not what.any()
    if call.options.layout == "expert":
        assert not routed.expert_offsets.any()
    if call.options.layout == "slots":
        assert not routed.slot_ranges.any()


def in_time(rank0: Rank0) -> None:
    """The last kernel waited as long as its deadline, not longer, and not as long as the other one."""
    assert SHORT_S <= rank0.last_run_s < LONG_S / 2


@each_call
def test_a_peer_that_does_not_open(what: str) -> None:
    """An eager half sends without it, and is over at once. The half that waits for it says so when the time for
    opening has passed. After that, everything on the broken communicator is over at once.
    """
    rank0, make = calls_of(what, "open")
    all_is_well(make())
    call = make()
    waits_in_send = not (call.options.halves and call.options.eager)
    assert call.send() is None
    if waits_in_send:
        in_time(rank0)
    else:
        assert rank0.last_run_s < SHORT_S
        assert error_of(rank0) is None, "a half that needs nobody has waited"
    if call.options.halves:
        assert call.receive() is None
        if not waits_in_send:
            in_time(rank0)
        else:
            assert rank0.last_run_s < SHORT_S, "a broken communicator waits once more"
    assert error_of(rank0) == ((1,), OPENING)
    check_nothing(call)
    later_calls_are_over_at_once(rank0, make)


def later_calls_are_over_at_once(rank0: Rank0, make: Make) -> None:
    for _ in range(2):
        call = make()
        assert call.send() is None
        assert rank0.last_run_s < SHORT_S
        if call.options.halves:
            assert call.receive() is None
            assert rank0.last_run_s < SHORT_S
        check_nothing(call)


@pytest.mark.parametrize("which", ["all", "of the last"])
@each_call
def test_rows_that_never_come(what: str, which: str) -> None:
    """Flags of a peer show the calls before, all of them or that of its last block or chunk, which is not enough. The
    deadline is that of phases, the sending half has none to wait for.
    """
    rank0, make = calls_of(what, "phases")
    for _ in range(2):
        all_is_well(make())
    call = make()
    call.open_by_rank_1()
    if which == "of the last":
        call.send_by_rank_1(but_last=1)
    assert call.send() is None
    if call.options.halves:
        assert rank0.last_run_s < SHORT_S
        assert error_of(rank0) is None
        assert call.receive() is None
    in_time(rank0)
    assert error_of(rank0) == ((1,), ROWS if isinstance(call, StagedCall) else PARTIALS)
    check_nothing(call)
    later_calls_are_over_at_once(rank0, make)


@pytest.mark.parametrize(
    ("header", "found"),
    [({"status": STATUS}, (1, STATUS, None)), ({"options_hash": OPTIONS_HASH ^ (1 << 60)}, (None, 0, 1))],
    ids=["fault", "other options"],
)
@each_call
def test_a_call_that_is_refused(what: str, header: dict[str, int], found: tuple[int | None, int, int | None]) -> None:
    """Rank 1 opens it, at most sends its rows as well, and does nothing more. The host hears of it once, from the half
    that receives; nothing expires, and the next calls work.
    """
    rank0, make = calls_of(what, "")
    all_is_well(make())
    call = make()
    if call.options.eager:
        call.send_by_rank_1()
    if call.options.halves and call.options.eager:
        assert call.send() is None  # rank 1 opens it later
        call.open_by_rank_1(**header)
        outcome = call.receive()
    else:
        call.open_by_rank_1(**header)
        outcome = call.send()
        if call.options.halves:
            assert outcome is None, "both halves say what is wrong"
            outcome = call.receive()
    assert isinstance(outcome, CallOutcome)
    assert (outcome.faulty_rank, outcome.status, outcome.differing_rank) == found
    assert (outcome.needed_rows, outcome.capacity) == (0, 0)
    assert error_of(rank0) is None
    check_nothing(call)
    call.check_set_back()
    for _ in range(5):  # all turns
        all_is_well(make())
    assert error_of(rank0) is None


@pytest.mark.parametrize("what", [name for name, options in OPTIONS.items() if options.halves and options.eager])
def test_a_refused_call_between_the_halves_of_another(what: str) -> None:
    """Rank 1 cannot make the second call; the first is received as if nothing were."""
    rank0, make = calls_of(what, "")
    first = make()
    assert first.send() is None
    first.open_by_rank_1()
    first.send_by_rank_1()
    second = make()
    assert second.send() is None
    second.open_by_rank_1(status=STATUS)
    assert first.receive() is None
    first.check_received()
    outcome = second.receive()
    assert outcome is not None
    assert (outcome.faulty_rank, outcome.status) == (1, STATUS)
    check_nothing(second)
    all_is_well(make())
    assert error_of(rank0) is None


@pytest.mark.parametrize("what", [name for name, options in OPTIONS.items() if options.eager])
def test_rows_behind_a_refusal(what: str) -> None:
    """Rank 1 refuses the call, and may still send rows: rank 0 waits until it says that it does not, at most as long
    as for anything else.
    """
    rank0, make = calls_of(what, "phases")
    call = make()
    call.open_by_rank_1(status=STATUS, leaves=False)
    outcome = call.send()
    if call.options.halves:
        assert outcome is None
        outcome = call.receive()
    in_time(rank0)
    assert error_of(rank0) == ((1,), PARTIALS)
    check_nothing(call)
