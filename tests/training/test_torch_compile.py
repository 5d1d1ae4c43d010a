"""ExpertParallelMoE inside torch.compile: one graph, eager's bits, one order of collectives, nothing kept too long."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tokenloom as tl
from tests.conftest import NUM_GPUS, Ranks
from tests.support.layer_cases import HIDDEN, NUM_EXPERTS, LayerCase, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.training import torch_compile
from tokenloom.training.shards import local_part

BF16 = torch.bfloat16
CASE = LayerCase(dtype=torch.float32)
SIZES = (3, 5, 4, 7, 1, 0, 6)
"""Tokens of one call after the other."""
MOST_GRAPHS = 4
"""For the first size, for all others, for no token and for one: what torch tells apart."""


def on_groups_of(*numbers: int) -> pytest.MarkDecorator:
    """On groups of so many processes, and of so many GPUs; compiling takes too long for more."""
    groups = [pytest.param(("cpu", n), id=f"cpu{n}") for n in numbers]
    for n in numbers:
        few = pytest.mark.skipif(n > NUM_GPUS, reason=f"fewer than {n} NVIDIA GPUs on this machine")
        groups.append(pytest.param(("cuda", n), id=f"cuda{n}", marks=[pytest.mark.gpu, few]))
    return pytest.mark.parametrize("ranks", groups, indirect=True)


@pytest.fixture
def inductor() -> None:
    """Skips where inductor finds no C++ compiler. To ask takes 2 s, and all ranks import this file."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # what is raised differs by release
        pytest.skip(f"inductor finds no C++ compiler here: {type(error).__name__}")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


class Model(nn.Module):
    """Two layers that share a communicator and do not feed each other. All else is exact: bits can be compared.

    Args:
        checkpointed: names of layers that run again in backward.
    """

    def __init__(self, case: LayerCase, group: Any, checkpointed: tuple[str, ...]) -> None:
        super().__init__()
        self.first = make_layer(case, group)
        self.second = make_layer(case, None, comm=self.first.comm, max_tokens_per_rank=None)
        self.checkpointed = checkpointed
        with torch.no_grad():
            self.second.experts.w1.mul_(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, aux = self._run("first", x.relu())
        second, more = self._run("second", x * 2)
        return x - first.relu() + second, aux + more

    def _run(self, name: str, x: torch.Tensor) -> Any:
        layer = getattr(self, name)
        return checkpoint(layer, x, use_reentrant=False) if name in self.checkpointed else layer(x)


def record_calls(layer: Any, calls: list[Any], name: str = "") -> Any:
    """Put the name into ``calls`` whenever the layer really runs."""
    run = layer._forward

    def recorded(x: torch.Tensor, **options: Any) -> Any:
        calls.append(name)
        return run(x, **options)

    layer._forward = recorded
    return layer


def step(run: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Outputs, and the gradients of a loss that depends on both of them."""
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    out, aux_loss = run(leaf)
    (out.float().square().sum() + aux_loss).backward()
    return [out.detach(), aux_loss.detach(), leaf.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same_bits(got: list[Any], want: list[Any]) -> None:
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        if other is None:
            assert one is None, i
        else:
            assert one.dtype == other.dtype, i
            one, other = local_part(one), local_part(other)
            assert torch.equal(one, other), (i, (one - other).abs().max())


# -- the bits of eager --------------------------------------------------------------------------------------


def counting(compiler: str) -> Any:
    """A compiler that counts graphs in ``frame_count``. Imported here: all ranks import this file."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(compiler)


def fresh_cache() -> Any:
    """Nothing that was compiled earlier is used."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def compare_with_eager(
    context: RankContext, compiler: str, checkpointed: tuple[str, ...], sizes: tuple[tuple[int, ...], ...]
) -> None:
    torch._dynamo.reset()
    model = Model(CASE, context.group, checkpointed)
    calls: list[str] = []
    layers = [record_calls(layer, calls) for layer in (model.first, model.second)]
    counter = counting(compiler)
    run = torch.compile(model, fullgraph=True, backend=counter)
    generator = torch.Generator().manual_seed(context.rank)
    for number, num_tokens in enumerate(sizes[context.rank]):
        x = torch.randn(num_tokens, HIDDEN, generator=generator).to(context.device)
        want = step(model, model, x)
        counts = [layer.expert_counts.clone() for layer in layers]
        for layer in layers:
            layer.expert_counts.zero_()
        calls.clear()
        got = step(run, model, x)
        assert_same_bits(got, want)
        assert_same_bits([layer.expert_counts for layer in layers], counts)
        for layer in layers:
            layer.expert_counts.zero_()
        assert len(calls) == 2 + len(checkpointed)
        assert number > 0 or counter.frame_count == 1
        gc.collect()  # a rank that waits for a late one catches exceptions, which hold the frames below them
        assert len(torch_compile._kept) == 0
    assert counter.frame_count <= MOST_GRAPHS
    model.first.comm.close()


@pytest.mark.slow_on(1)
@pytest.mark.parametrize(
    ("checkpointed", "sizes"),
    [
        pytest.param((), SIZES[:3], id="kept, several tokens", marks=pytest.mark.slow),
        pytest.param((), SIZES, id="kept", marks=pytest.mark.slow),
        pytest.param(("first", "second"), SIZES, id="checkpointed", marks=pytest.mark.slow),
    ],
)
@on_groups_of(1, 2)
def test_any_number_of_tokens(ranks: Ranks, checkpointed: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """One graph, eager's bits, and a number of tokens that changes does not make a graph each time.

    Ranks compile at different times: graphs depend on how many tokens a rank has.
    """
    ranks.run(compare_with_eager, "aot_eager", checkpointed, (sizes, sizes[::-1]))


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
@on_groups_of(2)
def test_inductor(ranks: Ranks) -> None:
    """One layer runs again in backward, beside the other one's gradient."""
    ranks.run(compare_with_eager, "inductor", ("first",), ((5, 3, 6), (0, 4, 2)))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, router="deepseek_v3", router_grad="sum", expert_grad_scale=0.25),
        replace(CASE, dtype=BF16, balance_coef=0.0, z_coef=0.0, shared=0),
        replace(CASE, frozen=("w1", "router_weight"), shared=0),
        replace(
            CASE,
            router="gpt_oss",
            activation="swigluoai",
            biases=True,
            layout=tl.WeightLayout(transposed=True, interleaved=True),
            shared_gate=True,
        ),
    ],
    ids=["bias_and_sum", "bfloat16_without_losses", "frozen", "gpt_oss"],
)
def test_options_of_the_layer(case: LayerCase) -> None:
    model = make_layer(case, None)
    x = torch.randn(6, HIDDEN).to(case.dtype)
    assert_same_bits(step(torch.compile(model, fullgraph=True, backend="aot_eager"), model, x), step(model, model, x))


