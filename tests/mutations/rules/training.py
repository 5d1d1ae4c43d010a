"""Rules of training/: ExpertParallelMoE, its gradients, its checkpoints, and the layer inside torch.compile."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LAYER_TEST = "tests/training/test_layer.py::test_"
EXPERTS_TEST = "tests/training/test_routed_experts.py::test_"
CHECKPOINT_TEST = "tests/training/test_checkpoints.py::test_"
COMPILER_TEST = "tests/training/test_torch_compile.py::test_"
GRADIENT_TESTS = (f"{LAYER_TEST}gradients_are_those_of_the_sum_of_all_losses",)

LAYER = (
    Mutation(
        name="biased-down",
        rule="the correction bias falls for experts with too little load",
        target="tokenloom.training.layer:ExpertParallelMoE.update_correction_bias",
        old="torch.sign(counts.sum() - len(counts) * counts)",
        new="torch.sign(len(counts) * counts - counts.sum())",
        tests=("tests/ops/test_router.py",),
    ),
    Mutation(
        name="wrong-shard",
        rule="every rank loads the first ranks' experts",
        target="tokenloom.training.shards:own_part",
        old="value[experts.start : experts.stop]",
        new="value[: len(experts)]",
        tests=("tests/training/test_state_dict.py::test_which_experts_a_rank_keeps",),
    ),
    Mutation(
        name="seed-by-local-number",
        rule="a seed gives the same experts to every rank",
        target="tokenloom.training.expert_module:RoutedExperts.reset_parameters",
        old="draw_seeded(weights, self.form.layout, bound, seed, name, self.local_experts)",
        new="draw_seeded(weights, self.form.layout, bound, seed, name, range(len(weights)))",
        tests=(f"{LAYER_TEST}a_seed_gives_the_same_full_weights_for_any_number_of_ranks",),
    ),
    Mutation(
        name="a-choice-of-its-own",
        rule="each rank's layer goes by what that rank has found",
        target="tokenloom.training.expert_module:RoutedExperts.__init__",
        old="agreed[0][1]",
        new="agreed[comm.rank][1]",
        tests=("tests/tune/test_tune.py::test_rank_0_decides",),
    ),
    Mutation(
        name="tokens-beyond-the-most",
        rule="more tokens than a layer was made for pass in pieces",
        target="tokenloom.training.expert_module:RoutedExperts.forward",
        old="validation.number_of_tokens(self.comm.plan, len(tokens))",
        new="None",
        tests=(f"{EXPERTS_TEST}too_many_tokens_are_too_many_in_pieces_too[cpu2]",),
    ),
)

ROUTES_TEST = "tests/training/test_given_routes.py::test_"
EXPERT_MODULE_TEST = "tests/training/test_expert_module.py::test_"

GIVEN = (
    Mutation(
        name="former-names-unknown",
        rule="a layer does not find its experts in checkpoints with their former names",
        target="tokenloom.training.layer:ExpertParallelMoE._load_from_state_dict",
        old="_rename_experts(state_dict, prefix)",
        new="None",
        tests=(f"{EXPERT_MODULE_TEST}checkpoints_with_the_former_names[cpu2]",),
    ),
    Mutation(
        name="full-former-names-unknown",
        rule="shard_state_dict leaves all experts in checkpoints with their former names",
        target="tokenloom.training.state_dict:_former_name",
        old='owner.removesuffix("experts") + weight',
        new="name",
        tests=(f"{EXPERT_MODULE_TEST}checkpoints_with_the_former_names[cpu2]",),
    ),
    Mutation(
        name="padding-routed",
        rule="padding is routed",
        target="tokenloom.training.layer:_places_of_real_tokens",
        old="token_mask.flatten().nonzero()[:, 0]",
        new="torch.arange(token_mask.numel(), device=x.device)",
        tests=(f"{ROUTES_TEST}padding_is_left_out[cpu2-own choice]",),
    ),
    Mutation(
        name="unused-places-weigh",
        rule="places without a route have a part in the sum that others are divided by",
        target="tokenloom.ops.router:Router._weights",
        old="scores.masked_fill(unused, 0.0)",
        new="scores",
        tests=(f"{ROUTES_TEST}weights_of_given_experts[renormalized]",),
    ),
    Mutation(
        name="recorded-again",
        rule="what a checkpoint computes again is recorded again",
        target="tokenloom.training.layer:ExpertParallelMoE._record",
        old="in_backward()",
        new="False",
        tests=(f"{ROUTES_TEST}what_is_computed_again_is_recorded_once",),
    ),
)

COUNTS_TEST = "tests/training/test_expert_counts.py::test_"

COUNTS = (
    Mutation(
        name="last-micro-batch",
        rule="routes of the last forward take the place of earlier ones",
        target="tokenloom.training.layer:ExpertParallelMoE._count",
        old="self.expert_counts.add_(routes)",
        new="self.expert_counts.copy_(routes)",
        tests=(f"{COUNTS_TEST}micro_batches_of_a_step_count_together[cpu2]",),
    ),
    Mutation(
        name="counts-stay",
        rule="counts that were used are used again",
        target="tokenloom.training.layer:ExpertParallelMoE.update_correction_bias",
        old="counts.zero_()",
        new="counts.clone()",
        tests=(f"{COUNTS_TEST}micro_batches_of_a_step_count_together[cpu2]",),
    ),
    Mutation(
        name="evaluation-counts",
        rule="forwards of an evaluation count",
        target="tokenloom.training.layer:ExpertParallelMoE._forward",
        old="self.training and torch.is_grad_enabled()",
        new="torch.is_grad_enabled()",
        tests=(f"{COUNTS_TEST}only_training_counts",),
    ),
    Mutation(
        name="recomputation-counts",
        rule="what a checkpoint computes again counts again",
        target="tokenloom.training.layer:ExpertParallelMoE._count",
        old="in_backward() or has_saved_tensors_hooks()",
        new="False",
        tests=(f"{COUNTS_TEST}what_is_computed_again_counts_once",),
    ),
    Mutation(
        name="recomputation-never-counts",
        rule="what a reentrant checkpoint computes for the first time with a graph does not count",
        target="tokenloom.training.gradients:_OnceInBackward.backward",
        old="action()",
        new="None",
        tests=(f"{COUNTS_TEST}what_is_computed_again_counts_once",),
    ),
    Mutation(
        name="empty-counts",
        rule="counts begin with what to_empty leaves in memory",
        target="tokenloom.training.layer:ExpertParallelMoE._apply",
        old="counts.to(device)",
        new="self.expert_counts",
        tests=(f"{COUNTS_TEST}counts_of_a_layer_that_was_moved",),
    ),
)

MIXED_TEST = "tests/training/test_mixed_precision.py::test_"

MIXED = (
    Mutation(
        name="any-dtype-is-cast",
        rule="a layer in float32 takes bfloat16 tokens by mistake",
        target="tokenloom.training.layer:ExpertParallelMoE._require_dtype",
        old="dtype != experts and any(each.dtype != dtype for each in self.replicated_parameters())",
        new="False",
        tests=(
            f"{MIXED_TEST}a_dtype_by_mistake[cpu2-narrow x]",
            f"{MIXED_TEST}a_single_narrow_parameter_casts_nothing",
        ),
    ),
    Mutation(
        name="experts-not-cast",
        rule="experts in float32 refuse bfloat16 tokens",
        target="tokenloom.training.expert_module:RoutedExperts._compute_dtype",
        old="dtype is None and given in NARROW and self.w1.dtype == torch.float32",
        new="False",
        tests=(
            f"{MIXED_TEST}float32_experts_beside_fsdp_in_bfloat16",
            f"{MIXED_TEST}float32_experts_take_narrow_tokens",
        ),
    ),
    Mutation(
        name="memory-on-meta",
        rule="a layer made on meta takes memory",
        target="tokenloom.training.expert_module:RoutedExperts.__init__",
        old='torch.device("meta") if on_meta else comm.device',
        new="comm.device",
        tests=("tests/training/test_changed_layers.py::test_a_layer_that_is_made_on_meta",),
    ),
    Mutation(
        name="counts-stay-on-meta",
        rule="a checkpoint that is assigned leaves counts on meta",
        target="tokenloom.training.layer:ExpertParallelMoE._load_from_state_dict",
        old="self.expert_counts.is_meta and not self.router_weight.is_meta",
        new="False",
        tests=("tests/training/test_changed_layers.py::test_a_layer_that_is_made_on_meta",),
    ),
    Mutation(
        name="silent-router",
        rule="a router that cannot learn is said to",
        target="tokenloom.ops.router:Router.is_constant",
        old="self.top_k == 1",
        new="self.top_k == 0",
        tests=("tests/ops/test_router.py::test_a_router_that_cannot_learn",),
    ),
)

GRADIENTS = (
    Mutation(
        name="router-grad-not-summed",
        rule="router_grad='sum' leaves the sum to the trainer",
        target="tokenloom.training.layer:ExpertParallelMoE._replicated",
        old='self.router_grad != "sum"',
        new="True",
        tests=(*GRADIENT_TESTS, f"{LAYER_TEST}layers_that_share_a_communicator_train_as_one_rank_does"),
    ),
    Mutation(
        name="expert-grad-scale-ignored",
        rule="expert_grad_scale does nothing",
        target="tokenloom.training.gradients:_ScaleGrad.backward",
        old="grad * ctx.factor",
        new="grad",
        tests=GRADIENT_TESTS,
    ),
    Mutation(
        name="balance-loss-of-own-tokens",
        rule="the losses are those of this rank's tokens",
        target="tokenloom.training.layer:ExpertParallelMoE._forward",
        old="self._sum_over_ranks(routed.sums)",
        new="routed.sums",
        tests=(f"{LAYER_TEST}many_ranks_equal_one",),
    ),
    Mutation(
        name="sums-as-wide-as-tokens",
        rule="a rank sums over ranks in the dtype of its own tokens",
        target="tokenloom.training.gradients:sum_over_ranks",
        old="own.to(dtype)",
        new="own",
        tests=("tests/training/test_faults.py::test_float64_under_autocast",),
    ),
    Mutation(
        name="bias-is-not-compared",
        rule="routers of ranks drift apart where one rank alone updates its bias",
        target="tokenloom.training.gradients:_SumOverRanks.forward",
        old="bias is not None and host_waits",
        new="False",
        tests=("tests/comm/test_first_messages.py::test_a_bias_that_one_rank_updates",),
    ),
    Mutation(
        name="norms-without-an-opening",
        rule="the norm of gradients pairs with what other ranks have begun",
        target="tokenloom.training.data_parallel:_meet",
        old="not is_of_experts(mesh)",
        new="True",
        tests=("tests/comm/test_first_messages.py::test_out_of_step[clips early-balance]",),
    ),
    Mutation(
        name="loss-gradient-of-own-rank",
        rule="the losses' gradient leaves out what the other ranks' losses say of this rank's tokens",
        target="tokenloom.training.gradients:_SumOverRanks.backward",
        old='ctx.ranks.all_reduce_sums([grad.contiguous()], "router losses, gradient", ctx.host_waits)[0]',
        new="grad",
        tests=GRADIENT_TESTS,
    ),
    Mutation(
        name="narrow-main-grads",
        rule="main gradients have the dtype of the parameter",
        target="tokenloom.training.main_grads:accumulate_main_grads",
        old="torch.float32",
        new="parameter.dtype",
        tests=("tests/training/test_main_grads.py",),
    ),
)

ROUTED_EXPERTS = (
    Mutation(
        name="rows-for-frozen-w1",
        rule="received rows are kept though w1 wants no gradient",
        target="tokenloom.training.routed_experts:_Forward.__init__",
        old="needs[2]",
        new="any(needs)",
        tests=(f"{EXPERTS_TEST}rows_are_kept_for_the_gradient_of_w1_alone[cpu2]",),
    ),
    Mutation(
        name="rows-of-gradients-for-w1",
        rule="rows that are sent again are those of the gradient",
        target="tokenloom.training.routed_experts:_Backward._load",
        old="(piece, x, strategy.dispatch)",
        new="(piece, grad, strategy.dispatch)",
        tests=(f"{EXPERTS_TEST}same_bits[cpu2-redispatch-whole]",),
    ),
    Mutation(
        name="last-piece-of-w2",
        rule="the gradient of w2 is that of the last piece of the tokens",
        target="tokenloom.training.routed_experts:_Backward.run",
        old="experts.grad_w2(gemms, grad_out, activations, self.grad_w2)",
        new="experts.grad_w2(gemms, grad_out, activations)",
        tests=(f"{EXPERTS_TEST}pieces_are_the_whole[cpu2-plain-keeps rows]",),
    ),
)

COMPILED = (
    Mutation(
        name="compiler-overwrites-x",
        rule="a compiled layer keeps x where the compiler puts something else",
        target="tokenloom.training.torch_compile:moe_forward",
        old="x.clone()",
        new="x",
        tests=(f"{COMPILER_TEST}what_the_compiler_computed_may_be_overwritten",),
    ),
    Mutation(
        name="kept-for-ever",
        rule="what a compiled forward keeps waits for a backward that never comes",
        target="tokenloom.training.torch_compile:_kept",
        old="weakref.WeakValueDictionary()",
        new="{}",
        tests=(f"{COMPILER_TEST}forwards_without_backward_keep_nothing[aot_eager]",),
    ),
    Mutation(
        name="counts-are-lost",
        rule="a compiled layer does not count routes",
        target="tokenloom.training.torch_compile:forward",
        old="layer.expert_counts.copy_(expert_counts)",
        new="None",
        tests=(f"{COMPILER_TEST}equal_calls_are_two_calls", f"{COMPILER_TEST}wrong_input_has_its_named_error"),
    ),
)

CHECKPOINTS = (
    Mutation(
        name="ranks-look-alike",
        rule="experts of one rank pass for those of another, which torch then takes",
        target="tokenloom.training.shards:make_mesh",
        old='f"{_RANK}{ranks.rank}"',
        new='f"{_RANK}0"',
        tests=(f"{CHECKPOINT_TEST}experts_of_another_rank_are_refused[cpu2]",),
    ),
    Mutation(
        name="any-experts-will-do",
        rule="a rank loads the experts of another",
        target="tokenloom.training.shards:own_part",
        old="held != experts",
        new="False",
        tests=(f"{CHECKPOINT_TEST}experts_of_another_rank_are_refused[cpu2]",),
    ),
    Mutation(
        name="a-mesh-keeps-its-group",
        rule="weights of experts keep their process group for ever",
        target="tokenloom.training.shards:make_mesh",
        old='getattr(mesh, "_pg_registry", {}).clear()',
        new="None",
        tests=(f"{CHECKPOINT_TEST}weights_do_not_keep_their_group[cpu2]",),
    ),
    Mutation(
        name="all-experts-at-once",
        rule="all experts of a weight travel at once",
        target="tokenloom.training.state_dict:_gather",
        old="own[0].nbytes // comm.num_ranks",
        new="len(sent)",
        tests=(f"{CHECKPOINT_TEST}one_expert_at_a_time_travels",),
    ),
    Mutation(
        name="norms-of-parts",
        rule="a norm counts the parts of gradients that lie here",
        target="tokenloom.training.data_parallel:clip_grad_norm_",
        old="nn.utils.get_total_norm(grads)",
        new="nn.utils.get_total_norm([local_part(each) for each in grads])",
        tests=(f"{CHECKPOINT_TEST}the_norm_of_all_gradients[cpu2-fsdp-torch.float32]",),
    ),
    Mutation(
        name="one-gradient-by-its-rows",
        rule="of a single parameter, rows are taken for parameters, which have no gradients",
        target="tokenloom.training.data_parallel:clip_grad_norm_",
        old="parameters = [parameters]",
        new="pass",
        tests=(f"{CHECKPOINT_TEST}the_norm_of_one_gradient[cpu2]",),
    ),
    Mutation(
        name="experts-not-in-shared-memory",
        rule="share_memory leaves out the weights of experts",
        target="tokenloom.training.expert_module:RoutedExperts._apply",
        old="local_part(tensor.detach()).share_memory_()",
        new="pass",
        tests=("tests/training/test_changed_layers.py::test_weights_in_shared_memory[cpu2]",),
    ),
    Mutation(
        name="main-grads-go-with-a-cast",
        rule="a cast of a layer loses its main gradients",
        target="tokenloom.training.expert_module:RoutedExperts._apply",
        old="vars(parameter).update(attributes)",
        new="pass",
        tests=("tests/training/test_main_grads.py::test_a_cast_keeps_them[cpu2]",),
    ),
    Mutation(
        name="steps-before-backward",
        rule="backward takes weights that have changed since forward",
        target="tokenloom.training.shards:require_unchanged",
        old="tensor._version != version",
        new="False",
        tests=(f"{CHECKPOINT_TEST}a_step_before_backward[cpu2-False]",),
    ),
    Mutation(
        name="hooks-go-with-a-cast",
        rule="a cast of a layer loses the hooks of its weights",
        target="tokenloom.training.expert_module:RoutedExperts._apply",
        old="renew_hooks(parameter)",
        new="pass",
        tests=("tests/training/test_main_grads.py::test_a_cast_keeps_them[cpu2]",),
    ),
)

MUTATIONS = LAYER + GIVEN + COUNTS + MIXED + GRADIENTS + ROUTED_EXPERTS + COMPILED + CHECKPOINTS
