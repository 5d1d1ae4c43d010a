"""Chosen strategies on disk, beside the compiled kernels: one file per combination of hardware, software and shape.

A file is written aside and then renamed, so it is whole or absent. An unusable file is ignored with a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tokenloom import env
from tokenloom._version import __version__
from tokenloom.backends.seam import Strategy

if TYPE_CHECKING:
    from tokenloom.comm.communicator import Communicator

_SUFFIX = ".choice"
_ASIDE = ".partial"


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
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]
        return f"{self.shape}-{digest}{_SUFFIX}"


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


def device_name(device: torch.device | str) -> str:
    """Return the model of a GPU, or of the CPU as far as the system tells it."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def keep(setting: Setting, strategy: Strategy) -> Path | None:
    """Write a choice, replacing the one for this setting. Return its file, or None where nothing can be written."""
    folder = env.cache_folder()
    content = json.dumps({"setting": asdict(setting), "strategy": asdict(strategy)}, indent=1) + "\n"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # kernels of it are run, so others may not write
        handle, aside = tempfile.mkstemp(dir=folder, suffix=_ASIDE)
        try:
            with os.fdopen(handle, "w") as file:
                os.fchmod(file.fileno(), 0o644)  # what root has chosen, in an image say, others may use
                file.write(content)
            os.replace(aside, folder / setting.file_name)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
    except OSError:
        return None
    return folder / setting.file_name


def find(setting: Setting) -> Strategy | None:
    """Return the choice for this setting, or None.

    Warns:
        UserWarning: the file cannot be read or is damaged, or the only file for this shape comes from other hardware
            or software. All are ignored.
    """
    folder = env.cache_folder()
    with contextlib.suppress(OSError):
        if (folder / setting.file_name).exists():
            found = _read(folder / setting.file_name)
            return found and found[1]
        for path in sorted(folder.glob(f"{setting.shape}-*{_SUFFIX}")):
            other = _read(path)
            if other is not None:
                _warn_of_another(path, other[0], setting)
                break
    return None


def _read(path: Path) -> tuple[Setting, Strategy] | None:
    """Read a file. Return None, with a warning, if it cannot be read or anything in it is wrong."""
    cure = "run `tokenloom tune` again, or delete it"
    try:
        content = json.loads(path.read_text())
        setting, strategy = Setting(**content["setting"]), Strategy(**content["strategy"])
        if path.name == setting.file_name:
            return setting, strategy
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error.strerror}) and is ignored; {cure}", stacklevel=3)
        return None
    except (ValueError, TypeError, KeyError):
        pass
    warnings.warn(f"{path} is damaged and ignored; {cure}", stacklevel=3)
    return None


def _warn_of_another(path: Path, theirs: Setting, ours: Setting) -> None:
    there, here = asdict(theirs), asdict(ours)
    differing = [f"{name} {there[name]}, here {here[name]}" for name in here if there[name] != here[name]]
    warnings.warn(
        f"the strategies in {path} are ignored: they were chosen elsewhere ({'; '.join(differing)}); "
        "run `tokenloom tune` here",
        stacklevel=3,
    )
