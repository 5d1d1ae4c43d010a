"""Examination by ``tokenloom doctor``: the machine, the backends that work here, and why others do not."""

from __future__ import annotations

import importlib
import os
import platform
import socket
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokenloom._version import __version__
from tokenloom.backends import registry
from tokenloom.backends.nodes import gin
from tokenloom.bench.setup import driver
from tokenloom.bench.tables import Fitted, counted, say
from tokenloom.env import nccl_plugin
from tokenloom.errors import BackendUnavailable
from tokenloom.jit import compiler
from tokenloom.jit.kernel import checked, load_driver
from tokenloom.runtime.topology import Place, Topology, find_nodes, pretended

GIB = 2**30
EXPORTED_BYTES = 2 * 2**20
"""Size of the memory that is offered to other processes as a trial."""
PROCESSES = 4
"""Ranks of an example, where there are not two GPUs."""
IPC_NAMESPACE = "/proc/self/ns/ipc"
SHARING_NOTE = (
    "Ranks map each other's memory. For that each GPU must reach the others and share memory with other processes, "
    "and all ranks must be in one IPC namespace. A Communicator tries it when it is made; auto falls back on failure."
)


def examine() -> dict[str, Any]:
    """Everything that ``tokenloom doctor`` knows, ready for JSON.

    It never raises for what a machine lacks, but reports it as missing, with the reason.

    Returns:
        A dict of

        - ``software``: name -> version, or why there is none.
        - ``gpus``: a dict for each GPU: index, name, memory_gib, compute_capability, nvlinks (active ones; None where
          they cannot be read), shares_memory ("yes", or why other processes cannot map its memory).
        - ``peer_access``: [i][j] is whether GPU i can read and write the memory of GPU j.
        - ``between_nodes``: what rows need to reach other nodes, and what there is of it.
        - ``groups``: a dict for every kind of ranks that is possible here: ranks, transport, device, auto (what "auto"
          picks), not_picked (why better backends are not), and backends, each with name, works, why, own_node and
          other_nodes: what carries rows to ranks of the own node and of others, None for ranks that are not reached.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a driver that torch cannot use; _gpus_missing reports it
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    peer_access = [
        [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(num_gpus)] for i in range(num_gpus)
    ]
    return {
        "software": {
            "tokenloom": __version__,
            "Python": platform.python_version(),
            "OS": platform.platform(),
            "CPU cores": _cpu_cores(),
            "torch": str(torch.__version__),
            "CUDA of torch": torch.version.cuda or "none: a CPU build of torch",
            "NVIDIA driver": driver() or "none found",
            "GPUs": str(num_gpus) if num_gpus else _gpus_missing(),
            "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else "not part of this torch",
            "NVRTC": _nvrtc_version(),
            "IPC namespace": _ipc_namespace(),
        },
        "gpus": [_gpu(index) for index in range(num_gpus)],
        "peer_access": peer_access,
        "between_nodes": between_nodes(_nccl_version(), peer_access),
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


def _ipc_namespace() -> str:
    """The kernel's name for it. Processes map each other's GPU memory only within one."""
    try:
        return os.readlink(IPC_NAMESPACE)
    except OSError:
        return "unknown"


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "nvlinks": _active_nvlinks(properties),
        "shares_memory": _shares_memory(index),
    }


def _shares_memory(index: int) -> str:
    """Say "yes" if the driver exports memory of this GPU for other processes, else why not."""
    try:
        api = load_driver()
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # makes the context that memory is allocated in
            address = int(checked(api.cuMemAlloc(EXPORTED_BYTES)))
            try:
                checked(api.cuIpcGetMemHandle(address))
            finally:
                api.cuMemFree(address)
    except (BackendUnavailable, RuntimeError) as error:
        return f"no: {_first_line(error)}"
    return "yes"


def _active_nvlinks(properties: Any) -> int | None:
    """Active NVLinks of a GPU, as pynvml tells; None if it is not installed, or knows neither a driver nor the GPU."""
    try:  # by UUID, because NVML also counts GPUs that are hidden from torch
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
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
    """The backends that a Communicator would find on this machine's GPUs, and on its CPU."""
    kinds = []
    if num_gpus and dist.is_available() and dist.is_nccl_available():
        kinds.append((counted(num_gpus, "GPU"), "nccl", "cuda"))
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
                "backends": [
                    {"name": each.name, "works": each.works, "why": each.why, **_transports(each.name)}
                    for each in found
                ],
            }
        )
    return groups


def _transports(backend: str) -> dict[str, str | None]:
    can = registry.capabilities(backend)
    return {"own_node": can.own_node, "other_nodes": can.other_nodes}


