"""Ranks that are slow, late or killed while kernels wait for them: the others wait, or say in time who is missing.

Over gloo the host waits: runtime/test_rank_group.py. Here GPUs do, and a host that asks nothing learns of it later.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenloom as tl
from tests.backends.large_plans import no_plan_is_small
from tests.conftest import Ranks
from tests.support.cases import make_comm, same_bits, same_routed
from tests.support.graph_cases import ROUNDS, TOKEN, Captured, Step, plan_of
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.deferred_release import release_dropped
from tokenloom.runtime.kernel_reports import PHASES, SOME_CALL
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.symmetric_memory import GRANULARITY_BYTES

pytestmark = pytest.mark.alone

BACKEND = "nvlink"
OPENING, ROWS = PHASES[1], PHASES[2]
TIMEOUT_S = 2.0
MARGIN_S = 2.0
"""What may pass between a deadline on the GPU and its error on a busy host."""
AT_ONCE_S = 0.5
LATE_S = TIMEOUT_S + 3.0
"""When all others are gone."""
START_S, EXIT_S = 120.0, 60.0


@dataclass(frozen=True)
class Seen:
    """A PeerTimeout, and how long its rank had waited."""

    rank: int
    peers: tuple[int, ...]
    phase: str
    epoch: int
    waited_s: float


def new_comm(context: RankContext, **options: Any) -> tl.Communicator:
    """Both deadlines are short, so that the tests see both."""
    deadlines = {"timeout_s": TIMEOUT_S, "open_timeout_s": TIMEOUT_S}
    return make_comm(context, BACKEND, plan_of(context.num_ranks), **(deadlines | options))


def round_trip(step: Step, sizes: str = "exact") -> tl.Routed:
    """One dispatch and one combine, compared with the reference."""
    routed = step.dispatch(sizes=sizes)
    want_routed, want_out = step.expected(ROUNDS[0])
    if sizes == "bounded":
        same_routed(routed, want_routed, step.comm.plan, bounded=True)
    same_bits(step.finish(routed), want_out, "out")
    return routed


def load_kernels(context: RankContext) -> tl.Communicator:
    """Compile and load what the tests call, with time enough: the first to be done would time out on the others.

    Returns:
        The communicator that did it, with a timeout that does not expire.
    """
    patient = new_comm(context, timeout_s=60.0, open_timeout_s=60.0, checked=False)
    step = Step(context, patient, TOKEN)
    round_trip(step)
    round_trip(step, "bounded")
    patient.check()
    return patient


def meet(context: RankContext) -> None:
    """All ranks leave at the same time, give or take."""
    dist.barrier(group=context.group, device_ids=[context.device.index])
    torch.cuda.synchronize()


def time_out(call: Callable[[], object], ended: bool = False, gave_up: bool = False) -> Seen:
    """What the call raises when its deadline has passed, neither before nor much later.

    Args:
        ended: the peer's process has ended, which the host may notice before the deadline.
        gave_up: the peer has given up before, which the host notices.
    """
    began = time.monotonic()
    with pytest.raises(tl.PeerTimeout) as timeout:
        call()
    waited_s = time.monotonic() - began
    error = timeout.value
    assert waited_s < TIMEOUT_S + MARGIN_S
    assert ended or gave_up or waited_s > 0.9 * TIMEOUT_S
    cause = "its flag shows"
    if ended and error.phase == SOME_CALL:
        cause = "its process has ended"
    elif gave_up:
        cause = f"rank {error.peers[0]} gave up in {OPENING}"
    assert f"for rank(s) {error.peers[0]}: {cause}" in str(error)
    return Seen(error.rank, error.peers, error.phase, error.epoch, waited_s)


def stays_broken(step: Step, routed: tl.Routed) -> None:
    """Every later call says so at once, close works twice, and the GPU is fine."""
    for call in (step.dispatch, lambda: step.dispatch(sizes="exact"), lambda: step.finish(routed), step.comm.check):
        began = time.monotonic()
        with pytest.raises(tl.CommunicatorBroken, match=r"an earlier call failed.*make a new communicator"):
            call()
        assert time.monotonic() - began < AT_ONCE_S
    began = time.monotonic()
    step.comm.close()
    step.comm.close()
    with pytest.raises(tl.CommunicatorBroken):
        step.comm.check()
    assert time.monotonic() - began < AT_ONCE_S
    assert torch.arange(5, device=step.context.device).sum().item() == 10


# -- slow and late ranks ------------------------------------------------------------------------------------------


@on_ranks("several")
@pytest.mark.parametrize("sizes", ["exact", "bounded"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_slow_rank(context: RankContext, where: str, sizes: str) -> None:
    """A second is less than the timeout of five: nothing but a wait, whether the host of a rank comes late to both
    calls or its GPU is busy with something else."""
    load_kernels(context).close()
    slow = context.rank == context.num_ranks - 1

    def be_busy() -> None:
        if slow and where == "host":
            time.sleep(1.0)
        elif slow:
            torch.cuda._sleep(1_300_000_000)  # cycles: 0.65 s at 2 GHz

    with new_comm(context, timeout_s=5.0, open_timeout_s=5.0, checked=False) as comm:
        step = Step(context, comm, TOKEN)
        round_trip(step, sizes)
        comm.check()
        meet(context)
        began = time.monotonic()
        be_busy()
        routed = step.dispatch(sizes=sizes)
        be_busy()
        out = step.finish(routed)
        comm.check()
        assert time.monotonic() - began > 1.0, "nobody waited"
        same_bits(out, step.expected(ROUNDS[0])[1], "out")
        round_trip(step, sizes)
        comm.check()


@on_ranks("several")
@pytest.mark.parametrize("sizes", ["exact", "bounded"])
def test_pause_between_calls(context: RankContext, sizes: str) -> None:
    """A rank that writes a checkpoint, evaluates or compiles opens its next call much later than ``timeout_s``: the
    others wait for it as long as the process group would."""
    load_kernels(context).close()
    with new_comm(context, open_timeout_s=None, checked=False) as comm:
        step = Step(context, comm, TOKEN)
        round_trip(step, sizes)
        for late, call in enumerate((lambda: step.dispatch(sizes=sizes), lambda: round_trip(step, sizes))):
            comm.check()
            meet(context)
            if context.rank == late:
                time.sleep(2 * TIMEOUT_S)
            call()
        comm.check()


@pytest.mark.parametrize("call", ["dispatch", "combine", "eager combine"])
def test_late_rank(several: Ranks, call: str) -> None:
    """The others name it, and where they waited for it. It finds their announcements of the call, but nobody who would
    answer: its host hears before the next deadline that they have given up. All can make a new communicator then.

    Of an eager call it finds all there is, and hears of it at the next."""
    seen = several.run(check_late, call)
    late = several.num_ranks - 1
    for rank, each in enumerate(seen):
        assert each.rank == rank
        if rank != late:
            assert (each.peers, each.phase) == ((late,), OPENING)
    assert seen[late].peers[0] in range(late)
    assert seen[late].phase == SOME_CALL
    assert len({each.epoch for each in seen[:late]}) == 1
    assert seen[0].epoch > 2, "there were two calls before"


def check_late(context: RankContext, call: str) -> Seen:
    with nullcontext() if call == "eager combine" else no_plan_is_small():
        load_kernels(context).close()
        comm = new_comm(context, checked=True)  # combine too raises at once
        step = Step(context, comm, TOKEN)
        routed = round_trip(step)
        if call != "dispatch":
            routed = step.dispatch(sizes="exact")
        meet(context)
        late = context.rank == context.num_ranks - 1
        if late:
            time.sleep(LATE_S)
            if call == "eager combine":
                same_bits(step.finish(routed), step.expected(ROUNDS[0])[1], "out")
        dispatches = call == "dispatch" or (late and call == "eager combine")
        seen = time_out(lambda: step.dispatch(sizes="exact") if dispatches else step.finish(routed), gave_up=late)
        stays_broken(step, routed)
        with new_comm(context, timeout_s=30.0, open_timeout_s=30.0) as again:
            round_trip(Step(context, again, TOKEN))
        return seen


# -- a rank that is killed ----------------------------------------------------------------------------------------
#
# One group of processes of its own, since the dead one cannot be had back, and one death, which its peers see through
# several communicators. Its process group is destroyed before: these waits have nothing to do with NCCL, whose own end
# would be uncertain without the dead rank.


@pytest.fixture(scope="module")
def after_death(several: Ranks, own_gpus: Ranks) -> dict[str, list[Seen]]:
    """What the survivors saw, by communicator."""
    return kill_one(several.num_ranks, victim=0 if several.num_ranks == 2 else several.num_ranks - 1)


def one_is_named(seen: list[Seen], phase: str, calls_before: int) -> None:
    """All survivors name the same rank, which is not one of theirs; those that kernels told, step and phase too."""
    (victim,) = {each.peers for each in seen}
    assert len(victim) == 1
    assert victim[0] not in {each.rank for each in seen}
    told = {(each.phase, each.epoch) for each in seen if each.phase != SOME_CALL}
    assert len(told) <= 1
    assert all(where == phase and epoch > calls_before for where, epoch in told)


def test_killed_between_calls(after_death: dict[str, list[Seen]]) -> None:
    """Nobody announces the next call for it: the eager call itself, which reads counts, raises."""
    one_is_named(after_death["between calls"], OPENING, 2)


def test_killed_in_a_call(after_death: dict[str, list[Seen]]) -> None:
    """It had announced a dispatch, and its kernel was waiting for the others when its process was killed: they find
    the announcement and wait for its rows. The call does not ask the GPU, so check raises."""
    one_is_named(after_death["in a call"], ROWS, 2)


def test_replay_without_a_peer(after_death: dict[str, list[Seen]]) -> None:
    """No host takes part in a replay: its kernels give up by themselves, the second without a deadline of its own, and
    check raises. A further replay of the broken communicator's graph is over at once too."""
    one_is_named(after_death["replayed"], OPENING, 6)


