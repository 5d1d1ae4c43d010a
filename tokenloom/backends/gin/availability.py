"""Whether kernels can send over the network by themselves, with NCCL's GIN."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tokenloom.backends.registration import Availability
from tokenloom.env import nccl_plugin
from tokenloom.errors import TokenloomError
from tokenloom.jit import compiler, nccl_headers
from tokenloom.runtime import nccl

RDMA_CARDS = Path("/sys/class/infiniband")


def examine(device: torch.device) -> Availability:
    """Whether GIN can carry rows of tensors on this device.

    Returns:
        ``why`` says over which cards, or what is missing, and names a version of NCCL's that nobody has checked. Of
        which type GIN is, NCCL tells only a communicator. ``facts["headers"]`` are NCCL's headers, or why there are
        none that kernels could be compiled from.
    """
    if device.type != "cuda":
        return _missing(f"it needs a GPU, the tensors are on {device.type}", "not looked for: there is no GPU")
    if not (dist.is_available() and dist.is_nccl_available()):
        return _missing("NCCL is not part of this torch", "not looked for: NCCL is not part of this torch")
    try:
        _, headers = nccl.library_with_headers()
        unchecked = nccl_headers.why_unchecked(headers.version)
        note = f"; {unchecked}" if unchecked else ""
        found = f"{nccl_headers.dotted(headers.version)} in {headers.nccl}{note}"
        headers.in_memory()
        compiler.load_nvrtc()
    except (TokenloomError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return _missing(f"NCCL's headers cannot be used, or NVRTC is missing: {reason}", f"not usable: {reason}")
    plugin = nccl_plugin()
    over = [*cards(), *([f"plugin {plugin}"] if plugin else [])]
    if not over:
        return _missing(f"no RDMA card in {RDMA_CARDS}, and no plugin of NCCL's is named", found)
    return Availability("gin", True, f"over {', '.join(over)}{note}", {"headers": found})


def cards() -> list[str]:
    """The names of this host's RDMA cards."""
    return sorted(each.name for each in RDMA_CARDS.iterdir()) if RDMA_CARDS.is_dir() else []


def _missing(why: str, headers: str) -> Availability:
    return Availability("gin", False, why, {"headers": headers})
