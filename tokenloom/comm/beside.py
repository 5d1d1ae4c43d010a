"""What a communicator does beside dispatch and combine: other values for the routes of a dispatch, and values back."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch.nn import functional

from tokenloom.backends.base import Upcoming
from tokenloom.comm import validation, validation_beside
from tokenloom.comm.calls import Calls, Copies
from tokenloom.comm.engine import COMBINE_RANGE, DISPATCH_RANGE, Engine, profiler_range
from tokenloom.comm.graph_breaks import breaks_graph
from tokenloom.comm.halves import CombineCall, DispatchCall
from tokenloom.comm.routed import Routed
from tokenloom.comm.torch_modes import require_no_tangent
from tokenloom.comm.usual import UsualCalls
from tokenloom.errors import InvalidArgument, NotDifferentiable
from tokenloom.plan import ROUTE_LAYOUTS, align_up

NARROW = 8
"""Values in a row of which the rows that carry weights have a multiple: every backend moves 16 bytes."""


class CallsBeside(Calls):
    """The calls of a communicator that belong to an earlier dispatch, besides its combine.

    Weights of tokens travel in rows of their own, K float32 values wide. The engine for them is made when a call first
    needs it, by all ranks alike.
    """

    _narrow: Engine | None = None
    _narrow_usual: tuple[Engine, UsualCalls | None] | None = None

    def _make_engine(self, hidden: int) -> Engine:
        """Another engine on the same ranks, for rows of ``hidden`` float32 values."""
        raise NotImplementedError

    @overload
    def dispatch_again(self, x: torch.Tensor, routed: Routed, copy: bool | Copies = ...) -> torch.Tensor: ...

    @overload
    def dispatch_again(
        self, x: tuple[torch.Tensor, torch.Tensor], routed: Routed, copy: bool | Copies = ...
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @breaks_graph
    def dispatch_again(
        self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], routed: Routed, copy: bool | Copies = True
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Send other rows of the same tokens to the places of an earlier dispatch. Has no gradient.

        Args:
            x: [T, H], T as of that dispatch; bfloat16, float16, float32 or float64. Or FP8 rows with scales, as
                ``dispatch`` takes them, except in layout "slots".
            routed: what that dispatch returned.
            copy: True or "if_needed", as of ``dispatch``.

        Returns:
            Shape of ``routed.tokens``, dtype of x; and scales, if x has some. Places without a row are as in
            ``dispatch``.

        Raises:
            TokenloomError: what ``dispatch`` raises for such an x; also NotDifferentiable if x requires grad.
        """
        usual = self.usual
        if usual is not None:
            found = usual.dispatch_again(self, x, routed, copy)
            if found is not None:
                return found
        engine = self.engine
        engine.begin()
        with profiler_range(DISPATCH_RANGE), engine.sequence(Upcoming("rows again")):
            validation.require_routed(routed, self)
            _require_no_grad("x", x)
            plan, num_tokens = engine.plan, routed._handle.num_tokens
            if copy not in (True, "if_needed"):
                raise InvalidArgument(f"copy is {copy!r}, expected True or 'if_needed'")
            values, words = validation_beside.unpacked(plan, x, "rows")
            validation_beside.rows_again(
                plan, engine.capabilities, engine.ranks.device, values, num_tokens, routed.layout
            )
            own = validation.COPIES[copy]
            values = values.detach() if isinstance(values, torch.Tensor) else tuple(values)
            found = engine.send_again(routed._handle, values, "dedup", own).receive()
            _learn_outcome(engine)
            if usual is not None and words is None:
                usual.learn_again(values, routed, copy, own)
            if isinstance(found, torch.Tensor):
                return routed._by_place(found)
            rows, scales = found
            if words is not None:
                scales = scales.view(torch.int32)[:, :words].contiguous()
            return routed._by_place(rows), routed._by_place(scales)

    @breaks_graph
    def combine_weights(self, values: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Bring home weights, or their gradients, that belong to the rows of a dispatch. Has no gradient.

        Args:
            values: float32. Layouts "token" and "rank": shape of ``routed.topk_ids``; all columns count, also those
                without a route. Layouts "expert" and "slots": one value per row, [rows] or [L, S]. Values where no row
                lies are never read.
            routed: what dispatch returned.

        Returns:
            float32 [T, K], 0 where nothing came. Layouts "token" and "rank": the sum of the token's rows, over ranks
            in ascending order, starting from the first. Layouts "expert" and "slots": the value of each route's row.

        Raises:
            TokenloomError: what ``combine`` raises for such values; also NotDifferentiable if they require grad.
        """
        home = self._usual_sums(values, routed)
        if home is not None:
            return home
        self.engine.begin()
        by_route = isinstance(routed, Routed) and routed.layout in ROUTE_LAYOUTS
        if not by_route:
            self._require_weights_apart("combine")
        engine = self.engine if by_route else self.engine_beside()
        upcoming = [Upcoming("gradient of weights" if by_route else "combine")]
        if not by_route and not self._has_way(routed, engine):
            exact = isinstance(routed, Routed) and routed._handle.options.sizes == "exact"
            upcoming.insert(0, Upcoming("dispatch", awaited=exact))
        with profiler_range(COMBINE_RANGE), engine.sequence(*upcoming):
            validation.require_routed(routed, self)
            _require_no_grad("values", values)
            shape = routed._shape[:-1] if by_route else (*routed._shape[:-1], engine.plan.top_k)
            validation_beside.values_of_rows(values, shape, engine.ranks.device)
            if by_route:
                return self._combine_values(values.detach().flatten(), routed)
        return self._sum_values(values.detach(), routed, engine)

    def _combine_values(self, values: torch.Tensor, routed: Routed) -> torch.Tensor:
        """[places] of rows that are routes -> [T, K]."""
        handle = routed._handle
        like = torch.empty(handle.positions().shape, dtype=torch.float32, device=values.device)
        routes = self.engine.route_gradients(handle, values, like)
        home = self.engine.send_weight_gradients(handle, routes).receive()
        _learn_outcome(self.engine)
        return home

    def _sum_values(self, values: torch.Tensor, routed: Routed, engine: Engine) -> torch.Tensor:
        """[places, K] of rows that are tokens -> [T, K]."""
        top_k, more = engine.plan.top_k, engine.plan.hidden - engine.plan.top_k
        sums = None, self._default_mode, None, None  # weighted, mode, wire_dtype, out_dtype
        if not self._has_way(routed, engine):
            _require_same_ranks(routed, engine)
            vars(routed)["_narrow"] = engine, self._route_again(routed, engine, None)
        found = vars(routed)["_narrow"]
        rows = functional.pad(values, (0, more)) if more else values
        usual = self._usual_of(engine)
        with torch.no_grad():
            out = None if usual is None else usual.combine(self, rows, found[1], sums, None, None)
            if out is None:
                call = CombineCall(self, engine, rows, found[1], sums, None)
                out = call.run()
                if usual is not None:
                    usual.learn_combine(rows, found[1], sums, call.options)
        return out[:, :top_k].contiguous() if more else out

    @staticmethod
    def _has_way(routed: object, engine: Engine) -> bool:
        """Whether the engine knows the routes already, by a dispatch of its own."""
        found = vars(routed).get("_narrow") if isinstance(routed, Routed) else None
        return found is not None and found[0] is engine

    def _usual_sums(self, values: Any, routed: Any) -> torch.Tensor | None:
        """Sums of rows that are tokens, if such weights came home before and these are right at a glance."""
        engine, usual = self._narrow, self.usual
        if engine is None or usual is None or torch.is_grad_enabled():
            return None
        if not (
            routed.__class__ is Routed
            and routed._owner is self
            and routed.layout not in ROUTE_LAYOUTS
            and values.__class__ is torch.Tensor
            and values.dtype is torch.float32
            and values.shape == (*routed._shape[:-1], engine.plan.top_k)
            and values.device == engine.ranks.device
            and values.is_contiguous()
            and usual.ready() is not None
        ):
            return None
        return self._sum_values(values, routed, engine)

    def _usual_of(self, engine: Engine) -> UsualCalls | None:
        """The usual calls of the engine for weights, where its backend makes some."""
        found = self._narrow_usual
        if found is None or found[0] is not engine:
            backend = engine.makes_usual_calls
            found = self._narrow_usual = engine, None if backend is None else UsualCalls(engine, backend)
        return found[1]

    def reweighted(self, routed: Routed, topk_weights: torch.Tensor) -> Routed:
        """Give the routes of an earlier dispatch other weights, or their first. Has no gradient.

        Args:
            routed: what a dispatch returned.
            topk_weights: float32 [T, K], ignored where the id is -1.

        Returns:
            The same rows with these weights, as ``topk_weights`` or as factors of ``combine``. ``routed`` stays as it
            is.

        Raises:
            TokenloomError: what ``dispatch`` raises for such weights; also NotDifferentiable if they require grad.
        """
        return self._reweighted(routed, topk_weights)

    def _reweighted(self, routed: Routed, topk_weights: torch.Tensor, without_lost: bool = False) -> Routed:
        """Do what :meth:`reweighted` does; also, if asked, where ranks were masked since the dispatch."""
        self.engine.begin()
        self._require_weights_apart("dispatch")
        engine = self.engine_beside()
        with engine.sequence(Upcoming("dispatch")):
            validation.require_routed(routed, self)
            _require_no_grad("topk_weights", topk_weights)
            validation_beside.weights_at_home(
                engine.plan, topk_weights, routed._handle.num_tokens, engine.ranks.device
            )
        if not without_lost or not routed._handle.masked <= engine.masked:
            _require_same_ranks(routed, engine)
        again = self._route_again(routed, engine, topk_weights.detach())
        made = Routed(self, self.engine.plan, routed._handle, routed._rows, None, True, routed._ids_dtype, routed._out)
        late, lost = again._received_weights, again._handle.masked - routed._handle.masked
        if late is not None and lost and routed.layout != "rank":  # rows of those ranks keep their places
            came = torch.tensor([rank not in lost for rank in range(engine.plan.num_ranks)], device=late.device)
            rows = torch.repeat_interleave(came, routed._handle.counts.source_counts)
            places = functional.pad(rows, (0, max(0, len(late) - len(rows))))
            late = late.new_zeros(len(places), late.shape[1]).masked_scatter_(places[:, None], late)
        vars(made).update(_late_weights=late, _scale_words=routed._scale_words)
        return made

    def _with_weights(
        self, routed: Routed, topk_weights: torch.Tensor | None, weighted: bool | None
    ) -> tuple[Routed, torch.Tensor | None]:
        if topk_weights is None or self.engine.capabilities.weights_from_home:
            return routed, topk_weights
        if not isinstance(routed, Routed) or routed.layout not in ROUTE_LAYOUTS or weighted is False:
            return routed, topk_weights  # which is an error
        self._require_weights_apart("combine")
        return self._reweighted(routed, topk_weights, without_lost=True), None

    def _require_weights_apart(self, call: str) -> None:
        """Raise, and tell the ranks that open this call, where weights travel with rows only."""
        if not self.engine.capabilities.weights_apart:
            with self.engine.sequence(Upcoming(call)):
                raise InvalidArgument("here weights travel with rows only; give topk_weights to dispatch")

    def engine_of_weights(self) -> tuple[str, Engine]:
        """What a combine with ``topk_weights`` opens first: the name of the call, and its engine."""
        if self.engine.capabilities.weights_from_home:
            return "combine", self.engine
        return "dispatch", self.engine_beside()

    def _route_again(self, routed: Routed, engine: Engine, weights: torch.Tensor | None) -> Routed:
        """Dispatch narrow rows of zeros by the same ids, to the same places if the same ranks are masked."""
        handle = routed._handle
        x = torch.zeros(handle.num_tokens, engine.plan.hidden, dtype=torch.float32, device=engine.ranks.device)
        options: tuple[Any, ...] = (handle.options.layout, handle.options.alignment, handle.options.sizes)
        capacity = handle.options.capacity
        with torch.no_grad():
            tensors = (x, handle.ids(), weights)
            values = (*options, capacity, False, False, "dedup", "rows")
            usual = self._usual_of(engine)
            found = None if usual is None else usual.dispatch(self, *tensors, values, None, True)
            if found is not None:
                return found
            call = DispatchCall(self, engine, tensors, values, True, None)
            made = call.run()
            if usual is not None:
                usual.learn_dispatch(values, call.options, call.inputs, True)
            return made

    def engine_beside(self) -> Engine:
        """The engine for weights, made by all ranks at the first call: what :meth:`reweighted` opens its call on."""
        if self._narrow is None:
            self._narrow = self._make_engine(align_up(self.engine.plan.top_k, NARROW))
        return self._narrow


def _require_same_ranks(routed: Routed, engine: Engine) -> None:
    """Raise where ranks were masked since a dispatch. All ranks do."""
    if routed._handle.masked != engine.masked:
        error = InvalidArgument("ranks were masked since the dispatch, so rows have other places now; dispatch again")
        error.known_to_all = True
        raise error


def _learn_outcome(engine: Engine) -> None:
    """Raise what the call found, where the host reads it of every call."""
    if engine.capabilities.reads_on_host:
        engine.check("calls")


def _require_no_grad(name: str, tensor: object) -> None:
    require_no_tangent(**{name: tensor})
    if isinstance(tensor, torch.Tensor) and torch.is_grad_enabled() and tensor.requires_grad:
        raise NotDifferentiable(f"{name} requires grad, which this call has none for; detach it")
