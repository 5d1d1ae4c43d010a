"""``tokenloom bench comm``: dispatch and combine, as a user calls them, over every backend, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.table import Table

from tokenloom.bench import clock, comm_work, harness, legends
from tokenloom.bench.comm_work import CallSeries, Traffic, label, sums_per_rank
from tokenloom.bench.harness import Contestant, Measured, Sample, take_turns
from tokenloom.bench.plot import Point, load_matplotlib, write_points_png
from tokenloom.bench.rivals import deep_ep
from tokenloom.bench.setup import TRANSPORTS, Run, machine
from tokenloom.bench.tables import counted, make_table, say
from tokenloom.bench.workload import (
    LINK_GBYTES_PER_S,
    ROUTING_SEED,
    CallSizes,
    Inputs,
    expert_outputs,
    make_inputs,
    with_spare_slots,
)
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.engine import Pending
from tokenloom.comm.routed import Routed
from tokenloom.runtime.processes import RankContext, RankPool

DEFAULT_ITERATIONS = {"cpu": 10, "cuda": 100}
MISSING = "-"
TRIALS = 3
TRIAL_ROWS = {"cpu": 256, "cuda": 8192}
WIDTHS = {"cpu": 256, "cuda": 4096}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROW_STEP = {"cpu": 1, "cuda": 128}
"""Rows of a tile of cuBLAS: fewer take as long."""
EAGER_PAIRS = {"cpu": 2, "cuda": 50}
"""Pairs of an eager sample. The wait for the GPU at its end is shared among them."""


class OurCall:
    """An operation of one of our backends, ready to be called again and again. Making one is collective."""

    def __init__(self, comm: Communicator, series: CallSeries, inputs: Inputs) -> None:
        operation = series.operation
        self._comm = comm
        self._name = operation.name
        x = inputs.fp8 if operation.payload == "fp8" else inputs.x
        assert x is not None
        self._given = (x, inputs.ids, inputs.weights)
        self._options: dict[str, Any] = {"layout": operation.layout, "sizes": series.sizes}
        if operation.payload == "to_fp8":
            self._options["to_fp8"] = True
        if operation.layout == "slots":
            self._options["capacity"] = inputs.slot_rows
            if series.scale_layout is not None:
                self._options["scale_layout"] = series.scale_layout
        elif operation.layout == "expert" and series.sizes == "bounded":
            self._options["capacity"] = inputs.expert_rows
        # As beside it. The default of balanced batches is a row for each route on the way home.
        self._mode: Literal["per_rank"] | None = None if series.balance is None else "per_rank"
        self._before: Routed | None = None
        if "combine" in operation.name:
            self._before = self.dispatch(copy=True)  # later dispatches would overwrite a view of a receive buffer
            self._y = expert_outputs(self._before.tokens)

    def __call__(self) -> Any:
        """Make the operation in calls of one piece. A combine after a dispatch is of that dispatch."""
        if self._name == "dispatch":
            return self.dispatch()
        return self.combine(self._before if self._name == "combine" else self.dispatch())

    def dispatch(self, copy: bool = False) -> Routed:
        """Dispatch the tokens."""
        return self._comm.dispatch(*self._given, copy=copy, **self._options)

    def combine(self, routed: Routed | None) -> torch.Tensor:
        """Combine the same expert outputs, whatever was dispatched."""
        assert routed is not None
        return self._comm.combine(self._y, routed, mode=self._mode)

    def send(self) -> list[Pending[Any]]:
        """Send the first halves. A dispatch and a combine are of two micro-batches, open at the same time."""
        pendings: list[Pending[Any]] = []
        if self._name != "combine":
            pendings.append(self._comm.send_dispatch(*self._given, **self._options))
        if self._before is not None:
            pendings.append(self._comm.send_combine(self._y, self._before, mode=self._mode))
        return pendings


class CallMaker:
    """Makes the calls of every series. Communicators are made when first needed; ``stack`` closes them."""

    def __init__(self, context: RankContext, inputs: Inputs, stack: ExitStack) -> None:
        self._context = context
        self._inputs = inputs
        self._stack = stack
        self._communicators: dict[tuple[Any, ...], Communicator] = {}
        self._deep_ep: deep_ep.DeepEp | None = None

    def ours(self, series: CallSeries) -> OurCall:
        """The operation of a series of one of our backends. Collective."""
        inputs = self._inputs.under(series.routing(self._context.num_ranks))
        return OurCall(self._communicator(series), series, inputs)

    def call(self, series: CallSeries) -> Callable[[], Any]:
        """The operation of any series, as a call of one piece. Collective."""
        if series.backend == deep_ep.NAME:
            return self._rival().prepared_call(series.operation, self._inputs)
        return self.ours(series)

    def check(self, series: CallSeries) -> None:
        """Raise what calls of our own backends left behind: a graph cannot raise by itself."""
        comm = self._communicators.get(_communicator_of(series))
        if comm is not None:
            comm.check()

    def _communicator(self, series: CallSeries) -> Communicator:
        key = _communicator_of(series)
        if key not in self._communicators:
            shape = self._inputs.shape
            comm = Communicator(
                self._context.group,
                num_experts=shape.num_experts,
                hidden=shape.hidden,
                top_k=shape.top_k,
                max_tokens_per_rank=shape.num_tokens,
                backend=series.backend,
                device=self._context.device,
                num_sms=series.num_sms or None,
                ranks_per_node=series.ranks_per_node,
                placement=series.routing(self._context.num_ranks).placement,
                balance=series.balance,
            )
            self._communicators[key] = self._stack.enter_context(comm)
        return self._communicators[key]

    def _rival(self) -> deep_ep.DeepEp:
        if self._deep_ep is None:
            plan = self._inputs.shape.plan(self._context.num_ranks)
            self._deep_ep = self._stack.enter_context(closing(deep_ep.DeepEp(self._context.group, plan)))
        return self._deep_ep


def _communicator_of(series: CallSeries) -> tuple[Any, ...]:
    """What series have alike that share a communicator."""
    return series.backend, series.num_sms, series.spare_slots, series.balance


class Gemm:
    """[rows, width] x [width, width], of as many rows as take about ``wanted_us``. Equal on all ranks; collective.

    On GPUs in bfloat16 over 4096 columns, on CPUs in float32 over 256.

    Args:
        wanted_us: microseconds that it is to take, at most as many as memory allows.
    """

    def __init__(self, context: RankContext, wanted_us: float) -> None:
        device, kind = context.device, context.device.type
        width, dtype, step = WIDTHS[kind], DTYPES[kind], ROW_STEP[kind]
        self._b = torch.empty(width, width, dtype=dtype, device=device).normal_()
        self._make_rows(TRIAL_ROWS[kind])
        self()
        trial_us = min(clock.one_call(context, self, queued=True) for _ in range(TRIALS))
        steps = round(wanted_us / trial_us * TRIAL_ROWS[kind] / step)
        chosen = torch.tensor(max(1, steps) * step, dtype=torch.int64, device=device)
        dist.all_reduce(chosen, dist.ReduceOp.MAX, context.group)
        self._make_rows(int(chosen))

    def _make_rows(self, rows: int) -> None:
        self.rows = rows
        self._a = torch.empty(rows, len(self._b), dtype=self._b.dtype, device=self._b.device).normal_()
        self._out = torch.empty_like(self._a)

    def __call__(self) -> None:
        torch.mm(self._a, self._b, out=self._out)


def make_sampler(context: RankContext, maker: CallMaker, series: CallSeries) -> Callable[[], Sample]:
    """A function that takes one sample: "call", and its parts, see ``Row``. Making and calling it is collective."""
    if series.beside_us is not None:
        return _halves_sampler(context, maker, series)
    if series.timing == "eager":
        call = maker.ours(series)
        return lambda: eager_sample(context, call)
    take = _clock(context, maker, series, maker.call(series))
    return lambda: {"call": take()}


def eager_sample(context: RankContext, call: OurCall) -> Sample:
    """Wall clock of a dispatch and its combine, and of the host alone in each of them.

    The pairs follow each other without a wait; the clock stops when the device is done with the last. Host time lasts
    until a call returns, on a device that is idle when it begins.
    """
    count = EAGER_PAIRS[context.device.type]
    _wait_for_all(context)
    began = time.perf_counter()
    for _ in range(count):
        call()
    _wait(context)
    pair_us = (time.perf_counter() - began) * 1e6 / count
    dispatch_us, routed = _host_us(context, call.dispatch)
    combine_us, _ = _host_us(context, lambda: call.combine(routed))
    return {"call": pair_us, "host_dispatch": dispatch_us, "host_combine": combine_us}


def _halves_sampler(context: RankContext, maker: CallMaker, series: CallSeries) -> Callable[[], Sample]:
    assert series.beside_us is not None
    call, work = maker.ours(series), Gemm(context, series.beside_us)

    def around_work() -> list[Any]:
        pendings = call.send()
        work()
        return [each.receive() for each in pendings]

    def one_piece_then_work() -> Any:
        result = call()
        work()
        return result

    around = _clock(context, maker, series, around_work)
    alone = _clock(context, maker, series, work)
    one_piece = _clock(context, maker, series, one_piece_then_work)
    return lambda: {"call": around(), "work": alone(), "one_piece": one_piece()}


def _clock(context: RankContext, maker: CallMaker, series: CallSeries, call: Callable[[], Any]) -> Callable[[], float]:
    """Microseconds of one ``call`` by the timing of the series."""
    if series.timing != "graph":
        return lambda: clock.one_call(context, call)
    clock.warm_up(call)
    graph = clock.capture(call)
    maker.check(series)

    def sample(keep: Any = call) -> float:  # the graph reads tensors that only the call keeps alive
        return clock.one_replay(context, graph)

    return sample


def _host_us(context: RankContext, call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds until the call returns, and its result."""
    _wait_for_all(context)
    began = time.perf_counter()
    result = call()
    return (time.perf_counter() - began) * 1e6, result


