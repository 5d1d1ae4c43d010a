"""Rules of ranks that are gone: who is masked, what that costs, and who comes back."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MEMBERSHIP = "tokenloom.runtime.membership:Membership"
WATCH = "tokenloom.runtime.waiting:Watch"
MASKED, LATE, REJOIN = (f"tests/runtime/test_{name}.py" for name in ("masked_ranks", "late_ranks", "rejoin"))
SAME_ROWS = (f"{LATE}::test_everybody_sees_the_same_rows",)
LATE_RANK = (f"{LATE}::test_late",)
STORE = (f"{LATE}::test_the_store_is_left_clean",)
MASKS, ON_TIMEOUT = "tests/comm/test_masks.py", "tests/comm/test_on_timeout.py"
WITHIN_DISPATCH = (f"{ON_TIMEOUT}::test_late_within_a_dispatch",)

AGREEMENT = (
    Mutation(
        name="growth-over-the-process-group",
        rule="ranks that are left agree about another communicator by collectives that cannot end",
        target="tokenloom.comm.growing:Communicators.meeting",
        old="meeting = meeting.left_by_pairs()",
        new="pass",
        tests=("tests/comm/test_shrinking.py::test_a_death",),
    ),
    Mutation(
        name="lists-are-not-compared",
        rule="ranks mask what each of them was told",
        target=f"{MEMBERSHIP}.ask",
        old="change[1:] != [request, _listed(ranks)]",
        new="False",
        tests=(f"{MASKED}::test_lists_that_differ",),
        num_ranks=4,
    ),
    Mutation(
        name="a-mask-that-one-forgets",
        rule="a rank that makes another call where others ask for a mask waits for ever",
        target=f"{MEMBERSHIP}.require_same_mask",
        old="change is not None and change[0] <= step",
        new="False",
        tests=(f"{MASKED}::test_a_rank_that_asks_for_no_mask",),
        num_ranks=4,
    ),
    Mutation(
        name="slow-is-out-of-step",
        rule="a rank that waits in an earlier collective than that of a mask is out of step",
        target=f"{MEMBERSHIP}.require_same_mask",
        old="change[0] <= step",
        new="True",
        tests=(f"{MASKED}::test_a_rank_that_is_slow_is_not_out_of_step",),
        num_ranks=4,
    ),
    Mutation(
        name="held-up-is-late",
        rule="a rank that waits for a late one is masked with it",
        target=f"{WATCH}._wait_or_mask",
        old="awaited.pending - members.roll_call(awaited.pending)",
        new="set(awaited.pending)",
        tests=(f"{LATE}::test_who_is_held_up_is_not_late",),
        num_ranks=4,
    ),
    Mutation(
        name="nobody-says-what-it-holds",
        rule="a row that a rank sent to some before it ended is lost to the others",
        target=f"{MEMBERSHIP}._adopt",
        old="rank in self.lost",
        new="False",
        tests=SAME_ROWS,
        num_ranks=4,
    ),
    Mutation(
        name="nobody-waits-for-what-others-hold",
        rule="a gather ends without the row of a rank that ended, though others may hold it",
        target=f"{WATCH}.settle",
        old="self._members.unsettled()",
        new="None",
        tests=SAME_ROWS,
        num_ranks=4,
    ),
    Mutation(
        name="masked-and-not-told",
        rule="a rank that the others have masked goes on",
        target=f"{WATCH}.look",
        old="me in self._members.lost",
        new="False",
        tests=LATE_RANK,
        num_ranks=4,
    ),
    Mutation(
        name="back-without-a-look",
        rule="a rank that was away takes what was sent to it before it was masked",
        target=f"{WATCH}.begin",
        old="self.look()",
        new="pass",
        tests=LATE_RANK,
        num_ranks=4,
    ),
    Mutation(
        name="gone-ranks-keep-notes",
        rule="notes stay in the store when all that are not gone have left",
        target="tokenloom.runtime.noteboard:Noteboard.leave",
        old="[rank for rank in range(self.num_ranks) if rank not in self.gone]",
        new="range(self.num_ranks)",
        tests=STORE,
    ),
    Mutation(
        name="masked-ranks-find-no-note",
        rule="what tells a masked rank that it is masked is deleted with the rest",
        target="tokenloom.runtime.noteboard:Noteboard.leave",
        old="self.gone and name.startswith(TELLS_WHO_IS_MASKED)",
        new="False",
        tests=STORE,
    ),
    Mutation(
        name="back-with-other-terms",
        rule="a rank comes back with arguments that differ from those of the others",
        target="tokenloom.runtime.rejoin:take_back",
        old='call is not None and call["terms"].get(term) != value',
        new="False",
        tests=(f"{REJOIN}::test_who_comes_back_different",),
    ),
    Mutation(
        name="back-without-a-connection",
        rule="ranks go on with one that could not connect with all of them",
        target="tokenloom.runtime.rejoin:_who_failed",
        old='return [rank, said or "it did not come"]',
        new="return []",
        tests=(f"{REJOIN}::test_who_cannot_connect",),
        num_ranks=4,
    ),
)

TRANSFERS = (
    Mutation(
        name="open-calls-lose-what-is-masked",
        rule="a mask counts for a call that is open",
        target=f"{WATCH}._wait_or_mask",
        old="awaited.give_up(lost)",
        new="awaited.give_up(members.masked)",
        tests=(f"{MASKED}::test_a_call_that_is_open_is_finished_as_it_began",),
        num_ranks=4,
    ),
    Mutation(
        name="lost-and-not-said",
        rule="a transfer does not say whose part it gave up",
        target="tokenloom.runtime.links:Exchange.give_up",
        old="self._absent |= self.pending.union(self.broken).intersection(ranks)",
        new="pass",
        tests=(f"{LATE}::test_late_in_the_middle_of_a_call",),
        num_ranks=4,
    ),
    Mutation(
        name="parts-that-come-too-late",
        rule="what a rank sends late changes the result of a transfer that has ended without it",
        target="tokenloom.runtime.links:Links.start",
        old='arriving = [torch.empty(place.shape, dtype=place.dtype, device="cpu") for place in places]',
        new="arriving = list(places)",
        tests=(f"{LATE}::test_what_comes_behind_the_end",),
        num_ranks=4,
    ),
    Mutation(
        name="transfers-that-are-dropped",
        rule="what arrives for a transfer that nobody waits for stops the connection",
        target="tokenloom.runtime.links:Links.start",
        old="self._open = [*filter(None, self._open), works]",
        new="pass",
        tests=(f"{LATE}::test_transfers_that_nobody_waits_for",),
        num_ranks=4,
    ),
    Mutation(
        name="hidden-by-a-masked-rank",
        rule="a masked rank that gives up hides one that takes part and has given up before",
        target="tokenloom.runtime.noteboard:Noteboard._who_ended",
        old="(latest, *range(self.num_ranks))",
        new="(latest,)",
        tests=("tests/runtime/test_noteboard.py::test_who_is_gone_hides_nobody",),
    ),
    Mutation(
        name="routes-to-masked-ranks",
        rule="ids of masked ranks' experts are routes",
        target="tokenloom.ops.routing:without_ranks",
        old="torch.where(gone[rank_of], -1, topk_ids)",
        new="topk_ids",
        tests=(f"{MASKS}::test_bounded_overflow",),
    ),
    Mutation(
        name="rows-of-lost-ranks",
        rule="a dispatch keeps rows of a rank that was lost in it",
        target="tokenloom.backends.collective:CollectiveBackend.send_dispatch",
        old="metadata.lost | payload.arriving.lost",
        new="metadata.lost",
        tests=WITHIN_DISPATCH,
    ),
    Mutation(
        name="counts-of-lost-ranks",
        rule="a dispatch counts routes of a rank that was lost in it",
        target="tokenloom.backends.collective:CollectiveBackend.send_dispatch",
        old="sizes.without(lost)",
        new="sizes",
        tests=WITHIN_DISPATCH,
    ),
    Mutation(
        name="zeros-of-lost-ranks",
        rule="a combine adds the zeros of ranks that sent nothing",
        target="tokenloom.backends.collective_handle:terms_without",
        old="torch.where(torch.tensor(gone, device=positions.device)[positions], -1, positions)",
        new="positions",
        tests=(f"{MASKS}::test_negative_zeros",),
    ),
    Mutation(
        name="masked-ranks-disagree",
        rule="the empty row of a masked rank counts as another call",
        target="tokenloom.runtime.openings:Opening.differs",
        old="self._table[self._there, word]",
        new="self._table[:, word]",
        tests=(f"{MASKS}::test_before",),
    ),
    Mutation(
        name="compared-with-a-masked-rank",
        rule="PlanMismatch names rank 0, although it is masked",
        target="tokenloom.runtime.openings:raise_difference",
        old="PlanMismatch(rank, name, text.get(name), expected.get(name), base)",
        new="PlanMismatch(rank, name, text.get(name), expected.get(name))",
        tests=(f"{MASKS}::test_faults_of_those_that_stay",),
        num_ranks=4,
    ),
    Mutation(
        name="late-ranks-break-all",
        rule="on_timeout='mask' is on_timeout='raise'",
        target="tokenloom.runtime.rank_group:RankGroup._go_by_pairs",
        old="self._watch.masks_late = True",
        new="pass",
        tests=(f"{ON_TIMEOUT}::test_late_for_a_dispatch",),
    ),
)

MEMORY = (
    Mutation(
        name="memory-of-masked-ranks",
        rule="memory that is made after a mask waits for the masked ranks to let go",
        target="tokenloom.runtime.symmetric_memory:_Shared.map_all",
        old="offers[rank].rank == rank",
        new="True",
        tests=("tests/runtime/test_memory_without_ranks.py",),
        num_ranks=4,
    ),
    Mutation(
        name="memory-of-ranks-that-left",
        rule="memory is freed while a rank that was masked may still write there",
        target="tokenloom.runtime.symmetric_memory:_Shared._waits_for_others",
        old="{rank: self._note(rank) for rank in self.others}",
        new="{rank: self._note(rank) for rank in self.others - self._notes.gone}",
        tests=("tests/runtime/test_memory_without_ranks.py",),
        num_ranks=4,
    ),
)

LATE_CALLS = "tokenloom.backends.nvlink.late_ranks:LateRanks"
MADE_UP = "tests/backends/test_late_calls.py"

NOT_ALL_BEGIN = ("tests/runtime/test_memory_without_ranks.py::test_memory_that_not_all_begin",)
REPEATED = (
    Mutation(
        name="collectives-that-nobody-joins",
        rule="a rank waits on in a collective of a call that the others make again",
        target=f"{WATCH}._wait_or_mask",
        old="members.num_losses > self.known_losses",
        new="False",
        tests=NOT_ALL_BEGIN,
        num_ranks=4,
    ),
    Mutation(
        name="collectives-of-two-calls",
        rule="ranks that began different collectives before a loss mean different ones behind it",
        target="tokenloom.runtime.rank_group:RankGroup.settle_losses",
        old="self.notes.skip_to(step)",
        new="pass",
        tests=NOT_ALL_BEGIN,
        num_ranks=4,
    ),
    Mutation(
        name="begun-in-vain-and-kept",
        rule="memory that some ranks began to make waits for ever until the others let go of it",
        target="tokenloom.runtime.noteboard:Noteboard.has_skipped",
        old="named.get(kind, 0) < int(number)",
        new="False",
        tests=NOT_ALL_BEGIN,
        num_ranks=4,
    ),
    Mutation(
        name="calls-without-a-meeting",
        rule="a rank returns before it knows that all others have the result",
        target=f"{LATE_CALLS}.call",
        old="self._meet(made)",
        new="pass",
        tests=(f"{MADE_UP}::test_a_call_and_its_meeting",),
    ),
    Mutation(
        name="meetings-behind-a-loss-count",
        rule="a rank returns from a call that it has told the others to make again",
        target=f"{LATE_CALLS}.call",
        old="if not self._is_stale():\n    self._has_ended(number)\n    continue",
        new="if made is not None:\n    self._has_ended(number)\n    continue",
        tests=(f"{MADE_UP}::test_a_meeting_behind_a_loss",),
    ),
    Mutation(
        name="calls-that-ended-are-made-again",
        rule="a rank makes a call again that has ended for another one",
        target=f"{LATE_CALLS}._go_on",
        old="self._has_ended(self._ranks.settle_losses(PHASE, name))",
        new="self._ranks.settle_losses(PHASE, name)",
        tests=(f"{MADE_UP}::test_a_meeting_that_others_had",),
    ),
    Mutation(
        name="errors-without-a-meeting",
        rule="an error ends a call on a rank that does not know whether the others have it",
        target="tokenloom.backends.nvlink.late_ranks:_Made.__init__",
        old="not is_known_to_all(error)",
        new="True",
        tests=(f"{MADE_UP}::test_errors_that_all_ranks_raise",),
    ),
    Mutation(
        name="masked-and-still-met",
        rule="a rank that learns in a call that it is masked waits for the others",
        target="tokenloom.backends.nvlink.late_ranks:_Made.__init__",
        old="(PeerTimeout, CommunicatorBroken)",
        new="PeerTimeout",
        tests=(f"{MADE_UP}::test_a_rank_that_is_masked",),
    ),
    Mutation(
        name="overflows-in-vain",
        rule="a call that did not take place tells of its overflow",
        target=f"{LATE_CALLS}.call",
        old="made, self._maker.dispatcher.overflow = None, overflow",
        new="made = None",
        tests=(f"{MADE_UP}::test_an_overflow_in_vain",),
    ),
    Mutation(
        name="in-vain-for-ever",
        rule="calls that expire although everybody is there are made again for ever",
        target=f"{LATE_CALLS}._find_late",
        old="in_vain == ranks.num_ranks",
        new="in_vain == 7",
        tests=(f"{MADE_UP}::test_nobody_is_late",),
    ),
)

NVLINK_CALLS = ("tests/backends/test_nvlink_masks.py::test_bounded_calls",)

KERNELS = (
    Mutation(
        name="kernels-wait-for-masked-ranks",
        rule="a kernel waits until a masked rank opens its call",
        target="device/transport/call.cuh:await_call",
        old="peer < kRanks && !turn.leaves_out(peer)",
        new="peer < kRanks",
        tests=NVLINK_CALLS,
        gpu=True,
    ),
    Mutation(
        name="kernels-route-to-masked-ranks",
        rule="a kernel counts routes to masked ranks",
        target="device/roles/count_routes.cuh:count_routes_of",
        old="expert < 0 || turn.leaves_out(expert / Shape::experts_per_rank)",
        new="expert < 0",
        tests=(f"{MASKS}::test_bounded_overflow",),
        gpu=True,
    ),
    Mutation(
        name="old-counts-of-masked-ranks",
        rule="a kernel takes what lies in the header of a masked rank for counts",
        target="device/roles/count_routes.cuh:AllCounts::count",
        old="turn.leaves_out(source) ? 0 : first[source * kStride + index]",
        new="first[source * kStride + index]",
        tests=("tests/backends/test_nvlink_masks.py::test_memory_of_masked_ranks",),
        gpu=True,
    ),
    Mutation(
        name="kernels-add-rows-of-masked-ranks",
        rule="a combine adds what lies where masked ranks would have sent rows home",
        target="kernels/combine/combine.cuh:find_bases",
        old="turn.leaves_out(i) ? kNoRows : args.all_counts[args.call.rank * kCounts + i]",
        new="args.all_counts[args.call.rank * kCounts + i]",
        tests=(f"{MASKS}::test_negative_zeros",),
        gpu=True,
    ),
    Mutation(
        name="rows-to-masked-ranks",
        rule="a combine stores rows in the memory of a masked rank",
        target="kernels/combine/combine.cuh:find_bases",
        old="turn.leaves_out(i) ? 0 : args.all_counts[i * kCounts + args.call.rank]",
        new="args.all_counts[i * kCounts + args.call.rank]",
        tests=("tests/backends/test_nvlink_masks.py::test_memory_of_masked_ranks",),
        gpu=True,
    ),
)

MUTATIONS = AGREEMENT + TRANSFERS + MEMORY + REPEATED + KERNELS
