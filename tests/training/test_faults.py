"""A layer that fails on one rank, wherever that is: its own error there, PeerError on the others at once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tokenloom as tl
from tests.conftest import LIMIT_S, Ranks
from tests.support.on_ranks import on_ranks
from tests.training.test_routed_experts import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, layers_of
from tokenloom.backends.collective_handle import CollectiveHandle
from tokenloom.backends.peers.handle import PeerHandle
from tokenloom.comm import pulled_experts
from tokenloom.comm.engine import Engine
from tokenloom.ops import expert_gemms, experts, routing, slots_of_routes
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.training import layer as layer_module
from tokenloom.training.shards import local_part

pytestmark = pytest.mark.slow_on(4)

AT_ONCE_S = 20.0
TIMEOUT_S = 60.0
"""What a rank that nobody tells would wait."""


@dataclass(frozen=True)
class Place:
    """Where a rank fails.

    Attributes:
        owner, name: the function that raises there; of several owners each.
        calls: how often it works before.
        ends_group: payload is under way then, so the group cannot go on (backend "collective").
        sent: the others have all that they wait for in this call, and hear of the fault in the next.
        options: of the layer.
    """

    owner: Any
    name: str
    calls: int = 0
    ends_group: bool = False
    sent: bool = False
    options: dict[str, Any] | None = None


HANDLES = (CollectiveHandle, PeerHandle)
ROUTER_LOSS = {"balance_coef": 0.1}
BALANCED = {"spare_slots": 1, "balance": "batch"}
FORWARD = {
    "router": Place(layer_module, "router_logits"),
    "router, before the sum of losses": Place(layer_module, "router_sums", options=ROUTER_LOSS),
    "output": Place(torch, "empty_like"),
    "shared expert": Place(layer_module, "apply_activation"),
    "row maps": Place(routing, "send_map"),
    "split of the batch": Place(slots_of_routes, "split_batch", options=BALANCED),
    "list of pulls": Place(pulled_experts, "pulls", ends_group=True, options=BALANCED),
    "pulled rows": Place(pulled_experts, "copy_from_owners", ends_group=True, options=BALANCED),
    "rows to send": Place(routing, "gather_rows", ends_group=True),
    "places of rows": Place(routing, "place_by_expert", ends_group=True),
    "received rows": Place(routing, "scatter_rows", ends_group=True),
    "choice of GEMMs": Place(experts, "gemms_for"),
    "weights of rows": Place(HANDLES, "row_weights"),
    "first GEMM": Place(expert_gemms._GroupedGemms, "multiply"),
    "activations": Place(experts, "activate"),
    "second GEMM": Place(expert_gemms._GroupedGemms, "multiply", calls=1),
    "partial sums": Place(routing, "ordered_sum", ends_group=True),
    "sums at home": Place(routing, "ordered_sum", calls=1, ends_group=True, sent=True),
}
BACKWARD = {
    "gradient of x": Place(torch, "empty_like"),
    "gradient of x, before a pull": Place(torch, "empty_like", options=BALANCED),
    "pulled rows": Place(pulled_experts, "copy_from_owners", ends_group=True, options=BALANCED),
    "gradient of w2, before pulled ones come": Place(
        expert_gemms._GroupedGemms, "weight_gradient", ends_group=True, options=BALANCED
    ),
    "pulled gradients": Place(pulled_experts, "sum_at_owners", ends_group=True, options=BALANCED),
    "rows of gradients": Place(routing, "gather_rows", ends_group=True),
    "gradient of the second GEMM": Place(expert_gemms._GroupedGemms, "multiply"),
    "activations": Place(experts, "activate_backward"),
    "gradient of the first GEMM": Place(expert_gemms._GroupedGemms, "multiply", calls=1),
    "sums of gradients": Place(routing, "ordered_sum", ends_group=True),
    "gradients of weights of rows": Place(HANDLES, "route_gradients"),
    "gradients of weights to send": Place(routing, "packed", ends_group=True),
    "gradient of w2, with rows to come": Place(
        expert_gemms._GroupedGemms, "weight_gradient", options={"redispatch_in_backward": True}
    ),
}


@contextmanager
def failing(place: Place, here: bool) -> Iterator[None]:
    """In this block there is no memory at the place, if it is ``here``."""
    calls = 0

    def failing_once(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == place.calls + 1:
                raise torch.OutOfMemoryError("no memory left")
            return real(*args, **options)

        return call

    with ExitStack() as stack:
        for owner in place.owner if isinstance(place.owner, tuple) else (place.owner,):
            if here:
                real = getattr(owner, place.name)
                stack.enter_context(mock.patch.object(owner, place.name, failing_once(real)))
        yield
    assert calls > place.calls or not here, "this place is not passed"


def told_at_once(context: RankContext, bad: int, call: Callable[[], object], ends_group: bool = False) -> None:
    began = time.monotonic()
    with pytest.raises(torch.OutOfMemoryError if context.rank == bad else tl.PeerError) as raised:
        call()
    assert time.monotonic() - began < AT_ONCE_S
    if isinstance(raised.value, tl.PeerError):
        assert raised.value.rank == bad
        assert raised.value.reason == "OutOfMemoryError: no memory left"
        assert ("make a new process group" in str(raised.value)) == ends_group


def run(ranks: Ranks, name: str, backward: bool) -> None:
    """On ranks that are there already. A process group that a fault leaves out of step must be nobody else's."""
    place = (BACKWARD if backward else FORWARD)[name]
    if ranks.device != "cpu" and place.owner is routing:
        pytest.skip("kernels do that, and over NCCL ranks wait for payload until the group's timeout")
    if ranks.device != "cpu" and name == "gradient of w2, with rows to come":
        pytest.skip("rows come beside the GEMMs there, all before this one: nobody waits for this rank any more")
    if ranks.device != "cpu" and place.options is BALANCED and place.ends_group:
        pytest.skip("over NCCL ranks wait for pulled rows until the group's timeout")
    if ranks.num_ranks == 1 and place.owner is pulled_experts:
        pytest.skip("one rank pulls nothing")
    if place.owner is routing or place.ends_group:
        ranks.pool.run(on_new_groups, ranks.num_ranks, name, backward, limit_s=LIMIT_S)
    else:
        ranks.run(check_place, [], name, backward)


