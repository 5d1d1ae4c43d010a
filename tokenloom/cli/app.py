"""The command line. Commands import what they need themselves, so that nobody waits for what they do not use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from tokenloom._version import __version__
from tokenloom.errors import TokenloomError

FAILED = 1
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

DEMO_STEPS = 160
"""The loss has fallen by half, and all of the demo takes less than a minute on two cores."""

app = typer.Typer(
    name="tokenloom",
    help="Expert parallelism for mixture-of-experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(name="bench", help="Measure.", no_args_is_help=True)
app.add_typer(bench_app)
cache_app = typer.Typer(name="cache", help="Compiled kernels on disk.", no_args_is_help=True)
app.add_typer(cache_app)


class Device(str, Enum):
    """Where ranks run."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    """Of a layer's parameters and payloads."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Rival(str, Enum):
    """Whose layer ``bench mega`` measures beside ours."""

    deep_gemm = "deep_gemm"


# Optional[...]: typer evaluates these annotations, and before version 0.13 it did not know X | None.
JsonFileOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--json", dir_okay=False, help="Also write the rows, with their setup, to this file."),
]
RanksOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--ranks", help="Number of ranks. Default: all GPUs if there are two or more, else 4 CPU processes."),
]
DeviceOption = Annotated[
    Optional[Device],  # noqa: UP045
    typer.Option("--device", help="cpu: processes over gloo. cuda: one GPU each, over NCCL."),
]
SkewOption = Annotated[float, typer.Option(min=0, help="Exponent of Zipf's law for experts; 0: all alike.")]
SizeOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, help="Instead of the case's."),
]


def main() -> None:
    """Entry point of ``tokenloom`` and ``python -m tokenloom``."""
    app()


