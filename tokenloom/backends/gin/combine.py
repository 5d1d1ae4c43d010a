"""Combines between nodes, of one kind each: sums of a node cross the network, one for each (token, node)."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenloom.backends.base import CombineOptions
from tokenloom.backends.gin.dispatch import FOR_COMBINE
from tokenloom.backends.gin.launcher import NodesLauncher
from tokenloom.backends.handshake import combine_fields, gradient_fields
from tokenloom.backends.nvlink.buffers import aligned, require_aligned, require_bulk
from tokenloom.backends.nvlink.combine import point, point_once
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import HALVES, Half
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.combine.launch import CALL_FIELDS
from tokenloom.kernels.combine.launch_network import CombineNetworkVariant
from tokenloom.kernels.common import TURNS
from tokenloom.runtime.deferred_release import keep_until_idle
from tokenloom.runtime.openings import CallKind, Fields

COMBINES = 1
"""The kind of traffic; kCombines of device/transport/rail.cuh."""


class NodesCombine:
    """Combines between nodes of one kind.

    Args:
        launcher: of the communicator.
        number: of the dispatch that the first of them belongs to.
        layout: of the dispatch. y_dtype: of the rows.
        options: of the combine. split: it is made in halves.
        width: values of a row, where they are not those of a token.
        fields: what the call means to all ranks, where it is no combine of a user's.

    Attributes:
        is_stale, out_dtype: as usual combines have them.
        kernel, receiving_kernel: as :class:`Empty` has them.
    """

    is_stale = False

    def __init__(
        self,
        launcher: NodesLauncher,
        number: int,
        layout: str,
        y_dtype: torch.dtype,
        options: CombineOptions,
        split: bool = False,
        width: int | None = None,
        fields: Fields | None = None,
    ) -> None:
        plan, memory = launcher.plan, launcher.memory
        if not options.per_node:
            raise InvalidArgument(f"sums between nodes are per node here, not {options.mode}; use backend='network'")
        self._width = plan.hidden if width is None else width
        for dtype in (y_dtype, options.wire_dtype, options.out_dtype):
            require_bulk(self._width, dtype)
        if width is None:
            memory.require_room(options.wire_dtype)
        self._launcher, self._options, self.out_dtype = launcher, options, options.out_dtype
        self._like = torch.empty(0, dtype=self.out_dtype, device=launcher.ranks.device)
        fields = combine_fields(number, options) if fields is None else fields
        self._kind = CallKind({**fields, **HALVES} if split else fields)
        variant = CombineNetworkVariant(
            plan,
            memory.ranks_per_node,
            layout="expert" if layout == "slots" else layout,
            y_dtype=y_dtype,
            wire_dtype=options.wire_dtype,
            out_dtype=options.out_dtype,
            hidden=width,
            weights="received" if options.weighted else "none",
            part="send" if split else "whole",
            carrier=memory.carrier,
        )
        self.kernel = launcher.new_kernel(memory.compiled(variant))
        receiving = memory.compiled(replace(variant, part="receive"))
        self.receiving_kernel = launcher.new_kernel(receiving) if split else None
        point_once(launcher, self.kernel)
        args = self.kernel.args
        args.combine_turns = TURNS
        args.peers, args.combine_recv = memory.partials.peers.data_ptr(), memory.partials.layout.offset("partials")
        args.partials_bytes = memory.sizes.partials_bytes
        args.turn_bytes = memory.num_nodes * args.partials_bytes
        memory.tell(args.rail, COMBINES)

    def launch(
        self,
        handle: NvlinkHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        out: torch.Tensor | None,
        stream: int | None = None,
        capacity: int | None = None,
    ) -> tuple[torch.Tensor, Half | None]:
        """Put the kernel on the current stream: (result [T, H], what the second half will need).

        Args:
            out: tensor for the result, or None for a new one.
            stream: what :meth:`Launcher.ready` has just given, or None.
            capacity: places of the rows, where they are not those of the dispatch.
        """
        launcher = self._launcher
        if out is None:
            out = self._like.new_empty(handle.num_tokens, self._width)
        require_aligned(out, "out")
        rows, factors = aligned(rows), 0
        if self._options.weighted:
            factors = handle.weights_address if weights is None else weights.data_ptr()
        point(self.kernel, handle, rows, out, capacity or handle.capacity, handle.given_ids, factors)
        for name in FOR_COMBINE:
            setattr(self.kernel.args, name, handle.address(name))
        if stream is not None:
            launcher.launch_ready(self.kernel, self._kind, handle.number, stream)
            return out, None
        half = None
        if self.receiving_kernel is not None:
            epoch = torch.empty(2, dtype=torch.int32, device=out.device)
            # What the dispatch has left is read at home too, when its user may have let go of it.
            half = Half((epoch, handle, out), epoch.data_ptr(), self.receiving_kernel)
        launcher.launch(self.kernel, self._kind, handle.number, begins=half)
        return out, half


def gradient_of_weights(launcher: NodesLauncher, layout: str, width: int, split: bool) -> NodesCombine:
    """What brings gradients of weights home, as rows of so many float32."""
    fp32, number = torch.float32, launcher.num_calls
    options, fields = (
        CombineOptions(False, fp32, fp32, False, "per_node"),
        gradient_fields(number, "gradient of weights"),
    )
    return NodesCombine(launcher, number, layout, fp32, options, split, width, fields)


def empty_combine(launcher: NodesLauncher, split: bool) -> NodesCombine:
    """A combine without rows, whose arguments never change."""
    plan, bfloat16 = launcher.plan, torch.bfloat16
    options = CombineOptions(False, bfloat16, bfloat16, False, "per_node")
    combine = NodesCombine(launcher, -1, "slots", bfloat16, options, split)
    most = plan.num_ranks * (plan.num_ranks + plan.num_experts)  # of counts; the others are fewer
    zeros = torch.zeros(most, dtype=torch.int32, device=launcher.ranks.device)
    keep_until_idle(launcher, launcher.ranks.device, zeros)
    nothing = zeros.data_ptr()
    CALL_FIELDS.write(combine.kernel.args, CALL_FIELDS.offset, *[nothing] * 8, 0, 0, False)
    for name in FOR_COMBINE:
        setattr(combine.kernel.args, name, nothing)
    return combine
