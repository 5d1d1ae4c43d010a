"""Rules of the calls that belong to an earlier dispatch, of bias, and of packed scales."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TESTS = "tests/comm/test_beside.py::"

MUTATIONS = (
    M("weights-lose-columns", "weights come home without the columns that have no route on the rank",
      "comm.calls:ValuesHomeCall.send", "functional.pad(values.view(-1, top_k), (0, width - top_k))",
      "functional.pad(torch.where(self._routed.topk_ids >= 0, values, 0), (0, width - top_k))",
      f"{TESTS}test_every_column_counts"),
    M("late-weights-ignored", "combine multiplies by the weights of the dispatch, not by those that came later",
      "comm.calls:CombineCall.send", "routed._late_weights", "None",
      f"{TESTS}test_reweighted"),
    M("weights-of-a-combine-ignored",
      "a combine multiplies by the weights of the dispatch, though it was given others",
      "comm.communicator:Communicator._combine",
      "ReweightCall(self, self.kinds, routed, topk_weights, without_lost=True).run()",
      "routed if routed._weighted else ReweightCall(self, self.kinds, routed, topk_weights, without_lost=True).run()",
      f"{TESTS}test_weights_of_a_combine"),
    M("weights-of-ids-below", "rows get the weights of routes to experts of the ranks before",
      "comm.calls:ReweightCall.receive", "ids >= first", "ids >= 0", f"{TESTS}test_other_weights_of_tokens"),
    M("weights-of-ids-above", "rows get the weights of routes to experts of the ranks behind",
      "comm.calls:ReweightCall.receive", "ids < first + plan.experts_per_rank", "True",
      f"{TESTS}test_other_weights_of_tokens"),
    M("weights-beside-losses", "weights of a combine are refused where a rank was lost since the dispatch",
      "comm.calls:ReweightCall.check", "self._without_lost and handle.masked <= engine.masked", "False",
      "tests/comm/test_masks.py::test_weights_of_an_earlier_dispatch"),
    M("late-weights-close-up", "late weights lie closer than the rows, where a rank was lost since the dispatch",
      "backends.peers.handle:rows_without_sources",
      'positions_of_received_rows("rank", received, received, max_tokens, len(rows), 1)[:, 0]',
      "torch.arange(len(rows), device=rows.device)",
      "tests/backends/test_nvlink_handle.py::test_rows_of_ranks_that_are_gone"),
    M("rows-of-the-lost", "rows of ranks that are gone hold what lay there",
      "backends.peers.handle:rows_without_sources", "where // max_tokens != rank", "True",
      "tests/backends/test_nvlink_handle.py::test_rows_of_ranks_that_are_gone"),
    M("packed-is-float", "ranks do not compare whether scales are packed", "backends.handshake:dispatch_fields",
      "kind.scale_words", "None", f"{TESTS}test_packed_scales_of_one_rank"),
    M("communicators-are-alike", "ranks do not say which communicator they call", "runtime.rank_group:RankGroup.open",
      "self.notes.name", "''", "tests/comm/test_openings.py::test_two_communicators_in_different_orders"),
    M("weights-stay-home", "a rank sends the weights of its tokens to nobody",
      "kernels/combine/combine.cuh:send_weights", "if (!turn.leaves_out(r))", "if (r == args.call.rank)",
      f"{TESTS}test_weights_of_a_combine", gpu=True),
    M("weights-of-another-home", "rows are multiplied by the weights of another rank's tokens",
      "kernels/combine/args.cuh:weights_from", "static_cast<uint64>(home) *", "static_cast<uint64>(0) *",
      f"{TESTS}test_weights_of_a_combine", gpu=True),
    M("bias-after-rounding", "a bias is added to the rounded result", "comm.calls:CombineCall._check_bias",
      "self._arguments._replace(out_dtype=wide)", "self._arguments._replace(out_dtype=self._out_dtype)",
      f"{TESTS}test_bias"),
    M("packed-scales-as-floats", "packed scales are converted to floats instead of moved",
      "comm.checks:unpacked", "torch.nn.functional.pad(words, (0, most - width)).view(torch.float32)",
      "torch.nn.functional.pad(words, (0, most - width)).to(torch.float32)", f"{TESTS}test_packed_scales"),
    M("tails-keep-ids", "rows beyond the last keep the ids that lay there", "comm.routed:Routed.unused_ids_marked",
      "torch.arange(len(ids), device=ids.device) < self.num_rows",
      "torch.arange(len(ids), device=ids.device) <= self.num_rows", f"{TESTS}test_unused_ids_marked"),
)
