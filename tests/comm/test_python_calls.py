"""How many Python calls, in how many files, an operation passes on its way: first of its kind, and later.

A later call is made by the thousand while a GPU waits, and a reader follows it file by file. So an operation that
passes more than it does here has become slower and harder to follow; one that passes less should be noted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.python_calls import way_of
from tests.support.stand_ins import StandIns

NUM_RANKS, NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 4, 8, 256, 256, 2, 128
SIZES: dict[str, Any] = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens_per_rank": TOKENS}
BOUNDED = {"sizes": "bounded", "capacity": 2 * TOKENS * TOP_K}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CALLS_BEFORE = 3
"""Of its kind, before a later call."""
Found = dict[str, list[tuple[int, int]]]
"""Calls and files, by operation: those of the first call, then those of a later one."""


@pytest.fixture
def stand_ins() -> Iterator[StandIns]:
    with StandIns(NUM_RANKS) as made:
        yield made


def passed(operations: dict[str, Callable[[], Any]], settle: Callable[[], None]) -> Found:
    """What the operations pass in turns, each of which may take what the one before it has left."""
    found: Found = {name: [] for name in operations}
    for number in range(CALLS_BEFORE + 2):
        for name, operation in operations.items():
            if number in (0, CALLS_BEFORE + 1):
                way = way_of(operation)
                found[name].append((way.calls, len(way.files)))
            else:
                operation()
            settle()
    return found


def moving(make: Callable[[], tl.Communicator], gradients: bool, settle: Callable[[], None] = lambda: None,
           **options: Any) -> Found:  # fmt: skip
    """A dispatch, and the combine of what it has returned."""
    found: Found = {}
    for _ in range(2):  # the first communicator of a process also loads what all share
        comm = make()
        with torch.set_grad_enabled(gradients):
            x = torch.randn(TOKENS, HIDDEN, dtype=BF16, requires_grad=gradients)
            ids = torch.rand(TOKENS, NUM_EXPERTS).topk(TOP_K).indices
            weights = torch.rand(TOKENS, TOP_K, requires_grad=gradients)
            kept: list[Any] = []

            def dispatch() -> None:
                kept[:] = [comm.dispatch(x, ids, weights, layout="expert", **options)]  # noqa: B023

            def combine() -> None:
                comm.combine(kept[0].tokens, kept[0])  # noqa: B023

            found = passed({"dispatch": dispatch, "combine": combine}, settle)
    return found


@pytest.mark.parametrize(
    ("gradients", "want"),
    [
        (False, {"dispatch": [(256, 29), (30, 16)], "combine": [(106, 22), (29, 16)]}),
        (True, {"dispatch": [(265, 30), (39, 17)], "combine": [(113, 23), (36, 17)]}),
    ],
    ids=["plain", "with gradients"],
)
def test_on_nvlink(stand_ins: StandIns, gradients: bool, want: Found) -> None:
    def make() -> tl.Communicator:
        return tl.Communicator(None, backend="nvlink", device="cpu", **SIZES)

    assert moving(make, gradients, stand_ins.settle, **BOUNDED) == want


@pytest.mark.parametrize(
    ("gradients", "want"),
    [
        (False, {"dispatch": [(169, 20), (123, 18)], "combine": [(104, 18), (87, 18)]}),
        (True, {"dispatch": [(173, 21), (127, 19)], "combine": [(111, 19), (94, 19)]}),
    ],
    ids=["plain", "with gradients"],
)
def test_on_collective(gradients: bool, want: Found) -> None:
    def make() -> tl.Communicator:
        return tl.Communicator(None, backend="collective", device="cpu", **SIZES)

    assert moving(make, gradients) == want


def test_mega_moe(stand_ins: StandIns) -> None:
    found: Found = {}
    for _ in range(2):
        layer = tl.MegaMoE(None, intermediate=INTERMEDIATE, device="cpu", **SIZES)
        local, blocks = layer.comm.plan.experts_per_rank, (HIDDEN // 128, INTERMEDIATE // 128)
        layer.use_weights(
            torch.zeros(local, 2 * INTERMEDIATE, HIDDEN, dtype=torch.uint8).view(FP8),
            torch.ones(local, 2 * blocks[1], blocks[0]),
            torch.zeros(local, HIDDEN, INTERMEDIATE, dtype=torch.uint8).view(FP8),
            torch.ones(local, *blocks),
        )
        x, ids = torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
        weights = torch.rand(TOKENS, TOP_K)

        def forward() -> None:
            layer(x, ids, weights)  # noqa: B023

        with torch.no_grad():
            found = passed({"forward": forward}, stand_ins.settle)
    assert found == {"forward": [(219, 26), (47, 16)]}


def test_a_layers_step() -> None:
    found: Found = {}
    for _ in range(2):
        layer = tl.ExpertParallelMoE(None, intermediate=INTERMEDIATE, backend="collective", device="cpu", **SIZES)
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        kept: list[torch.Tensor] = []

        def forward() -> None:
            out, loss = layer(x)  # noqa: B023
            kept[:] = [out.sum() + loss]  # noqa: B023

        def backward() -> None:
            kept[0].backward()  # noqa: B023

        found = passed({"forward": forward, "backward": backward}, lambda: None)
    assert found == {"forward": [(417, 33), (375, 31)], "backward": [(277, 23), (277, 23)]}
