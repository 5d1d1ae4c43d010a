"""The command line: all of its commands, and how errors become exit codes.

Commands import what they need when they run, so nobody waits for what they do not use.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from types import FrameType
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
from tokenloom.cli.terminal import FAILED, INTERRUPTED, INTERRUPTED_TEXT
from tokenloom.errors import TokenloomError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class _Commands(TyperGroup):
    """All commands. An error raised on purpose, Ctrl-C or a full disk ends any of them with its message alone."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TokenloomError as error:
            # A rank's failure holds its traceback, too; ``said`` is what the rank raised on purpose.
            print(f"tokenloom: {getattr(error, 'said', '') or error}", file=sys.stderr)
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as error:
            print(INTERRUPTED_TEXT, file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            print(f"tokenloom: what was found cannot be written ({error.strerror})", file=sys.stderr)
            raise typer.Exit(FAILED) from error


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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "µ" where the output is ASCII
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else a shell wants it ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. While a module is imported it ends the process at once: torch and numpy swallow exceptions there."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print(INTERRUPTED_TEXT, file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
