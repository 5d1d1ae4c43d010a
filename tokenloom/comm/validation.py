"""What a call accepts. Each function returns checked values or raises a named error; nothing is sent here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tokenloom.backends.base import Capabilities, CombineOptions, DispatchInputs, DispatchOptions, OwnOutputs
from tokenloom.comm.routed import Routed
from tokenloom.comm.strategy import STRATEGY_OF_MODE, SWAPPED, Strategy
from tokenloom.comm.torch_modes import PLAIN, has_memory, is_plain, settled
from tokenloom.errors import (
    DeviceMismatch,
    DtypeMismatch,
    InvalidArgument,
    InvalidExpertId,
    NotDifferentiable,
    ShapeMismatch,
    a_type,
)
from tokenloom.plan import FP8_BLOCK, ROUTE_LAYOUTS, SCALE_LAYOUTS, Plan

FP8_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = WEIGHT_DTYPE = torch.float32
MAX_ROWS = 2**31 - 1
"""Counts of rows are int32."""
SIZES = ("exact", "bounded")
ID_DTYPES = (torch.int32, torch.int64)


def dispatch_options(
    plan: Plan,
    able: Capabilities,
    layout: str,
    alignment: int,
    sizes: str | None,
    capacity: int | None,
    to_fp8: bool,
    power_of_two_scales: bool,
    strategy: str = "dedup",
    scale_layout: str = "rows",
) -> DispatchOptions:
    """The options of a dispatch, with the default sizes and the default capacity filled in.

    Args:
        able: what the communicator's backend can do.
    """
    if layout not in able.layouts:
        raise InvalidArgument(f"layout is {layout!r}, expected one of {', '.join(able.layouts)}")
    if sizes is None:
        sizes = "bounded" if layout == "slots" else "exact"
    if sizes not in SIZES:
        raise InvalidArgument(f"sizes is {sizes!r}, expected one of {', '.join(SIZES)}")
    if not _is_rows(alignment):
        raise InvalidArgument(f"alignment is {alignment!r}, expected rows, 1 to {MAX_ROWS}")
    if layout != "expert" and alignment != 1:
        raise InvalidArgument(f"alignment is {alignment}, but only layout 'expert' has groups; leave it at 1")
    if capacity is not None and not _is_rows(capacity):
        raise InvalidArgument(f"capacity is {capacity!r}, expected rows, 1 to {MAX_ROWS}")
    if layout == "slots":
        if sizes == "exact":
            raise InvalidArgument(
                "layout 'slots' has fixed places, and its counts stay on the device; leave sizes out"
            )
        capacity = plan.default_slots if capacity is None else capacity
        if capacity * plan.experts_per_rank > MAX_ROWS:
            raise InvalidArgument(
                f"capacity is {capacity} for each of {plan.experts_per_rank} experts, expected at most {MAX_ROWS} "
                f"places in all; pass capacity={MAX_ROWS // plan.experts_per_rank} or less"
            )
    elif layout == "rank":
        if capacity is not None:
            raise InvalidArgument("layout 'rank' has num_ranks * max_tokens_per_rank fixed places; leave capacity out")
    elif sizes == "bounded" and capacity is None:
        worst = plan.worst_case_rows(layout, alignment)
        if layout == "expert":
            raise InvalidArgument(
                f"sizes='bounded' with layout 'expert' needs capacity=, the rows of the output (worst case: {worst})"
            )
        capacity = worst
    for name, value in (("to_fp8", to_fp8), ("power_of_two_scales", power_of_two_scales)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name} is {value!r}, expected True or False")
    if power_of_two_scales and not to_fp8:
        raise InvalidArgument(
            "power_of_two_scales=True without to_fp8=True: dispatch quantises nothing then; pass to_fp8=True too"
        )
    _check_scale_layout(layout, scale_layout, to_fp8, power_of_two_scales)
    Strategy(dispatch=strategy)
    if strategy not in able.dispatch_strategies:
        raise InvalidArgument(f"strategy is {strategy!r}, this backend has {', '.join(able.dispatch_strategies)}")
    if strategy == "all_to_all" and layout not in ROUTE_LAYOUTS:
        raise InvalidArgument(f"strategy 'all_to_all' moves a row for each route, layout {layout!r} has one per token")
    return DispatchOptions(layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy, scale_layout)


def _check_scale_layout(layout: str, scale_layout: str, to_fp8: bool, power_of_two_scales: bool) -> None:
    if scale_layout not in SCALE_LAYOUTS:
        raise InvalidArgument(f"scale_layout is {scale_layout!r}, expected one of {', '.join(SCALE_LAYOUTS)}")
    if scale_layout != "rows" and layout != "slots":
        raise InvalidArgument(
            f"scale_layout is {scale_layout!r}, but layout {layout!r} has scales by row alone; leave it out"
        )
    if scale_layout == "packed" and to_fp8 and not power_of_two_scales:
        raise InvalidArgument("scale_layout 'packed' holds powers of two alone; pass power_of_two_scales=True")


def reads_ids(able: Capabilities, device: torch.device) -> bool:
    """Whether the host reads ids to find those out of range. It cannot while a graph is captured."""
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return able.reads_on_host and not captured


COPIES: dict[object, OwnOutputs] = {False: False, True: True, "if_needed": "if needed"}
"""What ``copy`` of a dispatch means for its outputs."""


def dispatch_inputs(
    plan: Plan,
    able: Capabilities,
    device: torch.device,
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    copy: bool | str,
    check_ids: bool,
    to_fp8: bool,
    scale_layout: str = "rows",
    split: bool = False,
) -> DispatchInputs:
    """The tensors of a dispatch.

    Args:
        able: what the communicator's backend can do.
        copy: of the call: False, True or "if_needed".
        check_ids: read the ids on the host, to find those out of range, and scales that cannot be packed.
        scale_layout: of the options.
        split: the dispatch is made in halves.
    """
    own = _own_outputs(copy)
    tokens: Any = x
    scales = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise InvalidArgument(f"x is {a_type(x)} of {len(x)}, expected a tensor or (fp8, scales)")
        tokens, scales = x
    plain = scales is None and scale_layout == "rows" and not check_ids
    if not (plain and _are_usual(plan, able, device, tokens, topk_ids, topk_weights, to_fp8)):
        tokens, scales = settled(tokens), settled(scales)
        topk_ids, topk_weights = settled(topk_ids), settled(topk_weights)
        _check_inputs(plan, able, device, tokens, scales, topk_ids, topk_weights, check_ids, to_fp8, scale_layout)
    grad = torch.is_grad_enabled()
    return DispatchInputs(
        tokens,
        scales,
        topk_ids,
        topk_weights,
        grad and tokens.requires_grad,
        grad and topk_weights is not None and topk_weights.requires_grad,
        True if grad else own,
        False,
        split,
    )


def _own_outputs(copy: object) -> OwnOutputs:
    try:
        return COPIES[copy]
    except (KeyError, TypeError):  # a list, say, cannot be looked up
        raise InvalidArgument(f"copy is {copy!r}, expected False, True or 'if_needed'") from None


def _are_usual(
    plan: Plan,
    able: Capabilities,
    device: torch.device,
    x: object,
    ids: object,
    weights: object,
    to_fp8: bool,
) -> bool:
    """Whether the tensors of a dispatch are right at a glance, as nearly always.

    What is not gets looked at again, thing by thing, by :func:`_check_inputs`, which says what is wrong if anything.
    """
    if x.__class__ not in PLAIN or ids.__class__ not in PLAIN or x.layout is not torch.strided:
        return False
    if x.is_nested or ids.is_nested or not (has_memory(x) and has_memory(ids)):
        return False
    shape, ids_shape = x.shape, ids.shape
    return (
        len(shape) == 2
        and shape[1] == plan.hidden
        and shape[0] <= plan.max_tokens_per_rank
        and ids_shape == (shape[0], plan.top_k)
        and x.dtype in able.dtypes
        and ids.dtype in ID_DTYPES
        and x.device == device == ids.device
        and x.is_contiguous()
        and ids.is_contiguous()
        and not (to_fp8 and (x.requires_grad or plan.hidden % FP8_BLOCK))
        and (
            weights is None
            or (
                weights.__class__ in PLAIN
                and not weights.is_nested
                and has_memory(weights)
                and weights.shape == ids_shape
                and weights.dtype == torch.float32
                and weights.device == device
                and weights.is_contiguous()
            )
        )
    )


def _check_inputs(
    plan: Plan,
    able: Capabilities,
    device: torch.device,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    check_ids: bool,
    to_fp8: bool,
    scale_layout: str,
) -> None:
    """Raise unless the tensors of a dispatch are right."""
    require_tensor("x", x)
    num_tokens = x.shape[0] if x.ndim else 0
    if x.ndim != 2 or x.shape[1] != plan.hidden:
        cure = f"pass hidden={x.shape[-1] if x.ndim else '...'} to Communicator"
        if x.ndim and x.shape[-1] == plan.hidden:
            cure = f"pass x.reshape(-1, {plan.hidden}): dispatch takes one row per token"
        raise ShapeMismatch(f"x is {list(x.shape)}, the communicator was made for [tokens, {plan.hidden}]; {cure}")
    number_of_tokens(plan, num_tokens)
    _require_ready("x", x, device)
    _check_payload(plan, able, x, scales, device, to_fp8)
    if scale_layout != "rows" and not to_fp8:
        _check_laid_out(scale_layout, x, scales, check_ids)
    _check_ids(plan, topk_ids, num_tokens, device)
    if check_ids:
        _check_id_range(plan, topk_ids)
    if topk_weights is not None:
        _check_weights(plan, topk_weights, x, device, to_fp8)


def number_of_tokens(plan: Plan, num_tokens: int) -> None:
    """Not more than there is room for."""
    if num_tokens > plan.max_tokens_per_rank:
        raise ShapeMismatch(
            f"x has {num_tokens} tokens, the communicator was made for at most {plan.max_tokens_per_rank}; "
            f"pass max_tokens_per_rank={num_tokens} where the communicator or the layer is made"
        )


def combine_options(
    able: Capabilities,
    device: torch.device,
    y: torch.Tensor,
    rows_shape: tuple[int, ...],
    layout: str,
    has_weights: bool,
    weights_require_grad: bool,
    from_home: bool,
    weighted: bool | None,
    mode: str,
    wire_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> CombineOptions:
    """The options of a combine, and its tensor ``y``, which must be ``rows_shape``.

    Args:
        able: what the communicator's backend can do.
        has_weights, weights_require_grad: whether the dispatch received weights, and whether they have a graph.
        from_home: the combine is given weights of its own.
    """
    if not isinstance(mode, str) or mode not in STRATEGY_OF_MODE:
        raise InvalidArgument(f"mode is {mode!r}, expected one of {', '.join(STRATEGY_OF_MODE)}")
    if STRATEGY_OF_MODE[mode] not in able.combine_strategies:
        has = ", ".join(name for name, strategy in STRATEGY_OF_MODE.items() if strategy in able.combine_strategies)
        raise InvalidArgument(f"mode is {mode!r}, this backend has {has}")
    if not (weighted is None or isinstance(weighted, bool)):
        raise InvalidArgument(f"weighted is {weighted!r}, expected True, False or None")
    if layout not in ROUTE_LAYOUTS:
        if weighted is not None:
            raise InvalidArgument(
                f"weighted={weighted} with layout {layout!r}: its rows are weighted and summed by the caller; "
                "leave weighted out"
            )
        if mode == "per_route":
            raise InvalidArgument(f"mode 'per_route' needs one row per route, layout {layout!r} has one per token")
    weighted = layout in ROUTE_LAYOUTS if weighted is None else weighted
    if from_home and not weighted:
        raise InvalidArgument(
            "topk_weights with weighted=False; leave one of them out"
            if layout in ROUTE_LAYOUTS
            else f"topk_weights with layout {layout!r}: its rows are weighted and summed by the caller; leave them out"
        )
    if weighted and not (has_weights or from_home):
        raise InvalidArgument("weighted combine of a dispatch without topk_weights; pass them to dispatch")
    require_tensor("y", y)
    if y.shape != rows_shape:
        raise ShapeMismatch(f"y is {list(y.shape)}, expected {list(rows_shape)}: one row per row of routed.tokens")
    _require_ready("y", y, device)
    grad = torch.is_grad_enabled()
    needs_grad = grad and (y.requires_grad or (weighted and weights_require_grad))
    given = (able.dtypes, y.dtype, weighted, mode, wire_dtype, out_dtype, needs_grad, from_home)
    try:
        return _combine_options(*given)
    except TypeError:  # a list, say, cannot be looked up
        return _combine_options.__wrapped__(*given)


@lru_cache(maxsize=256, typed=True)
def _combine_options(
    dtypes: tuple[torch.dtype, ...],
    y_dtype: torch.dtype,
    weighted: bool,
    mode: str,
    wire_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    needs_grad: bool,
    from_home: bool,
) -> CombineOptions:
    """The options for rows of this dtype; ``dtypes`` are those that the backend moves."""
    for name, dtype in (("y", y_dtype), ("wire_dtype", wire_dtype), ("out_dtype", out_dtype)):
        if dtype is None:
            continue
        if dtype == torch.float64 and y_dtype != torch.float64:
            raise DtypeMismatch(f"{name} is float64, y is {y_dtype} and summed in float32; pass y in float64")
        if dtype not in dtypes:
            raise DtypeMismatch(f"{name} is {dtype}, expected {_names(dtypes)}{_elsewhere(dtypes, dtype)}")
    strategy = STRATEGY_OF_MODE[mode]
    return CombineOptions(weighted, wire_dtype or y_dtype, out_dtype or y_dtype, needs_grad, strategy, from_home)


def require_strategy(able: Capabilities, strategy: object) -> None:
    """Raise InvalidArgument unless the backend has what carries a layer's payloads and gradients by this Strategy."""
    if not isinstance(strategy, Strategy):
        raise InvalidArgument(
            f"strategy is {strategy!r}, expected a tl.Strategy, such as tl.Strategy(dispatch='dedup')"
        )
    has = {"dispatch": able.dispatch_strategies, "combine": able.combine_strategies}
    forward = [("dispatch", strategy.dispatch), ("combine", strategy.combine)]
    backward = [("dispatch", SWAPPED[strategy.combine]), ("combine", strategy.gradient_of_dispatch)]
    for name, wanted in forward + backward:
        if wanted not in has[name]:
            raise InvalidArgument(f"{strategy} needs {name} by {wanted!r}, this backend has {', '.join(has[name])}")


