"""Checks of a client's tensors, with errors in the client's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tokenloom.comm.communicators_by_shape import CommShape, wide_rows
from tokenloom.comm.routed import Routed
from tokenloom.compat.deep_ep.config import Config, topk_idx_t
from tokenloom.compat.deep_ep.faults import BadCall, NotServed, require
from tokenloom.errors import DeviceMismatch, DtypeMismatch, ShapeMismatch, a_type
from tokenloom.plan import FP8_BLOCK, MAX_TOP_K

if TYPE_CHECKING:
    from typing_extensions import TypeIs

ROW_BYTES = 16
"""Rows are multiples of this."""
FP8 = torch.float8_e4m3fn
Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def is_dense(value: object) -> TypeIs[torch.Tensor]:
    """Tell whether a value is a tensor with a shape. A nested tensor has none."""
    return isinstance(value, torch.Tensor) and not value.is_nested


def kind_of(value: object) -> str:
    """Name the type of a value, for errors that ask for a tensor."""
    return "a nested tensor" if isinstance(value, torch.Tensor) else a_type(value)


def device_of(x: object) -> torch.device:
    """Find the device of a payload, or the CPU if the value is no payload."""
    tokens = _rows_in(x)
    return tokens.device if isinstance(tokens, torch.Tensor) else torch.device("cpu")


def likely_shape(
    x: object, num_experts: object = None, ids: object = None, top_k: int | None = None, num_sms: int | None = None
) -> CommShape:
    """Guess what a call is made with, by arguments that are not checked yet.

    Args:
        x: payload.
        num_experts: E.
        ids: [N, K], or None.
        top_k: K without ids; None fits any.
        num_sms: SMs of the call's kernels.

    Returns:
        The shape, with 0 for sizes that the arguments do not tell.
    """
    rows, hidden, wide = _rows_in(x), 0, None
    if is_dense(rows) and rows.ndim == 2:
        hidden, wide = rows.shape[1], wide_rows(rows.dtype)
    if ids is not None:
        top_k = ids.shape[1] if is_dense(ids) and ids.ndim == 2 else 0
    return CommShape(num_experts if isinstance(num_experts, int) else 0, hidden, top_k, wide, num_sms)


def _rows_in(x: object) -> object:
    """Take the rows of an unchecked payload, with or without scales."""
    return x[0] if isinstance(x, (tuple, list)) and x else x


def tensor(name: str, value: object) -> torch.Tensor:
    """Return the value, or raise unless it is a tensor."""
    if not is_dense(value):
        raise BadCall(f"{name} is {kind_of(value)}, expected a tensor")
    return value


def tokens_of(x: object, name: str = "x") -> torch.Tensor:
    """Check the rows of a payload: [N, H] contiguous, a multiple of 16 bytes a row. The payload may have scales."""
    tokens = x[0] if isinstance(x, (tuple, list)) and len(x) == 2 else x
    if not is_dense(tokens):
        raise BadCall(f"{name} is {kind_of(tokens)}, expected a tensor, or (fp8 tensor, scales)")
    if tokens.ndim != 2:
        raise ShapeMismatch(f"{name} is {list(tokens.shape)}, expected [tokens, hidden]")
    if not tokens.is_contiguous():
        raise ShapeMismatch(f"{name} has strides {tokens.stride()}, expected contiguous; pass {name}.contiguous()")
    row_bytes = tokens.shape[1] * tokens.element_size()
    if not row_bytes or row_bytes % ROW_BYTES:
        raise ShapeMismatch(f"{name} has rows of {row_bytes} bytes, expected a multiple of {ROW_BYTES}")
    return tokens


def payload_of(x: object) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """Convert x to what ``Communicator.dispatch`` takes: no graph, and scales as words.

    FP8 comes with 4-byte scales [N, n] of any strides: float32 or packed int32, n at most H / 128.
    ``BufferBase._by_row`` makes them contiguous.
    """
    tokens = plain(tokens_of(x))
    if not isinstance(x, (tuple, list)):
        if tokens.element_size() == 1:
            raise DtypeMismatch(f"x is {tokens.dtype} without scales; pass (x, scales)")
        return tokens
    scales = x[1]
    if tokens.element_size() != 1:
        raise DtypeMismatch(f"x comes with scales but is {tokens.dtype}, expected 1-byte elements")
    if not is_dense(scales) or scales.dtype not in (torch.float32, torch.int32):
        raise DtypeMismatch(f"scales of x are {getattr(scales, 'dtype', scales)}, expected float32 or int32")
    most = tokens.shape[1] // FP8_BLOCK
    if tokens.shape[1] % FP8_BLOCK:
        raise NotServed(
            f"FP8 rows of {tokens.shape[1]} values are not served: hidden must be a multiple of {FP8_BLOCK}"
        )
    if scales.ndim != 2 or len(scales) != len(tokens) or not 1 <= scales.shape[1] <= most:
        raise ShapeMismatch(f"scales of x are {list(scales.shape)}, expected [{len(tokens)}, 1 to {most}]")
    scales = plain(scales)
    if scales.dtype == torch.float32 and scales.shape[1] < most:
        scales = scales.view(torch.int32)
    return tokens if tokens.dtype is FP8 else tokens.view(FP8), scales


def scales_as_given(received: torch.Tensor, x: object) -> torch.Tensor:
    """View received scales in the dtype of the caller's scales."""
    if not isinstance(x, (tuple, list)):
        return received
    return received if received.dtype == x[1].dtype else received.view(x[1].dtype)


