"""The seam between the calls that users make and the ways in which tokens travel.

A backend prepares calls of one kind once, and then sends them: ``send`` puts a transfer on its way, and
``Sent.receive`` finishes it. The calls of one piece are the sum of their halves. Everything here is plain data and
protocols.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.kernels.common import H200
from tokenloom.plan import COMBINE_STRATEGIES, DISPATCH_STRATEGIES, LAYOUTS

T_co = TypeVar("T_co", covariant=True)

TRANSPORTS = ("collective", "gin", "nvlink")
"""Transports between nodes: torch.distributed, or NCCL's network for transfers that GPUs start (GIN). With
"nvlink" there is none: all ranks reach each other by NVLink."""

Wait = Literal["nothing", "calls", "everything"]
"""How long :meth:`Backend.check` waits: not at all, for the outcomes of all calls, or for the device as well."""


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a backend. Layers ask here and never for a backend's name.

    Attributes:
        layouts: layouts of a dispatch.
        dispatch_strategies, combine_strategies: what may carry a payload.
        dtypes: payloads, besides FP8 with scales, which every backend moves.
        returns_views: rows of a dispatch may be views of the backend's memory.
        receive_buffers: dispatches whose rows are valid at the same time, where rows are views. The rows of dispatch n
            last until dispatch ``n + receive_buffers``.
        overlaps_pieces: transfers run beside computation, so it pays to send a batch in pieces.
        captures: calls of bounded sizes can be captured into CUDA graphs.
        takes_sms: ``num_sms`` of the communicator says how many SMs its kernels take.
        own_node: what carries rows to ranks of the own node: "collective" or "nvlink".
        other_nodes: what carries rows to ranks of other nodes, None if nothing does: one of :data:`TRANSPORTS`.
        reads_on_host: the host learns the outcome of every call before the call returns.
        fused_layer: the backend has ``fused_layer``, see :mod:`tokenloom.backends.peers.fused`.
        weights_from_home: a combine can multiply rows by weights that their home has, and sends along.
        weights_apart: weights can travel apart from rows, by calls of their own.
        own_transport: calls go without collectives of the process group, which could not end without a rank.
        has_rates: calls choose their SMs by rates of the machine, which ``tokenloom tune`` measures.
        gathers_counts: the backend has ``gather_counts``, by which batches are balanced.
        link_gbytes_per_s: what all links of a GPU carry in one direction, the same on all ranks.
    """

    layouts: tuple[str, ...] = LAYOUTS
    dispatch_strategies: tuple[str, ...] = DISPATCH_STRATEGIES
    combine_strategies: tuple[str, ...] = COMBINE_STRATEGIES
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    returns_views: bool = False
    receive_buffers: int = 1
    overlaps_pieces: bool = False
    captures: bool = False
    takes_sms: bool = False
    own_node: str = "collective"
    other_nodes: str | None = "collective"
    reads_on_host: bool = True
    fused_layer: bool = False
    weights_from_home: bool = False
    weights_apart: bool = True
    own_transport: bool = False
    has_rates: bool = False
    gathers_counts: bool = False
    link_gbytes_per_s: float = H200.link_gbytes_per_s

    @property
    def peer_memory(self) -> bool:
        """Whether ranks of one node write each other's memory."""
        return self.own_node == "nvlink"


@dataclass(frozen=True)
class DispatchOptions:
    """The options of one dispatch, equal on all ranks.

    Attributes:
        layout: "token", "expert", "rank" or "slots".
        alignment: rows of which each expert's group is a multiple (layout "expert", else 1).
        sizes: "exact" or "bounded". Layout "slots" is always bounded.
        capacity: most rows of the output, in layout "slots" the places S of each expert. None means no limit (exact
            sizes, or layout "rank").
        to_fp8: the backend quantises x as ``quantize_fp8`` does. Rows are float8_e4m3fn and the handle has scales.
        power_of_two_scales: scales are rounded up to powers of two. False without ``to_fp8``.
        strategy: what carries the payload, see :class:`tokenloom.Strategy`.
        scale_layout: how the scales of FP8 rows lie in layout "slots": "rows", "columns" or "packed". Elsewhere it
            is "rows".
        recipe: which values of FP8 rows share a scale, of :data:`tokenloom.plan.RECIPES`. "block" without FP8.
    """

    layout: str
    alignment: int
    sizes: str
    capacity: int | None
    to_fp8: bool = False
    power_of_two_scales: bool = False
    strategy: str = "dedup"
    scale_layout: str = "rows"
    recipe: str = "block"


