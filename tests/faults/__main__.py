"""Run many programs that fail or end, each drawn by a number, and list those that end otherwise than promised.

python -m tests.faults endings --runs 500 --busy 4
python -m tests.faults endings --only 17
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import Any

from tests.faults import endings, random_faults
from tests.faults.busy import busy_loops
from tests.faults.programs import Programs

KINDS: dict[str, tuple[Any, Any]] = {
    "endings": (endings.Ending.drawn, endings.faults),
    "random": (random_faults.Fault.drawn, random_faults.faults),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--only", type=int, help="run the program of this number alone, and show what it prints")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside")
    parser.add_argument("--beside", type=int, default=2, help="programs at the same time")
    options = parser.parse_args()
    drawn, faults = KINDS[options.kind]
    seeds = list(range(options.seed, options.seed + options.runs)) if options.only is None else [options.only]
    ended_badly: dict[int, bool] = {}
    began, lock = time.monotonic(), threading.Lock()

    def run_all() -> None:
        with Programs() as programs:
            while True:
                with lock:
                    if not seeds:
                        return
                    seed = seeds.pop(0)
                one = drawn(seed)
                found, ended = faults(one, programs)
                ended_badly[seed] = bool(found)
                with lock:
                    for fault in found:
                        print(f"{seed}: {fault}; {one}", flush=True)
                    if found or options.only is not None:
                        for rank, text in enumerate(ended.output):
                            print(
                                f"--- {seed}, rank {rank}: {ended.codes[rank]}, {ended.said[rank]}\n{text}", flush=True
                            )

    with busy_loops(options.busy):
        threads = [threading.Thread(target=run_all) for _ in range(options.beside)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    bad = sorted(seed for seed, badly in ended_badly.items() if badly)
    print(f"{len(bad)} of {len(ended_badly)} programs ended badly, in {time.monotonic() - began:.0f} s: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
