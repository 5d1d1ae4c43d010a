"""Rules of ranks that are gone: who is masked, what that costs, and who comes back."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
MEMBERSHIP = "runtime.membership:Membership"
WATCH = "runtime.waiting:Watch"
MASKED, LATE, REJOIN = (f"tests/runtime/test_{name}.py" for name in ("masked_ranks", "late_ranks", "rejoin"))
SAME_ROWS = (f"{LATE}::test_everybody_sees_the_same_rows",)
LATE_RANK = (f"{LATE}::test_late",)
STORE = (f"{LATE}::test_the_store_is_left_clean",)
MASKS, ON_TIMEOUT = "tests/comm/test_masks.py", "tests/comm/test_on_timeout.py"
WITHIN_DISPATCH = (f"{ON_TIMEOUT}::test_late_within_a_dispatch",)

AGREEMENT = (
    M("gave-up-before-it-spoke", "who gave up is not heard any more, whatever it said before",
      f"{WATCH}._is_there_after_all", "awaited.wait(0)", "False",
      f"{MASKED}::test_what_a_rank_says_before_it_gives_up", num_ranks=4),
    M("growth-over-the-process-group",
      "ranks that are left agree about another communicator by collectives that cannot end",
      "comm.communicators_by_shape:Communicators.meeting", "meeting = meeting.left_by_pairs()", "pass",
      "tests/comm/test_shrinking.py::test_a_death"),
    M("lists-are-not-compared", "ranks mask what each of them was told", f"{MEMBERSHIP}.ask",
      "change[1:] != [request, _listed(ranks)]", "False", f"{MASKED}::test_lists_that_differ", num_ranks=4),
    M("a-mask-that-one-forgets", "a rank that makes another call where others ask for a mask waits for ever",
      f"{MEMBERSHIP}.require_same_mask", "change is not None and change[0] <= step", "False",
      f"{MASKED}::test_a_rank_that_asks_for_no_mask", num_ranks=4),
    M("closed-and-missed", "ranks that mask one which has closed its communicator take it for missing",
      f"{WATCH}._trouble", "missed.intersection(self.notes.who_left_before(step))",
      "self.notes.who_left_before(step)", f"{MASKED}::test_a_rank_that_has_closed", num_ranks=4),
    M("slow-is-out-of-step", "a rank that waits in an earlier collective than that of a mask is out of step",
      f"{MEMBERSHIP}.require_same_mask", "change[0] <= step", "True",
      f"{MASKED}::test_a_rank_that_is_slow_is_not_out_of_step", num_ranks=4),
    M("held-up-is-late", "a rank that waits for a late one is masked with it", f"{WATCH}._mask_late",
      "awaited.pending - members.roll_call(awaited.pending)", "set(awaited.pending)",
      f"{LATE}::test_who_is_held_up_is_not_late", num_ranks=4),
    M("nobody-says-what-it-holds", "a row that a rank sent to some before it ended is lost to the others",
      f"{MEMBERSHIP}._adopt", "rank in self.lost", "False", *SAME_ROWS, num_ranks=4),
    M("nobody-waits-for-what-others-hold",
      "a gather ends without the row of a rank that ended, though others may hold it", f"{WATCH}.settle_rows",
      "self.membership.unsettled()", "None", *SAME_ROWS, num_ranks=4),
    M("masked-and-not-told", "a rank that the others have masked goes on", f"{WATCH}.look",
      "me in self.membership.lost", "False", *LATE_RANK, num_ranks=4),
    M("back-without-a-look", "a rank that was away takes what was sent to it before it was masked", f"{WATCH}.begin",
      "self.look()", "pass", *LATE_RANK, num_ranks=4),
    M("gone-ranks-keep-notes", "notes stay in the store when all that are not gone have left",
      "runtime.store_notes:StoreNotes.leave", "[rank for rank in range(self.num_ranks) if rank not in self.gone]",
      "range(self.num_ranks)", *STORE),
    M("masked-ranks-find-no-note", "what tells a masked rank that it is masked is deleted with the rest",
      "runtime.store_notes:StoreNotes.leave", "self.gone and name.startswith(TELLS_WHO_IS_MASKED)", "False", *STORE),
    M("back-with-other-terms", "a rank comes back with arguments that differ from those of the others",
      "runtime.connecting:take_back", 'call["terms"].get(term) != value', "False",
      f"{REJOIN}::test_who_comes_back_different"),
    M("back-without-a-connection", "ranks go on with one that could not connect with all of them",
      "runtime.connecting:_who_failed", "next(iter([*failed, *absent]), [])", "[]",
      f"{REJOIN}::test_who_cannot_connect", num_ranks=4),
)

TRANSFERS = (
    M("open-calls-lose-what-is-masked", "a mask counts for a call that is open", f"{WATCH}._leave_lost",
      "awaited.give_up(wait.lost)", "awaited.give_up(members.masked)",
      f"{MASKED}::test_a_call_that_is_open_is_finished_as_it_began", num_ranks=4),
    M("lost-and-not-said", "a transfer does not say whose part it gave up", "runtime.links:PairTransfers.give_up",
      "self._absent |= self.pending.union(self.broken).intersection(ranks)", "pass",
      f"{LATE}::test_late_in_the_middle_of_a_call", num_ranks=4),
    M("parts-that-come-too-late", "what a rank sends late changes the result of a transfer that has ended without it",
      "runtime.links:Links.start",
      'arriving = [torch.empty(place.shape, dtype=place.dtype, device="cpu") for place in places]',
      "arriving = list(places)", f"{LATE}::test_what_comes_behind_the_end", num_ranks=4),
    M("transfers-that-are-dropped", "what arrives for a transfer that nobody waits for stops the connection",
      "runtime.links:Links.start", "self._open = [*filter(None, self._open), works]", "pass",
      f"{LATE}::test_transfers_that_nobody_waits_for", num_ranks=4),
    M("hidden-by-a-masked-rank", "a masked rank that gives up hides one that takes part and has given up before",
      "runtime.store_notes:StoreNotes._who_ended", "(latest, *range(self.num_ranks))", "(latest,)",
      "tests/runtime/test_store_notes.py::test_who_is_gone_hides_nobody"),
    M("routes-to-masked-ranks", "ids of masked ranks' experts are routes", "ops.routing:without_ranks",
      "torch.where(gone[rank_of], -1, topk_ids)", "topk_ids", f"{MASKS}::test_bounded_overflow"),
    M("rows-of-lost-ranks", "a dispatch keeps rows of a rank that was lost in it",
      "backends.collective:CollectiveBackend.send_dispatch", "metadata.lost | payload.arriving.lost", "metadata.lost",
      *WITHIN_DISPATCH),
    M("counts-of-lost-ranks", "a dispatch counts routes of a rank that was lost in it",
      "backends.collective:CollectiveBackend.send_dispatch", "sizes.without(lost)", "sizes", *WITHIN_DISPATCH),
    M("zeros-of-lost-ranks", "a combine adds the zeros of ranks that sent nothing",
      "backends.collective_handle:terms_without",
      "torch.where(torch.tensor(gone, device=positions.device)[positions], -1, positions)", "positions",
      f"{MASKS}::test_negative_zeros"),
    M("masked-ranks-disagree", "the empty row of a masked rank counts as another call",
      "runtime.openings:Opening.differs", "self._table[self._present, word]", "self._table[:, word]",
      f"{MASKS}::test_before"),
    M("compared-with-a-masked-rank", "PlanMismatch names rank 0, although it is masked",
      "runtime.openings:raise_difference", "PlanMismatch(rank, name, text.get(name), expected.get(name), base)",
      "PlanMismatch(rank, name, text.get(name), expected.get(name))", f"{MASKS}::test_faults_of_those_that_stay",
      num_ranks=4),
    M("late-ranks-break-all", "on_timeout='mask' is on_timeout='raise'", "runtime.rank_group:RankGroup._go_by_pairs",
      "self._watch.masks_late = True", "pass", f"{ON_TIMEOUT}::test_late_for_a_dispatch"),
)

MEMORY = (
    M("memory-of-masked-ranks", "memory that is made after a mask waits for the masked ranks to let go",
      "runtime.symmetric_memory:_Shared.map_all", "offers[rank].rank == rank", "True",
      "tests/runtime/test_memory_without_ranks.py", num_ranks=4),
    M("memory-of-ranks-that-left", "memory is freed while a rank that was masked may still write there",
      "runtime.symmetric_memory:_Shared._waits_for_others", "{rank: self._note(rank) for rank in self.others}",
      "{rank: self._note(rank) for rank in self.others - self._notes.gone}",
      "tests/runtime/test_memory_without_ranks.py", num_ranks=4),
)

LATE_CALLS = "backends.peers.late_ranks:LateRanks"
MADE_UP = "tests/backends/test_late_calls.py"

NOT_ALL_BEGIN = ("tests/runtime/test_memory_without_ranks.py::test_memory_that_not_all_begin",)
REPEATED = (
    M("collectives-that-nobody-joins", "a rank waits on in a collective of a call that the others make again",
      f"{WATCH}._leave_lost", "members.num_losses > self.known_losses", "False", *NOT_ALL_BEGIN, num_ranks=4),
    M("collectives-of-two-calls", "ranks that began different collectives before a loss mean different ones behind it",
      "runtime.rank_group:RankGroup.settle_losses", "self.notes.skip_to(step)", "pass", *NOT_ALL_BEGIN, num_ranks=4),
    M("begun-in-vain-and-kept", "memory that some ranks began to make waits for ever until the others let go of it",
      "runtime.store_notes:StoreNotes.has_skipped", "named.get(kind, 0) < int(number)", "False", *NOT_ALL_BEGIN,
      num_ranks=4),
    M("calls-without-a-meeting", "a rank returns before it knows that all others have the result",
      f"{LATE_CALLS}.call", "self._meet(made)", "pass", f"{MADE_UP}::test_a_call_and_its_meeting"),
    M("meetings-behind-a-loss-count", "a rank returns from a call that it has told the others to make again",
      f"{LATE_CALLS}.call", "if not self._is_stale():\n    self._has_ended(number)\n    continue",
      "if made is not None:\n    self._has_ended(number)\n    continue", f"{MADE_UP}::test_a_meeting_behind_a_loss"),
    M("calls-that-ended-are-made-again", "a rank makes a call again that has ended for another one",
      f"{LATE_CALLS}._go_on", "self._has_ended(self._ranks.settle_losses(PHASE, name))",
      "self._ranks.settle_losses(PHASE, name)", f"{MADE_UP}::test_a_meeting_that_others_had"),
    M("errors-without-a-meeting", "an error ends a call on a rank that does not know whether the others have it",
      "backends.peers.late_ranks:_Made.__init__", "not is_known_to_all(error)", "True",
      f"{MADE_UP}::test_errors_that_all_ranks_raise"),
    M("masked-and-still-met", "a rank that learns in a call that it is masked waits for the others",
      "backends.peers.late_ranks:_Made.__init__", "(PeerTimeout, CommunicatorBroken)", "PeerTimeout",
      f"{MADE_UP}::test_a_rank_that_is_masked"),
    M("overflows-in-vain", "a call that did not take place tells of its overflow", f"{LATE_CALLS}.call",
      "made, self._maker.dispatcher.shared.overflow = None, overflow", "made = None",
      f"{MADE_UP}::test_an_overflow_in_vain"),
    M("replays-without-a-meeting", "check() lets a rank replay on while another one replays again",
      f"{LATE_CALLS}.check", "self._meet(made)", "pass", f"{MADE_UP}::test_replays_that_are_well"),
    M("replays-behind-a-loss-count", "a rank takes replays for well that the others make again",
      f"{LATE_CALLS}.check", "self._find_late(timeout, 0)", "return", f"{MADE_UP}::test_replays_in_vain"),
    M("replays-that-ended-are-made-again", "a rank makes replays again that another one knows to be well",
      f"{LATE_CALLS}.check", "self._ended < number", "True",
      f"{MADE_UP}::test_replays_that_another_rank_knows_to_be_well"),
    M("memory-of-late-ranks-is-kept", "a rank that lives writes to memory that others use without it",
      "backends.peers.backend:NvlinkBackend.remake", "all(ended)", "True", f"{MADE_UP}::test_memory_that_is_kept"),
    M("memory-of-ended-ranks-is-not-kept", "graphs have to be captured again when a process has ended",
      "backends.peers.backend:NvlinkBackend.remake", "all(ended)", "False", f"{MADE_UP}::test_memory_that_is_kept"),
    M("kept-memory-while-kernels-run", "ranks go on in memory that kernels of another one still use",
      "backends.peers.backend:NvlinkBackend.remake", "before.await_work()", "pass",
      f"{MADE_UP}::test_memory_that_is_kept"),
    M("kept-memory-with-its-counts", "a MegaMoE counts rows on that calls in vain have brought",
      "backends.peers.backend:NvlinkBackend.remake", "self._fused.begin_anew()", "pass",
      f"{MADE_UP}::test_memory_that_is_kept"),
    M("kept-memory-with-its-numbers", "ranks that go on number calls differently",
      "backends.peers.opening:Launcher.resume",
      "max(epochs, key=lambda epoch: (epoch - first + (1 << 31)) % (1 << 32))", "first",
      f"{MADE_UP}::test_numbers_in_kept_memory"),
    M("in-vain-for-ever", "calls that expire although everybody is there are made again for ever",
      f"{LATE_CALLS}._find_late", "in_vain == ranks.num_ranks", "in_vain == 7", f"{MADE_UP}::test_nobody_is_late"),
)

NVLINK_CALLS = ("tests/backends/test_nvlink_masks.py::test_bounded_calls",)

KERNELS = (
    M("kernels-wait-for-masked-ranks", "a kernel waits until a masked rank opens its call",
      "device/transport/call.cuh:await_call", "peer < kRanks && !turn.leaves_out(peer)", "peer < kRanks",
      *NVLINK_CALLS, gpu=True),
    M("kernels-route-to-masked-ranks", "a kernel counts routes to masked ranks",
      "device/roles/count_routes.cuh:count_routes_of",
      "expert < 0 || turn.leaves_out(expert / Shape::experts_per_rank)", "expert < 0",
      f"{MASKS}::test_bounded_overflow", gpu=True),
    M("old-counts-of-masked-ranks", "a kernel takes what lies in the header of a masked rank for counts",
      "device/roles/count_routes.cuh:AllCounts::count",
      "turn.leaves_out(source) ? 0 : first[source * kStride + index]", "first[source * kStride + index]",
      "tests/backends/test_nvlink_masks.py::test_memory_of_masked_ranks", gpu=True),
    M("kernels-add-rows-of-masked-ranks", "a combine adds what lies where masked ranks would have sent rows home",
      "kernels/combine/combine.cuh:find_bases",
      "turn.leaves_out(i) ? kNoRows : args.all_counts[args.call.rank * kCounts + i]",
      "args.all_counts[args.call.rank * kCounts + i]", f"{MASKS}::test_negative_zeros", gpu=True),
    M("rows-to-masked-ranks", "a combine stores rows in the memory of a masked rank",
      "kernels/combine/combine.cuh:find_bases",
      "turn.leaves_out(i) ? 0 : args.all_counts[i * kCounts + args.call.rank]",
      "args.all_counts[i * kCounts + args.call.rank]",
      "tests/backends/test_nvlink_masks.py::test_memory_of_masked_ranks", gpu=True),
)

EXPERTS = "inference.nvlink_experts:NvlinkExperts"
LAUNCHES, OF_A_LAYER = "tests/inference/test_mega_launches.py::test_", "tests/inference/test_emulated_mega.py::test_"
ANEW = (f"{LAUNCHES}memory_that_is_made_anew",)

LAYERS = (
    M("layers-on-old-memory", "a MegaMoE goes on in memory from before a loss",
      "backends.peers.backend:NvlinkBackend._make_memory", "self._fused.is_stale = True", "pass", *ANEW),
    M("graphs-lose-a-layers-memory", "a MegaMoE makes its memory anew in place of what graphs use",
      f"{EXPERTS}._renew", "self._unmade_memory()", "self._memory", *ANEW),
    M("graphs-lose-a-layers-windows", "a MegaMoE lets go of maps and claims of tiles that graphs use",
      "inference.mega_gemms:MegaGemms.take_addresses",
      "calls.keep(self, memory, self.claimed, self._arriving, self._activations)", "calls.keep(self, memory)", *ANEW),
    M("senders-of-old-memory", "kernels that send rows know the memory from before a loss", f"{EXPERTS}._renew",
      "self._senders_of.clear()", "pass", *ANEW),
    M("gemms-of-old-memory", "GEMMs know the memory from before a loss",
      "inference.mega_gemms:MegaGemms.take_addresses",
      "self._memory, self._calls, self.is_stale = memory, calls, True", "self._memory, self._calls = memory, calls",
      *ANEW),
    M("traced-until-a-loss", "a MegaMoE that is traced writes no times behind a loss", f"{EXPERTS}._renew",
      "self._trace_calls(self._times)", "pass", *ANEW),
    M("nothing-to-let-go", "a MegaMoE that was never called cannot go on when ranks come back", f"{EXPERTS}._renew",
      "if self._has_memory:\n            self._gemms.let_go()", "self._gemms.let_go()", *ANEW),
    M("old-memory-beside-new", "a MegaMoE keeps the memory from before a loss until it has other", f"{EXPERTS}._renew",
      "self._gemms.let_go()", "pass", f"{LAUNCHES}old_memory_is_free_for_new"),
    M("repeated-and-counted-again", "a call that is made again counts routes twice", f"{EXPERTS}.forward",
      "counted.zero_()", "engine.masked or counted.zero_()", f"{OF_A_LAYER}a_killed_rank_is_masked[gemm1]"),
    M("repeated-from-its-result", "a call that is made again reads x where its result lies", f"{EXPERTS}.forward",
      "counted, None, schedule", "counted, out, schedule", f"{OF_A_LAYER}a_killed_rank_is_masked[sum]"),
    M("repeated-and-told-by-nothing", "a rank that fails as a call is made again ends the others' communicator",
      f"{EXPERTS}.forward", "sequence.upcoming[:] = self.upcoming", "pass",
      f"{OF_A_LAYER}a_fault_in_the_repeated_call[late]"),
    M("told-by-nothing-behind-the-meeting", "a rank that fails behind the meeting of a call is masked",
      f"{EXPERTS}._launch", "self._calls.late is None", "True",
      f"{OF_A_LAYER}a_fault_where_late_ranks_are_masked[sum]"),
    M("back-with-another-recipe", "a rank comes back to a MegaMoE whose rows lie elsewhere", f"{EXPERTS}._make_memory",
      '"recipe": self._recipe', '"recipe": ""', f"{OF_A_LAYER}a_rank_comes_back_with_another_recipe"),
)

MUTATIONS = AGREEMENT + TRANSFERS + MEMORY + REPEATED + KERNELS + LAYERS
