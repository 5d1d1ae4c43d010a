"""``ElasticBuffer`` against the reference, as vLLM, SGLang and torchtitan call it."""

from __future__ import annotations

import time
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
    problem_of,
    rows_to_combine,
    skip_where_kernels_tell,
)
from tests.conftest import Ranks
from tests.support.cases import FP8, FP32, Case, Problem, same_bits, same_bytes
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.ep_handle import EPHandle
from tokenloom.compat.deep_ep.faults import BadCall, NotServed
from tokenloom.errors import DtypeMismatch, PeerError, PeerTimeout, ShapeMismatch
from tokenloom.plan import align_up
from tokenloom.runtime.processes import RankContext, RankPool

pytestmark = pytest.mark.slow_on(4)
EMULATED = True
"""The emulator runs these tests by the kernels of backend "nvlink"."""

ALIGNMENT = 4
MOST = 16
each_form = pytest.mark.parametrize("expanded", [False, True], ids=["compact", "expanded"])
each_sync = pytest.mark.parametrize("reads", [True, False], ids=["host reads", "no host read"])


def made(context: RankContext, **options: Any) -> deep_ep.ElasticBuffer:
    return deep_ep.ElasticBuffer(context.group, num_max_tokens_per_rank=MOST, hidden=128, num_topk=3, **options)


def arguments(problem: Problem, context: RankContext) -> dict[str, Any]:
    x, ids, weights = problem.arguments(context)
    return {"x": x, "topk_idx": ids, "topk_weights": weights, "num_experts": problem.plan.num_experts}


def reference_of(problem: Problem, expanded: bool) -> list[reference.Routed]:
    return problem.dispatched("expert", alignment=ALIGNMENT) if expanded else problem.dispatched("token")


def row_weights(problem: Problem, wants: list[reference.Routed]) -> list[torch.Tensor]:
    """The weight of each row of layout "expert", 0 in padding."""
    found = []
    assert problem.topk_weights is not None
    for want in wants:
        weights = torch.zeros(len(want.tokens))
        for (source, token, *k), place in want.rows.items():
            weights[place] = problem.topk_weights[source][token, k[0]]
        found.append(weights)
    return found


