"""Rules of what is refused: a check that is missing or weaker, for each table of bad inputs."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
ERRORS, OPTIONS, OUT, BESIDE = (f"tests/comm/test_{name}.py::test_" for name in ("errors", "options", "out", "beside"))
CHECKS = "comm.checks:"
ON_TWO = "cpu2-"

CALLS = (
    M("any-number-of-tokens", "a dispatch takes more tokens than its communicator was made for",
      f"{CHECKS}number_of_tokens", "num_tokens > plan.max_tokens_per_rank", "False",
      f"{ERRORS}dispatch_fault[{ON_TWO}too many tokens-collective]"),
    M("groups-of-token-rows", "a dispatch takes an alignment for groups that its layout has not",
      f"{CHECKS}dispatch_options", "layout != 'expert' and alignment != 1", "False",
      f"{ERRORS}dispatch_fault[{ON_TWO}alignment of no group-collective]"),
    M("capacities-of-nothing", "a capacity of 0 rows is taken", f"{CHECKS}_is_rows", "1 <= value <= MAX_ROWS",
      "0 <= value <= MAX_ROWS", f"{ERRORS}dispatch_fault[{ON_TWO}capacity 0-collective]"),
    M("scales-of-any-dtype", "FP8 rows come with scales in float64", f"{CHECKS}_check_scales",
      "scales.dtype != torch.float32", "False", f"{ERRORS}fp8_fault[{ON_TWO}scales in float64-collective]"),
    M("scales-of-either-recipe", "scales of the other recipe are told by their shape alone", f"{CHECKS}_check_scales",
      "shape == [x.shape[0], *plan.scale_shape(other := 'block' if recipe == 'row' else 'row')]",
      "not (other := 'block')", f"{ERRORS}fp8_fault[{ON_TWO}scales of rows-collective]"),
    M("recipes-of-nothing", "a recipe of rows that are no FP8 is left alone without a word", f"{CHECKS}_check_tokens",
      "recipe != 'block' and scales is None and not to_fp8", "False",
      f"{ERRORS}dispatch_fault[{ON_TWO}a recipe of nothing-collective]"),
    M("recipes-are-not-compared", "ranks do not compare their recipes", "backends.handshake:dispatch_fields",
      "vars(user_options or kind.options)", "{**vars(user_options or kind.options), 'recipe': 'block'}",
      f"{ERRORS}disagreement_on_fp8"),
    M("scales-beside-quantised-rows", "scales of rows that are quantised on the way are left alone without a word",
      f"{CHECKS}_check_payload", "to_fp8 and scales is not None", "False",
      f"{ERRORS}to_fp8_fault[{ON_TWO}scales beside what is to be quantised-collective]"),
    M("float64-of-float32", "sums in float32 are handed out as float64", f"{CHECKS}combine_options",
      "dtype == torch.float64 and y.dtype != torch.float64", "False",
      f"{ERRORS}combine_fault[{ON_TWO}float64 from float32-collective]"),
    M("weighted-tokens", "rows that their user has weighted are said to be weighted again",
      f"{CHECKS}combine_options", "weighted is not None", "False",
      f"{ERRORS}combine_fault_of_tokens[{ON_TWO}weighted rows of tokens-collective]"),
    M("rows-of-others", "a combine takes what another communicator has dispatched", f"{CHECKS}require_routed",
      "routed._owner is not owner", "False", f"{ERRORS}combine_on_the_wrong_communicator[{ON_TWO}collective]"),
    M("layouts-of-scales-are-not-compared", "ranks do not compare the layout of scales",
      "backends.handshake:dispatch_fields",
      "vars(user_options or kind.options)", "{**vars(user_options or kind.options), 'scale_layout': 'rows'}",
      f"{ERRORS}disagreement_on_fp8"),
    M("waits-without-end", "a deadline may be infinite", "runtime.waiting:checked_seconds",
      "0 < value <= MAX_TIMEOUT_S", "0 < value", f"{ERRORS}construction_fault[{ON_TWO}a timeout without end]",
      "tests/runtime/test_rank_group.py::test_a_deadline_is_a_number_of_seconds"),
    M("plans-are-not-compared", "ranks make communicators of different sizes",
      "backends.registration:Request.must_agree", "vars(self.plan) if self.plan else {}", "{}",
      f"{ERRORS}plans_differ"),
    M("rows-of-any-width-get-kernels", "kernels get rows that their copies cannot move",
      "backends.peers.backend:why_no_kernels", "plan is not None and plan.hidden % BULK_VALUES", "False",
      "tests/backends/test_registry.py::test_what_the_kernels_do_not_do"),
    M("lists-as-copies", "a list as copy= is an error of Python's", f"{CHECKS}output_owner",
      "(KeyError, TypeError)", "KeyError", f"{OPTIONS}dispatch"),
    M("numbers-as-truth", "a number says whether rows are weighted", f"{CHECKS}combine_options",
      "weighted is None or isinstance(weighted, bool)", "True", f"{OPTIONS}combine"),
    M("values-of-any-dtype", "weights that come home may be of another dtype than float32",
      f"{CHECKS}_require_exactly", "tensor.dtype != dtype", "False",
      f"{BESIDE}fault[{ON_TWO}values of float64-collective]"),
    M("a-bias-of-integers", "a bias may be of integers", f"{CHECKS}bias_at_home",
      "bias.dtype not in Capabilities().dtypes", "False", f"{BESIDE}fault[{ON_TWO}bias of integers-collective]"),
    M("out-of-exact-sizes", "a dispatch of exact sizes takes tensors for its results", f"{CHECKS}dispatch_out",
      "kind.options.sizes != 'bounded'", "False", f"{OUT}fault_of_options"),
    M("out-of-another-dtype", "a result is written to a tensor of another dtype", f"{CHECKS}_require_like",
      "tensor.dtype != like.dtype", "False", f"{OUT}combine_fault[{ON_TWO}of another dtype-collective]"),
    M("rows-of-routes-by-tokens", "a dispatch by routes takes a layout with a row for each token",
      f"{CHECKS}dispatch_options", "strategy == 'all_to_all' and layout not in ROUTE_LAYOUTS", "False",
      "tests/comm/test_strategies.py::test_wrong_strategies"),
)

DEEP_EP = "compat.deep_ep."
IN_DEEP_EP = "tests/compat/deep_ep/test_"
BAD_CALLS = "tests/compat/test_bad_calls.py::test_"
NAMES = "tests/compat/test_deep_gemm_names.py::test_"
GEMM_CALLS = "tests/compat/test_deep_gemm_calls.py::test_"

CLIENTS = (
    M("any-bound-of-tokens", "a call of deep_gemm's layer says fewer tokens than it has",
      "compat.deep_gemm.mega:_rows_of_call", "num_tokens_bound is not None and not rows <= num_tokens_bound <= room",
      "False", f"{BAD_CALLS}a_call_of_a_layer[num_tokens_bound is 1]"),
    M("any-option-of-deep-gemm", "an option that deep_gemm's layer has not is ignored",
      "compat.deep_gemm.mega:_check_options", "value not in SERVED[name]", "False",
      f"{NAMES}options_that_there_are_not", f"{BAD_CALLS}options_of_a_layer"),
    M("a-result-of-any-shape", "deep_gemm's layer asks a result of one dimension for its rows",
      "compat.deep_gemm.mega:_rows_of_call", "not isinstance(y, torch.Tensor) or y.dim() != 2",
      "not isinstance(y, torch.Tensor)", f"{GEMM_CALLS}a_fault_of_one_rank[{ON_TWO}check_wrong_results]"),
    M("odd-numbers-of-sms", "any number of SMs is taken", f"{DEEP_EP}buffer:Buffer.set_num_sms",
      "isinstance(new_num_sms, int) and new_num_sms > 0 and new_num_sms % 2 == 0",
      "isinstance(new_num_sms, int) and new_num_sms > 0", f"{BAD_CALLS}numbers_of_sms"),
    M("this-rank-is-masked", "a rank masks itself",
      f"{DEEP_EP}low_latency:LowLatencyMode.low_latency_update_mask_buffer", "rank != self.rank", "True",
      f"{BAD_CALLS}deep_ep", num_ranks=4),
    M("any-event-to-wait-for", "what is no event is waited for", f"{DEEP_EP}events:recorded_in",
      "isinstance(event, EventHandle | EventOverlap)", "True", f"{BAD_CALLS}deep_ep", num_ranks=4),
    M("weights-that-nobody-sent", "weights come home though their dispatch had none",
      f"{DEEP_EP}normal:NormalMode.combine", "dispatched.with_ids", "True",
      f"{IN_DEEP_EP}normal.py::test_ranks_without_ids"),
    M("three-biases", "a combine takes more than two biases", f"{DEEP_EP}checks:biases_of", "1 <= len(biases) <= 2",
      "True", f"{IN_DEEP_EP}normal.py::test_combine_fault"),
    M("rows-of-14-bytes", "rows are taken that no kernel moves", f"{DEEP_EP}checks:tokens_of",
      "not row_bytes or row_bytes % ROW_BYTES", "False",
      f"{IN_DEEP_EP}normal.py::test_dispatch_fault[{ON_TWO}14 bytes-later call]"),
    M("experts-that-do-not-divide", "any number of experts is taken, whether or not ranks divide it",
      f"{DEEP_EP}low_latency:LowLatencyMode.low_latency_dispatch", "num_experts % self.group_size", "False",
      f"{IN_DEEP_EP}low_latency.py::test_dispatch_fault[{ON_TWO}experts that ranks do not divide-later call]"),
    M("padding-of-nothing", "zeros are asked for where rows are not grouped",
      f"{DEEP_EP}elastic_calls:ElasticCalls.dispatch", "do_expand or not do_zero_padding", "True",
      f"{IN_DEEP_EP}elastic.py::test_dispatch_fault"),
    M("a-handle-of-another-form", "rows go again in another form than their handle has",
      f"{DEEP_EP}elastic_calls:ElasticCalls._check_cached", "do_expand == handle.do_expand", "True",
      f"{IN_DEEP_EP}elastic.py::test_cached_fault"),
    M("any-rows-come-home", "a combine takes fewer rows than were received", f"{DEEP_EP}checks:rows_of",
      "rows.shape != wanted and not may_be_fewer", "False", f"{IN_DEEP_EP}elastic.py::test_combine_fault"),
    M("slots-for-some", "a rank has more tokens than it says that any has",
      f"{DEEP_EP}hybrid_ep_buffer:HybridEPBuffer.dispatch_with_permute", "len(hidden) <= slots", "True",
      f"{IN_DEEP_EP}hybrid.py::test_dispatch_fault"),
    M("padding-of-another-dispatch", "a combine is told another padding than its dispatch had",
      f"{DEEP_EP}hybrid_ep_buffer:_check_handle", "pad_multiple in (None, has)", "True",
      f"{IN_DEEP_EP}hybrid.py::test_combine_fault"),
    M("fewer-rows-again", "fewer rows than were dispatched go again at a glance",
      "comm.checks:fits_rows_again", "fits_like(x, (num_tokens, plan.hidden), x.dtype, device)",
      "fits_like(x, (len(x), plan.hidden), x.dtype, device)",
      f"{IN_DEEP_EP}later_calls.py::test_what_is_wrong_again_shows"),
    M("more-tokens-than-a-buffer-holds", "more tokens are written to a buffer than it holds",
      "compat.deep_gemm.pre_dispatch:mega_moe_pre_dispatch_sm90", "min(rows, room)", "rows",
      "tests/compat/test_deep_gemm.py::test_pre_dispatch_of_what_does_not_fit"),
    M("a-config-of-no-sms", "a config may have no SMs", f"{DEEP_EP}config:Config.__init__",
      "isinstance(value, int) and value > 0", "isinstance(value, int)", f"{IN_DEEP_EP}surface.py::test_config_checks"),
)

LAYER = "tests/training/test_layer.py::test_"
BAD_INPUT = "test_bad_input_on_one_rank"
ROUTES, EXPERTS = (f"tests/training/test_{name}.py::{BAD_INPUT}" for name in ("given_routes", "expert_module"))
CHANGED = "tests/training/test_changed_layers.py::test_"
TRAINING = "training."

LAYERS = (
    M("tokens-of-any-width", "a layer takes tokens of another width", f"{TRAINING}expert_module:RoutedExperts.tokens",
      "x.ndim == 0 or x.shape[-1] != self.hidden", "x.ndim == 0",
      f"{LAYER}a_fault_on_one_rank_is_an_error_on_all_and_the_layer_works_on[{ON_TWO}losses-wrong hidden]"),
    M("two-groups-for-a-layer", "a layer takes both a group and a communicator",
      f"{TRAINING}expert_module:RoutedExperts.__init__",
      "raise InvalidArgument('group and comm are both given; the communicator already has a group')", "pass",
      f"{LAYER}a_wrong_option_on_one_rank_is_an_error_on_all"),
    M("weights-of-no-experts", "a layer takes weights without the experts that they belong to",
      f"{TRAINING}layer:ExpertParallelMoE._route",
      "raise InvalidArgument('topk_weights are given without topk_ids; give the experts that they belong to')", "pass",
      f"{ROUTES}[{ON_TWO}weights alone]"),
    M("masks-of-integers", "a mask of integers picks tokens by their numbers",
      f"{TRAINING}layer:_places_of_real_tokens", "token_mask.dtype != torch.bool", "False",
      f"{ROUTES}[{ON_TWO}mask of integers]"),
    M("weights-of-integers", "weights of routes may be integers",
      f"{TRAINING}expert_module:RoutedExperts.weights", "not topk_weights.is_floating_point()", "False",
      f"{EXPERTS}[{ON_TWO}integer weights]"),
    M("experts-of-integers", "a layer is made of integers", f"{TRAINING}expert_module:RoutedExperts.__init__",
      "not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2",
      "not isinstance(dtype, torch.dtype) or dtype.itemsize < 2", f"{CHANGED}bad_options_are_named"),
    M("scales-without-end", "the scale of a router may be NaN", "ops.router:Router.__post_init__",
      "not isinstance(getattr(self, name), int | float) or not math.isfinite(getattr(self, name))",
      "not isinstance(getattr(self, name), int | float)",
      "tests/ops/test_router.py::test_impossible_options_are_named"),
    M("weights-that-do-not-fit", "experts are not asked whether their weights fit each other",
      f"{TRAINING}routed_experts:routed_experts", "form.check(tensors, comm.plan.experts_per_rank, comm.plan.hidden)",
      "None", "tests/training/test_routed_experts.py::test_wrong_weights_on_one_rank"),
)

PLANS = "tests/test_plan.py::test_"
ACTIVATION = "tests/ops/test_activation.py::test_no_such_activation"
GEMM, SLOTS = (f"tests/ops/test_{name}.py::test_" for name in ("gemm", "gemm_slots"))

SIZES = (
    M("truth-is-a-size", "True is a size", "plan:Plan.__post_init__",
      "isinstance(value, bool) or not isinstance(value, int) or value < 1", "not isinstance(value, int) or value < 1",
      f"{PLANS}sizes_are_positive_integers"),
    M("experts-are-left-over", "experts that ranks do not divide are left out", "plan:Plan.__post_init__",
      "self.num_experts % self.num_ranks", "False", f"{PLANS}experts_divide_over_ranks"),
    M("more-routes-than-kernels-take", "a token may have 33 routes", "plan:Plan.__post_init__",
      "self.top_k > MAX_TOP_K", "self.top_k > MAX_TOP_K + 1", f"{PLANS}top_k_limit"),
    M("limits-of-no-gates", "an activation without gates has a limit", "plan:Activation.__post_init__",
      "not self.gated and (self.limit is not None or self.up_offset)", "not self.gated and self.up_offset",
      ACTIVATION),
    M("limits-of-nothing", "a limit may be 0", "plan:Activation.__post_init__",
      "is_number(self.limit) and self.limit > 0", "is_number(self.limit)", ACTIVATION),
    M("least-sums-below-zero", "the least sum of a router's weights may be below 0", "ops.router:Router.__post_init__",
      "not 0 <= self.least_sum < math.inf", "False", "tests/ops/test_router.py::test_least_sums_that_make_no_router"),
    M("groups-that-do-not-divide", "groups of a router need not divide its experts", "ops.router:Router.__post_init__",
      "self.num_groups < 1 or self.num_experts % self.num_groups", "self.num_groups < 1",
      "tests/ops/test_router.py::test_impossible_options_are_named"),
    M("gemms-of-any-strides", "a GEMM takes tensors that are not contiguous", "ops.gemm:check_tensor",
      "list(tensor.shape) != shape or not tensor.is_contiguous()", "list(tensor.shape) != shape",
      f"{GEMM}bad_input_is_named", f"{SLOTS}bad_input_is_named"),
    M("gemms-of-any-width", "a GEMM takes weights of any number of rows", "ops.gemm:_check",
      "b.dim() != 3 or not b.numel() or b.shape[1] % BLOCK or b.shape[2] % BLOCK",
      "b.dim() != 3 or not len(b) or b.shape[2] % BLOCK", f"{GEMM}bad_input_is_named"),
    M("counts-of-any-dtype", "counts of rows in slots may be of 64 bits, whose halves kernels read", "ops.gemm:_check",
      "check_tensor('expert_counts', expert_counts, int32, [num_experts], a.device)", "None",
      f"{SLOTS}bad_input_is_named"),
    M("both-or-neither", "a GEMM takes offsets beside counts", "ops.gemm:_check",
      "(expert_offsets is None) == (expert_counts is None)", "expert_offsets is None and expert_counts is None",
      f"{SLOTS}one_of_offsets_and_counts_must_be_given"),
    M("two-limits", "a limit replaces the one that the activation has", "ops.gemm:gated_activation",
      "form.limit is not None", "False", f"{GEMM}bad_options_of_swiglu_are_named"),
    M("weights-of-two-dtypes", "weights of experts may have different dtypes", "ops.experts:ExpertForm.check",
      "tensor.dtype != w1.dtype", "False", "tests/ops/test_expert_forms.py::test_what_does_not_fit"),
    M("gates-in-turns-without-gates", "weights without gates may have them in turns",
      "ops.experts:ExpertForm.__post_init__", "self.layout.interleaved and not self.activation.gated", "False",
      "tests/ops/test_expert_forms.py::test_what_does_not_fit"),
    M("blocks-of-100", "weights are quantised in blocks that they do not fill", "ops.quant.fp8:quantize_fp8_blocks",
      "w.dim() < 2 or w.shape[-1] % FP8_BLOCK or w.shape[-2] % FP8_BLOCK", "w.dim() < 2",
      "tests/ops/test_quant.py::test_blocks_of_weights"),
)

MEGA_INPUTS = "tests/inference/test_mega_inputs.py::test_"
PADDED = "tests/inference/test_padded_mega.py::test_"

MEGA = (
    M("any-scales-of-weights", "weights of a MegaMoE may be no tensors", "inference.mega_moe:MegaMoE.load_weights",
      "not isinstance(tensor, torch.Tensor) and not (name in optional and tensor is None)", "False",
      f"{MEGA_INPUTS}wrong_weights_are_named"),
    M("ids-without-tokens", "a MegaMoE asks ids without dimensions for their rows",
      "inference.mega_moe:MegaMoE._checked", "not topk_ids.dim()", "False",
      f"{MEGA_INPUTS}wrong_inputs_are_named"),
    M("experts-of-any-width", "experts of a MegaMoE may have a width that no kernel takes",
      "inference.mega_moe:_is_width", "width % WIDTH_UNIT == 0", "True",
      f"tests/inference/test_mega_moe.py::test_a_wrong_option_on_one_rank_is_an_error_on_all[{ON_TWO}intermediate]"),
    M("tokens-of-the-width-of-kernels", "a MegaMoE takes tokens that are padded already",
      "inference.mega_moe:MegaMoE._padded_tokens", "x.dim() != 2 or x.shape[1] != self.hidden",
      "x.dim() != 2 or x.shape[1] not in (self.hidden, self.comm.plan.hidden)", f"{PADDED}wrong_tokens_are_named"),
    M("hidden-is-padded-alike", "ranks may have widths that differ, if they are padded to the same",
      "inference.mega_moe:MegaMoE.__init__", '{"hidden": hidden, "intermediate": intermediate}',
      '{"intermediate": intermediate}',
      f"tests/inference/test_mega_moe.py::test_a_wrong_option_on_one_rank_is_an_error_on_all"
      f"[{ON_TWO}another hidden, padded alike]"),
    M("odd-sms", "blocks that send may be of an odd number", "inference.schedules:MegaSchedule.__post_init__",
      "range(2, MAX_BLOCKS + 1, 2)", "range(2, MAX_BLOCKS + 1)",
      "tests/inference/test_mega_launches.py::test_schedules_have_even_numbers"),
    M("zero-is-false", "False is a number of SMs", "inference.schedules:_is_integer",
      "isinstance(value, int) and not isinstance(value, bool)", "isinstance(value, int)",
      "tests/inference/test_mega_launches.py::test_schedules_have_even_numbers"),
)

CONSTANTS = "tests/tune/network/test_files.py::test_"

COMMANDS = (
    M("nodes-of-three", "a command takes nodes of which the ranks do not make a whole number",
      "cli.options:require_nodes", "ranks_per_node is not None and num_ranks % ranks_per_node", "False",
      "tests/cli/test_usage.py"),
    M("cases-that-there-are-not", "a command is asked for a case that there is not, and fails in the middle",
      "cli.options:require_known", "[name for name in given if name not in known]", "[]",
      "tests/cli/test_usage.py::test_as_a_process"),
    M("kernels-for-any-row", "kernels are compiled for rows that nobody can move", "cli.kernel_cache:variants",
      "not dtypes", "False", "tests/cli/test_cache.py::test_impossible_shapes_are_refused"),
    M("constants-of-another-format", "a file of constants of another format is read",
      "tune.network.constants:read_constants", "found['format'] != FORMAT", "False",
      f"{CONSTANTS}a_bad_file_of_constants_is_named"),
    M("unknown-constants", "a file of constants may hold what nobody reads", "tune.network.constants:_members",
      "sorted(set(content) - names)", "[]", f"{CONSTANTS}a_bad_file_of_constants_is_named"),
    M("routings-of-other-experts", "a routing may name experts that there are not",
      "tune.network.routing_file:read_routing", "(ids < -1) | (ids >= num_experts)", "ids < -1",
      f"{CONSTANTS}a_bad_routing_is_named"),
    M("more-routes-than-experts", "a token goes to more experts than there are",
      "tune.network.traffic:Cluster.__post_init__", "self.top_k > min(self.num_experts, MAX_TOP_K)", "False",
      "tests/tune/network/test_traffic.py::test_sizes_that_do_not_fit_are_named"),
    M("no-word-of-the-default", "who differs in a dtype is not told where it comes from",
      "errors:PlanMismatch.__init__",
      "field in ('wire_dtype', 'out_dtype')", "False", "tests/test_errors.py::test_ranks_that_differ"),
)

INTEGRATIONS = (
    M("pools-without-sizes", "a model's experts take room for rows without a number of tokens",
      "integrations.transformers.options:ExpertsOptions.__post_init__",
      "self.pool_rows is not None and self.max_tokens_per_rank is None", "False",
      "tests/integrations/transformers/test_faults.py::test_options", needs="transformers"),
)

MUTATIONS = CALLS + CLIENTS + LAYERS + SIZES + MEGA + COMMANDS + INTEGRATIONS
