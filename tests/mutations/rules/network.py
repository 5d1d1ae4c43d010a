"""Rules of the model of a network."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TRAFFIC_TESTS = ("tests/tune/network/test_traffic.py",)
COST_TESTS = ("tests/tune/network/test_cost.py",)

MUTATIONS = (
    M("nvlink-between-nodes", "who asks for NVLink alone gets something else between nodes",
      "backends.registry:choose", 'between_nodes == "nvlink" and nodes.num_nodes > 1', "False",
      "tests/backends/test_network.py::test_nvlink_between_nodes_is_refused", num_ranks=4),
    M("own-node-over-the-network", "rows for the sender's own node count as crossing the network",
      "tune.network.traffic:_by_rail", "crossing[np.arange(nodes), :, np.arange(nodes)] = 0", "", *TRAFFIC_TESTS),
    M("a-row-per-route-to-a-node", "a token with two experts on a part counts twice there",
      "tune.network.traffic:rows_between", "parts[:, 1:] != parts[:, :-1]", "True", *TRAFFIC_TESTS),
    M("terms-one-after-the-other", "NIC and NVLink never overlap in the model", "tune.network.cost:cost",
      "max(nic_us, nvlink_us, puts_us)", "nic_us + nvlink_us + puts_us", "tests/tune/network/test_published.py",
      *COST_TESTS),
    M("staging-of-dispatch-alone", "combined rows have no places", "tune.network.cost:staging_bytes",
      'row_bytes(dtype, hidden) + row_bytes("bf16", hidden)', "row_bytes(dtype, hidden)", *COST_TESTS),
)
