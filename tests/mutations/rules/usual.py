"""Rules of usual calls: what makes a call unusual, and what one of them shares with others."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TEST = "tests/backends/test_nvlink_usual.py::test_"
LENT = "tests/backends/test_nvlink_host_cost.py::test_rows_that_are_lent"
LONG = (TEST + "what_is_unusual_goes_the_long_way",)

MUTATIONS = (
    Mutation(
        name="usual-in-any-state",
        rule="calls in a layer's sequence or beside open ones take the short way",
        target="tokenloom.comm.usual:UsualCalls.nothing_around",
        old="engine.is_plain() and not engine.open_calls.any_open()",
        new="True",
        tests=(TEST + "what_is_around_a_call",),
    ),
    Mutation(
        name="usual-with-gradients",
        rule="a dispatch with gradients enabled takes the short way, which has none",
        target="tokenloom.comm.usual:UsualCalls.dispatch",
        old="is_grad_enabled()",
        new="False",
        tests=(TEST + "what_is_around_a_call",),
    ),
    Mutation(
        name="usual-when-closed",
        rule="a usual call asks no more whether the communicator lives",
        target="tokenloom.comm.usual:UsualCalls._ready",
        old="self._engine.ranks.require_alive()",
        new="pass",
        tests=(TEST + "a_closed_communicator",),
    ),
    Mutation(
        name="usual-with-too-many-tokens",
        rule="a usual dispatch takes more tokens than there is room for",
        target="tokenloom.comm.usual:UsualCalls.like_before",
        old="num_tokens > plan.max_tokens_per_rank",
        new="False",
        tests=LONG,
    ),
    Mutation(
        name="usual-weights-of-any-shape",
        rule="weights of a usual dispatch are not looked at",
        target="tokenloom.comm.usual:UsualCalls.like_before",
        old="self._fits(weights, ids_shape, WEIGHT_DTYPE)",
        new="True",
        tests=LONG,
    ),
    Mutation(
        name="usual-room-of-any-size",
        rule="tensors for the results of a usual dispatch may be too small",
        target="tokenloom.comm.usual:UsualCalls._fits_all",
        old="(tensor.shape, tensor.stride(), tensor.dtype) != results.get(name)",
        new="name not in results",
        tests=(TEST + "room_of_another_size",),
    ),
    Mutation(
        name="usual-truth-is-a-number",
        rule="True is taken for 1 where a number was given before",
        target="tokenloom.comm.usual:_kind_of_dispatch",
        old="(options, types, x.dtype, topk_ids.dtype, scales is None, weights is None, copy)",
        new="(options, x.dtype, topk_ids.dtype, scales is None, weights is None, copy)",
        tests=LONG,
    ),
    Mutation(
        name="usual-fault-untold",
        rule="the others wait in a usual call that this rank could not launch",
        target="tokenloom.comm.usual:UsualCalls.combine",
        old='engine.sequence(Upcoming("combine"))',
        new="engine.side_stream.resume()",
        tests=(TEST + "a_fault_of_a_usual_call_is_told",),
    ),
    Mutation(
        name="usual-after-growth",
        rule="what was prepared for smaller buffers is used on",
        target="tokenloom.backends.nvlink.dispatch:Dispatcher._forget",
        old="each.is_old = True",
        new="pass",
        tests=(TEST + "buffers_that_have_grown",),
    ),
    Mutation(
        name="usual-unsettled",
        rule="a usual call does not raise what earlier calls left",
        target="tokenloom.backends.nvlink.launcher:Launcher.ready",
        old="self.outcomes.settle_before(self.num_calls - in_flight)",
        new="pass",
        tests=(TEST + "what_earlier_calls_left",),
    ),
    Mutation(
        name="usual-on-any-stream",
        rule="a usual call does not follow the call before, which ran on another stream",
        target="tokenloom.backends.nvlink.launcher:Launcher.ready",
        old="stream != self._last_handle",
        new="False",
        tests=(TEST + "what_is_around_a_call",),
    ),
    Mutation(
        name="activation-changes-unseen",
        rule="an activation that is set anew is taken for the one before",
        target="tokenloom.inference.nvlink_experts:NvlinkExperts.set_activation",
        old="(form, fast_math) == self._activation and self._gemm1_of",
        new="self._gemm1_of",
        tests=("tests/inference/test_mega_launches.py::test_weights_and_activations_change",),
    ),
    Mutation(
        name="both-buffers-are-lent",
        rule="rows are lent though those in the other buffer are held",
        target="tokenloom.backends.nvlink.buffers:Buffers.can_lend",
        old="loan.is_held",
        new="False",
        tests=(LENT,),
    ),
    Mutation(
        name="rows-in-a-lent-buffer",
        rule="a dispatch goes to the buffer whose rows a caller holds",
        target="tokenloom.backends.nvlink.prepared:DirectDispatch._next_free",
        old="not loan.is_held",
        new="True",
        tests=(LENT,),
    ),
    Mutation(
        name="views-beside-a-loan",
        rule="usual dispatches hand out views while one of the two buffers is lent",
        target="tokenloom.backends.nvlink.prepared:DirectDispatch.is_stale",
        old="self.shared.buffers.any_lent",
        new="False",
        tests=(LENT,),
    ),
    Mutation(
        name="handles-keep-rows",
        rule="a handle of deep_ep holds the received rows, which then stay lent",
        target="tokenloom.comm.routed:Routed.let_go",
        old="torch.empty(rows.shape, dtype=rows.dtype, device='meta')",
        new="rows",
        tests=("tests/compat/deep_ep/test_host_cost.py::test_normal_dispatch",),
    ),
    Mutation(
        name="words-of-any-stream",
        rule="memory that was allocated on one stream serves calls on another",
        target="tokenloom.backends.nvlink.results:ResultsMemory.take",
        old="stream == self._stream and end <= self._end",
        new="stream is not None and end <= self._end",
        tests=(TEST + "words_of_calls",),
    ),
)
