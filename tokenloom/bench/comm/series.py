"""Who is measured at what: a series of samples for every row, and why some rows are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tokenloom.backends import registry
from tokenloom.bench.comm.cases import LAYOUTS, OPERATIONS, Operation
from tokenloom.bench.common.setup import TRANSPORTS
from tokenloom.bench.common.shape import Shape
from tokenloom.bench.rivals import deep_ep
from tokenloom.comm.communicator import ScaleLayout, Sizes
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.plan import FP8_BLOCK

Timing = Literal["events", "graph", "eager", "wall"]

TIMINGS: dict[str, tuple[Timing, ...]] = {"cuda": ("events", "graph", "eager"), "cpu": ("wall", "eager")}
"""Clocks by device."""

SIZES = 4
"""Parts of a row's name behind operation and backend: ranks, tokens, hidden, top-k."""

BESIDE_US = 100.0
"""Microseconds of the GEMM between halves, where nobody says how long."""


def names() -> list[str]:
    """Everybody who can be measured: our backends, best first, and rivals."""
    return [*registry.names(), deep_ep.NAME]


def usual() -> list[str]:
    """Who is measured if nobody is named: their combines are alike, which sum per rank."""
    return [name for name in names() if name == deep_ep.NAME or sums_per_rank(name)]


def sums_per_rank(backend: str) -> bool:
    """Whether the usual combine of a backend sums per rank, so that its bytes are known. Others sum per node."""
    return "dedup" in registry.capabilities(backend).combine_strategies


@dataclass(frozen=True)
class Contestant:
    """Who is measured, and how.

    Attributes:
        backend: one of ours, or "deep_ep".
        timing: "events", CUDA events around one call; "graph", around the replay of a CUDA graph of several calls;
            "wall", the host's clock around one call; or "eager", the host's clock around many pairs of a dispatch and
            a combine, and the host's time in one of each.
        num_sms: SMs that its kernels take; None where that is not known.
        ranks_per_node: as in ``Communicator``.
    """

    backend: str
    timing: Timing
    num_sms: int | None = None
    ranks_per_node: int | None = None

    def can(self, operation: Operation) -> bool:
        """Whether this contestant has the operation, and its clock has a meaning for it."""
        if self.backend == deep_ep.NAME:
            return operation in deep_ep.OPERATIONS
        if self.timing == "eager" and operation.name != "dispatch+combine":
            return False
        return operation.layout in registry.capabilities(self.backend).layouts


def label(name: str) -> str:
    """A row's name without its sizes, which the title of a table says."""
    parts = name.split("/")
    return "/".join(parts[:2] + parts[2 + SIZES :])


def named(series: Series, num_ranks: int) -> str:
    """What ``--only`` looks for parts of: the name of a row, and its label."""
    return f"{(name := series.name(num_ranks))} {label(name)}"


@dataclass(frozen=True)
class Series:
    """The samples of one row.

    Attributes:
        shape, operation: what is measured.
        contestant: who is measured.
        beside_us: microseconds of the GEMM that runs between the two halves of the operation; None for a call of one
            piece.
    """

    shape: Shape
    operation: Operation
    contestant: Contestant
    beside_us: float | None = None

    @property
    def sizes(self) -> Sizes:
        """Exact, the default of a dispatch, where the host may read counts and the question is not what it costs."""
        exact = self.contestant.timing in ("events", "wall") and self.operation.layout != "slots"
        return "exact" if exact else "bounded"

    @property
    def scale_layout(self) -> ScaleLayout | None:
        """Columns in layout "slots", as masked grouped GEMMs take scales; None where it cannot be chosen."""
        return "columns" if self.operation.layout == "slots" and self.operation.payload != "bf16" else None

    def name(self, num_ranks: int) -> str:
        """operation/backend/ranks/tokens per rank/hidden/top-k/payload/layout/timing, and /halves where it is that."""
        shape, operation = self.shape, self.operation
        sizes = f"ep{num_ranks}/t{shape.num_tokens}/h{shape.hidden}/k{shape.top_k}"
        kind = f"{operation.payload}/{operation.layout}/{self.contestant.timing}"
        halves = "" if self.beside_us is None else "/halves"
        return f"{operation.name}/{self.contestant.backend}/{sizes}/{kind}{halves}"


