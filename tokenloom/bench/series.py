"""Who is measured at what: a series of samples for every row, and why some rows are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tokenloom.backends import registry
from tokenloom.bench import peers
from tokenloom.bench.cases import OPERATIONS, Operation, Shape
from tokenloom.comm.communicator import Sizes
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.plan import FP8_BLOCK

TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}
CONTESTANTS = (*registry.BACKENDS, peers.DEEP_EP)
"""Everything that can be measured, by name."""

Timing = Literal["events", "graph", "wall"]


@dataclass(frozen=True)
class Contestant:
    """Who is measured, and how.

    Attributes:
        backend: of ours, or "deep_ep".
        timing: "events": CUDA events around one call. "graph": around the replay of a CUDA graph of several calls.
            "wall": the host's clock around one call.
        num_sms: that its kernels take; None where that is not known.
    """

    backend: str
    timing: Timing
    num_sms: int | None = None

    @property
    def sizes(self) -> Sizes:
        """Bounded in a graph, which cannot read on the host; else exact, the default of a dispatch."""
        return "bounded" if self.timing == "graph" else "exact"

    def can(self, operation: Operation) -> bool:
        """Whether it has the operation."""
        return self.backend != peers.DEEP_EP or operation in peers.DEEP_EP_OPERATIONS


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
        wanted: of CONTESTANTS.
        num_sms: one contestant each, for backend "nvlink".
    """
    found: list[Contestant] = []
    notes: list[str] = []
    single: Timing = "events" if device == "cuda" else "wall"
    for each in registry.availability(TRANSPORTS[device], torch.device(device), shape.plan(num_ranks)):
        if each.name not in wanted:
            continue
        if not each.works:
            notes.append(f"{each.name} is not measured: {each.why}")
        elif each.name == "nvlink":
            timings: tuple[Timing, ...] = (single, "graph")
            found += [Contestant(each.name, timing, sms) for sms in num_sms for timing in timings]
        else:
            found.append(Contestant(each.name, single))
            if device == "cuda":
                notes.append(f"{each.name} has no rows of CUDA graphs: its calls read counts on the host")
    if peers.DEEP_EP in wanted:
        why_not = peers.why_not_deep_ep(device, num_ranks)
        if why_not is None:
            found.append(Contestant(peers.DEEP_EP, single, peers.deep_ep_sms()))
            notes.append(f"{peers.DEEP_EP}: its normal mode, with the defaults of its package; events only")
        else:
            notes.append(f"{peers.DEEP_EP} is not measured: {why_not}")
    return found, notes


def plan_series(
    shapes: Sequence[Shape],
    num_ranks: int,
    device: str,
    wanted: Sequence[str] = CONTESTANTS,
    num_sms: Sequence[int] = (registry.DEFAULT_SMS,),
    only: Sequence[str] = (),
) -> tuple[list[Series], list[str]]:
    """Every series to measure, by shape and operation, and a line about each row that is missing for a reason.

    Args:
        only: keep the series whose name contains one of these; none given, keep all.

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
        shape.plan(num_ranks)
        found, said = contestants(device, num_ranks, shape, wanted, num_sms)
        notes |= dict.fromkeys(said)
        series += [Series(shape, each, who) for each in OPERATIONS for who in found if who.can(each)]
    if not series:
        raise BackendUnavailable(f"nothing to measure: {'; '.join(notes)}")
    names = [each.name(num_ranks) for each in series]
    kept = [each for each, name in zip(series, names, strict=True) if not only or any(part in name for part in only)]
    if not kept:
        raise InvalidArgument(f"no row has {' or '.join(only)} in its name; one name is {names[0]}")
    for each in kept:
        if each.operation.payload != "bf16" and each.shape.hidden % FP8_BLOCK:
            raise InvalidArgument(
                f"hidden is {each.shape.hidden}, FP8 rows need a multiple of {FP8_BLOCK}; "
                "choose one, or leave the FP8 rows out with --only bf16"
            )
    return kept, list(notes)