@on_ranks
@pytest.mark.sampled(5)
@each_case
@each_form
@each_sync
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_dispatch_and_combine(
    context: RankContext, case: Case, expanded: bool, reads: bool, asynchronous: bool
) -> None:
    """Rows, ids, weights, handle; then sums of rows and weights; then other rows and weights to the same places."""
    problem, me, plan = finite(problem_of(case, context)), context.rank, problem_of(case, context).plan
    wants = reference_of(problem, expanded)
    want, rows = wants[me], len(wants[me].tokens)
    buffer = made(context)
    stats = torch.ones(plan.experts_per_rank, dtype=torch.int32, device=context.device)
    layout = {"expert_alignment": ALIGNMENT, "do_expand": expanded}
    x, ids, weights, handle, event = buffer.dispatch(
        **arguments(problem, context),
        **layout,
        cumulative_local_expert_recv_stats=stats,
        previous_event=deep_ep.ElasticBuffer.capture() if asynchronous else None,
        async_with_compute_stream=asynchronous,
        allocate_on_comm_stream=asynchronous,
        do_cpu_sync=None if reads else False,
        do_zero_padding=expanded,
    )
    assert (event.event is not None) == asynchronous
    if asynchronous:
        event.current_stream_wait()
    expected_rows = rows
    if not reads:
        expected_rows = context.num_ranks * MOST
        if expanded:
            routes = expected_rows * min(plan.top_k, plan.experts_per_rank)
            expected_rows = align_up(routes + (ALIGNMENT - 1) * plan.experts_per_rank, ALIGNMENT)
    assert len(x) == expected_rows
    same_bytes(x[:rows], want.tokens, "recv_x")
    if expanded:
        assert ids is None
        same_bytes(weights[:rows], row_weights(problem, wants)[me], "recv_topk_weights")
        assert weights.ndim == 1
    else:
        same_bytes(ids[:rows], want.topk_ids, "recv_topk_idx")
        assert (ids[rows:] == -1).all()
        same_bytes(weights[:rows], want.topk_weights, "recv_topk_weights")
    assert stats.tolist() == [1 + count for count in want.expert_counts]
    check_handle(handle, want, expanded, reads, expected_rows, context)

    dtype = case.dtype

    def room(values: list[torch.Tensor]) -> torch.Tensor:
        """This rank's rows, and behind them what nobody may read."""
        mine = torch.full((expected_rows, *values[me].shape[1:]), torch.nan, dtype=values[me].dtype)
        mine[:rows] = values[me]
        return mine.to(context.device)

    ys = [rows_to_combine(each.tokens, rank, dtype) for rank, each in enumerate(wants)]
    like = [torch.empty(len(each.tokens)) if expanded else each.topk_ids for each in wants]
    grads = [rows_to_combine(each, rank, FP32) for rank, each in enumerate(like)]
    for y, grad, each in zip(ys, grads, wants, strict=True):
        y[each.padding], grad[each.padding] = torch.nan, torch.nan
    out, home, event = buffer.combine(room(ys), handle, room(grads), async_with_compute_stream=asynchronous)
    assert (event.event is not None) == asynchronous
    if asynchronous:
        event.current_stream_wait()
    same_bits(out, reference.combine(plan, ys, wants, problem.topk_ids, None)[me], "combined_x")
    homes = reference.combine_weights(plan, grads, wants, problem.topk_ids)
    same_bits(home, homes[me], "combined_topk_weights")
    mine, given = (room(each)[:rows].contiguous() for each in (ys, grads))
    out, home, _ = buffer.combine(mine, handle, given)  # as clients do that have cut the tail off
    same_bits(out, reference.combine(plan, ys, wants, problem.topk_ids, None)[me], "combined_x")
    same_bits(home, homes[me], "combined_topk_weights")

    assert problem.topk_weights is not None
    others = replace(
        problem, xs=[each * 2 for each in problem.xs], topk_weights=[each + 1 for each in problem.topk_weights]
    )
    again = reference_of(others, expanded)
    x, ids, weights, same, _ = buffer.dispatch(
        others.xs[me].to(context.device),
        topk_weights=others.topk_weights[me].to(context.device),
        handle=handle,
        do_expand=expanded,
    )
    assert same is handle
    same_bytes(x[:rows], again[me].tokens, "recv_x again")
    expected = row_weights(others, again)[me] if expanded else again[me].topk_weights
    same_bytes(weights[:rows], expected, "recv_topk_weights again")
    x, _, weights, _, _ = buffer.dispatch(others.xs[me].to(context.device), handle=handle, do_expand=expanded)
    same_bytes(x[:rows], again[me].tokens, "recv_x again")
    assert weights is None


def check_handle(
    handle: EPHandle, want: reference.Routed, expanded: bool, reads: bool, rows: int, context: RankContext
) -> None:
    counts = want.expert_counts
    rounded = aligned(counts, ALIGNMENT)
    assert handle.num_recv_tokens_per_expert_list == (rounded if reads else [])
    per_rank = torch.tensor(want.source_counts).cumsum(0).int()
    same_bytes(handle.psum_num_recv_tokens_per_scaleup_rank, per_rank, "psum by rank")
    sums = torch.tensor(rounded).cumsum(0)
    if expanded:
        sums = sums - torch.tensor(rounded) + torch.tensor(counts)
    same_bytes(handle.psum_num_recv_tokens_per_expert, sums.int(), "psum by expert")
    same_bytes(handle.num_unaligned_recv_tokens_per_expert, torch.tensor(counts).int(), "counts")
    assert (handle.do_expand, handle.expert_alignment) == (expanded, ALIGNMENT)
    assert handle.num_max_tokens_per_rank == MOST
    assert handle.num_sms > 0
    assert (handle.num_recv_tokens, handle.num_expanded_tokens) == ((0, rows) if expanded else (rows, 0))
    for name in ("dst_buffer_slot_idx", "token_metadata_at_forward", "channel_linked_list"):
        assert getattr(handle, name) is None
    with pytest.raises(NotServed, match="recv_src_metadata"):
        _ = handle.recv_src_metadata
    handle.recv_src_metadata = per_rank
    assert handle.recv_src_metadata is per_rank


