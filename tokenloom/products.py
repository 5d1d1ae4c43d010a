"""Matrix products by groups of rows: all of an expert's rows times its weights, and the gradients of that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Protocol

import torch
from torch.nn import functional

from tokenloom.activation import activate
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel, tensor_map
from tokenloom.kernels.gemm16 import launch
from tokenloom.kernels.shape import HOPPER

FEW_ROWS = 1024
"""An expert's, up to which one launch for all experts is faster than one for each."""
GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT_BYTES = 16
"""``grouped_mm``, and our kernels, take row strides that are multiples of this."""


class Products(Protocol):
    """Matrix products by groups of rows, which somebody has told where the groups are."""

    def by_weights(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[R, k], [L, k, n] -> [R, n]: each group's rows times its weights; unspecified where no group is."""

    def of_weights(self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        """[R, n], [R, k] -> [L, n, k]: for each group the sum of its rows' outer products, added to ``total``."""

    def swiglu(
        self, rows: torch.Tensor, w1: torch.Tensor, row_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, H], [L, 2I, H], [R] -> pre-activations [R, 2I], and weighted activations [R, I] of these."""


class OwnProducts:
    """Our kernels, for bfloat16 on Hopper GPUs. Blocks that begin late, because others had taken some SMs, take less
    of the work. The host need not know the groups."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self._offsets = offsets

    def by_weights(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        across = weights.is_contiguous()
        experts, k, n = weights.shape
        out = rows.new_empty(len(rows), n)
        kernel = self._kernel(launch.rows_spec(experts, n, k, across), out)
        self._launch_rows(kernel, rows, weights if across else weights.transpose(1, 2), across)
        return out

    def swiglu(
        self, rows: torch.Tensor, w1: torch.Tensor, row_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        experts, n, k = w1.shape
        hidden, activations = rows.new_empty(len(rows), n), rows.new_empty(len(rows), n // 2)
        kernel = self._kernel(launch.rows_spec(experts, n, k, across=False, swiglu=True), hidden)
        row_weights = row_weights.to(torch.float32)
        kernel.args.activations, kernel.args.row_weights = activations.data_ptr(), row_weights.data_ptr()
        self._launch_rows(kernel, rows, w1, across=False)
        return hidden, activations

    def of_weights(self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        out, adds = total, total is not None
        if out is None:
            out = left.new_empty(len(self._offsets) - 1, left.shape[1], right.shape[1])
        if not len(left):
            return out if adds else out.zero_()
        kernel = self._kernel(launch.weights_spec(len(out), out.shape[1], out.shape[2], adds), out)
        self._launch(kernel, left, (launch.DEPTH, launch.DEPTH), right, (launch.DEPTH, launch.DEPTH))
        return out

    def _kernel(self, spec: tuple[KernelSpec, int], out: torch.Tensor) -> Kernel:
        kernel = Kernel(*spec, out.device.index)
        kernel.args.offsets, kernel.args.out = self._offsets.data_ptr(), out.data_ptr()
        return kernel

    def _launch_rows(self, kernel: Kernel, rows: torch.Tensor, weights: torch.Tensor, across: bool) -> None:
        if len(rows):
            self._launch(
                kernel,
                rows,
                (launch.DEPTH, launch.TILE_ROWS),
                weights,
                (launch.DEPTH, launch.DEPTH if across else launch.TILE_ROWS, 1),
            )

    def _launch(
        self, kernel: Kernel, a: torch.Tensor, a_box: tuple[int, ...], b: torch.Tensor, b_box: tuple[int, ...]
    ) -> None:
        a, b = (each.clone() if each.data_ptr() % ALIGNMENT_BYTES else each for each in (a, b))
        claimed = torch.zeros(1, dtype=torch.int32, device=a.device)
        kernel.args.a, kernel.args.b = tensor_map(a, a_box, swizzle=True), tensor_map(b, b_box, swizzle=True)
        kernel.args.claimed = claimed.data_ptr()
        kernel.args.most_items = launch.MOST_ITEMS
        blocks = launch.CLUSTER * launch.clusters(len(self._offsets) - 1, len(a), kernel.spec)
        kernel.launch(blocks, torch.cuda.current_stream(a.device).cuda_stream)


class _Activates:
    """SwiGLU by a kernel of its own, or by torch."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self._offsets = offsets

    def by_weights(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def swiglu(
        self, rows: torch.Tensor, w1: torch.Tensor, row_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.by_weights(rows, w1.transpose(1, 2))
        return hidden, activate(hidden, row_weights, self._offsets[-1:])


class _GroupedProducts(_Activates):
    def __init__(self, offsets: torch.Tensor) -> None:
        super().__init__(offsets)
        self._ends = offsets[1:]

    def by_weights(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(rows, weights, offs=self._ends)

    def of_weights(self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        found = functional.grouped_mm(left.t(), right, offs=self._ends)
        return found if total is None else total.add_(found)


class _ExpertByExpert(_Activates):
    """One product after the other; on GPUs on two streams in turns, so that those that have begun late, because others
    had taken some SMs, keep no SM idle."""

    def __init__(self, offsets: torch.Tensor, ends: list[int]) -> None:
        super().__init__(offsets)
        self._spans = [slice(begin, end) for begin, end in pairwise(ends)]

    def by_weights(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows), weights.shape[2])
        out[self._spans[-1].stop :].zero_()
        for e, span in self._in_turns(out):
            torch.mm(rows[span], weights[e], out=out[span])
        return out

    def of_weights(self, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        if total is not None:
            for e, span in self._in_turns(total):
                total[e].addmm_(left[span].t(), right[span])
            return total
        out = left.new_empty(len(self._spans), left.shape[1], right.shape[1])
        for e, span in self._in_turns(out):
            torch.mm(left[span].t(), right[span], out=out[e])
        return out

    def _in_turns(self, out: torch.Tensor) -> Iterator[tuple[int, slice]]:
        if not out.is_cuda:
            yield from enumerate(self._spans)
            return
        streams = (torch.cuda.current_stream(out.device), _second_stream(out.device))
        streams[1].wait_stream(streams[0])
        for e, span in enumerate(self._spans):
            with torch.cuda.stream(streams[e % 2]):
                yield e, span
        streams[0].wait_stream(streams[1])


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def products_for(
    rows: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    offsets: torch.Tensor,
    host_offsets: list[int] | None = None,
) -> Products:
    """How the rows of each expert are multiplied.

    Args:
        rows: [R, H]; w1: [L, 2I, H]; w2: [L, H, I]. offsets: int32 [L + 1], as for swiglu_experts.
        host_offsets: the same where they are known on the host, or None.
    """
    if _own_kernels_take(rows, w1, w2):
        return OwnProducts(offsets)
    return torch_products(rows, w1, w2, offsets, host_offsets)


def torch_products(
    rows: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    offsets: torch.Tensor,
    host_offsets: list[int] | None = None,
) -> Products:
    """The same without kernels of ours."""
    many = rows.is_cuda and host_offsets is not None and len(rows) >= FEW_ROWS * len(w1)
    if _grouped_mm_takes(rows, w1, w2) and not many:
        return _GroupedProducts(offsets)
    return _ExpertByExpert(offsets, offsets.tolist() if host_offsets is None else host_offsets)


def _own_kernels_take(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    tensors = (rows, w1, w2)
    if not rows.is_cuda or torch.cuda.get_device_capability(rows.device) != HOPPER:
        return False
    fits = all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors)
    return fits and all(tensor.dtype == torch.bfloat16 for tensor in tensors) and _whole_units(rows, w1, w2)


def _whole_units(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    widths = (w1.shape[2], w1.shape[1], w2.shape[2])
    return all(width * rows.element_size() % ALIGNMENT_BYTES == 0 for width in widths)


def _grouped_mm_takes(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether torch's grouped GEMM accepts these; it refuses float64 and rows that are not 16-byte multiples."""
    if rows.dtype not in GROUPED_MM_DTYPES or not rows.dtype == w1.dtype == w2.dtype:
        return False
    if rows.is_cuda and rows.dtype != torch.bfloat16:
        return False
    return _whole_units(rows, w1, w2)
