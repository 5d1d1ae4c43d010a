"""How one rank makes calls until they have ended, whatever the others and its kernels do: with made-up ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tokenloom.backends.peers import backend as backend_module
from tokenloom.backends.peers import opening
from tokenloom.backends.peers.backend import NvlinkBackend
from tokenloom.backends.peers.late_ranks import LateRanks
from tokenloom.errors import InvalidArgument, PeerTimeout
from tokenloom.kernels.common import TURN_WORDS

RESULT = "what the call gives"
EXPIRED = PeerTimeout(1, [0], "the opening of a call", 7, "the test")


class Others:
    """The other ranks as a RankGroup shows them: whom they lose, and how many calls have ended for one of them.

    Attributes:
        losses: what ``lose_absent`` finds, each time; without any, nobody is late.
        ended: what they say has ended, each time; None: as many as this rank has said.
        happened: in the order. limits: the losses with which collectives of each call end in vain.
    """

    is_broken = False
    rank, num_ranks = 1, 3

    def __init__(self) -> None:
        self.num_losses, self.masked = 0, frozenset[int]()
        self.losses: list[frozenset[int]] = []
        self.ended: list[int | None] = []
        self.happened: list[str] = []
        self.said = -1
        self.limits: list[int] = []

    def look(self, if_due: bool = False) -> None:
        pass

    def lose_absent(self, phase: str, ended: list[int]) -> None:
        self.happened.append(f"lose {ended}")
        self.num_losses += 1
        self.masked |= self.losses.pop(0) if self.losses else frozenset()

    def in_vain_after(self, known_losses: int) -> AbstractContextManager[None]:
        self.limits.append(known_losses)
        return nullcontext()

    def say_progress(self, number: int) -> None:
        self.said = number

    def settle_losses(self, phase: str, name: str) -> int:
        self.happened.append(name)
        found = self.ended.pop(0) if self.ended else None
        return self.said if found is None else found

    def fail(self, phase: str, cause: str) -> PeerTimeout:
        return PeerTimeout(1, [], phase, 0, cause)


class Maker:
    """What makes calls: notes meetings and new memory, and lets meetings fail.

    Attributes:
        meetings: what each meeting does; by default nothing.
        replays: what each check of replays does, likewise.
        keeps: whether memory is kept.
    """

    keeps = True

    def __init__(self, others: Others) -> None:
        self._others = others
        self.meetings: list[Callable[[], None]] = []
        self.replays: list[Callable[[], None]] = []
        buffers = SimpleNamespace(turns_of_dispatches=(3, 5))
        self.dispatcher: Any = SimpleNamespace(shared=SimpleNamespace(overflow=None, buffers=buffers))
        self.combiner: Any = None
        self.replayed_in_vain = False
        fault = SimpleNamespace(
            give_up=lambda peers, cause: others.happened.append("give up"), is_set=lambda: self.replayed_in_vain
        )
        outcomes = SimpleNamespace(known_losses=0, fault=fault)
        control = SimpleNamespace(ended_ranks=lambda: [0, 2])
        self.launcher: Any = SimpleNamespace(
            outcomes=outcomes, control=control, masked=frozenset({2}), agree=self._agree, check=self._check
        )  # fmt: skip

    def _agree(self, fields: object) -> None:
        self._others.happened.append("meet")
        if self.meetings:
            self.meetings.pop(0)()

    def _check(self, wait: str) -> None:
        assert wait == "everything"
        self._others.happened.append("check")
        if self.replays:
            self.replays.pop(0)()

    def remake(self) -> bool:
        self._others.happened.append("remake")
        self.launcher.outcomes.known_losses = self._others.num_losses
        return self.keeps


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Others()


@pytest.fixture
def maker(others: Others) -> Maker:
    return Maker(others)


@pytest.fixture
def late(others: Others, maker: Maker) -> LateRanks:
    return LateRanks(others, maker)  # type: ignore[arg-type]


def raising(error: Exception) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


class Call:
    """Notes each time it is made; the first times it raises these errors."""

    def __init__(self, others: Others, *errors: Exception) -> None:
        self._others, self._errors = others, list(errors)

    def __call__(self) -> str:
        self._others.happened.append("make")
        if self._errors:
            raise self._errors.pop(0)
        return RESULT


def test_a_call_and_its_meeting(others: Others, late: LateRanks) -> None:
    """Nothing else, and the rank says what has ended."""
    for number in (1, 2):
        assert late.call(Call(others)) == RESULT
        assert others.said == number
    assert others.happened == ["make", "meet"] * 2


def test_a_wait_that_expires(others: Others, late: LateRanks) -> None:
    """Processes that have ended are named, but for masked ranks; then the call is made again on new memory."""
    others.losses = [frozenset({0})]
    assert late.call(Call(others, EXPIRED)) == RESULT
    assert others.happened == ["make", "lose [0]", "give up", "ended/0", "remake", "make", "meet"]


def test_another_rank_was_quicker(others: Others, maker: Maker, late: LateRanks) -> None:
    """Who is lost is settled once."""

    def lost() -> None:
        others.num_losses = 1
        raise EXPIRED

    maker.meetings = [lost]
    assert late.call(Call(others)) == RESULT
    assert others.happened == ["make", "meet", "give up", "ended/0", "remake", "make", "meet"]


def test_a_meeting_that_others_had(others: Others, maker: Maker, late: LateRanks) -> None:
    """Somebody has gone on with the result, so it counts here too, and the call is not made again."""
    maker.meetings = [raising(EXPIRED)]
    others.losses, others.ended = [frozenset({0})], [1]
    assert late.call(Call(others)) == RESULT
    assert others.happened == ["make", "meet", "lose [0]", "give up", "ended/0", "remake"]
    assert others.said == 1


def test_a_meeting_behind_a_loss(others: Others, maker: Maker, late: LateRanks) -> None:
    """The rank had told the others that the call has not ended before it met: so it has not."""

    def lost() -> None:
        others.num_losses = 1

    maker.meetings = [lost]
    assert late.call(Call(others)) == RESULT
    assert others.happened == ["make", "meet", "give up", "ended/0", "remake", "make", "meet"]
    assert others.said == 1


def test_a_loss_between_calls(others: Others, late: LateRanks) -> None:
    """Nothing is made on the old memory, and collectives of the call know of the loss."""
    others.num_losses = 1
    assert late.call(Call(others)) == RESULT
    assert others.limits == [1]
    assert others.happened == ["give up", "ended/0", "remake", "make", "meet"]


def test_no_room_for_new_memory(
    others: Others, maker: Maker, late: LateRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise that, and may try again. They settle it anew: what they settled before would take them back to
    numbers that they have had."""
    others.num_losses = 1
    with monkeypatch.context() as patch:
        patch.setattr(maker, "remake", raising(tl.PeerError(0, "no room")))
        with pytest.raises(tl.PeerError, match="no room"):
            late.call(Call(others))
    assert late.call(Call(others)) == RESULT
    assert others.happened == ["give up", "ended/0", "give up", "ended/1", "remake", "make", "meet"]


