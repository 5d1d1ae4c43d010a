"""``tokenloom bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenloom.cli.options import (
    AnyHidden,
    AnyIntermediate,
    AnyNumExperts,
    AnyTokens,
    AnyTopK,
    Hidden,
    Intermediate,
    JsonFile,
    MaxVioList,
    NumExperts,
    OnDevice,
    PlotFile,
    Ranks,
    RanksPerNode,
    SpareSlots,
    TokensList,
    TopK,
    are,
    choice_option,
    max_vios,
    new_file_option,
    number_option,
    numbers,
    pick_ranks,
    require_known,
    require_nodes,
    text_option,
    whole_option,
)
from tokenloom.cli.terminal import FAILED, console

MEGA_TOKENS = "8,16,32,64,128,256,512,1024,2048,4096,8192"


TRAIN_DTYPES = ("bf16", "fp32")
"""Dtypes that the check has limits for."""


def comm(
    case: Annotated[
        list[str] | None,
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
    max_vio: MaxVioList = None,
    spare_slots: SpareSlots = None,
    backends: Annotated[
        str | None,
        text_option(
            "--backends",
            "NAME,...",
            "Backends to measure, with commas between: nvlink, network, collective, gin, padded; and deep_ep, the "
            "library. Default: those of nvlink, network, collective and deep_ep that work here.",
        ),
    ] = None,
    num_sms: Annotated[
        str | None,
        text_option(
            "--num-sms",
            "N,N,...",
            "SMs that a kernel of ours takes; several with commas between. Default: 0, as many as it chooses.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        text_option(
            "--only",
            "PART,...",
            "Only rows with this in their name, such as dispatch/nvlink; several with commas between.",
        ),
    ] = None,
    timing: Annotated[
        str | None,
        text_option(
            "--timing",
            "NAME,...",
            "Clocks, with commas between: events (around one call), graph (a replayed CUDA graph), eager (pairs of "
            "dispatch and combine by the host's clock, and the host's time in each), or on the CPU wall and eager. "
            "Default: all that the device has.",
        ),
    ] = None,
    halves: Annotated[
        bool, typer.Option("--halves", help="Measure send, a GEMM, and receive, instead of calls of one piece.")
    ] = False,
    beside_us: Annotated[
        float | None,
        number_option("--beside-us", "Length of the GEMM of --halves, in microseconds. Default: 100.", least=1),
    ] = None,
    iterations: Annotated[
        int | None, whole_option("--iterations", "Samples of each row. Default: 10 on the CPU, 100 on GPUs.")
    ] = None,
    plot_file: PlotFile = None,
    json_file: JsonFile = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
) -> None:
    """Measure dispatch and combine over every backend that works here, in turns, and over deep_ep if it is there."""
    from tokenloom.bench import comm_work
    from tokenloom.bench.comm import run_comm
    from tokenloom.bench.setup import Run

    if list_cases:
        from rich.table import Table

        from tokenloom.bench.tables import Fitted

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for each in comm_work.CASES:
            table.add_row(each.name, str(each.shape), each.what)
        console().print(Fitted(table))
        return
    names = case or []
    contestants = comm_work.usual() if backends is None else backends.split(",")
    timings = None if timing is None else timing.split(",")
    if beside_us is not None and not halves:
        said = f"is {beside_us:g}, but it is for halves; give --halves too"
        raise typer.BadParameter(said, param_hint="--beside-us")
    require_known("--case", names, [each.name for each in comm_work.CASES])
    require_known("--backends", contestants, comm_work.names())
    counts, sms = numbers("--tokens", tokens), numbers("--num-sms", num_sms)
    num_ranks, where = pick_ranks(ranks, device, least=1)
    require_nodes(ranks_per_node, num_ranks)
    sizes = {"hidden": hidden, "num_experts": num_experts, "top_k": top_k}
    shapes = comm_work.shapes_for(names, where, counts, max_vios(max_vio), **sizes)
    parts = [] if only is None else only.split(",")
    if "" in parts:
        said = f"is {only!r}, expected no empty part, which is in every name"
        raise typer.BadParameter(said, param_hint="--only")
    beside = (beside_us or comm_work.BESIDE_US) if halves else None
    planned, notes = comm_work.plan_series(
        shapes,
        num_ranks,
        where,
        contestants,
        sms or [0],
        parts,
        timings,
        beside,
        ranks_per_node,
        spare_slots,
    )
    run = Run(console(), num_ranks, where, sys.argv[1:], json_file, plot_file)
    run_comm(run, planned, notes, iterations)


def mega(
    tokens: TokensList = MEGA_TOKENS,
    hidden: Hidden = 7168,
    intermediate: Intermediate = 2048,
    num_experts: NumExperts = 256,
    top_k: TopK = 8,
    shared_experts: Annotated[int, whole_option("--shared-experts", "Experts that every token goes to.", 0)] = 0,
    masked_ratio: Annotated[
        float, number_option("--masked-ratio", "Share of routes that are unused.", least=0, most=1)
    ] = 0.0,
    max_vio: MaxVioList = None,
    spare_slots: SpareSlots = None,
    ranks: Annotated[int | None, whole_option("--ranks", "Number of ranks, one per GPU. Default: all GPUs.")] = None,
    against: Annotated[
        list[str] | None,
        text_option(
            "--against",
            "NAME",
            "Also measure this layer in turns with ours: deep_gemm, row, four_bits or composed. Can be given again.",
        ),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Overwrite L2 before each sample, which is one call.")] = False,
    iterations: Annotated[int, whole_option("--iterations", "Samples of each row.", 3)] = 30,
    plot_file: PlotFile = None,
    trace_file: Annotated[
        Path | None,
        new_file_option("--trace", "Also write the times of blocks and roles in a call to this file, for Perfetto."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure MegaMoE, the FP8 layer for inference, and its stages, on Hopper GPUs."""
    counts = numbers("--tokens", tokens)
    from tokenloom.bench.mega import OTHERS, load, run_mega
    from tokenloom.bench.mega_work import MegaShape
    from tokenloom.bench.setup import Run
    from tokenloom.errors import BackendUnavailable
    from tokenloom.runtime.processes import default_ranks

    shapes = [
        MegaShape(hidden, intermediate, num_experts, top_k, masked_ratio, each, shared_experts)
        for each in max_vios(max_vio)
    ]
    names = list(dict.fromkeys(against or ()))
    require_known("--against", names, list(OTHERS))
    load(names, shapes[0])  # one that is missing is said before missing GPUs, because it was asked for
    gpus, _ = default_ranks("cuda")
    if not gpus:
        raise BackendUnavailable("bench mega needs a Hopper GPU, and there is none; bench train runs on CPUs too")
    if ranks is not None and ranks > gpus:
        said = f"is {ranks}, but each rank needs a GPU, and there {are(gpus)}; pass --ranks {gpus}"
        raise typer.BadParameter(said, param_hint="--ranks")
    run = Run(console(), ranks or gpus, "cuda", sys.argv[1:], json_file, plot_file)
    options: dict[str, Any] = {"cold": cold, "against": names, "spare_slots": spare_slots, "trace_file": trace_file}
    run_mega(run, shapes, counts, iterations, **options)


