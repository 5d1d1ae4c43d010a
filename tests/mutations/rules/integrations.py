"""Rules of models of other libraries."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TESTS = "tests/integrations/transformers/"
PACKAGE = "tokenloom.integrations.transformers"
FORMS = (f"{TESTS}test_forms.py",)

MUTATIONS = (
    Mutation(
        name="no-row-for-empty-experts",
        rule="a rank that receives no rows leaves its experts out of the graph",
        target=f"{PACKAGE}.implementation:TokenloomExperts._own_experts",
        old="rows.new_zeros(1, rows.shape[1])",
        new="rows.new_zeros(1, rows.shape[1])[:0].detach()",
        tests=(f"{TESTS}test_models.py::test_with_the_experts_of_the_model",),
        needs="transformers",
    ),
    Mutation(
        name="experts-fail-alone",
        rule="the other ranks do not hear of a model's experts that fail",
        target=f"{PACKAGE}.implementation:TokenloomExperts._run",
        old="comm.engine.sequence(Upcoming('combine'))",
        new="comm.engine.sequence()",
        tests=(f"{TESTS}test_faults.py::test_experts_that_fail_on_one_rank",),
        needs="transformers",
    ),
    Mutation(
        name="shares-keep-their-gradient",
        rule="a rank's part of a batch that all ranks hold keeps its gradient to itself",
        target=f"{PACKAGE}.shared_batch:_Take.backward",
        old="ctx.share.put_together(grad)",
        new="ctx.share.put_together(grad) * 0",
        tests=(f"{TESTS}test_models.py::test_other_meshes",),
        needs="transformers",
    ),
    Mutation(
        name="batches-of-strangers",
        rule="ranks that share their batch with some ranks take all batches for equal",
        target=f"{PACKAGE}.implementation:TokenloomExperts.__call__",
        old="self.shares_batch",
        new="True",
        tests=(f"{TESTS}test_models.py::test_generation_from_a_shared_batch",),
        num_ranks=4,
        needs="transformers",
    ),
    Mutation(
        name="room-for-some-rows",
        rule="where ranks hold the same tokens, there is room for an even share of the rows alone",
        target=f"{PACKAGE}.implementation:TokenloomExperts.run_options",
        old="plan.num_ranks * most * plan.top_k",
        new="most * plan.top_k",
        tests=(f"{TESTS}test_models.py::test_a_shared_batch_waits_for_no_counts",),
        needs="transformers",
    ),
    Mutation(
        name="a-step-of-growth-without-notice",
        rule="communicators grow though nobody waits for the counts of others",
        target=f"{PACKAGE}.implementation:TokenloomExperts._all_experts",
        old="self.options.pool_rows is None",
        new="True",
        tests=(f"{TESTS}test_faults.py::test_more_tokens_than_were_declared",),
        needs="transformers",
    ),
    Mutation(
        name="gates-without-limits",
        rule="the limits of a family's gates are left out",
        target=f"{PACKAGE}.forms:_activation_of",
        old="getattr(experts, own.limit)",
        new="None",
        tests=FORMS,
        needs="transformers",
    ),
    Mutation(
        name="gates-of-any-kind",
        rule="gates that a class computes by itself are taken for the usual ones",
        target=f"{PACKAGE}.forms:_activation_of",
        old="type(experts)._apply_gate.__module__ != DEFAULT_GATE",
        new="False",
        tests=FORMS,
        needs="transformers",
    ),
    Mutation(
        name="weights-with-scales",
        rule="parameters beside weights and biases are overlooked",
        target=f"{PACKAGE}.forms:form_of",
        old="found != {name for name in form_names if name is not None}",
        new="False",
        tests=FORMS,
        needs="transformers",
    ),
    Mutation(
        name="layers-keep-the-last-weights",
        rule="layers that share a fused one do not give it their own weights",
        target=f"{PACKAGE}.fused:FusedExperts.run",
        old="layer.use_weights(*self._weights, w1_bias=w1_bias, w2_bias=w2_bias)",
        new="pass",
        tests=(f"{TESTS}test_fp8.py::test_layers_of_a_model",),
        needs="transformers",
    ),
    Mutation(
        name="fp8-forgets-gradients",
        rule="experts in FP8 give outputs without a gradient where one is wanted",
        target=f"{PACKAGE}.fused:FusedExperts.run",
        old="any(each.requires_grad for each in wanted)",
        new="False",
        tests=(f"{TESTS}test_fp8.py::test_layers_of_a_model",),
        needs="transformers",
    ),
    Mutation(
        name="what-layers-share-is-not-shared",
        rule="each layer makes communicators of its own",
        target=f"{PACKAGE}.implementation:shared_of",
        old="options not in found",
        new="True",
        tests=(f"{TESTS}test_fp8.py::test_layers_of_a_model",),
        needs="transformers",
    ),
)