def test_names_after_ranks_came_back(others: Others, late: LateRanks) -> None:
    """They are those of ranks that have settled nothing yet."""
    for _ in range(2):
        others.losses = [frozenset({0})]
        late.call(Call(others, EXPIRED))
        late.begin_anew()
    assert [what for what in others.happened if what.startswith("ended")] == ["ended/0"] * 2


def test_a_rank_that_is_masked(others: Others, late: LateRanks) -> None:
    """Says so at once: it meets nobody."""
    with pytest.raises(tl.CommunicatorBroken, match="the test"):
        late.call(Call(others, tl.CommunicatorBroken("the test")))
    assert others.happened == ["make"]


def test_errors_that_all_ranks_raise(others: Others, maker: Maker, late: LateRanks) -> None:
    """End a call as a result does. One that comes in the meeting, from a rank that failed behind its call, too."""
    error = tl.PeerError(0, "the test")
    with pytest.raises(tl.PeerError):
        late.call(Call(others, error))
    assert others.happened == ["make", "meet"]
    maker.meetings = [raising(error)]
    with pytest.raises(tl.PeerError):
        late.call(Call(others))
    assert others.happened == ["make", "meet", "make", "meet", "meet"]
    assert others.said == 2


def test_an_error_of_this_rank_alone(others: Others, late: LateRanks) -> None:
    """It is told by a call of its own, which has this one's number."""
    with pytest.raises(InvalidArgument):
        late.call(Call(others, InvalidArgument("the test")))
    assert others.happened == ["make"]
    late.call(Call(others))
    assert others.said == 1


def test_nobody_is_late(others: Others, late: LateRanks) -> None:
    """Waits that expire although everybody answers are tried again, but not for ever."""
    with pytest.raises(PeerTimeout, match="all ranks are there, but calls have expired 4 times"):
        late.call(Call(others, *[EXPIRED] * 9))
    assert others.happened.count("make") == 4


def test_a_group_that_is_broken(others: Others, late: LateRanks) -> None:
    """The store is gone, say: then nothing can be settled."""
    others.is_broken = True
    with pytest.raises(PeerTimeout):
        late.call(Call(others, EXPIRED))
    assert others.happened == ["make"]


