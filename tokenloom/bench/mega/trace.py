"""A file of one call on every rank, for Perfetto and chrome://tracing: its stages, and what the GEMMs' roles do.

Format: Chrome's "Trace Event Format", JSON object form; complete events ("X"), in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tokenloom.kernels.gemm.launch import TRACE_ROLES

STARTS = (
    "The clocks of GPUs are not compared: times of each rank count from its own first event, in front of the call; "
    "ranks meet in a collective right before that. A GEMM's roles are put so that the first begins with its stage. "
    "GEMMs that write times are a little slower, and the experts are one wave."
)
FIRST_THREAD = 1
"""Number of the first thread: to Perfetto thread 0 is the system's idle thread. Numbers are unique over all ranks."""


@dataclass(frozen=True)
class TracedCall:
    """One call on one rank.

    Attributes:
        stages: microseconds of each stage, in the order they run.
        tiles: for each stage that is a GEMM, int64 [blocks, role, tile, 2] on the CPU, from MegaMoE.trace_gemms.
    """

    stages: Mapping[str, float]
    tiles: Mapping[str, torch.Tensor] = field(default_factory=dict)


def write_trace(
    file: Path, setup: Mapping[str, Any], name: str, num_tokens: int, by_rank: Sequence[TracedCall]
) -> None:
    """Write a process for each rank, with a thread of stages and one for each role of each block of the GEMMs.

    Args:
        file: JSON.
        setup: from :func:`tokenloom.bench.common.setup.run_setup`, for the record.
        name: name of the row.
        num_tokens: tokens of every rank.
    """
    events: list[dict[str, Any]] = []
    first = FIRST_THREAD
    for rank, call in enumerate(by_rank):
        events += _events(rank, call, num_tokens, first)
        first += 1 + _blocks(call) * len(TRACE_ROLES)
    about = {"row": name, "num_tokens": num_tokens, "starts": STARTS, **setup}
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def _blocks(call: TracedCall) -> int:
    return max((len(tiles) for tiles in call.tiles.values()), default=0)


def _events(rank: int, call: TracedCall, num_tokens: int, first: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    yield _thread(rank, first, "stages")
    for block in range(_blocks(call)):
        for role, role_name in enumerate(TRACE_ROLES):
            yield _thread(rank, first + 1 + block * len(TRACE_ROLES) + role, f"block {block:3} {role_name}")
    start = 0.0
    for stage, us in call.stages.items():
        yield _complete(rank, first, stage, start, us, {"tokens": num_tokens})
        tiles = call.tiles.get(stage)
        if tiles is not None and tiles.any():
            begin = int(tiles[tiles > 0].min())
            for block, role, tile in (tiles[..., 1] > 0).nonzero().tolist():
                times = tiles[block, role, tile].tolist()
                thread = first + 1 + block * len(TRACE_ROLES) + role
                since, duration = (times[0] - begin) / 1e3, (times[1] - times[0]) / 1e3
                yield _complete(rank, thread, f"{stage} tile {tile}", start + since, duration, {})
        start += us


def _thread(rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}


def _complete(
    rank: int, thread: int, name: str, start_us: float, us: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": start_us, "dur": us, "args": arguments}
