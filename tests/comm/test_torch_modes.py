"""Calls under torch's modes and transforms, and tensors that are not plain memory: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import tokenloom as tl
from tests.support.cases import FP32, Case, each_backend, make_comm, make_problem, same_bits
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training.pieces import RunOptions
from tokenloom.training.routed_experts import routed_experts

pytestmark = pytest.mark.slow_on(1, 4)

CASE = Case("modes", "", tokens=(5, 0, 3), top_k=2, hidden=16, dtype=FP32, to_quantise=False)
LAYOUTS = ("expert", "token", "rank", "slots")


def arguments(context: RankContext) -> tuple[Any, Any, Any, Any]:
    """plan, then finite x, ids and weights."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    return problem.plan, x.nan_to_num(1, 1, 1), ids, weights


# -- inference mode between the halves ------------------------------------------------------------------------


@on_ranks
@each_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_comes_in_whatever_mode_it_is_received(context: RankContext, backend: str, layout: Any) -> None:
    """What is made in inference mode never has a graph, so the second half leaves it."""
    plan, x, ids, weights = arguments(context)
    with make_comm(context, backend, plan) as comm:
        grads = []
        for receives_in in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            leaf = x.clone().requires_grad_()
            pending = comm.send_dispatch(leaf, ids, weights, layout=layout)
            with receives_in():
                routed = pending.receive()
            sent = comm.send_combine(routed.tokens * 2, routed)
            with receives_in():
                out = sent.receive()
            assert not out.is_inference()
            grads += torch.autograd.grad(out.sum(), leaf)
        for grad in grads[1:]:
            same_bits(grad, grads[0].cpu(), "gradient of x")


@on_ranks
@each_backend
def test_halves_that_begin_in_inference_mode(context: RankContext, backend: str) -> None:
    """Tensors of inference mode cannot be written to outside, so the second half comes back to it."""
    plan, x, ids, weights = arguments(context)
    with make_comm(context, backend, plan) as comm:
        with torch.inference_mode():
            sent = comm.send_dispatch(x, ids, weights)
        routed = sent.receive()
        with torch.inference_mode():
            want = comm.combine(routed.tokens.clone(), routed)
            out = torch.empty_like(want)
            pending = comm.send_combine(routed.tokens.clone(), routed, out=out)
        assert pending.receive() is out
        same_bits(out, want.cpu(), "out")


# -- what calls refuse ----------------------------------------------------------------------------------------


