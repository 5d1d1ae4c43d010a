"""Rows of ``tokenloom bench comm``: how samples become numbers and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from tokenloom.bench.comm.traffic import Traffic
from tokenloom.bench.common.rows import of_the_slowest


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: from :meth:`tokenloom.bench.comm.series.Series.name`.
        p50_us, p99_us: time of one call over samples, each of its slowest rank. Measured values, not interpolated.
        slowest_rank: the rank that was slowest most often.
        physical_gbytes_per_s, logical_gbytes_per_s: the bytes of :class:`Traffic` per p50; 1 GB is 1e9 bytes.
        num_sms: streaming multiprocessors that the operation occupies; None where that is not ours to say.
        setup: everything needed to repeat the row, besides what all rows of a run share.
    """

    name: str
    p50_us: float
    p99_us: float
    slowest_rank: int
    physical_gbytes_per_s: float
    logical_gbytes_per_s: float
    num_sms: int | None
    setup: dict[str, Any]


def make_row(
    name: str, times_us: Sequence[Sequence[float]], moved: Traffic, num_sms: int | None, setup: dict[str, Any]
) -> Row:
    """Make a row from the samples [W][iterations] of all ranks, in microseconds."""
    p50, p99, slowest_rank = of_the_slowest(times_us)
    return Row(
        name=name,
        p50_us=p50,
        p99_us=p99,
        slowest_rank=slowest_rank,
        physical_gbytes_per_s=moved.physical_bytes / p50 / 1e3,
        logical_gbytes_per_s=moved.logical_bytes / p50 / 1e3,
        num_sms=num_sms,
        setup=setup | asdict(moved),
    )


def table(rows: Sequence[Row]) -> Table:
    """All rows, for people."""
    headers = ("operation", "p50 µs", "p99 µs", "slowest\nrank", "physical\nGB/s", "logical\nGB/s", "SMs")
    result = Table(*headers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.columns[0].overflow = "fold"
    for column in result.columns[1:]:
        column.justify = "right"
    for row in rows:
        result.add_row(
            row.name,
            f"{row.p50_us:,.1f}",
            f"{row.p99_us:,.1f}",
            str(row.slowest_rank),
            f"{row.physical_gbytes_per_s:.3g}",
            f"{row.logical_gbytes_per_s:.3g}",
            "-" if row.num_sms is None else str(row.num_sms),
        )
    return result
