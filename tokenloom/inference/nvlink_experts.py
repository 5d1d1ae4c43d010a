"""MegaMoE on backend nvlink: its kernels and the memory between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenloom.backends.peers.buffers import aligned
from tokenloom.backends.peers.fused import FusedLayerCalls
from tokenloom.backends.peers.opening import OpeningKernel
from tokenloom.backends.seam import Upcoming
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.engine import Sequence
from tokenloom.errors import InvalidArgument
from tokenloom.inference.expert_memory import ExpertMemory
from tokenloom.inference.mega_gemms import MegaGemms
from tokenloom.inference.mega_weights import Experts
from tokenloom.inference.peer_weights import PeerWeights
from tokenloom.inference.schedules import MegaSchedule, schedule_for
from tokenloom.inference.trace import MegaTimes
from tokenloom.jit.kernel import Kernel
from tokenloom.kernels.moe.launch import (
    CLUSTER,
    PACK_FIELDS,
    PACK_THREADS,
    PACK_WARPS,
    SEND_FIELDS,
    SUM_FIELDS,
    Packing,
    PackTokensVariant,
    SumRoutesVariant,
)
from tokenloom.ops.gemm import Biases
from tokenloom.plan import Activation, align_up
from tokenloom.runtime.openings import Field
from tokenloom.runtime.streams import current_handle

MOST_LOCAL_EXPERTS = 4096
"""Most experts on a rank, because kernels have counts of all of them in shared memory."""


@dataclass(frozen=True)
class Senders:
    """Kernels that send tokens of one dtype.

    Attributes:
        packing_sender: packs tokens and sends them. max_tokens_per_block: its limit.
        pack: packs more tokens than that. packed_sender: sends packed tokens.
    """

    packing_sender: OpeningKernel
    max_tokens_per_block: int
    pack: Kernel
    packed_sender: OpeningKernel


class NvlinkExperts:
    """Dispatch, GEMMs and the sum of one layer.

    Args:
        comm: communicator of backend nvlink, which nobody else uses.
        intermediate: as in ``MegaMoE``.
        num_shared_experts: as in ``MegaMoE``.
        power_of_two_scales: as in ``MegaMoE``.
        recipe: as in ``MegaMoE``.

    Raises:
        InvalidArgument: too many experts or tokens on a rank.
    """

    communicator_backend = "nvlink"
    shares_weights = True
    """Peers read weights where batches are balanced."""
    checks_tokens = False
    """Its dispatch takes checked ones."""

    def __init__(
        self, comm: Communicator, intermediate: int, num_shared_experts: int, power_of_two_scales: bool, recipe: str
    ) -> None:
        self.upcoming = comm.engine.with_counts([Upcoming("dispatch"), Upcoming("MegaMoE")])
        """Calls that each forward opens: FP8 rows travel, then all ranks meet."""
        self._comm, self._intermediate, self._num_shared = comm, intermediate, num_shared_experts
        self._power_of_two_scales, self._recipe = power_of_two_scales, recipe
        plan = comm.engine.plan  # whose experts are slots: all that kernels know
        self._memory = self._unmade_memory()
        if self._memory.num_local > MOST_LOCAL_EXPERTS:
            raise InvalidArgument(f"{self._memory.num_local} experts on a rank, expected at most {MOST_LOCAL_EXPERTS}")
        self._gemms = MegaGemms(self._memory.num_local, plan, intermediate, power_of_two_scales, recipe, comm.device)
        self._calls: FusedLayerCalls = comm.engine.fused_layer(num_shared_experts, recipe)
        self._has_memory = False
        self._sums = Kernel(SumRoutesVariant(plan, num_shared_experts=num_shared_experts).spec(), comm.device.index)
        self._sums.overlaps_previous = True
        self._senders_of: dict[torch.dtype, Senders] = {}
        self._times: MegaTimes | None = None
        self._peer_weights: PeerWeights | None = None

    def describe(self) -> str:
        """Say how much memory the layer takes from the first call on."""
        return f"own tokens and activations: {self._memory.num_bytes / 1e6:.1f} MB"

    def set_activation(self, form: Activation, fast_math: bool) -> None:
        """Do what ``MegaMoE.set_activation`` says."""
        self._gemms.set_activation(form, fast_math)

    def kept_as(self, keep: str) -> str:
        """Do what ``MegaGemms.kept_as`` says."""
        return self._gemms.kept_as(keep)

    def use_weights(
        self, weights: tuple[torch.Tensor, ...], biases: Biases, packed: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """Do what ``MegaGemms.use_weights`` says."""
        self._gemms.use_weights(weights, biases, packed)

    def own_weights(self, given: Experts) -> Experts:
        """Copy weights that were converted. Collective where batches are balanced: peers read them then."""
        if self._comm.engine.balance is None:
            return given.with_own_weights()
        self._peer_weights = PeerWeights(self._comm.engine, given.tensors)
        return given.with_tensors(self._peer_weights.tensors)

    def require_foreign_weights(self) -> None:
        """Raise InvalidArgument where peers read the weights, which they cannot do in any memory."""
        if self._comm.engine.balance is not None:
            raise InvalidArgument(
                "with balance='batch' other ranks pull experts, and they cannot read weights in the caller's memory; "
                "use load_weights, which copies them to where they can"
            )

    def trace(self) -> MegaTimes:
        """Do what ``MegaMoE.trace`` says."""
        times = MegaTimes.allocate(self._gemms.num_sms, self._comm.device)
        self._times = times
        for senders in self._senders_of.values():
            senders.pack.args.trace = times.pack.data_ptr()
        self._trace_calls(times)
        self._gemms.trace(times.gemm1, times.gemm2)
        self._sums.args.trace = times.sum.data_ptr()
        return times

    def _trace_calls(self, times: MegaTimes) -> None:
        self._calls.keep(times)  # graphs that are captured from now on write there, also once others take its place
        self._calls.trace(times.send, times.barrier)

    # -- calls ----------------------------------------------------------------------------------------------

    def ready_stream(self) -> int | None:
        """Raise errors of earlier calls, so that this call raises none of them later.

        Returns:
            Handle of the current stream, where the call needs nothing around it; else None.
        """
        engine = self._comm.engine
        if self._calls.is_stale:
            self._renew()
        calls = len(self.upcoming)
        if engine.needs_no_sequence() and not engine.open_calls.any_open():
            engine.ranks.require_alive()
            stream = self._calls.make_room(calls)
            return stream if engine.balance is None else None
        engine.raise_known_errors()
        self._calls.make_room(calls)
        return None

    def forward(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_stats: torch.Tensor | None,
        out: torch.Tensor | None,
        schedule: MegaSchedule | None,
        after_stage: Callable[[str], None],
    ) -> torch.Tensor:
        """Compute what ``MegaMoE.forward`` returns.

        Args:
            x, topk_ids, topk_weights, expert_stats, out: as in ``MegaMoE.forward``, checked.
            schedule: of the call, or None to choose one.
            after_stage: is told the name of each stage once it is on the stream.
        """
        engine = self._comm.engine
        known_stream = self.ready_stream()
        with engine.sequence(*self.upcoming) as sequence:
            late = self._calls.late
            if late is None:
                return self._launch(
                    sequence, known_stream, x, topk_ids, topk_weights, expert_stats, out, schedule, after_stage
                )
            counted = None if expert_stats is None else torch.empty_like(expert_stats)

            def launch() -> torch.Tensor:
                sequence.upcoming[:] = self.upcoming  # of a call that is made again, too
                if self._calls.is_stale:
                    self._renew()
                if counted is not None:
                    counted.zero_()
                return self._launch(sequence, None, x, topk_ids, topk_weights, counted, None, schedule, after_stage)

            result = late.launch(launch)
            sequence.opened()
            with torch.inference_mode():  # what callers give may have been made in it
                if expert_stats is not None and counted is not None:
                    expert_stats += counted
                return result if out is None else out.copy_(result)  # only now: out may be x, which is sent again

    def _launch(
        self,
        sequence: Sequence,
        known_stream: int | None,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_stats: torch.Tensor | None,
        out: torch.Tensor | None,
        schedule: MegaSchedule | None,
        after_stage: Callable[[str], None],
    ) -> torch.Tensor:
        """Put all kernels of a call on the stream. Arguments are those of :meth:`forward`, and:

        Args:
            sequence: in which the call is declared. known_stream: what :meth:`ready_stream` has given, or None.
        """
        engine = self._comm.engine
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        result = tokens.new_empty(tokens.shape, dtype=torch.bfloat16) if out is None else out
        senders = self._senders(tokens.dtype)  # loaded before ranks agree on anything, as it takes seconds
        if not self._has_memory:  # after the check for a capture, in which zeroing would not run now
            self._make_memory()
        if self._gemms.is_stale:
            self._gemms.set_constant_arguments()
        engine.open_calls.require_room()
        stream = current_handle(self._comm.device) if known_stream is None else known_stream
        schedule = schedule or schedule_for(len(tokens), self._comm.plan.num_ranks)
        if known_stream is None:
            self._calls.follow()  # the except branch zeros memory that the previous call may still read
        try:
            tokens, ids = aligned(tokens), aligned(topk_ids)
            if engine.balance is not None:
                batch = engine.split_batch(ids, self._calls.gather_counts, False, known_stream)
                assert self._peer_weights is not None
                assert batch.split is not None
                ids = batch.slot_ids
                self._peer_weights.pull(batch.split, stream)
                after_stage("pull")
            elif engine.slots is not None:
                ids = engine.slots_of_now().place_routes(ids, known_stream).slot_ids
            scales_at, sender = 0 if scales is None else scales.data_ptr(), senders.packing_sender
            if len(tokens) > schedule.send_sms * senders.max_tokens_per_block:
                sender = senders.packed_sender
                self._pack(senders.pack, tokens, scales_at, schedule, stream)
            SEND_FIELDS.write(
                sender.args,
                SEND_FIELDS.offset,
                tokens.data_ptr(),
                scales_at,
                ids.data_ptr(),
                topk_weights.data_ptr(),
                0 if expert_stats is None else expert_stats.data_ptr(),
                len(tokens),
                ids.dtype == torch.int64,
            )
            number = self._calls.send(sender, known_stream, schedule.send_sms)
            engine.open_calls.count += 1
            sequence.opened()
            after_stage("dispatch")
            self._gemms.run(len(tokens), stream, schedule.gemm2_sms, after_stage)
            self._calls.meet(number, known_stream)
        except BaseException:
            self._memory.counted.zero_()  # the next call expects zeros
            raise
        if self._calls.late is None:  # else a fault from here on is told where all end the call
            sequence.opened()
        SUM_FIELDS.write(
            self._sums.args,
            SUM_FIELDS.offset,
            ids.data_ptr(),
            result.data_ptr(),
            len(ids),
            ids.dtype == torch.int64,
        )
        self._sums.launch(self._gemms.num_sms, stream)
        after_stage("sum")
        return result

    def _pack(self, pack: Kernel, x: torch.Tensor, scales_at: int, schedule: MegaSchedule, stream: int) -> None:
        """Pack tokens. SMs are left to what sends, which counts routes meanwhile."""
        num_tokens, packed = x.shape[0], self._memory.packed.data_ptr()
        PACK_FIELDS.write(pack.args, PACK_FIELDS.offset, x.data_ptr(), scales_at, packed, num_tokens)
        warps = 1 if self._recipe == "row" else PACK_WARPS
        blocks = min(-(-num_tokens * warps * 32 // PACK_THREADS), self._gemms.num_sms - schedule.send_sms)
        pack.launch(max(align_up(blocks, CLUSTER), CLUSTER), stream)

    def _senders(self, dtype: torch.dtype) -> Senders:
        """Return what sends tokens of a dtype. All of it is loaded at once: graphs may have more tokens."""
        found = self._senders_of.get(dtype)
        if found is None:
            packing = Packing(dtype, self._power_of_two_scales)
            variant = PackTokensVariant(self._comm.plan.hidden, packing, self._recipe)
            pack = Kernel(variant.spec(), self._comm.device.index)
            pack.args.trace = 0 if self._times is None else self._times.pack.data_ptr()
            packing_sender, packed_sender = self._calls.sender(packing), self._calls.sender(None)
            most_tokens = dict(packing_sender.spec.shape)["kept_tokens"]
            found = self._senders_of[dtype] = Senders(packing_sender, most_tokens, pack, packed_sender)
        return found

    # -- memory ---------------------------------------------------------------------------------------------

    def _unmade_memory(self) -> ExpertMemory:
        return ExpertMemory(self._comm.engine.plan, self._intermediate, self._num_shared, self._recipe)

    def _renew(self) -> None:
        """Let go of all that knows memory of before: the backend has made its own anew, without ranks that are lost,
        or with those that came back. Graphs keep what they use. Ours is made by the next call, and counts from zero.
        """
        self._calls = self._comm.engine.fused_layer(self._num_shared, self._recipe)
        self._senders_of.clear()
        if self._has_memory:
            self._gemms.let_go()
        self._memory, self._has_memory = self._unmade_memory(), False
        if self._times is not None:
            self._trace_calls(self._times)

    def _make_memory(self) -> None:
        """Make all memory, and tell kernels where it is. All ranks make the call: the first one, or the first behind
        :meth:`_renew`.
        """
        fields: dict[str, Field] = {
            "call": "MegaMoE",
            "intermediate": self._intermediate,
            "num_shared_experts": self._num_shared,
            "recipe": self._recipe,
        }
        memory, calls = self._memory, self._calls
        calls.make_memory(fields)
        if self._peer_weights is not None:
            calls.keep(self._peer_weights)
        memory.allocate(self._comm.device)
        calls.prepare_meetings(memory.met, memory.counted)
        parts = ("offsets", "expected", "begun", "packed", "block_counts", "order")
        calls.tell_senders(**{name: getattr(memory, name).data_ptr() for name in parts})
        sums = self._sums.args
        sums.met, sums.masked = memory.met.data_ptr(), calls.masked
        sums.combine_recv = calls.results.data_ptr()
        self._gemms.take_addresses(memory, calls)
        calls.count_in(memory.expected, memory.counted, memory.block_counts, self._gemms.claimed)
        self._has_memory = True
