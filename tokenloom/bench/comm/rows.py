"""Rows of ``tokenloom bench comm``: how samples become numbers and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich import box
from rich.table import Table

from tokenloom.bench.comm.series import label
from tokenloom.bench.comm.traffic import Traffic
from tokenloom.bench.common.rows import of_the_slowest
from tokenloom.bench.common.shape import Shape


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: from :meth:`tokenloom.bench.comm.series.Series.name`.
        p50_us, p99_us: time of one call over samples, each of its slowest rank. Measured values, not interpolated.
            Eager rows: of one pair. Halves: of both halves and the GEMM between them.
        slowest_rank: the rank that was slowest most often.
        floor_us: least time for the bytes on the links of an H200; None on CPUs, and where they are not counted.
        parts_us: medians of the slowest rank. Eager rows: "host_dispatch" and "host_combine", the host's time in one
            call. Halves: "work", the GEMM alone; "one_piece", the call in one piece and the GEMM behind it; "exposed",
            p50_us without the GEMM alone.
        physical_gbytes_per_s, logical_gbytes_per_s: the bytes of :class:`Traffic` per p50; 1 GB is 1e9 bytes. None for
            halves, whose p50 has a GEMM in it. The physical ones are None where they are not counted.
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
    counted: bool = True,
) -> Row:
    """Make a row from the samples [W][iterations] of all ranks.

    Args:
        on_links: the ranks are GPUs, so there is a floor.
        counted: the bytes that leave a rank are known.
    """
    found = {part: of_the_slowest([[each[part] for each in rank] for rank in samples]) for part in samples[0][0]}
    p50, p99, slowest_rank = found.pop("call")
    parts = {part: median for part, (median, _, _) in found.items()}
    if "work" in parts:
        parts["exposed"] = p50 - parts["work"]
    sizes = asdict(moved) | ({} if counted else {"physical_bytes": None, "value_bytes": None})
    return Row(
        name=name,
        p50_us=p50,
        p99_us=p99,
        slowest_rank=slowest_rank,
        floor_us=moved.floor_us if on_links and counted else None,
        parts_us=parts,
        physical_gbytes_per_s=None if "work" in parts or not counted else moved.physical_bytes / p50 / 1e3,
        logical_gbytes_per_s=None if "work" in parts else moved.logical_bytes / p50 / 1e3,
        num_sms=num_sms,
        setup=setup | sizes,
    )


def kind_of(row: Row) -> str:
    """What the row is of: "calls", "eager" pairs with the host's time, or "halves" around a GEMM."""
    if "work" in row.parts_us:
        return "halves"
    return "eager" if "host_dispatch" in row.parts_us else "calls"


def tables(rows: Sequence[Row]) -> list[Table]:
    """All rows, for people, in a table for each kind and shape that there is."""
    found: dict[tuple[str, Shape], list[Row]] = {}
    for row in rows:
        shape = Shape(**{each.name: row.setup[each.name] for each in fields(Shape)})
        found.setdefault((kind_of(row), shape), []).append(row)
    return [_table(kind, shape, alike) for name in KINDS for (kind, shape), alike in found.items() if kind == name]


KINDS: dict[str, tuple[tuple[str, ...], Callable[[Row], tuple[str, ...]]]] = {
    "calls": (
        ("operation", "p50 µs", "times\nfloor", "p99 µs", "physical\nGB/s", "logical\nGB/s"),
        lambda row: (
            _us(row.p50_us),
            f"{row.p50_us / row.floor_us:.2f}" if row.floor_us else MISSING,
            _us(row.p99_us),
            _rate(row.physical_gbytes_per_s),
            _rate(row.logical_gbytes_per_s),
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
"""For each kind of row: headers of its table, and the cells behind name, SMs and floor. Columns without any value are
left out."""


MISSING = "-"


def _table(kind: str, shape: Shape, rows: Sequence[Row]) -> Table:
    (what, *headers), cells = KINDS[kind]
    lines = [(label(row.name), *_first_cells(row), *cells(row)) for row in rows]
    columns = [
        (header, values)
        for header, values in zip((what, "SMs", "floor\nµs", *headers), zip(*lines, strict=True), strict=True)
        if any(value != MISSING for value in values)
    ]
    result = Table(*(header for header, _ in columns), box=box.SIMPLE_HEAD, padding=0, title_justify="left")
    sizes = f"{shape.num_tokens} tokens a rank, hidden {shape.hidden}"
    result.title = f"{sizes}, top-{shape.top_k} of {shape.num_experts} experts"
    for column in result.columns[1:]:
        column.justify = "right"
    for line in zip(*(values for _, values in columns), strict=True):
        result.add_row(*line)
    return result


def _first_cells(row: Row) -> tuple[str, str]:
    """SMs and floor."""
    sms = MISSING if row.num_sms is None else str(row.num_sms)
    return sms, MISSING if row.floor_us is None else _us(row.floor_us)


def _us(value: float) -> str:
    return f"{value:,.1f}"


def _rate(gbytes_per_s: float | None) -> str:
    return MISSING if gbytes_per_s is None else f"{gbytes_per_s:.3g}"
