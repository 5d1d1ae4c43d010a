"""The host side of SwiGLU between two GEMMs: arguments, variants, launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import DTYPES, short_name, uint64_fields

THREADS = 512
BLOCKS_PER_SM = 2
UNIT_BYTES = 16
"""A lane reads and writes this many bytes of a row at a time."""


class SwigluArgs(ctypes.Structure):
    """Mirror of SwigluArgs in args.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("hidden", "weights", "num_rows", "activations", "grad", "grad_hidden", "grad_weights"),
    ]


@dataclass(frozen=True)
class SwigluVariant:
    """One compiled form of a SwiGLU kernel.

    Attributes:
        direction: "forward" or "backward".
        dtype: of the rows.
        intermediate: activations of a row.
    """

    direction: str
    dtype: torch.dtype
    intermediate: int

    def __str__(self) -> str:
        return f"swiglu_{self.direction}, i{self.intermediate} {short_name(self.dtype)}"

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        name = f"swiglu_{self.direction}"
        shape = {"dtype": DTYPES[self.dtype], "intermediate": self.intermediate, "threads": THREADS}
        return KernelSpec(name, f"kernels/activation/{name}.cuh", tuple(shape.items()), SwigluArgs, THREADS)


def takes(dtype: torch.dtype, intermediate: int) -> bool:
    """Whether there is a variant for rows of ``intermediate`` activations."""
    return dtype in DTYPES and intermediate * dtype.itemsize % UNIT_BYTES == 0


def swiglu_forward(hidden: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
    """Compute weighted activations of the first ``num_rows`` rows.

    Args:
        hidden: [R, 2I], gates and then ups, contiguous, of a dtype that :func:`takes` knows.
        weights: float32 [R].
        num_rows: int32 [1].

    Returns:
        [R, I] of hidden's dtype; other rows are unspecified.
    """
    activations = hidden.new_empty(len(hidden), hidden.shape[1] // 2)
    _launch(_kernel("forward", hidden, weights, num_rows, activations), hidden)
    return activations


def swiglu_backward(
    hidden: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute activations again, and gradients from theirs.

    Args:
        hidden, weights, num_rows: as in :func:`swiglu_forward`.
        grad: [R, I] of hidden's dtype, the gradient of its result.

    Returns:
        activations [R, I], and the gradients of hidden [R, 2I] and of weights float32 [R]. Of other rows the first
        two are unspecified and the last is 0.
    """
    activations, grad_hidden = torch.empty_like(grad), torch.empty_like(hidden)
    grad_weights = torch.zeros_like(weights)
    kernel = _kernel("backward", hidden, weights, num_rows, activations)
    args = kernel.args
    args.grad, args.grad_hidden, args.grad_weights = grad.data_ptr(), grad_hidden.data_ptr(), grad_weights.data_ptr()
    _launch(kernel, hidden)
    return activations, grad_hidden, grad_weights


def _kernel(
    direction: str, hidden: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor, activations: torch.Tensor
) -> Kernel:
    """Make a kernel with arguments of its own for each call: forward and backward may run in several threads."""
    variant = SwigluVariant(direction, hidden.dtype, hidden.shape[1] // 2)
    kernel = Kernel(variant.spec(), hidden.device.index)
    args = kernel.args
    args.hidden, args.weights, args.num_rows = hidden.data_ptr(), weights.data_ptr(), num_rows.data_ptr()
    args.activations = activations.data_ptr()
    return kernel


def _launch(kernel: Kernel, hidden: torch.Tensor) -> None:
    if len(hidden):
        sms = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        kernel.launch(BLOCKS_PER_SM * sms, torch.cuda.current_stream(hidden.device).cuda_stream)
