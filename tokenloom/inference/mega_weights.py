"""Experts as a checkpoint has them, and as the kernels of a MegaMoE take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenloom.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, a_type
from tokenloom.inference.expert_memory import FP8
from tokenloom.kernels.common import DTYPES
from tokenloom.kernels.gemm.launch import BLOCK
from tokenloom.ops.gemm import ALIGNMENT_BYTES, Biases, check_tensor, check_weights, interleave_gate_and_up
from tokenloom.ops.padding import pad
from tokenloom.ops.quant import FourBits, WeightReport, pack_weights
from tokenloom.ops.quant.four_bits import check_four_bits
from tokenloom.ops.quant.weights import padded_weights_for
from tokenloom.plan import PLAIN_WEIGHTS, WeightLayout, align_up

NEEDED, OPTIONAL = ("w1", "w2"), ("w1_scales", "w2_scales", "w1_bias", "w2_bias")
"""Tensors of ``MegaMoE.load_weights``, by name."""


@dataclass(frozen=True)
class Experts:
    """Experts as kernels take them.

    Attributes:
        weights: w1 with gates and ups in turn, its scales, w2, its scales.
        biases: of both, or None for each.
        packed: w1 and w2 in four bits, beside those in FP8; or none.
        reports: what became of the scales of w1 and w2.
    """

    weights: tuple[torch.Tensor, ...]
    biases: Biases
    packed: tuple[torch.Tensor, ...]
    reports: tuple[WeightReport, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that there are, in a fixed order."""
        return [*self.weights, *self.packed, *(bias for bias in self.biases if bias is not None)]

    def with_own_weights(self) -> Experts:
        """The same with copies of the weights, which may be the caller's."""
        return replace(self, weights=tuple(tensor.clone() for tensor in self.weights))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Experts:
        """The same with others in their places, which lie as ``tensors``."""
        rest = list(tensors)
        weights, packed = (tuple(rest.pop(0) for _ in each) for each in (self.weights, self.packed))
        w1_bias, w2_bias = (None if bias is None else rest.pop(0) for bias in self.biases)
        return Experts(weights, (w1_bias, w2_bias), packed, self.reports)


