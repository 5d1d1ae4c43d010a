"""The result of a dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from tokenloom.backends.seam import DispatchKind, DispatchOut, Handle
from tokenloom.comm.placed_slots import PlacedBatch
from tokenloom.errors import InvalidArgument
from tokenloom.ops import routing
from tokenloom.plan import ROUTE_LAYOUTS, Plan

Layout = Literal["token", "expert", "rank", "slots"]


class NoRows(NamedTuple):
    """Shape and dtype of rows that somebody else holds."""

    shape: torch.Size
    dtype: torch.dtype


def alike_in(plan: Plan, kind: DispatchKind, shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Attributes that the results of all dispatches of a kind have alike.

    Args:
        plan: whose experts are slots.
        shape: of the tokens that each of them brings; None: sizes are exact, and it differs.
    """
    found = {
        "layout": kind.options.layout,
        "_plan": plan,
        "_weighted": kind.weights_dtype is not None,
        "_ids_dtype": kind.ids_dtype,
        "_scale_words": kind.scale_words,
    }
    return found if shape is None else found | {"_shape": shape}


class Routed:
    """Rows that a dispatch brought to this rank, with their counts. Tensors are made when they are first read.

    L is experts per rank, M ``max_tokens_per_rank``, S ``capacity`` of layout "slots", W the number of ranks.
    With a placement L is slots per rank, and a local expert is a local slot, whose expert ``slot_experts`` tells.

    Attributes:
        layout: "token", "expert", "rank" or "slots".
    """

    holds_tensors = True
    """For :func:`tokenloom.runtime.streams.tensors_in`."""

    layout: Layout
    _owner: Any
    _plan: Plan
    _handle: Handle
    _rows: torch.Tensor | NoRows
    _graph_weights: torch.Tensor | None = None
    _weighted: bool
    _ids_dtype: torch.dtype
    _out: DispatchOut | None = None
    _late_weights: torch.Tensor | None = None
    _scale_words: int | None = None
    _batch: PlacedBatch | None = None
    _gradient_order: Any = None

    def __init__(
        self,
        alike: Mapping[str, Any],
        owner: object,
        handle: Handle,
        rows: torch.Tensor | NoRows,
        weights: torch.Tensor | None = None,
        out: DispatchOut | None = None,
    ) -> None:
        """Made by a communicator.

        Args:
            alike: attributes that all dispatches of the kind have alike, see :func:`alike_in`.
            owner: the communicator.
            rows: [places, H], or ``out.tokens``.
            weights: received weights with a graph, or None: the handle's, if there are any.
            out: tensors of the caller's own, which hold the results.
        """
        values = self.__dict__
        values.update(alike)
        values["_owner"], values["_handle"], values["_rows"] = owner, handle, rows
        if weights is not None:
            values["_graph_weights"] = weights
        if out is not None:
            values["_out"] = out

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"what a dispatch brought is not to be changed: {name}")

    def __repr__(self) -> str:
        return f"Routed(layout={self.layout!r}, tokens={list(self._shape)} {self._rows.dtype})"

    @cached_property
    def tokens(self) -> torch.Tensor:
        """[rows, H] (layout "rank": [W, M, H], layout "slots": [L, S, H]); dtype of x, or float8_e4m3fn with
        ``to_fp8``."""
        if self._out is None or self._out.tokens is None:
            rows = self._rows
            if isinstance(rows, NoRows):
                rows = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
            return self._by_place(rows)
        return self._out.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """Of ``tokens``."""
        return self._shape

    @cached_property
    def scales(self) -> torch.Tensor | None:
        """float32 [rows, H / 128] of FP8 tokens ([W, M, H / 128], [L, S, H / 128]), else None. Layout "slots": as
        ``scale_layout`` says. int32 [rows, n] where packed scales were given. By recipe "row" float32 [rows] ([W, M],
        [L, S])."""
        if self._out is not None and self._out.scales is not None:
            return self._out.scales
        scales = self._handle.scales
        if scales is not None and self._scale_words is not None:
            scales = scales.view(torch.int32)[..., : self._scale_words].contiguous()
        if scales is None:
            return None
        found = scales if self.layout == "slots" else self._by_place(scales)
        return found.squeeze(-1) if self._handle.options.recipe == "row" else found

    @cached_property
    def topk_ids(self) -> torch.Tensor | None:
        """[rows, K] ([W, M, K]) local expert of each route or -1, dtype of the ids given.

        None for layouts "expert" and "slots". int64 ids are converted when they are first read, since most callers
        never do.
        """
        if self.layout in ROUTE_LAYOUTS:
            return None
        if self._out is not None and self._out.topk_ids is not None:
            return self._out.topk_ids
        return self._by_place(self._handle.topk_ids.to(self._ids_dtype))

    @cached_property
    def topk_weights(self) -> torch.Tensor | None:
        """[rows, K] ([W, M, K]) weight of each route, 0 where the id is -1; None for layouts "expert" and "slots", or
        without weights."""
        if self._out is not None and self._out.topk_weights is not None and self._late_weights is None:
            return self._out.topk_weights
        weights = None if self.layout in ROUTE_LAYOUTS else self._received_weights
        return None if weights is None else self._by_place(weights)

    @cached_property
    def expert_offsets(self) -> torch.Tensor | None:
        """int32 [L + 1] padded starts of the experts' groups (layout "expert", else None), as
        ``grouped_mm(offs=routed.expert_offsets[1:])`` takes them."""
        return self._counted("expert_offsets")

    @cached_property
    def expert_counts(self) -> torch.Tensor:
        """int32 [L], routes of each local expert, padding not counted."""
        return self._counted("expert_counts")

    @cached_property
    def slot_experts(self) -> torch.Tensor:
        """int32 [L], the expert that each slot of this rank held at the dispatch, -1 for none. Not to be changed.

        Without a placement they are those of this rank, ascending. Of a captured dispatch they follow the placement.
        Where batches are balanced, they are those of this batch.
        """
        if self._batch is not None:
            return self._batch.slot_experts
        first, local = self._owner.rank * self._plan.experts_per_rank, self._plan.experts_per_rank
        return torch.arange(first, first + local, dtype=torch.int32, device=self._owner.device)

    @cached_property
    def slot_ranges(self) -> torch.Tensor | None:
        """int32 [L, W, 2], first place and number of places of each source rank among those of each local expert
        (layout "slots", else None)."""
        return self._counted("slot_ranges")

    @cached_property
    def source_counts(self) -> torch.Tensor:
        """int32 [W], (token, rank) rows from each source rank."""
        return self._counted("source_counts")

    @cached_property
    def num_rows(self) -> int | torch.Tensor:
        """Rows in use: int for exact sizes, int32 scalar on the device for bounded sizes."""
        return self._counted("num_rows")

    @cached_property
    def source_tokens(self) -> torch.Tensor:
        """int32 [rows] ([L, S]) which token of its home rank each row is, -1 where no row lies; layouts "expert" and
        "slots".

        Raises:
            InvalidArgument: another layout.
        """
        if self.layout not in ROUTE_LAYOUTS:
            raise InvalidArgument(f"source_tokens is for layouts with a row for each route, not {self.layout!r}")
        positions, tokens = self._handle.positions(), self._handle.row_tokens
        positions = positions[: len(tokens)]
        tokens = tokens[: len(positions), None].expand(positions.shape)
        return routing.row_values(tokens + 1, positions, self._handle.num_places).view(self._shape[:-1]) - 1

    def ids_at_home(self) -> torch.Tensor:
        """[T, K]: the ids that were dispatched, or those that took their place; with a placement, slots."""
        return self._handle.ids()

    @property
    def batch(self) -> PlacedBatch | None:
        """Where the dispatch went, for layers; None without a placement."""
        return self._batch

    def keep_batch(self, batch: PlacedBatch) -> None:
        """Remember where the dispatch went, for ``slot_experts``."""
        self.__dict__["_batch"] = batch

    def replace_ids(self, topk_ids: torch.Tensor) -> None:
        """Let later calls of this dispatch read equal ids elsewhere, so that those that were given may be changed.

        With a placement nothing reads those that were given.

        Args:
            topk_ids: of the same shape, dtype, values and device as those that were dispatched; contiguous.
        """
        if self._batch is None:
            self._handle.use_ids(topk_ids)

    def let_go(self) -> None:
        """Forget rows and scales, which somebody else holds: what is left serves ``combine``, and knows their shape.

        Otherwise holding the result holds the rows in memory. ``tokens`` has no values afterwards (device "meta").
        """
        values, rows = self.__dict__, self._rows
        _ = self._shape
        values["_rows"] = NoRows(rows.shape, rows.dtype)
        for name in ("tokens", "scales"):
            values.pop(name, None)
        self._handle.let_go()

    def counts_on_host(self) -> list[int]:
        """``expert_counts`` as ints. With exact sizes the host knows them; otherwise it waits for them here."""
        known = self._handle.host_counts
        return self.expert_counts.tolist() if known is None else list(known)

    def unused_ids_marked(self) -> torch.Tensor | None:
        """``topk_ids`` with -1 also in the rows beyond ``num_rows`` that bounded sizes leave unspecified."""
        ids = self.topk_ids
        if ids is None or self.layout != "token" or isinstance(self.num_rows, int):
            return ids
        used = torch.arange(len(ids), device=ids.device) < self.num_rows
        return torch.where(used[:, None], ids, -1)

    def _with_weights(self, weights: torch.Tensor) -> Routed:
        """The same with other weights, as the handle has them: [places, K], or [R, K] where a row is a route."""
        names = ("layout", "_plan", "_ids_dtype", "_scale_words", "_shape")
        alike = {"_weighted": True, **{name: getattr(self, name) for name in names}}
        made = Routed(alike, self._owner, self._handle, self._rows, None, self._out)
        made.__dict__["_late_weights"] = weights
        made.__dict__["_gradient_order"] = self._gradient_order
        if self._batch is not None:
            made.keep_batch(self._batch)
        return made

    # -- for combine ----------------------------------------------------------------------------------------

    @cached_property
    def _weights(self) -> torch.Tensor | None:
        """Received weights [R, K] of layouts with a row for each route."""
        return self._received_weights if self.layout in ROUTE_LAYOUTS else None

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        """Of ``tokens``."""
        if self._out is not None and self._out.tokens is not None:
            return tuple(self._out.tokens.shape)
        plan, (places, hidden) = self._plan, self._rows.shape
        if self.layout == "rank":
            return plan.num_ranks, plan.max_tokens_per_rank, hidden
        if self.layout == "slots":
            return plan.experts_per_rank, places // plan.experts_per_rank, hidden
        return places, hidden

    @property
    def _received_weights(self) -> torch.Tensor | None:
        if self._late_weights is not None:
            return self._late_weights
        return self._handle.topk_weights if self._graph_weights is None else self._graph_weights

    def _by_place(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.layout in ("token", "expert"):
            return tensor
        return tensor.view(*self._shape[:-1], tensor.shape[-1])

    def _counted(self, name: str) -> Any:
        own = None if self._out is None else getattr(self._out, name)
        return getattr(self._handle.counts, name) if own is None else own
