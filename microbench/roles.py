"""Shows what one SM of each role does: calls of which a given number of blocks send, with times of their phases.

    python microbench/roles.py --case dispatch/bf16/expert:24:6 --case combine/bf16/token:16:8 \\
        [--variant "PUSH_STAGES=3"] [--tokens 4096] [--top-k 8] [--json FILE]

A case is operation/payload/layout, SMs, and how many of their blocks send; without the last, as many as the library
finds best. Variants are constants of a launch, as constants.py takes them; every case is measured with each. Needs
Hopper GPUs and uses all of them, one rank each. On one, nothing travels, but rows by expert are pushed and quantised.

Numbers are microseconds: of a call in a graph of ten, the median of the slowest rank; and when blocks of rank 0 pass
phases in a call alone, as phases.py has them. The time from "heard" to "sent" is that of the blocks that send.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from constants import Variant, constants, parse_variant
from phases import new_communicator, phases

from tokenloom.bench.clock import Clock
from tokenloom.bench.workload import CallSizes, Inputs, expert_outputs, make_inputs
from tokenloom.kernels.common import SharesWork
from tokenloom.runtime.processes import RankContext, RankPool

REPLAYS = 6
SHOWN = ("heard", "sent", "filled", "summed", "done")
"""Phases of the table: the earliest, the median and the latest block."""


@dataclass(frozen=True)
class Case:
    """One line of the command: an operation, its SMs, and how many of their blocks send."""

    operation: str
    num_sms: int
    sending: int | None

    @classmethod
    def parse(cls, text: str) -> Case:
        operation, sms, *sending = text.split(":")
        return cls(operation, int(sms), int(sending[0]) if sending else None)

    def __str__(self) -> str:
        return f"{self.operation}:{self.num_sms}" + ("" if self.sending is None else f":{self.sending}")


@contextmanager
def blocks_send(sending: int | None) -> Iterator[None]:
    """So many blocks of calls that are prepared in this block send rows."""
    if sending is None:
        yield
        return
    with mock.patch.object(SharesWork, "sending_blocks", return_value=sending):
        yield


@torch.no_grad()
def measure(
    context: RankContext, shape: CallSizes, cases: Sequence[Case], variants: Sequence[Variant]
) -> list[dict[str, Any]]:
    """Times and phases of all cases with all variants on this rank. Collective."""
    given, found = make_inputs(context, shape), []
    for variant in variants:
        for case in cases:
            with constants(variant), blocks_send(case.sending):
                found.append({"case": str(case), "variant": variant} | measure_case(context, shape, given, case))
    return found


def measure_case(context: RankContext, shape: CallSizes, given: Inputs, case: Case) -> dict[str, Any]:
    plan, (kind, payload, layout) = shape.plan(context.num_ranks), case.operation.split("/")
    options: dict[str, Any] = {"layout": layout, "sizes": "bounded", "to_fp8": payload == "to_fp8"}
    if layout == "expert":
        options["capacity"] = given.expert_rows
    x, clock = given.fp8 if payload == "fp8" else given.x, Clock(context, cold=False)
    assert x is not None
    with new_communicator(context, plan, case.num_sms) as comm:

        def dispatch(copy: bool = False) -> Any:
            return comm.dispatch(x, given.ids, given.weights, copy=copy, **options)

        routed = dispatch(copy=True)
        y = expert_outputs(routed.tokens) if kind == "combine" else None
        call = dispatch if y is None else lambda: comm.combine(y, routed)
        call()
        of_phases = phases(context, call, comm.engine._backend._launcher)  # type: ignore[attr-defined]
        graph = clock.capture(call)
        us = statistics.median(clock.replay_us(graph) for _ in range(REPLAYS))
        comm.check()
    return {"us": us, "phases": of_phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, type=Case.parse, help="repeatable")
    parser.add_argument("--variant", action="append", default=[], type=parse_variant, help="repeatable")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("roles.py needs Hopper GPUs; there is none")
    shape = CallSizes(num_tokens=options.tokens, hidden=7168, num_experts=256, top_k=options.top_k)
    variants = [{}, *options.variant]
    with RankPool(torch.cuda.device_count(), "cuda") as pool:
        by_rank = pool.run(measure, shape, options.case, variants, limit_s=300)
    rows = [row | {"us": max(each[index]["us"] for each in by_rank)} for index, row in enumerate(by_rank[0])]
    for row in rows:
        marks = [
            f"{name} {'/'.join(f'{value:.0f}' for value in row['phases'][name])}"
            for name in SHOWN
            if name in row["phases"]
        ]
        with_constants = " ".join(f"{name}={value}" for name, value in row["variant"].items())
        print(f"{row['case']:32} {with_constants:28} {row['us']:8.1f}  {'  '.join(marks)}", flush=True)
    if options.json:
        about = {"num_ranks": len(by_rank), "tokens": options.tokens, "top_k": options.top_k}
        lines = ",\n".join(json.dumps(row) for row in rows)  # a line each
        options.json.write_text(f'{{"setup": {json.dumps(about)}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
