"""``tokenloom bench train``: a training step of the layer, checked, beside a rival and baselines."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table

from tokenloom.backends.seam import Strategy
from tokenloom.bench import clock, harness, legends
from tokenloom.bench.differences import LARGEST_SHARE, Difference, total
from tokenloom.bench.harness import Contestant, Measured, Sample, percentiles, take_turns
from tokenloom.bench.plot import Point, load_matplotlib, write_points_png
from tokenloom.bench.rivals.torch_layer import Experts, own_experts, torch_experts, torch_layer
from tokenloom.bench.setup import TRANSPORTS, Run, machine
from tokenloom.bench.tables import counted, make_table
from tokenloom.bench.train_work import (
    LIMITS,
    REASONS,
    TENSORS,
    TrainOptions,
    TrainProblem,
    TrainShape,
    Weights,
    choose,
    compare_all,
    compare_with_reference,
    make_problem,
    require_steerable,
)
from tokenloom.bench.workload import (
    DTYPES,
    EARLIER_TOKENS,
    Balance,
    Routing,
    placed,
    planned,
    routing_names,
    with_spare_slots,
)
from tokenloom.comm.communicator import Communicator
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.training.layer import ExpertParallelMoE
from tokenloom.training.replicas import place_experts
from tokenloom.training.saved_activations import SavedTensor
from tokenloom.training.shards import local_part
from tokenloom.training.state_by_expert import by_expert
from tokenloom.tune import choices
from tokenloom.tune.samples import popularity

DEFAULT_ITERATIONS = {"cpu": 6, "cuda": 30}
WEIGHT_SEED = 1_000_000
"""Seed of the weights. No rank has it: weights must not resemble tokens."""
WARM_UP_STEPS = 2
"""Steps of everybody at the beginning of each turn, because caches and memory are left as somebody else used them."""
SHOWN_SHARE = 0.01
"""Share of all bytes kept for backward. Tensors below it are shown as one line."""
CHOSEN_BY = {
    "hand": "by hand (--strategy)",
    "tune": "tuned here (`tokenloom tune`)",
    "default": "the default; `tokenloom tune` has chosen none for this shape here",
}
OURS, SPARE, BATCH, LOCAL, ONE = "ours", "spare", "batch", "local", "one"
"""The layer, the same with replicas of experts in spare slots, with splits of batches instead, and baselines."""
WITH_SLOTS = {SPARE: "with replicas", BATCH: "with splits of batches"}
"""Layers that have spare slots, in words."""
BASELINES = (LOCAL, ONE)
PASSES = ("inference", "forward", "backward")
"""Passes that are timed: forward without gradients, forward with them, backward."""


@dataclass(frozen=True)
class SlotsFound:
    """What a rank found of a layer with spare slots.

    Attributes:
        routes: routes that this rank's slots got.
        differences: of outputs and gradients from those of the layer without, by TENSORS.
    """

    routes: int
    differences: dict[str, Difference]


@dataclass(frozen=True)
class TrainFound:
    """Results of one rank.

    Attributes:
        chosen_by: who chose the strategy, a key of CHOSEN_BY; only rank 0's counts.
        routes: routes that this rank's experts got.
        checked: differences from the reference, by TENSORS; None if that was not asked for.
        rival: differences of the rival from ours, by TENSORS.
        layers: samples of PASSES, by who; empty for those who could not be measured, with the reason.
        with_slots: layers with spare slots, by SPARE and BATCH.
    """

    backend: str
    strategy: Strategy
    chosen_by: str
    routes: int
    checked: dict[str, Difference] | None
    rival: dict[str, Difference]
    saved: list[SavedTensor]
    layers: dict[str, Measured]
    with_slots: dict[str, SlotsFound] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainRow:
    """How long one pass takes somebody.

    Attributes:
        name: train/backend, rival or baseline/ranks/tokens of all ranks/hidden/intermediate/experts/top-k/dtype/pass,
            with /MaxVio before the pass where the routing is drawn, /spare slots of a layer that has them, and /batch
            where these are for splits of batches.
        who: OURS, SPARE, BATCH, the rival, or one of BASELINES.
        what: one of PASSES.
        p50_ms, p99_ms, slowest_rank: time over samples, each of its slowest rank.
        tflops: rate of the experts' GEMMs, per rank that works, per p50.
        exposed_ms: in rows of OURS, SPARE and BATCH, by baseline: p50 less the baseline's; that of "one" is divided
            by the ranks.
        scaling: likewise, time of "one" divided by the ranks, over ours; 1 is a network that costs nothing.
        rival_ratio: likewise, the rival's time over ours.
        setup: everything needed to repeat the row, besides what all rows of a run share.
    """

    name: str
    who: str
    what: str
    p50_ms: float
    p99_ms: float
    slowest_rank: int
    tflops: float
    exposed_ms: dict[str, float]
    scaling: float | None
    rival_ratio: float | None
    setup: dict[str, Any]


@dataclass(frozen=True)
class CheckRow:
    """Distance of one of TENSORS from the reference; the name ends in check/tensor. See :class:`Difference`."""

    name: str
    tensor: str
    max_ref: float
    mean_ref: float
    max_diff: float
    relative: float
    limit: float
    passed: bool
    setup: dict[str, Any]


@dataclass(frozen=True)
class SavedRow:
    """A tensor kept for backward, on the rank that keeps most; the name ends in saved/tensor."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    setup: dict[str, Any]


