"""Trains a small GPT of Megatron-Core whose experts' tokens travel by tokenloom, beside Megatron's own all-to-all.

    pip install . megatron-core
    torchrun --nproc-per-node 4 examples/clients/megatron_moe.py              # on GPUs (NCCL) or CPUs (gloo)

Model, data parallelism and optimizer are Megatron's; each rank has its share of the experts. The same weights train on
the same batches with each dispatcher, and the program fails unless their losses agree. It was run on CPU ranks with
Megatron-Core 0.16.1 and 0.19.2. docs/how-to/megatron-core.md says more; :func:`run_on_cpu` says what asks for a GPU.
"""
# ruff: noqa: E402

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import tokenloom.compat

tokenloom.compat.install()  # before Megatron's modules load: they import deep_ep then

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import fused_a2a, moe_utils, token_dispatcher

# 0.16.1 reads this name also without TransformerEngine, where nothing defines it.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)

DISPATCHERS = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    # These two call deep_ep: tokenloom needs no other option.
    "deepep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    "hybridep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
}
EXPERTS, VOCABULARY, SEQUENCE, BATCH, STEPS = 8, 64, 32, 4, 10
TOLERANCE = 1e-4
"""Of losses, relative. On CPUs every bit agrees; on GPUs gradients of embeddings are added in any order."""


def make_model(device: torch.device, dispatcher: dict[str, str]) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, num_moe_experts=EXPERTS, moe_ffn_hidden_size=64, moe_router_topk=2,
        moe_aux_loss_coeff=0.01, expert_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True,
        moe_router_dtype="fp32",  # tokens' weights travel in float32
        **dispatcher,
    )  # fmt: skip
    torch.manual_seed(dist.get_rank())  # each rank's experts are others
    model = GPTModel(config, get_gpt_layer_local_spec(num_experts=EXPERTS), VOCABULARY, SEQUENCE).to(device)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    ddp.broadcast_params()  # all but the experts becomes the same
    return ddp


def train(device: torch.device, dispatcher: dict[str, str]) -> list[float]:
    """The loss of each step, in nats per token, over the tokens of all ranks."""
    model = make_model(device, dispatcher)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=5e-3, clip_grad=0.0), [model])  # it clips on GPUs alone
    generator = torch.Generator().manual_seed(dist.get_rank())
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        tokens = ((starts + 3 * torch.arange(SEQUENCE + 1)) % VOCABULARY).to(device)  # what it learns: add 3
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    with nullcontext() if on_gpus else run_on_cpu():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        losses = {name: train(device, dispatcher) for name, dispatcher in DISPATCHERS.items()}
    passed = all(
        math.isclose(loss, wanted, rel_tol=TOLERANCE)
        for found in losses.values()
        for loss, wanted in zip(found, losses["alltoall"], strict=True)
    )
    if dist.get_rank() == 0:
        print("step" + "".join(f"{name:>10}" for name in losses))
        for step, values in enumerate(zip(*losses.values(), strict=True), 1):
            print(f"{step:4}" + "".join(f"{value:10.5f}" for value in values))
        # How tokens travelled for "deepep". "hybridep" has its buffer in _hybrid_ep_buffer.
        print(fused_a2a._buffer.runtime.all()[0].describe())
        print(f"{'PASS' if passed else 'FAIL'}: losses of each step within {TOLERANCE:g} of alltoall's")
    dist.destroy_process_group()
    raise SystemExit(not passed)


class OnCpus(TorchFunctionMode):
    """Makes tensors on CPUs where Megatron names the device "cuda", whatever the model is on."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return function(*args, **given)


def run_on_cpu() -> TorchFunctionMode:
    """Give Megatron what it asks a GPU for: the current device, streams, and generators of random numbers."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.stream = torch.cuda.current_stream = mock.MagicMock()
    tensor_parallel.random.CudaRNGStatesTracker.add = lambda *_: None
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.tolist() if as_numpy and tensor is not None else tensor
    )
    torch.compiler.set_stance("force_eager")  # compiling takes longer than all steps
    return OnCpus()


if __name__ == "__main__":
    main()
