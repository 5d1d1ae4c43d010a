"""``Buffer`` in low-latency mode against the reference, as vLLM and SGLang call it in decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compat.deep_ep.cases import (
    CASE,
    fails,
    finite,
    laid_out,
    problem_of,
    rows_to_combine,
    skip_where_kernels_tell,
)
from tests.conftest import Ranks
from tests.support import emulator
from tests.support.cases import FP32, Case, Problem, same_bits, same_bytes
from tests.support.on_ranks import on_ranks
from tests.support.patience import with_late
from tokenloom import reference
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.faults import BadCall, NotServed
from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.ops.routing import packed
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)
EMULATED = True
"""The emulator runs these tests by the kernels of backend "nvlink"."""

DECODE = replace(CASE, to_quantise=True, hidden=256)
MOST = 8
"""M of these calls."""
CASES = [
    DECODE,
    replace(DECODE, name="no routes", pick="none"),
    replace(DECODE, name="no tokens", tokens=(0,)),
    replace(DECODE, name="as many as fit", tokens=(MOST,), pick="one rank", top_k=2),
]
FORMATS: list[Any] = [
    pytest.param({"use_fp8": False}, {}, id="bf16"),
    pytest.param({}, {"to_fp8": True, "scale_layout": "columns"}, id="fp8"),
    pytest.param(
        {"round_scale": True},
        {"to_fp8": True, "power_of_two_scales": True, "scale_layout": "columns"},
        id="fp8 round scales",
    ),
    pytest.param(
        {"round_scale": True, "use_ue8m0": True},
        {"to_fp8": True, "power_of_two_scales": True, "scale_layout": "packed"},
        id="fp8 packed",
    ),
]
MODES = ("", "async", "hook")


def finish(mode: str, event: deep_ep.EventOverlap, hook: Any) -> None:
    """What a client does until results are valid."""
    assert (hook is not None) == (mode == "hook")
    assert (event.event is not None) == (mode == "async")
    if hook is not None:
        hook()
    elif mode == "async":
        event.current_stream_wait()


def options_of(mode: str) -> dict[str, bool]:
    return {"async_finish": mode == "async", "return_recv_hook": mode == "hook"}


def same_places(got: torch.Tensor, want: torch.Tensor, counts: list[int], what: str) -> None:
    """The used places of each expert, bit for bit."""
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    for expert, count in enumerate(counts):
        same_bytes(packed(got[expert, :count]), packed(want[expert, :count]), what)


@on_ranks
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("options", "wanted"), FORMATS)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_dispatch_and_combine(
    context: RankContext, case: Case, options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """Rows, scales and their strides, counts, statistics, the handle; then weighted sums. In every mode."""
    problem, me, num_ranks = problem_of(case, context), context.rank, context.num_ranks
    plan, places = problem.plan, context.num_ranks * MOST
    wants = problem.dispatched("slots", capacity=places, **wanted)
    want = wants[me]
    ys = [rows_to_combine(each.tokens, rank) for rank, each in enumerate(wants)]
    for each, received in zip(ys, wants, strict=True):
        each.view(-1, plan.hidden)[received.padding] = torch.nan
    outs = reference.combine(plan, ys, wants, problem.topk_ids, problem.topk_weights)
    buffer = deep_ep.Buffer(context.group, 0, 1 << 20, low_latency_mode=True)
    stats = torch.full((plan.experts_per_rank,), 5, dtype=torch.int32, device=context.device)
    x, ids, weights = problem.arguments(context)
    for turn, mode in enumerate(MODES):
        recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, MOST, plan.num_experts, cumulative_local_expert_recv_stats=stats, **options, **options_of(mode)
        )
        finish(mode, event, hook)
        rows = recv_x
        if options.get("use_fp8", True):
            rows, scales = recv_x
            assert want.scales is not None
            assert scales.stride() == want.scales.stride()
            same_places(scales, want.scales, want.expert_counts, "scales")
        same_places(rows, want.tokens, want.expert_counts, "recv_x")
        same_bytes(counts, torch.tensor(want.expert_counts, dtype=torch.int32), "recv_count")
        same_bytes(stats, 5 + (turn + 1) * counts.cpu(), "statistics")
        check_handle(handle, want, num_ranks, problem)
        given = torch.full_like(x, torch.nan) if turn else None
        out, event, hook = buffer.low_latency_combine(
            ys[me].to(context.device), ids, weights, handle, out=given, **options_of(mode)
        )
        finish(mode, event, hook)
        assert given is None or out is given
        same_bits(out, outs[me], "combined_x")


def check_handle(handle: Any, want: reference.Routed, num_ranks: int, problem: Problem) -> None:
    sources, ranges, *numbers = handle
    assert numbers == [MOST, problem.plan.hidden, problem.plan.num_experts]
    assert want.slot_ranges is not None
    assert sources.dtype == torch.int32
    assert list(sources.shape) == list(want.tokens.shape[:2])
    for (_, token, _), place in want.rows.items():
        assert int(sources.flatten()[place]) == token
    expected = [[first << 32 | count for first, count in row] for row in want.slot_ranges]
    same_bytes(ranges, torch.tensor(expected, dtype=torch.int64), "layout_range")


@on_ranks
def test_two_micro_batches_in_turns(context: RankContext) -> None:
    """Two batches are under way at once, as in dual-batch overlap: hooks are called while the other is open."""
    problems = [finite(problem_of(replace(CASE, seed=seed, dtype=FP32), context)) for seed in (0, 1)]
    me, plan = context.rank, problems[0].plan
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True)
    sent = []
    for problem in problems:
        x, ids, _ = problem.arguments(context)
        sent.append(buffer.low_latency_dispatch(x, ids, MOST, plan.num_experts, use_fp8=False, return_recv_hook=True))
    home = []
    for problem, (recv_x, _, handle, _, hook) in zip(problems, sent, strict=True):
        assert hook is not None
        hook()
        _, ids, weights = problem.arguments(context)
        home.append(buffer.low_latency_combine(recv_x, ids, weights, handle, return_recv_hook=True))
    for problem, (out, _, hook) in zip(problems, home, strict=True):
        assert hook is not None
        hook()
        wants = problem.dispatched("slots", capacity=context.num_ranks * MOST)
        ys = [want.tokens for want in wants]
        outs = reference.combine(plan, ys, wants, problem.topk_ids, problem.topk_weights)
        same_bits(out, outs[me], "combined_x")


@on_ranks
@pytest.mark.parametrize("mode", MODES)
def test_a_third_live_result(context: RankContext, mode: str) -> None:
    """Upstream has room for two. Here results are the client's own: any number lives, and combines in any order."""
    problems = [finite(problem_of(replace(DECODE, seed=seed), context)) for seed in range(4)]
    me, plan, places = context.rank, problems[0].plan, context.num_ranks * MOST
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True)
    received, home = [], []
    for problem in problems:
        x, ids, _ = problem.arguments(context)
        recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, MOST, plan.num_experts, use_fp8=False, **options_of(mode)
        )
        finish(mode, event, hook)
        received.append((recv_x, counts, handle))
    wanted = [problem.dispatched("slots", capacity=places) for problem in problems]
    for problem, wants, (recv_x, counts, handle) in reversed(list(zip(problems, wanted, received, strict=True))):
        assert counts.tolist() == wants[me].expert_counts
        same_places(recv_x, wants[me].tokens, wants[me].expert_counts, "recv_x")
        _, ids, weights = problem.arguments(context)
        out, event, hook = buffer.low_latency_combine(recv_x, ids, weights, handle, **options_of(mode))
        finish(mode, event, hook)
        home.append(out)
    for problem, wants, out in zip(problems, wanted, reversed(home), strict=True):
        ys = [want.tokens for want in wants]
        outs = reference.combine(plan, ys, wants, problem.topk_ids, problem.topk_weights)
        same_bits(out, outs[me], "combined_x")


