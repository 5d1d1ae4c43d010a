"""Modes of torch in which it does not simply run code: calls refuse them, or take tensors that kernels can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad

from tokenloom.errors import InvalidArgument, NotDifferentiable

F = TypeVar("F", bound=Callable[..., Any])

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes whose tensors have memory of their own."""
current_transforms = torch._C._functorch.peek_interpreter_stack
current_trace = torch._C._get_tracing_state
current_mode = torch._C._get_dispatch_mode
is_compiling = torch.compiler.is_dynamo_compiling
FAKE = torch._C._TorchDispatchModeKey.FAKE


def is_eager() -> bool:
    """Whether what is called now just runs; see :func:`require_eager`."""
    return current_transforms() is None and current_trace() is None and current_mode(FAKE) is None


def untransformed(call: Callable[[], object]) -> None:
    """Run a call to its end where no transform, trace or mode is around it: they belong to the thread."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            call()

    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(run).result()


def require_eager() -> None:
    """Raise where torch transforms or traces what is called. A call moves real rows, and other ranks wait for it.

    Raises:
        InvalidArgument: a transform of torch.func, a trace of torch.jit or a FakeTensorMode is around it.
    """
    if current_transforms() is not None:
        around, cure = "a transform of torch.func", "call it outside, and take gradients by torch.autograd"
    elif current_trace() is not None:
        around, cure = "torch.jit.trace", "use torch.compile"
    elif current_mode(FAKE) is not None:
        around, cure = "a FakeTensorMode", "call it outside; torch.device('meta') is fine"
    else:
        return
    raise InvalidArgument(f"this is a call of all ranks, and {around} cannot run it; {cure}")


def require_no_tangent(**tensors: Any) -> None:
    """Raise where forward-mode differentiation wants a tangent, which would be lost on its way.

    Raises:
        NotDifferentiable: one of the tensors has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotDifferentiable(
                f"{name} has a tangent, and calls have no forward-mode derivative; take gradients by backward()"
            )


@contextmanager
def as_in_first_half(inference: bool, grad: bool) -> Iterator[None]:
    """Inside, inference mode is as the first half of a call found it, and so are the tensors that are made.

    Args:
        inference: the first half ran in inference mode.
        grad: gradients were enabled there.
    """
    if torch.is_inference_mode_enabled() == inference:
        yield
        return
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        yield


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in strided memory of its own. A DTensor, say, does not."""
    dispatch = type(tensor).__torch_dispatch__
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and dispatch is torch.Tensor.__torch_dispatch__


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory where the values of a tensor should be.

    Tensors that torch traces or transforms have none, whatever their class, and neither has one whose storage somebody
    has resized to nothing. What is on device "meta" has another error.
    """
    try:
        if tensor.numel() == 0:
            return not torch._is_functional_tensor(tensor)
        return (tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() != 0) or tensor.is_meta
    except (RuntimeError, NotImplementedError):  # its values are those of another tensor
        return False


def settled(tensor: Any) -> Any:
    """Give a tensor that a functional collective of torch still brings as a plain one. Differentiable.

    ``DTensor.to_local()`` may return such a tensor. It has no memory that kernels could read. Others stay as they are.
    """
    if tensor.__class__ in PLAIN or not isinstance(tensor, torch.Tensor):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # by now somebody has

    return tensor.clone() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def breaks_graph(function: F) -> F:
    """Let the compiler end its graph before the call and begin another behind it, or it would trace host code."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if is_compiling():  # torch.compiler.disable imports the compiler, which takes a second
            return torch.compiler.disable(function)(*given, **named)
        return function(*given, **named)

    return cast(F, call)
