"""Carrier of backend "gin": kernels that put rows to other nodes by themselves, with NCCL's GIN, and its window."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tokenloom.backends.nodes.carrier import GIN_CAPABILITIES, Carrier
from tokenloom.backends.nodes.gin_memory import GinMemory
from tokenloom.backends.nodes.launcher import NodesLauncher
from tokenloom.backends.nodes.memory import NodeBuffers
from tokenloom.backends.nodes.nccl import library_with_headers
from tokenloom.backends.peers.backend import require_sms, why_no_kernels
from tokenloom.backends.registration import Availability, Request
from tokenloom.env import nccl_plugin
from tokenloom.errors import TokenloomError
from tokenloom.jit import compiler, nccl_headers
from tokenloom.jit.compiler import KernelSpec, Prelude
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import MAX_RANKS_OF_NODES, Variant
from tokenloom.kernels.common.rail import STATE_BYTES, TRAFFICS, Rail
from tokenloom.kernels.signals.launch import SignalsVariant
from tokenloom.runtime.deferred_release import wait_for
from tokenloom.runtime.rank_group import RankGroup

RDMA_CARDS = Path("/sys/class/infiniband")


class NodeMemory(NodeBuffers):
    """Memory that the ranks of a node share, with the window that ranks of other nodes put to.

    Attributes:
        gin: the window, with a device communicator. ``regions`` says what lies where in it.
    """

    carrier = "gin"

    def reach_nodes(self, ranks: RankGroup) -> None:
        """Make the window. No rank has buffers before all have reset their signals."""
        self.gin = GinMemory(
            ranks, self.regions.window_bytes, contexts=TRAFFICS, signals=self.num_nodes, state_bytes=STATE_BYTES
        )
        try:
            self._reset_signals(ranks.device)
        except Exception:
            self.close()
            raise

    def _reset_signals(self, device: torch.device) -> None:
        """An earlier communicator on the same process group may have raised them."""
        kernel = Kernel(SignalsVariant().spec().behind(self.gin.prelude), device.index)
        kernel.args.comm, kernel.args.signals = self.gin.comm, self.num_nodes
        kernel.launch(1, torch.cuda.current_stream(device).cuda_stream)
        wait_for(device)

    def compiled(self, variant: Variant) -> Variant:
        """The variant behind NCCL's headers."""
        return BehindNccl(variant, self.gin.prelude)

    def tell(self, rail: Rail, traffic: int) -> None:
        """Tell a kernel of the network, for one kind of calls."""
        gin = self.gin
        self.regions.fill(rail, traffic, comm=gin.comm, window=gin.window, base=gin.address, state=gin.state)

    def keep(self) -> None:
        """Late ranks may still put to the window."""
        self.gin.keep()

    def close(self) -> None:
        """Give back the window. What NCCL does not take stays until the process ends."""
        with suppress(TokenloomError):
            self.gin.close()

    def describe(self) -> list[str]:
        """Lines for people."""
        window = f"{self.gin.num_bytes / 1e6:.1f} MB, of {self.sizes.widest} at most"
        return [f"GIN of type {self.gin.type_name}, window for {self.num_nodes} nodes: {window}", *super().describe()]


@dataclass(frozen=True)
class BehindNccl:
    """A variant whose source comes behind NCCL's headers."""

    variant: Variant
    prelude: Prelude

    def __str__(self) -> str:
        return str(self.variant)

    def spec(self) -> KernelSpec:
        """Describe the kernel: its source, and how to launch it."""
        return self.variant.spec().behind(self.prelude)


def probe(request: Request) -> Availability:
    """Tell whether the kernels run on this rank. A request that does not name GIN loads no headers of NCCL's.

    Raises:
        InvalidArgument: ``num_sms`` is more than this process may use.
    """
    if "gin" not in (request.name, request.between_nodes):
        return Availability("gin", False, "only transport='gin' takes it")
    why_not = why_no_kernels(request, MAX_RANKS_OF_NODES)
    if why_not is not None:
        return Availability("gin", False, why_not)
    require_sms(request.fixed_sms, request.device)
    return examine(request.device)


def examine(device: torch.device) -> Availability:
    """Tell whether GIN can carry rows of tensors on this device.

    Returns:
        ``why`` says over which cards, or what is missing, and names a version of NCCL's that nobody has checked. Of
        which type GIN is, NCCL tells only a communicator. ``facts["headers"]`` are NCCL's headers, or why there are
        none that kernels could be compiled from.
    """
    if device.type != "cuda":
        return _missing(f"it needs a GPU, the tensors are on {device.type}", "not looked for: there is no GPU")
    if not (dist.is_available() and dist.is_nccl_available()):
        return _missing("NCCL is not part of this torch", "not looked for: NCCL is not part of this torch")
    try:
        _, headers = library_with_headers()
        unchecked = nccl_headers.why_unchecked(headers.version)
        note = f"; {unchecked}" if unchecked else ""
        found = f"{nccl_headers.dotted(headers.version)} in {headers.nccl}{note}"
        headers.in_memory()
        compiler.load_nvrtc()
    except (TokenloomError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return _missing(f"NCCL's headers cannot be used, or NVRTC is missing: {reason}", f"not usable: {reason}")
    plugin = nccl_plugin()
    over = [*cards(), *([f"plugin {plugin}"] if plugin else [])]
    if not over:
        return _missing(f"no RDMA card in {RDMA_CARDS}, and no plugin of NCCL's is named", found)
    return Availability("gin", True, f"over {', '.join(over)}{note}", {"headers": found})


def cards() -> list[str]:
    """List the names of this host's RDMA cards."""
    return sorted(each.name for each in RDMA_CARDS.iterdir()) if RDMA_CARDS.is_dir() else []


def _missing(why: str, headers: str) -> Availability:
    return Availability("gin", False, why, {"headers": headers})


GIN = Carrier(
    name="gin",
    capabilities=GIN_CAPABILITIES,
    probe=probe,
    memory=NodeMemory,
    launcher=NodesLauncher,
)
