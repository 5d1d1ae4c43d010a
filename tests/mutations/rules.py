"""The rules that tests/mutations.py breaks, one at a time, and the tests that must notice."""

from __future__ import annotations

from tests.mutations.layer_rules import COMPILED, LAYER, MEGA_MOE, ROUTED_EXPERTS, STRATEGIES, TUNE
from tests.mutations.mutation import Mutation

COLLECTIVE = "backends/collective.py"
EXCHANGE = "backends/handshake.py"

SUMS = (
    Mutation(
        "order-of-ranks",
        "the ranks' partial sums are added in descending order of rank",
        COLLECTIVE,
        "home_positions_per_rank(handle.send, handle.num_tokens, self.plan.num_ranks)",
        "home_positions_per_rank(handle.send, handle.num_tokens, self.plan.num_ranks).flip(1)",
        ("tests/comm/test_combine.py::test_sums_by_hand",),
        num_ranks=4,  # a sum of two does not tell its order
    ),
    Mutation(
        "order-of-k",
        "a partial sum adds its routes in descending k",
        COLLECTIVE,
        "routing.ordered_sum(rows, positions, weights, dtype=dtype)",
        "routing.ordered_sum(rows, positions.flip(1), None if weights is None else weights.flip(1), dtype=dtype)",
        ("tests/comm/test_combine.py::test_dtypes",),
    ),
    Mutation(
        "order-of-routes",
        "per_route adds the routes in descending k",
        COLLECTIVE,
        "home_positions_per_route(handle.send, handle.num_tokens, self.plan.top_k)",
        "home_positions_per_route(handle.send, handle.num_tokens, self.plan.top_k).flip(1)",
        ("tests/comm/test_combine.py::test_dtypes",),
    ),
    Mutation(
        "no-wire-rounding",
        "partial sums travel in float32, whatever the wire's dtype",
        COLLECTIVE,
        "routing.ordered_sum(rows, positions, weights, dtype=dtype).to(call.wire_dtype)",
        "routing.ordered_sum(rows, positions, weights, dtype=dtype)",
        ("tests/comm/test_combine.py::test_sums_by_hand",),
    ),
    Mutation(
        "no-wire-rounding-of-routes",
        "per_route sends weighted rows in float32, whatever the wire's dtype",
        COLLECTIVE,
        "            terms = terms.to(call.wire_dtype)\n",
        "",
        ("tests/comm/test_combine.py::test_dtypes",),
    ),
    Mutation(
        "rounding-to-y-dtype",
        "partial sums are rounded to y's dtype on the way to a wider wire",
        COLLECTIVE,
        "routing.ordered_sum(rows, positions, weights, dtype=dtype).to(call.wire_dtype)",
        "routing.ordered_sum(rows, positions, weights, dtype=dtype).to(rows.dtype).to(call.wire_dtype)",
        ("tests/comm/test_combine.py::test_sums_by_hand",),
    ),
    Mutation(
        "sum-from-zero",
        "sums start from +0 instead of their first term, which turns -0 into +0",
        "ops/routing.py",
        "out[out_rows] = term if i == 0 else out[out_rows] + term",
        "out[out_rows] = out[out_rows] + term",
        ("tests/ops/test_routing.py", "tests/comm/test_combine.py::test_sums_by_hand"),
    ),
    Mutation(
        "fused-multiply-add",
        "a product is not rounded before it is added",
        "ops/routing.py",
        """            term = term * weights[out_rows, columns].to(dtype)[:, None]
        out[out_rows] = term if i == 0 else out[out_rows] + term
""",
        """            term = term.double() * weights[out_rows, columns].double()[:, None]
        out[out_rows] = (term if i == 0 else out[out_rows] + term).to(dtype)
""",
        ("tests/ops/test_routing.py", "tests/comm/test_combine.py::test_sums_by_hand"),
    ),
    Mutation(
        "float64-sums",
        "sums of float32 and bfloat16 rows are kept in float64",
        COLLECTIVE,
        """        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        if call.mode""",
        """        dtype = torch.float64
        if call.mode""",
        ("tests/comm/test_combine.py::test_sums_by_hand",),
    ),
    Mutation(
        "float32-sums-of-float64",
        "float64 rows are summed in float32",
        COLLECTIVE,
        """        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        if call.mode""",
        """        dtype = torch.float32
        if call.mode""",
        ("tests/comm/test_combine.py::test_dtypes",),
    ),
)

