"""``tokenloom check-network``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenloom.cli.options import (
    JsonFile,
    OnDevice,
    Ranks,
    RanksPerNode,
    new_file_option,
    number_option,
    pick_ranks,
    require_nodes,
    whole_option,
)
from tokenloom.cli.terminal import FAILED, console

MOST_SEED = 2**32 - 1
"""Seeds of rounds are multiples of it, and have 64 bits."""
MOST_TIMEOUT_S = 86400.0
"""A day: nobody waits longer, and torch takes no time without an end."""


def check_network(
    ranks: Ranks = None,
    device: OnDevice = None,
    ranks_per_node: RanksPerNode = None,
    timeout_s: Annotated[
        float, number_option("--timeout-s", "Longest wait for another rank, in seconds.", least=1, most=MOST_TIMEOUT_S)
    ] = 30.0,
    rounds: Annotated[int, whole_option("--rounds", "Rounds of calls whose ranks come at random times.")] = 30,
    seed: Annotated[int, whole_option("--seed", "Seed of routing and of those times.", 0, MOST_SEED)] = 1,
    constants_file: Annotated[
        Path | None,
        new_file_option("--constants", "Write the measured constants to this file, for tokenloom plan --constants."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check bits, order and speed of everything between ranks, on ranks of its own or under torchrun."""
    from tokenloom.bench.network.check import CheckOptions, by_torchrun, run_launched, run_on_own_ranks
    from tokenloom.bench.setup import Run

    options = CheckOptions(ranks_per_node, timeout_s, rounds, seed, fits_constants=constants_file is not None)
    if by_torchrun():
        if ranks is not None:
            said = f"is {ranks}, but torchrun has started the ranks; leave it out"
            raise typer.BadParameter(said, param_hint="--ranks")
        unknown = Run(console(), 0, "", sys.argv[1:], json_file)
        passed = run_launched(unknown, device, options, constants_file)
    else:
        num_ranks, where = pick_ranks(ranks, device, least=2)
        require_nodes(ranks_per_node, num_ranks)
        _require_several_nodes(constants_file, num_ranks, where, ranks_per_node)
        run = Run(console(), num_ranks, where, sys.argv[1:], json_file)
        passed = run_on_own_ranks(run, options, constants_file)
    if not passed:
        raise typer.Exit(FAILED)


def _require_several_nodes(
    constants_file: Path | None, num_ranks: int, where: str, ranks_per_node: int | None
) -> None:
    """Refuse to measure the network between nodes where all ranks are known to be on one. Those on GPUs find out."""
    on_one = ranks_per_node == num_ranks or (ranks_per_node is None and where == "cpu")
    if constants_file is not None and on_one:
        least = next(size for size in range(num_ranks // 2, 0, -1) if num_ranks % size == 0)
        said = f"is {constants_file}, but it needs two nodes and all ranks are on one; pass --ranks-per-node {least}"
        raise typer.BadParameter(said, param_hint="--constants")
