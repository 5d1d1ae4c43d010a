"""Rows of a measurement: how times become numbers, a table, a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from tokenloom.bench.traffic import Traffic


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: as :meth:`tokenloom.bench.series.Series.name` has it.
        p50_us, p99_us: of one call, over samples, of the slowest rank of each. Measured values, not interpolated.
        slowest_rank: the rank that was slowest most often.
        physical_gbytes_per_s, logical_gbytes_per_s: see Traffic; divided by p50; 1 GB is 1e9 bytes.
        num_sms: streaming multiprocessors that the operation occupies; None where it is not ours to say.
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


def of_the_slowest(times_us: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Samples [W][iterations] of all ranks -> p50 and p99 of the slowest rank of each, and who was that most often."""
    times = np.asarray(times_us)
    p50, p99 = np.percentile(times.max(0), [50, 99], method="inverted_cdf").tolist()
    return p50, p99, Counter(times.argmax(0).tolist()).most_common(1)[0][0]


def make_row(
    name: str, times_us: Sequence[Sequence[float]], moved: Traffic, num_sms: int | None, setup: dict[str, Any]
) -> Row:
    """A row from the samples [W][iterations] of all ranks, in microseconds."""
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
    """For people."""
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


def write_json(file: Path, setup: dict[str, Any], notes: Sequence[str], rows: Sequence[Any]) -> None:
    """An object of ``setup`` (what all rows share), ``notes`` (why rows are missing) and ``rows``, dataclasses."""
    content = {"setup": setup, "notes": list(notes), "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(content, indent=1) + "\n")
