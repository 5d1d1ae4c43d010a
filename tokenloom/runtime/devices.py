"""Which device a group uses, its model, and what this process may use of a GPU."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import torch.distributed as dist

from tokenloom.errors import InvalidArgument
from tokenloom.jit.kernel import checked, load_driver


def pick_device(device: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    """The device that was asked for. None picks the current GPU for NCCL groups and the CPU otherwise.

    Raises:
        InvalidArgument: torch has no such device here.
    """
    if device is None:
        nccl = group is not None and "nccl" in dist.get_backend_config(group)
        device = "cuda" if nccl and torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError):
        picked = None
    if picked is None or picked.type == "meta":
        raise InvalidArgument(f"device is {device!r}, expected 'cpu', or a GPU such as 'cuda' or 'cuda:0'")
    if picked.type == "cpu":
        return torch.device("cpu")  # "cpu:0" is the same, but no GPU's index
    try:
        if picked.type == "cuda" and picked.index is None:
            picked = torch.device("cuda", torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:  # what torch raises without CUDA differs by build
        reason = str(error).splitlines()[0]
        raise InvalidArgument(
            f"device is {device!r}, which torch cannot use here ({reason}); pass device='cpu'"
        ) from None
    return picked


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


def usable_sms(device_index: int) -> int:
    """SMs that kernels of this process may run on: fewer than the GPU has under an MPS limit or a green context."""
    driver = load_driver()
    with torch.cuda.device(device_index):
        torch.cuda.current_stream(device_index).synchronize()  # makes torch's context current
        resource = checked(
            driver.cuCtxGetDevResource(
                checked(driver.cuCtxGetCurrent()), driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            )
        )
    return int(resource.sm.smCount)


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody has allocated."""
    return torch.cuda.mem_get_info(device)[0]
