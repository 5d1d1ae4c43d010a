"""Every path against the reference, bit for bit: all layouts and modes, over each backend that is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenloom import reference
from tokenloom.backends import registry
from tokenloom.backends.seam import STRATEGY_OF_MODE
from tokenloom.bench.network.findings import Seen
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.routed import Routed
from tokenloom.plan import LAYOUTS, ROUTE_LAYOUTS, Plan
from tokenloom.runtime.topology import Topology

Key = tuple[str, str]

ROUTINGS = ("uniform", "skewed", "empty")
"""Every token draws different experts, and ranks have unequal numbers of tokens; all tokens go to the last node, or
to the last rank of a single node; half of the ranks have no tokens."""
PAYLOADS = ("bf16", "fp8")
HIDDEN = 256
EXPERTS_PER_RANK = 4
TOP_K = 4
MOST_TOKENS = 12
TOKENS_OF_ALL_RANKS = 512
"""Large groups have fewer tokens a rank: every rank computes the reference of all of them."""


@dataclass(frozen=True)
class BitsProblem:
    """Tensors of all ranks, on the CPU.

    Attributes:
        xs: bfloat16 or float8_e4m3fn [T, H].
        scales: float32 [T, H / 128] beside FP8, else None.
        ids: int64 [T, K].
    """

    routing: str
    payload: str
    plan: Plan
    xs: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    seed: int

    @property
    def slots(self) -> int:
        """Places that each expert needs in layout "slots"."""
        ids = torch.cat([each.flatten() for each in self.ids])
        return max(1, int(torch.bincount(ids[ids >= 0], minlength=1).max()))

    def dispatched(self, layout: str) -> list[reference.Routed]:
        """Rows that every rank must receive."""
        capacity = self.slots if layout == "slots" else None
        return reference.dispatch(
            self.plan, self.xs, self.ids, self.weights, layout, scales=self.scales, capacity=capacity
        )

    def expert_rows(self, routed: Sequence[reference.Routed]) -> list[torch.Tensor]:
        """Rows that stand for the experts' outputs: bfloat16, in the shape of what each rank received.

        They are of many magnitudes, so that the order of a sum shows. Where no row lies there is NaN, so that it shows
        if a combine reads it.
        """
        generator = torch.Generator("cpu").manual_seed(self.seed + 1)
        ys = []
        for each in routed:
            shape = each.tokens.shape
            exponents = torch.randint(-5, 6, shape, generator=generator, dtype=torch.int64, device="cpu")
            y = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 2.0**exponents
            y.view(-1, shape[-1])[each.padding] = torch.nan
            ys.append(y.bfloat16())
        return ys


def sizes(num_ranks: int) -> Plan:
    """Sizes of the problems for a group."""
    tokens = max(2, min(MOST_TOKENS, TOKENS_OF_ALL_RANKS // num_ranks))
    return Plan(num_ranks, num_ranks * EXPERTS_PER_RANK, HIDDEN, TOP_K, tokens)


def make_problem(topology: Topology, routing: str, payload: str, seed: int) -> BitsProblem:
    """Draw a problem, the same on every rank."""
    plan = sizes(len(topology.node_of))
    generator = torch.Generator("cpu").manual_seed(seed)
    real: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    whole: dict[str, Any] = {"generator": generator, "dtype": torch.int64, "device": "cpu"}
    experts = torch.arange(plan.num_experts, dtype=torch.int64, device="cpu")
    if routing == "skewed":
        last = topology.nodes[-1] if topology.num_nodes > 1 else (plan.num_ranks - 1,)
        on_last = [rank in last for rank in range(plan.num_ranks)]
        experts = experts[torch.tensor(on_last, device="cpu").repeat_interleave(plan.experts_per_rank)]
    xs, scales, ids, weights = [], [], [], []
    for rank in range(plan.num_ranks):
        num_tokens = int(torch.randint(1, plan.max_tokens_per_rank + 1, (1,), **whole))
        if routing == "empty" and rank % 2 == 0 and plan.num_ranks > 1:
            num_tokens = 0
        x = torch.randn(num_tokens, plan.hidden, **real)
        order = torch.rand(num_tokens, len(experts), **real).argsort(1)
        drawn = experts[order[:, : plan.top_k]]
        unused = torch.rand(drawn.shape, **real) < 0.1
        unused[:, :1] = False  # every token goes somewhere
        ids.append(torch.where(unused, -1, drawn))
        weights.append(torch.rand(drawn.shape, **real) + 0.1)
        scales.append(torch.rand(num_tokens, plan.scales_per_token, **real) + 0.5)
        xs.append(x.clamp(-400, 400).to(torch.float8_e4m3fn) if payload == "fp8" else x.bfloat16())
    return BitsProblem(routing, payload, plan, xs, scales if payload == "fp8" else None, ids, weights, seed)


def modes_of(layout: str) -> tuple[str, ...]:
    """The orders of sums that a combine has."""
    return ("per_rank", "per_route", "per_node") if layout in ROUTE_LAYOUTS else ("per_rank", "per_node")


@torch.no_grad()
def check_bits(
    comms: Sequence[Communicator],
    topology: Topology,
    seed: int,
    layouts: Sequence[str] = LAYOUTS,
    payloads: Sequence[str] = PAYLOADS,
) -> dict[Key, Seen]:
    """Compare dispatch and combine on this rank with the reference. Collective.

    Every problem goes over all communicators before the next one, because the reference takes longer than they do.

    Args:
        comms: of sizes :func:`sizes`.
        seed: of the problems.
        layouts, payloads: some of LAYOUTS and of PAYLOADS.
    """
    seen: dict[Key, Seen] = {}
    names = [comm.backend for comm in comms]
    for routing in ROUTINGS:
        problems = [make_problem(topology, routing, payload, seed) for payload in payloads]
        for layout in layouts:
            for key, found in _check_layout(comms, topology, problems, layout):
                seen[key] = seen.get(key, Seen(0)) + found
    return dict(sorted(seen.items(), key=lambda item: names.index(item[0][0].partition(":")[0])))


def _check_layout(
    comms: Sequence[Communicator], topology: Topology, problems: Sequence[BitsProblem], layout: str
) -> Iterator[tuple[Key, Seen]]:
    """Problems of one routing, which differ in what travels. So the same rows come home in all of them."""
    first = problems[0]
    wanted = [problem.dispatched(layout) for problem in problems]
    ys = first.expert_rows(wanted[0])
    weights = first.weights if layout in ROUTE_LAYOUTS else None
    homes = {
        mode: reference.combine(first.plan, ys, wanted[0], first.ids, weights, mode=mode, nodes=topology.nodes)
        for mode in modes_of(layout)
    }
    for problem, received in zip(problems, wanted, strict=True):
        where, what = f"{problem.routing} {problem.payload.upper()}", f"{layout} {problem.payload.upper()}"
        for comm in comms:
            if layout not in registry.capabilities(comm.backend).layouts:
                continue
            routed = _dispatch(comm, problem, layout)
            seen = compare_routed(routed, received[comm.rank])
            yield (f"{comm.backend}: dispatch", what), _named(seen, where)
            for mode, home in homes.items():
                if STRATEGY_OF_MODE[mode] not in registry.capabilities(comm.backend).combine_strategies:
                    continue
                options: dict[str, Any] = {"mode": mode}
                out = comm.combine(ys[comm.rank].to(comm.device), routed, **options)
                yield (f"{comm.backend}: combine {mode}", what), _named(compare_sums(out, home[comm.rank]), where)


def _dispatch(comm: Communicator, problem: BitsProblem, layout: str) -> Routed:
    rank, device = comm.rank, comm.device
    x: Any = problem.xs[rank].to(device)
    if problem.scales is not None:
        x = (x, problem.scales[rank].to(device))
    options: dict[str, Any] = {"layout": layout}
    if layout == "slots":
        options["capacity"] = problem.slots
    return comm.dispatch(x, problem.ids[rank].to(device), problem.weights[rank].to(device), **options)


def _named(seen: Seen, where: str) -> Seen:
    return Seen(seen.compared, seen.fault and f"{where}: {seen.fault}")


def compare_routed(got: Routed, want: reference.Routed) -> Seen:
    """Compare everything that a dispatch gives, wherever it is specified."""
    seen = Seen(0)
    wanted_counts = {
        "num_rows": want.num_rows,
        "expert_counts": want.expert_counts,
        "source_counts": want.source_counts,
        "expert_offsets": want.expert_offsets,
        "slot_ranges": want.slot_ranges,
    }
    for name, counts in wanted_counts.items():
        seen += _compare_counts(name, getattr(got, name), counts)
    sources = {place: key for key, place in want.rows.items()}
    places = sorted(sources)
    for name in ("tokens", "scales", "topk_ids", "topk_weights"):
        mine, theirs = getattr(got, name), getattr(want, name)
        if (mine is None) != (theirs is None):
            seen += Seen(0, f"{name} is {'missing' if mine is None else 'there'}, expected otherwise")
        elif mine is not None:
            mine = mine.to(torch.int64) if name == "topk_ids" else mine
            seen += _compare_rows(name, _flat(mine, name), _flat(theirs, name), places, sources)
    return seen


def _flat(rows: torch.Tensor, name: str) -> torch.Tensor:
    return rows.cpu().flatten(0, -2).contiguous()


def _compare_counts(name: str, got: object, want: object) -> Seen:
    if want is None or got is None:
        return Seen(0, "" if got is want else f"{name} is {got}, expected {want}")
    mine, theirs = (torch.as_tensor(each).to(torch.int64).cpu() for each in (got, want))
    if mine.shape == theirs.shape and torch.equal(mine, theirs):
        return Seen(mine.numel())
    return Seen(mine.numel(), f"{name} is {mine.tolist()}, expected {theirs.tolist()}")


def _compare_rows(
    name: str, got: torch.Tensor, want: torch.Tensor, places: list[int], sources: dict[int, reference.Key]
) -> Seen:
    if got.shape != want.shape or got.dtype != want.dtype:
        said = [f"{each.dtype} {list(each.shape)}" for each in (got, want)]
        return Seen(0, f"{name} is {said[0]}, expected {said[1]}")
    if not places:
        return Seen(0)
    differs = (got.view(torch.uint8)[places] != want.view(torch.uint8)[places]).any(1)
    seen = Seen(len(places) * got.shape[1])
    if bool(differs.any()):
        place = places[int(differs.nonzero()[0])]
        source, token = sources[place][:2]
        number = int(differs.sum())
        seen += Seen(0, f"{name} differ in {number} of {len(places)} rows; first, token {token} of rank {source}")
    return seen


def compare_sums(got: torch.Tensor, want: torch.Tensor) -> Seen:
    """Compare the rows that came home, [T, H]; any NaN equals any NaN."""
    got = got.detach().cpu()
    if got.shape != want.shape or got.dtype != want.dtype:
        return Seen(0, f"{got.dtype} {list(got.shape)} came home, expected {want.dtype} {list(want.shape)}")
    if not want.numel():
        return Seen(0)
    both_nan = got.isnan() & want.isnan()
    same = (got.view(torch.int16) == want.view(torch.int16)) | both_nan
    if bool(same.all()):
        return Seen(want.numel())
    wrong = (~same).any(1).nonzero().flatten().tolist()
    return Seen(want.numel(), f"{len(wrong)} of {len(want)} tokens have other sums; first, token {wrong[0]}")
