"""Rules of training/: ExpertParallelMoE, its gradients, its checkpoints, and the layer inside torch.compile."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
LAYER_TEST = "tests/training/test_layer.py::test_"
EXPERTS_TEST = "tests/training/test_routed_experts.py::test_"
CHECKPOINT_TEST = "tests/training/test_checkpoints.py::test_"
COMPILER_TEST = "tests/training/test_torch_compile.py::test_"
GRADIENT_TESTS = (f"{LAYER_TEST}gradients_are_those_of_the_sum_of_all_losses",)

LAYER = (
    M("biased-down", "the correction bias falls for experts with too little load",
      "training.layer:ExpertParallelMoE.update_correction_bias", "torch.sign(counts.sum() - len(counts) * counts)",
      "torch.sign(len(counts) * counts - counts.sum())", "tests/ops/test_router.py"),
    M("wrong-shard", "every rank loads the first ranks' experts", "training.shards:own_part",
      "value[experts.start : experts.stop]", "value[: len(experts)]",
      "tests/training/test_state_dict.py::test_which_experts_a_rank_keeps"),
    M("seed-by-local-number", "a seed gives the same experts to every rank",
      "training.expert_module:RoutedExperts._draw_parameters",
      "draw_seeded(weights, self.form.layout, bound, seed, name, self.slot_experts)",
      "draw_seeded(weights, self.form.layout, bound, seed, name, range(len(weights)))",
      f"{LAYER_TEST}a_seed_gives_the_same_full_weights_for_any_number_of_ranks"),
    M("a-choice-of-its-own", "each rank's layer goes by what that rank has found",
      "training.expert_module:RoutedExperts.__init__", "agree(comm.engine.ranks, prepare, 'making RoutedExperts')[0]",
      "agree(comm.engine.ranks, prepare, 'making RoutedExperts')[comm.rank]",
      "tests/tune/test_tune.py::test_rank_0_decides"),
    M("tokens-beyond-the-most", "more tokens than a layer was made for pass in pieces",
      "training.expert_module:RoutedExperts.forward", "checks.number_of_tokens(self.comm.plan, len(tokens))",
      "None", f"{EXPERTS_TEST}too_many_tokens_are_too_many_in_pieces_too[cpu2]"),
)

ROUTES_TEST = "tests/training/test_given_routes.py::test_"
EXPERT_MODULE_TEST = "tests/training/test_expert_module.py::test_"

GIVEN = (
    M("former-names-unknown", "a layer does not find its experts in checkpoints with their former names",
      "training.layer:ExpertParallelMoE._load_from_state_dict", "_rename_experts(state_dict, prefix)", "None",
      f"{EXPERT_MODULE_TEST}checkpoints_with_the_former_names[cpu2]"),
    M("full-former-names-unknown", "shard_state_dict leaves all experts in checkpoints with their former names",
      "training.state_dict:_former_name", 'owner.removesuffix("experts") + weight', "name",
      f"{EXPERT_MODULE_TEST}checkpoints_with_the_former_names[cpu2]"),
    M("padding-routed", "padding is routed", "training.layer:_places_of_real_tokens",
      "token_mask.flatten().nonzero()[:, 0]", "torch.arange(token_mask.numel(), device=x.device)",
      f"{ROUTES_TEST}padding_is_left_out[cpu2-own choice]"),
    M("unused-places-weigh", "places without a route have a part in the sum that others are divided by",
      "ops.router:Router._weights", "scores.masked_fill(unused, 0.0)", "scores",
      f"{ROUTES_TEST}weights_of_given_experts[renormalized]"),
    M("recorded-again", "what a checkpoint computes again is recorded again",
      "training.layer:ExpertParallelMoE._record", "in_backward()", "False",
      f"{ROUTES_TEST}what_is_computed_again_is_recorded_once"),
)

COUNTS_TEST = "tests/training/test_expert_counts.py::test_"

COUNTS = (
    M("last-micro-batch", "routes of the last forward take the place of earlier ones",
      "training.layer:ExpertParallelMoE._count", "self.expert_counts.add_(routes)", "self.expert_counts.copy_(routes)",
      f"{COUNTS_TEST}micro_batches_of_a_step_count_together[cpu2]"),
    M("counts-stay", "counts that were used are used again", "training.layer:ExpertParallelMoE.update_correction_bias",
      "counts.zero_()", "counts.clone()", f"{COUNTS_TEST}micro_batches_of_a_step_count_together[cpu2]"),
    M("evaluation-counts", "forwards of an evaluation count", "training.layer:ExpertParallelMoE._forward",
      "self.training and torch.is_grad_enabled()", "torch.is_grad_enabled()", f"{COUNTS_TEST}only_training_counts"),
    M("recomputation-counts", "what a checkpoint computes again counts again",
      "training.layer:ExpertParallelMoE._count", "in_backward() or has_saved_tensors_hooks()", "False",
      f"{COUNTS_TEST}what_is_computed_again_counts_once"),
    M("recomputation-never-counts",
      "what a reentrant checkpoint computes for the first time with a graph does not count",
      "training.gradients:_OnceInBackward.backward", "action()", "None",
      f"{COUNTS_TEST}what_is_computed_again_counts_once"),
    M("empty-counts", "counts begin with what to_empty leaves in memory", "training.layer:ExpertParallelMoE._apply",
      "counts.to(device)", "self.expert_counts", f"{COUNTS_TEST}counts_of_a_layer_that_was_moved"),
)

MIXED_TEST = "tests/training/test_mixed_precision.py::test_"

MIXED = (
    M("any-dtype-is-cast", "a layer in float32 takes bfloat16 tokens by mistake",
      "training.layer:ExpertParallelMoE._require_dtype",
      "dtype != experts and any(each.dtype != dtype for each in self.replicated_parameters())", "False",
      f"{MIXED_TEST}a_dtype_by_mistake[cpu2-narrow x]", f"{MIXED_TEST}a_single_narrow_parameter_casts_nothing"),
    M("experts-not-cast", "experts in float32 refuse bfloat16 tokens",
      "training.expert_module:RoutedExperts._compute_dtype",
      "dtype is None and x_dtype in NARROW and self.w1.dtype == torch.float32", "False",
      f"{MIXED_TEST}float32_experts_beside_fsdp_in_bfloat16", f"{MIXED_TEST}float32_experts_take_narrow_tokens"),
    M("memory-on-meta", "a layer made on meta takes memory", "training.expert_module:RoutedExperts.__init__",
      'torch.device("meta") if on_meta else comm.device', "comm.device",
      "tests/training/test_changed_layers.py::test_a_layer_that_is_made_on_meta"),
    M("counts-stay-on-meta", "a checkpoint that is assigned leaves counts on meta",
      "training.layer:ExpertParallelMoE._load_from_state_dict",
      "self.expert_counts.is_meta and not self.router_weight.is_meta", "False",
      "tests/training/test_changed_layers.py::test_a_layer_that_is_made_on_meta"),
    M("silent-router", "a router that cannot learn is said to", "ops.router:Router.is_constant", "self.top_k == 1",
      "self.top_k == 0", "tests/ops/test_router.py::test_a_router_that_cannot_learn"),
)

GRADIENTS = (
    M("router-grad-not-summed", "router_grad='sum' leaves the sum to the trainer",
      "training.layer:ExpertParallelMoE._replicated", 'self.router_grad != "sum"', "True", *GRADIENT_TESTS,
      f"{LAYER_TEST}layers_that_share_a_communicator_train_as_one_rank_does"),
    M("expert-grad-scale-ignored", "expert_grad_scale does nothing", "training.gradients:_ScaleGrad.backward",
      "grad * ctx.factor", "grad", *GRADIENT_TESTS),
    M("balance-loss-of-own-tokens", "the losses are those of this rank's tokens",
      "training.layer:ExpertParallelMoE._forward", "self._sum_over_ranks(routed.sums, alike)", "routed.sums",
      f"{LAYER_TEST}many_ranks_equal_one"),
    M("sums-as-wide-as-tokens", "a rank sums over ranks in the dtype of its own tokens",
      "training.gradients:sum_over_ranks", "own.to(dtype)", "own",
      "tests/training/test_faults.py::test_float64_under_autocast"),
    M("bias-is-not-compared", "routers of ranks drift apart where one rank alone updates its bias",
      "training.gradients:_SumOverRanks.forward", "bias is not None and host_waits", "False",
      "tests/comm/test_first_messages.py::test_a_bias_that_one_rank_updates"),
    M("norms-without-an-opening", "the norm of gradients pairs with what other ranks have begun",
      "training.data_parallel:_meet", "not is_of_experts(mesh)", "True",
      "tests/comm/test_first_messages.py::test_out_of_step[clips early-balance]"),
    M("loss-gradient-of-own-rank",
      "the losses' gradient leaves out what the other ranks' losses say of this rank's tokens",
      "training.gradients:_SumOverRanks.backward",
      'ctx.ranks.all_reduce_sums([grad.contiguous()], "router losses, gradient", ctx.host_waits)[0]', "grad",
      *GRADIENT_TESTS),
    M("narrow-main-grads", "main gradients have the dtype of the parameter",
      "training.main_grads:accumulate_main_grads", "torch.float32", "parameter.dtype",
      "tests/training/test_main_grads.py"),
)

ROUTED_EXPERTS = (
    M("rows-for-frozen-w1", "received rows are kept though w1 wants no gradient",
      "training.routed_experts:_Forward.__init__", "needs[2]", "any(needs)",
      f"{EXPERTS_TEST}rows_are_kept_for_the_gradient_of_w1_alone[cpu2]"),
    M("rows-of-gradients-for-w1", "rows that are sent again are those of the gradient",
      "training.routed_experts:_Backward._load", "(piece, x, strategy.dispatch)", "(piece, grad, strategy.dispatch)",
      f"{EXPERTS_TEST}same_bits[cpu2-redispatch-whole]"),
    M("last-piece-of-w2", "the gradient of w2 is that of the last piece of the tokens",
      "training.routed_experts:_Backward.run", "experts.grad_w2(gemms, grad_out, activations, self.grad_w2)",
      "experts.grad_w2(gemms, grad_out, activations)", f"{EXPERTS_TEST}pieces_are_the_whole[cpu2-plain-keeps rows]"),
)

COMPILED = (
    M("compiler-overwrites-x", "a compiled layer keeps x where the compiler puts something else",
      "training.torch_compile:moe_forward", "x.clone()", "x",
      f"{COMPILER_TEST}what_the_compiler_computed_may_be_overwritten"),
    M("kept-for-ever", "what a compiled forward keeps waits for a backward that never comes",
      "training.torch_compile:_kept", "weakref.WeakValueDictionary()", "{}",
      f"{COMPILER_TEST}forwards_without_backward_keep_nothing[aot_eager]"),
    M("counts-are-lost", "a compiled layer does not count routes", "training.torch_compile:forward",
      "layer.expert_counts.copy_(expert_counts)", "None", f"{COMPILER_TEST}equal_calls_are_two_calls",
      f"{COMPILER_TEST}wrong_input_has_its_named_error"),
)

CHECKPOINTS = (
    M("ranks-look-alike", "experts of one rank pass for those of another, which torch then takes",
      "training.shards:make_mesh", 'f"{_RANK}{ranks.rank}"', 'f"{_RANK}0"',
      f"{CHECKPOINT_TEST}experts_of_another_rank_are_refused[cpu2]"),
    M("any-experts-will-do", "a rank loads the experts of another", "training.shards:own_part", "held != experts",
      "False", f"{CHECKPOINT_TEST}experts_of_another_rank_are_refused[cpu2]"),
    M("a-mesh-keeps-its-group", "weights of experts keep their process group for ever", "training.shards:make_mesh",
      'getattr(mesh, "_pg_registry", {}).clear()', "None", f"{CHECKPOINT_TEST}weights_do_not_keep_their_group[cpu2]"),
    M("all-experts-at-once", "all experts of a weight travel at once", "training.state_dict:_gather",
      "part[0].nbytes // comm.num_ranks", "len(sent)", f"{CHECKPOINT_TEST}one_expert_at_a_time_travels"),
    M("norms-of-parts", "a norm counts the parts of gradients that lie here", "training.data_parallel:clip_grad_norm_",
      "nn.utils.get_total_norm(grads)", "nn.utils.get_total_norm([local_part(each) for each in grads])",
      f"{CHECKPOINT_TEST}the_norm_of_all_gradients[cpu2-fsdp-torch.float32]"),
    M("norms-count-in-a-layer", "the opening of a norm counts in one layer, which may be another one elsewhere",
      "runtime.rank_group:RankGroup.open", 'fields["communicator"] == openings.UNNAMED and not meets', "False",
      f"{CHECKPOINT_TEST}a_norm_beside_a_layer_that_one_rank_still_has[cpu2]"),
    M("one-gradient-by-its-rows", "of a single parameter, rows are taken for parameters, which have no gradients",
      "training.data_parallel:clip_grad_norm_", "parameters = [parameters]", "pass",
      f"{CHECKPOINT_TEST}the_norm_of_one_gradient[cpu2]"),
    M("experts-not-in-shared-memory", "share_memory leaves out the weights of experts",
      "training.expert_module:RoutedExperts._apply", "local_part(tensor.detach()).share_memory_()", "pass",
      "tests/training/test_changed_layers.py::test_weights_in_shared_memory[cpu2]"),
    M("main-grads-go-with-a-cast", "a cast of a layer loses its main gradients",
      "training.expert_module:RoutedExperts._apply", "vars(parameter).update(attributes)", "pass",
      "tests/training/test_main_grads.py::test_a_cast_keeps_them[cpu2]"),
    M("steps-before-backward", "backward takes weights that have changed since forward",
      "training.shards:require_unchanged", "tensor._version != version", "False",
      f"{CHECKPOINT_TEST}a_step_before_backward[cpu2-False]"),
    M("hooks-go-with-a-cast", "a cast of a layer loses the hooks of its weights",
      "training.expert_module:RoutedExperts._apply", "renew_hooks(parameter)", "pass",
      "tests/training/test_main_grads.py::test_a_cast_keeps_them[cpu2]"),
)

MUTATIONS = LAYER + GIVEN + COUNTS + MIXED + GRADIENTS + ROUTED_EXPERTS + COMPILED + CHECKPOINTS
