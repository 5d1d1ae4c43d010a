"""MegaMoE on backend nvlink: its kernels and the memory between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tokenloom.backends.base import DispatchOptions, Upcoming, UsualDispatch
from tokenloom.backends.handshake import Field
from tokenloom.backends.nvlink.buffers import BULK_BYTES, ReceiveBuffer
from tokenloom.backends.nvlink.fused import FusedLayerCalls
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.usual import UsualCalls
from tokenloom.errors import InvalidArgument
from tokenloom.inference.request import Biases, ForwardRequest
from tokenloom.inference.schedules import schedule_for
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import Variant
from tokenloom.kernels.gemm.launch import (
    A_BOX_ROWS,
    B_BOX_ROWS,
    BLOCK,
    CLUSTER,
    Bf16Epilogue,
    GroupedGemmVariant,
    SwigluFp8Epilogue,
    operand_map,
    scale_map,
    tile_places,
    trace_times,
    warps_that_store,
    wide_scales,
)
from tokenloom.kernels.moe.launch import (
    LIST_BLOCKS_PER_SM,
    LIST_FIELDS,
    SUM_FIELDS,
    OwnTokens,
    RouteListsVariant,
    SumRoutesVariant,
)
from tokenloom.ops.gemm import swiglu_epilogue, tell_activation
from tokenloom.plan import SWIGLU, Activation
from tokenloom.runtime.streams import current_handle
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

FP8 = torch.float8_e4m3fn
COPY_ROOM = 1.25
"""Room for copies of rows, relative to the routes that a rank has when routing is even."""
CALLS = (Upcoming("dispatch", DispatchOptions("token", 1, "bounded", None), value_bytes=1), Upcoming("MegaMoE"))
"""Calls that each forward opens: FP8 rows travel, then all ranks meet."""
MOST_LOCAL_EXPERTS = 4096
"""Most experts on a rank, because route lists are made in shared memory."""


def buffer_sizes(
    most_routes: int, even_routes: int, num_local: int, hidden: int, intermediate: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """List shape and dtype of the buffers that only this rank writes.

    There is room for the activations of the worst routing. Almost any other routing leaves enough of it for copies of
    its rows.
    """
    int32, float32 = torch.int32, torch.float32
    copied = min(int(even_routes * COPY_ROOM), most_routes)
    activations = max(most_routes * intermediate, copied * (intermediate + hidden))
    return {
        "offsets": ((num_local + 1,), int32),
        "rows": ((most_routes,), int32),
        "row_weights": ((most_routes,), float32),
        "targets": ((most_routes,), torch.int64),
        "counted": ((num_local + tile_places(most_routes, num_local),), int32),
        "copied": ((2,), int32),
        "met": ((1,), int32),
        "activation_values": ((max(activations, hidden),), FP8),
        "activation_scales": ((most_routes, intermediate // BLOCK), float32),
    }


class _Buffers:
    """Memory of one rank between the kernels of a call. route_lists.cuh and args.cuh say what each part is.

    Attributes:
        counted: what kernels count from 0 in each call: ``taken``, and ``stored`` tiles of rows.
        activations: [routes, I], in the order of the route lists.
        copy_room: rows of ``copies``.
        copies: the same memory as rows of H. The part behind a call's last activation has room for received rows.
    """

    offsets: torch.Tensor
    rows: torch.Tensor
    row_weights: torch.Tensor
    targets: torch.Tensor
    counted: torch.Tensor
    copied: torch.Tensor
    met: torch.Tensor
    activation_scales: torch.Tensor
    activation_values: torch.Tensor

    def __init__(
        self,
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        most_routes: int,
        num_local: int,
        hidden: int,
        intermediate: int,
        device: torch.device,
    ) -> None:
        for name, (shape, dtype) in sizes.items():
            setattr(self, name, torch.zeros(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=device))
        values: torch.Tensor = self.activation_values.view(FP8)
        self.activations = values[: most_routes * intermediate].view(most_routes, intermediate)
        self.copies = values[: len(values) // hidden * hidden].view(-1, hidden)
        self.copy_room = len(self.copies)
        self.taken, self.stored = self.counted.split([num_local, len(self.counted) - num_local])


class NvlinkExperts:
    """Dispatch, GEMMs and the sum of one layer.

    Args:
        comm: communicator of backend nvlink, which nobody else uses.
        intermediate: as in ``MegaMoE``.
        num_shared_experts: as in ``MegaMoE``.
        power_of_two_scales: as in ``MegaMoE``.

    Raises:
        InvalidArgument: too many experts on a rank.
    """

    communicator_backend = "nvlink"

    def __init__(
        self, comm: Communicator, intermediate: int, num_shared_experts: int, power_of_two_scales: bool
    ) -> None:
        self._comm, self._intermediate, self._num_shared = comm, intermediate, num_shared_experts
        self._power_of_two_scales = power_of_two_scales
        plan = comm.plan
        self._num_local = plan.experts_per_rank + num_shared_experts
        if self._num_local > MOST_LOCAL_EXPERTS:
            raise InvalidArgument(f"{self._num_local} experts on a rank, expected at most {MOST_LOCAL_EXPERTS}")
        # Most routes of this rank's experts under any routing.
        self._most_routes = plan.worst_case_rows("expert") + num_shared_experts * plan.max_tokens_per_rank
        even_routes = plan.max_tokens_per_rank * (plan.top_k + num_shared_experts)
        self._sizes = buffer_sizes(self._most_routes, even_routes, self._num_local, plan.hidden, intermediate)
        self._calls: FusedLayerCalls = comm.engine.fused_layer(num_shared_experts)
        self._num_sms = torch.cuda.get_device_properties(comm.device).multi_processor_count // CLUSTER * CLUSTER
        self._side = torch.cuda.Stream(comm.device)
        self._weights: tuple[torch.Tensor, ...] = ()
        self._buffers: _Buffers | None = None
        self._shared: SymmetricBuffer | None = None
        self._traces: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sums = self._kernel(SumRoutesVariant(plan, num_shared_experts=num_shared_experts))
        self._gemm1_of: dict[SwigluFp8Epilogue, Kernel] = {}
        self._gemm2_of: dict[bool, Kernel] = {}
        self._activation: tuple[Activation, bool] = (SWIGLU, False)
        self._biases: Biases = (None, None)
        backend = comm.engine.makes_usual_calls
        assert backend is not None, "backend nvlink makes them"
        self._usual = UsualCalls(comm.engine, backend)
        self._lists_of: dict[torch.dtype, Kernel] = {}
        self._lists: Kernel | None = None
        self._experts_told = (0, 0)  # first and end, of both GEMMs; reset with what follows
        self._stale = True  # a kernel, weights or memory are not what they were when kernels were told

    def _kernel(self, variant: Variant) -> Kernel:
        return Kernel(variant.spec(), self._comm.device.index)

    def describe(self) -> str:
        """Say how much memory the layer takes from the first call on."""
        own = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._sizes.values())
        return f"route lists and activations: {own / 1e6:.1f} MB"

    def set_activation(self, form: Activation, fast_math: bool) -> None:
        """Do what ``MegaMoE.set_activation`` says."""
        if (form, fast_math) == self._activation and self._gemm1_of:
            return
        self._choose_gemms((form, fast_math), self._biases)

    def _choose_gemms(self, activation: tuple[Activation, bool], biases: Biases) -> None:
        """Take the kernels that have this activation and these biases. Nothing changes where one cannot be had now."""
        (form, fast_math), (w1_bias, w2_bias) = activation, biases
        key = swiglu_epilogue(form, self._power_of_two_scales, fast_math, biased=w1_bias is not None)
        hidden, traced = self._comm.plan.hidden, self._traces is not None
        if key not in self._gemm1_of:
            sizes = (self._num_local, 2 * self._intermediate, hidden)
            self._gemm1_of[key] = self._kernel(
                GroupedGemmVariant(*sizes, epilogue=key, gathers=True, traced=traced, followed=True)
            )
        biased = w2_bias is not None
        if biased not in self._gemm2_of:
            sizes = (self._num_local, hidden, self._intermediate)
            epilogue = Bf16Epilogue(biased=biased)
            self._gemm2_of[biased] = self._kernel(
                GroupedGemmVariant(*sizes, epilogue=epilogue, scatters=True, traced=traced, following=True)
            )
        self._activation, self._biases = activation, biases
        self._gemm1, self._gemm2, self._stale = self._gemm1_of[key], self._gemm2_of[biased], True
        if self._traces is not None:
            self._gemm1.args.trace, self._gemm2.args.trace = (times.data_ptr() for times in self._traces)
        tell_activation(self._gemm1.args, form)
        for gemm, bias in ((self._gemm1, w1_bias), (self._gemm2, w2_bias)):
            gemm.args.bias = 0 if bias is None else bias.data_ptr()

    def use_weights(self, weights: tuple[torch.Tensor, ...], biases: Biases) -> None:
        """Use the checked ``MegaMoE.weights`` and ``MegaMoE.biases`` from the next call on."""
        w1, w1_scales, w2, w2_scales = weights
        gemm1_weights = (operand_map(w1, B_BOX_ROWS), w1_scales.data_ptr())
        gemm2_weights = (operand_map(w2, B_BOX_ROWS), w2_scales.data_ptr())
        self._choose_gemms(self._activation, biases)
        self._weights, self._gemm1_weights, self._gemm2_weights = weights, gemm1_weights, gemm2_weights

    def trace_gemms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what ``MegaMoE.trace_gemms`` says."""
        device = self._comm.device
        self._traces = (trace_times(self._num_sms, device), trace_times(self._num_sms, device))
        self._gemm1_of.clear()
        self._gemm2_of.clear()
        self._choose_gemms(self._activation, self._biases)
        return self._traces

    def forward(self, request: ForwardRequest) -> torch.Tensor:
        """Compute what ``MegaMoE.forward`` returns."""
        engine, usual = self._comm.engine, self._usual_dispatch(request)
        if usual is None:
            engine.begin()
        else:
            engine.ranks.require_alive()
        stream = self._calls.make_room()
        ready = None if usual is None else stream
        with engine.sequence(*CALLS) as calls:
            result, buffers, lists, values = self._prepared(request)
            shared = self._shared_buffer()
            if usual is None or ready is None:
                handle, rows = self._dispatch(request)
            else:
                handle, rows, _ = usual.launch(*request.tensors(), request.topk_ids.shape[0], None, ready)
                engine.open_calls.opened()
                calls.opened()
            try:
                if self._stale or lists is not self._lists:
                    self._point(lists, handle.buffer, rows, buffers, shared)
                if stream is None:
                    stream = current_handle(self._comm.device)
                self._compute(request, handle, lists, buffers, values, stream)
                self._calls.meet(handle.number, ready, early=self._gemm2.early)
            except BaseException:
                # What sends results home on the other stream is done before the others hear of the fault.
                torch.cuda.current_stream(self._comm.device).wait_stream(self._side)
                buffers.counted.zero_()  # the next call expects zeros
                raise
            calls.opened()
            self._sum(handle, result, stream)
            request.passed("sum")
        return result

    def _usual_dispatch(self, request: ForwardRequest) -> UsualDispatch | None:
        """What makes the call's dispatch, if there were others like it."""
        if self._shared is None or not self._usual.nothing_around():
            return None
        return self._usual.like_before(*request.tensors(), request.options(self._power_of_two_scales))

    def _dispatch(self, request: ForwardRequest) -> tuple[Any, torch.Tensor]:
        """Make the call's dispatch the long way: its handle and its rows."""
        engine, given = self._comm.engine, request.options(self._power_of_two_scales)
        options, inputs = request.checked_dispatch(engine, given)
        found = engine.send_dispatch(options, inputs).receive()
        self._usual.learn_dispatch(given, options, inputs)
        return found

    def _compute(
        self,
        request: ForwardRequest,
        handle: NvlinkHandle,
        lists: Kernel,
        buffers: _Buffers,
        values: torch.Tensor,
        stream: int,
    ) -> None:
        """Make the route lists and run both GEMMs, the second of which sends results home."""
        schedule = request.schedule or schedule_for(handle.num_tokens, self._comm.num_ranks)
        request.passed("dispatch")
        words, at, stats = handle.words_address, handle.results.at, request.expert_stats
        LIST_FIELDS.write(
            lists.args,
            LIST_FIELDS.offset,
            words + at["num_rows"],
            words + at["source_counts"],
            words + at["expert_counts"],
            values.data_ptr(),
            request.x[1].data_ptr() if isinstance(request.x, tuple) else 0,
            0 if stats is None else stats.data_ptr(),
            handle.num_tokens,
            buffers.copy_room if schedule.copies_rows else 0,
        )
        lists.launch(LIST_BLOCKS_PER_SM * self._num_sms, stream)
        request.passed("lists")
        self._multiply(schedule.waves, stream, request.passed)

    def _prepared(self, request: ForwardRequest) -> tuple[torch.Tensor, _Buffers, Kernel, torch.Tensor]:
        """Return the output's tensor, the buffers, the kernel that makes route lists, and the values of x."""
        values = request.x[0] if isinstance(request.x, tuple) else request.x
        if not isinstance(values, torch.Tensor):
            raise InvalidArgument(f"x is a {type(values).__name__}, expected a tensor, or (FP8, scales)")
        lists = self._lists_of_dtype(values.dtype)
        if self._num_shared and values.data_ptr() % BULK_BYTES:
            values = values.clone()
        return request.checked(), self._own_buffers(), lists, values

    def _lists_of_dtype(self, dtype: torch.dtype) -> Kernel:
        """Return the kernel that makes route lists. The dtype of x matters to shared experts."""
        if dtype not in self._lists_of:
            own_tokens = OwnTokens(dtype, self._power_of_two_scales)
            self._lists_of[dtype] = self._kernel(
                RouteListsVariant(
                    self._comm.plan,
                    intermediate=self._intermediate,
                    num_shared_experts=self._num_shared,
                    own_tokens=own_tokens,
                )
            )
        return self._lists_of[dtype]

    def _own_buffers(self) -> _Buffers:
        """Return this rank's buffers, which the first call makes."""
        if self._buffers is None:
            sizes = (self._most_routes, self._num_local, self._comm.plan.hidden, self._intermediate)
            self._buffers = found = _Buffers(self._sizes, *sizes, self._comm.device)
            self._calls.prepare_meetings(found.met, found.counted)
            self._sums.args.met, self._sums.args.masked = found.met.data_ptr(), self._calls.masked
            self._activations_map = operand_map(found.activations, A_BOX_ROWS)
            if wide_scales(self._intermediate):
                self._scales_map = scale_map(found.activation_scales)
            self._copies_map = operand_map(found.copies, A_BOX_ROWS)
        return self._buffers

    def _shared_buffer(self) -> SymmetricBuffer:
        """Return the buffer that peers write to. The first call, which all ranks make, makes it."""
        if self._shared is None:
            fields: dict[str, Field] = {
                "call": "MegaMoE",
                "intermediate": self._intermediate,
                "num_shared_experts": self._num_shared,
            }
            self._shared = self._calls.buffer(fields)
            self._sums.args.combine_recv = self._shared.view("combine_recv", torch.uint8, (1,)).data_ptr()
        return self._shared

    def _point(
        self, lists: Kernel, received: ReceiveBuffer, rows: torch.Tensor, buffers: _Buffers, shared: SymmetricBuffer
    ) -> None:
        """Tell kernels what is the same in all calls: where the memory between them is, and the weights.

        Args:
            lists: the kernel that makes route lists.
            received: where dispatches leave what comes with rows. rows: the rows there.
        """
        args = lists.args
        args.ids, args.weights = received.ids_address, received.weights_address
        args.row_tokens, args.rank = received.tokens_address, self._comm.rank
        args.values, args.scales = rows.data_ptr(), received.scales.data_ptr()
        args.peers, args.combine_recv = shared.peers.data_ptr(), shared.layout.offset("combine_recv")
        args.offsets, args.rows = buffers.offsets.data_ptr(), buffers.rows.data_ptr()
        args.row_weights, args.targets = buffers.row_weights.data_ptr(), buffers.targets.data_ptr()
        args.taken, args.fault_claimed = buffers.taken.data_ptr(), self._calls.fault_claimed
        args.copies, args.copied = buffers.copies.data_ptr(), buffers.copied.data_ptr()
        args = self._gemm1.args
        args.a, args.copied = self._copies_map, buffers.copied.data_ptr()
        args.a_rows, args.a_scales = rows.data_ptr(), received.scales.data_ptr()
        args.row_index, args.row_weights = buffers.rows.data_ptr(), buffers.row_weights.data_ptr()
        args.offsets, args.stored = buffers.offsets.data_ptr(), buffers.stored.data_ptr()
        args.out, args.out_scales = buffers.activations.data_ptr(), buffers.activation_scales.data_ptr()
        args.b, args.b_scales = self._gemm1_weights
        args = self._gemm2.args
        if wide_scales(self._intermediate):
            args.a_scale_map = self._scales_map
        args.a, args.a_scales = self._activations_map, buffers.activation_scales.data_ptr()
        args.offsets, args.row_targets = buffers.offsets.data_ptr(), buffers.targets.data_ptr()
        args.row_weights = buffers.row_weights.data_ptr()
        args.stored, args.stored_by = buffers.stored.data_ptr(), warps_that_store(2 * self._intermediate)
        args.b, args.b_scales = self._gemm2_weights
        lists.early, self._gemm1.early, self._gemm2.early = True, False, False
        self._lists, self._stale, self._experts_told = lists, False, (0, 0)

    def _multiply(self, waves: int, stream: int, passed: Callable[[str], None]) -> None:
        """Run both GEMMs in waves of experts: GEMM2 of each beside GEMM1 of the next, so that links have work earlier.

        Meanwhile GEMM2, which has half of GEMM1's arithmetic, gets a third of the SMs.
        """
        local, all_sms = self._num_local, self._num_sms
        waves = min(waves, local)
        third = all_sms // 3 // CLUSTER * CLUSTER
        main = torch.cuda.current_stream(self._comm.device) if waves > 1 else None
        side = stream if main is None else self._side.cuda_stream
        if self._gemm2.early != (main is None):  # behind an event there is no kernel to begin early after
            self._gemm1.early = self._gemm2.early = main is None
        for wave in range(waves):
            first, last = wave == 0, wave == waves - 1
            experts = wave * local // waves, (wave + 1) * local // waves
            if experts != self._experts_told:  # or both GEMMs know
                for gemm in (self._gemm1, self._gemm2):
                    gemm.args.first_expert, gemm.args.end_expert = experts
                self._experts_told = experts
            self._gemm1.launch(all_sms if first else all_sms - third, stream)
            if last:
                passed("gemm1")
            if main is not None:
                self._side.wait_stream(main)
            self._gemm2.launch(all_sms if last else third, side)
        if main is not None:
            main.wait_stream(self._side)
        passed("gemm2")

    def _sum(self, handle: NvlinkHandle, out: torch.Tensor, stream: int) -> None:
        ids = handle.given_ids
        SUM_FIELDS.write(
            self._sums.args,
            SUM_FIELDS.offset,
            ids.data_ptr(),
            handle.address("slots"),
            out.data_ptr(),
            handle.num_tokens,
            ids.dtype == torch.int64,
        )
        self._sums.launch(self._num_sms, stream)
