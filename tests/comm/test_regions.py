"""Calls in regions that run again, that are compiled, or that are received under another grad mode."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenloom as tl
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext

HIDDEN, TOKENS, TOP_K = 16, 5, 2


def make_comm(context: RankContext | None) -> tl.Communicator:
    sizes = {"num_experts": 4, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens_per_rank": 8}
    return tl.Communicator(None if context is None else context.group, **sizes)


@on_ranks("four")
@pytest.mark.parametrize("combines", [True, False])
def test_a_region_that_runs_again(context: RankContext, combines: bool) -> None:
    """It does so at the same place of backward on all ranks, also on those that compute nothing without rows."""
    comm = make_comm(context)
    scale, weights = torch.ones(HIDDEN, requires_grad=True), torch.ones(HIDDEN, HIDDEN, requires_grad=True)
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)  # all go to rank 0
    held: list[tl.Routed] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        routed = comm.dispatch(x * scale, ids, layout="token")
        held[:] = [routed]
        y = torch.tanh(routed.tokens @ weights) if routed.num_rows else routed.tokens
        return comm.combine(y, routed) if combines else y

    def rest(y: torch.Tensor) -> torch.Tensor:
        return y if combines else comm.combine(y, held[0])

    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    (wanted,) = torch.autograd.grad(rest(region(x)).sum(), x)
    (found,) = torch.autograd.grad(rest(checkpoint(region, x, use_reentrant=False)).sum(), x)
    assert torch.equal(found, wanted)
    comm.close()


@pytest.mark.parametrize("sent_with_grad", [True, False])
def test_a_bias_has_the_graph_of_the_first_half(sent_with_grad: bool) -> None:
    comm = make_comm(None)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    bias = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    ids = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % 4
    routed = comm.dispatch(x, ids)
    with torch.set_grad_enabled(sent_with_grad):
        pending = comm.send_combine(routed.tokens, routed, weighted=False, bias=bias)
    with torch.set_grad_enabled(not sent_with_grad):
        out = pending.receive()
    assert out.requires_grad == sent_with_grad
    if sent_with_grad:
        grads = torch.autograd.grad(out.sum(), (x, bias))
        assert torch.equal(grads[1], torch.ones_like(bias))
        assert torch.equal(grads[0], torch.full_like(x, TOP_K))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler hides it, if it is no error
def test_calls_break_the_graph() -> None:
    """The compiler goes around them: results and gradients are those without it."""
    comm = make_comm(None)
    ids, weights = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % 4, torch.rand(TOKENS, TOP_K)

    def program(x: torch.Tensor) -> torch.Tensor:
        routed = comm.dispatch(x * 2, ids, weights)
        pending = comm.send_combine(torch.tanh(routed.tokens), routed)
        return pending.receive() + 1

    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    out, compiled = program(x), torch.compile(program, backend="eager")(x)
    assert torch.equal(out, compiled)
    for found, wanted in zip(*(torch.autograd.grad(each.sum(), x) for each in (compiled, out)), strict=True):
        assert torch.equal(found, wanted)
