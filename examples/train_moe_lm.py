"""Trains a small language model whose experts are spread over the ranks: how ExpertParallelMoE is used in a program.

    python examples/train_moe_lm.py                                         # one rank
    torchrun --nproc-per-node 4 examples/train_moe_lm.py                    # four, on GPUs (NCCL) or CPUs (gloo)

Ranks share each batch (data parallelism) and the experts of each block (expert parallelism). All but the experts is
replicated, and DistributedDataParallel averages its gradients. Batches and weights depend on the seed alone, so the
loss curve is the same for any number of ranks, up to rounding. The model, with an ExpertParallelMoE in each block, is
in tokenloom/demo/model.py. docs/how-to/train.md explains each step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import tokenloom as tl
from tokenloom.demo.model import LanguageModel, ModelSize

SIZE = ModelSize(vocabulary=128)
"""A token is a byte of ASCII."""
LEARNING_RATE = 2e-3
"""Of the first step; it falls to 0 by the last one."""
ADAM_EPS = 1e-6
"""Gradients below this are rounding noise, of which Adam's default of 1e-8 would make full steps."""
MAX_GRAD_NORM = 1.0
REPORT_EVERY = 20


def moe_layers(model: nn.Module) -> list[tl.ExpertParallelMoE]:
    return [module for module in model.modules() if isinstance(module, tl.ExpertParallelMoE)]


class Corpus:
    """Sentences of a tiny grammar, in which numbers agree and sums are right, and batches of pieces of them."""

    NOUNS = ("cat", "dog", "owl", "cow", "hen", "ant")
    VERBS = ("see", "hear", "meet", "follow")

    def __init__(self, seed: int, num_sentences: int = 5000) -> None:
        draw = random.Random(seed)
        text = "".join(self._sentence(draw) for _ in range(num_sentences))
        self._bytes = torch.tensor(list(text.encode("ascii")))
        self._generator = torch.Generator().manual_seed(seed)

    def _sentence(self, draw: random.Random) -> str:
        subject, verb, thing = draw.choice(self.NOUNS), draw.choice(self.VERBS), draw.choice(self.NOUNS)
        first, second = draw.randint(1, 9), draw.randint(2, 9)
        who, does = (subject, f"{verb}s") if first == 1 else (f"{subject}s", verb)
        return f"{first} {who} {does} {second} {thing}s: {first}+{second}={first + second}.\n"

    def next_batch(self, num_sequences: int, rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the next batch: inputs and targets, int64 [num_sequences / num_ranks, SIZE.context].

        Every rank draws the whole batch and keeps its part: together they see what one rank would.
        """
        starts = torch.randint(len(self._bytes) - SIZE.context, (num_sequences,), generator=self._generator)
        own = starts.chunk(num_ranks)[rank]
        pieces = self._bytes[own[:, None] + torch.arange(SIZE.context + 1)]
        return pieces[:, :-1], pieces[:, 1:]


def train(options: argparse.Namespace, device: torch.device) -> None:
    """All steps of one rank. Losses are in nats per byte, over the tokens of all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_sequences, rest = divmod(options.tokens_per_step, SIZE.context)
    if rest or num_sequences % num_ranks:
        raise SystemExit(f"--tokens-per-step must be a multiple of {SIZE.context * num_ranks} on {num_ranks} ranks")
    comm = tl.Communicator(
        dist.group.WORLD,
        num_experts=SIZE.num_experts,
        hidden=SIZE.hidden,
        top_k=SIZE.top_k,
        max_tokens_per_rank=options.tokens_per_step // num_ranks,
        dtype=torch.float32,
        ranks_per_node=options.ranks_per_node,
    )
    model = LanguageModel(SIZE, comm).to(device)
    model.reset_parameters(options.seed)
    if options.resume:
        model.load_state_dict(torch.load(options.resume, weights_only=True))  # each rank takes its own experts
    ddp = tl.data_parallel(model)  # of all but the experts, whose gradients are complete after backward
    experts, others = tl.split_parameters(model)  # torch does not mix DTensors, as experts are, with plain tensors
    optimizer = torch.optim.AdamW([{"params": others}, {"params": experts}], lr=LEARNING_RATE, eps=ADAM_EPS)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.steps)
    corpus = Corpus(options.seed)

    losses, norms = [], []
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        inputs, targets = (each.to(device) for each in corpus.next_batch(num_sequences, rank, num_ranks))
        logits, balance_loss = ddp(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        (loss + balance_loss).backward()  # ranks have equally many tokens, so the mean of their means is the mean
        norms.append(tl.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        schedule.step()

        mean = loss.detach() / num_ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0 and step % REPORT_EVERY == 0:
            counts = torch.stack([layer.expert_counts for layer in moe_layers(model)])  # of all ranks and steps so far
            share = (counts.amax(1) / counts.sum(1)).max().item()
            speed = REPORT_EVERY * options.tokens_per_step / (time.perf_counter() - began)
            report = f"step {step:4}  loss {losses[-1]:.4f}  {speed:8,.0f} tokens/s  busiest expert {share:.0%}"
            print(report, flush=True)
            began = time.perf_counter()

    if options.checkpoint:
        full = tl.gather_state_dict(model, to="rank0")  # collective: all ranks call it
        if rank == 0:
            torch.save(full, options.checkpoint)
    if options.json and rank == 0:
        result = {"ranks": num_ranks, "losses": losses, "gradient_norms": norms}
        Path(options.json).write_text(json.dumps(result) + "\n")


def new_file(name: str) -> str:
    """The name of a file to write. Without its folder, all that was trained would be lost in the end."""
    if not Path(name).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder for {name}")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens-per-step", type=int, default=1024, help="over all ranks (default: 1024)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="take the ranks for nodes of N")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write loss and gradient norm of each step")
    parser.add_argument("--checkpoint", type=new_file, metavar="FILE", help="write the weights at the end")
    parser.add_argument("--resume", metavar="FILE", help="start from the weights that any number of ranks wrote")
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    # Without torchrun: a group of one.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None, **alone)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
