"""What was measured on this machine, on disk beside the compiled kernels: one file for all that it holds for.

A file is written aside and then renamed, so it is whole or absent. An unusable file is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenloom import env

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_ASIDE = ".partial"


def name_of(begin: str, setting: DataclassInstance, suffix: str) -> str:
    """Name of a file: a word for people, and a hash of all that the file holds for."""
    return f"{begin}-{hashlib.sha256(json.dumps(asdict(setting)).encode()).hexdigest()[:16]}{suffix}"


def keep(name: str, content: Any) -> Path | None:
    """Write a file as JSON, replacing the one of this name. Return it, or None where nothing can be written."""
    folder = env.cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # kernels of it are run, so others may not write
        handle, aside = tempfile.mkstemp(dir=folder, suffix=_ASIDE)
        try:
            with os.fdopen(handle, "w") as file:
                os.fchmod(file.fileno(), 0o644)  # what root has chosen, in an image say, others may use
                file.write(json.dumps(content, indent=1) + "\n")
            os.replace(aside, folder / name)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
    except OSError:
        return None
    return folder / name


def read(path: Path, parse: Callable[[str, Any], T]) -> T | None:
    """Read a file. Return None, with a warning, if it cannot be read or anything in it is wrong.

    Args:
        parse: makes of the file's name and its content what it stands for. Raises ValueError, TypeError or KeyError.
    """
    cure = "run `tokenloom tune` again, or delete it"
    try:
        return parse(path.name, json.loads(path.read_text()))
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error.strerror}) and is ignored; {cure}", stacklevel=3)
    except (ValueError, TypeError, KeyError):
        warnings.warn(f"{path} is damaged and ignored; {cure}", stacklevel=3)
    return None
