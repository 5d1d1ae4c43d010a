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
    numbers,
    pick_ranks,
    require_known,
    require_nodes,
    require_writable,
)
from tokenloom.cli.terminal import console


def comm(
    case: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--case",
            help="A case, see --list; may be given several times. Default: those for the device. Sizes that are "
            "given replace the case's.",
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
        typer.Option(help="Who is measured, with commas between. Default: every backend, and deep_ep."),
    ] = None,
    num_sms: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="SMs that a kernel of backend nvlink takes; several with commas between."),
    ] = None,
    only: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Only rows with this in their name, such as dispatch/nvlink; several with commas between."),
    ] = None,
    timing: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Clocks, with commas between: events (around one call), graph (a replayed CUDA graph), eager (pairs "
            "of dispatch and combine by the host's clock, and the host's time in each), or on the CPU wall and eager. "
            "Default: all that the device has."
        ),
    ] = None,
    halves: Annotated[
        bool,
        typer.Option("--halves", help="Measure send, a GEMM, and receive, instead of calls of one piece."),
    ] = False,
    beside_us: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=1, help="Length of the GEMM of --halves, about, in microseconds. Default: 100."),
    ] = None,
    iterations: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Samples of each row. Default: 20 on the CPU, 100 on GPUs."),
    ] = None,
    plot_file: PlotFile = None,
    json_file: JsonFile = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
) -> None:
    """Measure dispatch and combine over every backend that works here, in turns, and over deep_ep if it is there."""
    from tokenloom.backends import registry
    from tokenloom.bench.comm import cases, run, series

    if list_cases:
        for each in cases.CASES:
            print(f"{each.name:<10}{each.shape!s:<26}{each.what}")
        return
    names = case or []
    contestants = series.names() if backends is None else backends.split(",")
    timings = None if timing is None else timing.split(",")
    if beside_us is not None and not halves:
        raise typer.BadParameter("the GEMM runs between halves; give --halves too", param_hint="--beside-us")
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
        raise typer.BadParameter(f"{only!r} has an empty part, which is in every name", param_hint="--only")
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
