"""Arguments of measured calls: sizes, dtypes by the names that commands take, and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from tokenloom.bench.tables import counted
from tokenloom.comm.placement import Placement, plan_of_slots
from tokenloom.comm.plan_replicas import plan_replicas
from tokenloom.comm.routed import Layout
from tokenloom.errors import InvalidArgument
from tokenloom.ops.quant import quantize_fp8
from tokenloom.ops.slots_of_routes import SlotTable
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.tune.network.constants import FITTED
from tokenloom.tune.samples import draw_topk_ids, popularity

ROUTING_SEED = 0
EARLIER_TOKENS = 4096
"""Tokens of a rank that placements are planned from, whatever a call has: a server has counted many calls."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class CallSizes:
    """Sizes of one call.

    Attributes:
        num_tokens: T, the tokens of every rank.
        hidden: H.
        top_k: K.
        num_experts: E.
        max_vio: of the routing, see :func:`tokenloom.tune.samples.popularity`. 0: all experts are equally likely.
    """

    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    max_vio: float = 0.0

    def plan(self, num_ranks: int) -> Plan:
        """The plan for these sizes on ``num_ranks`` ranks."""
        if self.top_k > self.num_experts:
            raise InvalidArgument(
                f"top_k is {self.top_k}, expected at most {self.num_experts}, as there are no more experts to choose"
            )
        popularity(self.num_experts, self.top_k, self.max_vio)  # says what no routing can be
        return Plan(num_ranks, self.num_experts, self.hidden, self.top_k, self.num_tokens)

    def topk_ids(self, rank: int) -> torch.Tensor:
        """Routing of one rank: int64 [T, K] on the CPU, K different experts for each token."""
        sizes = (self.num_tokens, self.num_experts, self.top_k)
        return draw_topk_ids(ROUTING_SEED + rank, *sizes, self.max_vio).long()

    def routing(self, num_ranks: int, spare_slots: int | None = None, *, balanced: bool = False) -> Routing:
        """Routing of all ranks, with replicas of experts in spare slots if a number of slots is given.

        Args:
            balanced: leave the slots empty instead, and split the batch over the ranks.
        """
        return _routing(self, num_ranks, spare_slots, balanced)

    def placement(self, num_ranks: int, spare_slots: int) -> Placement:
        """Plan replicas in spare slots of each rank, from other tokens of the same popularity."""
        return _placement(replace(self, num_tokens=EARLIER_TOKENS), num_ranks, spare_slots)

    def __str__(self) -> str:
        skew = f", MaxVio {self.max_vio:g}" if self.max_vio else ""
        return f"{self.num_tokens}x{self.hidden} top-{self.top_k} of {self.num_experts}{skew}"


@dataclass(frozen=True)
class Routing:
    """Where the routes of all ranks go.

    Attributes:
        placement: which slots hold which experts before the batch comes; None: expert e is on rank e // (E / W).
        plan: sizes. With a placement its experts are slots.
        topk_ids: int64 [T, K] of each rank, on the CPU: experts, or with a placement their slots.
    """

    placement: Placement | None
    plan: Plan
    topk_ids: Sequence[torch.Tensor]

    @property
    def routes(self) -> torch.Tensor:
        """Routes of each expert or slot, by its rank: int64 [W, L]."""
        ids = torch.cat([each[each >= 0] for each in self.topk_ids])
        return torch.bincount(ids, minlength=self.plan.num_experts).view(self.plan.num_ranks, -1)

    @property
    def fullest_rank(self) -> float:
        """Routes of the rank with most, over the mean of all ranks; 1 where there are none."""
        by_rank = self.routes.sum(1).double()
        return float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0


def placed(
    plan: Plan, topk_ids: Sequence[torch.Tensor], placement: Placement | None, *, balanced: bool = False
) -> Routing:
    """Give each route its slot of a placement.

    Args:
        plan: sizes, whose experts the ids name.
        topk_ids: [T, K] of each rank, on the CPU.
        balanced: split the batch over the ranks, as ``balance="batch"`` does.
    """
    if placement is None:
        return Routing(None, plan, topk_ids)
    slot_ids = []
    counts = torch.stack([torch.bincount(ids[ids >= 0], minlength=plan.num_experts) for ids in topk_ids])
    for rank, ids in enumerate(topk_ids):
        table = SlotTable(plan.num_experts, plan.num_ranks, placement.slots_per_rank, rank, torch.device("cpu"))
        table.write(placement.slot_ids())
        split = table.split(counts, rows_per_pull=0, always=False) if balanced else None
        slot_ids.append(table.slots_of_routes(ids.contiguous(), split=split).long())
    return Routing(placement, plan_of_slots(plan, placement), slot_ids)


@lru_cache(maxsize=8)
def _routing(shape: CallSizes, num_ranks: int, spare_slots: int | None, balanced: bool) -> Routing:
    plan, placement = shape.plan(num_ranks), None
    if spare_slots is not None and balanced:
        placement = Placement.default(plan.num_experts, num_ranks, plan.experts_per_rank + spare_slots)
    elif spare_slots is not None:
        placement = shape.placement(num_ranks, spare_slots)
    return placed(plan, [shape.topk_ids(rank) for rank in range(num_ranks)], placement, balanced=balanced)


