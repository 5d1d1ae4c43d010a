"""A backend from outside of the package: all that it offers is what the seam names, and it can do less than others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenloom.backends.collective import CollectiveBackend
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.backends.seam import (
    Capabilities,
    CombineKind,
    DispatchKind,
    DispatchOptions,
    DispatchOut,
    Members,
    OutputOwner,
    ResendTo,
    RoutedCounts,
    Rows,
    Tokens,
    Upcoming,
    Wait,
)
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup

NAME = "toy"
CAPABILITIES = Capabilities(
    layouts=("token", "expert"),
    dispatch_strategies=("dedup",),
    combine_strategies=("dedup",),
    dtypes=(torch.bfloat16, torch.float32),
)
Make = Callable[[Request, RankGroup], "ToyBackend"]


@dataclass(frozen=True)
class ToyHandle:
    """What the protocol Handle names, and nothing else: whoever asks for more finds nothing."""

    options: DispatchOptions
    number: int
    num_tokens: int
    num_places: int
    masked: frozenset[int]
    counts: RoutedCounts
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None
    host_counts: list[int] | None
    host_offsets: list[int] | None
    positions: Callable[[], torch.Tensor]
    row_weights: Callable[[torch.Tensor, int], torch.Tensor]
    route_gradients: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ids: Callable[[], torch.Tensor]
    use_ids: Callable[[torch.Tensor], None]
    let_go: Callable[[], None]
    row_tokens: torch.Tensor


class ToyBackend:
    """Moves tokens as "collective" does, under its own name, and notes which of its methods were called."""

    name = NAME
    capabilities = CAPABILITIES

    def __init__(self, plan: Plan, ranks: RankGroup) -> None:
        self._inner = CollectiveBackend(plan, ranks)
        self._handles: dict[int, Any] = {}
        self.called: list[str] = []

    def prepare_dispatch(self, kind: DispatchKind) -> _Sends:
        prepared = self._inner.prepare_dispatch(kind)

        def send(tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None) -> _Receives:
            self.called.append("dispatch")
            pending = prepared.send(tokens, out)

            def receive() -> tuple[ToyHandle, torch.Tensor]:
                inner, rows = pending.receive()
                self._handles[inner.number] = inner
                names = ToyHandle.__dataclass_fields__
                return ToyHandle(**{name: getattr(inner, name) for name in names}), rows

            return _Receives(receive)

        return _Sends(send)

    def prepare_combine(self, kind: CombineKind, number: int) -> _Sends:
        prepared = self._inner.prepare_combine(kind, number)

        def send(handle: ToyHandle, *given: Any) -> Any:
            self.called.append("combine")
            return prepared.send(self._handles[handle.number], *given)

        return _Sends(send)

    def ready_stream(self, waits: bool = False) -> int | None:
        return self._inner.ready_stream(waits)

    def resend(
        self,
        handle: ToyHandle,
        values: Rows,
        to: ResendTo = "places",
        strategy: str = "dedup",
        owner: OutputOwner = False,
        stream: int | None = None,
    ) -> Any:
        return self._call("resend", handle, values, to, strategy, owner)

    def send_weight_gradients(self, handle: ToyHandle, grad: torch.Tensor) -> Any:
        return self._call("send_weight_gradients", handle, grad)

    def _call(self, name: str, handle: ToyHandle, *args: Any) -> Any:
        self.called.append(name)
        return getattr(self._inner, name)(self._handles[handle.number], *args)

    def report_fault(self, fault: Exception, upcoming: Sequence[Upcoming]) -> None:
        self._inner.report_fault(fault, upcoming)

    @property
    def members(self) -> Members:
        return self._inner.members

    def check(self, wait: Wait) -> None:
        self._inner.check(wait)

    def memory(self) -> list[str]:
        return ["a toy's memory: 0 MB"]

    def close(self) -> None:
        self.called.append("close")
        self._inner.close()


@dataclass(frozen=True)
class _Sends:
    send: Callable[..., Any]
    is_stale: bool = False
    waits: bool = True


@dataclass(frozen=True)
class _Receives:
    receive: Callable[[], tuple[ToyHandle, torch.Tensor]]


def make(request: Request, ranks: RankGroup) -> ToyBackend:
    """As a registration wants it."""
    assert request.plan is not None
    return ToyBackend(request.plan, ranks)


def toy(make: Make = make, works: bool = True, **others: Any) -> Registration:
    """The one registration that a new backend needs."""
    why = "made of wood" if works else "it is broken"
    return Registration(NAME, ToyBackend.capabilities, lambda request: Availability(NAME, works, why), make, **others)
