"""Measurement of what SMs and links of a machine reach, by the time of calls, and where it is kept.

On one SM a block sends its rows before it does anything else, and links are never full. So the time of a call is the
sum of what its rows take, and differences of calls give the rates. On many SMs a dispatch by token fills the links.
What a call takes once, whatever its tokens, is no rate: times are those of all tokens, less those of half of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends.peers import kept_rates
from tokenloom.backends.peers.kept_rates import Machine
from tokenloom.backends.registry import LAYER_SMS
from tokenloom.comm.communicator import Communicator
from tokenloom.errors import InvalidArgument, raised_by_all
from tokenloom.kernels.common import H200, Rates, ranks_of_token
from tokenloom.plan import FP8_BLOCK, Plan
from tokenloom.runtime.process_groups import process_group_of
from tokenloom.tune.profiler import WARM_UP_ROUNDS, slowest_rank_ms
from tokenloom.tune.samples import call_us, draw_topk_ids

NUM_TOKENS, HIDDEN, TOP_K, EXPERTS_PER_RANK = 4096, 7168, 8, 32
"""Of the calls that are timed. A shape of its own: rates are the machine's."""
ITERATIONS = 20
"""Samples of each time."""

OfTokens = Callable[[int], Callable[[], Any]]
"""Makes a call with so many tokens of each rank."""


@dataclass(frozen=True)
class MeasuredRates:
    """Result of ``measure_rates``, the same on all ranks.

    Attributes:
        machine: what the rates hold for.
        rates: of its SMs and links.
        us: what was timed, by name: microseconds of one more token. "links" on many SMs, the others on one.
        file: file in which rank 0 keeps the rates. None if it could not be written.
    """

    machine: Machine
    rates: Rates
    us: Mapping[str, float]
    file: str | None

    def __str__(self) -> str:
        ranks = "1 rank" if self.machine.ranks_per_node == 1 else f"{self.machine.ranks_per_node} ranks"
        return f"rates of {ranks} on {self.machine.device_name}: {self.rates}"


@torch.no_grad()
def measure_rates(
    group: dist.ProcessGroup | DeviceMesh | None = None, *, device: torch.device | str | None = None
) -> MeasuredRates:
    """Measure what SMs and links of these GPUs reach, and keep it. Collective.

    Communicators of as many ranks that are made from now on choose the SMs of their calls by it, and how many of their
    blocks send; see docs/how-to/tune.md.

    Args:
        group: as in ``Communicator``. Its ranks are on one node.
        device: as in ``Communicator``.

    Returns:
        The rates, the same on all ranks. Rank 0 also writes them to its disk.

    Raises:
        InvalidArgument: communicators of these ranks choose nothing by rates.
        ImplausibleRates: a rate is far from that of any GPU of this kind; nothing was kept.
        PlanMismatch, PeerError: what ``Communicator`` raises.
    """
    process_group = process_group_of(group)
    num_ranks = 1 if process_group is None else dist.get_world_size(process_group)
    sizes = {"num_experts": EXPERTS_PER_RANK * num_ranks, "hidden": HIDDEN, "top_k": min(TOP_K, EXPERTS_PER_RANK)}
    options: dict[str, Any] = {"max_tokens_per_rank": NUM_TOKENS, "device": device, "dtype": torch.bfloat16, **sizes}
    with Communicator(group, num_sms=1, **options) as few, Communicator(group, num_sms=LAYER_SMS, **options) as many:
        if not few.engine.capabilities.has_rates:
            raise raised_by_all(InvalidArgument(f"backend {few.backend!r} chooses no SMs by rates, so it needs none"))
        us = {name: _us_of_a_token(few, of) for name, of in _calls(few, many).items()}
        rates = rates_of(few.plan, us)
        machine, file = Machine.of(few.engine.ranks), None
        if few.rank == 0:
            file = kept_rates.keep(machine, rates)
        files = few.engine.ranks.all_gather_object(None if file is None else str(file), "keeping rates")
    return MeasuredRates(machine, rates, us, files[0])


