"""Rules of nodes: which ranks share one, sums per node, and what backend "network" sends."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TOPOLOGY = "tests/runtime/test_topology.py"
NETWORK = "tests/backends/test_network.py"
EXCHANGE = "backends.nodes.hierarchical.exchange:NodeExchange"
COLLECTED = "backends.nodes.hierarchical.inside:add_collected"
INSIDE = "backends.nodes.hierarchical.inside:CollectivesInside"
FAULTS = "tests/backends/test_network_faults.py"
LATE_RANKS = "tests/backends/test_network_late.py"
DEATHS = f"{LATE_RANKS}::test_death_in_every_transfer"
HAND_SUMS = ("tests/comm/test_combine.py::test_sums_by_hand",)
ON_NODES = (f"{NETWORK}::test_rows_on_the_wire", f"{NETWORK}::test_a_node_is_masked")

NODES = (
    M("other-hosts-are-near", "ranks of all hosts share a node", "runtime.topology:Place.is_with",
      "self.host == other.host", "True", TOPOLOGY),
    M("no-access-no-matter", "GPUs that cannot access each other share a node", "runtime.topology:Place.is_with",
      "other.gpu not in self.out_of_reach", "True", TOPOLOGY),
    M("views-are-not-compared", "ranks that see different nodes go on with what each sees",
      "runtime.topology:find_nodes", "seen[other] != mine", "False", TOPOLOGY),
    M("unequal-nodes-have-rails", "nodes of unequal size are not noticed", "runtime.topology:Topology.why_no_rails",
      "len(by_size) > 1", "False", TOPOLOGY),
    M("any-order-of-ranks", "ranks that are dealt to nodes in turns have rails",
      "runtime.topology:Topology.why_no_rails", "node != expected", "False", TOPOLOGY),
    M("nodes-of-any-size", "ranks_per_node need not divide the group", "runtime.topology:checked_ranks_per_node",
      "num_ranks % ranks_per_node", "False", TOPOLOGY),
    M("nodes-are-not-asked", "auto picks a backend whatever the nodes are", "backends.registry:choose",
      "candidate.why_not_on(nodes)", "None", "tests/backends/test_registry.py::test_nodes_decide"),
    M("any-transport", "what crosses nodes does not matter for the choice of a backend", "backends.registry:choose",
      'between_nodes not in ("auto", other_nodes)', "False",
      "tests/backends/test_registry.py::test_what_crosses_nodes_decides"),
    M("alone-on-a-node", "a rank that comes back takes all ranks for one node", "runtime.rank_group:RankGroup._meet",
      "self.topology = meeting.nodes", "pass", f"{NETWORK}::test_a_rank_comes_back_to_its_node", num_ranks=4),
)

SUMS = (
    M("one-sum-for-all-nodes", "per_node adds ranks without regard to nodes, straight to their ranks",
      "backends.exchange:FlatExchange.send_sums", "self._ranks.topology.nodes",
      "(tuple(range(self._ranks.num_ranks)),)", *HAND_SUMS, num_ranks=4),
    M("no-rounding-of-nodes", "sums of a node are not rounded to the wire, straight to their ranks",
      "backends.exchange:_sum_of_nodes", "routing.ordered_sum(terms, of_node, dtype=dtype).to(terms.dtype).to(dtype)",
      "routing.ordered_sum(terms, of_node, dtype=dtype)", *HAND_SUMS, num_ranks=4),
    M("nodes-from-zero", "a sum over nodes starts from +0", "backends.exchange:_sum_of_nodes",
      "torch.where(begun, total + part, part)", "total + part", *HAND_SUMS, num_ranks=4),
    M("no-rounding-between-nodes", "sums of a node cross the network in float32", COLLECTED,
      "routing.ordered_sum(values.view(-1, width), positions, dtype=dtype).to(rows.dtype)",
      "routing.ordered_sum(values.view(-1, width), positions, dtype=dtype)", *HAND_SUMS, num_ranks=4),
    M("order-within-a-node", "a node adds its ranks in descending order", COLLECTED,
      "routing.ordered_sum(values.view(-1, width), positions, dtype=dtype)",
      "routing.ordered_sum(values.view(-1, width), positions.flip(1), dtype=dtype)", f"{NETWORK}::test_order",
      num_ranks=4),
    M("order-of-nodes", "sums of nodes are added in descending order", f"{EXCHANGE}.send_sums",
      "routing.ordered_sum(terms, places, dtype=dtype)", "routing.ordered_sum(terms, places.flip(1), dtype=dtype)",
      f"{NETWORK}::test_order", num_ranks=4),
    M("gradients-per-rank", "gradients of a layer that sums per node come home by a row per rank",
      "backends.seam:Strategy.gradient_of_dispatch", "('per_node', 'all_to_all')", "('all_to_all',)",
      f"{NETWORK}::test_gradients_per_node", num_ranks=4),
    M("per-node-as-per-rank", "per_node is per_rank by another name",
      "backends.collective:CollectiveBackend._send_home", "options.per_node", "False", *HAND_SUMS, num_ranks=4),
)

TRAVEL = (
    M("a-row-per-rank-to-a-node", "a token crosses the network once for each rank of a node", COLLECTED,
      "torch.unique(keys, return_inverse=True)", "(keys, torch.arange(len(keys), device=keys.device))", *ON_NODES,
      num_ranks=4),
    M("own-node-counts", "rows that stay in the node count as crossing the network", f"{EXCHANGE}.start_all_to_all",
      "self._topology.node_of[rank] != self._node", "True", *ON_NODES, num_ranks=4),
    M("handed-to-masked-ranks", "rows are handed on to masked ranks of the node", f"{INSIDE}.hand_out",
      "goes_to & living", "goes_to", "tests/comm/test_masks.py::test_gradients", num_ranks=4),
    M("nobody-stands-in", "the rank behind a masked one does not forward for it",
      "backends.nodes.hierarchical.paths:_forwarder",
      "(*ranks[rail:], *ranks[:rail])", "(ranks[rail],)", f"{NETWORK}::test_neighbours_stand_in",
      f"{NETWORK}::test_a_node_is_masked", num_ranks=4),
    M("order-of-forwarders", "rows lie in the order of the ranks that forwarded them", f"{INSIDE}.hand_out",
      "arrange(arrived, came, wanted)", "arrived", f"{NETWORK}::test_six_ranks[plain-2]", num_ranks=4),
)

LATE = (
    M("nodes-of-nobody", "a timeout does not name nodes", "runtime.waiting:Watch.fail", "self.topology.which(missing)",
      "()", f"{FAULTS}::test_who_is_missing", num_ranks=4),
    M("rows-of-a-lost-forwarder", "a call from which a rank was lost is not made again",
      "backends.nodes.hierarchical.backend:NetworkBackend._all_have_all", "not bool(told.any())", "True",
      f"{DEATHS}[3-partly-per_node]", num_ranks=4),
    M("alone-with-a-loss", "only ranks that miss rows themselves make the call again",
      "backends.nodes.hierarchical.backend:NetworkBackend._all_have_all", "told.any()", "misses",
      f"{DEATHS}[2-partly-per_node]", num_ranks=4),
    M("paths-by-own-view", "a lost rank stays on the paths of the next call",
      "backends.nodes.hierarchical.exchange:NodeExchange.open", "absent != self._paths.absent", "False",
      f"{DEATHS}[2-partly-per_node]", num_ranks=4),
    M("overflow-of-a-lost-call", "a dispatch that is made again remembers the overflow of its first try",
      "backends.nodes.hierarchical.backend:NetworkBackend.send_dispatch", "self._overflow = overflow", "pass",
      f"{LATE_RANKS}::test_overflow_of_a_dispatch_that_is_made_again", num_ranks=4),
)

MUTATIONS = NODES + SUMS + TRAVEL + LATE
