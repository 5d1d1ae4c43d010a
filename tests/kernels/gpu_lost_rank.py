"""A communicator of backend "network" over NCCL that loses its last rank between two calls; see gpu_nodes.py."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import tokenloom as tl
from tests.kernels.gpu_communicator import Member
from tests.support.cases import Case, make_problem
from tokenloom.runtime.processes import RankContext

CASE = Case("lost", "unequal tokens", hidden=256, tokens=(7, 0, 5, 6), top_k=4, unused=0.2)
DEADLINE_S, AWAY_S = 10.0, 20.0
"""Of handshakes, and how long a late rank is away."""


def loses_a_rank(member: Member) -> None:
    """All others name it, in the handshake of the next call, and close. It is "late", or its process is "gone"."""
    options, problem = member.options, make_problem(CASE, member.options.num_ranks)
    sizes = {name: value for name, value in vars(problem.plan).items() if name != "num_ranks"}
    comm = tl.Communicator(
        dist.group.WORLD,
        backend="network",
        ranks_per_node=options.ranks_per_node,
        open_timeout_s=DEADLINE_S,
        **sizes,
    )
    context = RankContext(options.rank, options.num_ranks, dist.group.WORLD, member.device, None)  # type: ignore[arg-type]
    arguments = problem.arguments(context)
    routed = comm.dispatch(*arguments)
    comm.combine(routed.tokens, routed, mode="per_node")
    torch.cuda.synchronize()
    member.meet()
    if options.rank == options.num_ranks - 1:
        time.sleep(AWAY_S if options.scenario == "late" else 0)
        return
    began = time.monotonic()
    try:
        comm.dispatch(*arguments)
    except tl.PeerTimeout as error:
        member.report |= {"peers": list(error.peers), "nodes": list(error.nodes), "phase": error.phase}
    member.report["after_s"] = time.monotonic() - began
    began = time.monotonic()
    comm.close()  # a kernel of NCCL still waits for the lost rank
    member.report["closed_in_s"] = time.monotonic() - began