def on_new_groups(context: RankContext, num_ranks: int, name: str, backward: bool) -> None:
    """Two groups of the first ranks, which all ranks of the world make together."""
    groups: list[Any] = [dist.new_group(list(range(num_ranks))) for _ in range(2)]
    if context.rank < num_ranks:
        context = copy(context)
        context.num_ranks, context.group = num_ranks, groups[0]
        check_place(context, groups[1:], name, backward)


def check_place(context: RankContext, groups: list[Any], name: str, backward: bool) -> None:
    """Args: groups: to go on with where the place ends that of the context."""
    place, bad = (BACKWARD if backward else FORWARD)[name], context.num_ranks - 1
    options = {"timeout_s": TIMEOUT_S, "open_timeout_s": TIMEOUT_S, **(place.options or {})}
    (layer,) = layers_of(context, 1, **options)
    generator = torch.Generator().manual_seed(context.rank)
    given = torch.randn(16, HIDDEN, generator=generator).to(context.device, torch.bfloat16)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = given.clone().requires_grad_()
        return x, layer(x)[0].float().square().sum()

    def step() -> list[torch.Tensor]:
        x, loss = forward()
        return [local_part(grad) for grad in torch.autograd.grad(loss, [x, *layer.expert_parameters()])]

    def fail() -> None:
        if backward:
            _, loss = forward()
        with failing(place, context.rank == bad):
            loss.backward() if backward else forward()
            layer.comm.check()
            if place.sent:
                forward()

    wanted = step()
    told_at_once(context, bad, fail, place.ends_group)
    if place.ends_group and context.num_ranks > 1:
        with pytest.raises(tl.CommunicatorBroken, match=r"an earlier call failed: .*no memory left.*make a new"):
            step()
        layer.comm.close()
        (context.group,) = groups
        (layer,) = layers_of(context, 1, **options)
    elif place.ends_group:
        return
    for _ in range(2):
        for got, want in zip(step(), wanted, strict=True):
            assert torch.equal(got, want)
    layer.comm.check()
    layer.comm.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORWARD)