def between_nodes(nccl_library: str, peer_access: list[list[bool]]) -> dict[str, str]:
    """State of each thing that rows need to reach other nodes, or why it is missing.

    Args:
        nccl_library: the version of NCCL that torch has loaded, or why there is none.
        peer_access: [i][j] is whether GPU i reaches the memory of GPU j.
    """
    found = gin.examine(torch.device("cuda"))
    cards = [_card(gin.RDMA_CARDS / each) for each in gin.cards()]
    return {
        "nodes and rails": _nodes(peer_access),
        "ranks_per_node": _pretended(len(peer_access)),
        "network cards": "\n".join(cards) or f"none in {gin.RDMA_CARDS}",
        "NCCL plugin": nccl_plugin() or "none: neither NCCL_GIN_PLUGIN nor NCCL_NET_PLUGIN names one",
        "NCCL library": nccl_library,
        "NCCL headers": found.facts["headers"],
        "GIN": (
            f"possible {found.why}; NCCL tells its type when a communicator is made, and kernels take PROXY alone"
            if found.works
            else f"no: {found.why}"
        ),
    }


def _nodes(peer_access: list[list[bool]]) -> str:
    """The nodes of one rank for each GPU, by the rule that a Communicator has."""
    host = socket.gethostname()
    places = [
        Place(host, str(gpu), tuple(str(peer) for peer, reached in enumerate(reach) if not reached))
        for gpu, reach in enumerate(peer_access)
    ]
    if places:
        nodes = find_nodes(places)
        doubt = f"; {nodes.doubt}" if nodes.num_nodes == 1 and nodes.doubt else ""
        found = f"a rank on each GPU of this host: {nodes.describe()}{doubt}"
    else:
        found = "1 node: all processes of this host, on the CPU"
    return f"{found}. One process sees no other host; tokenloom check-network under torchrun does"


def _pretended(num_gpus: int) -> str:
    """Nodes that each ``ranks_per_node`` makes of the ranks of this host."""
    num_ranks, kind = (num_gpus, "GPUs") if num_gpus > 1 else (PROCESSES, "processes")
    return "\n".join(
        f"{each}: {num_ranks} {kind} as {Topology(pretended(num_ranks, each).node_of).describe()}"
        for each in range(1, num_ranks)
        if num_ranks % each == 0
    )


def _card(folder: Path) -> str:
    """A card, with the kind, rate and state of each port, as far as the kernel tells them."""
    ports = []
    for port in sorted(folder.glob("ports/*")):
        told = [
            (port / name).read_text().strip() for name in ("link_layer", "rate", "state") if (port / name).is_file()
        ]
        ports.append(f"port {port.name}: {', '.join(told)}")
    return f"{folder.name} ({'; '.join(ports)})" if ports else folder.name


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def show(console: Console, report: dict[str, Any]) -> None:
    """Print what :func:`examine` found."""
    console.print(Fitted(_facts("Machine", report["software"])))
    if report["gpus"]:
        console.print(Fitted(_gpu_table(report)))
        console.print(SHARING_NOTE, markup=False)
    console.print(Fitted(_facts("Between nodes", report["between_nodes"])))
    for group in report["groups"]:
        console.print(Fitted(_backend_table(group)))
        say(console, *(f"not picked: {reason}" for reason in group["not_picked"]))
    if not report["groups"]:
        console.print("This torch has neither NCCL nor gloo: only a Communicator of one rank works here.")


def _facts(title: str, facts: dict[str, str]) -> Table:
    table = Table("what", "", title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return table


def _gpu_table(report: dict[str, Any]) -> Table:
    table = Table(title="GPUs, and which other GPU's memory each can reach", title_justify="left")
    headers = ("", "name", "memory GiB", "capability", "NVLinks", "shares memory")
    for name in (*headers, *(str(gpu["index"]) for gpu in report["gpus"])):
        table.add_column(name)
    for gpu, reach in zip(report["gpus"], report["peer_access"], strict=True):
        links = "unknown (needs pynvml)" if gpu["nvlinks"] is None else str(gpu["nvlinks"])
        row = (str(gpu["index"]), gpu["name"], str(gpu["memory_gib"]), gpu["compute_capability"], links)
        table.add_row(*row, gpu["shares_memory"], *("yes" if reached else "no" for reached in reach))
    return table


def _backend_table(group: dict[str, Any]) -> Table:
    title = f"Backends for {group['ranks']}, over {group['transport']}"
    names = ("backend", "works here", "picked by auto", "own node by", "other nodes by", "why")
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for each in group["backends"]:
        picked = "yes" if each["name"] == group["auto"] else ""
        works = "[green]yes[/]" if each["works"] else "no"
        table.add_row(each["name"], works, picked, each["own_node"], each["other_nodes"] or "not reached", each["why"])
    return table
