"""DeepGEMM's fused FP8 layer, for ``tokenloom bench mega --against deep_gemm``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import ClassVar

import torch
import torch.distributed as dist

from tokenloom.bench import PackageMissing
from tokenloom.bench.clock import taken_bytes
from tokenloom.bench.mega_work import MegaShape
from tokenloom.errors import InvalidArgument
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import FP8_BLOCK

NAME = "deep_gemm"
BUFFERS = ("get_symm_buffer_for_sm90_mega_moe", "get_symm_buffer_for_mega_moe")
"""Makers of its buffer. In builds that have both, the second is for other GPUs."""
NEEDED = ("transform_weights_for_mega_moe_sm90", "fp8_mega_moe")
Weights = tuple[torch.Tensor, torch.Tensor]


def find_module(shape: MegaShape) -> ModuleType:
    """The module deep_gemm, if it has this layer for Hopper GPUs.

    Raises:
        InvalidArgument: it lacks what the shape asks for.
        PackageMissing: it cannot be imported, or has no such layer.
    """
    if shape.num_shared_experts:
        raise InvalidArgument(
            f"--shared-experts is {shape.num_shared_experts}, but the layer of {NAME} has none; leave it out"
        )
    if shape.hidden % FP8_BLOCK or shape.intermediate % FP8_BLOCK:
        raise InvalidArgument(
            f"hidden {shape.hidden} and intermediate {shape.intermediate}: the layer of {NAME} takes multiples of "
            f"{FP8_BLOCK}"
        )
    try:
        module = importlib.import_module(NAME)
    except Exception as error:  # a build for another torch, or without what it links to, fails in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PackageMissing(
            f"--against {NAME} cannot import it ({reason}); install a build with the fused layer for SM90, such as "
            "sgl-deep-gemm"
        ) from None
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if not any(hasattr(module, name) for name in BUFFERS):
        missing.append(BUFFERS[0])
    if missing:
        raise PackageMissing(
            f"--against {NAME} finds no {', '.join(missing)} in the one that is installed; install a build with the "
            "fused layer for SM90, such as sgl-deep-gemm"
        )
    return module


class DeepGemm:
    """The fused FP8 layer of deep_gemm for SM90, on one host. Making one and closing it are collective.

    Args:
        max_tokens: most tokens of a rank in any call.
        l1_weights: float8_e4m3fn [E / W + S, 2I, H], gates first, and float32 [E / W + S, 2I / 128, H / 128].
        l2_weights: float8_e4m3fn [E / W + S, H, I] and float32 [E / W + S, H / 128, I / 128].

    Attributes:
        about: what readers of its numbers have to know.
        input: dtype of its x.
        most_difference: limit for ``calc_diff`` of its output and ours.
        buffer_bytes: memory that its constructor takes beside weights.
    """

    about: ClassVar[str] = (
        f"{NAME} takes x in FP8 with scales, which were made before; ours takes x in bfloat16 and quantises it on its "
        "way"
    )
    input: ClassVar[str] = "float8_e4m3fn with scales, quantised before"
    most_difference: ClassVar[float] = 0.01  # that of its own tests against float32

    @staticmethod
    def load(shape: MegaShape) -> str | None:
        """Return its version. It raises what find_module does."""
        return str(getattr(find_module(shape), "__version__", None))

    def __init__(
        self, group: dist.ProcessGroup, shape: MegaShape, max_tokens: int, l1_weights: Weights, l2_weights: Weights
    ) -> None:
        self._module = module = find_module(shape)
        self._group = group
        self._weights = module.transform_weights_for_mega_moe_sm90(l1_weights, l2_weights)
        make = getattr(module, next(name for name in BUFFERS if hasattr(module, name)))
        sizes = (shape.num_experts, max_tokens, shape.top_k, shape.hidden, shape.intermediate)
        self._buffer, self.buffer_bytes = taken_bytes(lambda: make(group, *sizes))

    def prepared_call(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], None]:
        """Return the layer on these inputs, ready to be called until the next are prepared.

        It takes FP8, so x is quantised here, once.

        Args:
            x: bfloat16 [T, H].
            topk_ids: int32 [T, K].
            topk_weights: float32 [T, K].
            out: bfloat16 [T, H], which each call writes.
        """
        values, scales = quantize_fp8(x)
        rows, buffer = len(x), self._buffer
        buffer.x[:rows].copy_(values)
        buffer.x_sf[:rows].copy_(scales)
        buffer.topk_idx[:rows].copy_(topk_ids)
        buffer.topk_weights[:rows].copy_(topk_weights)
        return lambda: self._module.fp8_mega_moe(out, *self._weights, buffer)

    def close(self) -> None:
        """Release its buffer, which peers write: behind everything on the current streams. Collective."""
        dist.barrier(self._group)
        self._buffer.destroy()
