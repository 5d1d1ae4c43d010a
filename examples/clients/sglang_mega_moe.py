"""Drives SGLang's MegaMoE path for FP8 experts on Hopper GPUs, on CPU ranks: weights, buffer, pre-dispatch, layer.

    pip install . sglang==0.5.23      # docs/how-to/sglang.md says what is enough without a GPU
    torchrun --nproc-per-node 2 examples/clients/sglang_mega_moe.py

Two layers share a buffer, as in a model, and rank 1 has no tokens in the second call. Every rank compares outputs with
``tokenloom.MegaMoE``, bit for bit. It was run with SGLang 0.5.23 and torch 2.13 on 2 and 4 ranks.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from sglang.srt.layers.moe import mega_moe, mega_moe_sm90
from sglang.srt.runtime_context import get_parallel

import tokenloom as tl
from tokenloom.compat import deep_gemm

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 512, 256, 8, 2, 12
CLAMP, FACTOR = 7.0, 2.5


class Layer:
    """Random experts, as SGLang's loader leaves them, and the same in a ``MegaMoE``."""

    def __init__(self, seed: int) -> None:
        local = EXPERTS // dist.get_world_size()
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        w1 = torch.randn(local, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
        w2 = torch.randn(local, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
        (w1, w1_scales), (w2, w2_scales) = tl.quantize_fp8_blocks(w1), tl.quantize_fp8_blocks(w2)
        self.ours = tl.MegaMoE(
            num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K, max_tokens_per_rank=TOKENS,
            activation_clamp=CLAMP, backend="composed",
        )  # fmt: skip
        self.ours.load_weights(w1, w2, w1_scales, w2_scales)
        names = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")
        given = dict(zip(names, (w1, w1_scales, w2, w2_scales), strict=True))
        parameters = {name: torch.nn.Parameter(each, requires_grad=False) for name, each in given.items()}
        states = dict.fromkeys(("_mega_moe_nvfp4", "_mega_moe_w4a4", "_mega_moe_weights_built"), False)
        self.experts = SimpleNamespace(num_experts=EXPERTS, **states, **parameters)
        mega_moe_sm90.build_sm90_mega_moe_experts_weights(self.experts)
        assert mega_moe.is_mega_moe_experts_ready(self.experts)

    def check(self, num_tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        weights, ids = torch.randn(num_tokens, EXPERTS, generator=generator).softmax(1).topk(TOP_K)
        y = mega_moe.run_mega_routed_experts(
            self.experts, x, ids, weights, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, top_k=TOP_K,
            num_tokens=num_tokens, activation_clamp=CLAMP, routed_scaling_factor=FACTOR,
        )  # fmt: skip
        assert torch.equal(y, self.ours(x, ids, weights * FACTOR))
        assert y.any() == (num_tokens > 0)


def main() -> None:
    dist.init_process_group("gloo")
    sys.modules["deep_gemm"] = deep_gemm  # a server that has the true one takes single names: docs/how-to/sglang.md
    for module in (mega_moe, mega_moe_sm90):
        mock.patch.object(module, "_device_sm", 90).start()
    with get_parallel().override(moe_ep_group=SimpleNamespace(device_group=dist.group.WORLD)):
        layers = [Layer(10), Layer(20)]
        layers[0].check(TOKENS, seed=30)
        layers[1].check(0 if dist.get_rank() == 1 else TOKENS - 5, seed=40)
        layers[0].check(TOKENS, seed=50)
    assert len(mega_moe._MEGA_MOE_SYMM_BUFFER) == 1
    print(f"rank {dist.get_rank()}: outputs agree, by {deep_gemm.fp8_mega_moe.__module__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
