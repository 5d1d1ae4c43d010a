"""What reads the values of options. A value that is wrong is told behind the option's name, with what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import typer

Choice = TypeVar("Choice", bound=Enum)


def whole(option: str, least: int, most: int | None = None) -> Callable[[Any], int]:
    """What reads the value of an option that is a whole number.

    Args:
        option: its name, for errors.
        least, most: the numbers that it takes; None: there is no largest.
    """
    expected = f"expected a whole number of at least {least}"
    if most is not None:
        expected = f"expected a whole number from {least} to {most}"

    def read(given: Any) -> int:
        try:
            number = int(str(given))
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise typer.BadParameter(f"is {given}, {expected}", param_hint=option)
        return number

    return read


def number(
    option: str, least: float | None = None, most: float | None = None, above: float | None = None
) -> Callable[[Any], float]:
    """What reads the value of an option that is a finite number.

    Args:
        option: its name, for errors.
        least, most: the numbers that it takes; None: there is no limit.
        above: it takes numbers above this one alone.
    """
    limits = [f"of at least {least:g}"] if least is not None else []
    limits += [f"above {above:g}"] if above is not None else []
    limits += [f"and at most {most:,.0f}"] if most is not None else []
    expected = " ".join(["expected a number", *limits])

    def read(given: Any) -> float:
        try:
            value = float(str(given))
        except ValueError:
            value = math.nan
        fits = math.isfinite(value) and (least is None or value >= least) and (above is None or value > above)
        if not fits or (most is not None and value > most):
            raise typer.BadParameter(f"is {given}, {expected}", param_hint=option)
        return value

    return read


def choice(option: str, known: type[Choice]) -> Callable[[Any], Choice]:
    """What reads the value of an option that is one of a few names."""

    def read(given: Any) -> Choice:
        if isinstance(given, known):
            return given
        names = [each.value for each in known]
        if given not in names:
            raise typer.BadParameter(f"is {given}, expected one of {', '.join(names)}", param_hint=option)
        return known(given)

    return read


def names_of(known: type[Enum]) -> str:
    """The names that an option takes, for help."""
    return "|".join(each.value for each in known)
