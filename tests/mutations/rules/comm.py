"""Rules of comm/, and of what opens its calls: the handshake, who is asked, and what an error says."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

FAULT_TESTS = ("tests/training/test_layer.py::test_a_fault_on_one_rank_is_an_error_on_all_and_the_layer_works_on",)

HANDSHAKE = (
    Mutation(
        name="threads-at-once",
        rule="a call of one thread waits behind that of another, in an order that other ranks need not have",
        target="tokenloom.runtime.turns:Turn.enter",
        old="fault = refusal()",
        new="fault = None",
        tests=("tests/comm/test_threads.py::test_calls_at_once",),
    ),
    Mutation(
        name="a-transform-goes-the-plain-way",
        rule="a call that torch transforms is made",
        target="tokenloom.comm.engine:Engine.is_plain",
        old="plain and is_eager()",
        new="plain",
        tests=("tests/comm/test_torch_modes.py::test_a_transform_on_one_rank_is_told",),
    ),
    Mutation(
        name="a-transform-around-what-is-told",
        rule="a fault is told under the transform that it is about",
        target="tokenloom.comm.engine:Sequence.__exit__",
        old="is_eager()",
        new="True",
        tests=("tests/comm/test_torch_modes.py::test_a_transform_on_one_rank_is_told",),
    ),
    Mutation(
        name="freed-memory-is-read",
        rule="a tensor whose storage was freed is sent",
        target="tokenloom.comm.validation:require_tensor",
        old="not has_memory(value)",
        new="False",
        tests=("tests/comm/test_torch_modes.py::test_tensors_without_memory_of_their_own",),
    ),
    Mutation(
        name="lost-status-word",
        rule="the other ranks do not hear of a fault that one rank sees",
        target="tokenloom.runtime.openings:encode",
        old="_OK if fault is None else _FAULT",
        new="_OK",
        tests=FAULT_TESTS,
    ),
    Mutation(
        name="first-messages-as-long-as-they-need",
        rule="what opens a call is as long as its sender needs, and ends a process that awaits something else",
        target="tokenloom.runtime.openings:encode",
        old="_HEADER_WORDS + room(num_ranks)",
        new="_HEADER_WORDS + len(first)",
        tests=("tests/comm/test_first_messages.py::test_one_call_in_another_order",),
    ),
    Mutation(
        name="counts-without-room-are-lost",
        rule="counts that the first message has no room for are not sent",
        target="tokenloom.runtime.rank_group:RankGroup.open",
        old="opening.size > room",
        new="False",
        tests=("tests/comm/test_first_messages.py::test_more_experts_than_a_message_holds",),
    ),
    Mutation(
        name="others-stay-apart",
        rule="behind a call of two communicators only the two themselves count alike again",
        target="tokenloom.runtime.siblings:Siblings.skip_to",
        old="self.all",
        new="self.all[:1]",
        tests=("tests/comm/test_first_messages.py::test_one_call_in_another_order",),
    ),
    Mutation(
        name="named-by-its-own-count",
        rule="a communicator has another name on a rank that has made one more, which failed",
        target="tokenloom.runtime.rank_group:RankGroup.open",
        old="self.notes.renumber(opening.made)",
        new="pass",
        tests=("tests/comm/test_first_messages.py::test_one_rank_makes_something",),
    ),
    Mutation(
        name="numbers-stay-apart",
        rule="ranks whose calls have different numbers fail for ever",
        target="tokenloom.runtime.rank_group:RankGroup.open",
        old="apart = True",
        new="pass",
        tests=("tests/comm/test_openings.py::test_numbers_that_differ",),
    ),
    Mutation(
        name="regions-run-again-anywhere",
        rule="a checkpointed region runs again at different calls of different ranks",
        target="tokenloom.comm.autograd:_save_a_mark",
        old="torch._C._autograd._top_saved_tensors_default_hooks(True) is not None",
        new="False",
        tests=("tests/comm/test_regions.py::test_a_region_that_runs_again",),
    ),
    Mutation(
        name="faults-of-plain-calls-stay-here",
        rule="a fault in a call with nothing around it is not told to the others",
        target="tokenloom.comm.halves:Call.run",
        old="[] if engine.open_calls.count > opened else [self._upcoming()]",
        new="[]",
        tests=("tests/comm/test_errors.py::test_dispatch_fault",),
    ),
    Mutation(
        name="peer-error-names-another",
        rule="PeerError names the rank after the one that failed",
        target="tokenloom.runtime.openings:Opening.raise_fault",
        old="PeerError(rank, reasons[rank])",
        new="PeerError((rank + 1) % len(self._there), reasons[rank])",
        tests=FAULT_TESTS,
    ),
    Mutation(
        name="no-agreement-in-calls",
        rule="ranks that call with different options are not told",
        target="tokenloom.runtime.rank_group:RankGroup.open",
        old="opening.differs(openings.MEANING)",
        new="False",
        tests=("tests/comm/test_errors.py::test_disagreement",),
    ),
    Mutation(
        name="any-dispatch-will-do",
        rule="ranks that combine different dispatches are not told",
        target="tokenloom.runtime.openings:CallKind.hash_of",
        old="(number + 1) * 0x9E3779B97F4A7C15",
        new="0",
        tests=("tests/comm/test_errors.py::test_disagreement",),
    ),
    Mutation(
        name="disagreement-of-the-last",
        rule="PlanMismatch compares ranks with the last one, not with rank 0",
        target="tokenloom.runtime.openings:raise_difference",
        old="there[0]",
        new="there[-1]",
        tests=("tests/comm/test_errors.py::test_disagreement",),
    ),
    Mutation(
        name="two-ranks-on-one-gpu",
        rule="ranks that share a GPU get kernels, which wait for each other's SMs",
        target="tokenloom.backends.nvlink.registration:objections",
        old="gpu in gpus[:rank]",
        new="False",
        tests=("tests/backends/test_registry.py",),
    ),
)

ARGUMENTS = (
    Mutation(
        name="negative-ids-pass",
        rule="ids below -1 are taken for -1",
        target="tokenloom.comm.validation:_check_id_range",
        old="(ids < -1) | (ids >= plan.num_experts)",
        new="ids >= plan.num_experts",
        tests=("tests/comm/test_errors.py::test_dispatch_fault",),
    ),
    Mutation(
        name="fp8-gradients-vanish",
        rule="an FP8 payload that requires grad is dispatched without a word",
        target="tokenloom.comm.validation:_check_payload",
        old="torch.is_grad_enabled() and (x.requires_grad or (scales is not None and scales.requires_grad))",
        new="False",
        tests=("tests/comm/test_errors.py::test_fp8_fault",),
    ),
)

GRADIENTS = (
    Mutation(
        name="to-fp8-rows-require-grad",
        rule="rows that were quantised on the way claim to have a gradient",
        target="tokenloom.comm.autograd:_Dispatch.forward",
        old="not ctx.needs_input_grad[3]",
        new="False",
        tests=("tests/comm/test_dispatch.py::test_to_fp8_and_gradients",),
    ),
    Mutation(
        name="rows-hold-their-graph",
        rule="rows that a backend keeps point at the graph that holds the backend's handle",
        target="tokenloom.comm.autograd:_Dispatch.forward",
        old="received_rows[0].detach()",
        new="received_rows[0]",
        tests=("tests/comm/test_dispatch.py::test_what_a_handle_keeps_has_no_graph",),
    ),
    Mutation(
        name="no-gradient-of-weights",
        rule="combine gives no gradient to the weights",
        target="tokenloom.comm.autograd:_SendCombine.backward",
        old="grad_weights.to(weights.dtype)",
        new="torch.zeros_like(weights)",
        tests=("tests/comm/test_row_weights.py::test_it_is_a_weighted_combine",),
    ),
)

ROOM = "tokenloom.comm.pending:OpenCalls.require_room"
PENDING_TESTS, OPEN_TESTS = "tests/comm/test_pending.py::", "tests/comm/test_open_calls.py::"

HALVES = (
    Mutation(
        name="backward-of-a-closed-one",
        rule="backward launches kernels on the buffers of a closed communicator",
        target="tokenloom.comm.engine:Engine._require_open",
        old="self.ranks.require_alive()",
        new="pass",
        tests=("tests/backends/test_nvlink_usual.py::test_backward_of_a_closed_communicator",),
    ),
    Mutation(
        name="three-open-calls",
        rule="a call opens though one before the last is not received",
        target=ROOM,
        old="half.number != self.count",
        new="half.number < self.count - 1",
        tests=(f"{OPEN_TESTS}test_a_third", f"{OPEN_TESTS}test_what_may_be_open"),
    ),
    Mutation(
        name="one-open-call",
        rule="no call opens beside one that is not received",
        target=ROOM,
        old="half.number != self.count",
        new="True",
        tests=(f"{PENDING_TESTS}test_two_micro_batches_in_turns",),
    ),
    Mutation(
        name="dropped-and-forgotten",
        rule="a pending that was dropped is no error",
        target=ROOM,
        old="half.owner() is None",
        new="False",
        tests=(f"{OPEN_TESTS}test_dropped",),
    ),
    Mutation(
        name="dropped-and-unfinished",
        rule="the second half of a dropped call is never run",
        target=ROOM,
        old="half.discard()",
        new="pass",
        tests=(f"{OPEN_TESTS}test_a_dropped_call_is_finished_once",),
    ),
    Mutation(
        name="received-again",
        rule="a pending can be received twice",
        target="tokenloom.comm.pending:Pending.receive",
        old="self._finish = None",
        new="pass",
        tests=(f"{OPEN_TESTS}test_received_twice",),
    ),
    Mutation(
        name="failed-calls-do-not-count",
        rule="a call that failed leaves room for another one",
        target="tokenloom.comm.engine:Sequence.__exit__",
        old="isinstance(fault, Exception) and self.upcoming",
        new="False",
        tests=(f"{OPEN_TESTS}test_a_call_that_failed_counts",),
    ),
    Mutation(
        name="calls-of-backward-do-not-count",
        rule="calls in one piece open beside any number of pendings",
        target="tokenloom.comm.engine:Engine._opened",
        old="self.open_calls.opened()",
        new="self.open_calls.count += self._sequence is None",
        tests=(f"{OPEN_TESTS}test_calls_in_one_piece_count",),
    ),
    Mutation(
        name="gradient-of-what-x-became",
        rule="what x became between the halves has the gradient of what was sent",
        target="tokenloom.comm.halves:DispatchCall._send",
        old="autograd.ticket(x)",
        new="x",
        tests=(f"{PENDING_TESTS}test_gradients",),
    ),
    Mutation(
        name="no-graph-without-grad-mode",
        rule="the second half under no_grad loses the graph of the first",
        target="tokenloom.comm.halves:DispatchCall._receive",
        old="torch.enable_grad()",
        new="torch.set_grad_enabled(torch.is_grad_enabled())",
        tests=(f"{PENDING_TESTS}test_gradients",),
    ),
    Mutation(
        name="no-graph-of-combine-without-grad-mode",
        rule="the second half of a combine under no_grad loses the graph of the first",
        target="tokenloom.comm.autograd:_Home.receive",
        old="torch.enable_grad()",
        new="torch.set_grad_enabled(torch.is_grad_enabled())",
        tests=(f"{PENDING_TESTS}test_gradients",),
    ),
)

OUT_TESTS = "tests/comm/test_out.py::"

OUT = (
    Mutation(
        name="out-of-any-stride",
        rule="tensors of the caller's may have other strides than results",
        target="tokenloom.comm.outputs:_require_like",
        old="size > 1 and stride != wanted",
        new="False",
        tests=(f"{OUT_TESTS}test_dispatch_fault",),
    ),
    Mutation(
        name="out-of-another-result",
        rule="a tensor for a result that the layout lacks is left alone without a word",
        target="tokenloom.comm.outputs:of_dispatch",
        old="tensor is None",
        new="tensor is None or name not in likes",
        tests=(f"{OUT_TESTS}test_dispatch_fault",),
    ),
    Mutation(
        name="out-beside-gradients",
        rule="a dispatch writes to the caller's tensors where gradients are enabled",
        target="tokenloom.comm.outputs:of_dispatch",
        old="torch.is_grad_enabled()",
        new="False",
        tests=(f"{OUT_TESTS}test_no_gradients",),
    ),
    Mutation(
        name="combine-out-beside-gradients",
        rule="a combine writes to the caller's tensor where a gradient is wanted",
        target="tokenloom.comm.outputs:of_combine",
        old="options.needs_grad",
        new="False",
        tests=(f"{OUT_TESTS}test_no_gradients",),
    ),
    Mutation(
        name="routed-holds-its-own",
        rule="routed holds other tensors than those that the caller gave",
        target="tokenloom.comm.routed:Routed.tokens",
        old="self._out is None or self._out.tokens is None",
        new="True",
        tests=(f"{OUT_TESTS}test_dispatch",),
    ),
    Mutation(
        name="any-scale-is-packed",
        rule="scales that are no powers of two lose their mantissa without a word",
        target="tokenloom.comm.validation:_check_laid_out",
        old="bits & 0x7FFFFF != 0",
        new="bits & 0x3FFFFF != 0",
        tests=("tests/comm/test_errors.py::test_fp8_fault",),
    ),
)

MUTATIONS = HANDSHAKE + ARGUMENTS + GRADIENTS + HALVES + OUT
