"""``tokenloom bench mega``: the fused FP8 layer for inference, as a whole and by stages, beside other layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table

from tokenloom.bench import clock as clocks
from tokenloom.bench import harness, legends
from tokenloom.bench.clock import Clock, try_capture
from tokenloom.bench.harness import Contestant, Measured, Sample, percentiles, take_turns
from tokenloom.bench.mega_trace import write_trace
from tokenloom.bench.mega_work import DRAWS, FP8_TFLOPS, HBM_GBYTES_PER_S, MegaShape, Work, make_weights, work
from tokenloom.bench.plot import load_matplotlib, write_curves_by_max_vio_png, write_curves_png
from tokenloom.bench.rivals.deep_gemm import DeepGemm, Weights
from tokenloom.bench.setup import Run
from tokenloom.bench.tables import counted, make_table
from tokenloom.bench.workload import LINK_GBYTES_PER_S, routing_names, with_spare_slots
from tokenloom.compat.deep_gemm.testing import calc_diff
from tokenloom.errors import InvalidArgument
from tokenloom.inference.mega_moe import MegaMoE
from tokenloom.inference.trace import MegaTimes
from tokenloom.ops.quant.four_bits import MAGNITUDES, MXFP4
from tokenloom.plan import FP8_BLOCK
from tokenloom.runtime.processes import RankContext
from tokenloom.tune.samples import popularity

OURS, SPARE = "tokenloom", "spare"
"""Our layer, and the same with replicas of experts in spare slots."""
INPUT = "bfloat16"
"""Dtype of our x."""
CLOCKS = ("graph", "events", "steady")
"""A call in a replay, an eager one, and one of replays without a pause. All else that is timed are stages."""
NAMED_SIZES = (
    ("ep", "num_ranks"),
    ("t", "num_tokens"),
    ("h", "hidden"),
    ("i", "intermediate"),
    ("e", "num_experts"),
    ("k", "top_k"),
    ("s", "num_shared_experts"),
)
"""Letters before the sizes in a row's name, in that order. The last size is there only if it is not 0."""


def make_mega(
    group: dist.ProcessGroup, shape: MegaShape, max_tokens: int, device: torch.device, **options: Any
) -> MegaMoE:
    """The layer of these sizes, without weights. Collective."""
    return MegaMoE(
        group,
        num_experts=shape.num_experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        top_k=shape.top_k,
        max_tokens_per_rank=max_tokens,
        num_shared_experts=shape.num_shared_experts,
        device=device,
        **options,
    )


class OtherMega:
    """Another MegaMoE than the one that is measured first; like :class:`DeepGemm`. By default it is of the same form.

    Attributes:
        mega: the layer, with weights.
    """

    about: ClassVar[str]
    input: ClassVar[str] = INPUT
    most_difference: ClassVar[float]
    buffer_bytes: ClassVar[int] = 0
    options: ClassVar[dict[str, str]] = {}
    load_options: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def load(shape: MegaShape) -> str | None:
        """It is always there."""
        return None

    def __init__(
        self,
        group: dist.ProcessGroup,
        shape: MegaShape,
        max_tokens: int,
        l1_weights: Weights,
        l2_weights: Weights,
        **options: Any,
    ) -> None:
        self.mega = make_mega(group, shape, max_tokens, l1_weights[0].device, **self.options, **options)
        self._take_weights(l1_weights, l2_weights)

    def prepared_call(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], Any]:
        """Return the layer on these inputs."""
        return lambda: self.mega(x, topk_ids, topk_weights, out=out)

    def _take_weights(self, l1_weights: Weights, l2_weights: Weights) -> None:
        (w1, w1_scales), (w2, w2_scales) = l1_weights, l2_weights
        self.mega.load_weights(w1, w2, w1_scales, w2_scales, **self.load_options)

    def close(self) -> None:
        """Raise what its calls have left behind, and release its buffers."""
        self.mega.check()
        self.mega.close()


class Composed(OtherMega):
    """MegaMoE as calls that anybody could make: dispatch, grouped GEMMs, combine."""

    about = (
        "composed is MegaMoE(backend='composed'): dispatch, grouped GEMMs and combine, whose host reads how many rows "
        "have come"
    )
    most_difference = 1e-3
    options: ClassVar[dict[str, str]] = {"backend": "composed"}