def require_layout(able: Capabilities, layout: str) -> None:
    """Raise InvalidArgument unless the backend has the layout that a layer dispatches in."""
    if layout not in able.layouts:
        raise InvalidArgument(
            f"the layer needs layout {layout!r}, this backend has {', '.join(able.layouts)}; leave out backend= and "
            "transport="
        )


def require_routed(routed: object, owner: object) -> None:
    """Raise InvalidArgument unless it is what a dispatch of ``owner`` returned."""
    if not isinstance(routed, Routed):
        raise InvalidArgument(f"routed is {a_type(routed)}, expected what dispatch returned")
    if routed._owner is not owner:
        raise InvalidArgument("routed comes from another Communicator; combine where it was dispatched")


def _check_payload(
    plan: Plan, able: Capabilities, x: torch.Tensor, scales: torch.Tensor | None, device: torch.device, to_fp8: bool
) -> None:
    if to_fp8 and x.dtype == FP8_DTYPE:
        raise InvalidArgument(
            f"x is {x.dtype} already, to_fp8=True makes it so; leave to_fp8 out and pass (x, scales)"
        )
    if to_fp8 and scales is not None:
        raise InvalidArgument("x comes with scales, to_fp8=True makes them; pass x alone")
    if scales is None:
        if x.dtype == FP8_DTYPE:
            raise DtypeMismatch(f"x is {x.dtype} without scales; pass (x, scales), as quantize_fp8 returns them")
        if x.dtype not in able.dtypes:
            raise DtypeMismatch(
                f"x is {x.dtype}, expected {_names(able.dtypes)}, or (float8_e4m3fn, scales)"
                + _elsewhere(able.dtypes, x.dtype)
            )
    elif x.dtype != FP8_DTYPE:
        raise DtypeMismatch(f"x comes with scales but is {x.dtype}, expected float8_e4m3fn")
    if scales is None and not to_fp8:
        return
    if plan.hidden % FP8_BLOCK:
        raise ShapeMismatch(f"FP8 needs a hidden size that is a multiple of {FP8_BLOCK}, this one is {plan.hidden}")
    if scales is not None:
        _check_scales(plan, x, scales, device)
    if torch.is_grad_enabled() and (x.requires_grad or (scales is not None and scales.requires_grad)):
        if to_fp8:
            raise NotDifferentiable("x requires grad, but to_fp8=True sends FP8, which has none; leave to_fp8 out")
        raise NotDifferentiable("an FP8 payload requires grad, but FP8 has none; detach it")


