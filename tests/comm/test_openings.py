"""Ranks that make different calls hear of it, also where one of them is no call of a backend. Over gloo, messages of
different lengths would end all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.layer_cases import HIDDEN, LayerCase, make_layer
from tests.support.on_ranks import on_ranks
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rendezvous import agree

CASE = LayerCase(balance_coef=0.0, z_coef=0.0)


def small_comm(context: RankContext) -> tl.Communicator:
    num_experts = 4 * context.num_ranks
    return tl.Communicator(context.group, num_experts=num_experts, hidden=128, top_k=2, max_tokens_per_rank=8)


def dispatch(comm: tl.Communicator) -> tl.Routed:
    x, ids = torch.ones(8, 128), torch.arange(16).view(8, 2) % comm.plan.num_experts
    return comm.dispatch(x, ids, torch.ones(8, 2), layout="token")


@on_ranks("four")
def test_a_meeting_and_a_dispatch(context: RankContext) -> None:
    """The last rank dispatches, all others meet. Then all dispatch."""
    comm, last = small_comm(context), context.num_ranks - 1

    def meet(_: tl.Communicator) -> None:
        agree(comm.engine.ranks, lambda: ({}, None), "a meeting")

    with pytest.raises(tl.PlanMismatch, match="has call=dispatch, rank 0 has call=a meeting") as raised:
        (dispatch if context.rank == last else meet)(comm)
    assert raised.value.rank == last
    assert int(dispatch(comm).tokens.sum()) > 0
    comm.close()


@on_ranks("four")
def test_a_checkpoint_and_a_forward(context: RankContext) -> None:
    layer = make_layer(CASE, context.group)

    def gather(_: torch.Tensor) -> None:
        tl.gather_state_dict(layer)

    x = torch.ones(2, HIDDEN, dtype=CASE.dtype)
    last = context.num_ranks - 1
    with pytest.raises(tl.PlanMismatch, match="has call=dispatch, rank 0 has call=gather_state_dict"):
        (layer if context.rank == last else gather)(x)
    assert tl.gather_state_dict(layer).keys() == layer.state_dict().keys()
    assert layer(x)[0].shape == x.shape


@on_ranks("four")
def test_checkpoints_of_different_models(context: RankContext) -> None:
    layer = make_layer(CASE, context.group)
    last = context.num_ranks - 1
    model = torch.nn.Sequential(layer)
    with pytest.raises(tl.PlanMismatch, match=r"has name=0\.experts\.w1, rank 0 has name=experts\.w1"):
        tl.gather_state_dict(model if context.rank == last else layer)


@on_ranks("four")
def test_numbers_that_differ(context: RankContext) -> None:
    """They are the same again behind the call that found out."""
    comm = small_comm(context)
    dispatch(comm)
    if context.rank == 1:  # a fault of this rank was told by another communicator of the same group
        comm.engine.ranks.notes.step += 3
    with pytest.raises(tl.PlanMismatch, match="rank 1 has dispatch number="):
        dispatch(comm)
    assert int(dispatch(comm).tokens.sum()) > 0
    comm.close()


@on_ranks("four")
@pytest.mark.parametrize("options", [{"backend": "collective"}, {"backend": "network", "ranks_per_node": 2}], ids=str)
def test_two_communicators_in_different_orders(context: RankContext, options: dict[str, Any]) -> None:
    """Of one group: no rank gets the rows of the other one for its own.

    Rank 0 begins with the second communicator. Then all begin with the first.
    """
    sizes = {"num_experts": 4 * context.num_ranks, "hidden": 128, "top_k": 2, "max_tokens_per_rank": 8}
    comms = [tl.Communicator(context.group, **sizes, **options) for _ in range(2)]
    dispatch(comms[0])
    for comm in comms if context.rank else reversed(comms):
        with pytest.raises(tl.PlanMismatch, match=r"communicator=.*; make all communicators, and their calls"):
            dispatch(comm)
    for comm in comms:
        assert int(dispatch(comm).tokens.sum()) > 0
        comm.close()
