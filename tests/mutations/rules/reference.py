"""Rules of reference.py, which everything else is compared with: a common mistake must show there."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TEST = "tests/test_reference.py::test_"
ALIKE = (f"{TEST}dispatch_equals_brute_force",)
SUMS = (f"{TEST}combine_equals_brute_force",)
KEYS, PLACES, FILL = (f"reference:{name}" for name in ("_keys_in_order", "_places", "_fill"))
COMBINE, QUANTIZE, NEAREST = (f"reference:{name}" for name in ("combine", "quantize_fp8", "_nearest_e4m3"))

LAYOUTS = (
    M("tokens-before-sources", "rows of layout token lie in the order of tokens, whatever rank they come from", KEYS,
      "sorted({(source, token) for _, source, token, _ in routes})",
      "sorted({(source, token) for _, source, token, _ in routes}, key=lambda key: key[::-1])", *ALIKE),
    M("a-row-for-each-route", "a token with two experts on a rank has two rows in layout token", KEYS,
      "sorted({(source, token) for _, source, token, _ in routes})",
      "sorted((source, token) for _, source, token, _ in routes)", f"{TEST}example_layout_token"),
    M("tokens-before-sources-of-an-expert", "routes of an expert lie in the order of tokens", KEYS, "sorted(routes)",
      "sorted(routes, key=lambda route: (route[0], route[2]))", *ALIKE),
    M("places-by-token", "a row of layout rank lies where its token did at home", PLACES,
      "key[0] * plan.max_tokens_per_rank + seen[key[0]]", "key[0] * plan.max_tokens_per_rank + key[1]", *ALIKE),
    M("groups-end-at-their-rows", "groups of layout expert are not padded", PLACES,
      "align_up(len(group), alignment)", "len(group)", f"{TEST}example_layout_expert[4]"),
    M("slots-of-the-next-expert", "a route that finds no slot takes one of the next expert", PLACES, "i < slots",
      "i < 2 * slots", f"{TEST}example_slots_that_do_not_do"),
    M("ids-of-other-ranks", "a received row has the ids of other ranks' experts too", FILL, "expert in local",
      "expert >= 0", f"{TEST}example_layout_token"),
    M("offsets-beyond-the-output", "offsets of groups go on behind the rows that there are",
      "reference:_expert_counts", "min(start, num_places)", "start", f"{TEST}example_capacity"),
    M("ranges-of-dropped-routes", "ranges of sources count routes that found no slot", "reference:_slot_ranges",
      "sources[:slots]", "sources", f"{TEST}example_slots_that_do_not_do"),
    M("scales-by-column-are-rows", "scales by column lie by row", "reference:_laid_out",
      "(slots * blocks, 1, slots)", "(slots * blocks, blocks, 1)", f"{TEST}layouts_of_scales"),
    M("first-exponent-on-top", "the first of four packed exponents lies in the highest byte", "reference:_laid_out",
      "8 * (block % 4)", "24 - 8 * (block % 4)", f"{TEST}layouts_of_scales"),
    M("exact-sizes-of-any-size", "exact sizes ignore the capacity", "reference:dispatch", "needed > capacity",
      "False", f"{TEST}example_capacity"),
)

ORDER = (
    M("last-rank-first", "sums at home add the ranks in descending order", COMBINE,
      "sorted(terms, key=lambda item: item[0])", "sorted(terms, key=lambda item: -item[0])", *SUMS, num_ranks=4),
    M("wires-of-any-width", "partial sums are not rounded on the wire", COMBINE, "term.to(wire_dtype).to(compute)",
      "term", *SUMS),
    M("nodes-of-any-width", "sums of a node are not rounded between nodes", COMBINE,
      "total.to(wire_dtype).to(compute)", "total", *SUMS, num_ranks=4),
    M("sums-in-the-dtype-of-y", "rows are added in their own dtype", COMBINE,
      "torch.float64 if y_dtype == torch.float64 else torch.float32", "y_dtype", *SUMS),
    M("positive-zero-first", "a sum starts from +0, which hides -0", "reference:_sum_in_order",
      "total = terms[0]\nfor term in terms[1:]:\n    total = total + term",
      "total = torch.zeros_like(terms[0])\nfor term in terms:\n    total = total + term",
      f"{TEST}sum_by_hand"),
    M("dropped-routes-are-zeros", "a route that was dropped adds nothing to its token, and says nothing", COMBINE,
      "torch.nan", "0.0", f"{TEST}example_capacity"),
    M("rounded-before-the-bias", "a bias is added to the rounded result", COMBINE,
      "total + bias[token].to(compute)", "total.to(out_dtype).to(compute) + bias[token].to(compute)",
      "tests/comm/test_beside.py::test_bias"),
    M("weights-of-the-last-rank", "weights that come home are those of the last rank that has the token",
      "reference:combine_weights", "_sum_in_order(terms)", "terms[-1]",
      "tests/comm/test_beside.py::test_combine_weights"),
)

QUANT_TESTS = ("tests/ops/test_quant.py",)

SCALES = (
    M("reference-divides-by-the-scale", "values are divided by the scale, which only power-of-two scales are",
      QUANTIZE, "block * (limit / amax)", "block / scale", f"{QUANT_TESTS[0]}::test_multiplier_is_rounded_once"),
    M("powers-of-two-are-doubled", "a scale that is a power of two already is doubled", QUANTIZE,
      "2.0 ** exponent < scale.item()", "2.0 ** exponent <= scale.item()", *QUANT_TESTS),
    M("reference-without-a-floor", "a block of zeros has a scale of zero", QUANTIZE,
      "torch.maximum(block.abs().max(), floor)", "block.abs().max()", *QUANT_TESTS),
    M("reference-rows-of-blocks", "by recipe row a block of 128 values has a scale", QUANTIZE,
      'width if recipe == "row" else FP8_BLOCK', "FP8_BLOCK", *QUANT_TESTS),
    M("ties-to-odd", "a value between two codes gets the odd one", NEAREST, "above % 2 == 0", "above % 2 == 1",
      *QUANT_TESTS),
    M("zeros-have-no-sign", "-0 becomes +0 in FP8", NEAREST, "torch.signbit(values)", "(values < 0)", *QUANT_TESTS),
)

HAND = f"{TEST}other_experts_by_hand"
FUSED, FUSED_BY_HAND = "reference:fused_layer", f"{TEST}fused_layer_by_hand"
NARROW = f"{TEST}a_narrow_fused_layer_is_a_wide_one_with_zeros"

LAYERS = (
    M("ups-first", "the first half of w1's rows are taken for ups", "reference:_activated", "(i, width + i)",
      "(width + i, i)", f"{TEST}moe_equals_dense"),
    M("gates-and-ups-in-halves", "gates and ups in turns are taken for halves", "reference:_activated",
      "(2 * i, 2 * i + 1) if interleaved else (i, width + i)", "(i, width + i)", HAND),
    M("gates-clamped-below", "gates are limited below as well", "reference:_activated",
      "torch.clamp(gate, max=activation.limit)", "torch.clamp(gate, min=-activation.limit, max=activation.limit)",
      HAND),
    M("alpha-outside", "alpha is a factor of silu, not within its sigmoid", "reference:_function_of",
      "x * torch.sigmoid(x * activation.alpha)", "activation.alpha * x * torch.sigmoid(x)", HAND),
    M("reference-relu2-is-relu", "the square of relu is left out", "reference:_function_of", "x * x", "x", HAND),
    M("bias-of-w2-is-left-out", "experts leave the bias of w2 out", "reference:moe",
      "y if w2_bias is None else y + w2_bias[e]", "y", HAND),
    M("reference-without-a-shared-gate", "the gate of the shared expert does nothing", "reference:moe",
      "torch.sigmoid(x @ shared_gate_weight.T) * y", "y", HAND),
    M("routes-without-weights", "a layer sums its routes without their weights", "reference:moe",
      "combine(plan, ys, routed, topk_ids, topk_weights)", "combine(plan, ys, routed, topk_ids, None)",
      f"{TEST}moe_equals_dense"),
    M("experts-of-the-first-rank", "every rank computes with the experts of the first", "reference:moe",
      "range(rank * plan.experts_per_rank, (rank + 1) * plan.experts_per_rank)", "range(plan.experts_per_rank)",
      f"{TEST}moe_equals_dense"),
    M("activations-without-weights", "routes have no weights", FUSED,
      "_activated(hidden, activation, False) * factors", "_activated(hidden, activation, False)", FUSED_BY_HAND,
      "tests/inference/test_mega_moe.py::test_composed[cpu2-plain]"),
    M("bias-without-weight", "the bias of w2 is added as it is, whatever the route's weight", FUSED,
      "factors * w2_bias[e].cpu()", "w2_bias[e].cpu()", FUSED_BY_HAND,
      "tests/inference/test_mega_moe.py::test_composed[cpu2-biases]"),
    M("scales-of-gates-for-ups", "the first ups share a scale with the last gates", "reference:_of_channels",
      "scales.unflatten(0, (parts, -1)).repeat_interleave(FP8_BLOCK, 1)",
      "scales.repeat_interleave(FP8_BLOCK, 0)[:channels].unflatten(0, (parts, -1))", NARROW),
    M("one-shared-expert", "of several shared experts the first serves for all", FUSED,
      "[[*experts, *shared] for experts in topk_ids.tolist()]",
      "[[*experts, *shared[:1] * len(shared)] for experts in topk_ids.tolist()]",
      "tests/inference/test_mega_moe.py::test_composed[cpu2-two shared experts]"),
)

MUTATIONS = LAYOUTS + ORDER + SCALES + LAYERS
