"""Backend "nvlink" prepares calls of a kind once: what kernels are told of each call, seen without a GPU.

A kernel that was told where the tensors of an earlier call are would overwrite or read those.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.stand_ins import StandIns, Stream
from tokenloom.backends.handshake import combine_fields, dispatch_fields
from tokenloom.backends.peers.buffers import Loan
from tokenloom.backends.peers.dispatch import MAX_KINDS
from tokenloom.backends.peers.prepared import check
from tokenloom.backends.seam import CombineOptions, DispatchKind, DispatchOptions, RoutedCounts, Tokens
from tokenloom.errors import InvalidArgument
from tokenloom.plan import ROUTE_LAYOUTS, Plan
from tokenloom.runtime.openings import hash_of
from tokenloom.runtime.streams import tensors_in

HIDDEN, TOP_K, NUM_EXPERTS = 256, 2, 8
SMALL, LARGE = 64, 1024
"""Tokens of a rank. In plans of few rows layouts of routes are staged, so that outputs are ordinary tensors."""
BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def make_comm(max_tokens: int, **options: Any) -> tl.Communicator:
    sizes = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
    return tl.Communicator(None, backend="nvlink", device="cpu", **sizes, **options)


class Given:
    """Tensors of one dispatch."""

    def __init__(self, num_tokens: int, ids_dtype: torch.dtype = INT64, weighted: bool = True) -> None:
        self.x = torch.randn(num_tokens, HIDDEN, dtype=BF16)
        self.ids = torch.zeros(num_tokens, TOP_K, dtype=ids_dtype)
        self.weights = torch.rand(num_tokens, TOP_K) if weighted else None

    def dispatch(self, comm: tl.Communicator, layout: str, **options: Any) -> tl.Routed:
        if layout in ROUTE_LAYOUTS:
            options.setdefault("capacity", 300)
        sizes = None if layout == "slots" else "bounded"
        return comm.dispatch(self.x, self.ids, self.weights, layout=layout, sizes=sizes, **options)


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def last(stand_ins: StandIns) -> Any:
    """Arguments of the launch before."""
    return stand_ins.launched[-1][1]


LAYOUTS = [(SMALL, "token"), (SMALL, "rank"), (SMALL, "expert"), (SMALL, "slots"), (LARGE, "token"), (LARGE, "rank")]
LAYOUTS += [(LARGE, "expert"), (LARGE, "slots")]


@pytest.mark.parametrize(("max_tokens", "layout"), LAYOUTS)
@pytest.mark.parametrize("to_fp8", [False, True])
@pytest.mark.parametrize(("ids_dtype", "weighted"), [(INT64, True), (INT32, False)])
def test_each_dispatch_tells_its_own_tensors(
    stand_ins: StandIns, max_tokens: int, layout: str, to_fp8: bool, ids_dtype: torch.dtype, weighted: bool
) -> None:
    """The second and the third call of a kind, too, of other numbers of tokens. Their results lie apart."""
    comm = make_comm(max_tokens)
    staged = layout in ROUTE_LAYOUTS and max_tokens == SMALL
    kept: list[tuple[Given, tl.Routed]] = []
    for num_tokens in (5, 0, 17):
        given = Given(num_tokens, ids_dtype, weighted)
        routed = given.dispatch(comm, layout, to_fp8=to_fp8)
        kept.append((given, routed))
        args, handle = last(stand_ins), routed._handle
        assert (args.x, args.topk_ids) == (address(given.x), address(given.ids))
        assert (args.topk_weights, args.scales) == (address(given.weights), 0)
        assert (args.num_tokens, args.ids_are_int64) == (num_tokens, ids_dtype == INT64)
        counts = handle.counts
        assert args.num_rows == address(counts.num_rows)
        assert args.source_counts == address(counts.source_counts)
        assert args.expert_counts == address(counts.expert_counts)
        assert args.all_counts == address(handle.all_counts)
        assert args.slots == address(handle.slots) or not num_tokens  # torch gives no address of nothing
        places = (address(handle.row_places), address(handle.row_tokens))
        assert handle.pointers == (*places, args.slots, args.all_counts)
        if layout == "expert":
            assert args.expert_offsets == address(counts.expert_offsets)
        if layout == "slots":
            assert args.slot_ranges == address(counts.slot_ranges)
            assert args.capacity == 300
        if staged:
            assert args.out_rows == address(routed.tokens)
            assert args.out_scales == address(routed.scales)
            assert args.out_weights == address(handle.weights)
            assert (args.out_ids, args.out_places) == (address(handle.local_ids), places[0])
        options = handle.options
        weights_dtype = None if given.weights is None else given.weights.dtype
        kind = DispatchKind(options, given.x.dtype, given.ids.dtype, weights_dtype)
        fields = dispatch_fields(handle.number, kind)
        direct = {} if staged else {"rows of the output": handle.num_places}
        assert args.call.options_hash == hash_of({**fields, **direct})
    do_not_overlap([routed._handle for _, routed in kept])


@pytest.mark.parametrize(("capacity", "staged"), [(2 * LARGE, False), (2 * LARGE + 1, True), (None, True)])
def test_sparse_slots_are_filled_on_arrival(stand_ins: StandIns, capacity: int | None, staged: bool) -> None:
    """A receive buffer has room for twice the places that an even routing fills. Where there are more, as by default,
    rows are copied to tensors of the caller's, and buffers stay as they are."""
    comm = make_comm(LARGE)
    routed = Given(5).dispatch(comm, "slots", capacity=capacity)
    assert (routed._handle.buffer is None) == staged
    assert not staged or last(stand_ins).out_rows == address(routed.tokens)


