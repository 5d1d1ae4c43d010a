"""Drives vLLM's dispatchers for DeepEP on CPU ranks, as its MoE layer does: prepare, experts, finalize.

    pip install . vllm==0.33.0        # docs/how-to/vllm.md says what is enough without a GPU
    deep_ep=$(python -m tokenloom deep-ep-path) && export PYTHONPATH=$deep_ep
    torchrun --nproc-per-node 2 examples/clients/vllm_dispatch.py

vLLM's managers make the buffers. Every rank compares outputs with experts that it computes all by itself. It was run
with vLLM 0.33.0 and torch 2.13 on 2 and 4 ranks. Of vLLM only a flag is changed: pinned memory takes a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.device_communicators.all2all import DeepEPHTAll2AllManager, DeepEPLLAll2AllManager
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll, deepep_v2
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

UNQUANTIZED = FUSED_MOE_UNQUANTIZED_CONFIG
HIDDEN = 2048  # the smallest that vLLM takes for low latency
EXPERTS, TOP_K, MOST_TOKENS = 8, 2, 12


class Case:
    """Tokens and experts. An expert multiplies by its scale.

    Attributes:
        x: bfloat16 [T, HIDDEN]. ids: int64 [T, TOP_K]. weights: float32 [T, TOP_K].
        scales: float32 [EXPERTS, HIDDEN], of all experts. first: of this rank's. per_rank: how many it has.
    """

    def __init__(self, num_tokens: int) -> None:
        rank, self.per_rank = dist.get_rank(), EXPERTS // dist.get_world_size()
        self.first = rank * self.per_rank
        self.scales = torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
        generator = torch.Generator().manual_seed(2 + rank)
        self.x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        self.weights, self.ids = torch.randn(num_tokens, EXPERTS, generator=generator).softmax(1).topk(TOP_K)

    def wanted(self) -> torch.Tensor:
        """float32 [T, HIDDEN]."""
        return (self.x.float()[:, None] * self.scales[self.ids] * self.weights[:, :, None]).sum(1)

    def by_row(
        self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, local: bool = False
    ) -> torch.Tensor:
        """What vLLM's experts return of rows [M, HIDDEN]: their sum over routes to experts of this rank, weighted.

        Args:
            ids: [M, k] of experts; those of other ranks do not count. local: counted from this rank's first.
        """
        own = ids if local else ids - self.first
        here = (own >= 0) & (own < self.per_rank)
        scales = self.scales[(own + self.first).where(here, 0)]
        return (rows.float()[:, None] * scales * weights.where(here, 0.0)[:, :, None]).sum(1).bfloat16()

    def by_place(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The same of places [L, M, HIDDEN], not weighted. Those behind the counts are left as they are."""
        out = torch.full_like(rows, torch.nan, dtype=torch.bfloat16)
        for expert, count in enumerate(counts.tolist()):
            out[expert, :count] = (rows[expert, :count].float() * self.scales[self.first + expert]).bfloat16()
        return out


def main() -> None:
    dist.init_process_group("gloo")
    modular_kernel.PIN_MEMORY = False
    with parallel_state() as config:
        group = get_tp_group().cpu_group
        empty = Case(0 if dist.get_rank() == 1 else MOST_TOKENS)
        high_throughput(empty, DeepEPHTAll2AllManager(group))
        low_latency(empty, DeepEPLLAll2AllManager(group))
        config.parallel_config.enable_fault_tolerance = True
        low_latency(empty, DeepEPLLAll2AllManager(group))
        elastic(Case(MOST_TOKENS), group)
    print(f"rank {dist.get_rank()}: outputs agree, by {deep_ep.Buffer.__module__}")
    dist.destroy_process_group()


