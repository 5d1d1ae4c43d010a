"""The calls of a communicator: dispatch and combine, in one piece and in halves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from tokenloom.backends.base import DispatchOut
from tokenloom.comm import autograd, validation
from tokenloom.comm.bias import BiasedCombineCall, biases
from tokenloom.comm.engine import Engine
from tokenloom.comm.graph_breaks import breaks_graph
from tokenloom.comm.halves import CombineCall, DispatchCall
from tokenloom.comm.pending import Pending
from tokenloom.comm.routed import Layout, Routed
from tokenloom.comm.strategy import default_mode
from tokenloom.comm.usual import UsualCalls
from tokenloom.errors import InvalidArgument
from tokenloom.plan import ROUTE_LAYOUTS

Sizes = Literal["exact", "bounded"]
Mode = Literal["per_rank", "per_route", "per_node"]
ScaleLayout = Literal["rows", "columns", "packed"]
Copies = Literal["if_needed"]


class Calls:
    """What a communicator does with tokens.

    Attributes:
        engine: its calls as layers make them.
    """

    engine: Engine

    @cached_property
    def usual(self) -> UsualCalls | None:
        """Calls that take the short way, where the backend has one: for callers with a longer way of their own."""
        backend = self.engine.makes_usual_calls
        return None if backend is None else UsualCalls(self.engine, backend)

    @cached_property
    def _default_mode(self) -> str:
        return default_mode(self.engine.capabilities)

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
        strategy: str = "dedup",
        out: DispatchOut | None = None,
    ) -> Routed:
        """Send each token to the ranks that hold its experts. Differentiable in x and topk_weights.

        Args:
            x: [T, H] bfloat16, float16, float32 or float64; or (float8_e4m3fn [T, H], float32 scales [T, H / 128]);
                or (float8_e4m3fn [T, H], int32 [T, n]), n at most H / 128, the same on all ranks: packed scales, whose
                words travel as they are.
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
                and bounded ones the worst case. But layout "expert" has no default there, and layout "slots" has
                ``W * max_tokens_per_rank``: enough unless tokens name an expert twice.
            copy: make outputs ordinary tensors of your own, even where a backend hands out views of its buffers.
                "if_needed": outputs are yours as long as you hold them. But rows and scales may lie in a buffer that
                later calls then leave alone, which costs no copy. While you hold such rows, others are copied. Let go
                of them on the stream that was current, as PyTorch wants it of all memory; ``record_stream`` does not
                help. Not beside calls in halves, except those of layout "slots".
            to_fp8: quantise x to E4M3 with a scale per 128 values on its way (H a multiple of 128). The result is
                that of ``dispatch(quantize_fp8(x), ...)``, bit for bit. The rows have no gradient, so x may not
                require one; topk_weights may.
            power_of_two_scales: with ``to_fp8``, round scales up to powers of two, as ``quantize_fp8`` does.
            scale_layout: how the scales of FP8 rows lie in layout "slots". "rows": float32 [L, S, H / 128],
                contiguous. "columns": the same shape with strides (S * H / 128, 1, S), as masked grouped GEMMs take
                it. "packed": int32 [L, S, n] with n = ceil(H / 512) and strides (S * n, 1, S). A word has four
                exponents e for scales of 2 ** (e - 127), the first in the lowest byte, 0 behind the last. "packed"
                needs ``power_of_two_scales``, or given scales that are powers of two.
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
        values = (layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy, scale_layout)
        usual = self.usual
        if usual is not None:
            routed = usual.dispatch(self, x, topk_ids, topk_weights, values, out, copy)
            if routed is not None:
                return routed
        call = DispatchCall(self, self.engine, (x, topk_ids, topk_weights), values, copy, out)
        result = call.run()
        if usual is not None:
            usual.learn_dispatch(values, call.options, call.inputs, copy)
        return result

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
        values = (layout, alignment, sizes, capacity, to_fp8, power_of_two_scales, strategy, scale_layout)
        return DispatchCall(self, self.engine, (x, topk_ids, topk_weights), values, copy, out).send()

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
                where the backend has nothing else (``gin``, ``padded``).
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
        values = (weighted, self._default_mode if mode is None else mode, wire_dtype, out_dtype)
        routed, topk_weights = self._with_weights(routed, topk_weights, weighted)
        usual = self.usual if bias is None else None
        if usual is not None:
            found = usual.combine(self, y, routed, values, out, topk_weights)
            if found is not None:
                return found
        call = self._combine(y, routed, values, out, topk_weights, bias)
        result = call.run()
        if usual is not None:
            usual.learn_combine(y, routed, values, call.options)
        return result

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
        routed, topk_weights = self._with_weights(routed, topk_weights, weighted)
        values = (weighted, self._default_mode if mode is None else mode, wire_dtype, out_dtype)
        return self._combine(y, routed, values, out, topk_weights, bias).send()

    def _with_weights(
        self, routed: Routed, topk_weights: torch.Tensor | None, weighted: bool | None
    ) -> tuple[Routed, torch.Tensor | None]:
        """A dispatch and weights at home, as a combine of this backend takes them."""
        raise NotImplementedError

    def _combine(
        self,
        y: torch.Tensor,
        routed: Routed,
        options: tuple[Any, ...],
        out: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None,
    ) -> CombineCall:
        given = (self, self.engine, y, routed, options, out, topk_weights)
        return CombineCall(*given) if bias is None else BiasedCombineCall(*given, biases(bias))

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
        validation.require_routed(routed, self)
        if routed.layout not in ROUTE_LAYOUTS or routed._weights is None:
            raise InvalidArgument("row_weights is for layouts 'expert' and 'slots', dispatched with topk_weights")
        shape = routed.shape[:-1]
        given = (routed._handle, routed._weights, prod(shape))
        if torch.is_grad_enabled() and routed._weights.requires_grad:
            return autograd.row_weights(self.engine, *given).view(shape)
        return self.engine.row_weights(*given).view(shape)
