"""A dispatch as its rank remembers it. Tensors of it are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import torch

from tokenloom.backends.peers.buffers import DispatchCount, OwnRouteWords, ReceiveBuffer, aligned, version_of
from tokenloom.backends.peers.opening import Launcher
from tokenloom.backends.seam import DispatchOptions, DispatchOut, RoutedCounts
from tokenloom.errors import InvalidArgument
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import TURN_WORDS, spec_of
from tokenloom.kernels.dispatch.launch import RESULTS
from tokenloom.kernels.row_weights.launch import BLOCKS, RowWeightsVariant
from tokenloom.ops import routing
from tokenloom.ops.routing import RowPlaces
from tokenloom.plan import Plan, align_up

ALIGNED_WORDS = 32
"""Parts of results begin at multiples of 128 bytes. Counts lie side by side."""
WORDS_TOGETHER = 2**18
"""Words that are allocated for several calls."""
MOST_WORDS_TOGETHER = WORDS_TOGETHER // 4
"""Words of a call for which memory is not shared with others."""
COUNTS = ("num_rows", "source_counts", "expert_counts", "expert_offsets")


class ResultsLayout:
    """Layout of the results of one kind of dispatch in one int32 tensor: counts, slots, and more.

    Args:
        plan: sizes. launcher: of the communicator.
        options: of the dispatch.
        sizes: words of further parts, by name.
        num_places: rows of the output.
        with_weights, with_scales: rows come with them.
        dispatches: those that take turns in the receive buffers; None: these have memory of their own.

    Attributes:
        starts: first word of each part, by name. "slots" is the last one. at: first byte.
        argument_offsets: first bytes of the parts that kernels get as arguments, in the order of RESULTS.
        fixed_words: words of all but slots. slots_per_token: words of slots, by token.
        scales_per_row: of FP8 rows.
    """

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        options: DispatchOptions,
        num_places: int,
        sizes: Mapping[str, int],
        *,
        with_weights: bool,
        with_scales: bool,
        dispatches: DispatchCount | None = None,
    ) -> None:
        self.plan, self.rank, self.options, self.num_places = plan, launcher.ranks.rank, options, num_places
        self.launcher, self.dispatches = launcher, dispatches
        self.with_weights, self.with_scales = with_weights, with_scales
        self.scales_per_row = plan.scales_by(options.recipe) if with_scales else 0
        num_ranks, local = plan.num_ranks, plan.experts_per_rank
        counts = dict(zip(COUNTS, (1, num_ranks, local, local + 1), strict=True))
        more = {"all_counts": num_ranks * (num_ranks + plan.num_experts), "epoch": TURN_WORDS, **sizes}
        self.starts: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        end = 0
        for name, size in (counts | more).items():
            start = end if name in counts else align_up(end, ALIGNED_WORDS)
            end = start + size
            self.starts[name], self._ends[name] = start, end
        self.starts["slots"] = self.fixed_words = align_up(end, ALIGNED_WORDS)
        self.at = {name: 4 * start for name, start in self.starts.items()}
        self.argument_offsets = [self.at[name] for name in RESULTS]
        self.slots_per_token = num_ranks + plan.top_k

    def words(self, num_tokens: int) -> int:
        """Words that a dispatch of ``num_tokens`` tokens leaves."""
        return self.fixed_words + num_tokens * self.slots_per_token

    def part(self, memory: torch.Tensor, first: int, name: str) -> torch.Tensor:
        """A part, as int32 in one dimension, of the words of a call that begin in memory at ``first``."""
        end = self._ends.get(name)
        # Without the version that autograd counts: calls that share the memory are not changed with each other.
        return memory.data[first + self.starts[name] : None if end is None else first + end]

    def count(self, memory: torch.Tensor, first: int, name: str) -> torch.Tensor | None:
        """One of the sizes of the output, as it lies on the device; None if the layout has none such."""
        if name == "num_rows":
            return memory.data[first + self.starts[name]]
        if self.options.layout != {"expert_offsets": "expert", "slot_ranges": "slots"}.get(name, self.options.layout):
            return None
        found = self.part(memory, first, name)
        return found.view(self.plan.experts_per_rank, -1, 2) if name == "slot_ranges" else found

    def scales(self, found: torch.Tensor) -> torch.Tensor:
        """Scales as a handle has them, from their part: [places, n], in layout "slots" by ``scale_layout``."""
        number, local = self.scales_per_row, self.plan.experts_per_rank
        if self.options.scale_layout == "packed":
            return found.view(local, -(-number // 4), -1).transpose(1, 2)
        found = found.view(torch.float32)
        if self.options.scale_layout == "columns":
            return found.view(local, number, -1).transpose(1, 2)
        return found.view(*([local, -1] if self.options.layout == "slots" else [self.num_places]), number)


class ResultsMemory:
    """Memory for what dispatches leave: one allocation serves many calls of a stream, since each takes the host long.

    Args:
        device: of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: int | None = None
        self._begin = self._end = 0
        self.memory = torch.empty(0, dtype=torch.int32, device=device)
        self.address = 0

    def take(self, results: ResultsLayout, num_tokens: int, stream: int | None) -> tuple[torch.Tensor, int, int]:
        """Memory for one call: a tensor, the first word in it that is the call's own, and the address of that.

        Args:
            results: what the call leaves. num_tokens: of the call.
            stream: handle of the current stream, whose memory it is. None: memory that no other call has.
        """
        begin, num_words = self._begin, results.fixed_words + num_tokens * results.slots_per_token
        end = begin + num_words
        if stream == self._stream and end <= self._end:
            self._begin = end + ALIGNED_WORDS - 1 & -ALIGNED_WORDS
            return self.memory, begin, self.address + 4 * begin
        if stream is None or num_words > MOST_WORDS_TOGETHER:
            own = torch.empty(num_words, dtype=torch.int32, device=self._device)
            return own, 0, own.data_ptr()
        with torch.inference_mode(False):  # it serves calls in any mode, whose backward may save its parts
            self.memory = torch.empty(WORDS_TOGETHER, dtype=torch.int32, device=self._device)
        self.address, self._stream = self.memory.data_ptr(), stream
        self._begin, self._end = 0, WORDS_TOGETHER
        return self.take(results, num_tokens, stream)


