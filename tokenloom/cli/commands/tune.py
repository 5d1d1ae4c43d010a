"""``tokenloom tune``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tokenloom.cli.options import (
    DTYPES,
    Hidden,
    Intermediate,
    JsonFile,
    MaxVio,
    NumExperts,
    OnDevice,
    Ranks,
    Tokens,
    TopK,
    choice_option,
    pick_ranks,
    require_known,
    text_option,
    whole_option,
)
from tokenloom.cli.terminal import FAILED, console


def tune(
    tokens: Tokens,
    hidden: Hidden,
    intermediate: Intermediate,
    num_experts: NumExperts,
    top_k: TopK,
    dtype: Annotated[str, choice_option("--dtype", DTYPES, "Dtype of the layer's parameters.")] = "bf16",
    ranks: Ranks = None,
    max_vio: MaxVio = 0.0,
    backend: Annotated[
        str, text_option("--backend", "NAME", "A backend as `tokenloom doctor` names it, or auto.")
    ] = "auto",
    device: OnDevice = None,
    iterations: Annotated[int, whole_option("--iterations", "Samples of each number.")] = 30,
    json_file: JsonFile = None,
) -> None:
    """Measure rates of GPUs and what carries the payloads of a layer, and keep both for communicators and layers."""
    num_ranks, where = pick_ranks(ranks, device, least=1)
    from tokenloom.backends import registry
    from tokenloom.bench.setup import Run
    from tokenloom.bench.tune import run_tune
    from tokenloom.bench.workload import CallSizes

    require_known("--backend", [backend], ["auto", *registry.names()])
    kept = run_tune(
        Run(console(), num_ranks, where, sys.argv[1:], json_file),
        CallSizes(tokens, hidden, top_k, num_experts, max_vio),
        intermediate=intermediate,
        dtype=dtype,
        backend=backend,
        iterations=iterations,
    )
    if not kept:
        raise typer.Exit(FAILED)
