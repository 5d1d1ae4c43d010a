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
        old="self._ranks.is_broken or launcher.outcomes.fault.is_set() or launcher.has_graphs",
        new="launcher.has_graphs",
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
    Mutation(
        name="signals-of-another",
        rule="signals that an earlier communicator has raised end the waits of the next one",
        target="tokenloom.backends.gin.memory:NodeMemory._reset_signals",
        old="kernel.launch(1, torch.cuda.current_stream(device).cuda_stream)",
        new="pass",
        tests=(f"{GIN}::test_one_communicator_after_the_other",),
    ),
    Mutation(
        name="unread-timeout-at-close",
        rule="a close gives the window back behind a wait that has expired and that nobody has read",
        target="tokenloom.backends.gin.backend:GinBackend.close",
        old="launcher.outcomes.fault.is_set()",
        new="False",
        tests=(f"{GIN}::test_a_close_hears_of_a_wait_that_has_expired",),
    ),
    Mutation(
        name="weights-by-another-engine",
        rule="weights that come later open a call that other ranks do not make",
        target="tokenloom.comm.beside:CallsBeside._require_weights_apart",
        old="not self.engine.capabilities.weights_apart",
        new="False",
        tests=(f"{GIN}::test_weights_that_come_later_are_refused",),
    ),
    Mutation(
        name="first-and-differing-alone",
        rule="of several nodes only the first rank and the one that was named are asked what they mean",
        target="tokenloom.backends.nvlink.outcomes:Outcomes._raise_difference",
        old="self._ranks.topology.num_nodes > 1",
        new="False",
        tests=(f"{GIN}::test_all_ranks_hear_of_combines_that_differ",),
    ),
    Mutation(
        name="nothing-given-back-if-unmade",
        rule="a window stays where what comes behind it cannot be made",
        target="tokenloom.backends.gin.memory:NodeMemory.__init__",
        old="self.close()",
        new="pass",
        tests=(f"{GIN}::test_what_cannot_be_made_gives_the_window_back",),
    ),
)
