"""``tokenloom bench mega``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from tokenloom.cli.options import (
    Hidden,
    Intermediate,
    JsonFile,
    NumExperts,
    PlotFile,
    Skew,
    TokensList,
    TopK,
    are,
    file_option,
    number_option,
    numbers,
    require_known,
    require_writable,
    text_option,
    whole_option,
)
from tokenloom.cli.terminal import console

DEFAULT_TOKENS = "8,16,32,64,128,256,512,1024,2048,4096,8192"


def mega(
    tokens: TokensList = DEFAULT_TOKENS,
    hidden: Hidden = 7168,
    intermediate: Intermediate = 2048,
    num_experts: NumExperts = 256,
    top_k: TopK = 8,
    shared_experts: Annotated[int, whole_option("--shared-experts", "Experts that every token goes to.", 0)] = 0,
    masked_ratio: Annotated[
        float, number_option("--masked-ratio", "Share of routes that are unused.", least=0, most=1)
    ] = 0.0,
    skew: Skew = 0.0,
    ranks: Annotated[
        Optional[int],  # noqa: UP045
        whole_option("--ranks", "Number of ranks, one per GPU. Default: all GPUs."),
    ] = None,
    against: Annotated[
        Optional[list[str]],  # noqa: UP045
        text_option(
            "--against",
            "NAME",
            "Also measure this layer in turns with ours, deep_gemm or composed. Can be given twice.",
        ),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Overwrite L2 before each sample, which is one call.")] = False,
    iterations: Annotated[int, whole_option("--iterations", "Samples of each row.", 3)] = 30,
    plot_file: PlotFile = None,
    trace_file: Annotated[
        Optional[Path],  # noqa: UP045
        file_option("--trace", "Also write the times of blocks and roles in a call to this file, for Perfetto."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure MegaMoE, the FP8 layer for inference, and its stages, on Hopper GPUs."""
    require_writable("--plot", plot_file, ".png")
    require_writable("--trace", trace_file)
    require_writable("--json", json_file)
    counts = numbers("--tokens", tokens)
    from tokenloom.bench.mega.others import OTHERS, load
    from tokenloom.bench.mega.work import MegaShape

    shape = MegaShape(hidden, intermediate, num_experts, top_k, masked_ratio, skew, shared_experts)
    names = list(dict.fromkeys(against or ()))
    require_known("--against", names, list(OTHERS))
    load(names, shape)  # one that is missing is said before missing GPUs, because it was asked for
    from tokenloom.bench.mega.run import run_mega
    from tokenloom.errors import BackendUnavailable
    from tokenloom.runtime.processes import default_ranks

    gpus, _ = default_ranks("cuda")
    if not gpus:
        raise BackendUnavailable("bench mega needs a Hopper GPU, and there is none; bench train runs on CPUs too")
    if ranks is not None and ranks > gpus:
        said = f"is {ranks}, but each rank needs a GPU, and there {are(gpus)}; pass --ranks {gpus}"
        raise typer.BadParameter(said, param_hint="--ranks")
    run_mega(
        console(),
        ranks or gpus,
        shape,
        counts,
        command=sys.argv[1:],
        iterations=iterations,
        cold=cold,
        against=names,
        plot_file=plot_file,
        trace_file=trace_file,
        json_file=json_file,
    )
