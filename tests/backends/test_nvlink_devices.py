"""Backend "nvlink": a communicator's device need not be the current one, on any of its paths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import (
    BF16,
    FP32,
    Case,
    make_comm,
    make_problem,
    on_another_stream,
    same_bits,
)
from tests.support.nvlink_cases import BACKEND, LAYOUTS, new_comm, round_trip
from tests.support.on_ranks import on_ranks
from tests.training.test_routed_experts import layers_of
from tokenloom.runtime.processes import RankContext
from tokenloom.training.shards import local_part


@pytest.fixture(scope="module")
def hoppers_of_many(hoppers: Ranks) -> Ranks:
    """Groups on a machine where another device can be current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU, which is current")
    return hoppers


@contextmanager
def elsewhere(context: RankContext) -> Iterator[None]:
    """In this block the next GPU is current, and stays so."""
    other = (context.device.index + 1) % torch.cuda.device_count()
    torch.cuda.set_device(other)
    try:
        yield
        assert torch.cuda.current_device() == other
    finally:
        torch.cuda.set_device(context.device)


CASE = Case("elsewhere", "", tokens=(40, 0, 25, 33), hidden=128, top_k=3, pick="repeats", unused=0.2, dtype=BF16)


@on_ranks("hoppers_of_many")
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_calls(context: RankContext, checked: bool) -> None:
    """Kernels were launched in the context of the device that was current."""
    problem = make_problem(CASE, context.num_ranks)
    with elsewhere(context), new_comm(context, problem.plan, checked=checked) as comm:
        for layout in LAYOUTS:
            for sizes in ("exact", "bounded"):
                round_trip(context, comm, problem, layout, sizes=sizes)
                with torch.no_grad():
                    round_trip(context, comm, problem, layout, sizes=sizes)
        comm.check()
        comm.describe()


@on_ranks("hoppers_of_many")
def test_gradients_and_other_paths(context: RankContext) -> None:
    """All that a program may do: gradients, weights of rows, FP8, the other stream, copy engines. The same bits as
    where the device is current."""
    problem = make_problem(Case(**(vars(CASE) | {"dtype": FP32, "to_quantise": True})), context.num_ranks)
    with make_comm(context, BACKEND, problem.plan) as comm:
        want = paths(comm, problem.arguments(context))
    with elsewhere(context), make_comm(context, BACKEND, problem.plan) as comm:
        got = paths(comm, problem.arguments(context))
    for name, value in want.items():
        same_bits(got[name], value.cpu(), name)


def paths(comm: tl.Communicator, given: Any) -> dict[str, torch.Tensor]:
    x, ids, weights = given
    x.requires_grad_(), weights.requires_grad_()
    found: dict[str, torch.Tensor] = {}
    for strategy in ("dedup", "all_gather", "all_to_all"):
        routed = comm.dispatch(x, ids, weights, strategy=strategy)
        rows = comm.row_weights(routed)
        out = comm.combine(torch.sin(routed.tokens) * rows[:, None], routed, weighted=False)
        grads = torch.autograd.grad(out.square().sum(), [x, weights])
        found |= {f"{strategy}, {name}": value for name, value in zip(("x", "weights"), grads, strict=True)}
    with on_another_stream(comm.device):
        routed = comm.dispatch(x, ids, weights, layout="token")
        out = comm.combine(torch.sin(routed.tokens), routed)
    found["another stream"] = out.detach()
    found["another stream, x"] = torch.autograd.grad(out.square().sum(), [x])[0]
    with torch.no_grad():
        routed = comm.dispatch(x, ids, weights, to_fp8=True, copy=True)
        found["fp8"] = tl.dequantize_fp8(routed.tokens, routed.scales)  # type: ignore[arg-type]
    comm.check()
    return found


@on_ranks("hoppers_of_many")
def test_layers(context: RankContext) -> None:
    """Forward and backward, which runs in a thread of its own."""
    want = one_layer(context)
    with elsewhere(context):
        got = one_layer(context)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


def one_layer(context: RankContext) -> list[torch.Tensor]:
    (layer,) = layers_of(context, 1, redispatch_in_backward=True)
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randn(40, layer.experts.hidden, generator=generator).to(context.device, BF16).requires_grad_()
    out, _ = layer(x)
    out.float().square().sum().backward()
    layer.comm.check()
    layer.comm.close()
    assert x.grad is not None
    grads = [weight.grad for weight in layer.expert_parameters() if weight.grad is not None]
    return [out.detach(), x.grad, *(local_part(grad) for grad in grads)]