class ByRow(OtherMega):
    """MegaMoE with a scale for each row and each channel."""

    about = "row is MegaMoE(recipe='row'), with weights that were rounded again to scales of channels"
    most_difference = 5e-3  # of two quantisations of all operands
    options: ClassVar[dict[str, str]] = {"recipe": "row"}
    load_options: ClassVar[dict[str, Any]] = {"round_again": True}


class FourBits(OtherMega):
    """MegaMoE with weights of four bits in memory."""

    about = (
        "four_bits is MegaMoE(recipe='row') with load_weights(keep='four_bits'), of weights that were rounded to MXFP4"
    )
    most_difference = 5e-2  # E2M1 rounds weights by about 11%
    options: ClassVar[dict[str, str]] = {"recipe": "row"}

    def _take_weights(self, l1_weights: Weights, l2_weights: Weights) -> None:
        (w1, w1_scales), (w2, w2_scales) = in_four_bits(*l1_weights, parts=2), in_four_bits(*l2_weights)
        self.mega.load_weights(w1, w2, w1_scales, w2_scales, four_bits=MXFP4, keep="four_bits")


class Replicated(OtherMega):
    """The same MegaMoE with replicas of hot experts in spare slots. ``spare_slots`` is an option of it."""

    most_difference = 1e-3  # a GEMM may add in another order where an expert has other rows

    def place(self, shape: MegaShape, spare_slots: int) -> None:
        """Move the weights to where they are planned for a routing. Collective, between calls."""
        comm = self.mega.comm
        self.mega.move_experts(shape.placement(comm.num_ranks, spare_slots)).run()

    def _take_weights(self, l1_weights: Weights, l2_weights: Weights) -> None:
        (w1, w1_scales), (w2, w2_scales) = l1_weights, l2_weights
        comm = self.mega.comm
        own = range(comm.rank * comm.plan.experts_per_rank, (comm.rank + 1) * comm.plan.experts_per_rank)
        self.mega.load_weights(w1, w2, w1_scales, w2_scales, experts=own)


