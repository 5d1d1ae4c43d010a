"""What layers of MegaMoE share that make calls anybody could make: a dispatch, experts, and combines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from tokenloom.backends.seam import Upcoming
from tokenloom.comm import checks
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.routed import Layout, Routed
from tokenloom.inference.request import Biases, ForwardRequest
from tokenloom.ops.quant import quantize_fp8
from tokenloom.plan import SWIGLU, Activation


class CalledExperts(ABC):
    """Dispatch, experts and combine of one layer, one after the other.

    Args:
        comm: communicator of any backend.
        intermediate: I, which the weights tell too.
        num_shared_experts: S, the last experts of the weights, for every token of this rank.
        power_of_two_scales: round the scales of x and of activations up to powers of two.

    Raises:
        InvalidArgument: the communicator's backend lacks the layout.
    """

    communicator_backend = "auto"
    _layout: ClassVar[Layout]
    """Of the dispatch."""

    def __init__(
        self, comm: Communicator, intermediate: int, num_shared_experts: int, power_of_two_scales: bool
    ) -> None:
        checks.require_layout(comm.engine.capabilities, self._layout)
        self._comm, self._num_shared = comm, num_shared_experts
        self._power_of_two_scales = power_of_two_scales
        self._weights: tuple[torch.Tensor, ...] = ()
        self._biases: Biases = (None, None)
        self._form, self._fast_math = SWIGLU, True

    def set_activation(self, form: Activation, fast_math: bool) -> None:
        """Do what ``MegaMoE.set_activation`` says."""
        self._form, self._fast_math = form, fast_math

    def use_weights(self, weights: tuple[torch.Tensor, ...], biases: Biases) -> None:
        """Use the checked ``MegaMoE.weights`` and ``MegaMoE.biases`` from the next call on."""
        self._weights, self._biases = weights, biases

    def forward(self, request: ForwardRequest) -> torch.Tensor:
        """Compute what ``MegaMoE.forward`` returns."""
        comm, quantised = self._comm, request.is_quantised
        comm.engine.begin()
        with comm.engine.sequence(Upcoming("dispatch")):
            out = request.checked()
        routed = comm.dispatch(
            request.x,
            request.topk_ids,
            request.topk_weights,
            layout=self._layout,
            to_fp8=not quantised,
            power_of_two_scales=self._power_of_two_scales and not quantised,
        )
        with torch.autocast(comm.device.type, enabled=False):  # sums are float32
            self._add_up(request, routed, out)
        if request.expert_stats is not None:
            request.expert_stats.add_(routed.expert_counts)
        return out

    @abstractmethod
    def _add_up(self, request: ForwardRequest, routed: Routed, out: torch.Tensor) -> None:
        """Apply the experts to routed rows and own tokens. Write the sum of each token's results, rounded once."""

    def _own_rows(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens in FP8, and their scales."""
        return self._quantize(x) if isinstance(x, torch.Tensor) else x

    def _quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(rows, power_of_two_scales=self._power_of_two_scales)