def refuse_tangents(comm: tl.Communicator, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    routed = comm.dispatch(x, ids, weights)  # without tangents all is well
    y = routed.tokens.clone()
    comm.combine(y, routed)

    def dual(tensor: torch.Tensor) -> torch.Tensor:
        return forward_ad.make_dual(tensor, torch.ones_like(tensor))

    for call in (
        lambda: comm.dispatch(dual(x), ids, weights),
        lambda: comm.dispatch(x, ids, dual(weights)),
        lambda: comm.send_dispatch(dual(x), ids, weights),
        lambda: comm.combine(dual(y), routed),
        lambda: comm.dispatch_again(dual(x), routed),
    ):
        with pytest.raises(tl.NotDifferentiable, match="tangent"):
            call()
    again = comm.dispatch(x, ids, weights)
    comm.combine(again.tokens.clone(), again)


@on_ranks("four")
@pytest.mark.parametrize("backend", ["collective", "network"])
def test_tangents_are_not_lost_in_silence(context: RankContext, backend: str) -> None:
    """Rows arrived without their tangents, so forward-mode derivatives were zero."""
    plan, x, ids, weights = arguments(context)
    with make_comm(context, backend, plan) as comm:
        with pytest.raises(tl.InvalidArgument, match=r"torch\.func"):
            torch.func.jvp(lambda x: comm.dispatch(x, ids, weights).tokens, (x,), (torch.ones_like(x),))
        with forward_ad.dual_level():
            refuse_tangents(comm, x, ids, weights)


@on_ranks
@each_backend
@pytest.mark.filterwarnings("ignore")
def test_transforms_are_refused(context: RankContext, backend: str) -> None:
    """They failed within calls, some so that the communicator broke. It works on."""
    plan, x, ids, weights = arguments(context)
    with make_comm(context, backend, plan) as comm:

        def there_and_back(x: torch.Tensor) -> torch.Tensor:
            routed = comm.dispatch(x, ids, weights)
            return comm.combine(routed.tokens * 2, routed)

        want = there_and_back(x)
        transforms: list[Callable[[], object]] = [
            lambda: torch.func.grad(lambda x: there_and_back(x).sum())(x),
            lambda: torch.func.vmap(there_and_back)(torch.stack([x, x])),
            lambda: torch.jit.trace(there_and_back, (x,), check_trace=False),
        ]
        for transform in transforms:
            with pytest.raises(tl.InvalidArgument, match="cannot run it"):
                transform()
        with pytest.raises(tl.InvalidArgument, match="FakeTensorMode"), FakeTensorMode(allow_non_fake_inputs=True):
            there_and_back(x)
        same_bits(there_and_back(x), want.cpu(), "out")


def transformed(name: str, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Make a call where torch does this to it."""
    if name == "vmap":
        torch.func.vmap(call)(torch.stack([x, x]))
    elif name == "grad":
        torch.func.grad(lambda x: call(x).sum())(x)
    elif name == "trace":
        torch.jit.trace(call, (x,), check_trace=False)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            call(x)


@on_ranks("four")
@pytest.mark.parametrize("name", ["vmap", "grad", "trace", "fake"])
@pytest.mark.filterwarnings("ignore")
def test_a_transform_on_one_rank_is_told(context: RankContext, name: str) -> None:
    """The other ranks waited for its call until the deadline, ten minutes by default."""
    plan, x, ids, weights = arguments(context)
    device = context.device
    w1, w2 = (torch.zeros(plan.experts_per_rank, *shape, device=device) for shape in ((16, 16), (16, 8)))
    made: list[tl.Communicator] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        made.append(make_comm(context, "collective", plan))
        return x

    with make_comm(context, "collective", plan) as comm:
        routed = comm.dispatch(x, ids, weights)
        y = routed.tokens.clone()
        want = comm.combine(y, routed)
        calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda x: comm.dispatch(x, ids, weights).tokens,
            lambda x: comm.send_dispatch(x, ids, weights).receive().tokens,
            lambda x: comm.dispatch_again(x, routed),
            lambda x: routed_experts(comm, RunOptions(tl.Strategy()), x, ids, weights, w1, w2),
            make,
        ]
        for call in calls:
            if context.rank == 1:
                with pytest.raises(tl.InvalidArgument, match="cannot run it"):
                    transformed(name, call, x)
            else:
                with pytest.raises(tl.PeerError, match=r"rank 1 failed.*cannot run it"):
                    call(x)
        if context.rank == 1:
            with pytest.raises(tl.InvalidArgument, match="cannot run it"):
                transformed(name, lambda y: comm.combine(y, routed), y)
        else:
            with pytest.raises(tl.PeerError, match=r"rank 1 failed.*cannot run it"):
                comm.combine(y, routed)
        same_bits(comm.combine(y, routed), want.cpu(), "out")
    assert not made


def test_nothing_is_made_in_a_fake_mode() -> None:
    sizes: dict[str, Any] = {"num_experts": 2, "hidden": 8, "top_k": 1, "max_tokens_per_rank": 4}
    with FakeTensorMode():
        with pytest.raises(tl.InvalidArgument, match="FakeTensorMode"):
            tl.Communicator(**sizes)
        with pytest.raises(tl.InvalidArgument, match="FakeTensorMode"):
            tl.ExpertParallelMoE(**sizes, intermediate=8)


class Wrapped(torch.Tensor):
    """Like a DTensor: values that are somewhere else."""

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype, device=local.device)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a wrapper")


def nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor, tensor[:1]])


def functional(tensor: torch.Tensor) -> torch.Tensor:
    return torch._to_functional_tensor(tensor.clone())


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP frees a parameter: its shape stays. Not at the beginning of its storage."""
    if not tensor.numel():  # there is nothing to free
        return nested(tensor)
    whole = torch.cat([tensor[:1], tensor])
    view = whole[1:]
    whole.untyped_storage().resize_(0)
    return view


@on_ranks
@each_backend
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")  # each once in a process
def test_tensors_without_memory_of_their_own(context: RankContext, backend: str) -> None:
    """A DTensor, say, passed all checks, and failed where the communicator breaks, or gave kernels address 0."""
    plan, x, ids, weights = arguments(context)
    with make_comm(context, backend, plan) as comm:
        routed = comm.dispatch(x, ids, weights, copy=True)
        y = routed.tokens.clone()
        want = comm.combine(y, routed)
        for made in (Wrapped, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, nested, functional, freed):
            for call in (
                lambda made=made: comm.dispatch(made(x), ids, weights),
                lambda made=made: comm.dispatch(x, made(ids), weights),
                lambda made=made: comm.dispatch(x, ids, made(weights)),
                lambda made=made: comm.dispatch_again(made(x), routed),
                lambda made=made: comm.combine(made(y), routed),
                lambda made=made: comm.combine(y, routed, bias=made(x)),
                lambda made=made: comm.combine(y, routed, topk_weights=made(weights)),
            ):
                with pytest.raises(tl.InvalidArgument, match=r"strided memory of its own|has no memory"):
                    call()
        same_bits(comm.combine(y, routed), want.cpu(), "out")


# -- results of functional collectives ------------------------------------------------------------------------


class GradientUnderWay(torch.autograd.Function):
    """Identity, whose gradient is still on its way, as that of ``DTensor.from_local`` may be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return AsyncCollectiveTensor(grad.contiguous())


@on_ranks
@each_backend
def test_tensors_that_are_under_way(context: RankContext, backend: str) -> None:
    """``DTensor.to_local()`` may give such tensors. Kernels got address 0 for them."""
    plan, x, ids, weights = arguments(context)
    with make_comm(context, backend, plan) as comm:
        results = []
        for under_way in (torch.clone, AsyncCollectiveTensor):
            leaf, factors = x.clone().requires_grad_(), weights.clone().requires_grad_()
            routed = comm.dispatch(leaf, under_way(ids), factors)
            through = GradientUnderWay.apply if under_way is AsyncCollectiveTensor else torch.clone
            out = through(comm.combine(through(routed.tokens), routed))
            grads = torch.autograd.grad(out.square().sum(), [leaf, factors])
            with torch.no_grad():
                given = under_way(x), under_way(ids), under_way(weights)
                bounded = comm.dispatch(*given, sizes="bounded", capacity=64)
                home = comm.combine(under_way(bounded.tokens), bounded)
            results.append([out.detach(), *grads, home])
        for found, wanted in zip(results[1], results[0], strict=True):
            assert type(found) is torch.Tensor
            same_bits(found, wanted.cpu(), "result or gradient")