@on_ranks
@each_form
@pytest.mark.parametrize("scales", ["float32", "columns", "packed"])
def test_fp8(context: RankContext, expanded: bool, scales: str) -> None:
    """Scales arrive by row, or by column as TMA takes them."""
    problem, me = problem_of(replace(CASE, dtype=FP8, hidden=512), context), context.rank
    assert problem.scales is not None
    if scales == "packed":
        problem = replace(problem, scales=[(each * 2**20).int()[:, :1].contiguous() for each in problem.scales])
    want = reference_of(problem, expanded)[me]
    given = arguments(problem, context)
    payload = given["x"]
    if scales == "columns":
        payload = payload[0], payload[1].t().contiguous().t()
    buffer = made(context)
    layout = {"expert_alignment": ALIGNMENT, "do_expand": expanded}
    for by_column in (False, True):
        (rows, got), _, _, handle, _ = buffer.dispatch(
            **given | {"x": payload}, **layout, use_tma_aligned_col_major_sf=by_column
        )
        same_bytes(rows, want.tokens, "recv_x")
        same_bytes(got.contiguous().clone(), want.scales, "recv_scales")
        if by_column:
            assert got.stride() == (1, align_up(len(rows), 4))
        else:
            assert got.is_contiguous()
        (rows, got), *_ = buffer.dispatch(payload, handle=handle, do_expand=expanded)
        same_bytes(rows, want.tokens, "recv_x again")
        same_bytes(got, want.scales, "recv_scales again")


@on_ranks
def test_batches_grow(context: RankContext) -> None:
    """Where neither the buffer nor the call says M, any number of tokens will do, if the host reads counts."""
    buffer = deep_ep.ElasticBuffer(context.group)
    for seed, tokens in enumerate(((2, 1), (1, 40), (70, 1), (0,))):
        problem = problem_of(replace(CASE, tokens=tokens, seed=seed), context)
        x = buffer.dispatch(**arguments(problem, context))[0]
        same_bytes(x, problem.dispatched("token")[context.rank].tokens, "recv_x")
    if context.rank == 0:
        with pytest.raises(BadCall, match=r"ElasticBuffer\.dispatch: do_cpu_sync=False needs num_max"):
            buffer.dispatch(**arguments(problem, context), do_cpu_sync=False)
    else:

        def both() -> None:
            """Kernels tell it at the second call, whose host waits."""
            buffer.dispatch(**arguments(problem, context), do_cpu_sync=False, num_max_tokens_per_rank=128)
            buffer.dispatch(**arguments(problem, context))

        with pytest.raises(RuntimeError, match=r"ElasticBuffer\.dispatch: rank 0 failed"):
            both()
    x = buffer.dispatch(**arguments(problem, context))[0]
    same_bytes(x, problem.dispatched("token")[context.rank].tokens, "recv_x")


@on_ranks
@pytest.mark.parametrize("copied", [True, False])
def test_ids_of_the_handle(context: RankContext, copied: bool) -> None:
    """They are a copy, unless the client says that its own stay as they are."""
    problem = finite(problem_of(CASE, context))
    given = arguments(problem, context)
    handle = made(context).dispatch(**given, do_handle_copy=copied)[3]
    assert (handle.topk_idx.data_ptr() == given["topk_idx"].data_ptr()) == (not copied or not len(given["x"]))
    same_bytes(handle.topk_idx, problem.topk_ids[context.rank], "topk_idx")


@on_ranks
def test_bias(context: RankContext) -> None:
    problem, me = problem_of(CASE, context), context.rank
    wants = problem.dispatched("expert")
    buffer = made(context)
    handle = buffer.dispatch(**arguments(problem, context), do_expand=True)[3]
    ys = [rows_to_combine(each.tokens, rank) for rank, each in enumerate(wants)]
    biases = [[rows_to_combine(x, 50 + rank)] for rank, x in enumerate(problem.xs)]
    outs = reference.combine(problem.plan, ys, wants, problem.topk_ids, None, biases=biases)
    out, weights, _ = buffer.combine(ys[me].to(context.device), handle, bias=biases[me][0].to(context.device))
    same_bits(out, outs[me], "combined_x")
    assert weights is None


