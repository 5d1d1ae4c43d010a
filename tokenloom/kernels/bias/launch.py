"""The host side of biases on rows grouped by expert: arguments, variants, launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import DTYPES, UNIT_BYTES, short_name, spec_of, uint64_fields

THREADS = 512
BLOCKS_PER_SM = 2


class BiasArgs(ctypes.Structure):
    """Mirror of BiasArgs in args.cuh, which says what each value is."""

    _fields_ = [*uint64_fields("rows", "bias", "weights", "ends", "num_rows")]


@dataclass(frozen=True)
class BiasVariant:
    """One compiled form of a kernel.

    Attributes:
        name: "add_bias" or "dot_bias".
        dtype: of the rows and the bias.
        hidden: values of a row.
    """

    name: str
    dtype: torch.dtype
    hidden: int

    def __str__(self) -> str:
        return f"{self.name}, h{self.hidden} {short_name(self.dtype)}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        shape = {"dtype": DTYPES[self.dtype], "hidden": self.hidden, "threads": THREADS}
        return KernelSpec(self.name, f"kernels/bias/{self.name}.cuh", tuple(shape.items()), BiasArgs, THREADS)


def takes(dtype: torch.dtype, hidden: int) -> bool:
    """Whether there is a variant for rows of ``hidden`` values."""
    return dtype in DTYPES and hidden * dtype.itemsize % UNIT_BYTES == 0


def add_bias(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor) -> None:
    """Add ``weight * bias`` of its expert to each row before the last offset, in place.

    Args:
        rows: [R, H], contiguous, of a dtype that :func:`takes` knows.
        weights: float32 [R].
        offsets: int32 [L + 1].
        bias: [L, H], dtype of rows, contiguous.
    """
    _launch("add_bias", rows, weights, offsets, bias)


def dot_bias(totals: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor) -> None:
    """Add the dot product of each row before the last offset with its expert's bias to its total, in place.

    Args:
        totals: float32 [R].
        rows, offsets, bias: as in :func:`add_bias`.
    """
    _launch("dot_bias", rows, totals, offsets, bias)


def point(
    args: BiasArgs, rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor
) -> None:
    """Fill in the arguments of a call."""
    args.rows, args.bias, args.weights = rows.data_ptr(), bias.data_ptr(), weights.data_ptr()
    args.ends = offsets.data_ptr() + offsets.element_size()
    args.num_rows = args.ends + (len(offsets) - 2) * offsets.element_size()


def _launch(name: str, rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor) -> None:
    if not len(rows):
        return
    kernel = Kernel(spec_of(BiasVariant(name, rows.dtype, rows.shape[1])), rows.device.index)
    point(kernel.args, rows, weights, offsets, bias)
    sms = torch.cuda.get_device_properties(rows.device).multi_processor_count
    kernel.launch(BLOCKS_PER_SM * sms, torch.cuda.current_stream(rows.device).cuda_stream)
