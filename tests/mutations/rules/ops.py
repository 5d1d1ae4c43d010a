"""Rules of ops/: row maps, sums in a fixed order, FP8, routers, activations."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
ROUTING_TESTS = ("tests/ops/test_routing.py",)
QUANT_TESTS = ("tests/ops/test_quant.py",)
WEIGHTS_TESTS = ("tests/ops/quant/test_weights.py",)
ROUTER_TESTS = ("tests/ops/test_router.py",)
EXAMPLE_TESTS = ("tests/comm/test_dispatch.py::test_example",)
SUM_TESTS = ("tests/ops/test_routing.py", "tests/comm/test_combine.py::test_sums_by_hand")
WEIGHTED_TESTS = ("tests/comm/test_row_weights.py::test_it_is_a_weighted_combine",)

SUMS = (
    M("sum-from-zero", "sums start from +0 instead of their first term, which turns -0 into +0",
      "ops.routing:ordered_sum", "term if i == 0 else out[out_rows] + term", "out[out_rows] + term", *SUM_TESTS),
    M("fused-multiply-add", "a product is not rounded before it is added", "ops.routing:ordered_sum",
      """
            if weights is not None:
                term = term * weights[out_rows, columns].to(dtype)[:, None]
            out[out_rows] = term if i == 0 else out[out_rows] + term
      """,
      """
            if weights is not None:
                term = term.double() * weights[out_rows, columns].double()[:, None]
            out[out_rows] = (term if i == 0 else out[out_rows] + term).to(dtype)
      """,
      *SUM_TESTS),
)

ROUTES = (
    M("unused-is-expert-0", "an id of -1 is a route to expert 0", "ops.routing:send_map", "topk_ids.to(torch.int64)",
      "topk_ids.to(torch.int64).clamp_min(0)", *ROUTING_TESTS),
    M("global-ids", "receivers get the ids of the whole group, not their local experts", "ops.routing:send_map",
      "ids[tokens] - (ranks * plan.experts_per_rank)[:, None]", "ids[tokens] % plan.num_experts", *ROUTING_TESTS),
    M("order-within-expert", "rows of an expert lie in descending order of (source, token, k)",
      "ops.routing:place_by_expert", "starts[experts] + index_in_group",
      "starts[experts] + counts[experts] - 1 - index_in_group", *EXAMPLE_TESTS),
    M("no-padding", "groups of layout expert are not padded to the alignment", "ops.routing:place_by_expert",
      "align_up(count, alignment)", "count", *EXAMPLE_TESTS),
    M("empty-expert-has-rows", "an expert without routes gets a group of padding", "ops.routing:place_by_expert",
      "align_up(count, alignment)", "align_up(max(count, 1), alignment)", *ROUTING_TESTS),
    M("padding-is-not-zero", "padding rows hold ones", "ops.routing:scatter_rows",
      "rows.new_zeros((num_out, rows.shape[1]))",
      "torch.ones(num_out, rows.shape[1], device=rows.device).to(rows.dtype)", *EXAMPLE_TESTS),
    M("places-of-layout-rank", "places of a source start at the most rows of this call, not at max_tokens_per_rank",
      "ops.routing:place_by_rank", "source * places", "source * max(source_counts)", *ROUTING_TESTS),
    M("counts-beyond-capacity", "counts of experts are not cut to what the output holds", "ops.routing:fit_capacity",
      "counts = [min(count, rows) for count, rows in zip(placement.expert_counts, room, strict=True)]",
      "counts = placement.expert_counts", *ROUTING_TESTS),
    M("weights-of-absent-rows", "a row's weight goes to the row before it", "ops.routing:row_values",
      "torch.where(inside, positions, num_places)", "torch.where(inside, positions - 1, num_places)",
      "tests/comm/test_row_weights.py"),
)

GRADIENTS = (
    M("unweighted-backward", "combine's backward sends the gradient without the weights",
      "ops.routing:spread_gradient", "term = term * weights[row, column].to(compute)[:, None]", "pass",
      *WEIGHTED_TESTS),
    M("dots-with-weighted-gradient", "the weight's gradient is taken of the weighted gradient",
      "ops.routing:spread_gradient", "(term * rows[place].to(compute)).sum(1)",
      "(term * rows[place].to(compute)).sum(1) * (1 if weights is None else weights[row, column].to(compute))",
      *WEIGHTED_TESTS),
    M("weight-gradients-to-wrong-token", "gradients of weights come home in the order of arrival, not to their tokens",
      "ops.routing:weights_at_home", "send.tokens[rows]", "send.tokens[rows].flip(0)",
      "tests/training/test_layer.py::test_gradients_are_those_of_the_sum_of_all_losses"),
    M("backward-in-y-dtype", "combine's backward multiplies in y's dtype instead of float32",
      "ops.routing:spread_gradient", "torch.float64 if dtype == torch.float64 else torch.float32", "dtype",
      "tests/comm/test_gradients.py::test_backward_is_the_other_operation"),
)

FP8 = (
    M("rows-of-blocks", "recipe 'row' is recipe 'block'", "ops.quant.fp8:quantize_fp8",
      'recipe == "row"', "False", "tests/ops/test_quant.py::test_rows_have_one_scale"),
    M("scales-of-any-recipe", "scales of the other recipe are refused as if they were of a wrong size",
      "ops.gemm:_check", '_check_granularity("a_scales", a_scales, rows, k // BLOCK, "row", recipe)', "pass",
      "tests/ops/test_gemm.py::test_scales_of_the_other_recipe_are_named"),
    M("reciprocal-of-the-scale", "values are multiplied by 1 / scale, which rounds twice", "ops.quant.fp8:_quantize",
      "limit / amax", "1 / scale", *QUANT_TESTS),
    M("division-by-the-scale", "values are divided by the scale, which only power-of-two scales are",
      "ops.quant.fp8:_quantize", "blocks * (limit / amax)", "blocks / scale", *QUANT_TESTS),
    M("scale-rounded-down", "power-of-two scales are rounded down, so that values overflow",
      "ops.quant.fp8:_power_of_two_above", "scale.view(torch.int32) + mantissa_mask", "scale.view(torch.int32)",
      *QUANT_TESTS),
    M("no-floor-of-amax", "a block of zeros has a scale of zero", "ops.quant.fp8:_quantize", "AMAX_FLOOR", "0",
      *QUANT_TESTS),
)

ROUTERS = (
    M("bias-in-the-weights", "the correction bias does not only choose, it weighs as well", "ops.router:Router.route",
      "scores.gather(-1, ids)", "(choice + scores - scores.detach()).gather(-1, ids)", *ROUTER_TESTS),
    M("no-group-limit", "experts outside the best groups can be chosen", "ops.router:Router._limit_groups",
      "self.top_groups == self.num_groups", "True", *ROUTER_TESTS),
    M("value-of-a-group", "a group's value is its best score for sigmoid routers too",
      "ops.router:Router._limit_groups", '2 if self.score == "sigmoid" else 1', "1", *ROUTER_TESTS),
    M("gate-and-up-swapped", "silu is applied to the second half of w1's rows", "ops.activation:_gate_and_up",
      "gate, up = hidden.chunk(2, -1)", "up, gate = hidden.chunk(2, -1)", "tests/ops/test_experts.py"),
)

IN_SLOTS = "ops.routing:place_in_slots"
SLOT_TESTS = ("tests/ops/test_routing.py::test_place_in_slots",)
SCALE_TESTS = ("tests/comm/test_dispatch.py::test_to_fp8",)

SLOTS = (
    M("slots-overlap", "the places of an expert begin in those of the one before", IN_SLOTS,
      "experts * slots + index_in_group", "experts * (slots - 1) + index_in_group", *SLOT_TESTS),
    M("slots-overrun", "routes beyond the places of an expert fill those of the next", IN_SLOTS,
      "index_in_group < slots", "index_in_group < slots * len(expert_counts)", *SLOT_TESTS),
    M("ranges-beyond-the-slots", "ranges of sources count routes that were dropped", IN_SLOTS, "min(end, slots)",
      "end", *SLOT_TESTS),
    M("lost-routes-are-no-nan", "a token whose route found no place comes home without it", IN_SLOTS,
      "((local_ids >= 0) & (positions < 0)).any(1)", "None", "tests/comm/test_dispatch.py::test_bounded_overflow"),
    M("columns-by-row", "scales by column lie by row", "ops.quant.scale_layouts:empty_scales",
      "torch.empty(experts, width, slots, dtype=dtype, device=device).transpose(1, 2)",
      "torch.empty(experts, slots, width, dtype=dtype, device=device)", *SCALE_TESTS),
    M("bytes-in-the-other-order", "the first of four packed exponents lies in the highest byte",
      "ops.quant.scale_layouts:lay_out_scales", "exponents << shifts", "exponents << shifts.flip(0)", *SCALE_TESTS),
)

CONVERT, PADDED = "ops.quant.weights:_convert", "ops.quant.weights:padded_weights_for"
PADDED_TESTS = ("tests/ops/quant/test_padded_weights.py",)

WEIGHTS = (
    M("smallest-scale", "converted weights take the smallest scale, so that codes overflow", CONVERT,
      "scales.amax((2, 3), keepdim=True)", "scales.amin((2, 3), keepdim=True)", *WEIGHTS_TESTS),
    M("rebased-by-any-ratio", "codes are multiplied by ratios that are no powers of two", CONVERT,
      "(by_powers | (scales == 0)).flatten(2).all(2)", "(scales >= 0).flatten(2).all(2)", *WEIGHTS_TESTS),
    M("one-power-is-enough", "channels are rebased if one of their scales is a power of two away", CONVERT,
      "(by_powers | (scales == 0)).flatten(2).all(2)", "by_powers.flatten(2).any(2)", *WEIGHTS_TESTS),
    M("zero-scales-are-no-powers", "scales of 0 let the other values be rounded again", CONVERT,
      "by_powers | (scales == 0)", "by_powers", *WEIGHTS_TESTS),
    M("lost-below-float32", "codes that vanish in float32 count as kept", CONVERT,
      "(scales / largest).clamp_min(SMALLEST_RATIO)", "scales / largest", *WEIGHTS_TESTS),
    M("nan-is-rounded", "values that are NaN count as rounded", CONVERT, "(after != values) & ~values.isnan()",
      "after != values", *WEIGHTS_TESTS),
    M("rounded-values-of-a-channel", "channels count for each of their rounded values", CONVERT,
      "rounded.count_nonzero()", "rounded.sum()", *WEIGHTS_TESTS),
    M("rounded-again-unasked", "weights are rounded a second time without leave", PADDED,
      "values and not round_again", "False", *WEIGHTS_TESTS),
    M("scales-of-nan-convert", "scales that are not finite are converted", PADDED,
      "not (scales.isfinite() & (scales >= 0)).all()", "(scales < 0).any()", *WEIGHTS_TESTS),
    M("nibbles-the-other-way", "the high half of a byte comes first where the low one should",
      "ops.quant.four_bits:unpack_four_bits", 'four_bits.nibbles == "low_first"', 'four_bits.nibbles != "low_first"',
      "tests/ops/quant/test_four_bits.py"),
    M("largest-scale-of-half-a-block", "a block of four-bit weights has the largest scale of its first group",
      "ops.quant.four_bits:_by_powers_of_two", "scales.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, groups))",
      "scales.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, groups))[..., :1, :]",
      "tests/ops/quant/test_four_bits.py"),
    M("four-bits-rounded-unasked", "four-bit weights are rounded without leave", "ops.quant.weights:_of_four_bits",
      "values and not round_again", "False", "tests/ops/quant/test_four_bits.py"),
    M("scales-that-vanish", "four-bit values whose scale is far below the largest are 0, and count as exact",
      "ops.quant.four_bits:_by_powers_of_two", "scales.double() / largest[..., None].double()",
      "scales / largest[..., None]", "tests/ops/quant/test_four_bits.py::test_scales_that_lie_far_apart"),
    M("chunks-of-packed-weights", "all channels are packed to the place of the first",
      "ops.quant.packed_weights:pack_weights", "to.split(at_once)", "[to[:at_once]] * len(to.split(at_once))",
      "tests/ops/quant/test_packed_weights.py::test_checkpoints"),
    M("four-bits-that-do-not-fit", "weights that four bits would round are packed",
      "ops.quant.packed_weights:_pack_strips", "table[magnitudes] != codes", "table[magnitudes] < 0",
      "tests/ops/quant/test_packed_weights.py"),
    M("signs-of-packed-zeros", "packed weights lose the sign of zeros", "ops.quant.packed_weights:_pack_strips",
      "groups.signbit()", "(groups < 0)", "tests/ops/quant/test_packed_weights.py"),
    M("least-group-of-packed-weights", "groups below the least power of two wrap around",
      "ops.quant.packed_weights:_pack_strips", "(torch.frexp(largest).exponent - 3 + SHIFT).clamp(min=LEAST)",
      "torch.frexp(largest).exponent - 3 + SHIFT", "tests/ops/quant/test_packed_weights.py"),
    M("four-bits-by-block", "packed weights are taken for those of recipe block", "ops.gemm:check_weights",
      'recipe != "row"', "False", "tests/ops/test_gemm.py::test_packed_weights_are_of_recipe_row"),
    M("another-bias-of-e8m0", "the bias of E8M0 is 126", "ops.quant.scale_dtypes:widen_scales",
      "exponents << MANTISSA_BITS", "exponents + 1 << MANTISSA_BITS", *WEIGHTS_TESTS),
    M("byte-0-is-zero", "the least scale of E8M0 is 0", "ops.quant.scale_dtypes:widen_scales",
      "1 << MANTISSA_BITS - 1", "0", *WEIGHTS_TESTS),
    M("nan-of-e8m0", "NaN in E8M0 is infinity", "ops.quant.scale_dtypes:widen_scales", "(exponents == E8M0_NAN).any()",
      "False", *WEIGHTS_TESTS),
    M("nan-in-amax", "a NaN is the scale of the values beside it", "ops.quant.weights:_quantize_beside_nan",
      "values.masked_fill(missing, 0)", "values", *WEIGHTS_TESTS),
    M("float32-of-all-experts", "weights are widened for all experts together", "ops.quant.weights:_quantize_experts",
      "enumerate(w)", "enumerate(w.float())", *WEIGHTS_TESTS),
    M("channels-without-a-third-size", "scales [E, N, 1] are refused", "ops.quant.weights:_by_unit",
      "shape in ([experts, channels], [experts, channels, 1])", "shape == [experts, channels]", *WEIGHTS_TESTS),
    M("blocks-over-parts", "a block of weights reaches from gates to ups", "ops.quant.weights:_padded_shape",
      "parts * align_up(channels // parts, FP8_BLOCK)", "align_up(channels, FP8_BLOCK)", *PADDED_TESTS),
    M("padding-has-scales", "channels of zeros have a scale that counts beside others", "ops.quant.weights:_by_unit",
      "padded.reshape(experts, units, FP8_BLOCK, 1)",
      "torch.where(padded > 0, padded, 2.0).reshape(experts, units, FP8_BLOCK, 1)",
      *PADDED_TESTS),
    M("padding-has-four-bits", "groups that pad four-bit weights have values", "ops.quant.weights:_of_four_bits",
      'pad(widen_scales(f"{name}_scales", w_scales.detach()), [*padded, padded_depth // four_bits.group], parts)',
      'pad(widen_scales(f"{name}_scales", w_scales.detach()), [*padded, padded_depth // four_bits.group], parts)'
      ".clamp_min(2.0**-20)", *PADDED_TESTS),
    M("zeros-count-as-values", "a report on weights counts zeros that pad them", PADDED,
      "sizes = (w.shape[0] * w.shape[1], w.numel())\npadded = _padded_shape(w.shape, parts)",
      "padded = _padded_shape(w.shape, parts)\nsizes = (padded[0] * padded[1], padded[0] * padded[1] * padded[2])",
      *PADDED_TESTS),
    M("parts-of-groups", "a row of four-bit weights may end within a group", "ops.quant.four_bits:check_four_bits",
      "max(multiple, group)", "multiple", *PADDED_TESTS),
)

MUTATIONS = SUMS + ROUTES + GRADIENTS + FP8 + WEIGHTS + ROUTERS + SLOTS
