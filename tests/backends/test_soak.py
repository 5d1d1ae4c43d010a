"""Many calls in a row, every value of every result checked, for what goes wrong once in ten thousand times.

On "nvlink" they are 100,000. Between nodes, over gloo, they also show that nothing piles up, which takes minutes::

    python -m pytest -s -m soak tests/backends/test_soak.py
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.backends.test_network_faults import CASE, allocated_bytes
from tests.conftest import NETWORK_RANKS, Ranks
from tests.support.cases import BF16, FP32, make_comm, make_problem
from tests.support.graph_cases import Captured, experts
from tokenloom.plan import LAYOUTS, ROUTE_LAYOUTS, Plan
from tokenloom.runtime.deferred_release import release_dropped
from tokenloom.runtime.process_groups import store_of
from tokenloom.runtime.processes import RankContext, RankPool

BACKEND = "nvlink"
HIDDEN = 256
TOP_K = 4
EXPERTS_PER_RANK = 4
MAX_TOKENS = 64
PAIRS = 20
"""Dispatches, and combines, in one graph; their layouts take turns, and each comes in one piece and in halves."""
REPLAYS = 2500
SHARED = 50
"""Where ranks share GPUs, one in so many replays."""
CAPACITY = 600
"""Of layout "expert": twice what an even routing of all tokens needs, and more than any that is drawn here does."""


@pytest.mark.alone
def test_soak(hoppers: Ranks) -> None:
    """Routing, tokens and weights are drawn anew before every replay, on the device, by each rank for itself, and what
    must come home can be told from them alone. The host does not wait before the end, so that every rank runs as far
    ahead as the others let it: a flag, a count or a buffer that is reused too early shows as a wrong value."""
    assert 2 * PAIRS * REPLAYS == 100_000
    hoppers.run(check_soak, REPLAYS // SHARED if hoppers.shares_gpus else REPLAYS, limit_s=90.0)


def check_soak(context: RankContext, replays: int) -> None:
    num_ranks = context.num_ranks
    plan = Plan(num_ranks, EXPERTS_PER_RANK * num_ranks, HIDDEN, TOP_K, MAX_TOKENS)
    device = context.device
    generator = torch.Generator(device).manual_seed(context.rank)
    num_tokens = MAX_TOKENS - 5 * context.rank
    x = torch.zeros(PAIRS, num_tokens, HIDDEN, dtype=BF16, device=device)
    ids = torch.zeros(PAIRS, num_tokens, TOP_K, dtype=torch.int64, device=device)
    weights = torch.zeros(PAIRS, num_tokens, TOP_K, device=device)

    def draw() -> None:
        x.normal_(generator=generator)
        weights.uniform_(0.1, 1.0, generator=generator)
        score = torch.rand(PAIRS, num_tokens, plan.num_experts, generator=generator, device=device)
        ids.copy_(score.topk(TOP_K).indices)
        ids.masked_fill_(torch.rand(ids.shape, generator=generator, device=device) < 0.2, -1)
        # And a share of the tokens, another one in each pair, has no routes at all.
        share = torch.rand(PAIRS, 1, 1, generator=generator, device=device)
        ids.masked_fill_(torch.rand(PAIRS, num_tokens, 1, generator=generator, device=device) < share, -1)

    def given(pair: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        layout = LAYOUTS[pair % len(LAYOUTS)]
        options = {"alignment": 16, "capacity": CAPACITY} if layout == "expert" else {}
        return (x[pair], ids[pair], weights[pair]), {"layout": layout, "sizes": "bounded", **options}

    def work(routed: tl.Routed) -> torch.Tensor:
        return experts(routed.layout, routed.tokens, None, routed.expert_offsets, context.rank, EXPERTS_PER_RANK)

    with make_comm(context, BACKEND, plan, checked=False) as comm:

        def in_one_piece(pair: int) -> torch.Tensor:
            tensors, options = given(pair)
            routed = comm.dispatch(*tensors, **options)
            return comm.combine(work(routed), routed)

        def in_turns(*pairs: int) -> list[torch.Tensor]:
            """One batch is computed while the other travels: two calls are open all along."""
            sent = []
            for pair in pairs:
                tensors, options = given(pair)
                sent.append(comm.send_dispatch(*tensors, **options))
            home = []
            for pending in sent:
                routed = pending.receive()
                home.append(comm.send_combine(work(routed), routed))
            return [pending.receive() for pending in home]

        @torch.no_grad()
        def call_all() -> list[torch.Tensor]:
            outs = []
            for pair in range(0, PAIRS, 2):
                if pair // len(LAYOUTS) % 2:
                    outs += in_turns(pair, pair + 1)
                else:
                    outs += [in_one_piece(each) for each in (pair, pair + 1)]
            return outs

        draw()
        captured = Captured(call_all)
        by_layout = [slice(first, None, len(LAYOUTS)) for first in range(len(LAYOUTS))]
        wrong = torch.zeros(len(LAYOUTS), dtype=torch.int64, device=device)
        first_wrong = torch.full_like(wrong, -1)
        not_zero = torch.zeros_like(wrong)
        for replay in range(replays):
            draw()
            captured.replay()
            for i, (layout, pairs) in enumerate(zip(LAYOUTS, by_layout, strict=True)):
                out = torch.stack(captured.results[pairs])
                want = expected(layout, x[pairs], ids[pairs], weights[pairs], num_ranks)
                differing = (out.view(torch.int16) != want.view(torch.int16)).sum()
                wrong[i] += differing
                first_wrong[i] = torch.where((first_wrong[i] < 0) & (differing > 0), replay, first_wrong[i])
                not_zero[i] += (out != 0).sum()
        comm.check()
    for i, layout in enumerate(LAYOUTS):
        values = replays * num_tokens * HIDDEN * len(range(PAIRS)[by_layout[i]])
        assert wrong[i] == 0, (
            f"layout {layout}: {wrong[i]} of {values} values differ, first in replay {first_wrong[i]}"
        )
        assert not_zero[i] > 0.2 * values, f"layout {layout}: hardly anything was sent"


def expected(layout: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """What comes home, bit for bit, for inputs [pairs, T, ...], by the formula of docs/reference/semantics.md."""
    owner = torch.where(ids >= 0, ids // EXPERTS_PER_RANK, -1)
    total = Sum(x.shape, x.device)
    for rank in range(num_ranks):
        if layout not in ROUTE_LAYOUTS:
            total.add((x.float() * (rank + 1)).to(BF16), (owner == rank).any(-1, keepdim=True))
            continue
        partial = Sum(x.shape, x.device)
        for k in range(TOP_K):
            y = (x.float() * (ids[..., k, None] + 1)).to(BF16)
            partial.add(y.float() * weights[..., k, None], owner[..., k, None] == rank)
        total.add(partial.value.to(BF16), partial.begun)
    return total.value.to(BF16)


class Sum:
    """Sums in float32 that start from their first term; 0 where there is none."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=FP32, device=device)
        self.begun = torch.zeros(*shape[:-1], 1, dtype=torch.bool, device=device)

    def add(self, term: torch.Tensor, where: torch.Tensor) -> None:
        value = torch.where(self.begun, self.value + term.float(), term.float())
        self.value = torch.where(where, value, self.value)
        self.begun = self.begun | where


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_soak_expects(layout: str) -> None:
    """By hand, on one token of two ranks: the soak is worth what its expectation is."""
    x = torch.full((1, 1, 1), 1 + 2.0**-7, dtype=BF16)
    ids, weights = torch.tensor([[[5, -1, 2, 7]]]), torch.tensor([[[0.5, torch.nan, 2.0, 1.0]]])
    got = expected(layout, x, ids, weights, 2)
    # Rank 0: expert 2 makes 3 + 3/128, which is 3 + 2/64 in bfloat16 after a tie, and weight 2 doubles it.
    # Rank 1: experts 5 and 7 make 6 + 6/128 -> 6 + 2/32 and 8 + 8/128, of which half and all are 11 + 3/32.
    # Layouts by token: rank 0 gives x, rank 1 gives 2 x.
    by_hand = dict.fromkeys(ROUTE_LAYOUTS, 6 + 2 / 32 + 11 + 2 / 16) | dict.fromkeys(("token", "rank"), 3 + 2 / 64)
    assert got.item() == torch.tensor(by_hand[layout]).to(BF16).item()
    assert expected(layout, -x, torch.full_like(ids, -1), weights, 2).view(torch.int16).item() == 0, "not +0"


