"""A combine that adds something to its result."""

from __future__ import annotations

from typing import Any

import torch

from tokenloom.comm import outputs, validation, validation_beside
from tokenloom.comm.engine import Engine
from tokenloom.comm.halves import CombineCall
from tokenloom.comm.routed import Routed
from tokenloom.errors import DtypeMismatch


class BiasedCombineCall(CombineCall):
    """A combine whose result has something added to it before its one rounding.

    Args:
        bias: tensors [T, H].
        others: as of :class:`CombineCall`.
    """

    def __init__(
        self,
        owner: object,
        engine: Engine,
        y: torch.Tensor,
        routed: Routed,
        options: tuple[Any, ...],
        out: torch.Tensor | None,
        home_weights: torch.Tensor | None,
        bias: tuple[torch.Tensor, ...],
    ) -> None:
        weighted, mode, wire_dtype, out_dtype = options
        is_tensor = isinstance(y, torch.Tensor)
        self._bias = bias
        self._own_out = out
        self._out_dtype = out_dtype or (y.dtype if is_tensor else torch.float32)
        wide = torch.float64 if is_tensor and y.dtype == torch.float64 else torch.float32
        super().__init__(owner, engine, y, routed, (weighted, mode, wire_dtype, wide), None, home_weights)

    def _send(self, split: bool) -> Any:
        plan, device = self.engine.plan, self.engine.ranks.device
        validation.require_routed(self._routed, self._owner)
        shape = (self._routed._handle.num_tokens, plan.hidden)
        for index, bias in enumerate(self._bias):
            name = "bias" if len(self._bias) == 1 else f"bias[{index}]"
            validation_beside.bias_at_home(name, bias, shape, device)
        if self._own_out is not None:
            validation_beside.result_at_home(self._own_out, shape, self._out_dtype, device)
            outputs.require_no_gradient(self._own_out, self._wants_grad())
        if self._out_dtype not in self.engine.capabilities.dtypes:
            raise DtypeMismatch(f"out_dtype is {self._out_dtype}, which this backend does not have")
        self._has_graph = torch.is_grad_enabled()
        return super()._send(split)

    def _wants_grad(self) -> bool:
        weights = None if self._options[0] is False else self._routed._graph_weights
        given = (self._y, weights, *self._bias)
        return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in given)

    def _receive(self) -> torch.Tensor:
        total = super()._receive()
        with torch.set_grad_enabled(self._has_graph):
            for bias in self._bias:  # the sum keeps its dtype, and narrower ones are widened on their way
                total = total + (bias if bias.itemsize < total.itemsize else bias.to(total.dtype))
            return total.to(self._out_dtype) if self._own_out is None else self._own_out.copy_(total)


def biases(bias: object) -> tuple[torch.Tensor, ...]:
    """What is to be added, in order: one tensor or several."""
    return tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)  # type: ignore[return-value]
