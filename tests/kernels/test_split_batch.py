"""The planner's kernel, on a GPU or without one, against the planner in Python, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.one_gpu import DEVICE, EMULATED, EmulatedKernel, make_kernel, needs_one_gpu, run
from tests.support import emulator
from tests.support.batch_splits import Batch, Table, drawn_batch, flattened
from tokenloom.errors import InvalidArgument
from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.slots_of_routes import launch as slots_launch
from tokenloom.kernels.split_batch.launch import SplitBatchVariant, make_outputs, point, require_room
from tokenloom.ops.slots_of_routes import BatchSplit, SlotTable, require_room_to_split
from tokenloom.ops.split_batch import TAKEN

INT32 = torch.int32
UNWRITTEN = 77
DRAWN = [
    pytest.param(sizes, draws, id=name)
    for name, sizes, draws in (
        ("alone", (1, 3, 1), 4),
        ("2 ranks", (2, 4, 1), 30),
        ("3 ranks, no slot to spare", (3, 6, 0), 20),
        ("4 ranks", (4, 8, 2), 40),
        ("8 ranks", (8, 16, 1), 40),
        ("two ranks to some lanes", (40, 40, 1), 10),
        ("two ranks to each lane", (64, 64, 2), 10),
        ("more slots than lanes", (4, 160, 30), 10),
    )
]


def slots_by_expert(table: Table, masked: tuple[int, ...], num_experts: int) -> list[list[int]]:
    flat = flattened(table, masked)
    return [[slot for slot, each in enumerate(flat) if each == expert] for expert in range(num_experts)]


def table_of(batch: Batch, rank: int, device: str = "cpu") -> SlotTable:
    """The batch's placement, as a source has it."""
    num_ranks, num_experts = batch.counts.shape
    table = SlotTable(num_experts, num_ranks, len(batch.table[0]), rank, torch.device(device))
    taken = [slot for slot, each in enumerate(flattened(batch.table, batch.masked)) if each == TAKEN]
    table.write(slots_by_expert(batch.table, batch.masked, num_experts), batch.masked, taken)
    return table


class Splitting:
    """The kernels, and memory that stays where it is.

    Args:
        emulated: on the emulator, wherever other tests run.
    """

    def __init__(self, num_ranks: int, num_experts: int, slots_per_rank: int, emulated: bool = EMULATED) -> None:
        self.emulated, self.device = emulated, "cpu" if emulated else DEVICE
        variant = SplitBatchVariant(num_ranks, num_experts, slots_per_rank)
        self.kernel = self._make(variant.spec())
        self.counts = torch.empty(num_ranks, num_experts, dtype=INT32, device=self.device)
        self.outputs = make_outputs(variant, torch.device(self.device))

    def _make(self, spec: KernelSpec) -> Any:
        return EmulatedKernel(spec, 0) if self.emulated else make_kernel(spec)

    def _run(self, kernel: Any, blocks: int) -> None:
        if self.emulated:
            kernel.launch(blocks, 0)
        else:
            run(kernel, blocks)

    def split(self, table: SlotTable, counts: np.ndarray, rank: int, rows_per_pull: int, always: bool) -> BatchSplit:
        """Run the kernel."""
        self.counts.copy_(torch.from_numpy(counts))
        for each in self.outputs:
            each.fill_(UNWRITTEN)
        starts, slots, experts, masked = (
            each.to(self.device) for each in (table.starts, table.slots, table.experts, table.masked)
        )
        given = starts, slots, experts, masked
        point(self.kernel.args, self.counts, given, self.outputs, rank, rows_per_pull, always)
        self._run(self.kernel, 1)
        shares, summary, slot_experts, before, heads = self.outputs
        return BatchSplit(slot_experts, before, heads, shares, summary)

    def slots_of_routes(self, table: SlotTable, ids: torch.Tensor, rank: int, split: BatchSplit) -> torch.Tensor:
        """Run the other kernel."""
        kernel = self._make(slots_launch.SlotsOfRoutesVariant(len(table.starts) - 1, split=True).spec())
        there, slots = ids.to(self.device), torch.full(ids.shape, UNWRITTEN, dtype=INT32, device=self.device)
        starts, of_experts = table.starts.to(self.device), table.slots.to(self.device)
        blocks = slots_launch.point(kernel.args, there, slots, starts, of_experts, rank)
        slots_launch.point_to_split(kernel.args, split.shares, split.heads, split.before)
        self._run(kernel, blocks)
        return slots.cpu()


