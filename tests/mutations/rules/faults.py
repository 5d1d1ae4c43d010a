"""Rules of the ways in which a rank tells the others of a fault, so that nobody waits for it."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TELL, EXIT = "comm.engine:Engine.report_fault", "comm.engine:Sequence.__exit__"
RULE = "runtime.telling:Telling.__exit__"
ENGINE = "tests/comm/test_engine.py::test_"

TELLING = "tests/runtime/test_telling.py::test_"

BLOCKS = (
    M("told-from-outside", "each block around a fault tells it too", RULE, "fault is None or is_known_to_all(fault)",
      "fault is None", f"{TELLING}the_innermost_tells"),
    M("interruptions-wait-for-the-others", "a rank that is interrupted waits until the others have heard of it", RULE,
      "not isinstance(fault, Exception)", "False", f"{TELLING}an_interruption_ends_the_group"),
    M("told-under-a-transform", "a fault is told with bytes that a mode of torch has made", RULE, "is_eager()", "True",
      f"{TELLING}told_outside_of_a_transform"),
)

SEQUENCES = (
    M("told-by-what-is-open", "a fault is told by a call that is open already", "comm.engine:Sequence.opened",
      "self.upcoming[:1] = []", "pass", f"{ENGINE}what_is_open_is_not_opened_again"),
    M("told-before-open-calls-are-received",
      "a rank tells its fault before it has received the calls that it has open", TELL, "pending.receive()", "pass",
      f"{ENGINE}open_calls_are_received_first"),
    M("told-behind-the-fault-of-another",
      "a rank tells its fault though an open call says that another one has failed", TELL, "is_known_to_all(other)",
      "False", f"{ENGINE}another_rank_failed_too"),
    M("what-all-know-is-told", "a rank tells the others what all of them raise", RULE,
      "fault is None or is_known_to_all(fault)", "fault is None", f"{ENGINE}what_all_ranks_know_is_not_told"),
    M("told-by-every-sequence", "each sequence around a fault tells it once more", RULE,
      "fault.known_to_all = True", "pass", f"{ENGINE}a_fault_is_told_by_the_innermost_alone"),
    M("one-call-is-told", "a backend hears of the next call alone, and not of those behind it", TELL,
      "self._backend.report_fault(fault, sequence.upcoming)",
      "self._backend.report_fault(fault, sequence.upcoming[:1])", f"{ENGINE}what_is_open_is_not_opened_again"),
    M("told-in-a-capture", "a rank waits for another stream to tell a fault while a graph is captured", TELL,
      "sequence.upcoming and not captured", "sequence.upcoming", f"{ENGINE}a_fault_in_a_capture"),
    M("lost-ranks-hide-a-fault", "a rank raises that the others are gone instead of its own fault", TELL,
      "suppress(PeerTimeout, CommunicatorBroken)", "suppress()", f"{ENGINE}nobody_is_there_to_be_told"),
    M("outer-calls-are-forgotten", "a sequence within another one ends the outer one too", EXIT,
      "self._engine._sequence = self._outer", "self._engine._sequence = None",
      f"{ENGINE}sequences_within_sequences"),
)

PIECES = "tests/training/test_routed_experts.py::test_"

LAYERS = (
    M("layers-fail-alone", "the others wait for a layer whose experts have failed on one rank",
      "training.routed_experts:_Forward.run", "self.engine.sequence(*self.engine.with_counts(calls))",
      "self.engine.sequence()",
      f"{PIECES}a_fault_in_a_piece"),
    M("gradients-fail-alone", "the others wait for gradients of a layer that one rank could not compute",
      "training.routed_experts:_RoutedExperts.backward", "ctx.engine.sequence(*backward.calls())",
      "ctx.engine.sequence()", "tests/training/test_faults.py::test_a_weight_changed_before_backward"),
)

HOST = "tests/backends/test_nvlink_host.py::test_"
AFTER_A_FAULT = f"{HOST}calls_that_follow_a_fault"
REPORT = "backends.peers.backend:NvlinkBackend.report_fault"

BACKENDS = (
    M("opened-without-the-fault", "a rank with a fault opens the call as if it had none",
      "backends.collective:CollectiveBackend.report_fault", "self._open({'call': upcoming[0].name}, None, fault)",
      "self._open({'call': upcoming[0].name})",
      "tests/comm/test_errors.py::test_combine_fault"),
    M("buffers-without-a-fault", "a rank with a fault opens a call that the others open only behind a new buffer",
      REPORT, "not all(map(self._has_buffers, (call, following)))", "False", f"{AFTER_A_FAULT}[before a buffer]"),
    M("calls-behind-an-awaited-one", "a rank with a fault opens calls behind one that the others wait for", REPORT,
      "call.awaited or reads or not all(map(self._has_buffers, (call, following)))",
      "reads or not all(map(self._has_buffers, (call, following)))", f"{AFTER_A_FAULT}[awaited]"),
    M("calls-behind-a-checked-one", "a rank with a fault opens further calls though the others check every one",
      REPORT, "self._checked or self._late is not None", "self._late is not None", f"{AFTER_A_FAULT}[checked]"),
    M("nothing-behind-a-fault", "a rank with a fault lets the others wait in the calls behind the first", REPORT,
      "names.append(following.name)", "pass", f"{AFTER_A_FAULT}[two]"),
    M("calls-behind-one-that-is-made-again",
      "a rank with a fault opens further calls though late ranks are masked, and each call is waited for", REPORT,
      "self._checked or self._late is not None", "self._checked", f"{AFTER_A_FAULT}[late ranks are masked]"),
    M("a-layers-second-call-alone",
      "a rank with a fault lets the others wait in the second call of a MegaMoE that masks late ranks", REPORT,
      "(self._checked or self._late is not None) and not self._buffers.fused",
      "self._checked or self._late is not None", f"{AFTER_A_FAULT}[late ranks of a layer]"),
    M("a-fault-beside-a-new-buffer", "a rank tells a fault while the others raise what an earlier call left", REPORT,
      "first.awaited or not self._has_buffers(first)", "first.awaited",
      f"{HOST}a_bad_call_behind_an_unread_overflow[wire]"),
    M("a-first-reweighting-makes-no-buffer",
      "a rank tells a fault of its first weights apart while the others raise what an earlier call left",
      "comm.calls:ReweightCall.upcoming",
      "Upcoming(self.name, options, torch.float32.itemsize, width=None if width == plan.hidden else width)",
      "Upcoming(self.name)", f"{HOST}a_bad_call_behind_an_unread_overflow[first reweighted]"),
    M("first-rows-of-a-dtype-make-no-buffer",
      "a rank tells a fault of its first rows of a dtype while the others raise what an earlier call left",
      "comm.calls:ResendCall.upcoming", "isinstance(routed, Routed) and isinstance(x, torch.Tensor)", "False",
      f"{HOST}a_bad_call_behind_an_unread_overflow[first wide rows again]"),
    M("narrow-rows-need-no-buffer", "narrow rows seem to arrive in the buffer of usual ones",
      "backends.peers.buffers:Buffers.has_for_dispatch", "width is not None", "False",
      f"{HOST}a_first_reweighting_has_a_buffer_of_its_own"),
    M("nodes-open-behind-an-awaited-call",
      "between nodes a rank with a fault opens calls behind one that the others wait for",
      "backends.nodes.backend:NodesBackend.report_fault", "call.awaited or self._checked", "self._checked",
      "tests/backends/test_gin.py::test_calls_that_follow_a_fault"),
    M("nothing-behind-a-fault-between-nodes",
      "between nodes a rank with a fault lets the others wait in the calls behind the first",
      "backends.nodes.backend:NodesBackend.report_fault", "names.append(following.name)", "pass",
      "tests/backends/test_gin.py::test_calls_that_follow_a_fault"),
)

LAUNCH = "backends.peers.opening:Launcher.report_fault"
OUTCOME = "backends.peers.outcomes:Outcomes._raise_outcome"

LAUNCHES = (
    M("every-call-has-a-fault", "each call behind a fault tells of a fault of its own", LAUNCH,
      "status = FOLLOWS_A_FAULT", "pass", f"{HOST}calls_after_a_fault"),
    M("calls-that-nobody-else-opens", "a rank with a fault opens more calls than the others do before they hear of it",
      LAUNCH, "names[:1 + CALLS_IN_FLIGHT]", "names", f"{HOST}calls_after_a_fault"),
    M("told-before-the-others-wait", "a rank opens the call of its fault before it has read what ends the others",
      LAUNCH, "others_wait", "False", f"{HOST}others_that_wait_open_nothing"),
    M("a-fault-without-words", "a rank does not post what its fault is", LAUNCH,
      "self.ranks.notes.post(f'fault/{number}', f'{type(fault).__name__}: {fault}')", "pass",
      f"{HOST}a_fault_of_another_beside_growth"),
    M("growth-beside-a-fault", "a rank that needs room goes to make more though another one has failed", LAUNCH,
      "self.outcomes.raise_final_fault(number)", "pass", f"{HOST}a_fault_of_another_beside_growth"),
    M("growth-is-a-fault", "a rank that needs room takes the same need of another one for a fault",
      "backends.peers.outcomes:Outcomes.raise_final_fault", "note is not None and not means_growth(note)",
      "note is not None", f"{HOST}a_fault_of_another_beside_growth"),
    M("what-follows-is-another-fault", "a call that follows a fault raises it again", OUTCOME,
      "outcome is None or outcome.status == FOLLOWS_A_FAULT", "outcome is None",
      f"{HOST}what_follows_a_fault_is_no_news"),
    M("own-faults-are-news", "a rank raises in a later call what it has told itself",
      "backends.peers.outcomes:Outcomes._conclude", "call.own_fault or own_fault", "own_fault",
      f"{HOST}calls_behind_an_unread_outcome"),
)

ENDS = "tests/runtime/test_rank_group.py::test_what_ends_a_group"
WITHIN = "tests/runtime/test_rank_group.py::test_a_rank_that_fails_within_a_call"

ENDINGS = (
    M("ended-without-a-note", "a rank that ends the group says nothing to those that wait",
      "runtime.rank_group:RankGroup.abort", "self.notes.fail(why)", "pass", WITHIN),
    M("ended-and-used", "a rank goes on with a group that it has ended",
      "runtime.rank_group:RankGroup.abort", "self._watch.broken = f'an earlier call failed: {why}'", "pass",
      ENDS),
    M("ended-for-one-alone",
      "communicators of a process group do not hear that a rank has left one of them in the middle of a call",
      "runtime.rank_group:RankGroup.abort", "self._siblings.part(self.notes, PeerError(self.rank, why))", "pass",
      WITHIN),
    M("known-faults-end-the-group", "an error that all ranks raise ends the group",
      RULE, "fault is None or is_known_to_all(fault)", "fault is None", ENDS),
    M("failed-and-told-again", "a fault that has ended the group is told once more",
      RULE, "fault.known_to_all = True", "pass", ENDS),
    M("interrupted-in-an-agreement", "a rank that is interrupted before it agrees tells nobody",
      "runtime.rendezvous:agreeing", "Telling(tell, whole.abort)", "Telling(tell, repr)",
      "tests/runtime/test_rendezvous.py::test_an_interrupted_rank_ends_the_group"),
    M("interrupted-in-a-backend", "a rank that is interrupted while it makes a backend tells nobody",
      "backends.registry:_try", "ranks.abort(interruption)", "pass",
      "tests/backends/test_registry.py::test_an_interrupt_ends_the_group"),
    M("taken-back-without-memory", "a rank without memory for those that came back leaves the others waiting",
      "backends.peers.backend:NvlinkBackend.unmask", "self._ranks.abort(fault)", "pass",
      f"{HOST}no_memory_for_ranks_that_come_back"),
)

GROWING = "tests/comm/test_communicators_by_shape.py::test_a_fault_comes_before_growth"

GROWTH = (
    M("no-room-and-silent", "a rank that needs another communicator makes it without a word",
      "comm.communicators_by_shape:Communicators.run", "self._last is not None", "False",
      "tests/comm/test_communicators_by_shape.py::test_a_layer_whose_batches_grow"),
    M("growth-in-spite-of-a-fault", "a rank that needs room goes to make more though another one has failed",
      "comm.communicators_by_shape:Communicators.run", "not means_growth(error.reason)", "False", GROWING),
    M("no-room-is-any-fault", "the others take a rank that needs room for one that has failed",
      "comm.communicators_by_shape:Communicators.run", "not means_growth(error.reason)", "True",
      "tests/comm/test_communicators_by_shape.py::test_a_layer_whose_batches_grow"),
    M("announced-elsewhere", "a rank whose shape is new says so where a rank with a fault tells nobody",
      "comm.communicators_by_shape:Communicators.run",
      "self._opening(None, Upcoming('dispatch', awaited=True), shape, device)",
      "self._opening(None, Upcoming('dispatch', awaited=True), UNKNOWN, device)",
      "tests/comm/test_communicators_by_shape.py::test_a_new_shape_is_announced_where_its_faults_are_told"),
    M("interrupted-checks", "a rank that is interrupted while it checks a call lets the others wait in it",
      "comm.communicators_by_shape:Communicators.report_faults_of", "Telling(tell, tell)", "Telling(tell, repr)",
      "tests/comm/test_communicators_by_shape.py::test_an_interrupted_check_ends_the_group"),
    M("nobody-to-tell", "a fault before the first communicator is not told",
      "comm.communicators_by_shape:Communicators._opening", "agreeing(self.meeting(device), MAKING)",
      "Telling(repr, repr)",
      "tests/compat/deep_ep/test_normal.py::test_dispatch_fault"),
    M("room-is-not-what-it-says", "the need of more room has the name of another fault", "runtime.openings:encode",
      "f'{type(fault).__name__}: {fault}'", "f'{type(fault).__mro__[1].__name__}: {fault}'",
      "tests/comm/test_communicators_by_shape.py::test_a_layer_whose_batches_grow"),
)

MEETING = "tests/runtime/test_rendezvous.py::test_"

AGREEMENTS = (
    M("agreed-in-spite-of-a-fault", "ranks agree though one of them could not take part", "runtime.rendezvous:agree",
      "reason is not None", "False", f"{MEETING}errors_of_others_are_known"),
    M("agreed-faults-are-told-again", "a fault that all ranks heard of when they agreed is told once more",
      RULE, "fault.known_to_all = True", "pass", f"{MEETING}own_fault_is_known_afterwards"),
    M("others-come-first", "a rank raises the fault of another one instead of its own",
      "runtime.rendezvous:agreeing", "whole.all_gather_object((f'{type(fault).__name__}: {fault}', {}, None), phase)",
      "raise PeerError(1, 'theirs')", f"{MEETING}own_fault_is_known_afterwards"),
    M("a-fault-agrees", "a rank that cannot take part agrees with the others", "runtime.rendezvous:agreeing",
      "(f'{type(fault).__name__}: {fault}', {}, None)", "(None, {}, None)",
      "tests/compat/test_bad_calls.py::test_options_of_a_layer", num_ranks=4),
    M("made-under-a-transform", "the others wait for a communicator that one rank makes under a transform of torch",
      "comm.communicator:Communicator.__init__", "nullcontext() if rejoin else agreeing(ranks, MAKING)",
      "nullcontext()",
      "tests/comm/test_torch_modes.py::test_a_transform_on_one_rank_is_told[fake]", num_ranks=4),
    M("two-threads-make-one", "a thread makes a communicator while another one is in a call of its process group",
      "comm.communicators_by_shape:Communicators._make",
      "in_turn is not None", "False", "tests/comm/test_threads.py::test_a_thread_that_makes_the_first_communicator",
      num_ranks=4),
)

REGISTRY = "tests/backends/test_registry.py::test_"
TRY = "backends.registry:_try"

VERDICTS = (
    M("a-backend-of-some-ranks", "a rank takes a backend that another one could not make", TRY,
      "each is not None and each.failed", "False", f"{REGISTRY}others_fail_because_of_one"),
    M("failed-and-kept", "a backend that another rank could not make is not closed", TRY, "backend.close()", "pass",
      f"{REGISTRY}faults_that_no_other_backend_cures"),
    M("wrong-arguments-have-a-cure", "a wrong argument of one rank lets all of them try the next backend", TRY,
      "each.fatal", "False", f"{REGISTRY}faults_that_no_other_backend_cures"),
    M("echoes-are-reasons", "a backend does not work for a reason that another rank's fault was", TRY,
      "not pair[1].of_another", "True", f"{REGISTRY}others_fail_because_of_one"),
    M("verdicts-of-some", "a rank takes another one's step for its verdict", TRY,
      "all(each is None or isinstance(each, Verdict) for each in verdicts)", "True",
      f"{REGISTRY}a_rank_that_fails_between_two_steps[1]", num_ranks=4),
)

FAULTY = "tests/training/test_faults.py::test_"

DIFFERENCES = (
    M("frozen-alone", "a rank has frozen parameters of a layer, and the others wait for its gradients",
      "training.layer:ExpertParallelMoE._forward", "('trained parameters', trained or 'none')",
      "('trained parameters', 'none')", f"{FAULTY}frozen_on_one_rank"),
    M("frozen-experts-alone", "a rank has frozen experts that the others train",
      "training.routed_experts:_Forward.__init__", "(*alike, ('trained experts', trained or 'none'))", "alike",
      f"{FAULTY}experts_frozen_on_one_rank"),
    M("ids-given-alone", "a rank gives a layer ids, and the others choose",
      "training.layer:ExpertParallelMoE._forward", "_GIVEN[topk_ids is not None]", "_GIVEN[0]",
      f"{FAULTY}routes_given_on_one_rank"),
    M("weights-given-alone", "a rank gives a layer weights, and the others learn them",
      "training.layer:ExpertParallelMoE._forward", "_GIVEN[topk_weights is not None]", "_GIVEN[0]",
      f"{FAULTY}routes_given_on_one_rank"),
    M("a-dispatch-leaves-out-what-layers-mean", "a dispatch does not say what ranks must mean alike in its layer",
      "backends.handshake:dispatch_fields", "dict(kind.alike)", "{}", f"{FAULTY}frozen_on_one_rank"),
    M("a-sum-leaves-out-what-layers-mean", "a sum of losses does not say what ranks must mean alike in its layer",
      "training.gradients:_SumOverRanks.forward", "alike = dict(others)", "alike = {}",
      f"{FAULTY}frozen_on_one_rank"),
    M("summed-with-a-fault", "ranks sum their losses though the router of one of them has failed",
      "runtime.rank_group:RankGroup.all_reduce_sums", "fault is not None", "False",
      f"{FAULTY}a_router_is_told_in_the_sum_of_losses"),
)

WIDTHS = (
    M("narrow-rows-look-like-others", "between nodes a rank that sends weights alone looks as if it sent rows",
      "backends.nodes.backend:NodesBackend._repeat", "width is None", "True",
      "tests/backends/test_gin.py::test_narrow_rows_say_their_width"),
)

CONSTRUCTORS = (
    M("experts-made-alone", "experts for which a rank has no memory are made by the others",
      "training.expert_module:RoutedExperts.__init__", "agree(comm.engine.ranks, prepare, 'making RoutedExperts')[0]",
      "prepare()[1]", f"{FAULTY}a_layer_without_memory"),
    M("a-layer-made-alone", "a layer for whose router a rank has no memory is made by the others",
      "training.layer:ExpertParallelMoE.__init__", "agree(comm.engine.ranks, prepare, 'making an ExpertParallelMoE')",
      "prepare()", f"{FAULTY}a_layer_without_memory", f"{FAULTY}a_warning_that_is_an_error"),
    M("no-memory-is-told-to-nobody", "a rank tells of wrong arguments of a communicator, and of no other fault",
      "comm.communicator:Communicator.__init__", "fault = error",
      "fault = error if isinstance(error, InvalidArgument) else [][0]",
      "tests/comm/test_errors.py::test_a_constructor_without_memory"),
    M("no-memory-for-more-words", "a rank without memory for words behind an opening lets the others wait",
      "runtime.rank_group:RankGroup._gather_words", "self.telling()", "Telling(repr, repr)",
      "tests/runtime/test_rank_group.py::test_no_memory_for_words_that_follow", num_ranks=4),
)

RANKS_THAT_DIFFER = DIFFERENCES + WIDTHS + CONSTRUCTORS
MUTATIONS = (
    BLOCKS + RANKS_THAT_DIFFER + SEQUENCES + LAYERS + BACKENDS + LAUNCHES + ENDINGS + GROWTH + AGREEMENTS + VERDICTS
)
