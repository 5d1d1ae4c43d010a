"""Shows what one SM moves of its own GPU's memory: loads, stores, copies, and sums of rows, by technique.

    python microbench/sm_path.py [--num-sms 16] [--json FILE]

Needs a Hopper GPU. Rows of 14,336 bytes lie at random places in 0.9 GB. Numbers are GB/s of one SM, the median of five
runs: bytes read and written; of sums, the bytes read.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import int32_fields, uint64_fields

ROW_BYTES, PLACES, ROWS_MOVED = 14336, 65536, 32768
MODES = {"load": 0, "store": 1, "copy": 2, "bulk load": 3, "bulk copy": 4, "sum": 5, "bulk sum": 6}
UNIT_BYTES = 512
"""What a warp moves at once: 16 bytes a lane."""


class SmPathArgs(ctypes.Structure):
    """Mirror of SmPathArgs in sm_path.cuh."""

    _fields_ = [*uint64_fields("from", "to", "never"), *int32_fields("rows", "places")]


@dataclass(frozen=True)
class Case:
    """One way to move rows.

    Attributes:
        mode: one of MODES.
        warps: of a block.
        steps: units of a piece, of which a row has a whole number.
        stages: pieces in a warp's ring.
        terms, targets: rows read for each row that is made, and places that each goes to.
    """

    mode: str
    warps: int
    steps: int
    stages: int = 1
    terms: int = 1
    targets: int = 1

    def __str__(self) -> str:
        return (
            f"{self.mode:9} {self.warps:2} warps, pieces of {self.steps * UNIT_BYTES:5} bytes, {self.stages} stages, "
            f"{self.terms} terms, {self.targets} targets"
        )

    def spec(self) -> KernelSpec:
        shape = {
            "mode": MODES[self.mode],
            "row_bytes": ROW_BYTES,
            "threads": 32 * self.warps,
            "steps": self.steps,
            "stages": self.stages,
            "terms": self.terms,
            "targets": self.targets,
        }
        has_ring = "bulk" in self.mode or self.mode == "sum"
        return KernelSpec(
            "sm_path",
            "../microbench/sm_path.cuh",
            tuple(shape.items()),
            SmPathArgs,
            threads=32 * self.warps,
            shared_bytes=self.warps * self.stages * self.steps * UNIT_BYTES if has_ring else 0,
        )

    @property
    def num_rows(self) -> int:
        """Rows to make, so that about ROWS_MOVED are moved."""
        return ROWS_MOVED // (self.terms if "sum" in self.mode else self.terms + self.targets)

    @property
    def rows_counted(self) -> int:
        """Rows that the number counts, of each row made."""
        return self.terms if "sum" in self.mode else self.terms + self.targets


def cases() -> Iterator[Case]:
    """What the notebook quotes, and around it."""
    for warps in (8, 16):
        yield Case("load", warps, 14, targets=0)
        yield Case("store", warps, 14, terms=0)
        for targets in (1, 2, 4):
            yield Case("copy", warps, 14, targets=targets)
    for warps, steps, stages in ((8, 4, 8), (16, 4, 4), (4, 14, 4), (8, 14, 2)):
        yield Case("bulk load", warps, steps, stages, targets=0)
    for targets in (1, 2, 4):
        yield Case("bulk copy", 7, 14, 4, targets=targets)
    for terms in (2, 8):
        for warps in (8, 12, 16, 20):
            yield Case("bulk sum", warps, 4, 4, terms)
            yield Case("sum", warps, 4, 4, terms)
        yield Case("sum", 12, 7, 3, terms)


def measure(case: Case, num_sms: int, rows: torch.Tensor, out: torch.Tensor) -> float:
    """GB/s of one SM."""
    kernel = Kernel(case.spec(), rows.device.index)
    setattr(kernel.args, "from", rows.data_ptr())
    kernel.args.to, kernel.args.never = out.data_ptr(), out.data_ptr()
    kernel.args.rows, kernel.args.places = case.num_rows, PLACES
    stream = torch.cuda.current_stream()
    seconds = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        kernel.launch(num_sms, stream.cuda_stream)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return case.num_rows * case.rows_counted * ROW_BYTES / statistics.median(seconds[1:]) / num_sms / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-sms", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    rows = torch.randint(0, 256, (PLACES, ROW_BYTES), dtype=torch.uint8, device=device)
    out = torch.empty_like(rows)
    found = {str(case): measure(case, arguments.num_sms, rows, out) for case in cases()}
    for name, gbytes_per_s in found.items():
        print(f"{name}: {gbytes_per_s:6.1f} GB/s of each SM")
    if arguments.json:
        setup = {"gpu": torch.cuda.get_device_name(device), "num_sms": arguments.num_sms}
        arguments.json.write_text(json.dumps({"setup": setup, "gbytes_per_s": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
