"""Layouts of the symmetric buffers of a communicator, their sizes, and the calls that make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokenloom.backends.peers.opening import Launcher
from tokenloom.backends.seam import CombineOptions, DispatchOptions
from tokenloom.errors import InvalidArgument, ShapeMismatch
from tokenloom.kernels.combine.launch import max_chunks
from tokenloom.kernels.common import HEADER_WORDS, MAX_BLOCKS, STAMPED_WORD_BYTES, TURNS
from tokenloom.plan import FP8_BLOCK, ROUTE_LAYOUTS, Plan, align_up
from tokenloom.runtime.openings import Fields
from tokenloom.runtime.symmetric_memory import BufferLayout, SymmetricBuffer, lent


class Loan:
    """Whether rows of one receive buffer are lent.

    Attributes:
        was_lent: they were, since the last :meth:`take_back`.
    """

    def __init__(self) -> None:
        self.was_lent = False
        self._holders: list[weakref.ref[Any]] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_held(self) -> bool:
        """Whether anybody still looks at what was lent."""
        return any(holder() is not None for holder in self._holders)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same contiguous tensor, for a caller to hold. The buffer is theirs meanwhile."""
        if not tensor.numel():
            return tensor.new_empty(tensor.shape)
        memory, holder = lent(tensor.view(torch.uint8).flatten())
        self.was_lent = True
        self._holders.append(holder)
        self._stream = torch.cuda.current_stream(tensor.device)
        return memory.view(tensor.dtype).view(tensor.shape)

    def take_back(self, launcher: Launcher) -> None:
        """Nobody holds it: let the current stream wait for that on which it was lent, and so for its last readers."""
        if self._stream is None:
            return
        stream, captured = launcher.current()
        if captured:  # which waits for nothing outside: the next call that is not has to
            return
        if self._stream.cuda_stream != stream:
            torch.cuda.current_stream(launcher.ranks.device).wait_stream(self._stream)
        self._holders, self._stream, self.was_lent = [], None, False


RECEIVE_BUFFERS = 2
"""Dispatches take turns in these, so views of one last until the second next dispatch."""
BULK_BYTES = 16
"""Rows that kernels move, and their addresses, are multiples of this."""
EXPERT_ROOM = 1.25
"""Rows of layout "expert" that a receive buffer has at first, over the mean of an even routing."""
SLOTS_ROOM = 2.0
"""Most places to which rows go straight in layout "slots", over the same mean. More of them are mostly empty: receive
buffers would take much more memory than their rows, and whoever owns outputs would copy places without rows."""

ABSENT_BYTE = 0xFF
"""Every byte of memory in which rows say by themselves that they are here, until they are; kAbsent of
device/sync/arrival.cuh."""
EAGER_ROWS = 2048
"""Most rows that a rank may receive in plans whose bounded calls are eager: rows leave before others have opened."""

MakeLayout = Callable[[Plan, int, int], BufferLayout]
"""From a plan, bytes of a value, and rows of a receive buffer (where it has some)."""


def control_layout(plan: Plan) -> BufferLayout:
    """Headers with counts, flags, and where the weights' gradients come home. Between nodes some flags take turns."""
    header_words = align_up(HEADER_WORDS + plan.num_ranks + plan.num_experts, 4)
    return BufferLayout.of(
        [
            ("headers", STAMPED_WORD_BYTES * TURNS * plan.num_ranks * header_words),
            ("done_flags", 4 * TURNS * plan.num_ranks * MAX_BLOCKS),
            ("row_flags", 4 * plan.worst_case_rows("token")),
            ("chunk_flags", 4 * plan.num_ranks * max_chunks(plan)),
            ("left_flags", 4 * plan.num_ranks),
            ("combine_recv_weights", 4 * _combine_recv_rows(plan) * weight_gradient_values(plan)),
        ]
    )


def data_layout(plan: Plan, value_bytes: int, rows: int) -> BufferLayout:
    """Two receive buffers of ``rows`` rows, and the rows that a combine brings home."""
    receive = [
        place for number in range(RECEIVE_BUFFERS) for place in _receive_places(plan, number, rows, value_bytes)
    ]
    return BufferLayout.of([*receive, ("combine_recv", _combine_recv_rows(plan) * plan.hidden * value_bytes)])


