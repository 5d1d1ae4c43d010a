"""``tokenloom cache``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tokenloom.cli.options import Hidden, NumExperts, TopK, whole_option
from tokenloom.cli.terminal import FAILED, console


def list_kernels() -> None:
    """Show the compiled kernels on disk."""
    from tokenloom.bench.tables import Fitted
    from tokenloom.cli import kernel_cache

    entries = kernel_cache.sorted_entries()
    if entries:
        console().print(Fitted(kernel_cache.list_table(entries)))
    print(kernel_cache.size_line(entries))


def inspect_kernels(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", hidden=True),  # else typer names its type beside it
    ] = None,
) -> None:
    """Show registers, stack, spills and shared memory of the compiled kernels, and how many blocks of them fit.

    NAME is a kernel, or the beginning of a key, as list shows them. Without it, all kernels are shown.
    """
    from tokenloom.bench.tables import Fitted
    from tokenloom.cli import kernel_cache

    entries = kernel_cache.sorted_entries()
    if name is not None:
        entries = kernel_cache.named(entries, name)
    if entries:
        console().print(Fitted(kernel_cache.inspect_table(entries)))
    else:
        print(kernel_cache.size_line(entries))


def clear_kernels() -> None:
    """Delete the compiled kernels on disk; they are compiled again when needed."""
    from tokenloom.cli import kernel_cache
    from tokenloom.jit import cache as disk

    print(f"{disk.clear()} deleted")
    left = list(disk.entries())
    if left:
        print(f"tokenloom: could not be deleted: {kernel_cache.size_line(left)}", file=sys.stderr)
        raise typer.Exit(FAILED)


def build_kernels(
    num_ranks: Annotated[int, whole_option("--num-ranks", "Ranks of the group.")] = 8,
    num_experts: NumExperts = 256,
    hidden: Hidden = 7168,
    top_k: TopK = 8,
) -> None:
    """Compile the kernels that move tokens of one shape, in all layouts and the usual dtypes. Needs no GPU.

    It makes both forms of kernels that have one for plans of at most 2,048 tokens on all ranks, and one for others.
    """
    from tokenloom import env
    from tokenloom.bench.workload import CallSizes
    from tokenloom.cli import kernel_cache

    specs = kernel_cache.variants(CallSizes(1, hidden, top_k, num_experts).plan(num_ranks))
    built = kernel_cache.build(console(), specs)
    print(f"{built.compiled} compiled in {built.wall_s:.1f} s, {built.found} were there, in {env.cache_folder()}")
    if built.not_kept:
        print(f"tokenloom: {built.not_kept} could not be written to {env.cache_folder()}", file=sys.stderr)
        raise typer.Exit(FAILED)
