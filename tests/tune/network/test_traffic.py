"""Rows between nodes: the closed form against simulated ranks, the count against loops over every token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.errors import InvalidArgument
from tokenloom.tune.network.traffic import ROWS_PER, Cluster, Counted, counted, expected

TOKENS = 1024
DEVIATION = 1.5
"""More than the standard deviation of any number of rows of a token here."""


def draw(cluster: Cluster, num_tokens: int, seed: int = 0) -> list[np.ndarray]:
    """K different experts of each token, on nodes that are drawn first if there is a limit; all equally likely."""
    generator = np.random.default_rng(seed)
    ids = []
    for _ in range(cluster.num_ranks):
        nodes = generator.random((num_tokens, cluster.num_nodes)).argsort(1)[:, : cluster.chosen_nodes]
        places = generator.random((num_tokens, nodes.shape[1] * cluster.experts_per_node)).argsort(1)
        node, place = np.divmod(places[:, : cluster.top_k], cluster.experts_per_node)
        ids.append(np.take_along_axis(nodes, node, 1) * cluster.experts_per_node + place)
    return ids


@pytest.mark.parametrize(
    ("nodes", "per_node", "per_rank", "per_route", "over_nvlink"),
    [
        (2, 1.00, 3.26, 4.0, 5.7),
        (4, 2.71, 5.45, 6.0, 6.4),
        (8, 4.63, 6.72, 7.0, 6.7),
        (16, 6.12, 7.40, 7.5, 6.9),
        (32, 7.04, 7.75, 7.75, 7.0),
    ],
)
def test_expected_rows_are_those_of_the_design(
    nodes: int, per_node: float, per_rank: float, per_route: float, over_nvlink: float
) -> None:
    """A row per (token, node) is why nodes are visited once: 3.3 to 1.1 times fewer rows than per (token, rank)."""
    cluster = Cluster(nodes, 8, 256, 8)
    found = {row_per: expected(cluster, row_per, 1) for row_per in ROWS_PER}
    rows = {"node": per_node, "rank": per_rank, "route": per_route}
    assert {row_per: load.rows_per_token for row_per, load in found.items()} == pytest.approx(rows, abs=0.005)
    assert found["node"].nvlink_rows == pytest.approx(over_nvlink, abs=0.06)


@pytest.mark.parametrize("cluster", [Cluster(n, 8, 256, 8) for n in (2, 4, 8)] + [Cluster(8, 8, 256, 8, 4)], ids=str)
def test_simulated_ranks_send_what_is_expected(cluster: Cluster) -> None:
    """1.00, 2.71 and 4.63 rows a token, on 16, 32 and 64 ranks that draw their routing; 3.18 if it is limited."""
    found = counted(cluster, draw(cluster, TOKENS))
    error = 5 * DEVIATION / (cluster.num_ranks * TOKENS) ** 0.5
    for row_per in ROWS_PER:
        want, got = expected(cluster, row_per, TOKENS), found[row_per]
        assert got.load.rows_per_token == pytest.approx(want.rows_per_token, abs=error)
        over_nvlink = got.nvlink_sent.sum() / got.num_tokens
        assert over_nvlink == pytest.approx(want.nvlink_rows / TOKENS, abs=error)
        assert got.load.nic_rows == pytest.approx(want.nic_rows, abs=5 * DEVIATION * (2 * TOKENS) ** 0.5)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Cluster, list[np.ndarray]]:
    """Any routing: unused places, repeated experts, ranks with few tokens or none."""
    nodes, per_node, per_rank = (draw(st.integers(1, most)) for most in (5, 3, 3))
    experts = nodes * per_node * per_rank
    top_k = draw(st.integers(1, min(5, experts)))
    token = st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k)
    tokens = [draw(st.lists(token, max_size=3)) for _ in range(nodes * per_node)]
    ids = [np.array(each, dtype=np.int64).reshape(-1, top_k) for each in tokens]
    return Cluster(nodes, per_node, experts, top_k), ids


@settings(max_examples=150, deadline=None)
@given(routings())
def test_counts_are_those_of_every_token(routing: tuple[Cluster, list[np.ndarray]]) -> None:
    """Sent and received, over NICs and NVLinks, as a loop over tokens finds them."""
    cluster, ids = routing
    for row_per, found in counted(cluster, ids).items():
        want = by_hand(cluster, ids, row_per)
        for name in ("nic_sent", "nic_received", "nvlink_sent", "nvlink_received"):
            assert getattr(found, name).tolist() == getattr(want, name).tolist(), f"{name} per {row_per}"


def by_hand(cluster: Cluster, ids: list[np.ndarray], row_per: str) -> Counted:
    shape = (cluster.num_nodes, cluster.ranks_per_node)
    nic_sent, nic_received, nvlink_sent, nvlink_received = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    for source, tokens in enumerate(ids):
        home = divmod(source, cluster.ranks_per_node)
        for token in tokens.tolist():
            ranks = [divmod(each // cluster.experts_per_rank, cluster.ranks_per_node) for each in token if each >= 0]
            if row_per != "route":
                ranks = list(set(ranks))
            if row_per == "node":
                for node in {node for node, _ in ranks} - {home[0]}:
                    nic_sent[home] += 1
                    nic_received[node, home[1]] += 1
            for rank in ranks:
                # Where the row is before it goes to its rank over NVLink: on its rail, or at home.
                before = (rank[0], home[1]) if row_per == "node" else home
                if before[0] != rank[0]:
                    nic_sent[before] += 1
                    nic_received[rank] += 1
                elif before != rank:
                    nvlink_sent[before] += 1
                    nvlink_received[rank] += 1
    return Counted(sum(map(len, ids)), nic_sent, nic_received, nvlink_sent, nvlink_received)


@settings(max_examples=150, deadline=None)
@given(routings())
def test_no_routing_sends_more_than_a_row_to_each_other_node(routing: tuple[Cluster, list[np.ndarray]]) -> None:
    """Never more than min(nodes - 1, routes) a token, however it is routed; and never more than finer rows."""
    cluster, ids = routing
    found = counted(cluster, ids)
    for source, tokens in enumerate(ids):
        at = divmod(source, cluster.ranks_per_node)
        most = sum(min(cluster.num_nodes - 1, int((token >= 0).sum())) for token in tokens)
        assert found["node"].nic_sent[at] <= most
        assert found["node"].nic_sent[at] <= found["rank"].nic_sent[at] <= found["route"].nic_sent[at]


def test_imbalance_is_the_busiest_over_the_average() -> None:
    """All tokens of rank 1 go to rank 2: of 4 NICs one sends all, of 2 rails one, and of NVLinks one."""
    cluster = Cluster(2, 2, 4, 1)
    none = np.empty((0, 1), dtype=np.int64)
    found = counted(cluster, [none, np.full((6, 1), 2), none, none])["node"]
    assert found.imbalance == {"nic": 4.0, "rail": 2.0, "nvlink": 4.0}
    even = counted(cluster, [np.array([[2], [3]])] * 2 + [np.array([[0], [1]])] * 2)["node"]
    assert even.imbalance == {"nic": 1.0, "rail": 1.0, "nvlink": 1.0}
    assert counted(cluster, [none] * 4)["node"].imbalance["nic"] == 1.0, "nothing is moved, evenly"


def test_experts_fill_up_the_ranks() -> None:
    """256 experts on 48 ranks are padded to 288; on 2048 ranks each has one of its own."""
    assert Cluster(6, 8, 256, 8).padded_experts == 288
    assert Cluster(256, 8, 256, 8).padded_experts == 2048
    assert expected(Cluster(256, 8, 256, 8), "rank", 1) == expected(Cluster(256, 8, 256, 8), "route", 1)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ((0, 8, 256, 8), "num_nodes is 0, expected a positive integer"),
        ((2, 8, 256, True), "top_k is True, expected a positive integer"),
        ((2, 8, 4, 8), "top_k is 8, expected at most 4 for 4 experts"),
        ((2, 8, 256, 33), "top_k is 33, expected at most 32 for 256 experts"),
        ((8, 8, 64, 9, 1), "top_k is 9, expected at most 8, the experts of 1 node; pass a larger node_limit"),
    ],
)
def test_sizes_that_do_not_fit_are_named(cluster: tuple[int, ...], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Cluster(*cluster)