def do_not_overlap(handles: list[Any]) -> None:
    """What kernels leave in a tensor of their call, part by part."""
    parts = []
    for handle in handles:
        counts = [getattr(handle.counts, name) for name in RoutedCounts.__dataclass_fields__]
        found = [*counts, handle.slots, handle.all_counts]
        if handle.buffer is None:
            found += [handle.local_ids, handle.row_places, handle.weights, handle.row_tokens, handle.scales]
        parts += [part for part in found if part is not None and part.numel()]
    for number, part in enumerate(parts):
        part.fill_(number)
    for number, part in enumerate(parts):
        assert (part == number).all(), "a later part lies over it"


BY_ROUTE = ("expert", "slots")
COMBINES = [(*each, "per_rank") for each in LAYOUTS]
COMBINES += [(*each, "per_route") for each in LAYOUTS if each[1] in BY_ROUTE]


@pytest.mark.parametrize(("max_tokens", "layout", "mode"), COMBINES)
def test_each_combine_tells_its_own_tensors(stand_ins: StandIns, max_tokens: int, layout: str, mode: str) -> None:
    """Also of a dispatch that is not the last one, and to tensors of the caller's."""
    by_route = layout in BY_ROUTE
    comm = make_comm(max_tokens)
    given = [Given(num_tokens) for num_tokens in (5, 17)]
    kept = [each.dispatch(comm, layout) for each in given]
    for number, gives_out in ((0, False), (1, True), (0, True)):
        routed, handle = kept[number], kept[number]._handle
        y = torch.zeros(routed.tokens.shape, dtype=BF16)
        out = torch.zeros(given[number].x.shape, dtype=BF16) if gives_out else None
        found = comm.combine(y, routed, mode=mode, out=out)
        args = last(stand_ins)
        assert (args.y, args.out) == (address(y), address(found))
        assert found is out or not gives_out
        assert (args.row_places, args.row_tokens) == (address(handle.row_places), address(handle.row_tokens))
        assert (args.slots, args.all_counts) == (address(handle.slots), address(handle.all_counts))
        assert (args.topk_ids, args.ids_are_int64) == (address(given[number].ids), True)
        assert args.weights == (address(handle.weights) if by_route else 0)
        assert (args.num_tokens, args.capacity) == (len(given[number].x), handle.capacity)
        strategy = "all_to_all" if mode == "per_route" else "dedup"
        fields = combine_fields(handle.number, CombineOptions(by_route, BF16, BF16, False, strategy))
        assert args.call.options_hash == hash_of(fields)


