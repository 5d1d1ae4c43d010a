"""MegaMoE on backend nvlink: its kernels and the memory between them."""

from __future__ import annotations

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
from tokenloom.inference.expert_gemms import ExpertGemms
from tokenloom.inference.expert_memory import ExpertMemory
from tokenloom.inference.request import Biases, ForwardRequest
from tokenloom.inference.schedules import schedule_for
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.common import Variant
from tokenloom.kernels.moe.launch import (
    LIST_BLOCKS_PER_SM,
    LIST_FIELDS,
    SUM_FIELDS,
    OwnTokens,
    RouteListsVariant,
    SumRoutesVariant,
)
from tokenloom.plan import Activation
from tokenloom.runtime.streams import current_handle
from tokenloom.runtime.symmetric_memory import SymmetricBuffer

CALLS = (Upcoming("dispatch", DispatchOptions("token", 1, "bounded", None), value_bytes=1), Upcoming("MegaMoE"))
"""Calls that each forward opens: FP8 rows travel, then all ranks meet."""
MOST_LOCAL_EXPERTS = 4096
"""Most experts on a rank, because route lists are made in shared memory."""


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
        self._memory = ExpertMemory(plan, intermediate, num_shared_experts)
        if self._memory.num_local > MOST_LOCAL_EXPERTS:
            raise InvalidArgument(f"{self._memory.num_local} experts on a rank, expected at most {MOST_LOCAL_EXPERTS}")
        self._gemms = ExpertGemms(self._memory, plan.hidden, intermediate, power_of_two_scales, comm.device)
        self._calls: FusedLayerCalls = comm.engine.fused_layer(num_shared_experts)
        self._is_allocated = False
        self._shared: SymmetricBuffer | None = None
        self._sums = self._kernel(SumRoutesVariant(plan, num_shared_experts=num_shared_experts))
        self._sums.early = True
        backend = comm.engine.makes_usual_calls
        assert backend is not None, "backend nvlink makes them"
        self._usual = UsualCalls(comm.engine, backend)
        self._lists_of: dict[torch.dtype, Kernel] = {}
        self._lists: Kernel | None = None

    def _kernel(self, variant: Variant) -> Kernel:
        return Kernel(variant.spec(), self._comm.device.index)

    def describe(self) -> str:
        """Say how much memory the layer takes from the first call on."""
        return f"route lists and activations: {self._memory.num_bytes / 1e6:.1f} MB"

    def set_activation(self, form: Activation, fast_math: bool) -> None:
        """Do what ``MegaMoE.set_activation`` says."""
        self._gemms.set_activation(form, fast_math)

    def use_weights(self, weights: tuple[torch.Tensor, ...], biases: Biases) -> None:
        """Use the checked ``MegaMoE.weights`` and ``MegaMoE.biases`` from the next call on."""
        self._gemms.use_weights(weights, biases)

    def trace_gemms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what ``MegaMoE.trace_gemms`` says."""
        return self._gemms.trace()

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
            result, lists, values = self._prepared(request)
            if usual is None or ready is None:
                handle, rows = self._dispatch(request)
            else:
                handle, rows, _ = usual.launch(*request.tensors(), request.topk_ids.shape[0], None, ready)
                engine.open_calls.opened()
                calls.opened()
            try:
                if self._gemms.is_stale or lists is not self._lists:
                    self._point(lists, handle.buffer, rows)
                if stream is None:
                    stream = current_handle(self._comm.device)
                early = self._compute(request, handle, lists, values, stream)
                self._calls.meet(handle.number, ready, early)
            except BaseException:
                # What sends results home on the other stream is done before the others hear of the fault.
                self._gemms.join(torch.cuda.current_stream(self._comm.device))
                self._memory.counted.zero_()  # the next call expects zeros
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
        values: torch.Tensor,
        stream: int,
    ) -> bool:
        """Make the route lists and run both GEMMs, the second of which sends results home.

        Returns:
            Whether its last kernel lets the next one on the stream begin early.
        """
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
            self._memory.copy_room if schedule.copies_rows else 0,
        )
        lists.launch(LIST_BLOCKS_PER_SM * self._gemms.num_sms, stream)
        request.passed("lists")
        return self._gemms.run(schedule.waves, stream, request.passed)

    def _prepared(self, request: ForwardRequest) -> tuple[torch.Tensor, Kernel, torch.Tensor]:
        """Return the output's tensor, the kernel that makes route lists, and the values of x. There is memory then."""
        values = request.x[0] if isinstance(request.x, tuple) else request.x
        if not isinstance(values, torch.Tensor):
            raise InvalidArgument(f"x is a {type(values).__name__}, expected a tensor, or (FP8, scales)")
        lists = self._lists_of_dtype(values.dtype)
        if self._num_shared and values.data_ptr() % BULK_BYTES:
            values = values.clone()
        result = request.checked()
        if self._shared is None:
            self._shared = self._shared_buffer()
        if not self._is_allocated:  # behind what refuses a first call in a capture, whose zeros nobody would see
            self._allocate()
        return result, lists, values

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

    def _allocate(self) -> None:
        memory = self._memory
        memory.allocate(self._comm.device)
        self._calls.prepare_meetings(memory.met, memory.counted)
        self._calls.keep(memory, self._gemms)
        self._sums.args.met, self._sums.args.masked = memory.met.data_ptr(), self._calls.masked
        self._gemms.find_memory()
        self._is_allocated = True

    def _shared_buffer(self) -> SymmetricBuffer:
        """Return the buffer that peers write to. All ranks make the call, which is the layer's first."""
        fields: dict[str, Field] = {
            "call": "MegaMoE",
            "intermediate": self._intermediate,
            "num_shared_experts": self._num_shared,
        }
        shared = self._calls.buffer(fields)
        self._sums.args.combine_recv = shared.view("combine_recv", torch.uint8, (1,)).data_ptr()
        return shared

    def _point(self, lists: Kernel, received: ReceiveBuffer, rows: torch.Tensor) -> None:
        """Tell kernels what is the same in all calls.

        Args:
            lists: the kernel that makes route lists.
            received: where dispatches leave what comes with rows. rows: the rows there.
        """
        memory, shared, args = self._memory, self._shared, lists.args
        assert shared is not None, "made by now"
        args.ids, args.weights = received.ids_address, received.weights_address
        args.row_tokens, args.rank = received.tokens_address, self._comm.rank
        args.values, args.scales = rows.data_ptr(), received.scales.data_ptr()
        args.peers, args.combine_recv = shared.peers.data_ptr(), shared.layout.offset("combine_recv")
        args.offsets, args.rows = memory.offsets.data_ptr(), memory.rows.data_ptr()
        args.row_weights, args.targets = memory.row_weights.data_ptr(), memory.targets.data_ptr()
        args.taken, args.fault_claimed = memory.taken.data_ptr(), self._calls.fault_claimed
        args.copies, args.copied = memory.copies.data_ptr(), memory.copied.data_ptr()
        lists.early = True
        self._gemms.point(received, rows)
        self._lists = lists

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
        self._sums.launch(self._gemms.num_sms, stream)
