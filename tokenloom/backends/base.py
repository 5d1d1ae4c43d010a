"""What a backend is: the calls that communicator.py and autograd.py make, and the plain data they pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

NUM_REGIONS = 2
"""Where a backend receives rows, by turns: views of one last until the second next dispatch."""


@dataclass(frozen=True)
class DispatchCall:
    """The options of one dispatch, the same on all ranks.

    Attributes:
        layout: "token", "expert" or "rank".
        alignment: rows that each expert's group is padded to (layout "expert", else 1).
        sizes: "exact" or "bounded".
        capacity: most rows of the output; None is no limit (exact sizes, or layout "rank").
        to_fp8: the backend quantises x, as quantize_fp8 does, before or while it sends it: rows are float8_e4m3fn,
            and the handle has scales.
        power_of_two_scales: how it does so (False without ``to_fp8``).
        strategy: what carries the payload, see :class:`tokenloom.strategy.Strategy`.
    """

    layout: str
    alignment: int
    sizes: str
    capacity: int | None
    to_fp8: bool = False
    power_of_two_scales: bool = False
    strategy: str = "dedup"


@dataclass(frozen=True)
class DispatchInput:
    """The checked tensors of one dispatch on this rank.

    Attributes:
        x: [T, H]; with ``DispatchCall.to_fp8`` not quantised yet.
        scales: float32 [T, H / 128] of an FP8 x, else None.
        topk_ids: int32 or int64 [T, K].
        topk_weights: float32 (float64 beside float64 payloads) [T, K], or None.
        x_needs_grad, weights_need_grad: whether autograd will want a gradient.
        own_outputs: outputs must be ordinary tensors, not views of the backend's buffers. "but rows": all that the
            handle keeps must be, for somebody uses the rows, and is done with them, before the second next dispatch.
        ahead: a dispatch of exact sizes need not first raise what earlier calls left.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    x_needs_grad: bool
    weights_need_grad: bool
    own_outputs: bool | Literal["but rows"]
    ahead: bool = False


@dataclass(frozen=True)
class CombineCall:
    """The options of one combine, the same on all ranks.

    Attributes:
        mode: "per_rank" (a partial sum per rank) or "per_route" (one row per route comes home).
        weighted: whether rows are multiplied by their weights (layout "expert" only).
        wire_dtype: dtype of what travels.
        out_dtype: dtype of the result.
        needs_grad: whether autograd will want a gradient.
        strategy: what carries the payload, see :class:`tokenloom.strategy.Strategy`.
    """

    mode: str
    weighted: bool
    wire_dtype: torch.dtype
    out_dtype: torch.dtype
    needs_grad: bool
    strategy: str = "dedup"


@dataclass(frozen=True)
class Onward:
    """A dispatch in layout "expert" and its combine, by ranks that do not wait in between.

    Attributes:
        dispatch: the strategy of one.
        combine: the other.
    """

    dispatch: str
    combine: CombineCall


@dataclass(frozen=True)
class RoutedCounts:
    """Sizes of a dispatch on this rank, safe to address the output with (clamped to the capacity).

    Attributes:
        num_rows: int (exact sizes) or int32 scalar on the device (bounded sizes).
        source_counts: int32 [W], (token, rank) rows from each source rank.
        expert_counts: int32 [L], routes of each local expert, without padding.
        expert_offsets: int32 [L + 1], padded starts of the groups (layout "expert"), else None.
    """

    num_rows: int | torch.Tensor
    source_counts: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor | None


class Handle(Protocol):
    """What a backend remembers of a dispatch so that combine, and both gradients, can be done later."""

    call: DispatchCall
    number: int
    num_tokens: int
    counts: RoutedCounts
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None

    @property
    def host_offsets(self) -> list[int] | None:
        """``counts.expert_offsets`` where the host knows them."""


class Backend(Protocol):
    """One way to move tokens. All methods are collective: every rank calls them, in the same order.

    ``rows`` below is [places, H]: the output of a dispatch in its layout, with layout "rank" flattened to
    [W * M, H]. Received rows are one per (token, rank), in the order (source rank, token).
    """

    name: str
    checked: bool
    """Whether the host reads ids, and the outcome of every call, before it returns."""

    def check_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> None:
        """Raise for what this backend cannot do, beyond what checks.py refuses. Not collective."""

    def check_combine(self, handle: Any, y: torch.Tensor, call: CombineCall) -> None:
        """Raise for what this backend cannot do, beyond what checks.py refuses. Not collective."""

    def report_fault(self, call: str, fault: Exception, then: Onward | None = None) -> None:
        """Tell the other ranks, which are opening a call too, that this one failed here; theirs raise PeerError.

        Args:
            then: how ranks that need not wait for the outcome of this call go on: they open one more, and raise later.
        """

    def settle(self) -> None:
        """Wait for the outcomes of all calls so far, and raise what they found, on all ranks alike."""

    def open_dispatch(self, call: DispatchCall, tensors: DispatchInput) -> Callable[[], Any]:
        """Begin to exchange counts and metadata. What it returns, called once before any other call is opened, waits
        for what the host has to know of them and gives a Handle."""

    def open_combine(self, handle: Any, call: CombineCall) -> None:
        """Make sure that all ranks call the same combine."""

    def dispatch(self, handle: Any, x: torch.Tensor) -> torch.Tensor:
        """Send the x that ``open_dispatch`` was given, [T, H] -> rows; places that hold no row are zero.

        Follows its Handle at once. With ``DispatchCall.to_fp8`` rows are the quantised x.
        """

    def combine(
        self,
        handle: Any,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        call: CombineCall,
        out: torch.Tensor | None = None,
        alone: bool = False,
    ) -> torch.Tensor:
        """Rows and received weights [R, K] -> [T, H], into ``out`` if given.

        ``alone``: nothing is computed meanwhile, so that it may take more of the GPU.
        """

    def combine_backward(
        self,
        handle: Any,
        grad: torch.Tensor,
        rows: torch.Tensor | None,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
        strategy: str = "dedup",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradient [T, H] -> (gradient of the rows, gradient of the received weights [R, K] if ``rows`` is given).

        ``strategy``: a dispatch's, which carries it.
        """

    def dispatch_again(self, handle: Any, x: torch.Tensor, strategy: str = "dedup") -> torch.Tensor:
        """Other values [T, H] of the same tokens, or their gradients, to the places of their rows: [places, H].

        They may be a view, to be used before the second next dispatch. ``strategy``: a dispatch's, which carries them.
        """

    def row_weights(self, handle: Any, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        """Weights [R, K] of received routes -> [num_places] of their rows (layout "expert"); 0 where no row lies."""

    def route_gradients(self, handle: Any, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The gradient of that: [num_places] -> [R, K] like the received weights."""

    def return_weights(self, handle: Any, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of ``handle.topk_weights`` -> [T, K] at home."""

    def memory(self) -> list[str]:
        """Lines for people: each buffer of its own, how large it is, and whether it is there yet."""

    def check(self, wait: bool) -> None:
        """Raise what earlier calls left behind (CapacityOverflow, PeerTimeout, ...), once, on all ranks alike.

        Args:
            wait: first wait until all calls are done; else raise what is known without waiting for recent ones.
        """

    def close(self) -> None:
        """Release what the backend holds. Calling it twice is fine."""
