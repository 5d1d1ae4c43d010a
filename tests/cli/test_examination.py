"""What ``tokenloom doctor`` finds, on machines that lack everything and on GPUs that this one may not have."""

from __future__ import annotations

import importlib
import io
import json
import re
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from tokenloom.backends import registry
from tokenloom.backends.nodes import gin, nccl
from tokenloom.cli import examination
from tokenloom.errors import BackendUnavailable
from tokenloom.jit import compiler, nccl_headers

UNCHECKED = "NCCL 2.29.7 is not among the checked versions 2.28.9, 2.30.7, 2.32.3"


def shown(report: dict[str, Any], width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    examination.show(console, report)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_this_machine() -> None:
    """Whatever it is, the report is JSON, and says of every backend whether it works and why."""
    report = json.loads(json.dumps(examination.examine()))
    assert report["software"]["torch"] == str(torch.__version__)
    assert report["groups"], "the tests need gloo"
    for group in report["groups"]:
        assert tuple(each["name"] for each in group["backends"]) == registry.names()
        assert all(each["why"] for each in group["backends"])
        picked = next(each for each in group["backends"] if each["name"] == group["auto"])
        assert picked["works"]
        better = [name for name in registry.names()[: registry.names().index(group["auto"])] if name != "network"]
        assert len(group["not_picked"]) == len(better), "every better one for one node has its reason"
    assert re.fullmatch(r"ipc:\[\d+\]|unknown", report["software"]["IPC namespace"])
    text = shown(report)
    assert all(name in text for name in registry.names())
    assert "…" not in shown(report, width=80), "nothing is cut off in a terminal of the usual width"
    on_nodes = {each["name"]: (each["own_node"], each["other_nodes"]) for each in report["groups"][-1]["backends"]}
    by_kernels = {"nvlink": ("nvlink", None), "gin": ("nvlink", "gin"), "padded": ("nvlink", "collective")}
    assert on_nodes == by_kernels | dict.fromkeys(("network", "collective"), ("collective",) * 2)


def test_a_machine_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, no driver, no nvidia-smi, no optional package, a torch without torch.distributed."""

    def missing(name: str) -> Any:
        raise ImportError(name)

    def no_program(*arguments: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    def no_nvrtc() -> Any:
        raise BackendUnavailable("NVRTC is missing; pip install it")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(compiler, "load_nvrtc", no_nvrtc)
    monkeypatch.setattr(subprocess, "run", no_program)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(examination, "IPC_NAMESPACE", "/no/such/file")
    report = examination.examine()
    assert report["software"]["NVIDIA driver"] == "none found"
    assert report["software"]["NVRTC"] == "NVRTC is missing; pip install it"
    assert report["software"]["IPC namespace"] == "unknown"
    assert report["software"]["gloo"] == report["between_nodes"]["NCCL library"] == "not part of this torch"
    assert report["between_nodes"]["GIN"] == "no: NCCL is not part of this torch"
    assert (report["gpus"], report["peer_access"], report["groups"]) == ([], [], [])
    assert "only a Communicator of one rank works here" in shown(report)


def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch that finds no usable GPU: its reason is what the user needs to see."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore lines")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert examination.examine()["software"]["GPUs"] == "none: The NVIDIA driver on your system is too old"


@pytest.mark.parametrize(
    ("library", "version", "cards", "headers_say", "gin_says"),
    [
        ((2, 28, 9), (2, 28, 9), ("mlx5_1", "mlx5_0"), "2.28.9 in /nccl", "possible over mlx5_0, mlx5_1; NCCL tells"),
        ((2, 28, 9), (2, 28, 9), (), "2.28.9 in /nccl", "no: no RDMA card in "),
        ((2, 29, 7), (2, 29, 7), ("mlx5_0",), f"2.29.7 in /nccl; {UNCHECKED}", f"possible over mlx5_0; {UNCHECKED}; "),
        ((2, 29, 7), (2, 29, 7), (), f"2.29.7 in /nccl; {UNCHECKED}", "no: no RDMA card in "),
        (
            (2, 30, 7),
            (2, 28, 9),
            ("mlx5_0",),
            "not usable: NCCL's library is 2.30.7, but",
            "no: NCCL's headers cannot be used",
        ),
    ],
)
def test_nccl_for_kernels(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    library: tuple[int, int, int],
    version: tuple[int, int, int],
    cards: tuple[str, ...],
    headers_say: str,
    gin_says: str,
) -> None:
    """With a card and without; headers of another version than the library's; a version that nobody has checked."""
    for card in cards:
        (tmp_path / card).mkdir()
    headers = nccl_headers.Headers(Path("/nccl"), Path("/cuda"), Path("/cccl"), version)
    loaded = types.SimpleNamespace(version=lambda: library)
    monkeypatch.setattr(gin, "RDMA_CARDS", tmp_path)
    monkeypatch.delenv("NCCL_GIN_PLUGIN", raising=False)
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "loaded_library", lambda: Path("libnccl.so.2"))
    monkeypatch.setattr(nccl, "Nccl", lambda path: loaded)
    monkeypatch.setattr(nccl, "find_headers", lambda path: headers)
    monkeypatch.setattr(nccl_headers.Headers, "in_memory", lambda self: {})
    monkeypatch.setattr(compiler, "load_nvrtc", lambda: None)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.0")
    found = examination.examine()["between_nodes"]
    assert found["NCCL headers"].startswith(headers_say)
    assert found["GIN"].startswith(gin_says)


