"""Times tokenloom's kernels through the names of DeepEP, in the shapes of DeepEP's own tests.

    python microbench/deep_ep_names.py [--tokens 4096] [--few-tokens 128] [--iterations 30] [--json FILE]

All GPUs, one rank each, or 2 ranks on the CPU, which show that it runs. A call is what a client waits for, by CUDA
events around it: in a loop of calls, as DeepEP's own tests take it, and alone, on GPUs that were idle before. Pairs of
low latency are timed without a graph, by the wall clock of a loop, and in a replayed graph of 10 pairs. Numbers are
medians of the slowest rank, and everybody takes turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.bench import clock
from tokenloom.compat import deep_ep
from tokenloom.ops.quant import quantize_fp8
from tokenloom.runtime.processes import RankContext, RankPool

NUM_EXPERTS, TOP_K = 256, 8
PAIRS = 50
LOOP = 20
"""Calls in a loop, between which the host does not wait for the GPU."""
ALONE = ", alone"
Call = Callable[[], Any]


class Inputs:
    """Tokens of one rank, routed at random to distinct experts."""

    def __init__(self, context: RankContext, tokens: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(context.rank)
        device = context.device
        self.x = torch.randn(tokens, hidden, generator=generator).to(device, torch.bfloat16)
        values, scales = quantize_fp8(self.x)
        self.fp8 = (values, scales)
        self.ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(TOP_K, dim=1).indices.to(device)
        self.weights = torch.rand(tokens, TOP_K, generator=generator).to(device)


def normal(context: RankContext, given: Inputs) -> Iterator[tuple[str, Call]]:
    """``Buffer`` in normal mode: calls that count routes, and calls with the handle of an earlier one."""
    buffer = deep_ep.Buffer(context.group, 1 << 30)
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(given.ids, NUM_EXPERTS)
    layout: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": mask,
    }
    routes: dict[str, Any] = {"topk_idx": given.ids, "topk_weights": given.weights}
    for name, x in (("BF16", given.x), ("FP8", given.fp8)):
        handle = buffer.dispatch(x, **layout, **routes)[4]
        yield f"normal dispatch, {name}", partial(buffer.dispatch, x, **layout, **routes)
        yield f"normal dispatch, {name}, handle", partial(buffer.dispatch, x, handle=handle)
    received: Any
    received, _, weights, _, handle, _ = buffer.dispatch(given.x, **layout, **routes)
    y, received = torch.zeros_like(received), None  # programs hold few results: what is held costs others a copy
    yield "normal combine, BF16", lambda: buffer.combine(y, handle)
    yield "normal combine, BF16, with weights", lambda: buffer.combine(y, handle, topk_weights=weights)


def elastic(context: RankContext, given: Inputs) -> Iterator[tuple[str, Call]]:
    """``ElasticBuffer``, a row for each route."""
    tokens, hidden = given.x.shape
    buffer = deep_ep.ElasticBuffer(context.group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=TOP_K)
    options: dict[str, Any] = {"num_experts": NUM_EXPERTS, "do_expand": True, "expert_alignment": 128}
    for name, x in (("BF16", given.x), ("FP8", given.fp8)):
        for sync in (True, False):
            yield (
                f"expanded dispatch, {name}, {'the host reads counts' if sync else 'no host read'}",
                partial(buffer.dispatch, x, given.ids, given.weights, do_cpu_sync=sync, **options),
            )
    received: Any
    received, _, _, handle, _ = buffer.dispatch(given.x, given.ids, given.weights, **options)
    y, received = torch.zeros_like(received), None
    yield "expanded combine, BF16", lambda: buffer.combine(y, handle)


def hybrid(context: RankContext, given: Inputs) -> Iterator[tuple[str, Call]]:
    """``HybridEPBuffer``, rows permuted by expert."""
    tokens, hidden = given.x.shape
    buffer = deep_ep.HybridEPBuffer(context.group, hidden, tokens, NUM_EXPERTS // context.num_ranks)
    routes: dict[str, Any] = {
        "topk_idx": given.ids,
        "topk_weights": given.weights,
        "num_of_experts": NUM_EXPERTS,
        "pad_multiple": 128,
    }
    yield "permuted dispatch, BF16", lambda: buffer.dispatch_with_permute(hidden=given.x, **routes)
    rows, *_, handle = buffer.dispatch_with_permute(hidden=given.x, **routes)
    y = torch.zeros_like(rows)
    del rows, _
    yield "permuted combine, BF16", lambda: buffer.combine_with_unpermute(hidden=y, handle=handle, pad_multiple=128)


def low_latency_pair(context: RankContext, given: Inputs) -> Call:
    """FP8 out and BF16 back, to tensors of the client's."""
    tokens, hidden = given.x.shape
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, context.num_ranks, NUM_EXPERTS)
    buffer = deep_ep.Buffer(context.group, 0, size, low_latency_mode=True)
    places = (NUM_EXPERTS // context.num_ranks, context.num_ranks * tokens, hidden)
    y, out = torch.zeros(places, dtype=torch.bfloat16, device=context.device), torch.empty_like(given.x)

    def pair() -> None:
        handle = buffer.low_latency_dispatch(given.x, given.ids, tokens, NUM_EXPERTS, use_fp8=True)[2]
        buffer.low_latency_combine(y, given.ids, given.weights, handle, out=out)

    return pair


def wall_us(context: RankContext, pair: Call) -> float:
    """Microseconds of a pair in a loop without a graph, by the host's clock."""
    wait = torch.cuda.synchronize if context.device.type == "cuda" else lambda: None
    dist.barrier(context.group)
    wait()
    began = time.perf_counter()
    for _ in range(PAIRS):
        pair()
    wait()
    return (time.perf_counter() - began) / PAIRS * 1e6


def looped_us(context: RankContext, call: Call) -> float:
    """Microseconds of a call in a loop of them."""
    if context.device.type == "cpu":
        return wall_us(context, call)
    dist.barrier(context.group)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(LOOP)]
    for began, ended in events:
        began.record()
        call()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(began.elapsed_time(ended) for began, ended in events[1:]) * 1e3