def _wait_for_all(context: RankContext) -> None:
    dist.barrier(context.group)
    _wait(context)


def _wait(context: RankContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def warm_up_iterations(iterations: int) -> int:
    """Samples of each row that do not count, before all others."""
    return max(1, iterations // 5)


@torch.no_grad()
def measure_on_rank(context: RankContext, series: Sequence[CallSeries], iterations: int) -> list[Measured]:
    """Samples of each series, all of one shape, on this rank. Collective."""
    inputs = make_inputs(context, series[0].shape)
    measured: dict[CallSeries, Measured] = {}
    with ExitStack() as stack:
        maker = CallMaker(context, inputs, stack)
        for operation, found in groupby(series, lambda each: each.operation):
            if context.rank == 0:
                context.report(f"{series[0].shape}: {operation}")
            contestants = {
                each: Contestant(make_sampler(context, maker, each), check=partial(maker.check, each))
                for each in found
            }
            take_turns(contestants, iterations, first_warm_ups=warm_up_iterations(iterations))
            measured |= {each: contestant.measured for each, contestant in contestants.items()}
    return [measured[each] for each in series]


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: from :meth:`tokenloom.bench.comm_work.CallSeries.name`.
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
    by_rank: Sequence[Measured],
    moved: Traffic,
    num_sms: int | None,
    setup: dict[str, Any],
    *,
    on_links: bool,
    counted: bool = True,
) -> Row:
    """Make a row from what all ranks found.

    Args:
        on_links: the ranks are GPUs, so there is a floor.
        counted: the bytes that leave a rank are known.
    """
    found = harness.percentiles(by_rank)
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
    """Kind of the row: "calls", "eager" pairs with the host's time, or "halves" around a GEMM."""
    if "work" in row.parts_us:
        return "halves"
    return "eager" if "host_dispatch" in row.parts_us else "calls"


def tables(rows: Sequence[Row]) -> list[Table]:
    """All rows, for people, in a table for each kind and shape that there is."""
    found: dict[tuple[str, CallSizes], list[Row]] = {}
    for row in rows:
        found.setdefault((kind_of(row), _shape(row)), []).append(row)
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


def _table(kind: str, shape: CallSizes, rows: Sequence[Row]) -> Table:
    (what, *headers), cells = KINDS[kind]
    headers = [what, "SMs", "floor\nµs", *headers, "fullest\nrank"]
    fullest = legends.about_routings([row.setup for row in rows])
    lines = [(label(row.name), _sms(row), _us(row.floor_us), *cells(row)) for row in rows]
    lines = [
        (*line, f"{row.setup['fullest_rank']:.2f}" if fullest else MISSING)
        for line, row in zip(lines, rows, strict=True)
    ]
    filled = [place for place in range(len(headers)) if any(line[place] != MISSING for line in lines)]
    return make_table(
        [headers[place] for place in filled],
        [[line[place] for place in filled] for line in lines],
        title=_title(shape),
        title_style=None,
        padding=0,
    )


def _us(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.1f}"


def _rate(gbytes_per_s: float | None) -> str:
    return MISSING if gbytes_per_s is None else f"{gbytes_per_s:.3g}"


def measure(
    pool: RankPool, series: Sequence[CallSeries], iterations: int, starting: Callable[[str], None] = lambda what: None
) -> Iterator[Row]:
    """Measure, row by row.

    Args:
        series: those of one shape together, and within them those of one operation.
        iterations: samples of each, in turns, after a fifth as many to warm up.
        starting: called with what is about to be measured.
    """
    for _, found in groupby(series, lambda each: each.shape):
        together = list(found)
        limit_s = harness.limit_s(iterations) * len({each.operation for each in together})
        results = pool.run(measure_on_rank, together, iterations, limit_s=limit_s, on_event=starting)
        for index, each in enumerate(together):
            routing = each.routing(pool.num_ranks)
            nodes_of = each.ranks_per_node if each.backend == "network" else None
            rows = comm_work.count_rows(routing.plan, routing.topk_ids, nodes_of)
            yield make_row(
                each.name(pool.num_ranks),
                [result[index] for result in results],
                comm_work.moved(routing.plan, rows, each.operation),
                each.num_sms,
                _setup_of(each, pool, iterations) | {"fullest_rank": routing.fullest_rank},
                on_links=pool.device == "cuda",
                counted=each.backend == deep_ep.NAME or sums_per_rank(each.backend),
            )


def _setup_of(series: CallSeries, pool: RankPool, iterations: int) -> dict[str, Any]:
    calls = {"graph": clock.GRAPH_CALLS, "eager": EAGER_PAIRS[pool.device]}
    return {
        "operation": series.operation.name,
        "backend": series.backend,
        "payload": series.operation.payload,
        "layout": series.operation.layout,
        "timing": series.timing,
        **asdict(series.shape),
        "num_ranks": pool.num_ranks,
        "ranks_per_node": series.ranks_per_node,
        "sizes": None if series.backend == deep_ep.NAME else series.sizes,
        "scale_layout": series.scale_layout,
        "beside_us": series.beside_us,
        "calls_per_sample": calls.get(series.timing, 1),
        "spare_slots": series.spare_slots,
        "balance": series.balance,
        "routing": "lognormal" if series.shape.max_vio else "uniform",
        "routing_seed": ROUTING_SEED,
        "iterations": iterations,
        "warm_up_iterations": warm_up_iterations(iterations),
        "rounds": harness.ROUNDS,
    }


def run_comm(run: Run, series: Sequence[CallSeries], notes: Sequence[str], iterations: int | None = None) -> None:
    """Measure what :func:`tokenloom.bench.comm_work.plan_series` planned, print tables, and write files."""
    if run.plot_file is not None:
        load_matplotlib()
    setup, samples = run.setup(), iterations or DEFAULT_ITERATIONS[run.device]
    run.say(
        f"{counted(run.num_ranks, 'rank')} on {machine(run.device)}, over {TRANSPORTS[run.device]}; {samples} samples "
        f"of each row, behind {warm_up_iterations(samples)} to warm up"
    )
    say(run.console, *notes)
    with run.ranks() as (pool, starting):
        measured = list(measure(pool, series, samples, starting))
    for table in tables(measured):
        run.show(table)
    kinds = {kind_of(row) for row in measured}
    numbers = {
        "link": LINK_GBYTES_PER_S,
        "clock": legends.COMM_CLOCKS[run.device].format(calls=clock.GRAPH_CALLS),
        "pairs": EAGER_PAIRS[run.device],
    }
    floors = [legends.COMM_FLOOR] if any(row.floor_us is not None for row in measured) else []
    about = legends.about_routings([row.setup for row in measured])
    about += [legends.COMM_BATCH] if any(row.setup["balance"] for row in measured) else []
    texts = (legends.COMM, *floors, *about, *(text for kind, text in legends.COMM_KINDS.items() if kind in kinds))
    run.say(*(text.format(**numbers) for text in texts))
    run.keep(setup, notes, measured)
    if run.plot_file is not None:
        write_chart(run.plot_file, setup, measured)
        run.say(f"chart written to {run.plot_file}")


def write_chart(file: Path, setup: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw the median of every row."""
    points = [
        Point(_title(replace(_shape(row), max_vio=0.0)), _operation(row), _who(row), row.setup["max_vio"], row.p50_us)
        for row in rows
    ]
    write_points_png(file, setup, "dispatch and combine", points)


def _shape(row: Row) -> CallSizes:
    return CallSizes(**{each.name: row.setup[each.name] for each in fields(CallSizes)})


def _title(shape: CallSizes) -> str:
    sizes = f"{shape.num_tokens} tokens a rank, hidden {shape.hidden}"
    skew = f", MaxVio {shape.max_vio:g}" if shape.max_vio else ""
    return f"{sizes}, top-{shape.top_k} of {shape.num_experts} experts{skew}"


def _sms(row: Row) -> str:
    return MISSING if row.num_sms is None else str(row.num_sms or "chosen")


def _who(row: Row) -> str:
    sms = "" if row.num_sms is None else f", {_sms(row)} SMs"
    halves = ", halves around a GEMM" if kind_of(row) == "halves" else ""
    who = f"{row.setup['backend']}{sms}, {row.setup['timing']}{halves}"
    return with_spare_slots(who, row.setup.get("spare_slots"), row.setup.get("balance"))


def _operation(row: Row) -> str:
    return f"{row.setup['operation']} {row.setup['payload']} {row.setup['layout']}"
