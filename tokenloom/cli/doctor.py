"""``tokenloom doctor``: what this machine has, which backends work here, and why the others do not."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import warnings
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tokenloom._version import __version__
from tokenloom.backends import registry
from tokenloom.errors import BackendUnavailable
from tokenloom.jit import compiler

NVIDIA_SMI_LIMIT_S = 20.0
GIB = 2**30


def examine() -> dict[str, Any]:
    """Everything that ``tokenloom doctor`` knows, ready for JSON.

    Never raises for what a machine lacks: it is reported as missing, with the reason.

    Returns:
        software: name -> version, or why there is none.
        gpus: index, name, memory_gib, compute_capability, nvlinks (active ones; None: could not be read).
        peer_access: [i][j] whether GPU i can read and write the memory of GPU j.
        groups: for every kind of ranks possible here: ranks, transport, device, what "auto" picks, why better ones
            were not picked, and name, works, why of every backend.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a driver it cannot use; _gpus_missing reports it
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "software": {
            "tokenloom": __version__,
            "Python": platform.python_version(),
            "OS": platform.platform(),
            "CPU cores": _cpu_cores(),
            "torch": str(torch.__version__),
            "CUDA of torch": torch.version.cuda or "none: a CPU build of torch",
            "NVIDIA driver": _driver_version(),
            "GPUs": str(num_gpus) if num_gpus else _gpus_missing(),
            "NCCL": _nccl_version(),
            "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else "not part of this torch",
            "NVRTC": _nvrtc_version(),
        },
        "gpus": [_gpu(index) for index in range(num_gpus)],
        "peer_access": [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(num_gpus)] for i in range(num_gpus)
        ],
        "groups": _groups(num_gpus),
    }


def _cpu_cores() -> str:
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    return str(present) if allowed == present else f"{allowed} of {present} for this process"


def _gpus_missing() -> str:
    if torch.version.cuda is None:
        return "none that this torch could use"
    try:
        torch.cuda.init()
    except Exception as error:
        return f"none: {_first_line(error)}"
    return "none"


def _nccl_version() -> str:
    if not (dist.is_available() and dist.is_nccl_available()):
        return "not part of this torch"
    try:
        version = torch.cuda.nccl.version()
    except Exception as error:
        return f"does not load: {_first_line(error)}"
    return ".".join(map(str, version))


def _nvrtc_version() -> str:
    try:
        return compiler.nvrtc_version()
    except BackendUnavailable as error:
        return str(error)


def _driver_version() -> str:
    """NVML's answer; from nvidia-smi, which comes with every driver, where pynvml is not installed."""
    nvml = _nvml()
    if nvml is not None:
        return _text(nvml.nvmlSystemGetDriverVersion())
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "none found"
    return found.stdout.split("\n")[0].strip() or "none found"


def _nvml() -> Any | None:
    """The module pynvml, ready for use; None if it is not installed or finds no driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return None
    return nvml


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "nvlinks": _active_nvlinks(properties),
    }


def _active_nvlinks(properties: Any) -> int | None:
    nvml = _nvml()
    if nvml is None:
        return None
    try:  # by UUID: NVML counts GPUs that are hidden from torch
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    except Exception:
        return None
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break  # this GPU has no more links
    return active


def _groups(num_gpus: int) -> list[dict[str, Any]]:
    """What a Communicator would pick on this machine's GPUs, and on its CPU."""
    kinds = []
    if num_gpus and dist.is_available() and dist.is_nccl_available():
        kinds.append((f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}", "nccl", "cuda"))
    if dist.is_available() and dist.is_gloo_available():
        kinds.append(("processes on the CPU", "gloo", "cpu"))
    groups = []
    for ranks, transport, device in kinds:
        found = registry.availability(transport, torch.device(device))
        auto: str | None
        try:
            auto, not_picked = registry.choose("auto", [found])
        except BackendUnavailable as error:
            auto, not_picked = None, [str(error)]
        groups.append(
            {
                "ranks": ranks,
                "transport": transport,
                "device": device,
                "auto": auto,
                "not_picked": not_picked,
                "backends": [{"name": each.name, "works": each.works, "why": each.why} for each in found],
            }
        )
    return groups


def _text(value: str | bytes) -> str:
    """Old versions of pynvml answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def show(console: Console, report: dict[str, Any]) -> None:
    """Print what :func:`examine` found."""
    machine = Table("this machine", "", title="Machine", title_justify="left", show_header=False)
    for name, value in report["software"].items():
        machine.add_row(name, value)
    console.print(machine)
    if report["gpus"]:
        console.print(_gpu_table(report))
    for group in report["groups"]:
        console.print(_backend_table(group))
        for reason in group["not_picked"]:
            console.print(f"not picked: {reason}", markup=False, highlight=False)
    if not report["groups"]:
        console.print("This torch has neither NCCL nor gloo: only a Communicator of one rank works here.")


def _gpu_table(report: dict[str, Any]) -> Table:
    table = Table(title="GPUs, and which other GPU's memory each can reach", title_justify="left")
    for name in ("", "name", "memory GiB", "capability", "NVLinks", *(str(gpu["index"]) for gpu in report["gpus"])):
        table.add_column(name)
    for gpu, reach in zip(report["gpus"], report["peer_access"], strict=True):
        links = "unknown (needs pynvml)" if gpu["nvlinks"] is None else str(gpu["nvlinks"])
        row = [str(gpu["index"]), gpu["name"], str(gpu["memory_gib"]), gpu["compute_capability"], links]
        table.add_row(*row, *("yes" if reached else "no" for reached in reach))
    return table


def _backend_table(group: dict[str, Any]) -> Table:
    title = f"Backends for {group['ranks']}, over {group['transport']}"
    table = Table("backend", "works here", "picked by auto", "why", title=title, title_justify="left")
    for each in group["backends"]:
        picked = "yes" if each["name"] == group["auto"] else ""
        table.add_row(each["name"], "[green]yes[/]" if each["works"] else "no", picked, each["why"])
    return table
