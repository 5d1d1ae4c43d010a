"""Ranks that come late, hang or die: the others say who is missing, in time, and nothing hangs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tokenloom as tl
from tests.conftest import CPU_RANKS
from tests.support.on_ranks import on_ranks
from tests.support.patience import PATIENCE_S, done, only_late, when_done
from tokenloom.errors import InvalidArgument, is_known_to_all
from tokenloom.runtime import rank_group, waiting
from tokenloom.runtime.processes import RankContext, RankFailed, RankPool
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree

Pools = Callable[[str], RankPool]

TIMEOUT_S = 1.0
OPEN_TIMEOUT_S = 20.0
NOTICE_S = waiting.ROLL_CALL_S + waiting.LOOK_EVERY_S + 12.0
"""After the deadline everybody raises within the roll call, one look at the notes, and what a busy machine needs."""
ALL = list(range(CPU_RANKS))
PAIR = [1, 2]
"""A group of two ranks in the middle: ranks of a group are not those of the world."""
OPENING, ROWS = "opening", "rows"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int32, torch.int64)


def open_call(ranks: RankGroup) -> torch.Tensor:
    """The first collective of a call."""
    return ranks.all_gather(torch.tensor([ranks.rank]), OPENING, opens=True)


def send_rows(ranks: RankGroup) -> torch.Tensor:
    """A later collective of a call: each rank sends its number to every rank."""
    ones = [1] * ranks.num_ranks
    return ranks.start_all_to_all(torch.full((ranks.num_ranks, 1), ranks.rank), ones, ones, ROWS).wait()


def call(ranks: RankGroup) -> None:
    """A whole call, with its results checked."""
    everybody = torch.arange(ranks.num_ranks)[:, None]
    assert torch.equal(open_call(ranks), everybody)
    assert torch.equal(send_rows(ranks), everybody)


def run(
    pools: Pools,
    members: list[int],
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    open_timeout_s: float = OPEN_TIMEOUT_S,
    late: Collection[int] = (),
) -> list[Any]:
    """``function(ranks, *args)`` on the ranks of the group, of which these are late; results in the group's order."""
    limits = {"timeout_s": timeout_s, "open_timeout_s": open_timeout_s}
    results = pools("cpu").run(with_group, members, late, limits, function, *args, limit_s=60.0)
    return [results[member] for member in members]


def on_group(
    members: list[int],
    timeout_s: float = TIMEOUT_S,
    open_timeout_s: float = OPEN_TIMEOUT_S,
    late: Collection[int] = (),
) -> Any:
    """Decorator that runs a test's body on the ranks of the group, of which these are late: ``body(ranks, ...)``."""
    limits = {"timeout_s": timeout_s, "open_timeout_s": open_timeout_s}

    def through(context: RankContext, body: Callable[..., None], *args: Any) -> None:
        with_group(context, members, late, limits, body, *args)

    return on_ranks("four", through=through, limit_s=60.0)


@contextmanager
def in_time(ranks: RankGroup) -> Iterator[None]:
    """In this block no rank is late: not even one that a busy machine keeps from running for longer than a test's
    deadline, and that the others are meant to miss afterwards."""
    with mock.patch.multiple(ranks, timeout_s=PATIENCE_S, open_timeout_s=PATIENCE_S):
        yield


