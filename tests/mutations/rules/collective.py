"""Rules of backends/collective.py: what travels, and how it is summed."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SEND_HOME = "tokenloom.backends.collective:CollectiveBackend._send_home"
SUM_DTYPE = "tokenloom.backends.collective:_sum_dtype"
HAND_TESTS = ("tests/comm/test_combine.py::test_sums_by_hand",)
DTYPE_TESTS = ("tests/comm/test_combine.py::test_dtypes",)
OVERFLOW_TESTS = ("tests/comm/test_dispatch.py::test_bounded_overflow",)

SUMS = (
    Mutation(
        name="order-of-ranks",
        rule="the ranks' partial sums are added in descending order of rank",
        target=SEND_HOME,
        old="routing.home_positions_per_rank(sizes.send, handle.num_tokens, self._plan.num_ranks)",
        new="routing.home_positions_per_rank(sizes.send, handle.num_tokens, self._plan.num_ranks).flip(1)",
        tests=HAND_TESTS,
        num_ranks=4,
    ),
    Mutation(
        name="order-of-k",
        rule="a partial sum adds its routes in descending k",
        target=SEND_HOME,
        old="routing.ordered_sum(rows, positions, weights, dtype=dtype)",
        new="routing.ordered_sum(rows, positions.flip(1), None if weights is None else weights.flip(1), dtype=dtype)",
        tests=DTYPE_TESTS,
    ),
    Mutation(
        name="order-of-routes",
        rule="per_route adds the routes in descending k",
        target=SEND_HOME,
        old="routing.home_positions_per_route(sizes.send, handle.num_tokens, self._plan.top_k)",
        new="routing.home_positions_per_route(sizes.send, handle.num_tokens, self._plan.top_k).flip(1)",
        tests=DTYPE_TESTS,
    ),
    Mutation(
        name="no-wire-rounding",
        rule="partial sums travel in float32, whatever the wire's dtype",
        target=SEND_HOME,
        old="routing.ordered_sum(rows, positions, weights, dtype=dtype).to(options.wire_dtype)",
        new="routing.ordered_sum(rows, positions, weights, dtype=dtype)",
        tests=HAND_TESTS,
    ),
    Mutation(
        name="no-wire-rounding-of-routes",
        rule="per_route sends weighted rows in float32, whatever the wire's dtype",
        target=SEND_HOME,
        old="terms.to(options.wire_dtype)",
        new="terms",
        tests=DTYPE_TESTS,
    ),
    Mutation(
        name="rounding-to-y-dtype",
        rule="partial sums are rounded to y's dtype on the way to a wider wire",
        target=SEND_HOME,
        old="routing.ordered_sum(rows, positions, weights, dtype=dtype)",
        new="routing.ordered_sum(rows, positions, weights, dtype=dtype).to(rows.dtype)",
        tests=HAND_TESTS,
    ),
    Mutation(
        name="float64-sums",
        rule="sums of float32 and bfloat16 rows are kept in float64",
        target=SUM_DTYPE,
        old="torch.float64 if rows.dtype == torch.float64 else torch.float32",
        new="torch.float64",
        tests=HAND_TESTS,
    ),
    Mutation(
        name="float32-sums-of-float64",
        rule="float64 rows are summed in float32",
        target=SUM_DTYPE,
        old="torch.float64 if rows.dtype == torch.float64 else torch.float32",
        new="torch.float32",
        tests=DTYPE_TESTS,
    ),
    Mutation(
        name="no-nan-for-dropped",
        rule="tokens that a bounded capacity dropped are summed without the missing rows",
        target=SEND_HOME,
        old="partial[handle.placement.dropped] = torch.nan",
        new="pass",
        tests=OVERFLOW_TESTS,
    ),
)

TRAVEL = (
    Mutation(
        name="weights-of-unused",
        rule="weights of routes that are not the receiver's are kept, NaN and all",
        target="tokenloom.backends.collective:CollectiveBackend._metadata",
        old="torch.where(here, rest.pop(0).view(topk_weights.dtype), 0)",
        new="rest.pop(0).view(topk_weights.dtype)",
        tests=("tests/comm/test_dispatch.py::test_example",),
    ),
    Mutation(
        name="to-fp8-any-scale",
        rule="a dispatch that quantises ignores power_of_two_scales",
        target="tokenloom.backends.collective:CollectiveBackend.send_dispatch",
        old="options.power_of_two_scales",
        new="False",
        tests=("tests/comm/test_dispatch.py::test_to_fp8",),
    ),
    Mutation(
        name="gathered-but-not-used",
        rule="strategy all_gather sends rows as dedup does",
        target="tokenloom.backends.collective:CollectiveBackend._send_rows",
        old='strategy == "all_gather"',
        new="False",
        tests=("tests/comm/test_strategies.py::test_what_travels",),
    ),
    Mutation(
        name="home-of-another-token",
        rule="dense partial sums are taken from the place of the first token",
        target="tokenloom.backends.collective:CollectiveBackend._send_dense",
        old="torch.arange(num_ranks, device=order.device) * room + tokens",
        new="torch.arange(num_ranks, device=order.device) * room + 0 * tokens",
        tests=("tests/comm/test_strategies.py::test_same_bits",),
    ),
)

CAPACITY = (
    Mutation(
        name="no-capacity-check",
        rule="exact sizes ignore the capacity",
        target="tokenloom.backends.collective:CollectiveBackend._check_capacity",
        old='needed > options.capacity and options.sizes == "exact"',
        new="False",
        tests=("tests/comm/test_dispatch.py::test_exact_overflow",),
    ),
    Mutation(
        name="own-capacity-only",
        rule="a rank hears of its own overflow alone",
        target="tokenloom.backends.collective:CollectiveBackend._check_capacity",
        old="int(groups.reshape(self._plan.num_ranks, -1).sum(1).max())",
        new="int(groups.reshape(self._plan.num_ranks, -1).sum(1)[self._ranks.rank])",
        tests=OVERFLOW_TESTS,
    ),
    Mutation(
        name="overflow-not-sticky",
        rule="an overflow is forgotten before anybody was told",
        target="tokenloom.backends.collective:CollectiveBackend.check",
        old="overflow, self._overflow = self._overflow, None",
        new="overflow, self._overflow = None, None",
        tests=OVERFLOW_TESTS,
    ),
    Mutation(
        name="overflow-for-ever",
        rule="an overflow is raised again and again",
        target="tokenloom.backends.collective:CollectiveBackend.check",
        old="overflow, self._overflow = self._overflow, None",
        new="overflow = self._overflow",
        tests=OVERFLOW_TESTS,
    ),
)

SLOT_TESTS = ("tests/comm/test_dispatch.py::test_bounded_overflow",)

SLOTS = (
    Mutation(
        name="slots-of-the-sum",
        rule="an overflow of slots names the rows of a rank, not the places that an expert needs",
        target="tokenloom.backends.collective:CollectiveBackend._check_capacity",
        old="int(routes.sum(0).max())",
        new="int(routes.sum())",
        tests=SLOT_TESTS,
    ),
    Mutation(
        name="unfilled-out",
        rule="the caller's tensors are handed out as they were",
        target="tokenloom.backends.collective_handle:CollectiveHandle.write_to",
        old="tensor.copy_(value.view(tensor.shape))",
        new="pass",
        tests=("tests/comm/test_out.py::test_dispatch",),
    ),
)

MUTATIONS = SUMS + TRAVEL + CAPACITY + SLOTS
