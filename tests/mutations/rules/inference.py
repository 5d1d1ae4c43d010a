"""Rules of inference/: MegaMoE."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MEGA_TEST = "tests/inference/test_mega_moe.py::test_"

MUTATIONS = (
    Mutation(
        name="up-clamped-above-only",
        rule="ups may be as far below 0 as they like",
        target="tokenloom.inference.reference_experts:ReferenceExperts._expert",
        old="up.clamp(-self._clamp, self._clamp)",
        new="up.clamp(max=self._clamp)",
        tests=(f"{MEGA_TEST}reference_backend[cpu2-clamp]",),
    ),
    Mutation(
        name="activations-without-weights",
        rule="routes have no weights",
        target="tokenloom.inference.reference_experts:ReferenceExperts._expert",
        old="apply_activation(gate_and_up) * row_weights[:, None]",
        new="apply_activation(gate_and_up)",
        tests=(f"{MEGA_TEST}reference_backend[cpu2-plain]",),
    ),
    Mutation(
        name="one-shared-expert",
        rule="of several shared experts the first serves for all",
        target="tokenloom.inference.reference_experts:ReferenceExperts.forward",
        old="self._expert(e, own, own.new_ones(len(own)))",
        new="self._expert(comm.plan.experts_per_rank, own, own.new_ones(len(own)))",
        tests=(f"{MEGA_TEST}reference_backend[cpu2-two shared experts]",),
    ),
    Mutation(
        name="room-for-even-routing",
        rule="activations have room for an even routing only",
        target="tokenloom.inference.nvlink_experts:buffer_sizes",
        old="max(most_routes * intermediate, copied * (intermediate + hidden))",
        new="copied * (intermediate + hidden)",
        tests=(f"{MEGA_TEST}buffers_of_the_reference_layer",),
    ),
)
