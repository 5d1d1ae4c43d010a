"""Rates that were measured on this machine, which a communicator looks for when it is made."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenloom import env
from tokenloom._version import __version__
from tokenloom.kernels.common import Rates
from tokenloom.runtime import kept_files
from tokenloom.runtime.devices import device_name
from tokenloom.runtime.rank_group import RankGroup


@dataclass(frozen=True)
class Machine:
    """What rates hold for.

    Attributes:
        device_name: model of the GPUs.
        ranks_per_node: ranks that reach each other by links.
        tokenloom: version of tokenloom, whose kernels were measured.
    """

    device_name: str
    ranks_per_node: int
    tokenloom: str

    @staticmethod
    def of(ranks: RankGroup) -> Machine:
        """The machine of a group whose ranks are on one node."""
        return Machine(device_name(ranks.device), ranks.num_ranks, __version__)

    @property
    def file_name(self) -> str:
        """Name of the file that has its rates."""
        return kept_files.name_of(f"{self.ranks_per_node}-ranks", self, ".rates")


def keep(machine: Machine, rates: Rates) -> Path | None:
    """Write rates, replacing those of this machine. Return their file, or None where nothing can be written."""
    return kept_files.keep(machine.file_name, {"machine": asdict(machine), "rates": asdict(rates)})


def find(machine: Machine) -> Rates | None:
    """Return the rates of this machine, or None.

    Warns:
        UserWarning: the file cannot be read, is damaged, or holds implausible rates. It is ignored.
    """
    path = env.cache_folder() / machine.file_name
    with contextlib.suppress(OSError):
        if path.exists():
            return kept_files.read(path, _parse)
    return None


def _parse(name: str, content: Any) -> Rates:
    if Machine(**content["machine"]).file_name != name:
        raise ValueError("of another machine")
    return Rates(**content["rates"])