@contextmanager
def _errors_for_people() -> Iterator[None]:
    """What went wrong on purpose ends with its message alone; so does Ctrl-C."""
    try:
        yield
    except TokenloomError as error:
        print(f"tokenloom: {getattr(error, 'said', '') or error}", file=sys.stderr)  # of launch.RankFailed
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        print("tokenloom: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from error


def _console() -> Console:
    """On the terminal as wide as that is; elsewhere wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tokenloom {__version__}")
        raise typer.Exit


@app.callback()
def _tokenloom(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    ranks: RanksOption = None,
    device: DeviceOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = DEMO_STEPS,
) -> None:
    """Check against the reference, train a small model with its experts spread over ranks, compare with one rank."""
    with _errors_for_people():
        num_ranks, where = _pick_ranks(ranks, device, least=2)
        from tokenloom.demo.run import run_demo

        if not run_demo(_console(), num_ranks, where, steps):
            raise typer.Exit(FAILED)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs and bug reports.")] = False,
) -> None:
    """Show what this machine has, which backends work here, and why the others do not."""
    with _errors_for_people():
        from tokenloom.cli import doctor as examination

        report = examination.examine()
        if as_json:
            print(json.dumps(report, indent=1))
        else:
            examination.show(_console(), report)


@app.command()
def tune(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of every rank.")],
    hidden: Annotated[int, typer.Option(min=1)],
    intermediate: Annotated[int, typer.Option(min=1)],
    num_experts: Annotated[int, typer.Option(min=1)],
    top_k: Annotated[int, typer.Option(min=1)],
    dtype: Annotated[Dtype, typer.Option(help="Of the layer's parameters.")] = Dtype.bf16,
    ranks: RanksOption = None,
    skew: SkewOption = 0.0,
    backend: Annotated[str, typer.Option(help="nvlink, collective, or auto.")] = "auto",
    device: DeviceOption = None,
    iterations: Annotated[int, typer.Option(min=1, help="Samples of each number.")] = 30,
    json_file: JsonFileOption = None,
) -> None:
    """Measure what carries the payloads of a layer, and keep the best, which layers of this shape then use."""
    with _errors_for_people():
        _require_writable("--json", json_file)
        num_ranks, where = _pick_ranks(ranks, device, least=1)
        from tokenloom.backends import registry
        from tokenloom.bench.cases import Shape
        from tokenloom.bench.tune import run_tune

        _require_known("--backend", [backend], ["auto", *registry.BACKENDS])
        run_tune(
            _console(),
            num_ranks,
            where,
            Shape(tokens, hidden, top_k, num_experts),
            intermediate=intermediate,
            dtype=dtype.value,
            skew=skew,
            backend=backend,
            command=sys.argv[1:],
            iterations=iterations,
            json_file=json_file,
        )


@bench_app.command()
def comm(
    case: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--case", help="A case, see --list; may be given several times. Default: those for the device."),
    ] = None,
    ranks: RanksOption = None,
    device: DeviceOption = None,
    wanted: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--backends", help="Who is measured, with commas between. Default: nvlink,collective,deep_ep."),
    ] = None,
    tokens: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Tokens of every rank instead of the case's; several with commas between."),
    ] = None,
    hidden: SizeOption = None,
    num_experts: SizeOption = None,
    top_k: SizeOption = None,
    num_sms: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="SMs that a kernel of backend nvlink takes; several with commas between."),
    ] = None,
    only: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Only rows with this in their name, such as dispatch/nvlink; several with commas between."),
    ] = None,
    iterations: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Samples of each row. Default: 20 on the CPU, 100 on GPUs."),
    ] = None,
    plot_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", dir_okay=False, help="Also write a bar chart to this PNG file."),
    ] = None,
    json_file: JsonFileOption = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
) -> None:
    """Measure dispatch and combine over every backend that works here, in turns, and over deep_ep if it is there."""
    with _errors_for_people():
        from tokenloom.backends import registry
        from tokenloom.bench import cases, run, series

        if list_cases:
            for each in cases.CASES:
                print(f"{each.name:<10}{each.shape!s:<26}{each.what}")
            return
        names = case or []
        contestants = list(series.CONTESTANTS) if wanted is None else wanted.split(",")
        _require_known("--case", names, [each.name for each in cases.CASES])
        _require_known("--backends", contestants, series.CONTESTANTS)
        _require_writable("--plot", plot_file, ".png")
        _require_writable("--json", json_file)
        counts, sms = _numbers("--tokens", tokens), _numbers("--num-sms", num_sms)
        num_ranks, where = _pick_ranks(ranks, device, least=1)
        shapes = cases.shapes_for(names, where, counts, hidden=hidden, num_experts=num_experts, top_k=top_k)
        parts = [] if only is None else only.split(",")
        planned, notes = series.plan_series(
            shapes, num_ranks, where, contestants, sms or [registry.DEFAULT_SMS], parts
        )
        run.run_comm(
            _console(),
            num_ranks,
            where,
            planned,
            notes,
            command=sys.argv[1:],
            iterations=iterations,
            plot_file=plot_file,
            json_file=json_file,
        )


@bench_app.command()
def mega(
    ranks: RanksOption = None,
    tokens: Annotated[
        str, typer.Option(help="Tokens of every rank, with commas between.")
    ] = "8,16,32,64,128,256,512,1024,2048,4096,8192",
    hidden: Annotated[int, typer.Option(min=1)] = 7168,
    intermediate: Annotated[int, typer.Option(min=1)] = 2048,
    num_experts: Annotated[int, typer.Option(min=1)] = 256,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    shared_experts: Annotated[int, typer.Option(min=0, help="Experts that every token goes to.")] = 0,
    masked_ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of routes that are unused.")] = 0.0,
    skew: SkewOption = 0.0,
    against: Annotated[
        Optional[Rival],  # noqa: UP045
        typer.Option(help="Also measure this library's layer, in turns with ours."),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Overwrite L2 before each sample, which is one call.")] = False,
    iterations: Annotated[int, typer.Option(min=3, help="Samples of each row.")] = 30,
    plot_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", dir_okay=False, help="Also draw times against tokens to this PNG file."),
    ] = None,
    trace_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--trace",
            dir_okay=False,
            help="Also write a call, its stages and roles on every SM, to this file, for Perfetto.",
        ),
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Measure MegaMoE, the FP8 layer for inference, and its stages, on Hopper GPUs."""
    with _errors_for_people():
        _require_writable("--plot", plot_file, ".png")
        _require_writable("--trace", trace_file)
        _require_writable("--json", json_file)
        counts = _numbers("--tokens", tokens)
        from tokenloom.bench import mega_rival
        from tokenloom.bench.mega_work import MegaShape

        shape = MegaShape(hidden, intermediate, num_experts, top_k, masked_ratio, skew, shared_experts)
        if against is not None:
            mega_rival.load(shape)  # said before anything else: it is what was asked for
        num_ranks, _ = _pick_ranks(ranks, Device.cuda, least=1)
        from tokenloom.bench.mega import run_mega

        run_mega(
            _console(),
            num_ranks,
            shape,
            counts,
            command=sys.argv[1:],
            iterations=iterations,
            cold=cold,
            against=against is not None,
            plot_file=plot_file,
            trace_file=trace_file,
            json_file=json_file,
        )


@bench_app.command()
def train(
    thiek: Annotated[
        str,
        typer.Option(help="T,H,I,E,K: tokens of all ranks together, hidden, intermediate, experts, top-k."),
    ],
    ranks: RanksOption = None,
    device: DeviceOption = None,
    dtype: Annotated[str, typer.Option(help="Of the layer: bf16 or fp32.")] = "bf16",
    skew: SkewOption = 0.0,
    strategy: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="What carries dispatch and combine, as all_gather,reduce_scatter. Default: the layer's pick."
        ),
    ] = None,
    overlap: Annotated[bool, typer.Option(help="Let transfers run beside products.")] = True,
    redispatch_in_backward: Annotated[
        bool, typer.Option("--redispatch-in-backward", help="Keep tokens, not received rows, and send them again.")
    ] = False,
    pool_rows: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Most rows of a rank's experts; the host then does not wait. Default: exact sizes."),
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare outputs and gradients with a float32 reference.")] = True,
    iterations: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=3, help="Samples of each number. Default: 6 on the CPU, 30 on GPUs."),
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Check a training step of ExpertParallelMoE, and measure it beside torch alone and beside no network."""
    with _errors_for_people():
        _require_writable("--json", json_file)
        from tokenloom.bench.train_work import TrainOptions, TrainShape
        from tokenloom.comm.strategy import Strategy

        _require_known("--dtype", [dtype], ["bf16", "fp32"])
        sizes, primitives = thiek.split(","), [] if strategy is None else strategy.split(",")
        if len(sizes) != 5 or not all(size.isdecimal() and int(size) for size in sizes):
            raise typer.BadParameter(f"{thiek!r}, expected five positive integers, T,H,I,E,K", param_hint="--thiek")
        if len(primitives) not in (0, 2):
            raise typer.BadParameter(f"{strategy!r}, expected dispatch,combine", param_hint="--strategy")
        by_hand = Strategy(*primitives) if primitives else None
        num_ranks, where = _pick_ranks(ranks, device, least=1)
        from tokenloom.bench.train import DEFAULT_ITERATIONS, run_train

        samples = iterations or DEFAULT_ITERATIONS[where]
        passed = run_train(
            _console(),
            num_ranks,
            where,
            TrainShape(*map(int, sizes)),
            TrainOptions(dtype, skew, by_hand, overlap, redispatch_in_backward, pool_rows, check, samples),
            command=sys.argv[1:],
            json_file=json_file,
        )
        if not passed:
            raise typer.Exit(FAILED)


def _require_known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(map(repr, unknown))} not among {', '.join(known)}", param_hint=option)


def _require_writable(option: str, file: Path | None, suffix: str = "") -> None:
    """Said before minutes of measuring, rather than after."""
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.absolute().parent}", param_hint=option)
    if suffix and file.suffix != suffix:
        raise typer.BadParameter(f"{file} given, expected a name that ends in {suffix}", param_hint=option)


def _numbers(option: str, text: str | None) -> list[int]:
    """Positive integers with commas between; none where the option was not given."""
    parts = [] if text is None else text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r}, expected positive integers with commas between", param_hint=option)
    return list(dict.fromkeys(map(int, parts)))


@cache_app.command("list")
def cache_list() -> None:
    """Show the compiled kernels on disk."""
    with _errors_for_people():
        from tokenloom.cli import cache_commands as commands

        entries = commands.sorted_entries()
        if entries:
            _console().print(commands.list_table(entries))
        print(commands.size_line(entries))


@cache_app.command("inspect")
def cache_inspect(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="A kernel, or the beginning of a key, as list shows them. Default: all."),
    ] = None,
) -> None:
    """Show what the compiled kernels need: registers, stack, spills, shared memory, and how many blocks fit."""
    with _errors_for_people():
        from tokenloom.cli import cache_commands as commands

        entries = commands.sorted_entries()
        if name is not None:
            entries = commands.named(entries, name)
        if entries:
            _console().print(commands.inspect_table(entries))
        else:
            print(commands.size_line(entries))


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete the compiled kernels on disk; they are compiled again when needed."""
    with _errors_for_people():
        from tokenloom.cli import cache_commands as commands
        from tokenloom.jit import cache

        print(f"{cache.clear()} deleted")
        left = list(cache.entries())
        if left:
            print(f"tokenloom: could not be deleted: {commands.size_line(left)}", file=sys.stderr)
            raise typer.Exit(FAILED)