def kill_one(num_ranks: int, victim: int) -> dict[str, list[Seen]]:
    """Start ranks, kill one of them, and ask the others; they must exit by themselves afterwards."""
    context = multiprocessing.get_context("forkserver")  # see forked_ranks in conftest.py
    processes: list[Any] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="tokenloom-faults-") as folder:
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                arguments = (rank, num_ranks, victim, folder, theirs)
                processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
                pipes.append(ours)
                processes[rank].start()
                theirs.close()
            for rank in range(num_ranks):
                assert answer(pipes[rank], rank, START_S) == "ready"
            pipes[victim].send("go")
            processes[victim].join(EXIT_S)
            assert processes[victim].exitcode == -signal.SIGKILL
            survivors = [rank for rank in range(num_ranks) if rank != victim]
            for rank in survivors:
                pipes[rank].send("it is gone")
            seen = [answer(pipes[rank], rank, EXIT_S) for rank in survivors]
            for rank in survivors:
                processes[rank].join(EXIT_S)
                assert processes[rank].exitcode == 0, f"rank {rank} does not exit: {processes[rank].exitcode}"
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                pipe.close()
                if process.is_alive():
                    process.kill()
                process.join()
    return {name: [each[name] for each in seen] for name in seen[0]}


def answer(pipe: Connection, rank: int, limit_s: float) -> Any:
    """What a rank says next."""
    if not pipe.poll(limit_s):
        pytest.fail(f"rank {rank} said nothing for {limit_s:g} s")
    try:
        failed, value = pipe.recv()
    except EOFError:
        pytest.fail(f"rank {rank} died")
    if failed:
        pytest.fail(f"rank {rank}:\n{value}")
    return value