def test_an_overflow_in_vain(others: Others, maker: Maker, late: LateRanks) -> None:
    """What a call found that did not take place is not told; what was found before it is."""
    earlier, first = tl.CapacityOverflow(9, 8, sent=True), [tl.CapacityOverflow(7, 6, sent=True)]
    maker.dispatcher.shared.overflow = earlier

    def make() -> None:
        if first:
            maker.dispatcher.shared.overflow = first.pop()
            raise EXPIRED

    late.call(make)
    assert maker.dispatcher.shared.overflow is earlier


# -- replays of graphs --------------------------------------------------------------------------------------------


def test_replays_that_are_well(late: LateRanks, others: Others) -> None:
    """All ranks hear so of each other. What replays found besides is raised on all of them."""
    late.check()
    assert others.happened == ["check", "meet"]
    assert others.said == 1


def test_replays_with_an_error(late: LateRanks, maker: Maker, others: Others) -> None:
    """Of all ranks alike: they meet behind it, and nobody replays again."""
    maker.replays = [raising(tl.CapacityOverflow(7, 6, sent=True))]
    with pytest.raises(tl.CapacityOverflow):
        late.check()
    assert others.happened == ["check", "meet"]
    assert others.said == 1


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("where", ["replays", "meetings"])
def test_replays_in_vain(others: Others, maker: Maker, late: LateRanks, where: str, keeps: bool) -> None:
    """Here or elsewhere: all ranks replay again, without the rank. In new memory they capture again."""
    maker.keeps, others.losses, others.said = keeps, [frozenset({0})], 0
    getattr(maker, where).append(raising(EXPIRED))
    again = "replay again" if keeps else "memory was made anew, so capture again"
    with pytest.raises(tl.PeerError, match=rf"\[0\] are masked by now, and replays are void: .*{again}") as error:
        late.check()
    assert error.value.rank == 0
    met = ["meet"] * (where == "meetings")
    assert others.happened == ["check", *met, "lose [0]", "give up", "ended/0", "remake"]
    late.check()
    assert others.said == 1


def test_replays_that_another_rank_knows_to_be_well(others: Others, maker: Maker, late: LateRanks) -> None:
    """It heard of all ranks before one died, and has gone on. So nothing is to be made again here."""
    maker.meetings, others.losses, others.ended = [raising(EXPIRED)], [frozenset({0})], [1]
    late.check()
    assert others.happened == ["check", "meet", "lose [0]", "give up", "ended/0", "remake"]


def test_replays_after_a_loss(others: Others, late: LateRanks) -> None:
    """The others wait to go on without the rank, and have told of it before this one met anybody."""
    others.num_losses, others.masked = 1, frozenset({0, 2})
    with pytest.raises(tl.PeerError, match=r"rank 0.*rank\(s\) \[0\] are masked by now"):
        late.check()
    assert others.happened == ["give up", "ended/0", "remake"]


def test_graphs_of_memory_that_is_gone(others: Others, maker: Maker, late: LateRanks) -> None:
    """All ranks hear of it at the next check, be it that a call has made memory anew, or a check that others ended."""
    maker.keeps, others.num_losses = False, 1
    assert late.call(Call(others)) == RESULT
    others.happened.clear()
    with pytest.raises(tl.PeerError, match="memory was made anew, so capture again"):
        late.check()
    assert others.happened == []
    late.check()
    maker.meetings, others.losses, others.ended = [raising(EXPIRED)], [frozenset({0})], [3]
    late.check()
    with pytest.raises(tl.PeerError, match="memory was made anew, so capture again"):
        late.check()
    late.check()


def test_a_call_behind_replays_in_vain(others: Others, maker: Maker, late: LateRanks) -> None:
    """Users are to check before it. If they do not, they hear of the replays later, where this rank knows of them."""
    maker.replayed_in_vain = True
    assert late.call(Call(others)) == RESULT
    maker.replayed_in_vain = False
    with pytest.raises(tl.PeerError, match="replay again"):
        late.check()
    late.check()


def test_an_error_of_replays_that_others_have_raised(others: Others, maker: Maker, late: LateRanks) -> None:
    """This rank raises it too, though it has not met them."""
    maker.replays, maker.meetings = [raising(tl.CapacityOverflow(7, 6, sent=True))], [raising(EXPIRED)]
    others.losses, others.ended = [frozenset({0})], [1]
    with pytest.raises(tl.CapacityOverflow):
        late.check()


