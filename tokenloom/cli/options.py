"""Options that several commands share, by one name and one meaning, and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

DTYPES = ("bf16", "fp16", "fp32")


def _whole(option: str, least: int, most: int | None = None) -> Callable[[Any], int]:
    """Reader of an option that is a whole number."""
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


def _number(
    option: str, least: float | None = None, most: float | None = None, above: float | None = None
) -> Callable[[Any], float]:
    """Reader of an option that is a finite number.

    Args:
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


def _choice(option: str, known: Sequence[str]) -> Callable[[Any], str]:
    """Reader of an option that is one of a few names."""

    def read(given: Any) -> str:
        if given not in known:
            raise typer.BadParameter(f"is {given}, expected one of {', '.join(known)}", param_hint=option)
        return str(given)

    return read


def _existing_file(option: str) -> Callable[[Any], Path]:
    """Reader of an option that is a file to read."""

    def read(given: Any) -> Path:
        if not Path(given).is_file():
            raise typer.BadParameter(f"is {given}, but there is no such file; pass one that exists", param_hint=option)
        return Path(given)

    return read


def new_file(option: str, suffix: str = "") -> Callable[[Any], Path]:
    """Reader of an option that is a file to write: it must not fail after minutes of measuring."""

    def read(given: Any) -> Path:
        file = Path(given)
        if not file.absolute().parent.is_dir():
            said = f"is {file}, but there is no folder {file.absolute().parent}; make it first"
            raise typer.BadParameter(said, param_hint=option)
        if suffix and file.suffix != suffix:
            raise typer.BadParameter(f"is {file}, expected a name that ends in {suffix}", param_hint=option)
        existed = file.exists()
        try:
            file.open("a").close()
        except OSError as error:
            said = f"is {file}, which cannot be written ({error.strerror}); pass another file"
            raise typer.BadParameter(said, param_hint=option) from error
        if not existed:
            file.unlink(missing_ok=True)  # another process may check the same file
        return file

    return read


def whole_option(name: str, about: str, least: int = 1, most: int | None = None) -> Any:
    """An option that is a whole number."""
    return typer.Option(name, parser=_whole(name, least, most), metavar="N", help=about)


def number_option(name: str, about: str, **limits: float) -> Any:
    """An option that is a number, within the limits that :func:`_number` knows."""
    return typer.Option(name, parser=_number(name, **limits), metavar="X", help=about)


def choice_option(name: str, known: Sequence[str], about: str) -> Any:
    """An option that is one of a few names."""
    return typer.Option(name, parser=_choice(name, known), metavar="|".join(known), help=about)


def text_option(name: str, metavar: str, about: str) -> Any:
    """An option that is text, such as names with commas between."""
    return typer.Option(name, metavar=metavar, help=about)


def existing_file_option(name: str, about: str) -> Any:
    """An option that is a file to read."""
    return typer.Option(name, parser=_existing_file(name), metavar="FILE", help=about)


def new_file_option(name: str, about: str, suffix: str = "") -> Any:
    """An option that is a file to write."""
    return typer.Option(name, parser=new_file(name, suffix), metavar="FILE", help=about)


_TOKENS = whole_option("--tokens", "Tokens of every rank.")
_HIDDEN = whole_option("--hidden", "Values in a token.")
_INTERMEDIATE = whole_option("--intermediate", "Width of one expert.")
_NUM_EXPERTS = whole_option("--num-experts", "Experts of the layer, over all ranks.")
_TOP_K = whole_option("--top-k", "Experts of a token.")

Tokens = Annotated[int, _TOKENS]
Hidden = Annotated[int, _HIDDEN]
Intermediate = Annotated[int, _INTERMEDIATE]
NumExperts = Annotated[int, _NUM_EXPERTS]
TopK = Annotated[int, _TOP_K]

AnyTokens = Annotated[int | None, _TOKENS]
AnyHidden = Annotated[int | None, _HIDDEN]
AnyIntermediate = Annotated[int | None, _INTERMEDIATE]
AnyNumExperts = Annotated[int | None, _NUM_EXPERTS]
AnyTopK = Annotated[int | None, _TOP_K]

