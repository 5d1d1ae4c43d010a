"""Rules of ops/: row maps, sums in a fixed order, FP8, routers, activations."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ROUTING_TESTS = ("tests/ops/test_routing.py",)
QUANT_TESTS = ("tests/ops/test_quant.py",)
ROUTER_TESTS = ("tests/ops/test_router.py",)
EXAMPLE_TESTS = ("tests/comm/test_dispatch.py::test_example",)
SUM_TESTS = ("tests/ops/test_routing.py", "tests/comm/test_combine.py::test_sums_by_hand")
WEIGHTED_TESTS = ("tests/comm/test_row_weights.py::test_it_is_a_weighted_combine",)

SUMS = (
    Mutation(
        name="sum-from-zero",
        rule="sums start from +0 instead of their first term, which turns -0 into +0",
        target="tokenloom.ops.routing:ordered_sum",
        old="term if i == 0 else out[out_rows] + term",
        new="out[out_rows] + term",
        tests=SUM_TESTS,
    ),
    Mutation(
        name="fused-multiply-add",
        rule="a product is not rounded before it is added",
        target="tokenloom.ops.routing:ordered_sum",
        old="""
            if weights is not None:
                term = term * weights[out_rows, columns].to(dtype)[:, None]
            out[out_rows] = term if i == 0 else out[out_rows] + term
        """,
        new="""
            if weights is not None:
                term = term.double() * weights[out_rows, columns].double()[:, None]
            out[out_rows] = (term if i == 0 else out[out_rows] + term).to(dtype)
        """,
        tests=SUM_TESTS,
    ),
)

ROUTES = (
    Mutation(
        name="unused-is-expert-0",
        rule="an id of -1 is a route to expert 0",
        target="tokenloom.ops.routing:send_map",
        old="topk_ids.to(torch.int64)",
        new="topk_ids.to(torch.int64).clamp_min(0)",
        tests=ROUTING_TESTS,
    ),
    Mutation(
        name="global-ids",
        rule="receivers get the ids of the whole group, not their local experts",
        target="tokenloom.ops.routing:send_map",
        old="ids[tokens] - (ranks * plan.experts_per_rank)[:, None]",
        new="ids[tokens] % plan.num_experts",
        tests=ROUTING_TESTS,
    ),
    Mutation(
        name="order-within-expert",
        rule="rows of an expert lie in descending order of (source, token, k)",
        target="tokenloom.ops.routing:place_by_expert",
        old="starts[experts] + index_in_group",
        new="starts[experts] + counts[experts] - 1 - index_in_group",
        tests=EXAMPLE_TESTS,
    ),
    Mutation(
        name="no-padding",
        rule="groups of layout expert are not padded to the alignment",
        target="tokenloom.ops.routing:place_by_expert",
        old="align_up(count, alignment)",
        new="count",
        tests=EXAMPLE_TESTS,
    ),
    Mutation(
        name="empty-expert-has-rows",
        rule="an expert without routes gets a group of padding",
        target="tokenloom.ops.routing:place_by_expert",
        old="align_up(count, alignment)",
        new="align_up(max(count, 1), alignment)",
        tests=ROUTING_TESTS,
    ),
    Mutation(
        name="padding-is-not-zero",
        rule="padding rows hold ones",
        target="tokenloom.ops.routing:scatter_rows",
        old="rows.new_zeros((num_out, rows.shape[1]))",
        new="torch.ones(num_out, rows.shape[1], device=rows.device).to(rows.dtype)",
        tests=EXAMPLE_TESTS,
    ),
    Mutation(
        name="places-of-layout-rank",
        rule="places of a source start at the most rows of this call, not at max_tokens_per_rank",
        target="tokenloom.ops.routing:place_by_rank",
        old="source * places",
        new="source * max(source_counts)",
        tests=ROUTING_TESTS,
    ),
    Mutation(
        name="counts-beyond-capacity",
        rule="counts of experts are not cut to what the output holds",
        target="tokenloom.ops.routing:fit_capacity",
        old="counts = [min(count, rows) for count, rows in zip(placement.expert_counts, room, strict=True)]",
        new="counts = placement.expert_counts",
        tests=ROUTING_TESTS,
    ),
    Mutation(
        name="weights-of-absent-rows",
        rule="a row's weight goes to the row before it",
        target="tokenloom.ops.routing:row_values",
        old="torch.where(inside, positions, num_places)",
        new="torch.where(inside, positions - 1, num_places)",
        tests=("tests/comm/test_row_weights.py",),
    ),
)

GRADIENTS = (
    Mutation(
        name="unweighted-backward",
        rule="combine's backward sends the gradient without the weights",
        target="tokenloom.ops.routing:spread_gradient",
        old="term = term * weights[row, column].to(compute)[:, None]",
        new="pass",
        tests=WEIGHTED_TESTS,
    ),
    Mutation(
        name="dots-with-weighted-gradient",
        rule="the weight's gradient is taken of the weighted gradient",
        target="tokenloom.ops.routing:spread_gradient",
        old="(term * rows[place].to(compute)).sum(1)",
        new="(term * rows[place].to(compute)).sum(1) * (1 if weights is None else weights[row, column].to(compute))",
        tests=WEIGHTED_TESTS,
    ),
    Mutation(
        name="weight-gradients-to-wrong-token",
        rule="gradients of weights come home in the order of arrival, not to their tokens",
        target="tokenloom.ops.routing:weights_at_home",
        old="send.tokens[rows]",
        new="send.tokens[rows].flip(0)",
        tests=("tests/training/test_layer.py::test_gradients_are_those_of_the_sum_of_all_losses",),
    ),
    Mutation(
        name="backward-in-y-dtype",
        rule="combine's backward multiplies in y's dtype instead of float32",
        target="tokenloom.ops.routing:spread_gradient",
        old="torch.float64 if dtype == torch.float64 else torch.float32",
        new="dtype",
        tests=("tests/comm/test_gradients.py::test_backward_is_the_other_operation",),
    ),
)

FP8 = (
    Mutation(
        name="reciprocal-of-the-scale",
        rule="values are multiplied by 1 / scale, which rounds twice",
        target="tokenloom.ops.quant.fp8:_quantize",
        old="limit / amax",
        new="1 / scale",
        tests=QUANT_TESTS,
    ),
    Mutation(
        name="division-by-the-scale",
        rule="values are divided by the scale, which only power-of-two scales are",
        target="tokenloom.ops.quant.fp8:_quantize",
        old="blocks * (limit / amax)",
        new="blocks / scale",
        tests=QUANT_TESTS,
    ),
    Mutation(
        name="scale-rounded-down",
        rule="power-of-two scales are rounded down, so that values overflow",
        target="tokenloom.ops.quant.fp8:_power_of_two_above",
        old="scale.view(torch.int32) + mantissa_mask",
        new="scale.view(torch.int32)",
        tests=QUANT_TESTS,
    ),
    Mutation(
        name="no-floor-of-amax",
        rule="a block of zeros has a scale of zero",
        target="tokenloom.ops.quant.fp8:_quantize",
        old="AMAX_FLOOR",
        new="0",
        tests=QUANT_TESTS,
    ),
)

ROUTERS = (
    Mutation(
        name="bias-in-the-weights",
        rule="the correction bias does not only choose, it weighs as well",
        target="tokenloom.ops.router:Router.route",
        old="scores.gather(-1, ids)",
        new="(choice + scores - scores.detach()).gather(-1, ids)",
        tests=ROUTER_TESTS,
    ),
    Mutation(
        name="no-group-limit",
        rule="experts outside the best groups can be chosen",
        target="tokenloom.ops.router:Router._limit_groups",
        old="self.top_groups == self.num_groups",
        new="True",
        tests=ROUTER_TESTS,
    ),
    Mutation(
        name="value-of-a-group",
        rule="a group's value is its best score for sigmoid routers too",
        target="tokenloom.ops.router:Router._limit_groups",
        old='2 if self.score == "sigmoid" else 1',
        new="1",
        tests=ROUTER_TESTS,
    ),
    Mutation(
        name="gate-and-up-swapped",
        rule="silu is applied to the second half of w1's rows",
        target="tokenloom.ops.activation:_gate_and_up",
        old="gate, up = hidden.chunk(2, -1)",
        new="up, gate = hidden.chunk(2, -1)",
        tests=("tests/ops/test_experts.py",),
    ),
)

IN_SLOTS = "tokenloom.ops.routing:place_in_slots"
SLOT_TESTS = ("tests/ops/test_routing.py::test_place_in_slots",)
SCALE_TESTS = ("tests/comm/test_dispatch.py::test_to_fp8",)

SLOTS = (
    Mutation(
        name="slots-overlap",
        rule="the places of an expert begin in those of the one before",
        target=IN_SLOTS,
        old="experts * slots + index_in_group",
        new="experts * (slots - 1) + index_in_group",
        tests=SLOT_TESTS,
    ),
    Mutation(
        name="slots-overrun",
        rule="routes beyond the places of an expert fill those of the next",
        target=IN_SLOTS,
        old="index_in_group < slots",
        new="index_in_group < slots * len(expert_counts)",
        tests=SLOT_TESTS,
    ),
    Mutation(
        name="ranges-beyond-the-slots",
        rule="ranges of sources count routes that were dropped",
        target=IN_SLOTS,
        old="min(end, slots)",
        new="end",
        tests=SLOT_TESTS,
    ),
    Mutation(
        name="lost-routes-are-no-nan",
        rule="a token whose route found no place comes home without it",
        target=IN_SLOTS,
        old="((local_ids >= 0) & (positions < 0)).any(1)",
        new="None",
        tests=("tests/comm/test_dispatch.py::test_bounded_overflow",),
    ),
    Mutation(
        name="columns-by-row",
        rule="scales by column lie by row",
        target="tokenloom.ops.quant.scale_layouts:empty_scales",
        old="torch.empty(experts, width, slots, dtype=dtype, device=device).transpose(1, 2)",
        new="torch.empty(experts, slots, width, dtype=dtype, device=device)",
        tests=SCALE_TESTS,
    ),
    Mutation(
        name="bytes-in-the-other-order",
        rule="the first of four packed exponents lies in the highest byte",
        target="tokenloom.ops.quant.scale_layouts:lay_out_scales",
        old="exponents << shifts",
        new="exponents << shifts.flip(0)",
        tests=SCALE_TESTS,
    ),
)

MUTATIONS = SUMS + ROUTES + GRADIENTS + FP8 + ROUTERS + SLOTS
