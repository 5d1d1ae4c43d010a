"""ExpertParallelMoE inside ``torch.compile``: to the compiler a forward of a layer is one operator, its gradient another.

What is inside has sizes that depend on data, collectives and host reads, so the operators run the layer as it runs
without a compiler. What autograd keeps lives as long as the memory of a small tensor, the ticket, which the compiler
saves for backward like any other tensor, or drops.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.fx.node import has_side_effect

from tokenloom.errors import NotDifferentiable

TICKET_BYTES = 8

_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def number_layer(layer: nn.Module) -> torch.Tensor:
    """The number by which the operators find a layer, for as long as it lives.

    A tensor, since the compiler would make another graph for every value of an int.
    """
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor([number], device="cpu")


def forward(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the compiler sees of ``layer(x)``."""
    device = x.device.type
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    weights = list(layer.parameters())
    wants_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, *weights)]
    # Equal calls would be made one, whose ticket two gradients would want. What ``empty`` gives is never equal.
    call = torch.empty(0, device="cpu")
    out, aux_loss, expert_counts, _ = moe_forward(
        x, weights, layer.correction_bias, layer.expert_counts, layer._number, call, wants_grad, autocast_dtype
    )
    layer.expert_counts.copy_(expert_counts)
    return out, aux_loss


class _Kept(bytearray):
    """The memory of a ticket, and what its backward needs: both are gone with the last tensor in this memory."""

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self.number = next(_numbers)
        super().__init__(self.number.to_bytes(TICKET_BYTES, sys.byteorder))
        self.outputs: list[GradientEdge | None] = [
            get_gradient_edge(output) if output.requires_grad else None for output in outputs
        ]
        self.inputs = [tensor for tensor in inputs if tensor.requires_grad]
        _kept[self.number] = self


class _Body(nn.Module):
    """A layer's forward without the hooks of its call, which the compiler has seen."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer._forward(x)


@torch.library.custom_op("tokenloom::moe_forward", mutates_args=())
def moe_forward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    correction_bias: torch.Tensor | None,
    expert_counts: torch.Tensor,
    number: torch.Tensor,
    call: torch.Tensor,
    wants_grad: list[bool],
    autocast_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer on x.

    Args:
        weights, correction_bias, expert_counts: of the layer, in the order of ``named_parameters``.
        number: of the layer.
        call: any tensor; calls with different ones are different.
        wants_grad: of x and of each weight.
        autocast_dtype: None where autocast is off.

    Returns:
        out, aux_loss, the new expert_counts, and the ticket for :func:`moe_backward`.
    """
    layer = _layers[int(number)]
    own = dict(layer.named_parameters())
    needs_graph = any(wants_grad)
    # What the compiler computed may lie in memory that it gives to something else before backward.
    stays = [False, *(ours.data_ptr() == given.data_ptr() for ours, given in zip(own.values(), weights, strict=True))]
    with _grad_mode(needs_graph), torch.autocast(x.device.type, autocast_dtype, autocast_dtype is not None):
        if needs_graph:
            x, *weights = (
                (tensor.detach() if stays else tensor.detach().clone(memory_format=torch.contiguous_format))
                .requires_grad_(wanted)
                for tensor, stays, wanted in zip((x, *weights), stays, wants_grad, strict=True)
            )
        new_counts = expert_counts.clone()
        tensors = {**dict(zip(own, weights, strict=True)), "expert_counts": new_counts}
        if correction_bias is not None:
            tensors["correction_bias"] = correction_bias
        swapped = {f"layer.{name}": tensor for name, tensor in tensors.items()}
        out, aux_loss = functional_call(_Body(layer), swapped, (x,))
        ticket = _Kept((out, aux_loss), (x, *weights)) if needs_graph else bytearray(TICKET_BYTES)
        return out.detach(), aux_loss.detach(), new_counts, torch.frombuffer(ticket, dtype=torch.int64)


