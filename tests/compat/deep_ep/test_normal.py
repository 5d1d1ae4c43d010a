"""``Buffer`` in normal mode against the reference, as Megatron-Core, vLLM and SGLang call it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compat.deep_ep.cases import (
    CASE,
    aligned,
    each_case,
    fails,
    finite,
    laid_out,
    problem_of,
    rows_to_combine,
    skip_where_kernels_tell,
)
from tests.conftest import Ranks
from tests.support import emulator
from tests.support.cases import BF16, FP8, FP32, Case, same_bits, same_bytes
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.faults import BadCall, NotServed
from tokenloom.errors import DtypeMismatch, PeerError, ShapeMismatch
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)
EMULATED = True
"""The emulator runs these tests by the kernels of backend "nvlink"."""

# -- layout -----------------------------------------------------------------------------------------------------


@on_ranks
@each_case
def test_layout(context: RankContext, case: Case) -> None:
    """Counts and the mask, from ids."""
    problem = problem_of(case, context)
    plan, ids = problem.plan, problem.topk_ids[context.rank]
    buffer = deep_ep.Buffer(context.group)
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        ids.to(context.device), plan.num_experts
    )
    there = torch.zeros(len(ids), context.num_ranks, dtype=torch.bool)
    experts = [0] * plan.num_experts
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            if expert >= 0:
                there[token, expert // plan.experts_per_rank] = True
                experts[expert] += 1
    same_bytes(in_rank, there, "is_token_in_rank")
    same_bytes(per_rank, there.sum(0).int(), "num_tokens_per_rank")
    same_bytes(per_expert, torch.tensor(experts, dtype=torch.int32), "num_tokens_per_expert")
    assert per_rdma_rank is None
    assert event.event is None


@on_ranks
def test_layout_of_ids_that_are_too_big(context: RankContext) -> None:
    """They are no routes, as for kernels: counting them would be a fault of the GPU, which ends the program."""
    num_experts = 3 * context.num_ranks
    ids = torch.tensor([[num_experts, 0], [-1, 10**6], [num_experts - 1, -9]], device=context.device)
    per_rank, _, per_expert, in_rank, _ = deep_ep.Buffer(context.group).get_dispatch_layout(ids, num_experts)
    there = torch.zeros(3, context.num_ranks, dtype=torch.bool)
    experts = torch.zeros(num_experts, dtype=torch.int32)
    there[0, 0] = there[2, -1] = True
    experts[[0, -1]] = 1
    same_bytes(in_rank, there, "is_token_in_rank")
    same_bytes(per_rank, there.sum(0).int(), "num_tokens_per_rank")
    same_bytes(per_expert, experts, "num_tokens_per_expert")


# -- dispatch and combine ---------------------------------------------------------------------------------------


@on_ranks
@each_case
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_dispatch_and_combine(context: RankContext, case: Case, asynchronous: bool) -> None:
    """Rows, ids, weights, counts; then sums of rows and of weights, with every option of streams that clients use."""
    problem, me = problem_of(case, context), context.rank
    wanted = problem.dispatched("token")
    buffer = deep_ep.Buffer(context.group, 1 << 20, 0)

    def streams() -> dict[str, Any]:
        if not asynchronous:
            return {}
        previous = deep_ep.EventOverlap(deep_ep.EventHandle())
        return {"previous_event": previous, "async_finish": True, "allocate_on_comm_stream": True}

    def waited(event: deep_ep.EventOverlap) -> None:
        assert (event.event is not None) == asynchronous
        if asynchronous:
            event.current_stream_wait()

    x, ids, weights, counts, handle, event = buffer.dispatch(
        **laid_out(buffer, problem, context),
        expert_alignment=4,
        config=deep_ep.Buffer.get_dispatch_config(2),
        **streams(),
    )
    waited(event)
    want = wanted[me]
    same_bytes(x, want.tokens, "recv_x")
    same_bytes(ids, want.topk_ids, "recv_topk_idx")
    same_bytes(weights, want.topk_weights, "recv_topk_weights")
    assert counts == aligned(want.expert_counts, 4)
    assert all(isinstance(count, int) for count in counts)
    assert len(handle) == 6
    prefixes = torch.tensor(want.source_counts).cumsum(0).int()
    same_bytes(handle[0][:, me].contiguous(), prefixes, "rank_prefix_matrix")
    assert [list(part.shape) for part in handle[1:3]] == [[context.num_ranks, 10]] * 2

    ys = [rows_to_combine(each.tokens, rank, case.dtype) for rank, each in enumerate(wanted)]
    grads = [rows_to_combine(each.topk_ids, rank, FP32) for rank, each in enumerate(wanted)]
    outs = reference.combine(problem.plan, ys, wanted, problem.topk_ids, None)
    homes = reference.combine_weights(problem.plan, grads, wanted, problem.topk_ids)
    out, home, event = buffer.combine(ys[me].to(context.device), handle, grads[me].to(context.device), **streams())
    waited(event)
    same_bits(out, outs[me], "combined_x")
    same_bits(home, homes[me], "combined_topk_weights")
    settings = deep_ep.Config(132, 32, 2048, 32, 4096)  # of more SMs and chunks than there are
    out, home, event = buffer.combine(ys[me].to(context.device), handle=handle, config=settings, **streams())
    waited(event)
    same_bits(out, outs[me], "combined_x")
    assert home is None


@on_ranks
def test_cached_layout(context: RankContext) -> None:
    """Other rows of the same tokens go where the first ones went; ids may have changed meanwhile."""
    problem, me = finite(problem_of(CASE, context)), context.rank
    others = replace(problem, xs=[x * 2 for x in problem.xs])
    want = others.dispatched("token")[me]
    buffer = deep_ep.Buffer(context.group)
    given = laid_out(buffer, problem, context)
    x, _, _, _, handle, _ = buffer.dispatch(**given)
    given["topk_idx"].zero_()  # upstream's handle has a copy of what it needs
    again = buffer.dispatch(others.xs[me].to(context.device), handle=handle, async_finish=True)
    assert again[1:5] == (None, None, None, None)
    assert again[5].event is not None
    again[5].current_stream_wait()
    same_bytes(again[0], want.tokens, "recv_x")
    same_bytes(x, problem.dispatched("token")[me].tokens, "the rows of before")
    other = deep_ep.Buffer(context.group)  # a client may make its buffer anew between forward and backward
    same_bytes(other.dispatch(others.xs[me].to(context.device), handle=handle)[0], want.tokens, "another buffer")
    out, _, _ = other.combine(x, handle)
    assert len(out) == len(problem.xs[me])


@on_ranks
@pytest.mark.parametrize("scales", ["float32", "columns", "packed", "few"])
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_fp8(context: RankContext, scales: str, cached: bool) -> None:
    """Scales of any strides, in either dtype, of any width, arrive row-major beside their rows."""
    problem, me = problem_of(replace(CASE, dtype=FP8, hidden=512), context), context.rank
    assert problem.scales is not None
    given = problem.scales
    if scales == "packed":
        given = [(each * 2**20).int()[:, :1].contiguous() for each in given]
    elif scales == "few":
        given = [each[:, :3].contiguous() for each in given]
    moved = replace(problem, scales=given)
    want = moved.dispatched("token")[me]
    mine = given[me].to(context.device)
    if scales == "columns":
        mine = mine.new_empty_strided(mine.shape, (1, max(4, len(mine)))).copy_(mine)
    buffer = deep_ep.Buffer(context.group)
    arguments = laid_out(buffer, problem, context)
    payload = (arguments["x"][0], mine)
    received = buffer.dispatch(**arguments | {"x": payload})
    if cached:
        arguments["topk_idx"].zero_()  # upstream's handle has a copy of what it needs
        received = buffer.dispatch(payload, handle=received[4])
    rows, recv_scales = received[0]
    same_bytes(rows, want.tokens, "recv_x")
    same_bytes(recv_scales, want.scales, "recv_scales")
    assert recv_scales.is_contiguous()


@on_ranks
def test_worst_case_rows(context: RankContext) -> None:
    """A fixed number of rows: ids of the tail are -1, nothing is listed, and combine reads no row of the tail."""
    problem, me = finite(problem_of(CASE, context)), context.rank
    wanted = problem.dispatched("token")
    want, most = wanted[me], context.num_ranks * 8
    buffer = deep_ep.Buffer(context.group)
    x, ids, weights, counts, handle, _ = buffer.dispatch(**laid_out(buffer, problem, context), num_worst_tokens=most)
    assert len(x) == len(ids) == len(weights) == most
    assert counts == []
    same_bytes(x[: want.num_rows], want.tokens, "recv_x")
    same_bytes(ids[: want.num_rows], want.topk_ids, "recv_topk_idx")
    assert (ids[want.num_rows :] == -1).all()
    x[want.num_rows :] = torch.nan
    weights[want.num_rows :] = torch.nan
    out, home, _ = buffer.combine(x, handle, weights)
    rows = [each.tokens for each in wanted]
    same_bits(out, reference.combine(problem.plan, rows, wanted, problem.topk_ids, None)[me], "combined_x")
    used = [each.topk_weights for each in wanted]
    same_bits(home, reference.combine_weights(problem.plan, used, wanted, problem.topk_ids)[me], "weights")


@on_ranks
def test_more_tokens_than_the_worst_case(context: RankContext) -> None:
    """Where nobody waits for counts, a rank with more tokens than its share cannot ask for room: it raises, and the
    others hear of it. Then all works on."""
    problem, more = (problem_of(replace(CASE, tokens=(first, 2, 3, 5)), context) for first in (8, 9))
    buffer = deep_ep.Buffer(context.group)
    good, bad = (laid_out(buffer, each, context) for each in (problem, more))
    worst = {"num_worst_tokens": context.num_ranks * 8}
    buffer.dispatch(**good, **worst)
    if context.rank == 0:
        with pytest.raises(ShapeMismatch, match=r"Buffer\.dispatch: x has 9 tokens, num_worst_tokens=.* room for 8"):
            buffer.dispatch(**bad, **worst)
    else:

        def heard() -> None:
            buffer.dispatch(**bad, **worst)
            buffer.runtime.all()[0].check()  # where kernels tell it, and a later call raises

        with pytest.raises(PeerError, match=r"rank 0 failed .*ShapeMismatch: x has 9 tokens"):
            heard()
    want = problem.dispatched("token")[context.rank]
    same_bytes(buffer.dispatch(**good, **worst)[0][: want.num_rows], want.tokens, "recv_x")
    assert len(buffer.runtime.all()) == 1


@on_ranks
def test_ranks_without_ids(context: RankContext) -> None:
    """A mask alone says where tokens go; counts of experts come from what the client counted."""
    problem, me = problem_of(CASE, context), context.rank
    wanted = problem.dispatched("token")
    buffer = deep_ep.Buffer(context.group)
    given = laid_out(buffer, problem, context)
    x, ids, weights, counts, handle, _ = buffer.dispatch(**given | {"topk_idx": None, "topk_weights": None})
    same_bytes(x, wanted[me].tokens, "recv_x")
    assert ids is None
    assert weights is None
    assert counts == wanted[me].expert_counts
    ys = [rows_to_combine(each.tokens, rank) for rank, each in enumerate(wanted)]
    outs = reference.combine(problem.plan, ys, wanted, problem.topk_ids, None)
    y = ys[me].to(context.device)
    same_bits(buffer.combine(y, handle)[0], outs[me], "combined_x")
    with pytest.raises(BadCall, match="topk_weights: the dispatch had none"):
        buffer.combine(y, handle, torch.ones(len(y), context.num_ranks, device=context.device))


@on_ranks
@pytest.mark.parametrize("number", [1, 2])
def test_bias(context: RankContext, number: int) -> None:
    problem, me = problem_of(CASE, context), context.rank
    wanted = problem.dispatched("token")
    buffer = deep_ep.Buffer(context.group)
    handle = buffer.dispatch(**laid_out(buffer, problem, context))[4]
    ys = [rows_to_combine(each.tokens, rank) for rank, each in enumerate(wanted)]
    biases = [[rows_to_combine(x, 10 * rank + i) for i in range(number)] for rank, x in enumerate(problem.xs)]
    outs = reference.combine(problem.plan, ys, wanted, problem.topk_ids, None, biases=biases)
    mine = tuple(bias.to(context.device) for bias in biases[me])
    bias = mine if number == 2 else mine[0]
    same_bits(buffer.combine(ys[me].to(context.device), handle, bias=bias)[0], outs[me], "combined_x")


# -- shapes that change -----------------------------------------------------------------------------------------


@on_ranks
def test_batches_grow_and_shapes_change(context: RankContext) -> None:
    """One buffer serves any shape. A rank with more tokens than ever is told by its call, also against one that has
    room; handles from before stay good."""
    buffer, me = deep_ep.Buffer(context.group), context.rank
    kept = []
    shapes: list[dict[str, Any]] = [
        {"tokens": (2, 1)},
        {"tokens": (1, 40)},  # only some ranks have more
        {"tokens": (70, 1)},
        {"tokens": (3,), "hidden": 24},  # another communicator
        {"tokens": (1, 9), "hidden": 24},
        {"tokens": (5,), "top_k": 2, "experts_per_rank": 2},
        {"tokens": (300,)},
    ]
    for seed, changes in enumerate(shapes):
        problem = finite(problem_of(replace(CASE, seed=seed, **changes), context))
        wanted = problem.dispatched("token")
        x, _, _, _, handle, _ = buffer.dispatch(**laid_out(buffer, problem, context))
        same_bytes(x, wanted[me].tokens, "recv_x")
        kept.append((problem, wanted, handle))
    for problem, wanted, handle in reversed(kept):
        ys = [rows_to_combine(each.tokens, rank) for rank, each in enumerate(wanted)]
        outs = reference.combine(problem.plan, ys, wanted, problem.topk_ids, None)
        same_bits(buffer.combine(ys[me].to(context.device), handle)[0], outs[me], "combined_x")


# -- bad input --------------------------------------------------------------------------------------------------


FAULTS: list[Any] = [
    pytest.param({"x": lambda x: x.t()}, ShapeMismatch, "Buffer.dispatch: x has strides", id="strides of x"),
    pytest.param({"x": lambda x: x[:, 0]}, ShapeMismatch, "Buffer.dispatch: x is", id="x of one dimension"),
    pytest.param({"x": lambda x: x[:, :7].contiguous()}, ShapeMismatch, "Buffer.dispatch: x has rows", id="14 bytes"),
    pytest.param({"x": lambda x: x.to(FP8)}, DtypeMismatch, "Buffer.dispatch: x is", id="fp8 without scales"),
    pytest.param({"x": lambda x: (x, x)}, DtypeMismatch, "Buffer.dispatch: x comes", id="scales of bf16"),
    pytest.param({"x": lambda x: 3}, BadCall, "Buffer.dispatch: x is an int", id="no tensor"),
    pytest.param({"topk_idx": lambda t: t.int()}, DtypeMismatch, "Buffer.dispatch: topk_idx is", id="int32 ids"),
    pytest.param({"topk_idx": lambda t: t[:-1]}, ShapeMismatch, "Buffer.dispatch: topk_idx is", id="few ids"),
    pytest.param({"topk_idx": lambda t: None}, BadCall, "Buffer.dispatch: topk_idx and topk_weights", id="no ids"),
    pytest.param({"topk_idx": lambda t: t + 99}, ValueError, "Buffer.dispatch: topk_idx.0, 0. is", id="big ids"),
    pytest.param({"topk_weights": lambda t: t.bfloat16()}, DtypeMismatch, "Buffer.dispatch: topk_weights", id="bf16"),
    pytest.param({"is_token_in_rank": lambda t: None}, BadCall, "Buffer.dispatch: num_tokens", id="no layout"),
    pytest.param({"is_token_in_rank": lambda t: ~t}, BadCall, "Buffer.dispatch: is_token_in_rank", id="other mask"),
    pytest.param(
        {"num_tokens_per_expert": lambda t: t[:0]}, BadCall, "Buffer.dispatch: . ranks do not", id="no experts"
    ),
    pytest.param({"expert_alignment": 0}, BadCall, "Buffer.dispatch: expert_alignment", id="alignment"),
    pytest.param({"num_worst_tokens": -1}, BadCall, "Buffer.dispatch: num_worst_tokens", id="negative worst case"),
    pytest.param({"allocate_on_comm_stream": True}, BadCall, "Buffer.dispatch: allocate_on", id="no event"),
    pytest.param({"config": {"num_sms": 24}}, BadCall, "Buffer.dispatch: config is a dict", id="a file for a config"),
    pytest.param({"handle": (1, 2)}, BadCall, "Buffer.dispatch: handle is a tuple", id="a handle of others"),
]


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize(("changes", "error", "text"), FAULTS)
def test_dispatch_fault(ranks: Ranks, changes: Any, error: type[Exception], text: str, first: bool) -> None:
    """One rank's bad input is an error of all ranks, whether communicators exist or not; then all works on."""
    if error is ValueError and (emulator.ON or ranks.device == "cuda"):
        pytest.skip("kernels take ids that are too big for -1, without a word")
    if "is_token_in_rank" in text and ranks.device == "cuda":
        pytest.skip("reading the mask would make the host wait")
    index = next(i for i, each in enumerate(FAULTS) if each.values[0] is changes)
    ranks.run(check_dispatch_fault, index, first)