class WeightForms:
    """Converts and checks the experts of one layer, any number of them at once.

    Args:
        hidden: H, and intermediate: I, as users give them; kernels have the next multiples of 128.
        recipe: one of ``RECIPES``.
        device: of the layer.
    """

    def __init__(self, hidden: int, intermediate: int, recipe: str, device: torch.device) -> None:
        self._widths, self._recipe, self._device = (hidden, intermediate), recipe, device

    @property
    def is_padded(self) -> bool:
        """Whether kernels have other widths than users give."""
        return any(width % BLOCK for width in self._widths)

    def shapes(self, experts: int) -> dict[str, list[int]]:
        """Shapes of the weights, scales and biases of so many experts, by name and in the order of ``use_weights``."""
        return _shapes(experts, *self._widths, self._recipe)

    def padded_shapes(self, experts: int) -> dict[str, list[int]]:
        """The same of the widths that kernels have."""
        hidden, intermediate = (align_up(width, BLOCK) for width in self._widths)
        return _shapes(experts, hidden, intermediate, self._recipe)

    def check(
        self, experts: int, w1: torch.Tensor, w1_scales: torch.Tensor, w2: torch.Tensor, w2_scales: torch.Tensor
    ) -> None:
        """Raise unless these are weights as kernels take them, but for the order of w1's rows."""
        shapes = self.padded_shapes(experts)
        check_weights("w1", w1, w1_scales, shapes["w1"], self._device, self._recipe)
        check_weights("w2", w2, w2_scales, shapes["w2"], self._device, self._recipe)

    def convert(
        self,
        experts: int,
        given: dict[str, Any],
        weight_layout: WeightLayout,
        four_bits: FourBits | None,
        round_again: bool,
        keep: str,
        form: str,
    ) -> Experts:
        """Check what ``MegaMoE.load_weights`` was given, and return it as kernels take it. Nothing is copied in vain.

        Args:
            experts: number of them.
            given: tensors by name.
            keep: of ``load_weights``. form: which of these the layer keeps.
        """
        w1, w2, w1_scales, w2_scales, w1_bias, w2_bias = (given[name] for name in (*NEEDED, *OPTIONAL))
        if four_bits is not None and weight_layout.transposed:
            raise InvalidArgument(
                "weights of four bits cannot be transposed: bytes hold values along the last dimension"
            )
        interleaved, shapes = weight_layout.interleaved, self.shapes(experts)
        _, rows, depth = self.padded_shapes(experts)["w1"]
        blocks = [experts, rows // BLOCK, depth // BLOCK]
        of_blocks = w1_scales is not None and sorted(w1_scales.shape) == sorted(blocks)  # transposed or not
        if interleaved and w1.dtype == FP8 and of_blocks:
            raise InvalidArgument(
                "w1 is FP8 and interleaved: its scales are of gates and ups together, but kernels take a scale for "
                "128 gates and one for 128 ups; give bfloat16 weights, or scales of channels"
            )
        w1, w2 = as_plain(w1, weight_layout, interleaved), as_plain(w2, weight_layout)
        if w1_scales is not None:
            of_channels = four_bits is not None or w1_scales.numel() == experts * 2 * self._widths[1]
            w1_scales = as_plain(w1_scales, layout_of(w1_scales, weight_layout))
            w1_scales = as_plain(w1_scales, PLAIN_WEIGHTS, interleaved and of_channels)
        w2_scales = None if w2_scales is None else as_plain(w2_scales, layout_of(w2_scales, weight_layout))
        w1_bias = None if w1_bias is None else as_plain(w1_bias, PLAIN_WEIGHTS, interleaved)
        if w1.dtype == FP8:
            if w1_scales is None or w2_scales is None:
                raise ShapeMismatch("w1 and w2 are float8_e4m3fn, expected w1_scales and w2_scales too")
        elif w1.dtype in DTYPES and (w1_scales is not None or w2_scales is not None):
            raise DtypeMismatch(f"w1 is {w1.dtype}, which has no scales; leave them out")
        options: dict[str, Any] = {"four_bits": four_bits, "round_again": round_again}
        try:
            for name, w, scales in (("w1", w1, w1_scales), ("w2", w2, w2_scales)):
                if four_bits is None:
                    check_tensor(name, w, w1.dtype, shapes[name], self._device)
                elif (found := check_four_bits(name, w, scales, four_bits)) != shapes[name]:
                    raise ShapeMismatch(f"{name} is {found} of four bits, expected {shapes[name]}")
            w1, w1_scales, of_w1 = padded_weights_for(self._recipe, w1, w1_scales, **options, name="w1", parts=2)
            w2, w2_scales, of_w2 = padded_weights_for(self._recipe, w2, w2_scales, **options, name="w2")
            self.check(experts, w1, w1_scales, w2, w2_scales)
        except ShapeMismatch as error:
            if weight_layout.transposed:
                raise ShapeMismatch(f"{error} (both once they are transposed, as weight_layout says)") from None
            raise
        if self._recipe == "row":  # in the order of w1's rows
            w1_scales = interleave_gate_and_up(w1_scales)
        w1 = interleave_gate_and_up(w1)
        packed: tuple[torch.Tensor, ...] = ()
        if keep != "fp8":  # also where no call reads them: what cannot be kept is refused on all backends
            packed = pack_weights(w1, "w1"), pack_weights(w2, "w2")
        if form == "four_bits":
            w1, w2 = packed
        if form != "both":
            packed = ()
        biases = self._float32_biases(experts, w1_bias, w2_bias)
        return Experts((w1, w1_scales, w2, w2_scales), biases, packed, (of_w1, of_w2))

    def _float32_biases(self, experts: int, w1_bias: torch.Tensor | None, w2_bias: torch.Tensor | None) -> Biases:
        """Check the biases of weights with gates first, and return new ones as kernels take them."""
        found: list[torch.Tensor | None] = []
        shapes, padded = self.shapes(experts), self.padded_shapes(experts)
        for name, bias in (("w1_bias", w1_bias), ("w2_bias", w2_bias)):
            if bias is not None:
                if bias.dtype not in DTYPES:
                    raise DtypeMismatch(f"{name} is {bias.dtype}, expected float32, bfloat16 or float16")
                bias = bias.contiguous()
                check_tensor(name, bias, bias.dtype, shapes[name], self._device)
                bias = pad(bias.float(), padded[name], parts=2 if name == "w1_bias" else 1).clone()
            found.append(bias)
        w1_bias, w2_bias = found
        return None if w1_bias is None else interleave_gate_and_up(w1_bias), w2_bias


def require_tensors(given: dict[str, Any]) -> None:
    """Raise InvalidArgument unless these are tensors, or None where that may be."""
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor) and not (name in OPTIONAL and tensor is None):
            raise InvalidArgument(f"{name} is {a_type(tensor)}, expected a torch.Tensor")


