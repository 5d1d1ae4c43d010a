"""Times the kernels between and after the experts' GEMMs, in every form, in turns on one Hopper GPU.

    python microbench/activations.py [--json FILE]

Bytes are those that a form must read and write: gates and ups, activations, gradients, rows of H. Rates near each
other say that a function, a bias or gates and ups in turns cost no more than their bytes.
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

from tokenloom.kernels.activation import launch
from tokenloom.kernels.bias import launch as bias_launch
from tokenloom.plan import ACTIVATIONS
from tokenloom.tune.samples import call_us

DEVICE = torch.device("cuda", 0)
ROUNDS = 9
ROWS, EXPERTS, INTERMEDIATE, HIDDEN = 131072, 16, 1536, 4096

Call = Callable[[], Any]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).bfloat16()


def calls() -> dict[str, tuple[int, Call]]:
    """The calls to time: what -> (bytes, call)."""
    counts = [ROWS // EXPERTS + (37 if e % 2 else -37) for e in range(EXPERTS)]
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)
    weights = torch.rand(ROWS, dtype=torch.float32, device=DEVICE)
    wide, grad, y = random(ROWS, 2 * INTERMEDIATE), random(ROWS, INTERMEDIATE), random(ROWS, HIDDEN)
    bias, bias_of_y = random(EXPERTS, 2 * INTERMEDIATE), random(EXPERTS, HIDDEN)
    narrow, narrow_bias = wide.view(2 * ROWS, INTERMEDIATE)[:ROWS], bias.view(2 * EXPERTS, INTERMEDIATE)[:EXPERTS]
    row = 2 * INTERMEDIATE * ROWS
    found: dict[str, tuple[int, Call]] = {}
    for name, activation in ACTIVATIONS.items():
        parts = activation.rows
        for in_turns in (False, True)[:parts]:
            for biased in (False, True):
                options = (activation, in_turns, (bias if parts == 2 else narrow_bias) if biased else None)
                given = (wide if parts == 2 else narrow, weights, offsets)
                form = ", ".join([name, *(["in turns"] if in_turns else []), *(["biased"] if biased else [])])
                found[f"forward, {form}"] = ((parts + 1) * row, partial(launch.activate_forward, *given, *options))
                backward = partial(launch.activate_backward, *given, grad, *options)
                found[f"backward, {form}"] = ((2 * parts + 2) * row, backward)
    bytes_of_y = 2 * HIDDEN * ROWS
    found["add_bias"] = (2 * bytes_of_y, partial(bias_launch.add_bias, y, weights, offsets, bias_of_y))
    found["dot_bias"] = (bytes_of_y, partial(bias_launch.dot_bias, weights.clone(), y, offsets, bias_of_y))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    contestants = calls()
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(ROUNDS + 1):
        for name, (_, call) in contestants.items():
            us = call_us(None, DEVICE, call, queued=True)
            if turn:  # the first compiles
                samples[name].append(us)
    rows = []
    for name, (num_bytes, _) in contestants.items():
        us = statistics.median(samples[name])
        rows.append({"kernel": name, "us": round(us, 1), "tb_per_s": round(num_bytes / us / 1e6, 2)})
        print(f"{name:45} {us:9.1f} us {num_bytes / us / 1e6:6.2f} TB/s")
    if arguments.json:
        sizes = {"rows": ROWS, "experts": EXPERTS, "intermediate": INTERMEDIATE, "hidden": HIDDEN, "rounds": ROUNDS}
        setup = {"device": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__, **sizes}
        arguments.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
