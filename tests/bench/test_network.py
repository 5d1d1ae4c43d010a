"""``tokenloom check-network``: what passes, what fails and who is named, and the constants."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.cli.borrowed import borrowed
from tests.conftest import NETWORK_RANKS, Ranks
from tokenloom import reference
from tokenloom.bench import setup
from tokenloom.bench.network import check as checks
from tokenloom.bench.network import findings, order, speed
from tokenloom.bench.network.bits import (
    PAYLOADS,
    ROUTINGS,
    check_bits,
    compare_routed,
    compare_sums,
    make_problem,
    sizes,
)
from tokenloom.bench.network.check import CheckOptions, CheckReport, check
from tokenloom.bench.network.findings import PARTS, Finding, Seen, merge
from tokenloom.bench.network.speed import (
    BETWEEN,
    INSIDE,
    AllToAllTimes,
    Link,
    Points,
    Sample,
    Speed,
    Wire,
    fit_constants,
    fit_line,
    matchings,
    pattern,
    rounds_of,
    sum_up,
    teams_of,
    verdicts,
)
from tokenloom.bench.setup import Run
from tokenloom.cli import app
from tokenloom.comm.communicator import Communicator
from tokenloom.errors import InvalidArgument, PeerTimeout
from tokenloom.plan import LAYOUTS
from tokenloom.runtime import topology as topologies
from tokenloom.runtime.processes import RankContext, RankPool
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.topology import Topology, pretended
from tokenloom.tune.network.constants import FITTED, read_constants

EXPERIMENTAL = True

TWO_BY_TWO = pretended(4, 2)
UNEQUAL = Topology((0, 0, 0, 1, 1))
CPU = torch.device("cpu")


def printed(*shown: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    for each in shown:
        console.print(each)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- verdicts -----------------------------------------------------------------------------------------------------

KEY = ("network: dispatch", "token BF16")


@pytest.mark.parametrize(
    ("by_rank", "details"),
    [
        ([{KEY: Seen(3)}, {KEY: Seen(0)}], ""),  # one rank may have no rows
        ([{KEY: Seen(3)}, {KEY: Seen(3, "row 1 is another")}], "rank 1: row 1 is another"),
        ([{KEY: Seen(3)}, {}], "rank 1: did not make this check"),
        ([{}, {KEY: Seen(3)}], "rank 0: did not make this check"),
        ([{KEY: Seen(0)}, {KEY: Seen(0)}], "nothing was compared"),
    ],
)
def test_all_ranks_must_see_it_right(by_rank: list[dict[tuple[str, str], Seen]], details: str) -> None:
    """A verdict is that of the worst rank; what nobody compared has not passed."""
    (finding,) = merge("bits", by_rank)
    assert finding.passed == (not details)
    assert finding.details == (details or "3 values")


def measured(link: Link, rate: float = 40.0, back: float = 40.0, ping_us: float = 20.0, fault: str = "") -> Speed:
    return Speed(link, ping_us, rate, back, fault)


LINKS = [Link(BETWEEN, 0, 2), Link(BETWEEN, 1, 3), Link(BETWEEN, 0, 4)]


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (measured(LINKS[1]), ""),
        (measured(LINKS[1], rate=20.5), ""),
        (measured(LINKS[1], rate=19.5), "19.5 GB/s, while the median link between nodes has 40"),
        (measured(LINKS[1], back=19.5), "19.5 GB/s, while"),  # one direction is enough
        (measured(LINKS[1], ping_us=500.0), "a ping takes 500 µs, while the median between nodes is 20"),
        (measured(LINKS[1], ping_us=65.0), ""),
        (measured(LINKS[1], fault="2 of 8 bytes came wrong"), "2 of 8 bytes came wrong"),
    ],
)
def test_outliers_among_links(bad: Speed, fault: str) -> None:
    """By bits, rate and ping, beside links of the same kind alone: those inside nodes are ten times as fast."""
    inside = [measured(Link(INSIDE, low, low + 1), rate=400, back=400) for low in range(4)]
    found = verdicts([measured(LINKS[0]), bad, measured(LINKS[2]), *inside], "cuda")
    assert found.pop(LINKS[1]).startswith(fault)
    assert bool(verdicts([measured(LINKS[0]), bad], "cuda")[LINKS[1]]) <= bool(fault)
    assert not any(found.values())


def test_of_two_links_one_can_be_late() -> None:
    """The median of two is not their mean, which no ping could exceed four times."""
    assert verdicts([measured(LINKS[0]), measured(LINKS[1], ping_us=500)], "cuda")[LINKS[1]]
    assert not verdicts([measured(LINKS[0]), measured(LINKS[1], ping_us=500)], "cpu")[LINKS[1]]  # a time slice


def test_turns_of_a_link() -> None:
    """The best of all turns counts for speed, the worst for bits, and an end that says nothing is a fault."""
    link = LINKS[0]
    slow, fast = (
        {(link, 0): Sample(30, 5), (link, 2): Sample(None, 6)},
        {(link, 0): Sample(20, 9), (link, 2): Sample(None, 8)},
    )
    assert sum_up([slow, fast]) == [Speed(link, 20, 9, 8, "")]
    wrong = {(link, 0): Sample(30, 5), (link, 2): Sample(None, 6, "3 bytes came wrong")}
    assert sum_up([wrong, fast])[0].fault == "3 bytes came wrong"
    assert sum_up([slow, {(link, 0): Sample(20, 9)}])[0].fault == "rank 2 has no result"
    assert verdicts(sum_up([slow, {(link, 0): Sample(20, 9)}]), "cpu")[link]


def test_slow_rails_are_named() -> None:
    """All rails busy at once, one has a NIC at half the rate; a rank with wrong bits is named with its rail."""
    times = [[10.0], [10.0], [10.0], [30.0], [10.0], [10.0]]
    exchange = AllToAllTimes(1000, times, [""] * 6)
    teams = [(0, 3), (1, 4), (2, 5)]
    found = list(speed.judged(teams, "rail", [exchange]))
    assert [each.passed for each in found] == [False, True, True]
    assert (found[0].what, found[0].details) == ("rail 0, ranks 0, 3", "0.0333 GB/s, while the median rail has 0.1")
    wrong = AllToAllTimes(1000, [[10.0]] * 6, ["", "", "", "", "", "4 bytes from rank 2 came wrong to rank 5"])
    found = list(speed.judged(teams, "rail", [wrong, AllToAllTimes(1000, [[10.0]] * 6, [""] * 6)]))
    assert [each.passed for each in found] == [True, True, False]
    assert "from rank 2 came wrong to rank 5" in found[2].details


# -- which links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_pair_meets_once(count: int) -> None:
    """In rounds of disjoint pairs, so that nobody shares its NIC while it is measured."""
    rounds = matchings(count)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    for pairs in rounds:
        members = [each for pair in pairs for each in pair]
        assert len(members) == len(set(members))


def test_links_of_nodes() -> None:
    """Every pair of nodes on each rail, and every pair within a node, with both ends named; of any nodes."""
    names = {link.name(TWO_BY_TWO) for links_ in rounds_of(TWO_BY_TWO) for link in links_}
    assert names == {
        "node 0 rank 0 <-> node 1 rank 2",
        "node 0 rank 1 <-> node 1 rank 3",
        "node 0 rank 0 <-> node 0 rank 1",
        "node 1 rank 2 <-> node 1 rank 3",
    }
    three = [(link.kind, link.low, link.high) for links_ in rounds_of(pretended(6, 2)) for link in links_]
    assert sorted(three) == sorted(
        [(BETWEEN, a + rail, b + rail) for rail in (0, 1) for a, b in ((0, 2), (0, 4), (2, 4))]
        + [(INSIDE, first, first + 1) for first in (0, 2, 4)]
    )
    unequal = {link for links_ in rounds_of(UNEQUAL) for link in links_}
    assert {(link.low, link.high) for link in unequal if link.kind == BETWEEN} == {(0, 3), (1, 4)}
    assert len([link for link in unequal if link.kind == INSIDE]) == 3 + 1
    assert teams_of(UNEQUAL, BETWEEN) == [(0, 3), (1, 4), (2,)]
    assert teams_of(UNEQUAL, INSIDE) == [(0, 1, 2), (3, 4)]


def test_patterns_differ_by_both_ends_and_turn() -> None:
    """So that a message to somebody else, or of another turn, shows."""
    drawn = [pattern(*who, 64, CPU) for who in [(0, 2, 0), (2, 0, 0), (0, 3, 0), (1, 2, 0), (0, 2, 1)]]
    assert all(int((a != b).sum()) > 32 for a, b in combinations(drawn, 2))


# -- constants ----------------------------------------------------------------------------------------------------


def line(base_us: float, rate: float, sizes_: tuple[int, ...]) -> list[tuple[int, float]]:
    return [(each, base_us + each / rate / 1e3) for each in sizes_]


def test_a_line_is_found_again() -> None:
    """Times that grow with bytes; those that do not, or that would start below 0, still give a rate above 0."""
    assert fit_line(line(30, 46, (1 << 14, 1 << 17, 1 << 20))) == pytest.approx((30, 46))
    assert fit_line([(1000, 40.0), (2000, 30.0)], rate=1.0) == (pytest.approx(33.5), 1.0)
    base_us, rate = fit_line([(1000, 1.0), (2000, 3.0)])
    assert (base_us, rate) == (0.0, pytest.approx(0.75))  # 3000 bytes in 4 µs


@pytest.mark.parametrize("last_us", [700.0, 700.001, 701.0])
def test_noise_is_no_rate(last_us: float) -> None:
    """Where times hardly grow, the rate of large messages holds; without one, bytes by the time that they took."""
    sizes_ = (4096, 32768, 262144)
    for first_us in (700.0, 1000.123, 33.3):
        points = [(each, first_us) for each in sizes_[:2]] + [(sizes_[2], first_us * last_us / 700)]
        base_us, rate = fit_line(points, rate=45.0)
        assert (base_us, rate) == (pytest.approx(first_us, abs=7.0), 45.0)
        assert fit_line(points) == (0.0, pytest.approx(sum(sizes_) / first_us / 3e3, rel=0.01))


def test_constants_are_read_back(tmp_path: Path) -> None:
    """By tokenloom plan, to the digit; what messages cannot tell stays as published, and says so."""
    small, large = (1 << 14, 1 << 17, 1 << 20), (1 << 22, 1 << 24, 1 << 26)
    points = Points(line(30, 44, small), line(40, 45, large), line(5, 347, large), 31.0, 55.0, burst=17, peers=3)
    found = fit_constants(points, "here")
    assert (found.low_latency.base_us, found.low_latency.nic_gbytes_per_s) == (30, 44)
    assert (found.high_throughput.base_us, found.high_throughput.nic_gbytes_per_s) == (40, 45)
    assert found.nvlink_gbytes_per_s == 347
    assert found.low_latency.put_us == found.high_throughput.put_us == 0.5  # 24 µs for 16 more to each of 3
    assert found.high_throughput.exposed_share == FITTED.high_throughput.exposed_share
    assert found.where == "here; exposed_share as in published figures"
    alone = fit_constants(Points(points.small, points.large, [], 31.0, 30.0, 17, 3), "here")
    assert (alone.nvlink_gbytes_per_s, alone.low_latency.put_us) == (FITTED.nvlink_gbytes_per_s, 0)
    assert "nvlink_gbytes_per_s as in published" in alone.where

    file = tmp_path / "constants.json"
    good = [Finding("topology", "nodes", "nodes", True)]
    console = Console(file=io.StringIO(), width=120)
    assert checks.show(Run(console, 4, "cpu", []), CheckReport([], "2 nodes", "gloo", good, points), file)
    assert read_constants(file).low_latency == found.low_latency
    done = CliRunner().invoke(app.app, ["plan", "--nodes", "2", "--constants", str(file)])
    assert done.exit_code == 0
    assert "NIC 44 GB/s, NVLink 347 GB/s, 0 of the shorter exposed, a put 0.5 µs" in done.stdout


def test_constants_of_a_bad_network_are_not_written(tmp_path: Path) -> None:
    file, console = tmp_path / "constants.json", Console(file=io.StringIO(), width=120)
    points = Points([(1, 1.0), (2, 2.0)], [(1, 1.0), (2, 2.0)], [], 1.0, 1.0, 2, 1)
    bad = CheckReport([], "n", "gloo", [Finding("topology", "n", "n", False)], points)
    assert not checks.show(Run(console, 4, "cpu", []), bad, file)
    assert not file.exists()


# -- bits and order, on one rank ----------------------------------------------------------------------------------


def alone() -> Communicator:
    plan = sizes(1)
    return Communicator(
        None,
        num_experts=plan.num_experts,
        hidden=plan.hidden,
        top_k=plan.top_k,
        max_tokens_per_rank=plan.max_tokens_per_rank,
    )


def test_problems_are_what_they_say() -> None:
    """Skewed: only experts of the last node; empty: ranks without tokens; routes do not depend on the payload."""
    plan = sizes(4)
    for routing in ROUTINGS:
        bf16, fp8 = (make_problem(TWO_BY_TWO, routing, payload, seed=1) for payload in PAYLOADS)
        assert all(map(torch.equal, bf16.ids, fp8.ids))
        used = torch.cat(bf16.ids)
        assert ((used >= plan.num_experts // 2) | (used < 0)).all() == (routing == "skewed")
        assert any(not len(x) for x in bf16.xs) == (routing == "empty")
        assert bf16.xs[1].dtype == torch.bfloat16
        assert fp8.xs[1].dtype == torch.float8_e4m3fn
    last = make_problem(pretended(4, 4), "skewed", "bf16", seed=1)
    assert int(torch.cat([ids[ids >= 0] for ids in last.ids]).min()) >= 3 * plan.experts_per_rank


def test_a_changed_result_is_seen() -> None:
    """One value of any part of a dispatch, or of what comes home; the sender of the row is named."""
    problem, comm = make_problem(pretended(1, 1), "uniform", "fp8", seed=1), alone()
    assert problem.scales is not None
    for layout in LAYOUTS:
        (want,) = problem.dispatched(layout)
        options: dict[str, Any] = {"layout": layout} | ({"capacity": problem.slots} if layout == "slots" else {})
        got = comm.dispatch((problem.xs[0], problem.scales[0]), problem.ids[0], problem.weights[0], **options)
        seen = compare_routed(got, want)
        assert seen.compared > len(problem.xs[0]) * problem.plan.hidden
        assert not seen.fault
        token = max(want.rows)[1]
        place = next(place for key, place in want.rows.items() if key[1] == token)
        for name in ("tokens", "scales", "topk_ids", "topk_weights"):
            if getattr(want, name) is None:
                continue
            changed = getattr(want, name).clone()
            changed.flatten(0, -2).view(torch.uint8)[place, 0] ^= 1
            fault = compare_routed(got, replace(want, **{name: changed})).fault
            assert fault.startswith(f"{name} differ in 1 of ")
            assert fault.endswith(f"token {token} of rank 0")
        counts = [*want.expert_counts[:-1], want.expert_counts[-1] + 1]
        assert compare_routed(got, replace(want, expert_counts=counts)).fault.startswith("expert_counts is")
    home = torch.randn(4, 8).bfloat16()
    home[2, 3] = torch.nan
    assert compare_sums(home, home.clone()) == Seen(32)
    changed = home.clone()
    changed[1, 5] = -changed[1, 5]
    assert compare_sums(home, changed).fault == "1 of 4 tokens have other sums; first, token 1"
    assert compare_sums(home.nan_to_num(), home).fault
    assert compare_sums(home[:3], home).fault


def test_bits_of_one_rank() -> None:
    """Every layout, mode and payload is there, and has something to compare."""
    seen = check_bits([alone()], pretended(1, 1), seed=1)
    assert len(seen) == 2 * (4 + 4 + 4 + 2)
    assert all(each.compared and not each.fault for each in seen.values())


def test_rows_of_the_stress_are_those_of_the_reference() -> None:
    """They are computed without it, since many rounds would take too long."""
    plan = sizes(4)
    batch, later = (order.make_batch(plan, number, seed=1) for number in (0, 1))
    wanted = reference.dispatch(plan, batch.xs, batch.ids, None, "token")
    home = reference.combine(plan, [each.tokens for each in wanted], wanted, batch.ids, None)
    for rank in range(4):
        assert torch.equal(order.expected_rows(plan, batch, rank), wanted[rank].tokens)
        assert torch.equal(order.expected_home(plan, batch, rank), home[rank])
    rows = {tuple(row) for each in (*batch.xs, *later.xs) for row in each.tolist()}
    assert len(rows) == sum(map(len, (*batch.xs, *later.xs))), "a row of another round must show"


class Stale:
    """A communicator whose dispatch gives the rows of the dispatch before."""

    def __init__(self, comm: Communicator, stale: bool) -> None:
        self._comm, self._stale, self._sent = comm, stale, list[Any]()
        self.rank, self.device, self.plan, self.backend = comm.rank, comm.device, comm.plan, comm.backend
        self.send_combine = comm.send_combine

    def send_dispatch(self, x: torch.Tensor, ids: torch.Tensor, **options: Any) -> Any:
        self._sent.append(x)
        before = self._sent[max(0, len(self._sent) - 2)] if self._stale else x
        return self._comm.send_dispatch(before.new_ones(x.shape) * before[:1], ids, **options)


@pytest.mark.parametrize("stale", [False, True])
def test_the_stress_sees_rows_of_another_call(monkeypatch: pytest.MonkeyPatch, stale: bool) -> None:
    """With as many rows, from the same tokens."""
    real = order.make_batch

    def alike(plan: Any, number: int, seed: int) -> order.Batch:
        """Every row of a call is the same, so that one can stand for another."""
        batch = real(plan, number, seed)
        return order.Batch([torch.ones_like(x) * (number + 1) for x in batch.xs], batch.ids)

    monkeypatch.setattr(order, "make_batch", alike)
    comm: Any = Stale(alone(), stale)
    seen = order.Stress(comm, seed=3).run(2)
    assert seen.compared > 0
    assert bool(seen.fault) == stale
    assert not stale or seen.fault.startswith("round 0, batch 1, dispatch: row 0 is another")


# -- tables -------------------------------------------------------------------------------------------------------


def link_finding(low: int, rate: float, passed: bool = True) -> Finding:
    numbers = {"ping_us": 20.0, "there_gbytes_per_s": rate, "back_gbytes_per_s": 2 * rate}
    what = f"node 0 rank {low} <-> node 1 rank {low + 100}"
    return Finding("links", BETWEEN, what, passed, "" if passed else "2 of 8 bytes came wrong", numbers)


def test_a_failure_is_shown_with_both_ends() -> None:
    """Among many links, of which a table shows the worst; those that passed share a line."""
    many = [link_finding(low, 10.0 + low) for low in range(40)]
    many[30] = link_finding(30, 99.0, passed=False)
    shown = printed(findings.summary(many), findings.links(many))
    assert re.search(r"between nodes: node 0 rank 30 <-> node 1 rank 130 +│ FAIL │ 2 of 8 bytes came wrong", shown)
    assert re.search(r"links +│ between nodes +│ PASS │ 39", shown)
    assert "16 of 40, the worst" in shown
    listed = re.findall(r"│ between nodes │ node 0 rank (\d+)", shown)
    assert listed == ["30", *map(str, range(15))]
    assert not findings.passed(many)
    assert findings.passed(many[:30])
    assert not findings.passed([])


def test_notes() -> None:
    """What a table cannot say: nothing between nodes, nothing to compare with."""
    assert any("nothing between nodes" in note for note in findings.notes([], several_nodes=False))
    (note,) = findings.notes([link_finding(0, 1.0)], several_nodes=True)
    assert note == "There is one link between nodes, so its speed has nothing to be compared with."


# -- on four ranks ------------------------------------------------------------------------------------------------


def speed_alone(finding: Any) -> bool:
    """Whether a finding failed for its speed, which on a machine with other work says nothing."""
    return "while the median" in finding["details"]


def refusal(context: RankContext) -> tuple[list[str], str]:
    """The parts that began on this rank, and what ended them."""
    began: list[str] = []
    with pytest.raises(InvalidArgument) as refused:
        check(context.group, context.device, CheckOptions(fits_constants=True), began.append)
    return began, str(refused.value)


def test_constants_of_one_node_are_refused_at_once(four: Ranks) -> None:
    """On all ranks, before anything is checked."""
    for began, said in four.run(refusal):
        assert began == ["topology"]
        assert "--constants needs two nodes, but all ranks are on one" in said


@pytest.mark.slow  # hundreds of calls between processes that share two cores
def test_the_command_on_two_nodes(
    pools: Callable[[str], RankPool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All parts over both backends, small; every path and every link is in the file."""
    from tokenloom.cli.terminal import console

    file = tmp_path / "found.json"
    options = CheckOptions(ranks_per_node=2, rounds=3, large_bytes=1 << 14)
    with borrowed(setup, pools):
        passed = checks.run_on_own_ranks(Run(console(), 4, "cpu", ["check-network"], file), options)
    content = json.loads(file.read_text())
    assert passed == content["setup"]["passed"] == all(row["passed"] for row in content["rows"])
    assert all(row["passed"] or speed_alone(row) for row in content["rows"]), content["rows"]
    by_part = {part: [row["what"] for row in content["rows"] if row["part"] == part] for part in PARTS}
    assert [len(by_part[part]) for part in PARTS] == [1, 2 * 2 * (4 + 4 + 4 + 2), 2, 4, 4]
    assert "node 0 rank 1 <-> node 1 rank 3" in by_part["links"]
    assert by_part["rails"][-2:] == ["rail 0, ranks 0, 2", "rail 1, ranks 1, 3"]
    shown = capsys.readouterr().out
    for said in ("2 nodes of 2", "backend network:", "3 rounds"):
        assert said in shown


