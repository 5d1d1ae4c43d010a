"""Routers against a loop over single numbers, their gradients, and the losses worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenloom import ExpertParallelMoE, InvalidArgument, Router
from tokenloom.ops.router import RouterSums, balance_loss, router_logits, router_sums, z_loss

# The routers that people use, at their published sizes, and the corners of each option.
ROUTERS = {
    "switch": Router(8, 1),
    "qwen3": Router(128, 8, renormalize=True),
    "mixtral": Router(8, 2, "topk_softmax"),
    "gpt_oss": Router(32, 4, "topk_softmax"),
    "deepseek_v2": Router(160, 6, scale=16.0, num_groups=8, top_groups=3),
    "deepseek_v3": Router(256, 8, "sigmoid", True, 2.5, True, 8, 4),
    "sigmoid_plain": Router(16, 4, "sigmoid"),
    "sigmoid_groups_of_one": Router(8, 2, "sigmoid", True, num_groups=8, top_groups=3),
    "softmax_bias": Router(16, 4, correction_bias=True),
    "ernie": Router(16, 4, renormalize=True, correction_bias=True, least_sum=1e-12),
    "sums_below_the_least": Router(16, 2, renormalize=True, correction_bias=True, least_sum=0.3),
    "topk_softmax_scaled_groups": Router(12, 3, "topk_softmax", scale=0.5, num_groups=3, top_groups=2),
    "all_experts": Router(5, 5, "sigmoid", True),
}


def route_one(row: list[torch.Tensor], router: Router, bias: list[float] | None) -> dict[int, torch.Tensor]:
    """One token by loops over single numbers: expert -> weight. Differentiable, since the numbers are tensors."""
    experts = range(router.num_experts)
    if router.score == "sigmoid":
        scores = [1 / (1 + torch.exp(-logit)) for logit in row]
    elif router.score == "softmax_topk":
        total = sum(torch.exp(logit) for logit in row)
        scores = [torch.exp(logit) / total for logit in row]
    else:
        scores = row
    choice = {e: scores[e].item() + (bias[e] if bias else 0.0) for e in experts}

    size = router.num_experts // router.num_groups
    groups = [[e for e in experts if e // size == g] for g in range(router.num_groups)]
    values = []
    for group in groups:
        best_first = sorted((choice[e] for e in group), reverse=True)
        values.append(sum(best_first[:2]) if router.score == "sigmoid" else best_first[0])
    best_groups = sorted(range(router.num_groups), key=lambda g: -values[g])[: router.top_groups]
    allowed = [e for g in best_groups for e in groups[g]]

    chosen = sorted(allowed, key=lambda e: -choice[e])[: router.top_k]
    weights = {e: scores[e] for e in chosen}
    if router.score == "topk_softmax":
        weights = {e: torch.exp(row[e]) for e in chosen}
    if router.score == "topk_softmax" or router.renormalize:
        total = sum(weights.values())
        if total < router.least_sum:
            total = router.least_sum
        weights = {e: weight / total for e, weight in weights.items()}
    return {e: weight * router.scale for e, weight in weights.items()}


def make_case(router: Router, num_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float64 logits, and a bias large enough to change the choice, negative for half of the experts."""
    generator = torch.Generator().manual_seed(router.num_experts + router.top_k)
    logits = 2 * torch.randn(num_tokens, router.num_experts, dtype=torch.float64, generator=generator)
    bias = torch.randn(router.num_experts, generator=generator) if router.correction_bias else None
    return logits, bias


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_and_weights_are_those_of_the_loop(name: str) -> None:
    router = ROUTERS[name]
    logits, bias = make_case(router)
    ids, weights, probabilities = router.route(logits, bias)
    assert ids.dtype == torch.int64
    assert ids.shape == weights.shape == (len(logits), router.top_k)
    for token, row in enumerate(logits):
        wanted = route_one(list(row), router, None if bias is None else bias.tolist())
        got = dict(zip(ids[token].tolist(), weights[token], strict=True))
        assert got.keys() == wanted.keys()
        for expert, weight in wanted.items():
            torch.testing.assert_close(got[expert], weight, rtol=1e-12, atol=0)
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.exp()
    torch.testing.assert_close(probabilities, scores / scores.sum(-1, keepdim=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_are_those_of_the_loop(name: str) -> None:
    """Of the weights alone: the choice has no gradient, and neither has the bias."""
    router = ROUTERS[name]
    logits, bias = make_case(router, num_tokens=3)
    logits.requires_grad_()
    if bias is not None:
        bias.requires_grad_()
    ids, weights, _ = router.route(logits, bias)
    factors = torch.randn(weights.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (grad,) = torch.autograd.grad((weights * factors).sum(), logits)
    assert bias is None or torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)

    looped = logits.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for token in range(len(logits)):
        wanted = route_one(list(looped[token]), router, None if bias is None else bias.tolist())
        for k, expert in enumerate(ids[token].tolist()):
            total = total + wanted[expert] * factors[token, k]
    (wanted_grad,) = torch.autograd.grad(total, looped)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-9, atol=1e-12)


def test_sums_below_the_least_there_are_some() -> None:
    """What the case of that name is for: some weights that sum to 1, some that do not."""
    router = ROUTERS["sums_below_the_least"]
    sums = router.route(*make_case(router))[1].sum(1)
    assert 0 < (sums > 0.999).sum() < len(sums)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"renormalize": True, "least_sum": -1.0}, "least_sum is -1.0, expected a finite number of at least 0"),
        ({"renormalize": True, "least_sum": math.inf}, "least_sum is inf"),
        ({"least_sum": 0.1}, "least_sum needs renormalize=True"),
        ({"score": "topk_softmax", "renormalize": True, "least_sum": 0.1}, "a score other than 'topk_softmax'"),
    ],
)
def test_least_sums_that_make_no_router(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Router(8, 2, **options)


def test_float32_logits_stay_float32() -> None:
    logits, bias = make_case(ROUTERS["deepseek_v3"])
    ids, weights, probabilities = ROUTERS["deepseek_v3"].route(logits.float(), bias)
    assert weights.dtype == probabilities.dtype == torch.float32
    wanted_ids, wanted, _ = ROUTERS["deepseek_v3"].route(logits, bias)
    torch.testing.assert_close(ids, wanted_ids)
    # A handful of float32 operations, each within half an ulp.
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-6, atol=0)


