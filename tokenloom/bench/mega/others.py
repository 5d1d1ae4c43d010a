"""Layers that ``tokenloom bench mega`` measures beside ours: DeepGEMM's, and ours as three calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from tokenloom.bench.mega.work import MegaShape
from tokenloom.bench.rivals.deep_gemm import DeepGemm, Weights
from tokenloom.errors import InvalidArgument
from tokenloom.inference.mega_moe import MegaMoE
from tokenloom.ops.gemm import interleave_gate_and_up

INPUT = "bfloat16"
"""What our x is."""


class Other(Protocol):
    """A layer beside ours. Making one and closing it are collective.

    Attributes:
        about: what readers of its numbers have to know.
        input: dtype of its x.
        most_difference: limit for ``calc_diff`` of its output and ours.
    """

    about: ClassVar[str]
    input: ClassVar[str]
    most_difference: ClassVar[float]

    @staticmethod
    def load(shape: MegaShape) -> str | None:
        """Return its version, if it has one. It raises InvalidArgument where it is not there, or lacks something."""

    def __init__(
        self, group: dist.ProcessGroup, shape: MegaShape, max_tokens: int, l1_weights: Weights, l2_weights: Weights
    ) -> None: ...

    def prepared_call(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], None]:
        """Return the layer on these inputs, ready to be called until the next are prepared."""

    def close(self) -> None:
        """Release its buffers, behind everything on the current streams."""


class Composed:
    """MegaMoE as calls that anybody could make: dispatch, grouped GEMMs, combine.

    Args:
        group: all ranks.
        shape: the layer.
        max_tokens: most tokens of a rank in any call.
        l1_weights: float8_e4m3fn [E / W + S, 2I, H], gates first, and float32 [E / W + S, 2I / 128, H / 128].
        l2_weights: float8_e4m3fn [E / W + S, H, I] and float32 [E / W + S, H / 128, I / 128].
    """

    about: ClassVar[str] = (
        "composed is MegaMoE(backend='composed'): dispatch, grouped GEMMs and combine, whose host reads how many rows "
        "have come"
    )
    input: ClassVar[str] = INPUT
    most_difference: ClassVar[float] = 1e-3

    @staticmethod
    def load(shape: MegaShape) -> str | None:
        """It is always there."""
        return None

    def __init__(
        self, group: dist.ProcessGroup, shape: MegaShape, max_tokens: int, l1_weights: Weights, l2_weights: Weights
    ) -> None:
        w1, w1_scales = l1_weights
        self._mega = MegaMoE(
            group,
            num_experts=shape.num_experts,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            top_k=shape.top_k,
            max_tokens_per_rank=max_tokens,
            num_shared_experts=shape.num_shared_experts,
            device=w1.device,
            backend="composed",
        )
        self._mega.use_weights(interleave_gate_and_up(w1), w1_scales, *l2_weights)

    def prepared_call(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], None]:
        """Return the layer on these inputs, ready to be called: x and out bfloat16 [T, H], the others [T, K]."""

        def call() -> None:
            self._mega(x, topk_ids, topk_weights, out=out)

        return call

    def close(self) -> None:
        """Raise what its calls have left behind, and release its buffers."""
        self._mega.check()
        self._mega.close()


OTHERS: dict[str, type[Any]] = {"deep_gemm": DeepGemm, "composed": Composed}


def load(names: Sequence[str], shape: MegaShape) -> dict[str, str | None]:
    """Find these layers, before anything starts.

    Returns:
        Versions by name.

    Raises:
        InvalidArgument: a name is unknown, or the layer is not there.
    """
    unknown = [name for name in names if name not in OTHERS]
    if unknown:
        raise InvalidArgument(f"against is {unknown[0]!r}, expected one of {', '.join(OTHERS)}")
    return {name: OTHERS[name].load(shape) for name in names}
