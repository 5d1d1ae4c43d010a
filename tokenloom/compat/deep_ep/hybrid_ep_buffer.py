"""``deep_ep.HybridEPBuffer``: dispatch and combine with rows grouped by local expert, routed by maps or by ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tokenloom.comm.communicators_by_shape import CommShape, wide_rows
from tokenloom.comm.routed import Routed
from tokenloom.compat.deep_ep import checks
from tokenloom.compat.deep_ep.buffer_base import BufferBase
from tokenloom.compat.deep_ep.config import most_sms
from tokenloom.compat.deep_ep.faults import BadCall, NotServed, naming, refuse, require
from tokenloom.compat.deep_ep.handles import Dispatched, Parts, kept_ids
from tokenloom.compat.deep_ep.routing_maps import Routes, dense, indices_to_map
from tokenloom.errors import ShapeMismatch, a_type
from tokenloom.plan import align_up

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator

__all__ = ["HybridEPBuffer", "HybridEpConfigInstance", "indices_to_map"]

HANDLE_PARTS = 12
DEFAULT_SMS = 24
"""SMs of a kernel if a client names none."""
Permuted = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None", torch.Tensor, Parts]
"""Result of a dispatch: rows, their probs, their scales, counts of experts, handle."""


class HybridEpConfigInstance(SimpleNamespace):
    """Sizes that clients read: ``hidden_dim``, ``max_num_of_tokens_per_rank``, ``num_of_experts_per_rank``."""


class HybridEPBuffer(BufferBase):
    """Moves tokens by the calls of ``deep_ep.HybridEPBuffer`` that permute rows.

    Making one sends and allocates nothing. K is at most 32. A row that does not fit is an error at a later call.

    Args:
        group: the process group, over gloo for CPU tensors, over NCCL or gloo for CUDA tensors.
        hidden_dim: kept for the client; calls may have others.
        max_num_of_tokens_per_rank: kept for the client. Calls may have more tokens. With ``non_blocking`` all ranks
            must then have more at once: no rank waits to learn that another has more.
        num_local_experts: L.
        use_fp8: calls pass FP8 rows with scales.
        num_sms_dispatch_api: SMs of a kernel, at most 64; None: 24. The larger of this and the next counts.
        num_sms_combine_api: as ``num_sms_dispatch_api``.
        **others: settings of upstream's kernels and buffers, which are unused.

    Attributes:
        group: the argument.
        configurer: its ``buffer_config`` has the sizes so far.
    """

    @naming("HybridEPBuffer")
    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(group, True, {"num_sms": _sms_for(num_sms_dispatch_api, num_sms_combine_api)})
        self.group_size, self.rank = group.size(), group.rank()
        self.use_fp8 = use_fp8
        sizes = HybridEpConfigInstance(
            hidden_dim=hidden_dim,
            max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
            num_of_experts_per_rank=checks.number("num_local_experts", num_local_experts, 1),
        )
        self.configurer = SimpleNamespace(buffer_config=sizes)

    @naming("HybridEPBuffer.dispatch_with_permute")
    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | torch.Tensor | None = None,
        pad_multiple: int | None = None,
        handle: Any = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Any = None,
        use_host_meta: bool = True,
        num_of_tokens_per_rank: int | None = None,
        **others: Any,
    ) -> Permuted:
        """Send each token to its experts, whose rows are grouped and padded. Collective.

        Args:
            hidden: [N, H], rows of a multiple of 16 bytes; FP8 with ``scaling_factor``.
            topk_idx: int64 [N, K]; or ``routing_map``.
            topk_weights: float32 [N, K]; or ``probs``.
            num_of_experts_per_rank: L; None takes the buffer's.
            num_of_experts: E, which is L times R; None is not checked.
            use_fp8: whether hidden is FP8; None takes the buffer's.
            routing_map: bool [N, E].
            probs: float32 [N, E].
            scaling_factor: float32 [N, H / 128].
            num_permuted_tokens: with ``non_blocking``, the rows of the outputs, a multiple of ``pad_multiple``. With a
                handle, the number of its rows. Otherwise unused.
            pad_multiple: rows of which each expert's group is a multiple; None is 1.
            handle: handle of an earlier dispatch, to use its layout again. Then pass no routes. Weights may differ.
            non_blocking: the host reads nothing.
            fuse_permute_dispatch: unused hint for upstream's kernels.
            num_dispatched_tokens: unused.
            use_host_meta: unused.
            num_of_tokens_per_rank: the most tokens of any rank, the same on all; N is at most as large. With
                ``non_blocking`` this makes room for them. Otherwise unused: ranks may differ in N without it.
            **others: not served.

        Returns:
            Rows, grouped by local expert, in the order source rank, token; probs float32 [rows], or None without
            weights; scales or None; tokens_per_expert int64 [L], padded, in pinned host memory (in plain memory
            without CUDA; on the device with ``non_blocking``); handle.
        """
        device = checks.device_of(hidden)
        comm = handle.dispatched.comm if isinstance(handle, Parts) else None
        local = num_of_experts_per_rank
        experts = self._experts(local) if local is None or isinstance(local, int) else None
        likely = partial(checks.likely_shape, hidden, experts, topk_idx)
        with self._calls.report_faults_of(device, comm, shape=likely):
            refuse(**others)
            hidden = hidden.contiguous() if checks.is_dense(hidden) else hidden
            payload = checks.payload_of(hidden if scaling_factor is None else (hidden, scaling_factor))
            payload = self._by_row(payload, device, comm)
            fp8 = self.use_fp8 if use_fp8 is None else use_fp8
            require(fp8 == isinstance(payload, tuple), f"use_fp8 is {fp8}, hidden is {hidden.dtype}")
            alignment = 1 if pad_multiple is None else checks.number("pad_multiple", pad_multiple, 1)
            slots = 0
            if num_of_tokens_per_rank is not None:
                slots = checks.number("num_of_tokens_per_rank", num_of_tokens_per_rank, 1)
                require(len(hidden) <= slots, f"num_of_tokens_per_rank is {slots}, hidden has {len(hidden)} tokens")
            if handle is not None:
                _check_handle(handle, pad_multiple)
                require(topk_idx is None and routing_map is None, "a handle is given: leave the routes out")
                dispatched = handle.dispatched
                _check_rows(num_permuted_tokens, dispatched.routed.shape[0])
                weights = _weights(dispatched.ids, topk_weights, probs, dispatched.comm.plan.num_experts, device)
            else:
                num_experts = self._num_experts(num_of_experts_per_rank, num_of_experts, routing_map)
                routes = Routes(topk_idx, topk_weights, routing_map, probs, num_experts, len(hidden), device)
                top_k, most = routes.width(non_blocking), len(hidden)
                capacity = None
                if non_blocking:  # the others cannot learn that a rank needs more room
                    most = max(most, slots, self.configurer.buffer_config.max_num_of_tokens_per_rank)
                    capacity = checks.number("num_permuted_tokens", num_permuted_tokens, 1)
                    require(capacity % alignment == 0, f"num_permuted_tokens {capacity} is no multiple of {alignment}")
        if handle is not None:
            resend = lambda: _resend(handle, payload, weights)  # noqa: E731
            read = (payload, weights, dispatched.routed)
            return self._stream.run(resend, read, dispatched.comm, None, False, False)[0]
        options: dict[str, Any] = {"layout": "expert", "alignment": alignment, "copy": "if_needed"}
        if capacity is not None:
            options |= {"sizes": "bounded", "capacity": capacity}
        shape = CommShape(num_experts, hidden.shape[1], None if topk_idx is None else top_k, wide_rows(hidden.dtype))

        def send(comm: Communicator) -> tuple[Communicator, Routed, torch.Tensor]:
            ids, weights = routes.by_token(comm.plan.top_k)
            return comm, comm.dispatch(payload, ids, weights, **options), ids

        def first() -> Permuted:
            comm, routed, ids = self._calls.run(shape, most, device, send, top_k)
            if ids is topk_idx:
                ids = kept_ids(ids, routed)
            self._note_sizes(comm)
            return _permuted(_handle(Dispatched(comm, routed, ids), alignment), routed, routes.weighted)

        inputs = (payload, topk_idx, topk_weights, routing_map, probs)
        return self._stream.run(first, inputs, hidden, None, False, False)[0]

    @naming("HybridEPBuffer.combine_with_unpermute")
    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: Any = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: Any = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows home and sum them in float32, unweighted. Collective.

        Args:
            hidden: [rows, H], a row for each row of the dispatch.
            probs: float32 [rows], brought home as well, or None.
            handle: handle of the dispatch.
            pad_multiple: that of the dispatch, or None.
            fuse_unpermute_combine: unused hint for upstream's kernels.
            num_dispatched_tokens: unused.
            **others: not served.

        Returns:
            [N, H] of hidden's dtype; probs float32 [N, E], 0 where there is no route, or None.
        """
        device = checks.device_of(hidden)
        with self._calls.report_faults_of(device, None, "combine", shape=partial(checks.likely_shape, hidden)):
            _check_handle(handle, pad_multiple)
        dispatched: Dispatched = handle.dispatched
        comm, routed = dispatched.comm, dispatched.routed
        with self._calls.report_faults_of(device, comm, "combine"):
            refuse(**others)
            rows = checks.tokens_of(checks.tensor("hidden", hidden).contiguous(), "hidden").detach()
            if rows.shape != routed.tokens.shape:
                raise ShapeMismatch(
                    f"hidden is {list(rows.shape)}, expected {list(routed.tokens.shape)}, as was received"
                )
            if probs is not None:
                probs = checks.tensor("probs", probs).contiguous()
                probs = checks.like("probs", probs, [len(rows)], torch.float32, device)

        def call() -> tuple[torch.Tensor, torch.Tensor | None]:
            out = comm.combine(rows, routed, weighted=False)
            if probs is None:
                return out, None
            return out, dense(comm.combine_weights(probs, routed), dispatched.ids, comm.plan.num_experts)

        return self._stream.run(call, (rows, probs, routed), comm, None, False, False)[0]

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotServed. Use :meth:`dispatch_with_permute`."""
        raise NotServed("HybridEPBuffer.dispatch is not served by tokenloom; use dispatch_with_permute")

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotServed. Use :meth:`combine_with_unpermute`."""
        raise NotServed("HybridEPBuffer.combine is not served by tokenloom; use combine_with_unpermute")

    def _num_experts(self, local: int | None, num_experts: int | None, routing_map: torch.Tensor | None) -> int:
        if local is not None:
            checks.number("num_of_experts_per_rank", local, 1)
        total = self._experts(local)
        require(num_experts in (None, total), f"num_of_experts is {num_experts}, {self.group_size} ranks have {total}")
        if checks.is_dense(routing_map) and (routing_map.ndim != 2 or routing_map.shape[1] != total):
            raise ShapeMismatch(f"routing_map is {list(routing_map.shape)}, expected [tokens, {total}]")
        return total

    def _experts(self, local: int | None) -> int:
        """Count all experts: R times the call's ``local``, or the buffer's if that is None."""
        return (self.configurer.buffer_config.num_of_experts_per_rank if local is None else local) * self.group_size

    def _note_sizes(self, comm: Communicator) -> None:
        sizes, plan = self.configurer.buffer_config, comm.plan
        sizes.hidden_dim, sizes.num_of_experts_per_rank = plan.hidden, plan.experts_per_rank
        sizes.max_num_of_tokens_per_rank = max(sizes.max_num_of_tokens_per_rank, plan.max_tokens_per_rank)


