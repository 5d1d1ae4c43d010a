"""Rules of the check of a network: what it would pass in silence."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TEST = "tests/bench/test_network.py::"
FOLDER = "tokenloom.bench.network."

MUTATIONS = (
    Mutation(
        name="a-check-that-compares-nothing",
        rule="a check passes where no rank compared anything",
        target=FOLDER + "findings:merge",
        old="not faults and compared > 0",
        new="not faults",
        tests=(TEST + "test_all_ranks_must_see_it_right",),
    ),
    Mutation(
        name="a-rank-that-makes-no-check",
        rule="a rank that did not make a check counts as one that saw no fault",
        target=FOLDER + "findings:merge",
        old="each is None or each.fault",
        new="each is not None and each.fault",
        tests=(TEST + "test_all_ranks_must_see_it_right",),
    ),
    Mutation(
        name="rows-compared-by-their-counts",
        rule="rows of a dispatch may differ as long as their numbers do not",
        target=FOLDER + "compare:_compare_rows",
        old="bool(differs.any())",
        new="False",
        tests=(TEST + "test_a_changed_result_is_seen",),
    ),
    Mutation(
        name="rows-that-do-not-tell-their-round",
        rule="rows of another round look like those of this one",
        target=FOLDER + "order:make_batch",
        old="number * 7919 + rank * 611",
        new="rank * 611",
        tests=(TEST + "test_rows_of_the_stress_are_those_of_the_reference",),
    ),
    Mutation(
        name="messages-that-do-not-tell-their-sender",
        rule="a message of another rank looks like the one that was expected",
        target=FOLDER + "wire:pattern",
        old="sender * 2654435761 + receiver * 40503",
        new="receiver * 40503",
        tests=(TEST + "test_patterns_differ_by_both_ends_and_turn",),
    ),
    Mutation(
        name="wrong-bits-of-one-turn",
        rule="wrong bits are forgotten once a turn went well",
        target=FOLDER + "judge:sum_up",
        old="(*low, *high)",
        new="(low[-1], high[-1])",
        tests=(TEST + "test_turns_of_a_link",),
    ),
    Mutation(
        name="an-end-that-says-nothing",
        rule="a link passes though one end has no result",
        target=FOLDER + "judge:sum_up",
        old="silent and not fault",
        new="False",
        tests=(TEST + "test_turns_of_a_link",),
    ),
    Mutation(
        name="links-of-all-kinds-compared",
        rule="links between nodes are compared with NVLink",
        target=FOLDER + "judge:verdicts",
        old="other.link.kind == each.link.kind",
        new="True",
        tests=(TEST + "test_outliers_among_links",),
    ),
    Mutation(
        name="the-faster-direction-counts",
        rule="a link that is slow in one direction passes",
        target=FOLDER + "judge:Measured.slower_gbytes_per_s",
        old="min(self.there_gbytes_per_s, self.back_gbytes_per_s)",
        new="max(self.there_gbytes_per_s, self.back_gbytes_per_s)",
        tests=(TEST + "test_outliers_among_links",),
    ),
    Mutation(
        name="a-late-link-of-two",
        rule="of two links none can be late: their mean is more than a quarter of either",
        target=FOLDER + "judge:_verdict",
        old="median_low(each.ping_us for each in alike)",
        new="median(each.ping_us for each in alike)",
        tests=(TEST + "test_of_two_links_one_can_be_late",),
    ),
    Mutation(
        name="wrong-bytes-on-the-wire",
        rule="what arrives on a link is not looked at",
        target=FOLDER + "links:Meter._measure",
        old="Sample(ping_us, rates[0 if starts else 1], fault)",
        new="Sample(ping_us, rates[0 if starts else 1])",
        tests=(TEST + "test_wrong_bytes_fail_with_both_ends_named",),
        num_ranks=4,
    ),
    Mutation(
        name="one-finding-is-enough",
        rule="the check passes if anything did",
        target=FOLDER + "report:passed",
        old="all(each.passed for each in findings)",
        new="any(each.passed for each in findings)",
        tests=(TEST + "test_a_failure_is_shown_with_both_ends",),
    ),
)
