"""Two versions of tokenloom in turns on the same GPUs: every row of its benchmarks, new over old.

    python microbench/compare_versions.py OLD_TREE [--gpus 4] [--rounds 3] [--only comm,mega,train] [--json FILE]

Each round runs every benchmark of one version and then of the other, so that drifting clocks meet both alike. The two
runs of one version in different rounds show how much equal code differs; a ratio below that spread is noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMANDS = {
    "comm": "bench comm --device cuda --ranks {gpus} --tokens 128,4096 --iterations 12 --backends nvlink",
    "mega": "bench mega --ranks {gpus} --num-experts {experts} --tokens 8,128,512,2048,8192 --iterations 5",
    "train": "bench train --device cuda --ranks {gpus} --thiek {tokens},4096,1536,{half},8 "
    "--redispatch-in-backward --no-check --iterations 5",
}
EXPERTS, TOKENS = 32, 16_384
"""Of each GPU. Training has half as many experts."""
VALUES = ("p50_us", "p50_ms")
TOLERANCE = 1.015


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(COMMANDS), help=f"some of {', '.join(COMMANDS)}")
    parser.add_argument("--limit-s", type=float, default=500.0, help="begin no further round after this long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trees = {"old": options.old.resolve(), "new": Path(__file__).resolve().parents[1]}
    gpus = options.gpus
    sizes = {"gpus": gpus, "experts": EXPERTS * gpus, "half": EXPERTS // 2 * gpus, "tokens": TOKENS * gpus}
    commands = {name: command.format(**sizes) for name, command in COMMANDS.items()}
    found: dict[str, dict[str, list[float]]] = {}
    began, longest = time.monotonic(), 0.0
    for number in range(options.rounds):
        if time.monotonic() + longest - began > options.limit_s:
            break
        round_began = time.monotonic()
        for name in options.only.split(","):
            for version in ("old", "new") if number % 2 == 0 else ("new", "old"):
                for row, value in measure(trees[version], commands[name]).items():
                    found.setdefault(row, {}).setdefault(version, []).append(value)
        longest = max(longest, time.monotonic() - round_began)
    rows = [summary(row, values) for row, values in sorted(found.items()) if len(values) == 2]
    for each in rows:
        print(f"{each['ratio']:.3f}  spread {each['spread']:.3f}  {each['new']:10.2f}  {each['row']}")
    slower = [each for each in rows if each["ratio"] > max(TOLERANCE, each["spread"])]
    print(f"{len(rows)} rows, {len(slower)} slower than old by more than 1.5% and the spread of equal runs")
    for each in slower:
        print(f"    {each['ratio']:.3f}  {each['row']}")
    if options.json:
        options.json.write_text(json.dumps({"commands": commands, "rows": rows}, indent=1))
    return 0


def measure(tree: Path, command: str) -> dict[str, float]:
    """The median of every row, in the unit of the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        done = subprocess.run(
            [sys.executable, "-m", "tokenloom", *command.split(), "--json", str(file)],
            cwd=tree,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )
        if not file.exists():
            print(f"{tree}: {command} ended with {done.returncode}\n{done.stdout[-2000:]}", flush=True)
            return {}
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    values = [(name_of(row), next((row[each] for each in VALUES if row.get(each)), None)) for row in rows]
    return {name: value for name, value in values if value}


def name_of(row: dict[str, Any]) -> str:
    """The row, with what its name leaves out."""
    return " ".join(str(part) for part in (row["name"], row.get("who", ""), row["setup"].get("sizes", "")) if part)


def summary(row: str, values: dict[str, list[float]]) -> dict[str, Any]:
    """New over old, by medians, and the largest ratio of two runs of one version."""
    old, new = statistics.median(values["old"]), statistics.median(values["new"])
    spread = max(max(runs) / min(runs) for runs in values.values())
    return {"row": row, "old": old, "new": new, "ratio": new / old, "spread": spread, "runs": values}


if __name__ == "__main__":
    sys.exit(main())
