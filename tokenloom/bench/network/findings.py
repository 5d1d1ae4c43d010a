"""What checks find: a verdict of all ranks for each thing that was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PARTS = ("topology", "bits", "order", "links", "rails")
"""The parts of the check, in the order in which they run."""


@dataclass(frozen=True)
class Finding:
    """One verdict, the same on all ranks.

    Attributes:
        part: one of PARTS.
        group: what it is shown with, on one line as long as all of the group passed.
        what: what was checked.
        passed: the verdict.
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
    """What one rank saw of a check.

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
        part: of the findings.
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
