"""A network card of host memory for NCCL's GIN, compiled by the system's compiler. README.md says what it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CC = shutil.which("gcc")
WHY_NOT = None if CC else "no gcc on this machine"
"""Why the plugin cannot be compiled here; None if it can."""
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Loopback:
    """What was compiled: the plugin, its self-test, and what stands in for the driver."""

    plugin: Path
    selftest: Path
    mock_cuda: Path

    def run_selftest(
        self, num_ranks: int, *, gpus: bool, delay_us: int | None = None, seed: int = 1, limit_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """The self-test in processes of its own, which end after ``limit_s`` at the latest.

        Args:
            num_ranks: processes.
            gpus: on GPUs; else on memory of the host.
            delay_us: holds connections back. None leaves out what depends on it.
            seed: of the delays.
            limit_s: seconds.
        """
        variables = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "GINLOOP_SEED": str(seed)}
        variables |= {} if gpus else {"GINLOOP_LIBCUDA": str(self.mock_cuda)}
        variables |= {} if delay_us is None else {"GINLOOP_DELAY_US": str(delay_us)}
        command = [str(self.selftest), str(self.plugin), str(num_ranks)]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, check=False, timeout=limit_s, errors="replace"
        )

    def environment(self, delay_us: int = 0) -> dict[str, str]:
        """What a rank sets before its first call of NCCL, so that NCCL uses the plugin.

        NCCL believes in nodes where ranks differ in NCCL_HOSTID. NCCL_NET must not be set.

        Args:
            delay_us: holds connections back, so that contexts overtake one another.
        """
        return {
            "GINLOOP_DELAY_US": str(delay_us),
            "NCCL_NET_PLUGIN": str(self.plugin),
            "NCCL_NET_PLUGIN_REF_COUNT": "1",
            "NCCL_GIN_TYPE": "2",
            "NCCL_MNNVL_ENABLE": "0",
            "NCCL_CUMEM_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_IB_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        }


def build(folder: Path, cuda_headers: Path, sources: Path = HERE) -> Loopback:
    """Compile everything.

    Args:
        folder: for what is compiled.
        cuda_headers: folder with cuda.h of CUDA 13.0 or newer.
        sources: this folder, or a copy that a test has changed.
    """
    made = Loopback(folder / "libnccl-net-ginloop.so", folder / "selftest", folder / "libmockcuda.so")
    library = ("-fPIC", "-shared", "-fvisibility=hidden")
    _compile(cuda_headers, made.plugin, *library, *(str(sources / each) for each in ("plugin.c", "net.c")))
    _compile(cuda_headers, made.selftest, str(sources / "selftest.c"))
    _compile(cuda_headers, made.mock_cuda, "-fPIC", "-shared", str(sources / "mock_cuda.c"))
    return made


def _compile(cuda_headers: Path, target: Path, *arguments: str) -> None:
    assert CC is not None, WHY_NOT
    command = [CC, *_FLAGS, f"-I{cuda_headers}", *arguments, "-o", str(target), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
