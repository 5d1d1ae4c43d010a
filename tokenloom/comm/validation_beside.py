"""What the calls beside dispatch and combine accept. Each function raises a named error; nothing is sent here."""

from __future__ import annotations

from typing import Any

import torch

from tokenloom.backends.base import Capabilities
from tokenloom.comm import validation
from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch, a_type
from tokenloom.plan import Plan


def rows_again(plan: Plan, able: Capabilities, device: torch.device, x: Any, num_tokens: int, layout: str) -> None:
    """Raise unless x can take the places of the tokens of an earlier dispatch: rows, or FP8 rows and their scales."""
    if isinstance(x, (tuple, list)):
        if layout == "slots":
            raise InvalidArgument("FP8 rows cannot be sent again in layout 'slots'; dispatch them anew")
        if len(x) != 2:
            raise InvalidArgument(f"x is {a_type(x)} of {len(x)}, expected a tensor or (fp8, scales)")
    tokens, scales = x if isinstance(x, (tuple, list)) else (x, None)
    validation.require_tensor("x", tokens)
    if list(tokens.shape) != [num_tokens, plan.hidden]:
        raise ShapeMismatch(f"x is {list(tokens.shape)}, expected {[num_tokens, plan.hidden]}, as it was dispatched")
    validation._require_ready("x", tokens, device)
    validation._check_payload(plan, able, tokens, scales, device, False)


def values_of_rows(values: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless there is a float32 value, or there are K of them, for each row."""
    _require_like("values", values, shape, torch.float32, device)


def weights_at_home(plan: Plan, weights: torch.Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise unless they are float32 [T, K]."""
    _require_like("topk_weights", weights, (num_tokens, plan.top_k), torch.float32, device)


def bias_at_home(name: str, bias: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless it is a floating-point [T, H]."""
    validation.require_tensor(name, bias)
    if tuple(bias.shape) != shape:
        raise ShapeMismatch(f"{name} is {list(bias.shape)}, expected {list(shape)}: tokens at home, hidden")
    if bias.dtype not in Capabilities().dtypes:
        raise DtypeMismatch(f"{name} is {bias.dtype}, expected {validation._names(Capabilities().dtypes)}")
    if bias.device != device:
        raise DeviceMismatch(f"{name} is on {bias.device}, the communicator is on {device}; move one of them")


def result_at_home(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless a biased combine can write its result to ``out``."""
    _require_like("out", out, shape, dtype, device)


def _require_like(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    validation.require_tensor(name, tensor)
    if tuple(tensor.shape) != tuple(shape):
        raise ShapeMismatch(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype != dtype:
        raise DtypeMismatch(f"{name} is {tensor.dtype}, expected {dtype}")
    validation._require_ready(name, tensor, device)


def unpacked(plan: Plan, x: Any, scale_layout: str) -> tuple[Any, int | None]:
    """What a dispatch carries for x: scales of 4 exponents a word, int32 [T, n], as the bits of float32 [T, H / 128].

    Returns:
        x, and n. None: x has no such scales, and is as it was.
    """
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        return x, None
    tokens, words = x
    if not isinstance(words, torch.Tensor) or words.dtype != torch.int32 or not isinstance(tokens, torch.Tensor):
        return x, None
    if words.is_nested or tokens.is_nested:  # which is an error
        return x, None
    if scale_layout != "rows":
        raise InvalidArgument(f"scales are int32, packed already; leave scale_layout={scale_layout!r} out")
    most = plan.scales_per_token
    if words.ndim != 2 or len(words) != len(tokens) or not 1 <= words.shape[1] <= most:
        raise ShapeMismatch(
            f"scales is {list(words.shape)}, expected [{len(tokens)}, n]: packed words, n at most {most} (H / 128)"
        )
    width = words.shape[1]
    return (tokens, torch.nn.functional.pad(words, (0, most - width)).view(torch.float32)), width
