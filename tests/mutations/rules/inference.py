"""Rules of inference/: MegaMoE."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MEGA_TEST = "tests/inference/test_mega_moe.py::test_"

EMULATED = "tests/inference/test_emulated_mega.py"

MUTATIONS = (
    Mutation(
        name="up-clamped-above-only",
        rule="ups may be as far below 0 as they like",
        target="tokenloom.ops.activation:apply_activation",
        old="up.clamp(-activation.limit, activation.limit)",
        new="up.clamp(max=activation.limit)",
        tests=(f"{MEGA_TEST}other_backends[cpu2-reference-clamp]",),
    ),
    Mutation(
        name="activations-without-weights",
        rule="routes have no weights",
        target="tokenloom.inference.reference_experts:ReferenceExperts._expert",
        old="apply_activation(gate_and_up, self._form) * row_weights[:, None]",
        new="apply_activation(gate_and_up, self._form)",
        tests=(f"{MEGA_TEST}other_backends[cpu2-reference-plain]",),
    ),
    Mutation(
        name="bias-without-weight",
        rule="the bias of w2 is added as it is, whatever the route's weight",
        target="tokenloom.inference.reference_experts:ReferenceExperts._expert",
        old="row_weights[:, None] * w2_bias[e]",
        new="w2_bias[e]",
        tests=(f"{MEGA_TEST}other_backends[cpu2-reference-biases]",),
    ),
    Mutation(
        name="bias-not-in-turns",
        rule="the bias of w1 stays gates first, though the rows take turns",
        target="tokenloom.inference.mega_moe:MegaMoE._float32_biases",
        old="interleave_gate_and_up(w1_bias[..., None])[..., 0].contiguous()",
        new="w1_bias",
        tests=(f"{MEGA_TEST}other_backends[cpu2-reference-biases]",),
    ),
    Mutation(
        name="gemm2-without-bias",
        rule="the kernel of w2's bias is taken for the one without",
        target="tokenloom.inference.expert_gemms:ExpertGemms._choose",
        old="w2_bias is not None",
        new="False",
        tests=("tests/inference/test_mega_launches.py::test_biases_and_other_activations_come_and_go",),
    ),
    Mutation(
        name="gemm2-before-rows-are-stored",
        rule="GEMM2 takes rows that GEMM1 has not stored yet",
        target="device/roles/gate.cuh:OpenWhenStored",
        old="return load_acquire_gpu(stored + place_among_tiles(tile)) >= wanted;",
        new="return true;",
        tests=(f"{MEGA_TEST}mega[cuda1-many experts]", f"{MEGA_TEST}mega[cuda1-as real models]"),
        gpu=True,
    ),
    Mutation(
        name="counts-of-tiles-go-on",
        rule="counts of stored tiles are not set to 0 between calls",
        target="tokenloom.inference.nvlink_experts:NvlinkExperts._allocate",
        old="self._calls.prepare_meetings(memory.met, memory.counted)",
        new="self._calls.prepare_meetings(memory.met, memory.taken)",
        tests=("tests/inference/test_mega_launches.py::test_each_call_tells_its_own_tensors",),
    ),
    Mutation(
        name="waves-begin-early",
        rule="GEMMs in waves are launched early, too",
        target="tokenloom.inference.expert_gemms:ExpertGemms.run",
        old="self._first.early = self._second.early = main is None",
        new="self._first.early = self._second.early = True",
        tests=("tests/inference/test_mega_launches.py::test_kernels_begin_early_behind_one_another",),
    ),
    Mutation(
        name="one-shared-expert",
        rule="of several shared experts the first serves for all",
        target="tokenloom.inference.reference_experts:ReferenceExperts._add_up",
        old="self._expert(e, own, own.new_ones(len(own)))",
        new="self._expert(comm.plan.experts_per_rank, own, own.new_ones(len(own)))",
        tests=(f"{MEGA_TEST}other_backends[cpu2-reference-two shared experts]",),
    ),
    Mutation(
        name="room-for-even-routing",
        rule="activations have room for an even routing only",
        target="tokenloom.inference.expert_memory:ExpertMemory.__init__",
        old="max(most * intermediate, copied * (intermediate + plan.hidden))",
        new="copied * (intermediate + plan.hidden)",
        tests=(f"{MEGA_TEST}buffers_of_the_reference_layer",),
    ),
    Mutation(
        name="graphs-without-counts",
        rule="a graph does not keep the memory between the kernels of a MegaMoE",
        target="tokenloom.inference.nvlink_experts:NvlinkExperts._allocate",
        old="self._calls.keep(memory, self._gemms)",
        new="pass",
        tests=("tests/inference/test_mega_launches.py::test_graphs_keep_the_memory_between_kernels",),
    ),
    Mutation(
        name="waves-without-sms",
        rule="on a GPU of a few SMs, waves leave none to GEMM2",
        target="tokenloom.inference.expert_gemms:ExpertGemms.run",
        old="max(all_sms // 3 // CLUSTER * CLUSTER, CLUSTER)",
        new="all_sms // 3 // CLUSTER * CLUSTER",
        tests=(f"{EMULATED}::test_mega[one block]",),
    ),
    Mutation(
        name="gathered-rows-unswizzled",
        rule="rows that are gathered lie where wgmma does not look for them",
        target="device/roles/gathered_rows.cuh:GatheredRows::gather_values",
        old="(unit ^ row % 8) * 16",
        new="unit * 16",
        tests=(f"{EMULATED}::test_mega[one block]",),
    ),
    Mutation(
        name="scales-of-another-half",
        rule="both halves of a tile's columns take the scales of the first",
        target="device/roles/math.cuh:add_scaled",
        old="half == 0 ? scales.low[0] : scales.low[1]",
        new="half >= 0 ? scales.low[0] : scales.low[1]",
        tests=("tests/kernels/test_emulated_gemm.py::test_gemm[tails and empty experts]",),
    ),
)
