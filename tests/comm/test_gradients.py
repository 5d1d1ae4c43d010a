"""Gradients: exact where they move data, and against a dense torch computation of all tokens in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BETWEEN_NODES,
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    Problem,
    case_params,
    each_backend,
    expert_rows,
    make_comm,
    make_problem,
    order_of,
    same_bits,
)
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.plan import ROUTE_LAYOUTS
from tokenloom.runtime.processes import RankContext

pytestmark = pytest.mark.slow_on(4)

LAYOUTS = ("token", "rank", "expert", "slots")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)

# -- bit for bit: the gradient of each is the other -------------------------------------------------------------

EXACT = [
    "plain", "top1", "top8", "unused", "nan-weights", "no-tokens", "one-token", "to-one-rank", "hidden7", "fp16",
    "fp64",
]  # fmt: skip


@pytest.mark.sampled(3)
@each_backend
@pytest.mark.parametrize("case", case_params(EXACT))
def test_backward_is_the_other_operation(ranks: Ranks, backend: str, case: Case) -> None:
    """Backward of dispatch is a combine without weights; backward of combine is a dispatch times the weight."""
    ranks.run(check_exact, backend, case)


def check_exact(context: RankContext, backend: str, case: Case) -> None:
    problem = make_problem(case, context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    for layout, alignment in (("token", 1), ("rank", 1), ("expert", 1), ("expert", 4), ("slots", 1)):
        options: dict[str, Any] = {"layout": layout, "alignment": alignment}
        if layout == "slots":
            options["capacity"] = problem.rows_needed("slots") + 1
        want = problem.dispatched(**options)
        x, ids, weights = problem.arguments(context)
        assert isinstance(x, torch.Tensor)
        assert weights is not None
        x.requires_grad_()
        weights.requires_grad_()
        routed = comm.dispatch(x, ids, weights, **options)
        grads = expert_rows(problem, want, x.dtype)  # NaN where no row lies: such gradients must not count
        routed.tokens.backward(grads[context.rank].to(context.device))
        assert x.grad is not None
        want_x = reference.combine(problem.plan, grads, want, problem.topk_ids, None, **order_of(comm))[context.rank]
        same_bits(x.grad, want_x, f"gradient of x, {layout}")
        check_exact_combine(context, comm, problem, routed, want)


def check_exact_combine(
    context: RankContext, comm: tl.Communicator, problem: Problem, routed: tl.Routed, want: list[reference.Routed]
) -> None:
    rank, y_dtype = context.rank, problem.xs[0].dtype
    y = expert_rows(problem, want, y_dtype)[rank].to(context.device).requires_grad_()
    generator = torch.Generator().manual_seed(5)
    gs = [torch.randn(x.shape, generator=generator, dtype=FP64).to(y_dtype) for x in problem.xs]
    out = comm.combine(y, routed)
    out.backward(gs[rank].to(context.device))
    compute = FP64 if y_dtype == FP64 else FP32
    want_grad = torch.zeros(y.shape, dtype=y_dtype)
    for key, place in want[rank].rows.items():
        source, token = key[:2]
        g = gs[source][token].to(compute)
        if routed.layout in ROUTE_LAYOUTS:
            assert problem.topk_weights is not None
            g = g * problem.topk_weights[source][token, key[-1]].to(compute)
        want_grad.view(-1, y.shape[-1])[place] = g.to(y_dtype)
    assert y.grad is not None
    same_bits(y.grad, want_grad, f"gradient of y, {routed.layout}")


@each_backend
def test_gradient_of_received_weights(ranks: Ranks, backend: str) -> None:
    """Layouts token and rank hand the weights to the caller: each route's gradient goes home, -1 gets 0."""
    ranks.run(check_received_weights, backend)