class CountsInWords(RoutedCounts):
    """Counts of a dispatch. Tensors are made when somebody asks for them.

    Args:
        results, memory, first: what lies where, see :meth:`ResultsLayout.count`.
        out: the caller's tensors that hold some of them.
    """

    _where: tuple[ResultsLayout, torch.Tensor, int]
    _out: DispatchOut | None

    def __init__(self, results: ResultsLayout, memory: torch.Tensor, first: int, out: DispatchOut | None) -> None:
        vars(self)["_where"], vars(self)["_out"] = (results, memory, first), out

    def __getattr__(self, name: str) -> Any:
        if name not in RoutedCounts.__dataclass_fields__:
            raise AttributeError(name)
        found = None if self._out is None else getattr(self._out, name)
        if found is None:
            results, memory, first = self._where
            found = results.count(memory, first, name)
        vars(self)[name] = found
        return found

    slot_ranges = cached_property(lambda self: self.__getattr__("slot_ranges"))


BY_ROW = ("weights", "local_ids", "row_places", "row_tokens")
"""Tensors of a handle with a value for each received row."""


class PeerHandle:
    """A dispatch as this rank remembers it. R: received rows, in the order (source rank, token).

    Attributes:
        options, number, num_tokens, num_places, counts, scales: see :class:`tokenloom.backends.seam.Handle`.
        capacity: places that a row may have; routes beyond it were dropped.
        given_ids: topk_ids as given, which routes gradients the same way.
        memory: int32, where the kernel leaves its words, from ``first_word`` on. words_address: of that one.
        results: what lies where in the words.
        buffer: where rows were received, with what came with them, or a copy of that. None: in the words, and in the
            caller's tensors.
        out: the caller's tensors that the kernel has written to, if any.
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
    out: DispatchOut | None = None
    lent: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __init__(
        self,
        results: ResultsLayout,
        memory: tuple[torch.Tensor, int, int],
        number: int,
        num_tokens: int,
        given_ids: torch.Tensor,
        buffer: ReceiveBuffer | None = None,
        reused_after: int | None = None,
    ) -> None:
        """Made by a dispatch.

        Args:
            memory: what :meth:`ResultsMemory.take` gave for its words.
        """
        self.results, self.options = results, results.options
        self.num_places = self.capacity = results.num_places
        self.number, self.num_tokens, self.reused_after = number, num_tokens, reused_after
        self.given_ids, self.ids_version = given_ids, None if given_ids.is_inference() else given_ids._version
        self.memory, self.first_word, base = memory
        self.words_address = base
        self.buffer: ReceiveBuffer | OwnRouteWords | None = buffer
        at = results.at
        slots, all_counts = base + at["slots"], base + at["all_counts"]
        if buffer is None:
            self.pointers = base + at["row_places"], base + at["row_tokens"], slots, all_counts
        else:
            self.pointers = buffer.places_address, buffer.tokens_address, slots, all_counts
        masked = results.launcher.masked
        if masked:
            self.masked = masked

    # -- what the kernel has left ---------------------------------------------------------------------------

    @cached_property
    def counts(self) -> RoutedCounts:
        return CountsInWords(self.results, self.memory, self.first_word, self.out)

    @cached_property
    def scales(self) -> torch.Tensor | None:
        if not self.results.with_scales:
            return None
        results, of_slots = self.results, self.options.layout == "slots"
        if self.buffer is None or self._has_scales_apart:
            found = results.scales(self._part("scales"))
            return found if of_slots else found[: self.num_places]
        found = self.buffer.scales.view(-1, results.scales_per_row)[: self.num_places]
        return found.view(results.plan.experts_per_rank, -1, results.scales_per_row) if of_slots else found

    @property
    def _has_scales_apart(self) -> bool:
        """Whether rows came to a receive buffer, and their scales to its own words."""
        return self.buffer is not None and "scales" in self.results.at

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
        if self.buffer is None:
            return self.words_address + self.results.at["weights"]
        return self.buffer.weights_address

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
        return positions_of_received_rows(layout, self.row_places, *where)

    def require_kept(self) -> None:
        """Raise if not all ranks know of the dispatch, or the buffer that it wrote to may have been reused."""
        launcher, dispatches = self.results.launcher, self.results.dispatches
        if self.number < launcher.known_from:
            launcher.require_known(self.number)
        if self.reused_after is not None and dispatches is not None and dispatches.num_dispatches > self.reused_after:
            raise InvalidArgument("the dispatch is two or more dispatches old, its buffer was reused; pass copy=True")

    def row_weights(self, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        rows = weights.new_zeros(num_places)
        self._move_weights(weights, rows, num_places, weights.numel(), to_rows=True)
        return rows

    def route_gradients(self, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        routes = torch.empty_like(like)
        self._move_weights(grad, routes, len(grad), routes.numel(), to_rows=False)
        return routes

    def _move_weights(
        self, source: torch.Tensor, target: torch.Tensor, places: int, routes: int, to_rows: bool
    ) -> None:
        """Launch the kernel that moves weights between routes and rows."""
        self.require_kept()
        device = self.memory.device
        # One of its own for each call: forward and backward may run in several threads.
        kernel = Kernel(spec_of(RowWeightsVariant(plan=self.results.plan, to_rows=to_rows)), device.index)
        args = kernel.args
        args.row_places, args.source_counts = self.row_places.data_ptr(), self.counts.source_counts.data_ptr()
        args.source, args.target = source.data_ptr(), target.data_ptr()
        args.routes, args.places = routes, min(places, self.capacity)
        kernel.launch(BLOCKS, torch.cuda.current_stream(device).cuda_stream)

    def all_sizes(self) -> list[int]:
        """num_rows, source_counts, expert_counts and expert_offsets on the host, which waits for them."""
        size = self.results.starts["expert_offsets"] + self.results.plan.experts_per_rank + 1
        return self.memory[self.first_word : self.first_word + size].tolist()

    # -- where its tensors change ---------------------------------------------------------------------------

    def cut_to_size(self, sizes: list[int], rows: torch.Tensor) -> torch.Tensor:
        """Give outputs their exact size; the rows that there are.

        Args:
            sizes: as :meth:`all_sizes` gives them; expert_offsets may be missing in other layouts than "expert".
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
            sizes: as :meth:`cut_to_size` takes them.
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
        buffer = self.buffer
        scales = None if self._has_scales_apart else self.scales
        if num_places is not None:
            self.num_places = max(num_places, self.num_places)
        if scales is not None:
            has_room = len(scales) >= self.num_places or self.options.layout == "slots"
            self.scales = copy(scales) if has_room else copied_with_room(scales, self.num_places)
        self.reused_after = None
        self.__dict__.pop("pointers", None)
        if buffer is not None and (self.by_route or self.num_places <= buffer.num_rows):
            self.own_route_words()
            return
        by_place = () if self.options.layout == "expert" else ("local_ids", "weights")
        for name in BY_ROW:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, copied_with_room(tensor, self.num_places if name in by_place else 0))

    def own_route_words(self) -> None:
        """Copy what came beside the rows and scales, all of it: how much is in use need not be known."""
        buffer = self.buffer
        assert buffer is not None
        if isinstance(buffer, ReceiveBuffer):
            if not self._has_scales_apart:
                _ = self.scales  # which stay where they are
            self.buffer = buffer = buffer.copied()
            for name in BY_ROW:
                self.__dict__.pop(name, None)
        slots = self.address("slots"), self.address("all_counts")
        self.pointers = (buffer.places_address, buffer.tokens_address, *slots)

    def spread(self, options: DispatchOptions, placement: RowPlaces) -> None:
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
        self.out = out
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
            "slot_ranges": counts.slot_ranges,
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