# -- bad input --------------------------------------------------------------------------------------------------

NAME = "ElasticBuffer.dispatch"
FAULTS: list[Any] = [
    pytest.param({"x": lambda x: x.t()}, ShapeMismatch, f"{NAME}: x has strides", id="strides of x"),
    pytest.param({"topk_idx": lambda t: t.int()}, DtypeMismatch, f"{NAME}: topk_idx is", id="int32 ids"),
    pytest.param({"topk_idx": lambda t: None}, BadCall, f"{NAME}: topk_idx is a NoneType", id="no ids"),
    pytest.param({"num_max_tokens_per_rank": 4}, ShapeMismatch, f"{NAME}: x has 6 tokens", id="too many tokens"),
    pytest.param({"num_experts": None}, BadCall, f"{NAME}: num_experts is None", id="experts unknown"),
    pytest.param({"expert_alignment": 0}, BadCall, f"{NAME}: expert_alignment is 0", id="alignment"),
    pytest.param({"do_zero_padding": True}, BadCall, f"{NAME}: do_zero_padding needs", id="padding of nothing"),
    pytest.param({"handle": 3}, BadCall, f"{NAME}: handle is an int", id="no handle"),
    pytest.param(
        {"cumulative_local_expert_recv_stats": torch.zeros(3)},
        ShapeMismatch,
        f"{NAME}: cumulative_local_expert",
        id="statistics of other experts",
    ),
]


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize(("changes", "error", "text"), FAULTS)
def test_dispatch_fault(ranks: Ranks, changes: Any, error: type[Exception], text: str, first: bool) -> None:
    ranks.run(check_dispatch_fault, next(i for i, each in enumerate(FAULTS) if each.values[0] is changes), first)


def check_dispatch_fault(context: RankContext, index: int, first: bool) -> None:
    changes, error, text = FAULTS[index].values
    problem = problem_of(CASE, context)
    buffer = made(context)
    good = arguments(problem, context)
    if not first:
        buffer.dispatch(**good)
    bad = dict(good)
    if context.rank == 0:
        bad |= {name: change(good[name]) if callable(change) else change for name, change in changes.items()}
    fails(context, 0, error, text, lambda: buffer.dispatch(**bad))
    buffer.dispatch(**good)


CACHED_FAULTS: list[Any] = [
    pytest.param({"do_cpu_sync": True}, f"{NAME}: do_cpu_sync=True with a handle", id="host read"),
    pytest.param({"do_expand": True}, f"{NAME}: do_expand is True, the handle has False", id="another form"),
    pytest.param({"num_experts": 3}, f"{NAME}: num_experts is 3, the handle has", id="other experts"),
    pytest.param({"num_max_tokens_per_rank": 99}, f"{NAME}: num_max_tokens_per_rank is 99", id="another M"),
    pytest.param({"expert_alignment": 128}, f"{NAME}: expert_alignment is 128, the handle has 1", id="alignment"),
    pytest.param({"topk_idx": torch.zeros(1, 1).long()}, f"{NAME}: a handle is given", id="ids"),
]


@pytest.mark.parametrize(("changes", "text"), CACHED_FAULTS)
def test_cached_fault(ranks: Ranks, changes: Any, text: str) -> None:
    skip_where_kernels_tell(ranks)
    ranks.run(check_cached_fault, next(i for i, each in enumerate(CACHED_FAULTS) if each.values[0] is changes))


def check_cached_fault(context: RankContext, index: int) -> None:
    changes, text = CACHED_FAULTS[index].values
    problem = problem_of(CASE, context)
    buffer = made(context)
    given = arguments(problem, context)
    handle = buffer.dispatch(**given)[3]
    good = {"x": given["x"], "handle": handle}
    bad = good | changes if context.rank == 0 else good
    fails(context, 0, BadCall, text, lambda: buffer.dispatch(**bad))
    buffer.dispatch(**good)


