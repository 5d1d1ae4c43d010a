"""The host side of activations between two GEMMs: arguments, variants, launches."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import DTYPES, UNIT_BYTES, int32_fields, short_name, spec_of, uint64_fields
from tokenloom.plan import FUNCTIONS, SWIGLU, Activation

THREADS = 512
BLOCKS_PER_SM = 2


class ActivationArgs(ctypes.Structure):
    """Mirror of ActivationArgs in args.cuh, which says what each value is."""

    _fields_ = [
        *uint64_fields("hidden", "weights", "num_rows", "activations", "grad", "grad_hidden", "grad_weights"),
        *uint64_fields("bias", "ends"),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("up_offset", ctypes.c_float),
        *int32_fields("spare"),
    ]


@dataclass(frozen=True)
class ActivationVariant:
    """One compiled form of an activation kernel.

    Attributes:
        direction: "forward" or "backward".
        dtype: of the rows.
        intermediate: activations of a row.
        function: f of ``Activation``.
        gated: rows of hidden are gates and ups.
        interleaved: gates and ups take turns.
        adjusted: alpha, the limit and the offset of ups are arguments. Otherwise there are none.
        biased: each expert has a row that is added to its rows of hidden.
    """

    direction: str
    dtype: torch.dtype
    intermediate: int
    function: str = "silu"
    gated: bool = True
    interleaved: bool = False
    adjusted: bool = False
    biased: bool = False

    def __str__(self) -> str:
        options = ("interleaved", "adjusted", "biased")
        parts = [f"activate_{self.direction}", f"i{self.intermediate} {short_name(self.dtype)}"]
        function = self.function if self.gated else f"{self.function} without gates"
        return ", ".join([*parts, function, *(name for name in options if getattr(self, name))])

    def spec(self) -> KernelSpec:
        """What to compile and how to launch it: with any number of blocks."""
        name = f"activate_{self.direction}"
        shape = {
            "dtype": DTYPES[self.dtype],
            "intermediate": self.intermediate,
            "threads": THREADS,
            "function": FUNCTIONS.index(self.function),
            "gated": int(self.gated),
            "interleaved": int(self.interleaved),
            "adjusted": int(self.adjusted),
            "biased": int(self.biased),
        }
        return KernelSpec(name, f"kernels/activation/{name}.cuh", tuple(shape.items()), ActivationArgs, THREADS)


def variant_for(
    direction: str, hidden: torch.Tensor, activation: Activation, interleaved: bool, biased: bool
) -> ActivationVariant:
    """Choose the form for rows of ``hidden``."""
    adjusted = activation.alpha != 1.0 or activation.limit is not None or activation.up_offset != 0.0
    width = hidden.shape[1] // activation.rows
    options = (activation.function, activation.gated, interleaved, adjusted, biased)
    return ActivationVariant(direction, hidden.dtype, width, *options)


def takes(dtype: torch.dtype, intermediate: int) -> bool:
    """Whether there is a variant for rows of ``intermediate`` activations."""
    return dtype in DTYPES and intermediate * dtype.itemsize % UNIT_BYTES == 0


def activate_forward(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    activation: Activation = SWIGLU,
    interleaved: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute weighted activations of the rows before the last offset.

    Args:
        hidden: [R, 2I], or [R, I] without gates; contiguous, of a dtype that :func:`takes` knows.
        weights: float32 [R].
        offsets: int32 [L + 1].
        activation: what to compute.
        interleaved: whether gates and ups take turns.
        bias: [L, 2I] or [L, I], dtype and order of hidden, contiguous; or None.

    Returns:
        [R, I] of hidden's dtype; other rows are unspecified.
    """
    activations = hidden.new_empty(len(hidden), hidden.shape[1] // activation.rows)
    variant = variant_for("forward", hidden, activation, interleaved, bias is not None)
    kernel = Kernel(spec_of(variant), hidden.device.index)
    point(kernel.args, hidden, weights, offsets, activation, bias, activations)
    _launch(kernel, hidden)
    return activations


def activate_backward(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    grad: torch.Tensor,
    activation: Activation = SWIGLU,
    interleaved: bool = False,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute activations again, and gradients from theirs.

    Args:
        hidden, weights, offsets, activation, interleaved, bias: as in :func:`activate_forward`.
        grad: [R, I] of hidden's dtype, the gradient of its result.

    Returns:
        activations [R, I], and the gradients of hidden, in its order, and of weights float32 [R]. Of other rows the
        first two are unspecified and the last is 0.
    """
    activations, grad_hidden = torch.empty_like(grad), torch.empty_like(hidden)
    grad_weights = torch.zeros_like(weights)
    variant = variant_for("backward", hidden, activation, interleaved, bias is not None)
    kernel = Kernel(spec_of(variant), hidden.device.index)
    args = kernel.args
    point(args, hidden, weights, offsets, activation, bias, activations)
    args.grad, args.grad_hidden, args.grad_weights = grad.data_ptr(), grad_hidden.data_ptr(), grad_weights.data_ptr()
    _launch(kernel, hidden)
    return activations, grad_hidden, grad_weights


def point(
    args: ActivationArgs,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    activation: Activation,
    bias: torch.Tensor | None,
    activations: torch.Tensor,
) -> None:
    """Fill in the arguments that both directions have. A call has arguments of its own: several threads may call."""
    args.hidden, args.weights, args.activations = hidden.data_ptr(), weights.data_ptr(), activations.data_ptr()
    ends = offsets.data_ptr() + offsets.element_size()
    args.num_rows = ends + (len(offsets) - 2) * offsets.element_size()
    args.bias, args.ends = (0, 0) if bias is None else (bias.data_ptr(), ends)
    args.alpha, args.up_offset = activation.alpha, activation.up_offset
    args.limit = math.inf if activation.limit is None else activation.limit


def _launch(kernel: Kernel, hidden: torch.Tensor) -> None:
    if len(hidden):
        sms = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        kernel.launch(BLOCKS_PER_SM * sms, torch.cuda.current_stream(hidden.device).cuda_stream)
