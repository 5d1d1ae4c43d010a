"""A GEMM of a given length, for what runs beside the transfers of ``tokenloom bench comm --halves``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tokenloom.bench.common import timing
from tokenloom.runtime.processes import RankContext

TRIALS = 3
TRIAL_ROWS = {"cpu": 256, "cuda": 8192}
WIDTHS = {"cpu": 256, "cuda": 4096}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROW_STEP = {"cpu": 1, "cuda": 128}
"""Rows of a tile of cuBLAS: fewer take as long."""


class Gemm:
    """[rows, width] x [width, width], of as many rows as take about ``wanted_us``. Equal on all ranks; collective.

    On GPUs in bfloat16 over 4096 columns, on CPUs in float32 over 256.

    Args:
        context: the rank.
        wanted_us: microseconds that it is to take, at most as many as memory allows.

    Attributes:
        rows: what was chosen.
    """

    def __init__(self, context: RankContext, wanted_us: float) -> None:
        device, kind = context.device, context.device.type
        width, dtype, step = WIDTHS[kind], DTYPES[kind], ROW_STEP[kind]
        self._b = torch.empty(width, width, dtype=dtype, device=device).normal_()
        self._make_rows(TRIAL_ROWS[kind])
        self()
        trial_us = min(timing.one_call(context, self, queued=True) for _ in range(TRIALS))
        steps = round(wanted_us / trial_us * TRIAL_ROWS[kind] / step)
        chosen = torch.tensor(max(1, steps) * step, dtype=torch.int64, device=device)
        dist.all_reduce(chosen, dist.ReduceOp.MAX, context.group)
        self._make_rows(int(chosen))

    def _make_rows(self, rows: int) -> None:
        self.rows = rows
        self._a = torch.empty(rows, len(self._b), dtype=self._b.dtype, device=self._b.device).normal_()
        self._out = torch.empty_like(self._a)

    def __call__(self) -> None:
        torch.mm(self._a, self._b, out=self._out)
