"""tokenloom doctor: it must not fail on what a machine lacks, nor on GPUs that the tests' machine may not have."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from tokenloom.backends.registry import BACKENDS
from tokenloom.cli import doctor
from tokenloom.errors import BackendUnavailable
from tokenloom.jit import compiler


def shown(report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    doctor.show(console, report)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_this_machine() -> None:
    """Whatever it is: the report is JSON, and says of every backend whether it works and why."""
    report = json.loads(json.dumps(doctor.examine()))
    assert report["software"]["torch"] == str(torch.__version__)
    assert report["groups"], "the tests need gloo"
    for group in report["groups"]:
        assert tuple(each["name"] for each in group["backends"]) == BACKENDS
        assert all(each["why"] for each in group["backends"])
        picked = next(each for each in group["backends"] if each["name"] == group["auto"])
        assert picked["works"]
        better = BACKENDS.index(group["auto"])
        assert len(group["not_picked"]) == better, "every better backend has its reason"
    text = shown(report)
    assert all(name in text for name in BACKENDS)


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
    report = doctor.examine()
    assert report["software"]["NVIDIA driver"] == "none found"
    assert report["software"]["NVRTC"] == "NVRTC is missing; pip install it"
    assert report["software"]["gloo"] == report["software"]["NCCL"] == "not part of this torch"
    assert (report["gpus"], report["peer_access"], report["groups"]) == ([], [], [])
    assert "only a Communicator of one rank works here" in shown(report)


def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch that finds no usable GPU: its reason is what the user needs to see."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore lines")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert doctor.examine()["software"]["GPUs"] == "none: The NVIDIA driver on your system is too old"


@pytest.mark.parametrize("nvml_installed", [True, False])
def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, nvml_installed: bool) -> None:
    """Two GPUs of which only one reaches the other, with and without pynvml: names, memory, links, the reach."""

    class FakeNvml(types.ModuleType):
        NVML_NVLINK_MAX_LINKS = 18
        NVMLError = RuntimeError

        @staticmethod
        def nvmlInit() -> None:
            pass

        @staticmethod
        def nvmlSystemGetDriverVersion() -> bytes:
            return b"580.1"  # old versions answer in bytes

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

    gpu = types.SimpleNamespace(name="Fake H200", total_memory=140 * 2**30, major=9, minor=0, uuid="0-1")
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) == (0, 1))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 4))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    report = doctor.examine()
    assert report["software"]["NVIDIA driver"] == ("580.1" if nvml_installed else "570.2")
    assert report["software"]["NCCL"] == "2.30.4"
    assert [gpu["nvlinks"] for gpu in report["gpus"]] == ([5, 5] if nvml_installed else [None, None])
    assert report["gpus"][1]["memory_gib"] == 140.0
    assert report["peer_access"] == [[True, True], [False, True]]
    assert [group["transport"] for group in report["groups"]] == ["nccl", "gloo"]
    text = shown(report)
    assert "Fake H200" in text
    assert "9.0" in text
    assert ("needs pynvml" in text) is not nvml_installed