def check_dispatch_fault(context: RankContext, index: int, first: bool) -> None:
    changes, error, text = FAULTS[index].values
    problem = problem_of(replace(CASE, tokens=(6, 2, 3, 5), unused=0.0), context)
    buffer = deep_ep.Buffer(context.group)
    good = laid_out(buffer, problem, context)
    if not first:
        buffer.dispatch(**good)
    bad = dict(good)
    if context.rank == 0:
        bad |= {name: change(good[name]) if callable(change) else change for name, change in changes.items()}
    fails(context, 0, error, text, lambda: buffer.dispatch(**bad))
    x = buffer.dispatch(**good)[0]
    same_bytes(x, problem.dispatched("token")[context.rank].tokens, "recv_x")


COMBINE_FAULTS: list[Any] = [
    pytest.param({"x": lambda x: x[:-1]}, ShapeMismatch, "Buffer.combine: x is", id="few rows"),
    pytest.param(
        {"x": lambda x: x.t().contiguous().t()}, ShapeMismatch, "Buffer.combine: x has strides", id="strides"
    ),
    pytest.param({"handle": lambda h: None}, BadCall, "Buffer.combine: handle is a NoneType", id="no handle"),
    pytest.param({"topk_weights": lambda w: w[:, 1:]}, ShapeMismatch, "Buffer.combine: topk_weights", id="weights"),
    pytest.param({"bias": lambda b: b[1:]}, ShapeMismatch, "Buffer.combine: bias is", id="bias"),
    pytest.param({"bias": lambda b: b.float()}, DtypeMismatch, "Buffer.combine: bias is", id="bias of float32"),
    pytest.param({"bias": lambda b: (b, b, b)}, BadCall, "Buffer.combine: bias is a tuple of 3", id="three biases"),
    pytest.param({"config": lambda c: 24}, BadCall, "Buffer.combine: config is an int", id="SMs for a config"),
    pytest.param(
        {"allocate_on_comm_stream": lambda a: True}, BadCall, "Buffer.combine: allocate_on_comm_stream", id="no event"
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), COMBINE_FAULTS)
def test_combine_fault(ranks: Ranks, changes: Any, error: type[Exception], text: str) -> None:
    skip_where_kernels_tell(ranks)
    index = next(i for i, each in enumerate(COMBINE_FAULTS) if each.values[0] is changes)
    ranks.run(check_combine_fault, index)


