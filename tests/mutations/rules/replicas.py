"""Rules of plans of replicas, of the counts they are made from, and of skewed routings."""

from __future__ import annotations

from tests.mutations.mutation import M

PLAN_TESTS, STATS_TESTS = "tests/comm/test_plan_replicas.py::", "tests/comm/test_expert_stats.py::"
SKEW_TESTS = "tests/tune/test_samples.py::"

# fmt: off
PLANS = (
    M("replicas-beyond-ranks", "a hot expert gets more replicas than there are ranks",
      "comm.plan_replicas:_count_replicas", "count == num_ranks", "False", f"{PLAN_TESTS}test_what_every_plan_keeps"),
    M("twice-on-a-rank", "a rank holds an expert twice", "comm.plan_replicas:_longest_first",
      "expert not in ranks[rank]", "True", f"{PLAN_TESTS}test_what_every_plan_keeps"),
    M("last-replica-replaced", "the only replica of an expert is replaced by another's",
      "comm.plan_replicas:_Table._gains_of_replicas", "replicas[slots] < 2", "replicas[slots] < 1",
      f"{PLAN_TESTS}test_few_experts_move", f"{PLAN_TESTS}test_what_every_plan_keeps"),
    M("always-fresh", "a plan from the placement of now is a fresh one", "comm.plan_replicas:_plan_table",
      "kept.fullest <= limit", "False", f"{PLAN_TESTS}test_few_experts_move"),
    M("steps-without-end", "a plan from the placement of now changes it until nothing helps",
      "comm.plan_replicas:_Table.improve", "self.fullest <= limit or not self._step()", "not self._step()",
      f"{PLAN_TESTS}test_few_experts_move"),
)

COUNTS = (
    M("unused-places-count", "places without a route count for the last expert", "comm.expert_stats:ExpertStats.add",
      "torch.where((ids < 0) | (ids >= self.num_experts), self.num_experts, ids)", "ids % self.num_experts",
      f"{STATS_TESTS}test_counts_by_hand"),
    M("nothing-decays", "earlier counts stay whole where they are to decay", "comm.expert_stats:ExpertStats.add",
      "self._counts.mul_(self._decay)", "self._counts", f"{STATS_TESTS}test_decay_by_hand"),
)

SKEW = (
    M("popularity-in-order", "neighbours are favourites together", "tune.samples:_popularity",
      "torch.special.ndtri(places)[torch.randperm(num_experts, generator=generator, device='cpu')]",
      "torch.special.ndtri(places)", f"{SKEW_TESTS}test_popularity"),
    M("half-a-vio", "a routing is less uneven than asked for", "tune.samples:_popularity",
      "_expected_max_vio(logs(middle), top_k) < max_vio", "_expected_max_vio(logs(middle), top_k) < max_vio / 2",
      f"{SKEW_TESTS}test_drawn_loads_have_the_max_vio"),
)

BENCHES = (
    M("planned-from-what-is-measured", "a bench plans replicas from the very tokens that it measures",
      "bench.workload:_placement", "earlier.topk_ids(num_ranks + rank)", "earlier.topk_ids(rank)",
      "tests/bench/test_workload.py::test_a_placement_is_of_another_batch"),
    M("steps-without-sums", "a bench of steps leaves the sum of replicas' gradients out of them",
      "bench.train_work:TrainProblem.gradients_at_owners", "reduce_replica_gradients(layer)", "pass",
      "tests/bench/test_train.py::test_all_agree"),
)

MUTATIONS = PLANS + COUNTS + SKEW + BENCHES
