"""A file of one call's stages on every rank, for Perfetto and chrome://tracing.

The format: "Trace Event Format" of Chrome, its JSON object form; complete events ("X"), in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

STARTS = (
    "The clocks of GPUs are not compared: times of each rank count from its own first event, in front of the call. "
    "Ranks meet in a collective right before that."
)


def write_trace(
    file: Path,
    setup: Mapping[str, Any],
    name: str,
    num_tokens: int,
    by_rank: Sequence[Mapping[str, Sequence[float]]],
) -> None:
    """The stages of one replay, the median of those measured, one after the other: a process for each rank.

    Args:
        file: that is written, JSON.
        setup: as :func:`tokenloom.bench.setup.run_setup` gives it, for the record.
        name: of the row. num_tokens: of every rank.
        by_rank: samples in microseconds of each stage, in the order they run; a sample is one replay on all ranks.
    """
    chosen = median_sample(by_rank)
    events: list[dict[str, Any]] = []
    for rank, stages in enumerate(by_rank):
        # Thread 0 would be the idle thread of the system to Perfetto, whatever the process.
        where = {"pid": rank, "tid": rank + 1}
        events.append({"ph": "M", "name": "process_name", **where, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", **where, "args": {"sort_index": rank}})
        events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": "stages"}})
        start = 0.0
        for stage, samples in stages.items():
            times = {"ts": start, "dur": samples[chosen]}
            events.append({"ph": "X", "name": stage, "cat": name, **where, **times, "args": {"tokens": num_tokens}})
            start += samples[chosen]
    about = {"row": name, "num_tokens": num_tokens, "starts": STARTS, **setup}
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
    file.write_text(json.dumps(content, indent=1) + "\n")


def median_sample(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> int:
    """Which replay is the median, by all stages of its slowest rank."""
    totals = np.max([np.sum(list(stages.values()), axis=0) for stages in by_rank], axis=0)
    return int(np.argsort(totals, kind="stable")[(len(totals) - 1) // 2])
