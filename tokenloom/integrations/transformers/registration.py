"""How transformers learns of tokenloom."""

from __future__ import annotations

from typing import Literal

from transformers.distributed.expert_parallel import EPImplementationInterface

from tokenloom.backends.registry import LAYER_SMS
from tokenloom.comm.placement import Placement
from tokenloom.integrations.transformers.implementation import TokenloomExperts
from tokenloom.integrations.transformers.options import ExpertsOptions


def register(
    name: str = "tokenloom",
    *,
    experts: Literal["auto", "model", "fp8", "four_bits"] = "auto",
    max_tokens_per_rank: int | None = None,
    pool_rows: int | None = None,
    overlap: bool = True,
    redispatch_in_backward: bool = False,
    backend: str = "auto",
    timeout_s: float = 30.0,
    open_timeout_s: float | None = None,
    num_sms: int = LAYER_SMS,
    transport: str = "auto",
    ranks_per_node: int | None = None,
    placement: Placement | None = None,
    spare_slots: int = 0,
) -> None:
    """Register an expert-parallel implementation, or change the one of that name.

    Importing the module registers ``"tokenloom"`` with the defaults. Models that are loaded later with
    ``DistributedConfig(ep_implementation=name)`` use it. All ranks register the same.

    Args:
        name: what ``ep_implementation`` says.
        experts: "auto" runs tokenloom's experts where they compute what the model's do, and the model's own
            elsewhere. "model" always runs the model's own. "fp8" runs ``MegaMoE``, for inference: weights are
            quantised at a layer's first call and kept beside the model's; those that are FP8 or four-bit already are
            taken as they are. It needs ``max_tokens_per_rank``, and gated experts whose sizes are multiples of 16;
            other models are refused. "four_bits" is the same with ``MegaMoE(recipe="row")``, and keeps MXFP4 weights
            in four bits; those of other checkpoints are refused at the first call.
        max_tokens_per_rank: the most tokens of one call on one rank, where it is known. None: communicators grow with
            the batches.
        pool_rows: for tokenloom's experts, as in ``ExpertParallelMoE``: there is room for so many rows, and the host
            waits for nothing. It needs ``max_tokens_per_rank``, and more tokens are an error then.
        overlap: for tokenloom's experts, as in ``ExpertParallelMoE``.
        redispatch_in_backward: for tokenloom's experts, as in ``ExpertParallelMoE``.
        backend: as in ``Communicator``; with "fp8" and "four_bits" as in ``MegaMoE``, and "auto" is "nvlink" on GPUs,
            "composed" elsewhere.
        timeout_s: as in ``Communicator``.
        open_timeout_s: as in ``Communicator``.
        num_sms: as in ``Communicator``.
        transport: as in ``Communicator``.
        ranks_per_node: as in ``Communicator``.
        placement: for tokenloom's experts of all layers, as in ``Communicator``. The model keeps its weights by
            expert, and each layer has copies of those in its slots. They are made at the first call without gradients,
            and again when weights change. Where weights are trained, each forward makes them, and the gradients of
            slots come back to the model's weights. With "fp8" and "four_bits" they are made at the first call of each
            placement.
        spare_slots: as in ``Communicator``, for ``place_experts`` to fill.

    Raises:
        InvalidArgument: an option has a value that is never right.
    """
    options = ExpertsOptions(
        experts=experts,
        max_tokens_per_rank=max_tokens_per_rank,
        pool_rows=pool_rows,
        overlap=overlap,
        redispatch_in_backward=redispatch_in_backward,
        backend=backend,
        timeout_s=timeout_s,
        open_timeout_s=open_timeout_s,
        num_sms=num_sms,
        transport=transport,
        ranks_per_node=ranks_per_node,
        placement=placement,
        spare_slots=spare_slots,
    )
    implementation = type("TokenloomExperts", (TokenloomExperts,), {"options": options})
    EPImplementationInterface.register(name, implementation)
