"""What tensors of a client must be, in its own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tokenloom.comm.growing import Shape, wide_rows
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
    """Whether it is a tensor that can be asked for its shape: a nested one has none."""
    return isinstance(value, torch.Tensor) and not value.is_nested


def kind_of(value: object) -> str:
    """What it is, for errors of who wants a tensor."""
    return "a nested tensor" if isinstance(value, torch.Tensor) else a_type(value)


def device_of(x: object) -> torch.device:
    """Where a payload is, or the CPU if it is none."""
    tokens = _rows_in(x)
    return tokens.device if isinstance(tokens, torch.Tensor) else torch.device("cpu")


def likely_shape(
    x: object, num_experts: object = None, ids: object = None, top_k: int | None = None, num_sms: int | None = None
) -> Shape:
    """Guess what a call is made with, by arguments that are not checked yet.

    Args:
        x: payload.
        num_experts: E.
        ids: [N, K], or None.
        top_k: K without ids; None: of any.
        num_sms: of the call's kernels.

    Returns:
        The shape, with 0 for what they do not say.
    """
    rows, hidden, wide = _rows_in(x), 0, None
    if is_dense(rows) and rows.ndim == 2:
        hidden, wide = rows.shape[1], wide_rows(rows.dtype)
    if ids is not None:
        top_k = ids.shape[1] if is_dense(ids) and ids.ndim == 2 else 0
    return Shape(num_experts if isinstance(num_experts, int) else 0, hidden, top_k, wide, num_sms)


def _rows_in(x: object) -> object:
    """What would be the rows of a payload, with or without scales, not checked yet."""
    return x[0] if isinstance(x, (tuple, list)) and x else x


def tensor(name: str, value: object) -> torch.Tensor:
    """The value, which must be a tensor."""
    if not is_dense(value):
        raise BadCall(f"{name} is {kind_of(value)}, expected a tensor")
    return value


def tokens_of(x: object, name: str = "x") -> torch.Tensor:
    """The rows of a payload, with or without scales, checked: [N, H] contiguous, rows of a multiple of 16 bytes."""
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
    """What tokenloom takes for x: without a graph, and scales as words, which :func:`by_row` makes contiguous.

    FP8 comes with 4-byte scales [N, n] of any strides: float32 or packed int32, n at most H / 128.
    """
    tokens = _plain(tokens_of(x))
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
    scales = _plain(scales)
    if scales.dtype == torch.float32 and scales.shape[1] < most:
        scales = scales.view(torch.int32)
    return tokens if tokens.dtype is FP8 else tokens.view(FP8), scales


def by_row(payload: Payload) -> Payload:
    """The same with contiguous scales. It may copy on the current stream, which must be that of the call."""
    return payload if isinstance(payload, torch.Tensor) else (payload[0], payload[1].contiguous())


def scales_as_given(received: torch.Tensor, x: object) -> torch.Tensor:
    """Received scales in the dtype that the caller's have."""
    if not isinstance(x, (tuple, list)):
        return received
    return received if received.dtype == x[1].dtype else received.view(x[1].dtype)


def rows_as_given(rows: torch.Tensor, x: object) -> torch.Tensor:
    """Received rows in the dtype that the caller's have: any 1-byte dtype may be FP8 for it."""
    wanted = x[0].dtype if isinstance(x, (tuple, list)) else rows.dtype
    return rows if rows.dtype == wanted else rows.view(wanted)


def ids_of(
    topk_idx: object, num_tokens: int, device: torch.device, dtypes: Sequence[torch.dtype] = (topk_idx_t,)
) -> int:
    """K, of ids that are checked: contiguous [N, K]."""
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
    """A tensor of just this shape, dtype and device, contiguous."""
    if not is_dense(tensor):
        raise BadCall(f"{name} is {kind_of(tensor)}, expected a tensor")
    if tensor.shape != tuple(shape):
        raise ShapeMismatch(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype != dtype:
        raise DtypeMismatch(f"{name} is {tensor.dtype}, expected {dtype}")
    _require_here(name, tensor, device)
    return _plain(tensor)


def fits(tensor: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a tensor is what :func:`like` gives, at a glance. What is not gets looked at again, and has errors."""
    return (
        is_dense(tensor)
        and tensor.shape == shape
        and tensor.dtype is dtype
        and tensor.device == device
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without a graph."""
    return tensor.detach() if tensor.requires_grad else tensor


def copies(async_finish: bool) -> Any:
    """``copy`` of a dispatch: on a stream of their own, results are not in the order of their last readers."""
    return True if async_finish else "if_needed"


def _require_here(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise DeviceMismatch(f"{name} is on {tensor.device}, x is on {device}; move one of them")
    if not tensor.is_contiguous():
        raise ShapeMismatch(f"{name} has strides {tensor.stride()}, expected contiguous; pass {name}.contiguous()")


def number(name: str, value: object, least: int) -> int:
    """An int that is not too small."""
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"{name} is {value!r}, expected an int of at least {least}",
    )
    assert isinstance(value, int)
    return value


def config(value: object) -> None:
    """Settings of ``deep_ep.Config``, or None."""
    require(value is None or isinstance(value, Config), f"config is {a_type(value)}, expected a Config or None")


def biases_of(bias: object, rows: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...] | None:
    """One bias or two, [N, H] of the dtype of rows; None: none."""
    if bias is None:
        return None
    found = bias if isinstance(bias, (tuple, list)) else (bias,)
    require(1 <= len(found) <= 2, f"bias is {a_type(bias)} of {len(found)}, expected one tensor or two")
    shape = [num_tokens, rows.shape[1]]
    return tuple(like("bias", each, shape, rows.dtype, rows.device) for each in found)


def rows_of(x: object, routed: Routed) -> torch.Tensor:
    """The rows of a combine: one for each that was received.

    Where outputs have a fixed number of rows, a client may have cut off those behind the last. :func:`padded` puts
    them back.
    """
    rows, wanted = _plain(tokens_of(x)), routed.shape
    may_be_fewer = not isinstance(routed.num_rows, int) and rows.shape[1] == wanted[1] and len(rows) <= wanted[0]
    if rows.shape != wanted and not may_be_fewer:
        raise ShapeMismatch(f"x is {list(rows.shape)}, expected {list(wanted)}, as was received")
    return rows


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows with zeros behind them. It may copy on the current stream, which must be that of the call."""
    return rows if len(rows) == num_rows else torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


def received(routed: Routed, x: object) -> Payload:
    """Received rows, and scales as x has them, which are the client's alone from now on."""
    rows, scales = routed.tokens, routed.scales
    routed.let_go()
    return received_again(rows if scales is None else (rows, scales), x)


def received_again(found: Payload, x: object) -> Payload:
    """Rows, and their scales if they have some, as x has them."""
    if isinstance(found, torch.Tensor):
        return rows_as_given(found, x)
    rows, scales = found
    return rows_as_given(rows, x), scales_as_given(scales, x)
