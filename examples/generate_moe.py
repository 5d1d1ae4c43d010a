"""Generates with a mixture-of-experts model of transformers, its experts spread over the ranks by tokenloom.

    torchrun --nproc-per-node 4 examples/generate_moe.py                       # a small model with random weights
    torchrun --nproc-per-node 4 examples/generate_moe.py --model FOLDER        # one from disk
    torchrun --nproc-per-node 4 examples/generate_moe.py --set num_hidden_layers=48 head_dim=128   # Qwen3-30B-A3B's

It runs on GPUs (NCCL) or CPUs (gloo). Each rank has prompts of its own, or all have the same (--spread). The model
runs once with each implementation of expert parallelism, tokenloom's and transformers' "all_to_all". It reports tokens
per second, and the time of the whole model and of its experts in prefill and decode. docs/how-to/transformers.md
explains each step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

try:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging
except ImportError as error:
    raise SystemExit(f"{error}; generate_moe.py needs transformers 5.23 or newer: pip install '.[clients]'") from None

from tokenloom.integrations.transformers import describe, register

ON_CPUS = (
    "On CPUs this comparison is about equal tokens, not about speed. There, tokenloom is plain torch over gloo, and "
    "each of its calls begins with a handshake of all ranks. Its kernels run on Hopper GPUs."
)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "layers_block_type": ["full_attention", "moe"] * 2,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
}
"""Of a model without any sizes given. A family ignores the names that it does not have."""


class Clock:
    """How long the model and its experts take, by phase. GPUs are asked at the end, so that nothing waits meanwhile.

    Args:
        model: where the hooks go.
        experts: modules of it.
    """

    def __init__(self, model: nn.Module, experts: list[nn.Module], device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._phase = "prefill"
        self._begun: dict[nn.Module, Any] = {}
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._hooks = [model.register_forward_pre_hook(self._see_phase, with_kwargs=True, prepend=True)]
        for part, modules in (("model", [model]), ("experts", experts)):
            for module in modules:
                self._hooks.append(module.register_forward_pre_hook(self._begin))
                self._hooks.append(module.register_forward_hook(self._end_of(part)))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _see_phase(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._phase = "prefill" if kwargs["input_ids"].shape[1] > 1 else "decode"

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._begun[module] = self._now()

    def _end_of(self, part: str) -> Callable[..., None]:
        def end(module: nn.Module, args: Any, out: Any) -> None:
            self._spans.append((self._phase, part, self._begun.pop(module), self._now()))

        return end

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Sums by phase and part, and the number of forwards of the model in each phase. Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        if self._on_gpu:
            torch.cuda.synchronize()
        found: dict[str, dict[str, float]] = {}
        for phase, part, begin, end in self._spans:
            sums = found.setdefault(phase, {"forwards": 0, "model": 0.0, "experts": 0.0})
            sums[part] += begin.elapsed_time(end) if self._on_gpu else 1e3 * (end - begin)
            sums["forwards"] += part == "model"
        return found


def load(options: argparse.Namespace, implementation: str, dtype: torch.dtype) -> Any:
    """The model, its experts spread over all ranks; the rest by FSDP2, or by tensor parallelism."""
    num_ranks = dist.get_world_size()
    config = config_of(options)
    rest: dict[str, Any] = {"tp_size": num_ranks, "tp_plan": "auto"}
    if options.spread == "fsdp":
        plan = None if config.base_model_fsdp_plan else {"model.layers.*": "free_full_weight"}
        rest = {"fsdp_size": num_ranks, "fsdp_plan": plan}
    spread = DistributedConfig(**rest, ep_size=num_ranks, ep_implementation=implementation)
    torch.manual_seed(options.seed)
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, distributed_config=spread)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Without a weight on disk, each rank draws its part of them.
    return kind.from_pretrained(None, config=config, state_dict={}, dtype=dtype, distributed_config=spread)


def config_of(options: argparse.Namespace) -> Any:
    """The configuration on disk, or of a random model: with the sizes given, else SMALL as far as it has them."""
    if options.model:
        return AutoConfig.from_pretrained(options.model)
    sizes = {name: json.loads(value) for name, _, value in (each.partition("=") for each in options.set)}
    known = AutoConfig.for_model(options.family).to_dict()
    return AutoConfig.for_model(
        options.family, **(sizes or {name: value for name, value in SMALL.items() if name in known})
    )


def keep_weights_gathered(model: nn.Module) -> None:
    """After the first forward each rank has all weights but experts: nothing is trained, so nothing frees them."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_forward"):
            module.set_reshard_after_forward(False, recurse=False)


def prompts(options: argparse.Namespace, model: Any, device: torch.device) -> torch.Tensor:
    """This rank's prompts, int64 [batch, tokens]: the one given, or random tokens. With FSDP2 each rank has others."""
    if options.prompt:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        return tokenizer([options.prompt] * options.batch, return_tensors="pt").input_ids.to(device)
    generator = torch.Generator().manual_seed(options.seed + number_of_batch(options))
    shape = (options.batch, options.prompt_tokens)
    return torch.randint(3, model.config.get_text_config().vocab_size, shape, generator=generator).to(device)


def number_of_batch(options: argparse.Namespace) -> int:
    """Of this rank: ranks of a tensor-parallel model hold the same batch."""
    return dist.get_rank() if options.spread == "fsdp" else 0


