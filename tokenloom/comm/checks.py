"""Every check of what a call is given, and every error text, once. Nothing is sent here.

A kind of call is checked whole once, and its first call is told by the named error of a check. Later calls get a
glance that was built for the kind: a glance that fails runs the whole check, which repairs the tensors or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tokenloom.backends.seam import (
    STRATEGY_OF_MODE,
    SWAPPED,
    Capabilities,
    CombineOptions,
    DispatchKind,
    DispatchOptions,
    DispatchOut,
    OutputOwner,
    Strategy,
    Tokens,
)
from tokenloom.comm.routed import Routed
from tokenloom.errors import (
    DeviceMismatch,
    DtypeMismatch,
    InvalidArgument,
    InvalidExpertId,
    NotDifferentiable,
    ShapeMismatch,
    a_type,
)
from tokenloom.ops.quant.fp8 import require_recipe
from tokenloom.ops.quant.scale_layouts import empty_scales
from tokenloom.plan import FP8_BLOCK, ROUTE_LAYOUTS, SCALE_LAYOUTS, Plan
from tokenloom.runtime.torch_modes import PLAIN, has_memory, is_plain, require_no_tangent, settled

FP8_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = WEIGHT_DTYPE = torch.float32
MAX_ROWS = 2**31 - 1
"""Counts of rows are int32."""
SIZES = ("exact", "bounded")
ID_DTYPES = (torch.int32, torch.int64)
META = torch.device("meta")
FAR = 1 << 40
"""An address that no view of freed memory has: its storage is gone, and the address is the view's offset in it."""


class DispatchArguments(NamedTuple):
    """The options of a dispatch as its caller passed them; see ``Communicator.dispatch``."""

    layout: str
    alignment: int = 1
    sizes: str | None = None
    capacity: int | None = None
    to_fp8: bool = False
    power_of_two_scales: bool = False
    strategy: str = "dedup"
    scale_layout: str = "rows"
    recipe: str = "block"


DispatchValues = tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]
"""The values of :class:`DispatchArguments`, as a tuple that every call makes quicker."""


class CombineArguments(NamedTuple):
    """The options of a combine as its caller passed them; see ``Communicator.combine``."""

    weighted: bool | None
    mode: str
    wire_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None


CombineValues = tuple[Any, Any, Any, Any]
"""The values of :class:`CombineArguments`."""


def dispatch_options(plan: Plan, able: Capabilities, given: DispatchArguments, even: bool = False) -> DispatchOptions:
    """The options of a dispatch, with the default sizes and the default capacity filled in.

    Args:
        able: what the communicator's backend can do.
        even: batches are split, so that ranks get even parts of them.
    """
    layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy, scale_layout, recipe = given
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
        even = even and layout == "expert"
        worst = plan.even_rows(alignment) if even else plan.worst_case_rows(layout, alignment)
        if layout == "expert" and not even:
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
    _check_scale_layout(layout, scale_layout, to_fp8, power_of_two_scales, require_recipe(recipe))
    Strategy(dispatch=strategy)
    if strategy not in able.dispatch_strategies:
        raise InvalidArgument(f"strategy is {strategy!r}, this backend has {', '.join(able.dispatch_strategies)}")
    if strategy == "all_to_all" and layout not in ROUTE_LAYOUTS:
        raise InvalidArgument(f"strategy 'all_to_all' moves a row for each route, layout {layout!r} has one per token")
    return DispatchOptions(
        layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy, scale_layout, recipe
    )


def _check_scale_layout(layout: str, scale_layout: str, to_fp8: bool, power_of_two_scales: bool, recipe: str) -> None:
    if scale_layout not in SCALE_LAYOUTS:
        raise InvalidArgument(f"scale_layout is {scale_layout!r}, expected one of {', '.join(SCALE_LAYOUTS)}")
    if scale_layout != "rows" and layout != "slots":
        raise InvalidArgument(
            f"scale_layout is {scale_layout!r}, but layout {layout!r} has scales by row alone; leave it out"
        )
    if scale_layout != "rows" and recipe != "block":
        raise InvalidArgument(
            f"scale_layout is {scale_layout!r}, which recipe 'block' has; recipe {recipe!r} has a scale for each row, "
            "so leave it out"
        )
    if scale_layout == "packed" and to_fp8 and not power_of_two_scales:
        raise InvalidArgument("scale_layout 'packed' holds powers of two alone; pass power_of_two_scales=True")