def test_backward_under_autocast_has_the_same_bits() -> None:
    """Losses are often scaled, and backward called, inside of the caller's autocast."""
    torch.manual_seed(0)
    tokens, weight = torch.randn(5, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    logits = router_logits(tokens, weight, torch.float32)
    grad = torch.randn_like(logits)
    want = torch.autograd.grad(logits, (tokens, weight), grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(logits, (tokens, weight), grad)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_deepseek_v3_worked_by_hand() -> None:
    """Two groups of three experts, one allowed. Logits are those of the scores below.

    scores  0.6 0.5 0.1 | 0.9 0.2 0.3      bias  0.2 0.3 0 | 0 0 0
    biased  0.8 0.8 0.1 | 0.9 0.2 0.3      groups (two best): 1.6 | 1.2
    So the best expert, 3, is shut out with its group, expert 1 is chosen for its bias, and weights are
    0.6 / 1.1 and 0.5 / 1.1 of 2.5.
    """
    scores = torch.tensor([[0.6, 0.5, 0.1, 0.9, 0.2, 0.3]], dtype=torch.float64)
    bias = torch.tensor([0.2, 0.31, 0, 0, 0, 0])
    router = Router(6, 2, "sigmoid", True, 2.5, True, num_groups=2, top_groups=1)
    ids, weights, _ = router.route(torch.logit(scores), bias)
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.6]], dtype=torch.float64) / 1.1 * 2.5)


def test_group_value_is_the_best_score_for_softmax_and_the_two_best_for_sigmoid() -> None:
    """A group with one good expert against one with two fair ones: DeepSeek-V2 takes the first, V3 the second."""
    logits = torch.tensor([[2.0, -3.0, 1.5, 1.4]])
    by_best, _, _ = Router(4, 2, num_groups=2, top_groups=1).route(logits)
    by_two, _, _ = Router(4, 2, "sigmoid", num_groups=2, top_groups=1).route(logits)
    assert by_best.tolist() == [[0, 1]]
    assert by_two.tolist() == [[2, 3]]


