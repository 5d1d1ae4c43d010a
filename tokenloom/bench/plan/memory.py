"""What backends hold for calls between nodes, in the tables of ``tokenloom plan``."""

from __future__ import annotations

from rich.table import Table

from tokenloom.backends.gin.sizes import NodeSizes
from tokenloom.bench.plan.tables import digits, new_table
from tokenloom.plan import Plan
from tokenloom.tune.network.cost import MIB
from tokenloom.tune.network.traffic import Cluster

CARRIERS = {"gin": "gin", "padded": "collective"}
"""Backends that make all their memory when a communicator is made, and what carries their rows between nodes."""


def memory_table(cluster: Cluster, hidden: int, num_tokens: int, budget_bytes: float) -> Table:
    """What each backend holds for bfloat16 tokens, from the sizes that it makes its memory by.

    Args:
        num_tokens: max_tokens_per_rank.
        budget_bytes: for the most tokens that fit, which may be more than ``num_tokens``.
    """
    budget = int(budget_bytes)
    plan = Plan(cluster.num_ranks, cluster.padded_experts, hidden, cluster.top_k, num_tokens)
    title = f"memory of a GPU, max_tokens_per_rank={num_tokens}, BF16"
    headers = ("other nodes\nMiB", "own node\nMiB", "in all\nMiB", "most tokens\nthat fit")
    table = new_table(title, "backend", *headers)
    for backend, carrier in CARRIERS.items():
        sizes = NodeSizes(plan, cluster.num_nodes, carrier)
        parts = (sizes.carried_bytes, sizes.node_bytes, sizes.total_bytes)
        most = sizes.most_tokens(budget, limit=budget)  # a token takes a byte or more
        table.add_row(backend, *(digits(part / MIB) for part in parts), f"{most:,}")
    return table
