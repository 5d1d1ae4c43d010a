"""Shows what a call of backend nvlink costs the host: microseconds until it returns, with an idle GPU.

    python microbench/host_cost.py [--tokens 128] [--calls 2000] [--profile NAME] [--json FILE]

With Hopper GPUs it uses all of them, one rank each, and times the real thing on rank 0. Without a GPU it times what
Python does: the driver, torch.cuda and shared memory are stand-ins that do nothing, tensors lie on the CPU, and calls
are over at once. Then it also prints which of the stand-ins one call asks how often, since those cost more on a GPU.
Sizes are bounded, ids are int64, gradients are off, and nothing is checked by the host.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tokenloom as tl
from tokenloom.runtime.processes import RankContext, RankPool

NUM_EXPERTS, HIDDEN, TOP_K, INTERMEDIATE = 256, 7168, 8, 256
STAND_IN_RANKS = 4
FP8_BLOCK = 128
Calls = dict[str, Callable[[], Any]]


def make_comm(group: dist.ProcessGroup | None, device: torch.device, tokens: int) -> tl.Communicator:
    return tl.Communicator(
        group,
        num_experts=NUM_EXPERTS,
        hidden=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        backend="nvlink",
        device=device,
    )


def moving_calls(comm: tl.Communicator, tokens: int) -> Calls:
    """Dispatches and combines of all layouts. Each dispatch keeps what it returned for its combine."""
    device = comm.device
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(tokens, NUM_EXPERTS, device=device).topk(TOP_K, dim=1).indices
    weights = torch.rand(tokens, TOP_K, device=device)
    calls: Calls = {}
    for layout in ("token", "rank", "expert"):
        capacity = 2 * tokens * TOP_K if layout == "expert" else None
        for to_fp8 in (False, True):
            kept: dict[str, Any] = {}

            def dispatch(
                layout: Any = layout, capacity: Any = capacity, to_fp8: bool = to_fp8, kept: dict[str, Any] = kept
            ) -> None:
                kept["routed"] = comm.dispatch(
                    x, ids, weights, layout=layout, sizes="bounded", capacity=capacity, to_fp8=to_fp8
                )

            name = f"{layout}, {'bf16 to fp8' if to_fp8 else 'bf16'}"
            calls[f"dispatch, {name}"] = dispatch
            dispatch()
            y = torch.zeros(kept["routed"].tokens.shape, device=device, dtype=torch.bfloat16)

            def combine(y: torch.Tensor = y, kept: dict[str, Any] = kept) -> None:
                comm.combine(y, kept["routed"])

            calls[f"combine, {name}"] = combine
    return calls


def mega_calls(layer: tl.MegaMoE, tokens: int) -> Calls:
    """Forward calls of a MegaMoE."""
    device, local = layer.comm.device, layer.comm.plan.experts_per_rank
    blocks = (HIDDEN // FP8_BLOCK, INTERMEDIATE // FP8_BLOCK)
    layer.use_weights(
        torch.zeros(local, 2 * INTERMEDIATE, HIDDEN, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.ones(local, 2 * blocks[1], blocks[0], device=device),
        torch.zeros(local, HIDDEN, INTERMEDIATE, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        torch.ones(local, *blocks, device=device),
    )
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(tokens, NUM_EXPERTS, device=device).topk(TOP_K, dim=1).indices
    weights, out = torch.rand(tokens, TOP_K, device=device), torch.empty_like(x)
    return {
        "MegaMoE, bf16": lambda: layer(x, ids, weights),
        "MegaMoE, bf16, out=": lambda: layer(x, ids, weights, out=out),
    }


def costs_us(calls: Calls, num_calls: int, settle: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Median and 10th percentile of each call, which take turns. ``settle``, not timed, ends what is under way."""
    costs: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_calls):
        for name, call in calls.items():
            settle()
            began = time.perf_counter_ns()
            call()
            costs[name].append((time.perf_counter_ns() - began) / 1e3)
    return {
        name: {"median": statistics.median(found), "p10": statistics.quantiles(found, n=10)[0]}
        for name, found in costs.items()
    }


# -- on GPUs -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_on_gpus(context: RankContext, tokens: int, num_calls: int) -> dict[str, dict[str, float]]:
    """Costs of all calls on this rank. Collective."""

    def settle() -> None:
        torch.cuda.synchronize()
        dist.barrier(context.group)

    with make_comm(context.group, context.device, tokens) as comm:
        found = costs_us(moving_calls(comm, tokens), num_calls, settle)
    with make_layer(context.group, context.device, tokens) as layer:
        return {**found, **costs_us(mega_calls(layer, tokens), num_calls, settle)}


def make_layer(group: dist.ProcessGroup | None, device: torch.device, tokens: int) -> tl.MegaMoE:
    return tl.MegaMoE(
        group,
        num_experts=NUM_EXPERTS,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        device=device,
    )


# -- without a GPU -----------------------------------------------------------------------------------------------


