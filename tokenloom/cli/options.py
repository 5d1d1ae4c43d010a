"""Options that several commands share, by one name and one meaning, and checks of their values."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

# Optional[...]: typer evaluates these annotations, and before version 0.13 it does not know X | None.


class Device(str, Enum):
    """Where ranks run."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    """Dtype of a layer's parameters and payloads."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_TOKENS = typer.Option("--tokens", min=1, help="Tokens of every rank.")
_HIDDEN = typer.Option("--hidden", min=1, help="Values in a token.")
_INTERMEDIATE = typer.Option("--intermediate", min=1, help="Width of one expert.")
_NUM_EXPERTS = typer.Option("--num-experts", min=1, help="Experts of the layer, over all ranks.")
_TOP_K = typer.Option("--top-k", min=1, help="Experts of a token.")

Tokens = Annotated[int, _TOKENS]
Hidden = Annotated[int, _HIDDEN]
Intermediate = Annotated[int, _INTERMEDIATE]
NumExperts = Annotated[int, _NUM_EXPERTS]
TopK = Annotated[int, _TOP_K]

AnyTokens = Annotated[Optional[int], _TOKENS]  # noqa: UP045
AnyHidden = Annotated[Optional[int], _HIDDEN]  # noqa: UP045
AnyIntermediate = Annotated[Optional[int], _INTERMEDIATE]  # noqa: UP045
AnyNumExperts = Annotated[Optional[int], _NUM_EXPERTS]  # noqa: UP045
AnyTopK = Annotated[Optional[int], _TOP_K]  # noqa: UP045

TokensList = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--tokens", help="Tokens of every rank; several with commas between."),
]
Ranks = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--ranks", help="Number of ranks. Default: all GPUs if there are two or more, else 4 CPU processes."),
]
OnDevice = Annotated[
    Optional[Device],  # noqa: UP045
    typer.Option("--device", help="cpu: processes over gloo. cuda: one GPU each, over NCCL."),
]
RanksPerNode = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--ranks-per-node", min=1, help="Take the ranks for nodes of so many, to try what runs between them."
    ),
]
Skew = Annotated[float, typer.Option("--skew", min=0, help="Exponent of Zipf's law for experts; 0: all alike.")]
JsonFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--json", dir_okay=False, help="Also write the rows, with their setup, to this file."),
]
PlotFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--plot", dir_okay=False, help="Also draw the rows to this PNG file."),
]


def require_known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that are not among ``known``.

    Raises:
        typer.BadParameter: naming the option and all unknown names.
    """
    unknown = [name for name in given if name not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(map(repr, unknown))} not among {', '.join(known)}", param_hint=option)


def require_writable(option: str, file: Path | None, suffix: str = "") -> None:
    """Refuse a file that could not be written after minutes of measuring.

    Raises:
        typer.BadParameter: its folder does not exist or cannot be written, or its name does not end in ``suffix``.
    """
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.absolute().parent}", param_hint=option)
    if suffix and file.suffix != suffix:
        raise typer.BadParameter(f"{file} given, expected a name that ends in {suffix}", param_hint=option)
    existed = file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written ({error.strerror})", param_hint=option) from error
    if not existed:
        file.unlink(missing_ok=True)  # another process may check the same file


def numbers(option: str, text: str | None) -> list[int]:
    """Positive integers with commas between, each once; none where the option was not given.

    Raises:
        typer.BadParameter: the text is something else.
    """
    parts = [] if text is None else text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r}, expected positive integers with commas between", param_hint=option)
    return list(dict.fromkeys(map(int, parts)))


def require_nodes(ranks_per_node: int | None, num_ranks: int) -> None:
    """Refuse nodes of which the ranks do not make a whole number.

    Raises:
        typer.BadParameter: they do not.
    """
    if ranks_per_node is not None and num_ranks % ranks_per_node:
        raise typer.BadParameter(f"{ranks_per_node} does not divide {num_ranks} ranks", param_hint="--ranks-per-node")


def pick_ranks(ranks: int | None, device: Device | None, least: int) -> tuple[int, str]:
    """Number of ranks and their device, from the options and from what the machine has.

    Args:
        least: fewest ranks that the command works with.

    Raises:
        typer.BadParameter: too few ranks, or more than there are GPUs; naming ``--device`` where no number would do.
    """
    if ranks is not None and ranks < least:
        raise typer.BadParameter(f"{ranks} given, expected at least {least}", param_hint="--ranks")
    from tokenloom.runtime.processes import default_ranks

    default, where = default_ranks(device.value if device else None)
    count = default if ranks is None else ranks
    if where == "cuda" and default < least:
        raise typer.BadParameter(
            f"cuda given, which needs {gpus(least)} or more; there {are(default)}; pass --device cpu",
            param_hint="--device",
        )
    if where == "cuda" and count > default:
        raise typer.BadParameter(
            f"{count} ranks on cuda need as many GPUs, there {are(default)}; pass fewer ranks, or --device cpu",
            param_hint="--ranks",
        )
    return count, where


def gpus(number: int) -> str:
    """A number of GPUs in words."""
    return f"{number} GPU{'' if number == 1 else 's'}"


def are(number: int) -> str:
    """How many there are, in words."""
    return f"is {number}" if number == 1 else f"are {number or 'none'}"