@moe_forward.register_fake
def _(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    correction_bias: torch.Tensor | None,
    expert_counts: torch.Tensor,
    number: torch.Tensor,
    call: torch.Tensor,
    wants_grad: list[bool],
    autocast_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _keep_order_in_inductor()
    out = x.new_empty(x.shape, dtype=autocast_dtype or x.dtype)
    aux_loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    return out, aux_loss, torch.empty_like(expert_counts), torch.empty_like(number)


@torch.library.custom_op("tokenloom::moe_backward", mutates_args=())
def moe_backward(
    ticket: torch.Tensor,
    grad_out: torch.Tensor,
    grad_aux_loss: torch.Tensor,
    weights: list[torch.Tensor],
    x_shape: list[int],
    x_dtype: torch.dtype,
    wants_grad: list[bool],
) -> list[torch.Tensor]:
    """Gradients of those of x and the weights that want one. ``weights``, ``x_shape``, ``x_dtype`` say their shapes."""
    kept = _kept.pop(int(ticket), None)
    if kept is None:
        raise NotDifferentiable(
            "backward of a compiled ExpertParallelMoE finds nothing that its forward kept: a compiled forward has one "
            "backward (no retain_graph), and what it saves cannot be moved (no save_on_cpu around compiled code)"
        )
    inputs, kept.inputs = kept.inputs, []
    outputs = [(edge, grad) for edge, grad in zip(kept.outputs, (grad_out, grad_aux_loss), strict=True) if edge]
    with _grad_mode(True):
        grads = torch.autograd.grad(
            [edge for edge, _ in outputs], inputs, [grad for _, grad in outputs], materialize_grads=True
        )
    return [grad.contiguous() for grad in grads]


@moe_backward.register_fake
def _(
    ticket: torch.Tensor,
    grad_out: torch.Tensor,
    grad_aux_loss: torch.Tensor,
    weights: list[torch.Tensor],
    x_shape: list[int],
    x_dtype: torch.dtype,
    wants_grad: list[bool],
) -> list[torch.Tensor]:
    _keep_order_in_inductor()
    grads = [grad_out.new_empty(x_shape, dtype=x_dtype)] if wants_grad[0] else []
    wanted = zip(weights, wants_grad[1:], strict=True)
    return grads + [weight.new_empty(weight.shape) for weight, wants in wanted if wants]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weights, *_, wants_grad, _ = inputs
    ctx.x_shape, ctx.x_dtype, ctx.wants_grad = x.shape, x.dtype, wants_grad
    ctx.save_for_backward(output[3], *weights)


def _backward(ctx: Any, grad_out: torch.Tensor, grad_aux_loss: torch.Tensor, *_: object) -> Any:
    ticket, *weights = ctx.saved_tensors
    grads = iter(moe_backward(ticket, grad_out, grad_aux_loss, weights, ctx.x_shape, ctx.x_dtype, ctx.wants_grad))
    grad_x, *grad_weights = [next(grads) if wanted else None for wanted in ctx.wants_grad]
    return grad_x, grad_weights, None, None, None, None, None, None


moe_forward.register_autograd(_backward, setup_context=_setup_context)
_OPERATORS = (torch.ops.tokenloom.moe_forward.default, torch.ops.tokenloom.moe_backward.default)
# A rank without tokens may find that it needs no gradient of x; others wait for it. What a forward writes to
# ``expert_counts`` is needed anyway.
has_side_effect(_OPERATORS[1])


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Autograd for what an operator calls, which torch runs below autograd."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch.set_grad_enabled(enabled), torch._C._SetExcludeDispatchKeyGuard(key, not enabled):
        yield


def _keep_order_in_inductor() -> None:
    """Makes inductor run these operators in the order of its graph.

    Ranks have to call their collectives in one order. Where layers do not feed each other, or one is computed again in
    backward, inductor sees operators without a dependence and may swap them to save memory, by sizes that differ
    between ranks. Effect tokens, torch's own means, do not order anything in inductor up to torch 2.13 (the dependence
    is noted under the name of a buffer and looked up under that of an operation), fail under "aot_eager" with activation
    checkpoints, and keep graphs out of inductor's cache.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or _OPERATORS[0] in lowering.lowerings:
        return
    last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    for operator in _OPERATORS:
        lowering.lowerings[operator] = _in_order(lowering.fallback_handler(operator), last)


def _in_order(lower: Callable[..., Any], last: MutableMapping[Any, Any]) -> Callable[..., Any]:
    """``lower``, whose kernel runs after the one that is ``last`` in the graph, and whatever becomes of its outputs."""
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    @functools.wraps(lower)
    def lower_in_order(*args: Any, **kwargs: Any) -> Any:
        graph, before = V.graph, len(V.graph.operations)
        result = lower(*args, **kwargs)
        kernel = [each for each in graph.operations[before:] if isinstance(each, FallbackKernel)][-1]
        if graph in last:
            graph.additional_buffer_deps[kernel.get_operation_name()].add(last[graph].get_name())
        last[graph] = kernel
        kernel.has_side_effects = lambda: True
        return result

    return lower_in_order
