"""A file of one call on every rank, for Perfetto and chrome://tracing: what the blocks and roles of its kernels do.

Format: Chrome's "Trace Event Format", JSON object form; complete events ("X"), in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tokenloom.inference.trace import MegaTimes
from tokenloom.kernels.common import MARKS
from tokenloom.kernels.gemm.launch import TRACE_ROLES

STARTS = (
    "The clocks of GPUs are not compared: times of each rank count from its own first block; ranks meet in a "
    "collective right before that. GEMMs that write times are a little slower."
)
UNTIL = {
    "send": {
        "counted": "count routes",
        "filled": "pack own tokens",
        "heard": "wait for all ranks' counts",
        "placed": "order routes",
        "sent": "send rows",
    },
    "barrier": {"sent": "tell all ranks", "heard": "wait for all ranks"},
}
"""Work of a block until it passes a mark, in kernels that open a call."""


class Span(NamedTuple):
    """Something that one thread of the chart does: from one time to another, in nanoseconds."""

    thread: str
    name: str
    begin: int
    end: int


def write_trace(
    file: Path, setup: Mapping[str, Any], name: str, num_tokens: int, by_rank: Sequence[MegaTimes]
) -> None:
    """Write a process for each rank, with a thread for each kernel, each block, and each role of each block of GEMMs.

    Args:
        by_rank: times of one call, on the CPU.
    """
    events: list[dict[str, Any]] = []
    threads = 0  # thread 0 is the system's idle thread to Perfetto, and numbers are unique over all ranks
    for rank, times in enumerate(by_rank):
        events += [
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
        ]
        spans = list(spans_of(times))
        first = min((span.begin for span in spans), default=0)
        numbers = {name: threads + 1 + i for i, name in enumerate(dict.fromkeys(span.thread for span in spans))}
        threads += len(numbers)
        for thread, number in numbers.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": thread}})
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}
            )
        for span in spans:
            since, duration = (span.begin - first) / 1e3, (span.end - span.begin) / 1e3
            number = numbers[span.thread]
            events.append({"ph": "X", "name": span.name, "pid": rank, "tid": number, "ts": since, "dur": duration})
    about = {"row": name, "num_tokens": num_tokens, "starts": STARTS, **setup}
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def spans_of(times: MegaTimes) -> Iterator[Span]:
    """Give all that has begun and ended: kernels as wholes, then their blocks and roles."""
    parts = {
        "pack": list(_blocks("pack", times.pack)),
        "send": list(_marked("send", times.send)),
        "GEMM1": list(_tiles("GEMM1", times.gemm1)),
        "GEMM2": list(_tiles("GEMM2", times.gemm2)),
        "barrier": list(_marked("barrier", times.barrier)),
        "sum": list(_blocks("sum", times.sum)),
    }
    for kernel, spans in parts.items():
        if spans:
            yield Span(f"kernel {kernel}", kernel, min(s.begin for s in spans), max(s.end for s in spans))
    for spans in parts.values():
        yield from sorted(spans, key=lambda span: (span.thread, span.begin))


def _blocks(kernel: str, times: torch.Tensor) -> Iterator[Span]:
    for block, (begin, end) in enumerate(times.tolist()):
        if begin and end:
            yield Span(f"{kernel}, block {block:3}", kernel, begin, end)


def _marked(kernel: str, times: torch.Tensor) -> Iterator[Span]:
    for block, marks in enumerate(times.tolist()):
        begin = marks[MARKS.index("begun")]
        for mark, doing in UNTIL[kernel].items():
            end = marks[MARKS.index(mark)]
            if begin and end:
                yield Span(f"{kernel}, block {block:3}", doing, begin, end)
                begin = end


def _tiles(kernel: str, times: torch.Tensor) -> Iterator[Span]:
    for block, role, tile in (times[..., 1] > 0).nonzero().tolist():
        begin, end = times[block, role, tile].tolist()
        name = TRACE_ROLES[role]
        yield Span(f"{kernel}, block {block:3}, {name}", name if name == "start" else f"tile {tile}", begin, end)
