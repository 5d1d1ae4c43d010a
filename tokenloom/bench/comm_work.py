"""Work of ``tokenloom bench comm``: named shapes, operations, a series for each row, and the bytes that move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from tokenloom.backends import registry
from tokenloom.backends.nodes.hierarchical.exchange import WORD
from tokenloom.bench.rivals import deep_ep
from tokenloom.bench.setup import TRANSPORTS
from tokenloom.bench.workload import LINK_GBYTES_PER_S, Balance, CallSizes, Operation, Payload, Routing, routing_names
from tokenloom.comm.communicator import ScaleLayout, Sizes
from tokenloom.comm.routed import Layout
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.plan import FP8_BLOCK, Plan, align_up
from tokenloom.tune.network import traffic as network


@dataclass(frozen=True)
class Case:
    """A shape with a name, for ``--case``.

    Attributes:
        device: the device where it is measured if no case is named; None: nowhere.
        what: where such a shape comes from.
    """

    name: str
    shape: CallSizes
    device: str | None
    what: str


CASES = (
    Case("decode", CallSizes(128, 7168, 8, 256), "cuda", "DeepSeek-V3: one token of 128 requests"),
    Case("prefill", CallSizes(4096, 7168, 8, 256), "cuda", "DeepSeek-V3: training, or prompts in inference"),
    Case("small", CallSizes(64, 256, 2, 8), None, "latency: hardly any bytes"),
    Case("medium", CallSizes(256, 512, 4, 16), "cpu", "some bytes"),
)


def shapes_for(
    names: Sequence[str],
    device: str,
    tokens: Sequence[int] = (),
    max_vios: Sequence[float] = (0.0,),
    **sizes: int | None,
) -> list[CallSizes]:
    """Shapes to measure.

    Args:
        names: cases; none given, those meant for the device.
        tokens: numbers of tokens that replace each shape's own.
        max_vios: each shape is measured with a routing of each of these.
        sizes: hidden, top_k, num_experts; those that are not None replace a shape's own.

    Returns:
        Each shape once, in the order of the cases.
    """
    by_name = {case.name: case for case in CASES}
    picked = [by_name[name] for name in names] or [case for case in CASES if case.device == device]
    given = {name: value for name, value in sizes.items() if value is not None}
    shapes = [
        replace(case.shape, num_tokens=count, max_vio=max_vio, **given)
        for case in picked
        for count in tokens or [case.shape.num_tokens]
        for max_vio in max_vios
    ]
    return list(dict.fromkeys(shapes))


LAYOUTS: tuple[Layout, ...] = ("token", "expert", "rank", "slots")
PAYLOADS: tuple[Payload, ...] = ("bf16", "fp8", "to_fp8")

OPERATIONS = (
    *(Operation("dispatch", payload, layout) for layout in LAYOUTS for payload in PAYLOADS),
    *(Operation("combine", "bf16", layout) for layout in LAYOUTS),
    Operation("dispatch+combine", "fp8", "rank"),  # as inference decodes with kernels that group rows themselves
    Operation("dispatch+combine", "fp8", "slots"),  # and with masked grouped GEMMs, whose tokens come quantised,
    Operation("dispatch+combine", "to_fp8", "slots"),  # or are quantised on their way
    Operation("dispatch+combine", "fp8", "expert"),  # as inference prefills
    Operation("dispatch+combine", "bf16", "token"),  # as training does
)


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


def splits_batches(backend: str) -> bool:
    """Whether a backend has ``balance="batch"``."""
    return registry.capabilities(backend).gathers_counts


def _slots_beside(backend: str, spare_slots: int | None) -> list[tuple[int | None, Balance]]:
    """Spare slots and balance of the rows of an operation that stand beside each other."""
    if spare_slots is None or backend == deep_ep.NAME:
        return [(None, None)]
    balances: tuple[Balance, ...] = (None, "batch") if splits_batches(backend) else (None,)
    return [(None, None), *((spare_slots, balance) for balance in balances)]


def label(name: str) -> str:
    """A row's name without its sizes, which the title of a table says."""
    parts = name.split("/")
    return "/".join(parts[:2] + parts[2 + SIZES :])


def named(series: CallSeries, num_ranks: int) -> str:
    """Text in which ``--only`` looks for parts: the name of a row, and its label."""
    return f"{(name := series.name(num_ranks))} {label(name)}"


