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
        name: operation/backend/layout/ranks/tokens per rank/hidden/top-k/dtype.
        p50_us, p99_us: over iterations, of the slowest rank of each iteration. Measured values, not interpolated.
        slowest_rank: the rank that was slowest most often.
        physical_gbytes_per_s, logical_gbytes_per_s: see Traffic; divided by p50; 1 GB is 1e9 bytes.
        num_sms: streaming multiprocessors that the operation occupies; None where it is not ours to say.
        setup: everything needed to repeat the row.
    """

    name: str
    p50_us: float
    p99_us: float
    slowest_rank: int
    physical_gbytes_per_s: float
    logical_gbytes_per_s: float
    num_sms: int | None
    setup: dict[str, Any]


def make_row(operation: str, times_us: Sequence[Sequence[float]], moved: Traffic, setup: dict[str, Any]) -> Row:
    """A row from the times [W][iterations] of all ranks, in microseconds."""
    times = np.asarray(times_us)
    slowest = times.max(0)
    p50, p99 = np.percentile(slowest, [50, 99], method="inverted_cdf").tolist()
    parts = (
        operation,
        setup["backend"],
        setup["layout"],
        f"ep{setup['num_ranks']}",
        f"t{setup['num_tokens']}",
        f"h{setup['hidden']}",
        f"k{setup['top_k']}",
        setup["dtype"],
    )
    return Row(
        name="/".join(parts),
        p50_us=p50,
        p99_us=p99,
        slowest_rank=Counter(times.argmax(0).tolist()).most_common(1)[0][0],
        physical_gbytes_per_s=moved.physical_bytes / p50 / 1e3,
        logical_gbytes_per_s=moved.logical_bytes / p50 / 1e3,
        num_sms=None,
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
            f"{row.p50_us:,.0f}",
            f"{row.p99_us:,.0f}",
            str(row.slowest_rank),
            f"{row.physical_gbytes_per_s:.3g}",
            f"{row.logical_gbytes_per_s:.3g}",
            "-" if row.num_sms is None else str(row.num_sms),
        )
    return result


def write_json(file: Path, rows: Sequence[Row]) -> None:
    """A list of rows, one object each, as :class:`Row` has them."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
