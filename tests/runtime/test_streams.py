"""Streams and events of a device that is not the current one."""

from __future__ import annotations

import pytest
import torch

from tokenloom.runtime.streams import SideStream, on_device, tensors_in

pytestmark = pytest.mark.gpu(2)

CYCLES = 200_000_000  # 0.1 s at 2 GHz


def test_tensors_in_what_callers_give() -> None:
    """x may be a list of values and scales as well as a tuple."""
    one, two, three = torch.zeros(3, 1).unbind()
    assert [id(each) for each in tensors_in(([one, two], None, (three,)))] == [id(one), id(two), id(three)]


def test_events_are_those_of_the_work() -> None:
    """Whatever device is current when work is put on the side stream, when its end is asked for, and when it is waited
    for: an event of the current device's idle stream would be done at once."""
    device, current = torch.device("cuda", 1), torch.cuda.current_device()
    assert current == 0
    side = SideStream(device)
    source = torch.ones(1000, device=device)
    with side.run((source,)):  # loading a kernel and getting memory may wait for what runs
        first = source + 1
    del first
    torch.cuda.synchronize(device)
    with side.run((source,)):
        with on_device(device):
            torch.cuda._sleep(CYCLES)
        result = source + 1
        event = side.event((result,))
    later = side.event((result,))
    assert not event.query()
    assert not later.query()
    event.wait()
    doubled = result * 2
    event.synchronize()
    assert event.query()
    assert doubled.sum().item() == 4000
    assert torch.cuda.current_device() == current