def reads_ids(able: Capabilities, device: torch.device) -> bool:
    """Whether the host reads ids to find those out of range. It cannot while a graph is captured."""
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return able.reads_on_host and not captured


OWNER_OF_COPY: dict[object, OutputOwner] = {False: False, True: True, "if_needed": "if needed"}
"""Whose the outputs of a dispatch are, by its argument ``copy``."""


def output_owner(copy: object) -> OutputOwner:
    """Whose the outputs of a dispatch are.

    Raises:
        InvalidArgument: ``copy`` has no such value.
    """
    try:
        return OWNER_OF_COPY[copy]
    except (KeyError, TypeError):  # a list, say, cannot be looked up
        raise InvalidArgument(f"copy is {copy!r}, expected False, True or 'if_needed'") from None


def dispatch_tokens(
    plan: Plan,
    able: Capabilities,
    device: torch.device,
    options: DispatchOptions,
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> tuple[Tokens, int | None]:
    """The tensors of a dispatch as backends take them, and the words of packed scales if it has some.

    Args:
        able: what the communicator's backend can do.
    """
    x, scale_words = unpacked(plan, x, options.scale_layout, options.recipe)
    require_no_tangent(x=x, topk_weights=topk_weights)
    tokens: Any = x
    scales = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise InvalidArgument(f"x is {a_type(x)} of {len(x)}, expected a tensor or (fp8, scales)")
        tokens, scales = x
    tokens, scales = settled(tokens), settled(scales)
    topk_ids, topk_weights = settled(topk_ids), settled(topk_weights)
    found = Tokens(tokens, scales, topk_ids, topk_weights)
    _check_tokens(plan, able, device, options, found, reads_ids(able, device))
    return found, scale_words


def dispatch_glance(
    plan: Plan, able: Capabilities, device: torch.device, kind: DispatchKind, num_experts: int
) -> Callable[[Any, Any, Any, Any, Any], bool]:
    """Build the glance of a kind of dispatch: whether x, scales, ids of ``num_experts``, weights and out are right.

    It takes plain tensors of the kind's dtypes, whose presence is as in the kind. It may raise ValueError or
    RuntimeError for tensors that are not right.
    """
    hidden, most, top_k = plan.hidden, plan.max_tokens_per_rank, plan.top_k
    of_row = plan.scale_shape(kind.options.recipe)
    index = -1 if device.index is None else device.index
    has_index = index >= 0  # tensors without one may be the CPU's, or of device "meta"
    results = _results_at_a_glance(plan, kind) if kind.options.sizes == "bounded" else {}
    reads_them, on_gpu = able.reads_on_host, device.type == "cuda"

    def fits(x: Any, scales: Any, ids: Any, weights: Any, out: Any) -> bool:
        num_tokens, width = x.shape
        shape = (num_tokens, top_k)
        if not (
            width == hidden
            and num_tokens <= most
            and ids.shape == shape
            and x.get_device() == index == ids.get_device()
            and (has_index or (x.is_cpu and ids.is_cpu))
            and x.is_contiguous()
            and ids.is_contiguous()
            and (x.data_ptr() > FAR or num_tokens == 0 or _has_storage(x))
            and (ids.data_ptr() > FAR or num_tokens == 0 or _has_storage(ids))
            and forward_ad._current_level < 0
        ):
            return False
        if weights is not None and not (
            weights.shape == shape
            and weights.get_device() == index
            and (has_index or weights.is_cpu)
            and weights.is_contiguous()
            and (weights.data_ptr() > FAR or num_tokens == 0 or _has_storage(weights))
        ):
            return False
        if scales is not None and not (
            scales.dtype is SCALE_DTYPE
            and scales.shape == (num_tokens, *of_row)
            and scales.get_device() == index
            and (has_index or scales.is_cpu)
            and scales.is_contiguous()
            and (scales.data_ptr() > FAR or num_tokens == 0 or _has_storage(scales))
            and not scales.requires_grad
        ):
            return False
        if num_tokens == 0 and any(
            torch._is_functional_tensor(each) for each in (x, ids, weights) if each is not None
        ):
            return False
        if out is not None and not (results and not torch.is_grad_enabled() and fits_out(out)):
            return False
        if reads_them:
            if on_gpu and torch.cuda.is_current_stream_capturing():
                return False
            return not ((ids < -1) | (ids >= num_experts)).any()
        return True

    def fits_out(out: Any) -> bool:
        if out.__class__ is not DispatchOut:
            return False
        for name, tensor in vars(out).items():
            if tensor is None:
                continue
            if tensor.__class__ is not torch.Tensor or tensor.get_device() != index:
                return False
            if not (has_index or tensor.is_cpu):
                return False
            if (tensor.shape, tensor.stride(), tensor.dtype) != results.get(name) or tensor.requires_grad:
                return False
            if tensor.data_ptr() < FAR and not has_memory(tensor):
                return False
        return True

    return fits


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() != 0


def can_glance(kind: DispatchKind, able: Capabilities) -> bool:
    """Whether calls of this kind are right where a glance finds nothing: nothing has to be unpacked, or read."""
    packs_what_comes = kind.with_scales and kind.options.scale_layout == "packed"
    return kind.scale_words is None and not (packs_what_comes and able.reads_on_host)


def _results_at_a_glance(plan: Plan, kind: DispatchKind) -> dict[str, tuple[Any, ...]]:
    """Shape, strides and dtype of each result of a dispatch of bounded size."""
    return {name: (each.shape, each.stride(), each.dtype) for name, each in dispatch_results(plan, kind).items()}


def combine_glance(
    plan: Plan, device: torch.device, options: CombineOptions
) -> Callable[[Any, Any, tuple[int, ...], int, Any], bool]:
    """Build the glance of a kind of combine: whether y, home weights and out are right.

    It takes y, home weights, the shape of the dispatched rows, the number of tokens at home, and out.
    """
    hidden, top_k, out_dtype, needs_grad = plan.hidden, plan.top_k, options.out_dtype, options.needs_grad
    index = -1 if device.index is None else device.index
    has_index = index >= 0

    def fits(y: Any, weights: Any, shape: tuple[int, ...], num_tokens: int, out: Any) -> bool:
        return (
            y.__class__ in PLAIN
            and y.shape == shape
            and y.get_device() == index
            and (has_index or y.is_cpu)
            and y.is_contiguous()
            and (y.data_ptr() > FAR or has_memory(y))
            and forward_ad._current_level < 0
            and (weights is None or (fits_like(weights, (num_tokens, top_k), WEIGHT_DTYPE, device) and not needs_grad))
            and (out is None or (fits_like(out, (num_tokens, hidden), out_dtype, device) and not needs_grad))
        )

    return fits


def _check_tokens(
    plan: Plan, able: Capabilities, device: torch.device, options: DispatchOptions, tokens: Tokens, check_ids: bool
) -> None:
    """Raise unless the tensors of a dispatch are right."""
    x, scales, topk_ids, topk_weights = tokens
    to_fp8, scale_layout, recipe = options.to_fp8, options.scale_layout, options.recipe
    require_tensor("x", x)
    num_tokens = x.shape[0] if x.ndim else 0
    if x.ndim != 2 or x.shape[1] != plan.hidden:
        cure = f"pass hidden={x.shape[-1] if x.ndim else '...'} to Communicator"
        if x.ndim and x.shape[-1] == plan.hidden:
            cure = f"pass x.reshape(-1, {plan.hidden}): dispatch takes one row per token"
        raise ShapeMismatch(f"x is {list(x.shape)}, the communicator was made for [tokens, {plan.hidden}]; {cure}")
    number_of_tokens(plan, num_tokens)
    _require_ready("x", x, device)
    _check_payload(plan, able, x, scales, device, to_fp8, recipe)
    if recipe != "block" and scales is None and not to_fp8:
        raise InvalidArgument(f"recipe is {recipe!r}, but x is {x.dtype} without scales; pass to_fp8=True")
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
    arguments: CombineArguments,
    y: torch.Tensor,
    rows_shape: tuple[int, ...],
    layout: str,
    has_weights: bool,
    weights_require_grad: bool,
    from_home: bool,
) -> CombineOptions:
    """The options of a combine, and its tensor ``y``, which must be ``rows_shape``.

    Args:
        able: what the communicator's backend can do.
        has_weights, weights_require_grad: whether the dispatch received weights, and whether they have a graph.
        from_home: the combine is given weights of its own.
    """
    weighted, mode, wire_dtype, out_dtype = arguments
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
    for name, dtype in (("y", y.dtype), ("wire_dtype", wire_dtype), ("out_dtype", out_dtype)):
        if dtype is None:
            continue
        if dtype == torch.float64 and y.dtype != torch.float64:
            raise DtypeMismatch(f"{name} is float64, y is {y.dtype} and summed in float32; pass y in float64")
        if dtype not in able.dtypes:
            raise DtypeMismatch(f"{name} is {dtype}, expected {_names(able.dtypes)}{_elsewhere(able.dtypes, dtype)}")
    strategy = STRATEGY_OF_MODE[mode]
    return CombineOptions(weighted, wire_dtype or y.dtype, out_dtype or y.dtype, needs_grad, strategy, from_home)


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
    plan: Plan, able: Capabilities, x: Any, scales: Any, device: torch.device, to_fp8: bool, recipe: str
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
        _check_scales(plan, x, scales, device, recipe)
    if torch.is_grad_enabled() and (x.requires_grad or (scales is not None and scales.requires_grad)):
        if to_fp8:
            raise NotDifferentiable("x requires grad, but to_fp8=True sends FP8, which has none; leave to_fp8 out")
        raise NotDifferentiable("an FP8 payload requires grad, but FP8 has none; detach it")


