"""Drives SGLang's dispatchers for DeepEP on CPU ranks, as its MoE layers do: dispatch, experts, combine.

    pip install . sglang==0.5.23      # docs/how-to/sglang.md says what is enough without a GPU
    deep_ep=$(python -m tokenloom deep-ep-path) && export PYTHONPATH=$deep_ep
    torchrun --nproc-per-node 2 examples/clients/sglang_dispatch.py

One dispatcher has both modes, of prefill and of decode; the other is that of deepep_v2. Every rank compares outputs
with experts that it computes all by itself. It was run with SGLang 0.5.23 and torch 2.13 on 2 and 4 ranks.
:func:`run_on_cpu` says what of SGLang asks for a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.dp_attention import set_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher import deepep, deepep_v2
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import DeepEPMode
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs

HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 8, 2, 12
BF16, FP8 = "bf16", "fp8"


class Case:
    """Tokens and experts. An expert multiplies by its scale.

    Attributes:
        x: bfloat16 [T, HIDDEN]. ids: int64 [T, TOP_K]. weights: float32 [T, TOP_K].
        own: float32 [L, HIDDEN], scales of this rank's experts. wanted: float32 [T, HIDDEN].
    """

    def __init__(self, num_tokens: int) -> None:
        rank, per_rank = dist.get_rank(), EXPERTS // dist.get_world_size()
        scales = torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
        self.own = scales[rank * per_rank : (rank + 1) * per_rank]
        generator = torch.Generator().manual_seed(2 + rank)
        self.x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        logits = torch.randn(num_tokens, EXPERTS, generator=generator)
        self.weights, self.ids = logits.softmax(1).topk(TOP_K)
        self.routes = StandardTopKOutput(self.weights, self.ids, logits)
        self.wanted = (self.x.float()[:, None] * scales[self.ids] * self.weights[:, :, None]).sum(1)

    def same(self, out: torch.Tensor, tolerance: float = 0.02) -> None:
        torch.testing.assert_close(out.float(), self.wanted, rtol=tolerance, atol=tolerance)


def main() -> None:
    dist.init_process_group("gloo")
    run_on_cpu()
    case = Case(0 if dist.get_rank() == 1 else TOKENS)
    both_modes(case)
    for extends in (True, False):
        elastic(case, extends)
    print(f"rank {dist.get_rank()}: outputs agree, by {deepep.Buffer.__module__}")
    dist.destroy_process_group()


def run_on_cpu() -> None:
    """Give SGLang the options of a server, and what it reads from a GPU.

    It counts SMs for a warning, and its normal mode wants DeepGEMM, which would compute the experts.
    """
    sizes = {"tp_size": dist.get_world_size(), "ep_size": dist.get_world_size()}
    publish(ServerArgs(model_path="none", device="cpu", deepep_v2_mode="direct", **sizes), role="scheduler")
    gpu = SimpleNamespace(multi_processor_count=132)
    mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu).start()
    mock.patch.object(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True).start()


def both_modes(case: Case) -> None:
    """--deepep-mode auto: a batch with prefill goes in normal mode, one of decode alone in low latency."""
    dispatcher = deepep.DeepEPDispatcher(
        group=dist.group.WORLD, router_topk=TOP_K, permute_fusion=True, num_experts=EXPERTS,
        num_local_experts=len(case.own), hidden_size=HIDDEN, params_dtype=torch.bfloat16,
        deepep_mode=DeepEPMode.AUTO, async_finish=True, return_recv_hook=True,
    )  # fmt: skip
    for dtype, extends in ((BF16, True), (BF16, False), (FP8, False), (BF16, True), (BF16, False)):
        dispatcher.set_quant_config({"dispatcher_output_dtype": dtype})  # FP8 of normal mode takes Triton
        set_is_extend_in_batch(extends)
        sent = dispatcher.dispatch(case.x, case.routes)
        if extends:
            combined = deepep.DeepEPNormalCombineInput(by_row(sent, case), sent.topk_ids, sent.topk_weights)
        else:
            assert (sent.hidden_states_scale is not None) == (dtype == FP8)
            combined = deepep.DeepEPLLCombineInput(by_place(sent, case), sent.topk_ids, sent.topk_weights)
        case.same(dispatcher.combine(combined), 0.07 if dtype == FP8 else 0.02)


def by_row(sent: Any, case: Case) -> torch.Tensor:
    """What SGLang's experts return in normal mode: for each row the sum over its routes here, weighted."""
    here = sent.topk_ids >= 0
    counts = torch.bincount(sent.topk_ids[here], minlength=len(case.own))
    assert sent.num_recv_tokens_per_expert == [-(-count // 128) * 128 for count in counts.tolist()]
    scales = case.own[sent.topk_ids.where(here, 0)]
    weights = sent.topk_weights.where(here, 0.0)
    return (sent.hidden_states.float()[:, None] * scales * weights[:, :, None]).sum(1).bfloat16()


def by_place(sent: Any, case: Case) -> torch.Tensor:
    """What they return in low latency: a row for each place below an expert's count, not weighted."""
    rows = sent.hidden_states.float()
    if sent.hidden_states_scale is not None:
        rows = rows * sent.hidden_states_scale.repeat_interleave(128, -1)
    out = torch.full_like(rows, torch.nan, dtype=torch.bfloat16)
    for expert, count in enumerate(sent.masked_m.tolist()):
        out[expert, :count] = (rows[expert, :count] * case.own[expert]).bfloat16()
    return out


def elastic(case: Case, extends: bool) -> None:
    """deepep_v2. Routes lie by expert, and each group is padded to 128 rows; in decode the host knows no counts."""
    set_is_extend_in_batch(extends)
    dispatcher = deepep_v2.DeepEPv2Dispatcher(
        group=dist.group.WORLD, router_topk=TOP_K, num_experts=EXPERTS, num_local_experts=len(case.own),
        hidden_size=HIDDEN, params_dtype=torch.bfloat16, use_fp8_dispatch=False,
    )  # fmt: skip
    for _ in range(2):
        with get_parallel().override(tp_group=None):  # in decode it asks whether ranks share a batch
            sent = dispatcher.dispatch(case.x, case.routes)
        assert sent.is_expanded
        out = torch.full_like(sent.hidden_states, torch.nan)
        start = 0
        for expert, end in enumerate(sent.psum_num_recv_tokens_per_expert.tolist()):
            rows = sent.hidden_states[start:end].float() * case.own[expert] * sent.topk_weights[start:end, None]
            out[start:end] = rows.bfloat16()
            start = -(-end // sent.expert_alignment) * sent.expert_alignment
        case.same(dispatcher.combine(deepep_v2.DeepEPv2CombineInput(out, sent.topk_weights)))


if __name__ == "__main__":
    main()
