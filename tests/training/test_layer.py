"""ExpertParallelMoE on W ranks against the reference, against a dense oracle, and against itself on one rank."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.defaults import caller_default
from tests.support.layer_cases import (
    EXPERT_WEIGHTS,
    HIDDEN,
    NUM_EXPERTS,
    ROUTERS,
    TOP_K,
    LayerCase,
    assert_near,
    dense_aux_loss,
    dense_layer,
    expect,
    full_weights,
    make_inputs,
    make_layer,
    short,
)
from tests.support.on_ranks import on_ranks
from tokenloom import reference
from tokenloom.ops.experts import Experts
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part

pytestmark = pytest.mark.slow_on(4)

BASE = LayerCase()
FP32, BF16 = torch.float32, torch.bfloat16


def own_inputs(context: RankContext, case: LayerCase) -> tuple[torch.Tensor, torch.Tensor]:
    xs, factors = make_inputs(case, context.num_ranks)
    return xs[context.rank].to(context.device), factors[context.rank].to(context.device)


# -- outputs ------------------------------------------------------------------------------------------------


def compare_with_reference(context: RankContext, case: LayerCase) -> None:
    layer = make_layer(case, context.group)
    full = full_weights(layer)
    xs, _ = make_inputs(case, context.num_ranks)
    wide = torch.promote_types(case.dtype, FP32)
    routes = [
        ROUTERS[case.router].route(
            x.to(wide) @ full["router_weight"].to(wide).T + full.get("router_bias", torch.zeros(1)).to(wide),
            full.get("correction_bias"),
        )
        for x in xs
    ]
    plan = Plan(context.num_ranks, NUM_EXPERTS, HIDDEN, TOP_K, sum(case.tokens))
    ids, weights = [route[0] for route in routes], [route[1] for route in routes]
    shared = (full["shared_w1"], full["shared_w2"]) if case.shared else (None, None)
    more = {name: full[name] for name in ("w1_bias", "w2_bias", "shared_gate_weight") if name in full}
    forms: dict[str, Any] = {"activation": case.activation, "weight_layout": case.layout, **more}
    want = reference.moe(plan, xs, ids, weights, full["w1"], full["w2"], *shared, **forms)
    out, _ = layer(xs[context.rank].to(context.device))
    assert out.dtype == case.dtype
    assert_near(out, want[context.rank], case.dtype, "out")


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16], ids=str)
def test_outputs_are_those_of_the_reference(ranks: Ranks, router: str, dtype: torch.dtype) -> None:
    ranks.run(compare_with_reference, replace(BASE, router=router, dtype=dtype, shared=8 if dtype != FP32 else 0))


def run_forward(context: RankContext, case: LayerCase) -> tuple[list[list[float]], float]:
    out, aux_loss = make_layer(case, context.group)(own_inputs(context, case)[0])
    return out.tolist(), aux_loss.item()


def test_many_ranks_equal_one(ranks: Ranks) -> None:
    """The layer of one rank runs here, without torch.distributed, on the tokens of all ranks at once."""
    results = ranks.run(run_forward, BASE)
    alone, aux_loss = make_layer(BASE, None)(torch.cat(make_inputs(BASE, ranks.num_ranks)[0]))
    rows = [row for out, _ in results for row in out]
    assert_near(torch.tensor(rows, dtype=BASE.dtype), alone, BASE.dtype, "out")
    for _, seen in results:
        assert seen == results[0][1]  # the same number on every rank
        assert_near(torch.tensor(seen, dtype=BASE.dtype), aux_loss, BASE.dtype, "aux_loss")


@on_ranks
def test_leading_dimensions_and_strides_are_the_callers_business(context: RankContext) -> None:
    layer = make_layer(BASE, context.group)
    x = torch.randn(6, HIDDEN, dtype=BASE.dtype).to(context.device)
    flat, _ = layer(x)
    by_shape = {
        "three dimensions": x.view(2, 3, HIDDEN),
        "four dimensions": x.view(1, 3, 2, HIDDEN),
        "strided": torch.cat([x, x], 1)[:, :HIDDEN],
        "transposed": x.view(2, 3, HIDDEN).transpose(0, 1),
    }
    for what, shaped in by_shape.items():
        out, _ = layer(shaped)
        assert out.shape == shaped.shape, what
        wanted = flat.view(2, 3, HIDDEN).transpose(0, 1) if what == "transposed" else flat.view(shaped.shape)
        assert_near(out, wanted, BASE.dtype, what)
    assert_near(layer(x[0])[0], flat[0], BASE.dtype, "one dimension")
    for empty in (x.new_zeros(3, 0, HIDDEN), x.new_zeros(0, 1).expand(0, HIDDEN)):
        assert layer(empty)[0].shape == empty.shape


@on_ranks
def test_without_gradients_outputs_are_the_same(context: RankContext) -> None:
    layer, (x, _) = make_layer(BASE, context.group), own_inputs(context, BASE)
    wanted, _ = layer(x)
    with torch.no_grad():
        out, aux_loss = layer(x)
    assert torch.equal(out, wanted)
    assert not out.requires_grad
    assert not aux_loss.requires_grad


# -- gradients ----------------------------------------------------------------------------------------------


def compare_gradients(context: RankContext, case: LayerCase) -> None:
    """One loss per rank: outputs times factors, plus this rank's share of the aux loss."""
    layer = make_layer(case, context.group)
    xs, factors = make_inputs(case, context.num_ranks)
    want = expect(case, full_weights(layer), xs, factors)
    x = xs[context.rank].detach().to(context.device).requires_grad_(case.x_grad)
    out, aux_loss = layer(x)
    assert_near(out, want.outs[context.rank], case.dtype, "out")
    if case.dtype == BF16:
        assert aux_loss.dtype == FP32
    assert_near(aux_loss, want.aux_loss, case.dtype, "aux_loss")
    ((out * factors[context.rank].to(context.device)).sum() + aux_loss / context.num_ranks).backward()

    if case.x_grad:
        assert_near(x.grad, want.x_grads[context.rank], case.dtype, "gradient of x")
    local = slice(layer.local_experts.start, layer.local_experts.stop)
    for full_name, parameter in layer.named_parameters():
        name = short(full_name)
        what = f"gradient of {name}"
        if name in case.frozen:
            assert parameter.grad is None, what
        elif name in EXPERT_WEIGHTS:
            assert_near(parameter.grad, want.grads[name][local], case.dtype, what)
        elif case.router_grad == "sum":
            assert_near(parameter.grad, want.grads[name], case.dtype, what)
        else:
            assert_near(parameter.grad, want.local_grads[context.rank][name], case.dtype, what)
            assert parameter.grad is not None
            total = parameter.grad.clone()  # what a trainer does with it
            dist.all_reduce(total, group=context.group)
            assert_near(total, want.grads[name], case.dtype, f"{what}, summed")


