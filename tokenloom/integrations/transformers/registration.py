"""How transformers learns of tokenloom."""

from __future__ import annotations

from typing import Any

from transformers.distributed.expert_parallel import EPImplementationInterface

from tokenloom.integrations.transformers.implementation import TokenloomExperts
from tokenloom.integrations.transformers.options import Options


def register(name: str = "tokenloom", **options: Any) -> None:
    """Register an expert-parallel implementation, or change the one of that name.

    Importing the module registers ``"tokenloom"`` with the defaults. Models that are loaded later with
    ``DistributedConfig(ep_implementation=name)`` use it. All ranks register the same.

    Args:
        name: what ``ep_implementation`` says.
        **options: ``experts``: "auto" runs tokenloom's experts where they compute what the model's do, and the model's
            own elsewhere; "model" always runs the model's own. ``max_tokens_per_rank``: the most tokens of one call on
            one rank, where it is known, so that communicators need not grow. ``overlap`` and
            ``redispatch_in_backward``: as in ``ExpertParallelMoE``, for tokenloom's experts. ``backend``,
            ``timeout_s``, ``open_timeout_s``, ``num_sms``: as in ``Communicator``.

    Raises:
        InvalidArgument: an option is unknown, or has a value that is never right.
    """
    implementation = type("TokenloomExperts", (TokenloomExperts,), {"options": Options.of(options)})
    EPImplementationInterface.register(name, implementation)
