"""What messages of errors say to do, where it depends on what came."""

from __future__ import annotations

import copy
import pickle

import pytest

import tokenloom as tl
from tokenloom.errors import CapacityOverflow, PeerTimeout, PlanMismatch

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:936"
LONGER = "a larger timeout_s"


def timeout(cause: str) -> str:
    return str(PeerTimeout(0, [1], "the handshake of dispatch", 8, cause))


def test_a_rank_that_is_late() -> None:
    """Look there; a longer wait may help."""
    said = timeout("no answer within 30 s")
    assert "for rank(s) 1: no answer within 30 s; look there first. Close this communicator" in said
    assert LONGER in said


def test_a_connection_that_broke() -> None:
    """No longer wait helps. What gloo says comes last, where it does not hide the rest; ``cause`` has all of it."""
    error = PeerTimeout(0, [1], "the handshake of dispatch", 8, f"the connection broke ({GLOO})")
    said = "for rank(s) 1: the process ended or its connection broke; see that rank's log. Close this communicator"
    assert said in str(error)
    assert str(error).endswith(f" ({GLOO})")
    assert LONGER not in str(error)
    assert error.cause == f"the connection broke ({GLOO})"


@pytest.mark.parametrize("cause", ["its process has ended", "the communicator was closed there"])
def test_a_rank_that_is_gone(cause: str) -> None:
    """It is said as it is, and no longer wait helps."""
    said = timeout(cause)
    assert f"for rank(s) 1: {cause}; look there first" in said
    assert LONGER not in said


@pytest.mark.parametrize(
    ("field", "cure"),
    [
        ("layout", "give all ranks the same layout"),
        ("wire_dtype", "give all ranks the same wire_dtype (the dtype of y unless you pass wire_dtype)"),
        ("out_dtype", "give all ranks the same out_dtype (the dtype of y unless you pass out_dtype)"),
        ("dispatch number", "combine the result of the same dispatch on all ranks"),
    ],
)
def test_ranks_that_differ(field: str, cure: str) -> None:
    """The cure is in the words of the caller, who passes neither a number nor, mostly, a dtype."""
    assert str(PlanMismatch(1, field, "a", "b")) == f"rank 1 has {field}=a, rank 0 has {field}=b; {cure}"


def test_an_overflow() -> None:
    """With exact sizes nothing was sent, and neither a layer nor fixed places can be meant."""
    assert str(CapacityOverflow(8, 2, sent=False)) == (
        "dispatch needs 8 rows, the capacity is 2; nothing is handed out; pass capacity=8"
    )
    said = str(CapacityOverflow(8, 2, sent=True))
    for part in ("in layout 'slots', places for each expert", "combine gives NaN for their tokens", "pool_rows=8"):
        assert part in said


@pytest.mark.parametrize(
    "error",
    [
        PeerTimeout(0, [1], "the handshake of dispatch", 8, "no answer within 30 s"),
        tl.PeerError(1, "ValueError: no"),
        CapacityOverflow(8, 2, sent=True),
        PlanMismatch(1, "layout", "a", "b"),
        tl.InvalidExpertId(1, 2, 9, 4, 1),
        tl.ShapeMismatch("x is [1]"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel(error: tl.TokenloomError) -> None:
    """From worker processes, which pickle what a call of theirs raised; all that they say comes along."""
    error.known_to_all = True
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


def test_a_strategy_that_is_a_name() -> None:
    """As dispatch takes one; a layer takes a Strategy."""
    with pytest.raises(tl.InvalidArgument, match=r"strategy is 'dedup', expected a tl\.Strategy, such as") as error:
        tl.ExpertParallelMoE(
            None,
            hidden=16,
            intermediate=8,
            num_experts=4,
            top_k=2,
            max_tokens_per_rank=4,
            strategy="dedup",  # type: ignore[arg-type]
        )
    assert "tl.Strategy(dispatch='dedup')" in str(error.value)