@dataclass(frozen=True)
class CallSeries:
    """The samples of one row.

    Attributes:
        backend: who is measured, one of ours, or "deep_ep".
        timing: "events", CUDA events around one call; "graph", around the replay of a CUDA graph of several calls;
            "wall", the host's clock around one call; or "eager", the host's clock around many pairs of a dispatch and
            a combine, and the host's time in one of each.
        num_sms: SMs that its kernels take; None where that is not known.
        beside_us: microseconds of the GEMM that runs between the two halves of the operation; None for a call of one
            piece.
        spare_slots: slots of each rank beyond its even share of experts, for replicas of hot ones; None for no
            placement.
        balance: "batch": the slots are empty, and each dispatch is split over the ranks.
    """

    shape: CallSizes
    operation: Operation
    backend: str
    timing: Timing
    num_sms: int | None = None
    ranks_per_node: int | None = None
    beside_us: float | None = None
    spare_slots: int | None = None
    balance: Balance = None

    def routing(self, num_ranks: int) -> Routing:
        """Routing of all ranks."""
        return self.shape.routing(num_ranks, self.spare_slots, balanced=self.balance is not None)

    @property
    def possible(self) -> bool:
        """Whether the backend has the operation, and the clock has a meaning for it."""
        if self.backend == deep_ep.NAME:
            return self.operation in deep_ep.OPERATIONS
        if self.timing == "eager" and self.operation.name != "dispatch+combine":
            return False
        return self.operation.layout in registry.capabilities(self.backend).layouts

    @property
    def sizes(self) -> Sizes:
        """Exact, the default of a dispatch, where the host may read counts and the question is not what it costs."""
        exact = self.timing in ("events", "wall") and self.operation.layout != "slots"
        return "exact" if exact else "bounded"

    @property
    def scale_layout(self) -> ScaleLayout | None:
        """Columns in layout "slots", as masked grouped GEMMs take scales; None where it cannot be chosen."""
        return "columns" if self.operation.layout == "slots" and self.operation.payload != "bf16" else None

    def name(self, num_ranks: int) -> str:
        """operation/backend/ranks/tokens per rank/hidden/top-k/payload/layout/timing.

        Behind it come /vX, the MaxVio of a routing that is not even, /spareN of a placement, /batch of dispatches that
        are split over the ranks, and /halves.
        """
        shape, operation = self.shape, self.operation
        sizes = f"ep{num_ranks}/t{shape.num_tokens}/h{shape.hidden}/k{shape.top_k}"
        kind = f"{operation.payload}/{operation.layout}/{self.timing}"
        ends = routing_names(shape.max_vio, self.spare_slots, self.balance)
        ends += [] if self.beside_us is None else ["halves"]
        return "/".join([operation.name, self.backend, sizes, kind, *ends])


Who = tuple[str, Timing, int | None, int | None]
"""Backend, timing, num_sms and ranks_per_node of a series."""


def who_works(
    device: str,
    num_ranks: int,
    shape: CallSizes,
    wanted: Sequence[str],
    num_sms: Sequence[int],
    timings: Sequence[Timing],
    halves: bool = False,
    ranks_per_node: int | None = None,
) -> tuple[list[Who], list[str]]:
    """Everybody wanted that works here, and a line about each row that is missing for a reason.

    The arguments are those of :func:`plan_series`.
    """
    found: list[Who] = []
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
            found += [(name, timing, sms, ranks_per_node) for sms in num_sms for timing in clocks]
        else:
            found += [(name, timing, None, ranks_per_node) for timing in clocks]
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
            found.append((deep_ep.NAME, "events", deep_ep.default_sms(), None))
            notes.append(f"{deep_ep.NAME}: its normal mode, with the defaults of its package; events only")
        else:
            notes.append(f"{deep_ep.NAME} is not measured: {why_not}")
    return found, notes


def plan_series(
    shapes: Sequence[CallSizes],
    num_ranks: int,
    device: str,
    wanted: Sequence[str] | None = None,
    num_sms: Sequence[int] = (0,),
    only: Sequence[str] = (),
    timings: Sequence[str] | None = None,
    beside_us: float | None = None,
    ranks_per_node: int | None = None,
    spare_slots: int | None = None,
) -> tuple[list[CallSeries], list[str]]:
    """Every series to measure, by shape and operation, and a line about each row that is missing for a reason.

    Args:
        wanted: some of :func:`names`; None: the usual ones.
        num_sms: backends that take SMs are measured with each of these; 0: as many as they choose.
        only: parts of names; a series is kept if its name contains one of them, or if none are given.
        timings: clocks to measure by; None: all that the device has.
        beside_us: measure halves around a GEMM of this many microseconds, instead of calls of one piece.
        ranks_per_node: nodes that the ranks are taken for.
        spare_slots: measure each call of ours with as many slots more on each rank too: with replicas of hot experts,
            and split over the ranks per batch.
    """
    for sms in num_sms:
        if not 0 <= sms <= registry.MAX_SMS:
            raise InvalidArgument(f"num_sms is {sms}, expected 0 to {registry.MAX_SMS}")
    halves = beside_us is not None
    possible = [each for each in TIMINGS[device] if not (halves and each == "eager")]
    for timing in timings or ():
        if timing not in possible:
            where = f"for halves on {device}" if halves else f"on {device}"
            raise InvalidArgument(f"timing is {timing!r}, expected {' or '.join(possible)} {where}")
    chosen = [each for each in possible if timings is None or each in timings]
    series: list[CallSeries] = []
    notes: dict[str, None] = {}
    for shape in shapes:
        names_wanted = usual() if wanted is None else wanted
        found, said = who_works(device, num_ranks, shape, names_wanted, num_sms, chosen, halves, ranks_per_node)
        notes |= dict.fromkeys(said)
        planned = [
            CallSeries(shape, each, *who, beside_us, *slots)
            for each in OPERATIONS
            for who in found
            for slots in _slots_beside(who[0], spare_slots)
        ]
        if spare_slots is not None:
            ours = [who[0] for who in found if who[0] != deep_ep.NAME]
            unsplit = [
                f"{name} splits no batches, so it has no rows per batch" for name in ours if not splits_batches(name)
            ]
            notes |= dict.fromkeys(unsplit)
        series += [each for each in planned if each.possible]
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


