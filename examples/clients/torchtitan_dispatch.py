"""Drives torchtitan's dispatcher for DeepEP on CPU ranks, as its MoE layer does in training and in generation.

    pip install . tyro einops spmd_types==0.2.3 && pip install --no-deps torchtitan==0.3.0
    deep_ep=$(python -m tokenloom deep-ep-path) && export PYTHONPATH=$deep_ep
    torchrun --nproc-per-node 2 examples/clients/torchtitan_dispatch.py

Every rank compares outputs and gradients with experts that it computes all by itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchtitan.distributed.deepep import deepep

HIDDEN, EXPERTS, TOP_K, TOKENS = 32, 8, 2, 12


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    run_on_cpu()
    local = EXPERTS // num_ranks
    deepep.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=TOKENS, num_topk=TOP_K)
    weights = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)) / HIDDEN**0.5
    generator = torch.Generator().manual_seed(2 + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    scores, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(1).topk(TOP_K)
    scores = scores.detach().requires_grad_()
    own = weights[rank * local : (rank + 1) * local]

    def layer(static: bool) -> torch.Tensor:
        rows, counts, state = deepep.dispatch_tokens(
            x, ids, scores, local, EXPERTS, num_tokens_per_rank=TOKENS, cudagraphable=static
        )
        out = deepep.combine_tokens(experts(rows, counts, own), state)
        deepep.sync_combine()
        return out

    wanted = (torch.einsum("th,tkhj->tkj", x, weights[ids]) * scores[:, :, None]).sum(1)
    trained = layer(False)
    torch.testing.assert_close(trained, wanted)
    for leaf in (x, scores):
        found = [torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)[0] for out in (trained, wanted)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(layer(True), wanted)
    print(f"rank {rank}: outputs and gradients agree, by {type(deepep._buffer).__module__}")
    dist.destroy_process_group()


def run_on_cpu() -> None:
    """Register torchtitan's operations for CPU tensors; it has them for CUDA alone."""
    for name in ("dispatch", "combine"):
        deepep._lib.impl(name, getattr(deepep, f"_{name}_op_impl"), "CPU")


def experts(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows of each expert times its weight; rows behind the last belong to none."""
    parts, start = [], 0
    for count, weight in zip(counts.tolist(), weights, strict=True):
        parts.append(rows[start : start + count] @ weight)
        start += count
    return torch.cat([*parts, torch.zeros_like(rows[start:])])


if __name__ == "__main__":
    main()
