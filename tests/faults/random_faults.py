"""Programs in which one rank fails at a random moment: the others hear of it, or go on without it, as promised.

See docs/explanation/failures.md.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist

import tokenloom as tl
from tests.faults.programs import Ended, Programs, Rank, Signal
from tests.faults.workloads import WORKLOADS, Workload, WrongValue, await_others
from tests.support.patience import only_late
from tokenloom.runtime import membership, waiting

STEPS, FEW_STEPS = 30, 12
PAUSE_S = 0.03
"""Most that a rank does between two steps, so that ranks are at different places."""
MOMENTS_S = 1.0
"""Faults come within this time. All steps take longer on an idle machine."""
TIMEOUT_S, OPEN_TIMEOUT_S = 3.0, 4.0
ROLL_CALL_S = 4.0
"""How long ranks that are not late may take to say so: a busy machine may keep a process from running for longer than
a second."""
SHORT_S, LONG_S = 0.5, 12.0
"""Of ranks that sleep and are not missed, and of those that are."""
LIMIT_S = 120.0
EXITED, LOST = 3, 7
"""Exit codes of ``sys.exit`` and ``os._exit``."""

SIGNALS = ("kill", "stop", "pause", "short pause")
"""From outside, at any moment."""
OWN = ("raise", "sys.exit", "os._exit", "sleep", "short sleep", "interrupt")
"""By the rank itself: between two steps, or in a signal handler, so nearly anywhere."""
HARMLESS = ("pause", "short pause", "sleep", "short sleep")
"""After which the rank goes on."""
MISSED = ("pause", "sleep")


class Interrupted(Exception):
    """What a signal handler raises, and a program catches."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank.

    Attributes:
        seed: what the ranks draw their pauses from.
        workload: what the program does. on_timeout: as of a Communicator. num_ranks: of the program.
        kind: what happens. victim: to which rank.
        after_s: seconds after all ranks were ready.
        anywhere: also within a call.
        patient: ranks that are not late have all the time to say so, for busy machines; and they make few steps.
    """

    seed: int
    workload: str
    on_timeout: str
    num_ranks: int
    kind: str
    victim: int
    after_s: float
    anywhere: bool
    patient: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Fault:
        """The one of this number."""
        draw = random.Random(seed)
        workload, num_ranks = draw.choice(list(WORKLOADS)), draw.choice((2, 3, 4, 5))
        on_timeout = draw.choice(("raise", "mask")) if workload != "normal" else "raise"
        kind = draw.choice(SIGNALS + OWN)
        anywhere = kind in SIGNALS or draw.random() < 0.7
        moment = round(draw.random() * MOMENTS_S, 4)
        return cls(seed, workload, on_timeout, num_ranks, kind, draw.randrange(num_ranks), moment, anywhere)

    @property
    def steps(self) -> int:
        """How many each rank makes."""
        return FEW_STEPS if self.patient else STEPS

    @property
    def signals(self) -> list[Signal]:
        """What comes from outside."""
        number = {"kill": signal.SIGKILL}.get(self.kind, signal.SIGSTOP)
        if self.kind not in SIGNALS:
            return []
        wakes_s = {"pause": LONG_S, "short pause": SHORT_S}.get(self.kind)
        wakes = [] if wakes_s is None else [Signal(self.victim, signal.SIGCONT, self.after_s + wakes_s)]
        return [Signal(self.victim, number, self.after_s), *wakes]

    def codes(self, rank: int) -> set[int]:
        """Exit codes that a rank may have. A victim may have been done before."""
        killed = -int(signal.SIGKILL)
        own = {"kill": killed, "stop": killed, "raise": 1, "sys.exit": EXITED, "os._exit": LOST}
        return {0, own.get(self.kind, 0)} if rank == self.victim else {0}


def program(rank: Rank, fault: Fault) -> None:
    """Be a rank of the program."""
    rank.begin()
    is_victim = rank.rank == fault.victim
    with ExitStack() as stack:
        if fault.patient and not is_victim:
            stack.enter_context(only_late([fault.victim]))
        for module in () if fault.patient else (membership, waiting):
            stack.enter_context(mock.patch.object(module, "ROLL_CALL_S", ROLL_CALL_S))
        work = WORKLOADS[fault.workload](rank, fault.on_timeout)
        for step in range(2):
            work.step(step)
        await_others(TIMEOUT_S, OPEN_TIMEOUT_S)
        rank.ready()
        try:
            make_steps(rank, work, fault)
        except Interrupted:
            rank.say("interrupted")
        except WrongValue as wrong:
            rank.say("wrong", str(wrong))
        except tl.TokenloomError as error:
            peers = {tl.PeerTimeout: "peers", tl.PeerError: "rank"}.get(type(error))
            named = getattr(error, peers) if peers else ()
            rank.say("error", type(error).__name__, [named] if isinstance(named, int) else list(named), str(error))
            say_next(work, rank, fault.steps)
        else:
            rank.say("done", sorted(work.masked()))
        signal.setitimer(signal.ITIMER_REAL, 0)
        work.close()
        dist.destroy_process_group()
    rank.say("ends")


def make_steps(rank: Rank, work: Workload, fault: Fault) -> None:
    draw = random.Random(1000 * fault.seed + rank.rank)
    own = rank.rank == fault.victim and fault.kind in OWN
    began = time.monotonic()
    if own and fault.anywhere:
        signal.signal(signal.SIGALRM, lambda *_: fail(rank, fault, _[1]))
        signal.setitimer(signal.ITIMER_REAL, max(fault.after_s, 1e-6))
    for step in range(2, fault.steps):
        if own and not fault.anywhere and time.monotonic() - began >= fault.after_s:
            own = False
            fail(rank, fault)
        rank.say("at", step)
        work.step(step)
        time.sleep(draw.random() * PAUSE_S)


def fail(rank: Rank, fault: Fault, frame: FrameType | None = None) -> None:
    """What the victim does."""
    where = [] if frame is None else [f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"]
    rank.say("fails", fault.kind, *where)
    if fault.kind == "raise":
        raise RuntimeError("a bug of the program")
    if fault.kind == "interrupt":
        raise Interrupted("a watchdog")
    if fault.kind == "sys.exit":
        sys.exit(EXITED)
    if fault.kind == "os._exit":
        os._exit(LOST)
    time.sleep(LONG_S if fault.kind == "sleep" else SHORT_S)


def say_next(work: Workload, rank: Rank, step: int) -> None:
    """What the next call says."""
    try:
        work.step(step)
    except tl.TokenloomError as error:
        rank.say("next", type(error).__name__, str(error))
    else:
        rank.say("next", "", "")


def faults(fault: Fault, programs: Programs) -> tuple[list[str], Ended]:
    """What was not as promised, and how the program has ended."""
    ended = programs.run(program, fault.num_ranks, fault, limit_s=LIMIT_S, signals=fault.signals)
    last = max((said[1] for said in ended.said[fault.victim] if said[0] == "at"), default=0)
    came = last < fault.steps - 1  # before the victim had begun its last step
    found = []
    for rank, (code, lines) in enumerate(zip(ended.codes, ended.said, strict=True)):
        said: dict[str, Any] = {line[0]: line[1:] for line in lines}
        wrong: list[str] = []
        if code is None:
            wrong.append("hangs")
        elif code not in fault.codes(rank):
            wrong.append(f"exit code {code}")
        if "wrong" in said:
            wrong.append(f"wrong value: {said['wrong'][0]}")
        if rank != fault.victim and code is not None and not wrong and not was_told(said, fault):
            wrong += judge_masks(said, fault, came) if fault.on_timeout == "mask" else judge_error(said, fault, came)
        found += [f"rank {rank}: {each}" for each in wrong]
    return found, ended


def was_told(said: dict[str, Any], fault: Fault) -> bool:
    """Whether a rank has heard of the fault as of bad input, behind which the communicator keeps working.

    The victim was in a call then, and waited for nobody.
    """
    name, ranks, text = said.get("error", ("", [], ""))
    told = name == "PeerError" and ranks == [fault.victim] and "nothing was received" in text
    return told and fault.kind in ("raise", "interrupt")


def judge_masks(said: dict[str, Any], fault: Fault, came: bool) -> list[str]:
    """What is wrong with a rank that is to go on, if it said this."""
    if "done" not in said:
        return [f"did not go on: {said.get('error')}"]
    masked = said["done"][0]
    if not set(masked) <= {fault.victim}:
        return [f"masked {masked}, the victim is {fault.victim}"]
    if fault.kind in HARMLESS and fault.kind not in MISSED and masked:
        return [f"masked {masked}, which was away for {SHORT_S} s"]
    if came and not masked and fault.kind not in HARMLESS:
        return [f"masked nobody, the victim was {fault.victim}"]
    return []


def judge_error(said: dict[str, Any], fault: Fault, came: bool) -> list[str]:
    """What is wrong with a rank that is to raise an error, if it said this."""
    may_go_on = not came or fault.kind in HARMLESS
    if "error" not in said:
        return [] if may_go_on else ["heard nothing"]
    name, ranks, text = said["error"]
    if fault.kind in HARMLESS and fault.kind not in MISSED:
        return [f"{name}, though nobody was away for longer than {SHORT_S} s: {text}"]
    if name == "CommunicatorBroken" and f"rank {fault.victim}" not in text:
        return [f"heard not who: {text}"]
    if name not in ("PeerTimeout", "PeerError", "CommunicatorBroken"):
        return [f"{name}: {text}"]
    if name != "CommunicatorBroken" and ranks != [fault.victim]:
        return [f"{name} names {ranks}, the victim is {fault.victim}: {text}"]
    if not said.get("next", [""])[0]:
        return ["its next call worked, on a communicator that is broken"]
    return []