def test_forward(ranks: Ranks, name: str) -> None:
    """What fails before or between transfers leaves the layer as it was. In the middle of one the group ends."""
    run(ranks, name, backward=False)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(ranks: Ranks, name: str) -> None:
    """The same of gradients."""
    run(ranks, name, backward=True)


def changed_in_place(context: RankContext, options: dict[str, Any]) -> None:
    """The last rank changes a weight between forward and backward, which autograd notices when backward reads it."""
    bad = context.num_ranks - 1
    (layer,) = layers_of(context, 1, timeout_s=TIMEOUT_S, open_timeout_s=TIMEOUT_S, **options)
    x = torch.ones(16, HIDDEN, device=context.device, dtype=torch.bfloat16, requires_grad=True)
    loss = layer(x)[0].float().sum()
    if context.rank == bad:
        with torch.no_grad():
            layer.experts.w1.mul_(1)

    def backward() -> None:
        loss.backward()
        layer.comm.check()  # nvlink raises what another rank found a few calls later, or here

    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        backward()
    assert time.monotonic() - began < AT_ONCE_S
    assert isinstance(raised.value, tl.PeerError) == (context.rank != bad)
    assert "modified by an inplace operation" in str(raised.value)
    layer(x)[0].float().sum().backward()
    layer.comm.check()
    layer.comm.close()


@pytest.mark.parametrize("options", [{}, BALANCED], ids=["plain", "balanced"])
def test_a_weight_changed_before_backward(ranks: Ranks, options: dict[str, Any]) -> None:
    """An optimizer that steps too early, on one rank."""
    ranks.run(changed_in_place, options)


