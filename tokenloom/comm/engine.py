"""The calls of one communicator as tokenloom's own layers make them: in halves, with faults told and streams chosen.

``Communicator`` checks what users pass and then calls this; layers call it directly, with handles instead of
:class:`tokenloom.Routed`, and write their gradients by hand. Every method that sends is collective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import torch
from torch.profiler import record_function

from tokenloom.backends.base import (
    Backend,
    Capabilities,
    CombineOptions,
    DispatchInputs,
    DispatchOptions,
    Handle,
    MakesUsualCalls,
    OwnOutputs,
    Pending,
    Rows,
    Upcoming,
    Wait,
)
from tokenloom.comm import validation
from tokenloom.comm.pending import OpenCalls
from tokenloom.comm.torch_modes import is_eager, require_eager, untransformed
from tokenloom.errors import BackendUnavailable, CommunicatorBroken, InvalidArgument, PeerTimeout, is_known_to_all
from tokenloom.ops import routing
from tokenloom.plan import Plan
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.streams import SideStream, is_current, on_device

T = TypeVar("T")

DISPATCH_RANGE = "tokenloom::dispatch"
COMBINE_RANGE = "tokenloom::combine"
"""Names of the profiler ranges: what really runs, so the gradient of a dispatch is called combine."""


NOTHING_AROUND: AbstractContextManager[Any] = nullcontext()
profiler_listens = torch._C._autograd._profiler_enabled


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A named range where a profiler listens. Elsewhere nothing, which costs the host less."""
    return record_function(name) if profiler_listens() else NOTHING_AROUND


