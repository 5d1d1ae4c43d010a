"""Times the experts' GEMMs of a training step, alone and beside a combine, in turns on one Hopper GPU.

    python microbench/expert_gemms.py [--json FILE]

torch's ``grouped_mm`` is measured beside cuBLAS expert by expert on two streams. The combine is one rank's own, on 32
SMs; the time beside it ends when both are done. Events are around calls; figures are medians over rounds in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import tokenloom as tl
from tokenloom.ops.activation import activate
from tokenloom.ops.expert_gemms import ExpertGemms, gemms_for
from tokenloom.tune.samples import call_us

DEVICE = torch.device("cuda", 0)
ROUNDS = 9
ROWS, TOP_K, SMS = 131072, 8, 32
LAYERS = ((4096, 1536, 16), (7168, 2048, 32))
"""Hidden, intermediate and experts of a rank, for each layer."""

Call = Callable[[], Any]


def uneven(experts: int) -> list[int]:
    """Rows of each expert, much as random routing has them: about even, never multiples of a tile."""
    counts = [ROWS // experts + (37 if i % 2 else -37) * (i // 2 + 1) for i in range(experts)]
    counts[-1] += ROWS - sum(counts)
    return counts


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).bfloat16()


def calls_of(hidden: int, intermediate: int, ends: list[int]) -> dict[str, tuple[float, dict[str, Call]]]:
    """The calls to time: GEMM -> (floating-point operations, who -> call).

    Args:
        ends: where each expert's rows begin, and where the last one's end.
    """
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    experts = len(ends) - 1
    w1, w2 = random(experts, 2 * intermediate, hidden) * 0.02, random(experts, hidden, intermediate) * 0.02
    x, grad, pre, act = (random(ROWS, width) for width in (hidden, hidden, 2 * intermediate, intermediate))
    row_weights = torch.rand(ROWS, dtype=torch.float32, device=DEVICE)
    d1, d2 = torch.empty_like(w1), torch.empty_like(w2)
    who: dict[str, ExpertGemms] = {
        "grouped_mm": gemms_for(x, w1, w2, offsets),
        "cuBLAS": gemms_for(x, w1, w2, offsets, ends),  # with sizes on the host, and many rows of each expert
    }
    one = 2.0 * ROWS * hidden * intermediate
    gemms: dict[str, tuple[float, Callable[[ExpertGemms], Any]]] = {
        "x w1": (2 * one, lambda p: p.multiply(x, w1.transpose(1, 2))),
        "x w1, SwiGLU": (2 * one, lambda p: activate(p.multiply(x, w1.transpose(1, 2)), row_weights, offsets)),
        "act w2": (one, lambda p: p.multiply(act, w2.transpose(1, 2))),
        "dy w2": (one, lambda p: p.multiply(grad, w2)),
        "dh w1": (2 * one, lambda p: p.multiply(pre, w1)),
        "dw1": (2 * one, lambda p: p.weight_gradient(pre, x)),
        "dw2": (one, lambda p: p.weight_gradient(grad, act)),
        "dw1, added": (2 * one, lambda p: p.weight_gradient(pre, x, d1)),
        "dw2, added": (one, lambda p: p.weight_gradient(grad, act, d2)),
    }
    return {
        name: (flops, {each: partial(gemm, p) for each, p in who.items()}) for name, (flops, gemm) in gemms.items()
    }


def beside(combine: Call, side: torch.cuda.Stream, call: Call) -> Call:
    """Both calls, each on a stream of its own; the current stream waits for both."""

    def both() -> None:
        main = torch.cuda.current_stream(DEVICE)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            combine()
        call()
        main.wait_stream(side)

    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for hidden, intermediate, experts in LAYERS:
        ends = list(accumulate(uneven(experts), initial=0))
        tokens = ROWS // TOP_K
        sizes: dict[str, Any] = {
            "num_experts": experts,
            "hidden": hidden,
            "top_k": TOP_K,
            "max_tokens_per_rank": tokens,
        }
        comm = tl.Communicator(None, backend="nvlink", device=DEVICE, num_sms=SMS, **sizes)
        ids = torch.rand(tokens, experts, dtype=torch.float32, device=DEVICE).topk(TOP_K).indices
        weights = torch.rand(tokens, TOP_K, dtype=torch.float32, device=DEVICE)
        with torch.no_grad():
            routed = comm.dispatch(random(tokens, hidden), ids, weights, copy=True)
            y, side = torch.randn_like(routed.tokens), torch.cuda.Stream(DEVICE, priority=-1)

            def combine(comm: Any = comm, y: Any = y, routed: Any = routed) -> None:
                comm.combine(y, routed, weighted=False)

            for name, (flops, calls) in calls_of(hidden, intermediate, ends).items():
                runs = {(who, "alone"): call for who, call in calls.items()}
                runs |= {(who, "beside"): beside(combine, side, call) for who, call in calls.items()}
                times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
                for turn in range(ROUNDS + 1):
                    for key, call in runs.items():
                        us = call_us(None, DEVICE, call, queued=True)
                        if turn:
                            times[key].append(us)
                row: dict[str, Any] = {"hidden": hidden, "intermediate": intermediate, "product": name}
                for (who, where), each in times.items():
                    row[f"{who}, {where}"] = statistics.median(each)
                found.append(row)
                rates = "  ".join(
                    f"{who} {row[f'{who}, alone']:7.0f} us {flops / row[f'{who}, alone'] / 1e6:4.0f} TFLOP/s, "
                    f"beside {row[f'{who}, beside']:7.0f}"
                    for who in calls
                )
                print(f"H {hidden} {name:13} {rates}", flush=True)
        comm.check()
        comm.close()
    if arguments.json:
        setup = {
            "device": torch.cuda.get_device_name(DEVICE),
            "torch": torch.__version__,
            "rows": ROWS,
            "rounds": ROUNDS,
        }
        arguments.json.write_text(json.dumps({"setup": setup, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
