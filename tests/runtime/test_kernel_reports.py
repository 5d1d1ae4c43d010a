"""What the host makes of the words that kernels write to pinned memory."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tokenloom.runtime import deferred_release, kernel_reports
from tokenloom.runtime.kernel_reports import CallOutcome, CallRecords, FaultFlag, HostCounts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def memory() -> Iterator[list[torch.Tensor]]:
    """Pinned memory takes a GPU; pageable words do as well here. Yields what was made, in order."""
    real, made = torch.zeros, []

    def zeros(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            assert options["device"] == "cpu", "only CPU tensors can be pinned, whatever the default device is"
            made.append(real(*args, **options))
            return made[-1]
        return real(*args, **options)

    with mock.patch.object(torch, "zeros", zeros):
        yield made


@pytest.fixture(params=["meta", torch.bfloat16], ids=str)
def caller_default(request: pytest.FixtureRequest) -> Iterator[None]:
    """A program that sets defaults for its own tensors."""
    dtype = torch.get_default_dtype()
    default = request.param
    torch.set_default_device(default) if isinstance(default, str) else torch.set_default_dtype(default)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


@pytest.mark.usefixtures("caller_default")
def test_the_callers_defaults_do_no_harm(memory: list[torch.Tensor]) -> None:
    """Words are int32 in host memory, whatever the caller makes its own tensors of."""
    flag = FaultFlag(CPU, 0)
    CallRecords(CPU, 2)
    HostCounts(CPU, 3)
    assert {(each.device.type, each.dtype) for each in [flag.claimed, *memory]} == {("cpu", torch.int32)}
    assert flag.error() is None


def test_a_fault_names_rank_peer_and_phase(memory: list[torch.Tensor]) -> None:
    """The words of FaultRecord, in its order, at the address that kernels are given."""
    flag = FaultFlag(CPU, 3)
    (record,) = memory
    assert flag.record_address == record.data_ptr()
    record[1:] = torch.tensor([1, 2, 40, 41, 39])
    assert flag.error() is None, "the first word says that the others are there"
    record[0] = 1
    error = flag.error()
    assert error is not None
    assert (error.rank, error.peers, error.phase, error.epoch) == (3, (1,), kernel_reports.PHASES[2], 40)
    assert "its flag shows 39, 41 was wanted" in str(error)


@pytest.mark.parametrize(("wanted", "seen"), [(12, 5), (3, -4)])
def test_rows_that_do_not_arrive_are_counted(memory: list[torch.Tensor], wanted: int, seen: int) -> None:
    """Counts of all calls say nothing to anybody; their difference does, also once they have wrapped."""
    flag = FaultFlag(CPU, 0)
    memory[0][:] = torch.tensor([1, 1, kernel_reports.ARRIVALS, 40, wanted, seen])
    error = flag.error()
    assert error is not None
    assert (error.peers, error.phase) == ((1,), "MegaMoE, rows of an expert")
    assert "7 of its rows are missing" in str(error)


def test_blocks_that_do_not_run_are_nobody_elses_fault(memory: list[torch.Tensor]) -> None:
    """A kernel whose blocks wait for each other, and for SMs, names its own rank and says what it lacks."""
    flag = FaultFlag(CPU, 3)
    memory[0][:] = torch.tensor([1, 3, kernel_reports.OWN_BLOCKS, 40, 41, 39])
    error = flag.error()
    assert error is not None
    assert (error.peers, error.phase) == ((3,), "blocks of its own kernel")
    assert "too few SMs" in str(error)


def test_counts_belong_to_a_sequence_number(memory: list[torch.Tensor]) -> None:
    """What the last call left is not taken for this one's; numbers start again before they overflow."""
    counts = HostCounts(CPU, 2)
    (words,) = memory
    assert counts.address == words.data_ptr()
    assert counts.expect() == 1
    words[:] = torch.tensor([1, 7, 8])
    assert counts.wait(lambda: None) == [7, 8]
    assert counts.expect() == 2
    assert not counts.are_there()

    def arrive() -> None:
        words[:] = torch.tensor([2, 9, 10])

    assert counts.wait(arrive) == [9, 10]
    counts.sequence = 2**31 - 1
    assert counts.expect() == 1