def train(
    tokens: AnyTokens = None,
    hidden: AnyHidden = None,
    intermediate: AnyIntermediate = None,
    num_experts: AnyNumExperts = None,
    top_k: AnyTopK = None,
    thiek: Annotated[
        str | None,
        text_option(
            "--thiek", "T,H,I,E,K", "Short for the five sizes. T is the tokens of all ranks together, unlike --tokens."
        ),
    ] = None,
    ranks: Ranks = None,
    device: OnDevice = None,
    dtype: Annotated[str, choice_option("--dtype", TRAIN_DTYPES, "Dtype of the layer.")] = "bf16",
    max_vio: MaxVioList = None,
    spare_slots: SpareSlots = None,
    strategy: Annotated[
        str | None,
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
        int | None,
        whole_option(
            "--pool-rows", "Most rows of a rank's experts; the host then does not wait. Default: exact sizes."
        ),
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare outputs and gradients with a float32 reference.")] = True,
    iterations: Annotated[
        int | None, whole_option("--iterations", "Samples of each number. Default: 6 on the CPU, 30 on GPUs.", 3)
    ] = None,
    plot_file: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Check a training step of ExpertParallelMoE, and measure it beside torch alone and beside no network."""
    by_name = {
        "--tokens": tokens,
        "--hidden": hidden,
        "--intermediate": intermediate,
        "--num-experts": num_experts,
        "--top-k": top_k,
    }
    first, *rest = _sizes(thiek, by_name)
    from tokenloom.backends.seam import Strategy
    from tokenloom.bench.setup import Run
    from tokenloom.bench.train import DEFAULT_ITERATIONS, run_train
    from tokenloom.bench.train_work import TrainOptions, TrainShape

    primitives = [] if strategy is None else strategy.split(",")
    if len(primitives) not in (0, 2):
        raise typer.BadParameter(f"is {strategy!r}, expected two names, such as dedup,dedup", param_hint="--strategy")
    by_hand = Strategy(*primitives) if primitives else None
    num_ranks, where = pick_ranks(ranks, device, least=1)
    samples = iterations or DEFAULT_ITERATIONS[where]
    shape = TrainShape(first if thiek else first * num_ranks, *rest)
    how = TrainOptions(dtype, 0.0, by_hand, overlap, redispatch_in_backward, pool_rows, check, samples, spare_slots)
    run = Run(console(), num_ranks, where, sys.argv[1:], json_file, plot_file)
    passed = run_train(run, shape, how, max_vios(max_vio))
    if not passed:
        raise typer.Exit(FAILED)


def _sizes(thiek: str | None, by_name: dict[str, int | None]) -> list[int]:
    """The five sizes, from the short form or from the options by name."""
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