@on_ranks
def test_a_third_hook(context: RankContext) -> None:
    """Two calls may wait for their hooks. A third is refused by name, on all ranks alike, and all works on."""
    problem = finite(problem_of(DECODE, context))
    want = problem.dispatched("slots", capacity=context.num_ranks * MOST)[context.rank]
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True)
    x, ids, _ = problem.arguments(context)

    def send() -> Any:
        return buffer.low_latency_dispatch(
            x, ids, MOST, problem.plan.num_experts, use_fp8=False, return_recv_hook=True
        )

    sent = [send(), send()]
    with pytest.raises(
        InvalidArgument, match=r"Buffer\.low_latency_dispatch: the hook of a dispatch of 2 calls ago was not called"
    ):
        send()
    for number in range(3):
        recv_x, _, _, _, hook = sent[number] if number < 2 else send()
        hook()
        same_places(recv_x, want.tokens, want.expert_counts, "recv_x")


@on_ranks
def test_zero_copy(context: RankContext) -> None:
    """The experts' rows are written to the buffer's own room, which combine reads whatever x is."""
    problem, me = problem_of(DECODE, context), context.rank
    wants = problem.dispatched("slots", capacity=context.num_ranks * MOST)
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True)
    x, ids, weights = problem.arguments(context)
    _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, problem.plan.num_experts)
    ys = [rows_to_combine(want.tokens, rank) for rank, want in enumerate(wants)]
    room = buffer.get_next_low_latency_combine_buffer(handle)
    assert room.dtype == torch.bfloat16
    room.copy_(ys[me])
    out, _, _ = buffer.low_latency_combine(torch.zeros_like(room), ids, weights, handle, zero_copy=True)
    same_bits(out, reference.combine(problem.plan, ys, wants, problem.topk_ids, problem.topk_weights)[me], "out")


