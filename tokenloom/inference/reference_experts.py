"""Backend "reference" of MegaMoE: the same results in plain torch, slowly, on any device."""

from __future__ import annotations

import torch

from tokenloom.comm.routed import Routed
from tokenloom.errors import InvalidArgument
from tokenloom.inference.called_experts import CalledExperts
from tokenloom.inference.request import ForwardRequest
from tokenloom.inference.trace import MegaTimes
from tokenloom.ops.activation import apply_activation
from tokenloom.ops.gemm import separate_gate_and_up
from tokenloom.ops.quant import dequantize_fp8


class ReferenceExperts(CalledExperts):
    """Experts with the roundings of the kernels and float32 sums, whatever ``fast_math`` says."""

    _layout = "token"

    def describe(self) -> str:
        return "experts in plain torch, slowly"

    def trace(self) -> MegaTimes:
        raise InvalidArgument("backend 'reference' has no kernels to trace")

    def _add_up(self, request: ForwardRequest, routed: Routed, out: torch.Tensor) -> None:
        comm, topk_ids = self._comm, request.topk_ids
        assert routed.scales is not None
        assert routed.topk_ids is not None
        assert routed.topk_weights is not None
        rows = dequantize_fp8(routed.tokens, routed.scales)
        results = rows.new_zeros(comm.plan.top_k, *rows.shape, dtype=torch.bfloat16)
        for e in range(comm.plan.experts_per_rank):
            row, k = (routed.topk_ids == e).nonzero(as_tuple=True)
            results[k, row] = self._expert(e, rows[row], routed.topk_weights[row, k])
        total = rows.new_zeros(len(topk_ids), rows.shape[1])
        for place, of_ranks in enumerate(results):  # a token's k-th route is on one rank; the others add zeros
            total = torch.where(topk_ids[:, place, None] >= 0, total + comm.combine(of_ranks, routed).float(), total)
        if self._num_shared:
            own = dequantize_fp8(*self._own_rows(request.x))
            for e in range(comm.plan.experts_per_rank, len(self._weights[0])):
                total = total + self._expert(e, own, own.new_ones(len(own))).float()
        out.copy_(total)

    def _expert(self, e: int, rows: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
        w1, w1_scales, w2, w2_scales = (tensor[e : e + 1] for tensor in self._weights)
        gate_and_up = rows @ _dequantize(separate_gate_and_up(w1), w1_scales).T
        w1_bias, w2_bias = self._biases
        if w1_bias is not None:
            gate_and_up = gate_and_up + separate_gate_and_up(w1_bias[..., None])[e, :, 0]
        activations = apply_activation(gate_and_up, self._form) * row_weights[:, None]
        result = dequantize_fp8(*self._quantize(activations)) @ _dequantize(w2, w2_scales).T
        return (result if w2_bias is None else result + row_weights[:, None] * w2_bias[e]).bfloat16()


def _dequantize(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply one expert's weights, [1, N, K] with a scale per 128 x 128 values, out to float32 [N, K]."""
    return weights[0].float() * scales[0].repeat_interleave(128, 0).repeat_interleave(128, 1)
