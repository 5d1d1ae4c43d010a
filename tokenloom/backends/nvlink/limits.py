"""What these kernels cannot do, beyond what every backend refuses."""

from __future__ import annotations

import torch

from tokenloom.backends.base import CombineOptions, DispatchInputs, DispatchOptions
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.errors import InvalidArgument, ShapeMismatch
from tokenloom.plan import Plan

BULK_BYTES = 16
"""Rows, and their addresses, are multiples of this."""


def check_dispatch(plan: Plan, options: DispatchOptions, inputs: DispatchInputs, checked: bool, fused: bool) -> None:
    """Raise for a dispatch that the kernels have no form for.

    Args:
        checked: the host reads the outcome of every call.
        fused: the communicator is a MegaMoE's.
    """
    x, exact = inputs.x, options.sizes == "exact"
    is_fp8 = options.to_fp8 or x.element_size() == 1
    _require_layout(options.strategy, options.layout)
    if options.strategy == "all_gather" and is_fp8:
        raise InvalidArgument("strategy 'all_gather' moves no FP8 on backend nvlink; use 'dedup'")
    _require_no_host_read(exact or checked, "sizes='exact'" if exact else "checked=True")
    _require_bulk(x)
    if fused and (options.layout != "token" or not is_fp8):
        raise InvalidArgument("this communicator is a MegaMoE's, which receives FP8 in layout 'token' only")
    if options.alignment > 1 and plan.worst_case_rows("expert", options.alignment) + options.alignment > 2**31:
        raise InvalidArgument(f"alignment is {options.alignment}: places of rows would not fit 32 bits")


def check_combine(
    plan: Plan,
    handle: NvlinkHandle,
    y: torch.Tensor,
    options: CombineOptions,
    checked: bool,
    num_dispatches: int,
) -> None:
    """Raise for a combine that the kernels have no form for, or whose receive buffer was reused.

    Args:
        checked: the host reads the outcome of every call.
        num_dispatches: of the communicator so far.
    """
    _require_no_host_read(checked, "checked=True")
    if not options.per_route:
        _require_layout(options.strategy, handle.options.layout)
    _require_bulk(y)
    for dtype in (options.wire_dtype, options.out_dtype):
        if plan.hidden * dtype.itemsize % BULK_BYTES:
            raise ShapeMismatch(f"a row of {plan.hidden} {dtype} is no multiple of {BULK_BYTES} bytes")
    if handle.reused_after is not None and num_dispatches > handle.reused_after:
        raise InvalidArgument("the dispatch is two or more dispatches old, its buffer was reused; pass copy=True")


def require_no_capture() -> None:
    """Raise for strategies in which a graph would use one half of a buffer in all of its replays."""
    if torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            "strategies 'all_gather' and 'reduce_scatter' cannot be captured into a CUDA graph; use 'dedup'"
        )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at an address that bulk copies and 16-byte loads take."""
    return tensor.clone() if tensor.data_ptr() % BULK_BYTES else tensor


def address_of(tensor: torch.Tensor | None) -> int:
    """For kernels; null for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _require_layout(strategy: str, layout: str) -> None:
    if strategy == "dedup":
        return
    if layout != "expert":
        raise InvalidArgument(f"backend nvlink has strategy {strategy!r} in layout 'expert', not {layout!r}")
    if strategy != "all_to_all":
        require_no_capture()


def _require_no_host_read(reads: bool, what: str) -> None:
    if reads and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            f"{what} reads on the host, which a CUDA graph cannot do; capture with sizes='bounded' and a Communicator "
            "without checked"
        )


def _require_bulk(rows: torch.Tensor) -> None:
    if rows.shape[-1] * rows.element_size() % BULK_BYTES:
        raise ShapeMismatch(
            f"a row of {rows.shape[-1]} {rows.dtype} is not a multiple of {BULK_BYTES} bytes, which backend nvlink "
            "needs; use backend='collective'"
        )