def _check_scales(plan: Plan, x: torch.Tensor, scales: torch.Tensor, device: torch.device, recipe: str) -> None:
    require_tensor("scales", scales)
    shape, expected = list(scales.shape), [x.shape[0], *plan.scale_shape(recipe)]
    if shape == [x.shape[0], *plan.scale_shape(other := "block" if recipe == "row" else "row")]:
        shared_by = f"of {FP8_BLOCK} values" if other == "block" else "row"
        raise ShapeMismatch(
            f"scales is {shape}, a scale for each {shared_by}; recipe={other!r} takes those, this is {recipe!r}"
        )
    if shape != expected:
        shared_by = f"per {FP8_BLOCK} values" if recipe == "block" else "for each row"
        raise ShapeMismatch(f"scales is {shape}, expected {expected}: one {shared_by}")
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


# -- follow-ups of a dispatch ----------------------------------------------------------------------------------


def rows_again(
    plan: Plan, able: Capabilities, device: torch.device, x: Any, num_tokens: int, options: DispatchOptions
) -> None:
    """Raise unless x can take the places of the tokens of an earlier dispatch: rows, or FP8 rows and their scales.

    Args:
        options: of that dispatch.
    """
    if isinstance(x, (tuple, list)):
        if options.layout == "slots":
            raise InvalidArgument("FP8 rows cannot be sent again in layout 'slots'; dispatch them anew")
        if len(x) != 2:
            raise InvalidArgument(f"x is {a_type(x)} of {len(x)}, expected a tensor or (fp8, scales)")
    tokens, scales = x if isinstance(x, (tuple, list)) else (x, None)
    require_tensor("x", tokens)
    if list(tokens.shape) != [num_tokens, plan.hidden]:
        raise ShapeMismatch(f"x is {list(tokens.shape)}, expected {[num_tokens, plan.hidden]}, as it was dispatched")
    _require_ready("x", tokens, device)
    _check_payload(plan, able, tokens, scales, device, False, options.recipe)


