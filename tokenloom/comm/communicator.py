"""Communicator: what users call to move tokens to their experts and back."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends import registry
from tokenloom.backends.base import CombineOptions, DispatchInputs, DispatchOptions, Upcoming
from tokenloom.comm import autograd, validation
from tokenloom.comm.engine import COMBINE_RANGE, DISPATCH_RANGE, Engine, profiler_range
from tokenloom.comm.routed import Layout, Routed, make_routed
from tokenloom.errors import InvalidArgument
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.streams import Event, tensors_in

__all__ = ["Communicator"]

Sizes = Literal["exact", "bounded"]
Mode = Literal["per_rank", "per_route"]


class Communicator:
    """Moves the tokens of a mixture-of-experts layer to their experts and back.

    Making one is collective: all ranks of the group do it, with the same arguments. So is every call, in the same
    order on all ranks. Several layers may share one.

    Args:
        group: a ProcessGroup or a one-dimensional DeviceMesh. None means the default group, or this process alone
            where torch.distributed is not initialised.
        num_experts: E, divisible by the ranks W; expert e lives on rank ``e // (E / W)``.
        hidden: H, values in a token.
        top_k: K, experts per token, at most 32.
        max_tokens_per_rank: M, the most tokens of one dispatch on one rank.
        backend: "auto" picks the best that works on all ranks (``describe()`` says why), or a name.
        device: where the tensors are. None means the current GPU for NCCL groups, else the CPU.
        timeout_s: longest wait for another rank inside a call, in seconds (over NCCL the group's own timeout applies).
        open_timeout_s: longest wait for another rank to open the same call, in seconds. A rank that writes a
            checkpoint, evaluates or compiles may be that late. None means the group's own timeout, at least 10
            minutes.
        dtype: dtype of the tokens, where it is known. "auto" then picks a backend that moves it.
        num_sms: SMs that a kernel of backend "nvlink" takes, 1 to 32. The others stay with your GEMMs.
        checked: on backend "nvlink", read ids and the outcome of every call on the host before it returns, so that
            errors come at once. "collective" always does.

    Attributes:
        plan: sizes, and what follows from them.
        engine: the same calls in halves, for layers that write their own gradients.

    Raises:
        InvalidArgument: an argument has a value that is never right, or ``num_sms`` is more than this process may use.
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
        open_timeout_s: float | None = None,
        dtype: torch.dtype | None = None,
        num_sms: int = registry.DEFAULT_SMS,
        checked: bool = False,
    ) -> None:
        fault: InvalidArgument | None = None
        try:
            ranks = RankGroup(group, device=device, timeout_s=timeout_s, open_timeout_s=open_timeout_s)
        except InvalidArgument as error:
            fault = error
            ranks = RankGroup(group)  # the other ranks wait for this one, and must hear of its fault

        def prepare() -> tuple[dict[str, Any], list[registry.Availability]]:
            if fault is not None:
                raise fault
            plan = Plan(ranks.num_ranks, num_experts, hidden, top_k, max_tokens_per_rank)
            request = registry.Request(ranks.transport, ranks.device, backend, plan, dtype, num_sms, checked)
            if not isinstance(num_sms, int) or not 1 <= num_sms <= registry.MAX_SMS:
                raise InvalidArgument(f"num_sms is {num_sms!r}, expected 1 to {registry.MAX_SMS}")
            return request.must_agree(), registry.probe(request)

        probes = agree(ranks, prepare, "making a Communicator")
        self.plan = Plan(ranks.num_ranks, num_experts, hidden, top_k, max_tokens_per_rank)
        request = registry.Request(ranks.transport, ranks.device, backend, self.plan, dtype, num_sms, checked)
        self._choice = registry.make(request, ranks, probes)
        self._ranks = ranks
        self.engine = Engine(self.plan, ranks, self._choice.backend)

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
        return self._choice.backend.name

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
            f"  backend {self.backend}: {self._choice.why}",
            *(f"    {line}" for line in self.engine.memory()),
        ]
        return "\n".join(lines + [f"  not picked: {reason}" for reason in self._choice.not_picked])

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
            topk_ids: int32 or int64 [T, K]; -1 is an unused place; an expert may appear twice in a row. Do not change
                it before combine and backward are done.
            topk_weights: float32 [T, K] (float64 beside float64 x, without to_fp8), or None. Ignored where the id
                is -1.
            layout: how the received rows lie, "expert", "token" or "rank"; see docs/reference/semantics.md.
            alignment: rows of which each expert's group is a multiple; the rest is zeros (layout "expert").
            sizes: "exact": outputs have their exact size, known on the host. "bounded": outputs have ``capacity``
                rows and counts stay on the device; rows beyond ``num_rows`` are unspecified.
            capacity: most rows. By default exact sizes have no limit and bounded ones the worst case, but layout
                "expert" has no default there.
            copy: make outputs ordinary tensors of your own, even where a backend hands out views of its buffers.
            to_fp8: quantise x to E4M3 with a scale per 128 values on its way (H a multiple of 128). The result is
                that of ``dispatch(quantize_fp8(x), ...)``, bit for bit. The rows have no gradient, so x may not
                require one; topk_weights may.
            power_of_two_scales: with ``to_fp8``, round scales up to powers of two, as ``quantize_fp8`` does.
            strategy: what carries the payload, as ``tokenloom.Strategy`` says. Results do not depend on it. "nvlink"
                has others than "dedup" in layout "expert" only, and "all_gather" neither for FP8 nor in a CUDA graph.
            async_op: work on the communicator's own stream and return (routed, event).

        Returns:
            The rows of this rank with their counts; with ``async_op`` also the event to wait for. On "nvlink" with
            gradients disabled and without ``copy``, the tensors are views that last until the second next dispatch
            of this communicator.

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument, InvalidExpertId, NotDifferentiable: bad
                input on this rank; nothing was sent.
            PeerError: bad input on another rank; nothing was sent.
            PlanMismatch: the ranks passed different options; nothing was sent.
            CapacityOverflow: more rows than ``capacity``. Exact sizes: nothing was sent. Bounded sizes: raised by a
                later call or ``check``; meanwhile combine gives NaN for the tokens concerned.
            PeerTimeout, CommunicatorBroken: another rank is missing, or was at an earlier call.
        """
        engine = self.engine
        engine.begin()

        def checked() -> tuple[DispatchOptions, DispatchInputs]:
            values = (layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy)
            options = validation.dispatch_options(self.plan, engine.capabilities, *values)
            reads_ids = validation.reads_ids(engine.capabilities, self.device)
            tensors = (x, topk_ids, topk_weights, copy, reads_ids, to_fp8)
            inputs = validation.dispatch_inputs(self.plan, engine.capabilities, self.device, *tensors)
            return options, inputs

        def work() -> Routed:
            with profiler_range(DISPATCH_RANGE), engine.sequence(Upcoming("dispatch", awaited=sizes == "exact")):
                options, inputs = checked()
                handle, rows = engine.send_dispatch(options, inputs).receive()
                weights = handle.topk_weights
                if inputs.x_needs_grad or inputs.weights_need_grad:
                    rows, weights = autograd.dispatched(engine, handle, rows, inputs.x, inputs.topk_weights)
                return make_routed(self, self.plan, handle, rows, weights, topk_ids.dtype)

        if not async_op:
            return work()
        inputs = (*(x if isinstance(x, tuple) else (x,)), topk_ids, topk_weights)
        with engine.side_stream.run(inputs):
            routed = work()
            return routed, engine.side_stream.event(tuple(tensors_in(routed)))

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
        async_op: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """Bring the experts' rows home and sum them in a fixed order. Differentiable in y and the weights.

        Args:
            y: shape of ``routed.tokens``; bfloat16, float16, float32 or float64. One row per row of
                ``routed.tokens``; rows that hold no token are never read.
            routed: what dispatch returned.
            weighted: multiply rows by their weights (layout "expert", where the default is True). Leave it out for
                other layouts.
            mode: "per_rank" sums the rows of a rank in ascending k, rounds to ``wire_dtype``, and adds the ranks' sums
                in ascending rank. "per_route" rounds every weighted row, sends it home by itself, and sums there in
                ascending k (layout "expert").
            wire_dtype: dtype of what travels, by default that of y.
            out_dtype: dtype of the result, by default that of y.
            async_op: work on the communicator's own stream and return (out, event).

        Returns:
            [T, H]; zero for tokens without routes. With ``async_op`` also the event to wait for.

        Raises:
            TokenloomError: what ``dispatch`` raises.
        """
        engine = self.engine
        engine.begin()

        def checked() -> CombineOptions:
            validation.require_routed(routed, self)
            shape, weights = list(routed.tokens.shape), routed._weights
            values = (routed.layout, weights, weighted, mode, wire_dtype, out_dtype)
            return validation.combine_options(engine.capabilities, self.device, y, shape, *values)

        def work() -> torch.Tensor:
            with profiler_range(COMBINE_RANGE), engine.sequence(Upcoming("combine")):
                options = checked()
                weights = routed._weights if options.weighted else None
                rows = y.view(-1, self.plan.hidden)
                if options.needs_grad:
                    return autograd.combine(engine, routed._handle, rows, weights, options)
                return engine.send_combine(routed._handle, rows, weights, options).receive()

        if not async_op:
            return work()
        with engine.side_stream.run((y, routed)):
            out = work()
            return out, engine.side_stream.event((out,))

    def row_weights(self, routed: Routed) -> torch.Tensor:
        """Give each row of layout "expert" its weight, to apply before the last GEMM. Differentiable, not collective.

        Combine then takes ``weighted=False``.

        Args:
            routed: what a dispatch with topk_weights returned.

        Returns:
            float32 (float64 beside float64 weights) [rows]; 0 where no row lies.

        Raises:
            InvalidArgument: another layout, a dispatch without weights, or another communicator's.
        """
        validation.require_routed(routed, self)
        if routed.layout != "expert" or routed._weights is None:
            raise InvalidArgument("row_weights is for layout 'expert', dispatched with topk_weights")
        return autograd.row_weights(self.engine, routed._handle, routed._weights, routed.tokens.shape[0])

    def check(self) -> None:
        """Wait for all calls, and raise what earlier calls left behind.

        Raises:
            CapacityOverflow: a bounded dispatch dropped rows (raised once).
            PeerError, PlanMismatch, PeerTimeout: an earlier call failed.
            CommunicatorBroken: closed, or an earlier call timed out.
        """
        self.engine.check("everything")

    def close(self) -> None:
        """Release everything; later calls raise CommunicatorBroken. The process group stays yours."""
        self.engine.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
