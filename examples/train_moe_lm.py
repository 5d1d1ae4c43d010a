"""Trains a small language model whose experts are spread over the ranks: how ExpertParallelMoE is used in a program.

    python examples/train_moe_lm.py                                         # one rank
    torchrun --nproc-per-node 4 examples/train_moe_lm.py                    # four, on GPUs (NCCL) or CPUs (gloo)

Ranks share each batch (data parallelism) and the experts of each block (expert parallelism). All but the experts is
replicated, and DistributedDataParallel averages its gradients. Batches and weights depend on the seed alone, so the
loss curve is the same for any number of ranks, up to rounding. docs/how-to/train.md explains each step. This file is
also what `tokenloom demo` trains with.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import tokenloom as tl

VOCABULARY = 128
"""A token is a byte of ASCII."""
CONTEXT = 64
"""Tokens in a sequence."""
HIDDEN, HEADS, BLOCKS = 64, 4, 2
NUM_EXPERTS, TOP_K, INTERMEDIATE = 8, 2, 64
BALANCE_COEF = 0.01
LEARNING_RATE = 2e-3
"""Of the first step; it falls to 0 by the last one."""
ADAM_EPS = 1e-6
"""Gradients below this are rounding noise, of which Adam's default of 1e-8 would make full steps."""
MAX_GRAD_NORM = 1.0
REPORT_EVERY = 20


class Attention(nn.Module):
    """Causal self-attention: [B, S, H] -> [B, S, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then experts, each beside a residual: [B, S, H] -> ([B, S, H], balance loss)."""

    def __init__(self, comm: tl.Communicator) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.moe = tl.ExpertParallelMoE(
            comm=comm,
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
            num_experts=comm.plan.num_experts,
            top_k=TOP_K,
            balance_coef=BALANCE_COEF,
            # The layer sums the gradients of expert weights over ranks; DDP averages all others. This makes a mean of
            # the sum.
            expert_grad_scale=1 / comm.num_ranks,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance_loss = self.moe(self.norm2(x))
        return x + y, balance_loss


class LanguageModel(nn.Module):
    """int64 [B, S] -> logits of the next byte [B, S, VOCABULARY], balance loss of all blocks."""

    def __init__(self, comm: tl.Communicator) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList(Block(comm) for _ in range(BLOCKS))  # they take turns
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens) + self.positions.weight
        balance_loss = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            balance_loss = balance_loss + more
        return self.head(self.norm(x)), balance_loss


def moe_layers(model: nn.Module) -> list[tl.ExpertParallelMoE]:
    return [module for module in model.modules() if isinstance(module, tl.ExpertParallelMoE)]


def reset_parameters(model: nn.Module, seed: int) -> None:
    """The same full model for any number of ranks. Every MoE layer has a seed of its own."""
    torch.manual_seed(seed)
    for number, module in enumerate(model.modules()):
        if isinstance(module, tl.ExpertParallelMoE):
            module.reset_parameters(seed=1000 * seed + number)
        elif isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()


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
        """This rank's share of the next batch: inputs and targets, int64 [num_sequences / num_ranks, CONTEXT].

        Every rank draws the whole batch and keeps its part: together they see what one rank would.
        """
        starts = torch.randint(len(self._bytes) - CONTEXT, (num_sequences,), generator=self._generator)
        own = starts.chunk(num_ranks)[rank]
        pieces = self._bytes[own[:, None] + torch.arange(CONTEXT + 1)]
        return pieces[:, :-1], pieces[:, 1:]


class Trainer:
    """Model, optimizer and batches of one rank.

    Args:
        tokens_per_step: tokens of all ranks together, sequences of CONTEXT for each rank alike.
        steps: after as many, the learning rate is 0.
        group: all ranks; None: the default group.
    """

    def __init__(
        self,
        tokens_per_step: int,
        steps: int,
        seed: int,
        device: torch.device,
        *,
        num_experts: int = NUM_EXPERTS,
        ranks_per_node: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.rank, self.num_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.device, self.num_sequences = device, tokens_per_step // CONTEXT
        comm = tl.Communicator(
            group,
            num_experts=num_experts,
            hidden=HIDDEN,
            top_k=TOP_K,
            max_tokens_per_rank=tokens_per_step // self.num_ranks,
            device=device,
            dtype=torch.float32,
            ranks_per_node=ranks_per_node,
        )
        self.model = LanguageModel(comm).to(device)
        reset_parameters(self.model, seed)
        # DDP around all of the model but the experts, whose gradients are complete when backward is done.
        self.ddp = tl.data_parallel(self.model, process_group=group)
        experts, others = tl.split_parameters(self.model)  # torch does not mix DTensors, as experts are, with others
        self.optimizer = torch.optim.AdamW([{"params": others}, {"params": experts}], lr=LEARNING_RATE, eps=ADAM_EPS)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, total_iters=steps)
        self.corpus = Corpus(seed)

    def step(self) -> tuple[float, float]:
        """Make one step: loss in nats per byte, over the tokens of all ranks, and norm of the gradient."""
        inputs, targets = self.corpus.next_batch(self.num_sequences, self.rank, self.num_ranks)
        logits, balance_loss = self.ddp(inputs.to(self.device))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())
        self.optimizer.zero_grad()
        (loss + balance_loss).backward()  # ranks have equally many tokens, so the mean of their means is the mean
        norm = tl.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.schedule.step()
        mean = loss.detach() / self.num_ranks
        dist.all_reduce(mean, group=self.group)
        return mean.item(), norm.item()

    def busiest_share(self) -> float:
        """Share of the busiest expert of any layer, of the routes of all ranks and steps so far."""
        counts = torch.stack([layer.expert_counts for layer in moe_layers(self.model)])
        return (counts.amax(1) / counts.sum(1)).max().item()


def train(options: argparse.Namespace, device: torch.device) -> None:
    """All steps of one rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if options.tokens_per_step % (CONTEXT * num_ranks):
        raise SystemExit(f"--tokens-per-step must be a multiple of {CONTEXT * num_ranks} on {num_ranks} ranks")
    trainer = Trainer(
        options.tokens_per_step, options.steps, options.seed, device, ranks_per_node=options.ranks_per_node
    )
    if options.resume:
        trainer.model.load_state_dict(torch.load(options.resume, weights_only=True))  # each rank takes its own experts

    losses, norms = [], []
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        loss, norm = trainer.step()
        losses.append(loss)
        norms.append(norm)
        if rank == 0 and step % REPORT_EVERY == 0:
            speed = REPORT_EVERY * options.tokens_per_step / (time.perf_counter() - began)
            busiest = trainer.busiest_share()
            print(f"step {step:4}  loss {loss:.4f}  {speed:8,.0f} tokens/s  busiest expert {busiest:.0%}", flush=True)
            began = time.perf_counter()

    if options.checkpoint:
        full = tl.gather_state_dict(trainer.model, to="rank0")  # collective: all ranks call it
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
    device = torch.device("cuda", dist.get_node_local_rank(0)) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    # Without torchrun: a group of one.
    alone: dict[str, Any] = {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    ranks = {} if dist.is_torchelastic_launched() else alone
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None, **ranks)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
