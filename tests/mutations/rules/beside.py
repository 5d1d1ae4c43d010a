"""Rules of the calls that belong to an earlier dispatch, of bias, and of packed scales."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/comm/test_beside.py::"

MUTATIONS = (
    Mutation(
        name="weights-lose-columns",
        rule="weights come home without the columns that have no route on the rank",
        target="tokenloom.comm.beside:CallsBeside._sum_values",
        old="torch.nn.functional.pad(values, (0, engine.plan.hidden - top_k))",
        new="torch.nn.functional.pad(torch.where(routed.topk_ids >= 0, values, 0), (0, engine.plan.hidden - top_k))",
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
