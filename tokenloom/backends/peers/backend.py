"""Backend "nvlink": dispatch and combine by kernels that write the peers' memory.

A dispatch is one kernel, a combine is one kernel; neither asks the host anything. How a call opens is in opening.py,
how the host learns what went wrong in outcomes.py, and what lies where in buffers.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch

from tokenloom.backends.peers import kept_rates
from tokenloom.backends.peers.buffers import RECEIVE_BUFFERS, Buffers, control_layout, sends_before_opening
from tokenloom.backends.peers.chosen_sms import chosen_sms
from tokenloom.backends.peers.combine import Combiner
from tokenloom.backends.peers.copies import Copies
from tokenloom.backends.peers.counts import gather_counts
from tokenloom.backends.peers.dispatch import Dispatcher
from tokenloom.backends.peers.fused import FusedLayerCalls
from tokenloom.backends.peers.handle import PeerHandle
from tokenloom.backends.peers.late_ranks import PHASE, CombineUntilDone, DispatchUntilDone, LateRanks
from tokenloom.backends.peers.opening import Launcher
from tokenloom.backends.peers.outcomes import CALLS_IN_FLIGHT
from tokenloom.backends.registration import Availability, Registration, Request
from tokenloom.backends.seam import (
    Capabilities,
    CombineKind,
    CombineOptions,
    DispatchKind,
    DispatchOptions,
    OutputOwner,
    PreparedCombine,
    PreparedDispatch,
    ResendTo,
    Rows,
    Sent,
    Upcoming,
    Wait,
)
from tokenloom.errors import BackendUnavailable, InvalidArgument, KernelCompileError
from tokenloom.jit.compiler import load_nvrtc
from tokenloom.jit.kernel import Kernel, load_driver
from tokenloom.kernels.barrier.launch import BarrierVariant
from tokenloom.kernels.common import H200, HOPPER, MAX_BLOCKS, MAX_FUSED_RANKS, MAX_RANKS
from tokenloom.kernels.dispatch.launch import DispatchVariant
from tokenloom.plan import Plan
from tokenloom.runtime.deferred_release import synchronize
from tokenloom.runtime.devices import usable_sms
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.store_notes import poll
from tokenloom.runtime.symmetric_memory import SymmetricBuffer
from tokenloom.runtime.topology import Topology, host_identity

T = TypeVar("T")

ALONE = 2
"""Times as many SMs for a combine beside which nothing is computed, of at most half: NCCL, too, waits for SMs."""
ENDING_S = 1.0
"""How long a process that was lost may take to end, before it counts as one that lives."""
CLOSING_S = 0.1
"""How long the driver may take to end the kernels of a process that has ended."""
NUMBER_BITS = 40
"""Bits of a call number that count calls since ranks last came back."""
CAPABILITIES = Capabilities(
    layouts=("token", "expert", "rank", "slots"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    returns_views=True,
    receive_buffers=RECEIVE_BUFFERS,
    overlaps_pieces=True,
    captures=True,
    gathers_counts=True,
    takes_sms=True,
    own_node="nvlink",
    other_nodes=None,
    reads_on_host=False,
    weights_from_home=True,
    fused_layer=True,
    own_transport=True,
    has_rates=True,
)


class NvlinkBackend:
    """Dispatch and combine on one NVLink domain. Making one is collective.

    Kernels send and receive in one launch. In a call of two halves each half is a kernel, and the second half of a
    dispatch with exact sizes waits until the counts are on the host.

    Kernels leave masked ranks out (device/transport/call.cuh). Memory and graphs stay as they are.

    Args:
        plan, ranks: sizes and group.
        num_sms: SMs, one block each, that a kernel takes; None: as many as its rows need.
        checked: read the outcome of every call before it returns.
    """

    name = "nvlink"

    def __init__(self, plan: Plan, ranks: RankGroup, num_sms: int | None, checked: bool = False) -> None:
        self.capabilities = replace(CAPABILITIES, reads_on_host=checked)
        self._plan, self._ranks, self._num_sms, self._checked = plan, ranks, num_sms, checked
        self._own_rates = kept_rates.find(kept_rates.Machine.of(ranks))
        self._late: LateRanks | None = None
        self._fused: FusedLayerCalls | None = None
        if ranks.masks_late:
            self._mask_late_ranks()
        self._make_memory()

    @torch.inference_mode(False)  # a call in it may be the one that makes memory anew, and others write to it
    def _make_memory(self, first_call: int = 0, known_losses: int | None = None) -> None:
        """Make memory that all ranks which take part share, and all that knows where it is. Collective.

        Args:
            first_call: least number of the next call, the same on all ranks.
            known_losses: where late ranks are masked, how many losses the memory before knew of; None: there was none.
        """
        plan, ranks, num_sms, checked = self._plan, self._ranks, self._num_sms, self._checked
        control = SymmetricBuffer(control_layout(plan), ranks)
        # Numbers go on in great steps: who comes back has not counted.
        known_from = ranks.met_at << NUMBER_BITS
        usable = usable_sms(ranks.device.index)
        # Each rank waits for as many blocks of others as it has. So all take no more SMs than any of them may use, and
        # the rates that the first of them has found: ranks may see different disks.
        told = ranks.all_gather_object((min(MAX_SMS, usable), self._own_rates), "counting SMs")
        (_, self._measured), *_ = told = [each for each in told if each is not None]
        most_sms = num_sms or min(sms for sms, _ in told)
        few, rates = sends_before_opening(plan), self._measured or H200
        self.capabilities = replace(self.capabilities, link_gbytes_per_s=rates.link_gbytes_per_s)
        self._launcher = Launcher(plan, ranks, control, num_sms, max(first_call, known_from), most_sms, few, rates)
        self._launcher.known_from = known_from
        masked = ranks.masked
        if self._late is not None:
            gone = sorted({*range(ranks.num_ranks)} - {ranks.rank, *control.others})
            losses, gone = ranks.settle(f"made/{known_losses}", [ranks.num_losses, gone], PHASE)
            self._launcher.outcomes.known_losses, masked = losses, frozenset(gone)
        if masked:
            self._launcher.leave_out(masked)
        self._buffers = Buffers(plan, self._launcher)
        if self._fused is not None:
            self._fused.is_stale = True
            self._buffers.serve_fused_layer(self._fused.num_shared_experts, self._fused.recipe)
        self._launcher.keep_with_graphs.append(self._buffers)
        copies = Copies(plan, self._launcher, self._buffers)
        reads = checked and self._late is None  # else it reads outcomes, but not those of replays
        self._dispatcher = Dispatcher(plan, self._launcher, self._buffers, copies, reads)
        self._launcher.keep_with_graphs.append(self._dispatcher)
        blocks_alone = max(most_sms, min(ALONE * most_sms, usable // 2))
        self._combiner = Combiner(self._dispatcher.shared, blocks_alone)

    # -- calls ----------------------------------------------------------------------------------------------

    def gather_counts(self, kind: DispatchKind, counts: torch.Tensor) -> tuple[torch.Tensor, frozenset[int]]:
        if self._late is not None:
            return self._late.launch(lambda: gather_counts(self._launcher, counts)), self.masked
        table = gather_counts(self._launcher, counts)
        if self._checked and not torch.cuda.is_current_stream_capturing():
            self._launcher.settle(0)
        return table, self.masked

    def prepare_dispatch(self, kind: DispatchKind) -> PreparedDispatch:
        if self._late is not None:
            return DispatchUntilDone(self._late, self, kind)
        return self._dispatcher.prepare(kind)

    def prepare_combine(self, kind: CombineKind, number: int) -> PreparedCombine:
        if self._late is not None:
            return CombineUntilDone(self._late, self, kind)
        return self._combiner.prepare(kind, number)

    def ready_stream(self, waits: bool = False) -> int | None:
        if self._late is None and self._dispatcher.shared.overflow is None:
            stream = self._launcher.ready_stream(0 if waits else CALLS_IN_FLIGHT)
            if stream is not None:
                return stream
        self.check("nothing")
        return None

    def resend(
        self,
        handle: PeerHandle,
        values: Rows,
        to: ResendTo = "places",
        strategy: str = "dedup",
        owner: OutputOwner = False,
        stream: int | None = None,
    ) -> Sent[Rows]:
        return self._send_until_done(lambda: self._dispatcher.resend(handle, values, to, strategy, owner, stream))

    def send_weight_gradients(self, handle: PeerHandle, grad: torch.Tensor) -> Sent[torch.Tensor]:
        return self._send_until_done(lambda: self._combiner.send_weight_gradients(handle, grad))

    def _send_until_done(self, send: Callable[[], Sent[T]]) -> Sent[T]:
        return send() if self._late is None else self._late.until_done(send)

    @property
    def launcher(self) -> Launcher:
        return self._launcher

    @property
    def dispatcher(self) -> Dispatcher:
        return self._dispatcher

    @property
    def combiner(self) -> Combiner:
        return self._combiner

    def remake(self) -> bool:
        """See :class:`tokenloom.backends.peers.late_ranks.Remakes`."""
        ranks, before, overflow = self._ranks, self._launcher, self._dispatcher.shared.overflow
        known, losses, masked = before.outcomes.known_losses, ranks.num_losses, ranks.masked
        before.await_work()
        lost = ranks.lost & before.control.others
        have_ended = poll(lambda: lost <= {*before.control.ended_ranks()}, ENDING_S)
        if have_ended:
            time.sleep(CLOSING_S)
        told = ranks.all_gather_object([before.num_calls, before.epoch, have_ended, self._buffers.sizes()], PHASE)
        self._buffers.set_arrivals_back()  # nothing runs on any rank, until all have settled what follows
        synchronize(ranks.device)
        numbers, epochs, ended, sizes = zip(*(each for each in told if each is not None), strict=True)
        alike = all(each == sizes[0] for each in sizes)  # not where ranks were lost while some made memory
        losses, gone, is_kept = ranks.settle(f"kept/{known}", [losses, sorted(masked), alike and all(ended)], PHASE)
        if is_kept:
            if self._fused is not None:
                self._fused.begin_anew()
            before.resume(max(numbers), epochs, losses, gone)
        else:
            before.close(self._buffers.take_all())
            self._make_memory(max(numbers), known)
            self._dispatcher.shared.overflow = overflow
        return bool(is_kept) or not before.has_graphs

    def fused_layer(self, num_shared_experts: int, recipe: str) -> FusedLayerCalls:
        """Serve one MegaMoE from now on, and nobody else, on the memory of now.

        Raises:
            InvalidArgument: there are more ranks than its kernels serve.
        """
        if self._plan.num_ranks > MAX_FUSED_RANKS:
            raise InvalidArgument(
                f"a MegaMoE on 'nvlink' serves at most {MAX_FUSED_RANKS} ranks, and the group has "
                f"{self._plan.num_ranks}; use backend='composed'"
            )
        if not self._buffers.fused:
            self._buffers.serve_fused_layer(num_shared_experts, recipe)
        self._fused = FusedLayerCalls(self._launcher, self._buffers, num_shared_experts, recipe, self._late)
        return self._fused

    # -- state ----------------------------------------------------------------------------------------------

    def report_fault(self, fault: Exception, upcoming: Sequence[Upcoming]) -> None:
        """Open the calls that the others open before they wait: for an outcome, or for a buffer that is not there."""

        def report() -> None:
            first = upcoming[0]
            reads = (self._checked or self._late is not None) and not self._buffers.fused
            names = [first.name]
            for call, following in pairwise(upcoming):
                if call.awaited or reads or not all(map(self._has_buffers, (call, following))):
                    break
                names.append(following.name)
            self._launcher.report_fault(fault, names, first.awaited or not self._has_buffers(first))

        if self._late is None:
            report()
        else:
            self._late.call(report)  # which looks again at memory that was made anew

    def _has_buffers(self, call: Upcoming) -> bool:
        options = call.options
        if self._buffers.fused:
            return self._buffers.has_for_fused_layer()
        if isinstance(options, CombineOptions):
            return self._buffers.has_for_combine(options, call.split)
        if isinstance(options, DispatchOptions):
            return self._buffers.has_for_dispatch(options, call.value_bytes, call.width)
        return True

    @property
    def members(self) -> NvlinkBackend:
        """The backend itself: taking ranks back makes its memory anew."""
        return self

    @property
    def masked(self) -> frozenset[int]:
        return self._launcher.masked | (self._ranks.masked if self._late is not None else frozenset())

    def mask(self, ranks: Collection[int]) -> None:
        """Calls that have been made end first, so this raises what they have found."""
        self._require_no_capture()
        if self._buffers.have_arrivals:
            self._launcher.finish_all()  # all ranks have the same halves open
        self._launcher.settle(0)
        self._ranks.mask(ranks)
        if self._buffers.have_arrivals:
            self._forget_rows_sent_ahead()
        self._launcher.leave_out(self._ranks.masked)

    def _forget_rows_sent_ahead(self) -> None:
        """Make rows absent that masked ranks have sent, in calls that nobody else has opened. Collective."""
        self._launcher.await_work()
        if self._launcher.control.ended_ranks():
            time.sleep(CLOSING_S)
        self._buffers.set_arrivals_back()
        synchronize(self._ranks.device)
        self._ranks.all_gather_object(None, "masking ranks")  # who goes on may send to those that are not so far

    def unmask(self, ranks: Collection[int]) -> None:
        """All memory is made anew, with those that come back. Graphs captured before go on in the old one, without
        them.
        """
        self._require_no_capture()
        self._launcher.finish_all()  # all ranks have the same halves open
        self._launcher.settle(0)
        before = self._ranks.met_at
        self._ranks.unmask(ranks)
        if self._ranks.met_at == before:  # nobody comes back
            return
        self._launcher.close(self._buffers.take_all())
        try:
            self._make_memory()
        except Exception as fault:
            self._ranks.abort(fault)
            raise
        if self._late is not None:
            self._late.begin_anew()

    def mask_late(self) -> None:
        """The host waits for every call then, so that it can be made again."""
        self._ranks.mask_late()
        if self._late is not None:  # it was made so
            return
        self._mask_late_ranks()
        self._launcher.close(self._buffers.take_all())
        self._make_memory()

    def _mask_late_ranks(self) -> None:
        if self._ranks.num_ranks == 1:
            return
        if self._ranks.served:
            raise InvalidArgument("with on_timeout='mask', backend nvlink has dispatch and combine, and no more calls")
        self._ranks.served = True
        self._late = LateRanks(self._ranks, self)
        self.capabilities = replace(self.capabilities, reads_on_host=True, overlaps_pieces=False)

    def _require_no_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument("ranks are masked between calls and replays; mask them outside of the capture")

    def check(self, wait: Wait) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        shared = self._dispatcher.shared
        if shared.overflow is not None:
            overflow, shared.overflow = shared.overflow, None
            raise overflow
        if self._late is None:
            self._launcher.check(wait)
        elif wait == "everything":
            self._late.check()

    def memory(self) -> list[str]:
        sms = chosen_sms(self._launcher, self._measured is not None)
        control = self._launcher.control.layout.total_bytes
        return [*sms, f"flags and counts: {control / 1e6:.1f} MB", *self._buffers.memory()]

    def close(self) -> None:
        self._launcher.close(self._buffers.take_all())


MAX_SMS = MAX_BLOCKS
"""One block takes one SM."""
TRIED_RANKS = 8
"""More were tried on the emulator alone, which :meth:`tokenloom.Communicator.describe` says."""
BULK_VALUES = 8
"""Values of 2 bytes in the 16 that a bulk copy moves at least."""


def probe(request: Request) -> Availability:
    """Whether the kernels run on this rank; one of them is loaded to find out.

    Raises:
        InvalidArgument: ``num_sms`` is more than this process may use.
    """
    device = request.device
    why_not = why_no_kernels(request)
    facts = {"host": host_identity()}
    if why_not is not None:
        return Availability("nvlink", False, why_not, facts)
    facts["gpu"] = gpu_identity(device)
    if request.num_sms is not None:
        require_sms(request.num_sms, device)
    why = f"own kernels on {torch.cuda.get_device_name(device)}"
    if request.plan is not None and request.plan.num_ranks > TRIED_RANKS:
        why += f"; no more than {TRIED_RANKS} ranks have run on GPUs yet"
    return Availability("nvlink", True, why, facts)


def gpu_identity(device: torch.device) -> str:
    """The UUID of a GPU, which no other has."""
    return str(torch.cuda.get_device_properties(device).uuid)


def objections(by_rank: Sequence[Availability]) -> list[tuple[int, str]]:
    """All ranks must be on one host, each on a GPU of its own."""
    hosts = [found.facts["host"] for found in by_rank]
    away = [(rank, "it is on another host than rank 0") for rank, host in enumerate(hosts) if host != hosts[0]]
    gpus = [found.facts["gpu"] for found in by_rank]
    sharing = [rank for rank, gpu in enumerate(gpus) if gpu in gpus[:rank]]
    return away + [(rank, f"it shares its GPU with rank {gpus.index(gpus[rank])}") for rank in sharing]


def make(request: Request, ranks: RankGroup) -> NvlinkBackend:
    """The backend, whose first buffer shows that all ranks can map each other's memory."""
    assert request.plan is not None
    return NvlinkBackend(request.plan, ranks, request.num_sms, request.checked)