def rank_main(rank: int, num_ranks: int, victim: int, folder: str, pipe: Connection) -> None:
    """The whole life of a process: it ends by returning, as a user's program would."""
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            device_id=device,
        )
        assert dist.group.WORLD is not None
        context = RankContext(rank, num_ranks, dist.group.WORLD, device, pipe)
        with no_plan_is_small():  # rows of an eager call leave before anybody waits: the dead one's would all be here
            pipe.send((False, live_through_a_death(context, victim, pipe)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise


def live_through_a_death(context: RankContext, victim: int, pipe: Connection) -> dict[str, Seen]:
    patient = load_kernels(context)
    names = ("between calls", "in a call", "replayed")
    steps = {name: Step(context, new_comm(context, checked=False), TOKEN) for name in names}
    routed = {name: round_trip(step) for name, step in steps.items()}
    captured = Captured(steps["replayed"])
    captured.replay()
    for step in steps.values():
        step.comm.check()
    same_bits(captured.results[1], steps["replayed"].expected(ROUNDS[0])[1], "out of the graph")
    meet(context)
    dist.destroy_process_group()
    pipe.send((False, "ready"))

    assert pipe.recv() == ("go" if context.rank == victim else "it is gone")
    if context.rank == victim:
        steps["in a call"].dispatch()
        time.sleep(0.25 * TIMEOUT_S)  # the announcement is out by then, and the deadline far away
        os.kill(os.getpid(), signal.SIGKILL)

    def dispatch_and_check() -> None:
        steps["in a call"].dispatch()
        steps["in a call"].comm.check()

    def replay_and_check() -> None:
        captured.replay()
        steps["replayed"].comm.check()

    calls = (lambda: steps["between calls"].dispatch(sizes="exact"), dispatch_and_check, replay_and_check)
    seen = {name: time_out(call, ended=True) for name, call in zip(names, calls, strict=True)}
    began = time.monotonic()
    captured.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - began < AT_ONCE_S, "a replay on a broken communicator waits once more"
    for name, step in steps.items():
        stays_broken(step, routed[name])
    free_bytes = torch.cuda.mem_get_info()[0]
    patient.close()  # it has seen nothing of the death, and releases memory that it shared with the dead
    del patient
    deadline = time.monotonic() + EXIT_S / 2
    while torch.cuda.mem_get_info()[0] - free_bytes < 2 * GRANULARITY_BYTES and time.monotonic() < deadline:
        time.sleep(0.01)  # the other survivors close theirs
        gc.collect()
        release_dropped()
    assert torch.cuda.mem_get_info()[0] - free_bytes >= 2 * GRANULARITY_BYTES
    return seen
