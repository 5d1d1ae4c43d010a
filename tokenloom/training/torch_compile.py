"""ExpertParallelMoE inside ``torch.compile``: to the compiler a layer's forward is one operator, its gradient another.

A layer has collectives, host reads and sizes that depend on data, so the operators run it as it runs without a
compiler. The compiler sees everything that they read and write.

What autograd keeps lives as long as the memory of a small tensor, the ticket. The compiler saves the ticket for
backward like any other tensor, or drops it. :mod:`tokenloom.training.compiled_order` keeps calls in order.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from tokenloom.errors import InvalidArgument, NotDifferentiable
from tokenloom.ops import autocast
from tokenloom.training.compiled_order import keep_in_graph, keep_order_in_inductor, pin_to_forward
from tokenloom.training.shards import local_part

TICKET_BYTES = 8

_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def number_layer(layer: nn.Module) -> torch.Tensor:
    """Give the layer a number, by which the operators find it as long as it lives.

    The number is a tensor, because the compiler would make another graph for every value of an int.
    """
    number = next(_numbers)
    _layers[number] = layer
    with torch.inference_mode(False):  # graphs save it
        return torch.tensor([number], dtype=torch.int64, device="cpu")


def forward(
    layer: Any,
    x: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``layer(x, ...)`` as the compiler sees it."""
    dtype = autocast.autocast_dtype(x.device)
    spread = layer.experts.is_spread  # operators take plain tensors; the compiler knows no hasattr of DTensors
    weights: list[Any] = [
        weight.to_local() if spread and name.startswith("experts.") else weight
        for name, weight in layer.named_parameters()
    ]
    if topk_weights is not None:
        weights.append(topk_weights)
    wants_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, *weights)]
    buffers, counts = (layer.correction_bias, layer.expert_counts), layer.training and torch.is_grad_enabled()
    out, aux_loss, expert_counts, _ = moe_forward(
        x, weights, topk_ids, token_mask, *buffers, layer._number, wants_grad, dtype, counts, True
    )
    # This also makes calls differ. The compiler would merge equal calls into one and take two gradients of it.
    layer.expert_counts.copy_(expert_counts)
    return out, aux_loss


def require_parameters(modules: Iterable[Any]) -> None:
    """Raise where a weight is computed from others and set as an attribute, which the compiler does not see.

    Args:
        modules: the layer and its experts. Their ``weight_names`` are the parameters that they were made with.

    Raises:
        InvalidArgument: a weight is.
    """
    for module in modules:
        for name in module.weight_names:
            if isinstance(vars(module).get(name), torch.Tensor):
                raise InvalidArgument(
                    f"{name} is no parameter of the layer but a tensor, made by torch.nn.utils.prune say; a compiled "
                    "layer would lose its gradient: use torch.nn.utils.parametrize, or do not compile the layer"
                )


class _Kept(bytearray):
    """Memory of a ticket and what its backward needs. Both go with the last tensor in this memory."""

    def __init__(self, outputs: list[GradientEdge | None], inputs: list[torch.Tensor]) -> None:
        number = next(_numbers)
        super().__init__(number.to_bytes(TICKET_BYTES, sys.byteorder))
        self.outputs, self.inputs = outputs, inputs
        _kept[number] = self


