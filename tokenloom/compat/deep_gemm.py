"""DeepGEMM's names for its fused MoE layer on SM90, served by ``tokenloom.MegaMoE``.

A program written for ``deep_gemm`` imports this module instead. Names, tensors, dtypes and layouts are DeepGEMM's
(https://github.com/deepseek-ai/DeepGEMM). Activations are quantised per 128 values before the second GEMM, not per 64,
so results differ by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tokenloom.errors import InvalidArgument, ShapeMismatch
from tokenloom.inference.mega_moe import MegaMoE
from tokenloom.ops.gemm import interleave_gate_and_up

__all__ = [
    "SymmBuffer",
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "transform_weights_for_mega_moe_sm90",
]

RECIPE = (128, 128, 128)
"""Recipe of DeepGEMM that this layer has, and the only one."""
Weights = tuple[torch.Tensor, torch.Tensor]
"""FP8 values and their float32 scales."""


class SymmBuffer:
    """Inputs of a call, which the caller fills, and the layer behind them. Making one is collective.

    Args:
        group: the R ranks, one Hopper GPU each.
        num_experts: E, divisible by R.
        num_max_tokens_per_rank: Mmax, the most tokens of one call on one rank.
        num_topk: K, at most 32.
        hidden: H, a multiple of 128.
        intermediate_hidden: I, a multiple of 128.
        **options: DeepGEMM's other options: ``activation`` "swiglu", ``mma_type`` "fp8xfp8" or "fp8xfp4" and
            ``use_fp8_dispatch`` True.

    Attributes:
        x: float8_e4m3fn [Mmax, H], tokens.
        x_sf: float32 [Mmax, H / 128], their scales.
        topk_idx: int64 [Mmax, K], expert ids; -1 marks an unused place.
        topk_weights: float32 [Mmax, K].
        mega: the layer.

    Raises:
        InvalidArgument: an option or a value that this layer does not have.
        BackendUnavailable: the kernels do not run here.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        **options: Any,
    ) -> None:
        known = {"activation": ("swiglu",), "mma_type": ("fp8xfp8", "fp8xfp4"), "use_fp8_dispatch": (True,)}
        for name, value in options.items():
            if value not in known.get(name, ()):
                raise InvalidArgument(f"{name} is {value!r}, which tokenloom's layer does not have")
        self.mega = MegaMoE(
            group,
            num_experts=num_experts,
            hidden=hidden,
            intermediate=intermediate_hidden,
            top_k=num_topk,
            max_tokens_per_rank=num_max_tokens_per_rank,
            device=torch.device("cuda", torch.cuda.current_device()),
        )
        rows, device = num_max_tokens_per_rank, self.mega.comm.device
        self.x = torch.zeros(rows, hidden, dtype=torch.float8_e4m3fn, device=device)
        self.x_sf = torch.zeros(rows, hidden // 128, dtype=torch.float32, device=device)
        self.topk_idx = torch.full((rows, num_topk), -1, dtype=torch.int64, device=device)
        self.topk_weights = torch.zeros(rows, num_topk, dtype=torch.float32, device=device)

    def destroy(self) -> None:
        """Release the memory that other ranks can write to. Calling it twice is fine."""
        self.mega.close()


get_symm_buffer_for_mega_moe = get_symm_buffer_for_sm90_mega_moe = SymmBuffer
"""DeepGEMM's functions that make a buffer, with the arguments of :class:`SymmBuffer`."""


def transform_weights_for_mega_moe_sm90(l1_weights: Weights, l2_weights: Weights) -> tuple[Weights, Weights]:
    """Put weights into the order that ``fp8_mega_moe`` takes: gates and ups of w1 in turn, 8 rows of each.

    Args:
        l1_weights: w1, float8_e4m3fn [E / R, 2I, H], gates first, and scales, float32 [E / R, 2I / 128, H / 128].
        l2_weights: w2, float8_e4m3fn [E / R, H, I], and scales, float32 [E / R, H / 128, I / 128].

    Returns:
        ((w1, its scales), (w2, its scales)).
    """
    return (interleave_gate_and_up(l1_weights[0]), l1_weights[1]), l2_weights


def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """Write the layer's output for the first M rows of the buffer to ``y``.

    Args:
        y: bfloat16 [M, H], M at most Mmax. M may differ per rank and may be 0.
        l1_weights: w1 and its scales, from ``transform_weights_for_mega_moe_sm90``.
        l2_weights: w2 and its scales, from the same function.
        sym_buffer: inputs of the call.
        cumulative_local_expert_recv_stats: int32 [E / R], to which each local expert's number of routes is added, or
            None.
        recipe: (128, 128, 128).
        activation: "swiglu".
        activation_clamp: as in ``MegaMoE``.
        fast_math: as in ``MegaMoE``.

    Raises:
        InvalidArgument: a recipe or an activation that this layer does not have.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
        TokenloomError: as in ``MegaMoE.forward``.
    """
    if tuple(recipe) != RECIPE or activation != "swiglu":
        raise InvalidArgument(f"recipe is {recipe}, activation is {activation!r}; there are {RECIPE} and 'swiglu'")
    buffer, mega = sym_buffer, sym_buffer.mega
    rows = len(y)
    if rows > len(buffer.x):
        raise ShapeMismatch(f"y has {rows} rows, the buffer has room for {len(buffer.x)}")
    given = (*l1_weights, *l2_weights)
    if any(ours is not theirs for ours, theirs in zip(mega.weights or (None,) * 4, given, strict=True)):
        mega.use_weights(*given)
    mega.set_activation(activation_clamp, fast_math)
    inputs = (buffer.x[:rows], buffer.x_sf[:rows]), buffer.topk_idx[:rows], buffer.topk_weights[:rows]
    mega(*inputs, expert_stats=cumulative_local_expert_recv_stats, out=y)
