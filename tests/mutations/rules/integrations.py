"""Rules of models of other libraries."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TESTS = "tests/integrations/transformers/"
PACKAGE = "integrations.transformers"
FORMS = (f"{TESTS}test_forms.py",)
FOUR_BITS = f"{TESTS}test_four_bits.py::test_"

MUTATIONS = (
    M("no-row-for-empty-experts", "a rank that receives no rows leaves its experts out of the graph",
      f"{PACKAGE}.implementation:TokenloomExperts._own_experts", "rows.new_zeros(1, rows.shape[1])",
      "rows.new_zeros(1, rows.shape[1])[:0].detach()", f"{TESTS}test_models.py::test_with_the_experts_of_the_model",
      needs="transformers"),
    M("experts-fail-alone", "the other ranks do not hear of a model's experts that fail",
      f"{PACKAGE}.implementation:TokenloomExperts._run", "comm.engine.sequence(Upcoming('combine'))",
      "comm.engine.sequence()", f"{TESTS}test_faults.py::test_experts_that_fail_on_one_rank", needs="transformers"),
    M("fused-experts-fail-alone", "the other ranks do not hear of experts in FP8 that fail before their call",
      f"{PACKAGE}.fused:FusedExperts.run", "layer.refuse(fault)", "raise",
      f"{TESTS}test_fp8.py::test_a_fault_of_one_rank", needs="transformers"),
    M("shares-keep-their-gradient", "a rank's part of a batch that all ranks hold keeps its gradient to itself",
      f"{PACKAGE}.shared_batch:_Take.backward", "ctx.share.put_together(grad)", "ctx.share.put_together(grad) * 0",
      f"{TESTS}test_models.py::test_other_meshes", needs="transformers"),
    M("batches-of-strangers", "ranks that share their batch with some ranks take all batches for equal",
      f"{PACKAGE}.implementation:TokenloomExperts.__call__", "self.shares_batch", "True",
      f"{TESTS}test_models.py::test_generation_from_a_shared_batch", num_ranks=4, needs="transformers"),
    M("room-for-some-rows", "where ranks hold the same tokens, there is room for an even share of the rows alone",
      f"{PACKAGE}.implementation:TokenloomExperts.run_options", "plan.num_ranks * most * plan.top_k",
      "most * plan.top_k", f"{TESTS}test_models.py::test_a_shared_batch_waits_for_no_counts", needs="transformers"),
    M("a-step-of-growth-without-notice", "communicators grow though nobody waits for the counts of others",
      f"{PACKAGE}.implementation:TokenloomExperts._all_experts", "self.options.pool_rows is None", "True",
      f"{TESTS}test_faults.py::test_more_tokens_than_were_declared", needs="transformers"),
    M("gates-without-limits", "the limits of a family's gates are left out", f"{PACKAGE}.forms:_activation_of",
      "getattr(experts, own.limit)", "None", *FORMS, needs="transformers"),
    M("functions-are-not-known", "activations that are plain functions are taken for others",
      f"{PACKAGE}.forms:_activation_of", "PLAIN_FUNCTIONS.get(given)", "None", *FORMS, needs="transformers"),
    M("gates-of-any-kind", "gates that a class computes by itself are taken for the usual ones",
      f"{PACKAGE}.forms:_activation_of", "type(experts)._apply_gate.__module__ != DEFAULT_GATE", "False", *FORMS,
      needs="transformers"),
    M("weights-with-scales", "parameters beside weights and biases are overlooked", f"{PACKAGE}.forms:form_of",
      "parameters.keys() != {name for name in (*form_names, *(scale_names or ())) if name is not None}", "False",
      *FORMS, needs="transformers"),
    M("nibbles-of-checkpoints", "the high half of a byte comes first in experts that stay packed",
      f"{PACKAGE}.forms:form_of", "MXFP4 if packed else None", "type(MXFP4)(nibbles='high_first') if packed else None",
      f"{FOUR_BITS}packed_experts", f"{FOUR_BITS}stored_experts", needs="transformers"),
    M("gates-with-a-softcap", "gates of experts in FP8 lose their softcap", f"{PACKAGE}.forms:_activation_of",
      "experts.gate_softcap is not None", "False", f"{FOUR_BITS}gates_of_stored_experts", needs="transformers"),
    M("packed-experts-anywhere", "packed experts are loaded for implementations that need wide ones",
      f"{PACKAGE}.four_bits:PackedExperts._process_model_before_weight_loading", "not ours", "False",
      f"{FOUR_BITS}experts_that_need_wide_weights", needs="transformers"),
    M("any-checkpoint-stays-packed", "the experts of any checkpoint are said to stay packed",
      f"{PACKAGE}.four_bits:keep_four_bits",
      "getattr(config, 'model_type', None) != 'gpt_oss' or method != 'mxfp4'", "False",
      f"{FOUR_BITS}other_checkpoints", needs="transformers"),
    M("layers-keep-the-last-weights", "layers that share a fused one do not give it their own weights",
      f"{PACKAGE}.fused:FusedExperts._prepare", "layer.use_weights(*self._weights, w1_bias=w1_bias, w2_bias=w2_bias)",
      "pass", f"{TESTS}test_fp8.py::test_layers_of_a_model", needs="transformers"),
    M("fp8-forgets-gradients", "experts in FP8 give outputs without a gradient where one is wanted",
      f"{PACKAGE}.fused:FusedExperts._prepare", "any(each.requires_grad for each in (*given, *experts.parameters()))",
      "False", f"{TESTS}test_fp8.py::test_layers_of_a_model", needs="transformers"),
    M("what-layers-share-is-not-shared", "each layer makes communicators of its own",
      f"{PACKAGE}.implementation:shared_of", "options not in found", "True",
      f"{TESTS}test_fp8.py::test_layers_of_a_model", needs="transformers"),
    M("old-libraries-are-new-enough", "an old transformers is told of by an error of its own, which names no cure",
      f"{PACKAGE}.requirements:require_transformers", "not found", "False",
      "tests/integrations/test_requirements.py::test_with_an_old_transformers"),
)
