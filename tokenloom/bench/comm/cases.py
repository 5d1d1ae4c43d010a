"""The named shapes and the operations of ``tokenloom bench comm``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tokenloom.bench.common.shape import Shape
from tokenloom.comm.routed import Layout

Payload = Literal["bf16", "fp8", "to_fp8"]


@dataclass(frozen=True)
class Case:
    """A shape with a name.

    Attributes:
        name: for ``--case``.
        shape: its sizes.
        device: the device where it is measured if no case is named; None: nowhere.
        what: where such a shape comes from.
    """

    name: str
    shape: Shape
    device: str | None
    what: str


CASES = (
    Case("decode", Shape(128, 7168, 8, 256), "cuda", "DeepSeek-V3: one token of 128 requests"),
    Case("prefill", Shape(4096, 7168, 8, 256), "cuda", "DeepSeek-V3: training, or prompts in inference"),
    Case("small", Shape(64, 256, 2, 8), None, "latency: hardly any bytes"),
    Case("medium", Shape(256, 512, 4, 16), "cpu", "some bytes"),
)


def shapes_for(names: Sequence[str], device: str, tokens: Sequence[int] = (), **sizes: int | None) -> list[Shape]:
    """Shapes to measure.

    Args:
        names: cases; none given, those meant for the device.
        device: "cpu" or "cuda".
        tokens: numbers of tokens that replace each shape's own.
        sizes: hidden, top_k, num_experts; those that are not None replace a shape's own.

    Returns:
        Each shape once, in the order of the cases.

    Raises:
        KeyError: no case has that name.
    """
    by_name = {case.name: case for case in CASES}
    picked = [by_name[name] for name in names] or [case for case in CASES if case.device == device]
    given = {name: value for name, value in sizes.items() if value is not None}
    shapes = [
        replace(case.shape, num_tokens=count, **given)
        for case in picked
        for count in tokens or [case.shape.num_tokens]
    ]
    return list(dict.fromkeys(shapes))


@dataclass(frozen=True)
class Operation:
    """What is called.

    Attributes:
        name: "dispatch"; "combine", of a dispatch made before; or "dispatch+combine", one after the other.
        payload: what is dispatched: "bf16"; "fp8", quantised before; or "to_fp8", BF16 that dispatch quantises. What
            comes home is always BF16.
        layout: the layout of the dispatch.
    """

    name: Literal["dispatch", "combine", "dispatch+combine"]
    payload: Payload
    layout: Layout

    def __str__(self) -> str:
        return f"{self.name} {self.payload} {self.layout}"


LAYOUTS: tuple[Layout, ...] = ("token", "expert", "rank", "slots")
PAYLOADS: tuple[Payload, ...] = ("bf16", "fp8", "to_fp8")

OPERATIONS = (
    *(Operation("dispatch", payload, layout) for layout in LAYOUTS for payload in PAYLOADS),
    *(Operation("combine", "bf16", layout) for layout in LAYOUTS),
    Operation("dispatch+combine", "fp8", "rank"),  # as inference decodes with kernels that group rows themselves
    Operation("dispatch+combine", "fp8", "slots"),  # and with masked grouped GEMMs, whose tokens come quantised,
    Operation("dispatch+combine", "to_fp8", "slots"),  # or are quantised on their way
    Operation("dispatch+combine", "fp8", "expert"),  # as inference prefills
    Operation("dispatch+combine", "bf16", "token"),  # as training does
)