def contestants(
    device: str,
    num_ranks: int,
    shape: Shape,
    wanted: Sequence[str],
    num_sms: Sequence[int],
    timings: Sequence[Timing],
    halves: bool = False,
    ranks_per_node: int | None = None,
) -> tuple[list[Contestant], list[str]]:
    """Everybody wanted that works here, and a line about each row that is missing for a reason.

    Args:
        device: "cpu" or "cuda".
        num_ranks: W.
        shape: what is measured.
        wanted: some of :func:`names`.
        num_sms: backends that take SMs are measured with each of these.
        timings: clocks to measure by, of those that the device has.
        halves: halves are measured, which rivals do not have.
        ranks_per_node: nodes that the ranks are taken for; backends for one node are left out then.
    """
    found: list[Contestant] = []
    notes: list[str] = []
    plan, where = shape.plan(num_ranks), torch.device(device)
    for name in [each for each in registry.names() if each in wanted]:
        found_here = registry.availability(TRANSPORTS[device], where, plan, ranks_per_node=ranks_per_node, name=name)
        each = next(other for other in found_here if other.name == name)
        if not each.works:
            notes.append(f"{name} is not measured: {each.why.replace('pass ranks_per_node', 'pass --ranks-per-node')}")
            continue
        able = registry.capabilities(name)
        if not sums_per_rank(name):
            notes.append(f"{name} sums per node, and nobody has counted the bytes that it sends")
        clocks = [timing for timing in timings if able.captures or timing != "graph"]
        if able.takes_sms:
            found += [Contestant(each.name, timing, sms, ranks_per_node) for sms in num_sms for timing in clocks]
        else:
            found += [Contestant(each.name, timing, None, ranks_per_node) for timing in clocks]
        if "graph" in timings and not able.captures:
            notes.append(f"{each.name} has no rows of CUDA graphs: its calls read counts on the host")
        missing = [layout for layout in LAYOUTS if layout not in able.layouts]
        if missing:
            notes.append(f"{each.name} does not have layout {', '.join(missing)}")
    if deep_ep.NAME in wanted:
        why_not = deep_ep.why_not(device, num_ranks)
        if why_not is None and (halves or "events" not in timings):
            why_not = "its calls are measured by events alone, in one piece"
        if why_not is None:
            found.append(Contestant(deep_ep.NAME, "events", deep_ep.default_sms()))
            notes.append(f"{deep_ep.NAME}: its normal mode, with the defaults of its package; events only")
        else:
            notes.append(f"{deep_ep.NAME} is not measured: {why_not}")
    return found, notes


def plan_series(
    shapes: Sequence[Shape],
    num_ranks: int,
    device: str,
    wanted: Sequence[str] | None = None,
    num_sms: Sequence[int] = (registry.DEFAULT_SMS,),
    only: Sequence[str] = (),
    timings: Sequence[str] | None = None,
    beside_us: float | None = None,
    ranks_per_node: int | None = None,
) -> tuple[list[Series], list[str]]:
    """Every series to measure, by shape and operation, and a line about each row that is missing for a reason.

    Args:
        wanted: some of :func:`names`; None: the usual ones.
        num_sms: backends that take SMs are measured with each of these.
        only: parts of names; a series is kept if its name contains one of them, or if none are given.
        timings: clocks to measure by; None: all that the device has.
        beside_us: measure halves around a GEMM of this many microseconds, instead of calls of one piece.
        ranks_per_node: nodes that the ranks are taken for.

    Raises:
        InvalidArgument: a shape does not fit the ranks, FP8, or num_sms; a clock is not one of the device, or not one
            of halves; no name contains any of ``only``.
        BackendUnavailable: nobody wanted works here.
    """
    for sms in num_sms:
        if not 1 <= sms <= registry.MAX_SMS:
            raise InvalidArgument(f"num_sms is {sms}, expected 1 to {registry.MAX_SMS}")
    halves = beside_us is not None
    possible = [each for each in TIMINGS[device] if not (halves and each == "eager")]
    for timing in timings or ():
        if timing not in possible:
            where = f"for halves on {device}" if halves else f"on {device}"
            raise InvalidArgument(f"timing is {timing!r}, expected {' or '.join(possible)} {where}")
    chosen = [each for each in possible if timings is None or each in timings]
    series: list[Series] = []
    notes: dict[str, None] = {}
    for shape in shapes:
        who = usual() if wanted is None else wanted
        found, said = contestants(device, num_ranks, shape, who, num_sms, chosen, halves, ranks_per_node)
        notes |= dict.fromkeys(said)
        series += [Series(shape, each, who, beside_us) for each in OPERATIONS for who in found if who.can(each)]
    if not series:
        raise BackendUnavailable(f"there is nothing to measure, because {'; '.join(notes)}")
    kept = [each for each in series if not only or any(part in named(each, num_ranks) for part in only)]
    if not kept:
        example = series[0].name(num_ranks)
        raise InvalidArgument(f"only is {','.join(only)!r}, expected a part of a row's name, such as {example}")
    for each in kept:
        if each.operation.payload != "bf16" and each.shape.hidden % FP8_BLOCK:
            raise InvalidArgument(
                f"hidden is {each.shape.hidden}, expected a multiple of {FP8_BLOCK} for FP8 rows; leave them out "
                "with --only bf16"
            )
    return kept, list(notes)
