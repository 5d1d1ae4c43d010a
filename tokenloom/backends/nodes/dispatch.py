"""Dispatches between nodes, of one kind each."""

from __future__ import annotations

from tokenloom.backends.nodes.launcher import NodesLauncher
from tokenloom.backends.peers.prepared import Shared, StagedDispatch
from tokenloom.backends.seam import DispatchKind, DispatchOptions
from tokenloom.kernels.common import Variant
from tokenloom.kernels.dispatch.launch_network import DispatchNetworkVariant

DISPATCHES = 0
"""The kind of traffic; kDispatches of device/transport/rail.cuh."""
FOR_COMBINE = ("node_rows", "forwarded_slots", "forwarded_rows")
"""Results that a combine needs besides, by their names there and as arguments."""


class NodesDispatch(StagedDispatch):
    """Dispatches between nodes of one kind.

    Args:
        shared: of the communicator; the launcher is a :class:`NodesLauncher`.
        kind, repeats, user_options: as in every prepared dispatch.
    """

    launcher: NodesLauncher

    def __init__(
        self,
        shared: Shared,
        kind: DispatchKind,
        repeats: bool = False,
        user_options: DispatchOptions | None = None,
    ) -> None:
        super().__init__(shared, kind, repeats, user_options)
        self.launcher.memory.tell(self.kernel.args.rail, DISPATCHES)

    def variant(self, part: str, *, staged: bool = False) -> Variant:
        memory, options = self.launcher.memory, self.options
        variant = DispatchNetworkVariant(
            self.shared.plan,
            memory.ranks_per_node,
            layout=options.layout,
            x_dtype=self.kind.x_dtype,
            quantize=self.quantize,
            scale_layout=options.scale_layout,
            recipe=options.recipe,
            part=part,
            carrier=memory.carrier,
        )
        return memory.compiled(variant)

    def further_words(self) -> dict[str, int]:
        memory, most = self.launcher.memory, self.shared.plan.max_tokens_per_rank
        nodes = memory.num_nodes
        return dict(zip(FOR_COMBINE, (most * nodes, nodes * most * memory.ranks_per_node, nodes), strict=True))
