"""Communicator: what users call to move tokens to their experts and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from math import prod
from types import TracebackType
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends import registry
from tokenloom.backends.seam import DispatchOut
from tokenloom.comm import autograd, checks
from tokenloom.comm.balance import Balance, BalanceStats, check_balance, default_rows_per_pull
from tokenloom.comm.calls import CombineCall, DispatchCall, Kinds, ResendCall, ReweightCall, ValuesHomeCall
from tokenloom.comm.engine import Engine, Pending
from tokenloom.comm.placement import Placement, placement_of, placement_terms, plan_of_slots, require_fits
from tokenloom.comm.routed import Layout, Routed
from tokenloom.errors import CommunicatorBroken, InvalidArgument, PeerTimeout
from tokenloom.ops.slots_of_routes import require_room, require_room_to_split
from tokenloom.plan import ROUTE_LAYOUTS, Plan
from tokenloom.runtime import topology
from tokenloom.runtime.rank_group import MAKING, RankGroup
from tokenloom.runtime.rendezvous import agree, agreeing
from tokenloom.runtime.torch_modes import breaks_graph, require_eager
from tokenloom.runtime.turns import Turn

__all__ = ["Communicator"]


Sizes = Literal["exact", "bounded"]
Mode = Literal["per_rank", "per_route", "per_node"]
ScaleLayout = Literal["rows", "columns", "packed"]
Recipe = Literal["block", "row"]
Copies = Literal["if_needed"]


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
        backend: "auto" picks the best that works on all ranks (``describe()`` says why). Or one of "nvlink",
            "network", "collective", "gin" and "padded". The last is for several nodes, and is taken only by its name:
            it has run on GPUs of one host alone.
        device: where the tensors are. None means the current GPU for NCCL groups, else the CPU.
        timeout_s: longest wait for another rank inside a call, in seconds (over NCCL the group's own timeout applies).
        open_timeout_s: longest wait for another rank to open the same call, in seconds. A rank that writes a
            checkpoint, evaluates or compiles may be that late. None means the group's own timeout, at least 10
            minutes.
        dtype: dtype of the tokens, where it is known. "auto" then picks a backend that moves it.
        num_sms: SMs that a kernel takes, 1 to 32. The others stay with your GEMMs. None: on backend "nvlink" as many
            as fill the links or, where links are not the limit and for few tokens, up to 32; ``describe()`` has the
            numbers. Elsewhere 16.
        checked: on backend "nvlink", read ids and the outcome of every call on the host before it returns, so that
            errors come at once. "collective" always does.
        on_timeout: what happens to a rank that another one waits for. "raise": the wait ends with PeerTimeout, and
            with it the communicator. "mask" ("nvlink", and the others over gloo): a rank that does not come
            within ``timeout_s``, or whose process ends, is masked by all others alike. The call goes on without it and
            loses just the routes to it. ``timeout_s`` then counts from the opening of a call as well. Replays of CUDA
            graphs are made again by you: ``check`` says so.
        transport: what carries rows between nodes. "auto" picks the best that works on all ranks, "collective" is
            torch.distributed. "gin" is NCCL's network that GPUs start transfers of by themselves; it has run on
            no network yet, so "auto" does not take it. "nvlink" wants all ranks on one node, within reach of each
            other's NVLink. ``backend`` says what carries rows within a node.
        ranks_per_node: ranks of each node, which are then taken to be on nodes one after the other, wherever they are:
            to try what runs between nodes on one machine, or where nodes cannot be found out. None finds nodes by
            host and by the access of GPUs to each other's memory.
        placement: which slots of which ranks hold which experts, the same on all ranks; None for expert e on rank
            ``e // (E / W)``. Ids stay those of experts. Everything that counts local experts then counts the slots of
            a rank, empty ones too. A route goes to slot number (source rank + its index among the source's routes of
            the expert) mod (slots of the expert). ``set_placement`` changes it, ``Routed.slot_experts`` tells it.
        spare_slots: instead of a placement, the default one with so many empty slots more on each rank, for
            ``set_placement`` to fill.
        balance: "batch": split each dispatch's routes anew, so that no rank has more than the mean of them, as far as
            empty slots allow. Ranks exchange their counts first, and each works the same split out. The rows of an
            expert that a rank lacks come to one of its empty slots, for this batch: ``Routed.slot_experts`` tells,
            and :func:`tokenloom.pull_experts` brings the weights. ``combine`` sums per route by default then, which
            gives the bits that no split gives. The other modes' sums depend on the split.
        rows_per_pull: routes that a rank computes in the time in which it pulls an expert's weights. A batch is split
            only where the fullest rank gets rid of so many for each expert that a rank pulls, or that others pull from
            it. But layout "expert" with a capacity is always split. None: on GPUs by rates of links and GEMMs, about
            1,900 for weights of two bytes, which a communicator without ``dtype`` takes them for; elsewhere 0.
            ``describe()`` has the number.
        rejoin: come back to the ranks of the group, which have masked this one and have their communicator still. It
            waits until they call ``unmask_ranks``, ``open_timeout_s`` long.

    Attributes:
        plan: sizes, and what follows from them. Its experts are those that ids name.
        engine: the same calls in halves, for layers that write their own gradients.
        kinds: the kinds of calls that were checked and prepared, for such layers.

    Raises:
        InvalidArgument: an argument has a value that is never right, or ``num_sms`` is more than this process may use.
        PlanMismatch: the ranks passed different arguments; names the rank and the argument.
        PeerError: another rank failed to make its own.
        BackendUnavailable: the backend or the transport asked for does not work here; says on which rank, and why.
        PeerTimeout: a rank did not come, or with ``rejoin`` nobody took this one back.
    """

    _closed = False

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | RankGroup | None = None,
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
        num_sms: int | None = None,
        checked: bool = False,
        on_timeout: Literal["raise", "mask"] = "raise",
        transport: str = "auto",
        ranks_per_node: int | None = None,
        placement: Placement | None = None,
        spare_slots: int = 0,
        balance: Literal["batch"] | None = None,
        rows_per_pull: int | None = None,
        rejoin: bool = False,
    ) -> None:
        fault: Exception | None = None
        try:
            ranks = RankGroup(group, device=device, timeout_s=timeout_s, open_timeout_s=open_timeout_s, rejoins=rejoin)
        except Exception as error:
            if rejoin:
                raise
            fault = error
        if fault is not None:
            ranks = RankGroup(group)  # the other ranks wait for this one, and must hear of its fault
        if rejoin and ranks.num_ranks == 1:
            raise InvalidArgument("rejoin is True, but this rank is alone and nobody can take it back; leave it out")
        with ranks.turn.behind(ranks.open_timeout_s) as in_turn:
            with nullcontext() if rejoin else agreeing(ranks, MAKING):
                require_eager()
            fault = fault or in_turn

            def placed() -> Placement | None:
                return placement_of(placement, spare_slots, num_experts, ranks.num_ranks)

            def make_request() -> registry.Request:
                plan = Plan(ranks.num_ranks, num_experts, hidden, top_k, max_tokens_per_rank)
                if (first := placed()) is not None:
                    require_fits(first, plan)
                    require_room(ranks.device, num_experts)
                plan = plan_of_slots(plan, first)
                check_balance(balance, rows_per_pull, first)
                if balance is not None and first is not None:
                    require_room_to_split(ranks.device, ranks.num_ranks, first.slots_per_rank)
                options = (backend, plan, dtype, num_sms, checked, transport, ranks_per_node)
                return registry.Request(ranks.transport, ranks.device, *options)

            def terms_of(request: registry.Request) -> dict[str, Any]:
                alike = request.must_agree() | {"num_experts": num_experts, "on_timeout": on_timeout}
                alike |= {"balance": balance, "rows_per_pull": rows_per_pull}
                return alike | placement_terms(placed())

            def prepare() -> tuple[dict[str, Any], tuple[list[registry.Availability], topology.Place]]:
                if fault is not None:
                    raise fault
                request = make_request()
                topology.checked_ranks_per_node(ranks_per_node, ranks.num_ranks)
                if num_sms is not None and not (isinstance(num_sms, int) and 1 <= num_sms <= registry.MAX_SMS):
                    raise InvalidArgument(f"num_sms is {num_sms!r}, expected None or 1 to {registry.MAX_SMS}")
                if on_timeout not in ("raise", "mask"):
                    raise InvalidArgument(f"on_timeout is {on_timeout!r}, expected 'raise' or 'mask'")
                if dtype is not None and not isinstance(dtype, torch.dtype):
                    raise InvalidArgument(f"dtype is {dtype!r}, expected a torch.dtype, such as torch.bfloat16")
                if not isinstance(checked, bool):
                    raise InvalidArgument(f"checked is {checked!r}, expected True or False")
                found = registry.probe(request), topology.Place.own(ranks.device)
                return terms_of(request), found

            if on_timeout == "mask" and not rejoin and ranks.could_go_by_pairs:
                # With the patience that a first call takes. Whoever is lost meanwhile, or was before so that the
                # process group carries nothing any more, is found out below, by pairs.
                with suppress(PeerTimeout, CommunicatorBroken):
                    agree(ranks, prepare, MAKING)
                ranks = ranks.left_by_pairs()
            said = [prepare()[1]] if rejoin else agree(ranks, prepare, MAKING)
            probes = [found for found, _ in said]
            request = make_request()
            self.plan = Plan(ranks.num_ranks, num_experts, hidden, top_k, max_tokens_per_rank)
            if ranks_per_node is not None:
                ranks.topology = topology.pretended(ranks.num_ranks, ranks_per_node)
            elif not rejoin and not ranks.masked:  # else those that stayed tell, and masked ranks do not
                ranks.topology = topology.find_nodes([place for _, place in said])
            if rejoin:
                name, _ = registry.choose(
                    backend, probes, None if ranks_per_node is None else ranks.topology, transport
                )
                ranks.terms = _in_words(terms_of(request), name)
                ranks.own_transport = registry.capabilities(name).own_transport
                ranks.rejoin(on_timeout == "mask")
                self._choice = registry.make_alone(name, request, ranks, probes[0])
            else:
                self._choice = registry.make(request, ranks, probes)
                ranks.terms = _in_words(terms_of(request), self._choice.backend.name)
                ranks.own_transport = self._choice.backend.capabilities.own_transport
                if on_timeout == "mask":
                    try:
                        self._choice.backend.members.mask_late()
                    except InvalidArgument:
                        self._choice.backend.close()
                        raise
            if balance is not None and not self._choice.backend.capabilities.gathers_counts:
                self._choice.backend.close()
                raise InvalidArgument(
                    f"balance='batch' on backend {self._choice.backend.name!r}, which gathers no counts yet; use "
                    "backend='collective', or leave balance out"
                )
        if ranks.own_transport:
            ranks.turn = Turn()
        self._ranks = ranks
        balanced = None
        if balance is not None:
            if rows_per_pull is None:
                link = self._choice.backend.capabilities.link_gbytes_per_s
                weight_bytes = 2 if dtype is None else dtype.itemsize
                rows_per_pull = 0 if ranks.device.type == "cpu" else default_rows_per_pull(weight_bytes, link)
            balanced = Balance(rows_per_pull, ranks.device)
        self.engine = Engine(self.plan, ranks, self._choice.backend, placed(), balanced)
        self.kinds = Kinds(self.engine)

    @breaks_graph
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        sizes: Sizes | None = None,
        capacity: int | None = None,
        copy: bool | Copies = False,
        to_fp8: bool = False,
        power_of_two_scales: bool = False,
        scale_layout: ScaleLayout = "rows",
        recipe: Recipe = "block",
        strategy: str = "dedup",
        out: DispatchOut | None = None,
    ) -> Routed:
        """Send each token to the ranks that hold its experts. Differentiable in x and topk_weights.

        Args:
            x: [T, H] bfloat16, float16, float32 or float64; or (float8_e4m3fn [T, H], float32 scales [T, H / 128]);
                or (float8_e4m3fn [T, H], int32 [T, n]), n at most H / 128, the same on all ranks: packed scales, whose
                words travel as they are. With ``recipe="row"`` scales are float32 [T].
                T may differ per rank and may be 0.
            topk_ids: int32 or int64 [T, K]; -1 is an unused place; an expert may appear twice in a row. Do not change
                it before combine and backward are done.
            topk_weights: float32 [T, K] (float64 beside float64 x, without to_fp8), or None. Ignored where the id
                is -1.
            layout: how the received rows lie, "expert", "token", "rank" or "slots"; see docs/reference/semantics.md.
            alignment: rows of which each expert's group is a multiple; the rest is zeros (layout "expert").
            sizes: "exact": outputs have their exact size, known on the host. "bounded": outputs have ``capacity``
                rows and counts stay on the device; rows beyond ``num_rows`` are unspecified. By default "exact",
                except for layout "slots", which is always bounded.
            capacity: most rows; in layout "slots" S, the places of each expert. By default exact sizes have no limit
                and bounded ones the worst case. But layout "expert" has no default there, unless batches are balanced:
                then it has room for the mean, and what padding takes. And layout "slots" has
                ``W * max_tokens_per_rank``: enough unless tokens name an expert twice.
            copy: make outputs ordinary tensors of your own, even where a backend hands out views of its buffers.
                "if_needed": outputs are yours as long as you hold them. But rows and scales may lie in a buffer that
                later calls then leave alone, which costs no copy. While you hold such rows, others are copied. Let go
                of them on the stream that was current, as PyTorch wants it of all memory; ``record_stream`` does not
                help. Not beside calls in halves whose rows come to receive buffers.
            to_fp8: quantise x to E4M3 by ``recipe`` on its way (H a multiple of 128). The result is that of
                ``dispatch(quantize_fp8(x), ...)``, bit for bit. The rows have no gradient, so x may not require one;
                topk_weights may.
            power_of_two_scales: with ``to_fp8``, round scales up to powers of two, as ``quantize_fp8`` does.
            scale_layout: how the scales of FP8 rows lie in layout "slots". "rows": float32 [L, S, H / 128],
                contiguous. "columns": the same shape with strides (S * H / 128, 1, S), as masked grouped GEMMs take
                it. "packed": int32 [L, S, n] with n = ceil(H / 512) and strides (S * n, 1, S). A word has four
                exponents e for scales of 2 ** (e - 127), the first in the lowest byte, 0 behind the last. "packed"
                needs ``power_of_two_scales``, or given scales that are powers of two. Only "rows" with
                ``recipe="row"``.
            recipe: which values of FP8 rows share a scale, with ``to_fp8`` or scales: "block" for 128 of a row, "row"
                for a whole row. ``routed.scales`` is then float32 [rows], in layouts "rank" and "slots" [W, M] and
                [L, S]. All ranks pass the same.
            strategy: what carries the payload, as ``tokenloom.Strategy`` says. Results do not depend on it. "nvlink"
                has others than "dedup" in layout "expert" only, and "all_gather" neither for FP8 nor in a CUDA graph.
            out: tensors of your own to write results to, for bounded sizes with gradients disabled.

        Returns:
            The rows of this rank with their counts. On "nvlink" with gradients disabled and without ``copy``, the
            tensors are views, except those given by ``out``. Views last until the second next dispatch of this
            communicator.

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument, InvalidExpertId, NotDifferentiable: bad
                input on this rank; nothing was received.
            PeerError: bad input on another rank; nothing was received.
            PlanMismatch: the ranks passed different options; nothing was received.
            CapacityOverflow: more rows than ``capacity``. Exact sizes: nothing is handed out. Bounded sizes: raised by
                a later call or ``check``; meanwhile combine gives NaN for the tokens concerned.
            PeerTimeout, CommunicatorBroken: another rank is missing, or was at an earlier call.
        """
        arguments = (layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy, scale_layout, recipe)
        return DispatchCall(self, self.kinds, arguments, x, topk_ids, topk_weights, copy, out).run()

    @breaks_graph
    def send_dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        layout: Layout = "expert",
        alignment: int = 1,
        sizes: Sizes | None = None,
        capacity: int | None = None,
        copy: bool | Copies = False,
        to_fp8: bool = False,
        power_of_two_scales: bool = False,
        scale_layout: ScaleLayout = "rows",
        recipe: Recipe = "block",
        strategy: str = "dedup",
        out: DispatchOut | None = None,
    ) -> Pending[Routed]:
        """Make the first half of a dispatch: its rows are on their way until ``receive()`` of the pending takes them.

        Both halves together do what :meth:`dispatch` does, bit for bit, errors and gradients included. It has the same
        arguments. x and topk_weights may be overwritten by later work on the same stream.

        Returns:
            What gives the result. :class:`tokenloom.Pending` says how many may be open.

        Raises:
            TokenloomError: what ``dispatch`` raises.
            InvalidArgument: also for a third pending call, and after a pending was dropped unreceived; nothing was
                sent.
        """
        arguments = (layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy, scale_layout, recipe)
        return DispatchCall(self, self.kinds, arguments, x, topk_ids, topk_weights, copy, out).start()

    @breaks_graph
    def combine(
        self,
        y: torch.Tensor,
        routed: Routed,
        *,
        weighted: bool | None = None,
        mode: Mode | None = None,
        wire_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Bring the experts' rows home and sum them in a fixed order. Differentiable in y and the weights.

        Args:
            y: shape of ``routed.tokens``; bfloat16, float16, float32 or float64. One row per row of
                ``routed.tokens``; rows that hold no token are never read.
            routed: what dispatch returned.
            weighted: multiply rows by their weights (layouts "expert" and "slots", where the default is True). Leave
                it out for other layouts.
            mode: "per_rank" sums the rows of a rank in ascending k, rounds to ``wire_dtype``, and adds the ranks' sums
                in ascending rank. "per_route" rounds every weighted row, sends it home by itself, and sums there in
                ascending k (layouts "expert" and "slots"). "per_node" adds the ranks' sums of a node, rounds that to
                ``wire_dtype`` again, and adds the nodes' sums in ascending node: on backend "network" one row for each
                (token, node) crosses the network. All backends give the same bits. None is "per_rank", or "per_node"
                where the backend has nothing else (``gin``, ``padded``). Where batches are balanced, it is "per_route"
                for layouts "expert" and "slots", whose sums do not depend on the split.
            wire_dtype: dtype of what travels, by default that of y.
            out_dtype: dtype of the result, by default that of y.
            out: contiguous [T, H] of ``out_dtype`` to write the result to, where no gradient is wanted.
            topk_weights: float32 [T, K] to multiply rows by, instead of the dispatch's (layouts "expert" and "slots").
                They travel with this call, and have no gradient.
            bias: floating-point [T, H], or several, to add in their order before the result is rounded.

        Returns:
            [T, H]; zero for tokens without routes; ``out`` if that is given.

        Raises:
            TokenloomError: what ``dispatch`` raises; also NotDifferentiable if topk_weights are given and y or they
                require grad.
        """
        order: str | None = mode
        if order is None:
            order = self.kinds.default_mode or self.kinds.mode_of(routed)
        arguments = (weighted, order, wire_dtype, out_dtype)
        biases: Any = bias
        if topk_weights is not None or bias is not None:
            routed, topk_weights, biases = self._prepare_terms(routed, weighted, topk_weights, bias)
        return CombineCall(self, self.kinds, arguments, y, routed, out, topk_weights, biases).run()

    @breaks_graph
    def send_combine(
        self,
        y: torch.Tensor,
        routed: Routed,
        *,
        weighted: bool | None = None,
        mode: Mode | None = None,
        wire_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Pending[torch.Tensor]:
        """Make the first half of a combine: its rows are on their way until ``receive()`` of the pending takes them.

        Both halves together do what :meth:`combine` does, bit for bit, errors and gradients included. It has the same
        arguments. y may be overwritten by later work on the same stream, unless backward wants its values.
        A bias is read by ``receive``, and keeps its values until then.

        Returns:
            What gives the result. :class:`tokenloom.Pending` says how many may be open.

        Raises:
            TokenloomError: what ``send_dispatch`` raises.
        """
        order: str | None = mode
        if order is None:
            order = self.kinds.default_mode or self.kinds.mode_of(routed)
        arguments = (weighted, order, wire_dtype, out_dtype)
        biases: Any = bias
        if topk_weights is not None or bias is not None:
            routed, topk_weights, biases = self._prepare_terms(routed, weighted, topk_weights, bias)
        return CombineCall(self, self.kinds, arguments, y, routed, out, topk_weights, biases).start()

    def _prepare_terms(
        self, routed: Routed, weighted: bool | None, topk_weights: torch.Tensor | None, bias: object
    ) -> tuple[Routed, torch.Tensor | None, Any]:
        """Send weights ahead where needed, and make a tuple of bias: (routed, weights, bias).

        Where the backend's combine takes no weights, they travel before it, and come back with ``routed``.
        """
        if topk_weights is not None and self._reweights(routed, weighted):
            routed = ReweightCall(self, self.kinds, routed, topk_weights, without_lost=True).run()
            topk_weights = None
        if bias is not None and not isinstance(bias, tuple):
            bias = tuple(bias) if isinstance(bias, list) else (bias,)
        return routed, topk_weights, bias

    def _reweights(self, routed: object, weighted: bool | None) -> bool:
        """Whether weights need a call of their own before the combine."""
        if self.engine.capabilities.weights_from_home or weighted is False:
            return False
        return isinstance(routed, Routed) and routed.layout in ROUTE_LAYOUTS

    # -- follow-ups of a dispatch -----------------------------------------------------------------------------

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
            x: [T, H], T as in that dispatch; bfloat16, float16, float32 or float64. Or FP8 rows with scales, as
                ``dispatch`` takes them with the recipe of that dispatch, except in layout "slots".
            routed: what that dispatch returned.
            copy: True or "if_needed", as in ``dispatch``.

        Returns:
            Shape of ``routed.tokens``, dtype of x; and scales, if x has some. Places without a row are as in
            ``dispatch``.

        Raises:
            TokenloomError: what ``dispatch`` raises for such an x; also NotDifferentiable if x requires grad.
        """
        return ResendCall(self, self.kinds, x, routed, copy).run()

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
        return ValuesHomeCall(self, self.kinds, values, routed).run()

    @breaks_graph
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
        return ReweightCall(self, self.kinds, routed, topk_weights).run()

    def first_call_of_combine(self) -> str:
        """Name of the call that a combine with ``topk_weights`` opens first."""
        able = self.engine.capabilities
        return ReweightCall.name if able.weights_apart and not able.weights_from_home else "combine"

    @breaks_graph
    def row_weights(self, routed: Routed) -> torch.Tensor:
        """Give each row its weight, to apply before the last GEMM. Differentiable, not collective.

        Combine then takes ``weighted=False``.

        Args:
            routed: what a dispatch with topk_weights in layout "expert" or "slots" returned.

        Returns:
            float32 (float64 beside float64 weights) [rows], in layout "slots" [L, S]; 0 where no row lies.

        Raises:
            InvalidArgument: another layout, a dispatch without weights, or another communicator's. On ``nvlink`` also
                one whose receive buffer was reused, or that ranks which came back know nothing of.
        """
        checks.require_routed(routed, self)
        if routed.layout not in ROUTE_LAYOUTS or routed._weights is None:
            raise InvalidArgument("row_weights is for layouts 'expert' and 'slots', dispatched with topk_weights")
        shape = routed.shape[:-1]
        handle, weights, num_rows = routed._handle, routed._weights, prod(shape)
        if torch.is_grad_enabled() and weights.requires_grad:
            return autograd.row_weights(handle, weights, num_rows).view(shape)
        return handle.row_weights(weights, num_rows).view(shape)

    # -- the communicator's own --------------------------------------------------------------------------------

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
    def transports(self) -> dict[str, str]:
        """Transports of rows to ranks of the "own node" and, if there are any, of "other nodes".

        One of "nvlink", "collective" and "gin" for each.
        """
        can = self.engine.capabilities
        several = self._ranks.topology.num_nodes > 1
        return {"own node": can.own_node} | ({"other nodes": str(can.other_nodes)} if several else {})

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The torch.distributed group; None for a process alone, and once the communicator was closed."""
        return self._ranks.process_group

    def describe(self) -> str:
        """The plan, the backend and why, and the memory it holds or will take, in a few lines for people."""
        plan, of_slots, placement = self.plan, self.engine.plan, self.placement
        nodes, lost = self._ranks.topology, self.lost_experts()
        lines = [
            f"tokenloom Communicator, rank {self.rank} of {self.num_ranks} on {self.device}",
            f"  {plan.num_experts} experts, {plan.experts_per_rank} on each rank; top-{plan.top_k}; "
            f"hidden {plan.hidden}; at most {plan.max_tokens_per_rank} tokens a rank",
            *([f"  placement: {placement}"] if placement is not None else []),
            *self._balance_in_words(),
            f"  worst case on one rank: {of_slots.worst_case_rows('token')} rows in layouts token and rank, "
            f"{of_slots.worst_case_rows('expert')} in layout expert",
            *([f"  {nodes.describe()}"] if nodes.num_nodes > 1 else []),
            f"  backend {self.backend}: {self._choice.why}",
            *([f"    {self._transports_in_words()}"] if nodes.num_nodes > 1 else []),
            *(f"    {line}" for line in self.engine.memory()),
            *(f"  rank {rank} is masked: {why}" for rank, why in self._ranks.why_masked().items()),
            *([f"  experts that are lost with masked ranks: {', '.join(map(str, lost))}"] if lost else []),
            *(f"  expert {e} was lost and is restored, on rank {r}" for e, r in sorted(self.engine.restored.items())),
        ]
        return "\n".join(lines + [f"  not picked: {reason}" for reason in self._choice.not_picked])

    def _balance_in_words(self) -> list[str]:
        plan, balance = self.engine.plan, self.engine.balance
        if balance is None:
            return []
        even, worst = plan.even_rows(), plan.worst_case_rows("expert")
        return [f"  {balance}", f"  room of a bounded dispatch in layout expert: {even} rows instead of {worst}"]

    def _transports_in_words(self) -> str:
        return ", ".join(f"{kind} by {transport}" for kind, transport in self.transports.items())

    @property
    def placement(self) -> Placement | None:
        """Which slots hold which experts now; None if the communicator was made without a placement."""
        slots = self.engine.slots
        return None if slots is None else slots.placement

    def set_placement(self, placement: Placement) -> None:
        """Place experts anew, from the next dispatch on. All ranks call it alike, between calls.

        What was dispatched before keeps its slots, in its combine and in backward. CUDA graphs that were captured
        before go by the new placement from their next replay on. Moving the experts' weights is the caller's.

        Args:
            placement: with the ranks, experts and ``slots_per_rank`` of the one that the communicator was made with.

        Raises:
            InvalidArgument: another number of ranks, experts or slots; the communicator was made without a placement;
                a pending call is open; or a CUDA graph is captured. Nothing has changed.
            PlanMismatch: the ranks passed different placements; names a rank, and the first expert whose slots differ.
            PeerError: such an error of another rank.
        """
        self.engine.set_placement(placement)

    def balance_stats(self) -> BalanceStats:
        """Tell how many batches were split, and how full the fullest ranks were, of all dispatches so far.

        The same on all ranks. The host waits for the device.

        Raises:
            InvalidArgument: the communicator was made without ``balance``.
        """
        if self.engine.balance is None:
            raise InvalidArgument("batches are not balanced here; make the communicator with balance='batch'")
        return self.engine.balance.stats()

    def lost_experts(self) -> list[int]:
        """List the experts that no rank has now: all their slots are on masked ranks, and their routes count as -1."""
        masked = self.engine.masked
        if not masked:
            return []
        placement = self.placement or Placement.default(self.plan.num_experts, self.num_ranks)
        return placement.lost_without(masked)

    def mask_ranks(self, ranks: Collection[int]) -> None:
        """Go on without these ranks from the next call on. All ranks that stay call it alike.

        Nothing is sent to masked ranks or awaited from them, so their processes may be dead. They have no tokens, and
        routes to their experts count as -1: in dispatch and combine, and in gradients of earlier calls. Calls that are
        open end as they began. Masked ranks call nothing; those that live close their communicator.

        Args:
            ranks: others of the group. Ranks that are masked already may be among them.

        Raises:
            InvalidArgument: a rank that is none, or this one; or a backend or transport that cannot leave ranks out.
            PlanMismatch: another rank passed other ranks, or makes another call; names the rank and its list. Nothing
                has changed. A rank that makes another call instead cannot go on.
            PeerTimeout: a rank that stays does not call it.
        """
        self.engine.mask(ranks)

    def unmask_ranks(self, ranks: Collection[int]) -> None:
        """Take masked ranks back. All ranks that stay call it alike.

        Each of these ranks meanwhile makes its communicator again, with the same arguments, on the same process group
        and with ``rejoin=True``. Either side may come first: this one waits as long as a call may take to open.

        Args:
            ranks: masked ranks.

        Raises:
            InvalidArgument: a rank that is not masked.
            PlanMismatch: another rank passed other ranks, or a communicator was made again with other arguments.
            PeerTimeout: a rank that stays does not call it. Or a rank does not come back, or cannot connect with all
                others: then all ranks raise this, the ranks stay masked, and the communicator keeps working.
        """
        self.engine.unmask(ranks)

    def masked_ranks(self) -> list[int]:
        """The ranks that this one goes on without. With ``on_timeout="mask"`` a call may add some."""
        return sorted(self.engine.masked)

    def check(self) -> None:
        """Wait for all calls, and raise what earlier calls left behind.

        Raises:
            CapacityOverflow: a bounded dispatch dropped rows (raised once).
            PeerError, PlanMismatch, PeerTimeout: an earlier call failed. With ``on_timeout="mask"`` on "nvlink" all
                ranks check alike, and PeerError says that CUDA graphs were replayed in vain: all replay again.
            CommunicatorBroken: closed, or an earlier call timed out.
        """
        self.engine.check("everything")

    def __repr__(self) -> str:
        if not hasattr(self, "engine"):  # its constructor has raised
            return f"{type(self).__name__}(never made)"
        return line_about(self, type(self).__name__, backend=self.backend)

    def close(self) -> None:
        """Release everything; later calls raise CommunicatorBroken. The process group stays yours."""
        self._closed = True
        self.engine.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Communicator:
        """Return itself: the copy of a layer, as for averages of its weights, shares the communicator."""
        return self

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a communicator belongs to its process and its group: it cannot be pickled, nor can a layer that has it; "
            "save layer.state_dict(), or gather_state_dict(model) with the experts of all ranks, and load that into a "
            "new layer"
        )

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _in_words(terms: Mapping[str, Any], backend: str) -> dict[str, str]:
    """Arguments that a rank which comes back must have alike."""
    return {name: str(value) for name, value in terms.items()} | {"backend in use": backend}


def line_about(comm: Communicator, kind: str, **more: object) -> str:
    """One line about a communicator, or about a layer that has one for itself, as ``repr`` shows it.

    Args:
        kind: name of the class.
        more: values behind the communicator's sizes.
    """
    values = {"rank": comm.rank} | vars(comm.plan) | more
    state = ", closed" if comm._closed else ", broken" if comm._ranks.is_broken else ""
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in values.items())}{state})"