def with_group(
    context: RankContext,
    members: list[int],
    late: Collection[int],
    limits: dict[str, float],
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    """On a process group of its own, since what a late rank leaves behind would disturb later tests."""
    own = dist.new_group(members)
    if context.rank not in members:
        return None
    ranks = RankGroup(own, **limits)
    with ExitStack() as stack:
        if late and ranks.rank not in late:
            stack.enter_context(only_late(late))
        return function(ranks, *args)


# -- two deadlines ----------------------------------------------------------------------------------------------


@on_group(ALL)
@pytest.mark.slow
@pytest.mark.parametrize("meet", ["call", "sum_up", "rendezvous"])
def test_pause_between_calls(ranks: RankGroup, meet: str) -> None:
    """A rank that writes a checkpoint, evaluates or compiles comes later than ``timeout_s`` to a call, to a sum
    or to a rendezvous, and nothing breaks."""
    call(ranks)
    if ranks.rank == ("call", "sum_up", "rendezvous").index(meet):
        time.sleep(1.5 * TIMEOUT_S)
    {"call": call, "sum_up": sum_up, "rendezvous": rendezvous}[meet](ranks)
    call(ranks)


def sum_up(ranks: RankGroup) -> None:
    assert ranks.all_reduce_sums([torch.ones(1)], "sum")[0].item() == ranks.num_ranks


def rendezvous(ranks: RankGroup) -> None:
    assert agree(ranks, lambda: ({}, ranks.rank), "rendezvous") == list(range(ranks.num_ranks))


@pytest.mark.slow
def test_pause_within_a_call(pools: Pools) -> None:
    """Once a call has opened, all hosts are there: a rank that is then silent for ``timeout_s`` is missing."""
    seen = run(pools, ALL, check_pause_within, late=[2])
    assert [peers for peers, _ in seen] == [(2,), (2,), (), (2,)]
    assert 0.9 * TIMEOUT_S < max(waited_s for _, waited_s in seen) < TIMEOUT_S + NOTICE_S


def check_pause_within(ranks: RankGroup) -> tuple[tuple[int, ...], float]:
    open_call(ranks)
    if ranks.rank == 2:
        when_done(ranks, [0, 1, 3])
        return (), 0.0
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout, match=rf"no answer within {TIMEOUT_S:g} s|rank \d gave up") as timeout:
        send_rows(ranks)
    waited_s = time.monotonic() - began
    done(ranks)
    return timeout.value.peers, waited_s


@on_ranks("four")
def test_the_groups_own_timeout_opens_calls(context: RankContext) -> None:
    """By default a call may open as late as torch's own collectives would; never sooner than after ten minutes, nor
    than ``timeout_s``."""

    def opening(group_s: float, **options: Any) -> float:
        return RankGroup(dist.new_group(ALL, timeout=timedelta(seconds=group_s)), **options).open_timeout_s

    assert opening(1200.0) == 1200.0
    assert opening(60.0) == rank_group.OPEN_TIMEOUT_S == 600.0
    assert opening(60.0, timeout_s=2000) == 2000
    assert opening(1200.0, open_timeout_s=5) == 5
    assert RankGroup(context.group).timeout_s == 30.0


