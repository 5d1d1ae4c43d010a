"""The products of a training step, alone and beside a combine, in turns on one Hopper GPU.

    python microbench/products.py [--json FILE]

torch's ``grouped_mm``, and cuBLAS expert by expert on two streams. The combine is one rank's own, on 32 SMs,
beside which the time is until both are done. Events around calls, medians over rounds in which everybody takes turns.
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
from tokenloom.ops.experts import Products, _ExpertByExpert, _GroupedProducts
from tokenloom.tune.samples import call_us

ROUNDS = 9
ROWS, TOP_K, SMS = 131072, 8, 32
LAYERS = ((4096, 1536, 16), (7168, 2048, 32))
"""Hidden, intermediate, experts of a rank."""

Call = Callable[[], Any]


def uneven(experts: int) -> list[int]:
    """Rows of each expert as random routing has them: about even, never multiples of a tile."""
    counts = [ROWS // experts + (37 if i % 2 else -37) * (i // 2 + 1) for i in range(experts)]
    counts[-1] += ROWS - sum(counts)
    return counts


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def calls_of(hidden: int, intermediate: int, ends: list[int]) -> dict[str, tuple[float, dict[str, Call]]]:
    """Product -> (FLOPs, who -> call)."""
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    experts = len(ends) - 1
    w1, w2 = random(experts, 2 * intermediate, hidden) * 0.02, random(experts, hidden, intermediate) * 0.02
    x, grad, pre, act = (random(ROWS, width) for width in (hidden, hidden, 2 * intermediate, intermediate))
    row_weights = torch.rand(ROWS, device="cuda")
    d1, d2 = torch.empty_like(w1), torch.empty_like(w2)
    who: dict[str, Products] = {
        "grouped_mm": _GroupedProducts(offsets),
        "cuBLAS": _ExpertByExpert(ends),
    }
    one = 2.0 * ROWS * hidden * intermediate
    products: dict[str, tuple[float, Callable[[Products], Any]]] = {
        "x w1": (2 * one, lambda p: p.by_weights(x, w1.transpose(1, 2))),
        "x w1, SwiGLU": (2 * one, lambda p: activate(p.by_weights(x, w1.transpose(1, 2)), row_weights, offsets[-1:])),
        "act w2": (one, lambda p: p.by_weights(act, w2.transpose(1, 2))),
        "dy w2": (one, lambda p: p.by_weights(grad, w2)),
        "dh w1": (2 * one, lambda p: p.by_weights(pre, w1)),
        "dw1": (2 * one, lambda p: p.of_weights(pre, x)),
        "dw2": (one, lambda p: p.of_weights(grad, act)),
        "dw1, added": (2 * one, lambda p: p.of_weights(pre, x, d1)),
        "dw2, added": (one, lambda p: p.of_weights(grad, act, d2)),
    }
    return {
        name: (flops, {each: partial(product, p) for each, p in who.items()})
        for name, (flops, product) in products.items()
    }


def beside(combine: Call, side: torch.cuda.Stream, call: Call) -> Call:
    def both() -> None:
        main = torch.cuda.current_stream()
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
        comm = tl.Communicator(None, backend="nvlink", device="cuda:0", num_sms=SMS, **sizes)
        ids = torch.rand(tokens, experts, device="cuda").topk(TOP_K).indices
        with torch.no_grad():
            routed = comm.dispatch(random(tokens, hidden), ids, torch.rand(tokens, TOP_K, device="cuda"), copy=True)
            y, side = torch.randn_like(routed.tokens), torch.cuda.Stream(priority=-1)

            def combine(comm: Any = comm, y: Any = y, routed: Any = routed) -> None:
                comm.combine(y, routed, weighted=False)

            for name, (flops, calls) in calls_of(hidden, intermediate, ends).items():
                runs = {(who, "alone"): call for who, call in calls.items()}
                runs |= {(who, "beside"): beside(combine, side, call) for who, call in calls.items()}
                times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
                for turn in range(ROUNDS + 1):
                    for key, call in runs.items():
                        us = call_us(None, torch.device("cuda"), call, queued=True)
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
        setup = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": ROWS, "rounds": ROUNDS}
        arguments.json.write_text(json.dumps({"setup": setup, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
