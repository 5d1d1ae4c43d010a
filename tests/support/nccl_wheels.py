"""NCCL's headers of versions that this machine does not run, from the wheels on the package index. For slow tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tokenloom.jit.nccl_headers import Headers, version_of

CUDA_WHEELS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88", "nvidia-cuda-cccl==13.0.85")
"""Headers of CUDA: those of crt are for g++ alone."""
LIMIT_S = 300


def headers_of(version: str) -> Headers:
    """The headers of a version. The test is skipped where pip cannot get them."""
    nccl = _unpacked(f"nvidia-nccl-cu13=={version}") / "nvidia" / "nccl" / "include"
    runtime = cuda_headers()
    return Headers(nccl, runtime, runtime / "cccl", version_of(nccl))


def cuda_headers() -> Path:
    """The folder with CUDA's. The test is skipped where pip cannot get them."""
    return _unpacked(*CUDA_WHEELS) / "nvidia" / "cu13" / "include"


def _unpacked(*wheels: str) -> Path:
    """A folder with the headers of wheels. It stays in the folder for temporary files, without the wheels."""
    found = _download(wheels)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@cache
def _download(wheels: tuple[str, ...]) -> Path | str:
    """The folder, or why there is none."""
    shared = Path(tempfile.gettempdir()) / f"tokenloom-nccl-headers-{os.getuid()}"
    shared.mkdir(mode=0o700, exist_ok=True)
    folder = shared / "+".join(wheels)
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=shared) as aside:
        options = ("--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=1", "--dest", aside)
        command = [sys.executable, "-m", "pip", "download", *options, *wheels]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"pip did not download {' '.join(wheels)} in {LIMIT_S} s"
        if done.returncode != 0:
            return f"pip cannot download {' '.join(wheels)}: {(done.stderr.splitlines() or ['no reason given'])[-1]}"
        unpacked = Path(aside, "unpacked")
        for wheel in Path(aside).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [each for each in archive.namelist() if "/include/" in each])
        try:
            unpacked.rename(folder)
        except OSError:  # another process was quicker
            if not folder.is_dir():
                raise
    return folder