def why_not_on(topology: Topology) -> str | None:
    """All ranks must be on one node, also where nodes are pretended."""
    return None if topology.num_nodes == 1 else f"it runs on one node, the ranks are on {topology.num_nodes}"


REGISTRATION = Registration("nvlink", CAPABILITIES, probe, make, objections, why_not_on)


def why_no_kernels(request: Request, most_ranks: int = MAX_RANKS) -> str | None:
    """Say why the kernels, which serve so many ranks, cannot run on this rank; None if they can."""
    plan, device = request.plan, request.device
    if request.dtype == torch.float64:
        return "its kernels have no float64"
    if plan is not None and plan.hidden % BULK_VALUES:
        return f"rows of {plan.hidden} bfloat16 values are no multiple of {BULK_VALUES * 2} bytes"
    if plan is not None and plan.num_ranks > most_ranks:
        return f"it serves at most {most_ranks} ranks"
    if device.type != "cuda":
        return f"it needs a GPU, the tensors are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        return f"its kernels are for compute capability 9.0 (Hopper), {torch.cuda.get_device_name(device)} has " + (
            f"{capability[0]}.{capability[1]}"
        )
    try:
        load_nvrtc()
        load_driver()
        if plan is not None:
            _load_kernels(plan, device)
    except (BackendUnavailable, InvalidArgument, KernelCompileError, RuntimeError) as error:
        return str(error).splitlines()[0]
    own = torch.cuda.current_device() if device.index is None else device.index
    for peer in range(torch.cuda.device_count()):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"{device} cannot access the memory of cuda:{peer}"
    return None


def _load_kernels(plan: Plan, device: torch.device) -> None:
    """Raise what an old driver, a compiler that is missing, or too many experts come to."""
    # If experts fit in these, they fit everywhere.
    DispatchVariant(plan=plan, layout="expert", x_dtype=torch.bfloat16).spec()
    DispatchVariant(plan=plan, layout="slots", x_dtype=torch.bfloat16, staged=True).spec()
    Kernel(BarrierVariant(plan=plan).spec(), torch.cuda.current_device() if device.index is None else device.index)


def require_sms(num_sms: int, device: torch.device) -> None:
    """The blocks of a kernel wait for each other, so all of them must be on the GPU at the same time.

    Raises:
        InvalidArgument: this process may use fewer SMs.
    """
    usable = usable_sms(torch.cuda.current_device() if device.index is None else device.index)
    if num_sms > usable:
        raise InvalidArgument(
            f"num_sms is {num_sms}, more than the {usable} SMs of {device} that this process may use "
            "(an MPS limit or a green context)"
        )
