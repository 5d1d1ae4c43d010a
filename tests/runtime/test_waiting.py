"""Waits on the host for collectives of NCCL, with stand-ins for torch's handles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenloom.runtime.waiting import CollectiveOnStream

SUCCESS, TIMEOUT, COMM_ERROR = 0, 1, 2
"""Of torch's WorkResult."""


class Work:
    """A collective of NCCL that has ended, as torch shows it.

    Args:
        result: what torch has settled, if anything.
    """

    def __init__(self, result: int | None) -> None:
        self.result: torch.futures.Future[Any] = torch.futures.Future()
        self.waits = 0
        if result is not None:
            self.result.set_result(result)

    def is_completed(self) -> bool:
        return True

    def get_future_result(self) -> torch.futures.Future[Any]:
        return self.result

    def wait(self) -> None:
        """Where there is an error, this aborts the communicator of all that use it."""
        self.waits += 1


@pytest.mark.parametrize("result", [None, SUCCESS])
def test_a_collective_that_has_ended(result: int | None) -> None:
    """The stream waits for it too, once."""
    work = Work(result)
    collective = CollectiveOnStream(work)  # type: ignore[arg-type]
    assert collective.wait(1.0)
    assert work.waits == 1
    assert not collective.broken


@pytest.mark.parametrize("result", [TIMEOUT, COMM_ERROR])
def test_an_error_aborts_nothing(result: int) -> None:
    """Kernels that are aborted would send other ranks what is in their buffers."""
    work = Work(result)
    collective = CollectiveOnStream(work)  # type: ignore[arg-type]
    assert not collective.wait(1.0)
    assert work.waits == 0
    assert "NCCL reports an error" in collective.broken[-1]