def require_same(found: BatchSplit, want: BatchSplit) -> None:
    """All numbers that mean something are equal."""
    num_shares = len(want.shares)
    for name in ("summary", "slot_experts", "before", "heads"):
        assert torch.equal(getattr(found, name).cpu(), getattr(want, name)), name
    assert torch.equal(found.shares[:num_shares].cpu(), want.shares)


def check(splitting: Splitting, batch: Batch, rank: int) -> BatchSplit:
    """By the kernel as by Python."""
    table = table_of(batch, rank)
    want = table.split(torch.from_numpy(batch.counts), batch.rows_per_pull, batch.always)
    found = splitting.split(table, batch.counts, rank, batch.rows_per_pull, batch.always)
    require_same(found, want)
    return found


def splitting_of(batch: Batch) -> Splitting:
    return Splitting(*batch.counts.shape, len(batch.table[0]))


def default_table(num_ranks: int, num_experts: int, spare: int) -> Table:
    """Experts in their order, before empty slots."""
    local = num_experts // num_ranks
    return [[*range(rank * local, (rank + 1) * local), *[-1] * spare] for rank in range(num_ranks)]


def ids_of(counts: Sequence[int], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Routes of one source in a drawn order, among places that are not used."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.as_tensor(counts))
    ids = torch.cat([ids, torch.full((1 + len(ids) // 8,), -1)])
    return ids[torch.randperm(len(ids), generator=generator)][:, None].to(dtype)


def without_some_slots(batch: Batch, seed: int) -> Batch:
    """The same while experts are on their way to about half of the empty slots."""
    generator = np.random.default_rng(seed)
    table = [[TAKEN if each < 0 and generator.random() < 0.5 else each for each in row] for row in batch.table]
    return batch._replace(table=table, always=True)


def check_taken(splitting: Splitting, draws: int) -> int:
    """Nothing is filled but what is empty. Returns: how many taken slots there were in batches that were split."""
    count = 0
    for seed in range(draws):
        batch = without_some_slots(drawn_batch(seed, (4, 8, 2)), seed)
        found, before = check(splitting, batch, seed % 4), np.array(flattened(batch.table, batch.masked))
        now, taken = found.slot_experts.cpu().numpy(), before == TAKEN
        assert (now[taken] == -1).all()
        assert (now == before)[before >= 0].all()
        assert not set(np.flatnonzero(taken)) & set(found.shares[: int(found.summary[3]), 2].tolist())
        count += int(taken.sum()) * (int(found.summary[3]) > 0)
    return count


def check_slots(splitting: Splitting, seed: int, dtype: torch.dtype) -> int:
    """Two sources find their own routes' slots in what the kernel left. Returns: shares of the slot with most."""
    batch, most = drawn_batch(seed, (4, 8, 2)), 0
    counts = batch.counts * 8
    counts[0, seed % 8] += 900
    for rank in {0, 3} - {*batch.masked}:
        table = table_of(batch, rank)
        split = splitting.split(table, counts, rank, 0, True)
        want = table.split(torch.from_numpy(counts), 0, True)
        require_same(split, want)
        ids = ids_of(counts[rank].tolist(), seed, dtype)
        slots = table.slots_of_routes(ids, None, want)
        assert torch.equal(splitting.slots_of_routes(table, ids, rank, split), slots)
        most = max(most, *torch.bincount(want.shares[:, 0].long()).tolist(), 0)
    return most


def test_too_many_slots() -> None:
    """Counts of all slots lie in the shared memory of one block."""
    require_room(8, 1800)
    with pytest.raises(InvalidArgument, match=r"is 1820, .* 8 ranks is split over at most 1815 slots"):
        SplitBatchVariant(8, 256, 1820).spec()
    require_room(8, 1815)
    with pytest.raises(InvalidArgument, match="num_ranks is 65"):
        require_room(65, 1)
    require_room_to_split(torch.device("cpu"), 65, 4000)
    with pytest.raises(InvalidArgument, match="slots_per_rank is 4000"):
        require_room_to_split(torch.device("cuda"), 8, 4000)


def test_chains() -> None:
    """The shares of a slot follow each other by their first routes, each up to the next."""
    batch = Batch(np.array([[9, 0, 0], [0, 1, 1], [0, 0, 1]]), default_table(3, 3, 1), (), False, 0)
    split = table_of(batch, 1).split(torch.from_numpy(batch.counts), 0, False)
    assert split.shares.tolist() == [[0, 6, 3, -1], [0, 4, 5, 0]]
    assert split.heads.tolist() == [1, -1, -1, -1, -1, -1]
    assert split.before.tolist() == [9, 0, 0, 0, 0, 0]
    assert split.summary.tolist() == [9, 4, 2, 2]
    ids = torch.zeros(9, 1, dtype=torch.int64)
    slots = table_of(batch, 0).slots_of_routes(ids, None, split._replace(before=torch.zeros(6, dtype=INT32)))
    assert slots.flatten().tolist() == [0] * 4 + [5] * 2 + [3] * 3


@pytest.mark.skipif(emulator.CXX is None, reason="no g++")
def test_on_the_emulator() -> None:
    """Some of the tests below, wherever this runs."""
    splitting = Splitting(4, 8, 4, emulated=True)
    for seed in range(24):
        check(splitting, drawn_batch(seed, (4, 8, 2)), seed % 4)
    assert max(check_slots(splitting, seed, torch.int64) for seed in range(3)) > 1
    assert check_taken(splitting, 12) > 3


class TestKernel:
    pytestmark = needs_one_gpu

    def test_taken_slots(self) -> None:
        """Experts are on their way to some of the empty slots."""
        assert check_taken(Splitting(4, 8, 4), 40) > 10

    @pytest.mark.parametrize(("sizes", "draws"), DRAWN)
    def test_drawn(self, sizes: tuple[int, int, int], draws: int) -> None:
        """Placements with and without replicas, masked ranks, sources without routes, splits that do not pay."""
        splitting = Splitting(sizes[0], sizes[1], sizes[1] // sizes[0] + sizes[2])
        split = 0
        for seed in range(draws):
            batch = drawn_batch(seed, sizes)
            found = check(splitting, batch, seed % sizes[0])
            split += int(found.summary[3]) > 0
        assert split > 0 or sizes[0] == 1 or sizes[2] == 0, "some are split"

    @pytest.mark.parametrize("skew", [0.0, 0.3, 1.0, 3.0])
    def test_256_experts(self, skew: float) -> None:
        """As large models have them, from even counts to few experts with all routes."""
        generator = np.random.default_rng(int(10 * skew))
        popularity = np.exp(skew * generator.standard_normal(256))
        counts = np.stack([generator.multinomial(8 * 4096, popularity / popularity.sum()) for _ in range(8)])
        batch = Batch(counts, default_table(8, 256, 2), (), False, 0)
        found = check(splitting_of(batch), batch, 5)
        assert int(found.summary[3]) > 0

    @pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
    def test_all_to_one_expert(self, num_ranks: int) -> None:
        """Every rank computes it. Of sources, one alone has routes, and all have some."""
        for alone in (True, False):
            counts = np.zeros((num_ranks, num_ranks), dtype=np.int64)
            counts[: 1 if alone else num_ranks, -1] = 640
            batch = Batch(counts, default_table(num_ranks, num_ranks, 1), (), False, 0)
            found = check(splitting_of(batch), batch, num_ranks - 1)
            assert found.summary[3] == num_ranks - 1
            assert found.summary[1] == -(-int(counts.sum()) // num_ranks)

    @pytest.mark.parametrize(("rows_per_pull", "always", "shares"), [(4, False, 1), (5, False, 0), (5, True, 1)])
    def test_whether_it_pays(self, rows_per_pull: int, always: bool, shares: int) -> None:
        """Four routes for one pull: at a threshold of four it pays, and not above. What was split is taken back."""
        counts = np.array([[4, 1, 1, 0], [3, 2, 0, 1]])
        batch = Batch(counts, [[0, 1, -1], [2, 3, -1]], (), always, rows_per_pull)
        assert check(splitting_of(batch), batch, 1).summary[3] == shares

    def test_products_of_thresholds(self) -> None:
        """The least gain is more than 32 bits: two pulls of 2^31 - 1 rows each."""
        counts = np.array([[50, 50, 50, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
        batch = Batch(counts, [[0, 1, 2, -1, -1], [3, 4, 5, -1, -1]], (), False, 2**31 - 1)
        assert check(splitting_of(batch), batch, 0).summary.tolist() == [150, 150, 0, 0]

    def test_out_of_slots(self) -> None:
        """A helper without an empty slot is passed over, and one with too few gets less."""
        none = Batch(np.array([[6, 6, 0, 0], [0, 0, 0, 0]]), [[0, 1], [2, 3]], (), True, 0)
        assert check(splitting_of(none), none, 0).summary.tolist() == [12, 12, 0, 0]
        few = Batch(np.array([[2, 2, 2, 0, 0, 0], [0] * 6]), [[0, 1, 2, -1], [3, 4, 5, -1]], (), False, 0)
        assert check(splitting_of(few), few, 0).summary.tolist() == [6, 4, 1, 1]

    def test_two_slots_of_one_expert(self) -> None:
        """A giver has an expert several times: its helper pulls it once, and routes of all slots go there."""
        counts = np.array([[14, 0], [16, 0]])
        batch = Batch(counts, [[0, 0, 0], [1, -1, -1]], (), False, 0)
        found = check(splitting_of(batch), batch, 1)
        assert found.summary.tolist() == [30, 15, 1, 2]
        assert found.shares[:2, 2].tolist() == [4, 4]

    def test_most_ranks_are_masked(self) -> None:
        """One is left, or two are."""
        for masked in ((1, 2, 3), (0, 3)):
            counts = np.arange(32).reshape(4, 8)
            counts[list(masked)] = 0
            batch = Batch(counts, default_table(4, 8, 1), masked, True, 0)
            check(splitting_of(batch), batch, 1)

    def test_what_was_written_last_counts(self) -> None:
        """One kernel, with one set of arguments, follows a table that changes in place, as in a graph's replay."""
        first, second = (drawn_batch(seed, (4, 8, 2)) for seed in (3, 8))
        second = second._replace(masked=(2,), counts=first.counts)
        second.counts[2] = 0
        table, splitting = table_of(first, 1, DEVICE), splitting_of(first)
        for batch in (first, second, first):
            table.write(slots_by_expert(batch.table, batch.masked, 8), batch.masked)
            found = splitting.split(table, batch.counts, 1, 0, True)
            require_same(found, table_of(batch, 1).split(torch.from_numpy(batch.counts), 0, True))

    @pytest.mark.parametrize("dtype", [INT32, torch.int64], ids=str)
    def test_slots_of_routes(self, dtype: torch.dtype) -> None:
        """Several blocks, and slots with several shares."""
        splitting = Splitting(4, 8, 4)
        assert max(check_slots(splitting, seed, dtype) for seed in range(6)) > 1

    def test_slots_without_shares(self) -> None:
        """Where nothing is split, routes stay where the placement has them, with replicas and without."""
        for table_now in (default_table(2, 4, 1), [[0, 1, 3], [2, 3, -1]]):
            batch = Batch(np.full((2, 4), 3), table_now, (), False, 100)
            table = table_of(batch, 1)
            splitting = splitting_of(batch)
            split = splitting.split(table, batch.counts, 1, 100, False)
            ids = ids_of([3] * 4, 5, torch.int64)
            assert torch.equal(splitting.slots_of_routes(table, ids, 1, split), table.slots_of_routes(ids))


@pytest.mark.skipif(EMULATED, reason="tensors of the emulator are the CPU's")
class TestTable:
    """All of it as callers have it."""

    pytestmark = needs_one_gpu

    def test_in_a_graph(self) -> None:
        """Nobody waits for the GPU, and what was written last counts."""
        first, second = (drawn_batch(seed, (4, 8, 2)) for seed in (3, 8))
        second = second._replace(masked=(2,), counts=first.counts)
        second.counts[2] = 0
        table = table_of(first, 1, DEVICE)
        counts = torch.from_numpy(first.counts).to(DEVICE, INT32)
        ids = ids_of(first.counts[1].tolist(), 1, torch.int64)
        there = ids.to(DEVICE)

        def call() -> tuple[BatchSplit, torch.Tensor]:
            split = table.split(counts, 0, True)
            return split, table.slots_of_routes(there, None, split)

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, slots = call()
        for batch in (first, second, first):
            table.write(slots_by_expert(batch.table, batch.masked, 8), batch.masked)
            graph.replay()
            torch.cuda.synchronize()
            here = table_of(batch, 1)
            want = here.split(torch.from_numpy(batch.counts), 0, True)
            require_same(found, want)
            assert torch.equal(slots.cpu(), here.slots_of_routes(ids, None, want))