@lru_cache(maxsize=8)
def _placement(earlier: CallSizes, num_ranks: int, spare_slots: int) -> Placement:
    topk_ids = [earlier.topk_ids(num_ranks + rank) for rank in range(num_ranks)]
    return planned(topk_ids, earlier.num_experts, num_ranks, spare_slots)


def planned(topk_ids: Sequence[torch.Tensor], num_experts: int, num_ranks: int, spare_slots: int) -> Placement:
    """Plan as a user does, from batches that came before.

    Args:
        topk_ids: experts of their tokens, in tensors of any shape on one device.
        spare_slots: slots of each rank beyond its even share of experts.
    """
    counts = torch.bincount(torch.cat([each.flatten() for each in topk_ids]), minlength=num_experts)
    return plan_replicas(counts, num_ranks, num_experts // num_ranks + spare_slots)


def routing_names(max_vio: float, spare_slots: int | None, balance: str | None = None) -> list[str]:
    """Name a routing in rows: vX, the MaxVio of one that is not even, spareN of a placement, and batch of splits."""
    skew = [f"v{max_vio:g}"] if max_vio else []
    spare = [] if spare_slots is None else [f"spare{spare_slots}"]
    return [*skew, *spare, *([] if balance is None else [balance])]


def with_spare_slots(who: str, spare_slots: int | None, balance: str | None = None) -> str:
    """Say of somebody measured how many spare slots a rank has, if there is a placement, and what fills them."""
    slots = "" if spare_slots is None else f", {counted(spare_slots, 'spare slot')} a rank"
    return who + slots + ("" if balance is None else f", per {balance}")


SLOT_STEP = 128
"""Rows of a tile of a grouped GEMM."""


Balance = Literal["batch"] | None
"""What ``balance=`` of a communicator takes."""
Payload = Literal["bf16", "fp8", "to_fp8"]


@dataclass(frozen=True)
class Operation:
    """A measured operation.

    Attributes:
        name: "dispatch"; "combine", of a dispatch made before; or "dispatch+combine", one after the other.
        payload: what is dispatched: "bf16"; "fp8", quantised before; or "to_fp8", BF16 that dispatch quantises. What
            comes home is always BF16.
    """

    name: Literal["dispatch", "combine", "dispatch+combine"]
    payload: Payload
    layout: Layout

    def __str__(self) -> str:
        return f"{self.name} {self.payload} {self.layout}"


@dataclass(frozen=True)
class Inputs:
    """Tensors of one rank, the same for all backends.

    Attributes:
        x: bfloat16 [T, H], normally distributed.
        fp8: x as float8_e4m3fn [T, H] and float32 scales [T, H / 128]; None if H is not a multiple of 128.
        ids: int32 [T, K] of experts. int32, because dispatch hands it out without a conversion.
        expert_rows: most rows that any rank receives in layout "expert", without padding.
        slot_rows: places for each expert in layout "slots": the most routes of any expert, up to a multiple of 128,
            but never more than there are tokens.
    """

    shape: CallSizes
    x: torch.Tensor
    fp8: tuple[torch.Tensor, torch.Tensor] | None
    ids: torch.Tensor
    weights: torch.Tensor
    expert_rows: int
    slot_rows: int

    def under(self, routing: Routing) -> Inputs:
        """The same tensors, with the rows that a routing needs."""
        return replace(self, **_rows_of(self.shape, routing))


def _rows_of(shape: CallSizes, routing: Routing) -> dict[str, Any]:
    routes = routing.routes
    slot_rows = -(-int(routes.max()) // SLOT_STEP) * SLOT_STEP
    most = routing.plan.num_ranks * shape.num_tokens
    return {"expert_rows": int(routes.sum(1).max()), "slot_rows": min(slot_rows, most)}


def make_inputs(context: RankContext, shape: CallSizes) -> Inputs:
    """Draw the same tensors on every run, with other values and another routing on every rank."""
    generator = torch.Generator(device="cpu").manual_seed(context.rank)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    x = torch.randn(shape.num_tokens, shape.hidden, **drawn).bfloat16().to(context.device)
    weights = torch.rand(shape.num_tokens, shape.top_k, **drawn).to(context.device)
    routing = shape.routing(context.num_ranks)
    ids = routing.topk_ids[context.rank].to(context.device)
    return Inputs(
        shape=shape,
        x=x,
        fp8=None if shape.hidden % FP8_BLOCK else quantize_fp8(x),
        ids=ids.to(torch.int32),
        weights=weights,
        **_rows_of(shape, routing),
    )


def expert_outputs(like: torch.Tensor) -> torch.Tensor:
    """Normally distributed bfloat16 values in the shape of dispatched rows, for a combine."""
    return torch.empty(like.shape, dtype=torch.bfloat16, device=like.device).normal_()


LINK_GBYTES_PER_S = FITTED.nvlink_gbytes_per_s
"""Bytes that the NVLinks of an H200 carry out of it, measured; 1 GB is 1e9 bytes."""