def test_side_streams_know_of_copies(stand_ins: StandIns) -> None:
    """What a dispatch copied out of a receive buffer is recorded on the stream of an asynchronous combine."""
    comm, given = make_comm(LARGE), Given(5)
    routed = given.dispatch(comm, "expert", copy=True)
    places = routed._handle.pointers[0]
    memories = [(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors_in(routed)]
    assert any(begin <= places < begin + size for begin, size in memories)


def test_receive_buffers_take_turns(stand_ins: StandIns) -> None:
    """Rows of a dispatch are overwritten by the second next one, whatever kinds these are of."""
    comm, given = make_comm(LARGE), Given(5)
    rows = [address(given.dispatch(comm, layout).tokens) for layout in ("token", "expert", "token", "token", "expert")]
    assert rows[0] == rows[2] == rows[4] != rows[1] == rows[3]
    regions = [args.call.region for variant, args in stand_ins.launched if "dispatch" in str(variant)]
    assert regions == [0, 1, 0, 1, 0]


def test_a_larger_buffer_is_another_one(stand_ins: StandIns) -> None:
    """A kind that was prepared before a buffer grew is prepared again: all ranks write to the new one."""
    comm, given = make_comm(LARGE), Given(5)
    before = given.dispatch(comm, "token")
    combined = comm.combine(torch.zeros(before.tokens.shape, dtype=BF16), before)
    old = last(stand_ins).peers
    kept = list(comm.engine._backend._buffers._buffers.values())  # type: ignore[attr-defined]  # or new ones lie there
    given.dispatch(comm, "expert", capacity=6000)
    after = given.dispatch(comm, "token")
    assert last(stand_ins).peers != old
    assert address(after.tokens) != address(before.tokens)
    comm.combine(torch.zeros(after.tokens.shape, dtype=BF16), after)
    assert last(stand_ins).peers != old
    assert kept
    assert combined.shape == given.x.shape


def test_kinds_do_not_pile_up(stand_ins: StandIns) -> None:
    """A program may pass another capacity each time."""
    comm, given = make_comm(SMALL), Given(5)
    for capacity in range(1, 3 * MAX_KINDS):
        given.dispatch(comm, "expert", capacity=capacity)
        assert last(stand_ins).capacity == capacity
    assert len(comm.engine._backend._dispatcher._prepared) <= MAX_KINDS + 1  # type: ignore[attr-defined]
    (launcher,) = stand_ins.launchers
    assert len(launcher._all_kernels) <= 2 * MAX_KINDS


@pytest.mark.parametrize("layout", ["expert", "slots"])
def test_results_in_tensors_of_the_caller(stand_ins: StandIns, layout: str) -> None:
    """The kernel writes to those that are given, and none of them in the next call, which gives none."""
    comm, given = make_comm(SMALL), Given(5)
    places = [2, 50] if layout == "slots" else [200]
    out = tl.DispatchOut(
        tokens=torch.empty(*places, HIDDEN, dtype=BF16),
        expert_counts=torch.empty(2, dtype=INT32),
        num_rows=torch.empty((), dtype=INT32),
    )
    capacity = places[-1]
    routed = given.dispatch(comm, layout, capacity=capacity, out=out)
    assert routed.tokens is out.tokens
    assert routed.num_rows is out.num_rows
    args = last(stand_ins)
    assert (args.out_rows, args.expert_counts, args.num_rows) == (
        address(out.tokens),
        address(out.expert_counts),
        address(out.num_rows),
    )
    assert args.source_counts == address(routed.source_counts)
    again = given.dispatch(comm, layout, capacity=capacity)
    args = last(stand_ins)
    assert args.num_rows == address(again.num_rows) != address(out.num_rows)  # type: ignore[arg-type]
    assert args.out_rows == address(again.tokens) != address(out.tokens)


def test_halves_keep_the_arguments_of_their_call(stand_ins: StandIns) -> None:
    """Two calls of one kind may be open: each second half gets what its first half was told."""
    comm = make_comm(SMALL)
    given = [Given(5), Given(17)]
    pendings, sent = [], []
    for each in given:
        pendings.append(comm.send_dispatch(each.x, each.ids, each.weights, layout="token", sizes="bounded"))
        sent.append(last(stand_ins))
    for number in (1, 0):
        routed, args = pendings[number].receive(), last(stand_ins)
        assert args.x == sent[number].x == address(given[number].x)
        assert args.num_rows == sent[number].num_rows == address(routed.num_rows)  # type: ignore[arg-type]
        assert args.call.half_epoch == sent[number].call.half_epoch
        assert args.call.options_hash == sent[number].call.options_hash
    assert sent[0].call.half_epoch != sent[1].call.half_epoch


def test_what_a_kind_is(stand_ins: StandIns) -> None:
    """Whatever ranks must agree on, or kernels are made for, makes another kind."""
    comm = make_comm(SMALL)
    dispatcher: Any = comm.engine._backend._dispatcher  # type: ignore[attr-defined]
    given, kinds = Given(5), set()
    base = DispatchKind(DispatchOptions("token", 1, "bounded", 9), given.x.dtype, given.ids.dtype)
    for changes in ({}, {"ids_dtype": INT32}, {"weights_dtype": torch.float32}, {"x_needs_grad": True}):
        for capacity in (9, 10):
            kind = replace(base, options=replace(base.options, capacity=capacity), **changes)
            weights = given.weights if kind.weights_dtype is not None else None
            dispatcher.prepare(kind).send(Tokens(given.x, None, given.ids.to(kind.ids_dtype), weights)).receive()
            kinds.add(len(dispatcher._prepared))
    assert kinds == set(range(1, 9))


def test_readers_of_lent_rows_are_waited_for(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first call that can: a capture waits for no stream outside of it, and the calls behind it still must."""
    waits = []
    wait_stream = lambda stream, other: waits.append((stream.cuda_stream, other.cuda_stream))  # noqa: E731
    monkeypatch.setattr(Stream, "wait_stream", wait_stream)
    make_comm(LARGE)
    (launcher,), loan = stand_ins.launchers, Loan()
    rows = loan.lend(torch.zeros(4))
    assert loan.is_held
    del rows
    assert not loan.is_held
    for stand_ins.stream, stand_ins.capturing in ((8, True), (9, False), (10, False)):
        loan.take_back(launcher)
    assert waits == [(9, 7)]


def test_sums_for_copy_engines_have_no_weights_from_home(stand_ins: StandIns) -> None:
    """They would be taken for received ones, of which there is one for each row."""
    comm, given = make_comm(LARGE), Given(5)
    routed = given.dispatch(comm, "expert")
    options = CombineOptions(True, BF16, BF16, False, "reduce_scatter", weights_from_home=True)
    with pytest.raises(InvalidArgument, match="no weights from home"):
        comm.engine.send_combine(routed._handle, routed.tokens, given.weights, options)


@pytest.mark.parametrize("layout", ["token", "expert", "rank", "slots"])
@pytest.mark.parametrize(
    ("max_tokens", "alignment", "refused"),
    [(2**26 - 1, 1, ""), (2**26, 1, "max_tokens_per_rank is 67108864"), (2**20, 2**30 + 1, "alignment is 1073741825")],
)
def test_counts_of_routes_fit_32_bits(
    stand_ins: StandIns, layout: str, max_tokens: int, alignment: int, refused: str
) -> None:
    """All routes of all ranks may name one expert, whose count a kernel keeps as an int32: one more came out below 0,
    which is no overflow."""
    plan, given = Plan(1, 1, 8, 32, max_tokens), Given(5)
    shared: Any = SimpleNamespace(plan=plan, checked=False, buffers=SimpleNamespace(fused=False))
    kind = DispatchKind(DispatchOptions(layout, alignment, "bounded", 1), given.x.dtype, given.ids.dtype)
    if not refused:
        check(shared, kind)
        assert plan.worst_case_rows("expert", alignment) < 2**31
        return
    with pytest.raises(InvalidArgument, match=f"{refused}: places of rows would not fit 32 bits"):
        check(shared, kind)