@on_ranks
@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["layer_in_ddp", "ddp_compiled"])
@on_groups_of(2)
def test_data_parallel(context: RankContext, inside: bool) -> None:
    """Two steps, eager and compiled: DDP reduces what is replicated, the layer has reduced its experts."""
    torch._dynamo.reset()
    trained = []
    for is_compiled in (False, True):
        torch.manual_seed(5)
        layer = make_layer(replace(CASE, expert_grad_scale=1 / context.num_ranks), context.group)
        model = nn.ModuleDict({"dense": nn.Linear(HIDDEN, HIDDEN).to(context.device), "moe": layer})
        model.forward = lambda x, model=model: model["moe"](model["dense"](x))  # type: ignore[method-assign]
        if is_compiled and inside:
            layer.compile(fullgraph=True, backend="aot_eager")
        run: nn.Module = tl.data_parallel(model, process_group=context.group)
        if is_compiled and not inside:
            run = torch.compile(run, backend="aot_eager")  # type: ignore[assignment]
        optimizer = torch.optim.SGD([{"params": each} for each in tl.split_parameters(model)], lr=0.1)
        for turn in range(2):
            generator = torch.Generator().manual_seed(10 * turn + context.rank)
            x = torch.randn(4 + turn, HIDDEN, generator=generator).to(context.device)
            optimizer.zero_grad()
            out, aux_loss = run(x)
            (out.square().mean() + aux_loss).backward()
            optimizer.step()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
        layer.comm.close()
    assert_same_bits(trained[1], trained[0])