TokensList = Annotated[
    str | None, text_option("--tokens", "N,N,...", "Tokens of every rank; several with commas between.")
]
Ranks = Annotated[
    int | None,
    whole_option("--ranks", "Number of ranks. Default: all GPUs if there are two or more, else 4 CPU processes."),
]
OnDevice = Annotated[
    str | None, choice_option("--device", ("cpu", "cuda"), "cpu: processes over gloo. cuda: one GPU each, over NCCL.")
]
RanksPerNode = Annotated[
    int | None, whole_option("--ranks-per-node", "Take the ranks for nodes of so many, to try what runs between them.")
]
_MAX_VIO = "Most routes that an expert is to get over the mean, less 1; 0: all alike"
MaxVio = Annotated[float, number_option("--max-vio", f"{_MAX_VIO}.", least=0)]
MaxVioList = Annotated[
    str | None, text_option("--max-vio", "X,X,...", f"{_MAX_VIO}. Several with commas between. Default: 0.")
]
SpareSlots = Annotated[
    int | None,
    whole_option(
        "--spare-slots",
        "Measure each row of ours with as many slots more on each rank too: with replicas of hot experts, and, but in "
        "mega, with each batch split over the ranks. bench comm pulls no weights for that.",
    ),
]
JsonFile = Annotated[Path | None, new_file_option("--json", "Also write the rows, with their setup, to this file.")]
PlotFile = Annotated[Path | None, new_file_option("--plot", "Also draw the rows to this PNG file.", ".png")]


def require_known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that are not among ``known``."""
    unknown = [name for name in given if name not in known]
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise typer.BadParameter(f"is {names}, expected one of {', '.join(known)}", param_hint=option)


def numbers(option: str, text: str | None) -> list[int]:
    """Positive integers with commas between, each once; none where the option was not given."""
    parts = [] if text is None else text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        said = f"is {text!r}, expected whole numbers above 0 with commas between"
        raise typer.BadParameter(said, param_hint=option)
    return list(dict.fromkeys(map(int, parts)))


def max_vios(text: str | None) -> list[float]:
    """The numbers of ``--max-vio`` with commas between, each once; 0 where it was not given."""
    read = _number("--max-vio", least=0)
    return list(dict.fromkeys(read(part) for part in ("0" if text is None else text).split(",")))


def require_nodes(ranks_per_node: int | None, num_ranks: int) -> None:
    """Refuse nodes of which the ranks do not make a whole number."""
    if ranks_per_node is not None and num_ranks % ranks_per_node:
        said = f"is {ranks_per_node}, expected a divisor of the {num_ranks} ranks"
        raise typer.BadParameter(said, param_hint="--ranks-per-node")


def pick_ranks(ranks: int | None, device: str | None, least: int) -> tuple[int, str]:
    """Number of ranks and their device, from the options and from what the machine has.

    Raises:
        typer.BadParameter: too few ranks, or more than there are GPUs; naming ``--device`` where no number would do.
    """
    if ranks is not None and ranks < least:
        said = f"is {ranks}, expected a whole number of at least {least}"
        raise typer.BadParameter(said, param_hint="--ranks")
    from tokenloom.bench.tables import counted
    from tokenloom.runtime.processes import default_ranks

    default, where = default_ranks(device)
    count = default if ranks is None else ranks
    if where == "cuda" and default < least:
        said = f"is cuda, which needs {counted(least, 'GPU')} or more, but there {are(default)}; pass --device cpu"
        raise typer.BadParameter(said, param_hint="--device")
    if where == "cuda" and count > default:
        said = f"is {count}, but each rank on cuda needs a GPU, and there {are(default)}; pass --ranks {default}"
        raise typer.BadParameter(said, param_hint="--ranks")
    return count, where


def are(count: int) -> str:
    """How many there are, in words."""
    return f"is {count}" if count == 1 else f"are {count or 'none'}"
