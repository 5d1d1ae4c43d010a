"""Rules of placements: who gets which route, what is remembered of it, and who takes over."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
RULE = "tests/comm/test_placement.py"
PLACED, MASKS = "tests/comm/test_placed_dispatch.py", "tests/comm/test_placed_masks.py"

MUTATIONS = (
    M("sources-begin-alike", "every source sends its first route of an expert to the same replica",
      "ops.slots_of_routes:find_slots", "rank + index", "index", f"{RULE}::test_the_rule_by_hand"),
    M("routes-in-any-order", "equal experts are counted in no fixed order", "ops.slots_of_routes:find_slots",
      "torch.arange(len(ids), device=ids.device) - torch.searchsorted(ordered, ordered)",
      "torch.arange(len(ids), device=ids.device)", f"{RULE}::test_the_rule"),
    M("experts-without-slots", "a placement may lack an expert", "comm.placement:Placement.__init__",
      "[expert for expert, its in enumerate(slots) if not its]", "[]", f"{RULE}::test_bad_tables"),
    M("slots-of-masked-ranks", "routes go to slots of ranks that are gone", "comm.placed_slots:PlacedSlots._write",
      "rank not in masked", "True", f"{MASKS}::test_replicas_take_over"),
    M("masks-of-late-ranks-are-missed", "a rank that the last call masked by itself still has its slots",
      "comm.engine:Engine.slots_of_now", "self._follow_masks()", "pass", f"{MASKS}::test_late_for_a_dispatch",
      num_ranks=4),
    M("placements-are-not-compared", "ranks go by different tables", "comm.placement:placement_terms",
      '{"slots_per_rank": str(placement.slots_per_rank)} | slots', '{"slots_per_rank": str(placement.slots_per_rank)}',
      f"{PLACED}::test_refusals"),
    M("open-halves-are-placed-anew", "a placement changes between the halves of a call",
      "comm.engine:Engine.require_between_calls", "self.open_calls.any_open()", "False", f"{PLACED}::test_refusals"),
    M("back-with-an-old-placement", "a rank comes back with the placement of the beginning",
      "comm.engine:Engine.place", "self.ranks.terms |= placement_terms(placement)", "pass",
      f"{MASKS}::test_back_with_another_placement"),
    M("slots-of-the-next-dispatch", "an earlier dispatch says what its slots hold now",
      "comm.placed_slots:PlacedSlots.place", "self._experts_of_replays.clone()", "self._experts_of_replays",
      f"{PLACED}::test_set_placement"),
    M("gradients-by-placement", "behind a combine per route the gradient of x depends on where experts are",
      "comm.calls:CombineCall.send", "routed._gradient_order.per_route = True", "pass",
      f"{PLACED}::test_per_route_bits", f"{PLACED}::test_gradient_by_route"),
    M("ids-of-slots-pass", "ids beyond the experts pass where there are more slots", "comm.calls:Kinds.check_dispatch",
      "engine.caller_plan.num_experts", "plan.num_experts", f"{PLACED}::test_checked_ids"),
)
