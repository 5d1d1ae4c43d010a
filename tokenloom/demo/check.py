"""Checks dispatch, combine and the layer on real ranks against the reference: the demo's first part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from tokenloom import reference
from tokenloom.bench.differences import Difference, compare, total
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.routed import Layout, Routed
from tokenloom.runtime.processes import RankContext
from tokenloom.training.layer import ExpertParallelMoE
from tokenloom.training.state_dict import gather_state_dict

MAX_TOKENS = 48
HIDDEN = 128
INTERMEDIATE = 64
TOP_K = 3
ALIGNMENT = 8
UNUSED_SHARE = 0.2
"""Share of the places in topk_ids that are -1."""

LAYOUTS: tuple[Layout, ...] = ("token", "expert", "rank")
LAYER_TOLERANCE = (HIDDEN + INTERMEDIATE) * 2.0**-24
"""Tolerance of the layer's output, relative to the largest value. Its GEMMs add HIDDEN and INTERMEDIATE terms in an
order that their library chooses, and every addition may round by 2^-24."""


Pairs = Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]
"""What came, and what was wanted; a None equals only another None."""


@dataclass(frozen=True)
class Compared:
    """A comparison, and whether it passes.

    Attributes:
        what: name of what was compared.
        difference: over all pairs.
        tolerance: largest difference that passes; 0 is exact.
    """

    what: str
    difference: Difference
    tolerance: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether something was compared and is within the tolerance (NaN is not)."""
        return self.difference.count > 0 and self.difference.max_diff <= self.tolerance


def compare_pairs(what: str, pairs: Pairs, tolerance: float = 0.0) -> Compared:
    """Compare all pairs as one."""
    on_host = [tuple(None if each is None else each.cpu() for each in pair) for pair in pairs]
    return Compared(what, total(compare(got, wanted) for got, wanted in on_host), tolerance)


def merge(by_rank: Sequence[Sequence[Compared]]) -> list[Compared]:
    """Merge the same comparisons of several ranks: the worst rank decides."""
    return [
        replace(
            parts[0],
            difference=total(part.difference for part in parts),
            tolerance=max(part.tolerance for part in parts),
        )
        for parts in zip(*by_rank, strict=True)
    ]


def check_on_rank(
    context: RankContext, num_experts: int, seed: int, ranks_per_node: int | None = None
) -> tuple[str, list[Compared]]:
    """Compare what this rank receives, and what comes home to it, with the reference. Collective.

    Routing is random, with repeated experts and unused places. Every rank has another number of tokens; of two or more
    ranks, the last one has none. All ranks draw all inputs, so each can compute the reference by itself.

    Returns:
        What ``Communicator.describe`` says, and the comparisons, the same ones on every rank.
    """
    inputs = _draw_inputs(context.num_ranks, num_experts, seed)
    comm = Communicator(
        context.group,
        num_experts=num_experts,
        hidden=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=MAX_TOKENS,
        device=context.device,
        ranks_per_node=ranks_per_node,
    )
    differences = []
    for layout in LAYOUTS:
        differences += _check_layout(comm, inputs, layout, seed)
    differences.append(_check_layer(comm, inputs, seed))
    return comm.describe(), differences


@dataclass(frozen=True)
class Inputs:
    """Inputs of every rank, on the CPU.

    Attributes:
        xs: bfloat16 [T, H].
        ids: int64 [T, K].
        weights: float32 [T, K].
    """

    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]


def _draw_inputs(num_ranks: int, num_experts: int, seed: int) -> Inputs:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    whole: dict[str, Any] = {"generator": generator, "dtype": torch.int64, "device": "cpu"}
    real: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    num_tokens = torch.randint(MAX_TOKENS // 4, MAX_TOKENS + 1, (num_ranks,), **whole).tolist()
    if num_ranks > 1:
        num_tokens[-1] = 0
    inputs = Inputs([], [], [])
    for count in num_tokens:
        ids = torch.randint(num_experts, (count, TOP_K), **whole)
        ids[torch.rand(ids.shape, **real) < UNUSED_SHARE] = -1
        inputs.ids.append(ids)
        inputs.xs.append(torch.randn(count, HIDDEN, **real).bfloat16())
        inputs.weights.append(torch.rand(count, TOP_K, **real))
    return inputs


def _check_layout(comm: Communicator, inputs: Inputs, layout: Layout, seed: int) -> list[Compared]:
    rank, device, by_expert = comm.rank, comm.device, layout == "expert"
    alignment = ALIGNMENT if by_expert else 1
    wanted = reference.dispatch(comm.plan, inputs.xs, inputs.ids, inputs.weights, layout, alignment=alignment)
    own = (each[rank].to(device) for each in (inputs.xs, inputs.ids, inputs.weights))
    got = comm.dispatch(*own, layout=layout, alignment=alignment)

    # Any values stand in for what experts return.
    generator = torch.Generator(device="cpu").manual_seed(seed + 1)
    real: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    ys = [torch.randn(each.tokens.shape, **real).bfloat16() for each in wanted]
    home = reference.combine(comm.plan, ys, wanted, inputs.ids, inputs.weights if by_expert else None)
    out = comm.combine(ys[rank].to(device), got)
    return [
        compare_pairs(f"dispatch, {layout}", _routed_pairs(got, wanted[rank])),
        compare_pairs(f"combine, {layout}", [(out, home[rank])]),
    ]


def _routed_pairs(got: Routed, wanted: reference.Routed) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Pairs of everything in a Routed; in layout "rank", only the places that hold a row."""
    used = torch.tensor(sorted(wanted.rows.values()), dtype=torch.int64, device="cpu")

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or got.layout != "rank":
            return tensor
        return tensor.cpu().flatten(0, 1)[used]

    def numbers(values: list[int] | int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    offsets = wanted.expert_offsets if got.layout == "expert" else None
    return [
        (rows(got.tokens), rows(wanted.tokens)),
        (rows(got.topk_ids), rows(wanted.topk_ids)),
        (rows(got.topk_weights), rows(wanted.topk_weights)),
        (got.expert_offsets, None if offsets is None else numbers(offsets)),
        (got.expert_counts, numbers(wanted.expert_counts)),
        (got.source_counts, numbers(wanted.source_counts)),
        (torch.as_tensor(got.num_rows), numbers(wanted.num_rows)),
    ]


@torch.no_grad()
def _check_layer(comm: Communicator, inputs: Inputs, seed: int) -> Compared:
    """Check a float32 layer on the same tokens. Its router chooses by itself."""
    layer = ExpertParallelMoE(
        comm=comm,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=comm.plan.num_experts,
        top_k=TOP_K,
        dtype=torch.float32,
    )
    layer.reset_parameters(seed=seed)
    out, _ = layer(inputs.xs[comm.rank].float().to(comm.device))

    ids, weights = [], []
    for x in inputs.xs:
        logits = functional.linear(x.float().to(comm.device), layer.router_weight)
        rank_ids, rank_weights, _ = layer.router.route(logits)
        ids.append(rank_ids.cpu())
        weights.append(rank_weights.cpu())
    full = gather_state_dict(layer)
    w1, w2 = full["experts.w1"], full["experts.w2"]
    wanted = reference.moe(comm.plan, [x.float() for x in inputs.xs], ids, weights, w1, w2)
    largest = max(out.abs().max().item() for out in wanted if len(out))
    return compare_pairs("layer", [(out, wanted[comm.rank])], LAYER_TOLERANCE * largest)
