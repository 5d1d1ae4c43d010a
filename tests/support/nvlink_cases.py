"""Calls on backend "nvlink" that are compared with the reference, for the tests of what is its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tokenloom as tl
from tests.support.cases import (
    BF16,
    Problem,
    expert_rows,
    make_comm,
    same_bits,
    same_routed,
)
from tokenloom import reference
from tokenloom.backends.peers.opening import Launcher
from tokenloom.plan import ROUTE_LAYOUTS, Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

BACKEND = "nvlink"
LAYOUTS = ("token", "expert", "rank")
"""Layouts that have both kinds of sizes."""


def new_comm(context: RankContext, plan: Plan, *, checked: bool) -> tl.Communicator:
    return make_comm(context, BACKEND, plan, checked=checked)


def launcher_of(comm: tl.Communicator) -> Launcher:
    """What opens the calls of a communicator, for tests of epochs and of what is captured."""
    return comm.engine._backend._launcher  # type: ignore[attr-defined]


def buffers_of(comm: tl.Communicator) -> list[SymmetricBuffer]:
    """All memory of a communicator that other ranks write, as far as it is made."""
    backend = comm.engine._backend
    return [backend._launcher.control, *backend._buffers._buffers.values()]  # type: ignore[attr-defined]


def meet(context: RankContext) -> None:
    """All ranks, and all that is on their GPUs, are done with what they were given so far."""
    torch.cuda.synchronize()
    dist.barrier(group=context.group, device_ids=[context.device.index])
    torch.cuda.synchronize()


def same_combine(
    context: RankContext, comm: tl.Communicator, problem: Problem, routed: tl.Routed, want: list[reference.Routed]
) -> None:
    """All modes that the layout has; whatever holds no row is NaN in y."""
    by_route = routed.layout in ROUTE_LAYOUTS
    ys = expert_rows(problem, want, BF16)
    own_ids = [ids if rank == context.rank else ids[:0] for rank, ids in enumerate(problem.topk_ids)]
    weights = problem.topk_weights if by_route else None
    for mode in ("per_rank", "per_route") if by_route else ("per_rank",):
        out = comm.combine(ys[context.rank].to(context.device), routed, mode=mode)
        outs = reference.combine(problem.plan, ys, want, own_ids, weights, mode=mode)
        same_bits(out, outs[context.rank], f"{routed.layout}, {mode}")


def round_trip(
    context: RankContext,
    comm: tl.Communicator,
    problem: Problem,
    layout: str,
    *,
    sizes: str = "exact",
    alignment: int = 1,
    capacity: int | None = None,
) -> tuple[tl.Routed, list[reference.Routed]]:
    """One dispatch and its combines, as the reference has them."""
    bounded = sizes == "bounded"
    if bounded and layout != "rank":
        capacity = problem.rows_needed(layout, alignment) + 3
    options: dict[str, Any] = {"layout": layout, "alignment": alignment, "capacity": capacity}
    routed = comm.dispatch(*problem.arguments(context), **options, sizes=sizes)
    want = problem.dispatched(**options, bounded=bounded)
    same_routed(routed, want[context.rank], problem.plan, bounded=bounded)
    same_combine(context, comm, problem, routed, want)
    return routed, want
