"""What a call leaves that was refused, or in which a wait expired: NaN, and counts that nobody addresses anything by.

One GPU is rank 0 of two. The other rank is silent, so that deadlines can be short and nothing has to be killed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.one_gpu import DEVICE, LONG_S, SHORT_S, needs_one_gpu
from tests.kernels.silent_peer import BLOCKS, OPTIONS_HASH, Rank0, error_of, int32
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.combine.launch import CombineVariant, max_chunks
from tokenloom.kernels.common import H200, MAX_BLOCKS, TURN_WORDS, block_count_words
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import Plan
from tokenloom.runtime.kernel_reports import PHASES, CallOutcome

pytestmark = needs_one_gpu
EMULATED = True
"""These tests can run without a GPU, behind tests/support/emulator/plugin.py."""

PLAN = Plan(num_ranks=2, num_experts=4, hidden=256, top_k=2, max_tokens_per_rank=64)
NUM_TOKENS, NUM_LOCAL = 40, 10
"""Tokens of rank 0, and how many of them, the first, have their experts on rank 0 itself."""
OLD = 7.0
"""What lies in outputs before the call."""
BF16 = torch.bfloat16
STATUS = 5


class Combine:
    """A combine of layout "token": rows of the first tokens are here, those of the others come from rank 1."""

    def __init__(self, rank0: Rank0) -> None:
        self.rank0 = rank0
        self.y = torch.randn(NUM_LOCAL, PLAN.hidden, device=DEVICE, dtype=BF16)
        self.theirs = torch.randn(NUM_TOKENS - NUM_LOCAL, PLAN.hidden, device=DEVICE, dtype=BF16)
        self.out = torch.full((NUM_TOKENS, PLAN.hidden), OLD, device=DEVICE, dtype=BF16)
        self.slots = int32([[t, -1] if t < NUM_LOCAL else [-1, t - NUM_LOCAL] for t in range(NUM_TOKENS)])
        self.all_counts = int32([[NUM_LOCAL, NUM_TOKENS - NUM_LOCAL, 0, 0, 0, 0], [0] * 6])
        self.ids = int32([[0, -1]] * NUM_TOKENS)
        self.recv = [rank0.bytes(2 * PLAN.hidden * 2 * PLAN.max_tokens_per_rank) for _ in range(2)]
        variant = CombineVariant(PLAN, layout="token", y_dtype=BF16, wire_dtype=BF16, out_dtype=BF16)
        self.kernel = rank0.kernel(variant)
        args = self.kernel.args
        args.y, args.out, args.slots = self.y.data_ptr(), self.out.data_ptr(), self.slots.data_ptr()
        args.all_counts, args.topk_ids = self.all_counts.data_ptr(), self.ids.data_ptr()
        args.chunk_flags = rank0.layout.offset("chunk_flags")
        args.peers, args.combine_recv = rank0.addresses(self.recv), 0
        args.num_tokens, args.max_tokens, args.capacity = NUM_TOKENS, PLAN.max_tokens_per_rank, NUM_LOCAL
        args.max_chunks, args.combine_turns = max_chunks(PLAN), 1
        args.push_blocks = variant.sending_blocks(BLOCKS, H200)

    def send_by_rank_1(self) -> None:
        """Its rows, behind this rank's own, and their signals: a chunk each, since they are few."""
        rows = self.recv[0].view(BF16).view(-1, PLAN.hidden)
        rows[NUM_LOCAL:NUM_TOKENS] = self.theirs
        first = max_chunks(PLAN)
        self.rank0.words("chunk_flags")[first : first + len(self.theirs)] = self.rank0.epoch

    def run(self) -> torch.Tensor:
        self.rank0.run(self.kernel)
        return self.out