@dataclass(frozen=True)
class DispatchOut:
    """Tensors of your own that a dispatch writes its results to, so that a serving loop allocates nothing.

    They need bounded sizes (layout "slots" always has them) and gradients disabled. A field that is None is left to
    the communicator. A given one has exactly the shape, dtype, device and strides that the dispatch would return, and
    ``routed`` then holds this very tensor. The memory stays yours: no later call writes to it unless you pass it
    again. The communicator may still be writing to it until the work of the call is done.

    Attributes:
        tokens: [capacity, H]; layout "rank" [W, M, H], layout "slots" [L, S, H].
        scales: of FP8 rows, as ``Routed.scales``.
        topk_ids: [capacity, K] or [W, M, K], dtype of the ids given (layouts "token" and "rank").
        topk_weights: [capacity, K] or [W, M, K], dtype of the weights given (layouts "token" and "rank").
        num_rows: int32 scalar.
        source_counts: int32 [W].
        expert_counts: int32 [L].
        expert_offsets: int32 [L + 1] (layout "expert").
        slot_ranges: int32 [L, W, 2] (layout "slots").
    """

    tokens: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    num_rows: torch.Tensor | None = None
    source_counts: torch.Tensor | None = None
    expert_counts: torch.Tensor | None = None
    expert_offsets: torch.Tensor | None = None
    slot_ranges: torch.Tensor | None = None


OutputOwner = Literal[False, True, "but rows", "if needed"]
"""Whose the outputs of a dispatch are, see :class:`DispatchKind`."""
ResendTo = Literal["places", "rows"]
"""Where values go that follow a dispatch: to the places of its output, or once to each (token, rank)."""
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rows, or FP8 rows with their scales."""


class Tokens(NamedTuple):
    """The checked tensors of one dispatch on this rank. Not to be changed.

    Attributes:
        x: [T, H], not quantised yet where ``DispatchOptions.to_fp8`` is set.
        scales: float32 [T, H / 128] of an FP8 x, by recipe "row" [T]; else None.
        topk_ids: int32 or int64 [T, K].
        topk_weights: float32 (float64 beside float64 payloads) [T, K], or None.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None


@dataclass(frozen=True)
class DispatchKind:
    """Dispatches that are alike in all but the values of their tensors and the number of tokens.

    Attributes:
        options: equal on all ranks.
        x_dtype, ids_dtype: of the tensors.
        weights_dtype: of the weights; None: there are none.
        with_scales: x is FP8 and comes with scales.
        scale_words: int32 words of a token's scales, where they are packed exponents and the scales have their bits.
        x_needs_grad, weights_need_grad: whether autograd will want a gradient.
        output_owner: True means that outputs are ordinary tensors. "if needed" means that rows and scales may be views
            that no later call overwrites as long as somebody holds them. "but rows" means that rows may still be a
            view, because the caller is done with them in time.
        split: the caller may take long until the second half. Between the halves nothing of ours runs on the GPU.
        sent_ahead: the caller sends these dispatches ahead. Errors of earlier calls can wait for the second half.
        width: values in a row, a multiple of 16 bytes; None: H.
        alike: what else all ranks must mean alike in the call that these dispatches open, by name.
    """

    options: DispatchOptions
    x_dtype: torch.dtype
    ids_dtype: torch.dtype
    weights_dtype: torch.dtype | None = None
    with_scales: bool = False
    scale_words: int | None = None
    x_needs_grad: bool = False
    weights_need_grad: bool = False
    output_owner: OutputOwner = False
    split: bool = False
    sent_ahead: bool = False
    width: int | None = None
    alike: tuple[tuple[str, str], ...] = ()

    @property
    def row_dtype(self) -> torch.dtype:
        """Of the rows that travel."""
        return torch.float8_e4m3fn if self.options.to_fp8 else self.x_dtype

    @property
    def brings_scales(self) -> bool:
        """Whether scales come with the rows."""
        return self.with_scales or self.options.to_fp8


