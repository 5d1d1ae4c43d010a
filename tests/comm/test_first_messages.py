"""Ranks of one group that begin different things: all of them hear who and what, no process ends, and all go on.

Over gloo a message of another length than its receiver awaits ends the process, in a thread of gloo's where nobody can
catch it. So the ranks here are processes that a test survives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.on_ranks import on_ranks
from tests.support.slow import mostly_slow
from tokenloom.runtime.processes import RankContext

NUM_RANKS = 4
ORDER = "make all communicators, and their calls, in the same order on all ranks"


def make_comm(context: RankContext, experts_per_rank: int = 4, **options: Any) -> tl.Communicator:
    num_experts = experts_per_rank * context.num_ranks
    sizes = {"num_experts": num_experts, "hidden": 128, "top_k": 2, "max_tokens_per_rank": 8}
    return tl.Communicator(context.group, **sizes, **options)


def dispatch(comm: tl.Communicator) -> tl.Routed:
    ids = torch.arange(16).view(8, 2) % comm.plan.num_experts
    return comm.dispatch(torch.ones(8, 128), ids, torch.ones(8, 2), layout="token")


def works(*comms: tl.Communicator) -> None:
    """Each carries the rows of all ranks there and back, twice."""
    for _ in range(2):
        for comm in comms:
            routed = dispatch(comm)
            sums = comm.combine(routed.tokens, routed)
            assert bool((sums >= 1).all())


def make_layer(context: RankContext, experts_per_rank: int = 2, **options: Any) -> tl.ExpertParallelMoE:
    num_experts = experts_per_rank * context.num_ranks
    sizes = {"hidden": 16, "intermediate": 8, "num_experts": num_experts, "top_k": 2, "max_tokens_per_rank": 8}
    layer = tl.ExpertParallelMoE(context.group, **sizes, **options)
    layer.reset_parameters(seed=1)
    return layer


def step(layer: tl.ExpertParallelMoE) -> None:
    out, aux_loss = layer(torch.ones(4, 16, requires_grad=True))
    (out.sum() + aux_loss).backward()


# -- other sizes, another order -----------------------------------------------------------------------------------


@on_ranks("new_four")
@pytest.mark.parametrize("odd", mostly_slow([0, 2], [0]))
def test_communicators_of_other_sizes_in_another_order(context: RankContext, odd: int) -> None:
    comms = [make_comm(context, 2), make_comm(context, 8)]
    works(*comms)
    for comm in comms if context.rank != odd else reversed(comms):
        with pytest.raises(tl.PlanMismatch, match=f"communicator=.*; {ORDER}"):
            dispatch(comm)
    works(*comms)


@on_ranks("new_four")
def test_one_call_in_another_order(context: RankContext) -> None:
    """The ranks mean the same again at once, in both communicators, although each has missed a call of one."""
    comms = [make_comm(context, 2), make_comm(context, 8)]
    for _ in range(2):
        works(comms[0])
    with pytest.raises(tl.PlanMismatch, match="communicator="):
        dispatch(comms[context.rank == 0])
    works(*comms)


@on_ranks("new_four")
def test_layers_of_other_sizes_in_another_order(context: RankContext) -> None:
    """Their sums of router losses are messages of other lengths too."""
    layers = [make_layer(context, 1, balance_coef=0.1), make_layer(context, 4, balance_coef=0.1)]
    for layer in layers if context.rank else reversed(layers):
        with pytest.raises(tl.PlanMismatch, match="communicator="):
            layer(torch.ones(4, 16))
    for layer in layers:
        step(layer)


@on_ranks("new_four")
@pytest.mark.parametrize("experts_per_rank", [2, 300], ids=["few experts", "more than a first message holds"])
def test_more_experts_than_a_message_holds(context: RankContext, experts_per_rank: int) -> None:
    """Their counts follow in a second message, behind a fault or another call too."""
    comm, other = make_comm(context, experts_per_rank), make_comm(context, 3)
    works(comm, other)
    last = context.num_ranks - 1
    with pytest.raises(tl.ShapeMismatch if context.rank == last else tl.PeerError):
        comm.dispatch(torch.ones(8, 64 if context.rank == last else 128), torch.zeros(8, 2, dtype=torch.int64))
    works(comm)
    with pytest.raises(tl.PlanMismatch):
        dispatch(other if context.rank == last else comm)
    works(comm, other)


# -- something is made where others make a call -------------------------------------------------------------------


MAKERS: dict[str, Callable[[RankContext], Any]] = {
    "Communicator": make_comm,
    "MegaMoE": lambda context: tl.MegaMoE(
        context.group, num_experts=2 * context.num_ranks, hidden=128, intermediate=128, top_k=2, max_tokens_per_rank=8
    ),
    "ExpertParallelMoE": make_layer,
}


@on_ranks("new_four")
@pytest.mark.parametrize("what", mostly_slow(list(MAKERS), ["Communicator"]))
def test_one_rank_makes_something(context: RankContext, what: str) -> None:
    comm = make_comm(context)
    works(comm)
    for odd in (1, 0):
        with pytest.raises(tl.PlanMismatch, match=r"call=(dispatch|making a)") as raised:
            MAKERS[what](context) if context.rank == odd else dispatch(comm)
        assert raised.value.rank == 1
        works(comm)
    new = make_comm(context, 3)  # ranks have made unequal numbers of them before
    works(comm, new)


@on_ranks("new_four")
def test_one_rank_gathers_a_state_dict(context: RankContext) -> None:
    layer = make_layer(context, balance_coef=0.1)
    for odd in (2, 0):
        with pytest.raises(tl.PlanMismatch, match="gather_state_dict"):
            tl.gather_state_dict(layer) if context.rank == odd else step(layer)
        step(layer)
    tl.gather_state_dict(layer)


# -- ranks out of step in a training loop -------------------------------------------------------------------------


LOSSES: dict[str, dict[str, Any]] = {
    "balance": {"balance_coef": 0.1},
    "z": {"z_coef": 0.1},
    "correction bias": {"router": tl.Router(8, 2, "sigmoid", correction_bias=True)},
    "summed gradients": {"router_grad": "sum"},
}


@on_ranks("new_four")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("fault", ["skips a backward", "makes a forward more", "has a batch fewer", "clips early"])
def test_out_of_step(context: RankContext, loss: str, fault: str) -> None:
    """It is no matter of deadlines: all hear at once what each has begun, and the next step works."""
    options = LOSSES[loss]
    layer, odd = make_layer(context, **options), context.rank == 1

    def steps() -> None:
        if fault == "clips early":
            tl.clip_grad_norm_(layer.parameters(), 1.0) if odd else step(layer)
            return
        if fault == "has a batch fewer":
            tl.gather_state_dict(layer) if odd else step(layer)
            return
        out, aux_loss = layer(torch.ones(4, 16, requires_grad=True))
        if odd and fault == "makes a forward more":
            layer(torch.ones(4, 16))
        if not odd:
            (out.sum() + aux_loss).backward()
        layer(torch.ones(4, 16))

    step(layer)
    with pytest.raises(tl.PlanMismatch, match=r"rank 1 has (call|dispatch number)=.*, rank 0 has") as raised:
        steps()
    assert raised.value.rank == 1
    step(layer)


@on_ranks("new_four")
def test_a_bias_that_one_rank_updates(context: RankContext) -> None:
    """Routers would drift apart in silence. Where all have the same again, the layer works."""
    layer = make_layer(context, router=tl.Router(8, 2, "sigmoid", correction_bias=True))
    step(layer)
    if context.rank == 1:
        layer.update_correction_bias(0.5)
    for _ in range(2):
        with pytest.raises(tl.PlanMismatch, match=r"correction_bias=.*; call update_correction_bias on all") as raised:
            layer(torch.ones(4, 16))
        assert raised.value.rank == 1
    if context.rank != 1:
        layer.update_correction_bias(0.5)
    step(layer)


@on_ranks("new_four")
def test_counts_are_exact(context: RankContext) -> None:
    """Above 2^24 a float32 has no odd numbers."""
    from tokenloom.ops.router import RouterSums
    from tokenloom.training.gradients import sum_over_ranks

    layer = make_layer(context, balance_coef=0.1)
    counts = torch.full((8,), 2**24 + 1 if context.rank else 2, dtype=torch.int64)
    sums = RouterSums(torch.ones(8), torch.ones(1), counts, torch.ones(1))
    total = sum_over_ranks(layer.comm.engine.ranks, sums, torch.float32)
    assert total.expert_counts.tolist() == [3 * (2**24 + 1) + 2] * 8
    assert total.probabilities.tolist() == [4.0] * 8
