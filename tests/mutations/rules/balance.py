"""Rules of balanced batches: who computes what, when it pays, and what comes home."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
SPLIT, SLOTS = "tests/ops/test_split_batch.py", "tests/kernels/test_slots_of_routes.py"
CALLS, LAYER = "tests/comm/test_balanced_dispatch.py", "tests/training/test_balanced_layer.py"
GATHER, COUNTS = "kernels/counts/gather_counts.cuh", "tests/backends/test_gathered_counts.py"
PULL, ROWS = "kernels/pull/pull_experts.cuh", "tests/kernels/test_pull_experts.py"
PLANNER, PULLED = "ops.split_batch:split_batch", "comm.pulled_experts:PulledExperts"

MUTATIONS = (
    M("helpers-take-more-than-there-is", "a helper gets more routes than overloaded ranks have too many", PLANNER,
      "wanted = min(-surplus[helper], total)", "wanted = -surplus[helper]", f"{SPLIT}::test_equals_the_reference"),
    M("masked-ranks-take-shares", "ranks that are gone compute routes of others", PLANNER,
      "expert == EMPTY and rank not in masked", "expert == EMPTY", f"{SPLIT}::test_what_every_split_keeps"),
    M("replicas-are-pulled", "a helper pulls an expert that it has", PLANNER,
      "target = slot_of.get((helper, experts[slot]))", "target = None", f"{SPLIT}::test_replicas_need_no_pull"),
    M("split-at-any-price", "batches are split where pulling takes longer than it saves", PLANNER,
      "shares and (pays or always)", "shares", f"{SPLIT}::test_whether_it_pays", f"{CALLS}::test_whether_it_pays"),
    M("room-for-even-batches-alone", "a batch is not split though its rows have no room otherwise",
      "comm.balance:always_splits", "options.capacity is not None", "False", f"{CALLS}::test_room_for_the_mean"),
    M("shares-begin-late", "the first route of a share stays", "ops.slots_of_routes:in_shares",
      "first <= places", "first < places", f"{SLOTS}::test_by_a_split"),
    M("the-first-share-is-all", "routes of later shares go to the target of the first one",
      "ops.slots_of_routes:in_shares", "torch.where(belongs, following, EMPTY)", "torch.full_like(share, EMPTY)",
      f"{SLOTS}::test_by_a_split"),
    M("counts-of-masked-ranks", "headers that masked ranks left count", f"{GATHER}:gather_counts",
      "done && !turn.leaves_out<Shape::num_ranks>(rank)", "done", f"{COUNTS}::test_counts", num_ranks=4),
    M("counts-before-they-are-here", "counts are read where headers alone are here", f"{GATHER}:gather_counts",
      "await_counts<Shape::num_ranks, kCounts, Shape::threads, Shape::num_ranks, kTold>(args.call, turn)", "true",
      f"{COUNTS}::test_counts", num_ranks=4),
    M("slots-of-the-placement-are-pulled", "experts are pulled into slots that hold one", f"{PULL}:pull_experts",
      "share.target / kSlots == args.rank && args.experts[share.target] < 0", "share.target / kSlots == args.rank",
      f"{ROWS}::test_on_the_emulator"),
    M("the-first-tensor-is-pulled", "weights are pulled without scales and biases", f"{PULL}:pull_experts",
      "part < args.num_parts", "part < 1", f"{ROWS}::test_on_the_emulator"),
    M("sums-show-the-split", "the default of combines behind a split sums per rank", "comm.calls:Kinds.mode_of",
      "getattr(routed, 'layout', None) in ROUTE_LAYOUTS", "False", f"{CALLS}::test_same_bits"),
    M("layers-show-the-split", "the default of layers that split sums per rank",
      "training.expert_module:RoutedExperts.__init__", "STRATEGY_OF_MODE['per_route']", "'dedup'",
      f"{LAYER}::test_same_bits"),
    M("gradients-stay-with-helpers", "what helpers computed does not come home", f"{PULLED}.sum_gradients",
      "each is not None", "False", f"{LAYER}::test_gradients_of_weights"),
    M("owners-add-theirs-first", "gradients are not summed in ascending rank", "comm.slot_rows:sum_at_owners",
      "sorted([own, *others], key=lambda term: term[0])", "[own, *others]", f"{LAYER}::test_gradients_of_weights",
      num_ranks=4),
    M("slots-of-the-last-batch", "backward reads what later batches pulled", "training.routed_experts:_Backward.run",
      "pulled.pull(experts.tensors)", "pass", f"{LAYER}::test_ways_to_train"),
    M("experts-without-their-scales", "FP8 experts are pulled without what follows the first tensor",
      "inference.composed_experts:ComposedExperts.forward", "(*self._weights, *self._biases)", "self._weights[:1]",
      "tests/inference/test_balanced_mega.py::test_outputs", num_ranks=4),
)
