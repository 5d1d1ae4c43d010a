"""Times of tokenloom beside those of other libraries, as bars, from the rows in microbench/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svg import Colours, Drawing

RESULTS = Path(__file__).resolve().parents[2] / "microbench" / "results"
OURS = "tokenloom"
NOTES = (
    "H200 of one host; hidden size 7168, top-8; tokens per GPU; the slowest rank; the shortest time is bold.",
    "Left: tokenloom on 2026-11-30, SMs as it chooses, the others on 2026-11-22; differences below 10% mean little.",
    "Right: both in one run, 2026-11-22 to 2026-11-28; the last one has hidden size 4096. LL: low latency.",
)


@dataclass(frozen=True)
class Group:
    """Bars of one operation, shortest wins.

    Args:
        times: time by library.
        form: how a time is written.
    """

    title: str
    times: dict[str, float]
    form: str = "{:,.0f} µs"


def draw(colours: Colours) -> Drawing:
    columns = moving(), computing()
    heights = [top_of(column, len(column)) for column in columns]
    below = max(heights) + 8
    picture = Drawing(830, int(below + 20 * len(NOTES) + 6), "tokenloom beside other libraries: less time is better")
    for left, heading, groups in zip((0, 424), ("Moving tokens, 4 GPUs", "Layers and steps"), columns, strict=True):
        picture.text(left, 18, heading, colours.text, size=15, bold=True)
        for at, group in enumerate(groups):
            bars(picture, left, top_of(groups, at), group, colours)
    for line, note in enumerate(NOTES):
        picture.text(0, below + 16 + 20 * line, note, colours.faint, size=12)
    return picture


def top_of(groups: tuple[Group, ...], at: int) -> float:
    """The y where group ``at`` begins; behind the last one, where the column ends."""
    return 42 + sum(34 + 19 * len(group.times) for group in groups[:at])


def bars(picture: Drawing, left: float, top: float, group: Group, colours: Colours) -> None:
    names, longest, full = left + 128, max(group.times.values()), 200
    picture.text(left, top, group.title, colours.text, size=13)
    for place, (library, time) in enumerate(group.times.items()):
        y, is_ours = top + 8 + 19 * place, library == OURS
        picture.text(names - 8, y + 12, library, colours.text if is_ours else colours.faint, size=12, anchor="end",
                     bold=is_ours)  # fmt: skip
        picture.box(names, y, full * time / longest, 15, fill=colours.ours if is_ours else colours.others, radius=2)
        best = time == min(group.times.values())
        picture.text(names + full * time / longest + 6, y + 12, group.form.format(time), colours.text, size=12,
                     bold=best)  # fmt: skip


def moving() -> tuple[Group, ...]:
    """Dispatch and combine. A row for each token and rank is layout token, rows in order of experts layout expert.

    tokenloom has the SMs that it chooses. Rows of 4,096 tokens say 0 for that. Of 128 tokens by expert it chooses 64.
    """
    rows = read("comm-nvlink-4xh200.json")["rows"]
    others = read("others-4xh200.json")["rows"]

    def group(title: str, tokens: int, operation: str, payload: str, layout: str) -> Group:
        name = f"{operation}/nvlink/ep4/t{tokens}/h7168/k8/{payload}/{layout}/graph"
        ours = one(rows, lambda row: row["name"] == name and row["num_sms"] == CHOSEN_SMS[tokens])
        shape = {"operation": OPERATIONS[operation], "layout": layout, "num_tokens": tokens}
        times = {}
        for row in others:
            if row["library"] != OURS and all(row[name] == value for name, value in shape.items()):
                taken = [row[clock] for clock in ("kernel_us", "kernels_us", "call_us") if clock in row]
                if taken and row["payload"] == PAYLOADS.get(operation, payload):
                    times[row["library"].replace(" low latency", ", LL")] = min(taken)
        form = "{:,.0f} µs" if tokens > 1000 else "{:.1f} µs"
        return Group(title, {OURS: ours["p50_us"], **dict(sorted(times.items(), key=lambda each: each[1]))}, form)

    return (
        group("Dispatch, FP8, 4,096 tokens, a row per token and rank", 4096, "dispatch", "fp8", "token"),
        group("Combine, BF16, 4,096 tokens, a row per token and rank", 4096, "combine", "bf16", "token"),
        group("Dispatch, FP8, 4,096 tokens, rows by expert", 4096, "dispatch", "fp8", "expert"),
        group("Combine, BF16, 4,096 tokens, rows by expert", 4096, "combine", "bf16", "expert"),
        group("Both, 128 tokens, rows by expert", 128, "dispatch+combine", "fp8", "expert"),
    )


CHOSEN_SMS = {4096: 0, 128: 64}
"""``num_sms`` of the rows that are drawn, by their tokens."""
OPERATIONS = {"dispatch": "dispatch", "combine": "combine", "dispatch+combine": "dispatch and combine"}
PAYLOADS = {"dispatch+combine": "fp8, bf16"}


def computing() -> tuple[Group, ...]:
    """The fused FP8 layer beside DeepGEMM's, and a training step beside torch over NCCL."""
    old = one(read("mega-deep_gemm-4xh200.json")["runs"], lambda run: run["setup"]["commit"].startswith("a8c8205"))
    new = read("mega-deep_gemm-0.2.5-h200.json")["rows"]
    steps = read("others-4xh200.json")["training"]
    rival = f"DeepGEMM {old['setup']['deep_gemm']}"

    def fused(title: str, tokens: int) -> Group:
        name = f"mega/{{}}ep4/t{tokens}/h7168/i2048/e128/k8/graph"
        times = {
            OURS: one(old["rows"], lambda row: row["name"] == name.format(""))["p50_us"],
            rival: one(old["rows"], lambda row: row["name"] == name.format("deep_gemm/"))["p50_us"],
        }
        return Group(title, times)

    def fused_alone(title: str, tokens: int) -> Group:
        times = {}
        for library in (OURS, "sgl-deep-gemm 0.2.5"):
            shape = {"library": library, "num_ranks": 1, "hidden": 7168, "intermediate": 2048, "num_tokens": tokens}
            row = one(new, lambda row, shape=shape: all(row[key] == value for key, value in shape.items()))
            times[library.replace("sgl-deep-gemm", "DeepGEMM")] = row["graph_us"]
        return Group(title, times)

    shape = {"hidden": 4096, "intermediate": 1536}
    step = {
        row["library"].partition(" all_to_all")[0].replace(" and ", " + "): row["forward_ms"] + row["backward_ms"]
        for row in steps
        if all(row[name] == value for name, value in shape.items())
    }
    return (
        fused("Fused FP8 layer, 4 GPUs, 128 tokens a GPU", 128),
        fused("Fused FP8 layer, 4 GPUs, 2,048 tokens a GPU", 2048),
        fused_alone("Fused FP8 layer, 1 GPU, 64 tokens", 64),
        fused_alone("Fused FP8 layer, 1 GPU, 512 tokens", 512),
        Group("One layer, forward and backward, 4 GPUs, 16,384 tokens a GPU", step, "{:.1f} ms"),
    )


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def one(rows: Iterable[Any], fits: Callable[[Any], bool]) -> Any:
    (row,) = [row for row in rows if fits(row)]
    return row
