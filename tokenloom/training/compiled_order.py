"""Order of a layer's collective calls in graphs that ``torch.compile`` makes.

All ranks must make their calls in one order, whatever a compiler makes of each rank's number of tokens. Forward calls
run in the order of the program, and backward calls in the opposite one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import CheckpointPolicy


def keep_in_graph(operators: Sequence[Any]) -> None:
    """Keep the compiler from dropping calls of the operators whose results it does not use.

    A rank without tokens may have no use for the gradient of x. Without this its peers would wait for its call.
    """
    for operator in operators:
        has_side_effect(operator)


def pin_to_forward(operator: Any) -> bool:
    """Keep the compiler from recomputing the call of ``operator`` that it traces now.

    Within backward the compiler may put a recomputed call anywhere, and where depends on sizes. The last argument of
    the call, ``keep``, is set to whether the call keeps what its backward needs.

    Returns:
        Whether an activation checkpoint asks for recomputation. The call's backward must then run the forward again.
    """
    tracing = get_proxy_mode()
    if tracing is None:
        return False
    node = next(node for node in reversed(tracing.tracer.graph.nodes) if node.target is operator)
    recomputes = node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    for each in (node, *node.users):
        each.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.args = (*node.args[:-1], not recomputes)
    return recomputes


def keep_order_in_inductor(operators: Sequence[Any]) -> None:
    """Make inductor run the operators in the order of its graph.

    Inductor sees no dependence between layers that do not feed each other, and swaps them if that saves memory. Effect
    tokens, torch's own means, do not help, and with them no version caches the graph. Torch 2.11 and 2.13 swap all
    the same and cannot compile activation checkpoints. Torch 2.15 keeps what it should recompute.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or operators[0] in lowering.lowerings:
        return
    last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    for operator in operators:
        lowering.lowerings[operator] = _in_order(lowering.fallback_handler(operator), last)


def _in_order(lower: Callable[..., Any], last: MutableMapping[Any, Any]) -> Callable[..., Any]:
    """Wrap ``lower`` so that its kernel runs after the ``last`` one of the same graph."""
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
        return result

    return lower_in_order
