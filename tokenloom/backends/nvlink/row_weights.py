"""Weights of received routes as weights of their rows, and the gradient of that: kernels of this rank alone."""

from __future__ import annotations

import torch

from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import spec_of
from tokenloom.kernels.row_weights.launch import BLOCKS, RowWeightsVariant
from tokenloom.plan import Plan


class RowWeights:
    """Moves weights between routes and rows.

    Args:
        plan: sizes. device: of the tensors.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device

    def of_rows(self, handle: NvlinkHandle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        """Received weights [R, K] -> [num_places] of their rows."""
        rows = weights.new_zeros(num_places)
        self._move(handle, weights, rows, num_places, weights.numel(), to_rows=True)
        return rows

    def of_routes(self, handle: NvlinkHandle, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The gradient of that: [num_places] -> [R, K]."""
        routes = torch.empty_like(like)
        self._move(handle, grad, routes, len(grad), routes.numel(), to_rows=False)
        return routes

    def _move(
        self, handle: NvlinkHandle, source: torch.Tensor, target: torch.Tensor, places: int, routes: int, to_rows: bool
    ) -> None:
        # One of its own for each call: forward and backward may run in several threads.
        kernel = Kernel(spec_of(RowWeightsVariant(plan=self._plan, to_rows=to_rows)), self._device.index)
        args = kernel.args
        args.row_places, args.source_counts = handle.row_places.data_ptr(), handle.counts.source_counts.data_ptr()
        args.source, args.target = source.data_ptr(), target.data_ptr()
        args.routes, args.places = routes, min(places, handle.capacity)
        kernel.launch(BLOCKS, torch.cuda.current_stream(self._device).cuda_stream)
