"""Rules of the check of a network: what it would pass in silence."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
TEST = "tests/bench/test_network.py::"
FOLDER = "bench.network."

MUTATIONS = (
    M("a-check-that-compares-nothing", "a check passes where no rank compared anything", FOLDER + "findings:merge",
      "not faults and compared > 0", "not faults", TEST + "test_all_ranks_must_see_it_right"),
    M("a-rank-that-makes-no-check", "a rank that did not make a check counts as one that saw no fault",
      FOLDER + "findings:merge", "each is None or each.fault", "each is not None and each.fault",
      TEST + "test_all_ranks_must_see_it_right"),
    M("rows-compared-by-their-counts", "rows of a dispatch may differ as long as their numbers do not",
      FOLDER + "bits:_compare_rows", "bool(differs.any())", "False", TEST + "test_a_changed_result_is_seen"),
    M("rows-that-do-not-tell-their-round", "rows of another round look like those of this one",
      FOLDER + "order:make_batch", "number * 7919 + rank * 611", "rank * 611",
      TEST + "test_rows_of_the_stress_are_those_of_the_reference"),
    M("messages-that-do-not-tell-their-sender", "a message of another rank looks like the one that was expected",
      FOLDER + "speed:pattern", "sender * 2654435761 + receiver * 40503", "receiver * 40503",
      TEST + "test_patterns_differ_by_both_ends_and_turn"),
    M("wrong-bits-of-one-turn", "wrong bits are forgotten once a turn went well", FOLDER + "speed:sum_up",
      "(*low, *high)", "(low[-1], high[-1])", TEST + "test_turns_of_a_link"),
    M("an-end-that-says-nothing", "a link passes though one end has no result", FOLDER + "speed:sum_up",
      "silent and not fault", "False", TEST + "test_turns_of_a_link"),
    M("links-of-all-kinds-compared", "links between nodes are compared with NVLink", FOLDER + "speed:verdicts",
      "other.link.kind == each.link.kind", "True", TEST + "test_outliers_among_links"),
    M("the-faster-direction-counts", "a link that is slow in one direction passes",
      FOLDER + "speed:Speed.slower_gbytes_per_s", "min(self.there_gbytes_per_s, self.back_gbytes_per_s)",
      "max(self.there_gbytes_per_s, self.back_gbytes_per_s)", TEST + "test_outliers_among_links"),
    M("a-late-link-of-two", "of two links none can be late: their mean is more than a quarter of either",
      FOLDER + "speed:_verdict", "median_low(each.ping_us for each in alike)",
      "median(each.ping_us for each in alike)", TEST + "test_of_two_links_one_can_be_late"),
    M("wrong-bytes-on-the-wire", "what arrives on a link is not looked at", FOLDER + "speed:Meter._measure",
      "Sample(ping_us, rates[0 if starts else 1], fault)", "Sample(ping_us, rates[0 if starts else 1])",
      TEST + "test_wrong_bytes_fail_with_both_ends_named", num_ranks=4),
    M("a-demo-that-passes-anything", "the demo passes where a call differs from the reference",
      "demo.check:_exact", 'float("inf") if seen.fault else 0.0', "0.0",
      "tests/demo/test_demo.py::test_the_check_sees_a_wrong_value", num_ranks=2),
    M("one-finding-is-enough", "the check passes if anything did", FOLDER + "findings:passed",
      "all(each.passed for each in findings)", "any(each.passed for each in findings)",
      TEST + "test_a_failure_is_shown_with_both_ends"),
)
