"""Row maps: pure functions of one rank, against small examples written out."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import BF16, EXAMPLE, FP8, FP32, FP64
from tokenloom.ops import routing
from tokenloom.plan import Plan

CPU = torch.device("cpu")
# Two ranks, four experts: rank 0 of the example in cases.py.
PLAN = EXAMPLE.problem.plan
SEND = routing.send_map(EXAMPLE.problem.topk_ids[0], PLAN)
# What rank 0 of the example receives: rows (0, 0), (0, 1), (1, 0).
RECEIVED_IDS = torch.tensor(EXAMPLE.token_ids[0], dtype=torch.int32)


def test_send_map() -> None:
    """Rows sorted by rank, then token; token 1 goes once to rank 0 although it has two routes there."""
    assert SEND.tokens.tolist() == [0, 1, 0, 2]
    assert SEND.rows_per_rank.tolist() == [2, 2]
    assert SEND.local_ids.tolist() == [[-1, 0], [1, 1], [1, -1], [-1, 0]]
    assert SEND.local_ids.dtype == torch.int32
    assert SEND.mask.tolist() == [[False, True], [True, True], [True, False], [False, True]]
    assert SEND.routes_per_expert.tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_send_map_of_nothing(dtype: torch.dtype) -> None:
    """No tokens, and tokens without routes: no rows, but all counts are there."""
    for ids in (torch.empty(0, 2, dtype=dtype), torch.full((3, 2), -1, dtype=dtype)):
        send = routing.send_map(ids, PLAN)
        assert len(send.tokens) == 0
        assert send.rows_per_rank.tolist() == [0, 0]
        assert send.routes_per_expert.tolist() == [0, 0, 0, 0]
        assert send.local_ids.shape == send.mask.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ranks_of_ids(dtype: torch.dtype) -> None:
    """Ids that no rank has are no routes, be they negative or too big."""
    ids = torch.tensor([[0, 3], [-1, 4], [2, 1 << 30], [-7, 1]], dtype=dtype)
    goes_to = [[True, True], [False, False], [False, True], [True, False]]
    assert routing.ranks_of_ids(ids, 2, 2).tolist() == goes_to
    assert routing.ranks_of_ids(ids[:0], 2, 2).shape == (0, 2)


def test_home_positions() -> None:
    """Where what comes home lies: by (token, rank) and by (token, k), in the order that rows were sent."""
    assert routing.home_positions_per_rank(SEND, 3, 2).tolist() == [[0, 2], [1, -1], [-1, 3]]
    # Routes in the order (row, k): (0, k1), (1, k0), (1, k1), (0, k0), (2, k1)
    assert routing.home_positions_per_route(SEND, 3, 2).tolist() == [[3, 0], [1, 2], [-1, 4]]


def test_place_by_token() -> None:
    """The order of arrival."""
    place = routing.place_by_token([2, 1], [2, 2], CPU)
    assert place.positions.tolist() == [[0], [1], [2]]
    assert (place.num_places, place.num_rows, place.source_counts) == (3, 3, [2, 1])


def test_place_by_rank() -> None:
    """Source 1 starts at place M = 3."""
    place = routing.place_by_rank([2, 1], [2, 2], 3, CPU)
    assert place.positions.tolist() == [[0], [1], [3]]
    assert (place.num_places, place.num_rows) == (6, 3)


@pytest.mark.parametrize(
    ("alignment", "positions", "offsets"),
    [
        pytest.param(1, [[-1, 0], [2, 3], [1, -1]], [0, 2, 4], id="no padding"),
        pytest.param(4, [[-1, 0], [4, 5], [1, -1]], [0, 4, 8], id="groups of 4"),
    ],
)
def test_place_by_expert(alignment: int, positions: list[list[int]], offsets: list[int]) -> None:
    """Expert 0 takes (0, 0, k1), (1, 0, k0); expert 1 takes (0, 1, k0), (0, 1, k1)."""
    place = routing.place_by_expert([2, 1], [2, 2], alignment, RECEIVED_IDS)
    assert place.positions.tolist() == positions
    assert place.offsets == offsets
    assert place.num_places == place.num_rows == offsets[-1]


@pytest.mark.parametrize(
    ("slots", "positions", "ranges", "dropped"),
    [
        pytest.param(3, [[-1, 0], [3, 4], [1, -1]], [[(0, 1), (1, 1)], [(0, 2), (2, 0)]], None, id="room"),
        pytest.param(
            1, [[-1, 0], [1, -1], [-1, -1]], [[(0, 1), (1, 0)], [(0, 1), (1, 0)]], [False, True, True], id="too few"
        ),
    ],
)
def test_place_in_slots(
    slots: int, positions: list[list[int]], ranges: list[list[tuple[int, int]]], dropped: list[bool] | None
) -> None:
    """As layout expert, with expert 1 behind the slots of expert 0."""
    place = routing.place_in_slots([2, 1], [[1, 2], [1, 0]], slots, RECEIVED_IDS)
    assert place.positions.tolist() == positions
    assert place.slot_ranges == ranges
    assert (None if place.dropped is None else place.dropped.tolist()) == dropped
    assert place.expert_counts == [min(2, slots)] * 2
    assert (place.num_places, place.num_rows, place.offsets) == (2 * slots, 2 * min(2, slots), None)


def test_empty_expert_has_no_rows() -> None:
    """Whatever the alignment."""
    place = routing.place_by_expert([1], [0, 1, 0], 4, torch.tensor([[1]], dtype=torch.int32))
    assert place.offsets == [0, 0, 4, 4]
    assert place.positions.tolist() == [[0]]


def test_fit_capacity_leaves_room() -> None:
    """More capacity than rows: only the number of places changes."""
    place = routing.fit_capacity(routing.place_by_token([2, 1], [2, 2], CPU), 5)
    assert (place.num_places, place.num_rows, place.source_counts, place.dropped) == (5, 3, [2, 1], None)


def test_fit_capacity_by_token() -> None:
    """Row 2, the only one of source 1, does not fit; the routes that arrived still count."""
    place = routing.fit_capacity(routing.place_by_token([2, 1], [2, 2], CPU), 2)
    assert place.positions.tolist() == [[0], [1], [-1]]
    assert (place.num_places, place.num_rows, place.source_counts) == (2, 2, [2, 0])
    assert place.dropped is not None
    assert place.dropped.tolist() == [False, False, True]


def test_fit_capacity_by_expert() -> None:
    """Capacity 5 of 8: one route of expert 1 fits; its row is dropped as a whole, and offsets stay inside."""
    place = routing.fit_capacity(routing.place_by_expert([2, 1], [2, 2], 4, RECEIVED_IDS), 5)
    assert place.positions.tolist() == [[-1, 0], [4, -1], [1, -1]]
    assert place.offsets == [0, 4, 5]
    assert place.expert_counts == [2, 1]
    assert (place.num_places, place.num_rows) == (5, 5)
    assert place.dropped is not None
    assert place.dropped.tolist() == [False, True, False]


def test_ordered_sum() -> None:
    """Columns from left to right, each addition by itself: (big + 1) - big is 0, (big - big) + 1 is 1."""
    big = 2.0**30
    rows = torch.tensor([[big], [1.0], [-big], [-0.0]])
    positions = torch.tensor([[0, 1, 2], [0, 2, 1], [-1, 3, -1], [-1, -1, -1]])
    out = routing.ordered_sum(rows, positions, dtype=FP32)
    assert out.flatten().tolist() == [0.0, 1.0, -0.0, 0.0]
    assert out.signbit().flatten().tolist() == [False, False, True, False]


def test_ordered_sum_with_weights() -> None:
    """A product is rounded by itself: x * x - fl(x * x) is 0 and not the lost bit."""
    x = 1 + 2.0**-12
    rows = torch.tensor([[x], [x * x]])
    weights = torch.tensor([[-1.0, x], [x, torch.nan]])
    out = routing.ordered_sum(rows, torch.tensor([[1, 0], [0, -1]]), weights, dtype=FP32)
    assert out.tolist() == [[0.0], [torch.tensor(x * x).item()]]


def test_ordered_sum_dtypes() -> None:
    """bfloat16 rows are summed in float32, and float64 rows in float64."""
    rows = torch.tensor([[1.0], [2.0**-8]], dtype=BF16)
    positions = torch.tensor([[0, 1]])
    assert routing.ordered_sum(rows, positions, dtype=FP32).item() == 1 + 2.0**-8
    rows = torch.tensor([[1.0], [2.0**-40]], dtype=FP64)
    assert routing.ordered_sum(rows, positions, dtype=FP64).item() == 1 + 2.0**-40


def test_sum_of_nothing() -> None:
    """No tokens, and tokens but no rows."""
    empty = torch.empty(0, 3)
    assert routing.ordered_sum(empty, torch.empty(0, 2, dtype=torch.int64), dtype=FP32).shape == (0, 3)
    out = routing.ordered_sum(empty, torch.full((2, 2), -1), dtype=FP32)
    assert out.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("hidden", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("dtype", [FP8, BF16, FP32, FP64])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_rows_of_any_width_and_alignment(dtype: torch.dtype, hidden: int, offset: int) -> None:
    """Rows move as the widest words that fit; none may be read or written beyond its ends."""
    num_rows, size = 5, dtype.itemsize
    storage = torch.arange((offset + num_rows * hidden) * size, dtype=torch.int32).to(torch.uint8).view(dtype)
    rows = storage[offset:].view(num_rows, hidden)
    raw = rows.view(torch.uint8)
    index = torch.tensor([3, 3, 0])
    gathered = routing.gather_rows(rows, index)
    assert gathered.dtype == dtype
    assert torch.equal(gathered.view(torch.uint8), raw[index])
    scattered = routing.scatter_rows(rows[:2], torch.tensor([[0, 3], [-1, 1]]), 5).view(torch.uint8)
    assert torch.equal(scattered[[0, 3, 1]], raw[[0, 0, 1]])
    assert not scattered[[2, 4]].any(), "places that nobody names are zero"


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (0, 1)])
def test_rows_of_any_strides(shape: tuple[int, int]) -> None:
    """None or one of anything counts as contiguous, with strides that cannot be viewed as another dtype."""
    for rows in (torch.ones(()).expand(shape), torch.ones(4, 4).t()[: shape[0], : shape[1]]):
        assert rows.is_contiguous()
        assert routing.packed(rows).view(torch.uint8).shape == (shape[0], shape[1] * 4)
        assert torch.equal(routing.gather_rows(rows, torch.arange(shape[0])), rows)


def test_terms() -> None:
    """The i-th term of every row, skipping -1."""
    found = routing.terms(torch.tensor([[5, -1, 7], [-1, -1, 9], [-1, -1, -1]]))
    assert [[each.tolist() for each in term] for term in found] == [[[0, 1], [0, 2], [5, 9]], [[0], [2], [7]]]


def test_maps_of_several_sources() -> None:
    """A larger draw: send maps of all ranks, placed on the receiver in the order (source, token, k)."""
    plan = Plan(num_ranks=3, num_experts=6, hidden=1, top_k=4, max_tokens_per_rank=10)
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(-1, 6, (n, 4), generator=generator) for n in (10, 0, 7)]
    sends = [routing.send_map(each, plan) for each in ids]
    for rank in range(3):
        received = [send.local_ids[_rows_for(send, rank)] for send in sends]
        counts = [len(each) for each in received]
        local_ids = torch.cat(received)
        experts = [int((local_ids == e).sum()) for e in range(2)]
        place = routing.place_by_expert(counts, experts, 2, local_ids)
        assert place.offsets is not None
        for e in range(2):
            group = [(row, k) for row in range(len(local_ids)) for k in range(4) if local_ids[row, k] == e]
            places = [place.positions[row, k].item() for row, k in group]
            assert places == list(range(place.offsets[e], place.offsets[e] + len(group)))


def _rows_for(send: routing.SendMap, rank: int) -> slice:
    ends = [0, *send.rows_per_rank.cumsum(0).tolist()]
    return slice(ends[rank], ends[rank + 1])