class Dispatch:
    """A dispatch whose tokens stay here, and which receives some rows of rank 1: all for local expert 0.

    Args:
        parts: of the kernels that it consists of, as DispatchVariant has them.
    """

    THEIRS = 3

    def __init__(self, rank0: Rank0, layout: str, parts: tuple[str, ...] = ("whole",)) -> None:
        self.rank0, self.layout, self.outcomes = rank0, layout, list[CallOutcome | None]()
        self.x = torch.randn(NUM_LOCAL, PLAN.hidden, device=DEVICE, dtype=BF16)
        self.ids = int32([[0, -1]] * NUM_LOCAL)
        rows = PLAN.worst_case_rows("token")
        sizes = {
            "rows": PLAN.hidden * 2 * rows * PLAN.top_k,
            "row_ids": 4 * rows * PLAN.top_k,
            "row_places": 4 * rows * PLAN.top_k,
            "row_tokens": 4 * rows,
        }
        self.offsets = {name: sum(list(sizes.values())[:index]) for index, name in enumerate(sizes)}
        self.data = [rank0.bytes(sum(sizes.values())) for _ in range(2)]
        local = PLAN.experts_per_rank
        self.counts = int32([99] * (1 + PLAN.num_ranks + local + local + 1))
        self.all_counts = int32([99] * PLAN.num_ranks * (PLAN.num_ranks + PLAN.num_experts))
        self.slots = int32([99] * NUM_LOCAL * (PLAN.num_ranks + PLAN.top_k))
        self.slot_ranges = int32([99] * 2 * PLAN.num_experts)
        self.block_counts = int32([0] * block_count_words(PLAN))
        self.half_epoch = int32([0] * TURN_WORDS)
        self.peers = rank0.addresses(self.data)
        self.kernels = [self._kernel(layout, part, rows) for part in parts]

    def _kernel(self, layout: str, part: str, rows: int) -> Any:
        rank0, local = self.rank0, PLAN.experts_per_rank
        variant = DispatchVariant(PLAN, layout=layout, x_dtype=BF16, part=part)
        kernel = rank0.kernel(variant, self.half_epoch)
        args = kernel.args
        args.x, args.topk_ids = self.x.data_ptr(), self.ids.data_ptr()
        args.done_flags, args.row_flags = (rank0.layout.offset(name) for name in ("done_flags", "row_flags"))
        args.peers = self.peers
        for name, offset in self.offsets.items():
            setattr(args, name, offset)
        args.block_counts = self.block_counts.data_ptr()
        args.call.block_flags = args.block_counts
        args.slots, args.all_counts = self.slots.data_ptr(), self.all_counts.data_ptr()
        args.num_rows = self.counts.data_ptr()
        args.source_counts = args.num_rows + 4
        args.expert_counts = args.source_counts + 4 * PLAN.num_ranks
        args.expert_offsets = args.expert_counts + 4 * local
        args.slot_ranges = self.slot_ranges.data_ptr()
        args.num_tokens, args.max_tokens = NUM_LOCAL, PLAN.max_tokens_per_rank
        args.capacity, args.alignment, args.send_blocks = rows, 1, BLOCKS
        args.peer_blocks = variant.sending_blocks(BLOCKS, H200)
        return kernel

    def open_by_rank_1(self, **header: int) -> None:
        self.rank0.open_by_rank_1([self.THEIRS, 0, self.THEIRS, 0, 0, 0], **header)

    def send_by_rank_1(self) -> None:
        """All signals of its blocks, and of its rows, which have one place each."""
        self.rank0.words("done_flags")[MAX_BLOCKS : MAX_BLOCKS + BLOCKS] = self.rank0.epoch
        self.rank0.words("row_flags")[NUM_LOCAL : NUM_LOCAL + self.THEIRS] = self.rank0.epoch
        first = self.offsets["row_places"]
        places = self.data[0][first : first + 4 * PLAN.top_k * PLAN.worst_case_rows("token")].view(torch.int32)
        places.view(-1, PLAN.top_k)[NUM_LOCAL : NUM_LOCAL + self.THEIRS] = int32(
            [[NUM_LOCAL + i, -1] for i in range(self.THEIRS)]
        )

    def run(self) -> tuple[int, list[int]]:
        """(rows, rows of each source)."""
        for kernel in self.kernels:
            self.outcomes.append(self.rank0.run(kernel, opens=kernel is self.kernels[0]))
        return self.found()

    def found(self) -> tuple[int, list[int]]:
        counts = self.counts.tolist()
        return counts[0], counts[1:3]

    def check_nothing(self) -> None:
        """Counts are 0 and slots -1, whatever lay there."""
        assert self.found() == (0, [0, 0])
        assert not self.all_counts.any()
        assert (self.slots == -1).all()
        last = len(self.counts) if self.layout == "expert" else len(self.counts) - PLAN.experts_per_rank - 1
        assert not self.counts[:last].any()
        assert self.layout != "slots" or not self.slot_ranges.any()


def test_a_combine_whose_rows_all_come() -> None:
    """What the other tests leave out makes the difference."""
    rank0 = Rank0(PLAN, "phases")
    call = Combine(rank0)
    rank0.open_by_rank_1([])
    call.send_by_rank_1()
    out = call.run()
    assert torch.equal(out, torch.cat([call.y, call.theirs]))
    assert error_of(rank0) is None


def test_rows_that_never_come_home_make_everything_nan() -> None:
    """Also tokens that were summed before; and so does every later combine of the broken communicator, at once."""
    rank0 = Rank0(PLAN, "phases")
    call = Combine(rank0)
    rank0.open_by_rank_1([])
    assert call.run().isnan().all()
    assert error_of(rank0) == ((1,), PHASES[3])
    call.out.fill_(OLD)
    assert call.run().isnan().all()
    assert rank0.last_run_s < SHORT_S


