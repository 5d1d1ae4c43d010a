"""What comes with calls between nodes by kernels alone, on the emulator: gradients, other rows, weights, layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends import test_gin, test_network
from tests.backends.test_gin import each_way
from tests.comm import test_beside, test_gradients
from tests.conftest import Ranks
from tests.support import emulator
from tests.support.cases import BETWEEN_NODES, FP32, Case, case_params, make_comm, make_problem
from tests.support.on_ranks import on_ranks
from tokenloom.backends import registry
from tokenloom.plan import LAYOUTS
from tokenloom.runtime.processes import RankContext

EXPERIMENTAL = True

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")
# Most take kernels of their own, which have to be compiled: they are slow tests.
EXACT = [case for case in test_gradients.EXACT if case not in ("hidden7", "fp64")]

OF_PADDED = ("unused-padded", "top8-padded")
"""It runs the kernels of gin."""


def pairs(values: Sequence[Any], *fast: tuple[str, str]) -> list[Any]:
    """Each value, or each param, with each way: slow tests, but for some by the names of both."""
    params = [value if isinstance(value, type(pytest.param())) else pytest.param(value, id=value) for value in values]

    def pair(each: Any, way: str) -> Any:
        return pytest.param(
            *each.values, way, id=f"{each.id}-{way}", marks=() if (each.id, way) in fast else pytest.mark.slow
        )

    return [pair(each, way) for each in params for way in BETWEEN_NODES]


@pytest.mark.parametrize(
    ("case", "way"),
    [each for each in pairs(case_params(EXACT), ("plain", "gin")) if each.values[1] == "gin" or each.id in OF_PADDED],
)
def test_backward_is_the_other_operation(way: str, case: Any) -> None:
    emulator.ranks(4).run(test_gradients.check_exact, way, case)


@pytest.mark.slow
@each_way
def test_gradient_of_received_weights(way: str) -> None:
    emulator.ranks(4).run(test_gradients.check_received_weights, way)


WITHOUT_MODE = [each for each in test_gradients.VARIANTS if "mode" not in each.values[1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "way"),
    pairs(WITHOUT_MODE, ("expert4-bounded", "gin")),
)
def test_equals_dense(way: str, layout: str, options: dict[str, Any]) -> None:
    emulator.ranks(4).run(test_gradients.check_dense, way, layout, options, FP32)


@pytest.mark.parametrize(("layout", "way"), pairs(["token", "slots"]))
def test_any_tokens(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_gradients.check_any_tokens, way, layout)


@on_ranks("emulated_two")
@pytest.mark.slow
@each_way
def test_many_tokens(context: RankContext, way: str) -> None:
    """More than blocks count by themselves, in as many chunks as there may be."""
    case = Case("many", "", tokens=(1100, 300), hidden=8, top_k=2, dtype=FP32)
    problem = make_problem(case, context.num_ranks)
    with make_comm(context, way, problem.plan, ranks_per_node=1) as comm:
        for layout in ("token", "expert"):
            test_gin.there_and_back(context, comm, problem, layout)


@on_ranks("emulated_four")
@pytest.mark.parametrize(("leaf", "way"), pairs(["x", "weights", "y"], ("weights", "gin")))
def test_a_fault_in_backward(context: RankContext, way: str, leaf: str) -> None:
    """Rank 3 has no gradient to send. Ranks of both nodes are told, and go on."""
    problem = make_problem(replace(test_beside.CASE, dtype=FP32), context.num_ranks)
    x, ids, weights = problem.arguments(context)
    assert weights is not None
    leaves = {"x": x.requires_grad_(leaf == "x"), "weights": weights.requires_grad_(leaf == "weights")}
    with make_comm(context, way, problem.plan, timeout_s=0.0015) as comm:  # some seconds of the emulator
        routed = comm.dispatch(leaves["x"], ids, leaves["weights"], layout="token")
        y = torch.ones_like(routed.tokens, requires_grad=leaf == "y")
        out = {"x": routed.tokens, "weights": routed.topk_weights, "y": comm.combine(y, routed)}[leaf]
        broken: Any = comm.engine._backend
        names = {"x": "prepare_combine", "weights": "send_weight_gradients", "y": "resend"}
        failing = mock.patch.object(broken, names[leaf], side_effect=RuntimeError("no gradient"))
        with failing if context.rank == 3 else nullcontext():
            error, text = (
                (RuntimeError, "no gradient") if context.rank == 3 else (tl.PeerError, r"rank 3.*no gradient")
            )
            with pytest.raises(error, match=text):
                out.sum().backward()
        test_gin.there_and_back(context, comm, problem, "slots")


@on_ranks("emulated_four")
@pytest.mark.parametrize("way", [pytest.param("gin", marks=pytest.mark.slow), "padded"])
def test_an_overflow_is_told_once(context: RankContext, way: str) -> None:
    """Other rows by the same routes say nothing of it."""
    problem = make_problem(replace(test_beside.CASE, dtype=FP32), context.num_ranks)
    x, ids, weights = problem.arguments(context)
    with make_comm(context, way, problem.plan, checked=False) as comm, torch.no_grad():
        capacity = problem.rows_needed("token") - 1
        routed = comm.dispatch(x, ids, weights, layout="token", sizes="bounded", capacity=capacity)
        with pytest.raises(tl.CapacityOverflow):
            comm.check()
        comm.dispatch_again(x, routed)
        comm.check()


@on_ranks("emulated_four")
@pytest.mark.slow
@each_way
def test_gradients_that_need_wider_rows(context: RankContext, way: str) -> None:
    """A result in float32 has gradients in float32, for which memory of 2-byte rows has no room: told in forward."""
    problem = make_problem(test_beside.CASE, context.num_ranks)
    with make_comm(context, way, problem.plan, dtype=None) as comm:
        routed = comm.dispatch(*problem.arguments(context), layout="token")
        y = routed.tokens.detach().clone().requires_grad_()
        with pytest.raises(tl.InvalidArgument, match=r"make it with dtype=torch.float32"):
            comm.combine(y, routed, out_dtype=FP32)
        comm.combine(y, routed).sum().backward()
        assert y.grad is not None


@on_ranks("emulated_four")
def test_a_fault_in_weights_on_their_way_home(context: RankContext) -> None:
    """Whether the routes are known to what carries weights, or a dispatch comes first."""
    problem = make_problem(test_beside.CASE, context.num_ranks)
    with make_comm(context, "padded", problem.plan, timeout_s=0.0015) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), layout="token")
        values = torch.ones_like(routed.topk_weights)
        wrong = values[:, :1] if context.rank == 3 else values
        for _ in range(2):
            error, text = (tl.ShapeMismatch, "values") if context.rank == 3 else (tl.PeerError, "rank 3.*values")
            with pytest.raises(error, match=text):
                comm.combine_weights(wrong, routed)
            home = comm.combine_weights(values, routed)
            assert home.shape == problem.topk_ids[context.rank].shape


@on_ranks("emulated_four")
@pytest.mark.parametrize("way", ["nvlink", pytest.param("padded", marks=pytest.mark.slow)])
def test_a_check_hears_of_weights(context: RankContext, way: str) -> None:
    """Calls that carry weights leave what they find too, where the host does not wait for them."""
    problem = make_problem(test_beside.CASE, context.num_ranks)
    with make_comm(context, way, problem.plan, checked=False) as comm, torch.no_grad():
        routed = comm.dispatch(*problem.arguments(context), layout="token")
        values = torch.ones_like(routed.topk_weights)
        comm.combine_weights(values, routed)
        if context.rank == 3:
            with pytest.raises(tl.ShapeMismatch):
                comm.combine_weights(values[:, :1], routed)
        else:
            comm.combine_weights(values, routed)
            with pytest.raises(tl.PeerError, match=r"rank 3.*values"):
                comm.check()
        comm.check()


# -- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "way"),
    pairs(
        [
            pytest.param({}, id="usual"),
            pytest.param({"pool_rows": 64}, id="pool"),
            pytest.param({"pool_rows": 64, "redispatch_in_backward": True}, id="pool, sent again"),
            pytest.param({"redispatch_in_backward": True}, id="sent again"),
        ],
        ("usual", "gin"),
    ),
)
def test_layers(four: Ranks, way: str, options: dict[str, Any]) -> None:
    """Outputs and all gradients of a layer that is told no strategy: the bits of collectives, with sums per node."""
    kernels = emulator.ranks(4).run(train, way, None, options)
    for ours, theirs in zip(kernels, four.run(train, "network", tl.Strategy(combine="per_node")), strict=True):
        assert len(ours) == len(theirs)
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def train(
    context: RankContext, way: str, strategy: tl.Strategy | None, options: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    where = {"backend": way, "ranks_per_node": 2}
    return test_network.train(context, strategy, FP32, layer_options=options, **where)


@each_way
def test_models_of_transformers_take_what_there_is(way: str) -> None:
    """They are told no strategy either, and no dtype of a communicator."""
    able = registry.capabilities(way)
    assert tl.Strategy.default(able) == tl.Strategy(combine="per_node")
    assert tl.Strategy.default(registry.capabilities("nvlink")) == tl.Strategy()


@pytest.mark.slow
def test_mega_moe(four: Ranks) -> None:
    """Sums per node differ from those per route in the last bits alone."""
    for ours, theirs in zip(emulator.ranks(4).run(infer, "gin"), four.run(infer, "auto"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


def infer(context: RankContext, transport: str) -> torch.Tensor:
    sizes = {"num_experts": 8, "hidden": 128, "intermediate": 128, "top_k": 3, "max_tokens_per_rank": 8}
    generator = torch.Generator().manual_seed(context.rank)
    w1, w2 = (torch.randn(2, rows, 128, generator=generator).bfloat16() for rows in (256, 128))
    x, ids = torch.randn(5, 128, generator=generator).bfloat16(), torch.rand(5, 8, generator=generator).topk(3).indices
    layer = tl.MegaMoE(context.group, backend="composed", transport=transport, ranks_per_node=2, **sizes)
    layer.load_weights(w1, w2)
    out = layer(x, ids, torch.rand(5, 3, generator=generator)).clone()
    layer.comm.close()
    return out


# -- other rows, and what comes with them -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "way"), pairs(LAYOUTS, ("expert", "gin")))
def test_dispatch_again(way: str, layout: str) -> None:
    """The rows of exact sizes and of bounded ones lie where those of the dispatch do."""
    for sizes in ("exact", "bounded"):
        options: dict[str, Any] = {"sizes": sizes} if layout != "slots" else {}
        if (layout, sizes) == ("expert", "bounded"):
            options["capacity"] = 96
        emulator.ranks(4).run(test_beside.check_dispatch_again, way, layout, options)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "way"), pairs(["expert", "slots"], ("expert", "gin")))
def test_weights_of_routes_come_home(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_combine_weights, way, layout, {})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert", "slots"])
def test_weights_that_come_later(layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_reweighted, "padded", layout, "absent")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["token", "rank"])
def test_other_weights_of_tokens(layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_other_weights, "padded", layout, "exact")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "way"), pairs(["token", "expert"]))
def test_bias(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_bias, way, layout, 2)


@pytest.mark.parametrize(("layout", "way"), pairs(["token", "expert"]))
def test_packed_scales(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_packed, way, layout, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "way"), pairs(["expert", "slots"], ("expert", "gin")))
def test_source_tokens(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_source_tokens, way, layout)


@pytest.mark.slow
@each_way
def test_unused_ids_marked(way: str) -> None:
    emulator.ranks(4).run(test_beside.check_unused_ids, way)