class FakeDriver:
    """The driver's bindings as far as a trial of sharing memory uses them. GPU 1 cannot share."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.current = -1

    def cuMemAlloc(self, num_bytes: int) -> tuple[int, int]:
        self.allocated.append(self.current)
        return 0, 0x1000 + self.current

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, str]:
        if address == 0x1001:
            raise RuntimeError("CUDA driver: CUDA_ERROR_NOT_SUPPORTED")
        return 0, "handle"

    def cuMemFree(self, address: int) -> None:
        self.allocated.remove(address - 0x1000)


@pytest.mark.parametrize("nvml_installed", [True, False])
def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, nvml_installed: bool) -> None:
    """Two GPUs, with and without pynvml: names, memory, links. Only one reaches the other, and only one can share
    its memory with other processes; the trial leaves nothing allocated."""

    class FakeNvml(types.ModuleType):
        NVML_NVLINK_MAX_LINKS = 18
        NVMLError = RuntimeError

        @staticmethod
        def nvmlInit() -> None:
            pass

        @staticmethod
        def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
            return uuid

        @staticmethod
        def nvmlDeviceGetNvLinkState(handle: str, link: int) -> int:
            if link == 6:
                raise RuntimeError("no such link")
            return int(link != 0)

    def import_module(name: str) -> Any:
        if name == "pynvml" and nvml_installed:
            return FakeNvml(name)
        raise ImportError(name)

    def run(*arguments: Any, **kwargs: Any) -> Any:
        return types.SimpleNamespace(stdout="570.2\n570.2\n")

    def no_library() -> Path:
        raise BackendUnavailable("no libnccl is loaded")

    gpu = types.SimpleNamespace(name="Fake H200", total_memory=140 * 2**30, major=9, minor=0, uuid="0-1")
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(subprocess, "run", run)
    driver = FakeDriver()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        driver.current = index
        yield

    monkeypatch.setattr(examination, "load_driver", lambda: driver)
    monkeypatch.setattr(examination, "checked", lambda result: result[1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) == (0, 1))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 4))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "loaded_library", no_library)
    report = examination.examine()
    assert report["software"]["NVIDIA driver"] == "570.2"
    assert report["between_nodes"]["NCCL library"] == "2.30.4"
    assert [gpu["nvlinks"] for gpu in report["gpus"]] == ([5, 5] if nvml_installed else [None, None])
    assert report["between_nodes"]["NCCL headers"] == "not usable: no libnccl is loaded"
    assert report["gpus"][1]["memory_gib"] == 140.0
    assert report["peer_access"] == [[True, True], [False, True]]
    shares = [gpu["shares_memory"] for gpu in report["gpus"]]
    assert shares == ["yes", "no: CUDA driver: CUDA_ERROR_NOT_SUPPORTED"]
    assert driver.allocated == []
    assert [group["transport"] for group in report["groups"]] == ["nccl", "gloo"]
    text = shown(report)
    assert "Fake H200" in text
    assert "CUDA_ERROR_NOT_SUPPORTED" in text.replace("\n", " ")
    assert "one IPC namespace" in text
    assert "9.0" in text
    assert ("needs pynvml" in text) is not nvml_installed


# -- other nodes -------------------------------------------------------------------------------------------------


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for cards, where no plugin is named."""
    monkeypatch.setattr(gin, "RDMA_CARDS", tmp_path)
    monkeypatch.delenv("NCCL_GIN_PLUGIN", raising=False)
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    return tmp_path


