"""The rules of layers: ExpertParallelMoE, MegaMoE, what carries their payloads, and how that is chosen."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MEGA = "inference/reference_experts.py"
COLLECTIVE = "backends/collective.py"

LAYER = (
    Mutation(
        "bias-in-the-weights",
        "the correction bias does not only choose, it weighs as well",
        "ops/router.py",
        "        weights = scores.gather(-1, ids)\n",
        "        weights = (choice + scores - scores.detach()).gather(-1, ids)\n",
        ("tests/ops/test_router.py",),
    ),
    Mutation(
        "no-group-limit",
        "experts outside the best groups can be chosen",
        "ops/router.py",
        "if self.top_groups == self.num_groups:",
        "if True:",
        ("tests/ops/test_router.py",),
    ),
    Mutation(
        "value-of-a-group",
        "a group's value is its best score for sigmoid routers too",
        "ops/router.py",
        'min(2 if self.score == "sigmoid" else 1, groups.shape[-1])',
        "1",
        ("tests/ops/test_router.py",),
    ),
    Mutation(
        "biased-down",
        "the correction bias falls for experts with too little load",
        "training/layer.py",
        "torch.sign(counts.mean() - counts)",
        "torch.sign(counts - counts.mean())",
        ("tests/ops/test_router.py",),
    ),
    Mutation(
        "gate-and-up-swapped",
        "silu is applied to the second half of w1's rows",
        "ops/activation.py",
        "gate, up = gate_and_up.chunk(2, -1)",
        "up, gate = gate_and_up.chunk(2, -1)",
        ("tests/ops/test_experts.py",),
    ),
    Mutation(
        "wrong-shard",
        "every rank loads the first ranks' experts",
        "training/layer.py",
        "full[name][layer.local_experts.start : layer.local_experts.stop]",
        "full[name][: len(layer.local_experts)]",
        ("tests/training/test_state_dict.py::test_which_experts_a_rank_keeps",),
    ),
    Mutation(
        "seed-by-local-number",
        "a seed gives the same experts to every rank",
        "training/layer.py",
        "rows = self.local_experts if name in EXPERT_WEIGHTS else range(len(parameter))",
        "rows = range(len(parameter))",
        ("tests/training/test_layer.py::test_a_seed_gives_the_same_full_weights_for_any_number_of_ranks",),
    ),
)

MEGA_MOE = (
    Mutation(
        "up-clamped-above-only",
        "ups may be as far below 0 as they like",
        MEGA,
        "up.clamp(-self._clamp, self._clamp)",
        "up.clamp(max=self._clamp)",
        ("tests/inference/test_mega_moe.py::test_reference_backend[cpu2-clamp]",),
    ),
    Mutation(
        "activations-without-weights",
        "routes have no weights",
        MEGA,
        "dequantize_fp8(*self._quantize(swiglu(gate_and_up) * row_weights[:, None]))",
        "dequantize_fp8(*self._quantize(swiglu(gate_and_up)))",
        ("tests/inference/test_mega_moe.py::test_reference_backend[cpu2-plain]",),
    ),
    Mutation(
        "one-shared-expert",
        "of several shared experts the first serves for all",
        MEGA,
        "total = total + self._expert(e, own",
        "total = total + self._expert(comm.plan.experts_per_rank, own",
        ("tests/inference/test_mega_moe.py::test_reference_backend[cpu2-two shared experts]",),
    ),
    Mutation(
        "room-for-even-routing",
        "activations have room for an even routing only",
        "inference/nvlink_experts.py",
        "activations = max(most_routes * intermediate, copied * (intermediate + hidden))",
        "activations = copied * (intermediate + hidden)",
        ("tests/inference/test_mega_moe.py::test_buffers_of_the_reference_layer",),
    ),
)

STRATEGIES = (
    Mutation(
        "gathered-but-not-used",
        "strategy all_gather sends rows as dedup does",
        COLLECTIVE,
        'if strategy == "all_gather":',
        'if strategy == "none":',
        ("tests/comm/test_strategies.py::test_what_travels",),
    ),
    Mutation(
        "home-of-another-token",
        "dense partial sums are taken from the place of the first token",
        COLLECTIVE,
        "places = torch.arange(num_ranks, device=order.device) * room + tokens",
        "places = torch.arange(num_ranks, device=order.device) * room + 0 * tokens",
        ("tests/comm/test_strategies.py::test_same_bits",),
    ),
)

TUNE = (
    Mutation(
        "score-of-forward-alone",
        "the score of a strategy leaves out its gradient",
        "tune/profiler.py",
        'its["with_gemm"] + its["gradient"] for who',
        'its["with_gemm"] for who',
        ("tests/tune/test_tune.py::test_numbers",),
    ),
    Mutation(
        "fastest-rank",
        "a sample is the time of the fastest rank",
        "tune/profiler.py",
        "statistics.median(map(max, zip(",
        "statistics.median(map(min, zip(",
        ("tests/tune/test_tune.py::test_numbers",),
    ),
    Mutation(
        "a-choice-of-its-own",
        "each rank's layer goes by what that rank has found",
        "training/layer.py",
        "agreed[0][1]",
        "agreed[comm.rank][1]",
        ("tests/tune/test_tune.py::test_rank_0_decides",),
    ),
    Mutation(
        "a-choice-made-elsewhere",
        "a choice for other hardware or software is used",
        "tune/choices.py",
        "_warn_of_another(path, other[0], setting)",
        "return other[1]",
        ("tests/tune/test_tune.py::test_a_choice_made_elsewhere",),
    ),
)

ROUTED = "training/routed_experts.py"

ROUTED_EXPERTS = (
    Mutation(
        "rows-for-frozen-w1",
        "received rows are kept though w1 wants no gradient",
        ROUTED,
        "needs[2] and not how.redispatch",
        "any(needs) and not how.redispatch",
        ("tests/training/test_routed_experts.py::test_rows_are_kept_for_the_gradient_of_w1_alone[cpu2]",),
    ),
    Mutation(
        "tokens-beyond-the-most",
        "more tokens than a layer was made for pass in pieces",
        "training/layer.py",
        "        checks.number_of_tokens(self.comm.plan, len(tokens))",
        "        pass",
        ("tests/training/test_routed_experts.py::test_too_many_tokens_are_too_many_in_pieces_too[cpu2]",),
    ),
    Mutation(
        "rows-of-gradients-for-w1",
        "rows that are sent again are those of the gradient",
        ROUTED,
        "(piece, x, how.strategy.dispatch) for piece",
        "(piece, grad, how.strategy.dispatch) for piece",
        ("tests/training/test_routed_experts.py::test_same_bits[cpu2-redispatch-whole]",),
    ),
    Mutation(
        "last-piece-of-w2",
        "the gradient of w2 is that of the last piece of the tokens",
        ROUTED,
        "products.of_weights(grad_out, activations, grad_w2)",
        "products.of_weights(grad_out, activations)",
        ("tests/training/test_routed_experts.py::test_pieces_are_the_whole[cpu2-keeps rows]",),
    ),
    Mutation(
        "weights-of-absent-rows",
        "a row's weight goes to the row before it",
        "ops/routing.py",
        "torch.where(inside, positions, num_places).flatten()",
        "torch.where(inside, positions - 1, num_places).flatten()",
        ("tests/comm/test_row_weights.py",),
    ),
)

COMPILER = "training/torch_compile.py"
COMPILER_TEST = "tests/training/test_torch_compile.py::test_"

COMPILED = (
    Mutation(
        "compiler-overwrites-x",
        "a compiled layer keeps x where the compiler puts something else",
        COMPILER,
        "inputs = [x.clone(), *(weight if",
        "inputs = [x, *(weight if",
        (f"{COMPILER_TEST}what_the_compiler_computed_may_be_overwritten",),
    ),
    Mutation(
        "kept-for-ever",
        "what a compiled forward keeps waits for a backward that never comes",
        COMPILER,
        "_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()",
        "_kept: dict[int, _Kept] = {}",
        (f"{COMPILER_TEST}forwards_without_backward_keep_nothing",),
    ),
    Mutation(
        "counts-are-lost",
        "a compiled layer does not count routes",
        COMPILER,
        "layer.expert_counts.copy_(expert_counts)",
        "pass",
        (f"{COMPILER_TEST}equal_calls_are_two_calls", f"{COMPILER_TEST}wrong_input_has_its_named_error"),
    ),
    Mutation(
        "narrow-main-grads",
        "main gradients have the dtype of the parameter",
        "training/main_grads.py",
        "dtype=torch.float32",
        "dtype=parameter.dtype",
        ("tests/training/test_main_grads.py",),
    ),
)