class Sequence:
    """A block in which declared calls are made; see :meth:`Engine.sequence`.

    Attributes:
        upcoming: declared calls that are not open yet.
        open: those that are open and not yet received.

    Raises:
        InvalidArgument: as it is entered, and then the others hear of it: another thread is in a call of this
            communicator, or torch transforms what is called.
    """

    def __init__(self, engine: Engine, upcoming: Iterable[Upcoming]) -> None:
        self.upcoming = list(upcoming)
        self.open: list[Pending[Any]] = []
        self._engine = engine

    def opened(self) -> None:
        """The next of the declared calls is open."""
        self.upcoming[:1] = []

    def __enter__(self) -> Sequence:
        engine, fault = self._engine, None
        self._turn = turn = engine.ranks.turn
        if not turn.take():
            engine.ranks.require_alive()
            fault = turn.enter(engine.ranks.open_timeout_s)
        self._outer, engine._sequence = engine._sequence, self
        self._device = on_device(engine.ranks.device)
        self._device.__enter__()
        try:
            if fault is not None:
                raise fault
            require_eager()
        except InvalidArgument as error:
            self.__exit__(InvalidArgument, error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        try:
            if isinstance(fault, Exception) and self.upcoming:
                self._engine.open_calls.opened()  # it failed, which is how every rank's call ends
            if fault is not None and not is_known_to_all(fault):
                if is_eager():
                    self._engine._tell(fault, self)
                else:
                    told: BaseException = fault
                    untransformed(lambda: self._engine._tell(told, self))
        finally:
            self._engine._sequence = self._outer
            self._device.__exit__(None, None, None)
            self._turn.leave()


class Engine:
    """One communicator's calls in halves.

    Attributes:
        plan: sizes.
        ranks: the group, for small collectives beside the calls. Not to be used between the halves of a call.
        capabilities: what the backend can do.
        side_stream: the communicator's own stream, for transfers beside computation.
        open_calls: those that users have sent and not yet received.
    """

    def __init__(self, plan: Plan, ranks: RankGroup, backend: Backend) -> None:
        self.plan = plan
        self.ranks = ranks
        self.side_stream = SideStream(ranks.device)
        self.open_calls = OpenCalls(ranks.turn)
        self._backend = backend
        self._sequence: Sequence | None = None
        self._options_of = lru_cache(maxsize=64, typed=True)(partial(_checked_options, plan, backend))

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def makes_usual_calls(self) -> MakesUsualCalls | None:
        """The backend, if it makes usual calls."""
        backend: Any = self._backend
        return backend if self.capabilities.usual_calls else None

    def dispatch_options(self, *given: Any) -> DispatchOptions:
        """Check the options of a dispatch once for each value of what was given.

        Args:
            given: what follows ``able`` in :func:`tokenloom.comm.validation.dispatch_options`.
        """
        try:
            return self._options_of(*given)
        except TypeError:  # a list, say, cannot be looked up
            return _checked_options(self.plan, self._backend, *given)

    # -- errors ---------------------------------------------------------------------------------------------

    def is_plain(self) -> bool:
        """Whether a call that is made now needs nothing around it: its device is the current one, no profiler listens,
        torch transforms nothing, and no other calls have been declared."""
        plain = self._sequence is None and not profiler_listens() and is_current(self.ranks.device.index)
        return plain and is_eager()

    def begin(self, plain: bool = False) -> None:
        """Raise what earlier calls left behind, as far as it is known without waiting.

        Args:
            plain: :meth:`is_plain` has just said so.
        """
        self.ranks.require_alive()
        if plain:
            self._backend.check("nothing")
            return
        with on_device(self.ranks.device):
            self._backend.check("nothing")

    def check(self, wait: Wait) -> None:
        """Wait, then raise what earlier calls left behind.

        Raises:
            CapacityOverflow: a bounded dispatch dropped rows (raised once).
            PeerError, PlanMismatch, PeerTimeout: an earlier call failed.
            CommunicatorBroken: closed, or an earlier call timed out.
        """
        self.ranks.require_alive()
        with on_device(self.ranks.device):
            self._backend.check(wait)

    def sequence(self, *upcoming: Upcoming) -> Sequence:
        """Declare the calls that all ranks are about to open, in their order, and make them inside.

        What fails here on this rank alone is told to the others at once: it joins, with a status, the calls that they
        open before they learn of it. They raise PeerError; this rank raises its own error.
        """
        return Sequence(self, upcoming)

    def _tell(self, fault: BaseException, sequence: Sequence) -> None:
        if not isinstance(fault, Exception):  # it may end the program, which shall not wait for the others
            self.ranks.abort(fault)
        fault.known_to_all = True  # type: ignore[attr-defined]  # nobody around tells it again, whatever comes of this
        if not isinstance(fault, Exception):
            return
        for pending in list(sequence.open):  # counts that a kernel leaves for the host have to be taken
            try:
                pending.receive()
            except Exception as other:
                if is_known_to_all(other):
                    return  # somebody else failed too, and nobody goes on
        captured = self.ranks.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if sequence.upcoming and not captured:  # in a capture nothing runs, on no rank
            self.side_stream.join()  # calls on it come first
            with suppress(PeerTimeout, CommunicatorBroken):  # later calls say so, this one has its own error
                self._backend.report_fault(fault, sequence.upcoming)

    def _require_open(self) -> None:
        """A call may open. Backward gets here without :meth:`begin`, maybe after the communicator was closed."""
        self.ranks.require_alive()
        self.open_calls.require_room()

    def _opened(self, pending: Pending[T]) -> Pending[T]:
        self.open_calls.opened()
        if self._sequence is None:
            return pending
        self._sequence.opened()
        return _Tracked(pending, self._sequence)

    # -- dispatch and combine -------------------------------------------------------------------------------

    def send_dispatch(self, options: DispatchOptions, inputs: DispatchInputs) -> Pending[tuple[Handle, torch.Tensor]]:
        """Open a dispatch and send. ``receive`` gives (handle, rows [places, H]), without a graph."""
        self._require_open()
        with profiler_range(DISPATCH_RANGE):
            return self._opened(self._backend.send_dispatch(options, inputs))

    def send_combine(
        self,
        handle: Handle,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        options: CombineOptions,
        out: torch.Tensor | None = None,
        alone: bool = False,
        split: bool = False,
    ) -> Pending[torch.Tensor]:
        """Open a combine and send rows [places, H] home. ``receive`` gives [T, H], without a graph.

        Args:
            weights: received weights that multiply the rows, if ``options`` say so. None: those of the handle.
            out: [T, H] to write to, or None.
            alone: nothing is computed meanwhile, so the transfer may take more of the GPU.
            split: the caller may take long until ``receive``.
        """
        self._require_open()
        with profiler_range(COMBINE_RANGE):
            return self._opened(self._backend.send_combine(handle, rows, weights, options, out, alone, split))

    def send_again(self, handle: Handle, values: Rows, strategy: str, own: OwnOutputs = False) -> Pending[Any]:
        """Send other values [T, H], with scales if they have some, to the places of a dispatch. ``receive`` gives
        [places, H], and scales; views, unless ``own`` says something else."""
        self._require_open()
        with profiler_range(DISPATCH_RANGE):
            return self._opened(self._backend.send_again(handle, values, strategy, own))

    def send_weight_gradients(self, handle: Handle, grad: torch.Tensor) -> Pending[torch.Tensor]:
        """Send the gradient of the received weights home. ``receive`` gives [T, K]."""
        self._require_open()
        with profiler_range(COMBINE_RANGE):
            return self._opened(self._backend.send_weight_gradients(handle, grad))

    def combine_gradient(
        self,
        handle: Handle,
        grad: torch.Tensor,
        rows: torch.Tensor | None,
        weights: torch.Tensor | None,
        dtype: torch.dtype,
        strategy: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of a combine from that of its result, [T, H].

        Args:
            rows: [places, H] that were combined, if the weights want a gradient.
            weights: that multiplied them, or None.
            dtype: of the rows.
            strategy: what carries it, a dispatch's.

        Returns:
            Gradient of the rows, [places, H], and of the received weights [R, K] if ``rows`` is given.
        """
        fills_places = handle.options.sizes == "exact" and handle.options.layout != "rank"  # others must become zero
        if rows is None and weights is None and fills_places:
            return self.send_again(handle, grad, strategy).receive().to(dtype, copy=True), None
        self._require_open()
        with profiler_range(DISPATCH_RANGE):
            received = self._opened(self._backend.send_rows(handle, grad, strategy)).receive()
        positions = handle.positions()
        if weights is not None:  # exact sizes have as many received weights as rows
            positions = positions[: len(weights)]
        return routing.spread_gradient(received, positions, handle.num_places, weights, rows, dtype)

    # -- weights of rows, on this rank ----------------------------------------------------------------------

    def row_weights(self, handle: Handle, weights: torch.Tensor, num_places: int) -> torch.Tensor:
        """Received weights [R, K] -> [num_places] of their rows (layout "expert"), 0 where no row lies."""
        return self._backend.row_weights(handle, weights, num_places)

    def route_gradients(self, handle: Handle, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The gradient of :meth:`row_weights`: [num_places] -> [R, K] like the received weights."""
        return self._backend.route_gradients(handle, grad, like)

    def fused_layer(self, num_shared_experts: int) -> Any:
        """The calls of a fused layer, which has this communicator for itself from now on.

        Raises:
            BackendUnavailable: the backend has none.
        """
        if not self.capabilities.fused_layer:
            raise BackendUnavailable(f"backend {self.backend_name} has no fused layer; use backend='nvlink'")
        return self._backend.fused_layer(num_shared_experts)  # type: ignore[attr-defined]

    # -- the communicator's own -----------------------------------------------------------------------------

    @property
    def backend_name(self) -> str:
        """For people."""
        return self._backend.name

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that take no part."""
        return self._backend.masked

    def mask(self, ranks: Collection[int]) -> None:
        """Leave out these ranks too, see :meth:`tokenloom.backends.base.Backend.mask`."""
        self.ranks.require_alive()
        with self.ranks.turn:
            self._backend.mask(ranks)

    def unmask(self, ranks: Collection[int]) -> None:
        """Take back ranks, see :meth:`tokenloom.backends.base.Backend.unmask`."""
        self.ranks.require_alive()
        with self.ranks.turn:
            self._backend.unmask(ranks)

    def memory(self) -> list[str]:
        """Lines for people about buffers that outlive a call."""
        return self._backend.memory()

    def close(self) -> None:
        """Release the backend; later calls raise CommunicatorBroken. In a forked process nothing is the caller's."""
        if self.ranks.is_of_parent:
            return
        self.open_calls.clear()
        with on_device(self.ranks.device):
            self._backend.close()
        self.ranks.close()


def _checked_options(plan: Plan, backend: Backend, *given: Any) -> DispatchOptions:
    return validation.dispatch_options(plan, backend.capabilities, *given)


class _Tracked(Generic[T]):
    """A pending call that its sequence knows of."""

    def __init__(self, pending: Pending[T], sequence: Sequence) -> None:
        self._pending, self._calls = pending, sequence
        sequence.open.append(self)

    def receive(self) -> T:
        self._calls.open.remove(self)
        return self._pending.receive()