GRADIENT_CASES = {
    "plain": replace(BASE, balance_coef=0.0, z_coef=0.0, shared=0),
    "losses_and_shared": BASE,
    "balance_alone": replace(BASE, z_coef=0.0),
    "sum": replace(BASE, router_grad="sum"),
    "expert_grad_scale": replace(BASE, expert_grad_scale=0.25),
    "renormalized": replace(BASE, router="renormalized"),
    "topk_softmax": replace(BASE, router="topk_softmax", router_grad="sum"),
    "deepseek_v3": replace(BASE, router="deepseek_v3"),
    "bias_without_losses": replace(BASE, router="deepseek_v3", balance_coef=0.0, z_coef=0.0),
    "input_needs_none": replace(BASE, x_grad=False),
    "router_frozen": replace(BASE, frozen=("router_weight",), router_grad="sum"),
    "experts_frozen": replace(BASE, frozen=("w1", "w2")),
    "odd_intermediate": replace(BASE, intermediate=5),
    "one_rank_has_all_tokens": replace(BASE, tokens=(0, 9, 0, 0, 0, 0, 0, 0), router_grad="sum"),
    "no_tokens_anywhere": replace(BASE, tokens=(0,) * 8),
    "float32": replace(BASE, dtype=FP32),
    "float32_sum_deepseek_v3": replace(BASE, dtype=FP32, router="deepseek_v3", router_grad="sum"),
    "bfloat16": replace(BASE, dtype=BF16),
}


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_are_those_of_the_sum_of_all_losses(ranks: Ranks, name: str) -> None:
    ranks.run(compare_gradients, GRADIENT_CASES[name])


