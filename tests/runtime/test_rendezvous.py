"""A rendezvous ends alike on all ranks, and marks its errors so that nobody reports them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tokenloom import errors
from tokenloom.errors import is_known_to_all
from tokenloom.runtime.rendezvous import agree


class Answers:
    """Stands for a RankGroup: this is rank 0, and rank 1 answers what it is told to.

    Attributes:
        aborted: what has ended the group.
    """

    num_ranks, members = 2, range(2)

    def __init__(self, theirs: tuple[Any, ...]) -> None:
        self._theirs = theirs
        self.aborted: list[BaseException] = []

    @property
    def whole(self) -> Answers:
        return self

    def abort(self, fault: BaseException) -> None:
        self.aborted.append(fault)

    def all_gather_object(self, value: Any, phase: str, **options: Any) -> list[Any]:
        return [value, self._theirs]


WELL = (None, {"call": "the test", "size": 1}, "theirs")
FAILED = ("ValueError: no", {}, None)


def meet(theirs: tuple[Any, ...], fault: Exception | None = None) -> list[Any]:
    def prepare() -> tuple[dict[str, Any], str]:
        if fault is not None:
            raise fault
        return {"size": 1}, "ours"

    return agree(Answers(theirs), prepare, "the test")  # type: ignore[arg-type]


def test_extras_by_rank() -> None:
    assert meet(WELL) == ["ours", "theirs"]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, errors.InvalidArgument])
@pytest.mark.parametrize("theirs", [WELL, FAILED], ids=["peer is well", "peer failed too"])
def test_own_fault_is_known_afterwards(kind: type[Exception], theirs: tuple[Any, ...]) -> None:
    """The peers have heard of it here, in errors of any type; a caller that reports faults must not do so again."""
    fault = kind("no")
    assert not is_known_to_all(fault)
    with pytest.raises(kind) as raised:
        meet(theirs, fault)
    assert raised.value is fault
    assert is_known_to_all(fault)
    assert not is_known_to_all(kind("another")), "marked is the error, not its class"


def test_an_interrupted_rank_ends_the_group() -> None:
    """Its process may end, and does not come to say why: the others hear it at once."""
    ranks, interrupt = Answers(WELL), KeyboardInterrupt("the test")

    def prepare() -> Any:
        raise interrupt

    with pytest.raises(KeyboardInterrupt):
        agree(ranks, prepare, "the test")  # type: ignore[arg-type]
    assert ranks.aborted == [interrupt]


def test_errors_of_others_are_known() -> None:
    """What all ranks raise alike, by class; what one rank finds in its own arguments is not."""
    with pytest.raises(tl.PeerError, match="ValueError: no") as raised:
        meet(FAILED)
    assert is_known_to_all(raised.value)
    with pytest.raises(tl.PlanMismatch, match="rank 1 has size=2, rank 0 has size=1") as differs:
        meet((None, {"call": "the test", "size": 2}, None))
    with pytest.raises(tl.PlanMismatch, match="rank 1 has call=another, rank 0 has call=the test"):
        meet((None, {"call": "another"}, None))
    assert is_known_to_all(differs.value)
    known = {tl.PeerError, tl.PlanMismatch, tl.PeerTimeout, tl.CommunicatorBroken, tl.CapacityOverflow}
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert {each for each in classes if each.known_to_all} == known
    assert not is_known_to_all(ValueError("no"))
