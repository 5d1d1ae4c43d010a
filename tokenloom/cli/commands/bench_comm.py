"""``tokenloom bench comm``."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer

from tokenloom.cli.options import (
    AnyHidden,
    AnyNumExperts,
    AnyTopK,
    JsonFile,
    OnDevice,
    PlotFile,
    Ranks,
    RanksPerNode,
    TokensList,
    number_option,
    numbers,
    pick_ranks,
    require_known,
    require_nodes,
    require_writable,
    text_option,
    whole_option,
)
from tokenloom.cli.terminal import console


def comm(
    case: Annotated[
        Optional[list[str]],  # noqa: UP045
        text_option(
            "--case",
            "NAME",
            "A case, see --list. Can be given several times. Default: those for the device. Sizes that are given "
            "replace the case's.",
        ),
    ] = None,
    tokens: TokensList = None,
    hidden: AnyHidden = None,
    num_experts: AnyNumExperts = None,
    top_k: AnyTopK = None,
    ranks: Ranks = None,
    device: OnDevice = None,
    ranks_per_node: RanksPerNode = None,
    backends: Annotated[
        Optional[str],  # noqa: UP045
        text_option(
            "--backends",
            "NAME,...",
            "Backends to measure, with commas between: nvlink, network, collective, gin, padded; and deep_ep, the "
            "library. Default: those of nvlink, network, collective and deep_ep that work here.",
        ),
    ] = None,
    num_sms: Annotated[
        Optional[str],  # noqa: UP045
        text_option("--num-sms", "N,N,...", "SMs that a kernel of ours takes; several with commas between."),
    ] = None,
    only: Annotated[
        Optional[str],  # noqa: UP045
        text_option(
            "--only",
            "PART,...",
            "Only rows with this in their name, such as dispatch/nvlink; several with commas between.",
        ),
    ] = None,
    timing: Annotated[
        Optional[str],  # noqa: UP045
        text_option(
            "--timing",
            "NAME,...",
            "Clocks, with commas between: events (around one call), graph (a replayed CUDA graph), eager (pairs of "
            "dispatch and combine by the host's clock, and the host's time in each), or on the CPU wall and eager. "
            "Default: all that the device has.",
        ),
    ] = None,
    halves: Annotated[
        bool,
        typer.Option("--halves", help="Measure send, a GEMM, and receive, instead of calls of one piece."),
    ] = False,
    beside_us: Annotated[
        Optional[float],  # noqa: UP045
        number_option("--beside-us", "Length of the GEMM of --halves, in microseconds. Default: 100.", least=1),
    ] = None,
    iterations: Annotated[
        Optional[int],  # noqa: UP045
        whole_option("--iterations", "Samples of each row. Default: 10 on the CPU, 100 on GPUs."),
    ] = None,
    plot_file: PlotFile = None,
    json_file: JsonFile = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
) -> None:
    """Measure dispatch and combine over every backend that works here, in turns, and over deep_ep if it is there."""
    from rich.table import Table

    from tokenloom.backends import registry
    from tokenloom.bench.comm import cases, run, series
    from tokenloom.bench.common.tables import Fitted

    if list_cases:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for each in cases.CASES:
            table.add_row(each.name, str(each.shape), each.what)
        console().print(Fitted(table))
        return
    names = case or []
    contestants = series.usual() if backends is None else backends.split(",")
    timings = None if timing is None else timing.split(",")
    if beside_us is not None and not halves:
        said = f"is {beside_us:g}, but it is for halves; give --halves too"
        raise typer.BadParameter(said, param_hint="--beside-us")
    require_known("--case", names, [each.name for each in cases.CASES])
    require_known("--backends", contestants, series.names())
    require_writable("--plot", plot_file, ".png")
    require_writable("--json", json_file)
    counts, sms = numbers("--tokens", tokens), numbers("--num-sms", num_sms)
    num_ranks, where = pick_ranks(ranks, device, least=1)
    require_nodes(ranks_per_node, num_ranks)
    shapes = cases.shapes_for(names, where, counts, hidden=hidden, num_experts=num_experts, top_k=top_k)
    parts = [] if only is None else only.split(",")
    if "" in parts:
        said = f"is {only!r}, expected no empty part, which is in every name"
        raise typer.BadParameter(said, param_hint="--only")
    beside = (beside_us or series.BESIDE_US) if halves else None
    planned, notes = series.plan_series(
        shapes, num_ranks, where, contestants, sms or [registry.DEFAULT_SMS], parts, timings, beside, ranks_per_node
    )
    run.run_comm(
        console(),
        num_ranks,
        where,
        planned,
        notes,
        command=sys.argv[1:],
        iterations=iterations,
        plot_file=plot_file,
        json_file=json_file,
    )
