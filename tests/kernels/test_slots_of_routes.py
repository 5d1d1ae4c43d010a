"""The slot of each route: the kernel, on a GPU or without one, and torch's form, against the reference's loops."""

from __future__ import annotations

import pytest
import torch

import tokenloom as tl
from tests.kernels.one_gpu import DEVICE, make_kernel, needs_one_gpu, run
from tests.support.placements import drawn_placement
from tokenloom import reference
from tokenloom.kernels.slots_of_routes.launch import THREADS, SlotsOfRoutesVariant, point
from tokenloom.ops.slots_of_routes import SlotTable
from tokenloom.plan import Plan

EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""
INT32, INT64 = torch.int32, torch.int64
Case = tuple[int, int, int, int, float, torch.dtype]
"""Ranks, experts of a rank, tokens, K, share of -1, dtype of ids."""
CASES = [
    pytest.param((4, 2, 3, 2, 0.2, INT64), id="few"),
    pytest.param((1, 1, 0, 1, 0.0, INT32), id="one expert"),
    pytest.param((4, 64, 40, 8, 0.1, INT32), id="several blocks, whose last is not full"),
    pytest.param((2, 16, THREADS // 8, 8, 0.0, INT64), id="one block, full"),
]
MORE = [
    pytest.param((8, 32, 1024, 8, 0.1, INT64), id="8 blocks"),
    pytest.param((8, 375, 300, 8, 0.0, INT32), id="3,000 experts"),
    pytest.param((2, 4, 2200, 8, 0.0, INT32), id="more before a block than its threads load at once"),
]


def make(case: Case, masked: tuple[int, ...]) -> tuple[SlotTable, int, torch.Tensor, torch.Tensor]:
    """A table, the rank that it is for, ids of which half are of one expert, and the reference's slots."""
    num_ranks, local, tokens, top_k, unused, dtype = case
    plan = Plan(num_ranks, num_ranks * local, 8, top_k, max(1, tokens))
    placement, rank = drawn_placement(plan, 2), num_ranks - 1
    table = SlotTable(plan.num_experts, num_ranks, local + 2, rank, torch.device("cpu"))
    per_rank = placement.slots_per_rank
    slots = [[r * per_rank + s for r, s in placement.slots_of(e) if r not in masked] for e in range(plan.num_experts)]
    table.write(slots, masked)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, plan.num_experts, (tokens, top_k), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.5] = plan.num_experts - 1
    ids = torch.where(torch.rand(ids.shape, generator=generator) < unused, -1, ids).to(dtype)
    _, (*_, want) = reference.place(plan, [ids[:0]] * rank + [ids], placement.to_tensor().tolist(), masked)
    return table, rank, ids, want.to(INT32)


each_mask = pytest.mark.parametrize("masked", [(), (0,)], ids=["all", "without a rank"])


@each_mask
@pytest.mark.parametrize("case", CASES)
def test_by_torch(case: Case, masked: tuple[int, ...]) -> None:
    """Without a rank, experts lose replicas, or all slots."""
    table, _, ids, want = make(case, masked)
    found = table.slots_of_routes(ids)
    assert found.dtype == INT32
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
def test_ids_of_no_expert(dtype: torch.dtype) -> None:
    """Ids that nobody has checked are no addresses."""
    table, *_ = make((2, 2, 0, 2, 0.0, dtype), ())
    ids = torch.tensor([[4, -2], [2**31 - 1, -(2**31)]], dtype=dtype)
    assert table.slots_of_routes(ids).tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("seed", range(12))
def test_by_a_split(seed: int) -> None:
    """Each source finds the slots of its own routes, from counts that all know."""
    plan = Plan(4, 8, 8, 3, 40)
    masked = (2,) if seed % 3 == 2 else ()
    placement = drawn_placement(plan, 2, seed) if seed % 2 else tl.Placement.default(8, 4, 4)
    rows = placement.to_tensor().tolist()
    generator = torch.Generator().manual_seed(seed)
    ids = []
    for rank in range(4):
        tokens = 0 if rank in masked else int(torch.randint(0, 40, (), generator=generator))
        drawn = torch.randint(-1, 8, (tokens, 3), generator=generator)
        ids.append(torch.where(torch.rand(drawn.shape, generator=generator) < 0.4, 7, drawn))
    slots, by_slot = reference.place(plan, ids, rows, masked)
    want, batch = reference.split(slots, by_slot, rows, masked)
    counts = torch.stack([torch.bincount(each[each >= 0], minlength=8) for each in ids])
    for rank in range(4):
        table = SlotTable(8, 4, placement.slots_per_rank, rank, torch.device("cpu"))
        table.write(placement.slot_ids(without=masked), masked)
        split = table.split(counts, 0, False)
        assert torch.equal(table.slots_of_routes(ids[rank], None, split), want[rank].to(INT32))
        assert split.slot_experts.tolist() == [-1 if r in masked else e for r, its in enumerate(batch) for e in its]


class TestKernel:
    pytestmark = needs_one_gpu

    @each_mask
    @pytest.mark.parametrize("case", [*CASES, *MORE])
    def test_slots(self, case: Case, masked: tuple[int, ...]) -> None:
        """Blocks count what lies before them, warps take turns, and ids out of range are none."""
        table, rank, ids, want = make(case, masked)
        bad = ids.clone().flatten()
        bad[::97] = case[0] * case[1] + 5
        bad = bad.view(ids.shape)
        for given, wanted in ((ids, want), (bad, table.slots_of_routes(bad))):
            kernel = make_kernel(SlotsOfRoutesVariant(case[0] * case[1]).spec())
            there, slots = given.to(DEVICE), torch.full(given.shape, 7, dtype=INT32, device=DEVICE)
            starts, of_experts = table.starts.to(DEVICE), table.slots.to(DEVICE)
            blocks = point(kernel.args, there, slots, starts, of_experts, rank)
            assert blocks == -(-ids.numel() // THREADS)
            if blocks:
                run(kernel, blocks)
            assert torch.equal(slots.cpu(), wanted)
