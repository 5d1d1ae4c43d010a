"""Communicator: checks arguments, owns the stream, calls its backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends import registry
from tokenloom.backends.base import DispatchInput, Onward
from tokenloom.comm import autograd, validation
from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import Event, SideStream

Layout = Literal["token", "expert", "rank"]
Sizes = Literal["exact", "bounded"]
Mode = Literal["per_rank", "per_route"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Routed:
    """What a dispatch brought to this rank. ``docs/concepts.md`` draws the layouts.

    Attributes:
        tokens: [rows, H] (layout "rank": [W, M, H]); dtype of x, or float8_e4m3fn with ``to_fp8``.
        scales: float32 [rows, H / 128] of FP8 tokens ([W, M, H / 128]), else None.
        topk_ids: [rows, K] ([W, M, K]) local expert of each route or -1, dtype of the ids given; None for
            layout "expert".
        topk_weights: [rows, K] ([W, M, K]) weight of each route, 0 where the id is -1; None for layout "expert"
            or without weights.
        expert_offsets: int32 [L + 1] padded starts of the experts' groups (layout "expert", else None), as
            ``grouped_mm(offs=routed.expert_offsets[1:])`` takes them.
        expert_counts: int32 [L], routes of each local expert, padding not counted.
        source_counts: int32 [W], (token, rank) rows from each source rank.
        num_rows: rows in use: int for exact sizes, int32 scalar on the device for bounded sizes.
        layout: "token", "expert" or "rank".
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_offsets: torch.Tensor | None
    expert_counts: torch.Tensor
    source_counts: torch.Tensor
    num_rows: int | torch.Tensor
    layout: Layout
    _handle: Any = field(repr=False)
    _weights: torch.Tensor | None = field(repr=False)
    _owner: Communicator = field(repr=False)