@on_ranks
@pytest.mark.parametrize("dtype", [torch.float64, FP32], ids=str)
def test_incoming_gradients_need_not_be_contiguous(context: RankContext, dtype: torch.dtype) -> None:
    """float64 runs the loop over experts, float32 the grouped GEMM, which refuses them by itself.

    sum() gives a gradient of stride 0, a transposed loss one in column order; same loss, same gradients.
    """
    case = replace(BASE, dtype=dtype, balance_coef=0.0, z_coef=0.0)
    layer, (x, factors) = make_layer(case, context.group), own_inputs(context, case)

    def grads(loss_of: Any) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        return list(torch.autograd.grad(loss_of(layer(leaf)[0]), [leaf, *layer.parameters()]))

    pairs = {
        "expanded": (lambda out: out.sum(), lambda out: (out * torch.ones_like(out)).sum()),
        "transposed": (lambda out: (out.t() * factors.t()).sum(), lambda out: (out * factors).sum()),
    }
    for what, (odd, plain) in pairs.items():
        for got, want in zip(grads(odd), grads(plain), strict=True):
            assert_near(got, local_part(want), case.dtype, what)


@on_ranks
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("router_grad", ["local", "sum"])
def test_activation_checkpointing_changes_no_bit(context: RankContext, use_reentrant: bool, router_grad: Any) -> None:
    """Recomputed layers call their collectives again inside backward, in the same order on all ranks."""
    case = replace(BASE, router_grad=router_grad)
    first, second = make_layer(case, context.group), make_layer(case, context.group)
    x, factors = own_inputs(context, case)

    def grads(run: Any) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out, aux_loss = run(first, leaf)
        out, more = run(second, leaf + out)
        ((out * factors).sum() + (aux_loss + more) / context.num_ranks).backward()
        taken = [local_part(tensor.grad) for tensor in (leaf, *first.parameters(), *second.parameters())]
        first.zero_grad()
        second.zero_grad()
        assert all(grad is not None for grad in taken)
        return [grad for grad in taken if grad is not None]

    plain = grads(lambda layer, value: layer(value))
    again = grads(lambda layer, value: checkpoint(layer, value, use_reentrant=use_reentrant))
    for got, want in zip(again, plain, strict=True):
        assert torch.equal(got, want)


# -- several layers, training -------------------------------------------------------------------------------


@on_ranks
@pytest.mark.parametrize("router", ["softmax_topk", "deepseek_v3"])
def test_layers_that_share_a_communicator_train_as_one_rank_does(context: RankContext, router: str) -> None:
    """Two layers on one communicator, trained on W ranks and, densely, on all tokens at once: the same weights.

    With a larger step the weights of four ranks' tokens explode, and differences in rounding with them.
    """
    case = replace(BASE, router=router, router_grad="sum")
    first = make_layer(case, context.group)
    second = make_layer(case, None, comm=first.comm, max_tokens_per_rank=None)
    model = torch.nn.ModuleList([first, second])
    with torch.no_grad():
        second.experts.w1.mul_(0.5)
    xs, factors = make_inputs(case, context.num_ranks)
    full = tl.gather_state_dict(model)
    dense = {name: value.double().clone() for name, value in full.items()}
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        dense[name].requires_grad_()
    groups = [{"params": each} for each in tl.split_parameters(model)]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    dense_optimizer = torch.optim.SGD([dense[name] for name in names], lr=0.01, momentum=0.9)
    batch, all_factors = torch.cat(xs).double(), torch.cat(factors).double()
    losses = []
    for _ in range(3):
        hidden, aux_loss = xs[context.rank].to(context.device), torch.zeros((), device=context.device)
        for layer in (first, second):
            out, aux = layer(hidden)
            hidden, aux_loss = hidden + out, aux_loss + aux
        optimizer.zero_grad()
        ((hidden * factors[context.rank].to(hidden)).sum() + aux_loss / context.num_ranks).backward()
        optimizer.step()

        dense_hidden, loss = batch, torch.zeros((), dtype=torch.float64)
        for index in range(2):
            weights = {short(name[2:]): value for name, value in dense.items() if name.startswith(f"{index}.")}
            part = dense_layer(dense_hidden, weights, ROUTERS[case.router], weights.get("correction_bias"))
            dense_hidden, loss = dense_hidden + part.out, loss + dense_aux_loss(case, [part])
        dense_optimizer.zero_grad()
        loss = loss + (dense_hidden * all_factors).sum()
        loss.backward()
        dense_optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = tl.gather_state_dict(model)
    for name in names:
        assert not torch.equal(trained[name], full[name]), f"{name} was not trained"
        assert_near(trained[name], dense[name], case.dtype, name)


