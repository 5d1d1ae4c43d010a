"""Runs ``tokenloom demo``: checks, trains, compares, and prints what it finds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tokenloom.bench.network.bits import HIDDEN
from tokenloom.bench.tables import Fitted, counted, say
from tokenloom.demo import check, train
from tokenloom.demo.check import Compared, compare_pairs, merge
from tokenloom.demo.train_moe_lm import BLOCKS, NUM_EXPERTS, TOP_K
from tokenloom.plan import align_up
from tokenloom.runtime.processes import RankPool

SEED = 2
NEXT = (
    ("tokenloom doctor", "It shows the hardware and software here, and which backends work."),
    ("tokenloom bench comm", "It measures dispatch and combine on this machine."),
    ("torchrun --nproc-per-node 2 examples/train_moe_lm.py", "It trains a model, as your own program would."),
    ("docs/tutorial/first-dispatch.md", "This page explains the first calls, step by step."),
)
"""Commands and pages behind the demo, in the order in which a reader may want them."""
MIN_SEQUENCES = 16

GRADIENT_TOLERANCE = 1e-4
"""Tolerance of the first step's gradients, relative to each parameter's largest: rounding through the whole model."""
PROFILED_STEPS = 5
"""Further steps in which the shares of dispatch and combine are measured."""
EARLY_STEPS, EARLY_TOLERANCE = 20, 1e-3
"""Tolerance of the first losses. Rounding can swap two experts that score almost alike; one such token in a step is at
most this much of the loss."""
LOSS_TOLERANCE = 0.05
"""Tolerance after many steps, when such swaps have moved the weights. Losses of successive batches differ by more."""


def run_demo(
    console: Console,
    num_ranks: int,
    device: str,
    steps: int,
    *,
    profiled_steps: int = PROFILED_STEPS,
    ranks_per_node: int | None = None,
) -> bool:
    """Check against the reference, train on all ranks, train on one, compare; return whether everything passed."""
    began = time.monotonic()
    where = "GPUs over NCCL" if device == "cuda" else "processes on the CPU over gloo"
    console.print(f"[bold]tokenloom demo[/bold]: {num_ranks} ranks, {where}")
    with RankPool(num_ranks, device) as pool:
        with console.status(f"starting {num_ranks} ranks"):
            results = pool.run(check.check_on_rank, SEED, ranks_per_node)
        differences = _show_check(console, results)
        differences += _train_and_compare(console, pool, steps, profiled_steps, ranks_per_node)
    passed = all(difference.passed for difference in differences)
    verdict = "[bold green]PASS[/]: everything agrees" if passed else "[bold red]FAIL[/]: see the tables above"
    console.print(f"{verdict}. {time.monotonic() - began:.0f} s in all.")
    if passed:
        _show_next(console)
    return passed


def _show_next(console: Console) -> None:
    """Print what a reader can do now that everything works."""
    console.print()
    console.print("[bold]Next you can try[/]")
    for command, what in NEXT:
        say(console, f"  {command}", f"    {what}")


def _show_check(console: Console, results: Sequence[tuple[str, list[Compared]]]) -> list[Compared]:
    description = results[0][0]
    differences = merge([differences for _, differences in results])
    say(console, *description.splitlines())
    console.print()
    console.print(
        "[bold]1. Against the reference.[/] Three routings: to any experts, with other numbers of tokens on every "
        "rank; all to the last rank, or node; with half of the ranks empty. Some places are unused (-1). The "
        "reference computes all ranks in one process by sorting and looping, and shares no ordering code with the "
        "backend."
    )
    console.print(Fitted(_table(differences)))
    say(console, *(f"{each.what}: {each.fault}" for each in differences if each.fault))
    console.print(
        f"Layouts {', '.join(check.LAYOUTS)}. Moved data must be equal, and so must every sum of combine, because its "
        f"order and its roundings are fixed. The layer also has GEMMs, whose order of {HIDDEN} and "
        f"{check.INTERMEDIATE} additions is up to the machine: each may round by 2^-24 of the result."
    )
    console.print()
    return differences


def _train_and_compare(
    console: Console, pool: RankPool, steps: int, profiled_steps: int, ranks_per_node: int | None
) -> list[Compared]:
    num_ranks = pool.num_ranks
    alone = train.DemoOptions(align_up(NUM_EXPERTS, num_ranks), align_up(MIN_SEQUENCES, num_ranks), steps, SEED)
    console.print(
        "[bold]2. Training a model[/], that of examples/train_moe_lm.py, on sentences of a tiny grammar. It predicts "
        f"the next byte: {BLOCKS} blocks of attention and {alone.num_experts} experts, "
        f"{alone.num_experts // num_ranks} on each rank, of which every byte uses {TOP_K}. {alone.tokens_per_step} "
        "bytes a step over all ranks; float32; AdamW."
    )
    together = replace(alone, profiled_steps=profiled_steps, ranks_per_node=ranks_per_node)
    many = _train(console, pool, num_ranks, together)
    losses = many[0].losses
    dispatch, combine = (
        float(np.mean([getattr(trained, share) for trained in many])) for share in ("dispatch_share", "combine_share")
    )
    console.print(
        f"Loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte in {counted(steps, 'step')}, "
        f"{many[0].tokens_per_s:,.0f} tokens/s. Dispatch took {dispatch:.0%} and combine {combine:.0%} of a step, "
        f"forward and backward, waiting for other ranks included (torch.profiler over {profiled_steps} more "
        "steps, mean over ranks).",
        highlight=False,
    )
    console.print()
    console.print(
        "[bold]3. The same model on one rank[/]: the same weights at the start, the same batches, all experts at home."
    )
    one = _train(console, pool, 1, alone)
    console.print(Fitted(_curves(losses, one[0].losses, num_ranks)))
    differences = compare_runs(many, one)
    console.print(Fitted(_table(differences)))
    console.print(
        f"Compared: every parameter's gradient of step 1 (as a share of the largest one of that parameter), and the "
        f"loss of every step, on {num_ranks} ranks and on one. Sums over a batch are added up in a different order on "
        "one rank, which changes last bits; where two experts score almost alike, that can swap them for a token, and "
        "later steps then differ by more than a last bit. This is about equality, not speed: how fast the ranks are "
        "together depends on what they run on, and processes that share a few cores are no faster than one."
    )
    return differences


def _train(console: Console, pool: RankPool, num_ranks: int, options: train.DemoOptions) -> list[train.Trained]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"training on {counted(num_ranks, 'rank')}", total=options.steps, state="")
        began = time.monotonic()

        def show(step: train.Step) -> None:
            tokens_per_s = step.number * options.tokens_per_step / (time.monotonic() - began)
            progress.update(task, completed=step.number, state=f"loss {step.loss:.3f}  {tokens_per_s:,.0f} tokens/s")

        return pool.run(train.train, options, ranks=num_ranks, limit_s=120 + 5 * options.steps, on_event=show)


def compare_runs(many: list[train.Trained], one: list[train.Trained]) -> list[Compared]:
    """Compare two runs of the same training on different numbers of ranks."""
    wanted = train.full_gradients(one)
    got = train.full_gradients(many)
    pairs = []
    for name in sorted(wanted.keys() | got.keys()):
        scale = float(np.abs(wanted[name]).max()) if name in wanted else 1.0
        mine, theirs = (torch.from_numpy(each[name] / scale) if name in each else None for each in (got, wanted))
        pairs.append((mine, theirs))
    losses = [torch.tensor(trained[0].losses, dtype=torch.float64) for trained in (many, one)]
    early = [each[:EARLY_STEPS] for each in losses]
    number = len(losses[1])
    all_steps = f"all {number} steps" if number > 1 else "the only step"
    early_steps = f"steps 1 to {len(early[1])}" if number > 1 else "step 1"
    return [
        compare_pairs("gradients of step 1", pairs, GRADIENT_TOLERANCE),
        compare_pairs(f"losses of {early_steps}", [(early[0], early[1])], EARLY_TOLERANCE),
        compare_pairs(f"losses of {all_steps}", [(losses[0], losses[1])], LOSS_TOLERANCE),
    ]


def _curves(many: list[float], one: list[float], num_ranks: int) -> Table:
    """A table of both losses at a few steps."""
    table = Table("step", f"loss on {num_ranks} ranks", "loss on 1 rank", "difference")
    for column in table.columns:
        column.justify = "right"
    for index in sorted({round(index) for index in np.linspace(0, len(one) - 1, 6)}):
        difference = abs(many[index] - one[index])
        table.add_row(str(index + 1), f"{many[index]:.6f}", f"{one[index]:.6f}", f"{difference:.1e}")
    return table


def _table(differences: Sequence[Compared]) -> Table:
    table = Table("compared", "values", "max diff", "mean diff", "tolerance", "")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in differences:
        table.add_row(
            each.what,
            f"{each.difference.count:,}",
            f"{each.difference.max_diff:.2g}",
            f"{each.difference.mean_diff:.2g}",
            f"{each.tolerance:.0e}" if each.tolerance else "0: equal",
            "[green]PASS[/]" if each.passed else "[bold red]FAIL[/]",
        )
    return table
