"""One line for each mistake of the user: what came, what was expected, and what to do."""

from __future__ import annotations

import re
from typing import Any


def explain(error: Any, ctx: Any) -> str:
    """Say what is wrong with the words of a command.

    Args:
        error: click's UsageError. The message of a BadParameter goes behind the name of its option.
    """
    command = _path(ctx) if error.ctx is None else error.ctx.command_path
    return with_cure(_what_is_wrong(error, error.ctx or ctx), command)


def with_cure(text: str, command: str) -> str:
    """A message that says what to do. Where it does not say so by itself, the reader is to look at the help."""
    return text if ";" in text or text.endswith("?") else f"{text}; see {command} --help"


def _path(ctx: Any) -> str:
    """The command that a group was asked for, or the group itself."""
    return f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip()


def _what_is_wrong(error: Any, ctx: Any) -> str:
    kind, message = type(error).__name__, error.message.rstrip(".")
    if kind == "NoSuchOption":
        near = list(error.possibilities or ())
        return f"there is no option {error.option_name}" + (f"; did you mean {near[0]}?" if near else "")
    if kind == "MissingParameter" and error.param is not None:
        return f"{_option_of(error)} is missing"
    if kind == "BadOptionUsage":
        return f"{error.option_name} has no value"
    if kind == "BadParameter":
        return f"{_option_of(error)} {message}"
    if (found := re.match("No such command '(.*?)'", message)) is not None:
        known = ", ".join(ctx.command.list_commands(ctx))
        return f"there is no command {found[1]!r}, expected one of {known}"
    if (found := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)) is not None:
        return f"{found[1]!r} is no option, and {ctx.command_path} takes no such argument"
    return str(message)


def _option_of(error: Any) -> str:
    """The name of the option that is wrong, as the user writes it."""
    if error.param_hint is not None:
        return str(error.param_hint)
    return str(error.param.opts[0] if error.param is not None else "a value")


def in_options(text: str, group: Any, ctx: Any) -> str:
    """Name the options of the command instead of the arguments that an error of ours names."""
    command = group.get_command(ctx, ctx.invoked_subcommand) if ctx.invoked_subcommand else None
    options = {each.name: each.opts[0] for each in getattr(command, "params", ()) if each.opts[0].startswith("--")}

    def option(found: re.Match[str]) -> str:
        value = "" if len(found.groups()) < 3 else f" {found[3]}"
        return f"{options[found[1]]}{value}" if found[1] in options else found[0]

    text = re.sub(r"^(\w+)(?= is )", option, text)
    return re.sub(r"\b(\w+)=(['\"]?)(\w+)\2", option, text)


def cured(text: str, group: Any, ctx: Any) -> str:
    """The message of an error of ours on a wrong argument, for the user of a command."""
    return with_cure(in_options(text, group, ctx), _path(ctx))