@on_ranks
def test_the_correction_bias_moves_by_the_load_of_all_ranks(context: RankContext) -> None:
    """Without any loss too: the counts are then summed for the bias alone."""
    case = replace(BASE, router="deepseek_v3", balance_coef=0.0, z_coef=0.0)
    layer = make_layer(case, context.group)
    assert layer.expert_counts.tolist() == [0] * NUM_EXPERTS
    xs, factors = make_inputs(case, context.num_ranks)
    ids = torch.cat(expect(case, full_weights(layer), xs, factors).ids)
    layer(xs[context.rank].to(context.device))
    counts = torch.bincount(ids.flatten(), minlength=NUM_EXPERTS)
    assert layer.expert_counts.tolist() == counts.tolist()
    assert layer.correction_bias is not None
    before = layer.correction_bias.clone()
    layer.update_correction_bias(0.125)
    step = [0.125 if count < counts.float().mean() else -0.125 for count in counts.tolist()]
    assert_near(layer.correction_bias - before, torch.tensor(step), FP32, "step of the bias")


# -- weights ------------------------------------------------------------------------------------------------


def seeded_weights(context: RankContext, case: LayerCase) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in tl.gather_state_dict(make_layer(case, context.group)).items()}


def test_a_seed_gives_the_same_full_weights_for_any_number_of_ranks(ranks: Ranks) -> None:
    alone = {name: value.tolist() for name, value in make_layer(BASE, None).state_dict().items()}
    for full in ranks.run(seeded_weights, BASE):
        assert full == alone


def test_weights_are_uniform_within_their_bound_and_all_different() -> None:
    layer = make_layer(BASE, None)
    for seed in (None, 5):
        layer.reset_parameters(seed)
        for name, weight in layer.named_parameters():
            bound = weight.shape[-1] ** -0.5
            assert 0.9 * bound < weight.abs().max() <= bound, name
            assert abs(weight.mean()) < 0.2 * bound, name
            assert weight.unique().numel() == weight.numel(), name


def test_which_parameters_a_trainer_has_to_reduce() -> None:
    """Those that are the same on every rank; with the sharded ones they are all there are."""
    layer = make_layer(BASE, None)
    sharded, replicated = layer.expert_parameters(), layer.replicated_parameters()
    assert [id(each) for each in sharded] == [id(layer.experts.w1), id(layer.experts.w2)]
    assert {id(each) for each in replicated} == {
        id(each) for each in (layer.router_weight, layer.shared_w1, layer.shared_w2)
    }
    assert len(sharded) + len(replicated) == len(list(layer.parameters()))


def test_a_float64_layer_takes_a_backend_that_has_it() -> None:
    """The kernels have none; and if float64 is torch's default the layer is float64 without being told."""
    reason = "nvlink does not work on every rank: its kernels have no float64"
    assert reason in make_layer(BASE, None).comm.describe()
    assert reason not in make_layer(replace(BASE, dtype=FP32), None).comm.describe()
    torch.set_default_dtype(torch.float64)
    try:
        layer = make_layer(BASE, None, dtype=None)
    finally:
        torch.set_default_dtype(FP32)
    assert layer.experts.w1.dtype == torch.float64
    assert reason in layer.comm.describe()


def step_under(default: str | torch.dtype | None) -> dict[str, torch.Tensor]:
    """All that a step makes, in a program with a default device or dtype of its own."""
    (x,), (factors,) = make_inputs(replace(BASE, dtype=FP32, tokens=(5,)), 1)
    with caller_default(default):
        layer = make_layer(replace(BASE, dtype=FP32, balance_coef=0.1), None, device="cpu")
        out, aux_loss = layer(x)
        ((out * factors).sum() + aux_loss).backward()
    gradients = {f"gradient of {name}": each.grad for name, each in layer.named_parameters() if each.grad is not None}
    return dict(layer.named_parameters()) | gradients | {"out": out, "aux_loss": aux_loss}