# -- between nodes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a process holds after a block of calls.

    Attributes:
        resident_bytes: of its memory. allocated_bytes: what it has allocated and not freed.
        files, threads, tensors: how many are open, run, and live.
        keys: in the store of its process group, of all ranks.
    """

    resident_bytes: int
    allocated_bytes: int
    files: int
    threads: int
    tensors: int
    keys: int

    @staticmethod
    def now(context: RankContext) -> Held:
        """Of all ranks at the same time: none of them has begun with more, or closed what others still use."""
        gc.collect()
        release_dropped()
        torch.distributed.barrier(context.group)
        held = Held(
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            allocated_bytes(),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
            len(store_of(context.group).list_keys()),
        )
        torch.distributed.barrier(context.group)
        return held


def require_steady(held: list[Held], resident_bytes: int, allocated_bytes: int) -> None:
    """What piles up does so in every block. Numbers may not exceed those after the first block.

    Args:
        held: after each block, the first of which fills what is kept.
        resident_bytes, allocated_bytes: a block less than any other may add so many.
    """
    for name, most in (("resident_bytes", resident_bytes), ("allocated_bytes", allocated_bytes)):
        values = [getattr(each, name) for each in held]
        least = min(after - before for before, after in pairwise(values))
        assert least <= most, f"{name} grew in each block, by {least} at least: {values}"
    for name in ("files", "threads", "tensors", "keys"):
        values = [getattr(each, name) for each in held]
        assert max(values) <= values[0], f"{name} grew: {values}"


STEADY = Held(10**8, 10**7, 20, 5, 100, 30)


@pytest.mark.parametrize("name", asdict(STEADY))
def test_what_grows_is_noticed(name: str) -> None:
    """Each by itself, by the least that a soak would have to see: 16 bytes a call, a page for every few, one thing."""
    step = {"resident_bytes": PAGES_A_BLOCK + 1, "allocated_bytes": 16 * CALLS_A_BLOCK + 1}.get(name, 1)
    growing = [replace(STEADY, **{name: getattr(STEADY, name) + i * step}) for i in range(3)]
    require_steady([STEADY] * 3, PAGES_A_BLOCK, 16 * CALLS_A_BLOCK)
    with pytest.raises(AssertionError, match=f"{name} grew"):
        require_steady(growing, PAGES_A_BLOCK, 16 * CALLS_A_BLOCK)


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Four ranks whose memory is that of calls alone. Torch records the last 2000 collectives, with their stacks, and
    each process group there has been; and the C library counts what its threads keep to allocate again as allocated.
    """
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    with RankPool(NETWORK_RANKS, "cpu") as pool:
        yield Ranks(pool, NETWORK_RANKS)


