"""``Buffer`` in normal mode: dispatch and combine with one row for each (token, rank)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from tokenloom.comm.communicators_by_shape import CommShape, wide_rows
from tokenloom.comm.routed import Routed
from tokenloom.compat.deep_ep import checks
from tokenloom.compat.deep_ep.buffer_base import BufferBase
from tokenloom.compat.deep_ep.checks import Payload
from tokenloom.compat.deep_ep.config import Config, topk_idx_t
from tokenloom.compat.deep_ep.events import EventOverlap
from tokenloom.compat.deep_ep.faults import BadCall, NotServed, naming, require
from tokenloom.compat.deep_ep.handles import Dispatched, Parts, kept_ids, normal_handle
from tokenloom.errors import ShapeMismatch, a_type
from tokenloom.ops.routing import ids_of_ranks, ranks_of_ids
from tokenloom.plan import MAX_TOP_K, align_up

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator

F = TypeVar("F", bound=Callable[..., Any])
Received = tuple[
    Payload,
    torch.Tensor | None,
    torch.Tensor | None,
    "list[int] | None",
    "Parts | None",
    EventOverlap,
]
"""Result of a dispatch."""


def _between_nodes(method: F) -> F:
    """Give the form of a method between nodes, which is the same, for programs that name it.

    It raises BadCall if all ranks of the buffer are on one node.
    """
    name = method.__name__

    @naming(f"Buffer.internode_{name}")
    @wraps(method)
    def call(self: NormalMode, *args: Any, **kwargs: Any) -> Any:
        require(self._num_nodes > 1, f"all ranks are on one node; call {name}, or set_ranks_per_node before")
        return method(self, *args, **kwargs)

    return cast(F, call)


class NormalMode(BufferBase):
    """Dispatch and combine for training and prefill.

    Attributes:
        rank, group_size: of this process, and of the group.
        num_sms: number that clients read and set; see ``set_num_sms``.
    """

    num_sms: ClassVar[int] = 20
    rank: int
    group_size: int
    _num_nodes: int

    @naming("Buffer.get_dispatch_layout")
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where tokens go. Not collective.

        Args:
            topk_idx: int64 [N, K], contiguous; an id outside of 0 .. E - 1 is no route.
            num_experts: E, divisible by the R ranks.
            previous_event: as in :meth:`dispatch`.
            async_finish: as in :meth:`dispatch`.
            allocate_on_comm_stream: as in :meth:`dispatch`.

        Returns:
            num_tokens_per_rank int32 [R]; num_tokens_per_rdma_rank int32, one for each node, None on one node;
            num_tokens_per_expert int32 [E], is_token_in_rank bool [N, R], event. Nodes are those of
            ``set_ranks_per_node``; without it more than 8 ranks count as nodes of 8.
        """
        num_tokens = len(topk_idx) if checks.is_dense(topk_idx) and topk_idx.ndim else 0
        device = topk_idx.device if isinstance(topk_idx, torch.Tensor) else torch.device("cpu")
        checks.ids_of(topk_idx, num_tokens, device)
        checks.number("num_experts", num_experts, 1)
        require(
            num_experts % self.group_size == 0,
            f"num_experts is {num_experts}, {self.group_size} ranks do not divide it",
        )

        def count() -> tuple[torch.Tensor, ...]:
            local = num_experts // self.group_size
            in_rank = ranks_of_ids(topk_idx, local, self.group_size)
            experts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
            flat = topk_idx.clamp(-1, num_experts).remainder(num_experts + 1).flatten()  # the last counts no routes
            experts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
            on_nodes = in_rank.unflatten(1, (self._num_nodes, -1)).any(2).sum(0, dtype=torch.int32)
            return in_rank.sum(0, dtype=torch.int32), on_nodes, experts[:num_experts], in_rank

        streams = (previous_event, async_finish, allocate_on_comm_stream)
        self._stream.check(*streams)
        (per_rank, per_node, per_expert, in_rank), event = self._stream.run(count, (topk_idx,), topk_idx, *streams)
        return per_rank, per_node if self._num_nodes > 1 else None, per_expert, in_rank, event

    @naming("Buffer.dispatch")
    def dispatch(
        self,
        x: Payload,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Received:
        """Send each token to the ranks that hold its experts. Collective.

        Args:
            x: [N, H] contiguous, rows of a multiple of 16 bytes; or (1-byte [N, H], float32 or int32 scales [N, n]).
                N may differ per rank and may be 0.
            handle: handle of an earlier dispatch, to use its layout again. Then pass neither ids nor weights.
            num_tokens_per_rank: from :meth:`get_dispatch_layout`; checked, and counted anew.
            num_tokens_per_rdma_rank: from :meth:`get_dispatch_layout`; checked, and counted anew.
            is_token_in_rank: from :meth:`get_dispatch_layout`. Without ids it says where tokens go. With ids it must
                match them, which is checked on CPUs.
            num_tokens_per_expert: from :meth:`get_dispatch_layout`; its length is E. Without ids it gives the counts
                that are returned.
            topk_idx: int64 [N, K], contiguous; only together with ``topk_weights``.
            topk_weights: float32 [N, K], contiguous; only together with ``topk_idx``.
            expert_alignment: the counts that are returned are rounded up to it; rows are not padded.
            num_worst_tokens: rows of the outputs, the same on all ranks, at least R * N on each; the host then reads
                nothing. With 0, outputs have the rows that arrive.
            config: a ``Config`` or None; otherwise unused.
            previous_event: event to start after; None is the current stream's work so far.
            async_finish: the current stream does not wait; the event says when it is done.
            allocate_on_comm_stream: needs ``previous_event`` and ``async_finish``.

        Returns:
            recv_x (with scales as x has them), in the order source rank, then token; recv_topk_idx int64 [M, K], local
            expert or -1; recv_topk_weights float32 [M, K], 0 where the id is -1; the list of L counts, empty with
            ``num_worst_tokens``; handle; event. If a handle was passed, all but recv_x and the event are None. Rows
            beyond those that arrived have ids of -1 and are otherwise unspecified.
        """
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        device = checks.device_of(x)
        is_plain = config is previous_event is None and not (async_finish or allocate_on_comm_stream)
        payload = x
        if handle is not None:
            if not (is_plain and topk_idx is topk_weights is None and self._fits_again(x, handle)):
                dispatched = _dispatched(self, handle, device)
                with self._calls.report_faults_of(device, dispatched.comm):
                    self._stream.check(*streams)
                    checks.config(config)
                    are_left_out = topk_idx is None and topk_weights is None
                    require(are_left_out, "a handle is given: leave topk_idx and topk_weights out")
                    payload = checks.payload_of(x)
            comm, routed = handle.dispatched.comm, handle.dispatched.routed

            def resend() -> Payload:
                sent = self._by_row(payload, device, comm)
                return checks.received_again(comm.dispatch_again(sent, routed, checks.copies(async_finish)), x)

            rows, event = self._stream.run(resend, (x, routed), comm, *streams)
            return rows, None, None, None, None, event
        sizes, weights = None, topk_weights
        if is_plain and num_tokens_per_rdma_rank is None and not num_worst_tokens:
            layout = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
            sizes = self._sizes_at_a_glance(x, layout, topk_idx, topk_weights, expert_alignment, device)
        if sizes is None:
            experts = num_tokens_per_expert.numel() if checks.is_dense(num_tokens_per_expert) else None
            likely = partial(checks.likely_shape, x, experts, topk_idx, self.group_size)
            with self._calls.report_faults_of(device, shape=likely):
                self._stream.check(*streams)
                checks.config(config)
                payload = checks.payload_of(x)
                tokens = payload[0] if isinstance(payload, tuple) else payload
                num_experts = self._check_layout(tokens, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
                if num_tokens_per_rdma_rank is not None:
                    wanted = [self._num_nodes]
                    checks.like("num_tokens_per_rdma_rank", num_tokens_per_rdma_rank, wanted, torch.int32, device)
                checks.number("expert_alignment", expert_alignment, 1)
                most = self._most(num_worst_tokens, len(tokens))
                require(
                    (topk_idx is None) == (topk_weights is None), "topk_idx and topk_weights: pass both or neither"
                )
                assert is_token_in_rank is not None
                if topk_idx is not None:
                    top_k = checks.ids_of(topk_idx, len(tokens), device)
                    weights = checks.like("topk_weights", topk_weights, topk_idx.shape, torch.float32, device)
                    is_right = self._is_mask(is_token_in_rank, topk_idx, num_experts)
                    require(is_right, "is_token_in_rank is not that of topk_idx")
                else:
                    require(num_worst_tokens == 0, "num_worst_tokens needs topk_idx and topk_weights")
                    top_k = self.group_size
                    if top_k > MAX_TOP_K:
                        raise NotServed(f"a dispatch without topk_idx is served for at most {MAX_TOP_K} ranks")
            sizes = (
                CommShape(num_experts, tokens.shape[1], top_k, wide_rows(tokens.dtype)),
                most or len(tokens),
            )
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        shape, num_tokens = sizes
        options: dict[str, Any] = {"layout": "token", "copy": checks.copies(async_finish)}
        if num_worst_tokens:
            options |= {"sizes": "bounded", "capacity": num_worst_tokens}

        def call() -> tuple[Any, ...]:
            sent = self._by_row(payload, device, None, shape)
            if topk_idx is None:
                with self._calls.report_faults_of(device, shape=shape):
                    ids = ids_of_ranks(is_token_in_rank, shape.num_experts // self.group_size)
            else:
                ids = topk_idx

            def send(comm: Communicator) -> tuple[Routed, Communicator]:
                return comm.dispatch(sent, ids, weights, **options), comm

            routed, comm = self._calls.run(shape, num_tokens, device, send)
            counts: list[int] = []
            if not num_worst_tokens and topk_idx is not None:
                counts = routed.counts_on_host()
            elif not num_worst_tokens:
                counts = self._local_counts(num_tokens_per_expert, device)
            ids = ids if topk_idx is None else kept_ids(ids, routed)
            dispatched = Dispatched(comm, routed, ids, topk_idx is not None)
            return *_received(dispatched, x, counts, expert_alignment), dispatched

        inputs = (x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert)
        (rows, recv_ids, recv_weights, counts, dispatched), event = self._stream.run(
            call, inputs, is_token_in_rank, *streams
        )
        made = normal_handle(dispatched, is_token_in_rank, max(1, self.num_sms // 2), self._num_nodes)
        return rows, recv_ids, recv_weights, counts, made, event

    def _fits_again(self, x: Any, handle: Any) -> bool:
        """Tell at a glance whether other rows may go to the places of a dispatch."""
        if handle.__class__ is not Parts or handle.dispatched.__class__ is not Dispatched:
            return False
        return (
            handle.dispatched.routed.layout == "token"
            and self._communicators is not None
            and checks.sizes_at_a_glance(x) is not None
        )

    def _sizes_at_a_glance(
        self, x: Any, layout: tuple[Any, ...], ids: Any, weights: Any, alignment: object, device: torch.device
    ) -> tuple[CommShape, int] | None:
        """Return the communicator's shape and the number of tokens if a dispatch by ids is right at a glance."""
        sizes, (per_rank, in_rank, per_expert) = checks.sizes_at_a_glance(x), layout
        if sizes is None or alignment.__class__ is not int or alignment < 1 or self._communicators is None:
            return None
        try:
            (num_experts,), (_, top_k) = per_expert.shape, ids.shape
        except (AttributeError, ValueError, RuntimeError):  # no tensor, of other dimensions, or a nested one
            return None
        (num_tokens, hidden, dtype), num_ranks = sizes, self.group_size
        is_right = (
            checks.fits(ids, (num_tokens, top_k), topk_idx_t, device)
            and checks.fits(weights, (num_tokens, top_k), torch.float32, device)
            and checks.fits(per_rank, (num_ranks,), torch.int32, device)
            and checks.fits(in_rank, (num_tokens, num_ranks), torch.bool, device)
            and checks.fits(per_expert, (num_experts,), torch.int32, device)
            and num_experts % num_ranks == 0 < num_experts
            and top_k <= MAX_TOP_K
            and self._is_mask(in_rank, ids, num_experts)
        )
        return (CommShape(num_experts, hidden, top_k, wide_rows(dtype)), num_tokens) if is_right else None

    def _most(self, num_worst_tokens: int, num_tokens: int) -> int:
        """Return the most tokens of a rank, or 0 if the host reads counts.

        If it reads none, the other ranks cannot learn that one has more.
        """
        most = -(-checks.number("num_worst_tokens", num_worst_tokens, 0) // self.group_size)
        if most and num_tokens > most:
            raise ShapeMismatch(
                f"x has {num_tokens} tokens, num_worst_tokens={num_worst_tokens} has room for {most} of each rank; "
                f"pass at least {num_tokens * self.group_size} on all ranks"
            )
        return most

    def _check_layout(
        self,
        tokens: torch.Tensor,
        num_tokens_per_rank: torch.Tensor | None,
        is_token_in_rank: torch.Tensor | None,
        num_tokens_per_expert: torch.Tensor | None,
    ) -> int:
        """Check what ``get_dispatch_layout`` returned, and return E."""
        layout = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        require(
            all(map(checks.is_dense, layout)),
            "num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert are needed where no handle is given",
        )
        assert num_tokens_per_expert is not None
        device = tokens.device
        checks.like("num_tokens_per_rank", num_tokens_per_rank, [self.group_size], torch.int32, device)
        checks.like("is_token_in_rank", is_token_in_rank, [len(tokens), self.group_size], torch.bool, device)
        checks.like(
            "num_tokens_per_expert", num_tokens_per_expert, [num_tokens_per_expert.numel()], torch.int32, device
        )
        num_experts, size = num_tokens_per_expert.numel(), self.group_size
        require(
            num_experts and num_experts % size == 0, f"{size} ranks do not divide num_tokens_per_expert {num_experts}"
        )
        return num_experts

    def _is_mask(self, is_token_in_rank: torch.Tensor, ids: torch.Tensor, num_experts: int) -> bool:
        """Tell whether the mask matches the ids, by which tokens travel. True on GPUs, where the check would wait."""
        if ids.is_cuda or bool((ids >= num_experts).any()):  # ids that are too big have an error of their own
            return True
        mask = ranks_of_ids(ids, num_experts // self.group_size, self.group_size)
        return torch.equal(mask, is_token_in_rank)

    def _local_counts(self, num_tokens_per_expert: torch.Tensor, device: torch.device) -> list[int]:
        """Add the counts of all ranks for each local expert. Without ids only the ranks' own counts are known."""
        meeting = self._calls.meeting(device)
        counts = meeting.all_gather_object(num_tokens_per_expert.tolist(), "counts of Buffer.dispatch")
        total = torch.tensor(counts, dtype=torch.int64, device="cpu").sum(0).view(self.group_size, -1)
        return total[self.rank].tolist()

    @naming("Buffer.combine")
    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows home and sum them over ranks in float32, unweighted. Collective.

        Args:
            x: [M, H] contiguous, a row for each row that the dispatch received. With ``num_worst_tokens`` rows behind
                the last received one may be left out.
            handle: handle of the dispatch.
            topk_weights: float32 [M, K], summed as the rows are, or None.
            bias: [N, H] of x's dtype, or two, to add to the sum before it is rounded.
            config: as in :meth:`dispatch`.
            previous_event: as in :meth:`dispatch`.
            async_finish: as in :meth:`dispatch`.
            allocate_on_comm_stream: as in :meth:`dispatch`.

        Returns:
            combined_x [N, H] of x's dtype, combined_topk_weights float32 [N, K] or None, event.
        """
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        rows, biases, missing = x, None, 0
        is_plain = bias is config is previous_event is None and not (async_finish or allocate_on_comm_stream)
        if not (is_plain and self._fits_combine(x, handle, topk_weights)):
            device = checks.device_of(x)
            dispatched = _dispatched(self, handle, device, "combine")
            routed, comm = dispatched.routed, dispatched.comm
            with self._calls.report_faults_of(device, comm, "combine"):
                self._stream.check(*streams)
                checks.config(config)
                rows = checks.rows_of(x, routed)
                missing, biases = routed.shape[0] - len(rows), checks.biases_of(bias, rows, len(dispatched.ids))
                if topk_weights is not None:
                    require(dispatched.with_ids, "topk_weights: the dispatch had none, leave them out")
                    wanted = [len(x), comm.plan.top_k]
                    topk_weights = checks.like("topk_weights", topk_weights, wanted, torch.float32, device)
        dispatched = handle.dispatched
        inputs, rest = (x, dispatched.routed, topk_weights, bias), (self, rows, topk_weights, biases, missing)
        (out, weights), event = self._stream.run(dispatched.combine, inputs, dispatched.comm, *streams, *rest)
        return out, weights, event

    def _fits_combine(self, x: Any, handle: Any, topk_weights: Any) -> bool:
        """Tell at a glance whether a combine is right, and no row is left out."""
        if handle.__class__ is not Parts or self._communicators is None:
            return False
        dispatched = handle.dispatched
        routed = dispatched.routed if dispatched.__class__ is Dispatched else None
        if routed is None or routed.layout != "token" or not checks.fits_rows(x, routed):
            return False
        if topk_weights is None:
            return True
        wanted = routed.shape[0], dispatched.comm.plan.top_k
        return dispatched.with_ids and checks.fits(topk_weights, wanted, torch.float32, x.device)

    internode_dispatch, internode_combine = _between_nodes(dispatch), _between_nodes(combine)


def _received(
    dispatched: Dispatched, x: object, counts: list[int], alignment: int
) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, list[int]]:
    """Make the results of a dispatch: rows, ids, weights, rounded counts."""
    routed = dispatched.routed
    if alignment > 1:
        counts = [align_up(count, alignment) for count in counts]
    ids = routed.unused_ids_marked() if dispatched.with_ids else None
    return checks.received(routed, x), ids, routed.topk_weights, counts


def _dispatched(buffer: BufferBase, handle: object, device: torch.device, name: str = "dispatch") -> Dispatched:
    """Find the dispatch that a handle of this mode is of, or raise."""
    with buffer._calls.report_faults_of(device, None, name):
        if not isinstance(handle, Parts) or handle.dispatched.routed.layout != "token":
            raise BadCall(f"handle is {a_type(handle)}, expected what Buffer.dispatch returned")
        return handle.dispatched