@pytest.mark.parametrize("default", ["meta", torch.float64, BF16], ids=str)
def test_the_callers_defaults_change_nothing(default: str | torch.dtype) -> None:
    """Neither the weights of a seed nor what is computed with them."""
    want, found = step_under(None), step_under(default)
    assert want.keys() == found.keys()
    for name, value in want.items():
        assert torch.equal(found[name], value), name


# -- errors -------------------------------------------------------------------------------------------------

FAULTS: dict[str, type[Exception]] = {
    "wrong hidden": tl.ShapeMismatch,
    "no dimension": tl.ShapeMismatch,
    "too many tokens": tl.ShapeMismatch,
    "wrong dtype": tl.DtypeMismatch,
    "wrong device": tl.DeviceMismatch,
    "not a tensor": tl.InvalidArgument,
    "router fails": ZeroDivisionError,
    "wrong weights": tl.ShapeMismatch,
    "experts fail": RuntimeError,
}


class BrokenRouter:
    def route(self, *arguments: object) -> None:
        raise ZeroDivisionError("a router of your own")


def fail_on_one_rank(context: RankContext, case: LayerCase, fault: str, bad: int) -> None:
    layer, (x, factors) = make_layer(case, context.group), own_inputs(context, case)
    router, w1 = layer.router, layer.experts.w1

    def step() -> list[torch.Tensor]:
        out, aux_loss = layer(x)
        loss = (out * factors).sum() + aux_loss / context.num_ranks
        return [out, aux_loss, *(local_part(each) for each in torch.autograd.grad(loss, list(layer.parameters())))]

    before = step()
    bad_x: Any = x
    failing: Any = nullcontext()
    if context.rank == bad:
        if fault == "router fails":
            layer.router = BrokenRouter()  # type: ignore[assignment]
        elif fault == "experts fail":
            failing = mock.patch.object(Experts, "gemms", side_effect=RuntimeError("no memory left"))
        elif fault == "wrong weights":
            layer.experts.w1 = torch.nn.Parameter(w1.detach()[:, :, 1:])
        else:
            bad_x = {
                "wrong hidden": x.new_zeros(4, HIDDEN + 1),
                "no dimension": x.new_zeros(()),
                "too many tokens": x.new_zeros(sum(case.tokens) + 1, HIDDEN),
                "wrong dtype": x.to(FP32),
                "wrong device": x.to("meta"),
                "not a tensor": x.tolist(),
            }[fault]
    if context.rank == bad:
        with pytest.raises(FAULTS[fault]) as raised, failing:
            layer(bad_x)
        assert not isinstance(raised.value, tl.PeerError)
    else:
        with pytest.raises(tl.PeerError) as peer:
            layer(bad_x)
        assert peer.value.rank == bad
        assert FAULTS[fault].__name__ in peer.value.reason
    layer.router, layer.experts.w1 = router, w1
    for got, want in zip(step(), before, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("losses", [True, False], ids=["losses", "no_losses"])
def test_a_fault_on_one_rank_is_an_error_on_all_and_the_layer_works_on(ranks: Ranks, fault: str, losses: bool) -> None:
    """With losses there is one more collective, that the failing rank must not leave the others alone in."""
    case = BASE if losses else replace(BASE, balance_coef=0.0, z_coef=0.0)
    ranks.run(fail_on_one_rank, case, fault, ranks.num_ranks - 1)


DISAGREEMENTS = {
    "intermediate": 13,
    "activation": "geglu",
    "biases": True,
    "weight_layout": tl.WeightLayout(transposed=True),
    "shared_intermediate": 0,
    "shared_gate": True,
    "router": ROUTERS["renormalized"],
    "balance_coef": 0.0,
    "z_coef": 1.0,
    "router_grad": "sum",
    "expert_grad_scale": 0.5,
    "dtype": FP32,
    "max_tokens_per_rank": 1000,
}


@on_ranks("several_ranks")
@pytest.mark.parametrize("option", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_who_and_what(context: RankContext, option: str) -> None:
    odd = context.num_ranks - 1
    options: dict[str, Any] = {option: DISAGREEMENTS[option]} if context.rank == odd else {}
    with pytest.raises(tl.PlanMismatch) as raised:
        make_layer(BASE, context.group, **options)
    assert (raised.value.rank, raised.value.field) == (odd, option)
    make_layer(BASE, context.group)  # and the group still works


@on_ranks
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("no max_tokens_per_rank", "max_tokens_per_rank is None"),
        ("group and comm", "group and comm are both given"),
        ("intermediate", "intermediate is 0"),
        ("shared_intermediate", "shared_intermediate is -1"),
        ("router_grad", "router_grad is 'mean'"),
        ("hidden", "hidden is 17, the communicator was made for 16"),
        ("num_experts", "num_experts is 16, the communicator was made for 8"),
        ("top_k", "top_k is 4, the communicator was made for 3"),
        ("router", "router chooses 4 of 8 experts, expected"),
        ("name of router", "router is 'softmax', expected a Router or one of"),
        ("balance_coef", "balance_coef is nan, expected a number"),
        ("z_coef", "z_coef is '0.1', expected a number"),
        ("expert_grad_scale", "expert_grad_scale is None, expected a number"),
        ("dtype", "dtype is 'float32', expected"),
    ],
)
def test_a_wrong_option_on_one_rank_is_an_error_on_all(context: RankContext, what: str, named: str) -> None:
    """The last rank passes something impossible: its own error there, PeerError elsewhere, no hang."""
    comm = tl.Communicator(
        context.group, num_experts=NUM_EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens_per_rank=sum(BASE.tokens)
    )
    bad = context.num_ranks - 1
    group: Any = context.group
    options: dict[str, Any] = {}
    if what == "no max_tokens_per_rank":
        options = {"max_tokens_per_rank": None} if context.rank == bad else {}
    elif what == "group and comm":
        group, options = (group if context.rank == bad else None), {"comm": comm}
    else:
        group = None
        wrong: dict[str, dict[str, Any]] = {
            "intermediate": {"intermediate": 0},
            "shared_intermediate": {"shared_intermediate": -1},
            "router_grad": {"router_grad": "mean"},
            "hidden": {"hidden": HIDDEN + 1},
            "num_experts": {"num_experts": 2 * NUM_EXPERTS},
            "top_k": {"top_k": TOP_K + 1},
            "router": {"router": tl.Router(NUM_EXPERTS, TOP_K + 1)},
            "name of router": {"router": "softmax"},
            "balance_coef": {"balance_coef": float("nan")},
            "z_coef": {"z_coef": "0.1"},
            "expert_grad_scale": {"expert_grad_scale": None},
            "dtype": {"dtype": "float32"},
        }
        options = {"comm": comm} | (wrong[what] if context.rank == bad else {})
    with pytest.raises(tl.InvalidArgument if context.rank == bad else tl.PeerError, match=named):
        make_layer(BASE, group, **options)
    make_layer(BASE, None, comm=comm)


