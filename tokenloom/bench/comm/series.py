"""Who is measured at what: a series of samples for every row, and why some rows are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tokenloom.backends import registry
from tokenloom.bench.comm.cases import OPERATIONS, Operation
from tokenloom.bench.common.setup import TRANSPORTS
from tokenloom.bench.common.shape import Shape
from tokenloom.bench.rivals import deep_ep
from tokenloom.comm.communicator import Sizes
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.plan import FP8_BLOCK

Timing = Literal["events", "graph", "wall"]


def names() -> list[str]:
    """Everybody who can be measured: our backends, best first, and rivals."""
    return [*registry.names(), deep_ep.NAME]


@dataclass(frozen=True)
class Contestant:
    """Who is measured, and how.

    Attributes:
        backend: one of ours, or "deep_ep".
        timing: "events", CUDA events around one call; "graph", around the replay of a CUDA graph of several calls; or
            "wall", the host's clock around one call.
        num_sms: SMs that its kernels take; None where that is not known.
    """

    backend: str
    timing: Timing
    num_sms: int | None = None

    @property
    def sizes(self) -> Sizes:
        """Bounded in a graph, which cannot read on the host; else exact, the default of a dispatch."""
        return "bounded" if self.timing == "graph" else "exact"

    def can(self, operation: Operation) -> bool:
        """Whether this contestant has the operation."""
        return self.backend != deep_ep.NAME or operation in deep_ep.OPERATIONS


@dataclass(frozen=True)
class Series:
    """The samples of one row."""

    shape: Shape
    operation: Operation
    contestant: Contestant

    def name(self, num_ranks: int) -> str:
        """operation/backend/ranks/tokens per rank/hidden/top-k/payload/layout/timing."""
        shape, operation = self.shape, self.operation
        sizes = f"ep{num_ranks}/t{shape.num_tokens}/h{shape.hidden}/k{shape.top_k}"
        kind = f"{operation.payload}/{operation.layout}/{self.contestant.timing}"
        return f"{operation.name}/{self.contestant.backend}/{sizes}/{kind}"


def contestants(
    device: str, num_ranks: int, shape: Shape, wanted: Sequence[str], num_sms: Sequence[int]
) -> tuple[list[Contestant], list[str]]:
    """Everybody wanted that works here, and a line about each row that is missing for a reason.

    Args:
        device: "cpu" or "cuda".
        num_ranks: W.
        shape: what is measured.
        wanted: some of :func:`names`.
        num_sms: backends that take SMs are measured with each of these.
    """
    found: list[Contestant] = []
    notes: list[str] = []
    single: Timing = "events" if device == "cuda" else "wall"
    for each in registry.availability(TRANSPORTS[device], torch.device(device), shape.plan(num_ranks)):
        if each.name not in wanted:
            continue
        if not each.works:
            notes.append(f"{each.name} is not measured: {each.why}")
            continue
        able = registry.capabilities(each.name)
        timings: tuple[Timing, ...] = (single, "graph") if able.captures else (single,)
        if able.takes_sms:
            found += [Contestant(each.name, timing, sms) for sms in num_sms for timing in timings]
        else:
            found += [Contestant(each.name, timing) for timing in timings]
        if device == "cuda" and not able.captures:
            notes.append(f"{each.name} has no rows of CUDA graphs: its calls read counts on the host")
    if deep_ep.NAME in wanted:
        why_not = deep_ep.why_not(device, num_ranks)
        if why_not is None:
            found.append(Contestant(deep_ep.NAME, single, deep_ep.default_sms()))
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
) -> tuple[list[Series], list[str]]:
    """Every series to measure, by shape and operation, and a line about each row that is missing for a reason.

    Args:
        wanted: some of :func:`names`; None: all of them.
        num_sms: backends that take SMs are measured with each of these.
        only: parts of names; a series is kept if its name contains one of them, or if none are given.

    Raises:
        InvalidArgument: a shape does not fit the ranks, FP8, or num_sms; no name contains any of ``only``.
        BackendUnavailable: nobody wanted works here.
    """
    for sms in num_sms:
        if not 1 <= sms <= registry.MAX_SMS:
            raise InvalidArgument(f"num_sms is {sms}, expected 1 to {registry.MAX_SMS}")
    series: list[Series] = []
    notes: dict[str, None] = {}
    for shape in shapes:
        found, said = contestants(device, num_ranks, shape, names() if wanted is None else wanted, num_sms)
        notes |= dict.fromkeys(said)
        series += [Series(shape, each, who) for each in OPERATIONS for who in found if who.can(each)]
    if not series:
        raise BackendUnavailable(f"nothing to measure: {'; '.join(notes)}")
    kept = [each for each in series if not only or any(part in each.name(num_ranks) for part in only)]
    if not kept:
        example = series[0].name(num_ranks)
        raise InvalidArgument(f"no row has {' or '.join(only)} in its name; one name is {example}")
    for each in kept:
        if each.operation.payload != "bf16" and each.shape.hidden % FP8_BLOCK:
            raise InvalidArgument(
                f"hidden is {each.shape.hidden}, FP8 rows need a multiple of {FP8_BLOCK}; "
                "choose one, or leave the FP8 rows out with --only bf16"
            )
    return kept, list(notes)