def rows_of_slots(
    given: dict[str, Any], experts: Sequence[int], slots: Sequence[int], num_shared: int
) -> dict[str, Any]:
    """Give each slot the rows of its expert.

    Args:
        given: tensors by name, with rows of some experts and then of the shared ones.
        experts: which the first rows are of. slots: the expert in each slot, -1 for none, which gets any row.
        num_shared: number of shared experts.

    Raises:
        InvalidArgument: ``experts`` lacks the expert of a slot. ShapeMismatch: a tensor has another number of rows.
    """
    places = {expert: row for row, expert in reversed(list(enumerate(experts)))}
    lacking = sorted(set(slots) - {-1, *places})
    if lacking or not places:
        raise InvalidArgument(
            f"experts {', '.join(map(str, lacking))} have slots on this rank, but no rows in what is loaded; pass "
            "them, and say by experts= which the rows are"
        )
    rows = [places.get(expert, 0) for expert in slots] + [len(experts) + shared for shared in range(num_shared)]
    found: dict[str, Any] = {}
    for name, tensor in given.items():
        if tensor is not None and tensor.dim():
            if len(tensor) != len(experts) + num_shared:
                raise ShapeMismatch(
                    f"{name} has {len(tensor)} rows, expected {len(experts) + num_shared}: one for each of experts="
                    " (all experts if that is None), then the shared ones"
                )
            values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            tensor = values[torch.tensor(rows, device=tensor.device)].view(tensor.dtype)
        found[name] = tensor
    return found


def _shapes(local: int, hidden: int, intermediate: int, recipe: str) -> dict[str, list[int]]:
    of_hidden, of_intermediate = (-(-width // BLOCK) for width in (hidden, intermediate))
    by_row = recipe == "row"
    return {
        "w1": [local, 2 * intermediate, hidden],
        "w1_scales": [local, 2 * intermediate] if by_row else [local, 2 * of_intermediate, of_hidden],
        "w2": [local, hidden, intermediate],
        "w2_scales": [local, hidden] if by_row else [local, of_hidden, of_intermediate],
        "w1_bias": [local, 2 * intermediate],
        "w2_bias": [local, hidden],
    }


def layout_of(scales: torch.Tensor, layout: WeightLayout) -> WeightLayout:
    """The layout of weights, or the plain one for scales of channels or experts, which have no second dimension."""
    return layout if scales.dim() == 3 and scales.shape[-1] > 1 else PLAIN_WEIGHTS


def as_plain(tensor: torch.Tensor, layout: WeightLayout, interleaved: bool = False) -> torch.Tensor:
    """Copy a weight, its scales or a bias to the default layout, if it lies in another or not as kernels read it.

    ``interleaved`` tells those that have gates and ups in turns. What has a wrong shape keeps one.
    """
    if layout.transposed and tensor.dim() == 3:
        values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        tensor = values.transpose(1, 2).contiguous().view(tensor.dtype)
    if interleaved and tensor.dim() > 1 and tensor.shape[1] % 2 == 0:
        tensor = tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