class _Body(nn.Module):
    """Forward of a layer without the hooks of its call, which the compiler has traced."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer._forward(x, **options, compiled=True)


@torch.library.custom_op("tokenloom::moe_forward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def moe_forward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    topk_ids: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    expert_counts: torch.Tensor,
    number: torch.Tensor,
    wants_grad: list[bool],
    autocast_dtype: torch.dtype | None,
    counts: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a layer on x.

    Args:
        x: input of the layer.
        weights: local parts of the layer's parameters, in the order of ``parameters()``, and then topk_weights, if
            the caller passed them.
        topk_ids: input of the layer, or None.
        token_mask: input of the layer, or None.
        correction_bias: the layer's buffer, or None.
        expert_counts: the layer's buffer.
        number: number of the layer, from :func:`number_layer`.
        wants_grad: whether x and each of the weights want a gradient.
        autocast_dtype: dtype of autocast, None where it is off.
        counts: whether the routes count in expert_counts.
        keep: keep what :func:`moe_backward` needs, if anything wants a gradient.

    Returns:
        out, aux_loss, the new expert_counts, and the ticket for :func:`moe_backward`.
    """
    layer: Any = _layers[int(number)]
    layer.experts.accumulate_main_grads()
    inputs, routing = [x, *weights], [topk_ids, token_mask]
    if not keep or not any(wants_grad):
        with _grad_mode(False):
            outputs = _run(number, inputs, routing, correction_bias, expert_counts, autocast_dtype, counts)
        return *outputs, torch.zeros(1, dtype=torch.int64, device="cpu")
    # Before backward the compiler may reuse the memory of inputs, or of a weight that it computed.
    parameters = {local_part(weight.detach()).data_ptr() for weight in layer.parameters()}
    inputs = [x.clone(), *(weight if weight.data_ptr() in parameters else weight.clone() for weight in weights)]
    routing = [None if each is None else each.clone() for each in routing]
    with _grad_mode(True):
        leaves = _leaves(inputs, wants_grad)
        buffers = (correction_bias, expert_counts)
        out, aux_loss, new_counts = _run(number, leaves, routing, *buffers, autocast_dtype, counts)
        ticket = torch.frombuffer(_Kept(_edges(out, aux_loss), leaves), dtype=torch.int64)
        return out.detach(), aux_loss.detach(), new_counts, ticket


