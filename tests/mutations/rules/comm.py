"""Rules of comm/, and of what opens its calls: the handshake, who is asked, and what an error says."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

FAULT_TESTS = ("tests/training/test_layer.py::test_a_fault_on_one_rank_is_an_error_on_all_and_the_layer_works_on",)

HANDSHAKE = (
    Mutation(
        name="lost-status-word",
        rule="the other ranks do not hear of a fault that one rank sees",
        target="tokenloom.backends.handshake:handshake",
        old="_OK if fault is None else _FAULT",
        new="_OK",
        tests=FAULT_TESTS,
    ),
    Mutation(
        name="peer-error-names-another",
        rule="PeerError names the rank after the one that failed",
        target="tokenloom.backends.handshake:handshake",
        old="int(faulty[0])",
        new="(int(faulty[0]) + 1) % len(table)",
        tests=FAULT_TESTS,
    ),
    Mutation(
        name="no-agreement-in-calls",
        rule="ranks that call with different options are not told",
        target="tokenloom.backends.handshake:handshake",
        old="(table[:, 1] != table[0, 1]).any()",
        new="False",
        tests=("tests/comm/test_errors.py::test_disagreement",),
    ),
    Mutation(
        name="any-dispatch-will-do",
        rule="ranks that combine different dispatches are not told",
        target="tokenloom.backends.handshake:hash_of",
        old="(int(values[1]) + 1) * 0x9E3779B97F4A7C15",
        new="0",
        tests=("tests/comm/test_errors.py::test_disagreement",),
    ),
    Mutation(
        name="disagreement-of-the-last",
        rule="PlanMismatch compares ranks with the last one, not with rank 0",
        target="tokenloom.backends.handshake:raise_difference",
        old="text.get(name) != texts[0].get(name)",
        new="text.get(name) != texts[-1].get(name)",
        tests=("tests/comm/test_errors.py::test_disagreement",),
    ),
    Mutation(
        name="two-ranks-on-one-gpu",
        rule="ranks that share a GPU get kernels, which wait for each other's SMs",
        target="tokenloom.backends.nvlink.registration:objections",
        old="gpu in gpus[:rank]",
        new="False",
        tests=("tests/backends/test_registry.py",),
    ),
)

ARGUMENTS = (
    Mutation(
        name="negative-ids-pass",
        rule="ids below -1 are taken for -1",
        target="tokenloom.comm.validation:_check_id_range",
        old="(ids < -1) | (ids >= plan.num_experts)",
        new="ids >= plan.num_experts",
        tests=("tests/comm/test_errors.py::test_dispatch_fault",),
    ),
    Mutation(
        name="fp8-gradients-vanish",
        rule="an FP8 payload that requires grad is dispatched without a word",
        target="tokenloom.comm.validation:_check_payload",
        old="torch.is_grad_enabled() and (x.requires_grad or (scales is not None and scales.requires_grad))",
        new="False",
        tests=("tests/comm/test_errors.py::test_fp8_fault",),
    ),
)

GRADIENTS = (
    Mutation(
        name="to-fp8-rows-require-grad",
        rule="rows that were quantised on the way claim to have a gradient",
        target="tokenloom.comm.autograd:_Dispatch.forward",
        old="rows.element_size() == 1",
        new="x.element_size() == 1",
        tests=("tests/comm/test_dispatch.py::test_to_fp8_and_gradients",),
    ),
    Mutation(
        name="rows-hold-their-graph",
        rule="rows that a backend keeps point at the graph that holds the backend's handle",
        target="tokenloom.comm.autograd:_Dispatch.forward",
        old="received_rows[0].detach()",
        new="received_rows[0]",
        tests=("tests/comm/test_dispatch.py::test_what_a_handle_keeps_has_no_graph",),
    ),
    Mutation(
        name="no-gradient-of-weights",
        rule="combine gives no gradient to the weights",
        target="tokenloom.comm.autograd:_Combine.backward",
        old="grad_weights.to(weights.dtype)",
        new="torch.zeros_like(weights)",
        tests=("tests/comm/test_row_weights.py::test_it_is_a_weighted_combine",),
    ),
)

MUTATIONS = HANDSHAKE + ARGUMENTS + GRADIENTS
