"""Rows of ``tokenloom bench comm``: how samples become numbers and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from tokenloom.bench.comm.traffic import Traffic
from tokenloom.bench.common.rows import of_the_slowest


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: from :meth:`tokenloom.bench.comm.series.Series.name`.
        p50_us, p99_us: time of one call over samples, each of its slowest rank. Measured values, not interpolated.
            Eager rows: of one pair. Halves: of both halves and the GEMM between them.
        slowest_rank: the rank that was slowest most often.
        floor_us: least time for the bytes on the links of an H200; None on CPUs.
        parts_us: medians of the slowest rank. Eager rows: "host_dispatch" and "host_combine", the host's time in one
            call. Halves: "work", the GEMM alone; "one_piece", the call in one piece and the GEMM behind it; "exposed",
            p50_us without the GEMM alone.
        physical_gbytes_per_s, logical_gbytes_per_s: the bytes of :class:`Traffic` per p50; 1 GB is 1e9 bytes. None for
            halves, whose p50 has a GEMM in it.
        num_sms: streaming multiprocessors that the operation occupies; None where that is not ours to say.
        setup: everything needed to repeat the row, besides what all rows of a run share.
    """

    name: str
    p50_us: float
    p99_us: float
    slowest_rank: int
    floor_us: float | None
    parts_us: dict[str, float]
    physical_gbytes_per_s: float | None
    logical_gbytes_per_s: float | None
    num_sms: int | None
    setup: dict[str, Any]


def make_row(
    name: str,
    samples: Sequence[Sequence[Mapping[str, float]]],
    moved: Traffic,
    num_sms: int | None,
    setup: dict[str, Any],
    *,
    on_links: bool,
) -> Row:
    """Make a row from the samples [W][iterations] of all ranks.

    Args:
        on_links: the ranks are GPUs, so there is a floor.
    """
    found = {part: of_the_slowest([[each[part] for each in rank] for rank in samples]) for part in samples[0][0]}
    p50, p99, slowest_rank = found.pop("call")
    parts = {part: median for part, (median, _, _) in found.items()}
    if "work" in parts:
        parts["exposed"] = p50 - parts["work"]
    return Row(
        name=name,
        p50_us=p50,
        p99_us=p99,
        slowest_rank=slowest_rank,
        floor_us=moved.floor_us if on_links else None,
        parts_us=parts,
        physical_gbytes_per_s=None if "work" in parts else moved.physical_bytes / p50 / 1e3,
        logical_gbytes_per_s=None if "work" in parts else moved.logical_bytes / p50 / 1e3,
        num_sms=num_sms,
        setup=setup | asdict(moved),
    )


def kind_of(row: Row) -> str:
    """What the row is of: "calls", "eager" pairs with the host's time, or "halves" around a GEMM."""
    if "work" in row.parts_us:
        return "halves"
    return "eager" if "host_dispatch" in row.parts_us else "calls"


def tables(rows: Sequence[Row]) -> list[Table]:
    """All rows, for people, in a table for each kind that there is."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(kind_of(row), []).append(row)
    return [_table(kind, by_kind[kind]) for kind in KINDS if kind in by_kind]


KINDS: dict[str, tuple[tuple[str, ...], Callable[[Row], tuple[str, ...]]]] = {
    "calls": (
        ("operation", "p50 µs", "times\nfloor", "p99 µs", "physical\nGB/s", "logical\nGB/s"),
        lambda row: (
            _us(row.p50_us),
            f"{row.p50_us / row.floor_us:.2f}" if row.floor_us else "-",
            _us(row.p99_us),
            f"{row.physical_gbytes_per_s:.3g}",
            f"{row.logical_gbytes_per_s:.3g}",
        ),
    ),
    "eager": (
        ("eager pairs", "p50 µs", "p99 µs", "host µs\ndispatch", "host µs\ncombine"),
        lambda row: tuple(
            map(_us, (row.p50_us, row.p99_us, row.parts_us["host_dispatch"], row.parts_us["host_combine"]))
        ),
    ),
    "halves": (
        ("halves around a GEMM", "p50 µs", "GEMM\nalone", "exposed", "one piece,\nthen GEMM"),
        lambda row: tuple(
            map(_us, (row.p50_us, row.parts_us["work"], row.parts_us["exposed"], row.parts_us["one_piece"]))
        ),
    ),
}
"""For each kind of row: headers of its table, and the cells behind name, SMs and floor."""


def _table(kind: str, rows: Sequence[Row]) -> Table:
    (what, *headers), cells = KINDS[kind]
    result = Table(what, "SMs", "floor\nµs", *headers, box=box.SIMPLE_HEAD, padding=0)
    result.columns[0].overflow = "fold"
    for column in result.columns[1:]:
        column.justify = "right"
    for row in rows:
        sms = "-" if row.num_sms is None else str(row.num_sms)
        floor = "-" if row.floor_us is None else _us(row.floor_us)
        result.add_row(row.name, sms, floor, *cells(row))
    return result


def _us(value: float) -> str:
    return f"{value:,.1f}"