ROUTES = (
    Mutation(
        "unused-is-expert-0",
        "an id of -1 is a route to expert 0",
        "ops/routing.py",
        "    ids = topk_ids.to(torch.int64)\n",
        "    ids = topk_ids.to(torch.int64).clamp_min(0)\n",
        ("tests/ops/test_routing.py",),
    ),
    Mutation(
        "order-within-expert",
        "rows of an expert lie in descending order of (source, token, k)",
        "ops/routing.py",
        "positions[routes[order]] = starts[experts] + index_in_group",
        "positions[routes[order]] = starts[experts] + counts[experts] - 1 - index_in_group",
        ("tests/comm/test_dispatch.py::test_example",),
    ),
    Mutation(
        "no-padding",
        "groups of layout expert are not padded to the alignment",
        "ops/routing.py",
        "offsets.append(offsets[-1] + align_up(count, alignment))",
        "offsets.append(offsets[-1] + count)",
        ("tests/comm/test_dispatch.py::test_example",),
    ),
    Mutation(
        "empty-expert-has-rows",
        "an expert without routes gets a group of padding",
        "ops/routing.py",
        "offsets.append(offsets[-1] + align_up(count, alignment))",
        "offsets.append(offsets[-1] + align_up(max(count, 1), alignment))",
        ("tests/ops/test_routing.py",),
    ),
    Mutation(
        "padding-is-not-zero",
        "padding rows hold ones",
        "ops/routing.py",
        "    out = rows.new_zeros((num_out, rows.shape[1]))\n",
        "    out = torch.ones(num_out, rows.shape[1], device=rows.device).to(rows.dtype)\n",
        ("tests/comm/test_dispatch.py::test_example",),
    ),
    Mutation(
        "places-of-layout-rank",
        "places of a source start at the most rows of this call, not at max_tokens_per_rank",
        "ops/routing.py",
        "+ source * places for source, count",
        "+ source * max(source_counts) for source, count",
        ("tests/ops/test_routing.py",),
    ),
    Mutation(
        "weights-of-unused",
        "weights of routes that are not the receiver's travel unmasked, NaN and all",
        COLLECTIVE,
        "torch.where(send.mask, tensors.topk_weights.detach()[send.tokens], 0)",
        "tensors.topk_weights.detach()[send.tokens]",
        ("tests/comm/test_dispatch.py::test_example",),
    ),
    Mutation(
        "global-ids",
        "receivers get the ids of the whole group, not their local experts",
        "ops/routing.py",
        "ids[tokens] - (ranks * plan.experts_per_rank)[:, None]",
        "ids[tokens] % plan.num_experts",
        ("tests/ops/test_routing.py",),
    ),
)

ERRORS = (
    Mutation(
        "lost-status-word",
        "the other ranks do not hear of a fault that one rank sees",
        EXCHANGE,
        "header = [_OK if fault is None else _FAULT]",
        "header = [_OK]",
        ("tests/training/test_layer.py::test_a_fault_on_one_rank_is_an_error_on_all_and_the_layer_works_on",),
    ),
    Mutation(
        "peer-error-names-another",
        "PeerError names the rank after the one that failed",
        EXCHANGE,
        "raise PeerError(rank, _decode_message(",
        "raise PeerError((rank + 1) % len(table), _decode_message(",
        ("tests/training/test_layer.py::test_a_fault_on_one_rank_is_an_error_on_all_and_the_layer_works_on",),
    ),
    Mutation(
        "no-agreement-when-made",
        "ranks that were made with different options are not told",
        "runtime/rendezvous.py",
        "            if values.get(name) != value:",
        "            if False:",
        ("tests/training/test_layer.py::test_ranks_that_disagree_are_told_who_and_what",),
    ),
    Mutation(
        "no-agreement-in-calls",
        "ranks that call with different options are not told",
        EXCHANGE,
        "        if len(different):",
        "        if False:",
        ("tests/comm/test_errors.py::test_disagreement",),
    ),
    Mutation(
        "negative-ids-pass",
        "ids below -1 are taken for -1",
        "comm/validation.py",
        "bad = (ids < -1) | (ids >= plan.num_experts)",
        "bad = ids >= plan.num_experts",
        ("tests/comm/test_errors.py::test_dispatch_fault",),
    ),
    Mutation(
        "fp8-gradients-vanish",
        "an FP8 payload that requires grad is dispatched without a word",
        "comm/validation.py",
        "if torch.is_grad_enabled() and (x.requires_grad or (scales is not None and scales.requires_grad)):",
        "if False:",
        ("tests/comm/test_errors.py::test_fp8_fault",),
    ),
    Mutation(
        "closed-is-open",
        "a communicator that was closed goes on working",
        "runtime/rank_group.py",
        "        if self._broken:\n",
        "        if False:\n",
        ("tests/comm/test_errors.py::test_closed",),
    ),
)

OVERFLOW_TEST = "tests/comm/test_dispatch.py::test_bounded_overflow"

