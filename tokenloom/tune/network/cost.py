"""Time and memory of one dispatch or combine between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.errors import InvalidArgument
from tokenloom.plan import FP8_BLOCK
from tokenloom.tune.network.constants import PIECES, Constants
from tokenloom.tune.network.traffic import Cluster, Load

DTYPES = ("fp8", "bf16")
SCALE_BYTES = 4
HOP_US = (5.0, 10.0)
"""Time of the hop over NVLink in a low-latency call with a row per (token, node): a guess, not part of its time."""
LOW_LATENCY_TOKENS = 512
"""Most tokens of a call that counts as low latency. Public figures are of 128 tokens, and of 4096 and more."""
TURNS = 2
"""Calls whose rows have places of their own: a call uses those of the call before the last."""


@dataclass(frozen=True)
class Cost:
    """Microseconds of one call, of which the longest of the first four binds.

    Attributes:
        base_us: what a call takes that moves no bytes.
        nic_us: bytes at the busiest NIC, at its rate.
        nvlink_us: bytes at the busiest rank's NVLinks, at their rate.
        puts_us: puts of a rank, one after the other.
        time_us: the call.
    """

    base_us: float
    nic_us: float
    nvlink_us: float
    puts_us: float
    time_us: float

    @property
    def binds(self) -> str:
        """The term that a faster call would need less of: "start", "NIC", "NVLink" or "puts"."""
        terms = {"start": self.base_us, "NIC": self.nic_us, "NVLink": self.nvlink_us, "puts": self.puts_us}
        return max(terms, key=lambda name: terms[name])


def cost(constants: Constants, regime: str, load: Load, row_bytes: int, puts: float) -> Cost:
    """``A + max(t_nic, t_nvlink, m * puts) + κ * min(t_nic, t_nvlink)``.

    Args:
        constants: A, m, κ and the rates behind t_nic and t_nvlink.
    """
    of = constants.regime(regime)
    nic_us = load.nic_rows * row_bytes / of.nic_gbytes_per_s / 1e3
    nvlink_us = load.nvlink_rows * row_bytes / constants.nvlink_gbytes_per_s / 1e3
    puts_us = of.put_us * puts
    time_us = of.base_us + max(nic_us, nvlink_us, puts_us) + of.exposed_share * min(nic_us, nvlink_us)
    return Cost(of.base_us, nic_us, nvlink_us, puts_us, time_us)


def regime_of(num_tokens: int) -> str:
    """The kind of call for so many tokens, one of REGIMES."""
    return "low_latency" if num_tokens <= LOW_LATENCY_TOKENS else "high_throughput"


def puts_of(cluster: Cluster, row_per: str, regime: str, load: Load) -> float:
    """Puts of a rank: per (token, node) one for each other node and piece, otherwise one for each row."""
    return (cluster.num_nodes - 1.0) * PIECES[regime] if row_per == "node" else load.nic_rows


def row_bytes(dtype: str, hidden: int) -> int:
    """Bytes of a row: its values, and its scales if it is FP8. Ids and weights, 8 bytes a route, are not counted.

    The published figures, to which the constants were fitted, do not count them either.

    Raises:
        InvalidArgument: ``hidden`` is not a multiple of 128, which FP8 needs.
    """
    if dtype == "bf16":
        return 2 * hidden
    if hidden % FP8_BLOCK:
        raise InvalidArgument(f"hidden is {hidden}, expected a multiple of {FP8_BLOCK} for FP8; pass dtype='bf16'")
    return hidden + hidden // FP8_BLOCK * SCALE_BYTES


def staging_bytes(cluster: Cluster, row_per: str, num_tokens: int, dtype: str, hidden: int) -> int:
    """Bytes of a rank for rows that come in from other nodes, if every row that can come has its place.

    There are places for dispatched and for combined rows, which are BF16, and for TURNS calls of each. Per (token,
    node) that is ``2 * (N - 1) * T * (row + BF16 row)``: a rank only receives from the ranks of its rail.

    Args:
        num_tokens: T, the most tokens of a rank.
        dtype: one of DTYPES, of dispatched rows.
    """
    sources = cluster.num_nodes - 1
    if row_per != "node":
        sources *= cluster.ranks_per_node
    if row_per == "route":
        sources *= min(cluster.top_k, cluster.experts_per_rank)
    return TURNS * sources * num_tokens * (row_bytes(dtype, hidden) + row_bytes("bf16", hidden))


def require_budget(cluster: Cluster, num_tokens: int, dtype: str, hidden: int, budget_bytes: float) -> None:
    """Refuse a plan whose places, with a row per (token, node), exceed a budget.

    Raises:
        InvalidArgument: they do. The message has the bytes, and which settings fit.
    """
    needed = staging_bytes(cluster, "node", num_tokens, dtype, hidden)
    if needed <= budget_bytes:
        return
    ways = []
    if tokens := int(budget_bytes * num_tokens / needed):
        ways.append(f"--tokens {tokens}")
    if nodes := int(budget_bytes * (cluster.num_nodes - 1) / needed):
        ways.append(f"--nodes {nodes + 1}")
    if dtype != "fp8" and hidden % FP8_BLOCK == 0:
        fp8 = staging_bytes(cluster, "node", num_tokens, "fp8", hidden)
        ways += ["--dtype fp8"] if fp8 <= budget_bytes else []
    ways.append(f"--budget {-(-needed // MIB)}")
    raise InvalidArgument(
        f"{num_tokens} tokens a rank on {cluster.num_nodes} nodes need {needed / MIB:,.1f} MiB of a GPU for rows that "
        f"come in, the budget is {budget_bytes / MIB:,.1f} MiB; these fit: {', or '.join(ways)}"
    )


MIB = 1 << 20
