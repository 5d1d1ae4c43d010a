"""A dispatch as its rank remembers it. Tensors of it are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from tokenloom.backends.nvlink import places
from tokenloom.backends.nvlink.beside_rows import OwnRows
from tokenloom.backends.nvlink.buffers import ReceiveBuffer, aligned, version_of
from tokenloom.backends.nvlink.results import CountsInWords, Results
from tokenloom.backends.seam import DispatchOptions, DispatchOut, RoutedCounts
from tokenloom.errors import InvalidArgument
from tokenloom.ops.routing import Placement

BY_ROW = ("weights", "local_ids", "row_places", "row_tokens")
"""Tensors of a handle with a value for each received row."""


class NvlinkHandle:
    """A dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes:
        options, number, num_tokens, num_places, counts, scales: as of every handle.
        capacity: places that a row may have; routes beyond it were dropped.
        given_ids: topk_ids as given, which routes gradients the same way.
        memory: int32, where the kernel leaves its words, from ``first_word`` on. words_address: of that one.
        results: what lies where in the words.
        buffer: where rows were received, with what came with them, or a copy of that. None: in the words, and in the
            caller's tensors.
        given: the caller's tensors that the kernel has written to, if any.
        lent: rows and scales as a caller will hold them, at their full size, while the host does not know how many.
        reused_after: number of the dispatch after which ``buffer`` is overwritten; None for own tensors.
        ids_version: how often ids had been changed in place by then; None where torch does not count.
        masked: ranks that took no part.
        host_counts: expert_counts on the host, with exact sizes. host_offsets: expert_offsets, in layout "expert".
        num_received: R, where the host knows it.
        by_token: rows came one per (token, rank) and were spread here, on all ranks alike.
        slots: int32 [T * W (+ T * K)]: which of the rows to rank r each token is, or -1.
        all_counts: int32 [W, W + E]: rows per rank and routes per expert of every source.
        local_ids, row_places: int32 [>= R, K]: local expert, and place, of each route of a received row.
        weights: float32 [>= R, K] received weights, or None.
        row_tokens: int32 [>= R]: the token at home that a received row is (all layouts but "rank").
    """

    holds_tensors = True
    """For :func:`tokenloom.runtime.streams.tensors_in`."""

    num_received: int | None = None
    host_counts: list[int] | None = None
    host_offsets: list[int] | None = None
    by_token = False
    masked: frozenset[int] = frozenset()
    given: DispatchOut | None = None
    lent: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __init__(
        self,
        options: DispatchOptions,
        number: int,
        num_tokens: int,
        num_places: int,
        given_ids: torch.Tensor,
        memory: tuple[torch.Tensor, int, int],
        results: Results,
        buffer: ReceiveBuffer | None,
        reused_after: int | None,
    ) -> None:
        """Made by a dispatch.

        Args:
            memory: what :meth:`ResultsMemory.take` gave for its words.
        """
        self.options, self.number, self.num_tokens = options, number, num_tokens
        self.num_places = self.capacity = num_places
        self.given_ids, self.ids_version = given_ids, None if given_ids.is_inference() else given_ids._version
        self.memory, self.first_word, self.words_address = memory
        self.results, self.reused_after = results, reused_after
        self.buffer: ReceiveBuffer | OwnRows | None = buffer

    # -- what the kernel has left ---------------------------------------------------------------------------

    @cached_property
    def counts(self) -> RoutedCounts:
        return CountsInWords(self.results, self.memory, self.first_word, self.given)

    @cached_property
    def scales(self) -> torch.Tensor | None:
        if not self.results.with_scales:
            return None
        if self.buffer is None:
            found = self.results.scales(self._part("scales"))
            return found if self.options.layout == "slots" else found[: self.num_places]
        return self.buffer.scales[: self.num_places]

    @cached_property
    def slots(self) -> torch.Tensor:
        first = self.first_word
        return self.memory[first + self.results.starts["slots"] : first + self.results.words(self.num_tokens)]

    @cached_property
    def all_counts(self) -> torch.Tensor:
        return self._part("all_counts").view(self.results.plan.num_ranks, -1)

    @cached_property
    def local_ids(self) -> torch.Tensor:
        return self._by_row("local_ids")

    @cached_property
    def row_places(self) -> torch.Tensor:
        return self._by_row("row_places")

    @cached_property
    def weights(self) -> torch.Tensor | None:
        if not self.results.with_weights:
            return None
        return self._by_row("weights")

    @cached_property
    def row_tokens(self) -> torch.Tensor:
        return self._by_row("row_tokens")

    @cached_property
    def pointers(self) -> tuple[int, int, int, int]:
        """For kernels: addresses of row_places, row_tokens, slots and all_counts."""
        return (
            self.row_places.data_ptr(),
            self.row_tokens.data_ptr(),
            self.address("slots"),
            self.address("all_counts"),
        )

    @property
    def weights_address(self) -> int:
        """For kernels: of the received weights."""
        made = self.__dict__.get("weights")  # the caller's own, say
        if made is not None:
            return made.data_ptr()
        return self.address("weights") if self.buffer is None else self.buffer.weights_address

    def address(self, name: str) -> int:
        """For kernels: of a part of the words."""
        return self.words_address + self.results.at[name]

    def _part(self, name: str) -> torch.Tensor:
        return self.results.part(self.memory, self.first_word, name)

    def _by_row(self, name: str) -> torch.Tensor:
        """One of BY_ROW, of the rows that there are."""
        num_rows = self.num_received
        if self.buffer is not None:
            return self.buffer.part(name, num_rows)
        found = self._part(name)
        if name == "weights":
            found = found.view(torch.float32)
        if name != "row_tokens":
            found = found.view(-1, self.results.plan.top_k)
        return found if num_rows is None else found[:num_rows]

    # -- what follows from it -------------------------------------------------------------------------------

    @property
    def by_route(self) -> bool:
        """Whether each route has a place of its own."""
        return self.options.layout in ("expert", "slots")

    @property
    def topk_ids(self) -> torch.Tensor:
        ids = self.local_ids
        return ids if self.by_route or self.num_received == self.num_places else ids[: self.num_places]

    @property
    def topk_weights(self) -> torch.Tensor | None:
        weights = self.weights
        if weights is None or self.by_route or self.num_received == self.num_places:
            return weights
        return weights[: self.num_places]

    def let_go(self) -> None:
        """Forget the scales."""
        self.scales = None

    def use_ids(self, ids: torch.Tensor) -> None:
        """Read these equal ids from now on."""
        self.given_ids = aligned(ids)
        self.ids_version = version_of(self.given_ids)

    def ids(self) -> torch.Tensor:
        """The ids that were given.

        Raises:
            InvalidArgument: they were changed in place since, so routes would go elsewhere than their rows did.
        """
        if version_of(self.given_ids) != self.ids_version:
            raise InvalidArgument(
                "topk_ids was changed in place after its dispatch, whose routes are still needed; dispatch a clone"
            )
        return self.given_ids

    def positions(self) -> torch.Tensor:
        plan = self.results.plan
        received = self.all_counts[:, self.results.rank].to(torch.int64)
        layout = "expert" if self.by_route else self.options.layout
        where = (received, plan.max_tokens_per_rank, self.capacity, plan.top_k)
        return places.of_received_rows(layout, self.row_places, *where)

    def all_sizes(self) -> list[int]:
        """num_rows, source_counts, expert_counts and expert_offsets on the host, which waits for them."""
        size = self.results.starts["expert_offsets"] + self.results.plan.experts_per_rank + 1
        return self.memory[self.first_word : self.first_word + size].tolist()

    # -- where its tensors change ---------------------------------------------------------------------------

    def cut_to_size(self, sizes: list[int], rows: torch.Tensor) -> torch.Tensor:
        """Give outputs their exact size; the rows that there are.

        Args:
            sizes: as of :meth:`all_sizes`; expert_offsets may be missing in other layouts than "expert".
            rows: [places, H].
        """
        plan = self.results.plan
        num_rows, received = sizes[0], sum(sizes[1 : 1 + plan.num_ranks])
        vars(self.counts)["num_rows"] = num_rows
        self.host_counts = sizes[1 + plan.num_ranks : 1 + plan.num_ranks + plan.experts_per_rank]
        if self.options.layout == "rank":
            return rows
        if self.options.layout == "expert":
            self.host_offsets = sizes[1 + plan.num_ranks + plan.experts_per_rank :]
        scales = self.__dict__.get("scales")
        if scales is not None:
            self.scales = scales[:num_rows]
        self.num_places, self.num_received = num_rows, received
        for name in BY_ROW:  # made when they are read
            self.__dict__.pop(name, None)
        return rows[:num_rows]

    def take_lent(self, sizes: list[int]) -> torch.Tensor:
        """Give lent outputs their exact size; the rows that there are.

        Args:
            sizes: as of :meth:`cut_to_size`.
        """
        assert self.lent is not None
        (rows, self.scales), self.lent, self.reused_after = self.lent, None, None
        rows = self.cut_to_size(sizes, rows)
        if not sizes[0]:  # nobody shall hold the buffer by no rows
            rows = torch.empty_like(rows)
            self.scales = None if self.scales is None else torch.empty_like(self.scales)
        return rows

    def own(self, num_places: int | None = None, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
        """Copy what views the receive buffer; outputs get ``num_places`` places if given.

        Args:
            copy: of the scales, where they have places enough.
        """
        scales, buffer = self.scales, self.buffer
        if num_places is not None:
            self.num_places = max(num_places, self.num_places)
        if scales is not None:
            self.scales = copy(scales) if len(scales) >= self.num_places else places.copied(scales, self.num_places)
        self.reused_after = None
        self.__dict__.pop("pointers", None)
        if buffer is not None and (self.by_route or self.num_places <= buffer.num_rows):
            self.own_beside()
            return
        by_place = () if self.options.layout == "expert" else ("local_ids", "weights")
        for name in BY_ROW:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, places.copied(tensor, self.num_places if name in by_place else 0))

    def own_beside(self) -> None:
        """Copy what came beside the rows and scales, all of it: how much is in use need not be known."""
        buffer = self.buffer
        assert buffer is not None
        if isinstance(buffer, ReceiveBuffer):
            _ = self.scales  # which stay where they are
            self.buffer = buffer = buffer.copied()
            for name in BY_ROW:
                self.__dict__.pop(name, None)
        slots = self.address("slots"), self.address("all_counts")
        self.pointers = (buffer.places_address, buffer.tokens_address, *slots)

    def spread(self, options: DispatchOptions, placement: Placement) -> None:
        """Rows of layout "token", and of their exact size, become those of layout "expert"."""
        self.own()
        device = self.memory.device
        self.options = options
        offsets = torch.tensor(placement.offsets, dtype=torch.int32, device=device)
        vars(self.counts).update(num_rows=placement.num_rows, expert_offsets=offsets)
        self.num_places = self.capacity = placement.num_places
        self.host_offsets, self.by_token = placement.offsets, True
        self.row_places = placement.positions.to(torch.int32)
        self.__dict__.pop("pointers", None)

    def hold_given(self, out: DispatchOut) -> None:
        """The caller's tensors are the results that the kernel has written."""
        self.given = out
        top_k = self.results.plan.top_k
        if out.scales is not None:
            self.scales = out.scales
        if out.topk_ids is not None and out.topk_ids.dtype == torch.int32:
            self.local_ids = out.topk_ids.view(-1, top_k)
        if out.topk_weights is not None:
            self.weights = out.topk_weights.view(-1, top_k)

    def write_ids(self, out: DispatchOut | None) -> None:
        """Fill ids of another dtype than kernels write, where the caller gives room for them."""
        if out is not None and out.topk_ids is not None and out.topk_ids.dtype != torch.int32:
            out.topk_ids.view(-1, self.results.plan.top_k).copy_(self.topk_ids)

    def write_to(self, out: DispatchOut, rows: torch.Tensor) -> torch.Tensor:
        """Copy results to the caller's tensors, where it gives some. Returns the rows where they are then."""
        counts = self.counts
        results = {
            "scales": self.scales,
            "topk_ids": self.topk_ids,
            "topk_weights": self.topk_weights,
            "num_rows": counts.num_rows,
            "source_counts": counts.source_counts,
            "expert_counts": counts.expert_counts,
            "expert_offsets": counts.expert_offsets,
        }
        for name, value in results.items():
            target = getattr(out, name)
            if target is not None:
                assert isinstance(value, torch.Tensor), f"layout {self.options.layout} has no {name}"
                target.copy_(value.view(target.shape))
        if out.tokens is None:
            return rows
        target = out.tokens.view(rows.shape)
        target.view(torch.uint8).copy_(rows.view(torch.uint8))
        return target