@pytest.mark.slow
@pytest.mark.parametrize("x_dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast(x_dtype: torch.dtype, where: str) -> None:
    """Of the compiled function, and around it; outputs and gradients have eager's dtypes."""
    layer = make_layer(CASE, None)
    x = torch.randn(5, HIDDEN).to(x_dtype)

    def function(value: torch.Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return layer(value)

    want = step(function, layer, x)
    assert want[0] is not None
    assert want[0].dtype == BF16
    if where == "inside":
        got = step(torch.compile(function, fullgraph=True, backend="aot_eager"), layer, x)
    else:
        run = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.autocast("cpu", BF16):
            out, _ = run(x)
        assert_same_bits([out.detach()], want[:1])
        got = step(torch.autocast("cpu", BF16)(run), layer, x)
    assert_same_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("x_dtype", [torch.float64, BF16], ids=str)
def test_a_loss_without_coefficients(x_dtype: torch.dtype) -> None:
    """It is 0, of the dtype that the compiler was promised; else it reads beyond it."""
    layer = tl.ExpertParallelMoE(
        hidden=16, intermediate=16, num_experts=4, top_k=2, max_tokens_per_rank=8, device="cpu", dtype=x_dtype
    )

    def function(value: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return layer(value)[1]

    x = torch.randn(8, 16, dtype=x_dtype)
    got = torch.compile(lambda value: function(value) * 2 + 1)(x)
    assert function(x).dtype == got.dtype == torch.promote_types(x_dtype, torch.float32)
    assert got.item() == 1


def test_equal_calls_are_two_calls() -> None:
    """The compiler would make one of them, with one ticket for two gradients. This one has inductor's partitioner."""
    layer = make_layer(CASE, None)

    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (one, aux), (other, more) = layer(x), layer(x)
        return one + 2 * other, aux + more

    x, calls = torch.randn(6, HIDDEN), []
    want = step(twice, layer, x)
    record_calls(layer, calls)
    run = torch.compile(twice, fullgraph=True, backend="aot_eager_decomp_partition")
    assert_same_bits(step(run, layer, x), want)
    assert len(calls) == 2


@pytest.mark.parametrize("layout", [tl.WeightLayout(), tl.WeightLayout(transposed=True)], ids=["plain", "transposed"])
def test_fake_kernels_promise_what_is_returned(layout: tl.WeightLayout) -> None:
    layer = make_layer(replace(CASE, router="deepseek_v3", layout=layout), None)
    weights = list(layer.parameters())
    for shape in ((4, HIDDEN), (2, 3, HIDDEN), (0, HIDDEN)):
        x = torch.randn(HIDDEN, *shape[:-1]).movedim(0, -1)  # not contiguous; outputs are
        for wants_grad in ([True] * 6, [False] * 6):
            buffers, rest = (layer.correction_bias, layer.expert_counts), (layer._number,)
            given = (x, weights, None, None, *buffers, *rest, wants_grad, None, True, True)
            torch.library.opcheck(torch_compile.moe_forward, given, test_utils=("test_schema", "test_faketensor"))
        out, aux_loss, _, ticket = torch_compile.moe_forward(*given[:7], [True] * 6, None, True, True)
        grads = (torch.randn_like(out), torch.randn_like(aux_loss))
        kept = (ticket, *grads, weights, list(shape), torch.float32, [True] * 6)
        again = (*grads, x, weights, None, None, layer.correction_bias, layer._number, [True] * 6, None)
        results = []
        for operator, back in ((torch_compile.moe_backward, kept), (torch_compile.moe_forward_backward, again)):
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                promised = operator(*back)
            results.append(operator(*back))
            for got, want in zip(results[-1], promised, strict=True):
                assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert_same_bits(*results)


# -- the same calls in the same order on all ranks ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_inductor_keeps_the_order_of_the_program() -> None:
    """It saves memory by computing what needs little first: here the second layer. Ranks differ in what they need."""
    case, calls = replace(CASE, tokens=(64,)), []
    first = record_calls(make_layer(case, None), calls, "first")
    second = record_calls(make_layer(case, None, comm=first.comm, max_tokens_per_rank=None), calls, "second")

    def function(x: torch.Tensor) -> torch.Tensor:
        large = first(x)[0]
        return large * second(x[:32].sin())[0].sum()

    with fresh_cache(), torch.no_grad():
        torch.compile(function, fullgraph=True)(torch.randn(64, HIDDEN))
    assert calls == ["first", "second"]


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("num_tokens", [5, 0])
def test_the_order_of_backward_does_not_depend_on_sizes(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inductor would run a checkpointed layer again does."""
    calls: list[str] = []
    model = Model(CASE, None, ("first",))
    for name in ("first", "second"):
        record_calls(getattr(model, name), calls, name)
    gradients = torch_compile._gradients

    def recorded(outputs: Any, grads: Any, inputs: Any) -> Any:
        of_first = inputs[1].data_ptr() == model.first.router_weight.data_ptr()
        calls.append(f"gradient of {'first' if of_first else 'second'}")
        return gradients(outputs, grads, inputs)

    monkeypatch.setattr(torch_compile, "_gradients", recorded)
    with fresh_cache():
        step(torch.compile(model, fullgraph=True), model, torch.randn(num_tokens, HIDDEN))
    assert calls == ["first", "second", "gradient of second", "first", "gradient of first"]


class FrozenBehindScale(nn.Module):
    """With T = 0 the gradient of the scale is 0, whatever the gradient of the layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.layer = make_layer(replace(CASE, shared=0), None)
        self.layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x * self.scale)


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_a_rank_without_tokens_takes_part_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    gradients = torch_compile._gradients
    monkeypatch.setattr(torch_compile, "_gradients", lambda *given: (taken.append(1), gradients(*given))[1])
    model = FrozenBehindScale()
    with fresh_cache():
        out, aux_loss = torch.compile(model, fullgraph=True)(torch.randn(0, HIDDEN))
        (out.sum() + aux_loss).backward()
    assert len(taken) == 1
    assert model.scale.grad is not None


# -- what is kept -------------------------------------------------------------------------------------------


def test_what_the_compiler_computed_may_be_overwritten() -> None:
    """Inductor puts something else where x was; it does not know that the layer keeps it."""
    layer = make_layer(CASE, None)
    own, x = list(layer.parameters()), torch.randn(5, HIDDEN)

    def grads(weights: list[torch.Tensor], overwritten: list[torch.Tensor]) -> list[torch.Tensor]:
        wants_grad = [True] * (1 + len(own))
        rest = (None, None, None, layer.expert_counts, layer._number, wants_grad, None, True, True)
        out, aux_loss, counts, ticket = torch_compile.moe_forward(x, weights, *rest)
        given = (torch.ones_like(out), torch.ones_like(aux_loss), weights, list(x.shape), x.dtype, wants_grad)
        for tensor in (out, aux_loss, counts, *overwritten):
            tensor.zero_()
        return torch_compile.moe_backward(ticket, *given)

    want = grads(own, [])
    computed = [weight.detach().clone() for weight in own]
    assert_same_bits(grads(computed, [x, *computed]), want)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forwards_without_backward_keep_nothing(compiler: str, request: pytest.FixtureRequest) -> None:
    """And those with one keep what they need until then, or until nobody can ask for it."""
    if compiler == "inductor":
        request.getfixturevalue("inductor")
    layer = make_layer(CASE, None)
    run = torch.compile(layer, fullgraph=True, backend=compiler)
    x = torch.randn(5, HIDDEN, requires_grad=True)
    held: list[Any] = []
    for _ in range(3):
        held.append(run(x))
    graphs = [weakref.ref(kept) for kept in torch_compile._kept.values()]
    rows = [weakref.ref(kept.inputs[0]) for kept in torch_compile._kept.values()]
    assert len(graphs) == 3
    held.pop()
    assert len(torch_compile._kept) == 2
    held[0][0].sum().backward()
    assert len(torch_compile._kept) == 1
    held.clear()
    assert [each() for each in (*graphs, *rows)] == [None] * 6
    for _ in range(20):
        run(x)
        assert len(torch_compile._kept) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    layer, x = make_layer(CASE, None), torch.randn(5, HIDDEN)
    want = layer(x)[0].detach()
    run = torch.compile(layer.eval(), fullgraph=True, backend="aot_eager")
    with mode():
        out, aux_loss = run(x)
        assert len(torch_compile._kept) == 0
    assert torch.equal(out, want)
    assert not out.requires_grad
    assert not aux_loss.requires_grad


def test_a_forward_has_one_backward() -> None:
    layer = make_layer(CASE, None)
    x = torch.randn(5, HIDDEN, requires_grad=True)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = run(x)[0].sum()
    out.backward(retain_graph=True)
    with pytest.raises(tl.NotDifferentiable, match="no retain_graph"):
        out.backward()
    (grad,) = torch.autograd.grad(run(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "num_kept"), [(CheckpointPolicy.PREFER_RECOMPUTE, 0), (CheckpointPolicy.MUST_SAVE, 1)]
)
def test_a_checkpoint_keeps_nothing_unless_it_is_told_to(policy: CheckpointPolicy, num_kept: int) -> None:
    layer, x = make_layer(CASE, None), torch.randn(5, HIDDEN)
    contexts = partial(create_selective_checkpoint_contexts, lambda context, operator, *args, **kwargs: policy)

    def run(value: torch.Tensor) -> Any:
        return checkpoint(layer, value.relu(), use_reentrant=False, context_fn=contexts)

    function = torch.compile(run, fullgraph=True, backend="aot_eager")
    held = function(x)
    assert len(torch_compile._kept) == num_kept
    del held
    assert_same_bits(step(function, layer, x), step(lambda value: layer(value.relu()), layer, x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_a_compiled_layer(use_reentrant: bool) -> None:
    layer, x = make_layer(CASE, None), torch.randn(5, HIDDEN)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def around(value: torch.Tensor) -> Any:
        outputs = checkpoint(run, value, use_reentrant=use_reentrant)
        assert len(torch_compile._kept) == 0  # all of it is computed again
        return outputs

    assert_same_bits(step(around, layer, x), step(layer, layer, x))


# -- layers -------------------------------------------------------------------------------------------------


def test_layers_of_one_shape_share_a_graph() -> None:
    """As blocks of a model that are compiled one by one; more than torch's limit of graphs for one function."""
    layers = [make_layer(CASE, None)]
    layers += [make_layer(CASE, None, comm=layers[0].comm, max_tokens_per_rank=None) for _ in range(9)]
    counter, x = counting("aot_eager"), torch.randn(5, HIDDEN)
    for number, layer in enumerate(layers):
        layer.reset_parameters(seed=number)
        want = layer(x)[0]
        layer.compile(fullgraph=True, backend=counter)
        assert torch.equal(layer(x)[0], want)
    assert counter.frame_count == 1


def test_a_copy_is_a_layer_of_its_own_and_layers_can_be_freed() -> None:
    layer = make_layer(CASE, None)
    keys, x = set(layer.state_dict()), torch.randn(5, HIDDEN)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.experts.w1.mul_(2)
    want, gone = twin(x)[0], weakref.ref(layer)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert keys == set(layer.state_dict()) == {name for name, _ in layer.named_parameters()}
    del layer
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    calls: list[str] = []
    run = torch.compile(record_calls(twin, calls), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(x)[0], want)
    assert len(calls) == 1


def test_hooks_of_a_layer_run_once() -> None:
    layer, x, seen = make_layer(CASE, None), torch.randn(5, HIDDEN), torch.zeros(())
    layer.register_forward_hook(lambda module, args, outputs: seen.add_(1))
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert seen == 1


def test_a_weight_that_is_computed_is_refused() -> None:
    """The compiler does not see what a hook of torch.nn.utils.prune sets as an attribute."""
    layer, x = make_layer(CASE, None), torch.randn(5, HIDDEN)
    run = torch.compile(layer, backend="aot_eager")
    layer.seen = x  # what else somebody keeps there does not matter
    run(x)
    prune.random_unstructured(layer.experts, "w1", 0.5)
    assert layer(x)[0].shape == x.shape
    with pytest.raises(tl.InvalidArgument, match="w1 is no parameter of the layer"):
        run(x)


@on_ranks
@on_groups_of(2)
def test_the_other_ranks_hear_of_a_weight_that_is_computed(context: RankContext) -> None:
    layer, x = make_layer(CASE, context.group), torch.randn(3, HIDDEN, device=context.device)
    if context.rank == 0:
        prune.custom_from_mask(layer.experts, "w2", torch.ones_like(layer.experts.w2))  # others are collective
    with pytest.raises(tl.InvalidArgument if context.rank == 0 else tl.PeerError, match="w2 is no parameter"):
        torch.compile(layer, backend="aot_eager")(x)


def test_wrong_input_has_its_named_error() -> None:
    """And the layer works on."""
    layer = make_layer(CASE, None)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(tl.ShapeMismatch, match="the layer was made for"):
        run(torch.randn(5, HIDDEN + 1))
    with pytest.raises(tl.ShapeMismatch, match="tokens"):
        run(torch.randn(sum(CASE.tokens) + 1, HIDDEN))
    assert run(torch.randn(5, HIDDEN))[0].shape == (5, HIDDEN)
    assert layer.expert_counts.sum() == 5 * layer.router.top_k
    assert layer.expert_counts.shape == (NUM_EXPERTS,)