def _check_scales(plan: Plan, x: torch.Tensor, scales: torch.Tensor, device: torch.device) -> None:
    require_tensor("scales", scales)
    expected = [x.shape[0], plan.scales_per_token]
    if list(scales.shape) != expected:
        raise ShapeMismatch(f"scales is {list(scales.shape)}, expected {expected}: one per {FP8_BLOCK} values")
    if scales.dtype != torch.float32:
        raise DtypeMismatch(f"scales is {scales.dtype}, expected float32")
    _require_ready("scales", scales, device)


def _check_laid_out(scale_layout: str, x: torch.Tensor, scales: torch.Tensor | None, read: bool) -> None:
    """Raise unless there are scales, which can be laid out as wanted; values are looked at only with ``read``."""
    if scales is None:
        raise InvalidArgument(f"scale_layout is {scale_layout!r}, but x is {x.dtype} without scales; pass to_fp8=True")
    if scale_layout != "packed" or not read:
        return
    bits = scales.view(torch.int32)
    bad = (bits & 0x7FFFFF != 0) | (bits < 1 << 23) | (bits >= 255 << 23)
    if bad.any():
        token, block = bad.nonzero()[0].tolist()
        raise InvalidArgument(
            f"scales[{token}, {block}] is {float(scales[token, block])}, but scale_layout 'packed' holds powers of "
            "two from 2**-126 to 2**127 alone; quantise with power_of_two_scales=True"
        )