def _narrow_layout(plan: Plan, value_bytes: int, rows: int, *, width: int) -> BufferLayout:
    """Two receive buffers for rows of another width, one for each (token, rank)."""
    narrow, most = replace(plan, hidden=width), plan.worst_case_rows("token")
    places: list[tuple[str, int]] = []
    for number in range(RECEIVE_BUFFERS):
        places += _receive_places(narrow, number, most, value_bytes)
    return BufferLayout.of(places)


def fused_layout(plan: Plan, value_bytes: int, rows: int, *, num_shared_experts: int, recipe: str) -> BufferLayout:
    """For a MegaMoE: FP8 rows in the order of the experts, what comes with them, counts of those that are there,
    and a bfloat16 row for each result that comes home."""
    results = plan.max_tokens_per_rank * (plan.top_k + num_shared_experts)
    return BufferLayout.of(
        [
            ("rows", rows * plan.hidden * value_bytes),
            ("row_scales", rows * plan.scales_by(recipe) * 4),
            ("row_homes", rows * 4),
            ("row_weights", rows * 4),
            ("arrived", (plan.experts_per_rank + num_shared_experts) * plan.num_ranks * 4),
            ("combine_recv", results * plan.hidden * 2),
        ]
    )


def route_layout(plan: Plan, value_bytes: int, rows: int) -> BufferLayout:
    """Where a combine per route brings home one row for each route of this rank's tokens."""
    return BufferLayout.of([("combine_recv", plan.max_tokens_per_rank * plan.top_k * plan.hidden * value_bytes)])


def sends_before_opening(plan: Plan) -> bool:
    """Whether rows of bounded calls leave before other ranks have opened them: a copy of few rows costs less than the
    wait, and regions that take turns are small."""
    return plan.num_ranks * plan.max_tokens_per_rank <= EAGER_ROWS


def num_turns(plan: Plan) -> int:
    """Regions that combines and copies take turns in: two, where a rank waits for others before it writes to one."""
    return TURNS if sends_before_opening(plan) else 2


def staged_layout(plan: Plan, value_bytes: int, rows: int) -> BufferLayout:
    """Where rows of a staged dispatch arrive, by source, with what comes with them."""
    places = []
    for turn in range(TURNS):
        places += _receive_places(plan, turn, plan.worst_case_rows("rank"), value_bytes)
    return BufferLayout.of(places)


def sums_in_turns_layout(plan: Plan, value_bytes: int, rows: int) -> BufferLayout:
    """Where sums of ranks come home in eager calls, in calls of two halves, and where weights come from home."""
    return _in_turns(plan, _combine_recv_rows(plan) * plan.hidden * value_bytes)


def routes_in_turns_layout(plan: Plan, value_bytes: int, rows: int) -> BufferLayout:
    """The same, per route."""
    return _in_turns(plan, plan.max_tokens_per_rank * plan.top_k * plan.hidden * value_bytes)


def _in_turns(plan: Plan, size: int) -> BufferLayout:
    weights = 4 * plan.num_ranks * plan.max_tokens_per_rank * plan.top_k
    places = []
    for turn in range(num_turns(plan)):
        places += [(f"combine_recv{turn}", size), (f"home_weights{turn}", weights)]
    return BufferLayout.of(places)


ARRIVING: dict[MakeLayout, tuple[str, str]] = {
    staged_layout: ("rows", "row_tokens"),
    sums_in_turns_layout: ("combine_recv", "combine_recv"),
    routes_in_turns_layout: ("combine_recv", "combine_recv"),
}
"""Buffers that rows may come to word by word, as staged dispatches send them, and eager combines. Of each turn these
are the parts from the first that is named to the second."""


def arriving_part(layout: BufferLayout, names: tuple[str, str], turn: int) -> tuple[int, int]:
    """Bytes of a buffer before those in which rows of a turn are awaited, and how many these are."""
    first, (last, size) = layout.offset(f"{names[0]}{turn}"), layout.places[f"{names[1]}{turn}"]
    return first, last + size - first


