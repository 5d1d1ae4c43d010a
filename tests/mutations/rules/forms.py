"""Rules of experts of other forms: activations, biases, layouts, and what routers and shared experts add."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ACTIVATION = "tokenloom.ops.activation:"
ACTIVATION_TESTS = ("tests/ops/test_activation.py",)
EXPERTS = "tokenloom.ops.experts:"
FORM_TESTS = "tests/ops/test_expert_forms.py::test_"
LAYER_TESTS = "tests/training/test_layer_forms.py::test_"
GPT_OSS = (f"{LAYER_TESTS}gradients[cpu2-gpt_oss]",)

ACTIVATIONS = (
    Mutation(
        name="alpha-without-slope",
        rule="the slope of silu is that of alpha = 1",
        target=f"{ACTIVATION}_value_and_slope",
        old="sigmoid * (1 + scaled * (1 - sigmoid))",
        new="sigmoid * (1 + x * (1 - sigmoid))",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="gradient-beyond-the-limit",
        rule="ups beyond the limit have a gradient",
        target=f"{ACTIVATION}activate_backward",
        old="torch.where(up.abs() > activation.limit, 0, grad_up)",
        new="grad_up",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="no-gradient-at-the-limit",
        rule="a gate of exactly the limit has no gradient",
        target=f"{ACTIVATION}activate_backward",
        old="gate > activation.limit",
        new="gate >= activation.limit",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="gates-limited-below",
        rule="gates are limited below as well",
        target=f"{ACTIVATION}_parts",
        old="gate.clamp(max=activation.limit)",
        new="gate.clamp(-activation.limit, activation.limit)",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="limit-before-bias",
        rule="gradients go by whether values were beyond the limit before their bias",
        target=f"{ACTIVATION}activate_backward",
        old="_gate_and_up(_biased(hidden, offsets, between), between.interleaved)",
        new="_gate_and_up(hidden.float(), between.interleaved)",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="offset-forgotten",
        rule="ups have no offset",
        target=f"{ACTIVATION}_parts",
        old="up + activation.up_offset if activation.up_offset else up",
        new="up",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="relu2-is-relu",
        rule="the square is left out",
        target=f"{ACTIVATION}_value_and_slope",
        old="return positive.square(), 2 * positive",
        new="return positive, (x > 0).to(x.dtype)",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="gradients-gates-first",
        rule="the gradient of interleaved pre-activations has gates first",
        target=f"{ACTIVATION}activate_backward",
        old="-1 if in_turns else -2",
        new="-2",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="tanh-for-erf",
        rule="geglu takes the approximation of gelu",
        target="tokenloom.plan:ACTIVATIONS",
        old='Activation("gelu")',
        new='Activation("gelu_tanh")',
        tests=(f"{ACTIVATION_TESTS[0]}::test_names",),
    ),
)

BIASES = (
    Mutation(
        name="bias-of-the-next-expert",
        rule="the first row of an expert has the bias of the one before",
        target="tokenloom.ops.offsets:experts_of_rows",
        old="torch.searchsorted(offsets[1:], rows, right=True)",
        new="torch.searchsorted(offsets[1:], rows)",
        tests=ACTIVATION_TESTS,
    ),
    Mutation(
        name="bias-before-weight",
        rule="the bias of w2 is not weighted",
        target="tokenloom.ops.bias:add_bias",
        old="row_weights[:, None] * bias.to(row_weights.dtype)[experts_of_rows(offsets, len(y))]",
        new="bias.to(row_weights.dtype)[experts_of_rows(offsets, len(y))]",
        tests=GPT_OSS,
    ),
    Mutation(
        name="weights-without-bias",
        rule="the gradient of a weight leaves out the bias of w2",
        target=f"{EXPERTS}Experts.backward",
        old="dot_bias(found[2], grad, offsets, self.w2_bias)",
        new="pass",
        tests=GPT_OSS,
    ),
    Mutation(
        name="bias-gradient-unweighted",
        rule="the gradient of w2's bias sums rows without their weights",
        target=f"{EXPERTS}Experts.grad_w2_bias",
        old="sum_rows(gemms, grad, row_weights, total)",
        new="sum_rows(gemms, grad, None, total)",
        tests=GPT_OSS,
    ),
    Mutation(
        name="last-piece-of-biases",
        rule="the gradient of w2's bias is that of the last piece of the tokens",
        target="tokenloom.training.routed_experts:_Backward._add_biases",
        old="self.experts.grad_w2_bias(piece.gemms, grad_out, piece.row_weights, self.grad_w2_bias)",
        new="self.experts.grad_w2_bias(piece.gemms, grad_out, piece.row_weights)",
        tests=("tests/training/test_routed_experts.py::test_pieces_are_the_whole[cpu2-gpt_oss-keeps rows]",),
    ),
    Mutation(
        name="biases-not-sharded",
        rule="biases of experts are plain tensors, as replicated parameters are",
        target="tokenloom.training.expert_module:RoutedExperts._make_parameters",
        old="spread(value, mesh)",
        new='value if name.endswith("bias") else spread(value, mesh)',
        tests=("tests/training/test_state_dict.py::test_which_experts_a_rank_keeps[cpu2]",),
    ),
)

LAYOUTS = (
    Mutation(
        name="gradients-not-transposed",
        rule="gradients of transposed weights lie as those of others, to be copied by whoever keeps them",
        target=f"{EXPERTS}Experts._weight_gradient",
        old="""
            if self.form.layout.transposed:
                left, right = right, left
            return gemms.weight_gradient(left, right, total)
        """,
        new="""
            found = gemms.weight_gradient(left, right, total if total is None else total.transpose(1, 2))
            return found.transpose(1, 2) if self.form.layout.transposed else found
        """,
        tests=(f"{FORM_TESTS}gradients_lie_as_their_weights",),
    ),
    Mutation(
        name="strides-that-do-not-fit",
        rule="weights of any strides go to torch's grouped GEMM",
        target="tokenloom.ops.expert_gemms:_strides_fit",
        old="one == 1 and pitch >= width and not pitch % values and not weights.stride(0) % values",
        new="True",
        tests=(f"{FORM_TESTS}any_strides",),
    ),
    Mutation(
        name="seed-by-memory",
        rule="a seed fills memory, so experts depend on how their weights lie",
        target="tokenloom.training.parameters:plain_view",
        old="parameter.transpose(1, 2)",
        new="parameter",
        tests=(f"{LAYER_TESTS}layouts_hold_the_same_experts[cpu2]",),
    ),
)

ROUTERS = (
    Mutation(
        name="router-bias-not-summed",
        rule="router_grad='sum' leaves out the router's bias",
        target="tokenloom.training.layer:ExpertParallelMoE._route",
        old="self._replicated(self.router_bias).to(dtype)",
        new="self.router_bias.to(dtype)",
        tests=(f"{LAYER_TESTS}gradients[cpu2-gpt_oss_sum]",),
    ),
    Mutation(
        name="least-sum-ignored",
        rule="weights are divided by any sum, however small",
        target="tokenloom.ops.router:Router._weights",
        old="total.clamp_min(self.least_sum) if self.least_sum else total",
        new="total",
        tests=("tests/ops/test_router.py",),
    ),
    Mutation(
        name="shared-expert-without-gate",
        rule="the gate of the shared expert does nothing",
        target="tokenloom.training.layer:ExpertParallelMoE._shared_expert",
        old="torch.sigmoid(functional.linear(tokens, self._replicated(self.shared_gate_weight))) * out",
        new="out",
        tests=(f"{LAYER_TESTS}experts_of_other_forms_are_those_of_the_reference[cpu2-qwen2_moe-torch.float64]",),
    ),
)

KERNEL_TESTS = ("tests/kernels/test_activations.py",)

KERNELS = (
    Mutation(
        name="kernel-gradient-beyond-the-limit",
        rule="the kernel gives ups beyond the limit a gradient",
        target="kernels/activation/args.cuh:product_takes",
        old="taken.up_passes = !(fabsf(up) > args.limit);",
        new="{}",
        tests=KERNEL_TESTS,
        gpu=True,
    ),
    Mutation(
        name="kernel-bias-of-the-first-expert",
        rule="rows of all experts have the bias of the first",
        target="device/tile/expert_of_row.cuh:find",
        old="while (ends[expert] <= row) ++expert;",
        new="{}",
        tests=KERNEL_TESTS,
        gpu=True,
    ),
    Mutation(
        name="kernel-dot-alone",
        rule="the part of w2's bias replaces the gradient of a weight",
        target="kernels/bias/dot_bias.cuh:dot_bias",
        old="args.weights[row] += sum;",
        new="args.weights[row] = sum;",
        tests=KERNEL_TESTS,
        gpu=True,
    ),
    Mutation(
        name="kernel-turns-not-joined",
        rule="gradients of gates and ups in turns are written gates first within 16 bytes",
        target="kernels/activation/args.cuh:join",
        old="gate = part[0];",
        new="{}",
        tests=KERNEL_TESTS,
        gpu=True,
    ),
)

MUTATIONS = ACTIVATIONS + BIASES + LAYOUTS + ROUTERS + KERNELS
