"""Rules of backend "gin"."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

GIN = "tests/backends/test_gin.py"

MUTATIONS = (
    Mutation(
        name="everybody-looks-for-nccl",
        rule="NCCL's headers are looked for where nobody has asked for GIN",
        target="tokenloom.backends.gin.registration:probe",
        old='"gin" not in (request.name, request.between_nodes)',
        new="False",
        tests=(f"{GIN}::test_nobody_else_looks_for_nccl",),
    ),
    Mutation(
        name="many-tokens-by-gin",
        rule="plans of many tokens take kernels for few",
        target="tokenloom.backends.gin.registration:probe",
        old="not is_eager(plan)",
        new="False",
        tests=("tests/backends/test_network.py::test_gin_is_refused",),
    ),
    Mutation(
        name="wide-rows-in-narrow-memory",
        rule="rows go to memory that was made for narrower ones",
        target="tokenloom.backends.gin.memory:NodeMemory.require_room",
        old="dtype.itemsize > self._widest.itemsize",
        new="False",
        tests=(f"{GIN}::test_window_of_a_plan",),
    ),
    Mutation(
        name="window-goes-while-others-put",
        rule="the window is given back after a wait has expired, when a late rank may still put to it",
        target="tokenloom.backends.gin.backend:GinBackend.close",
        old="self._ranks.is_broken",
        new="False",
        tests=(f"{GIN}::test_who_is_missing_is_named",),
    ),
    Mutation(
        name="gradients-are-forgotten",
        rule="rows that want a gradient are sent without one",
        target="tokenloom.backends.gin.backend:GinBackend.send_dispatch",
        old="inputs.x_needs_grad or inputs.weights_need_grad",
        new="False",
        tests=(f"{GIN}::test_what_it_has_not",),
    ),
    Mutation(
        name="other-nodes-are-mapped",
        rule="memory of ranks of other nodes is mapped",
        target="tokenloom.runtime.symmetric_memory:_Shared.__init__",
        old="frozenset(ranks.topology.nodes[node])",
        new="frozenset(range(ranks.num_ranks))",
        tests=("tests/runtime/test_symmetric_memory.py::test_nodes_have_memory_of_their_own",),
        num_ranks=4,
    ),
)
