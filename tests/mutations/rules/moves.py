"""Rules of experts that move, and of those that are restored."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
PLAN = "tests/comm/test_plan_moves.py::test_"
MOVES, RESTORED = "tests/comm/test_move_experts.py::test_", "tests/comm/test_restore_experts.py::test_"
MEGA = "tests/inference/test_placed_mega.py::test_"

MUTATIONS = (
    M("moves-into-slots-that-count", "an expert is copied over one that calls still use",
      "comm.plan_moves:_Move._exchange",
      "found.append((self._put(rank, slot, expert), (rank, slot), True))",
      "found.append((self._put(rank, slot, expert), (rank, slot), False))", f"{PLAN}moves",
      f"{MOVES}the_old_table_rules"),
    M("scratch-for-several-experts", "a rank takes two experts in a stage that has scratch memory for one",
      "comm.plan_moves:_Move._exchange", "used.add(rank)", "pass", f"{PLAN}moves"),
    M("last-replicas-are-given-up", "an expert takes the last slot of another, which has none then",
      "comm.plan_moves:_Move._chain", "counts[expert] > 1", "True", f"{PLAN}moves"),
    M("moved-though-there", "experts that stay on their rank are copied all the same",
      "comm.plan_moves:_Move.__init__", "lacking[expert] -= 1", "self.outgoing[rank].append(slot)", f"{PLAN}moves"),
    M("sources-of-masked-ranks", "experts are read from ranks that are gone", "comm.plan_moves:plan_moves",
      "frozenset(masked)", "frozenset()", f"{PLAN}without_ranks"),
    M("pieces-of-any-size", "a rank receives more than a piece in a step", "comm.plan_moves:cut_into_pieces",
      "max(of_source, of_target)", "of_source", f"{PLAN}pieces"),
    M("pieces-from-the-beginning", "each piece brings the first bytes of an expert",
      "comm.move_experts:MovingExperts._targets", "self._slots.between(piece.copy.to[1], piece.begin, piece.end)",
      "self._slots.between(piece.copy.to[1], 0, piece.end - piece.begin)", f"{MOVES}there_and_back"),
    M("the-new-table-rules-at-once", "what waits in scratch memory never gets to its slot",
      "comm.move_experts:MovingExperts._end_stage", "self._take_from_scratch(copy)", "pass", f"{MOVES}there_and_back"),
    M("rows-pass-for-tensors", "a tensor counts as the list of its rows", "comm.move_experts:SlotBytes.require_fits",
      "not isinstance(self._tensors, Sequence)", "False", f"{MOVES}refusals"),
    M("agreed-on-different-things", "ranks agree though one asks for something else", "runtime.rendezvous:agree",
      "{'call': phase, **values}", "values", f"{MOVES}refusals"),
    M("moves-go-on-without-a-rank", "a move goes on though a rank was masked",
      "comm.move_experts:MovingExperts._agree", "said ^ self._masked", "()", f"{MOVES}a_rank_is_masked_meanwhile"),
    M("parcels-in-order-of-sending", "parcels are taken as they were sent, whoever sent them",
      "runtime.byte_carriers:MessageCarrier.carry", "lambda each: each.source", "lambda each: -each.source",
      f"{MOVES}there_and_back", num_ranks=4),
    M("restored-before-all-agree", "an expert is restored that another rank could not load",
      "comm.restore_experts:restore_experts", "return terms, None",
      "return (engine.place(placement), terms)[1], None", f"{RESTORED}restored"),
    M("restored-in-any-form", "restored experts may have another dtype", "comm.restore_experts:_checked",
      "value.dtype != tensor.dtype", "False", f"{RESTORED}restored"),
    M("restored-over-last-replicas", "a lost expert takes the last slot of another",
      "comm.restore_experts:plan_restore", "replicas[rows[rank][slot]] > 1", "replicas[rows[rank][slot]] > 0",
      f"{RESTORED}plan"),
    M("weights-by-rank-under-a-placement", "a rank loads the experts of e // L, whatever its slots hold",
      "inference.mega_moe:MegaMoE.load_weights", "placement.experts_of(self.comm.rank)",
      "range(of_rank, of_rank + self._num_slots)", f"{MEGA}loading"),
    M("scales-stay-behind", "weights move without their scales", "inference.mega_moe:MegaMoE._of_slots",
      "Experts(self.weights, self.biases, self._packed, ()).tensors",
      "Experts(self.weights[::2], self.biases, self._packed, ()).tensors", f"{MEGA}moves_between_calls[cpu2-block]"),
    M("shared-experts-among-slots", "shared experts begin where those of a rank without spare slots end",
      "inference.composed_experts:ComposedExperts._shared_experts", "self._comm.engine.plan.experts_per_rank",
      "self._comm.plan.experts_per_rank", f"{MEGA}moves_between_calls[cpu2-everything of block]"),
)