COMBINE = "ElasticBuffer.combine"
COMBINE_FAULTS: list[Any] = [
    pytest.param({"x": lambda x: x[:-1]}, ShapeMismatch, f"{COMBINE}: x is", id="few rows"),
    pytest.param({"handle": lambda h: None}, BadCall, f"{COMBINE}: handle is a NoneType", id="no handle"),
    pytest.param({"topk_weights": lambda w: w[1:]}, ShapeMismatch, f"{COMBINE}: topk_weights is", id="few weights"),
    pytest.param({"bias": lambda b: b.float()}, DtypeMismatch, f"{COMBINE}: bias is", id="bias of float32"),
]


@each_form
@pytest.mark.parametrize(("changes", "error", "text"), COMBINE_FAULTS)
def test_combine_fault(ranks: Ranks, changes: Any, error: type[Exception], text: str, expanded: bool) -> None:
    skip_where_kernels_tell(ranks)
    index = next(i for i, each in enumerate(COMBINE_FAULTS) if each.values[0] is changes)
    ranks.run(check_combine_fault, index, expanded)


def check_combine_fault(context: RankContext, index: int, expanded: bool) -> None:
    changes, error, text = COMBINE_FAULTS[index].values
    problem = problem_of(replace(CASE, tokens=(6, 2, 3, 5), unused=0.0), context)
    buffer = made(context)
    given = arguments(problem, context)
    x, _, weights, handle, _ = buffer.dispatch(**given, do_expand=expanded)
    good = {"x": x, "handle": handle, "topk_weights": weights, "bias": given["x"].clone()}
    bad = dict(good)
    if context.rank == 0:
        bad |= {name: change(good[name]) for name, change in changes.items()}
    fails(context, 0, error, text, lambda: buffer.combine(**bad))
    buffer.combine(**good)


@pytest.mark.slow
def test_growth_beside_a_fault_ends() -> None:
    """A rank that needs more room waits for one whose input is bad, which never comes: not for long, and by name.

    The wait leaves the process group out of step, so the ranks are for this test alone.
    """
    with RankPool(2) as pool:
        pool.run(check_growth_beside_a_fault, limit_s=100.0)


def check_growth_beside_a_fault(context: RankContext) -> None:
    buffer = deep_ep.ElasticBuffer(context.group, num_gpu_timeout_secs=1)
    buffer.dispatch(**arguments(problem_of(CASE, context), context))
    given = arguments(problem_of(replace(CASE, tokens=(6, 90)), context), context)
    if context.rank == 0:
        with pytest.raises(DtypeMismatch, match="topk_idx is"):
            buffer.dispatch(**given | {"topk_idx": given["topk_idx"].int()})
        return
    began = time.monotonic()
    with pytest.raises((PeerTimeout, PeerError), match=r"ElasticBuffer\.dispatch: .*rank"):
        buffer.dispatch(**given)
    assert time.monotonic() - began < 20


# -- what clients ask for ---------------------------------------------------------------------------------------


@on_ranks
def test_what_clients_ask_for(context: RankContext) -> None:
    buffer = deep_ep.ElasticBuffer(
        group=context.group,
        num_max_tokens_per_rank=64,
        hidden=128,
        num_topk=8,
        use_fp8_dispatch=True,
        allow_hybrid_mode=False,
        num_cpu_timeout_secs=1800,
        num_gpu_timeout_secs=1800,
        explicitly_destroy=True,
    )
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint(context.group, 64, 128, num_topk=8, use_fp8_dispatch=True)
    assert buffer.num_bytes == hint > 0
    assert (buffer.num_ranks, buffer.rank_idx) == (context.num_ranks, context.rank)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, context.num_ranks)
    assert buffer.get_physical_domain_size() == deep_ep.get_physical_domain_size(context.group)
    assert buffer.get_logical_domain_size() == deep_ep.get_logical_domain_size(context.group, allow_hybrid_mode=False)
    assert buffer.get_theoretical_num_sms(256, 8) > 0
    assert buffer.get_theoretical_num_qps(24) > 0
    assert buffer.num_allocated_qps == 0
    assert isinstance(buffer.capture(), deep_ep.EventHandle)
    buffer.barrier(use_comm_stream=True, with_cpu_sync=True, sequential=False)
    buffer.destroy()
    with pytest.raises(NotServed, match="ElasticBuffer: num_cpu_bytes is not served"):
        deep_ep.ElasticBuffer(context.group, num_cpu_bytes=1)
