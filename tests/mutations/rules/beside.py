"""Rules of the calls that belong to an earlier dispatch, of bias, and of packed scales."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TESTS = "tests/comm/test_beside.py::"

MUTATIONS = (
    M("weights-lose-columns", "weights come home without the columns that have no route on the rank",
      "comm.beside:CallsBeside._sum_values", "functional.pad(values, (0, more))",
      "functional.pad(torch.where(routed.topk_ids >= 0, values, 0), (0, more))", f"{TESTS}test_every_column_counts"),
    M("late-weights-ignored", "combine multiplies by the weights of the dispatch, not by those that came later",
      "comm.halves:CombineCall._send", "routed._late_weights if options.weighted else None", "None",
      f"{TESTS}test_reweighted"),
    M("weights-of-a-combine-ignored",
      "a combine multiplies by the weights of the dispatch, though it was given others",
      "comm.beside:CallsBeside._with_weights",
      "return self._reweighted(routed, topk_weights, without_lost=True), None",
      "return (routed if routed._weighted else self.reweighted(routed, topk_weights)), None",
      f"{TESTS}test_weights_of_a_combine"),
    M("late-weights-close-up",
      "weights of a combine lie closer than the rows, where a rank was lost since the dispatch",
      "comm.beside:CallsBeside._reweighted", "late is not None and lost and routed.layout != 'rank'", "False",
      "tests/compat/deep_ep/test_low_latency.py::test_a_rank_that_does_not_come_to_combine"),
    M("packed-is-float", "ranks do not compare whether scales are packed", "comm.halves:DispatchCall._send",
      "inputs.scale_words = self._scale_words", "pass", f"{TESTS}test_packed_scales_of_one_rank"),
    M("communicators-are-alike", "ranks do not say which communicator they call", "runtime.rank_group:RankGroup.open",
      "self.notes.name", "''", "tests/comm/test_openings.py::test_two_communicators_in_different_orders"),
    M("weights-stay-home", "a rank sends the weights of its tokens to nobody",
      "kernels/combine/combine.cuh:send_weights", "if (!turn.leaves_out(r))", "if (r == args.call.rank)",
      f"{TESTS}test_weights_of_a_combine", gpu=True),
    M("weights-of-another-home", "rows are multiplied by the weights of another rank's tokens",
      "kernels/combine/args.cuh:weights_from", "static_cast<uint64>(home) *", "static_cast<uint64>(0) *",
      f"{TESTS}test_weights_of_a_combine", gpu=True),
    M("bias-after-rounding", "a bias is added to the rounded result", "comm.bias:BiasedCombineCall._receive",
      "total = super()._receive()", "total = super()._receive().to(self._out_dtype)", f"{TESTS}test_bias"),
    M("packed-scales-as-floats", "packed scales are converted to floats instead of moved",
      "comm.validation_beside:unpacked", "torch.nn.functional.pad(words, (0, most - width)).view(torch.float32)",
      "torch.nn.functional.pad(words, (0, most - width)).to(torch.float32)", f"{TESTS}test_packed_scales"),
    M("tails-keep-ids", "rows beyond the last keep the ids that lay there", "comm.routed:Routed.unused_ids_marked",
      "torch.arange(len(ids), device=ids.device) < self.num_rows",
      "torch.arange(len(ids), device=ids.device) <= self.num_rows", f"{TESTS}test_unused_ids_marked"),
)