@cache_app.command("build")
def cache_build(
    num_ranks: Annotated[int, typer.Option(help="Ranks of the group.")] = 8,
    num_experts: Annotated[int, typer.Option(help="Experts of the layer, over all ranks.")] = 256,
    hidden: Annotated[int, typer.Option(help="Values in a token.")] = 7168,
    top_k: Annotated[int, typer.Option(help="Experts of a token.")] = 8,
) -> None:
    """Compile the kernels for one shape ahead of time, in all layouts and the usual dtypes. Needs no GPU.

    Numbers of tokens are none of their business.
    """
    with _errors_for_people():
        from tokenloom import env
        from tokenloom.cli import cache_commands as commands
        from tokenloom.plan import Plan

        specs = commands.variants(Plan(num_ranks, num_experts, hidden, top_k, max_tokens_per_rank=1))
        built = commands.build(_console(), specs)
        print(f"{built.compiled} compiled in {built.wall_s:.1f} s, {built.found} were there, in {env.cache_folder()}")
        if built.not_kept:
            print(f"tokenloom: {built.not_kept} could not be written to {env.cache_folder()}", file=sys.stderr)
            raise typer.Exit(FAILED)


def _pick_ranks(ranks: int | None, device: Device | None, least: int) -> tuple[int, str]:
    """(number of ranks, device), from what was asked for and what the machine has."""
    if ranks is not None and ranks < least:
        raise typer.BadParameter(f"{ranks} given, expected at least {least}", param_hint="--ranks")
    from tokenloom.runtime.processes import default_ranks

    default, where = default_ranks(device.value if device else None)
    count = default if ranks is None else ranks
    if where == "cuda" and not least <= count <= default:
        raise typer.BadParameter(
            f"{max(count, least)} ranks on cuda need as many GPUs, there are {default}; fewer ranks, or --device cpu",
            param_hint="--ranks",
        )
    return count, where
