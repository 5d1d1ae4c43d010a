"""Blocks that other ranks wait for: the innermost tells a fault, once, and an interruption ends the group."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tokenloom as tl
from tokenloom.errors import is_known_to_all
from tokenloom.runtime.telling import Telling
from tokenloom.runtime.torch_modes import is_eager


def test_the_innermost_tells() -> None:
    """Whatever the others wait in there; blocks around it know that it did."""
    inner, outer, end = mock.Mock(), mock.Mock(), mock.Mock()
    fault = ValueError("no")
    with pytest.raises(ValueError, match="no") as raised, Telling(outer, end), Telling(inner, end):
        raise fault
    assert raised.value is fault
    assert is_known_to_all(fault)
    assert (inner.mock_calls, outer.mock_calls, end.mock_calls) == ([mock.call(fault)], [], [])


def test_nothing_to_tell() -> None:
    """A block that ends well, and one that ends with what all ranks raise."""
    tell = mock.Mock()
    with Telling(tell, tell):
        pass
    with pytest.raises(tl.PeerError), Telling(tell, tell):
        raise tl.PeerError(1, "all ranks raise this")
    assert not tell.mock_calls


def test_an_interruption_ends_the_group() -> None:
    """The program may end, and does not wait until the others have heard."""
    tell, end, interruption = mock.Mock(), mock.Mock(), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), Telling(tell, end), Telling(tell, end):
        raise interruption
    assert (tell.mock_calls, end.mock_calls) == ([], [mock.call(interruption)])


def test_what_comes_instead() -> None:
    """Another rank has a fault that comes first, or nobody is there to hear: all of them raise that."""
    fault, other = ValueError("no"), tl.PeerError(1, "a fault that comes first")
    outer = mock.Mock()
    with pytest.raises(tl.PeerError), Telling(outer, outer), Telling(mock.Mock(side_effect=other), outer):
        raise fault
    assert not outer.mock_calls
    assert not is_known_to_all(fault), "nobody has heard of it"


def test_told_outside_of_a_transform() -> None:
    """What tells moves real bytes, which a mode of torch would make fake ones."""
    eager: list[bool] = []
    with (
        pytest.raises(ValueError, match="no"),
        FakeTensorMode(),
        Telling(lambda fault: eager.append(is_eager()), repr),
    ):
        raise ValueError("no")
    assert eager == [True]
    assert torch.ones(1).item() == 1