def fits_rows_again(
    plan: Plan, able: Capabilities, device: torch.device, x: Any, num_tokens: int, options: DispatchOptions
) -> bool:
    """Whether :func:`rows_again` would accept x, at a glance."""
    if x.__class__ is not tuple:
        return fits_like(x, (num_tokens, plan.hidden), x.dtype, device) and x.dtype in able.dtypes
    return (
        len(x) == 2
        and options.layout != "slots"
        and plan.hidden % FP8_BLOCK == 0
        and fits_like(x[0], (num_tokens, plan.hidden), FP8_DTYPE, device)
        and fits_like(x[1], (num_tokens, *plan.scale_shape(options.recipe)), SCALE_DTYPE, device)
    )


def fits_like(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it is a contiguous tensor of just this shape, dtype and device, and without a graph, at a glance."""
    return (
        tensor.__class__ is torch.Tensor
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.device == device
        and tensor.is_contiguous()
        and (has_memory(tensor) if shape[0] == 0 else tensor.data_ptr() > FAR or _has_storage(tensor))
        and not tensor.requires_grad
        and forward_ad._current_level < 0
    )


def values_of_rows(values: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless there is a float32 value, or there are K of them, for each row."""
    _require_exactly("values", values, shape, torch.float32, device)


def weights_at_home(plan: Plan, weights: torch.Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise unless they are float32 [T, K]."""
    _require_exactly("topk_weights", weights, (num_tokens, plan.top_k), torch.float32, device)


def bias_at_home(name: str, bias: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless it is a floating-point [T, H]."""
    require_tensor(name, bias)
    if tuple(bias.shape) != shape:
        raise ShapeMismatch(f"{name} is {list(bias.shape)}, expected {list(shape)}: tokens at home, hidden")
    if bias.dtype not in Capabilities().dtypes:
        raise DtypeMismatch(f"{name} is {bias.dtype}, expected {_names(Capabilities().dtypes)}")
    if bias.device != device:
        raise DeviceMismatch(f"{name} is on {bias.device}, the communicator is on {device}; move one of them")


def result_at_home(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless a biased combine can write its result to ``out``."""
    _require_exactly("out", out, shape, dtype, device)


def _require_exactly(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    require_tensor(name, tensor)
    if tuple(tensor.shape) != tuple(shape):
        raise ShapeMismatch(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype != dtype:
        raise DtypeMismatch(f"{name} is {tensor.dtype}, expected {dtype}")
    _require_ready(name, tensor, device)


def unpacked(plan: Plan, x: Any, scale_layout: str, recipe: str) -> tuple[Any, int | None]:
    """Unpack scales of x: 4 exponents a word, int32 [T, n], become the bits of float32 [T, H / 128].

    Returns:
        x, and n. None: x has no such scales, and is as it was.
    """
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        return x, None
    tokens, words = x
    if not isinstance(words, torch.Tensor) or words.dtype != torch.int32 or not isinstance(tokens, torch.Tensor):
        return x, None
    if words.is_nested or tokens.is_nested or recipe != "block":  # which is an error
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


# -- tensors of the caller's own for results ---------------------------------------------------------------------

Like = torch.Tensor
"""A tensor without memory (device "meta") of the shape, dtype and strides that one must have."""


def dispatch_out(plan: Plan, kind: DispatchKind, out: object, device: torch.device) -> DispatchOut:
    """Check the tensors for the results of a dispatch, and return them.

    Raises:
        InvalidArgument: sizes are exact, gradients are enabled, or the layout has no such result.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not what the dispatch would return.
    """
    if not isinstance(out, DispatchOut):
        raise InvalidArgument(f"out is {a_type(out)}, expected a tokenloom.DispatchOut")
    if kind.options.sizes != "bounded":
        raise InvalidArgument("out= needs results of a known size; pass sizes='bounded'")
    if torch.is_grad_enabled():
        raise InvalidArgument("out= has no gradient; dispatch inside of torch.no_grad()")
    likes = dispatch_results(plan, kind)
    for name, tensor in vars(out).items():
        if tensor is None:
            continue
        if name not in likes:
            has = ", ".join(likes)
            raise InvalidArgument(
                f"out.{name} is given, but this dispatch in layout {kind.options.layout!r} has only {has}"
            )
        _require_like(f"out.{name}", tensor, likes[name], device)
    return out


def combine_out(out: object, options: CombineOptions, routed: Routed, y: torch.Tensor) -> None:
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
def dispatch_results(plan: Plan, kind: DispatchKind) -> dict[str, Like]:
    """Results of a dispatch of bounded size, by name. Not to be changed."""
    options = kind.options
    layout, num_ranks, local = options.layout, plan.num_ranks, plan.experts_per_rank
    places = [num_ranks, plan.max_tokens_per_rank]
    if layout != "rank":
        assert options.capacity is not None, "sizes are bounded"
        places = [local, options.capacity] if layout == "slots" else [options.capacity]
    int32 = torch.int32
    likes = {"tokens": _like([*places, plan.hidden], kind.row_dtype)}
    if kind.brings_scales:
        shape = [*places, *plan.scale_shape(options.recipe)]
        by_row = options.scale_layout == "rows"
        likes["scales"] = _like(shape, torch.float32) if by_row else empty_scales(options.scale_layout, shape, META)
    if layout not in ROUTE_LAYOUTS:
        likes["topk_ids"] = _like([*places, plan.top_k], kind.ids_dtype)
        if kind.weights_dtype is not None:
            likes["topk_weights"] = _like([*places, plan.top_k], kind.weights_dtype)
    likes |= {"num_rows": _like([], int32), "source_counts": _like([num_ranks], int32)}
    likes["expert_counts"] = _like([local], int32)
    if layout == "expert":
        likes["expert_offsets"] = _like([local + 1], int32)
    if layout == "slots":
        likes["slot_ranges"] = _like([local, num_ranks, 2], int32)
    return likes


def _like(shape: Sequence[int], dtype: torch.dtype) -> Like:
    return torch.empty(shape, dtype=dtype, device=META)


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
