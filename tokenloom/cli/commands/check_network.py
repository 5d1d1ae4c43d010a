"""``tokenloom check-network``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from tokenloom.cli.options import (
    JsonFile,
    OnDevice,
    Ranks,
    RanksPerNode,
    pick_ranks,
    require_nodes,
    require_writable,
)
from tokenloom.cli.terminal import FAILED, console

MOST_SEED = 2**32 - 1
"""Seeds of rounds are multiples of it, and have 64 bits."""


def check_network(
    ranks: Ranks = None,
    device: OnDevice = None,
    ranks_per_node: RanksPerNode = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest wait for another rank, in seconds.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of calls whose ranks come at random times.")] = 30,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of routing and of those times.")] = 1,
    constants_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--constants", dir_okay=False, help="Write what was measured to this file, for tokenloom plan --constants."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check bits, order and speed of everything between ranks, on ranks of its own or under torchrun."""
    require_writable("--constants", constants_file)
    require_writable("--json", json_file)
    from tokenloom.bench.network import launched

    by_torchrun = launched.by_torchrun()
    if by_torchrun and ranks is not None:
        raise typer.BadParameter("torchrun says how many there are; leave it out", param_hint="--ranks")
    if not by_torchrun:
        num_ranks, where = pick_ranks(ranks, device, least=2)
        require_nodes(ranks_per_node, num_ranks)
    from tokenloom.bench.network.on_rank import Options
    from tokenloom.bench.network.run import Files, run_launched, run_on_own_ranks

    options = Options(ranks_per_node, timeout_s, rounds, seed, fits_constants=constants_file is not None)
    files = Files(json_file, constants_file)
    if by_torchrun:
        passed = run_launched(console(), device.value if device else None, options, files, sys.argv[1:])
    else:
        passed = run_on_own_ranks(console(), num_ranks, where, options, files, sys.argv[1:])
    if not passed:
        raise typer.Exit(FAILED)