class StandIns:
    """What calls ask of torch.cuda, the driver and shared memory, doing nothing.

    Attributes:
        asked: how often each was asked, while counting.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.counting = False
        self._stack = ExitStack()
        self._backends: list[Any] = []

    def counted(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **options: Any) -> Any:
            if self.counting:
                self.asked[name] += 1
            return answer(*arguments, **options)

        return ask

    def patch(self, owner: Any, name: str, value: Any) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, value, create=True))

    def __enter__(self) -> StandIns:
        from tokenloom.backends import registry
        from tokenloom.backends.nvlink import backend, buffers, launcher
        from tokenloom.comm import communicator
        from tokenloom.inference import nvlink_experts
        from tokenloom.jit import kernel

        for name, answer in _cuda().items():
            self.patch(torch.cuda, name, self.counted(f"torch.cuda.{name}", answer))
        self.patch(torch.cuda, "Event", _Event)
        self.patch(torch.cuda, "Stream", _Stream)
        self.patch(torch._C, "_cuda_getCurrentRawStream", self.counted("raw stream", lambda index: 7))
        self.patch(torch._C, "_cuda_isCurrentStreamCapturing", self.counted("is capturing", lambda: False))
        zeros = torch.zeros
        self.patch(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
        self.patch(kernel, "load_driver", lambda: None)
        self.patch(kernel, "_function", lambda spec, index: 1)
        self.patch(kernel, "launch_function", _nothing_in_c)
        self.patch(nvlink_experts, "operand_map", lambda *shape: kernel.TensorMap())
        self.patch(nvlink_experts, "scale_map", lambda *shape: kernel.TensorMap())
        self.patch(launcher.Launcher, "_look_around", lambda *arguments: self.settle())
        self.patch(launcher, "LOOK_EVERY_S", -1.0)  # who waits for a call looks at once, and finds it over
        self.patch(backend, "usable_sms", lambda index: 132)
        self.patch(backend, "SymmetricBuffer", _Memory)
        self.patch(buffers, "SymmetricBuffer", _Memory)
        self.patch(communicator, "agree", lambda ranks, prepare, what: [prepare()])
        self.patch(registry, "probe", lambda request: [])
        self.patch(communicator, "RankGroup", _ranks)

        def make(request: Any, ranks: Any, probes: Any) -> Any:
            made = backend.NvlinkBackend(request.plan, ranks, request.num_sms)
            self._backends.append(made)
            return registry.Choice(made, "stand-in", [])

        self.patch(registry, "make", make)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def settle(self) -> None:
        """Write what kernels write when they are over."""
        from tokenloom.backends.nvlink.launcher import CALLS_IN_FLIGHT, _sequence_of
        from tokenloom.runtime.kernel_reports import RECORD_WORDS, SEQUENCE_WORD

        for each in self._backends:
            launcher = each._launcher
            for number in range(max(launcher.num_calls - CALLS_IN_FLIGHT - 1, 0), launcher.num_calls):
                slot = number % (CALLS_IN_FLIGHT + 1)
                launcher._records._words[RECORD_WORDS * slot + SEQUENCE_WORD] = _sequence_of(number)


class _Stream:
    """A stream, made anew at each question, as torch does."""

    def __init__(self, device: Any = None, priority: int = 0, cuda_stream: int = 7) -> None:
        self.cuda_stream, self.device_index = cuda_stream, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.cuda_stream == self.cuda_stream

    def wait_stream(self, other: object) -> None:
        pass


class _Event:
    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True


class _Memory:
    """A buffer that only this process has."""

    def __init__(self, layout: Any, ranks: Any) -> None:
        self.layout = layout
        self._memory = torch.zeros(layout.total_bytes + 256, dtype=torch.uint8)
        self.addresses = [self._memory.data_ptr()] * ranks.num_ranks
        self.peers = torch.tensor(self.addresses)

    def view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        offset, _ = self.layout.places[name]
        skipped = -self._memory.data_ptr() % 256
        size = dtype.itemsize * torch.Size(shape).numel()
        return self._memory[skipped + offset : skipped + offset + size].view(dtype).view(shape)

    def ended_ranks(self) -> list[int]:
        return []


def _cuda() -> dict[str, Callable[..., Any]]:
    return {
        "current_stream": lambda device=None: _Stream(),
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "device": lambda index: nullcontext(),
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
    }


def _nothing_in_c() -> Any:
    """A function of the C library that ignores its arguments, called as the driver is."""
    launch = ctypes.CDLL(None).getpid
    launch.argtypes = [ctypes.c_void_p] * 4
    return lambda *operands: launch(*operands) and 0


def _ranks(*arguments: Any, **options: Any) -> Any:
    from tokenloom.runtime.rank_group import RankGroup

    ranks = RankGroup(*arguments, **options)
    ranks.num_ranks = STAND_IN_RANKS
    return ranks


@torch.no_grad()
def measure_python(tokens: int, num_calls: int, profile: str) -> dict[str, dict[str, Any]]:
    """Costs of all calls with stand-ins, and what each asks of them."""
    device = torch.device("cpu")
    with StandIns() as stand_ins:
        calls = moving_calls(make_comm(None, device, tokens), tokens)
        calls.update(mega_calls(make_layer(None, device, tokens), tokens))
        if profile:
            show_profile(calls[profile], stand_ins.settle, num_calls)
            return {}
        found: dict[str, dict[str, Any]] = dict(costs_us(calls, num_calls, stand_ins.settle))
        for name, call in calls.items():
            stand_ins.settle()
            stand_ins.asked.clear()
            stand_ins.counting = True
            call()
            stand_ins.counting = False
            found[name]["asked"] = dict(stand_ins.asked)
    return found


def show_profile(call: Callable[[], Any], settle: Callable[[], None], num_calls: int) -> None:
    """Where the time of one call goes, by function."""
    profiler = cProfile.Profile()
    for _ in range(num_calls):
        settle()
        profiler.enable()
        call()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--profile", default="", metavar="NAME", help="profile one call, without GPUs only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        with RankPool(torch.cuda.device_count(), "cuda") as pool:
            found = pool.run(measure_on_gpus, arguments.tokens, arguments.calls, limit_s=300)[0]
    else:
        found = measure_python(arguments.tokens, arguments.calls, arguments.profile)
    for name, values in found.items():
        asked = ", ".join(f"{number} {what}" for what, number in values.get("asked", {}).items())
        print(f"{name:32} {values['median']:7.1f} us, p10 {values['p10']:7.1f}  {asked}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
