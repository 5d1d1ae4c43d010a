"""One rank fails at some moment; ``python -m tests.faults random`` runs as many of these as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.faults.programs import Ended, Programs
from tests.faults.random_faults import STEPS, Fault, faults, judge_error, judge_masks
from tests.support.slow import mostly_slow

SEEDS, QUICK, SELDOM = [7, 14, 23, 25, 26, 74, 127, 143, 148], [25, 127], [7, 26, 148]
"""Each workload, both ways to go on, and each kind of fault that nobody waits long for."""


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with Programs() as running:
        yield running


@pytest.mark.parametrize("seed", mostly_slow(SEEDS, QUICK, SELDOM))
def test_a_fault_ends_as_promised(programs: Programs, seed: int) -> None:
    """The others name the rank that failed, or go on without it and with right values; nobody hangs or aborts."""
    fault = replace(Fault.drawn(seed), patient=True)
    found, ended = faults(fault, programs)
    assert not found, (found, ended)


class Done:
    """A program whose ranks have ended, and said this."""

    def __init__(self, codes: list[int | None], said: list[list[object]]) -> None:
        self.ended = Ended(codes, [list(each) for each in said], [""] * len(codes))

    def run(self, *_: object, **__: object) -> Ended:
        return self.ended


KILLED = Fault(0, "pairs", "raise", 2, "kill", 1, 0.5, True)
LOST = [["at", 5]]
TOLD = "rank 1 failed in this call, nothing was received: Interrupted"
HEARD = [["at", 5], ["error", "PeerTimeout", [1], ""], ["next", "CommunicatorBroken", ""]]


@pytest.mark.parametrize(
    ("fault", "codes", "said", "found"),
    [
        (KILLED, [0, -9], [HEARD, LOST], ""),
        (KILLED, [None, -9], [HEARD, LOST], "hangs"),
        (KILLED, [-6, -9], [HEARD, LOST], "exit code -6"),
        (KILLED, [0, 0], [HEARD, LOST], ""),
        (KILLED, [0, 1], [HEARD, LOST], "exit code 1"),
        (KILLED, [0, -9], [[["done", []]], LOST], "heard nothing"),
        (KILLED, [0, -9], [[["done", []]], [["at", STEPS - 1]]], ""),
        (KILLED, [0, -9], [[["wrong", "step 5"]], LOST], "wrong value"),
        (KILLED, [0, -9], [[["error", "PeerTimeout", [0, 1], ""]], LOST], "names [0, 1]"),
        (KILLED, [0, -9], [[["error", "PlanMismatch", [], ""]], LOST], "PlanMismatch"),
        (KILLED, [0, -9], [[*HEARD[:2], ["next", "", ""]], LOST], "next call worked"),
        (replace(KILLED, kind="interrupt"), [0, 0], [[["at", 5], ["error", "PeerError", [1], TOLD]], LOST], ""),
        (
            replace(KILLED, kind="interrupt"),
            [0, 0],
            [[["at", 5], ["error", "PeerError", [0], TOLD]], LOST],
            "names [0]",
        ),
        (replace(KILLED, kind="short sleep"), [0, 0], [[["error", "PeerError", [1], TOLD]], LOST], "though nobody"),
        (replace(KILLED, kind="short sleep"), [0, 0], [HEARD, [["done", []]]], "away for longer"),
        (replace(KILLED, kind="sleep"), [0, 0], [[["done", []]], [["done", []]]], ""),
    ],
)
def test_what_is_found(fault: Fault, codes: list[int | None], said: list[list[object]], found: str) -> None:
    """A judge who finds nothing is of no use."""
    done: Programs = Done(codes, said)  # type: ignore[assignment]
    assert (found in "".join(faults(fault, done)[0])) if found else not faults(fault, done)[0]


@pytest.mark.parametrize(
    ("kind", "masked", "came", "found"),
    [
        ("kill", [1], True, ""),
        ("kill", [0, 1], True, "masked [0, 1]"),
        ("kill", [], True, "masked nobody"),
        ("kill", [], False, ""),
        ("short sleep", [1], True, "was away"),
        ("sleep", [1], True, ""),
        ("sleep", [], True, ""),
    ],
)
def test_which_masks_are_right(kind: str, masked: list[int], came: bool, found: str) -> None:
    """A rank that failed late may have been in all calls of the others."""
    fault = replace(KILLED, on_timeout="mask", kind=kind)
    text = "".join(judge_masks({"done": [masked]}, fault, came))
    assert found in text if found else not text
    assert judge_masks({"error": ["PeerTimeout", [1], ""]}, fault, came)


def test_a_broken_communicator_says_whose_fault_it_was() -> None:
    said = {"error": ["CommunicatorBroken", [], "rank 1 was interrupted"], "next": ["CommunicatorBroken", ""]}
    assert not judge_error(said, KILLED, True)
    assert judge_error(said | {"error": ["CommunicatorBroken", [], "broken"]}, KILLED, True)
