"""Chosen strategies on disk, beside the compiled kernels: one file per combination of hardware, software and shape.

An unusable file is ignored with a warning.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenloom import env
from tokenloom._version import __version__
from tokenloom.backends.seam import Strategy
from tokenloom.runtime import kept_files
from tokenloom.runtime.devices import device_name

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator

_SUFFIX = ".choice"


@dataclass(frozen=True)
class Setting:
    """Hardware, software and shape that a choice holds for.

    Attributes:
        device_name: model of rank 0's GPU or CPU.
        num_ranks: W.
        num_nodes: nodes that the ranks are on.
        tokenloom: version of tokenloom.
        torch: version of torch.
        backend: name of the communicator's backend.
        tokens: most tokens of a rank, rounded up to a power of two.
        hidden: H.
        intermediate: I.
        top_k: K.
        num_experts: E.
        dtype: dtype of the layer's parameters, without "torch.".
    """

    device_name: str
    num_ranks: int
    num_nodes: int
    tokenloom: str
    torch: str
    backend: str
    tokens: int
    hidden: int
    intermediate: int
    top_k: int
    num_experts: int
    dtype: str

    @property
    def shape(self) -> str:
        """Everything but hardware and software, such as "t4096-h7168-i2048-k8-e256-bfloat16"."""
        sizes = f"t{self.tokens}-h{self.hidden}-i{self.intermediate}-k{self.top_k}-e{self.num_experts}"
        return f"{sizes}-{self.dtype}"

    @property
    def file_name(self) -> str:
        """Name of the file: the shape and a hash of the whole setting."""
        return kept_files.name_of(self.shape, self, _SUFFIX)


def setting_of(comm: Communicator, intermediate: int, dtype: torch.dtype) -> Setting:
    """Describe a layer on this machine, with this software."""
    plan = comm.plan
    return Setting(
        device_name=device_name(comm.device),
        num_ranks=plan.num_ranks,
        num_nodes=comm.engine.ranks.topology.num_nodes,
        tokenloom=__version__,
        torch=str(torch.__version__),
        backend=comm.backend,
        tokens=1 << (plan.max_tokens_per_rank - 1).bit_length(),
        hidden=plan.hidden,
        intermediate=intermediate,
        top_k=plan.top_k,
        num_experts=plan.num_experts,
        dtype=str(dtype).removeprefix("torch."),
    )


def keep(setting: Setting, strategy: Strategy) -> Path | None:
    """Write a choice, replacing the one for this setting. Return its file, or None where nothing can be written."""
    return kept_files.keep(setting.file_name, {"setting": asdict(setting), "strategy": asdict(strategy)})


def find(setting: Setting) -> Strategy | None:
    """Return the choice for this setting, or None.

    Warns:
        UserWarning: the file cannot be read or is damaged, or the only file for this shape comes from other hardware
            or software. All are ignored.
    """
    folder = env.cache_folder()
    with contextlib.suppress(OSError):
        if (folder / setting.file_name).exists():
            found = kept_files.read(folder / setting.file_name, _parse)
            return found and found[1]
        for path in sorted(folder.glob(f"{setting.shape}-*{_SUFFIX}")):
            other = kept_files.read(path, _parse)
            if other is not None:
                _warn_of_another(path, other[0], setting)
                break
    return None


def _parse(name: str, content: Any) -> tuple[Setting, Strategy]:
    setting, strategy = Setting(**content["setting"]), Strategy(**content["strategy"])
    if setting.file_name != name:
        raise ValueError("of another setting")
    return setting, strategy


def _warn_of_another(path: Path, theirs: Setting, ours: Setting) -> None:
    there, here = asdict(theirs), asdict(ours)
    differing = [f"{name} {there[name]}, here {here[name]}" for name in here if there[name] != here[name]]
    warnings.warn(
        f"the strategies in {path} are ignored: they were chosen elsewhere ({'; '.join(differing)}); "
        "run `tokenloom tune` here",
        stacklevel=3,
    )
