"""Tensors of the caller's own that results are written to: what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from tokenloom.backends.base import CombineOptions, DispatchInputs, DispatchOptions, DispatchOut
from tokenloom.comm.routed import Routed
from tokenloom.comm.validation import require_tensor
from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch, a_type
from tokenloom.ops.quant.scale_layouts import empty_scales
from tokenloom.plan import FP8_BLOCK, ROUTE_LAYOUTS, Plan

Like = torch.Tensor
"""A tensor without memory (device "meta") of the shape, dtype and strides that one must have."""


def of_dispatch(plan: Plan, options: DispatchOptions, inputs: DispatchInputs, out: object) -> DispatchOut:
    """Check the tensors for the results of a dispatch, and return them.

    Raises:
        InvalidArgument: sizes are exact, gradients are enabled, or the layout has no such result.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not what the dispatch would return.
    """
    if not isinstance(out, DispatchOut):
        raise InvalidArgument(f"out is {a_type(out)}, expected a tokenloom.DispatchOut")
    if options.sizes != "bounded":
        raise InvalidArgument("out= needs results of a known size; pass sizes='bounded'")
    if torch.is_grad_enabled():
        raise InvalidArgument("out= has no gradient; dispatch inside of torch.no_grad()")
    likes = results(plan, options, inputs)
    for name, tensor in vars(out).items():
        if tensor is None:
            continue
        if name not in likes:
            has = ", ".join(likes)
            raise InvalidArgument(
                f"out.{name} is given, but this dispatch in layout {options.layout!r} has only {has}"
            )
        _require_like(f"out.{name}", tensor, likes[name], inputs.x.device)
    return out


def results(plan: Plan, options: DispatchOptions, inputs: DispatchInputs) -> dict[str, Like]:
    """What a dispatch of bounded size returns, by name. Not to be changed."""
    ids, weights = inputs.topk_ids.dtype, inputs.topk_weights
    with_scales = options.to_fp8 or inputs.scales is not None
    return _results(plan, options, inputs.x.dtype, ids, None if weights is None else weights.dtype, with_scales)


def of_combine(out: object, options: CombineOptions, routed: Routed, y: torch.Tensor) -> None:
    """Check the tensor for the result of a combine.

    Raises:
        InvalidArgument: a gradient is wanted.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: it is not what the combine would return.
    """
    require_no_gradient(out, options.needs_grad)
    _require_like("out", out, _like([routed._handle.num_tokens, y.shape[-1]], options.out_dtype), y.device)


def require_no_gradient(out: object, wanted: bool) -> None:
    """Check that a combine writes to a tensor where nobody wants a gradient.

    Raises:
        InvalidArgument: a gradient is wanted.
    """
    if wanted or (isinstance(out, torch.Tensor) and out.requires_grad):
        raise InvalidArgument("out= has no gradient; combine inside of torch.no_grad()")


@lru_cache(maxsize=64)
def _results(
    plan: Plan,
    options: DispatchOptions,
    x_dtype: torch.dtype,
    ids_dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
    with_scales: bool,
) -> dict[str, Like]:
    layout, num_ranks, local = options.layout, plan.num_ranks, plan.experts_per_rank
    places = [num_ranks, plan.max_tokens_per_rank]
    if layout != "rank":
        assert options.capacity is not None, "sizes are bounded"
        places = [local, options.capacity] if layout == "slots" else [options.capacity]
    row_dtype, int32 = torch.float8_e4m3fn if options.to_fp8 else x_dtype, torch.int32
    likes = {"tokens": _like([*places, plan.hidden], row_dtype)}
    if with_scales:
        likes["scales"] = _scales(options.scale_layout, places, plan.hidden)
    if layout not in ROUTE_LAYOUTS:
        likes["topk_ids"] = _like([*places, plan.top_k], ids_dtype)
        if weights_dtype is not None:
            likes["topk_weights"] = _like([*places, plan.top_k], weights_dtype)
    likes |= {"num_rows": _like([], int32), "source_counts": _like([num_ranks], int32)}
    likes["expert_counts"] = _like([local], int32)
    if layout == "expert":
        likes["expert_offsets"] = _like([local + 1], int32)
    if layout == "slots":
        likes["slot_ranges"] = _like([local, num_ranks, 2], int32)
    return likes


def _scales(scale_layout: str, places: Sequence[int], hidden: int) -> Like:
    if scale_layout != "rows":
        return empty_scales(scale_layout, [*places, hidden // FP8_BLOCK], torch.device("meta"))
    return _like([*places, hidden // FP8_BLOCK], torch.float32)


def _like(shape: Sequence[int], dtype: torch.dtype) -> Like:
    return torch.empty(shape, dtype=dtype, device="meta")


def _require_like(name: str, tensor: object, like: Like, device: torch.device) -> None:
    require_tensor(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.shape != like.shape:
        raise ShapeMismatch(f"{name} is {list(tensor.shape)}, expected {list(like.shape)}, as the call returns it")
    if tensor.dtype != like.dtype:
        raise DtypeMismatch(f"{name} is {tensor.dtype}, expected {like.dtype}, as the call returns it")
    if tensor.device != device:
        raise DeviceMismatch(f"{name} is on {tensor.device}, the call's tensors are on {device}; move one of them")
    steps = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if tensor.numel() and any(size > 1 and stride != wanted for size, stride, wanted in steps):
        raise ShapeMismatch(f"{name} has strides {tensor.stride()}, expected {like.stride()}, as the call returns it")