def measure(context: RankContext, tokens: int, few_tokens: int, hidden: int, iterations: int) -> dict[str, float]:
    """Microseconds of every call, the median of the slowest rank."""
    given = Inputs(context, tokens, hidden)
    samplers: dict[str, Callable[[], float]] = {}
    for kind in (normal, elastic, hybrid):
        for name, call in kind(context, given):
            call()
            samplers[name] = partial(looped_us, context, call)
            samplers[f"{name}{ALONE}"] = partial(clock.one_call, context, call)
    pair = low_latency_pair(context, Inputs(context, few_tokens, hidden))
    pair()
    samplers["low latency, both calls, wall clock"] = lambda: wall_us(context, pair)
    if context.device.type == "cuda":
        clock.warm_up(pair)
        graph = clock.capture(pair)
        samplers["low latency, both calls, graph"] = lambda: clock.one_replay(context, graph)
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(iterations):
        for name, sampler in samplers.items():
            samples[name].append(sampler())
    found = torch.tensor([[*times] for times in samples.values()], dtype=torch.float64)
    everybody = [torch.empty_like(found) for _ in range(context.num_ranks)]
    dist.all_gather_object(everybody, found, context.group)
    slowest = torch.stack(everybody).amax(0)
    return {name: statistics.median(row.tolist()) for name, row in zip(samples, slowest, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--few-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    sizes = (arguments.tokens, arguments.few_tokens, arguments.hidden, arguments.iterations)
    with RankPool(gpus or 2, "cuda" if gpus else "cpu") as pool:
        found = pool.run(measure, *sizes, limit_s=400)[0]
    print(f"{'us':48}   in a loop      alone")
    for name, us in found.items():
        if not name.endswith(ALONE):
            alone = found.get(f"{name}{ALONE}")
            print(f"{name:48} {us:11.1f} {'' if alone is None else f'{alone:10.1f}'}")
    if arguments.json:
        names = [torch.cuda.get_device_name(i) for i in range(gpus)]
        setup = {"gpus": names, "torch": torch.__version__, **vars(arguments), "json": str(arguments.json)}
        arguments.json.write_text(json.dumps({"setup": setup, "us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
