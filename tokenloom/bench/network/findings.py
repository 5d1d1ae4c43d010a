"""Findings of checks: a verdict of all ranks for each thing that was checked, and tables of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

PARTS = ("topology", "bits", "order", "links", "rails")
"""The parts of the check, in the order in which they run."""
MOST_LINKS = 16
"""Links that a table shows. Of more, those that failed and the slowest; the file of --json has all."""


@dataclass(frozen=True)
class Finding:
    """One verdict, the same on all ranks.

    Attributes:
        group: what it is shown with, on one line as long as all of the group passed.
        details: why it failed, naming the ranks at fault; else what there is to say.
        numbers: what was measured; names end in the unit.
    """

    part: str
    group: str
    what: str
    passed: bool
    details: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """Result of a check on one rank.

    Attributes:
        compared: values that it compared; 0 where it had none.
        fault: what is wrong, "" if nothing is.
    """

    compared: int
    fault: str = ""

    def __add__(self, other: Seen) -> Seen:
        return Seen(self.compared + other.compared, self.fault or other.fault)


def merge(part: str, by_rank: Sequence[Mapping[tuple[str, str], Seen]]) -> list[Finding]:
    """Make one verdict of what all ranks saw.

    A check fails if any rank saw a fault or did not make the check, or if no rank had anything to compare: a check
    that compares nothing would pass whatever happens.

    Args:
        by_rank: of each rank, by group and name of the check.
    """
    findings = []
    for group, what in dict.fromkeys(key for seen in by_rank for key in seen):
        seen = [each.get((group, what)) for each in by_rank]
        compared = sum(each.compared for each in seen if each is not None)
        faults = [
            (rank, "did not make this check" if each is None else each.fault)
            for rank, each in enumerate(seen)
            if each is None or each.fault
        ]
        details = f"{compared:,} values"
        if faults:
            others = f"; {len(faults) - 1} more ranks see faults" if len(faults) > 1 else ""
            details = f"rank {faults[0][0]}: {faults[0][1]}{others}"
        elif not compared:
            details = "nothing was compared"
        findings.append(Finding(part, group, what, not faults and compared > 0, details, {"values": compared}))
    return findings


def passed(findings: Sequence[Finding]) -> bool:
    """Whether something was checked and nothing failed."""
    return bool(findings) and all(each.passed for each in findings)


def summary(findings: Sequence[Finding]) -> Table:
    """A line for each group that passed, and one for each finding that failed."""
    table = Table("part", "check", "", "details", title="Checks", title_justify="left")
    groups = dict.fromkeys((each.part, each.group) for each in findings)
    for part, group in sorted(groups, key=lambda key: PARTS.index(key[0])):
        alike = [each for each in findings if (each.part, each.group) == (part, group)]
        good = [each for each in alike if each.passed]
        for each in alike:
            if not each.passed:
                table.add_row(part, f"{group}: {each.what}", _verdict(False), each.details)
        if len(good) == 1:
            what = group if good[0].what == group else f"{group}: {good[0].what}"
            table.add_row(part, what, _verdict(True), good[0].details)
        elif good:
            table.add_row(part, group, _verdict(True), _together(good))
    return table


def _together(findings: Sequence[Finding]) -> str:
    if findings[0].part == "bits":
        words = zip(*(each.what.split() for each in findings), strict=True)
        layouts, payloads = (", ".join(dict.fromkeys(each)) for each in words)
        return f"{layouts}; {payloads}; {sum(each.numbers['values'] for each in findings):,} values"
    if findings[0].part == "rails":
        slowest = min(findings, key=lambda each: each.numbers["gbytes_per_s"])
        return f"{len(findings)}; the slowest: {slowest.what}: {slowest.details}"
    return f"{len(findings)}"


def links(findings: Sequence[Finding]) -> Table | None:
    """The links, those that failed first, then the slowest; None without any."""
    found = sorted((each for each in findings if each.part == "links"), key=_order)
    if not found:
        return None
    shown = [each for each in found if not each.passed]
    shown += [each for each in found if each.passed][: max(0, MOST_LINKS - len(shown))]
    title = "Links" if len(shown) == len(found) else f"Links: {len(shown)} of {len(found)}, the worst"
    table = Table("", "link", "ping µs", "GB/s there", "GB/s back", "", title=title, title_justify="left")
    for column in table.columns[2:5]:
        column.justify = "right"
    for each in shown:
        ping, there, back = (each.numbers[name] for name in ("ping_us", "there_gbytes_per_s", "back_gbytes_per_s"))
        row = (each.group, each.what, f"{ping:,.1f}", f"{there:.3g}", f"{back:.3g}")
        table.add_row(*row, _verdict(each.passed))
    return table


def _order(finding: Finding) -> tuple[bool, str, float]:
    numbers = finding.numbers
    return finding.passed, finding.group, min(numbers["there_gbytes_per_s"], numbers["back_gbytes_per_s"])


def _verdict(good: bool) -> str:
    return "[green]PASS[/]" if good else "[bold red]FAIL[/]"


def notes(findings: Sequence[Finding], several_nodes: bool) -> Iterator[str]:
    """Lines that a reader needs beside the tables."""
    if not several_nodes:
        yield "All ranks are on one node: there is nothing between nodes, and what is inside was checked."
    kinds = [each.group for each in findings if each.part == "links"]
    for kind in dict.fromkeys(kinds):
        if kinds.count(kind) == 1:
            yield f"There is one link {kind}, so its speed has nothing to be compared with."
