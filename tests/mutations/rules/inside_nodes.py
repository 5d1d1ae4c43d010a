"""Rules of kernels inside the nodes of backend "network"."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TESTS = "tests/backends/test_network_nvlink.py"
KERNELS = "backends.nodes.hierarchical.nvlink_inside:NvlinkInside"
EXCHANGE = "backends.nodes.hierarchical.exchange:NodeExchange"
MAKE = "backends.nodes.hierarchical.nvlink_inside:make_inside"

MUTATIONS = (
    M("what-an-expired-wait-left", "rows that never came are placed as if they had", f"{KERNELS}.hand_out",
      "torch.where(expired, nothing, words, out=room)", "room.copy_(words)", f"{TESTS}::test_who_is_missing_is_named"),
    M("one-dispatch-brings-all", "rows that a plan has no room for are left behind", f"{KERNELS}.collect",
      "range(0, max(1, *held), most)", "range(0, 1, most)", f"{TESTS}::test_bits[to all, full]"),
    M("no-memory-without-rows", "a node without rows does not make memory with those that have some",
      f"{KERNELS}.collect", "max(1, *held)", "max(held)", f"{TESTS}::test_bits[to one rank, full]"),
    M("collected-as-it-came", "rows that needed several dispatches to come together lie in the order of these",
      f"{KERNELS}.collect", "arrange(torch.cat(parts), came, sorted(came))", "torch.cat(parts)",
      f"{TESTS}::test_bits[to all, full]"),
    M("handed-out-in-views", "a combine reads what later dispatches have written over", f"{KERNELS}._dispatch",
      'DispatchKind(options, x.dtype, ids.dtype, output_owner="but rows")',
      "DispatchKind(options, x.dtype, ids.dtype, output_owner=False)",
      f"{TESTS}::test_combine_long_after_its_dispatch"),
    M("sums-in-any-dtype", "kernels add float64", f"{KERNELS}.add",
      "rows.dtype not in SUMMED or dtype != torch.float32", "False",
      f"{TESTS}::test_sums_are_rounded_where_they_leave"),
    M("ring-in-reverse", "rows for the node before leave first", f"{KERNELS}._by_node", "(self._node + step)",
      "(self._node - step)", f"{TESTS}::test_each_node_is_a_transfer_of_its_own"),
    M("own-rows-by-the-network", "rows of the own node are a transfer between nodes", f"{EXCHANGE}._start_pieces",
      "self._inside.by_node and not pieces", "False", f"{TESTS}::test_each_node_is_a_transfer_of_its_own"),
    M("one-piece-for-kernels", "rows of all nodes are one transfer, so that nothing runs beside it",
      f"{EXCHANGE}._pieces", "not self._inside.by_node", "True", f"{TESTS}::test_each_node_is_a_transfer_of_its_own"),
    M("rows-without-room-for-scales", "FP8 rows have no room for their scales",
      "backends.nodes.hierarchical.nvlink_inside:inner_plans", "scales if key == 1 else 0", "0",
      f"{TESTS}::test_widths"),
    M("ranks-of-a-node-share-a-gpu", "kernels wait for each other on one GPU",
      "backends.nodes.hierarchical.nvlink_inside:objection", "failing or peers.REGISTRATION.objections(found)",
      "failing", f"{TESTS}::test_one_node_without_kernels_is_enough"),
    M("kernels-for-some-ranks", "ranks that could make memory go on with kernels, and the others with collectives",
      MAKE, "kernels is not None and not failed", "kernels is not None", f"{TESTS}::test_all_ranks_choose_alike",
      num_ranks=4),
    M("a-rank-asks-alone", "a rank that comes back to others on CPUs asks them what carries rows inside nodes", MAKE,
      'ranks.device.type == "cpu"', "False", f"{TESTS}::test_other_backends_look_for_none", num_ranks=4),
    M("numbers-within-the-node", "a missing rank is named by its number in the node",
      "backends.nodes.hierarchical.node_ranks:NodeRanks.in_whole", "self.members[peer]", "peer",
      f"{TESTS}::test_ranks_of_a_node", num_ranks=4),
    M("faults-within-the-node", "ranks of other nodes do not hear of a fault, and go on alone",
      "runtime.rendezvous:agree", "ranks.whole.all_gather_object((None, values, extra), phase)",
      "ranks.all_gather_object((None, values, extra), phase)",
      f"{TESTS}::test_ranks_of_a_node", num_ranks=4),
)
