"""MegaMoE: a whole mixture-of-experts layer in FP8 for inference, on Hopper GPUs of one host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends.calls import CALLS_IN_FLIGHT, FOLLOWS_A_FAULT
from tokenloom.backends.exchange import Field
from tokenloom.backends.nvlink import BULK_BYTES, NvlinkBackend, NvlinkHandle
from tokenloom.communicator import Communicator
from tokenloom.errors import DtypeMismatch, InvalidArgument, PeerTimeout, ShapeMismatch
from tokenloom.gemm import check_aligned, check_clamp, check_tensor, check_weights, interleave_gate_and_up
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.gemm.launch import (
    A_BOX_ROWS,
    B_BOX_ROWS,
    BLOCK,
    CLUSTER,
    Swiglu,
    grouped_gemm_spec,
    operand_map,
    scale_map,
    trace_times,
    wide_scales,
)
from tokenloom.kernels.mega.launch import (
    LIST_BLOCKS_PER_SM,
    OwnTokens,
    meet_ranks_spec,
    route_lists_spec,
    sum_routes_spec,
)
from tokenloom.kernels.shape import DTYPES
from tokenloom.mega_reference import ReferenceExperts
from tokenloom.quant import quantize_fp8_blocks
from tokenloom.symmetric import SymmetricBuffer
from tokenloom.tune.mega import MegaSchedule, schedule_for

FP8 = torch.float8_e4m3fn
COPY_ROOM = 1.25
"""Routes of a rank whose rows can be copied, over the mean of an even routing."""
MOST_TERMS = 32
"""Results of a token that are added."""
MOST_LOCAL_EXPERTS = 4096
"""Of a rank: lists are made in shared memory."""


def _buffer_sizes(
    most_routes: int, even_routes: int, num_local: int, hidden: int, intermediate: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What a rank has besides what other ranks write: shape and dtype of each.

    The worst routing's activations leave room for copies of about any other routing's rows.
    """
    int32, float32 = torch.int32, torch.float32
    copied = min(int(even_routes * COPY_ROOM), most_routes)
    activations = max(most_routes * intermediate, copied * (intermediate + hidden))
    return {
        "offsets": ((num_local + 1,), int32),
        "rows": ((most_routes,), int32),
        "row_weights": ((most_routes,), float32),
        "targets": ((most_routes,), torch.int64),
        "taken": ((num_local,), int32),
        "copied": ((2,), int32),
        "met": ((1,), int32),
        "activation_values": ((max(activations, hidden),), FP8),
        "activation_scales": ((most_routes, intermediate // BLOCK), float32),
    }


class _Buffers:
    """Of one rank, between the kernels of a call; route_lists.cuh and args.cuh say what each is.

    Attributes:
        activations: [routes, I] in the order of the lists.
        copies: the same memory as rows of H: behind the last activation of a call there is room for received rows.
    """

    offsets: torch.Tensor
    rows: torch.Tensor
    row_weights: torch.Tensor
    targets: torch.Tensor
    taken: torch.Tensor
    copied: torch.Tensor
    met: torch.Tensor
    activation_scales: torch.Tensor
    activation_values: torch.Tensor

    def __init__(
        self,
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        most_routes: int,
        hidden: int,
        intermediate: int,
        device: torch.device,
    ) -> None:
        for name, (shape, dtype) in sizes.items():
            setattr(self, name, torch.zeros(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=device))
        values: torch.Tensor = self.activation_values.view(FP8)
        self.activations = values[: most_routes * intermediate].view(most_routes, intermediate)
        self.copies = values[: len(values) // hidden * hidden].view(-1, hidden)


class MegaMoE:
    """Dispatch, SwiGLU experts in FP8, combine: ``y = sum over k of weight_k * w2 @ (silu(gate) * up)``.

    x is quantised with a scale per 128 values, the weighted activations again; each route's result is rounded to
    bfloat16 and a token's routes are added in ascending k, in float32 (docs/concepts.md). Nothing waits for the host,
    any routing fits, and results are the same bits from call to call. Making one is collective, and so is every call.

    Args:
        group: as for :class:`Communicator`: Hopper GPUs of one host.
        num_experts: E, divisible by the ranks.
        hidden, intermediate: H and I, multiples of 128.
        top_k: K, at most 32.
        max_tokens_per_rank: M, the most tokens of one call on one rank.
        activation_clamp: gates at most this, ups within plus and minus this, before the activation; None: no limit.
        fast_math: the hardware's exponential and division in the activation.
        power_of_two_scales: as for ``quantize_fp8``, of x and of activations.
        num_shared_experts: S, experts that every token goes to with weight 1, on its own rank; K + S is at most 32.
        schedule: how calls run; None: by their number of tokens (``tokenloom.tune.mega``).
        backend: "nvlink", or "reference": the same in plain torch, on any device, slowly.
        device, timeout_s: as for :class:`Communicator`.

    Attributes:
        comm: the communicator whose dispatch it uses.
        weights: w1 with gates and ups in turn, its scales, w2, its scales; empty before :meth:`load_weights`.
        after_stage: None, or what is called with the name of each stage of a call when it is on the stream.

    Raises:
        As :class:`Communicator`; BackendUnavailable where its kernels do not run.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        num_experts: int,
        hidden: int,
        intermediate: int,
        top_k: int,
        max_tokens_per_rank: int,
        *,
        activation_clamp: float | None = None,
        fast_math: bool = True,
        power_of_two_scales: bool = False,
        num_shared_experts: int = 0,
        schedule: MegaSchedule | None = None,
        backend: str = "nvlink",
        device: torch.device | str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        for name, width in (("hidden", hidden), ("intermediate", intermediate)):
            if not isinstance(width, int) or width <= 0 or width % BLOCK:
                raise InvalidArgument(f"{name} is {width!r}, expected a multiple of {BLOCK}")
        if not isinstance(num_shared_experts, int) or not 0 <= num_shared_experts <= MOST_TERMS - top_k:
            raise InvalidArgument(
                f"num_shared_experts is {num_shared_experts!r}, expected 0 to {MOST_TERMS} less top_k, {top_k}"
            )
        if backend not in ("nvlink", "reference"):
            raise InvalidArgument(f"backend is {backend!r}, expected 'nvlink' or 'reference'")
        check_clamp("activation_clamp", activation_clamp)
        self.comm = Communicator(
            group,
            num_experts=num_experts,
            hidden=hidden,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            backend="nvlink" if backend == "nvlink" else "auto",
            device=device,
            timeout_s=timeout_s,
        )
        self.intermediate, self.num_shared_experts, self.schedule = intermediate, num_shared_experts, schedule
        self._power_of_two_scales = power_of_two_scales
        self._num_local = self.comm.plan.experts_per_rank + num_shared_experts
        self.weights: tuple[torch.Tensor, ...] = ()
        self._weights_are_ours = False
        self.after_stage: Callable[[str], None] | None = None
        self._reference: ReferenceExperts | None = None
        if backend == "reference":
            self._reference = ReferenceExperts(self.comm, num_shared_experts, power_of_two_scales)
        else:
            self._make_kernels()
        self.set_activation(activation_clamp, fast_math)

    def _make_kernels(self) -> None:
        if self._num_local > MOST_LOCAL_EXPERTS:
            self.comm.close()
            raise InvalidArgument(f"{self._num_local} experts on a rank, expected at most {MOST_LOCAL_EXPERTS}")
        hidden, intermediate = self.comm.plan.hidden, self.intermediate
        backend = self.comm._backend
        assert isinstance(backend, NvlinkBackend)
        backend.serve_mega(self.num_shared_experts)
        self._backend = backend
        self._num_sms = torch.cuda.get_device_properties(self.comm.device).multi_processor_count // CLUSTER * CLUSTER
        self._sums = self._kernel(*sum_routes_spec(self.comm.plan, self.num_shared_experts))
        self._traces: tuple[torch.Tensor, torch.Tensor] | None = None
        self._gemm2 = self._kernel(*grouped_gemm_spec(self._num_local, hidden, intermediate, scatters=True))
        self._gemm1_of: dict[tuple[bool, bool], Kernel] = {}
        self._lists_of: dict[torch.dtype, Kernel] = {}
        self._buffers: _Buffers | None = None

    def _kernel(self, spec: Any, shared_bytes: int) -> Kernel:
        return Kernel(spec, shared_bytes, self.comm.device.index)

    @property
    def _most_routes(self) -> int:
        """Of this rank's experts, whatever the routing."""
        plan = self.comm.plan
        return plan.worst_case_rows("expert") + self.num_shared_experts * plan.max_tokens_per_rank

    def _sizes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        plan = self.comm.plan
        even = plan.max_tokens_per_rank * (plan.top_k + self.num_shared_experts)
        return _buffer_sizes(self._most_routes, even, self._num_local, plan.hidden, self.intermediate)

    def _own_buffers(self) -> _Buffers:
        """Made at the first call."""
        if self._buffers is None:
            sizes = (self._most_routes, self.comm.plan.hidden, self.intermediate)
            self._buffers = found = _Buffers(self._sizes(), *sizes, self.comm.device)
            self._sums.args.met = found.met.data_ptr()
            self._activations_map = operand_map(found.activations, A_BOX_ROWS)
            if wide_scales(self.intermediate):
                self._scales_map = scale_map(found.activation_scales)
            self._copies_map = operand_map(found.copies, A_BOX_ROWS)
        return self._buffers

    def _shared_buffer(self) -> SymmetricBuffer:
        """Made at the first call, which all ranks make."""
        fields: dict[str, Field] = {
            "call": "MegaMoE",
            "intermediate": self.intermediate,
            "num_shared_experts": self.num_shared_experts,
        }
        shared = self._backend.mega_buffer(fields)
        self._sums.args.home = shared.view("home", torch.uint8, (1,)).data_ptr()
        return shared

    def set_activation(self, clamp: float | None = None, fast_math: bool = True) -> None:
        """From the next call on; as ``activation_clamp`` and ``fast_math`` of the constructor.

        Raises:
            InvalidArgument: the clamp is not above 0.
        """
        check_clamp("activation_clamp", clamp)
        if self._reference is not None:
            self._reference.clamp = clamp
            return
        self._activation = (clamp, fast_math)
        key = (clamp is not None, fast_math)
        if key not in self._gemm1_of:
            swiglu = Swiglu(clamp is not None, self._power_of_two_scales, fast_math)
            sizes = (self._num_local, 2 * self.intermediate, self.comm.plan.hidden)
            traced = self._traces is not None
            self._gemm1_of[key] = self._kernel(*grouped_gemm_spec(*sizes, swiglu, gathers=True, traced=traced))
            if self._traces is not None:
                self._gemm1_of[key].args.trace = self._traces[0].data_ptr()
        self._gemm1 = self._gemm1_of[key]
        self._gemm1.args.clamp = clamp or 0.0

    def load_weights(
        self,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w1_scales: torch.Tensor | None = None,
        w2_scales: torch.Tensor | None = None,
    ) -> None:
        """Take this rank's experts: copied, w1 with gates and ups in turn. Graphs that were captured use them too.

        Args:
            w1: [L, 2I, H], gates, then ups, of this rank's E / W experts and then of the S shared ones, which are the
                same on all ranks; bfloat16, float16 or float32, which are quantised with a scale per 128 x 128
                values, or float8_e4m3fn with scales.
            w2: [L, H, I], of the same dtype.
            w1_scales: float32 [L, 2I / 128, H / 128], beside FP8.
            w2_scales: float32 [L, H / 128, I / 128], beside FP8.

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
        """
        local, hidden, width = self._num_local, self.comm.plan.hidden, self.intermediate
        if w1.dtype != FP8:
            if w1.dtype not in DTYPES:
                raise DtypeMismatch(f"w1 is {w1.dtype}, expected bfloat16, float16, float32 or float8_e4m3fn")
            check_tensor("w1", w1, w1.dtype, [local, 2 * width, hidden], self.comm.device)
            check_tensor("w2", w2, w1.dtype, [local, hidden, width], self.comm.device)
            (w1, w1_scales), (w2, w2_scales) = quantize_fp8_blocks(w1), quantize_fp8_blocks(w2)
        if w1_scales is None or w2_scales is None:
            raise ShapeMismatch("w1 and w2 are float8_e4m3fn, expected w1_scales and w2_scales too")
        self._check_weights(w1, w1_scales, w2, w2_scales)
        given = (interleave_gate_and_up(w1), w1_scales, w2, w2_scales)
        if self._weights_are_ours:  # graphs that were captured read them where they are
            for ours, theirs in zip(self.weights, given, strict=True):
                ours.copy_(theirs)
        else:
            self.use_weights(*(tensor.clone() for tensor in given))
            self._weights_are_ours = True

    def use_weights(
        self, w1: torch.Tensor, w1_scales: torch.Tensor, w2: torch.Tensor, w2_scales: torch.Tensor
    ) -> None:
        """Take this rank's experts as they are, without a copy, from the next call or capture on.

        Args:
            w1: float8_e4m3fn [L, 2I, H], L as there, gates and ups in turn as ``interleave_gate_and_up`` makes them.
            w1_scales: float32 [L, 2I / 128, H / 128]: gates, then ups, not interleaved.
            w2: float8_e4m3fn [L, H, I]; w2_scales: float32 [L, H / 128, I / 128].

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
        """
        self._check_weights(w1, w1_scales, w2, w2_scales)
        self.weights, self._weights_are_ours = (w1, w1_scales, w2, w2_scales), False
        if self._reference is not None:
            return
        self._b1, self._b2 = operand_map(w1, B_BOX_ROWS), operand_map(w2, B_BOX_ROWS)

    def _check_weights(
        self, w1: torch.Tensor, w1_scales: torch.Tensor, w2: torch.Tensor, w2_scales: torch.Tensor
    ) -> None:
        local, hidden, device = self._num_local, self.comm.plan.hidden, self.comm.device
        check_weights("w1", w1, w1_scales, [local, 2 * self.intermediate, hidden], device)
        check_weights("w2", w2, w2_scales, [local, hidden, self.intermediate], device)

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_stats: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output for this rank's tokens; goes into CUDA graphs once it has been called.

        Args:
            x: bfloat16, float16 or float32 [T, H], quantised on its way, or (float8_e4m3fn [T, H], float32
                [T, H / 128]). T may differ per rank and may be 0.
            topk_ids: int32 or int64 [T, K]; -1 is an unused place.
            topk_weights: float32 [T, K].
            expert_stats: int32 [E / W], to which the routes that each local expert got are added, or None.
            out: bfloat16 [T, H] to write to, or None for a tensor of its own.

        Returns:
            bfloat16 [T, H]; 0 for a token without routes.

        Raises:
            As :meth:`Communicator.dispatch` with bounded sizes; nothing can overflow. InvalidArgument before
            :meth:`load_weights`.
        """
        self.comm._begin()
        optional = (expert_stats, out)
        if self._reference is not None:
            found = self.comm._report_fault("dispatch", lambda: self._checked(topk_ids, topk_weights, *optional))
            return self._reference.forward(self.weights, x, topk_ids, topk_weights, expert_stats, found)
        quantised, calls = isinstance(x, tuple), self._backend.calls
        if not torch.cuda.is_current_stream_capturing():
            calls.settle(CALLS_IN_FLIGHT - 1)  # so that from the dispatch to the meeting nothing old is raised

        def prepared() -> tuple[torch.Tensor, _Buffers, Kernel, torch.Tensor]:
            values = x[0] if isinstance(x, tuple) else x
            if not isinstance(values, torch.Tensor):
                raise InvalidArgument(f"x is a {type(values).__name__}, expected a tensor, or (FP8, scales)")
            lists = self._lists_of_dtype(values.dtype)
            if self.num_shared_experts and values.data_ptr() % BULK_BYTES:
                values = values.clone()
            return self._checked(topk_ids, topk_weights, *optional), self._own_buffers(), lists, values

        before = calls.num_calls
        try:
            result, buffers, lists, values = self.comm._report_fault("dispatch", prepared)
            shared = self._shared_buffer()
            routed = self.comm.dispatch(
                x,
                topk_ids,
                topk_weights,
                layout="token",
                sizes="bounded",
                to_fp8=not quantised,
                power_of_two_scales=self._power_of_two_scales and not quantised,
            )
        except PeerTimeout:
            raise
        except Exception:
            if calls.num_calls > before:  # the others have heard of it, and go on to the end of their call
                calls.agree({"call": "MegaMoE"}, status=FOLLOWS_A_FAULT)
            raise
        handle: NvlinkHandle = routed._handle
        stream = torch.cuda.current_stream(self.comm.device).cuda_stream
        try:
            self._passed("dispatch")
            own_scales = x[1].data_ptr() if isinstance(x, tuple) else 0
            self._list_routes(lists, handle, buffers, shared, (values.data_ptr(), own_scales), expert_stats, stream)
            self._passed("lists")
            self._start_gemm1(handle, buffers, stream)
            self._passed("gemm1")
            self._start_gemm2(buffers, stream)
            self._passed("gemm2")
            self._sum(handle, buffers, result, stream)
            self._passed("sum")
        except BaseException:
            buffers.taken.zero_()  # as the next call expects it
            raise
        return result

    __call__ = forward

    def _checked(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_stats: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """``out``, or a tensor for it."""
        if not self.weights:
            raise InvalidArgument("the experts have no weights; call load_weights first")
        plan, device = self.comm.plan, self.comm.device
        if topk_weights is None:
            raise InvalidArgument("topk_weights is None, expected float32 [T, K]")
        if expert_stats is not None:
            check_tensor("expert_stats", expert_stats, torch.int32, [plan.experts_per_rank], device)
        shape = [len(topk_ids), plan.hidden]
        if out is None:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)
        check_tensor("out", out, torch.bfloat16, shape, device)
        check_aligned("out", out)
        return out

    def _passed(self, stage: str) -> None:
        if self.after_stage is not None:
            self.after_stage(stage)

    def _lists_of_dtype(self, dtype: torch.dtype) -> Kernel:
        """Of x, which matters to shared experts."""
        if dtype not in self._lists_of:
            own_tokens = OwnTokens(dtype, self._power_of_two_scales)
            spec = route_lists_spec(self.comm.plan, self.intermediate, self.num_shared_experts, own_tokens)
            self._lists_of[dtype] = self._kernel(*spec)
        return self._lists_of[dtype]

    def _list_routes(
        self,
        kernel: Kernel,
        handle: NvlinkHandle,
        buffers: _Buffers,
        shared: SymmetricBuffer,
        own_tokens: tuple[int, int],
        expert_stats: torch.Tensor | None,
        stream: int,
    ) -> None:
        """``own_tokens``: addresses of x and its scales."""
        counts, args = handle.counts, kernel.args
        args.ids, args.weights = handle.local_ids.data_ptr(), handle.topk_weights.data_ptr()  # type: ignore[union-attr]
        args.row_tokens, args.num_rows = handle.row_tokens.data_ptr(), counts.num_rows.data_ptr()  # type: ignore[union-attr]
        args.source_counts, args.expert_counts = counts.source_counts.data_ptr(), counts.expert_counts.data_ptr()
        args.values, args.scales = handle.rows.data_ptr(), handle.scales.data_ptr()  # type: ignore[union-attr]
        args.x, args.x_scales = own_tokens
        args.num_tokens, args.rank = handle.num_tokens, self.comm.rank
        args.peers, args.home = shared.peers.data_ptr(), shared.regions.offset("home")
        args.offsets, args.rows = buffers.offsets.data_ptr(), buffers.rows.data_ptr()
        args.row_weights, args.targets = buffers.row_weights.data_ptr(), buffers.targets.data_ptr()
        args.taken, args.stats = buffers.taken.data_ptr(), 0 if expert_stats is None else expert_stats.data_ptr()
        schedule = self.schedule or schedule_for(handle.num_tokens)
        args.copies, args.copied = buffers.copies.data_ptr(), buffers.copied.data_ptr()
        args.copy_room = len(buffers.copies) if schedule.copies_rows else 0
        args.fault_claimed = self._backend.calls.fault_claimed
        kernel.launch(LIST_BLOCKS_PER_SM * self._num_sms, stream)

    def _start_gemm1(self, handle: NvlinkHandle, buffers: _Buffers, stream: int) -> None:
        args = self._gemm1.args
        args.a, args.copied = self._copies_map, buffers.copied.data_ptr()
        args.a_rows, args.a_scales = handle.rows.data_ptr(), handle.scales.data_ptr()  # type: ignore[union-attr]
        args.row_index, args.row_weights = buffers.rows.data_ptr(), buffers.row_weights.data_ptr()
        args.offsets = buffers.offsets.data_ptr()
        args.out, args.out_scales = buffers.activations.data_ptr(), buffers.activation_scales.data_ptr()
        args.b, args.b_scales = self._b1, self.weights[1].data_ptr()
        self._gemm1.launch(self._num_sms, stream)

    def _start_gemm2(self, buffers: _Buffers, stream: int) -> None:
        args = self._gemm2.args
        if wide_scales(self.intermediate):
            args.a_scale_map = self._scales_map
        args.a, args.a_scales = self._activations_map, buffers.activation_scales.data_ptr()
        args.offsets, args.row_targets = buffers.offsets.data_ptr(), buffers.targets.data_ptr()
        args.b, args.b_scales = self._b2, self.weights[3].data_ptr()
        self._gemm2.launch(self._num_sms, stream)

    def _sum(self, handle: NvlinkHandle, buffers: _Buffers, out: torch.Tensor, stream: int) -> None:
        calls, ids = self._backend.calls, handle.given_ids
        meet = calls.kernel(meet_ranks_spec)
        meet.args.met, meet.args.taken = buffers.met.data_ptr(), buffers.taken.data_ptr()
        calls.launch(meet, {"call": "MegaMoE", "dispatch number": handle.number}, blocks=1)
        args = self._sums.args
        args.topk_ids, args.ids_are_int64 = ids.data_ptr(), ids.dtype == torch.int64
        args.slots, args.out, args.num_tokens = handle.slots.data_ptr(), out.data_ptr(), handle.num_tokens
        self._sums.launch(self._num_sms, stream)

    def describe(self) -> str:
        """What it runs on, and how much memory its buffers take; they are made at the first call."""
        if self._reference is not None:
            return f"{self.comm.describe()}\n    experts in plain torch, slowly"
        own = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._sizes().values())
        return f"{self.comm.describe()}\n    lists and activations: {own / 1e6:.1f} MB"

    def trace_gemms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """From now on the GEMMs, a little slower, write when each role of each block works on each tile.

        Returns:
            Of GEMM1 and GEMM2: int64 [blocks, role, tile, 2], nanoseconds of beginning and end, 0 where there is none;
            roles are ``tokenloom.kernels.gemm.launch.TRACE_ROLES``.
        """
        if self._reference is not None:
            raise InvalidArgument("backend 'reference' has no kernels to trace")
        device, sizes = self.comm.device, (self._num_local, self.comm.plan.hidden, self.intermediate)
        self._traces = (trace_times(self._num_sms, device), trace_times(self._num_sms, device))
        self._gemm2 = self._kernel(*grouped_gemm_spec(*sizes, scatters=True, traced=True))
        self._gemm2.args.trace = self._traces[1].data_ptr()
        self._gemm1_of.clear()
        self.set_activation(*self._activation)
        return self._traces

    def check(self) -> None:
        """Wait, and raise what calls and graph replays left behind."""
        self.comm.check()

    def close(self) -> None:
        """Release the buffers. Calling it twice is fine."""
        self.comm.close()

    def __enter__(self) -> MegaMoE:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
