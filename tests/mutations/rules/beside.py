"""Rules of the calls that belong to an earlier dispatch, of bias, and of packed scales."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/comm/test_beside.py::"

MUTATIONS = (
    Mutation(
        name="weights-lose-columns",
        rule="weights come home without the columns that have no route on the rank",
        target="tokenloom.comm.beside:CallsBeside._sum_values",
        old="functional.pad(values, (0, more))",
        new="functional.pad(torch.where(routed.topk_ids >= 0, values, 0), (0, more))",
        tests=(f"{TESTS}test_every_column_counts",),
    ),
    Mutation(
        name="late-weights-ignored",
        rule="combine multiplies by the weights of the dispatch, not by those that came later",
        target="tokenloom.comm.halves:CombineCall._send",
        old="routed._late_weights if options.weighted else None",
        new="None",
        tests=(f"{TESTS}test_reweighted",),
    ),
    Mutation(
        name="weights-of-a-combine-ignored",
        rule="a combine multiplies by the weights of the dispatch, though it was given others",
        target="tokenloom.comm.beside:CallsBeside._with_weights",
        old="return self._reweighted(routed, topk_weights, without_lost=True), None",
        new="return (routed if routed._weighted else self.reweighted(routed, topk_weights)), None",
        tests=(f"{TESTS}test_weights_of_a_combine",),
    ),
    Mutation(
        name="late-weights-close-up",
        rule="weights of a combine lie closer than the rows, where a rank was lost since the dispatch",
        target="tokenloom.comm.beside:CallsBeside._reweighted",
        old="late is not None and lost and routed.layout != 'rank'",
        new="False",
        tests=("tests/compat/deep_ep/test_low_latency.py::test_a_rank_that_does_not_come_to_combine",),
    ),
    Mutation(
        name="packed-is-float",
        rule="ranks do not compare whether scales are packed",
        target="tokenloom.comm.halves:DispatchCall._send",
        old="inputs.scale_words = self._scale_words",
        new="pass",
        tests=(f"{TESTS}test_packed_scales_of_one_rank",),
    ),
    Mutation(
        name="communicators-are-alike",
        rule="ranks do not say which communicator they call",
        target="tokenloom.runtime.rank_group:RankGroup.open",
        old="self.notes.name",
        new="''",
        tests=("tests/comm/test_openings.py::test_two_communicators_in_different_orders",),
    ),
    Mutation(
        name="weights-stay-home",
        rule="a rank sends the weights of its tokens to nobody",
        target="kernels/combine/combine.cuh:send_weights",
        old="if (!turn.leaves_out(r))",
        new="if (r == args.call.rank)",
        tests=(f"{TESTS}test_weights_of_a_combine",),
        gpu=True,
    ),
    Mutation(
        name="weights-of-another-home",
        rule="rows are multiplied by the weights of another rank's tokens",
        target="kernels/combine/args.cuh:weights_from",
        old="static_cast<uint64>(home) *",
        new="static_cast<uint64>(0) *",
        tests=(f"{TESTS}test_weights_of_a_combine",),
        gpu=True,
    ),
    Mutation(
        name="bias-after-rounding",
        rule="a bias is added to the rounded result",
        target="tokenloom.comm.bias:BiasedCombineCall._receive",
        old="total = super()._receive()",
        new="total = super()._receive().to(self._out_dtype)",
        tests=(f"{TESTS}test_bias",),
    ),
    Mutation(
        name="packed-scales-as-floats",
        rule="packed scales are converted to floats instead of moved",
        target="tokenloom.comm.validation_beside:unpacked",
        old="torch.nn.functional.pad(words, (0, most - width)).view(torch.float32)",
        new="torch.nn.functional.pad(words, (0, most - width)).to(torch.float32)",
        tests=(f"{TESTS}test_packed_scales",),
    ),
    Mutation(
        name="tails-keep-ids",
        rule="rows beyond the last keep the ids that lay there",
        target="tokenloom.comm.routed:Routed.unused_ids_marked",
        old="torch.arange(len(ids), device=ids.device) < self.num_rows",
        new="torch.arange(len(ids), device=ids.device) <= self.num_rows",
        tests=(f"{TESTS}test_unused_ids_marked",),
    ),
)