def _calls(few: Communicator, many: Communicator) -> dict[str, OfTokens]:
    """The calls that are timed, by name: on one SM, and "links" on many."""
    plan, device = few.plan, few.device
    generator = torch.Generator(device).manual_seed(few.rank)
    size = (plan.max_tokens_per_rank, plan.hidden)
    x = torch.randn(size, generator=generator, dtype=torch.bfloat16, device=device)
    fp8 = x.to(torch.float8_e4m3fn)
    scales = torch.ones(size[0], size[1] // FP8_BLOCK, dtype=torch.float32, device=device)
    ids = draw_topk_ids(few.rank, size[0], plan.num_experts, plan.top_k).to(device)
    first_alone = ids.masked_fill(torch.arange(plan.top_k, device=device) > 0, -1)
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float32, device=device)

    def dispatch(
        comm: Communicator, layout: str, with_fp8: bool = False, ids: torch.Tensor = ids, **options: Any
    ) -> OfTokens:
        if layout == "expert":
            options["capacity"] = size[0] * plan.top_k * 5 // 4  # for even routing that much is there anyway

        def of(num_tokens: int) -> Callable[[], Any]:
            rows: Any = (fp8[:num_tokens], scales[:num_tokens]) if with_fp8 else x[:num_tokens]
            given = rows, ids[:num_tokens], weights[:num_tokens]
            return lambda: comm.dispatch(*given, layout=layout, sizes="bounded", **options)  # type: ignore[arg-type]

        return of

    def combine(layout: str) -> OfTokens:
        def of(num_tokens: int) -> Callable[[], Any]:
            routed = dispatch(few, layout, copy=True)(num_tokens)()
            return lambda: few.combine(routed.tokens, routed)

        return of

    return {
        "links": dispatch(many, "token"),
        "send": dispatch(few, "token"),
        "send fp8": dispatch(few, "token", with_fp8=True),
        "quantize": dispatch(few, "token", ids=first_alone, to_fp8=True),  # or sending might take longer
        "store": dispatch(few, "expert"),
        "push": combine("expert"),
        "add": combine("token"),
    }


def _us_of_a_token(comm: Communicator, of_tokens: OfTokens) -> float:
    """Microseconds that one more token of each rank takes, of the slowest rank."""
    whole, half = comm.plan.max_tokens_per_rank, comm.plan.max_tokens_per_rank // 2
    calls = [of_tokens(whole), of_tokens(half)]
    samples: list[list[float]] = [[], []]
    for number in range(WARM_UP_ROUNDS + ITERATIONS):
        for call, its in zip(calls, samples, strict=True):
            us = call_us(comm.process_group, comm.device, call, queued=True)
            if number >= WARM_UP_ROUNDS:
                its.append(us)
    by_rank = comm.engine.ranks.all_gather_object(samples, "measuring rates")
    of_whole, of_half = (slowest_rank_ms([each[which] for each in by_rank]) for which in (0, 1))
    return (of_whole - of_half) * 1e3 / (whole - half)


def rates_of(plan: Plan, us: Mapping[str, float]) -> Rates:
    """Find the rates with which calls take these times, by what :class:`tokenloom.kernels.common.Work` counts.

    Args:
        us: as in :class:`MeasuredRates`.

    Raises:
        ImplausibleRates: a rate is far from the default.
    """
    row = 2.0 * plan.hidden  # bytes
    rows = ranks_of_token(plan.num_ranks, plan.top_k)  # of a token, by token
    sent, own = rows * (1 - 1 / plan.num_ranks), rows / plan.num_ranks
    store = _rate((plan.top_k - sent - own) * row, us["store"] - us["send"])
    pushed, copied = (plan.top_k + rows) * row, 2 * sent * row
    push = _rate(pushed - copied, us["push"] - us["add"])
    found = {
        "quantize_gbytes_per_s": _rate(row, us["quantize"]),
        "store_gbytes_per_s": store,
        "push_gbytes_per_s": push,
        "add_gbytes_per_s": _rate((rows + 1) * row, us["add"] - _us(copied, push)),
    }
    if plan.num_ranks > 1:
        bf16 = (us["send"] - own * _us(row, store)) / sent
        fp8 = (us["send fp8"] - own * _us(row / 2, store)) / sent
        send = _rate(row / 2, bf16 - fp8)
        found |= {
            "send_gbytes_per_s": send,
            "send_us": bf16 - _us(row, send),
            "link_gbytes_per_s": _rate(sent * row, us["links"]),
        }
    return replace(H200, **{name: round(value, 3) for name, value in found.items()})


def _rate(num_bytes: float, us: float) -> float:
    """GB/s, which are implausible where the time is none."""
    return num_bytes * 1e-3 / us if us > 0 else 0.0


def _us(num_bytes: float, rate: float) -> float:
    return num_bytes * 1e-3 / rate if rate > 0 else 0.0