def in_four_bits(w: torch.Tensor, w_scales: torch.Tensor, parts: int = 1) -> Weights:
    """Round weights with block scales to MXFP4.

    Args:
        w: float8_e4m3fn [E, N, K], K a multiple of 32.
        w_scales: float32 [E, B, K / 128], with B blocks of N, of which each of ``parts`` equal parts has its own.

    Returns:
        uint8 [E, N, K / 2] and uint8 [E, N, K / 32].
    """
    magnitudes = torch.tensor(MAGNITUDES, device=w.device)
    packed, exponents = [], []
    for codes, scales in zip(w, w_scales, strict=True):  # one expert's are wide at a time
        of_parts = scales.unflatten(0, (parts, -1)).repeat_interleave(FP8_BLOCK, 1)[:, : len(codes) // parts]
        of_values = of_parts.flatten(0, 1).repeat_interleave(FP8_BLOCK, 1)[:, : codes.shape[1]]
        groups = (codes.float() * of_values).unflatten(-1, (-1, MXFP4.group))
        exponent = torch.frexp(groups.abs().amax(-1, keepdim=True)).exponent - 3  # so the largest lies from 4 to 8
        nearest = torch.bucketize(torch.ldexp(groups.abs(), -exponent), (magnitudes[1:] + magnitudes[:-1]) / 2)
        nibbles = (nearest + 8 * (groups < 0)).flatten(-2).to(torch.uint8)
        packed.append(nibbles[:, ::2] | nibbles[:, 1::2] << 4)
        exponents.append((exponent.squeeze(-1) + 127).to(torch.uint8))
    return torch.stack(packed), torch.stack(exponents)


Other = DeepGemm | OtherMega
"""A layer beside ours. DeepGemm says what each of them has."""
OTHERS: dict[str, type[DeepGemm] | type[OtherMega]] = {
    "deep_gemm": DeepGemm,
    "row": ByRow,
    "four_bits": FourBits,
    "composed": Composed,
}


LAYERS = OTHERS | {SPARE: Replicated}
"""All layers that are compared with ours."""


def load(names: Sequence[str], shape: MegaShape) -> dict[str, str | None]:
    """Find these layers, before anything starts.

    Returns:
        Versions by name.
    """
    unknown = [name for name in names if name not in OTHERS]
    if unknown:
        raise InvalidArgument(f"against is {unknown[0]!r}, expected one of {', '.join(OTHERS)}")
    return {name: OTHERS[name].load(shape) for name in names}


@dataclass(frozen=True)
class MegaFound:
    """Results of one rank for one number of tokens.

    Attributes:
        layers: everybody by name, OURS first; the difference is by
            :func:`tokenloom.compat.deep_gemm.testing.calc_diff`.
        traced: times of a call of ours by itself, if it was asked for.
        taken_gb: memory that a layer takes for calls of most tokens, beside its weights, by name.
    """

    layers: dict[str, Measured]
    traced: MegaTimes | None = None
    taken_gb: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def measure_on_rank(
    context: RankContext,
    shapes: Sequence[MegaShape],
    tokens: Sequence[int],
    iterations: int,
    cold: bool,
    against: Sequence[str],
    traced: bool = False,
    spare_slots: int | None = None,
) -> list[MegaFound]:
    """Measure every number of tokens of every shape on this rank. Collective.

    Args:
        shapes: they differ by their routing alone.
        cold: overwrite L2 before each sample, and let a sample be one call.
        against: names of OTHERS, which are measured too.
        traced: trace a call of the last number of tokens.
        spare_slots: measure ours with replicas in so many more slots of each rank too.
    """
    clock, shape = Clock(context, cold), shapes[0]
    found: list[MegaFound] = []
    with make_mega(context.group, shape, max(tokens), context.device) as mega:
        w1, w1_scales, w2, w2_scales = make_weights(shape, context)
        weights = ((w1, w1_scales), (w2, w2_scales))
        sizes = (context.group, shape, max(tokens))
        others: dict[str, Other] = {}
        if spare_slots is not None:
            others[SPARE] = replicated = Replicated(*sizes, *weights, spare_slots=spare_slots)
        others |= {name: OTHERS[name](*sizes, *weights) for name in against}
        mega.load_weights(w1, w2, w1_scales, w2_scales)
        taken_gb: dict[str, float] = {}
        calls = list(product(shapes, tokens))
        for i, (shape, num_tokens) in enumerate(calls):
            if spare_slots is not None:
                replicated.place(shape, spare_slots)  # which moves nothing from one number of tokens to the next
            if context.rank == 0:
                context.report(f"{num_tokens} tokens on every rank")
            last = i == len(calls) - 1
            draws = [
                _measure(clock, mega, others, shape, num_tokens, draw, iterations, traced and last, taken_gb)
                for draw in range(shape.num_draws(context.num_ranks, num_tokens))
            ]
            found.append(together(draws))
        # Only now: after a failure the others may never reach a collective.
        for other in others.values():
            other.close()
    return found


def together(draws: Sequence[MegaFound]) -> MegaFound:
    """Join what was found for several routings of as many tokens: all samples, and the largest differences."""
    layers: dict[str, Measured] = {}
    for name, first in draws[0].layers.items():
        found = [each.layers[name] for each in draws]
        samples = {what: [us for each in found for us in each.samples[what]] for what in first.samples}
        differences = [each.difference for each in found if each.difference is not None]
        layers[name] = Measured(samples, first.why_not, float(np.max(differences)) if differences else None)
    return replace(draws[-1], layers=layers)


class StagedGraph:
    """One call of ours in a graph, with an event behind each stage. Making one is collective."""

    def __init__(self, clock: Clock, mega: MegaMoE, call: Callable[[], Any]) -> None:
        self._clock = clock
        self._events: list[tuple[str, torch.cuda.Event]] = []

        def staged_call() -> None:
            self._record("begin")
            mega.after_stage = self._record
            call()
            mega.after_stage = None

        self._graph = clocks.capture(staged_call, calls=1)

    def _record(self, stage: str) -> None:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._events.append((stage, event))

    def sample(self) -> dict[str, float]:
        """Microseconds of each stage of one replay, in their order. Ranks meet in a collective right before it."""
        self._clock.replay_us(self._graph)
        pairs = zip(self._events, self._events[1:], strict=False)
        return {stage: before.elapsed_time(after) * 1e3 for (_, before), (stage, after) in pairs}


@dataclass(frozen=True)
class MegaLayer:
    """A layer on fixed inputs.

    Attributes:
        call: an eager call, which writes ``out``.
        out: bfloat16 [T, H].
        graph: a graph of Clock.calls calls, or None, which ``why_not`` explains.
    """

    call: Callable[[], Any]
    out: torch.Tensor
    graph: torch.cuda.CUDAGraph | None
    why_not: str = ""

    def output(self, clock: Clock) -> torch.Tensor:
        """``out``, wiped and written once more by what was measured."""
        self.out.fill_(torch.nan)
        if self.graph is None:
            clock.call_us(self.call)
        else:
            clock.replay_us(self.graph)
        return self.out


def _measure(
    clock: Clock,
    mega: MegaMoE,
    others: Mapping[str, Other],
    shape: MegaShape,
    num_tokens: int,
    draw: int,
    iterations: int,
    traced: bool,
    taken_gb: dict[str, float],
) -> MegaFound:
    """Measure one number of tokens. ``taken_gb`` is filled at first calls, which make all buffers."""
    context = clock.context
    generator = torch.Generator(context.device).manual_seed(context.rank)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": context.device}
    x = torch.randn(num_tokens, shape.hidden, **drawn).bfloat16()
    ids = shape.topk_ids(context.rank, num_tokens, draw).to(context.device)
    weights = torch.rand(num_tokens, shape.top_k, **drawn)
    weights.masked_fill_(ids < 0, 0)  # not every layer promises to leave the weight of an unused place unread
    out = torch.empty_like(x)

    def call() -> None:
        mega(x, ids, weights, out=out)

    taken = clocks.warm_up(call)
    taken_gb.setdefault(OURS, taken / 1e9)
    ours = MegaLayer(call, out, clock.capture(call))
    layers = {OURS: ours}
    for name, other in others.items():
        layers[name], taken = _of_other(clock, other, x, ids, weights)
        taken_gb.setdefault(name, taken / 1e9)
    measured = {name: Measured(why_not=each.why_not) for name, each in layers.items()}
    stages = {f"{OURS}, stages": Contestant(StagedGraph(clock, mega, call).sample, measured[OURS])}
    if isinstance(replicated := others.get(SPARE), Replicated):
        staged = StagedGraph(clock, replicated.mega, layers[SPARE].call)
        stages[f"{SPARE}, stages"] = Contestant(staged.sample, measured[SPARE])
    take_turns(contestants(clock, layers, measured) | stages, iterations)
    for name in [*layers, *reversed(layers)] if not clock.cold else []:
        graph = layers[name].graph
        if graph is not None:
            measured[name].samples.setdefault("steady", []).append(clock.steady_us(graph))
    for name, each in layers.items():
        if name != OURS:
            measured[name] = replace(measured[name], difference=calc_diff(ours.output(clock), each.output(clock)))
    times = traced_call(clock, mega, call) if traced else None
    mega.check()
    return MegaFound(measured, times, taken_gb)


def contestants(
    clock: Clock, layers: Mapping[str, MegaLayer], measured: Mapping[str, Measured]
) -> dict[str, Contestant]:
    """All layers by graph, as far as they have one, then all by events."""
    found: dict[str, Contestant] = {}
    for name, each in layers.items():
        if each.graph is not None:
            found[f"{name}, graph"] = Contestant(
                partial(_sample, "graph", clock.replay_us, each.graph), measured[name]
            )
    for name, each in layers.items():
        found[f"{name}, events"] = Contestant(partial(_sample, "events", clock.call_us, each.call), measured[name])
    return found


def _sample(what: str, take_us: Callable[[Any], float], given: Any) -> Sample:
    return {what: take_us(given)}


def _of_other(
    clock: Clock, other: Other, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[MegaLayer, int]:
    """The layer, and bytes of memory that its calls have taken beside weights."""
    out = torch.empty_like(x)
    call = other.prepared_call(x, ids, weights, out)
    taken = other.buffer_bytes + clocks.warm_up(call)
    return MegaLayer(call, out, *try_capture(clock, call, out)), taken


def traced_call(clock: Clock, mega: MegaMoE, call: Callable[[], Any]) -> MegaTimes:
    """Trace one call by itself, in a graph: times on the CPU. Later calls of the layer are traced too. Collective."""
    times = mega.trace()
    clocks.warm_up(call)
    graph = clocks.capture(call, calls=1)
    clock.replay_us(graph)
    times.zero_()
    clock.replay_us(graph)
    return times.cpu()


@dataclass(frozen=True)
class MegaRow:
    """Numbers of one layer for one number of tokens.

    Attributes:
        name: mega[/other layer]/ranks/tokens/hidden/intermediate/experts/top-k[/shared experts][/MaxVio][/spare slots]
            /clock[/cold].
        who: "tokenloom"; "spare", the same with replicas in spare slots; or the other layer's name.
        p50_us, p99_us, slowest_rank: time of a call, by the clock in the name.
        steady_us: the same without pauses, where a GPU is at its power limit; None without a graph, or cold.
        taken_gb: memory that calls of most tokens take beside weights, on the rank that takes most.
        tflops: rate per rank, per p50.
        hbm_gbytes_per_s: weights of the experts that have a token, on the rank with most such experts, per p50.
        nvlink_gbytes_per_s: what leaves the busiest rank when ours runs, per p50.
        floor_us: least time; the legend of the table says what it is.
        times_floor: p50 over floor_us; None where that is 0.
        stages_us: p50 of each stage; empty for layers of other programs or forms.
        times_ours: in another layer's row, its time over ours, both by graph, or both by events where it has no graph.
        difference: there, distance of the outputs, on the rank where it is largest.
        setup: everything needed to repeat the row, besides what all rows of a run share.
    """

    name: str
    who: str
    p50_us: float
    p99_us: float
    slowest_rank: int
    events_us: float
    steady_us: float | None
    taken_gb: float
    tflops: float
    hbm_gbytes_per_s: float
    nvlink_gbytes_per_s: float
    floor_us: float
    times_floor: float | None
    stages_us: dict[str, float]
    cold: bool
    times_ours: float | None
    difference: float | None
    setup: dict[str, Any]


def make_rows(
    shape: MegaShape,
    num_ranks: int,
    num_tokens: int,
    iterations: int,
    cold: bool,
    by_rank: Sequence[MegaFound],
    spare_slots: int | None = None,
) -> list[MegaRow]:
    """Make our row, and one of each other layer, from what all ranks found."""
    rows = list[MegaRow]()
    common = asdict(shape) | {
        "num_tokens": num_tokens,
        "num_ranks": num_ranks,
        "iterations": iterations,
        "draws": shape.num_draws(num_ranks, num_tokens),
        "rounds": harness.ROUNDS,
    }
    for who in by_rank[0].layers:
        found = [each.layers[who] for each in by_rank]
        its_slots = spare_slots if who == SPARE else None
        needed = work(shape, num_ranks, num_tokens, its_slots)
        its_setup = common | {"x": INPUT if who == OURS else LAYERS[who].input, "spare_slots": its_slots}
        row = _make_row(who, needed, cold, its_setup, found)
        row = replace(row, taken_gb=max(each.taken_gb.get(who, 0.0) for each in by_rank))
        if who != OURS:
            same_clock = rows[0].p50_us if row.setup["clock"] == "graph" else rows[0].events_us
            # numpy's maximum keeps NaN, which is the largest difference of all.
            most = float(np.max([each.difference for each in found]))
            row = replace(row, times_ours=row.p50_us / same_clock, difference=most)
        rows.append(row)
    return rows


def _make_row(who: str, needed: Work, cold: bool, common: dict[str, Any], by_rank: Sequence[Measured]) -> MegaRow:
    times = percentiles(by_rank)
    clock = "graph" if "graph" in times else "events"
    p50, p99, slowest_rank = times[clock]
    name = ["mega"] if who in (OURS, SPARE) else ["mega", who]
    name += [f"{letter}{common[size]}" for letter, size in NAMED_SIZES if letter != "s" or common[size]]
    name += routing_names(common["max_vio"], common["spare_slots"])
    return MegaRow(
        name="/".join([*name, clock, *(["cold"] if cold else [])]),
        who=who,
        p50_us=p50,
        p99_us=p99,
        slowest_rank=slowest_rank,
        events_us=times["events"][0],
        steady_us=times["steady"][0] if "steady" in times else None,
        taken_gb=0.0,
        tflops=needed.flops / p50 / 1e6,
        hbm_gbytes_per_s=needed.weight_bytes / p50 / 1e3,
        nvlink_gbytes_per_s=needed.sent_bytes / p50 / 1e3,
        floor_us=needed.floor_us,
        times_floor=p50 / needed.floor_us if needed.floor_us else None,
        stages_us={what: median for what, (median, _, _) in times.items() if what not in CLOCKS},
        cold=cold,
        times_ours=None,
        difference=None,
        setup=common
        | {
            "fullest_rank": needed.fullest_rank,
            "clock": clock,
            "calls_per_sample": clocks.GRAPH_CALLS if clock == "graph" and not cold else 1,
            "why_no_graph": by_rank[0].why_not,
        },
    )


def notes(rows: Sequence[MegaRow]) -> list[str]:
    """Lines that make another layer's numbers credible: how it was timed, and whether both computed the same."""
    said = [
        f"{row.who}: its calls could not be captured ({row.setup['why_no_graph']}); its p50 and p99 are of events, "
        "and compared with ours of events"
        for row in rows
        if row.setup["why_no_graph"]
    ]
    differences: dict[str, list[float]] = {}
    for row in rows:
        if row.difference is not None:
            differences.setdefault(row.who, []).append(row.difference)
    for who, found in differences.items():
        worst, limit = float(np.max(found)), LAYERS[who].most_difference
        agree = "so they agree" if worst < limit else "SO THEY DO NOT AGREE: believe no row"
        said.append(
            f"outputs: 1 - 2 sum(xy) / sum(x^2 + y^2) of ours and {who}'s is {worst:.2g} at most; the limit is "
            f"{limit}, {agree}"
        )
    return list(dict.fromkeys(said))


def table(rows: Sequence[MegaRow]) -> Table:
    """All rows, for people. Names of layers and a comparison appear only where there are others than ours."""
    others = any(row.who != OURS for row in rows)
    uneven = legends.about_routings([row.setup for row in rows])
    stages = list(rows[0].stages_us) if rows else []
    headers = ["tokens", *(["MaxVio", "fullest\nrank"] if uneven else []), *(["layer"] if others else [])]
    headers += ["p50\nµs", "steady\nµs", "events\nµs", "TFLOP\n/s"]
    headers += ["HBM\nGB/s", "NVLink\nGB/s", "floor\nµs", "taken\nGB", *(["times\nours"] if others else [])]
    headers += [f"{stage}\nµs" for stage in stages]
    # With two more columns it takes all of a console 120 wide.
    result = make_table(headers, left=(), padding=(0, 0 if others else 1, 0, 0))
    for row in rows:
        numbers = (row.p50_us, row.steady_us, row.events_us, row.tflops, row.hbm_gbytes_per_s, row.nvlink_gbytes_per_s)
        cells = [str(row.setup["num_tokens"])]
        if uneven:
            cells += [f"{row.setup['max_vio']:g}", f"{row.setup['fullest_rank']:.2f}"]
        if others:
            who = "/".join(routing_names(0, row.setup["spare_slots"])) or row.who
            cells.append(who if row.setup["clock"] == "graph" else f"{who}, events")
        cells += ["-" if value is None else f"{value:,.0f}" for value in (*numbers, row.floor_us)]
        cells.append(f"{row.taken_gb:.2f}")
        if others:
            cells.append("" if row.times_ours is None else f"{row.times_ours:.2f}")
        cells += [f"{row.stages_us[stage]:,.0f}" if stage in row.stages_us else "" for stage in stages]
        result.add_row(*cells)
    return result


def curves(rows: Sequence[MegaRow]) -> dict[str, list[tuple[float, float]]]:
    """Points (tokens, p50 in microseconds) by layer and clock, for a plot."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(_curve(row), []).append((row.setup["num_tokens"], row.p50_us))
    return {who: sorted(points) for who, points in found.items()}


def curves_by_max_vio(rows: Sequence[MegaRow]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Points (MaxVio, p50 in microseconds) by number of tokens, and by layer and clock, for a plot."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        chart = found.setdefault(f"{row.setup['num_tokens']} tokens a rank", {})
        chart.setdefault(_curve(row), []).append((row.setup["max_vio"], row.p50_us))
    return found


def _curve(row: MegaRow) -> str:
    who = OURS if row.who == SPARE else row.who
    return with_spare_slots(f"{who}, {row.setup['clock']}", row.setup["spare_slots"])


def floors(rows: Sequence[MegaRow]) -> list[tuple[float, float]]:
    """Points (tokens, floor in microseconds), without floors of 0, which have no place on a logarithmic axis."""
    return sorted({(row.setup["num_tokens"], row.floor_us) for row in rows if row.floor_us > 0 and row.who != SPARE})


def run_mega(
    run: Run,
    shapes: Sequence[MegaShape],
    tokens: Sequence[int],
    iterations: int,
    *,
    cold: bool = False,
    against: Sequence[str] = (),
    spare_slots: int | None = None,
    trace_file: Path | None = None,
) -> None:
    """Measure every number of tokens on GPUs, print a table, write the files that were asked for.

    Args:
        shapes: they differ by their routing alone.
        cold: overwrite L2 before each sample, which then is one call.
        spare_slots: measure ours with replicas in so many more slots of each rank too, under a placement that is
            planned for each routing.
        trace_file: file for a call of the last number of tokens, for Perfetto.
    """
    if run.plot_file is not None:
        load_matplotlib()
    shape = shapes[0]
    for each in shapes:
        popularity(each.num_experts, each.top_k, each.max_vio)  # says what no routing can be
    versions = load(against, shape)
    setup = run.setup() | {name: version for name, version in versions.items() if version is not None}
    draws = sum(shape.num_draws(run.num_ranks, each) for each in tokens) * len(shapes)
    others = len(against) + (spare_slots is not None)
    limit_s = harness.limit_s(iterations) * draws * (1 + others)
    with run.ranks() as (pool, starting):
        arguments = (list(shapes), list(tokens), iterations, cold, list(against), trace_file is not None, spare_slots)
        results = pool.run(measure_on_rank, *arguments, limit_s=limit_s, on_event=starting)
    rows = [
        row
        for i, (each_shape, num_tokens) in enumerate(product(shapes, tokens))
        for row in make_rows(
            each_shape, run.num_ranks, num_tokens, iterations, cold, [each[i] for each in results], spare_slots
        )
    ]
    said = notes(rows)
    run.say(f"{counted(run.num_ranks, 'rank')} on {setup['device_name']}")
    about_routings = legends.about_routings([row.setup for row in rows])
    run.show(table(rows), keys=1 + bool(others) + 2 * bool(about_routings))
    run.say(legend(cold, against, bool(others)), *about_routings, *said)
    run.keep(setup, said, rows)
    if run.plot_file is not None:
        sizes = f"hidden {shape.hidden}, intermediate {shape.intermediate}, top-{shape.top_k} of {shape.num_experts}"
        about = f"{sizes} experts{', cold L2' if cold else ''}"
        if len(shapes) > 1:
            write_curves_by_max_vio_png(run.plot_file, setup, f"MegaMoE, {about}", curves_by_max_vio(rows))
        else:
            write_curves_png(run.plot_file, setup, "MegaMoE", about, curves(rows), {"floor": floors(rows)})
        run.say(f"chart written to {run.plot_file}")
    if trace_file is not None:
        name = [row.name for row in rows if row.who == OURS][-1]
        traced = [times for each in results if (times := each[-1].traced) is not None]
        write_trace(trace_file, setup, name, tokens[-1], traced)
        run.say(f"a call of {tokens[-1]} tokens written to {trace_file}; open it in Perfetto")


def legend(cold: bool, against: Sequence[str], compared: bool) -> str:
    """Explain the table's columns."""
    calls = "one call" if cold else f"{clocks.GRAPH_CALLS} calls"
    parts = [
        legends.MEGA.format(calls=calls, draws=DRAWS, hbm=HBM_GBYTES_PER_S, tflops=FP8_TFLOPS, link=LINK_GBYTES_PER_S)
    ]
    parts += [legends.MEGA_COLD] if cold else []
    parts += [f"{OTHERS[name].about}." for name in against]
    parts += [legends.MEGA_OTHERS] if compared else []
    return " ".join(parts)
