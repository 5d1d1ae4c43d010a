"""Rules of comm/, and of what opens its calls: the handshake, who is asked, and what an error says."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
FAULT_TESTS = ("tests/training/test_layer.py::test_a_fault_on_one_rank_is_an_error_on_all_and_the_layer_works_on",)

HANDSHAKE = (
    M("threads-at-once",
      "a call of one thread waits behind that of another, in an order that other ranks need not have",
      "runtime.turns:Turn.enter", "fault = refusal()", "fault = None",
      "tests/comm/test_threads.py::test_calls_at_once"),
    M("a-transform-goes-the-plain-way", "a call that torch transforms is made", "comm.engine:Engine.needs_no_sequence",
      "current_transforms() is None", "True", "tests/comm/test_torch_modes.py::test_a_transform_on_one_rank_is_told"),
    M("a-transform-around-what-is-told", "a fault is told under the transform that it is about",
      "runtime.telling:Telling.__exit__", "is_eager()", "True",
      "tests/comm/test_torch_modes.py::test_a_transform_on_one_rank_is_told"),
    M("freed-memory-is-read", "a tensor whose storage was freed is sent", "comm.checks:require_tensor",
      "not has_memory(value)", "False", "tests/comm/test_torch_modes.py::test_tensors_without_memory_of_their_own"),
    M("lost-status-word", "the other ranks do not hear of a fault that one rank sees", "runtime.openings:encode",
      "_OK if fault is None else _FAULT", "_OK", *FAULT_TESTS),
    M("first-messages-as-long-as-they-need",
      "what opens a call is as long as its sender needs, and ends a process that awaits something else",
      "runtime.openings:encode", "_HEADER_WORDS + room(num_ranks)", "_HEADER_WORDS + len(first)",
      "tests/comm/test_first_messages.py::test_one_call_in_another_order"),
    M("counts-without-room-are-lost", "counts that the first message has no room for are not sent",
      "runtime.rank_group:RankGroup.open", "opening.size > room", "False",
      "tests/comm/test_first_messages.py::test_more_experts_than_a_message_holds"),
    M("others-stay-apart", "behind a call of two communicators only the two themselves count alike again",
      "runtime.siblings:Siblings.skip_to", "self.all", "self.all[:1]",
      "tests/comm/test_first_messages.py::test_one_call_in_another_order"),
    M("named-by-its-own-count", "a communicator has another name on a rank that has made one more, which failed",
      "runtime.rank_group:RankGroup.open", "self.notes.renumber(opening.made)", "pass",
      "tests/comm/test_first_messages.py::test_one_rank_makes_something"),
    M("numbers-stay-apart", "ranks whose calls have different numbers fail for ever",
      "runtime.rank_group:RankGroup.open", "apart = True", "pass",
      "tests/comm/test_openings.py::test_numbers_that_differ"),
    M("regions-run-again-anywhere", "a checkpointed region runs again at different calls of different ranks",
      "comm.autograd:_save_a_mark", "torch._C._autograd._top_saved_tensors_default_hooks(True) is not None", "False",
      "tests/comm/test_regions.py::test_a_region_that_runs_again"),
    M("faults-of-plain-calls-stay-here", "a fault in a call with nothing around it is not told to the others",
      "comm.calls:UserCall.run", "self.calls()[engine.open_calls.count - opened :]", "[]",
      "tests/comm/test_errors.py::test_dispatch_fault"),
    M("peer-error-names-another", "PeerError names the rank after the one that failed",
      "runtime.openings:Opening.raise_fault", "PeerError(rank, reasons[rank])",
      "PeerError((rank + 1) % len(self._there), reasons[rank])", *FAULT_TESTS),
    M("no-agreement-in-calls", "ranks that call with different options are not told",
      "runtime.rank_group:RankGroup.open", "opening.differs(openings.MEANING)", "False",
      "tests/comm/test_errors.py::test_disagreement"),
    M("any-dispatch-will-do", "ranks that combine different dispatches are not told",
      "runtime.openings:CallKind.hash_of", "(number + 1) * 0x9E3779B97F4A7C15", "0",
      "tests/comm/test_errors.py::test_disagreement"),
    M("disagreement-of-the-last", "PlanMismatch compares ranks with the last one, not with rank 0",
      "runtime.openings:raise_difference", "present[0]", "present[-1]",
      "tests/comm/test_errors.py::test_disagreement"),
    M("two-ranks-on-one-gpu", "ranks that share a GPU get kernels, which wait for each other's SMs",
      "backends.peers.backend:objections", "gpu in gpus[:rank]", "False", "tests/backends/test_registry.py"),
)

ARGUMENTS = (
    M("negative-ids-pass", "ids below -1 are taken for -1", "comm.checks:_check_id_range",
      "(ids < -1) | (ids >= plan.num_experts)", "ids >= plan.num_experts",
      "tests/comm/test_errors.py::test_dispatch_fault"),
    M("fp8-gradients-vanish", "an FP8 payload that requires grad is dispatched without a word",
      "comm.checks:_check_payload",
      "torch.is_grad_enabled() and (x.requires_grad or (scales is not None and scales.requires_grad))", "False",
      "tests/comm/test_errors.py::test_fp8_fault"),
)

GRADIENTS = (
    M("to-fp8-rows-require-grad", "rows that were quantised on the way claim to have a gradient",
      "comm.autograd:_Dispatch.forward", "not ctx.needs_input_grad[4]", "False",
      "tests/comm/test_dispatch.py::test_to_fp8_and_gradients"),
    M("rows-hold-their-graph", "rows that a backend keeps point at the graph that holds the backend's handle",
      "comm.autograd:_Dispatch.forward", "received_rows[0].detach()", "received_rows[0]",
      "tests/comm/test_dispatch.py::test_what_a_handle_keeps_has_no_graph"),
    M("no-gradient-of-weights", "combine gives no gradient to the weights", "comm.autograd:_SendCombine.backward",
      "grad_weights.to(weights.dtype)", "torch.zeros_like(weights)",
      "tests/comm/test_row_weights.py::test_it_is_a_weighted_combine"),
)

ROOM = "comm.engine:OpenCalls.require_room"
PENDING_TESTS, OPEN_TESTS = "tests/comm/test_pending.py::", "tests/comm/test_open_calls.py::"

HALVES = (
    M("backward-of-a-closed-one", "backward launches kernels on the buffers of a closed communicator",
      "comm.engine:Engine.require_room", "self.ranks.require_alive()", "pass",
      "tests/backends/test_nvlink_kinds.py::test_backward_of_a_closed_communicator"),
    M("three-open-calls", "a call opens though one before the last is not received", ROOM, "half.number != self.count",
      "half.number < self.count - 1", f"{OPEN_TESTS}test_a_third", f"{OPEN_TESTS}test_what_may_be_open"),
    M("one-open-call", "no call opens beside one that is not received", ROOM, "half.number != self.count", "True",
      f"{PENDING_TESTS}test_two_micro_batches_in_turns"),
    M("dropped-and-forgotten", "a pending that was dropped is no error", ROOM, "half.owner() is None", "False",
      f"{OPEN_TESTS}test_dropped"),
    M("dropped-and-unfinished", "the second half of a dropped call is never run", ROOM, "half.discard()", "pass",
      f"{OPEN_TESTS}test_a_dropped_call_is_finished_once"),
    M("received-again", "a pending can be received twice", "comm.engine:Pending.receive", "self._finish = None",
      "pass", f"{OPEN_TESTS}test_received_twice"),
    M("failed-calls-do-not-count", "a call that failed leaves room for another one", "comm.engine:Sequence.__exit__",
      "isinstance(fault, Exception) and self.upcoming", "False", f"{OPEN_TESTS}test_a_call_that_failed_counts"),
    M("calls-of-backward-do-not-count", "calls in one piece open beside any number of pendings",
      "comm.engine:Engine.opened", "self.open_calls.count += 1", "self.open_calls.count += self._sequence is None",
      f"{OPEN_TESTS}test_calls_in_one_piece_count"),
    M("gradient-of-what-x-became", "what x became between the halves has the gradient of what was sent",
      "comm.calls:DispatchCall.send", "autograd.ticket(x)", "x", f"{PENDING_TESTS}test_gradients"),
    M("no-graph-without-grad-mode", "the second half under no_grad loses the graph of the first",
      "comm.calls:DispatchCall.receive", "nullcontext() if is_grad_enabled() else torch.enable_grad()",
      "nullcontext()", f"{PENDING_TESTS}test_gradients"),
    M("no-graph-of-combine-without-grad-mode",
      "the second half of a combine under no_grad loses the graph of the first",
      "comm.autograd:_SentWithGraph.receive",
      "torch.enable_grad()", "torch.set_grad_enabled(torch.is_grad_enabled())", f"{PENDING_TESTS}test_gradients"),
)

OUT_TESTS = "tests/comm/test_out.py::"

OUT = (
    M("out-of-any-stride", "tensors of the caller's may have other strides than results", "comm.checks:_require_like",
      "size > 1 and stride != wanted", "False", f"{OUT_TESTS}test_dispatch_fault"),
    M("out-of-another-result", "a tensor for a result that the layout lacks is left alone without a word",
      "comm.checks:dispatch_out", "tensor is None", "tensor is None or name not in likes",
      f"{OUT_TESTS}test_dispatch_fault"),
    M("out-beside-gradients", "a dispatch writes to the caller's tensors where gradients are enabled",
      "comm.checks:dispatch_out", "torch.is_grad_enabled()", "False", f"{OUT_TESTS}test_no_gradients"),
    M("combine-out-beside-gradients", "a combine writes to the caller's tensor where a gradient is wanted",
      "comm.checks:combine_out", "options.needs_grad", "False", f"{OUT_TESTS}test_no_gradients"),
    M("routed-holds-its-own", "routed holds other tensors than those that the caller gave",
      "comm.routed:Routed.tokens", "self._out is None or self._out.tokens is None", "True",
      f"{OUT_TESTS}test_dispatch"),
    M("any-scale-is-packed", "scales that are no powers of two lose their mantissa without a word",
      "comm.checks:_check_laid_out", "bits & 0x7FFFFF != 0", "bits & 0x3FFFFF != 0",
      "tests/comm/test_errors.py::test_fp8_fault"),
)

MUTATIONS = HANDSHAKE + ARGUMENTS + GRADIENTS + HALVES + OUT