def check_received_weights(context: RankContext, backend: str) -> None:
    for case in (
        Case(
            "weights",
            "",
            tokens=(6, 0, 3),
            top_k=5,
            pick="repeats",
            unused=0.3,
            weights="nan where unused",
            dtype=FP32,
        ),
        Case("one", "", tokens=(1, 0), top_k=1, dtype=FP32),
    ):
        problem = make_problem(case, context.num_ranks)
        comm = make_comm(context, backend, problem.plan)
        for layout in ("token", "rank"):
            x, ids, weights = problem.arguments(context)
            assert weights is not None
            weights.requires_grad_()
            routed = comm.dispatch(x, ids, weights, layout=layout)
            assert routed.topk_weights is not None
            assert routed.topk_ids is not None
            # The received id, 1-based, as the gradient: what comes home must be that of the route's own place.
            grad = (routed.topk_ids + 1 + 100 * context.rank).float()
            routed.topk_weights.backward(grad.masked_fill(routed.topk_ids < 0, torch.nan))
            home, local = ids // problem.plan.experts_per_rank, ids % problem.plan.experts_per_rank
            same_bits(weights.grad, torch.where(ids >= 0, local + 1 + 100 * home, 0).float().cpu(), "gradient")
            weights.grad = None
            routed = comm.dispatch(x, ids, weights, layout=layout)
            assert routed.topk_weights is not None
            routed.topk_weights.sum().backward()  # an expanded gradient, also of none and of one row
            same_bits(weights.grad, (ids >= 0).float().cpu(), "gradient of a sum")


# -- against a dense computation --------------------------------------------------------------------------------


