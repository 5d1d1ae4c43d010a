"""deep_ep between nodes: what its layouts and handles say there, and the same bits as on one node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.compat.deep_ep.cases import CASE, finite, laid_out, problem_of, rows_to_combine
from tests.support.cases import BF16, FP32, same_bits, same_bytes
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.config import nodes_of
from tokenloom.compat.deep_ep.faults import BadCall, NotServed
from tokenloom.errors import ShapeMismatch
from tokenloom.runtime.processes import RankContext


@contextmanager
def nodes_of_two() -> Iterator[None]:
    deep_ep.Buffer.set_ranks_per_node(2)
    try:
        yield
    finally:
        deep_ep.Buffer.set_ranks_per_node(None)


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "nodes"),
    [(4, None, 1), (8, None, 1), (16, None, 2), (64, None, 8), (12, None, 1), (4, 2, 2), (4, 4, 1), (6, 4, 1)],
)
def test_nodes_that_clients_count_with(num_ranks: int, ranks_per_node: int | None, nodes: int) -> None:
    """As upstream counts them, where nobody says: groups over 8 are nodes of 8. What does not divide is told later."""
    assert nodes_of(num_ranks, ranks_per_node) == nodes


@on_ranks("four")
def test_normal_mode(context: RankContext) -> None:
    """Layout, dispatch, handle, a cached dispatch, and combine with weights, as upstream's own test looks at them."""
    problem, me = finite(problem_of(CASE, context)), context.rank
    wanted, ids = problem.dispatched("token"), problem.topk_ids[me]
    with nodes_of_two():
        buffer = deep_ep.Buffer(context.group, 1 << 20, 1 << 20)
    given = laid_out(buffer, problem, context)
    on_nodes = torch.stack([((ids // (2 * CASE.experts_per_rank) == node) & (ids >= 0)).any(1) for node in (0, 1)], 1)
    same_bytes(given["num_tokens_per_rdma_rank"], on_nodes.sum(0).int(), "num_tokens_per_rdma_rank")

    for dispatch in (buffer.dispatch, buffer.internode_dispatch):
        x, recv_ids, weights, counts, handle, _ = dispatch(**given)
        want = wanted[me]
        same_bytes(x, want.tokens, "recv_x")
        same_bytes(recv_ids, want.topk_ids, "recv_topk_idx")
        same_bytes(weights, want.topk_weights, "recv_topk_weights")
        assert counts == want.expert_counts
    assert {comm.backend for comm in buffer.runtime.all()} == {"network"}
    assert len(handle) == 10
    same_bytes(handle[0], given["is_token_in_rank"], "is_token_in_rank")
    same_bytes(handle[-4], torch.tensor(want.source_counts).cumsum(0).int(), "recv_gbl_rank_prefix_sum")
    assert [list(handle[part].shape) for part in (1, 2, 3, 5)] == [[2, 10], [4, 10], [2, 10], [4, 10]]
    heads = handle[8]
    for node in (0, 1):
        assert heads[:, node][heads[:, node] >= 0].tolist() == list(range(int(on_nodes[:, node].sum())))
    same_bytes(heads >= 0, on_nodes, "send_rdma_head")
    for name, part in (("recv_rdma_rank_prefix_sum", 4), ("recv_src_meta", 7), ("send_nvl_head", 9)):
        with pytest.raises(NotServed, match=name):
            _ = handle[part]

    ys = [rows_to_combine(each.tokens, rank) for rank, each in enumerate(wanted)]
    grads = [rows_to_combine(each.topk_ids, rank, FP32) for rank, each in enumerate(wanted)]
    outs = reference.combine(problem.plan, ys, wanted, problem.topk_ids, None)
    homes = reference.combine_weights(problem.plan, grads, wanted, problem.topk_ids)
    for combine in (buffer.combine, buffer.internode_combine):
        out, home, _ = combine(ys[me], handle, grads[me])
        same_bits(out, outs[me], "combined_x")
        same_bits(home, homes[me], "combined_topk_weights")
    again = buffer.internode_dispatch(given["x"] * 2, handle=handle)[0]
    same_bytes(again, 2 * want.tokens, "recv_x, cached")


@on_ranks("four")
def test_what_is_refused(context: RankContext) -> None:
    """Counts for other nodes, and calls between nodes on one."""
    problem = problem_of(CASE, context)
    with nodes_of_two():
        buffer = deep_ep.Buffer(context.group)
    given = laid_out(buffer, problem, context)
    with pytest.raises(ShapeMismatch, match=r"Buffer\.dispatch: num_tokens_per_rdma_rank is"):
        buffer.dispatch(**given | {"num_tokens_per_rdma_rank": torch.zeros(4, dtype=torch.int32)})
    one = deep_ep.Buffer(context.group)
    assert laid_out(one, problem, context)["num_tokens_per_rdma_rank"] is None
    handle = one.dispatch(**laid_out(one, problem, context))[4]
    assert len(handle) == 6
    with pytest.raises(BadCall, match=r"Buffer\.internode_dispatch: all ranks are on one node"):
        one.internode_dispatch(**given)
    with pytest.raises(BadCall, match=r"Buffer\.internode_combine: all ranks are on one node"):
        one.internode_combine(torch.zeros(1, 128), handle)


@on_ranks("four")
def test_other_modes(context: RankContext) -> None:
    """Low latency and ElasticBuffer: the same bits as on one node, with a row per node on the network."""
    problem = finite(problem_of(CASE, context))
    x, ids, weights = problem.arguments(context)
    found = []
    for ranks_per_node in (2, None):
        deep_ep.Buffer.set_ranks_per_node(ranks_per_node)
        try:
            buffer = deep_ep.Buffer(context.group, 0, 1 << 20, low_latency_mode=True)
            elastic = deep_ep.ElasticBuffer(context.group, num_max_tokens_per_rank=8, hidden=128)
        finally:
            deep_ep.Buffer.set_ranks_per_node(None)
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, problem.plan.num_experts, use_fp8=False)
        used: list[Any] = [rows[local, :count] for local, count in enumerate(counts.tolist())]
        out = buffer.low_latency_combine(rows, ids, weights, handle)[0]
        got = elastic.dispatch(x, ids, weights, num_experts=problem.plan.num_experts, num_max_tokens_per_rank=8)
        home = elastic.combine(rows_to_combine(got[0], context.rank), got[3])[0]
        found.append([*used, counts, out, got[0], got[1], got[2], home])
        comms = [*buffer.runtime.all(), *elastic.runtime.all()]
        assert {comm.backend for comm in comms} == {"network" if ranks_per_node else "collective"}
    assert found[0][-1].dtype == BF16
    for ours, theirs in zip(*found, strict=True):
        same_bytes(ours, theirs, "as on one node")