@on_ranks
def test_one_buffer_for_both_modes(context: RankContext) -> None:
    """SGLang has one for prefill and decode, cleans it between them, and its batches grow."""
    buffer = deep_ep.Buffer(context.group, 1 << 20, 1 << 20, low_latency_mode=True)
    for seed, most in enumerate((8, 3, 64)):
        tokens = min(most, 6), 0, 2
        problem = problem_of(replace(DECODE, tokens=tokens, seed=seed), context)
        rows = buffer.dispatch(**laid_out(buffer, problem, context))[0]
        same_bytes(rows, problem.dispatched("token")[context.rank].tokens, "recv_x")
        buffer.clean_low_latency_buffer(most, problem.plan.hidden, problem.plan.num_experts)
        x, ids, _ = problem.arguments(context)
        recv_x, counts, *_ = buffer.low_latency_dispatch(x, ids, most, problem.plan.num_experts, use_fp8=False)
        want = problem.dispatched("slots", capacity=context.num_ranks * most)[context.rank]
        assert counts.tolist() == want.expert_counts
        same_places(recv_x, want.tokens, want.expert_counts, "recv_x")


# -- bad input --------------------------------------------------------------------------------------------------

DISPATCH = "Buffer.low_latency_dispatch"
COMBINE = "Buffer.low_latency_combine"
FAULTS: list[Any] = [
    pytest.param({"x": lambda x: x.t()}, ShapeMismatch, f"{DISPATCH}: x has strides", id="strides of x"),
    pytest.param({"topk_idx": lambda t: t.int()}, DtypeMismatch, f"{DISPATCH}: topk_idx is", id="int32 ids"),
    pytest.param(
        {"num_max_dispatch_tokens_per_rank": 4}, ShapeMismatch, f"{DISPATCH}: x has 6 tokens", id="too many tokens"
    ),
    pytest.param({"num_experts": 5}, BadCall, f"{DISPATCH}: num_experts is 5", id="experts that ranks do not divide"),
    pytest.param({"use_ue8m0": True}, BadCall, f"{DISPATCH}: use_ue8m0 needs", id="packed scales of any size"),
    pytest.param({"return_recv_hook": True, "async_finish": True}, BadCall, f"{DISPATCH}: async_finish", id="both"),
    pytest.param({"use_nvfp4": True}, NotServed, f"{DISPATCH}: use_nvfp4 is not served", id="nvfp4"),
    pytest.param(
        {"dispatch_wait_recv_cost_stats": torch.zeros(4, dtype=torch.int64)},
        NotServed,
        f"{DISPATCH}: dispatch_wait_recv_cost_stats is not",
        id="wait statistics",
    ),
    pytest.param(
        {"cumulative_local_expert_recv_stats": torch.zeros(3)},
        ShapeMismatch,
        f"{DISPATCH}: cumulative_local_expert",
        id="statistics of other experts",
    ),
]


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize(("changes", "error", "text"), FAULTS)
def test_dispatch_fault(ranks: Ranks, changes: Any, error: type[Exception], text: str, first: bool) -> None:
    if not first:
        skip_where_kernels_tell(ranks)
    if ranks.num_ranks == 1 and "num_experts" in changes:
        pytest.skip("one rank divides any number of experts")
    ranks.run(check_dispatch_fault, next(i for i, each in enumerate(FAULTS) if each.values[0] is changes), first)