def check_combine_fault(context: RankContext, index: int) -> None:
    changes, error, text = COMBINE_FAULTS[index].values
    problem = problem_of(replace(CASE, tokens=(6, 2, 3, 5), unused=0.0), context)
    buffer = deep_ep.Buffer(context.group)
    given = laid_out(buffer, problem, context)
    x, _, weights, _, handle, _ = buffer.dispatch(**given)
    good = {"x": x, "handle": handle, "topk_weights": weights, "bias": given["x"].clone()}
    bad = dict(good)
    if context.rank == 0:
        bad |= {name: change(good.get(name)) for name, change in changes.items()}
    fails(context, 0, error, text, lambda: buffer.combine(**bad))
    buffer.combine(**good)


# -- construction and what clients read -------------------------------------------------------------------------


@on_ranks
def test_construction(context: RankContext) -> None:
    buffer = deep_ep.Buffer(
        context.group, 1 << 20, 1 << 10, low_latency_mode=True, num_qps_per_rank=4, allow_mnnvl=True
    )
    assert (buffer.rank, buffer.group_size) == (context.rank, context.num_ranks)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode) == (1 << 20, 1 << 10, True)
    assert buffer.group is context.group
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        buffer.destroy()
    buffer = deep_ep.Buffer(group=context.group, explicitly_destroy=True)
    assert buffer.runtime is not None
    buffer.dispatch(**laid_out(buffer, problem_of(CASE, context), context))
    buffer.destroy()
    assert buffer.runtime is None
    buffer.destroy()
    with pytest.raises(BadCall, match=r"Buffer\.dispatch: this buffer was destroyed"):
        buffer.dispatch(torch.zeros(1, 8, dtype=BF16))


def test_what_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="pass group"):
        deep_ep.Buffer(None)
    with pytest.raises(NotServed, match="Buffer: comm is not served"):
        deep_ep.Buffer(None, comm=object())
    with pytest.raises(NotServed, match="Buffer: group is a str"):
        deep_ep.Buffer("world")


@on_ranks
def test_a_handle_says_what_it_has_not(context: RankContext) -> None:
    buffer = deep_ep.Buffer(context.group)
    handle = buffer.dispatch(**laid_out(buffer, problem_of(CASE, context), context))[4]
    with pytest.raises(NotServed, match="recv_src_idx"):
        _ = handle[3]
    with pytest.raises(NotServed, match="cannot be pickled"):
        handle.__reduce__()
    assert handle[4].shape[1] == context.num_ranks
    heads = handle[5]
    for rank in range(context.num_ranks):
        assert heads[:, rank][heads[:, rank] >= 0].tolist() == list(range(int(handle[4][:, rank].sum())))
