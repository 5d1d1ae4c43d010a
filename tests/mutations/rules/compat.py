"""Rules of tokenloom's ``deep_ep``."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

NORMAL = "tests/compat/deep_ep/test_normal.py::"
LOW_LATENCY = "tests/compat/deep_ep/test_low_latency.py::"
ELASTIC = "tests/compat/deep_ep/test_elastic.py::"
HYBRID = "tests/compat/deep_ep/test_hybrid.py::"
PACKAGE = "tokenloom.compat.deep_ep"

MUTATIONS = (
    Mutation(
        name="one-count-per-rank-and-node",
        rule="a token that goes to two ranks of a node counts twice there",
        target=f"{PACKAGE}.normal:NormalMode.get_dispatch_layout",
        old="in_rank.unflatten(1, (self._num_nodes, -1)).any(2)",
        new="in_rank.unflatten(1, (self._num_nodes, -1)).sum(2)",
        tests=("tests/compat/deep_ep/test_nodes.py::test_normal_mode",),
        num_ranks=4,
    ),
    Mutation(
        name="nobody-hears-of-growth",
        rule="a rank that needs more room does not say so to those that have enough",
        target="tokenloom.comm.growing:_is_growth",
        old="error.reason.startswith(NeedsRoom.__name__)",
        new="False",
        tests=(f"{NORMAL}test_batches_grow_and_shapes_change",),
    ),
    Mutation(
        name="faults-of-checks-stay-here",
        rule="what a check of the client's input finds is not told to the other ranks",
        target="tokenloom.comm.growing:Communicators.told",
        old='self._tell(fault, device, known, Upcoming(name, awaited=awaited and name == "dispatch"), opened_on)',
        new="fault.known_to_all = True",
        tests=(f"{NORMAL}test_combine_fault",),
    ),
    Mutation(
        name="errors-in-our-words",
        rule="errors do not name the client's call",
        target=f"{PACKAGE}.faults:_name",
        old="error.args = (f'{call}: {text}',)",
        new="error.args = (text,)",
        tests=(f"{NORMAL}test_dispatch_fault",),
    ),
    Mutation(
        name="anything-is-a-config",
        rule="what is no Config is taken for one",
        target=f"{PACKAGE}.checks:config",
        old="value is None or isinstance(value, Config)",
        new="True",
        tests=(f"{NORMAL}test_dispatch_fault",),
    ),
    Mutation(
        name="hook-and-event",
        rule="combine takes a hook with async_finish, and gives no event",
        target=f"{PACKAGE}.low_latency:LowLatencyMode.low_latency_combine",
        old="not (async_finish and return_recv_hook)",
        new="True",
        tests=(f"{LOW_LATENCY}test_combine_fault",),
    ),
    Mutation(
        name="unserved-options-are-ignored",
        rule="an option that is not served is ignored without a word",
        target=f"{PACKAGE}.faults:refuse",
        old="raise NotServed(f'{name} is not served by tokenloom; leave it out')",
        new="pass",
        tests=(f"{LOW_LATENCY}test_dispatch_fault",),
    ),
    Mutation(
        name="counts-are-not-rounded",
        rule="counts that a dispatch lists are not rounded up to the alignment",
        target=f"{PACKAGE}.normal:NormalMode.dispatch",
        old="align_up(count, expert_alignment)",
        new="count",
        tests=(f"{NORMAL}test_dispatch_and_combine",),
    ),
    Mutation(
        name="handle-shares-ids",
        rule="a cached layout follows ids that the client has changed since",
        target=f"{PACKAGE}.handles:kept_ids",
        old="ids = topk_idx.clone()",
        new="ids = topk_idx",
        tests=(f"{ELASTIC}test_ids_of_the_handle",),
    ),
    Mutation(
        name="hooks-do-nothing-twice",
        rule="a second call of a hook is an error",
        target=f"{PACKAGE}.low_latency:LowLatencyMode.low_latency_dispatch",
        old="not taken",
        new="True",
        tests=(f"{LOW_LATENCY}test_a_hook_comes_before_its_handle",),
    ),
    Mutation(
        name="statistics-are-overwritten",
        rule="statistics of a dispatch are those of its last call, not sums",
        target=f"{PACKAGE}.low_latency:LowLatencyMode._dispatch_whole",
        old="stats.add_(dispatched.routed.expert_counts)",
        new="stats.copy_(dispatched.routed.expert_counts)",
        tests=(f"{LOW_LATENCY}test_dispatch_and_combine",),
    ),
    Mutation(
        name="zero-copy-reads-x",
        rule="a combine with zero_copy reads x, not the buffer's room",
        target=f"{PACKAGE}.low_latency:LowLatencyMode.low_latency_combine",
        old="vars(handle).get('room', x)",
        new="x",
        tests=(f"{LOW_LATENCY}test_zero_copy",),
    ),
    Mutation(
        name="sums-of-real-counts",
        rule="sums of counts by expert leave the alignment out",
        target=f"{PACKAGE}.ep_handle:EPHandle.psum_num_recv_tokens_per_expert",
        old="(counts + (alignment - 1)) // alignment * alignment",
        new="counts + 0 * alignment",
        tests=(f"{ELASTIC}test_dispatch_and_combine",),
    ),
    Mutation(
        name="columns-without-padding",
        rule="scales by column lie without the padding that TMA needs",
        target=f"{PACKAGE}.elastic_calls:_laid_out",
        old="align_up(num_rows, COLUMN_ALIGNMENT)",
        new="num_rows",
        tests=(f"{ELASTIC}test_fp8",),
    ),
    Mutation(
        name="maps-in-any-order",
        rule="routes of a map come in descending order of experts",
        target=f"{PACKAGE}.routing_maps:ids_of_map",
        old="torch.where(found > 0, num_experts - found, -1)",
        new="torch.where(found > 0, num_experts - found, -1).flip(1)",
        tests=(f"{HYBRID}test_dispatch_and_combine", f"{HYBRID}test_maps_that_grow"),
    ),
    Mutation(
        name="dense-probs-lose-routes",
        rule="probs that come home overwrite each other where tokens have no route",
        target=f"{PACKAGE}.routing_maps:dense",
        old="torch.where(ids >= 0, ids, num_experts)",
        new="ids.clamp_min(0)",
        tests=(f"{HYBRID}test_indices_to_map",),
    ),
    Mutation(
        name="imports-touch-another",
        rule="install() replaces another deep_ep without being asked",
        target="tokenloom.compat.installation:install",
        old="loaded is not None and not force",
        new="False",
        tests=("tests/compat/deep_ep/test_installation.py::test_a_call_respects_another",),
    ),
)