def slowest(milliseconds: dict[str, dict[str, float]], device: torch.device) -> dict[str, dict[str, float]]:
    """The largest values of all ranks."""
    places = [(phase, name) for phase, sums in sorted(milliseconds.items()) for name in sorted(sums)]
    values = torch.tensor([milliseconds[phase][name] for phase, name in places], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    found: dict[str, dict[str, float]] = {}
    for (phase, name), value in zip(places, values.tolist(), strict=True):
        found.setdefault(phase, {})[name] = value
    return found


def run(options: argparse.Namespace, implementation: str, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """Generate with one implementation: what it took, and this rank's tokens."""
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = load(options, implementation, dtype).eval()
    keep_weights_gathered(model)
    tokens = prompts(options, model, device)
    length = {"min_new_tokens": options.new_tokens, "max_new_tokens": options.new_tokens}
    how = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
    model.generate(tokens, **how, **length)  # kernels compile, and memory is taken that later ones find
    experts = [each for each in model.modules() if getattr(each, "_is_expert_parallel", False)]
    clock = Clock(model, experts, device)
    dist.barrier()
    began = time.perf_counter()
    out = model.generate(tokens, **how, **length)
    if device.type == "cuda":
        torch.cuda.synchronize()
    wall_s = time.perf_counter() - began
    took = slowest(clock.milliseconds() | {"all": {"wall": 1e3 * wall_s}}, device)
    new = options.new_tokens * len(tokens) * (dist.get_world_size() if options.spread == "fsdp" else 1)
    result = {"tokens_per_s": new / took.pop("all")["wall"] * 1e3, "milliseconds": took}
    if dist.get_rank() == 0:
        report(implementation, result)
        if implementation != "all_to_all":
            print(describe(model), flush=True)
    return result, out


def report(implementation: str, result: dict[str, Any]) -> None:
    """One line for people: times are those of the slowest rank, per forward."""
    parts = [
        f"{phase} {sums['model'] / sums['forwards']:.2f} ms (experts {sums['experts'] / sums['forwards']:.2f})"
        for phase, sums in sorted(result["milliseconds"].items(), reverse=True)
    ]
    print(f"{implementation:14} {result['tokens_per_s']:9,.1f} tokens/s  {'  '.join(parts)}", flush=True)


def generate(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Each implementation in turn, on one rank of several."""
    if dist.get_world_size() < 2:
        raise SystemExit("experts need two ranks to be spread over: torchrun --nproc-per-node 2 ...")
    most = options.batch * options.prompt_tokens
    room = {"max_tokens_per_rank": most, "pool_rows": options.pool_rows} if options.pool_rows else {}
    register("tokenloom", ranks_per_node=options.ranks_per_node, **room)
    register("tokenloom-fp8", experts="fp8", max_tokens_per_rank=most, ranks_per_node=options.ranks_per_node)
    results: dict[str, Any] = {}
    outs: list[torch.Tensor] = []
    for implementation in options.implementations:
        results[implementation], out = run(options, implementation, device)
        outs.append(out)
        gc.collect()  # the model before makes room
    same = torch.tensor([float(torch.equal(each, outs[0])) for each in outs], device=device)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return {"ranks": dist.get_world_size(), "same_tokens": bool(same.min()), "implementations": results}


def new_file(name: str) -> str:
    """The name of a file to write, whose folder is there."""
    if not Path(name).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder for {name}")
    return name


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", metavar="FOLDER", help="a model on disk; else one with random weights is made")
    made.add_argument("--family", default="qwen3_moe", help="of a random model (default: qwen3_moe)")
    made.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of its configuration")
    made.add_argument("--dtype", help="of the weights (default: bfloat16 on GPUs, float32 on CPUs)")
    made.add_argument(
        "--spread",
        choices=["fsdp", "tp"],
        default="fsdp",
        help="of all but the experts. fsdp: each rank has prompts of its own; tp: all have the same (default: fsdp)",
    )
    made.add_argument("--batch", type=int, default=4, help="prompts of each rank (default: 4)")
    made.add_argument("--prompt", help="text, for a model on disk with its tokenizer")
    made.add_argument("--prompt-tokens", type=int, default=32, help="of random prompts (default: 32)")
    made.add_argument("--new-tokens", type=int, default=16, help="to generate for each prompt (default: 16)")
    made.add_argument(
        "--implementations",
        nargs="+",
        default=["tokenloom", "all_to_all"],
        help='"tokenloom-fp8" computes experts in FP8 (default: tokenloom all_to_all)',
    )
    made.add_argument("--pool-rows", type=int, metavar="N", help="room for N rows on a rank: no wait for counts")
    made.add_argument("--ranks-per-node", type=int, metavar="N", help="take the ranks for nodes of N")
    made.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: 0)")
    made.add_argument("--json", type=new_file, metavar="FILE", help="write the results")
    return made


def main() -> None:
    options = parser().parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    # Without torchrun: a group of one, which says what is missing.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None, **alone)
    try:
        result = generate(options, device)
        if dist.get_rank() == 0:
            print("all gave the same tokens" if result["same_tokens"] else "tokens differ where two were as likely")
            if not on_gpus:
                print(textwrap.fill(ON_CPUS, shutil.get_terminal_size((100, 0)).columns))
            if options.json:
                Path(options.json).write_text(json.dumps(result) + "\n")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
