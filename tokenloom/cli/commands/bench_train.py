"""``tokenloom bench train``."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated, Optional

import typer

from tokenloom.cli.options import (
    AnyHidden,
    AnyIntermediate,
    AnyNumExperts,
    AnyTokens,
    AnyTopK,
    JsonFile,
    OnDevice,
    Ranks,
    Skew,
    choice_option,
    pick_ranks,
    require_writable,
    text_option,
    whole_option,
)
from tokenloom.cli.terminal import FAILED, console


class Dtype(str, Enum):
    """Dtypes that the check has limits for."""

    bf16 = "bf16"
    fp32 = "fp32"


def train(
    tokens: AnyTokens = None,
    hidden: AnyHidden = None,
    intermediate: AnyIntermediate = None,
    num_experts: AnyNumExperts = None,
    top_k: AnyTopK = None,
    thiek: Annotated[
        Optional[str],  # noqa: UP045
        text_option(
            "--thiek", "T,H,I,E,K", "Short for the five sizes. T is the tokens of all ranks together, unlike --tokens."
        ),
    ] = None,
    ranks: Ranks = None,
    device: OnDevice = None,
    dtype: Annotated[Dtype, choice_option("--dtype", Dtype, "Dtype of the layer.")] = Dtype.bf16,
    skew: Skew = 0.0,
    strategy: Annotated[
        Optional[str],  # noqa: UP045
        text_option(
            "--strategy",
            "NAME,NAME",
            "Strategies of dispatch and combine, such as all_gather,reduce_scatter. Default: the layer's own choice.",
        ),
    ] = None,
    overlap: Annotated[bool, typer.Option(help="Let transfers run beside GEMMs.")] = True,
    redispatch_in_backward: Annotated[
        bool, typer.Option("--redispatch-in-backward", help="Keep tokens, not dispatched rows, and send them again.")
    ] = False,
    pool_rows: Annotated[
        Optional[int],  # noqa: UP045
        whole_option(
            "--pool-rows", "Most rows of a rank's experts; the host then does not wait. Default: exact sizes."
        ),
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare outputs and gradients with a float32 reference.")] = True,
    iterations: Annotated[
        Optional[int],  # noqa: UP045
        whole_option("--iterations", "Samples of each number. Default: 6 on the CPU, 30 on GPUs.", 3),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check a training step of ExpertParallelMoE, and measure it beside torch alone and beside no network."""
    require_writable("--json", json_file)
    by_name = {
        "--tokens": tokens,
        "--hidden": hidden,
        "--intermediate": intermediate,
        "--num-experts": num_experts,
        "--top-k": top_k,
    }
    first, *rest = _sizes(thiek, by_name)
    from tokenloom.backends.seam import Strategy
    from tokenloom.bench.train.work import TrainOptions, TrainShape

    primitives = [] if strategy is None else strategy.split(",")
    if len(primitives) not in (0, 2):
        raise typer.BadParameter(f"is {strategy!r}, expected two names, such as dedup,dedup", param_hint="--strategy")
    by_hand = Strategy(*primitives) if primitives else None
    num_ranks, where = pick_ranks(ranks, device, least=1)
    from tokenloom.bench.train.run import DEFAULT_ITERATIONS, run_train

    samples = iterations or DEFAULT_ITERATIONS[where]
    all_tokens = first if thiek else first * num_ranks
    passed = run_train(
        console(),
        num_ranks,
        where,
        TrainShape(all_tokens, *rest),
        TrainOptions(dtype.value, skew, by_hand, overlap, redispatch_in_backward, pool_rows, check, samples),
        command=sys.argv[1:],
        json_file=json_file,
    )
    if not passed:
        raise typer.Exit(FAILED)


def _sizes(thiek: str | None, by_name: dict[str, int | None]) -> list[int]:
    """The five sizes, from the short form or from the options by name.

    Raises:
        typer.BadParameter: both are given, neither is, sizes are missing, or the short form is something else.
    """
    given = [option for option, value in by_name.items() if value is not None]
    if thiek is None:
        missing = [option for option in by_name if option not in given]
        if missing:
            raise typer.BadParameter(
                "missing, expected all five sizes; see tokenloom bench train --help", param_hint=", ".join(missing)
            )
        return [value for value in by_name.values() if value is not None]
    if given:
        raise typer.BadParameter(
            f"is {thiek}, which has all five sizes; leave out {', '.join(given)}", param_hint="--thiek"
        )
    sizes = thiek.split(",")
    if len(sizes) != len(by_name) or not all(size.isdecimal() and int(size) for size in sizes):
        raise typer.BadParameter(f"is {thiek!r}, expected five whole numbers above 0, T,H,I,E,K", param_hint="--thiek")
    return [int(size) for size in sizes]
