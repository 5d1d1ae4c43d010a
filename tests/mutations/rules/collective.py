"""Rules of backends/collective.py: what travels, and how it is summed."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
SEND_HOME = "backends.collective:CollectiveBackend._send_home"
SUM_DTYPE = "backends.collective:_sum_dtype"
HAND_TESTS = ("tests/comm/test_combine.py::test_sums_by_hand",)
DTYPE_TESTS = ("tests/comm/test_combine.py::test_dtypes",)
OVERFLOW_TESTS = ("tests/comm/test_dispatch.py::test_bounded_overflow",)

SUMS = (
    M("order-of-ranks", "the ranks' partial sums are added in descending order of rank", SEND_HOME,
      "routing.home_positions_per_rank(sizes.send, handle.num_tokens, self._plan.num_ranks)",
      "routing.home_positions_per_rank(sizes.send, handle.num_tokens, self._plan.num_ranks).flip(1)", *HAND_TESTS,
      num_ranks=4),
    M("order-of-k", "a partial sum adds its routes in descending k", SEND_HOME,
      "routing.ordered_sum(rows, positions, weights, dtype=dtype)",
      "routing.ordered_sum(rows, positions.flip(1), None if weights is None else weights.flip(1), dtype=dtype)",
      *DTYPE_TESTS),
    M("order-of-routes", "per_route adds the routes in descending k", SEND_HOME,
      "routing.home_positions_per_route(sizes.send, handle.num_tokens, self._plan.top_k)",
      "routing.home_positions_per_route(sizes.send, handle.num_tokens, self._plan.top_k).flip(1)", *DTYPE_TESTS),
    M("no-wire-rounding", "partial sums travel in float32, whatever the wire's dtype", SEND_HOME,
      "routing.ordered_sum(rows, positions, weights, dtype=dtype).to(options.wire_dtype)",
      "routing.ordered_sum(rows, positions, weights, dtype=dtype)", *HAND_TESTS),
    M("no-wire-rounding-of-routes", "per_route sends weighted rows in float32, whatever the wire's dtype", SEND_HOME,
      "terms.to(options.wire_dtype)", "terms", *DTYPE_TESTS),
    M("rounding-to-y-dtype", "partial sums are rounded to y's dtype on the way to a wider wire", SEND_HOME,
      "routing.ordered_sum(rows, positions, weights, dtype=dtype)",
      "routing.ordered_sum(rows, positions, weights, dtype=dtype).to(rows.dtype)", *HAND_TESTS),
    M("float64-sums", "sums of float32 and bfloat16 rows are kept in float64", SUM_DTYPE,
      "torch.float64 if rows.dtype == torch.float64 else torch.float32", "torch.float64", *HAND_TESTS),
    M("float32-sums-of-float64", "float64 rows are summed in float32", SUM_DTYPE,
      "torch.float64 if rows.dtype == torch.float64 else torch.float32", "torch.float32", *DTYPE_TESTS),
    M("no-nan-for-dropped", "tokens that a bounded capacity dropped are summed without the missing rows", SEND_HOME,
      "partial[handle.placement.dropped] = torch.nan", "pass", *OVERFLOW_TESTS),
)

TRAVEL = (
    M("weights-of-unused", "weights of routes that are not the receiver's are kept, NaN and all",
      "backends.collective:CollectiveBackend._metadata", "torch.where(here, rest.pop(0).view(topk_weights.dtype), 0)",
      "rest.pop(0).view(topk_weights.dtype)", "tests/comm/test_dispatch.py::test_example"),
    M("to-fp8-any-scale", "a dispatch that quantises ignores power_of_two_scales",
      "backends.collective:CollectiveBackend.send_dispatch", "options.power_of_two_scales", "False",
      "tests/comm/test_dispatch.py::test_to_fp8"),
    M("to-fp8-by-block", "a dispatch that quantises ignores its recipe",
      "backends.collective:CollectiveBackend.send_dispatch", "options.recipe", "'block'",
      "tests/comm/test_dispatch.py::test_to_fp8"),
    M("gathered-but-not-used", "strategy all_gather sends rows as dedup does",
      "backends.collective:CollectiveBackend._send_rows", 'strategy == "all_gather"', "False",
      "tests/comm/test_strategies.py::test_what_travels"),
    M("home-of-another-token", "dense partial sums are taken from the place of the first token",
      "backends.collective:CollectiveBackend._send_dense",
      "torch.arange(num_ranks, device=order.device) * room + tokens",
      "torch.arange(num_ranks, device=order.device) * room + 0 * tokens",
      "tests/comm/test_strategies.py::test_same_bits"),
)

CAPACITY = (
    M("no-capacity-check", "exact sizes ignore the capacity", "backends.collective:CollectiveBackend._check_capacity",
      'needed > options.capacity and options.sizes == "exact"', "False",
      "tests/comm/test_dispatch.py::test_exact_overflow"),
    M("own-capacity-only", "a rank hears of its own overflow alone",
      "backends.collective:CollectiveBackend._check_capacity",
      "int(groups.reshape(self._plan.num_ranks, -1).sum(1).max())",
      "int(groups.reshape(self._plan.num_ranks, -1).sum(1)[self._ranks.rank])", *OVERFLOW_TESTS),
    M("overflow-not-sticky", "an overflow is forgotten before anybody was told",
      "backends.collective:CollectiveBackend.check", "overflow, self._overflow = self._overflow, None",
      "overflow, self._overflow = None, None", *OVERFLOW_TESTS),
    M("overflow-for-ever", "an overflow is raised again and again", "backends.collective:CollectiveBackend.check",
      "overflow, self._overflow = self._overflow, None", "overflow = self._overflow", *OVERFLOW_TESTS),
)

SLOT_TESTS = ("tests/comm/test_dispatch.py::test_bounded_overflow",)

SLOTS = (
    M("slots-of-the-sum", "an overflow of slots names the rows of a rank, not the places that an expert needs",
      "backends.collective:CollectiveBackend._check_capacity", "int(routes.sum(0).max())", "int(routes.sum())",
      *SLOT_TESTS),
    M("unfilled-out", "the caller's tensors are handed out as they were",
      "backends.collective_handle:CollectiveHandle.write_to", "tensor.copy_(value.view(tensor.shape))", "pass",
      "tests/comm/test_out.py::test_dispatch"),
)

MUTATIONS = SUMS + TRAVEL + CAPACITY + SLOTS