def measure_on_rank(context: RankContext, shape: TrainShape, options: TrainOptions) -> TrainFound:
    """Check and measure on this rank. Collective."""
    plan, dtype = shape.plan(context.num_ranks), DTYPES[options.dtype]
    layer = _make_layer(context, shape, options)
    ranks = RankGroup(context.group, device=context.device)

    def say(what: str) -> None:
        if context.rank == 0:
            context.report(what)

    with ExitStack() as stack:
        stack.enter_context(closing(layer.comm))
        say("drawing weights and tokens")
        weights = _draw_weights(layer)
        problem = make_problem(plan.max_tokens_per_rank, weights, shape.top_k, options.max_vio, context.rank)
        ours = TrainLayer(lambda: layer(problem.x)[0], problem.gradients)
        rival = _of_torch(problem, shape.top_k, torch_experts, ranks)
        say("comparing with the rival and the reference")
        found = ours.results()
        beside_rival = compare_all(rival.results(), found)
        checked = compare_with_reference(context, problem, shape.top_k, found) if options.check else None
        with_slots: dict[str, LayerWithSlots] = {}
        if options.spare_slots is not None:
            alike = replace(options, strategy=layer.experts.strategy)
            given = (context, ranks, shape, alike, problem, found)
            with_slots[SPARE] = stack.enter_context(_with_slots(*given, None))
            if layer.comm.engine.capabilities.gathers_counts:
                with_slots[BATCH] = stack.enter_context(_with_slots(*given, "batch"))
        del found
        saved = layer.saved_activations(problem.x)
        layers = {
            OURS: ours,
            **{who: each.layer for who, each in with_slots.items()},
            TRANSPORTS[context.device.type]: rival,
            LOCAL: _local(problem, shape.top_k),
            ONE: _one(context, ranks, shape, options),  # last: it may take whatever memory is still free
        }
        contestants = {who: Contestant(partial(each.step, context)) for who, each in layers.items()}
        take_turns(contestants, options.iterations, WARM_UP_STEPS, say=say)
        layer.comm.check()
        for each in with_slots.values():
            each.comm.check()
        return TrainFound(
            backend=layer.comm.backend,
            strategy=layer.experts.strategy,
            chosen_by=_who_chose(layer, options, dtype),
            routes=_routes_here(context, placed(plan, _chosen_by_all(ranks, problem, shape.top_k), None)),
            checked=checked,
            rival=beside_rival,
            saved=saved,
            layers={
                who: Measured(why_not=each.why_not) if each.why_not else contestants[who].measured
                for who, each in layers.items()
            },
            with_slots={who: each.found for who, each in with_slots.items()},
        )


