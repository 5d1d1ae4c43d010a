"""The layer: its inputs, its weights and its call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, a_type
from tokenloom.inference.mega_moe import MegaMoE
from tokenloom.ops.gemm import check_tensor, check_weights, interleave_gate_and_up
from tokenloom.ops.quant import MXFP4, weights_for
from tokenloom.plan import FP8_BLOCK, align_up
from tokenloom.runtime.devices import pick_device
from tokenloom.runtime.rank_group import MAKING, RankGroup
from tokenloom.runtime.rendezvous import agreeing

Recipe = tuple[int, int, int]
RECIPE: Recipe = (128, 128, 128)
"""Recipe of DeepGEMM that calls with FP8 weights have, and the only one."""
FP4_RECIPE: Recipe = (1, 1, 32)
"""Recipe of DeepGEMM that calls with FP4 weights have: values that share a scale."""
TOKEN_ALIGNMENT = 128
"""Mmax is rounded up to a multiple of it, as DeepGEMM does."""
SERVED: dict[str, tuple[Any, ...]] = {
    "activation": ("swiglu",),
    "use_fp8_dispatch": (True, None),
    "mma_type": ("fp8xfp8", "fp8xfp4"),
    "num_shared_experts": (0,),
    "fused": (False, True),
    "num_experts_per_wave": (None,),
    "l2_act_sf_gran_k": (None, FP8_BLOCK),
}
"""Values of DeepGEMM's options that this layer has."""
Weights = tuple[torch.Tensor, torch.Tensor]
"""FP8 values and their float32 scales."""


class SM90SymmBuffer:
    """Inputs of a call, which the caller fills, and the layer behind them. Making one is collective.

    Args:
        group: the R ranks: one Hopper GPU each for NCCL, processes on CPUs for gloo.
        num_experts: E, divisible by R.
        num_max_tokens_per_rank: the most tokens of one call on one rank. Mmax is the next multiple of 128.
        num_topk: K, at most 32.
        hidden: H, a multiple of 128.
        intermediate_hidden: I, a multiple of 128.
        use_fp8_dispatch: True.
        activation: "swiglu".

    Attributes:
        group, num_experts, num_topk, hidden, intermediate_hidden, activation: as given.
        num_max_tokens_per_rank: Mmax.
        buffer: int8, the memory of the next four.
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
        use_fp8_dispatch: bool = True,
        activation: str = "swiglu",
    ) -> None:
        _check_options(group, use_fp8_dispatch=use_fp8_dispatch, activation=activation)
        _check_widths(group, hidden=hidden, intermediate_hidden=intermediate_hidden)
        rows, device = num_max_tokens_per_rank, pick_device(None, group)
        if isinstance(rows, int):  # the layer refuses others, on all ranks
            rows = align_up(rows, TOKEN_ALIGNMENT)
        self.mega = MegaMoE(
            group,
            num_experts=num_experts,
            hidden=hidden,
            intermediate=intermediate_hidden,
            top_k=num_topk,
            max_tokens_per_rank=rows,
            backend="composed" if device.type == "cpu" else "nvlink",
            device=device,
        )
        self.group, self.num_experts, self.num_max_tokens_per_rank = group, num_experts, rows
        self.num_topk, self.hidden, self.intermediate_hidden = num_topk, hidden, intermediate_hidden
        self.activation = activation
        self._weights_at: tuple[int, ...] = ()  # a parameter may have other memory in the next call
        parts = [(torch.float8_e4m3fn, hidden), (torch.float32, hidden // FP8_BLOCK)]
        parts += [(torch.int64, num_topk), (torch.float32, num_topk)]
        sizes = [rows * width * dtype.itemsize for dtype, width in parts]
        with torch.inference_mode(False):  # callers fill them in any mode
            self.buffer = torch.zeros(sum(sizes), dtype=torch.int8, device=device)
            views = zip(self.buffer.split(sizes), parts, strict=True)
            self.x, self.x_sf, self.topk_idx, self.topk_weights = (
                memory.view(dtype).view(rows, width) for memory, (dtype, width) in views
            )
        self.topk_idx.fill_(-1)

    def destroy(self) -> None:
        """Release the memory that other ranks can write to. Calling it twice is fine."""
        self.mega.close()


SymmBuffer = SM90SymmBuffer
"""DeepGEMM's class for other GPUs, by which programs name the type."""


