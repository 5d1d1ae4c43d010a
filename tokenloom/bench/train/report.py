"""Rows and tables of one run of ``tokenloom bench train``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from rich import box
from rich.table import Table

from tokenloom.bench.common import timing
from tokenloom.bench.common.rows import of_the_slowest
from tokenloom.bench.common.shape import DTYPES
from tokenloom.bench.common.tables import counted
from tokenloom.bench.train.check import LARGEST_SHARE, LIMITS, REASONS, TENSORS, total
from tokenloom.bench.train.rows import (
    BASELINES,
    LOCAL,
    ONE,
    OURS,
    PASSES,
    CheckRow,
    Measured,
    SavedRow,
    TrainRow,
)
from tokenloom.bench.train.work import TrainOptions, TrainShape
from tokenloom.training.saved_activations import SavedTensor

SHOWN_SHARE = 0.01
"""Share of all bytes kept for backward. Tensors below it are shown as one line."""
CHOSEN_BY = {
    "hand": "by hand (--strategy)",
    "tune": "tuned here (`tokenloom tune`)",
    "default": "the default; `tokenloom tune` has chosen none for this shape here",
}


class Report:
    """Rows and tables of one run.

    Args:
        shape, options: what was measured.
        by_rank: what all ranks found.

    Attributes:
        rival: name of the rival.
        times: rows of everybody, OURS first.
        checks: rows of differences from the reference; empty if that was not asked for.
        saved: rows of what is kept for backward.
        passed: whether no check failed.
        notes: why rows are missing, and whether the rival computes the same.
    """

    def __init__(self, shape: TrainShape, options: TrainOptions, by_rank: Sequence[Measured]) -> None:
        self._shape, self._options, self._by_rank = shape, options, by_rank
        first = by_rank[0]
        self._num_ranks, self._tokens = len(by_rank), shape.num_tokens // len(by_rank)
        sizes = f"t{shape.num_tokens}/h{shape.hidden}/i{shape.intermediate}/e{shape.num_experts}/k{shape.top_k}"
        self._sizes = f"ep{self._num_ranks}/{sizes}/{options.dtype}"
        self._setup = asdict(shape) | asdict(options) | {"num_ranks": self._num_ranks, "backend": first.backend}
        self._setup |= {"strategy": asdict(first.strategy), "chosen_by": first.chosen_by, "rounds": timing.ROUNDS}
        self._setup |= {"tokens_per_rank": self._tokens, "most_routes": max(each.routes for each in by_rank)}
        self.rival = next(who for who in first.samples if who not in (OURS, *BASELINES))
        self.checks = self._make_checks()
        self.times = self._make_times()
        self.saved = self._make_saved()
        self.passed = all(row.passed for row in self.checks)
        self.notes = self._make_notes()

    def _name(self, who: str, what: str) -> str:
        return f"train/{self._by_rank[0].backend if who == OURS else who}/{self._sizes}/{what}"

    def _make_checks(self) -> list[CheckRow]:
        by_rank = [each.checked for each in self._by_rank if each.checked is not None]
        limit, rows = LIMITS[self._options.dtype], []
        for tensor in TENSORS if by_rank else ():
            found = total(each[tensor] for each in by_rank)
            numbers = (found.max_ref, found.mean_ref, found.max_diff, found.relative, limit, found.within(limit))
            rows.append(CheckRow(self._name(OURS, f"check/{tensor}"), tensor, *numbers, self._setup))
        return rows

    def _make_times(self) -> list[TrainRow]:
        samples = [each.samples for each in self._by_rank]
        p50 = {
            who: {what: of_the_slowest([each[who][what] for each in samples])[0] / 1e3 for what in PASSES}
            for who in samples[0]
        }
        even = {who: 1 / self._num_ranks if who == ONE else 1.0 for who in p50}
        rows = []
        for who in p50:
            for what in PASSES:
                _, p99_us, slowest = of_the_slowest([each[who][what] for each in samples])
                ms = p50[who][what]
                tokens = self._shape.num_tokens if who == ONE else self._tokens
                flops = self._shape.forward_flops(tokens) * (2 if what == "backward" else 1)
                is_ours = who == OURS
                baselines = {each: p50[each][what] * even[each] for each in BASELINES if is_ours and each in p50}
                rows.append(
                    TrainRow(
                        name=self._name(who, what),
                        who=who,
                        what=what,
                        p50_ms=ms,
                        p99_ms=p99_us / 1e3,
                        slowest_rank=slowest,
                        tflops=flops / ms / 1e9,
                        exposed_ms={each: ms - its for each, its in baselines.items()},
                        scaling=baselines[ONE] / ms if ONE in baselines else None,
                        rival_ratio=p50[self.rival][what] / ms if is_ours else None,
                        setup=self._setup,
                    )
                )
        return rows

    def _make_saved(self) -> list[SavedRow]:
        most = max((each.saved for each in self._by_rank), key=_kept_bytes)
        rows, seen = [], Counter[str]()
        for each in most:
            seen[each.name] += 1
            name = each.name if seen[each.name] == 1 else f"{each.name} {seen[each.name]}"
            dtype = str(each.dtype).removeprefix("torch.")
            about = self._name(OURS, f"saved/{name}")
            rows.append(SavedRow(about, name, each.shape, dtype, each.num_bytes, self._setup))
        return rows

    def _make_notes(self) -> list[str]:
        notes = [f"{who} is not measured: {why}" for who, why in self._by_rank[0].skipped.items()]
        relative = {name: total(each.rival[name] for each in self._by_rank).relative for name in TENSORS}
        worst = max(relative, key=lambda name: np.nan_to_num(relative[name], nan=np.inf))
        limit = 2 * LIMITS[self._options.dtype]
        agree = "so they agree" if relative[worst] <= limit else "SO THEY DO NOT AGREE: believe no ratio"
        notes.append(
            f"{self.rival}'s outputs and gradients differ from ours by at most {relative[worst]:.2g} ({worst}, "
            f"relative); the limit is {limit:.2g}, as each may be off by half of that, {agree}"
        )
        return notes

    def setup_lines(self, where: str) -> list[str]:
        """What was measured, and how.

        Args:
            where: the machine, in words.
        """
        shape, options, first = self._shape, self._options, self._by_rank[0]
        routes = [each.routes for each in self._by_rank]
        return [
            f"{counted(self._num_ranks, 'rank')} on {where}, backend {first.backend}: "
            f"{shape.num_tokens} tokens, {self._tokens} a rank; "
            f"hidden {shape.hidden}, intermediate {shape.intermediate}, top-{shape.top_k} of {shape.num_experts} "
            f"experts, {shape.num_experts // self._num_ranks} a rank; {options.dtype}",
            f"overlap {'on' if options.overlap else 'off'}; kept for backward: "
            f"{'tokens, sent again' if options.redispatch_in_backward else 'dispatched rows'}, "
            f"{'exact sizes' if options.pool_rows is None else f'room for {options.pool_rows} rows'}; "
            f"skew {options.skew:g}: a rank's experts get {np.mean(routes):,.0f} routes, at most {max(routes):,}",
            f"strategy: dispatch {first.strategy.dispatch}, combine {first.strategy.combine}: "
            f"{CHOSEN_BY[first.chosen_by]}",
        ]

    def check_table(self) -> Table:
        """Differences from the reference."""
        table = _table("tensor", "max |ref|", "mean |ref|", "max diff", "relative diff", "")
        for row in self.checks:
            numbers = (row.max_ref, row.mean_ref, row.max_diff, row.relative)
            table.add_row(row.tensor, *(f"{each:.4g}" for each in numbers), "PASS" if row.passed else "FAIL")
        return table

    def check_legend(self) -> str:
        """Explain the limits."""
        dtype = self._options.dtype
        return (
            "Reference: dense, float32, all tokens. Relative: norm of the difference by the reference's; at most "
            f"{LIMITS[dtype]:.3g}, for {REASONS[dtype]}. Max diff: at most {LARGEST_SHARE:.3g} of max |ref|, which a "
            "single lost token exceeds."
        )

    def saved_table(self) -> Table:
        """What is kept for backward, and the total. Tensors of one name have a line together, as have small ones."""
        kept = max((each.saved for each in self._by_rank), key=_kept_bytes)
        by_name: dict[str, list[SavedTensor]] = {}
        for each in kept:
            by_name.setdefault(each.name, []).append(each)
        all_bytes, small = _kept_bytes(kept), list[SavedTensor]()
        table = _table("tensor", "shape", "dtype", "bytes")
        for name, alike in sorted(by_name.items(), key=lambda item: -_kept_bytes(item[1])):
            if _kept_bytes(alike) < SHOWN_SHARE * all_bytes:
                small += alike
            elif len(alike) > 1:
                table.add_row(name, counted(len(alike), "tensor"), "", f"{_kept_bytes(alike):,}")
            else:
                shape, dtype = " x ".join(map(str, alike[0].shape)), str(alike[0].dtype).removeprefix("torch.")
                table.add_row(name, shape, dtype, f"{_kept_bytes(alike):,}")
        if small:
            table.add_row("smaller ones", counted(len(small), "tensor"), "", f"{_kept_bytes(small):,}")
        table.add_row("total of the rank with most", "", "", f"{all_bytes:,}")
        expected = self._shape.kept_bytes(self._tokens, DTYPES[self._options.dtype])
        table.add_row("rows and pre-activations alone", "T / W * K * (H + 2I)", self._options.dtype, f"{expected:,}")
        return table

    def times_table(self, whose: Sequence[str]) -> Table:
        """Times and rates of each pass."""
        table = _table("", "pass", "p50 ms", "p99 ms", "TFLOP/s")
        table.columns[1].justify = "left"
        for who in whose:
            for row in [each for each in self.times if each.who == who]:
                numbers = (row.p50_ms, row.p99_ms, row.tflops)
                table.add_row(self._label(who), row.what, *(f"{each:,.4g}" for each in numbers))
        return table

    def _label(self, who: str) -> str:
        labels = {OURS: "this layer", LOCAL: "local", ONE: "one rank, all tokens"}
        return labels.get(who, f"{who} rival")

    def exposed_table(self) -> Table:
        """Our times beside the baselines and the rival."""
        table = _table(
            "", "this\nlayer ms", "one / W\nms", "exposed\nms", "%", "scaling\n%", "local\nms", "exposed\nms", "%"
        )
        table.add_column(f"{self.rival}\n/ ours", justify="right")
        for row in self.times:
            if row.who != OURS or row.what == "inference":
                continue
            cells = [row.what, f"{row.p50_ms:,.4g}"]
            for baseline in (ONE, LOCAL):
                ms = row.exposed_ms.get(baseline)
                found = ["-"] * 3 if ms is None else _exposed_cells(row.p50_ms, ms)
                cells += found
                if baseline == ONE:
                    cells.append("-" if row.scaling is None else f"{100 * row.scaling:.1f}")
            table.add_row(*cells, f"{row.rival_ratio:.2f}")
        return table


def _exposed_cells(p50_ms: float, exposed_ms: float) -> list[str]:
    return [f"{p50_ms - exposed_ms:,.4g}", f"{exposed_ms:,.3g}", f"{100 * exposed_ms / p50_ms:.1f}"]


def _kept_bytes(saved: Sequence[SavedTensor]) -> int:
    return sum(each.num_bytes for each in saved)


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(first)
    for header in numbers:
        table.add_column(header, justify="right")
    return table