def test_a_negative_biased_score_is_still_better_than_a_forbidden_group() -> None:
    """Masking with 0 instead of -inf would choose experts outside the allowed group."""
    bias = torch.tensor([-1.0, -5.0, -2.0, -2.0])
    ids, _, _ = Router(4, 2, "sigmoid", correction_bias=True, num_groups=2, top_groups=1).route(
        torch.zeros(1, 4), bias
    )
    assert sorted(ids[0].tolist()) == [2, 3]


def test_no_tokens() -> None:
    for router in ROUTERS.values():
        bias = torch.zeros(router.num_experts) if router.correction_bias else None
        ids, weights, probabilities = router.route(torch.zeros(0, router.num_experts), bias)
        assert ids.shape == weights.shape == (0, router.top_k)
        assert probabilities.shape == (0, router.num_experts)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"score": "relu"}, "relu"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 9}, "top_k"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": "x"}, "scale is 'x'"),
        ({"num_experts": 64, "top_k": 33}, "top_k"),
        ({"num_groups": 3}, "num_groups"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups"),
        ({"num_groups": 4, "top_groups": 0}, "top_groups"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "top_groups=1 leave only 2"),
        ({"score": "topk_softmax", "correction_bias": True}, "correction_bias"),
    ],
    ids=str,
)
def test_impossible_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Router(**{"num_experts": 8, "top_k": 2, **options})  # type: ignore[arg-type]


# -- losses -------------------------------------------------------------------------------------------------


def sums_of(logits: torch.Tensor, ids: list[list[int]]) -> RouterSums:
    return router_sums(logits, logits.softmax(-1), torch.tensor(ids))


def test_balance_loss_of_even_routing_is_one() -> None:
    """Whatever E and K: the constant that makes coefficients comparable between models."""
    for num_experts, ids in ((4, [[0], [1], [2], [3]]), (4, [[0, 1], [2, 3]]), (3, [[0, 1], [2, 0], [1, 2]])):
        logits = torch.zeros(len(ids), num_experts)
        torch.testing.assert_close(balance_loss(sums_of(logits, ids), len(ids[0])), torch.tensor(1.0))


def test_balance_loss_by_hand() -> None:
    """Probabilities (3/4, 1/4) and (1/2, 1/2), both tokens to expert 0: 2 * (1 * 5/8 + 0 * 3/8) = 5/4.

    And everything on one expert is the worst, E.
    """
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(balance_loss(sums_of(logits, [[0], [0]]), 1), torch.tensor(1.25).double())
    # top-2 of 2 is always even, whatever the probabilities
    torch.testing.assert_close(balance_loss(sums_of(logits, [[0, 1], [1, 0]]), 2), torch.tensor(1.0).double())
    one_sided = torch.tensor([[100.0, 0.0, 0.0, 0.0]] * 3)
    torch.testing.assert_close(balance_loss(sums_of(one_sided, [[0]] * 3), 1), torch.tensor(4.0))


def test_balance_loss_gradient_by_hand() -> None:
    """The share of routes is a constant: d loss / d p[t, e] = E * share[e] / T, through the softmax."""
    logits = torch.tensor([[0.3, -1.0, 0.2], [1.0, 0.0, -0.5]], dtype=torch.float64, requires_grad=True)
    balance_loss(sums_of(logits, [[0, 2], [0, 1]]), 2).backward()
    by_probability = 3 * torch.tensor([2 / 4, 1 / 4, 1 / 4], dtype=torch.float64) / 2
    p = logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, p * (by_probability - (p * by_probability).sum(-1, keepdim=True)))


def test_z_loss_by_hand() -> None:
    """Log-sum-exps ln 2 and ln 4: (1 + 4) / 2 * ln(2)^2."""
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], dtype=torch.float64)
    torch.testing.assert_close(z_loss(sums_of(logits, [[0], [1]])), torch.tensor(2.5 * math.log(2) ** 2).double())