def tampered(context: RankContext) -> list[Finding]:
    """Rank 3 sends wrong bytes to rank 1."""

    def bad(sender: int, receiver: int, *rest: Any) -> torch.Tensor:
        drawn = pattern(sender, receiver, *rest)
        return drawn + 1 if (sender, receiver) == (3, 1) else drawn

    ranks = RankGroup(context.group, device=context.device)
    few = mock.patch.multiple(speed, LINK_TURNS=1, MORE_TURNS=1)
    with few, mock.patch.object(speed, "pattern", bad if context.rank == 3 else pattern):
        found = speed.check_links(Wire(ranks), TWO_BY_TWO, large_bytes=1 << 10)
    ranks.close()
    return found


def test_wrong_bytes_fail_with_both_ends_named(four: Ranks) -> None:
    """On all ranks alike, whichever saw it."""
    for found in four.run(tampered):
        wrong = {each.what: each.details for each in found if "bytes" in each.details}
        assert wrong == {"node 0 rank 1 <-> node 1 rank 3": "1,024 of 1,024 bytes from rank 3 came wrong to rank 1"}


def nodes_of_unequal_size(context: RankContext) -> Any:
    """Rank 3 is on another host than the others, as everybody finds."""
    with mock.patch.object(topologies, "host_identity", return_value=f"host{context.rank // 3}/0"):
        return on_rank_check(context)


