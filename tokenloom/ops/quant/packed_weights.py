"""FP8 weights of which four bits say everything, packed as kernels decode them (device/roles/four_bits.cuh)."""

from __future__ import annotations

import torch

from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, require_type
from tokenloom.kernels.gemm.launch import FOUR_BIT_BLOCK
from tokenloom.ops.quant.four_bits import MAGNITUDES, FourBits
from tokenloom.plan import FP8_BLOCK

E4M3 = torch.float8_e4m3fn
GROUP = 32
"""Values of a channel that share a power of two."""
CODE_BYTES = FP8_BLOCK * FP8_BLOCK // 2
"""Of a block of 128 x 128 values. Its scales follow."""
VALUES_AT_ONCE = 1 << 24
"""That are packed together. Memory beside the result is some 40 bytes for each of them."""
LEAST, MOST = 1, 12
"""r of a group: its values are E2M1 times 2**(r - 6), so that all but 0 are normal numbers of E4M3."""
SHIFT = 6
BITS = ((0, 7), (16, 3))
"""Of a word: the first magnitude and the first sign of four values, among the first 16 of a step and behind them."""


def can_pack(four_bits: FourBits) -> bool:
    """Whether weights of this form can be packed, if the scales of a channel do not lie too far apart."""
    return four_bits.values == "e2m1" and four_bits.group >= GROUP


def is_packed(w: torch.Tensor) -> bool:
    """Whether these are weights from ``pack_weights``."""
    return w.dtype == torch.uint8 and w.dim() == 4 and w.shape[3] == FOUR_BIT_BLOCK


def shape_of_weights(w: torch.Tensor) -> list[int]:
    """[E, N, K] of weights, packed or not."""
    if not is_packed(w):
        return list(w.shape)
    return [w.shape[0], *(size * FP8_BLOCK for size in w.shape[1:3])]