def positions_of_received_rows(
    layout: str, row_places: torch.Tensor, received: torch.Tensor, max_tokens: int, capacity: int, top_k: int
) -> torch.Tensor:
    """Position matrix with one row for each received row that there may be, -1 beyond those there are. No host read.

    Args:
        layout: of the dispatch.
        row_places: int32 [>= R, K], place of each route of a received row (layout "expert").
        received: int64 [W], rows from each source.
        max_tokens: M.
        capacity: places that a row may have.
        top_k: K.

    Returns:
        int64 [W * M, K] in layout "expert", else [W * M, 1].
    """
    num_ranks, device = len(received), received.device
    rows = torch.arange(num_ranks * max_tokens, dtype=torch.int64, device=device)
    if layout == "expert":
        positions = torch.full((len(rows), top_k), -1, dtype=torch.int64, device=device)
        positions[: len(row_places)] = row_places.to(torch.int64)
    elif layout == "token":
        positions = rows[:, None]
    else:
        source = torch.bucketize(rows, received.cumsum(0), right=True).clamp_max(num_ranks - 1)
        in_source = rows - (received.cumsum(0) - received)[source]
        positions = (source * max_tokens + in_source)[:, None]
    valid = (rows < received.sum())[:, None] & (positions < capacity)
    return torch.where(valid, positions, -1)


