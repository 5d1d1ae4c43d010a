"""Dispatch, experts and combine over tensors that stay where they are, so that CUDA graphs can be made of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import tokenloom as tl
from tests.support.cases import BF16, FP8, Case, Problem, make_problem
from tokenloom import reference
from tokenloom.plan import FP8_BLOCK, ROUTE_LAYOUTS, Plan
from tokenloom.runtime.processes import RankContext

TOKENS = (40, 23, 0, 31)
"""Unequal, none at all on one rank, and more than one chunk of a combine where all go to one rank."""
EXPERTS_PER_RANK = 6
HIDDEN = 256
TOP_K = 4


@dataclass(frozen=True)
class Round:
    """What one replay is given, in words. Attributes as of Case; ``used``: share of the tokens that have routes."""

    why: str
    pick: str
    unused: float = 0.0
    used: float = 1.0
    seed: int = 0


ROUNDS = [
    Round("the usual case", "distinct", seed=1),
    Round("few tokens in use, holes among their routes", "repeats", unused=0.3, used=0.2, seed=2),
    Round("one rank receives everything", "one rank", seed=3),
    Round("nothing to send at all", "none", seed=4),
    Round("nothing leaves its rank", "own rank", unused=0.2, used=0.7, seed=5),
    Round("one expert receives everything", "one expert", used=0.5, seed=6),
    Round("k runs against the ranks", "descending", unused=0.1, seed=7),
]


@dataclass(frozen=True)
class Kind:
    """One kind of call: the options of dispatch and combine, and what is sent.

    Attributes:
        halves: calls are made in two halves.
        own: results are written to tensors of the caller's.
    """

    name: str
    layout: str
    alignment: int = 1
    dtype: torch.dtype = BF16
    ids_dtype: torch.dtype = torch.int64
    to_fp8: bool = False
    mode: str = "per_rank"
    copy: bool = False
    scale_layout: str = "rows"
    halves: bool = False
    own: bool = False

    @property
    def dispatch_options(self) -> dict[str, Any]:
        """As both the communicator and the reference take them."""
        options = {"layout": self.layout, "alignment": self.alignment, "to_fp8": self.to_fp8}
        return options | {"scale_layout": self.scale_layout}


TOKEN = Kind("token", "token")
EXPERT = Kind("expert", "expert", alignment=8)
RANK = Kind("rank", "rank", ids_dtype=torch.int32)
SLOTS = Kind("slots", "slots")
KINDS = [
    TOKEN,
    EXPERT,
    RANK,
    Kind("token, own tensors", "token", copy=True),
    Kind("expert, own tensors", "expert", copy=True),
    Kind("expert, fp8 with scales", "expert", alignment=16, dtype=FP8),
    Kind("token, quantised on its way", "token", to_fp8=True),
    Kind("expert, per route", "expert", mode="per_route"),
    SLOTS,
    Kind("slots, quantised on its way", "slots", to_fp8=True, scale_layout="columns", ids_dtype=torch.int32),
    Kind("slots, per route, to own tensors", "slots", mode="per_route", own=True),
    Kind("token, in halves", "token", halves=True),
    Kind("expert, in halves", "expert", alignment=8, halves=True, copy=True),
    Kind("slots, in halves, to own tensors", "slots", to_fp8=True, halves=True, own=True),
    Kind("slots, per route, in halves", "slots", mode="per_route", halves=True),
]


@cache
def problem_of(round_: Round, kind: Kind, num_ranks: int) -> Problem:
    """The tensors of all ranks; their shapes are the same for all rounds."""
    case = Case(
        "graphs",
        "",
        tokens=TOKENS,
        spare=3,
        experts_per_rank=EXPERTS_PER_RANK,
        hidden=HIDDEN,
        top_k=TOP_K,
        pick=round_.pick,
        unused=round_.unused,
        dtype=kind.dtype,
        ids_dtype=kind.ids_dtype,
        weights="nan where unused",
        to_quantise=kind.to_fp8,
        seed=round_.seed,
    )
    problem = make_problem(case, num_ranks)
    for ids in problem.topk_ids:
        ids[round(round_.used * len(ids)) :] = -1
    return problem


def plan_of(num_ranks: int) -> Plan:
    """The sizes of all problems."""
    return problem_of(ROUNDS[0], TOKEN, num_ranks).plan


@cache
def room_for(kind: Kind, num_ranks: int) -> int | None:
    """A capacity that all rounds fit, as ``Communicator.dispatch`` takes it."""
    if kind.layout == "rank":
        return None
    if kind.layout == "token":
        return plan_of(num_ranks).worst_case_rows("token")
    return 5 + max(problem_of(each, kind, num_ranks).rows_needed(kind.layout, kind.alignment) for each in ROUNDS)


def experts(
    layout: str,
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    offsets: torch.Tensor | None,
    rank: int,
    experts_per_rank: int,
) -> torch.Tensor:
    """y in bfloat16: every expert (every rank, where rows are not grouped by expert) multiplies by its own number.

    So a row that came to another one shows at home. The same bits on CPUs and GPUs.
    """
    rows = tokens.float()
    if scales is not None:
        rows = (rows.unflatten(-1, (-1, FP8_BLOCK)) * scales[..., None]).flatten(-2)
    if layout == "slots":
        expert = torch.arange(experts_per_rank, dtype=torch.int32, device=rows.device)
        return (rows * (rank * experts_per_rank + expert + 1)[:, None, None]).to(BF16)
    if offsets is None:
        return (rows * (rank + 1)).to(BF16)
    places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    expert = torch.searchsorted(offsets[1:], places, right=True)
    return (rows * (rank * experts_per_rank + expert + 1)[:, None]).to(BF16)


@cache
def expected(
    round_: Round, kind: Kind, capacity: int | None, num_ranks: int, rank: int
) -> tuple[reference.Routed, torch.Tensor]:
    """What the reference says that a rank receives, and has in the end."""
    problem = problem_of(round_, kind, num_ranks)
    want = problem.dispatched(**kind.dispatch_options, capacity=capacity, bounded=True)
    ys = [
        experts(
            kind.layout,
            each.tokens,
            each.scales,
            torch.tensor(each.expert_offsets, dtype=torch.int32) if kind.layout == "expert" else None,
            of_rank,
            EXPERTS_PER_RANK,
        )
        for of_rank, each in enumerate(want)
    ]
    own_ids = [ids if of_rank == rank else ids[:0] for of_rank, ids in enumerate(problem.topk_ids)]
    weights = problem.topk_weights if kind.layout in ROUTE_LAYOUTS else None
    return want[rank], reference.combine(problem.plan, ys, want, own_ids, weights, mode=kind.mode)[rank]


@dataclass(frozen=True)
class Whole:
    """The result of a call in one piece, as a pending would give it."""

    result: Any

    def receive(self) -> Any:
        return self.result


class Step:
    """One dispatch, its experts and its combine, on tensors that stay where they are: what a graph is made of.

    Args:
        comm: not ``checked``, which reads on the host.
        kind: of call.
        capacity: rows of the output; by default all rounds fit.
    """

    def __init__(self, context: RankContext, comm: tl.Communicator, kind: Kind, capacity: int | None = None) -> None:
        self.context, self.comm, self.kind = context, comm, kind
        self.capacity = capacity or room_for(kind, context.num_ranks)
        self._given: dict[Round, list[torch.Tensor]] = {}
        self._inputs = [tensor.clone() for tensor in self._tensors(ROUNDS[0])]
        self._own: tuple[tl.DispatchOut | None, torch.Tensor | None] = None, None
        if kind.own:
            routed, out = self()  # as the communicator makes them
            fields = {name: getattr(routed, name) for name in tl.DispatchOut.__dataclass_fields__}
            clones = {name: None if each is None else each.clone() for name, each in fields.items()}
            self._own = tl.DispatchOut(**clones), out.clone()

    def _tensors(self, round_: Round) -> list[torch.Tensor]:
        """x, (its scales), ids and weights of a round, on the device: copying from there makes no host wait."""
        if round_ not in self._given:
            x, ids, weights = problem_of(round_, self.kind, self.context.num_ranks).arguments(self.context)
            assert weights is not None
            self._given[round_] = [*(x if isinstance(x, tuple) else (x,)), ids, weights]  # type: ignore[list-item]
        return self._given[round_]

    def prepare(self, rounds: list[Round]) -> None:
        """Bring the inputs of these rounds to the device."""
        for each in rounds:
            self._tensors(each)

    def load(self, round_: Round) -> None:
        """Copy the inputs of a round to where calls read them."""
        for static, given in zip(self._inputs, self._tensors(round_), strict=True):
            static.view(torch.uint8).copy_(given.view(torch.uint8))

    def expected(self, round_: Round) -> tuple[reference.Routed, torch.Tensor]:
        return expected(round_, self.kind, self.capacity, self.context.num_ranks, self.context.rank)

    def send_dispatch(self, *, sizes: str = "bounded", copy: bool = False) -> tl.Pending[tl.Routed]:
        """The first half; all of the call where the kind makes it in one piece."""
        *x, ids, weights = self._inputs
        options: dict[str, Any] = {**self.kind.dispatch_options, "sizes": sizes, "copy": copy or self.kind.copy}
        if sizes == "bounded":
            options |= {"capacity": self.capacity, "out": self._own[0]}
        given = (x[0] if len(x) == 1 else (x[0], x[1]), ids, weights)
        with torch.no_grad():
            if self.kind.halves:
                return self.comm.send_dispatch(*given, **options)
            return Whole(self.comm.dispatch(*given, **options))  # type: ignore[return-value]

    def dispatch(self, *, sizes: str = "bounded", copy: bool = False) -> tl.Routed:
        return self.send_dispatch(sizes=sizes, copy=copy).receive()

    def send_combine(self, routed: tl.Routed) -> tl.Pending[torch.Tensor]:
        """Experts, and the first half of the combine."""
        rank, local = self.context.rank, self.comm.plan.experts_per_rank
        options: dict[str, Any] = {"mode": self.kind.mode, "out": self._own[1]}
        with torch.no_grad():
            y = experts(self.kind.layout, routed.tokens, routed.scales, routed.expert_offsets, rank, local)
            if self.kind.halves:
                return self.comm.send_combine(y, routed, **options)
            return Whole(self.comm.combine(y, routed, **options))  # type: ignore[return-value]

    def finish(self, routed: tl.Routed) -> torch.Tensor:
        """Experts and combine."""
        return self.send_combine(routed).receive()

    def __call__(self) -> tuple[tl.Routed, torch.Tensor]:
        routed = self.dispatch()
        return routed, self.finish(routed)


class Captured:
    """What ``step()`` puts on the stream, as a CUDA graph.

    Args:
        step: called twice, first outside of the graph: the first call of a kind allocates buffers and loads kernels.

    Attributes:
        results: what step returned; every replay writes the same tensors again.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        step()
        gc.collect()  # a communicator of an earlier test that was freed during the capture would break it
        self._graph = torch.cuda.CUDAGraph()
        # Mode "global", the default, forbids what NCCL's watchdog thread does all the time.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.results = step()

    def replay(self) -> None:
        self._graph.replay()
