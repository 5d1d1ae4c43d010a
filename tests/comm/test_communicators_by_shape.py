"""Communicators that grow, below a layer: its several calls end alike on all ranks where one of them needs more room.

The tests of ``tokenloom.compat.deep_ep`` have single calls. On the emulator and on GPUs these run on backend "nvlink".
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.on_ranks import on_ranks
from tokenloom.backends import registry
from tokenloom.backends.seam import Strategy
from tokenloom.comm.communicators_by_shape import UNKNOWN, CommShape, Communicators
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.telling import Telling
from tokenloom.training.pieces import RunOptions
from tokenloom.training.routed_experts import routed_experts

EMULATED = True

EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 32, 16, 2
BATCHES = ((3,), (2, 9), (40, 1), (0, 17), (1, 0), (65, 64))
"""Tokens of rank r in each step: item r modulo its length."""


def make(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids, weights and the gradient of the output of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = BATCHES[step][rank % len(BATCHES[step])]
    x, grad = (torch.randn(tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    weights, ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K)
    return x, ids, weights, grad


def dense(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """All experts on all tokens, in float64."""
    gate, up = torch.einsum("th,eih->tei", x, w1).chunk(2, -1)
    y = torch.einsum("tei,ehi->teh", functional.silu(gate) * up, w2)
    return (y.gather(1, ids[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)


@on_ranks
def test_a_layer_whose_batches_grow(context: RankContext) -> None:
    """All ranks make one larger communicator, also where this rank has room; nobody makes one twice.

    Forward and backward of growing batches, then without gradients, each beside all experts on all tokens.
    """
    dtype, device = torch.bfloat16, context.device
    generator = torch.Generator().manual_seed(7)
    full = [
        torch.randn(EXPERTS, *shape, generator=generator).to(dtype) for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    ]
    count = EXPERTS // context.num_ranks
    local = slice(context.rank * count, (context.rank + 1) * count)
    own = [each[local].to(device).requires_grad_() for each in full]
    communicators = Communicators(context.group, dict)
    options, shape = RunOptions(Strategy()), CommShape(EXPERTS, HIDDEN, TOP_K)
    rooms = []
    for step in range(len(BATCHES)):
        wide = [each.double().requires_grad_() for each in full]
        wanted = []
        for rank in range(context.num_ranks):
            x, ids, weights, grad = make(step, rank, dtype)
            x = x.double().requires_grad_()
            out = dense(x, ids, weights.double(), *wide)
            out.backward(grad.double())
            wanted.append((out.detach(), x.grad))
        x, ids, weights, grad = (each.to(device) for each in make(step, context.rank, dtype))
        x.requires_grad_()

        def call(comm, given=(x, ids, weights)):  # type: ignore[no-untyped-def]
            return routed_experts(comm, options, *given, *own)

        out = communicators.run(shape, len(x), device, call)
        for each in own:
            each.grad = None
        out.backward(grad)
        with torch.no_grad():
            again = communicators.run(shape, len(x), device, call)
        assert torch.equal(again, out)
        found = [out, x.grad, *(each.grad for each in own)]
        expected = [*wanted[context.rank], *(each.grad[local] for each in wide if each.grad is not None)]
        for got, want in zip(found, expected, strict=True):
            limit = 0.03 * (1e-3 + want.abs().amax().item() if want.numel() else 0.0)  # bfloat16, three roundings
            torch.testing.assert_close(got.detach().double().cpu(), want, rtol=0, atol=limit)
        rooms.append(communicators.all()[0].plan.max_tokens_per_rank)
    most = [max(BATCHES[step][rank % len(BATCHES[step])] for rank in range(context.num_ranks)) for step in range(6)]
    assert rooms == [1 << (max(most[: step + 1]) - 1).bit_length() for step in range(6)]
    communicators.close()


@on_ranks("four")
def test_rows_of_a_width_have_a_communicator(context: RankContext) -> None:
    """Whose backend may have made its memory for them."""
    shape, made = CommShape(EXPERTS, HIDDEN, TOP_K), []
    communicators = Communicators(context.group, dict)
    wanted: list[Any] = []
    probe = registry.probe
    with mock.patch.object(registry, "probe", lambda request: wanted.append(request.dtype) or probe(request)):
        for wide in (None, torch.float32, torch.float64):
            communicators.run(shape._replace(wide=wide), 4, context.device, made.append)
    assert wanted == [None, torch.float32, torch.float64]
    assert len(set(made)) == 3
    communicators.close()


def check_a_fault_beside_growth(context: RankContext, needs_room: int, faulty: int) -> None:
    needs_room, faulty = needs_room % context.num_ranks, faulty % context.num_ranks
    communicators = Communicators(context.group, lambda: {"timeout_s": 20.0, "checked": True})

    def step(tokens: int, expert_id: int) -> torch.Tensor:
        x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16, device=context.device)
        ids = torch.full((tokens, TOP_K), expert_id, device=context.device)

        def call(comm: tl.Communicator) -> torch.Tensor:
            routed = comm.dispatch(x, ids, layout="expert")
            return comm.combine(routed.tokens, routed, weighted=False)

        return communicators.run(CommShape(EXPERTS, HIDDEN, TOP_K), tokens, context.device, call)

    for most in (5, 40):
        tokens = most if context.rank == needs_room else 3
        assert (step(3, 1) == TOP_K).all()
        (before,) = communicators.all()
        with pytest.raises(tl.InvalidExpertId if context.rank == faulty else tl.PeerError) as told:
            step(tokens, EXPERTS if context.rank == faulty else 0)
        if isinstance(told.value, tl.PeerError):
            assert told.value.rank == faulty
        assert communicators.all() == [before], "nobody makes a larger one"
        assert len(step(tokens, 0)) == tokens
        assert communicators.all()[0].plan.max_tokens_per_rank >= most
    communicators.close()


@pytest.mark.parametrize(("needs_room", "faulty"), [(0, -1), (-1, 0)])
def test_a_fault_comes_before_growth(ranks: Ranks, needs_room: int, faulty: int) -> None:
    """All hear of the fault, so that nobody waits for the rank that has it to grow; the next call grows."""
    if ranks.num_ranks == 1:
        pytest.skip("one rank has one or the other")
    ranks.run(check_a_fault_beside_growth, needs_room, faulty)


SMALL, WIDE = CommShape(EXPERTS, HIDDEN, TOP_K), CommShape(EXPERTS, 2 * HIDDEN, TOP_K)
MORE_EXPERTS = SMALL._replace(num_experts=2 * EXPERTS)
CHECKS = {  # shapes in use, shape of the call and most tokens, and what the rank with the fault knows of the shape
    "the first call": ([], SMALL, 3, UNKNOWN),
    "growth": ([SMALL], SMALL, 40, SMALL),
    "growth of another one than the last": ([SMALL, WIDE], SMALL, 40, SMALL),
    "growth of one by its width": ([SMALL, WIDE], SMALL, 40, CommShape(0, HIDDEN, None)),
    "growth of the last one": ([WIDE, SMALL], SMALL, 40, UNKNOWN),
    "a new width": ([SMALL], WIDE, 3, WIDE),
    "a new shape of a width": ([SMALL, WIDE], MORE_EXPERTS, 3, MORE_EXPERTS),
}


@pytest.mark.parametrize("name", CHECKS)
@on_ranks
def test_a_fault_of_a_check_beside_growth(context: RankContext, name: str) -> None:
    """The other ranks are about to make a communicator: all raise at once in this call, and none makes one before."""
    before, shape, most, guess = CHECKS[name]
    bad = context.num_ranks - 1
    communicators = Communicators(context.group, lambda: {"timeout_s": 20.0, "open_timeout_s": 20.0, "checked": True})

    def step(shape: CommShape, tokens: int) -> None:
        x = torch.ones(tokens, shape.hidden, dtype=torch.bfloat16, device=context.device)
        ids = torch.zeros(tokens, TOP_K, dtype=torch.int64, device=context.device)
        communicators.run(shape, tokens, context.device, lambda comm: comm.dispatch(x, ids, layout="expert"))

    def check() -> None:
        with communicators.report_faults_of(context.device, shape=guess):
            raise tl.InvalidArgument("no such option")

    for each in before:
        step(each, 3)
    made, began = communicators.all(), time.monotonic()
    with pytest.raises(tl.InvalidArgument if context.rank == bad else tl.PeerError, match="no such option") as told:
        check() if context.rank == bad else step(shape, most if context.rank == 0 else 3)
    assert time.monotonic() - began < 10.0
    if isinstance(told.value, tl.PeerError):
        assert told.value.rank == bad
    assert communicators.all() == made
    step(shape, most if context.rank == 0 else 3)
    assert communicators.all()[-1 if shape not in before else before.index(shape)].plan.max_tokens_per_rank >= most
    communicators.close()


def test_a_new_shape_is_announced_where_its_faults_are_told() -> None:
    """On backend nvlink a communicator hears of its own calls alone."""
    communicators, device = Communicators(mock.Mock(), dict), torch.device("cpu")
    for shape in (SMALL, WIDE):
        communicators._use(shape, mock.Mock(name=str(shape)))
    small, told = communicators._last_of[None, HIDDEN], []

    def announce(upcoming: Any) -> Any:
        told.append(upcoming)
        raise ConnectionError

    small.engine.sequence = announce  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        communicators.run(MORE_EXPERTS, 3, device, mock.Mock())
    with pytest.raises(ConnectionError), communicators.report_faults_of(device, shape=MORE_EXPERTS):
        raise tl.InvalidArgument("no such option")
    assert [each.name for each in told] == ["dispatch", "dispatch"]


@pytest.mark.parametrize("knows", [False, True], ids=["before the first call", "later"])
def test_an_interrupted_check_ends_the_group(knows: bool) -> None:
    """The others wait in the call, or in the meeting before the first one, for a rank whose program may end."""
    communicators, comm = Communicators(mock.Mock(), dict), mock.MagicMock()
    ranks = mock.Mock()
    comm.engine.sequence = lambda upcoming: Telling(mock.Mock(), ranks.abort)
    if knows:
        communicators._use(SMALL, comm)
    ranks.whole = communicators._meeting = ranks
    interruption = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), communicators.report_faults_of(torch.device("cpu")):
        raise interruption
    ranks.abort.assert_called_once_with(interruption)