def test_a_host_without_gpus(cards: Path) -> None:
    """Every row says something, and none of them more than one process can know."""
    found = examination.between_nodes("2.28.9", [])
    assert all(found.values())
    assert found["nodes and rails"].startswith(
        "1 node: all processes of this host, on the CPU. One process sees no other"
    )
    assert found["ranks_per_node"].splitlines() == [
        "1: 4 processes as 4 nodes of 1; 1 rail of 4",
        "2: 4 processes as 2 nodes of 2; 2 rails of 2",
    ]
    assert found["network cards"] == f"none in {cards}"
    assert found["NCCL plugin"].startswith("none: ")
    assert found["NCCL library"] == "2.28.9"


@pytest.mark.parametrize(
    ("reached", "says"),
    [
        ({(i, j) for i in range(4) for j in range(4)}, "1 node. One process"),
        ({(i, j) for i in range(4) for j in range(4) if i // 2 == j // 2}, "2 nodes of 2; 2 rails of 2. One"),
        (
            {(i, j) for i in range(4) for j in range(4) if (i == 3) == (j == 3)},
            "2 nodes, no rails: nodes have unequal",
        ),
        ({(i, i) for i in range(4)} | {(0, 1)}, "1 node; ranks see different nodes: rank 0 sees ranks 0, 1"),
    ],
)
def test_gpus_of_a_host(cards: Path, reached: set[tuple[int, int]], says: str) -> None:
    """GPUs that do not reach each other are nodes, by the rule that communicators have."""
    found = examination.between_nodes("2.28.9", [[(i, j) in reached for j in range(4)] for i in range(4)])
    assert found["nodes and rails"].startswith(f"a rank on each GPU of this host: {says}")
    assert found["ranks_per_node"].startswith("1: 4 GPUs as 4 nodes of 1")


def test_cards_and_a_plugin(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port says what the kernel knows of it: a card whose cable is out is found too. Brackets are no markup."""
    port = cards / "mlx5_1" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("link_layer", "InfiniBand\n"), ("rate", "400 Gb/sec (4X NDR)\n"), ("state", "1: DOWN\n")):
        (port / name).write_text(text)
    (cards / "mlx5_0").mkdir()
    monkeypatch.setenv("NCCL_NET_PLUGIN", "libnccl-net-[some].so")
    found = examination.between_nodes("2.28.9", [])
    assert found["network cards"] == "mlx5_0\nmlx5_1 (port 1: InfiniBand, 400 Gb/sec (4X NDR), 1: DOWN)"
    assert found["NCCL plugin"] == "libnccl-net-[some].so"
    assert "libnccl-net-[some].so" in shown(examination.examine())