def rows_as_given(rows: torch.Tensor, x: object) -> torch.Tensor:
    """View received rows in the dtype of the caller's rows: any 1-byte dtype may stand for FP8."""
    if not isinstance(x, (tuple, list)):
        return rows
    return rows if rows.dtype == x[0].dtype else rows.view(x[0].dtype)


def ids_of(
    topk_idx: object, num_tokens: int, device: torch.device, dtypes: Sequence[torch.dtype] = (topk_idx_t,)
) -> int:
    """Check ids, contiguous [N, K], and return K."""
    if not is_dense(topk_idx):
        raise BadCall(f"topk_idx is {kind_of(topk_idx)}, expected a tensor")
    if topk_idx.ndim != 2 or len(topk_idx) != num_tokens:
        raise ShapeMismatch(
            f"topk_idx is {list(topk_idx.shape)}, expected [{num_tokens}, top-k]: ids of each token of x"
        )
    if topk_idx.dtype not in dtypes:
        raise DtypeMismatch(f"topk_idx is {topk_idx.dtype}, expected {' or '.join(map(str, dtypes))}")
    _require_here("topk_idx", topk_idx, device)
    if topk_idx.shape[1] > MAX_TOP_K:
        raise NotServed(f"topk_idx has {topk_idx.shape[1]} columns, tokenloom serves at most {MAX_TOP_K}")
    return topk_idx.shape[1]