def check_dispatch_fault(context: RankContext, index: int, first: bool) -> None:
    changes, error, text = FAULTS[index].values
    problem = problem_of(DECODE, context)
    buffer = deep_ep.Buffer(context.group)
    x, ids, _ = problem.arguments(context)
    good: dict[str, Any] = {"x": x, "topk_idx": ids, "num_max_dispatch_tokens_per_rank": MOST}
    good |= {"num_experts": problem.plan.num_experts}
    if not first:
        buffer.low_latency_dispatch(**good)
    bad = dict(good)
    if context.rank == 0:
        bad |= {name: change(good[name]) if callable(change) else change for name, change in changes.items()}
    fails(context, 0, error, text, lambda: buffer.low_latency_dispatch(**bad))
    buffer.low_latency_dispatch(**good)


COMBINE_FAULTS: list[Any] = [
    pytest.param({"x": lambda x: x[:, 1:]}, ShapeMismatch, f"{COMBINE}: x is", id="few places"),
    pytest.param({"topk_idx": lambda t: t[:, 1:]}, ShapeMismatch, f"{COMBINE}: topk_idx is", id="few ids"),
    pytest.param({"topk_weights": lambda w: w.bfloat16()}, DtypeMismatch, f"{COMBINE}: topk_weights", id="bf16"),
    pytest.param({"handle": lambda h: None}, BadCall, f"{COMBINE}: handle is a NoneType", id="no handle"),
    pytest.param({"use_logfmt": lambda u: True}, NotServed, f"{COMBINE}: use_logfmt is not", id="logfmt"),
    pytest.param(
        {"return_recv_hook": lambda r: True, "async_finish": lambda a: True},
        BadCall,
        f"{COMBINE}: async_finish and return_recv_hook exclude each other",
        id="both",
    ),
    pytest.param(
        {"combine_wait_recv_cost_stats": lambda s: torch.zeros(4, dtype=torch.int64)},
        NotServed,
        f"{COMBINE}: combine_wait_recv_cost_stats is not",
        id="wait statistics",
    ),
    pytest.param({"overlap": lambda o: True}, NotServed, f"{COMBINE}: overlap is not", id="overlap of a fork"),
    pytest.param({"out": lambda o: torch.zeros(1, 1)}, ShapeMismatch, f"{COMBINE}: out is", id="out"),
]


