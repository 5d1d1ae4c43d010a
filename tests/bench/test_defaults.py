"""What benches draw does not depend on the process's default device and dtype."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenloom.bench.mega_work import MegaShape, bytes_out, make_weights
from tokenloom.bench.rivals.torch_layer import own_experts, torch_layer
from tokenloom.bench.train_work import Weights, make_problem
from tokenloom.bench.workload import CallSizes
from tokenloom.plan import Plan

CPU = torch.device("cpu")


def mega_weights() -> tuple[torch.Tensor, ...]:
    context: Any = SimpleNamespace(rank=0, num_ranks=2, device=CPU)
    found = make_weights(MegaShape(128, 128, 4, 2, num_shared_experts=1), context)
    return tuple(each.float() for each in found)


def sent_bytes() -> torch.Tensor:
    ids = [torch.tensor([[0, 2], [1, 1]], device=CPU), torch.tensor([[3, -1], [-1, -1]], device=CPU)]
    return torch.tensor(bytes_out(Plan(2, 4, 256, 2, 2), 0, ids), device=CPU)


def rival_layer() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=CPU).manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float32, device=CPU).requires_grad_()

    problem = make_problem(12, Weights(draw(8, 16), (draw(8, 12, 16), draw(8, 16, 6))), 3, max_vio=1.0)
    return problem.x.detach(), torch_layer(problem.x, problem.weights, 3, own_experts).detach()


DRAWN: dict[str, Callable[[], Any]] = {
    "routing": lambda: CallSizes(40, 256, 2, 8).topk_ids(1),
    "weights of mega": mega_weights,
    "bytes of mega": sent_bytes,
    "tokens and the rival's layer": rival_layer,
}


@pytest.mark.parametrize("what", DRAWN)
def test_defaults_do_not_matter(what: str) -> None:
    """Another library in the process may set a default device and dtype; every tensor here names its own."""
    expected = DRAWN[what]()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")  # tensors without data: every use of one fails or shows
    try:
        found = DRAWN[what]()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    pairs = zip(*((each,) if isinstance(each, torch.Tensor) else each for each in (found, expected)), strict=True)
    for mine, wanted in pairs:
        assert (mine.device, mine.dtype) == (CPU, wanted.dtype)
        assert torch.equal(mine, wanted)
