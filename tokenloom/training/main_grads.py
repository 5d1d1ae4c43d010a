"""Gradients summed over micro-batches in float32, whatever the dtype of the parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tokenloom.training.shards import local_part


def accumulate_main_grads(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let backward add each gradient to ``parameter.main_grad`` and leave ``parameter.grad`` None.

    The name is Megatron-LM's. ``main_grad`` is a plain float32 tensor with the shape of this rank's part of the
    parameter, made here as zeros unless it exists. Its owner resets it, or replaces it by another tensor, such as a
    part of a larger one.

    Parameters that do so already stay as they are. Frozen ones get ``main_grad`` alone: torch has no hooks for them.
    """
    for parameter in parameters:
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is None or main_grad.is_meta:  # the parameter was on meta, too
            with torch.inference_mode(False):  # backward adds to it in any mode
                parameter.main_grad = torch.zeros_like(local_part(parameter.detach()), dtype=torch.float32)  # type: ignore[attr-defined]
        hooks = parameter._post_accumulate_grad_hooks or {}
        if parameter.requires_grad and _add_to_main_grad not in hooks.values():
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def _add_to_main_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is None:  # a copy of the layer shares the parameter, and its hook was first
        return
    grad = local_part(parameter.grad.detach())  # create_graph=True gives it a graph
    parameter.main_grad.add_(grad)  # type: ignore[attr-defined]
    parameter.grad = None