@pytest.mark.parametrize(("changes", "error", "text"), COMBINE_FAULTS)
def test_combine_fault(ranks: Ranks, changes: Any, error: type[Exception], text: str) -> None:
    skip_where_kernels_tell(ranks)
    ranks.run(check_combine_fault, next(i for i, each in enumerate(COMBINE_FAULTS) if each.values[0] is changes))


def check_combine_fault(context: RankContext, index: int) -> None:
    changes, error, text = COMBINE_FAULTS[index].values
    problem = problem_of(DECODE, context)
    buffer = deep_ep.Buffer(context.group)
    x, ids, weights = problem.arguments(context)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, problem.plan.num_experts, use_fp8=False)
    good: dict[str, Any] = {"x": rows, "topk_idx": ids, "topk_weights": weights, "handle": handle}
    bad = dict(good)
    if context.rank == 0:
        bad |= {name: change(good.get(name)) for name, change in changes.items()}
    fails(context, 0, error, text, lambda: buffer.low_latency_combine(**bad))
    buffer.low_latency_combine(**good)


@on_ranks
def test_a_hook_comes_before_its_handle(context: RankContext) -> None:
    problem = problem_of(DECODE, context)
    buffer = deep_ep.Buffer(context.group)
    x, ids, weights = problem.arguments(context)
    _, _, handle, _, hook = buffer.low_latency_dispatch(x, ids, MOST, problem.plan.num_experts, return_recv_hook=True)
    rows = torch.zeros(problem.plan.experts_per_rank, context.num_ranks * MOST, 256, dtype=torch.bfloat16)
    if context.rank == 0:
        with pytest.raises(BadCall, match=r"low_latency_combine: the hook of this dispatch was not called"):
            buffer.low_latency_combine(rows.to(context.device), ids, weights, handle)
    else:
        with pytest.raises(Exception, match="low_latency_combine"):
            buffer.low_latency_combine(rows.to(context.device), ids, weights, handle)
    assert hook is not None
    hook()
    hook()  # as upstream's clients may
    buffer.low_latency_combine(rows.to(context.device), ids, weights, handle)


# -- what clients ask for ---------------------------------------------------------------------------------------


@on_ranks
def test_sizes_and_local_tensors(context: RankContext) -> None:
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True)
    by_name = {"num_max_dispatch_tokens_per_rank": 128, "hidden": 7168, "num_ranks": 8, "num_experts": 256}
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(**by_name)
    assert hint == deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 0
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    with pytest.raises(NotServed, match=r"get_local_buffer_tensor: size"):
        buffer.get_local_buffer_tensor(torch.int8, size=torch.Size([4]))


# -- ranks that are gone ----------------------------------------------------------------------------------------


@on_ranks
def test_masks_need_shrink(context: RankContext) -> None:
    buffer = deep_ep.Buffer(context.group)
    status = torch.zeros(context.num_ranks, dtype=torch.int32)
    for call in (
        lambda: buffer.low_latency_update_mask_buffer(0, True),
        lambda: buffer.low_latency_query_mask_buffer(status),
        lambda: buffer.low_latency_clean_mask_buffer(),
    ):
        with pytest.raises(RuntimeError, match="enable_shrink"):
            call()


def test_a_masked_rank(ranks: Ranks) -> None:
    """The others go on: its routes are left out of sums, nothing is awaited from it, and queries name it."""
    if ranks.num_ranks < 2:
        pytest.skip("one rank has nobody to mask")
    ranks.run(check_masked)