def _sms_for(*named_by_client: int | None) -> int:
    """Choose the SMs of all kernels: the largest number that the client names."""
    numbers = [number for number in named_by_client if number]
    return min(max(numbers, default=DEFAULT_SMS), most_sms())


def _handle(dispatched: Dispatched, alignment: int) -> Parts:
    """Make a handle with the 12 parts of upstream's. The last two are the flag of an overflow, which raises here.

    Upstream's handle ended with the flag, as its 11th part. Since September 2026 the 11th part is
    ``num_of_valid_tokens``, and the flag comes last. Programs read the flag as ``handle[-1]`` or as ``handle[10]``,
    and both work. No known program reads the number, which is that of the rows of ``hidden``.
    """
    made = Parts(dispatched, HANDLE_PARTS, _parts)
    vars(made)["alignment"] = alignment
    return made


def _parts(dispatched: Dispatched) -> list[Callable[[], Any]]:
    def no_overflow() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=dispatched.comm.device)

    return [*[lambda: None] * (HANDLE_PARTS - 2), no_overflow, no_overflow]


def _check_handle(handle: object, pad_multiple: int | None) -> None:
    if not isinstance(handle, Parts) or len(handle) != HANDLE_PARTS:
        raise BadCall(f"handle is {a_type(handle)}, expected what dispatch_with_permute returned")
    has = vars(handle)["alignment"]
    require(pad_multiple in (None, has), f"pad_multiple is {pad_multiple}, the dispatch had {has}")


