"""GEMMs of experts on rows that are grouped by expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Protocol

import torch
from torch.nn import functional

from tokenloom.runtime.streams import on_stream

FEW_ROWS = 1024
"""Mean rows per expert below which one launch for all experts is faster than one launch each."""
GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPED_MM_ALIGNMENT_BYTES = 16
"""``grouped_mm`` requires row strides that are multiples of this."""


class ExpertGemms(Protocol):
    """GEMMs over rows grouped by expert. An implementation is made for given groups."""

    def multiply(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiply each group's rows by its weights: [R, k] by [L, k, n] gives [R, n], unspecified outside groups."""

    def weight_gradient(
        self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum each group's outer products of rows, [R, n] and [R, k], to [L, n, k], added to ``total`` if given."""


class _GroupedGemms:
    def __init__(self, offsets: torch.Tensor) -> None:
        self._ends = offsets[1:]

    def multiply(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(rows, weights, offs=self._ends)

    def weight_gradient(
        self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = functional.grouped_mm(left.t(), right, offs=self._ends)
        return found if total is None else total.add_(found)


class _ExpertByExpert:
    """One GEMM per expert, one after the other.

    On GPUs every other GEMM runs on a second stream. Where other work held some SMs and a GEMM began late, the next
    one fills the SMs that would stay idle.
    """

    def __init__(self, ends: list[int]) -> None:
        self._end = ends[-1]
        self._counts = [end - begin for begin, end in pairwise(ends)]

    def multiply(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows), weights.shape[2])
        if len(out) > self._end:
            out[self._end :].zero_()
        self._for_each(torch.mm, self._parts(rows), weights.unbind(), self._parts(out))
        return out

    def weight_gradient(
        self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = total
        if out is None:
            out = left.new_empty(len(self._counts), left.shape[1], right.shape[1])
        lefts = left[: self._end].t().split(self._counts, 1)
        self._for_each(torch.mm if total is None else _add_mm, lefts, self._parts(right), out.unbind())
        return out

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows[: self._end].split(self._counts)

    @staticmethod
    def _for_each(multiply: Callable[..., object], *operands: tuple[torch.Tensor, ...]) -> None:
        """Call ``multiply(left, right, out=out)`` for each expert. Small GEMMs are fast, so the host must be too."""
        gemms, device = list(zip(*operands, strict=True)), operands[-1][0].device
        if device.type != "cuda":
            for left, right, out in gemms:
                multiply(left, right, out=out)
            return
        streams = (torch.cuda.current_stream(device), _second_stream(device))
        streams[1].wait_stream(streams[0])
        try:
            for number, stream in enumerate(streams):
                with on_stream(stream):
                    for left, right, out in gemms[number::2]:
                        multiply(left, right, out=out)
        finally:  # whoever reuses the operands' memory must come after both streams
            streams[0].wait_stream(streams[1])


def _add_mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    out.addmm_(left, right)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def gemms_for(
    rows: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    offsets: torch.Tensor,
    host_offsets: list[int] | None = None,
) -> ExpertGemms:
    """Choose how the rows of each expert are multiplied.

    Args:
        rows: [R, H], as in ``run_experts``.
        w1: [L, 2I, H], or [L, I, H] of an activation without gates. Any strides.
        w2: [L, H, I]. Any strides.
        offsets: int32 [L + 1].
        host_offsets: values of ``offsets`` where the host knows them, else None.
    """
    many = rows.is_cuda and host_offsets is not None and len(rows) >= FEW_ROWS * len(w1)
    if _grouped_mm_takes(rows, w1, w2) and not many:
        return _GroupedGemms(offsets)
    return _ExpertByExpert(offsets.tolist() if host_offsets is None else host_offsets)


def _grouped_mm_takes(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    """Return whether torch's grouped GEMM takes these. It refuses float64 and rows that are not 16-byte multiples."""
    if rows.dtype not in GROUPED_MM_DTYPES or not rows.dtype == w1.dtype == w2.dtype:
        return False
    if rows.is_cuda and rows.dtype != torch.bfloat16:
        return False
    widths = (w1.shape[2], w1.shape[1], w2.shape[2])
    if not all(width * rows.element_size() % GROUPED_MM_ALIGNMENT_BYTES == 0 for width in widths):
        return False
    values = GROUPED_MM_ALIGNMENT_BYTES // rows.element_size()
    return all(
        weights.storage_offset() % values == 0 and (weights.is_contiguous() or _strides_fit(weights))
        for weights in (w1, w2)
    )


def _strides_fit(weights: torch.Tensor) -> bool:
    """Return whether torch's grouped GEMM reads weights [L, n, k] where they are, or transposed."""
    values = GROUPED_MM_ALIGNMENT_BYTES // weights.element_size()
    rows, columns = weights.stride()[1:]
    one, pitch, width = (columns, rows, weights.shape[2]) if columns == 1 else (rows, columns, weights.shape[1])
    return one == 1 and pitch >= width and not pitch % values and not weights.stride(0) % values
