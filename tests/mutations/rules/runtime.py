"""Rules of runtime/, of kernels' launch code and of tune/: deadlines, agreement, measured choices."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LATE_TESTS = ("tests/runtime/test_rank_group.py::test_late_rank",)

RANKS = (
    Mutation(
        name="a-fork-uses-connections-of-its-parent",
        rule="a forked process makes calls with its parent's communicator",
        target="tokenloom.runtime.rank_group:_leave_to_parent",
        old="ranks.process_group is not None or ranks.device.type == 'cuda'",
        new="False",
        tests=("tests/comm/test_forks.py::test_a_communicator",),
    ),
    Mutation(
        name="a-fork-closes-what-is-its-parents",
        rule="closing a communicator in a forked process closes the parent's connections",
        target="tokenloom.runtime.rank_group:RankGroup.is_of_parent",
        old="any((self is each for each in _of_parent))",
        new="False",
        tests=("tests/comm/test_forks.py::test_a_communicator",),
    ),
    Mutation(
        name="no-agreement-when-made",
        rule="ranks that were made with different options are not told",
        target="tokenloom.runtime.rendezvous:agree",
        old="values.get(name) != value",
        new="False",
        tests=("tests/training/test_layer.py::test_ranks_that_disagree_are_told_who_and_what",),
    ),
    Mutation(
        name="closed-is-open",
        rule="a communicator that was closed goes on working",
        target="tokenloom.runtime.waiting:Watch.require_alive",
        old='raise CommunicatorBroken(f"{self.broken}; make a new communicator")',
        new="pass",
        tests=("tests/comm/test_errors.py::test_closed",),
    ),
    Mutation(
        name="nccl-keeps-the-deadlines",
        rule="over NCCL hosts leave deadlines of handshakes to torch, which names nobody",
        target="tokenloom.runtime.rank_group:RankGroup.start_all_gather",
        old="self._start(start, out, phase, opens, host_waits=host_waits)",
        new="self._start(start, out, phase, opens)",
        tests=("tests/backends/test_network_faults.py::test_a_fault_where_streams_wait",),
        num_ranks=4,
    ),
    Mutation(
        name="nccl-errors-abort",
        rule="a rank over NCCL that finds an error aborts the communicator, whose kernels answer for lost ranks",
        target="tokenloom.runtime.collectives:_has_error",
        old="int(result.value()) != NO_ERROR",
        new="False",
        tests=("tests/runtime/test_collectives.py::test_an_error_aborts_nothing",),
    ),
    Mutation(
        name="stale-answers-count",
        rule="words of earlier collectives open a call, where NCCL has ended the collective for a lost rank",
        target="tokenloom.runtime.rank_group:RankGroup.require_answers",
        old="each != stamp",
        new="False",
        tests=("tests/backends/test_network_faults.py::test_answers_that_are_stale",),
        num_ranks=4,
    ),
    Mutation(
        name="timeout-names-everybody",
        rule="PeerTimeout names ranks that are there too",
        target="tokenloom.runtime.waiting:Watch._missing_ranks",
        old="sorted(set(ranks) - there)",
        new="sorted(ranks)",
        tests=LATE_TESTS,
        num_ranks=4,
    ),
    Mutation(
        name="who-gave-up-is-missing",
        rule="PeerTimeout names ranks that waited in vain for the missing one, in an earlier step",
        target="tokenloom.runtime.waiting:Watch._signed_in",
        old="waits or (missing and me not in missing)",
        new="waits",
        tests=("tests/runtime/test_rank_group.py::test_a_rank_that_gives_up_is_not_missing",),
        num_ranks=4,
    ),
    Mutation(
        name="who-missed-this-rank-is-there",
        rule="PeerTimeout of a late rank names nobody, though the others have gone without it",
        target="tokenloom.runtime.waiting:Watch._signed_in",
        old="missing and me not in missing",
        new="missing",
        tests=("tests/runtime/test_rank_group.py::test_a_rank_that_gives_up_is_not_missing",),
        num_ranks=4,
    ),
    Mutation(
        name="leaves-while-others-connect",
        rule="a rank that closes at once breaks the mesh of ranks that still connect",
        target="tokenloom.runtime.rank_group:RankGroup._connect",
        old="self._meet_connected(phase)",
        new="pass",
        tests=("tests/runtime/test_masked_ranks.py::test_nobody_goes_on_before_all_are_connected",),
        num_ranks=4,
    ),
    Mutation(
        name="closed-but-held",
        rule="a closed communicator keeps its process group, whose threads may abort Python as it ends",
        target="tokenloom.runtime.rank_group:RankGroup.close",
        old="self.process_group = None",
        new="pass",
        tests=("tests/backends/test_network_faults.py::test_a_closed_communicator_lets_go_of_its_group",),
        num_ranks=4,
    ),
    Mutation(
        name="alive-after-timeout",
        rule="a communicator goes on after a timeout, with whatever the late rank sends",
        target="tokenloom.runtime.waiting:Watch.fail",
        old='f"an earlier call failed: {timeout}"',
        new="None",
        tests=LATE_TESTS,
        num_ranks=4,
    ),
    Mutation(
        name="sums-without-an-opening",
        rule="ranks sum router losses without a word, whatever others do meanwhile",
        target="tokenloom.runtime.rank_group:RankGroup.all_reduce_sums",
        old="self.num_ranks > 1",
        new="False",
        tests=("tests/comm/test_first_messages.py::test_out_of_step",),
    ),
    Mutation(
        name="counts-as-floats",
        rule="counts of routes are summed over ranks as float32, which has no odd numbers above 2^24",
        target="tokenloom.training.gradients:sum_over_ranks",
        old="sums.expert_counts.to(torch.int64)",
        new="sums.expert_counts.float()",
        tests=("tests/comm/test_first_messages.py::test_counts_are_exact",),
    ),
    Mutation(
        name="verdicts-among-steps",
        rule="a rank that failed is taken for one that makes the next step",
        target="tokenloom.runtime.rank_group:RankGroup.all_gather_object",
        old="not isinstance(value, Verdict)",
        new="False",
        tests=("tests/backends/test_registry.py::test_a_rank_that_fails_between_two_steps[1]",),
        num_ranks=4,
    ),
)

LAUNCH = (
    Mutation(
        name="too-few-flags-of-blocks",
        rule="blocks of an eager combine have no fewer flags than there are blocks",
        target="tokenloom.kernels.combine.launch:max_chunks",
        old="max(plan.max_tokens_per_rank, MAX_BLOCKS)",
        new="plan.max_tokens_per_rank",
        tests=("tests/kernels/test_kernels.py::test_every_chunk_has_a_flag",),
    ),
)

TUNE = (
    Mutation(
        name="score-of-forward-alone",
        rule="the score of a strategy leaves out its gradient",
        target="tokenloom.tune.profiler:make_rows",
        old='its["with_gemm"] + its["gradient"]',
        new='its["with_gemm"]',
        tests=("tests/tune/test_tune.py::test_numbers",),
    ),
    Mutation(
        name="fastest-rank",
        rule="a sample is the time of the fastest rank",
        target="tokenloom.tune.profiler:_slowest_rank_ms",
        old="max",
        new="min",
        tests=("tests/tune/test_tune.py::test_numbers",),
    ),
    Mutation(
        name="a-choice-made-elsewhere",
        rule="a choice for other hardware or software is used",
        target="tokenloom.tune.choices:find",
        old="_warn_of_another(path, other[0], setting)",
        new="return other[1]",
        tests=("tests/tune/test_tune.py::test_a_choice_made_elsewhere",),
    ),
    Mutation(
        name="some-ranks-give-memory-back",
        rule="a rank gives memory of the network back that another one has kept",
        target="tokenloom.runtime.gin:GinMemory._all_close",
        old="notes.decide_at(verdict, bool(notes.call('check', keys)))",
        new="notes.call('check', keys)",
        tests=("tests/runtime/test_gin.py::test_a_rank_that_does_not_close",),
    ),
    Mutation(
        name="nodes-are-not-told-apart",
        rule="a choice that was made on one node is used on two",
        target="tokenloom.tune.choices:setting_of",
        old="comm.engine.ranks.topology.num_nodes",
        new="1",
        tests=("tests/tune/test_tune.py::test_nodes_are_told_apart",),
    ),
)

MUTATIONS = RANKS + LAUNCH + TUNE
