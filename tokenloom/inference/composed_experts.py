"""Backend "composed" of MegaMoE: dispatch, grouped GEMMs and combine one after the other, between nodes too."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenloom.backends.seam import Upcoming
from tokenloom.comm import checks
from tokenloom.comm.communicator import Communicator, Mode, Recipe
from tokenloom.comm.pulled_experts import PulledExperts
from tokenloom.comm.routed import Layout, Routed
from tokenloom.errors import InvalidArgument
from tokenloom.inference.mega_weights import Experts
from tokenloom.inference.schedules import MegaSchedule
from tokenloom.inference.trace import MegaTimes
from tokenloom.ops.gemm import ALIGNMENT_BYTES, Biases, check_device, grouped_gemm_fp8, grouped_swiglu_fp8
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import SWIGLU, Activation

LAYOUT: Layout = "expert"
"""Of the dispatch."""


class ComposedExperts:
    """A layer of calls that anybody could make, over whatever backend its communicator has.

    Args:
        comm: communicator of any backend, on Hopper GPUs or CPUs.
        intermediate: I, which the weights tell too.
        num_shared_experts: S, the last experts of the weights, for every token of this rank.
        power_of_two_scales: round the scales of x and of activations up to powers of two.
        recipe: as in ``MegaMoE``.

    Raises:
        BackendUnavailable: the grouped GEMMs do not run on this device.
        InvalidArgument: the communicator's backend lacks the layout.
    """

    communicator_backend = "auto"
    shares_weights = False
    """Experts of balanced batches travel as messages."""
    checks_tokens = True
    """Its dispatch is one that anybody may call."""

    def __init__(
        self, comm: Communicator, intermediate: int, num_shared_experts: int, power_of_two_scales: bool, recipe: Recipe
    ) -> None:
        self.upcoming = comm.engine.with_counts([Upcoming("dispatch")])
        """Calls that each forward opens first."""
        check_device(comm.device)
        checks.require_layout(comm.engine.capabilities, LAYOUT)
        self._comm, self._num_shared = comm, num_shared_experts
        self._power_of_two_scales, self._recipe = power_of_two_scales, recipe
        self._weights: tuple[torch.Tensor, ...] = ()
        self._biases: Biases = (None, None)
        self._form, self._fast_math = SWIGLU, True

    def describe(self) -> str:
        return "dispatch, grouped GEMMs and combine, one after the other"

    def set_activation(self, form: Activation, fast_math: bool) -> None:
        """Do what ``MegaMoE.set_activation`` says."""
        self._form, self._fast_math = form, fast_math

    def kept_as(self, keep: str) -> str:
        """The forms of weights that calls read, of those that ``MegaMoE.load_weights`` is to keep."""
        return "fp8" if keep == "both" else keep

    def use_weights(
        self, weights: tuple[torch.Tensor, ...], biases: Biases, packed: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """Use the checked ``MegaMoE.weights`` and ``MegaMoE.biases`` from the next call on.

        Args:
            packed: none, as ``kept_as`` says.
        """
        self._weights, self._biases = weights, biases

    def own_weights(self, given: Experts) -> Experts:
        """Copy weights that were converted."""
        return given.with_own_weights()

    def require_foreign_weights(self) -> None:
        """Weights may be in any memory: they travel as messages."""

    def trace(self) -> MegaTimes:
        raise InvalidArgument("only the kernels of backend 'nvlink' can be traced")

    # -- calls ----------------------------------------------------------------------------------------------

    def ready_stream(self) -> None:
        """Raise what earlier calls left, as far as it is known without waiting."""
        self._comm.engine.raise_known_errors()

    def forward(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_stats: torch.Tensor | None,
        out: torch.Tensor | None,
        schedule: MegaSchedule | None,
        after_stage: Callable[[str], None],
    ) -> torch.Tensor:
        """Compute what ``MegaMoE.forward`` returns.

        Args:
            x, topk_ids, topk_weights: as in ``MegaMoE.forward``; dispatch checks them.
            expert_stats, out: as there, checked.
            schedule: unused.
            after_stage: is told the name of each stage once it is on the stream.
        """
        comm, quantised = self._comm, isinstance(x, (tuple, list))
        routed = comm.dispatch(
            x,
            topk_ids,
            topk_weights,
            layout=LAYOUT,
            to_fp8=not quantised,
            power_of_two_scales=self._power_of_two_scales and not quantised,
            recipe=self._recipe,
        )
        after_stage("dispatch")
        if routed.batch is not None and routed.batch.split is not None:
            PulledExperts(comm.engine, routed.batch).pull((*self._weights, *self._biases))
            after_stage("pull")
        with torch.autocast(comm.device.type, enabled=False):  # sums are float32
            with comm.engine.sequence(Upcoming("combine")):
                rows = self._routed_experts(routed, after_stage)
            mode: Mode | None = "per_route" if "all_to_all" in comm.engine.capabilities.combine_strategies else None
            if self._num_shared:
                total = comm.combine(rows, routed, weighted=False, mode=mode, out_dtype=torch.float32)
                after_stage("sum")
                for of_expert in self._shared_experts(x) if len(total) else ():
                    total += of_expert
                out = total.to(torch.bfloat16) if out is None else out.copy_(total)
            else:
                result = None if out is None else out.detach()
                result = comm.combine(rows, routed, weighted=False, mode=mode, out=result)
                after_stage("sum")
                out = result if out is None else out
        if expert_stats is not None:
            expert_stats.add_(routed.expert_counts)
        return out

    def _routed_experts(self, routed: Routed, after_stage: Callable[[str], None]) -> torch.Tensor:
        """[R, H], times the weights of the rows."""
        assert routed.scales is not None
        assert routed.expert_offsets is not None
        weights, which = self._comm.row_weights(routed), slice(self._comm.engine.plan.experts_per_rank)
        return self._experts((routed.tokens, routed.scales), routed.expert_offsets, weights, which, after_stage)

    def _shared_experts(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[S, T, H] of this rank's own tokens."""
        rows, scales = (
            quantize_fp8(x, power_of_two_scales=self._power_of_two_scales, recipe=self._recipe)
            if isinstance(x, torch.Tensor)
            else x
        )
        count, num_tokens = self._num_shared, len(rows)
        every = (
            rows.view(torch.uint8).repeat(count, 1).view(rows.dtype),
            scales.repeat(count, *[1] * (scales.dim() - 1)),
        )
        offsets = torch.arange(count + 1, dtype=torch.int32, device=rows.device) * num_tokens
        which = slice(self._comm.engine.plan.experts_per_rank, None)
        return self._experts(every, offsets, None, which, lambda stage: None).unflatten(0, (count, num_tokens))

    def _experts(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor,
        row_weights: torch.Tensor | None,
        which: slice,
        after_stage: Callable[[str], None],
    ) -> torch.Tensor:
        """Both GEMMs of some experts over rows that are grouped by expert: bfloat16 [R, H]."""
        w1, w1_scales, w2, w2_scales = (_aligned(weight[which]) for weight in self._weights)
        w1_bias, w2_bias = (None if bias is None else bias[which] for bias in self._biases)
        activations = grouped_swiglu_fp8(
            *rows,
            w1,
            w1_scales,
            offsets,
            row_weights,
            activation=self._form,
            bias=w1_bias,
            power_of_two_scales=self._power_of_two_scales,
            fast_math=self._fast_math,
            recipe=self._recipe,
        )
        after_stage("gemm1")
        factors = None if w2_bias is None else row_weights
        found = grouped_gemm_fp8(
            *activations, w2, w2_scales, offsets, bias=w2_bias, row_weights=factors, recipe=self._recipe
        )
        after_stage("gemm2")
        return found


def _aligned(part: torch.Tensor) -> torch.Tensor:
    """The part of a tensor, or a copy where it begins at an address that 16-byte copies cannot read.

    Each call makes its own: weights may be loaded over in place, and captured graphs read the new values.
    """
    return part.clone() if part.data_ptr() % ALIGNMENT_BYTES else part