def wide_inputs(context: RankContext, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    bad, (x_dtype, dtype) = context.num_ranks - 1, dtypes
    options = {"timeout_s": TIMEOUT_S, "open_timeout_s": TIMEOUT_S, "dtype": dtype, "shared_intermediate": 0}
    (layer,) = layers_of(context, 1, **options, **ROUTER_LOSS)
    x = torch.ones(16, HIDDEN, device=context.device, dtype=x_dtype)
    with torch.autocast(context.device.type, torch.bfloat16):
        out, aux_loss = layer(x)

        def call() -> None:
            layer(x[:, 1:] if context.rank == bad else x)
            layer.comm.check()  # kernels say it later

        with pytest.raises(tl.ShapeMismatch if context.rank == bad else tl.PeerError):
            call()
        other = x.to(dtype) if context.rank == bad else x
        again, same_loss = layer(other)
    torch.testing.assert_close(again, out, rtol=0.02, atol=0.02)  # weights of another dtype, rounded to bfloat16
    torch.testing.assert_close(same_loss.double(), aux_loss.double(), rtol=1e-5, atol=0)
    layer.comm.close()


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_float64_under_autocast(ranks: Ranks, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """In the tokens or in the layer. What ranks sum is of one dtype on all of them, also where one has failed, or has
    tokens of another dtype."""
    if ranks.device == "cuda" and torch.float64 in dtypes[1:]:
        pytest.skip("the kernels have no float64")
    ranks.run(wide_inputs, dtypes)


@on_ranks
def test_no_room_to_cast(context: RankContext) -> None:
    """Under autocast the experts' weights are cast before the dispatch: the largest tensors of the forward."""
    bad, real = context.num_ranks - 1, torch.Tensor.to
    options = {"timeout_s": TIMEOUT_S, "open_timeout_s": TIMEOUT_S, "dtype": torch.float32}
    (layer,) = layers_of(context, 1, **options)
    x = torch.ones(16, HIDDEN, device=context.device)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if context.rank == bad and tensor.shape == local_part(layer.experts.w1).shape:
            raise torch.OutOfMemoryError("no memory left")
        return real(tensor, *args, **kwargs)

    with torch.autocast(context.device.type, torch.bfloat16):
        wanted = layer(x)[0]
        with mock.patch.object(torch.Tensor, "to", to):
            told_at_once(context, bad, lambda: (layer(x), layer.comm.check()))
        assert torch.equal(layer(x)[0], wanted)
    layer.comm.close()


# -- ranks that differ ------------------------------------------------------------------------------------------

SUMS = pytest.mark.parametrize("options", [{}, ROUTER_LOSS], ids=["dispatch comes first", "sum of losses comes first"])


@contextmanager
def nothing_travels(layer: tl.ExpertParallelMoE) -> Iterator[None]:
    """In this block no sum is taken, and no call opens where the host hears at once what the others mean."""
    opened: Any = mock.patch.object(Engine, "opened") if layer.comm.backend == "collective" else nullcontext()
    with opened as counted, mock.patch.object(RankGroup, "_sum") as summed:
        yield
    assert not summed.called
    assert counted is None or not counted.called


def differs_at_once(context: RankContext, layer: tl.ExpertParallelMoE, call: Callable[[], object], said: str) -> None:
    """All ranks raise the same in this call, before any row has travelled."""
    began = time.monotonic()
    with nothing_travels(layer), pytest.raises(tl.PlanMismatch) as raised:
        (call(), layer.comm.check())  # kernels say it later
    assert time.monotonic() - began < AT_ONCE_S
    assert raised.value.rank == context.num_ranks - 1
    assert said in str(raised.value)


FREEZING = {
    "router_weight": "trained parameters=router_bias, shared_w1, shared_w2,",
    "shared_w1": "trained parameters=router_weight, router_bias, shared_w2,",
    "experts.w2": "shared_w1, shared_w2, w1, rank 0 has",
    "experts.w1": "shared_w1, shared_w2, w2, rank 0 has",
}


@SUMS
@pytest.mark.parametrize("name", FREEZING)
@on_ranks
def test_frozen_on_one_rank(context: RankContext, name: str, options: dict[str, float]) -> None:
    """Backward would sum the gradients of other parameters than the other ranks do, or of none."""
    if context.num_ranks == 1:
        return
    router = tl.Router(EXPERTS, TOP_K, bias=True)
    given = {"timeout_s": TIMEOUT_S, "open_timeout_s": TIMEOUT_S, "router": router, "router_grad": "sum", **options}
    (layer,) = layers_of(context, 1, **given)
    parameter = layer.get_parameter(name)
    x = torch.ones(16, HIDDEN, device=context.device, dtype=torch.bfloat16)
    parameter.requires_grad_(context.rank != context.num_ranks - 1)
    differs_at_once(context, layer, lambda: layer(x), FREEZING[name])
    with torch.no_grad():
        layer(x)  # which trains none
    for frozen in (False, True):  # alike on all ranks
        parameter.requires_grad_(not frozen)
        out, loss = layer(x)
        (out.float().sum() + loss).backward()
    layer.comm.check()
    layer.comm.close()


@on_ranks
def test_experts_frozen_on_one_rank(context: RankContext) -> None:
    """Experts below a router of the user's own."""
    if context.num_ranks == 1:
        return
    (layer,) = layers_of(context, 1, timeout_s=TIMEOUT_S, open_timeout_s=TIMEOUT_S)
    x = torch.ones(16, HIDDEN, device=context.device, dtype=torch.bfloat16)
    ids = torch.arange(TOP_K, device=context.device).expand(16, TOP_K)
    weights = torch.ones(16, TOP_K, device=context.device)
    layer.experts.w1.requires_grad_(context.rank != context.num_ranks - 1)
    said = "has trained experts=w2, rank 0 has trained experts=w1, w2; freeze the same parameters on all ranks"
    differs_at_once(context, layer, lambda: layer.experts(x, ids, weights), said)
    layer.experts.w1.requires_grad_(False)
    layer.experts(x, ids, weights).float().sum().backward()
    layer.comm.check()
    layer.comm.close()


@SUMS
@pytest.mark.parametrize("grads", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["topk_ids", "topk_weights"])
@on_ranks
def test_routes_given_on_one_rank(context: RankContext, name: str, grads: bool, options: dict[str, float]) -> None:
    """One that replays routes while the others choose, or weighs them by itself while the others learn how."""
    if context.num_ranks == 1:
        return
    (layer,) = layers_of(context, 1, timeout_s=TIMEOUT_S, open_timeout_s=TIMEOUT_S, **options)
    x = torch.ones(16, HIDDEN, device=context.device, dtype=torch.bfloat16)
    ids = torch.arange(TOP_K, device=context.device).expand(16, TOP_K)
    weights = torch.ones(16, TOP_K, device=context.device, requires_grad=grads)
    given = {} if name == "topk_ids" else {"topk_ids": ids}
    more = {"topk_ids": ids} if name == "topk_ids" else {"topk_ids": ids, "topk_weights": weights}
    with torch.set_grad_enabled(grads):
        differs_at_once(
            context,
            layer,
            lambda: layer(x, **(more if context.rank == context.num_ranks - 1 else given)),
            f"has {name}=given, rank 0 has {name}=none; pass {name} on all ranks, or on none",
        )
        for each in (given, more):
            layer(x, **each)
    layer.comm.check()
    layer.comm.close()


@on_ranks
def test_a_router_is_told_in_the_sum_of_losses(context: RankContext) -> None:
    """The others are about to sum, and go no further."""
    if context.num_ranks == 1:
        return
    (layer,) = layers_of(context, 1, timeout_s=TIMEOUT_S, open_timeout_s=TIMEOUT_S, **ROUTER_LOSS)
    x = torch.ones(16, HIDDEN, device=context.device, dtype=torch.bfloat16)
    bad = context.num_ranks - 1
    layer(x)
    with nothing_travels(layer), failing(FORWARD["router"], context.rank == bad):
        told_at_once(context, bad, lambda: layer(x))
    layer(x)
    layer.comm.check()
    layer.comm.close()


# -- constructors -----------------------------------------------------------------------------------------------


class NoMemory(ExitStack):
    """In this block tensors of a shape have no memory.

    Args:
        shape: of the tensor that cannot be made. here: on this rank.
    """

    def __init__(self, shape: tuple[int, ...], here: bool) -> None:
        super().__init__()
        self.shape, self.here = shape, here

    def __enter__(self) -> NoMemory:
        real = torch.empty

        def empty(*args: Any, **options: Any) -> torch.Tensor:
            if self.shape in (args, *args[:1]):
                raise torch.OutOfMemoryError("no memory left")
            return real(*args, **options)

        if self.here:
            self.enter_context(mock.patch.object(torch, "empty", empty))
        return self


LARGE = {
    "experts": lambda num_ranks: (EXPERTS // num_ranks, HIDDEN, INTERMEDIATE),
    "router": lambda num_ranks: (EXPERTS, HIDDEN),
    "shared expert": lambda num_ranks: (HIDDEN, 32),
}


@pytest.mark.parametrize("name", LARGE)
@on_ranks
def test_a_layer_without_memory(context: RankContext, name: str) -> None:
    """The largest tensors of a program: the other ranks do not go on with a layer that one of them lacks."""
    bad, shape = context.num_ranks - 1, LARGE[name](context.num_ranks)
    options = {"timeout_s": TIMEOUT_S, "open_timeout_s": TIMEOUT_S}
    with NoMemory(shape, context.rank == bad):
        told_at_once(context, bad, lambda: layers_of(context, 1, **options))
    (layer,) = layers_of(context, 1, **options)
    layer(torch.ones(16, HIDDEN, device=context.device, dtype=torch.bfloat16))
    layer.comm.check()
    layer.comm.close()


@on_ranks
def test_a_warning_that_is_an_error(context: RankContext) -> None:
    """Only rank 0 warns, and a program may run with ``-W error``."""
    options = {"timeout_s": TIMEOUT_S, "open_timeout_s": TIMEOUT_S}
    router = tl.Router(EXPERTS, 1, "softmax_topk", renormalize=True)
    where: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "top_k": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning if context.rank == 0 else tl.PeerError, match="cannot learn"):
            tl.ExpertParallelMoE(
                context.group, max_tokens_per_rank=16, router=router, device=context.device, **where, **options
            )
    tl.Communicator(
        context.group, num_experts=EXPERTS, hidden=HIDDEN, top_k=1, max_tokens_per_rank=1, device=context.device
    ).close()
