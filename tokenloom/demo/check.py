"""Checks dispatch, combine and the layer on real ranks against the reference: the demo's first part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tokenloom import reference
from tokenloom.bench.differences import Difference, compare, total
from tokenloom.bench.network.bits import HIDDEN, BitsProblem, check_bits, make_problem, sizes
from tokenloom.bench.network.findings import Seen
from tokenloom.comm.communicator import Communicator
from tokenloom.runtime.processes import RankContext
from tokenloom.training.layer import ExpertParallelMoE
from tokenloom.training.state_dict import gather_state_dict

LAYOUTS = ("token", "expert", "rank")
PAYLOADS = ("bf16",)
"""The part of the checks of ``check-network`` that the demo makes: kernels compile when they are first needed."""
INTERMEDIATE = 64
LAYER_TOLERANCE = (HIDDEN + INTERMEDIATE) * 2.0**-24
"""Tolerance of the layer's output, relative to the largest value. Its GEMMs add HIDDEN and INTERMEDIATE terms in an
order that their library chooses, and every addition may round by 2^-24."""

Pairs = Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]
"""Got and wanted; a None equals only another None."""


@dataclass(frozen=True)
class Compared:
    """A comparison, and whether it passes.

    Attributes:
        what: name of what was compared.
        difference: over all pairs.
        tolerance: largest difference that passes; 0 is exact.
        fault: where it went wrong, if that is known.
    """

    what: str
    difference: Difference
    tolerance: float = 0.0
    fault: str = ""

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
        Compared(
            parts[0].what,
            total(part.difference for part in parts),
            max(part.tolerance for part in parts),
            next((f"rank {rank}: {part.fault}" for rank, part in enumerate(parts) if part.fault), ""),
        )
        for parts in zip(*by_rank, strict=True)
    ]


def check_on_rank(context: RankContext, seed: int, ranks_per_node: int | None = None) -> tuple[str, list[Compared]]:
    """Compare what this rank receives, and what comes home to it, with the reference. Collective.

    Returns:
        What ``Communicator.describe`` says, and the comparisons, the same ones on every rank.
    """
    plan = sizes(context.num_ranks)
    comm = Communicator(
        context.group,
        num_experts=plan.num_experts,
        hidden=plan.hidden,
        top_k=plan.top_k,
        max_tokens_per_rank=plan.max_tokens_per_rank,
        device=context.device,
        ranks_per_node=ranks_per_node,
    )
    topology = comm.engine.ranks.topology
    by_call: dict[str, Seen] = {}
    for (call, _), seen in check_bits([comm], topology, seed, LAYOUTS, PAYLOADS).items():
        by_call[call] = by_call.get(call, Seen(0)) + seen
    found = [_exact(call.partition(": ")[2], seen) for call, seen in by_call.items()]
    problem = make_problem(topology, "uniform", "bf16", seed)
    return comm.describe(), [*found, _check_layer(comm, problem, seed)]


def _exact(call: str, seen: Seen) -> Compared:
    """The comparison of a call, from the check of bits."""
    off = float("inf") if seen.fault else 0.0
    return Compared(call, Difference(count=seen.compared, max_diff=off, sum_diff=off), fault=seen.fault)


@torch.no_grad()
def _check_layer(comm: Communicator, problem: BitsProblem, seed: int) -> Compared:
    """Check a float32 layer on the same tokens. Its router chooses by itself."""
    plan = comm.plan
    layer = ExpertParallelMoE(
        comm=comm,
        hidden=plan.hidden,
        intermediate=INTERMEDIATE,
        num_experts=plan.num_experts,
        top_k=plan.top_k,
        dtype=torch.float32,
    )
    layer.reset_parameters(seed=seed)
    xs = [x.float() for x in problem.xs]
    out, _ = layer(xs[comm.rank].to(comm.device))

    ids, weights = [], []
    for x in xs:
        logits = functional.linear(x.to(comm.device), layer.router_weight)
        rank_ids, rank_weights, _ = layer.router.route(logits)
        ids.append(rank_ids.cpu())
        weights.append(rank_weights.cpu())
    full = gather_state_dict(layer)
    wanted = reference.moe(plan, xs, ids, weights, full["experts.w1"], full["experts.w2"])
    largest = max(out.abs().max().item() for out in wanted if len(out))
    return compare_pairs("layer", [(out, wanted[comm.rank])], LAYER_TOLERANCE * largest)