def test_looking_may_raise() -> None:
    """Who waits for counts that will never be there finds out by looking."""
    counts = HostCounts(CPU, 2)
    counts.expect()
    with pytest.raises(RuntimeError, match="gone"):
        counts.wait(mock.Mock(side_effect=RuntimeError("gone")))


def test_records_are_read_once(memory: list[torch.Tensor]) -> None:
    """Each slot by itself; ranks are counted from 1 there, since 0 means that all is well."""
    records = CallRecords(CPU, 3)
    (words,) = memory
    words = words.view(3, -1)
    assert [records.address(slot) for slot in range(3)] == [words[slot].data_ptr() for slot in range(3)]
    words[1, :5] = torch.tensor([500, 400, 0, 0, 0])
    words[2, :5] = torch.tensor([0, 0, 1, 2, 4])
    assert [records.is_clear(slot) for slot in range(3)] == [True, False, False]
    assert records.take(0) is None
    assert records.take(1) == CallOutcome(500, 400, None, 0, None)
    assert records.take(2) == CallOutcome(0, 0, 0, 2, 3)
    assert not words.any()


def test_a_call_is_over_when_its_number_is_there(memory: list[torch.Tensor]) -> None:
    """Not that of the call that had the slot before. The number is no part of the outcome, and outlives its reading:
    who asks again gets the same answer."""
    records = CallRecords(CPU, 2)
    words = memory[0].view(2, -1)
    words[1, kernel_reports.SEQUENCE_WORD] = 7
    assert [records.is_over(1, sequence) for sequence in (3, 7, 11)] == [False, True, False]
    assert [records.is_well(1, sequence) for sequence in (3, 7, 11)] == [False, True, False]
    assert not records.is_over(0, 7)
    assert records.is_clear(1)
    assert records.take(1) is None
    for found in (0, 2, 4):  # rows that are too many, a fault, a difference
        words[1, found] = 1
        assert not records.is_well(1, 7)
        assert records.take(1) is not None
        assert records.is_well(1, 7)


@pytest.mark.parametrize("in_order", [True, False])
def test_reads_are_ordered_where_the_machine_does_not(in_order: bool, memory: list[torch.Tensor]) -> None:
    """On Arm the rest is read behind a system call, which comes after the word that says that it is there."""
    flag, counts, records = FaultFlag(CPU, 0), HostCounts(CPU, 1), CallRecords(CPU, 1)
    memory[1][0] = counts.expect()

    def seen() -> None:  # what is written last becomes visible last
        memory[0][1], memory[1][1], memory[2][2] = 5, 6, 1

    with (
        mock.patch.object(kernel_reports, "_LOADS_KEEP_ORDER", in_order),
        mock.patch.object(os, "sched_yield", side_effect=seen) as entered,
    ):
        assert flag.error() is None
        entered.assert_not_called()
        memory[0][0] = 1
        error = flag.error()
        assert error is not None
        assert entered.called is not in_order
        memory[1][1] = 0
        assert counts.wait(lambda: None) == [0 if in_order else 6]
        assert error.peers == ((0,) if in_order else (5,))
        for ask, answer in ((records.is_well, in_order), (records.is_over, True)):
            memory[2][2], memory[2][kernel_reports.SEQUENCE_WORD] = 0, 7
            assert ask(0, 7) == answer
            assert (records.take(0) is None) == in_order


def test_memory_outlives_the_kernels_that_write_it(memory: list[torch.Tensor]) -> None:
    """torch would give pinned memory to the next who asks, while a kernel of a dropped communicator still writes."""
    deferred_release.release_dropped()
    made = [FaultFlag(CPU, 0), CallRecords(CPU, 1), HostCounts(CPU, 1)]
    words = [weakref.ref(each) for each in memory]
    memory.clear()
    with mock.patch.object(deferred_release, "wait_for", return_value=False):
        del made
        gc.collect()
        deferred_release.release_dropped()
        assert all(word() is not None for word in words)
    deferred_release.release_dropped()
    assert not any(word() is not None for word in words)
