"""Megatron-Core's MoE layer on tokenloom's ``deep_ep``: its flex dispatcher gives what the all-gather one gives.

Both run in processes of their own, since Megatron keeps its groups and buffers in globals: over gloo, and on GPUs if
there are some. They need the extra ``clients``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module, util
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext, RankPool

HIDDEN, WIDTH, EXPERTS = 32, 48, 8
BACKENDS = ("deepep", "hybridep")
SIZES = (2, 4)

pytestmark = [
    pytest.mark.skipif(
        util.find_spec("megatron") is None, reason="megatron-core is not installed; the extra 'clients' has it"
    ),
    pytest.mark.imports("tests.compat.clients.imported"),
]


def group_params() -> list[Any]:
    on_cpus = [pytest.param(("cpu", n), id=f"ep{n}") for n in SIZES]
    gpus = [n for n in SIZES if n <= torch.cuda.device_count()]
    return on_cpus + [pytest.param(("cuda", n), id=f"cuda, ep{n}", marks=pytest.mark.gpu) for n in gpus]


@pytest.fixture(scope="module", params=group_params())
def group(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    device, size = request.param
    with RankPool(size, device) as made:
        yield made


class OnCpus(TorchFunctionMode):
    """Makes tensors on CPUs where a program names the device "cuda" unasked, as ``hybridep`` of 0.19.2 does."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return function(*args, **given)


def prepare(context: RankContext) -> None:
    """Megatron's groups, once in each process, and what a machine without CUDA needs."""
    from tokenloom.compat import install

    install()
    if context.device.type == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # where the router goes
    moe_utils = import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # this release names it unasked
    parallel_state = import_module("megatron.core.parallel_state")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=context.num_ranks)


def make_layer(context: RankContext, backend: str, top_k: int) -> Any:
    """A layer whose weights depend on nothing but the rank."""
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig
    specs = import_module("megatron.core.models.gpt.moe_module_specs")
    layer = import_module("megatron.core.transformer.moe.moe_layer").MoELayer
    dispatcher = {"moe_token_dispatcher_type": "allgather"}
    if backend != "allgather":
        dispatcher = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
    torch.manual_seed(1)
    made = config(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=WIDTH,
        moe_ffn_hidden_size=WIDTH,
        num_moe_experts=EXPERTS,
        moe_router_topk=top_k,
        expert_model_parallel_size=context.num_ranks,
        use_cpu_initialization=True,
        moe_grouped_gemm=False,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        **dispatcher,
    )
    spec = specs.get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    # 0.16.1 gives a specification, 0.19.2 the layer with its submodules bound.
    submodules = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    with OnCpus() if context.device.type == "cpu" else nullcontext():
        return layer(made, submodules).to(context.device)


def step(context: RankContext, layer: Any, tokens: int, seed: int) -> list[torch.Tensor]:
    """Output, gradient of the input, and gradients of all weights."""
    generator = torch.Generator().manual_seed(10 * seed + context.rank)
    x = torch.randn(tokens, 2, HIDDEN, generator=generator).to(context.device).requires_grad_()
    out, _ = layer(x)
    layer.zero_grad()
    out.backward(torch.randn(out.shape, generator=generator).to(context.device))
    assert x.grad is not None
    return [out.detach(), x.grad, *(each.grad.clone() for each in layer.parameters() if each.grad is not None)]


def compare(context: RankContext, backend: str, top_k: int, exact: bool) -> None:
    prepare(context)
    layers = [make_layer(context, name, top_k) for name in ("allgather", backend)]
    for seed, tokens in enumerate((3, 1, 20, 20)):  # batches that grow after the first
        want, got = (step(context, layer, tokens, seed) for layer in layers)
        assert len(want) == len(got) == 3 + 2 * EXPERTS // context.num_ranks
        for ours, theirs in zip(got, want, strict=True):
            assert tokens < 20 or ours.abs().max() > 0  # a smaller batch leaves experts out
            if exact:
                assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    fused = import_module("megatron.core.transformer.moe.fused_a2a")
    used = fused._buffer if backend == "deepep" else fused._hybrid_ep_buffer
    assert type(used).__module__.startswith("tokenloom.compat.deep_ep")
    assert used.runtime.all(), "its communicators moved the tokens"


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_experts_of_a_token(group: RankPool, backend: str) -> None:
    """Sums of two terms have one order, so that every bit agrees, forward and backward."""
    group.run(compare, backend, 2, True)


def compare_on_nodes(context: RankContext, backend: str) -> None:
    prepare(context)
    buffer, fused = import_module("deep_ep").Buffer, import_module("megatron.core.transformer.moe.fused_a2a")
    fused._buffer = fused._hybrid_ep_buffer = None  # the one of other tests knows one node
    buffer.set_ranks_per_node(2)
    try:
        compare(context, backend, 2, True)
        used = fused._buffer if backend == "deepep" else fused._hybrid_ep_buffer
        assert {comm.backend for comm in used.runtime.all()} == {"network"}
    finally:
        buffer.set_ranks_per_node(None)
        fused._buffer = fused._hybrid_ep_buffer = None


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_nodes(group: RankPool, backend: str) -> None:
    """Four ranks as 2 x 2, by one line; the same bits."""
    if (group.num_ranks, group.device) != (4, "cpu"):
        pytest.skip("no nodes of two, or none that were tried")
    group.run(compare_on_nodes, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_experts_of_a_token(group: RankPool, backend: str) -> None:
    """Sums of four terms differ by their order, in the last bits of float32."""
    group.run(compare, backend, 4, False)


@on_ranks("group")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_with_other_batches(context: RankContext, backend: str) -> None:
    """Ranks differ in their tokens: each has what a layer with all experts on every rank would give it."""
    prepare(context)
    layer = make_layer(context, backend, 2)
    tokens = (4, 9, 1, 6)
    alone = step(context, layer, tokens[context.rank], 3)
    # The same tokens among those of equal batches: what a rank computes for them does not depend on the others.
    most = max(tokens)
    generator = torch.Generator().manual_seed(30 + context.rank)
    x = torch.zeros(most, 2, HIDDEN)
    x[: tokens[context.rank]] = torch.randn(tokens[context.rank], 2, HIDDEN, generator=generator)
    out, _ = make_layer(context, "allgather", 2)(x.to(context.device))
    torch.testing.assert_close(alone[0], out[: tokens[context.rank]].detach(), rtol=1e-5, atol=1e-6)
