"""The command line. Commands import what they need themselves, so that nobody waits for what they do not use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console

from tokenloom._version import __version__
from tokenloom.errors import TokenloomError

if TYPE_CHECKING:
    from tokenloom.bench.cases import Case

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


# Optional[...]: typer evaluates these annotations, and before version 0.13 it did not know X | None.
RanksOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--ranks", help="Number of ranks. Default: all GPUs if there are two or more, else 4 CPU processes."),
]
DeviceOption = Annotated[
    Optional[Device],  # noqa: UP045
    typer.Option("--device", help="cpu: processes over gloo. cuda: one GPU each, over NCCL."),
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
        print(f"tokenloom: {error}", file=sys.stderr)
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
        from tokenloom import doctor as examination

        report = examination.examine()
        if as_json:
            print(json.dumps(report, indent=1))
        else:
            examination.show(_console(), report)


@bench_app.command()
def comm(
    case: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--case", help="A case, see --list; may be given several times. Default: those for the device."),
    ] = None,
    ranks: RanksOption = None,
    device: DeviceOption = None,
    iterations: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Timed iterations. Default: 20 on the CPU, 100 on GPUs."),
    ] = None,
    json_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", dir_okay=False, help="Also write the rows, with their setup, to this file."),
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
) -> None:
    """Measure dispatch and combine over every backend that works here."""
    with _errors_for_people():
        from tokenloom.bench import cases

        if list_cases:
            for each in cases.CASES:
                shape = f"{each.num_tokens}x{each.hidden} top-{each.top_k} of {each.num_experts}"
                print(f"{each.name:<10}{shape:<26}{each.what}")
            return
        unknown = set(case or []) - {each.name for each in cases.CASES}
        if unknown:
            known = ", ".join(each.name for each in cases.CASES)
            raise typer.BadParameter(f"{', '.join(sorted(unknown))} not among {known}", param_hint="--case")
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {json_file.absolute().parent}", param_hint="--json")
        num_ranks, where = _pick_ranks(ranks, device, least=1)
        _bench_comm(cases.cases_for(case or [], where), num_ranks, where, iterations, json_file)


def _bench_comm(
    cases: list[Case], num_ranks: int, device: str, iterations: int | None, json_file: Path | None
) -> None:
    from tokenloom.bench import comm as bench
    from tokenloom.bench import rows
    from tokenloom.launch import RankPool

    for each in cases:
        each.plan(num_ranks)  # what cannot be spread over the ranks is said before they are started
    console = _console()
    with RankPool(num_ranks, device) as pool, console.status(f"starting {num_ranks} ranks") as status:
        measured = list(bench.measure(pool, cases, iterations or bench.DEFAULT_ITERATIONS[device], status.update))
    console.print(rows.table(measured))
    console.print(
        "p50 and p99 over iterations, of the slowest rank of each; physical: bytes that leave the busiest rank over a "
        "link; logical: bytes received, those that stay on their rank included; per p50, 1 GB is 1e9 bytes."
    )
    if json_file is not None:
        rows.write_json(json_file, measured)
        console.print(f"rows written to {json_file}")


@cache_app.command("list")
def cache_list() -> None:
    """Show the compiled kernels on disk."""
    with _errors_for_people():
        from tokenloom import cache_commands as commands

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
        from tokenloom import cache_commands as commands

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
        from tokenloom import cache_commands as commands
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
    max_tokens: Annotated[int, typer.Option(help="Most tokens that a rank passes to one dispatch.")] = 8192,
) -> None:
    """Compile the kernels for one shape ahead of time, in all layouts and the usual dtypes. Needs no GPU."""
    with _errors_for_people():
        from tokenloom import cache_commands as commands
        from tokenloom import env
        from tokenloom.plan import Plan

        specs = commands.variants(Plan(num_ranks, num_experts, hidden, top_k, max_tokens))
        built = commands.build(_console(), specs)
        print(f"{built.compiled} compiled in {built.wall_s:.1f} s, {built.found} were there, in {env.cache_folder()}")
        if built.not_kept:
            print(f"tokenloom: {built.not_kept} could not be written to {env.cache_folder()}", file=sys.stderr)
            raise typer.Exit(FAILED)


def _pick_ranks(ranks: int | None, device: Device | None, least: int) -> tuple[int, str]:
    """(number of ranks, device), from what was asked for and what the machine has."""
    if ranks is not None and ranks < least:
        raise typer.BadParameter(f"{ranks} given, expected at least {least}", param_hint="--ranks")
    from tokenloom.launch import default_ranks

    default, where = default_ranks(device.value if device else None)
    count = default if ranks is None else ranks
    if where == "cuda" and not least <= count <= default:
        raise typer.BadParameter(
            f"{max(count, least)} ranks on cuda need as many GPUs, there are {default}; fewer ranks, or --device cpu",
            param_hint="--ranks",
        )
    return count, where