@dataclass
class Network:
    """Tokens, weights and one matrix per expert of all ranks: out_t = sum over k of weight_k * tanh(matrix x_t)."""

    problem: Problem
    xs: list[torch.Tensor]
    weights: list[torch.Tensor]
    matrices: torch.Tensor
    losses: list[torch.Tensor]

    def local(self, context: RankContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's leaves x, weights, matrices, and ids."""
        rank, local = context.rank, self.problem.plan.experts_per_rank
        x, w = self.xs[rank].to(context.device), self.weights[rank].to(context.device)
        matrices = self.matrices[rank * local : (rank + 1) * local].to(context.device)
        leaves = [each.clone().requires_grad_() for each in (x, w, matrices)]
        return leaves[0], leaves[1], leaves[2], self.problem.topk_ids[rank].to(context.device)

    def dense(self, depth: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Gradients of the sum over ranks of (out * loss).sum(), for every x and weights, and all matrices."""
        xs = [x.clone().requires_grad_() for x in self.xs]
        weights = [w.clone().requires_grad_() for w in self.weights]
        matrices = self.matrices.clone().requires_grad_()
        for x, w, ids, loss in zip(xs, weights, self.problem.topk_ids, self.losses, strict=True):
            out = x
            for _ in range(depth):
                applied = torch.tanh(torch.einsum("tkhi,ti->tkh", matrices[ids.clamp_min(0)], out))
                out = (applied * torch.where(ids >= 0, w, 0)[..., None]).sum(1)
            (out * loss).sum().backward()
        # Where no rank has a route, torch leaves the gradient out; here it is 0.
        return [_grad(x) for x in xs], [_grad(w) for w in weights], _grad(matrices)


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def make_network(num_ranks: int, dtype: torch.dtype, **options: Any) -> Network:
    sizes: dict[str, Any] = {"tokens": (5, 0, 3, 4), "top_k": 4, "pick": "repeats", "unused": 0.25, "hidden": 8}
    problem = make_problem(Case("network", "", **(sizes | options)), num_ranks)
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=FP64).to(dtype)

    hidden = problem.plan.hidden
    tokens = [len(ids) for ids in problem.topk_ids]
    return Network(
        problem,
        xs=[random(n, hidden) for n in tokens],
        weights=[random(n, problem.plan.top_k) for n in tokens],
        matrices=random(problem.plan.num_experts, hidden, hidden) / hidden**0.5,
        losses=[random(n, hidden) for n in tokens],
    )


def distributed(
    comm: tl.Communicator,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: torch.Tensor,
    layout: str,
    mode: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """The same computation, through dispatch, this rank's experts and combine."""
    if layout == "slots":  # room for tokens that name an expert several times
        options = {"capacity": comm.plan.default_slots * comm.plan.top_k} | options
    routed = comm.dispatch(x, ids, weights, layout=layout, **options)
    if layout == "expert":
        assert routed.expert_offsets is not None
        ends = routed.expert_offsets.tolist()
        parts = [torch.tanh(routed.tokens[ends[e] : ends[e + 1]] @ m.T) for e, m in enumerate(matrices)]
        # Beyond num_rows, and in padding rows, whatever the experts make of them must not matter.
        parts.append(routed.tokens[ends[-1] :] * torch.nan)
        return comm.combine(torch.cat(parts), routed, mode=mode)
    if layout == "slots":
        beyond = torch.arange(routed.tokens.shape[1], device=x.device) >= routed.expert_counts[:, None]
        tokens = routed.tokens.masked_fill(beyond[..., None], 0)  # whatever lies there
        applied = torch.tanh(torch.einsum("lsh,lih->lsi", tokens, matrices))
        return comm.combine(applied.masked_fill(beyond[..., None], torch.nan), routed, mode=mode)
    assert routed.topk_ids is not None
    assert routed.topk_weights is not None
    used = torch.arange(comm.plan.max_tokens_per_rank, device=x.device) < routed.source_counts[:, None]
    if layout == "token":
        used = torch.arange(len(routed.tokens), device=x.device) < routed.num_rows
    tokens, local_ids, received = routed.tokens[used], routed.topk_ids[used], routed.topk_weights[used]
    applied = torch.tanh(torch.einsum("ehi,ti->teh", matrices, tokens))
    chosen = torch.nn.functional.one_hot(local_ids + 1, len(matrices) + 1)[..., 1:].to(received)
    summed = torch.einsum("tke,tk,teh->th", chosen, received, applied)
    y = torch.full_like(routed.tokens, torch.nan)
    y[used] = summed
    return comm.combine(y, routed)


# float64: the order of a dozen additions of numbers near 1. float32: the same, and tanh of another library path.
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    FP64: {"rtol": 1e-10, "atol": 1e-10},
    FP32: {"rtol": 2e-5, "atol": 2e-5},
}


def widest(backend: str) -> torch.dtype:
    """The dtype whose rounding hides least, of those that the backend has."""
    return FP32 if backend in ("nvlink", *BETWEEN_NODES) else FP64


VARIANTS: list[Any] = [
    pytest.param("token", {}, id="token"),
    pytest.param("token", {"sizes": "bounded"}, id="token-bounded"),
    pytest.param("rank", {}, id="rank"),
    pytest.param("expert", {}, id="expert"),
    pytest.param("expert", {"alignment": 4}, id="expert4"),
    pytest.param("expert", {"alignment": 4, "sizes": "bounded", "capacity": 300}, id="expert4-bounded"),
    pytest.param("expert", {"mode": "per_route"}, id="per_route"),
    pytest.param("slots", {}, id="slots"),
    pytest.param("slots", {"mode": "per_route", "capacity": 70}, id="slots per_route"),
]


@each_backend
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=["float64", "float32"])
@pytest.mark.parametrize(("layout", "options"), VARIANTS)
def test_equals_dense(ranks: Ranks, backend: str, layout: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """x, weights and expert parameters, with zero tokens on a rank, -1 and repeated experts."""
    ranks.run(check_dense, backend, layout, options, dtype)


def check_dense(context: RankContext, backend: str, layout: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    network = make_network(context.num_ranks, dtype)
    comm = make_comm(context, backend, network.problem.plan)
    check_network(context, network, lambda x, ids, w, m: distributed(comm, x, ids, w, m, layout, **options))


Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_network(context: RankContext, network: Network, function: Function, depth: int = 1) -> None:
    x, weights, matrices, ids = network.local(context)
    out = function(x, ids, weights, matrices)
    (out * network.losses[context.rank].to(context.device)).sum().backward()
    compare(context, network, x, weights, matrices, depth)


def compare(
    context: RankContext,
    network: Network,
    x: torch.Tensor,
    weights: torch.Tensor,
    matrices: torch.Tensor,
    depth: int = 1,
) -> None:
    """The gradients of this rank's leaves with those of the dense computation, wherever they require one."""
    rank, local = context.rank, network.problem.plan.experts_per_rank
    want_x, want_weights, want_matrices = network.dense(depth)
    wanted = (want_x[rank], want_weights[rank], want_matrices[rank * local : (rank + 1) * local])
    for name, leaf, want in zip(("x", "weights", "matrices"), (x, weights, matrices), wanted, strict=True):
        if not leaf.requires_grad:
            assert leaf.grad is None
            continue

        def text(message: str, name: str = name) -> str:
            return f"gradient of {name} on rank {rank}: {message}"

        assert leaf.grad is not None, name
        torch.testing.assert_close(leaf.grad.cpu(), want, **TOLERANCE[leaf.dtype], msg=text)


@each_backend
@each_layout
def test_any_tokens(ranks: Ranks, backend: str, layout: str) -> None:
    """No tokens anywhere, on rank 0, everywhere but one rank; no routes; one token with one route, hidden 1."""
    ranks.run(check_any_tokens, backend, layout)


def check_any_tokens(context: RankContext, backend: str, layout: str) -> None:
    for options in (
        {"tokens": (0,)},
        {"tokens": (0, 3)},
        {"tokens": (0, 0, 0, 5)},
        {"pick": "none"},
        {"pick": "one rank"},
        {"tokens": (1, 0), "hidden": 1 if widest(backend) == FP64 else 8, "top_k": 1, "unused": 0.0},
    ):
        network = make_network(context.num_ranks, widest(backend), **options)
        comm = make_comm(context, backend, network.problem.plan)
        check_network(context, network, lambda x, ids, w, m, comm=comm: distributed(comm, x, ids, w, m, layout))


@on_ranks
@each_backend
@each_layout
def test_strides_of_incoming_gradients(context: RankContext, backend: str, layout: str) -> None:
    """sum() gives an expanded gradient, a transposed use a non-contiguous one; to combine and to dispatch."""
    for tokens in ((4, 0, 2), (1, 0)):
        # float32, whose rows are viewed as wider words on their way: strides matter more than in float64.
        network = make_network(context.num_ranks, FP32, tokens=tokens)
        comm = make_comm(context, backend, network.problem.plan)
        ones = Network(**(vars(network) | {"losses": [torch.ones_like(each) for each in network.losses]}))
        x, weights, matrices, ids = network.local(context)
        distributed(comm, x, ids, weights, matrices, layout).sum().backward()
        compare(context, ones, x, weights, matrices)
        x, weights, matrices, ids = network.local(context)
        out = distributed(comm, x, ids, weights, matrices, layout)
        loss = network.losses[context.rank].to(context.device)
        (out.t().contiguous() * loss.t()).sum().backward()
        compare(context, network, x, weights, matrices)
        # Dispatch alone: every row, or every second column of every row, counts once.
        for step in (1, 2):
            x = network.local(context)[0]
            routed = comm.dispatch(x, ids, layout=layout)
            flat = routed.tokens.flatten(0, -2)
            places = sorted(network.problem.dispatched(layout)[context.rank].rows.values())
            (flat.sum() if layout in ("token", "expert") and step == 1 else flat[places].t()[::step].sum()).backward()
            rank_of = ids // network.problem.plan.experts_per_rank
            count = (
                (ids >= 0).sum(1)
                if layout in ROUTE_LAYOUTS
                else torch.tensor(
                    [len({r for r in row if r >= 0}) for row in torch.where(ids >= 0, rank_of, -1).tolist()],
                    device=x.device,
                    dtype=torch.int64,
                )
            )
            want = torch.zeros_like(x)
            want[:, ::step] = count[:, None].to(x)
            assert x.grad is not None
            assert torch.equal(x.grad, want)


@on_ranks
@each_backend
@each_layout
@pytest.mark.parametrize("needed", ["x", "weights", "matrices", "x weights", "weights matrices"])
def test_only_some_require_grad(context: RankContext, backend: str, layout: str, needed: str) -> None:
    """What requires no gradient gets none, and what does gets the right one."""
    needed = needed.split()
    network = make_network(context.num_ranks, widest(backend))
    comm = make_comm(context, backend, network.problem.plan)
    x, weights, matrices, ids = network.local(context)
    for name, leaf in (("x", x), ("weights", weights), ("matrices", matrices)):
        leaf.requires_grad_(name in needed)
    out = distributed(comm, x, ids, weights, matrices, layout)
    (out * network.losses[context.rank].to(context.device)).sum().backward()
    compare(context, network, x, weights, matrices)


@on_ranks
@each_backend
@each_layout
def test_no_grad(context: RankContext, backend: str, layout: str) -> None:
    """Under no_grad, and where nothing requires one, results have no graph and the same values."""
    network = make_network(context.num_ranks, widest(backend))
    comm = make_comm(context, backend, network.problem.plan)
    x, weights, matrices, ids = network.local(context)
    with_grad = distributed(comm, x, ids, weights, matrices, layout)
    with torch.no_grad():
        without = distributed(comm, x, ids, weights, matrices, layout)
    detached = distributed(comm, x.detach(), ids, weights.detach(), matrices.detach(), layout)
    assert with_grad.requires_grad
    assert not without.requires_grad
    assert not detached.requires_grad
    assert torch.equal(with_grad, without)
    assert torch.equal(with_grad, detached)


@on_ranks
@pytest.mark.sampled(3)
@each_backend
@each_layout
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(context: RankContext, backend: str, layout: str, use_reentrant: bool) -> None:
    """Under activation checkpointing the forward runs twice, its collectives in backward."""
    network = make_network(context.num_ranks, widest(backend))
    comm = make_comm(context, backend, network.problem.plan)

    def twice(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """Two layers, one communicator, each checkpointed by itself."""
        for _ in range(2):
            x = checkpoint(distributed, comm, x, ids, w, m, layout, use_reentrant=use_reentrant)
        return x

    check_network(context, network, twice, depth=2)


@on_ranks
@each_backend
def test_layers_share_a_communicator(context: RankContext, backend: str) -> None:
    """A layer of each layout, forward all before any backward."""
    network = make_network(context.num_ranks, widest(backend))
    comm = make_comm(context, backend, network.problem.plan)

    def deep(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        for layout in LAYOUTS:
            x = distributed(comm, x, ids, w, m, layout)
        return x

    check_network(context, network, deep, depth=len(LAYOUTS))


@on_ranks
@each_backend
def test_backward_twice(context: RankContext, backend: str) -> None:
    """retain_graph: a dispatch can be gone back through again, also after later calls."""
    network = make_network(context.num_ranks, widest(backend))
    comm = make_comm(context, backend, network.problem.plan)
    x, weights, matrices, ids = network.local(context)
    out = distributed(comm, x, ids, weights, matrices, "expert")
    loss = (out * network.losses[context.rank].to(context.device)).sum()
    loss.backward(retain_graph=True)
    distributed(comm, x, ids, weights, matrices, "token")
    loss.backward()
    for leaf in (x, weights, matrices):
        assert leaf.grad is not None
        leaf.grad /= 2
    compare(context, network, x, weights, matrices)


@on_ranks
@each_backend
def test_fp8_payload(context: RankContext, backend: str) -> None:
    """FP8 rows have no gradient, the weights beside them do; FP8 that requires one is an error, see test_errors."""
    network = make_network(context.num_ranks, FP32, hidden=128, tokens=(4, 0, 2))
    comm = make_comm(context, backend, network.problem.plan)
    _, weights, _, ids = network.local(context)
    q, scales = tl.quantize_fp8(network.xs[context.rank].to(context.device))
    routed = comm.dispatch((q, scales), ids, weights)
    assert not routed.tokens.requires_grad
    assert routed.scales is not None
    y = tl.dequantize_fp8(routed.tokens, routed.scales)
    g = network.losses[context.rank].to(context.device)
    comm.combine(y, routed).backward(g)
    dots = (tl.dequantize_fp8(q, scales) * g).sum(1, keepdim=True)
    assert weights.grad is not None
    # One float32 dot product of 128 terms in any order: relative to their sizes.
    torch.testing.assert_close(weights.grad, torch.where(ids >= 0, dots, 0), rtol=1e-5, atol=1e-4)


@on_ranks
@each_backend
@pytest.mark.parametrize("y_dtype", [BF16, FP16])
def test_weights_of_narrow_rows(context: RankContext, backend: str, y_dtype: torch.dtype) -> None:
    """The gradient of a weight is one float32 dot product: not rounded to the dtype of y on its way home."""
    problem = make_problem(Case("narrow", "", dtype=y_dtype, hidden=8, tokens=(3, 2)), context.num_ranks)
    comm = make_comm(context, backend, problem.plan)
    x, ids, weights = problem.arguments(context)
    assert weights is not None
    weights.requires_grad_()
    routed = comm.dispatch(torch.ones_like(x), ids, weights)  # type: ignore[arg-type]
    comm.combine(routed.tokens.detach() * 257 / 256, routed, out_dtype=FP32).sum().backward()
    y = torch.tensor(1.0, dtype=y_dtype) * 257 / 256
    same_bits(weights.grad, torch.where(ids >= 0, 8 * y.float(), 0.0).cpu(), "gradient of the weights")


# -- memory -----------------------------------------------------------------------------------------------------


@on_ranks
@each_backend
@each_layout
def test_graph_is_freed_at_once(context: RankContext, backend: str, layout: str) -> None:
    """Without the garbage collector: a graph that refers to itself would keep activations until it runs."""
    network = make_network(context.num_ranks, widest(backend))
    comm = make_comm(context, backend, network.problem.plan)
    room: dict[str, Any] = {"capacity": comm.plan.default_slots * comm.plan.top_k} if layout == "slots" else {}
    gc.disable()
    try:
        for backward in (True, False):
            x, weights, _, ids = network.local(context)
            routed = comm.dispatch(x, ids, weights, layout=layout, **room)
            out = comm.combine(routed.tokens, routed)
            if backward:
                out.sum().backward()
            handle = weakref.ref(routed._handle)
            del routed, out
            assert handle() is None, f"the dispatch outlives its results (backward ran: {backward})"
    finally:
        gc.enable()


@on_ranks
@each_backend
def test_results_need_the_gradients_that_inputs_need(context: RankContext, backend: str) -> None:
    """Else combine would keep all rows for gradients of weights that nobody wants."""
    problem = make_problem(Case("", "", dtype=FP32, hidden=256), context.num_ranks)
    with make_comm(context, backend, problem.plan) as comm:
        x, ids, weights = problem.arguments(context)
        for of_x, of_weights in ((True, False), (False, True), (True, True)):
            leaf, factors = x.clone().requires_grad_(of_x), weights.clone().requires_grad_(of_weights)
            routed = comm.dispatch(leaf, ids, factors, layout="token")
            assert routed.topk_weights is not None
            assert (routed.tokens.requires_grad, routed.topk_weights.requires_grad) == (of_x, of_weights)
            by_expert = comm.dispatch(leaf, ids, factors, layout="expert")
            comm.combine(by_expert.tokens * 2, by_expert).sum().backward()
            assert (leaf.grad is not None, factors.grad is not None) == (of_x, of_weights)
