"""Rules of experts of other forms: activations, biases, layouts, and what routers and shared experts add."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
ACTIVATION = "ops.activation:"
ACTIVATION_TESTS = ("tests/ops/test_activation.py",)
EXPERTS = "ops.experts:"
FORM_TESTS = "tests/ops/test_expert_forms.py::test_"
LAYER_TESTS = "tests/training/test_layer_forms.py::test_"
GPT_OSS = (f"{LAYER_TESTS}gradients[cpu2-gpt_oss]",)

ACTIVATIONS = (
    M("alpha-without-slope", "the slope of silu is that of alpha = 1", f"{ACTIVATION}_value_and_slope",
      "sigmoid * (1 + scaled * (1 - sigmoid))", "sigmoid * (1 + x * (1 - sigmoid))", *ACTIVATION_TESTS),
    M("gradient-beyond-the-limit", "ups beyond the limit have a gradient", f"{ACTIVATION}activate_backward",
      "torch.where(up.abs() > activation.limit, 0, grad_up)", "grad_up", *ACTIVATION_TESTS),
    M("no-gradient-at-the-limit", "a gate of exactly the limit has no gradient", f"{ACTIVATION}activate_backward",
      "gate > activation.limit", "gate >= activation.limit", *ACTIVATION_TESTS),
    M("gates-limited-below", "gates are limited below as well", f"{ACTIVATION}_parts",
      "gate.clamp(max=activation.limit)", "gate.clamp(-activation.limit, activation.limit)", *ACTIVATION_TESTS),
    M("limit-before-bias", "gradients go by whether values were beyond the limit before their bias",
      f"{ACTIVATION}activate_backward", "_gate_and_up(_biased(hidden, offsets, between), between.interleaved)",
      "_gate_and_up(hidden.float(), between.interleaved)", *ACTIVATION_TESTS),
    M("offset-forgotten", "ups have no offset", f"{ACTIVATION}_parts",
      "up + activation.up_offset if activation.up_offset else up", "up", *ACTIVATION_TESTS),
    M("relu2-is-relu", "the square is left out", f"{ACTIVATION}_value_and_slope",
      "return positive.square(), 2 * positive", "return positive, (x > 0).to(x.dtype)", *ACTIVATION_TESTS),
    M("gradients-gates-first", "the gradient of interleaved pre-activations has gates first",
      f"{ACTIVATION}activate_backward", "-1 if in_turns else -2", "-2", *ACTIVATION_TESTS),
    M("tanh-for-erf", "geglu takes the approximation of gelu", "plan:ACTIVATIONS", 'Activation("gelu")',
      'Activation("gelu_tanh")', f"{ACTIVATION_TESTS[0]}::test_names"),
)

BIASES = (
    M("bias-of-the-next-expert", "the first row of an expert has the bias of the one before",
      "ops.offsets:experts_of_rows", "torch.searchsorted(offsets[1:], rows, right=True)",
      "torch.searchsorted(offsets[1:], rows)", *ACTIVATION_TESTS),
    M("bias-before-weight", "the bias of w2 is not weighted", "ops.bias:add_bias",
      "row_weights[:, None] * bias.to(row_weights.dtype)[experts_of_rows(offsets, len(y))]",
      "bias.to(row_weights.dtype)[experts_of_rows(offsets, len(y))]", *GPT_OSS),
    M("weights-without-bias", "the gradient of a weight leaves out the bias of w2", f"{EXPERTS}Experts.backward",
      "dot_bias(found[2], grad, offsets, self.w2_bias)", "pass", *GPT_OSS),
    M("bias-gradient-unweighted", "the gradient of w2's bias sums rows without their weights",
      f"{EXPERTS}Experts.grad_w2_bias", "sum_rows(gemms, grad, row_weights, total)",
      "sum_rows(gemms, grad, None, total)", *GPT_OSS),
    M("last-piece-of-biases", "the gradient of w2's bias is that of the last piece of the tokens",
      "training.routed_experts:_Backward._add_biases",
      "self.experts.grad_w2_bias(piece.gemms, grad_out, piece.row_weights, self.grad_w2_bias)",
      "self.experts.grad_w2_bias(piece.gemms, grad_out, piece.row_weights)",
      "tests/training/test_routed_experts.py::test_pieces_are_the_whole[cpu2-gpt_oss-keeps rows]"),
    M("biases-not-sharded", "biases of experts are plain tensors, as replicated parameters are",
      "training.expert_module:RoutedExperts._make_parameters", "spread(value, mesh)",
      'value if name.endswith("bias") else spread(value, mesh)',
      "tests/training/test_state_dict.py::test_which_experts_a_rank_keeps[cpu2]"),
)

LAYOUTS = (
    M("gradients-not-transposed",
      "gradients of transposed weights lie as those of others, to be copied by whoever keeps them",
      f"{EXPERTS}Experts._weight_gradient",
      """
            if self.form.layout.transposed:
                left, right = right, left
            return gemms.weight_gradient(left, right, total)
      """,
      """
            found = gemms.weight_gradient(left, right, total if total is None else total.transpose(1, 2))
            return found.transpose(1, 2) if self.form.layout.transposed else found
      """,
      f"{FORM_TESTS}gradients_lie_as_their_weights"),
    M("strides-that-do-not-fit", "weights of any strides go to torch's grouped GEMM", "ops.expert_gemms:_strides_fit",
      "one == 1 and pitch >= width and not pitch % values and not weights.stride(0) % values", "True",
      f"{FORM_TESTS}any_strides"),
    M("seed-by-memory", "a seed fills memory, so experts depend on how their weights lie",
      "training.parameters:plain_view", "parameter.transpose(1, 2)", "parameter",
      f"{LAYER_TESTS}layouts_hold_the_same_experts[cpu2]"),
)

ROUTERS = (
    M("router-bias-not-summed", "router_grad='sum' leaves out the router's bias",
      "training.layer:ExpertParallelMoE._route", "self._replicated(self.router_bias).to(dtype)",
      "self.router_bias.to(dtype)", f"{LAYER_TESTS}gradients[cpu2-gpt_oss_sum]"),
    M("least-sum-ignored", "weights are divided by any sum, however small", "ops.router:Router._weights",
      "total.clamp_min(self.least_sum) if self.least_sum else total", "total", "tests/ops/test_router.py"),
    M("shared-expert-without-gate", "the gate of the shared expert does nothing",
      "training.layer:ExpertParallelMoE._shared_expert",
      "torch.sigmoid(functional.linear(tokens, self._replicated(self.shared_gate_weight))) * out", "out",
      f"{LAYER_TESTS}experts_of_other_forms_are_those_of_the_reference[cpu2-qwen2_moe-torch.float64]"),
)

KERNEL_TESTS = ("tests/kernels/test_activations.py",)

KERNELS = (
    M("kernel-gradient-beyond-the-limit", "the kernel gives ups beyond the limit a gradient",
      "kernels/activation/args.cuh:product_takes", "taken.up_passes = !(fabsf(up) > args.limit);", "{}", *KERNEL_TESTS,
      gpu=True),
    M("kernel-bias-of-the-first-expert", "rows of all experts have the bias of the first",
      "device/tile/expert_of_row.cuh:find", "while (ends[expert] <= row) ++expert;", "{}", *KERNEL_TESTS, gpu=True),
    M("kernel-dot-alone", "the part of w2's bias replaces the gradient of a weight",
      "kernels/bias/dot_bias.cuh:dot_bias", "args.weights[row] += sum;", "args.weights[row] = sum;", *KERNEL_TESTS,
      gpu=True),
    M("kernel-turns-not-joined", "gradients of gates and ups in turns are written gates first within 16 bytes",
      "kernels/activation/args.cuh:join", "gate = part[0];", "{}", *KERNEL_TESTS, gpu=True),
)

MUTATIONS = ACTIVATIONS + BIASES + LAYOUTS + ROUTERS + KERNELS