def on_rank_check(context: RankContext, ranks_per_node: int | None = None) -> Any:
    from tokenloom.bench.network.check import check_on_rank

    with mock.patch.multiple(
        "tokenloom.bench.network.check",
        check_bits=lambda *arguments: {("bits", "none"): Seen(1)},
        check_order=lambda *arguments: [],
        check_links=lambda *arguments: [],
        check_rails=lambda *arguments: ([], None),
    ):
        return check_on_rank(context, CheckOptions(ranks_per_node))


def test_unequal_nodes_fail_and_are_named(four: Ranks) -> None:
    """Everything else is checked over what auto takes then."""
    found = four.run(nodes_of_unequal_size)[0]
    assert not found.findings[0].passed
    assert "node 0 has ranks 0, 1, 2, node 1 has rank 3" in found.findings[0].details
    assert "  node 1: ranks 3 on host1" in found.about
    assert any("backend collective" in line for line in found.about)


def one_is_away(context: RankContext) -> tuple[str, float]:
    """Rank 3 does not answer the ping of rank 1."""

    def sleep(*arguments: Any) -> Sample:
        time.sleep(3.0)
        return Sample(None, 1.0)

    ranks = RankGroup(context.group, device=context.device, timeout_s=1.0, open_timeout_s=20.0)
    began = time.monotonic()
    try:
        with mock.patch.object(speed.Meter, "_measure", sleep if context.rank == 3 else speed.Meter._measure):
            speed.check_links(Wire(ranks), TWO_BY_TWO, large_bytes=1 << 10)
    except PeerTimeout as error:
        return str(error), time.monotonic() - began
    finally:
        ranks.close()
    return "", 0.0


@pytest.mark.slow  # it waits for a deadline
def test_a_rank_that_does_not_answer_is_named() -> None:
    """By its peer after timeout_s; the others hear of that, and do not wait until their own time is over.

    On ranks of its own: a message that nobody takes keeps a thread of gloo busy for as long as they live.
    """
    with RankPool(NETWORK_RANKS) as pool:
        said = pool.run(one_is_away)
    assert "rank 1 waited in a ping between nodes" in said[1][0]
    assert "for rank(s) 3" in said[1][0]
    for text, seconds in (said[0], said[2]):
        assert re.search(r"for rank\(s\) [\d, ]*3: |rank 1 gave up", text)
        assert seconds < 10
