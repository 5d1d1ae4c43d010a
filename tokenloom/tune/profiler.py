"""Measurement of each strategy on these ranks, beside the GEMM that it feeds, and the choice of the best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends.registry import LAYER_SMS
from tokenloom.backends.seam import SWAPPED, CombineKind, CombineOptions, Handle, Strategy
from tokenloom.comm import autograd
from tokenloom.comm.checks import DispatchArguments
from tokenloom.comm.communicator import Communicator
from tokenloom.errors import InvalidArgument
from tokenloom.ops import routing
from tokenloom.ops.expert_gemms import gemms_for
from tokenloom.ops.router import Router
from tokenloom.plan import COMBINE_STRATEGIES, DISPATCH_STRATEGIES, Plan
from tokenloom.runtime.rendezvous import agree
from tokenloom.tune import choices
from tokenloom.tune.choices import Setting
from tokenloom.tune.samples import call_us, draw_topk_ids, popularity

DEFAULT_ITERATIONS = 30
WARM_UP_ROUNDS = 3
"""Rounds that do not count, in which connections, buffers and kernels are made."""
OPERATIONS = ("dispatch", "combine")
CANDIDATES = (
    *(("dispatch", strategy) for strategy in DISPATCH_STRATEGIES),
    *(("combine", strategy) for strategy in COMBINE_STRATEGIES if strategy != "per_node"),
)
"""Measured strategies. "per_node" is not: it carries the gradient of a layer's dispatch too, whose score would depend
on it. On one node it is "dedup" by another name."""
TOKEN_BYTES = ID_BYTES = WEIGHT_BYTES = 4
"""Bytes beside each row of a dispatch: the number of its token, K ids and K weights."""

Candidate = tuple[str, str]
"""Operation, "dispatch" or "combine", and one of its strategies."""
Calls = dict[str, Callable[[], Any]]
"""Measured calls of a candidate, by name: "with_gemm", "alone" and "gradient"."""


@dataclass(frozen=True)
class ProfileRow:
    """Cost of one strategy. Times are medians over samples, each of the slowest rank.

    Numbers are None where the backend does not have the strategy.

    Attributes:
        operation: "dispatch" or "combine".
        strategy: strategy of that operation.
        with_gemm_ms: time of dispatch and the GEMM of gates and ups, or of the GEMM of outputs and combine.
        alone_ms: time of the transfer without the GEMM.
        gradient_ms: time of the backward transfer, which another strategy may carry.
        score_ms: with_gemm_ms + gradient_ms, the strategy's share of a training step.
        physical_gbytes_per_s: bytes that leave the busiest rank in the transfer, divided by alone_ms. 1 GB is 1e9
            bytes.
        wins: whether it has the lowest score of its operation.
    """

    operation: str
    strategy: str
    with_gemm_ms: float | None = None
    alone_ms: float | None = None
    gradient_ms: float | None = None
    score_ms: float | None = None
    physical_gbytes_per_s: float | None = None
    wins: bool = False


@dataclass(frozen=True)
class Profile:
    """Result of ``profile``, the same on all ranks. ``print`` it for a table.

    Attributes:
        setting: hardware, software and shape that the choice holds for.
        num_tokens: tokens of each rank.
        max_vio: of the routing, as in ``profile``.
        iterations: samples of each number.
        rows: one for every strategy, dispatch first.
        file: file in which rank 0 keeps the choice. None if it could not be written.
    """

    setting: Setting
    num_tokens: int
    max_vio: float
    iterations: int
    rows: tuple[ProfileRow, ...]
    file: str | None

    @property
    def strategy(self) -> Strategy:
        """Winners of both operations."""
        return Strategy(**{row.operation: row.strategy for row in self.rows if row.wins})

    def __str__(self) -> str:
        where = self.setting
        ranks = "1 rank" if where.num_ranks == 1 else f"{where.num_ranks} ranks"
        lines = [
            f"{ranks} on {where.device_name}, backend {where.backend}",
            f"{self.num_tokens} tokens a rank, hidden {where.hidden}, intermediate {where.intermediate}, "
            f"top-{where.top_k} of {where.num_experts}, {where.dtype}, MaxVio {self.max_vio:g}",
            f"medians of {self.iterations} samples of the slowest rank",
            "",
            f"{'':9}{'strategy':15}{'with GEMM ms':>13}{'alone ms':>10}{'gradient ms':>13}{'score ms':>10}{'GB/s':>9}",
        ]
        lines += ["{:9}{:15}{:>13}{:>10}{:>13}{:>10}{:>9}  {}".format(*cells).rstrip() for cells in self.cells()]
        return "\n".join(lines)

    def cells(self) -> list[tuple[str, ...]]:
        """Operation, strategy, times, rate and a word for each row, as tables show them."""
        found = []
        for row in self.rows:
            times = (row.with_gemm_ms, row.alone_ms, row.gradient_ms, row.score_ms)
            texts = ["-" if ms is None else f"{ms:,.3f}" for ms in times]
            rate = "-" if row.physical_gbytes_per_s is None else f"{row.physical_gbytes_per_s:.3g}"
            said = "not on this backend" if row.score_ms is None else "winner" if row.wins else ""
            found.append((row.operation, row.strategy, *texts, rate, said))
        if self.setting.num_nodes > 1:
            found.append(("combine", "per_node", *["-"] * 5, "not measured"))
        return found


def profile(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    num_tokens: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype | None = None,
    max_vio: float = 0.0,
    iterations: int = DEFAULT_ITERATIONS,
    backend: str = "auto",
    device: torch.device | str | None = None,
) -> Profile:
    """Measure every strategy of dispatch and combine for one layer on these ranks, and keep the best. Collective.

    Each strategy is measured in layout "expert", together with the GEMM that it feeds or that feeds it. Its gradient,
    which the swapped strategy carries, is measured too. Strategies take turns, one sample each per round. Afterwards
    an ``ExpertParallelMoE`` without a strategy of its own uses the choice; see docs/how-to/tune.md.

    Args:
        group: as in ``Communicator``.
        num_tokens: T on every rank. The choice holds for layers whose ``max_tokens_per_rank`` has the same next power
            of two.
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: K, at most 32 and at most E.
        dtype: dtype of the layer's parameters and the payload. None means torch's default, as for the layer.
        max_vio: how uneven the routing is: the largest expected load of an expert over the mean, less 1. Popularity is
            lognormal; 0 makes all experts alike. Each rank draws its own routing.
        iterations: samples of each number, at least 1.
        backend: as in ``Communicator``.
        device: as in ``Communicator``.

    Returns:
        Measurements and choice, the same on all ranks. Rank 0 also writes the choice to its disk.

    Raises:
        InvalidArgument, PlanMismatch, PeerError: what ``Communicator`` and ``ExpertParallelMoE`` raise.
    """
    dtype = dtype or torch.get_default_dtype()
    with Communicator(
        group,
        num_experts=num_experts,
        hidden=hidden,
        top_k=top_k,
        max_tokens_per_rank=num_tokens,
        backend=backend,
        device=device,
        dtype=dtype,
        num_sms=LAYER_SMS,  # as layers do
    ) as comm:

        def prepare() -> tuple[dict[str, Any], Setting]:
            Router(num_experts, top_k)
            if "dedup" not in comm.engine.capabilities.combine_strategies:
                raise InvalidArgument(
                    f"backend {comm.backend!r} has one way for layers only, there is nothing to choose"
                )
            for name, value in (("intermediate", intermediate), ("iterations", iterations)):
                if not isinstance(value, int) or value < 1:
                    raise InvalidArgument(f"{name} is {value!r}, expected an integer of at least 1")
            if not isinstance(max_vio, int | float):
                raise InvalidArgument(f"max_vio is {max_vio!r}, expected a number of at least 0")
            popularity(num_experts, top_k, max_vio)  # says what no routing can be
            comm.engine.require_no_placement("a layer, whose calls profile makes,")
            setting = choices.setting_of(comm, intermediate, dtype)
            return {"intermediate": intermediate, "iterations": iterations, "max_vio": max_vio}, setting

        setting = agree(comm.engine.ranks, prepare, "profiling strategies")[0]
        with torch.enable_grad():
            transfers = _Transfers(comm, intermediate, dtype, max_vio)
            samples = _take_turns(comm, transfers.calls(), iterations)
        comm.check()
        send = routing.send_map(transfers.ids, comm.plan)
        counts = send.rows_per_rank.tolist(), send.routes_per_expert.view(comm.num_ranks, -1).sum(1).tolist()
        by_rank = comm.engine.ranks.all_gather_object((samples, *counts), "profiling strategies")
        rows, routes = (torch.tensor([each[i] for each in by_rank], dtype=torch.int64, device="cpu") for i in (1, 2))
        sent = sent_bytes(comm.plan, rows, routes, dtype)
        found = make_rows([each[0] for each in by_rank], sent)
        measured = Profile(setting, num_tokens, float(max_vio), iterations, found, file=None)
        file = choices.keep(setting, measured.strategy) if comm.rank == 0 else None
        files = comm.engine.ranks.all_gather_object(None if file is None else str(file), "keeping the choice")
    return replace(measured, file=files[0])


class _Transfers:
    """Transfers of a layer with random values, each with its GEMM. Making one is collective.

    Attributes:
        ids: int32 [T, K], routing of this rank's tokens.
    """

    def __init__(self, comm: Communicator, intermediate: int, dtype: torch.dtype, max_vio: float) -> None:
        plan, device = comm.plan, comm.device
        self._generator = torch.Generator(device).manual_seed(comm.rank)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._engine, self._kinds, self._intermediate = comm.engine, comm.kinds, intermediate
        num_tokens, local = plan.max_tokens_per_rank, plan.experts_per_rank
        self.ids = draw_topk_ids(comm.rank, num_tokens, plan.num_experts, plan.top_k, max_vio).to(device)
        size = (num_tokens, plan.top_k)
        self._weights = torch.rand(size, generator=self._generator, dtype=torch.float32, device=device)
        self._x = self._random(num_tokens, plan.hidden).requires_grad_()
        self._w1 = self._random(local, 2 * intermediate, plan.hidden)
        self._w2 = self._random(local, plan.hidden, intermediate)

    def _random(self, *sizes: int) -> torch.Tensor:
        return self._like.new_empty(sizes).normal_(generator=self._generator)

    def calls(self) -> dict[Candidate, Calls]:
        """Return the calls to measure for every strategy that the backend has, that of its gradient included."""
        found: dict[Candidate, Calls] = {}
        able = self._engine.capabilities
        strategies = {"dispatch": able.dispatch_strategies, "combine": able.combine_strategies}
        dispatched = self._dispatch("dedup")
        for operation, strategy in CANDIDATES:
            is_dispatch = operation == "dispatch"
            gradient = "combine" if is_dispatch else "dispatch"
            if strategy not in strategies[operation] or SWAPPED[strategy] not in strategies[gradient]:
                continue
            calls = self._dispatch_calls(strategy) if is_dispatch else self._combine_calls(dispatched, strategy)
            found[operation, strategy] = calls
        return found

    def _dispatch(self, strategy: str) -> tuple[Handle, torch.Tensor]:
        """Dispatch, and return the handle and the rows with their graph."""
        engine = self._engine
        arguments = DispatchArguments("expert", sizes="exact", strategy=strategy)
        mode = (self._x.requires_grad, self._weights.requires_grad, True, False, False)
        known, tokens = self._kinds.find_or_check_dispatch(arguments, mode, self._x, self.ids, self._weights)
        if engine.slots is not None:
            tokens = tokens._replace(topk_ids=engine.place_batch(known.kind, tokens.topk_ids).slot_ids)
        handle, rows = engine.send_dispatch(known.prepared, tokens).receive()
        return handle, autograd.dispatched(engine, handle, rows, autograd.GradientOrder(), self._x, self._weights)[0]

    def _dispatch_calls(self, strategy: str) -> Calls:
        _, rows = self._dispatch(strategy)
        grad = self._random(*rows.shape)

        def with_gemm() -> torch.Tensor:
            handle, rows = self._dispatch(strategy)
            return self._multiply(handle, rows, self._w1)

        def gradient() -> Any:
            return torch.autograd.grad(rows, self._x, grad, retain_graph=True)

        return {"with_gemm": with_gemm, "alone": lambda: self._dispatch(strategy), "gradient": gradient}

    def _combine_calls(self, dispatched: tuple[Handle, torch.Tensor], strategy: str) -> Calls:
        handle, rows = dispatched
        activations = self._random(len(rows), self._intermediate)
        y = self._random(*rows.shape).requires_grad_()
        options = CombineOptions(False, y.dtype, y.dtype, True, strategy)

        def combine(y: torch.Tensor = y) -> torch.Tensor:
            return self._home(handle, y, options)

        def with_gemm() -> torch.Tensor:
            return combine(self._multiply(handle, activations, self._w2).requires_grad_())

        out = combine()
        grad = self._random(*out.shape)

        def gradient() -> Any:
            return torch.autograd.grad(out, y, grad, retain_graph=True)

        return {"with_gemm": with_gemm, "alone": combine, "gradient": gradient}

    def _home(self, handle: Handle, y: torch.Tensor, options: CombineOptions) -> torch.Tensor:
        """Combine rows, with a graph."""
        engine = self._engine
        prepared = engine.prepare_combine(CombineKind(handle.options.layout, y.dtype, options), handle.number)
        return autograd.send_combine(engine, handle, prepared, y, None, options).receive()

    @torch.no_grad()  # as in the layer, which writes the gradients of its GEMMs by hand
    def _multiply(self, handle: Handle, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        offsets = handle.counts.expert_offsets
        assert offsets is not None
        gemms = gemms_for(rows, self._w1, self._w2, offsets, handle.host_offsets)
        return gemms.multiply(rows, weights.transpose(1, 2))


def _take_turns(
    comm: Communicator, calls: Mapping[Candidate, Calls], iterations: int
) -> dict[Candidate, dict[str, list[float]]]:
    """Sample each call once per round, in microseconds on this rank, so that drifting clocks affect all alike."""
    samples: dict[Candidate, dict[str, list[float]]] = {who: {what: [] for what in calls[who]} for who in calls}
    for number in range(WARM_UP_ROUNDS + iterations):
        for who, its_calls in calls.items():
            for what, call in its_calls.items():
                us = call_us(comm.process_group, comm.device, call, queued=True)
                if number >= WARM_UP_ROUNDS:
                    samples[who][what].append(us)
    return samples


def sent_bytes(plan: Plan, rows: torch.Tensor, routes: torch.Tensor, dtype: torch.dtype) -> dict[Candidate, int]:
    """Count the bytes that leave the busiest rank in one forward transfer, by strategy, without those of the counts.

    Args:
        plan: the sizes.
        rows: int64 [W, W], (token, rank) rows from each rank to each.
        routes: int64 [W, W], routes from each rank to each.
        dtype: dtype of the payload.
    """
    row_bytes = plan.hidden * dtype.itemsize
    beside = rows * (TOKEN_BYTES + plan.top_k * (ID_BYTES + WEIGHT_BYTES))
    dense = torch.full_like(rows, plan.max_tokens_per_rank)
    moved = {
        ("dispatch", "dedup"): rows * row_bytes + beside,
        ("dispatch", "all_gather"): dense * row_bytes + beside,
        ("dispatch", "all_to_all"): routes * row_bytes + beside,
        ("combine", "dedup"): rows.t() * row_bytes,
        ("combine", "reduce_scatter"): dense * row_bytes,
        ("combine", "all_to_all"): routes.t() * row_bytes,
    }
    return {who: int((sent.sum(1) - sent.diagonal()).max()) for who, sent in moved.items()}


def make_rows(
    samples: Sequence[Mapping[Candidate, Mapping[str, Sequence[float]]]], sent: Mapping[Candidate, int]
) -> tuple[ProfileRow, ...]:
    """Make a row for every candidate from the samples of all ranks, in microseconds, and from ``sent_bytes``."""
    times = {
        who: {what: slowest_rank_ms([each[who][what] for each in samples]) for what in samples[0][who]}
        for who in samples[0]
    }
    scores = {who: its["with_gemm"] + its["gradient"] for who, its in times.items()}
    best = {each: min((who for who in scores if who[0] == each), key=scores.__getitem__) for each in OPERATIONS}
    rows = []
    for who in CANDIDATES:
        if who not in times:
            rows.append(ProfileRow(*who))
            continue
        its = times[who]
        rows.append(
            ProfileRow(
                *who,
                with_gemm_ms=its["with_gemm"],
                alone_ms=its["alone"],
                gradient_ms=its["gradient"],
                score_ms=scores[who],
                physical_gbytes_per_s=sent[who] / its["alone"] / 1e6,
                wins=who == best[who[0]],
            )
        )
    return tuple(rows)


def slowest_rank_ms(by_rank: Sequence[Sequence[float]]) -> float:
    return statistics.median(map(max, zip(*by_rank, strict=True))) / 1e3