@torch.no_grad()
def pack_weights(w: torch.Tensor, name: str = "w") -> torch.Tensor:
    """Pack FP8 weights in 4.25 bits a value where that loses nothing, such as what ``weights_for`` makes of MXFP4.

    Each 32 values of a channel have to be E2M1 times one power of two, from 2**-5 to 2**6. So a channel's scales in
    the checkpoint span at most 11 octaves. Packed weights have the scales that w has by recipe "row".

    Args:
        w: float8_e4m3fn [E, N, K], N and K multiples of 128.
        name: of w in errors.

    Returns:
        uint8 [E, N / 128, K / 128, 8704], which ``grouped_gemm_fp8`` and ``grouped_swiglu_fp8`` take instead of w.

    Raises:
        InvalidArgument: w has groups of 32 values that are not as above; the message says how many.
        ShapeMismatch, DtypeMismatch: w is not as above.
    """
    require_type(name, w, torch.Tensor, "a torch.Tensor")
    if is_packed(w):
        raise InvalidArgument(f"{name} is packed already")
    if w.dtype != E4M3:
        raise DtypeMismatch(
            f"{name} is {w.dtype}, expected float8_e4m3fn, as weights_for('row', ...) makes it of a checkpoint"
        )
    if w.dim() != 3 or not w.numel() or w.shape[1] % FP8_BLOCK or w.shape[2] % FP8_BLOCK:
        raise ShapeMismatch(
            f"{name} is {list(w.shape)}, expected [E, N, K] of at least one expert, N and K multiples of {FP8_BLOCK}"
        )
    experts, channels, depth = w.shape
    shape = (experts, channels // FP8_BLOCK, depth // FP8_BLOCK, FOUR_BIT_BLOCK)
    packed = torch.empty(shape, dtype=torch.uint8, device=w.device)
    misfits = torch.zeros((), dtype=torch.int64, device=w.device)
    at_once = max(1, VALUES_AT_ONCE // (FP8_BLOCK * depth))  # strips of 128 channels
    for of_expert, to in zip(w.detach().view(torch.uint8), packed, strict=True):
        for strips, blocks in zip(of_expert.split(at_once * FP8_BLOCK), to.split(at_once), strict=True):
            misfits += _pack_strips(strips.contiguous().view(E4M3).float(), blocks)
    if misfits:
        raise InvalidArgument(
            f"{misfits} of {w.numel() // GROUP} groups of {GROUP} values of {name} are not E2M1 times a power of two "
            f"from 2**{LEAST - SHIFT} to 2**{MOST - SHIFT}, so four bits would round them; keep='fp8' of load_weights "
            "takes them as they are"
        )
    return packed


def _pack_strips(values: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Pack float32 [128 S, K] to [S, K / 128, 8704], and count groups that do not fit."""
    groups = values.unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2)
    # E2M1's largest codes are 6 and 4, which are 0.75 * 2**3 and 0.5 * 2**3.
    r = (torch.frexp(largest).exponent - 3 + SHIFT).clamp(min=LEAST)  # 448 is 12: no more
    codes = torch.ldexp(groups.abs(), SHIFT - r[..., None])
    table = torch.tensor(MAGNITUDES, device=values.device)
    magnitudes = torch.bucketize(codes, table).clamp(max=len(MAGNITUDES) - 1)
    misfits = (table[magnitudes] != codes).any(2).sum()
    # Rows: strip, warp, upper or lower eight, g. Values: block, step, first or second 16, t, i.
    parts = (*blocks.shape[:1], 8, 2, 8, -1, 4, 2, 4, 4)
    magnitudes, signs = magnitudes.view(parts), groups.signbit().long().view(parts)
    places = torch.arange(4, device=values.device)
    words = torch.zeros_like(magnitudes[..., 0, :, 0])
    for part, (first, sign) in enumerate(BITS):
        words += (magnitudes[..., part, :, :] << (first + 4 * places)).sum(-1)
        words += (signs[..., part, :, :] << (sign + 8 * places)).sum(-1)
    # [strip, warp, upper, g, block, step, t] -> [strip, block, warp, half, g, t, step of the half, upper]
    words = words.unflatten(5, (2, 2)).permute(0, 4, 1, 5, 3, 7, 6, 2)
    as_bytes = torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous().view(torch.uint8)
    scales = (8 * r).to(torch.uint8).view(*blocks.shape[:1], 8, 2, 8, -1, 4).permute(0, 4, 1, 3, 2, 5)
    blocks.copy_(torch.cat([as_bytes.flatten(2), scales.flatten(2)], 2))
    return misfits


@torch.no_grad()
def unpack_weights(packed: torch.Tensor) -> torch.Tensor:
    """Undo ``pack_weights``: uint8 [E, N / 128, K / 128, 8704] becomes float8_e4m3fn [E, N, K]."""
    return torch.stack([_unpacked(of_expert).view(torch.uint8) for of_expert in packed]).view(E4M3)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    strips, blocks, _ = packed.shape
    words = packed[..., :CODE_BYTES].contiguous().view(torch.int32).long()
    words = words.view(strips, blocks, 8, 2, 8, 4, 2, 2)  # strip, block, warp, half, g, t, step of the half, upper
    places = torch.arange(4, device=packed.device)
    halves = [
        (words[..., None] >> (first + 4 * places) & 7, words[..., None] >> (sign + 8 * places) & 1)
        for first, sign in BITS
    ]
    table = torch.tensor(MAGNITUDES, device=packed.device)
    values = torch.stack([table[magnitudes] * (1 - 2 * signs) for magnitudes, signs in halves], -2)
    r = packed[..., CODE_BYTES:].view(strips, blocks, 8, 8, 2, 2, 2).int() // 8
    # r has strip, block, warp, g, upper, half, step. Both become strip, warp, upper, g, block, half, step.
    # Behind these are the values of a step.
    values = values.permute(0, 2, 7, 4, 1, 3, 6, 8, 5, 9)  # ..., first or second 16, t, i
    r = r.permute(0, 2, 4, 3, 1, 5, 6)
    found = torch.ldexp(values, (r - SHIFT)[..., None, None, None])
    return found.reshape(strips * FP8_BLOCK, blocks * FP8_BLOCK).to(E4M3)