@moe_forward.register_fake
def _(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    topk_ids: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    expert_counts: torch.Tensor,
    number: torch.Tensor,
    wants_grad: list[bool],
    autocast_dtype: torch.dtype | None,
    counts: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    keep_order_in_inductor((_FORWARD, *_BACKWARDS))
    out = x.new_empty(x.shape, dtype=autocast_dtype or x.dtype)
    aux_loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    return out, aux_loss, torch.empty_like(expert_counts), torch.empty_like(number)


@torch.library.custom_op("tokenloom::moe_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def moe_backward(
    ticket: torch.Tensor,
    grad_out: torch.Tensor,
    grad_aux_loss: torch.Tensor,
    weights: list[torch.Tensor],
    x_shape: list[int],
    x_dtype: torch.dtype,
    wants_grad: list[bool],
) -> list[torch.Tensor]:
    """Compute the gradients of x and of the weights that want one. ``weights`` and ``x_...`` only give shapes."""
    kept = _kept.pop(int(ticket), None)
    if kept is None:
        raise NotDifferentiable(
            "a compiled ExpertParallelMoE has kept nothing for this backward; a forward allows one (no retain_graph), "
            "and hooks on saved tensors must return the memory that they were given"
        )
    inputs, kept.inputs = kept.inputs, []
    return _gradients(kept.outputs, (grad_out, grad_aux_loss), inputs)


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
    keep_order_in_inductor((_FORWARD, *_BACKWARDS))
    grads = [grad_out.new_empty(x_shape, dtype=x_dtype)] if wants_grad[0] else []
    of_weights = zip(weights, wants_grad[1:], strict=True)
    return grads + [weight.new_empty(weight.shape) for weight, wanted in of_weights if wanted]


@torch.library.custom_op("tokenloom::moe_forward_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def moe_forward_backward(
    grad_out: torch.Tensor,
    grad_aux_loss: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    topk_ids: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    number: torch.Tensor,
    wants_grad: list[bool],
    autocast_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """Run a forward that kept nothing again, then compute its gradients like :func:`moe_backward`."""
    counted: Any = _layers[int(number)].expert_counts  # the forward has counted already
    with _grad_mode(True):
        leaves = _leaves([x, *weights], wants_grad)
        routing, buffers = (topk_ids, token_mask), (correction_bias, counted)
        out, aux_loss, _ = _run(number, leaves, routing, *buffers, autocast_dtype, counts=False)
        outputs = _edges(out, aux_loss)
        del out, aux_loss
        return _gradients(outputs, (grad_out, grad_aux_loss), leaves)


@moe_forward_backward.register_fake
def _(
    grad_out: torch.Tensor,
    grad_aux_loss: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    topk_ids: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    number: torch.Tensor,
    wants_grad: list[bool],
    autocast_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    keep_order_in_inductor((_FORWARD, *_BACKWARDS))
    of_inputs = zip((x, *weights), wants_grad, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, wanted in of_inputs if wanted]


def _leaves(inputs: Sequence[torch.Tensor], wants_grad: Sequence[bool]) -> list[torch.Tensor]:
    return [each.detach().requires_grad_(wanted) for each, wanted in zip(inputs, wants_grad, strict=True)]


def _run(
    number: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    routing: Sequence[torch.Tensor | None],
    correction_bias: torch.Tensor | None,
    expert_counts: torch.Tensor,
    autocast_dtype: torch.dtype | None,
    counts: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a layer, giving out, aux_loss and the new expert_counts.

    Args:
        number: number of the layer.
        inputs: x, and the ``weights`` of :func:`moe_forward`.
        routing: topk_ids and token_mask, or None instead.
        correction_bias: the layer's buffer, or None.
        expert_counts: the layer's buffer.
        autocast_dtype: dtype of autocast, None where it is off.
        counts: whether the routes count.
    """
    layer: Any = _layers[int(number)]
    (x, *weights), (topk_ids, token_mask) = inputs, routing
    names = [name for name, _ in layer.named_parameters()]
    topk_weights = weights[-1] if len(weights) > len(names) else None
    tensors = dict(zip(names, weights, strict=False))
    tensors["expert_counts"] = new_counts = expert_counts.clone()
    if correction_bias is not None:
        tensors["correction_bias"] = correction_bias
    with torch.autocast(x.device.type, autocast_dtype, autocast_dtype is not None):
        state = {f"layer.{name}": each for name, each in tensors.items()}
        options = {"topk_ids": topk_ids, "topk_weights": topk_weights, "token_mask": token_mask, "counts": counts}
        layer.experts.stood_for = tuple(layer.experts.parameters())
        try:
            out, aux_loss = functional_call(_Body(layer), state, (x,), options)
        finally:
            layer.experts.stood_for = ()
    return out, aux_loss, new_counts


def _edges(*outputs: torch.Tensor) -> list[GradientEdge | None]:
    return [get_gradient_edge(output) if output.requires_grad else None for output in outputs]


def _gradients(
    outputs: Sequence[GradientEdge | None], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    edges, grads = zip(*((edge, grad) for edge, grad in zip(outputs, grads, strict=True) if edge), strict=True)
    wanted = [each for each in inputs if each.requires_grad]
    with _grad_mode(True):
        return [grad.contiguous() for grad in torch.autograd.grad(edges, wanted, grads, materialize_grads=True)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weights, topk_ids, token_mask, correction_bias, _, number, ctx.wants_grad, ctx.autocast_dtype, *_ = inputs
    ctx.recomputes = pin_to_forward(_FORWARD)
    if ctx.recomputes:
        ctx.save_for_backward(number, topk_ids, token_mask, correction_bias, x, *weights)
    else:
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.save_for_backward(output[3], *weights)


def _backward(ctx: Any, grad_out: torch.Tensor, grad_aux_loss: torch.Tensor, *_: object) -> Any:
    if ctx.recomputes:
        number, topk_ids, token_mask, correction_bias, x, *weights = ctx.saved_tensors
        rest = (topk_ids, token_mask, correction_bias, number, ctx.wants_grad, ctx.autocast_dtype)
        grads = iter(moe_forward_backward(grad_out, grad_aux_loss, x, weights, *rest))
    else:
        ticket, *weights = ctx.saved_tensors
        shapes = (weights, ctx.x_shape, ctx.x_dtype, ctx.wants_grad)
        grads = iter(moe_backward(ticket, grad_out, grad_aux_loss, *shapes))
    grad_x, *grad_weights = [next(grads) if wanted else None for wanted in ctx.wants_grad]
    return grad_x, grad_weights, *[None] * 9


moe_forward.register_autograd(_backward, setup_context=_setup_context)
# Inductor keeps compiled graphs on disk by the names of operators, not by what they promise. So an operator whose
# register_fake promises something else from now on needs another name.
_FORWARD, *_BACKWARDS = (
    getattr(torch.ops.tokenloom, name).default for name in ("moe_forward", "moe_backward", "moe_forward_backward")
)
keep_in_graph(_BACKWARDS)  # a forward is always used, by expert_counts


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Switch autograd for what an operator calls, though torch runs operators below autograd."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch.set_grad_enabled(enabled), torch._C._SetExcludeDispatchKeyGuard(key, not enabled):
        yield