CAPACITY = (
    Mutation(
        "no-capacity-check",
        "exact sizes ignore the capacity",
        COLLECTIVE,
        'if needed > call.capacity and call.sizes == "exact":',
        "if False:",
        ("tests/comm/test_dispatch.py::test_exact_overflow",),
    ),
    Mutation(
        "own-capacity-only",
        "a rank hears of its own overflow alone",
        COLLECTIVE,
        "int(groups.reshape(self.plan.num_ranks, -1).sum(1).max())",
        "int(groups.reshape(self.plan.num_ranks, -1).sum(1)[self.ranks.rank])",
        (OVERFLOW_TEST,),
    ),
    Mutation(
        "no-nan-for-dropped",
        "tokens that a bounded capacity dropped are summed without the missing rows",
        COLLECTIVE,
        "            if handle.placement.dropped is not None:",
        "            if False:",
        (OVERFLOW_TEST,),
    ),
    Mutation(
        "overflow-not-sticky",
        "an overflow is forgotten before anybody was told",
        COLLECTIVE,
        "overflow, self._overflow = self._overflow, None",
        "overflow, self._overflow = None, None",
        (OVERFLOW_TEST,),
    ),
    Mutation(
        "overflow-for-ever",
        "an overflow is raised again and again",
        COLLECTIVE,
        "overflow, self._overflow = self._overflow, None",
        "overflow = self._overflow",
        (OVERFLOW_TEST,),
    ),
    Mutation(
        "counts-beyond-capacity",
        "counts of experts are not cut to what the output holds",
        "ops/routing.py",
        "counts = [min(count, rows) for count, rows in zip(placement.expert_counts, room, strict=True)]",
        "counts = placement.expert_counts",
        ("tests/ops/test_routing.py",),
    ),
)

TIMEOUTS = (
    Mutation(
        "timeout-names-who-came",
        "PeerTimeout names the ranks that are there, not those that are missing",
        "runtime/rank_group.py",
        "                if signed:\n",
        "                if not signed:\n",
        ("tests/runtime/test_rank_group.py::test_late_rank",),
        num_ranks=4,
    ),
    Mutation(
        "alive-after-timeout",
        "a communicator goes on after a timeout, with whatever the late rank sends",
        "runtime/rank_group.py",
        'self._broken = f"an earlier call failed: {timeout}"',
        "self._broken = None",
        ("tests/runtime/test_rank_group.py::test_late_rank",),
        num_ranks=4,
    ),
)

FP8 = (
    Mutation(
        "reciprocal-of-the-scale",
        "values are multiplied by 1 / scale, which rounds twice",
        "ops/quant.py",
        "blocks * (limit / amax)",
        "blocks * (1 / scale)",
        ("tests/ops/test_quant.py",),
    ),
    Mutation(
        "division-by-the-scale",
        "values are divided by the scale, which only power-of-two scales are",
        "ops/quant.py",
        "blocks * (limit / amax)",
        "blocks / scale",
        ("tests/ops/test_quant.py",),
    ),
    Mutation(
        "scale-rounded-down",
        "power-of-two scales are rounded down, so that values overflow",
        "ops/quant.py",
        "((scale.view(torch.int32) + mantissa_mask) & exponent_mask)",
        "(scale.view(torch.int32) & exponent_mask)",
        ("tests/ops/test_quant.py",),
    ),
    Mutation(
        "no-floor-of-amax",
        "a block of zeros has a scale of zero",
        "ops/quant.py",
        ".amax(dims, keepdim=True).clamp_min(AMAX_FLOOR)",
        ".amax(dims, keepdim=True)",
        ("tests/ops/test_quant.py",),
    ),
    Mutation(
        "to-fp8-any-scale",
        "a dispatch that quantises ignores power_of_two_scales",
        COLLECTIVE,
        "power_of_two_scales=call.power_of_two_scales",
        "power_of_two_scales=False",
        ("tests/comm/test_dispatch.py::test_to_fp8",),
    ),
    Mutation(
        "to-fp8-rows-require-grad",
        "rows that were quantised on the way claim to have a gradient",
        "comm/autograd.py",
        "if rows.element_size() == 1:",
        "if x.element_size() == 1:",
        ("tests/comm/test_dispatch.py::test_to_fp8_and_gradients",),
    ),
)

GRADIENTS_TEST = "tests/training/test_layer.py::test_gradients_are_those_of_the_sum_of_all_losses"