def test_losses_of_no_tokens_are_zero_with_zero_gradients() -> None:
    """All ranks may have an empty batch: 0 / 0 would poison the router."""
    logits = torch.zeros(0, 4, requires_grad=True)
    sums = router_sums(logits, logits.softmax(-1), torch.zeros(0, 2, dtype=torch.int64))
    loss = balance_loss(sums, 2) + z_loss(sums)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.shape == (0, 4)


def test_sums_of_parts_add_up() -> None:
    """What makes W ranks equal one: the sums over ranks are those of the whole batch."""
    logits, _ = make_case(ROUTERS["mixtral"], num_tokens=7)
    ids, _, probabilities = ROUTERS["mixtral"].route(logits)
    whole = router_sums(logits, probabilities, ids)
    parts = [router_sums(logits[part], probabilities[part], ids[part]) for part in (slice(0, 2), slice(2, 7))]
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(parts[0], name) + getattr(parts[1], name), value)
    assert whole.num_tokens.tolist() == [7]
    assert whole.expert_counts.tolist() == [ids.flatten().tolist().count(expert) for expert in range(8)]


# -- correction bias ----------------------------------------------------------------------------------------


def layer_with_bias(num_tokens: int) -> ExpertParallelMoE:
    router = Router(4, 1, "sigmoid", correction_bias=True)
    return ExpertParallelMoE(
        hidden=4, intermediate=4, num_experts=4, top_k=1, max_tokens_per_rank=num_tokens, router=router
    )


def test_the_correction_bias_rises_for_underloaded_experts_until_they_are_chosen() -> None:
    """Logits are the tokens themselves. Experts 0 and 1 get 3 and 1 of four tokens, the mean is 1."""
    layer = layer_with_bias(4)
    with torch.no_grad():
        layer.router_weight.copy_(torch.eye(4))
    x = torch.tensor([[2.0, 0, 0, 0], [2.0, 0, 0, 0], [2.0, 1.0, 0, 0], [0, 2.0, 0, 0]])
    layer(x)
    assert layer.expert_counts.tolist() == [3, 1, 0, 0]
    layer.update_correction_bias(0.25)
    assert layer.correction_bias is not None
    assert layer.correction_bias.tolist() == [-0.25, 0, 0.25, 0.25]
    layer.update_correction_bias(0.25)
    layer(x)  # sigmoid(0) + 0.5 beats sigmoid(2) - 0.5
    assert layer.expert_counts[0] == 0


def test_update_correction_bias_needs_one() -> None:
    layer = ExpertParallelMoE(hidden=4, intermediate=4, num_experts=4, top_k=1, max_tokens_per_rank=1)
    with pytest.raises(InvalidArgument, match="correction_bias=True"):
        layer.update_correction_bias(0.1)


# -- routers that cannot learn ------------------------------------------------------------------------------


def layer_of(router: Router) -> ExpertParallelMoE:
    return ExpertParallelMoE(hidden=4, intermediate=4, num_experts=4, top_k=1, max_tokens_per_rank=4, router=router)


def router_gradient(layer: ExpertParallelMoE) -> float:
    layer.reset_parameters(seed=0)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    layer(x)[0].square().sum().backward()
    assert layer.router_weight.grad is not None
    return layer.router_weight.grad.abs().max().item()


CONSTANT = [
    Router(4, 1, "topk_softmax"),
    Router(4, 1, renormalize=True),
    Router(4, 1, "sigmoid", renormalize=True, scale=2.5),
    Router(4, 1, renormalize=True, least_sum=1e-12),
]


@pytest.mark.parametrize("router", CONSTANT)
def test_a_router_that_cannot_learn(router: Router) -> None:
    """Its weights are all alike, so the gradient that comes from outputs is 0, but for rounding."""
    advice = r"cannot learn; use Router\(4, 1, 'softmax_topk', renormalize=False\)"
    with pytest.warns(UserWarning, match=advice) as seen:
        layer = layer_of(router)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert router_gradient(layer) < 1e-6


@pytest.mark.parametrize(
    "router",
    [Router(4, 1), Router(4, 1, "sigmoid"), Router(4, 1, renormalize=True, least_sum=1.0)],
    ids=["softmax", "sigmoid", "divided by 1"],
)
def test_a_router_of_one_route_that_learns(router: Router) -> None:
    assert router_gradient(layer_of(router)) > 1e-4
