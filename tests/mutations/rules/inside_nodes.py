"""Rules of kernels inside the nodes of backend "network"."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/backends/test_network_nvlink.py"
KERNELS = "tokenloom.backends.network.nvlink_inside:NvlinkInside"
EXCHANGE = "tokenloom.backends.network.exchange:NodeExchange"
MAKE = "tokenloom.backends.network.registration:make_inside"

MUTATIONS = (
    Mutation(
        name="what-an-expired-wait-left",
        rule="rows that never came are placed as if they had",
        target=f"{KERNELS}.hand_out",
        old="torch.where(expired, nothing, words, out=room)",
        new="room.copy_(words)",
        tests=(f"{TESTS}::test_who_is_missing_is_named",),
    ),
    Mutation(
        name="one-dispatch-brings-all",
        rule="rows that a plan has no room for are left behind",
        target=f"{KERNELS}.collect",
        old="range(0, max(1, *held), most)",
        new="range(0, 1, most)",
        tests=(f"{TESTS}::test_bits[to all, full]",),
    ),
    Mutation(
        name="no-memory-without-rows",
        rule="a node without rows does not make memory with those that have some",
        target=f"{KERNELS}.collect",
        old="max(1, *held)",
        new="max(held)",
        tests=(f"{TESTS}::test_bits[to one rank, full]",),
    ),
    Mutation(
        name="collected-as-it-came",
        rule="rows that needed several dispatches to come together lie in the order of these",
        target=f"{KERNELS}.collect",
        old="arrange(torch.cat(parts), came, sorted(came))",
        new="torch.cat(parts)",
        tests=(f"{TESTS}::test_bits[to all, full]",),
    ),
    Mutation(
        name="handed-out-in-views",
        rule="a combine reads what later dispatches have written over",
        target=f"{KERNELS}._dispatch",
        old='DispatchInputs(x, None, ids, None, False, False, own_outputs="but rows")',
        new="DispatchInputs(x, None, ids, None, False, False, own_outputs=False)",
        tests=(f"{TESTS}::test_combine_long_after_its_dispatch",),
    ),
    Mutation(
        name="sums-in-any-dtype",
        rule="kernels add float64",
        target=f"{KERNELS}.add",
        old="rows.dtype not in SUMMED or dtype != torch.float32",
        new="False",
        tests=(f"{TESTS}::test_sums_are_rounded_where_they_leave",),
    ),
    Mutation(
        name="ring-in-reverse",
        rule="rows for the node before leave first",
        target=f"{KERNELS}._by_node",
        old="(self._node + step)",
        new="(self._node - step)",
        tests=(f"{TESTS}::test_each_node_is_a_transfer_of_its_own",),
    ),
    Mutation(
        name="own-rows-by-the-network",
        rule="rows of the own node are a transfer between nodes",
        target=f"{EXCHANGE}._start_pieces",
        old="self._inside.by_node and not pieces",
        new="False",
        tests=(f"{TESTS}::test_each_node_is_a_transfer_of_its_own",),
    ),
    Mutation(
        name="one-piece-for-kernels",
        rule="rows of all nodes are one transfer, so that nothing runs beside it",
        target=f"{EXCHANGE}._pieces",
        old="not self._inside.by_node",
        new="True",
        tests=(f"{TESTS}::test_each_node_is_a_transfer_of_its_own",),
    ),
    Mutation(
        name="rows-without-room-for-scales",
        rule="FP8 rows have no room for their scales",
        target="tokenloom.backends.network.nvlink_inside:inner_plans",
        old="scales if key == 1 else 0",
        new="0",
        tests=(f"{TESTS}::test_widths",),
    ),
    Mutation(
        name="ranks-of-a-node-share-a-gpu",
        rule="kernels wait for each other on one GPU",
        target="tokenloom.backends.network.nvlink_inside:objection",
        old="failing or nvlink.REGISTRATION.objections(found)",
        new="failing",
        tests=(f"{TESTS}::test_one_node_without_kernels_is_enough",),
    ),
    Mutation(
        name="kernels-for-some-ranks",
        rule="ranks that could make memory go on with kernels, and the others with collectives",
        target=MAKE,
        old="kernels is not None and not failed",
        new="kernels is not None",
        tests=(f"{TESTS}::test_all_ranks_choose_alike",),
        num_ranks=4,
    ),
    Mutation(
        name="a-rank-asks-alone",
        rule="a rank that comes back to others on CPUs asks them what carries rows inside nodes",
        target=MAKE,
        old='ranks.device.type == "cpu"',
        new="False",
        tests=(f"{TESTS}::test_other_backends_look_for_none",),
        num_ranks=4,
    ),
    Mutation(
        name="numbers-within-the-node",
        rule="a missing rank is named by its number in the node",
        target="tokenloom.runtime.node_ranks:NodeRanks.in_whole",
        old="self.members[peer]",
        new="peer",
        tests=(f"{TESTS}::test_ranks_of_a_node",),
        num_ranks=4,
    ),
    Mutation(
        name="faults-within-the-node",
        rule="ranks of other nodes do not hear of a fault, and go on alone",
        target="tokenloom.runtime.rendezvous:agree",
        old="ranks.whole if isinstance(ranks, NodeRanks) else ranks",
        new="ranks",
        tests=(f"{TESTS}::test_ranks_of_a_node",),
        num_ranks=4,
    ),
)