CALLS_A_BLOCK, BLOCKS = 1000, 10
COMMUNICATORS_A_BLOCK = 50
PAGES_A_BLOCK = 16 * 4096
"""Bytes of resident memory. What is allocated moves among pages that an allocator keeps."""
BYTES_A_COMMUNICATOR = 256
"""torch keeps 128 for each thread that has waited in it, and half of the communicators have one. The addresses that
gloo leaves in the store, which were there for ever once, take 1300."""
SOAK_S = 3000.0


@pytest.mark.soak
@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_10000_calls_between_nodes(unrecorded: Ranks, on_timeout: str) -> None:
    """Dispatches and combines in all layouts and orders of sums, whole and in halves, some with gradients: neither
    memory nor anything else that a process has grows, and results have the same bits every time."""
    for rank, held in enumerate(unrecorded.run(check_calls, on_timeout, limit_s=SOAK_S)):
        show(f"{CALLS_A_BLOCK} calls, on_timeout={on_timeout}", rank, held)
        require_steady(held, PAGES_A_BLOCK, 16 * CALLS_A_BLOCK)


def check_calls(context: RankContext, on_timeout: str) -> list[Held]:
    problem = make_problem(CASE, context.num_ranks)
    held: list[Held] = []
    first: dict[int, list[torch.Tensor]] = {}
    with make_comm(context, "network", problem.plan, on_timeout=on_timeout) as comm:
        for _ in range(BLOCKS):
            for call in range(CALLS_A_BLOCK):
                kind = call % (4 * len(LAYOUTS))
                found = one_pair(comm, problem.arguments(context), kind)
                for ours, before in zip(found, first.setdefault(kind, found), strict=True):
                    assert torch.equal(bits(ours), bits(before)), f"call {call} of kind {kind}"
            del found, ours, before
            held.append(Held.now(context))
    return held


def bits(values: torch.Tensor) -> torch.Tensor:
    """CASE has NaN, which no value equals."""
    return values.view(torch.uint8)


def one_pair(comm: tl.Communicator, given: tuple[Any, ...], kind: int) -> list[torch.Tensor]:
    """A dispatch and a combine: what comes home, and in every fourth kind the gradient of tokens."""
    layout, way = LAYOUTS[kind % len(LAYOUTS)], kind // len(LAYOUTS)
    x, ids, weights = given
    mode: Any = "per_rank" if way == 0 else "per_node"
    if way == 1:
        routed = comm.send_dispatch(x, ids, weights, layout=layout).receive()
        return [comm.send_combine(routed.tokens, routed, mode=mode).receive()]
    x = x.detach().requires_grad_(way == 3 and layout != "rank")
    routed = comm.dispatch(x, ids, weights, layout=layout)
    out = comm.combine(routed.tokens, routed, mode=mode)
    if not out.requires_grad:
        return [out]
    out.sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


@pytest.mark.soak
def test_300_communicators_between_nodes(unrecorded: Ranks) -> None:
    """Made, used and closed, or only dropped, with connections of their own and without."""
    for rank, held in enumerate(unrecorded.run(check_communicators, limit_s=SOAK_S)):
        show(f"{COMMUNICATORS_A_BLOCK} communicators", rank, held)
        require_steady(held, PAGES_A_BLOCK, BYTES_A_COMMUNICATOR * COMMUNICATORS_A_BLOCK)


def check_communicators(context: RankContext) -> list[Held]:
    problem = make_problem(CASE, context.num_ranks)
    held: list[Held] = []
    for _ in range(6):
        for number in range(COMMUNICATORS_A_BLOCK):
            comm = make_comm(context, "network", problem.plan, on_timeout=("raise", "mask")[number % 2])
            one_pair(comm, problem.arguments(context), number % 4)
            if number % 5:  # also the last of a block
                comm.close()
            del comm
        held.append(Held.now(context))
    return held


def show(what: str, rank: int, held: list[Held]) -> None:
    for name in asdict(held[0]):
        print(f"\nrank {rank}, after each {what}, {name}: {[getattr(each, name) for each in held]}", end="")
