"""Gradients that are summed over micro-batches in float32, whatever the dtype of the parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def accumulate_main_grads(parameters: Iterable[torch.nn.Parameter]) -> None:
    """From now on backward adds each gradient to ``parameter.main_grad`` and leaves ``parameter.grad`` None.

    ``main_grad`` is Megatron-LM's name: float32, the parameter's shape, made here as zeros unless there is one. Its
    owner sets it back, or puts another tensor in its place, a part of a larger one, say.
    """
    for parameter in parameters:
        if not hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def _add_to_main_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is None:  # the layer is a copy of another one with the same parameters, whose hook was first
        return
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None