class Communicator:
    """Moves the tokens of a mixture-of-experts layer to their experts and back.

    Making one is collective: all ranks of the group do it, with the same arguments. So is every call, in the same
    order on all ranks. Several layers may share one.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None: the default group, or this process alone
            where torch.distributed is not initialised.
        num_experts: E, divisible by the ranks W; expert e lives on rank ``e // (E / W)``.
        hidden: H, values in a token.
        top_k: K, experts per token, at most 32.
        max_tokens_per_rank: M, the most tokens of one dispatch on one rank.
        backend: "auto" picks the best that works on all ranks (``describe()`` says why), or a name.
        device: where the tensors are; None: the current GPU for NCCL groups, else the CPU.
        timeout_s: longest wait for another rank, in seconds (over NCCL the group's own timeout applies).
        dtype: of the tokens, where it is known: "auto" then picks a backend that moves it.
        num_sms: SMs that a kernel of backend "nvlink" takes, 1 to 32; the others stay with your GEMMs.
        checked: backend "nvlink": read ids, and the outcome of every call, on the host before it returns, so that
            errors come at once. "collective" always does.

    Raises:
        InvalidArgument: an argument has a value that is never right.
        PlanMismatch: the ranks passed different arguments; names the rank and the argument.
        PeerError: another rank failed to make its own.
        BackendUnavailable: the backend asked for does not work here.
        PeerTimeout: a rank did not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        num_experts: int,
        hidden: int,
        top_k: int,
        max_tokens_per_rank: int,
        backend: str = "auto",
        device: torch.device | str | None = None,
        timeout_s: float = 30.0,
        dtype: torch.dtype | None = None,
        num_sms: int = registry.DEFAULT_SMS,
        checked: bool = False,
    ) -> None:
        fault: InvalidArgument | None = None
        try:
            self._ranks = RankGroup(group, device=device, timeout_s=timeout_s)
        except InvalidArgument as error:
            fault = error
        if fault is not None:
            self._ranks = RankGroup(group)  # the other ranks wait for this one, and must hear of its fault

        def prepare() -> tuple[dict[str, Any], list[registry.Availability]]:
            if fault is not None:
                raise fault
            registry.require_known(backend)
            plan = Plan(self._ranks.num_ranks, num_experts, hidden, top_k, max_tokens_per_rank)
            if not isinstance(num_sms, int) or not 1 <= num_sms <= registry.MAX_SMS:
                raise InvalidArgument(f"num_sms is {num_sms!r}, expected 1 to {registry.MAX_SMS}")
            found = registry.availability(self._ranks.transport, self._ranks.device, plan, dtype)
            must_agree = {"dtype": dtype, "backend": backend, "num_sms": num_sms, "checked": checked}
            return vars(plan) | must_agree | {"device type": self._ranks.device.type}, found

        found_by_rank = agree(self._ranks, prepare, "making a Communicator")
        self.plan = Plan(self._ranks.num_ranks, num_experts, hidden, top_k, max_tokens_per_rank)
        name, self._not_picked = registry.choose(backend, found_by_rank)
        self._why = next(found.why for found in found_by_rank[self.rank] if found.name == name)
        self._backend = registry.make(name, self.plan, self._ranks, num_sms, checked)
        self._side_stream = SideStream(self.device)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._ranks.rank

    @property
    def num_ranks(self) -> int:
        """W, ranks in the group."""
        return self._ranks.num_ranks

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        return self._ranks.device

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._backend.name

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The torch.distributed group, None for a process alone."""
        return self._ranks.process_group

    def describe(self) -> str:
        """The plan, the backend and why, and the memory it holds or will take, in a few lines for people."""
        plan = self.plan
        lines = [
            f"tokenloom Communicator, rank {self.rank} of {self.num_ranks} on {self.device}",
            f"  {plan.num_experts} experts, {plan.experts_per_rank} on each rank; top-{plan.top_k}; "
            f"hidden {plan.hidden}; at most {plan.max_tokens_per_rank} tokens a rank",
            f"  worst case on one rank: {plan.worst_case_rows('token')} rows in layouts token and rank, "
            f"{plan.worst_case_rows('expert')} in layout expert",
            f"  backend {self.backend}: {self._why}",
            *(f"    {line}" for line in self._backend.memory()),
        ]
        return "\n".join(lines + [f"  not picked: {reason}" for reason in self._not_picked])

    @overload
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        layout: Layout = ...,
        alignment: int = ...,
        sizes: Sizes = ...,
        capacity: int | None = ...,
        copy: bool = ...,
        to_fp8: bool = ...,
        power_of_two_scales: bool = ...,
        strategy: str = ...,
        async_op: Literal[False] = ...,
    ) -> Routed: ...

    @overload
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        layout: Layout = ...,
        alignment: int = ...,
        sizes: Sizes = ...,
        capacity: int | None = ...,
        copy: bool = ...,
        to_fp8: bool = ...,
        power_of_two_scales: bool = ...,
        strategy: str = ...,
        async_op: Literal[True],
    ) -> tuple[Routed, Event]: ...

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        sizes: Sizes = "exact",
        capacity: int | None = None,
        copy: bool = False,
        to_fp8: bool = False,
        power_of_two_scales: bool = False,
        strategy: str = "dedup",
        async_op: bool = False,
    ) -> Routed | tuple[Routed, Event]:
        """Send each token to the ranks that hold its experts. Differentiable in x and topk_weights.

        Args:
            x: [T, H] bfloat16, float16, float32 or float64; or (float8_e4m3fn [T, H], float32 scales [T, H / 128]).
                T may differ per rank and may be 0.
            topk_ids: int32 or int64 [T, K]; -1 is an unused place; an expert may appear twice in a row.
            topk_weights: float32 [T, K] (float64 beside float64 x, without to_fp8), or None. Ignored where the id
                is -1.
            layout: how the received rows lie, see :class:`Routed`.
            alignment: rows that each expert's group is padded to with zeros (layout "expert").
            sizes: "exact": outputs have their exact size, known on the host. "bounded": outputs have ``capacity``
                rows and counts stay on the device; rows beyond ``num_rows`` are unspecified.
            capacity: most rows. Default: no limit for exact sizes, the worst case for bounded ones (layout
                "expert" has no default there).
            copy: outputs are ordinary tensors of your own even where a backend hands out views of its buffers.
            to_fp8: quantise x to E4M3 with a scale per 128 values on its way (H a multiple of 128): the same, bit for
                bit, as ``dispatch(quantize_fp8(x), ...)``. The rows have no gradient, so x may not require one;
                topk_weights may.
            power_of_two_scales: with ``to_fp8``, as for :func:`tokenloom.quantize_fp8`.
            strategy: what carries the payload, as :class:`tokenloom.Strategy` says. "nvlink" has others than "dedup"
                in layout "expert"; "all_gather" not for FP8, nor in a CUDA graph.
            async_op: work on the communicator's own stream and return (routed, event).

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument, InvalidExpertId, NotDifferentiable: bad
                input on this rank; nothing was sent.
            PeerError: bad input on another rank; nothing was sent.
            PlanMismatch: the ranks passed different options; nothing was sent.
            CapacityOverflow: more rows than ``capacity``. Exact sizes: nothing was sent. Bounded sizes: raised by a
                later call or :meth:`check`; meanwhile combine gives NaN for the tokens concerned.
            PeerTimeout, CommunicatorBroken: another rank is missing, or was at an earlier call.
        """
        self._begin()

        def checked() -> tuple[Any, Any]:
            options = (layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy)
            call = validation.dispatch_call(self.plan, *options)
            tensors = self._checked_input(x, topk_ids, topk_weights, copy, to_fp8)
            self._backend.check_dispatch(call, tensors)
            return call, tensors

        def work() -> Routed:
            with autograd.profiler_range(autograd.DISPATCH_RANGE):
                call, tensors = self._report_fault("dispatch", checked)
                handle = self._backend.open_dispatch(call, tensors)()
                rows, weights = autograd.dispatch(self._backend, handle, tensors.x, tensors.topk_weights)
                return self._routed(handle, rows, weights, topk_ids.dtype)

        if not async_op:
            return work()
        inputs = (*(x if isinstance(x, tuple) else (x,)), topk_ids, topk_weights)
        with self._side_stream.run(inputs):
            routed = work()
            results = (
                routed.tokens,
                routed.scales,
                routed.topk_ids,
                routed.topk_weights,
                routed.expert_offsets,
                routed.expert_counts,
                routed.source_counts,
            )
            return routed, self._side_stream.event(results)

    def _begin_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        capacity: int | None,
        strategy: str,
        need_grads: tuple[bool, bool],
        ahead: bool,
        then: Onward | None,
    ) -> Callable[[], Routed]:
        """Layout "expert" for who writes the gradients himself: rows may be a view, used before the second next.

        Returns:
            To be called before any other call of this communicator: waits until counts are known, if they are wanted.

        Args:
            capacity: of bounded sizes, or None for exact ones.
            need_grads: whether gradients of x and of the weights will be wanted, the same on all ranks.
            ahead: as of DispatchInput.
            then: of :meth:`_report_fault`.
        """

        def checked() -> tuple[Any, Any]:
            sizes = "exact" if capacity is None else "bounded"
            call = validation.dispatch_call(self.plan, "expert", 1, sizes, capacity, False, False, strategy)
            tensors = self._checked_input(x, topk_ids, topk_weights, copy=False, to_fp8=False)
            self._backend.check_dispatch(call, tensors)
            x_wants, weights_want = need_grads
            tensors = replace(tensors, x_needs_grad=x_wants, weights_need_grad=weights_want)
            return call, replace(tensors, own_outputs="but rows", ahead=ahead)

        with autograd.profiler_range(autograd.DISPATCH_RANGE):
            call, tensors = self._report_fault("dispatch", checked, then)
            opened = self._backend.open_dispatch(call, tensors)

        def finish() -> Routed:
            with autograd.profiler_range(autograd.DISPATCH_RANGE):
                handle = opened()
                return self._routed(handle, self._backend.dispatch(handle, x), handle.topk_weights, topk_ids.dtype)

        return finish

    def _checked_input(
        self, x: Any, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, copy: bool, to_fp8: bool
    ) -> DispatchInput:
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return validation.dispatch_input(
            self.plan,
            self.device,
            x,
            topk_ids,
            topk_weights,
            copy,
            check_ids=self._backend.checked and not captured,
            to_fp8=to_fp8,
        )

    def _routed(self, handle: Any, rows: torch.Tensor, weights: torch.Tensor | None, ids_dtype: torch.dtype) -> Routed:
        layout = handle.call.layout
        places = [self.num_ranks, self.plan.max_tokens_per_rank] if layout == "rank" else [rows.shape[0]]

        def shaped(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.view(*places, tensor.shape[-1])

        counts = handle.counts
        by_token = layout != "expert"
        tokens = shaped(rows)
        assert tokens is not None
        return Routed(
            tokens=tokens,
            scales=shaped(handle.scales),
            topk_ids=shaped(handle.topk_ids.to(ids_dtype)) if by_token else None,
            topk_weights=shaped(weights) if by_token else None,
            expert_offsets=counts.expert_offsets,
            expert_counts=counts.expert_counts,
            source_counts=counts.source_counts,
            num_rows=counts.num_rows,
            layout=layout,
            _handle=handle,
            _weights=None if by_token else weights,
            _owner=self,
        )

    @overload
    def combine(
        self,
        y: torch.Tensor,
        routed: Routed,
        *,
        weighted: bool | None = ...,
        mode: Mode = ...,
        wire_dtype: torch.dtype | None = ...,
        out_dtype: torch.dtype | None = ...,
        strategy: str | None = ...,
        async_op: Literal[False] = ...,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        y: torch.Tensor,
        routed: Routed,
        *,
        weighted: bool | None = ...,
        mode: Mode = ...,
        wire_dtype: torch.dtype | None = ...,
        out_dtype: torch.dtype | None = ...,
        strategy: str | None = ...,
        async_op: Literal[True],
    ) -> tuple[torch.Tensor, Event]: ...

    def combine(
        self,
        y: torch.Tensor,
        routed: Routed,
        *,
        weighted: bool | None = None,
        mode: Mode = "per_rank",
        wire_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        strategy: str | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """Bring the experts' rows home and sum them in a fixed order. Differentiable in y and the weights.

        Args:
            y: shape of ``routed.tokens``; bfloat16, float16, float32 or float64. One row per row of
                ``routed.tokens``; rows that hold no token are never read.
            routed: what dispatch returned.
            weighted: layout "expert": multiply rows by their weights (default True). Other layouts: leave it out.
            mode: "per_rank": rows are summed per rank in ascending k, rounded to ``wire_dtype``, and the ranks' sums
                are added in ascending rank. "per_route": every weighted row is rounded and sent home by itself, and
                summed there in ascending k (layout "expert").
            wire_dtype: dtype of what travels; default y's.
            out_dtype: dtype of the result; default y's.
            strategy: what carries the payload, as :class:`tokenloom.Strategy` says; None: "dedup" for mode "per_rank",
                "all_to_all" for "per_route". "nvlink" has "reduce_scatter" in layout "expert", not in a CUDA graph.
            async_op: work on the communicator's own stream and return (out, event).

        Returns:
            [T, H]; zero for tokens without routes.

        Raises: as :meth:`dispatch`.
        """
        self._begin()

        def checked() -> Any:
            _check_routed(self, routed)
            call = validation.combine_call(
                self.plan,
                self.device,
                y,
                list(routed.tokens.shape),
                routed.layout,
                routed._weights,
                weighted,
                mode,
                wire_dtype,
                out_dtype,
                strategy,
            )
            self._backend.check_combine(routed._handle, y, call)
            return call

        def work() -> torch.Tensor:
            with autograd.profiler_range(autograd.COMBINE_RANGE):
                call = self._report_fault("combine", checked)
                self._backend.open_combine(routed._handle, call)
                rows = y.view(-1, self.plan.hidden)
                weights = routed._weights if call.weighted else None
                return autograd.combine(self._backend, routed._handle, rows, weights, call)

        if not async_op:
            return work()
        with self._side_stream.run((y, getattr(routed, "_weights", None), getattr(routed, "_handle", None))):
            out = work()
            return out, self._side_stream.event((out,))

    def _report_fault(self, call: str, check: Callable[[], Result], then: Onward | None = None) -> Result:
        """A check's result. What it raises is raised here once the other ranks know that this call failed."""
        try:
            return check()
        except Exception as fault:
            self._tell_fault(call, fault, then)
            raise

    def _tell_fault(self, call: str, fault: Exception, then: Onward | None = None) -> None:
        """As :meth:`tokenloom.backends.base.Backend.report_fault`."""
        self._side_stream.join()  # calls on it come first
        self._backend.report_fault(call, fault, then)

    def _begin(self) -> None:
        """Raise what earlier calls left behind, as far as it is known without waiting."""
        self._ranks.require_alive()
        self._backend.check(wait=False)

    def check(self) -> None:
        """Wait for all calls, and raise what earlier calls left behind.

        Raises:
            CapacityOverflow: a bounded dispatch dropped rows (raised once).
            CommunicatorBroken: closed, or an earlier call timed out.
        """
        self._ranks.require_alive()
        self._backend.check(wait=True)

    def row_weights(self, routed: Routed) -> torch.Tensor:
        """The weight of each row of layout "expert", for who weights before the last product. Differentiable.

        Then combine takes ``weighted=False``. Not collective.

        Args:
            routed: what a dispatch with topk_weights returned.

        Returns:
            float32 (float64 beside float64 weights) [rows]; 0 where no row lies.

        Raises:
            InvalidArgument: another layout, a dispatch without weights, or another communicator's.
        """
        _check_routed(self, routed)
        if routed.layout != "expert" or routed._weights is None:
            raise InvalidArgument("row_weights is for layout 'expert', dispatched with topk_weights")
        return autograd.row_weights(self._backend, routed._handle, routed._weights, routed.tokens.shape[0])

    def close(self) -> None:
        """Release everything; later calls raise CommunicatorBroken. The process group stays yours."""
        self._backend.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_routed(comm: Communicator, routed: object) -> None:
    if not isinstance(routed, Routed):
        raise InvalidArgument(f"routed is a {type(routed).__name__}, expected what dispatch returned")
    if routed._owner is not comm:
        raise InvalidArgument("routed comes from another Communicator; combine where it was dispatched")
