"""Rules of the model of a network."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TRAFFIC_TESTS = ("tests/tune/network/test_traffic.py",)
COST_TESTS = ("tests/tune/network/test_cost.py",)

MUTATIONS = (
    Mutation(
        name="nvlink-between-nodes",
        rule="who asks for NVLink alone gets something else between nodes",
        target="tokenloom.backends.registry:choose",
        old='between_nodes == "nvlink" and nodes.num_nodes > 1',
        new="False",
        tests=("tests/backends/test_network.py::test_nvlink_between_nodes_is_refused",),
        num_ranks=4,
    ),
    Mutation(
        name="own-node-over-the-network",
        rule="rows for the sender's own node count as crossing the network",
        target="tokenloom.tune.network.traffic:_by_rail",
        old="crossing[np.arange(nodes), :, np.arange(nodes)] = 0",
        new="",
        tests=TRAFFIC_TESTS,
    ),
    Mutation(
        name="a-row-per-route-to-a-node",
        rule="a token with two experts on a part counts twice there",
        target="tokenloom.tune.network.traffic:rows_between",
        old="parts[:, 1:] != parts[:, :-1]",
        new="True",
        tests=TRAFFIC_TESTS,
    ),
    Mutation(
        name="terms-one-after-the-other",
        rule="NIC and NVLink never overlap in the model",
        target="tokenloom.tune.network.cost:cost",
        old="max(nic_us, nvlink_us, puts_us)",
        new="nic_us + nvlink_us + puts_us",
        tests=("tests/tune/network/test_published.py", *COST_TESTS),
    ),
    Mutation(
        name="staging-of-dispatch-alone",
        rule="combined rows have no places",
        target="tokenloom.tune.network.cost:staging_bytes",
        old='row_bytes(dtype, hidden) + row_bytes("bf16", hidden)',
        new="row_bytes(dtype, hidden)",
        tests=COST_TESTS,
    ),
)