def gather_layout(plan: Plan, value_bytes: int, rows: int) -> BufferLayout:
    """Rows that copy engines bring, by rank and token [W, M], in regions by turns."""
    size = plan.num_ranks * plan.max_tokens_per_rank * plan.hidden * value_bytes
    return BufferLayout.of([(f"gathered{turn}", size) for turn in range(num_turns(plan))])


def weight_gradient_values(plan: Plan) -> int:
    """Gradients of weights in a row on its way home: top_k, rounded up to whole 16-byte units of float32."""
    return align_up(plan.top_k, 4)


def receive_rows(plan: Plan) -> int:
    """Rows of a receive buffer at first: the worst case of layouts "token" and "rank", or room for layout "expert"."""
    even = int(_even_rows(plan) * EXPERT_ROOM) + plan.experts_per_rank * 128
    return max(plan.worst_case_rows("token"), min(even, plan.worst_case_rows("expert", 128)))


def _even_rows(plan: Plan) -> int:
    """Rows of layout "expert" on each rank, if all experts are as popular."""
    return plan.max_tokens_per_rank * plan.top_k


def _receive_places(plan: Plan, number: int, rows: int, value_bytes: int) -> list[tuple[str, int]]:
    received = plan.worst_case_rows("token")
    return [
        (f"rows{number}", rows * plan.hidden * value_bytes),
        (f"row_scales{number}", rows * (plan.hidden // FP8_BLOCK) * 4),
        (f"row_ids{number}", received * plan.top_k * 4),
        (f"row_weights{number}", received * plan.top_k * 4),
        (f"row_places{number}", received * plan.top_k * 4),
        (f"row_tokens{number}", received * 4),
    ]


def _combine_recv_rows(plan: Plan) -> int:
    return plan.max_tokens_per_rank * min(plan.num_ranks, plan.top_k)


class RouteWords:
    """Words that come beside rows: local_ids, weights and row_places [R, K], and row_tokens [R]. Views of them
    are made when they are read.

    Args:
        memory: int32, one dimension, all of it.
        parts: where each of them begins there, by its name.
        num_rows, top_k: R and K.

    Attributes:
        num_rows: as given.
        ids_address, places_address, tokens_address, weights_address: of each of them, for kernels.
    """

    scales: torch.Tensor

    def __init__(self, memory: torch.Tensor, parts: Mapping[str, int], num_rows: int, top_k: int) -> None:
        self._memory, self._parts, self.num_rows, self._top_k = memory, parts, num_rows, top_k
        address = memory.data_ptr()
        self.ids_address = address + 4 * parts["local_ids"]
        self.places_address = address + 4 * parts["row_places"]
        self.tokens_address = address + 4 * parts["row_tokens"]
        self.weights_address = address + 4 * parts["weights"]

    def part(self, name: str, num_rows: int | None) -> torch.Tensor:
        """The named part for the first ``num_rows`` rows; for all rows if None."""
        if num_rows is None:
            num_rows = self.num_rows
        memory, begin, top_k = self._memory, self._parts[name], self._top_k
        if name == "row_tokens":
            return memory[begin : begin + num_rows]
        if name == "weights":
            memory = memory.view(torch.float32)
        return memory.as_strided((num_rows, top_k), (top_k, 1), memory.storage_offset() + begin)

    def copied(self) -> OwnRouteWords:
        """The same in memory of its own. All is copied at once, which costs less than part by part."""
        return OwnRouteWords(self._memory.clone(), self._parts, self.num_rows, self._top_k)


class OwnRouteWords(RouteWords):
    """A copy of what a receive buffer has beside its rows and scales: the handle has its own of these."""

    holds_tensors = True


class ReceiveBuffer(RouteWords):
    """Views of one receive buffer at its full size. R is the most rows that may be received.

    Attributes:
        rows: [places, H]. scales: float32 [places, H / 128], of no use without FP8. By recipe "row" the first of
            these words are one for each row.
        loan: of the rows and scales. Buffers for values of one width share it, as they share the memory.
        number: which of them, 0 or 1.
        offsets: for kernels: where each part of the first one begins, by the name of the argument, and the distance
            from there to the second.
        peers_address: of every rank's address of the buffer.
    """

    def __init__(
        self, plan: Plan, buffer: SymmetricBuffer, number: int, last: int, dtype: torch.dtype, rows: int, loan: Loan
    ) -> None:
        received = plan.worst_case_rows("token")

        def view(name: str, of: torch.dtype, *shape: int) -> torch.Tensor:
            return buffer.view(f"{name}{number}", of, shape)

        self.rows = view("rows", dtype, rows, plan.hidden)
        self.scales = view("row_scales", torch.float32, rows, plan.hidden // FP8_BLOCK)
        self.number, self.loan = number, loan
        offset = buffer.layout.offset
        begin = offset(f"row_ids{number}")
        first = {
            "local_ids": "row_ids",
            "weights": "row_weights",
            "row_places": "row_places",
            "row_tokens": "row_tokens",
        }
        parts = {name: (offset(f"{region}{number}") - begin) // 4 for name, region in first.items()}
        beside = view("row_ids", torch.int32, received).as_strided((parts["row_tokens"] + received,), (1,))
        super().__init__(beside, parts, received, plan.top_k)
        names = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")
        self.offsets = [(name, offset(f"{name}0")) for name in names]
        self.offsets.append(("region_bytes", offset("rows1") - offset("rows0") if last else 0))
        self.peers_address = buffer.peers.data_ptr()


class DispatchCount:
    """Dispatches so far to a pair of receive buffers, which take turns by it."""

    def __init__(self) -> None:
        self.num_dispatches = 0


class Buffers(DispatchCount):
    """The symmetric buffers of one communicator, each made at the first call that needs it, on all ranks alike.

    Attributes:
        fused: they serve a MegaMoE, and no other call.
        narrow: the count of dispatches of narrow rows, which have receive buffers of their own.
        may_be_lent: rows were lent since somebody last asked whether any are.
        when_grown: functions to call when a buffer is replaced, or will be: addresses are not what they were.
    """

    def __init__(self, plan: Plan, launcher: Launcher) -> None:
        super().__init__()
        self.fused = False
        self.narrow = DispatchCount()
        self.may_be_lent = False
        self.when_grown: list[Callable[[], None]] = []
        self._plan, self._launcher = plan, launcher
        self._buffers: dict[tuple[MakeLayout, int], SymmetricBuffer] = {}
        self._receive: dict[tuple[int, torch.dtype], ReceiveBuffer] = {}
        self._narrow_receive: dict[tuple[int, torch.dtype, int], ReceiveBuffer] = {}
        self._narrow_layouts: dict[int, MakeLayout] = {}
        self._rows: dict[int, int] = {}
        self._loans: dict[tuple[int, int], Loan] = {}
        self._data_layout: MakeLayout = data_layout
        self._least_rows = receive_rows(plan)
        self._is_eager = sends_before_opening(plan)

    @property
    def turns_of_dispatches(self) -> tuple[int, int]:
        """How many dispatches there were, which says whose turn is next: of usual rows, and of narrow ones."""
        return self.num_dispatches, self.narrow.num_dispatches

    @turns_of_dispatches.setter
    def turns_of_dispatches(self, turns: tuple[int, int]) -> None:
        self.num_dispatches, self.narrow.num_dispatches = turns

    def sizes(self) -> list[list[int]]:
        """Bytes of a value, and of all, of each buffer that there is, in the same order on all ranks that have it."""
        return sorted([value_bytes, each.layout.total_bytes] for (_, value_bytes), each in self._buffers.items())

    def serve_fused_layer(self, num_shared_experts: int, recipe: str) -> None:
        """From now on: one buffer, with room for the rows of the worst routing."""
        own = num_shared_experts * self._plan.max_tokens_per_rank
        self._data_layout = partial(fused_layout, num_shared_experts=num_shared_experts, recipe=recipe)
        self._least_rows = self._plan.worst_case_rows("expert") + own
        self.fused = True

    def rows_for(self, dtype: torch.dtype) -> int:
        """Rows that a receive buffer for ``dtype`` has, or will have."""
        return self._rows.get(self._value_bytes(dtype), self._least_rows)

    def receive(
        self, dtype: torch.dtype, number: int, rows: int, fields: Fields, width: int | None = None
    ) -> ReceiveBuffer:
        """Where the ``number``-th dispatch puts its rows: a buffer of at least ``rows`` rows of ``dtype``.

        Args:
            width: values in a row; None: H.
        """
        number %= RECEIVE_BUFFERS
        if width is not None:
            return self._receive_narrow(dtype, number, width, fields)
        value_bytes = self._value_bytes(dtype)
        if rows > self.rows_for(dtype):  # all ranks have agreed on that capacity
            self._grow(value_bytes, rows, fields)
        found = self._receive.get((number, dtype))
        if found is None:
            buffer = self.get(self._data_layout, value_bytes, fields)
            sizes = (RECEIVE_BUFFERS - 1, dtype, self.rows_for(dtype))
            loan = self._loans.setdefault((value_bytes, number), Loan())
            found = self._receive[number, dtype] = ReceiveBuffer(self._plan, buffer, number, *sizes, loan)
        return found

    def _receive_narrow(self, dtype: torch.dtype, number: int, width: int, fields: Fields) -> ReceiveBuffer:
        """Where rows of another width arrive, for layouts with one for each (token, rank)."""
        found = self._narrow_receive.get((number, dtype, width))
        if found is None:
            plan, rows = replace(self._plan, hidden=width), self._plan.worst_case_rows("token")
            layout = self._narrow_layouts.setdefault(width, partial(_narrow_layout, width=width))
            buffer = self.get(layout, dtype.itemsize, fields)
            made = ReceiveBuffer(plan, buffer, number, RECEIVE_BUFFERS - 1, dtype, rows, Loan())
            found = self._narrow_receive[number, dtype, width] = made
        return found

    @property
    def any_lent(self) -> bool:
        """Whether a caller holds rows of a receive buffer, so that others last until the next dispatch alone."""
        if self.may_be_lent:  # a question that nearly every dispatch asks
            self.may_be_lent = any(loan.is_held for loan in self._loans.values())
        return self.may_be_lent

    def is_captured(self) -> bool:
        """Whether a CUDA graph captures the current stream."""
        return self._launcher.current()[1]

    def can_lend(self, buffer: ReceiveBuffer, reused_after: int | None) -> bool:
        """Whether dispatches can do without this one: no other is lent, and no graph writes to it at its replays.

        Args:
            reused_after: of its dispatch, which must be the last. The rows of a later one would be overwritten early.
        """
        if reused_after is None or self.num_dispatches + RECEIVE_BUFFERS > reused_after + 1:
            return False
        others = (loan for loan in self._loans.values() if loan is not buffer.loan)
        return not self._launcher.has_graphs and not any(loan.is_held for loan in others)

    def _value_bytes(self, dtype: torch.dtype) -> int:
        """FP8 and 2-byte values share buffers."""
        return max(dtype.itemsize, 2)

    def _grow(self, value_bytes: int, rows: int, fields: Fields) -> None:
        """Make room for more rows. Rows handed out stay where they are, as long as somebody looks at them."""
        key = (self._data_layout, value_bytes)
        if self._has(key):
            self._launcher.agree_before_memory(fields)
            self._launcher.retire(self._buffers.pop(key))
        self._receive = {
            key: found for key, found in self._receive.items() if self._value_bytes(key[1]) != value_bytes
        }
        self._loans = {key: loan for key, loan in self._loans.items() if key[0] != value_bytes}
        for forget in self.when_grown:
            forget()
        self._make(key, rows, fields)
        self._rows[value_bytes] = rows  # last: where a rank has a fault, all ranks must still mean the same size

    def data(self, value_bytes: int, fields: Fields) -> SymmetricBuffer:
        """The buffer that rows are received in, and come home to."""
        return self.get(self._data_layout, value_bytes, fields)

    def combine_recv(self, options: CombineOptions, split: bool, fields: Fields) -> SymmetricBuffer:
        """Where the rows of a combine come home, which is made in two halves or not."""
        return self.get(*self._combine_key(options, split), fields)

    def combines_in_turns(self, options: CombineOptions, split: bool) -> bool:
        """Whether such combines take turns in parts of their buffer."""
        return self._is_eager or split or options.weights_from_home

    def staged(self, dtype: torch.dtype, fields: Fields) -> SymmetricBuffer:
        """Where the rows of a staged dispatch arrive."""
        return self.get(staged_layout, self._value_bytes(dtype), fields)

    def is_staged(self, options: DispatchOptions) -> bool:
        """Whether a dispatch sends rows to where they are copied from on arrival, and not straight to their places."""
        # In layouts of tokens the copy takes longer than waiting for counts.
        of_routes = options.layout in ROUTE_LAYOUTS and options.sizes == "bounded" and options.strategy == "dedup"
        is_sparse = options.layout == "slots" and self.bounded_rows(options) > SLOTS_ROOM * _even_rows(self._plan)
        return of_routes and (self._is_eager or is_sparse)

    def gather(self, value_bytes: int, fields: Fields) -> SymmetricBuffer:
        """Where copy engines bring rows."""
        return self.get(gather_layout, value_bytes, fields)

    def get(self, layout: MakeLayout, value_bytes: int, fields: Fields) -> SymmetricBuffer:
        """A buffer of this layout for values of this width."""
        found = self._buffers.get((layout, value_bytes))
        if found is None:
            found = self._make((layout, value_bytes), self._rows.get(value_bytes, self._least_rows), fields)
        return found

    def _make(self, key: tuple[MakeLayout, int], rows: int, fields: Fields) -> SymmetricBuffer:
        """Make a buffer; in small plans all that usual calls need. Later calls then have nothing to agree on. A rank
        with a fault would not know of such an agreement, which would raise early what calls before have found."""
        self._launcher.agree_before_memory(fields)
        layout, value_bytes = key
        usual = (self._data_layout, staged_layout, sums_in_turns_layout)
        together = usual if self._is_eager and not self.fused and layout in usual else (layout,)
        if any(map(self._arrives, together)):
            # A half that knew no such memory has told nobody that it sends no more, which a refusal would wait for.
            self._launcher.finish_all()
        for each in together:
            if not self._has((each, value_bytes)):
                size, arrives = each(self._plan, value_bytes, rows), self._arrives(each)
                fill = ABSENT_BYTE if arrives else 0
                made = self._buffers[each, value_bytes] = SymmetricBuffer(size, self._launcher.ranks, fill)
                if arrives:
                    (first, num_bytes), (second, _) = (arriving_part(size, ARRIVING[each], turn) for turn in range(2))
                    self._launcher.add_arrivals(made.bytes(first, num_bytes), second - first)
        return self._buffers[key]

    def has_for_dispatch(self, options: DispatchOptions, value_bytes: int, width: int | None = None) -> bool:
        """Whether a dispatch would make no buffer, and none larger."""
        if width is not None:
            return width in self._narrow_layouts and self._has((self._narrow_layouts[width], value_bytes))
        value_bytes = max(value_bytes, 2)
        if self.is_staged(options):
            return self._has((staged_layout, value_bytes))
        needed = [(self._data_layout, value_bytes)]
        if options.strategy == "all_gather":
            needed.append((gather_layout, value_bytes))
        rows = self.bounded_rows(options)
        return rows <= self._rows.get(value_bytes, self._least_rows) and all(map(self._has, needed))

    def has_for_fused_layer(self) -> bool:
        """Whether a MegaMoE would make no buffer."""
        return self._has((self._data_layout, 1))

    def bounded_rows(self, options: DispatchOptions) -> int:
        """Rows that a receive buffer must have for the capacity of a bounded dispatch in layouts of routes, else 0."""
        if options.layout == "slots":
            return self._plan.experts_per_rank * (options.capacity or self._plan.default_slots)
        if options.layout != "expert" or options.sizes != "bounded":
            return 0
        # Who rounds the worst case up to the alignment has a few rows more, that need no copy either.
        most = self._plan.worst_case_rows("expert", options.alignment) + options.alignment
        return min(options.capacity or 0, most)

    def has_for_combine(self, options: CombineOptions, split: bool = False) -> bool:
        """Whether a combine would make no buffer."""
        return self._has(self._combine_key(options, split))

    def _has(self, key: tuple[MakeLayout, int]) -> bool:
        return key in self._buffers

    def _combine_key(self, options: CombineOptions, split: bool) -> tuple[MakeLayout, int]:
        if self.combines_in_turns(options, split) and options.strategy != "reduce_scatter":
            return routes_in_turns_layout if options.per_route else sums_in_turns_layout, options.wire_dtype.itemsize
        by_strategy: dict[str, MakeLayout] = {"reduce_scatter": gather_layout, "all_to_all": route_layout}
        return by_strategy.get(options.strategy, self._data_layout), options.wire_dtype.itemsize

    @property
    def have_arrivals(self) -> bool:
        """Whether rows come to some of them word by word."""
        return any(self._arrives(layout) for layout, _ in self._buffers)

    def set_arrivals_back(self) -> None:
        """Make all rows absent that say by themselves that they are here, while no rank sends any."""
        with torch.inference_mode():  # calls in that mode may have made the memory
            for (layout, _), buffer in self._buffers.items():
                if self._arrives(layout):
                    for turn in range(TURNS):
                        buffer.bytes(*arriving_part(buffer.layout, ARRIVING[layout], turn)).fill_(ABSENT_BYTE)

    def _arrives(self, layout: MakeLayout) -> bool:
        return layout is staged_layout or (layout in ARRIVING and self._is_eager)

    def take_all(self) -> list[SymmetricBuffer]:
        """Those that exist, for the end: nothing here views them any more."""
        for forget in self.when_grown:
            forget()
        self._receive.clear()
        self._narrow_receive.clear()
        found = list(self._buffers.values())
        self._buffers.clear()
        return found

    def memory(self) -> list[str]:
        """Sizes for people, those included that a first call of its kind will make."""
        kinds: tuple[tuple[MakeLayout, int, str], ...] = (
            (self._data_layout, 2, "FP8, bfloat16 and float16"),
            (self._data_layout, 4, "float32"),
            (route_layout, 2, "combine per route, 2-byte values"),
            (route_layout, 4, "combine per route, float32"),
            (gather_layout, 2, "all_gather and reduce_scatter, 2-byte values"),
            (gather_layout, 4, "all_gather and reduce_scatter, float32"),
        )
        if self._is_eager or self._has((staged_layout, 2)):
            kinds += ((staged_layout, 2, "rows placed on arrival"), (sums_in_turns_layout, 2, "sums in turns"))
        if self.fused:
            kinds = ((self._data_layout, 1, "received rows in FP8, and results that come home"),)
        lines = []
        for layout, value_bytes, what in kinds:
            size = layout(self._plan, value_bytes, self._rows.get(value_bytes, self._least_rows)).total_bytes
            when = "" if self._has((layout, value_bytes)) else ", made at the first call that needs it"
            lines.append(f"buffers for {what}: {size / 1e6:.1f} MB{when}")
        return lines


# -- what kernels ask of memory that users give ------------------------------------------------------------------


def require_bulk(hidden: int, dtype: torch.dtype) -> None:
    if hidden * dtype.itemsize % BULK_BYTES:
        raise ShapeMismatch(
            f"a row of {hidden} {dtype} is not a multiple of {BULK_BYTES} bytes, which backend nvlink needs; use "
            "backend='collective'"
        )


def require_aligned(tensor: torch.Tensor, name: str) -> None:
    """Raise for a tensor of the caller's that kernels cannot write to."""
    if tensor.data_ptr() % BULK_BYTES:
        raise InvalidArgument(f"{name} begins at no multiple of {BULK_BYTES} bytes, as kernels store rows; align it")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at an address that bulk copies and 16-byte loads take."""
    return tensor.clone() if tensor.data_ptr() % BULK_BYTES else tensor


def address_of(tensor: torch.Tensor | None) -> int:
    """For kernels; null for None."""
    return 0 if tensor is None else tensor.data_ptr()


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None for those of inference mode, which are not counted."""
    return None if tensor.is_inference() else tensor._version
