"""The group of processes that torchrun has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from tokenloom.env import rendezvous
from tokenloom.errors import InvalidArgument, PeerTimeout


def by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def local_device(device: str | None) -> torch.device:
    """The device of this process: its GPU by its place on the host, or the CPU where there are no GPUs.

    Args:
        device: "cpu" or "cuda"; None: the GPU if there are any.

    Raises:
        InvalidArgument: the host has fewer GPUs than processes.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device is None and not gpus):
        return torch.device("cpu")
    place = dist.get_node_local_rank(0)
    if place >= gpus:
        raise InvalidArgument(
            f"there are {place + 1} processes or more on this host, expected at most {gpus}, one for each GPU; pass "
            "--device cpu"
        )
    return torch.device("cuda", place)


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """Join the others, over NCCL on GPUs, else over gloo; leave them at the end, unless that failed.

    Raises:
        PeerTimeout: not all came.
    """
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s), device_id=device if gpu else None
        )
    except RuntimeError as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        _, _, rank = rendezvous()
        raise PeerTimeout(rank, [], "joining the process group", 0, cause) from error
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()  # not after an error: without a rank it may wait for ever
