"""``Buffer`` in low-latency mode: fixed places for each local expert, and calls that a hook finishes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tokenloom import DispatchOut
from tokenloom.comm.communicators_by_shape import CommShape, wide_rows
from tokenloom.comm.routed import Routed
from tokenloom.compat.deep_ep import checks
from tokenloom.compat.deep_ep.buffer_base import BufferBase
from tokenloom.compat.deep_ep.checks import Payload
from tokenloom.compat.deep_ep.config import most_sms, topk_idx_t
from tokenloom.compat.deep_ep.events import EventOverlap
from tokenloom.compat.deep_ep.faults import BadCall, NotServed, naming, refuse, require
from tokenloom.compat.deep_ep.handles import LOW_LATENCY_PARTS as PARTS
from tokenloom.compat.deep_ep.handles import Dispatched, Parts, low_latency_handle
from tokenloom.errors import ShapeMismatch, a_type
from tokenloom.ops.quant.scale_layouts import empty_scales
from tokenloom.plan import FP8_BLOCK

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator

Hook = Callable[[], None]
MAX_FORMS = 64
"""Forms of dispatches that are remembered. A program has a few."""


class LowLatencyMode(BufferBase):
    """Dispatch and combine for decode, and the ranks that they go on without.

    Attributes:
        rank, group_size: of this process, and of the group.
        enable_shrink: whether ranks may be masked.
    """

    rank: int
    group_size: int
    enable_shrink: bool
    _forms: dict[object, _Form]

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return bytes to pass as ``num_rdma_bytes``: two buffers of places for bfloat16 rows.

        tokenloom allocates nothing of that size when the buffer is made.
        """
        places = num_experts // num_ranks * num_ranks * num_max_dispatch_tokens_per_rank
        return 2 * places * (hidden * 2 + checks.ROW_BYTES)

    @naming("Buffer.low_latency_dispatch")
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **others: Any,
    ) -> tuple[Payload, torch.Tensor, Parts, EventOverlap, Hook | None]:
        """Send each token to the places of its experts. Collective; the host reads nothing.

        Args:
            x: bfloat16 [N, H] contiguous; H a multiple of 128 with ``use_fp8``.
            topk_idx: int64 [N, K], contiguous; distinct ids in a row, -1 is no route.
            num_max_dispatch_tokens_per_rank: M, at least N, the same on all ranks.
            num_experts: E.
            cumulative_local_expert_recv_stats: int32 [L], to which the counts are added, or None.
            dispatch_wait_recv_cost_stats: not served; None.
            use_fp8: quantise x on the way, with a scale per 128 values.
            round_scale: scales are powers of two.
            use_ue8m0: scales are packed exponents; needs ``round_scale``.
            async_finish: the current stream does not wait; the event says when it is done.
            return_recv_hook: return at once; results are valid after the hook was called.
            **others: upstream's other options (``use_nvfp4`` ...), which are not served.

        Returns:
            recv_x: [L, R * M, H], of which the first recv_count[e] of expert e are rows, in the order source rank,
            token. With ``use_fp8`` (float8_e4m3fn, scales [L, R * M, H / 128] float32, or int32 [.., H / 512], with
            stride 1 along rows). recv_count int32 [L]; handle; event; hook or None. All are tensors of the caller's.
        """
        stats = cumulative_local_expert_recv_stats
        options = (num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0)
        form = None
        if stats is dispatch_wait_recv_cost_stats is None and not (async_finish or return_recv_hook or others):
            form = self._form_at_a_glance(x, topk_idx, options)
        if form is None:
            device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
            likely = partial(checks.likely_shape, x, num_experts, topk_idx, num_sms=most_sms())
            with self._calls.report_faults_of(device, awaited=False, shape=likely):
                refuse(dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats, **others)
                require(
                    not (async_finish and return_recv_hook), "async_finish and return_recv_hook exclude each other"
                )
                require(round_scale or not use_ue8m0, "use_ue8m0 needs round_scale=True")
                require(use_fp8 or not round_scale, "round_scale needs use_fp8=True")
                x = checks.plain(checks.tokens_of(x))
                num_tokens, hidden = x.shape
                top_k = checks.ids_of(topk_idx, num_tokens, device)
                most = checks.number("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
                checks.number("num_experts", num_experts, 1)
                if num_tokens > most:
                    raise ShapeMismatch(
                        f"x has {num_tokens} tokens, num_max_dispatch_tokens_per_rank is {most}; pass more"
                    )
                if num_experts % self.group_size:
                    raise BadCall(f"num_experts is {num_experts}, {self.group_size} ranks do not divide it")
                if use_fp8 and hidden % FP8_BLOCK:
                    raise NotServed(f"use_fp8 needs a hidden size that is a multiple of {FP8_BLOCK}, x has {hidden}")
                if stats is not None:
                    local = [num_experts // self.group_size]
                    checks.like("cumulative_local_expert_recv_stats", stats, local, torch.int32, device)
            form = _Form(hidden, top_k, x.dtype, self.group_size, *options)
            if _are_plain(options):
                if len(self._forms) >= MAX_FORMS:
                    self._forms.clear()
                self._forms[hidden, top_k, x.dtype, topk_idx.dtype, options] = form
        shape, most = form.shape, form.most
        if not return_recv_hook:

            def whole() -> tuple[Any, ...]:
                device = topk_idx.device
                rows, out = form.make_room(device)

                def dispatch(comm: Communicator) -> Dispatched:
                    return Dispatched(comm, comm.dispatch(x, topk_idx, **form.options, out=out), topk_idx)

                dispatched = self._calls.run(shape, most, device, dispatch)
                if stats is not None:
                    stats.add_(dispatched.routed.expert_counts)
                return rows, out.expert_counts, dispatched

            inputs = (x, topk_idx, stats)
            (rows, counts, dispatched), event = self._stream.run(whole, inputs, x, None, async_finish, False)
            made = low_latency_handle(dispatched, most, shape.hidden, shape.num_experts)
            return rows, counts, made, event, None
        device = x.device
        rows, out = form.make_room(device)

        def send(comm: Communicator) -> tuple[Communicator, Any]:
            return comm, comm.send_dispatch(x, topk_idx, None, **form.options, out=out)

        self._stream.order_behind(device)
        with torch.no_grad():
            comm, pending = self._calls.run(shape, most, device, send)
        taken: list[Routed] = []

        @naming("Buffer.low_latency_dispatch, hook")
        def hook() -> None:
            if not taken:
                with torch.no_grad():
                    taken.append(pending.receive())
                    if stats is not None:
                        stats.add_(taken[0].expert_counts)

        def ready() -> Routed:
            require(taken, "the hook of this dispatch was not called yet; call it before its handle is used")
            return taken[0]

        hooked: Any = _Hooked(comm, topk_idx, ready)
        made = low_latency_handle(hooked, most, shape.hidden, num_experts)
        assert out.expert_counts is not None
        return rows, out.expert_counts, made, EventOverlap(), hook

    def _form_at_a_glance(self, x: Any, topk_idx: Any, options: tuple[Any, ...]) -> _Form | None:
        """Find the form of dispatches like this one, if it is right at a glance.

        Of wrong strides the communicator says what a check would say.
        """
        if not (x.__class__ is torch.Tensor is topk_idx.__class__) or self._communicators is None:
            return None
        try:
            (num_tokens, hidden), (num_ids, top_k) = x.shape, topk_idx.shape
            form = self._forms.get((hidden, top_k, x.dtype, topk_idx.dtype, options))
        except (TypeError, ValueError, RuntimeError):  # not to be looked up, of other dimensions, or a nested tensor
            return None
        if form is None or not num_ids == num_tokens <= form.most or topk_idx.device != x.device:
            return None
        return form if _are_plain(options) else None

    @naming("Buffer.low_latency_combine")
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Bring rows home, weighted. Collective; the host reads nothing. Weights travel with the call.

        Args:
            x: bfloat16 [L, R * M, H] contiguous, a row for each place of the dispatch.
            topk_idx: int64 [N, K], the ids of the dispatch.
            topk_weights: float32 [N, K], contiguous.
            handle: handle of the dispatch.
            use_logfmt: not served; False.
            zero_copy: read the tensor from :meth:`get_next_low_latency_combine_buffer` instead of x.
            async_finish: as in :meth:`low_latency_dispatch`.
            return_recv_hook: as in :meth:`low_latency_dispatch`.
            out: [N, H] of x's dtype to write the result to, or None.
            combine_wait_recv_cost_stats: not served; None.
            **others: options of forks (``overlap``, ``comp_signal`` ...), which are not served.

        Returns:
            combined_x [N, H] of x's dtype, which is ``out`` if there is one; event; hook or None.
        """
        rows, weights = x, topk_weights
        is_plain = not (use_logfmt or zero_copy or async_finish or return_recv_hook or others)
        if not (
            is_plain
            and combine_wait_recv_cost_stats is None
            and self._fits_low_latency_combine(x, topk_idx, topk_weights, handle, out)
        ):
            device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
            likely = checks.likely_shape(None, num_sms=most_sms())
            with self._calls.report_faults_of(device, None, "combine", False, _first_call, likely):
                if not isinstance(handle, Parts) or len(handle) != PARTS:
                    raise BadCall(f"handle is {a_type(handle)}, expected what low_latency_dispatch returned")
                routed, comm, ids = handle.dispatched.routed, handle.dispatched.comm, handle.dispatched.ids
            with self._calls.report_faults_of(device, comm, "combine", False, _first_call):
                refuse(use_logfmt=use_logfmt, combine_wait_recv_cost_stats=combine_wait_recv_cost_stats, **others)
                require(
                    not (async_finish and return_recv_hook), "async_finish and return_recv_hook exclude each other"
                )
                rows = checks.tensor("x", vars(handle).get("room", x) if zero_copy else x)
                rows = checks.like("x", rows, routed.shape, rows.dtype, device)
                checks.like("topk_idx", topk_idx, ids.shape, ids.dtype, device)
                weights = checks.like("topk_weights", topk_weights, ids.shape, torch.float32, device)
                if out is not None:
                    checks.like("out", out, [len(ids), rows.shape[2]], rows.dtype, device)
        comm, routed = handle.dispatched.comm, handle.dispatched.routed
        routed.replace_ids(topk_idx)
        if not return_recv_hook:
            inputs, rest = (rows, weights, routed, out), (comm, rows, weights, routed, out)
            home, event = self._stream.run(_home, inputs, comm, None, async_finish, False, *rest)
            return home, event, None
        device = comm.device
        shape = len(topk_idx), routed.shape[2]
        home = torch.empty(shape, dtype=rows.dtype, device=device) if out is None else out
        self._stream.order_behind(device)
        with torch.no_grad():
            pending = comm.send_combine(rows, routed, topk_weights=weights, out=home)
        done: list[bool] = []

        @naming("Buffer.low_latency_combine, hook")
        def hook() -> None:
            if not done:
                with torch.no_grad():
                    pending.receive()
                done.append(True)

        return home, EventOverlap(), hook

    def _fits_low_latency_combine(self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, out: Any) -> bool:
        """Tell at a glance whether the tensors of a combine are right.

        Of wrong sizes, dtypes and strides of weights the communicator says what a check would say.
        """
        if handle.__class__ is not Parts or handle.number != PARTS or self._communicators is None:
            return False
        dispatched = handle.dispatched
        if dispatched.__class__ is not Dispatched or not checks.fits_rows(x, dispatched.routed):
            return False
        device, ids = x.device, dispatched.ids
        return (
            checks.fits(topk_idx, ids.shape, topk_idx_t, device)
            and topk_weights.__class__ is torch.Tensor
            and topk_weights.device == device
            and (out is None or checks.fits(out, (ids.shape[0], x.shape[2]), x.dtype, device))
        )

    def get_next_low_latency_combine_buffer(self, handle: Any) -> torch.Tensor:
        """Return a bfloat16 tensor [L, R * M, H] for the experts' rows of a combine with ``zero_copy``."""
        require(isinstance(handle, Parts) and len(handle) == PARTS, "handle: expected that of low_latency_dispatch")
        if "room" not in vars(handle):
            routed = handle.dispatched.routed
            shape, device = routed.tokens.shape, handle.dispatched.comm.device
            vars(handle)["room"] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return vars(handle)["room"]

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: no call needs a clean buffer."""

    # -- ranks that are gone --------------------------------------------------------------------------------

    @naming("Buffer.low_latency_update_mask_buffer")
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Go on without a rank from the next call on. All ranks that stay call it alike.

        Raises:
            BadCall: the buffer was made without ``enable_shrink``, there is no such rank, it is this one, or no call
                was made yet.
            NotServed: ``mask`` is False and the rank is masked: make new buffers on all ranks to take one back.
        """
        self._require_shrink()
        others = [rank for rank in range(self.group_size) if rank != self.rank]
        require(rank_to_mask in others, f"rank_to_mask is {rank_to_mask!r}, expected one of {others}")
        require(not mask or self._calls.all(), "no call was made yet; make one on all ranks before masking any")
        if not mask and rank_to_mask in self._masked():
            raise NotServed("a masked rank cannot be unmasked; make new buffers on a new process group of all ranks")
        if mask:
            for comm in self._calls.all():  # a communicator may have masked the rank by itself
                if rank_to_mask not in comm.masked_ranks():
                    comm.mask_ranks([rank_to_mask])

    @naming("Buffer.low_latency_query_mask_buffer")
    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for masked ranks and 0 for the others to ``mask_status``, int32 [R].

        Raises:
            BadCall: the buffer was made without ``enable_shrink``.
        """
        self._require_shrink()
        checks.like("mask_status", mask_status, [self.group_size], torch.int32, mask_status.device)
        masked = self._masked()
        mask_status.copy_(torch.tensor([r in masked for r in range(self.group_size)], dtype=torch.int32, device="cpu"))

    @naming("Buffer.low_latency_clean_mask_buffer")
    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks, which is done already where none is masked.

        Raises:
            BadCall: the buffer was made without ``enable_shrink``. NotServed: ranks are masked.
        """
        self._require_shrink()
        for rank in self._masked():
            self.low_latency_update_mask_buffer(rank, False)

    def _masked(self) -> list[int]:
        return sorted({rank for comm in self._calls.all() for rank in comm.masked_ranks()})

    def _require_shrink(self) -> None:
        require(self.enable_shrink, "masks need a buffer that was made with enable_shrink=True")


def _are_plain(options: tuple[Any, ...]) -> bool:
    """Tell whether options have their classes. Others may equal them: 1 is True, and True is no number of tokens."""
    most, num_experts, use_fp8, round_scale, use_ue8m0 = options
    are_numbers = most.__class__ is num_experts.__class__ is int
    return are_numbers and use_fp8.__class__ is round_scale.__class__ is use_ue8m0.__class__ is bool


def _first_call(comm: Communicator) -> str:
    return comm.first_call_of_combine()


def _home(
    comm: Communicator, rows: torch.Tensor, weights: torch.Tensor, routed: Routed, out: torch.Tensor | None
) -> torch.Tensor:
    """Combine rows with weights from home."""
    return comm.combine(rows, routed, topk_weights=weights, out=out)


class _Hooked:
    """Dispatch whose result comes with its hook."""

    def __init__(self, comm: Communicator, ids: torch.Tensor, ready: Callable[[], Routed]) -> None:
        self.comm, self.ids, self._ready = comm, ids, ready

    @property
    def routed(self) -> Routed:
        return self._ready()


class _Form:
    """Dispatches that are alike, but for their tokens. The host would take long to describe them at each call.

    Attributes:
        shape: of the communicator.
        most: tokens of a rank.
        options: of ``Communicator.dispatch``.
    """

    def __init__(
        self,
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
        num_ranks: int,
        most: int,
        num_experts: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> None:
        self._local, places, self.most = num_experts // num_ranks, num_ranks * most, most
        self.shape = CommShape(num_experts, hidden, top_k, wide_rows(dtype), most_sms())
        self.options: dict[str, Any] = {"layout": "slots", "capacity": places}
        self._rows, self._dtype = (self._local, places, hidden), checks.FP8 if use_fp8 else dtype
        self._scales: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None
        if use_fp8:
            scale_layout = "packed" if use_ue8m0 else "columns"
            self.options |= {"to_fp8": True, "power_of_two_scales": round_scale, "scale_layout": scale_layout}
            like = empty_scales(scale_layout, [*self._rows[:2], hidden // FP8_BLOCK], torch.device("meta"))
            self._scales = tuple(like.shape), like.stride(), like.dtype

    def make_room(self, device: torch.device) -> tuple[Payload, DispatchOut]:
        """Make new tensors for results: (as the client gets them, as a dispatch takes them)."""
        rows = torch.empty(self._rows, dtype=self._dtype, device=device)
        counts = torch.empty(self._local, dtype=torch.int32, device=device)
        if self._scales is None:
            return rows, DispatchOut(tokens=rows, expert_counts=counts)
        shape, stride, dtype = self._scales
        scales = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return (rows, scales), DispatchOut(tokens=rows, scales=scales, expert_counts=counts)
