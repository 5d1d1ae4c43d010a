"""``tokenloom doctor``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tokenloom.cli.terminal import console


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs and bug reports.")] = False,
) -> None:
    """Show what this machine has, which backends work here, and why the others do not."""
    from tokenloom.cli import examination

    report = examination.examine()
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        examination.show(console(), report)
