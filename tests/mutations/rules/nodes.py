"""Rules of nodes: which ranks share one, sums per node, and what backend "network" sends."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TOPOLOGY = "tests/runtime/test_topology.py"
NETWORK = "tests/backends/test_network.py"
EXCHANGE = "tokenloom.backends.network.exchange:NodeExchange"
COLLECTED = "tokenloom.backends.network.inside:add_collected"
INSIDE = "tokenloom.backends.network.inside:CollectivesInside"
FAULTS = "tests/backends/test_network_faults.py"
LATE_RANKS = "tests/backends/test_network_late.py"
DEATHS = f"{LATE_RANKS}::test_death_in_every_transfer"
HAND_SUMS = ("tests/comm/test_combine.py::test_sums_by_hand",)
ON_NODES = (f"{NETWORK}::test_rows_on_the_wire", f"{NETWORK}::test_a_node_is_masked")

NODES = (
    Mutation(
        name="other-hosts-are-near",
        rule="ranks of all hosts share a node",
        target="tokenloom.runtime.topology:Place.is_with",
        old="self.host == other.host",
        new="True",
        tests=(TOPOLOGY,),
    ),
    Mutation(
        name="no-access-no-matter",
        rule="GPUs that cannot access each other share a node",
        target="tokenloom.runtime.topology:Place.is_with",
        old="other.gpu not in self.out_of_reach",
        new="True",
        tests=(TOPOLOGY,),
    ),
    Mutation(
        name="views-are-not-compared",
        rule="ranks that see different nodes go on with what each sees",
        target="tokenloom.runtime.topology:find_nodes",
        old="seen[other] != mine",
        new="False",
        tests=(TOPOLOGY,),
    ),
    Mutation(
        name="unequal-nodes-have-rails",
        rule="nodes of unequal size are not noticed",
        target="tokenloom.runtime.topology:Topology.why_no_rails",
        old="len(by_size) > 1",
        new="False",
        tests=(TOPOLOGY,),
    ),
    Mutation(
        name="any-order-of-ranks",
        rule="ranks that are dealt to nodes in turns have rails",
        target="tokenloom.runtime.topology:Topology.why_no_rails",
        old="node != expected",
        new="False",
        tests=(TOPOLOGY,),
    ),
    Mutation(
        name="nodes-of-any-size",
        rule="ranks_per_node need not divide the group",
        target="tokenloom.runtime.topology:checked_ranks_per_node",
        old="num_ranks % ranks_per_node",
        new="False",
        tests=(TOPOLOGY,),
    ),
    Mutation(
        name="nodes-are-not-asked",
        rule="auto picks a backend whatever the nodes are",
        target="tokenloom.backends.registry:choose",
        old="candidate.why_not_on(nodes)",
        new="None",
        tests=("tests/backends/test_registry.py::test_nodes_decide",),
    ),
    Mutation(
        name="any-transport",
        rule="what crosses nodes does not matter for the choice of a backend",
        target="tokenloom.backends.registry:choose",
        old='between_nodes not in ("auto", other_nodes)',
        new="False",
        tests=("tests/backends/test_registry.py::test_what_crosses_nodes_decides",),
    ),
    Mutation(
        name="alone-on-a-node",
        rule="a rank that comes back takes all ranks for one node",
        target="tokenloom.runtime.rank_group:RankGroup._meet",
        old="self.topology = meeting.nodes",
        new="pass",
        tests=(f"{NETWORK}::test_a_rank_comes_back_to_its_node",),
        num_ranks=4,
    ),
)

SUMS = (
    Mutation(
        name="one-sum-for-all-nodes",
        rule="per_node adds ranks without regard to nodes, straight to their ranks",
        target="tokenloom.backends.exchange:FlatExchange.send_sums",
        old="self._ranks.topology.nodes",
        new="(tuple(range(self._ranks.num_ranks)),)",
        tests=HAND_SUMS,
        num_ranks=4,
    ),
    Mutation(
        name="no-rounding-of-nodes",
        rule="sums of a node are not rounded to the wire, straight to their ranks",
        target="tokenloom.backends.exchange:_sum_of_nodes",
        old="routing.ordered_sum(terms, of_node, dtype=dtype).to(terms.dtype).to(dtype)",
        new="routing.ordered_sum(terms, of_node, dtype=dtype)",
        tests=HAND_SUMS,
        num_ranks=4,
    ),
    Mutation(
        name="nodes-from-zero",
        rule="a sum over nodes starts from +0",
        target="tokenloom.backends.exchange:_sum_of_nodes",
        old="torch.where(begun, total + part, part)",
        new="total + part",
        tests=HAND_SUMS,
        num_ranks=4,
    ),
    Mutation(
        name="no-rounding-between-nodes",
        rule="sums of a node cross the network in float32",
        target=COLLECTED,
        old="routing.ordered_sum(values.view(-1, width), positions, dtype=dtype).to(rows.dtype)",
        new="routing.ordered_sum(values.view(-1, width), positions, dtype=dtype)",
        tests=HAND_SUMS,
        num_ranks=4,
    ),
    Mutation(
        name="order-within-a-node",
        rule="a node adds its ranks in descending order",
        target=COLLECTED,
        old="routing.ordered_sum(values.view(-1, width), positions, dtype=dtype)",
        new="routing.ordered_sum(values.view(-1, width), positions.flip(1), dtype=dtype)",
        tests=(f"{NETWORK}::test_order",),
        num_ranks=4,
    ),
    Mutation(
        name="order-of-nodes",
        rule="sums of nodes are added in descending order",
        target=f"{EXCHANGE}.send_sums",
        old="routing.ordered_sum(terms, places, dtype=dtype)",
        new="routing.ordered_sum(terms, places.flip(1), dtype=dtype)",
        tests=(f"{NETWORK}::test_order",),
        num_ranks=4,
    ),
    Mutation(
        name="gradients-per-rank",
        rule="gradients of a layer that sums per node come home by a row per rank",
        target="tokenloom.comm.strategy:Strategy.gradient_of_dispatch",
        old='self.combine == "per_node"',
        new="False",
        tests=(f"{NETWORK}::test_gradients_per_node",),
        num_ranks=4,
    ),
    Mutation(
        name="per-node-as-per-rank",
        rule="per_node is per_rank by another name",
        target="tokenloom.backends.collective:CollectiveBackend._send_home",
        old="options.per_node",
        new="False",
        tests=HAND_SUMS,
        num_ranks=4,
    ),
)

TRAVEL = (
    Mutation(
        name="a-row-per-rank-to-a-node",
        rule="a token crosses the network once for each rank of a node",
        target=COLLECTED,
        old="torch.unique(keys, return_inverse=True)",
        new="(keys, torch.arange(len(keys), device=keys.device))",
        tests=ON_NODES,
        num_ranks=4,
    ),
    Mutation(
        name="own-node-counts",
        rule="rows that stay in the node count as crossing the network",
        target=f"{EXCHANGE}.start_all_to_all",
        old="self._topology.node_of[rank] != self._node",
        new="True",
        tests=ON_NODES,
        num_ranks=4,
    ),
    Mutation(
        name="handed-to-masked-ranks",
        rule="rows are handed on to masked ranks of the node",
        target=f"{INSIDE}.hand_out",
        old="goes_to & living",
        new="goes_to",
        tests=("tests/comm/test_masks.py::test_gradients",),
        num_ranks=4,
    ),
    Mutation(
        name="nobody-stands-in",
        rule="the rank behind a masked one does not forward for it",
        target="tokenloom.backends.network.paths:_forwarder",
        old="(*ranks[rail:], *ranks[:rail])",
        new="(ranks[rail],)",
        tests=(f"{NETWORK}::test_neighbours_stand_in", f"{NETWORK}::test_a_node_is_masked"),
        num_ranks=4,
    ),
    Mutation(
        name="order-of-forwarders",
        rule="rows lie in the order of the ranks that forwarded them",
        target=f"{INSIDE}.hand_out",
        old="arrange(arrived, came, wanted)",
        new="arrived",
        tests=(f"{NETWORK}::test_three_nodes",),
        num_ranks=4,
    ),
)

LATE = (
    Mutation(
        name="nodes-of-nobody",
        rule="a timeout does not name nodes",
        target="tokenloom.runtime.waiting:Watch.fail",
        old="self.topology.which(missing)",
        new="()",
        tests=(f"{FAULTS}::test_who_is_missing",),
        num_ranks=4,
    ),
    Mutation(
        name="rows-of-a-lost-forwarder",
        rule="a call from which a rank was lost is not made again",
        target="tokenloom.backends.network.backend:NetworkBackend._all_have_all",
        old="not bool(told.any())",
        new="True",
        tests=(f"{DEATHS}[3-partly-per_node]",),
        num_ranks=4,
    ),
    Mutation(
        name="alone-with-a-loss",
        rule="only ranks that miss rows themselves make the call again",
        target="tokenloom.backends.network.backend:NetworkBackend._all_have_all",
        old="told.any()",
        new="misses",
        tests=(f"{DEATHS}[2-partly-per_node]",),
        num_ranks=4,
    ),
    Mutation(
        name="paths-by-own-view",
        rule="a lost rank stays on the paths of the next call",
        target="tokenloom.backends.network.exchange:NodeExchange.open",
        old="absent != self._paths.absent",
        new="False",
        tests=(f"{DEATHS}[2-partly-per_node]",),
        num_ranks=4,
    ),
    Mutation(
        name="overflow-of-a-lost-call",
        rule="a dispatch that is made again remembers the overflow of its first try",
        target="tokenloom.backends.network.backend:NetworkBackend.send_dispatch",
        old="self._overflow = overflow",
        new="pass",
        tests=(f"{LATE_RANKS}::test_overflow_of_a_dispatch_that_is_made_again",),
        num_ranks=4,
    ),
)

MUTATIONS = NODES + SUMS + TRAVEL + LATE
