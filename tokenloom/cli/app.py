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
from tokenloom.cli import usage
from tokenloom.cli.commands import bench as benches
from tokenloom.cli.commands import cache as kernels
from tokenloom.cli.commands import (
    check_network,
    deep_ep_path,
    demo,
    doctor,
    plan,
    tune,
)
from tokenloom.cli.terminal import FAILED, INTERRUPTED, INTERRUPTED_TEXT, MISUSED
from tokenloom.errors import InvalidArgument, TokenloomError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
UsageError: Any = typer.BadParameter.__mro__[1]
"""Click's, which newer versions of typer have a copy of."""
OF_RANK = f"{InvalidArgument.__name__}: "
"""Begins what a rank has said that was given something wrong."""


class Commands(TyperGroup):
    """All commands. A mistake of the user, an error raised on purpose, Ctrl-C or a full disk ends any of them with
    its message alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help(), file=sys.stderr)
            raise typer.Exit(MISUSED)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            raise _told(usage.explain(error, ctx), MISUSED) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise _told(usage.explain(error, ctx), MISUSED) from error
        except InvalidArgument as error:
            raise _told(usage.cured(str(error), self, ctx), MISUSED) from error
        except TokenloomError as error:
            # A rank's failure holds its traceback, too; ``said`` is what the rank raised on purpose.
            said = str(getattr(error, "said", ""))
            if said.startswith(OF_RANK):
                raise _told(usage.cured(said.removeprefix(OF_RANK), self, ctx), MISUSED) from error
            raise _told(said or usage.in_options(str(error), self, ctx), FAILED) from error
        except KeyboardInterrupt as error:
            print(INTERRUPTED_TEXT, file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            raise _told(f"the results cannot be written ({error.strerror})", FAILED) from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with all of their first sentences, of which click cuts what is longer than a line."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, (each.help or "").partition("\n\n")[0]) for name, each in found if each])


def _told(message: str, status: int) -> typer.Exit:
    """Print the message, and return what ends the command."""
    print(f"tokenloom: {message}", file=sys.stderr)
    return typer.Exit(status)


# Help is plain text: the boxes of rich name a type behind each flag, and an error of theirs takes five lines.
PLAIN: dict[str, Any] = {"cls": Commands, "rich_markup_mode": None}

app = typer.Typer(
    **PLAIN,
    name="tokenloom",
    help="Expert parallelism for mixture-of-experts models.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(**PLAIN, name="bench", help="Measure dispatch and combine, MegaMoE, and training steps.")
cache = typer.Typer(**PLAIN, name="cache", help="Show, compile and delete the kernels on disk.")

app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("deep-ep-path")(deep_ep_path.deep_ep_path)
app.command("tune")(tune.tune)
app.command("plan")(plan.plan)
app.command("check-network")(check_network.check_network)
app.add_typer(bench)
bench.command("comm")(benches.comm)
bench.command("mega")(benches.mega)
bench.command("train")(benches.train)
app.add_typer(cache)
cache.command("list")(kernels.list_kernels)
cache.command("inspect")(kernels.inspect_kernels)
cache.command("clear")(kernels.clear_kernels)
cache.command("build")(kernels.build_kernels)


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