def _make_layer(
    context: RankContext, shape: TrainShape, options: TrainOptions, spare_slots: int = 0, balance: Balance = None
) -> ExpertParallelMoE:
    return ExpertParallelMoE(
        context.group,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        max_tokens_per_rank=shape.plan(context.num_ranks).max_tokens_per_rank,
        strategy=options.strategy,
        overlap=options.overlap,
        redispatch_in_backward=options.redispatch_in_backward,
        pool_rows=options.pool_rows,
        spare_slots=spare_slots,
        balance=balance,
        device=context.device,
        dtype=DTYPES[options.dtype],
    )


def _draw_weights(layer: ExpertParallelMoE) -> Weights:
    """Draw the same weights for every layer of these sizes."""
    layer.reset_parameters(seed=WEIGHT_SEED)
    return Weights(layer.router_weight, (layer.experts.w1, layer.experts.w2))


def _chosen_by_all(ranks: RankGroup, problem: TrainProblem, top_k: int) -> list[torch.Tensor]:
    """Experts of the tokens of each rank, int64 [T, K] on the CPU. Collective."""
    ids = choose(problem, top_k)[1]
    return [each.view(ids.shape) for each in ranks.all_gather(ids.flatten(), "experts of tokens").cpu()]


def _routes_here(context: RankContext, routing: Routing) -> int:
    return int(routing.routes[context.rank].sum())


@dataclass(frozen=True)
class LayerWithSlots:
    """A layer with spare slots, beside the one without."""

    comm: Communicator
    layer: TrainLayer
    found: SlotsFound


@contextmanager
def _with_slots(
    context: RankContext,
    ranks: RankGroup,
    shape: TrainShape,
    options: TrainOptions,
    problem: TrainProblem,
    without: tuple[torch.Tensor, ...],
    balance: Balance,
) -> Iterator[LayerWithSlots]:
    """Make the layer as a user does. With replicas, its experts are placed by what the router chose for other tokens.

    Args:
        problem: of the layer without spare slots, which this one gets too.
        without: what came of it.
        balance: what the slots are for. None: replicas.
    """
    assert options.spare_slots is not None
    layer, plan = _make_layer(context, shape, options, options.spare_slots, balance), shape.plan(context.num_ranks)
    with closing(layer.comm):
        weights = _draw_weights(layer)
        if balance is None:
            seed = context.num_ranks + context.rank
            earlier = make_problem(EARLIER_TOKENS, problem.weights, shape.top_k, options.max_vio, seed)
            chosen = _chosen_by_all(ranks, earlier, shape.top_k)
            del earlier
            place_experts(layer, planned(chosen, shape.num_experts, context.num_ranks, options.spare_slots))
        its = replace(problem, x=problem.x.detach().clone().requires_grad_(), weights=weights)
        gradients = its.gradients if balance else partial(its.gradients_at_owners, layer=layer)
        made = TrainLayer(lambda: layer(its.x)[0], gradients)
        *of_tokens, dw1, dw2 = made.results()
        of_experts = by_expert(layer.experts, {"dw1": dw1, "dw2": dw2}, "by owners", "comparing spare slots")
        differences = compare_all((*of_tokens, *map(local_part, of_experts.values())), without)
        chosen = _chosen_by_all(ranks, problem, shape.top_k)
        routing = placed(plan, chosen, layer.comm.placement, balanced=balance is not None)
        yield LayerWithSlots(layer.comm, made, SlotsFound(_routes_here(context, routing), differences))


