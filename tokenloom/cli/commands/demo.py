"""``tokenloom demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenloom.cli.options import OnDevice, Ranks, RanksPerNode, pick_ranks, require_nodes, whole_option
from tokenloom.cli.terminal import FAILED, console

DEFAULT_STEPS = 100
"""By then the loss has fallen to a third; all of the demo takes less than a minute on two cores."""


def demo(
    ranks: Ranks = None,
    device: OnDevice = None,
    ranks_per_node: RanksPerNode = None,
    steps: Annotated[int, whole_option("--steps", "Training steps.")] = DEFAULT_STEPS,
) -> None:
    """Check against the reference, train a small model with its experts spread over ranks, compare with one rank."""
    num_ranks, where = pick_ranks(ranks, device, least=2)
    require_nodes(ranks_per_node, num_ranks)
    from tokenloom.demo.run import run_demo

    if not run_demo(console(), num_ranks, where, steps, ranks_per_node=ranks_per_node):
        raise typer.Exit(FAILED)
