"""``HybridEPBuffer`` against the reference, as Megatron-Core and torchtitan call it."""

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
    problem_of,
    rows_to_combine,
    skip_where_kernels_tell,
)
from tests.conftest import Ranks
from tests.support.cases import FP8, FP32, Case, Problem, same_bits, same_bytes
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.faults import BadCall, NotServed
from tokenloom.compat.deep_ep.hybrid_ep_buffer import _weights, indices_to_map
from tokenloom.errors import CapacityOverflow, DtypeMismatch, ShapeMismatch
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)
EMULATED = True
"""The emulator runs these tests by the kernels of backend "nvlink"."""

ALIGNMENT = 4


def made(context: RankContext, problem: Problem) -> deep_ep.HybridEPBuffer:
    plan = problem.plan
    return deep_ep.HybridEPBuffer(
        group=context.group,
        hidden_dim=plan.hidden,
        max_num_of_tokens_per_rank=4,
        num_local_experts=plan.experts_per_rank,
        use_fp8=False,
        num_sms_dispatch_api=16,
        num_sms_combine_api=16,
    )


def sorted_routes(problem: Problem) -> Problem:
    """The same routes with ids in ascending order, each once, and -1 last: what a map can say."""
    assert problem.topk_weights is not None
    ids, weights = [], []
    for each, weight in zip(problem.topk_ids, problem.topk_weights, strict=True):
        ascending = each.sort(1).values
        for row in ascending:
            row[1:][row[1:] == row[:-1].clone()] = -1
        order = torch.where(ascending < 0, 10**6, ascending).argsort(1)
        ids.append(ascending.gather(1, order))
        weights.append(weight.gather(1, order))
    return replace(problem, topk_ids=ids, topk_weights=weights)