@pytest.mark.parametrize("name", ["timeout_s", "open_timeout_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "5", timedelta(seconds=5), 2e9])
def test_a_deadline_is_a_number_of_seconds(name: str, value: Any) -> None:
    """The largest that is taken fits an int64 of nanoseconds, also when a kernel adds it to the time of day."""
    with pytest.raises(InvalidArgument, match=f"^{name} is "):
        RankGroup(None, **{name: value})
    assert int(waiting.MAX_TIMEOUT_S * 1e9) + time.time_ns() < 2**62
    assert RankGroup(None, **{name: waiting.MAX_TIMEOUT_S}).device.type == "cpu"


# -- two halves -------------------------------------------------------------------------------------------------


@on_group(ALL, timeout_s=OPEN_TIMEOUT_S)
def test_two_transfers_at_once(ranks: RankGroup) -> None:
    """Each brings its own rows, whoever starts and waits first, and leaves the host free in between."""
    ones = [1] * ranks.num_ranks
    open_call(ranks)
    started = []
    for number in range(2):
        time.sleep(0.1 * (ranks.rank + number) % 0.3)
        rows = torch.full((ranks.num_ranks, 2), float(10 * ranks.rank + number))
        with mock.patch.object(waiting.Watch, "wait", side_effect=AssertionError("a start waits")):
            started.append(ranks.start_all_to_all(rows, ones, ones, ROWS))
    for number, transfer in enumerate(started):
        want = torch.arange(ranks.num_ranks)[:, None] * 10.0 + number
        assert torch.equal(transfer.wait(), want.expand(-1, 2))
        assert torch.equal(transfer.wait(), want.expand(-1, 2)), "waiting again costs nothing"
    call(ranks)


@pytest.mark.slow
def test_late_second_half(pools: Pools) -> None:
    """The deadline counts from the wait on, not from the start: the experts between the halves may take long. Who is
    missing in the first of two transfers is named with its step, and the second says that all is over. A rank that
    the machine held up may hear first that another has waited in vain."""
    seen = run(pools, ALL, check_late_second_half, late=[0])
    assert {each for each in seen[1:] if each is not None} == {((0,), 3)}


def check_late_second_half(ranks: RankGroup) -> tuple[tuple[int, ...], int] | None:
    ones = [1] * ranks.num_ranks

    def start() -> rank_group.Transfer:
        return ranks.start_all_to_all(torch.zeros(ranks.num_ranks, 1), ones, ones, ROWS)

    open_call(ranks)
    transfer = start()
    time.sleep(1.5 * TIMEOUT_S)
    transfer.wait()
    if ranks.rank == 0:
        when_done(ranks, range(1, ranks.num_ranks))
        return (), 0
    first, second = start(), start()
    with pytest.raises((tl.PeerTimeout, tl.CommunicatorBroken)) as ended:
        first.wait()
    for transfer in (second, first):
        with pytest.raises(tl.CommunicatorBroken):
            transfer.wait()
    done(ranks)
    if isinstance(ended.value, tl.PeerTimeout):
        return ended.value.peers, ended.value.epoch
    assert "has waited in vain in rows" in str(ended.value), "nothing else may end the wait"
    return None


# -- late ranks -------------------------------------------------------------------------------------------------


@on_group(ALL, timeout_s=20.0)
def test_slow_rank(ranks: RankGroup) -> None:
    """Within the timeout nothing happens, also when the wait is long enough to sign in and to look at the notes."""
    open_call(ranks)
    if ranks.rank == 1:
        time.sleep(3.5 * waiting.LOOK_EVERY_S)
    send_rows(ranks)


@pytest.mark.parametrize(("members", "late"), [pytest.param(ALL, 0, id="all"), pytest.param(PAIR, 1, id="pair")])
@pytest.mark.slow
def test_late_rank(pools: Pools, members: list[int], late: int) -> None:
    """The others name it and nobody else; each group is broken from then on, and closing it works."""
    seen = run(pools, members, check_late, [late], {}, open_timeout_s=TIMEOUT_S, late=[late])
    found, step = seen.pop(late), {each[2] for each in seen if each is not None}
    assert {each[:2] for each in seen if each is not None} == {((late,), OPENING)}
    # The late one comes when all others have gone: they are missing to it, one step later.
    others = tuple(rank for rank in range(len(members)) if rank != late)
    assert found == (others, ROWS, step.pop() + 1)
    assert not step


def check_late(ranks: RankGroup, late: list[int], delays: dict[int, float]) -> tuple[tuple[int, ...], str, int] | None:
    """Whom this rank misses, where, and in which step; None where another rank's wait has ended before."""
    with in_time(ranks):
        call(ranks)
    if ranks.rank in late:
        when_done(ranks, [rank for rank in range(ranks.num_ranks) if rank not in late])
    time.sleep(delays.get(ranks.rank, 0.0))
    began = time.monotonic()
    with pytest.raises((tl.PeerTimeout, tl.CommunicatorBroken)) as ended:
        call(ranks)
    assert time.monotonic() - began < TIMEOUT_S + NOTICE_S
    timeout = ended.value if isinstance(ended.value, tl.PeerTimeout) else None
    if timeout is None:
        assert "has waited in vain in opening" in str(ended.value), "nothing else may end the wait"
    else:
        assert timeout.rank == ranks.rank
        assert "look there first" in str(timeout)
        assert f"rank(s) {', '.join(map(str, timeout.peers))}:" in str(timeout)
    for use in (open_call, send_rows, sum_up, rendezvous):
        with (
            mock.patch.object(waiting.Watch, "_await", side_effect=AssertionError("a broken group waits")),
            pytest.raises(tl.CommunicatorBroken, match=r"an earlier call failed.*make a new communicator"),
        ):
            use(ranks)
    done(ranks)
    when_done(ranks, range(ranks.num_ranks))  # the last to close deletes what tells late ones that all is over
    ranks.close()
    ranks.close()
    with pytest.raises(tl.CommunicatorBroken):
        ranks.require_alive()
    return None if timeout is None else (timeout.peers, timeout.phase, timeout.epoch)


@on_group(ALL)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_rank_that_has_left(ranks: RankGroup, how: str) -> None:
    """Nobody waits as long as a call may take to open for a rank that has closed its communicator after an error of
    its own, say. What it had started before still arrives."""
    group = ranks.process_group
    ranks = RankGroup(group, timeout_s=OPEN_TIMEOUT_S, open_timeout_s=OPEN_TIMEOUT_S)  # neither may pass
    call(ranks)
    if ranks.rank == 2:
        ones = [1] * ranks.num_ranks
        open_call(ranks)
        ranks.start_all_to_all(torch.full((ranks.num_ranks, 1), 2), ones, ones, ROWS)
        if how == "close":
            ranks.close()
        del ranks
        RankGroup(group)  # what was dropped is undone here
        return
    open_call(ranks)
    time.sleep(waiting.LOOK_EVERY_S)
    send_rows(ranks)
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout, match="the communicator was closed there") as timeout:
        open_call(ranks)
    assert timeout.value.peers == (2,)
    assert time.monotonic() - began < 0.5 * OPEN_TIMEOUT_S


@on_group([0, 1, 2], open_timeout_s=OPEN_TIMEOUT_S)
def test_who_gave_up_because_a_rank_left_is_not_the_cause(ranks: RankGroup) -> None:
    """A rank leaves while another looks why it waits. The third is quicker and gives up; the cause is still the rank
    that left."""
    who_gave_up = ranks.notes.who_gave_up

    def once_rank_1_has() -> tuple[int, str] | None:
        done(ranks, "looks")
        when_done(ranks, [1], "gave up")
        return who_gave_up()

    if ranks.rank == 2:
        when_done(ranks, [0], "looks")
        ranks.close()
        return
    slow = mock.patch.object(ranks.notes, "who_gave_up", once_rank_1_has) if ranks.rank == 0 else nullcontext()
    with slow, pytest.raises(tl.PeerTimeout, match="the communicator was closed there") as timeout:
        open_call(ranks)
    assert timeout.value.peers == (2,)


@on_group(PAIR, timeout_s=OPEN_TIMEOUT_S)
def test_a_rank_that_fails_within_a_call(ranks: RankGroup) -> None:
    """Others learn of it, and why, while they wait for what it did not send; the group is broken for all. So is any
    other one of the process group, whose collectives match no more."""
    beside = RankGroup(ranks.process_group)
    open_call(ranks)
    if ranks.rank == 0:
        ranks.abort(ValueError("no such row"))
    else:
        began = time.monotonic()
        with pytest.raises(tl.PeerError, match=r"rank 0 failed.*ValueError: no such row") as raised:
            send_rows(ranks)
        assert raised.value.rank == 0
        assert time.monotonic() - began < 0.5 * OPEN_TIMEOUT_S
    with pytest.raises(tl.CommunicatorBroken, match="no such row"):
        open_call(ranks)
    with pytest.raises(tl.CommunicatorBroken, match="no such row"):
        beside.start_all_gather(torch.ones(1), "test")
    beside.close()


@pytest.mark.slow
def test_different_skews(pools: Pools) -> None:
    """Two ranks are late and both are named; one that comes just before the deadline of rank 1 is not."""
    seen = run(pools, ALL, check_late, [0, 3], {2: 0.9 * TIMEOUT_S}, open_timeout_s=TIMEOUT_S, late=[0, 3])
    assert {each[0] for each in seen[1:3] if each is not None} == {(0, 3)}


@on_group(PAIR)
def test_a_rank_that_is_further_on_is_not_missing(ranks: RankGroup) -> None:
    """A collective may be over on some ranks when it fails on others; those wait in a later step, and are there."""
    notes = ranks.notes
    other = 1 - ranks.rank
    notes.sign_in(5)
    done(ranks, "signed in")
    when_done(ranks, [other], "signed in")  # a collective, where it takes long, signs in by itself
    assert [notes.waits_in(step, other) for step in (4, 5, 6)] == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("missed", [[2], []], ids=["it says whom", "it asks who is there"])
def test_a_rank_that_gives_up_is_not_missing(pools: Pools, missed: list[int]) -> None:
    """Rank 2 may have reached rank 0 and not rank 1, which waits for it in an earlier step. Whoever gives up because
    rank 0 did not come is missing to that one: rank 3."""
    assert run(pools, ALL, check_gives_up, missed)[0] == (2, 3)


def check_gives_up(ranks: RankGroup, missed: list[int]) -> tuple[int, ...] | None:
    if ranks.rank == 0:
        when_done(ranks, [1, 3], "said so")
        with pytest.raises(tl.PeerTimeout) as timeout:
            open_call(ranks)
        done(ranks)
        return timeout.value.peers
    if ranks.rank != 2:
        ranks.notes.give_up("the test", missed if ranks.rank == 1 else [0])
        done(ranks, "said so")
    when_done(ranks, [0])
    return None


@on_ranks("four", limit_s=60.0)
@pytest.mark.slow
def test_late_at_construction(context: RankContext) -> None:
    """A rendezvous has the deadline of an opening; once all ranks are back, a new group works."""
    own, again = dist.new_group(ALL), dist.new_group(ALL)
    ranks = RankGroup(own, timeout_s=60.0, open_timeout_s=TIMEOUT_S)
    if context.rank == 2:
        when_done(ranks, [0, 1, 3])
    with only_late([2]) if context.rank != 2 else nullcontext(), pytest.raises(tl.PeerTimeout) as timeout:
        rendezvous(ranks)
    done(ranks)
    if context.rank != 2:
        assert (timeout.value.peers, timeout.value.phase) == ((2,), "rendezvous")
    call(RankGroup(again))


@on_group(ALL, timeout_s=0.0001)
@pytest.mark.slow
def test_tiny_timeout(ranks: RankGroup) -> None:
    """A limit below one millisecond is a limit too."""
    if ranks.rank == 0:
        time.sleep(waiting.ROLL_CALL_S + 0.5)
        return
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout):
        ranks.all_gather(torch.ones(1), "the test")
    assert time.monotonic() - began < NOTICE_S