def get_symm_buffer_for_sm90_mega_moe(
    group: dist.ProcessGroup,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
    *,
    fused: bool = False,
    num_experts_per_wave: int | None = None,
    l2_act_sf_gran_k: int | None = None,
) -> SM90SymmBuffer:
    """Make the inputs of a layer, and the layer. Collective.

    Args:
        group: as in :class:`SM90SymmBuffer`.
        num_experts: as in :class:`SM90SymmBuffer`.
        num_max_tokens_per_rank: as in :class:`SM90SymmBuffer`.
        num_topk: as in :class:`SM90SymmBuffer`.
        hidden: as in :class:`SM90SymmBuffer`.
        intermediate_hidden: as in :class:`SM90SymmBuffer`.
        use_fp8_dispatch: as in :class:`SM90SymmBuffer`.
        activation: as in :class:`SM90SymmBuffer`.
        fused: True or False, which of DeepGEMM's kernels is meant. There is one layer here.
        num_experts_per_wave: None. Its schedule chooses by the tokens of each call.
        l2_act_sf_gran_k: 128 or None, activations that share a scale before the second GEMM.

    Raises:
        InvalidArgument, BackendUnavailable: as in :class:`SM90SymmBuffer`.
    """
    _check_options(group, fused=fused, num_experts_per_wave=num_experts_per_wave, l2_act_sf_gran_k=l2_act_sf_gran_k)
    sizes = (num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    return SM90SymmBuffer(group, *sizes, use_fp8_dispatch, activation)


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SM90SymmBuffer:
    """Make the inputs of a layer, and the layer, for programs that ask so on any GPU. Collective.

    Args:
        group: as in :class:`SM90SymmBuffer`.
        num_experts: as in :class:`SM90SymmBuffer`.
        num_max_tokens_per_rank: as in :class:`SM90SymmBuffer`.
        num_topk: as in :class:`SM90SymmBuffer`.
        hidden: as in :class:`SM90SymmBuffer`.
        intermediate_hidden: as in :class:`SM90SymmBuffer`.
        num_shared_experts: always 0; ``tokenloom.MegaMoE`` has shared experts.
        use_fp8_dispatch: True or None.
        mma_type: "fp8xfp8", or "fp8xfp4", which programs leave as it is. Tokens are the same for both, and so is the
            layer.
        activation: as in :class:`SM90SymmBuffer`.

    Raises:
        InvalidArgument, BackendUnavailable: as in :class:`SM90SymmBuffer`.
    """
    _check_options(group, num_shared_experts=num_shared_experts, use_fp8_dispatch=use_fp8_dispatch, mma_type=mma_type)
    sizes = (num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    return SM90SymmBuffer(group, *sizes, activation=activation)


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """Check scales of weights and return them: the layer takes them as checkpoints have them.

    Args:
        sf: float32 [E, N / 128, K / 128], contiguous; without E where ``num_groups`` is None.
        mn: N, rows of a weight.
        k: K, columns of a weight.
        recipe: (128, 128), rows and columns of a block.
        num_groups: E.
        is_sfa: unused.
        disable_ue8m0_cast: unused; scales stay float32.

    Raises:
        InvalidArgument: another recipe, such as that of tokens for DeepGEMM's own GEMMs.
        ShapeMismatch, DtypeMismatch: ``sf`` is not as above.
    """
    if tuple(recipe) != RECIPE[1:]:
        raise InvalidArgument(f"recipe is {recipe}; this layer has scales of {RECIPE[1:]} weights")
    groups = [] if num_groups is None else [num_groups]
    check_tensor("sf", sf, torch.float32, [*groups, mn // FP8_BLOCK, k // FP8_BLOCK], sf.device)
    return sf


def transform_weights_for_mega_moe_sm90(l1_weights: Weights, l2_weights: Weights) -> tuple[Weights, Weights]:
    """Put weights into the order that ``fp8_mega_moe`` takes: gates and ups of w1 in turn, 8 rows of each.

    Args:
        l1_weights: w1, float8_e4m3fn [E / R, 2I, H], gates first, and scales, float32 [E / R, 2I / 128, H / 128].
        l2_weights: w2, float8_e4m3fn [E / R, H, I], and scales, float32 [E / R, H / 128, I / 128].

    Returns:
        ((w1, its scales), (w2, its scales)). Only w1 is a copy.

    Raises:
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
    """
    (w1, w1_scales), (w2, w2_scales) = l1_weights, l2_weights
    if w2.dim() != 3:
        raise ShapeMismatch(f"w2 is {list(w2.shape)}, expected [E / R, H, I]")
    local, hidden, width = w2.shape
    check_weights("w1", w1, w1_scales, [local, 2 * width, hidden], w2.device)
    check_weights("w2", w2, w2_scales, [local, hidden, width], w2.device)
    return (interleave_gate_and_up(w1), w1_scales), (w2, w2_scales)


def transform_weights_for_mega_moe_sm90_fp4(
    l1_weights: Weights, l2_weights: Weights, *, round_again: bool = False
) -> tuple[Weights, Weights]:
    """Encode four-bit weights as FP8, in the order that ``fp8_fp4_mega_moe`` takes. DeepGEMM keeps them packed.

    Values stay as they are where the scales of a block of 128 x 128 lie within 14 octaves. They take a byte each.

    Args:
        l1_weights: w1, int8 or uint8 [E / R, 2I, H / 2], gates first, and scales [E / R, 2I, H / 32]. A byte holds two
            codes of E2M1, the first in its low half. Scales are float32, float8_e8m0fnu, or uint8 with its bytes.
        l2_weights: w2, likewise [E / R, H, I / 2], and scales [E / R, H, I / 32].
        round_again: round values that are out of reach, instead of raising InvalidArgument. DeepGEMM has no such
            argument.

    Returns:
        ((w1, its scales), (w2, its scales)), copies, as ``transform_weights_for_mega_moe_sm90`` returns them.

    Raises:
        InvalidArgument: values would be rounded, or a scale is negative or not finite.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
    """
    w2, w2_scales, _ = weights_for("block", *l2_weights, four_bits=MXFP4, round_again=round_again, name="w2")
    w1, w1_scales, _ = weights_for("block", *l1_weights, four_bits=MXFP4, round_again=round_again, name="w1")
    return transform_weights_for_mega_moe_sm90((w1, w1_scales), (w2, w2_scales))


def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: SM90SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: Recipe = RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int | None = None,
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
        num_tokens_bound: the most rows of this call on any rank, M to Mmax, or None. It is checked and otherwise
            unused.

    Raises:
        InvalidArgument: a recipe, an activation or a bound that this layer does not have.
        ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
        TokenloomError: as in ``MegaMoE.forward``.
    """
    buffer, mega = sym_buffer, sym_buffer.mega
    try:
        rows = _rows_of_call(y, buffer.num_max_tokens_per_rank, recipe, activation, num_tokens_bound)
        given = (*l1_weights, *l2_weights)
        others = any(ours is not theirs for ours, theirs in zip(mega.weights or (None,) * 4, given, strict=True))
        if others or buffer._weights_at != _addresses(given):
            mega.use_weights(*given)
            buffer._weights_at = _addresses(given)
        mega.set_activation(activation_clamp, fast_math)
    except Exception as fault:
        mega.refuse(fault)
    inputs = (buffer.x[:rows], buffer.x_sf[:rows]), buffer.topk_idx[:rows], buffer.topk_weights[:rows]
    mega(*inputs, expert_stats=cumulative_local_expert_recv_stats, out=y)


def fp8_fp4_mega_moe(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: SM90SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: Recipe = FP4_RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """Do what ``fp8_mega_moe`` does, with weights that were four-bit.

    Args:
        y: as in ``fp8_mega_moe``.
        l1_weights: w1 and its scales, from ``transform_weights_for_mega_moe_sm90_fp4`` of this module.
        l2_weights: w2 and its scales, from the same function.
        sym_buffer: as in ``fp8_mega_moe``.
        cumulative_local_expert_recv_stats: as in ``fp8_mega_moe``.
        recipe: (1, 1, 32).
        activation: "swiglu".
        activation_clamp: as in ``MegaMoE``.
        fast_math: as in ``MegaMoE``.

    Raises:
        DtypeMismatch: weights are packed, as DeepGEMM's own transform leaves them.
        TokenloomError: as in ``fp8_mega_moe``.
    """
    try:
        _check_recipe(recipe, activation, FP4_RECIPE)
        for name, (weights, _) in (("w1", l1_weights), ("w2", l2_weights)):
            if weights.dtype in (torch.int8, torch.uint8):
                raise DtypeMismatch(
                    f"{name} is {weights.dtype}, which is packed; take weights from "
                    "transform_weights_for_mega_moe_sm90_fp4 of tokenloom.compat.deep_gemm, which encodes them as FP8"
                )
    except Exception as fault:
        sym_buffer.mega.refuse(fault)
    stats = cumulative_local_expert_recv_stats
    fp8_mega_moe(y, l1_weights, l2_weights, sym_buffer, stats, RECIPE, activation, activation_clamp, fast_math)


def _addresses(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(each.data_ptr() for each in tensors)


def _rows_of_call(y: torch.Tensor, room: int, recipe: Recipe, activation: str, num_tokens_bound: int | None) -> int:
    """Check the options of a call, and return M."""
    if not isinstance(y, torch.Tensor) or y.dim() != 2:
        given = list(y.shape) if isinstance(y, torch.Tensor) else a_type(y)
        raise ShapeMismatch(f"y is {given}, expected a tensor [M, H]")
    rows = len(y)
    _check_recipe(recipe, activation, RECIPE)
    if rows > room:
        raise ShapeMismatch(f"y has {rows} rows, the buffer has room for {room}")
    if num_tokens_bound is not None and not rows <= num_tokens_bound <= room:
        raise InvalidArgument(f"num_tokens_bound is {num_tokens_bound}, expected {rows} (rows of y) to {room}")
    return rows


def _check_recipe(recipe: Recipe, activation: str, served: Recipe) -> None:
    """Raise InvalidArgument unless a call has the recipe and the activation that there are."""
    if tuple(recipe) != served or activation != "swiglu":
        raise InvalidArgument(f"recipe is {recipe}, activation is {activation!r}; there are {served} and 'swiglu'")


def _check_options(group: dist.ProcessGroup, **options: Any) -> None:
    """Raise InvalidArgument for a value that is not among those of ``SERVED``. The other ranks hear of it."""
    for name, value in options.items():
        if value not in SERVED[name]:
            there = " or ".join(map(repr, SERVED[name]))
            with agreeing(RankGroup(group), MAKING):
                raise InvalidArgument(f"{name} is {value!r}; tokenloom's layer has {there}")


def _check_widths(group: dist.ProcessGroup, **widths: Any) -> None:
    """Raise InvalidArgument unless all are multiples of 128, as DeepGEMM's are. The other ranks hear of it."""
    for name, width in widths.items():
        if not isinstance(width, int) or width <= 0 or width % FP8_BLOCK:
            with agreeing(RankGroup(group), MAKING):
                raise InvalidArgument(f"{name} is {width!r}, expected a multiple of {FP8_BLOCK}")
