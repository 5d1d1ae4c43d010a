"""Nodes of a group, from where its ranks say they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenloom.errors import InvalidArgument
from tokenloom.runtime import topology
from tokenloom.runtime.topology import Place, Topology, checked_ranks_per_node, find_nodes, pretended


def on_hosts(hosts: str) -> Topology:
    return find_nodes([Place(host) for host in hosts])


def test_hosts_are_nodes() -> None:
    """Rank n * G + g is on node n and rail g."""
    found = on_hosts("aabbcc")
    assert found.node_of == (0, 0, 1, 1, 2, 2)
    assert found.nodes == ((0, 1), (2, 3), (4, 5))
    assert (found.num_nodes, found.ranks_per_node, found.why_no_rails) == (3, 2, None)
    assert found.describe() == "3 nodes of 2; 2 rails of 3"


def test_nodes_are_numbered_by_their_lowest_ranks() -> None:
    """Not by the names of hosts: sums over nodes have an order, which a new name may not change."""
    assert on_hosts("zzaa").node_of == (0, 0, 1, 1)


def test_one_node() -> None:
    """As nearly always; nothing is said of rails."""
    assert on_hosts("aaaa") == Topology.together(4)
    assert on_hosts("aaaa").describe() == "1 node"


def test_own_place_on_a_cpu() -> None:
    """Ranks of one host are together, and no GPU is asked."""
    place = Place.own(torch.device("cpu"))
    assert place == Place(topology.host_identity())
    assert find_nodes([place] * 3) == Topology.together(3)


def test_unequal_nodes_have_no_rails() -> None:
    """The message names two nodes and their ranks. Nodes are known all the same, for the order of sums."""
    found = on_hosts("aaab")
    assert found.node_of == (0, 0, 0, 1)
    assert found.why_no_rails == (
        "nodes have unequal numbers of ranks: node 0 has ranks 0, 1, 2, node 1 has rank 3; start as many ranks on "
        "each node"
    )
    assert "no rails: nodes have unequal" in found.describe()


def test_ranks_out_of_order_have_no_rails() -> None:
    """Dealt to hosts in turns, as some launchers do: places in a node cannot be computed from ranks."""
    why = on_hosts("abab").why_no_rails
    assert why is not None
    assert why.startswith("ranks are not in the order of nodes: rank 1 is on node 1, expected on node 0;")


def test_gpus_out_of_reach_split_a_host() -> None:
    """Two pairs of GPUs, each linked within: two nodes on one host."""
    pairs = [Place("a", gpu, away) for gpu, away in zip("wxyz", [("y", "z")] * 2 + [("w", "x")] * 2, strict=True)]
    assert find_nodes(pairs).node_of == (0, 0, 1, 1)


def test_gpus_that_nobody_sees_are_together() -> None:
    """Processes that see one GPU each cannot ask for the others'."""
    assert find_nodes([Place("a", gpu) for gpu in "wxyz"]) == Topology.together(4)


@pytest.mark.parametrize(
    ("places", "first", "second"),
    [
        (
            [Place("a", "x", ("z",)), Place("a", "y"), Place("a", "z", ("x",))],
            "rank 0 sees ranks 0, 1 ",
            "rank 1 sees",
        ),
        ([Place("a", "x", ("y",)), Place("a", "y")], "rank 0 sees rank 0 ", "rank 1 sees ranks 0, 1"),
    ],
    ids=["in a row", "one way"],
)
def test_ranks_that_see_different_nodes(places: list[Place], first: str, second: str) -> None:
    """Which ranks, and what they see. Hosts are the nodes then, so that sums still have an order."""
    found = find_nodes(places)
    assert found.node_of == (0,) * len(places)
    assert found.why_no_rails is not None
    assert first in found.why_no_rails
    assert second in found.why_no_rails


def test_pretended_nodes() -> None:
    found = pretended(6, 2)
    assert found.node_of == (0, 0, 1, 1, 2, 2)
    assert found.describe() == "3 nodes of 2, as ranks_per_node says; 2 rails of 3"


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_ranks_per_node_is_a_positive_integer(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"ranks_per_node is .*, expected a positive integer, or None"):
        checked_ranks_per_node(bad, 4)


def test_ranks_per_node_divides_the_group() -> None:
    checked_ranks_per_node(None, 5)
    checked_ranks_per_node(2, 4)
    with pytest.raises(InvalidArgument, match="ranks_per_node is 3, expected a divisor of 4, the ranks"):
        checked_ranks_per_node(3, 4)