@dataclass(frozen=True)
class CombineOptions:
    """The options of one combine, equal on all ranks.

    Attributes:
        weighted: rows are multiplied by their weights (layouts "expert" and "slots" only).
        wire_dtype: dtype of what travels.
        out_dtype: dtype of the result.
        needs_grad: whether autograd will want a gradient.
        strategy: what carries the payload, see :class:`tokenloom.Strategy`. "all_to_all" sums per route, the others
            sum per rank first, and "per_node" then per node.
        weights_from_home: the weights are a tensor that each rank has for its own tokens, and sends along. False for
            those that came with the dispatch, or after it.
    """

    weighted: bool
    wire_dtype: torch.dtype
    out_dtype: torch.dtype
    needs_grad: bool
    strategy: str = "dedup"
    weights_from_home: bool = False

    @property
    def per_route(self) -> bool:
        """Whether every route's row comes home by itself."""
        return self.strategy == "all_to_all"

    @property
    def per_node(self) -> bool:
        """Whether sums of a node are rounded to the wire's dtype before they are added at home."""
        return self.strategy == "per_node"

    @property
    def mode(self) -> str:
        """The order of the sums, as users name it."""
        return "per_route" if self.per_route else "per_node" if self.per_node else "per_rank"


@dataclass(frozen=True)
class CombineKind:
    """Combines that are alike in all but the values of their tensors and the number of tokens.

    Attributes:
        layout: of the dispatch.
        y_dtype: of the rows.
        options: equal on all ranks.
        alone: nothing is computed meanwhile, so the transfer may take more of the GPU.
        split: as in :class:`DispatchKind`.
        width: values in a row, a multiple of 16 bytes; None: H.
    """

    layout: str
    y_dtype: torch.dtype
    options: CombineOptions
    alone: bool = False
    split: bool = False
    width: int | None = None


@dataclass(frozen=True)
class Upcoming:
    """A call that all ranks are about to open, for a rank that cannot make it.

    Attributes:
        name: what the call is named in errors: "dispatch", "combine", "gradient of dispatch", ...
        options: of a dispatch or combine, else None.
        value_bytes: bytes of a value on the wire.
        awaited: the ranks wait for the outcome of this call before they open another.
        split: it is made in halves.
        width: values in a row of a dispatch; None: H.
    """

    name: str
    options: DispatchOptions | CombineOptions | None = None
    value_bytes: int = 2
    awaited: bool = False
    split: bool = False
    width: int | None = None


@dataclass(frozen=True)
class RoutedCounts:
    """Sizes of a dispatch on this rank, clamped to the capacity so that they are safe to address the output with.

    Attributes:
        num_rows: int (exact sizes) or an int32 scalar on the device (bounded sizes).
        source_counts: int32 [W], (token, rank) rows from each source rank.
        expert_counts: int32 [L], routes of each local expert, without padding.
        expert_offsets: int32 [L + 1], padded starts of the groups (layout "expert"), else None.
        slot_ranges: int32 [L, W, 2], first place and number of places of each source rank in the places of each local
            expert (layout "slots"), else None.
    """

    num_rows: int | torch.Tensor
    source_counts: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor | None
    slot_ranges: torch.Tensor | None = None