# -- dead ranks -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.8], ids=["at once", "while others wait"])
def test_dead_process(delay_s: float) -> None:
    """All others name it within seconds, also those that a collective does not connect with it, and although a call
    may open minutes later."""
    heard: list[tuple[int, tuple[int, ...], float]] = []
    with RankPool(CPU_RANKS) as pool:
        with pytest.raises(RankFailed, match="exit code 7") as failed:
            pool.run(check_death, 2, delay_s, on_event=heard.append)
        assert failed.value.rank == 2
    assert sorted(rank for rank, _, _ in heard) == [0, 1, 3]
    for _, peers, waited_s in heard:
        assert peers == (2,)
        assert waited_s < delay_s + NOTICE_S + 1.0


def check_death(context: RankContext, dying: int, delay_s: float) -> None:
    ranks = RankGroup(context.group, timeout_s=60.0)
    call(ranks)
    if context.rank == dying:
        time.sleep(delay_s)
        os._exit(7)
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout) as timeout:
        call(ranks)
    context.report((context.rank, timeout.value.peers, time.monotonic() - began))
    with pytest.raises(tl.CommunicatorBroken):
        call(ranks)
    ranks.close()


class GoneStore:
    """A store whose host is dead."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: object) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

        return call


@on_group(PAIR)
def test_store_is_gone(ranks: RankGroup) -> None:
    """Where the dead rank was the host of the store, the error is still PeerTimeout; peers unknown."""
    if ranks.rank == 1:
        time.sleep(TIMEOUT_S + 0.5)
        return
    ranks.notes._store = GoneStore()
    with pytest.raises(tl.PeerTimeout, match=r"rank\(s\) unknown") as timeout:
        send_rows(ranks)
    assert timeout.value.peers == ()
    ranks.close()


# -- what a group is --------------------------------------------------------------------------------------------


def test_alone() -> None:
    """No torch.distributed: every collective is a copy."""
    alone = RankGroup(None)
    assert (alone.rank, alone.num_ranks, alone.transport, alone.device.type) == (0, 1, "local", "cpu")
    rows = torch.randn(3, 2)
    for got in (alone.start_all_to_all(rows, [3], [3], "test").wait(), alone.all_reduce_sums([rows], "test")[0]):
        assert torch.equal(got, rows)
        assert got.data_ptr() != rows.data_ptr()
    assert torch.equal(alone.all_gather(torch.arange(3), "test"), torch.tensor([[0, 1, 2]]))
    assert alone.all_gather_object({"any": "thing"}, "test") == [{"any": "thing"}]
    alone.require_alive()
    alone.close()
    with pytest.raises(tl.CommunicatorBroken, match="closed"):
        alone.require_alive()


def test_what_ends_a_group() -> None:
    """What fails while others wait, if they do not know of it; each later call says what it was."""
    ranks, error = RankGroup(None), ValueError("no such row")
    with pytest.raises(tl.PeerError), ranks.telling():
        raise tl.PeerError(1, "all ranks raise this")
    ranks.require_alive()
    with pytest.raises(ValueError, match="no such row"), ranks.telling():
        raise error
    assert is_known_to_all(error)
    for call in (ranks.require_alive, lambda: ranks.all_reduce_sums([torch.ones(1)], "test")):
        with pytest.raises(tl.CommunicatorBroken, match="an earlier call failed: ValueError: no such row"):
            call()


@on_group(PAIR, open_timeout_s=60.0, timeout_s=60.0)
def test_no_memory_for_words_that_follow(ranks: RankGroup) -> None:
    """What ranks share comes behind the opening, which the others have ended: they wait for words by then."""
    ranks.all_gather_object("met", "test")
    real, made = torch.zeros, []

    def zeros(*args: Any, **options: Any) -> torch.Tensor:
        made.append(args)
        if len(made) == 2:
            raise torch.OutOfMemoryError("no memory left")
        return real(*args, **options)

    began = time.monotonic()
    if ranks.rank == 1:
        with mock.patch.object(torch, "zeros", zeros), pytest.raises(torch.OutOfMemoryError):
            ranks.all_gather_object("shared", "test")
    else:
        with pytest.raises((tl.PeerError, tl.CommunicatorBroken), match="OutOfMemoryError: no memory left"):
            ranks.all_gather_object("shared", "test")
    assert time.monotonic() - began < PATIENCE_S


def test_alone_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who forgets to initialise torch.distributed would train each rank by itself."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.warns(UserWarning, match=r"is alone and has all experts; call torch.distributed.init_process_group"):
        assert tl.Communicator(None, num_experts=2, hidden=8, top_k=1, max_tokens_per_rank=1).num_ranks == 1


@on_ranks("four")
@pytest.mark.parametrize("members", [ALL, PAIR], ids=["all", "pair"])
def test_collectives(context: RankContext, members: list[int]) -> None:
    """Any dtype, unequal and empty parts, objects of any size; ranks counted within the group."""
    own = dist.new_group(members)
    if context.rank not in members:
        with pytest.raises(InvalidArgument, match="not a rank of the group"):
            RankGroup(own)
        return
    ranks = RankGroup(own)
    me, num_ranks = members.index(context.rank), len(members)
    assert (ranks.rank, ranks.num_ranks, ranks.transport) == (me, num_ranks, "gloo")
    for dtype in DTYPES:
        # Rank r sends r rows to rank 0, r + 1 to rank 1, ...: row values say from where to where.
        send, receive = [me + r for r in range(num_ranks)], [r + me for r in range(num_ranks)]
        rows = torch.cat([torch.full((count, 3), 10.0 * me + r) for r, count in enumerate(send)]).to(dtype)
        want = torch.cat([torch.full((count, 3), 10.0 * r + me) for r, count in enumerate(receive)]).to(dtype)
        got = ranks.start_all_to_all(rows, send, receive, "test").wait()
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert ranks.all_gather(torch.tensor([me, 7]), "test").tolist() == [[r, 7] for r in range(num_ranks)]
    assert ranks.all_gather_object("x" * 1000 * me, "test") == ["x" * 1000 * r for r in range(num_ranks)]
    values = torch.tensor([float(me), 1.0])
    assert ranks.all_reduce_sums([values], "test")[0].tolist() == [sum(range(num_ranks)), num_ranks]
    assert values.tolist() == [me, 1.0]


@on_ranks("four")
def test_objects_over_gloo_need_no_device(context: RankContext) -> None:
    """Programs pass a gloo group for tensors on GPUs; what ranks agree on then travels through host memory."""
    ranks = RankGroup(context.group)
    ranks.device = torch.device("meta")  # whose tensors hold nothing
    assert ranks.all_gather_object(context.rank, "test") == list(range(context.num_ranks))
    ranks.close()


@on_ranks("four")
def test_device_mesh(context: RankContext) -> None:
    """A one-dimensional mesh is its group; of more dimensions one has to be picked."""
    mesh = DeviceMesh("cpu", torch.arange(context.num_ranks).view(2, -1), mesh_dim_names=("data", "expert"))
    with pytest.raises(InvalidArgument, match=r"2 dimensions; pass one of them: mesh\['name'\]"):
        RankGroup(mesh)
    part = mesh["expert"]
    ranks = RankGroup(part)
    assert (ranks.rank, ranks.num_ranks) == (part.get_local_rank(), context.num_ranks // 2)
    call(ranks)


@on_ranks("four")
def test_default_group(context: RankContext) -> None:
    """group=None is the default group where torch.distributed is initialised."""
    assert (RankGroup(None).rank, RankGroup(None).num_ranks) == (dist.get_rank(), dist.get_world_size())


@on_group(PAIR)
@pytest.mark.parametrize("default", ["meta", torch.bfloat16], ids=str)
def test_the_callers_defaults_do_no_harm(ranks: RankGroup, default: str | torch.dtype) -> None:
    """Programs set a default device or dtype for their own tensors; ours say what they are."""
    rows = torch.full((2, 3), float(ranks.rank))
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_device(default) if isinstance(default, str) else torch.set_default_dtype(default)
        rendezvous(RankGroup(ranks.process_group))
        gathered = ranks.all_gather(rows.flatten(), OPENING, opens=True)
        received = ranks.start_all_to_all(rows, [1, 1], [1, 1], ROWS).wait()
        total = ranks.all_reduce_sums([rows], "sum")[0]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    want = torch.arange(2.0)[:, None].expand(-1, 3)
    assert torch.equal(received, want)
    assert torch.equal(gathered, want.repeat_interleave(2, 1).view(2, 2, 3).flatten(1))
    assert torch.equal(total, torch.ones(2, 3))