@on_ranks
def test_a_copy_shares_the_communicator(context: RankContext) -> None:
    """As averages of weights make it."""
    layer, (x, _) = make_layer(BASE, context.group), own_inputs(context, BASE)
    twin = copy.deepcopy(layer)
    assert twin.comm is layer.comm
    want = layer(x)[0]
    assert torch.equal(twin(x)[0], want)
    with torch.no_grad():
        layer.experts.w2.zero_()
    assert torch.equal(twin(x)[0], want)


@on_ranks
def test_autocast_is_what_mixed_dtypes_are_for(context: RankContext) -> None:
    """The message of DtypeMismatch recommends it."""
    case = replace(BASE, dtype=FP32)
    layer, (x, factors) = make_layer(case, context.group), own_inputs(context, case)
    exact, _ = layer(x)
    for given in (x, x.to(BF16)):
        leaf = given.clone().requires_grad_()
        with torch.autocast(context.device.type, dtype=BF16):
            out, aux_loss = layer(leaf)
            loss = (out.float() * factors).sum() + aux_loss / context.num_ranks
        loss.backward()
        assert_near(out, exact, BF16, "out")
        assert leaf.grad is not None
        assert all(weight.grad is not None and weight.grad.dtype == FP32 for weight in layer.parameters())
        layer.zero_grad()
