"""The shapes and the operations that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tokenloom.comm.communicator import Layout
from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan

ROUTING_SEED = 0

Payload = Literal["bf16", "fp8", "to_fp8"]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes:
        num_tokens: T on every rank. hidden: H. top_k: K. num_experts: E.
    """

    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int

    def plan(self, num_ranks: int) -> Plan:
        """Its sizes on that many ranks.

        Raises:
            InvalidArgument: the experts cannot be spread over them, or are fewer than a token chooses.
        """
        if self.top_k > self.num_experts:
            raise InvalidArgument(
                f"top_k is {self.top_k}, but a token cannot choose more than the {self.num_experts} experts there are"
            )
        return Plan(num_ranks, self.num_experts, self.hidden, self.top_k, self.num_tokens)

    def topk_ids(self, rank: int) -> torch.Tensor:
        """int64 [T, K] of one rank: K different experts for each token, all equally likely."""
        generator = torch.Generator().manual_seed(ROUTING_SEED + rank)
        return torch.rand(self.num_tokens, self.num_experts, generator=generator).topk(self.top_k).indices

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.hidden} top-{self.top_k} of {self.num_experts}"


@dataclass(frozen=True)
class Case:
    """A shape with a name.

    Attributes:
        name: for ``--case``.
        shape: its sizes.
        device: on which it is measured if no case is named.
        what: where such a shape comes from.
    """

    name: str
    shape: Shape
    device: str
    what: str


CASES = (
    Case("decode", Shape(128, 7168, 8, 256), "cuda", "DeepSeek-V3: one token of 128 requests"),
    Case("prefill", Shape(4096, 7168, 8, 256), "cuda", "DeepSeek-V3: training, or prompts in inference"),
    Case("small", Shape(64, 256, 2, 8), "cpu", "latency: hardly any bytes"),
    Case("medium", Shape(256, 512, 4, 16), "cpu", "some bytes"),
)


def shapes_for(names: Sequence[str], device: str, tokens: Sequence[int] = (), **sizes: int | None) -> list[Shape]:
    """The shapes of the cases of these names, or of those meant for the device if there are none.

    Args:
        names: of cases.
        device: "cpu" or "cuda".
        tokens: every shape is measured with each of these instead of its own number of tokens.
        sizes: hidden, top_k, num_experts; those given replace a shape's own.

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
        name: "dispatch", "combine" (of a dispatch made before), or "dispatch+combine", one after the other.
        payload: of the dispatch: "bf16"; "fp8", quantised before; or "to_fp8", BF16 that dispatch quantises. What
            comes home is always BF16.
        layout: of the dispatch.
    """

    name: Literal["dispatch", "combine", "dispatch+combine"]
    payload: Payload
    layout: Layout

    def __str__(self) -> str:
        return f"{self.name} {self.payload} {self.layout}"


LAYOUTS: tuple[Layout, ...] = ("token", "expert", "rank")
PAYLOADS: tuple[Payload, ...] = ("bf16", "fp8", "to_fp8")

OPERATIONS = (
    *(Operation("dispatch", payload, layout) for layout in LAYOUTS for payload in PAYLOADS),
    *(Operation("combine", "bf16", layout) for layout in LAYOUTS),
    Operation("dispatch+combine", "fp8", "rank"),  # as inference decodes
    Operation("dispatch+combine", "bf16", "token"),  # as training does
)
