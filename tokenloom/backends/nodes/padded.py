"""Carrier of backend "padded": an all-to-all of fixed size between two kernels, over any network of NCCL.

The all-to-all is of the ranks of a rail. The first kernel of a call packs a region for each node, as large as all of a
rank's tokens could need. So the sizes of the all-to-all are known before the call: the host reads nothing, and CUDA
graphs can capture it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from tokenloom.backends.nodes.carrier import PADDED_CAPABILITIES, Carrier
from tokenloom.backends.nodes.launcher import NodesLauncher
from tokenloom.backends.nodes.memory import NodeBuffers
from tokenloom.backends.peers.backend import require_sms, why_no_kernels
from tokenloom.backends.peers.opening import Half, OpeningKernel
from tokenloom.backends.registration import Availability, Request
from tokenloom.kernels.common import MAX_BLOCKS, MAX_RANKS_OF_NODES, TURN_WORDS
from tokenloom.kernels.common.rail import Rail
from tokenloom.plan import Plan
from tokenloom.runtime.collectives import Transfer
from tokenloom.runtime.deferred_release import keep_until_idle
from tokenloom.runtime.openings import CallKind, Fields
from tokenloom.runtime.rank_group import RankGroup


class PaddedMemory(NodeBuffers):
    """Memory that the ranks of a node share. Regions that cross the network are tensors of one call each."""

    carrier = "collective"

    def reach_nodes(self, ranks: RankGroup) -> None:
        """Find the ranks of this rail."""
        size = self.ranks_per_node
        self._ranks = ranks
        self._counts = [int(rank % size == ranks.rank % size) for rank in range(ranks.num_ranks)]
        self._blocks = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=ranks.device)
        keep_until_idle(self, ranks.device, self._blocks)

    def tell(self, rail: Rail, traffic: int) -> None:
        """Tell a kernel what is the same in all calls."""
        rail.region_bytes, rail.turn_bytes = self.regions.region_bytes, 0
        rail.chunks, rail.chunk_rows = self.regions.chunks, self.regions.chunk_rows
        rail.blocks = self._blocks.data_ptr()

    def new_regions(self, rail: Rail) -> torch.Tensor:
        """Regions of a call, to send and to receive, uint8 [2, N, bytes]; and tell its kernels of them."""
        shape = (2, self.num_nodes, self.regions.region_bytes)
        regions = torch.empty(shape, dtype=torch.uint8, device=self._ranks.device)
        rail.put_from, rail.put_to = regions[0].data_ptr(), regions[1].data_ptr()
        return regions

    def exchange(self, regions: torch.Tensor) -> Transfer:
        """Start the all-to-all, behind the kernel that packs. Its sizes are the same in all calls, of either kind."""
        return self._ranks.start_all_to_all(
            regions[0], self._counts, self._counts, "rows between nodes", out=regions[1]
        )

    def describe(self) -> list[str]:
        """Lines for people."""
        sizes = self.sizes
        return [f"regions of a call: {sizes.call_bytes / 1e6:.1f} MB, of {sizes.widest} at most", *super().describe()]


class PaddedLauncher(NodesLauncher):
    """Launches the two kernels of calls. The collective begins behind the first, and the second waits for it.

    Args:
        plan, ranks, memory, num_sms: see :class:`NodesLauncher`.
    """

    def __init__(self, plan: Plan, ranks: RankGroup, memory: PaddedMemory, num_sms: int) -> None:
        super().__init__(plan, ranks, memory, num_sms)
        self._padded = memory
        # Weak: a half that was captured and given up is never received.
        self._under_way: WeakKeyDictionary[Half, tuple[torch.Tensor, Transfer]] = WeakKeyDictionary()

    def launch(
        self,
        kernel: OpeningKernel,
        kind: CallKind,
        dispatch: int,
        *,
        begins: Half | None = None,
        finishes: Half | None = None,
        **others: Any,
    ) -> None:
        """See :meth:`Launcher.launch`. Every kernel begins a call or finishes one."""
        regions = None
        if begins is not None:
            regions = self._padded.new_regions(kernel.args.rail)
        elif finishes is not None:
            regions, transfer = self._under_way.pop(finishes)
            transfer.wait()
        super().launch(kernel, kind, dispatch, begins=begins, finishes=finishes, **others)
        if finishes is not None and regions is not None and regions.is_cuda:  # made on the stream that sent
            regions.record_stream(torch.cuda.current_stream(regions.device))
        if begins is not None and regions is not None:
            self._under_way[begins] = regions, self._padded.exchange(regions)

    def _open(self, fields: Fields, status: int = 0) -> None:
        """The others' kernels and collectives, of no tokens."""
        empty, kind = self.empty_of(fields), CallKind(fields)
        assert empty.receiving_kernel is not None
        epoch = torch.empty(TURN_WORDS, dtype=torch.int32, device=self.ranks.device)
        half = Half(epoch, epoch.data_ptr(), empty.receiving_kernel)
        self.launch(empty.kernel, kind, kind.number, status=status, begins=half)
        self.finish(half)


def probe(request: Request) -> Availability:
    """Tell whether the kernels run on this rank, and collectives in the order of streams. A request has to name it.

    Raises:
        InvalidArgument: ``num_sms`` is more than this process may use.
    """
    if request.name != "padded":
        return Availability("padded", False, "only backend='padded' takes it")
    why_not = why_no_kernels(request, MAX_RANKS_OF_NODES)
    if why_not is None and request.transport != "nccl":
        why_not = f"it needs a process group over nccl, this one is over {request.transport}"
    if why_not is not None:
        return Availability("padded", False, why_not)
    require_sms(request.fixed_sms, request.device)
    return Availability("padded", True, "kernels within nodes, all-to-alls of fixed size over nccl between them")


PADDED = Carrier(
    name="padded",
    capabilities=PADDED_CAPABILITIES,
    probe=probe,
    memory=PaddedMemory,
    launcher=PaddedLauncher,
    always_two=True,
)