@contextmanager
def parallel_state() -> Iterator[VllmConfig]:
    """vLLM's own groups, over gloo. Its configuration must be told that there is no GPU."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(num_ranks, rank, "env://", int(os.environ["LOCAL_RANK"]), backend="gloo")
        initialize_model_parallel(tensor_model_parallel_size=num_ranks, backend="gloo")
        yield config


def high_throughput(case: Case, manager: DeepEPHTAll2AllManager) -> None:
    """As in prefill: what comes is quantised behind the dispatch, or not at all as here, since that takes Triton."""
    layer = deepep_ht.DeepEPHTPrepareAndFinalize(
        manager.get_handle({}), manager.world_size, manager.dp_world_size, rank_expert_offset=case.first
    )

    def experts(rows: torch.Tensor, scales: None, meta: Any, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = ids - case.first
        assert meta.expert_num_tokens.tolist() == [int((own == expert).sum()) for expert in range(case.per_rank)]
        return case.by_row(rows, ids, weights)

    for _ in range(2):
        same(run(layer, case, experts, TopKWeightAndReduceNoOP()), case)
    manager.destroy()


def low_latency(case: Case, manager: DeepEPLLAll2AllManager) -> None:
    """As in decode: in bfloat16, and in FP8 with the scales that experts for blocks of 128 x 128 take."""
    one = torch.ones(1)
    blocks = fp8_w8a8_moe_quant_config(w1_scale=one, w2_scale=one, block_shape=[128, 128])
    for quant_config in (UNQUANTIZED, blocks):
        fp8 = quant_config is blocks
        sizes = {"num_ep_ranks": manager.world_size, "num_global_experts": EXPERTS, "num_local_experts": case.per_rank}
        buffer = manager.get_handle({"max_num_tokens_per_dp_rank": MOST_TOKENS, "token_hidden_size": HIDDEN, **sizes})
        layer = deepep_ll.DeepEPLLPrepareAndFinalize(buffer, MOST_TOKENS, manager.world_size, use_fp8_dispatch=fp8)

        def experts(rows: torch.Tensor, scales: torch.Tensor | None, meta: Any, *_: torch.Tensor) -> torch.Tensor:
            values = rows if scales is None else deepep_ll.dequant_fp8(rows, scales)
            return case.by_place(values, meta.expert_num_tokens)

        for _ in range(3):
            out = run(layer, case, experts, TopKWeightAndReduceDelegate(), quant_config)
            same(out, case, 0.07 if fp8 else 0.02)
    if manager.support_fault_tolerance:
        masked = torch.full((manager.world_size,), -1, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(masked)
        assert not masked.any(), "all ranks are there"
        buffer.low_latency_clean_mask_buffer()
    manager.destroy()


def elastic(case: Case, group: dist.ProcessGroup) -> None:
    """deepep_v2, expanded as in prefill and compact as in decode. Its manager wants NCCL and a GPU, so the buffer is
    made here, with the same arguments."""
    world = dist.get_world_size()
    buffer = deep_ep.ElasticBuffer(
        group=group, num_max_tokens_per_rank=MOST_TOKENS, hidden=HIDDEN, num_topk=TOP_K, use_fp8_dispatch=False,
        allow_hybrid_mode=False, prefer_overlap_with_compute=True, allow_multiple_reduction=True,
        explicitly_destroy=True,
    )  # fmt: skip
    step = ForwardContext({}, {}, {}, dp_metadata=DPMetadata(torch.full((world,), MOST_TOKENS)))
    for decode in (False, True):
        layer = deepep_v2.DeepEPV2PrepareAndFinalize(
            buffer, world, world, case.first, EXPERTS, TOP_K, use_cudagraph=decode
        )
        layer.defer_globalize = decode  # vLLM's kernel for that is in Triton; some of its experts do it themselves

        def experts(rows: torch.Tensor, scales: None, meta: Any, ids: torch.Tensor, weights: torch.Tensor) -> Any:
            if meta.psum_recv_per_rank is None:
                return case.by_row(rows, ids, weights)
            count = int(meta.psum_recv_per_rank[-1])  # rows behind it hold anything
            out = torch.full_like(rows, torch.nan)
            out[:count] = case.by_row(rows[:count], ids[:count], weights[:count], local=True)
            return out

        with override_forward_context(step):
            same(run(layer, case, experts, TopKWeightAndReduceNoOP()), case)
    buffer.destroy()


def run(
    layer: Any, case: Case, experts: Callable[..., torch.Tensor], reduce: Any, quant: Any = UNQUANTIZED
) -> torch.Tensor:
    """The steps of vLLM's FusedMoEKernelModularImpl, which asks for experts that need a GPU."""

    def finish(steps: Any) -> Any:
        hook, receive = steps if isinstance(steps, tuple) else (None, steps)
        if hook is not None:
            hook()
        return receive()

    rows, scales, meta, ids, weights = finish(
        layer.prepare_async(case.x, case.weights, case.ids, EXPERTS, None, False, quant)
    )
    ids, weights = case.ids if ids is None else ids, case.weights if weights is None else weights
    out = torch.empty_like(case.x)
    finish(layer.finalize_async(out, experts(rows, scales, meta, ids, weights), weights, ids, False, reduce))
    return out


def same(out: torch.Tensor, case: Case, tolerance: float = 0.02) -> None:
    torch.testing.assert_close(out.float(), case.wanted(), rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    main()