def _check_rows(num_permuted_tokens: int | torch.Tensor | None, rows: int) -> None:
    """Raise unless the number of rows is the handle's. A number on a GPU is not read."""
    if num_permuted_tokens is None or (isinstance(num_permuted_tokens, torch.Tensor) and num_permuted_tokens.is_cuda):
        return
    require(int(num_permuted_tokens) == rows, f"num_permuted_tokens is not {rows}, as the handle has")


def _weights(
    ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    probs: torch.Tensor | None,
    num_experts: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Check other weights [N, K] for the routes of a handle, or None."""
    if topk_weights is not None:
        return checks.like("topk_weights", topk_weights, ids.shape, torch.float32, device)
    if probs is None:
        return None
    probs = checks.tensor("probs", probs).contiguous()
    probs = checks.like("probs", probs, [len(ids), num_experts], torch.float32, device)
    return probs.gather(1, ids.clamp(0, num_experts - 1))


def _resend(handle: Parts, payload: Any, weights: torch.Tensor | None) -> Permuted:
    """Send other rows, and other weights if there are some, to the places of a dispatch."""
    comm, routed, alignment = handle.dispatched.comm, handle.dispatched.routed, vars(handle)["alignment"]
    received = comm.dispatch_again(payload, routed, "if_needed")
    rows, scales = received if isinstance(received, tuple) else (received, None)
    weighted = weights is not None
    if weights is not None:
        routed = comm.reweighted(routed, weights)
    return rows, comm.row_weights(routed) if weighted else None, scales, _counts(comm, routed, alignment), handle


def _permuted(handle: Parts, routed: Routed, weighted: bool) -> Permuted:
    comm, rows, scales = handle.dispatched.comm, routed.tokens, routed.scales
    routed.let_go()
    probs = comm.row_weights(routed) if weighted else None
    return rows, probs, scales, _counts(comm, routed, vars(handle)["alignment"]), handle


def _counts(comm: Communicator, routed: Routed, alignment: int) -> torch.Tensor:
    """Count the padded rows of each expert: int64 [L], in host memory if the host knows the number of rows."""
    if not isinstance(routed.num_rows, int):
        return (routed.expert_counts.long() + (alignment - 1)) // alignment * alignment
    counts = [align_up(count, alignment) for count in routed.counts_on_host()]
    return torch.tensor(counts, dtype=torch.int64, device="cpu", pin_memory=comm.device.type == "cuda")
