"""Backend "composed" of MegaMoE: dispatch, grouped GEMMs and combine one after the other, between nodes too."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenloom.backends.seam import Upcoming
from tokenloom.comm.communicator import Communicator, Mode
from tokenloom.comm.routed import Routed
from tokenloom.errors import InvalidArgument
from tokenloom.inference.called_experts import CalledExperts
from tokenloom.inference.request import ForwardRequest
from tokenloom.inference.trace import MegaTimes
from tokenloom.ops.gemm import ALIGNMENT_BYTES, check_device, grouped_gemm_fp8, grouped_swiglu_fp8


class ComposedExperts(CalledExperts):
    """A layer of calls that anybody could make, over whatever backend its communicator has.

    Args:
        comm: communicator of any backend, on Hopper GPUs or CPUs. The others: see :class:`CalledExperts`.

    Raises:
        BackendUnavailable: the grouped GEMMs do not run on this device.
    """

    _layout = "expert"

    def __init__(
        self, comm: Communicator, intermediate: int, num_shared_experts: int, power_of_two_scales: bool
    ) -> None:
        check_device(comm.device)
        super().__init__(comm, intermediate, num_shared_experts, power_of_two_scales)

    def describe(self) -> str:
        return "dispatch, grouped GEMMs and combine, one after the other"

    def trace(self) -> MegaTimes:
        raise InvalidArgument("only the kernels of backend 'nvlink' can be traced")

    def _add_up(self, request: ForwardRequest, routed: Routed, out: torch.Tensor) -> None:
        comm = self._comm
        request.passed("dispatch")
        with comm.engine.sequence(Upcoming("combine")):
            rows = self._routed_experts(routed, request.passed)
        mode: Mode | None = "per_route" if "all_to_all" in comm.engine.capabilities.combine_strategies else None
        if not self._num_shared:
            comm.combine(rows, routed, weighted=False, mode=mode, out=out.detach())
            request.passed("sum")
            return
        total = comm.combine(rows, routed, weighted=False, mode=mode, out_dtype=torch.float32)
        request.passed("sum")
        for of_expert in self._shared_experts(request.x) if len(total) else ():
            total += of_expert
        out.copy_(total)

    def _routed_experts(self, routed: Routed, passed: Callable[[str], None]) -> torch.Tensor:
        """[R, H], times the weights of the rows."""
        assert routed.scales is not None
        assert routed.expert_offsets is not None
        weights, which = self._comm.row_weights(routed), slice(self._comm.plan.experts_per_rank)
        return self._experts((routed.tokens, routed.scales), routed.expert_offsets, weights, which, passed)

    def _shared_experts(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[S, T, H] of this rank's own tokens."""
        rows, scales = self._own_rows(x)
        count, num_tokens = self._num_shared, len(rows)
        every = (rows.view(torch.uint8).repeat(count, 1).view(rows.dtype), scales.repeat(count, 1))
        offsets = torch.arange(count + 1, dtype=torch.int32, device=rows.device) * num_tokens
        which = slice(self._comm.plan.experts_per_rank, None)
        return self._experts(every, offsets, None, which, lambda stage: None).unflatten(0, (count, num_tokens))

    def _experts(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor,
        row_weights: torch.Tensor | None,
        which: slice,
        passed: Callable[[str], None],
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
        )
        passed("gemm1")
        factors = None if w2_bias is None else row_weights
        found = grouped_gemm_fp8(*activations, w2, w2_scales, offsets, bias=w2_bias, row_weights=factors)
        passed("gemm2")
        return found


def _aligned(part: torch.Tensor) -> torch.Tensor:
    """The part of a tensor, or a copy where it begins at an address that 16-byte copies cannot read.

    Each call makes its own: weights may be loaded over in place, and captured graphs read the new values.
    """
    return part.clone() if part.data_ptr() % ALIGNMENT_BYTES else part