def like(name: str, tensor: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the tensor without a graph, or raise unless it is contiguous and has this shape, dtype and device."""
    if not is_dense(tensor):
        raise BadCall(f"{name} is {kind_of(tensor)}, expected a tensor")
    if tensor.shape != tuple(shape):
        raise ShapeMismatch(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype != dtype:
        raise DtypeMismatch(f"{name} is {tensor.dtype}, expected {dtype}")
    _require_here(name, tensor, device)
    return plain(tensor)


def fits(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Tell at a glance whether :func:`like` accepts a tensor. If not, call :func:`like` for the error."""
    try:
        return (
            tensor.__class__ is torch.Tensor
            and tensor.shape == shape
            and tensor.dtype is dtype
            and tensor.device == device
            and tensor.is_contiguous()
        )
    except RuntimeError:  # a nested or sparse tensor
        return False


def fits_rows(x: Any, routed: Routed) -> bool:
    """Tell at a glance whether :func:`rows_of` accepts rows, whatever their dtype, and no row is left out."""
    shape = routed.shape
    try:
        return x.__class__ is torch.Tensor and x.shape == shape and shape[1] % ROW_BYTES == 0 and x.is_contiguous()
    except RuntimeError:  # a nested or sparse tensor
        return False


def sizes_at_a_glance(x: Any) -> tuple[int, int, torch.dtype] | None:
    """Return N, H and the dtype of rows if :func:`payload_of` gives x as it is, with scales by row, at a glance."""
    rows, scales = x if x.__class__ is tuple and len(x) == 2 else (x, None)
    try:
        (num_tokens, hidden), dtype = rows.shape, rows.dtype
        if rows.__class__ is not torch.Tensor or not rows.is_contiguous():
            return None
    except (AttributeError, ValueError, RuntimeError):  # no tensor, of other dimensions, or a nested one
        return None
    if scales is None:
        is_right = dtype.itemsize > 1 and hidden * dtype.itemsize % ROW_BYTES == 0
    else:
        shape = (num_tokens, hidden // FP8_BLOCK)
        is_right = dtype is FP8 and hidden % FP8_BLOCK == 0 and fits(scales, shape, torch.float32, rows.device)
    return (num_tokens, hidden, dtype) if is_right and hidden else None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Drop the graph of a tensor."""
    return tensor.detach() if tensor.requires_grad else tensor


def copies(async_finish: bool) -> Any:
    """Choose ``copy`` of a dispatch. A call on a stream of its own copies: it waits for no earlier readers."""
    return True if async_finish else "if_needed"


def _require_here(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise DeviceMismatch(f"{name} is on {tensor.device}, x is on {device}; move one of them")
    if not tensor.is_contiguous():
        raise ShapeMismatch(f"{name} has strides {tensor.stride()}, expected contiguous; pass {name}.contiguous()")


def number(name: str, value: object, least: int) -> int:
    """Return the value, or raise unless it is an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadCall(f"{name} is {value!r}, expected an int of at least {least}")
    return value


def config(value: object) -> None:
    """Raise unless the value is a ``deep_ep.Config`` or None."""
    if not (value is None or isinstance(value, Config)):
        raise BadCall(f"config is {a_type(value)}, expected a Config or None")


def biases_of(bias: object, rows: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...] | None:
    """Check one bias or two, [N, H] in the dtype of rows. None stays None."""
    if bias is None:
        return None
    biases = bias if isinstance(bias, (tuple, list)) else (bias,)
    require(1 <= len(biases) <= 2, f"bias is {a_type(bias)} of {len(biases)}, expected one tensor or two")
    shape = [num_tokens, rows.shape[1]]
    return tuple(like("bias", each, shape, rows.dtype, rows.device) for each in biases)


def rows_of(x: object, routed: Routed) -> torch.Tensor:
    """Check the rows of a combine: one for each received row.

    If outputs have a fixed number of rows, a client may cut off the rows behind the last received one. :func:`padded`
    puts them back.
    """
    rows, wanted = plain(tokens_of(x)), routed.shape
    may_be_fewer = not isinstance(routed.num_rows, int) and rows.shape[1] == wanted[1] and len(rows) <= wanted[0]
    if rows.shape != wanted and not may_be_fewer:
        raise ShapeMismatch(f"x is {list(rows.shape)}, expected {list(wanted)}, as was received")
    return rows


def padded(rows: torch.Tensor, missing: int) -> torch.Tensor:
    """Add rows of zeros. This copies, so the current stream must be that of the call."""
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def received(routed: Routed, x: object) -> Payload:
    """Give received rows, and scales as x has them, to the client: the communicator keeps none of them."""
    rows, scales = routed.tokens, routed.scales
    routed.let_go()
    return received_again(rows if scales is None else (rows, scales), x)


def received_again(payload: Payload, x: object) -> Payload:
    """View received rows, and scales if there are some, in the dtypes of x."""
    if isinstance(payload, torch.Tensor):
        return rows_as_given(payload, x)
    rows, scales = payload
    return rows_as_given(rows, x), scales_as_given(scales, x)