def check_masked(context: RankContext) -> None:
    problem, me, gone = (
        problem_of(replace(DECODE, tokens=(4, 3), unused=0.0), context),
        context.rank,
        context.num_ranks - 1,
    )
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True, enable_shrink=True)
    x, ids, weights = problem.arguments(context)
    arguments = (x, ids, MOST, problem.plan.num_experts)
    buffer.low_latency_combine(
        buffer.low_latency_dispatch(*arguments, use_fp8=False)[0],
        ids,
        weights,
        buffer.low_latency_dispatch(*arguments, use_fp8=False)[2],
    )
    if me == gone:
        return
    status = torch.full((context.num_ranks,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * context.num_ranks
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_update_mask_buffer(gone, True)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * gone + [1]
    rows, _, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
    left = replace(problem, xs=[*problem.xs[:-1], problem.xs[-1][:0]])
    kept = [torch.where(each // problem.plan.experts_per_rank == gone, -1, each) for each in problem.topk_ids]
    left = replace(
        left,
        topk_ids=[*kept[:-1], kept[-1][:0]],
        topk_weights=[*problem.topk_weights[:-1], problem.topk_weights[-1][:0]],
    )
    wants = left.dispatched("slots", capacity=context.num_ranks * MOST)
    outs = reference.combine(left.plan, [want.tokens for want in wants], wants, left.topk_ids, left.topk_weights)
    same_bits(out, outs[me], "combined_x")
    with pytest.raises(NotServed, match="cannot be unmasked"):
        buffer.low_latency_update_mask_buffer(gone, False)
    with pytest.raises(NotServed, match="cannot be unmasked"):
        buffer.low_latency_clean_mask_buffer()


def test_a_rank_that_does_not_come(ranks: Ranks) -> None:
    """It is masked by who waits for it, and its rows are absent; the call of the others goes on."""
    if ranks.num_ranks < 2 or ranks.device != "cpu" or emulator.ON:
        pytest.skip("needs two ranks over gloo")
    ranks.run(with_late, -1, check_late)


def check_late(context: RankContext) -> None:
    problem, me, gone = problem_of(DECODE, context), context.rank, context.num_ranks - 1
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True, enable_shrink=True)
    buffer._options["timeout_s"] = 1.0
    x, ids, weights = problem.arguments(context)
    arguments = (x, ids, MOST, problem.plan.num_experts)
    buffer.low_latency_dispatch(*arguments, use_fp8=False)
    if me == gone:
        return
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    status = torch.full((context.num_ranks,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * gone + [1]
    alive = [each if rank != gone else each[:0] for rank, each in enumerate(problem.topk_ids)]
    flat = torch.cat(alive).flatten()
    mine = flat[(flat >= 0) & (flat // problem.plan.experts_per_rank == me)] % problem.plan.experts_per_rank
    assert counts.tolist() == torch.bincount(mine, minlength=problem.plan.experts_per_rank).tolist()
    out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
    assert out.isfinite().all()


def test_a_rank_that_does_not_come_to_combine(ranks: Ranks) -> None:
    """Its rows are there, and the weights of the others are brought to theirs; tokens lose its routes alone."""
    if ranks.num_ranks < 2 or ranks.device != "cpu" or emulator.ON:
        pytest.skip("needs two ranks over gloo")
    ranks.run(with_late, -1, check_late_for_combine)


def check_late_for_combine(context: RankContext) -> None:
    problem, gone = problem_of(replace(DECODE, tokens=(3,)), context), context.num_ranks - 1
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True, enable_shrink=True)
    buffer._options["timeout_s"] = 1.0
    x, ids, weights = problem.arguments(context)
    _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, problem.plan.num_experts, use_fp8=False)
    ones = torch.ones(problem.plan.experts_per_rank, context.num_ranks * MOST, x.shape[1], dtype=x.dtype)
    for step in range(2):
        if context.rank == gone:
            return
        out, _, _ = buffer.low_latency_combine(ones, ids, weights, handle)
        kept = (ids >= 0) & (ids // problem.plan.experts_per_rank != gone)
        want = torch.where(kept, weights, 0).sum(1, keepdim=True).expand_as(out)
        torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02, msg=f"step {step}")
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, problem.plan.num_experts, use_fp8=False)