def _check_ids(plan: Plan, ids: torch.Tensor, num_tokens: int, device: torch.device) -> None:
    require_tensor("topk_ids", ids)
    expected = [num_tokens, plan.top_k]
    if list(ids.shape) != expected:
        raise ShapeMismatch(f"topk_ids is {list(ids.shape)}, expected {expected}: top_k ids for each token of x")
    if ids.dtype not in ID_DTYPES:
        swapped = "; topk_ids come before topk_weights" if ids.is_floating_point() else ""
        raise DtypeMismatch(f"topk_ids is {ids.dtype}, expected int32 or int64{swapped}")
    _require_ready("topk_ids", ids, device)


def _check_id_range(plan: Plan, ids: torch.Tensor) -> None:
    bad = (ids < -1) | (ids >= plan.num_experts)
    if bad.any():
        token, k = bad.nonzero()[0].tolist()
        raise InvalidExpertId(token, k, int(ids[token, k]), plan.num_experts, int(bad.sum()))


def _check_weights(plan: Plan, weights: torch.Tensor, x: torch.Tensor, device: torch.device, to_fp8: bool) -> None:
    require_tensor("topk_weights", weights)
    expected = [x.shape[0], plan.top_k]
    if list(weights.shape) != expected:
        raise ShapeMismatch(f"topk_weights is {list(weights.shape)}, expected {expected}: one for each id")
    wide = x.dtype == torch.float64 and not to_fp8  # with to_fp8 the rows that travel are FP8
    if weights.dtype != torch.float32 and not (wide and weights.dtype == torch.float64):
        raise DtypeMismatch(f"topk_weights is {weights.dtype}, expected float32 (or float64 beside float64 tokens)")
    _require_ready("topk_weights", weights, device)


def require_tensor(name: str, value: object) -> None:
    """Raise InvalidArgument unless it is a tensor that kernels can read."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{name} is {a_type(value)}, expected a torch.Tensor")
    if not is_plain(value):
        kind = "nested tensor" if value.is_nested else f"{type(value).__name__} of layout {value.layout}"
        raise InvalidArgument(
            f"{name} is a {kind}, expected strided memory of its own; pass to_local() of a DTensor, to_dense() of a "
            "sparse tensor, or values() of a nested one, one row for each token"
        )
    if not has_memory(value):
        raise InvalidArgument(
            f"{name} has no memory: its storage was freed (resize_(0)), or torch transforms it (a functional tensor); "
            "pass a tensor that holds its values"
        )


def _require_ready(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise DeviceMismatch(f"{name} is on {tensor.device}, the communicator is on {device}; move one of them")
    if not tensor.is_contiguous():
        raise ShapeMismatch(f"{name} has strides {tensor.stride()}, expected contiguous; pass {name}.contiguous()")


def _is_rows(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_ROWS


def _elsewhere(dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> str:
    """The cure for a payload that other backends move."""
    return "; backend='collective' moves it" if dtype in Capabilities().dtypes and dtype not in dtypes else ""


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