def rows_without_sources(
    rows: torch.Tensor, received: torch.Tensor, max_tokens: int, gone: Collection[int]
) -> torch.Tensor:
    """Rows of layout "rank" in the order in which an earlier dispatch received them, zeros from ranks that are gone.

    Args:
        rows: [W * M, H].
        received: int64 [W], rows from each source then.
        max_tokens: M.
        gone: ranks whose rows did not come now.

    Returns:
        [W * M, H], zeros behind the rows that were received.
    """
    where = positions_of_received_rows("rank", received, received, max_tokens, len(rows), 1)[:, 0]
    came = where >= 0
    for rank in gone:
        came &= where // max_tokens != rank
    return torch.where(came[:, None], rows[where.clamp_min(0)], 0)


def place_by_expert(
    source_counts: torch.Tensor, expert_counts: torch.Tensor, alignment: int, local_ids: torch.Tensor
) -> routing.RowPlaces:
    """Where rows of layout "token" lie in layout "expert". Reads the counts on the host.

    Args:
        source_counts: int32 [W]. expert_counts: int32 [L]. local_ids: int32 [R, K].
    """
    return routing.place_by_expert(source_counts.tolist(), expert_counts.tolist(), alignment, local_ids)


def copied_with_room(tensor: torch.Tensor, least: int) -> torch.Tensor:
    """Copy a tensor, with zeros behind its rows up to ``least`` of them."""
    if len(tensor) >= least:
        return tensor.clone()
    out = tensor.new_zeros(least, *tensor.shape[1:])
    out.view(torch.uint8)[: len(tensor)] = tensor.view(torch.uint8)
    return out
