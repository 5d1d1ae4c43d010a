"""The command line: all of its commands, and how errors become exit codes.

Commands import what they need when they run, so nobody waits for what they do not use.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tokenloom._version import __version__
from tokenloom.cli.commands import (
    bench_comm,
    bench_mega,
    bench_train,
    cache,
    check_network,
    deep_ep_path,
    demo,
    doctor,
    plan,
    tune,
)
from tokenloom.cli.terminal import FAILED, INTERRUPTED
from tokenloom.errors import TokenloomError


class _Commands(TyperGroup):
    """All commands. An error raised on purpose, or Ctrl-C, ends any of them with its message alone."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TokenloomError as error:
            # A rank's failure holds its traceback, too; ``said`` is what the rank raised on purpose.
            print(f"tokenloom: {getattr(error, 'said', '') or error}", file=sys.stderr)
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as error:
            print("tokenloom: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    cls=_Commands,
    name="tokenloom",
    help="Expert parallelism for mixture-of-experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(name="bench", help="Measure.", no_args_is_help=True)

app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("deep-ep-path")(deep_ep_path.deep_ep_path)
app.command("tune")(tune.tune)
app.command("plan")(plan.plan)
app.command("check-network")(check_network.check_network)
app.add_typer(bench)
bench.command("comm")(bench_comm.comm)
bench.command("mega")(bench_mega.mega)
bench.command("train")(bench_train.train)
app.add_typer(cache.cache)


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


def main() -> None:
    """Entry point of ``tokenloom`` and ``python -m tokenloom``."""
    app()