def test_turns_of_a_call_in_vain(others: Others, maker: Maker, late: LateRanks) -> None:
    """It takes no turn of receive buffers: what the dispatch before it gave out lasts until the second next one."""
    shared, turns = maker.dispatcher.shared, []

    def make() -> None:
        turns.append(shared.buffers.turns_of_dispatches)
        shared.buffers.turns_of_dispatches = (4, 5)
        if len(turns) == 1:
            raise EXPIRED

    late.call(make)
    assert turns == [(3, 5)] * 2
    assert shared.buffers.turns_of_dispatches == (4, 5)


def test_replays_that_expire_without_a_reason(others: Others, maker: Maker, late: LateRanks) -> None:
    """They are made again too, and nobody is named."""
    maker.replays = [raising(EXPIRED)]
    with pytest.raises(tl.PeerError, match="ranks were lost, and replays are void: replay again"):
        late.check()


def test_replays_of_a_group_that_is_broken(others: Others, maker: Maker, late: LateRanks) -> None:
    """Nothing can be settled."""
    others.is_broken, maker.replays = True, [raising(EXPIRED)]
    with pytest.raises(PeerTimeout):
        late.check()


# -- memory behind a loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "elsewhere", "sizes"),
    [([0], True, [[2, 64]]), ([], True, [[2, 64]]), ([0], False, [[2, 64]]), ([0], True, [])],
    ids=["ended", "lives", "lives for another", "has not all"],
)
def test_memory_that_is_kept(
    here: list[int], elsewhere: bool, sizes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all ranks know that the processes of the lost ones have ended, and have the same buffers, once nothing
    runs any more. Rank 2 was masked by hand, and lives."""
    monkeypatch.setattr(backend_module, "ENDING_S", 0.0)
    monkeypatch.setattr(backend_module, "synchronize", lambda device: happened.append("done"))
    happened: list[Any] = []

    def gather(own: list[Any], phase: str) -> list[Any]:
        happened.append("gather")
        return [own, [9, 40, elsewhere, sizes], None]  # of the rank that is lost there is none

    def settle(name: str, value: Any, phase: str) -> Any:
        happened.append("settle")
        return value

    ranks = SimpleNamespace(
        num_losses=2,
        masked=frozenset({0, 2}),
        lost=frozenset({0, 5}),
        all_gather_object=gather,
        settle=settle,
        device=None,
    )
    launcher = SimpleNamespace(
        outcomes=SimpleNamespace(known_losses=1),
        has_graphs=True,
        num_calls=7,
        epoch=41,
        await_work=lambda: happened.append("idle"),
        control=SimpleNamespace(ended_ranks=lambda: here, others=frozenset({0, 1})),
        resume=lambda *given: happened.append(given),
        close=lambda buffers: happened.append("close"),
    )
    backend: Any = SimpleNamespace(
        _ranks=ranks,
        _launcher=launcher,
        _buffers=SimpleNamespace(
            take_all=list, sizes=lambda: [[2, 64]], set_arrivals_back=lambda: happened.append("absent")
        ),
        _fused=SimpleNamespace(begin_anew=lambda: happened.append("counts")),
        _make_memory=lambda *given: happened.append(given),
        _dispatcher=SimpleNamespace(shared=SimpleNamespace(overflow=None)),
    )
    kept = bool(here and elsewhere and sizes)
    assert NvlinkBackend.remake(backend) is kept
    assert happened[:5] == ["idle", "gather", "absent", "done", "settle"], "rows of calls in vain, while nobody sends"
    assert happened[5:] == (["counts", (9, (41, 40), 2, [0, 2])] if kept else ["close", (9, 1)])


@pytest.mark.parametrize(("epochs", "last"), [((5, 7), 7), ((2**32 - 2, 4), 4), ((2**31 + 1, 2**31), 2**31 + 1)])
def test_numbers_in_kept_memory(epochs: tuple[int, int], last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on from the largest one, which may have wrapped; counts of blocks and claims begin anew."""
    monkeypatch.setattr(opening, "synchronize", lambda device: None)
    happened: list[object] = []
    outcomes = SimpleNamespace(begin_anew=lambda: happened.append("anew"), known_losses=0)
    launcher: Any = SimpleNamespace(
        _state=torch.tensor([3, 4, 4, 5, 6, 7], dtype=torch.int32, device="cpu"),
        outcomes=outcomes,
        num_calls=1,
        leave_out=happened.append,
        ranks=SimpleNamespace(device=None),
    )
    opening.Launcher.resume(launcher, 9, epochs, 2, [0])
    assert launcher._state[0].item() % (1 << 32) == last
    assert launcher._state[TURN_WORDS:].tolist() == [0, 0, 0]
    assert (outcomes.known_losses, launcher.num_calls) == (2, 9)
    assert happened == ["anew", [0]]