class Handle(Protocol):
    """A dispatch as its backend remembers it, for combine and both gradients.

    Attributes:
        options: of the dispatch.
        number: tells this dispatch from others of the communicator, equal on all ranks.
        num_tokens: T at home.
        num_places: rows of the output; L * S in layout "slots".
        masked: ranks that took no part. With more of them, other rows of the same tokens would lie elsewhere.
    """

    options: DispatchOptions
    number: int
    num_tokens: int
    num_places: int
    masked: frozenset[int]

    @property
    def counts(self) -> RoutedCounts:
        """Sizes of the output, on the device."""

    @property
    def topk_ids(self) -> torch.Tensor:
        """int32 [places, K]: local expert of each route, -1 elsewhere (layouts "token" and "rank")."""

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """Received weights: [places, K], or one row per received row [R, K] in layouts "expert" and "slots"."""

    @property
    def scales(self) -> torch.Tensor | None:
        """float32 [places, n] of FP8 rows, else None; n is H / 128, by recipe "row" 1.

        Layout "slots": [L, S, n], by ``scale_layout`` as users see them.
        """

    @property
    def host_counts(self) -> list[int] | None:
        """``counts.expert_counts`` where the host knows them."""

    @property
    def host_offsets(self) -> list[int] | None:
        """``counts.expert_offsets`` where the host knows them."""

    def let_go(self) -> None:
        """Forget the scales: no call needs them."""

    def use_ids(self, ids: torch.Tensor) -> None:
        """Read these equal ids from now on, and not those that were given."""

    def ids(self) -> torch.Tensor:
        """int32 or int64 [T, K]: the ids at home that routed the dispatch.

        Raises:
            InvalidArgument: the backend has not kept them, and the caller has changed them since.
        """

    @property
    def row_tokens(self) -> torch.Tensor:
        """int32 [R]: the token at home that each received row is (layouts "expert" and "slots")."""

    def positions(self) -> torch.Tensor:
        """int64 [R, K], or [R, 1] where a row is not a route: place of each term of a received row.

        -1 is no term. Received rows lie in the order (source rank, token); R may be larger than their number.
        """

    def row_weights(self, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        """Weights [R, K] of received routes -> [num_places] of their rows, 0 where no row lies.

        For layouts with a row per route.

        Raises:
            InvalidArgument: a later call has overwritten what tells where rows lie.
        """

    def route_gradients(self, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The gradient of that: [num_places] -> [R, K] like the received weights."""


class Sent(Protocol[T_co]):
    """The second half of a call."""

    def receive(self) -> T_co:
        """Finish the call and give its result. Called once.

        A call that was not sent with ``split`` is received before another one is opened, except that a layer may send
        a dispatch ahead. With ``split`` at most one more call is opened before, and the two may be received in any
        order.
        """


class PreparedDispatch(Protocol):
    """Makes dispatches of one kind. On "nvlink" it is a StagedDispatch, DirectDispatch or ExactHalves."""

    @property
    def is_stale(self) -> bool:
        """Whether it can be used no longer, and has to be prepared anew."""

    @property
    def waits(self) -> bool:
        """Whether the host waits for counts of each call."""

    def send(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> Sent[tuple[Any, torch.Tensor]]:
        """Open the call and send.

        On return all ranks mean the same call, or will be told that they do not by a later call; x may be overwritten
        by work that is put on the current stream behind it. ``receive`` waits for what the host has to know and gives
        (handle, rows). Places without a row are zero in layout "expert".

        Args:
            tokens: checked, and of this kind.
            out: checked tensors to write results to. The backend fills every field that is given, on the current
                stream, before ``receive`` returns. The caller hands them out instead, and ``rows`` may be its tokens.
            stream: what :meth:`Backend.ready_stream` has just given, or None.
        """


class PreparedCombine(Protocol):
    """Makes combines of one kind. On "nvlink" it is a SumsAtHome, ReduceScatter or RoundedTwice."""

    @property
    def is_stale(self) -> bool:
        """Whether it can be used no longer, and has to be prepared anew."""

    def send(
        self,
        handle: Any,
        rows: torch.Tensor,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        stream: int | None = None,
    ) -> Sent[torch.Tensor]:
        """Open the call and send rows home, where the options say so multiplied by their weights.

        On return the rows are on their way. ``receive`` gives [T, H], which is ``out`` if that is given.

        Args:
            handle: of the dispatch.
            rows: [places, H], or in the shape of the layout; contiguous.
            weights: received ones [R, K], None: those of the handle. With
                ``options.weights_from_home`` float32 [T, K], contiguous.
            out: [T, H] to write to, or None.
            stream: what :meth:`Backend.ready_stream` has just given, or None.
        """


class Members(Protocol):
    """Which ranks take part in the calls of a communicator. All that do change it alike, between calls."""

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that take no part. Where late ranks are masked, a call may add some."""

    def mask(self, ranks: Collection[int]) -> None:
        """Leave out these ranks too, from the next call on.

        Nothing is sent to masked ranks or awaited from them, and they have no tokens. Routes to their experts count
        as -1, in gradients of earlier calls too. Some may be masked already.

        Raises:
            InvalidArgument: a rank that is none, or this one; or this backend cannot leave ranks out.
            PlanMismatch: another rank asks for something else; nothing has changed.
            PeerTimeout: a rank does not ask.
        """

    def unmask(self, ranks: Collection[int]) -> None:
        """Take back ranks that make their communicators again.

        Raises:
            InvalidArgument: a rank that is not masked; or this backend cannot.
            PlanMismatch, PeerTimeout: as :meth:`mask`, and where a rank does not come back; nothing has changed.
        """

    def mask_late(self) -> None:
        """From now on, mask ranks that do not come within the deadline of a call, and finish the call without them.

        Raises:
            InvalidArgument: this backend cannot.
        """


class Backend(Protocol):
    """One way to move tokens. Every method that sends is collective: all ranks call it, in the same order.

    "nvlink" is peers/backend.py, "gin" and "padded" are nodes/backend.py, "collective" is collective.py, and "network"
    is nodes/hierarchical/backend.py.

    A backend tells the other ranks of a fault of its own before its call opens; ``Upcoming`` and :meth:`report_fault`
    are for what fails outside of it. Errors that all ranks raise alike have ``known_to_all`` set.

    ``rows`` is [places, H] below: the output of a dispatch in its layout, with layout "rank" flattened to [W * M, H]
    and layout "slots" to [L * S, H].
    A received row is one (token, rank), in the order (source rank, token).
    """

    name: str
    capabilities: Capabilities

    @property
    def members(self) -> Members:
        """Which ranks take part."""

    def prepare_dispatch(self, kind: DispatchKind) -> PreparedDispatch:
        """Check that this backend can make such dispatches, and prepare them. Collective where it makes memory."""

    def prepare_combine(self, kind: CombineKind, number: int) -> PreparedCombine:
        """Prepare combines, as :meth:`prepare_dispatch` does dispatches.

        Args:
            number: of the dispatch that the next of them belongs to.
        """

    def ready_stream(self, waits: bool = False) -> int | None:
        """Raise known errors of earlier calls. With ``waits``, wait for all earlier calls first.

        Returns:
            The handle of the stream that the next call goes to. None: the call takes the slow path, which asks for
            the stream, for a capture and for open halves.
        """

    def resend(
        self,
        handle: Any,
        values: Rows,
        to: ResendTo = "places",
        strategy: str = "dedup",
        owner: OutputOwner = False,
        stream: int | None = None,
    ) -> Sent[Any]:
        """Send other values [T, H] of the same tokens, or gradients, by the routes of a dispatch.

        To "places", ``receive`` gives [places, H], and scales if there are some. Rows behind the last one in use are
        unspecified. To "rows", a value travels once for each (token, rank), and ``receive`` gives at least one row for
        each row of ``handle.positions()``. Rows of masked ranks are zeros then, and the rows may be a view that the
        next call overwrites.

        Args:
            values: to "rows" also [T, h] of float32, where h is a multiple of 4 and at most 2 * K + 3.
            owner: whose the places are, as ``output_owner`` of a dispatch.
            stream: what :meth:`ready_stream` has just given, or None.
        """

    def send_weight_gradients(self, handle: Any, grad: torch.Tensor) -> Sent[torch.Tensor]:
        """Send the gradient of ``handle.topk_weights`` home. ``receive`` gives [T, K]."""

    def report_fault(self, fault: Exception, upcoming: Sequence[Upcoming]) -> None:
        """Tell the other ranks, which are opening ``upcoming[0]``, that this one failed. Theirs raise PeerError.

        The rest of ``upcoming`` are the calls that follow. This rank takes part in those that the others open before
        they learn of the fault.
        """

    def check(self, wait: Wait) -> None:
        """Raise what earlier calls left behind (CapacityOverflow, PeerTimeout, ...), once, on all ranks alike."""

    def memory(self) -> list[str]:
        """Lines for people: each buffer that outlives a call, its size, and whether it exists yet; SMs of kernels."""

    def close(self) -> None:
        """Release what the backend holds. Calling it twice is fine."""


class GathersCounts(Protocol):
    """A backend that can begin a dispatch by counts, as its capabilities say."""

    def gather_counts(self, kind: DispatchKind, counts: torch.Tensor) -> tuple[torch.Tensor, frozenset[int]]:
        """Begin a dispatch of ``kind`` by counts of all ranks, from which they derive where its rows go.

        Args:
            counts: int64 [n] on the device.

        Returns:
            (int32 [W, n] on the device, ranks that take no part, whose counts are 0). All ranks that do get the
            same.

        Raises:
            PeerError, PlanMismatch, PeerTimeout: what the dispatch would raise.
        """


# -- what carries a payload ------------------------------------------------------------------------------------

SWAPPED = {
    "dedup": "dedup",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "dedup",
    "per_node": "dedup",
}
"""Strategy of the gradient, by that of the call. The gradient of a dispatch is a combine, and the other way round.

All routes of a token to one rank have the same gradient, so where a payload takes a row per route, its gradient takes
one per rank."""
STRATEGY_OF_MODE = {"per_rank": "dedup", "per_route": "all_to_all", "per_node": "per_node"}
"""Strategy of a combine of each ``mode``. A layer may also carry the sums of "per_rank" by "reduce_scatter"."""


def default_mode(able: Capabilities) -> str:
    """The order of a combine's sums where the caller names none: that of one node, else per node."""
    return "per_rank" if "dedup" in able.combine_strategies else "per_node"


def gradient_of_dispatch(able: Capabilities, strategy: str) -> str:
    """Strategy of the gradient of a dispatch, where no combine says how rows come home."""
    swapped = SWAPPED[strategy]
    return swapped if swapped in able.combine_strategies else STRATEGY_OF_MODE[default_mode(able)]


@dataclass(frozen=True)
class Strategy:
    """The primitives that carry a layer's payloads. Only the order of combine's sum depends on them.

    Attributes:
        dispatch: "dedup" sends one row for each (token, rank). "all_gather" sends every rank all tokens, of which it
            takes those it needs. "all_to_all" sends one row for each route (layout "expert").
        combine: "dedup" sends the sum over a token's routes on a rank. "reduce_scatter" sends the same sums in a dense
            [W, M, H]. "all_to_all" sends one row for each route, summed at home in ascending k (layout "expert"), so
            that sums do not depend on where experts are. "per_node" sums the ranks' sums of a node there, and sends
            one row for each (token, node). With these two, gradients of a dispatch come home so too.

    Raises:
        InvalidArgument: another name.
    """

    dispatch: str = "dedup"
    combine: str = "dedup"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dispatch", self.dispatch, DISPATCH_STRATEGIES),
            ("combine", self.combine, COMBINE_STRATEGIES),
        ):
            if value not in known:
                raise InvalidArgument(f"strategy of {name} is {value!r}, expected one of {', '.join(known)}")

    @classmethod
    def default(cls, able: Capabilities) -> Strategy:
        """Give the strategy of a layer that is told none: "dedup" both ways, else sums per node."""
        return cls(combine=STRATEGY_OF_MODE[default_mode(able)])

    @property
    def gradient_of_dispatch(self) -> str:
        """Strategy of the gradient of a dispatch, a combine: it sums per node or per route where combines do."""
        return self.combine if self.combine in ("per_node", "all_to_all") else SWAPPED[self.dispatch]
