"""What ``tokenloom doctor`` finds of other nodes: how ranks would lie, network cards, NCCL, and whether GIN works."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from tokenloom.backends.gin import availability
from tokenloom.env import nccl_plugin
from tokenloom.runtime.topology import Place, Topology, find_nodes, pretended

PROCESSES = 4
"""Ranks of the example, where there are not two GPUs."""


def examine(nccl_library: str, peer_access: list[list[bool]]) -> dict[str, str]:
    """What there is of each thing that rows need to reach other nodes, or why there is none.

    Args:
        nccl_library: the version of NCCL that torch has loaded, or why there is none.
        peer_access: [i][j] is whether GPU i reaches the memory of GPU j.
    """
    gin = availability.examine(torch.device("cuda"))
    cards = [_card(availability.RDMA_CARDS / each) for each in availability.cards()]
    return {
        "nodes and rails": _nodes(peer_access),
        "ranks_per_node": _pretended(len(peer_access)),
        "network cards": "\n".join(cards) or f"none in {availability.RDMA_CARDS}",
        "NCCL plugin": nccl_plugin() or "none: neither NCCL_GIN_PLUGIN nor NCCL_NET_PLUGIN names one",
        "NCCL library": nccl_library,
        "NCCL headers": gin.facts["headers"],
        "GIN": (
            f"possible {gin.why}; NCCL tells its type when a communicator is made, and kernels take PROXY alone"
            if gin.works
            else f"no: {gin.why}"
        ),
    }


def _nodes(peer_access: list[list[bool]]) -> str:
    """The nodes of one rank for each GPU, by the rule that a Communicator has."""
    host = socket.gethostname()
    places = [
        Place(host, str(gpu), tuple(str(peer) for peer, reached in enumerate(reach) if not reached))
        for gpu, reach in enumerate(peer_access)
    ]
    if places:
        nodes = find_nodes(places)
        doubt = f"; {nodes.doubt}" if nodes.num_nodes == 1 and nodes.doubt else ""
        found = f"a rank on each GPU of this host: {nodes.describe()}{doubt}"
    else:
        found = "1 node: all processes of this host, on the CPU"
    return f"{found}. One process sees no other host; tokenloom check-network under torchrun does"


def _pretended(num_gpus: int) -> str:
    """What each ``ranks_per_node`` makes of the ranks of this host."""
    num_ranks, kind = (num_gpus, "GPUs") if num_gpus > 1 else (PROCESSES, "processes")
    return "\n".join(
        f"{each}: {num_ranks} {kind} as {Topology(pretended(num_ranks, each).node_of).describe()}"
        for each in range(1, num_ranks)
        if num_ranks % each == 0
    )


def _card(folder: Path) -> str:
    """A card, with the kind, rate and state of each port, as far as the kernel tells them."""
    ports = []
    for port in sorted(folder.glob("ports/*")):
        told = [
            (port / name).read_text().strip() for name in ("link_layer", "rate", "state") if (port / name).is_file()
        ]
        ports.append(f"port {port.name}: {', '.join(told)}")
    return f"{folder.name} ({'; '.join(ports)})" if ports else folder.name