SCALE_BYTES = 4
TOKEN_BYTES = 4
ID_BYTES = 4
WEIGHT_BYTES = 4
PAYLOAD_BYTES = {"bf16": 2, "fp8": 1, "to_fp8": 1}
"""Bytes of a dispatched value."""
COMBINED_BYTES = 2
"""Bytes of a value on its way home: BF16."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of rows that one operation moves. Counts, whose size no routing changes, are not included.

    Attributes:
        physical_bytes: bytes that leave the busiest rank over a link, to other ranks, also those that it hands on.
        value_bytes: those of them that are values of tokens, without scales, numbers, ids and weights.
        logical_bytes: bytes that the rank with most receives, its own rows included.
    """

    physical_bytes: int
    value_bytes: int
    logical_bytes: int

    @property
    def floor_us(self) -> float:
        """Least time that the values need on the links of an H200."""
        return self.value_bytes / LINK_GBYTES_PER_S / 1e3


@dataclass(frozen=True)
class Rows:
    """Rows of a dispatch, of each rank: int64 [W]. Those of its combine go the other way.

    Attributes:
        dispatched, combined: rows that leave the rank, also those that it hands on for others.
        received, sent: rows that it gets, and that are its own tokens'; those that stay included.
        flag_bytes: bytes beside a dispatched row that say which ranks of a node it is for.
    """

    dispatched: np.ndarray
    combined: np.ndarray
    received: np.ndarray
    sent: np.ndarray
    flag_bytes: int = 0


def count_rows(plan: Plan, topk_ids: Sequence[torch.Tensor], ranks_per_node: int | None = None) -> Rows:
    """Count a row for each (token, rank).

    Args:
        topk_ids: [T, K] of each rank; -1 is an unused place.
        ranks_per_node: G, for backend "network": there a dispatch has a row for each (token, node), and one for each
            (token, rank) inside a node. A combine has a row for each (token, rank), first inside its node to the rank
            that sends it home. None: rows go straight to their rank.
    """
    between = network.rows_between(topk_ids, plan.experts_per_rank, plan.num_ranks)
    received, sent = between.sum(0), between.sum(1)
    if ranks_per_node is None:
        own = between.diagonal()
        return Rows(sent - own, received - own, received, sent)
    num_nodes = plan.num_ranks // ranks_per_node
    cluster = network.Cluster(num_nodes, ranks_per_node, plan.num_experts, plan.top_k)
    found = network.counted(cluster, topk_ids)["node"]
    home = between.reshape((num_nodes, ranks_per_node) * 2).sum(3)  # home node, rail, node
    home[np.arange(num_nodes), :, np.arange(num_nodes)] = 0
    combined = home.sum(0).T + found.nvlink_received
    return Rows((found.nic_sent + found.nvlink_sent).ravel(), combined.ravel(), received, sent, ranks_per_node)


def moved(plan: Plan, rows: Rows, operation: Operation) -> Traffic:
    """Bytes that one call of an operation moves.

    A dispatched row carries its values, scales if it is FP8, the number of its token, and K ids and weights. A combine
    sends one row of partial sums, in BF16, back for every dispatched row, in all layouts.
    """
    sent, values, received = (np.zeros(plan.num_ranks, dtype=np.int64) for _ in range(3))  # bytes of each rank
    if "dispatch" in operation.name:
        value_bytes = plan.hidden * PAYLOAD_BYTES[operation.payload]
        row_bytes = value_bytes + TOKEN_BYTES + plan.top_k * (ID_BYTES + WEIGHT_BYTES)
        if operation.payload != "bf16":
            row_bytes += plan.hidden // FP8_BLOCK * SCALE_BYTES
        values += rows.dispatched * value_bytes
        sent += rows.dispatched * (align_up(row_bytes + rows.flag_bytes, WORD) if rows.flag_bytes else row_bytes)
        received += rows.received * row_bytes
    if "combine" in operation.name:
        value_bytes = plan.hidden * COMBINED_BYTES
        values += rows.combined * value_bytes
        sent += rows.combined * value_bytes
        received += rows.sent * value_bytes
    return Traffic(int(sent.max()), int(values.max()), int(received.max()))
