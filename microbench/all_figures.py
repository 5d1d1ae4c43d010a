"""Takes all figures of a machine in one command: tests, then every benchmark, then a table beside what is aimed at.

    python microbench/all_figures.py FOLDER [--only suite,comm] [--list]

All Hopper GPUs of one host, one rank each. What a step prints goes to FOLDER/<step>.log, its rows to a JSON file of
the name that it would have in results/. A step that fails or takes too long does not keep the next ones from running.
Steps are in the order of their worth: a machine may be taken away.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXPERTS_PER_RANK = 32
END_S = 30.0
"""Time that a step has to end by itself, once it is asked to."""
MEGA_TOKENS = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MEGA_AIMS = {
    4: (335, 354, 358, 364, 400, 540, 840, 1480, 2780, 5450),
    8: (315, 340, None, 350, 400, 500, 800, 1400, 2650, 5200),
}
"""Microseconds of calls with MEGA_TOKENS, by the number of ranks."""
OTHER_AIMS = {
    "dispatch/nvlink/ep8/t4096/h7168/k8/bf16/token/graph": 825.0,
    "dispatch/nvlink/ep8/t4096/h7168/k8/fp8/token/graph": 425.0,
    "combine/nvlink/ep8/t4096/h7168/k8/bf16/token/graph": 825.0,
    "dispatch+combine/nvlink/ep8/t128/h7168/k8/fp8/rank/graph": 60.0,
    "train/nvlink/ep8/t131072/h4096/i1536/e128/k8/bf16/forward": 9.0,
    "train/nvlink/ep8/t131072/h4096/i1536/e128/k8/bf16/backward": 17.5,
    "train/nvlink/ep8/t131072/h7168/i2048/e256/k8/bf16/forward": 20.0,
    "train/nvlink/ep8/t131072/h7168/i2048/e256/k8/bf16/backward": 40.0,
}
"""Of 8 ranks: microseconds of dispatch and combine, milliseconds of training, by the name of the row."""


@dataclass(frozen=True)
class Step:
    """A command of the table.

    Attributes:
        name: of the step.
        arguments: of Python, behind which ``--json`` and a file come if ``rows`` names one.
        rows: name of that file, or "".
        limit_s: the step is ended after so long.
    """

    name: str
    arguments: tuple[str, ...]
    rows: str
    limit_s: float


def steps(num_gpus: int, gpu: str) -> list[Step]:
    """All steps on so many GPUs.

    Args:
        gpu: short name of the GPUs, as in names of result files.
    """
    where, experts = f"{num_gpus}x{gpu}", EXPERTS_PER_RANK * num_gpus
    bench = ("-m", "tokenloom", "bench")
    mega = (*bench, "mega", "--num-experts", str(experts), "--tokens", ",".join(map(str, MEGA_TOKENS)))
    train = (*bench, "train", "--redispatch-in-backward", "--iterations", "9", "--thiek")
    tokens = 16384 * num_gpus  # of all ranks
    found = [
        Step("suite", ("tools/run_gpu_tests.py", "--marker", "gpu and not alone"), "", 1500),
        Step("mega", (*mega, "--iterations", "9"), f"mega-{where}.json", 240),
        Step("comm", (*bench, "comm", "--tokens", "128,4096", "--iterations", "24"), f"comm-{where}.json", 300),
        Step("train a", (*train, f"{tokens},4096,1536,{16 * num_gpus},8"), f"train-a-{where}.json", 240),
        Step("train b", (*train, f"{tokens},7168,2048,{32 * num_gpus},8"), f"train-b-{where}.json", 300),
        Step("deep_ep", ("microbench/deep_ep_names.py",), f"deep_ep-{where}.json", 180),
        Step("rival", (*mega, "--against", "deep_gemm", "--iterations", "9"), f"mega-deep_gemm-{where}.json", 300),
        Step("alone", ("tools/run_gpu_tests.py", "--marker", "gpu and alone"), "", 900),
    ]
    if num_gpus >= 4 and num_gpus % 2 == 0:
        halves = ("microbench/between_nodes.py", "--ranks-per-node", str(num_gpus // 2))
        found.insert(3, Step("between nodes", halves, f"between_nodes-{where}.json", 300))
    return found


def run(step: Step, folder: Path) -> str:
    """Run one step, and say how it ended."""
    rows = ("--json", str(folder / step.rows)) if step.rows else ()
    began = time.monotonic()
    with (folder / f"{step.name.replace(' ', '_')}.log").open("wb") as log:
        command = (sys.executable, *step.arguments, *rows)
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # tools/run_gpu_tests.py ends the workers that it has started
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the ranks of others
            process.wait()
            return f"ended after {step.limit_s:g} s"
    return f"{'done' if status == 0 else f'FAILED with {status}'} in {time.monotonic() - began:.0f} s"


def aims(num_ranks: int) -> dict[str, float]:
    """What is aimed at, by the name of the row."""
    mega = zip(MEGA_TOKENS, MEGA_AIMS.get(num_ranks, ()), strict=False)
    experts = EXPERTS_PER_RANK * num_ranks
    found = {f"mega/ep{num_ranks}/t{tokens}/h7168/i2048/e{experts}/k8/graph": aim for tokens, aim in mega if aim}
    return {**found, **{name: aim for name, aim in OTHER_AIMS.items() if f"/ep{num_ranks}/" in name}}


def beside_aims(documents: Sequence[dict[str, Any]], num_gpus: int) -> list[str]:
    """Lines of the rows that have an aim: measured, aimed at, and their ratio. Those without a measurement say so."""
    measured = {
        row["name"]: row.get("p50_us", row.get("p50_ms"))
        for document in documents
        if isinstance(document.get("rows"), list)  # between_nodes.py counts rows
        for row in document["rows"]
    }
    lines = []
    for name, aim in aims(num_gpus).items():
        value = measured.get(name)
        ratio = "not measured" if value is None else f"{value:10.1f} / {aim:<8.1f} = {value / aim:.2f}"
        lines.append(f"{ratio:32} {name}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="names of steps (default: all)")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    options = parser.parse_args()
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus and not options.list:
        parser.error("there is no GPU")
    gpu = torch.cuda.get_device_name(0).split()[1].lower() if num_gpus else "gpu"
    all_steps = steps(num_gpus or 8, gpu)
    names = options.only.split(",") if options.only else [step.name for step in all_steps]
    if unknown := set(names) - {step.name for step in all_steps}:
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in all_steps)}")
    chosen = [step for step in all_steps if step.name in names]
    if options.list:
        print("\n".join(f"{step.name:14} {' '.join(step.arguments)}" for step in chosen))
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    ends = {}
    for step in chosen:
        ends[step.name] = run(step, options.folder)
        print(f"{step.name:14} {ends[step.name]}", flush=True)
    files = [options.folder / step.rows for step in chosen if step.rows]
    print("\n".join(beside_aims([json.loads(file.read_text()) for file in files if file.exists()], num_gpus)))
    return 0 if all(end.startswith("done") for end in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
