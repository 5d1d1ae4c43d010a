"""Rules of placements: who gets which route, what is remembered of it, and who takes over."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
RULE = "tests/comm/test_placement.py"
LAYER = "tests/training/test_placed_layer.py"
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
      "self.placement.slot_ids(without=self._masked)", "self.placement.slot_ids()",
      f"{MASKS}::test_replicas_take_over"),
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
    M("sums-at-the-end-alone", "an owner steps by its own gradient", "comm.slot_rows:sum_at_owners",
      "total += row", "pass", f"{LAYER}::test_gradients_of_weights"),
    M("replicas-step-too", "replicas keep their gradients, and norms count them twice",
      "comm.slot_rows:sum_at_owners", "rows[move.source] = 0", "pass", f"{LAYER}::test_gradients_of_weights"),
    M("slots-are-summed-narrow", "gradients of slots are summed in bfloat16", "comm.slot_rows:sum_at_owners",
      "torch.promote_types(rows.dtype, torch.float32)", "torch.promote_types(rows.dtype, torch.bfloat16)",
      f"{LAYER}::test_bfloat16_is_summed_wide"),
    M("copies-stay-behind", "replicas keep the weights of before the step",
      "training.replicas:_Follower.after_step", "self.layers(optimizer)", "[]",
      f"{LAYER}::test_steps_and_new_places"),
    M("states-stay-behind", "experts leave their optimizer states where they were", "training.replicas:_states",
      "_has_rows(value, len(each))", "False", f"{LAYER}::test_steps_and_new_places"),
    M("states-left-out-move-like-weights", "states of an optimizer that was left out move as if it had not been",
      "training.replicas:_Follower.placement_of", "self._placements.get(layer, layer.placement)", "layer.placement",
      "tests/training/test_placed_programs.py::test_an_optimizer_that_was_left_out"),
    M("state-dicts-of-slots", "a state dict holds slots", "training.expert_module:RoutedExperts._save_to_state_dict",
      "destination.update(by_expert(self, slots, 'by all slots', 'state_dict'))", "pass",
      f"{LAYER}::test_state_dicts_fit_any_placement"),
    M("weights-without-their-slots", "a layer goes by a placement that its weights do not lie by",
      "training.expert_module:RoutedExperts.forward", "self.require_placed()", "pass",
      "tests/training/test_placed_programs.py::test_layers_of_one_communicator"),
    M("gradient-of-x-by-placement", "a layer that sums per route sums the gradient of x per rank",
      "backends.seam:Strategy.gradient_of_dispatch", "('per_node', 'all_to_all')", "('per_node',)",
      f"{LAYER}::test_same_bits"),
    M("ids-of-slots-pass", "ids beyond the experts pass where there are more slots", "comm.calls:Kinds.check_dispatch",
      "engine.caller_plan.num_experts", "plan.num_experts", f"{PLACED}::test_checked_ids"),
)