GRADIENTS = (
    Mutation(
        "rows-hold-their-graph",
        "rows that a backend keeps point at the graph that holds the backend's handle",
        "comm/autograd.py",
        "rows = backend.dispatch(handle, x).detach()",
        "rows = backend.dispatch(handle, x)",
        ("tests/comm/test_dispatch.py::test_what_a_handle_keeps_has_no_graph",),
    ),
    Mutation(
        "no-gradient-of-weights",
        "combine gives no gradient to the weights",
        "comm/autograd.py",
        "            grad_weights = grad_weights.to(weights.dtype)",
        "            grad_weights = torch.zeros_like(weights)",
        ("tests/comm/test_row_weights.py::test_it_is_a_weighted_combine",),
    ),
    Mutation(
        "unweighted-backward",
        "combine's backward sends the gradient without the weights",
        "ops/routing.py",
        "            term = term * weights[row, column].to(compute)[:, None]\n        grad_rows",
        "            term = term * 1\n        grad_rows",
        ("tests/comm/test_row_weights.py::test_it_is_a_weighted_combine",),
    ),
    Mutation(
        "dots-with-weighted-gradient",
        "the weight's gradient is taken of the weighted gradient",
        "ops/routing.py",
        "dots[row, column] = (term * rows[place].to(compute)).sum(1)",
        "dots[row, column] = (term * rows[place].to(compute)).sum(1) * (\n"
        "                    1 if weights is None else weights[row, column].to(compute)\n                )",
        ("tests/comm/test_row_weights.py::test_it_is_a_weighted_combine",),
    ),
    Mutation(
        "weight-gradients-to-wrong-token",
        "gradients of weights come home in the order of arrival, not to their tokens",
        "ops/routing.py",
        "out[send.tokens[rows], ks] = home[rows, ks]",
        "out[send.tokens[rows].flip(0), ks] = home[rows, ks]",
        (GRADIENTS_TEST,),
    ),
    Mutation(
        "backward-in-y-dtype",
        "combine's backward multiplies in y's dtype instead of float32",
        "ops/routing.py",
        """    compute = torch.float64 if dtype == torch.float64 else torch.float32
    grad_rows""",
        """    compute = dtype
    grad_rows""",
        ("tests/comm/test_gradients.py::test_backward_is_the_other_operation",),
    ),
    Mutation(
        "router-grad-not-summed",
        "router_grad='sum' leaves the sum to the trainer",
        "training/layer.py",
        'if self.router_grad == "sum" else parameter',
        "if False else parameter",
        (
            f"{GRADIENTS_TEST}",
            "tests/training/test_layer.py::test_layers_that_share_a_communicator_train_as_one_rank_does",
        ),
    ),
    Mutation(
        "expert-grad-scale-ignored",
        "expert_grad_scale does nothing",
        "training/layer.py",
        "return grad * ctx.factor, None",
        "return grad, None",
        (GRADIENTS_TEST,),
    ),
    Mutation(
        "balance-loss-of-own-tokens",
        "the losses are those of this rank's tokens",
        "training/layer.py",
        "        sums = self._sum_over_ranks(sums)\n",
        "",
        ("tests/training/test_layer.py::test_many_ranks_equal_one",),
    ),
    Mutation(
        "loss-gradient-of-own-rank",
        "the losses' gradient leaves out what the other ranks' losses say of this rank's tokens",
        "training/layer.py",
        'return ctx.ranks.all_reduce_sum(grad.contiguous(), "router losses, gradient"), None',
        "return grad, None",
        (GRADIENTS_TEST,),
    ),
)

KERNELS = (
    Mutation(
        "two-ranks-on-one-gpu",
        "ranks that share a GPU get kernels, which wait for each other's SMs",
        "backends/registry.py",
        "if gpu and gpu in gpus[:rank]]",
        "if False]",
        ("tests/backends/test_registry.py",),
    ),
    Mutation(
        "fields-by-age",
        "the number of the dispatch stands behind the other fields, under another one's name",
        EXCHANGE,
        "(codes[0], _encode(number), *codes[1:])",
        "(*codes, _encode(number))",
        ("tests/backends/test_registry.py",),
    ),
    Mutation(
        "too-few-flags-of-chunks",
        "few rows, which are chunks by themselves, have no more flags than many",
        "kernels/combine/launch.py",
        "max(min(plan.max_tokens_per_rank, 128), -(-plan.max_tokens_per_rank >> MOST_CHUNK_SHIFT))",
        "-(-plan.max_tokens_per_rank >> MOST_CHUNK_SHIFT)",
        ("tests/kernels/test_kernels.py::test_every_chunk_has_a_flag",),
    ),
)

MUTATIONS = (
    ROUTED_EXPERTS
    + TUNE
    + STRATEGIES
    + MEGA_MOE
    + SUMS
    + ROUTES
    + ERRORS
    + CAPACITY
    + TIMEOUTS
    + FP8
    + GRADIENTS
    + LAYER
    + COMPILED
    + KERNELS
)