def test_a_rank_that_does_not_open_has_a_deadline_of_its_own() -> None:
    """The deadline of opening, not that of phases, which is a hundred times as long."""
    rank0 = Rank0(PLAN, "open")
    call = Combine(rank0)
    assert call.run().isnan().all()
    assert SHORT_S <= rank0.last_run_s < LONG_S / 2
    assert error_of(rank0) == ((1,), PHASES[1])


@pytest.mark.parametrize(
    ("header", "found"),
    [({"status": STATUS}, (1, STATUS, None)), ({"options_hash": OPTIONS_HASH ^ (1 << 60)}, (None, 0, 1))],
    ids=["fault", "other options"],
)
def test_a_call_that_is_refused(header: dict[str, int], found: tuple[int | None, int, int | None]) -> None:
    """All ranks see it alike, nothing expires, the next call would work. One of the two words of hashes differs."""
    rank0 = Rank0(PLAN, "phases")
    call = Combine(rank0)
    rank0.open_by_rank_1([], **header)
    outcome = rank0.run(call.kernel)
    assert call.out.isnan().all()
    assert outcome is not None
    assert (outcome.faulty_rank, outcome.status, outcome.differing_rank) == found
    assert error_of(rank0) is None


PARTS = {"whole": ("whole",), "halves": ("send", "receive")}
each_parts = pytest.mark.parametrize("parts", PARTS)


@each_parts
@pytest.mark.parametrize("layout", ["token", "expert", "rank", "slots"])
def test_a_dispatch_whose_rows_all_come(layout: str, parts: str) -> None:
    """What the next tests leave out makes the difference."""
    rank0 = Rank0(PLAN, "phases")
    call = Dispatch(rank0, layout, PARTS[parts])
    call.open_by_rank_1()
    call.send_by_rank_1()
    assert call.run() == (NUM_LOCAL + call.THEIRS, [NUM_LOCAL, call.THEIRS])
    rows = call.data[0][: 2 * PLAN.hidden * NUM_LOCAL].view(BF16).view(NUM_LOCAL, -1)
    assert torch.equal(rows, call.x)
    assert error_of(rank0) is None
    assert not any(call.outcomes)


@each_parts
@pytest.mark.parametrize("layout", ["token", "expert", "slots"])
@pytest.mark.parametrize("opens", [True, False], ids=["silent", "absent"])
def test_rows_that_never_arrive_are_none(layout: str, opens: bool, parts: str) -> None:
    """Counts are 0 and slots -1, whatever lay there, so that whoever goes on addresses nothing by them. Rows may come
    as late as the deadline of the half that waits for them; nobody opens after that of the half that sends.
    """
    rank0 = Rank0(PLAN, "phases" if opens else "open")
    call = Dispatch(rank0, layout, PARTS[parts])
    if opens:
        call.open_by_rank_1()
    rank0.run(call.kernels[0])
    if parts == "halves":
        assert (rank0.last_run_s < SHORT_S) is opens
        assert (error_of(rank0) is None) is opens
        rank0.run(call.kernels[1], opens=False)
        assert (rank0.last_run_s < SHORT_S) is not opens
    assert error_of(rank0) == ((1,), PHASES[2 if opens else 1])
    call.check_nothing()


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_a_dispatch_in_halves_that_is_refused(layout: str) -> None:
    """The sending half says so, the other one leaves at once; the next call works."""
    rank0 = Rank0(PLAN, "phases")
    call = Dispatch(rank0, layout, PARTS["halves"])
    call.open_by_rank_1(status=STATUS)
    call.run()
    first, second = call.outcomes
    assert first is not None
    assert (first.faulty_rank, first.status, second) == (1, STATUS, None)
    call.check_nothing()
    call.open_by_rank_1()
    call.send_by_rank_1()
    assert call.run() == (NUM_LOCAL + call.THEIRS, [NUM_LOCAL, call.THEIRS])
    assert error_of(rank0) is None


@pytest.mark.parametrize("opens", [True, False])
def test_a_barrier_says_whether_it_opened(opens: bool) -> None:
    """And clears what it is asked to, in either case."""
    rank0 = Rank0(PLAN, "open")
    opened, cleared = int32([99]), int32([99, 99, 99, 99])
    kernel = rank0.kernel(BarrierVariant(PLAN))
    kernel.args.opened, kernel.args.cleared, kernel.args.num_cleared = opened.data_ptr(), cleared.data_ptr(), 3
    if opens:
        rank0.open_by_rank_1([])
    rank0.run(kernel, blocks=1)
    assert opened.tolist() == [int(opens)]
    assert cleared.tolist() == [0, 0, 0, 99]
    assert error_of(rank0) == (None if opens else ((1,), PHASES[1]))
