"""Combines between nodes, of one kind each: sums of a node cross the network, one for each (token, node)."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenloom.backends.handshake import combine_fields, gradient_fields
from tokenloom.backends.nodes.dispatch import FOR_COMBINE
from tokenloom.backends.nodes.launcher import NodesLauncher
from tokenloom.backends.peers.buffers import aligned, require_aligned, require_bulk
from tokenloom.backends.peers.combine import CombineHalf, set_arguments, set_constant_arguments
from tokenloom.backends.peers.handle import PeerHandle
from tokenloom.backends.peers.opening import HALVES, Half, Launched, require_no_host_read
from tokenloom.backends.seam import CombineKind, CombineOptions, Sent
from tokenloom.errors import InvalidArgument
from tokenloom.kernels.combine.launch import CALL_FIELDS
from tokenloom.kernels.combine.launch_network import CombineNetworkVariant
from tokenloom.kernels.common import TURN_WORDS, TURNS
from tokenloom.runtime.deferred_release import keep_until_idle
from tokenloom.runtime.openings import CallKind, Fields

COMBINES = 1
"""The kind of traffic; kCombines of device/transport/rail.cuh."""


class NodesCombine:
    """Combines between nodes of one kind.

    Args:
        launcher: of the communicator.
        kind: of all calls. number: of the dispatch that the first of them belongs to.
        checked: the host reads the outcome of every call before it returns.
        fields: what the call means to all ranks, where it is no combine of a user's.

    Attributes:
        kernel, receiving_kernel: as :class:`Empty` has them.
    """

    is_stale = False

    def __init__(
        self,
        launcher: NodesLauncher,
        kind: CombineKind,
        number: int,
        checked: bool = False,
        fields: Fields | None = None,
    ) -> None:
        options, layout, y_dtype = kind.options, kind.layout, kind.y_dtype
        split, width = kind.split, kind.width
        plan, memory = launcher.plan, launcher.memory
        if not options.per_node:
            raise InvalidArgument(f"sums between nodes are per node here, not {options.mode}; use backend='network'")
        self._width = plan.hidden if width is None else width
        for dtype in (y_dtype, options.wire_dtype, options.out_dtype):
            require_bulk(self._width, dtype)
        if width is None:
            memory.require_room(options.wire_dtype)
        self._launcher, self._options, self._checked = launcher, options, checked
        self._like = torch.empty(0, dtype=options.out_dtype, device=launcher.ranks.device)
        fields = combine_fields(number, options, width) if fields is None else fields
        self._call_kind = CallKind({**fields, **HALVES} if split else fields)
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
        self.receiving_kernel = None
        if split:
            self.receiving_kernel = launcher.new_kernel(memory.compiled(replace(variant, part="receive")))
        set_constant_arguments(launcher, self.kernel)
        args = self.kernel.args
        args.combine_turns = TURNS
        args.peers, args.combine_recv = memory.partials.peers.data_ptr(), memory.partials.layout.offset("partials")
        args.partials_bytes = memory.sizes.partials_bytes
        args.turn_bytes = memory.num_nodes * args.partials_bytes
        memory.tell(args.rail, COMBINES)

    def send(
        self,
        handle: PeerHandle,
        rows: torch.Tensor,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        stream: int | None = None,
        capacity: int | None = None,
    ) -> Sent[torch.Tensor]:
        """Put the kernel on the current stream; see :class:`tokenloom.backends.seam.PreparedCombine`.

        Args:
            capacity: places of the rows, where they are not those of the dispatch.
        """
        launcher = self._launcher
        if self._checked and stream is None:
            require_no_host_read(True, "checked=True")
        if out is None:
            out = self._like.new_empty(handle.num_tokens, self._width)
        require_aligned(out, "out")
        rows, factors = aligned(rows), 0
        if self._options.weighted:
            factors = handle.weights_address if weights is None else weights.data_ptr()
        places = capacity or handle.capacity
        set_arguments(self.kernel, handle, rows.data_ptr(), out, places, handle.given_ids, factors)
        for name in FOR_COMBINE:
            setattr(self.kernel.args, name, handle.address(name))
        if stream is not None and self.receiving_kernel is None:
            launcher.launch_ready(self.kernel, self._call_kind, handle.number, stream)
        elif self.receiving_kernel is not None:
            epoch = torch.empty(TURN_WORDS, dtype=torch.int32, device=out.device)
            # What the dispatch has left is read at home too, when its user may have let go of it.
            half = Half((epoch, handle, out), epoch.data_ptr(), self.receiving_kernel)
            launcher.launch(self.kernel, self._call_kind, handle.number, begins=half)
            return CombineHalf(launcher, half, out, self._checked)
        else:
            launcher.launch(self.kernel, self._call_kind, handle.number)
        if self._checked:
            launcher.settle(0)
        return Launched((out,))


def gradient_of_weights(launcher: NodesLauncher, layout: str, width: int, split: bool, checked: bool) -> NodesCombine:
    """Make the combine that brings gradients of weights home, as rows of ``width`` float32."""
    fp32, number = torch.float32, launcher.num_calls
    kind = CombineKind(layout, fp32, CombineOptions(False, fp32, fp32, False, "per_node"), split=split, width=width)
    return NodesCombine(launcher, kind, number, checked, gradient_fields(number, "gradient of weights"))


def empty_combine(launcher: NodesLauncher, split: bool) -> NodesCombine:
    """Make a combine without rows, whose arguments never change."""
    plan, bfloat16 = launcher.plan, torch.bfloat16
    options = CombineOptions(False, bfloat16, bfloat16, False, "per_node")
    combine = NodesCombine(launcher, CombineKind("slots", bfloat16, options, split=split), -1)
    most = plan.num_ranks * (plan.num_ranks + plan.num_experts)  # of counts; the others are fewer
    zeros = torch.zeros(most, dtype=torch.int32, device=launcher.ranks.device)
    keep_until_idle(launcher, launcher.ranks.device, zeros)
    nothing = zeros.data_ptr()
    CALL_FIELDS.write(combine.kernel.args, CALL_FIELDS.offset, *[nothing] * 8, 0, 0, False)
    for name in FOR_COMBINE:
        setattr(combine.kernel.args, name, nothing)
    return combine
