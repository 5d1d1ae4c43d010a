"""The host side of SwiGLU between two products: arguments, variants, launches."""

from __future__ import annotations

import ctypes

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import DTYPES, uint64_fields

THREADS = 512
BLOCKS_PER_SM = 2
UNIT_BYTES = 16
"""Rows are read and written so many bytes a lane."""


class SwigluArgs(ctypes.Structure):
    """Mirror of SwigluArgs in args.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("hidden", "weights", "num_rows", "activations", "grad", "grad_hidden", "grad_weights"),
    ]


def swiglu_spec(name: str, dtype: torch.dtype, intermediate: int) -> KernelSpec:
    """What to compile for "swiglu_forward" or "swiglu_backward"; launched with any number of blocks."""
    shape = {"dtype": DTYPES[dtype], "intermediate": intermediate, "threads": THREADS}
    return KernelSpec(name, f"kernels/activation/{name}.cuh", tuple(shape.items()), SwigluArgs, THREADS)


def takes(dtype: torch.dtype, intermediate: int) -> bool:
    """Whether there is a variant for rows of so many activations."""
    return dtype in DTYPES and intermediate * dtype.itemsize % UNIT_BYTES == 0


def swiglu_forward(hidden: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
    """[R, 2I], float32 [R] -> weighted activations [R, I], of the first ``num_rows`` (int32 [1]) rows."""
    rows, width = hidden.shape
    activations = hidden.new_empty(rows, width // 2)
    kernel = _kernel("swiglu_forward", hidden, weights, num_rows, activations)
    _launch(kernel, hidden)
    return activations


def swiglu_backward(
    hidden: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of those, and the gradient [R, I] of the activations: activations [R, I], gradients of hidden [R, 2I] and of
    weights float32 [R], of the first ``num_rows`` rows; 0 for weights of others."""
    activations, grad_hidden = torch.empty_like(grad), torch.empty_like(hidden)
    grad_weights = torch.zeros_like(weights)
    kernel = _kernel("swiglu_backward", hidden, weights, num_rows, activations)
    args = kernel.args
    args.grad, args.grad_hidden, args.grad_weights = grad.data_ptr(), grad_hidden.data_ptr(), grad_weights.data_ptr()
    _launch(kernel, hidden)
    return activations, grad_hidden, grad_weights


def _kernel(
    name: str, hidden: torch.Tensor, weights: torch.Tensor, num_rows: torch.Tensor, activations: torch.Tensor
) -> Kernel:
    """One of its own for each call: forward and backward may run in several threads."""
    kernel = Kernel(swiglu_spec(name, hidden.dtype, hidden.shape[1] // 2), hidden.device.index)
    args = kernel.args
    args.hidden, args.weights, args.num_rows = hidden.data_ptr(), weights.data_ptr(), num_rows.data_ptr()
    args.activations = activations.data_ptr()
    return kernel


def _launch(kernel: Kernel, hidden: torch.Tensor) -> None:
    if len(hidden):
        sms = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        kernel.launch(BLOCKS_PER_SM * sms, torch.cuda.current_stream(hidden.device).cuda_stream)