def maps_of(problem: Problem, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_map and probs, by loops."""
    ids = problem.topk_ids[rank]
    assert problem.topk_weights is not None
    shape = len(ids), problem.plan.num_experts
    routing_map, probs = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    for token, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                routing_map[token, expert], probs[token, expert] = True, problem.topk_weights[rank][token, k]
    return routing_map, probs


def routes(problem: Problem, context: RankContext, by_map: bool) -> dict[str, Any]:
    x, ids, weights = problem.arguments(context)
    if not by_map:
        return {"hidden": x, "topk_idx": ids, "topk_weights": weights}
    routing_map, probs = maps_of(problem, context.rank)
    return {"hidden": x, "routing_map": routing_map.to(context.device), "probs": probs.to(context.device)}


def row_probs(problem: Problem, want: reference.Routed) -> torch.Tensor:
    found = torch.zeros(len(want.tokens))
    assert problem.topk_weights is not None
    for (source, token, *k), place in want.rows.items():
        found[place] = problem.topk_weights[source][token, k[0]]
    return found


@on_ranks
def test_indices_to_map(context: RankContext) -> None:
    problem = problem_of(CASE, context)
    _, ids, weights = problem.arguments(context)
    routing_map, probs = indices_to_map(ids, weights, len(ids), problem.plan.num_experts)
    want_map, want_probs = maps_of(problem, context.rank)
    same_bytes(routing_map, want_map, "routing_map")
    same_bytes(probs, want_probs, "probs")
    assert indices_to_map(ids, None, len(ids), problem.plan.num_experts)[1] is None
    num_experts = problem.plan.num_experts
    found = indices_to_map(torch.where(ids < 0, num_experts + 7, ids), weights, len(ids), num_experts)
    same_bytes(found[0], want_map, "routing_map, where ids that are too big are no routes")
    same_bytes(found[1], want_probs, "probs")
    with pytest.raises(BadCall, match="indices_to_map: topk_idx is"):
        indices_to_map(ids, weights, len(ids) + 1, problem.plan.num_experts)


def test_probs_of_ids_that_are_too_big() -> None:
    """Kernels take them for no routes. Their probs, which nobody reads, are no fault of the GPU either."""
    probs, ids = torch.tensor([[0.25, 0.75]]), torch.tensor([[1, 2, -1]])
    found = _weights(ids, None, probs, 2, torch.device("cpu"))
    assert found is not None
    assert found[0, 0] == 0.75


@on_ranks
@pytest.mark.sampled(4)
@each_case
@pytest.mark.parametrize("by_map", [True, False], ids=["maps", "ids"])
@pytest.mark.parametrize("alignment", [None, ALIGNMENT])
def test_dispatch_and_combine(context: RankContext, case: Case, by_map: bool, alignment: int | None) -> None:
    """Rows, probs, counts; sums of rows and dense probs; other rows and probs to the same places."""
    problem, me = sorted_routes(finite(problem_of(case, context))), context.rank
    plan = problem.plan
    wants = problem.dispatched("expert", alignment=alignment or 1)
    want = wants[me]
    buffer = made(context, problem)
    given = routes(problem, context, by_map)
    rows, probs, scales, counts, handle = buffer.dispatch_with_permute(
        **given,
        scaling_factor=None,
        num_of_experts_per_rank=plan.experts_per_rank,
        pad_multiple=alignment,
        num_permuted_tokens=None,
        non_blocking=False,
        fuse_permute_dispatch=False,
        num_of_tokens_per_rank=max(1, *map(len, problem.xs)),
    )
    same_bytes(rows, want.tokens, "rows")
    same_bytes(probs, row_probs(problem, want), "probs")
    assert scales is None
    same_bytes(counts, torch.tensor(aligned(want.expert_counts, alignment or 1)), "tokens_per_expert")
    assert not counts.is_cuda
    assert len(handle) == 12
    assert handle[-1].tolist() == handle[10].tolist() == [0], "where programs read the flag of an overflow"

    ys = [rows_to_combine(each.tokens, rank, case.dtype) for rank, each in enumerate(wants)]
    grads = [rows_to_combine(torch.empty(len(each.tokens)), rank, FP32) for rank, each in enumerate(wants)]
    for y, grad, each in zip(ys, grads, wants, strict=True):
        y[each.padding], grad[each.padding] = torch.nan, torch.nan
    arguments: dict[str, Any] = {"handle": handle, "pad_multiple": alignment}
    out, home = buffer.combine_with_unpermute(
        hidden=ys[me].to(context.device), probs=grads[me].to(context.device), **arguments
    )
    same_bits(out, reference.combine(plan, ys, wants, problem.topk_ids, None)[me], "combined")
    by_route = reference.combine_weights(plan, grads, wants, problem.topk_ids)
    want_home = maps_of(replace(problem, topk_weights=by_route), me)[1]
    same_bits(home, want_home, "combined probs")
    out, home = buffer.combine_with_unpermute(hidden=ys[me].to(context.device), **arguments)
    assert home is None

    assert problem.topk_weights is not None
    others = replace(
        problem, xs=[each * 2 for each in problem.xs], topk_weights=[each + 1 for each in problem.topk_weights]
    )
    again = others.dispatched("expert", alignment=alignment or 1)[me]
    columns = others.xs[me].t().contiguous().t().to(context.device)  # as gradients may lie
    rows, probs, _, counts, same = buffer.dispatch_with_permute(
        hidden=columns, scaling_factor=None, num_permuted_tokens=counts.sum(), **arguments
    )
    assert same is handle
    assert probs is None
    same_bytes(rows, again.tokens, "rows again")
    same_bytes(counts, torch.tensor(aligned(want.expert_counts, alignment or 1)), "tokens_per_expert")
    dense = maps_of(others, me)[1].to(context.device)
    rows, probs, *_ = buffer.dispatch_with_permute(hidden=columns, probs=dense, **arguments)
    same_bytes(probs, row_probs(others, again), "probs again")


@on_ranks
def test_without_host_read(context: RankContext) -> None:
    """A fixed number of rows, with counts on the device; what does not fit is an error, at the next call."""
    problem, me = sorted_routes(finite(problem_of(replace(CASE, unused=0.0), context))), context.rank
    wants = problem.dispatched("expert", alignment=ALIGNMENT)
    want, most = wants[me], max(len(each.tokens) for each in wants)
    buffer = made(context, problem)
    given = routes(problem, context, True)
    options = {"pad_multiple": ALIGNMENT, "non_blocking": True}
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(**given, num_permuted_tokens=most + 8, **options)
    assert len(rows) == len(probs) == most + 8
    same_bytes(rows[: want.num_rows], want.tokens, "rows")
    same_bytes(counts, torch.tensor(aligned(want.expert_counts, ALIGNMENT)), "tokens_per_expert")
    out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    outs = reference.combine(problem.plan, [each.tokens for each in wants], wants, problem.topk_ids, None)
    same_bits(out, outs[me], "combined")
    rows, *_ = buffer.dispatch_with_permute(hidden=given["hidden"] * 2, handle=handle, num_permuted_tokens=most + 8)
    same_bytes(rows[: want.num_rows], want.tokens * 2, "rows again")
    few = most - ALIGNMENT
    buffer.dispatch_with_permute(**given, num_permuted_tokens=few, **options)
    comms = buffer.runtime.all()
    assert len(comms) == 1
    with pytest.raises(CapacityOverflow, match="needs"):
        comms[0].check()


@on_ranks
@pytest.mark.parametrize("at_each_call", [False, True], ids=["buffer", "call"])
def test_room_without_host_read(context: RankContext, at_each_call: bool) -> None:
    """Nobody waits to hear that a rank needs more room, so there is as much as the client said, from the first call
    on: when it made the buffer, or at each call."""
    few, many = (
        sorted_routes(finite(problem_of(replace(CASE, tokens=tokens), context))) for tokens in ((2, 1), (1, 40))
    )
    local = few.plan.experts_per_rank
    buffer = deep_ep.HybridEPBuffer(context.group, few.plan.hidden, 1 if at_each_call else 40, local)
    options = {"num_permuted_tokens": 40 * CASE.top_k * context.num_ranks, "non_blocking": True}
    if at_each_call:
        options["num_of_tokens_per_rank"] = 40
    used = []
    for problem in (few, many):
        rows = buffer.dispatch_with_permute(**routes(problem, context, True), **options)[0]
        want = problem.dispatched("expert")[context.rank]
        same_bytes(rows[: want.num_rows], want.tokens, "rows")
        used += buffer.runtime.all()
    assert len(set(used)) == 1, "no rank made another communicator"


@on_ranks
def test_maps_that_grow(context: RankContext) -> None:
    """The most experts of a token, and the most tokens, are found as they come, on any rank first."""
    buffer = None
    kept = []
    for seed, (tokens, top_k) in enumerate((((2, 3), 1), ((1, 2), 4), ((0, 70), 2), ((5,), 8))):
        problem = finite(problem_of(replace(CASE, tokens=tokens, top_k=top_k, seed=seed, experts_per_rank=8), context))
        problem = sorted_routes(problem)
        buffer = buffer or made(context, problem)
        want = problem.dispatched("expert")[context.rank]
        given = routes(problem, context, True)
        if seed == 1 and context.rank:  # only rank 0 has tokens with so many experts
            given["routing_map"] &= given["routing_map"].cumsum(1) <= 1
            buffer.dispatch_with_permute(**given)
            continue
        rows, probs, _, _, handle = buffer.dispatch_with_permute(**given)
        if seed != 1:
            same_bytes(rows, want.tokens, "rows")
            same_bytes(probs, row_probs(problem, want), "probs")
            kept.append((problem, handle, rows))
    sizes = buffer.configurer.buffer_config
    assert sizes.max_num_of_tokens_per_rank >= (70 if context.num_ranks > 1 else 5)
    assert (sizes.hidden_dim, sizes.num_of_experts_per_rank) == (128, 8)
    for problem, handle, rows in kept:
        wants = problem.dispatched("expert")
        out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        outs = reference.combine(problem.plan, [each.tokens for each in wants], wants, problem.topk_ids, None)
        same_bits(out, outs[context.rank], "combined")


@on_ranks
def test_fp8(context: RankContext) -> None:
    problem = sorted_routes(problem_of(replace(CASE, dtype=FP8, hidden=256), context))
    want = problem.dispatched("expert", alignment=ALIGNMENT)[context.rank]
    buffer = made(context, problem)
    given = routes(problem, context, True)
    rows, scales = given.pop("hidden")
    payload = {"hidden": rows, "scaling_factor": scales, "use_fp8": True, "pad_multiple": ALIGNMENT}
    got, _, got_scales, _, handle = buffer.dispatch_with_permute(**given, **payload)
    same_bytes(got, want.tokens, "rows")
    same_bytes(got_scales, want.scales, "scales")
    got, _, got_scales, _, _ = buffer.dispatch_with_permute(**payload, handle=handle)
    same_bytes(got, want.tokens, "rows again")
    same_bytes(got_scales, want.scales, "scales again")


# -- bad input --------------------------------------------------------------------------------------------------

NAME = "HybridEPBuffer.dispatch_with_permute"
FAULTS: list[Any] = [
    pytest.param({"hidden": lambda x: x[:, 0]}, ShapeMismatch, f"{NAME}: x is", id="one dimension"),
    pytest.param({"routing_map": lambda m: m[:, 1:]}, ShapeMismatch, f"{NAME}: routing_map is", id="few experts"),
    pytest.param({"routing_map": lambda m: m.int()}, DtypeMismatch, f"{NAME}: routing_map is", id="map of integers"),
    pytest.param({"routing_map": lambda m: None}, BadCall, f"{NAME}: pass topk_idx or routing_map", id="no routes"),
    pytest.param({"probs": lambda p: p.bfloat16()}, DtypeMismatch, f"{NAME}: probs is", id="bf16 probs"),
    pytest.param({"use_fp8": True}, BadCall, f"{NAME}: use_fp8 is True", id="fp8 without fp8"),
    pytest.param({"non_blocking": True}, BadCall, f"{NAME}: num_permuted_tokens is None", id="no room"),
    pytest.param({"num_of_experts": 3}, BadCall, f"{NAME}: num_of_experts is 3", id="other experts"),
    pytest.param({"pad_multiple": 0}, BadCall, f"{NAME}: pad_multiple is 0", id="padding"),
    pytest.param(
        {"num_of_tokens_per_rank": 1}, BadCall, f"{NAME}: num_of_tokens_per_rank is 1, hidden has", id="few slots"
    ),
    pytest.param({"handle": (1,)}, BadCall, f"{NAME}: handle is a tuple", id="a handle of others"),
    pytest.param({"enable_something": 1}, NotServed, f"{NAME}: enable_something is not", id="unknown option"),
]


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize(("changes", "error", "text"), FAULTS)
def test_dispatch_fault(ranks: Ranks, changes: Any, error: type[Exception], text: str, first: bool) -> None:
    ranks.run(check_dispatch_fault, next(i for i, each in enumerate(FAULTS) if each.values[0] is changes), first)


def check_dispatch_fault(context: RankContext, index: int, first: bool) -> None:
    changes, error, text = FAULTS[index].values
    problem = problem_of(CASE, context)
    buffer = made(context, problem)
    good = routes(problem, context, True)
    if not first:
        buffer.dispatch_with_permute(**good)
    bad = dict(good)
    if context.rank == 0:
        bad |= {name: change(good[name]) if callable(change) else change for name, change in changes.items()}
    fails(context, 0, error, text, lambda: buffer.dispatch_with_permute(**bad))
    buffer.dispatch_with_permute(**good)


COMBINE = "HybridEPBuffer.combine_with_unpermute"
COMBINE_FAULTS: list[Any] = [
    pytest.param({"hidden": lambda x: x[:-1]}, ShapeMismatch, f"{COMBINE}: hidden is", id="few rows"),
    pytest.param({"probs": lambda p: p[1:]}, ShapeMismatch, f"{COMBINE}: probs is", id="few probs"),
    pytest.param({"handle": lambda h: None}, BadCall, f"{COMBINE}: handle is a NoneType", id="no handle"),
    pytest.param({"pad_multiple": lambda p: 16}, BadCall, f"{COMBINE}: pad_multiple is 16", id="other padding"),
]


@pytest.mark.parametrize(("changes", "error", "text"), COMBINE_FAULTS)
def test_combine_fault(ranks: Ranks, changes: Any, error: type[Exception], text: str) -> None:
    skip_where_kernels_tell(ranks)
    ranks.run(check_combine_fault, next(i for i, each in enumerate(COMBINE_FAULTS) if each.values[0] is changes))


def check_combine_fault(context: RankContext, index: int) -> None:
    changes, error, text = COMBINE_FAULTS[index].values
    problem = problem_of(replace(CASE, tokens=(6, 2, 3, 5), unused=0.0), context)
    buffer = made(context, problem)
    rows, probs, _, _, handle = buffer.dispatch_with_permute(**routes(problem, context, True), pad_multiple=2)
    good = {"hidden": rows, "probs": probs, "handle": handle, "pad_multiple": 2}
    bad = dict(good)
    if context.rank == 0:
        bad |= {name: change(good[name]) for name, change in changes.items()}
    fails(context, 0, error, text, lambda: buffer.combine_with_unpermute(**bad))
    buffer.combine_with_unpermute(**good)


@on_ranks
def test_calls_without_permute_are_refused(context: RankContext) -> None:
    buffer = made(context, problem_of(CASE, context))
    for name in ("dispatch", "combine"):
        with pytest.raises(NotServed, match=f"HybridEPBuffer.{name} is not served"):
            getattr(buffer, name)()


@on_ranks
def test_maps_with_too_many_experts(context: RankContext) -> None:
    buffer = deep_ep.HybridEPBuffer(context.group, 8, 4, 40)
    routing_map = torch.ones(1, 40 * context.num_ranks, dtype=torch.bool, device=context.device)
    with pytest.raises(NotServed, match="a token with"):
        buffer.dispatch_with_permute(hidden=torch.ones(1, 8, device=context.device), routing_map=routing_map)
