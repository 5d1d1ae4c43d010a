"""The GEMMs of a MegaMoE on backend nvlink: which kernels they are, and in which order they run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

from tokenloom.backends.peers.fused import FusedLayerCalls
from tokenloom.inference.expert_memory import LINE, ExpertMemory
from tokenloom.jit.kernel import Kernel, TensorMap
from tokenloom.kernels.gemm.launch import (
    CLUSTER,
    TILE_HEIGHTS,
    Bf16Epilogue,
    GroupedGemmVariant,
    average_rows,
    row_windows,
    scale_map,
    tile_heights,
    tile_rows_for,
    warps_that_store,
    wide_scales,
)
from tokenloom.ops.gemm import Biases, swiglu_epilogue, tell_activation, weights_argument
from tokenloom.ops.quant import is_packed
from tokenloom.plan import SWIGLU, Activation, Plan, align_up
from tokenloom.runtime.deferred_release import keep_until_idle


def sms_for_gemms(device: torch.device) -> int:
    """SMs that a kernel takes on a GPU: all that make whole clusters."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // CLUSTER * CLUSTER


class MegaGemms:
    """Both GEMMs of the experts of a rank.

    Args:
        num_local: experts on this rank, shared ones included.
        plan: of the communicator. intermediate: I.
        power_of_two_scales: of the activations between them, which recipe "row" has anyway.
        recipe: one of ``RECIPES``.
        device: the GPU.

    Attributes:
        num_sms: that a kernel takes. fewest_sms: that GEMM1 keeps in any case, about half of them.
        weights: as they were given, FP8 or packed in four bits.
        is_stale: kernels have to be told where memory and weights are before the next call.
        claimed: int32, how many tiles of each GEMM its SMs have claimed; 0 between calls.
    """

    def __init__(
        self,
        num_local: int,
        plan: Plan,
        intermediate: int,
        power_of_two_scales: bool,
        recipe: str,
        device: torch.device,
    ) -> None:
        self._device, self._num_ranks = device, plan.num_ranks
        self._hidden, self._intermediate, self._num_local = plan.hidden, intermediate, num_local
        self._recipe, self._power_of_two_scales = recipe, power_of_two_scales or recipe == "row"
        self.num_sms = sms_for_gemms(device)
        self.fewest_sms = align_up(self.num_sms // 2, CLUSTER)
        self.weights: tuple[torch.Tensor, ...] = ()
        self._packed: tuple[torch.Tensor, ...] = ()
        self._traces: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows_of_token = plan.num_ranks * plan.top_k / plan.num_experts  # of each expert, on average
        self._most_rows = plan.max_tokens_per_rank * self._rows_of_token
        self._kernels: dict[GroupedGemmVariant, Kernel] = {}
        self._pairs: list[tuple[Kernel, Kernel]] = []
        self._most_tokens: list[float] = []  # of calls that take each pair but the last
        self._activation: tuple[Activation, bool] = (SWIGLU, False)
        self._biases: Biases = (None, None)
        self.is_stale = True

    # -- what they compute ----------------------------------------------------------------------------------

    def set_activation(self, form: Activation, fast_math: bool) -> None:
        """Do what ``MegaMoE.set_activation`` says."""
        if (form, fast_math) == self._activation and self._pairs:
            return
        self._choose((form, fast_math), self._biases, self.weights, self._packed)

    def use_weights(
        self, weights: tuple[torch.Tensor, ...], biases: Biases, packed: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """Use the checked ``MegaMoE.weights`` and ``MegaMoE.biases`` from the next call on.

        Args:
            packed: w1 and w2 in four bits too, for calls in which that is not slower; or none.
        """
        self._choose(self._activation, biases, weights, packed)

    def kept_as(self, keep: str) -> str:
        """The forms of weights that calls read, of those that ``MegaMoE.load_weights`` is to keep."""
        few = self._heights(four_bits=True)[-1] < TILE_HEIGHTS[self._recipe][-1]
        return "four_bits" if keep == "both" and few else keep

    def _heights(self, four_bits: bool) -> list[int]:
        """Return the most rows of a tile, in calls of few tokens and of many."""
        highest = tile_rows_for(self._most_rows, self._recipe, four_bits)
        return [height for height in tile_heights(self._recipe, four_bits) if height <= highest]

    def trace(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Take kernels that write when their roles work, as ``MegaTimes.gemm1`` and ``gemm2`` say."""
        self._traces = first, second
        self._kernels.clear()
        self._choose(self._activation, self._biases, self.weights, self._packed)

    def _choose(
        self,
        activation: tuple[Activation, bool],
        biases: Biases,
        weights: tuple[torch.Tensor, ...],
        packed: tuple[torch.Tensor, ...],
    ) -> None:
        """Take the kernels that have this activation, these biases and weights. Nothing changes where that fails."""
        (form, fast_math), (w1_bias, w2_bias) = activation, biases
        swiglu = swiglu_epilogue(form, self._power_of_two_scales, fast_math, biased=w1_bias is not None)
        first_sizes = (self._num_local, 2 * self._intermediate, self._hidden)
        second_sizes = (self._num_local, self._hidden, self._intermediate)
        plain = Bf16Epilogue(biased=w2_bias is not None)
        pairs = []
        given_w1, w1_scales, given_w2, w2_scales = weights or (None, None, None, None)
        given_packed = [w is not None and is_packed(w) for w in (given_w1, given_w2)]
        heights = self._heights(four_bits=bool(packed) or any(given_packed))
        for height in heights:
            few = bool(packed) and height < TILE_HEIGHTS[self._recipe][-1]
            w1, w2 = packed if few else (given_w1, given_w2)
            of_first, of_second = ({"tile_rows": height, "four_bits": few or each} for each in given_packed)
            first = self._kernel(*first_sizes, epilogue=swiglu, awaits=self._num_ranks, **of_first)
            second = self._kernel(*second_sizes, epilogue=plain, scatters=self._num_ranks, **of_second)
            of_w1, of_w2 = (None if w is None else weights_argument(w) for w in (w1, w2))
            pairs.append(((first, second), ((of_w1, w1_scales, w1_bias), (of_w2, w2_scales, w2_bias))))
        for pair, operands in pairs:
            tell_activation(pair[0].args, form)
            for gemm, (argument, scales, bias) in zip(pair, operands, strict=True):
                if argument is not None:
                    setattr(gemm.args, *argument)
                gemm.args.b_scales = 0 if scales is None else scales.data_ptr()
                gemm.args.bias = 0 if bias is None else bias.data_ptr()
            if self._traces is not None:
                for gemm, times in zip(pair, self._traces, strict=True):
                    gemm.args.trace = times.data_ptr()
        self._activation, self._biases, self.weights, self._packed = activation, biases, weights, packed
        self._pairs, self.is_stale = [pair for pair, _ in pairs], True
        self._most_tokens = [average_rows(height) / self._rows_of_token for height in heights[:-1]]

    def _kernel(self, *sizes: int, **choices: Any) -> Kernel:
        traced = self._traces is not None
        variant = GroupedGemmVariant(*sizes, claims=True, traced=traced, recipe=self._recipe, **choices)
        if variant not in self._kernels:
            self._kernels[variant] = Kernel(variant.spec(), self._device.index)
        return self._kernels[variant]

    # -- where it is ----------------------------------------------------------------------------------------

    def take_addresses(self, memory: ExpertMemory, calls: FusedLayerCalls) -> None:
        """Take the addresses of all memory, once it is allocated. They count until others come, or :meth:`let_go`.

        Args:
            memory: between the GEMMs.
            calls: of the layer; they know where rows arrive.
        """
        self._memory, self._calls, self.is_stale = memory, calls, True
        self.claimed = torch.zeros(2, LINE, dtype=torch.int32, device=self._device)
        self._arriving, self._activations = (
            row_windows(calls.rows, self._recipe),
            row_windows(memory.quantised_rows(), self._recipe),
        )
        keep_until_idle(calls, self._device, self.claimed, self._arriving, self._activations)
        # Each by itself, since other memory may take its place here.
        calls.keep(self, memory, self.claimed, self._arriving, self._activations)
        self._arriving_scales = self._scale_map(calls.row_scales, self._hidden)
        self._activation_scales = self._scale_map(memory.activation_scales, self._intermediate)

    def let_go(self) -> None:
        """Let go of the memory whose addresses these are: other memory comes."""
        del self._memory, self._calls, self.claimed, self._arriving, self._activations

    def _scale_map(self, scales: torch.Tensor, width: int) -> TensorMap:
        """Describe the scales of rows to kernels that load them by TMA; others read nothing there."""
        return scale_map(scales) if self._recipe == "block" and wide_scales(width) else TensorMap()

    def set_constant_arguments(self) -> None:
        """Set the arguments that are the same in all calls and with all weights: addresses of memory."""
        for first, second in self._pairs:
            self._set_constant_arguments(first, second)
        self.is_stale = False

    def _set_constant_arguments(self, first: Kernel, second: Kernel) -> None:
        memory, calls, args = self._memory, self._calls, first.args
        args.a_scale_map = self._arriving_scales
        args.a_windows, args.a_scales = self._arriving.data_ptr(), calls.row_scales.data_ptr()
        args.arrived, args.expected = calls.arrived.data_ptr(), memory.expected.data_ptr()
        args.row_weights, args.claimed = calls.row_weights.data_ptr(), self.claimed[0].data_ptr()
        args.out, args.out_scales = memory.activations.data_ptr(), memory.activation_scales.data_ptr()
        args = second.args
        args.a_scale_map = self._activation_scales
        args.a_windows, args.a_scales = self._activations.data_ptr(), memory.activation_scales.data_ptr()
        args.row_homes, args.peers, args.results = calls.row_homes.data_ptr(), calls.peers, calls.results_offset
        args.row_weights, args.claimed = calls.row_weights.data_ptr(), self.claimed[1].data_ptr()
        args.stored_by = warps_that_store(2 * self._intermediate, self._recipe)
        args.activations, args.activation_scales = memory.activations.data_ptr(), memory.activation_scales.data_ptr()
        args.quantized = memory.quantized.data_ptr()
        for gemm in (first, second):
            gemm.args.offsets, gemm.args.stored = memory.offsets.data_ptr(), memory.stored.data_ptr()
            gemm.args.begun, gemm.args.deadline = memory.begun.data_ptr(), calls.deadline
            gemm.overlaps_previous = True

    # -- calls ----------------------------------------------------------------------------------------------

    def run(self, num_tokens: int, stream: int, gemm2_sms: int, after_stage: Callable[[str], None]) -> None:
        """Launch both. GEMM1 begins while the kernel before it sends rows, and GEMM2 wherever GEMM1 leaves an SM.

        Args:
            num_tokens: of this rank. Others may have more or fewer; then tiles are of a size that is less fast.
            stream: handle of the current stream.
            gemm2_sms: SMs that GEMM1 leaves free, if it keeps ``fewest_sms``.
            after_stage: is told when a GEMM has been launched.
        """
        first, second = self._pairs[bisect_left(self._most_tokens, num_tokens)]
        first.launch(max(self.num_sms - gemm2_sms, self.fewest_sms) * first.spec.blocks_per_sm, stream)
        after_stage("gemm1")
        second.launch(self.num_sms * second.spec.blocks_per_sm, stream)
        after_stage("gemm2")