def _who_chose(layer: ExpertParallelMoE, options: TrainOptions, dtype: torch.dtype) -> str:
    """Who chose the strategy: "hand", "tune" or "default". Only rank 0's answer counts, because its disk decides."""
    if options.strategy is not None:
        return "hand"
    setting = choices.setting_of(layer.comm, layer.experts.intermediate, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layer has warned already
        return "default" if choices.find(setting) is None else "tune"


@dataclass(frozen=True)
class TrainLayer:
    """A layer on fixed inputs.

    Attributes:
        backward: gives the gradients of all inputs, from the output.
        why_not: why it is not measured. It then does nothing, but meets the others while they are measured.
    """

    forward: Callable[[], Any] = lambda: None
    backward: Callable[[Any], Any] = lambda out: None
    why_not: str = ""

    def results(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients."""
        out = self.forward()
        return out.detach(), *self.backward(out)

    def step(self, context: RankContext) -> Sample:
        """Microseconds of each of PASSES: a forward without gradients, one with them, and its backward."""
        with torch.no_grad():
            inference_us = clock.one_call(context, self.forward, queued=True)
        out: list[Any] = []
        forward_us = clock.one_call(context, lambda: out.append(self.forward()), queued=True)
        backward_us = clock.one_call(context, lambda: self.backward(out.pop()), queued=True)
        return dict(zip(PASSES, (inference_us, forward_us, backward_us), strict=True))


def _of_torch(problem: TrainProblem, top_k: int, experts: Experts, ranks: RankGroup | None = None) -> TrainLayer:
    return TrainLayer(lambda: torch_layer(problem.x, problem.weights, top_k, experts, ranks), problem.gradients)


def _local(problem: TrainProblem, top_k: int) -> TrainLayer:
    """The baseline with as many tokens and experts as a rank has, where all routes stay on the rank."""
    local = len(problem.weights.w1)
    if top_k > local:
        return TrainLayer(why_not=f"a rank has {local} experts, fewer than the {top_k} that a token chooses")
    router_weight = problem.weights.router[:local].detach().clone().requires_grad_()
    weights = replace(problem.weights, router=router_weight)
    return _of_torch(make_problem(len(problem.x), weights, top_k), top_k, own_experts)


def _one(context: RankContext, ranks: RankGroup, shape: TrainShape, options: TrainOptions) -> TrainLayer:
    """The baseline with all tokens and all experts on rank 0, while the others are idle."""
    dtype = DTYPES[options.dtype]
    needed, free = bytes_on_one(shape, dtype), free_bytes(context.device)
    free = ranks.all_gather_object(free, "memory of one rank")[0]
    if needed > free:
        return TrainLayer(why_not=f"it takes about {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free")
    if context.rank:
        return TrainLayer()

    def draw(*sizes: int) -> torch.Tensor:
        weight, bound = torch.empty(sizes, device=context.device, dtype=dtype), sizes[-1] ** -0.5
        return weight.uniform_(-bound, bound).requires_grad_()

    num_experts, hidden, intermediate = shape.num_experts, shape.hidden, shape.intermediate
    w1, w2 = draw(num_experts, 2 * intermediate, hidden), draw(num_experts, hidden, intermediate)
    weights = Weights(draw(num_experts, hidden), (w1, w2))
    return _of_torch(make_problem(shape.num_tokens, weights, shape.top_k, options.max_vio), shape.top_k, own_experts)


def bytes_on_one(shape: TrainShape, dtype: torch.dtype) -> int:
    """Rough peak, in bytes, of all tokens and experts on one rank: in backward, before the rows' gradients go."""
    rows = shape.num_tokens * shape.top_k * (4 * shape.hidden + 12 * shape.intermediate)
    weights = 2 * shape.num_experts * 3 * shape.hidden * shape.intermediate
    tokens = 8 * shape.num_tokens * shape.hidden
    return (rows + weights + tokens) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Free memory of the GPU, or of the machine as far as its system says."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    pages = "SC_AVPHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in os.sysconf_names else 1 << 62


class TrainReport:
    """Rows and tables of one run."""

    def __init__(self, shape: TrainShape, options: TrainOptions, by_rank: Sequence[TrainFound]) -> None:
        self._shape, self._options, self._by_rank = shape, options, by_rank
        first = by_rank[0]
        self._num_ranks, self._tokens = len(by_rank), shape.num_tokens // len(by_rank)
        sizes = f"t{shape.num_tokens}/h{shape.hidden}/i{shape.intermediate}/e{shape.num_experts}/k{shape.top_k}"
        self._sizes = f"ep{self._num_ranks}/{sizes}/{options.dtype}"
        self._setup = asdict(shape) | asdict(options) | {"num_ranks": self._num_ranks, "backend": first.backend}
        self._setup |= {"strategy": asdict(first.strategy), "chosen_by": first.chosen_by, "rounds": harness.ROUNDS}
        self._setup |= {"tokens_per_rank": self._tokens, "spare_slots": None, "balance": None}
        self._setup |= _fullest([each.routes for each in by_rank])
        self._slot_routes = {who: [each.with_slots[who].routes for each in by_rank] for who in first.with_slots}
        self.rival = next(who for who in first.layers if who not in (OURS, *WITH_SLOTS, *BASELINES))
        self.checks = self._make_checks()
        self.times = self._make_times()
        self.saved = self._make_saved()
        self.passed = all(row.passed for row in self.checks)
        self.notes = self._make_notes()

    def _slots_of(self, who: str) -> tuple[int | None, Balance]:
        """Spare slots, and what fills them for each batch."""
        return self._options.spare_slots if who in WITH_SLOTS else None, "batch" if who == BATCH else None

    def _name(self, who: str, what: str) -> str:
        its = self._by_rank[0].backend if who in (OURS, *WITH_SLOTS) else who
        routing = routing_names(self._options.max_vio, *self._slots_of(who))
        return "/".join(["train", its, self._sizes, *routing, what])

    def _setup_of(self, who: str) -> dict[str, Any]:
        if who not in WITH_SLOTS:
            return self._setup
        spare_slots, balance = self._slots_of(who)
        return self._setup | {"spare_slots": spare_slots, "balance": balance} | _fullest(self._slot_routes[who])

    def _make_checks(self) -> list[CheckRow]:
        by_rank = [each.checked for each in self._by_rank if each.checked is not None]
        limit, rows = LIMITS[self._options.dtype], []
        for tensor in TENSORS if by_rank else ():
            found = total(each[tensor] for each in by_rank)
            numbers = (found.max_ref, found.mean_ref, found.max_diff, found.relative, limit, found.within(limit))
            rows.append(CheckRow(self._name(OURS, f"check/{tensor}"), tensor, *numbers, self._setup))
        return rows

    def _make_times(self) -> list[TrainRow]:
        measured = [who for who, each in self._by_rank[0].layers.items() if not each.why_not]
        times = {who: percentiles([each.layers[who] for each in self._by_rank]) for who in measured}
        p50 = {who: {what: median / 1e3 for what, (median, _, _) in its.items()} for who, its in times.items()}
        even = {who: 1 / self._num_ranks if who == ONE else 1.0 for who in p50}
        rows = []
        for who in p50:
            for what in PASSES:
                _, p99_us, slowest = times[who][what]
                ms = p50[who][what]
                tokens = self._shape.num_tokens if who == ONE else self._tokens
                flops = self._shape.forward_flops(tokens) * (2 if what == "backward" else 1)
                is_ours = who in (OURS, *WITH_SLOTS)
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
                        setup=self._setup_of(who),
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
        layers = self._by_rank[0].layers.items()
        notes = [f"{who} is not measured: {each.why_not}" for who, each in layers if each.why_not]
        notes.append(self._agreement(self.rival, [each.rival for each in self._by_rank])[0])
        for who in self._slot_routes:
            found = [each.with_slots[who].differences for each in self._by_rank]
            note, agree = self._agreement(f"the layer {WITH_SLOTS[who]}", found)
            notes.append(note)
            self.passed &= agree or not self._options.check
        if SPARE in self._slot_routes and BATCH not in self._slot_routes:
            backend = self._by_rank[0].backend
            notes.append(f"{backend} splits no batches, so there is no layer that does")
        return notes

    def _agreement(self, who: str, by_rank: Sequence[dict[str, Difference]]) -> tuple[str, bool]:
        """Say how far outputs and gradients are from ours, and whether that is near enough."""
        relative = {name: total(each[name] for each in by_rank).relative for name in TENSORS}
        worst = max(relative, key=lambda name: np.nan_to_num(relative[name], nan=np.inf))
        limit = 2 * LIMITS[self._options.dtype]
        agree = relative[worst] <= limit
        said = "so they agree" if agree else "SO THEY DO NOT AGREE: believe no ratio"
        note = (
            f"outputs and gradients of {who} differ from ours by at most {relative[worst]:.2g} ({worst}, relative); "
            f"the limit is {limit:.2g}, as each may be off by half of that, {said}"
        )
        return note, agree

    def setup_lines(self, where: str) -> list[str]:
        """Lines on the layer and on how it ran."""
        shape, options, first = self._shape, self._options, self._by_rank[0]
        routes = [each.routes for each in self._by_rank]
        with_slots = [
            f"{with_spare_slots(WITH_SLOTS[who], options.spare_slots)}: it gets at most {max(each):,}"
            for who, each in self._slot_routes.items()
        ]
        return [
            f"{counted(self._num_ranks, 'rank')} on {where}, backend {first.backend}: "
            f"{shape.num_tokens} tokens, {self._tokens} a rank; "
            f"hidden {shape.hidden}, intermediate {shape.intermediate}, top-{shape.top_k} of {shape.num_experts} "
            f"experts, {shape.num_experts // self._num_ranks} a rank; {options.dtype}",
            f"overlap {'on' if options.overlap else 'off'}; kept for backward: "
            f"{'tokens, sent again' if options.redispatch_in_backward else 'dispatched rows'}, "
            f"{'exact sizes' if options.pool_rows is None else f'room for {options.pool_rows} rows'}; "
            f"MaxVio {options.max_vio:g}: a rank's experts get {np.mean(routes):,.0f} routes, at most {max(routes):,}",
            *with_slots,
            f"strategy: dispatch {first.strategy.dispatch}, combine {first.strategy.combine}: "
            f"{CHOSEN_BY[first.chosen_by]}",
        ]

    def points(self) -> list[Point]:
        """The time of each pass, for a chart."""
        shape = self._shape
        sizes = f"{self._tokens} tokens a rank, hidden {shape.hidden}, intermediate {shape.intermediate}"
        sizes += f", top-{shape.top_k} of {shape.num_experts} experts, {self._options.dtype}"
        vio = self._options.max_vio
        return [Point(sizes, row.what, self._label(row.who), vio, 1e3 * row.p50_ms) for row in self.times]

    def about_slots(self) -> list[str]:
        """Lines on the layers with spare slots, if there are any."""
        texts = {SPARE: (legends.SPARE, legends.TRAIN_SPARE), BATCH: (legends.BATCH, legends.TRAIN_BATCH)}
        return [text for who in self._slot_routes for text in texts[who]]

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
        return legends.TRAIN_CHECK.format(limit=LIMITS[dtype], reason=REASONS[dtype], largest=LARGEST_SHARE)

    def saved_table(self) -> Table:
        """Tensors kept for backward, and the total. Tensors of one name have a line together, as have small ones."""
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
        table = _table("", "pass", "p50 ms", "p99 ms", "TFLOP/s", left=(0, 1))
        for who in whose:
            for row in [each for each in self.times if each.who == who]:
                numbers = (row.p50_ms, row.p99_ms, row.tflops)
                table.add_row(self._label(who), row.what, *(f"{each:,.4g}" for each in numbers))
        return table

    def _label(self, who: str) -> str:
        if who in WITH_SLOTS:
            return with_spare_slots("this layer", *self._slots_of(who))
        labels = {OURS: "this layer", LOCAL: "local", ONE: "one rank, all tokens"}
        return labels.get(who, f"{who} rival")

    def exposed_table(self) -> Table:
        """Our times beside the baselines and the rival."""
        baselines = ("one / W\nms", "exposed\nms", "%", "scaling\n%", "local\nms", "exposed\nms", "%")
        table = _table("", "this\nlayer ms", *baselines, f"{self.rival}\n/ ours")
        for row in self.times:
            if row.who not in (OURS, *WITH_SLOTS) or row.what == "inference":
                continue
            what = "/".join([row.what, *routing_names(0.0, *self._slots_of(row.who))])
            cells = [what, f"{row.p50_ms:,.4g}"]
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


def _fullest(routes: Sequence[int]) -> dict[str, Any]:
    """How full the fullest of the ranks is, for a setup."""
    mean = sum(routes) / len(routes)
    return {"most_routes": max(routes), "fullest_rank": max(routes) / mean if mean else 1.0}


def _kept_bytes(saved: Sequence[SavedTensor]) -> int:
    return sum(each.num_bytes for each in saved)


def _table(*headers: str, left: Sequence[int] = (0,)) -> Table:
    return make_table(headers, left=left, show_edge=False)


def run_train(run: Run, shape: TrainShape, options: TrainOptions, max_vios: Sequence[float] = (0.0,)) -> bool:
    """Check and measure, print it all, write the file that was asked for; return False if a check failed.

    Args:
        max_vios: routings to measure, one after the other, see :class:`TrainOptions`.
    """
    shape.plan(run.num_ranks)
    if run.plot_file is not None:
        load_matplotlib()
    for max_vio in max_vios:
        popularity(shape.num_experts, shape.top_k, max_vio)  # says what no routing can be
        if max_vio:
            require_steerable(shape.num_experts, shape.hidden)
    setup, reports, said = run.setup(), list[TrainReport](), dict[str, None]()
    on_cpu = run.device == "cpu"
    with run.ranks() as (pool, starting):
        most_s = harness.limit_s(options.iterations)
        for max_vio in max_vios:
            its = replace(options, max_vio=max_vio)
            by_rank = pool.run(measure_on_rank, shape, its, limit_s=most_s, on_event=starting)
            report = TrainReport(shape, its, by_rank)
            notes = list(report.notes)
            notes += [legends.TRAIN_CPU] if on_cpu and run.num_ranks > 1 else []
            about_speed = [legends.TRAIN_EQUALITY.format(backend=by_rank[0].backend)] if on_cpu else []
            _show(run, report, notes, about_speed)
            reports.append(report)
            said |= dict.fromkeys(notes + about_speed)
    run.keep(setup, list(said), [row for each in reports for row in (*each.times, *each.checks, *each.saved)])
    if run.plot_file is not None:
        write_points_png(run.plot_file, setup, "training step", [point for each in reports for point in each.points()])
        run.say(f"chart written to {run.plot_file}")
    return all(each.passed for each in reports)


def _show(run: Run, report: TrainReport, notes: Sequence[str], about_speed: Sequence[str]) -> None:
    def title(text: str) -> None:
        run.say("", f"-- {text}")

    run.say(*report.setup_lines(machine(run.device)))
    title("check: differences from a reference")
    if report.checks:
        run.show(report.check_table())
        run.say(report.check_legend(), "PASS" if report.passed else "FAIL")
    else:
        run.say("not asked for (--no-check)")
    title("kept for backward, on a rank")
    run.show(report.saved_table())
    title("times")
    run.show(report.times_table([OURS, *WITH_SLOTS]), keys=2)
    run.say(legends.TRAIN_TIMES, *report.about_slots())
    title("baselines")
    run.show(report.times_table([report.rival, *BASELINES]), keys=2)
    run.say(legends.TRAIN_BASELINES.format(rival=report.rival), *notes)
    title("exposed network time")
    run.show(report.exposed_table())
    run.say(legends.TRAIN_EXPOSED, *about_speed)
